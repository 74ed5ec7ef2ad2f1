"""Triton kernels of the expert layer: two grouped GEMMs and the weighted sum of their rows. Imported at first launch only.

Legend: S pairs sorted by expert, E local experts, K columns of the GEMM's input and weight, N its output
columns (GEMM1: I = N, its weight has WN rows a tile that give BN columns, WN = 2 BN where gated),
BM rows (tokens) a block, BN output columns a tile, BK the step along K.

A program handles one block (kernels/triton_routing.py) and one tile of columns. Rows reach it by
    ROWS = "sorted": position p of `order` is a pair; tokens are gathered, pairs scattered
    ROWS = "direct": block b is pair b, its expert is read from the ids; no routing kernel ran
    ROWS = "plain":  the rows of input and output are sorted by expert themselves
"""

import triton
import triton.language as tl

from moe_ops.kernels.triton_activations import activate_one, activate_two
from moe_ops.kernels.triton_fp8 import (
    clamp,
    e4m3_scale,
    largest_magnitude,
    quotient,
    reciprocal,
    stored,
)
from moe_ops.kernels.triton_matmul import matmul
from moe_ops.kernels.triton_routing import (
    block_rows,
    local_expert,
    pairs_at,
    start_dependent,
    wait,
)

# Arguments that follow M or the routing tensors: no kernel is compiled anew for a value of theirs.
ROUTING = [
    *("num_blocks", "E", "num_ids", "top_k"),
    *("stride_im", "stride_ik", "stride_map", "stride_tm", "stride_tk", "stride_xg", "stride_hg"),
]


@triton.jit
def block_and_tile(num_blocks, num_tiles, GROUP: tl.constexpr):
    """Block and column tile of this program: GROUP blocks share a weight tile while it is in L2."""
    pid = tl.program_id(0)
    first = pid // (GROUP * num_tiles) * GROUP
    size = tl.minimum(num_blocks - first, GROUP)
    local = pid % (GROUP * num_tiles)
    return first + local % size, local // size


