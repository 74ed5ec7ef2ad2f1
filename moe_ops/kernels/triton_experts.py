"""Triton kernels of the expert layer: two grouped GEMMs and the weighted sum of their rows. Imported at first launch only.

Legend: S pairs sorted by expert, E local experts, K columns of the GEMM's input and weight, N its output
columns (GEMM1: I = N, its weight has WN rows a tile that give BN columns, WN = 2 BN where gated),
BM rows (tokens) a block, BN output columns a tile, BK the step along K.

Weights are the left operand (`w (WN, BK) @ x.T (BK, BM)`), so that 16 tokens fill a tensor-core tile.
A program handles one block (kernels/triton_routing.py) and one tile of columns. Rows reach it by
    ROWS = "sorted": position p of `order` is a pair; tokens are gathered, pairs scattered
    ROWS = "direct": block b is pair b, its expert is read from the ids; no routing kernel ran
    ROWS = "plain":  the rows of input and output are sorted by expert themselves
"""

import triton
import triton.language as tl

from moe_ops.kernels.triton_routing import local_expert

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
# Arguments that follow M or the routing tensors: no kernel is compiled anew for a value of theirs.
ROUTING = [
    *("num_blocks", "E", "num_ids", "top_k"),
    *("stride_im", "stride_ik", "stride_map", "stride_tm", "stride_tk"),
]


@triton.jit
def block_and_tile(num_blocks, num_tiles, GROUP: tl.constexpr):
    """Block and column tile of this program: GROUP blocks share a weight tile while it is in L2."""
    pid = tl.program_id(0)
    first = pid // (GROUP * num_tiles) * GROUP
    size = tl.minimum(num_blocks - first, GROUP)
    local = pid % (GROUP * num_tiles)
    return first + local % size, local // size


