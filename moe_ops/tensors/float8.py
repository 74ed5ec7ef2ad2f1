"""Expert weights in e4m3 with fp32 scales: one per expert, per output channel or per 128x128 block."""

from __future__ import annotations

from moe_ops.tensors.base import ExpertTensor


class Float8ExpertTensor(ExpertTensor):
    """e4m3 weights: value = qdata * scale of its group, for the schemes named "fp8_...".

    qdata is (E, N, K) float8_e4m3fn; scale is fp32, (E,) per expert, (E, N, 1) per channel,
    (E, ceil(N/128), ceil(K/128)) per block. See ``ExpertTensor`` for the rest.
    """
