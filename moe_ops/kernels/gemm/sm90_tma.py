"""The two grouped GEMMs for many rows an expert, on GPUs with the tensor memory accelerator (TMA)
of SM90. Imported at first launch only.

Legend as in sm80_mma.py. Here tokens are the left operand (`x (BLOCK_M, BLOCK_K) @ w.T (BLOCK_K,
BLOCK_N)`), so that one wgmma takes up to 256 rows of the weight. Weights and h are loaded by
tensor descriptors, which give zeros out of bounds.

A weight is described as (E, halves, rows, K): gate and up rows are two halves, of which a box
holds equal parts; other weights have one. e4m3 weights have scales by blocks of 128 x 128, their x
and h by groups of 128 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_ops.kernels.activation import Activated
from moe_ops.kernels.configs import LayerConfig
from moe_ops.kernels.device.activations import activate_one, activate_two
from moe_ops.kernels.device.blocks import block_and_tile, pairs_at
from moe_ops.kernels.device.e4m3 import (
    decode,
    decode_activation,
    e4m3_scale,
    quotient,
    reciprocal,
    stored,
)
from moe_ops.kernels.device.interpreter import INTERPRET
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.gemm.operands import Bias, GemmTile, Scaling, Weight, tile_of
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
)
from moe_ops.kernels.place.routing import RouterWeights, Routing
from moe_ops.kernels.rows.scales import Input
from moe_ops.meta.workspace import cdiv


@triton.jit
def block_at(index_ptr, b, BLOCK_M: tl.constexpr, SPLIT_M: tl.constexpr):
    """(expert, first position, positions (BLOCK_M,), their validity (BLOCK_M,)) of part
    b % SPLIT_M of block b // SPLIT_M.
    """
    slot = index_ptr + b // SPLIT_M * 4
    first = tl.load(slot + 1) + b % SPLIT_M * BLOCK_M
    position = first + tl.arange(0, BLOCK_M)
    return tl.load(slot), first, position, position < tl.load(slot + 2)


@triton.jit
def dot(x, w, acc, NATIVE: tl.constexpr):
    """acc + x @ w.T."""
    if not NATIVE:
        x = decode_activation(x)
        w = decode(w, tl.float16)
    if INTERPRET:  # the interpreter's 16-bit products are wrong
        x = x.to(tl.float32)
        w = w.to(tl.float32)
    return tl.dot(x, w.T, acc, input_precision="ieee")


@triton.jit
def matmul_plain(
    x,  # pointers (BLOCK_M, BLOCK_K) if GATHERED, else a descriptor of (S, K)
    x_ok,  # (BLOCK_M,)
    w_desc,  # box [1, halves, BLOCK_N // halves, BLOCK_K]
    first,
    e,
    row,
    K,
    x_stride_k,
    GATHERED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """x @ w.T (BLOCK_M, BLOCK_N) in fp32, for one block and one tile."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        if GATHERED:
            if EVEN_K:
                xt = tl.load(x, mask=x_ok[:, None], other=0.0)
            else:
                k_ok = k + tl.arange(0, BLOCK_K) < K
                xt = tl.load(x, mask=x_ok[:, None] & k_ok[None, :], other=0.0)
            x += BLOCK_K * x_stride_k
        else:
            xt = x.load([first, k])
        acc = dot(xt, w_desc.load([e, 0, row, k]).reshape(BLOCK_N, BLOCK_K), acc, True)
    return acc


