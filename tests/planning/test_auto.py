"""The tiered op: one workspace for every tier, chosen by the real size."""

import dataclasses

import torch

import moe_ops
from moe_ops import backends
from moe_ops.ops.problem import Machine
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans
from tests.planning.test_plan import H200, PLAIN


def test_one_workspace_serves_every_tier(table):
    """At each M every buffer holds what any tier's backend asks for, up to the largest M of its
    tier, and no more."""
    table((16, "torch"), (-1, "triton"))
    plan = plans.plan(PLAIN, H200)
    assert len(plan.tiers) == 2
    for M in (0, 1, 16, 17, 4096):
        whole = [plans._bytes(buffer) for buffer in plan.workspace_shapes(M)]
        needed = [
            [
                plans._bytes(buffer)
                for buffer in backend.workspace_shapes(M if limit < 0 else min(M, limit), PLAIN)
            ]
            for limit, backend in plan.tiers
        ]
        assert whole == [max(sizes) for sizes in zip(*needed, strict=True)]


def test_the_tiered_op_picks_by_the_real_size(monkeypatch):
    """Values and launchers, at both sides of the tiers' bounds."""
    torch_backend = backends.named("torch")
    launched = []

    def recording(name):
        def launch(args):
            launched.append(name)
            torch_backend.launch["experts"](args)

        return dataclasses.replace(torch_backend, name=name, launch={"experts": launch})

    few, some, many = recording("few"), recording("some"), recording("many")
    monkeypatch.setattr(backends, "BACKENDS", (few, some, many, torch_backend))
    monkeypatch.setattr(plans, "_measured", lambda *_: ((2, "few"), (4, "some"), (-1, "many")))
    w13, w2 = torch.randn(3, 8, 6), torch.randn(3, 6, 4)
    with machines.pretend(Machine("cpu", available=("few", "some", "many", "torch"))):
        for M in (0, 1, 2, 3, 4, 5, 50):
            x, ids = torch.randn(M, 6), torch.randint(0, 3, (M, 2))
            got = moe_ops.fused_experts(x, w13, w2, torch.ones(M, 2), ids)
            want = moe_ops.fused_experts(x, w13, w2, torch.ones(M, 2), ids, backend="torch")
            assert torch.equal(got, want)
    assert launched == ["few"] * 3 + ["some"] * 2 + ["many"] * 2
