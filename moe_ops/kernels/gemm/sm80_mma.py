"""The two grouped GEMMs on tensor cores, whose operands are both plain, both e4m3 or both int8: by
mma.sync, or by wgmma if Triton chooses it. Imported at first launch only. (16-bit activations
times narrower weights: kernels/mixed_gemm.)

Legend: S pairs sorted by expert, E local experts, K columns of the GEMM's input and weight, N its
output columns (GEMM1: I), BLOCK_M rows (tokens) of a block, BLOCK_N rows of the weight in a tile,
which give BLOCK_I columns of h (half as many if gated), BLOCK_K the step along K. A program
handles one block (kernels/device/blocks.py) and one tile of columns.

Weights are the left operand (`w (BLOCK_N, BLOCK_K) @ x.T (BLOCK_K, BLOCK_M)`), so that 16 tokens
fill a tensor-core instruction.

W_SCALE  scales of w: "" none, "tensor" (E,), "channel" (E, N),
         "block" (E, ceil(N / 128), ceil(K / 128))
X_SCALE  how x is quantized to the weights' format: "" not at all; with one scale a "group" of 128
         columns, a "row", or all of x ("tensor"), from x itself; "static" with a known scale, of
         each expert or of all, "token" with a known one for each row. POWERS: scales of groups
         are powers of two. If x comes in the weights' format, the caller or an earlier kernel
         quantized it. Otherwise it is quantized here, tile by tile: by groups, or with row and
         tensor scales that an earlier kernel computed. Scales of a "row" and of a "tensor" are
         still the largest magnitudes that they follow from.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.activation import Activated
from moe_ops.kernels.configs import GemmConfig
from moe_ops.kernels.device.activations import activate_one, activate_two
from moe_ops.kernels.device.blocks import block_and_tile, block_rows, pairs_at
from moe_ops.kernels.device.e4m3 import (
    clamp,
    decode,
    decode_activation,
    e4m3_scale,
    element_scale,
    largest_magnitude,
    operand,
    quantize_groups,
    quotient,
    reciprocal,
    stored,
)
from moe_ops.kernels.device.interpreter import INTERPRET
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.gemm.operands import Bias, GemmTile, Output, Scaling, Weight, tile_of
from moe_ops.kernels.launch import (
    Constant,
    Gpu,
    Launch,
    Pointer,
    Specialized,
    arguments,
    kernel,
)
from moe_ops.kernels.place.routing import RouterWeights, Routing
from moe_ops.kernels.rows.scales import Input
from moe_ops.meta.workspace import cdiv


@triton.jit
def row_scales(
    scale_ptr, scale_stride_m, row, ok, BLOCK_M: tl.constexpr, PARTIALS: tl.constexpr,
    X_SCALE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M,) scales of rows of x, for an X_SCALE that does not change along K."""
    if X_SCALE == "row":
        return element_scale(tl.load(scale_ptr + row, mask=ok, other=0.0), INT8)
    elif X_SCALE == "token":
        scale_ptr += row.to(tl.int64) * scale_stride_m
        return tl.load(scale_ptr, mask=ok, other=1.0).to(tl.float32)
    elif X_SCALE == "tensor":
        partials = tl.load(scale_ptr + tl.arange(0, PARTIALS))
        return element_scale(tl.max(partials, 0), INT8) + tl.zeros((BLOCK_M,), tl.float32)
    else:
        tl.static_assert(X_SCALE == "static")
        return tl.load(scale_ptr).to(tl.float32) + tl.zeros((BLOCK_M,), tl.float32)


