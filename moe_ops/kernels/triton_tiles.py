"""Tile sizes of the Triton kernels, from the number of rows and static facts.

The workspace never depends on the choice: h and y have one row per pair whatever the tile (y of few pairs beside packed
weights has more), and the table of blocks is sized for the smallest tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch

from moe_ops.kernels.triton_launch import Gpu
from moe_ops.meta.workspace import minimum
from moe_ops.tables import lookup

SMALLEST_TILE = 16  # tokens; the least a tensor core takes
GROUP = 16  # blocks that pass over one weight tile before the next tile's turn
# Up to so many rows an expert, on average, the workspace holds h in fp32 too, so that GEMM2 may quantize it by groups.
FEW_ROWS = 2
# From so many rows an expert on, the kernels of triton_large.py may run, on GPUs whose blocks have more than this
# shared memory: those have the copy engine that fills it.
LARGE_ROWS = 24
LARGE_MEMORY = 200 * 1024


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
    quantize: bool = False  # x is quantized by a kernel of its own, not by GEMM1
    wide_h: bool = False  # h is fp32 and quantized by GEMM2, not by GEMM1
    large: bool = False  # the GEMMs are those of triton_large.py
    parts: int = 1  # programs of GEMM2 that share a block's rows (large), or columns (wgmma)
    vector: bool = False  # the kernels are those of triton_vector.py
    wgmma: bool = False  # the kernels are those of gluon_packed.py


def _chunk(rows: int) -> int:
    """Pairs to sort at a time: the fastest on an H200, in steps of four so that few kernels are compiled."""
    if rows <= 512:
        return 64 if rows <= 64 else 256
    return 1024 if rows <= 4096 else 2048 if rows <= 16384 else 4096


def _fit(tile: Tile, tokens: int, K: int, w_size: int, x_size: int, shared_memory: int) -> Tile:
    """`tile` with its step fitted to K and its stages to the shared memory of a block.

    `w_size` and `x_size` are bytes an element. Weights of one byte keep the step: scales follow it.
    """
    rows, k, stages, warps = tile
    if w_size > 1:
        if k == 128 and K % 128 and K % 64 == 0:  # 2880: no masks, the same bytes in flight
            k, stages = 64, stages + 2
        while k > 16 and k >= 2 * K:
            k //= 2
    room = shared_memory - 8192
    if w_size < x_size:
        room -= tokens * k * 2  # one of the operands is converted on its way
    while rows > 64 and (rows * w_size + tokens * x_size) * k * 2 > room:
        rows //= 2
    stages = max(2, min(stages, room // ((rows * w_size + tokens * x_size) * k)))
    return Tile(rows, k, stages, warps)


@lru_cache(maxsize=8192)
def choose(
    rows: int,  # pairs, or rows of the sorted input
    groups: int,  # experts that share them
    K: int,
    I: int,  # noqa: E741
    itemsize: int,  # bytes of an element of x
    direct: bool,
    shared_memory: int,  # bytes a block may use
    weight_scale: str = "",  # of the weights and of the activations, as triton_matmul names them
    x_scale: str = "",
    gated: bool = True,
    large: bool = False,  # the kernels of triton_large.py can run
) -> Tiles:
    """Tiles of the two GEMMs. An expert's rows should usually fit one block, so weights are read once.

    Those of 16 tokens keep 96 to 192 KiB of weights in flight on an SM90 multiprocessor in blocks of about 110
    registers a thread, which is what streaming takes; larger ones follow register and shared-memory limits.
    """
    if large and rows >= LARGE_ROWS * groups and itemsize == 2:
        return _choose_large(rows, groups, I, bool(weight_scale), gated)
    if weight_scale:
        return _choose_fp8(rows, groups, K, I, itemsize, direct, shared_memory, x_scale, gated)
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
        _fit(gemm1, tokens, K, itemsize, itemsize, shared_memory),
        _fit(gemm2, tokens, I, itemsize, itemsize, shared_memory),
        _chunk(rows),
    )


def measured(
    base: Tiles,
    chip: Gpu,
    M: int,
    top_k: int,
    E: int,
    K: int,
    I: int,  # noqa: E741
    scheme: str,
    dtype: torch.dtype,
) -> Tiles:
    """The table's tiles for a layer on a GPU, `base` where it has none."""
    names = (scheme, str(dtype).removeprefix("torch."))
    fields = lookup.triton_tiles(chip.name, E, K, I, top_k, *names, M)
    if fields is None:
        return base
    direct, tokens, gemm1, gemm2, *rest = fields
    tiles = Tiles(direct, tokens, Tile(*gemm1), Tile(*gemm2), *rest)
    return tiles._replace(chunk=base.chunk)  # that depends on M alone


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
    scales: tuple[str, str],
    gated: bool,
    large: bool = False,
    vector: bool = False,
    tables: bool = True,
) -> Tiles:
    facts = (dtype.itemsize, M == 1, chip.shared_memory, *scales, gated, large)
    base = choose(M * top_k, E, K, I, *facts)
    if vector:
        base = _choose_vector(bool(scheme), dtype.itemsize, K, I, base.chunk)
    # Tables hold gated layers. Where GEMM1 quantizes what it writes, its tiles follow from that.
    if not tables or (scheme and not gated):
        return base
    tiles = measured(base, chip, M, top_k, E, K, I, scheme, dtype)
    # The workspace of many rows has no place for h in fp32.
    room = tiles.wide_h == base.wide_h or scales[1] == "group" and M * top_k <= FEW_ROWS * E
    return tiles if room and (large or not tiles.large) and (vector or not tiles.vector) else base


