"""What the backend says of kernels that the installed Triton cannot compile."""

import dataclasses

import pytest
import torch

import moe_ops
from moe_ops import environment
from moe_ops.backends.triton import backend
from moe_ops.ops.problem import Machine, Problem
from moe_ops.planning.plan import plan

HOPPER = Machine("cuda", (9, 0), "NVIDIA H200", ("triton",))
BLACKWELL = dataclasses.replace(HOPPER, capability=(10, 0), gpu_name="NVIDIA B200")


def problem(scheme: str, **changes) -> Problem:
    act = moe_ops.Activation("silu")
    sizes = ("experts", 4, 256, 128, 256, 2, torch.bfloat16, scheme, "", act)
    return dataclasses.replace(Problem(*sizes), **changes)


@pytest.mark.parametrize(
    "installed, reason",
    [
        ("3.6.0", None),
        ("3.9.1+git1234", None),
        ("3.5.1", "need Triton 3.6 to 3.9, got 3.5.1"),
        ("3.10.0", "need Triton 3.6 to 3.9, got 3.10.0"),
        (None, "need Triton 3.6 to 3.9, which is not installed"),
    ],
)
def test_versions_that_compile_gluon(installed, reason):
    found = environment.why_no_gluon(installed)
    assert (found is None) == (reason is None) and (reason or "") in (found or "")


@pytest.mark.parametrize("scheme", ["int4_w4a16:g128", "mxfp4_w4a16", "fp8_w8a16:block"])
def test_explain_names_kernels_left_out(scheme, monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(backend, "_WHY_NO_GLUON", environment.why_no_gluon("3.10.0"))
    text = str(plan(problem(scheme), HOPPER))
    assert "need Triton 3.6 to 3.9, got 3.10.0" in text


def test_explain_is_silent_where_no_kernel_is_left_out(monkeypatch):
    why = environment.why_no_gluon("3.10.0")
    for installed, scheme, machine in (
        (None, "mxfp4_w4a16", HOPPER),
        (why, "", HOPPER),
        (why, "fp8_block", HOPPER),
        (why, "mxfp4_w4a8", HOPPER),
        (why, "mxfp6_e3m2_w6a16", HOPPER),
        (why, "mxfp4_w4a16", dataclasses.replace(HOPPER, capability=(8, 0))),
    ):
        monkeypatch.setattr(backend, "_WHY_NO_GLUON", installed)
        assert backend.notes(problem(scheme), machine) == []


@pytest.mark.parametrize("scheme", ["fp8_tensor", "nvfp4"])
def test_compiler_that_fails_for_sm100(scheme, monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(backend, "_NO_MAXIMUM_ON_SM100", True)
    (reason,) = backend.supports(problem(scheme), BLACKWELL)
    assert "cannot compile" in reason and "Triton 3.8 or later can" in reason
    assert not backend.supports(problem(scheme), HOPPER)
    assert not backend.supports(problem(scheme, kind="grouped_linear", activation=None), BLACKWELL)
    monkeypatch.setattr(backend, "_NO_MAXIMUM_ON_SM100", False)
    assert not backend.supports(problem(scheme), BLACKWELL)
