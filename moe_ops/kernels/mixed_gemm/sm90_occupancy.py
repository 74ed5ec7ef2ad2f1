"""Occupancy of the kernels of sm90_wgmma.py: how many blocks a multiprocessor holds, and how many
registers that leaves to a thread.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from moe_ops.kernels.configs import LEVELS, GemmConfig
from moe_ops.kernels.launch import Gpu
from moe_ops.kernels.mixed_gemm.operands import Format
from moe_ops.meta.workspace import cdiv

# registers a thread in the last four warps of a block, of which one is the producer
PRODUCER_REGISTERS = 24
MAX_CONSUMER_REGISTERS = 232  # registers a thread in the consumer warps, at most
INT4 = ("int4", "weight")  # whose scales multiply the weights
PAIRS_BYTES = 32 << 10  # of shared memory, the table of sm90_levels.py
# of shared memory beside it, at least: Triton asks for a kernel's own memory besides only then
LEAST_BESIDE_PAIRS = 48 << 10
LONG = 16  # K tiles of a program that gains from streaming them


def columns_of(block_m: int) -> int:
    """Rows of x in the first of a block's operands, the largest power of two of them; the others
    are in a second one.
    """
    return 1 << (block_m.bit_length() - 1)


class WgmmaKernel(NamedTuple):
    """The facts of a GEMM on which its registers depend."""

    format: Format
    k_chunk: int
    has_zero: bool
    config: GemmConfig
    block_m: int
    block_k: int
    steps: int = 1  # K tiles of a program
    streams: bool = False  # `MixedOperand.streams`

    @property
    def more(self) -> int:
        """Rows of x in the second operand of a block."""
        return self.block_m - columns_of(self.block_m)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.config.num_warps + 4)

    def average(self, consumer_registers: int) -> float:
        """Average registers a thread, if consumer threads have so many."""
        warps = self.config.num_warps
        return (consumer_registers * warps + PRODUCER_REGISTERS * 4) / (warps + 4)


class Occupancy(NamedTuple):
    """How a GEMM's blocks share a multiprocessor."""

    blocks: int  # blocks a multiprocessor
    registers: int  # average registers a thread
    overlap: bool  # a chunk is decoded while the one before is multiplied
    stream: bool = False  # across K tiles, too


