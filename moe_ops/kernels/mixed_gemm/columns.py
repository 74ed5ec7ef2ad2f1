"""Tiles of packed weights decoded to 16-bit numbers in the order of their columns. Imported at
first launch only.

FORMAT and SCALE are explained in kernels/mixed_gemm/sm80_mma.py. `kernels/mixed_gemm/decode.py`
decodes even and odd columns apart, as its operands have them. Brought together, they take half an
instruction a weight more, which int4 and levels are spared here.
"""

import triton
import triton.language as tl

from moe_ops.kernels.mixed_gemm.decode import INTERPRET, in_pairs, spread, weights
from moe_ops.kernels.mixed_gemm.levels import is_level, level_words
from moe_ops.kernels.mixed_gemm.sm80_mma import unit

# int4 is smaller by 2^64: factors of even and of odd columns, which are 16 times as large
INT4_LOW, INT4_HIGH, INT4_SHIFT = (tl.constexpr(2.0**n) for n in (69, 65, 64))
INT4_FACTORS = tl.constexpr(0x60006200)  # both in bf16
MINUS_EIGHT = tl.constexpr(-0x5EFF5F00)  # -8 * 2^-64 in bf16, twice
MINUS_ZERO = tl.constexpr(-0x7FFF8000)  # in bf16, twice


@triton.jit
def int4_words(p, factors, offsets):
    """Neighbouring columns in the halves of 32 bits, in bf16: low nibbles times the lower factor,
    high nibbles times 16 times the upper one, each times 2^-133, plus offsets.

    As bf16, an integer of 8 bits is that multiple of 2^-133, a subnormal number. So neither nibble
    of a byte needs a shift.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $4, 0, 0x4040; prmt.b32 b, $4, 0, 0x4141;
        prmt.b32 c, $4, 0, 0x4242; prmt.b32 d, $4, 0, 0x4343;
        and.b32 a, a, 0x00f0000f; and.b32 b, b, 0x00f0000f;
        and.b32 c, c, 0x00f0000f; and.b32 d, d, 0x00f0000f;
        fma.rn.bf16x2 $0, a, $5, $9; fma.rn.bf16x2 $1, b, $6, $10;
        fma.rn.bf16x2 $2, c, $7, $11; fma.rn.bf16x2 $3, d, $8, $12;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
        [p, factors, offsets],
        dtype=tl.int32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def fma_words(a, b, c):
    """a * b + c of two numbers of bf16 in 32 bits each, rounded once."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [a, b, c],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def bits(x):
    """Those of x in bf16, as int32."""
    return x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def scaled_words(w, s, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """Two columns a word times their scale. A scale of more bits than bf16 is the sum of two
    numbers of bf16, so that one fma rounds the product as fp32 would, but for one of 256.
    """
    rest = tl.full(w.shape, MINUS_ZERO, tl.int32)
    high = s.to(tl.bfloat16)
    if s.dtype != tl.bfloat16:
        low = bits(s.to(tl.float32) - high.to(tl.float32)) * 0x10001
        rest = fma_words(w, spread(low, BLOCK_N, GROUPS, EACH), rest)
    return fma_words(w, spread(bits(high) * 0x10001, BLOCK_N, GROUPS, EACH), rest)


@triton.jit
def int4(
    p,  # uint8 (BLOCK_N, BLOCK_K // 2)
    s,
    zero,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """Words of two columns (BLOCK_N, BLOCK_K // 2), smaller by INT4_SHIFT.

    A bf16 scale and no zero point take one fma: the scaled nibble less 8 scales, rounded once.
    Otherwise the difference is exact, and is scaled then.
    """
    EACH: tl.constexpr = BLOCK_K // 2 // GROUPS
    wide = s.to(tl.float32)
    if s.dtype == tl.bfloat16 and not HAS_ZERO:
        factors = bits(wide * INT4_LOW) | bits(wide * INT4_HIGH) << 16
        offsets = bits(wide * (-8.0 / INT4_SHIFT)) * 0x10001
        w = int4_words(
            p, spread(factors, BLOCK_N, GROUPS, EACH), spread(offsets, BLOCK_N, GROUPS, EACH)
        )
    else:
        if HAS_ZERO:
            offsets = bits(zero.to(tl.float32) * (-1.0 / INT4_SHIFT)) * 0x10001
            offsets = spread(offsets, BLOCK_N, GROUPS, EACH)
        else:
            offsets = tl.full(p.shape, MINUS_EIGHT, tl.int32)
        w = int4_words(p, tl.full(p.shape, INT4_FACTORS, tl.int32), offsets)
        w = scaled_words(w, s, BLOCK_N, GROUPS, EACH)
    return w


@triton.jit
def apart(w, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """(BLOCK_N, BLOCK_K) numbers of bf16 of words of two."""
    even = w.to(tl.int16).to(tl.bfloat16, bitcast=True)
    odd = (w >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(even, odd).reshape(BLOCK_N, BLOCK_K)


@triton.jit
def columns(
    p,  # as those of `weights`
    s,
    zero,
    dtype: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    high=None,
):
    """(BLOCK_N, BLOCK_K) weights in `dtype`, divided by `shift`."""
    IN_WORDS: tl.constexpr = (FORMAT == "int4" and SCALE != "minimum") or is_level(FORMAT)
    if IN_WORDS and dtype == tl.bfloat16 and not INTERPRET:
        if FORMAT == "int4":
            w = int4(p, s, zero, BLOCK_N, BLOCK_K, GROUPS, HAS_ZERO)
        else:
            w = scaled_words(level_words(p, FORMAT), s, BLOCK_N, GROUPS, BLOCK_K // 2 // GROUPS)
        return apart(w, BLOCK_N, BLOCK_K)
    else:
        w0, w1 = weights(
            p, s, zero, dtype, BLOCK_N, BLOCK_K, GROUPS, FORMAT, SCALE, HAS_ZERO, high
        )
        if in_pairs(FORMAT):
            return tl.join(w0, w1).reshape(BLOCK_N, BLOCK_K)
        else:
            return w0


@triton.constexpr_function
def shift(dtype, FORMAT, SCALE):
    """What finished sums of `columns` are multiplied by."""
    if dtype == tl.bfloat16 and not INTERPRET and FORMAT == "int4" and SCALE != "minimum":
        return INT4_SHIFT
    return unit(dtype, FORMAT, SCALE)
