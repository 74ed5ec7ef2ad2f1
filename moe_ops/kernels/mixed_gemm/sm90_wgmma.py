"""The two grouped GEMMs of bf16 activations and weights of 4 to 8 bits by `wgmma`, and the
permutation of tokens before them: on SM90, for more than one token, of int4_w4a8 for one, too.
Imported at first launch only, if the installed Triton compiles Gluon (`configs.on_sm90`).

Of int4_w4a8 the permutation rounds tokens to e4m3, and a launch between the GEMMs rounds h. Both
operands of the products are in e4m3 where that is faster (`configs.multiplies_e4m3`).

Legend: S pairs sorted by expert, E local experts, K columns of the GEMM's input and weight, N its
output columns (GEMM1: I), BLOCK_M rows (tokens) of a block, BLOCK_N rows of the weight in a tile,
which give BLOCK_I columns of h (half as many if gated), BLOCK_K the step along K, K_CHUNK columns
decoded at a time. A tile is one block (kernels/device/blocks.py) and BLOCK_N rows of the weight.
As many programs as a GPU holds take one tile after the other. The mainloop is in sm90_mainloop.py.

Rows of x and h (S, K) are sorted by expert, and their columns are permuted within each chunk to
the order of the weights' fragments (sm90_decode.py); in e4m3 each chunk is followed by its
negatives, (S, 2 K). A weight is described as (E, chunks of a row, halves, rows, bytes of a chunk):
gate and up rows are two halves, other weights have one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.activation import Activated
from moe_ops.kernels.configs import LEVELS, GemmConfig, pair_bucket
from moe_ops.kernels.device.activations import activate_one, activate_two
from moe_ops.kernels.device.blocks import (
    BLOCKS_WITH_COUNTERS,
    MAX_PACKED,
    TAKEN1,
    TAKEN2,
    pack_block,
    sorted_position,
)
from moe_ops.kernels.device.e4m3 import (
    clamp,
    decode_activation,
    element_scale,
    largest_magnitude,
    nearest,
    quotient,
    reciprocal,
    store_signed,
)
from moe_ops.kernels.device.gluon import Boxes, fence_async_shared, gl, gluon, reinterpret
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.device.permutation import NEIGHBOURS, permuted_column_of_row
from moe_ops.kernels.launch import (
    Constant,
    Descriptor,
    Gpu,
    Launch,
    Pointer,
    Runtime,
    Specialized,
    arguments,
    kernel,
    unprefixed,
)
from moe_ops.kernels.mixed_gemm.configs import (
    FORMATS,
    blocks_together,
    max_unsorted_pairs,
)
from moe_ops.kernels.mixed_gemm.levels import is_level
from moe_ops.kernels.mixed_gemm.operands import (
    Decoding,
    Format,
    MixedOperand,
    MixedPointers,
    MixedStrides,
)
from moe_ops.kernels.mixed_gemm.sm90_decode import (
    operand_bits,
    weight_bits,
)
from moe_ops.kernels.mixed_gemm.sm90_levels import write_pairs
from moe_ops.kernels.mixed_gemm.sm90_mainloop import (
    HANDED,
    accumulator_layout,
    accumulator_rows,
    apply_column_scales,
    apply_row_scales,
    consume,
    factor_pointers,
    first_tile,
    in_two_levels,
    mbarriers,
    next_tile,
    prefetch_first,
    producer,
    scale_pointers,
    share_of,
)
from moe_ops.kernels.mixed_gemm.sm90_occupancy import (
    Occupancy,
    WgmmaKernel,
    beside_pairs,
    columns_of,
    occupancy,
)
from moe_ops.kernels.place.routing import NO_ROUTER_WEIGHTS, RouterWeights, Routing
from moe_ops.kernels.rows.emulated import Hidden, Round, moe_ops_round, row_scale
from moe_ops.kernels.rows.rounding import GAP, Rounding
from moe_ops.kernels.rows.scales import Input, flat
from moe_ops.meta.scales import rows_side_by_side
from moe_ops.meta.workspace import cdiv
from moe_ops.numerics.elements import e4m3_to_float32, round_products_to_e4m3

PERMUTED_COLUMNS = 1024  # columns of a row that a program permutes: 16 bytes a thread
MAX_EARLY_PAIRS = gl.constexpr(16)  # of a tile, for which its pairs are asked for before
WHOLE_ROW = 4096  # columns of the longest row that one program rounds at once


@triton.jit
def permute_columns(x, K_CHUNK: tl.constexpr, W_BITS: tl.constexpr, X_BITS: tl.constexpr):
    """(N,) columns of whole chunks, each at its permuted index."""
    N: tl.constexpr = x.shape[0]
    if X_BITS == 8:  # axes: chunk, thread, its words of 4 bytes, half of a word, column
        x = x.reshape(N // K_CHUNK, 4, K_CHUNK // 32, 2, 4).permute(0, 2, 3, 1, 4)
    elif W_BITS == 4:  # axes: chunk, thread, its words of 4 bytes, bits of a byte's index, nibble
        x = x.reshape(N // K_CHUNK, 4, K_CHUNK // 32, 2, 2, 2).permute(0, 5, 2, 4, 1, 3)
    elif W_BITS == NEIGHBOURS:
        x = x.reshape(N // K_CHUNK, 4, K_CHUNK // 32, 2, 2, 2).permute(0, 3, 2, 4, 1, 5)
    else:
        x = x.reshape(N // K_CHUNK, 4, K_CHUNK // 16, 2, 2).permute(0, 2, 4, 1, 3)
    return x.reshape(N)


@unprefixed
class SortedPairs(NamedTuple):
    """S pairs sorted by expert, and the tensors that they are sorted from. Kernels are not
    specialized on its numbers.

    For few pairs (`max_unsorted_pairs`) `num_blocks` is their number, and the index is as
    device/blocks.py says of these.
    """

    index: Pointer  # type: ignore[assignment]  # hides a method of tuples
    ids: Pointer  # (M, top_k)
    map: Pointer  # (num_ids,) global id -> local id, or None
    num_blocks: Runtime
    S: Runtime
    E: Runtime
    num_ids: Runtime
    top_k: Runtime


@unprefixed
class PairStrides(NamedTuple):
    """Strides of the ids and the map of SortedPairs."""

    ids_stride_m: Runtime
    ids_stride_k: Runtime
    map_stride: Runtime


class PairRouting(NamedTuple):
    """Routing as the three kernels of this file take it: S is among the counts, and strides come
    after K, for the reason given at `MixedPointers`.
    """

    pairs: SortedPairs
    strides: PairStrides


def pair_routing(routing: Routing, S: int) -> PairRouting:
    """The PairRouting of S pairs that are sorted by expert."""
    index, ids, expert_map, num_blocks, E, num_ids, top_k, stride_m, stride_k, map_stride, _ = (
        routing
    )
    return PairRouting(
        SortedPairs(index, ids, expert_map, num_blocks, S, E, num_ids, top_k),
        PairStrides(stride_m, stride_k, map_stride),
    )


@unprefixed
class Rounded(NamedTuple):
    """How rows are rounded to elements with one scale a row; without MANTISSA they are not."""

    MANTISSA: Constant  # bits of an element's mantissa
    MIN_EXPONENT: Constant  # exponent of an element's least normal number
    MAX_VALUE: Constant  # an element's largest number
    WHOLE_ROW: Constant  # the columns of a program are those of a row


NOT_ROUNDED = Rounded(0, 0, 0.0, False)


class RoundingBlock(NamedTuple):
    """How many columns programs round at a time."""

    columns: int
    whole_row: bool
    num_warps: int


@lru_cache(maxsize=1024)
def rounding_block(K: int) -> RoundingBlock:
    """The RoundingBlock of rows of K columns. One program takes a row, unless it is long: it then
    reads it once, where those of parts read it all for its scale.
    """
    columns = 1 << (K - 1).bit_length()
    if columns > WHOLE_ROW:
        return RoundingBlock(PERMUTED_COLUMNS, False, 4)
    return RoundingBlock(columns, True, 8 if columns > 2048 else 4)


def rounded_to(rounding: Rounding, block: RoundingBlock) -> Rounded:
    """The Rounded of a scheme's activations."""
    numbers = rounding.MANTISSA, rounding.MIN_EXPONENT, rounding.MAX_VALUE
    return Rounded(*numbers, block.whole_row)


@unprefixed
class RowScales(NamedTuple):
    """Scales of quantized rows."""

    out_scale: Pointer  # (S,) fp32, written: of rows that are quantized, or None
    x_scale: Pointer  # (M, 1) fp32 if x arrives quantized, as bytes of e4m3; else None


