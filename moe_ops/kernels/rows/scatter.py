"""The kernel that copies tokens to the rows of their pairs, and quantizes them on the way: bf16 or
e4m3 with scales of groups of columns. Imported at first launch only.

Legend: M tokens, S = M * top_k pairs, K hidden size. `rows` (S,) is the row of each pair, or -1 if
its expert is not here. Rows without a pair are not written.

For batches (E, T, K) `rows` is None, and `groups` (E,) holds the number of rows of each expert:
row t of expert e is row e * R + t. Most rows may be unused, so there is no program for each of
them: `programs` programs share the rows of an expert.

SCALES names the scales of e4m3 data. Scales of neighbouring rows are contiguous, in blocks of R
rows, of which the contiguous layout has one:
    ""       none, data are in the input's dtype
    "fp32"   (blocks, columns / 128, R), one for 128 columns
    "powers" the same, of powers of two
    "ue8m0"  int32 words of four exponents, one for WIDTH columns:
             (blocks, columns / (4 WIDTH), R); byte j of word p is group 4 p + j
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.device.e4m3 import exponent_above, quantize_groups, quotient, stored
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.launch import (
    Constant,
    Gpu,
    Launch,
    Pointer,
    Runtime,
    Specialized,
    arguments,
    kernel,
    unprefixed,
)
from moe_ops.kernels.place.layout import Layout, StridedRows, programs_of_rows, rows_of
from moe_ops.meta.workspace import cdiv

GROUPS = 16  # groups of 128 columns that a program handles at a time


class OperandRows(Protocol):
    """Rows that a GEMM takes: in bf16, or quantized with scales."""

    @property
    def data(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor | None: ...
    @property
    def scales(self) -> str:  # their kind: SCALES
        ...
    @property
    def width(self) -> int:  # columns that share a scale
        ...


class GroupedRows(NamedTuple):
    """The rows of a GEMM with fp32 scales."""

    data: Tensor  # (S, K) e4m3, or as x
    scale: Tensor | None  # (ceil(K / 128), S)
    scales: str  # "fp32", "powers" or ""
    width: int = 128


@unprefixed
class Quantized(NamedTuple):
    """Rows that a kernel writes, and how it quantizes them."""

    scale: Pointer  # written, or None
    SCALES: Constant
    WIDTH: Constant
    GROUPS: Constant
    NATIVE: Constant


class Scales(NamedTuple):
    """Scales (M, groups) or (E, T, groups) of rows that arrive quantized, or none."""

    ptr: Pointer
    stride_e: Runtime
    stride_m: Runtime
    stride_g: Runtime


@triton.jit
def quantize_by_powers(x):
    """(unrounded fp32 quotients, uint8 exponents (R,)) of x (R, columns): scales are the least
    powers of two with which the largest magnitude is at most 448.
    """
    x = x.to(tl.float32)
    exponent = exponent_above(quotient(tl.max(tl.abs(x), 1), 448.0, 1.0 / 448.0))
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return x * inverse[:, None], exponent.to(tl.uint8)


@triton.jit
def scale_offset(row, group, groups, R):
    """Offset of the scale of a group of columns."""
    return row + row // R * (groups - 1) * R + group.to(tl.int64) * R


@triton.jit
def store_scale(scale_ptr, scale, row, group, groups, R, mask, SCALES: tl.constexpr):
    """Store scales of groups (the same shape), and zeros after a row's last exponent up to the end
    of its word.
    """
    if SCALES == "ue8m0":
        words = tl.cdiv(groups, 4)
        for j in tl.static_range(4):
            byte = group + j
            ok = mask & ((j == 0) | ((group == groups - 1) & (byte < 4 * words)))
            offset = scale_offset(row, byte // 4, words, R) * 4 + byte % 4
            tl.store(scale_ptr + offset, scale if j == 0 else tl.zeros_like(scale), mask=ok)
    else:
        tl.store(scale_ptr + scale_offset(row, group, groups, R), scale, mask=mask)


@triton.jit
def rounded_columns(x, SCALES: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr):
    """(columns (GROUPS, 128) of a row as they are stored, their scales, or x if there are
    none).
    """
    GROUPS: tl.constexpr = x.shape[0]
    PARTS: tl.constexpr = 128 // WIDTH  # groups with a scale of their own
    if SCALES == "ue8m0":
        v, scale = quantize_by_powers(tl.reshape(x, (GROUPS * PARTS, WIDTH)))
        y = stored(tl.reshape(v, (GROUPS, 128)), NATIVE)
    elif SCALES != "":
        v, scale = quantize_groups(x, SCALES == "powers")
        y = stored(v, NATIVE)
    else:
        y, scale = x, x
    return y, scale


@triton.jit
def columns_of_row(
    x_ptr, x_scale_ptr, x_scale_stride_g, factor, k, part, K, SCALES: tl.constexpr,
    WIDTH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """(columns (GROUPS, 128) of a row times factor as they are stored, their scales, or x if there
    are none). What arrives with scales is not quantized again: the factor is of its scales.
    """
    x = tl.load(x_ptr, mask=k < K, other=0.0)
    if x_scale_ptr is not None:
        scale_ptrs = x_scale_ptr + part.to(tl.int64) * x_scale_stride_g
        scale = tl.load(scale_ptrs, mask=part * WIDTH < K, other=0)
        if factor is not None:
            scale *= factor
        return x, scale
    else:
        if factor is not None:
            x = x.to(tl.float32) * factor
        return rounded_columns(x, SCALES, WIDTH, NATIVE)


@triton.jit
def store_columns(
    y_ptr, scale_ptr, y, scale, row, k, part, end, K, R, SCALES: tl.constexpr, WIDTH: tl.constexpr
):
    """Columns k below `end` of a row, and scales `part` of its groups."""
    tl.store(y_ptr + row * K + k, y.to(y_ptr.dtype.element_ty), mask=k < end)
    if SCALES != "":
        ok = part * WIDTH < end
        store_scale(scale_ptr, scale, row, part, tl.cdiv(K, WIDTH), R, ok, SCALES)


@arguments
class Scatter:
    y: Pointer  # (rows, K), written
    quantized: Quantized
    x: StridedRows
    x_scale: Scales
    weights: Pointer  # (M,) that multiply x before it is quantized, or its fp32 scales; or None
    weights_stride: Runtime
    layout: Layout
    K: Specialized
    programs: Runtime
    TOP_K: Constant
    PDL: Constant


@kernel(Scatter)
def moe_ops_scatter_groups(
    y_ptr,
    scale_ptr,
    SCALES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
    x_ptr,
    x_stride_e,
    x_stride_m,
    x_stride_k,
    x_scale_ptr,
    x_scale_stride_e,
    x_scale_stride_m,
    x_scale_stride_g,
    weights_ptr,
    weights_stride,
    rows_ptr,
    groups_ptr,
    R,
    K,
    programs,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Read GROUPS * 128 columns of a token once, quantize them once unless they arrive quantized,
    and write them to all rows of the token.
    """
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    PARTS: tl.constexpr = 128 // WIDTH
    part = tl.program_id(1) * GROUPS * PARTS + tl.arange(0, GROUPS * PARTS)
    x_ptr += k.to(tl.int64) * x_stride_k
    if rows_ptr is None:
        gdc_wait(PDL)
        gdc_launch_dependents(PDL)
        e = (tl.program_id(0) // programs).to(tl.int64)
        for t in range(tl.program_id(0) % programs, tl.load(groups_ptr + e), programs):
            m = tl.cast(t, tl.int64)
            scale_ptr_of_row = x_scale_ptr
            if x_scale_ptr is not None:
                scale_ptr_of_row += e * x_scale_stride_e + m * x_scale_stride_m
            y, scale = columns_of_row(
                x_ptr + (e * x_stride_e + m * x_stride_m), scale_ptr_of_row, x_scale_stride_g,
                None, k, part, K, SCALES, WIDTH, NATIVE,
            )  # fmt: skip
            store_columns(y_ptr, scale_ptr, y, scale, e * R + m, k, part, K, K, R, SCALES, WIDTH)
    else:
        m = tl.program_id(0).to(tl.int64)
        if x_scale_ptr is not None:
            x_scale_ptr += m * x_scale_stride_m
        factor = None
        if weights_ptr is not None:
            factor = tl.load(weights_ptr + m * weights_stride).to(tl.float32)
        y, scale = columns_of_row(
            x_ptr + m * x_stride_m, x_scale_ptr, x_scale_stride_g, factor, k, part, K,
            SCALES, WIDTH, NATIVE,
        )  # fmt: skip
        gdc_wait(PDL)  # the kernel before this one writes `rows`, and may not have ended
        # the GEMM executes gdc_wait too, if it was launched with PDL (deep_gemm.set_pdl)
        gdc_launch_dependents(PDL)
        rows = ()
        for j in tl.static_range(TOP_K):  # before any store, behind which each would wait in turn
            rows += (tl.load(rows_ptr + m * TOP_K + j).to(tl.int64),)  # type: ignore[assignment]
        for j in tl.static_range(TOP_K):
            end = tl.where(rows[j] >= 0, K, 0)
            store_columns(y_ptr, scale_ptr, y, scale, rows[j], k, part, end, K, R, SCALES, WIDTH)


def quantized(operand: OperandRows, gpu: Gpu) -> tuple[Tensor, Quantized]:
    """An operand as kernels write it. e4m3 data are bytes if the GPU does not have e4m3."""
    data, scale = operand.data, operand.scale
    if scale is not None:
        if not gpu.native:
            data = data.view(torch.uint8)
        if operand.scales == "ue8m0":  # as bytes; kernels use the address alone
            scale = scale.transpose(-2, -1).view(torch.uint8)
    return data, Quantized(scale, operand.scales, operand.width, GROUPS, gpu.native)


def scales_of(scale: Tensor | None) -> Scales:
    """The Scales of a tensor (M, groups) or (E, T, groups), or of None."""
    if scale is None:
        return Scales(None, 0, 0, 0)
    return Scales(scale, *scale.stride()) if scale.ndim == 3 else Scales(scale, 0, *scale.stride())


def scatter(
    x: Tensor,
    y: OperandRows,
    layout: Layout,
    top_k: int,
    gpu: Gpu,
    x_scale: Tensor | None = None,
    weights: Tensor | None = None,
) -> Launch:
    """x (M, K) or (E, T, K) copied to the rows of its pairs. If y has scales, x is quantized,
    after it was multiplied by weights (M, 1) if there are any; or it has arrived so, with scales.
    """
    if x_scale is not None:
        if x.dtype != y.data.dtype:
            raise ValueError(f"hidden_states with scales must be {y.data.dtype}, got {x.dtype}")
        x = x if gpu.native else x.view(torch.uint8)
    K, (programs, shared) = x.shape[-1], programs_of_rows(x, layout, top_k)
    data, how = quantized(y, gpu)
    args = Scatter(
        y=data,
        quantized=how,
        x=rows_of(x),
        x_scale=scales_of(x_scale),
        weights=weights,
        weights_stride=0 if weights is None else weights.stride(0),
        layout=layout,
        K=K,
        programs=shared,
        TOP_K=top_k,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_scatter_groups, (programs, cdiv(K, GROUPS * 128), 1), args)
