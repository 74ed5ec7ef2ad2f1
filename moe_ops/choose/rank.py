"""A model of the time of a layer's products with a config: waves of programs, the use of the last
wave, bytes read and products, from the facts of a GPU. Candidates are ordered by it.

It compares configs of one kernel for one problem, and its cycles are no predictions. Measured
configs and rules take precedence; a search measures the configs that it puts first.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, exp
from typing import NamedTuple

from moe_ops.choose.candidates import (
    Gemm,
    Space,
    blocks_held,
    blocks_of,
    gemms_of,
    layers,
    tiles,
)
from moe_ops.choose.table import LayerSizes
from moe_ops.kernels.configs import GemmConfig, LayerConfig
from moe_ops.kernels.launch import Gpu
from moe_ops.meta.workspace import cdiv


class Rates(NamedTuple):
    """Peak rates of an SM90 multiprocessor per clock cycle, and latencies in cycles, fitted to the
    timed tiles of tests/fixtures/tiles_NVIDIA_H200.json.
    """

    bytes: float = 19.5  # from memory, while all multiprocessors read
    l2_bytes: float = 120.0  # from the L2 cache
    products: float = 1800.0  # multiply-adds of 16 bits; twice as many of 8 bits
    scaled: float = 1.45  # slowdown of products whose sums are scaled for each K tile
    operands: float = 44.0  # rows and columns whose loads take as long as a tile's products
    latency: float = 1550.0  # from a request to memory to the arrival of its bytes
    empty: float = 1.6  # stages of a ring that are empty on average
    start: float = 60.0  # of a program before its first product and after its last
    step: float = 0.5  # of a K tile, in addition to its loads and products
    launch: float = 4600.0  # of a kernel before its first program and after its last


RATES = Rates()


@lru_cache(maxsize=4096)
def expected_blocks(average: float, rows: int) -> float:
    """Expected number of blocks of `rows` rows of an expert that gets `average` rows on average,
    Poisson distributed: the sum over n of the probability of more than n * rows.
    """
    if average > 500:
        return average / rows + 0.5
    total, chance, n = 0.0, exp(-average), 0
    below = chance  # the probability of at most n rows
    while 1 - below > 1e-9 or n < average:
        if n % rows == 0:
            total += max(0.0, 1 - below)
        n += 1
        chance *= average / n
        below += chance
    return total


def waves(programs: float, held: int, gpu: Gpu) -> float:
    """Number of waves of programs, of which a multiprocessor holds `held` at a time. The last wave
    counts as the fraction that its fullest multiprocessor needs.
    """
    whole, rest = divmod(programs, held * gpu.multiprocessors)
    return whole + ceil(rest / gpu.multiprocessors) / held


def gemm_cycles(gemm: Gemm, config: GemmConfig, block_m: int, blocks: float, gpu: Gpu) -> float:
    """Estimated cycles of a product with `blocks` expected blocks of `block_m` rows of x."""
    n, k, stages, _ = config
    held = blocks_held(gemm, config, block_m, gpu)
    programs = blocks * cdiv(gemm.rows, n)
    many = min(held, max(1, ceil(programs / gpu.multiprocessors)))
    # few bytes in flight do not hide the latency of memory
    in_flight = many * (stages - RATES.empty) * n * k * gemm.w_size
    rate = min(RATES.bytes, in_flight / RATES.latency)
    read = n * gemm.w_size / rate + block_m * gemm.x_size / RATES.l2_bytes  # of one column
    multiplied = n * block_m / RATES.products * (1 + RATES.operands * (1 / block_m + 1 / n))
    if gemm.w_size == 1:
        multiplied *= RATES.scaled / 2
    wave = many * gemm.columns * max(read, multiplied)
    wave += RATES.start + gemm.columns / k * RATES.step
    return RATES.launch + waves(programs, many, gpu) * wave


def ranked(
    gemm: Gemm, rows: int, layer: LayerSizes, within: float = 1.25
) -> dict[GemmConfig, float]:
    """Legal tiles of a product with blocks of `rows` rows, with their estimated cycles, the best
    first, up to `within` times the cycles of the best.
    """
    blocks, gpu = layer.experts * expected_blocks(layer.average, rows), layer.gpu
    times = {c: gemm_cycles(gemm, c, rows, blocks, gpu) for c in tiles(gemm, rows, gpu)}
    most = within * min(times.values(), default=0.0)
    return {c: times[c] for c in sorted(times, key=lambda c: times[c]) if times[c] <= most}


def ranked_space(
    base: LayerConfig, layer: LayerSizes, itemsize: int, quantized: bool, x_scale: str
) -> Space:
    """Configs worth measuring, for the kernels in `gemm`: for each kind of block a list for GEMM1
    and a list for GEMM2, the best by estimate first.
    """
    space = []
    aligned = x_scale == "group" and not (layer.K % 16 or layer.I % 16)
    for kind in blocks_of(base, layer.average, aligned):
        one, two = gemms_of(kind, layer.K, layer.I, itemsize, quantized, x_scale)
        ones = ranked(one, kind.block_m, layer) or [base.gemm1]
        twos = ranked(two, kind.block_m // kind.split_m, layer) or [base.gemm2]
        space.append(layers(kind, ones, twos))
    return space
