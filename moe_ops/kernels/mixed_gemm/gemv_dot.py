"""Loads of weights of 4, 5, 6 and 8 bits for gemv.py, and their products with x. Imported at first
launch only.

Weights are decoded to fp32 exactly, but for levels (levels.py), products are added in fp32, and
each group's sum is scaled. Decoding and multiplying takes 2.1 instructions a weight for int4, 3.4
for iq4, 3.6 for e2m1 and 4.7 for other levels. Loads, x and scales add 0.9 to 1.9 if a thread has
eight rows.
"""

import triton
import triton.language as tl

from moe_ops.kernels.device.interpreter import INTERPRET
from moe_ops.kernels.device.loads import load_along_rows
from moe_ops.kernels.gemm.gemv import repeat_each
from moe_ops.kernels.mixed_gemm.decode import (
    SUPER,
    factors_above,
    group_scale,
    high_bits,
    in_one_level,
    in_pairs,
    is_e2m1,
)
from moe_ops.kernels.mixed_gemm.levels import (
    has_whole_levels,
    is_level,
    level,
    level_unit,
    quads_of_levels,
    table_words,
    words_of_levels,
)

# The bits of e2m1 and e4m3 are moved to fp32, whose exponent has another bias, which gives values
# times 2^-126 and 2^-120. x is multiplied by a part of the correction, and the sum by the rest: so
# x may have 2^80, and loses digits only below 2^-40.
TO_X = tl.constexpr(2.0**46)
E2M1_REST = tl.constexpr(2.0**80)
E4M3_REST = tl.constexpr(2.0**74)
# Nibbles of int4 stay where they are: the low 23 bits of a subnormal fp32 number count steps of
# 2^-149. x and h may have 2^58, and the sums lose digits only if they are below 2^-46. (Gated h is
# about as large as the square of x, which so may have 2^29.)
INT4_REST = tl.constexpr(2.0**80)


@triton.constexpr_function
def word_columns(FORMAT):
    """Columns of a row in 32 bits, of formats in planes in those of low bits."""
    return 8 if in_pairs(FORMAT) else 4


@triton.jit
def split_columns(x, WORD: tl.constexpr):
    """fp32 x (CHUNKS, WORD) as eight columns (CHUNKS,). If WORD is 4, the last four repeat the
    first four.
    """
    n: tl.constexpr = x.shape[0]
    even, odd = x.to(tl.float32).reshape(n, WORD // 2, 2).split()
    if WORD == 8:
        even, x26 = even.reshape(n, 2, 2).split()
        odd, x37 = odd.reshape(n, 2, 2).split()
        x0, x4 = even.split()
        x2, x6 = x26.split()
        x1, x5 = odd.split()
        x3, x7 = x37.split()
        return x0, x1, x2, x3, x4, x5, x6, x7
    else:
        x0, x2 = even.split()
        x1, x3 = odd.split()
        return x0, x1, x2, x3, x0, x1, x2, x3


@triton.jit
def masked_or(w, mask, magic):
    """(w & mask) | magic as fp32, in one instruction. Without assembly the compiler makes two."""
    if INTERPRET:
        bits = (w & mask) | magic
    else:
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xea;", "=r,r,r,r", [w, mask, magic],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def column_by_column(sums):
    """`sums`, after which the products of the next column are computed, in all rows. Triton 3.9
    would compute all columns of a word row by row: ptxas then decodes the first rows of e4m3
    before it loads the last ones, and all columns of x are in registers, in int4 121 a thread
    instead of 72.
    """
    if INTERPRET:
        return sums
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=False, pack=1
        )


@triton.jit
def int4_product(w, x, acc, AT: tl.constexpr, BITS: tl.constexpr = 4):
    """acc + 2^-80 * code * x, with the code of so many bits at bit AT of w, below bit 23. The
    product of a subnormal number is exact like any other.
    """
    value = (w & (((1 << BITS) - 1) << AT)).to(tl.float32, bitcast=True)
    return column_by_column(acc + value * (x * (2.0 ** (69 - AT)))[None, :])


