"""Gradients of every argument against fp64 autograd through the oracle, eager and compiled."""

import math
import warnings

import pytest
import torch

import moe_ops
from moe_ops import activations, schemes
from moe_ops.activations import NAMES, Activation
from moe_ops.autograd import composition, training
from moe_ops.numerics import permute
from moe_ops.planning import training as planning
from tests.support import oracle
from tests.support.cases import BF16, FP16, FP32, FP64, LIMITED, Case, poisoned_memory
from tests.support.places import CUDA, ON_GPU

# Forward and backward round some ten times; as cases.TOLERANCE otherwise.
TOLERANCE = {FP64: 1e-12, FP32: 2e-5, BF16: 4 * 2.0**-8, FP16: 4 * 2.0**-11}
PLACES = [
    ("cpu", FP32),
    ("cpu", BF16),
    *[pytest.param(("cuda", dtype), marks=ON_GPU) for dtype in (BF16, FP16, FP32)],
]
everywhere = pytest.mark.parametrize(
    "where", PLACES, ids=lambda p: f"{p[0]}-{str(p[1]).removeprefix('torch.')}"
)


@pytest.fixture(autouse=True)
def plain_torch_on_cpus(monkeypatch):
    """Where the kernels of a step would be interpreted: test_fused.py is about those."""
    monkeypatch.setattr(planning, "INTERPRETED", False)


NAMES_OF_ARGS = ("hidden_states", "w13", "w2", "topk_weights")


def leaves(case: Case, dtype=None, only=None) -> dict:
    """The float arguments of a case by name, as leaves; quantized weights are left out."""
    named = dict(zip(NAMES_OF_ARGS, case.args, strict=False)) | {
        k: case.options[k] for k in ("w13_bias", "w2_bias") if k in case.options
    }
    if case.scheme:
        del named["w13"], named["w2"]
    if only is not None:
        named = {k: named[k] for k in only}
    return {k: t.detach().clone().to(dtype or t.dtype).requires_grad_() for k, t in named.items()}


def call(function, case: Case, given: dict, **options):
    named = dict(zip(NAMES_OF_ARGS, case.args, strict=False)) | {"topk_ids": case.args[4]}
    named |= case.options | given | options
    positional = [named.pop(k) for k in (*NAMES_OF_ARGS, "topk_ids")]
    return function(*positional, **named)


def cotangent(case: Case) -> torch.Tensor:
    g = torch.Generator().manual_seed(77)
    return torch.randn(case.args[0].shape, generator=g).to(case.dtype).to(case.device)


def check_captured_step(cases: list[Case], more=(), **options) -> None:
    """A training step that is captured once gives the gradients of each case, whose tokens,
    routing and cotangent are copied to where the step reads them. `more` require gradients, too.
    """
    held = cases[0]
    given, ids, grad = leaves(held), held.args[4].clone(), cotangent(held)
    want = [
        step_gradients(case, leaves(case), case.args[4], cotangent(case), more, options)
        for case in cases
    ]

    def step():
        return step_gradients(held, given, ids, grad, more, options)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for case, expected in zip(cases, want, strict=True):
        with torch.no_grad():
            for name, t in leaves(case).items():
                given[name].copy_(t)
            ids.copy_(case.args[4])
            grad.copy_(cotangent(case))
        for t in found:
            t.fill_(math.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def step_gradients(case: Case, given: dict, ids, grad, more, options) -> tuple:
    """Of one step, with these ids."""
    out = call(moe_ops.fused_experts, case, given | {"topk_ids": ids}, **options)
    return torch.autograd.grad(out, [*given.values(), *more], grad)


def expected_gradients(case: Case, only=None) -> dict:
    given = leaves(case, FP64, only)
    act = case.options["activation"]
    if isinstance(act, Activation):
        act = {k: getattr(act, k) for k in ("name", "alpha", "beta", "limit")}
    out = call(oracle.experts, case, given, activation=act)
    return dict(
        zip(
            given,
            torch.autograd.grad(out, list(given.values()), cotangent(case).double()),
            strict=True,
        )
    )


def gradients(case: Case, function=moe_ops.fused_experts, only=None) -> dict:
    given = leaves(case, only=only)
    out = call(function, case, given)
    assert out.requires_grad and out.dtype == case.dtype
    grads = torch.autograd.grad(out, list(given.values()), cotangent(case))
    return dict(zip(given, grads, strict=True))


def check(case: Case, function=moe_ops.fused_experts, only=None, within=None) -> dict:
    with poisoned_memory():
        actual = gradients(case, function, only)
    return compare(case, actual, expected_gradients(case, only), within)


def compare(case, actual, expected, within=None) -> dict:
    for name, grad in actual.items():
        assert grad.isfinite().all(), name
        allowed = max(TOLERANCE[case.dtype] if within is None else within, TOLERANCE[grad.dtype])
        if name == "topk_weights":
            allowed *= 2  # products of a row with a rounded one, of both signs: they cancel
        error = oracle.relative_error(grad, expected[name])
        assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"
    for name in ("hidden_states", "topk_weights"):
        if name in actual:
            assert (actual[name][case.nowhere] == 0).all()
    return actual


def check_both(case: Case, only=None, within=None) -> dict:
    """The result, and its gradients, which are returned."""
    with poisoned_memory():
        out = call(moe_ops.fused_experts, case, leaves(case, only=only)).detach()
    assert oracle.relative_error(out, case.reference()) <= TOLERANCE[case.dtype]
    assert (out[case.nowhere] == 0).all()
    return check(case, only=only, within=within)


# --- fused_experts -------------------------------------------------------------------------------

# of a call of one expert a token, which weighs its input, too
WEIGHED = [{"M": 9, "E": 6}, {"M": 9, "E": 6, "bias": True}]
WEIGHED.append(WEIGHED[1] | {"on_input": True, "top_k": 1})
weighed = pytest.mark.parametrize("options", WEIGHED, ids=("plain", "bias", "on_input"))


@pytest.mark.parametrize(
    "activation",
    [*NAMES, *LIMITED],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True], ids=("plain", "bias"))
