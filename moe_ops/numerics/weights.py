"""Quantized weights: elements with their scales, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import environment
from moe_ops.numerics import scaling, two_levels
from moe_ops.numerics.elements import (
    decode,
    e4m3_to_float32,
    e8m0_to_float32,
    encode,
    round_products_to_e4m3,
)
from moe_ops.numerics.groups import grouped, ungrouped
from moe_ops.schemes import QuantDesc, QuantScheme, get_scheme

_AT_ONCE = 1 << 24  # elements that quantize_experts works on at a time


class Scales(NamedTuple):
    """Scales of weights (..., N, K), for (...) experts.

    Which of them exist depends on the scheme (`schemes.QuantDesc`). Used as in
    `dequantize_weight(qdata, scheme, *scales)`.
    """

    scale: Tensor
    zero_point: Tensor | None = None  # or minimum, shaped like scale
    global_scale: Tensor | None = None  # (...) fp32, or (..., N, 1) with one for each row
    channel_scale: Tensor | None = None  # (..., N, 1) fp32, or fp16 in two levels

    def of(self, experts: int | Tensor) -> Scales:
        """The Scales of one expert, or of the experts that a 1-D tensor lists."""
        if isinstance(experts, Tensor):
            return Scales._make([t if t is None else t.index_select(0, experts) for t in self])
        return Scales._make([t if t is None else t[experts] for t in self])


def quantize_weight(weight: Tensor, scheme: str | QuantScheme) -> tuple[Tensor, Scales]:
    """Quantize expert weights.

    Args:
        weight: (N, K) of one expert or (..., N, K), any float dtype.
        scheme: a scheme with quantized weights, or its name. K must be a multiple of its group
            (`QuantScheme.why_not_shape`).

    Returns:
        qdata (..., N, K) in the scheme's storage dtype, with fewer columns if elements share
        bytes, and its Scales. The scale is (...) for one per expert, (..., N, 1) per channel,
        (..., N, K / group) per group, (..., ceil(N/128), ceil(K/128)) per block; e8m0 scales are
        uint8.
    """
    desc = get_scheme(scheme).quantized_weight
    if desc.two_levels:
        return _in_two_levels(weight.to(torch.float32), desc)
    n, k = weight.shape[-2:]
    parts = grouped(weight, desc.group).to(
        torch.float32
    )  # (..., n groups, rows, k groups, columns)
    scales, divisor, zero_point = _scales(parts, desc, weight.dtype)
    if desc.minimum:
        assert scales.zero_point is not None
        parts = parts - _of_groups(scales.zero_point.to(torch.float32), desc)
    if zero_point is not None:
        zero_point = ungrouped(zero_point.expand(parts.shape), n, k)
    # of levels as bitsandbytes does it, by a reciprocal that is finite
    parts = parts * (1 / divisor.clamp(min=1e-38)) if desc.format.levels else parts / divisor
    parts = ungrouped(parts, n, k)
    return encode(parts, desc.format, zero_point).contiguous(), scales


def quantize_experts(weight: Tensor, scheme: str | QuantScheme) -> tuple[Tensor, Scales]:
    """`quantize_weight` of (E, N, K) or (N, K), a few experts at a time, because it makes about
    ten fp32 copies.
    """
    experts = max(1, _AT_ONCE // (weight.shape[-2] * weight.shape[-1]))
    if weight.dim() == 2 or experts >= weight.shape[0]:
        return quantize_weight(weight, scheme)
    chunks = environment.progress_bar(weight.split(experts), "quantizing")
    parts = [quantize_weight(w, scheme) for w in chunks]
    scales = zip(*[scales for _, scales in parts], strict=True)
    joined = [None if s[0] is None else torch.cat(s) for s in scales]
    return torch.cat([qdata for qdata, _ in parts]), Scales._make(joined)


def dequantize_weight(
    qdata: Tensor,  # (..., N, K)
    scheme: str | QuantScheme,
    scale: Tensor,
    zero_point: Tensor | None = None,
    global_scale: Tensor | None = None,
    channel_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values of quantized weights, (q - zero_point) * scale * channel_scale / global_scale, or
    (q - least) * scale + minimum: computed in fp32, then rounded once to ``dtype``. q * scale is
    rounded to e4m3 first where the description says so (`QuantDesc.e4m3_products`).

    Args:
        qdata: (N, K) of one expert, or any number of experts (..., N, K), as stored.
        scheme: the weights' scheme or its name.
        scale, zero_point, global_scale, channel_scale: a `Scales` of such a qdata.

    Returns:
        A plain tensor (..., N, K), where K counts elements.
    """
    scheme = get_scheme(scheme)
    desc = scheme.quantized_weight
    n, k = scheme.logical_shape(*qdata.shape[-2:])
    if desc.two_levels:
        assert channel_scale is not None
        scale, zero_point = two_levels.in_one_level(scale, zero_point, channel_scale, desc)
        channel_scale = None
    values = grouped(decode(qdata, desc.format, zero_point is not None), desc.group)
    # in place: `decode` made a copy
    if zero_point is not None:
        least = desc.format.least_integer
        values = values.sub_(least if desc.minimum else _of_groups(zero_point, desc))
    values = values.mul_(_of_groups(scale_to_float32(scale, desc), desc))
    if desc.minimum:
        assert zero_point is not None
        values = values.add_(_of_groups(zero_point.to(torch.float32), desc))
    if desc.e4m3_products:
        values = round_products_to_e4m3(values)
    values = ungrouped(values, n, k)
    if channel_scale is not None:
        values = values.mul_(channel_scale)
    if global_scale is not None:
        of_rows = global_scale.dim() == qdata.dim()
        values = values.div_(global_scale if of_rows else global_scale[..., None, None])
    return values.to(dtype)


