"""Operators of experts that add up the outputs of ranks, where their backend does not."""

import pytest
import torch

import moe_ops
from moe_ops.backend import Exchanges
from moe_ops.backends import named
from moe_ops.ops import exchange
from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.options import Options
from moe_ops.parallel.symmetric_memory import SymmetricMemory


class Doubled:
    """An exchange of two ranks that have the same outputs, of which one plays both."""

    def __init__(self, name, out, num_rows):
        assert name == "both"
        self.out = out

    def gather(self, x):
        return torch.cat((x, x))

    def add(self):
        self.out[: len(self.out) // 2] *= 2


@pytest.fixture
def both(monkeypatch):
    monkeypatch.setattr(exchange, "_open", Doubled)


def arguments():
    x, w13, w2 = torch.randn(6, 32), torch.randn(4, 64, 32) / 6, torch.randn(4, 32, 32) / 6
    return x, w13, w2, torch.rand(6, 2), torch.randint(0, 4, (6, 2))


def test_a_step_behind_the_backend_adds(both):
    given = arguments()
    alone, added = moe_ops.fused_experts(*given), moe_ops.fused_experts(*given, exchange="both")
    assert torch.equal(added[:3], 2 * alone[:3])
    assert torch.equal(moe_ops.fused_experts(*given), alone)  # a plan of its own


def test_a_step_before_the_backend_sends(both):
    x, *weights, router, ids = arguments()
    x = x[:3]
    alone = moe_ops.fused_experts(torch.cat((x, x)), *weights, router, ids)
    added = moe_ops.fused_experts(x, *weights, router, ids, exchange="both")
    assert added.shape == alone.shape and torch.equal(added[:3], 2 * alone[:3])


def test_backends_do_what_they_can_unless_they_run_in_chunks(both):
    ran = []
    out, ids, x = torch.zeros(6, 2), torch.zeros(6, 1), torch.zeros(3, 2)
    args = dict.fromkeys(ExpertsArgs._fields) | {"out": out, "topk_ids": ids, "hidden_states": x}
    for sends, chunk_rows, seen in ((1, 0, 3), (1, 6, 3), (1, 4, 6), (0, 0, 6)):
        launch = exchange.over_ranks(ran.append, Exchanges(True, ("",) * sends))
        launch(ExpertsArgs(**args | {"options": Options(exchange="both", chunk_rows=chunk_rows)}))
        given = ran.pop()
        assert given.options.exchange == ("" if chunk_rows == 4 else "both")
        assert len(given.hidden_states) == seen
    assert named("deep_gemm").exchanges.adds_ranks and not named("torch").exchanges.adds_ranks
    assert named("deep_gemm").exchanges.sends_rows and not named("triton").exchanges.sends_rows


def test_calls_that_cannot_are_refused():
    given = arguments()
    with pytest.raises(ValueError, match="exchange must be left out of calls with batch_inv"):
        moe_ops.fused_experts(*given, exchange="both", batch_invariant=True)
    given[1].requires_grad_()
    with pytest.raises(ValueError, match="exchange must be left out of calls that record grad"):
        moe_ops.fused_experts(*given, exchange="both")


@pytest.mark.parametrize(
    ("name", "M", "message"),
    [
        (
            "both",
            6,
            "exchange must be a dispatcher's `SymmetricMemory.exchange` or .*, got 'both'",
        ),
        ("('group', 2)", 6, "exchange must be a dispatcher's"),
        (2, 6, "exchange must be a string, got int"),
        (SymmetricMemory("group", 2, 3).exchange, 5, "rows of each of the 2 ranks, .* got 5"),
        (SymmetricMemory("group", 2, 3).exchange, 0, "rows of each of the 2 ranks, .* got 0"),
        (SymmetricMemory("group", 2, 3).exchange, -2, "the 6 rows of all .* at most 3 .* got 4"),
    ],
)
def test_wrong_exchanges_are_refused(name, M, message):
    x, w13, w2, weights, ids = arguments()
    if M >= 0:
        weights, ids = weights[:M], ids[:M]
    with pytest.raises(ValueError, match=message):
        moe_ops.fused_experts(x[:M], w13, w2, weights, ids, exchange=name)


def test_processes_without_dispatchers_say_so(monkeypatch):
    monkeypatch.setattr(exchange, "_open", None)
    with pytest.raises(RuntimeError, match="'its name' needs .*symmetric_memory: import it first"):
        moe_ops.fused_experts(*arguments(), exchange="its name")
