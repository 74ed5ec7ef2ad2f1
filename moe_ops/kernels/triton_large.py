"""Triton kernels of the two GEMMs for many rows an expert, on GPUs whose shared memory a copy engine fills (SM90 on).
Imported at first launch only.

Legend as in triton_experts.py. Here tokens are the left operand (`x (BM, BK) @ w.T (BK, WN)`), so that a tensor core
takes 256 rows of the weight at once; weights and h come through tensor descriptors, which read zeros past an end.

A weight is described as (E, parts, rows, K): gate and up are two parts that one box holds side by side, other
weights are one part. e4m3 weights have scales by blocks of 128 x 128, their x and h by groups of 128 columns.
"""

import triton
import triton.language as tl

from moe_ops.kernels.triton_activations import activate_one, activate_two
from moe_ops.kernels.triton_experts import block_and_tile
from moe_ops.kernels.triton_fp8 import (
    decode,
    decode_activation,
    e4m3_scale,
    quotient,
    reciprocal,
    stored,
)
from moe_ops.kernels.triton_routing import pairs_at, start_dependent, wait

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
COUNTS = ["num_blocks", "top_k", "stride_tm", "stride_tk", "stride_xg", "stride_hg"]


@triton.jit
def block_at(index_ptr, b, BM: tl.constexpr, PARTS: tl.constexpr):
    """(expert, first position, positions (BM,), their validity (BM,)) of part b % PARTS of block b // PARTS."""
    slot = index_ptr + b // PARTS * 4
    first = tl.load(slot + 1) + b % PARTS * BM
    position = first + tl.arange(0, BM)
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
    x,  # pointers (BM, BK) where rows are gathered, else a descriptor of (S, K)
    x_ok,  # (BM,)
    w,  # descriptor, box [1, parts, WN // parts, BK]
    first,
    e,
    row,
    K,
    stride_xk,
    GATHERED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    WN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x @ w.T (BM, WN) in fp32, of one block and one tile."""
    acc = tl.zeros((BM, WN), tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        if GATHERED:
            if EVEN_K:
                xt = tl.load(x, mask=x_ok[:, None], other=0.0)
            else:
                k_ok = k + tl.arange(0, BK) < K
                xt = tl.load(x, mask=x_ok[:, None] & k_ok[None, :], other=0.0)
            x += BK * stride_xk
        else:
            xt = x.load([first, k])
        acc = dot(xt, w.load([e, 0, row, k]).reshape(WN, BK), acc, True)
    return acc


@triton.jit
def matmul_blocks(
    x,  # as above, BK = 128; every pointer is valid
    x_ok,  # (BM,) rows that have scales
    x_scale_ptrs,  # (BM,) scales of the first group
    stride_xg,
    w,  # descriptor, box [1, 1, 128, 128]
    w_scale_ptr,  # of this expert
    stride_sn,
    stride_sk,
    first,
    e,
    row,
    K,
    N,  # rows of a part
    stride_xk,
    GATHERED: tl.constexpr,
    SPLIT: tl.constexpr,
    NATIVE: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x @ w.T (BM, 128) in fp32 of e4m3 operands, with 128 rows from `row` of one part, and where there are two
    (SPLIT) of the other.

    The sum of 128 columns leaves the tensor core, which adds in fewer than fp32's bits, before it is scaled and
    added to the total. One part after the other, as such sums of both would not fit the registers.
    """
    s0_ptr = w_scale_ptr + row // 128 * stride_sn
    s1_ptr = s0_ptr + N // 128 * stride_sn
    acc0 = tl.zeros((BM, 128), tl.float32)
    acc1 = acc0
    zeros = acc0
    xs = tl.load(x_scale_ptrs, mask=x_ok, other=0.0)
    s0 = tl.load(s0_ptr).to(tl.float32)
    if SPLIT:
        s1 = tl.load(s1_ptr).to(tl.float32)
    for k in tl.range(0, K, 128, num_stages=STAGES):
        if GATHERED:
            xt = tl.load(x)
            x += 128 * stride_xk
        else:
            xt = x.load([first, k])
        w0 = w.load([e, 0, row, k]).reshape(128, 128)
        if SPLIT:
            w1 = w.load([e, 1, row, k]).reshape(128, 128)
        more = k + 128 < K  # the scales of the next step are asked for one step early
        x_scale_ptrs += tl.where(more, stride_xg, 0)
        next_xs = tl.load(x_scale_ptrs, mask=x_ok, other=0.0)
        s0_ptr += tl.where(more, stride_sk, 0)
        next_s0 = tl.load(s0_ptr).to(tl.float32)
        acc0 += dot(xt, w0, zeros, NATIVE) * (xs * s0)[:, None]
        s0 = next_s0
        if SPLIT:
            s1_ptr += tl.where(more, stride_sk, 0)
            next_s1 = tl.load(s1_ptr).to(tl.float32)
            acc1 += dot(xt, w1, zeros, NATIVE) * (xs * s1)[:, None]
            s1 = next_s1
        xs = next_xs
    return acc0, acc1