@triton.jit
def e2m1_products(bits, low, high, acc):
    """acc + 2^-80 times the products of the two halves of `bits`, whose sign and magnitude are at
    their places in bf16, with `low` and `high`.
    """
    upper = (bits & 0x81C00000).to(tl.float32, bitcast=True)
    lower = ((bits << 16) & 0x81C00000).to(tl.float32, bitcast=True)
    acc += lower * (low * TO_X)[None, :]
    return acc + upper * (high * TO_X)[None, :]


@triton.jit
def two_products(word, low, high, acc):
    """acc plus the products of both halves of a word, in bf16, with `low` and `high`."""
    acc = column_by_column(acc + (word << 16).to(tl.float32, bitcast=True) * low[None, :])
    upper = (word & -65536).to(tl.float32, bitcast=True)
    return column_by_column(acc + upper * high[None, :])


@triton.jit
def int8_product(w, x, acc, AT: tl.constexpr):
    """acc + byte * x, with the byte at bit AT of w, whose sign bit is flipped: as for int4."""
    return acc + (masked_or(w >> AT, 255, 0x4B000000) - 8388736.0) * x[None, :]


@triton.jit
def e4m3_product(w, x, acc, AT: tl.constexpr):
    """acc + 2^-74 * byte * x; the code of NaN is 480."""
    byte = w << (24 - AT)
    bits = (byte & 0x80000000) | ((byte >> 4) & 0x07F00000)
    return column_by_column(acc + bits.to(tl.float32, bitcast=True) * (x * TO_X)[None, :])


@triton.constexpr_function
def middle_of(FORMAT, TWO_GROUPS):
    """What is subtracted from codes after their products are added, of int4 without zero points
    and of whole levels; 0: nothing.
    """
    if FORMAT == "int4":
        return 8
    return 128 if has_whole_levels(FORMAT) and not (TWO_GROUPS or INTERPRET.value) else 0


@triton.jit
def word_products(w, x, acc, FORMAT: tl.constexpr, MIDDLE: tl.constexpr, EXACT: tl.constexpr):
    """acc plus the products of the columns of words w (BLOCK_N, CHUNKS) with x (CHUNKS, columns of
    a word), whose weights have MIDDLE (`middle_of`) more. EXACT: levels are not in units of bf16.
    """
    x0, x1, x2, x3, x4, x5, x6, x7 = split_columns(x, word_columns(FORMAT))
    if FORMAT == "int4":
        acc = int4_product(w, x0, acc, 0)
        acc = int4_product(w, x1, acc, 4)
        acc = int4_product(w, x2, acc, 8)
        acc = int4_product(w, x3, acc, 12)
        acc = int4_product(w, x4, acc, 16)
        w = w >> 12
        acc = int4_product(w, x5, acc, 8)
        acc = int4_product(w, x6, acc, 12)
        return int4_product(w, x7, acc, 16)
    elif is_level(FORMAT) and MIDDLE > 0:
        first, second = quads_of_levels(w, FORMAT)
        acc = int4_product(first, x0, acc, 0, 8)
        acc = int4_product(first, x1, acc, 8, 8)
        first = first >> 16
        acc = int4_product(first, x2, acc, 0, 8)
        acc = int4_product(first, x3, acc, 8, 8)
        acc = int4_product(second, x4, acc, 0, 8)
        acc = int4_product(second, x5, acc, 8, 8)
        second = second >> 16
        acc = int4_product(second, x6, acc, 0, 8)
        return int4_product(second, x7, acc, 8, 8)
    elif is_level(FORMAT) and EXACT:
        acc += level(w & 15, FORMAT) * x0[None, :] + level(w >> 4 & 15, FORMAT) * x1[None, :]
        acc += level(w >> 8 & 15, FORMAT) * x2[None, :] + level(w >> 12 & 15, FORMAT) * x3[None, :]
        w = w >> 16
        acc += level(w & 15, FORMAT) * x4[None, :] + level(w >> 4 & 15, FORMAT) * x5[None, :]
        acc += level(w >> 8 & 15, FORMAT) * x6[None, :] + level(w >> 12, FORMAT) * x7[None, :]
        return acc
    elif is_level(FORMAT):
        w01, w23, w45, w67 = words_of_levels(w, table_words(FORMAT))
        acc = two_products(w01, x0, x1, acc)
        acc = two_products(w23, x2, x3, acc)
        acc = two_products(w45, x4, x5, acc)
        return two_products(w67, x6, x7, acc)
    elif FORMAT == "e2m1":  # by multiplications, because logic instructions issue at half rate
        acc = e2m1_products((w & 0x000F000F) * 0x1040, x0, x4, acc)
        acc = e2m1_products((w & 0x00F000F0) * 0x0104, x1, x5, acc)
        w = w >> 8
        acc = e2m1_products((w & 0x000F000F) * 0x1040, x2, x6, acc)
        return e2m1_products((w & 0x00F000F0) * 0x0104, x3, x7, acc)
    elif FORMAT == "e2m1_words":  # as in sm90_decode.py
        acc = e2m1_products(w, x0, x4, acc)
        acc = e2m1_products(w << 3, x2, x6, acc)
        w = (w << 6) | (w >> 26)
        acc = e2m1_products(w, x1, x5, acc)
        return e2m1_products((w & 0x001B001B) * 0x4108, x3, x7, acc)
    elif FORMAT == "int8":
        w = w ^ 0x80808080
        acc = int8_product(w, x0, acc, 0)
        acc = int8_product(w, x1, acc, 8)
        acc = int8_product(w, x2, acc, 16)
        return int8_product(w, x3, acc, 24)
    else:
        tl.static_assert(FORMAT == "e4m3")
        acc = e4m3_product(w, x0, acc, 0)
        acc = e4m3_product(w, x1, acc, 8)
        acc = e4m3_product(w, x2, acc, 16)
        return e4m3_product(w, x3, acc, 24)


