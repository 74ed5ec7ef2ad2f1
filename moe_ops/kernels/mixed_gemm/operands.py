"""Operands of the mixed GEMM: weights of 4 to 8 bits, multiplied with 16-bit activations, as the
kernels take them. torch alone.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.kernels.configs import DECODED, LEVELS, GemmConfig
from moe_ops.kernels.launch import Constant, Gpu, Pointer, Specialized, unprefixed
from moe_ops.meta.scales import TRITON_E2M1, unit_of_planes
from moe_ops.meta.workspace import cdiv
from moe_ops.schemes import ELEMENT_FORMATS, QuantDesc, get_scheme

# `MixedOperand.stages_of_many`
STAGES_OF_EIGHT_WARPS = 2  # of other weights of 4 bits that are scaled themselves
STAGES_OF_WORDS = 3  # of prepared e2m1
STAGES_OF_STREAMED = 4  # of `MixedOperand.streams`, and in 8 bits of a scale for each row

E2M1 = ("e2m1", "e2m1_words")
# FORMAT and SCALE of weights whose token has the bits of many: sm90_mma.py and sm90_wgmma.py gave
# the same on a GPU
SAME_BITS = (("int4", "weight"), ("int4", "sum"), ("e2m1", "e8m0"))
# columns of a row up to which it has one sum there: 16 chunks of 128, which a thread of GEMM1 of
# sm90_mma.py asks for at once
MAX_IN_ONE = 2048


class Format(NamedTuple):
    """A scheme's weights, in the terms of kernels/mixed_gemm/sm80_mma.py."""

    name: str  # FORMAT
    scale: str  # SCALE
    group: int  # columns that share a scale, 0 for all
    bits: int
    storage: torch.dtype
    two_levels: bool = False  # whether scales and minima are codes under factors of 256 columns

    @property
    def scales_weights(self) -> bool:
        """Whether weights are multiplied by their scales before the product, and sums of groups
        are not held apart.
        """
        scaled = ("weight", "minimum", "e8m0", "e4m3")
        return self.scale in scaled and self.x_bits == 16

    @property
    def high_bits(self) -> int:
        """Bits of a weight above its low four, of formats in planes."""
        return ELEMENT_FORMATS[self.name].high_bits if self.name in ELEMENT_FORMATS else 0

    @property
    def x_bits(self) -> int:
        """Bits of a number of both operands of the products."""
        return 8 if self.name == "int4_e4m3" else 16


def describe(scheme: str) -> Format | None:
    """The Format of a scheme's weights. None for plain weights, for weights that the kernels of
    `gemm` multiply with activations of the same format, and for those of other number formats than
    DECODED, which no kernel decodes.
    """
    found = get_scheme(scheme)
    desc, activation = found.weight, found.activation
    if desc is None or desc.dtype not in DECODED:
        return None
    alike = activation is not None and activation.dtype == desc.dtype in ("e4m3", "int8")
    if alike and not desc.is_mx:
        return None
    kind = (desc.format.bits, desc.storage_dtype, desc.two_levels)
    if desc.minimum or desc.dtype in ("int5", "int6"):
        return Format(desc.dtype, "minimum", max(desc.group.cols, 0), *kind)
    if desc.is_mx or desc.scale_dtype == torch.float8_e4m3fn:
        return Format(desc.dtype, "e8m0" if desc.is_mx else "e4m3", desc.group.cols, *kind)
    if desc.group.is_tensor or desc.group.is_row:
        return Format(desc.dtype, "end", 0, *kind)
    return Format(desc.dtype, "block" if desc.group.rows > 1 else "sum", desc.group.cols, *kind)


format_of = cache(describe)  # for launches; Dynamo warns of cached functions in traced code


class WeightStride(NamedTuple):
    """Strides of a weight (E, N, bytes of K columns)."""

    e: Specialized
    n: Specialized
    k: Specialized


@unprefixed
class MixedPointers(NamedTuple):
    """Scales of a weight, zero points of the same shape (bytes) or minima of the same shape and
    dtype, an fp32 factor for each expert (global scales) or each of its rows (channel and global
    scales), and a bias (E, N). In two levels scales and minima are int8, and factors are fp16,
    one of 256 columns of a row for scales or beside minima two (`schemes.QuantDesc`).

    Kernels take these pointers before all numbers, because ptxas merges loads of neighbouring
    parameters, which delays the loads of weights if each tensor's strides stand after its pointer.
    """

    w_scale: Pointer
    w_zero: Pointer
    w_factor: Pointer
    bias: Pointer


