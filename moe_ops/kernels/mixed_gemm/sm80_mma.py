"""The two grouped GEMMs of 16-bit activations and weights of 4 to 8 bits, on tensor cores by
mma.sync. Imported at first launch only.

Legend, rows and blocks as in kernels/gemm/sm80_mma.py. Rows past the end of a weight are read as
its last row, and their results are not stored.

Weights are the left operand and reach the tensor core from registers: a thread loads 4 bytes of a
row, and masks them into fragments. Two columns a byte make two operands, one of the even columns
and one of the odd columns; activations, which are few, are split likewise in registers. Weights
are not repacked, and no data moves between threads.

On SM90 this takes 2.2 instructions a weight for int4 and 3.2 for e2m1, everything included; 3.5 a
weight would fill all issue slots at 4.3 TB/s. Blocks have two warps: with four, Triton uses
`wgmma` from 16 tokens on, whose operands move between threads, and takes 4.2 instructions a
weight.

FORMAT   "int4" (low nibble first, 0..15), "e2m1" (low nibble first), "int8", "e4m3"; "e3m2" and
         "e2m3" (lowest bits first: four columns in three bytes, which are loaded by column);
         "int6" and "int5" (in planes, `schemes.ElementFormat.high_bits`: a product takes the
         columns of one run of each unit, whose low bytes and high bytes pair up);
         "nf4", "fp4" and "iq4" (low nibble first): levels of a table (levels.py)
SCALE    where the scale of a weight is applied:
         "end"     one scale a row or tensor: the finished sum is scaled
         "sum"     one scale a group of at least 32 columns: each group's sum is scaled in fp32;
                   weights are exact, but for levels
         "block"   one scale a block of 128 x 128: as "sum"
         "e8m0"    one scale a group of 32: the weight is scaled in bf16, exactly
         "e4m3"    one scale a group of 16: the weight is scaled in bf16, exactly, and the finished
                   sum divided by the tensor's global scale; for int4 one scale a group of 128: the
                   scaled weight is rounded to e4m3, and the finished sum multiplied by its row's
                   channel scale
         "weight"  one scale a group: the weight is scaled in bf16, and rounded
         "minimum" one scale and one minimum a group or row: the weight is scaled and the minimum
                   added in fp32, and the sum is rounded once, to the dtype of activations; of int5
                   and int6 without minima codes less their middle are scaled, in bf16 by a scale
                   that is the sum of two numbers
Where scales are int8, they and minima are multiplied by the fp16 factors of 256 columns first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.activation import Activated
from moe_ops.kernels.configs import GROUP_M, LEVELS, GemmConfig
from moe_ops.kernels.device.activations import activate_one, activate_two
from moe_ops.kernels.device.blocks import block_and_tile, block_rows, pairs_at
from moe_ops.kernels.device.interpreter import INTERPRET
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.gemm.operands import Output
from moe_ops.kernels.launch import (
    Constant,
    Gpu,
    Launch,
    Pointer,
    Specialized,
    arguments,
    kernel,
    unprefixed,
)
from moe_ops.kernels.mixed_gemm.decode import (
    SUPER,
    codes_across_bytes,
    factors_above,
    high_bits,
    in_one_level,
    in_pairs,
    odd_bits,
    operands,
    runs_of,
)
from moe_ops.kernels.mixed_gemm.levels import is_level, level_unit
from moe_ops.kernels.mixed_gemm.operands import (
    Format,
    MixedOperand,
    MixedPointers,
    MixedStrides,
    WeightStride,
)
from moe_ops.kernels.place.routing import RouterWeights, Routing
from moe_ops.kernels.rows.scales import Input
from moe_ops.meta.scales import unit_of_planes
from moe_ops.meta.workspace import cdiv

# Scaled e2m1 weights are smaller by these powers of two, to fit the range of bf16, and the
# finished sum is multiplied by them. e8m0 scales from 2^-93 to 2^33 are exact; larger ones are
# refused when a tensor is made (tensors/checks.py).
E8M0_SHIFT = tl.constexpr(4294967296.0)  # 2^32
E4M3_SHIFT = tl.constexpr(256.0)
ALL_COLUMNS = tl.constexpr(1 << 30)  # SCALE_GROUP of a row's one scale beside its minimum


@triton.jit
def first_bytes(K_CHUNK: tl.constexpr, FORMAT: tl.constexpr, RUN: tl.constexpr):
    """The bytes of a row in which K_CHUNK columns begin. Two columns of 4 bits are one byte, four
    columns of 6 bits three bytes. In planes they are those of the first run of each unit, of RUN
    bytes.
    """
    BITS: tl.constexpr = odd_bits(FORMAT)
    if BITS > 0:
        return tl.arange(0, K_CHUNK) * BITS // 8
    elif RUN > 0:
        RUNS: tl.constexpr = runs_of(FORMAT)
        byte = tl.arange(0, K_CHUNK // (2 * RUNS))
        return tl.max_contiguous(byte // RUN * ((RUNS + 1) * RUN) + byte % RUN, RUN)
    elif in_pairs(FORMAT):
        return tl.arange(0, K_CHUNK // 2)
    else:
        return tl.arange(0, K_CHUNK)


@triton.jit
def first_columns(K_CHUNK: tl.constexpr, FORMAT: tl.constexpr, RUN: tl.constexpr):
    """K_CHUNK columns, or those whose low bits are at `first_bytes`."""
    if RUN > 0:
        RUNS: tl.constexpr = runs_of(FORMAT)
        column = tl.arange(0, K_CHUNK // RUNS)
        column = column // (2 * RUN) * (2 * RUN * RUNS) + column % (2 * RUN)
        return tl.max_contiguous(column, 2 * RUN)
    else:
        return tl.arange(0, K_CHUNK)


@triton.constexpr_function
def scales_of_run(GROUPS, COLUMNS, FORMAT, RUN):
    """(units, runs with scales of their own, scales of one) of the scales of COLUMNS columns."""
    units = COLUMNS // (2 * RUN * runs_of(FORMAT))
    if units >= GROUPS:  # a scale is that of all runs of a unit, or of units
        return 1, 1, GROUPS
    own = min(runs_of(FORMAT), GROUPS // units)
    return units, own, GROUPS // (units * own)


@triton.constexpr_function
def scales_of_product(GROUPS, COLUMNS, FORMAT, RUN):
    """Scales of a row in a product, of those of COLUMNS columns."""
    if RUN == 0:
        return GROUPS
    units, _, each = scales_of_run(GROUPS, COLUMNS, FORMAT, RUN)
    return units * each


@triton.jit
def of_run(
    s, run: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Of scales (rows, GROUPS) of COLUMNS columns those of one run of each unit."""
    UNITS: tl.constexpr = scales_of_run(GROUPS, COLUMNS, FORMAT, RUN)[0]
    OWN: tl.constexpr = scales_of_run(GROUPS, COLUMNS, FORMAT, RUN)[1]
    EACH: tl.constexpr = scales_of_run(GROUPS, COLUMNS, FORMAT, RUN)[2]
    if OWN == 1:
        return s
    else:
        ROWS: tl.constexpr = s.shape[0]
        AT: tl.constexpr = run * OWN // runs_of(FORMAT)
        s = s.reshape(ROWS, UNITS, OWN, EACH).permute(0, 1, 3, 2)
        if OWN == 4:
            even, odd = s.reshape(ROWS, UNITS, EACH, 2, 2).split()
            s = even if AT % 2 == 0 else odd
        tl.static_assert(OWN == 2 or OWN == 4)
        first, second = s.split()
        s = first if AT * 2 < OWN else second
        return s.reshape(ROWS, UNITS * EACH) if UNITS * EACH > 1 else s.reshape(ROWS)


