"""rebalance: move the experts of a layer between ranks, so that each has as much to do.

R ranks with S slots each; slot s of rank r holds one expert, whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_ops.checks import check_type
from moe_ops.nn.layer import MoELayer
from moe_ops.parallel.agreement import check_agreement, check_group
from moe_ops.parallel.replicas import ReplicatedPlacement, balanced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.no_grad()
def rebalance(layer: MoELayer, group: ProcessGroup) -> ReplicatedPlacement:
    """Place the experts of a layer by the load that it has counted, and count anew.

    All ranks call it between steps. It reads the load on the host, replicates the experts with the
    most tokens (`balanced`), and sends weights, biases and scales to the ranks that lack them.
    Tensors keep their memory, so captured CUDA graphs go on with the new placement; each is held
    twice for a moment, one after the other. Outputs stay as they were, but for the roundings of
    what ranks add up. If the load would not be spread better, nothing moves.

    Args:
        layer: made by `from_config` with a group and `enable_eplb`.
        group: the layer's.

    Returns:
        The placement that the layer has now.

    Raises:
        ValueError: no MoELayer or one without replicas, no group or one of another size, weights
            that are sharded otherwise, or ranks whose placements differ.
    """
    check_type("layer", layer, MoELayer)
    check_group(group)
    replicas = layer.replicas
    if replicas is None:
        raise ValueError(
            "layer must have replicas; make it by MoELayer.from_config with a group, and "
            "enable_eplb in its ParallelConfig"
        )
    old: ReplicatedPlacement = replicas.placement
    if group.size() != old.ep_size:
        raise ValueError(
            f"group must be the layer's, of {old.ep_size} ranks, got one of {group.size()}"
        )
    check_agreement({"placement of the layer": old.slots}, group)
    load = layer.expert_load.clone()
    torch.distributed.all_reduce(load, group=group)
    counted = [float(tokens) for tokens in load.tolist()]
    new = balanced(counted, old.ep_size, old.num_slots)
    tensors = [*_tensors(layer)]  # raises before anything is changed
    layer.expert_load.zero_()
    if max(new.rank_loads(counted)) >= max(old.rank_loads(counted)):
        return old
    for tensor in tensors:
        _move(tensor, old, new, group)
    replicas.place(new)
    return new


def _tensors(layer: MoELayer) -> Iterator[Tensor]:
    """All that has one entry for each of this rank's experts."""
    for name, parameter in layer.experts.named_parameters():
        weight: Any = parameter
        if hasattr(weight, "full_tensor"):
            raise ValueError(
                f"layer must hold its experts as plain or quantized tensors, got a DTensor for "
                f"{name}; replicated experts are not sharded any further"
            )
        if getattr(weight, "scheme", None) is None:
            yield weight
        else:
            for part in weight._per_expert:
                yield getattr(weight, part)


def _move(
    tensor: Tensor,  # (S, ...)
    old: ReplicatedPlacement,
    new: ReplicatedPlacement,
    group: ProcessGroup,
) -> None:
    """Give a tensor the entries of the new placement, in place."""
    rank, dist = group.rank(), torch.distributed
    moved = torch.empty_like(tensor)
    sent: list[Any] = []
    arrived: list[tuple[int, Tensor]] = []
    holders = old.replicas()
    for target, slots in enumerate(new.slots):
        for slot, expert in enumerate(slots):
            if expert in old.slots[target]:  # nothing is sent
                if target == rank:
                    moved[slot] = tensor[old.slots[rank].index(expert)]
                continue
            ids = holders[expert]
            source, there = divmod(ids[(target + slot) % len(ids)], old.num_slots)
            if source == rank:
                peer = dist.get_global_rank(group, target)
                sent.append(dist.P2POp(dist.isend, _bytes(tensor[there]), peer, group))
            elif target == rank:
                peer = dist.get_global_rank(group, source)
                arrived.append((slot, torch.empty_like(_bytes(tensor[0]))))
                sent.append(dist.P2POp(dist.irecv, arrived[-1][1], peer, group))
    if sent:
        for work in dist.batch_isend_irecv(sent):
            work.wait()
    for slot, data in arrived:
        moved[slot] = data.view(tensor.dtype).view(tensor.shape[1:])
    tensor.copy_(moved)


def _bytes(entry: Tensor) -> Tensor:
    """Its elements as bytes, which every library of collectives sends."""
    return entry.detach().contiguous().reshape(-1).view(torch.uint8)
