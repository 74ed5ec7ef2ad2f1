"""Configs of the mixed GEMMs (weights of 4 to 8 bits, 16-bit activations), and when those of SM90
may run. torch alone.
"""

from __future__ import annotations

from functools import lru_cache
from math import exp
from typing import Any

import torch

from moe_ops.choose import plain, rules
from moe_ops.choose.candidates import fits_wgmma, fitted, gemv_columns, mixed_gemv_k, token_depth
from moe_ops.choose.rules import block_of, first, is_short, of_block, words
from moe_ops.choose.table import ROWS_OF_ANY_BATCH, Chosen, LayerSizes, measured
from moe_ops.kernels.configs import (
    GEMV,
    SM90_MMA,
    SM90_PACKED,
    SM90_WGMMA,
    GemmConfig,
    LayerConfig,
    sort_chunk,
)
from moe_ops.kernels.mixed_gemm.configs import SCALED_SUMS, parts_of_row, token_slots
from moe_ops.kernels.mixed_gemm.operands import (
    STAGES_OF_EIGHT_WARPS,
    STAGES_OF_STREAMED,
    STAGES_OF_WORDS,
    MixedOperand,
)
from moe_ops.meta.workspace import cdiv

MAX_CHUNKS = 16  # of a row with zero points, up to which sm90_mma.py is faster than gemv.py
MAX_CHUNKS_OF_W13 = 32  # of int4, up to which sm90_mma.py was shown to be faster than gemv.py
MAX_I_OF_PACKED = 4096  # up to which mixed_gemm/sm90_packed.py is faster with weights of 4 bits
FEWEST_ROWS_OF_16 = 5  # rows per expert, from which blocks have 16 rows
# BLOCK_M -> rows per expert of plain weights that run in such blocks
ROWS_OF_BLOCKS = {16: 8, 32: 20, 64: 48, 128: 128}
# average rows of an expert, up to which sm90_wgmma.py takes weights of 5 to 8 bits
MAX_ROWS_OF_8_BITS = 80
# mixed_gemm/sm90_packed.py has these tiles alone: rows of a block, columns, step, stages and warps
MANY_ROWS = LayerConfig(
    GemmConfig(128, 64, 3, 4), GemmConfig(128, 64, 3, 4), 128, 0, SM90_PACKED
)  # fmt: skip


@lru_cache(maxsize=8192)
def choose(
    layer: LayerSizes,
    bits: int,  # of a weight
    dtype: torch.dtype,  # of x
    direct: bool,
) -> LayerConfig:
    """Config of the two GEMMs of sm80_mma.py by rule."""
    _, experts, K, I, gpu, *_ = layer
    block_m = 8 if direct else block_of(rules.MIXED_BLOCKS, layer.average)
    unaligned, bf16 = bool(K * bits % 128 or I * bits % 128), dtype == torch.bfloat16
    if unaligned:
        block_m = 16
    elif not bf16:
        block_m = min(max(block_m, 16), 32)
    elif block_m == 64 and gpu.has_tma and layer.average > 64:
        block_m = 128
    fp32 = dtype == torch.float32
    facts = words(unaligned=unaligned, fp32=fp32, fp16=not (bf16 or fp32), tma=gpu.has_tma)
    facts |= of_block(block_m) | {f"{bits}bit"}
    if block_m == 64 and not gpu.has_tma:
        block_m = 32

    def gemm(weight_rows: int) -> GemmConfig:
        few = min(layer.rows, experts) * weight_rows < 3 * gpu.multiprocessors * 64
        tile = GemmConfig(*first(rules.MIXED_GEMM, facts | words(few=few)))
        return fitted(tile, block_m, bits, dtype.itemsize, gpu)

    return LayerConfig(gemm(2 * I), gemm(K), block_m, sort_chunk(layer.pairs), direct=direct)


