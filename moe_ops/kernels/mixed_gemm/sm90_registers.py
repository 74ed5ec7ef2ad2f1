"""x @ w on SM90 with decoded weights in registers, of weights of 4 bits, for backward passes: the
left operand of `wgmma` are weights, the right one rows of x in shared memory, so that sums are
those of y.T. Imported at first launch only, if the installed Triton compiles Gluon
(`mixed_gemm.configs.on_sm90`).

Legend as in packed.py. Tiles must divide the columns of x and of y, and the rank be that of a box.
Rows of x and packed weights come by TMA into rings of stages. `ldmatrix.trans` brings four codes
of two neighbouring rows of the weight in 32 bits, which are two times two numbers of an operand.
So a program has two halves of 64 columns of y, the even and the odd ones, each with sums of
BLOCK_M rows; it decodes one half of a step while the products of the other one run. Scales of a
step go through shared memory, as numbers of bf16 in the order in which a thread needs them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.kernels.configs import GROUP_M, LEVELS
from moe_ops.kernels.device.blocks import block_and_tile
from moe_ops.kernels.device.gluon import (
    async_load,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from moe_ops.kernels.device.permutation import log2
from moe_ops.kernels.launch import (
    Constant,
    Descriptor,
    Launch,
    Pointer,
    Runtime,
    Specialized,
    arguments,
    kernel,
    unprefixed,
)
from moe_ops.kernels.mixed_gemm.columns import (
    INT4_SHIFT,
    MINUS_EIGHT,
    MINUS_ZERO,
    fma_words,
)
from moe_ops.kernels.mixed_gemm.decode import SUPER, factors_above, in_one_level
from moe_ops.kernels.mixed_gemm.levels import (
    byte_words,
    has_whole_levels,
    is_level,
    table_words,
    words_of_levels,
)
from moe_ops.kernels.mixed_gemm.operands import (
    Decoding,
    MixedOperand,
    MixedPointers,
    MixedStrides,
)
from moe_ops.kernels.mixed_gemm.packed import (
    BLOCK_M,
    BLOCK_OUT,
    STEP,
    decoding_of,
    scales_of_rows,
)
from moe_ops.kernels.mixed_gemm.sm90_levels import write_pairs
from moe_ops.kernels.mixed_gemm.sm90_mainloop import advance_slot
from moe_ops.kernels.mixed_gemm.sm90_packed import (
    MINUS_128,
    LowRankBoxes,
    expect_packed,
    load_packed,
    low_rank_boxes,
    matrix_boxes,
    shift,
    why_not,
)
from moe_ops.kernels.place.routing import Routing

FORMATS = ("int4", *LEVELS)
NUM_WARPS = 4  # two programs share a multiprocessor
NUM_STAGES, PACKED_STAGES = 4, 4
TABLED = ("nf4",)  # looked up in shared memory too, where a rank leaves room for a table
TABLE_RANK = 16
TWO_TO_69, TWO_TO_65 = gl.constexpr(0x62006200), gl.constexpr(0x60006000)  # in bf16, twice


@gluon.constexpr_function
def code_layout():
    """Layout of a tile (64 rows, 32 times 4 codes in 16 bits), as `ldmatrix.trans` brings it."""
    registers = [[1, 0], [8, 0], [16, 0], [32, 0]]
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 8], [0, 16]], [], [64, 32])


@gluon.constexpr_function
def pair_layout():
    """Layout (instruction, thread, 16 bits of codes) of pairs of rows."""
    registers = [[1, 0, 0], [2, 0, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 8], [0, 0, 16]], [], [4, 4, 32])


@gluon.constexpr_function
def pair_scale_layout(GROUPS):
    """Layout (GROUPS, 32) of pairs of scales in the threads whose codes they multiply: 8 words for
    each of four threads.
    """
    each = 32 // GROUPS  # times 4 codes of a group

    def split(place):
        return [0, place, 0] if place < each else [place // each, 0, 0]

    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    lanes = [[0, 0, 8], [0, 0, 16], split(1), split(2), split(4)]
    warps = [split(8), split(16)]
    parent = gl.DistributedLinearLayout(registers, lanes, warps, [], [GROUPS, each, 32])
    return gl.SliceLayout(1, parent)


@gluon.constexpr_function
def loaded_scales(GROUPS, NUM_WARPS):
    """Layout (64, GROUPS) in which scales of a step are loaded."""
    return gl.BlockedLayout([1, 1], [32 // GROUPS, GROUPS], [NUM_WARPS, 1], [1, 0])


@gluon.jit
def load_codes(smem):
    """Codes of two pairs of neighbouring rows each, (first pair, second pair), 8 rows apart, of
    `pair_layout`: those of the even row in the low 16 bits.
    """
    codes = smem.load(code_layout())
    codes = codes.reshape((4, 2, 4, 2, 32)).permute((0, 2, 4, 1, 3))
    even, odd = codes.split()
    words = (even.to(gl.int32) & 0xFFFF) | (odd.to(gl.int32) << 16)
    first, second = words.split()
    PAIRS: gl.constexpr = pair_layout()
    first = gl.convert_layout(first, PAIRS, assert_trivial=True)
    return first, gl.convert_layout(second, PAIRS, assert_trivial=True)


@gluon.jit
def in_thread_order(s):
    """Scales (64, GROUPS) as (GROUPS, 64): those of a thread side by side."""
    GROUPS: gl.constexpr = s.shape[1]
    s = s.reshape((4, 2, 4, 2, GROUPS)).permute((4, 2, 0, 1, 3))
    return s.reshape((GROUPS, 64))


@gluon.jit
def load_pairs(smem, GROUPS: gl.constexpr):
    """Pairs of scales of `load_codes` (first pair, second pair), of words (GROUPS, 32)."""
    s = smem.load(pair_scale_layout(GROUPS))
    s = gl.expand_dims(s, 1).broadcast_to((GROUPS, 32 // GROUPS, 32))
    first, second = s.reshape((32, 4, 4, 2)).permute((2, 1, 0, 3)).split()
    PAIRS: gl.constexpr = pair_layout()
    first = gl.convert_layout(first, PAIRS, assert_trivial=True)
    return first, gl.convert_layout(second, PAIRS, assert_trivial=True)


@gluon.constexpr_function
def nibble_assembly(ODD):
    """Two of the four codes in each half of $2: the even or the odd ones, times $3 plus $4."""
    mask = "0x00f000f0" if ODD else "0x000f000f"
    return f"""{{
        .reg .b32 a, b;
        shr.u32 b, $2, 8; and.b32 a, $2, {mask}; and.b32 b, b, {mask};
        fma.rn.bf16x2 $0, a, $3, $4; fma.rn.bf16x2 $1, b, $3, $4;
        }}"""


@gluon.jit
def nibbles(words, factors, offsets, ODD: gl.constexpr):
    """Of words of `load_codes` pairs of codes 0 and 2, or of codes 1 and 3."""
    ASSEMBLY: gl.constexpr = nibble_assembly(ODD)
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=&r,=&r,r,r,r", [words, factors, offsets], dtype=(gl.int32, gl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip


INTERLEAVED = gl.constexpr("""{
        .reg .b32 a, b, c;
        prmt.b32 a, $2, $3, 0x5410; prmt.b32 b, $2, $3, 0x7632;
        shl.b32 c, b, 4; lop3.b32 $0, a, c, 0x0f0f0f0f, 0xe4;
        shr.u32 c, a, 4; lop3.b32 $1, c, b, 0x0f0f0f0f, 0xe4;
        }""")


@gluon.jit
def interleaved(first, second):
    """Of `load_codes` words of eight codes, in turns of two neighbouring rows: codes 0 and 2 of
    the first pair of rows and of the second one; then codes 1 and 3.
    """
    return gl.inline_asm_elementwise(
        INTERLEAVED, "=&r,=&r,r,r", [first, second], dtype=(gl.int32, gl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def scaled_pairs(w, high, low, middle):
    """w times scales that are sums of two numbers of bf16, or one, plus a third."""
    if low is None:
        return fma_words(w, high, middle)
    else:
        return fma_words(w, high, fma_words(w, low, middle))


@gluon.jit
def nibble_pairs(
    words, high, low, third, ODD: gl.constexpr, SCALE: gl.constexpr, HAS_ZERO: gl.constexpr,
    AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Pairs of int4 times their scales, from `load_codes` and `prepared_scales`."""
    FACTOR: gl.constexpr = TWO_TO_65 if ODD else TWO_TO_69
    nothing = words * 0 + MINUS_ZERO
    if AT_ONCE:
        offsets = third if HAS_ZERO else fma_words(high, words * 0 + MINUS_EIGHT, nothing)
        return nibbles(words, fma_words(high, words * 0 + FACTOR, nothing), offsets, ODD)
    else:
        ZERO: gl.constexpr = HAS_ZERO and SCALE != "minimum"
        offsets = third if ZERO else words * 0 + MINUS_EIGHT
        middle = third if HAS_ZERO and not ZERO else nothing
        w0, w1 = nibbles(words, words * 0 + FACTOR, offsets, ODD)
        return scaled_pairs(w0, high, low, middle), scaled_pairs(w1, high, low, middle)


