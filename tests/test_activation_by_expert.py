"""Activations whose alpha, beta and limit differ by expert."""

import math

import pytest
import torch

import moe_ops
from moe_ops import Activation
from moe_ops.planning import training as planning
from tests.support import oracle
from tests.support.cases import poisoned_memory

E, K, I, M, TOP_K = 5, 64, 32, 23, 2
BF16 = torch.bfloat16
LIMITS = torch.tensor([0.4, 1.1, math.inf, 0.7, 2.5])
ALPHAS, BETAS = torch.tensor([0.6, 1.7, 1.1, 2.3, 0.9]), torch.tensor([0.3, 1.0, 2.0, 0.7, 1.4])
CASES = {
    "silu": {"limit": LIMITS},
    "swigluoai": {"alpha": ALPHAS, "beta": BETAS, "limit": LIMITS},
    "swigluoai_uninterleave": {"alpha": 1.3, "beta": BETAS},
    "swiglustep": {"limit": LIMITS},
    "situ": {"beta": BETAS, "limit": LIMITS},
    "powlu": {"alpha": ALPHAS, "limit": LIMITS},
}
named = pytest.mark.parametrize("name", CASES)


def arguments(dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    ids = torch.rand(M, E, generator=g).topk(TOP_K).indices
    ids[3, 1], ids[5, 0] = -1, E + 2
    x, w13 = normal(M, K), normal(E, 2 * I, K) / K**0.5
    weights = torch.rand(M, TOP_K, generator=g) + 0.5
    given = [x, w13, normal(E, K, I) / I**0.5, weights]
    bias = {"w13_bias": normal(E, 2 * I) / 2, "w2_bias": normal(E, K)}
    return [t.to(dtype) for t in given], ids, {k: t.to(dtype) for k, t in bias.items()}


def expected(tensors, ids, biases, name):
    """The sum over experts of the layer of each alone, with numbers as parameters."""
    total = 0
    for e in range(E):
        of = {k: v[e].item() if torch.is_tensor(v) else v for k, v in CASES[name].items()}
        mine = torch.where(ids == e, ids, -1)
        total = total + oracle.experts(*tensors, mine, activation={"name": name, **of}, **biases)
    return total


@pytest.mark.sweep
@named
@pytest.mark.parametrize("kernels", [False, True], ids=("plain", "kernels"))
def test_values_and_gradients(name, kernels, monkeypatch):
    """Of plain torch, and of the kernels for rows, interpreted."""
    if kernels and torch.cuda.is_available():
        pytest.skip("with a GPU the kernels are compiled")
    monkeypatch.setattr(planning, "INTERPRETED", kernels)
    tensors, ids, biases = arguments()
    if kernels and name == "silu":
        biases = {}
    exact = [t.double().requires_grad_() for t in (*tensors, *biases.values())]
    want = expected(exact[:4], ids, dict(zip(biases, exact[4:], strict=True)), name)
    act = Activation(name, **CASES[name])
    with poisoned_memory():
        out = moe_ops.fused_experts(*tensors, ids, activation=act, **biases)
    assert oracle.relative_error(out, want.detach()) < 1e-5

    given = [t.clone().requires_grad_() for t in (*tensors, *biases.values())]
    of = dict(zip(biases, given[4:], strict=True))
    with poisoned_memory():
        recorded = moe_ops.fused_experts(*given[:4], ids, activation=act, **of)
        found = torch.autograd.grad(recorded.sum() + recorded.square().sum(), given)
    grads = torch.autograd.grad(want.sum() + want.square().sum(), exact)
    assert oracle.relative_error(recorded, want.detach()) < 1e-5
    for mine, his in zip(found, grads, strict=True):
        assert oracle.relative_error(mine, his) < 1e-4
    default = moe_ops.fused_experts(*tensors, ids, activation=name, **biases)
    assert oracle.relative_error(default, want.detach()) > 0.05


@named
@pytest.mark.parametrize("scheme", ["int8_w8a16:channel", "fp8_block"])
def test_quantized_weights(name, scheme):
    (x, w13, w2, weights), ids, _ = arguments(BF16)
    q13, q2 = [moe_ops.quantize(w, scheme) for w in (w13, w2)]
    act = Activation(name, **CASES[name])
    out = moe_ops.fused_experts(x, q13, q2, weights, ids, activation=act)
    exact = [w.dequantize(torch.float32).double() for w in (q13, q2)]
    want = expected([x.double(), *exact, weights.double()], ids, {}, name)
    assert oracle.relative_error(out, want) < (0.06 if scheme == "fp8_block" else 4e-3)


DEVICE, DTYPE = ("cuda", BF16) if torch.cuda.is_available() else ("cpu", torch.float32)


@pytest.mark.sweep
@named
@pytest.mark.parametrize("scheme", ["", "int8_w8a16:channel", "fp8_block"])
def test_triton(name, scheme):
    """One token and several, by the kernels that have parameters by expert."""
    (x, w13, w2, weights), ids, biases = arguments(DTYPE)
    exact = w13.double(), w2.double()
    if scheme:
        w13, w2 = [moe_ops.quantize(w, scheme) for w in (w13, w2)]
        exact = [w.dequantize(torch.float32).double() for w in (w13, w2)]
        biases = {}
    act = Activation(
        name, **{k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in CASES[name].items()}
    )
    of = {k: v.to(DEVICE) for k, v in biases.items()}
    wide = {k: v.double() for k, v in biases.items()}
    for count in (1, M):
        given = [t.to(DEVICE) for t in (x[:count], w13, w2, weights[:count], ids[:count])]
        with poisoned_memory():
            out = moe_ops.fused_experts(*given, activation=act, backend="triton", **of)
        few = [x[:count].double(), *exact, weights[:count].double()]
        allowed = 0.06 if scheme == "fp8_block" else 4e-3 if DTYPE == BF16 else 1e-5
        assert oracle.relative_error(out.cpu(), expected(few, ids[:count], wide, name)) < allowed


def test_triton_refuses_what_it_has_not():
    tensors, ids, _ = arguments()
    act = Activation("silu", limit=LIMITS)
    with pytest.raises(ValueError, match="batch invariant with parameters of the activation by"):
        moe_ops.fused_experts(
            *tensors, ids, activation=act, backend="triton", batch_invariant=True
        )
    plan = str(moe_ops.explain(*tensors[:3], ids, activation=act))
    assert "not cutlass: " in plan and "takes one alpha, beta and limit for all experts" in plan


@named
def test_batch_invariant_rows_and_an_expert_map(name):
    """Parameters are those of the experts that are here."""
    tensors, ids, biases = arguments()
    act = Activation(name, **CASES[name])
    how = {"activation": act, "batch_invariant": True, **biases}
    out = moe_ops.fused_experts(*tensors, ids, **how)
    x, w13, w2, weights = tensors
    row = moe_ops.fused_experts(x[4:5], w13, w2, weights[4:5], ids[4:5], **how)
    assert torch.equal(out[4:5], row)
    shuffled = torch.tensor([3, 1, 4, 0, 2])
    expert_map = torch.full((9,), -1)
    expert_map[shuffled + 2] = torch.arange(E)
    asked = torch.where((ids >= 0) & (ids < E), shuffled[ids.clamp(0, E - 1)] + 2, ids * 50)
    mapped = moe_ops.fused_experts(*tensors, asked, expert_map=expert_map, **how)
    torch.testing.assert_close(mapped, out)


def test_a_compiled_layer_takes_other_parameters_without_a_new_graph():
    tensors, ids, _ = arguments()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def layer(limit):
        act = Activation("silu", limit=limit)
        return moe_ops.fused_experts(*tensors, ids, activation=act)

    for limit in (LIMITS, LIMITS.flip(0)):
        eager = moe_ops.fused_experts(*tensors, ids, activation=Activation("silu", limit=limit))
        assert torch.equal(layer(limit), eager)
    assert len(graphs) == 1


def test_equal_numbers_of_all_experts_are_one_number():
    tensors, ids, _ = arguments()
    one = moe_ops.fused_experts(*tensors, ids, activation=Activation("silu", limit=0.6))
    each = Activation("silu", limit=torch.full((E,), 0.6))
    assert torch.equal(moe_ops.fused_experts(*tensors, ids, activation=each), one)
    assert each != Activation("silu", limit=torch.full((E,), 0.6)) and each == each


def test_bad_input():
    tensors, ids, _ = arguments()
    act = Activation("silu", limit=torch.ones(E + 1))
    with pytest.raises(ValueError, match=f"of the E={E} experts of w13, got those of {E + 1}"):
        moe_ops.fused_experts(*tensors, ids, activation=act)
    x, w13, w2, _ = tensors
    counts = torch.full((E,), 3)
    with pytest.raises(ValueError, match="activation must have .* as numbers, got a tensor"):
        moe_ops.batched_experts(x[None].expand(E, -1, -1), w13, w2, counts, activation=act)
    with pytest.raises(ValueError, match="activation must have .* as numbers, got a tensor"):
        moe_ops.grouped_experts(x, w13, w2, counts, activation=act)
    with pytest.raises(ValueError, match="activation must have .* as numbers, got a tensor"):
        moe_ops.MoELayer(K, I, E, TOP_K, activation=act)
