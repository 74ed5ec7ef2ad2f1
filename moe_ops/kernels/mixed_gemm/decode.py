"""Weights of 4 to 8 bits decoded to 16-bit numbers in registers. Imported at first launch only.

The functions in assembly decode 4 bytes of a row to bf16. They are elementwise: byte i becomes
element i, whatever the layout.

FORMAT and SCALE are explained in kernels/mixed_gemm/sm80_mma.py.
"""

import triton
import triton.language as tl

from moe_ops.kernels.device.e4m3 import decode, round_e4m3
from moe_ops.kernels.device.interpreter import INTERPRET
from moe_ops.kernels.mixed_gemm.levels import is_level, level, level_pair
from moe_ops.schemes import SUPER_BLOCK

# What `scale_above` adds: four bits for each of the eight mantissas of e4m3, the first in the
# lowest bits. These may be 0 to 8, 5 to 9, 4 or 5, 7 to 15, 0 to 8, 5 to 10, 6 to 9, and anything.
ABOVE = tl.constexpr(0x77777550)


@triton.jit
def int4_pair(p):
    """(even columns, odd columns) in bf16: nibbles minus 8. The bits of 128 + n are assembled, and
    136 is subtracted.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, q, r, o, m, u;
        mov.b32 o, 0x43004300; mov.b32 m, 0xc308c308; mov.b32 u, 0x3f803f80;
        prmt.b32 q, $4, 0, 0x3120; shr.u32 r, q, 8;
        lop3.b32 a, q, 0x000f000f, o, 0xea;
        lop3.b32 b, r, 0x000f000f, o, 0xea;
        shr.u32 c, q, 4; lop3.b32 c, c, 0x000f000f, o, 0xea;
        shr.u32 d, q, 12; lop3.b32 d, d, 0x000f000f, o, 0xea;
        fma.rn.bf16x2 $0, a, u, m; fma.rn.bf16x2 $1, b, u, m;
        fma.rn.bf16x2 $2, c, u, m; fma.rn.bf16x2 $3, d, u, m;
        }""",
        "=r,=r,=r,=r,r",
        [p],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def int4_pair_zero(p, offset):
    """As int4_pair, minus a zero point: `offset` is -128 - zero point, in bf16."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, q, r, o, u;
        mov.b32 o, 0x43004300; mov.b32 u, 0x3f803f80;
        prmt.b32 q, $4, 0, 0x3120; shr.u32 r, q, 8;
        lop3.b32 a, q, 0x000f000f, o, 0xea;
        lop3.b32 b, r, 0x000f000f, o, 0xea;
        shr.u32 c, q, 4; lop3.b32 c, c, 0x000f000f, o, 0xea;
        shr.u32 d, q, 12; lop3.b32 d, d, 0x000f000f, o, 0xea;
        fma.rn.bf16x2 $0, a, u, $5; fma.rn.bf16x2 $1, b, u, $6;
        fma.rn.bf16x2 $2, c, u, $5; fma.rn.bf16x2 $3, d, u, $6;
        }""",
        "=r,=r,=r,=r,r,r,r",
        [p, offset],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


SUPER = tl.constexpr(SUPER_BLOCK)


@triton.jit
def factors_above(ptr, offsets, HAS_ZERO: tl.constexpr):
    """Where the factors of the scales of 256 columns lie, in 32 bits with those of minima behind
    them if there are any. `offsets` count fp16 numbers.
    """
    if HAS_ZERO:
        return ptr.to(tl.pointer_type(tl.uint32)) + offsets // 2
    else:
        return ptr + offsets


