"""benchmarks/residency.py and links.py on a CPU."""

import json

import pytest
import torch

from tests.house.test_reports import run
from tests.support.paths import BENCHMARKS


@pytest.fixture
def links(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import links

    return links


def test_times_between_two_sizes_lie_on_a_line(links):
    link = links.Link([links.Call(400, 8.0, 10.0), links.Call(100, 2.0, 4.0)])
    times = [link.kernel_us(size) for size in (0, 1, 100, 200, 400, 1000)]
    assert times == [0.0, 4.0, 4.0, 6.0, 10.0, 25.0]
    assert link.copy_gb_s == pytest.approx(0.05)


@pytest.mark.parametrize("words", [1, 4096, 10_001])
def test_the_kernel_reads_all(links, monkeypatch, words):
    monkeypatch.setattr(links, "PROGRAMS", 2)
    source = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32)
    target = torch.zeros(words + 1, dtype=torch.int32)
    links.read(source, target[:words])
    assert torch.equal(target[:words], source) and target[words] == 0


def row(part, **fields):
    case = {"shape": "qwen3", "scheme": "", "num_tokens": 1, "trace": "local", "share": 0.4}
    return case | {"part": part, "implementation": "moe_ops", "layers": 8, "run": "r"} | fields


def test_tables_are_made_of_results(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report

    path = tmp_path / "residency_NVIDIA_H200.json"
    assert "No results" in report.residency(path) and "No results" in report.residency_parts(path)
    cell = {
        "us": 1200.0,
        "bound_us": 1100.0,
        "ratio": 1.09,
        "of_resident": 0.15,
        "hit_rate": 0.913,
    }
    rows = [
        row("link", shape="", share=0, implementation="", num_tokens=0, calls=[]),
        row("decode", **cell),
        row("decode", trace="uniform", **cell),
        row("decode", share=1.0, **cell),
        row("decode", implementation="FreeToken", us=3000.0),
        row("decode", implementation="FreeToken", num_tokens=8, us=3000.0),  # beside nothing
        row("decode", implementation="accelerate cpu_offload", reason="not there"),
        row("misses", trace="0 missing", gb_s=None, copy_gb_s=55.0),
        row("misses", trace="1 missing", gb_s=44.0, copy_gb_s=55.0),
        row("overhead", share=0.99, extra_us=3.21, over_resident=1.02),
        row("prompt", num_tokens=4096, ratio=1.04),
    ]
    path.write_text(json.dumps({"runs": {"r": {"moe_ops_sources": "x"}}, "rows": rows}))
    assert report.residency(path).splitlines() == [
        "|  | on the GPU | batch 1 |",
        "|---|---|---|",
        "| Qwen3-30B-A3B bf16 | 40 % | 91 %, 1.09, 0.15 |",
        "",
        "| times as long | on the GPU | batch 1 |",
        "|---|---|---|",
        "| FreeToken | 40 % | 2.50 |",
    ]
    assert report.residency_parts(path).splitlines()[2:] == [
        "| Qwen3-30B-A3B bf16 | 44.0, 80 % | 1.04 | 3.2, 1.02 |"
    ]
    results = report.open_results(path)
    results.write()
    assert len(report.open_results(path).rows) == len(rows)
    of = {"shape": "qwen3", "layers": 8, "num_tokens": 8}
    assert report.tokens_a_second(of, 1e6) == pytest.approx(8 / 6)  # of 48 layers


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path):
    pytest.importorskip("matplotlib")
    answer = run("residency.py", "--dry-run")
    assert answer.returncode == 0, answer.stderr
    for part in ("decode", "misses", "overhead", "prompt", "host"):
        assert f"\n{part}\n" in answer.stdout
    lines = [line.split() for line in answer.stdout.splitlines() if " local " in line]
    cells = [line for line in lines if line[-1] in ("True", "False")]
    assert len(cells) == 15 and all(line[-1] == "True" for line in cells), "bits differ"
