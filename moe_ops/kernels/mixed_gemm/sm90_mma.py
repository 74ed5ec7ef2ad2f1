"""A layer of one bf16 token and weights of 4 bits, in two launches of `mma.sync`. Imported
at first launch only, if the installed Triton compiles Gluon (`configs.on_sm90`).

As in sm90_wgmma.py weights are the left operand and are decoded in the order in which they lie in
memory. Each thread copies its own through shared memory: the 16 bytes of a row and chunk are its
fragments. An instruction multiplies 16 rows of weights with eight columns, all of which are x. In
GEMM2 each of the token's experts has warps with its own row of h, so that a program sums over
experts what its warps multiplied. Until then no warp waits for another, but for all of h.

SPLIT warps share 16 rows, each for a part of their columns, which begin at a whole group. Where
these are as many as `MixedOperand.segments`, and TWO is off, bits are those of sm90_wgmma.py: the
tensor core adds the 16 products of an instruction alike in `mma.sync` and `wgmma`, and both take
columns in one order, chunk by chunk.

Legend: K columns of the GEMM's input, K_PART those of a warp, DEPTH chunks of weights that a
thread has asked for, BLOCK_N rows of all warps, SLOTS a power of two, at least the token's experts
(TOP_K), TILE_N columns of the output of a program. FORMAT, SCALE and K_CHUNK as in sm90_decode.py.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.kernels.activation import Activated
from moe_ops.kernels.configs import GemmConfig, LayerConfig
from moe_ops.kernels.device.activations import activate_one, activate_two
from moe_ops.kernels.device.blocks import local_expert
from moe_ops.kernels.device.gluon import (
    async_copy,
    barrier,
    copy_elements,
    gl,
    gluon,
    keep_loads_before,
    mma_v2,
    reinterpret,
    wait_warp_copies,
)
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.device.permutation import log2
from moe_ops.kernels.device.sums import add_terms, expert_of_pair
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
from moe_ops.kernels.mixed_gemm.configs import MAX_TOP_K, token_slots
from moe_ops.kernels.mixed_gemm.operands import (
    Decoding,
    Format,
    MixedOperand,
    MixedPointers,
    MixedStrides,
)
from moe_ops.kernels.mixed_gemm.sm90_decode import (
    decode_weights,
    grouped_layout,
    groups_per_chunk,
    scale_rows,
    scales_per_element,
)
from moe_ops.kernels.mixed_gemm.sm90_mainloop import (
    apply_row_scales,
    group_index,
    is_widened,
    unpack_scale,
    unshifted,
    widen_scale,
)
from moe_ops.kernels.place.routing import TokenRouting, route_token
from moe_ops.kernels.rows.scales import flat
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


@gluon.constexpr_function
def copy_layout(ROWS, PAIRS, NUM_WARPS):
    """Layout (ROWS, pairs of columns) in which chunks of rows of x go to shared memory, 16 bytes a
    thread. Where there are as many rows as warps, each has its own.
    """
    lanes = 32 if ROWS == NUM_WARPS else PAIRS // 4
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [NUM_WARPS, 1], [1, 0])


@gluon.constexpr_function
def row_layout(ROWS, PAIRS, NUM_WARPS):
    """Layout (ROWS,) of what the rows of `copy_layout` share."""
    return gl.SliceLayout(1, copy_layout(ROWS, PAIRS, NUM_WARPS))


@gluon.constexpr_function
def rows_of_h(K_PART, K_CHUNK, DEPTH, NUM_WARPS, SLOTS):
    """Chunks of rows of h that GEMM2 brings to shared memory at a time: one for each warp, or all
    of its rounds, of each warp a power of two.

    All are faster where a warp takes several rounds of weights and a token has few experts; of six
    experts they are slower.
    """
    chunks = (K_PART + K_CHUNK - 1) // K_CHUNK
    rounds = (chunks + DEPTH - 1) // DEPTH
    rows = NUM_WARPS << (rounds * DEPTH - 1).bit_length()
    whole = chunks > DEPTH and SLOTS <= 4 and NUM_WARPS == 8 and rows * K_CHUNK * 2 <= 65536
    return rows if whole else NUM_WARPS


@gluon.constexpr_function
def step_of(DEPTH):
    """Chunks that a thread asks for together in the rounds after the first one, of DEPTH a round:
    the compiler puts a barrier before they are written over others.
    """
    return DEPTH // 2 if DEPTH % 2 == 0 else 1


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
    """Decoded weights (rows, BYTES) as fragments (warps, 16, BYTES). No data movement."""
    BLOCK_N: gl.constexpr = w.shape[0]
    BYTES: gl.constexpr = w.shape[1]
    w = w.reshape((BLOCK_N, 4, BYTES // 16, 2, 2)).permute((0, 2, 3, 1, 4))
    return gl.convert_layout(w.reshape((BLOCK_N // 16, 16, BYTES)), A, assert_trivial=True)


@gluon.jit
def operand_words(x):
    """Pairs of columns (rows, pairs) as words of right operands: of eight columns the even ones,
    which meet low nibbles, then the odd ones. A column is beside the one four columns after it.
    """
    ROWS: gl.constexpr = x.shape[0]
    PAIRS: gl.constexpr = x.shape[1]
    first, second = x.reshape((ROWS, PAIRS // 4, 2, 2)).permute((0, 1, 3, 2)).split()
    even = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [first, second],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    odd = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [first, second],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    words = gl.join(even, odd).permute((0, 1, 3, 2)).reshape((ROWS, PAIRS))
    return gl.convert_layout(words, x.type.layout, assert_trivial=True)


@gluon.jit
def right_operands(x, B: gl.constexpr):
    """`operand_words` of a chunk of a row of x for each warp (warps, pairs of columns), as the
    right operands of its two products, all columns of which are x. The order is that of
    `permute_columns` in sm90_wgmma.py. No data movement.
    """
    WARPS: gl.constexpr = x.shape[0]
    PAIRS: gl.constexpr = x.shape[1]
    x = gl.expand_dims(x, 2).broadcast_to((WARPS, PAIRS, 8))
    x = gl.expand_dims(x, 3).broadcast_to((WARPS, PAIRS, 8, 2))
    x = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    # axes: warp, thread, its words of 4 bytes, nibble, low bit of a byte's index, column, high bit
    x = x.reshape((WARPS, 4, PAIRS // 16, 2, 2, 8, 2)).permute((0, 2, 4, 1, 6, 5, 3))
    x0, x1 = x.reshape((WARPS, PAIRS, 8, 2)).split()
    x0 = gl.convert_layout(x0, B, assert_trivial=True)
    return x0, gl.convert_layout(x1, B, assert_trivial=True)


@gluon.jit
def first_column(chunk, K: gl.constexpr, K_CHUNK: gl.constexpr):
    """First column of a chunk. The last chunk of a row overlaps the one before if they would not
    fit, and so do all that would be past the row's end.
    """
    return gl.multiple_of(gl.minimum(chunk * K_CHUNK, K - K_CHUNK), 64)


@gluon.jit
def copy_codes(stage, w_ptrs, here, chunk, K: gl.constexpr, K_CHUNK: gl.constexpr):
    """Ask for a chunk of weights (rows, words) in shared memory, past the row's end for none."""
    ptrs = w_ptrs + gl.multiple_of(first_column(chunk, K, K_CHUNK) // 8, 4)
    copy_elements(stage, ptrs, mask=here & (chunk * K_CHUNK < K))


@gluon.jit
def token_pointers(
    row_ptrs, own_from, here, chunk, K: gl.constexpr, K_CHUNK: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Pointers (rows, pairs of columns) to chunks of rows of x, and whether they are read. Columns
    that the chunk before has are not, nor are chunks past the row's end, rows that are not `here`,
    and pairs of columns before a row's `own_from`, which another warp has.
    """
    PAIRS: gl.constexpr = K_CHUNK // 2
    start = gl.multiple_of(first_column(chunk, K, K_CHUNK) // 2, 32)
    pair = gl.expand_dims(gl.arange(0, PAIRS, gl.SliceLayout(0, LAYOUT)), 0)
    pair += gl.expand_dims(start, 1)
    own = (pair >= gl.expand_dims(chunk * PAIRS, 1)) & (pair >= gl.expand_dims(own_from, 1))
    return gl.expand_dims(row_ptrs, 1) + pair, own & gl.expand_dims(here, 1)


@gluon.jit
def copy_tokens(stage, row_ptrs, own_from, here, chunk, K: gl.constexpr, K_CHUNK: gl.constexpr):
    """Ask for a chunk of a row of x for each warp in shared memory (warps, pairs of columns), with
    zeros where `token_pointers` are not read.
    """
    WARPS: gl.constexpr = stage.shape[0]
    LAYOUT: gl.constexpr = copy_layout(WARPS, stage.shape[1], WARPS)
    chunk += gl.zeros_like(own_from)
    ptrs, mask = token_pointers(row_ptrs, own_from, here, chunk, K, K_CHUNK, LAYOUT)
    copy_elements(stage, ptrs, mask=mask)


@gluon.jit
def load_tokens(
    memory, row_ptrs, own_from, here, K: gl.constexpr, K_CHUNK: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """All chunks of a row of x for each warp, as `operand_words` in shared memory (chunks of
    warps, pairs of columns). Zeros as in `copy_tokens`.
    """
    ROWS: gl.constexpr = memory.shape[0]
    LAYOUT: gl.constexpr = copy_layout(ROWS, memory.shape[1], NUM_WARPS)
    chunk = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) // NUM_WARPS
    ptrs, mask = token_pointers(row_ptrs, own_from, here, chunk, K, K_CHUNK, LAYOUT)
    memory.store(operand_words(gl.load(ptrs, mask=mask, other=0)))


@gluon.constexpr_function
def load_instruction(dtype):
    """PTX that loads a `dtype` into 32 bits. The assembler moves what may come from the read-only
    cache past gdc_wait, which is why this does not say so.
    """
    return f"ld.global.L2::128B.b{dtype.primitive_bitwidth} $0, [$1];"


@gluon.jit
def load_group(
    ptrs, chunk, stride_g, K: gl.constexpr, K_CHUNK: gl.constexpr, COLUMNS: gl.constexpr
):
    """Scales or zero points of a chunk, in 32 bits each. COLUMNS: those of an element."""
    ASSEMBLY: gl.constexpr = load_instruction(ptrs.dtype.element_ty)
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=r,l", [ptrs + group_index(chunk, K, K_CHUNK, COLUMNS) * stride_g],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_neighbours(ptrs, chunk, CHUNKS: gl.constexpr, AT_ONCE: gl.constexpr):
    """Scales of AT_ONCE chunks from `chunk` on, 16 bits each and side by side, as a tuple of words
    of two. Past the row's end they are the last ones.
    """
    ptrs += gl.multiple_of(gl.minimum(chunk, CHUNKS - AT_ONCE), AT_ONCE)
    if AT_ONCE == 2:
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
def load_scales(
    ptrs, chunk, stride_g, j: gl.constexpr, K: gl.constexpr, K_CHUNK: gl.constexpr,
    COLUMNS: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """What is loaded with the j-th of neighbouring chunks, as a tuple: a chunk's scales, or those
    of AT_ONCE chunks with the first of them.
    """
    if AT_ONCE == 1:
        return (load_group(ptrs, chunk, stride_g, K, K_CHUNK, COLUMNS),)
    elif j % AT_ONCE == 0:
        return load_neighbours(ptrs, chunk, (K + K_CHUNK - 1) // K_CHUNK, AT_ONCE)
    else:
        return ()


@gluon.jit
def scale_of_chunk(scales, j: gl.constexpr, AT_ONCE: gl.constexpr):
    """The scales of the j-th of neighbouring chunks, in 32 bits each."""
    if AT_ONCE == 1:
        return scales[j]
    elif j % 2 == 0:
        return scales[j // 2] & 0xFFFF
    else:
        return (scales[j // 2] >> 16) & 0xFFFF


@gluon.jit
def added(acc, d, s, PROMOTE: gl.constexpr):
    """`accumulate` of sm90_mainloop.py."""
    if PROMOTE:
        LAYOUT: gl.constexpr = gl.SliceLayout(2, acc.type.layout)
        s = s.reshape((acc.shape[0], acc.shape[1]))
        s = gl.convert_layout(s, LAYOUT, assert_trivial=True)
        return acc + d * gl.expand_dims(s.to(gl.float32), 2)
    else:
        return d


@gluon.jit
def weight_pointers(
    w_ptr, row, expert64, first, stride_e, stride_n, LAYOUT: gl.constexpr,
    K_CHUNK: gl.constexpr,
):  # fmt: skip
    """Pointers (rows, words) to the chunk of rows of experts that begins at the column `first`.
    Strides are in bytes.
    """
    offset = expert64 * gl.multiple_of(stride_e // 4, 4)
    offset += gl.multiple_of(first // 8, 4)
    offset += row.to(gl.int64) * gl.multiple_of(stride_n // 4, 4)
    word = gl.expand_dims(gl.arange(0, K_CHUNK // 8, gl.SliceLayout(0, LAYOUT)), 0)
    return w_ptr.to(gl.pointer_type(gl.int32)) + gl.expand_dims(offset, 1) + word


@gluon.jit
def group_pointers(
    ptr, row, expert64, first, stride_e, stride_n, stride_g,
    SCALE: gl.constexpr, SCALE_GROUP: gl.constexpr, K_CHUNK: gl.constexpr, BLOCK_N: gl.constexpr,
    NUM_WARPS: gl.constexpr, SIDE_BY_SIDE: gl.constexpr,
):  # fmt: skip
    """Pointers (BLOCK_N, elements of a chunk) to the scales or zero points of the chunk that
    begins at the column `first`.

    SIDE_BY_SIDE: in the order of backends/triton/relayout.py.
    """
    GROUPS: gl.constexpr = groups_per_chunk(K_CHUNK, SCALE_GROUP) // scales_per_element(
        ptr.dtype.element_ty, SCALE
    )
    LAYOUT: gl.constexpr = gl.SliceLayout(
        2, grouped_layout(BLOCK_N, K_CHUNK // 2, NUM_WARPS, GROUPS)
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    group = gl.expand_dims(gl.arange(0, GROUPS, gl.SliceLayout(0, LAYOUT)), 0)
    row = gl.expand_dims(gl.convert_layout(row, ROWS), 1).to(gl.int64)
    offset = gl.expand_dims(gl.convert_layout(expert64, ROWS), 1) * stride_e
    if SCALE_GROUP > 0:
        COLUMNS: gl.constexpr = element_columns(ptr.dtype.element_ty, SCALE, SCALE_GROUP)
        offset += gl.expand_dims(gl.convert_layout(first // COLUMNS, ROWS), 1) * stride_g
    if ptr.dtype.element_ty.primitive_bitwidth == 8:
        ptr = ptr.to(gl.pointer_type(gl.uint8))
    if SIDE_BY_SIDE:
        R: gl.constexpr = scale_rows(SCALE_GROUP)
        in_rows = row % R * 2 + group % 2 + group // 2 * (2 * R)
        return ptr + (offset + row // R * stride_n + in_rows)
    else:
        return ptr + (offset + row * stride_n + group * stride_g)


@gluon.constexpr_function
def element_columns(dtype, SCALE, SCALE_GROUP):
    """Columns of a row that an element of scales belongs to."""
    return SCALE_GROUP * scales_per_element(dtype, SCALE)


@gluon.jit
def token_products(
    w_ptrs,  # (BLOCK_N, words), of the first chunk
    here,  # whether weights of rows are read: (BLOCK_N, 1) or one for all
    scale_ptrs,  # (BLOCK_N, elements of a chunk), of the first chunk
    zero_ptrs,  # as scale_ptrs, or None
    scale_stride_g,
    zero_stride_g,
    x_ptrs,  # (X_ROWS,), in pairs of columns, of each warp's row of x, for all chunks or for one
    x_from,  # (X_ROWS,) pairs of columns before it are zero
    x_here,  # (X_ROWS,) whether it is read
    X_FIRST: gl.constexpr,  # x is older than the kernel before: it is copied before weights
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_GROUP: gl.constexpr,
    K: gl.constexpr,
    K_CHUNK: gl.constexpr,
    AT_ONCE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DEPTH: gl.constexpr,
    TWO: gl.constexpr,  # the two products of a chunk are summed apart
    NUM_WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """w @ x (BLOCK_N, 1) in fp32, of each warp's rows and its row of x, as `mainloop` of
    sm90_mainloop.py computes it. The caller applies the scales of whole rows.
    """
    MMA: gl.constexpr = mma_layout(NUM_WARPS)
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    X: gl.constexpr = token_layout(K_CHUNK, NUM_WARPS)
    GROUPS: gl.constexpr = groups_per_chunk(K_CHUNK, SCALE_GROUP)
    PROMOTE: gl.constexpr = SCALE == "sum"
    HAS_ZERO: gl.constexpr = zero_ptrs is not None
    SCALE_DTYPE: gl.constexpr = scale_ptrs.dtype.element_ty
    WIDEN: gl.constexpr = is_widened(SCALE_DTYPE) if PROMOTE else False
    S_COLUMNS: gl.constexpr = element_columns(SCALE_DTYPE, SCALE, SCALE_GROUP)
    CHUNKS: gl.constexpr = (K + K_CHUNK - 1) // K_CHUNK
    gl.static_assert(BLOCK_N == 16 * NUM_WARPS)
    gl.static_assert(not (TWO and PROMOTE))  # sums of groups would need scales in both
    WORDS: gl.constexpr = word_layout(BLOCK_N, K_CHUNK, NUM_WARPS)
    PAIRS: gl.constexpr = K_CHUNK // 2
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ALL: gl.constexpr = DEPTH >= CHUNKS
    STEP: gl.constexpr = DEPTH if ALL else step_of(DEPTH)
    X_ROWS: gl.constexpr = x_ptrs.shape[0]
    WHOLE: gl.constexpr = X_ROWS > NUM_WARPS
    gl.static_assert(not (WHOLE and X_FIRST))
    # a buffer for each chunk: between copies into parts of one, programs would be synchronized
    codes, rows = (), ()
    for _ in gl.static_range(DEPTH):
        codes += (gl.allocate_shared_memory(gl.int32, [BLOCK_N, K_CHUNK // 8], FLAT),)  # type: ignore[assignment]
        if not WHOLE:
            rows += (gl.allocate_shared_memory(gl.int32, [NUM_WARPS, PAIRS], FLAT),)  # type: ignore[assignment]
    first = gl.to_tensor(0)
    if X_FIRST:
        gdc_wait(PDL)
    scales, zeros = (), ()
    for j in gl.static_range(DEPTH):
        scales += load_scales(
            scale_ptrs, first + j, scale_stride_g, j, K, K_CHUNK, S_COLUMNS, AT_ONCE
        )
        if HAS_ZERO:
            zeros += (load_group(zero_ptrs, first + j, zero_stride_g, K, K_CHUNK, SCALE_GROUP),)  # type: ignore[assignment]
    if AT_ONCE > 1:  # few loads: else they come back after all that is copied
        keep_loads_before()
    for j in gl.static_range(DEPTH):
        copy_codes(codes[j], w_ptrs, here, first + j, K, K_CHUNK)
        if X_FIRST:
            copy_tokens(rows[j], x_ptrs, x_from, x_here, first + j, K, K_CHUNK)
        if X_FIRST or WHOLE:
            async_copy.commit_group()
    if not X_FIRST:
        gdc_wait(PDL)
    all_rows = None
    if WHOLE:
        all_rows = gl.allocate_shared_memory(
            gl.int32, [X_ROWS // NUM_WARPS, NUM_WARPS, PAIRS], FLAT
        )
        memory = reinterpret(all_rows, gl.int32, [X_ROWS, PAIRS], FLAT)
        load_tokens(memory, x_ptrs, x_from, x_here, K, K_CHUNK, NUM_WARPS)
    elif not X_FIRST:
        for j in gl.static_range(DEPTH):
            copy_tokens(rows[j], x_ptrs, x_from, x_here, first + j, K, K_CHUNK)
            async_copy.commit_group()
    # Of what threads copy to shared memory, a warp reads nothing but its own. The compiler, which
    # does not know it, needs a barrier between copies and reads: one, before any has arrived.
    barrier()
    acc = gl.zeros([NUM_WARPS, 16, 8], gl.float32, MMA)
    other = acc
    for start in range(0, CHUNKS, DEPTH):
        next_scales, next_zeros = (), ()
        for j in gl.static_range(DEPTH):
            chunk = start + j
            s = scale_of_chunk(scales, j, AT_ONCE)
            s = widen_scale(s, SCALE_DTYPE) if WIDEN else unpack_scale(s, SCALE_DTYPE)
            z = s
            if HAS_ZERO:
                z = unpack_scale(zeros[j], zero_ptrs.dtype.element_ty)
            wait_warp_copies(DEPTH - 1 - j % STEP)
            w0, w1 = decode_weights(
                bytes_of_words(codes[j].load(WORDS)),
                None,
                s,
                z,
                None,
                GROUPS,
                NUM_WARPS,
                FORMAT,
                SCALE,
                HAS_ZERO,
            )
            x = all_rows.index(chunk).load(X) if WHOLE else operand_words(rows[j].load(X))
            x0, x1 = right_operands(x, B)
            d = acc
            if PROMOTE:
                d = gl.zeros([NUM_WARPS, 16, 8], gl.float32, MMA)
            d = mma_v2(left_operand(w0, A), x0, d)
            if TWO:
                other = mma_v2(left_operand(w1, A), x1, other)
            else:
                d = mma_v2(left_operand(w1, A), x1, d)
            acc = added(acc, d, s, PROMOTE)
            if not ALL:
                if (j + 1) % STEP == 0:
                    for i in gl.static_range(j + 1 - STEP, j + 1):
                        ahead = start + (i + DEPTH)
                        copy_codes(codes[i], w_ptrs, here, ahead, K, K_CHUNK)
                        if not WHOLE:
                            copy_tokens(rows[i], x_ptrs, x_from, x_here, ahead, K, K_CHUNK)
                        async_copy.commit_group()
                ahead = chunk + DEPTH
                next_scales += load_scales(
                    scale_ptrs, ahead, scale_stride_g, j, K, K_CHUNK, S_COLUMNS, AT_ONCE
                )
                if HAS_ZERO:
                    z = load_group(zero_ptrs, ahead, zero_stride_g, K, K_CHUNK, SCALE_GROUP)
                    next_zeros += (z,)
        if not ALL:
            scales, zeros = next_scales, next_zeros
    if not ALL:  # what is summed next may use the memory that copies past the row's end fill
        async_copy.wait_group(0)
    if TWO:
        acc += other
    acc = unshifted(acc, FORMAT, SCALE)
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, MMA)))
    first = gl.expand_dims(gl.expand_dims(column == 0, 0), 0)
    return gl.sum(gl.where(first, acc, 0.0), 2).reshape((BLOCK_N, 1))


@gluon.jit
def weight_rows(
    column, I, ROWS: gl.constexpr, SPLIT: gl.constexpr, GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Rows of w13 of a tile of ROWS whose first output column is `column` of I, 16 of them for
    SPLIT warps in turn.
    """
    r = gl.arange(0, ROWS * SPLIT, LAYOUT)
    r = r // (16 * SPLIT) * 16 + r % 16
    i, up = r, r * 0
    if GATED:
        i, up = r // 16 * 8 + r % 8, r // 8 % 2
    i = gl.minimum(column + i, I - 1)
    return 2 * i + up if INTERLEAVED else i + up * I


@gluon.jit
def first_of_part(part, K: gl.constexpr, SPLIT: gl.constexpr, K_PART: gl.constexpr):
    """First column of one of SPLIT parts of a row, K_PART columns each. The last one overlaps the
    one before if they are not K in all.
    """
    return gl.multiple_of(gl.minimum(part * K_PART, K - K_PART), 64)


@unprefixed
class TokenTile(NamedTuple):
    """What a GEMM's config and weight decide."""

    K: Constant
    K_PART: Constant  # columns that a warp has
    SPLIT: Constant  # warps that share a row
    TWO: Constant  # the two products of a chunk are summed apart
    K_CHUNK: Constant
    SIDE_BY_SIDE: Constant  # scales are in the order of prepared weights
    AT_ONCE: Constant  # chunks whose scales are loaded together
    BLOCK_N: Constant  # rows of weights of a program
    DEPTH: Constant
    NUM_WARPS: Constant


@unprefixed
class RowStrides(NamedTuple):
    """Strides of a weight whose rows are contiguous."""

    w_stride_e: Specialized
    w_stride_n: Specialized


@arguments
class Gemm1:
    h: Pointer  # (TOP_K, I), written
    x: Pointer  # (K,)
    w: Pointer  # (E, N, bytes of K columns)
    pointers: MixedPointers
    routing: TokenRouting  # with router weights, if they scale the input
    I: Specialized
    row_strides: RowStrides
    strides: MixedStrides
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
    w_zero_ptr,
    w_factor_ptr,
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
    I,
    w_stride_e,
    w_stride_n,
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
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_GROUP: gl.constexpr,
    K: gl.constexpr,
    K_PART: gl.constexpr,
    SPLIT: gl.constexpr,
    TWO: gl.constexpr,
    K_CHUNK: gl.constexpr,
    SIDE_BY_SIDE: gl.constexpr,
    AT_ONCE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DEPTH: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """h = activation(x @ w13.T + bias). Grid: (TOP_K, tiles of BLOCK_N rows of w13)."""
    ROWS: gl.constexpr = BLOCK_N // SPLIT
    BLOCK_I: gl.constexpr = ROWS // 2 if GATED else ROWS
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
    row = weight_rows(column, I, ROWS, SPLIT, GATED, INTERLEAVED, gl.SliceLayout(1, W))
    part = gl.arange(0, BLOCK_N, gl.SliceLayout(1, W)) // 16 % SPLIT
    first = first_of_part(part, K, SPLIT, K_PART)
    expert64 = e.to(gl.int64) + gl.zeros_like(row).to(gl.int64)
    w_ptrs = weight_pointers(w_ptr, row, expert64, first, w_stride_e, w_stride_n, W, K_CHUNK)
    scale_ptrs = group_pointers(
        w_scale_ptr, row, expert64, first, w_scale_stride_e, w_scale_stride_n, w_scale_stride_g,
        SCALE, SCALE_GROUP, K_CHUNK, BLOCK_N, NUM_WARPS, SIDE_BY_SIDE,
    )  # fmt: skip
    zero_ptrs = None
    if w_zero_ptr is not None:
        zero_ptrs = group_pointers(
            w_zero_ptr, row, expert64, first, w_zero_stride_e, w_zero_stride_n, w_zero_stride_g,
            SCALE, SCALE_GROUP, K_CHUNK, BLOCK_N, NUM_WARPS, False,
        )  # fmt: skip
    warp = gl.arange(0, NUM_WARPS, row_layout(NUM_WARPS, K_CHUNK // 2, NUM_WARPS))
    first = first_of_part(warp % SPLIT, K, SPLIT, K_PART)
    x_ptrs = x_ptr.to(gl.pointer_type(gl.int32)) + first // 2
    x_from = (warp % SPLIT * K_PART - first) // 2
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    summed = weight_rows(column, I, ROWS, 1, GATED, INTERLEAVED, OUT)
    bias = (summed * 0).to(gl.float32)
    if bias_ptr is not None:
        bias_ptr += e.to(gl.int64) * bias_stride_e
        bias = gl.load(bias_ptr + summed * bias_stride_n).to(gl.float32)
    acc = token_products(
        w_ptrs, True, scale_ptrs, zero_ptrs, w_scale_stride_g, w_zero_stride_g, x_ptrs, x_from,
        warp >= 0, True, FORMAT, SCALE, SCALE_GROUP, K_PART, K_CHUNK, AT_ONCE, BLOCK_N, DEPTH,
        TWO, NUM_WARPS, PDL,
    )  # fmt: skip
    row = weight_rows(
        column, I, ROWS, SPLIT, GATED, INTERLEAVED, gl.SliceLayout(1, acc.type.layout)
    )
    sums = apply_row_scales(
        acc, w_scale_ptr, w_factor_ptr, e.to(gl.int64), row,
        w_scale_stride_e, w_scale_stride_n, w_factor_stride_e, w_factor_stride_n, FORMAT, SCALE,
    ).reshape((BLOCK_N,))  # fmt: skip
    if SPLIT > 1:
        sums = gl.sum(sums.reshape((ROWS // 16, SPLIT, 16)), 1).reshape((ROWS,))
    if topk_weights_ptr is not None:
        sums *= gl.load(topk_weights_ptr + pair * topk_weights_stride_k).to(gl.float32)
    if bias_ptr is not None:
        sums += gl.convert_layout(bias, sums.type.layout)
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


@unprefixed
class TokenSum(NamedTuple):
    """How the products of a token's experts are added."""

    TOP_K: Constant
    SLOTS: Constant  # rows of a tile have so many experts, of which TOP_K are a token's
    NUM_BLOCKS: Constant  # of experts: meta/blocks.py
    ROUNDED: Constant  # products are rounded to the dtype of h, as sm90_wgmma.py stores them then


@arguments
class Gemm2:
    out: Pointer  # (N,), written
    h: Pointer  # (TOP_K, K)
    w: Pointer  # (E, N, bytes of K columns)
    pointers: MixedPointers
    routing: TokenRouting  # with router weights, if they scale outputs
    N: Specialized
    out_stride_n: Specialized
    row_strides: RowStrides
    strides: MixedStrides
    token: TokenSum
    decoding: Decoding
    tile: TokenTile
    PDL: Constant


@kernel(Gemm2, jit=gluon.jit)
def moe_ops_token_gemm2(
    out_ptr,
    h_ptr,
    w_ptr,
    w_scale_ptr,
    w_zero_ptr,
    w_factor_ptr,
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
    w_zero_stride_e,
    w_zero_stride_n,
    w_zero_stride_g,
    w_factor_stride_e,
    w_factor_stride_n,
    bias_stride_e,
    bias_stride_n,
    TOP_K: gl.constexpr,
    SLOTS: gl.constexpr,
    NUM_BLOCKS: gl.constexpr,
    ROUNDED: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_GROUP: gl.constexpr,
    K: gl.constexpr,
    K_PART: gl.constexpr,
    SPLIT: gl.constexpr,
    TWO: gl.constexpr,
    K_CHUNK: gl.constexpr,
    SIDE_BY_SIDE: gl.constexpr,
    AT_ONCE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DEPTH: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """out = sum over the token's experts of router weight * (h @ w2.T + bias), ROUNDED or not, as
    `moe_ops_combine` adds it. Grid: tiles of TILE_N columns.

    The kernel before this one writes h alone, so weights are loaded before gdc_wait.
    """
    TILE_N: gl.constexpr = BLOCK_N // (SLOTS * SPLIT)
    tile = gl.program_id(0) * TILE_N
    W: gl.constexpr = word_layout(BLOCK_N, K_CHUNK, NUM_WARPS)
    r = gl.arange(0, BLOCK_N, gl.SliceLayout(1, W))
    slot = r // (TILE_N * SPLIT)
    e = local_expert(
        ids_ptr, map_ptr, slot, slot < TOP_K, E, num_ids, ALL_PAIRS,
        ids_stride_m, ids_stride_k, map_stride,
    )  # fmt: skip
    part = r // 16 % SPLIT
    first = first_of_part(part, K, SPLIT, K_PART)
    row = gl.minimum(tile + r // (16 * SPLIT) * 16 % TILE_N + r % 16, N - 1)
    here = gl.expand_dims(e >= 0, 1)
    expert64 = gl.maximum(e, 0).to(gl.int64)
    w_ptrs = weight_pointers(w_ptr, row, expert64, first, w_stride_e, w_stride_n, W, K_CHUNK)
    scale_ptrs = group_pointers(
        w_scale_ptr, row, expert64, first, w_scale_stride_e, w_scale_stride_n, w_scale_stride_g,
        SCALE, SCALE_GROUP, K_CHUNK, BLOCK_N, NUM_WARPS, SIDE_BY_SIDE,
    )  # fmt: skip
    zero_ptrs = None
    if w_zero_ptr is not None:
        zero_ptrs = group_pointers(
            w_zero_ptr, row, expert64, first, w_zero_stride_e, w_zero_stride_n, w_zero_stride_g,
            SCALE, SCALE_GROUP, K_CHUNK, BLOCK_N, NUM_WARPS, False,
        )  # fmt: skip
    H_ROWS: gl.constexpr = rows_of_h(K_PART, K_CHUNK, DEPTH, NUM_WARPS, SLOTS)
    warp = gl.arange(0, H_ROWS, row_layout(H_ROWS, K_CHUNK // 2, NUM_WARPS)) % NUM_WARPS
    slot = warp * 16 // (TILE_N * SPLIT)  # of experts that are not here, h is anything: `found`
    first = first_of_part(warp % SPLIT, K, SPLIT, K_PART)
    h_ptrs = h_ptr.to(gl.pointer_type(gl.int32)) + (slot * (K // 2) + first // 2)
    h_from = (warp % SPLIT * K_PART - first) // 2
    found, weights, experts = (), (), ()
    for j in gl.static_range(TOP_K):
        pair = gl.to_tensor(j)
        e = local_expert(
            ids_ptr, map_ptr, pair, pair >= 0, E, num_ids, ALL_PAIRS,
            ids_stride_m, ids_stride_k, map_stride,
        )  # fmt: skip
        found += (e >= 0,)  # type: ignore[assignment]
        experts += (  # type: ignore[assignment]
            expert_of_pair(ids_ptr, pair, ALL_PAIRS, ids_stride_m, ids_stride_k, NUM_BLOCKS),
        )
        if topk_weights_ptr is not None:
            weight_ptr = topk_weights_ptr + pair * topk_weights_stride_k
            weights += (gl.load(weight_ptr, mask=e >= 0, other=0.0).to(gl.float32),)  # type: ignore[assignment]
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    r = gl.arange(0, BLOCK_N // SPLIT, OUT)
    bias = (r * 0).to(gl.float32)
    if bias_ptr is not None:
        e = local_expert(
            ids_ptr, map_ptr, r // TILE_N, r // TILE_N < TOP_K, E, num_ids, ALL_PAIRS,
            ids_stride_m, ids_stride_k, map_stride,
        )  # fmt: skip
        bias_ptrs = bias_ptr + gl.maximum(e, 0).to(gl.int64) * bias_stride_e
        bias_ptrs += gl.minimum(tile + r % TILE_N, N - 1) * bias_stride_n
        bias = gl.load(bias_ptrs).to(gl.float32)
    acc = token_products(
        w_ptrs, here, scale_ptrs, zero_ptrs, w_scale_stride_g, w_zero_stride_g, h_ptrs, h_from,
        slot < TOP_K, False, FORMAT, SCALE, SCALE_GROUP, K_PART, K_CHUNK, AT_ONCE, BLOCK_N, DEPTH,
        TWO, NUM_WARPS, PDL,
    )  # fmt: skip
    gdc_launch_dependents(PDL)
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    y = apply_row_scales(
        acc, w_scale_ptr, w_factor_ptr,
        gl.convert_layout(expert64, ROWS), gl.convert_layout(row, ROWS),
        w_scale_stride_e, w_scale_stride_n, w_factor_stride_e, w_factor_stride_n, FORMAT, SCALE,
    ).reshape((BLOCK_N,))  # fmt: skip
    if SPLIT > 1:
        y = gl.sum(y.reshape((BLOCK_N // (16 * SPLIT), SPLIT, 16)), 1)
        y = y.reshape((BLOCK_N // SPLIT,))
    if bias_ptr is not None:
        y += gl.convert_layout(bias, y.type.layout)
    if ROUNDED:
        y = y.to(h_ptr.dtype.element_ty).to(gl.float32)
    ONE_ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = gl.allocate_shared_memory(gl.float32, [BLOCK_N // SPLIT], ONE_ROW)
    shared.store(y)
    terms = ()
    for j in gl.static_range(TOP_K):
        term = shared.slice(j * TILE_N, TILE_N).load(OUT)
        terms += (gl.where(found[j], term, 0.0),)  # type: ignore[assignment]
    WEIGHTED: gl.constexpr = topk_weights_ptr is not None
    zero = gl.zeros([TILE_N], gl.float32, OUT)
    total = add_terms(zero, terms, weights, experts, num_ids, TOP_K, WEIGHTED, NUM_BLOCKS)
    column = tile + gl.arange(0, TILE_N, OUT)
    out_ptrs = out_ptr + column.to(gl.int64) * out_stride_n
    gl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=column < N)


def why_not(x: Tensor, w13: MixedOperand, w2: MixedOperand, top_k: int) -> str | None:
    """Why the kernels cannot run a layer of one token that those of sm90_wgmma.py can, or None."""
    if x.stride(1) != 1 or x.data_ptr() % 4:
        return "the token must be contiguous and start at a multiple of 4 bytes"
    if (w13.scale.data_ptr() | w2.scale.data_ptr()) % 16:
        return "scales must start at multiples of 16 bytes"
    if top_k > MAX_TOP_K:
        return f"the token must have at most {MAX_TOP_K} experts, got {top_k}"
    for w in (w13, w2):
        if w.format.bits != 4 or w.wgmma_format.x_bits != 16:
            return "weights must have 4 bits, and activations 16"
        if w.stride[2] != 1:
            return "rows of weights must be contiguous"
    return None


@lru_cache(maxsize=1024)
def _tile(
    of: Format,
    K: int,
    k_chunk: int,
    scale_size: int,
    scale_align: int,
    segments: int,
    config: GemmConfig,
) -> TokenTile:
    """The TokenTile of rows of K columns, with scales of `scale_size` bytes. `segments`: of
    the operand, which has one where any order of sums will do.
    """
    block_n, _, depth, num_warps = config
    split, chunks, at_once = 16 * num_warps // block_n, cdiv(K, k_chunk), 1
    part = K
    if split > 1:
        chunks = cdiv(chunks, split)
        part = chunks * k_chunk
    depth = min(chunks, depth)
    if of.group == k_chunk and split * part == K and K % k_chunk == 0 and scale_size == 2:
        at_once = math.gcd(8, scale_align, depth, chunks)
    shares = (split, split > segments)
    words = of.name == "e2m1_words"
    rows = 16 * num_warps
    return TokenTile(K, part, *shares, k_chunk, words, at_once, rows, depth, num_warps)


def _tile_of(w: MixedOperand, config: GemmConfig) -> TokenTile:
    size = w.scale.element_size()
    return _tile(w.wgmma_format, w.K, w.k_chunk, size, w.scale_align, w.segments, config)


def _scales(w: MixedOperand) -> tuple[MixedPointers, MixedStrides]:
    """Scales as the kernels take them, those of a thread's two groups of e4m3 as one element."""
    pointers, strides, of = w.pointers, w.strides, w.wgmma_format
    if of.scale != "e4m3" or of.group != 16:
        if of.name == "e2m1_words":
            return pointers, strides._replace(w_scale_stride_g=of.group // 4)
        return pointers, strides
    stride_e, stride_n, stride_g = strides[:3]
    scale = w.scale
    if of.name == "e2m1_words":
        stride_g = 1
    odd = stride_e | stride_n | int(scale.storage_offset()) | scale.data_ptr()
    if stride_g != 1 or odd % 2:
        return pointers, strides
    pointers = MixedPointers(scale.view(torch.int16), *pointers[1:])
    step = of.group // 4 if of.name == "e2m1_words" else 1
    return pointers, MixedStrides(stride_e // 2, stride_n // 2, step, *strides[3:])


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
    E, N, I = w2.E, w2.N, w2.K
    top_k = ids.shape[1]
    slots = token_slots(top_k)
    h = flat(a.workspace13, x.dtype, top_k * I)
    on_input, on_output = route_token(ids, a.expert_map, a.topk_weights, E)
    if a.options.router_weight_on_input:
        on_input, on_output = on_output, on_input
    first, second = _tile_of(w13, config.gemm1), _tile_of(w2, config.gemm2)
    pointers, strides = _scales(w13)
    args1 = Gemm1(
        h=h,
        x=x,
        w=w13.data,
        pointers=pointers,
        routing=on_input,
        I=I,
        row_strides=RowStrides(*w13.stride[:2]),
        strides=strides,
        activation=activation,
        decoding=_decoding(w13),
        tile=first,
        PDL=gpu.pdl,
    )
    pointers, strides = _scales(w2)
    args2 = Gemm2(
        out=out,
        h=h,
        w=w2.data,
        pointers=pointers,
        routing=on_output,
        N=N,
        out_stride_n=out.stride(1),
        row_strides=RowStrides(*w2.stride[:2]),
        strides=strides,
        token=TokenSum(top_k, slots, a.num_blocks, a.options.batch_invariant),
        decoding=_decoding(w2),
        tile=second,
        PDL=gpu.pdl,
    )
    rows = first.BLOCK_N // first.SPLIT
    block_i = rows // 2 if activation.GATED else rows
    grid1 = (top_k, cdiv(I, block_i), 1)
    grid2 = (cdiv(N, second.BLOCK_N // (slots * second.SPLIT)), 1, 1)
    return [
        Launch(moe_ops_token_gemm1, grid1, args1, first.NUM_WARPS),
        Launch(moe_ops_token_gemm2, grid2, args2, second.NUM_WARPS),
    ]


def _decoding(w: MixedOperand) -> Decoding:
    of = w.wgmma_format
    return Decoding(of.name, of.scale, of.group)