def choose_wgmma(
    layer: LayerSizes, bits: int, many: int = 0, scaling: str = ""
) -> LayerConfig | None:
    """Config of the two GEMMs of sm90_wgmma.py, or None if other kernels are faster for so many
    rows: of 5 to 8 bits those of sm80_mma.py are. Of 4 bits these decode each weight as often, but
    more slowly. `many` and `scaling` are `MixedOperand.stages_of_many` and `scaling`.
    """
    _, experts, K, I, gpu, *_ = layer
    average, each = layer.average, gpu.multiprocessors
    if bits > 4 and average > MAX_ROWS_OF_8_BITS:
        return None
    block_m = _wgmma_block(average, bits, many, scaling)
    # estimates of the blocks that have a row
    blocks: float = max(min(layer.rows, experts), cdiv(layer.rows, block_m))
    if bits == 8:
        blocks = experts * (1 - exp(-average))
    waves = blocks * cdiv(K, 128) / each  # of GEMM2, of one block a multiprocessor
    held = _wgmma_words(layer, block_m, bits, many) | words(
        weights=scaling == "weights" and many <= STAGES_OF_EIGHT_WARPS,
        sums=scaling == "sums" and block_m <= SCALED_SUMS,
        two_operands=many > STAGES_OF_EIGHT_WARPS,
        tiles=average < 1 and blocks * cdiv(I, 64) > 8 * each,
        long=min(K, I) >= 256,
        deep=average >= 1 and K % 128 > 0,
        short2=is_short(waves / 2),
        short3=is_short(waves / 3),
        full=2 * waves > 3,
        **{f"I>={least}": least <= I for least in (4096, 8192)},
    )
    levels = scaling == "levels"
    rows1 = rules.WGMMA_LEVELS if levels else rules.WGMMA_GEMM1
    rows2 = rules.WGMMA_LEVELS if levels else rules.WGMMA_GEMM2
    gemm1 = GemmConfig(*first(rows1, held | _of_columns(K) | {"w13"}))
    gemm2 = GemmConfig(*first(rows2, held | _of_columns(I)))
    together = 4 if block_m <= (8 if scaling == "sums" else 16) else 3  # on a multiprocessor
    if gemm2.num_warps == 16:
        together = 1
    elif block_m > 32 or gemm2.num_warps == 8:
        together = 2
    short = is_short(blocks * cdiv(K, gemm2.block_n) / (together * each))
    split_k = first(rules.WGMMA_SPLIT_K, held | _of_columns(I) | words(short=short))
    chunk = sort_chunk(layer.pairs)
    return LayerConfig(gemm1, gemm2, block_m, chunk, SM90_WGMMA, split_k=split_k)


def _of_columns(columns: int) -> frozenset[str]:
    return words(c128=columns % 128 == 0, c256=columns % 256 == 0)


def _wgmma_block(average: float, bits: int, many: int, scaling: str) -> int:
    if scaling == "sums" and average <= rules.FEW_ROWS_OF_SUMS:
        return 8
    if bits == 6:
        return block_of(rules.WGMMA_BLOCKS_OF_INT6, average)
    return block_of(rules.WGMMA_BLOCKS_OF_TWO[bits] if many else rules.WGMMA_BLOCKS, average)


def _wgmma_words(layer: LayerSizes, block_m: int, bits: int, many: int) -> frozenset[str]:
    """The words of rules.WGMMA_GEMM and of few tiles."""
    tiles = min(layer.rows, layer.experts) * cdiv(layer.K, 128)
    return of_block(block_m) | words(
        eight_warps=many == STAGES_OF_EIGHT_WARPS,
        streamed=many == STAGES_OF_STREAMED,
        prepared=many == STAGES_OF_WORDS,
        sparse=layer.rows < layer.experts,
        few=tiles <= 2 * layer.gpu.multiprocessors,
        **{f"{bits}bit": True},
    )


def wgmma_for_any_batch(layer: LayerSizes, w13: MixedOperand, w2: MixedOperand) -> LayerConfig:
    """Config of sm90_wgmma.py under `batch_invariant`, for any number of rows: its tiles give the
    same bits (benchmarks/batch_invariant.py), sums that SPLIT_K programs share do not.
    """
    many = 0  # blocks of two operands have registers for one sum of each
    if w13.segments == w2.segments == 1:
        many = min(w13.stages_of_many, w2.stages_of_many)
    levels = w2.scaling == "levels"
    return wgmma_of_segments(layer, w2.format.bits, w13.segments, w2.segments, many, levels)