@triton.jit
def block_rows(
    index_ptr,
    ids_ptr,
    map_ptr,
    b,
    E,
    num_ids,
    top_k,
    stride_im,
    stride_ik,
    stride_map,
    BM: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """(expert, positions (BM,), their validity (BM,)) of block b; the expert is -1 where b is unused."""
    lane = tl.arange(0, BM)
    if ROWS == "direct":
        e = local_expert(
            ids_ptr, map_ptr, b, b >= 0, E, num_ids, top_k,
            stride_im, stride_ik, stride_map, HAS_MAP,
        )  # fmt: skip
        return e, b + lane, lane < 1
    else:
        slot = index_ptr + 4 * b
        position = tl.load(slot + 1) + lane
        return tl.load(slot), position, position < tl.load(slot + 2)


@triton.jit
def pairs_at(index_ptr, num_blocks, position, ok, ROWS: tl.constexpr):
    """The pair at each position; the position itself where rows are not sorted by us."""
    if ROWS == "sorted":
        return tl.load(index_ptr + 4 * num_blocks + position, mask=ok, other=0)
    else:
        return position


@triton.jit
def matmul(
    x_ptrs,  # (BM, BK)
    w_ptrs,  # (WN, BK)
    x_ok,  # (BM,)
    w_ok,  # (WN,)
    K,
    stride_xk,
    stride_wk,
    BM: tl.constexpr,
    WN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """w @ x.T, (WN, BM) in fp32. Both operands are masked along K: zero times garbage may be NaN."""
    k = tl.arange(0, BK)
    acc = tl.zeros((WN, BM), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        x_mask = x_ok[:, None]
        if not EVEN_K:
            x_mask = x_mask & (start + k < K)[None, :]
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        if EVEN_N and EVEN_K:
            w = tl.load(w_ptrs)
        elif EVEN_K:
            w = tl.load(w_ptrs, mask=w_ok[:, None], other=0.0)
        elif EVEN_N:
            w = tl.load(w_ptrs, mask=(start + k < K)[None, :], other=0.0)
        else:
            w = tl.load(w_ptrs, mask=w_ok[:, None] & (start + k < K)[None, :], other=0.0)
        if INTERPRET:  # the interpreter's 16-bit products are wrong
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
        x_ptrs += BK * stride_xk
        w_ptrs += BK * stride_wk
    return acc


@triton.jit
def above(x, limit):
    """min(x, limit) that keeps NaN."""
    return tl.where(x > limit, limit, x)


@triton.jit
def clamp(x, limit):
    """x within [-limit, limit]; keeps NaN."""
    return tl.where(x < -limit, -limit, above(x, limit))


@triton.jit
def activate_one(x, ACTIVATION: tl.constexpr):
    """The function of one variable in an activation, fp32."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACTIVATION == "relu2")
        y = tl.where(x < 0.0, 0.0, x)
        return y * y


@triton.jit
def activate_two(g, u, alpha, beta, limit, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """A gated activation of gate g and up u, fp32 (formulas: moe_ops.activations.Activation)."""
    if ACTIVATION == "swiglustep":
        return above(activate_one(g, "silu"), limit) * clamp(u, limit)
    elif ACTIVATION == "gelu" or ACTIVATION == "gelu_tanh":
        return activate_one(g, ACTIVATION) * u
    else:
        if HAS_LIMIT:
            g = above(g, limit)
            u = clamp(u, limit)
        if ACTIVATION == "silu":
            return activate_one(g, "silu") * u
        else:
            tl.static_assert(ACTIVATION == "swigluoai")
            return g * tl.sigmoid(alpha * g) * (u + beta)


@triton.jit(do_not_specialize=ROUTING)
def moe_ops_gemm1(
    h_ptr,  # (S, I) written at the block's positions
    x_ptr,  # (M, K), or (E, T, K) seen as rows
    w_ptr,  # (E, N, K)
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
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    WN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """h = activation(x @ w13.T + bias), the activation applied while gate and up are in registers."""
    BN: tl.constexpr = WN // 2 if GATED else WN
    b, n = block_and_tile(num_blocks, tl.cdiv(I, BN), GROUP)
    e, position, ok = block_rows(
        index_ptr, ids_ptr, map_ptr, b, E, num_ids, top_k, stride_im, stride_ik, stride_map,
        BM, ROWS, HAS_MAP,
    )  # fmt: skip
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
    acc = matmul(
        x_ptrs, w_ptrs, ok, w_ok, K, stride_xk, stride_wk, BM, WN, BK, EVEN_K, EVEN_N, STAGES
    )
    if WEIGHT_ON_INPUT:  # linear: scaling the product in fp32 is scaling the input, unrounded
        token = (pair // top_k).to(tl.int64)
        scale = tl.load(
            topk_weights_ptr + token * stride_tm + (pair % top_k) * stride_tk, mask=ok, other=0.0
        )
        acc *= scale.to(tl.float32)[None, :]
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
    h_ptrs = h_ptr + position.to(tl.int64)[:, None] * I + column[None, :]
    tl.store(h_ptrs, h.T.to(h_ptr.dtype.element_ty), mask=ok[:, None] & (column < I)[None, :])


@triton.jit(do_not_specialize=ROUTING)
def moe_ops_gemm2(
    y_ptr,  # (S, N) written at the pairs, or where rows are plain at the block's positions
    x_ptr,  # (S, K) read at the block's positions
    w_ptr,  # (E, N, K)
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
    stride_be,
    stride_bn,
    stride_ye,  # what an expert's rows are off by from row * stride_ym
    stride_ym,
    stride_yn,
    ROWS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    WN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y = x @ w.T + bias, rounded once, to y's dtype. Also the GEMM of grouped_linear."""
    b, n = block_and_tile(num_blocks, tl.cdiv(N, WN), GROUP)
    e, position, ok = block_rows(
        index_ptr, ids_ptr, map_ptr, b, E, num_ids, top_k, stride_im, stride_ik, stride_map,
        BM, ROWS, HAS_MAP,
    )  # fmt: skip
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
    acc = matmul(
        x_ptrs, w_ptrs, ok, w_ok, K, stride_xk, stride_wk, BM, WN, BK, EVEN_K, EVEN_N, STAGES
    )
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
    y_ptr,  # (M * TOP_K, K) fp32; rows of pairs that are not here were never written
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
    BN: tl.constexpr,
):
    """out[m] = sum of router weight * y over the token's entries, in their order, rounded once."""
    m = tl.program_id(0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for j in tl.static_range(TOP_K):
        pair = m * TOP_K + j
        e = local_expert(
            ids_ptr, map_ptr, pair, pair >= 0, E, num_ids, TOP_K,
            stride_im, stride_ik, stride_map, HAS_MAP,
        )  # fmt: skip
        end = tl.where(e >= 0, K, 0)  # nothing of a pair that is not here
        y = tl.load(y_ptr + pair.to(tl.int64) * K + column, mask=column < end, other=0.0)
        if WEIGHTED:
            scale = tl.load(
                topk_weights_ptr + m.to(tl.int64) * stride_tm + j * stride_tk,
                mask=e >= 0,
                other=0.0,
            )
            y *= scale.to(tl.float32)
        total += y
    out_ptrs = out_ptr + m.to(tl.int64) * stride_om + column.to(tl.int64) * stride_ok
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=column < K)
