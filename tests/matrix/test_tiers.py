"""Tiers follow the number of tokens."""

from __future__ import annotations

import math

import pytest
import torch

import moe_ops
from moe_ops.ops.problem import Machine
from moe_ops.planning import machine as machines
from moe_ops.tables import lookup
from tests.matrix.test_values import interpreted
from tests.support.cases import (
    FP32,
    Case,
    poisoned_memory,
)

H200 = Machine("cuda", (9, 0), "NVIDIA H200", ("triton", "torch"))
interpreter = pytest.mark.skipif(
    not interpreted("triton", "cpu"), reason="needs triton's interpreter"
)


# --- the tiered op -------------------------------------------------------------------------------


@pytest.fixture
def tiers(monkeypatch):
    """`auto` plans as on a GPU whose measured table says torch up to 4 tokens, triton beyond."""
    monkeypatch.setattr(lookup, "look_up", lambda *_: ((4, "torch"), (-1, "triton")))
    with machines.pretend(H200):
        yield
    torch._dynamo.reset()


@pytest.mark.slow
@interpreter
def test_tiers_follow_the_number_of_tokens(tiers):
    cases = {M: Case("cpu", FP32, M=M, bias=True) for M in (1, 4, 5, 9)}
    x, w13, w2, _, ids = cases[9].args
    plan = moe_ops.explain(x, w13, w2, ids, **cases[9].options)
    assert plan.backend == "auto" and plan.tiers_text == "4:torch,-1:triton"
    for buffers in zip(
        plan.workspace_shapes(9),
        *[
            b.workspace_shapes(M, plan.problem)
            for M, (_, b) in zip((4, 9), plan.tiers, strict=True)
        ],
        strict=True,
    ):
        whole, *parts = [math.prod(b.shape) * b.dtype.itemsize for b in buffers]
        assert max(parts) <= whole < max(parts) + 128
    for M, case in cases.items():
        out = case.check("auto")
        assert torch.equal(out, case.run("torch" if M <= 4 else "triton"))
    compiled = torch.compile(
        moe_ops.fused_experts, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for M in (4, 9):  # one graph, both tiers
        args, options = cases[M].args, cases[M].options
        assert torch.equal(compiled(*args, **options), cases[M].run("auto"))


@interpreter
def test_tiers_of_the_other_two_operators(tiers):
    case = Case("cpu", FP32, bias=True)
    _, w13, w2, *_ = case.args
    for rows in (3, 6):
        single = "torch" if rows <= 4 else "triton"
        x = torch.randn(4, rows, 48)
        counts = torch.tensor([rows, 0, 1, 2], dtype=torch.int32)
        with poisoned_memory():
            out, one = [
                moe_ops.batched_experts(x, w13, w2, counts, backend=name, **case.options)
                for name in ("auto", single)
            ]
        for e, count in enumerate(counts.tolist()):
            assert torch.equal(out[e, :count], one[e, :count])
        ends = torch.tensor([1, 1, 2, 3], dtype=torch.int32)
        with poisoned_memory():
            out, one = [
                moe_ops.grouped_linear(x[0], w13, ends, backend=name) for name in ("auto", single)
            ]
        assert torch.equal(out, one)