@Chosen
def wgmma_of_segments(
    layer: LayerSizes, bits: int, segments13: int, segments2: int, many: int, levels: bool = False
) -> LayerConfig:
    """`wgmma_for_any_batch` of rows in so many segments."""
    rows = rules.WGMMA_LEVELS if levels else rules.WGMMA_GEMM
    block_m = _wgmma_block(layer.average, bits, many, "")
    held = _wgmma_words(layer, block_m, bits, many)
    gemm1 = GemmConfig(*first(rows, held | _of_columns(layer.K) | {"w13"}))
    gemm2 = GemmConfig(*first(rows, held | _of_columns(layer.I)))
    if {"few", "sparse"} <= held and bits == 4 and layer.I % 256 == 0:
        # as few programs as SPLIT_K is for: narrower tiles instead
        gemm2 = GemmConfig(64, 256, 2, 4)
    return LayerConfig(
        _of_segments(gemm1, block_m, layer.K, segments13),
        _of_segments(gemm2, block_m, layer.I, segments2),
        *(block_m, sort_chunk(layer.pairs), SM90_WGMMA),
    )


def _of_segments(config: GemmConfig, block_m: int, columns: int, segments: int) -> GemmConfig:
    """The config of a GEMM whose rows have `columns` columns in so many segments, with registers
    for the sums of both.
    """
    if segments == 1 or (block_m == 8 and columns < 4096):
        return config
    wide = columns // segments % 256 == 0
    num_warps = 8 if block_m in (8, 32) else 4
    if wide:
        return GemmConfig(128, 256, 3 if block_m in (16, 32) else 2, num_warps)
    return GemmConfig(128, 128, 3 if block_m == 16 else 4, num_warps)


@Chosen
def for_experts(
    layer: LayerSizes,
    dtype: torch.dtype,
    scheme: str,
    bits: int,  # of a weight
    wgmma: bool = False,  # the kernels of sm90_wgmma.py can run
    gemv: bool = False,  # those of gemv.py can
    prepared: bool = False,  # these alone read the weights' layout
    many: int = 0,  # `MixedOperand.stages_of_many`
    token: tuple[int, int] | None = None,  # `token_facts`, if sm90_mma.py serves one token
    packed: bool = False,  # mixed_gemm/sm90_packed.py can run and is faster (`many_rows`)
    scaling: str = "",  # `MixedOperand.scaling`
) -> LayerConfig:
    """Config of an expert layer: the one measured for its shape on its GPU, else by rule."""
    if packed:
        return MANY_ROWS
    base = choose(layer, bits, dtype, layer.pairs == layer.top_k)
    if wgmma:
        base = choose_wgmma(layer, bits, many, scaling) or base
    if token is not None:
        base = choose_token(layer, *token)
    elif gemv:
        base = choose_gemv(layer, bits)
    config = measured(base, layer, scheme, dtype)
    # A config that was measured at another M may have too small or too large blocks, and not all
    # weights of a scheme run in blocks of two operands: of fp32 scales sums are apart.
    fits = fits_wgmma(config.block_m, layer.pairs / (layer.routed or layer.experts))
    fits = fits and (many > 0 or config.block_m.bit_count() == 1)
    can_run = {
        SM90_WGMMA: wgmma and fits,
        SM90_PACKED: False,  # measured with more rows, or where it can run
        GEMV: gemv,
        SM90_MMA: token is not None,
    }
    return config if can_run.get(config.kernel, not prepared) else base


