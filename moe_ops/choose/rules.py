"""Tiles by rule, as data, for layers that no table has.

A row is (words, value). The first row whose words all hold gives the value; `!word` holds where
the word does not. Tiles are (BLOCK_N, BLOCK_K, stages, warps). The words of a product:

    m8 .. m128, m<=16, m<=32    BLOCK_M
    4bit, 8bit                  bits of a weight element
    c128, c256                  the columns are a multiple of 128, 256
    sparse                      experts have less than one row on average
    I<=2048, I>=4096, ..        sizes

Functions in `plain` and `mixed` add words, which the comments below define.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import nextafter
from typing import TypeVar

Value = TypeVar("Value")
Rows = tuple[tuple[str, Value], ...]
Tile = tuple[int, int, int, int]
Blocks = tuple[tuple[float, int], ...]  # (average rows of an expert up to which, BLOCK_M)
ANY = float("inf")


def words(**facts: bool) -> frozenset[str]:
    """The names of the facts that hold."""
    return frozenset([name for name, holds in facts.items() if holds])


def of_block(block_m: int) -> frozenset[str]:
    """The words of a BLOCK_M."""
    return frozenset([f"m{block_m}", *[f"m<={m}" for m in (16, 32) if block_m <= m]])


def first(rows: Iterable[tuple[str, Value]], held: frozenset[str]) -> Value:
    """The value of the first row whose words all hold."""

    def holds(word: str) -> bool:
        return word[1:] not in held if word[0] == "!" else word in held

    return next(value for when, value in rows if all(map(holds, when.split())))


def block_of(blocks: Blocks, average: float) -> int:
    """BLOCK_M for experts with `average` rows."""
    return next(block_m for most, block_m in blocks if average <= most)


def is_short(waves: float) -> bool:
    """Whether programs are one wave and at most half of a second one."""
    return 1 < waves <= 1.5


# --- gemm/sm80_mma.py, plain weights -------------------------------------------------------------
# An expert's rows should usually fit one block, so that its weights are read once. Tiles of 16
# tokens keep 96 to 192 KiB of weights in flight on an SM90 multiprocessor, in programs of about
# 110 registers per thread: enough for the full memory bandwidth.
#
# fp32: products outside of the tensor cores; odd: unaligned rows, which are loaded by element, so
# that smaller tiles save registers; few: at most two rows per expert; tma: the GPU has it, and
# before the wider tile spills
PLAIN_BLOCKS: Blocks = ((12, 16), (25, 32), (51, 64), (ANY, 128))
SMALL_BLOCKS: Blocks = ((12, 16), (ANY, 32))  # of fp32 and odd rows
PLAIN_GEMM1: Rows[Tile] = (
    ("fp32", (64, 32, 3, 4)),
    ("odd", (64, 32, 2, 4)),
    ("m16 few I<=2048", (64, 128, 4, 4)),
    ("m<=32", (128, 128, 4, 4)),
    ("m64", (128, 64, 4, 4)),
    ("tma", (256, 64, 4, 8)),
    ("", (128, 64, 4, 8)),
)
PLAIN_GEMM2: Rows[Tile] = (
    ("fp32", (64, 32, 3, 4)),
    ("odd", (64, 32, 2, 4)),
    ("m<=32", (64, 128, 4, 4)),
    ("m64", (128, 64, 4, 4)),
    ("", (128, 64, 4, 8)),
)

# --- gemm/sm80_mma.py, 8-bit weights and activations ---------------------------------------------
# BLOCK_K is 128, the group of columns that share a scale. A thread holds both a group's sum and
# the total, so accumulators are half as large as for plain weights. Blocks of 64 tokens need the
# registers that masks along K take, and those that operands of 16 bits take before SM90.
#
# groups: GEMM1 quantizes groups of 128 columns of h, from 256 rows of gate and up; by_row,
# by_group: how h is quantized; few: one token whose wide tiles would leave multiprocessors idle;
# two_waves: its tiles are more than multiprocessors and at most twice as many, so that they run in
# one wave with fewer stages; one_wave: GEMM2 has at most one block a multiprocessor; several: it
# has at least one of 256 rows; filled: it has three of these; dense: more than six rows per
# expert; converts1, converts2: a GEMM quantizes its input, which takes registers. Filled
# multiprocessors of `groups` are faster with fewer stages and wider tiles of GEMM2 where products
# take about as long as reading (dense, or sums of GEMM1 are short).
QUANTIZED_BLOCKS: Blocks = ((12, 16), (25, 32), (ANY, 64))
BLOCKS_OF_GROUPS: Blocks = ((10, 16), (25, 32), (ANY, 64))  # where `groups` and `filled` hold
QUANTIZED_GEMM1: Rows[Tile] = (
    ("odd", (64, 128, 2, 8)),
    ("groups two_waves", (256, 128, 3, 4)),
    ("groups filled m32", (256, 128, 3, 4)),
    ("groups filled m16 dense", (256, 128, 3, 4)),
    ("groups filled m16 K<=2048", (256, 128, 3, 4)),
    ("groups m<=32", (256, 128, 5, 4)),
    ("groups", (256, 128, 5, 8)),
    ("by_row few", (64, 128, 6, 4)),
    ("by_group few", (64, 128, 6, 4)),
    ("m64 converts1", (128, 128, 4, 8)),
    ("", (128, 128, 4, 4)),
)
QUANTIZED_GEMM2: Rows[Tile] = (
    ("odd", (64, 128, 2, 8)),
    ("groups one_wave", (64, 128, 6, 4)),
    ("groups filled m32", (256, 128, 3, 4)),
    ("groups filled m16 dense", (128, 128, 3, 4)),
    ("groups filled m16 K<=2048", (128, 128, 3, 4)),
    ("groups", (64, 128, 3, 4)),
    ("by_row few", (64, 128, 6, 4)),
    ("by_group few several", (256, 128, 4, 4)),
    ("m64 converts2", (128, 128, 4, 8)),
    ("", (128, 128, 4, 4)),
)

# --- gemm/sm90_tma.py ----------------------------------------------------------------------------
# From 48 rows per expert on, and in e4m3 always, blocks have 128 rows: they hold all rows of most
# experts, so that weights are read once. GEMM1 skips the second half of a block if that is empty,
# and in GEMM2 two programs share a block. In e4m3, tiles of 64 x 128 in GEMM2 leave room for three
# programs per multiprocessor, which scale their sums while others multiply. In 16 bits, from 96
# rows an expert on (`many`), GEMM2 has larger tiles, unless its sums are short, so that two
# programs a multiprocessor hide each other's prologue and epilogue. One program takes a whole
# block then if sums are short or long, or most blocks are full (`full`).
TMA_BLOCKS: Blocks = ((nextafter(48, 0), 64), (ANY, 128))
TMA_GEMM1: Rows[Tile] = (
    ("8bit gated", (256, 128, 4, 8)),
    ("8bit", (128, 128, 4, 8)),
    ("m64", (256, 64, 5, 4)),
    ("", (256, 64, 4, 8)),
)
TMA_GEMM2: Rows[Tile] = (
    ("8bit", (128, 128, 3, 4)),
    ("many !I<=1024", (256, 64, 4, 8)),
    ("", (128, 64, 3, 4)),
)
TMA_BLOCKS_OF_8_BITS: Blocks = ((ANY, 128),)
TMA_SPLIT_M: Rows[int] = (
    ("m64", 1),
    ("!8bit many I<=1024", 1),
    ("!8bit many !I<=2048", 1),
    ("!8bit full", 1),
    ("", 2),
)

# --- mixed_gemm/sm80_mma.py ----------------------------------------------------------------------
# Two warps per block, because Triton would use wgmma with four, until an expert has so many rows
# that products take longer than decoding. BLOCK_K beside 8 rows is 128 bytes of a row.
#
# unaligned: 16 bytes do not divide rows, which are loaded by element, and larger tiles spill;
# fp16, fp32: weights are decoded to fp32 first, which takes registers; few: a multiprocessor would
# have fewer than three wider blocks; tma: before, accumulators of more rows spill; 5bit: a product
# is of 64 of 256 columns
MIXED_BLOCKS: Blocks = ((4, 8), (16, 16), (40, 32), (ANY, 64))
MIXED_GEMM: Rows[Tile] = (
    ("unaligned", (32, 64, 2, 4)),
    ("fp32", (64, 32, 2, 4)),
    ("fp16", (64, 64, 3, 4)),
    ("5bit m8 few", (32, 256, 4, 2)),
    ("5bit m8", (64, 256, 3, 2)),
    ("5bit m16", (64, 256, 3, 2)),
    ("5bit m32", (128, 256, 3, 4)),
    ("m8 few", (32, 128, 6, 2)),
    ("m8 4bit", (64, 256, 3, 2)),
    ("m8", (64, 128, 4, 2)),
    ("m16 !4bit", (64, 128, 4, 2)),
    ("m16", (128, 128, 4, 4)),
    ("m32", (128, 128, 4, 4)),
    ("!tma", (64, 128, 4, 2)),
    ("m128", (128, 128, 3, 8)),
    ("", (128, 128, 3, 4)),
)

# --- mixed_gemm/sm90_wgmma.py --------------------------------------------------------------------
# An expert's rows should usually fit one block. More blocks per multiprocessor are faster than
# more stages, which leave less of the L1 cache for scales. With BLOCK_K = 256 products are waited
# for half as often as with 128. About half of the experts of which each has 64 rows on average
# have more, and a second block takes as long as the first: so blocks of 80 rows, of two operands,
# are faster from there on, and slower where experts have several of either. Blocks of 48 rows
# serve averages between 32 and 64.
#
# Levels (WGMMA_LEVELS) are looked up in a table of 32 KB that each block has for itself, beside
# which two blocks of eight warps fit: of 80 rows these are faster than one of sixteen, and of 32
# slower.
#
# two_operands: blocks of 48 and 80 rows have registers in four warps; eight_warps: in eight;
# streamed, prepared: int4 that is decoded without waits, prepared e2m1; weights: these are scaled
# in their natural order; sums: these are scaled instead, beside up to 32 rows; tiles: many of
# GEMM2's programs have a second tile; long: rows of both weights have 256 columns; deep: experts
# have a row, and w13's have no whole chunks; short2, short3: GEMM2's tiles are a wave of two
# (three) blocks per multiprocessor and a second one of at most half as many; full: they are more
# than 1.5 multiprocessors' blocks
WGMMA_BLOCKS: Blocks = ((4, 8), (10, 16), (30, 32), (ANY, 64))
WGMMA_BLOCKS_OF_TWO: dict[int, Blocks] = {  # by bits
    4: (*WGMMA_BLOCKS[:3], (38, 48), (56, 64), (80, 80), (ANY, 64)),
    8: (*WGMMA_BLOCKS[:3], (44, 48), (ANY, 64)),
}
WGMMA_BLOCKS_OF_INT6: Blocks = ((3, 8), *WGMMA_BLOCKS[1:])
FEW_ROWS_OF_SUMS = 6  # up to which blocks of 8 are best where sums are scaled
EIGHT_WARPS = (128, 256, 2, 8)
WGMMA_LEVELS: Rows[Tile] = (  # of both products
    ("m80", (128, 128, 2, 8)),
    ("m48 c256", EIGHT_WARPS),
    ("m48", (128, 128, 3, 8)),
    ("m64", (128, 128, 3, 8)),
    ("m32 c256 !few", (256, 256, 2, 16)),
    ("m32 c256", EIGHT_WARPS),
    ("m32", (128, 128, 4, 8)),
    ("c256", (128, 256, 3, 8)),
    ("", (128, 128, 6, 8)),
)
WGMMA_GEMM: Rows[Tile] = (  # of both products
    ("6bit m8", (64, 128, 4, 4)),
    ("6bit m<=32", (128, 128, 2, 4)),
    ("6bit", (128, 128, 3, 4)),
    ("5bit m8 c256", (64, 256, 3, 4)),
    ("5bit m16 c256", (64, 256, 2, 4)),
    ("5bit m64 c256", (128, 256, 2, 4)),
    ("5bit m32 c256", EIGHT_WARPS),
    ("m80 eight_warps c256", EIGHT_WARPS),
    ("m48 eight_warps c256", EIGHT_WARPS),
    ("eight_warps !m8 !m16 !m32 !c256", (128, 128, 4, 8)),
    ("m80 streamed", (128, 128, 4, 4)),
    ("m80", (128, 128, 3, 4)),
    ("m48 8bit", (128, 128, 4, 4)),
    ("m48", (128, 128, 3, 4)),
    ("m64 4bit c256", EIGHT_WARPS),  # four warps lack registers for accumulators and operands
    ("m64 prepared", (128, 128, 4, 4)),  # here they have room
    ("m64", (128, 128, 4, 8)),
    ("m8 4bit c256 sparse w13", (64, 256, 2, 4)),
    ("4bit c256", (128, 256, 2, 4)),
    ("", (128, 128, 3, 4)),
)
WGMMA_GEMM1: Rows[Tile] = (
    ("4bit sums m8 c256", (64, 256, 3, 4)),
    ("4bit !sums streamed m8 c256 !sparse", (64, 256, 3, 4)),
    ("4bit !sums weights m<=16 c256", (64, 256, 2, 4)),
    # one chunk a K tile, so more stages of fewer rows
    ("4bit !sums m<=16 !c128 !two_operands", (64, 128, 4, 4)),
    ("4bit !sums m<=16 !c128 tiles", (64, 128, 4, 4)),
    # wider tiles in 8 bits beside few rows wait for products half as often
    ("8bit long m32", EIGHT_WARPS),
    ("8bit long m8 deep", (64, 256, 3, 4)),
    ("8bit long m16 deep", (64, 256, 4, 4)),
    ("8bit long m8", (64, 256, 2, 4)),
    ("8bit long m16", (128, 256, 2, 4)),
    *WGMMA_GEMM,
)
WGMMA_GEMM2: Rows[Tile] = (
    ("4bit sums m8 c256 I>=4096", (64, 256, 2, 4)),
    ("4bit sums m16 c256 I>=4096", (64, 256, 3, 4)),
    ("4bit sums m32 c256 I>=4096 !short2", EIGHT_WARPS),
    ("4bit !sums weights m16 c256 I>=4096", (64, 256, 2, 4)),
    ("4bit !sums m<=16 !c128 !two_operands", (64, 128, 4, 4)),
    ("4bit !sums m<=16 !c128 tiles", (64, 128, 4, 4)),
    ("8bit long m32 !short2", EIGHT_WARPS),
    ("8bit long m8 deep", (64, 256, 3, 4)),
    ("8bit long m16 deep", (64, 256, 4, 4)),
    ("8bit long m<=16 I>=4096 short3", (64, 256, 2, 4)),
    ("8bit long m16 I>=4096 !short2", (128, 256, 2, 4)),
    ("8bit long m8", (128, 256, 2, 4)),
    *WGMMA_GEMM,
)
# GEMM2 with few tiles (`few`) is faster with SPLIT_K, which fills waves of blocks. A last wave
# that is nearly empty (`short`) is avoided by SPLIT_K = 2 where programs are long: it takes as
# long as a full one.
WGMMA_SPLIT_K: Rows[int] = (
    ("4bit I>=8192 short", 2),
    ("4bit sums m32 c256 I>=4096 !short2 full", 1),
    ("8bit long m32 !short2 full", 1),
    ("8bit long m16 !deep I>=4096 !short3 !short2 full", 1),
    ("8bit long m8 !deep few", 3),
    ("!few", 1),
    ("m48", 1),
    ("m80", 1),
    ("m32", 3),
    ("", 2),
)
