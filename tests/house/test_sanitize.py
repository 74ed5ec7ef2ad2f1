"""tools/sanitize_kernels.py without a GPU: which kernels its calls launch, and what it makes
of compute-sanitizer's words."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from moe_ops.backends.cutlass import library
from moe_ops.kernels.launch import INTERPRETED
from moe_ops.planning import bind
from moe_ops.planning import machine as machines
from tests.support import fake_cutlass
from tests.support.paths import BENCHMARKS, TOOLS


@pytest.fixture
def sanitize(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(TOOLS))
    import sanitize_kernels

    return sanitize_kernels


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="kernels are in plain torch here")
def test_calls_launch_every_kernel(sanitize, monkeypatch):
    """Those of SM90; with the sizes of tests, since the interpreter is slow."""

    def forget() -> None:
        machines._machine_facts_cached.cache_clear()
        bind.forget()

    with monkeypatch.context() as patch:
        fake_cutlass.install(patch)
        forget()
        patch.setattr(sanitize, "K", 128)
        patch.setattr(sanitize, "I", 128)
        patch.setattr(sanitize, "TOKENS", (1, 5))
        run = library.Gemms.run
        schemes = ("", "fp8_block", "fp8_channel", "fp8_tensor_static", "int4_w4a8")
        report = sanitize.run_calls("cpu", schemes)
        assert library.Gemms.run is run
        kernels = {
            library.kernel_of(scheme, "sm_90a", dtype, 1, sanitize.E)
            for scheme in ("fp8_channel", "int4_w4a8")
            for dtype in (torch.bfloat16, torch.float16)
        }
    forget()
    kernels |= {f"moe_ops_sm90_blocks_{name}" for name in ("activated", "x_wt")}
    kernels |= {f"moe_ops_sm90_product_{name}" for name in ("activated", "x_wt", "x_w", "outer")}
    assert kernels <= set(report.kernels) and not report.wrong
    assert "fp8_channel bfloat16 M=5" in report.calls
    assert "fp8_tensor_static float16 batches" in report.calls


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="kernels are in plain torch here")
def test_steps_launch_every_kernel_of_training(sanitize, monkeypatch):
    import sanitize_steps

    monkeypatch.setattr(sanitize_steps, "TOKENS", (1, 9))
    report = sanitize.Report(*sanitize_steps.run_steps("cpu", torch.float32))
    # one follows products of GPUs, the others are in Gluon, which has no interpreter
    missing = ("zero_empty", "wgmma_packed", "wgmma_registers")
    of_gpus = {f"moe_ops_train_{name} is never launched" for name in missing}
    assert set(report.wrong) <= of_gpus
    assert len(report.calls) == 2 * len(sanitize_steps.STEPS)
    assert len(sanitize_steps.training_kernels() - set(report.kernels)) == len(report.wrong)
    assert "int4_w4a16:g32 rank 16 M=9" in report.calls
    with monkeypatch.context() as patch:  # one whose gradients are wrong, and that launches less
        patch.setattr(sanitize_steps, "STEPS", sanitize_steps.STEPS[:1])
        patch.setattr(sanitize_steps, "MAX_ERROR", 0.0)
        _, _, wrong = sanitize_steps.run_steps("cpu", torch.float32)
    assert any("relative error" in line for line in wrong)
    assert "moe_ops_train_widen is never launched" in wrong


def test_calls_with_experts_in_host_memory(sanitize, monkeypatch):
    import sanitize_residency

    monkeypatch.setattr(sanitize_residency, "SCHEMES", ("", "int4_w4a16:g32:zp"))
    report = sanitize.Report(*sanitize_residency.run_residency("cpu"))
    assert len(report.calls) == 2 * len(sanitize_residency.CALLS)
    assert report.wrong == [  # kernels of GPUs
        f"{name} is never launched" for name in sorted(sanitize_residency.KERNELS)
    ]
    monkeypatch.setattr(sanitize_residency, "_layer", lambda *args: torch.randn(2))
    report = sanitize.Report(*sanitize_residency.run_residency("cpu"))
    assert "plain M=40 prompt: other bits than with all experts on the device" in report.wrong


def test_kernels_are_read_from_an_object(sanitize, tmp_path):
    path = tmp_path / "object.so"
    names = b"\0moe_ops_sm90_fp8_bf16_run\0moe_ops_sm90_fp8_f16_run\0moe_ops_cutlass_abi\0"
    path.write_bytes(b"\x7fELF" + names + b"moe_ops_sm90_fp8_f16_workspace\0")
    assert sanitize.kernels_of(path) == ["moe_ops_sm90_fp8_bf16", "moe_ops_sm90_fp8_f16"]


RAN = {"calls": ["a call"], "kernels": ["one"], "wrong": []}


@pytest.mark.parametrize(
    "said, code, seconds, found, clean",
    [
        ("========= ERROR SUMMARY: 0 errors", 0, 0, 0, True),
        ("========= ERROR SUMMARY: 1 error", 9, 0, 1, False),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, 0, 0, True),
        (
            "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)",
            9,
            0,
            2,
            False,
        ),
        ("========= Error: Device not supported", 0, 0, None, False),
        ("", 0, 60, None, False),
    ],
    ids=["clean", "error", "clean races", "races", "no summary", "too long"],
)
def test_what_a_tool_says(sanitize, tmp_path, said, code, seconds, found, clean):
    tool = tmp_path / "compute-sanitizer"
    lines = [sanitize.MARK + json.dumps(RAN), said]
    text = f"import sys, time\ntime.sleep({seconds})\nprint({chr(10).join(lines)!r})\n"
    tool.write_text(f"#!{sys.executable}\n{text}sys.exit({code})\n")
    tool.chmod(0o755)
    result = sanitize.run_tool([str(tool)], timeout=1 if seconds else 60)
    assert result["found"] == found and sanitize.clean(result) == clean
    assert result["exit"] == (124 if seconds else code)
    assert ("said" in result) == bool(code or seconds)


def test_a_run_without_launches_is_not_clean(sanitize):
    result = {"exit": 0, "found": 0, "seconds": 1.0, **RAN}
    assert sanitize.clean(result)
    assert not sanitize.clean(result | {"kernels": []})
    assert not sanitize.clean(result | {"wrong": ["two is never launched"]})


def test_where_compute_sanitizer_is(sanitize, tmp_path, monkeypatch):
    monkeypatch.delenv("COMPUTE_SANITIZER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    with pytest.raises(FileNotFoundError, match="nvidia-cuda-sanitizer-api"):
        sanitize.compute_sanitizer()
    brought = tmp_path / "site" / "nvidia" / "cu13" / "bin" / "compute-sanitizer"
    brought.parent.mkdir(parents=True)
    brought.touch()
    assert sanitize.compute_sanitizer() == str(brought)
    monkeypatch.setenv("COMPUTE_SANITIZER", "another")
    assert sanitize.compute_sanitizer() == "another"
