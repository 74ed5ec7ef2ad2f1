"""Expert weights in 4-bit integers, one scale per group along a row or per output channel."""

from __future__ import annotations

from moe_ops.tensors.base import ExpertTensor


class Int4ExpertTensor(ExpertTensor):
    """int4 weights: value = (code - zero_point) * scale, for the schemes named "int4_...".

    qdata is (E, N, K/2) uint8: codes 0..15, the even column in the low half of a byte. "int4_w4a16" has
    scales (E, N, K/g) for groups of g = 32, 64 or 128 columns, or (E, N, 1), in the float dtype of the weights
    that were quantized (any of bf16, fp16, fp32 in ``from_quantized``); zero_point is uint8 0..15, shaped
    like scale, in the variants that end in ":zp", and 8 in the others, where scale = amax / 7.5.

    "int4_w4a8" has e4m3 scales (E, N, K/128) and channel_scale fp32 (E, N, 1): value = (code - 8) * scale *
    channel_scale. Its scales are at most 56, so that their products with codes fit e4m3 as well.
    """
