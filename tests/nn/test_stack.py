"""MoELayer whose tokens have adapters of a stack."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ops
from moe_ops import LoRA, LoRAStack
from tests.nn.test_lora import FP64, layer_of


def adapters_of(layer, ranks=(3, 5), seed=0):
    g = torch.Generator().manual_seed(seed)
    (E, N, K), I = layer.experts.w13.shape, layer.experts.down_proj.shape[2]

    def random(*size):
        return torch.randn(E, *size, generator=g, dtype=FP64) * size[1] ** -0.5

    return [LoRA(random(r, K), random(N, r), random(r, I), random(K, r), 0.5) for r in ranks]


def merged(layer, adapter):
    """A layer whose weights hold the adapter."""
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.experts.w13.add_(adapter.scale * adapter.b13 @ adapter.a13)
        twin.experts.down_proj.add_(adapter.scale * adapter.b2 @ adapter.a2)
    return twin


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"shared_expert_intermediate_size": 16}])
def test_each_token_has_its_adapter(options):
    layer = layer_of(**options).eval()
    adapters = adapters_of(layer)
    twins = [merged(layer, one) for one in adapters]
    x, ids = torch.randn(3, 4, 48, dtype=FP64), torch.tensor([[0, 1, -1, 1]] * 3)
    plain = layer(x)
    stack = LoRAStack.of(adapters, slots=3)
    layer.set_adapters(stack)
    out = layer(x, adapter_ids=ids)
    want = [[0, twins[0]], [1, twins[1]], [3, twins[1]]]
    torch.testing.assert_close(out[:, 2], plain[:, 2], rtol=1e-10, atol=1e-10)
    for place, twin in want:
        torch.testing.assert_close(out[:, place], twin(x)[:, place], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer(x), plain, rtol=0, atol=0)
    stack.put(0, adapters[1])
    out = layer(x, adapter_ids=ids)
    torch.testing.assert_close(out[:, 0], twins[1](x)[:, 0], rtol=1e-10, atol=1e-10)
    assert not any("adapters" in name for name in layer.state_dict())
    layer.set_adapters(None)
    torch.testing.assert_close(layer(x), plain, rtol=0, atol=0)


@torch.no_grad()
def test_moves_with_the_layer():
    layer = layer_of().eval()
    layer.set_adapters(LoRAStack.of(adapters_of(layer)))
    layer.bfloat16()
    x, ids = torch.randn(4, 48, dtype=torch.bfloat16), torch.tensor([0, -1, 1, 0])
    assert layer(x, adapter_ids=ids).dtype == torch.bfloat16


@pytest.mark.slow
@torch.no_grad()
def test_one_graph_for_all_mixtures():
    layer, graphs = layer_of().eval(), []
    layer.set_adapters(LoRAStack.of(adapters_of(layer)))

    def count(gm, inputs):
        graphs.append(gm)
        return gm

    compiled = torch.compile(layer, backend=count, fullgraph=True, dynamic=True)
    for seed in range(4):
        x, ids = torch.randn(4 + seed, 48, dtype=FP64), torch.randint(-1, 3, (4 + seed,))
        want = layer(x, adapter_ids=ids)
        torch.testing.assert_close(compiled(x, adapter_ids=ids), want)
    assert len(graphs) == 1


def test_refusals():
    layer = layer_of()
    x, ids = torch.randn(4, 48, dtype=FP64), torch.zeros(4, dtype=torch.int64)
    stack = LoRAStack.of(adapters_of(layer))
    with pytest.raises(ValueError, match="adapter_ids must be None for a layer without adapters"):
        layer(x, adapter_ids=ids)
    with pytest.raises(ValueError, match="stack must be a moe_ops.LoRAStack"):
        layer.set_adapters(stack[:4])
    layer.set_adapters(stack)
    with pytest.raises(ValueError, match=r"adapter_ids must have shape \(4,\)"):
        layer(x, adapter_ids=ids.unsqueeze(0))
    with pytest.raises(ValueError, match="where gradients are recorded"):
        layer(x, adapter_ids=ids)
    with pytest.raises(ValueError, match="no stack of adapters beside one of its own"):
        layer.add_lora(2)
    layer.set_adapters(None)
    layer.add_lora(2)
    with pytest.raises(ValueError, match="no adapter of its own beside a stack"):
        layer.set_adapters(stack)
    with pytest.raises(ValueError, match="all experts, without adapters"):
        layer.offload(2)


def test_of_another_layer():
    layer, other = layer_of().eval(), moe_ops.MoELayer(64, 40, 4, 2, dtype=FP64).eval()
    layer.set_adapters(LoRAStack.of(adapters_of(other)))
    with torch.no_grad(), pytest.raises(ValueError, match="stack of another layer"):
        layer(torch.randn(4, 48, dtype=FP64), adapter_ids=torch.zeros(4, dtype=torch.int64))


def test_warmup_calls_the_layer_with_its_adapters():
    layer, names = layer_of().eval(), []
    layer.set_adapters(LoRAStack.of(adapters_of(layer)))

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._opname)
            return func(*args, **(kwargs or {}))

    with Noted():
        moe_ops.warmup(layer, token_counts=(2,))
    assert "adapted_experts" in names