@triton.jit
def column_of(scales, chunk: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr):
    """(BLOCK_N,) column `chunk` of scales (BLOCK_N, CHUNKS), CHUNKS 2 or 4."""
    if CHUNKS == 2:
        first, second = scales.split()
        return second if chunk == 1 else first
    else:
        even, odd = scales.reshape(BLOCK_N, 2, 2).split()
        first, second = (odd if chunk % 2 == 1 else even).split()
        return second if chunk >= 2 else first


@triton.constexpr_function
def tokens_are_lhs(BLOCK_M):
    """Whether tokens are the left operand of the product, whose instructions take 16 of them."""
    return BLOCK_M == 16 or BLOCK_M == 32


@triton.jit
def product(x, w, acc, TOKENS_ARE_LHS: tl.constexpr):
    """acc + x @ w.T: (BLOCK_M, BLOCK_N) if TOKENS_ARE_LHS, else (BLOCK_N, BLOCK_M)."""
    if TOKENS_ARE_LHS:
        return tl.dot(x, w.T, acc, input_precision="ieee")
    else:
        return tl.dot(w, x.T, acc, input_precision="ieee")


@triton.jit
def group_load(
    ptrs,  # (BLOCK_N,) or (BLOCK_N, GROUPS) scales or zero points of the first groups
    g,
    stride,
    group,
    count,  # groups in a row
    EVEN_K: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALE_ALIGN: tl.constexpr,
):
    """Scales or zero points of GROUPS groups from g on; zeros past the end of a row."""
    if EVEN_K or GROUPS == 1:
        return tl.load(ptrs + g * stride)
    else:
        remaining = tl.multiple_of(count - g, min(SCALE_ALIGN, GROUPS))
        return tl.load(ptrs + g * stride, mask=group < remaining, other=0)


