"""Operators of experts that add up the outputs of ranks, where their backend does not."""

import pytest
import torch

import moe_ops
from moe_ops.backends import named
from moe_ops.ops import exchange
from moe_ops.ops.args import ExpertsArgs


class Doubled:
    """An exchange of two ranks that have the same outputs, of which one plays both."""

    def __init__(self, name, out):
        assert name == "both"
        self.out = out

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


def test_backends_that_add_do_so_unless_they_run_in_chunks(both):
    ran = []
    launch = exchange.adding_ranks(lambda args: ran.append(args.exchange), itself=True)
    out, ids = torch.zeros(6, 2), torch.zeros(6, 1)
    args = dict.fromkeys(ExpertsArgs._fields) | {"out": out, "topk_ids": ids}
    for chunk_rows, seen in ((0, "both"), (6, "both"), (4, "")):
        launch(ExpertsArgs(**args | {"exchange": "both", "chunk_rows": chunk_rows}))
        assert ran.pop() == seen
    assert named("deep_gemm").adds_ranks and not named("torch").adds_ranks


def test_calls_that_cannot_are_refused():
    given = arguments()
    with pytest.raises(ValueError, match="exchange must be left out of calls with batch_inv"):
        moe_ops.fused_experts(*given, exchange="both", batch_invariant=True)
    given[1].requires_grad_()
    with pytest.raises(ValueError, match="exchange must be left out of calls that record grad"):
        moe_ops.fused_experts(*given, exchange="both")