@triton.jit
def half(bits):
    """fp32 of the fp16 number in the low half of 32 bits."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def in_one_level(
    s,  # int8 codes of scales, (rows,) or (rows, GROUPS)
    zero,  # those of minima, if there are any
    above,  # (rows,) from factors_above
    GROUPS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """fp32 scales and minima, which are exact."""
    if GROUPS > 1:
        above = above[:, None]
    if HAS_ZERO:
        return s.to(tl.float32) * half(above), zero.to(tl.float32) * half(above >> 16)
    else:
        return s.to(tl.float32) * above.to(tl.float32), zero


@triton.jit
def int4_pair_minimum(p, s, near, far):
    """(even columns, odd columns) in bf16: nibbles times a scale plus a minimum m, in fp32 and
    rounded once. `near` is m - 128 s and `far` m - 2048 s, in fp32.

    A shift brings a byte to bits 12 to 19 of fp32 numbers: 2048 plus its low nibble, 128 plus its
    high one. The rounding of `far` is at most 2^-12 of a scale.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 q, o, u, l, h, a, b;
        mov.b32 o, 0x45000000; mov.b32 u, 0x43000000;
        shl.b32 q, $4, 12;
        lop3.b32 l, q, 0x0000f000, o, 0xea; lop3.b32 h, q, 0x000f0000, u, 0xea;
        fma.rn.f32 l, l, $5, $13; fma.rn.f32 h, h, $5, $9;
        shl.b32 q, $4, 4;
        lop3.b32 a, q, 0x0000f000, o, 0xea; lop3.b32 b, q, 0x000f0000, u, 0xea;
        fma.rn.f32 a, a, $6, $14; fma.rn.f32 b, b, $6, $10;
        cvt.rn.bf16x2.f32 $0, a, l; cvt.rn.bf16x2.f32 $2, b, h;
        shr.u32 q, $4, 4;
        lop3.b32 l, q, 0x0000f000, o, 0xea; lop3.b32 h, q, 0x000f0000, u, 0xea;
        fma.rn.f32 l, l, $7, $15; fma.rn.f32 h, h, $7, $11;
        shr.u32 q, $4, 12;
        lop3.b32 a, q, 0x0000f000, o, 0xea; lop3.b32 b, q, 0x000f0000, u, 0xea;
        fma.rn.f32 a, a, $8, $16; fma.rn.f32 b, b, $8, $12;
        cvt.rn.bf16x2.f32 $1, a, l; cvt.rn.bf16x2.f32 $3, b, h;
        }""",
        "=&r,=&r,=&r,=&r,r,f,f,f,f,f,f,f,f,f,f,f,f",
        [p, s, near, far],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def scale_above(s):
    """e4m3 scales (as uint8) times 64 in bf16, and a little more: their four lowest bits, which
    e4m3 leaves 0, get a number that depends on the three bits of mantissa above them.

    With it, products with 1 to 8, rounded to bf16 and then cut off after four significant bits,
    are the products with the scale itself rounded to four bits, ties to even. A cut takes one
    instruction for two weights, rounding takes four. Powers of two, and so zero, get nothing.
    """
    bits = decode(s, tl.bfloat16).to(tl.int16, bitcast=True)
    more = (ABOVE >> ((bits >> 2) & 28).to(tl.int32)) & 15
    return (bits | more.to(tl.int16)).to(tl.bfloat16, bitcast=True) * 64.0


@triton.jit
def int4_pair_e4m3(p, s):
    """(even columns, odd columns) in bf16: nibbles minus 8 times a scale, rounded to e4m3. `s` is
    `scale_above`.

    As bf16, an integer of 8 bits is that multiple of 2^-133, a subnormal number. So neither nibble
    of a byte needs a shift: one fma multiplies it by 2^127 or 2^123 and subtracts 8 / 64. All
    products are multiples of e4m3's least number, so that rounding to four significant bits is
    rounding to e4m3.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, q, r, l, h, m, z;
        mov.b32 l, 0x7f007f00; mov.b32 h, 0x7d007d00;
        mov.b32 m, 0xbe00be00; mov.b32 z, 0x80008000;
        prmt.b32 q, $4, 0, 0x3120; shr.u32 r, q, 8;
        and.b32 a, q, 0x000f000f; and.b32 b, r, 0x000f000f;
        and.b32 c, q, 0x00f000f0; and.b32 d, r, 0x00f000f0;
        fma.rn.bf16x2 a, a, l, m; fma.rn.bf16x2 b, b, l, m;
        fma.rn.bf16x2 c, c, h, m; fma.rn.bf16x2 d, d, h, m;
        fma.rn.bf16x2 a, a, $5, z; fma.rn.bf16x2 b, b, $6, z;
        fma.rn.bf16x2 c, c, $5, z; fma.rn.bf16x2 d, d, $6, z;
        and.b32 $0, a, 0xfff0fff0; and.b32 $1, b, 0xfff0fff0;
        and.b32 $2, c, 0xfff0fff0; and.b32 $3, d, 0xfff0fff0;
        }""",
        "=r,=r,=r,=r,r,r,r",
        [p, s],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.constexpr_function
def is_e2m1(FORMAT):
    return FORMAT in ("e2m1", "e2m1_words")


@triton.constexpr_function
def in_pairs(FORMAT):
    """Whether a byte has two columns, or the low bits of two in planes."""
    nibbles = FORMAT in ("int4", "int4_e4m3") or is_e2m1(FORMAT) or is_level(FORMAT)
    return nibbles or high_bits(FORMAT) > 0


@triton.constexpr_function
def high_bits(FORMAT):
    """Bits of a column above its low four, in planes (`schemes.ElementFormat.high_bits`); else
    0.
    """
    return {"int5": 1, "int6": 2}.get(FORMAT, 0)


@triton.constexpr_function
def runs_of(FORMAT):
    """Runs of low bytes that share a run of high bytes, of formats in planes; else 1."""
    return 4 // high_bits(FORMAT) if high_bits(FORMAT) else 1


@triton.jit
def e2m1_pair(p, s):
    """(even columns, odd columns) in bf16: e2m1 nibbles times 2^-126 times a scale (bf16).

    A multiplication moves sign and magnitude to their places in bf16, because logic instructions
    issue at half rate.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, q, r, z;
        mov.b32 z, 0x80008000;
        prmt.b32 q, $4, 0, 0x3120; shr.u32 r, q, 8;
        and.b32 a, q, 0x000f000f; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81c081c0;
        and.b32 b, r, 0x000f000f; mul.lo.u32 b, b, 0x1040; and.b32 b, b, 0x81c081c0;
        and.b32 c, q, 0x00f000f0; mul.lo.u32 c, c, 0x0104; and.b32 c, c, 0x81c081c0;
        and.b32 d, r, 0x00f000f0; mul.lo.u32 d, d, 0x0104; and.b32 d, d, 0x81c081c0;
        fma.rn.bf16x2 $0, a, $5, z; fma.rn.bf16x2 $1, b, $6, z;
        fma.rn.bf16x2 $2, c, $5, z; fma.rn.bf16x2 $3, d, $6, z;
        }""",
        "=r,=r,=r,=r,r,r,r",
        [p, s],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def scale_bf16x2(s, SCALE: tl.constexpr):
    """Scales in bf16, in both halves of 32 bits: e8m0 codes times 2^94, or e4m3 codes times 2^118.

    With the 2^-126 of e2m1_pair, a weight is multiplied by 2^-32 or 2^-8 in all. One
    multiplication moves the bits of both halves to their places in bf16, for e4m3 times 2^-120.
    """
    if SCALE == "e8m0":
        return s.to(tl.int32) * 0x00800080 + 0x2F002F00
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 m, z, s; mov.b32 m, 0x7b007b00; mov.b32 z, 0x80008000;
            fma.rn.bf16x2 s, $1, m, z; fma.rn.bf16x2 $0, s, m, z;
            }""",
            "=r,r",
            [s.to(tl.int32) * 0x00100010],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def int8_value(p):
    """bf16 of int8 codes (as uint8): 128 + the low 7 bits, minus 128 or 256."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, q, r, o, m, u;
        mov.b32 o, 0x43004300; mov.b32 m, 0xc300c300; mov.b32 u, 0x3f803f80;
        prmt.b32 q, $2, 0, 0x3120; shr.u32 r, q, 8;
        lop3.b32 a, q, 0x007f007f, o, 0xea; lop3.b32 b, q, 0x00800080, m, 0xea;
        lop3.b32 c, r, 0x007f007f, o, 0xea; lop3.b32 d, r, 0x00800080, m, 0xea;
        fma.rn.bf16x2 $0, a, u, b; fma.rn.bf16x2 $1, c, u, d;
        }""",
        "=r,=r,r",
        [p],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e4m3_value(p):
    """bf16 of e4m3 codes (as uint8); the NaN code becomes 480."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, q, s, m, z;
        mov.b32 m, 0x7b807b80; mov.b32 z, 0x80008000;
        prmt.b32 q, $2, 0, 0x3120; shl.b32 s, q, 8; shl.b32 a, q, 4; and.b32 a, a, 0x07f007f0;
        lop3.b32 a, s, 0x80008000, a, 0xea;
        shr.u32 b, q, 4; and.b32 b, b, 0x07f007f0; lop3.b32 b, q, 0x80008000, b, 0xea;
        fma.rn.bf16x2 $0, a, m, z; fma.rn.bf16x2 $1, b, m, z;
        }""",
        "=r,=r,r",
        [p],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e2m1(code):
    """fp32 of e2m1 codes in the low 4 bits; the other bits are zero."""
    magnitude = (code & 7).to(tl.int32)
    exponent, mantissa = magnitude >> 1, magnitude & 1
    normal = ((2 + mantissa) << exponent).to(tl.float32) * 0.25
    value = tl.where(exponent == 0, 0.5 * mantissa.to(tl.float32), normal)
    return tl.where(code > 7, -value, value)


