"""Layers of two schemes on Triton: values under its interpreter and on a GPU (`-m gpu`), and which
kernels run them on Hopper."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

import moe_ops
from moe_ops import environment
from moe_ops.choose import mixed as configs
from moe_ops.choose.table import LayerSizes
from moe_ops.kernels import launch
from moe_ops.kernels.configs import GEMV, SM80_MMA, SM90_WGMMA
from moe_ops.kernels.launch import INTERPRETED, Gpu
from moe_ops.kernels.mixed_gemm import configs as mixed_configs
from moe_ops.planning import machine as machines
from tests.support.cases import BF16, FP16, FP32, Case, check_batched, refill
from tests.support.fake_cuda import H200
from tests.support.paths import ROOT, TOOLS

GPU = Gpu(227 * 1024, True, True)
NO_GLUON = environment.why_no_gluon(environment.TRITON)

interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs triton's interpreter")
PAIRS = (
    *("int4_w4a16:g32+plain", "plain+int4_w4a16:g32:zp", "int4_w4a16:g64+int8_w8a16:channel"),
    *("mxfp4_w4a16+fp8_w8a16:channel", "nvfp4_w4a16+plain", "plain+mxfp6_e2m3_w6a16"),
    *("fp8_w8a16:block+int4_w4a16:channel", "int8_w8a16:g32+mxfp4_w4a16"),
)


@interpreted
@pytest.mark.sweep
@pytest.mark.parametrize("scheme", PAIRS)
def test_values(scheme):
    for M, options in ((1, {}), (1, {"bias": True, "expert_map": True}), (7, {"bias": True})):
        Case("cpu", FP32, scheme, M=M, **options).check("triton")
    Case("cpu", FP32, scheme, M=40, E=3, I=32).check("triton")
    Case("cpu", FP32, scheme, M=5, top_k=1, on_input=True).check("triton")
    Case("cpu", FP32, scheme, "relu2_no_mul", M=5).check("triton")


@interpreted
@pytest.mark.sweep
@pytest.mark.parametrize("scheme", PAIRS)
def test_batches(scheme):
    check_batched("cpu", FP32, scheme, K=64, I=64)


@interpreted
def test_chunks_and_batch_invariance():
    case = Case("cpu", FP32, "int4_w4a16:g32+plain", M=50)
    whole = case.run("triton")
    case.options["max_workspace_bytes"] = 40000
    assert torch.equal(case.run("triton"), whole)
    x, w13, w2, weights, ids = case.args
    how = {"backend": "triton", "batch_invariant": True}
    many = moe_ops.fused_experts(x, w13, w2, weights, ids, **how)
    one = moe_ops.fused_experts(x[4:5], w13, w2, weights[4:5], ids[4:5], **how)
    assert torch.equal(one, many[4:5])


# --- what is chosen ------------------------------------------------------------------------------


LISTED = """
import compile_kernels as c
for scheme, M in (
    ("int4_w4a16:g128+int8_w8a16:channel", 1),
    ("mxfp4_w4a16+fp8_w8a16:channel", 8),
    ("int8_w8a16:channel+int4_w4a16:g128", 512),
    ("nvfp4_w4a16+plain", 64),
    ("plain+int4_w4a16:g128", 64),
    ("plain+int4_w4a16:g128", 1),
    ("int4_w4a16:g32:super:min+int6_w6a16:g16:super", 64),
):
    call = c.Call(c.SHAPES["mixtral"], M, scheme)
    found = c.compile_any(call, c.gpu_of(90), 90, compiles=False)
    print(*dict.fromkeys([one.name.removeprefix("moe_ops_") for one in found]))
