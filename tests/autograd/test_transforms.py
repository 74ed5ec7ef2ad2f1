"""Transforms of torch.func and tangents of forward-mode AD: refused in a sentence where they reach
an operator, eager, compiled or captured; and calls that nothing in them depends on run.
"""

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops

M, E, TOP_K, K, I = 6, 4, 2, 32, 16
NOT_DIFFERENTIATED = "moe_ops cannot be differentiated by torch.func"
NOT_BATCHED = "moe_ops cannot be batched by torch.func.vmap"
NO_TANGENTS = "moe_ops has no forward-mode derivative"

torch.manual_seed(0)
X, TANGENT = torch.randn(M, K), torch.randn(M, K)
W13, W2 = torch.randn(E, 2 * I, K) / K**0.5, torch.randn(E, K, I) / I**0.5
LOGITS = torch.randn(M, E)
WEIGHTS, IDS = moe_ops.route(LOGITS, TOP_K)
OFFSETS = torch.tensor([1, 3, 4, 6], dtype=torch.int32)
COUNTS = torch.tensor([1, 2, 0, 4])
INT4 = [moe_ops.quantize(w, "int4_w4a16:channel") for w in (W13, W2)]
ADAPTER = moe_ops.LoRA(
    *[torch.randn(*s) for s in ((E, 2, K), (E, 2 * I, 2), (E, 2, I), (E, K, 2))]
)
TRAINED = W13.clone().requires_grad_()
LAYER = moe_ops.MoELayer(K, I, E, TOP_K).eval()
FROZEN = moe_ops.MoELayer(K, I, E, TOP_K).eval().requires_grad_(False)


def experts(x, w13=W13, w2=W2, weights=WEIGHTS, **options):
    return moe_ops.fused_experts(x, w13, w2, weights, IDS, **options)


def batched(x):
    return moe_ops.batched_experts(x.expand(E, M, K), W13, W2, COUNTS)


CALLS = {
    "tokens": (experts, X),
    "router weights": (lambda t: experts(X, weights=t), WEIGHTS),
    "w13": (lambda t: experts(X, t), W13),
    "int4": (lambda t: experts(t, *INT4), X),
    "adapters": (lambda t: experts(t, adapters=ADAPTER), X),
    "adapter": (lambda t: experts(X, adapters=ADAPTER._replace(a13=t)), ADAPTER.a13),
    "routed": (lambda t: experts(X, weights=moe_ops.route(t, TOP_K)[0]), LOGITS),
    "grouped_linear": (lambda t: moe_ops.grouped_linear(t, W13, OFFSETS), X),
    "trainable grouped_linear": (lambda t: moe_ops.grouped_linear(t, TRAINED, OFFSETS), X),
    "batched_experts": (batched, X),
    "layer": (LAYER, X),
    "frozen layer": (FROZEN, X),
}


def gradient(function):
    return torch.func.grad(lambda t: function(t).square().sum())


def derivative(function):
    return lambda t: torch.func.jvp(function, (t,), (torch.ones_like(t),))[1]


def batch(function):
    return lambda t: torch.func.vmap(function)(torch.stack([t, 2 * t]))


def tangent(function):
    def run(t):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(t, t))).tangent

    return run


TRANSFORMS = {
    "grad": (gradient, NOT_DIFFERENTIATED),
    "jvp": (derivative, NO_TANGENTS),
    "vmap": (batch, NOT_BATCHED),
    "dual": (tangent, NO_TANGENTS),
}


def refusals(call: str):
    function, argument = CALLS[call]
    for name, (transform, sentence) in TRANSFORMS.items():
        if (call, name) == ("batched_experts", "grad"):
            sentence = "batched_experts has no backward"
        if (call, name) == ("trainable grouped_linear", "vmap"):
            continue  # it runs, once for each entry
        yield function, argument, transform, sentence


@pytest.mark.parametrize("call", CALLS)
def test_refused(call):
    for function, argument, transform, sentence in refusals(call):
        with pytest.raises((RuntimeError, ValueError), match=sentence):
            transform(function)(argument)


