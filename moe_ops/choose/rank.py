"""An estimate of the time of a layer's products with a config, by which candidates are ordered:
waves of programs, the use of the last one, bytes that are read and products, from the facts of a
GPU.

It orders configs of one kernel for one problem. Its times are no predictions: a table's measured
configs go before.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, exp
from typing import NamedTuple

from moe_ops.choose.candidates import Gemm, blocks_held, tiles
from moe_ops.kernels.configs import GemmConfig
from moe_ops.kernels.launch import Gpu
from moe_ops.meta.workspace import cdiv


class Rates(NamedTuple):
    """What a multiprocessor of SM90 does at most, in cycles of its clock."""

    bytes: float = 19.0  # from memory, with all multiprocessors reading
    l2_bytes: float = 64.0  # from the L2 cache
    products: float = 2048.0  # of 16 bits; of 8 bits twice as many
    latency: float = 1700.0  # cycles from a request to memory until its bytes are there
    start: float = 1000.0  # cycles of a program before its first product and after its last
    launch: float = 4000.0  # cycles of a kernel before its first program and after its last


RATES = Rates()


@lru_cache(maxsize=4096)
def expected_blocks(average: float, rows: int) -> float:
    """Expected blocks of `rows` rows that an expert has, if `average` rows come to it on average
    and experts are equally likely: the sum over n of the chance of more than n * rows (Poisson).
    """
    if average > 40 * rows:
        return average / rows + 0.5
    total, chance, n = 0.0, exp(-average) if average < 700 else 0.0, 0
    if not chance:
        return average / rows + 0.5
    below = chance  # the chance of at most n rows
    while 1 - below > 1e-9 or n < average:
        if n % rows == 0:
            total += max(0.0, 1 - below)
        n += 1
        chance *= average / n
        below += chance
    return total


def waves(programs: float, held: int, gpu: Gpu) -> float:
    """Waves of `held` on a multiprocessor that programs take; the last one takes the part of a
    whole one's time that its fullest multiprocessor needs.
    """
    whole, rest = divmod(programs, held * gpu.multiprocessors)
    return whole + ceil(rest / gpu.multiprocessors) / held


def gemm_cycles(
    gemm: Gemm, config: GemmConfig, block_m: int, used_m: float, blocks: float, gpu: Gpu
) -> float:
    """Estimated cycles of a product.

    Args:
        gemm: its facts.
        block_m: rows of x of a program.
        used_m: those of them that are multiplied, on average.
        blocks: expected blocks of rows, of all experts.
    """
    n, _, stages, _ = config
    held = blocks_held(gemm, config, block_m, gpu)
    if not held:
        return float("inf")
    programs = blocks * cdiv(gemm.rows, n)
    many = min(held, max(1, ceil(programs / gpu.multiprocessors)))
    weight_bytes = n * gemm.columns * gemm.w_size
    x_bytes = used_m * gemm.columns * gemm.x_size
    products = n * used_m * gemm.columns / (2 if gemm.w_size == 1 else 1)
    # With few bytes in flight the memory's latency is not hidden. A slot of the ring is empty for
    # about half of the time.
    in_flight = many * (stages - 1.5) * n * config.block_k * gemm.w_size
    rate = min(RATES.bytes, in_flight / RATES.latency)
    read = many * weight_bytes / rate + many * x_bytes / RATES.l2_bytes
    # a tensor core waits for operands of small tiles
    multiplied = many * products / RATES.products * (1 + 24 / used_m + 16 / n)
    alone = RATES.start + gemm.columns / config.block_k * 40
    return RATES.launch + waves(programs, many, gpu) * (max(read, multiplied) + alone)


def ranked(
    gemm: Gemm, rows: int, experts: int, average: float, gpu: Gpu, within: float = 1.25
) -> list[GemmConfig]:
    """Legal tiles of a product of blocks of `rows` rows, by their estimated time, without those
    that take more than `within` times as long as the first one.
    """
    blocks = experts * expected_blocks(average, rows)
    times = {c: gemm_cycles(gemm, c, rows, rows, blocks, gpu) for c in tiles(gemm, rows, gpu)}
    best = min(times.values(), default=0.0)
    return [c for c in sorted(times, key=lambda c: times[c]) if times[c] <= within * best]
