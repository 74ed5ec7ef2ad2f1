"""What follows for launches of the mixed GEMMs (weights of 4 to 8 bits, 16-bit activations) from
their configs and sizes, and when those of SM90 may run. torch alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from moe_ops import environment
from moe_ops.kernels.configs import LEVELS, PAIR_BUCKETS, GemmConfig, LayerConfig
from moe_ops.kernels.launch import INTERPRETED, Gpu
from moe_ops.kernels.mixed_gemm.operands import MixedOperand
from moe_ops.meta.workspace import cdiv, maximum, minimum, round_up

SMALLEST_BLOCK_M = 8  # tokens: the columns of one tensor-core instruction
FORMATS = (
    "int4",
    "int4_e4m3",
    "e2m1",
    "e2m1_words",
    "int5",
    "int6",
    "int8",
    "e4m3",
    *LEVELS,
)  # of sm90_wgmma.py and gemv.py
MAX_SPLIT_K = 3  # programs that share the reduction of a tile of GEMM2, if it has few tiles
SPLIT_ROWS = 1024  # rows of y in all SPLIT_K partial sums
SCALED_SUMS = 32  # BLOCK_M up to which int4 with bf16 scales and zero points has sums scaled
FEW_STEPS = 8  # K tiles of a program of GEMM2 that is short
GROUP_BYTES = 24 << 20  # of rows of x that the L2 (50 MB) keeps
SHORT_ROWS = 2048  # columns, up to which half of them is faster
MAX_TOP_K = 16  # experts of a token of sm90_mma.py
ALIGNMENT = 64  # elements of h before the same with permuted columns, whose address TMA takes


@cache
def on_sm90(device: int) -> bool:
    """Whether a CUDA device has the instructions of sm90_wgmma.py, and Triton compiles them."""
    if device < 0 or INTERPRETED or environment.capability(device)[0] != 9:
        return False
    return environment.why_no_gluon(environment.TRITON) is None


def token_slots(top_k: int) -> int:
    """Warps of a program of GEMM2 of sm90_mma.py, each of which has an expert."""
    return 1 << (top_k - 1).bit_length()


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


def padded(columns: int) -> int:
    """Upper bound of the columns of a row of x or h in whole chunks of sm90_wgmma.py."""
    return cdiv(columns, 128) * 128 if columns % 64 == 0 else columns


def permuted_elements(pairs: Any, K: int) -> Any:
    """fp32 elements of the workspace before the scales of quantized rows: these rows in 16 bits.
    int or SymInt.
    """
    return round_up(cdiv(pairs * padded(K), 2), 32)


def y_rows(pairs: Any) -> Any:
    """Rows of y (fp32) in the workspace, with those of SPLIT_K partial sums for few pairs. int or
    SymInt.
    """
    return maximum(pairs, minimum(MAX_SPLIT_K * pairs, SPLIT_ROWS))


def multiplies_e4m3(
    config: LayerConfig, w2: MixedOperand, split_k: int, blocks: int, gpu: Gpu
) -> bool:
    """Whether sm90_wgmma.py multiplies int4_w4a8 in e4m3, which decodes with fewer instructions,
    or in bf16, which takes fewer registers beside many rows. `blocks`: those of few rows, one an
    expert.

    Blocks of 64 rows have no registers for it, and spill. One token whose GEMM2 has few programs
    of many K tiles is faster in bf16.
    """
    steps = cdiv(cdiv(w2.K, w2.block_k(config.gemm2)), split_k)
    programs = blocks * cdiv(w2.N, config.gemm2.block_n) * split_k
    few = programs <= 2 * gpu.multiprocessors and steps > FEW_STEPS
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


def max_unsorted_pairs(pairs: int, experts: int) -> int:
    """The most pairs for which programs of the GEMMs find their blocks themselves, without a
    sorting kernel; 0 if a sorting kernel runs.

    Where many pairs share few experts, the sorting kernel is faster.
    """
    return PAIR_BUCKETS[0] if pairs <= min(PAIR_BUCKETS[0], experts) else 0
