"""A layer of one bf16 token and weights of 4 bits in two launches of `mma.sync`, with the bits of
sm90_wgmma.py. Imported at first launch only, if the installed Triton compiles Gluon
(`configs.on_sm90`).

A warp multiplies 16 rows of weights, whole rows, with one row of x or h. As in sm90_wgmma.py
weights are the left operand and are decoded in the order in which they lie in memory; here the 16
bytes of a row and chunk that a thread loads are its fragments. All eight columns of the right
operand are the row of x. In GEMM2 each of the token's experts has a warp with its own row of h, so
that a program sums over experts what its warps multiplied.

The tensor core adds the 16 products of an instruction alike in `mma.sync` and `wgmma`, and both
take the columns of a row in one order. So the bits are the same.

Legend: a row of weights has CHUNKS chunks of K_CHUNK columns, a program BLOCK_N rows, a thread has
asked for AHEAD chunks of x or h. TOP_K: the token's experts; GEMM2 has a power of two of warps, at
least TOP_K. FORMAT, SCALE and K_CHUNK as in sm90_decode.py.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from moe_ops.kernels.configs import GemmConfig, LayerConfig
from moe_ops.kernels.device.activations import activate_one, activate_two
from moe_ops.kernels.device.blocks import local_expert
from moe_ops.kernels.device.gluon import gl, gluon, mma_v2
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.device.sums import add_terms, expert_of_pair
from moe_ops.kernels.gemm.operands import Activated
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
from moe_ops.kernels.mixed_gemm.configs import (
    MAX_CHUNKS,
    MAX_PROGRAM_CHUNKS,
    MAX_TOP_K,
    token_slots,
)
from moe_ops.kernels.mixed_gemm.operands import Decoding, Format, MixedOperand
from moe_ops.kernels.mixed_gemm.sm90_decode import (
    decode_weights,
    grouped_layout,
    groups_per_chunk,
    log2,
)
from moe_ops.kernels.mixed_gemm.sm90_mainloop import (
    accumulator_rows,
    is_widened,
    unpack_scale,
    unshifted,
    widen_scale,
)
from moe_ops.kernels.permute.rows import TokenRouting, route_token
from moe_ops.kernels.quantize.scales import flat
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import ExpertsArgs

ALL_PAIRS = gl.constexpr(1 << 30)  # passed as top_k, so that every pair is of token 0


@gluon.constexpr_function
def mma_layout(NUM_WARPS):
    """Layout of the accumulators (warps, 16 rows, eight equal columns)."""
    return gl.NVMMADistributedLayout([2, 0], [NUM_WARPS, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def word_layout(BLOCK_N, K_CHUNK, NUM_WARPS):
    """Layout of a chunk of weights (BLOCK_N, words of eight columns)."""
    return gl.SliceLayout(2, grouped_layout(BLOCK_N, K_CHUNK // 2, NUM_WARPS, K_CHUNK // 8))


@gluon.constexpr_function
def pair_layout(K_CHUNK, NUM_WARPS):
    """Layout of a chunk of the right operand (warps, pairs of its K_CHUNK rows, columns, rows of a
    pair) in natural order: each of four threads has those that its weights meet.
    """
    registers = [[0, 0, 0, 1]] + [[0, 1 << i, 0, 0] for i in range(log2(K_CHUNK // 8))]
    lanes = [[0, K_CHUNK // 8, 0, 0], [0, K_CHUNK // 4, 0, 0]]
    lanes += [[0, 0, 1 << i, 0] for i in range(3)]
    warps = [[1 << i, 0, 0, 0] for i in range(log2(NUM_WARPS))]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [NUM_WARPS, K_CHUNK // 2, 8, 2])


@gluon.constexpr_function
def token_layout(K_CHUNK, NUM_WARPS):
    """Layout of a chunk of a row of x for each warp, (warps, pairs of columns)."""
    return gl.SliceLayout(2, gl.SliceLayout(3, pair_layout(K_CHUNK, NUM_WARPS)))


@gluon.jit
def bytes_of_words(w):
    """Words of 32 bits (rows, n) as bytes (rows, 4 n). Each word stays in its register until it is
    decoded: bytes that are loaded take one each.
    """
    ROWS: gl.constexpr = w.shape[0]
    N: gl.constexpr = w.shape[1]
    w = gl.expand_dims(w, 2).broadcast_to((ROWS, N, 4))
    b = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [w], dtype=gl.uint8, is_pure=True, pack=4
    )
    return b.reshape((ROWS, 4 * N))


@gluon.jit
def left_operand(w, A: gl.constexpr):
    """Decoded weights (rows, BYTES) as fragments (warps, 16, BYTES): `fragment` of sm90_decode.py.
    No data movement.
    """
    BLOCK_N: gl.constexpr = w.shape[0]
    BYTES: gl.constexpr = w.shape[1]
    w = w.reshape((BLOCK_N, 4, BYTES // 16, 2, 2)).permute((0, 2, 3, 1, 4))
    return gl.convert_layout(w.reshape((BLOCK_N // 16, 16, BYTES)), A, assert_trivial=True)


@gluon.jit
def right_operands(x, B: gl.constexpr):
    """A chunk of a row of x for each warp, in words (warps, pairs of columns), as the right
    operands of its two products, all columns of which are x. The order is that of
    `permute_columns` in sm90_wgmma.py. No data movement.
    """
    WARPS: gl.constexpr = x.shape[0]
    PAIRS: gl.constexpr = x.shape[1]
    x = gl.expand_dims(x, 2).broadcast_to((WARPS, PAIRS, 8))
    x = gl.expand_dims(x, 3).broadcast_to((WARPS, PAIRS, 8, 2))
    x = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    # axes: warp, thread, its words of 4 bytes, bits of a byte's index, column, nibble
    x = x.reshape((WARPS, 4, PAIRS // 16, 2, 2, 8, 2)).permute((0, 2, 4, 1, 3, 5, 6))
    x0, x1 = x.reshape((WARPS, PAIRS, 8, 2)).split()
    x0 = gl.convert_layout(x0, B, assert_trivial=True)
    return x0, gl.convert_layout(x1, B, assert_trivial=True)


@gluon.constexpr_function
def load_instruction(dtype):
    """PTX that loads a `dtype` into 32 bits. The assembler moves what may come from the read-only
    cache past gdc_wait, which is why this does not say so.
    """
    return f"ld.global.L2::128B.b{dtype.primitive_bitwidth} $0, [$1];"


@gluon.jit
def load_scales(ptrs, j: gl.constexpr, AT_ONCE: gl.constexpr):
    """The j-th chunk's scales, 32 bits each, as a tuple; with AT_ONCE > 1, where each chunk has
    one of 16 bits and they lie side by side, those of AT_ONCE chunks with the first of them, two
    in a word.
    """
    if AT_ONCE == 1:
        ASSEMBLY: gl.constexpr = load_instruction(ptrs.dtype.element_ty)
        return (
            gl.inline_asm_elementwise(
                ASSEMBLY, "=r,l", [ptrs], dtype=gl.int32, is_pure=False, pack=1
            ),
        )
    elif j % AT_ONCE:
        return ()
    elif AT_ONCE == 2:
        return (
            gl.inline_asm_elementwise(
                "ld.global.L2::128B.b32 $0, [$1];", "=r,l", [ptrs],
                dtype=gl.int32, is_pure=False, pack=1,
            ),
        )  # fmt: skip
    elif AT_ONCE == 4:
        return gl.inline_asm_elementwise(
            "ld.global.L2::128B.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [ptrs],
            dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        gl.static_assert(AT_ONCE == 8)
        return gl.inline_asm_elementwise(
            "ld.global.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [ptrs],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def scale_of_chunk(scales, j: gl.constexpr, AT_ONCE: gl.constexpr):
    """The j-th chunk's scales of all that `load_scales` loaded, in 32 bits each."""
    if AT_ONCE == 1:
        return scales[j]
    elif j % 2 == 0:
        return scales[j // 2] & 0xFFFF
    else:
        return (scales[j // 2] >> 16) & 0xFFFF


@gluon.jit
def weight_pointers(w_ptr, row, expert64, stride_e, stride_n, LAYOUT: gl.constexpr):
    """Pointers (rows, words) to the first chunk of rows of experts. Strides are in bytes."""
    offset = expert64 * gl.multiple_of(stride_e // 4, 4)
    offset += row.to(gl.int64) * gl.multiple_of(stride_n // 4, 4)
    word = gl.arange(0, LAYOUT.parent.shape[1], gl.SliceLayout(0, LAYOUT))
    ptrs = w_ptr.to(gl.pointer_type(gl.int32)) + gl.expand_dims(offset, 1)
    return ptrs + gl.expand_dims(word, 0)


@gluon.jit
def scale_pointers(
    ptr, row, expert64, stride_e, stride_n, stride_g,
    SCALE_GROUP: gl.constexpr, K_CHUNK: gl.constexpr, BLOCK_N: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Pointers (BLOCK_N, scales of a chunk) to those of the first chunk of rows of experts."""
    GROUPS: gl.constexpr = groups_per_chunk(K_CHUNK, SCALE_GROUP)
    LAYOUT: gl.constexpr = gl.SliceLayout(
        2, grouped_layout(BLOCK_N, K_CHUNK // 2, NUM_WARPS, GROUPS)
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    row = gl.convert_layout(row, ROWS).to(gl.int64)
    offset = gl.convert_layout(expert64, ROWS) * stride_e + row * stride_n
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, LAYOUT))
    return ptr + (gl.expand_dims(offset, 1) + gl.expand_dims(group * stride_g, 0))


@gluon.jit
def load_tokens(x_ptrs, here, chunk: gl.constexpr):
    """A chunk of a row of x for each warp, in words (warps, pairs of columns); zeros unless the
    row is `here`.
    """
    return gl.load(x_ptrs + chunk * x_ptrs.shape[1], mask=here, other=0)


@gluon.jit
def token_products(
    w_ptrs,  # (BLOCK_N, words), of the first chunk
    here,  # whether weights of rows are read: (BLOCK_N, 1) or one for all
    scale_ptrs,  # (BLOCK_N, scales of a chunk), of the first chunk
    scale_stride_g,
    x_ptrs,  # (warps, pairs of columns), of the first chunk
    x_here,  # whether a warp's row of x is read: (warps, 1) or one for all
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_GROUP: gl.constexpr,
    CHUNKS: gl.constexpr,
    K_CHUNK: gl.constexpr,
    AT_ONCE: gl.constexpr,
    AHEAD: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """w @ x (BLOCK_N,) in fp32, of each warp's rows and its row of x, as `mainloop` of
    sm90_mainloop.py computes it.

    All weights are asked for before gdc_wait. The assembler has six scoreboards for loads, so that
    the first product waits for all of a thread's weights.
    """
    MMA: gl.constexpr = mma_layout(NUM_WARPS)
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    GROUPS: gl.constexpr = groups_per_chunk(K_CHUNK, SCALE_GROUP)
    PROMOTE: gl.constexpr = SCALE == "sum"
    SCALE_DTYPE: gl.constexpr = scale_ptrs.dtype.element_ty
    WIDEN: gl.constexpr = is_widened(SCALE_DTYPE) if PROMOTE else False
    codes, scales, rows = (), (), ()
    for j in gl.static_range(CHUNKS):
        ptrs = w_ptrs + j * (K_CHUNK // 8)
        codes += (gl.load(ptrs, mask=here, eviction_policy="evict_first"),)  # type: ignore[assignment]
        group = j * K_CHUNK // SCALE_GROUP
        scales += load_scales(scale_ptrs + group * scale_stride_g, j, AT_ONCE)
    gdc_wait(PDL)
    for j in gl.static_range(AHEAD):
        rows += (load_tokens(x_ptrs, x_here, j),)  # type: ignore[assignment]
    acc = gl.zeros([NUM_WARPS, 16, 8], gl.float32, MMA)
    for j in gl.static_range(CHUNKS):
        if j + AHEAD < CHUNKS:
            rows += (load_tokens(x_ptrs, x_here, j + AHEAD),)  # type: ignore[assignment]
        s = scale_of_chunk(scales, j, AT_ONCE)
        s = widen_scale(s, SCALE_DTYPE) if WIDEN else unpack_scale(s, SCALE_DTYPE)
        w0, w1 = decode_weights(
            bytes_of_words(codes[j]), s, s, GROUPS, NUM_WARPS, FORMAT, SCALE, False
        )
        x0, x1 = right_operands(rows[j], B)
        d = acc
        if PROMOTE:
            d = gl.zeros([NUM_WARPS, 16, 8], gl.float32, MMA)
        d = mma_v2(left_operand(w0, A), x0, d)
        d = mma_v2(left_operand(w1, A), x1, d)
        if PROMOTE:
            s = gl.convert_layout(
                s.reshape((NUM_WARPS, 16)), gl.SliceLayout(2, MMA), assert_trivial=True
            )
            d = acc + d * gl.expand_dims(s.to(gl.float32), 2)
        acc = d
    acc = unshifted(acc, FORMAT, SCALE)
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, MMA)))
    first = gl.expand_dims(gl.expand_dims(column == 0, 0), 0)
    return gl.sum(gl.where(first, acc, 0.0), 2).reshape((16 * NUM_WARPS,))


@gluon.jit
def weight_rows(
    column, I, BLOCK_N: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Rows of w13 of a tile whose first output column is `column` of I."""
    i, up = accumulator_rows(LAYOUT, BLOCK_N, GATED)
    i = gl.minimum(column + i, I - 1)
    return 2 * i + up if INTERLEAVED else i + up * I


@unprefixed
class ScaledPointers(NamedTuple):
    """A weight's scales and bias."""

    w_scale: Pointer
    bias: Pointer  # (E, N), or None


@unprefixed
class ScaledStrides(NamedTuple):
    """Strides of a weight whose rows are contiguous, of its scales and its bias."""

    w_stride_e: Specialized
    w_stride_n: Specialized
    w_scale_stride_e: Specialized
    w_scale_stride_n: Specialized
    w_scale_stride_g: Specialized
    bias_stride_e: Specialized
    bias_stride_n: Specialized


@unprefixed
class TokenTile(NamedTuple):
    """What a GEMM's config and weight decide."""

    CHUNKS: Constant
    K_CHUNK: Constant
    AT_ONCE: Constant  # chunks whose scales are loaded together
    AHEAD: Constant
    NUM_WARPS: Constant


@arguments
class Gemm1:
    h: Pointer  # (TOP_K, I), written
    x: Pointer  # (K,)
    w: Pointer  # (E, N, bytes of K columns)
    pointers: ScaledPointers
    routing: TokenRouting  # with router weights, if they scale the input
    I: Specialized
    strides: ScaledStrides
    activation: Activated
    decoding: Decoding
    tile: TokenTile
    PDL: Constant


@kernel(Gemm1, jit=gluon.jit)
def moe_ops_token_gemm1(
    h_ptr,
    x_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    ids_ptr,
    map_ptr,
    topk_weights_ptr,
    E,
    num_ids,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    topk_weights_stride_k,
    I,  # noqa: E741
    w_stride_e,
    w_stride_n,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_g,
    bias_stride_e,
    bias_stride_n,
    alpha,
    beta,
    limit,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_GROUP: gl.constexpr,
    CHUNKS: gl.constexpr,
    K_CHUNK: gl.constexpr,
    AT_ONCE: gl.constexpr,
    AHEAD: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """h = activation(x @ w13.T + bias). Grid: (TOP_K, tiles of BLOCK_N rows of w13)."""
    BLOCK_N: gl.constexpr = 16 * NUM_WARPS
    BLOCK_I: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    gdc_launch_dependents(PDL)  # GEMM2 asks for its weights while these programs run
    pair = gl.program_id(0)
    e = local_expert(
        ids_ptr, map_ptr, pair, pair >= 0, E, num_ids, ALL_PAIRS,
        ids_stride_m, ids_stride_k, map_stride,
    )  # fmt: skip
    if e < 0:
        gdc_wait(PDL)
        return
    W: gl.constexpr = word_layout(BLOCK_N, K_CHUNK, NUM_WARPS)
    column = gl.program_id(1) * BLOCK_I
    row = weight_rows(column, I, BLOCK_N, GATED, INTERLEAVED, gl.SliceLayout(1, W))
    expert64 = e.to(gl.int64) + gl.zeros_like(row).to(gl.int64)
    X: gl.constexpr = token_layout(K_CHUNK, NUM_WARPS)
    x_ptrs = x_ptr.to(gl.pointer_type(gl.int32))
    x_ptrs += gl.expand_dims(gl.arange(0, K_CHUNK // 2, gl.SliceLayout(0, X)), 0)
    w_ptrs = weight_pointers(w_ptr, row, expert64, w_stride_e, w_stride_n, W)
    scale_ptrs = scale_pointers(
        w_scale_ptr, row, expert64, w_scale_stride_e, w_scale_stride_n, w_scale_stride_g,
        SCALE_GROUP, K_CHUNK, BLOCK_N, NUM_WARPS,
    )  # fmt: skip
    sums = token_products(
        w_ptrs, True, scale_ptrs, w_scale_stride_g,
        x_ptrs.broadcast_to((NUM_WARPS, K_CHUNK // 2)), True,
        FORMAT, SCALE, SCALE_GROUP, CHUNKS, K_CHUNK, AT_ONCE, AHEAD, NUM_WARPS, PDL,
    )  # fmt: skip
    if topk_weights_ptr is not None:
        sums *= gl.load(topk_weights_ptr + pair * topk_weights_stride_k).to(gl.float32)
    if bias_ptr is not None:
        bias_ptr += e.to(gl.int64) * bias_stride_e
        row = gl.convert_layout(row, sums.type.layout)
        sums += gl.load(bias_ptr + row * bias_stride_n).to(gl.float32)
    if GATED:
        gate, up = sums.reshape((BLOCK_I // 8, 2, 8)).permute((0, 2, 1)).split()
        h = activate_two(
            gate.reshape((BLOCK_I,)), up.reshape((BLOCK_I,)), alpha, beta, limit, ACTIVATION,
            HAS_LIMIT,
        )  # fmt: skip
    else:
        h = activate_one(sums, ACTIVATION)
    i = column + gl.arange(0, BLOCK_I, h.type.layout)
    h_ptrs = h_ptr + pair.to(gl.int64) * I + i
    gl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=i < I)


@arguments
class Gemm2:
    out: Pointer  # (N,), written
    h: Pointer  # (TOP_K, K)
    w: Pointer  # (E, N, bytes of K columns)
    pointers: ScaledPointers
    routing: TokenRouting  # with router weights, if they scale outputs
    N: Specialized
    out_stride_n: Specialized
    strides: ScaledStrides
    TOP_K: Constant
    NUM_BLOCKS: Constant  # of experts: meta/blocks.py
    decoding: Decoding
    tile: TokenTile
    PDL: Constant


@kernel(Gemm2, jit=gluon.jit)
def moe_ops_token_gemm2(
    out_ptr,
    h_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    ids_ptr,
    map_ptr,
    topk_weights_ptr,
    E,
    num_ids,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    topk_weights_stride_k,
    N,
    out_stride_n,
    w_stride_e,
    w_stride_n,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_g,
    bias_stride_e,
    bias_stride_n,
    TOP_K: gl.constexpr,
    NUM_BLOCKS: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_GROUP: gl.constexpr,
    CHUNKS: gl.constexpr,
    K_CHUNK: gl.constexpr,
    AT_ONCE: gl.constexpr,
    AHEAD: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """out = sum over the token's experts of router weight * (h @ w2.T + bias), as
    `moe_ops_combine` adds it. Grid: tiles of 16 columns; each expert has a warp.

    The kernel before this one writes h alone, so all else is loaded before gdc_wait.
    """
    BLOCK_N: gl.constexpr = 16 * NUM_WARPS
    tile = gl.program_id(0) * 16
    W: gl.constexpr = word_layout(BLOCK_N, K_CHUNK, NUM_WARPS)
    r = gl.arange(0, BLOCK_N, gl.SliceLayout(1, W))
    e = local_expert(
        ids_ptr, map_ptr, r // 16, r // 16 < TOP_K, E, num_ids, ALL_PAIRS,
        ids_stride_m, ids_stride_k, map_stride,
    )  # fmt: skip
    row = gl.minimum(tile + r % 16, N - 1)
    here = gl.expand_dims(e >= 0, 1)
    expert64 = gl.maximum(e, 0).to(gl.int64)
    w_ptrs = weight_pointers(w_ptr, row, expert64, w_stride_e, w_stride_n, W)
    scale_ptrs = scale_pointers(
        w_scale_ptr, row, expert64, w_scale_stride_e, w_scale_stride_n, w_scale_stride_g,
        SCALE_GROUP, K_CHUNK, BLOCK_N, NUM_WARPS,
    )  # fmt: skip
    X: gl.constexpr = token_layout(K_CHUNK, NUM_WARPS)
    slot = gl.arange(0, NUM_WARPS, gl.SliceLayout(1, X))
    e = local_expert(
        ids_ptr, map_ptr, slot, slot < TOP_K, E, num_ids, ALL_PAIRS,
        ids_stride_m, ids_stride_k, map_stride,
    )  # fmt: skip
    h_ptrs = h_ptr.to(gl.pointer_type(gl.int32))
    h_ptrs += gl.expand_dims(slot * (CHUNKS * K_CHUNK // 2), 1)
    h_ptrs += gl.expand_dims(gl.arange(0, K_CHUNK // 2, gl.SliceLayout(0, X)), 0)
    found, weights, experts = (), (), ()
    for j in gl.static_range(TOP_K):
        pair = gl.to_tensor(j)
        of_pair = local_expert(
            ids_ptr, map_ptr, pair, pair >= 0, E, num_ids, ALL_PAIRS,
            ids_stride_m, ids_stride_k, map_stride,
        )  # fmt: skip
        found += (of_pair >= 0,)  # type: ignore[assignment]
        experts += (  # type: ignore[assignment]
            expert_of_pair(ids_ptr, pair, ALL_PAIRS, ids_stride_m, ids_stride_k, NUM_BLOCKS),
        )
        if topk_weights_ptr is not None:
            weight_ptr = topk_weights_ptr + pair * topk_weights_stride_k
            weights += (gl.load(weight_ptr, mask=of_pair >= 0, other=0.0).to(gl.float32),)  # type: ignore[assignment]
    bias = gl.zeros_like(row).to(gl.float32)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert64 * bias_stride_e + row * bias_stride_n
        bias = gl.load(bias_ptrs).to(gl.float32)
    y = token_products(
        w_ptrs, here, scale_ptrs, w_scale_stride_g, h_ptrs, gl.expand_dims(e >= 0, 1),
        FORMAT, SCALE, SCALE_GROUP, CHUNKS, K_CHUNK, AT_ONCE, AHEAD, NUM_WARPS, PDL,
    )  # fmt: skip
    gdc_launch_dependents(PDL)
    if bias_ptr is not None:
        y += gl.convert_layout(bias, y.type.layout)
    shared = gl.allocate_shared_memory(
        gl.float32, [BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    shared.store(y)
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    terms = ()
    for j in gl.static_range(TOP_K):
        term = shared.slice(j * 16, 16).load(OUT)
        terms += (gl.where(found[j], term, 0.0),)  # type: ignore[assignment]
    total = add_terms(
        gl.zeros([16], gl.float32, OUT), terms, weights, experts, num_ids, TOP_K,
        topk_weights_ptr is not None, NUM_BLOCKS,
    )  # fmt: skip
    column = tile + gl.arange(0, 16, OUT)
    out_ptrs = out_ptr + column.to(gl.int64) * out_stride_n
    gl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=column < N)


@lru_cache(maxsize=1024)
def _why_not(
    formats: tuple[Format, ...], columns: tuple[int, ...], chunks: tuple[int, ...], top_k: int
) -> str | None:
    """The part of `why_not` that is the same for every call."""
    if any([of.bits != 4 or of.scale not in ("weight", "sum", "e8m0") for of in formats]):
        return "one token has kernels of its own with weights in int4 and mxfp4 alone"
    if any([K % chunk for K, chunk in zip(columns, chunks, strict=True)]):
        return f"rows of weights must be whole chunks of {chunks} columns, got {columns}"
    if top_k > MAX_TOP_K:
        return f"the token must have at most {MAX_TOP_K} experts, got {top_k}"
    most = (MAX_CHUNKS, min(MAX_CHUNKS, MAX_PROGRAM_CHUNKS // token_slots(top_k)))
    if any([n * chunk < K for K, n, chunk in zip(columns, most, chunks, strict=True)]):
        return f"rows of weights must have at most {most} chunks of {chunks} columns"
    return None


def why_not(x: Tensor, w13: MixedOperand, w2: MixedOperand, top_k: int) -> str | None:
    """Why the kernels cannot run a layer of one token that those of sm90_wgmma.py can, or None."""
    if x.stride(1) != 1 or x.data_ptr() % 4:
        return "the token must be contiguous and start at a multiple of 4 bytes"
    if w13.has_zero or w2.has_zero or w13.stride[2] != 1 or w2.stride[2] != 1:
        return "weights must have contiguous rows and no zero points"
    if (w13.scale.data_ptr() | w2.scale.data_ptr()) % 16:
        return "scales must start at multiples of 16 bytes"
    formats = (w13.wgmma_format, w2.wgmma_format)
    return _why_not(formats, (w13.K, w2.K), (w13.k_chunk, w2.k_chunk), top_k)


def _tile(w: MixedOperand, config: GemmConfig) -> TokenTile:
    chunks, at_once = w.K // w.k_chunk, 1
    if w.wgmma_format.group == w.k_chunk and w.scale.element_size() == 2:
        at_once = math.gcd(8, w.scale_align, chunks)
    ahead = min(config.num_stages, chunks)
    return TokenTile(chunks, w.k_chunk, at_once, ahead, config.num_warps)


def _strides(w: MixedOperand) -> ScaledStrides:
    stride_e, stride_n, _ = w.stride
    se, sn, sg, *_, be, bn = w.strides
    return ScaledStrides(stride_e, stride_n, se, sn, sg, be, bn)


def _decoding(w: MixedOperand) -> Decoding:
    of = w.wgmma_format
    return Decoding(of.name, of.scale, of.group)


def launches(
    a: ExpertsArgs,
    w13: MixedOperand,
    w2: MixedOperand,
    activation: Activated,
    config: LayerConfig,
    gpu: Gpu,
) -> list[Launch]:
    """Both launches of a layer of one token."""
    x, ids, out = a.hidden_states, a.topk_ids, a.out
    N, I = w2.N, w2.K  # noqa: E741
    top_k = ids.shape[1]
    h = flat(a.workspace13, x.dtype, top_k * I)
    on_input, on_output = route_token(ids, a.expert_map, a.topk_weights, w2.E)
    if a.router_weight_on_input:
        on_input, on_output = on_output, on_input
    first, second = config.gemm1, config.gemm2
    args1 = Gemm1(
        h=h,
        x=x,
        w=w13.data,
        pointers=ScaledPointers(w13.scale, w13.pointers.bias),
        routing=on_input,
        I=I,
        strides=_strides(w13),
        activation=activation,
        decoding=_decoding(w13),
        tile=_tile(w13, first),
        PDL=gpu.pdl,
    )
    args2 = Gemm2(
        out=out,
        h=h,
        w=w2.data,
        pointers=ScaledPointers(w2.scale, w2.pointers.bias),
        routing=on_output,
        N=N,
        out_stride_n=out.stride(1),
        strides=_strides(w2),
        TOP_K=top_k,
        NUM_BLOCKS=a.num_blocks,
        decoding=_decoding(w2),
        tile=_tile(w2, second),
        PDL=gpu.pdl,
    )
    block_i = first.block_n // 2 if activation.GATED else first.block_n
    grid1, grid2 = (top_k, cdiv(I, block_i), 1), (cdiv(N, 16), 1, 1)
    return [
        Launch(moe_ops_token_gemm1, grid1, args1, first.num_warps),
        Launch(moe_ops_token_gemm2, grid2, args2, second.num_warps),
    ]
