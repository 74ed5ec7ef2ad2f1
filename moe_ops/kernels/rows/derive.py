"""What a training step does to rows between its grouped products. Imported at first launch only.

Legend: M tokens, S = M * top_k pairs, K hidden size, I intermediate size, N columns of w13's
product (2 I if gated, else I). `rows` (S,) is the row of each pair, sorted by expert, or -1 if its
expert is not here; `groups` (E,) the row after each expert's last pair. h, the product with w13,
is without its bias (E, N): who reads h adds the bias of the row's expert.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops import activations
from moe_ops.kernels.activation import Activated
from moe_ops.kernels.device.activations import (
    BY_EXPERT,
    derivatives_of_two,
    gate_and_up,
    one_and_derivative,
)
from moe_ops.kernels.device.experts import ends_of_experts, expert_of_row
from moe_ops.kernels.device.pdl import gdc_wait_at_the_end
from moe_ops.kernels.launch import (
    Constant,
    Launch,
    Pointer,
    Runtime,
    Specialized,
    arguments,
    kernel,
)
from moe_ops.kernels.place.layout import (
    ExpertBias,
    Layout,
    expert_bias,
)
from moe_ops.kernels.place.routing import RouterWeights, router_weights
from moe_ops.kernels.rows.activate import columns_at_once
from moe_ops.meta.workspace import cdiv

ZEROS = 8192  # elements that a program of zero_empty writes at a time


@triton.jit
def columns_of_row(
    x_ptr, first, I,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Gate and up of a row x from column `first` on; of activations that are not gated twice the
    same.
    """
    if GATED:
        g, u = gate_and_up(x_ptr, first, I, INTERLEAVED, BLOCK_I)
    else:
        i = first + tl.arange(0, BLOCK_I)
        g = tl.load(x_ptr + i, mask=i < I, other=0.0)
        u = g
    return g, u


