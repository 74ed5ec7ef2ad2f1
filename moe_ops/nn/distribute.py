"""distribute(): MoE layers that are built already, spread over the devices of a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from moe_ops.checks import check_size, check_type
from moe_ops.nn.layer import MoELayer
from moe_ops.nn.spread import label_of
from moe_ops.parallel import invariance
from moe_ops.parallel.agreement import check_agreement
from moe_ops.parallel.columns import shard_w2, shard_w13
from moe_ops.parallel.config import ParallelConfig
from moe_ops.parallel.dispatch import make_dispatcher
from moe_ops.parallel.placement import Placement, shard_experts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_RANKS = ("tp_rank", "pcp_rank", "dp_rank", "ep_rank", "sp_rank")


def distribute(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    max_num_tokens: int = 256,
    sequence_parallel: bool = False,
    enable_expert_parallel: bool = True,
    **options: Any,
) -> nn.Module:
    """Spread the MoE layers of a model over all devices of a mesh, in place.

    Of each `MoELayer` this process keeps its share of the experts, weights and biases, plain or
    quantized with their scales: whole experts, or columns of all. They are copies, so that the
    memory of the others is free once nobody else holds it. From then on the layer is what
    `MoELayer.from_config(config, group=...)` makes: each rank passes its own tokens, or all pass
    the same, and gets their outputs. Router, shared expert and all other modules stay as they are.
    Weights may be quantized before or afterwards, each rank its own.

    All ranks of the mesh call this with equal models, which they compare by names, shapes and
    schemes, not by values. Parameters are new ones: build optimizers afterwards.

    Args:
        model: a module that is or contains MoE layers, also on the meta device.
        mesh: as in `ParallelConfig.from_mesh`, e.g. `init_device_mesh("cuda", (8,),
            mesh_dim_names=("dp",))` where each device has tokens of its own, "tp" where all have
            the same.
        max_num_tokens: the most tokens that one rank passes in one call.
        sequence_parallel: the devices along "tp" have different tokens.
        enable_expert_parallel: place whole experts; else cut each along its intermediate
            dimension.
        options: all2all_backend and expert_placement, as in `ParallelConfig`.

    Returns:
        The model.

    Raises:
        ValueError: no MoE layer; one that is spread already, by a group, an expert_map or
            DTensors, or that has adapters; one that asks for batch invariance where sums are not
            those of one device; fewer experts than ranks; columns as `shard_w13` refuses them,
            and biases beside them; enable_eplb; a deployment or mesh that
            `ParallelConfig.from_mesh` or `make_dispatcher` refuses; or ranks that differ, naming
            layer, field and ranks. The model is then as it was.
    """
    check_type("model", model, nn.Module)
    check_size("max_num_tokens", max_num_tokens)
    parallel = ParallelConfig.from_mesh(
        mesh,
        sequence_parallel=sequence_parallel,
        enable_expert_parallel=enable_expert_parallel,
        **options,
    )
    if parallel.enable_eplb:
        raise ValueError(
            "enable_eplb must be left out of distribute, got True: replicas take slots that a "
            "layer is made with, by MoELayer.from_config(config, group=...)"
        )
    layers = {name: m for name, m in model.named_modules() if isinstance(m, MoELayer)}
    if not layers:
        raise ValueError(f"model must contain MoELayers, got {type(model).__name__} without any")
    for name, layer in layers.items():
        _check(name, layer, parallel)
    group = (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
    common = {k: v for k, v in vars(parallel).items() if k not in _RANKS}
    common |= {"max_num_tokens": max_num_tokens}
    for name, layer in layers.items():
        weights = {f"{name} {key}": _facts(t) for key, t in _weights(layer).items()}
        common |= weights | {f"{name} top_k": layer.top_k}
    check_agreement(common, group)
    found = [
        (
            layer,
            {key: _share(layer, key, t, parallel) for key, t in _weights(layer).items()},
            make_dispatcher(
                parallel,
                group,
                max_num_tokens=max_num_tokens,
                label=label_of(name, layer.num_experts),
            ),
        )
        for name, layer in layers.items()
    ]
    for layer, shares, dispatcher in found:
        for key, share in shares.items():
            old = getattr(layer.experts, key)
            setattr(layer.experts, key, nn.Parameter(share, requires_grad=old.requires_grad))
        if parallel.use_ep:
            layer.place_experts(_placement(layer, parallel).expert_map(parallel.ep_rank))
        layer.dispatcher = dispatcher
        layer.not_invariant = invariance.why_not(parallel, layer.num_experts, dispatcher)
    return model


def _check(name: str, layer: MoELayer, parallel: ParallelConfig) -> None:
    where = f"layer {name!r}"
    invariance.check(layer.batch_invariant, invariance.why_not(parallel, layer.num_experts))
    if layer.dispatcher is not None or layer.expert_map is not None:
        raise ValueError(f"{where} must hold all of its experts, got one that is spread already")
    if layer.lora is not None:
        raise ValueError(f"{where} must have no adapters, got some; add them afterwards")
    for key, weight in _weights(layer).items():
        if hasattr(weight, "device_mesh"):
            raise ValueError(f"{key} of {where} must be no DTensor; distribute before fully_shard")
    if parallel.use_ep and parallel.ep_size > layer.num_experts:
        raise ValueError(
            f"{where} must have at least one expert for each of {parallel.ep_size} ranks, got "
            f"{layer.num_experts}"
        )
    if parallel.tp_size > 1 and layer.experts.down_proj_bias is not None:
        raise ValueError(
            f"{where} must have no biases where experts are cut into columns: each device would "
            "add that of the second projection; use expert parallelism"
        )


def _weights(layer: MoELayer) -> dict[str, Tensor]:
    return dict(layer.experts.named_parameters(recurse=False))


def _facts(weight: Tensor) -> tuple:
    return tuple(weight.shape), weight.dtype, getattr(weight, "scheme", "")


def _placement(layer: MoELayer, parallel: ParallelConfig) -> Placement:
    return Placement(layer.num_experts, parallel.ep_size, parallel.expert_placement)


def _share(layer: MoELayer, key: str, weight: Tensor, parallel: ParallelConfig) -> Tensor:
    """A copy of what this rank holds of a weight or bias."""
    weight = weight.detach()
    if parallel.use_ep:
        return shard_experts(weight, _placement(layer, parallel), parallel.ep_rank)
    size, rank = parallel.tp_size, parallel.tp_rank
    if key == "down_proj":
        return shard_w2(weight, size, rank)
    activation = layer.activation
    return shard_w13(
        weight, size, rank, gated=activation.gated, interleaved=activation.interleaved
    )
