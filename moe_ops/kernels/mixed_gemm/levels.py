"""Weights of 4 bits whose codes stand for the 16 numbers of a table, those of
`ElementFormat.levels`. Imported at first launch only.

In assembly a code is looked up by `prmt`, which finds 4 of 8 bytes at a time: the low and the high
bytes of the levels in bf16, of codes below 8 and of the others, among which the highest bits of
the codes then choose. A code takes 2.7 instructions, whatever the table. Whole levels of seven
bits and a sign (iq4) are looked up as one byte (`look_up_bytes`), by 1.8 instructions.

bf16 holds the levels of few tables. It is nearest to those of nf4, and holds those of fp4 and iq4,
in a unit of the table (`level_unit`): levels are looked up in units, and finished sums multiplied
by it. A level of nf4 is at most 0.19 % off so, and in units of 1 would be 0.31 %.
"""

import struct
from typing import NamedTuple

import triton
import triton.language as tl

from moe_ops.kernels.configs import LEVELS, WHOLE_LEVELS
from moe_ops.schemes import ELEMENT_FORMATS

# In which order `look_up` writes the levels of a word's columns, two in 32 bits: neighbours, or
# even and odd ones apart
NEIGHBOURS, EVEN_AND_ODD = (tl.constexpr(order) for order in ("neighbours", "even and odd"))


class LevelTable(NamedTuple):
    """The levels of a format, by code."""

    levels: tuple[float, ...]
    unit: float
    bits: tuple[int, ...]  # of levels, in units, in bf16