@unprefixed
class MixedStrides(NamedTuple):
    """Strides of MixedPointers. Those of an absent tensor are 0."""

    w_scale_stride_e: Specialized
    w_scale_stride_n: Specialized  # between rows, or between blocks of rows
    w_scale_stride_g: Specialized  # between groups of columns
    w_zero_stride_e: Specialized
    w_zero_stride_n: Specialized
    w_zero_stride_g: Specialized
    w_factor_stride_e: Specialized
    w_factor_stride_n: Specialized
    bias_stride_e: Specialized
    bias_stride_n: Specialized


@unprefixed
class Decoding(NamedTuple):
    """How a kernel decodes a weight."""

    FORMAT: Constant
    SCALE: Constant
    SCALE_GROUP: Constant  # columns that share a scale, 0 for all


class MixedOperand(NamedTuple):
    """A weight with its scales, and what follows from its scheme and shape."""

    data: Tensor  # bytes, (E, N, bytes of K columns)
    stride: WeightStride
    pointers: MixedPointers
    strides: MixedStrides
    format: Format  # for sm80_mma.py and gemv.py
    wgmma_format: Format  # for sm90_wgmma.py
    E: int
    N: int
    K: int
    k_chunk: int  # K_CHUNK of sm90_wgmma.py (`_k_chunk`), 0 if it cannot take such rows
    chunk_bytes: int  # bytes of k_chunk columns of the weight
    padded_k: int  # columns of a row in whole chunks
    # contiguous scales start at a multiple of so many in every row, and are a multiple of so many
    scale_align: int
    # equal parts of a row that sm90_mma.py sums apart for a token under batch_invariant, and then
    # sm90_wgmma.py too; 0 of weights whose bits of both were not shown to be the same
    segments_of_one: int
    scaling: str  # what sm90_wgmma.py may scale beside few rows (`_scaling`)
    segments: int = 1  # those of this call: `configs.in_segments`

    @property
    def scale(self) -> Tensor:
        """Its scales."""
        assert self.pointers.w_scale is not None
        return self.pointers.w_scale

    @property
    def has_zero(self) -> bool:
        """Whether it has zero points or minima."""
        return self.pointers.w_zero is not None

    @property
    def order(self) -> int:
        """W_BITS of device/permutation.py: the order of columns that sm90_wgmma.py takes."""
        of = self.format
        return 2 if of.name in LEVELS else 4 if of.high_bits else of.bits

    @property
    def streams(self) -> bool:
        """Whether sm90_wgmma.py may decode it without a wait between K tiles: int4 with one scale
        for a chunk, which multiplies the weights themselves.
        """
        of = self.wgmma_format
        whole = self.k_chunk > 0 and of.group % self.k_chunk == 0
        return of.name == "int4" and of.scale == "weight" and whole and not self.has_zero

    @property
    def stages_of_many(self) -> int:
        """How many K tiles of 128 columns blocks of 80 rows, or in 8 bits of 48, have in shared
        memory, so that two of four warps fit on a multiprocessor; 0 of weights that do not run in
        such blocks. Prepared weights (STAGES_OF_WORDS) have their scales there, too. Others of 4
        bits lack registers in four warps, and have two tiles of 256 columns for eight.
        """
        of = self.wgmma_format
        words = of.name == "e2m1_words" and self.k_chunk == 128
        whole_rows = of.bits == 8 and of.scale == "end" and not self.has_zero
        if self.streams or whole_rows:
            return STAGES_OF_STREAMED
        if words:
            return STAGES_OF_WORDS
        eight_warps = of.bits == 4 and of.scales_weights and self.k_chunk == 128
        return STAGES_OF_EIGHT_WARPS if eight_warps else 0

    def in_16_bits(self) -> MixedOperand:
        """An operand of products in e4m3, for products in bf16 instead."""
        return self._replace(wgmma_format=self.format)

    def scaling_sums(self) -> MixedOperand:
        """The operand that scales sums of groups, if its `scaling` is "sums", or as it is."""
        if self.scaling != "sums" or self.wgmma_format.scale == "sum":
            return self
        return self._replace(wgmma_format=_with_sums(self.wgmma_format))

    @property
    def scales_in_place(self) -> bool:
        """Whether the scales of an expert are contiguous and start at a multiple of 16 bytes."""
        scale = self.scale
        expert, row, one = scale.stride()
        return (scale.data_ptr() | expert) % 16 == 0 and (row, one) == (scale.shape[2], 1)

    def chunks(self, config: GemmConfig) -> int:
        """Chunks of a BLOCK_K of sm90_wgmma.py, of which a segment has whole ones: one if a
        row's last chunk may overlap the one before.
        """
        if self.K % self.k_chunk:
            return 1
        chunks = max(1, config.block_k // self.k_chunk)
        if self.segments > 1:
            chunks = math.gcd(chunks, self.K // self.segments // self.k_chunk)
        return chunks

    def block_k(self, config: GemmConfig) -> int:
        """BLOCK_K of sm90_wgmma.py."""
        return self.chunks(config) * self.k_chunk


class _Derived(NamedTuple):
    """The fields of a MixedOperand that follow from its scheme and shape."""

    format: Format
    wgmma_format: Format
    E: int
    N: int
    K: int
    k_chunk: int
    chunk_bytes: int
    padded_k: int
    scale_align: int
    segments_of_one: int
    scaling: str


def _wgmma_format(of: Format, scales: torch.dtype, activation: QuantDesc | None = None) -> Format:
    """The Format that sm90_wgmma.py uses. "int4_e4m3" is int4 whose products with e4m3 scales are
    rounded to e4m3 and multiply activations in e4m3 that have one scale a row.

    It scales int4 weights with bf16 scales themselves, rounded to bf16, instead of the sums (of
    those with zero points beside few rows the sums, too: `MixedOperand.scaling_sums`).
    Then sums of groups take no registers and no multiplications, and nothing waits for them.
    Scales of other dtypes would lose bits in bf16. Levels are scaled themselves whatever the dtype
    of scales is, by two instructions a pair instead of one; so is int8 whose groups are shorter
    than a chunk (Q8_0 has 32 columns), which has no sums of one scale.
    """
    in_e4m3 = activation is not None and activation.dtype == "e4m3" and activation.group.cols == -1
    if in_e4m3 and of.name == "int4" and of.scale == "e4m3" and of.group % 128 == 0:
        return of._replace(name="int4_e4m3")
    scaled = of.name in LEVELS or (of.name == "int4" and scales == torch.bfloat16)
    scaled = scaled or (of.name == "int8" and of.group == 32)
    return of._replace(scale="weight") if scaled and of.scale == "sum" else of


def _k_chunk(K: int, of: Format) -> int:
    """K_CHUNK of sm90_wgmma.py: the columns that are permuted and decoded together. They share one
    scale if sums are scaled. 0 if the kernels cannot take such rows.

    A row need not have whole chunks: the last chunk is then the last K_CHUNK columns of the row,
    and x is zero at those that belong to the chunk before. (Chunks of 64 columns, which 2880 is a
    multiple of, take twice as many loads of scales.)
    """
    if of.high_bits:  # a unit of planes, if its high bits have the 16 bytes that TMA copies
        unit = unit_of_planes(K)
        return unit if unit * of.high_bits >= 128 else 0
    if K % 64:
        return 0
    scaled = of.name in E2M1 or of.scale in ("weight", "minimum")
    if scaled and of.bits == 4 and K >= 128:
        return 128
    return 64 if of.bits == 8 or of.group == 64 or K % 128 else 128


def _segments_of_one(of: Format, K: int, k_chunk: int, has_zero: bool) -> int:
    """Two of a long row, so that two warps share it, if the halves are whole chunks and groups.

    Kernels for many rows need registers for both sums, so shorter rows have one: one warp is fast
    enough for a token's.
    """
    if (of.name, of.scale) not in SAME_BITS or has_zero or k_chunk == 0 or K % k_chunk:
        return 0
    half = K // 2
    halved = K > MAX_IN_ONE and K % 256 == 0 and half % max(1, of.group) == 0
    return 2 if halved else 1


def _scaling(of: Format, K: int, k_chunk: int, has_zero: bool) -> str:
    """What sm90_wgmma.py may scale beside few rows: "weights", or "levels" of weights that are
    looked up, or "sums" of groups of int4, of which a chunk of 128 columns has one scale, if
    scales are not bf16 or weights have zero points. To take these off exactly and then scale
    weights would take four instructions more for eight of them. "" of all others.
    """
    whole = k_chunk == 128 and K % 128 == 0 < of.group and of.group % 128 == 0
    if of.name == "int4" and whole and (of.scale == "sum" or (of.scale == "weight" and has_zero)):
        return "sums"
    if of.name in LEVELS:
        return "levels"
    return "weights" if of.scales_weights else ""


@cache
def _with_sums(of: Format) -> Format:
    return of._replace(scale="sum")


@lru_cache(maxsize=4096)
def _derived(
    scheme: str,
    layout: str,
    shape: tuple[int, ...],
    scale_dtype: torch.dtype,
    scale_columns: int,  # scales in a row
    strides: tuple[tuple[int, ...], ...],  # of scales and of zero points
) -> _Derived:
    """What follows from a weight's scheme and shape."""
    of = format_of(scheme)
    assert of is not None, scheme
    if layout == TRITON_E2M1:
        of = of._replace(name="e2m1_words")
    for_wgmma = _wgmma_format(of, scale_dtype, get_scheme(scheme).activation)
    E, N, row_bytes = shape
    K = row_bytes * 8 // of.bits
    k_chunk = _k_chunk(K, for_wgmma)
    padded_k = cdiv(K, k_chunk) * k_chunk if k_chunk else K
    together = 1
    if all([len(found) == 3 and found[2] == 1 for found in strides]):
        together = math.gcd(
            16, scale_columns, *[stride for found in strides for stride in found[:2]]
        )
    chunk_bytes = k_chunk * of.bits // 8
    segments = _segments_of_one(for_wgmma, K, k_chunk, len(strides) > 1)
    scaling = _scaling(for_wgmma, K, k_chunk, len(strides) > 1)
    return _Derived(
        of, for_wgmma, E, N, K, k_chunk, chunk_bytes, padded_k, together, segments, scaling
    )


def _check_factors(name: str, factor: Tensor | None, in_pairs: bool) -> None:
    """Raise ValueError unless the factors of a row lie one after the other, pairs of them in whole
    words.
    """
    assert factor is not None
    *rows, one = factor.stride()
    odd = in_pairs and any([place % 2 for place in (factor.storage_offset(), *rows)])
    if one != 1 or odd:
        raise ValueError(
            f"{name} must have a channel_scale of contiguous rows that begin at multiples of "
            f"4 bytes, got strides {factor.stride()} from element {factor.storage_offset()} on; "
            "call .clone() on it once"
        )


def operand(
    name: str,
    data: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    global_scale: Tensor | None,
    channel_scale: Tensor | None,
    scheme: str,
    gpu: Gpu,
    layout: str = "",
    bias: Tensor | None = None,  # (E, N)
) -> MixedOperand:
    """The MixedOperand of an op's tensors. Raises ValueError if the dtype is not the scheme's."""
    scale_strides: tuple[int, ...] = scale.stride()
    zero_strides: tuple[int, ...] = (0, 0, 0) if zero is None else zero.stride()
    strides = (scale_strides,) if zero is None else (scale_strides, zero_strides)
    found = _derived(scheme, layout, data.shape, scale.dtype, scale.shape[-1], strides)
    expected = found.format.storage
    if data.dtype != expected:
        raise ValueError(
            f"{name} must have dtype {expected} for scheme {scheme}, got {data.dtype}; "
            "quantize it with moe_ops.quantize"
        )
    if not gpu.native:  # compilers for such GPUs do not know e4m3
        data = data.view(torch.uint8) if data.dtype == torch.float8_e4m3fn else data
        scale = scale.view(torch.uint8) if scale.dtype == torch.float8_e4m3fn else scale
    if len(scale_strides) != 3:
        scale_strides = (scale_strides[0], 0, 0)
    if found.format.group == 0:  # one scale a row or a tensor
        scale_strides, zero_strides = (*scale_strides[:2], 0), (*zero_strides[:2], 0)
    factor = channel_scale if global_scale is None else global_scale
    factor_strides = (0, 0) if factor is None else (*factor.stride(), 0)[:2]
    if found.format.two_levels:
        _check_factors(name, factor, zero is not None)
    bias_strides = (0, 0) if bias is None else bias.stride()
    return MixedOperand(
        data,
        WeightStride(*data.stride()),
        MixedPointers(scale, zero, factor, bias),
        MixedStrides(*scale_strides, *zero_strides, *factor_strides, *bias_strides),
        *found,
    )
