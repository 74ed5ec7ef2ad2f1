"""Activations: values against fp64 formulas, limits, one rounding, errors."""

import math

import pytest
import torch

from moe_ops import activations
from moe_ops.activations import NAMES, NO_LIMIT, Activation
from tests.support import oracle

BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


def unit_rows(dtype=torch.float32, scale=3.0):
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(0)) * scale
    x[0] = 0
    return x.to(dtype)


def parameters(act):
    return {"name": act.name, "alpha": act.alpha, "beta": act.beta, "limit": act.limit}


@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("name", NAMES)
def test_values_with_one_rounding(name, dtype):
    """Half a unit of the dtype, and some units of fp32 for the formula itself."""
    x = unit_rows(dtype)
    before = x.clone()
    out = activations.apply(x, Activation(name))
    expected = oracle.activation(x.double(), name)
    assert out.dtype == dtype and out.shape == expected.shape
    smallest = torch.finfo(dtype).smallest_normal  # below it units stop shrinking
    unit = expected.abs().clamp(min=smallest) * 2.0 ** -BITS[dtype]
    cancelled = 2.0**-20 * x.abs().max() ** 2  # 1 + erf and 1 + tanh near -1 lose fp32's last bits
    assert ((out.double() - expected).abs() <= 0.5001 * unit + cancelled).all()
    assert torch.equal(x, before)  # relu squared in place would overwrite its input


