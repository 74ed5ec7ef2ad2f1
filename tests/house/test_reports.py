"""Reports of backends: what benchmarks/experts.py says of those measured by name, and the tables
of docs/backends.md."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def report(folder, rows):
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
    text = report(tmp_path, rows)
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    header = ["shape", "scheme", "routing", "M", "floor", "triton", "deep_gemm", "auto"]
    assert [*header, "fastest", "auto/fastest"] in lines
    qwen3 = ["qwen3", "fp8_block", "uniform"]
    assert [*qwen3, "8", "10.0", "20.0", "60.0", "20.2", "triton", "1.01"] in lines
    assert [*qwen3, "4096", "10.0", "300", "150", "165", "deep_gemm", "1.10"] in lines
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {
        "experts_NVIDIA_H200_fp8_block_uniform.png",
        "experts_NVIDIA_H200_fp8_block_uniform_backends.png",
    }
    assert all(path.stat().st_size > 10_000 for path in tmp_path.glob("*.png"))


@pytest.mark.slow
def test_the_document_of_backends_is_up_to_date():
    answer = run("backends_doc.py")
    assert answer.returncode == 0, answer.stderr


def test_vllms_sort_is_checked_and_added(tmp_path, monkeypatch):
    """The sort's own check takes a right order only, and the report adds its time to that of
    vLLM's table."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cases
    import vllm_sort

    ids = torch.tensor([[2, 0], [1, 2], [0, 2]], dtype=torch.int32)
    pad = ids.numel()
    blocks = [[1, 4], [2], [0, 3, 5]]  # pairs of each expert
    good = torch.tensor([b + [pad] * (vllm_sort.BLOCK - len(b)) for b in blocks]).view(-1)
    total = torch.tensor([good.numel()])
    vllm_sort.check(total, good, ids)
    wrong = good.clone()
    wrong[[0, vllm_sort.BLOCK]] = wrong[[vllm_sort.BLOCK, 0]]  # two experts in a block
    with pytest.raises(RuntimeError, match="one expert"):
        vllm_sort.check(total, wrong, ids)
    with pytest.raises(RuntimeError, match="every pair once"):
        vllm_sort.check(total, good.clamp(max=4), ids)
    assert [vllm_sort.sorts(cases.SHAPES["qwen3"], M) for M in (1, 4, 5)] == [False, False, True]

    rows = [{"shape": "qwen3", "num_tokens": 8, "us": 5.0}]
    vllm_sort.path_of(tmp_path, "NVIDIA H200").write_text(json.dumps({"rows": rows}))
    assert vllm_sort.read(tmp_path, "NVIDIA H200") == {("qwen3", 8): 5.0}
    assert vllm_sort.read(tmp_path, "NVIDIA H100") == {}


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
