"""Peers of benchmarks/experts.py that run on a GPU alone, on a CPU with their operators in plain
torch: under the schemas that their libraries register, so that calls match argument for argument,
and against the fp64 oracle."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

from moe_ops import activations
from tests.support.paths import BENCHMARKS

SIZES = (6, 2, 256, 256)
# Rounding gate and up to bf16 takes some elements of h to the next number in e4m3, 6 % away.
TOLERANCE = 0.035
# as vLLM 0.26.0 registers them
SCHEMAS = {
    "_C": (
        "cutlass_moe_mm(Tensor! out_tensors, Tensor a_tensors, Tensor b_tensors, Tensor a_scales, "
        "Tensor b_scales, Tensor expert_offsets, Tensor problem_sizes, Tensor a_strides, "
        "Tensor b_strides, Tensor c_strides, bool per_act_token, bool per_out_ch) -> ()",
        "get_cutlass_moe_mm_problem_sizes_from_expert_offsets(Tensor expert_first_token_offset, "
        "Tensor! problem_sizes1, Tensor! problem_sizes2, int n, int k, bool swap_ab) -> ()",
        "cutlass_w4a8_moe_mm(Tensor! out_tensors, Tensor a_tensors, Tensor b_tensors, "
        "Tensor a_scales, Tensor b_scales, Tensor b_group_scales, int b_group_size, "
        "Tensor expert_offsets, Tensor problem_sizes, Tensor a_strides, Tensor b_strides, "
        "Tensor c_strides, Tensor group_scale_strides, str? maybe_schedule) -> ()",
        "cutlass_encode_and_reorder_int4b_grouped(Tensor b_tensors) -> (Tensor, Tensor)",
        "cutlass_pack_scale_fp8(Tensor scales) -> Tensor",
        "silu_and_mul(Tensor! result, Tensor input) -> ()",
        "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, "
        "int[]? group_shape=None) -> ()",
        "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, "
        "Tensor? scale_ub) -> ()",
        "swigluoai_and_mul(Tensor! out, Tensor input, float alpha=1.702, float limit=7.0) -> ()",
    ),
    "_moe_C": (
        "moe_permute_with_scratch(Tensor input, Tensor topk_ids, Tensor token_expert_indices, "
        "Tensor? expert_map, int n_expert, int n_local_expert, int topk, Tensor! permuted_input, "
        "Tensor! expert_first_token_offset, Tensor! inv_permuted_idx, Tensor! permuted_idx, "
        "Tensor! sort_workspace, Tensor! permuted_experts_id, Tensor! sorted_row_idx, "
        "Tensor! topk_ids_for_sort) -> ()",
        "moe_unpermute(Tensor permuted_hidden_states, Tensor topk_weights, "
        "Tensor inv_permuted_idx, Tensor? expert_first_token_offset, int topk, "
        "Tensor! hidden_states) -> ()",
        "moe_permute_sort_workspace_size(int num_expanded_rows, int n_expert) -> int",
        "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, "
        "Tensor! sorted_token_ids, Tensor! experts_ids, Tensor! num_tokens_post_pad, "
        "Tensor? maybe_expert_map) -> ()",
        "moe_sum(Tensor input, Tensor! output, Tensor? topk_ids=None, Tensor? expert_map=None) "
        "-> ()",
        "moe_wna16_marlin_gemm(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, "
        "Tensor? b_bias_or_none, Tensor! b_scales, Tensor? a_scales, Tensor? global_scale, "
        "Tensor? b_zeros_or_none, Tensor? g_idx_or_none, Tensor? perm_or_none, "
        "Tensor! workspace, Tensor sorted_token_ids, Tensor! expert_ids, "
        "Tensor! num_tokens_past_padded, Tensor! topk_weights, int moe_block_size, int top_k, "
        "bool mul_topk_weights, int b_type_id, int size_m, int size_n, int size_k, "
        "bool is_full_k, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float, "
        "int thread_k, int thread_n, int blocks_per_sm) -> Tensor",
    ),
}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1 = torch.cat((E2M1, -E2M1))


def marlins_codes(packed, bits, n, k):
    """Codes (E, k, n) of Marlin's weights. Of each 16 rows and 64 columns, thread t of a warp has
    for each of four tiles of 16 columns rows 0, 1, 8 and 9 from 2 * (t % 4) on, of columns t // 4
    and t // 4 + 8."""
    words = packed.view(-1, k // 16, n // 64, 32, 4, bits // 4)
    codes = torch.full((len(words), k // 16, 16, n // 64, 64), -1)
    order = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}[bits]
    places = [(8 * block, row) for block in (0, 1) for row in (0, 1, 8, 9)]
    for t in range(32):
        for tile in range(4):
            for i in range(8):
                word, at = divmod(i, len(order))
                column, row = places[word * len(order) + order[at]]
                code = words[..., t, tile, word] >> bits * at & 2**bits - 1
                codes[:, :, t % 4 * 2 + row, :, 16 * tile + t // 4 + column] = code
    return codes.view(-1, k, n)


def in_order(stored, places):
    """What Marlin has for columns of the result, (..., n), in their order."""
    out = torch.empty_like(stored).unflatten(-1, (-1, len(places)))
    out[..., places] = stored.unflatten(-1, (-1, len(places)))
    return out.flatten(-2)


OF_GROUPS = [i + 8 * j for i in range(8) for j in range(8)]
OF_ROWS = [2 * i + 8 * j + odd for i in range(4) for j in range(4) for odd in (0, 1)]


def marlins_weights(packed, scales, factor, zeros, kind, n, k):
    """Marlin's weights (E, n, k) in fp64, as its kernels decode each of its formats."""
    bits = 4 if kind in ("uint4", "uint4b8", "e2m1") else 8
    codes = marlins_codes(packed, bits, n, k).double()
    if kind == "e2m1":
        codes = E2M1[codes.long()]
        if factor is None:
            scales = scales.double()
        else:  # five bits of exponent, three of mantissa; elements lack 2^126
            bits_of = scales.view(torch.uint8).to(torch.int16) << 7
            scales = bits_of.view(torch.float16).double() * factor.view(-1, 1, 1) * 2.0**-126
        scales = in_order(scales, [0, 2, 1, 3])
    elif kind == "e4m3":
        codes = codes.to(torch.uint8).view(torch.float8_e4m3fn).double() * 2.0**-120
    elif kind == "uint4":
        shifts = torch.arange(0, 32, 4)
        found = in_order((zeros[..., None] >> shifts & 15).flatten(-2), [0, 2, 4, 6, 1, 3, 5, 7])
        found = in_order(found, OF_GROUPS).double()
        codes -= found.repeat_interleave(k // found.shape[1], 1)
    else:
        codes -= {"uint4b8": 8, "uint8b128": 128}[kind]
    scales = in_order(scales.double(), OF_ROWS if scales.shape[1] == 1 else OF_GROUPS)
    return (codes * scales.repeat_interleave(k // scales.shape[1], 1)).transpose(1, 2)


def multiply_aligned(out, x, weights, bias, pairs, experts, count, block, top_k, router):
    """Products of the blocks of `moe_align_block_size`."""
    assert count.item() % block == 0
    for i, e in enumerate(experts[: count.item() // block].tolist()):
        rows = pairs[i * block : (i + 1) * block]
        rows = rows[rows < x.shape[0] * top_k].long()
        y = x[rows // top_k].double() @ weights[e].T
        y = y if bias is None else y + bias[e].double()
        out[rows] = (y if router is None else y * router.view(-1)[rows, None]).to(out.dtype)


def groups(out, offsets, sizes, swapped):
    """(expert, its rows) as offsets and problem sizes say."""
    ends = [*offsets[1:].tolist(), out.shape[0]]
    for e, (start, end) in enumerate(zip(offsets.tolist(), ends, strict=True)):
        m, n, _ = sizes[e].tolist()
        assert ((n, m) if swapped else (m, n)) == (end - start, out.shape[1])
        if end > start:
            yield e, slice(start, end)


class Operators:
    """The operators of SCHEMAS."""

    def cutlass_moe_mm(self, out, a, b, sa, sb, offsets, sizes, of_a, of_b, of_c, token, channel):
        E, N, K = b.shape
        assert a.dtype == b.dtype == torch.float8_e4m3fn and sa.dtype == sb.dtype == torch.float32
        assert offsets.dtype == torch.int64 and sizes.dtype == torch.int32
        assert of_a.tolist() == of_b.tolist() == [K] * E and of_c.tolist() == [N] * E
        assert token == (sa.numel() > 1) and channel == (sb.numel() == E * N)
        assert a.is_contiguous() and b.is_contiguous() and out.is_contiguous()
        assert (sizes[:, 2] == K).all()
        scale = sb.view(E, -1, 1).double()
        for e, rows in groups(out, offsets, sizes, swapped=out.shape[0] <= 64):
            row_scale = sa[rows] if token else sa
            out[rows] = (a[rows].double() * row_scale) @ (b[e].double() * scale[e]).T

    def get_cutlass_moe_mm_problem_sizes_from_expert_offsets(self, offsets, one, two, n, k, swap):
        for e, m in enumerate(offsets.diff().tolist()):
            one[e] = torch.tensor((2 * n, m, k) if swap else (m, 2 * n, k))
            two[e] = torch.tensor((k, m, n) if swap else (m, k, n))

    def cutlass_encode_and_reorder_int4b_grouped(self, b):
        assert b.dtype == torch.int32 and b.is_contiguous()
        return b.clone(), torch.full((b.shape[0], 3), 7, dtype=torch.int32)

    def cutlass_pack_scale_fp8(self, scales):
        assert scales.dtype == torch.float8_e4m3fn and scales.is_contiguous()
        assert scales.float().abs().max() * 8 <= 448
        return scales.repeat_interleave(8, -1)

    def cutlass_w4a8_moe_mm(
        self, out, a, b, sa, sb, groups_of, size, offsets, sizes, of_a, of_b, of_c, of_s, schedule
    ):
        (E, N, _), K = b.shape, a.shape[1]
        assert b.dtype == torch.int32 and groups_of.dtype == torch.float8_e4m3fn
        assert sa.shape == (a.shape[0], 1) and sb.numel() == E * N and schedule is None
        assert of_a.tolist() == [K] * E and of_c.tolist() == [N] * E and (of_b == 7).all()
        assert of_s.tolist() == [[N, 0]] * E and size == 128
        shifts = torch.arange(0, 32, 4)
        nibbles = (b[..., None] >> shifts & 15).flatten(-2)
        values = torch.where(nibbles > 7, nibbles - 16, nibbles).double()
        scale = groups_of[..., ::8].double().transpose(1, 2).repeat_interleave(128, -1)
        w = (values * scale).to(torch.float8_e4m3fn).double() * sb.view(E, N, 1)
        for e, rows in groups(out, offsets, sizes, swapped=True):
            out[rows] = (a[rows].double() * sa[rows]) @ w[e].T

    def silu_and_mul(self, out, x):
        gate, up = x.float().chunk(2, -1)
        out.copy_(F.silu(gate) * up)

    def static_scaled_fp8_quant(self, out, x, scale, group_shape=None):
        assert scale.numel() == 1 and group_shape is None
        out.copy_((x.float() / scale).clamp(-448, 448).to(out.dtype))

    def dynamic_per_token_scaled_fp8_quant(self, out, x, scale, bound):
        assert scale.shape == (x.shape[0], 1) and bound is None
        scale.copy_(x.float().abs().amax(-1, keepdim=True) / 448)
        out.copy_((x.float() / scale).to(out.dtype))

    def moe_permute_with_scratch(
        self, x, ids, pair, expert_map, n, local, top_k, out, offsets, inverse, order, *scratch
    ):
        assert expert_map is None and n == local and ids.dtype == torch.int32
        assert pair.shape == inverse.shape == ids.shape and offsets.dtype == torch.int64
        assert [t.shape for t in scratch[1:]] == [ids.shape] * 3 and scratch[0].numel() == 64
        found = ids.view(-1).argsort(stable=True)
        order.copy_(found)
        inverse.view(-1)[found] = torch.arange(found.numel(), dtype=torch.int32)
        out.view(torch.uint8).copy_(x.view(torch.uint8)[found // top_k])
        counts = torch.bincount(ids.view(-1), minlength=n)
        offsets.copy_(F.pad(counts.cumsum(0), (1, 0)))

    def moe_unpermute(self, y, weights, inverse, offsets, top_k, out):
        assert weights.dtype == torch.float32 and inverse.shape == (y.shape[0],)
        rows = y[inverse.long()].view(-1, top_k, y.shape[1]).double()
        out.copy_((rows * weights[..., None]).sum(1))

    def moe_permute_sort_workspace_size(self, rows, experts):
        return 64

    def swigluoai_and_mul(self, out, x, alpha=1.702, limit=7.0):
        out.copy_(activations.formula(x.float(), activations.resolve("swigluoai")))

    def moe_align_block_size(self, ids, experts, block, pairs, of_block, count, expert_map):
        assert expert_map is None and pairs.dtype == of_block.dtype == torch.int32
        flat, at = ids.view(-1), 0
        pairs.fill_(flat.numel())
        for e in range(experts):
            mine = (flat == e).nonzero().view(-1)
            pairs[at : at + len(mine)] = mine
            blocks = -(-len(mine) // block)
            of_block[at // block : at // block + blocks] = e
            at += blocks * block
        count.fill_(at)

    def moe_sum(self, x, out, ids=None, expert_map=None):
        assert ids is None and expert_map is None
        out.copy_(x.float().sum(1))

    def moe_wna16_marlin_gemm(
        self, x, out, b, bias, scales, a_scales, factor, zeros, g_idx, perm, locks, pairs, experts,
        count, router, block, top_k, weighted, kind, m, n, k, full, atomic, fp32, zp, *threads,
    ):  # fmt: skip
        import marlin_layer

        names = {
            marlin_layer.UINT4: "uint4",
            marlin_layer.UINT4B8: "uint4b8",
            marlin_layer.UINT8B128: "uint8b128",
            marlin_layer.E4M3: "e4m3",
            marlin_layer.E2M1: "e2m1",
        }
        assert full and fp32 and not (atomic or zp) and threads == (-1, -1, -1)
        assert a_scales is g_idx is perm is None and not locks.any()
        assert (m, k) == x.shape and out.shape == (m * top_k, n)
        # its tiles are 64 rows by 128 columns, or 128 by 64
        assert k % 64 == n % 64 == 0 and (n % 128 == 0 or k % 128 == 0)
        w = marlins_weights(b, scales, factor, zeros, names[kind], n, k)
        bias = bias if bias is None else in_order(bias, OF_ROWS)
        router = router if weighted else None
        multiply_aligned(out, x, w, bias, pairs, experts, count, block, top_k, router)
        return out.new_empty(0)


@pytest.fixture
def modules(monkeypatch):
    """The benchmark's modules `cases`, `peers` and `vllm_cutlass`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cases
    import peers
    import vllm_cutlass

    monkeypatch.setitem(cases.SHAPES, "small", cases.Experts(*SIZES))
    # whose I Marlin's tiles do not divide
    odd = cases.Experts(4, 2, 192, 160, activation="swigluoai", bias=True)
    monkeypatch.setitem(cases.SHAPES, "odd", odd)
    monkeypatch.setitem(cases.SHAPES, "odd halves", cases.Experts(4, 2, 192, 160))
    return cases, peers, vllm_cutlass


@contextlib.contextmanager
def registered():
    """vLLM's operators are those of `Operators`."""
    operators = Operators()
    with contextlib.ExitStack() as stack:
        for namespace, schemas in SCHEMAS.items():
            library = stack.enter_context(torch.library._scoped_library(namespace, "FRAGMENT"))
            for schema in schemas:
                library.define(schema)
                name = schema.split("(")[0]
                library.impl(name, getattr(operators, name), "CompositeExplicitAutograd")
        yield


def error(modules, make, scheme, M, name="small"):
    """Of a peer's result, against the oracle with everything rounded as the scheme says."""
    cases, _, _ = modules
    case, shape = cases.Case(name, scheme, M), cases.SHAPES[name]
    weights = cases.make_weights(shape, scheme, *cases.make_plain_weights(shape, "cpu"))
    cell = cases.make_cell(case, weights, cases.make_sets(case, 0)[-1:])
    layer = make(weights)(cell)
    expected = cases.oracle(cell, 0, torch.arange(M), True, True)
    for _ in range(2):  # what a call leaves in its buffers does not matter to the next
        out = layer.call(0)
    assert out.shape == cell.hidden_states.shape and out.dtype == torch.bfloat16
    return ((out.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("M", [1, 40])
@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_tensor_static", "int4_w4a8"])
def test_vllms_layer_is_called_as_its_operators_say(modules, monkeypatch, scheme, M):
    _, peers, vllm_cutlass = modules
    assert set(vllm_cutlass.SCHEMES) == set(peers.IMPLEMENTATIONS["vLLM CUTLASS"].schemes)
    monkeypatch.setattr(vllm_cutlass, "load", lambda: None)
    with registered():
        assert error(modules, peers.layer_of(vllm_cutlass), scheme, M) < TOLERANCE


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("int4_w4a16:g128", "small"),
        ("int4_w4a16:g32:zp", "odd halves"),
        ("mxfp4_w4a16", "odd"),
        ("nvfp4_w4a16", "odd halves"),
        ("fp8_w8a16:channel", "odd"),
        ("int8_w8a16:channel", "small"),
    ],
)
def test_marlins_layer_is_called_as_its_kernels_decode(modules, monkeypatch, scheme, name):
    _, peers, vllm_cutlass = modules
    import marlin_layer

    monkeypatch.setattr(vllm_cutlass, "load", lambda: None)
    with registered():
        assert error(modules, peers.layer_of(marlin_layer), scheme, 9, name) < 0.01


def test_cells_whose_groups_do_not_fill_rows_are_left_out(modules):
    import experts

    assert not experts.fits("odd", "int4_w4a16:g128") and experts.fits("odd", "mxfp4_w4a16")
    assert experts.fits("small", "int4_w4a16:g128") and experts.fits("odd", "fp8_block")


def test_vllms_layer_says_what_is_missing(modules, monkeypatch, tmp_path):
    _, _, vllm_cutlass = modules
    monkeypatch.delenv(vllm_cutlass.FOLDER, raising=False)
    assert vllm_cutlass.version() is None
    with pytest.raises(RuntimeError, match="MOE_OPS_BENCH_VLLM does not name a folder"):
        vllm_cutlass.load()
    monkeypatch.setenv(vllm_cutlass.FOLDER, str(tmp_path))
    with pytest.raises(RuntimeError, match="must hold _C_stable_libtorch.abi3.so, found none"):
        vllm_cutlass.load()
    (tmp_path / "VERSION").write_text("0.26.0\n")
    assert vllm_cutlass.version() == "0.26.0"


def test_torchs_scaled_grouped_mm_is_called_as_it_is_defined(modules, monkeypatch):
    """torch has it for CUDA alone: its own checks of arguments do not run here."""
    _, peers, _ = modules
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

    cases, _, _ = modules
    monkeypatch.setattr(layers, "_CHUNK_BYTES", 1)
    plain = torch.randn(3, 256, 128, dtype=torch.bfloat16)
    for scheme in filter(None, cases.SCHEMES):
        scale = 0.5 if scheme.endswith("_static") else None
        parts = layers.quantized(plain, scheme, scale)
        whole = moe_ops.quantize(plain, scheme, activation_scale=scale)
        assert torch.equal(parts.dequantize(), whole.dequantize()), scheme
        assert parts.activation_scale == whole.activation_scale
