"""Expert weights by format: one class each, which says what its tensors look like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.meta.scales import FLAT
from moe_ops.ops.relayout import natural

# registered before: a subclass copies its parent's operators when it is defined
from moe_ops.tensors import functions, sharding  # noqa: F401
from moe_ops.tensors.base import ExpertTensor


class Float8ExpertTensor(ExpertTensor):
    """e4m3 weights: value = qdata * scale of its group, for the schemes named "fp8_...".

    qdata is (E, N, K) float8_e4m3fn; scale is fp32, (E,) per expert, (E, N, 1) per channel,
    (E, ceil(N/128), ceil(K/128)) per block, powers of two for "fp8_block:ue8m0". See
    ``ExpertTensor`` for the rest. Schemes of one's own whose elements are floating-point numbers
    under scales in fp32 have this class too.
    """


class Int8ExpertTensor(ExpertTensor):
    """int8 weights: value = (qdata - zero_point) * scale, for the schemes named "int8_...", or
    (qdata + 128) * scale + zero_point for those that end in ":min".

    qdata is (E, N, K) int8. scale is (E, N, 1) per channel, (E, N, K/g) per group of g = 32, 64 or
    128 columns, in the float dtype of the weights that were quantized (any of bf16, fp16, fp32 in
    ``from_quantized``), fp32 where activations are quantized too. zero_point is int8, shaped like
    scale, in the variants that end in ":zp"; in those that end in ":min" it is the minimum of
    each group, in the dtype of scale = (maximum - minimum) / 255; others are symmetric, scale =
    amax / 127.5.
    """


class Int4ExpertTensor(ExpertTensor):
    """int4 weights: value = (code - zero_point) * scale, for the schemes named "int4_...", or code
    * scale + zero_point for those that end in ":min".

    qdata is (E, N, K/2) uint8: codes 0..15, the even column in the low half of a byte.
    "int4_w4a16" has scales (E, N, K/g) for groups of g = 32, 64 or 128 columns, or (E, N, 1), in
    the float dtype of the weights that were quantized (any of bf16, fp16, fp32 in
    ``from_quantized``); zero_point is uint8 0..15, shaped like scale, in the variants that end in
    ":zp", and 8 in the others, where scale = amax / 7.5. In those that end in ":min" zero_point is
    the minimum of each group, in the dtype of scale = (maximum - minimum) / 15. In
    "int4_w4a16:g32:super:min" scale and zero_point are int8 codes, and channel_scale is fp16
    (E, N, K/128): what multiplies the scales of 256 columns, and what multiplies their minima, in
    turn.

    "int4_w4a8" has e4m3 scales (E, N, K/128) and channel_scale fp32 (E, N, 1): value = e4m3((code
    - 8) * scale) * channel_scale, where e4m3 rounds to the nearest, ties to even, as kernels do
    that multiply in fp8. Its scales are at most 56, so that these products are at most 448.
    """


class PackedIntExpertTensor(ExpertTensor):
    """Integers of 5 and 6 bits: value = (code - 16) * scale for "int5_w5a16:g32", (code - 32) *
    scale for "int6_w6a16:g16", code * scale + zero_point for "int5_w5a16:g32:min". Of
    "int5_w5a16:g32:super:min" and "int6_w6a16:g16:super", whose scales are int8 codes,
    channel_scale is as in `Int4ExpertTensor`, of the latter (E, N, K/256) without minima.

    qdata is uint8 (E, N, 5K/8) or (E, N, 3K/4): of 128 columns in turn the low four bits, two
    columns a byte, then 16 or 32 bytes of the others
    (`moe_ops.schemes.ElementFormat.high_bits`).
    scale and zero_point, a minimum, are as in `Int4ExpertTensor`.
    """


class LevelsExpertTensor(ExpertTensor):
    """Weights of 16 levels: value = level * scale, for the schemes named "nf4_...", "fp4_..." and
    "iq4_...". `moe_ops.schemes.ELEMENT_FORMATS` has the level of each code.

    qdata is (E, N, K/2) uint8, the even column in the low half of a byte. scale is (E, N, K/g), in
    fp32 the largest magnitude of a group for nf4 and fp4, whose levels reach from -1 to 1;
    "iq4_w4a16" has it in any float dtype, and of either sign; in "iq4_w4a16:g32:super" it is an
    int8 code, and channel_scale, fp16 (E, N, K/256), multiplies those of 256 columns.
    """


class MXExpertTensor(ExpertTensor):
    """MX weights: value = element * 2 ** (scale - 127), for the schemes named "mxfp4...",
    "mxfp6...", "mxfp8".

    qdata is (E, N, K/2) uint8 for mxfp4 (e2m1, the even column in the low half of a byte), (E, N,
    3K/4) uint8 for mxfp6 (four elements in three bytes, the first in the lowest six bits), (E, N,
    K) float8_e4m3fn for mxfp8. scale is (E, N, K/32) uint8, the e8m0 code (float8_e8m0fnu holds
    the same bytes). How ``quantize`` finds the exponents is part of the scheme: see
    ``moe_ops.schemes.QuantDesc``.
    """


class NVFP4ExpertTensor(ExpertTensor):
    """NVFP4 weights: value = element * scale / global_scale, for "nvfp4" and "nvfp4_w4a16".

    qdata is (E, N, K/2) uint8, the even column in the low half of a byte; scale is (E, N, K/16)
    float8_e4m3fn; global_scale is (E,) fp32, 448 * 6 / (largest magnitude of the expert), or
    (E, N, 1) with one for each row, as w13 has where gate and up were quantized apart. ModelOpt's
    checkpoints hold its reciprocal as weight_scale_2.

    With "nvfp4" activations have a global scale too: 1 / activation_scale where one is given
    (ModelOpt's input_scale, amax / (448 * 6)), else from the data of each call.
    """


class PlainExpertTensor(ExpertTensor):
    """Plain weights whose rows or columns lie in another order than their shape says: what
    ``prepare`` makes of a tensor. qdata is (E, N, K) in the weights' own dtype; there is no scale,
    and the scheme is "".
    """

    tensor_data_names = ["qdata"]
    optional_tensor_data_names = []

    def __new__(
        cls,
        qdata: Tensor,
        scheme: str = "",
        weight_layout: str = "",
        dtype: torch.dtype = torch.bfloat16,
        requires_grad: bool = False,
    ) -> Any:
        return super().__new__(
            cls, qdata, None, scheme, weight_layout, dtype, requires_grad=requires_grad
        )

    def __init__(
        self,
        qdata: Tensor,
        scheme: str = "",
        weight_layout: str = "",
        dtype: torch.dtype = torch.bfloat16,
        requires_grad: bool = False,
    ):
        super().__init__(qdata, None, scheme, weight_layout, dtype, requires_grad=requires_grad)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights as a plain tensor in their natural order."""
        if self.weight_layout.startswith(FLAT):
            return super().dequantize(dtype)
        return natural(self).to(self.dtype if dtype is None else dtype)
