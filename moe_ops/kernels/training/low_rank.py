"""Products of sorted rows with the low-rank matrices of their experts. Imported at first launch
only.

The products read rows as wide as the layer once and multiply them by a matrix that caches hold, so
memory decides how long they take: a grouped product that returned its result would write rows that
another kernel had to add.

Legend: M tokens, S = M * top_k pairs sorted by expert, W columns of wide rows, R rank. A matrix of
rank R is (E, R, W) or (E, W, R). `groups` (E,) is the row after each expert's last pair, `order`
(S,) the pair of each row. A block is at most BLOCK_M rows of one expert; kernels/device/blocks.py
says how the table of blocks is laid out.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.launch import (
    Constant,
    Launch,
    Pointer,
    Runtime,
    RuntimeFloat,
    Specialized,
    arguments,
    kernel,
)
from moe_ops.kernels.permute.layout import Layout, StridedRows, rows_of
from moe_ops.kernels.permute.rows import Routing
from moe_ops.meta.workspace import cdiv

BLOCK_M = 64  # rows of a block
BLOCK_W = 128  # wide columns of a program, or of a step of its loop
BLOCK_S = 256  # pairs of a program
MOST_R = 64  # ranks of a program


class Matrix(NamedTuple):
    """Matrices of all experts, one behind the other."""

    ptr: Pointer
    stride_r: Specialized
    stride_w: Specialized


@arguments
class Order:
    order: Pointer  # (S,), written
    rows: Pointer  # (S,): the row of each pair, or -1
    S: Runtime
    BLOCK: Constant


@kernel(Order)
def moe_ops_train_order(order_ptr, rows_ptr, S, BLOCK: tl.constexpr):
    """Write each pair where its row is."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + pair, mask=pair < S, other=-1)
    tl.store(order_ptr + row, pair, mask=row >= 0)


def order(pairs: Tensor, layout: Layout) -> Launch:
    """pairs (S,): the pair of each row."""
    S = pairs.shape[0]
    args = Order(order=pairs, rows=layout.rows, S=S, BLOCK=BLOCK_S)
    return Launch(moe_ops_train_order, (cdiv(S, BLOCK_S), 1, 1), args)


@arguments
class Narrow:
    u: Pointer  # (S, R), written
    x: StridedRows  # (S, W), or (M, W) with `order`
    matrix: Matrix
    order: Pointer
    index: Pointer  # the table of blocks
    E: Runtime
    scale: RuntimeFloat
    W: Specialized
    R: Specialized
    TOP_K: Constant
    BLOCK_M: Constant
    BLOCK_W: Constant
    BLOCK_R: Constant


