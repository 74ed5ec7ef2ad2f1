"""Triton kernels of a layer of one token whose weights have 4 or 8 bits, beside activations that stay as they are.
Imported at first launch only.

As in triton_vector.py weights go from memory to registers and meet x in ordinary multiplications. A thread reads 16 bytes
of a row, a chunk, and the activations that belong to them: nothing is exchanged between threads until sums are finished.
Products are those of triton_vector_packed_products.py.

Legend: a chunk is 16 bytes of a row, 32 or 16 columns; CHUNKS of them in ROWS rows are a step of a program. Tensors are
(CHUNKS, ROWS): of dimensions without neighbours in memory Triton spreads threads over the first. FORMAT and SCALE as in
triton_packed_matmul.py; scales of rows and tensors are read like those of groups.
"""

import triton
import triton.language as tl

from moe_ops.kernels.triton_activations import activate_one, activate_two
from moe_ops.kernels.triton_routing import local_expert, start_dependent, wait
from moe_ops.kernels.triton_vector_packed_products import (
    chunk_products,
    load_chunks,
    load_columns,
    word_columns,
)

# Arguments that no kernel is compiled anew for. Were the strides of scales known to be 1, scales would be read several a
# thread and exchanged.
ROUTING = [
    *("E", "num_ids", "stride_im", "stride_ik", "stride_map", "stride_tk"),
    *("stride_sk", "stride_zk"),
]
ALL_PAIRS = tl.constexpr(1 << 30)  # as top_k: every pair is of token 0


