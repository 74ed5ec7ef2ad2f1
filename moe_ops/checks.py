"""Checks of single arguments. Each raises a ValueError that names the argument."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_scalar


def autocasting(device: torch.device) -> bool:
    """Whether torch.autocast is on for a device. Never for meta, which it does not know."""
    if not (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()):
        return False
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def static_size(size: int) -> int:
    """A size as a constant of the traced graph, also under dynamic=True: plans depend on all sizes
    but M.
    """
    if torch.compiler.is_compiling() or type(size) is not int:
        if isinstance(size, Tensor):
            raise RuntimeError(
                "moe_ops cannot be traced by torch.jit.trace, which would keep one plan for every "
                "shape; use torch.export.export or torch.compile"
            )
        return int(guard_scalar(size))
    return size


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Suggestion of known names that begin with an unknown one, or else resemble it: "; did you
    mean 'a' or 'b'?", or "".
    """
    if not isinstance(name, str) or not name:
        return ""
    name, names = name.lower(), [str(one) for one in known]
    close = [one for one in names if one.startswith(name)][:8] or get_close_matches(name, names)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def device_named(argument: str, name: torch.device | str, remedy: str) -> torch.device:
    """The device of a name; for "cuda" the current GPU.

    Raises:
        ValueError: not the name of a device, or of a GPU that does not exist; `remedy` ends it.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{argument} must be a torch device such as 'cpu', got {name!r}"
        ) from error
    if device.type != "cuda":
        return device
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{argument} must exist on this machine, got {str(name)!r} with "
            f"{torch.cuda.device_count()} CUDA devices; {remedy}"
        )
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_one_of(argument: str, name: object, known: Iterable[str]) -> None:
    """Raise unless `name` is one of the known ones."""
    known = tuple(known)
    if name not in known:
        meant = did_you_mean(name, known)
        raise ValueError(f"{argument} must be one of {', '.join(known)}, got {name!r}{meant}")


def check_rank(name: str, tensor: Tensor, shape: str) -> None:
    """Raise unless the tensor has as many dimensions as `shape`, e.g. "(M, K)", names."""
    check_tensor(name, tensor)
    rank = shape.count(",") + 1
    if tensor.ndim != rank:
        raise ValueError(
            f"{name} must have shape {shape}, got a {tensor.ndim}-D tensor"
            f"{_other_rank(name, tensor.ndim, shape, rank)}"
        )


def _other_rank(name: str, found: int, shape: str, rank: int) -> str:
    """Remedy for a tensor of another rank, after a semicolon; "" if none is known."""
    if rank == 2 and found > 2:
        return f"; flatten its leading dimensions: {name}.flatten(0, {found - 2})"
    if found != rank - 1:
        return ""
    if shape.endswith("top_k)"):
        return f"; where top_k is 1 pass {name}.unsqueeze(1)"
    return f"; {'one row' if rank == 2 else 'that of one expert'} becomes {name}.unsqueeze(0)"


def check_strided(name: str, tensor: Tensor) -> None:
    """Raise for nested, sparse and other tensors without strides."""
    if tensor.is_nested:
        raise ValueError(
            f"{name} must be a dense tensor, got a nested one; pass torch.stack(tuple("
            f"{name}.unbind()))"
        )
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{name} must be a dense tensor, got layout {tensor.layout}; pass {name}.to_dense()"
        )


def check_local(name: str, tensor: Tensor) -> None:
    """Raise for a DTensor."""
    if hasattr(tensor, "device_mesh"):
        raise ValueError(
            f"{name} must be a plain tensor, got a DTensor; pass its to_local(), and the result "
            "to DTensor.from_local"
        )


def check_tensor(name: str, value: object) -> None:
    """Raise unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name} must be a torch.Tensor, got {type(value).__name__}{_as_tensor(name, value)}"
        )


def _as_tensor(name: str, value: Any) -> str:
    """How to make a tensor of another object, after a semicolon; "" if that is not known."""
    if value is None:
        return "; it cannot be left out"
    if isinstance(value, (list, tuple, nn.ModuleList, nn.ParameterList)) and len(value):
        first = value[0]
        if isinstance(first, nn.Module):
            return f"; pass torch.stack([one.{_largest(first)} for one in {name}])"
        if isinstance(first, Tensor):
            kinds = {(one.shape, one.dtype) if isinstance(one, Tensor) else None for one in value}
            return f"; pass {f'torch.stack(tuple({name}))' if len(kinds) == 1 else 'one of them'}"
    if isinstance(value, nn.Module):
        return f"; pass a parameter of it, such as {name}.{_largest(value)}"
    if isinstance(value, (list, tuple, Real)) or hasattr(value, "__array__"):
        return f"; pass torch.as_tensor({name})"
    return ""


def _largest(module: nn.Module) -> str:
    """The name of a module's largest parameter."""
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    return max(sizes, key=lambda name: sizes[name], default="weight")


def check_ids(name: str, ids: Tensor, weights: Tensor | None = None) -> None:
    """Raise unless expert ids are int32 or int64; say so if they are swapped with `weights`."""
    if ids.dtype in (torch.int32, torch.int64):
        return
    if not ids.is_floating_point():
        remedy = "convert it with .to()"
    elif weights is None or weights.is_floating_point():
        remedy = "pass the second tensor that moe_ops.route returns, the first are weights"
    else:
        remedy = "topk_weights and topk_ids are swapped"
    raise ValueError(f"{name} must be int32 or int64, got {ids.dtype}; {remedy}")


def check_type(name: str, value: object, kind: type) -> None:
    """Raise unless `value` is an instance of a class."""
    if not isinstance(value, kind):
        raise ValueError(
            f"{name} must be a {kind.__module__}.{kind.__qualname__}, got {type(value).__name__}"
        )


def check_integer(name: str, value: int) -> None:
    """Raise unless `value` is an integer, also a symbolic one. A bool does not count as one."""
    if type(value) is int:  # route asks in every call
        return
    if isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt)):
        raise ValueError(f"{name} must be an integer, got {value!r}")


def check_size(name: str, value: int, least: int = 1) -> None:
    """Raise unless `value` is an integer of at least `least`."""
    check_integer(name, value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_number(name: str, value: float) -> None:
    """Raise unless `value` is a number. A tensor does not count as one."""
    if type(value) is not float and not isinstance(value, (Real, torch.SymFloat)):
        raise ValueError(f"{name} must be a number, got {value!r}")
