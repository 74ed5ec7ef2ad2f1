"""Quantized weights on several processes: sharded by experts under FSDP2 and as DTensors, or equal
on all under DistributedDataParallel.

FSDP2 (`fully_shard`) keeps some experts of each weight on every process and gathers all of them
for a layer's forward. It does so through operators (new_zeros, narrow, copy_, view, as_strided)
and the two methods below; their names and signatures are FSDP's. The weights' tensors travel as
they are, quantized.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_ops.tensors.base import ExpertTensor, Types, implements

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_UNNAMED = "a DTensor of quantized weights"


def fsdp_pre_all_gather(
    self: ExpertTensor,
    mesh: DeviceMesh,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: Any,
    mp_policy: Any,
) -> tuple[tuple[Tensor, ...], tuple[list, list, list]]:
    """What FSDP gathers: bytes of all tensors with one entry for each expert, and how to undo
    that.
    """
    if outer_size[0] % mesh.size():
        raise ValueError(
            f"quantized weights must have a number of experts that the {mesh.size()} processes "
            f"of FSDP divide, got {outer_size[0]}; leave them out by "
            "fully_shard(ignored_params=...)"
        )
    names = self._per_expert
    if mesh.size() == 1:  # FSDP takes the first tensor alone then; the others are whole here
        names = names[:1]
    data = [getattr(self, name).contiguous() for name in names]
    dtypes = [t.dtype for t in data]
    return tuple(_bytes(t) for t in data), (names, dtypes, [t.shape[1:] for t in data])


def fsdp_post_all_gather(
    self: ExpertTensor,
    all_gather_outputs: tuple[Tensor, ...],
    metadata: tuple[list, list, list],
    param_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple] | None:
    """The weights of all experts, views of what was gathered."""
    if out is not None:
        return None  # a view of the same memory already
    parts = {
        name: t.view(-1).view(dtype).view(-1, *shape)
        for t, name, dtype, shape in zip(all_gather_outputs, *metadata, strict=True)
    }
    return self._replace(**parts), ()


def gathered(weight: Any) -> Tensor:
    """The whole of a DTensor, plain or quantized, on every process.

    Each process multiplies it with tokens of its own. So the gradient of a plain one is the sum
    of those of all processes of its mesh, which the backward pass sends to where the parts are.
    """
    from torch.distributed.tensor import DTensor, Partial

    local = weight.to_local()
    if not isinstance(local, ExpertTensor):
        # by default torch takes the gradient of any one process for that of all
        return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
    _check_sharded_by_experts(weight)
    mesh, placements = weight.device_mesh, weight.placements
    parts = {}
    for name in local._per_expert:
        t = getattr(local, name)
        data = _bytes(t.contiguous())
        shape = torch.Size((weight.shape[0], *data.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(
            data, mesh, placements, shape=shape, stride=stride
        ).full_tensor()
        parts[name] = whole.view(-1).view(t.dtype).view(-1, *t.shape[1:])
    return local._replace(**parts)


def local_part(weight: Any) -> Tensor:
    """The local tensor of a DTensor; any other tensor unchanged."""
    return weight.to_local() if is_sharded(weight) else weight


def is_sharded(weight: Any) -> bool:
    """Whether this is a DTensor."""
    return hasattr(weight, "device_mesh")


def local_experts(weight: Any, name: str = _UNNAMED) -> range:
    """Ids of the experts of a DTensor that this process holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _check_sharded_by_experts(weight, name)
    (count, *_), (first, *_) = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    return range(first, first + count)


def sharded_like(weight: Tensor, old: Any) -> Tensor:
    """This process's part of a weight in the place of that of a DTensor; the part itself where
    `old` is none.
    """
    if not is_sharded(old):
        return weight
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        weight,
        old.device_mesh,
        old.placements,
        run_check=False,
        shape=old.shape,
        stride=old.stride(),
    )


