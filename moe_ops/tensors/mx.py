"""Expert weights in the OCP microscaling formats: blocks of 32 along a row share a power of two."""

from __future__ import annotations

from moe_ops.tensors.base import ExpertTensor


class MXExpertTensor(ExpertTensor):
    """MX weights: value = element * 2 ** (scale - 127), for the schemes named "mxfp4...", "mxfp6...", "mxfp8".

    qdata is (E, N, K/2) uint8 for mxfp4 (e2m1, the even column in the low half of a byte), (E, N, 3K/4) uint8
    for mxfp6 (four elements in three bytes, the first in the lowest six bits), (E, N, K) float8_e4m3fn for
    mxfp8. scale is (E, N, K/32) uint8, the e8m0 code (float8_e8m0fnu holds the same bytes). How ``quantize``
    finds the exponents is part of the scheme: see ``moe_ops.schemes.QuantDesc``.
    """
