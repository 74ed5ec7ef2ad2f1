"""Products with the low-rank adapters of tokens for few pairs, of which hardly two share a matrix:
a program multiplies rows of matrices with the row of one pair, without tensor cores. Imported at
first launch only.

Programs find expert and position of their pair from ids and read no table of blocks. Ids and
matrices are older than the layer: what a program reads of them first it asks for before gdc_wait,
so that memory is busy while the kernel before ends.

Legend: S pairs, E local experts, n adapters, W wide columns, R rank. Of each pair the narrow row u
has a part for each of SHARES programs that share the columns of its sums.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.configs import PAIR_BUCKETS, pair_bucket
from moe_ops.kernels.device.blocks import local_expert, sorted_position
from moe_ops.kernels.device.e4m3 import decode_activation
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait, gdc_wait_at_the_end
from moe_ops.kernels.device.permutation import column_in_chunks
from moe_ops.kernels.gemm.operands import Output
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
from moe_ops.kernels.place.routing import RouterWeights, Routing
from moe_ops.kernels.rows.scales import Input
from moe_ops.meta.workspace import cdiv

MOST_PAIRS = PAIR_BUCKETS[-1]  # every program reads the ids of all
MOST_RANK = 128
ELEMENTS = 8192  # of matrices that a program asks for at once: 128 bytes a thread
STEP = 4096  # likewise, of which a program has those of two steps


@unprefixed
class RowAdapters(NamedTuple):
    """The adapters of tokens."""

    adapter: Pointer  # (M,)
    adapter_stride: Specialized
    n: Runtime


@unprefixed
class InChunks(NamedTuple):
    """Rows whose columns are permuted in chunks for mixed_gemm/sm90_wgmma.py; K_CHUNK 0: not."""

    K_CHUNK: Constant
    W_BITS: Constant
    X_BITS: Constant
    TAIL: Constant


IN_ORDER = InChunks(0, 0, 0, False)


@unprefixed
class PairTile(NamedTuple):
    """Sizes, how much of a matrix a program asks for at once, and how it finds its pair's
    position.
    """

    S: Runtime
    R: Constant
    PAIR_BUCKET: Constant  # as of `moe_ops_permute_tokens`; 0: in the order of pairs
    BLOCK_W: Constant
    BLOCK_R: Constant


@triton.jit
def adapters_of(adapter_ptr, adapter_stride, n, token, ok):
    """The adapter of each token, n for one without. Numbers are checked before they are narrowed
    to int32.
    """
    adapter = tl.load(adapter_ptr + token * adapter_stride, mask=ok, other=-1)
    return tl.where((adapter >= 0) & (adapter < n), adapter, n).to(tl.int32)


@triton.jit
def position_of(
    pair, ids_ptr, map_ptr, S, E, num_ids, top_k, ids_stride_m, ids_stride_k, map_stride,
    PAIR_BUCKET: tl.constexpr,
):  # fmt: skip
    """The position of a pair."""
    if PAIR_BUCKET:
        _, of_others, rank, _ = sorted_position(
            pair, ids_ptr, map_ptr, S, E, num_ids, top_k,
            ids_stride_m, ids_stride_k, map_stride, PAIR_BUCKET,
        )  # fmt: skip
        return (of_others + rank).to(tl.int64)
    else:
        return pair.to(tl.int64)


@triton.jit
def sum_of_parts(ptrs, stride, mask, PARTS: tl.constexpr):
    """Parts of sums, added in their order."""
    total = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ptrs + part * stride, mask=mask, other=0.0).to(tl.float32)
    return total


@arguments
class NarrowPairs:
    u: Pointer  # (shares, S, R) fp32, written in the order of pairs
    x: Input  # tokens (M, W), or rows (S, W) at the pairs' positions
    matrix: Pointer  # (n, E, R, W)
    adapters: RowAdapters
    scale: Pointer  # (n,) fp32
    routing: Routing
    topk_weights: RouterWeights  # that scale tokens, or none
    chunks: InChunks
    TOKENS: Constant
    W: Specialized
    COLUMNS: Constant  # of a share
    tile: PairTile
    # it runs beside the kernel before: gdc_wait_at_the_end; False: it waits for rows
    BESIDE: Constant
    PDL: Constant


@kernel(NarrowPairs)
def moe_ops_pairs_narrow(
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
    K_CHUNK: tl.constexpr,
    W_BITS: tl.constexpr,
    X_BITS: tl.constexpr,
    TAIL: tl.constexpr,
    TOKENS: tl.constexpr,
    W,
    COLUMNS: tl.constexpr,
    S,
    R: tl.constexpr,
    PAIR_BUCKET: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BESIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """u = scale * a[adapter, e] x over a share of the columns; of pairs without an adapter nothing
    is written. Grid: (pairs, shares).

    The next kernel reads nothing of earlier ones before gdc_wait but ids, weights and the table of
    blocks, which was complete when the kernel before this one started.
    """
    gdc_launch_dependents(PDL)
    pair = tl.program_id(0)
    token = (pair // top_k).to(tl.int64)
    e = local_expert(
        ids_ptr, map_ptr, pair, pair >= 0, E, num_ids, top_k,
        ids_stride_m, ids_stride_k, map_stride,
    )  # fmt: skip
    adapter = adapters_of(adapter_ptr, adapter_stride, n, token, e >= 0)
    has_one = adapter < n
    begin = tl.program_id(1) * COLUMNS
    end = tl.where(has_one, tl.minimum(begin + COLUMNS, W), begin)
    r = tl.arange(0, BLOCK_R)
    r_ok = (r < R)[:, None]
    lane = tl.arange(0, BLOCK_W)
    matrix_row = (adapter.to(tl.int64) * E + e) * R + r
    matrix_ptrs = matrix_ptr + matrix_row[:, None] * W + (begin + lane)[None, :]
    matrix = tl.load(matrix_ptrs, mask=r_ok & (begin + lane < end)[None, :], other=0.0)
    scale = tl.load(scale_ptr + adapter, mask=has_one, other=0.0)
    if topk_weights_ptr is not None:
        topk_weights_ptr += token * topk_weights_stride_m + (pair % top_k) * topk_weights_stride_k
        scale *= tl.load(topk_weights_ptr, mask=has_one, other=0.0).to(tl.float32)
    row = token
    if not TOKENS:
        row = position_of(
            pair, ids_ptr, map_ptr, S, E, num_ids, top_k, ids_stride_m, ids_stride_k, map_stride,
            PAIR_BUCKET,
        )  # fmt: skip
    if not BESIDE:
        gdc_wait(PDL)
    total = tl.zeros((BLOCK_R,), tl.float32)
    for start in tl.range(begin, end, BLOCK_W, num_stages=1):
        w, current = start + lane, matrix
        if COLUMNS > BLOCK_W:  # the next step's, asked for before this one's are multiplied
            matrix_ptrs += BLOCK_W
            matrix = tl.load(matrix_ptrs, mask=r_ok & (w + BLOCK_W < end)[None, :], other=0.0)
        at = w
        if K_CHUNK:
            at = column_in_chunks(w, W, K_CHUNK, W_BITS, X_BITS, TAIL)
        x_ptrs = x_ptr + row * x_stride_m + at.to(tl.int64) * x_stride_k
        x = tl.load(x_ptrs, mask=w < end, other=0.0)
        if x_scale_ptr is not None:
            x = x if x.dtype == tl.int8 else decode_activation(x)
            of_row = e * x_scale_stride_e + row * x_scale_stride_m
            scale_ptrs = x_scale_ptr + of_row + w // 128 * x_scale_stride_g
            x = x.to(tl.float32) * tl.load(scale_ptrs, mask=w < end, other=0.0).to(tl.float32)
        total += tl.sum(current.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    u_row = tl.program_id(1).to(tl.int64) * S + pair
    tl.store(u_ptr + u_row * R + r, total * scale, mask=r < tl.where(has_one, R, 0))
    gdc_wait_at_the_end(BESIDE)


@arguments
class WidenPairs:
    y: Output  # (S, W), written at the pairs' positions
    u: Pointer  # (SHARES, S, R) fp32
    matrix: Pointer  # (n, E, W, R)
    adapters: RowAdapters
    routing: Routing
    W: Specialized
    SHARES: Constant
    tile: PairTile
    PDL: Constant


@kernel(WidenPairs)
def moe_ops_pairs_widen(
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
    W,
    SHARES: tl.constexpr,
    S,
    R: tl.constexpr,
    PAIR_BUCKET: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = b[adapter, e] u, 0 for pairs without an adapter. Grid: (pairs, tiles of the columns)."""
    pair = tl.program_id(0)
    e = local_expert(
        ids_ptr, map_ptr, pair, pair >= 0, E, num_ids, top_k,
        ids_stride_m, ids_stride_k, map_stride,
    )  # fmt: skip
    token = (pair // top_k).to(tl.int64)
    adapter = adapters_of(adapter_ptr, adapter_stride, n, token, e >= 0)
    has_one = adapter < n
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    r = tl.arange(0, BLOCK_R)
    matrix_row = (adapter.to(tl.int64) * E + e) * W + w
    mask = (w < tl.where(has_one, W, 0))[:, None] & (r < R)[None, :]
    matrix = tl.load(matrix_ptr + matrix_row[:, None] * R + r[None, :], mask=mask, other=0.0)
    position = position_of(
        pair, ids_ptr, map_ptr, S, E, num_ids, top_k, ids_stride_m, ids_stride_k, map_stride,
        PAIR_BUCKET,
    )  # fmt: skip
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    stride = tl.cast(S, tl.int64) * R
    u_mask = r < tl.where(has_one, R, 0)
    u = sum_of_parts(u_ptr + pair.to(tl.int64) * R + r, stride, u_mask, SHARES)
    y = tl.sum(matrix.to(tl.float32) * u[None, :], 1)
    y_ptrs = y_ptr + position * y_stride_m + w.to(tl.int64) * y_stride_n
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=w < tl.where(e >= 0, W, 0))


