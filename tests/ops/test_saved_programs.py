"""Programs that earlier versions exported keep running: operators, schemas and the options they
carry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import moe_ops
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