def for_experts(*problem) -> Tiles:
    """Tiles of an expert layer: those measured for its shape on its GPU, else what `choose` says.

    Arguments: M, top_k, E, K, I, dtype, Gpu, scheme, scales, gated, and whether the large kernels
    and those of one token can run.
    """
    return find(_for_experts, problem)


def find(function: Callable[..., Tiles], problem: tuple) -> Tiles:
    """`function(*problem)`, unless a search says otherwise or wants no tables."""
    if _search is None:
        return function(*problem)
    tiles, seen = _search
    tiles = tiles or function(*problem, tables=False)
    seen.append(tiles)
    return tiles


_search: tuple[Tiles | None, list[Tiles]] | None = None


@contextmanager
def searching(tiles: Tiles | None) -> Iterator[list[Tiles]]:
    """Run expert layers with these tiles, or without tables if None; yields the list of tiles used."""
    global _search
    before, seen = _search, []
    _search = (tiles, seen)
    try:
        yield seen
    finally:
        _search = before


def _choose_fp8(
    rows: int,
    groups: int,
    K: int,
    I: int,  # noqa: E741
    itemsize: int,
    direct: bool,
    shared_memory: int,
    x_scale: str,
    gated: bool,
) -> Tiles:
    """Tiles for 8-bit weights whose activations are quantized too: steps of 128, the group that shares a scale.

    A group's sum and the total are held side by side, so accumulators are half as large as for plain weights.
    """
    average = rows / groups
    odd = bool(K % 16 or I % 16)
    # By groups, quantizing in GEMM1's epilogue beat doing it in GEMM2's loop by 1 to 30 %, and a kernel for x beat
    # GEMM1's loop by 2 to 4 %; but rows out of 16-byte step stay what they are. For one token, GEMM1's wide tiles may
    # leave multiprocessors idle: then GEMM2 quantizes, unless its sums are long.
    few = (
        direct and I <= 2048 and rows * I <= 96 * 128 and average <= FEW_ROWS
    )  # else h has no room in fp32
    wide = x_scale in ("row", "tensor") or x_scale == "group" and (odd or few)
    quantize = x_scale == "row" or x_scale == "group" and not (odd and average <= FEW_ROWS)
    # Masks along K take the registers that 64 tokens need, as do operands of 16 bits before SM90.
    small = K % 128 or I % 128 or shared_memory <= 200 * 1024
    tokens = 16 if direct or average <= 12 else 32 if average <= 25 or small else 64
    if odd:  # element by element: few registers a tile
        gemm1 = gemm2 = Tile(64, 128, 2, 8)
    else:
        # GEMM1 quantizes groups of 128 columns of h: 256 rows of gate and up
        gemm1 = Tile(256 if x_scale == "group" and not wide and gated else 128, 128, 4, 4)
        gemm2 = Tile(128, 128, 4, 4)
        if gemm1.rows == 256:
            # On an H200 within 4 % of the best of 19 tiles and of 12, for 1 to 256 tokens of qwen3, mixtral, dsv3
            gemm1 = Tile(256, 128, 5, 4 if tokens <= 32 else 8)
            gemm2 = Tile(64, 128, 3, 4)
            if min(rows, groups) * K <= 64 * 132:  # a block a multiprocessor: the more in flight
                gemm2 = Tile(64, 128, 6, 4)
        elif x_scale == "group" and few:
            gemm1, gemm2 = Tile(64, 128, 6, 4), Tile(256, 128, 4, 4)
        if tokens == 64 and not quantize:  # a conversion needs registers
            gemm1 = gemm1._replace(warps=8)
        if tokens == 64 and wide:
            gemm2 = gemm2._replace(warps=8)
    x_size = 1 if quantize else itemsize
    h_size = 4 if wide else 1
    return Tiles(
        direct,
        tokens,
        _fit(gemm1, tokens, K, 1, x_size, shared_memory),
        _fit(gemm2, tokens, I, 1, h_size, shared_memory),
        _chunk(rows),
        quantize=quantize,
        wide_h=wide,
    )