def is_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` wrapped this module."""
    return hasattr(module, "_get_fsdp_state")


def fsdp_has_run(module: nn.Module) -> bool:
    """Whether a module that `fully_shard` wrapped, or one around it, was called already."""
    return is_fsdp(module) and module._get_fsdp_state()._is_root is not None  # type: ignore


def renew_fsdp(module: nn.Module) -> None:
    """Let FSDP2 gather parameters of a module that became quantized after `fully_shard`, and
    before it ran.

    FSDP asks a parameter once, when it is wrapped, whether it gathers itself.
    """
    if not is_fsdp(module):
        return
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one
    for group in [state._fsdp_param_group] if groups is None else groups:
        for parameter in () if group is None else group.fsdp_params:
            # of a plain weight; its address would be compared with a wrapper's, which has none
            parameter._sharded_param_data = torch.empty(0)
            parameter.reset_sharded_param()
            parameter._init_extensions()


def _check_sharded_by_experts(weight: Any, name: str = _UNNAMED) -> None:
    # FSDP2 over expert parallelism: shards of shards, _StridedShard(0), which is no Shard
    if any(getattr(placement, "dim", 0) != 0 for placement in weight.placements) or any(
        placement.is_partial() for placement in weight.placements
    ):
        raise ValueError(
            f"{name} must be replicated or sharded along experts, Shard(0), got placements "
            f"{weight.placements}; use expert parallelism, in transformers by ep_size"
        )


if torch.distributed.is_available():

    @implements(torch.ops.c10d.broadcast_.default)
    def _broadcast(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
        """Weights of one process to all others, quantized."""
        for data in [data for tensor in args[0] for data in _held(tensor)]:
            sent = data.contiguous()
            work = func([sent.view(-1).view(torch.uint8)], *args[1:], **kwargs)[1]
            work.wait()
            if sent is not data:
                data.copy_(sent)
        return args[0], work


class Joined(Tensor):
    """Flat tensors one after the other, some of them quantized, which they stay: what
    DistributedDataParallel makes of parameters or buffers to send them in one broadcast.

    It can be sent and taken apart again, and nothing else. Those that are quantized are no copies.
    (Callers of torch.cat in Python get a tensor of values.)
    """

    parts: list[Tensor]

    @staticmethod
    def __new__(cls, parts: list[Tensor]) -> Any:
        size, first = sum([part.numel() for part in parts]), parts[0]
        self = torch.Tensor._make_wrapper_subclass(
            cls, (size,), dtype=first.dtype, device=first.device
        )
        self.parts = parts
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Types, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            return args[0]._part(*args[2:4])
        if func._schema.name == "c10d::broadcast_":
            return _broadcast(func, types, args, kwargs or {})
        raise NotImplementedError(f"{func} has no meaning for weights on their way to others")

    def _part(self, start: int, end: int) -> Tensor:
        for part in self.parts:
            size = part.numel()
            if start < size or start == end:  # of nothing, too
                assert end <= size, "DistributedDataParallel takes parameters apart, no less"
                return part[start:end]
            start, end = start - size, end - size
        raise IndexError(f"no part of {self.shape[0]} elements begins there")


@implements(torch.ops.aten.cat.default)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    """Flat weights and others; plain ones that are neighbours become one. Without a process group
    nobody sends them: their values.
    """
    if any([t.dim() != 1 for t in args[0]]):
        return NotImplemented
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return func([t.dequantize() if isinstance(t, ExpertTensor) else t for t in args[0]])
    runs = itertools.groupby(args[0], lambda t: isinstance(t, ExpertTensor))
    parts = [[*run] if quantized else [torch.cat([*run])] for quantized, run in runs]
    return Joined([*itertools.chain(*parts)])


def _held(tensor: Any) -> list[Tensor]:
    """The plain tensors that hold a tensor's data."""
    if isinstance(tensor, Joined):
        return [data for part in tensor.parts for data in _held(part)]
    if isinstance(tensor, ExpertTensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor]


def _bytes(t: Tensor) -> Tensor:
    """(E, ...) as (E, bytes of an expert) uint8."""
    return t.view(torch.uint8) if t.dim() > 1 else t.unsqueeze(-1).view(torch.uint8)


ExpertTensor.fsdp_pre_all_gather = fsdp_pre_all_gather
ExpertTensor.fsdp_post_all_gather = fsdp_post_all_gather
