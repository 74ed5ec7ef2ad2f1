"""Kernels of a training step: under Triton's interpreter around products in plain torch, and on a
GPU around torch's grouped products. Every call of these tests runs through them.
"""

import functools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_ops
from moe_ops import activations
from moe_ops.activations import NAMES, Activation
from moe_ops.autograd import fused
from moe_ops.backends.cutlass import products as native
from moe_ops.environment import INTERPRETED
from moe_ops.ops.call import ExpertsCall, Weight
from moe_ops.planning import training as planning
from tests.autograd import test_gradients
from tests.autograd.test_gradients import (
    TOLERANCE,
    call,
    check_captured_step,
    compare,
    cotangent,
    expected_gradients,
    gradients,
    leaves,
)
from tests.support import oracle
from tests.support.cases import BF16, FP32, Case, poisoned_memory, refill

CUDA = torch.cuda.is_available()
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device"))
PLACES = [
    pytest.param(
        ("cpu", FP32), marks=pytest.mark.skipif(not INTERPRETED, reason="plain torch runs here")
    ),
    pytest.param(("cuda", BF16), marks=ON_GPU),
]
everywhere = pytest.mark.parametrize("where", PLACES, ids=("interpreted", "gpu"))
# of a call of one expert a token, which weighs its input, too
WEIGHED = [{"M": 9, "E": 6}, {"M": 9, "E": 6, "bias": True}]
WEIGHED.append(WEIGHED[1] | {"on_input": True, "top_k": 1})
weighed = pytest.mark.parametrize("options", WEIGHED, ids=("plain", "bias", "on_input"))


# these make no call, or one that they send elsewhere, or are skipped once they run
ELSEWHERE = (
    "test_plain_torch_and_these_kernels_read_one_another",
    "test_what_is_not_fused",
    "test_no_tensor_holds_even_one_expert",
    "test_what_is_kept_in_plain_torch",
    "test_bits_of_what_runs_beside_products",
)


@pytest.fixture(autouse=True)
def every_call_is_fused(request, monkeypatch):
    asked = []
    why_not = planning.why_not_kernels

    def noted(*args):
        asked.append(why_not(*args))
        return asked[-1]

    monkeypatch.setattr(planning, "why_not_kernels", noted)
    yield
    assert set(asked) == ({None} if asked or request.node.originalname not in ELSEWHERE else set())


def check(case: Case, only=None, within=None) -> dict:
    """The result, and its gradients."""
    with poisoned_memory():
        out = call(moe_ops.fused_experts, case, leaves(case, only=only)).detach()
    assert oracle.relative_error(out, case.reference()) <= TOLERANCE[case.dtype]
    assert (out[case.nowhere] == 0).all()
    return test_gradients.check(case, only=only, within=within)


