"""What benchmarks/experts.py compares: a peer of GPUs on a CPU, with its operator in plain torch,
against the fp64 oracle; and which cells there are.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.paths import BENCHMARKS

SIZES = (6, 2, 256, 256)
# Rounding gate and up to bf16 takes some elements of h to the next number in e4m3, 6 % away.
TOLERANCE = 0.035


@pytest.fixture
def modules(monkeypatch):
    """The benchmark's modules `cases` and `peers`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cases
    import peers

    monkeypatch.setitem(cases.SHAPES, "small", cases.Experts(*SIZES))
    odd = cases.Experts(4, 2, 192, 160, activation="swigluoai", bias=True)
    monkeypatch.setitem(cases.SHAPES, "odd", odd)
    return cases, peers


def error(modules, make, scheme, M):
    """Of a peer's result, against the oracle with everything rounded as the scheme says."""
    cases, _ = modules
    case, shape = cases.Case("small", scheme, M), cases.SHAPES["small"]
    weights = cases.make_weights(shape, scheme, *cases.make_plain_weights(shape, "cpu"))
    cell = cases.make_cell(case, weights, cases.make_sets(case, 0)[-1:])
    layer = make(weights)(cell)
    expected = cases.oracle(cell, 0, torch.arange(M), True, True)
    for _ in range(2):  # what a call leaves in its buffers does not matter to the next
        out = layer.call(0)
    assert out.shape == cell.hidden_states.shape and out.dtype == torch.bfloat16
    return ((out.double() - expected).norm() / expected.norm()).item()


def test_cells_whose_groups_do_not_fill_rows_are_left_out(modules):
    import experts

    assert not experts.fits("odd", "int4_w4a16:g128") and experts.fits("odd", "mxfp4_w4a16")
    assert experts.fits("small", "int4_w4a16:g128") and experts.fits("odd", "fp8_block")


def test_torchs_scaled_grouped_mm_is_called_as_it_is_defined(modules, monkeypatch):
    """torch has it for CUDA alone: its own checks of arguments do not run here."""
    _, peers = modules
    if not hasattr(F, "scaled_grouped_mm"):
        pytest.skip("torch has no scaled_grouped_mm")
    by_row = torch.nn.functional.ScalingType.RowWise

    def multiply(a, b, sa, how_a, sb, how_b, *, offs, output_dtype, use_fast_accum):
        assert how_a == how_b == by_row and use_fast_accum and offs.dtype == torch.int32
        assert sa.shape == a.shape[:1] and sb.shape == b.shape[::2] and sb.is_contiguous()
        assert a.is_contiguous() and b.stride(1) == 1
        out = torch.zeros(a.shape[0], b.shape[2], dtype=torch.float64)
        start = 0
        for e, end in enumerate(offs.tolist()):
            w = b[e].double() * sb[e]
            out[start:end] = (a[start:end].double() * sa[start:end, None]) @ w
            start = end
        return out.to(output_dtype)

    monkeypatch.setattr(F, "scaled_grouped_mm", multiply)
    assert error(modules, peers.torch_scaled_grouped_mm, "fp8_channel", 40) < TOLERANCE


def test_every_implementation_can_be_drawn(modules):
    import report

    assert set(report.NAMES) <= set(report.STYLES)


def test_weights_of_all_schemes_are_quantized_in_parts(modules, monkeypatch):
    """Some experts at a time, as all at once."""
    import moe_ops
    from moe_ops.bench import layers

    cases, _ = modules
    monkeypatch.setattr(layers, "_CHUNK_BYTES", 1)
    plain = torch.randn(3, 128, 256, dtype=torch.bfloat16)
    for scheme in filter(None, cases.SCHEMES):
        scale = 0.5 if scheme.endswith("_static") else None
        parts = layers.quantized(plain, scheme, scale)
        whole = moe_ops.quantize(plain, scheme, activation_scale=scale)
        assert torch.equal(parts.dequantize(), whole.dequantize()), scheme
        assert parts.activation_scale == whole.activation_scale
