"""Configs of the GEMMs of plain weights and of those quantized like their activations, from the
number of rows and static facts. torch alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from moe_ops.kernels.configs import (
    GEMV,
    LARGE_SHARED_MEMORY,
    SM90_TMA,
    GemmConfig,
    LayerConfig,
    find,
    measured,
    sort_chunk,
)
from moe_ops.kernels.launch import Gpu
from moe_ops.kernels.quantize.scales import FEW_ROWS

SMALLEST_BLOCK_M = 16  # tokens; the least a tensor core takes
LARGE_ROWS = 24  # rows an expert from which the kernels of sm90_tma.py may run


def _fit(
    tile: GemmConfig, block_m: int, K: int, w_size: int, x_size: int, shared_memory: int
) -> GemmConfig:
    """`tile` with its step fitted to K and its stages to the shared memory of a block.

    `w_size` and `x_size` are bytes an element. Weights of one byte keep the step: scales follow
    it.
    """
    rows, k, stages, warps = tile
    if w_size > 1:
        if k == 128 and K % 128 and K % 64 == 0:  # 2880: no masks, the same bytes in flight
            k, stages = 64, stages + 2
        while k > 16 and k >= 2 * K:
            k //= 2
    room = shared_memory - 8192
    if w_size < x_size:
        room -= block_m * k * 2  # one of the operands is converted on its way
    while rows > 64 and (rows * w_size + block_m * x_size) * k * 2 > room:
        rows //= 2
    stages = max(2, min(stages, room // ((rows * w_size + block_m * x_size) * k)))
    return GemmConfig(rows, k, stages, warps)


@lru_cache(maxsize=8192)
def choose(
    rows: int,  # pairs, or rows of the sorted input
    groups: int,  # experts that share them
    K: int,
    I: int,  # noqa: E741
    itemsize: int,  # bytes of an element of x
    direct: bool,
    shared_memory: int,  # bytes a block may use
    # of the weights and of the activations, as kernels/gemm/sm80_mma.py names them
    weight_scale: str = "",
    x_scale: str = "",
    gated: bool = True,
    tma: bool = False,  # the kernels of sm90_tma.py can run
) -> LayerConfig:
    """Config of the two GEMMs. An expert's rows should usually fit one block, so weights are read
    once.

    Tiles of 16 tokens keep 96 to 192 KiB of weights in flight on an SM90 multiprocessor, in
    programs of about 110 registers a thread, which is what streaming takes; larger ones follow
    register and shared-memory limits.
    """
    if tma and rows >= LARGE_ROWS * groups and itemsize == 2:
        return _choose_tma(rows, groups, I, bool(weight_scale), gated)
    if weight_scale:
        return _choose_fp8(rows, groups, K, I, itemsize, direct, shared_memory, x_scale, gated)
    average = rows / groups
    if itemsize == 4:  # fp32 products run on the ordinary units, exactly
        block_m = 16 if average <= 12 else 32
        gemm1 = gemm2 = GemmConfig(64, 32, 3, 4)
    elif K % 16 or I % 16:  # unaligned rows load element by element: few registers a tile
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
    tables: bool = True,
) -> LayerConfig:
    facts = (dtype.itemsize, M == 1, gpu.shared_memory, *scales, gated, tma)
    base = choose(M * top_k, E, K, I, *facts)
    if gemv:
        base = _choose_gemv(bool(scheme), dtype.itemsize, K, I, base.sort_chunk)
    # Tables hold gated layers. Where GEMM1 quantizes what it writes, its tiles follow from that.
    if not tables or (scheme and not gated):
        return base
    config = measured(base, gpu, M, top_k, E, K, I, scheme, dtype)
    # The workspace of many rows has no place for h in fp32.
    room = config.h_in_fp32 == base.h_in_fp32 or scales[1] == "group" and M * top_k <= FEW_ROWS * E
    can_run = (tma or config.kernel != SM90_TMA) and (gemv or config.kernel != GEMV)
    return config if room and can_run else base


def for_experts(*problem: Any) -> LayerConfig:
    """Config of an expert layer: that measured for its shape on its GPU, else what `choose` says.

    Arguments: M, top_k, E, K, I, dtype, Gpu, scheme, scales, gated, and whether the kernels of
    sm90_tma.py and of gemv.py can run.
    """
    return find(_for_experts, problem)


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
    """Config for 8-bit weights whose activations are quantized too: steps of 128, the group that
    shares a scale.

    A group's sum and the total are held side by side, so accumulators are half as large as for
    plain weights.
    """
    average = rows / groups
    odd = bool(K % 16 or I % 16)
    # By groups, quantizing in GEMM1's epilogue beat doing it in GEMM2's loop by 1 to 30 %, and a
    # kernel for x beat GEMM1's loop by 2 to 4 %; but rows that are not aligned to 16 bytes stay as
    # they are.
    # For one token, GEMM1's wide tiles may leave multiprocessors idle: then GEMM2 quantizes,
    # unless its sums are long.
    few = direct and I <= 2048 and rows * I <= 96 * 128
    few = few and average <= FEW_ROWS  # else h has no room in fp32
    wide = x_scale in ("row", "tensor") or x_scale == "group" and (odd or few)
    quantize = x_scale == "row" or x_scale == "group" and not (odd and average <= FEW_ROWS)
    # Masks along K take the registers that 64 tokens need, as do operands of 16 bits before SM90.
    small = K % 128 or I % 128 or shared_memory <= LARGE_SHARED_MEMORY
    block_m = 16 if direct or average <= 12 else 32 if average <= 25 or small else 64
    if odd:  # element by element: few registers a tile
        gemm1 = gemm2 = GemmConfig(64, 128, 2, 8)
    else:
        # GEMM1 quantizes groups of 128 columns of h: 256 rows of gate and up
        gemm1 = GemmConfig(256 if x_scale == "group" and not wide and gated else 128, 128, 4, 4)
        gemm2 = GemmConfig(128, 128, 4, 4)
        if gemm1.block_n == 256:
            # On an H200 within 4 % of the best of 19 tiles and of 12, for 1 to 256 tokens of
            # qwen3, mixtral, dsv3
            gemm1 = GemmConfig(256, 128, 5, 4 if block_m <= 32 else 8)
            gemm2 = GemmConfig(64, 128, 3, 4)
            if min(rows, groups) * K <= 64 * 132:  # a block a multiprocessor: the more in flight
                gemm2 = GemmConfig(64, 128, 6, 4)
        elif x_scale == "group" and few:
            gemm1, gemm2 = GemmConfig(64, 128, 6, 4), GemmConfig(256, 128, 4, 4)
        if block_m == 64 and not quantize:  # a conversion needs registers
            gemm1 = gemm1._replace(num_warps=8)
        if block_m == 64 and wide:
            gemm2 = gemm2._replace(num_warps=8)
    x_size = 1 if quantize else itemsize
    h_size = 4 if wide else 1
    return LayerConfig(
        _fit(gemm1, block_m, K, 1, x_size, shared_memory),
        _fit(gemm2, block_m, I, 1, h_size, shared_memory),
        block_m,
        sort_chunk(rows),
        direct=direct,
        quantize_x=quantize,
        h_in_fp32=wide,
    )


def _choose_gemv(quantized: bool, itemsize: int, K: int, I: int, chunk: int) -> LayerConfig:  # noqa: E741
    """Config of the kernels of gemv.py: columns of h or of the output, and the step along their
    sums.

    As measured on an H200 for qwen3, mixtral, dsv3, gptoss20, glm45air, e64, e160
    (docs/performance.md). Where a block quantizes x, more rows share that. GEMM2's sums take one
    step if they can: of 1408 columns, steps of 1024 took 19 and 43 % longer for a layer in bf16, 8
    and 14 % in fp8_block.
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
    """For the search (moe_ops.tuning): variants of the two kernels of one token, with 16 to 128
    weights a thread.
    """

    def tiles(columns: int, rows: int) -> list[GemmConfig]:
        return [
            GemmConfig(n, k, stages, warps)
            for n in (1, 2, 4, 8, 16)
            for k in (512, 1024, 2048, 4096)
            for warps in (2, 4, 8)
            for stages in ((1,) if k >= columns else (1, 3))
            if 16 <= n * rows * k // (32 * warps) <= 128 and k < 2 * columns
        ]

    ones = [base._replace(gemm1=tile) for tile in tiles(K, 2)]  # gate and up
    return ones, [base._replace(gemm2=tile) for tile in tiles(I, 1)]


def _choose_tma(rows: int, groups: int, I: int, quantized: bool, gated: bool) -> LayerConfig:  # noqa: E741
    """Config of the kernels of sm90_tma.py, as measured on an H200.

    Blocks of 128 rows hold most experts' rows from 48 an expert on, so that weights are read once;
    of a half that is empty nothing is multiplied in GEMM1, and two programs share a block in
    GEMM2. Qwen3 at M = 1024 and Mixtral at 256 took 2 to 6 % less so than in blocks of 64. GEMM2
    of e4m3 in 64 x 128 leaves room for three programs, which scale their sums while others
    multiply. In 16 bits from 96 rows an expert on, whole blocks in GEMM2 are 2 to 6 % faster;
    where its sums are short, two programs hide each other's start and end.
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
