"""When "auto" takes backend cutlass: where it is built, and from some rows an expert on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_ops.activations import Activation
from moe_ops.backends.cutlass import backend, library
from moe_ops.backends.cutlass.schemes import one_scale
from moe_ops.csrc import build
from moe_ops.ops.problem import Machine, Problem
from moe_ops.planning import plan as plans

H200 = Machine("cuda", (9, 0), "NVIDIA H200", ("triton", "cutlass", "torch"))
LAYER = Problem(
    "experts",
    64,
    2048,
    1024,
    2048,
    4,
    torch.bfloat16,
    "fp8_channel",
    activation=Activation("silu"),
)


@pytest.fixture
def built(monkeypatch, tmp_path):
    """A function that says whether the object is there."""

    def say(there: bool):
        monkeypatch.setattr(build, "installed", lambda *_: tmp_path if there else None)
        monkeypatch.setattr(library, "_load", lambda name: None)

    monkeypatch.setattr(library, "simulated", lambda: False)
    return say


def names(problem: Problem) -> list[tuple[int, str]]:
    return [(limit, chosen.name) for limit, chosen in plans.plan(problem, H200, "auto").tiers]


@pytest.mark.parametrize("scheme", backend._FP8)
def test_auto_takes_it_for_many_rows(built, scheme):
    """16 rows an expert are 256 tokens of 64 experts and top-4."""
    built(True)
    run = not one_scale(scheme)  # the others were not run on hardware
    problem = dataclasses.replace(LAYER, scheme=scheme)
    assert names(problem) == ([(255, "triton"), (-1, "cutlass")] if run else [(-1, "triton")])
    batches = dataclasses.replace(problem, kind="batched_experts", top_k=0)
    assert names(batches) == [(-1, "triton")]


def test_auto_starts_no_build(built):
    built(False)
    assert names(LAYER) == [(-1, "triton")]
    said = str(plans.plan(LAYER, H200, "auto"))
    assert (
        "its kernels are not built yet" in said and "python -m moe_ops.csrc.build sm_90a" in said
    )
    named = plans.plan(LAYER, H200, "cutlass")
    assert [chosen.name for _, chosen in named.tiers] == ["cutlass"]


def test_what_needs_another_gpu(built):
    built(True)
    sm80 = dataclasses.replace(H200, capability=(8, 0))
    with pytest.raises(ValueError, match=r"for compute capability 9\.0.*, got 8\.0"):
        plans.plan(LAYER, sm80, "cutlass")
    amd = dataclasses.replace(H200, gfx="gfx942")
    with pytest.raises(ValueError, match="cutlass needs an NVIDIA GPU, got gfx942"):
        plans.plan(LAYER, amd, "cutlass")


def test_auto_leaves_out_what_does_not_load(built, monkeypatch):
    built(True)

    def fails(name):
        raise ImportError("it cannot be loaded; delete it")

    monkeypatch.setattr(library, "_load", fails)
    assert names(LAYER) == [(-1, "triton")]
    assert "it cannot be loaded; delete it" in str(plans.plan(LAYER, H200, "auto"))


def test_under_expert_parallelism_more_rows_are_asked_for(built):
    built(True)
    problem = dataclasses.replace(LAYER, has_expert_map=True)
    assert names(problem) == [(511, "triton"), (-1, "cutlass")]
