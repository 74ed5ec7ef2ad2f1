"""A weight of some experts written in 16 bits, for products of many rows an expert. Imported at
first launch only.

Legend as in packed.py: the numbers are those that its products multiply.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from moe_ops.kernels.device.pdl import gdc_wait_at_the_end
from moe_ops.kernels.launch import (
    Constant,
    Launch,
    Pointer,
    Specialized,
    arguments,
    kernel,
    unprefixed,
)
from moe_ops.kernels.mixed_gemm.columns import columns, shift
from moe_ops.kernels.mixed_gemm.decode import SUPER, in_one_level, in_pairs
from moe_ops.kernels.mixed_gemm.operands import (
    Decoding,
    MixedOperand,
    MixedPointers,
    MixedStrides,
    WeightStride,
)
from moe_ops.kernels.mixed_gemm.packed import (
    ScalesOfRows,
    decoding_of,
    factor_tile,
    group_tile,
    scales_of_rows,
)
from moe_ops.kernels.mixed_gemm.sm80_mma import first_bytes
from moe_ops.meta.workspace import cdiv

BLOCK_N, BLOCK_K = 64, 128


@unprefixed
class DequantizedTile(NamedTuple):
    """A tile of the weight."""

    EVEN: Constant  # tiles divide N and K
    BLOCK_N: Constant
    BLOCK_K: Constant
    BESIDE: Constant  # it runs beside the kernel before: gdc_wait_at_the_end


@arguments
class Dequantize:
    y: Pointer  # (E, N, K), written
    w: Pointer  # (E, N, bytes of K columns)
    pointers: MixedPointers
    N: Specialized
    K: Specialized
    w_stride: WeightStride
    strides: MixedStrides
    decoding: Decoding
    of_rows: ScalesOfRows
    tile: DequantizedTile


@kernel(Dequantize)
def moe_ops_dequantize(
    y_ptr,
    w_ptr,
    w_scale_ptr,
    w_zero_ptr,
    w_factor_ptr,
    bias_ptr,
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
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """Grid: (experts times tiles of rows, tiles of columns)."""
    BITS: tl.constexpr = 4 if in_pairs(FORMAT) else 8
    GROUPS: tl.constexpr = max(BLOCK_K // SCALE_GROUP, 1) if SCALE_GROUP > 0 else 1
    HAS_ZERO: tl.constexpr = w_zero_ptr is not None
    dtype: tl.constexpr = y_ptr.dtype.element_ty

    tiles = tl.cdiv(N, BLOCK_N)
    e = (tl.program_id(0) // tiles).to(tl.int64)
    n, k = tl.program_id(0) % tiles * BLOCK_N, tl.program_id(1) * BLOCK_K
    w_ptr = w_ptr.to(tl.pointer_type(tl.uint8)) + e * w_stride_e
    if SCALE == "e4m3":
        w_scale_ptr = w_scale_ptr.to(tl.pointer_type(tl.uint8))
    s = group_tile(
        w_scale_ptr + e * w_scale_stride_e, n, k, N, K, w_scale_stride_n, w_scale_stride_g,
        BLOCK_N, GROUPS, SCALE_ROWS, SCALE_GROUP,
    )  # fmt: skip
    zero = s  # not used if there are none
    if HAS_ZERO:
        if SCALE != "minimum":
            w_zero_ptr = w_zero_ptr.to(tl.pointer_type(tl.uint8))
        zero = group_tile(
            w_zero_ptr + e * w_zero_stride_e, n, k, N, K, w_zero_stride_n, w_zero_stride_g,
            BLOCK_N, GROUPS, SCALE_ROWS, SCALE_GROUP,
        )  # fmt: skip
    if w_scale_ptr.dtype.element_ty == tl.int8:  # two levels
        factor_ptr = w_factor_ptr + e * w_factor_stride_e
        above = factor_tile(factor_ptr, n, k, N, K, w_factor_stride_n, BLOCK_N, HAS_ZERO)
        s, zero = in_one_level(s, zero, above, GROUPS, HAS_ZERO)
    row, byte = n + tl.arange(0, BLOCK_N), first_bytes(BLOCK_K, FORMAT, 0)
    p_ptrs = w_ptr + row.to(tl.int64)[:, None] * w_stride_n
    p_ptrs += (k * BITS // 8 + byte)[None, :] * w_stride_k
    if EVEN:
        p = tl.load(p_ptrs)
    else:
        p_ok = (row < N)[:, None] & (byte < (K - k) * BITS // 8)[None, :]
        p = tl.load(p_ptrs, mask=p_ok, other=0)
    w = columns(p, s, zero, dtype, BLOCK_N, BLOCK_K, GROUPS, FORMAT, SCALE, HAS_ZERO)
    w = (w.to(tl.float32) * shift(dtype, FORMAT, SCALE)).to(dtype)  # exact: a power of two

    column = k + tl.arange(0, BLOCK_K)
    y_ptrs = y_ptr + e * N * K + row.to(tl.int64)[:, None] * K + column[None, :]
    if EVEN:
        tl.store(y_ptrs, w)
    else:
        tl.store(y_ptrs, w, mask=(row < N)[:, None] & (column < K)[None, :])
    gdc_wait_at_the_end(BESIDE)


def why_not(w: MixedOperand) -> str | None:
    """Why the kernel does not take a weight; None if it does."""
    if w.format.bits not in (4, 8):
        return "its format is none of this kernel's"
    if w.pointers.w_factor is not None and not w.format.two_levels:
        return "finished sums are divided by its scale"
    group = w.format.group
    if group and (BLOCK_K % group and group % BLOCK_K or w.format.two_levels and BLOCK_K > SUPER):
        return "tiles do not divide its groups"
    return None


def dequantize(y: Tensor, w: MixedOperand, beside: bool = False) -> Launch:
    """y (E, N, K), contiguous, of fp32, fp16 or bf16: the numbers of a weight that `why_not`
    allows. `beside`: it runs beside the kernel before, which does not write w and does not use y.
    """
    even = w.N % BLOCK_N == 0 and w.K % BLOCK_K == 0
    args = Dequantize(
        y=y,
        w=w.data,
        pointers=w.pointers,
        N=w.N,
        K=w.K,
        w_stride=w.stride,
        strides=w.strides,
        decoding=decoding_of(w.format),
        of_rows=scales_of_rows(w),
        tile=DequantizedTile(even, BLOCK_N, BLOCK_K, beside),
    )
    grid = (y.shape[0] * cdiv(w.N, BLOCK_N), cdiv(w.K, BLOCK_K), 1)
    return Launch(moe_ops_dequantize, grid, args)
