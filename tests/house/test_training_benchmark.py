"""benchmarks/training.py on a CPU: gradients of layers with biases against its fp64 reference,
what --missing leaves out, and the table of documents."""

import argparse
import json

import pytest
import torch

from moe_ops.bench.shapes import Shape
from tests.support.paths import BENCHMARKS


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import training

    for name in ("qwen3", "gptoss20"):
        monkeypatch.setitem(training.SHAPES, name, Shape(6, 2, 64, 32))
    return training


@pytest.mark.parametrize("shape, trains", [("qwen3", "lora"), ("gptoss20", "full")])
def test_gradients_are_held_to_fp64(training, monkeypatch, shape, trains):
    import training_peers

    case, cpu = training.Case(shape, trains, 24), torch.device("cpu")
    ours = training_peers.IMPLEMENTATIONS["moe_ops"]

    def without_one_expert(case, inputs):
        layer = ours(case, inputs)
        return lambda *args: layer(*args[:4], args[4].masked_fill(args[4] == 0, -1))

    monkeypatch.setitem(training_peers.IMPLEMENTATIONS, "transformers", without_one_expert)
    right, wrong = training.run_case(case, ["moe_ops", "transformers"], 1, 1.0, cpu)
    assert right["error"] < 0.01 and right["step_ms"] > 0
    assert "gradients are wrong" in wrong["reason"] and "step_ms" not in wrong


def row(tokens, implementation, ms, run="r"):
    case = {"shape": "qwen3", "trains": "full", "scheme": "", "num_tokens": tokens}
    return case | {"implementation": implementation, "run": run, "infer_ms": ms, "step_ms": 3 * ms}


def test_missing_leaves_out_what_the_same_sources_measured(training, tmp_path):
    path = tmp_path / "training_GPU.json"
    runs = {"r": {"moe_ops_sources": "now"}, "old": {"moe_ops_sources": "before"}}
    rows = [row(8, "moe_ops", 1.0), row(8, "liger", 2.0), row(16, "moe_ops", 1.0, "old")]
    path.write_text(json.dumps({"runs": runs, "rows": [*rows, row(16, "liger", 2.0)]}))
    results = training.report.open_results(path)
    asked = {"shapes": ["qwen3"], "tokens": [8, 16], "trains": ["full"], "schemes": []}
    given = argparse.Namespace(**asked, missing=True, only=["moe_ops", "liger"])
    assert [case.num_tokens for case in training.cases_of(given, results, "r")] == [16]
    given.missing = False
    assert [case.num_tokens for case in training.cases_of(given, results, "r")] == [8, 16]


def test_table_of_steps(training, tmp_path):
    path = tmp_path / "training_GPU.json"
    rows = [row(1024, "liger", 4), row(1024, "moe_ops", 2), row(1024, "sonicmoe", 1, "before")]
    path.write_text(json.dumps({"runs": {}, "rows": rows}))
    assert training.report.steps(path).splitlines() == [
        "|  | T | moe_ops | Liger | SonicMoE |",
        "|---|---|---|---|---|",
        "| Qwen3 | 1024 | 2.00, **6.00** | 4.00, 12.0 | (1.00, 3.00) |",
    ]
    path.write_text(json.dumps({"runs": {}, "rows": []}))
    assert training.report.steps(path) is None