@pytest.mark.parametrize(
    ("call", "fullgraph"),
    [
        *[(call, True) for call in ("tokens", "int4", "adapters", "grouped_linear")],
        *[pytest.param(call, False, marks=pytest.mark.slow) for call in CALLS],
    ],
)
def test_refused_inside_of_a_compiled_function(call, fullgraph):
    for function, argument, transform, sentence in refusals(call):
        if transform is not tangent or not fullgraph:  # Dynamo enters no dual level
            torch._dynamo.reset()
            compiled = torch.compile(transform(function), backend="eager", fullgraph=fullgraph)
            with pytest.raises((RuntimeError, ValueError), match=sentence):
                compiled(argument)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["tokens", "int4", "batched_experts", "frozen layer"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_refused_around_a_compiled_function(call, backend):
    for function, argument, transform, sentence in refusals(call):
        torch._dynamo.reset()
        with pytest.raises((RuntimeError, ValueError), match=sentence):
            transform(torch.compile(function, backend=backend))(argument)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_refused_by_compilers(backend):
    for function, argument, transform, sentence in refusals("tokens"):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match=sentence):
            torch.compile(transform(function), backend=backend)(argument)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_tangents_are_refused_by_a_function_compiled_without(backend):
    """Also behind operators whose tangents Inductor drops."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: experts(2 * t), backend=backend)
    assert (compiled(X) - experts(2 * X)).norm() < 1e-5 * X.norm()
    with pytest.raises(RuntimeError, match=NO_TANGENTS):
        tangent(compiled)(X)


@pytest.mark.parametrize("call", ["tokens", "grouped_linear", "frozen layer"])
def test_refused_by_captured_programs(call):
    function, argument = CALLS[call]

    class Module(torch.nn.Module):
        def forward(self, t):
            return function(t)

    with torch.no_grad():
        program = torch.export.export(Module(), (argument,)).module()
    assert torch.equal(program(argument), function(argument))
    for transform, sentence in TRANSFORMS.values():
        with pytest.raises(RuntimeError, match=sentence):
            transform(program)(argument)


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_routing_has_derivatives(compiler, device):
    """Also where a kernel without any runs elsewhere, which graphs do not show at first."""
    weight, direction = W13[0, :E].to(device), torch.randn(M, K, device=device)

    def routed(t):
        weights = moe_ops.route_tokens(t, weight, TOP_K)[1]
        return (weights * moe_ops.route(t @ weight.T, TOP_K)[0]).square().sum()

    def all_of(t):
        return (
            torch.func.grad(routed)(t),
            torch.func.jvp(routed, (t,), (direction,))[1],
            torch.func.vmap(routed)(torch.stack([2 * t, t]))[1],
        )

    leaf = X.to(device).clone().requires_grad_()
    value = routed(leaf)
    (want,) = torch.autograd.grad(value, leaf)
    torch._dynamo.reset()
    run = torch.compile(all_of, backend=compiler) if compiler else all_of
    got, along, of_batch = run(leaf.detach())
    assert (got - want).norm() < 1e-5 * want.norm()
    assert (along - (want * direction).sum()).abs() < 1e-5 * want.norm() * direction.norm()
    assert (of_batch - value).abs() < 1e-5 * value.abs()


@pytest.mark.parametrize("compiler", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "constant",
    [
        lambda t: experts(X),
        lambda t: LAYER(X),
        lambda t: moe_ops.grouped_linear(X, W13, OFFSETS),
        lambda t: batched(X)[0, :1],
    ],
    ids=["experts", "layer", "grouped_linear", "batched_experts"],
)
def test_calls_that_nothing_depends_on_run(constant, compiler):
    """t.sum() * c has the gradient c.sum() everywhere."""
    want = constant(None).detach()

    def function(t):
        return t.sum() * constant(t)

    def all_of(t):
        return (
            torch.func.grad(lambda t: function(t).sum())(t),
            torch.func.jvp(function, (t,), (TANGENT,))[1],
            torch.func.vmap(function)(torch.stack([t, 2 * t])),
        )

    run = torch.compile(all_of, backend=compiler) if compiler else all_of
    torch._dynamo.reset()
    got = run(X)
    expected = (
        want.sum().expand_as(X),
        TANGENT.sum() * want,
        torch.stack([X.sum() * want, 2 * X.sum() * want]),
    )
    for a, b in zip(got, expected, strict=True):
        assert (a.detach() - b).norm() < 1e-5 * b.norm()


def test_detached_tokens_run():
    def function(t):
        with torch.no_grad():
            out = experts(t)
        return (t * out).sum()

    got = torch.func.grad(function)(X)
    assert (got - experts(X)).norm() < 1e-6 * got.norm()


def test_linearize_is_refused_where_it_would_read_too_early():
    with pytest.raises(RuntimeError, match="cannot be called inside of torch.func.linearize"):
        torch.func.linearize(lambda t: t.sum() * experts(X), X)
    with pytest.raises(RuntimeError, match="cannot be functionalized"):
        torch.func.functionalize(experts)(X)


def test_linear_operators_of_a_jvp_are_traced():
    def function(t):
        return torch.func.jvp(lambda t: t.sum() * experts(X), (t,), (TANGENT,))[1]

    traced = make_fx(function)(X)
    assert torch.equal(traced(X), function(X))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda t, w13: experts(t, w13),
        lambda t, w13: experts(t, w13, adapters=ADAPTER),
        lambda t, w13: moe_ops.grouped_linear(t, w13, OFFSETS),
    ],
    ids=["experts", "adapters", "grouped_linear"],
)
def test_vmap_runs_backward_passes(function, create_graph):
    leaves = [t.clone().requires_grad_() for t in (X, W13)]
    out = function(*leaves)
    many = torch.randn(3, *out.shape)

    def backward(grad):
        return torch.autograd.grad(out, leaves, grad, retain_graph=True, create_graph=create_graph)

    got = torch.func.vmap(backward)(many)
    for i, grad in enumerate(many):
        want = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        for a, b in zip(got, want, strict=True):
            assert (a[i] - b).norm() < 1e-5 * b.norm()


def test_outer_transforms_do_not_reach_operators_that_keep_their_own_gradients():
    """Trainable weights inside of a transform that differentiates something else."""
    x = X.clone().requires_grad_()

    def function(s):
        return (s * experts(x)).sum()

    torch.func.vmap(function)(torch.ones(2)).sum().backward()
    got, x.grad = x.grad, None
    (2 * experts(x).sum()).backward()
    assert (got - x.grad).norm() < 1e-5 * x.grad.norm()


@pytest.mark.parametrize("transform", [gradient, derivative])
@pytest.mark.parametrize(
    "function",
    [experts, lambda t: moe_ops.grouped_linear(t, W13, OFFSETS)],
    ids=["experts", "linear"],
)
def test_gradients_of_outside_are_refused_where_a_transform_hides_them(function, transform):
    """Inside of it a tensor that an operator of torch made says that it requires none."""
    x = X.clone().requires_grad_()

    def scaled(s):
        return (s * function(2 * x)).sum()

    with pytest.raises(RuntimeError, match="cannot record gradients inside of a torch.func"):
        transform(scaled)(torch.ones(()))
    with torch.no_grad():
        assert transform(scaled)(torch.ones(())).isfinite()