def test_every_activation(where, activation, bias):
    # Derivatives jump at limits, and bf16 takes some elements of h to the other side: that alone
    # is an error of 0.02 to 0.04 with these limits, where leaving them out is one of 0.9 to 1.4.
    limited = where[1] in (BF16, FP16) and activations.resolve(activation).limit < 1
    within = 0.1 if limited else None
    case = Case(*where, activation=activation, bias=bias, top_k=3, K=48, I=40)
    check_both(case, within=within)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"bias": True, "on_input": True, "top_k": 1},
        {"bias": True, "activation": "swigluoai", "top_k": 3},  # gate and up in turns
        {"bias": True, "activation": "relu2_no_mul", "expert_map": True, "M": 20, "E": 6},
        {"on_input": True, "top_k": 1, "expert_map": True, "weights_dtype": BF16},
        {"bias": True, "M": 70, "E": 2, "K": 136, "I": 72},  # an expert has many rows
        {"expert_map": True, "M": 20, "E": 6},
        {"M": 1, "top_k": 4},
        {"M": 37, "ids_dtype": torch.int64, "weights_dtype": BF16},
        {"M": 5, "E": 40, "top_k": 1},  # most experts have no rows
        {"M": 300, "E": 2, "top_k": 2, "K": 16, "I": 8},
        # more than one tile of columns, the last not whole
        {"M": 9, "K": 1040, "I": 1032, "bias": True},
        {"M": 9, "K": 1040, "I": 1032, "on_input": True, "top_k": 1},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(where, options):
    check_both(Case(*where, **options))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_odd_sizes(dtype):
    check_both(Case("cpu", dtype, K=33, I=17))


@pytest.mark.parametrize("on_input", [False, True])
def test_experts_without_rows_get_zeros(where, on_input):
    """Also in memory that held something else, and NaN of tokens nowhere reaches nobody."""
    options = {"bias": True, "on_input": on_input, "top_k": 1 if on_input else 2}
    ids = torch.tensor([[-1, 9], [2, 2], [9, 0], [0, -7]])[:, : options["top_k"]]
    grads = check(Case(*where, M=4, ids=ids, **options))
    for name in ("w13", "w2", "w13_bias", "w2_bias"):
        assert (grads[name][[1, 3]] == 0).all() and grads[name][[0, 2]].any(1).all()
    nowhere = torch.full((5, options["top_k"]), 11, dtype=torch.int32)
    grads = gradients(Case(*where, M=5, ids=nowhere, **options))
    assert all((grad == 0).all() for grad in grads.values())


def test_all_tokens_on_one_expert(where):
    """And each twice."""
    ids = torch.full((40, 2), 2, dtype=torch.int32)
    grads = check(Case(*where, M=40, ids=ids, bias=True))
    assert grads["w13_bias"][2].any() and not grads["w13_bias"][[0, 1, 3]].any()


