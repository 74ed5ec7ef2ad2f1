"""Tables of report.py whose results may not be committed yet."""

import json

import pytest

from tests.support.paths import BENCHMARKS

RUN = {
    "machine": {"gpu": "NVIDIA H200", "torch": "2.11"},
    "versions": {"triton": "3.6", "transformers": "5.17"},
}
ABSENT = "No results are committed yet."


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report

    return report


def test_mixed_adapters(report, tmp_path):
    path = tmp_path / "adapters.json"
    assert report.mixed_adapters(path) == ABSENT
    row = {"shape": "qwen3", "scheme": "", "M": 8, "adapters": 8, "rank": 16, "plain_us": 100.0}
    row |= {"adapted_us": 120.0, "copy_us": 10.0}
    rows = [row | {"peer_us": 50.0}, row | {"peer_us": None}]
    path.write_text(json.dumps({"run": RUN, "rows": rows}))
    text = report.mixed_adapters(path).splitlines()
    assert "8 adapters of rank 16" in text[0]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")][1:] for line in text[-2:]]
    assert cells == [["8", "100", "120", "135", "150"], ["8", "100", "120", "135", "-"]]


def test_steps_over_nf4(report, tmp_path):
    path = tmp_path / "qlora.json"
    assert report.steps_over_nf4(path) == ABSENT
    timed = {"step_ms": 2.5, "over_bf16": 1.25, "peak_mb": 800.0, "error": 3e-3}
    rows = [
        {"implementation": "nf4", "trains": "frozen", **timed},
        {"implementation": "peer", "trains": "lora", "reason": "it failed"},
    ]
    path.write_text(json.dumps({"run": RUN, "tokens": 8192, "rows": rows}))
    text = report.steps_over_nf4(path)
    assert "8192 tokens, an NVIDIA H200, torch 2.11" in text
    assert "1.25 | 800" in text and "3.0e-03" in text and "it failed" in text
