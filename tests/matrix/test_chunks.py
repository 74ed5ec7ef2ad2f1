"""Calls with more rows than their workspaces hold run in chunks, with the results of one piece."""

from __future__ import annotations

import dataclasses
import math
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import moe_ops
from moe_ops import backends
from moe_ops.planning import bind
from tests.matrix.test_values import interpreted
from tests.meta.test_workspace import fenced, fences_hold
from tests.support import oracle
from tests.support.cases import (
    BF16,
    FP32,
    Case,
    assert_matches,
    garbage,
    poisoned_memory,
    tolerance,
)
from tests.support.fake_cuda import Recorder

CUDA = torch.cuda.is_available()
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device"))
# plain, and each way to scale activations: by groups, rows, one for all tokens (computed, known),
# powers of two, and one for all tokens above those of groups
SCHEMES = ("", "fp8_block", "fp8_channel", "fp8_tensor", "fp8_tensor_static", "mxfp8", "nvfp4")
WEIGHT_ONLY = ("int4_w4a16:g32:zp", "fp8_w8a16:channel")
PLACES = [
    pytest.param(name, device, marks=ON_GPU if device == "cuda" else ())
    for name, device in (
        ("torch", "cpu"),
        ("triton", "cpu"),
        ("torch", "cuda"),
        ("triton", "cuda"),
    )
    if device == "cuda" or name == "torch" or interpreted(name, device)
]
everywhere = pytest.mark.parametrize("backend, device", PLACES)


def bound_of(call, rows: int) -> int:
    """The least bytes that have room for `rows` rows of a fused_experts call."""
    args, options = call
    x, w13, w2, _, ids = args
    return moe_ops.explain(x, w13, w2, ids, **options).num_bytes(rows)


@contextmanager
def exact_workspaces():
    """Buffers of exactly the planned sizes, full of garbage, between fences."""
    fences = []

    def allocate(bound, direct, call, M):
        (shape, dtype), device = call.output(), call.hidden_states.device
        found = [garbage(torch.empty(shape, dtype=dtype, device=device))]
        for shape, dtype in bound.plan.workspace_shapes(M):
            inside, whole = fenced(shape, dtype)
            found.append(garbage(inside))
            fences.append(whole)
        return found

    with mock.patch.object(bind.BoundPlan, "allocate", allocate):
        yield
    assert len(fences) == 3 and all(fences_hold(whole) for whole in fences)


def of(backend: str, device: str, scheme: str, **options) -> tuple[Case, dict, int]:
    wide = scheme.endswith(("block", "fp8"))
    sizes = {"K": 128, "I": 128} if wide else {"K": 64, "I": 64}
    sizes |= {"M": 41} if device == "cpu" else {"M": 1000, "E": 16, "top_k": 4}
    dtype = FP32 if device == "cpu" and scheme in ("", *SCHEMES) else BF16
    case = Case(device, dtype, scheme, **(sizes | options))
    chosen = {"backend": backend, **case.options}
    rows = 16 if device == "cpu" else 128
    return case, chosen, bound_of((case.args, chosen), rows)


@everywhere
@pytest.mark.parametrize("scheme", (*SCHEMES, *WEIGHT_ONLY))
def test_values_are_those_of_one_piece(backend, device, scheme):
    case, options, most = of(backend, device, scheme, bias=True, expert_map=True)
    x, w13, w2, _, ids = case.args
    plan = moe_ops.explain(x, w13, w2, ids, **options, max_workspace_bytes=most)
    assert plan.num_chunks(len(x)) == math.ceil(len(x) / plan.chunk_rows) >= 3
    whole = case.run(backend)
    if device == "cpu":
        with exact_workspaces():
            parts = moe_ops.fused_experts(*case.args, **options, max_workspace_bytes=most)
    else:
        with poisoned_memory():
            parts = moe_ops.fused_experts(*case.args, **options, max_workspace_bytes=most)
    if backend == "triton":
        assert torch.equal(parts, whole)
    # libraries choose by the number of rows how they add
    within = tolerance(case.dtype, scheme, device)
    assert_matches(parts, case.reference(), within)
    assert (parts[case.nowhere] == 0).all()


@everywhere
@pytest.mark.parametrize("scheme", ("", "fp8_tensor", "nvfp4"))
def test_router_weights_on_the_input(backend, device, scheme):
    """They belong to what the one scale of all tokens follows from."""
    case, options, most = of(backend, device, scheme, on_input=True, top_k=1)
    # the largest token and the largest weight lie in different chunks
    x, _, _, weights, ids = case.args
    ids[5], ids[20], ids[40] = 0, 2, 3
    x[5], weights[5] = x[5].nan_to_num(1.0) * 9, 0.5
    x[40], weights[40] = x[40].nan_to_num(1.0), 7.0
    x[20], weights[20] = x[20].nan_to_num(1.0), 1.0
    case.nowhere[[5, 20, 40]] = False
    whole = case.run(backend)
    parts = moe_ops.fused_experts(*case.args, **options, max_workspace_bytes=most)
    if backend == "triton":
        assert torch.equal(parts, whole)
    assert_matches(parts, whole, 1e-5)


