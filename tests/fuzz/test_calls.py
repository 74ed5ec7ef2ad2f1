"""A few hundred random calls of the public functions; `make fuzz` runs twenty thousand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import moe_ops
from tests.fuzz import calls
from tests.fuzz.calls import Example

FEW = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,  # the same in each run: make fuzz takes others
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)


@pytest.mark.slow
@FEW
@given(calls.examples(triton=False))
def test_a_few_calls(example):
    calls.run(example)


@pytest.mark.slow
@settings(FEW, max_examples=250)
@given(calls.examples())
def test_some_hundred_calls(example):
    calls.run(example)


PLAIN = Example(
    function="fused_experts",
    M=4,
    E=3,
    top_k=2,
    K=16,
    I=8,
    dtype=torch.float32,
    scheme="",
    activation="silu",
    backend="torch",
    seed=0,
    bias=True,
    expert_map=False,
    on_input=False,
    ids_dtype=torch.int32,
    weights_dtype=torch.float32,
    no_grad=True,
    method="default",
)


@pytest.mark.parametrize("function", ["fused_experts", "batched_experts", "grouped_linear"])
@pytest.mark.parametrize("scheme", ["", "int4_w4a16:g32"])
def test_wrong_values_are_found(function, scheme, monkeypatch):
    """The test of the test: a sign lost, a factor lost."""
    example = dataclasses.replace(PLAIN, function=function, scheme=scheme)
    assert calls.run(example) == "value"
    whole = getattr(moe_ops, function)

    for wrong in (lambda **given: -whole(**given), lambda **given: whole(**given) / 2):
        monkeypatch.setattr(moe_ops, function, wrong)
        with pytest.raises(AssertionError, match="relative error"):
            calls.run(example)


def test_errors_of_good_calls_and_without_names_are_found(monkeypatch):
    def unnamed(**given):
        raise RuntimeError("something is wrong")

    def other(**given):
        raise KeyError("w13")

    def named(**given):
        raise ValueError("w13 must be otherwise")

    for function in (unnamed, other, named):
        monkeypatch.setattr(moe_ops, "fused_experts", function)
        with pytest.raises(AssertionError):
            calls.run(PLAIN)
    flawed = dataclasses.replace(PLAIN, flaw=("w13", "rank"))
    assert calls.run(flawed) == "error"


def test_freed_values_must_not_give_a_result(monkeypatch):
    example = dataclasses.replace(PLAIN, states={"w13_bias": "freed"})
    assert calls.run(example) == "error"
    monkeypatch.setattr(moe_ops, "fused_experts", lambda **given: given["hidden_states"])
    with pytest.raises(AssertionError, match="freed"):
        calls.run(example)
