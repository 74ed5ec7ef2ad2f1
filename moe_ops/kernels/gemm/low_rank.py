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
    unprefixed,
)
from moe_ops.kernels.place.layout import Layout
from moe_ops.kernels.place.routing import RouterWeights, Routing, router_weights
from moe_ops.meta.workspace import cdiv

BLOCK_M = 64  # rows of a block
BLOCK_W = 128  # wide columns of a program, or of a step of its loop
COPY_W = 64  # of a step that also copies them, in registers: 72 a thread, with BLOCK_W 136
STEPS = 4  # of BLOCK_W columns that a program of widen takes
BLOCK_S = 256  # pairs of a program
MOST_R = 64  # ranks of a program


class Matrix(NamedTuple):
    """Matrices of all experts, one after the other."""

    ptr: Pointer
    stride_r: Specialized
    stride_w: Specialized


@unprefixed
class RankTile(NamedTuple):
    """Sizes, and how much of each a program takes at a time."""

    W: Specialized
    R: Specialized
    BLOCK_M: Constant
    BLOCK_W: Constant
    BLOCK_R: Constant


@unprefixed
class WideRows(NamedTuple):
    """Sorted rows (S, W), or tokens (M, W) that are read through the pair of each row."""

    x: Pointer
    stride_m: Specialized
    stride_k: Specialized
    order: Pointer  # None: rows
    TOP_K: Constant


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