"""
KERNELS = """
mixed_gemv1 mixed_gemv2
route permute_tokens wgmma_gemm1 wgmma_gemm2 combine
count_pairs place_pairs group_blocks scatter train_wgmma_packed combine_rows
route permute_tokens wgmma_gemm1 gemm2 combine
route gemm1 permute_hidden wgmma_gemm2 combine
gemm1 mixed_gemm2 combine
route permute_tokens wgmma_gemm1 wgmma_gemm2 combine
"""


@pytest.mark.slow
def test_kernels_on_hopper():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = [str(ROOT), str(TOOLS), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, "-c", LISTED]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert answer.stdout == KERNELS.lstrip(), answer.stderr


def test_configs_have_the_tiles_of_each_format():
    rest = (True, False, True, 64)
    for rows in (64, 512, 4096):
        layer = LayerSizes(rows, 128, 2048, 768, GPU)
        one = configs.of_two_formats(layer, (4, 8), BF16, *rest)
        four, eight = [configs.choose_wgmma(layer, bits) for bits in (4, 8)]
        assert (one.gemm1, one.gemm2, one.block_m) == (four.gemm1, eight.gemm2, four.block_m)
        assert one.kernel == SM90_WGMMA and one.split_k == eight.split_k
        beside = configs.of_two_formats(layer, (4, 16), BF16, *rest)
        assert beside.block_m >= 16 and beside.split_k == 1
    ada = LayerSizes(512, 128, 2048, 768, GPU._replace(shared_memory=99 * 1024))
    older = configs.of_two_formats(ada, (4, 16), BF16, True, False, False, 64)
    assert older.kernel == SM80_MMA
    token = configs.gemv_of_two_formats(LayerSizes(8, 128, 2048, 768, GPU, 8), (4, 8))
    assert token.kernel == GEMV and token.gemm1 != token.gemm2


def split_k_of(case: Case, **options) -> list[int]:
    """SPLIT_K of each launch of GEMM2 that Hopper would get."""
    with (
        mock.patch.object(mixed_configs, "on_sm90", lambda _: True),
        mock.patch.object(launch, "gpu", lambda _: GPU),
        mock.patch.object(launch, "run") as run,
    ):
        moe_ops.fused_experts(*case.args, **case.options, backend="triton", **options)
    launched = [one for call in run.call_args_list for one in call.args[0]]
    return [one.named()["SPLIT_K"] for one in launched if one.kernel.name == "moe_ops_wgmma_gemm2"]


@interpreted
@pytest.mark.skipif(NO_GLUON is not None, reason=str(NO_GLUON))
@pytest.mark.parametrize("scheme", ["plain+int4_w4a16:g32", "int4_w4a16:g32+int4_w4a16:g64"])
def test_chunks_split_sums_as_one_piece(scheme):
    """Fewer rows would have room for more partial sums, and so for another order."""
    case = Case("cpu", BF16, scheme, M=400, E=16, top_k=1, K=128, I=768)
    (whole,) = split_k_of(case)
    chunks = split_k_of(case, max_workspace_bytes=400_000)
    assert whole > 1 and len(chunks) > 1 and set(chunks) == {whole}


def test_plans():
    every = dataclasses.replace(H200, available=("triton", "torch"))
    for scheme, lines in (
        ("int4_w4a16:g32+plain", ["M >= 0: triton\n"]),
        ("plain+nvfp4_w4a16", ["M >= 0: triton\n"]),
        (
            "int4_w4a16:g32+fp8_block",
            ["M >= 0: torch", "not triton: triton runs two schemes in one layer where neither"],
        ),
    ):
        x, w13, w2, _, ids = Case("cpu", BF16, scheme, K=128, I=128).args
        with machines.pretend(every):
            text = str(moe_ops.explain(x, w13, w2, ids))
        assert all(line in text for line in lines), text


# --- on a GPU ------------------------------------------------------------------------------------

GPU_PAIRS = (
    *("int4_w4a16:g128+int8_w8a16:channel", "int4_w4a16:g128+plain", "plain+int4_w4a16:g128"),
    *("mxfp4_w4a16+fp8_w8a16:channel", "nvfp4_w4a16+plain", "plain+int8_w8a16:g64:zp"),
    *("int4_w4a16:g32:zp+mxfp4_w4a16", "plain+nvfp4_w4a16", "fp8_w8a16:block+plain"),
    *("int4_w4a16:g32:super:min+int6_w6a16:g16:super", "int6_w6a16:g16+int8_w8a16:g32"),
    *("plain+int5_w5a16:g32:min", "int5_w5a16:g32+plain"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("scheme", GPU_PAIRS)
def test_values_on_a_gpu(scheme, dtype):
    for M in (1, 3, 16, 100, 700):
        for K, I in ((256, 384), (192, 320)):
            Case("cuda", dtype, scheme, M=M, E=8, K=K, I=I, bias=True, seed=M).check("triton")
    Case("cuda", dtype, scheme, "swigluoai", M=33, E=8, K=256, I=256).check("triton")
    check_batched("cuda", dtype, scheme, K=256, I=256)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", GPU_PAIRS[:4])
def test_replay_after_routing_changed(scheme):
    case = Case("cuda", BF16, scheme, M=64, E=8, K=256, I=256)
    case.args[0] = torch.nan_to_num(case.args[0])
    case.args[3] = torch.nan_to_num(case.args[3])
    moe_ops.fused_experts(*case.args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_ops.fused_experts(*case.args)
    for seed in (1, 2):
        refill(case, seed)
        graph.replay()
        assert torch.equal(out, moe_ops.fused_experts(*case.args))
