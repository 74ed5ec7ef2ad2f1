"""Kernels of the two GEMMs for weights of 4 and 8 bits on SM90, of more than one token. Imported at first launch only.

Legend as in triton_experts.py, the product in gluon_packed_matmul.py. Rows of x and h are (S, K) sorted by expert, their
columns in the order in which the product takes them. A weight is described as (E, pieces of a row, parts, rows, bytes of
a piece): gate and up are two parts, other weights are one.
"""

import triton
import triton.language as tl

from moe_ops.kernels.device.gluon import gl, gluon
from moe_ops.kernels.gluon_packed_matmul import finish, first_scales, product, product_row, tile_at
from moe_ops.kernels.gluon_packed_operands import bits_of_place
from moe_ops.kernels.triton_activations import activate_one, activate_two
from moe_ops.kernels.triton_routing import local_expert, start_dependent, wait

COUNTS = ["num_blocks", "S", "E", "num_ids", "top_k", "stride_tm", "stride_tk"]
COUNTS += ["stride_im", "stride_ik", "stride_map"]


@triton.jit
def place_of(column, BITS_OF_PLACE: tl.constexpr):
    """Place at which the column of a piece is multiplied."""
    place = column * 0
    for i in tl.static_range(len(BITS_OF_PLACE)):
        place |= (column >> BITS_OF_PLACE[i] & 1) << i
    return place


@triton.jit
def place_in_row(column, U: tl.constexpr, BITS: tl.constexpr):
    """Place of a column of a row."""
    return column // U * U + place_of(column % U, bits_of_place(U, BITS))


