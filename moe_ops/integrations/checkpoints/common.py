"""Checks of a checkpoint's description of a matrix, and the description itself."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from typing import Any

import torch

from moe_ops.schemes import SCHEMES, QuantScheme, get_scheme

Config = dict[str, Any]
VALUES_ONLY = "values_only"  # added to the Config of a matrix whose activations do not matter
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# weights of mxfp8 beside activations that stay as they are
MXFP8_ALONE = get_scheme(QuantScheme("mxfp8_w8a16", SCHEMES["mxfp8"].weight, None)).name


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
shown = _SHORT.repr  # a value of a file, for messages: of any size and depth


@dataclass(frozen=True)
class Matrix:
    """A checkpoint's description of one matrix, or of a stack of matrices."""

    scheme: str
    rows: int  # N
    columns: int  # K
    batch: tuple[int, ...] = ()  # leading dimensions, (E,) of a stack
    as_model: bool = False  # a stack lies as the model's parameter, perhaps (E, K, N)


def shape_of(tensors: dict, role: str, *dims: int) -> tuple[int, ...]:
    """The shape of a tensor; ValueError unless it has one of these numbers of dimensions, if they
    are given.
    """
    shape = tuple(tensors[role].shape)
    if dims and len(shape) not in dims:
        raise ValueError(
            f"{role} must have {' or '.join(map(str, dims))} dimensions, got shape {shape}"
        )
    return shape


def require(tensors: dict, role: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise ValueError unless a tensor has this shape and one of these dtypes."""
    t = tensors[role]
    if tuple(t.shape) != shape:
        raise ValueError(f"{role} must have shape {shape}, got {tuple(t.shape)}")
    if dtypes and t.dtype not in dtypes:
        raise ValueError(f"{role} must be one of {dtypes}, got {t.dtype}")


def require_numbers(tensors: dict, role: str, count: int) -> None:
    """Raise ValueError unless a tensor is one floating-point number, or one for each matrix."""
    shape = shape_of(tensors, role)
    if math.prod(shape) not in (1, count):
        raise ValueError(f"{role} must have one element a matrix, got {shape}")
    require(tensors, role, shape, *FLOATS, torch.float64)


def check_weights(config: Config, **expected: tuple) -> None:
    """Raise ValueError where a description of weights contradicts what their tensors are."""
    args = config.get("weights") or {}
    for name, allowed in expected.items():
        if args.get(name) is not None and args[name] not in allowed:
            raise ValueError(
                f"{name} of weights must be {' or '.join(map(str, allowed))}, as the tensors are, "
                f"got {shown(args[name])}"
            )


def activations(config: Config, default: str = "") -> str:
    """The quantization of activations by compressed-tensors' QuantizationArgs.

    Args:
        config: of the matrix.
        default: where nothing is said of them.

    Returns:
        "" where they stay as they are, else element type and bits, what shares a scale, and
        whether that is known beforehand: "float8 token dynamic", "float8 tensor static",
        "float4 tensor_group16 local" (the scale of groups is dynamic, that of all is static).
    """
    if "input_activations" not in config:
        return default
    args = config["input_activations"]
    if args is None:
        return ""
    if args.get("symmetric") is False:
        raise ValueError("symmetric of input_activations must be True, got False")
    size = args.get("group_size")
    strategy = args.get("strategy") or {None: "tensor", -1: "token"}.get(size, "group")
    times = {True: "dynamic", False: "static"}
    dynamic = args.get("dynamic", False)
    shared = f"{strategy}{size}" if strategy in ("group", "tensor_group") else strategy
    return f"{args.get('type', 'int')}{args.get('num_bits', 8)} {shared} " + (
        times.get(dynamic) or str(dynamic)
    )


def scheme_of(
    tensors: dict,
    config: Config,
    schemes: dict[str, str],
    weights: str,
    *,
    default: str,
    input_scale: str = "",
) -> str:
    """The scheme of weights and of the activations that meet them.

    Args:
        tensors: of the matrix, by role.
        config: of the matrix.
        schemes: the scheme by what `activations` returns.
        weights: for messages.
        default: how activations are quantized where the configuration does not tell.
        input_scale: role of the activations' scale, if there can be one.

    Raises:
        ValueError: there is no such scheme; or the scale must be there and is not, or is there
            and must not be, or has more than one element a matrix.
    """
    if config.get(VALUES_ONLY):
        return next(iter(schemes.values()))
    asked = activations(config, default)
    if asked not in schemes:
        known = " or ".join(repr(name) if name else "null" for name in schemes)
        raise ValueError(
            f"input_activations must be {known} beside {weights}, got {shown(asked or 'null')}"
        )
    scheme, needed = schemes[asked], asked.endswith(("static", "local"))
    if input_scale and needed != (input_scale in tensors):
        raise ValueError(
            f"{input_scale} must be {'there' if needed else 'absent'}: the checkpoint says that "
            f"activations are {'quantized by it' if needed else 'not'}, scheme {scheme!r}"
        )
    if needed:
        require_numbers(tensors, input_scale, _matrices(tensors))
    return scheme


def _matrices(tensors: dict) -> int:
    elements = "weight_packed" if "weight_packed" in tensors else "weight"
    return math.prod(shape_of(tensors, elements)[:-2])
