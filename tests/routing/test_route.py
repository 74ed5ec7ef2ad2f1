"""Routing: values against an fp64 oracle written row by row, transformers' own routers,
tracing."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from moe_ops.routing.methods import RECIPES, RoutingMethod
from moe_ops.routing.route import route, router_probabilities

# method -> (scoring, divide by the sum, takes a bias, takes groups)
METHODS = {
    "default": ("softmax", False, True, True),
    "renormalize": ("softmax", True, False, False),
    "renormalize_naive": ("softmax", True, True, True),
    "deepseek_v3": ("sigmoid", True, True, True),
    "grouped_softmax": ("softmax", False, True, True),
    "grouped_softmax_renormalize": ("softmax", True, True, True),
    "llama4": ("sigmoid", False, False, False),
    "sigmoid": ("sigmoid", False, True, True),
    "sigmoid_renormalize": ("sigmoid", True, True, True),
    "topk": ("none", False, False, False),
    "sqrtsoftplus": ("sqrtsoftplus", True, True, True),
}
NEEDS_BIAS = ("deepseek_v3", "sqrtsoftplus")
NEEDS_GROUPS = ("grouped_softmax", "grouped_softmax_renormalize")


def oracle(
    logits, top_k, method, *, groups=1, kept=1, bias=None, scale=1.0, scoring=None, chosen=None
):
    """Weights and ids in Python floats, one token and one expert at a time; `chosen` are ids that
    were recorded."""
    default_scoring, renormalize, _, _ = METHODS[method]
    scoring = scoring or default_scoring
    all_weights, all_ids = [], []
    for m, row in enumerate(logits.double().tolist()):
        row = [-math.inf if math.isnan(x) else x for x in row]
        if scoring == "softmax":
            top = max(row)
            exps = [0.0 if x == -math.inf else math.exp(x - top) for x in row]
            scores = [e / sum(exps) if sum(exps) else 0.0 for e in exps]
        elif scoring == "sigmoid":
            scores = [0.0 if x == -math.inf else 1 / (1 + math.exp(-x)) for x in row]
        elif scoring == "sqrtsoftplus":
            scores = [
                0.0 if x == -math.inf else math.sqrt(math.log1p(math.exp(-abs(x))) + max(x, 0.0))
                for x in row
            ]
        else:
            scores = [0.0 if x == -math.inf else x for x in row]
        if bias is None:
            key = row
        else:
            key = [
                s + b if x > -math.inf else -math.inf
                for x, s, b in zip(row, scores, bias.double().tolist(), strict=True)
            ]
        size = len(row) // groups
        values = []
        for g in range(groups):
            members = sorted(key[g * size : (g + 1) * size], reverse=True)
            best = [k for k in members[: 1 if bias is None else 2] if k > -math.inf]
            values.append(sum(best) if best else -math.inf)  # one candidate keeps its score
        best_groups = sorted(range(groups), key=lambda g: -values[g])[:kept]
        open_experts = [e for e in range(len(row)) if e // size in best_groups]
        ids = sorted(open_experts, key=lambda e: -key[e])[:top_k]
        if chosen is not None:
            ids = [e if 0 <= e < len(row) else -1 for e in chosen[m].tolist()]
        weights = [scores[e] if e >= 0 else 0.0 for e in ids]
        if renormalize:
            weights = [w / (sum(weights) + 1e-20) for w in weights]
        all_weights.append([scale * w for w in weights])
        all_ids.append(ids)
    return torch.tensor(all_weights, dtype=torch.float64), torch.tensor(all_ids)


def options(method, num_experts, *, grouped, biased, generator=None):
    """Keyword arguments for route and for the oracle."""
    _, _, takes_bias, takes_groups = METHODS[method]
    bias = None
    if method in NEEDS_BIAS or (biased and takes_bias):
        bias = torch.randn(num_experts, generator=generator)
    ours, theirs = {"correction_bias": bias}, {"bias": bias}
    if method in NEEDS_GROUPS or (grouped and takes_groups):
        ours |= {"num_expert_groups": 4, "topk_groups": 2}
        theirs |= {"groups": 4, "kept": 2}
    return ours, theirs


def check(result, expected):
    weights, ids = result
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    assert torch.equal(ids.cpu().long(), expected[1])
    # a softmax over E terms and a division: a few fp32 roundings
    torch.testing.assert_close(weights.cpu().double(), expected[0], rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_values(method, biased, grouped):
    logits = 2 * torch.randn(9, 16)
    top_k = 1 if method == "llama4" else 5
    ours, theirs = options(method, 16, grouped=grouped, biased=biased)
    result = route(logits, top_k, method, scaling_factor=2.5, **ours)
    check(result, oracle(logits, top_k, method, scale=2.5, **theirs))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("method", ["default", "renormalize_naive"])
def test_scoring_can_be_named(method, scoring):
    logits, bias = torch.randn(5, 12), torch.randn(12)
    groups = {"num_expert_groups": 3, "topk_groups": 2}
    result = route(logits, 3, method, scoring=scoring, correction_bias=bias, **groups)
    check(result, oracle(logits, 3, method, scoring=scoring, bias=bias, groups=3, kept=2))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_recorded_experts_are_weighted_anew(method, biased, grouped):
    logits = 2 * torch.randn(9, 16)
    logits[3, 5] = math.nan  # no candidate: it has weight 0
    top_k = 1 if method == "llama4" else 5
    ours, theirs = options(method, 16, grouped=grouped, biased=biased)
    weights, ids = route(logits, top_k, method, scaling_factor=2.5, **ours)
    # what was chosen gets the same bits again
    again = route(logits, top_k, method, scaling_factor=2.5, **ours, topk_ids=ids.long())
    assert torch.equal(again[0], weights) and torch.equal(again[1], ids)
    # and others what the formula gives them; ids of no expert count nothing, and divide nothing
    chosen = torch.rand(9, 16).argsort(1)[:, :top_k]
    chosen[3, 0] = 5
    chosen[1, 0], chosen[2, -1], chosen[4, 0] = -1, 16, 2**32 + 3
    result = route(logits, top_k, method, scaling_factor=2.5, **ours, topk_ids=chosen)
    check(result, oracle(logits, top_k, method, scale=2.5, **theirs, chosen=chosen))


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_recorded_experts(method):
    """Those of the formula in fp64, written as sums over the experts chosen."""
    logits = 2 * torch.randn(6, 8, dtype=torch.float64)
    top_k = 1 if method == "llama4" else 3
    ours, _ = options(method, 8, grouped=False, biased=False)
    chosen = torch.rand(6, 8).argsort(1)[:, :top_k]
    chosen[1, -1] = -1
    here, factor = chosen >= 0, torch.randn(6, top_k, dtype=torch.float64)
    scoring, renormalize, _, _ = METHODS[method]

    def formula(x):
        scores = {
            "softmax": lambda: x.softmax(1),
            "sigmoid": lambda: x.sigmoid(),
            "none": lambda: x,
            "sqrtsoftplus": lambda: torch.nn.functional.softplus(x).sqrt(),
        }[scoring]()
        of_chosen = torch.where(here, scores.gather(1, chosen.clamp(min=0)), 0)
        return of_chosen / (of_chosen.sum(1, keepdim=True) + 1e-20) if renormalize else of_chosen

    gradients = []
    for x, run in (
        (logits, formula),
        (logits.float(), lambda x: route(x, top_k, method, **ours, topk_ids=chosen)[0]),
    ):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((run(leaf) * factor).sum(), leaf)
        gradients.append(gradient.double())
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_recorded_experts_of_methods_without_a_formula():
    logits, ids = torch.randn(3, 8), torch.tensor([[0, 7], [-1, 3], [8, 1]])
    weights, known = route(logits, 2, "simulated", scaling_factor=3.0, topk_ids=ids)
    assert torch.equal(weights, torch.tensor([[1.5, 1.5], [0, 1.5], [0, 1.5]]))
    assert torch.equal(known, torch.tensor([[0, 7], [-1, 3], [-1, 1]], dtype=torch.int32))
    with pytest.raises(ValueError, match="topk_ids must be None for a callable"):
        route(logits, 2, lambda x, k: x, topk_ids=ids)
    for wrong, message in (
        (ids.short(), "topk_ids must be int32 or int64, got torch.int16"),
        (
            ids[:2],
            r"topk_ids must have shape \(M, top_k=2\) for router_logits \(3, 8\), got \(2, 2\)",
        ),
        (ids[:, :1], r"got \(3, 1\)"),
        (ids.tolist(), "topk_ids must be a torch.Tensor"),
        (ids.to("meta"), "topk_ids must be on the device of router_logits, cpu, got meta"),
    ):
        with pytest.raises(ValueError, match=message):
            route(logits, 2, topk_ids=wrong)


def test_recorded_experts_compile_to_one_graph():
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def run(logits, ids):
        return route(logits, 2, "deepseek_v3", correction_bias=torch.ones(8), topk_ids=ids)

    for M in (5, 2, 64):
        logits, ids = torch.randn(M, 8), torch.randint(-1, 9, (M, 2))
        for t in (logits, ids):
            torch._dynamo.decorators.mark_unbacked(t, 0)
        expected = route(logits, 2, "deepseek_v3", correction_bias=torch.ones(8), topk_ids=ids)
        for got, want in zip(run(logits, ids), expected, strict=True):
            assert torch.equal(got, want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("method", ["renormalize", "topk", "simulated"])
def test_ids_of_one_token_have_the_strides_of_many(method):
    """Which a graph that was traced with many expects."""
    for M in (1, 3):
        for found in route(torch.randn(M, 8), 2, method):
            assert found.stride() == (2, 1)


def test_every_method_has_a_test():
    routed_otherwise = {"custom", "simulated", "unspecified"}
    assert set(METHODS) == {str(method) for method in RECIPES}
    assert set(METHODS) | routed_otherwise == {str(method) for method in RoutingMethod}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_and_any_logits(data):
    """Ties, NaN, infinities, empty batches: ids are distinct and valid, values are the
    oracle's."""
    method = data.draw(st.sampled_from(list(METHODS)))
    _, _, takes_bias, takes_groups = METHODS[method]
    groups = data.draw(st.integers(1, 4)) if takes_groups else 1
    size = data.draw(st.integers(1, 5))
    num_experts = groups * size
    kept = data.draw(st.integers(1, groups))
    top_k = 1 if method == "llama4" else data.draw(st.integers(1, kept * size))
    rows = data.draw(st.integers(0, 4))
    values = st.sampled_from([0.0, -0.0, 0.5, 1.0, -3.0, 30.0, -30.0, math.nan, -math.inf])
    flat = data.draw(st.lists(values, min_size=rows * num_experts, max_size=rows * num_experts))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    logits = torch.tensor(flat, dtype=dtype).reshape(rows, num_experts)
    biased = takes_bias and (method in NEEDS_BIAS or data.draw(st.booleans()))
    # powers of two keep the order of biased scores and of their sums clear of fp32 rounding
    bias = None
    if biased:
        bias = 8.0 * 2.0 ** torch.tensor(data.draw(st.permutations(range(num_experts)))).float()
    kwargs = {"correction_bias": bias}
    if takes_groups:
        kwargs |= {"num_expert_groups": groups, "topk_groups": kept}
    weights, ids = route(logits, top_k, method, **kwargs)
    assert weights.shape == ids.shape == (rows, top_k)
    expected_weights, expected_ids = oracle(
        logits, top_k, method, groups=groups, kept=kept, bias=bias
    )
    for row in range(rows):
        assert len(set(ids[row].tolist())) == top_k
        assert ids[row].tolist() == expected_ids[row].tolist()
        torch.testing.assert_close(
            weights[row].double(), expected_weights[row], rtol=2e-6, atol=1e-18
        )