@triton.jit
def in_place(x, U: tl.constexpr, BITS: tl.constexpr):
    """(N,) columns of whole pieces, each at its place."""
    N: tl.constexpr = x.shape[0]
    if BITS == 4:  # axes: thread, its 4 bytes, bits of a byte's index, nibble
        x = x.reshape(N // U, 4, U // 32, 2, 2, 2).permute(0, 5, 2, 4, 1, 3)
    else:
        x = x.reshape(N // U, 4, U // 16, 2, 2).permute(0, 2, 4, 1, 3)
    return x.reshape(N)


@triton.jit
def position_of(
    pair, ids_ptr, map_ptr, S, E, num_ids, top_k, stride_im, stride_ik, stride_map,
    PAIRS: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Where the routing kernel puts one of at most PAIRS pairs, and whether its expert is here."""
    other = tl.arange(0, PAIRS)
    experts = local_expert(
        ids_ptr, map_ptr, other, other < S, E, num_ids, top_k,
        stride_im, stride_ik, stride_map, HAS_MAP,
    )  # fmt: skip
    e = tl.sum(tl.where(other == pair, experts, 0))
    before = (experts >= 0) & (experts < e) | (experts == e) & (other < pair)
    return tl.sum(before.to(tl.int32)), e >= 0


@triton.jit(
    do_not_specialize=[
        *("num_blocks", "S", "E", "num_ids", "top_k", "stride_im", "stride_ik", "stride_map")
    ]
)
def moe_ops_arrange(
    out_ptr,  # (S, K in whole pieces) written: rows of x at their pairs' positions, columns as the product takes them
    x_ptr,  # (M, K)
    index_ptr,
    ids_ptr,  # (M, top_k)
    map_ptr,  # (num_ids,) global id -> local id, or absent
    num_blocks,
    S,
    E,
    num_ids,
    top_k,
    K,
    stride_im,
    stride_ik,
    stride_map,
    stride_xm,
    stride_xk,
    U: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,  # of so many at most the kernel finds the positions itself; 0 of more
    ALONE: tl.constexpr,  # no routing kernel runs: the kernel writes the order
    TAIL: tl.constexpr,  # whether the last piece reaches back into the one before
    HAS_MAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows of tokens sorted by expert, one program a pair or position, and so many columns.

    Of few pairs it does not wait for the routing kernel's order. Positions of no pair are left to chance.
    """
    if ALONE:
        wait(DEPENDENT)
        start_dependent(DEPENDENT)
    if PAIRS:
        pair = tl.program_id(0)
        position, here = position_of(
            pair, ids_ptr, map_ptr, S, E, num_ids, top_k,
            stride_im, stride_ik, stride_map, PAIRS, HAS_MAP,
        )  # fmt: skip
    else:
        wait(DEPENDENT)
        start_dependent(DEPENDENT)
        position = tl.program_id(0)
        pair = tl.load(index_ptr + 4 * num_blocks + position, cache_modifier=".cg")
        here = (pair >= 0) & (pair < S)
    place = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    columns = K  # of a row of whole pieces
    column = place
    if TAIL:
        columns = tl.cdiv(K, U) * U
        column = tl.where(place < columns - U, place, place - (columns - K))
    ok = place < tl.where(here, columns, 0)
    own = ok
    if TAIL:
        own = ok & ((place < columns - U) | (column >= columns - U))
    x_ptrs = x_ptr + (pair // top_k).to(tl.int64) * stride_xm + column.to(tl.int64) * stride_xk
    x = in_place(tl.load(x_ptrs, mask=own, other=0.0), U, BITS)
    tl.store(out_ptr + position.to(tl.int64) * columns + place, x, mask=ok)
    if ALONE:
        order_ptr = index_ptr + 4 * num_blocks + position
        tl.store(order_ptr, pair, mask=here & (tl.program_id(1) == 0))
    elif PAIRS:
        wait(DEPENDENT)
        start_dependent(DEPENDENT)  # GEMM1 reads what the routing kernel wrote before it waits


@gluon.jit
def leave(DEPENDENT: gl.constexpr):
    """End a program without a tile. One waits for all of them, as `wait` asks: others would keep the places of those that
    could ask for weights meanwhile."""
    if gl.program_id(0) == 0:
        wait(DEPENDENT)


@gluon.jit(do_not_specialize=COUNTS)
def moe_ops_gluon_gemm1(
    h_ptr,  # (S, I in whole pieces) written at the block's positions, columns in the order GEMM2 takes them
    x,
    w,
    scales,  # descriptor of those that lie beside the weights of a piece, or absent
    scale_ptr,
    zero_ptr,
    factor_ptr,
    bias_ptr,  # (E, N) or absent
    index_ptr,
    ids_ptr,  # (M, top_k)
    map_ptr,  # (num_ids,) global id -> local id, or absent
    num_blocks,
    S,
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
    WEIGHT_ON_INPUT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    G: gl.constexpr,
    U: gl.constexpr,
    U2: gl.constexpr,  # GEMM2's U
    TAIL2: gl.constexpr,  # whether its last piece reaches back into the one before
    BITS: gl.constexpr,  # of a weight
    BM: gl.constexpr,
    WN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
    PAIRS: gl.constexpr,  # of so many at most programs find their block themselves; 0 of more
    HAS_MAP: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """h = activation(x @ w13.T + bias)."""
    BN: gl.constexpr = WN // 2 if GATED else WN
    start_dependent(DEPENDENT)
    here, e, first, last, n, _, begin_step, end_step = tile_at(
        index_ptr, ids_ptr, map_ptr, num_blocks, S, E, num_ids, top_k, stride_im, stride_ik, stride_map,
        gl.cdiv(I, BN), gl.cdiv(K, BK), 1, PAIRS, HAS_MAP, BM, WARPS,
    )  # fmt: skip
    if not here:
        leave(DEPENDENT)
        return
    e64 = e.to(gl.int64)
    tile_row = n * (WN if INTERLEAVED else BN)
    scale_ptrs = None
    if scale_ptr is not None:
        scale_ptrs = first_scales(
            scale_ptr, e64 * stride_se, stride_sn, stride_sk, n * BN, I,
            FORMAT, SCALE, GATED, INTERLEAVED, WN, U, G, WARPS,
        )  # fmt: skip
    zero_ptrs = None
    if zero_ptr is not None:
        zero_ptrs = first_scales(
            zero_ptr, e64 * stride_ze, stride_zn, stride_zk, n * BN, I,
            FORMAT, SCALE, GATED, INTERLEAVED, WN, U, G, WARPS,
        )  # fmt: skip
    acc = product(
        x, w, scales, first, last, e, tile_row, begin_step, end_step, K, scale_ptrs, zero_ptrs, stride_sk, stride_zk,
        FORMAT, SCALE, G, U, GATED, INTERLEAVED, BM, WN, BK, STAGES, WARPS, OVERLAP, DEPENDENT,
    )  # fmt: skip
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    i, up = product_row(ROWS, WN, GATED)
    i = gl.minimum(n * BN + i, I - 1)
    row = 2 * i + up if INTERLEAVED else i + up * I
    acc = finish(
        acc,
        scale_ptr,
        factor_ptr,
        e64,
        row,
        stride_se,
        stride_sn,
        stride_fe,
        stride_fn,
        FORMAT,
        SCALE,
    )
    if WEIGHT_ON_INPUT:
        TOKENS: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
        position = last - BM + gl.arange(0, BM, TOKENS)
        pair = gl.load(index_ptr + 4 * num_blocks + position, mask=position >= first, other=0)
        factor_ptrs = (
            topk_weights_ptr
            + (pair // top_k).to(gl.int64) * stride_tm
            + (pair % top_k) * stride_tk
        )
        acc *= gl.expand_dims(
            gl.load(factor_ptrs, mask=position >= first, other=0.0).to(gl.float32), 0
        )
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + e64 * stride_be + row * stride_bn)
        acc += gl.expand_dims(bias.to(gl.float32), 1)
    if GATED:
        g, u = acc.reshape((BN // 8, 2, 8, BM)).permute((0, 2, 3, 1)).split()
        g = g.reshape((BN, BM))
        u = u.reshape((BN, BM))
        h = activate_two(g, u, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        h = activate_one(acc, ACTIVATION)
    column = n * BN + gl.arange(0, BN, gl.SliceLayout(1, h.type.layout))
    at = last - BM + gl.arange(0, BM, gl.SliceLayout(0, h.type.layout))
    ok = gl.expand_dims(at >= first, 0) & gl.expand_dims(column < I, 1)
    columns = I
    if TAIL2:
        columns = gl.cdiv(I, U2) * U2
    h_ptrs = h_ptr + gl.expand_dims(at.to(gl.int64) * columns, 0)
    if TAIL2:  # zeros meet the columns of the last piece that are of the piece before, too
        missing = columns - I
        tail = column >= columns - U2
        zeros = h_ptrs + gl.expand_dims(place_in_row(column, U2, BITS), 1)
        none = gl.zeros_like(h).to(h_ptr.dtype.element_ty)
        gl.store(zeros, none, mask=ok & gl.expand_dims(tail, 1))
        column = gl.where(tail, column + missing, column)
    h_ptrs += gl.expand_dims(place_in_row(column, U2, BITS), 1)
    gl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=ok)


@gluon.jit(do_not_specialize=COUNTS)
def moe_ops_gluon_gemm2(
    y_ptr,  # (SPLIT, S, N) written at the pairs: sums of so many parts of the columns
    x,
    w,
    scales,  # descriptor of those that lie beside the weights of a piece, or absent
    scale_ptr,
    zero_ptr,
    factor_ptr,
    bias_ptr,  # (E, N) or absent
    index_ptr,
    ids_ptr,  # (M, top_k)
    map_ptr,  # (num_ids,) global id -> local id, or absent
    num_blocks,
    S,
    E,
    num_ids,
    top_k,
    stride_im,
    stride_ik,
    stride_map,
    K,
    N,
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
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    G: gl.constexpr,
    U: gl.constexpr,
    SPLIT: gl.constexpr,
    BM: gl.constexpr,
    WN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
    PAIRS: gl.constexpr,  # as in GEMM1
    HAS_MAP: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """y = x @ w2.T + bias in fp32."""
    start_dependent(DEPENDENT)
    here, e, first, last, n, part, begin_step, end_step = tile_at(
        index_ptr, ids_ptr, map_ptr, num_blocks, S, E, num_ids, top_k, stride_im, stride_ik, stride_map,
        gl.cdiv(N, WN) * SPLIT, gl.cdiv(K, BK), SPLIT, PAIRS, HAS_MAP, BM, WARPS,
    )  # fmt: skip
    if not here:
        leave(DEPENDENT)
        return
    e64 = e.to(gl.int64)
    scale_ptrs = None
    if scale_ptr is not None:
        scale_ptrs = first_scales(
            scale_ptr, e64 * stride_se, stride_sn, stride_sk, n * WN, N,
            FORMAT, SCALE, False, False, WN, U, G, WARPS,
        )  # fmt: skip
    zero_ptrs = None
    if zero_ptr is not None:
        zero_ptrs = first_scales(
            zero_ptr, e64 * stride_ze, stride_zn, stride_zk, n * WN, N,
            FORMAT, SCALE, False, False, WN, U, G, WARPS,
        )  # fmt: skip
    acc = product(
        x, w, scales, first, last, e, n * WN, begin_step, end_step, K, scale_ptrs, zero_ptrs, stride_sk, stride_zk,
        FORMAT, SCALE, G, U, False, False, BM, WN, BK, STAGES, WARPS, OVERLAP, DEPENDENT,
    )  # fmt: skip
    column = n * WN + gl.arange(0, WN, gl.SliceLayout(1, acc.type.layout))
    row = gl.minimum(column, N - 1)
    acc = finish(
        acc,
        scale_ptr,
        factor_ptr,
        e64,
        row,
        stride_se,
        stride_sn,
        stride_fe,
        stride_fn,
        FORMAT,
        SCALE,
    )
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + e64 * stride_be + row * stride_bn).to(gl.float32)
        acc += gl.expand_dims(gl.where(part == 0, bias, 0.0), 1)
    position = last - BM + gl.arange(0, BM, gl.SliceLayout(0, acc.type.layout))
    pair = gl.load(index_ptr + 4 * num_blocks + position, mask=position >= first, other=0)
    y_ptrs = (
        y_ptr + gl.expand_dims((part * S + pair).to(gl.int64) * N, 0) + gl.expand_dims(column, 1)
    )
    gl.store(
        y_ptrs, acc, mask=gl.expand_dims(position >= first, 0) & gl.expand_dims(column < N, 1)
    )