@pytest.mark.parametrize("name", NAMES)
def test_fp64_stays_fp64(name):
    x = unit_rows(torch.float64)
    expected = oracle.activation(x, name)
    torch.testing.assert_close(
        activations.apply(x, Activation(name)), expected, rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize(
    "act",
    [
        Activation("silu", limit=0.7),
        Activation("swigluoai", alpha=0.9, beta=0.4, limit=0.8),
        Activation("swigluoai", beta=0.0),
        Activation("swigluoai_uninterleave", alpha=1.3, beta=0.0, limit=0.6),
        Activation("swiglustep", limit=0.3),
        Activation("situ", beta=0.7, limit=0.9),
        Activation("situ", beta=1.5, limit=float("inf")),
        Activation("powlu", alpha=1.2, limit=0.8),
    ],
    ids=str,
)
def test_parameters(act):
    x = unit_rows()
    expected = oracle.activation(x.double(), **parameters(act))
    torch.testing.assert_close(activations.apply(x, act).double(), expected, rtol=1e-5, atol=1e-6)
    default = activations.apply(x, Activation(act.name))
    assert not torch.allclose(activations.apply(x, act), default, atol=0.05)


def test_limits_clamp_where_the_formula_says():
    """g is cut from above only, u on both sides; swiglustep cuts after silu."""
    rows = torch.tensor([[9.0, -9.0, 9.0, 0.5, 0.5, -9.0]])  # gates, then ups
    silu = torch.nn.functional.silu
    g, u = rows[:, :3], rows[:, 3:]
    cut = activations.apply(rows, Activation("silu", limit=2.0))
    expected = silu(torch.tensor([[2.0, -9.0, 2.0]])) * torch.tensor([[0.5, 0.5, -2.0]])
    torch.testing.assert_close(cut, expected)
    step = activations.apply(rows, Activation("swiglustep", limit=2.0))
    torch.testing.assert_close(step, silu(g).clamp(max=2) * u.clamp(-2, 2))


def test_interleaved_rows_are_the_others_reordered():
    x = unit_rows()
    packed = torch.cat((x[:, 0::2], x[:, 1::2]), 1)
    assert torch.equal(
        activations.apply(x, Activation("swigluoai")),
        activations.apply(packed, Activation("swigluoai_uninterleave")),
    )


def test_no_limit_is_finite_and_infinite_limits_become_it():
    assert Activation("silu").limit == NO_LIMIT < float("inf")
    assert Activation("silu", limit=float("inf")) == Activation("silu")
    x = torch.tensor([[1e38, 1.0]])
    assert activations.apply(x, Activation("silu")) == 1e38


LIMITED = [
    Activation("silu", limit=2.0),
    Activation("swigluoai", limit=2.0),
    Activation("swiglustep", limit=2.0),
    Activation("situ", limit=float("inf")),
    Activation("powlu", limit=2.0),
]


@pytest.mark.parametrize("act", [*map(Activation, NAMES), *LIMITED], ids=str)
def test_gradients_at_infinities_are_those_of_torch(act):
    values = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 2.0, -2.0, 9.0, -9.0, 0.3])
    g, u = [t.flatten() for t in torch.meshgrid(values, values, indexing="ij")]
    x = torch.stack((g, u), 1) if act.gated else values[:, None]
    x = x.double().requires_grad_()
    for grad in (1.0, -0.7):
        out = activations.formula(x, act)
        (want,) = torch.autograd.grad(out, x, torch.full_like(out, grad))
        found = activations.derivative(x.detach(), torch.full_like(out, grad), act)
        nan = want.isnan() & found.isinf()  # autograd added infinities of both signs
        assert not nan[u.isfinite() if act.gated else slice(None)].any()
        torch.testing.assert_close(
            found.where(~nan, math.nan), want, equal_nan=True, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("name", NAMES)
def test_nan_stays_nan(name):
    x = unit_rows()
    x[:, :] = float("nan")
    assert activations.apply(x, Activation(name)).isnan().all()


def test_from_op_is_what_an_op_call_carried():
    act = Activation("swigluoai", alpha=1.5, beta=0.5, limit=3.0)
    assert activations.from_op(act.name, act.alpha, act.beta, act.limit) == act
    assert activations.resolve("silu") == Activation("silu") and activations.resolve(act) is act


@pytest.mark.parametrize("name", NAMES)
def test_gates_and_layouts(name):
    act = Activation(name)
    assert act.gated == (not name.endswith("_no_mul"))
    assert act.interleaved == (name == "swigluoai")


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: Activation("swish"), "activation must be one of silu, gelu, .*, got 'swish'"),
        (
            lambda: Activation("silu", alpha=1.0),
            "activation 'silu' takes no alpha; .*, powlu do",
        ),
        (lambda: Activation("swiglustep", beta=1.0), "'swiglustep' takes no beta"),
        (lambda: Activation("situ", alpha=1.0), "'situ' takes no alpha"),
        (lambda: Activation("situ", beta=0.0), "beta must be positive, got 0.0"),
        (lambda: Activation("powlu", alpha=-1.0), "alpha must be positive, got -1.0"),
        (
            lambda: Activation("silu", limit=torch.tensor([1.0, 0.0])),
            r"limit must be positive, got \[1.0, 0.0\]",
        ),
        (
            lambda: Activation("silu", limit=torch.ones(2, 3)),
            r"limit must be a number, or .* tensor \(E,\) .* got torch.float32 of shape \(2, 3\)",
        ),
        (
            lambda: Activation("silu", limit=torch.ones(3, requires_grad=True)),
            r"limit has no gradient: give limit.detach\(\)",
        ),
        (
            lambda: Activation("silu", limit=torch.tensor(3.0, requires_grad=True)),
            r"limit has no gradient: give limit.detach\(\)",
        ),
        (
            lambda: Activation("swigluoai", alpha=torch.ones(3), limit=torch.ones(4)),
            r"one shape \(E,\) and one device, got alpha \(3,\), limit \(4,\)",
        ),
        (lambda: Activation("powlu", alpha=float("inf")), "alpha must be a finite .* got inf"),
        (lambda: Activation("gelu", limit=1.0), "activation 'gelu' takes no limit"),
        (lambda: Activation("relu2_no_mul", limit=1.0), "'relu2_no_mul' takes no limit"),
        (lambda: Activation("silu", limit=0.0), "limit must be positive, got 0.0"),
        (lambda: Activation("swigluoai", alpha=float("nan")), "alpha must be a finite .* got nan"),
        (lambda: Activation("swigluoai", beta=1e39), "beta must be a finite .* got 1e"),
        (lambda: Activation("swigluoai", limit=float("nan")), "limit must be positive, got nan"),
    ],
)
def test_errors(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
