"""benchmarks/report.py and the scripts beside it: tables and pictures of results, and documents
that are up to date."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moe_ops
from tests.house.test_imports import imports_at_load
from tests.support.paths import BENCHMARKS


def row(tokens, implementation, us, scheme="fp8_block"):
    case = {"shape": "qwen3", "scheme": scheme, "num_tokens": tokens, "routing": "uniform"}
    times = {"us": {"median": us, "min": us, "p25": us}, "error": 1e-3}
    return {"case": case, "implementation": implementation, "run": "r", "floor_us": 10.0} | times


def run(script, *arguments):
    """A benchmark's process, without Triton's interpreter, which takes calls that a CPU does
    not."""
    paths = [str(Path(moe_ops.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def reported(folder, rows):
    machine = {"gpu": "NVIDIA H200", "torch": "2", "processor": ""}
    runs = {"r": {"date": "2026-01-01T00:00:00Z", "machine": machine}}
    path = folder / "experts_NVIDIA_H200.json"
    path.write_text(json.dumps({"runs": runs, "rows": rows}))
    answer = run("experts.py", "--report", "--results", str(folder))
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.mark.slow
def test_backends_are_compared_with_auto(tmp_path):
    pytest.importorskip("matplotlib")
    times = {"moe_ops triton": (20, 300), "moe_ops deep_gemm": (60, 150), "moe_ops": (20.2, 165)}
    rows = [row(M, name, us[i]) for name, us in times.items() for i, M in enumerate((8, 4096))]
    rows.append(row(8, "moe_ops triton", 31.0, scheme=""))  # alone: nothing to compare
    text = reported(tmp_path, rows)
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert lines[0][-3:] == ["fastest", "auto/fastest", "of floor"]
    ends = {tuple(line[:4]): line[-3:] for line in lines}
    assert ends["qwen3", "fp8_block", "uniform", "8"] == ["triton", "1.01", "50%"]
    assert ends["qwen3", "fp8_block", "uniform", "4096"] == ["deep_gemm", "1.10", "6%"]
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {
        "experts_NVIDIA_H200_fp8_block_uniform.png",
        "experts_NVIDIA_H200_fp8_block_uniform_backends.png",
    }
    assert all(path.stat().st_size > 10_000 for path in tmp_path.glob("*.png"))


@pytest.mark.slow
def test_documents_are_up_to_date():
    answer = run("report.py")
    assert answer.returncode == 0, answer.stderr


def test_scripts_tell_their_options_without_libraries():
    """Libraries that are compared are imported by what needs them, after the options are read."""
    for path in sorted(BENCHMARKS.glob("*.py")):
        early = {name.split(".")[0] for name in imports_at_load(path)}
        assert not early & {"deep_gemm", "flashinfer", "vllm", "transformers"}, path


@pytest.mark.slow
def test_results_are_written_when_asked(tmp_path):
    """On a CPU, where anybody runs them; those of a GPU are for recording."""
    results = {path: path.stat().st_mtime_ns for path in (BENCHMARKS / "results").iterdir()}
    answer = run("host_overhead.py", "--device", "cpu", "--rounds", "3")
    assert answer.returncode == 0, answer.stderr
    assert "total us" in answer.stdout
    arguments = ("--tokens", "1", "--dtypes", "fp32", "--only", "moe_ops", "--seconds", "0.1")
    arguments += ("--threads", "1")
    answer = run("cpu_layer.py", *arguments)
    assert answer.returncode == 0, answer.stderr
    for path, time in results.items():
        assert path.stat().st_mtime_ns == time, path


def test_tables_of_layers_are_made_of_results(tmp_path, monkeypatch):
    """Fastest in bold, shapes named once, and `auto` over the fastest peer."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report

    path = tmp_path / "experts_NVIDIA_H200.json"
    path.write_text(json.dumps({"runs": {}, "rows": [row(8, "moe_ops", 5.0)]}))
    assert report.whole_layers(path) is None
    assert report.eight_bits(path) == "No results are committed yet."
    rows = [
        row(M, name, us, scheme="fp8_channel")
        for M in (64, 8)
        for name, us in {"moe_ops": 90.0, "moe_ops cutlass": 101.2, "vLLM CUTLASS": 120.0}.items()
    ]
    rows.append(row(64, "F.scaled_grouped_mm", 99.96, scheme="fp8_channel"))
    rows.append(row(64, "FlashInfer CUTLASS", 1.0) | {"reason": "no", "us": None})
    del rows[-1]["us"]
    path.write_text(json.dumps({"runs": {}, "rows": rows}))
    table = report.whole_layers(path).splitlines()
    assert table[0] == "fp8_channel:"
    assert table[2:] == [
        "|  | M | floor | `auto` | `cutlass` | vLLM | torch |",
        "|---|---|---|---|---|---|---|",
        "| Qwen3 | 8 | 10.0 | **90.0** | 101 | 120 | - |",
        "|  | 64 | 10.0 | **90.0** | 101 | 120 | 100.0 |",
    ]
    (tmp_path / "experts_NVIDIA_H200_fp8_channel_uniform.png").touch()
    assert report.eight_bits(path).splitlines() == [
        "| scheme | | M = 8 | M = 64 |",
        "|---|---|---|---|",
        "| fp8_channel | Qwen3 | 0.75 vLLM | 0.90 torch |",
        "",
        "![One expert layer in fp8_channel on an H200]"
        "(../benchmarks/results/experts_NVIDIA_H200_fp8_channel_uniform.png)",
    ]
    both = {"moe_ops": 90.0, "moe_ops triton": 60.0, "vLLM CUTLASS": 120.0}
    rows = [row(8, name, us, scheme="int4_w4a8") for name, us in both.items()]
    path.write_text(json.dumps({"runs": {}, "rows": rows}))
    assert report.eight_bits(path).splitlines()[2:4] == [
        "| int4_w4a8 | Qwen3 | 0.50 vLLM |",
        "| int4_w4a8, prepared for `cutlass` | Qwen3 | 0.75 vLLM |",
    ]
    rows = [
        row(8, name, us, scheme="mxfp4_w4a16")
        for name, us in (("moe_ops", 20.0), ("Marlin", 25.0))
    ]
    rows.append(row(64, "moe_ops", 30.0, scheme="mxfp4_w4a16"))  # without a peer
    path.write_text(json.dumps({"runs": {}, "rows": rows}))
    assert report.weight_only(path).splitlines() == [
        "| scheme | | M = 8 |",
        "|---|---|---|",
        "| mxfp4_w4a16 | Qwen3 | 20.0, 50 %, 0.80 Marlin |",
    ]


