"""The fp8 schemes on Triton against fp64, interpreted on a CPU and compiled on a GPU (`-m
gpu`)."""

from __future__ import annotations

import math

import pytest
import torch

import moe_ops
from moe_ops.ops.problem import Machine, Problem
from tests.support import cases, oracle
from tests.support.cases import BF16, FP32, Case
from tests.support.places import everywhere

triton = pytest.importorskip("triton")

from moe_ops.backends.triton import backend
from moe_ops.choose import plain as configs
from moe_ops.choose.table import LayerSizes, override
from moe_ops.kernels.configs import GemmConfig, LayerConfig
from moe_ops.kernels.launch import Gpu
from moe_ops.kernels.rows import e4m3_int8
from moe_ops.kernels.rows.scales import hidden, rows_of
from moe_ops.kernels.rows.scales import scales as scales_of

SCHEMES = [name for name in oracle.ACTIVATIONS if name.startswith("fp8_")]
QUANTIZING = [name for name in SCHEMES if oracle.ACTIVATIONS[name]]
FORMATS = ["fp8_block", "fp8_channel", "fp8_tensor", "fp8_tensor_static", "fp8_w8a16:block"]


# --- the expert layer ----------------------------------------------------------------------------


def rows_an_expert(average, E=2):
    """Ids that give E experts `average` rows each and some tokens none."""
    ids = torch.arange(E * average)[:, None] % E
    return torch.cat((torch.full((1, 1), -1), ids, torch.full((1, 1), E + 4)))


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("average", [0, 1, 3, 20, 30])
def test_every_number_of_rows(where, scheme, average):
    """One token; blocks of 16, 32 and 64 rows; x quantized before GEMM1 and h behind it."""
    device, dtype = where
    ids = rows_an_expert(average) if average else torch.tensor([[1]])
    K, I = (256, 128) if average == 30 else (160, 272)
    case = Case(device, dtype, scheme, M=len(ids), E=2, top_k=1, K=K, I=I, ids=ids, bias=True)
    case.check("triton")


@everywhere
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("h_in_fp32", [False, True])
@pytest.mark.parametrize("M", [1, 3])
def test_where_groups_are_quantized(where, quantize, h_in_fp32, M):
    """x by a kernel of its own or in GEMM1's loop, h behind GEMM1 or in GEMM2's loop: as tables
    may say."""
    case = Case(
        *where, "fp8_block", M=M, E=2, top_k=1, K=272, I=384, ids=torch.zeros(M, 1), bias=True
    )
    gemm1, gemm2 = GemmConfig(128 if h_in_fp32 else 256, 128, 3, 4), GemmConfig(64, 128, 2, 4)
    config = LayerConfig(
        gemm1, gemm2, 16, 64, direct=M == 1, quantize_x=quantize, h_in_fp32=h_in_fp32
    )
    with override(config) as seen:
        case.check("triton")
    assert set(seen) == {config}


@everywhere
@pytest.mark.parametrize("scheme", FORMATS)
@pytest.mark.parametrize("M", [5, 30])
@pytest.mark.parametrize("K, I", [(17, 33), (144, 16), (16, 144), (129, 130)])
def test_ragged_sizes(where, scheme, M, K, I):
    case = Case(*where, scheme, M=M, E=3, top_k=2, K=K, I=I)
    case.check("triton")


@everywhere
@pytest.mark.parametrize("scheme", FORMATS)
@pytest.mark.parametrize("name", ["swigluoai", "relu2_no_mul", "gelu"])
def test_gates(where, scheme, name):
    """Interleaved and absent gates have their own way through blocks of weight scales and groups
    of h."""
    for M in (4, 16):
        case = Case(*where, scheme, name, M=M, E=2, top_k=2, K=144, I=208, bias=True)
        case.check("triton")


@everywhere
@pytest.mark.parametrize("scheme", QUANTIZING)
@pytest.mark.parametrize("M", [1, 6, 24])
def test_router_weight_on_input(where, scheme, M):
    ids = torch.arange(M)[:, None] % 3 - int(M > 1)
    case = Case(*where, scheme, M=M, E=2, top_k=1, K=144, I=144, ids=ids, on_input=True)
    case.args[3][-1] *= 8  # decides the scale that all tokens share
    case.check("triton")


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("M", [1, 30])
def test_expert_map_and_wide_ids(where, scheme, M):
    options = {"expert_map": True, "ids_dtype": torch.int64}
    case = Case(*where, scheme, M=M, E=3, top_k=2, K=144, I=48, **options)
    case.check("triton")


