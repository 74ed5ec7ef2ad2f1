"""Quantized activations: every row is a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.checks import check_tensor
from moe_ops.numerics import scaling
from moe_ops.numerics.elements import (
    decode,
    e4m3_to_float32,
    e8m0_to_float32,
    encode,
    round_products_to_e4m3,
)
from moe_ops.numerics.groups import split
from moe_ops.numerics.weights import infinite_where_zero, scale_to_float32
from moe_ops.schemes import QuantScheme, get_scheme


class QuantizedActivation(NamedTuple):
    """Activations (..., K) as a scheme quantizes them: value = q * scale * channel_scale /
    global_scale, with q * scale rounded to e4m3 where `QuantDesc.e4m3_products` says so.
    """

    q: Tensor  # in the storage dtype, with fewer columns where elements share bytes
    # () for one, (..., 1) per token, computed or known, (..., ceil(K/group)) per group
    scale: Tensor
    global_scale: Tensor | None = None  # () fp32, or (..., 1) where each token has a known one
    channel_scale: Tensor | None = None  # (..., 1) fp32


def quantize_activation(
    x: Tensor,  # (..., K)
    scheme: str | QuantScheme,
    static_scale: Tensor | None = None,
    rows_valid: Tensor | None = None,
    amax: Tensor | None = None,
) -> QuantizedActivation:
    """Quantize activations as a scheme with quantized activations does: what `fused_experts` takes
    as hidden_states with hidden_states_scale and hidden_states_global_scale.

    Args:
        x: (..., K), any float dtype; every row is a token. K fills the bytes of packed elements.
        scheme: the scheme or its name.
        static_scale: the known scale of a scheme with static activation scales: one, () or (1,),
            or one of each token (`static_scale_of_rows`). If activations have a global scale, it
            is 1 / static_scale, or without static_scale it is computed from the data.
        rows_valid: bool, x.shape[:-1]: rows that count for a scale shared by all rows; the others
            may hold anything, NaN included, and do not change the result of these.
        amax: () fp32, `largest_magnitude` of all rows, where x is a part of those that share a
            dynamic scale.

    Returns:
        A QuantizedActivation: scales fp32, or uint8 e8m0 codes, or float8_e4m3fn with a global
        scale.

    Raises:
        ValueError: x is no tensor, the scheme does not quantize activations, K does not fill the
            bytes of packed elements, or static_scale is missing or has no use.
    """
    check_tensor("x", x)
    desc = get_scheme(scheme).activation
    if desc is None:
        raise ValueError(f"scheme must be one that quantizes activations, got {scheme!r}")
    if not desc.global_scale and (static_scale is not None) != desc.static:
        must, got = ("a tensor", "None") if desc.static else ("None", "one")
        raise ValueError(f"static_scale must be {must} for scheme {scheme!r}, got {got}")
    if x.shape[-1] % desc.format.columns_together:
        raise ValueError(
            f"x must have columns that fill the bytes of {desc.format.bits}-bit elements for "
            f"scheme {scheme!r}, got {x.shape[-1]}"
        )
    parts = split(x, -1, desc.group.cols).to(torch.float32)  # (..., groups, columns)
    global_ = channel = None
    if desc.is_mx:
        scale = scaling.exponents(_amax(parts), desc)
        divisor = e8m0_to_float32(scale)
    elif desc.global_scale:
        if static_scale is None:
            amax = largest_magnitude(x, rows_valid) if amax is None else amax
            global_ = scaling.global_scale(amax, desc)
        else:
            given = _known(static_scale)
            global_ = torch.ones_like(given) / given
        whole = global_.unsqueeze(-1) if global_.dim() else global_
        scale = scaling.block_scales(_amax(parts), whole, desc)
        divisor = infinite_where_zero(e4m3_to_float32(scale)) / whole
    elif desc.channel_scale:
        amax = _amax(parts)
        channel = scaling.channel_scale(amax.amax(-2, keepdim=True), desc)
        scale = scaling.group_scales(amax, channel, desc)
        divisor = infinite_where_zero(e4m3_to_float32(scale) * channel)
    elif not desc.group.is_tensor:
        scale = divisor = scaling.plain(_amax(parts), desc)
    else:
        if static_scale is not None:
            scale = _known(static_scale)
        else:
            amax = largest_magnitude(x, rows_valid) if amax is None else amax
            scale = scaling.plain(amax, desc)
        divisor = scale.unsqueeze(-1) if scale.dim() else scale
    q = encode((parts / divisor).flatten(-2)[..., : x.shape[-1]], desc.format)
    scale = scale if desc.group.is_tensor else scale.squeeze(-1)
    return QuantizedActivation(q, scale, global_, None if channel is None else channel[..., 0])


def static_scale_of_rows(static_scale: Tensor | None, experts: Tensor) -> Tensor | None:
    """The known scale of rows (...) that experts take, (..., 1); one scale of all experts, and
    None, stay. Rows of no expert, whose id is E, have that of the last one.
    """
    if static_scale is None or static_scale.numel() == 1:
        return static_scale
    return static_scale[experts.clamp(max=static_scale.shape[0] - 1)].unsqueeze(-1)


def static_scale_of_sorted(
    static_scale: Tensor | None,
    offsets: Tensor,  # (E,) int32, cumulative end row of each expert
    rows: int,
) -> Tensor | None:
    """`static_scale_of_rows` of rows sorted by expert, (rows, 1)."""
    if static_scale is None or static_scale.numel() == 1:
        return static_scale
    row = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return static_scale_of_rows(static_scale, torch.searchsorted(offsets, row, right=True))


def fake_quantize_activation(
    x: Tensor,  # (..., K)
    scheme: str | QuantScheme,
    static_scale: Tensor | None = None,
    rows_valid: Tensor | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    """The fp32 values of activations after quantization, or x if the scheme does not quantize
    them.

    Arguments as for ``quantize_activation``. Returns a tensor shaped like ``x``.
    """
    desc = get_scheme(scheme).activation
    if desc is None:
        return x.to(torch.float32)
    quantized = quantize_activation(x, scheme, static_scale, rows_valid, amax)
    return activation_values(quantized, scheme)


def activation_values(a: QuantizedActivation, scheme: str | QuantScheme) -> Tensor:
    """The fp32 values (..., K) of activations as a scheme quantizes them."""
    desc = get_scheme(scheme).activation
    assert desc is not None, f"{scheme} leaves activations as they are"
    values = decode(a.q, desc.format)
    scale = scale_to_float32(a.scale, desc)
    if desc.group.is_tensor:
        return values.mul_(scale)
    k = values.shape[-1]
    values = split(values, -1, desc.group.cols) * scale[..., None]
    if desc.e4m3_products:
        values = round_products_to_e4m3(values)
    values = values.flatten(-2)[..., :k]
    values = values if a.channel_scale is None else values * a.channel_scale
    return values if a.global_scale is None else values / a.global_scale


def _known(static_scale: Tensor) -> Tensor:
    """() fp32 of one scale, or (..., 1) fp32 of one of each token."""
    scale = static_scale.to(torch.float32)
    return scale.reshape(()) if scale.numel() == 1 else scale


def _amax(parts: Tensor) -> Tensor:
    return parts.abs().amax(-1, keepdim=True)


def largest_magnitude(x: Tensor, rows_valid: Tensor | None = None) -> Tensor:
    """() fp32: the largest magnitude of the rows that count."""
    amax = x.abs().amax(-1)
    if rows_valid is not None:
        amax = torch.where(rows_valid, amax, 0)
    # the appended zero makes the reduction defined if there are no rows
    return torch.cat((amax.flatten(), amax.new_zeros(1))).amax().to(torch.float32)