@triton.jit
def activation_input(
    g, u, bias_ptr, first, I,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """What `columns_of_row` returns plus a bias, fp32."""
    g, u = g.to(tl.float32), u.to(tl.float32)
    if bias_ptr is not None:
        g_bias, u_bias = columns_of_row(bias_ptr, first, I, GATED, INTERLEAVED, BLOCK_I)
        g, u = g + g_bias.to(tl.float32), u + u_bias.to(tl.float32)
    return g, u


class Gradients(NamedTuple):
    """What is written on the way back through the activation, each of it or None."""

    dx: Pointer  # (S, N): the gradient of x; or (S, I): that of its gate columns
    up: Pointer  # (S, I): then that of its up columns, else None
    scaled: Pointer  # (S, I): router weight times activation(x)
    dweights: Pointer  # (S,) fp32: the gradient of the router weight of each pair that has a row
    factors: Pointer  # (S,) fp32: the router weight of each row


@arguments
class Derive:
    to: Gradients
    x: Pointer  # (S, N)
    bias: ExpertBias  # (E, N), added to x
    hidden: Pointer  # (S, I): the activation's output rounded, or None: as it is
    dh: Pointer  # (S, I): the gradient of the activation, without the router weight; or None
    weights: RouterWeights  # or none: 1
    layout: Layout
    N: Specialized
    I: Specialized
    activation: Activated
    TOP_K: Constant
    BLOCK_I: Constant
    BESIDE: Constant  # it runs beside the kernel before: gdc_wait_at_the_end


@kernel(Derive)
def moe_ops_train_derive(
    to_dx_ptr,
    to_up_ptr,
    to_scaled_ptr,
    to_dweights_ptr,
    to_factors_ptr,
    x_ptr,
    bias_ptr,
    bias_E,
    bias_BLOCK_E: tl.constexpr,
    hidden_ptr,
    dh_ptr,
    weights_ptr,
    weights_stride_m,
    weights_stride_k,
    rows_ptr,
    groups_ptr,
    R,
    N,
    I,
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """Through the activation and the router weight s of a pair, from the gradient dh of s * h:
    dx = s * dh * activation'(x), ds = sum of dh * h, and s * h, with h = activation(x + bias) or
    what it was rounded to.
    Grid: S. A program loads columns one step ahead of their use: a store may write what the next
    load reads, as far as a compiler knows, so that none moves the load before it.
    """
    pair = tl.program_id(0)
    row = tl.load(rows_ptr + pair).to(tl.int64)
    if row < 0:
        if to_dweights_ptr is not None:
            tl.store(to_dweights_ptr + pair, 0.0)
        gdc_wait_at_the_end(BESIDE)
        return
    s = 1.0
    if weights_ptr is not None:
        at = (pair // TOP_K).to(tl.int64) * weights_stride_m + (pair % TOP_K) * weights_stride_k
        s = tl.load(weights_ptr + at).to(tl.float32)
    if to_factors_ptr is not None:
        tl.store(to_factors_ptr + row, s)
    e = 0
    if bias_ptr is not None or HAS_LIMIT == BY_EXPERT:
        e = expert_of_row(ends_of_experts(groups_ptr, bias_E, bias_BLOCK_E), row)
    if bias_ptr is not None:
        bias_ptr += tl.cast(e, tl.int64) * N
    x_ptr += row * N
    if to_up_ptr is not None:
        to_dx_ptr += row * I
        of_up_ptr = to_up_ptr + row * I
    elif to_dx_ptr is not None:
        to_dx_ptr += row * N
        of_up_ptr = to_dx_ptr + I
    if dh_ptr is not None:
        dh_ptr += row * I
    total = tl.zeros((BLOCK_I,), tl.float32)
    lane = tl.arange(0, BLOCK_I)
    next_g, next_u = columns_of_row(x_ptr, 0, I, GATED, INTERLEAVED, BLOCK_I)
    if dh_ptr is not None:
        next_dh = tl.load(dh_ptr + lane, mask=lane < I, other=0.0)
    for first in tl.range(0, I, BLOCK_I):
        i = first + lane
        ok = i < I
        g, u = activation_input(next_g, next_u, bias_ptr, first, I, GATED, INTERLEAVED, BLOCK_I)
        following = first + BLOCK_I
        next_g, next_u = columns_of_row(x_ptr, following, I, GATED, INTERLEAVED, BLOCK_I)
        if dh_ptr is not None:
            dh = next_dh.to(tl.float32)
            next_dh = tl.load(dh_ptr + following + lane, mask=following + lane < I, other=0.0)
        if GATED:
            h, dg, du = derivatives_of_two(g, u, alpha, beta, limit, ACTIVATION, HAS_LIMIT, e)
        else:
            h, dg = one_and_derivative(g, ACTIVATION)
        if hidden_ptr is not None:
            h = tl.load(hidden_ptr + row * I + i, mask=ok, other=0.0).to(tl.float32)
        if to_scaled_ptr is not None:
            scaled = (s * h).to(to_scaled_ptr.dtype.element_ty)
            tl.store(to_scaled_ptr + row * I + i, scaled, mask=ok)
        if dh_ptr is not None:
            total += dh * h  # behind the last column both are 0
            if to_dx_ptr is not None:
                dh *= s
                dg = (dh * dg).to(to_dx_ptr.dtype.element_ty)
                if GATED:
                    du = (dh * du).to(to_dx_ptr.dtype.element_ty)
                if GATED and INTERLEAVED:
                    wide = 2 * first + tl.arange(0, 2 * BLOCK_I)
                    both = tl.reshape(tl.join(dg, du), (2 * BLOCK_I,))
                    tl.store(to_dx_ptr + wide, both, mask=wide < 2 * I)
                else:
                    tl.store(to_dx_ptr + i, dg, mask=ok)
                    if GATED:
                        tl.store(of_up_ptr + i, du, mask=ok)
    if to_dweights_ptr is not None:
        tl.store(to_dweights_ptr + pair, tl.sum(total, 0))
    gdc_wait_at_the_end(BESIDE)


def derive(
    activation: Activated,
    to: Gradients,
    x: Tensor,
    bias: Tensor | None,
    hidden: Tensor | None,
    dh: Tensor | None,
    weights: Tensor | None,  # (M, top_k)
    I: int,
    top_k: int,
    layout: Layout,
    beside: bool = False,
) -> Launch:
    """Gradients through the activation and the router weights. `dh` is None where `to.scaled` or
    `to.factors` alone are asked for. `beside`: it runs beside the kernel before, which writes
    nothing that it reads, and does not use what it writes.
    """
    S, N = x.shape
    columns, warps = columns_at_once(I)
    by_expert = layout.groups.shape[0] if activation.HAS_LIMIT == activations.BY_EXPERT else 0
    args = Derive(
        to=to,
        x=x,
        bias=expert_bias(bias, by_expert),
        hidden=hidden,
        dh=dh,
        weights=router_weights(weights),
        layout=layout,
        N=N,
        I=I,
        activation=activation,
        TOP_K=top_k,
        BLOCK_I=columns,
        BESIDE=beside,
    )
    return Launch(moe_ops_train_derive, (S, 1, 1), args, warps)


@arguments
class ZeroEmpty:
    out: Pointer  # (E, size), written where an expert has no rows
    groups: Pointer
    size: Runtime
    BLOCK: Constant


@kernel(ZeroEmpty)
def moe_ops_train_zero_empty(out_ptr, groups_ptr, size, BLOCK: tl.constexpr):
    """Zeros for experts without rows. Grid: (E, programs of an expert)."""
    e = tl.program_id(0)
    before = tl.load(groups_ptr + e - 1, mask=e > 0, other=0)
    if tl.load(groups_ptr + e) > before:
        return
    out_ptr += e.to(tl.int64) * size
    zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
    for start in tl.range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + i, zeros, mask=i < size)


def zero_empty(out: Tensor, layout: Layout) -> Launch:
    """out (E, ..) zero for experts without rows, whose part a grouped product leaves as it is."""
    size = out[0].numel()
    args = ZeroEmpty(out=out, groups=layout.groups, size=size, BLOCK=ZEROS)
    return Launch(moe_ops_train_zero_empty, (out.shape[0], min(32, cdiv(size, ZEROS)), 1), args)


@arguments
class ZeroTail:
    y: Pointer  # (R, columns), written behind the last expert's rows
    groups: Pointer
    R: Runtime
    columns: Specialized
    E: Runtime
    BLOCK: Constant


@kernel(ZeroTail)
def moe_ops_train_zero_tail(y_ptr, groups_ptr, R, columns, E, BLOCK: tl.constexpr):
    """Zeros for rows of no expert. Grid: programs that share them."""
    first = tl.load(groups_ptr + E - 1).to(tl.int64) * columns + tl.program_id(0) * BLOCK
    end = tl.cast(R, tl.int64) * columns
    zeros = tl.zeros((BLOCK,), y_ptr.dtype.element_ty)
    for start in tl.range(first, end, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + i, zeros, mask=i < end)


def zero_tail(y: Tensor, layout: Layout) -> Launch:
    """y (R, columns) zero for rows of no expert, which a grouped product leaves as they are."""
    R, columns = y.shape
    args = ZeroTail(
        y=y, groups=layout.groups, R=R, columns=columns, E=layout.groups.shape[0], BLOCK=ZEROS
    )
    return Launch(moe_ops_train_zero_tail, (min(256, cdiv(R * columns, ZEROS)), 1, 1), args)
