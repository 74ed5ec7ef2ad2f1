"""Bounded workspaces: how many rows a plan lets run at once."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import moe_ops
from moe_ops import backends
from moe_ops.activations import Activation
from moe_ops.backend import Takes
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem
from moe_ops.planning import bind
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans
from tests.support.cases import Case

GIB = 2**30
H200 = Machine("cuda", (9, 0), "NVIDIA H200", ("triton", "deep_gemm", "torch"))
MEMORY = 150_109_880_320  # bytes of an H200
SILU = Activation("silu")
DEEPSEEK = Problem(
    *("experts", 256, 7168, 2048, 4096, 8, torch.bfloat16, "fp8_block"), options=Options(SILU)
)
SMALL = Problem("experts", 8, 256, 128, 256, 2, torch.bfloat16, options=Options(SILU))
TOKENS = (0, 1, 15, 16, 17, 100, 1000, 4096, 33000, 131072, 10**6)


def with_memory(total_memory: int, **facts) -> Machine:
    return dataclasses.replace(H200, total_memory=total_memory, **facts)


def test_a_long_prompt_of_deepseek_v3_fits_into_six_gib():
    """What the unbounded plan takes 21.8 GiB for (35 with every tier's workspace for all M)."""
    unbounded = plans.plan(DEEPSEEK, with_memory(0))
    assert unbounded.chunk_rows == 0 and unbounded.num_chunks(131072) == 1
    assert 21 * GIB < unbounded.num_bytes(131072) < 22 * GIB
    plan = plans.plan(DEEPSEEK, with_memory(MEMORY))
    assert plan.chunk_rows == 32768
    assert plan.num_bytes(131072) < 6 * GIB
    assert plan.num_chunks(131072) == 4 and plan.num_chunks(32768) == 1
    assert "'chunk_rows': 32768}" in plan.options
    lines = str(plan).splitlines()
    assert "  workspace at M=4096: 1352.95 MiB" in lines
    assert "  more than 32768 rows run in chunks, for a workspace of at most 6507.09 MiB" in lines


def bounded_plans():
    """(plan, bytes) of every backend, and of tiers of all of them, for bounds of many sizes."""
    sm100 = dataclasses.replace(H200, capability=(10, 0))
    for scheme, layout, machine in (
        *(
            (scheme, "", H200)
            for scheme in ("", "fp8_block", "fp8_channel", "nvfp4", "int4_w4a16")
        ),
        ("mxfp4_w4a8", moe_ops.meta.scales.DEEP_GEMM_UE8M0, sm100),
    ):
        for E, kind in itertools.product((1, 8, 300), ("experts", "batched_experts")):
            top_k = min(E, 6) if kind == "experts" else 0
            problem = Problem(
                *(kind, E, 256, 128, 256, top_k, torch.bfloat16, scheme, layout, Options(SILU))
            )
            known = [b for b in backends.BACKENDS if kind in b.operators]
            able = [b for b in known if not b.supports(problem, machine)]
            limits = (*range(40, 40 * len(able), 40), -1)
            for tiers in (*[((-1, b),) for b in able], tuple(zip(limits, able, strict=True))):
                for most in (2**21, 2**22 + 5, 2**26, 2**32):
                    yield problem.replace(max_workspace_bytes=most), machine, tiers


def test_no_workspace_is_larger_than_the_bound():
    seen, used = set(), []
    for problem, machine, tiers in bounded_plans():
        most = problem.options.max_workspace_bytes
        try:
            plan = plans._bounded(plans.Plan(problem, machine, tiers))
        except ValueError as error:
            assert "max_workspace_bytes must be at least" in str(error)
            assert problem.num_experts == 300 and most < 2**23
            continue
        assert plan.chunk_rows > 0 and plan.chunk_rows % 16 == 0
        seen |= {backend.name for _, backend in tiers}
        for M in TOKENS:
            alone = problem.kind == "batched_experts" and plan.num_chunks(M) == problem.num_experts
            # a chunk of batches has all rows of one expert at least
            assert plan.num_bytes(M) <= most or alone, (problem, tiers, M)
        if problem.kind == "experts":
            used.append(plan.num_bytes(10**9) / most)
    assert seen == set(backends.list_backends()) - {"flashinfer"}
    assert sorted(used)[len(used) // 2] > 0.85  # and most of it is used


def test_what_flashinfer_allocates_counts():
    backend = backends.named("flashinfer")
    problem = SMALL.replace(max_workspace_bytes=2**26)
    plan = plans._bounded(plans.Plan(problem, H200, ((-1, backend),)))
    own = sum(plans._bytes(buffer) for buffer in plan.workspace_shapes(10**9))
    more = backend.library.own_bytes(plan.chunk_rows, problem)
    # of a pair: its row of K, of N and of the output, in bf16
    assert more > plan.chunk_rows * 2 * (256 + 256) * 2
    assert plan.num_bytes(10**9) == own + more <= 2**26


def test_the_caller_may_bound_more_or_less():
    for most, chunks in ((2**50, 1), (3 * GIB, 10), (GIB, 64)):
        problem = DEEPSEEK.replace(max_workspace_bytes=most)
        plan = plans.plan(problem, with_memory(MEMORY))
        assert plan.num_bytes(131072) <= most
        assert plan.num_chunks(131072) == chunks
    with pytest.raises(
        ValueError, match="max_workspace_bytes must be at least [0-9]+ for backend"
    ):
        plans.plan(DEEPSEEK.replace(max_workspace_bytes=2**20), with_memory(MEMORY))


def test_calls_that_are_never_bounded():
    small = with_memory(2**24)
    assert plans.plan(SMALL, small).chunk_rows > 0
    training = SMALL.replace(needs_grad=True)
    assert plans.plan(training, small).chunk_rows == 0
    linear = Problem("grouped_linear", 8, 256, 0, 128, 0, torch.bfloat16)
    plan = plans.plan(linear, small)
    assert plan.chunk_rows == 0 and "'chunk_rows': 0}" in plan.options
    # somebody else's launchers do not know chunks
    other = dataclasses.replace(backends.named("triton"), name="other", takes=Takes())
    tiers = ((40, backends.named("triton")), (-1, other))
    assert plans._bounded(plans.Plan(SMALL, small, tiers)).chunk_rows == 0


def test_a_bound_that_a_backend_cannot_keep_is_a_reason_against_it(monkeypatch):
    other = dataclasses.replace(backends.named("triton"), name="other", takes=Takes())
    monkeypatch.setattr(backends, "BACKENDS", (other, *backends.BACKENDS))
    machine = with_memory(MEMORY, available=("other", "torch"))
    assert plans.plan(SMALL, machine).backend == "other"
    bounded = SMALL.replace(max_workspace_bytes=2**20)
    plan = plans.plan(bounded, machine)
    assert plan.backend == "torch" and plan.chunk_rows > 0
    with pytest.raises(ValueError, match="cannot run in chunks: leave max_workspace_bytes out"):
        plans.plan(bounded, machine, "other")


def test_a_default_without_room_runs_the_smallest_chunks():
    plan = plans.plan(DEEPSEEK, with_memory(2**20))
    assert plan.chunk_rows == 16


def test_tiers_alone_are_bounded_too():
    """Calls whose M is known run their tier's operator, in chunks of the same size."""
    plan = plans.plan(DEEPSEEK, with_memory(MEMORY))
    tiers = bind.BoundPlan(plan).split().tiers
    assert [limit for limit, _ in tiers] == [limit for limit, _ in plan.tiers]
    for limit, alone in tiers:
        assert alone.plan.chunk_rows == plan.chunk_rows
        most = 131072 if limit < 0 else limit
        assert 0 < alone.plan.num_bytes(most) <= plan.num_bytes(most)


def test_total_memory_is_a_fact_of_the_machine(monkeypatch):
    class Properties:
        major, minor, name, total_memory = 9, 0, "NVIDIA H200", 123

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    assert machines.Machine(*machines._find_machine_facts("cuda", 0)).total_memory == 123
    assert machines.machine(torch.device("cpu")).total_memory == 0


@pytest.mark.parametrize("wrong", (0, -1, 1.5, True, "1 GiB"))
def test_wrong_bounds_are_refused(wrong):
    case = Case("cpu", torch.float32)
    x, w13, w2, weights, ids = case.args
    counts = torch.zeros(len(w13), dtype=torch.int32)
    blocks = torch.zeros(len(w13), 2, x.shape[1])
    for call in (
        lambda: moe_ops.fused_experts(x, w13, w2, weights, ids, max_workspace_bytes=wrong),
        lambda: moe_ops.explain(x, w13, w2, ids, max_workspace_bytes=wrong),
        lambda: moe_ops.batched_experts(blocks, w13, w2, counts, max_workspace_bytes=wrong),
        lambda: moe_ops.MoELayer(16, 16, 4, 2, max_workspace_bytes=wrong),
    ):
        with pytest.raises(ValueError, match="max_workspace_bytes must be"):
            call()


def test_a_bound_of_another_type_is_refused_after_an_equal_integer():
    """2.0**30 equals 2**30, for which there is a plan by then."""
    args = Case("cpu", torch.float32).args
    moe_ops.fused_experts(*args, max_workspace_bytes=2**30, backend="torch")
    for _ in range(2):
        with pytest.raises(ValueError, match="max_workspace_bytes must be"):
            moe_ops.fused_experts(*args, max_workspace_bytes=2.0**30, backend="torch")


def test_calls_with_other_bounds_have_other_plans():
    """Bounds are part of what bound plans are looked up by."""
    x, w13, w2, weights, ids = Case("cpu", torch.float32, M=50).args
    call = {"backend": "torch"}
    first = moe_ops.fused_experts(x, w13, w2, weights, ids, **call)
    most = moe_ops.explain(x, w13, w2, ids, **call).num_bytes(16)
    for bound in (most, 10 * most, None):
        got = moe_ops.fused_experts(x, w13, w2, weights, ids, max_workspace_bytes=bound, **call)
        torch.testing.assert_close(got, first)
    plan = moe_ops.explain(x, w13, w2, ids, max_workspace_bytes=most, **call)
    assert plan.chunk_rows == 16 and plan.num_chunks(50) == 4
    assert moe_ops.explain(x, w13, w2, ids, **call).chunk_rows == 0