@triton.constexpr_function
def unit(dtype, FORMAT, SCALE):
    """What sums of products with `weights` beside rows of a dtype are multiplied by."""
    if dtype != tl.bfloat16 or INTERPRET:
        return 1.0
    if is_level(FORMAT):
        return level_unit(FORMAT)
    if FORMAT == "e2m1":
        return E8M0_SHIFT if SCALE == "e8m0" else E4M3_SHIFT
    return 1.0


@triton.jit
def matmul(
    x_ptrs,  # (BLOCK_M, K_CHUNK)
    w_ptrs,  # (BLOCK_N, bytes of K_CHUNK columns), uint8
    x_ok,  # (BLOCK_M,)
    K,
    x_stride_k,
    w_stride_k,
    w_scale_ptr,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_g,
    w_zero_ptr,  # uint8, or with SCALE "minimum" of the scales' dtype, or None
    w_zero_stride_e,
    w_zero_stride_n,
    w_zero_stride_g,
    w_factor_ptr,  # fp32 of experts or their rows; in two levels fp16 of 256 columns; or None
    w_factor_stride_e,
    w_factor_stride_n,
    expert,
    row,  # (BLOCK_N,) rows of w, all of them there
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns a step, a multiple of K_CHUNK
    # columns that are loaded together, those of a product: at most a group if its sums are scaled;
    # in planes a product has those of a run
    K_CHUNK: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,  # columns that share a scale; 0 for all
    # a power of two that divides the strides of scales and the scales in a row
    SCALE_ALIGN: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    RUN: tl.constexpr,  # bytes of a run of formats in planes, else 0
):
    """x @ w.T, (BLOCK_M, BLOCK_N) in fp32."""
    TOKENS_ARE_LHS: tl.constexpr = tokens_are_lhs(BLOCK_M)
    PAIRS: tl.constexpr = in_pairs(FORMAT)
    ODD_BITS: tl.constexpr = odd_bits(FORMAT)
    HIGH: tl.constexpr = high_bits(FORMAT)
    RUNS: tl.constexpr = runs_of(FORMAT)
    PART: tl.constexpr = K_CHUNK // RUNS  # columns of a product
    # bytes that are loaded of a row; for 6 bits that follow each other some of them twice
    BYTES: tl.constexpr = PART // 2 if PAIRS else PART
    CHUNK_BYTES: tl.constexpr = (
        K_CHUNK * (4 + HIGH) // 8
        if HIGH > 0
        else K_CHUNK * ODD_BITS // 8
        if ODD_BITS > 0
        else BYTES
    )
    MINIMUM: tl.constexpr = SCALE == "minimum"
    SCALED: tl.constexpr = SCALE == "e8m0" or SCALE == "e4m3" or SCALE == "weight" or MINIMUM
    SUM: tl.constexpr = SCALE == "sum" or SCALE == "block"
    GROUPS: tl.constexpr = max(K_CHUNK // SCALE_GROUP, 1) if SCALED else 1
    HAS_ZERO: tl.constexpr = w_zero_ptr is not None
    TWO_LEVELS: tl.constexpr = w_scale_ptr.dtype.element_ty == tl.int8
    PRODUCT_GROUPS: tl.constexpr = scales_of_product(GROUPS, K_CHUNK, FORMAT, RUN)
    column = first_columns(K_CHUNK, FORMAT, RUN)
    byte = tl.arange(0, BYTES)
    if HIGH > 0:  # the first column of its unit, of which a row has whole ones
        byte = byte // RUN * (2 * RUN * RUNS)
    group = tl.arange(0, GROUPS)[None, :] if GROUPS > 1 else 0
    if SCALE == "e4m3":
        w_scale_ptr = w_scale_ptr.to(tl.pointer_type(tl.uint8))
    scale_row = row // 128 if SCALE == "block" else row
    scale_offsets = expert * w_scale_stride_e + scale_row.to(tl.int64) * w_scale_stride_n
    w_scale_ptrs = w_scale_ptr + tl.multiple_of(scale_offsets, SCALE_ALIGN)
    w_zero_ptrs = w_scale_ptrs
    if HAS_ZERO:
        if not MINIMUM:
            w_zero_ptr = w_zero_ptr.to(tl.pointer_type(tl.uint8))
        zero_offsets = expert * w_zero_stride_e + row.to(tl.int64) * w_zero_stride_n
        w_zero_ptrs = w_zero_ptr + tl.multiple_of(zero_offsets, SCALE_ALIGN)
    if GROUPS > 1:
        w_scale_ptrs = w_scale_ptrs[:, None] + group * w_scale_stride_g
        w_zero_ptrs = w_zero_ptrs[:, None] + group * w_zero_stride_g
    CHUNKS: tl.constexpr = BLOCK_K // K_CHUNK
    # Scales are pipelined with the operands (COPIED, STEP_SCALES) if a thread's have the 4 bytes
    # that an asynchronous copy takes, those of one product or of all chunks of a K tile at once.
    # Otherwise they are prefetched one product ahead (PREFETCH).
    BYTE_ZEROS: tl.constexpr = HAS_ZERO and not MINIMUM
    SIZE: tl.constexpr = 1 if BYTE_ZEROS else w_scale_ptr.dtype.element_ty.primitive_bitwidth // 8
    STEP_SCALES: tl.constexpr = (
        SCALE == "sum"
        and not HAS_ZERO
        and EVEN_K
        and SCALE_GROUP == K_CHUNK
        and (CHUNKS == 2 or CHUNKS == 4)
    ) and min(CHUNKS, SCALE_ALIGN, BLOCK_N * CHUNKS // (32 * NUM_WARPS)) * SIZE >= 4
    COPIED: tl.constexpr = (SCALED and EVEN_K) and min(
        GROUPS, SCALE_ALIGN, BLOCK_N * GROUPS // (32 * NUM_WARPS)
    ) * SIZE >= 4
    PREFETCH: tl.constexpr = (SUM or SCALED) and not STEP_SCALES and not COPIED
    if STEP_SCALES:
        step_scale_ptrs = w_scale_ptrs[:, None] + tl.arange(0, CHUNKS)[None, :] * w_scale_stride_g
    count = tl.cdiv(K, SCALE_GROUP) if SUM or SCALED else 1
    s, zero = w_scale_ptrs, w_zero_ptrs  # not used if there are none
    if PREFETCH:
        s = group_load(
            w_scale_ptrs, 0, w_scale_stride_g, group, count, EVEN_K, GROUPS, SCALE_ALIGN
        )
    if HAS_ZERO and not COPIED:
        zero = group_load(
            w_zero_ptrs, 0, w_zero_stride_g, group, count, EVEN_K, GROUPS, SCALE_ALIGN
        )
    if TWO_LEVELS:  # prefetched one product ahead
        above_ptrs = factors_above(
            w_factor_ptr,
            expert * w_factor_stride_e + row.to(tl.int64) * w_factor_stride_n,
            HAS_ZERO,
        )
        above = tl.load(above_ptrs)
    acc = tl.zeros((BLOCK_M, BLOCK_N) if TOKENS_ARE_LHS else (BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        if STEP_SCALES:
            scales = tl.load(step_scale_ptrs + start // SCALE_GROUP * w_scale_stride_g)
        for chunk in tl.static_range(CHUNKS):
            k = start + chunk * K_CHUNK
            p_ptrs = w_ptrs + chunk * CHUNK_BYTES * w_stride_k
            if not EVEN_K:
                end = (K - k) // 2 if PAIRS and HIGH == 0 else K - k
                # SCALE_GROUP divides K
                if SCALE_GROUP >= 32 and SCALE_GROUP < ALL_COLUMNS and SCALE != "block":
                    end = tl.multiple_of(end, 16)
                byte_ok = (byte < end)[None, :]
            if HIGH > 0:
                h_ptrs = p_ptrs + RUNS * RUN * w_stride_k
                high = tl.load(h_ptrs) if EVEN_K else tl.load(h_ptrs, mask=byte_ok, other=0)
            if PREFETCH:
                g = (k + K_CHUNK) // SCALE_GROUP
                g = tl.where(g < count, g, 0)
                next_s = group_load(
                    w_scale_ptrs, g, w_scale_stride_g, group, count, EVEN_K, GROUPS, SCALE_ALIGN
                )
                if HAS_ZERO:
                    next_zero = group_load(
                        w_zero_ptrs, g, w_zero_stride_g, group, count, EVEN_K, GROUPS, SCALE_ALIGN
                    )
            if TWO_LEVELS:
                next_k = k + K_CHUNK
                next_above = tl.load(above_ptrs + tl.where(next_k < K, next_k, 0) // SUPER)
            if STEP_SCALES:
                own = column_of(scales, chunk, BLOCK_N, CHUNKS)
            elif COPIED:
                own = tl.load(w_scale_ptrs + k // SCALE_GROUP * w_scale_stride_g)
            else:
                own = s
            own_zero = zero
            if COPIED and HAS_ZERO:
                own_zero = tl.load(w_zero_ptrs + k // SCALE_GROUP * w_zero_stride_g)
            if TWO_LEVELS:
                own, own_zero = in_one_level(own, own_zero, above, GROUPS, HAS_ZERO)
                above = next_above
            for run in tl.static_range(RUNS):
                x_mask = x_ok[:, None]
                if not EVEN_K:
                    x_mask = x_mask & (k + run * 2 * RUN + column < K)[None, :]
                x_offset = (chunk * K_CHUNK + run * 2 * RUN) * x_stride_k
                x = tl.load(x_ptrs + x_offset, mask=x_mask, other=0.0)
                if EVEN_K:
                    p = tl.load(p_ptrs + run * RUN * w_stride_k)
                else:
                    p = tl.load(p_ptrs + run * RUN * w_stride_k, mask=byte_ok, other=0)
                if ODD_BITS > 0:
                    x_end = K - k if not EVEN_K else K_CHUNK
                    p = codes_across_bytes(p, p_ptrs, w_stride_k, byte, x_end, ODD_BITS)
                if HIGH > 0:
                    run_s = of_run(own, run, K_CHUNK, GROUPS, FORMAT, RUN)
                    run_zero = own_zero
                    if HAS_ZERO:
                        run_zero = of_run(own_zero, run, K_CHUNK, GROUPS, FORMAT, RUN)
                    x0, x1, w0, w1 = operands(
                        x, p, run_s, run_zero, BLOCK_M, BLOCK_N, PART, PRODUCT_GROUPS,
                        FORMAT, SCALE, HAS_ZERO, high, run,
                    )  # fmt: skip
                else:
                    x0, x1, w0, w1 = operands(
                        x,
                        p,
                        own,
                        own_zero,
                        BLOCK_M,
                        BLOCK_N,
                        PART,
                        GROUPS,
                        FORMAT,
                        SCALE,
                        HAS_ZERO,
                    )
                if SUM:
                    d = product(x0, w0, tl.zeros_like(acc), TOKENS_ARE_LHS)
                    if PAIRS:
                        d = product(x1, w1, d, TOKENS_ARE_LHS)
                    own = own.to(tl.float32)
                    acc += d * (own[None, :] if TOKENS_ARE_LHS else own[:, None])
                else:
                    acc = product(x0, w0, acc, TOKENS_ARE_LHS)
                    if PAIRS:
                        acc = product(x1, w1, acc, TOKENS_ARE_LHS)
            if PREFETCH:
                s = next_s
                if HAS_ZERO:
                    zero = next_zero
        x_ptrs += BLOCK_K * x_stride_k
        w_ptrs += CHUNKS * CHUNK_BYTES * w_stride_k
    if not TOKENS_ARE_LHS:
        acc = acc.T
    if SCALE == "end":
        acc *= tl.load(w_scale_ptrs).to(tl.float32)[None, :]
    acc *= unit(x_ptrs.dtype.element_ty, FORMAT, SCALE)
    if SCALE == "e4m3":
        factor = tl.load(w_factor_ptr + expert * w_factor_stride_e + row * w_factor_stride_n).to(
            tl.float32
        )
        if FORMAT == "int4":
            acc *= factor[None, :]
        else:
            acc /= factor[None, :]
    return acc


@unprefixed
class MixedTile(NamedTuple):
    """A GEMM's config, and the constants of a weight's format."""

    FORMAT: Constant
    SCALE: Constant
    SCALE_GROUP: Constant
    EVEN_K: Constant
    GROUP_M: Constant
    BLOCK_M: Constant
    BLOCK_N: Constant
    BLOCK_K: Constant
    NUM_STAGES: Constant
    NUM_WARPS: Constant
    K_CHUNK: Constant  # columns of a product
    SCALE_ALIGN: Constant
    RUN: Constant  # bytes of a run of a format in planes, else 0


@lru_cache(maxsize=4096)
def tile_of(
    of: Format,
    scale_align: int,
    same_dtype: bool,  # whether scales have the dtype of the activations
    config: GemmConfig,
    block_m: int,
    K: int,
) -> MixedTile:
    """The MixedTile of a GEMM over K columns.

    A product takes at most 128 columns, because operands of more would fill the registers. More
    products in a K tile read longer runs of a row, which memory gives faster.
    """
    n, k, num_stages, num_warps = config
    how, group = of.scale, of.group
    if how == "minimum" and group == 0:
        group = ALL_COLUMNS.value
    few_columns = how == "sum" and group == 32  # a product would have 32 alone
    if few_columns and (of.name in LEVELS or (of.name == "int4" and same_dtype)):
        how = "weight"
    chunk = min(k, 64 if block_m == 32 else 128)
    if how == "sum":
        chunk = min(chunk, of.group)
    run = 0
    if high := of.high_bits:  # a chunk has whole units, and a product one run of each
        run = unit_of_planes(K) * high // 8
        k = max(k, 128)
        # of int5 without minima Triton copies 16 bytes at a time only for products of 64 columns
        chunk = 256 if high == 1 and K % 256 == k % 256 == 0 else 128
    elif of.bits == 6:  # loaded by column, a register each
        chunk = min(chunk, 32)
    even = K % k == 0
    return MixedTile(
        *(of.name, how, group, even, GROUP_M, block_m, n, k, num_stages, num_warps),
        *(chunk, scale_align, run),
    )


@unprefixed
class MixedInput(NamedTuple):
    """A GEMM's input, and scales of its rows, which multiply the finished sums."""

    x: Pointer
    x_scale: Pointer
    x_scale_stride_m: Specialized


class RowStride(NamedTuple):
    """Strides of rows that are read: a row of expert e is at e * stride_e + row * stride_m."""

    e: Specialized
    m: Specialized
    k: Specialized


@unprefixed
class MixedHidden(NamedTuple):
    """What a first GEMM writes, and adds before the activation."""

    h: Pointer  # (S, I), written at the block's positions
    h_amax: Pointer  # (1,) fp32, raised to the largest magnitude of h, or None
    added: Pointer  # (S, N) at the block's positions, or None


class OutputStride(NamedTuple):
    """Strides of rows that are written: a row of expert e is at e * stride_e + row * stride_m."""

    e: Specialized
    m: Specialized
    n: Specialized


@arguments
class Gemm1:
    hidden: MixedHidden
    input: MixedInput  # (M, K), or (E, T, K) as rows
    w: Pointer  # (E, N, bytes of K columns)
    pointers: MixedPointers
    routing: Routing
    topk_weights: RouterWeights  # (M, top_k), if they scale the input
    K: Specialized
    I: Specialized
    x_stride: RowStride
    w_stride: WeightStride
    strides: MixedStrides
    activation: Activated
    tile: MixedTile
    PDL: Constant


@kernel(Gemm1)
def moe_ops_mixed_gemm1(
    h_ptr,
    h_amax_ptr,
    added_ptr,
    x_ptr,
    x_scale_ptr,
    x_scale_stride_m,
    w_ptr,
    w_scale_ptr,
    w_zero_ptr,
    w_factor_ptr,
    bias_ptr,
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
    K,
    I,
    x_stride_e,
    x_stride_m,
    x_stride_k,
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
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    K_CHUNK: tl.constexpr,
    SCALE_ALIGN: tl.constexpr,
    RUN: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = activation(x @ w13.T + bias). The activation is applied to gate and up in registers.

    Grid: blocks times column tiles of BLOCK_I.
    """
    BLOCK_I: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if ROWS != "direct":  # the kernel before this one wrote the table of blocks
        gdc_wait(PDL)
    b, n = block_and_tile(num_blocks, tl.cdiv(I, BLOCK_I), GROUP_M)
    e, position, ok = block_rows(
        index_ptr, ids_ptr, map_ptr, b, E, num_ids, top_k, ids_stride_m, ids_stride_k, map_stride,
        BLOCK_M, ROWS,
    )  # fmt: skip
    if ROWS == "direct":
        gdc_wait(PDL)
    if e < 0:
        return
    pair = pairs_at(index_ptr, num_blocks, position, ok, ROWS)
    r = tl.arange(0, BLOCK_N)
    if GATED:
        # A thread's accumulators hold neighbouring columns if tokens are the left operand, else
        # rows i and i + 8. Gate and up are put there, so that they meet without a shuffle.
        EACH: tl.constexpr = 1 if tokens_are_lhs(BLOCK_M) else 8
        column = tl.minimum(n * BLOCK_I + r // (2 * EACH) * EACH + r % EACH, I - 1)
        up = r // EACH % 2
        row = 2 * column + up if INTERLEAVED else column + up * I
    else:
        row = tl.minimum(n * BLOCK_N + r, I - 1)
    e64 = e.to(tl.int64)
    token = (pair // top_k).to(tl.int64)
    x_ptrs = x_ptr + e64 * x_stride_e + token[:, None] * x_stride_m
    x_ptrs += first_columns(K_CHUNK, FORMAT, RUN).to(tl.int64)[None, :] * x_stride_k
    w_ptrs = (
        w_ptr.to(tl.pointer_type(tl.uint8))
        + e64 * w_stride_e
        + row.to(tl.int64)[:, None] * w_stride_n
    )
    w_ptrs += first_bytes(K_CHUNK, FORMAT, RUN).to(tl.int64)[None, :] * w_stride_k
    acc = matmul(
        x_ptrs, w_ptrs, ok, K, x_stride_k, w_stride_k,
        w_scale_ptr, w_scale_stride_e, w_scale_stride_n, w_scale_stride_g,
        w_zero_ptr, w_zero_stride_e, w_zero_stride_n, w_zero_stride_g,
        w_factor_ptr, w_factor_stride_e, w_factor_stride_n, e64, row,
        BLOCK_M, BLOCK_N, BLOCK_K, K_CHUNK, EVEN_K, NUM_STAGES,
        FORMAT, SCALE, SCALE_GROUP, SCALE_ALIGN, NUM_WARPS, RUN,
    )  # fmt: skip
    gdc_launch_dependents(PDL)
    if x_scale_ptr is not None:
        acc *= tl.load(x_scale_ptr + token * x_scale_stride_m, mask=ok, other=0.0)[:, None]
    if topk_weights_ptr is not None:
        factor_ptrs = (
            topk_weights_ptr
            + token * topk_weights_stride_m
            + (pair % top_k) * topk_weights_stride_k
        )
        acc *= tl.load(factor_ptrs, mask=ok, other=0.0).to(tl.float32)[:, None]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + e64 * bias_stride_e + row * bias_stride_n)
        acc += bias.to(tl.float32)[None, :]
    if added_ptr is not None:
        added_ptrs = added_ptr + position.to(tl.int64)[:, None] * (2 * I if GATED else I)
        added = tl.load(added_ptrs + row[None, :], mask=ok[:, None], other=0.0)
        acc += added.to(tl.float32)
    if GATED:
        g, u = acc.reshape(BLOCK_M, BLOCK_I // EACH, 2, EACH).permute(0, 1, 3, 2).split()
        g = g.reshape(BLOCK_M, BLOCK_I)
        u = u.reshape(BLOCK_M, BLOCK_I)
        h = activate_two(g, u, alpha, beta, limit, ACTIVATION, HAS_LIMIT, e)
    else:
        h = activate_one(acc, ACTIVATION)
    if h_amax_ptr is not None:
        # As integers, the bits of floats >= 0 have the order of the floats.
        amax = tl.where(ok[:, None] & (h == h), tl.abs(h), 0.0)  # NaN stays in its row
        largest = tl.max(tl.max(amax, 0), 0).to(tl.int32, bitcast=True)
        tl.atomic_max(h_amax_ptr.to(tl.pointer_type(tl.int32)), largest, sem="relaxed")
    column = n * BLOCK_I + tl.arange(0, BLOCK_I)
    h_ptrs = h_ptr + position.to(tl.int64)[:, None] * I + column[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=ok[:, None] & (column < I)[None, :])


@arguments
class Gemm2:
    y: Pointer  # (S, N), written at the pairs; if ROWS is "plain", at the block's positions
    input: MixedInput  # (S, K), read at the block's positions
    w: Pointer  # (E, N, bytes of K columns)
    pointers: MixedPointers
    routing: Routing
    K: Specialized
    N: Specialized
    x_stride_m: Specialized
    x_stride_k: Specialized
    w_stride: WeightStride
    strides: MixedStrides
    y_stride: OutputStride
    ZERO_TAIL: Constant  # rows past those of the last expert are zeroed
    tile: MixedTile
    PDL: Constant


@kernel(Gemm2)
def moe_ops_mixed_gemm2(
    y_ptr,
    x_ptr,
    x_scale_ptr,
    x_scale_stride_m,
    w_ptr,
    w_scale_ptr,
    w_zero_ptr,
    w_factor_ptr,
    bias_ptr,
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
    K,
    N,
    x_stride_m,
    x_stride_k,
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
    y_stride_e,
    y_stride_m,
    y_stride_n,
    ZERO_TAIL: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    K_CHUNK: tl.constexpr,
    SCALE_ALIGN: tl.constexpr,
    RUN: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x @ w.T + bias, rounded once, to y's dtype. Also the GEMM of grouped_linear.

    Grid: blocks times column tiles of BLOCK_N.
    """
    if ZERO_TAIL:  # the kernel before this one wrote the table of blocks
        gdc_wait(PDL)
    b, n = block_and_tile(num_blocks, tl.cdiv(N, BLOCK_N), GROUP_M)
    e, position, ok = block_rows(
        index_ptr, ids_ptr, map_ptr, b, E, num_ids, top_k, ids_stride_m, ids_stride_k, map_stride,
        BLOCK_M, ROWS,
    )  # fmt: skip
    if not ZERO_TAIL:
        gdc_wait(PDL)
    if e < 0:
        return
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(column, N - 1)
    here = e
    if ZERO_TAIL:  # rows of no expert: the sum over zero columns, without bias
        K = tl.where(e < E, K, 0)
        here = tl.minimum(e, E - 1)  # an expert whose pointers are valid; what is read is not used
    e64 = here.to(tl.int64)
    x_ptrs = x_ptr + position.to(tl.int64)[:, None] * x_stride_m
    x_ptrs += first_columns(K_CHUNK, FORMAT, RUN).to(tl.int64)[None, :] * x_stride_k
    w_ptrs = (
        w_ptr.to(tl.pointer_type(tl.uint8))
        + e64 * w_stride_e
        + row.to(tl.int64)[:, None] * w_stride_n
    )
    w_ptrs += first_bytes(K_CHUNK, FORMAT, RUN).to(tl.int64)[None, :] * w_stride_k
    acc = matmul(
        x_ptrs, w_ptrs, ok, K, x_stride_k, w_stride_k,
        w_scale_ptr, w_scale_stride_e, w_scale_stride_n, w_scale_stride_g,
        w_zero_ptr, w_zero_stride_e, w_zero_stride_n, w_zero_stride_g,
        w_factor_ptr, w_factor_stride_e, w_factor_stride_n, e64, row,
        BLOCK_M, BLOCK_N, BLOCK_K, K_CHUNK, EVEN_K, NUM_STAGES,
        FORMAT, SCALE, SCALE_GROUP, SCALE_ALIGN, NUM_WARPS, RUN,
    )  # fmt: skip
    gdc_launch_dependents(PDL)
    if x_scale_ptr is not None:
        x_scales = x_scale_ptr + position.to(tl.int64) * x_scale_stride_m
        acc *= tl.load(x_scales, mask=ok, other=0.0)[:, None]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + e64 * bias_stride_e + row * bias_stride_n)
        acc += bias.to(tl.float32)[None, :]
    if ZERO_TAIL:
        acc = tl.where(e < E, acc, 0.0)
    # late, so that it takes no registers in the mainloop
    pair = pairs_at(index_ptr, num_blocks, position, ok, ROWS)
    y_ptrs = y_ptr + e64 * y_stride_e + pair.to(tl.int64)[:, None] * y_stride_m
    y_ptrs += column.to(tl.int64)[None, :] * y_stride_n
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=ok[:, None] & (column < N)[None, :])


def gemm1(
    h: Tensor,  # (rows, I)
    h_amax: Tensor | None,
    x: Input,
    w: MixedOperand,
    routing: Routing,
    topk_weights: RouterWeights,  # that scale the input
    activation: Activated,
    config: GemmConfig,
    block_m: int,
    gpu: Gpu,
    added: Tensor | None = None,  # (pairs, N) at the blocks' positions
) -> Launch:
    """h = activation(x @ w.T + bias + added)."""
    K, N = w.K, w.N
    gated = activation.GATED
    I, block_i = (N // 2, config.block_n // 2) if gated else (N, config.block_n)
    same_dtype = w.scale.dtype == x.data.dtype
    args = Gemm1(
        hidden=MixedHidden(h, h_amax, added),
        input=MixedInput(x.ptr, x.scale, x.scale_stride_m),
        w=w.data,
        pointers=w.pointers,
        routing=routing,
        topk_weights=topk_weights,
        K=K,
        I=I,
        x_stride=RowStride(x.stride_e, x.stride_m, x.stride_k),
        w_stride=w.stride,
        strides=w.strides,
        activation=activation,
        tile=tile_of(w.format, w.scale_align, same_dtype, config, block_m, K),
        PDL=gpu.pdl,
    )
    grid = (routing.num_blocks * cdiv(I, block_i), 1, 1)
    return Launch(moe_ops_mixed_gemm1, grid, args, config.num_warps)


def gemm2(
    y: Output,
    x: Input,
    w: MixedOperand,
    routing: Routing,
    config: GemmConfig,
    block_m: int,
    gpu: Gpu,
    zero_tail: bool = False,
) -> Launch:
    """y = x @ w.T + bias."""
    K, N = w.K, w.N
    same_dtype = w.scale.dtype == x.data.dtype
    args = Gemm2(
        y=y.ptr,
        input=MixedInput(x.ptr, x.scale, x.scale_stride_m),
        w=w.data,
        pointers=w.pointers,
        routing=routing,
        K=K,
        N=N,
        x_stride_m=x.stride_m,
        x_stride_k=x.stride_k,
        w_stride=w.stride,
        strides=w.strides,
        y_stride=OutputStride(y.stride_e, y.stride_m, y.stride_n),
        ZERO_TAIL=zero_tail,
        tile=tile_of(w.format, w.scale_align, same_dtype, config, block_m, K),
        PDL=gpu.pdl,
    )
    grid = (routing.num_blocks * cdiv(N, config.block_n), 1, 1)
    return Launch(moe_ops_mixed_gemm2, grid, args, config.num_warps)
