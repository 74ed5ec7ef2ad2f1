"""Objects that earlier versions pickled whole: their files name paths, which stay."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

LAYER = """
import sys

import torch

saved = torch.load(sys.argv[1], weights_only=False)

import moe_ops

layer = saved["layer"]
assert type(layer) is moe_ops.MoELayer
with torch.no_grad():
    torch.testing.assert_close(layer(saved["x"]), saved["want"])
layer.load_state_dict(layer.state_dict())
parallel = moe_ops.ParallelConfig(tp_size=2, tp_rank=1)
config = moe_ops.MoEConfig(8, 2, 64, 32, routing_method="deepseek_v3", parallel=parallel)
assert saved["config"] == config
assert all(method in list(moe_ops.RoutingMethod) for method in saved["methods"])
assert len(saved["methods"]) == 14
"""

TRANSFORMERS = """
import sys

import torch

saved = torch.load(sys.argv[1], weights_only=False)

from moe_ops.integrations import transformers

quantized, plain = saved["configs"]
assert quantized.to_dict() == transformers.MoeOpsConfig("fp8_block").to_dict()
assert plain.to_dict() == transformers.MoeOpsConfig().to_dict()
assert type(saved["attach"]) is transformers.AttachReport
assert "fused_experts, silu, torch" in str(saved["attach"])
assert type(saved["routers"]) is transformers.RoutersReport
assert "route_tokens, renormalize" in str(saved["routers"])
assert saved["quantizer"].quantization_config.to_dict() == quantized.to_dict()
with torch.no_grad():
    for got, want in zip(saved["gate"](saved["x"]), saved["want"], strict=True):
        torch.testing.assert_close(got, want)
"""


# saved by version 0.1.0 with torch 2.13 and transformers 5
@pytest.mark.parametrize("name, code", [
    ("objects.pt", LAYER),
    pytest.param("transformers_objects.pt", TRANSFORMERS, marks=pytest.mark.slow),
])  # fmt: skip
def test_saved_objects_load_and_run(name, code):
    """In a process that knows nothing of this package but what the file names."""
    if code is TRANSFORMERS:
        pytest.importorskip("transformers")
    answer = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "tests" / "fixtures" / name)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]


@pytest.mark.parametrize("name", [
    *("_cohere2", "_deepseek_v2", "_deepseek_v3", "_flint", "_gpt_oss", "_granite", "_hy_v3"),
    *("_jamba", "_minimax_m2", "_minimax_m3", "_mixtral", "_privacy_filter", "_qwen2"),
    *("_qwen3_vl", "router_forward"),
])  # fmt: skip
def test_fused_routers_are_found_by_their_old_path(name):
    pytest.importorskip("transformers")
    from moe_ops.integrations import _routers
    from moe_ops.integrations.transformers import routers

    assert getattr(_routers, name) is getattr(routers, name)


def test_attached_forwards_are_found_by_their_old_path():
    pytest.importorskip("transformers")
    from moe_ops.integrations import _families, _outside
    from moe_ops.integrations.transformers import families

    found = {getattr(_outside, name) for name in _outside.__all__} | {_families.experts_forward}
    assert found == families._REPLACEMENTS
