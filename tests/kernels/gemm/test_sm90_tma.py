"""The Triton kernels for many rows an expert, interpreted on a CPU and compiled on a GPU (`-m
gpu`)."""

from __future__ import annotations

import math

import pytest
import torch

from moe_ops.activations import NAMES, Activation
from tests.support.cases import BF16, FP16, FP32, Case, assert_matches, tolerance
from tests.support.places import CUDA, INTERPRETED

triton = pytest.importorskip("triton")

from moe_ops.choose import plain as configs
from moe_ops.choose.table import LayerSizes, override
from moe_ops.kernels.activation import activated
from moe_ops.kernels.configs import SM90_TMA, GemmConfig, LayerConfig
from moe_ops.kernels.gemm import sm90_tma
from moe_ops.kernels.gemm.operands import Scaling, weight_of
from moe_ops.kernels.launch import Gpu

ENGINE = CUDA and torch.cuda.get_device_properties(0).shared_memory_per_block_optin > 200 * 1024
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not ENGINE, reason="needs a GPU of SM90 or SM100"))
WHERE = [
    pytest.param(("cpu", FP32), id="interpreted", marks=INTERPRETED),
    pytest.param(("cuda", BF16), id="cuda-bf16", marks=ON_GPU),
    pytest.param(("cuda", FP16), id="cuda-fp16", marks=ON_GPU),
]
everywhere = pytest.mark.parametrize("where", WHERE)


def plain(block_m=64, split_m=1):
    gemms = GemmConfig(64, 32, 2, 4), GemmConfig(64, 32, 3, 4)
    return LayerConfig(*gemms, block_m, 1024, SM90_TMA, split_m=split_m)


def quantized(gated=True, split_m=1):
    gemm1 = GemmConfig(256 if gated else 128, 128, 2, 8)
    gemm2 = GemmConfig(128, 128, 2, 4 if split_m == 2 else 8)
    return LayerConfig(gemm1, gemm2, 128, 1024, SM90_TMA, quantize_x=True, split_m=split_m)


def check(case: Case, config: LayerConfig) -> torch.Tensor:
    with override(config) as seen:
        out = case.check("triton")
    assert set(seen) == {config}
    return out


@everywhere
@pytest.mark.parametrize("name", NAMES)
def test_every_activation(where, name):
    check(Case(*where, "", name, M=90, E=3, K=64, I=48, bias=True), plain())


@everywhere
@pytest.mark.parametrize(
    "act",
    [
        Activation("silu", limit=0.7),
        Activation("swigluoai", alpha=0.9, beta=0.4, limit=0.8),
        Activation("swiglustep", limit=0.3),
    ],
    ids=lambda act: act.name,
)
def test_limits_bite(where, act):
    check(Case(*where, "", act, M=70, E=3, K=32, I=40), plain())


@everywhere
@pytest.mark.parametrize("K, I", [(8, 8), (40, 24), (136, 72), (64, 264)])
@pytest.mark.parametrize("name", ["silu", "swigluoai", "relu2_no_mul"])
def test_sizes_that_no_tile_divides(where, K, I, name):
    check(Case(*where, "", name, M=70, E=3, K=K, I=I, bias=True), plain())