@everywhere
@pytest.mark.parametrize(
    "activation",
    [
        *NAMES,
        Activation("silu", limit=0.7),
        Activation("swigluoai", alpha=0.9, beta=0.4, limit=0.8),
        Activation("swigluoai_uninterleave", alpha=1.3, beta=0.0, limit=0.6),
        Activation("swiglustep", limit=0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True], ids=("plain", "bias"))
def test_every_activation(where, activation, bias):
    # Derivatives jump at limits, and bf16 takes some elements of h to the other side: that alone
    # is an error of 0.02 to 0.04 with these limits, where leaving them out is one of 0.9 to 1.4.
    limited = where[1] == BF16 and activations.resolve(activation).limit < 1
    within = 0.1 if limited else None
    case = Case(*where, activation=activation, bias=bias, top_k=3, K=48, I=40)
    check(case, within=within)


@everywhere
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
    check(Case(*where, **options))


@everywhere
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


@everywhere
def test_all_tokens_on_one_expert(where):
    """And each twice."""
    ids = torch.full((40, 2), 2, dtype=torch.int32)
    grads = check(Case(*where, M=40, ids=ids, bias=True))
    assert grads["w13_bias"][2].any() and not grads["w13_bias"][[0, 1, 3]].any()


@everywhere
@pytest.mark.parametrize("options", [{}, {"on_input": True, "top_k": 1}], ids=("", "on_input"))
@pytest.mark.parametrize(
    "only", ["hidden_states", "w13", "w2", "topk_weights", "w13_bias", "w2_bias"]
)
def test_one_argument_alone(where, only, options):
    check(Case(*where, bias=True, **options), only=[only])


@everywhere
def test_gradients_of_biases_have_their_dtype(where):
    case = Case(*where, bias=True)
    other = FP32 if where[1] == BF16 else BF16
    for name in ("w13_bias", "w2_bias"):
        case.options[name] = case.options[name].to(other)
    grads = check(case)
    assert grads["w13_bias"].dtype == grads["w2_bias"].dtype == other


@everywhere
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


@everywhere
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


@everywhere
@weighed
def test_bitwise_repeatable_and_recomputed(where, options):
    case = Case(*where, **({"top_k": 4} | options | {"M": 40}))
    first, second = gradients(case), gradients(case)
    again = gradients(case, lambda *a, **k: moe_ops.fused_experts(*a, **k, recompute=True))
    for name in first:
        assert torch.equal(first[name], second[name]) and torch.equal(first[name], again[name])


@everywhere
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


@pytest.mark.skipif(not INTERPRETED, reason="plain torch runs here")
@pytest.mark.parametrize("fused_first", [True, False])
@weighed
def test_plain_torch_and_these_kernels_read_one_another(options, fused_first, monkeypatch):
    """What one of them keeps the other may find, where a hook moved weights in between."""
    monkeypatch.undo()
    case = Case("cpu", FP32, **options)
    given = leaves(case)
    monkeypatch.setattr(planning, "INTERPRETED", fused_first)
    out = call(moe_ops.fused_experts, case, given)
    monkeypatch.setattr(planning, "INTERPRETED", not fused_first)
    found = torch.autograd.grad(out, list(given.values()), cotangent(case))
    compare(case, dict(zip(given, found, strict=True)), expected_gradients(case))


BESIDE = [{}, {"recompute": True}, {"on_input": True, "top_k": 1}, {"bias": True}]
beside = pytest.mark.parametrize("options", BESIDE, ids=lambda options: "-".join(options))


def split(options: dict):
    """(those of a case, the function that takes the others)."""
    of_call = {name: options[name] for name in ("recompute",) if name in options}
    of_case = {name: value for name, value in options.items() if name not in of_call}
    return of_case, functools.partial(moe_ops.fused_experts, **of_call)


@pytest.mark.skipif(not INTERPRETED, reason="the kernels run below")
@beside
def test_what_runs_beside_products(options, monkeypatch):
    """Tokens are copied beside the product with w13, if they are not there, and rows of their
    gradients summed beside the one that gives the gradient of w13. What is written there is
    allocated before the product, and no other kernel comes between.
    """
    seen, before = [], []

    def product(name):
        run = getattr(fused.FusedStep, name)

        def noted(step, *args, **given):
            spare = given.get("spare", args[2] if name == "outer" and len(args) > 2 else 0)
            before[:] = allocated
            seen.append((name, spare))
            return run(step, *args, **given)

        monkeypatch.setattr(fused.FusedStep, name, noted)

    def rows(name, written):
        launch = getattr(fused, name)

        def noted(*args, beside=False, **given):
            seen.append((name, beside))
            to = args[written].data if name == "scatter" else args[written]
            assert not beside or any(to is t for t in before)
            return launch(*args, **given)  # the interpreter knows no kernel beside another

        monkeypatch.setattr(fused, name, noted)

    allocated = []
    for name in ("rows", "sums"):
        make = getattr(fused.FusedStep, name)

        def noted(step, *args, make=make):
            allocated.append(make(step, *args))
            return allocated[-1]

        monkeypatch.setattr(fused.FusedStep, name, noted)
    product("multiply")
    product("outer")
    rows("scatter", 1)
    rows("combine_rows", 0)
    dot = fused.dot
    monkeypatch.setattr(fused, "dot", lambda *args: seen.append(("dot", False)) or dot(*args))
    monkeypatch.setattr(fused.FusedStep, "spare", 6)
    of_case, step = split(options)
    test_gradients.check(Case("cpu", M=9, E=6, **of_case), step)
    want = [("multiply", 6), ("scatter", True)]
    if "recompute" in options:  # the rows are there
        want = [("multiply", 0)]
    if "on_input" in options:
        want.append(("dot", False))
    want += [("outer", 6), ("combine_rows", True)]
    assert seen[-len(want) :] == want


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@beside
def test_bits_of_what_runs_beside_products(options, monkeypatch):
    """In memory that is used again and again, with tokens and routing that change."""
    if native.kernels(0) is None:
        pytest.skip("needs the kernels of backend cutlass")
    monkeypatch.setattr(native, "SPARE_FROM", 0)
    asked = []
    for name in ("scatter", "combine_rows"):
        launch = getattr(fused, name)

        def noted(*args, launch=launch, **given):
            one = launch(*args, **given)
            asked.append(one.named()["BESIDE"])
            return one

        monkeypatch.setattr(fused, name, noted)
    of_case, step = split(options)
    sizes = {"E": 32, "K": 1024, "I": 384, "top_k": 4} | of_case
    for seed in range(8):
        case = Case("cuda", BF16, M=2048 + 700 * (seed % 3), **sizes)
        refill(case, seed)
        found = []
        for up_to in (0, 4096, 4096):
            monkeypatch.setattr(native, "SPARE_UP_TO", up_to)
            asked.clear()
            found.append(gradients(case, step))
            assert any(asked) == (up_to > 0)
        for name, want in found[0].items():
            assert torch.isfinite(want).all()
            assert torch.equal(found[1][name], want) and torch.equal(found[2][name], want), name


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_captured_step_has_kernels_beside_products(monkeypatch):
    monkeypatch.setattr(native, "SPARE_FROM", 0)
    sizes = {"M": 300, "E": 8, "top_k": 2, "K": 512, "I": 256}
    check_captured_step([Case("cuda", BF16, **sizes, seed=seed) for seed in range(3)])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_captured_step_follows_the_routing():
    check_captured_step(
        [Case("cuda", BF16, M=64, E=8, top_k=2, bias=True, seed=seed) for seed in (0, 1)]
    )


def test_what_is_not_fused(monkeypatch):
    """Each call in plain torch has its reason."""
    monkeypatch.undo()
    x = torch.randn(4, 16, dtype=BF16)
    w13, w2 = torch.randn(3, 16, 16, dtype=BF16), torch.randn(3, 16, 8, dtype=BF16)
    weights, ids = torch.rand(4, 2), torch.zeros(4, 2, dtype=torch.int32)
    silu = activations.resolve("silu")
    plain = ExpertsCall(
        x, Weight(w13), Weight(w2), weights, ids, None, None, None, silu, False, True, True
    )
    reasons = {
        "not on a CUDA device": plain,
        "a scale of all activations": plain._replace(
            w13=Weight(w13, scheme="fp8_tensor"), w2=Weight(w2, scheme="fp8_tensor")
        ),
        "activation scales of their own": plain._replace(
            w13=Weight(w13, activation_scale=torch.ones(3), scheme="fp8_tensor_static"),
            w2=Weight(w2, scheme="fp8_tensor_static"),
        ),
        "two schemes, of which one quantizes": plain._replace(w13=Weight(w13, scheme="fp8_block")),
        "no tokens": plain._replace(topk_ids=ids[:0]),
    }
    with FakeTensorMode():  # a call on those of a GPU is traced on any machine
        size = {"dtype": BF16, "device": "cuda"}
        w13, w2 = Weight(torch.empty(3, 16, 16, **size)), Weight(torch.empty(3, 16, 8, **size))
        fake = plain._replace(hidden_states=torch.empty(4, 16, **size), w13=w13, w2=w2)
        half = fake._replace(hidden_states=fake.hidden_states.half())
    reasons["weights have no addresses"] = fake
    reasons["takes bf16, not torch.float16"] = half
    for reason, one in reasons.items():
        found = planning.why_not_kernels(one)
        assert found is not None and reason in found
