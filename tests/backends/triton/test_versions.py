"""What the backend says of kernels that the installed Triton cannot compile."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

import moe_ops
from moe_ops import environment
from moe_ops.backends.triton import backend
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem
from moe_ops.planning.plan import plan
from tests.support.paths import ROOT

HOPPER = Machine("cuda", (9, 0), "NVIDIA H200", ("triton",))
BLACKWELL = dataclasses.replace(HOPPER, capability=(10, 0), gpu_name="NVIDIA B200")


def problem(scheme: str, **changes) -> Problem:
    act = moe_ops.Activation("silu")
    sizes = ("experts", 4, 256, 128, 256, 2, torch.bfloat16, scheme, "", Options(act))
    return Problem(*sizes).replace(**changes)


@pytest.mark.parametrize(
    "installed, reason",
    [
        ("3.6.0", None),
        ("3.9.1+git1234", None),
        ("3.5.1", "need Triton 3.6 to 3.9, got 3.5.1"),
        ("3.10.0", "need Triton 3.6 to 3.9, got 3.10.0"),
        ("", "need Triton 3.6 to 3.9, which is not installed"),
    ],
)
def test_versions_that_compile_gluon(installed, reason):
    found = environment.why_no_gluon(installed)
    assert (found is None) == (reason is None) and (reason or "") in (found or "")


def under(version: str, machine: Machine = HOPPER) -> Machine:
    return dataclasses.replace(machine, triton=version)


@pytest.mark.parametrize("scheme", ["int4_w4a16:g128", "mxfp4_w4a16", "fp8_w8a16:block"])
def test_explain_names_kernels_left_out(scheme, monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", False)
    text = str(plan(problem(scheme), under("3.10.0")))
    assert "need Triton 3.6 to 3.9, got 3.10.0" in text


def test_explain_is_silent_where_no_kernel_is_left_out():
    new = under("3.10.0")
    for scheme, machine in (
        ("mxfp4_w4a16", under("3.6.0")),
        ("", new),
        ("fp8_block", new),
        ("mxfp4_w4a8", new),
        ("mxfp6_e3m2_w6a16", new),
        ("mxfp4_w4a16", dataclasses.replace(new, capability=(8, 0))),
    ):
        assert backend.missing_kernels(problem(scheme), machine) == []


@pytest.mark.parametrize("scheme", ["fp8_tensor", "nvfp4"])
def test_compiler_that_fails_for_sm100(scheme, monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", False)
    old = under("3.7.1", BLACKWELL)
    (reason,) = backend.supports(problem(scheme), old)
    assert "cannot compile" in reason and "Triton 3.8 or later can" in reason
    assert not backend.supports(problem(scheme), under("3.7.1"))
    assert not backend.supports(problem(scheme, kind="grouped_linear", activation=None), old)
    assert not backend.supports(problem(scheme), under("3.8.0", BLACKWELL))


@pytest.mark.parametrize("version, release", [
    ("3.6.0", (3, 6)),
    ("3.6.0+git1a2b3c4d", (3, 6)),
    ("3.10rc1", (3, 10)),
    ("4", (4, 0)),
    ("4rc1", (4, 0)),
    ("", (0, 0)),
    ("unknown", (0, 0)),
])  # fmt: skip
def test_releases_of_versions(version, release):
    assert environment.release(version) == release


@pytest.mark.parametrize("version", ["", "unknown", "4", "3.10rc1"])
def test_nothing_is_too_old_where_the_version_is_unknown_or_newer(version, monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", False)
    assert not backend.supports(problem("nvfp4"), under(version, BLACKWELL))


@pytest.mark.slow
def test_triton_of_nightly_builds_is_found():
    """pip knows it by another name there."""
    code = (
        "import importlib.metadata as m, torch\n"  # torch asks for versions of its own
        "found, m.version = m.version, lambda name: {'pytorch-triton': '3.7.0+git1'}.get(name)\n"
        "from moe_ops import environment\n"
        "assert environment.TRITON == '3.7.0+git1'\n"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