def test_groups_with_one_candidate_have_its_score():
    """Of logits that mask the others, as the sigmoid of -inf is 0."""
    masked = torch.tensor([[-5.0, -5.0, 5.0, -math.inf], [math.nan, 1.0, 2.0, -2.0]])
    groups = {"num_expert_groups": 2, "topk_groups": 1}
    _, ids = route(masked, 1, "deepseek_v3", correction_bias=torch.zeros(4), **groups)
    assert ids.flatten().tolist() == [2, 2]
    absent = torch.tensor([[-math.inf, -math.inf, -9.0, -math.inf]])
    _, ids = route(absent, 1, "deepseek_v3", correction_bias=torch.zeros(4), **groups)
    assert ids.item() == 2


def test_ties_go_to_the_lower_index():
    logits = torch.zeros(3, 64)
    logits[1, 40] = logits[1, 7] = 1.0
    logits[2, 1::2] = -0.0
    _, ids = route(logits, 4)
    assert ids.tolist() == [[0, 1, 2, 3], [7, 40, 0, 1], [0, 1, 2, 3]]
    _, ids = route(
        torch.zeros(1, 64),
        4,
        "deepseek_v3",
        num_expert_groups=8,
        topk_groups=3,
        correction_bias=torch.zeros(64),
    )
    assert ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("method", METHODS)
