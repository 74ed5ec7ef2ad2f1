"""`--check`: what is chosen beside the best of a search, on the interpreter at tiny sizes."""

import itertools
import json
import sys

import pytest
import torch

from moe_ops.tuning import __main__ as command
from moe_ops.tuning import compare, search
from tests.support.paths import BENCHMARKS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="no interpreter with a GPU")
SHAPE = ("--shape", "4", "64", "32", "2")


class Graph:
    """Replays the call."""

    def __init__(self, layer):
        self.layer = layer


@pytest.fixture
def check(monkeypatch, tmp_path):
    """`python -m moe_ops.tuning --check` with a clock of its own; returns the rows of results."""
    clock = itertools.count()  # each timing is shorter than the one before
    monkeypatch.setattr(search, "_DEVICE", "cpu")
    monkeypatch.setattr(search, "captured", Graph)
    monkeypatch.setattr(search, "compile_all", lambda *_: None)
    monkeypatch.setattr(
        search,
        "replay_us",
        lambda graphs, seconds=0.0: [1e4 * 0.99 ** next(clock) for _ in graphs],
    )
    for name, value in {
        "is_available": True,
        "current_device": -1,
        "get_device_name": "Test GPU",
        "empty_cache": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    path = tmp_path / "results.json"

    def run(*arguments):
        given = ["tuning", *SHAPE, "--check", "--results", str(path), "--most", "1", *arguments]
        monkeypatch.setattr(sys, "argv", given)
        command.main()
        return json.loads(path.read_text())["rows"] if path.exists() else []

    return run


@pytest.mark.slow
def test_the_best_is_replayed_beside_what_is_chosen(check, capsys):
    row, other = check("--m", "9", "12")
    assert (row["num_experts"], row["num_tokens"], row["scheme"]) == (4, 9, "")
    assert row["timed"] >= 2 and row["best_us"] < row["chosen_us"]
    assert row["best"] != row["chosen"] and other["num_tokens"] == 12
    assert "heuristic over best: geometric mean 1." in capsys.readouterr().out
    assert check("--m", "9", "12") == [row, other] and "best" not in capsys.readouterr().out


def test_what_there_is_no_time_for_is_said(check, monkeypatch, capsys):
    monkeypatch.setattr(compare, "compare", lambda *_: pytest.fail("compared"))
    assert not check("--m", "5", "6", "--limit", "-1")
    assert "not measured within --limit: Target(num_experts=4" in capsys.readouterr().out


def test_a_cell_that_fails_is_told_and_others_go_on(check, monkeypatch, capsys):
    real = compare.compare

    def fails_once(bench, m, *rest):
        if m == 9:
            raise RuntimeError("out of memory")
        return real(bench, m, *rest)

    monkeypatch.setattr(compare, "compare", fails_once)
    with pytest.raises(SystemExit, match="failed: .* M=9$"):
        check("--m", "9", "10")
    assert "M=9: failed: RuntimeError: out of memory" in capsys.readouterr().out


def test_untuned_shapes_lose_little():
    """Those of benchmarks/results/untuned_<GPU>.json."""
    paths = list((BENCHMARKS / "results").glob("untuned_*.json"))
    if not paths:
        pytest.skip("none was measured yet")
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            assert row["chosen_us"] <= 1.03 * row["best_us"], row
