"""Grouped products with frozen weights of 4 to 8 bits, for training steps: sorted rows times the
weight of their expert, or times its transpose. Imported at first launch only.

Legend: S rows sorted by expert, E experts, weights (E, N, K) packed along K. FORMAT and SCALE as
in kernels/mixed_gemm/sm80_mma.py, but every weight is scaled before it is multiplied (SCALE is
"e8m0", "e4m3" or "weight"): the transposed product sums over N, where each row of the weight has
scales of its own. So both products multiply the same numbers, those of `dequantize()` rounded to
the dtype of the rows; a global scale divides the finished sums. Of global scales of rows that is
so of the product over K; in the one over N they divide the rows' columns, which are rounded again.

A program decodes a tile of the weight in registers, for BLOCK_M rows at a time, and puts it into
shared memory, from where tensor cores read it as it is or transposed. No 16-bit weight is ever in
global memory.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_ops.kernels.configs import GROUP_M
from moe_ops.kernels.device.blocks import block_and_tile
from moe_ops.kernels.device.interpreter import INTERPRET
from moe_ops.kernels.gemm.low_rank import block_r
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
from moe_ops.kernels.mixed_gemm.columns import columns, shift
from moe_ops.kernels.mixed_gemm.decode import (
    SUPER,
    codes_across_bytes,
    factors_above,
    high_bits,
    in_one_level,
    in_pairs,
    odd_bits,
    runs_of,
)
from moe_ops.kernels.mixed_gemm.operands import (
    Decoding,
    Format,
    MixedOperand,
    MixedPointers,
    MixedStrides,
    WeightStride,
)
from moe_ops.kernels.mixed_gemm.sm80_mma import first_bytes
from moe_ops.kernels.place.routing import Routing
from moe_ops.meta.scales import unit_of_planes
from moe_ops.meta.workspace import cdiv

BLOCK_M = 128  # rows of a block
BLOCK_OUT = 128  # columns of the output that a program writes
STEP = 64  # columns of the rows that it multiplies at a time
NUM_STAGES = 3
MOST_R = 32  # of the rank at a time: with 64 x w^T of int4 spills 24 bytes a thread


@triton.jit
def group_tile(
    ptr,  # scales or zero points of one expert
    n,
    k,
    N,
    K,
    stride_n,
    stride_g,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
):
    """(BLOCK_N,) or (BLOCK_N, GROUPS) from row n and column k on; zeros past the end."""
    row = n + tl.arange(0, BLOCK_N)
    ptrs = ptr + (row // SCALE_ROWS).to(tl.int64) * stride_n
    if SCALE_GROUP == 0:
        return tl.load(ptrs, mask=row < N, other=0)
    else:
        first = k // SCALE_GROUP
        ptrs += first * stride_g
        count = tl.cdiv(K, SCALE_GROUP)
        if GROUPS == 1:
            return tl.load(ptrs, mask=row < tl.where(first < count, N, 0), other=0)
        else:
            group = tl.arange(0, GROUPS)
            ok = (row < N)[:, None] & (first + group < count)[None, :]
            return tl.load(ptrs[:, None] + (group * stride_g)[None, :], mask=ok, other=0)


@triton.jit
def factor_tile(
    ptr,  # factors of the scales of one expert, or None
    n,
    k,
    N,
    K,
    stride_n,
    BLOCK_N: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """(BLOCK_N,) of rows from n on and of column k, as `decode.in_one_level` takes them; zeros
    past the end.
    """
    row = n + tl.arange(0, BLOCK_N)
    ptrs = factors_above(ptr, row.to(tl.int64) * stride_n, HAS_ZERO) + k // SUPER
    return tl.load(ptrs, mask=row < tl.where(k < K, N, 0), other=0)


@triton.jit
def bytes_in_planes(byte, HIGH: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr):
    """(where in a row a byte of low bits is, and that of the high bits of its columns; the bit
    where these begin) of bytes counted in the order of columns. High bytes come once for each run.
    """
    within = byte % (RUNS * RUN)
    first = byte // (RUNS * RUN) * ((RUNS + 1) * RUN)
    place = (within // RUN * (2 * HIGH)).to(tl.uint8)
    return first + within, first + RUNS * RUN + within % RUN, place


@unprefixed
class PackedTile(NamedTuple):
    """A tile of the weight, (BLOCK_N, BLOCK_K), and how many rows it multiplies."""

    TRANSPOSE: Constant
    EVEN: Constant  # tiles divide N and K
    GROUP_M: Constant
    BLOCK_M: Constant
    BLOCK_N: Constant
    BLOCK_K: Constant
    NUM_STAGES: Constant
    RUN: Constant  # bytes of a run of a format in planes, else 0


@unprefixed
class ScalesOfRows(NamedTuple):
    """Which rows of the weight have scales of their own."""

    SCALE_ROWS: Constant  # rows that share a scale
    FACTOR_ROWS: Constant  # whether each row has a factor, not each expert


class LowRank(NamedTuple):
    """What is added: rows times the matrix of their expert."""

    rows: Pointer  # (S, R), or None
    matrix: Pointer  # (E, N, R), or (E, R, K) if TRANSPOSE
    R: Specialized
    BLOCK_R: Constant


@arguments
class Packed:
    y: Pointer  # (S, N), or (S, K) if TRANSPOSE; written
    x_desc: Descriptor  # (S, K), or (S, N) if TRANSPOSE
    w: Pointer  # (E, N, bytes of K columns)
    pointers: MixedPointers
    index: Pointer  # kernels/device/blocks.py
    num_blocks: Runtime
    E: Runtime
    N: Specialized
    K: Specialized
    w_stride: WeightStride
    strides: MixedStrides
    decoding: Decoding
    of_rows: ScalesOfRows
    low: LowRank
    tile: PackedTile


@kernel(Packed)
def moe_ops_train_packed(
    y_ptr,
    x_desc,
    w_ptr,
    w_scale_ptr,
    w_zero_ptr,
    w_factor_ptr,
    bias_ptr,
    index_ptr,
    num_blocks,
    E,
    N,
    K,
    w_stride_e,
    w_stride_n,
    w_stride_k,
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
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    FACTOR_ROWS: tl.constexpr,
    low_rows_ptr,
    low_matrix_ptr,
    low_R,
    low_BLOCK_R: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    RUN: tl.constexpr,
):
    """y = x @ w.T, or x @ w if TRANSPOSE, for the rows of each expert, and the same product of
    rows and matrices of the rank; other rows are left as they are. Grid: blocks times column tiles
    of the output.
    """
    PAIRS: tl.constexpr = in_pairs(FORMAT)
    ODD_BITS: tl.constexpr = odd_bits(FORMAT)
    BITS: tl.constexpr = 4 if PAIRS else ODD_BITS if ODD_BITS > 0 else 8
    GROUPS: tl.constexpr = max(BLOCK_K // SCALE_GROUP, 1) if SCALE_GROUP > 0 else 1
    HAS_ZERO: tl.constexpr = w_zero_ptr is not None
    TWO_LEVELS: tl.constexpr = w_scale_ptr.dtype.element_ty == tl.int8
    OUT: tl.constexpr = BLOCK_K if TRANSPOSE else BLOCK_N
    IN: tl.constexpr = BLOCK_N if TRANSPOSE else BLOCK_K
    out_size = K if TRANSPOSE else N
    in_size = N if TRANSPOSE else K
    dtype: tl.constexpr = x_desc.dtype

    b, tile = block_and_tile(num_blocks, tl.cdiv(out_size, OUT), GROUP_M)
    e = tl.load(index_ptr + 4 * b)
    if (e < 0) | (e >= E):
        return
    first, end = tl.load(index_ptr + 4 * b + 1), tl.load(index_ptr + 4 * b + 2)
    e = e.to(tl.int64)
    w_ptr = w_ptr.to(tl.pointer_type(tl.uint8)) + e * w_stride_e
    if SCALE == "e4m3":
        w_scale_ptr = w_scale_ptr.to(tl.pointer_type(tl.uint8))
    w_scale_ptr += e * w_scale_stride_e
    if HAS_ZERO:
        if SCALE != "minimum":
            w_zero_ptr = w_zero_ptr.to(tl.pointer_type(tl.uint8))
        w_zero_ptr += e * w_zero_stride_e
    HIGH: tl.constexpr = high_bits(FORMAT)
    byte = first_bytes(BLOCK_K, FORMAT, 0)

    n = 0 if TRANSPOSE else tile * OUT
    k = tile * OUT if TRANSPOSE else 0
    s = group_tile(
        w_scale_ptr, n, k, N, K, w_scale_stride_n, w_scale_stride_g, BLOCK_N, GROUPS, SCALE_ROWS,
        SCALE_GROUP,
    )  # fmt: skip
    zero = s  # not used if there are none
    if HAS_ZERO:
        zero = group_tile(
            w_zero_ptr, n, k, N, K, w_zero_stride_n, w_zero_stride_g, BLOCK_N, GROUPS, SCALE_ROWS,
            SCALE_GROUP,
        )  # fmt: skip
    if TWO_LEVELS:
        w_factor_ptr += e * w_factor_stride_e
        above = factor_tile(w_factor_ptr, n, k, N, K, w_factor_stride_n, BLOCK_N, HAS_ZERO)
    if TRANSPOSE and FACTOR_ROWS:  # what is left of factors beside the first is near 1
        first_factor = tl.load(w_factor_ptr + e * w_factor_stride_e)
    acc = tl.zeros((BLOCK_M, OUT), tl.float32)
    for start in tl.range(0, in_size, IN, num_stages=NUM_STAGES):
        if TRANSPOSE:
            n = start
        else:
            k = start
        x = x_desc.load([first, start])  # zeros past the end, which meet finite weights
        row = n + tl.arange(0, BLOCK_N)
        # of the last row for those behind it, because codes_across_bytes masks columns alone
        at = row if EVEN else tl.minimum(row, N - 1)
        p_ptrs = w_ptr + at.to(tl.int64)[:, None] * w_stride_n
        high = None
        if HIGH > 0:
            low, upper, place = bytes_in_planes(k // 2 + byte, HIGH, runs_of(FORMAT), RUN)
            h_ptrs = p_ptrs + tl.max_contiguous(upper, RUN)[None, :] * w_stride_k
            p_ptrs += tl.max_contiguous(low, RUN)[None, :] * w_stride_k
        else:
            p_ptrs += (k * BITS // 8 + byte)[None, :] * w_stride_k
        if EVEN:
            p = tl.load(p_ptrs)
        else:
            ok = (row < N)[:, None] & (byte < (K - k) * BITS // 8)[None, :]
            p = tl.load(p_ptrs, mask=ok, other=0)
        if HIGH > 0:
            high = tl.load(h_ptrs) if EVEN else tl.load(h_ptrs, mask=ok, other=0)
            high = high >> place[None, :]
        if ODD_BITS > 0:
            column_of = tl.arange(0, BLOCK_K)
            p = codes_across_bytes(p, p_ptrs, w_stride_k, column_of, K - k, ODD_BITS)
        # scales are loaded one step ahead of their use
        next_n = n + BLOCK_N if TRANSPOSE else n
        next_k = k if TRANSPOSE else k + BLOCK_K
        next_s = group_tile(
            w_scale_ptr, next_n, next_k, N, K, w_scale_stride_n, w_scale_stride_g,
            BLOCK_N, GROUPS, SCALE_ROWS, SCALE_GROUP,
        )  # fmt: skip
        if HAS_ZERO:
            next_zero = group_tile(
                w_zero_ptr, next_n, next_k, N, K, w_zero_stride_n, w_zero_stride_g,
                BLOCK_N, GROUPS, SCALE_ROWS, SCALE_GROUP,
            )  # fmt: skip
        if TWO_LEVELS:
            next_above = factor_tile(
                w_factor_ptr, next_n, next_k, N, K, w_factor_stride_n, BLOCK_N, HAS_ZERO
            )
            s, zero = in_one_level(s, zero, above, GROUPS, HAS_ZERO)
            above = next_above
        if TRANSPOSE and FACTOR_ROWS:
            of_rows = w_factor_ptr + e * w_factor_stride_e + row.to(tl.int64) * w_factor_stride_n
            factor = tl.load(of_rows, mask=row < N, other=1.0)
            x = (x.to(tl.float32) * (first_factor / factor)[None, :]).to(dtype)
        w = columns(p, s, zero, dtype, BLOCK_N, BLOCK_K, GROUPS, FORMAT, SCALE, HAS_ZERO, high)
        if INTERPRET:  # the interpreter's 16-bit products are wrong
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, w if TRANSPOSE else w.T, acc, input_precision="ieee")
        s = next_s
        if HAS_ZERO:
            zero = next_zero

    acc *= shift(dtype, FORMAT, SCALE)
    position = first + tl.arange(0, BLOCK_M)
    column = tile * OUT + tl.arange(0, OUT)
    if (
        w_factor_ptr is not None and not TWO_LEVELS
    ):  # the global scale of an expert, or of each row
        w_factor_ptr += e * w_factor_stride_e
        if TRANSPOSE or not FACTOR_ROWS:
            acc /= tl.load(w_factor_ptr)
        else:
            of_rows = w_factor_ptr + column.to(tl.int64) * w_factor_stride_n
            acc /= tl.load(of_rows, mask=column < N, other=1.0)[None, :]
    inside = (position < end)[:, None]
    position = position.to(tl.int64)[:, None]
    ok = inside & (column < out_size)[None, :]
    if low_rows_ptr is not None:
        low_rows_ptr += position * low_R
        low_matrix_ptr += e * low_R * out_size
        for first_r in tl.range(0, low_R, low_BLOCK_R, num_stages=1):
            r = first_r + tl.arange(0, low_BLOCK_R)
            u = tl.load(low_rows_ptr + r[None, :], mask=inside & (r < low_R)[None, :], other=0.0)
            if TRANSPOSE:
                at = r.to(tl.int64)[:, None] * out_size + column[None, :]
            else:
                at = column.to(tl.int64)[None, :] * low_R + r[:, None]
            matrix_ok = (r < low_R)[:, None] & (column < out_size)[None, :]
            matrix = tl.load(low_matrix_ptr + at, mask=matrix_ok, other=0.0)
            if INTERPRET:
                u = u.to(tl.float32)
                matrix = matrix.to(tl.float32)
            acc = tl.dot(u, matrix, acc, input_precision="ieee")
    y_ptrs = y_ptr + position * out_size + column[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=ok)


def tile_of(w: MixedOperand, transpose: bool) -> PackedTile:
    """The tile of a product."""
    high = w.format.high_bits
    # of 6 bits that follow each other loaded by column, a register each
    step = STEP // 2 if w.format.bits == 6 and not high else STEP
    block_n, block_k = (step, BLOCK_OUT) if transpose else (BLOCK_OUT, step)
    run = 0
    if high:
        unit = unit_of_planes(w.K)
        run = unit * high // 8
        block_k = min(block_k, unit)  # Triton 3.6 does not compile tiles of several units
    even = w.N % block_n == 0 and w.K % block_k == 0
    return PackedTile(transpose, even, GROUP_M, BLOCK_M, block_n, block_k, NUM_STAGES, run)


def decoding_of(of: Format) -> Decoding:
    """How both kernels decode a weight: each weight times its scale."""
    as_it_is = of.scale in ("e8m0", "e4m3", "minimum")
    return Decoding(of.name, of.scale if as_it_is else "weight", of.group)


def scales_of_rows(w: MixedOperand) -> ScalesOfRows:
    """The arguments of a weight."""
    of = w.format
    factors = w.strides.w_factor_stride_n > 0 and not of.two_levels  # which are of scales
    return ScalesOfRows(of.group if of.scale == "block" else 1, factors)


def multiply(
    y: Tensor,
    x: Tensor,
    w: MixedOperand,
    routing: Routing,
    transpose: bool,
    gpu: Gpu,
    low: tuple[Tensor, Tensor] | None = None,
) -> Launch:
    """y (S, N) = x (S, K) @ w.T, or with `transpose` y (S, K) = x (S, N) @ w, for the rows of each
    expert; plus the same product of `low`, rows (S, R) and matrices (E, N, R) or (E, R, K), which
    are contiguous. Rows must be contiguous and begin at multiples of 16 bytes.

    With four warps a tile takes half of a multiprocessor's registers, so that one block decodes
    while another one multiplies. Weights of 6 bits take more registers, and so do all operands on
    GPUs that have less shared memory, and no products that read it.
    """
    of, tile = w.format, tile_of(w, transpose)
    S, columns = x.shape
    step = tile.BLOCK_N if transpose else tile.BLOCK_K
    u, matrix = (None, None) if low is None else low
    R = 16 if u is None else u.shape[1]
    args = Packed(
        y=y,
        x_desc=TensorDescriptor(x, [S, columns], [columns, 1], [BLOCK_M, step]),
        w=w.data,
        pointers=w.pointers,
        index=routing.index,
        num_blocks=routing.num_blocks,
        E=routing.E,
        N=w.N,
        K=w.K,
        w_stride=w.stride,
        strides=w.strides,
        decoding=decoding_of(of),
        of_rows=scales_of_rows(w),
        low=LowRank(u, matrix, R, min(MOST_R, block_r(R))),
        tile=tile,
    )
    out = tile.BLOCK_K if transpose else tile.BLOCK_N
    grid = (routing.num_blocks * cdiv(y.shape[1], out), 1, 1)
    few = gpu.has_tma and of.bits not in (5, 6)
    return Launch(moe_ops_train_packed, grid, args, 4 if few else 8)