@unprefixed
class PairSum(NamedTuple):
    """How y of a token's pairs is summed."""

    TOP_K: Constant
    BLOCK_J: Constant  # a power of two, at least TOP_K
    WEIGHTED: Constant
    SPLIT_K: Constant


@arguments
class CombinePairs:
    out: Pointer  # (M, W), written
    y: Pointer  # (SPLIT_K, S, W), in the order of pairs, as of moe_ops_combine
    u: Pointer  # (SHARES, S, R) fp32
    matrix: Pointer  # (n, E, W, R)
    adapters: RowAdapters
    topk_weights: RouterWeights
    routing: Routing
    W: Specialized
    out_stride_m: Specialized
    out_stride_k: Specialized
    how: PairSum
    SHARES: Constant
    tile: PairTile
    PDL: Constant


@kernel(CombinePairs)
def moe_ops_pairs_combine(
    out_ptr,
    y_ptr,
    u_ptr,
    matrix_ptr,
    adapter_ptr,
    adapter_stride,
    n,
    topk_weights_ptr,
    topk_weights_stride_m,
    topk_weights_stride_k,
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
    W,
    out_stride_m,
    out_stride_k,
    TOP_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SHARES: tl.constexpr,
    S,
    R: tl.constexpr,
    PAIR_BUCKET: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[m] = sum over top_k of router weight * (y + b[adapter, e] u), in fp32, rounded once.
    Grid: (M, column tiles).
    """
    m = tl.program_id(0)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    r = tl.arange(0, BLOCK_R)
    j = tl.arange(0, BLOCK_J)
    pair = m * TOP_K + j
    e = local_expert(
        ids_ptr, map_ptr, pair, j < TOP_K, E, num_ids, TOP_K,
        ids_stride_m, ids_stride_k, map_stride,
    )  # fmt: skip
    here = e >= 0
    m64 = m.to(tl.int64)
    adapter = adapters_of(adapter_ptr, adapter_stride, n, m64, m >= 0)
    adapted = e >= tl.where(adapter < n, 0, E)
    matrix_row = (adapter.to(tl.int64) * E + e)[:, None] * W + w[None, :]
    mask = adapted[:, None, None] & (w < W)[None, :, None] & (r < R)[None, None, :]
    matrix_ptrs = matrix_ptr + matrix_row[:, :, None] * R + r[None, None, :]
    matrix = tl.load(matrix_ptrs, mask=mask, other=0.0)
    scale = tl.where(here, 1.0, 0.0)
    if WEIGHTED:
        weight_ptrs = topk_weights_ptr + m64 * topk_weights_stride_m + j * topk_weights_stride_k
        scale = tl.load(weight_ptrs, mask=here, other=0.0).to(tl.float32)
    gdc_wait(PDL)
    row = pair.to(tl.int64)[:, None]
    y_mask = here[:, None] & (w < W)[None, :]
    stride = tl.cast(S, tl.int64)
    y = sum_of_parts(y_ptr + row * W + w[None, :], stride * W, y_mask, SPLIT_K)
    u_mask = adapted[:, None] & (r < R)[None, :]
    u = sum_of_parts(u_ptr + row * R + r[None, :], stride * R, u_mask, SHARES)
    y += tl.sum(matrix.to(tl.float32) * u[:, None, :], 2)
    total = tl.sum(y * scale[:, None], 0)
    out_ptrs = out_ptr + m64 * out_stride_m + w.to(tl.int64) * out_stride_k
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=w < W)


class Summed(NamedTuple):
    """The sum over a token's pairs with which a layer ends."""

    out: Tensor  # (M, K)
    weights: RouterWeights  # that scale its terms, or none
    split_k: int = 1  # partial sums that y has


class PairProducts(NamedTuple):
    """The launches for a stack of adapters of one weight, a (n, E, R, W) before and b (n, E, W, R)
    behind. Their u is in `workspace`, in `shares`.
    """

    a: Tensor
    b: Tensor
    scales: Tensor
    adapters: RowAdapters
    workspace: Tensor
    routing: Routing
    S: int
    shares: int
    gpu: Gpu

    def narrow(
        self,
        x: Input,
        on_input: RouterWeights,
        are_tokens: bool,
        chunks: InChunks,
        columns: int,  # of a share
        beside: bool,
    ) -> Launch:
        """Make rows narrow: tokens, or rows at the pairs' positions."""
        W = self.a.shape[3]
        args = NarrowPairs(
            u=self.workspace,
            x=x,
            matrix=self.a,
            adapters=self.adapters,
            scale=self.scales,
            routing=self.routing,
            topk_weights=on_input,
            chunks=chunks,
            TOKENS=are_tokens,
            W=W,
            COLUMNS=columns,
            tile=self._tile(not are_tokens, columns, STEP),
            BESIDE=beside and self.gpu.pdl,
            PDL=self.gpu.pdl,
        )
        return Launch(moe_ops_pairs_narrow, (self.S, self.shares, 1), args)

    def widen(self, y: Output) -> Launch:
        """Write what they add to rows at the pairs' positions."""
        W = self.b.shape[2]
        tile = self._tile(True, W)
        args = WidenPairs(
            y=y,
            u=self.workspace,
            matrix=self.b,
            adapters=self.adapters,
            routing=self.routing,
            W=W,
            SHARES=self.shares,
            tile=tile,
            PDL=self.gpu.pdl,
        )
        return Launch(moe_ops_pairs_widen, (self.S, cdiv(W, tile.BLOCK_W), 1), args)

    def combine(self, y: Tensor, summed: Summed) -> Launch:
        """Sum a token's rows of y, to each of which its adapter is added."""
        (M, W), top_k = summed.out.shape, self.routing.top_k
        stride_m, stride_k = summed.out.stride()
        block_j = triton.next_power_of_2(top_k)
        tile = self._tile(False, W, ELEMENTS // block_j)
        args = CombinePairs(
            out=summed.out,
            y=y,
            u=self.workspace,
            matrix=self.b,
            adapters=self.adapters,
            topk_weights=summed.weights,
            routing=self.routing,
            W=W,
            out_stride_m=stride_m,
            out_stride_k=stride_k,
            how=PairSum(top_k, block_j, summed.weights.ptr is not None, summed.split_k),
            SHARES=self.shares,
            tile=tile,
            PDL=self.gpu.pdl,
        )
        return Launch(moe_ops_pairs_combine, (M, cdiv(W, tile.BLOCK_W), 1), args)

    def _tile(self, positions: bool, columns: int, elements: int = ELEMENTS) -> PairTile:
        """A tile of so many elements, and of `columns` wide columns at most."""
        ranks = triton.next_power_of_2(self.b.shape[3])
        wide = min(elements // ranks, triton.next_power_of_2(columns))
        bucket = pair_bucket(self.S) if positions and self.routing.ROWS == "sorted" else 0
        return PairTile(self.S, self.b.shape[3], bucket, max(16, wide), ranks)