def _choose_vector(quantized: bool, itemsize: int, K: int, I: int, chunk: int) -> Tiles:  # noqa: E741
    """Tiles of the kernels of triton_vector.py: columns of h or of the output, and the step along their sums.

    As measured on an H200 for qwen3, mixtral, dsv3, gptoss20, glm45air, e64, e160 (docs/performance.md). Where a block
    quantizes x, more rows share that. GEMM2's sums take one step if they can: of 1408 columns, steps of 1024 took 19 and
    43 % longer for a layer in bf16, 8 and 14 % in fp8_block.
    """

    def tile(n: int, k: int, stages: int, warps: int, columns: int) -> Tile:
        return Tile(n, min(k, max(128, 1 << (columns - 1).bit_length())), stages, warps)

    if quantized:
        first = tile(8, 512, 1, 4, K)
        second = tile(8, 2048, 1, 4, I) if 1024 < I <= 2048 else tile(8, 1024, 1, 8, I)
    else:
        k = 2048 // itemsize
        first = tile(2, k, 3, 2, K)
        if k >= I:
            second = tile(4, k, 1, 4, I)
        else:
            second = Tile(4, 2 * k, 1, 8) if 2 * k >= I else Tile(2, k, 1, 4)
    return Tiles(True, 1, first, second, chunk, wide_h=quantized, vector=True)


def vector_space(base: Tiles, K: int, I: int) -> tuple[list[Tiles], list[Tiles]]:  # noqa: E741
    """For the search (moe_ops.tuning): variants of the two kernels of one token, with 16 to 128 weights a thread."""

    def tiles(columns: int, rows: int) -> list[Tile]:
        return [
            Tile(n, k, stages, warps)
            for n in (1, 2, 4, 8, 16)
            for k in (512, 1024, 2048, 4096)
            for warps in (2, 4, 8)
            for stages in ((1,) if k >= columns else (1, 3))
            if 16 <= n * rows * k // (32 * warps) <= 128 and k < 2 * columns
        ]

    ones = [base._replace(gemm1=tile) for tile in tiles(K, 2)]  # gate and up
    return ones, [base._replace(gemm2=tile) for tile in tiles(I, 1)]


def _choose_large(rows: int, groups: int, I: int, quantized: bool, gated: bool) -> Tiles:  # noqa: E741
    """Tiles of the kernels of triton_large.py, as measured on an H200.

    Blocks of 128 rows hold most experts' rows from 48 an expert on, so that weights are read once; of a half that is empty
    nothing is multiplied in GEMM1, and two programs share a block in GEMM2. Qwen3 at M = 1024 and Mixtral at 256 took 2 to 6 %
    less so than in blocks of 64. GEMM2 of e4m3 in 64 x 128 leaves room for three programs, which scale their sums
    while others multiply. In 16 bits from 96 rows an expert on, whole blocks in GEMM2 are 2 to 6 % faster; where its sums
    are short, two programs hide each other's start and end.
    """
    average = rows / groups
    tokens, parts = (64, 1) if average < 48 else (128, 2)
    if quantized:
        gemm1, gemm2 = Tile(256 if gated else 128, 128, 4, 8), Tile(128, 128, 3, 4)
        return Tiles(False, tokens, gemm1, gemm2, _chunk(rows), True, large=True, parts=parts)
    if average < 96:
        gemm1 = Tile(256, 64, 5, 4) if tokens == 64 else Tile(256, 64, 4, 8)
        gemm2 = Tile(128, 64, 3, 4)
        return Tiles(False, tokens, gemm1, gemm2, _chunk(rows), large=True, parts=parts)
    gemm2 = Tile(128, 64, 3, 4) if I <= 1024 else Tile(256, 64, 4, 8)
    return Tiles(False, 128, Tile(256, 64, 4, 8), gemm2, _chunk(rows), large=True)
