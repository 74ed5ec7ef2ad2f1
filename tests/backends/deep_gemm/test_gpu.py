"""Backend deep_gemm on a GPU: captured graphs, compiled calls, many tokens, and no
synchronisation."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import moe_ops
from tests.backends.deep_gemm.test_layer import (
    FORMATS,
    case_of,
    check,
    reference,
    rounded_first_product,
    schemes,
)
from tests.support import oracle
from tests.support.cases import BF16, assert_matches, refill, tolerance

pytest.importorskip("deep_gemm")
CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]


@schemes
@pytest.mark.parametrize("M", [150, 3000, 20000])
@pytest.mark.parametrize("E, top_k", [(4, 2), (256, 8)])
def test_many_tokens(scheme, M, E, top_k):
    """Each token eight times, so that a few tell about all."""
    case = case_of("cuda", scheme, M=24, E=E, top_k=top_k)
    expected = reference(case)
    for i in (0, 3, 4):
        case.args[i] = case.args[i].repeat(-(-M // 24), 1)[:M]
    case.nowhere = case.nowhere.repeat(-(-M // 24))[:M]
    out = case.run("deep_gemm")
    expected = expected.repeat(-(-M // 24), 1)[:M]
    assert_matches(out, expected, tolerance(BF16, scheme, "cuda"))
    assert (out[case.nowhere] == 0).all()


@schemes
@pytest.mark.parametrize("M", [1, 40, 700])
def test_captured_graph_follows_tokens_and_routing(scheme, M):
    case = case_of("cuda", scheme, M=M, E=8)
    with torch.cuda.stream(torch.cuda.Stream()):
        case.run("deep_gemm", poison=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run("deep_gemm", poison=False)
    for seed in range(3):
        refill(case, seed)
        out.fill_(torch.nan)
        graph.replay()
        assert_matches(out, reference(case), tolerance(BF16, scheme, "cuda"))
    case.args[4].fill_(-1)
    graph.replay()
    assert (out == 0).all()
    case.args[4].fill_(7)
    graph.replay()
    assert_matches(out, reference(case), tolerance(BF16, scheme, "cuda"))


@schemes
@pytest.mark.parametrize("T", [6, 128])
def test_captured_batches_follow_counts(scheme, T):
    case = case_of("cuda", scheme)
    _, w13, w2, *_ = case.args
    x = torch.randn(4, T, 256, device="cuda").to(BF16)
    counts = torch.tensor([T, 0, 3, 1], dtype=torch.int32, device="cuda")

    def call():
        return moe_ops.batched_experts(x, w13, w2, counts, backend="deep_gemm")

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for shift in range(4):
        counts.copy_(counts.roll(1))
        x.copy_(torch.randn(4, T, 256) + shift)
        out.fill_(torch.nan)
        graph.replay()
        with rounded_first_product():
            expected = oracle.batched(x, w13, w2, counts)
        here = ~expected.isnan()
        assert_matches(out[here], expected[here], tolerance(BF16, scheme, "cuda"))


@schemes
def test_capture_before_a_warm_call_says_to_warm_up(scheme):
    # sizes no other test has, nor another scheme here: two of them share a kernel
    case = case_of("cuda", scheme, E=5, K=640, I=896 + 128 * FORMATS.index(scheme))
    with (
        pytest.raises(RuntimeError, match="'deep_gemm' has no compiled kernel .* warm up first"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        case.run("deep_gemm", poison=False)
    torch.cuda.synchronize()
    check(case)


@schemes
def test_no_host_synchronisation(scheme):
    case = case_of("cuda", scheme, expert_map=True)
    _, w13, w2, *_ = case.args
    x = torch.randn(4, 6, 256, device="cuda", dtype=BF16)
    counts = torch.tensor([4, 0, 2, 1], dtype=torch.int32, device="cuda")

    def calls():
        case.run("deep_gemm", poison=False)
        moe_ops.batched_experts(x, w13, w2, counts, backend="deep_gemm")

    calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@schemes
def test_compiled_equals_eager(scheme):
    """One dynamic graph, bitwise; then inductor's own CUDA graphs."""
    torch._dynamo.reset()
    cases = [case_of("cuda", scheme, M=M, expert_map=True) for M in (5, 9, 2)]
    for options in (
        {"backend": "aot_eager", "dynamic": True},
        {"mode": "reduce-overhead", "dynamic": False},
    ):
        compiled = torch.compile(moe_ops.fused_experts, fullgraph=True, **options)
        with torch.no_grad():
            for case in cases:
                expected = case.run("deep_gemm")
                for _ in range(3):
                    torch.compiler.cudagraph_mark_step_begin()
                    out = compiled(*case.args, **case.options, backend="deep_gemm").clone()
                    assert torch.equal(out, expected)


WARM_PRODUCTS = """
import os, sys, torch, moe_ops
from pathlib import Path
from moe_ops.backends.deep_gemm import library as dg

w13, w2 = [torch.randn(s, device="cuda").bfloat16() for s in ((4, 512, 256), (4, 256, 256))]
if sys.argv[1]:
    w13, w2 = [moe_ops.quantize(w, sys.argv[1]) for w in (w13, w2)]
w13, w2 = [moe_ops.prepare(w, "deep_gemm") for w in (w13, w2)]
cache, spared = Path(os.environ["DG_JIT_CACHE_DIR"]), 0
for M in (1, 64, 65, 256, 257, 300, 511, 512, 2, 100, 1000, 2048, 1500, 1024, 200, 700, 2047):
    keys, files = set(dg._warm), set(cache.rglob("*"))
    x = torch.randn(M, 256, device="cuda").bfloat16()
    ids = torch.randint(0, 4, (M, 2), device="cuda")
    moe_ops.fused_experts(x, w13, w2, torch.rand(M, 2, device="cuda"), ids, backend="deep_gemm")
    torch.cuda.synchronize()
    if dg._warm == keys:
        assert set(cache.rglob("*")) == files, f"M={M} compiled a kernel that counts as warm"
        spared += 1
assert spared >= 8 and any(cache.rglob("*")), (spared, len(dg._warm))
"""


@schemes
def test_products_that_count_as_warm_are_compiled(scheme, tmp_path):
    """A capture may find any number of tokens of a warm bucket: the library must choose the same
    kernel for all."""
    environment = os.environ | {"DG_JIT_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", WARM_PRODUCTS, scheme]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert answer.returncode == 0, answer.stderr