def scale_to_float32(scale: Tensor, desc: QuantDesc) -> Tensor:
    """Stored scales as fp32 numbers."""
    if desc.is_mx:
        return e8m0_to_float32(scale)
    return (
        e4m3_to_float32(scale) if scale.dtype == torch.float8_e4m3fn else scale.to(torch.float32)
    )


def _scales(
    parts: Tensor, desc: QuantDesc, dtype: torch.dtype
) -> tuple[Scales, Tensor, Tensor | None]:
    """(Scales, divisors of elements, zero points) of grouped weights, of which a minimum has been
    taken off. The last two broadcast to `parts`.
    """
    amax = parts.abs().amax((-3, -1), keepdim=True)
    if desc.is_mx:
        codes = scaling.exponents(amax, desc)
        return Scales(_squeeze(codes, desc)), e8m0_to_float32(codes), None
    if desc.global_scale:
        global_ = scaling.global_scale(amax.amax((-4, -2), keepdim=True), desc)
        scale = scaling.block_scales(amax, global_, desc)
        divisor = infinite_where_zero(e4m3_to_float32(scale)) / global_
        per_expert = global_[..., 0, 0, 0, 0].contiguous()
        return Scales(_squeeze(scale, desc), global_scale=per_expert), divisor, None
    if desc.channel_scale:
        channel = scaling.channel_scale(amax.amax(-2, keepdim=True), desc)
        scale = scaling.group_scales(amax, channel, desc)
        divisor = infinite_where_zero(e4m3_to_float32(scale) * channel)
        per_row = _squeeze(channel, desc).contiguous()
        return Scales(_squeeze(scale, desc), channel_scale=per_row), divisor, None
    dtype = desc.scale_dtype or dtype
    if desc.has_zero:
        low, high = parts.amin((-3, -1), keepdim=True), parts.amax((-3, -1), keepdim=True)
        if desc.minimum:
            scale, minimum = scaling.with_minimum(low, high, desc, dtype)
            found = Scales(_squeeze(scale, desc), _squeeze(minimum, desc))
            first = torch.full_like(low, desc.format.least_integer)
            return found, scale.to(torch.float32), first
        scale, zero_point = scaling.with_zero_point(low, high, desc, dtype)
        stored = _squeeze(zero_point, desc).to(desc.storage_dtype)
        return Scales(_squeeze(scale, desc), stored), scale.to(torch.float32), zero_point
    scale = scaling.weight_steps(amax, desc).to(dtype)
    if not desc.format.levels:  # of which none may be 0: their zeros are those of the scale
        scale = scaling.one_where_zero(scale)
    return Scales(_squeeze(scale, desc)), scale.to(torch.float32), None


def _in_two_levels(weight: Tensor, desc: QuantDesc) -> tuple[Tensor, Scales]:
    """`quantize_weight` of fp32 weights: the nearest elements beside scales that are searched."""
    codes, minima, above = two_levels.fit(weight, desc)
    scale, minimum = two_levels.in_one_level(codes, minima, above, desc)
    parts = grouped(weight, desc.group)
    first = None
    if minimum is not None:
        parts = parts - _of_groups(minimum, desc)
        first = parts.new_full((), desc.format.least_integer)
    parts = ungrouped(parts / _of_groups(infinite_where_zero(scale), desc), *weight.shape[-2:])
    return encode(parts, desc.format, first).contiguous(), Scales(codes, minima, None, above)


def _of_groups(scale: Tensor, desc: QuantDesc) -> Tensor:
    """A stored scale or zero point, broadcast to grouped weights."""
    scale = scale[..., None, None] if desc.group.is_tensor else scale
    return scale[..., :, None, :, None]


def infinite_where_zero(scale: Tensor) -> Tensor:
    """The scale, with infinity in place of 0, so that a group whose scale rounds to 0 is all
    zeros.
    """
    return torch.where(scale == 0, torch.inf, scale)


def _squeeze(scale: Tensor, desc: QuantDesc) -> Tensor:
    scale = scale.squeeze(-1).squeeze(-2)
    return scale[..., 0, 0].contiguous() if desc.group.is_tensor else scale