@lru_cache(maxsize=4096)
def occupancy(kernel: WgmmaKernel, tiles: int, gpu: Gpu) -> Occupancy:
    """The Occupancy of a GEMM of `tiles` tiles.

    A multiprocessor holds as many blocks as fit, because each hides the latency of the others. If
    scales are copied with the weights, three blocks hide it, and the number of blocks is the one
    that leaves the least of the last wave empty. In int4, whose scales threads load, more blocks
    than three may lose as much as that gains.
    """
    stream = _may_stream(kernel)
    overlap = stream or _may_overlap(kernel)
    if kernel.format.name != "e2m1_words":
        blocks = _max_blocks(kernel, _min_registers(kernel, overlap), gpu)
        if _fit_in_three(kernel, tiles, gpu) and not overlap:
            overlap = _max_blocks(kernel, _min_registers(kernel, True), gpu) >= 3
            blocks = min(blocks, 3) if overlap else blocks
    else:
        most = _max_blocks(kernel, _min_registers(kernel, kernel.more > 0), gpu)
        choice = range(min(3, most), most + 1)
        blocks = min(choice, key=lambda blocks: (_time(tiles, blocks, gpu), -blocks))
        overlap = overlap and _max_blocks(kernel, _min_registers(kernel, True), gpu) >= blocks
    registers = min(
        gpu.registers // (blocks * kernel.threads), int(kernel.average(MAX_CONSUMER_REGISTERS))
    )
    return Occupancy(blocks, registers // 8 * 8, overlap, stream)


def beside_pairs(config: GemmConfig, block_m: int, block_k: int) -> GemmConfig:
    """The config with so many stages that shared memory beside a table of pairs is enough."""
    stage = config._replace(block_k=block_k).stage_bytes(block_m, 4, 2)
    return config._replace(num_stages=max(config.num_stages, cdiv(LEAST_BESIDE_PAIRS, stage)))


def _fit_in_three(kernel: WgmmaKernel, tiles: int, gpu: Gpu) -> bool:
    """Whether all tiles of int4 run at once with three blocks a multiprocessor, so that registers
    for a fourth are better spent on the overlap.
    """
    few = tiles <= 3 * gpu.multiprocessors
    return few and kernel.block_m == 8 and (kernel.format.name, kernel.format.scale) == INT4


def _time(tiles: int, blocks: int, gpu: Gpu) -> float:
    """Estimated time of a GEMM in waves of `blocks` blocks a multiprocessor, in units of the time
    that a block's copies take. A wave takes 1.2 more for its start and end, as measured. The
    sum over a few numbers of tiles accounts for routing that makes more or fewer.
    """
    each = 100 * gpu.multiprocessors * blocks
    return sum([cdiv(tiles * percent, each) for percent in (95, 100, 105)]) * (blocks + 1.2)


def _max_blocks(kernel: WgmmaKernel, consumer_registers: int, gpu: Gpu) -> int:
    """Blocks that fit on a multiprocessor, with so many registers a consumer thread."""
    tile, of = kernel.config._replace(block_k=kernel.block_k), kernel.format
    stage = tile.stage_bytes(kernel.block_m, of.bits, 2)
    if of.name == "e2m1_words":
        stage += tile.block_n * tile.block_k // of.group
    table = PAIRS_BYTES if of.name in LEVELS else 0
    fit = max(1, gpu.multiprocessor_memory // (tile.num_stages * stage + 2048 + table))
    by_registers = int(gpu.registers // (kernel.average(consumer_registers) * kernel.threads))
    return min(fit, max(2, by_registers))  # two blocks that spill are faster than one


def _min_registers(kernel: WgmmaKernel, overlap: bool) -> int:
    """Registers that a consumer thread needs, found by compiling: with so many, and with the 7
    fewer that rounding may leave, the compiler spills little or nothing. (Three blocks of 48 rows
    of prepared e2m1 do, and are far slower than two.)
    """
    of, (block_n, _, _, num_warps), block_m = kernel.format, kernel.config, kernel.block_m
    accumulators = block_n * block_m // (32 * num_warps)
    if of.name == "e2m1_words":  # scales are in shared memory, not prefetched into registers
        registers = 64
    else:
        registers = 72 if of.scale == "e8m0" or (of.bits == 4 and block_m == 8) else 80
    registers += accumulators + 8 * (kernel.more > 0)
    # int4 with a minimum and scales in one level takes no more
    registers += 8 * (kernel.has_zero and (of.scale != "minimum" or of.two_levels))
    whole = block_n == 16 * num_warps
    if not whole and not of.scales_weights:
        registers += accumulators // 2  # sums of a group, for half of the rows
    if overlap:
        few = kernel.k_chunk == 64 or whole
        few = few or (block_m == 8 and (of.name == "e2m1_words" or _may_stream(kernel)))
        registers += 16 if few else 32
    return registers


def _may_overlap(kernel: WgmmaKernel) -> bool:
    """Whether a chunk may be decoded while the one before is multiplied, if the registers for that
    cost no block.

    It pays with BLOCK_M = 8, and with 16 if it takes few registers; with 32 if weights are scaled,
    so that chunks have no sums of their own, and no zero points take registers.

    With two stages, so many blocks fit on a multiprocessor that they hide each other's latency
    without the overlap. The same holds for int4 in chunks of 64 whose sums are scaled.
    """
    of, config = kernel.format, kernel.config
    if kernel.block_m == 8:
        return of.bits == 8 or (
            config.num_stages > 2 and (of.scale != "sum" or kernel.k_chunk == 128)
        )
    if kernel.block_m > 32 and of.name == "e2m1_words":
        return (config.block_n, config.num_warps) == (128, 4)
    if kernel.more:
        return config.block_n > 16 * config.num_warps
    if kernel.block_m == 32:
        return of.scales_weights and not kernel.has_zero
    whole = config.block_n == 16 * config.num_warps
    return kernel.block_m == 16 and (kernel.k_chunk == 64 or whole)


def _may_stream(kernel: WgmmaKernel) -> bool:
    """Whether products of a K tile may be in flight while the next K tile is decoded, so that the
    tensor cores never wait between them.

    It is for int4 with scales of whole chunks. With 16 and 32 rows in a block it is no faster;
    blocks of 64 are faster with eight warps, which do not stream; and short programs gain nothing.
    """
    (block_n, _, num_stages, num_warps) = kernel.config
    # (a slot of the ring is freed once the next one is full: one alone would wait for ever)
    fits = kernel.block_m == 8 and (block_n, num_stages, num_warps) == (128, 2, 4)
    return kernel.streams and fits and kernel.steps >= LONG
