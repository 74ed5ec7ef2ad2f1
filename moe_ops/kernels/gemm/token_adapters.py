"""Products with the low-rank adapters of tokens, of which each may have another one: of few pairs
by pair_adapters.py, else the rows of a block of one expert take theirs one after the other.
Imported at first launch only.

What they read is that of the adapters that rows of the block have, so that memory decides how long
they take. With few blocks, programs share the columns of a sum.

Legend: S pairs sorted by expert, E local experts, n adapters, W wide columns, R rank. Rows, blocks
and positions as in kernels/gemm/sm80_mma.py. BLOCK_M is a power of two, at least MOST_M, the most
rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.configs import MOST_SHARES
from moe_ops.kernels.device.blocks import block_rows, pairs_at
from moe_ops.kernels.device.e4m3 import decode_activation
from moe_ops.kernels.device.interpreter import INTERPRET
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.device.permutation import column_in_chunks
from moe_ops.kernels.gemm.operands import Output
from moe_ops.kernels.gemm.pair_adapters import (
    IN_ORDER,
    MOST_PAIRS,
    MOST_RANK,
    InChunks,
    PairProducts,
    RowAdapters,
    Summed,
    adapters_of,
    sum_of_parts,
)
from moe_ops.kernels.launch import (
    Constant,
    Gpu,
    Launch,
    Pointer,
    Runtime,
    Specialized,
    arguments,
    kernel,
    unprefixed,
)
from moe_ops.kernels.place.routing import NO_ROUTER_WEIGHTS, RouterWeights, Routing
from moe_ops.kernels.rows.scales import Input, flat, rows_of
from moe_ops.meta.workspace import cdiv, round_up
from moe_ops.ops.args import TokenAdapters

BLOCK_W = 128  # wide columns of a step, or of a program; those that share a scale
MOST_R = 64  # ranks of a program
MOST_AT_ONCE = tl.constexpr(2048)  # elements of a tile, whose parts are loaded at once
FEW_ROWS = 64  # of a block, up to which four warps hold a tile in registers


@unprefixed
class RowsTile(NamedTuple):
    """Sizes, and how much of each a program takes at a time."""

    S: Runtime
    W: Specialized
    R: Specialized
    MOST_M: Constant
    BLOCK_M: Constant
    BLOCK_W: Constant
    BLOCK_R: Constant


@triton.jit
def product(x, matrix, total):
    """total + x @ matrix, in the dtype of the matrix."""
    x = x.to(matrix.dtype)
    if INTERPRET:  # whose 16-bit products are wrong
        x = x.to(tl.float32)
        matrix = matrix.to(tl.float32)
    return tl.dot(x, matrix, total, input_precision="ieee")


@arguments
class NarrowByAdapter:
    u: Pointer  # (shares, S, R) fp32, written at the blocks' positions
    x: Input  # tokens (M, W), or rows (S, W) at the blocks' positions
    matrix: Pointer  # (n, E, R, W)
    adapters: RowAdapters
    scale: Pointer  # (n,) fp32
    routing: Routing
    topk_weights: RouterWeights  # that scale tokens, or none
    COLUMNS: Constant  # of a share
    chunks: InChunks
    TOKENS: Constant
    tile: RowsTile
    PDL: Constant


@kernel(NarrowByAdapter)
def moe_ops_adapters_narrow(
    u_ptr,
    x_ptr,
    x_stride_e,
    x_stride_m,
    x_stride_k,
    x_scale_ptr,
    x_scale_stride_e,
    x_scale_stride_m,
    x_scale_stride_g,
    x_partials: tl.constexpr,
    matrix_ptr,
    adapter_ptr,
    adapter_stride,
    n,
    scale_ptr,
    index_ptr,
    ids_ptr,
    map_ptr,
    num_blocks,
    E,
    num_ids,
    top_k,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    ROWS: tl.constexpr,
    topk_weights_ptr,
    topk_weights_stride_m,
    topk_weights_stride_k,
    COLUMNS: tl.constexpr,
    K_CHUNK: tl.constexpr,
    W_BITS: tl.constexpr,
    X_BITS: tl.constexpr,
    TAIL: tl.constexpr,
    TOKENS: tl.constexpr,
    S,
    W,
    R,
    MOST_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """u = scale * x a[adapter, e]^T over a share of the columns, for the rows that have an
    adapter; of others nothing is written. Grid: (blocks, shares, tiles of the rank).
    """
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    e, position, ok = block_rows(
        index_ptr, ids_ptr, map_ptr, tl.program_id(0), E, num_ids, top_k,
        ids_stride_m, ids_stride_k, map_stride, BLOCK_M, ROWS,
    )  # fmt: skip
    if e < 0:
        return
    ok = ok & (tl.arange(0, BLOCK_M) < MOST_M)
    pair = pairs_at(index_ptr, num_blocks, position, ok, ROWS)
    token = (pair // top_k).to(tl.int64)
    adapter = adapters_of(adapter_ptr, adapter_stride, n, token, ok)
    place = position.to(tl.int64)
    row = token if TOKENS else place
    r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = tl.program_id(1) * COLUMNS
    end = tl.minimum(begin + COLUMNS, W)
    has_one = adapter < n
    scale = tl.load(scale_ptr + adapter, mask=has_one, other=0.0)
    if topk_weights_ptr is not None:
        topk_weights_ptr += token * topk_weights_stride_m + (pair % top_k) * topk_weights_stride_k
        scale *= tl.load(topk_weights_ptr, mask=has_one, other=0.0).to(tl.float32)
    u_row = tl.program_id(1).to(tl.int64) * S + place
    u_ptrs = u_ptr + u_row[:, None] * R + r[None, :]
    current = tl.min(adapter, 0)
    while current < n:
        here = adapter == current
        matrix_row = (current.to(tl.int64) * E + e) * R + r
        total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for start in tl.range(begin, end, BLOCK_W, num_stages=2):
            w = start + tl.arange(0, BLOCK_W)
            at = w
            if K_CHUNK:
                at = column_in_chunks(w, W, K_CHUNK, W_BITS, X_BITS, TAIL)
            x_mask = here[:, None] & (w < end)[None, :]
            x_ptrs = x_ptr + row[:, None] * x_stride_m + at.to(tl.int64)[None, :] * x_stride_k
            x = tl.load(x_ptrs, mask=x_mask, other=0.0)
            if x_scale_ptr is not None:
                x = x if x.dtype == tl.int8 else decode_activation(x)
                x = x.to(tl.float32)
                of_rows = e * x_scale_stride_e + row * x_scale_stride_m
                of_rows += start // 128 * x_scale_stride_g
                x *= tl.load(x_scale_ptr + of_rows, mask=here, other=0.0).to(tl.float32)[:, None]
            matrix = tl.load(
                matrix_ptr + matrix_row[None, :] * W + w[:, None],
                mask=(w < end)[:, None] & (r < R)[None, :],
                other=0.0,
            )
            total = product(x, matrix, total)
        # each adapter's rows alone: its matrix, if not finite, makes NaN of zeros of the others
        tl.store(u_ptrs, total * scale[:, None], mask=here[:, None] & (r < R)[None, :])
        current = tl.min(tl.where(adapter > current, adapter, n), 0)


@triton.jit
def sum_of_shares(ptrs, stride, mask, SHARES: tl.constexpr):
    """Parts of sums, added in their order. Those of a large tile are loaded one after the other:
    all of them at once take more registers than there are.
    """
    if ptrs.shape[0] * ptrs.shape[1] <= MOST_AT_ONCE:
        total = sum_of_parts(ptrs, stride, mask, SHARES)
    else:
        total = tl.zeros(ptrs.shape, tl.float32)
        for share in tl.range(0, SHARES, num_stages=1):
            total += tl.load(ptrs + share * stride, mask=mask, other=0.0)
    return total


@arguments
class WidenByAdapter:
    y: Output  # (S, W), written at the blocks' positions, or added to at their pairs
    u: Pointer  # (SHARES, S, R) fp32
    matrix: Pointer  # (n, E, W, R)
    adapters: RowAdapters
    routing: Routing
    SHARES: Constant
    ADDS: Constant
    tile: RowsTile
    TILES: Constant  # of the rank
    PDL: Constant


@kernel(WidenByAdapter)
def moe_ops_adapters_widen(
    y_ptr,
    y_stride_e,
    y_stride_m,
    y_stride_n,
    u_ptr,
    matrix_ptr,
    adapter_ptr,
    adapter_stride,
    n,
    index_ptr,
    ids_ptr,
    map_ptr,
    num_blocks,
    E,
    num_ids,
    top_k,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    ROWS: tl.constexpr,
    SHARES: tl.constexpr,
    ADDS: tl.constexpr,
    S,
    W,
    R,
    MOST_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = u b[adapter, e]^T, 0 for rows without an adapter; or with ADDS y += that. Grid: (blocks,
    tiles of the columns).
    """
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    e, position, ok = block_rows(
        index_ptr, ids_ptr, map_ptr, tl.program_id(0), E, num_ids, top_k,
        ids_stride_m, ids_stride_k, map_stride, BLOCK_M, ROWS,
    )  # fmt: skip
    if e < 0:
        return
    ok = ok & (tl.arange(0, BLOCK_M) < MOST_M)
    pair = pairs_at(index_ptr, num_blocks, position, ok, ROWS)
    adapter = adapters_of(adapter_ptr, adapter_stride, n, (pair // top_k).to(tl.int64), ok)
    current = tl.min(adapter, 0)
    if ADDS and current == n:
        return
    place = position.to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    w_ok = w < W
    at = pair.to(tl.int64) if ADDS else place
    y_ptrs = y_ptr + at[:, None] * y_stride_m + w.to(tl.int64)[None, :] * y_stride_n
    if not ADDS:
        without = (ok & (adapter == n))[:, None] & w_ok[None, :]
        zeros = tl.zeros((BLOCK_M, BLOCK_W), y_ptr.dtype.element_ty)
        tl.store(y_ptrs, zeros, mask=without)
    while current < n:
        here = adapter == current
        matrix_row = (current.to(tl.int64) * E + e) * W + w
        mask = here[:, None] & w_ok[None, :]  # not of other rows, as in moe_ops_adapters_narrow
        total = tl.zeros((BLOCK_M, BLOCK_W), tl.float32)
        if ADDS:
            total = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
        for t in tl.static_range(TILES):
            r = t * BLOCK_R + tl.arange(0, BLOCK_R)
            u_ptrs = u_ptr + place[:, None] * R + r[None, :]
            u_mask = here[:, None] & (r < R)[None, :]
            u = sum_of_shares(u_ptrs, tl.cast(S, tl.int64) * R, u_mask, SHARES)
            matrix = tl.load(
                matrix_ptr + matrix_row[None, :] * R + r[:, None],
                mask=(r < R)[:, None] & w_ok[None, :],
                other=0.0,
            )
            total = product(u, matrix, total)
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask)
        current = tl.min(tl.where(adapter > current, adapter, n), 0)


class Around(NamedTuple):
    """What adapters do around the products of a layer."""

    added: Tensor | None = None  # (pairs, N), added before the activation, at blocks' positions
    beside: Sequence[Launch] = ()  # the kernels that place rows: they read none of theirs
    before: Sequence[Launch] = ()  # the product with w13
    between: Sequence[Launch] = ()  # both products: they read h
    after: Sequence[Launch] = ()  # the product with w2: they add to y
    summed: Launch | None = None  # in place of the layer's last launch


NOTHING_ADDED = Around()


class Where(NamedTuple):
    """The rows of a layer, or of a part of it, and their blocks."""

    pairs: int
    routing: Routing
    block_m: int
    gpu: Gpu
    begins: bool  # no launch of the layer is before those of adapters


class AdapterProducts(NamedTuple):
    """The adapters of a call's tokens, and the workspace of their products."""

    adapters: TokenAdapters
    workspace: Tensor

    def by_pair(self, pairs: int) -> bool:
        """Whether the kernels of pair_adapters.py run, which read no table of blocks."""
        return pairs <= MOST_PAIRS and max(self.adapters.ranks) <= MOST_RANK

    def around(
        self,
        tokens: Tensor,  # (M, K), which no scheme has rounded
        on_input: RouterWeights,  # that scale tokens
        N: int,  # rows of w13
        dtype: torch.dtype,  # of what is added
        h: Input,  # (pairs, I) at the blocks' positions
        y: Output,  # (pairs, K), in the order of pairs
        summed: Summed,
        where: Where,
        chunks: InChunks = IN_ORDER,  # of h
    ) -> Around:
        """The launches of a layer, or of a part of it."""
        a13, b13, a2, b2, *_ = self.adapters
        found, pairs, rows = NOTHING_ADDED, where.pairs, rows_of(tokens)
        h = h if h.data.dtype.itemsize == 1 else h._replace(scale=None, partials=1)
        if a13 is not None and b13 is not None:
            start = MOST_SHARES * pairs * max(self.adapters.ranks)
            added = flat(self.workspace[start:], dtype, pairs * N)
            to = Output(added, 0, N, 1)
            if self.by_pair(pairs):
                by_pair, columns = self._of_pairs(a13, b13, where)
                beside = by_pair.narrow(rows, on_input, True, IN_ORDER, columns, not where.begins)
                found = Around(added, beside=(beside,), before=(by_pair.widen(to),))
            else:
                narrow, shares = self._narrow(rows, a13, on_input, True, IN_ORDER, where)
                found = Around(added, before=(narrow, self._widen(to, b13, shares, False, where)))
        if a2 is not None and b2 is not None:
            if self.by_pair(pairs):
                by_pair, columns = self._of_pairs(a2, b2, where)
                narrow = by_pair.narrow(h, NO_ROUTER_WEIGHTS, False, chunks, columns, False)
                last = by_pair.combine(y.data, summed)
                return found._replace(between=(narrow,), summed=last)
            narrow, shares = self._narrow(h, a2, NO_ROUTER_WEIGHTS, False, chunks, where)
            widen = self._widen(y, b2, shares, True, where)
            found = found._replace(between=(narrow,), after=(widen,))
        return found

    def _of_pairs(self, a: Tensor, b: Tensor, where: Where) -> tuple[PairProducts, int]:
        """(Products with the adapters of a weight by pair, columns of a share)."""
        pairs, routing, _, gpu, _ = where
        W = a.shape[3]
        columns = columns_of_share(W, pairs, gpu)
        of_rows, scales = self._of_rows(), self.adapters.scales
        shared = (of_rows, self.workspace, routing, pairs, cdiv(W, columns), gpu)
        return PairProducts(a, b, scales, *shared), columns

    def _narrow(
        self,
        x: Input,
        a: Tensor,
        weights: RouterWeights,
        are_tokens: bool,
        chunks: InChunks,
        where: Where,
    ) -> tuple[Launch, int]:
        """(x made narrow, how many shares of the columns are summed apart)."""
        (_, _, R, W), (pairs, routing, block_m, gpu, _) = a.shape, where
        columns = columns_of_share(W, routing.num_blocks, gpu)
        shares, tile = cdiv(W, columns), _tile(pairs, W, R, block_m)
        args = NarrowByAdapter(
            u=self.workspace,
            x=x,
            matrix=a,
            adapters=self._of_rows(),
            scale=self.adapters.scales,
            routing=routing,
            topk_weights=weights,
            COLUMNS=columns,
            chunks=chunks,
            TOKENS=are_tokens,
            tile=tile,
            PDL=gpu.pdl,
        )
        grid = (routing.num_blocks, shares, cdiv(R, tile.BLOCK_R))
        return Launch(moe_ops_adapters_narrow, grid, args, _warps(tile)), shares

    def _widen(
        self,
        y: Output,
        b: Tensor,
        shares: int,
        adds: bool,
        where: Where,
    ) -> Launch:
        (_, _, W, R), (pairs, routing, block_m, gpu, _) = b.shape, where
        tile = _tile(pairs, W, R, block_m)
        args = WidenByAdapter(
            y=y,
            u=self.workspace,
            matrix=b,
            adapters=self._of_rows(),
            routing=routing,
            SHARES=shares,
            ADDS=adds,
            tile=tile,
            TILES=cdiv(R, tile.BLOCK_R),
            PDL=gpu.pdl,
        )
        grid = (routing.num_blocks, cdiv(W, tile.BLOCK_W), 1)
        return Launch(moe_ops_adapters_widen, grid, args, _warps(tile))

    def _of_rows(self) -> RowAdapters:
        ids = self.adapters.ids
        return RowAdapters(ids, ids.stride(0), self.adapters.scales.shape[0])


def columns_of_share(W: int, programs: int, gpu: Gpu) -> int:
    """Columns of a sum that one of those takes who share it: so few that programs fill the GPU
    four times, if MOST_SHARES suffice. Kernels are compiled for the number of shares, of which
    there are few.
    """
    shares = 1
    while shares < MOST_SHARES and shares * programs < 4 * gpu.multiprocessors:
        shares *= 2
    return round_up(cdiv(W, shares), BLOCK_W)


def _tile(pairs: int, W: int, R: int, block_m: int) -> RowsTile:
    rows = max(16, triton.next_power_of_2(block_m))
    ranks = min(MOST_R, max(16, triton.next_power_of_2(R)))
    return RowsTile(pairs, W, R, block_m, rows, BLOCK_W, ranks)


def _warps(tile: RowsTile) -> int:
    return 4 if tile.BLOCK_M <= FEW_ROWS else 8
