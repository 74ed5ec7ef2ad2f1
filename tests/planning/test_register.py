"""Backends of other packages: planned, explained, traced, exported and warmed up from the next
call on."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import pytest
import torch

import moe_ops
from moe_ops import backend as public
from moe_ops import backends
from moe_ops.backend import Backend, Library, Takes, register
from moe_ops.ops import library
from moe_ops.ops.problem import Machine
from moe_ops.ops.relayout import RELAYOUTS
from moe_ops.planning import bind
from moe_ops.planning import plan as plans
from tests.support.outside import dense, documented_code, registered
from tests.support.paths import ROOT

E, K, I, M = 2, 64, 48, 5


def layer() -> tuple[torch.Tensor, ...]:
    w13, w2 = torch.randn(E, 2 * I, K) / K**0.5, torch.randn(E, K, I) / I**0.5
    weights, ids = moe_ops.route(torch.randn(M, E), 1)
    return torch.randn(M, K), w13, w2, weights, ids


class Graphs:
    """A torch.compile backend that keeps the names of our operators in each graph."""

    def __init__(self) -> None:
        self.ops: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        targets = [str(node.target) for node in graph.graph.nodes]
        self.ops.append([target for target in targets if target.startswith("moe_ops.")])
        return graph


def test_the_documented_one_is_short():
    code = [line for line in documented_code().split("\n") if line.strip()]
    assert 40 < len(code) < 80


def test_the_documented_one_needs_two_modules():
    """And moe_ops.backend has all names that it says it has."""
    imports = re.findall(r"^(?:from|import) (moe_ops[\w.]*)", documented_code(), re.M)
    assert imports == ["moe_ops", "moe_ops.backend"]
    assert not [name for name in public.__all__ if not hasattr(public, name)]


@pytest.mark.slow
@torch.no_grad()
def test_eager_and_compiled_calls_take_it_without_a_reset():
    args = layer()
    want = moe_ops.fused_experts(*args, backend="torch")

    @torch.compile(fullgraph=True, backend=(graphs := Graphs()))
    def compiled(*args):
        return moe_ops.fused_experts(*args)

    for _ in range(2):  # the second time the graph is at hand
        torch.testing.assert_close(moe_ops.fused_experts(*args), want)
        torch.testing.assert_close(compiled(*args), want)
    assert graphs.ops == [["moe_ops.torch_experts.default"]]
    assert bind._alike
    with registered(dense()):
        assert not bind._alike
        assert moe_ops.list_backends()[-2:] == ("dense", "torch")
        assert str(moe_ops.explain(*args[:3], args[4])).count("M >= 0: dense") == 1
        for _ in range(2):
            torch.testing.assert_close(moe_ops.fused_experts(*args), want)
            torch.testing.assert_close(compiled(*args), want)
        assert graphs.ops[1:] == [["moe_ops.dense_experts.default"]]
        (alike,) = bind._alike.values()
        assert [known.bound.plan.backend for known in alike.known] == ["dense"]
    assert "dense" not in moe_ops.list_backends()
    torch.testing.assert_close(compiled(*args), want)
    assert "M >= 0: torch" in str(moe_ops.explain(*args[:3], args[4]))
    with pytest.raises(ValueError, match="backend must be one of auto, .*, got 'dense'"):
        moe_ops.fused_experts(*args, backend="dense")


@torch.no_grad()
def test_export_and_warmup():
    x, w13, w2, weights, ids = layer()

    class Layer(torch.nn.Module):
        def forward(self, x, weights, ids):
            return moe_ops.fused_experts(x, w13, w2, weights, ids, backend="dense")

    with registered(dense()):
        rows = torch.export.Dim("M")
        shapes = ({0: rows}, {0: rows}, {0: rows})
        program = torch.export.export(Layer(), (x, weights, ids), dynamic_shapes=shapes)
        ops = [str(n.target) for n in program.graph.nodes if "moe_ops" in str(n.target)]
        assert ops == ["moe_ops.dense_experts.default"]
        more = [t.repeat(3, 1) for t in (x, weights, ids)]
        want = moe_ops.fused_experts(more[0], w13, w2, *more[1:], backend="torch")
        torch.testing.assert_close(program.module()(*more), want)
        report = moe_ops.warmup(
            lambda n: moe_ops.fused_experts(x[:n], w13, w2, weights[:n], ids[:n], backend="dense"),
            (1, M),
            show_progress=False,
        )
        assert [call.backends for call in report.layers[0].calls] == [("dense",)] * 2


def test_it_is_one_of_the_tiers(monkeypatch):
    """Tables are looked up among the backends that there are, and tiers parsed anew."""
    x, w13, w2, weights, ids = layer()
    table = ((3, "torch"), (-1, "dense"))
    with registered(dense()), monkeypatch.context() as patch:
        patch.setattr(plans, "_measured", lambda *_: table)
        plan = moe_ops.explain(x, w13, w2, ids)
        assert [(limit, b.name) for limit, b in plan.tiers] == list(table)
        want = moe_ops.fused_experts(x, w13, w2, weights, ids, backend="torch")
        torch.testing.assert_close(moe_ops.fused_experts(x, w13, w2, weights, ids), want)


def test_names_in_lists_come_from_the_backends():
    with registered(dense()):
        assert RELAYOUTS["dense"] == ()
        weight = torch.randn(E, K, I)
        assert moe_ops.prepare(weight, "dense") is weight
        with pytest.raises(ValueError, match="moe_backend must be one of auto, .*dense, torch"):
            moe_ops.MoEConfig(2, 1, 64, 64, moe_backend="other")
        assert moe_ops.MoELayer(K, I, E, 1, backend="dense") is not None


def test_refusals():
    with pytest.raises(ValueError, match="backend must be a Backend, .* got str"):
        moe_ops.register_backend("dense")
    for name in ("torch", "auto"):
        taken = dataclasses.replace(dense(), name=name)
        with pytest.raises(ValueError, match=f"a name that is not taken, got '{name}'"):
            moe_ops.register_backend(taken)
    with pytest.raises(ValueError, match="backend must not be differentiable, got 'trained': .*"):
        moe_ops.register_backend(
            dataclasses.replace(dense(), name="trained", takes=Takes(differentiable=True))
        )
    with registered(dense()), pytest.raises(ValueError, match="not taken, got 'dense'"):
        moe_ops.register_backend(dense())
    assert backends.BACKENDS[-1].name == "torch"
    x, w13, w2, _, ids = layer()
    with registered(dense()):
        many = [w.repeat(9, 1, 1) for w in (w13, w2)]
        text = str(moe_ops.explain(x, *many, ids, backend="auto"))
        assert "not dense: dense takes at most 16 experts, got 18" in text


@pytest.mark.parametrize("changes, message", [
    ({"name": "two words"}, "name must be an identifier, .* got 'two words'"),
    ({"name": "größer"}, "name must be an identifier"),
    ({"name": ""}, "name must be an identifier, .* got ''"),
    ({"name": "auto"}, "name must be one that is not taken, got 'auto'"),
    ({"name": "torch"}, "name must be one that is not taken, got 'torch'"),
    ({"launch": {"experts": print, "expert": print}}, "launch must have kinds among .* expert$"),
    ({"launch": {}}, "launch must have kinds among experts, .* got none"),
    ({"devices": ("CPU", "GPU")}, "devices must be dispatch keys"),
])  # fmt: skip
def test_nothing_is_half_registered(changes, message):
    facts = {
        "name": "refused",
        "supports": lambda problem, machine: [],
        "workspace_shapes": dense().workspace_shapes,
        "launch": {"experts": print},
        "devices": ("CPU",),
    } | changes
    before = library.registered(), dict(RELAYOUTS)
    with pytest.raises(ValueError, match=message):
        register(Backend(**facts))
    assert (library.registered(), RELAYOUTS) == before
    assert not hasattr(torch.ops.moe_ops, "refused_experts")


def test_reasons_of_a_backend_stay_its_own():
    x, w13, w2, _, ids = layer()
    problem = moe_ops.explain(x, w13, w2, ids).problem
    machine = Machine("cpu", available=("refusing",))
    own = ["it never runs"]
    refusing = dataclasses.replace(
        dense(), name="refusing", supports=lambda p, m: own, library=Library(interpreted=True)
    )
    problem = problem.replace(needs_grad=True)
    for _ in range(2):
        assert len(plans.why_not(refusing, problem, machine)) == 2
    assert own == ["it never runs"]


@pytest.mark.slow
def test_the_matrix_runs_it(tmp_path):
    (tmp_path / "dense_of_others.py").write_text(documented_code())
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "MOE_OPS_TEST_BACKENDS": "dense_of_others",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
        + ["-k", "dense", "tests/matrix"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stdout[-3000:]
    found = re.search(r"(\d+) passed", answer.stdout)
    assert found is not None and int(found.group(1)) > 50
