"""Programs that earlier versions exported keep running: operators, schemas and the options they
carry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import moe_ops
from tests.routing import test_route
from tests.support import oracle
from tests.support.cases import BF16, tolerance

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
# exported by version 0.1.0 with torch 2.11: 3 experts of (64, 48) of which a token takes 2
PROGRAMS = {"": "layer_bf16.pt2", "fp8_block": "layer_fp8_block.pt2"}
ACTIVATION = {"name": "swigluoai_uninterleave", "alpha": 1.702, "beta": 1.0, "limit": 3.0}


@pytest.mark.parametrize("scheme", PROGRAMS)
def test_exported_layers_run(scheme):
    program = torch.export.load(FIXTURES / PROGRAMS[scheme])
    ops = [node.target for node in program.graph.nodes if "moe_ops" in str(node.target)]
    assert ops == [torch.ops.moe_ops.torch_experts.default]
    layer, weights = program.module(), program.state_dict
    assert getattr(weights["w13"], "scheme", "") == scheme
    for M in (1, 9):
        x = torch.randn(M, 64).to(BF16)
        got = layer(x)
        topk_weights, ids = moe_ops.route(x @ weights["gate"].t(), 2)
        want = oracle.experts(
            *(x, weights["w13"], weights["w2"], topk_weights, ids),
            activation=ACTIVATION,
            w2_bias=weights["bias"],
        )
        assert got.dtype == BF16 and got.shape == (M, 64)
        assert oracle.relative_error(got, want) < tolerance(BF16, scheme)


def load(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor], list]:
    """An exported program, ready to call, its weights and which of our operators it calls."""
    program = torch.export.load(FIXTURES / name)
    ops = [node.target for node in program.graph.nodes if "moe_ops" in str(node.target)]
    return program.module(), program.state_dict, ops


# The programs below are of 3 experts, (32, 16) and (16, 16), and of a router with 8 experts.


@pytest.mark.parametrize("T", [2, 9])
def test_exported_batched_experts_run(T):
    layer, weights, ops = load("batched_bf16.pt2")
    assert ops == [torch.ops.moe_ops.torch_batched_experts.default]
    x, counts = torch.randn(3, T, 16).to(BF16), torch.tensor([T, 0, T - 1], dtype=torch.int32)
    got = layer(x, counts)
    want = oracle.batched(
        *(x, weights["w13"], weights["w2"], counts), activation="gelu", w2_bias=weights["bias"]
    )
    assert got.dtype == BF16 and got.shape == (3, T, 16)
    inside = torch.arange(T) < counts.unsqueeze(1)
    assert oracle.relative_error(got[inside], want[inside]) < tolerance(BF16, "")


@pytest.mark.parametrize("ends", [[0, 1, 2], [4, 4, 7]])
def test_exported_grouped_linear_runs(ends):
    layer, weights, ops = load("linear_bf16.pt2")
    assert ops == [torch.ops.moe_ops.torch_grouped_linear.default]
    x, offsets = torch.randn(ends[-1] + 2, 16).to(BF16), torch.tensor(ends, dtype=torch.int32)
    got = layer(x, offsets)
    want = oracle.grouped_linear(x, weights["weight"], offsets, bias=weights["bias"])
    assert got.dtype == BF16 and got.shape == (x.shape[0], 32)
    rows = slice(ends[-1])
    assert oracle.relative_error(got[rows], want[rows]) < tolerance(BF16, "")


@pytest.mark.parametrize("M", [2, 9])
def test_exported_routers_run(M):
    """`route_tokens` in groups, and `route` of its logits: on CPU of PyTorch's operators."""
    router, weights, ops = load("router_bf16.pt2")
    assert not ops
    x = torch.randn(M, 16).to(BF16)
    (logits, *chosen), again = router(x)
    want = x.double() @ weights["gate"].double().t()
    assert oracle.relative_error(logits, want) < 2**-8
    test_route.check(
        chosen,
        test_route.oracle(
            *(logits, 2, "deepseek_v3"), groups=4, kept=2, bias=weights["bias"], scale=2.5
        ),
    )
    test_route.check(again, test_route.oracle(logits, 3, "renormalize"))
