"""When "auto" takes backend cutlass: where it is built, and from some rows an expert on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_ops.activations import Activation
from moe_ops.backends.cutlass import backend, library
from moe_ops.backends.cutlass.schemes import one_scale
from moe_ops.csrc import build
from moe_ops.ops.options import Options
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
    options=Options(Activation("silu")),
)


@pytest.fixture
def built(monkeypatch, tmp_path):
    """A function that says whether the object is there."""

    def say(there: bool):
        monkeypatch.setattr(build, "installed", lambda *_: tmp_path if there else None)
        monkeypatch.setattr(library, "_load", lambda name: None)

    monkeypatch.setattr(library, "simulated", lambda: False)
    return say


def names(problem: Problem, machine: Machine = H200) -> list[tuple[int, str]]:
    return [(limit, chosen.name) for limit, chosen in plans.plan(problem, machine, "auto").tiers]


@pytest.mark.parametrize("scheme", backend._FP8)
def test_auto_takes_it_for_many_rows(built, scheme):
    """16 rows an expert are 256 tokens of 64 experts and top-4."""
    built(True)
    run = not one_scale(scheme)  # the others were not run on hardware
    problem = LAYER.replace(scheme=scheme)
    assert names(problem) == ([(255, "triton"), (-1, "cutlass")] if run else [(-1, "triton")])
    batches = problem.replace(kind="batched_experts", top_k=0)
    assert names(batches) == [(-1, "triton")]


@pytest.mark.parametrize("scheme, rows", [("fp8_block", 24), ("", 64)])
def test_auto_takes_it_for_more_rows_of_blocks_and_of_plain_weights(built, scheme, rows):
    """deep_gemm, which comes before it, does not take 192 columns."""
    built(True)
    layer = LAYER.replace(scheme=scheme, hidden_size=192, dtype=torch.bfloat16)
    assert names(layer) == [(16 * rows - 1, "triton"), (-1, "cutlass")]
    parallel = layer.replace(mapped_experts=2 * layer.num_experts)
    assert names(parallel) == [(32 * rows - 1, "triton"), (-1, "cutlass")]


@pytest.mark.parametrize("size, rows", [(7168 * 2048, None), (4096 * 6400, 80), (1 << 25, 512)])
def test_auto_leaves_large_experts_to_deep_gemm(built, size, rows):
    """From so many rows on, where deep_gemm is installed; without it cutlass keeps them."""
    built(True)
    layer = dataclasses.replace(
        LAYER, scheme="fp8_block", hidden_size=4096, intermediate_size=size // 4096
    )
    layer = layer.replace(num_rows=2 * layer.intermediate_size)
    assert names(layer) == [(16 * 24 - 1, "triton"), (-1, "cutlass")]
    both = dataclasses.replace(H200, available=(*H200.available, "deep_gemm"))
    end = [(-1, "cutlass")] if rows is None else [(16 * rows - 1, "cutlass"), (-1, "deep_gemm")]
    assert names(layer, both) == [(16 * 24 - 1, "triton"), *end]


def test_auto_leaves_out_what_was_not_measured(built):
    """Natural int4 weights stay with triton. No other backend takes those that were prepared."""
    built(True)
    int4 = LAYER.replace(scheme="int4_w4a8")
    assert names(int4) == [(-1, "triton")]
    assert names(int4.replace(layout="cutlass_int4")) == [(-1, "cutlass")]


@pytest.mark.parametrize(
    "changes, capability, reason",
    [
        ({"hidden_size": 192}, (9, 0), "K to be a multiple of 128, got 192"),
        ({"intermediate_size": 64}, (9, 0), "I to be a multiple of 128, got 64"),
        ({"layout": ""}, (9, 0), "moe_ops.prepare.w13, 'cutlass'"),
        ({"has_bias": True}, (9, 0), "takes no bias"),
        ({"dtype": torch.float32}, (9, 0), "takes bfloat16 or float16 hidden_states"),
        ({"contiguous_weights": False}, (9, 0), "contiguous weights and scales"),
        ({}, (10, 0), "int4_w4a8 for compute capability 9.0, got 10.0"),
        ({"kind": "batched_experts", "top_k": 0}, (9, 0), ""),
        ({"mapped_experts": 512, "dtype": torch.float16}, (9, 0), ""),
    ],
)
def test_what_int4_needs(changes, capability, reason):
    int4 = {"scheme": "int4_w4a8", "layout": "cutlass_int4", **changes}
    machine = dataclasses.replace(H200, capability=capability)
    reasons = backend.supports(LAYER.replace(**int4), machine)
    assert len(reasons) == bool(reason)
    if reason:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(reasons[0])


def test_int4_tiles_by_rows_of_an_average_expert():
    chosen = [
        library.kernel_of("int4_w4a8", "sm_90a", torch.bfloat16, rows, 8).rsplit("_", 1)[1]
        for rows in (1, 160, 161, 384, 385, 1280, 1281, 10**6)
    ]
    tiles = ("256x32", "256x64", "256x128", "128x256")
    assert chosen == [tile for tile in tiles for _ in range(2)]


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


def test_under_expert_parallelism_more_tokens_are_asked_for(built):
    built(True)
    problem = LAYER.replace(mapped_experts=2 * LAYER.num_experts)
    assert names(problem) == [(511, "triton"), (-1, "cutlass")]