@pytest.mark.parametrize("options", [{}, {"on_input": True, "top_k": 1}], ids=("", "on_input"))
@pytest.mark.parametrize(
    "only", ["hidden_states", "w13", "w2", "topk_weights", "w13_bias", "w2_bias"]
)
def test_one_argument_alone(where, only, options):
    check(Case(*where, bias=True, **options), only=[only])


def test_gradients_of_biases_have_their_dtype(where):
    case = Case(*where, bias=True)
    other = FP32 if where[1] == BF16 else BF16
    for name in ("w13_bias", "w2_bias"):
        case.options[name] = case.options[name].to(other)
    grads = check(case)
    assert grads["w13_bias"].dtype == grads["w2_bias"].dtype == other


def test_strided_arguments(where):
    """Rows and columns of tokens, router weights, biases, and of the output's gradient."""
    case = Case(*where, M=11, bias=True)
    given = leaves(case)
    wide = torch.full((11, 2 * 48 + 3), math.nan, dtype=case.dtype, device=case.device)
    wide[:, 3::2] = given["hidden_states"].detach()
    wide.requires_grad_()
    weights = given["topk_weights"].detach().T.contiguous().requires_grad_()
    biases = [given[n].detach().T.contiguous().requires_grad_() for n in ("w13_bias", "w2_bias")]
    named = given | {"hidden_states": wide[:, 3::2], "topk_weights": weights.T}
    named |= {"w13_bias": biases[0].T, "w2_bias": biases[1].T}
    out = call(moe_ops.fused_experts, case, named)
    grad = cotangent(case).T.contiguous().T
    inputs = [wide, weights, given["w13"], given["w2"], *biases]
    dx, dweights, dw13, dw2, db13, db2 = torch.autograd.grad(out, inputs, grad)
    found = {"hidden_states": dx[:, 3::2], "topk_weights": dweights.T, "w13": dw13, "w2": dw2}
    found |= {"w13_bias": db13.T, "w2_bias": db2.T}
    expected = gradients(case)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_transposed_weights(where):
    """As gpt-oss stores them: (E, K, N)."""
    case = Case(*where, bias=True)
    given = leaves(case)
    stored = [given[name].detach().mT.contiguous().requires_grad_() for name in ("w13", "w2")]
    given |= {"w13": stored[0].mT, "w2": stored[1].mT}
    out = call(moe_ops.fused_experts, case, given)
    inputs = [*stored, *[given[name] for name in given if name not in ("w13", "w2")]]
    d13, d2, *others = torch.autograd.grad(out, inputs, cotangent(case))
    names = [name for name in given if name not in ("w13", "w2")]
    actual = {"w13": d13.mT, "w2": d2.mT} | dict(zip(names, others, strict=True))
    compare(case, actual, expected_gradients(case))


@weighed
def test_bitwise_repeatable_and_recomputed(where, options):
    case = Case(*where, **({"top_k": 4} | options | {"M": 40}))
    first, second = gradients(case), gradients(case)
    again = gradients(case, lambda *a, **k: moe_ops.fused_experts(*a, **k, recompute=True))
    for name in first:
        assert torch.equal(first[name], second[name]) and torch.equal(first[name], again[name])


@weighed
def test_a_nan_gradient_stays_with_its_token(where, options):
    case = Case(*where, **options)
    clean, spoiled = gradients(case), cotangent(case)
    spoiled[4] = math.nan
    given = leaves(case)
    out = call(moe_ops.fused_experts, case, given)
    found = dict(zip(given, torch.autograd.grad(out, list(given.values()), spoiled), strict=True))
    others = torch.arange(9) != 4
    assert found["hidden_states"][4].isnan().all()
    for name in ("hidden_states", "topk_weights"):
        assert torch.equal(found[name].cpu()[others], clean[name].cpu()[others])
    hit = torch.isin(torch.arange(6), case.args[4][4].cpu())
    assert hit.any()
    for name in set(given) - {"hidden_states", "topk_weights"}:
        assert found[name].cpu()[hit].isnan().any()
        assert torch.equal(found[name].cpu()[~hit], clean[name].cpu()[~hit])


def test_no_tokens():
    case = Case(M=0, bias=True)
    assert all((grad == 0).all() for grad in gradients(case).values())


