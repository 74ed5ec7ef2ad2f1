"""Weights of 4 and 8 bits on Triton against fp64, interpreted on a CPU and compiled on a GPU (`-m
gpu`)."""

from __future__ import annotations

import math
import re

import pytest
import torch

import moe_ops
from moe_ops.ops import relayout
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem
from moe_ops.schemes import SCHEMES, get_scheme
from tests.support import cases, oracle
from tests.support.cases import BF16, FP16, FP32, Case
from tests.support.places import INTERPRETED, everywhere

pytest.importorskip("triton")

from moe_ops.backends.triton import backend
from moe_ops.choose import mixed
from moe_ops.choose.table import LayerSizes, override
from moe_ops.kernels.configs import GemmConfig, LayerConfig, block_bound
from moe_ops.kernels.launch import gpu
from moe_ops.kernels.mixed_gemm import configs, operands, sm80_mma

WEIGHT_ONLY = [name for name in filter(operands.describe, SCHEMES) if SCHEMES[name].weight_only]
ROUNDED = ":(round|ceil)"  # how quantize chose scales: kernels see no difference
FORMATS = [name for name in WEIGHT_ONLY if not re.search(ROUNDED, name)]
INT8 = ["int8_w8a8", "int8_w8a8_static"]
# one of each way that scales and zero points reach a product
WAYS = [
    "int4_w4a16:g64",
    "int4_w4a16:g32:zp",
    "int4_w4a16:g32:min",
    "int4_w4a16:g32:super:min",
    "iq4_w4a16:g32:super",
    "int8_w8a16:channel:zp",
    "mxfp4_w4a16",
    "nvfp4_w4a16",
]


@pytest.fixture(autouse=True)
def weights_stay_as_they_are(monkeypatch):
    """Those laid out for SM90 run on other kernels."""
    monkeypatch.setitem(relayout.RELAYOUTS, "triton", ())


def test_every_weight_only_scheme_is_native():
    assert set(WEIGHT_ONLY) <= set(backend.BACKEND.takes.native_schemes)
    assert all(operands.describe(name) for name in WEIGHT_ONLY)
    assert set(INT8) <= set(backend.BACKEND.takes.native_schemes)


@pytest.mark.parametrize("scheme", [*WEIGHT_ONLY, *INT8])
def test_native_from_sm80_on(scheme):
    machine = Machine("cuda", (8, 0), "a GPU", ("triton",))
    assert backend.BACKEND.takes.native(scheme, machine)


def test_number_formats_that_no_kernel_decodes_are_refused(monkeypatch):
    monkeypatch.setattr(operands, "DECODED", ("int4",))
    decoded = frozenset(filter(operands.describe, SCHEMES))
    assert "int4_w4a16:g128" in decoded and "int8_w8a16:channel" not in decoded
    monkeypatch.setattr(backend, "WITH_KERNELS", decoded)
    scheme, machine = "int8_w8a16:channel", Machine("cuda", (9, 0), "a GPU", ("triton",))
    problem = Problem("experts", 8, 1024, 512, 1024, 2, BF16, scheme=scheme, options=Options())
    assert backend.supports(problem, machine) == [
        f"triton has no kernels for weights of int8, got {scheme!r}; backend 'torch' dequantizes "
        "such weights"
    ]


# --- the expert layer ----------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("scheme", FORMATS + INT8)
def test_formats(where, scheme):
    """Every scheme with bias, several groups a row."""
    Case(*where, scheme, M=5, E=2, top_k=2, K=256, I=128, bias=True).check("triton")


@everywhere
@pytest.mark.parametrize("scheme", [*WAYS, *INT8])
def test_one_token(where, scheme):
    """No routing kernel runs: each pair is a block."""
    Case(*where, scheme, M=1, E=3, top_k=2, K=128, I=192, bias=True).check("triton")


@everywhere
@pytest.mark.parametrize("scheme", [*WAYS, "int8_w8a8"])
@pytest.mark.parametrize("name", ["swigluoai", "relu2_no_mul", "gelu"])
def test_gates(where, scheme, name):
    """Interleaved gates are read by another order of rows; gpt-oss layers are such, with bias."""
    Case(*where, scheme, name, M=4, E=2, top_k=1, K=64, I=64, bias=True).check("triton")


@everywhere
@pytest.mark.parametrize(
    "scheme", ["int4_w4a16:g64:zp", "fp8_w8a16:block", "mxfp4_w4a16", "nvfp4_w4a16"]
)
@pytest.mark.parametrize("average", [3, 9, 30, 60, 100])
def test_every_number_of_rows(where, scheme, average):
    """Blocks of 8 to 128 rows, some of them partly filled."""
    if where[0] == "cpu" and scheme.startswith(("mx", "nv")) and average > 9:
        pytest.skip("the interpreter decodes these alike in all blocks")
    ids = torch.arange(2 * average)[:, None] % 2
    ids = torch.cat((torch.full((1, 1), -1), ids, torch.full((1, 1), 6)))
    case = Case(*where, scheme, M=len(ids), E=2, top_k=1, K=192, I=64, ids=ids)
    case.check("triton")