@triton.jit
def last_first():
    """The block of this program: the last one first, because the cache holds what the product
    before wrote last.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


@arguments
class Narrow:
    u: Pointer  # (S, R), written
    copy: Pointer  # (S, W), written: the rows; or None
    rows: WideRows
    weights: RouterWeights  # that multiply the rows of tokens, or none
    matrix: Matrix
    index: Pointer  # the table of blocks
    E: Runtime
    scale: RuntimeFloat
    tile: RankTile


@kernel(Narrow)
def moe_ops_train_narrow(
    u_ptr,
    copy_ptr,
    x_ptr,
    stride_m,
    stride_k,
    order_ptr,
    TOP_K: tl.constexpr,
    weights_ptr,
    weights_stride_m,
    weights_stride_k,
    matrix_ptr,
    matrix_stride_r,
    matrix_stride_w,
    index_ptr,
    E,
    scale,
    W,
    R,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """u = scale * x matrix[e]^T, 0 for rows of no expert; and where tokens are read, a copy of
    them as rows. Grid: (blocks, tiles of the rank).
    """
    index_ptr += 4 * tl.program_id(0)
    e = tl.load(index_ptr)
    if e < 0:
        return
    rows = (tl.load(index_ptr + 1) + tl.arange(0, BLOCK_M)).to(tl.int64)
    inside = rows < tl.load(index_ptr + 2)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    at_u = u_ptr + rows[:, None] * R + r[None, :]
    ok_u = inside[:, None] & (r < R)[None, :]
    if e >= E:
        tl.store(at_u, tl.zeros((BLOCK_M, BLOCK_R), u_ptr.dtype.element_ty), mask=ok_u)
        return
    at = rows
    if order_ptr is not None:
        pair = tl.load(order_ptr + rows, mask=inside, other=0)
        at = (pair // TOP_K).to(tl.int64)
    if weights_ptr is not None:
        weights_ptr += at * weights_stride_m + (pair % TOP_K) * weights_stride_k
        s = tl.load(weights_ptr, mask=inside, other=0.0).to(tl.float32)
    copied = tl.where(tl.program_id(1) == 0, W, 0)  # columns that this program copies
    matrix_ptr += e.to(tl.int64) * R * W
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    STAGES: tl.constexpr = 2 if copy_ptr is None else 3
    for start in tl.range(0, W, BLOCK_W, num_stages=STAGES):
        w = start + tl.arange(0, BLOCK_W)
        x = tl.load(
            x_ptr + at[:, None] * stride_m + w.to(tl.int64)[None, :] * stride_k,
            mask=inside[:, None] & (w < W)[None, :],
            other=0.0,
        )
        if copy_ptr is not None:
            # Triton gives a load one buffer if a store takes it beside a product, which still
            # reads that buffer while the next load fills it. What is selected has its own.
            x = tl.where(inside[:, None], x, 0.0)
        if weights_ptr is not None:
            x = (x.to(tl.float32) * s[:, None]).to(u_ptr.dtype.element_ty)
        matrix = tl.load(
            matrix_ptr + w[:, None] * matrix_stride_w + r[None, :] * matrix_stride_r,
            mask=(w < W)[:, None] & (r < R)[None, :],
            other=0.0,
        )
        total = tl.dot(x, matrix, total, input_precision="ieee")
        if copy_ptr is not None:
            mine = inside[:, None] & (w < copied)[None, :]
            tl.store(copy_ptr + rows[:, None] * W + w[None, :], x, mask=mine)
    tl.store(at_u, (total * scale).to(u_ptr.dtype.element_ty), mask=ok_u)


@arguments
class Widen:
    y: Pointer  # (S, W), added to
    u: Pointer  # (S, R)
    matrix: Matrix
    index: Pointer  # the table of blocks
    E: Runtime
    tile: RankTile
    TILES: Constant  # of the rank


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
    TILES: tl.constexpr,
):
    """y += u matrix[e]^T. Grid: (blocks, parts of the columns)."""
    index_ptr += 4 * last_first()
    e = tl.load(index_ptr)
    if (e < 0) | (e >= E):
        return
    rows = (tl.load(index_ptr + 1) + tl.arange(0, BLOCK_M)).to(tl.int64)
    inside = (rows < tl.load(index_ptr + 2))[:, None]
    y_ptr += rows[:, None] * W
    u_ptr += rows[:, None] * R
    matrix_ptr += e.to(tl.int64) * R * W
    step = tl.num_programs(1) * BLOCK_W
    first = tl.program_id(1) * BLOCK_W
    w = first + tl.arange(0, BLOCK_W)
    next_y = tl.load(y_ptr + w[None, :], mask=inside & (w < W)[None, :], other=0.0)
    r = tl.arange(0, BLOCK_R)
    u = tl.load(u_ptr + r[None, :], mask=inside & (r < R)[None, :], other=0.0)
    STAGES: tl.constexpr = 3 if TILES == 1 else 1  # shared memory has room for one tile ahead
    for start in tl.range(first, W, step, num_stages=STAGES):
        total = next_y.to(tl.float32)
        w = start + step + tl.arange(0, BLOCK_W)  # a step ahead
        next_y = tl.load(y_ptr + w[None, :], mask=inside & (w < W)[None, :], other=0.0)
        w = start + tl.arange(0, BLOCK_W)
        for t in tl.static_range(TILES):
            r = t * BLOCK_R + tl.arange(0, BLOCK_R)
            if TILES > 1:
                u = tl.load(u_ptr + r[None, :], mask=inside & (r < R)[None, :], other=0.0)
            matrix = tl.load(
                matrix_ptr + r[:, None] * matrix_stride_r + w[None, :] * matrix_stride_w,
                mask=(r < R)[:, None] & (w < W)[None, :],
                other=0.0,
            )
            total = tl.dot(u, matrix, total, input_precision="ieee")
        y = total.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + w[None, :], y, mask=inside & (w < W)[None, :])


@arguments
class Outer:
    out: Matrix  # written
    rows: WideRows
    u: Pointer  # (S, R)
    groups: Pointer
    tile: RankTile


@kernel(Outer)
def moe_ops_train_low_rank_outer(
    out_ptr,
    out_stride_r,
    out_stride_w,
    x_ptr,
    stride_m,
    stride_k,
    order_ptr,
    TOP_K: tl.constexpr,
    u_ptr,
    groups_ptr,
    W,
    R,
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
    for first in tl.range(begin, end, BLOCK_M, num_stages=2):
        rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        inside = rows < end
        at = rows
        if order_ptr is not None:
            at = (tl.load(order_ptr + rows, mask=inside, other=0) // TOP_K).to(tl.int64)
        x = tl.load(
            x_ptr + at[:, None] * stride_m + w.to(tl.int64)[None, :] * stride_k,
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


def _matrix(t: Tensor, rank_first: bool) -> tuple[Matrix, RankTile]:
    """The Matrix of a contiguous tensor (E, R, W), or (E, W, R), and its tile."""
    if rank_first:
        _, R, W = t.shape
        matrix = Matrix(t, W, 1)
    else:
        _, W, R = t.shape
        matrix = Matrix(t, 1, R)
    return matrix, RankTile(W, R, BLOCK_M, BLOCK_W, block_r(R))


def block_r(R: int) -> int:
    """Ranks of a program."""
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
    weights: Tensor | None = None,  # (M, top_k)
    copy: Tensor | None = None,  # (S, W), written
) -> Launch:
    """u = scale * x matrix[e]^T, and tokens, times weights if there are any, copied as rows."""
    operand, tile = _matrix(matrix, rank_first)
    if copy is not None:
        tile = tile._replace(BLOCK_W=COPY_W)
    args = Narrow(
        u=u,
        copy=copy,
        rows=WideRows(x, x.stride(0), x.stride(1), order, top_k),
        weights=router_weights(weights),
        matrix=operand,
        index=blocks.index,
        E=blocks.E,
        scale=scale,
        tile=tile,
    )
    return Launch(moe_ops_train_narrow, (blocks.num_blocks, cdiv(tile.R, tile.BLOCK_R), 1), args)


def widen(y: Tensor, u: Tensor, matrix: Tensor, rank_first: bool, blocks: Routing) -> Launch:
    """y (S, W) += u (S, R) matrix[e]^T."""
    operand, tile = _matrix(matrix, rank_first)
    args = Widen(
        y=y,
        u=u,
        matrix=operand,
        index=blocks.index,
        E=blocks.E,
        tile=tile,
        TILES=cdiv(tile.R, tile.BLOCK_R),
    )
    parts = cdiv(cdiv(tile.W, BLOCK_W), STEPS)
    return Launch(moe_ops_train_widen, (blocks.num_blocks, parts, 1), args)


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
    operand, tile = _matrix(out, rank_first)
    rows = WideRows(x, x.stride(0), x.stride(1), order, top_k)
    args = Outer(out=operand, rows=rows, u=u, groups=layout.groups, tile=tile)
    grid = (out.shape[0], cdiv(tile.W, BLOCK_W), cdiv(tile.R, tile.BLOCK_R))
    return Launch(moe_ops_train_low_rank_outer, grid, args)