@Chosen
def of_two_formats(
    layer: LayerSizes,  # with rows here
    bits: tuple[int, int],  # of w13 and of w2 (16: a plain weight)
    dtype: torch.dtype,
    gated: bool,
    direct: bool,  # one token runs without a table of blocks
    wgmma: bool,  # the kernels of sm90_wgmma.py run its weights
    chunk: int,  # pairs that the sorting kernel handles at a time
) -> LayerConfig:
    """Config of a layer whose weights have different formats: the tiles of each product are those
    of a layer in its format, in blocks of one size.
    """
    has_plain, narrow = 16 in bits, [one for one in bits if one != 16]
    if has_plain:  # whose kernels have blocks of 16 rows and more
        layer = layer.with_rows(max(layer.rows, FEWEST_ROWS_OF_16 * layer.experts))
    found: dict[int, LayerConfig | None] = dict.fromkeys(narrow)
    if wgmma:
        found = {one: choose_wgmma(layer, one) for one in narrow}
    if None in found.values():
        found = {one: choose(layer, one, dtype, direct and not has_plain) for one in narrow}
    chosen = [one for one in found.values() if one is not None]
    block_m, kernel = min([one.block_m for one in chosen]), chosen[0].kernel
    if has_plain:
        how = (dtype.itemsize, False, "", "", gated)
        of_rows = plain.choose(layer, *how)
        if of_rows.block_m != block_m:
            fewer = layer.with_rows(ROWS_OF_BLOCKS[block_m] * layer.experts)
            of_rows = plain.choose(fewer, *how)
        chosen.insert(bits.index(16), of_rows)
    one, two = chosen[0], chosen[-1]
    return LayerConfig(
        *(one.gemm1, two.gemm2, block_m, chunk, kernel), direct=direct, split_k=two.split_k
    )


def many_rows(layer: LayerSizes, bits: int) -> bool:
    """Whether a layer of so many rows is faster by mixed_gemm/sm90_packed.py, whose blocks of 128
    rows share a decoded weight.

    In 8 bits it is from 64 rows per expert on: with fewer, blocks of 128 rows are mostly empty. In
    5 and 6 bits it is where sm90_wgmma.py ends. In 4 bits that needs no copy of rows and pads them
    to 64, so that it is ahead up to the more rows, the longer those of w2 are.
    """
    if bits in (5, 6):
        return layer.average > MAX_ROWS_OF_8_BITS
    if bits == 8:
        return layer.rows >= 64 * layer.experts
    least = 128 + layer.I // 16
    return layer.I <= MAX_I_OF_PACKED and layer.rows >= least * layer.experts


@Chosen
def for_any_batch(layer: LayerSizes, *facts: Any) -> LayerConfig:
    """Config under `batch_invariant`: kernel and tiles that the number of rows has no part in.
    Arguments as for `choose`, whose kernels are never direct then.
    """
    alike = choose(layer.with_rows(ROWS_OF_ANY_BATCH * layer.experts), *facts)
    return alike._replace(sort_chunk=sort_chunk(layer.pairs))