@kernel(Narrow)
def moe_ops_train_narrow(
    u_ptr,
    x_ptr,
    x_stride_e,
    x_stride_m,
    x_stride_k,
    matrix_ptr,
    matrix_stride_r,
    matrix_stride_w,
    order_ptr,
    index_ptr,
    E,
    scale,
    W,
    R,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """u = scale * x matrix[e]^T. Grid: (blocks, tiles of the rank)."""
    index_ptr += 4 * tl.program_id(0)
    e = tl.load(index_ptr)
    if (e < 0) | (e >= E):
        return
    rows = (tl.load(index_ptr + 1) + tl.arange(0, BLOCK_M)).to(tl.int64)
    inside = rows < tl.load(index_ptr + 2)
    at = rows
    if order_ptr is not None:
        at = (tl.load(order_ptr + rows, mask=inside, other=0) // TOP_K).to(tl.int64)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    matrix_ptr += e.to(tl.int64) * R * W
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in tl.range(0, W, BLOCK_W):
        w = start + tl.arange(0, BLOCK_W)
        x = tl.load(
            x_ptr + at[:, None] * x_stride_m + w.to(tl.int64)[None, :] * x_stride_k,
            mask=inside[:, None] & (w < W)[None, :],
            other=0.0,
        )
        matrix = tl.load(
            matrix_ptr + w[:, None] * matrix_stride_w + r[None, :] * matrix_stride_r,
            mask=(w < W)[:, None] & (r < R)[None, :],
            other=0.0,
        )
        total = tl.dot(x, matrix, total, input_precision="ieee")
    u = (total * scale).to(u_ptr.dtype.element_ty)
    at_u = u_ptr + rows[:, None] * R + r[None, :]
    tl.store(at_u, u, mask=inside[:, None] & (r < R)[None, :])


@arguments
class Widen:
    y: Pointer  # (S, W), added to
    u: Pointer  # (S, R)
    matrix: Matrix
    index: Pointer  # the table of blocks
    E: Runtime
    W: Specialized
    R: Specialized
    BLOCK_M: Constant
    BLOCK_W: Constant
    BLOCK_R: Constant


@kernel(Widen)
def moe_ops_train_widen(
    y_ptr,
    u_ptr,
    matrix_ptr,
    matrix_stride_r,
    matrix_stride_w,
    index_ptr,
    E,
    W,
    R,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """y += u matrix[e]^T. Grid: (blocks, tiles of columns)."""
    index_ptr += 4 * tl.program_id(0)
    e = tl.load(index_ptr)
    if (e < 0) | (e >= E):
        return
    rows = (tl.load(index_ptr + 1) + tl.arange(0, BLOCK_M)).to(tl.int64)
    inside = rows < tl.load(index_ptr + 2)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    ok = inside[:, None] & (w < W)[None, :]
    y_ptr += rows[:, None] * W + w[None, :]
    total = tl.load(y_ptr, mask=ok, other=0.0).to(tl.float32)
    matrix_ptr += e.to(tl.int64) * R * W
    for start in tl.range(0, R, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        u = tl.load(
            u_ptr + rows[:, None] * R + r[None, :],
            mask=inside[:, None] & (r < R)[None, :],
            other=0.0,
        )
        matrix = tl.load(
            matrix_ptr + r[:, None] * matrix_stride_r + w[None, :] * matrix_stride_w,
            mask=(r < R)[:, None] & (w < W)[None, :],
            other=0.0,
        )
        total = tl.dot(u, matrix, total, input_precision="ieee")
    tl.store(y_ptr, total.to(y_ptr.dtype.element_ty), mask=ok)


@arguments
class Outer:
    out: Matrix  # written
    x: StridedRows  # (S, W), or (M, W) with `order`
    u: Pointer  # (S, R)
    order: Pointer
    groups: Pointer
    W: Specialized
    R: Specialized
    TOP_K: Constant
    BLOCK_M: Constant
    BLOCK_W: Constant
    BLOCK_R: Constant


@kernel(Outer)
def moe_ops_train_low_rank_outer(
    out_ptr,
    out_stride_r,
    out_stride_w,
    x_ptr,
    x_stride_e,
    x_stride_m,
    x_stride_k,
    u_ptr,
    order_ptr,
    groups_ptr,
    W,
    R,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out[e] = x^T u over the rows of each expert, 0 without rows. Grid: (E, tiles of columns,
    tiles of the rank).
    """
    e = tl.program_id(0)
    begin = tl.load(groups_ptr + e - 1, mask=e > 0, other=0)
    end = tl.load(groups_ptr + e)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    total = tl.zeros((BLOCK_W, BLOCK_R), tl.float32)
    for first in tl.range(begin, end, BLOCK_M):
        rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        inside = rows < end
        at = rows
        if order_ptr is not None:
            at = (tl.load(order_ptr + rows, mask=inside, other=0) // TOP_K).to(tl.int64)
        x = tl.load(
            x_ptr + at[:, None] * x_stride_m + w.to(tl.int64)[None, :] * x_stride_k,
            mask=inside[:, None] & (w < W)[None, :],
            other=0.0,
        )
        u = tl.load(
            u_ptr + rows[:, None] * R + r[None, :],
            mask=inside[:, None] & (r < R)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(x), u, total, input_precision="ieee")
    out_ptr += e.to(tl.int64) * R * W
    at_out = out_ptr + w[:, None] * out_stride_w + r[None, :] * out_stride_r
    ok = (w < W)[:, None] & (r < R)[None, :]
    tl.store(at_out, total.to(out_ptr.dtype.element_ty), mask=ok)


def _matrix(t: Tensor, rank_first: bool) -> tuple[Matrix, int, int]:
    """The Matrix of a contiguous tensor (E, R, W), or (E, W, R), and its R and W."""
    if rank_first:
        _, R, W = t.shape
        return Matrix(t, W, 1), R, W
    _, W, R = t.shape
    return Matrix(t, 1, R), R, W


def _block_r(R: int) -> int:
    return min(MOST_R, max(16, triton.next_power_of_2(R)))


def narrow(
    u: Tensor,  # (S, R), written
    x: Tensor,  # (S, W), or with `order` tokens (M, W)
    matrix: Tensor,
    rank_first: bool,
    scale: float,
    blocks: Routing,
    order: Tensor | None = None,
    top_k: int = 1,
) -> Launch:
    """u = scale * x matrix[e]^T."""
    operand, R, W = _matrix(matrix, rank_first)
    args = Narrow(
        u=u,
        x=rows_of(x),
        matrix=operand,
        order=order,
        index=blocks.index,
        E=blocks.E,
        scale=scale,
        W=W,
        R=R,
        TOP_K=top_k,
        BLOCK_M=BLOCK_M,
        BLOCK_W=BLOCK_W,
        BLOCK_R=_block_r(R),
    )
    return Launch(moe_ops_train_narrow, (blocks.num_blocks, cdiv(R, _block_r(R)), 1), args)


def widen(y: Tensor, u: Tensor, matrix: Tensor, rank_first: bool, blocks: Routing) -> Launch:
    """y (S, W) += u (S, R) matrix[e]^T."""
    operand, R, W = _matrix(matrix, rank_first)
    args = Widen(
        y=y,
        u=u,
        matrix=operand,
        index=blocks.index,
        E=blocks.E,
        W=W,
        R=R,
        BLOCK_M=BLOCK_M,
        BLOCK_W=BLOCK_W,
        BLOCK_R=_block_r(R),
    )
    return Launch(moe_ops_train_widen, (blocks.num_blocks, cdiv(W, BLOCK_W), 1), args)


def outer(
    out: Tensor,  # written
    rank_first: bool,
    x: Tensor,  # (S, W), or with `order` tokens (M, W)
    u: Tensor,  # (S, R)
    layout: Layout,
    order: Tensor | None = None,
    top_k: int = 1,
) -> Launch:
    """out[e] = x^T u, or its transpose, over the rows of each expert."""
    operand, R, W = _matrix(out, rank_first)
    args = Outer(
        out=operand,
        x=rows_of(x),
        u=u,
        order=order,
        groups=layout.groups,
        W=W,
        R=R,
        TOP_K=top_k,
        BLOCK_M=BLOCK_M,
        BLOCK_W=BLOCK_W,
        BLOCK_R=_block_r(R),
    )
    grid = (out.shape[0], cdiv(W, BLOCK_W), cdiv(R, _block_r(R)))
    return Launch(moe_ops_train_low_rank_outer, grid, args)
