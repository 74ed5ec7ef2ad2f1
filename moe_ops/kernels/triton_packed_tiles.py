"""Tiles of the kernels of triton_packed.py: weights of 4 or 8 bits, activations that stay as they are.

Two warps a block, as Triton would give four another instruction (kernels/triton_packed_matmul.py), until an expert has
so many rows that products count for more than what precedes them.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from moe_ops.kernels import gluon_packed_launch, triton_tiles
from moe_ops.kernels.triton_launch import Gpu
from moe_ops.kernels.triton_tiles import LARGE_MEMORY, Tile, Tiles

SMALLEST_TILE = 8  # tokens: the columns of one tensor-core product


@lru_cache(maxsize=8192)
def choose(
    rows: int,  # pairs, or rows of the sorted input
    groups: int,  # experts that share them
    K: int,
    I: int,  # noqa: E741
    bits: int,  # of a weight
    dtype: torch.dtype,  # of x
    direct: bool,
    shared_memory: int,  # bytes a block may use
) -> Tiles:
    """Tiles of the two GEMMs. An expert's rows should usually fit one block, so weights are read once."""
    average = rows / groups
    tokens = 8 if direct or average <= 4 else 16 if average <= 16 else 32 if average <= 40 else 64
    if dtype != torch.bfloat16:  # weights are decoded by way of fp32, which takes registers
        tokens = min(max(tokens, 16), 32)
        first = second = Tile(64, 32, 2, 4) if dtype == torch.float32 else Tile(64, 64, 3, 4)
    elif tokens == 8:
        few = min(rows, groups)
        first, second = _streaming(few * 2 * I, bits), _streaming(few * K, bits)
    elif tokens == 16:
        first = second = Tile(128, 128, 4, 4) if bits == 4 else Tile(64, 128, 4, 2)
    elif tokens == 32:
        first = second = Tile(128, 128, 4, 4)
    elif shared_memory <= LARGE_MEMORY:  # before SM90 sums of more rows spill
        tokens, first, second = 32, Tile(64, 128, 4, 2), Tile(64, 128, 4, 2)
    else:
        tokens = 128 if average > 64 else tokens
        first = second = Tile(128, 128, 3, 8 if tokens == 128 else 4)
    return Tiles(
        direct,
        tokens,
        _fit(first, tokens, bits, dtype.itemsize, shared_memory),
        _fit(second, tokens, bits, dtype.itemsize, shared_memory),
        triton_tiles._chunk(rows),
    )


def _streaming(rows: int, bits: int) -> Tile:
    """Tile for few rows an expert, as measured on an H200, where `rows` rows of weights are read in all.

    128 bytes of a row at a time, and smaller tiles where a multiprocessor would have fewer than three blocks.
    """
    if rows < 3 * 132 * 64:
        return Tile(32, 128, 6, 2)
    return Tile(64, 256, 3, 2) if bits == 4 else Tile(64, 128, 4, 2)


