"""Kernels of a training step: what they run beside products, in CUDA graphs, and beside plain
torch. test_gradients.py has their values.
"""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_ops
from moe_ops import activations
from moe_ops.autograd import fused
from moe_ops.backends.cutlass import products as native
from moe_ops.backends.torch import grouped_mm
from moe_ops.environment import INTERPRETED
from moe_ops.ops.call import ExpertsCall, GroupedCall, Weight
from moe_ops.ops.options import Options
from moe_ops.planning import training as planning
from tests.autograd import test_gradients, test_lora
from tests.autograd.conftest import on_gpu
from tests.autograd.test_gradients import (
    call,
    check_captured_step,
    compare,
    cotangent,
    expected_gradients,
    gradients,
    leaves,
    weighed,
)
from tests.support.cases import BF16, FP32, Case, refill
from tests.support.stand_ins import stand_ins

CUDA = torch.cuda.is_available()


@pytest.mark.skipif(not INTERPRETED, reason="plain torch runs here")
@pytest.mark.parametrize("fused_first", [True, False])
@weighed
def test_plain_torch_and_these_kernels_read_one_another(options, fused_first, monkeypatch):
    """What one of them keeps the other may find, where a hook moved weights in between."""
    case = Case("cpu", FP32, **options)
    given = leaves(case)
    monkeypatch.setattr(planning, "INTERPRETED", fused_first)
    out = call(moe_ops.fused_experts, case, given)
    monkeypatch.setattr(planning, "INTERPRETED", not fused_first)
    found = torch.autograd.grad(out, list(given.values()), cotangent(case))
    compare(case, dict(zip(given, found, strict=True)), expected_gradients(case))


@pytest.mark.skipif(not INTERPRETED, reason="kernels of csrc/cutlass need a GPU")
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"bias": True, "activation": "swigluoai"}], ids=str
)
def test_products_that_add_and_activate(options, rank, monkeypatch):
    """Those of csrc/cutlass add what adapters make wide, and end with the activation: stood in for
    by products of torch.
    """
    ran = []
    monkeypatch.setattr(planning, "_products", lambda *_: stand_ins(ran))
    case = Case("cpu", FP32, M=9, E=6, **options)
    if rank:
        test_lora.check(case, [test_lora.adapter(case, (rank, rank))])
    else:
        test_gradients.check_both(case)
    assert ("low" in ran) == bool(rank)
    assert ("activated" in ran) == ("activation" not in options)


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

    def noted_dot(*args, **given):
        seen.append(("dot", False))
        return dot(*args, **given)

    monkeypatch.setattr(fused, "dot", noted_dot)
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


@on_gpu
def test_a_captured_step_has_kernels_beside_products(where, monkeypatch):
    monkeypatch.setattr(native, "SPARE_FROM", 0)
    sizes = {"M": 300, "E": 8, "top_k": 2, "K": 512, "I": 256}
    check_captured_step([Case(*where, **sizes, seed=seed) for seed in range(3)])


@on_gpu
def test_a_captured_step_follows_the_routing(where):
    check_captured_step(
        [Case(*where, M=64, E=8, top_k=2, bias=True, seed=seed) for seed in (0, 1)]
    )


def test_what_is_not_fused():
    """Each call in plain torch has its reason."""
    x = torch.randn(4, 16, dtype=BF16)
    w13, w2 = torch.randn(3, 16, 16, dtype=BF16), torch.randn(3, 16, 8, dtype=BF16)
    weights, ids = torch.rand(4, 2), torch.zeros(4, 2, dtype=torch.int32)
    recorded = Options(activations.resolve("silu"), needs_grad=True)
    plain = ExpertsCall(x, Weight(w13), Weight(w2), weights, ids, None, None, None, recorded)
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
        "no tokens": plain._replace(hidden_states=x[:0]),
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


@pytest.mark.parametrize("E", [1023, 1024])
def test_torchs_products_take_so_many_experts(E, monkeypatch):
    """Where they are the products of a plan."""
    monkeypatch.setattr(planning, "why_not_kernels", lambda *_: None)
    x, w = torch.empty(4, 8, dtype=BF16), Weight(torch.empty(E, 8, 8, dtype=BF16))
    call = GroupedCall(x, w, w, torch.zeros(E), None, None, Options())
    for products in (grouped_mm.NATIVE, native.PRODUCTS):
        monkeypatch.setattr(planning, "_products", lambda _, products=products: products)
        reason, found = planning.plan(call)
        if E == 1024 and products is grouped_mm.NATIVE:
            assert reason is not None and "at most 1023 experts" in reason
            assert found is planning.PORTABLE
        else:
            assert (reason, found) == (None, products)