LEVEL_PAIRS = gl.constexpr("""{
        .reg .b32 a, b, c, d, l, h;
        prmt.b32 a, $4, 0, 0x4442; mad.lo.u32 a, a, 128, $5; ld.shared.b32 $2, [a];
        prmt.b32 b, $4, 0, 0x4443; mad.lo.u32 b, b, 128, $5; ld.shared.b32 $3, [b];
        and.b32 c, $4, 0x77777777; shr.u32 d, $4, 1;
        lop3.b32 d, d, 0x44444444, 0x32103210, 0xea;
        prmt.b32 a, $6, $7, c; prmt.b32 b, $8, $9, c; prmt.b32 l, a, b, d;
        prmt.b32 a, $10, $11, c; prmt.b32 b, $12, $13, c; prmt.b32 h, a, b, d;
        prmt.b32 $0, l, h, 0x5140; prmt.b32 $1, l, h, 0x7362;
        }""")
LEVEL_OPERANDS = gl.constexpr("=&r,=&r,=&r,=&r" + 10 * ",r")


@gluon.jit
def level_pairs(words, place, tables):
    """As `words_of_levels`: the first half of the pairs, as `levels.look_up`, the other half from
    the copy of `sm90_levels` at `place`. So neither `prmt` nor shared memory bounds both.
    """
    return gl.inline_asm_elementwise(
        LEVEL_PAIRS, LEVEL_OPERANDS, (words, place) + tables,
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def decode_rows(
    first, second, high, low, third, tables, place, ODD: gl.constexpr, FORMAT: gl.constexpr,
    SCALE: gl.constexpr, HAS_ZERO: gl.constexpr, AT_ONCE: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """The left operand (64 columns, 64 rows) of the even or of the odd columns of `load_codes`,
    smaller by `shift`.
    """
    high0, high1 = high
    low0, low1 = low
    third0, third1 = third
    if FORMAT == "int4":
        w0, w1 = nibble_pairs(first, high0, low0, third0, ODD, SCALE, HAS_ZERO, AT_ONCE)
        w2, w3 = nibble_pairs(second, high1, low1, third1, ODD, SCALE, HAS_ZERO, AT_ONCE)
    else:
        gl.static_assert(is_level(FORMAT))
        WHOLE: gl.constexpr = has_whole_levels(FORMAT)
        even, odd = interleaved(first, second)
        words = odd if ODD else even
        if place is not None:
            gl.static_assert(not WHOLE)
            w0, w1, w2, w3 = level_pairs(words, place, tables)
        else:
            w0, w1, w2, w3 = words_of_levels(words, tables, WHOLE, PURE=False)
        nothing = words * 0 + MINUS_ZERO
        if WHOLE:
            factors, offsets = words * 0 + TWO_TO_69, words * 0 + MINUS_128
            if AT_ONCE:
                f0, o0 = fma_words(high0, factors, nothing), fma_words(high0, offsets, nothing)
                f1, o1 = fma_words(high1, factors, nothing), fma_words(high1, offsets, nothing)
                w0, w1 = fma_words(w0, f0, o0), fma_words(w1, f0, o0)
                w2, w3 = fma_words(w2, f1, o1), fma_words(w3, f1, o1)
            else:
                w0, w1 = fma_words(w0, factors, offsets), fma_words(w1, factors, offsets)
                w2, w3 = fma_words(w2, factors, offsets), fma_words(w3, factors, offsets)
        if not (WHOLE and AT_ONCE):
            w0 = scaled_pairs(w0, high0, low0, nothing)
            w1 = scaled_pairs(w1, high0, low0, nothing)
            w2 = scaled_pairs(w2, high1, low1, nothing)
            w3 = scaled_pairs(w3, high1, low1, nothing)
    return left_operand(w0, w1, w2, w3, A)


@gluon.jit
def in_order(even, odd):
    """Columns of y (128, BLOCK_M) of both halves: of four of a warp's 32 each half has two."""
    BLOCK_M: gl.constexpr = even.shape[1]
    y = gl.join(even, odd).reshape((4, 2, 8, BLOCK_M, 2)).permute((0, 2, 1, 4, 3))
    return y.reshape((128, BLOCK_M))


@gluon.jit
def prepared_scales(
    s, zero, above, SCALE: gl.constexpr, HAS_ZERO: gl.constexpr, AT_ONCE: gl.constexpr
):
    """(high, low, third) in bf16 of scales (64, GROUPS): the number of bf16 next to a scale, what
    is left of it, and what zero points or minima add (the scales again where there are none).
    """
    if s.dtype == gl.int8:
        s, zero = in_one_level(s, zero, above, 2, HAS_ZERO)
    wide = s.to(gl.float32)
    high = wide.to(gl.bfloat16)
    low = (wide - high.to(gl.float32)).to(gl.bfloat16)
    third = high
    if HAS_ZERO:
        if SCALE != "minimum":
            third = (zero.to(gl.float32) * (-1.0 / INT4_SHIFT)).to(gl.bfloat16)
        elif AT_ONCE:
            third = (zero.to(gl.float32) * (1.0 / INT4_SHIFT)).to(gl.bfloat16)
        else:
            third = ((zero.to(gl.float32) + 8.0 * wide) * (1.0 / INT4_SHIFT)).to(gl.bfloat16)
    return high, low, third


@gluon.jit
def left_operand(w0, w1, w2, w3, A: gl.constexpr):
    """Pairs of rows of the weight as a left operand (64 columns, 64 rows): w0 and w1 are of the
    first pair of rows, w2 and w3 of the second; w1 and w3 of the columns two later. No data
    movement.
    """
    w = gl.join(gl.join(w0, w2), gl.join(w1, w3))  # .., second pair, later columns
    even = w.to(gl.int16).to(gl.bfloat16, bitcast=True)
    odd = (w >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    # axes: instruction, thread, warp, lane, second pair, later columns, row of a pair
    w = gl.join(even, odd).reshape((4, 4, 4, 8, 2, 2, 2)).permute((2, 5, 3, 0, 4, 1, 6))
    return gl.convert_layout(w.reshape((64, 64)), A, assert_trivial=True)


@gluon.jit
def store_scales(smem, turn, scales, HAS_LOW: gl.constexpr, HAS_ZERO: gl.constexpr):
    """`prepared_scales` in three places from `turn` on, those of a thread side by side."""
    high, low, third = scales
    smem.index(turn).store(in_thread_order(high))
    if HAS_LOW:
        smem.index(turn + 1).store(in_thread_order(low))
    if HAS_ZERO:
        smem.index(turn + 2).store(in_thread_order(third))


@gluon.jit
def load_scales(
    ptr, n, k, stride_n, stride_g, GROUPS: gl.constexpr, SCALE_GROUP: gl.constexpr,
    SCALE_ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scales or zero points (64, GROUPS) of one expert from row n and column k on."""
    row = n + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    ptrs = ptr + gl.expand_dims((row // SCALE_ROWS).to(gl.int64) * stride_n, 1)
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, LAYOUT))
    if SCALE_GROUP > 0:
        group += k // SCALE_GROUP
    return gl.load(ptrs + gl.expand_dims(group * stride_g, 0))


@gluon.jit
def scales_of_step(
    step, steps, column, pointers, strides, GROUPS: gl.constexpr, SCALE_GROUP: gl.constexpr,
    SCALE_ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """(scales, zero points or minima, factors of scales in two levels) of a step, or of the last
    one; the scales again in place of what there is none of.
    """
    scale_ptr, zero_ptr, factor_ptr = pointers
    scale_n, scale_g, zero_n, zero_g, factor_n = strides
    n = gl.minimum(step, steps - 1) * 64
    s = load_scales(
        scale_ptr, n, column, scale_n, scale_g, GROUPS, SCALE_GROUP, SCALE_ROWS, LAYOUT
    )
    zero, above = s, s
    if zero_ptr is not None:
        zero = load_scales(
            zero_ptr, n, column, zero_n, zero_g, GROUPS, SCALE_GROUP, SCALE_ROWS, LAYOUT
        )
    if scale_ptr.dtype.element_ty == gl.int8:
        HAS_ZERO: gl.constexpr = zero_ptr is not None
        row = (n + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))).to(gl.int64)
        stride = factor_n // 2 if HAS_ZERO else factor_n  # in two factors of 16 bits, or one
        above = gl.load(factors_above(factor_ptr, 0, HAS_ZERO) + row * stride + column // SUPER)
    return s, zero, above


@gluon.constexpr_function
def low_rank_layout(R):
    """Layout of a matrix (R, 128) in the threads whose left operands are its columns: of four
    neighbours two belong to each half.
    """
    registers = [[0, 1], [0, 2], [1, 0], [8, 0]]
    registers += [[16 << i, 0] for i in range(log2(R // 16))]
    lanes = [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 32], [0, 64]], [], [R, 128])


@gluon.jit
def low_rank_operands(smem, A: gl.constexpr):
    """A matrix (R, 128) as the left operands (64, R) of both halves, in the order of
    `left_operand`. No data movement but the load.
    """
    R: gl.constexpr = smem.shape[0]
    w = smem.load(low_rank_layout(R)).reshape((R, 4, 8, 2, 2))  # .., warp, lane, later columns
    even, odd = w.permute((1, 3, 2, 0, 4)).split()
    even = gl.convert_layout(even.reshape((64, R)), A, assert_trivial=True)
    return even, gl.convert_layout(odd.reshape((64, R)), A, assert_trivial=True)


# --- the kernel ----------------------------------------------------------------------------------


@unprefixed
class RegistersTile(NamedTuple):
    """A tile of the weight, (BLOCK_N, BLOCK_K)."""

    SCALE_ROWS: Constant  # rows that share a scale
    GROUP_M: Constant
    BLOCK_N: Constant
    BLOCK_K: Constant
    NUM_STAGES: Constant
    PACKED_STAGES: Constant
    TABLE: Constant
    NUM_WARPS: Constant


@arguments
class Registers:
    y: Pointer  # (S, K), written
    x: Descriptor  # (S, N)
    low: LowRankBoxes
    w: Descriptor  # (E N, words of K columns) int32
    pointers: MixedPointers
    index: Pointer  # kernels/device/blocks.py
    num_blocks: Runtime
    E: Runtime
    N: Specialized
    K: Specialized
    strides: MixedStrides
    decoding: Decoding
    tile: RegistersTile


@kernel(Registers, jit=gluon.jit)
def moe_ops_train_wgmma_registers(
    y_ptr,
    x,
    low_rows,
    low_matrix,
    w,
    w_scale_ptr,
    w_zero_ptr,
    w_factor_ptr,
    bias_ptr,
    index_ptr,
    num_blocks,
    E,
    N,
    K,
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
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    SCALE_GROUP: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    GROUP_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    PACKED_STAGES: gl.constexpr,
    TABLE: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    """y = x @ w for the rows of each expert, plus their product with a matrix of the rank. Other
    rows are left as they are. Grid: blocks times column tiles of the product.
    """
    gl.static_assert(BLOCK_K == 128 and BLOCK_N == 64 and bias_ptr is None)
    BLOCK_M: gl.constexpr = x.block_shape[0]
    WORDS: gl.constexpr = BLOCK_K // 8
    GROUPS: gl.constexpr = max(BLOCK_K // SCALE_GROUP, 1) if SCALE_GROUP > 0 else 1
    HAS_ZERO: gl.constexpr = w_zero_ptr is not None
    TWO_LEVELS: gl.constexpr = w_scale_ptr.dtype.element_ty == gl.int8
    IN_BF16: gl.constexpr = w_scale_ptr.dtype.element_ty == gl.bfloat16
    HAS_LOW: gl.constexpr = not IN_BF16  # scales are sums of two numbers of bf16
    AT_ONCE: gl.constexpr = IN_BF16 and (SCALE == "minimum" or not HAS_ZERO)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    dtype: gl.constexpr = x.dtype
    steps = N // BLOCK_N

    b, tile = block_and_tile(num_blocks, gl.cdiv(K, BLOCK_K), GROUP_M)
    e = gl.load(index_ptr + 4 * b)
    if (e < 0) | (e >= E):
        return
    first, end = gl.load(index_ptr + 4 * b + 1), gl.load(index_ptr + 4 * b + 2)
    column, word = tile * BLOCK_K, tile * WORDS

    x_smem = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_M, BLOCK_N], x.layout)
    p_smem = gl.allocate_shared_memory(gl.int32, [PACKED_STAGES, BLOCK_N, WORDS], w.layout)
    CODES: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    codes_smem = reinterpret(p_smem, gl.int16, [PACKED_STAGES, BLOCK_N, BLOCK_K // 4], CODES)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    s_smem = gl.allocate_shared_memory(gl.bfloat16, [6, GROUPS, BLOCK_N], PLAIN)
    s_words = reinterpret(s_smem, gl.int32, [6, GROUPS, BLOCK_N // 2], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [PACKED_STAGES, 1], mbarrier.MBarrierLayout())
    if low_rows is not None:
        R: gl.constexpr = low_rows.block_shape[1]
        rows_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, R], low_rows.layout)
        matrix_smem = gl.allocate_shared_memory(dtype, [R, BLOCK_K], low_matrix.layout)
        low_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(low_full.index(0), 1)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), 1)
    for i in gl.static_range(PACKED_STAGES):
        mbarrier.init(p_full.index(i), 1)
    fence_async_shared()  # makes the mbarriers visible to TMA
    barrier()
    row = e * N
    for i in gl.static_range(PACKED_STAGES):
        expect_packed(w, None, p_full, i, steps, 1, PACKED_STAGES)
        load_packed(
            w, p_smem, None, p_smem, p_full, i, steps, row, word, 0,
            True, 1, PACKED_STAGES, FORMAT,
        )  # fmt: skip
    for i in gl.static_range(NUM_STAGES):
        mbarrier.expect(full.index(i), BLOCK_M * BLOCK_N * 2, i < steps)
        async_load(x, [first, i * BLOCK_N], full.index(i), x_smem.index(i), i < steps)
    if low_rows is not None:
        mbarrier.expect(low_full.index(0), (BLOCK_M + BLOCK_K) * R * 2)
        async_load(low_rows, [first, 0], low_full.index(0), rows_smem)
        async_load(low_matrix, [e * R, column], low_full.index(0), matrix_smem)

    tables = None
    if has_whole_levels(FORMAT):
        tables = byte_words(FORMAT)
    elif is_level(FORMAT):
        tables = table_words(FORMAT)
    place = None
    if TABLE:
        place = write_pairs(steps * 0, FORMAT, NUM_WARPS)
    e = e.to(gl.int64)
    w_scale_ptr += e * w_scale_stride_e
    if w_factor_ptr is not None:
        w_factor_ptr += e * w_factor_stride_e
    if HAS_ZERO:
        if SCALE != "minimum":
            w_zero_ptr = w_zero_ptr.to(gl.pointer_type(gl.uint8))
        w_zero_ptr += e * w_zero_stride_e
    pointers = w_scale_ptr, w_zero_ptr, w_factor_ptr
    strides = (
        w_scale_stride_n, w_scale_stride_g, w_zero_stride_n, w_zero_stride_g, w_factor_stride_n
    )  # fmt: skip
    LOADED: gl.constexpr = loaded_scales(GROUPS, NUM_WARPS)
    s, zero, above = scales_of_step(
        0, steps, column, pointers, strides, GROUPS, SCALE_GROUP, SCALE_ROWS, LOADED
    )
    next_s, next_zero, next_above = scales_of_step(
        1, steps, column, pointers, strides, GROUPS, SCALE_GROUP, SCALE_ROWS, LOADED
    )
    scales = prepared_scales(s, zero, above, SCALE, HAS_ZERO, AT_ONCE)
    store_scales(s_smem, 0, scales, HAS_LOW, HAS_ZERO)
    barrier()
    acc0 = gl.zeros([64, BLOCK_M], gl.float32, MMA)
    acc1 = gl.zeros([64, BLOCK_M], gl.float32, MMA)
    slot, phase = steps * 0, steps * 0
    p_slot, p_phase = steps * 0, steps * 0
    mbarrier.wait(p_full.index(0), 0)
    c0, c1 = load_codes(codes_smem.index(0))
    for i in range(steps):
        turn = 3 * (i & 1)
        highs = load_pairs(s_words.index(turn), GROUPS)
        lows, thirds = (None, None), (None, None)
        if HAS_LOW:
            lows = load_pairs(s_words.index(turn + 1), GROUPS)
        if HAS_ZERO:
            thirds = load_pairs(s_words.index(turn + 2), GROUPS)
        a0 = decode_rows(
            c0, c1, highs, lows, thirds, tables, place, False, FORMAT, SCALE, HAS_ZERO, AT_ONCE, A,
        )  # fmt: skip
        mbarrier.wait(full.index(slot), phase)
        rows = x_smem.index(slot).permute((1, 0))
        acc0 = warpgroup_mma(a0, rows, acc0, is_async=True)
        a1 = decode_rows(
            c0, c1, highs, lows, thirds, tables, place, True, FORMAT, SCALE, HAS_ZERO, AT_ONCE, A,
        )  # fmt: skip
        acc1 = warpgroup_mma(a1, rows, acc1, is_async=True)
        # scales of the next step, of which those of the one after are asked for
        scales = prepared_scales(next_s, next_zero, next_above, SCALE, HAS_ZERO, AT_ONCE)
        store_scales(s_smem, 3 - turn, scales, HAS_LOW, HAS_ZERO)
        next_s, next_zero, next_above = scales_of_step(
            i + 2, steps, column, pointers, strides, GROUPS, SCALE_GROUP, SCALE_ROWS, LOADED
        )
        p_slot, p_phase = advance_slot(p_slot, p_phase, PACKED_STAGES)
        mbarrier.wait(p_full.index(p_slot), p_phase, i + 1 < steps)
        c0, c1 = load_codes(codes_smem.index(p_slot))
        acc0, acc1 = warpgroup_mma_wait(0, [acc0, acc1])
        barrier()
        expect_packed(w, None, p_full, i + PACKED_STAGES, steps, 1, PACKED_STAGES)
        following = i + NUM_STAGES
        mbarrier.expect(full.index(slot), BLOCK_M * BLOCK_N * 2, following < steps)
        async_load(
            x, [first, following * BLOCK_N], full.index(slot), x_smem.index(slot),
            following < steps,
        )  # fmt: skip
        load_packed(
            w, p_smem, None, p_smem, p_full, i + PACKED_STAGES, steps, row, word, 0,
            True, 1, PACKED_STAGES, FORMAT,
        )  # fmt: skip
        slot, phase = advance_slot(slot, phase, NUM_STAGES)

    SHIFT: gl.constexpr = shift(FORMAT, SCALE)
    acc0 *= SHIFT
    acc1 *= SHIFT
    if w_factor_ptr is not None and not TWO_LEVELS:  # the global scale of an expert
        factor = gl.load(w_factor_ptr)
        acc0 /= factor
        acc1 /= factor
    if low_rows is not None:
        mbarrier.wait(low_full.index(0), 0)
        a0, a1 = low_rank_operands(matrix_smem, A)
        rows = rows_smem.permute((1, 0))
        acc0 = warpgroup_mma(a0, rows, acc0, is_async=True)
        acc1 = warpgroup_mma(a1, rows, acc1, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(0, [acc0, acc1])
    y = in_order(acc0.to(y_ptr.dtype.element_ty), acc1.to(y_ptr.dtype.element_ty))
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NUM_WARPS, 1], [1, 0])
    y = gl.convert_layout(y.permute((1, 0)), ROWS)
    position = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, ROWS))
    columns = gl.expand_dims(column + gl.arange(0, BLOCK_K, gl.SliceLayout(0, ROWS)), 0)
    y_ptrs = y_ptr + gl.expand_dims(position.to(gl.int64) * K, 1) + columns
    gl.store(y_ptrs, y, mask=gl.expand_dims(position < end, 1))


def multiply(
    y: Tensor,
    x: Tensor,
    w: MixedOperand,
    routing: Routing,
    low: tuple[Tensor, Tensor] | None = None,
) -> Launch | None:
    """y = x @ w as packed.multiply has it; None for operands that this kernel does not take."""
    of = w.format
    if of.name not in FORMATS or x.data_ptr() % 16 or why_not(w, x.dtype, True):
        return None
    added = low_rank_boxes(w, low, True)
    if added is None:
        return None
    rank = 0 if low is None else low[0].shape[1]
    table = of.name in TABLED and rank <= TABLE_RANK
    stages = NUM_STAGES - (rank == 64 or table)  # so that two programs fit
    words = w.K * of.bits // 32
    w_boxes = matrix_boxes(w.E * w.N, words, 4, STEP, BLOCK_OUT * of.bits // 32)
    args = Registers(
        y=y,
        x=matrix_boxes(*x.shape, 2, BLOCK_M, STEP).of(x),
        low=added,
        w=w_boxes.of(w.data.view(torch.int32)),
        pointers=w.pointers,
        index=routing.index,
        num_blocks=routing.num_blocks,
        E=routing.E,
        N=w.N,
        K=w.K,
        strides=w.strides,
        decoding=decoding_of(of),
        tile=RegistersTile(
            *(scales_of_rows(w).SCALE_ROWS, GROUP_M, STEP, BLOCK_OUT),
            *(stages, PACKED_STAGES, table, NUM_WARPS),
        ),
    )
    grid = (routing.num_blocks * (w.K // BLOCK_OUT), 1, 1)
    return Launch(moe_ops_train_wgmma_registers, grid, args, NUM_WARPS)
