"""Packed weights written in 16 bits against the oracle's values, interpreted on a CPU and compiled
on a GPU (`-m gpu`)."""

from __future__ import annotations

import math

import pytest
import torch

from moe_ops.autograd import decoded
from moe_ops.kernels.launch import gpu, run
from moe_ops.ops.call import Weight
from tests.kernels.mixed_gemm.test_packed import FORMATS, everywhere, on, quantized
from tests.support import oracle
from tests.support.cases import BF16, FP16, FP32, fitting

pytest.importorskip("triton")

from moe_ops.kernels.mixed_gemm.dequantize import dequantize

REFUSED = {"nvfp4_w4a16": "divided by its scale"}  # and formats of 5 and 6 bits


def expected(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    scale, zero, _, channel_scale = weight.scales
    values = oracle.dequantized(weight.data, scale, weight.scheme, zero, None, channel_scale)
    return values.to(dtype)


@everywhere
@pytest.mark.parametrize("scheme", FORMATS)
@pytest.mark.parametrize("even", [False, True])
def test_formats(where, scheme, even):
    """All experts, and some of them with others around; nothing beside them is written."""
    device, dtype = where
    N = 128 if even else 136 if "block" in scheme else 40
    weight = on(quantized(scheme, N, fitting(256 if even else 136, scheme)), device)
    facts = gpu(-1 if device == "cpu" else 0)
    reason = decoded.why_not(weight, facts)
    bits = decoded.operand_of(weight, facts).format.bits
    assert (reason is not None) == (scheme in REFUSED or bits in (5, 6)), reason
    if reason:
        assert REFUSED.get(scheme, "its format is none of this kernel's") in reason
        return
    values = expected(weight, dtype).to(device)
    of_scales = weight.scales[0].dtype
    short = dtype == BF16 and of_scales in (FP16, FP32, torch.int8)
    rounded = 2.0 ** (-11 if of_scales == torch.int8 else -12) / 3**0.5  # test_packed.py says why
    for part in (slice(0, 4), slice(1, 3)):
        y = torch.full((6, *values.shape[1:]), math.nan, dtype=dtype, device=device)
        w = decoded.operand_of(weight, facts, part)
        run([dequantize(y[1 : 1 + w.E], w)], y.get_device(), facts)
        assert y[0].isnan().all() and y[1 + w.E :].isnan().all()
        error = oracle.relative_error(y[1 : 1 + w.E], values[part])
        assert error <= (rounded if short else 2e-5)
