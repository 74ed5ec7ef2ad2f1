"""Tile sizes of the Triton kernels, from the number of rows and static facts.

The workspace never depends on the choice: h and y have one row per pair whatever the tile, and the table
of blocks is sized for the smallest tile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from moe_ops.meta.workspace import minimum

SMALLEST_TILE = 16  # tokens; the least a tensor core takes
GROUP = 16  # blocks that pass over one weight tile before the next tile's turn


def block_bound(rows, groups, tile):
    """Most blocks of `tile` rows that `rows` rows in `groups` groups can need; int or SymInt.

    A group of c > 0 rows needs ceil(c / tile) <= (c + tile - 1) / tile, and at most min(rows, groups) groups
    have rows. Falls as the tile grows.
    """
    return minimum(rows, (rows + minimum(rows, groups) * (tile - 1)) // tile)


class Tile(NamedTuple):
    """One GEMM's tile: weight rows, step along K, pipeline stages, warps."""

    rows: int
    k: int
    stages: int
    warps: int


class Tiles(NamedTuple):
    """Everything about a launch that the number of rows decides, so one value is one warm-up."""

    direct: bool  # pair b is block b: no routing kernel
    tokens: int  # rows of a block
    gemm1: Tile
    gemm2: Tile
    chunk: int  # pairs the routing kernel handles at a time


def _fit(tile: Tile, tokens: int, K: int, itemsize: int, shared_memory: int) -> Tile:
    """`tile` with its step fitted to K and its stages to the shared memory of a block."""
    rows, k, stages, warps = tile
    if k == 128 and K % 128 and K % 64 == 0:  # 2880: no masks, the same bytes in flight
        k, stages = 64, stages + 2
    while k > 16 and k >= 2 * K:
        k //= 2
    room = shared_memory - 8192
    while rows > 64 and (rows + tokens) * k * itemsize * 2 > room:
        rows //= 2
    stages = max(2, min(stages, room // ((rows + tokens) * k * itemsize)))
    return Tile(rows, k, stages, warps)


@lru_cache(maxsize=8192)
def choose(
    rows: int,  # pairs, or rows of the sorted input
    groups: int,  # experts that share them
    K: int,
    I: int,  # noqa: E741
    itemsize: int,
    direct: bool,
    shared_memory: int,  # bytes a block may use
) -> Tiles:
    """Tiles of the two GEMMs. An expert's rows should usually fit one block, so weights are read once.

    The 16-token entries were timed on an H200 (64 x 128 x 4 stages streams weights at 92 to 98 % of its
    bandwidth); the larger ones follow register and shared-memory limits.
    """
    average = rows / groups
    if itemsize == 4:  # fp32 products run on the ordinary units, exactly
        tokens = 16 if average <= 12 else 32
        gemm1 = gemm2 = Tile(64, 32, 3, 4)
    elif (
        K % 16 or I % 16
    ):  # rows out of 16-byte step load element by element: few registers a tile
        tokens = 16 if average <= 12 else 32
        gemm1 = gemm2 = Tile(64, 32, 2, 4)
    elif direct or average <= 12:
        tokens = 16
        gemm1 = Tile(64 if I <= 2048 and average <= 2 else 128, 128, 4, 4)
        gemm2 = Tile(64, 128, 4, 4)
    elif average <= 25:
        tokens = 32
        gemm1, gemm2 = Tile(128, 128, 4, 4), Tile(64, 128, 4, 4)
    elif average <= 51:
        tokens = 64
        gemm1, gemm2 = Tile(128, 64, 4, 4), Tile(128, 64, 4, 4)
    else:
        tokens = 128
        wide = 256 if shared_memory > 200 * 1024 else 128  # before SM90 the wider tile spills
        gemm1, gemm2 = Tile(wide, 64, 4, 8), Tile(128, 64, 4, 8)
    return Tiles(
        direct,
        tokens,
        _fit(gemm1, tokens, K, itemsize, shared_memory),
        _fit(gemm2, tokens, I, itemsize, shared_memory),
        chunk=1024 if tokens <= 32 else 4096,
    )
