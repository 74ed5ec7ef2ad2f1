"""Devices that are no CPU and no NVIDIA GPU: what they are taken for, and what runs there."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_ops import backends, environment, info
from moe_ops.activations import Activation
from moe_ops.backends.triton.backend import WITH_KERNELS
from moe_ops.kernels import launch
from moe_ops.kernels.mixed_gemm import configs
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans
from moe_ops.schemes import SCHEMES
from tests.support.paths import ROOT

LAYER = Problem(
    "experts", 8, 256, 128, 256, 2, torch.bfloat16, options=Options(Activation("silu"))
)
MI300X = Machine("cuda", gfx="gfx942", gpu_name="AMD Instinct MI300X")
MI300X = replace(MI300X, available=backends.list_backends(), triton="3.9.0")
PLAIN = ("", "fp8_block", "fp8_block:ue8m0", "fp8_channel", "fp8_channel_tensor", "fp8_tensor")
PLAIN += ("int8_w8a8", "int8_w8a8_tensor")


@pytest.fixture
def amd(monkeypatch):
    """A build of torch for ROCm with a GPU of compute capability "9.4"."""
    properties = SimpleNamespace(
        major=9,
        minor=4,
        name="AMD Instinct MI300X",
        gcnArchName="gfx942:sramecc+:xnack-",
        shared_memory_per_block=65536,
        multi_processor_count=304,
        total_memory=192 << 30,
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    caches = (environment.capability, launch.gpu, configs.on_sm90)

    def forget():
        machines.forget()
        for cache in caches:
            cache.cache_clear()

    forget()
    yield
    monkeypatch.undo()
    forget()


def test_an_amd_gpu_is_not_taken_for_sm94(amd, monkeypatch):
    found = machines.machine(torch.device("cuda", 0))
    assert (found.capability, found.gfx) == ((0, 0), "gfx942")
    assert found.architecture == "gfx942"
    gpu = launch.gpu(0)
    assert (gpu.native, gpu.pdl, gpu.shared_memory) == (False, False, 65536)
    monkeypatch.setattr(configs, "INTERPRETED", False)
    assert not configs.on_sm90(0)
    text = info.format_facts(info.facts())
    assert "GPU 0: AMD Instinct MI300X, gfx942, 192 GiB" in text and "ROCm 7.0" in text
    assert "nothing of this package was tested on a GPU of gfx942" in text
    assert "SM94" not in text


def test_plans_for_an_amd_gpu():
    """The plain Triton kernels; kernels with PTX and libraries for NVIDIA GPUs say why not."""
    for scheme in SCHEMES:
        plan = plans.plan(replace(LAYER, scheme=scheme), MI300X)
        refused = dict(plan.refused)
        plain = scheme.removesuffix("_static") in PLAIN
        assert [b.name for _, b in plan.tiers] == (["triton"] if plain else ["torch"]), scheme
        if not plain:
            why = "hold PTX, which needs" if scheme in WITH_KERNELS else "has no kernels for"
            assert why in refused["triton"][0]
        assert "SM94" not in str(plan) and "got SM" not in str(plan)
        assert "nothing of this package was tested" in str(plan)
    for name in ("deep_gemm", "flashinfer"):
        reasons = plans.why_not(backends.named(name), replace(LAYER, scheme="fp8_block"), MI300X)
        assert f"{name} needs an NVIDIA GPU, got gfx942" in reasons
    plan = plans.plan(LAYER, replace(MI300X, gfx="gfx1100"))
    assert plan.backend == "torch"
    assert "compiled for gfx942 of AMD's GPUs, got gfx1100" in dict(plan.refused)["triton"][0]


@pytest.mark.parametrize("device", ["xpu", "mps", "hpu", "npu"])
def test_plans_for_other_devices(device):
    machine = Machine(device, available=backends.list_backends())
    plan = plans.plan(LAYER, machine)
    assert plan.backend == "torch" and f"was tested on {device}" in str(plan)
    assert "triton needs a CUDA device" in dict(plan.refused)["triton"][0]


def test_what_mps_lacks():
    machine = Machine("mps", available=backends.list_backends())
    for scheme in ("int8_w8a8", "int4_w4a16:g32", "int8_w8a16:channel"):
        assert plans.plan(replace(LAYER, scheme=scheme), machine).backend == "torch"
    for problem, lacking in (
        (replace(LAYER, scheme="fp8_block"), "float8"),
        (replace(LAYER, scheme="nvfp4"), "float8"),
        (replace(LAYER, dtype=torch.float64), "float64"),
    ):
        with pytest.raises(ValueError, match=f"on mps, where torch has no {lacking}"):
            plans.plan(problem, machine, "torch")


@pytest.mark.slow  # a process that has the device cannot be without it again
def test_values_on_a_device_that_is_neither_cpu_nor_cuda():
    script = "from tests.support.third_device import *; print(json.dumps(differences()))"
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=os.environ
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    # int4: a kernel of the CPU's own, which rounds h to bf16
    limits = {"torch.bfloat16": 2e-2, "torch.float16": 2e-3, "int4_w4a16:g32": 5e-3}
    assert len(found) == 10
    for name, error in found.items():
        assert error <= limits.get(name, 1e-6), name
