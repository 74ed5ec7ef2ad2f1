"""Quantized expert weights: tensor subclasses, and the functions that make them.

Importing this package imports torchao; ``import moe_ops`` alone does not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_ops.schemes import QuantScheme, get_scheme
from moe_ops.tensors.base import ExpertTensor
from moe_ops.tensors.float8 import Float8ExpertTensor
from moe_ops.tensors.serialization import flatten, unflatten
from moe_ops.validation import check_tensor

__all__ = [
    "ExpertTensor",
    "Float8ExpertTensor",
    "flatten",
    "from_quantized",
    "prepare",
    "quantize",
    "unflatten",
]

_HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)
_NATURAL_BACKENDS = ("auto", "torch", "triton")


def quantize(
    weight: Tensor,  # (E, N, K)
    scheme: str | QuantScheme,
    *,
    activation_scale: Tensor | float | None = None,
) -> ExpertTensor:
    """Quantize expert weights, once, for use as ``w13`` or ``w2``.

    Args:
        weight: (E, N, K) bf16, fp16 or fp32. It is read, not kept.
        scheme: a name such as "fp8_block" or "fp8_w8a16:block", or a QuantScheme.
        activation_scale: one positive fp32 number, needed by schemes with static activation scales
            and by no others: the activations that meet this weight are quantized as
            round(x / activation_scale).

    Raises:
        ValueError: a wrong rank, dtype or scheme, an activation_scale that is missing or unused, a
            weight that is quantized already or not finite (the message names the experts).
    """
    scheme = get_scheme(scheme)
    _check_plain("weight", weight)
    activation_scale = _activation_scale(activation_scale, scheme, weight.device)
    out = Float8ExpertTensor.from_hp(weight, scheme.name, activation_scale)
    _check_finite("weight", out.scale)
    return out


def from_quantized(
    scheme: str | QuantScheme,
    qdata: Tensor,
    scale: Tensor,
    *,
    zero_point: Tensor | None = None,
    global_scale: Tensor | None = None,
    activation_scale: Tensor | float | None = None,
) -> ExpertTensor:
    """Wrap expert weights that a checkpoint holds quantized; no element is changed or copied.

    Args:
        scheme: a name such as "fp8_block", or a QuantScheme.
        qdata: (E, N, K) in the scheme's storage dtype (float8_e4m3fn).
        scale: the factor an element is multiplied by, (E,), (E, N, 1) or (E, ceil(N/128),
            ceil(K/128)) as the scheme says, fp32; float8_e8m0fnu is converted to fp32, exactly.
        zero_point, global_scale: for schemes that have them, which none of the present ones has.
        activation_scale: as for ``quantize``.

    Returns:
        An ExpertTensor of dtype bfloat16; ``.to(dtype)`` changes what ``dequantize()`` returns.

    Raises:
        ValueError: a wrong rank, shape, dtype, device or scheme, a scale that is not finite, or an
            activation_scale that is missing or unused.
    """
    scheme = get_scheme(scheme)
    desc = scheme.quantized_weight
    for name, value in (("zero_point", zero_point), ("global_scale", global_scale)):
        if value is not None:
            raise ValueError(f"{name} must be None: scheme {scheme.name!r} has none")
    for name, value in (("qdata", qdata), ("scale", scale)):
        check_tensor(name, value)
        if isinstance(value, ExpertTensor):
            raise ValueError(f"{name} must be a plain tensor, got {value}")
    if qdata.dtype != desc.storage_dtype:
        raise ValueError(
            f"qdata must be {desc.storage_dtype} for scheme {scheme.name!r}, got {qdata.dtype}"
        )
    _check_matrices("qdata", qdata)
    expected = scheme.batched_scale_shape(*qdata.shape)
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"scale must have shape {expected} for scheme {scheme.name!r} and qdata of shape "
            f"{tuple(qdata.shape)}, got {tuple(scale.shape)}"
        )
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.to(torch.float32)
    if scale.dtype != desc.scale_dtype:
        raise ValueError(f"scale must be {desc.scale_dtype}, got {scale.dtype}")
    if scale.device != qdata.device:
        raise ValueError(
            f"scale must be on the device of qdata, {qdata.device}, got {scale.device}"
        )
    _check_finite("scale", scale)
    activation_scale = _activation_scale(activation_scale, scheme, qdata.device)
    return Float8ExpertTensor(
        qdata.detach(), scale.detach(), scheme.name, activation_scale=activation_scale
    )


def prepare(weight: Tensor, backend: str) -> Tensor:
    """Bring expert weights, plain or quantized, into the layout ``backend`` reads, once.

    Every present backend reads the natural layout, so the weight is returned as it is.

    Raises:
        ValueError: an unknown backend, no tensor, or a weight that is a transposed view.
    """
    check_tensor("weight", weight)
    if backend not in _NATURAL_BACKENDS:
        raise ValueError(f"backend must be one of {_NATURAL_BACKENDS}, got {backend!r}")
    if isinstance(weight, ExpertTensor) and weight.weight_layout:
        raise ValueError(f"weight must have the natural layout, got {weight}; transpose it back")
    return weight


def check_quantizable(name: str, weight: Tensor) -> None:
    """Raise ValueError, naming the weight, unless `quantize` takes it: reads it once, keeps nothing."""
    _check_plain(name, weight)
    _check_finite(name, torch.linalg.vector_norm(weight, math.inf, (1, 2)))


def _check_plain(name: str, weight: Tensor) -> None:
    check_tensor(name, weight)
    if isinstance(weight, ExpertTensor):
        raise ValueError(
            f"{name} must be a plain tensor, got {weight}; quantize its dequantize() to change "
            f"its scheme"
        )
    if weight.dtype not in _HIGH_PRECISION:
        raise ValueError(
            f"{name} must be bfloat16, float16 or float32, got {weight.dtype}; weights that are "
            f"quantized already go through moe_ops.from_quantized"
        )
    _check_matrices(name, weight)


def _check_matrices(name: str, t: Tensor) -> None:
    if t.dim() != 3 or 0 in t.shape:
        raise ValueError(
            f"{name} must have shape (E, N, K) with no empty dimension, got {tuple(t.shape)}; "
            f"one expert's (N, K) becomes (1, N, K) by unsqueeze(0)"
        )


def _check_finite(name: str, scale: Tensor) -> None:
    """Scales are maxima, so a NaN or Inf anywhere in an expert's weights stands in its scales."""
    if scale.device.type == "meta":
        return
    finite = torch.isfinite(scale).reshape(scale.shape[0], -1).all(1)
    experts = (~finite).nonzero().flatten().tolist()
    if experts:
        raise ValueError(f"{name} must be finite, got NaN or Inf in experts {experts}")


def _activation_scale(
    value: Tensor | float | None, scheme: QuantScheme, device: torch.device
) -> Tensor | None:
    desc = scheme.activation
    if desc is not None and not desc.static:
        desc = None
    if value is None:
        if desc is not None:
            raise ValueError(
                f"activation_scale must be given for scheme {scheme.name!r}: its activations have "
                f"one static scale (largest magnitude seen / {desc.format.max})"
            )
        return None
    if desc is None:
        raise ValueError(f"activation_scale must be None: scheme {scheme.name!r} does not use it")
    scale = torch.as_tensor(value, dtype=torch.float32, device=device).detach()
    if scale.numel() != 1:
        raise ValueError(
            f"activation_scale must be one number, got shape {tuple(scale.shape)}; "
            f"of a scale for each expert, take the largest"
        )
    if scale.device.type != "meta" and not 0 < scale.item() < float("inf"):
        raise ValueError(f"activation_scale must be positive and finite, got {scale.item()}")
    return scale.reshape(()).clone()
