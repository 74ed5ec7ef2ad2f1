"""Configs of the GEMMs whose weights are plain or quantized like their activations, from the
number of rows and static facts. torch alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from moe_ops import environment
from moe_ops.kernels.configs import (
    GEMV,
    LARGE_SHARED_MEMORY,
    MULTIPROCESSORS,
    ROWS_OF_ANY_BATCH,
    SM90_TMA,
    GemmConfig,
    LayerConfig,
    find,
    measured,
    pairs_here,
    sort_chunk,
)
from moe_ops.kernels.launch import Gpu
from moe_ops.kernels.rows.scales import FEW_ROWS
from moe_ops.meta.workspace import cdiv

SMALLEST_BLOCK_M = 16  # tokens: the fewest of a tensor-core instruction
LARGE_ROWS = 24  # rows an expert from which the kernels of sm90_tma.py may run


def _fit(
    config: GemmConfig,
    block_m: int,
    K: int,
    w_size: int,
    x_size: int,
    shared_memory: int,
    whole: bool = False,
) -> GemmConfig:
    """`config` with BLOCK_K fitted to K, and NUM_STAGES to the shared memory of a block.

    `w_size` and `x_size` are bytes an element. With weights of one byte, BLOCK_K stays: it is the
    group of columns that share a scale. BLOCK_N stays if `whole`: its columns share a scale, too.
    """
    rows, k, stages, warps = config
    if w_size > 1:
        if k == 128 and K % 128 and K % 64 == 0:  # 2880: no masks, the same bytes in flight
            k, stages = 64, stages + 2
        while k > 16 and k >= 2 * K:
            k //= 2
    room = shared_memory - 8192
    if w_size < x_size:
        room -= block_m * k * 2  # one of the operands is converted, through shared memory
    while not whole and rows > 64 and (rows * w_size + block_m * x_size) * k * 2 > room:
        rows //= 2
    stages = max(1 if whole else 2, min(stages, room // ((rows * w_size + block_m * x_size) * k)))
    return GemmConfig(rows, k, stages, warps)


@lru_cache(maxsize=8192)
def choose(
    rows: int,  # pairs, or rows of the sorted input
    groups: int,  # experts that share them
    K: int,
    I: int,  # noqa: E741
    itemsize: int,  # bytes of an element of x
    direct: bool,
    shared_memory: int,  # bytes that a block may use
    # scales of the weights and of the activations: W_SCALE and X_SCALE of sm80_mma.py
    weight_scale: str = "",
    x_scale: str = "",
    gated: bool = True,
    tma: bool = False,  # the kernels of sm90_tma.py can run
) -> LayerConfig:
    """Config of the two GEMMs. An expert's rows should usually fit one block, so that its weights
    are read once.

    Tiles of 16 tokens keep 96 to 192 KiB of weights in flight on an SM90 multiprocessor, in
    programs of about 110 registers a thread: enough for the full memory bandwidth. Larger tiles
    are those that registers and shared memory allow.
    """
    if tma and rows >= LARGE_ROWS * groups and itemsize == 2:
        return _choose_tma(rows, groups, I, bool(weight_scale), gated)
    if weight_scale:
        return _choose_fp8(rows, groups, K, I, itemsize, direct, shared_memory, x_scale, gated)
    average = rows / groups
    if itemsize == 4:  # fp32 products are exact, and run outside of the tensor cores
        block_m = 16 if average <= 12 else 32
        gemm1 = gemm2 = GemmConfig(64, 32, 3, 4)
    elif K % 16 or I % 16:  # unaligned rows are loaded by element: smaller tiles save registers
        block_m = 16 if average <= 12 else 32
        gemm1 = gemm2 = GemmConfig(64, 32, 2, 4)
    elif direct or average <= 12:
        block_m = 16
        gemm1 = GemmConfig(64 if I <= 2048 and average <= 2 else 128, 128, 4, 4)
        gemm2 = GemmConfig(64, 128, 4, 4)
    elif average <= 25:
        block_m = 32
        gemm1, gemm2 = GemmConfig(128, 128, 4, 4), GemmConfig(64, 128, 4, 4)
    elif average <= 51:
        block_m = 64
        gemm1, gemm2 = GemmConfig(128, 64, 4, 4), GemmConfig(128, 64, 4, 4)
    else:
        block_m = 128
        # before SM90 the wider tile spills
        wide = 256 if shared_memory > LARGE_SHARED_MEMORY else 128
        gemm1, gemm2 = GemmConfig(wide, 64, 4, 8), GemmConfig(128, 64, 4, 8)
    return LayerConfig(
        _fit(gemm1, block_m, K, itemsize, itemsize, shared_memory),
        _fit(gemm2, block_m, I, itemsize, itemsize, shared_memory),
        block_m,
        sort_chunk(rows),
        direct=direct,
    )


@lru_cache(maxsize=8192)
def _for_experts(
    M: int,
    top_k: int,
    E: int,
    K: int,
    I: int,  # noqa: E741
    dtype: torch.dtype,
    gpu: Gpu,
    scheme: str,
    scales: tuple[str, str],
    gated: bool,
    tma: bool = False,
    gemv: bool = False,
    batch_invariant: bool = False,
    routed: int = 0,
    tables: bool = True,
) -> LayerConfig:
    facts = (dtype.itemsize, M == 1, gpu.shared_memory, *scales, gated, tma)
    # of one token, whose h may need the room of all its pairs, no tile follows from their number
    rows = M * top_k if M == 1 else pairs_here(M * top_k, E, routed)
    base = choose(rows, E, K, I, *facts)._replace(sort_chunk=sort_chunk(M * top_k))
    if gemv:
        base = _choose_gemv(bool(scheme), dtype.itemsize, K, I, base.sort_chunk)
    # Tables hold gated layers. A GEMM1 that quantizes its output has a tile size that follows from
    # the group of columns, and is half of a gated layer's.
    if not tables or (scheme and not gated):
        return base
    config = measured(base, gpu, M, top_k, routed or E, K, I, scheme, dtype)
    # The workspace of many rows has no room for h in fp32.
    room = config.h_in_fp32 == base.h_in_fp32 or scales[1] == "group" and M * top_k <= FEW_ROWS * E
    can_run = (tma or config.kernel != SM90_TMA) and (gemv or config.kernel != GEMV)
    if batch_invariant and scales[0]:
        can_run = can_run and _has_wgmma_of_8_bits(config)
    return config if room and can_run else base


def _has_wgmma_of_8_bits(config: LayerConfig) -> bool:
    """Whether an SM90 multiplies e4m3 operands by wgmma in these tiles, and adds 128 columns at a
    time to the fp32 total, as in those of `choose`. mma.sync, which takes wgmma's place in smaller
    tiles, gave other bits; in bf16 both gave the same.
    """
    gemms = (config.gemm1, config.gemm2)
    return all([g.num_warps >= 4 and g.block_n >= 64 and g.block_k == 128 for g in gemms])


def for_experts(*problem: Any) -> LayerConfig:
    """Config of an expert layer: the one measured for its shape on its GPU, else that of `choose`.

    Arguments: M, top_k, E, K, I, dtype, Gpu, scheme, scales, gated, whether the kernels of
    sm90_tma.py and of gemv.py can run, whether all M must give the same bits, and how many experts
    share the pairs if these are on several devices.
    """
    return find(_for_experts, problem)


@lru_cache(maxsize=64)
def same_bits_in_all_tiles(dtype: torch.dtype, device: int) -> bool:
    """Whether the kernels of sm80_mma.py and sm90_tma.py give the same bits with all tiles: in
    bf16 on SM90, with plain weights, and with e4m3 and int8 times the same in tiles of
    `_has_wgmma_of_8_bits`, as an H100 showed (benchmarks/batch_invariant.py). Other GPUs have
    other instructions for wide tiles.
    """
    return dtype == torch.bfloat16 and device >= 0 and environment.capability(device)[0] == 9


def _of_any_batch(groups: int, *facts: Any, tables: bool = True) -> LayerConfig:
    return choose(ROWS_OF_ANY_BATCH * groups, groups, *facts)


def for_any_batch(rows: int, *problem: Any) -> LayerConfig:
    """Config under `batch_invariant`: kernel and tiles that `rows` have no part in. Arguments as
    for `choose`, of which no kernel is direct or that of sm90_tma.py.
    """
    return find(_of_any_batch, problem)._replace(sort_chunk=sort_chunk(rows))


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
) -> LayerConfig:
    """Config for 8-bit weights whose activations are quantized too. BLOCK_K is 128, the group of
    columns that share a scale.

    A thread holds both a group's sum and the total, so accumulators are half as large as for plain
    weights.
    """
    average = rows / groups
    odd = bool(K % 16 or I % 16)
    # Quantizing h by groups in GEMM1's epilogue is faster than in GEMM2's mainloop, and a kernel
    # that quantizes x faster than GEMM1's mainloop, which would do it in every tile. But rows that
    # are not aligned to 16 bytes are quantized in the mainloops.
    # For one token, GEMM1's wide tiles may leave multiprocessors idle: then GEMM2 quantizes h,
    # unless its sums are long.
    few = direct and I <= 2048 and rows * I <= 96 * 128
    few = few and average <= FEW_ROWS  # for more the workspace has no room for h in fp32
    wide = x_scale in ("row", "tensor") or x_scale == "group" and (odd or few)
    quantize = x_scale == "row" or x_scale == "group" and not (odd and average <= FEW_ROWS)
    # Blocks of 64 tokens need the registers that masks along K take, and those that operands of 16
    # bits take before SM90.
    small = K % 128 or I % 128 or shared_memory <= LARGE_SHARED_MEMORY
    block_m = 16 if direct or average <= 12 else 32 if average <= 25 or small else 64
    if odd:  # rows are loaded by element: smaller tiles save registers
        gemm1 = gemm2 = GemmConfig(64, 128, 2, 8)
    else:
        # GEMM1 quantizes groups of 128 columns of h, from 256 rows of gate and up
        gemm1 = GemmConfig(256 if x_scale == "group" and not wide and gated else 128, 128, 4, 4)
        gemm2 = GemmConfig(128, 128, 4, 4)
        if gemm1.block_n == 256:
            # Tiles of one token that are more than multiprocessors, and at most twice as many, run
            # in one wave with fewer stages, on GPUs whose shared memory holds two such blocks.
            two_each = direct and MULTIPROCESSORS < rows * cdiv(I, 128) <= 2 * MULTIPROCESSORS
            two_each = two_each and shared_memory > LARGE_SHARED_MEMORY
            gemm1 = GemmConfig(256, 128, 3 if two_each else 5, 4 if block_m <= 32 else 8)
            gemm2 = GemmConfig(64, 128, 3, 4)
            if min(rows, groups) * K <= 64 * 132:  # one block a multiprocessor: more stages
                gemm2 = GemmConfig(64, 128, 6, 4)
        elif x_scale == "row" and few:
            gemm1 = gemm2 = GemmConfig(64, 128, 6, 4)
        elif x_scale == "group" and few:
            # wider tiles leave multiprocessors idle where they are fewer than those
            wide2 = 256 if rows * K >= 256 * 132 else 128
            gemm1, gemm2 = GemmConfig(64, 128, 6, 4), GemmConfig(wide2, 128, 4, 4)
        if block_m == 64 and not quantize:  # conversions need registers
            gemm1 = gemm1._replace(num_warps=8)
        if block_m == 64 and wide:
            gemm2 = gemm2._replace(num_warps=8)
    x_size = 1 if quantize else itemsize
    h_size = 4 if wide else 1
    return LayerConfig(
        _fit(gemm1, block_m, K, 1, x_size, shared_memory, x_scale == "group" and not wide),
        _fit(gemm2, block_m, I, 1, h_size, shared_memory),
        block_m,
        sort_chunk(rows),
        direct=direct,
        quantize_x=quantize,
        h_in_fp32=wide,
    )


def _choose_gemv(quantized: bool, itemsize: int, K: int, I: int, chunk: int) -> LayerConfig:  # noqa: E741
    """Config of the kernels of gemv.py: BLOCK_N columns of h or of the output, and BLOCK_K.

    If each block quantizes x, it has more rows of weights, which share that work. BLOCK_K of GEMM2
    covers the whole sum if it can: a second step of a few columns takes as long as a whole one.
    """

    def gemm(n: int, k: int, num_stages: int, num_warps: int, columns: int) -> GemmConfig:
        return GemmConfig(
            n, min(k, max(128, 1 << (columns - 1).bit_length())), num_stages, num_warps
        )

    if quantized:
        first = gemm(8, 512, 1, 4, K)
        second = gemm(8, 2048, 1, 4, I) if 1024 < I <= 2048 else gemm(8, 1024, 1, 8, I)
    else:
        k = 2048 // itemsize
        first = gemm(2, k, 3, 2, K)
        if k >= I:
            second = gemm(4, k, 1, 4, I)
        else:
            second = GemmConfig(4, 2 * k, 1, 8) if 2 * k >= I else GemmConfig(2, k, 1, 4)
    return LayerConfig(first, second, 1, chunk, GEMV, direct=True, h_in_fp32=quantized)


def gemv_space(base: LayerConfig, K: int, I: int) -> tuple[list[LayerConfig], list[LayerConfig]]:  # noqa: E741
    """Configs of gemv.py that the search (moe_ops.tuning) tries for GEMM1 and GEMM2, with 16 to
    128 weights a thread.
    """

    def gemms(columns: int, rows: int) -> list[GemmConfig]:
        return [
            GemmConfig(n, k, stages, warps)
            for n in (1, 2, 4, 8, 16)
            for k in (512, 1024, 2048, 4096)
            for warps in (2, 4, 8)
            for stages in ((1,) if k >= columns else (1, 3))
            if 16 <= n * rows * k // (32 * warps) <= 128 and k < 2 * columns
        ]

    ones = [base._replace(gemm1=gemm) for gemm in gemms(K, 2)]  # gate and up
    return ones, [base._replace(gemm2=gemm) for gemm in gemms(I, 1)]


def _choose_tma(rows: int, groups: int, I: int, quantized: bool, gated: bool) -> LayerConfig:  # noqa: E741
    """Config of the kernels of sm90_tma.py.

    From 48 rows an expert on, blocks have 128 rows: they hold all rows of most experts, so that
    weights are read once. GEMM1 skips the second half of a block if that is empty, and in GEMM2
    two programs share a block. In e4m3, tiles of 64 x 128 in GEMM2 leave room for three programs a
    multiprocessor, which scale their sums while others multiply. In 16 bits, from 96 rows an
    expert on, one program takes a whole block of GEMM2; if its sums are short, two programs a
    multiprocessor hide each other's prologue and epilogue.
    """
    average = rows / groups
    block_m, split_m = (64, 1) if average < 48 else (128, 2)
    if quantized:
        gemm1, gemm2 = GemmConfig(256 if gated else 128, 128, 4, 8), GemmConfig(128, 128, 3, 4)
    elif average < 96:
        gemm1 = GemmConfig(256, 64, 5, 4) if block_m == 64 else GemmConfig(256, 64, 4, 8)
        gemm2 = GemmConfig(128, 64, 3, 4)
    else:
        gemm1, split_m = GemmConfig(256, 64, 4, 8), 1
        gemm2 = GemmConfig(128, 64, 3, 4) if I <= 1024 else GemmConfig(256, 64, 4, 8)
    return LayerConfig(
        gemm1,
        gemm2,
        block_m,
        sort_chunk(rows),
        SM90_TMA,
        quantize_x=quantized,
        split_m=split_m,
    )
