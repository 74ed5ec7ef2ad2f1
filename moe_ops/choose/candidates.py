"""Legal tiles of the kernels: those whose blocks fit the registers and the shared memory of a
multiprocessor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from moe_ops.kernels.configs import GemmConfig
from moe_ops.kernels.launch import Gpu

MAX_SUMS = 128  # of a thread: accumulators, and those of a group of columns beside them


class Gemm(NamedTuple):
    """The facts of a product on which its tiles depend."""

    rows: int  # of an expert's weight
    columns: int  # length of its sums
    w_size: int  # bytes a weight element
    x_size: int  # bytes an element of its input
    scaled: bool  # each step's sum is scaled before it is added to the total
    block_ns: tuple[int, ...] = (64, 128, 256)  # rows of the weight in a tile


def shared_bytes(gemm: Gemm, config: GemmConfig, block_m: int) -> int:
    """Bytes of shared memory that a block's ring takes, and an operand that is converted in it."""
    block_n, block_k, num_stages, _ = config
    stage = (block_n * gemm.w_size + block_m * gemm.x_size) * block_k
    converted = block_m * block_k * 2 if gemm.x_size > gemm.w_size else 0
    return stage * num_stages + converted


def registers(gemm: Gemm, config: GemmConfig, block_m: int) -> float:
    """Registers of a thread, about as the compiler takes them: 48 with 8 plain sums a thread, 72
    with 16; with scaled sums 48 with 8, 156 with 32.
    """
    sums = config.block_n * block_m / (32 * config.num_warps)
    return min(255, 40 + (3.5 if gemm.scaled else 2) * sums)


def blocks_held(gemm: Gemm, config: GemmConfig, block_m: int, gpu: Gpu) -> int:
    """Blocks that a multiprocessor holds at a time; 0 if one does not fit."""
    shared = shared_bytes(gemm, config, block_m) + 1024
    if shared > gpu.shared_memory:
        return 0
    threads = 32 * config.num_warps
    by_registers = int(gpu.registers // (registers(gemm, config, block_m) * threads))
    return min(gpu.multiprocessor_memory // shared, by_registers)


def tiles(gemm: Gemm, block_m: int, gpu: Gpu) -> Iterator[GemmConfig]:
    """Legal tiles of a product of blocks of `block_m` rows."""
    for n in gemm.block_ns:
        for k in (64, 128) if gemm.w_size > 1 else (128,):
            if gemm.w_size > 1 and gemm.columns % k:
                continue
            for warps in (4, 8):
                sums = n * block_m / (32 * warps) * (2 if gemm.scaled else 1)
                if not 8 <= sums <= MAX_SUMS:
                    continue
                for stages in (2, 3, 4, 5, 6, 8):
                    config = GemmConfig(n, k, stages, warps)
                    if blocks_held(gemm, config, block_m, gpu):
                        yield config
