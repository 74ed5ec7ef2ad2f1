"""Rows of e4m3 as the kernels around the two grouped GEMMs write them, and how these (scatter.py,
activate.py) quantize. Imported at first launch only.

Legend: M tokens, S = M * top_k pairs, K hidden size, I intermediate size, N columns of the first
GEMM's output (2 I if gated, else I). `rows` (S,) is the row of each pair in the GEMMs' operands,
or -1 if its expert is not here. For batches (E, T, ..) it is None, and row t of expert e is row
e * R + t. `groups` (E,) holds the row after each expert's last pair, or the rows of each batch.

SCALES says where the scales of e4m3 data come from:
    "token"    computed from each row
    "known"    one that is known, for all rows
    "experts"  one that is known for each expert
    "given"    the data arrive quantized, with a scale for each row or one for all
    "tensor"   computed from the largest magnitude of all rows, which is known: one scale
    "amax"     nothing is quantized, but that magnitude found
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.device.e4m3 import clamp, e4m3_scale, quotient, reciprocal, stored
from moe_ops.kernels.device.experts import ends_of_experts, expert_of_row
from moe_ops.kernels.launch import Constant, Gpu, Pointer, Runtime, unprefixed
from moe_ops.kernels.place.layout import block_e
from moe_ops.meta.workspace import carve, round_up


@unprefixed
class Quantized(NamedTuple):
    """How rows are quantized."""

    scale: Pointer  # (rows,) fp32, written; of "tensor" (1,); or None: none to be written
    known: Pointer  # (1,) or (E,) fp32 scales, partial maxima of magnitudes, or None
    E: Runtime
    SCALES: Constant
    PARTIALS: Constant  # of "tensor": maxima in `known`, a power of two
    BLOCK_E: Constant
    NATIVE: Constant


class Operand(NamedTuple):
    """Rows of a GEMM as kernels write them: e4m3 (rows, columns), and their scales."""

    data: Tensor
    scale: Tensor | None  # fp32, written: one of each row; of "tensor" one; else None
    known: Tensor | None  # (1,) or (E,) scales; of "tensor" maxima of magnitudes
    scales: str

    @property
    def columns(self) -> int:
        return self.data.shape[1]

    @property
    def alpha(self) -> None:
        """Products have no factor, as they have with a global scale."""
        return None

    @property
    def scale_columns(self) -> int:
        return 0

    def quantized(self, E: int, gpu: Gpu) -> Quantized:
        """The operand as the kernels take it."""
        partials = self.known.numel() if self.known is not None and self.scales == "tensor" else 1
        known, scale = self.known, self.scale
        return Quantized(scale, known, E, self.scales, partials, block_e(E), gpu.native)

    @property
    def of_gemm(self) -> tuple[Tensor | None, int]:
        """The scales that a GEMM reads, and the elements between those of two experts: -1 where
        each row has its own.
        """
        if self.scales == "tensor":
            return self.scale, 0
        if self.known is None:
            return self.scale, -1
        return self.known, min(self.known.numel() - 1, 1)

    def raising(self) -> Operand:
        """The operand for `activate` to find the largest magnitude of alone."""
        return self._replace(scales="amax")

    def codes(self, gpu: Gpu) -> Tensor:
        """The data as kernels take them: bytes where the GPU does not have e4m3, or nothing is
        quantized.
        """
        as_they_are = gpu.native and self.scales != "given"
        return self.data if as_they_are else self.data.view(torch.uint8)


def operand_in(
    buffer: Tensor,
    num_rows: int,
    columns: int,
    known: Tensor | None,
    largest: Tensor | None,
    arrived: Tensor | None = None,
) -> Operand:
    """The operand (rows, columns) at the start of a workspace, with the scales that are written
    behind it: known ones, one that follows from largest magnitudes, those of rows that arrived
    quantized, or those of each row.
    """
    size = round_up(num_rows * columns, 128)
    everything = carve(buffer, (size + 4 * num_rows,), torch.uint8)
    data = everything[: num_rows * columns].view(torch.float8_e4m3fn).view(num_rows, columns)
    scale = everything[size:].view(torch.float32)
    if arrived is not None:
        one = arrived.numel() == 1 and arrived.ndim < 2
        known = arrived.reshape(-1) if one else None
        return Operand(data, None if one else scale, known, "given")
    if largest is not None:
        return Operand(data, scale[:1], largest, "tensor")
    if known is None:
        return Operand(data, scale, None, "token")
    return Operand(data, None, known, "known" if known.numel() == 1 else "experts")


@triton.jit
def known_scale(known_ptr, ends_ptr, row, E, BLOCK_E: tl.constexpr):
    """The scale that is known for the expert of a row."""
    expert = expert_of_row(ends_of_experts(ends_ptr, E, BLOCK_E), row)
    return tl.load(known_ptr + tl.minimum(expert, E - 1))


@triton.jit
def tensor_scale(partials_ptr, PARTIALS: tl.constexpr):
    """The scale of all rows, from their largest magnitude."""
    return e4m3_scale(tl.max(tl.load(partials_ptr + tl.arange(0, PARTIALS)), 0))


@triton.jit
def by_known(v, scale, NATIVE: tl.constexpr):
    """fp32 v as e4m3 with a known scale: what is too large becomes the largest number."""
    return stored(clamp(quotient(v, scale, reciprocal(scale)), 448.0), NATIVE)


@triton.jit
def by_token(v, NATIVE: tl.constexpr):
    """(fp32 v as e4m3, its scale)."""
    scale = e4m3_scale(tl.max(tl.abs(v), 0))
    return stored(quotient(v, scale, reciprocal(scale)), NATIVE), scale


@triton.jit
def quantized_row(
    x, factor, known_ptr, e, SCALES: tl.constexpr, PARTIALS: tl.constexpr, NATIVE: tl.constexpr
):
    """(x * factor as e4m3, its scale), or x where each expert has a scale of its own and none is
    given.
    """
    scale = 1.0
    if SCALES == "given":
        y = x
    else:
        v = x.to(tl.float32)
        if factor is not None:
            v *= factor
        if SCALES == "token":
            y, scale = by_token(v, NATIVE)
        elif SCALES == "tensor":
            scale = tensor_scale(known_ptr, PARTIALS)
            y = by_known(v, scale, NATIVE)
        elif SCALES == "known":
            y = by_known(v, tl.load(known_ptr), NATIVE)
        elif e is not None:
            y = by_known(v, tl.load(known_ptr + e), NATIVE)
        else:
            y = v
    return y, scale


def warps(block: int) -> int:
    """Warps of a program that handles so many columns: 16 of each thread up to 16384."""
    return max(1, min(32, block // 1024 * 2))
