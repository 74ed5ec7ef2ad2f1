"""The mailboxes of this process: made at the first exchange of a kind, and kept as long as their
process group.

On GPUs they are symmetric memory of torch, on CPUs files that the processes of a host share.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_ops.kernels.comm.mailbox import EMPTY, Mailbox
from moe_ops.meta.symmetric import SymmetricLayout
from moe_ops.parallel.agreement import check_agreement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_RANKS = 16  # kernels are unrolled over ranks


class _Kept(NamedTuple):
    mailbox: Mailbox
    handle: Any  # what keeps the peers' memory mapped


# not by the name of a group, which is given anew after destroy_process_group
_kept: WeakKeyDictionary[ProcessGroup, dict[tuple, _Kept]] = WeakKeyDictionary()


def mailbox_of(
    group_name: str, device: torch.device, kind: str, layout: SymmetricLayout, label: str
) -> Mailbox:
    """The mailbox of a group for one kind of exchange. The first call for a layout is collective:
    it allocates the buffers, and returns once those of all ranks can be written to.

    Args:
        group_name: of the process group.
        device: of this rank's rows.
        kind: exchanges of different kinds share no mailbox.
        layout: of the buffers.
        label: what errors call the layer.

    Raises:
        ValueError: the group, its devices or the layout cannot be served, with every reason; or
            ranks whose layouts differ.
        RuntimeError: a CUDA graph is being captured and the layout is new.
    """
    resolve: Any = torch.distributed.distributed_c10d._resolve_process_group
    group = resolve(group_name)
    of_group = _kept.setdefault(group, {})
    kept = of_group.get((device, kind, layout))
    if kept is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{label} has no symmetric memory for this call and cannot allocate any while a "
                "CUDA graph is captured; call it once on all ranks with as many tokens, then "
                "capture"
            )
        kept = of_group[device, kind, layout] = _make(group, device, kind, layout, label)
    return kept.mailbox


def why_not(layout: SymmetricLayout, ranks: list[tuple[str, str, str]], rank: int) -> list[str]:
    """Every reason why ranks cannot write to each other's memory; none: they can.

    Args:
        layout: of the buffers.
        ranks: (host, device type, device) of each rank; a device of type "cuda" by its UUID.
        rank: the one that asks.
    """
    reasons = []
    if layout.group_size > MAX_RANKS:
        reasons.append(f"the group has {layout.group_size} ranks, more than {MAX_RANKS}")
    if len({host for host, _, _ in ranks}) > 1:
        hosts = ", ".join(dict.fromkeys(host for host, _, _ in ranks))
        reasons.append(f"its ranks are on several hosts: {hosts}")
    types = dict.fromkeys(kind for _, kind, _ in ranks)
    if len(types) > 1 or not types.keys() <= {"cuda", "cpu"}:
        reasons.append(f"its tokens are on {', '.join(types)}, not on CUDA devices or CPUs alone")
    elif "cuda" in types:
        if torch.version.hip:
            reasons.append("its kernels are for NVIDIA GPUs")
        devices = [device for _, _, device in ranks]
        if len({*devices}) < len(devices):
            reasons.append("several ranks share a GPU")
        own = devices[rank]
        visible = {_uuid(i): i for i in range(torch.cuda.device_count())}
        for other, device in enumerate(devices):
            # a rank may see its own GPU alone; torch says what is wrong then
            if (
                device != own
                and device in visible
                and not torch.cuda.can_device_access_peer(visible[own], visible[device])
            ):
                reasons.append(f"rank {rank} has no peer access to the GPU of rank {other}")
    return reasons


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _make(
    group: ProcessGroup, device: torch.device, kind: str, layout: SymmetricLayout, label: str
) -> _Kept:
    check_agreement(
        {
            "max_num_tokens": layout.max_num_tokens,
            f"the bytes of a row that {label} sends for its {kind}": layout.row_bytes,
            "the number of experts per token": layout.top_k,
        },
        group,
    )
    where = _uuid(device.index) if device.type == "cuda" else ""
    ranks: list = [None] * group.size()
    torch.distributed.all_gather_object(
        ranks, (socket.gethostname(), device.type, where), group=group
    )
    found: list = [None] * group.size()
    own = why_not(layout, ranks, group.rank())
    torch.distributed.all_gather_object(found, own, group=group)  # all raise alike
    if reasons := list(dict.fromkeys(reason for theirs in found for reason in theirs)):
        raise ValueError(
            f"symmetric_memory cannot serve {label}: {'; '.join(reasons)}; choose "
            "all2all_backend='all_to_all' or 'allgather_reducescatter'"
        )
    with torch.inference_mode(False):  # calls outside of it write into these tensors, too
        if device.type == "cuda":
            buffers, handle = _symmetric(group, device, layout)
        else:
            buffers, handle = _shared_files(group, layout.num_bytes), None
        return _Kept(Mailbox.of(layout, group.rank(), buffers), handle)


def _symmetric(
    group: ProcessGroup, device: torch.device, layout: SymmetricLayout
) -> tuple[list[Tensor], Any]:
    """Buffers of all ranks in the memory of their GPUs, in which nothing was sent yet."""
    from torch.distributed import _symmetric_memory

    num_bytes = layout.num_bytes
    # of more than 1 MiB torch's pool gives each tensor a segment of its own
    own = _symmetric_memory.empty(max(num_bytes, 2 << 20), dtype=torch.uint8, device=device)
    own.fill_(EMPTY)
    own[: layout.meta_start] = 0  # flags
    torch.cuda.synchronize(device)  # before any rank can write to it
    handle = _symmetric_memory.rendezvous(own, group.group_name)
    # where this tensor begins in what torch has mapped, alike on all ranks
    offset = own.data_ptr() - handle.get_buffer(group.rank(), (1,), torch.uint8).data_ptr()
    check_agreement({"the offset in symmetric memory": offset}, group)
    buffers = [
        own if rank == group.rank() else handle.get_buffer(rank, (num_bytes,), torch.uint8, offset)
        for rank in range(group.size())
    ]
    return buffers, (own, handle)


def _shared_files(group: ProcessGroup, num_bytes: int) -> list[Tensor]:
    """Buffers of all ranks in files of this host that are mapped by all, zero at first."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    descriptor, name = tempfile.mkstemp(prefix="moe_ops_", dir=folder)
    try:
        os.truncate(descriptor, num_bytes)
        os.close(descriptor)
        names: list = [None] * group.size()
        torch.distributed.all_gather_object(names, name, group=group)
        buffers = [
            torch.from_file(other, shared=True, size=num_bytes, dtype=torch.uint8)
            for other in names
        ]
        torch.distributed.barrier(group)  # all have mapped this one
        return buffers
    finally:
        Path(name).unlink()
