"""torchao's quantize_ with our configuration."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import FqnToConfig, quantize_

import moe_ops
from moe_ops.integrations.torchao import ExpertsConfig, is_experts


def block():
    torch.manual_seed(0)
    layer = moe_ops.MoELayer(128, 128, num_experts=4, top_k=2).requires_grad_(False)
    return nn.Sequential(nn.Linear(128, 128), layer)


def rounded(model, scheme):
    """The same model with experts rounded to the scheme."""
    model = copy.deepcopy(model)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(model[1].experts, name)
        weight.copy_(moe_ops.quantize(weight, scheme).dequantize())
    return model


@torch.no_grad()
@pytest.mark.parametrize("way", ["filter", "module name", "parameter names"])
def test_quantize_our_layer(way):
    model = block()
    want = rounded(model, "int4_w4a16")
    config = ExpertsConfig("int4_w4a16")
    if way == "filter":
        quantize_(model, config, filter_fn=is_experts)
    else:
        pattern = r"re:.*experts" if way == "module name" else r"re:.*experts\.\w+_proj"
        quantize_(model, FqnToConfig({pattern: config}), filter_fn=None)
    schemes = {n: getattr(p, "scheme", None) for n, p in model.named_parameters()}
    assert schemes.pop("1.experts.gate_up_proj") == "int4_w4a16:g128"
    assert schemes.pop("1.experts.down_proj") == "int4_w4a16:g128"
    assert set(schemes.values()) == {None}
    x = torch.randn(5, 128)
    assert (model(x) - want(x)).abs().max() < 1e-5 * want(x).abs().max()
    with pytest.raises(ValueError, match="gate_up_proj must be a plain tensor"):
        quantize_(model, config, filter_fn=is_experts)


@torch.no_grad()
def test_quantize_a_transformers_model():
    pytest.importorskip("transformers")
    from tests.integrations.transformers.test_families import build

    for family in ("qwen3_moe", "llama4"):
        model = build(family, 1)
        want, ids = copy.deepcopy(model), torch.tensor([[1, 5, 7]])
        quantize_(model, ExpertsConfig("fp8_w8a16:channel"), filter_fn=is_experts)
        quantized = {n: p for n, p in model.named_parameters() if getattr(p, "scheme", None)}
        assert len(quantized) == 2
        for name, p in quantized.items():
            want.get_parameter(name).copy_(p.dequantize(torch.float32))
        got, want = (m(input_ids=ids, use_cache=False).logits for m in (model, want))
        assert (got - want).abs().max() < 1e-5 * want.abs().max()


def test_what_it_refuses():
    model = block()
    before = {n: p for n, p in model.named_parameters()}
    with pytest.raises(
        ValueError, match="modules of experts, got Linear; .*filter_fn=.*is_experts"
    ):
        quantize_(model, ExpertsConfig("int4_w4a16"))
    with pytest.raises(ValueError, match="scheme must be one of"):
        ExpertsConfig("int3")
    with pytest.raises(ValueError, match="quantizes weights"):
        ExpertsConfig("")
    with torch.no_grad():
        model[1].experts.down_proj[2, 0, 0] = float("inf")
    with pytest.raises(
        ValueError, match=r"down_proj must be finite, got NaN or Inf in experts \[2\]"
    ):
        quantize_(model, ExpertsConfig("fp8_block"), filter_fn=is_experts)
    assert all(model.get_parameter(n) is p for n, p in before.items())