@triton.jit
def matmul_blocks(
    x,  # as above, with BLOCK_K = 128; every pointer is valid
    x_ok,  # (BLOCK_M,) which rows have scales
    x_scale_ptrs,  # (BLOCK_M,) pointers to the scales of the first group
    x_scale_stride_g,
    w_desc,  # box [1, 1, 128, 128], or [1, 1, 64, 128] if SECOND is "uneven half"
    w_scale_ptr,  # scales of this expert
    w_scale_stride_n,
    w_scale_stride_k,
    first,
    e,
    row,
    K,
    N,  # rows of a half, or of the weight
    x_stride_k,
    GATHERED: tl.constexpr,
    SECOND: tl.constexpr,
    EVEN_K: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """x @ w.T in fp32 of e4m3 operands: (BLOCK_M, 128) for the 128 weight rows from `row` on, and
    for as many more: those of the second half that lie as they do in the first (SECOND is
    "half"), or those after them ("next"). A second half that begins in the middle of a block
    ("uneven half") is four products of 64 rows, because the rows of such a box have one scale;
    with a scale of each row 168 registers of a thread spilled.

    The sum over 128 columns is scaled and added to the total outside of the tensor core, which
    accumulates in fewer bits than fp32 has. One half is multiplied after the other, because the
    sums of both would not fit into registers.
    """
    UNEVEN: tl.constexpr = SECOND == "uneven half"
    ROWS: tl.constexpr = 64 if UNEVEN else 128
    s0_ptr = w_scale_ptr + row // 128 * w_scale_stride_n
    s1_ptr = s0_ptr
    s2_ptr = s0_ptr
    if UNEVEN:  # the last tile may have 64 rows and no more
        s1_ptr = w_scale_ptr + (N + row) // 128 * w_scale_stride_n
        s2_ptr = w_scale_ptr + tl.minimum(N + row + 64, 2 * N - 1) // 128 * w_scale_stride_n
    elif SECOND == "half":
        s1_ptr += N // 128 * w_scale_stride_n
    elif SECOND == "next":  # the last tile may have 128 rows and no more
        s1_ptr = tl.where(row + 128 < N, s0_ptr + w_scale_stride_n, s0_ptr)
    acc0 = tl.zeros((BLOCK_M, ROWS), tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    zeros = acc0
    xs = tl.load(x_scale_ptrs, mask=x_ok, other=0.0)
    s0 = tl.load(s0_ptr).to(tl.float32)
    if SECOND != "":
        s1 = tl.load(s1_ptr).to(tl.float32)
    if UNEVEN:
        s2 = tl.load(s2_ptr).to(tl.float32)
    for k in tl.range(0, K, 128, num_stages=NUM_STAGES):
        if GATHERED:
            if EVEN_K:
                xt = tl.load(x)
            else:
                xt = tl.load(x, mask=(k + tl.arange(0, 128) < K)[None, :], other=0.0)
            x += 128 * x_stride_k
        else:
            xt = x.load([first, k])
        w0 = w_desc.load([e, 0, row, k]).reshape(ROWS, 128)
        if SECOND == "half":
            w1 = w_desc.load([e, 1, row, k]).reshape(128, 128)
        elif SECOND == "next":
            w1 = w_desc.load([e, 0, row + 128, k]).reshape(128, 128)
        elif UNEVEN:
            w1 = w_desc.load([e, 0, row + 64, k]).reshape(64, 128)
            w2 = w_desc.load([e, 1, row, k]).reshape(64, 128)
            w3 = w_desc.load([e, 1, row + 64, k]).reshape(64, 128)
        more = k + 128 < K  # scales are loaded one step ahead of their use
        x_scale_ptrs += tl.where(more, x_scale_stride_g, 0)
        next_xs = tl.load(x_scale_ptrs, mask=x_ok, other=0.0)
        s0_ptr += tl.where(more, w_scale_stride_k, 0)
        next_s0 = tl.load(s0_ptr).to(tl.float32)
        if SECOND != "":
            s1_ptr += tl.where(more, w_scale_stride_k, 0)
            next_s1 = tl.load(s1_ptr).to(tl.float32)
        acc0 += dot(xt, w0, zeros, NATIVE) * (xs * s0)[:, None]
        if UNEVEN:
            s2_ptr += tl.where(more, w_scale_stride_k, 0)
            next_s2 = tl.load(s2_ptr).to(tl.float32)
            acc1 += dot(xt, w1, zeros, NATIVE) * (xs * s0)[:, None]
            acc2 += dot(xt, w2, zeros, NATIVE) * (xs * s1)[:, None]
            acc3 += dot(xt, w3, zeros, NATIVE) * (xs * s2)[:, None]
            s2 = next_s2
        elif SECOND != "":
            acc1 += dot(xt, w1, zeros, NATIVE) * (xs * s1)[:, None]
        s0 = next_s0
        if SECOND != "":
            s1 = next_s1
        xs = next_xs
    return acc0, acc1, acc2, acc3


@triton.jit
def hidden_columns(
    g, u, factor, column, e64, bias_ptr, bias_stride_e, bias_stride_n, I, alpha, beta, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
):  # fmt: skip
    """Those columns of h in fp32, from the products with their rows of the weight; 0 from column I
    on.
    """
    if factor is not None:
        g *= factor[:, None]
        u *= factor[:, None]
    if bias_ptr is not None:
        bias_ptrs = (
            bias_ptr + e64 * bias_stride_e + column * (bias_stride_n * (2 if INTERLEAVED else 1))
        )
        g += tl.load(bias_ptrs, mask=column < I, other=0.0).to(tl.float32)[None, :]
        if GATED:
            bias_ptrs += bias_stride_n * (1 if INTERLEAVED else I)
            u += tl.load(bias_ptrs, mask=column < I, other=0.0).to(tl.float32)[None, :]
    if GATED:
        return activate_two(g, u, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        return activate_one(g, ACTIVATION)


@triton.jit
def store_hidden(
    h_ptr, h, position, ok, column, I, scale, QUANTIZED: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """Store columns of h, as elements of that scale if they are quantized."""
    if QUANTIZED:
        h = stored(quotient(h, scale[:, None], reciprocal(scale)[:, None]), NATIVE)
    else:
        h = h.to(h_ptr.dtype.element_ty)
    h_ptrs = h_ptr + position.to(tl.int64)[:, None] * I + column[None, :]
    tl.store(h_ptrs, h, mask=ok[:, None] & (column < I)[None, :])


@triton.jit
def gemm1_rows(
    b,
    n,
    h_ptr,
    h_scale_ptr,
    h_scale_stride_g,
    x_ptr,
    x_stride_m,
    x_stride_k,
    x_scale_ptr,
    x_scale_stride_m,
    x_scale_stride_g,
    w_desc,
    w_scale_ptr,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_k,
    bias_ptr,
    bias_stride_e,
    bias_stride_n,
    index_ptr,
    num_blocks,
    top_k,
    topk_weights_ptr,
    topk_weights_stride_m,
    topk_weights_stride_k,
    K,
    I,
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    POWERS: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """moe_ops_tma_gemm1 for tile n of block b, which has at most BLOCK_M rows."""
    BLOCK_I: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    HALVES: tl.constexpr = GATED and not INTERLEAVED
    UNEVEN: tl.constexpr = QUANTIZED and HALVES and not EVEN_N
    e, first, position, ok = block_at(index_ptr, b, BLOCK_M, 1)
    pair = pairs_at(index_ptr, num_blocks, position, ok, "sorted")
    token = pair // top_k
    row = token
    if QUANTIZED:
        # A mask of x would exceed the registers, which spill then. Instead,
        # unused rows repeat the block's rows: one row for all of them would be loaded by all
        # programs at once.
        again = first + (position - first) % tl.maximum(tl.sum(ok.to(tl.int32), 0), 1)
        row = tl.load(index_ptr + 4 * num_blocks + again) // top_k
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride_m
    x_ptrs += tl.arange(0, BLOCK_K).to(tl.int64)[None, :] * x_stride_k
    e64 = e.to(tl.int64)
    if QUANTIZED:
        tl.static_assert(BLOCK_I == 128 and BLOCK_K == 128)
        SECOND: tl.constexpr = (
            ("uneven half" if UNEVEN else "half") if HALVES else "next" if GATED else ""
        )
        g, u, u0, u1 = matmul_blocks(
            x_ptrs, ok, x_scale_ptr + token.to(tl.int64) * x_scale_stride_m, x_scale_stride_g,
            w_desc, w_scale_ptr + e64 * w_scale_stride_e, w_scale_stride_n, w_scale_stride_k,
            first, e, n * (BLOCK_I if HALVES else BLOCK_N), K, 2 * I if INTERLEAVED else I,
            x_stride_k, True, SECOND, EVEN_K, NATIVE, BLOCK_M, NUM_STAGES,
        )  # fmt: skip
    else:
        acc = matmul_plain(
            x_ptrs, ok, w_desc, first, e, n * (BLOCK_I if HALVES else BLOCK_N), K, x_stride_k,
            True, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
        )  # fmt: skip
        if HALVES:
            g, u = acc.reshape(BLOCK_M, 2, BLOCK_I).permute(0, 2, 1).split()
        elif GATED:
            g, u = acc.reshape(BLOCK_M, BLOCK_I, 2).split()
        else:
            g = acc
            u = acc
    gdc_launch_dependents(PDL)
    factor = None
    if topk_weights_ptr is not None:
        factor_ptrs = (
            topk_weights_ptr
            + token.to(tl.int64) * topk_weights_stride_m
            + (pair % top_k) * topk_weights_stride_k
        )
        factor = tl.load(factor_ptrs, mask=ok, other=0.0).to(tl.float32)
    column = n * BLOCK_I + tl.arange(0, BLOCK_I)
    scale_ptrs = h_scale_ptr
    if QUANTIZED:
        scale_ptrs += n.to(tl.int64) * h_scale_stride_g + position
    if UNEVEN or (QUANTIZED and GATED and INTERLEAVED):
        # Each half of the tile's columns in the threads that have its sums: both interleaved
        # products hold rows of gate and up.
        HALF: tl.constexpr = BLOCK_I // 2
        column = n * BLOCK_I + tl.arange(0, HALF)
        if INTERLEAVED:
            g0, u0 = g.reshape(BLOCK_M, HALF, 2).split()
            g1, u1 = u.reshape(BLOCK_M, HALF, 2).split()
        else:
            g0 = g
            g1 = u
        h0 = hidden_columns(
            g0, u0, factor, column, e64, bias_ptr, bias_stride_e, bias_stride_n, I,
            alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT,
        )  # fmt: skip
        h1 = hidden_columns(
            g1, u1, factor, column + HALF, e64, bias_ptr, bias_stride_e, bias_stride_n, I,
            alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT,
        )  # fmt: skip
        amax = tl.maximum(tl.max(tl.abs(h0), 1), tl.max(tl.abs(h1), 1))
        scale = e4m3_scale(amax, POWERS)
        tl.store(scale_ptrs, scale, mask=ok)
        store_hidden(h_ptr, h0, position, ok, column, I, scale, True, NATIVE)
        store_hidden(h_ptr, h1, position, ok, column + HALF, I, scale, True, NATIVE)
    else:
        h = hidden_columns(
            g, u, factor, column, e64, bias_ptr, bias_stride_e, bias_stride_n, I,
            alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT,
        )  # fmt: skip
        scale = None
        if QUANTIZED:
            scale = e4m3_scale(tl.max(tl.abs(h), 1), POWERS)
            tl.store(scale_ptrs, scale, mask=ok)
        store_hidden(h_ptr, h, position, ok, column, I, scale, QUANTIZED, NATIVE)


class DescribedInput(NamedTuple):
    """A tensor descriptor of a GEMM's input (S, K), and the input's scales."""

    desc: Descriptor
    scale: Pointer  # (ceil(K / 128), S), or None
    scale_stride_g: Runtime


class DescribedWeight(NamedTuple):
    """A tensor descriptor (E, halves, N / halves, K) of a weight (E, N, K), and its scales."""

    desc: Descriptor
    scale: Pointer  # (E, ceil(N / 128), ceil(K / 128)), or None
    scale_stride_e: Specialized
    scale_stride_n: Specialized
    scale_stride_k: Specialized


@arguments
class Gemm1:
    h: Input  # (S, I), written at the block's positions; with scales if it is quantized
    x: Input  # (M, K)
    w: DescribedWeight
    bias: Bias  # (E, N)
    index: Pointer
    num_blocks: Runtime
    top_k: Runtime
    topk_weights: RouterWeights  # (M, top_k), if they scale the input
    K: Specialized
    I: Specialized
    activation: Activated
    scaling: Scaling
    tile: GemmTile
    PDL: Constant


@kernel(Gemm1)
def moe_ops_tma_gemm1(
    h_ptr,
    h_stride_e,
    h_stride_m,
    h_stride_k,
    h_scale_ptr,
    h_scale_stride_e,
    h_scale_stride_m,
    h_scale_stride_g,
    h_partials: tl.constexpr,
    x_ptr,
    x_stride_e,
    x_stride_m,
    x_stride_k,
    x_scale_ptr,
    x_scale_stride_e,
    x_scale_stride_m,
    x_scale_stride_g,
    x_partials: tl.constexpr,
    w_desc,
    w_scale_ptr,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_k,
    bias_ptr,
    bias_stride_e,
    bias_stride_n,
    index_ptr,
    num_blocks,
    top_k,
    topk_weights_ptr,
    topk_weights_stride_m,
    topk_weights_stride_k,
    K,
    I,
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    W_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    POWERS: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = activation(x @ w13.T + bias), quantized by groups of 128 columns if the weight is e4m3.

    If a block of 128 rows has at most 64, its second half is not multiplied. So blocks can be
    large enough for all rows of the busiest experts, whose weights are then read once, also if
    most experts have few rows. Grid: blocks times column tiles.
    """
    FEW_M: tl.constexpr = BLOCK_M // 2 if BLOCK_M == 128 else BLOCK_M
    QUANTIZED: tl.constexpr = W_SCALE != ""
    gdc_wait(PDL)
    b, n = block_and_tile(num_blocks, tl.cdiv(I, BLOCK_N // 2 if GATED else BLOCK_N), GROUP_M)
    slot = index_ptr + b * 4
    if tl.load(slot) < 0:
        return
    if tl.minimum(tl.load(slot + 2) - tl.load(slot + 1), BLOCK_M) <= FEW_M:
        gemm1_rows(
            b, n, h_ptr, h_scale_ptr, h_scale_stride_g,
            x_ptr, x_stride_m, x_stride_k, x_scale_ptr, x_scale_stride_m, x_scale_stride_g,
            w_desc, w_scale_ptr, w_scale_stride_e, w_scale_stride_n, w_scale_stride_k,
            bias_ptr, bias_stride_e, bias_stride_n, index_ptr, num_blocks, top_k,
            topk_weights_ptr, topk_weights_stride_m, topk_weights_stride_k, K, I,
            alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT, QUANTIZED, POWERS,
            NATIVE, EVEN_K, EVEN_N, FEW_M, BLOCK_N, BLOCK_K, NUM_STAGES, PDL,
        )  # fmt: skip
    elif FEW_M < BLOCK_M:
        gemm1_rows(
            b, n, h_ptr, h_scale_ptr, h_scale_stride_g,
            x_ptr, x_stride_m, x_stride_k, x_scale_ptr, x_scale_stride_m, x_scale_stride_g,
            w_desc, w_scale_ptr, w_scale_stride_e, w_scale_stride_n, w_scale_stride_k,
            bias_ptr, bias_stride_e, bias_stride_n, index_ptr, num_blocks, top_k,
            topk_weights_ptr, topk_weights_stride_m, topk_weights_stride_k, K, I,
            alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT, QUANTIZED, POWERS,
            NATIVE, EVEN_K, EVEN_N, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, PDL,
        )  # fmt: skip


@arguments
class Gemm2:
    y: Pointer  # (S, N) contiguous, written at the pairs
    x: DescribedInput  # (S, K), read at the block's positions
    w: DescribedWeight
    bias: Bias  # (E, N)
    index: Pointer
    num_blocks: Runtime
    K: Specialized
    N: Specialized
    scaling: Scaling
    tile: GemmTile  # BLOCK_M: rows of a program
    SPLIT_M: Constant  # programs that share the rows of a block
    PDL: Constant


@kernel(Gemm2)
def moe_ops_tma_gemm2(
    y_ptr,
    x_desc,
    x_scale_ptr,
    x_scale_stride_g,
    w_desc,
    w_scale_ptr,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_k,
    bias_ptr,
    bias_stride_e,
    bias_stride_n,
    index_ptr,
    num_blocks,
    K,
    N,
    W_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    POWERS: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    SPLIT_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x @ w.T + bias in fp32. Grid: blocks times SPLIT_M times column tiles."""
    gdc_wait(PDL)
    b, n = block_and_tile(num_blocks * SPLIT_M, tl.cdiv(N, BLOCK_N), GROUP_M)
    e, first, position, ok = block_at(index_ptr, b, BLOCK_M, SPLIT_M)
    if e < 0 or tl.max(ok.to(tl.int32), 0) == 0:
        return
    e64 = e.to(tl.int64)
    if W_SCALE != "":
        tl.static_assert(BLOCK_N == 128 and BLOCK_K == 128)
        acc, _, _, _ = matmul_blocks(
            x_desc, ok, x_scale_ptr + position, x_scale_stride_g,
            w_desc, w_scale_ptr + e64 * w_scale_stride_e, w_scale_stride_n, w_scale_stride_k,
            first, e, n * BLOCK_N, K, N, 1, False, "", EVEN_K, NATIVE, BLOCK_M, NUM_STAGES,
        )  # fmt: skip
    else:
        acc = matmul_plain(
            x_desc, ok, w_desc, first, e, n * BLOCK_N, K, 1,
            False, True, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
        )  # fmt: skip
    gdc_launch_dependents(PDL)
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + e64 * bias_stride_e + column * bias_stride_n
        acc += tl.load(bias_ptrs, mask=column < N, other=0.0).to(tl.float32)[None, :]
    pair = pairs_at(index_ptr, num_blocks, position, ok, "sorted")
    y_ptrs = y_ptr + pair.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(y_ptrs, acc, mask=ok[:, None] & (column < N)[None, :])


def why_not(
    w13: Weight, w2: Weight, activation: Activated, scaling: Scaling, gpu: Gpu
) -> str | None:
    """Why these kernels cannot run a layer, or None."""
    I = w2.data.shape[2]
    if not gpu.has_tma:
        return "the GPU has no tensor memory accelerator"
    if not (_describable(w13) and _describable(w2)):
        return "rows of weights must be contiguous and start at multiples of 16 bytes"
    w_scale, x_scale, *_ = scaling
    if w_scale and (w_scale, x_scale) != ("block", "group"):
        return "weights must be plain, or e4m3 with scales by blocks"
    if w_scale and activation.GATED and not activation.INTERLEAVED and I % 64:
        return "64 up rows of a tile would have scales of two blocks"
    if I * w2.data.dtype.itemsize % 16:
        return "rows of h must start at multiples of 16 bytes"
    return None


def _describable(w: Weight) -> bool:
    """Whether a tensor descriptor can describe the weight."""
    size = w.data.dtype.itemsize
    addresses = w.stride_e * size | w.stride_n * size | w.data.data_ptr()
    return w.stride_k == 1 and addresses % 16 == 0


def _descriptor(
    base: Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> Any:
    return TensorDescriptor(base, list(shape), list(strides), list(box))


def _described(w: Weight, halves: int, block_n: int, block_k: int) -> DescribedWeight:
    """The DescribedWeight of a weight with so many halves, in boxes of `block_n` rows. A box has
    rows of all halves, for e4m3 128 rows of one half, or 64 if a half ends inside a block.
    """
    E, N, K = w.data.shape
    N //= halves
    side_by_side, rows = halves, block_n // halves
    if w.scale is not None:
        side_by_side, rows = 1, 64 if halves == 2 and N % 128 else 128
    desc = _descriptor(
        *(w.data, (E, halves, N, K), (w.stride_e, N * w.stride_n, w.stride_n, w.stride_k)),
        (1, side_by_side, rows, block_k),
    )
    return DescribedWeight(desc, w.scale, w.scale_stride_e, w.scale_stride_n, w.scale_stride_k)


def gemm1(
    h: Input,
    x: Input,
    w: Weight,
    bias: Bias,
    routing: Routing,
    topk_weights: RouterWeights,  # that scale the input
    activation: Activated,
    scaling: Scaling,
    config: LayerConfig,
    gpu: Gpu,
) -> Launch:
    """h = activation(x @ w.T + bias) for pairs sorted by expert."""
    gemm, (_, N, K) = config.gemm1, w.data.shape
    gated = activation.GATED
    halves = 2 if gated and not activation.INTERLEAVED else 1
    I, block_i = (N // 2, gemm.block_n // 2) if gated else (N, gemm.block_n)
    args = Gemm1(
        h=h,
        x=x,
        w=_described(w, halves, gemm.block_n, gemm.block_k),
        bias=bias,
        index=routing.index,
        num_blocks=routing.num_blocks,
        top_k=routing.top_k,
        topk_weights=topk_weights,
        K=K,
        I=I,
        activation=activation,
        scaling=scaling,
        tile=tile_of(gemm, config.block_m, K, I, block_i),
        PDL=gpu.pdl,
    )
    grid = (routing.num_blocks * cdiv(I, block_i), 1, 1)
    return Launch(moe_ops_tma_gemm1, grid, args, gemm.num_warps)


def gemm2(
    y: Tensor,  # (S, N) fp32
    x: Input,
    S: int,
    w: Weight,
    bias: Bias,
    routing: Routing,
    scaling: Scaling,
    config: LayerConfig,
    gpu: Gpu,
) -> Launch:
    """y = x @ w.T + bias, from pairs sorted by expert to their own order."""
    gemm, (_, N, K) = config.gemm2, w.data.shape
    block_m = config.block_m // config.split_m
    desc = _descriptor(x.data, (S, K), (K, 1), (block_m, gemm.block_k))
    args = Gemm2(
        y=y,
        x=DescribedInput(desc, x.scale, x.scale_stride_g),
        w=_described(w, 1, gemm.block_n, gemm.block_k),
        bias=bias,
        index=routing.index,
        num_blocks=routing.num_blocks,
        K=K,
        N=N,
        scaling=scaling,
        tile=tile_of(gemm, block_m, K, N, gemm.block_n),
        SPLIT_M=config.split_m,
        PDL=gpu.pdl,
    )
    grid = (routing.num_blocks * config.split_m * cdiv(N, gemm.block_n), 1, 1)
    return Launch(moe_ops_tma_gemm2, grid, args, gemm.num_warps)
