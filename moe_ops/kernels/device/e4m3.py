"""e4m3 and int8 in Triton: scales, rounding and codes. Imported at first launch only.

Scales and elements are those of `moe_ops.numerics`: scale = amax / 448 (INT8: amax / 127), or 1 if
that is zero; element = x / scale, rounded to nearest even. NATIVE: the GPU has e4m3 products and
conversions. On others, e4m3 codes are uint8 and their values fp16, which holds each of them.
"""

import triton
import triton.language as tl

from moe_ops.kernels.device.interpreter import INTERPRET


@triton.jit
def quotient(x, scale, inverse):
    """x / scale in fp32, rounded like a division if `inverse` is 1 / scale, rounded. If that is
    within two ulps, all 16-bit x give the same, and all but one of some million fp32 x.

    One step of Newton's method on the quotient takes three instructions, a division takes ten.
    """
    if INTERPRET:  # the interpreter's fma rounds twice
        return x / scale
    else:
        q = x * inverse
        return tl.fma(tl.fma(-q, scale, x), inverse, q)


@triton.jit
def reciprocal(scale):
    """1 / scale, rounded to nearest; finite also for subnormal scales."""
    return tl.minimum(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), 3.0e38)


@triton.jit
def near_reciprocal(scale):
    """1 / scale within two ulps; finite also for subnormal scales. It has no branch for subnormal
    numbers, across which registers would have to live.
    """
    return tl.minimum(1.0 / scale, 3.0e38)


@triton.jit
def e4m3_scale(amax, POWERS: tl.constexpr = False):
    """The scale of e4m3 elements whose largest magnitude is `amax`; POWERS rounds it up to a power
    of two.
    """
    scale = quotient(amax, 448.0, 1.0 / 448.0)
    if POWERS:  # a mantissa that is not zero carries into the exponent
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000
        scale = bits.to(tl.float32, bitcast=True)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def element_scale(amax, INT8: tl.constexpr):
    """The scale of e4m3 or int8 elements whose largest magnitude is `amax`."""
    if INT8:
        scale = quotient(amax, 127.0, 1.0 / 127.0)
        return tl.where(scale == 0.0, 1.0, scale)
    else:
        return e4m3_scale(amax)


@triton.jit
def largest_magnitude(x, axis: tl.constexpr):
    """The largest |x| along an axis, fp32. It is NaN if an x is NaN, because int8 elements cannot
    hold one.
    """
    # as integers, the bits of magnitudes have the order of the magnitudes, with NaN last
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_int8(v):
    """fp32 v rounded to int8, ties to even, within -128 and 127."""
    v = (v + 12582912.0) - 12582912.0  # 1.5 * 2^23, whose ulp is 1
    return tl.where(v < -128.0, -128.0, tl.where(v > 127.0, 127.0, v)).to(tl.int8)


@triton.jit
def exponent_above(x):
    """Biased exponent of the least power of two >= x, for x >= 0."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)


@triton.jit
def clamp(x, limit):
    """x clamped to [-limit, limit]; NaN stays NaN."""
    return tl.where(x < -limit, -limit, tl.where(x > limit, limit, x))


@triton.jit
def nearest(v, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """fp32 v rounded to MANTISSA bits of mantissa, ties to even; 2^LEAST is the format's least
    normal number. |v| must round to at most the largest number. NaN stays NaN.
    """
    DROP: tl.constexpr = 23 - MANTISSA
    BIG: tl.constexpr = 1.5 * 2.0 ** (LEAST + DROP)  # its ulp is the format's least number
    bits = v.to(tl.int32, bitcast=True)
    normal = (bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) & -(1 << DROP)
    small = (v + BIG) - BIG
    rounded = tl.where(tl.abs(v) < 2.0**LEAST, small, normal.to(tl.float32, bitcast=True))
    return tl.where(v == v, rounded, v)


@triton.jit
def round_e4m3(v):
    """The e4m3 value nearest to v, ties to even. |v| must round to at most 448. NaN stays NaN."""
    return nearest(v, 3, -6)


@triton.jit
def encode(v):
    """The e4m3 code (uint8) of fp32 v."""
    v = round_e4m3(v)
    magnitude = tl.abs(v)
    normal = (magnitude.to(tl.int32, bitcast=True) >> 20) - 960  # exponent bias 127 becomes 7
    small = (magnitude * 512.0).to(tl.int32)
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(v == v, code, 0x7F)
    return (code | ((v.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode(code, dtype: tl.constexpr):
    """The value of e4m3 codes (uint8 or e4m3) in `dtype`, exact; the NaN code becomes 480.

    Sign, exponent and mantissa are shifted to their places in `dtype`, and one multiplication
    corrects the exponent's bias. This is cheaper than the GPU's own cast to bf16.
    """
    c = code.to(tl.uint8, bitcast=True).to(tl.int16)
    if dtype == tl.bfloat16 and not INTERPRET:
        bits = ((c & 0x80) << 8) | ((c & 0x7F) << 4)
        return bits.to(tl.bfloat16, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        bits = ((c & 0x80) << 8) | ((c & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True) * 256.0).to(dtype)


@triton.jit
def decode_activation(code):
    """As `decode`, in fp16, but NaN stays NaN."""
    c = code.to(tl.uint8, bitcast=True)
    return tl.where((c & 0x7F) == 0x7F, float("nan"), decode(c, tl.float16)).to(tl.float16)


@triton.jit
def operand(v, NATIVE: tl.constexpr, INT8: tl.constexpr = False):
    """fp32 v (BLOCK_M, BLOCK_K) rounded to int8 or e4m3, as an operand of a product. On GPUs
    without e4m3 products, e4m3 values are fp16.
    """
    if INT8:
        return round_int8(v)
    elif NATIVE:
        return v.to(tl.float8e4nv)
    else:
        return round_e4m3(v).to(tl.float16)


@triton.jit
def stored(v, NATIVE: tl.constexpr, INT8: tl.constexpr = False):
    """fp32 v rounded to int8 or e4m3, in the dtype in which memory holds it."""
    if INT8:
        return round_int8(v)
    elif NATIVE:
        return v.to(tl.float8e4nv)
    else:
        return encode(v)


@triton.jit
def quantize_groups(x, POWERS: tl.constexpr):
    """(unrounded fp32 quotients (R, 128), scales (R,)) of x (R, 128): one scale a row."""
    x = x.to(tl.float32)
    scale = e4m3_scale(tl.max(tl.abs(x), 1), POWERS)
    return quotient(x, scale[:, None], reciprocal(scale)[:, None]), scale


@triton.jit
def store_signed(row_ptr, column, x, mask, K_CHUNK: tl.constexpr):
    """Store e4m3 numbers x of a row, and -x one chunk further on: what weights that are not
    negative and magnitudes of those that are get multiplied by.
    """
    codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    ptrs = row_ptr.to(tl.pointer_type(tl.uint8)) + (column // K_CHUNK * K_CHUNK + column)
    tl.store(ptrs, codes, mask=mask)
    tl.store(ptrs + K_CHUNK, codes ^ 0x80, mask=mask)