@everywhere
@pytest.mark.parametrize("scheme", ["", "fp8_block"])
@pytest.mark.parametrize("counts", [(64, 64), (63, 65), (1, 128, 0, 129), (0, 0, 130), (3,)])
@pytest.mark.parametrize("split_m", [1, 2])
def test_rows_over_block_boundaries(where, scheme, counts, split_m):
    """Blocks run into the rows of the next expert, and the last past the last row."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(5))][:, None]
    sizes = {"K": 128, "I": 128} if scheme else {"K": 48, "I": 32}
    case = Case(*where, scheme, M=len(ids), E=len(counts), top_k=1, ids=ids, bias=True, **sizes)
    check(case, quantized(split_m=split_m) if scheme else plain(128, split_m=split_m))


@everywhere
@pytest.mark.parametrize(
    "name, K, I",
    [
        ("silu", 640, 256),
        ("swigluoai_uninterleave", 256, 384),
        ("gelu_tanh_no_mul", 128, 384),
        ("silu", 128, 128),
        # the last block is cut off, and blocks of up rows begin within those of gate rows
        ("silu", 192, 320),
        ("gelu_tanh_no_mul", 208, 144),
        ("swigluoai", 128, 256),  # gate and up rows take turns
        ("swigluoai", 320, 192),  # tiles of 128 and of 64 columns of h
        ("swigluoai", 144, 48),  # the tile has no second block
    ],
)
@pytest.mark.slow
def test_fp8_blocks(where, name, K, I):
    case = Case(*where, "fp8_block", name, M=70, E=3, K=K, I=I, bias=True)
    w13, w2 = case.args[1:3]
    for scale in (
        w13.scale,
        w2.scale,
    ):  # blocks of very different size: no scale stands for another
        block = torch.arange(scale.numel(), device=scale.device).view(scale.shape)
        scale *= 1.9 ** (block % 5 - 2).float()
    check(case, quantized(gated=not name.endswith("no_mul"), split_m=2))


@everywhere
@pytest.mark.parametrize("scheme", ["", "fp8_block"])
@pytest.mark.parametrize(
    "options", [{"expert_map": True, "ids_dtype": torch.int64}, {"on_input": True}]
)
def test_expert_map_and_weights_on_input(where, scheme, options):
    top_k = 1 if "on_input" in options else 2
    case = Case(*where, scheme, M=90, E=3, top_k=top_k, K=128, I=128, **options)
    check(case, quantized() if scheme else plain())


@everywhere
@pytest.mark.parametrize("scheme", ["", "fp8_block"])
def test_strided_operands(where, scheme):
    """Rows of x, and experts and rows of plain weights, lie apart; what is between holds NaN."""
    case = Case(*where, scheme, M=70, E=3, K=128, I=128)

    def apart(t, dim):
        shape = list(t.shape)
        shape[dim] = 2 * shape[dim] + 16
        wide = torch.full(shape, math.nan, dtype=t.dtype, device=t.device)
        view = wide.narrow(dim, 16, t.shape[dim])
        return view.copy_(t)

    x, w13, w2 = case.args[:3]
    case.args[0] = apart(x, 1)
    if not scheme:
        case.args[1:3] = [apart(apart(w13, 1), 2), apart(apart(w2, 2), 1)]
    check(case, quantized() if scheme else plain())


@everywhere
@pytest.mark.parametrize("scheme", ["", "fp8_block"])
def test_nan_stays_in_its_token_and_results_repeat(where, scheme):
    ids = torch.arange(99)[:, None] % 3
    case = Case(*where, scheme, M=99, E=3, top_k=1, K=128, I=128, ids=ids)
    config = quantized() if scheme else plain()
    clean = check(case, config)
    with override(config):
        for _ in range(1 if where[0] == "cpu" else 20):
            assert torch.equal(clean, case.run("triton"))
        case.args[0][::7] = math.nan
        out = case.run("triton")
    keep = torch.arange(99, device=out.device) % 7 != 0
    assert torch.equal(out[keep], clean[keep])
    assert torch.isnan(out[~keep]).all()


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=ON_GPU)]
)
@pytest.mark.parametrize("scheme", ["", "fp8_block"])
def test_many_rows_an_expert_take_these_kernels(device, scheme):
    """Unless a weight lies as no descriptor can say, or there are few rows."""
    case = Case(device, BF16, scheme, M=80, E=2, top_k=2, K=128, I=128, bias=True)
    with override(None) as seen:
        case.run("triton")
        if scheme:
            case.check("triton")
        case.args = [t[:20] if i in (0, 3, 4) else t for i, t in enumerate(case.args)]
        case.run("triton")
        if not scheme:
            case.args = [t.repeat(4, 1) if i in (0, 3, 4) else t for i, t in enumerate(case.args)]
            case.args[1] = case.args[1].mT.contiguous().mT
            case.run("triton")
    assert [config.kernel == SM90_TMA for config in seen] == (
        [True, True, False] if scheme else [True, False, False]
    )


@pytest.mark.parametrize("scheme", ["", "fp8_block"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_captured_graph_follows_new_routing(device, scheme):
    """Descriptors hold addresses and sizes alone."""
    sizes = {"M": 300, "E": 4, "top_k": 2, "K": 256, "I": 256, "bias": True}
    case = Case(device, BF16, scheme, **sizes)
    with override(None) as seen:
        case.check("triton")
    assert seen[-1].kernel == SM90_TMA
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run("triton", poison=False)
    for seed in range(1, 4):
        other = Case(device, BF16, scheme, seed=seed, **sizes)
        other.args[1:3], other.options = case.args[1:3], case.options
        for i in (0, 3, 4):
            case.args[i].copy_(other.args[i])
        out.fill_(math.nan)
        graph.replay()
        assert_matches(out, other.reference(), tolerance(BF16, scheme, device))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({}, None),
        ({"memory": 163 * 1024}, "tensor memory accelerator"),
        ({"I": 60}, "rows of weights must be contiguous and start at multiples of 16 bytes"),
        ({"I": 60, "stride": 64}, "rows of h must start at multiples of 16 bytes"),
        ({"transposed": True}, "rows of weights must be contiguous"),
        ({"scheme": "fp8_block"}, None),
        ({"scheme": "fp8_block", "I": 192}, None),
        ({"scheme": "fp8_block", "I": 80}, "64 up rows of a tile would have scales of two blocks"),
        ({"scheme": "fp8_block", "I": 80, "activation": "swigluoai"}, None),
        ({"scheme": "fp8_block", "I": 160, "activation": "gelu_no_mul"}, None),
        (
            {"scheme": "fp8_block", "I": 72, "stride": 80, "activation": "gelu_no_mul"},
            "rows of h must start at multiples of",
        ),
        ({"scheme": "fp8_block", "scales": ("channel", "row")}, "scales by blocks"),
    ],
    ids=str,
)
def test_why_not(changes, reason):
    facts = {"memory": 227 * 1024, "I": 128, "scheme": "", "stride": 0, "transposed": False}
    facts |= changes
    gpu, I, scheme = Gpu(facts["memory"], True, False), facts["I"], facts["scheme"]
    scales = facts.get("scales", ("block", "group") if scheme else ("", ""))
    dtype = torch.float8_e4m3fn if scheme else BF16
    w13 = torch.empty(2, 2 * I, 128, dtype=dtype)
    w2 = torch.empty(2, 128, facts["stride"] or I, dtype=dtype)[..., :I]
    if facts["transposed"]:
        w13 = w13.mT.contiguous().mT
    scale = torch.empty(2, 1, 1) if scheme else None
    weights = [weight_of("w", w, scale, scheme, BF16, gpu) for w in (w13, w2)]
    activation = activated(Activation(facts.get("activation", "silu")))
    found = sm90_tma.why_not(*weights, activation, Scaling(*scales, False, True), gpu)
    assert found is None if reason is None else reason in found


def test_rows_of_blocks_and_memory_of_chosen_configs():
    for rows in (2 * configs.LARGE_ROWS, 400, 9000):
        for scales in (("", ""), ("block", "group")):
            size = 1 if scales[0] else 2
            memory = 227 * 1024
            layer = LayerSizes(rows, 2, 512, 512, Gpu(memory, True, True))
            config = configs.choose(layer, 2, False, *scales, True, True)
            assert config.kernel == SM90_TMA and config.block_m % config.split_m == 0
            for gemm in (config.gemm1, config.gemm2):
                stage = (gemm.block_n + config.block_m) * gemm.block_k * size
                assert gemm.num_stages * stage <= memory - 1024