def test_nan_rows_get_valid_ids_and_no_weight(method):
    logits = torch.randn(4, 16)
    logits[0] = math.nan
    logits[1, 2:] = math.nan
    logits[2] = -math.inf
    top_k = 1 if method == "llama4" else 4
    kwargs, _ = options(method, 16, grouped=False, biased=True)
    logits.requires_grad_()
    weights, ids = route(logits, top_k, method, **kwargs)
    assert ((ids >= 0) & (ids < 16)).all()
    assert (weights[0] == 0).all()
    assert (weights[2] == 0).all()
    assert set(ids[1, :2].tolist()) <= {0, 1}
    assert weights.isfinite().all()
    weights.sum().backward()
    assert logits.grad.isfinite().all()


def test_nan_bias_gives_valid_ids():
    bias = torch.full((8,), math.nan)
    bias[5] = 0.0
    _, ids = route(torch.randn(2, 8), 3, "sigmoid", correction_bias=bias)
    assert ids.tolist() == [[5, 0, 1], [5, 0, 1]]


def test_strides_and_dtypes():
    base = torch.randn(16, 10, dtype=torch.float64)
    expected = oracle(base.float()[:, ::2].T, 3, "renormalize")
    check(route(base.float()[:, ::2].T, 3), expected)
    check(route(base[:, ::2].T, 3), expected)
    half = base.bfloat16()[:, ::2].T
    check(route(half, 3), oracle(half, 3, "renormalize"))


