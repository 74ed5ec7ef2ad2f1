"""Triton kernels of the two GEMMs for weights of 4 or 8 bits and activations that stay as they are. Imported at first
launch only.

Legend, rows and blocks as in triton_experts.py; the product and the formats in triton_packed_matmul.py. Rows of a
weight past its end are read as its last one, and what comes of them is not stored.
"""

import triton
import triton.language as tl

from moe_ops.kernels.triton_activations import activate_one, activate_two
from moe_ops.kernels.triton_experts import block_and_tile
from moe_ops.kernels.triton_packed_matmul import first_bytes, left, packed_matmul
from moe_ops.kernels.triton_routing import block_rows, pairs_at, start_dependent, wait

# Arguments that follow M or the routing tensors: no kernel is compiled anew for a value of theirs.
ROUTING = [
    *("num_blocks", "E", "num_ids", "top_k"),
    *("stride_im", "stride_ik", "stride_map", "stride_tm", "stride_tk"),
]


@triton.jit(do_not_specialize=ROUTING)
def moe_ops_packed_gemm1(
    h_ptr,  # (S, I) written at the block's positions
    h_amax_ptr,  # (1,) fp32 raised to the largest magnitude of h, or absent
    x_ptr,  # (M, K), or (E, T, K) seen as rows
    x_scale_ptr,  # fp32 of rows of x, by which their sums are multiplied, or absent
    stride_xs,  # between two of them; 0 of one for all
    w_ptr,  # (E, N, bytes of K columns)
    scale_ptr,
    zero_ptr,  # as the scales, bytes; or absent
    factor_ptr,  # fp32 of experts (global scales) or of their rows (channel scales), or absent
    bias_ptr,  # (E, N) or absent
    index_ptr,
    ids_ptr,
    map_ptr,
    num_blocks,
    E,
    num_ids,
    top_k,
    stride_im,
    stride_ik,
    stride_map,
    topk_weights_ptr,  # (M, top_k)
    stride_tm,
    stride_tk,
    K,
    I,  # noqa: E741
    stride_xe,  # what an expert's rows are off by from row * stride_xm
    stride_xm,
    stride_xk,
    stride_we,
    stride_wn,
    stride_wk,
    stride_se,
    stride_sn,
    stride_sk,
    stride_ze,
    stride_zn,
    stride_zk,
    stride_fe,
    stride_fn,
    stride_be,
    stride_bn,
    alpha,
    beta,
    limit,
    ROWS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    G: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    WN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    DK: tl.constexpr,
    S_ALIGN: tl.constexpr,
    WARPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """h = activation(x @ w13.T + bias), the activation applied while gate and up are in registers."""
    BN: tl.constexpr = WN // 2 if GATED else WN
    if ROWS != "direct":  # the kernel before this one wrote the table of blocks
        wait(DEPENDENT)
    b, n = block_and_tile(num_blocks, tl.cdiv(I, BN), GROUP)
    e, position, ok = block_rows(
        index_ptr, ids_ptr, map_ptr, b, E, num_ids, top_k, stride_im, stride_ik, stride_map,
        BM, ROWS, HAS_MAP,
    )  # fmt: skip
    if ROWS == "direct":
        wait(DEPENDENT)
    if e < 0:
        return
    pair = pairs_at(index_ptr, num_blocks, position, ok, ROWS)
    r = tl.arange(0, WN)
    if GATED:
        # A thread's accumulators hold neighbours where tokens are the left operand, elsewhere rows i and i + 8:
        # there gate and up meet without a shuffle.
        EACH: tl.constexpr = 1 if left(BM) else 8
        column = tl.minimum(n * BN + r // (2 * EACH) * EACH + r % EACH, I - 1)
        up = r // EACH % 2
        row = 2 * column + up if INTERLEAVED else column + up * I
    else:
        row = tl.minimum(n * WN + r, I - 1)
    e64 = e.to(tl.int64)
    token = (pair // top_k).to(tl.int64)
    x_ptrs = x_ptr + e64 * stride_xe + token[:, None] * stride_xm
    x_ptrs += tl.arange(0, DK).to(tl.int64)[None, :] * stride_xk
    w_ptrs = (
        w_ptr.to(tl.pointer_type(tl.uint8))
        + e64 * stride_we
        + row.to(tl.int64)[:, None] * stride_wn
    )
    w_ptrs += first_bytes(DK, FORMAT).to(tl.int64)[None, :] * stride_wk
    acc = packed_matmul(
        x_ptrs, w_ptrs, ok, K, stride_xk, stride_wk,
        scale_ptr, stride_se, stride_sn, stride_sk,
        zero_ptr, stride_ze, stride_zn, stride_zk, factor_ptr, stride_fe, stride_fn, e64, row,
        BM, WN, BK, DK, EVEN_K, STAGES, FORMAT, SCALE, G, S_ALIGN, WARPS,
    )  # fmt: skip
    start_dependent(DEPENDENT)
    if x_scale_ptr is not None:
        acc *= tl.load(x_scale_ptr + token * stride_xs, mask=ok, other=0.0)[:, None]
    if WEIGHT_ON_INPUT:
        factor_ptrs = topk_weights_ptr + token * stride_tm + (pair % top_k) * stride_tk
        acc *= tl.load(factor_ptrs, mask=ok, other=0.0).to(tl.float32)[:, None]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + e64 * stride_be + row * stride_bn)
        acc += bias.to(tl.float32)[None, :]
    if GATED:
        g, u = acc.reshape(BM, BN // EACH, 2, EACH).permute(0, 1, 3, 2).split()
        g = g.reshape(BM, BN)
        u = u.reshape(BM, BN)
        h = activate_two(g, u, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        h = activate_one(acc, ACTIVATION)
    if (
        h_amax_ptr is not None
    ):  # bits of floats that are not negative are ordered as the floats are
        amax = tl.where(ok[:, None] & (h == h), tl.abs(h), 0.0)  # NaN stays in its row
        largest = tl.max(tl.max(amax, 0), 0).to(tl.int32, bitcast=True)
        tl.atomic_max(h_amax_ptr.to(tl.pointer_type(tl.int32)), largest, sem="relaxed")
    column = n * BN + tl.arange(0, BN)
    h_ptrs = h_ptr + position.to(tl.int64)[:, None] * I + column[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=ok[:, None] & (column < I)[None, :])


@triton.jit(do_not_specialize=ROUTING)
def moe_ops_packed_gemm2(
    y_ptr,  # (S, N) written at the pairs, or where rows are plain at the block's positions
    x_ptr,  # (S, K) read at the block's positions
    x_scale_ptr,  # as in GEMM1
    stride_xs,
    w_ptr,  # (E, N, bytes of K columns)
    scale_ptr,
    zero_ptr,
    factor_ptr,
    bias_ptr,  # (E, N) or absent
    index_ptr,
    ids_ptr,
    map_ptr,
    num_blocks,
    E,
    num_ids,
    top_k,
    stride_im,
    stride_ik,
    stride_map,
    K,
    N,
    stride_xm,
    stride_xk,
    stride_we,
    stride_wn,
    stride_wk,
    stride_se,
    stride_sn,
    stride_sk,
    stride_ze,
    stride_zn,
    stride_zk,
    stride_fe,
    stride_fn,
    stride_be,
    stride_bn,
    stride_ye,  # what an expert's rows are off by from row * stride_ym
    stride_ym,
    stride_yn,
    ROWS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    G: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    WN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    DK: tl.constexpr,
    S_ALIGN: tl.constexpr,
    WARPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y = x @ w.T + bias, rounded once, to y's dtype. Also the GEMM of grouped_linear."""
    if ZERO_TAIL:  # the kernel before this one wrote the table of blocks
        wait(DEPENDENT)
    b, n = block_and_tile(num_blocks, tl.cdiv(N, WN), GROUP)
    e, position, ok = block_rows(
        index_ptr, ids_ptr, map_ptr, b, E, num_ids, top_k, stride_im, stride_ik, stride_map,
        BM, ROWS, HAS_MAP,
    )  # fmt: skip
    if not ZERO_TAIL:
        wait(DEPENDENT)
    if e < 0:
        return
    column = n * WN + tl.arange(0, WN)
    row = tl.minimum(column, N - 1)
    here = e
    if ZERO_TAIL:  # rows that belong to no expert: a sum of nothing, without bias
        K = tl.where(e < E, K, 0)
        here = tl.minimum(e, E - 1)  # whatever is read by them is not used
    e64 = here.to(tl.int64)
    x_ptrs = x_ptr + position.to(tl.int64)[:, None] * stride_xm
    x_ptrs += tl.arange(0, DK).to(tl.int64)[None, :] * stride_xk
    w_ptrs = (
        w_ptr.to(tl.pointer_type(tl.uint8))
        + e64 * stride_we
        + row.to(tl.int64)[:, None] * stride_wn
    )
    w_ptrs += first_bytes(DK, FORMAT).to(tl.int64)[None, :] * stride_wk
    acc = packed_matmul(
        x_ptrs, w_ptrs, ok, K, stride_xk, stride_wk,
        scale_ptr, stride_se, stride_sn, stride_sk,
        zero_ptr, stride_ze, stride_zn, stride_zk, factor_ptr, stride_fe, stride_fn, e64, row,
        BM, WN, BK, DK, EVEN_K, STAGES, FORMAT, SCALE, G, S_ALIGN, WARPS,
    )  # fmt: skip
    start_dependent(DEPENDENT)
    if x_scale_ptr is not None:
        x_scales = x_scale_ptr + position.to(tl.int64) * stride_xs
        acc *= tl.load(x_scales, mask=ok, other=0.0)[:, None]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + e64 * stride_be + row * stride_bn)
        acc += bias.to(tl.float32)[None, :]
    if ZERO_TAIL:
        acc = tl.where(e < E, acc, 0.0)
    pair = pairs_at(index_ptr, num_blocks, position, ok, ROWS)  # late: not held through the loop
    y_ptrs = y_ptr + e64 * stride_ye + pair.to(tl.int64)[:, None] * stride_ym
    y_ptrs += column.to(tl.int64)[None, :] * stride_yn
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=ok[:, None] & (column < N)[None, :])