def _fit(tile: Tile, tokens: int, bits: int, itemsize: int, shared_memory: int) -> Tile:
    """`tile` with as many stages as the shared memory of a block holds."""
    rows, k, stages, warps = tile
    stage = rows * k * bits // 8 + tokens * k * itemsize
    while rows > 64 and 2 * stage > shared_memory - 8192:
        rows //= 2
        stage = rows * k * bits // 8 + tokens * k * itemsize
    return Tile(rows, k, max(2, min(stages, (shared_memory - 8192) // stage)), warps)


@lru_cache(maxsize=8192)
def _for_experts(
    M: int,
    top_k: int,
    E: int,
    K: int,
    I: int,  # noqa: E741
    dtype: torch.dtype,
    chip: Gpu,
    scheme: str,
    bits: int,
    wgmma: bool = False,
    vector: bool = False,
    prepared: bool = False,
    tables: bool = True,
) -> Tiles:
    base = choose(M * top_k, E, K, I, bits, dtype, M == 1, chip.shared_memory)
    if wgmma:
        base = gluon_packed_launch.choose(M * top_k, E, K, I, bits, base.chunk) or base
    if vector:
        base = _choose_vector(top_k, K, I, bits, base.chunk)
    if not tables:
        return base
    tiles = triton_tiles.measured(base, chip, M, top_k, E, K, I, scheme, dtype)
    # Measured at another M, blocks may be too small for an expert's rows, or too large.
    if tiles.wgmma and not (wgmma and gluon_packed_launch.worth(tiles.tokens, M * top_k / E)):
        return base
    if (tiles.vector and not vector) or (prepared and not (tiles.wgmma or tiles.vector)):
        return base
    return tiles


def for_experts(*problem) -> Tiles:
    """Tiles of an expert layer: those measured for its shape on its GPU, else what `choose` says.

    Arguments: M, top_k, E, K, I, dtype, Gpu, scheme, bits of a weight, whether the kernels of gluon_packed.py and those of
    triton_vector_packed.py can run, and whether no others read the weights' layout.
    """
    return triton_tiles.find(_for_experts, problem)


def _vector_k(columns: int, bits: int, warps: int, each: int = 1) -> int:
    """Columns of a step of which every thread has so many chunks of 16 bytes, or fewer where a row is shorter."""
    return min(4096 // bits * warps * each, 1 << (columns - 1).bit_length())


def _choose_vector(top_k: int, K: int, I: int, bits: int, chunk: int) -> Tiles:  # noqa: E741
    """Tiles of the kernels of triton_vector_packed.py: rows of w13 or w2, and columns of a step.

    Eight rows a thread share what x costs. GEMM1's programs are many: theirs are steps that divide rows of w13. GEMM2's
    are few: there more warps share a row, and programs have fewer rows where a multiprocessor would have less than 12 warps.
    """
    warp = 4096 // bits  # columns that a warp reads at a time
    first = next(w for w in (4, 2, 1) if K % (warp * w) == 0 or w == 1)
    second = (
        8
        if 4 * warp < top_k * I <= 8 * warp
        else min(4, max(1, _vector_k(top_k * I, bits, 4) // warp))
    )
    rows = 8 if K * second >= 8 * 12 * 132 else 4
    return Tiles(
        True,
        1,
        Tile(8, _vector_k(K, bits, first), 1, first),
        Tile(rows, _vector_k(top_k * I, bits, second), 1, second),
        chunk,
        vector=True,
    )


def vector_space(
    base: Tiles,
    top_k: int,
    K: int,
    I: int,  # noqa: E741
    bits: int,
) -> tuple[list[Tiles], list[Tiles]]:
    """For the search (moe_ops.tuning): variants of the two kernels of one token, of 2 to 16 loads a thread."""

    def tiles(columns: int) -> list[Tile]:
        found = [
            Tile(rows, _vector_k(columns, bits, warps, each), 1, warps)
            for rows in (2, 4, 8, 16)
            for warps in (1, 2, 4, 8)
            for each in (1, 2)
            if rows * each <= 16 and (warps == each == 1 or 2048 // bits * warps * each < columns)
        ]
        return list(dict.fromkeys(found))

    ones = [base._replace(gemm1=tile) for tile in tiles(K)]
    return ones, [base._replace(gemm2=tile) for tile in tiles(top_k * I)]


def search_space(
    base: Tiles, average: float, bits: int, experts: int, K: int
) -> list[tuple[list[Tiles], list[Tiles]]]:
    """For the search (moe_ops.tuning): variants of GEMM1 and of GEMM2, a pair of lists for each kind of block.

    Args:
        average: rows an expert has on average.
        bits: of a weight.
        experts: how many there are.
        K: rows of GEMM2's weights.
    """
    if base.wgmma:
        return gluon_packed_launch.search_space(base, average, experts, K)
    few = [t for t in _ROWS_AND_WARPS if average / 2 <= t <= max(8, 8 * average)]
    space = []
    for tokens in [8] if base.direct else few or [128]:
        tiles = candidates(tokens, bits)
        ones = [base._replace(tokens=tokens, gemm1=tile, gemm2=tiles[0]) for tile in tiles]
        space.append((ones, [one._replace(gemm2=one.gemm1) for one in ones]))
    return space


# Rows and warps of tiles worth timing, by tokens: 16 and 32 tokens are what each warp reads of x for its 32 or 64 rows.
_ROWS_AND_WARPS = {
    8: ((32, 2), (64, 2), (128, 2)),
    16: ((64, 2), (128, 4), (256, 4), (256, 8)),
    32: ((64, 2), (128, 4), (256, 4), (256, 8)),
    64: ((64, 4), (128, 4)),
    128: ((64, 4), (128, 8)),
}


def candidates(tokens: int, bits: int) -> list[Tile]:
    """Tiles worth timing: sums and operands of a block fit its registers, and 64 or 128 bytes of a row are read."""
    found = []
    for rows, warps in _ROWS_AND_WARPS[tokens]:
        for k in (64, 128) if bits == 8 else (128, 256):
            for stages in (3, 4, 6):
                size = rows * k * bits // 8  # bytes of weights
                if 1024 <= size <= 16384 and size * stages <= 65536:
                    found.append(Tile(rows, k, stages, warps))
    return found