def test_cells_that_were_measured_are_left_out(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import experts
    import report

    arguments = experts.parse(
        ["--missing", "--shapes", "qwen3", "--schemes", "fp8_channel", "--tokens", "1", "8", "64"]
        + ["--only", "moe_ops", "vLLM CUTLASS", "HF grouped_mm"]
    )
    results = report.open_results(tmp_path / "experts_x.json")
    results.runs = {"old": {"moe_ops_sources": "a"}, "r": {"moe_ops_sources": "b"}}
    for M, run, names in (
        (1, "r", ["moe_ops"]),
        (8, "r", ["moe_ops", "vLLM CUTLASS"]),  # the third has no such scheme
        (64, "old", ["moe_ops", "vLLM CUTLASS"]),
    ):
        for name in names:
            results.add(row(M, name, 1.0, scheme="fp8_channel") | {"run": run})
    assert [case.num_tokens for case in experts.cases_of(arguments, results, "r")] == [1, 64]
    arguments.missing = False
    assert len(experts.cases_of(arguments, results, "r")) == 3


@pytest.mark.slow
def test_batch_invariance_is_fuzzed_and_timed():
    """On a CPU by its own kernels, and without the probe, which forces those of a GPU."""
    answer = run("batch_invariant.py", "--dry-run", "--parts", "fuzz", "cost")
    assert answer.returncode == 0, answer.stderr
    rows = [line.split() for line in answer.stdout.splitlines() if line.strip().startswith("tiny")]
    assert len(rows) == 6
    assert [row[-1] for row in rows[:2]] == ["[]", "[]"], "no batch differs"
    assert all(float(row[-1]) > 0 for row in rows[2:])


@pytest.mark.slow
def test_steps_over_nf4_are_timed():
    """On a CPU in plain torch, whose gradients are compared with fp64; other libraries are left
    out by name.
    """
    answer = run("qlora_nf4.py", "--dry-run")
    assert answer.returncode == 0, answer.stderr
    rows = [line.split() for line in answer.stdout.splitlines()]
    times = [float(row[1]) for row in rows if len(row) == 6 and row[0] in ("bf16", "nf4")]
    assert len(times) == 4 and min(times) > 0
    assert "no archive with bitsandbytes/" in answer.stdout