@pytest.mark.parametrize("method", METHODS)
def test_gradient(method):
    """Against fp64 autograd of the formula at the same ids."""
    scoring, renormalize, _, _ = METHODS[method]
    top_k = 1 if method == "llama4" else 3
    kwargs, _ = options(method, 8, grouped=False, biased=True)
    logits = torch.randn(5, 8, requires_grad=True)
    weights, ids = route(logits, top_k, method, scaling_factor=1.5, **kwargs)
    upstream = torch.randn_like(weights)
    (grad,) = torch.autograd.grad(weights, logits, upstream)
    x = logits.detach().double().requires_grad_()
    scores = {
        "softmax": lambda: x.exp() / x.exp().sum(-1, keepdim=True),
        "sigmoid": lambda: 1 / (1 + (-x).exp()),
        "sqrtsoftplus": lambda: (1 + x.exp()).log().sqrt(),
        "none": lambda: x,
    }[scoring]().gather(1, ids.long())
    if renormalize:
        scores = scores / scores.sum(-1, keepdim=True)
    (expected,) = torch.autograd.grad(1.5 * scores, x, upstream.double())
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-6)


def test_custom():
    def first_experts(logits, top_k):
        ids = torch.arange(top_k).expand(logits.shape[0], top_k)
        return logits.gather(1, ids), ids

    logits = torch.randn(3, 5, dtype=torch.bfloat16)
    weights, ids = route(logits, 2, first_experts, scaling_factor=2.0)
    assert torch.equal(weights, logits[:, :2].float() * 2)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, torch.tensor([[0, 1]] * 3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"topk_weights .* must have shape \(M, top_k=2\).*got"):
        route(logits, 2, lambda x, k: (x, x))
    with pytest.raises(ValueError, match=r"must have shape \(M, top_k=2\)"):
        route(logits, 2, lambda x, k: (x[1:, :2], x[1:, :2]))