def to_bf16(x: float) -> int:
    """The bits of the bf16 number nearest to x, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def from_bf16(bits: int) -> float:
    """The number of these bits."""
    (x,) = struct.unpack("<f", struct.pack("<I", bits << 16))
    return float(x)


def table_of(levels: tuple[float, ...]) -> LevelTable:
    """The LevelTable of levels. Its unit is, of 64 from 1/2 to 1, that in which all of them are
    nearest to numbers of bf16, in relation to their size.
    """

    def error(unit: float) -> float:
        return max([abs(from_bf16(to_bf16(x / unit)) * unit / x - 1) for x in levels if x])

    unit = min([64 / (64 + i) for i in range(64)], key=error)
    return LevelTable(levels, unit, tuple([to_bf16(x / unit) for x in levels]))


# constants, so that compiled kernels are those of these tables
TABLES = tl.constexpr({name: table_of(ELEMENT_FORMATS[name].levels) for name in LEVELS})
WHOLE = tl.constexpr(WHOLE_LEVELS)


@triton.constexpr_function
def is_level(FORMAT):
    """Whether codes of a format stand for levels of a table."""
    return FORMAT in TABLES.value


@triton.constexpr_function
def level_unit(FORMAT):
    """What sums of products with looked-up levels are multiplied by."""
    return TABLES.value[FORMAT].unit


@triton.constexpr_function
def has_whole_levels(FORMAT):
    """Whether levels are looked up as bytes."""
    return FORMAT in WHOLE.value


@triton.constexpr_function
def level_of(FORMAT, code):
    """The level of a code."""
    return float(TABLES.value[FORMAT].levels[code])


@triton.constexpr_function
def table_word(FORMAT, i):
    """Four bytes of a table, as a number of 32 bits with sign: words 0 to 3 have the low bytes of
    the levels of four codes each, the others the high bytes.
    """
    bits = TABLES.value[FORMAT].bits
    word = [bits[i % 4 * 4 + j] >> i // 4 * 8 & 255 for j in range(4)]
    return int.from_bytes(bytes(word), "little", signed=True)


@triton.constexpr_function
def byte_word(FORMAT, i):
    """Magnitudes of whole levels of four codes from 4 i on, as a number of 32 bits with sign."""
    word = [int(abs(x)) for x in TABLES.value[FORMAT].levels[4 * i : 4 * i + 4]]
    return int.from_bytes(bytes(word), "little", signed=True)


@triton.jit
def unknown_zero():
    """A zero that the compiler does not know. Sums with it stay in registers, where a constant
    would be written anew for each use.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a; shr.s32 a, $1, 31; shfl.sync.idx.b32 $0, a, 0, 0x1f, 0xffffffff; }",
        "=r,r",
        [tl.program_id(0)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def table_words(FORMAT: tl.constexpr):
    """The eight words of a table."""
    zero = unknown_zero()
    return (
        zero + table_word(FORMAT, 0),
        zero + table_word(FORMAT, 1),
        zero + table_word(FORMAT, 2),
        zero + table_word(FORMAT, 3),
        zero + table_word(FORMAT, 4),
        zero + table_word(FORMAT, 5),
        zero + table_word(FORMAT, 6),
        zero + table_word(FORMAT, 7),
    )


@triton.jit
def byte_words(FORMAT: tl.constexpr):
    """The four words of a table of whole levels."""
    zero = unknown_zero()
    return (
        zero + byte_word(FORMAT, 0),
        zero + byte_word(FORMAT, 1),
        zero + byte_word(FORMAT, 2),
        zero + byte_word(FORMAT, 3),
    )


@triton.constexpr_function
def look_up(order, pack):
    """Assembly that looks up the eight codes of $4 and writes four words of levels to $0 to $3.
    The words of the table follow, `pack` times each.

    A selector of `prmt` has 4 bits for each byte that it finds. Those of c are the lower 3 bits of
    a code, which find one level below code 8 and one above. Those of d are the place of the byte,
    and 4 more if the code is above 7, and choose between both.
    """
    t = [f"${5 + pack * i}" for i in range(8)]
    text = [".reg .b32 a, b, c, d, e, f, l, h"]
    text.append("and.b32 c, $4, 0x77777777; shr.u32 d, $4, 1")
    text.append("lop3.b32 d, d, 0x44444444, 0x32103210, 0xea")
    text.append("shr.u32 e, c, 16; shr.u32 f, d, 16")
    step = 2 if order == NEIGHBOURS.value else 1
    first, second = ("0x5140", "0x7362") if order == NEIGHBOURS.value else ("0x6240", "0x7351")
    for half in range(2):
        c, d = ("e", "f") if half else ("c", "d")
        text.append(f"prmt.b32 a, {t[0]}, {t[1]}, {c}; prmt.b32 b, {t[2]}, {t[3]}, {c}")
        text.append(f"prmt.b32 l, a, b, {d}")
        text.append(f"prmt.b32 a, {t[4]}, {t[5]}, {c}; prmt.b32 b, {t[6]}, {t[7]}, {c}")
        text.append(f"prmt.b32 h, a, b, {d}")
        text.append(f"prmt.b32 ${step * half}, l, h, {first}")
        text.append(f"prmt.b32 ${step * half + 3 - step}, l, h, {second}")
    return "{\n" + ";\n".join(text) + ";\n}"


@triton.constexpr_function
def look_up_bytes(apart):
    """As `look_up` of whole levels, two neighbours in 32 bits: words of two numbers 128 + level,
    each in the low byte of a half. As bf16, such a number is that multiple of 2^-133. Unless
    `apart`, $0 and $1 are words of four such bytes, the codes are in $2, and the words of the
    table follow.

    Where the highest bit of a selector is set, `prmt` replicates the highest bit of a byte, which
    is 0 in tables of magnitudes. So codes find a magnitude below code 8 or 0, and codes with their
    highest bits inverted one above or 0: their difference is the level. A code takes 1.5
    instructions on the pipe of `prmt`, the slowest of them.
    """
    codes = 4 if apart else 2
    t = [f"${codes + 1 + i}" for i in range(4)]
    text = [".reg .b32 n, h, m, r, a"]
    text.append(f"xor.b32 n, ${codes}, 0x88888888; shr.u32 h, ${codes}, 16; shr.u32 m, n, 16")
    for half in range(2):
        c, d = ("h", "m") if half else (f"${codes}", "n")
        text.append(f"prmt.b32 a, {t[0]}, {t[1]}, {c}; prmt.b32 r, {t[2]}, {t[3]}, {d}")
        text.append("sub.u32 r, r, a; add.u32 r, r, 0x80808080")
        if apart:
            text.append(f"prmt.b32 ${2 * half}, r, 0, 0x4140")
            text.append(f"prmt.b32 ${2 * half + 1}, r, 0, 0x4342")
        else:
            text.append(f"mov.b32 ${half}, r")
    return "{\n" + ";\n".join(text) + ";\n}"


@triton.constexpr_function
def registers(pack, words=8, outputs=4):
    """The constraints of `look_up`, or with four words of a table of `look_up_bytes`."""
    return ",".join(["=&r"] * outputs + ["r"] * (1 + words * pack))


@triton.jit
def one_of_four(code, FORMAT: tl.constexpr, FIRST: tl.constexpr):
    """The levels of FIRST and the next three codes, by the lower two bits of a code."""
    low = (code & 1) != 0
    even = tl.where(low, level_of(FORMAT, FIRST + 1), level_of(FORMAT, FIRST))
    odd = tl.where(low, level_of(FORMAT, FIRST + 3), level_of(FORMAT, FIRST + 2))
    return tl.where((code & 2) != 0, odd, even)


@triton.jit
def level(code, FORMAT: tl.constexpr):
    """fp32 of codes below 16, not in units."""
    third = (code & 4) != 0
    lower = tl.where(third, one_of_four(code, FORMAT, 4), one_of_four(code, FORMAT, 0))
    upper = tl.where(third, one_of_four(code, FORMAT, 12), one_of_four(code, FORMAT, 8))
    return tl.where((code & 8) != 0, upper, lower)


@triton.jit
def level_pair(p, FORMAT: tl.constexpr):
    """(even columns, odd columns) of bytes in bf16, in units."""
    TEXT: tl.constexpr = look_up(EVEN_AND_ODD, 4)
    OPERANDS: tl.constexpr = registers(4)
    inputs = (p,) + table_words(FORMAT)
    return tl.inline_asm_elementwise(
        TEXT, OPERANDS, inputs, (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@triton.jit
def level_words(p, FORMAT: tl.constexpr):
    """The two columns of each byte in the halves of 32 bits, in bf16, in units."""
    TEXT: tl.constexpr = look_up(NEIGHBOURS, 4)
    OPERANDS: tl.constexpr = registers(4)
    inputs = (p,) + table_words(FORMAT)
    return tl.inline_asm_elementwise(TEXT, OPERANDS, inputs, tl.int32, is_pure=True, pack=4)


@triton.jit
def words_of_levels(words, tables, WHOLE: tl.constexpr = False, PURE: tl.constexpr = True):
    """Of words of eight columns four words of two neighbours, in bf16, in units; with WHOLE
    128 + level, times 2^-133. `tables`: from `table_words` or `byte_words`.
    """
    TEXT: tl.constexpr = look_up_bytes(True) if WHOLE else look_up(NEIGHBOURS, 1)
    OPERANDS: tl.constexpr = registers(1, 4 if WHOLE else 8)
    return tl.inline_asm_elementwise(
        TEXT,
        OPERANDS,
        (words,) + tables,
        (tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=PURE,
        pack=1,
    )


@triton.jit
def quads_of_levels(words, FORMAT: tl.constexpr):
    """Of words of eight columns two words of four bytes, 128 + level each, of whole levels."""
    TEXT: tl.constexpr = look_up_bytes(False)
    OPERANDS: tl.constexpr = registers(1, 4, 2)
    inputs = (words,) + byte_words(FORMAT)
    return tl.inline_asm_elementwise(
        TEXT, OPERANDS, inputs, (tl.uint32, tl.uint32), is_pure=True, pack=1
    )