@unprefixed
class TokenStrides(NamedTuple):
    """Strides of x and of its scales."""

    x_stride_m: Specialized
    x_stride_k: Specialized
    x_scale_stride_m: Specialized


@unprefixed
class Chunks(NamedTuple):
    """What columns are permuted for."""

    K_CHUNK: Constant
    W_BITS: Constant  # of a weight: `MixedOperand.order`
    X_BITS: Constant  # bits of a number that is written; 8: e4m3, by `store_signed`
    TAIL: Constant  # the last chunk overlaps the one before


@arguments
class PermuteTokens:
    # (S, K in whole chunks), written: rows of x at their pairs' positions, columns permuted
    out: Pointer
    x: Pointer  # (M, K)
    scales: RowScales
    pairs: SortedPairs
    K: Specialized
    pair_strides: PairStrides
    strides: TokenStrides
    topk_weights: RouterWeights  # (M, 1); x is multiplied by them before it is rounded
    rounded: Rounded
    chunks: Chunks
    BLOCK_K: Constant  # columns of a program
    # up to so many pairs, programs compute their positions; 0: they read the order
    PAIR_BUCKET: Constant
    # rows of a block, if no sorting kernel runs and this one writes the table and the order; or 0
    TABLE_BLOCK_M: Constant
    PDL: Constant


@kernel(PermuteTokens, pdl_first=True)
def moe_ops_permute_tokens(
    out_ptr,
    x_ptr,
    out_scale_ptr,
    x_scale_ptr,
    index_ptr,
    ids_ptr,
    map_ptr,
    num_blocks,
    S,
    E,
    num_ids,
    top_k,
    K,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    x_stride_m,
    x_stride_k,
    x_scale_stride_m,
    topk_weights_ptr,
    topk_weights_stride_m,
    topk_weights_stride_k,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    K_CHUNK: tl.constexpr,
    W_BITS: tl.constexpr,
    X_BITS: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAIR_BUCKET: tl.constexpr,
    TABLE_BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of tokens, sorted by expert, with permuted columns; rounded with MANTISSA, or decoded
    if they arrive with scales. Grid: (pairs, column tiles).

    For few pairs (PAIR_BUCKET) programs compute positions from ids instead of waiting for the
    sorting kernel's order. Unused rows stay uninitialized.
    """
    AT_ONCE: tl.constexpr = PAIR_BUCKET > 0 and TABLE_BLOCK_M == 0
    if not AT_ONCE:
        gdc_wait(PDL)
        gdc_launch_dependents(PDL)
    if PAIR_BUCKET:
        pair = tl.program_id(0)
        e, of_others, rank, count = sorted_position(
            pair, ids_ptr, map_ptr, S, E, num_ids, top_k,
            ids_stride_m, ids_stride_k, map_stride, PAIR_BUCKET,
        )  # fmt: skip
        position, here = of_others + rank, e >= 0
    else:
        position = tl.program_id(0)
        pair = tl.load(index_ptr + 4 * num_blocks + position, cache_modifier=".cg")
        here = (pair >= 0) & (pair < S)
    out_column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    columns = K  # of a row in whole chunks
    column = out_column
    if TAIL:
        columns = tl.cdiv(K, K_CHUNK) * K_CHUNK
        column = tl.where(out_column < columns - K_CHUNK, out_column, out_column - (columns - K))
    ok = out_column < tl.where(here, columns, 0)
    own = ok  # in an overlapping last chunk, columns that belong to the chunk before are zero
    if TAIL:
        own = ok & ((out_column < columns - K_CHUNK) | (column >= columns - K_CHUNK))
    m = (pair // top_k).to(tl.int64)
    x_ptrs = x_ptr + m * x_stride_m + column.to(tl.int64) * x_stride_k
    if x_scale_ptr is not None:
        x = decode_activation(tl.load(x_ptrs, mask=own, other=0)).to(out_ptr.dtype.element_ty)
        scale = tl.load(x_scale_ptr + m * x_scale_stride_m, mask=here, other=0.0)
    else:
        x = tl.load(x_ptrs, mask=own, other=0.0)
    if MANTISSA:
        factor = 1.0
        if topk_weights_ptr is not None:
            factor_ptr = topk_weights_ptr + m * topk_weights_stride_m
            factor = tl.load(factor_ptr, mask=here, other=0.0).to(tl.float32)
        x = x.to(tl.float32) * factor
        if WHOLE_ROW:
            scale = element_scale(largest_magnitude(x, 0), False)
        else:
            row_columns = tl.where(here, K, 0)
            scale = row_scale(x_ptr + m * x_stride_m, row_columns, x_stride_k, factor, BLOCK_K)
        q = quotient(x, scale, reciprocal(scale))
        x = nearest(clamp(q, MAX_VALUE), MANTISSA, MIN_EXPONENT).to(out_ptr.dtype.element_ty)
    if out_scale_ptr is not None:
        tl.store(out_scale_ptr + position, scale, mask=here & (tl.program_id(1) == 0))
    x = permute_columns(x, K_CHUNK, W_BITS, X_BITS)
    if X_BITS == 8:
        store_signed(out_ptr + position.to(tl.int64) * columns * 2, out_column, x, ok, K_CHUNK)
    else:
        tl.store(out_ptr + position.to(tl.int64) * columns + out_column, x, mask=ok)
    if TABLE_BLOCK_M:
        tl.static_assert(PAIR_BUCKET <= MAX_PACKED)
        first = tl.program_id(1) == 0
        tl.store(index_ptr + 4 * num_blocks + position, pair, mask=here & first)
        end = tl.minimum(of_others + count, position + TABLE_BLOCK_M)
        starts = here & (rank % TABLE_BLOCK_M == 0)
        tl.store(index_ptr + pair, tl.where(starts, pack_block(e, position, end), -1), mask=first)
        tl.store(index_ptr + S + pair, 0, mask=first & (pair < 2))  # no tiles are taken
    elif AT_ONCE:
        gdc_wait(PDL)
        gdc_launch_dependents(PDL)  # GEMM1 reads the sorting kernel's output before gdc_wait


@arguments
class PermuteHidden:
    out: Pointer  # (S, I in whole chunks), written
    h: Pointer  # (S, I)
    I: Specialized
    chunks: Chunks
    BLOCK_K: Constant  # columns of a program
    PDL: Constant


@kernel(PermuteHidden)
def moe_ops_permute_hidden(
    out_ptr,
    h_ptr,
    I,
    K_CHUNK: tl.constexpr,
    W_BITS: tl.constexpr,
    X_BITS: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of h, which a GEMM1 of plain weights has written, with permuted columns. Grid: (rows,
    column tiles).
    """
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)  # GEMM2 reads the sorting kernel's output before gdc_wait
    m = tl.program_id(0).to(tl.int64)
    out_column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    columns = I  # of a row in whole chunks
    column = out_column
    if TAIL:
        columns = tl.cdiv(I, K_CHUNK) * K_CHUNK
        column = tl.where(out_column < columns - K_CHUNK, out_column, out_column - (columns - I))
    ok = out_column < columns
    own = ok  # in an overlapping last chunk, columns that belong to the chunk before are zero
    if TAIL:
        own = ok & ((out_column < columns - K_CHUNK) | (column >= columns - K_CHUNK))
    h = tl.load(h_ptr + m * I + column, mask=own, other=0.0)
    h = permute_columns(h, K_CHUNK, W_BITS, X_BITS)
    tl.store(out_ptr + m * columns + out_column, h, mask=ok)


@gluon.jit
def exit_without_tile(PDL: gl.constexpr):
    """Exit a program that has no tile. One program still executes gdc_wait, so that dependents see
    all writes; the others free their slots on the multiprocessors for programs that could prefetch
    weights meanwhile.
    """
    if gl.program_id(0) == 0:
        gdc_wait(PDL)


@gluon.jit
def taken_ptr(index_ptr, S, GEMM: gl.constexpr, MAX_UNSORTED_PAIRS: gl.constexpr):
    """Number of tiles of the first (0) or second GEMM (1) that programs took after their first."""
    if MAX_UNSORTED_PAIRS:
        return index_ptr + S + GEMM
    elif GEMM == 0:
        return index_ptr + TAKEN1
    else:
        return index_ptr + TAKEN2