@everywhere
@pytest.mark.parametrize("scheme", FORMATS)
@pytest.mark.parametrize("M", [3, 40])
def test_scales_of_very_different_size(where, scheme, M):
    """Each group of columns, token, row block and expert has a size of its own: no scale stands
    for another."""
    device, dtype = where
    K = I = 272
    ids = torch.arange(M)[:, None] % 2
    case = Case(device, FP32, M=M, E=2, top_k=1, K=K, I=I, ids=ids)
    x, w13, w2 = case.args[:3]

    def steps(size, base, step=128):
        return base ** (torch.arange(size, device=device) // step).float()

    x *= steps(K, 3.0) * steps(M, 1.5, 1).remainder(5).add(0.3)[:, None]
    w13 *= steps(2 * I, 1.7)[:, None] / steps(K, 3.0) * steps(2, 2.0, 1)[:, None, None]
    w2 *= steps(K, 0.4)[:, None] * steps(I, 1.9) * steps(2, 0.5, 1)[:, None, None]
    static = {"activation_scale": 0.7} if scheme == "fp8_tensor_static" else {}
    weights = [moe_ops.quantize(w.to(dtype), scheme, **static) for w in (w13, w2)]
    case.args[:3] = [x.to(dtype), *weights]
    case.dtype, case.scheme = dtype, scheme
    case.check("triton")


@everywhere
@pytest.mark.parametrize("scheme", QUANTIZING)
def test_bitwise_repeatable(where, scheme):
    case = Case(*where, scheme, M=40, E=3, top_k=4, K=48, I=32)
    first = case.run("triton")
    for _ in range(1 if where[0] == "cpu" else 20):
        assert torch.equal(first, case.run("triton"))


@everywhere
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_tensor_static"])
def test_nan_stays_in_its_token(where, scheme):
    ids = torch.tensor([[0], [1], [0], [1], [0]]).repeat(4, 1)
    for rows in (5, 20):
        case = Case(*where, scheme, M=rows, E=2, top_k=1, K=48, I=32, ids=ids[:rows])
        clean = case.run("triton")
        case.args[0][2, 7] = math.nan
        out = case.run("triton")
        keep = torch.arange(rows, device=out.device) != 2
        assert torch.equal(out[keep], clean[keep])
        assert torch.isnan(out[2]).all()


@everywhere
def test_blocks_of_nan_leave_the_scale_of_all_rows_alone(where):
    """fp8_tensor: h of tokens that hold NaN, enough to fill blocks, does not enter the one scale
    of h."""
    ids = torch.tensor([[0]] * 40 + [[1]] * 5)
    case = Case(*where, "fp8_tensor", M=45, E=2, top_k=1, K=48, I=32, ids=ids)
    case.args[0][:40] = 0
    clean = case.run("triton")
    case.args[0][:40] = math.nan
    out = case.run("triton")
    assert torch.isfinite(clean[40:]).all() and clean[40:].any()
    assert torch.equal(out[40:], clean[40:])


@everywhere
@pytest.mark.parametrize("E", [1, 2])
def test_one_token_with_more_pairs_than_twice_the_experts(where, E):
    """As on a rank that holds few of a model's experts."""
    Case(*where, "fp8_block", M=1, E=E, top_k=8, K=256, I=128).check("triton")


@everywhere
def test_static_scale_clamps(where):
    """Activations far beyond the scale's range become 448 times it."""
    case = Case(*where, "fp8_tensor_static", M=5, E=2, top_k=1, K=48, I=32)
    case.args[0][0] *= 300
    case.args[0][3] *= 1e4
    case.check("triton")


# --- the other two ops ---------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("T", [2, 20])
def test_batched_experts(where, scheme, T):
    device, dtype = where
    counts = torch.tensor([T, 0, T // 2], dtype=torch.int32, device=device)
    case = Case(device, dtype, scheme, E=3, K=144, I=144)
    g = torch.Generator().manual_seed(T)
    x = torch.randn(3, T, 144, generator=g).to(dtype).to(device)
    x[torch.arange(T, device=device) >= counts[:, None]] = math.nan
    inside = ~torch.isnan(x[..., 0])
    with cases.poisoned_memory():
        out = moe_ops.batched_experts(x, *case.args[1:3], counts, backend="triton")
    expected = oracle.batched(x, *case.args[1:3], counts)
    cases.assert_matches(out[inside], expected[inside], cases.tolerance(dtype, scheme, device))


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "ends, S, tail",
    [([1, 1, 3], 5, math.nan), ([20, 20, 50], 52, math.inf), ([0, 0, 0], 4, math.inf)],
)
def test_grouped_linear(where, scheme, ends, S, tail):
    device, dtype = where
    g = torch.Generator().manual_seed(S)
    x = torch.randn(S, 272, generator=g).to(dtype).to(device)
    x[ends[-1] :] = tail
    static = {"activation_scale": cases.STATIC_SCALES[0]} if scheme.endswith("_static") else {}
    w = (torch.randn(3, 144, 272, generator=g) / 272**0.5).to(dtype).to(device)
    w = moe_ops.quantize(w, scheme, **static)
    bias = torch.randn(3, 144, generator=g).to(dtype).to(device)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    with cases.poisoned_memory():
        out = moe_ops.grouped_linear(x, w, offsets, bias=bias, backend="triton")
    expected = oracle.grouped_linear(x, w, offsets, bias=bias)
    cases.assert_matches(out, expected, cases.tolerance(dtype, scheme, device))
    assert (out[ends[-1] :] == 0).all()


# --- host ----------------------------------------------------------------------------------------


SHAPES = [  # E, top_k, K, I; the last two have more pairs of one token than twice their experts
    *((1, 1, 1, 1), (4, 2, 130, 70), (8, 2, 256, 512), (64, 8, 64, 32)),
    *((1, 8, 256, 256), (2, 8, 256, 512)),
]


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_workspaces_hold_whatever_config_is_chosen(scheme):
    """Taking a buffer apart fails where it is too small."""
    scales = scales_of(scheme)
    valid = e4m3_int8.counted("groups", torch.ones(1, dtype=torch.int32))
    static = torch.ones(1)
    for M in (1, 2, 3, 7, 33, 200, 4096):
        for E, top_k, K, I in SHAPES:
            pairs = M * top_k
            problem = Problem("experts", E, K, I, 2 * I, top_k, BF16, scheme=scheme)
            ws13, ws2, _ = [
                torch.empty(b.shape, dtype=b.dtype, device="meta")
                for b in backend.workspace_shapes(M, problem)
            ]
            for memory in (99 * 1024, 227 * 1024):
                layer = LayerSizes(pairs, E, K, I, Gpu(memory, True, True))
                config = configs.choose(layer, 2, M == 1, *scales)
                codes = torch.float8_e4m3fn
                h, _ = hidden(ws13, pairs, I, BF16, scales.x, config, static, codes)
                x = rows_of(torch.empty(M, K, device="meta"))
                e4m3_int8.quantize_x(
                    x, M, M, K, scales.x, config, ws2, static, valid, h.scale, top_k, codes,
                    scales.powers, Gpu(0, True, False),
                )  # fmt: skip
                assert h.data.numel() >= pairs * I


def test_supports_quantized_weights_and_says_where_they_are_emulated():
    for scheme in SCHEMES:
        problem = Problem("experts", 4, 64, 32, 64, 2, BF16, scheme=scheme)
        for capability, native in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
            machine = Machine("cuda", capability, "a GPU", ("triton",))
            assert backend.supports(problem, machine) == []
            weight_only = not oracle.ACTIVATIONS[scheme]
            assert backend.BACKEND.takes.native(scheme, machine) == (native or weight_only)


@everywhere
def test_weights_must_be_e4m3(where):
    case = Case(*where, "fp8_channel", M=3)
    case.args[2] = case.args[2]._replace(qdata=case.args[2].qdata.to(torch.float8_e5m2))
    with pytest.raises(ValueError, match="w2 must have dtype torch.float8_e4m3fn"):
        case.run("triton")
