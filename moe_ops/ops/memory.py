"""Tensors whose addresses kernels may take: those whose values lie in memory, as dtype and strides
say.

Calls skip the dispatcher only with tensors that are `addressable` (planning/bind). Others go
through it to the kernel of the op, which materializes lazily negated tensors and implicit zeros
and refuses tensors without values by name. A storage that was shrunk but not freed is not
detected: torch's own operators read past its end, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from moe_ops.checks import check_strided

# The allocators of code that torch.compile generates: (shape, strides, dtype) -> tensor. They skip
# argument parsing and the dispatcher, two thirds of the time of torch.empty, and fill nothing
# under torch.use_deterministic_algorithms.
EMPTY_STRIDED: dict[str, Callable[..., Tensor] | None] = {
    kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
    for kind in ("cpu", "cuda")
}


def addressable(tensors: Iterable[Tensor | None]) -> bool:
    """Whether the values of all tensors lie in memory. False also for tensors without elements.

    Reads two attributes per tensor, because each operator asks in every call. Conjugation is not
    checked: no operator takes complex numbers.
    """
    try:
        for tensor in tensors:
            if tensor is not None and (tensor.is_neg() or not tensor.data_ptr()):
                return False
    except RuntimeError:  # layouts without a storage
        return False
    return True


def materialized(name: str, tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its values do not lie in memory.

    Raises:
        ValueError: the tensor, which the message names, has no values.
    """
    refuse_lost(name, tensor)
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if tensor.is_neg():
        try:
            tensor = tensor.resolve_neg()
        except RuntimeError as error:
            what = f"a lazily negated tensor of {tensor.dtype}, which torch does not negate"
            raise ValueError(_MUST.format(name, what)) from error
    if tensor.numel() and not tensor.data_ptr():
        _refuse(name, "a tensor that wraps another one; pass the one within")
    return tensor


def refuse_lost(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that is nested or has no strides, whose storage was freed, or
    whose `.data` was set to a tensor subclass, which leaves it only the shape and dtype.

    To be called before tensors are passed to operators of torch, which crash the process on the
    last kind.
    """
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        return
    check_strided(name, tensor)
    if not torch._C._has_storage(tensor) or tensor.data_ptr() or tensor.is_meta:
        return
    if tensor.numel() == 0 or tensor._is_zerotensor() or torch._is_functional_tensor(tensor):
        return
    if tensor.untyped_storage().nbytes() == 0:
        _refuse(
            name,
            "a tensor whose storage was freed; fill it first: FSDP does so in forward(), and "
            "for other code in FullyShardedDataParallel.summon_full_params",
        )
    _refuse(
        name,
        f"a {type(tensor).__name__} whose .data was set to a quantized tensor or another "
        "subclass, of which it keeps nothing; assign torch.nn.Parameter(subclass, "
        "requires_grad=False) in its place",
    )


_MUST = "{} must hold its values in memory, got {}"


def _refuse(name: str, what: str) -> None:
    raise ValueError(_MUST.format(name, what))
