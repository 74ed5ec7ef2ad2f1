"""Expert weights in NVFP4: e2m1 elements, an e4m3 scale for each 16 of a row, an fp32 scale per expert."""

from __future__ import annotations

from moe_ops.tensors.base import ExpertTensor


class NVFP4ExpertTensor(ExpertTensor):
    """NVFP4 weights: value = element * scale / global_scale, for "nvfp4" and "nvfp4_w4a16".

    qdata is (E, N, K/2) uint8, the even column in the low half of a byte; scale is (E, N, K/16) float8_e4m3fn;
    global_scale is (E,) fp32, 448 * 6 / (largest magnitude of the expert). ModelOpt's checkpoints hold its
    reciprocal as weight_scale_2.

    With "nvfp4" activations have a global scale too: 1 / activation_scale where one is given (ModelOpt's
    input_scale, amax / (448 * 6)), else from the data of each call.
    """