def test_simulated_is_uniform_and_seeded():
    logits = torch.full((2000, 8), math.nan)
    weights, ids = route(
        logits, 3, "simulated", scaling_factor=2.0, generator=torch.Generator().manual_seed(1)
    )
    torch.testing.assert_close(weights, torch.full((2000, 3), 2 / 3))
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    # 750 expected an expert, standard deviation 21.7
    assert (torch.bincount(ids.flatten(), minlength=8) - 750).abs().max() < 5 * 21.7
    again = route(logits, 3, "simulated", generator=torch.Generator().manual_seed(1))
    assert torch.equal(ids, again[1])
    other = route(logits, 3, "simulated", generator=torch.Generator().manual_seed(2))
    assert not torch.equal(ids, other[1])


def test_router_probabilities():
    logits = torch.randn(4, 8)
    softmax = torch.softmax(logits.double(), -1)
    sigmoid = torch.sigmoid(logits.double())
    for method, scoring, expected in (
        ("renormalize", None, softmax),
        ("topk", None, softmax),
        (lambda x, k: None, None, softmax),
        ("deepseek_v3", None, sigmoid / sigmoid.sum(-1, keepdim=True)),
        ("default", "sigmoid", sigmoid / sigmoid.sum(-1, keepdim=True)),
    ):
        got = router_probabilities(logits, method, scoring)
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)