PACKED = ["int8_w8a8", "int4_w4a16:g32:zp", "int4_w4a8", "nf4_w4a16:g32"]
PACKED += ["mxfp4", "mxfp6_e3m2", "mxfp8", "nvfp4"]


@everywhere
@pytest.mark.parametrize("scheme", [s for s in schemes.SCHEMES if s.startswith("fp8_")] + PACKED)
def test_quantized_experts(where, scheme):
    """Rounding of activations counts as the identity; the quantized weights take no gradient."""
    case = Case(*where, scheme=scheme, K=160, I=136, bias=True)
    grads = check(case, within=TOLERANCE[where[1]] + 2e-3)
    assert set(grads) == {"hidden_states", "topk_weights", "w13_bias", "w2_bias"}
    for w in case.args[1:3]:
        assert w.grad is None and not w.requires_grad


@everywhere
def test_forward_is_that_of_inference(where):
    case = Case(*where, scheme="fp8_tensor", bias=True, expert_map=True)
    out = call(moe_ops.fused_experts, case, leaves(case))
    assert oracle.relative_error(out, case.reference()) <= TOLERANCE[where[1]]


def test_gradcheck():
    """Finite differences in fp64: the formulas, whatever the oracle says."""
    case = Case(dtype=FP64, M=4, E=3, K=5, I=3, bias=True, activation="gelu")
    case.args[3] = case.args[3].double()
    for t in (case.args[0], case.args[3]):
        t.nan_to_num_()
    given = leaves(case)

    def function(*values):
        return call(moe_ops.fused_experts, case, dict(zip(given, values, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(given.values()))
    case.options["router_weight_on_input"] = True
    case.args[4] = case.args[4][:, :1]
    given["topk_weights"] = case.args[3][:, :1].clone().requires_grad_()
    assert torch.autograd.gradcheck(function, tuple(given.values()))


@pytest.mark.slow
def test_second_derivatives():
    """Of every argument, among them where another path reaches the input too (a gradient
    penalty)."""
    # entry by entry: some thousand entries took three minutes, and random directions (fast_mode)
    # miss one of two terms
    case = Case(dtype=FP64, bias=True, M=5, E=3, K=6, I=4)
    given = leaves(case, FP64)

    def function(*values):
        return call(moe_ops.fused_experts, case, dict(zip(given, values, strict=True)))

    assert torch.autograd.gradgradcheck(function, tuple(given.values()))

    def penalised(function, **options):
        inputs = leaves(case, FP64)
        out = call(function, case, inputs, **options)
        (first,) = torch.autograd.grad(out.sum(), inputs["hidden_states"], create_graph=True)
        loss = out.sum() + first.square().sum()
        return torch.autograd.grad(loss, inputs["w13"])[0]

    want = penalised(oracle.experts, activation="silu")
    torch.testing.assert_close(penalised(moe_ops.fused_experts), want)


@pytest.mark.slow
def test_gradients_of_inputs_that_depend_on_each_other():
    """With create_graph, too, which takes them of a graph within the outer one."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=FP64)

    x, gate = normal(5, 8).requires_grad_(), normal(4, 8)
    w13, w2, tied = normal(4, 16, 8), normal(4, 8, 8), normal(4, 8, 8).requires_grad_()
    weights, ids = torch.softmax(normal(5, 2), -1), torch.randint(0, 4, (5, 2))

    def routed(x):
        of_tokens, chosen = torch.softmax(x @ gate.T, -1).topk(2, -1)
        return moe_ops.fused_experts(x, w13, w2, of_tokens, chosen)

    def passed_twice(w):
        return moe_ops.fused_experts(x.detach(), w, w, weights, ids, activation="silu_no_mul")

    for function, leaf in ((routed, x), (passed_twice, tied)):
        (want,) = torch.autograd.grad(function(leaf).sum(), leaf)
        (got,) = torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)
        torch.testing.assert_close(got, want)
        assert torch.autograd.gradgradcheck(function, leaf)
    calls = []
    hooked = x * 1.0
    hooked.register_hook(lambda gradient: calls.append(1) or 2 * gradient)
    (got,) = torch.autograd.grad(routed(hooked).sum(), x, create_graph=True)
    (want,) = torch.autograd.grad(routed(x).sum(), x)
    torch.testing.assert_close(got, 2 * want)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["hidden_states", "w13", "topk_weights"])
def test_forward_mode_is_refused(name):
    case = Case()
    given = {k: t.detach() for k, t in leaves(case).items()}

    def function(value):
        return call(moe_ops.fused_experts, case, given | {name: value})

    tangent = torch.ones_like(given[name])
    with pytest.raises(
        RuntimeError, match="moe_ops has no forward-mode derivative .* reverse mode"
    ):
        torch.func.jvp(function, (given[name],), (tangent,))


@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_autocast(dtype):
    """Leaves get gradients in their own dtype, those of a call cast by hand."""
    case = Case(dtype=FP32, bias=True)
    only = ["hidden_states", "w13", "w2", "w13_bias", "w2_bias"]
    auto, hand = leaves(case, dtype, only), leaves(case, dtype, only)
    with torch.autocast("cpu", BF16):
        out = call(moe_ops.fused_experts, case, auto)
    to = BF16 if dtype == FP32 else FP64
    by_hand = call(moe_ops.fused_experts, case, {k: t.to(to) for k, t in hand.items()})
    assert torch.equal(out, by_hand)
    one, two = [
        torch.autograd.grad(y, list(given.values()), cotangent(case).to(to))
        for y, given in ((out, auto), (by_hand, hand))
    ]
    for a, b in zip(one, two, strict=True):
        assert a.dtype == dtype and torch.equal(a, b)


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.slow
@everywhere
@pytest.mark.parametrize("options", [{"activation": "swigluoai"}, {"on_input": True, "top_k": 1}])
def test_compiled(where, options):
    """One dynamic graph for two numbers of tokens."""
    torch._dynamo.reset()
    compiled = torch.compile(
        moe_ops.fused_experts, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for M in (6, 9):
        case = Case(*where, M=M, bias=True, **options)
        check(case, compiled)


@pytest.mark.slow
def test_compiled_quantized():
    compiled = torch.compile(moe_ops.fused_experts, fullgraph=True, backend="aot_eager")
    check(Case(scheme="fp8_block", K=160, I=136, bias=True), compiled, within=2e-3)


@pytest.mark.slow
def test_compiled_with_unbacked_tokens():
    """Not one guard on M: the graph of 5 tokens serves 11."""
    torch._dynamo.reset()
    compiled = torch.compile(moe_ops.fused_experts, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for M in (5, 11):
            case = Case(M=M, bias=True)
            given = leaves(case, only=["hidden_states", "w13", "w2"])
            weights, ids = [t.clone() for t in case.args[3:]]
            for t in (given["hidden_states"], weights, ids):
                torch._dynamo.decorators.mark_unbacked(t, 0)
            case.args[3:] = weights, ids
            out = call(compiled, case, given)
            actual = torch.autograd.grad(out, list(given.values()), cotangent(case))
            compare(case, dict(zip(given, actual, strict=True)), expected_gradients(case))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_inductor(device):
    compiled = torch.compile(moe_ops.fused_experts, fullgraph=True)
    check(Case(device, BF16 if device == "cuda" else FP32, M=6, bias=True), compiled)


# --- grouped_linear ------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize(
    "scheme", ["", "fp8_tensor", "fp8_channel", "fp8_w8a16:block", "int4_w4a8", "nvfp4"]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_grouped_linear(where, scheme, compiled):
    """Rows past the last end get zero, and their NaN reaches no weight."""
    device, dtype = where
    if compiled and (scheme or dtype != FP32):
        return
    case = Case(device, dtype, scheme, K=160, I=136, bias=True)
    w, bias = case.args[1], case.options["w13_bias"]
    _, N, K = w.shape
    x = torch.randn(12, K, generator=torch.Generator().manual_seed(5)).to(dtype).to(device)
    x[9:] = math.nan
    offsets = torch.tensor([4, 4, 5, 9], dtype=torch.int32, device=device)
    grad = torch.randn(12, N, generator=torch.Generator().manual_seed(6)).to(dtype).to(device)
    results = []
    for to, function in ((dtype, moe_ops.grouped_linear), (FP64, oracle.grouped_linear)):
        if compiled and to == dtype:
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        given = [
            t.detach().to(to).requires_grad_() for t in ((x, bias) if scheme else (x, bias, w))
        ]
        out = function(given[0], w if scheme else given[2], offsets, bias=given[1])
        results.append(torch.autograd.grad(out, given, grad.to(to)))
    for actual, expected in zip(*results, strict=True):
        assert actual.isfinite().all() and actual.dtype == dtype
        assert oracle.relative_error(actual, expected) <= TOLERANCE[dtype] + bool(scheme) * 2e-3
    assert (results[0][0][9:] == 0).all()


# --- which path runs -----------------------------------------------------------------------------


def test_training_path_only_where_gradients_are_recorded(monkeypatch):
    taken = []
    for module, name in ((training, "fused_experts"), (composition, "grouped_linear")):
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, f=function, **k: (taken.append(f), f(*a, **k))[1]
        )
    case = Case(bias=True)
    given = leaves(case)
    case.run()
    with torch.no_grad():
        assert not call(moe_ops.fused_experts, case, given).requires_grad
    with torch.inference_mode():
        call(moe_ops.fused_experts, case, given)
    quantized = Case(scheme="fp8_channel")
    quantized.args[1:3] = [torch.nn.Parameter(w, requires_grad=False) for w in quantized.args[1:3]]
    quantized.run()
    assert taken == []
    call(moe_ops.fused_experts, case, given)
    ends = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    moe_ops.grouped_linear(case.args[0], given["w13"], ends)
    assert len(taken) == 2


def test_backend_without_backward_is_refused_by_name():
    triton = pytest.importorskip("moe_ops.backends.triton.backend")
    pytest.importorskip("triton")
    device = "cuda" if CUDA else "cpu"
    if not CUDA and not triton.INTERPRETED:
        pytest.skip("triton was imported without its interpreter")
    case = Case(device)
    remedy = (
        r"backend 'triton' cannot run this call: has no backward: "
        r"wrap the call in torch.no_grad\(\) or use backend='auto' or 'torch'"
    )
    for name in NAMES_OF_ARGS:
        given = leaves(case, only=[name])
        with pytest.raises(ValueError, match=remedy):
            call(moe_ops.fused_experts, case, given, backend="triton")
        assert call(moe_ops.fused_experts, case, given, backend="torch").requires_grad
    with torch.no_grad():
        call(moe_ops.fused_experts, case, given, backend="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_warns_once_that_fast_kernels_are_left_unused(monkeypatch):
    monkeypatch.setattr(training, "_warned", False)
    case = Case("cuda", FP16)
    given = leaves(case)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        call(moe_ops.fused_experts, case, given)
    with pytest.warns(UserWarning, match=r"takes bf16, .* wrap the call in torch.no_grad\(\)"):
        call(moe_ops.fused_experts, case, given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(moe_ops.fused_experts, case, given)


# --- permute -------------------------------------------------------------------------------------


@everywhere
def test_gather_tokens(where):
    """Each token's gradient is the fp32 sum of its pairs, in their order, whatever the routing."""
    device, dtype = where
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, 5, (30, 4), generator=g).to(device)
    pairs = permute.sort_pairs(ids, 5)
    x = torch.randn(30, 16, generator=g).to(dtype).to(device).requires_grad_()
    rows = permute.gather_tokens(x, pairs)
    assert torch.equal(rows, x[pairs.order // 4])
    grad = torch.randn(120, 16, generator=g).to(dtype).to(device)
    results = [torch.autograd.grad(rows, x, grad, retain_graph=True)[0] for _ in range(3)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])
    expected = torch.zeros(30, 16, dtype=FP64, device=device)
    expected.index_add_(0, pairs.order // 4, grad.double())
    assert oracle.relative_error(results[0], expected) < TOLERANCE[dtype] / 4
    assert torch.equal(pairs.order[pairs.inverse], torch.arange(120, device=device))


@everywhere
def test_combine_reads_no_row_that_is_not_here(where):
    """Neither do its gradients: such rows and their weights hold NaN."""
    device, dtype = where
    ids = torch.tensor([[0, -1], [3, 1], [-1, -1]], device=device)
    pairs = permute.sort_pairs(ids, 3)
    y = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    y[2:] = math.nan
    weights = torch.where(pairs.valid, 0.5, math.nan)
    y.requires_grad_(), weights.requires_grad_()
    out = permute.combine(y, weights, pairs, dtype)
    expected = torch.stack((y[0] / 2, y[1] / 2, torch.zeros_like(y[0])))
    assert torch.equal(out, expected)
    dy, dweights = torch.autograd.grad(out.sum(), (y, weights))
    assert torch.equal(dy, torch.tensor([0.5, 0.5, 0, 0, 0, 0]).to(dy)[:, None].expand(6, 8))
    assert torch.equal(dweights != 0, pairs.valid)
