"""Derivatives of activations in Triton at infinities and NaN: where torch's are numbers, and where
they are none.
"""

import math

import pytest
import torch
import triton
import triton.language as tl

from moe_ops import activations
from moe_ops.activations import Activation
from moe_ops.kernels.activation import activated
from moe_ops.kernels.device.activations import derivatives_of_two

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def derive(
    g_ptr, u_ptr, y_ptr, dg_ptr, du_ptr, alpha, beta, limit,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, N)
    g, u = tl.load(g_ptr + i), tl.load(u_ptr + i)
    y, dg, du = derivatives_of_two(g, u, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    tl.store(y_ptr + i, y)
    tl.store(dg_ptr + i, dg)
    tl.store(du_ptr + i, du)


@pytest.mark.parametrize(
    "act",
    [
        *[Activation(name) for name in ("silu", "gelu", "gelu_tanh", "relu2", "situ", "powlu")],
        Activation("silu", limit=2.0),
        Activation("swigluoai", limit=2.0),
        Activation("swiglustep", limit=2.0),
        Activation("swiglustep", limit=math.inf),
        Activation("situ", limit=math.inf),
        Activation("powlu", limit=2.0),
    ],
    ids=str,
)
def test_infinities(act):
    values = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 2.0, -2.0, 9.0, 0.3])
    g, u = [t.flatten().to(DEVICE) for t in torch.meshgrid(values, values, indexing="ij")]
    found = [torch.full_like(g, 777.0) for _ in range(3)]
    how = activated(act)
    derive[(1,)](
        g, u, *found, act.alpha, act.beta, act.limit, how.ACTIVATION, how.HAS_LIMIT, g.numel()
    )
    x = torch.stack((g, u), 1).double()
    y = activations.formula(x, act)
    want = y[:, 0], *activations.derivative(x, torch.ones_like(y), act).unbind(1)
    for mine, his in zip(found, want, strict=True):
        torch.testing.assert_close(mine, his.float(), equal_nan=True, rtol=1e-5, atol=1e-6)