@triton.jit(do_not_specialize=ROUTING)
def moe_ops_vector_packed_gemm1(
    h_ptr,  # (top_k, I), written
    x_ptr,  # (K,)
    w_ptr,  # (E, N, bytes of K columns)
    scale_ptr,
    zero_ptr,  # as the scales, bytes; or absent
    factor_ptr,  # (E,) fp32 that scales are divided by, or absent
    bias_ptr,  # (E, N) or absent
    ids_ptr,  # (1, top_k)
    map_ptr,
    topk_weights_ptr,  # (1, top_k) to multiply the input by, or absent
    E,
    num_ids,
    stride_im,
    stride_ik,
    stride_map,
    stride_tk,
    I,  # noqa: E741
    stride_xk,
    stride_we,
    stride_wn,
    stride_se,
    stride_sn,
    stride_sk,
    stride_ze,
    stride_zn,
    stride_zk,
    stride_fe,
    stride_be,
    stride_bn,
    alpha,
    beta,
    limit,
    HAS_MAP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    G: tl.constexpr,
    LENGTH: tl.constexpr,  # chunks of a row
    ROWS: tl.constexpr,  # of w
    BK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """h = activation(x @ w13.T + bias): a program an expert and ROWS rows of w13, gates and ups side by side."""
    WORD: tl.constexpr = word_columns(FORMAT)
    CHUNKS: tl.constexpr = BK // (4 * WORD)
    EACH: tl.constexpr = 2 if GATED else 1
    BN: tl.constexpr = ROWS // EACH
    wait(DEPENDENT)
    # GEMM2's programs ask for their weights, into registers, as soon as the last of these programs run.
    start_dependent(DEPENDENT)
    pair = tl.program_id(0)
    e = local_expert(
        ids_ptr, map_ptr, pair, pair >= 0, E, num_ids, ALL_PAIRS,
        stride_im, stride_ik, stride_map, HAS_MAP,
    )  # fmt: skip
    if e < 0:
        return
    e64 = e.to(tl.int64)
    experts = tl.full((CHUNKS,), 0, tl.int64) + e64
    r = tl.arange(0, ROWS)
    row = tl.minimum(tl.program_id(1) * BN + r // EACH, I - 1)
    if GATED:
        row = 2 * row + r % 2 if INTERLEAVED else row + r % 2 * I
    acc = tl.zeros((CHUNKS, ROWS), tl.float32)
    for start in tl.range(0, LENGTH, CHUNKS, num_stages=1):
        chunk = start + tl.arange(0, CHUNKS)
        here = chunk < LENGTH
        w, first, second, zero = load_chunks(
            w_ptr, scale_ptr, zero_ptr, experts, row, chunk, here, stride_we, stride_wn,
            stride_se, stride_sn, stride_sk, stride_ze, stride_zn, stride_zk, FORMAT, SCALE, G,
        )  # fmt: skip
        # Else the compiler puts loads off until they are needed, and fewer are on their way.
        tl.debug_barrier()
        x0, x1, x2, x3 = load_columns(x_ptr, stride_xk, chunk, here, WORD)
        acc += chunk_products(
            w, first, second, zero, x0, x1, x2, x3, FORMAT, SCALE, G, zero_ptr is not None
        )
    sums = tl.sum(acc, 0)
    if factor_ptr is not None:
        sums /= tl.load(factor_ptr + e64 * stride_fe)
    if topk_weights_ptr is not None:
        sums *= tl.load(topk_weights_ptr + pair * stride_tk).to(tl.float32)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + e64 * stride_be + row * stride_bn).to(tl.float32)
    if GATED:
        g, u = sums.reshape(BN, 2).split()
        h = activate_two(g, u, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        h = activate_one(sums, ACTIVATION)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    h_ptrs = h_ptr + pair.to(tl.int64) * I + column
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=column < I)


@triton.jit
def chosen(
    pair,  # (n,)
    ids_ptr,
    map_ptr,
    topk_weights_ptr,
    E,
    num_ids,
    stride_im,
    stride_ik,
    stride_map,
    stride_tk,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """(expert int64, whether it is here, router weight) of pairs."""
    e = local_expert(
        ids_ptr, map_ptr, pair, pair < TOP_K, E, num_ids, ALL_PAIRS,
        stride_im, stride_ik, stride_map, HAS_MAP,
    )  # fmt: skip
    here = e >= 0
    e = tl.maximum(e, 0).to(tl.int64)
    weight = here.to(tl.float32)
    if topk_weights_ptr is not None:
        weight = tl.load(topk_weights_ptr + pair * stride_tk, mask=here, other=0.0)
        weight = weight.to(tl.float32)
    return e, here, weight


@triton.jit(do_not_specialize=ROUTING)
def moe_ops_vector_packed_gemm2(
    out_ptr,  # (N,), written
    h_ptr,  # (top_k, K), read as one row: the sum goes over experts and columns alike
    w_ptr,  # (E, N, bytes of K columns)
    scale_ptr,
    zero_ptr,
    factor_ptr,
    bias_ptr,
    ids_ptr,
    map_ptr,
    topk_weights_ptr,  # to multiply the experts' rows by, or absent
    E,
    num_ids,
    stride_im,
    stride_ik,
    stride_map,
    stride_tk,
    N,
    stride_we,
    stride_wn,
    stride_se,
    stride_sn,
    stride_sk,
    stride_ze,
    stride_zn,
    stride_zk,
    stride_fe,
    stride_be,
    stride_bn,
    stride_ok,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,  # a power of two, at least TOP_K
    HAS_MAP: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    G: tl.constexpr,
    LENGTH: tl.constexpr,  # chunks of a row
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out = the sum over the token's experts of router weight * (h @ w2.T + bias), in fp32, rounded once: a program
    ROWS columns.

    Only h is of the kernel before this one, so weights are asked for before that has ended.
    """
    WORD: tl.constexpr = word_columns(FORMAT)
    CHUNKS: tl.constexpr = BK // (4 * WORD)
    column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(column, N - 1)
    acc = tl.zeros((CHUNKS, ROWS), tl.float32)
    biases = tl.zeros((ROWS,), tl.float32)
    if bias_ptr is not None:
        lane = tl.arange(0, PAIRS)
        e, there, weight = chosen(
            lane, ids_ptr, map_ptr, topk_weights_ptr, E, num_ids,
            stride_im, stride_ik, stride_map, stride_tk, TOP_K, HAS_MAP,
        )  # fmt: skip
        bias_ptrs = bias_ptr + (e * stride_be)[:, None] + (row * stride_bn)[None, :]
        bias = tl.load(bias_ptrs, mask=there[:, None], other=0.0).to(tl.float32)
        biases = tl.sum(bias * weight[:, None], 0)
    for start in tl.range(0, TOP_K * LENGTH, CHUNKS, num_stages=1):
        chunk = start + tl.arange(0, CHUNKS)
        expert, here, factor = chosen(
            chunk // LENGTH, ids_ptr, map_ptr, topk_weights_ptr, E, num_ids,
            stride_im, stride_ik, stride_map, stride_tk, TOP_K, HAS_MAP,
        )  # fmt: skip
        if factor_ptr is not None:
            factor /= tl.load(factor_ptr + expert * stride_fe, mask=here, other=1.0)
        w, first, second, zero = load_chunks(
            w_ptr, scale_ptr, zero_ptr, expert, row, chunk % LENGTH, here, stride_we, stride_wn,
            stride_se, stride_sn, stride_sk, stride_ze, stride_zn, stride_zk, FORMAT, SCALE, G,
        )  # fmt: skip
        tl.debug_barrier()  # as in GEMM1
        wait(DEPENDENT)  # which it has to do but once; then this costs nothing
        x0, x1, x2, x3 = load_columns(h_ptr, 1, chunk, here, WORD)
        part = chunk_products(
            w, first, second, zero, x0, x1, x2, x3, FORMAT, SCALE, G, zero_ptr is not None
        )
        acc += part * factor[:, None]
    start_dependent(DEPENDENT)
    out = tl.sum(acc, 0) + biases
    out_ptrs = out_ptr + column.to(tl.int64) * stride_ok
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=column < N)
