"""Rows that a training step rounds as a scheme quantizes activations, against the oracle,
interpreted on a CPU and compiled on a GPU (`-m gpu`)."""

from __future__ import annotations

import pytest
import torch

from moe_ops.kernels.launch import gpu, run
from moe_ops.kernels.rows.frozen import frozen
from moe_ops.schemes import SCHEMES
from tests.kernels.mixed_gemm.test_packed import everywhere
from tests.support import oracle
from tests.support.cases import BF16, QUANTIZED, STATIC_SCALES

rounding = pytest.importorskip("moe_ops.kernels.rows.emulated")
ROUNDED = [name for name in SCHEMES if name and (how := frozen(name)) and how.elements]


@everywhere
@pytest.mark.parametrize("scheme", ROUNDED)
def test_router_weights_come_before_rounding(where, scheme):
    """In fp32: products that were rounded to bf16 first would have other codes."""
    device, dtype = where
    how = frozen(scheme)
    x, weights = torch.randn(64, 256).to(dtype), torch.rand(64, 1)
    scale = torch.tensor(STATIC_SCALES[:1]) if "static" in scheme else None
    # rounded once to fp32, as the kernel does: beside a boundary of the elements or of a group's
    # exponent an unrounded product can have the other code
    product = (x.float() * weights).double()
    expected = oracle.quantized_activation(product, scheme, scale)
    twice = oracle.quantized_activation(product.to(BF16).double(), scheme, scale)
    x, weights = x.to(device), weights.to(device)
    y = torch.full(x.shape, torch.nan, device=device)
    on = None if scale is None else scale.to(device)
    index = x.get_device()
    of = gpu(index)
    run([rounding.round_rows(how.rounding, y, x, weights, on, of)], index, of)
    error = oracle.relative_error(y.cpu(), expected)
    assert error < 2 * QUANTIZED and error < 0.4 * oracle.relative_error(twice, expected)
