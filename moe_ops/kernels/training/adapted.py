"""The activation of adapted experts, with the narrow products of their adapters; its way back is
in adapted_derive.py. Imported at first launch only.

The rows that both kernels read are those that an adapter adds to, and the rows that they write
are those that the next one makes narrow: so both happen here, and no kernel of an adapter's own
passes over rows of width N or I.

Legend: rows.py and low_rank.py. `first` adapts w13, with b (E, N, R); `second` adapts w2, with
a (E, R, I).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.device.activations import (
    activate_one,
    activate_two,
)
from moe_ops.kernels.gemm.operands import Activated
from moe_ops.kernels.launch import (
    Constant,
    Launch,
    Pointer,
    Runtime,
    RuntimeFloat,
    Specialized,
    arguments,
    kernel,
    unprefixed,
)
from moe_ops.kernels.permute.rows import Routing
from moe_ops.kernels.training.low_rank import BLOCK_M, block_r, last_first

# rows of a program, columns of a step of its loop, and warps
ACTIVATE = (32, 32, 2)


class Adapted(NamedTuple):
    """One of an adapter's matrices, and the rows that it makes wide and narrow."""

    wide: Pointer  # (S, R): rows whose product with the matrix is added; or None
    narrow: Pointer  # (S, R), written: the product of rows with the matrix; or None
    matrix: Pointer  # (E, N, R) of the first adapter, (E, R, I) of the second
    scale: RuntimeFloat  # of what is written
    R: Specialized
    BLOCK_R: Constant  # at least R: `fits` of low_rank.py


NOTHING = Adapted(None, None, None, 1.0, 16, 16)


def adapted(
    matrix: Tensor, rank: int, scale: float, wide: Tensor | None, narrow: Tensor | None
) -> Adapted:
    """The Adapted of a matrix, for one or both of its products."""
    if wide is None and narrow is None:
        return NOTHING
    return Adapted(wide, narrow, matrix, scale, rank, block_r(rank))


@unprefixed
class AdaptedTile(NamedTuple):
    """Rows and columns that a program takes at a time."""

    ROWS: Constant
    BLOCK_I: Constant


@triton.jit
def narrow_rows(ptr, rows, inside, R, BLOCK_R: tl.constexpr):
    """(ROWS, BLOCK_R) of rows (S, R)."""
    r = tl.arange(0, BLOCK_R)
    ptrs = ptr + rows[:, None] * R + r[None, :]
    return tl.load(ptrs, mask=inside[:, None] & (r < R)[None, :], other=0.0)


@triton.jit
def store_narrow(ptr, values, rows, inside, R, BLOCK_R: tl.constexpr):
    """Write rows (ROWS, BLOCK_R) of (S, R)."""
    r = tl.arange(0, BLOCK_R)
    ok = inside[:, None] & (r < R)[None, :]
    tl.store(ptr + rows[:, None] * R + r[None, :], values.to(ptr.dtype.element_ty), mask=ok)


@triton.jit
def of_b(ptr, n, n_ok, R, BLOCK_R: tl.constexpr):
    """(columns, BLOCK_R) of one expert's b (N, R)."""
    r = tl.arange(0, BLOCK_R)
    ptrs = ptr + n[:, None] * R + r[None, :]
    return tl.load(ptrs, mask=n_ok[:, None] & (r < R)[None, :], other=0.0)


@triton.jit
def of_a(ptr, i, I, R, BLOCK_R: tl.constexpr):  # noqa: E741
    """(BLOCK_R, columns) of one expert's a (R, I)."""
    r = tl.arange(0, BLOCK_R)
    ptrs = ptr + r[:, None] * I + i[None, :]
    return tl.load(ptrs, mask=(r < R)[:, None] & (i < I)[None, :], other=0.0)