@triton.jit
def block_scale(s0, s1, s2, row, block0, block1, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BLOCK_N,) scales of a tile's rows, which are in BLOCKS blocks of 128 rows."""
    if BLOCKS == 1:
        return tl.full((BLOCK_N,), 1.0, tl.float32) * s0
    elif BLOCKS == 2:
        return tl.where(row // 128 == block0, s0, s1)
    else:
        return tl.where(row // 128 == block0, s0, tl.where(row // 128 == block1, s1, s2))


@triton.jit
def matmul(
    x_ptrs,  # (BLOCK_M, BLOCK_K)
    w_ptrs,  # (BLOCK_N, BLOCK_K)
    x_ok,  # (BLOCK_M,)
    w_ok,  # (BLOCK_N,)
    K,
    x_stride_k,
    w_stride_k,
    x_scale_ptr,
    x_scale_stride_m,
    x_scale_stride_g,  # between groups of columns in the scales of x
    x_row,  # (BLOCK_M,) rows of x
    x_factor,  # (BLOCK_M,) that x is multiplied by, or None
    w_scale_ptr,  # scales of this expert
    w_scale_stride_n,
    w_scale_stride_k,
    row,  # (BLOCK_N,) rows of w
    block0,  # blocks of 128 rows that contain `row`
    block1,
    block2,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    W_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    POWERS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """x_factor * (w @ x.T), (BLOCK_N, BLOCK_M) in fp32. Both operands are masked along K, because
    zero times uninitialized memory may be NaN.

    Sums of e4m3 products are added to the fp32 total every BLOCK_K <= 128 columns, because tensor
    cores accumulate them in fewer bits than fp32 has.
    """
    INT8: tl.constexpr = w_ptrs.dtype.element_ty == tl.int8
    X8: tl.constexpr = x_ptrs.dtype.element_ty.primitive_bitwidth == 8
    GROUPS: tl.constexpr = X_SCALE == "group"
    BLOCK: tl.constexpr = W_SCALE == "block"
    tl.static_assert(BLOCK == GROUPS)
    # The factor comes before quantization; what arrives quantized is multiplied by it later.
    QUANTIZE_PRODUCT: tl.constexpr = HAS_FACTOR and X_SCALE != "" and not X8
    if GROUPS:
        tl.static_assert(BLOCK_K == 128)
    if BLOCK:  # scales are loaded one step ahead of their use
        s0_ptr = w_scale_ptr + block0 * w_scale_stride_n
        s1_ptr = w_scale_ptr + block1 * w_scale_stride_n
        s2_ptr = w_scale_ptr + block2 * w_scale_stride_n
        s0 = tl.load(s0_ptr).to(tl.float32)
        s1 = s0
        s2 = s0
        if BLOCKS > 1:
            s1 = tl.load(s1_ptr).to(tl.float32)
        if BLOCKS > 2:
            s2 = tl.load(s2_ptr).to(tl.float32)
    if GROUPS:
        if X8:
            # Unused rows load the scales of the first row, which needs no mask. Their sums are not
            # stored.
            xs_ptrs = x_scale_ptr + tl.where(x_ok, x_row, 0).to(tl.int64) * x_scale_stride_m
    elif X_SCALE != "":
        xs = row_scales(
            x_scale_ptr, x_scale_stride_m, x_row, x_ok, BLOCK_M, PARTIALS, X_SCALE, INT8
        )
        if not X8:
            inverse = reciprocal(xs)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if INT8 else tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        x_mask = x_ok[:, None]
        if not EVEN_K:
            x_mask = x_mask & (start + k < K)[None, :]
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        if GROUPS and X8:  # pipelined with the operands: a load at its use would stall every step
            xs = tl.load(xs_ptrs)
            xs_ptrs += x_scale_stride_g
        if EVEN_N and EVEN_K:
            w = tl.load(w_ptrs)
        elif EVEN_K:
            w = tl.load(w_ptrs, mask=w_ok[:, None], other=0.0)
        elif EVEN_N:
            w = tl.load(w_ptrs, mask=(start + k < K)[None, :], other=0.0)
        else:
            w = tl.load(w_ptrs, mask=w_ok[:, None] & (start + k < K)[None, :], other=0.0)
        if X_SCALE != "":
            if X8:
                if not NATIVE and not INT8:
                    x = decode_activation(x)
            else:
                v = x.to(tl.float32)
                if QUANTIZE_PRODUCT:
                    v *= x_factor[:, None]
                if GROUPS:
                    v, xs = quantize_groups(v, POWERS)
                else:
                    if X_SCALE == "static":
                        v = clamp(v, (130.0 if INT8 else 448.0) * xs[:, None])
                    v = quotient(v, xs[:, None], inverse[:, None])
                x = operand(v, NATIVE, INT8)
            if not NATIVE and not INT8:
                w = decode(w, tl.float16)
        if INTERPRET and not INT8:  # the interpreter's 16-bit products are wrong
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        if INT8:
            acc = tl.dot(w, x.T, acc, out_dtype=tl.int32)
        elif X_SCALE == "":
            acc = tl.dot(w, x.T, acc, input_precision="ieee")
        else:
            d = tl.dot(w, x.T, input_precision="ieee")
            if BLOCK:
                step = tl.where(start + BLOCK_K < K, w_scale_stride_k, 0)
                scale = block_scale(s0, s1, s2, row, block0, block1, BLOCKS, BLOCK_N)
                s0_ptr += step
                s0 = tl.load(s0_ptr).to(tl.float32)
                if BLOCKS > 1:
                    s1_ptr += step
                    s1 = tl.load(s1_ptr).to(tl.float32)
                if BLOCKS > 2:
                    s2_ptr += step
                    s2 = tl.load(s2_ptr).to(tl.float32)
                acc += d * (scale[:, None] * xs[None, :])
            else:
                acc += d
        x_ptrs += BLOCK_K * x_stride_k
        w_ptrs += BLOCK_K * w_stride_k
    acc = acc.to(tl.float32)
    if X_SCALE != "" and not GROUPS:
        acc *= xs[None, :]
    if W_SCALE == "tensor":
        acc *= tl.load(w_scale_ptr).to(tl.float32)
    elif W_SCALE == "channel":
        scale = tl.load(w_scale_ptr + row.to(tl.int64) * w_scale_stride_n, mask=w_ok, other=0.0)
        acc *= scale.to(tl.float32)[:, None]
    if HAS_FACTOR and not QUANTIZE_PRODUCT:
        acc *= x_factor[None, :]
    return acc


@arguments
class Gemm1:
    h: Input  # (S, I), written at the block's positions; its scales depend on H_SCALE
    # (M, K), or (E, T, K) as rows; without scales if it is quantized here by groups, or not at all
    x: Input
    w: Weight  # (E, N, K)
    bias: Bias  # (E, N)
    added: Pointer  # (S, N) at the block's positions, added before the activation, or None
    routing: Routing
    topk_weights: RouterWeights  # (M, top_k), if they scale the input
    K: Specialized
    I: Specialized
    activation: Activated
    scaling: Scaling
    H_SCALE: Constant
    tile: GemmTile
    PDL: Constant


@kernel(Gemm1)
def moe_ops_gemm1(
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
    w_ptr,
    w_stride_e,
    w_stride_n,
    w_stride_k,
    w_scale_ptr,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_k,
    bias_ptr,
    bias_stride_e,
    bias_stride_n,
    added_ptr,
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
    H_SCALE: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = activation(x @ w13.T + bias). The activation is applied to gate and up in registers.

    H_SCALE ""       writes h in h_ptr's dtype
            "group"  writes h in e4m3, and its scales to h_scale (ceil(I / 128), S); BLOCK_I is 128
            "static" writes h in the weights' e4m3 or int8, with the known scale h_scale, (1,) or
                     (E,)
            "row"    writes h in fp32, and raises h_scale (S,), zero before, to the largest
                     magnitude of each row
            "tensor" writes h in fp32, and raises h_scale (1,), zero before, to the largest
                     magnitude of all rows
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
    if GATED and not INTERLEAVED:
        # Eight gate rows, then their eight up rows: a thread's accumulators hold rows i and i + 8,
        # so gate and up meet without a shuffle.
        column = n * BLOCK_I + r // 16 * 8 + r % 8
        row = column + r // 8 % 2 * I
        w_ok = column < I
    else:
        row = n * BLOCK_N + r
        w_ok = row < (2 * I if GATED else I)
    INT8: tl.constexpr = w_ptr.dtype.element_ty == tl.int8
    HALVES: tl.constexpr = GATED and not INTERLEAVED
    # Blocks of 128 weight rows in a tile: one for each half, and one more if the up rows begin
    # inside a block
    BLOCKS: tl.constexpr = (2 if EVEN_N else 3) if HALVES else (BLOCK_N + 127) // 128
    last_block = tl.cdiv(2 * I if GATED else I, 128) - 1
    block0 = n * (BLOCK_I if HALVES else BLOCK_N) // 128
    block1 = tl.minimum((I + n * BLOCK_I) // 128 if HALVES else block0 + 1, last_block)
    block2 = tl.minimum(block1 + 1, last_block)
    e64 = e.to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = (
        x_ptr
        + e64 * x_stride_e
        + (pair // top_k).to(tl.int64)[:, None] * x_stride_m
        + k.to(tl.int64)[None, :] * x_stride_k
    )
    w_ptrs = (
        w_ptr
        + e64 * w_stride_e
        + row.to(tl.int64)[:, None] * w_stride_n
        + k.to(tl.int64)[None, :] * w_stride_k
    )
    factor = None
    if topk_weights_ptr is not None:
        token = (pair // top_k).to(tl.int64)
        factor_ptrs = (
            topk_weights_ptr
            + token * topk_weights_stride_m
            + (pair % top_k) * topk_weights_stride_k
        )
        factor = tl.load(factor_ptrs, mask=ok, other=0.0).to(tl.float32)
    if x_scale_ptr is not None:
        x_scale_ptr += e64 * x_scale_stride_e
    acc = matmul(
        x_ptrs, w_ptrs, ok, w_ok, K, x_stride_k, w_stride_k,
        x_scale_ptr, x_scale_stride_m, x_scale_stride_g, pair // top_k, factor,
        w_scale_ptr if W_SCALE == "" else w_scale_ptr + e64 * w_scale_stride_e,
        w_scale_stride_n, w_scale_stride_k, row, block0, block1, block2,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, EVEN_N, NUM_STAGES,
        W_SCALE, X_SCALE, x_partials, BLOCKS, topk_weights_ptr is not None, POWERS,
        NATIVE,
    )  # fmt: skip
    gdc_launch_dependents(PDL)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + e64 * bias_stride_e + row * bias_stride_n, mask=w_ok, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    if added_ptr is not None:
        added_ptrs = added_ptr + position.to(tl.int64)[None, :] * (2 * I if GATED else I)
        added = tl.load(added_ptrs + row[:, None], mask=w_ok[:, None] & ok[None, :], other=0.0)
        acc += added.to(tl.float32)
    if GATED:
        if INTERLEAVED:
            g, u = acc.reshape(BLOCK_I, 2, BLOCK_M).permute(0, 2, 1).split()
        else:
            g, u = acc.reshape(BLOCK_I // 8, 2, 8, BLOCK_M).permute(0, 2, 3, 1).split()
            g = g.reshape(BLOCK_I, BLOCK_M)
            u = u.reshape(BLOCK_I, BLOCK_M)
        h = activate_two(g, u, alpha, beta, limit, ACTIVATION, HAS_LIMIT, e)
    else:
        h = activate_one(acc, ACTIVATION)
    column = n * BLOCK_I + tl.arange(0, BLOCK_I)
    place = position.to(tl.int64)
    h_ptrs = h_ptr + place[:, None] * I + column[None, :]
    h_ok = ok[:, None] & (column < I)[None, :]
    if H_SCALE == "row" or H_SCALE == "tensor":
        amax = tl.where(ok, largest_magnitude(h, 0) if INT8 else tl.max(tl.abs(h), 0), 0.0)
        # As integers, the bits of floats >= 0 have the order of the floats. The final maximum does
        # not depend on the order of the atomics.
        slot = h_scale_ptr.to(tl.pointer_type(tl.int32))
        if H_SCALE == "row":
            tl.atomic_max(slot + place, amax.to(tl.int32, bitcast=True), mask=ok, sem="relaxed")
        else:
            amax = tl.where(amax == amax, amax, 0.0)  # NaN stays in its row
            tl.atomic_max(slot, tl.max(amax, 0).to(tl.int32, bitcast=True), sem="relaxed")
    if H_SCALE == "group":
        tl.static_assert(BLOCK_I == 128)
        scale = e4m3_scale(tl.max(tl.abs(h), 0), POWERS)
        tl.store(h_scale_ptr + n.to(tl.int64) * h_scale_stride_g + position, scale, mask=ok)
        h = stored(quotient(h, scale[None, :], reciprocal(scale)[None, :]), NATIVE)
    elif H_SCALE == "static":
        scale = tl.load(h_scale_ptr + e64 * h_scale_stride_e).to(tl.float32)
        h = clamp(h, (130.0 if INT8 else 448.0) * scale)
        h = stored(quotient(h, scale, reciprocal(scale)), NATIVE, INT8)
    else:
        h = h.to(h_ptr.dtype.element_ty)
    tl.store(h_ptrs, h.T, mask=h_ok)


@arguments
class Gemm2:
    y: Output  # (S, N), written at the pairs; if ROWS is "plain", at the block's positions
    x: Input  # (S, K), read at the block's positions
    w: Weight  # (E, N, K)
    bias: Bias  # (E, N)
    routing: Routing
    K: Specialized
    N: Specialized
    scaling: Scaling
    ZERO_TAIL: Constant  # rows past those of the last expert are zeroed
    tile: GemmTile
    PDL: Constant


@kernel(Gemm2)
def moe_ops_gemm2(
    y_ptr,
    y_stride_e,
    y_stride_m,
    y_stride_n,
    x_ptr,
    x_stride_e,
    x_stride_m,
    x_stride_k,
    x_scale_ptr,
    x_scale_stride_e,
    x_scale_stride_m,
    x_scale_stride_g,
    x_partials: tl.constexpr,
    w_ptr,
    w_stride_e,
    w_stride_n,
    w_stride_k,
    w_scale_ptr,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_k,
    bias_ptr,
    bias_stride_e,
    bias_stride_n,
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
    W_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    POWERS: tl.constexpr,
    NATIVE: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
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
    row = n * BLOCK_N + tl.arange(0, BLOCK_N)
    w_ok = row < N
    if ZERO_TAIL:  # rows of no expert: the sum over zero columns, without bias
        K = tl.where(e < E, K, 0)
    e64 = e.to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = (
        x_ptr + position.to(tl.int64)[:, None] * x_stride_m + k.to(tl.int64)[None, :] * x_stride_k
    )
    w_ptrs = (
        w_ptr
        + e64 * w_stride_e
        + row.to(tl.int64)[:, None] * w_stride_n
        + k.to(tl.int64)[None, :] * w_stride_k
    )
    block0 = n * BLOCK_N // 128
    block1 = tl.minimum(block0 + 1, tl.cdiv(N, 128) - 1)
    if W_SCALE != "":  # the zeroed tail has no scales: those of any expert will do
        scaled = (tl.minimum(e, E - 1) if ZERO_TAIL else e).to(tl.int64)
        w_scale_ptr += scaled * w_scale_stride_e
        if X_SCALE == "static":
            x_scale_ptr += scaled * x_scale_stride_e
    acc = matmul(
        x_ptrs, w_ptrs, ok, w_ok, K, x_stride_k, w_stride_k,
        x_scale_ptr, x_scale_stride_m, x_scale_stride_g, position, None,
        w_scale_ptr, w_scale_stride_n, w_scale_stride_k, row, block0, block1, block1,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, EVEN_N, NUM_STAGES,
        W_SCALE, X_SCALE, x_partials, (BLOCK_N + 127) // 128, False, POWERS,
        NATIVE,
    )  # fmt: skip
    gdc_launch_dependents(PDL)
    if ZERO_TAIL:  # zero times a scale that is not finite would be NaN
        acc = tl.where(e < E, acc, 0.0)
    if bias_ptr is not None:
        bias_ok = w_ok
        if ZERO_TAIL:
            bias_ok = row < tl.where(e < E, N, 0)
        bias = tl.load(
            bias_ptr + e64 * bias_stride_e + row * bias_stride_n, mask=bias_ok, other=0.0
        )
        acc += bias.to(tl.float32)[:, None]
    # late, so that it takes no registers in the mainloop
    pair = pairs_at(index_ptr, num_blocks, position, ok, ROWS)
    y_ptrs = (
        y_ptr
        + e64 * y_stride_e
        + pair.to(tl.int64)[:, None] * y_stride_m
        + row.to(tl.int64)[None, :] * y_stride_n
    )
    tl.store(y_ptrs, acc.T.to(y_ptr.dtype.element_ty), mask=ok[:, None] & w_ok[None, :])


def gemm1(
    h: Input,
    x: Input,
    w: Weight,
    bias: Bias,
    routing: Routing,
    topk_weights: RouterWeights,  # that scale the input
    activation: Activated,
    scaling: Scaling,
    h_scale: str,  # H_SCALE
    config: GemmConfig,
    block_m: int,
    gpu: Gpu,
    added: Tensor | None = None,  # (pairs, N) at the blocks' positions
) -> Launch:
    """h = activation(x @ w.T + bias + added)."""
    _, N, K = w.data.shape
    gated = activation.GATED
    I, block_i = (N // 2, config.block_n // 2) if gated else (N, config.block_n)
    args = Gemm1(
        h=h,
        x=x,
        w=w,
        bias=bias,
        added=added,
        routing=routing,
        topk_weights=topk_weights,
        K=K,
        I=I,
        activation=activation,
        scaling=scaling,
        H_SCALE=h_scale,
        tile=tile_of(config, block_m, K, I, block_i),
        PDL=gpu.pdl,
    )
    grid = (routing.num_blocks * cdiv(I, block_i), 1, 1)
    return Launch(moe_ops_gemm1, grid, args, config.num_warps)


def gemm2(
    y: Output,
    x: Input,
    w: Weight,
    bias: Bias,
    routing: Routing,
    scaling: Scaling,
    config: GemmConfig,
    block_m: int,
    gpu: Gpu,
    zero_tail: bool = False,
) -> Launch:
    """y = x @ w.T + bias."""
    _, N, K = w.data.shape
    args = Gemm2(
        y=y,
        x=x,
        w=w,
        bias=bias,
        routing=routing,
        K=K,
        N=N,
        scaling=scaling,
        ZERO_TAIL=zero_tail,
        tile=tile_of(config, block_m, K, N, config.block_n),
        PDL=gpu.pdl,
    )
    grid = (routing.num_blocks * cdiv(N, config.block_n), 1, 1)
    return Launch(moe_ops_gemm2, grid, args, config.num_warps)