@triton.constexpr_function
def odd_bits(FORMAT):
    """Bits of a column, if they are 6 and follow each other; 0 of other formats. Such columns are
    loaded one by one.
    """
    return 6 if FORMAT in ("e3m2", "e2m3") else 0


@triton.jit
def codes_across_bytes(p, ptrs, stride, column, end, BITS: tl.constexpr):
    """Codes of 6 bits: from the bytes in which they begin, and their other bits from the
    next.
    """
    place = BITS * column % 8
    more = place + BITS > 8
    following = tl.load(ptrs + stride, mask=(more & (column < end))[None, :], other=0)
    both = p.to(tl.int32) | following.to(tl.int32) << 8
    return (both >> place[None, :] & ((1 << BITS) - 1)).to(tl.uint8)


@triton.constexpr_function
def plane_assembly(HIGH, RUN, MIDDLE):
    """What `plane_pair` runs: the bits of 128 + code are assembled, and 128 + MIDDLE is
    subtracted.
    """
    mask = ((1 << HIGH) - 1 << 4) * 0x10001
    first = 2 * HIGH * RUN
    lines = f"""{{
        .reg .b32 q, g, a, b, o, u, m;
        mov.b32 o, 0x43004300; mov.b32 u, 0x3f803f80;
        mov.b32 m, {0xC300C300 + MIDDLE * 0x10001:#x};
        prmt.b32 q, $4, 0, 0x3120; prmt.b32 g, $5, 0, 0x3120;"""
    places = (0, first), (8, first + 8), (4, first + HIGH), (12, first + HIGH + 8)
    for out in range(4):  # Triton before 3.7 reads this, too, and takes no nested targets
        low, high = places[out]
        move = f"shr.u32 b, g, {high - 4};" if high > 4 else f"shl.b32 b, g, {4 - high};"
        lines += f"""
        shr.u32 a, q, {low}; lop3.b32 a, a, 0x000f000f, o, 0xea;
        {move} lop3.b32 a, b, {mask:#x}, a, 0xea; fma.rn.bf16x2 ${out}, a, u, m;"""
    return lines + "\n}"