@triton.jit
def load_columns(x_ptr, stride, chunk, here, WORD: tl.constexpr):
    """x of the four words of each chunk: four times (CHUNKS, WORD)."""
    column = chunk[:, None] * (4 * WORD) + tl.arange(0, WORD)[None, :]
    ptrs = x_ptr + column.to(tl.int64) * stride
    here = here[:, None]
    x0 = tl.load(ptrs, mask=here, other=0.0)
    x1 = tl.load(ptrs + WORD * stride, mask=here, other=0.0)
    x2 = tl.load(ptrs + 2 * WORD * stride, mask=here, other=0.0)
    x3 = tl.load(ptrs + 3 * WORD * stride, mask=here, other=0.0)
    return x0, x1, x2, x3


@triton.jit
def load_side_by_side(
    w_scale_ptr,
    expert,
    row,
    chunk,
    here,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_g,
    SCALE_GROUP: tl.constexpr,
):
    """Scales of the first and second half of chunks, in the order of backends/triton/relayout.py:
    16 bytes hold those of two chunks of R rows, by row. The two of a chunk are loaded as one
    number.

    `w_scale_stride_g` is 1, but Triton must not know it: it would load the numbers of several rows
    at once, and move them between threads.
    """
    R: tl.constexpr = SCALE_GROUP // 4
    BYTES: tl.constexpr = 32 // SCALE_GROUP  # bytes of such a number
    NUMBER: tl.constexpr = tl.uint16 if BYTES == 2 else tl.uint8
    ptr = w_scale_ptr.to(tl.pointer_type(NUMBER))
    ptr += (
        expert * (w_scale_stride_e // BYTES)
        + chunk // 2 * (16 // BYTES)
        + chunk % 2 * w_scale_stride_g
    )[None, :]
    # 32 bits address the scales of one expert
    ptr += (row // R * (w_scale_stride_n // BYTES) + row % R * 2 * w_scale_stride_g)[:, None]
    s = load_along_rows(ptr, here, 0)
    if BYTES == 1:
        return s, s
    else:
        return (s & 0xFF).to(tl.uint8), (s >> 8).to(tl.uint8)


@triton.jit
def load_words(words_ptr, first, row, here, w_stride_n):
    """The four words (BLOCK_N, 4 * CHUNKS) from the `first` (CHUNKS,) of each row of an expert on.

    No `other`: unless `here`, x is zero, and every word is a finite number.
    """
    word = repeat_each(first, 4)
    word += tl.arange(0, word.shape[0]) % 4
    word = tl.max_contiguous(tl.multiple_of(word, 4), 4)
    start = row.to(tl.int64) * tl.multiple_of(w_stride_n // 4, 4)
    return tl.load(
        words_ptr + start[:, None] + word[None, :],
        mask=tl.max_constancy(repeat_each(here.to(tl.int32), 4) > 0, 4)[None, :],
        eviction_policy="evict_first",
    )


@triton.jit
def four_words(w, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr):
    """The words (BLOCK_N, CHUNKS) of each chunk."""
    even, odd = w.reshape(BLOCK_N, CHUNKS, 2, 2).split()
    w0, w2 = even.split()
    w1, w3 = odd.split()
    return w0, w1, w2, w3


@triton.jit
def plane_products(w, h, place, x, acc, HIGH: tl.constexpr):
    """acc plus the products of the eight columns of words w of low bits with x, as `int4_product`.
    Each byte of h has at bit `place` the high bits of the columns of that byte of w.
    """
    x0, x1, x2, x3, x4, x5, x6, x7 = split_columns(x, 8)
    MASK: tl.constexpr = (((1 << HIGH) - 1) << 4) * 0x01010101
    h = h >> place[None, :]
    code = (w & 0x0F0F0F0F) | (h << 4 & MASK)  # one to a byte
    acc = int4_product(code, x0, acc, 0, 4 + HIGH)
    acc = int4_product(code, x2, acc, 8, 4 + HIGH)
    acc = int4_product(code, x4, acc, 16, 4 + HIGH)
    acc = int4_product(code >> 16, x6, acc, 8, 4 + HIGH)
    code = (w >> 4 & 0x0F0F0F0F) | (h << (4 - HIGH) & MASK)
    acc = int4_product(code, x1, acc, 0, 4 + HIGH)
    acc = int4_product(code, x3, acc, 8, 4 + HIGH)
    acc = int4_product(code, x5, acc, 16, 4 + HIGH)
    return int4_product(code >> 16, x7, acc, 8, 4 + HIGH)


@triton.jit
def plane_chunk_products(
    planes, first, second, zero, x0, x1, x2, x3,
    HIGH: tl.constexpr, SCALE_GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
):  # fmt: skip
    """`chunk_products` of codes in planes, in groups of 16 or at least 32 columns."""
    MIDDLE: tl.constexpr = 8 << HIGH
    w, h, place = planes
    BLOCK_N: tl.constexpr = w.shape[0]
    CHUNKS: tl.constexpr = x0.shape[0]
    w0, w1, w2, w3 = four_words(w, BLOCK_N, CHUNKS)
    h0, h1, h2, h3 = four_words(h, BLOCK_N, CHUNKS)
    first, second = first.to(tl.float32), second.to(tl.float32)
    low = tl.sum(x0.to(tl.float32) + x1.to(tl.float32), 1)[None, :]
    high = tl.sum(x2.to(tl.float32) + x3.to(tl.float32), 1)[None, :]
    part = plane_products(w0, h0, place, x0, tl.zeros_like(first), HIGH)
    part = plane_products(w1, h1, place, x1, part, HIGH)
    total = part
    if SCALE_GROUP == 16:
        tl.static_assert(not HAS_ZERO)
        total = (part * INT4_REST - MIDDLE * low) * first
        part = tl.zeros_like(first)
    part = plane_products(w2, h2, place, x2, part, HIGH)
    part = plane_products(w3, h3, place, x3, part, HIGH) * INT4_REST
    if SCALE_GROUP == 16:
        return total + (part - MIDDLE * high) * second
    elif HAS_ZERO:
        return part * first + zero.to(tl.float32) * (low + high)
    else:
        return (part - MIDDLE * (low + high)) * first


@triton.jit
def load_chunks(
    w_ptr,  # (E, N, bytes of a row)
    w_scale_ptr,
    w_zero_ptr,
    expert,  # (CHUNKS,) int64
    row,  # (BLOCK_N,)
    chunk,  # (CHUNKS,) index in a row
    here,  # (CHUNKS,) whether the chunk exists and its expert is here
    w_stride_e,
    w_stride_n,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_g,
    w_zero_stride_e,
    w_zero_stride_n,
    w_zero_stride_g,
    w_factor_ptr,
    w_factor_stride_e,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    FACTOR_STEP: tl.constexpr,
):
    """(words (BLOCK_N, 4 * CHUNKS), or in planes those of low bits, those of high bits, and the
    bit (CHUNKS,) where these begin in each byte; scales of the first and second half of chunks,
    zero points or minima). Scales are zero unless `here`. Those in two levels are brought into
    one.

    Words have two dimensions, so that Triton knows only the last to be contiguous, and spreads
    threads over chunks.
    """
    COLUMNS: tl.constexpr = 4 * word_columns(FORMAT)
    HIGH: tl.constexpr = high_bits(FORMAT)
    words_ptr = w_ptr.to(tl.pointer_type(tl.uint32))
    start = expert * (w_stride_e // 4)
    if HIGH > 0:  # a chunk is of low bytes; four of them, and HIGH of high bytes, are a unit
        start += chunk // 4 * (16 + 4 * HIGH)
        h = load_words(words_ptr, start + (16 + chunk % HIGH * 4), row, here, w_stride_n)
        low = load_words(words_ptr, start + chunk % 4 * 4, row, here, w_stride_n)
        w = low, h, (chunk % 4 // HIGH * (2 * HIGH)).to(tl.uint32)
    else:
        w = load_words(words_ptr, start + chunk * 4, row, here, w_stride_n)
    here = here[None, :]
    if SCALE == "e4m3":
        w_scale_ptr = w_scale_ptr.to(tl.pointer_type(tl.uint8))
    scale_row = row // 128 if SCALE == "block" else row
    if FORMAT == "e2m1_words":
        first, second = load_side_by_side(
            w_scale_ptr,
            expert,
            row,
            chunk,
            here,
            w_scale_stride_e,
            w_scale_stride_n,
            w_scale_stride_g,
            SCALE_GROUP,
        )
        return w, first, second, first
    group = chunk * COLUMNS // SCALE_GROUP if SCALE_GROUP > 0 else chunk * 0
    w_scale_ptr += (expert * w_scale_stride_e + group * w_scale_stride_g)[None, :]
    w_scale_ptr += (scale_row.to(tl.int64) * w_scale_stride_n)[:, None]
    first = load_along_rows(w_scale_ptr, here, 0)
    second = first
    if SCALE_GROUP > 0 and SCALE_GROUP < COLUMNS:
        tl.static_assert(2 * SCALE_GROUP == COLUMNS)
        second = load_along_rows(w_scale_ptr + w_scale_stride_g, here, 0)
    zero = first
    if w_zero_ptr is not None:
        w_zero_ptr += (expert * w_zero_stride_e + group * w_zero_stride_g)[None, :]
        zero = load_along_rows(w_zero_ptr + (row.to(tl.int64) * w_zero_stride_n)[:, None], here, 0)
    if w_scale_ptr.dtype.element_ty == tl.int8:
        HAS_ZERO: tl.constexpr = w_zero_ptr is not None
        offsets = (expert * w_factor_stride_e)[None, :]
        offsets += (row.to(tl.int64) * FACTOR_STEP)[:, None]
        above_ptr = factors_above(w_factor_ptr, offsets, HAS_ZERO)
        above = load_along_rows(above_ptr + (chunk * COLUMNS // SUPER)[None, :], here, 0)
        first, zero = in_one_level(first, zero, above, 1, HAS_ZERO)
        if SCALE_GROUP < COLUMNS:
            second, _ = in_one_level(second, zero, above, 1, False)
        else:
            second = first
    return w, first, second, zero


@triton.jit
def chunk_products(
    w,
    first,
    second,
    zero,  # all four from load_chunks
    x0,
    x1,
    x2,
    x3,  # (CHUNKS, columns of a word)
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """Scaled sums of the products of chunks with x, (BLOCK_N, CHUNKS)."""
    HIGH: tl.constexpr = high_bits(FORMAT)
    if HIGH > 0:
        return plane_chunk_products(
            w, first, second, zero, x0, x1, x2, x3, HIGH, SCALE_GROUP, HAS_ZERO
        )
    else:
        return even_chunk_products(
            w, first, second, zero, x0, x1, x2, x3, FORMAT, SCALE, SCALE_GROUP, HAS_ZERO
        )


@triton.jit
def even_chunk_products(
    w, first, second, zero, x0, x1, x2, x3,
    FORMAT: tl.constexpr, SCALE: tl.constexpr, SCALE_GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
):  # fmt: skip
    """`chunk_products` of elements of 4 and 8 bits."""
    BLOCK_N: tl.constexpr = w.shape[0]
    CHUNKS: tl.constexpr = x0.shape[0]
    # a chunk has two groups
    TWO_GROUPS: tl.constexpr = SCALE_GROUP > 0 and 4 * word_columns(FORMAT) > SCALE_GROUP
    MIDDLE: tl.constexpr = middle_of(FORMAT, TWO_GROUPS)
    # levels that bf16 does not hold would be off by more than products in fp32
    EXACT: tl.constexpr = INTERPRET or (x0.dtype == tl.float32 and not has_whole_levels(FORMAT))
    w0, w1, w2, w3 = four_words(w, BLOCK_N, CHUNKS)
    part = tl.zeros((BLOCK_N, CHUNKS), tl.float32)
    part = word_products(w0, x0, part, FORMAT, MIDDLE, EXACT)
    part = word_products(w1, x1, part, FORMAT, MIDDLE, EXACT)
    total = part
    if TWO_GROUPS:
        total = scaled(part, first, FORMAT, SCALE, MIDDLE, EXACT)
        part = tl.zeros((BLOCK_N, CHUNKS), tl.float32)
    part = word_products(w2, x2, part, FORMAT, MIDDLE, EXACT)
    part = word_products(w3, x3, part, FORMAT, MIDDLE, EXACT)
    if HAS_ZERO or MIDDLE > 0:
        tl.static_assert(not TWO_GROUPS)
        sums = tl.sum(x0.to(tl.float32) + x1.to(tl.float32), 1)
        sums += tl.sum(x2.to(tl.float32) + x3.to(tl.float32), 1)
        if SCALE == "minimum":
            if FORMAT == "int8":
                part += 128.0 * sums[None, :]
        elif MIDDLE == 0:
            part -= zero.to(tl.int8, bitcast=True).to(tl.float32) * sums[None, :]
        elif HAS_ZERO:
            part -= zero.to(tl.float32) * (sums * (1 / INT4_REST))[None, :]
        else:
            part -= (sums * (MIDDLE / INT4_REST))[None, :]
    part = scaled(part, second, FORMAT, SCALE, MIDDLE, EXACT)
    if SCALE == "minimum":
        part += zero.to(tl.float32) * sums[None, :]
    if TWO_GROUPS:
        part += total
    return part


@triton.jit
def scaled(
    part,
    scale,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    MIDDLE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Sums of products times their scale, with the correction of the exponent bias."""
    if is_e2m1(FORMAT):
        part *= E2M1_REST
    elif FORMAT == "e4m3":
        part *= E4M3_REST
    elif is_level(FORMAT) and not EXACT:
        part *= level_unit(FORMAT) * (INT4_REST if MIDDLE > 0 else 1.0)
    elif FORMAT == "int4":
        part *= INT4_REST
    return part * group_scale(scale, SCALE)