@everywhere
@pytest.mark.parametrize("scheme", (*SCHEMES, *WEIGHT_ONLY))
def test_batches(backend, device, scheme):
    """A chunk has all rows of some experts: of three, and then of two."""
    case = of(backend, device, scheme, E=5, bias=True)[0]
    _, w13, w2, *_ = case.args
    options = {"backend": backend, **case.options}
    counts = torch.tensor([6, 0, 3, -1, 9], dtype=torch.int32, device=device)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(5, 6, w13.shape[2] if not scheme else case.args[0].shape[1], generator=g)
    x = (x * torch.arange(1, 6).view(5, 1, 1)).to(case.dtype).to(device)
    inside = torch.arange(6, device=device) < counts[:, None]
    x[~inside] = math.nan
    with poisoned_memory():
        whole = moe_ops.batched_experts(x, w13, w2, counts, **options)
    for rows in (128, 400):
        plan = batched_plan(x, w13, w2, counts, options)
        one = dataclasses.replace(plan.problem, num_experts=1)
        most = dataclasses.replace(plan, problem=one).num_bytes(rows)
        chunked = batched_plan(x, w13, w2, counts, options | {"max_workspace_bytes": most})
        assert chunked.num_chunks(6) == (5 if rows == 128 else 2)
        with exact_workspaces() if device == "cpu" else poisoned_memory():
            parts = moe_ops.batched_experts(
                x, w13, w2, counts, **options, max_workspace_bytes=most
            )
        if backend == "triton":
            assert torch.equal(parts[inside], whole[inside])
        oracle_options = {k: v for k, v in options.items() if k != "backend"}
        expected = oracle.batched(x, w13, w2, counts.clamp(max=6), **oracle_options)
        within = tolerance(case.dtype, scheme, device)
        assert_matches(parts[inside], expected[inside], within)


def batched_plan(x, w13, w2, counts, options):
    """The plan of a batched_experts call."""
    found = []
    make_plan = bind.make_plan

    def keep(call, backend):
        found.append(make_plan(call, backend))
        return found[-1]

    bind.forget()
    with mock.patch.object(bind, "make_plan", keep):
        moe_ops.batched_experts(x, w13, w2, counts, **options)
    return found[0]


@pytest.mark.slow
def test_one_graph_for_every_number_of_tokens():
    case, options, most = of("torch", "cpu", "fp8_tensor")
    x, w13, w2, weights, ids = case.args

    def call(x, weights, ids):
        return moe_ops.fused_experts(x, w13, w2, weights, ids, **options, max_workspace_bytes=most)

    recorder = Recorder()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=recorder.backend)
    for M in (5, 16, 41):
        got = compiled(x[:M], weights[:M], ids[:M])
        assert torch.equal(got, call(x[:M], weights[:M], ids[:M]))
    ((_, kwargs),) = recorder.calls()  # one graph
    assert "'chunk_rows': 16" in kwargs["options"]
    assert "Min" in str(kwargs["workspace13"].shape[0])


def test_programs_exported_with_a_bound_run_in_chunks():
    case, options, most = of("torch", "cpu", "")
    layer = moe_ops.MoELayer(64, 64, 4, 2, max_workspace_bytes=most, backend="torch").eval()
    x, tokens = torch.randn(41, 64), torch.export.Dim("tokens", min=2, max=100)
    with torch.no_grad():
        program = torch.export.export(layer, (x[:20],), dynamic_shapes=({0: tokens},))
        whole = moe_ops.MoELayer(64, 64, 4, 2, backend="torch").eval()
        whole.load_state_dict(layer.state_dict())
        torch.testing.assert_close(program.module()(x), whole(x))
    assert any(
        "'chunk_rows': 16" in str(node.args) + str(node.kwargs) for node in program.graph.nodes
    )


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("scheme", (*SCHEMES, *WEIGHT_ONLY))
@pytest.mark.parametrize("backend", ("triton", "auto"))
def test_chunks_are_captured(backend, scheme):
    case, _, _ = of("triton", "cuda", scheme)
    options = {"backend": backend, **case.options}
    most = bound_of((case.args, options), 256)

    def call():
        return moe_ops.fused_experts(*case.args, **options, max_workspace_bytes=most)

    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(3):
        garbage(out)
        graph.replay()
        assert torch.equal(out, expected)


def test_every_backend_runs_in_chunks():
    assert all(backend.takes.chunked for backend in backends.BACKENDS)
