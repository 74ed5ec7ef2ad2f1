"""Configs of the mixed GEMMs (weights of 4 to 8 bits, 16-bit activations), and when those of SM90
may run. torch alone.

The kernels of sm80_mma.py have two warps a block, because Triton would use wgmma with four, until
an expert has so many rows that products take longer than decoding.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import exp

import torch

from moe_ops import environment
from moe_ops.kernels.configs import (
    GEMV,
    LARGE_SHARED_MEMORY,
    MULTIPROCESSORS,
    ROWS_OF_ANY_BATCH,
    SM90_MMA,
    SM90_PACKED,
    SM90_WGMMA,
    GemmConfig,
    LayerConfig,
    find,
    measured,
    pairs_here,
    sort_chunk,
)
from moe_ops.kernels.gemm import configs as gemm_configs
from moe_ops.kernels.launch import INTERPRETED, Gpu
from moe_ops.kernels.mixed_gemm.operands import (
    STAGES_OF_STREAMED,
    STAGES_OF_WORDS,
    MixedOperand,
)
from moe_ops.meta.workspace import cdiv, maximum, minimum, round_up

SMALLEST_BLOCK_M = 8  # tokens: the columns of one tensor-core instruction
FORMATS = ("int4", "int4_e4m3", "e2m1", "e2m1_words", "int8", "e4m3")  # of sm90_wgmma.py
MAX_SPLIT_K = 3  # programs that share the reduction of a tile of GEMM2, if it has few tiles
SPLIT_ROWS = 1024  # rows of y in all SPLIT_K partial sums
LONG_ROWS = 8192  # columns of w2, from which a wave of GEMM2 is long
LONG_W2 = 4096  # columns of w2, from which the same holds in 8 bits, and tiles of it are narrower
SCALED_SUMS = 32  # BLOCK_M up to which int4 with bf16 scales and zero points has sums scaled
EIGHT_WARPS = GemmConfig(128, 256, 2, 8)  # of blocks of 32 rows
FEW_STEPS = 8  # K tiles of a program of GEMM2 that is short
GROUP_BYTES = 24 << 20  # of rows of x that the L2 (50 MB) keeps
SHORT_ROWS = 2048  # columns, up to which half of them is faster
PAIR_BUCKETS = (64, 512)  # up to so many pairs, every program reads the ids of all
MAX_TOP_K = 16  # experts of a token of sm90_mma.py
MAX_CHUNKS = 16  # of a row with zero points, up to which sm90_mma.py is faster than gemv.py
MAX_CHUNKS_OF_W13 = 32  # of int4, up to which sm90_mma.py was shown to be faster than gemv.py
MAX_I_OF_PACKED = 4096  # up to which training/sm90_packed.py is faster with weights of 4 bits
FEWEST_ROWS_OF_16 = 5  # rows an expert, from which blocks have 16 rows
ALIGNMENT = 64  # elements of h before the same with permuted columns, whose address TMA takes
# BLOCK_M -> rows an expert of plain weights that run in such blocks
ROWS_OF_BLOCKS = {16: 8, 32: 20, 64: 48, 128: 128}
MAX_ROWS_OF_8_BITS = 80  # average rows of an expert, up to which sm90_wgmma.py takes 8-bit weights
# training/sm90_packed.py has these tiles alone: rows of a block, columns, step, stages and warps
MANY_ROWS = LayerConfig(
    GemmConfig(128, 64, 3, 4), GemmConfig(128, 64, 3, 4), 128, 0, SM90_PACKED
)  # fmt: skip


@cache
def on_sm90(device: int) -> bool:
    """Whether a CUDA device has the instructions of sm90_wgmma.py, and Triton compiles them."""
    if device < 0 or INTERPRETED or environment.capability(device)[0] != 9:
        return False
    return environment.why_no_gluon(environment.TRITON) is None


@lru_cache(maxsize=8192)
def choose(
    rows: int,  # pairs, or rows of the sorted input
    groups: int,  # experts that share them
    K: int,
    I: int,  # noqa: E741
    bits: int,  # of a weight
    dtype: torch.dtype,  # of x
    direct: bool,
    shared_memory: int,  # bytes that a block may use
) -> LayerConfig:
    """Config of the two GEMMs of sm80_mma.py. An expert's rows should usually fit one block, so
    that its weights are read once.
    """
    average = rows / groups
    block_m = 8 if direct or average <= 4 else 16 if average <= 16 else 32 if average <= 40 else 64
    if K * bits % 128 or I * bits % 128:
        # Rows that 16 bytes do not divide are loaded by element. Larger tiles spill up to 4 KiB a
        # thread.
        block_m = 16
        gemm1 = gemm2 = GemmConfig(32, 64, 2, 4)
    elif dtype != torch.bfloat16:  # weights are decoded to fp32 first, which takes registers
        block_m = min(max(block_m, 16), 32)
        fp32 = dtype == torch.float32
        gemm1 = gemm2 = GemmConfig(64, 32, 2, 4) if fp32 else GemmConfig(64, 64, 3, 4)
    elif block_m == 8:
        few = min(rows, groups)
        gemm1, gemm2 = _streaming(few * 2 * I, bits), _streaming(few * K, bits)
    elif block_m == 16:
        gemm1 = gemm2 = GemmConfig(128, 128, 4, 4) if bits == 4 else GemmConfig(64, 128, 4, 2)
    elif block_m == 32:
        gemm1 = gemm2 = GemmConfig(128, 128, 4, 4)
    elif shared_memory <= LARGE_SHARED_MEMORY:  # before SM90, accumulators of more rows spill
        block_m, gemm1, gemm2 = 32, GemmConfig(64, 128, 4, 2), GemmConfig(64, 128, 4, 2)
    else:
        block_m = 128 if average > 64 else block_m
        gemm1 = gemm2 = GemmConfig(128, 128, 3, 8 if block_m == 128 else 4)
    return LayerConfig(
        _fit(gemm1, block_m, bits, dtype.itemsize, shared_memory),
        _fit(gemm2, block_m, bits, dtype.itemsize, shared_memory),
        block_m,
        sort_chunk(rows),
        direct=direct,
    )


def _streaming(rows: int, bits: int) -> GemmConfig:
    """Config for few rows an expert. `rows` is the number of weight rows that
    are read in all.

    BLOCK_K is 128 bytes of a row. Tiles are smaller if a multiprocessor would have fewer than
    three blocks.
    """
    if rows < 3 * MULTIPROCESSORS * 64:
        return GemmConfig(32, 128, 6, 2)
    return GemmConfig(64, 256, 3, 2) if bits == 4 else GemmConfig(64, 128, 4, 2)


def _fit(
    config: GemmConfig, block_m: int, bits: int, itemsize: int, shared_memory: int
) -> GemmConfig:
    """`config` with as many stages as the shared memory of a block holds."""
    block_n, block_k, num_stages, num_warps = config
    stage = block_n * block_k * bits // 8 + block_m * block_k * itemsize
    while block_n > 64 and 2 * stage > shared_memory - 8192:
        block_n //= 2
        stage = block_n * block_k * bits // 8 + block_m * block_k * itemsize
    num_stages = max(2, min(num_stages, (shared_memory - 8192) // stage))
    return GemmConfig(block_n, block_k, num_stages, num_warps)


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
    bits: int,
    wgmma: bool = False,
    gemv: bool = False,
    prepared: bool = False,
    routed: int = 0,
    many: int = 0,
    token: tuple[int, int] | None = None,
    packed: bool = False,
    scaling: str = "",
    tables: bool = True,
) -> LayerConfig:
    rows = pairs_here(M * top_k, E, routed)
    if packed:
        return MANY_ROWS
    base = choose(rows, E, K, I, bits, dtype, M == 1, gpu.shared_memory)
    base = base._replace(sort_chunk=sort_chunk(M * top_k))
    if wgmma:
        base = choose_wgmma(rows, E, K, I, bits, base.sort_chunk, many, scaling) or base
    if token is not None:
        base = _choose_token(top_k, K, I, *token, base.sort_chunk)
    elif gemv:
        base = _choose_gemv(top_k, K, I, bits, base.sort_chunk)
    if not tables:
        return base
    routed = routed or E
    config = measured(base, gpu, M, top_k, routed, K, I, scheme, dtype)
    # A config that was measured at another M may have too small or too large blocks.
    fits = wgmma and fits_wgmma(config.block_m, M * top_k / routed)
    # Not all weights of a scheme run in blocks of two operands: of fp32 scales sums are apart.
    fits = fits and (many > 0 or config.block_m.bit_count() == 1)
    if config.kernel == SM90_WGMMA and not fits:
        return base
    if config.kernel == SM90_PACKED:  # measured with more rows, or where it can run
        return base
    if config.kernel == GEMV and not gemv:
        return base
    if config.kernel == SM90_MMA and token is None:
        return base
    if prepared and config.kernel not in (SM90_WGMMA, SM90_MMA, GEMV):
        return base
    return config


def for_experts(*problem) -> LayerConfig:
    """Config of an expert layer: the one measured for its shape on its GPU, else that of `choose`.

    Arguments: M, top_k, E, K, I, dtype, Gpu, scheme, bits of a weight, whether the kernels of
    sm90_wgmma.py and of gemv.py can run, whether these alone read the weights' layout, how many
    experts share the pairs if these are on several devices, `MixedOperand.stages_of_many`,
    K_CHUNK and the columns that share a scale if sm90_mma.py serves one token (`token_facts`),
    whether training/sm90_packed.py can run and is faster (`many_rows`), and
    `MixedOperand.scaling`.
    """
    return find(_for_experts, problem)


@lru_cache(maxsize=8192)
def _of_two_formats(
    rows: int,
    groups: int,
    K: int,
    I: int,  # noqa: E741
    bits: tuple[int, int],
    dtype: torch.dtype,
    gated: bool,
    direct: bool,
    wgmma: bool,
    shared_memory: int,
    chunk: int,
    tables: bool = True,
) -> LayerConfig:
    plain, narrow = 16 in bits, [one for one in bits if one != 16]
    if plain:  # whose kernels have blocks of 16 rows and more
        rows = max(rows, FEWEST_ROWS_OF_16 * groups)
    found: dict[int, LayerConfig | None] = dict.fromkeys(narrow)
    if wgmma:
        found = {one: choose_wgmma(rows, groups, K, I, one, chunk) for one in narrow}
    if None in found.values():
        facts = (dtype, direct and not plain, shared_memory)
        found = {one: choose(rows, groups, K, I, one, *facts) for one in narrow}
    chosen = [one for one in found.values() if one is not None]
    block_m, kernel = min([one.block_m for one in chosen]), chosen[0].kernel
    if plain:
        sizes = (groups, K, I, dtype.itemsize, False, shared_memory, "", "", gated)
        of_rows = gemm_configs.choose(rows, *sizes)
        if of_rows.block_m != block_m:
            of_rows = gemm_configs.choose(ROWS_OF_BLOCKS[block_m] * groups, *sizes)
        chosen.insert(bits.index(16), of_rows)
    first, second = chosen[0], chosen[-1]
    return LayerConfig(
        *(first.gemm1, second.gemm2, block_m, chunk, kernel),
        direct=direct,
        split_k=second.split_k,
    )


def of_two_formats(*problem) -> LayerConfig:
    """Config of a layer whose weights have different formats: the tiles of each product are those
    of a layer in its format, in blocks of one size.

    Arguments: pairs here, experts here, K, I, bits of w13 and of w2 (16: a plain weight), dtype,
    whether the activation is gated, whether one token runs without a table of blocks, whether the
    kernels of sm90_wgmma.py run weights of 4 and 8 bits, bytes of shared memory, and pairs that
    the sorting kernel handles at a time.
    """
    return find(_of_two_formats, problem)


def many_rows(rows: int, experts: int, I: int, bits: int) -> bool:  # noqa: E741
    """Whether a layer of so many rows is faster by training/sm90_packed.py, whose blocks of 128
    rows share a decoded weight.

    In 8 bits it is from 64 rows an expert on: with fewer, blocks of 128 rows are mostly empty. In
    4 bits sm90_wgmma.py needs no copy of rows and pads them to 64, so that it is ahead up to the
    more rows, the longer those of w2 are.
    """
    if bits == 8:
        return rows >= 64 * experts
    return I <= MAX_I_OF_PACKED and rows >= (128 + I // 16) * experts


def _of_any_batch(groups: int, *facts, tables: bool = True) -> LayerConfig:
    return choose(ROWS_OF_ANY_BATCH * groups, groups, *facts)


def for_any_batch(rows: int, *problem) -> LayerConfig:
    """Config under `batch_invariant`: kernel and tiles that `rows` have no part in. Arguments as
    for `choose`, whose kernels are never direct then.
    """
    return find(_of_any_batch, problem)._replace(sort_chunk=sort_chunk(rows))


def wgmma_for_any_batch(rows: int, w13: MixedOperand, w2: MixedOperand) -> LayerConfig:
    """Config of sm90_wgmma.py under `batch_invariant`, for any number of rows: its tiles give the
    same bits (benchmarks/batch_invariant.py), sums that SPLIT_K programs share do not.
    """
    facts = (w13.K, w2.K, w2.format.bits, w13.segments, w2.segments)
    many = 0  # blocks of two operands have registers for one sum of each
    if w13.segments == w2.segments == 1:
        many = min(w13.stages_of_many, w2.stages_of_many)
    return find(_wgmma_of_any_batch, (rows, w2.E, *facts, many))


def _wgmma_of_any_batch(
    rows: int,
    groups: int,
    K: int,
    I: int,  # noqa: E741
    bits: int,
    segments13: int,
    segments2: int,
    many: int,
    tables: bool = True,
) -> LayerConfig:
    chosen = _wgmma(rows, groups, K, I, bits, sort_chunk(rows), many)
    if chosen.split_k > 1 and rows < groups and bits == 4 and I % 256 == 0:
        # as few programs as SPLIT_K is for: narrower tiles instead
        chosen = chosen._replace(gemm2=GemmConfig(64, 256, 2, 4))
    gemm1 = _of_segments(chosen.gemm1, chosen.block_m, K, segments13)
    gemm2 = _of_segments(chosen.gemm2, chosen.block_m, I, segments2)
    return chosen._replace(gemm1=gemm1, gemm2=gemm2, split_k=1)


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


def _gemv_k(columns: int, bits: int, num_warps: int, loads: int = 1) -> int:
    """BLOCK_K of which every thread loads `loads` times 16 bytes, or less if a row is shorter."""
    return min(4096 // bits * num_warps * loads, 1 << (columns - 1).bit_length())


def _choose_gemv(
    top_k: int,
    K: int,
    I: int,  # noqa: E741
    bits: int,
    chunk: int,
) -> LayerConfig:
    """Config of the kernels of gemv.py: BLOCK_N rows of w13 or w2, and BLOCK_K.

    A thread multiplies eight rows, which share the loads and conversions of x. GEMM1 has many
    programs: its BLOCK_K divides the rows of w13. GEMM2 has few: more warps share a row, and a
    program has fewer rows if a multiprocessor would have less than 12 warps.
    """
    warp = 4096 // bits  # columns that a warp reads at a time
    warps1 = next(w for w in (4, 2, 1) if K % (warp * w) == 0 or w == 1)
    warps2 = min(4, max(1, _gemv_k(top_k * I, bits, 4) // warp))
    if 4 * warp < top_k * I <= 8 * warp:
        warps2 = 8
    rows = 8 if K * warps2 >= 8 * 12 * MULTIPROCESSORS else 4
    return LayerConfig(
        GemmConfig(8, _gemv_k(K, bits, warps1), 1, warps1),
        GemmConfig(rows, _gemv_k(top_k * I, bits, warps2), 1, warps2),
        1,
        chunk,
        GEMV,
        direct=True,
    )


@lru_cache(maxsize=1024)
def _gemv_of_two_formats(
    top_k: int,
    K: int,
    I: int,  # noqa: E741
    bits: tuple[int, int],
    chunk: int,
    tables: bool = True,
) -> LayerConfig:
    first, second = [_choose_gemv(top_k, K, I, one, chunk) for one in bits]
    return first._replace(gemm2=second.gemm2)


def gemv_of_two_formats(*problem) -> LayerConfig:
    """Config of the kernels of gemv.py for weights of different formats. Arguments: top_k, K, I,
    bits of w13 and of w2, and pairs that the sorting kernel would handle at a time.
    """
    return find(_gemv_of_two_formats, problem)


def token_slots(top_k: int) -> int:
    """Warps of a program of GEMM2 of sm90_mma.py, each of which has an expert."""
    return 1 << (top_k - 1).bit_length()


@lru_cache(maxsize=64)
def _token_of_any_batch(
    top_k: int, segments13: int, segments2: int, tables: bool = True
) -> LayerConfig:
    slots = token_slots(top_k)
    gemm1 = GemmConfig(16, 128, 16, segments13)
    gemm2 = GemmConfig(16 * slots, 128, 8, segments2 * slots)
    return LayerConfig(gemm1, gemm2, 1, sort_chunk(1), SM90_MMA, direct=True)


def in_segments(
    w13: MixedOperand, w2: MixedOperand, top_k: int
) -> tuple[MixedOperand, MixedOperand] | None:
    """The weights under `batch_invariant` with the sums of one token by sm90_mma.py, whatever the
    number of tokens. None if that does not serve them.
    """
    if not (w13.segments_of_one and w2.segments_of_one) or top_k > MAX_TOP_K:
        return None
    w13 = w13._replace(segments=w13.segments_of_one)
    if token_slots(top_k) <= 8:  # with more experts a program would have 32 warps
        w2 = w2._replace(segments=w2.segments_of_one)
    return w13, w2


def token_of_any_batch(top_k: int, w13: MixedOperand, w2: MixedOperand) -> LayerConfig:
    """Config of sm90_mma.py under `batch_invariant`: a warp has one segment of 16 rows of weights
    (`MixedOperand.segments`). (Of those kernels BLOCK_N counts rows, which 16 warps' rows may
    share, and stages are chunks that a thread has asked for.)
    """
    return find(_token_of_any_batch, (top_k, w13.segments, w2.segments))


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


def parts_of_row(columns: int, k_chunk: int, group: int, most: int) -> int:
    """Warps of sm90_mma.py that share a row, at most `most`: a power of two. Each has as many
    whole chunks, begins at a group of columns, and has some that the others do not have.
    """
    for parts in (16, 8, 4, 2):
        part = cdiv(cdiv(columns, k_chunk), parts) * k_chunk
        starts = part | (columns - part)
        if parts <= most and part * (parts - 1) < columns and starts % max(group, 64) == 0:
            return parts
    return 1


def _depth(chunks: int, most: int) -> int:
    """Chunks that a thread of sm90_mma.py asks for at once, at most `most`, so that few of its
    rounds' are past the row's end.
    """
    return cdiv(chunks, cdiv(chunks, most))


def _choose_token(
    top_k: int,
    K: int,
    I: int,  # noqa: E741
    k_chunk: int,
    group: int,
    chunk: int,
) -> LayerConfig:
    """Config of sm90_mma.py for a token alone.

    A thread of GEMM1 asks for all its weights at once where they are few, else in even rounds:
    what it asks for later it waits for alone.

    16 warps of GEMM2 are best where no multiprocessor has two programs. Elsewhere eight are: two
    programs of 16 warps do not fit if a token has more than two experts, with which registers
    grow. Of two experts with long rows they ask for four chunks, beside all of h (`rows_of_h` in
    sm90_mma.py); rows of 13 to 16 chunks a warp were measured with 16 warps alone.

    They ask for four chunks too where a warp has 12, or a token one expert. Rows of GEMM1 of more
    than 32 chunks have eight warps; shorter ones are slower with so many.
    """
    slots, programs = token_slots(top_k), cdiv(K, 16)
    chunks = cdiv(K, k_chunk)
    parts = parts_of_row(K, k_chunk, group, 2 if chunks <= 16 else 4 if chunks <= 32 else 8)
    chunks = cdiv(chunks, parts)
    gemm1 = GemmConfig(16, k_chunk, _depth(chunks, 14), parts)
    chunks_of_eight = cdiv(cdiv(I, k_chunk), max(1, 8 // slots))
    eight = programs > MULTIPROCESSORS and (slots > 2 or not 12 < chunks_of_eight <= 16)
    parts = parts_of_row(I, k_chunk, group, max(1, (8 if eight else 16) // slots))
    chunks = cdiv(cdiv(I, k_chunk), parts)
    if parts * slots > 8:
        most = 4 if chunks <= 6 else 2
    else:
        most = 8 if 1 < slots <= 4 and chunks <= 16 else 4
    gemm2 = GemmConfig(16 * slots, k_chunk, _depth(chunks, most), parts * slots)
    return LayerConfig(gemm1, gemm2, 1, chunk, SM90_MMA, direct=True)


def token_space(
    base: LayerConfig,
    top_k: int,
    K: int,
    I: int,  # noqa: E741
    group: int,
) -> tuple[list[LayerConfig], list[LayerConfig]]:
    """Configs of sm90_mma.py that the search (moe_ops.tuning) tries for GEMM1 and GEMM2."""
    k_chunk, slots = base.gemm1.block_k, token_slots(top_k)

    def gemms(columns: int, rows: int, all_parts: list[int]) -> list[GemmConfig]:
        found = [
            GemmConfig(rows, k_chunk, _depth(cdiv(cdiv(columns, k_chunk), parts), depth), warps)
            for parts in all_parts
            if parts_of_row(columns, k_chunk, group, parts) == parts
            for warps in [parts * rows // 16]
            for depth in (2, 3, 4, 6, 8, 14)
        ]
        return list(dict.fromkeys(found))

    ones = [base._replace(gemm1=gemm) for gemm in gemms(K, 16, [1, 2, 4, 8])]
    parts = [n for n in (1, 2, 4, 8, 16) if n * slots in (4, 8, 16)]
    return ones, [base._replace(gemm2=gemm) for gemm in gemms(I, 16 * slots, parts)]


def gemv_space(
    base: LayerConfig,
    top_k: int,
    K: int,
    I: int,  # noqa: E741
    bits: int,
) -> tuple[list[LayerConfig], list[LayerConfig]]:
    """Configs of gemv.py that the search (moe_ops.tuning) tries for GEMM1 and GEMM2, with 2 to 16
    loads a thread.
    """

    def gemms(columns: int) -> list[GemmConfig]:
        found = [
            GemmConfig(rows, _gemv_k(columns, bits, num_warps, loads), 1, num_warps)
            for rows in (2, 4, 8, 16)
            for num_warps in (1, 2, 4, 8)
            for loads in (1, 2)
            if rows * loads <= 16
            and (num_warps == loads == 1 or 2048 // bits * num_warps * loads < columns)
        ]
        return list(dict.fromkeys(found))

    ones = [base._replace(gemm1=gemm) for gemm in gemms(K)]
    return ones, [base._replace(gemm2=gemm) for gemm in gemms(top_k * I)]


def search_space(
    base: LayerConfig, average: float, bits: int, experts: int, K: int
) -> list[tuple[list[LayerConfig], list[LayerConfig]]]:
    """Configs that the search (moe_ops.tuning) tries: for each BLOCK_M a list for GEMM1 and one
    for GEMM2.

    Args:
        average: average rows of an expert.
        bits: bits of a weight.
        experts: number of experts.
        K: rows of GEMM2's weights.
    """
    if base.kernel == SM90_PACKED:  # which has one tile
        return [([base], [base])]
    if base.kernel == SM90_WGMMA:
        return _wgmma_space(base, average, experts, K)
    few = [t for t in _ROWS_AND_WARPS if average / 2 <= t <= max(8, 8 * average)]
    space = []
    for block_m in [8] if base.direct else few or [128]:
        gemms = candidates(block_m, bits)
        ones = [base._replace(block_m=block_m, gemm1=gemm, gemm2=gemms[0]) for gemm in gemms]
        space.append((ones, [one._replace(gemm2=one.gemm1) for one in ones]))
    return space


# BLOCK_N and warps that the search tries, by BLOCK_M. With 16 and 32 tokens, each warp reads all
# of x for its 32 or 64 rows.
_ROWS_AND_WARPS = {
    8: ((32, 2), (64, 2), (128, 2)),
    16: ((64, 2), (128, 4), (256, 4), (256, 8)),
    32: ((64, 2), (128, 4), (256, 4), (256, 8)),
    64: ((64, 4), (128, 4)),
    128: ((64, 4), (128, 8)),
}


def candidates(block_m: int, bits: int) -> list[GemmConfig]:
    """Configs that the search tries: accumulators and operands of a block fit into its registers,
    and BLOCK_K is 64 or 128 bytes of a row.
    """
    found = []
    for block_n, num_warps in _ROWS_AND_WARPS[block_m]:
        for block_k in (64, 128) if bits == 8 else (128, 256):
            for num_stages in (3, 4, 6):
                size = block_n * block_k * bits // 8  # bytes of weights
                if 1024 <= size <= 16384 and size * num_stages <= 65536:
                    found.append(GemmConfig(block_n, block_k, num_stages, num_warps))
    return found


def choose_wgmma(
    rows: int,
    groups: int,
    K: int,
    I: int,  # noqa: E741
    bits: int,
    chunk: int,
    many: int = 0,
    scaling: str = "",
) -> LayerConfig | None:
    """Config of the two GEMMs of sm90_wgmma.py, or None if other kernels are faster for so many
    rows. An expert's rows should usually fit one block.

    More blocks a multiprocessor are faster than more stages, which leave less of the L1 cache for
    scales. A GEMM2 of few tiles is faster with SPLIT_K, which fills waves of blocks. With
    BLOCK_K = 256 products are waited for half as often as with 128.

    About half of the experts of which each has 64 rows on average have more, and a second block
    takes as long as the first: so blocks of 80 rows are faster from there on, and slower where
    experts have several of either. (Blocks of 24 rows are slower than those of 32.)

    Blocks of 48 rows beside 32 and 64 serve averages between theirs. An average of 24 rows fits
    32.

    A last wave that is nearly empty is avoided by SPLIT_K = 2 where programs are long: it takes as
    long as a full one.

    For many rows, the kernels of sm80_mma.py decode each 4-bit weight as often, but more slowly;
    of 8 bits they are ahead from more than 64 rows an expert on.
    """
    if bits == 8 and rows / groups > MAX_ROWS_OF_8_BITS:
        return None
    chosen = _wgmma(rows, groups, K, I, bits, chunk, many, scaling)
    if bits == 8:
        return _in_8_bits(chosen, groups, rows / groups, K, I)
    blocks = max(min(rows, groups), cdiv(rows, chosen.block_m))  # an estimate
    if scaling == "sums" and scales_sums(chosen):
        chosen = _tiles_of_sums(chosen, blocks, K, I)
    else:
        chosen = _tiles_of_4_bits(chosen, blocks, K, I, many, scaling, rows / groups)
    held = 4 if chosen.block_m <= (8 if scaling == "sums" else 16) else 3
    if chosen.block_m > 32 or chosen.gemm2.num_warps == 8:
        held = 2  # blocks of a multiprocessor
    if I >= LONG_ROWS and _short_last_wave(blocks * cdiv(K, chosen.gemm2.block_n), held):
        chosen = chosen._replace(split_k=2)  # three waves of half the time
    return chosen


def _tiles_of_4_bits(
    chosen: LayerConfig,
    blocks: int,
    K: int,
    I: int,  # noqa: E741
    many: int,
    scaling: str,
    average: float,  # rows of an expert
) -> LayerConfig:
    """Narrower tiles beside blocks of 8 and 16 rows: in GEMM1 of streamed int4 (beside 8 alone)
    and of weights that are scaled in their natural order, in GEMM2 of long rows of the latter
    beside 16, and where rows are no whole chunks.
    """
    block_m = chosen.block_m
    wide = block_m == 8 and chosen.gemm1 == GemmConfig(128, 256, 2, 4)
    if many == STAGES_OF_STREAMED and wide:
        # 64 rows in three stages are ahead of 128 in two. (More columns than 4096: not timed.)
        return chosen._replace(gemm1=GemmConfig(64, 256, 3, 4))
    if not many and scaling == "weights" and block_m <= 16:
        narrow = GemmConfig(64, 256, 2, 4)
        if K % 256 == 0:
            chosen = chosen._replace(gemm1=narrow)
        if I % 256 == 0 and I >= LONG_W2 and block_m == 16:
            chosen = chosen._replace(gemm2=narrow)
    several = average < 1 and blocks * cdiv(I, 64) > 8 * MULTIPROCESSORS  # tiles of a program
    if block_m > 16 or (many and not several):
        return chosen
    # One chunk a K tile, so more stages of fewer rows. (Other formats in their natural order: not
    # measured.) Prepared mxfp4 loses by it beside 32 rows, and where few programs have a second
    # tile.
    narrow = GemmConfig(64, 128, 4, 4)
    return chosen._replace(
        gemm1=narrow if K % 128 else chosen.gemm1, gemm2=narrow if I % 128 else chosen.gemm2
    )


def _tiles_of_sums(
    chosen: LayerConfig,
    blocks: int,
    K: int,
    I: int,  # noqa: E741
) -> LayerConfig:
    """Tiles of int4 whose sums are scaled: narrower ones in GEMM1 beside 8 rows, and in GEMM2 of
    long rows beside 8 and 16; beside 32 rows eight warps, unless two blocks a multiprocessor would
    leave a short last wave.
    """
    block_m, tiles = chosen.block_m, blocks * cdiv(K, 128)
    deep = GemmConfig(64, 256, 3, 4)
    if K % 256 == 0 and block_m == 8:
        chosen = chosen._replace(gemm1=deep)
    if I % 256 or I < LONG_W2:
        return chosen
    if block_m < 32:
        return chosen._replace(gemm2=GemmConfig(64, 256, 2, 4) if block_m == 8 else deep)
    if _short_last_wave(tiles, 2):
        return chosen
    return chosen._replace(gemm2=EIGHT_WARPS, split_k=_split_of_two_blocks(chosen, tiles))


def _split_of_two_blocks(chosen: LayerConfig, tiles: float) -> int:
    """SPLIT_K of a GEMM2 of which two blocks fit on a multiprocessor."""
    return 1 if 2 * tiles > 3 * MULTIPROCESSORS else chosen.split_k


def _in_8_bits(
    chosen: LayerConfig,
    groups: int,
    average: float,  # rows of an expert
    K: int,
    I: int,  # noqa: E741
) -> LayerConfig:
    """The config of weights of 8 bits with wider tiles beside few rows, which wait for products
    half as often.
    """
    if chosen.block_m > 32 or min(K, I) < 256:
        return chosen
    tiles = groups * (1 - exp(-average)) * cdiv(K, 128)  # of GEMM2: of experts that have a row
    if chosen.block_m == 32:
        chosen = chosen._replace(gemm1=EIGHT_WARPS)
        if _short_last_wave(tiles, 2):  # as Mixtral-8x22B would have
            return chosen
        return chosen._replace(gemm2=EIGHT_WARPS, split_k=_split_of_two_blocks(chosen, tiles))
    wide, narrow = GemmConfig(128, 256, 2, 4), GemmConfig(64, 256, 2, 4)
    few = chosen.block_m == 8
    if average >= 1 and K % 128:
        deep = GemmConfig(64, 256, 3 if few else 4, 4)
        return chosen._replace(gemm1=deep, gemm2=deep)
    if chosen.split_k > 1:
        chosen = chosen._replace(split_k=3 if few else 2)
    chosen = chosen._replace(gemm1=narrow if few else wide, gemm2=wide if few else chosen.gemm2)
    if I >= LONG_W2 and _short_last_wave(tiles, 3):
        return chosen._replace(gemm2=narrow)
    if I >= LONG_W2 and not few and not _short_last_wave(tiles, 2):
        return chosen._replace(gemm2=wide, split_k=_split_of_two_blocks(chosen, tiles))
    return chosen


def _wgmma(
    rows: int,
    groups: int,
    K: int,
    I: int,  # noqa: E741
    bits: int,
    chunk: int,
    many: int = 0,
    scaling: str = "",
) -> LayerConfig:
    average = rows / groups
    few = 6 if scaling == "sums" else 4  # rows an expert, up to which blocks of 8 are best
    block_m = 8 if average <= few else 16 if average <= 10 else 32 if average <= 30 else 64
    if many and 30 < average <= (44 if bits == 8 else 38):
        block_m = 48
    if many and bits == 4 and 56 < average <= 80:
        block_m = 80

    def gemm(columns: int, few: bool) -> GemmConfig:
        wide = bits == 4 and columns % 256 == 0
        if block_m == 80:
            return GemmConfig(128, 128, many, 4)
        if block_m == 48:
            return GemmConfig(128, 128, 4 if bits == 8 else 3, 4)
        if block_m == 64:  # four warps lack registers for accumulators and operands
            # (of prepared e2m1 they have room)
            narrow = GemmConfig(128, 128, 4, 4 if many == STAGES_OF_WORDS else 8)
            return GemmConfig(128, 256, 2, 8) if wide else narrow
        if not wide:
            return GemmConfig(128, 128, 3, 4)
        return GemmConfig(64 if block_m == 8 and few else 128, 256, 2, 4)

    few = min(rows, groups) * cdiv(K, 128) <= 2 * MULTIPROCESSORS
    split_k = (3 if block_m == 32 else 2) if few and block_m not in (48, 80) else 1
    gemm1, gemm2 = gemm(K, average < 1), gemm(I, False)
    return LayerConfig(gemm1, gemm2, block_m, chunk, SM90_WGMMA, split_k=split_k)


def _short_last_wave(tiles: float, blocks: int) -> bool:
    """Whether tiles are a wave of `blocks` a multiprocessor and a second one of at most half as
    many.
    """
    return 1 < tiles / (blocks * MULTIPROCESSORS) <= 1.5


def fits_wgmma(block_m: int, average: float) -> bool:
    """Whether this BLOCK_M of sm90_wgmma.py may be the best for experts of so many rows on
    average.

    Blocks hold an expert's rows, so that weights are read once, as far as the largest block
    allows, and are not mostly empty.
    """
    return min(average, 64) <= block_m < max(9, 4 * average)


def _wgmma_space(
    base: LayerConfig, average: float, experts: int, K: int
) -> list[tuple[list[LayerConfig], list[LayerConfig]]]:
    """`search_space` of the kernels of sm90_wgmma.py."""
    gemms = [(64, 128, 4, 4), (64, 256, 2, 4), (64, 256, 3, 4), (64, 256, 4, 4)]
    gemms += [(128, 128, 3, 4), (128, 128, 4, 4), (128, 256, 2, 4)]
    gemms += [(128, 128, 4, 8), (128, 256, 2, 8), (128, 256, 3, 8)]
    space = []
    tried = {8, 16, 32, 64, base.block_m}
    for block_m in [t for t in sorted(tried) if fits_wgmma(t, average)] or [64]:
        whole = base._replace(block_m=block_m, split_k=1)
        ones = [
            whole._replace(gemm1=GemmConfig(*g), gemm2=GemmConfig(*g))
            for g in gemms
            # with two operands a thread has rows of both halves of a tile
            if block_m in (8, 16, 32, 64) or (g[0], g[3]) == (128, 4)
        ]
        twos = ones + [
            one._replace(split_k=split_k)
            for one in ones
            for split_k in range(2, MAX_SPLIT_K + 1)
            if min(1, average) * experts * cdiv(K, one.gemm2.block_n) * split_k <= 800
        ]
        space.append((ones, twos))
    return space


def padded(columns: int) -> int:
    """Upper bound of the columns of a row of x or h in whole chunks of sm90_wgmma.py."""
    return cdiv(columns, 128) * 128 if columns % 64 == 0 else columns


def permuted_elements(pairs, K: int):
    """fp32 elements of the workspace before the scales of quantized rows: these rows in 16 bits.
    int or SymInt.
    """
    return round_up(cdiv(pairs * padded(K), 2), 32)


def y_rows(pairs):
    """Rows of y (fp32) in the workspace, with those of SPLIT_K partial sums for few pairs. int or
    SymInt.
    """
    return maximum(pairs, minimum(MAX_SPLIT_K * pairs, SPLIT_ROWS))


def multiplies_e4m3(config: LayerConfig, w2: MixedOperand, split_k: int, pairs: int) -> bool:
    """Whether sm90_wgmma.py multiplies int4_w4a8 in e4m3, which decodes with fewer instructions,
    or in bf16, which takes fewer registers beside many rows.

    Blocks of 64 rows have no registers for it, and spill. One token whose GEMM2 has few programs
    of many K tiles is faster in bf16.
    """
    steps = cdiv(cdiv(w2.K, w2.block_k(config.gemm2)), split_k)
    programs = min(pairs, w2.E) * cdiv(w2.N, config.gemm2.block_n) * split_k
    few = programs <= 2 * MULTIPROCESSORS and steps > FEW_STEPS
    return config.block_m <= 32 and not few


def scales_sums(config: LayerConfig) -> bool:
    """Whether sm90_wgmma.py scales sums of int4 with zero points (`MixedOperand.scaling_sums`).
    Beside more rows it was faster to scale weights.
    """
    return config.block_m <= SCALED_SUMS


def split_k_of(w2: MixedOperand, config: GemmConfig, split_k: int, pairs: int) -> int:
    """SPLIT_K of GEMM2: at most `split_k`, and at most what y has room for; 1 if a program sums
    segments of a row apart.

    Every program has at least one K tile. Without one it would not wait for GEMM1, and would write
    y over GEMM1's x.
    """
    if w2.segments > 1:
        return 1
    steps = cdiv(w2.K, w2.block_k(config))
    split_k = min(split_k, y_rows(pairs) // pairs)
    return cdiv(steps, cdiv(steps, split_k))


def blocks_together(block_m: int, K: int) -> int:
    """GROUP_M of sm90_wgmma.py: as many blocks as have GROUP_BYTES of x, of short rows half, so
    that the L2 keeps them for all tiles of weight rows; 0 of blocks that hold all rows of an
    expert.
    """
    if block_m < 64:
        return 0
    group = GROUP_BYTES if K > SHORT_ROWS else GROUP_BYTES // 2
    return max(4, group // (2 * block_m * K))


def pair_bucket(pairs: int) -> int:
    """The least of PAIR_BUCKETS that is >= `pairs`, 0 if there is none."""
    return next((most for most in PAIR_BUCKETS if pairs <= most), 0)


def max_unsorted_pairs(pairs: int, experts: int) -> int:
    """The most pairs for which programs of the GEMMs find their blocks themselves, without a
    sorting kernel; 0 if a sorting kernel runs.

    Where many pairs share few experts, the sorting kernel is faster.
    """
    return PAIR_BUCKETS[0] if pairs <= min(PAIR_BUCKETS[0], experts) else 0