@everywhere
@pytest.mark.parametrize("scheme", WAYS)
@pytest.mark.parametrize(
    "gemm", [(64, 32, 2, 4), (32, 64, 3, 2), (128, 128, 4, 2), (64, 256, 2, 2)], ids=str
)
def test_configs(where, scheme, gemm):
    """Steps below, of and above a group; rows that pass the end of the weight."""
    config = LayerConfig(GemmConfig(*gemm), GemmConfig(*gemm), 8, 64)
    case = Case(*where, scheme, M=4, E=2, top_k=1, K=192, I=64)
    with override(config) as seen:
        case.check("triton")
    assert set(seen) == {config}


@everywhere
@pytest.mark.parametrize(
    "scheme",
    ["int4_w4a16:channel", "int4_w4a16:channel:min", "int8_w8a16:channel", "fp8_w8a16:block"],
)
@pytest.mark.parametrize("K, I", [(34, 66), (144, 18), (18, 144)])
def test_ragged_sizes(where, scheme, K, I):
    """Groups of all columns set no step that sizes must follow."""
    for M in (1, 5):
        Case(*where, scheme, M=M, E=3, top_k=2, K=K, I=I).check("triton")


@everywhere
@pytest.mark.parametrize(
    "scheme",
    [
        *("mxfp6_e3m2_w6a16", "mxfp6_e2m3_w6a16"),
        *("int5_w5a16:g32", "int5_w5a16:g32:min", "int6_w6a16:g16"),
    ],
)
@pytest.mark.parametrize("K, I", [(32, 96), (160, 256)])
def test_five_and_six_bits(where, scheme, K, I):
    """Steps that pass the end of a row, and rows of 16-byte step and others."""
    for M in (1, 40):
        Case(*where, scheme, M=M, E=2, top_k=1, K=K, I=I, bias=True).check("triton")


@everywhere
@pytest.mark.parametrize("scheme", ["int4_w4a16:g64:zp", "mxfp4_w4a16", "int8_w8a8"])
def test_router_weight_on_input_and_expert_map(where, scheme):
    ids = torch.arange(9)[:, None] % 3 - 1
    Case(*where, scheme, M=9, E=2, top_k=1, K=128, I=128, ids=ids, on_input=True).check("triton")
    case = Case(
        *where, scheme, M=9, E=3, top_k=2, K=128, I=128, expert_map=True, ids_dtype=torch.int64
    )
    case.check("triton")