BIAS8 = torch.zeros(8)
GROUPED = {"num_expert_groups": 4, "topk_groups": 2}
SIGMOID_BIASED = {"method": "deepseek_v3", "correction_bias": BIAS8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"router_logits": torch.zeros(3)},
            r"router_logits must have shape \(M, E\), got a 1-D tensor; .*unsqueeze\(0\)",
        ),
        ({"router_logits": torch.zeros(1, 8, dtype=torch.int64)}, "must be floating point"),
        ({"router_logits": [[0.0] * 8]}, "router_logits must be a torch.Tensor, got list"),
        ({"router_logits": None}, "router_logits must be a torch.Tensor, got NoneType"),
        ({"correction_bias": [0.0] * 8}, "correction_bias must be a torch.Tensor, got list"),
        ({"top_k": 0}, r"top_k must be in 1..E=8, got 0"),
        ({"top_k": 2.0}, r"top_k must be an integer, got 2.0"),
        ({"top_k": "2"}, r"top_k must be an integer, got '2'"),
        ({"top_k": None}, r"top_k must be an integer, got None"),
        ({"top_k": True}, r"top_k must be an integer, got True"),
        ({"scaling_factor": "2"}, r"scaling_factor must be a number, got '2'"),
        ({"scaling_factor": None, "method": "simulated"}, r"scaling_factor must be a number"),
        (
            {"method": "sigmoid", "num_expert_groups": 4.0, "topk_groups": 2},
            "num_expert_groups must be an integer, got 4.0",
        ),
        ({"top_k": 9}, r"top_k must be in 1..E=8, got 9"),
        ({"method": "renormalise"}, "got 'renormalise'; did you mean 'renormalize' or"),
        ({"method": "softmax"}, "must be one of default, .*sqrtsoftplus, .*got 'softmax'"),
        ({"method": "unspecified"}, "must be a callable .*got 'unspecified'"),
        ({"method": "custom"}, "must be a callable .*got 'custom'"),
        ({"method": "llama4"}, "top_k must be 1 for method 'llama4', got 2"),
        ({"method": "deepseek_v3"}, "correction_bias must be given for method 'deepseek_v3'"),
        ({"method": "sqrtsoftplus"}, "correction_bias must be given"),
        ({"method": "sigmoid", "correction_bias": torch.zeros(7)}, r"\(E=8,\), got \(7,\)"),
        ({"method": "sigmoid", "correction_bias": BIAS8.to("meta")}, "on the device of router"),
        ({"correction_bias": BIAS8}, "correction_bias must not be given for method 'renormalize'"),
        ({"method": "topk", **GROUPED}, "num_expert_groups must not be given for method 'topk'"),
        ({"method": "simulated", "scoring": "sigmoid"}, "scoring must not be given .*'simulated'"),
        ({"method": lambda x, k: x, **GROUPED}, "must not be given for method 'custom'"),
        ({"method": "grouped_softmax"}, "num_expert_groups must be given"),
        ({"method": "default", "topk_groups": 1}, "must be given together"),
        ({**SIGMOID_BIASED, "num_expert_groups": 4}, "must be given together"),
        ({**SIGMOID_BIASED, "num_expert_groups": 3, "topk_groups": 1}, "must divide E=8, got 3"),
        ({**SIGMOID_BIASED, "num_expert_groups": 0, "topk_groups": 1}, "must divide E=8, got 0"),
        ({**SIGMOID_BIASED, "num_expert_groups": 4, "topk_groups": 5}, "1..num_expert_groups=4"),
        ({**SIGMOID_BIASED, "num_expert_groups": 8, "topk_groups": 1}, "at most the 1 experts"),
        ({"scoring": "sigmoid"}, "scoring must be 'softmax' or None for method 'renormalize'"),
        ({"method": "default", "scoring": "sigmod"}, "'sigmod'; did you mean 'sigmoid'?"),
        ({"method": "default", "scoring": "tanh"}, "scoring must be one of softmax, .*'tanh'"),
        ({"generator": torch.Generator()}, "generator must be None: only method 'simulated'"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        route(**({"router_logits": torch.zeros(2, 8), "top_k": 2} | arguments))


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_of_every_kind_are_taken(dynamic):
    logits = torch.randn(3, 8)
    expected = route(logits, 2, scaling_factor=3.0)
    for top_k, factor in ((np.int64(2), np.float32(3)), (2, 3)):
        for got, want in zip(route(logits, top_k, scaling_factor=factor), expected, strict=True):
            assert torch.equal(got, want)
    torch._dynamo.reset()
    compiled = torch.compile(route, backend="eager", fullgraph=True, dynamic=dynamic)
    for factor in (1.5, 2.5, 3.0):  # the second value makes a symbol of it
        got = compiled(logits, 2, scaling_factor=factor)
    assert all(map(torch.equal, got, expected))
    torch._dynamo.reset()


def test_bad_input_says_the_same_while_compiling():
    compiled = torch.compile(route, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"top_k must be in 1..E=8, got 9"):
        compiled(torch.zeros(2, 8), 9)


@pytest.mark.sweep
@pytest.mark.parametrize("mark", ["dynamic", "unbacked"])
@pytest.mark.parametrize("method", [*METHODS, "simulated", "callable"])
def test_one_graph_for_every_number_of_tokens(method, mark):
    def custom(logits, top_k):
        ids = logits.argsort(-1)[:, :top_k]
        return logits.gather(1, ids), ids

    kwargs = {}
    if method in METHODS:
        kwargs, _ = options(method, 16, grouped=True, biased=True)
    top_k = 1 if method == "llama4" else 3
    method = custom if method == "callable" else method
    counter = CompileCounter()
    compiled = torch.compile(route, backend=counter, fullgraph=True)
    for rows in (5, 2, 33):
        logits = torch.randn(rows, 16)
        if mark == "dynamic":
            torch._dynamo.mark_dynamic(logits, 0)
        else:
            torch._dynamo.decorators.mark_unbacked(logits, 0)
        weights, ids = compiled(logits, top_k, method, **kwargs)
        if method != "simulated":
            expected = route(logits, top_k, method, **kwargs)
            assert torch.equal(ids, expected[1])
            torch.testing.assert_close(weights, expected[0])
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_unbacked_through_aot_autograd():
    logits = torch.randn(6, 16, requires_grad=True)
    torch._dynamo.decorators.mark_unbacked(logits, 0)
    compiled = torch.compile(route, backend="aot_eager", fullgraph=True)
    weights, _ = compiled(logits, 3, "renormalize")
    (grad,) = torch.autograd.grad(weights[:, 0].sum(), logits)
    expected, _ = route(logits, 3, "renormalize")
    (expected_grad,) = torch.autograd.grad(expected[:, 0].sum(), logits)
    torch.testing.assert_close(grad, expected_grad)
    torch._dynamo.reset()


# transformers' own routers: (module, class, configuration, our arguments)
E, H, TOP_K = 16, 24, 4
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
OUR_GROUPS = {"num_expert_groups": 4, "topk_groups": 2, "scaling_factor": 2.5}
ROUTERS = [
    ("mixtral", "MixtralTopKRouter", {}, {"method": "renormalize"}),
    ("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}, {"method": "renormalize"}),
    ("qwen2_moe", "Qwen2MoeTopKRouter", {"norm_topk_prob": False}, {"method": "default"}),
    ("olmoe", "OlmoeTopKRouter", {"norm_topk_prob": True}, {"method": "renormalize_naive"}),
    ("gpt_oss", "GptOssTopKRouter", {}, {"method": "renormalize"}),
    (
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        {**GROUPS, "topk_method": "group_limited_greedy"},
        {"method": "grouped_softmax", **OUR_GROUPS},
    ),
    (
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        {**GROUPS, "norm_topk_prob": True},
        {"method": "deepseek_v3", **OUR_GROUPS},
    ),
    (
        "glm4_moe",
        "Glm4MoeTopkRouter",
        {**GROUPS, "norm_topk_prob": False},
        {"method": "sigmoid", **OUR_GROUPS},
    ),
    (
        "deepseek_v4",
        "DeepseekV4TopKRouter",
        {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5},
        {"method": "sqrtsoftplus", "scaling_factor": 1.5},
    ),
    ("minimax_m2", "MiniMaxM2TopKRouter", {}, {"method": "sigmoid_renormalize"}),
    (
        "longcat_flash",
        "LongcatFlashTopkRouter",
        {"n_routed_experts": E, "zero_expert_num": 0, "routed_scaling_factor": 6.0},
        {"method": "default", "scaling_factor": 6.0},
    ),
    ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", {}, {"method": "renormalize_naive"}),
]


def make_router(family, name, fields):
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    config = SimpleNamespace(
        num_experts_per_tok=TOP_K,
        num_experts=E,
        num_local_experts=E,
        hidden_size=H,
        moe_norm_min=1e-12,
        moe_num_experts=E,
        **fields,
    )
    router = getattr(module, name)(config)
    for tensor in router.state_dict().values():  # zeros or uninitialised otherwise
        tensor.normal_()
    return router


@pytest.mark.parametrize(("family", "name", "fields", "ours"), ROUTERS)
def test_equals_the_router_of_transformers(family, name, fields, ours):
    router = make_router(family, name, fields)
    x = torch.randn(1, 64, H)
    bias = getattr(router, "e_score_correction_bias", None)
    if family == "ernie4_5_moe":
        bias = router.moe_statics.e_score_correction_bias.squeeze()
    with torch.no_grad():
        if family == "minimax_m2":
            bias = torch.randn(E)
            logits, weights, ids = router(x[0], bias)
        else:
            logits, weights, ids = router(x if family == "deepseek_v4" else x[0])
        got_weights, got_ids = route(logits, TOP_K, correction_bias=bias, **ours)
    # some of them do not sort, so compare by expert
    theirs = torch.zeros(64, E).scatter(1, ids, weights.float())
    mine = torch.zeros(64, E).scatter(1, got_ids.long(), got_weights)
    torch.testing.assert_close(mine, theirs, rtol=5e-6, atol=1e-7)
    assert torch.equal(mine != 0, theirs != 0)


def test_equals_the_router_of_llama4():
    module = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    config = SimpleNamespace(hidden_size=H, num_local_experts=E, num_experts_per_tok=1)
    router = module.Llama4Router(config)
    with torch.no_grad():
        scores, logits = router(torch.randn(32, H))
        weights, ids = route(logits, 1, "llama4")
    torch.testing.assert_close(torch.zeros(32, E).scatter(1, ids.long(), weights), scores)


@pytest.mark.gpu
def test_gpu_gradients_take_the_torch_path():
    logits = torch.randn(9, 16, device="cuda", requires_grad=True)
    weights, _ = route(logits, 3)
    (grad,) = torch.autograd.grad(weights[:, 0].sum(), logits)
    on_cpu = logits.detach().cpu().requires_grad_()
    (expected,) = torch.autograd.grad(route(on_cpu, 3)[0][:, 0].sum(), on_cpu)
    torch.testing.assert_close(grad.cpu(), expected)
