"""What benchmarks/experts.py compares: a peer of GPUs on a CPU, with its operator in plain torch,
against the fp64 oracle; and which cells there are.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.support import gguf
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


def test_blocks_of_ggml_hold_the_numbers_that_moe_ops_reads(modules):
    """And they are near the weights: as near as ggml's, but for IQ4_NL's unsearched scales."""
    import gguf_blocks

    weight = torch.randn(2, 5, 512)
    far = {"Q8_0": 0.006, "Q6_K": 0.019, "Q4_K": 0.075, "IQ4_XS": 0.078, "IQ4_NL": 0.095}
    for scheme, kind in gguf_blocks.TYPES.items():
        blocks = gguf_blocks.blocks_of(weight, scheme)
        numbers = gguf.values(kind.name, blocks.numpy().tobytes(), weight.shape)
        numbers = torch.from_numpy(numbers)
        assert torch.equal(gguf_blocks.read(blocks, scheme).dequantize(torch.float32), numbers)
        assert (numbers - weight).norm() < far[kind.name] * weight.norm(), kind.name
        assert gguf.TYPES[kind.name][0] == kind.number


@pytest.mark.parametrize("scheme", ["q4_k", "iq4_xs"])
@pytest.mark.parametrize("M", [5, 70])
def test_the_ggufs_operators_are_called_as_they_are_defined(modules, monkeypatch, scheme, M):
    """Both read pairs by their number; blocks of pairs are padded with the number of all pairs."""
    import gguf_blocks
    import vllm_gguf

    from moe_ops.schemes import get_scheme

    name, used = get_scheme(scheme).name, set()

    def products(x, w, number, rows, top_k, experts):
        assert gguf_blocks.TYPES[name].number == number and rows == w.shape[1]
        dense = gguf_blocks.read(w, name).dequantize(torch.float64)
        out = x.new_full((len(experts), rows), float("nan"))
        for pair, expert in experts.items():
            out[pair] = (x[pair // top_k].double() @ dense[expert].T).to(x.dtype)
        return out

    def vector(x, w, ids, top_k, number, rows, tokens):
        used.add("vector")
        assert len(x) == tokens and ids.is_contiguous() and ids.dtype == torch.int32
        return products(x, w, number, rows, top_k, dict(enumerate(ids.flatten().tolist())))

    def blocks(x, w, pairs, experts, count, number, rows, top_k, tokens):
        used.add("blocks")
        assert len(x) == tokens and len(pairs) == 4 * len(experts) == count.item()
        assert {t.dtype for t in (pairs, experts, count)} == {torch.int32}
        of = experts.repeat_interleave(4).tolist()
        found = zip(pairs.tolist(), of, strict=True)
        found = {pair: expert for pair, expert in found if pair < tokens * top_k}
        return products(x, w, number, rows, top_k, found)

    fake = SimpleNamespace(
        ggml_moe_a8_vec=vector, ggml_moe_a8=blocks, ggml_moe_get_block_size=lambda number: 4
    )
    monkeypatch.setattr(vllm_gguf, "load", lambda: fake)
    assert error(modules, modules[1].layer_of(vllm_gguf.make), name, M) < 0.01
    assert used == {"blocks" if M > vllm_gguf.VECTOR_TOKENS and scheme == "q4_k" else "vector"}


@pytest.mark.parametrize("M", [1, 70])
def test_grouped_nf4_gemms_products_are_called_as_they_are_defined(modules, monkeypatch, M):
    """In bitsandbytes' codes; at one token a group is a row, else a tile is of one expert."""
    import nf4_layers

    from moe_ops.schemes import ELEMENT_FORMATS

    levels = torch.tensor(ELEMENT_FORMATS["nf4"].levels)

    def weights(packed, absmax):
        codes = torch.stack((packed >> 4, packed & 15), -1).flatten(-2)
        return (levels[codes.int()].unflatten(-1, (-1, 64)) * absmax.unsqueeze(-1)).flatten(-2)

    def of_rows(x, packed, absmax, sizes, experts):
        assert sizes == [1] * len(x) and absmax.dtype == torch.float32
        dense = weights(packed, absmax)[experts.long()]
        return (dense.double() @ x.double().unsqueeze(-1)).squeeze(-1).to(x.dtype)

    def tiles(ids, count, height):
        order, row0, rows, group = ids.argsort(stable=True), [], [], []
        begin = 0
        for expert, size in enumerate(ids.bincount(minlength=count).tolist()):
            for start in range(0, size, height):
                row0, group = [*row0, begin + start], [*group, expert]
                rows.append(min(height, size - start))
            begin += size
        return torch.tensor(row0), torch.tensor(rows), torch.tensor(group), order, None

    def of_tiles(x, packed, absmax, row0, rows, group, height):
        dense, out = weights(packed, absmax), x.new_full((len(x), packed.shape[1]), float("nan"))
        for first, count, expert in zip(row0, rows, group, strict=True):
            part = slice(first, first + count)
            out[part] = (x[part].double() @ dense[expert].double().T).to(x.dtype)
        return out

    fake = SimpleNamespace(
        gemm_4bit_grouped=of_rows,
        gemm_4bit_grouped_captured=of_tiles,
        build_group_tiles_device=tiles,
        _prefill_block_m=lambda rows: 16,
    )
    monkeypatch.setattr(nf4_layers, "grouped_module", lambda: fake)
    layer = modules[1].layer_of(nf4_layers.grouped_nf4_gemm)
    assert error(modules, layer, nf4_layers.SCHEMES[0], M) < 0.01


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
