"""How many blocks of the kernels of gluon_packed.py a multiprocessor holds, and what registers their threads have for it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from moe_ops.kernels.triton_tiles import Tile
from moe_ops.meta.workspace import cdiv

if TYPE_CHECKING:
    from moe_ops.kernels.triton_packed_launch import Format

SHARED_MEMORY, REGISTERS = 228 * 1024, 65536  # of a multiprocessor
MULTIPROCESSORS = 132  # of an H100 or H200 with SXM
E2M1 = ("e2m1", "e2m1_words")
COPYING = 24  # registers a thread of a block's last four warps, of which one asks for what the others read
MOST = 232  # registers a thread of those that multiply


class Product(NamedTuple):
    """A GEMM as far as registers depend on it."""

    format: Format
    piece: int  # columns
    has_zero: bool
    tile: Tile
    tokens: int  # of a block
    step: int  # columns

    @property
    def threads(self) -> int:
        return 32 * (self.tile.warps + 4)

    def average(self, registers: int) -> float:
        """Registers of a thread, on average, where those that multiply have so many."""
        warps = self.tile.warps
        return (registers * warps + COPYING * 4) / (warps + 4)


class Residence(NamedTuple):
    """What `resident` finds."""

    blocks: int  # a multiprocessor
    registers: int  # of a thread, on average
    overlap: bool  # weights are decoded while those before them are multiplied


@lru_cache(maxsize=4096)
def resident(p: Product, tiles: int) -> Residence:
    """How blocks of so many tiles in all share the multiprocessors.

    As many as there is room for, since what a block waits for others cover. Where scales come with the weights, three
    blocks are enough for that, and the number is chosen by the rounds it takes: the last one is seldom full. (gptoss20 in
    nvfp4 at M = 8, 7.0 tiles of GEMM1 and 3.6 of GEMM2 a multiprocessor: by three blocks 107 us, by four 95, by five 106;
    gptoss120, of 9.7 and 5.0: 132, 140, 128. Of int4, four blocks instead of three took gptoss20 from 94 to 88 us at M = 8,
    from 118 to 127 at 16.)
    """
    overlap = _may_overlap(p)
    if p.format.name != "e2m1_words":
        blocks = _most(p, _least(p, overlap))
    else:
        most = _most(p, _least(p, False))
        choice = range(min(3, most), most + 1)
        blocks = min(choice, key=lambda blocks: (_time(tiles, blocks), -blocks))
        overlap = overlap and _most(p, _least(p, True)) >= blocks
    registers = min(REGISTERS // (blocks * p.threads), int(p.average(MOST)))
    return Residence(blocks, registers // 8 * 8, overlap)


def _time(tiles: int, blocks: int) -> float:
    """Of tiles in rounds of so many blocks a multiprocessor, in units of a block's copies, with 1.2 for what a round's first
    and last ones wait for (fits the times in `resident`). Routing makes some more tiles, or some fewer."""
    rounds = [cdiv(tiles * of, 100 * MULTIPROCESSORS * blocks) for of in (95, 100, 105)]
    return sum(rounds) * (blocks + 1.2)


def _most(p: Product, least: int) -> int:
    """Blocks that a multiprocessor has room for, whose threads have `least` registers to multiply."""
    of_weights, of_x = p.tile.rows * p.format.bits // 8, p.tokens * 2
    if p.format.name == "e2m1_words":
        of_weights += p.tile.rows / p.format.group
    shared = p.tile.stages * p.step * (of_weights + of_x) + 2048
    fit = max(1, int(SHARED_MEMORY // shared))
    return min(fit, max(2, int(REGISTERS // (p.average(least) * p.threads))))  # two rather spill


def _least(p: Product, overlap: bool) -> int:
    """Registers that a thread needs to multiply. Counted: from there on, and with the 7 fewer that rounding may leave, the
    compiler spills little or nothing."""
    of, tile = p.format, p.tile
    sums = tile.rows * p.tokens // (32 * tile.warps)
    if of.name == "e2m1_words":  # whose scales are read where they are needed
        least = 64
    else:
        least = 72 if of.scale == "e8m0" or (of.bits == 4 and p.tokens == 8) else 80
    least += sums + 8 * p.has_zero
    whole = tile.rows == 16 * tile.warps
    if not whole and of.name not in E2M1 and of.scale != "weight":
        least += sums // 2  # a group's, of a half of the rows
    if overlap:
        least += (
            16 if p.piece == 64 or whole or (of.name == "e2m1_words" and p.tokens == 8) else 32
        )
    return least


def _may_overlap(p: Product) -> bool:
    """Whether to decode weights while those before them are multiplied, where registers for both cost no block.

    On an H200 that took 1 to 8 % less time at 8 tokens a block and, where it takes few registers, at 16; at 32, 1 to 2 % less
    where weights are scaled, so that pieces are not summed apart, and zero points need no registers.
    Blocks of two stages leave a multiprocessor room for so many that these cover for each other: 1 to 5 % less without. So do
    those of int4 in pieces of 64 whose sums are scaled (gptoss20 at M = 8: 104 us without, 108 with).
    """
    of, tile = p.format, p.tile
    if p.tokens == 8:
        return of.bits == 8 or (tile.stages > 2 and (of.scale != "sum" or p.piece == 128))
    if p.tokens == 32:
        return of.name in E2M1 or (of.scale == "weight" and not p.has_zero)
    return p.tokens == 16 and (p.piece == 64 or tile.rows == 16 * tile.warps)
