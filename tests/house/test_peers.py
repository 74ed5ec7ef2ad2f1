"""Peers of benchmarks/experts.py that run on a GPU alone, on a CPU with their operators in plain
torch: under the schemas that their libraries register, so that calls match argument for argument,
and against the fp64 oracle."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

from moe_ops.bench.shapes import Shape
from tests.support.paths import BENCHMARKS

SHAPE = Shape(6, 2, 256, 256)
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
    ),
}


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


@pytest.fixture
def modules(monkeypatch):
    """The benchmark's modules `cases`, `peers` and `vllm_cutlass`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cases
    import peers
    import vllm_cutlass

    monkeypatch.setitem(cases.SHAPES, "small", SHAPE)
    return cases, peers, vllm_cutlass


def error(modules, make, scheme, M):
    """Of a peer's result, against the oracle with everything rounded as the scheme says."""
    cases, _, _ = modules
    case = cases.Case("small", scheme, M)
    weights = cases.make_weights(SHAPE, scheme, *cases.make_plain_weights(SHAPE, "cpu"))
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
    operators = Operators()
    with contextlib.ExitStack() as stack:
        for namespace, schemas in SCHEMAS.items():
            library = stack.enter_context(torch.library._scoped_library(namespace, "FRAGMENT"))
            for schema in schemas:
                library.define(schema)
                name = schema.split("(")[0]
                library.impl(name, getattr(operators, name), "CompositeExplicitAutograd")
        assert error(modules, peers.vllm_layer, scheme, M) < TOLERANCE


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
    import experts_report

    assert set(experts_report.NAMES) <= set(experts_report.STYLES)


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
