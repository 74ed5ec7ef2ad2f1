"""benchmarks/compilers.py, which counts compilers, and the table of benchmarks/cold_start.py."""

import json
import os
import subprocess

import pytest

from tests.support.paths import BENCHMARKS


@pytest.fixture
def compilers(monkeypatch, tmp_path):
    """Wrappers around a g++ and an nvcc that say what they were told."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import compilers

    (tmp_path / "real").mkdir()
    for name in ("g++", "nvcc"):
        (tmp_path / "real" / name).write_text('#!/bin/sh\necho "real $*"\nexit 3\n')
        (tmp_path / "real" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'real'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return compilers.Compilers(tmp_path / "wrappers")


def test_what_compiles_is_counted_and_still_runs(compilers):
    environment = os.environ | compilers.environment
    for command in (["g++", "--version"], ["g++", "-v"], ["nvcc", "-V"], ["g++", "-dumpversion"]):
        subprocess.run(command, env=environment, capture_output=True)
    assert compilers.counts() == {}
    for command in (["g++", "a b.cpp", "-o", "a"], ["nvcc", "-c", "a.cu"], ["g++", "-E", "h.hpp"]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 3 and done.stdout == f"real {' '.join(command[1:])}\n"
    assert compilers.counts() == {"g++": 2, "nvcc": 1}
    compilers.forget()
    assert compilers.calls() == []


def test_the_table_has_the_fastest_round_of_each_case(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report

    def row(case, seconds, refused="", **compilers):
        stages = {"imports": seconds / 4, "decode": seconds / 2}
        found = {"case": case, "seconds": seconds, "stages": stages, "refused": refused}
        return found | {"compilers": compilers, "compiled_by_triton": len(compilers)}

    rows = [
        row("nothing cached", 60.0, nvcc=1, gcc=2),
        *(row("bundle", 32.0), row("bundle", 30.0), row("bundle", 20.0, refused="made elsewhere")),
    ]
    run = {
        "machine": {"gpu": "NVIDIA H200", "torch": "2.13"},
        "versions": {"triton": "3.7", "transformers": "5.24"},
    }
    path = tmp_path / "cold_start.json"
    assert report.cold_start(path) == "No results are committed yet."
    path.write_text(json.dumps({"run": run, "layers": 8, "bundle_bytes": 2**22, "rows": rows}))
    text = report.cold_start(path).splitlines()
    assert "NVIDIA H200" in text[0] and "8 layers" in text[0] and "4.0 MiB" in text[0]
    cells = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in text[2:]
    }
    assert cells["imports"] == ["15.0", "7.5"]
    assert cells["in all"] == ["60.0", "30.0"]
    assert cells["compilers that ran"] == ["3", "0"]
    second = {"rows": [row("bundle", 40.0)], "made_by": {"rows": rows[:2]}}
    path.with_name("cold_start_elsewhere.json").write_text(json.dumps(second))
    text = report.cold_start(path)
    assert "| in all | 60.0 | 30.0 | 40.0 |" in text and "bundle, second machine" in text
    assert "the second one took: nothing cached 60.0 s, bundle 32.0 s." in text