@triton.jit(do_not_specialize=ROUTING)
def moe_ops_gemm1(
    h_ptr,  # (S, I) written at the block's positions
    h_scale_ptr,  # by H_SCALE: see below
    stride_hg,
    x_ptr,  # (M, K), or (E, T, K) seen as rows
    x_scale_ptr,  # scales of x, absent where it is quantized here by group or not at all
    w_ptr,  # (E, N, K)
    w_scale_ptr,  # scales of w, absent where it is plain
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
    stride_xg,
    stride_se,
    stride_sn,
    stride_sk,
    stride_be,
    stride_bn,
    alpha,
    beta,
    limit,
    ROWS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    W_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    H_SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    WN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """h = activation(x @ w13.T + bias), the activation applied while gate and up are in registers.

    H_SCALE ""       h as it is, in h_ptr's dtype
            "group"  h in e4m3, h_scale (ceil(I / 128), S) its scales; BN is 128
            "static" h in e4m3 or int8 as the weights are, h_scale (1,) its known scale
            "row"    h as it is, and the largest magnitude of each row into h_scale (S,), zeros before
            "tensor" h as it is, and the largest magnitude of all into h_scale (1,), zero before
    """
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
    if GATED and not INTERLEAVED:
        # Eight gate rows, then their eight up rows: a thread's accumulators hold rows i and i + 8, so gate
        # and up meet without a shuffle.
        column = n * BN + r // 16 * 8 + r % 8
        row = column + r // 8 % 2 * I
        w_ok = column < I
    else:
        row = n * WN + r
        w_ok = row < (2 * I if GATED else I)
    INT8: tl.constexpr = w_ptr.dtype.element_ty == tl.int8
    HALVES: tl.constexpr = GATED and not INTERLEAVED
    # Blocks of 128 weight rows in a tile: those of each half, one more where up rows begin inside a block
    BLOCKS: tl.constexpr = (2 if EVEN_N else 3) if HALVES else (WN + 127) // 128
    last_block = tl.cdiv(2 * I if GATED else I, 128) - 1
    block0 = n * (BN if HALVES else WN) // 128
    block1 = tl.minimum((I + n * BN) // 128 if HALVES else block0 + 1, last_block)
    block2 = tl.minimum(block1 + 1, last_block)
    e64 = e.to(tl.int64)
    k = tl.arange(0, BK)
    x_ptrs = (
        x_ptr
        + e64 * stride_xe
        + (pair // top_k).to(tl.int64)[:, None] * stride_xm
        + k.to(tl.int64)[None, :] * stride_xk
    )
    w_ptrs = (
        w_ptr
        + e64 * stride_we
        + row.to(tl.int64)[:, None] * stride_wn
        + k.to(tl.int64)[None, :] * stride_wk
    )
    factor = None
    if WEIGHT_ON_INPUT:
        token = (pair // top_k).to(tl.int64)
        factor_ptrs = topk_weights_ptr + token * stride_tm + (pair % top_k) * stride_tk
        factor = tl.load(factor_ptrs, mask=ok, other=0.0).to(tl.float32)
    acc = matmul(
        x_ptrs, w_ptrs, ok, w_ok, K, stride_xk, stride_wk,
        x_scale_ptr, stride_xg, pair // top_k, factor,
        w_scale_ptr if W_SCALE == "" else w_scale_ptr + e64 * stride_se,
        stride_sn, stride_sk, row, block0, block1, block2,
        BM, WN, BK, EVEN_K, EVEN_N, STAGES,
        W_SCALE, X_SCALE, PARTS, BLOCKS, WEIGHT_ON_INPUT, NATIVE,
    )  # fmt: skip
    start_dependent(DEPENDENT)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + e64 * stride_be + row * stride_bn, mask=w_ok, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    if GATED:
        if INTERLEAVED:
            g, u = acc.reshape(BN, 2, BM).permute(0, 2, 1).split()
        else:
            g, u = acc.reshape(BN // 8, 2, 8, BM).permute(0, 2, 3, 1).split()
            g = g.reshape(BN, BM)
            u = u.reshape(BN, BM)
        h = activate_two(g, u, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        h = activate_one(acc, ACTIVATION)
    column = n * BN + tl.arange(0, BN)
    place = position.to(tl.int64)
    h_ptrs = h_ptr + place[:, None] * I + column[None, :]
    h_ok = ok[:, None] & (column < I)[None, :]
    if H_SCALE == "row" or H_SCALE == "tensor":
        amax = tl.where(ok, largest_magnitude(h, 0) if INT8 else tl.max(tl.abs(h), 0), 0.0)
        # Bits of floats that are not negative are ordered as the floats are; no order of maxima changes the last.
        slot = h_scale_ptr.to(tl.pointer_type(tl.int32))
        if H_SCALE == "row":
            tl.atomic_max(slot + place, amax.to(tl.int32, bitcast=True), mask=ok, sem="relaxed")
        else:
            amax = tl.where(amax == amax, amax, 0.0)  # NaN stays in its row
            tl.atomic_max(slot, tl.max(amax, 0).to(tl.int32, bitcast=True), sem="relaxed")
    if H_SCALE == "group":
        tl.static_assert(BN == 128)
        scale = e4m3_scale(tl.max(tl.abs(h), 0))
        tl.store(h_scale_ptr + n.to(tl.int64) * stride_hg + position, scale, mask=ok)
        h = stored(quotient(h, scale[None, :], reciprocal(scale)[None, :]), NATIVE)
    elif H_SCALE == "static":
        scale = tl.load(h_scale_ptr).to(tl.float32)
        h = clamp(h, (130.0 if INT8 else 448.0) * scale)
        h = stored(quotient(h, scale, reciprocal(scale)), NATIVE, INT8)
    else:
        h = h.to(h_ptr.dtype.element_ty)
    tl.store(h_ptrs, h.T, mask=h_ok)


@triton.jit(do_not_specialize=ROUTING)
def moe_ops_gemm2(
    y_ptr,  # (S, N) written at the pairs, or where rows are plain at the block's positions
    x_ptr,  # (S, K) read at the block's positions
    x_scale_ptr,  # as in GEMM1
    w_ptr,  # (E, N, K)
    w_scale_ptr,
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
    stride_xg,
    stride_se,
    stride_sn,
    stride_sk,
    stride_be,
    stride_bn,
    stride_ye,  # what an expert's rows are off by from row * stride_ym
    stride_ym,
    stride_yn,
    ROWS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    W_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    WN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
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
    row = n * WN + tl.arange(0, WN)
    w_ok = row < N
    if ZERO_TAIL:  # rows that belong to no expert: a sum of nothing, without bias
        K = tl.where(e < E, K, 0)
    e64 = e.to(tl.int64)
    k = tl.arange(0, BK)
    x_ptrs = (
        x_ptr + position.to(tl.int64)[:, None] * stride_xm + k.to(tl.int64)[None, :] * stride_xk
    )
    w_ptrs = (
        w_ptr
        + e64 * stride_we
        + row.to(tl.int64)[:, None] * stride_wn
        + k.to(tl.int64)[None, :] * stride_wk
    )
    block0 = n * WN // 128
    block1 = tl.minimum(block0 + 1, tl.cdiv(N, 128) - 1)
    if W_SCALE != "":  # the zeroed tail has no scales: any will do
        w_scale_ptr += (tl.minimum(e, E - 1) if ZERO_TAIL else e).to(tl.int64) * stride_se
    acc = matmul(
        x_ptrs, w_ptrs, ok, w_ok, K, stride_xk, stride_wk,
        x_scale_ptr, stride_xg, position, None,
        w_scale_ptr, stride_sn, stride_sk, row, block0, block1, block1,
        BM, WN, BK, EVEN_K, EVEN_N, STAGES,
        W_SCALE, X_SCALE, PARTS, (WN + 127) // 128, False, NATIVE,
    )  # fmt: skip
    start_dependent(DEPENDENT)
    if ZERO_TAIL:  # a scale that is not finite would make NaN of the tail's zeros
        acc = tl.where(e < E, acc, 0.0)
    if HAS_BIAS:
        bias_ok = w_ok
        if ZERO_TAIL:
            bias_ok = row < tl.where(e < E, N, 0)
        bias = tl.load(bias_ptr + e64 * stride_be + row * stride_bn, mask=bias_ok, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    pair = pairs_at(index_ptr, num_blocks, position, ok, ROWS)  # late: not held through the loop
    y_ptrs = (
        y_ptr
        + e64 * stride_ye
        + pair.to(tl.int64)[:, None] * stride_ym
        + row.to(tl.int64)[None, :] * stride_yn
    )
    tl.store(y_ptrs, acc.T.to(y_ptr.dtype.element_ty), mask=ok[:, None] & w_ok[None, :])


@triton.jit(do_not_specialize=ROUTING)
def moe_ops_combine(
    out_ptr,  # (M, K) written
    y_ptr,  # (PARTS, M * TOP_K, K) fp32, to be summed; rows of pairs that are not here were never written
    topk_weights_ptr,  # (M, TOP_K)
    ids_ptr,
    map_ptr,
    E,
    num_ids,
    K,
    stride_im,
    stride_ik,
    stride_map,
    stride_tm,
    stride_tk,
    stride_om,
    stride_ok,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out[m] = sum of router weight * y over the token's entries, in their order, rounded once."""
    m = tl.program_id(0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    ends = ()  # of a token's rows of y: 0 of a pair that is not here
    scales = ()
    for j in tl.static_range(
        TOP_K
    ):  # before the wait: nothing here is written by the kernel before
        pair = m * TOP_K + j
        e = local_expert(
            ids_ptr, map_ptr, pair, pair >= 0, E, num_ids, TOP_K,
            stride_im, stride_ik, stride_map, HAS_MAP,
        )  # fmt: skip
        ends += (tl.where(e >= 0, K, 0),)
        if WEIGHTED:
            weight_ptr = topk_weights_ptr + m.to(tl.int64) * stride_tm + j * stride_tk
            scales += (tl.load(weight_ptr, mask=e >= 0, other=0.0).to(tl.float32),)
    wait(DEPENDENT)
    total = tl.zeros((BN,), tl.float32)
    for j in tl.static_range(TOP_K):
        ok = column < ends[j]
        y_ptrs = y_ptr + (m * TOP_K + j).to(tl.int64) * K + column
        y = tl.load(y_ptrs, mask=ok, other=0.0)
        for _ in tl.static_range(1, PARTS):
            y_ptrs += tl.num_programs(0).to(tl.int64) * TOP_K * K
            y += tl.load(y_ptrs, mask=ok, other=0.0)
        if WEIGHTED:
            y *= scales[j]
        total += y
    out_ptrs = out_ptr + m.to(tl.int64) * stride_om + column.to(tl.int64) * stride_ok
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=column < K)