def choose_gemv(layer: LayerSizes, bits: int) -> LayerConfig:
    """Config of the kernels of gemv.py: BLOCK_N rows of w13 or w2, and BLOCK_K.

    A thread multiplies eight rows, which share the loads and conversions of x. GEMM1 has many
    programs: its BLOCK_K divides the rows of w13. GEMM2 has few: more warps share a row, and a
    program has fewer rows if a multiprocessor would have less than 12 warps.
    """
    K, columns = layer.K, layer.top_k * layer.I
    warp = gemv_columns(bits)
    warps1 = next(w for w in (4, 2, 1) if K % (warp * w) == 0 or w == 1)
    warps2 = min(4, max(1, mixed_gemv_k(columns, bits, 4) // warp))
    if 4 * warp < columns <= 8 * warp:
        warps2 = 8
    rows = 8 if K * warps2 >= 8 * 12 * layer.gpu.multiprocessors else 4
    gemm1 = GemmConfig(8, mixed_gemv_k(K, bits, warps1), 1, warps1)
    gemm2 = GemmConfig(rows, mixed_gemv_k(columns, bits, warps2), 1, warps2)
    return LayerConfig(gemm1, gemm2, 1, sort_chunk(layer.pairs), GEMV, direct=True)


@Chosen
def gemv_of_two_formats(layer: LayerSizes, bits: tuple[int, int]) -> LayerConfig:
    """Config of the kernels of gemv.py for weights of so many bits, w13 and w2."""
    one, two = [choose_gemv(layer, each) for each in bits]
    return one._replace(gemm2=two.gemm2)


def token_facts(w13: MixedOperand, w2: MixedOperand) -> tuple[int, int] | None:
    """(K_CHUNK, columns that share a scale) of weights of which sm90_mma.py is faster than gemv.py
    for one token: prepared e2m1, and int4 with scales of whole chunks, of which w13's rows have at
    most 32.

    Of int4 in groups of 32 and of rows of more than 32 chunks gemv.py is as fast or faster: a
    thread of sm90_mma.py loads scales one by one there, or has too many chunks under way.
    """
    of, chunk = w2.wgmma_format, w2.k_chunk
    whole = of.name == "int4" and of.scale == "weight" and chunk > 0 and of.group % chunk == 0
    if w13.k_chunk != chunk or not (whole or of.name == "e2m1_words"):
        return None
    if w2.has_zero and max(w13.K, w2.K) > MAX_CHUNKS * chunk:  # not measured
        return None
    if whole and MAX_CHUNKS_OF_W13 * chunk < w13.K:
        return None
    return chunk, of.group


@Chosen
def token_of_any_batch(top_k: int, segments13: int, segments2: int) -> LayerConfig:
    """Config of sm90_mma.py under `batch_invariant`: a warp has one segment of 16 rows of weights
    (`MixedOperand.segments`). (Of those kernels BLOCK_N counts rows, which 16 warps' rows may
    share, and stages are chunks that a thread has asked for.)
    """
    slots = token_slots(top_k)
    gemm1 = GemmConfig(16, 128, 16, segments13)
    gemm2 = GemmConfig(16 * slots, 128, 8, segments2 * slots)
    return LayerConfig(gemm1, gemm2, 1, sort_chunk(1), SM90_MMA, direct=True)


def choose_token(layer: LayerSizes, k_chunk: int, group: int) -> LayerConfig:
    """Config of sm90_mma.py for a token alone.

    A thread of GEMM1 asks for all its weights at once where they are few, else in even rounds:
    what it asks for later it waits for alone.

    16 warps of GEMM2 are best where no multiprocessor has two programs. Elsewhere eight are: two
    programs of 16 warps do not fit if a token has more than two experts, with which registers
    grow. Of two experts with long rows they ask for four chunks, beside all of h (`rows_of_h` in
    sm90_mma.py); rows of 13 to 16 chunks per warp were measured with 16 warps alone.

    They ask for four chunks too where a warp has 12, or a token one expert. Rows of GEMM1 of more
    than 32 chunks have eight warps; shorter ones are slower with so many.
    """
    K, I = layer.K, layer.I
    slots, programs = token_slots(layer.top_k), cdiv(K, 16)
    chunks = cdiv(K, k_chunk)
    parts = parts_of_row(K, k_chunk, group, 2 if chunks <= 16 else 4 if chunks <= 32 else 8)
    chunks = cdiv(chunks, parts)
    gemm1 = GemmConfig(16, k_chunk, token_depth(chunks, 14), parts)
    chunks_of_eight = cdiv(cdiv(I, k_chunk), max(1, 8 // slots))
    eight = programs > layer.gpu.multiprocessors and (slots > 2 or not 12 < chunks_of_eight <= 16)
    parts = parts_of_row(I, k_chunk, group, max(1, (8 if eight else 16) // slots))
    chunks = cdiv(cdiv(I, k_chunk), parts)
    if parts * slots > 8:
        most = 4 if chunks <= 6 else 2
    else:
        most = 8 if 1 < slots <= 4 and chunks <= 16 else 4
    gemm2 = GemmConfig(16 * slots, k_chunk, token_depth(chunks, most), parts * slots)
    return LayerConfig(gemm1, gemm2, 1, sort_chunk(layer.pairs), SM90_MMA, direct=True)
