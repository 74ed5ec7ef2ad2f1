"""Activations in Triton, fp32 (formulas: moe_ops.activations.Activation). Imported at first launch
only.
"""

import triton
import triton.language as tl

from moe_ops.kernels.device.e4m3 import clamp


@triton.jit
def above(x, limit):
    """min(x, limit); NaN stays NaN."""
    return tl.where(x > limit, limit, x)


@triton.jit
def activate_one(x, ACTIVATION: tl.constexpr):
    """The function of one variable in an activation, fp32."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACTIVATION == "relu2")
        y = tl.where(x < 0.0, 0.0, x)
        return y * y


@triton.jit
def activate_two(g, u, alpha, beta, limit, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """A gated activation of gate g and up u, fp32 (formulas: moe_ops.activations.Activation)."""
    if ACTIVATION == "swiglustep":
        return above(activate_one(g, "silu"), limit) * clamp(u, limit)
    elif ACTIVATION == "gelu" or ACTIVATION == "gelu_tanh":
        return activate_one(g, ACTIVATION) * u
    else:
        if HAS_LIMIT:
            g = above(g, limit)
            u = clamp(u, limit)
        if ACTIVATION == "silu":
            return activate_one(g, "silu") * u
        else:
            tl.static_assert(ACTIVATION == "swigluoai")
            return g * tl.sigmoid(alpha * g) * (u + beta)
