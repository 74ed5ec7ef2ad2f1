"""Rows with scales of blocks as the kernels around the grouped GEMMs write them, and how these
(scatter_blocks.py, activate_blocks.py) quantize. Imported at first launch only.

Legend: M tokens, S = M * top_k pairs, K hidden size, I intermediate size, N columns of the first
GEMM's output (2 I if gated, else I), SIZE columns that share a scale. `rows` (S,) is the row of
each pair in the GEMMs' operands, or -1 if its expert is not here; `ends` (E,) the row after each
expert's last pair.

Data of experts follow one another. Their scales do not: those of each expert begin a tile of 128
rows, of which rows past the expert's last are not written. They multiply rows of the product that
are not stored. Padding columns are multiplied with the zeros past K, and are written as zeros.

WHOLE says where the global scale of nvfp4 comes from:
    ""         there is none
    "known"    1 / one scale that is known
    "experts"  1 / one scale that is known for each expert
    "amax"     computed from largest magnitudes
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.backends.cutlass.schemes import BLOCK_SCALED
from moe_ops.kernels.device.e4m3 import (
    clamp,
    largest_magnitude,
    nearest,
    quotient,
    reciprocal,
    stored,
)
from moe_ops.kernels.device.experts import ends_of_experts, expert_of_row
from moe_ops.kernels.launch import Constant, Gpu, Pointer, Runtime, Specialized, unprefixed
from moe_ops.kernels.place.layout import block_e
from moe_ops.kernels.rows.emulated import power_of_two
from moe_ops.kernels.rows.rounding import Rounding, rounding_of
from moe_ops.meta.workspace import carve, round_up

CHUNK = 1024  # columns that a program quantizes; scales of so many columns fill whole tiles


@triton.jit
def place_of_scales(ends_ptr, row, E, BLOCK_E: tl.constexpr):
    """(expert of a row, row of its scales)."""
    e, ends = tl.arange(0, BLOCK_E), ends_of_experts(ends_ptr, E, BLOCK_E)
    starts = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    before = ends <= row
    tiles = tl.where(before, tl.cdiv(ends - starts, 128), 0)
    first = tl.max(tl.where(before, ends, 0), 0)
    return expert_of_row(ends, row), tl.sum(tiles, 0) * 128 + row - first


@triton.jit
def swizzled(row, column, columns):
    """Byte of the scale (row, column) of rows of `columns` scales."""
    tile = row.to(tl.int64) // 128 * 128 * columns + column // 4 * 512
    return tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


@triton.jit
def e2m1_code(magnitude):
    """The code of a number 0, 0.5, 1, 1.5, 2, 3, 4 or 6."""
    normal = (magnitude.to(tl.int32, bitcast=True) >> 22) - 252  # exponent bias 127 becomes 1
    return tl.where(magnitude < 1.0, tl.where(magnitude > 0.0, 1, 0), normal & 7)


@triton.jit
def quantized(
    x,
    whole,
    SCALE: tl.constexpr,
    RULE: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """(elements, scale codes (G,)) of fp32 x (G, SIZE) as `moe_ops.numerics` quantizes them.
    Elements are e4m3 (G, SIZE), or bytes of two e2m1 codes (G, SIZE / 2).
    """
    amax = largest_magnitude(x, 1)
    if SCALE == "mx":
        scale, inverse = power_of_two(amax, RULE, MANTISSA, MAX_VALUE)
        code = ((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF).to(tl.uint8)
        q = x * inverse[:, None]  # exact
    else:
        of_group = clamp(whole * quotient(amax, MAX_VALUE, 1.0 / MAX_VALUE), 448.0)
        code = stored(of_group, NATIVE).to(tl.uint8, bitcast=True)
        of_group = nearest(of_group, 3, -6)
        zero = of_group == 0.0
        scale = quotient(tl.where(zero, 1.0, of_group), whole, reciprocal(whole))
        q = quotient(x, scale[:, None], reciprocal(scale)[:, None])
        q = tl.where(zero[:, None], 0.0, q)
    q = clamp(q, MAX_VALUE)
    if MAX_VALUE == 448.0:
        return stored(q, NATIVE), code
    else:
        codes = e2m1_code(tl.abs(nearest(q, MANTISSA, MIN_EXPONENT)))
        codes |= (x.to(tl.int32, bitcast=True) >> 28) & 8
        low, high = tl.split(tl.reshape(codes, (x.shape[0], x.shape[1] // 2, 2)))
        return (low | (high << 4)).to(tl.uint8), code


@triton.jit
def store(
    data_ptr,
    scale_ptr,
    columns,
    row,
    scale_row,
    first,  # group
    K,
    q,
    code,
    SIZE: tl.constexpr,
    MAX_VALUE: tl.constexpr,
):
    """Write groups of a row from group `first` on, and zeros as scales past the last."""
    ELEMENTS: tl.constexpr = 1 if MAX_VALUE == 448.0 else 2  # of a byte
    WIDE: tl.constexpr = SIZE // ELEMENTS
    group = first + tl.arange(0, code.shape[0])
    byte = group[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    row_bytes = K // ELEMENTS
    tl.store(data_ptr + row.to(tl.int64) * row_bytes + byte, q, mask=byte < row_bytes)
    code = tl.where(group * SIZE < K, code, 0)
    tl.store(scale_ptr + swizzled(scale_row, group, columns), code, mask=group < columns)


@triton.jit
def global_scale(
    known_ptr, expert, WHOLE: tl.constexpr, PARTIALS: tl.constexpr, MAX_VALUE: tl.constexpr
):
    """The global scale of rows of an expert, which is 0 if all experts have one."""
    if WHOLE == "":
        return 1.0
    elif WHOLE == "amax":
        most = tl.max(tl.load(known_ptr + tl.arange(0, PARTIALS)), 0)
        whole = quotient(448.0 * MAX_VALUE, most, reciprocal(most))
        return tl.where(most == 0.0, 1.0, tl.minimum(whole, 3.4028234663852886e38))
    else:
        given = tl.load(known_ptr + expert).to(tl.float32)
        return quotient(1.0, given, reciprocal(given))


@triton.jit
def store_alphas(
    alpha_ptr, known_ptr, w_global_ptr, E,
    WHOLE: tl.constexpr, PARTIALS: tl.constexpr, MAX_VALUE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """1 / (global scale of the activations * that of the weights) of every expert; the latter is
    left out where each row of the weights has its own.
    """
    e = tl.arange(0, BLOCK_E)
    if WHOLE == "experts":
        given = tl.load(known_ptr + e, mask=e < E, other=1.0).to(tl.float32)
        whole = quotient(1.0, given, reciprocal(given))
    else:
        whole = global_scale(known_ptr, 0, WHOLE, PARTIALS, MAX_VALUE)
    alpha = quotient(1.0, whole, reciprocal(whole))
    if w_global_ptr is not None:
        w = tl.load(w_global_ptr + e, mask=e < E, other=1.0)
        alpha = quotient(alpha, w, reciprocal(w))
    tl.store(alpha_ptr + e, alpha, mask=e < E)


@unprefixed
class Written(NamedTuple):
    """A quantized operand."""

    data: Pointer  # bytes (rows, ..), written
    scale: Pointer  # bytes (.., columns), written
    alpha: Pointer  # (E,) fp32, written by one program, or None
    known: Pointer  # fp32: what WHOLE says, or None
    w_global: Pointer  # (E,) fp32 global scales of the weights, or None
    E: Runtime
    columns: Specialized  # of scales
    WHOLE: Constant
    PARTIALS: Constant  # largest magnitudes at `known`
    BLOCK_E: Constant
    NATIVE: Constant


class Operand(NamedTuple):
    """Rows of a GEMM: bytes, and bytes of scales in tiles."""

    data: Tensor  # (rows, bytes of a row)
    scale: Tensor
    columns: int  # K or I
    alpha: Tensor | None  # (E,) fp32
    known: Tensor | None
    whole: str  # WHOLE
    w_global: Tensor | None  # (E,)
    scheme: str
    raises: bool = False  # `activate` raises the largest magnitude at `known`, and nothing else

    @property
    def scale_columns(self) -> int:
        return BLOCK_SCALED[self.scheme].scale_columns(self.columns)

    @property
    def of_gemm(self) -> tuple[Tensor, int]:
        """The scales that a GEMM reads, whose places follow from its layout."""
        return self.scale, 0

    @property
    def rounding(self) -> Rounding:
        found = rounding_of(self.scheme)
        assert found is not None
        return found

    def written(self, E: int, gpu: Gpu) -> Written:
        partials = self.known.numel() if self.whole == "amax" and self.known is not None else 1
        data = self.data
        if gpu.native and self.rounding.MAX_VALUE == 448.0:
            data = data.view(torch.float8_e4m3fn)
        return Written(
            data=data,
            scale=self.scale,
            alpha=self.alpha,
            known=self.known,
            w_global=self.w_global,
            E=E,
            columns=self.scale_columns,
            WHOLE=self.whole,
            PARTIALS=partials,
            BLOCK_E=block_e(E),
            NATIVE=gpu.native,
        )

    def raising(self) -> Operand:
        """The operand for `activate` to find the largest magnitude of alone."""
        return self._replace(raises=True)


def operand_in(
    buffer: Tensor,
    num_rows: int,
    of_scales: int,  # rows of scales
    columns: int,
    scheme: str,
    known: Tensor | None,
    largest: Tensor | None,
    w_global: Tensor | None,  # (E,), or (E, N, 1), of which alpha has nothing
    alpha: Tensor,
) -> Operand:
    """The rows at the start of a workspace, with their scales behind them."""
    format = BLOCK_SCALED[scheme]
    row_bytes, size = format.row_bytes(columns), format.operand_bytes(num_rows, of_scales, columns)
    everything, whole = carve(buffer, (size,), torch.uint8), ""
    if w_global is None:
        known = None
    elif known is not None:
        whole = "known" if known.numel() == 1 else "experts"
    else:
        known, whole = largest, "amax"
    return Operand(
        data=everything[: num_rows * row_bytes].view(num_rows, row_bytes),
        scale=everything[round_up(num_rows * row_bytes, 128) :],
        columns=columns,
        alpha=None if w_global is None else alpha,
        known=known,
        whole=whole,
        w_global=None if w_global is None or w_global.dim() > 1 else w_global,
        scheme=scheme,
    )
