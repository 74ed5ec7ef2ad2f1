"""Every trap by its name: mistakes that plausible kernels make."""

from __future__ import annotations

import math

import pytest
import torch

import moe_ops
from tests.matrix.test_values import ON_GPU, attempt, backend_of, everywhere, fitted, problem_of
from tests.support import oracle
from tests.support.cases import (
    FP32,
    Case,
    assert_matches,
    poisoned_memory,
    tolerance,
)

# --- the traps that other libraries fell into ----------------------------------------------------


@everywhere
def test_trap_router_weight_applied_twice(where):
    """With router_weight_on_input the output is not weighed again: relu squared would show w **
    3."""
    name, device, dtype = where
    options = fitted(name, {"activation": "relu2_no_mul", "top_k": 1, "on_input": True})
    case = Case(device, dtype, **options)
    attempt(where, problem_of(case, name), lambda: case.check(name))
    w = case.args[3].double()
    twice = case.reference() * w
    assert oracle.relative_error(twice[~case.nowhere], case.reference()[~case.nowhere]) > 0.1


@everywhere
@pytest.mark.parametrize("activation", ["silu", "swigluoai_uninterleave", "swigluoai"])
def test_trap_swapped_gate_and_up(where, activation):
    """At unit scale swapping the halves is far off, so the values above would show it."""
    name, device, dtype = where
    case = Case(device, dtype, **fitted(name, {"activation": activation}))
    out = attempt(where, problem_of(case, name), lambda: case.check(name))
    w13 = case.args[1]
    if activation == "swigluoai":
        case.args[1] = w13.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)
    else:
        case.args[1] = torch.cat(w13.chunk(2, 1)[::-1], 1)
    assert oracle.relative_error(out, case.reference()) > 0.1


@everywhere
def test_trap_wrong_number_of_outputs(where):
    """Ops return nothing, their fakes neither."""
    name, device, _ = where
    for op in [operator.op for operator in backend_of(name).operators.values()]:
        assert list(op._schema.returns) == []
        written = [a.name for a in op._schema.arguments if a.alias_info is not None]
        assert written == ["out", "workspace13", "workspace2", "index_workspace"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("rubbish", [math.nan, 1e30, math.inf])
def test_trap_dynamic_scale_reads_rows_nobody_wrote(device, rubbish):
    """One scale for all tokens: those without experts, and rows past the count, must not be in
    it."""
    case = Case(device, FP32, "fp8_tensor", M=9)
    case.args[0][case.nowhere] = rubbish
    case.check("torch")
    _, w13, w2, *_ = case.args
    x = torch.randn(4, 5, 48, device=device)
    counts = torch.tensor([2, 0, 5, 1], device=device)
    x[0, 2:] = x[1] = x[3, 1:] = rubbish
    with poisoned_memory():
        out = moe_ops.batched_experts(x, w13, w2, counts, backend="torch")
    expected = oracle.batched(x, w13, w2, counts)
    here = ~expected.isnan()
    assert_matches(out[here], expected[here], tolerance(FP32, "fp8_tensor", out.device.type))


def test_trap_saturation_of_static_scales():
    """Activations past 448 scales saturate, they do not become NaN."""
    case = Case("cpu", FP32, "fp8_tensor_static")
    case.args[0].mul_(5)
    case.check("torch")
