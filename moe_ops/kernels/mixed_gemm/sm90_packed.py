"""The products of packed.py on SM90: a tile of the weight is decoded while `wgmma` multiplies the
one before. Layers of many rows an expert run on them without gradients, too, and then GEMM1 ends
with the activation. Imported at first launch only, if the installed Triton compiles Gluon
(`mixed_gemm.configs.on_sm90`).

Legend as in packed.py. Tiles must divide the columns of x, and the rank be that of a box. Where
gate and up rows of a weight are apart, a tile has as many of both (HALVES).

The threads of a program do both: they issue the products of a step, which run on their own, decode
the weights of the next step, store them, and wait for the products of the step before. Rows of x
and packed weights come by TMA into rings of stages: what a thread loads itself, it waits for at
the fence after its stores. A thread has 16 neighbouring bytes of a row of the weight, and eight
threads beside each other eight rows, so that 16 bytes of a decoded row go to banks of their own.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.kernels.activation import Activated
from moe_ops.kernels.configs import GROUP_M, LEVELS
from moe_ops.kernels.device.activations import activate_one, activate_two
from moe_ops.kernels.device.blocks import block_and_tile
from moe_ops.kernels.device.gluon import (
    Boxes,
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
    INT4_FACTORS,
    INT4_HIGH,
    INT4_LOW,
    INT4_SHIFT,
    MINUS_EIGHT,
    MINUS_ZERO,
    bits,
    fma_words,
)
from moe_ops.kernels.mixed_gemm.decode import (
    SUPER,
    factors_above,
    high_bits,
    in_one_level,
    in_pairs,
    spread,
)
from moe_ops.kernels.mixed_gemm.levels import (
    byte_words,
    has_whole_levels,
    is_level,
    level_unit,
    table_words,
    unknown_zero,
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
    ScalesOfRows,
    decoding_of,
    scales_of_rows,
)
from moe_ops.kernels.mixed_gemm.sm90_mainloop import advance_slot
from moe_ops.kernels.place.routing import Routing
from moe_ops.meta.workspace import cdiv

FORMATS = ("int4", "int5", "int6", "e2m1", "int8", "e4m3", *LEVELS)
RANKS = (16, 32, 64)
NUM_WARPS = 4  # two programs share a multiprocessor
NUM_STAGES = 3  # of x
W_BUFFERS = gl.constexpr(3)  # of decoded weights
TWO_TO_119 = gl.constexpr(0x7B007B00)  # in bf16, twice
MINUS_192 = gl.constexpr(-0x3CBF3CC0)
# of whole levels: 2^69 and -128 * 2^-64 in bf16, twice
BYTE_FACTORS, MINUS_128 = gl.constexpr(0x62006200), gl.constexpr(-0x5CFF5D00)
E4M3_SCALE = gl.constexpr(2.0**56)  # with the 2^-120 of e4m3_pairs, 1 / INT4_SHIFT
NOTHING = Activated(0.0, 0.0, 0.0, "", False, False, False)


@gluon.constexpr_function
def weight_layout(BLOCK_N, WORDS, NUM_WARPS):
    """Layout of a tile (BLOCK_N, WORDS) of packed rows in the threads that decode it."""
    rows = [[1 << i, 0] for i in range(log2(BLOCK_N))]
    parts = [[0, 4 << i] for i in range(log2(WORDS // 4))]
    others = parts + rows[3:]
    lanes, others = rows[:3] + others[:2], others[2:]
    warps, others = others[: log2(NUM_WARPS)], others[log2(NUM_WARPS) :]
    registers = [[0, 1], [0, 2], *others]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BLOCK_N, WORDS])


@gluon.constexpr_function
def scale_layout(BLOCK_N, WORDS, NUM_WARPS, GROUPS):
    """Layout of the scales (BLOCK_N,) or (BLOCK_N, GROUPS) of such a tile in the same threads."""
    flat = weight_layout(BLOCK_N, WORDS, NUM_WARPS)
    if GROUPS == 1:
        return gl.SliceLayout(1, flat)
    each = WORDS // GROUPS

    def split(base):
        return [base[0], base[1] // each, base[1] % each]

    bases = [[split(b) for b in f] for f in (flat.reg_bases, flat.lane_bases, flat.warp_bases)]
    return gl.SliceLayout(2, gl.DistributedLinearLayout(*bases, [], [BLOCK_N, GROUPS, each]))


@gluon.constexpr_function
def run_layout(BLOCK_N, WORDS, NUM_WARPS):
    """Layout of the four words of high bits of int5 of a row (BLOCK_N, 4) in the threads that
    decode such a tile of low bits, each of which has a run.
    """
    flat = weight_layout(BLOCK_N, WORDS, NUM_WARPS)

    def split(base):
        return [base[0], base[1] // 4, base[1] % 4]

    bases = [[split(b) for b in f] for f in (flat.reg_bases, flat.lane_bases, flat.warp_bases)]
    return gl.SliceLayout(1, gl.DistributedLinearLayout(*bases, [], [BLOCK_N, WORDS // 4, 4]))


@gluon.constexpr_function
def plane_assembly(HIGH, MIDDLE):
    """Eight codes, one to a byte of two words, of words of low and of high bits, which begin at
    the lowest bit of each byte; then the codes less MIDDLE in bf16, as `int4_pairs` has them, or
    without a MIDDLE times $6 plus $7 in fp32, rounded.
    """
    mask = ((1 << HIGH) - 1 << 4) * 0x01010101
    codes = f"""{{
        .reg .b32 e, o, t, k, u, m, l, h;
        shl.b32 t, $5, 4; and.b32 t, t, {mask:#x}; lop3.b32 e, $4, 0x0f0f0f0f, t, 0xea;
        shl.b32 t, $5, {4 - HIGH}; and.b32 t, t, {mask:#x};
        shr.u32 o, $4, 4; lop3.b32 o, o, 0x0f0f0f0f, t, 0xea;"""
    if MIDDLE:  # beneath a byte of 0x43 they are in bf16 128 more
        codes += f"""
        mov.b32 k, 0x43434343; mov.b32 u, 0x3f803f80;
        mov.b32 m, {0xC300C300 + MIDDLE * 0x10001:#x};
        prmt.b32 l, e, o, 0x5140; prmt.b32 h, e, o, 0x7362;
        prmt.b32 $0, l, k, 0x4140; prmt.b32 $1, l, k, 0x4342;
        prmt.b32 $2, h, k, 0x4140; prmt.b32 $3, h, k, 0x4342;"""
        for i in range(4):
            codes += f" fma.rn.bf16x2 ${i}, ${i}, u, m;"
    else:  # in fp32, too
        codes += " mov.b32 k, 0x43000000;"
        for i in range(4):
            codes += f"""
        prmt.b32 l, e, k, 0x7{i}44; prmt.b32 h, o, k, 0x7{i}44;
        fma.rn.f32 l, l, $6, $7; fma.rn.f32 h, h, $6, $7; cvt.rn.bf16x2.f32 ${i}, h, l;"""
    return codes + "\n}"


@gluon.jit
def plane_pairs(words, high, FORMAT: gl.constexpr):
    """As int4_pairs, of codes in planes less their middle."""
    ASSEMBLY: gl.constexpr = plane_assembly(high_bits(FORMAT), 8 << high_bits(FORMAT))
    return gl.inline_asm_elementwise(
        ASSEMBLY,
        "=&r,=&r,=&r,=&r,r,r",
        [words, high],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def plane_pairs_minimum(words, high, s, near, FORMAT: gl.constexpr):
    """As int4_pairs, of codes in planes times a scale plus a minimum m, in fp32 and rounded once.
    `near` is m - 128 s.
    """
    ASSEMBLY: gl.constexpr = plane_assembly(high_bits(FORMAT), 0)
    return gl.inline_asm_elementwise(
        ASSEMBLY,
        "=&r,=&r,=&r,=&r,r,r,f,f",
        [words, high, s, near],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_high(smem, step, WORDS: gl.constexpr, NUM_WARPS: gl.constexpr, FORMAT: gl.constexpr):
    """The words of high bits (BLOCK_N, WORDS) beside those of low bits of a step, where they begin
    at the lowest bit of each byte.
    """
    BLOCK_N: gl.constexpr = smem.shape[0]
    HIGH: gl.constexpr = high_bits(FORMAT)
    PACKED: gl.constexpr = weight_layout(BLOCK_N, WORDS, NUM_WARPS)
    if HIGH == 1:
        high = smem.load(run_layout(BLOCK_N, WORDS, NUM_WARPS))
        high = gl.expand_dims(high, 1).broadcast_to((BLOCK_N, WORDS // 4, 4))
        high = gl.convert_layout(high.reshape((BLOCK_N, WORDS)), PACKED, assert_trivial=True)
    else:
        gl.static_assert(WORDS == 4 * HIGH)
        high = smem.load(PACKED)
    four = gl.arange(0, WORDS, gl.SliceLayout(0, PACKED)) // 4  # words, counted in the unit
    four += step % (16 // WORDS) * (WORDS // 4)
    return high >> gl.expand_dims(four // HIGH * (2 * HIGH), 0)


@gluon.jit
def word_of_step(step, WORDS: gl.constexpr, FORMAT: gl.constexpr):
    """(the word of a row where a step's low bits begin, that of its high bits)."""
    if high_bits(FORMAT) == 0:
        return step * WORDS, 0
    else:
        STEPS: gl.constexpr = 16 // WORDS  # of a unit
        unit = step // STEPS * (16 + 4 * high_bits(FORMAT))
        return unit + step % STEPS * WORDS, unit + 16


@gluon.jit
def int4_pairs(words, factors, offsets):
    """`decode.int4_words` of eight columns in 32 bits: columns 0 and 1, 2 and 3, 4 and 5, 6 and 7
    in the halves of 32 bits each.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $4, 0, 0x4040; prmt.b32 b, $4, 0, 0x4141;
        prmt.b32 c, $4, 0, 0x4242; prmt.b32 d, $4, 0, 0x4343;
        and.b32 a, a, 0x00f0000f; and.b32 b, b, 0x00f0000f;
        and.b32 c, c, 0x00f0000f; and.b32 d, d, 0x00f0000f;
        fma.rn.bf16x2 $0, a, $5, $6; fma.rn.bf16x2 $1, b, $5, $6;
        fma.rn.bf16x2 $2, c, $5, $6; fma.rn.bf16x2 $3, d, $5, $6;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [words, factors, offsets],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,  # keeps it before the wait for products
        pack=1,
    )


@gluon.jit
def int8_pairs(words):
    """Four columns in 32 bits: columns 0 and 1, 2 and 3 in the halves of 32 bits each, in bf16 and
    smaller by INT4_SHIFT. As bf16, an integer of 8 bits is that multiple of 2^-133; here it is the
    number plus 128.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, m, z;
        mov.b32 m, 0x62006200; mov.b32 z, 0xa300a300;
        xor.b32 b, $2, 0x80808080; prmt.b32 a, b, 0, 0x4140; prmt.b32 b, b, 0, 0x4342;
        fma.rn.bf16x2 $0, a, m, z; fma.rn.bf16x2 $1, b, m, z;
        }""",
        "=&r,=&r,r",
        [words],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def e4m3_pairs(words):
    """As int8_pairs of e4m3, in bf16 and smaller by 2^120; the NaN code becomes 480."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;
        shr.u32 c, a, 4; shr.u32 d, b, 4; and.b32 c, c, 0x07f007f0; and.b32 d, d, 0x07f007f0;
        lop3.b32 $0, a, 0x80008000, c, 0xea; lop3.b32 $1, b, 0x80008000, d, 0xea;
        }""",
        "=&r,=&r,r",
        [words],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def e2m1_tables(zero):
    """What e2m1_pairs looks up, of `unknown_zero`: 64 and twice a number that is not negative, 64
    less twice the magnitude of another one, each in two words, and 0x43.
    """
    above = zero + 0x43424140, zero + 0x4C484644
    below = zero + 0x3D3E3F40, zero + 0x34383A3C
    return above[0], above[1], below[0], below[1], zero + 0x43434343


@gluon.jit
def e2m1_pairs(words, s, offsets, tables):
    """As int4_pairs of e2m1: 192 and twice a number, times a scale, plus -192 scales.

    `prmt` looks a number up by the low 3 bits of a nibble, and gives zero where the highest bit,
    here the sign, is set. So numbers that are not negative come from one look-up, others from one
    by nibbles with their highest bits inverted. The sum of both is a byte; beneath a byte of 0x43
    it is in bf16 128 more. Instructions that move bits issue at half rate, and these are 11 for
    eight columns, where shifts and masks take 17.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, n, h, m;
        xor.b32 n, $4, 0x88888888; shr.u32 h, $4, 16; shr.u32 m, n, 16;
        prmt.b32 a, $7, $8, $4; prmt.b32 n, $9, $10, n; add.u32 a, a, n;
        prmt.b32 b, $7, $8, h; prmt.b32 m, $9, $10, m; add.u32 b, b, m;
        prmt.b32 $0, a, $11, 0x4140; prmt.b32 $1, a, $11, 0x4342;
        prmt.b32 $2, b, $11, 0x4140; prmt.b32 $3, b, $11, 0x4342;
        fma.rn.bf16x2 $0, $0, $5, $6; fma.rn.bf16x2 $1, $1, $5, $6;
        fma.rn.bf16x2 $2, $2, $5, $6; fma.rn.bf16x2 $3, $3, $5, $6;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [words, s, offsets, tables[0], tables[1], tables[2], tables[3], tables[4]],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def e2m1_scales(s, SCALE: gl.constexpr):
    """(scale, -192 scales) in both halves of 32 bits each: e8m0 codes, of which those above 2^120
    overflow, or half of e4m3 codes.
    """
    if SCALE == "e8m0":
        s = s.to(gl.int32) * 0x00800080
    else:  # bits in their places in bf16 are smaller by 2^120
        s = s.to(gl.int32) * 0x00100010
        s = fma_words(s, s * 0 + TWO_TO_119, s * 0 + MINUS_ZERO)
    return s, fma_words(s, s * 0 + MINUS_192, s * 0 + MINUS_ZERO)


@gluon.constexpr_function
def shift(FORMAT, SCALE):
    """What finished sums are multiplied by."""
    if FORMAT == "e2m1":
        return 0.5 if SCALE == "e8m0" else 1.0
    if is_level(FORMAT):
        return level_unit(FORMAT) * (INT4_SHIFT.value if has_whole_levels(FORMAT) else 1.0)
    return 1.0 if high_bits(FORMAT) > 0 else INT4_SHIFT.value


@gluon.jit
def both(x):
    """A number's bits in bf16, in both halves of 32 bits."""
    return bits(x) * 0x10001


@gluon.jit
def decode(
    words,  # int32 (BLOCK_N, WORDS), eight columns each, or four of 8 bits
    s,
    zero,
    above,
    tables,
    high,  # of formats in planes the words of `load_high`
    GROUPS: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
):
    """(BLOCK_N, columns) weights in bf16, rounded as `decode.columns` does, smaller by `shift`."""
    BLOCK_N: gl.constexpr = words.shape[0]
    WORDS: gl.constexpr = words.shape[1]
    EACH: gl.constexpr = WORDS // GROUPS
    if s.dtype == gl.int8:
        s, zero = in_one_level(s, zero, above, GROUPS, HAS_ZERO)
    PAIRS: gl.constexpr = WORDS * 4 if in_pairs(FORMAT) else WORDS * 2
    if FORMAT == "int8" or FORMAT == "e4m3":
        wide = s.to(gl.float32)
        if FORMAT == "int8":
            w0, w1 = int8_pairs(words)
        else:
            wide *= E4M3_SCALE
            w0, w1 = e4m3_pairs(words)
        high = wide.to(gl.bfloat16)
        low = spread(both(wide - high.to(gl.float32)), BLOCK_N, GROUPS, EACH)
        high = spread(both(high), BLOCK_N, GROUPS, EACH)
        nothing = low * 0 + MINUS_ZERO
        pairs = gl.join(scaled(w0, high, low, nothing), scaled(w1, high, low, nothing))
    elif high_bits(FORMAT) > 0:
        if HAS_ZERO:
            wide, least = s.to(gl.float32), zero.to(gl.float32)
            w0, w1, w2, w3 = plane_pairs_minimum(
                words,
                high,
                spread(wide, BLOCK_N, GROUPS, EACH),
                spread(least - 128.0 * wide, BLOCK_N, GROUPS, EACH),
                FORMAT,
            )
        else:
            w0, w1, w2, w3 = plane_pairs(words, high, FORMAT)
            w0, w1, w2, w3 = four_scaled(w0, w1, w2, w3, s, None, BLOCK_N, GROUPS, EACH)
        pairs = gl.join(gl.join(w0, w2), gl.join(w1, w3))
    elif FORMAT == "e2m1":
        factors, offsets = e2m1_scales(s, SCALE)
        factors = spread(factors, BLOCK_N, GROUPS, EACH)
        w0, w1, w2, w3 = e2m1_pairs(words, factors, spread(offsets, BLOCK_N, GROUPS, EACH), tables)
        pairs = gl.join(gl.join(w0, w2), gl.join(w1, w3))
    else:
        MINIMUM: gl.constexpr = SCALE == "minimum"
        # scales and what is added are those of one fma
        AT_ONCE: gl.constexpr = s.dtype == gl.bfloat16 and (MINIMUM or not HAS_ZERO)
        wide, middle = s.to(gl.float32), None
        if is_level(FORMAT):
            if has_whole_levels(FORMAT):
                w0, w1, w2, w3 = words_of_levels(words, tables, True, PURE=False)
                if AT_ONCE:
                    factors, offsets = both(wide * INT4_LOW), both(wide * (-128.0 / INT4_SHIFT))
                else:
                    factors = (s * 0).to(gl.int32) + BYTE_FACTORS
                    offsets = factors * 0 + MINUS_128
                factors = spread(factors, BLOCK_N, GROUPS, EACH)
                offsets = spread(offsets, BLOCK_N, GROUPS, EACH)
                w0, w1 = fma_words(w0, factors, offsets), fma_words(w1, factors, offsets)
                w2, w3 = fma_words(w2, factors, offsets), fma_words(w3, factors, offsets)
            else:
                w0, w1, w2, w3 = words_of_levels(words, tables, False, PURE=False)
        else:
            if AT_ONCE:
                factors = bits(wide * INT4_LOW) | bits(wide * INT4_HIGH) << 16
                offsets = both(wide * (-8.0 / INT4_SHIFT))
            else:
                factors = (s * 0).to(gl.int32) + INT4_FACTORS
                offsets = factors * 0 + MINUS_EIGHT
            if MINIMUM and AT_ONCE:
                offsets = both(zero.to(gl.float32) * (1.0 / INT4_SHIFT))
            elif MINIMUM:
                middle = both((zero.to(gl.float32) + 8.0 * wide) * (1.0 / INT4_SHIFT))
            elif HAS_ZERO:
                offsets = both(zero.to(gl.float32) * (-1.0 / INT4_SHIFT))
            factors = spread(factors, BLOCK_N, GROUPS, EACH)
            offsets = spread(offsets, BLOCK_N, GROUPS, EACH)
            w0, w1, w2, w3 = int4_pairs(words, factors, offsets)
        if not AT_ONCE or (is_level(FORMAT) and not has_whole_levels(FORMAT)):
            w0, w1, w2, w3 = four_scaled(w0, w1, w2, w3, s, middle, BLOCK_N, GROUPS, EACH)
        pairs = gl.join(gl.join(w0, w2), gl.join(w1, w3))
    pairs = pairs.reshape((BLOCK_N, PAIRS))
    even = pairs.to(gl.int16).to(gl.bfloat16, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(even, odd).reshape((BLOCK_N, 2 * PAIRS))


@gluon.jit
def scaled(w, high, low, middle):
    """w times a scale that is the sum of two numbers of bf16, plus a third."""
    return fma_words(w, high, fma_words(w, low, middle))


@gluon.jit
def four_scaled(
    w0, w1, w2, w3, s, middle, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr, EACH: gl.constexpr
):  # fmt: skip
    """Four words of two columns each times their scale, plus `middle` unless that is None."""
    high = s.to(gl.bfloat16)
    low = spread(both(s.to(gl.float32) - high.to(gl.float32)), BLOCK_N, GROUPS, EACH)
    high = spread(both(high), BLOCK_N, GROUPS, EACH)
    middle = low * 0 + MINUS_ZERO if middle is None else spread(middle, BLOCK_N, GROUPS, EACH)
    w0, w1 = scaled(w0, high, low, middle), scaled(w1, high, low, middle)
    return w0, w1, scaled(w2, high, low, middle), scaled(w3, high, low, middle)


@gluon.jit
def tile_rows(first, gap, BLOCK_N: gl.constexpr, HALVES: gl.constexpr, LAYOUT: gl.constexpr):
    """The rows of the weight that a tile has: from `first` on, of two halves the second one `gap`
    rows behind the first.
    """
    row = gl.arange(0, BLOCK_N, LAYOUT)
    if HALVES == 2:
        row += row // (BLOCK_N // 2) * (gap - BLOCK_N // 2)
    return first + row


@gluon.jit
def load_scales(
    ptr,  # of one expert
    n,
    k,
    N,
    gap,
    stride_n,
    stride_g,
    BLOCK_N: gl.constexpr,
    HALVES: gl.constexpr,
    GROUPS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_GROUP: gl.constexpr,
    EVEN: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Scales or zero points, (BLOCK_N,) or (BLOCK_N, GROUPS), of a tile from row n and column k
    on; of the last row for those behind it.
    """
    if GROUPS == 1:
        row = tile_rows(n, gap, BLOCK_N, HALVES, LAYOUT)
        if not EVEN:
            row = gl.minimum(row, N - 1)
        ptrs = ptr + (row // SCALE_ROWS).to(gl.int64) * stride_n
        if SCALE_GROUP > 0:
            ptrs += k // SCALE_GROUP * stride_g
        return gl.load(ptrs)
    else:
        row = tile_rows(n, gap, BLOCK_N, HALVES, gl.SliceLayout(1, LAYOUT))
        if not EVEN:
            row = gl.minimum(row, N - 1)
        group = k // SCALE_GROUP + gl.arange(0, GROUPS, gl.SliceLayout(0, LAYOUT))
        ptrs = gl.expand_dims((row // SCALE_ROWS).to(gl.int64) * stride_n, 1)
        return gl.load(ptr + ptrs + gl.expand_dims(group * stride_g, 0))


@gluon.jit
def scales_of_step(
    step, steps, scale_ptr, zero_ptr, factor_ptr, column, N, gap, scale_stride_n, scale_stride_g,
    zero_stride_n, zero_stride_g, factor_stride_n,
    TRANSPOSE: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, HALVES: gl.constexpr,
    GROUPS: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALE_GROUP: gl.constexpr, EVEN: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """(scales, zero points or minima, factors of scales in two levels) of a step, or of the last
    one; the scales again in place of what there is none of.
    """
    step = gl.minimum(step, steps - 1)
    n, k = (step * BLOCK_N, column) if TRANSPOSE else (column, step * BLOCK_K)
    s = load_scales(
        scale_ptr, n, k, N, gap, scale_stride_n, scale_stride_g,
        BLOCK_N, HALVES, GROUPS, SCALE_ROWS, SCALE_GROUP, EVEN, LAYOUT,
    )  # fmt: skip
    zero = s
    if zero_ptr is not None:
        zero = load_scales(
            zero_ptr, n, k, N, gap, zero_stride_n, zero_stride_g,
            BLOCK_N, HALVES, GROUPS, SCALE_ROWS, SCALE_GROUP, EVEN, LAYOUT,
        )  # fmt: skip
    above = s
    if scale_ptr.dtype.element_ty == gl.int8:
        OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT) if GROUPS > 1 else LAYOUT
        HAS_ZERO: gl.constexpr = zero_ptr is not None
        above = load_scales(
            factors_above(factor_ptr, 0, HAS_ZERO), n, k, N, gap,
            factor_stride_n // 2 if HAS_ZERO else factor_stride_n, 1,
            BLOCK_N, HALVES, 1, 1, SUPER, EVEN, OF_ROWS,
        )  # fmt: skip
    return s, zero, above


@gluon.jit
def expect_packed(w, w_high, full, step, steps, HALVES: gl.constexpr, STAGES: gl.constexpr):
    """Say how much will come of a step's packed weights, if there is such a step."""
    WORDS: gl.constexpr = w.block_shape[1] + (w_high.block_shape[1] if w_high is not None else 0)
    size: gl.constexpr = HALVES * w.block_shape[0] * WORDS * 4
    mbarrier.expect(full.index(step % STAGES), size, step < steps)


@gluon.jit
def load_packed(
    w, w_smem, w_high, high_smem, full, step, steps, row, column, gap,
    TRANSPOSE: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """Start the copies of a step's packed weights, if there is such a step."""
    ROWS: gl.constexpr = w.block_shape[0]
    WORDS: gl.constexpr = w.block_shape[1]
    slot = step % STAGES
    if TRANSPOSE:  # `column` is that of words
        at = [row + step * ROWS, column]
        async_load(w, at, full.index(slot), w_smem.index(slot), step < steps)
    else:
        word, high_word = word_of_step(step, WORDS, FORMAT)
        for half in gl.static_range(HALVES):
            first = row + column + half * gap
            place = w_smem.index(slot * HALVES + half)
            async_load(w, [first, word], full.index(slot), place, step < steps)
            if w_high is not None:
                place = high_smem.index(slot * HALVES + half)
                async_load(w_high, [first, high_word], full.index(slot), place, step < steps)


@gluon.jit
def issue(x, w, acc, TRANSPOSE: gl.constexpr):
    """Issue acc + x @ w.T, or acc + x @ w if TRANSPOSE."""
    if TRANSPOSE:
        return warpgroup_mma(x, w, acc, is_async=True)
    else:
        return warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)


@unprefixed
class WgmmaTile(NamedTuple):
    """A tile of the weight, (BLOCK_N, BLOCK_K)."""

    TRANSPOSE: Constant
    EVEN: Constant  # tiles divide N
    GROUP_M: Constant
    BLOCK_N: Constant
    BLOCK_K: Constant
    NUM_STAGES: Constant
    PACKED_STAGES: Constant
    NUM_WARPS: Constant


class LowRankBoxes(NamedTuple):
    """What is added: rows times the matrix of their expert, or None."""

    rows: Descriptor  # (S, R)
    matrix: Descriptor  # (E N, R), or (E R, K) if TRANSPOSE


@unprefixed
class WeightBoxes(NamedTuple):
    """Boxes of the weight."""

    w: Descriptor  # (E N, words of K columns) int32
    w_high: Descriptor  # the same in boxes of high bits, or None


@arguments
class PackedSm90:
    # (S, N), or (S, K) if TRANSPOSE, or what an activation makes of (S, N); written
    y: Pointer
    x: Descriptor  # (S, K), or (S, N) if TRANSPOSE
    low: LowRankBoxes
    boxes: WeightBoxes
    pointers: MixedPointers
    index: Pointer  # kernels/device/blocks.py
    num_blocks: Runtime
    E: Runtime
    N: Specialized
    K: Specialized
    strides: MixedStrides
    decoding: Decoding
    of_rows: ScalesOfRows
    activation: Activated  # or NOTHING
    tile: WgmmaTile


@kernel(PackedSm90, jit=gluon.jit)
def moe_ops_train_wgmma_packed(
    y_ptr,
    x,
    low_rows,
    low_matrix,
    w,
    w_high,
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
    FACTOR_ROWS: gl.constexpr,
    alpha,
    beta,
    limit,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    TRANSPOSE: gl.constexpr,
    EVEN: gl.constexpr,
    GROUP_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    PACKED_STAGES: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    """y = x @ w.T, or x @ w if TRANSPOSE, for the rows of each expert, plus a bias, and the same
    product of rows and matrices of the rank; or the activation of that. Other rows are left as
    they are. Grid: blocks times column tiles of the product.
    """
    BLOCK_M: gl.constexpr = x.block_shape[0]
    OUT: gl.constexpr = BLOCK_K if TRANSPOSE else BLOCK_N
    IN: gl.constexpr = BLOCK_N if TRANSPOSE else BLOCK_K
    COLUMNS: gl.constexpr = 8 if in_pairs(FORMAT) else 4  # in a word
    WORDS: gl.constexpr = BLOCK_K // COLUMNS
    HALVES: gl.constexpr = 2 if GATED and not INTERLEAVED else 1
    GROUPS: gl.constexpr = max(BLOCK_K // SCALE_GROUP, 1) if SCALE_GROUP > 0 else 1
    HAS_ZERO: gl.constexpr = w_zero_ptr is not None
    PACKED: gl.constexpr = weight_layout(BLOCK_N, WORDS, NUM_WARPS)
    SCALES: gl.constexpr = scale_layout(BLOCK_N, WORDS, NUM_WARPS, GROUPS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, OUT, 16])
    dtype: gl.constexpr = x.dtype
    out_size = K if TRANSPOSE else N
    steps = (N if TRANSPOSE else K) // IN

    b, tile = block_and_tile(num_blocks, gl.cdiv(out_size, OUT), GROUP_M)
    e = gl.load(index_ptr + 4 * b)
    if (e < 0) | (e >= E):
        return
    first, end = gl.load(index_ptr + 4 * b + 1), gl.load(index_ptr + 4 * b + 2)
    column = tile * (OUT // HALVES)  # of the output, or the first row of the weight
    gap = N // 2  # between gate and up rows
    word = tile * WORDS if TRANSPOSE else column

    x_smem = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_M, IN], x.layout)
    p_smem = gl.allocate_shared_memory(gl.int32, [PACKED_STAGES, BLOCK_N, WORDS], w.layout)
    halves = p_smem
    h_smem = p_smem  # not used if there are no high bits
    high_halves = p_smem
    if w_high is not None:
        H_WORDS: gl.constexpr = w_high.block_shape[1]
        h_smem = gl.allocate_shared_memory(
            gl.int32, [PACKED_STAGES, BLOCK_N, H_WORDS], w_high.layout
        )
        high_halves = h_smem
    if HALVES == 2:
        PACKED_LAYOUT: gl.constexpr = w.layout
        shape: gl.constexpr = [2 * PACKED_STAGES, BLOCK_N // 2, WORDS]
        halves = reinterpret(p_smem, gl.int32, shape, PACKED_LAYOUT)
        if w_high is not None:
            HIGH_LAYOUT: gl.constexpr = w_high.layout
            high_shape: gl.constexpr = [2 * PACKED_STAGES, BLOCK_N // 2, H_WORDS]
            high_halves = reinterpret(h_smem, gl.int32, high_shape, HIGH_LAYOUT)
    w_smem = gl.allocate_shared_memory(
        dtype, [W_BUFFERS, BLOCK_N, BLOCK_K], gl.NVMMASharedLayout(128, 16, 2)
    )
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [PACKED_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), 1)
    for i in gl.static_range(PACKED_STAGES):
        mbarrier.init(p_full.index(i), 1)
    fence_async_shared()  # makes the mbarriers visible to TMA
    barrier()
    row = e * N
    for i in gl.static_range(PACKED_STAGES):
        expect_packed(w, w_high, p_full, i, steps, HALVES, PACKED_STAGES)
        load_packed(
            w, halves, w_high, high_halves, p_full, i, steps, row, word, gap,
            TRANSPOSE, HALVES, PACKED_STAGES, FORMAT,
        )  # fmt: skip
    for i in gl.static_range(NUM_STAGES):
        mbarrier.expect(full.index(i), BLOCK_M * IN * 2, i < steps)
        async_load(x, [first, i * IN], full.index(i), x_smem.index(i), i < steps)

    expert = e
    if has_whole_levels(FORMAT):
        tables = byte_words(FORMAT)
    else:
        tables = table_words(FORMAT) if is_level(FORMAT) else e2m1_tables(unknown_zero())
    e = e.to(gl.int64)
    if SCALE == "e4m3":
        w_scale_ptr = w_scale_ptr.to(gl.pointer_type(gl.uint8))
    w_scale_ptr += e * w_scale_stride_e
    TWO_LEVELS: gl.constexpr = w_scale_ptr.dtype.element_ty == gl.int8
    if w_factor_ptr is not None:
        w_factor_ptr += e * w_factor_stride_e
    if HAS_ZERO:
        if SCALE != "minimum":
            w_zero_ptr = w_zero_ptr.to(gl.pointer_type(gl.uint8))
        w_zero_ptr += e * w_zero_stride_e
    s, zero, above = scales_of_step(
        0, steps, w_scale_ptr, w_zero_ptr, w_factor_ptr, column, N, gap,
        w_scale_stride_n, w_scale_stride_g, w_zero_stride_n, w_zero_stride_g, w_factor_stride_n,
        TRANSPOSE, BLOCK_N, BLOCK_K, HALVES, GROUPS, SCALE_ROWS, SCALE_GROUP, EVEN, SCALES,
    )  # fmt: skip
    mbarrier.wait(p_full.index(0), 0)
    p = p_smem.index(0).load(PACKED)
    high = p
    if w_high is not None:
        high = load_high(h_smem.index(0), 0, WORDS, NUM_WARPS, FORMAT)
    w_smem.index(0).store(decode(p, s, zero, above, tables, high, GROUPS, FORMAT, SCALE, HAS_ZERO))
    fence_async_shared()
    expect_packed(w, w_high, p_full, PACKED_STAGES, steps, HALVES, PACKED_STAGES)
    barrier()
    load_packed(
        w, halves, w_high, high_halves, p_full, PACKED_STAGES, steps, row, word, gap,
        TRANSPOSE, HALVES, PACKED_STAGES, FORMAT,
    )  # fmt: skip
    s, zero, above = scales_of_step(
        1, steps, w_scale_ptr, w_zero_ptr, w_factor_ptr, column, N, gap,
        w_scale_stride_n, w_scale_stride_g, w_zero_stride_n, w_zero_stride_g, w_factor_stride_n,
        TRANSPOSE, BLOCK_N, BLOCK_K, HALVES, GROUPS, SCALE_ROWS, SCALE_GROUP, EVEN, SCALES,
    )  # fmt: skip
    next_s, next_zero, next_above = scales_of_step(
        2, steps, w_scale_ptr, w_zero_ptr, w_factor_ptr, column, N, gap,
        w_scale_stride_n, w_scale_stride_g, w_zero_stride_n, w_zero_stride_g, w_factor_stride_n,
        TRANSPOSE, BLOCK_N, BLOCK_K, HALVES, GROUPS, SCALE_ROWS, SCALE_GROUP, EVEN, SCALES,
    )  # fmt: skip
    acc = gl.zeros([BLOCK_M, OUT], gl.float32, MMA)
    slot, phase = steps * 0, steps * 0
    for i in range(steps - 1):
        mbarrier.wait(full.index(slot), phase)
        acc = issue(x_smem.index(slot), w_smem.index(i % W_BUFFERS), acc, TRANSPOSE)
        following = i + 1
        mbarrier.wait(p_full.index(following % PACKED_STAGES), following // PACKED_STAGES & 1)
        p = p_smem.index(following % PACKED_STAGES).load(PACKED)
        high = p
        if w_high is not None:
            place = h_smem.index(following % PACKED_STAGES)
            high = load_high(place, following, WORDS, NUM_WARPS, FORMAT)
        next_slot, next_phase = advance_slot(slot, phase, NUM_STAGES)
        # of step i - 2, for which all warps have waited, as of its decoded weights
        at = [first, following * IN]
        async_load(x, at, full.index(next_slot), x_smem.index(next_slot), i > 1)
        after, _ = advance_slot(next_slot, next_phase, NUM_STAGES)  # the slot of step i - 1
        mbarrier.expect(full.index(after), BLOCK_M * IN * 2, (i > 0) & (i + 2 < steps))
        expect_packed(w, w_high, p_full, following + PACKED_STAGES, steps, HALVES, PACKED_STAGES)
        w_smem.index(following % W_BUFFERS).store(
            decode(p, s, zero, above, tables, high, GROUPS, FORMAT, SCALE, HAS_ZERO)
        )
        fence_async_shared()
        # the fence waits for loads that are under way, so they begin as long before it as can be
        s, zero, above = next_s, next_zero, next_above
        next_s, next_zero, next_above = scales_of_step(
            i + 3, steps, w_scale_ptr, w_zero_ptr, w_factor_ptr, column, N, gap,
            w_scale_stride_n, w_scale_stride_g, w_zero_stride_n, w_zero_stride_g,
            w_factor_stride_n,
            TRANSPOSE, BLOCK_N, BLOCK_K, HALVES, GROUPS, SCALE_ROWS, SCALE_GROUP, EVEN, SCALES,
        )  # fmt: skip
        acc = warpgroup_mma_wait(1, [acc])
        barrier()
        load_packed(
            w, halves, w_high, high_halves, p_full, following + PACKED_STAGES, steps, row, word,
            gap, TRANSPOSE, HALVES, PACKED_STAGES, FORMAT,
        )  # fmt: skip
        slot, phase = next_slot, next_phase
    next_slot, next_phase = advance_slot(slot, phase, NUM_STAGES)
    if low_rows is not None:  # one more step, into places that nobody reads any more
        R: gl.constexpr = low_rows.block_shape[1]
        ROWS_LAYOUT: gl.constexpr = low_rows.layout
        MATRIX_LAYOUT: gl.constexpr = low_matrix.layout
        free = w_smem.index(steps % W_BUFFERS)
        rows_smem = reinterpret(x_smem.index(next_slot), dtype, [BLOCK_M, R], ROWS_LAYOUT)
        if TRANSPOSE:
            matrix_smem = reinterpret(free, dtype, [R, OUT], MATRIX_LAYOUT)
            at = [expert * R, column]
        else:
            matrix_smem = reinterpret(free, dtype, [OUT, R], MATRIX_LAYOUT)
            at = [expert * N + column, 0]
        mbarrier.expect(full.index(next_slot), (BLOCK_M + OUT) * R * 2)
        async_load(low_rows, [first, 0], full.index(next_slot), rows_smem)
        async_load(low_matrix, at, full.index(next_slot), matrix_smem)
    mbarrier.wait(full.index(slot), phase)
    acc = issue(x_smem.index(slot), w_smem.index((steps - 1) % W_BUFFERS), acc, TRANSPOSE)
    acc = warpgroup_mma_wait(0, [acc])

    acc *= shift(FORMAT, SCALE)
    if w_factor_ptr is not None and not TWO_LEVELS:  # the global scale of an expert, or of a row
        if FACTOR_ROWS:
            n = tile_rows(column, gap, OUT, HALVES, gl.SliceLayout(0, MMA)).to(gl.int64)
            factor = gl.load(w_factor_ptr + n * w_factor_stride_n, mask=n < N, other=1.0)
            acc /= gl.expand_dims(factor, 0)
        else:
            acc /= gl.load(w_factor_ptr)
    if low_rows is not None:
        mbarrier.wait(full.index(next_slot), next_phase)
        acc = issue(rows_smem, matrix_smem, acc, TRANSPOSE)
        acc = warpgroup_mma_wait(0, [acc])
    if bias_ptr is not None:
        n = tile_rows(column, gap, OUT, HALVES, gl.SliceLayout(0, MMA))
        bias = gl.load(bias_ptr + e * bias_stride_e + n * bias_stride_n, mask=n < N, other=0.0)
        acc += gl.expand_dims(bias.to(gl.float32), 0)
    if ACTIVATION == "":
        y = acc
    elif GATED:
        if INTERLEAVED:
            gate, up = acc.reshape((BLOCK_M, OUT // 2, 2)).split()
            column //= 2
        else:
            gate, up = acc.reshape((BLOCK_M, 2, OUT // 2)).permute((0, 2, 1)).split()
        y = activate_two(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
        out_size //= 2
    else:
        y = activate_one(acc, ACTIVATION)
    LANES: gl.constexpr = y.shape[1] // 8
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [NUM_WARPS, 1], [1, 0])
    y = gl.convert_layout(y.to(y_ptr.dtype.element_ty), ROWS)
    position = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, ROWS))
    columns_of = gl.expand_dims(column + gl.arange(0, y.shape[1], gl.SliceLayout(0, ROWS)), 0)
    ok = gl.expand_dims(position < end, 1)
    if not EVEN:
        ok &= columns_of < out_size
    y_ptrs = y_ptr + gl.expand_dims(position.to(gl.int64) * out_size, 1) + columns_of
    gl.store(y_ptrs, y, mask=ok)


_layout = cache(gl.NVMMASharedLayout)  # one object each: launches are keyed by it


@lru_cache(maxsize=4096)
def matrix_boxes(rows: int, columns: int, size: int, *block: int) -> Boxes:
    """Boxes of a contiguous matrix of elements of so many bytes, whose rows are at most 128 bytes
    or swizzled in parts of 128; those of 16 bytes are not swizzled.
    """
    row = size * block[1]
    layout = _layout(min(row, 128) if row > 16 else 0, 8 * size, 2)
    return Boxes([rows, columns], [columns, 1], list(block), layout)


def why_not(w: MixedOperand, dtype: torch.dtype, transpose: bool) -> str | None:
    """Why this kernel does not multiply rows of a dtype with a weight; None if it does."""
    of = w.format
    block_n, block_k = (STEP, BLOCK_OUT) if transpose else (BLOCK_OUT, STEP)
    if dtype != torch.bfloat16:
        return "its rows are not in bf16"
    coded = of.name != "e2m1" and of.scale in ("e8m0", "e4m3")  # scales of e2m1 alone
    if of.name not in FORMATS or coded or (of.bits == 8 and w.has_zero):
        return "its format is none of this kernel's"
    if w.data.data_ptr() % 16 or not w.data.is_contiguous():
        return "it is not contiguous, or begins elsewhere than at a multiple of 16 bytes"
    of_rows = w.strides.w_factor_stride_n > 0 and not of.two_levels
    if of_rows and (transpose or of.name != "e2m1"):
        return "it has scales of rows"
    if of.high_bits and (transpose or w.K % 128):
        return "its columns are in planes, of which this product does not take whole units"
    if w.K % block_k or (transpose and w.N % block_n):
        return "tiles do not divide its size"
    if of.group and block_k % of.group and of.group % block_k:
        return "tiles do not divide its groups"
    return None


def low_rank_boxes(
    w: MixedOperand, low: tuple[Tensor, Tensor] | None, transpose: bool
) -> LowRankBoxes | None:
    """Boxes of what is added, or of nothing; None for other ranks than RANKS and tensors that
    begin elsewhere than at multiples of 16 bytes.
    """
    if low is None:
        return LowRankBoxes(None, None)
    rank = low[0].shape[1]
    if rank not in RANKS or any([t.data_ptr() % 16 for t in low]):
        return None
    box = (rank, BLOCK_OUT) if transpose else (BLOCK_OUT, rank)
    _, rows, columns = low[1].shape
    return LowRankBoxes(
        matrix_boxes(*low[0].shape, 2, BLOCK_M, rank).of(low[0]),
        matrix_boxes(w.E * rows, columns, 2, *box).of(low[1]),
    )


def multiply(
    y: Tensor,
    x: Tensor,
    w: MixedOperand,
    routing: Routing,
    transpose: bool,
    low: tuple[Tensor, Tensor] | None = None,
    activation: Activated = NOTHING,
) -> Launch | None:
    """As packed.multiply; None for operands that this kernel does not take (`why_not`, other ranks
    than RANKS, tensors that begin elsewhere than at multiples of 16 bytes). With an activation y
    is that of the product; if it is gated, N must be a multiple of BLOCK_OUT, and no `low` there.
    """
    of = w.format
    block_n, block_k = (STEP, BLOCK_OUT) if transpose else (BLOCK_OUT, STEP)
    if why_not(w, x.dtype, transpose) or x.data_ptr() % 16:
        return None
    added = low_rank_boxes(w, low, transpose)
    if added is None:
        return None
    gated = activation.GATED
    assert not gated or (w.N % BLOCK_OUT == 0 and low is None)
    box_rows = block_n // 2 if gated and not activation.INTERLEAVED else block_n
    words = w.K * of.bits // 32
    high = of.high_bits
    in_step = 4 if high else of.bits  # of a weight, in the boxes
    w_boxes = matrix_boxes(w.E * w.N, words, 4, box_rows, block_k * in_step // 32)
    data = w.data.view(torch.int32)
    out_size = w.K if transpose else w.N
    even = out_size % BLOCK_OUT == 0
    args = PackedSm90(
        y=y,
        x=matrix_boxes(*x.shape, 2, BLOCK_M, STEP).of(x),
        low=added,
        boxes=WeightBoxes(
            w_boxes.of(data),
            matrix_boxes(w.E * w.N, words, 4, box_rows, 4 * high).of(data) if high else None,
        ),
        pointers=w.pointers,
        index=routing.index,
        num_blocks=routing.num_blocks,
        E=routing.E,
        N=w.N,
        K=w.K,
        strides=w.strides,
        decoding=decoding_of(of),
        of_rows=scales_of_rows(w),
        activation=activation,
        tile=WgmmaTile(
            *(transpose, even, GROUP_M, block_n, block_k, NUM_STAGES),
            *(2 if high else 16 // of.bits, NUM_WARPS),
        ),
    )
    grid = (routing.num_blocks * cdiv(out_size, BLOCK_OUT), 1, 1)
    return Launch(moe_ops_train_wgmma_packed, grid, args, NUM_WARPS)
