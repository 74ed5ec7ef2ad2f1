"""Legal tiles: those that fit the registers and the shared memory of a GPU. Tiles by rule are
fitted to them, and the search (moe_ops.tuning) tries them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from moe_ops.kernels.configs import SM90_PACKED, SM90_TMA, SM90_WGMMA, GemmConfig, LayerConfig
from moe_ops.kernels.launch import Gpu
from moe_ops.kernels.mixed_gemm.configs import MAX_SPLIT_K, parts_of_row, token_slots
from moe_ops.meta.workspace import cdiv

# bytes of shared memory that a block needs besides its ring: reserved by rules, and really used
SPARE, TAKEN = 8192, 1024
MAX_SUMS = 128  # accumulators of a thread, including those of one group of columns

Space = list[tuple[list[LayerConfig], list[LayerConfig]]]  # for GEMM1 and for GEMM2


class Gemm(NamedTuple):
    """The facts of a product on which its tiles depend, for the kernels in `gemm`."""

    rows: int  # of an expert's weight
    columns: int  # length of the reduction
    w_size: int  # bytes of a weight element
    x_size: int  # bytes of an input element
    scaled: bool  # the sum of each K tile is scaled before it is added to the total
    block_ns: tuple[int, ...] = (64, 128, 256)  # legal BLOCK_N


def converted_bytes(block_m: int, block_k: int, w_size: int, x_size: int) -> int:
    """Bytes of shared memory in which the wider operand of a product is converted."""
    return 2 * block_m * block_k if w_size < x_size else 0


def fitted(
    config: GemmConfig,
    block_m: int,
    bits: int,  # of a weight
    x_size: int,  # bytes of an input element
    gpu: Gpu,
    converted: int = 0,  # bytes of shared memory besides the ring
    whole: bool = False,  # keep BLOCK_N, whose columns share a scale
) -> GemmConfig:
    """`config` with the most stages that fit the shared memory of a block. BLOCK_N is halved until
    two fit; with `whole` one stage is enough instead.
    """
    room = gpu.shared_memory - SPARE - converted
    stage = config.stage_bytes(block_m, bits, x_size)
    while not whole and config.block_n > 64 and 2 * stage > room:
        config = config._replace(block_n=config.block_n // 2)
        stage = config.stage_bytes(block_m, bits, x_size)
    stages = max(1 if whole else 2, min(config.num_stages, room // stage))
    return config._replace(num_stages=stages)


def registers(gemm: Gemm, config: GemmConfig, block_m: int) -> float:
    """Estimated registers of a thread. The compiler takes 48 for 8 plain accumulators, 72 for 16;
    for scaled ones 48 for 8, 156 for 32.
    """
    sums = config.block_n * block_m / (32 * config.num_warps)
    return min(255, 40 + (3.5 if gemm.scaled else 2) * sums)


def blocks_held(gemm: Gemm, config: GemmConfig, block_m: int, gpu: Gpu) -> int:
    """Occupancy: blocks that a multiprocessor holds at a time; 0 if one does not fit."""
    shared = config.num_stages * config.stage_bytes(block_m, 8 * gemm.w_size, gemm.x_size) + TAKEN
    shared += converted_bytes(block_m, config.block_k, gemm.w_size, gemm.x_size)
    if shared > gpu.shared_memory:
        return 0
    threads = 32 * config.num_warps
    by_registers = int(gpu.registers // (registers(gemm, config, block_m) * threads))
    return min(gpu.multiprocessor_memory // shared, by_registers)


def tiles(gemm: Gemm, block_m: int, gpu: Gpu) -> Iterator[GemmConfig]:
    """Legal tiles of a product with BLOCK_M `block_m`, for the kernels in `gemm`."""
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


def gemms_of(
    config: LayerConfig,
    K: int,
    I: int,
    itemsize: int,
    quantized: bool,
    x_scale: str = "",
) -> tuple[Gemm, Gemm]:
    """The facts of both products of a gated layer that runs the kernels of a config."""
    tma, any_n = config.kernel == SM90_TMA, (64, 128, 256)
    size = 1 if quantized else itemsize
    whole = x_scale == "group" and not config.h_in_fp32  # GEMM1 quantizes 128 columns of h
    one = Gemm(
        *(2 * I, K, size, 1 if config.quantize_x else itemsize, quantized),
        (256,) if whole or tma else any_n,
    )
    x_size = itemsize if not x_scale else 4 if config.h_in_fp32 else 1
    two_n = any_n if not tma else (128,) if x_scale else (128, 256)
    return one, Gemm(K, I, size, x_size, quantized, two_n)


def blocks_of(base: LayerConfig, average: float, by_group: bool) -> Iterator[LayerConfig]:
    """`base` with each BLOCK_M worth trying, whose blocks hold an expert's rows and are not mostly
    empty, and with each choice of the kernels that quantize x and h.
    """
    if base.kernel == SM90_TMA:
        for block_m, split_m in ((64, 1), (128, 1), (128, 2)):
            yield base._replace(block_m=block_m, split_m=split_m)
        return
    modes = [(base.quantize_x, base.h_in_fp32)]
    # not for more tokens, where quantization in the mainloop is slower: each tile repeats it
    if by_group and base.direct:
        modes = [(True, False), (True, True), (False, False), (False, True)]
    wanted = [m for m in (16, 32, 64, 128) if average / 6 <= m <= max(16, 5 * average)]
    for block_m in [16] if base.direct else wanted or [128]:
        for quantize_x, h_in_fp32 in modes:
            yield base._replace(block_m=block_m, quantize_x=quantize_x, h_in_fp32=h_in_fp32)


def layers(
    base: LayerConfig, ones: Iterable[GemmConfig], twos: Iterable[GemmConfig]
) -> tuple[list[LayerConfig], list[LayerConfig]]:
    """`base` with each config of GEMM1, and `base` with each of GEMM2."""
    return (
        [base._replace(gemm1=gemm) for gemm in dict.fromkeys(ones)],
        [base._replace(gemm2=gemm) for gemm in dict.fromkeys(twos)],
    )


def gemv_space(base: LayerConfig, K: int, I: int) -> Space:
    """Configs of gemm/gemv.py with 16 to 128 weights per thread."""

    def gemms(columns: int, rows: int) -> Iterator[GemmConfig]:
        for n in (1, 2, 4, 8, 16):
            for k in (512, 1024, 2048, 4096):
                for warps in (2, 4, 8):
                    if 16 <= n * rows * k // (32 * warps) <= 128 and k < 2 * columns:
                        for stages in (1,) if k >= columns else (1, 3):
                            yield GemmConfig(n, k, stages, warps)

    return [layers(base, gemms(K, 2), gemms(I, 1))]  # of GEMM1 gate and up


def gemv_columns(bits: int) -> int:
    """Columns of a row that a warp of mixed_gemm/gemv.py reads at a time."""
    return 1024 if bits in (5, 6) else 4096 // bits


def mixed_gemv_k(columns: int, bits: int, num_warps: int, loads: int = 1) -> int:
    """BLOCK_K of mixed_gemm/gemv.py with `loads` loads of 16 bytes per thread, or less if the row
    is shorter.
    """
    return min(gemv_columns(bits) * num_warps * loads, 1 << (columns - 1).bit_length())


def mixed_gemv_space(base: LayerConfig, top_k: int, K: int, I: int, bits: int) -> Space:
    """Configs of mixed_gemm/gemv.py with 2 to 16 loads per thread."""

    def gemms(columns: int) -> Iterator[GemmConfig]:
        for rows in (2, 4, 8, 16):
            for warps in (1, 2, 4, 8):
                for loads in (1, 2):
                    fits = warps == loads == 1 or 2048 // bits * warps * loads < columns
                    if rows * loads <= 16 and fits:
                        yield GemmConfig(rows, mixed_gemv_k(columns, bits, warps, loads), 1, warps)

    return [layers(base, gemms(K), gemms(top_k * I))]


def token_depth(chunks: int, most: int) -> int:
    """Chunks that a thread of sm90_mma.py prefetches at a time, at most `most`: rounds are even,
    so that few chunks lie past the end of the row.
    """
    return cdiv(chunks, cdiv(chunks, most))


def token_space(base: LayerConfig, top_k: int, K: int, I: int, group: int) -> Space:
    """Configs of sm90_mma.py."""
    k_chunk, slots = base.gemm1.block_k, token_slots(top_k)

    def gemms(columns: int, rows: int, all_parts: Iterable[int]) -> Iterator[GemmConfig]:
        for parts in all_parts:
            if parts_of_row(columns, k_chunk, group, parts) == parts:
                chunks, warps = cdiv(cdiv(columns, k_chunk), parts), parts * rows // 16
                for most in (2, 3, 4, 6, 8, 14):
                    yield GemmConfig(rows, k_chunk, token_depth(chunks, most), warps)

    parts = [n for n in (1, 2, 4, 8, 16) if n * slots in (4, 8, 16)]
    return [layers(base, gemms(K, 16, (1, 2, 4, 8)), gemms(I, 16 * slots, parts))]


# (BLOCK_N, warps) of mixed_gemm/sm80_mma.py by BLOCK_M, whose accumulators and operands fit the
# registers. With 16 and 32 tokens each warp reads all of x for its 32 or 64 rows of the weight.
_ROWS_AND_WARPS = {
    8: ((32, 2), (64, 2), (128, 2)),
    16: ((64, 2), (128, 4), (256, 4), (256, 8)),
    32: ((64, 2), (128, 4), (256, 4), (256, 8)),
    64: ((64, 4), (128, 4)),
    128: ((64, 4), (128, 8)),
}
# tiles of sm90_wgmma.py. With two wgmma operands a thread has rows of both halves of a tile.
_WGMMA = [
    *((64, 128, 4, 4), (64, 256, 2, 4), (64, 256, 3, 4), (64, 256, 4, 4)),
    *((128, 128, 3, 4), (128, 128, 4, 4), (128, 256, 2, 4)),
    *((128, 128, 4, 8), (128, 256, 2, 8), (128, 256, 3, 8)),
]


def mixed_tiles(block_m: int, bits: int) -> Iterator[GemmConfig]:
    """Tiles of mixed_gemm/sm80_mma.py; BLOCK_K is 64 or 128 bytes of a row."""
    for block_n, num_warps in _ROWS_AND_WARPS[block_m]:
        for block_k in (64, 128) if bits == 8 else (128, 256):
            size = block_n * block_k * bits // 8  # bytes of weights
            for num_stages in (3, 4, 6):
                if 1024 <= size <= 16384 and size * num_stages <= 65536:
                    yield GemmConfig(block_n, block_k, num_stages, num_warps)


def fits_wgmma(block_m: int, average: float) -> bool:
    """Whether a BLOCK_M of sm90_wgmma.py is worth trying for experts of `average` rows.

    Its blocks hold an expert's rows, as far as the largest block does, so that weights are read
    once, and are not mostly empty.
    """
    return min(average, 64) <= block_m < max(9, 4 * average)


def mixed_space(base: LayerConfig, average: float, bits: int, experts: int, K: int) -> Space:
    """Configs of a mixed GEMM for more than one token.

    Args:
        average: average rows per expert.
        bits: bits of a weight element.
        experts: number of experts.
        K: rows of GEMM2's weights.
    """
    if base.kernel == SM90_PACKED:  # which has one tile
        return [([base], [base])]
    space = []
    if base.kernel != SM90_WGMMA:
        few = [t for t in _ROWS_AND_WARPS if average / 2 <= t <= max(8, 8 * average)]
        for block_m in [8] if base.direct else few or [128]:
            gemms = list(mixed_tiles(block_m, bits))
            alike = base._replace(block_m=block_m, gemm1=gemms[0], gemm2=gemms[0])
            space.append(layers(alike, gemms, gemms))
        return space
    tried = sorted({8, 16, 32, 64, base.block_m})
    for block_m in [t for t in tried if fits_wgmma(t, average)] or [64]:
        one_operand = block_m in (8, 16, 32, 64)
        gemms = [GemmConfig(*g) for g in _WGMMA if one_operand or (g[0], g[3]) == (128, 4)]
        whole = base._replace(block_m=block_m, split_k=1)
        ones = [whole._replace(gemm1=gemm, gemm2=gemm) for gemm in gemms]
        twos = ones + [
            one._replace(split_k=split_k)
            for one in ones
            for split_k in range(2, MAX_SPLIT_K + 1)
            if min(1, average) * experts * cdiv(K, one.gemm2.block_n) * split_k <= 800
        ]
        space.append((ones, twos))
    return space