@triton.jit
def plane_pair(p, h, FORMAT: tl.constexpr, RUN: tl.constexpr, MIDDLE: tl.constexpr):
    """(even columns, odd columns) in bf16: codes of a run in planes, less MIDDLE, of its low
    bytes and of the bytes of high bits.
    """
    ASSEMBLY: tl.constexpr = plane_assembly(high_bits(FORMAT), RUN, MIDDLE)
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        "=&r,=&r,=&r,=&r,r,r",
        [p, h],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def integer(code, MIDDLE: tl.constexpr):
    """fp32 of codes from 0 to 255, less MIDDLE."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)


@triton.jit
def six_bit_value(code, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """bf16 or fp32 of codes of 6 bits. Sign, exponent and mantissa are moved to their places in
    `dtype`, and a multiplication by a power of two corrects the exponent bias.
    """
    MANTISSA: tl.constexpr = 2 if FORMAT == "e3m2" else 3
    EXPONENT_CORRECTION: tl.constexpr = 2.0**124 if FORMAT == "e3m2" else 2.0**126
    bits = code.to(tl.int32)
    bits = ((bits & 32) << 26) | ((bits & 31) << (23 - MANTISSA))
    if dtype == tl.bfloat16:
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) * EXPONENT_CORRECTION
    else:
        return bits.to(tl.float32, bitcast=True) * EXPONENT_CORRECTION


@triton.jit
def group_scale(s, SCALE: tl.constexpr):
    """fp32 of loaded scales."""
    if SCALE == "e8m0":
        bits = s.to(tl.int32) << 23
        return tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)  # 2^-127
    elif SCALE == "e4m3":
        return decode(s, tl.float32)
    else:
        return s.to(tl.float32)


@triton.jit
def spread(s, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """(BLOCK_N, GROUPS) or (BLOCK_N,) to (BLOCK_N, GROUPS * EACH): each is repeated for every byte
    of its group.
    """
    if GROUPS == 1:
        return tl.broadcast_to(s[:, None], (BLOCK_N, EACH))
    else:
        return tl.broadcast_to(s[:, :, None], (BLOCK_N, GROUPS, EACH)).reshape(
            BLOCK_N, GROUPS * EACH
        )


@triton.jit
def times(w, s, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """w * s in bf16 of w (BLOCK_N, GROUPS * EACH) in bf16, whose scales may have more bits.

    Such a scale is the sum of two numbers of bf16, so that one fma rounds the product as fp32
    would, but for ties.
    """
    high = s.to(tl.bfloat16)
    if s.dtype == tl.bfloat16:
        return w * spread(high, BLOCK_N, GROUPS, EACH)
    else:
        low = (s.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
        rest = w * spread(low, BLOCK_N, GROUPS, EACH)
        return tl.fma(w, spread(high, BLOCK_N, GROUPS, EACH), rest)


@triton.jit
def weights(
    p,  # uint8 (BLOCK_N, BLOCK_K), or with two columns a byte (BLOCK_N, BLOCK_K // 2)
    s,  # scales of these columns (BLOCK_N, GROUPS), if weights are scaled
    zero,  # zero points or minima of these columns, (BLOCK_N,) or (BLOCK_N, GROUPS)
    dtype: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    high=None,  # of formats in planes the bytes of high bits of run RUN, whose low bytes are p
    RUN: tl.constexpr = 0,
):
    """(w0, w1) in `dtype`: even and odd columns of formats of 4 bits, twice all columns of others.
    int4 weights with e4m3 scales are rounded to e4m3. In bf16, e2m1 is smaller by a power of two
    (`scale_bf16x2`), and levels of a table are in units of it and rounded (`levels.py`), so that a
    level that is scaled is rounded twice.
    """
    PAIRS: tl.constexpr = in_pairs(FORMAT)
    SIX: tl.constexpr = FORMAT == "e3m2" or FORMAT == "e2m3"
    HIGH: tl.constexpr = high_bits(FORMAT)
    MIDDLE: tl.constexpr = 8 << HIGH if HIGH > 0 and not HAS_ZERO else 0
    SCALED: tl.constexpr = SCALE == "e8m0" or SCALE == "e4m3" or SCALE == "weight"
    MINIMUM: tl.constexpr = SCALE == "minimum"
    ROUNDED: tl.constexpr = FORMAT == "int4" and SCALE == "e4m3"
    EACH: tl.constexpr = (BLOCK_K // 2 if PAIRS else BLOCK_K) // GROUPS
    if dtype == tl.bfloat16 and not INTERPRET:
        if FORMAT == "e2m1":
            s = scale_bf16x2(s, SCALE).to(tl.int16).to(tl.bfloat16, bitcast=True)
            w0, w1 = e2m1_pair(p, spread(s, BLOCK_N, GROUPS, EACH))
        elif ROUNDED:
            w0, w1 = int4_pair_e4m3(p, spread(scale_above(s), BLOCK_N, GROUPS, EACH))
        elif FORMAT == "int4":
            if MINIMUM:
                s, zero = s.to(tl.float32), zero.to(tl.float32)
                w0, w1 = int4_pair_minimum(
                    p,
                    spread(s, BLOCK_N, GROUPS, EACH),
                    spread(zero - 128.0 * s, BLOCK_N, GROUPS, EACH),
                    spread(zero - 2048.0 * s, BLOCK_N, GROUPS, EACH),
                )
            elif HAS_ZERO:
                w0, w1 = int4_pair_zero(
                    p, spread(-128.0 - zero.to(tl.bfloat16), BLOCK_N, GROUPS, EACH)
                )
            else:
                w0, w1 = int4_pair(p)
        elif FORMAT == "int8":
            w0 = int8_value(p)
            if MINIMUM:
                s = s.to(tl.float32)
                least = spread(zero.to(tl.float32) + 128.0 * s, BLOCK_N, GROUPS, EACH)
                w0 = tl.fma(w0.to(tl.float32), spread(s, BLOCK_N, GROUPS, EACH), least)
                w0 = w0.to(tl.bfloat16)
            elif HAS_ZERO:  # at most 255, which bf16 holds
                zero = zero.to(tl.int8, bitcast=True).to(tl.bfloat16)
                w0 -= spread(zero, BLOCK_N, GROUPS, EACH)
            w1 = w0
        elif HIGH > 0:
            w0, w1 = plane_pair(p, high, FORMAT, RUN, MIDDLE)
            if HAS_ZERO:
                s = spread(s.to(tl.float32), BLOCK_N, GROUPS, EACH)
                zero = spread(zero.to(tl.float32), BLOCK_N, GROUPS, EACH)
                w0 = tl.fma(w0.to(tl.float32), s, zero).to(tl.bfloat16)
                w1 = tl.fma(w1.to(tl.float32), s, zero).to(tl.bfloat16)
            else:
                w0 = times(w0, s, BLOCK_N, GROUPS, EACH)
                w1 = times(w1, s, BLOCK_N, GROUPS, EACH)
        elif SIX:
            w0 = six_bit_value(p, FORMAT, tl.bfloat16)
            w1 = w0
        elif is_level(FORMAT):
            w0, w1 = level_pair(p, FORMAT)
        else:
            tl.static_assert(FORMAT == "e4m3")
            w0 = e4m3_value(p)
            w1 = w0
        if SCALED and FORMAT != "e2m1" and not ROUNDED:
            if SCALE == "e8m0":
                s = (s.to(tl.int16) * 128).to(tl.bfloat16, bitcast=True)
            elif SCALE == "e4m3":
                s = decode(s, tl.bfloat16)
            w0 = times(w0, s, BLOCK_N, GROUPS, EACH)
            w1 = times(w1, s, BLOCK_N, GROUPS, EACH) if PAIRS else w0
    else:
        if PAIRS:
            w0, w1 = p & 15, p >> 4
            if FORMAT == "e2m1":
                w0, w1 = e2m1(w0), e2m1(w1)
            elif is_level(FORMAT):
                w0, w1 = level(w0, FORMAT), level(w1, FORMAT)
            elif HIGH > 0:
                bits = (high >> (2 * HIGH * RUN)).to(tl.int32)
                MASK: tl.constexpr = ((1 << HIGH) - 1) << 4
                w0 = integer(w0.to(tl.int32) | (bits << 4 & MASK), MIDDLE)
                w1 = integer(w1.to(tl.int32) | (bits << (4 - HIGH) & MASK), MIDDLE)
        elif SIX:
            w0 = six_bit_value(p, FORMAT, tl.float32)
            w1 = w0
        elif FORMAT == "int8":
            w0 = p.to(tl.int8, bitcast=True)
            w1 = w0
        else:
            tl.static_assert(FORMAT == "e4m3")
            w0 = decode(p, tl.float32)
            w1 = w0
        w0, w1 = w0.to(tl.float32), w1.to(tl.float32)
        if MINIMUM:
            s = spread(s.to(tl.float32), BLOCK_N, GROUPS, EACH)
            if HAS_ZERO:
                zero = spread(zero.to(tl.float32), BLOCK_N, GROUPS, EACH)
                if FORMAT == "int8":
                    zero += 128.0 * s
                w0 = tl.fma(w0, s, zero)
                w1 = tl.fma(w1, s, zero)
            else:
                w0 *= s
                w1 *= s
        elif HAS_ZERO:
            zero = zero.to(tl.int8, bitcast=True).to(tl.float32)
            zero = spread(zero, BLOCK_N, GROUPS, EACH)
            w0 -= zero
            w1 -= zero
        elif FORMAT == "int4":
            w0 -= 8.0
            w1 -= 8.0
        if SCALED:
            s = spread(group_scale(s, SCALE), BLOCK_N, GROUPS, EACH)
            w0 *= s
            w1 *= s
            if ROUNDED:
                w0, w1 = round_e4m3(w0), round_e4m3(w1)
        w0, w1 = w0.to(dtype), w1.to(dtype)
    return w0, w1


@triton.jit
def operands(
    x,  # (BLOCK_M, BLOCK_K)
    p,  # as those of `weights`
    s,
    zero,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    high=None,
    RUN: tl.constexpr = 0,
):
    """(x0, x1, w0, w1) with x @ w.T = x0 @ w0.T + x1 @ w1.T. For formats whose bytes have no two
    columns, x @ w.T is x0 @ w0.T, and x1, w1 repeat x0, w0.
    """
    if INTERPRET:  # the interpreter's 16-bit products are wrong
        x = x.to(tl.float32)
    if in_pairs(FORMAT):
        x0, x1 = x.reshape(BLOCK_M, BLOCK_K // 2, 2).split()
    else:
        x0 = x
        x1 = x
    w0, w1 = weights(
        p, s, zero, x.dtype, BLOCK_N, BLOCK_K, GROUPS, FORMAT, SCALE, HAS_ZERO, high, RUN
    )
    return x0, x1, w0, w1