@triton.jit
def gemm1_rows(
    b,
    n,
    h_ptr,
    h_scale_ptr,
    stride_hg,
    x_ptr,
    x_scale_ptr,
    stride_xg,
    w,
    w_scale_ptr,
    stride_se,
    stride_sn,
    stride_sk,
    bias_ptr,
    stride_be,
    stride_bn,
    index_ptr,
    num_blocks,
    top_k,
    topk_weights_ptr,
    stride_tm,
    stride_tk,
    K,
    I,
    stride_xm,
    stride_xk,
    alpha,
    beta,
    limit,
    HAS_BIAS: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    WN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """moe_ops_large_gemm1 of tile n of the first BM rows of block b, which has no more."""
    BN: tl.constexpr = WN // 2 if GATED else WN
    SPLIT: tl.constexpr = GATED and not INTERLEAVED
    e, first, position, ok = block_at(index_ptr, b, BM, 1)
    pair = pairs_at(index_ptr, num_blocks, position, ok, "sorted")
    token = pair // top_k
    row = token
    if QUANTIZED:  # for a mask of x no registers are left: 15 % at mixtral's sizes. Instead, rows are repeated; one
        # row for all would be asked for by all programs at once
        again = first + (position - first) % tl.maximum(tl.sum(ok.to(tl.int32), 0), 1)
        row = tl.load(index_ptr + 4 * num_blocks + again) // top_k
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * stride_xm
    x_ptrs += tl.arange(0, BK).to(tl.int64)[None, :] * stride_xk
    e64 = e.to(tl.int64)
    column = n * BN + tl.arange(0, BN)
    if QUANTIZED:
        tl.static_assert(BN == 128 and BK == 128 and EVEN_K and (SPLIT or not GATED))
        g, u = matmul_blocks(
            x_ptrs, ok, x_scale_ptr + token, stride_xg,
            w, w_scale_ptr + e64 * stride_se, stride_sn, stride_sk,
            first, e, n * BN, K, I, stride_xk, True, SPLIT, NATIVE, BM, STAGES,
        )  # fmt: skip
    else:
        acc = matmul_plain(
            x_ptrs, ok, w, first, e, n * (BN if SPLIT else WN), K, stride_xk,
            True, EVEN_K, BM, WN, BK, STAGES,
        )  # fmt: skip
        if SPLIT:
            g, u = acc.reshape(BM, 2, BN).permute(0, 2, 1).split()
        elif GATED:
            g, u = acc.reshape(BM, BN, 2).split()
        else:
            g = acc
            u = acc
    start_dependent(DEPENDENT)
    if WEIGHT_ON_INPUT:
        factor_ptrs = (
            topk_weights_ptr + token.to(tl.int64) * stride_tm + (pair % top_k) * stride_tk
        )
        factor = tl.load(factor_ptrs, mask=ok, other=0.0).to(tl.float32)
        g *= factor[:, None]
        u *= factor[:, None]
    if HAS_BIAS:
        bias_ptrs = bias_ptr + e64 * stride_be + column * (stride_bn * (2 if INTERLEAVED else 1))
        g += tl.load(bias_ptrs, mask=column < I, other=0.0).to(tl.float32)[None, :]
        if GATED:
            bias_ptrs += stride_bn * (1 if INTERLEAVED else I)
            u += tl.load(bias_ptrs, mask=column < I, other=0.0).to(tl.float32)[None, :]
    if GATED:
        h = activate_two(g, u, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        h = activate_one(g, ACTIVATION)
    if QUANTIZED:
        scale = e4m3_scale(tl.max(tl.abs(h), 1))
        tl.store(h_scale_ptr + n.to(tl.int64) * stride_hg + position, scale, mask=ok)
        h = stored(quotient(h, scale[:, None], reciprocal(scale)[:, None]), NATIVE)
    else:
        h = h.to(h_ptr.dtype.element_ty)
    h_ptrs = h_ptr + position.to(tl.int64)[:, None] * I + column[None, :]
    tl.store(h_ptrs, h, mask=ok[:, None] & (column < I)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def moe_ops_large_gemm1(
    h_ptr,  # (S, I) written at the block's positions
    h_scale_ptr,  # (ceil(I / 128), S) written, absent where h is not quantized
    stride_hg,
    x_ptr,  # (M, K)
    x_scale_ptr,  # (ceil(K / 128), M), absent where x is not quantized
    stride_xg,
    w,  # descriptor
    w_scale_ptr,
    stride_se,
    stride_sn,
    stride_sk,
    bias_ptr,  # (E, N) or absent
    stride_be,
    stride_bn,
    index_ptr,
    num_blocks,
    top_k,
    topk_weights_ptr,  # (M, top_k), absent unless the input is weighted
    stride_tm,
    stride_tk,
    K,
    I,  # noqa: E741
    stride_xm,
    stride_xk,
    alpha,
    beta,
    limit,
    HAS_BIAS: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    WN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """h = activation(x @ w13.T + bias), by groups of 128 columns in e4m3 where the weight is.

    Of a block of 128 rows that has at most 64 the other half is not multiplied: one block then holds all rows of an expert,
    which reads its weights once, also where most have few.
    """
    HALF: tl.constexpr = BM // 2 if BM == 128 else BM
    wait(DEPENDENT)
    b, n = block_and_tile(num_blocks, tl.cdiv(I, WN // 2 if GATED else WN), GROUP)
    slot = index_ptr + b * 4
    if tl.load(slot) < 0:
        return
    if tl.minimum(tl.load(slot + 2) - tl.load(slot + 1), BM) <= HALF:
        gemm1_rows(
            b, n, h_ptr, h_scale_ptr, stride_hg, x_ptr, x_scale_ptr, stride_xg, w,
            w_scale_ptr, stride_se, stride_sn, stride_sk, bias_ptr, stride_be, stride_bn,
            index_ptr, num_blocks, top_k, topk_weights_ptr, stride_tm, stride_tk, K, I,
            stride_xm, stride_xk, alpha, beta, limit, HAS_BIAS, WEIGHT_ON_INPUT, ACTIVATION,
            GATED, INTERLEAVED, HAS_LIMIT, QUANTIZED, NATIVE, EVEN_K, HALF, WN, BK, STAGES,
            DEPENDENT,
        )  # fmt: skip
    elif HALF < BM:
        gemm1_rows(
            b, n, h_ptr, h_scale_ptr, stride_hg, x_ptr, x_scale_ptr, stride_xg, w,
            w_scale_ptr, stride_se, stride_sn, stride_sk, bias_ptr, stride_be, stride_bn,
            index_ptr, num_blocks, top_k, topk_weights_ptr, stride_tm, stride_tk, K, I,
            stride_xm, stride_xk, alpha, beta, limit, HAS_BIAS, WEIGHT_ON_INPUT, ACTIVATION,
            GATED, INTERLEAVED, HAS_LIMIT, QUANTIZED, NATIVE, EVEN_K, BM, WN, BK, STAGES,
            DEPENDENT,
        )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def moe_ops_large_gemm2(
    y_ptr,  # (S, N) contiguous, written at the pairs
    x,  # descriptor of (S, K), read at the block's positions
    x_scale_ptr,  # (ceil(K / 128), S), absent where x is not quantized
    stride_xg,
    w,  # descriptor
    w_scale_ptr,
    stride_se,
    stride_sn,
    stride_sk,
    bias_ptr,  # (E, N) or absent
    stride_be,
    stride_bn,
    index_ptr,
    num_blocks,
    K,
    N,
    HAS_BIAS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    NATIVE: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    WN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,  # programs that share the rows of a block
    DEPENDENT: tl.constexpr,
):
    """y = x @ w.T + bias in fp32."""
    wait(DEPENDENT)
    b, n = block_and_tile(num_blocks * PARTS, tl.cdiv(N, WN), GROUP)
    e, first, position, ok = block_at(index_ptr, b, BM, PARTS)
    if e < 0 or tl.max(ok.to(tl.int32), 0) == 0:
        return
    e64 = e.to(tl.int64)
    if QUANTIZED:
        tl.static_assert(WN == 128 and BK == 128)
        acc, _ = matmul_blocks(
            x, ok, x_scale_ptr + position, stride_xg,
            w, w_scale_ptr + e64 * stride_se, stride_sn, stride_sk,
            first, e, n * WN, K, N, 1, False, False, NATIVE, BM, STAGES,
        )  # fmt: skip
    else:
        acc = matmul_plain(x, ok, w, first, e, n * WN, K, 1, False, True, BM, WN, BK, STAGES)
    start_dependent(DEPENDENT)
    column = n * WN + tl.arange(0, WN)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + e64 * stride_be + column * stride_bn
        acc += tl.load(bias_ptrs, mask=column < N, other=0.0).to(tl.float32)[None, :]
    pair = pairs_at(index_ptr, num_blocks, position, ok, "sorted")
    y_ptrs = y_ptr + pair.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(y_ptrs, acc, mask=ok[:, None] & (column < N)[None, :])
