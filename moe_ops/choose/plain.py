"""Configs of the GEMMs whose weights are plain or quantized like their activations, from the
number of rows and static facts. torch alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from moe_ops import environment
from moe_ops.choose import rules
from moe_ops.choose.candidates import converted_bytes, fitted
from moe_ops.choose.rules import block_of, first, is_short, of_block, words
from moe_ops.choose.table import ROWS_OF_ANY_BATCH, Chosen, LayerSizes, measured
from moe_ops.kernels.configs import GEMV, SM90_TMA, GemmConfig, LayerConfig, sort_chunk
from moe_ops.kernels.rows.scales import FEW_ROWS
from moe_ops.meta.workspace import cdiv

LARGE_ROWS = 24  # rows per expert from which the kernels of sm90_tma.py may run


@lru_cache(maxsize=8192)
def choose(
    layer: LayerSizes,
    itemsize: int,  # bytes of an element of x
    direct: bool,
    # scales of the weights and of the activations: W_SCALE and X_SCALE of sm80_mma.py
    weight_scale: str = "",
    x_scale: str = "",
    gated: bool = True,
    tma: bool = False,  # the kernels of sm90_tma.py can run
) -> LayerConfig:
    """Config of the two GEMMs by rule."""
    if tma and layer.rows >= LARGE_ROWS * layer.experts and itemsize == 2:
        return choose_tma(layer, bool(weight_scale), gated)
    if weight_scale:
        return _choose_quantized(layer, itemsize, direct, x_scale, gated)
    average, gpu = layer.average, layer.gpu
    fp32, odd = itemsize == 4, bool(layer.K % 16 or layer.I % 16)
    blocks = rules.SMALL_BLOCKS if fp32 or odd else rules.PLAIN_BLOCKS
    block_m = 16 if direct and not (fp32 or odd) else block_of(blocks, average)
    facts = {"fp32": fp32, "odd": odd, "few": average <= 2, "tma": gpu.has_tma}
    held = of_block(block_m) | words(**facts, **{"I<=2048": layer.I <= 2048})
    room = (block_m, 8 * itemsize, itemsize, gpu)
    return LayerConfig(
        fitted(_step(first(rules.PLAIN_GEMM1, held), layer.K), *room),
        fitted(_step(first(rules.PLAIN_GEMM2, held), layer.I), *room),
        *(block_m, sort_chunk(layer.pairs)),
        direct=direct,
    )


def _step(tile: rules.Tile, columns: int) -> GemmConfig:
    """A tile with a BLOCK_K that divides the columns where half of it does, with the same bytes in
    flight, and is not twice as long as they are.
    """
    n, k, stages, warps = tile
    if k == 128 and columns % 128 and columns % 64 == 0:
        k, stages = 64, stages + 2
    while k > 16 and k >= 2 * columns:
        k //= 2
    return GemmConfig(n, k, stages, warps)


def _choose_quantized(
    layer: LayerSizes, itemsize: int, direct: bool, x_scale: str, gated: bool
) -> LayerConfig:
    """Config for 8-bit weights whose activations are quantized too.

    Quantizing h by groups in GEMM1's epilogue is faster than in GEMM2's mainloop, and a kernel
    that quantizes x faster than GEMM1's mainloop, which would do it in every tile. But rows that
    are not aligned to 16 bytes are quantized in the mainloops. For one token, GEMM1's wide tiles
    may leave multiprocessors idle: then GEMM2 quantizes h, unless its sums are long.
    """
    _, experts, K, I, gpu, *_ = layer
    rows, average, each = layer.rows, layer.average, gpu.multiprocessors
    odd, by_row, by_group = bool(K % 16 or I % 16), x_scale == "row", x_scale == "group"
    few = direct and I <= 2048 and rows * I <= 96 * 128
    few = few and average <= FEW_ROWS  # for more the workspace has no room for h in fp32
    h_in_fp32 = x_scale in ("row", "tensor") or by_group and (odd or few)
    quantize_x = by_row or by_group and not (odd and average <= FEW_ROWS)
    groups = by_group and gated and not h_in_fp32
    # GEMM2 has three tiles of 256 rows per multiprocessor
    filled = gpu.has_tma and min(rows, experts) * cdiv(K, 256) >= 3 * each
    blocks = rules.BLOCKS_OF_GROUPS if groups and filled else rules.QUANTIZED_BLOCKS
    block_m = 16 if direct else block_of(blocks, average)
    if K % 128 or I % 128 or not gpu.has_tma:
        block_m = min(block_m, 32)
    held = of_block(block_m) | words(
        odd=odd,
        few=few,
        by_row=by_row,
        by_group=by_group,
        groups=groups,
        filled=filled,
        dense=average > 6,
        two_waves=direct and gpu.has_tma and each < rows * cdiv(I, 128) <= 2 * each,
        one_wave=min(rows, experts) * K <= 64 * each,
        several=rows * K >= 256 * each,
        converts1=not quantize_x,
        converts2=h_in_fp32,
        **{"K<=2048": K <= 2048},
    )
    gemm1 = GemmConfig(*first(rules.QUANTIZED_GEMM1, held))
    gemm2 = GemmConfig(*first(rules.QUANTIZED_GEMM2, held))
    x_size, h_size = 1 if quantize_x else itemsize, 4 if h_in_fp32 else 1
    converted = [converted_bytes(block_m, 128, 1, size) for size in (x_size, h_size)]
    return LayerConfig(
        fitted(gemm1, block_m, 8, x_size, gpu, converted[0], by_group and not h_in_fp32),
        fitted(gemm2, block_m, 8, h_size, gpu, converted[1]),
        *(block_m, sort_chunk(layer.pairs)),
        direct=direct,
        quantize_x=quantize_x,
        h_in_fp32=h_in_fp32,
    )


def choose_tma(layer: LayerSizes, quantized: bool, gated: bool) -> LayerConfig:
    """Config of the kernels of sm90_tma.py."""
    average = layer.average
    blocks = rules.TMA_BLOCKS_OF_8_BITS if quantized else rules.TMA_BLOCKS
    block_m = block_of(blocks, average)
    facts = {"gated": gated, "many": average >= 96, "full": average >= 512, "8bit": quantized}
    held = of_block(block_m) | words(**facts, **{f"I<={n}": n >= layer.I for n in (1024, 2048)})
    return LayerConfig(
        GemmConfig(*first(rules.TMA_GEMM1, held)),
        GemmConfig(*first(rules.TMA_GEMM2, held)),
        *(block_m, sort_chunk(layer.pairs), SM90_TMA),
        quantize_x=quantized,
        split_m=first(rules.TMA_SPLIT_M, held),
    )


def choose_gemv(layer: LayerSizes, quantized: bool, itemsize: int) -> LayerConfig:
    """Config of the kernels of gemv.py: BLOCK_N columns of h or of the output, and BLOCK_K.

    If each block quantizes x, it has more rows of weights, which share that work. BLOCK_K of GEMM2
    covers the whole sum if it can: a second step of a few columns takes as long as a whole one.
    """
    I = layer.I

    def gemm(n: int, k: int, num_stages: int, num_warps: int, columns: int) -> GemmConfig:
        least = max(128, 1 << (columns - 1).bit_length())
        return GemmConfig(n, min(k, least), num_stages, num_warps)

    if quantized:
        # of twice as many rows where half of a second wave of programs would be empty, of half as
        # many, each read at once, where half of the first would be
        waves = layer.top_k * cdiv(I, 8) / (8 * layer.gpu.multiprocessors)
        if waves <= 0.5:
            one = gemm(4, 2048, 1, 4, layer.K)
        else:
            one = gemm(16 if is_short(waves) else 8, 512, 1, 4, layer.K)
        if layer.top_k * cdiv(I, 2048) >= 14:  # steps of a program
            two = GemmConfig(16, 2048, 1, 8)
        elif I > 2048:
            two = GemmConfig(16, 1024, 1, 4)
        elif I > 1024:
            two = GemmConfig(8, 2048, 1, 4)
        else:
            two = gemm(8, 1024, 1, 4 if I <= 512 else 8, I)
    else:
        k = 2048 // itemsize
        # so many programs that the next ones hide the latency of each, which reads far at once
        many = layer.top_k * I >= 128 * layer.gpu.multiprocessors and 2 * k < layer.K
        wide = 4 if 4 * k < layer.K else 2
        if many and 2 * (-layer.K % (wide * k)) <= wide * k:  # the last step is half full
            one = GemmConfig(2, wide * k, 1, wide)
        else:
            one = gemm(2, k, 3, 2, layer.K)
        if k >= I:
            two = gemm(4, k, 1, 2 if k >= 2 * I else 4, I)
        elif 2 * k >= I:
            two = GemmConfig(2 if many else 4, 2 * k, 1, 8)
        else:
            two = GemmConfig(8, k // 2, 1, 2) if many else GemmConfig(2, k, 1, 4)
    chunk = sort_chunk(layer.pairs)
    return LayerConfig(one, two, 1, chunk, GEMV, direct=True, h_in_fp32=quantized)


@Chosen
def for_experts(
    layer: LayerSizes,
    dtype: torch.dtype,
    scheme: str,
    scales: tuple[str, str],  # of the weights and of the activations
    gated: bool,
    tma: bool = False,  # the kernels of sm90_tma.py can run
    gemv: bool = False,  # those of gemv.py can
    batch_invariant: bool = False,  # all numbers of tokens must give the same bits
) -> LayerConfig:
    """Config of an expert layer: the one measured for its shape on its GPU, else by rule."""
    one = layer.pairs == layer.top_k
    # of one token, whose h may need the room of all its pairs, no tile follows from their number
    here = layer._replace(routed=0) if one else layer
    base = choose(here, dtype.itemsize, one, *scales, gated, tma)
    if gemv:
        base = choose_gemv(layer, bool(scheme), dtype.itemsize)
    # Tables hold gated layers. A GEMM1 that quantizes its output has a tile size that follows from
    # the group of columns, and is half of a gated layer's.
    if scheme and not gated:
        return base
    config = measured(base, layer, scheme, dtype)
    # The workspace of many rows has no room for h in fp32.
    few = scales[1] == "group" and layer.pairs <= FEW_ROWS * layer.experts
    room = config.h_in_fp32 == base.h_in_fp32 or few
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


@lru_cache(maxsize=64)
def same_bits_in_all_tiles(dtype: torch.dtype, device: int) -> bool:
    """Whether the kernels of sm80_mma.py and sm90_tma.py give the same bits with all tiles: in
    bf16 on SM90, with plain weights, and with e4m3 and int8 times the same in tiles of
    `_has_wgmma_of_8_bits`, as an H100 showed (benchmarks/batch_invariant.py). Other GPUs have
    other instructions for wide tiles.
    """
    return dtype == torch.bfloat16 and device >= 0 and environment.capability(device)[0] == 9


@Chosen
def for_any_batch(layer: LayerSizes, *facts: Any) -> LayerConfig:
    """Config under `batch_invariant`: kernel and tiles that the number of rows has no part in.
    Arguments as for `choose`, of which no kernel is direct or that of sm90_tma.py.
    """
    alike = choose(layer.with_rows(ROWS_OF_ANY_BATCH * layer.experts), *facts)
    return alike._replace(sort_chunk=sort_chunk(layer.pairs))
