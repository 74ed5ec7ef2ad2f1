"""Expert weights in e4m3 with one scale per expert, per output channel or per 128x128 block."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.numerics import dequantize_weight, quantize_weight
from moe_ops.schemes import get_scheme
from moe_ops.tensors.base import ExpertTensor
from moe_ops.tensors.views import TRANSPOSED


class Float8ExpertTensor(ExpertTensor):
    """e4m3 weights: value = qdata * scale of its group, for the schemes named "fp8_...".

    qdata is (E, N, K) float8_e4m3fn; scale is fp32, (E,) per expert, (E, N, 1) per channel,
    (E, ceil(N/128), ceil(K/128)) per block. See ``ExpertTensor`` for the rest.
    """

    @classmethod
    def from_hp(
        cls, weight: Tensor, scheme: str, activation_scale: Tensor | None = None
    ) -> Float8ExpertTensor:
        """Quantize plain weights (E, N, K) or (N, K); ``moe_ops.quantize`` adds the checks."""
        name = get_scheme(scheme).name
        qdata, scale = quantize_weight(weight.detach(), name)
        return cls(qdata, scale, name, "", weight.dtype, activation_scale=activation_scale)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype = self.dtype if dtype is None else dtype
        if self.weight_layout != TRANSPOSED:
            return dequantize_weight(self.qdata, self.scale, self.scheme, dtype)
        scale = self.scale
        if not get_scheme(self.scheme).quantized_weight.group.is_tensor:
            scale = scale.transpose(-2, -1)
        qdata = self.qdata.transpose(-2, -1)
        return dequantize_weight(qdata, scale, self.scheme, dtype).transpose(-2, -1)
