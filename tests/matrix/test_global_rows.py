"""NVFP4 layers whose gate and up, or all of whose rows, have global scales of their own: values in
every backend that runs the scheme, plans for GPUs, compiled code, gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import moe_ops
from moe_ops import backends
from moe_ops.kernels.launch import INTERPRETED
from moe_ops.kernels.mixed_gemm import gemv
from moe_ops.ops.problem import Machine
from moe_ops.planning import plan as plans
from moe_ops.schemes import get_scheme
from tests.support import oracle
from tests.support.cases import (
    BF16,
    FP32,
    Case,
    assert_matches,
    poisoned_memory,
    tolerance,
    with_global_rows,
)
from tests.support.fake_cuda import H200, Recorder, fake_gpu

needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs triton's interpreter")
TRITON = pytest.param("triton", marks=needs_interpreter)
SCHEMES = ("nvfp4_w4a16", "nvfp4")
# The interpreter cuts bf16 off where it should round. Kernels of a CPU take bf16 tokens.
everywhere = pytest.mark.parametrize(
    "backend, dtype",
    [
        ("torch", FP32),
        pytest.param("triton", FP32, marks=needs_interpreter),
        ("auto", BF16),
    ],
)
schemes = pytest.mark.parametrize("scheme", SCHEMES)
MACHINES = {
    "SM80": Machine("cuda", (8, 0), "NVIDIA A100", backends.list_backends()),
    "SM90": H200,
    "SM100": Machine("cuda", (10, 0), "NVIDIA B200", backends.list_backends()),
    "SM120": Machine("cuda", (12, 0), "NVIDIA RTX 5090", backends.list_backends()),
}


def case_of(scheme: str, dtype=BF16, weights=(1,), **options) -> Case:
    """Rows of w13, or of both weights, have global scales of their own."""
    case = Case("cpu", dtype, scheme, **{"K": 64, "I": 64, **options})
    for which in weights:
        case.args[which] = with_global_rows(case.args[which], which)
    return case


@pytest.mark.sweep
@everywhere
@schemes
@pytest.mark.parametrize("M", [1, 7, 90])
def test_values(backend, dtype, scheme, M):
    """90 tokens are several blocks of rows an expert."""
    ids = torch.tensor([[3, 0]], dtype=torch.int32) if M == 1 else None
    case_of(scheme, dtype, M=M, ids=ids).check(backend)


@pytest.mark.sweep
@everywhere
@schemes
@pytest.mark.parametrize(
    "options",
    [
        {"activation": "swigluoai", "bias": True},
        {"activation": "relu2_no_mul"},
        {"expert_map": True, "M": 13, "E": 6, "bias": True},
        {"on_input": True, "top_k": 1, "M": 9},
        {"K": 80, "I": 48},
        {"weights": (1, 2), "bias": True},
        {"weights": (2,), "M": 1, "ids": torch.tensor([[3, 0]], dtype=torch.int32)},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(backend, dtype, scheme, options):
    case_of(scheme, dtype, **options).check(backend)


@needs_interpreter
def test_one_token_takes_two_launches(monkeypatch):
    made, launches = [], gemv.launches
    monkeypatch.setattr(gemv, "launches", lambda *args: made.append(1) or launches(*args))
    ids = torch.tensor([[3, 0]], dtype=torch.int32)
    case_of("nvfp4_w4a16", FP32, weights=(1, 2), M=1, ids=ids, bias=True).check("triton")
    assert made == [1]


@everywhere
@schemes
def test_equal_scales_have_the_same_bits(backend, dtype, scheme):
    """Of rows that all have the global scale of their expert."""
    case = Case("cpu", dtype, scheme, K=64, I=64, M=9)
    want = case.run(backend)
    for which in (1, 2):
        w = case.args[which]
        rows = w.global_scale[:, None, None].repeat(1, w.shape[1], 1)
        case.args[which] = w._replace(global_scale=rows)
    assert torch.equal(case.run(backend), want)


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["torch", TRITON])
@schemes
def test_batches_and_linear(backend, scheme):
    case = case_of(scheme, FP32, weights=(1, 2), E=3)
    w13, w2 = case.args[1:3]
    x, counts = torch.randn(3, 5, 64), torch.tensor([5, 0, 3], dtype=torch.int32)
    with poisoned_memory():
        out = moe_ops.batched_experts(x, w13, w2, counts, backend=backend)
    want = oracle.batched(x, w13, w2, counts)
    inside = ~want.isnan()
    assert_matches(out[inside], want[inside], tolerance(FP32, scheme))
    rows, offsets = torch.randn(9, 64), torch.tensor([4, 4, 8], dtype=torch.int32)
    y = moe_ops.grouped_linear(rows, w13, offsets, backend=backend)
    assert_matches(y, oracle.grouped_linear(rows, w13, offsets), tolerance(FP32, scheme))


@pytest.mark.slow
@schemes
def test_one_graph_for_every_number_of_tokens(scheme):
    torch._dynamo.reset()
    case = case_of(scheme, M=9)
    x, w13, w2, weights, ids = case.args
    x, weights = x.nan_to_num(), weights.nan_to_num()

    def layer(x, weights, ids):
        return moe_ops.fused_experts(x, w13, w2, weights, ids)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (9, 4, 7):
            some = [t[:rows].clone() for t in (x, weights, ids)]
            assert torch.equal(compiled(*some), layer(*some))


def traced_weight(scheme: str, rows: int, columns: int, global_scale: tuple[int, ...]):
    """On the device of the context."""
    return moe_ops.NVFP4ExpertTensor(
        torch.empty(4, rows, columns // 2, dtype=torch.uint8),
        torch.empty(4, rows, columns // 16, dtype=torch.float8_e4m3fn),
        scheme,
        global_scale=torch.empty(global_scale),
        activation_scale=torch.empty(()) if scheme == "nvfp4" else None,
    )


@pytest.mark.slow
@pytest.mark.parametrize("where", MACHINES)
@schemes
def test_plans_for_gpus(where, scheme):
    """The backends that take equal global scales take those of rows, but for flashinfer."""
    torch._dynamo.reset()
    machine, recorder = MACHINES[where], Recorder()
    with fake_gpu(machine), torch.device("cuda"):
        w2 = traced_weight(scheme, 128, 128, (4,))
        equal, rows = [traced_weight(scheme, 256, 128, shape) for shape in ((4,), (4, 256, 1))]
        x, weights = torch.empty(5, 128, dtype=BF16), torch.empty(5, 2)
        ids = torch.empty(5, 2, dtype=torch.int32)
        want, got = [moe_ops.explain(x, w, w2, ids).problem for w in (equal, rows)]

        def layer(x, weights, ids):
            return moe_ops.fused_experts(x, rows, w2, weights, ids)

        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=recorder.backend)
        assert compiled(x, weights, ids).shape == x.shape
        ((op, args),) = recorder.calls()
    assert op is plans.plan(got, machine).op
    assert tuple(args["scales"][2].shape) == (4, 256, 1)
    assert got.global_rows == ("w13",) and replace(got, global_rows=()) == want
    for backend in backends.BACKENDS:
        layouts = [r.layout for r in backend.relayouts if r.takes(get_scheme(scheme))]
        for layout in ("", *layouts):
            of_equal, of_rows = [
                backend.supports(replace(problem, layout=layout), machine)
                for problem in (want, got)
            ]
            if backend.name == "flashinfer" and of_equal != of_rows:
                assert any("global scale for each expert" in reason for reason in of_rows)
            else:
                assert of_equal == of_rows, backend.name


def test_refusals_name_the_weight():
    problem = plans.Problem(
        *("experts", 4, 128, 128, 256, 2, BF16, "nvfp4"), layout="cutlass_swizzled"
    )
    of = {b.name: b for b in backends.BACKENDS}
    B200 = MACHINES["SM100"]
    assert of["cutlass"].supports(replace(problem, global_rows=("w13",)), B200) == []
    (reason,) = of["cutlass"].supports(replace(problem, global_rows=("w13", "w2")), B200)
    assert "takes w2 with a global scale for each expert" in reason
    problem = replace(problem, layout="flashinfer_swizzled:up_gate")
    reasons = of["flashinfer"].supports(replace(problem, global_rows=("w13",)), B200)
    assert any("got one for each row of w13" in reason for reason in reasons)


@schemes
def test_gradients(scheme):
    """Of hidden_states and router weights, through frozen weights."""
    case = case_of(scheme, FP32, M=9, E=3, weights=(1, 2))
    x, w13, w2, weights, ids = case.args
    leaves = [t.nan_to_num().requires_grad_() for t in (x, weights)]
    out = moe_ops.fused_experts(leaves[0], w13, w2, leaves[1], ids)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    got = torch.autograd.grad(out, leaves, cotangent)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    values = [oracle.weight(w) for w in (w13, w2)]
    want_out = oracle.experts(exact[0], *values, exact[1], ids, activation="silu")
    want = torch.autograd.grad(want_out, exact, cotangent.double())
    within = 1e-4 if scheme == "nvfp4_w4a16" else 0.25  # activations in e2m1 leave much
    for a, b in zip(got, want, strict=True):
        assert oracle.relative_error(a, b) < within
