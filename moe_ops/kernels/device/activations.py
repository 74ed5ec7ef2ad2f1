"""Activations in Triton, fp32 (formulas: moe_ops.activations.Activation). Imported at first launch
only.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from moe_ops import activations
from moe_ops.kernels.device.e4m3 import clamp
from moe_ops.kernels.device.interpreter import INTERPRET

BY_EXPERT = tl.constexpr(activations.BY_EXPERT)


@triton.jit
def of_expert(alpha, beta, limit, e, HAS_LIMIT: tl.constexpr):
    """The parameters of an activation, where they differ by expert those of expert e."""
    if HAS_LIMIT == BY_EXPERT:
        alpha, beta, limit = tl.load(alpha + e), tl.load(beta + e), tl.load(limit + e)
    return alpha, beta, limit


@triton.jit
def bounded(u, limit, HAS_LIMIT: tl.constexpr):
    """(L tanh(u / L), tanh(u / L)) of situ; u and 0 without a limit."""
    if HAS_LIMIT:
        slope = tanh(u / limit)
        if HAS_LIMIT == BY_EXPERT:  # some may have none
            none = limit >= 3.0e38
            return tl.where(none, u, limit * slope), tl.where(none, 0.0, slope)
        else:
            return limit * slope, slope
    else:
        return u, tl.zeros_like(u)


@triton.jit
def above(x, limit):
    """min(x, limit); NaN stays NaN."""
    return tl.where(x > limit, limit, x)


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)). On NVIDIA GPUs by the instructions of csrc/cutlass/sm90_tiles.cuh, so
    that both give the same bits: what is below 2^-126 counts as zero on the way.
    """
    if INTERPRET or not is_cuda():
        return tl.sigmoid(z)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 e;
            mul.rn.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.rn.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
            }
            """,
            "=r,r",
            [z],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def times_sigmoid(x, z):
    """x / (1 + exp(-z))."""
    return x * sigmoid(z)


@triton.jit
def tanh(x):
    """By a polynomial near 0, where a difference of numbers near 1 would lose what is small."""
    square = x * x
    near = x * (1.0 + square * (-0.33333333 + square * (0.13333333 - 0.053968254 * square)))
    return tl.where(square < 0.03, near, 2.0 * sigmoid(2.0 * x) - 1.0)


@triton.jit
def power(g, alpha):
    """(p(g), its derivative), of powlu."""
    positive = tl.where(g > 0.0, g, 1.0)
    root, log = tl.sqrt(positive), tl.log(positive)
    exponent = alpha / (root + 1.0)
    less = tl.exp((exponent - 1.0) * log)
    slope = less * (exponent - exponent * root * log / (2.0 * (root + 1.0)))
    return tl.where(g > 0.0, less * positive, g), tl.where(g > 0.0, slope, 1.0)


@triton.jit
def activate_one(x, ACTIVATION: tl.constexpr):
    """The function of one variable in an activation, fp32."""
    if ACTIVATION == "silu":
        return times_sigmoid(x, x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        return times_sigmoid(x, 1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACTIVATION == "relu2")
        y = tl.where(x < 0.0, 0.0, x)
        return y * y


@triton.jit
def activate_two(
    g, u, alpha, beta, limit, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, e=None
):
    """A gated activation of gate g and up u, fp32 (formulas: moe_ops.activations.Activation), of
    expert e where its parameters differ by expert.
    """
    alpha, beta, limit = of_expert(alpha, beta, limit, e, HAS_LIMIT)
    if ACTIVATION == "swiglustep" or ACTIVATION == "powlu":
        if ACTIVATION == "powlu":
            p, _ = power(g, alpha)
            one = times_sigmoid(p, g)
        else:
            one = activate_one(g, "silu")
        if HAS_LIMIT:
            one = above(one, limit)
            u = clamp(u, limit)
        return one * u
    elif ACTIVATION == "gelu" or ACTIVATION == "gelu_tanh" or ACTIVATION == "relu2":
        return activate_one(g, ACTIVATION) * u
    elif ACTIVATION == "situ":
        u, _ = bounded(u, limit, HAS_LIMIT)
        return beta * times_sigmoid(tanh(g / beta), g) * u
    else:
        if HAS_LIMIT:
            g = above(g, limit)
            u = clamp(u, limit)
        if ACTIVATION == "silu":
            return activate_one(g, "silu") * u
        else:
            tl.static_assert(ACTIVATION == "swigluoai")
            return times_sigmoid(g, alpha * g) * (u + beta)


@triton.jit
def one_and_derivative(x, ACTIVATION: tl.constexpr):
    """(`activate_one`, its derivative), which share what takes long."""
    if ACTIVATION == "silu":
        s = sigmoid(x)
        y = x * s
        return y, s + y * (1.0 - s)
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        y = activate_one(x, "gelu")
        return y, 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    elif ACTIVATION == "gelu_tanh":
        s = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = x * s
        return y, s + y * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        return activate_one(x, "relu2"), tl.where(x < 0.0, 0.0, 2.0 * x)


@triton.jit
def derivatives_of_two(
    g, u, alpha, beta, limit, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, e=None
):
    """(`activate_two`, its derivatives by g and by u). These are 0 beyond a limit, not at it."""
    alpha, beta, limit = of_expert(alpha, beta, limit, e, HAS_LIMIT)
    if ACTIVATION == "swiglustep" or ACTIVATION == "powlu":
        if ACTIVATION == "powlu":
            p, slope = power(g, alpha)
            s = sigmoid(g)
            one, derivative = p * s, (slope + p * (1.0 - s)) * s
        else:
            one, derivative = one_and_derivative(g, "silu")
        if not HAS_LIMIT:
            return one * u, derivative * u, one
        clamped, cut = clamp(u, limit), above(one, limit)
        dg = derivative * tl.where(one > limit, 0.0, clamped)
        du = tl.where((u >= -limit) & (u <= limit), cut, 0.0)
        return cut * clamped, dg, du
    elif ACTIVATION == "gelu" or ACTIVATION == "gelu_tanh" or ACTIVATION == "relu2":
        one, derivative = one_and_derivative(g, ACTIVATION)
        dg = derivative * u
        if ACTIVATION == "relu2":  # also beside an infinite u
            dg = tl.where(g <= 0.0, 0.0, dg)
        return one * u, dg, one
    elif ACTIVATION == "situ":
        t, s = tanh(g / beta), sigmoid(g)
        one = beta * t * s
        u, slope = bounded(u, limit, HAS_LIMIT)
        return one * u, ((1.0 - t * t) * s + one * (1.0 - s)) * u, one * (1.0 - slope * slope)
    else:
        x, factor = g, u
        if HAS_LIMIT:
            x = above(g, limit)
            factor = clamp(u, limit)
        if ACTIVATION == "silu":
            du, dg = one_and_derivative(x, "silu")
        else:
            tl.static_assert(ACTIVATION == "swigluoai")
            s = sigmoid(alpha * x)
            factor += beta
            du = x * s
            dg = s + alpha * du * (1.0 - s)
        value, dg = du * factor, dg * factor
        if HAS_LIMIT:
            dg = tl.where(g <= limit, dg, 0.0)
            du = tl.where((u >= -limit) & (u <= limit), du, 0.0)
        return value, dg, du


@triton.jit
def gate_and_up(
    x_ptr, first, I, INTERLEAVED: tl.constexpr, BLOCK_I: tl.constexpr, ok=None
):  # fmt: skip
    """Columns from `first` on (BLOCK_I,) of both halves of a row (2 I,), 0 from I on. Of rows and
    first columns (G, 1), `ok` (G, 1) of which are there, they are (G, BLOCK_I), all below I.
    """
    if INTERLEAVED:
        wide = 2 * first + tl.arange(0, 2 * BLOCK_I)
        if ok is None:
            both = tl.load(x_ptr + wide, mask=wide < 2 * I, other=0.0)
            gate, up = tl.split(tl.reshape(both, (BLOCK_I, 2)))
        else:
            both = tl.load(x_ptr + wide, mask=ok, other=0.0)
            gate, up = tl.split(tl.reshape(both, (both.shape[0], BLOCK_I, 2)))
    else:
        i = first + tl.arange(0, BLOCK_I)
        inside = i < I if ok is None else ok
        gate = tl.load(x_ptr + i, mask=inside, other=0.0)
        up = tl.load(x_ptr + I + i, mask=inside, other=0.0)
    return gate, up


@triton.jit
def activated_columns(
    x_ptr, weight, first, I, alpha, beta, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr, BLOCK_I: tl.constexpr, divisors_ptr=None, bias_ptr=None, ok=None,
    e=None,
):  # fmt: skip
    """Columns from `first` on (BLOCK_I,) of the activation of a row of the first GEMM's output
    times a weight, plus a bias and divided by numbers of its columns if there are any, fp32;
    anything from I on. With `ok` as `gate_and_up`, with `e` as `activate_two`.
    """
    if GATED:
        gate, up = gate_and_up(x_ptr, first, I, INTERLEAVED, BLOCK_I, ok)
        gate, up = gate.to(tl.float32) * weight, up.to(tl.float32) * weight
        if bias_ptr is not None:
            of_gate, of_up = gate_and_up(bias_ptr, first, I, INTERLEAVED, BLOCK_I)
            gate, up = gate + of_gate.to(tl.float32), up + of_up.to(tl.float32)
        if divisors_ptr is not None:
            of_gate, of_up = gate_and_up(divisors_ptr, first, I, INTERLEAVED, BLOCK_I)
            gate, up = gate / of_gate, up / of_up
        h = activate_two(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT, e)
    else:
        i = first + tl.arange(0, BLOCK_I)
        inside = i < I if ok is None else ok
        x = tl.load(x_ptr + i, mask=inside, other=0.0)
        x = x.to(tl.float32) * weight
        if bias_ptr is not None:
            x += tl.load(bias_ptr + i, mask=inside, other=0.0).to(tl.float32)
        if divisors_ptr is not None:
            x /= tl.load(divisors_ptr + i, mask=inside, other=1.0)
        h = activate_one(x, ACTIVATION)
    return h