@everywhere
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("beside", ["zp", "min"])
def test_scales_of_any_dtype(where, dtype, group, beside):
    """Checkpoints bring scales and minima in a dtype of their own, and zero points and minima that
    no data made.
    """
    device, to = where
    g = torch.Generator().manual_seed(group)
    case = Case(device, to, M=5, E=2, top_k=2, K=256, I=128)
    for i, (N, K) in ((1, (256, 256)), (2, (256, 128))):
        q = torch.randint(0, 256, (2, N, K // 2), generator=g).to(torch.uint8)
        scale = ((torch.rand(2, N, K // group, generator=g) + 0.5) / 80).to(dtype)
        zero = torch.randint(0, 16, scale.shape, generator=g).to(torch.uint8)
        if beside == "min":
            zero = (torch.randn(scale.shape, generator=g) / 10).to(dtype)
        parts = [t.to(device) for t in (q, scale, zero)]
        name = f"int4_w4a16:g{group}" + ":min" * (beside == "min")
        case.args[i] = moe_ops.from_quantized(name, *parts[:2], zero_point=parts[2])
    case.scheme = f"int4_w4a16:g{group}:{beside}"
    case.check("triton")


@everywhere
@pytest.mark.parametrize(
    "scheme", ["int4_w4a16:g32", "mxfp4_w4a16", "nvfp4_w4a16", "int8_w8a16:g64"]
)
def test_scales_of_very_different_size(where, scheme):
    """Each group of columns, row and expert has a size of its own: no scale stands for another."""
    device, dtype = where
    K = I = 256
    case = Case(device, FP32, M=5, E=2, top_k=1, K=K, I=I, ids=torch.arange(5)[:, None] % 2)
    x, w13, w2 = case.args[:3]
    g = torch.Generator().manual_seed(0)

    def sizes(*shape, step):
        one = 2.0 ** torch.randint(-3, 4, shape, generator=g)
        return one.repeat_interleave(step, -1).to(device)

    step = get_scheme(scheme).quantized_weight.group.cols
    columns = sizes(1, K // step, step=step)
    x /= columns
    w13 *= columns * sizes(2, 2 * I, 1, step=1)
    w2 *= sizes(2, K, I // step, step=step)
    weights = [moe_ops.quantize(w.to(dtype), scheme) for w in (w13, w2)]
    case.args[:3] = [x.to(dtype), *weights]
    case.dtype, case.scheme = dtype, scheme
    case.check("triton")


@everywhere
@pytest.mark.parametrize("scheme", ["int4_w4a16:g32", "mxfp4_w4a16", "int8_w8a8"])
def test_nan_stays_in_its_token(where, scheme):
    ids = torch.arange(7)[:, None] % 2
    case = Case(*where, scheme, M=7, E=2, top_k=1, K=128, I=128, ids=ids)
    clean = case.run("triton")
    case.args[0][2, 7] = math.nan
    out = case.run("triton")
    keep = torch.arange(7, device=out.device) != 2
    assert torch.equal(out[keep], clean[keep])
    assert torch.isnan(out[2]).all()


@everywhere
@pytest.mark.parametrize("scheme", ["int4_w4a16:g128", "nvfp4_w4a16", "int8_w8a8"])
def test_bitwise_repeatable(where, scheme):
    case = Case(*where, scheme, M=9, E=3, top_k=4, K=128, I=128)
    first = case.run("triton")
    for _ in range(1 if where[0] == "cpu" else 20):
        assert torch.equal(first, case.run("triton"))


# --- the other two ops ---------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("scheme", [*WAYS, *INT8])
def test_batched_experts(where, scheme):
    cases.check_batched(*where, scheme, K=128, I=192)


@INTERPRETED
def test_factors_of_scales_must_lie_in_words():
    """Those of scales and of minima are loaded together."""
    case = Case("cpu", FP32, "int4_w4a16:g32:super:min", M=3, E=2, top_k=1, K=256, I=256)
    w13 = case.args[1]
    apart = torch.stack((w13.channel_scale, w13.channel_scale), -1)[..., 0]
    odd = torch.cat((w13.channel_scale, w13.channel_scale[..., :1]), -1)[..., :2]
    for wrong in (apart, odd, odd[..., 1:].expand_as(odd)):
        case.args[1] = w13._replace(channel_scale=wrong)
        with pytest.raises(ValueError, match="w13 must have a channel_scale of contiguous rows"):
            case.run("triton")


@everywhere
@pytest.mark.parametrize("scheme", [*WAYS, *INT8])
@pytest.mark.parametrize(
    "ends, S, tail", [([1, 1, 3], 5, math.nan), ([20, 20, 50], 52, math.inf)], ids=str
)
def test_grouped_linear(where, scheme, ends, S, tail):
    device, dtype = where
    g = torch.Generator().manual_seed(S)
    x = torch.randn(S, 256, generator=g).to(dtype).to(device)
    x[ends[-1] :] = tail
    static = {"activation_scale": cases.STATIC_SCALES[0]} if scheme.endswith("_static") else {}
    w = (torch.randn(3, 144, 256, generator=g) / 16).to(dtype).to(device)
    w = moe_ops.quantize(w, scheme, **static)
    bias = torch.randn(3, 144, generator=g).to(dtype).to(device)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    with cases.poisoned_memory():
        out = moe_ops.grouped_linear(x, w, offsets, bias=bias, backend="triton")
    expected = oracle.grouped_linear(x, w, offsets, bias=bias)
    cases.assert_matches(out, expected, cases.tolerance(dtype, scheme, device))
    assert (out[ends[-1] :] == 0).all()


@everywhere
@pytest.mark.parametrize("S", [8, 16, 32, 128])
def test_weights_rounded_to_e4m3(where, S):
    """Every product of an int4 element and a scale, read out by rows that are 1 in one column."""
    device, dtype = where
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = scales[scales.float().abs() <= 56].to(device)
    N = scales.numel()
    qdata = torch.randint(0, 256, (1, N, 64), dtype=torch.uint8, device=device)
    w = moe_ops.from_quantized(
        "int4_w4a8",
        qdata,
        scales.view(1, N, 1),
        channel_scale=torch.full((1, N, 1), 0.5, device=device),
    )
    offsets = torch.tensor([S], dtype=torch.int32, device=device)
    for start in range(0, 128, S) if S >= 32 else (0, 128 - S):
        x = torch.eye(128, device=device)[start : start + S].to(dtype)
        out = moe_ops.grouped_linear(x, w, offsets, backend="triton")
        rounded = oracle.weight(w)[0].T[start : start + S]
        # what is left is the rounding of an activation's scale
        torch.testing.assert_close(out.double(), rounded, rtol=2e-7, atol=0)


# --- host ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_index_workspace_and_shared_memory_hold_every_tile(bits):
    memory = gpu(-1).shared_memory
    scheme = f"int{bits}_w{bits}a16:channel"
    for M in (1, 2, 3, 7, 33, 200, 4096):
        for E, top_k in ((1, 1), (1, 8), (8, 2), (128, 8)):
            pairs = M * top_k
            problem = Problem("experts", E, 256, 256, 512, top_k, BF16, scheme=scheme)
            (index,) = backend.workspace_shapes(M, problem).index.shape
            for dtype in (FP32, BF16, FP16):
                config = mixed.choose(LayerSizes(pairs, E, 256, 256, gpu(-1)), bits, dtype, M == 1)
                assert config.block_m >= configs.SMALLEST_BLOCK_M
                assert 4 * block_bound(pairs, E, config.block_m) + pairs <= index
                for gemm in (config.gemm1, config.gemm2):
                    rows = gemm.block_n * bits // 8 + config.block_m * dtype.itemsize
                    assert gemm.block_k * rows * gemm.num_stages <= memory


@pytest.mark.parametrize("scheme", ["int4_w4a16", "mxfp4_w4a16"])
def test_wrong_dtype_of_data(scheme):
    data = torch.zeros(2, 4, 16, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"w2 must have dtype torch.uint8.*got torch.int32"):
        operands.operand("w2", data, data, None, None, None, get_scheme(scheme).name, gpu(-1))


def test_scales_are_read_together_only_where_they_lie_together():
    """How many scales of a row one load may take: they are side by side, and every row begins at
    such a multiple."""
    scale, zero = torch.zeros(3, 64, 16), torch.zeros(3, 64, 16, dtype=torch.uint8)
    data = torch.zeros(3, 64, 512, dtype=torch.uint8)

    def together(scale, zero=None, scheme="int4_w4a16:g64"):
        w = operands.operand("w", data, scale, zero, None, None, scheme, gpu(-1))
        config = GemmConfig(64, 128, 2, 2)
        return sm80_mma.tile_of(w.format, w.scale_align, False, config, 8, w.K).SCALE_ALIGN

    assert together(scale) == 16
    assert together(scale[..., :12]) == 4
    assert together(scale.mT.contiguous().mT) == 1
    assert together(scale.mT.contiguous().mT.contiguous()) == 16
    assert together(torch.zeros(3, 64, 20)[..., :16]) == 4
    for z, number in ((zero, 16), (zero.mT.contiguous().mT, 1)):
        assert together(scale, z, "int4_w4a16:g64:zp") == number
    data = torch.zeros(3, 64, 512, dtype=torch.float8_e4m3fn)
    assert together(torch.zeros(3), None, "fp8_w8a16:tensor") == 1
    assert together(torch.zeros(3, 64, 1), None, "fp8_w8a16:channel") == 1


EVEN = [
    *(("int4_w4a16:g64", 128), ("int8_w8a16:g32", 128), ("int4_w4a16:g32:zp", 128)),
    *(("mxfp4_w4a16", 128), ("nvfp4_w4a16", 64)),
]


@everywhere
@pytest.mark.parametrize("scheme, k", EVEN)
def test_even_steps(where, scheme, k):
    """Whole steps read the scales of several products in one piece, or with the operands."""
    config = LayerConfig(GemmConfig(64, k, 2, 2), GemmConfig(64, k, 2, 2), 16, 64)
    case = Case(*where, scheme, M=4, E=2, top_k=1, K=256, I=256)
    with override(config):
        case.check("triton")


def inside_of_more(t, order):
    """The same numbers, dimensions stored in another order, within a larger tensor of garbage."""
    big = torch.empty([t.shape[d] + 3 for d in order], dtype=t.dtype, device=t.device)
    big.view(torch.uint8).fill_(0x77)
    view = big.permute([order.index(d) for d in range(3)])
    return view[tuple(slice(1, 1 + n) for n in t.shape)].copy_(t)


@everywhere
@pytest.mark.parametrize(
    "scheme", ["int4_w4a16:g64:zp", "mxfp4_w4a16", "nvfp4_w4a16", "fp8_w8a16:block"]
)
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)], ids=str)
def test_strided_weights_and_scales(where, scheme, order):
    case = Case(*where, scheme, M=5, E=3, top_k=2, K=256, I=128)
    for i in (1, 2):
        w = case.args[i]
        names = [n for n in ("qdata", "scale", "zero_point") if getattr(w, n) is not None]
        case.args[i] = w._replace(**{n: inside_of_more(getattr(w, n), order) for n in names})
        assert not case.args[i].scale.is_contiguous()
    case.check("triton")
