"""Expert weights in 8-bit integers, one scale per output channel or per group along a row."""

from __future__ import annotations

from moe_ops.tensors.base import ExpertTensor


class Int8ExpertTensor(ExpertTensor):
    """int8 weights: value = (qdata - zero_point) * scale, for the schemes named "int8_...".

    qdata is (E, N, K) int8. scale is (E, N, 1) per channel, (E, N, K/g) per group of g = 32, 64 or 128
    columns, in the float dtype of the weights that were quantized (any of bf16, fp16, fp32 in
    ``from_quantized``), fp32 where activations are quantized too. zero_point is int8, shaped like scale,
    in the variants that end in ":zp"; others are symmetric, scale = amax / 127.5.
    """
