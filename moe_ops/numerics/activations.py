"""Quantized activations: every row is a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.numerics import scaling
from moe_ops.numerics.elements import decode, e4m3_to_float32, e8m0_to_float32, encode
from moe_ops.numerics.groups import split
from moe_ops.numerics.weights import scale_to_float32
from moe_ops.schemes import QuantScheme, get_scheme


class QuantizedActivation(NamedTuple):
    """Activations (..., K) as a scheme quantizes them: value = q * scale / global_scale."""

    q: Tensor  # in the storage dtype, with fewer columns where elements share bytes
    scale: Tensor  # () for one, (..., 1) per token, (..., ceil(K/group)) per group
    global_scale: Tensor | None = None  # () fp32


def quantize_activation(
    x: Tensor,  # (..., K)
    scheme: str | QuantScheme,
    static_scale: Tensor | None = None,
    rows_valid: Tensor | None = None,
) -> QuantizedActivation:
    """Quantize activations as a scheme with quantized activations does: what `fused_experts` takes
    as hidden_states with hidden_states_scale and hidden_states_global_scale.

    Args:
        x: (..., K), any float dtype; every row is a token. K fills the bytes of packed elements.
        scheme: the scheme or its name.
        static_scale: the one scale, () or (1,), of a scheme with static activation scales. If
            activations have a global scale, it is 1 / static_scale, or without static_scale it is
            computed from the data.
        rows_valid: bool, x.shape[:-1]: rows that count for a scale shared by all rows; the others
            may hold anything, NaN included, and do not change the result of these.

    Returns:
        A QuantizedActivation: scales fp32, or uint8 e8m0 codes, or float8_e4m3fn with a global
        scale.

    Raises:
        ValueError: the scheme does not quantize activations, K does not fill the bytes of packed
            elements, or static_scale is missing or has no use.
    """
    desc = get_scheme(scheme).activation
    if desc is None:
        raise ValueError(f"scheme must be one that quantizes activations, got {scheme!r}")
    if not desc.global_scale and (static_scale is not None) != desc.static:
        must, got = ("a tensor", "None") if desc.static else ("None", "one")
        raise ValueError(f"static_scale must be {must} for scheme {scheme!r}, got {got}")
    if x.shape[-1] * desc.format.bits % 8:
        raise ValueError(
            f"x must have columns that fill the bytes of {desc.format.bits}-bit elements for "
            f"scheme {scheme!r}, got {x.shape[-1]}"
        )
    parts = split(x, -1, desc.group.cols).to(torch.float32)  # (..., groups, columns)
    global_ = None
    if desc.is_mx:
        scale = scaling.exponents(_amax(parts), desc)
        divisor = e8m0_to_float32(scale)
    elif desc.global_scale:
        if static_scale is None:
            global_ = scaling.global_scale(_amax_of_rows(x, rows_valid), desc)
        else:
            given = static_scale.to(torch.float32).reshape(())
            global_ = torch.ones_like(given) / given
        scale = scaling.block_scales(_amax(parts), global_, desc)
        divisor = e4m3_to_float32(scale)
        divisor = torch.where(divisor == 0, torch.inf, divisor) / global_
    elif not desc.group.is_tensor:
        scale = divisor = scaling.plain(_amax(parts), desc)
    else:
        if static_scale is not None:
            scale = static_scale.to(torch.float32).reshape(())
        else:
            scale = scaling.plain(_amax_of_rows(x, rows_valid), desc)
        divisor = scale
    q = encode((parts / divisor).flatten(-2)[..., : x.shape[-1]], desc.format)
    return QuantizedActivation(q, scale if desc.group.is_tensor else scale.squeeze(-1), global_)


def fake_quantize_activation(
    x: Tensor,  # (..., K)
    scheme: str | QuantScheme,
    static_scale: Tensor | None = None,
    rows_valid: Tensor | None = None,
) -> Tensor:
    """The fp32 values of activations after quantization, or x if the scheme does not quantize
    them.

    Arguments as for ``quantize_activation``. Returns a tensor shaped like ``x``.
    """
    desc = get_scheme(scheme).activation
    if desc is None:
        return x.to(torch.float32)
    return activation_values(quantize_activation(x, scheme, static_scale, rows_valid), scheme)


def activation_values(a: QuantizedActivation, scheme: str | QuantScheme) -> Tensor:
    """The fp32 values (..., K) of activations as a scheme quantizes them."""
    desc = get_scheme(scheme).activation
    assert desc is not None, f"{scheme} leaves activations as they are"
    values = decode(a.q, desc.format)
    scale = scale_to_float32(a.scale, desc)
    if desc.group.is_tensor:
        return values.mul_(scale)
    k = values.shape[-1]
    values = (split(values, -1, desc.group.cols) * scale[..., None]).flatten(-2)[..., :k]
    return values if a.global_scale is None else values / a.global_scale


def _amax(parts: Tensor) -> Tensor:
    return parts.abs().amax(-1, keepdim=True)


def _amax_of_rows(x: Tensor, rows_valid: Tensor | None) -> Tensor:
    """() fp32: the largest magnitude of the rows that count."""
    amax = x.abs().amax(-1)
    if rows_valid is not None:
        amax = torch.where(rows_valid, amax, 0)
    # the appended zero makes the reduction defined if there are no rows
    return torch.cat((amax.flatten(), amax.new_zeros(1))).amax().to(torch.float32)
