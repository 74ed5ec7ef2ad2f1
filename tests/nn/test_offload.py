"""MoELayer.offload: the values of the layer with its experts in place, and what is refused."""

import copy

import pytest
import torch

import moe_ops
from tests.nn.test_layer import LAYERS, TOP_K, E, H, make_layer

X = torch.randn(1, 2, H, generator=torch.Generator().manual_seed(0))


def stats(layer):
    return moe_ops.residency_stats(layer)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("slots", [TOP_K, E - 1, E])
def test_values(name, slots):
    want = make_layer(**LAYERS[name])
    layer = copy.deepcopy(want)
    assert layer.offload(slots, "cpu") is layer
    with torch.no_grad():
        for x in (X[:, :1], X, X.repeat(5, 4, 1)):
            assert torch.equal(layer(x), want(x))
    assert (stats(layer).misses > 0) == (slots < E)
    state = layer.state_dict()
    assert [*state] == [*want.state_dict()]
    assert all(torch.equal(state[name], t) for name, t in want.state_dict().items())


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_that_is_loaded_is_what_runs(assign):
    want, other = make_layer(), make_layer()
    layer = copy.deepcopy(want).offload(TOP_K, "cpu")
    with torch.no_grad():
        layer(X)
        layer.load_state_dict(other.state_dict(), assign=assign)
        assert torch.equal(layer(X[:, :1]), other(X[:, :1]))
        layer.load_state_dict(want.state_dict())
        assert torch.equal(layer(X[:, :1]), want(X[:, :1]))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("wrong", [lambda t: t[:2], lambda t: moe_ops.quantize(t, "int8_w8a16")])
def test_what_runs_after_a_load_that_failed_is_the_state_dict(assign, wrong):
    layer, copied, other = [make_layer() for _ in range(3)]
    layer.offload(TOP_K, "cpu")
    state = other.state_dict()
    state["experts.down_proj"] = wrong(state["experts.down_proj"])
    with torch.no_grad():
        layer(X[:, :1])
        with pytest.raises((RuntimeError, ValueError), match="down_proj|quantized"):
            layer.load_state_dict(state, assign=assign)
        copied.load_state_dict(layer.state_dict())
        assert torch.equal(layer(X[:, :1]), copied(X[:, :1]))


def test_quantized_layers():
    layer = make_layer().bfloat16().quantize("int8_w8a16")
    want, x = copy.deepcopy(layer), X.bfloat16()
    layer.offload(TOP_K, "cpu")
    with torch.no_grad():
        for rows in (x[:, :1], x):
            assert torch.equal(layer(rows), want(rows))
    with pytest.raises(ValueError, match="to be quantized, got weights in host memory"):
        layer.quantize("int4_w4a16")


@pytest.mark.slow
def test_one_graph():
    from torch._dynamo.testing import CompileCounter

    layer, counter = make_layer().offload(TOP_K, "cpu"), CompileCounter()
    run = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (2, 3, 5, 9):
            x = torch.randn(tokens, H)
            assert torch.equal(run(x), layer(x))
    assert counter.frame_count == 1


def test_what_is_refused():
    layer = make_layer().offload(TOP_K, "cpu")
    for change, message in (
        (lambda: layer.offload(TOP_K), "to be offloaded, got weights in host memory"),
        (lambda: layer.add_lora(2), "to be adapted, got weights in host memory"),
        (lambda: layer.half(), "must stay on cpu"),
        (lambda: copy.deepcopy(layer), "to be copied or pickled"),
        (lambda: layer(X.requires_grad_()), "gradient"),
        (lambda: make_layer().offload(TOP_K - 1), f"slots must be at least top_k={TOP_K}, got 2"),
        (lambda: make_layer().offload(2.0), "slots must be"),
    ):
        with pytest.raises(ValueError, match=message):
            change()
    adapted = make_layer()
    adapted.add_lora(2)
    expert_map = torch.arange(E, dtype=torch.int32)
    for other in (adapted, make_layer(expert_map=expert_map, num_local_experts=E)):
        with pytest.raises(ValueError, match="layer must hold all experts, without adapters"):
            other.offload(TOP_K, "cpu")