@triton.jit
def load_rows(
    x_ptr, start, rows, inside, N, I,  # noqa: E741
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Gate and up of rows of the first product, from column `start` of each on; twice the same of
    activations that are not gated, and twice both, as they are stored, if they are in turns.
    """
    x_ptr += rows[:, None] * N
    if GATED and INTERLEAVED:
        n = 2 * start + tl.arange(0, 2 * BLOCK_I)
        x = tl.load(x_ptr + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0.0)
        return x, x
    else:
        i = start + tl.arange(0, BLOCK_I)
        ok = inside[:, None] & (i < I)[None, :]
        x = tl.load(x_ptr + i[None, :], mask=ok, other=0.0)
        up = x
        if GATED:
            up = tl.load(x_ptr + (I + i)[None, :], mask=ok, other=0.0)
        return x, up


@triton.jit
def product_rows(
    x, bias_ptr, n, n_ok, u, u_ptr, b_ptr, R, BLOCK_R: tl.constexpr
):  # fmt: skip
    """x, which are columns n of rows of the first product, with its bias and what adapts it, fp32;
    and these columns of b.
    """
    x = x.to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + n, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    b = u
    if b_ptr is not None:
        b = of_b(b_ptr, n, n_ok, R, BLOCK_R)
        if u_ptr is not None:
            x = tl.dot(u, tl.trans(b), x, input_precision="ieee")
    return x, b


@triton.jit
def activation_rows(
    x, up, bias_ptr, start, N, I,  # noqa: E741
    u, u_ptr, b_ptr, R, BLOCK_R: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """What the activation takes, fp32, of rows that `load_rows` returned, and what of b belongs to
    both; of gate and up in turns one block for both.
    """
    i = start + tl.arange(0, BLOCK_I)
    if GATED and INTERLEAVED:
        n = 2 * start + tl.arange(0, 2 * BLOCK_I)
        x, b = product_rows(x, bias_ptr, n, n < N, u, u_ptr, b_ptr, R, BLOCK_R)
        gate, up = tl.split(tl.reshape(x, (ROWS, BLOCK_I, 2)))
        return gate, up, b, b
    else:
        gate, b = product_rows(x, bias_ptr, i, i < I, u, u_ptr, b_ptr, R, BLOCK_R)
        if GATED:
            up, b_up = product_rows(up, bias_ptr, I + i, i < I, u, u_ptr, b_ptr, R, BLOCK_R)
            return gate, up, b, b_up
        else:
            return gate, gate, b, b


@arguments
class ActivateAdapted:
    h: Pointer  # (S, I), written
    x: Pointer  # (S, N)
    bias: Pointer  # (E, N), or None
    index: Pointer  # the table of blocks
    E: Runtime
    N: Specialized
    I: Specialized  # noqa: E741
    activation: Activated
    first: Adapted
    second: Adapted
    tile: AdaptedTile


@kernel(ActivateAdapted)
def moe_ops_train_activate_adapted(
    h_ptr,
    x_ptr,
    bias_ptr,
    index_ptr,
    E,
    N,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    first_wide_ptr,
    first_narrow_ptr,
    first_matrix_ptr,
    first_scale,
    first_R,
    first_BLOCK_R: tl.constexpr,
    second_wide_ptr,
    second_narrow_ptr,
    second_matrix_ptr,
    second_scale,
    second_R,
    second_BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """h = activation(x + bias + u b[e]^T), and v = scale * h a[e]^T. Grid: (blocks, parts of a
    block).
    """
    index_ptr += 4 * last_first()
    e = tl.load(index_ptr)
    if (e < 0) | (e >= E):
        return
    begin, end = tl.load(index_ptr + 1) + tl.program_id(1) * ROWS, tl.load(index_ptr + 2)
    if begin >= end:
        return
    rows = begin + tl.arange(0, ROWS)
    inside = rows < end
    rows = rows.to(tl.int64)
    e = e.to(tl.int64)
    if bias_ptr is not None:
        bias_ptr += e * N
    u = tl.zeros((ROWS, first_BLOCK_R), h_ptr.dtype.element_ty)
    if first_matrix_ptr is not None:
        first_matrix_ptr += e * N * first_R
        u = narrow_rows(first_wide_ptr, rows, inside, first_R, first_BLOCK_R)
    if second_matrix_ptr is not None:
        second_matrix_ptr += e * second_R * I
    v = tl.zeros((ROWS, second_BLOCK_R), tl.float32)
    next_x, next_up = load_rows(x_ptr, 0, rows, inside, N, I, GATED, INTERLEAVED, BLOCK_I)
    for start in tl.range(0, I, BLOCK_I, num_stages=3):
        i = start + tl.arange(0, BLOCK_I)
        x, up = next_x, next_up
        # one step ahead of their use
        next_x, next_up = load_rows(
            x_ptr, start + BLOCK_I, rows, inside, N, I, GATED, INTERLEAVED, BLOCK_I
        )
        gate, up, _, _ = activation_rows(
            x, up, bias_ptr, start, N, I,
            u, first_wide_ptr, first_matrix_ptr, first_R, first_BLOCK_R,
            GATED, INTERLEAVED, ROWS, BLOCK_I,
        )  # fmt: skip
        if GATED:
            h = activate_two(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
        else:
            h = activate_one(gate, ACTIVATION)
        h = h.to(h_ptr.dtype.element_ty)
        tl.store(
            h_ptr + rows[:, None] * I + i[None, :], h, mask=inside[:, None] & (i < I)[None, :]
        )
        if second_narrow_ptr is not None:
            a = of_a(second_matrix_ptr, i, I, second_R, second_BLOCK_R)
            v = tl.dot(h, tl.trans(a), v, input_precision="ieee")
    if second_narrow_ptr is not None:
        store_narrow(second_narrow_ptr, v * second_scale, rows, inside, second_R, second_BLOCK_R)


def activate(
    activation: Activated,
    h: Tensor,
    x: Tensor,
    bias: Tensor | None,
    first: Adapted,
    second: Adapted,
    blocks: Routing,
) -> Launch:
    """h (S, I) = activation(x (S, N) + bias (E, N) + what `first` adds), and what `second` makes
    narrow of it.
    """
    args = ActivateAdapted(
        h=h,
        x=x,
        bias=bias,
        index=blocks.index,
        E=blocks.E,
        N=x.shape[1],
        I=h.shape[1],
        activation=activation,
        first=first,
        second=second,
        tile=AdaptedTile(*ACTIVATE[:2]),
    )
    grid = (blocks.num_blocks, BLOCK_M // ACTIVATE[0], 1)
    return Launch(moe_ops_train_activate_adapted, grid, args, ACTIVATE[2])
