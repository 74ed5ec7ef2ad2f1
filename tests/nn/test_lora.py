"""MoELayer with an adapter of its experts."""

import copy

import pytest
import torch

import moe_ops

FP64 = torch.float64


def layer_of(**options):
    torch.manual_seed(0)
    layer = moe_ops.MoELayer(48, 40, 4, 2, dtype=FP64, **options)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return layer


def adapted(layer, rank=3, scale=0.5):
    lora = layer.add_lora(rank, scale)
    for p in lora.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return layer


def merged(layer):
    """A layer whose weights hold the adapter."""
    twin, lora = copy.deepcopy(layer), layer.lora
    with torch.no_grad():
        twin.experts.w13.add_(lora.scale * torch.bmm(lora.b13, lora.a13))
        twin.experts.down_proj.add_(lora.scale * torch.bmm(lora.b2, lora.a2))
    twin.lora = None
    return twin


@pytest.mark.parametrize("options", [{}, {"expert_bias": True, "activation": "relu2_no_mul"}])
def test_values_and_what_is_trained(options):
    layer = adapted(layer_of(**options))
    x = torch.randn(9, 48, dtype=FP64)
    out = layer(x)
    torch.testing.assert_close(out, merged(layer)(x), rtol=1e-12, atol=1e-12)
    out.square().sum().backward()
    grads = {name for name, p in layer.named_parameters() if p.grad is not None}
    assert grads == {"gate.weight", "lora.a13", "lora.b13", "lora.a2", "lora.b2"}
    assert all(p.grad.norm() > 0 for p in layer.lora.parameters())
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), out, rtol=1e-12, atol=1e-12)


def test_a_new_adapter_changes_nothing_and_can_go():
    layer, x = layer_of(), torch.randn(5, 48, dtype=FP64)
    before = layer(x)
    layer.add_lora(2)
    torch.testing.assert_close(layer(x), before)
    assert {n for n in layer.state_dict() if n.startswith("lora")} == {
        "lora.a13", "lora.b13", "lora.a2", "lora.b2"
    }  # fmt: skip
    adapted(layer)
    assert not torch.allclose(layer(x), before)
    twin = layer_of()
    twin.add_lora(3, 0.5)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))
    layer.lora = None
    torch.testing.assert_close(layer(x), before)


def test_over_quantized_weights():
    layer = layer_of().float()
    for name in ("gate_up_proj", "down_proj"):
        weight = moe_ops.quantize(getattr(layer.experts, name).detach(), "int4_w4a16:channel")
        setattr(layer.experts, name, torch.nn.Parameter(weight, requires_grad=False))
    adapted(layer)
    plain = copy.deepcopy(layer)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(layer.experts, name).dequantize()
        setattr(plain.experts, name, torch.nn.Parameter(weight, requires_grad=False))
    x = torch.randn(9, 48)
    torch.testing.assert_close(layer(x), merged(plain)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compiled():
    torch._dynamo.reset()
    layer, x = adapted(layer_of()), torch.randn(6, 48, dtype=FP64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [((0,), "rank must be at least 1"), ((2.5,), "rank must be an int"), ((2, "x"), "scale must")],
)
def test_errors(arguments, match):
    with pytest.raises(ValueError, match=match):
        layer_of().add_lora(*arguments)