@gluon.jit
def store_hidden(
    acc, first, end, e, n, h_ptr, added_ptr, w_scale_ptr, w_factor_ptr, bias_ptr, x_scale_ptr,
    index_ptr,
    num_blocks, top_k, topk_weights_ptr, topk_weights_stride_m, topk_weights_stride_k, I,
    w_scale_stride_e, w_scale_stride_n, w_factor_stride_e, w_factor_stride_n,
    bias_stride_e, bias_stride_n, alpha, beta, limit,
    ACTIVATION: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
    HAS_LIMIT: gl.constexpr, FORMAT: gl.constexpr, SCALE: gl.constexpr, H_CHUNK: gl.constexpr,
    H_BITS: gl.constexpr, H_TAIL: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """GEMM1's end: h of a tile, of the positions before `end` that are not before `first`."""
    BLOCK_M: gl.constexpr = acc.shape[1]
    BLOCK_I: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    expert64 = e.to(gl.int64)
    ACC_ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    i, up = accumulator_rows(ACC_ROWS, BLOCK_N, GATED)
    i = gl.minimum(n * BLOCK_I + i, I - 1)
    row = 2 * i + up if INTERLEAVED else i + up * I
    acc = apply_row_scales(
        acc, w_scale_ptr, w_factor_ptr, expert64, row,
        w_scale_stride_e, w_scale_stride_n, w_factor_stride_e, w_factor_stride_n, FORMAT, SCALE,
    )  # fmt: skip
    ACC_COLUMNS: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    position = end - BLOCK_M + gl.arange(0, BLOCK_M, ACC_COLUMNS)
    acc = apply_column_scales(acc, x_scale_ptr, position, first)
    if topk_weights_ptr is not None:
        pair = gl.load(index_ptr + 4 * num_blocks + position, mask=position >= first, other=0)
        factor_ptrs = (
            topk_weights_ptr
            + (pair // top_k).to(gl.int64) * topk_weights_stride_m
            + (pair % top_k) * topk_weights_stride_k
        )
        acc *= gl.expand_dims(
            gl.load(factor_ptrs, mask=position >= first, other=0.0).to(gl.float32), 0
        )
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + expert64 * bias_stride_e + row * bias_stride_n)
        acc += gl.expand_dims(bias.to(gl.float32), 1)
    if added_ptr is not None:
        added_ptrs = added_ptr + gl.expand_dims(position.to(gl.int64) * (2 * I if GATED else I), 0)
        added_ptrs += gl.expand_dims(row, 1)
        here = gl.expand_dims(position >= first, 0) & gl.expand_dims(row >= 0, 1)
        acc += gl.load(added_ptrs, mask=here, other=0.0).to(gl.float32)
    if GATED:
        gate, up = acc.reshape((BLOCK_I // 8, 2, 8, BLOCK_M)).permute((0, 2, 3, 1)).split()
        gate = gate.reshape((BLOCK_I, BLOCK_M))
        up = up.reshape((BLOCK_I, BLOCK_M))
        h = activate_two(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        h = activate_one(acc, ACTIVATION)
    column = n * BLOCK_I + gl.arange(0, BLOCK_I, gl.SliceLayout(1, h.type.layout))
    position = end - BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, h.type.layout))
    ok = gl.expand_dims(position >= first, 0) & gl.expand_dims(column < I, 1)
    columns = I
    if H_TAIL:
        columns = gl.cdiv(I, H_CHUNK) * H_CHUNK
    h_ptrs = h_ptr + gl.expand_dims(position.to(gl.int64) * columns, 0)
    X_BITS: gl.constexpr = operand_bits(FORMAT)
    if H_TAIL:  # zeros meet the columns of the last chunk that are of the chunk before, too
        missing = columns - I
        in_tail = column >= columns - H_CHUNK
        place = permuted_column_of_row(column, H_CHUNK, H_BITS, X_BITS)
        zeros = gl.zeros_like(h).to(h_ptr.dtype.element_ty)
        zero_ptrs = h_ptrs + gl.expand_dims(place, 1)
        gl.store(zero_ptrs, zeros, mask=ok & gl.expand_dims(in_tail, 1))
        column = gl.where(in_tail, column + missing, column)
    h_ptrs += gl.expand_dims(permuted_column_of_row(column, H_CHUNK, H_BITS, X_BITS), 1)
    gl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=ok)


@gluon.jit
def store_sums(
    acc, pair, first, end, e, n, split, y_ptr, w_scale_ptr, w_factor_ptr, bias_ptr, x_scale_ptr,
    S, N, w_scale_stride_e, w_scale_stride_n, w_factor_stride_e,
    w_factor_stride_n, bias_stride_e, bias_stride_n,
    FORMAT: gl.constexpr, SCALE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """GEMM2's end: y of a tile, of the positions before `end` that are not before `first`."""
    BLOCK_M: gl.constexpr = acc.shape[1]
    expert64 = e.to(gl.int64)
    column = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, acc.type.layout))
    row = gl.minimum(column, N - 1)
    acc = apply_row_scales(
        acc, w_scale_ptr, w_factor_ptr, expert64, row,
        w_scale_stride_e, w_scale_stride_n, w_factor_stride_e, w_factor_stride_n, FORMAT, SCALE,
    )  # fmt: skip
    position = end - BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, acc.type.layout))
    acc = apply_column_scales(acc, x_scale_ptr, position, first)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert64 * bias_stride_e + row * bias_stride_n
        bias = gl.load(bias_ptrs).to(gl.float32)
        acc += gl.expand_dims(gl.where(split == 0, bias, 0.0), 1)
    y_ptrs = (
        y_ptr + gl.expand_dims((split * S + pair).to(gl.int64) * N, 0) + gl.expand_dims(column, 1)
    )
    mask = gl.expand_dims(position >= first, 0) & gl.expand_dims(column < N, 1)
    gl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def pairs_at(
    index_ptr, num_blocks, first, end,
    FORMAT: gl.constexpr, BLOCK_M: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Pairs at the BLOCK_M positions before `end`, from `first` on."""
    LAYOUT: gl.constexpr = accumulator_layout(FORMAT, BLOCK_M, NUM_WARPS)
    position = end - BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
    return gl.load(index_ptr + 4 * num_blocks + position, mask=position >= first, other=0)


@gluon.jit
def pairs_of_tile(
    index_ptr, num_blocks, first, end, FORMAT: gl.constexpr, BLOCK_M: gl.constexpr,
    MORE_M: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Pairs at the last BLOCK_M positions of a tile, and at the MORE_M before these."""
    pair = pairs_at(index_ptr, num_blocks, first, end, FORMAT, BLOCK_M, NUM_WARPS)
    more = pair
    if MORE_M:
        more = pairs_at(index_ptr, num_blocks, first, end - BLOCK_M, FORMAT, MORE_M, NUM_WARPS)
    return pair, more


@gluon.jit
def begin_tile(
    e, first, end, n, columns, K, index_ptr, num_blocks, scales, zeros, factors,
    FORMAT: gl.constexpr, SCALE: gl.constexpr, SCALE_GROUP: gl.constexpr, SPLIT_K: gl.constexpr,
    PAIRS: gl.constexpr, K_CHUNK: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
    BLOCK_M: gl.constexpr, MORE_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Ask for what the consumers of a tile need besides what the producer copies: (pointers to
    scales, to zero points and to factors of scales in two levels, and the first of each as
    `prefetch_first` has them; with PAIRS the pairs of BLOCK_M and of MORE_M positions). What there
    is not is a number.
    """
    BLOCK_I: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    scale_ptr, scale_stride_e, scale_stride_n, scale_stride_g = scales
    zero_ptr, zero_stride_e, zero_stride_n, zero_stride_g = zeros
    e64, column = e.to(gl.int64), n // SPLIT_K * BLOCK_I
    scale_ptrs, zero_ptrs, factor_ptrs = n, n, n
    if scale_ptr is not None:
        scale_ptrs = scale_pointers(
            scale_ptr, e64 * scale_stride_e, scale_stride_n, scale_stride_g, column, columns,
            FORMAT, SCALE, GATED, INTERLEAVED, BLOCK_N, K_CHUNK, SCALE_GROUP, NUM_WARPS,
        )  # fmt: skip
    if zero_ptr is not None:
        zero_ptrs = scale_pointers(
            zero_ptr, e64 * zero_stride_e, zero_stride_n, zero_stride_g, column, columns,
            FORMAT, SCALE, GATED, INTERLEAVED, BLOCK_N, K_CHUNK, SCALE_GROUP, NUM_WARPS,
        )  # fmt: skip
    HAS_ZERO: gl.constexpr = zero_ptr is not None
    TWO_LEVELS: gl.constexpr = in_two_levels(scale_ptr)
    if TWO_LEVELS:
        factor_ptr, factor_stride_e, factor_stride_n = factors
        factor_ptrs = factor_pointers(
            factor_ptr, e64 * factor_stride_e, factor_stride_n, column, columns, HAS_ZERO,
            FORMAT, GATED, INTERLEAVED, BLOCK_N, K_CHUNK, SCALE_GROUP, NUM_WARPS,
        )  # fmt: skip
    k_begin, _ = share_of(n, gl.cdiv(K, BLOCK_K), SPLIT_K)
    first_scales = prefetch_first(
        scale_ptrs, zero_ptrs, factor_ptrs, scale_stride_g, zero_stride_g, k_begin, K,
        scale_ptr is not None, HAS_ZERO, TWO_LEVELS, SCALE, SCALE_GROUP, K_CHUNK, BLOCK_K,
    )  # fmt: skip
    pair, more_pair = n, n
    if PAIRS:
        pair, more_pair = pairs_of_tile(
            index_ptr, num_blocks, first, end, FORMAT, BLOCK_M, MORE_M, NUM_WARPS
        )
    return scale_ptrs, zero_ptrs, factor_ptrs, first_scales, pair, more_pair


@gluon.jit
def store_tile(
    acc, more, of_tile, out, columns, index_ptr, num_blocks, scales, factors, biases, x_scale_ptr,
    PAIRS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr, HAS_LIMIT: gl.constexpr, FORMAT: gl.constexpr, SCALE: gl.constexpr,
    SPLIT_K: gl.constexpr, H_CHUNK: gl.constexpr, H_BITS: gl.constexpr, H_TAIL: gl.constexpr,
    BLOCK_M: gl.constexpr, MORE_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """A GEMM's end: h of a tile (H_CHUNK) or y, of BLOCK_M and of MORE_M positions."""
    pair, more_pair, e, first, end, n = of_tile
    scale_ptr, scale_stride_e, scale_stride_n, _ = scales
    factor_ptr, factor_stride_e, factor_stride_n = factors
    bias_ptr, bias_stride_e, bias_stride_n = biases
    if H_CHUNK:
        h_ptr, added_ptr, top_k, weights_ptr, weights_stride_m, weights_stride_k = out[:6]
        alpha, beta, limit = out[6:]
        for part in gl.static_range(2 if MORE_M else 1):
            store_hidden(
                more if part else acc, first, end - part * BLOCK_M, e, n, h_ptr, added_ptr,
                scale_ptr, factor_ptr, bias_ptr, x_scale_ptr, index_ptr, num_blocks, top_k,
                weights_ptr, weights_stride_m, weights_stride_k, columns, scale_stride_e,
                scale_stride_n,
                factor_stride_e, factor_stride_n, bias_stride_e, bias_stride_n, alpha, beta, limit,
                ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT, FORMAT, SCALE, H_CHUNK, H_BITS, H_TAIL,
                BLOCK_N,
            )  # fmt: skip
    else:
        y_ptr, S = out
        if not PAIRS:
            pair, more_pair = pairs_of_tile(
                index_ptr, num_blocks, first, end, FORMAT, BLOCK_M, MORE_M, NUM_WARPS
            )
        for part in gl.static_range(2 if MORE_M else 1):
            store_sums(
                more if part else acc, more_pair if part else pair, first, end - part * BLOCK_M, e,
                n // SPLIT_K, n % SPLIT_K, y_ptr, scale_ptr, factor_ptr, bias_ptr, x_scale_ptr, S,
                columns, scale_stride_e, scale_stride_n, factor_stride_e, factor_stride_n,
                bias_stride_e, bias_stride_n, FORMAT, SCALE, BLOCK_N,
            )  # fmt: skip


@gluon.jit
def consumer(
    ring, handed, e, first, end, n, out, columns, K, index_ptr, num_blocks, scales, zeros, factors,
    biases, products_ptr, x_scale_ptr,
    ACTIVATION: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
    HAS_LIMIT: gl.constexpr, FORMAT: gl.constexpr, SCALE: gl.constexpr, SCALE_GROUP: gl.constexpr,
    SPLIT_K: gl.constexpr, H_CHUNK: gl.constexpr, H_BITS: gl.constexpr, H_TAIL: gl.constexpr,
    K_CHUNK: gl.constexpr, BLOCK_M: gl.constexpr, MORE_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, NUM_STAGES: gl.constexpr, NUM_WARPS: gl.constexpr,
    OVERLAP: gl.constexpr, STREAM: gl.constexpr, SEGMENTS: gl.constexpr, UNSORTED: gl.constexpr,
):  # fmt: skip
    """The consumer warps: this program's first tile, and those that the producer hands to them."""
    HAS_ZERO: gl.constexpr = zeros[0] is not None
    # y is in the order of the pairs; of many rows they would take registers of the mainloop
    PAIRS: gl.constexpr = H_CHUNK == 0 and BLOCK_M <= MAX_EARLY_PAIRS
    k_tiles = gl.cdiv(K, BLOCK_K)
    # the order of unsorted pairs is being written: none of them is asked for
    pairs_from = end if UNSORTED else first
    scale_ptrs, zero_ptrs, factor_ptrs, first_scales, pair, more_pair = begin_tile(
        e, pairs_from, end, n, columns, K, index_ptr, num_blocks, scales, zeros, factors,
        FORMAT, SCALE, SCALE_GROUP, SPLIT_K, PAIRS, K_CHUNK, GATED, INTERLEAVED,
        BLOCK_M, MORE_M, BLOCK_N, BLOCK_K, NUM_WARPS,
    )  # fmt: skip
    slot, phase, i = n * 0, n * 0, n * 0
    if is_level(FORMAT):  # which are looked up in shared memory
        products_ptr = write_pairs(slot, FORMAT, NUM_WARPS)
    more = True
    while more:
        k_begin, k_end = share_of(n, k_tiles, SPLIT_K)
        slot, phase, acc, more_acc = consume(
            ring, slot, phase, k_begin, k_end, K, first_scales, scale_ptrs, zero_ptrs,
            factor_ptrs, products_ptr, scales[3], zeros[3], HAS_ZERO, in_two_levels(scales[0]),
            FORMAT, SCALE, SCALE_GROUP, K_CHUNK, GATED, INTERLEAVED, BLOCK_M, MORE_M, BLOCK_N,
            BLOCK_K, NUM_STAGES, NUM_WARPS, OVERLAP, STREAM, SEGMENTS,
        )  # fmt: skip
        if PAIRS and UNSORTED and i == 0:  # tokens have come, and so has the order
            pair, more_pair = pairs_of_tile(
                index_ptr, num_blocks, first, end, FORMAT, BLOCK_M, MORE_M, NUM_WARPS
            )
        of_tile = (pair, more_pair, e, first, end, n)
        # what the next tile needs is asked for before this one is stored
        next_e, first, end, next_n = next_tile(handed, i, NUM_WARPS)
        more = next_e >= 0
        # After the last tile its own scales are loaded again, which are in a cache. (With a branch
        # around this, threads spill.)
        e, n = gl.where(more, next_e, e), gl.where(more, next_n, n)
        i += 1
        scale_ptrs, zero_ptrs, factor_ptrs, first_scales, pair, more_pair = begin_tile(
            e, first, end, n, columns, K, index_ptr, num_blocks, scales, zeros, factors,
            FORMAT, SCALE, SCALE_GROUP, SPLIT_K, PAIRS, K_CHUNK, GATED, INTERLEAVED,
            BLOCK_M, MORE_M, BLOCK_N, BLOCK_K, NUM_WARPS,
        )  # fmt: skip
        store_tile(
            acc, more_acc, of_tile, out, columns, index_ptr, num_blocks, scales, factors, biases,
            x_scale_ptr, PAIRS, ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT, FORMAT, SCALE,
            SPLIT_K, H_CHUNK, H_BITS, H_TAIL, BLOCK_M, MORE_M, BLOCK_N, NUM_WARPS,
        )  # fmt: skip


@gluon.constexpr_function
def parts_of(boxes, NUM_STAGES):
    """Shape of the chunks or operands in NUM_STAGES boxes: how many, rows, and elements of one."""
    *_, count, halves, rows, size = boxes.block_shape
    return [NUM_STAGES * count, halves * rows, size]


@gluon.jit
def ring(boxes, NUM_STAGES: gl.constexpr):
    """(Shared memory for a box in each slot, the same as its chunks or operands)."""
    memory = gl.allocate_shared_memory(boxes.dtype, [NUM_STAGES] + boxes.block_shape, boxes.layout)
    PARTS: gl.constexpr = parts_of(boxes, NUM_STAGES)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(
        boxes.layout.swizzle_byte_width, boxes.layout.element_bitwidth, 2
    )
    return memory, reinterpret(memory, boxes.dtype, PARTS, LAYOUT)


@gluon.jit
def run_tiles(
    x,  # descriptors: see Descriptors
    x_more,
    w,
    w_high,
    w_scales,
    e,  # of this program's first tile, from `first_tile`, like the next three
    first,
    end,
    n,
    tiles_per_block,
    taken_ptr,  # number of tiles that programs have taken after their first ones
    # (h, what is added, top_k, router weights on the input, alpha, beta, limit), or (y, S)
    out,
    columns,  # I or N
    K,
    index_ptr,
    num_blocks,
    scales,  # (pointer, strides of the expert, row and group), likewise zero points
    zeros,
    factors,  # (pointer, strides of the expert and row), likewise biases
    biases,
    products_ptr,
    x_scale_ptr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_GROUP: gl.constexpr,
    SPLIT_K: gl.constexpr,
    H_CHUNK: gl.constexpr,  # 0: of y
    H_BITS: gl.constexpr,
    H_TAIL: gl.constexpr,
    K_CHUNK: gl.constexpr,
    BLOCK_M: gl.constexpr,
    MORE_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
    STREAM: gl.constexpr,
    SEGMENTS: gl.constexpr,
    GROUP_M: gl.constexpr,
    MAX_UNSORTED_PAIRS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The tiles of a program, by one producer warp and NUM_WARPS consumer warps."""
    # rows of w from one tile to the next: of each half, or of all
    TILE_ROWS: gl.constexpr = BLOCK_N // 2 if GATED and not INTERLEAVED else BLOCK_N
    # bytes of a row of weights, and half of those of a row of an operand of x
    CHUNK_BYTES: gl.constexpr = K_CHUNK * weight_bits(FORMAT) // 8
    S_BYTES: gl.constexpr = 0 if w_scales is None else K_CHUNK // SCALE_GROUP  # of a row
    X_BYTES: gl.constexpr = (BLOCK_M + MORE_M) * K_CHUNK * 2
    H_BYTES: gl.constexpr = 0 if w_high is None else w_high.block_shape[4]
    STAGE_BYTES: gl.constexpr = (
        BLOCK_K // K_CHUNK * (BLOCK_N * (CHUNK_BYTES + H_BYTES + S_BYTES) + X_BYTES)
    )
    w_smem, w_chunks = ring(w, NUM_STAGES)
    x_smem, x_operands = ring(x, NUM_STAGES)
    h_smem, h_chunks = None, None
    if w_high is not None:
        h_smem, h_chunks = ring(w_high, NUM_STAGES)
    more_smem, more_operands = None, None
    if x_more is not None:
        more_smem, more_operands = ring(x_more, NUM_STAGES)
    s_smem, s_chunks = None, None
    if w_scales is not None:
        s_smem, s_chunks = ring(w_scales, NUM_STAGES)
    full = mbarriers(NUM_STAGES)
    empty = mbarriers(NUM_STAGES)
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [4 * HANDED, 1], LAYOUT)
    handed = numbers, mbarriers(HANDED), mbarriers(HANDED)
    fence_async_shared()  # makes the mbarriers visible to TMA
    gl.warp_specialize(
        [
            (consumer, (
                (w_chunks, h_chunks, x_operands, more_operands, s_chunks, full, empty),
                handed, e, first, end, n, out, columns, K, index_ptr, num_blocks, scales, zeros,
                factors, biases, products_ptr, x_scale_ptr,
                ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT, FORMAT, SCALE, SCALE_GROUP, SPLIT_K,
                H_CHUNK, H_BITS, H_TAIL, K_CHUNK, BLOCK_M, MORE_M, BLOCK_N, BLOCK_K, NUM_STAGES,
                NUM_WARPS, OVERLAP, STREAM, SEGMENTS, MAX_UNSORTED_PAIRS > 0,
            )),
            (producer, (
                x, x_more, w, w_high, w_scales,
                (x_smem, more_smem, w_smem, h_smem, s_smem, full, empty), handed,
                index_ptr, num_blocks, taken_ptr, e, first, end, n, tiles_per_block, K,
                TILE_ROWS, SPLIT_K, GROUP_M, BLOCK_M + MORE_M, BLOCK_K, STAGE_BYTES, SCALE_GROUP,
                K_CHUNK, NUM_STAGES, MAX_UNSORTED_PAIRS, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


@unprefixed
class HiddenRows(NamedTuple):
    """h as GEMM1 writes it."""

    h: Pointer  # (S, I in whole chunks), columns permuted as GEMM2 takes them
    added: Pointer  # (S, N), added before the activation, or None
    H_CHUNK: Constant  # GEMM2's K_CHUNK
    H_BITS: Constant  # `MixedOperand.order` of w2; 16: plain, columns stay in their order
    H_TAIL: Constant  # GEMM2's last chunk overlaps the one before


@unprefixed
class WgmmaTile(NamedTuple):
    """What a GEMM's config and weight decide."""

    K_CHUNK: Constant
    BLOCK_M: Constant
    MORE_M: Constant  # rows of x that a block has besides, a second operand of its products
    BLOCK_N: Constant
    BLOCK_K: Constant
    NUM_STAGES: Constant
    NUM_WARPS: Constant
    OVERLAP: Constant  # a chunk is decoded while the one before is multiplied
    STREAM: Constant  # across K tiles, too
    SEGMENTS: Constant  # of the K tiles, with sums of their own
    GROUP_M: Constant  # blocks whose rows of x stay in the L2 for all their tiles; 0: all blocks
    # up to so many pairs, programs find the blocks of their first tiles themselves; 0: they read
    # the table of blocks
    MAX_UNSORTED_PAIRS: Constant


@unprefixed
class Descriptors(NamedTuple):
    """What the tensor memory accelerator copies."""

    x: Descriptor  # (S, K in whole chunks)
    x_more: Descriptor  # likewise, for the rows of MORE_M; or None
    w: Descriptor  # (E, N, K), of formats in planes the low bits
    w_high: Descriptor  # the high bits of these, or None
    w_scales: Descriptor  # scales in the order of prepared weights, or None


@arguments
class Gemm1:
    hidden: HiddenRows
    descriptors: Descriptors
    pointers: MixedPointers
    products: Pointer  # (256, 4) int32 (`products_on`), of int4_e4m3, or None
    x_scale: Pointer  # (S,) fp32, or None
    pairs: SortedPairs
    pair_strides: PairStrides
    topk_weights: RouterWeights  # (M, top_k), if they scale the input
    K: Specialized
    I: Specialized
    strides: MixedStrides
    activation: Activated
    decoding: Decoding
    tile: WgmmaTile
    PDL: Constant


@kernel(Gemm1, jit=gluon.jit)
def moe_ops_wgmma_gemm1(
    h_ptr,
    added_ptr,
    H_CHUNK: gl.constexpr,
    H_BITS: gl.constexpr,
    H_TAIL: gl.constexpr,
    x,
    x_more,
    w,
    w_high,
    w_scales,
    w_scale_ptr,
    w_zero_ptr,
    w_factor_ptr,
    bias_ptr,
    products_ptr,
    x_scale_ptr,
    index_ptr,
    ids_ptr,
    map_ptr,
    num_blocks,
    S,
    E,
    num_ids,
    top_k,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    topk_weights_ptr,
    topk_weights_stride_m,
    topk_weights_stride_k,
    K,
    I,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_g,
    w_zero_stride_e,
    w_zero_stride_n,
    w_zero_stride_g,
    w_factor_stride_e,
    w_factor_stride_n,
    bias_stride_e,
    bias_stride_n,
    alpha,
    beta,
    limit,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_GROUP: gl.constexpr,
    K_CHUNK: gl.constexpr,
    BLOCK_M: gl.constexpr,
    MORE_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
    STREAM: gl.constexpr,
    SEGMENTS: gl.constexpr,
    GROUP_M: gl.constexpr,
    MAX_UNSORTED_PAIRS: gl.constexpr,
    PDL: gl.constexpr,
):
    """h = activation(x @ w13.T + bias). Grid: programs that take tiles."""
    BLOCK_I: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    gdc_launch_dependents(PDL)
    tiles_per_block = gl.cdiv(I, BLOCK_I)
    has_tile, e, first, end, n = first_tile(
        index_ptr, ids_ptr, map_ptr, S, E, num_ids, top_k, ids_stride_m, ids_stride_k, map_stride,
        tiles_per_block, GROUP_M, MAX_UNSORTED_PAIRS, BLOCK_M + MORE_M, NUM_WARPS,
    )  # fmt: skip
    if not has_tile:
        exit_without_tile(PDL)
        return
    run_tiles(
        x, x_more, w, w_high, w_scales, e, first, end, n, tiles_per_block,
        taken_ptr(index_ptr, S, 0, MAX_UNSORTED_PAIRS),
        (h_ptr, added_ptr, top_k, topk_weights_ptr, topk_weights_stride_m, topk_weights_stride_k,
         alpha, beta, limit), I, K, index_ptr, num_blocks,
        (w_scale_ptr, w_scale_stride_e, w_scale_stride_n, w_scale_stride_g),
        (w_zero_ptr, w_zero_stride_e, w_zero_stride_n, w_zero_stride_g),
        (w_factor_ptr, w_factor_stride_e, w_factor_stride_n),
        (bias_ptr, bias_stride_e, bias_stride_n), products_ptr, x_scale_ptr,
        ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT, FORMAT, SCALE, SCALE_GROUP, 1, H_CHUNK, H_BITS,
        H_TAIL, K_CHUNK, BLOCK_M, MORE_M, BLOCK_N, BLOCK_K, NUM_STAGES, NUM_WARPS, OVERLAP, STREAM,
        SEGMENTS, GROUP_M, MAX_UNSORTED_PAIRS, PDL,
    )  # fmt: skip


@arguments
class Gemm2:
    y: Pointer  # (SPLIT_K, S, N), written at the pairs: partial sums over shares of the columns
    descriptors: Descriptors
    pointers: MixedPointers
    products: Pointer  # (256, 4) int32 (`products_on`), of int4_e4m3, or None
    x_scale: Pointer  # (S,) fp32, or None
    pairs: SortedPairs
    pair_strides: PairStrides
    K: Specialized
    N: Specialized
    strides: MixedStrides
    decoding: Decoding
    SPLIT_K: Constant
    tile: WgmmaTile
    PDL: Constant


@kernel(Gemm2, jit=gluon.jit)
def moe_ops_wgmma_gemm2(
    y_ptr,
    x,
    x_more,
    w,
    w_high,
    w_scales,
    w_scale_ptr,
    w_zero_ptr,
    w_factor_ptr,
    bias_ptr,
    products_ptr,
    x_scale_ptr,
    index_ptr,
    ids_ptr,
    map_ptr,
    num_blocks,
    S,
    E,
    num_ids,
    top_k,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    K,
    N,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_g,
    w_zero_stride_e,
    w_zero_stride_n,
    w_zero_stride_g,
    w_factor_stride_e,
    w_factor_stride_n,
    bias_stride_e,
    bias_stride_n,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_GROUP: gl.constexpr,
    SPLIT_K: gl.constexpr,
    K_CHUNK: gl.constexpr,
    BLOCK_M: gl.constexpr,
    MORE_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
    STREAM: gl.constexpr,
    SEGMENTS: gl.constexpr,
    GROUP_M: gl.constexpr,
    MAX_UNSORTED_PAIRS: gl.constexpr,
    PDL: gl.constexpr,
):
    """y = x @ w2.T + bias, as SPLIT_K partial sums. Grid: programs that take tiles of BLOCK_N rows
    of w2 and of one of SPLIT_K shares of the columns.
    """
    gdc_launch_dependents(PDL)
    tiles_per_block = gl.cdiv(N, BLOCK_N) * SPLIT_K
    has_tile, e, first, end, n = first_tile(
        index_ptr, ids_ptr, map_ptr, S, E, num_ids, top_k, ids_stride_m, ids_stride_k, map_stride,
        tiles_per_block, GROUP_M, MAX_UNSORTED_PAIRS, BLOCK_M + MORE_M, NUM_WARPS,
    )  # fmt: skip
    if not has_tile:
        exit_without_tile(PDL)
        return
    run_tiles(
        x, x_more, w, w_high, w_scales, e, first, end, n, tiles_per_block,
        taken_ptr(index_ptr, S, 1, MAX_UNSORTED_PAIRS), (y_ptr, S), N, K, index_ptr, num_blocks,
        (w_scale_ptr, w_scale_stride_e, w_scale_stride_n, w_scale_stride_g),
        (w_zero_ptr, w_zero_stride_e, w_zero_stride_n, w_zero_stride_g),
        (w_factor_ptr, w_factor_stride_e, w_factor_stride_n),
        (bias_ptr, bias_stride_e, bias_stride_n), products_ptr, x_scale_ptr,
        "", False, False, False, FORMAT, SCALE, SCALE_GROUP, SPLIT_K, 0, 0, False, K_CHUNK,
        BLOCK_M, MORE_M, BLOCK_N, BLOCK_K, NUM_STAGES, NUM_WARPS, OVERLAP, STREAM, SEGMENTS,
        GROUP_M, MAX_UNSORTED_PAIRS, PDL,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _why_not(of: Format, K: int, k_chunk: int, strides: tuple, dtype: torch.dtype) -> str | None:
    """The part of `why_not` that is the same for every call."""
    if dtype != torch.bfloat16:
        return f"activations must be bfloat16, got {dtype}"
    if of.name not in FORMATS:
        return f"weights must have one of the formats {', '.join(FORMATS)}, got {of.name}"
    if k_chunk == 0:
        columns = 128 // (of.high_bits or 2)
        return f"rows of weights must have a multiple of {columns} columns, got {K}"
    if of.bits == 8 and of.scale not in ("end", "sum", "block", "weight"):
        return f"8-bit weights must have scales of sums or weights, got {of.scale!r}"
    if of.scale in ("sum", "block") and of.group % k_chunk:
        return f"groups of columns must be multiples of {k_chunk}, got {of.group}"
    if not (min(strides) == 1 == strides[2] and (strides[0] | strides[1]) % 16 == 0):
        return f"rows of weights must start at multiples of 16 bytes, got strides {strides}"
    return None


def why_not(
    w13: MixedOperand, w2: MixedOperand, dtype: torch.dtype, workspaces: tuple[Tensor, Tensor]
) -> str | None:
    """Why these kernels cannot run a layer on a GPU that has them (`configs.on_sm90`), or None.
    `dtype` is that of the rows they multiply. TMA needs strides of a multiple of 16 bytes.
    """
    for w in (w13, w2):
        if w.format.name == "e2m1_words" and not w.scales_in_place:
            return "prepared scales must start at multiples of 16 bytes, without gaps"
        data = w.data
        if data.data_ptr() % 16:
            return "weights must start at a multiple of 16 bytes"
        reason = _why_not(w.wgmma_format, w.K, w.k_chunk, data.stride(), dtype)
        if reason is not None:
            return reason
    if (workspaces[0].data_ptr() | workspaces[1].data_ptr()) % 16:
        return "workspaces must start at a multiple of 16 bytes"
    return None


def _products() -> Tensor:
    """PRODUCTS (256, 4) int32: for every e4m3 scale the products of its magnitude with 8 to 1 and
    with 0 to 7, rounded to e4m3.
    """
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")
    scales = e4m3_to_float32(codes.view(torch.float8_e4m3fn))
    numbers = torch.tensor([*range(8, 0, -1), *range(8)], dtype=torch.float32, device="cpu")
    products = round_products_to_e4m3(scales.abs()[:, None] * numbers)
    return products.to(torch.float8_e4m3fn).view(torch.int32)


_products_on: dict[torch.device, Tensor] = {}


def products_on(w: MixedOperand) -> Tensor | None:
    """PRODUCTS for a weight that needs them: 4 KB, kept on each device from the first call on. A
    call that is captured before gets none, and `run` says that its kernels never ran.

    Another thread allocates them: before Inductor captures, all that this one allocates comes from
    the memory pool of its graphs.
    """
    if w.wgmma_format.x_bits == 16:
        return None
    device = w.data.device
    found = _products_on.get(device)
    if found is None and not (w.data.is_cuda and torch.cuda.is_current_stream_capturing()):
        with ThreadPoolExecutor(1) as other:
            found = _products_on[device] = other.submit(lambda: _products().to(device)).result()
    return found


_layout = cache(gl.NVMMASharedLayout)


def chunk_boxes(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    size: int,
    halves: int,
    chunks: int,
    block_rows: int,
    itemsize: int,
    step: int = 0,  # of formats in planes: the bytes of a chunk, of which each plane has some
) -> Boxes:
    """Boxes of `chunks` chunks of `block_rows` rows, of a tensor (E, rows, row) whose rows have
    chunks of `size` elements and are `halves` equal parts.

    If a row ends in half a chunk, a chunk is described from every half on, so that the last one
    overlaps the one before.
    """
    E, N, row = shape
    stride_e, stride_n, _ = strides
    if not step:  # from one chunk described to the next
        step = size if row % size == 0 else size // 2
    described = [E, (row - size) // step + 1, halves, N // halves, size]
    apart = [stride_e, step, N // halves * stride_n, stride_n, 1]
    box = [1, chunks, halves, block_rows // halves, size]
    swizzled = size * itemsize if size * itemsize >= 32 else 0  # bytes, if 16 are side by side
    return Boxes(described, apart, box, _layout(swizzled, 8 * itemsize, 5))


def token_boxes(
    K: int,
    chunk_bytes: int,
    k_chunk: int,
    chunks: int,
    rows: int,
    block_m: int,
    box_rows: int,
    bits: int,
) -> Boxes:
    """Boxes of `chunks` chunks of `box_rows` of a block's rows, x or h of so many bits a number.

    The descriptor has, for every row, this row and the `block_m - 1` rows after it. A box that
    starts before row 0 of such a view, and so is partly out of bounds, has just a block's own
    rows, and TMA reads no others, as it would with boxes of whole blocks.
    """
    row = K * 16 // bits  # of 8 bits there are negative numbers, too
    # columns of an operand: half a chunk, or all of it
    size = chunk_bytes * 16 // bits
    box = [k_chunk // chunk_bytes * chunks, box_rows, 1, size]
    layout = _layout(2 * chunk_bytes, bits, 4)
    return Boxes([row // size, block_m, rows, size], [size, row, row, 1], box, layout)


def expected_blocks(pairs: int, experts: int, num_ids: int, block_m: int) -> float:
    """Expected number of blocks of a layer, if experts are equally likely. Blocks are at least the
    experts that get a pair.
    """
    pairs_here = pairs * experts / num_ids
    return max(experts * (1 - (1 - 1 / experts) ** pairs_here), pairs_here / block_m)


def programs_at_once(held: Occupancy, gpu: Gpu) -> int:
    """Programs of a GEMM that run at the same time."""
    return held.blocks * gpu.multiprocessors


def programs_of_pair(at_once: int, blocks: float, pairs: float, tiles_per_block: int) -> int:
    """Programs of each of so many pairs expected here, all of which run at once together: none
    should wait for one that takes tile after tile. Or one for each tile, if those of all blocks
    run at once.
    """
    if blocks * tiles_per_block <= at_once:
        return tiles_per_block
    return max(1, int(at_once / max(1.0, pairs)))


class _Prepared(NamedTuple):
    """What a GEMM's launch needs besides its tensors."""

    decoding: Decoding
    tile: WgmmaTile
    x: Boxes
    x_more: Boxes | None
    w: Boxes
    w_high: Boxes | None  # from the first byte of high bits on
    w_scales: Boxes | None
    maxnreg: int
    programs: int  # of which those that are expected to have a tile run at once

    def grid(self, pairs: SortedPairs, tiles_per_block: int) -> tuple[int, int, int]:
        """Programs take the tiles of the table's blocks one after the other. If it has no room for
        counters, each has one.
        """
        tiles = pairs.num_blocks * tiles_per_block
        if pairs.num_blocks >= BLOCKS_WITH_COUNTERS:
            tiles = min(tiles, self.programs)
        return tiles, 1, 1


@lru_cache(maxsize=4096)
def _prepare(
    of: Format,
    shape: tuple[int, ...],  # of the weight's bytes
    strides: tuple[int, ...],  # of the weight's bytes
    k_chunk: int,
    chunks: int,  # of a K tile
    has_zero: bool,
    streams: bool,
    segments: int,
    scale_shape: tuple[int, ...] | None,  # of scales in the order of prepared weights
    scale_strides: tuple[int, ...],
    halves: int,
    config: GemmConfig,
    block_m: int,
    split_k: int,
    pairs: int,
    experts: int,  # of the layer, of which the weight may have some
    num_ids: int,
    gpu: Gpu,
) -> _Prepared:
    """What follows from shapes, the config and the number of pairs. Cached, because each call
    would compute it again.
    """
    _, N, row_bytes = shape
    block_k = chunks * k_chunk
    if of.name in LEVELS:
        config = beside_pairs(config, block_m, block_k)
    block_n, _, num_stages, num_warps = config
    K = row_bytes * 8 // of.bits
    chunk_bytes, step = k_chunk * of.bits // 8, 0
    if of.high_bits:
        chunk_bytes, step = k_chunk // 2, chunk_bytes
    tiles_per_block = split_k * cdiv(N, block_n)
    blocks = expected_blocks(pairs, experts, num_ids, block_m)
    steps = cdiv(cdiv(K, block_k), split_k)
    kernel = WgmmaKernel(of, k_chunk, has_zero, config, block_m, block_k, steps, streams)
    held = occupancy(kernel, int(blocks * tiles_per_block), gpu)
    programs = programs_at_once(held, gpu)
    unsorted = max_unsorted_pairs(pairs, experts)
    if unsorted:
        pairs_here = pairs * experts / num_ids
        programs = pairs * programs_of_pair(programs, blocks, pairs_here, tiles_per_block)
    w_high = w_scales = None
    if of.high_bits:
        high = k_chunk * of.high_bits // 8
        w_high = chunk_boxes(shape, strides, high, halves, chunks, block_n, 1, step)
    if scale_shape is not None:
        rows, itemsize = rows_side_by_side(of.group), 2 if of.scale == "e4m3" else 1
        w_scales = chunk_boxes(
            scale_shape, scale_strides, 4 * rows, halves, chunks, block_n // rows, itemsize
        )
    K = cdiv(K, k_chunk) * k_chunk
    columns, more = columns_of(block_m), None
    facts = (K, chunk_bytes, k_chunk, chunks, pairs, block_m)
    if columns < block_m:
        more = token_boxes(*facts, block_m - columns, of.x_bits)
    return _Prepared(
        Decoding(of.name, of.scale, of.group),
        WgmmaTile(
            *(k_chunk, columns, block_m - columns, block_n, block_k, num_stages, num_warps),
            # (first tiles of unsorted pairs are numbered without groups of blocks)
            *(held.overlap, held.stream, segments),
            0 if unsorted else blocks_together(block_m, K),
            unsorted,
        ),
        token_boxes(*facts, columns, of.x_bits),
        more,
        chunk_boxes(shape, strides, chunk_bytes, halves, chunks, block_n, 1, step),
        w_high,
        w_scales,
        held.registers,
        programs,
    )


def _routed(tile: WgmmaTile) -> WgmmaTile:
    """The tile of a GEMM that reads the table of blocks, also of few pairs."""
    return tile._replace(MAX_UNSORTED_PAIRS=0)


class _Operand(NamedTuple):
    """A weight as a GEMM takes it."""

    w: Any  # descriptor
    w_high: Any  # descriptor of the high bits of formats in planes, or None
    w_scales: Any  # descriptor of scales in the order of prepared weights, or None
    pointers: MixedPointers  # all other scales
    strides: MixedStrides
    prepared: _Prepared


def _operand(
    w: MixedOperand,
    halves: int,
    config: GemmConfig,
    block_m: int,
    split_k: int,
    pairs: SortedPairs,
    gpu: Gpu,
) -> _Operand:
    """The _Operand of a weight. If a thread needs two neighbouring e4m3 scales, they are one
    element of 16 bits.
    """
    data, of, k_chunk = w.data, w.wgmma_format, w.k_chunk
    pointers, strides = w.pointers, w.strides
    elements: Tensor | None = None
    scale_shape: tuple[int, ...] | None = None
    scale_strides: tuple[int, ...] = ()
    if data.dtype != torch.uint8:
        data = data.view(torch.uint8)
    if of.name == "e2m1_words":
        elements = w.scale.view(torch.int16 if of.scale == "e4m3" else torch.uint8)
        scale_shape, scale_strides = elements.shape, elements.stride()
        _, _, factor, bias = pointers
        pointers = MixedPointers(None, None, factor, bias)
        strides = MixedStrides(0, 0, 0, 0, 0, 0, *strides[6:])
    elif of.name == "e2m1" and of.scale == "e4m3" and k_chunk == 128:
        scale, (stride_e, stride_n, stride_g) = w.scale, strides[:3]
        odd = stride_e | stride_n | int(scale.storage_offset()) | scale.data_ptr()
        if stride_g == 1 and odd % 2 == 0:
            pointers = MixedPointers(scale.view(torch.int16), *pointers[1:])
            strides = MixedStrides(stride_e // 2, stride_n // 2, 1, *strides[3:])
    prepared = _prepare(
        *(of, data.shape, data.stride(), k_chunk, w.chunks(config)),
        *(w.has_zero, w.streams, w.segments),
        *(scale_shape, scale_strides),
        *(halves, config, block_m, split_k, pairs.S, pairs.E, pairs.num_ids, gpu),
    )
    w_high = w_scales = None
    if prepared.w_high is not None:
        w_high = prepared.w_high.of(data[..., k_chunk // 2 :])
    if elements is not None and prepared.w_scales is not None:
        w_scales = prepared.w_scales.of(elements)
    return _Operand(prepared.w.of(data), w_high, w_scales, pointers, strides, prepared)


def _descriptors(prepared: _Prepared, x: Tensor, *weights: Any) -> Descriptors:
    more = prepared.x_more
    return Descriptors(prepared.x.of(x), None if more is None else more.of(x), *weights)


def permute_tokens(
    out: Tensor,
    x: Input,
    w13: MixedOperand,
    routing: PairRouting,
    topk_weights: RouterWeights,  # that scale x before it is rounded
    rounding: Rounding | None,
    out_scale: Tensor | None,  # of quantized rows
    block_m: int,
    gpu: Gpu,
    routed: bool = False,  # a sorting kernel ran before, also for few pairs
) -> Launch:
    """Sort rows of x by expert, and permute their columns for `w13`. They are rounded, or decoded
    if they arrive quantized. For at most `max_unsorted_pairs` it also sorts pairs into blocks of
    `block_m` rows, unless they are `routed`.

    For few pairs (`pair_bucket`) the kernel writes before gdc_wait, so that the kernel before it
    must not use its output.
    """
    k_chunk, K = w13.k_chunk, w13.K
    pairs, pair_strides = routing
    S = pairs.S
    rounded, block = NOT_ROUNDED, RoundingBlock(PERMUTED_COLUMNS, False, 4)
    if rounding is None or x.scale is not None:
        topk_weights = NO_ROUTER_WEIGHTS
    else:
        if w13.wgmma_format.x_bits == 8:
            block = rounding_block(w13.padded_k)
        rounded = rounded_to(rounding, block)
    args = PermuteTokens(
        out=out,
        x=x.ptr,
        scales=RowScales(out_scale, x.scale),
        pairs=pairs,
        K=K,
        pair_strides=pair_strides,
        strides=TokenStrides(x.stride_m, x.stride_k, x.scale_stride_m),
        topk_weights=topk_weights,
        rounded=rounded,
        chunks=Chunks(k_chunk, w13.order, w13.wgmma_format.x_bits, K % k_chunk > 0),
        BLOCK_K=block.columns,
        PAIR_BUCKET=pair_bucket(S),
        TABLE_BLOCK_M=0 if routed or not max_unsorted_pairs(S, pairs.E) else block_m,
        PDL=gpu.pdl,
    )
    grid = (S, cdiv(w13.padded_k, block.columns), 1)
    return Launch(moe_ops_permute_tokens, grid, args, block.num_warps)


def permute_hidden(out: Tensor, h: Tensor, rows: int, w2: MixedOperand, gpu: Gpu) -> Launch:
    """Permute columns of h (rows, I) for `w2`, where GEMM1 left them in their order."""
    I, k_chunk = w2.K, w2.k_chunk
    args = PermuteHidden(
        out=out,
        h=h,
        I=I,
        chunks=Chunks(k_chunk, w2.order, 16, I % k_chunk > 0),
        BLOCK_K=PERMUTED_COLUMNS,
        PDL=gpu.pdl,
    )
    grid = (rows, cdiv(w2.padded_k, PERMUTED_COLUMNS), 1)
    return Launch(moe_ops_permute_hidden, grid, args, 4)


def round_h(
    rounding: Rounding, rows: int, w2: MixedOperand, workspace: Tensor, gpu: Gpu
) -> Hidden:
    """The Hidden of h (rows, I) that is multiplied in e4m3: its buffers, and the launch that
    rounds it.
    """
    I, start = w2.K, rows * w2.K + GAP
    end = start + cdiv(rows * I, 2)
    space = flat(workspace, torch.float32, end + GAP + rows)
    block = rounding_block(I)
    data, scale = flat(space[start:], torch.float8_e4m3fn, 2 * rows * I), space[end + GAP :]
    args = Round(
        q=data,
        scale=scale,
        zero=None,
        x=Input(space, 0, I, 1),
        topk_weights=NO_ROUTER_WEIGHTS,
        T=rows,
        K=I,
        rounding=rounding._replace(SCALE_GROUP=block.columns) if block.whole_row else rounding,
        STATIC=0,
        CHUNK=block.columns,
        APART=False,
        K_CHUNK=w2.k_chunk,
        PDL=gpu.pdl,
    )
    launch = Launch(moe_ops_round, (rows, 1, 1), args, block.num_warps)
    return Hidden(space, None, [launch], Input(data, 0, 2 * I, 1, scale, scale_stride_m=1))


def gemm1(
    h: Tensor,  # (pairs, I in whole chunks), columns permuted for w2
    x: Tensor,
    w13: MixedOperand,
    w2: MixedOperand | None,  # None: plain, which takes columns of h in their order
    routing: PairRouting,
    topk_weights: RouterWeights,  # that scale the input
    activation: Activated,
    config: GemmConfig,
    block_m: int,
    gpu: Gpu,
    x_scale: Tensor | None = None,  # (pairs,) fp32
    routed: bool = False,  # as of `permute_tokens`
    added: Tensor | None = None,  # (pairs, N)
) -> Launch:
    """h = activation(x @ w13.T + bias + added), with rows of x times their scales."""
    gated = activation.GATED
    halves = 2 if gated and not activation.INTERLEAVED else 1
    pairs, pair_strides = routing
    w, w_high, w_scales, pointers, strides, prepared = _operand(
        w13, halves, config, block_m, 1, pairs, gpu
    )
    if w2 is None:
        I = w13.N // 2 if gated else w13.N
        hidden = HiddenRows(h, added, w13.k_chunk, 16, False)
    else:
        I, h_chunk = w2.K, w2.k_chunk
        hidden = HiddenRows(h, added, h_chunk, w2.order, I % h_chunk > 0)
    args = Gemm1(
        hidden=hidden,
        descriptors=_descriptors(prepared, x, w, w_high, w_scales),
        pointers=pointers,
        products=products_on(w13),
        x_scale=x_scale,
        pairs=pairs,
        pair_strides=pair_strides,
        topk_weights=topk_weights,
        K=w13.K,
        I=I,
        strides=strides,
        activation=activation,
        decoding=prepared.decoding,
        tile=prepared.tile if not routed else _routed(prepared.tile),
        PDL=gpu.pdl,
    )
    block_i = config.block_n // 2 if gated else config.block_n
    grid = prepared.grid(pairs, cdiv(I, block_i))
    return Launch(moe_ops_wgmma_gemm1, grid, args, config.num_warps, prepared.maxnreg)


def gemm2(
    y: Tensor,
    h: Tensor,
    w2: MixedOperand,
    routing: PairRouting,
    config: GemmConfig,
    block_m: int,
    split_k: int,
    gpu: Gpu,
    h_scale: Tensor | None = None,  # (pairs,) fp32
    routed: bool = False,  # as of `permute_tokens`
) -> Launch:
    """y (split_k, pairs, N), whose sum over split_k is h @ w2.T + bias, with rows of h times their
    scales. h is sorted by expert, y has the order of the pairs.
    """
    pairs, pair_strides = routing
    w, w_high, w_scales, pointers, strides, prepared = _operand(
        w2, 1, config, block_m, split_k, pairs, gpu
    )
    N = w2.N
    args = Gemm2(
        y=y,
        descriptors=_descriptors(prepared, h, w, w_high, w_scales),
        pointers=pointers,
        products=products_on(w2),
        x_scale=h_scale,
        pairs=pairs,
        pair_strides=pair_strides,
        K=w2.K,
        N=N,
        strides=strides,
        decoding=prepared.decoding,
        SPLIT_K=split_k,
        tile=prepared.tile if not routed else _routed(prepared.tile),
        PDL=gpu.pdl,
    )
    grid = prepared.grid(pairs, cdiv(N, config.block_n) * split_k)
    return Launch(moe_ops_wgmma_gemm2, grid, args, config.num_warps, prepared.maxnreg)
