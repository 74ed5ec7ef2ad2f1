"""The kernel that quantizes tokens and copies them to the rows of their pairs, e4m3. Imported at
first launch only. Legend: rows.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.backends.cutlass.rows import (
    Operand,
    Quantized,
    by_known,
    known_scale,
    quantized_row,
    tensor_scale,
    warps,
)
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
)
from moe_ops.kernels.place.layout import Layout, StridedRows, programs_of_rows, rows_of


class Scales(NamedTuple):
    """Scales (M, 1) or (E, T, 1) of rows that arrive quantized, or none."""

    ptr: Pointer
    stride_e: Runtime
    stride_m: Runtime


@arguments
class Scatter:
    y: Pointer  # (rows, K), written
    quantized: Quantized
    x: StridedRows
    x_scale: Scales
    weights: Pointer  # (M,) that multiply x before it is quantized, or None
    weights_stride: Runtime
    layout: Layout
    K: Specialized
    programs: Runtime
    TOP_K: Constant
    BLOCK_K: Constant
    PDL: Constant


@kernel(Scatter)
def moe_ops_cutlass_scatter(
    y_ptr,
    scale_ptr,
    known_ptr,
    E,
    SCALES: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NATIVE: tl.constexpr,
    x_ptr,
    x_stride_e,
    x_stride_m,
    x_stride_k,
    x_scale_ptr,
    x_scale_stride_e,
    x_scale_stride_m,
    weights_ptr,
    weights_stride,
    rows_ptr,
    groups_ptr,
    R,
    K,
    programs,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Read a token once, quantize it, and write it to the rows of its pairs. Grid: one program a
    token; of batches, `programs` that share the rows of an expert.
    """
    k = tl.arange(0, BLOCK_K)
    x_ptr += k.to(tl.int64) * x_stride_k
    EACH: tl.constexpr = SCALES == "token" or SCALES == "given"
    if rows_ptr is None:
        gdc_wait(PDL)
        gdc_launch_dependents(PDL)
        e = (tl.program_id(0) // programs).to(tl.int64)
        for t in range(tl.program_id(0) % programs, tl.load(groups_ptr + e), programs):
            m = tl.cast(t, tl.int64)
            x = tl.load(x_ptr + (e * x_stride_e + m * x_stride_m), mask=k < K, other=0)
            y, scale = quantized_row(x, None, known_ptr, e, SCALES, PARTIALS, NATIVE)
            if x_scale_ptr is not None:
                scale = tl.load(x_scale_ptr + (e * x_scale_stride_e + m * x_scale_stride_m))
            tl.store(y_ptr + (e * R + m) * K + k, y, mask=k < K)
            if EACH and scale_ptr is not None:
                tl.store(scale_ptr + (e * R + m), scale)
    else:
        m = tl.program_id(0).to(tl.int64)
        x = tl.load(x_ptr + m * x_stride_m, mask=k < K, other=0)
        factor = None
        if weights_ptr is not None:
            factor = tl.load(weights_ptr + m * weights_stride).to(tl.float32)
        y, scale = quantized_row(x, factor, known_ptr, None, SCALES, PARTIALS, NATIVE)
        if x_scale_ptr is not None:
            scale = tl.load(x_scale_ptr + m * x_scale_stride_m)
        gdc_wait(PDL)  # the kernels before this one write `rows`
        gdc_launch_dependents(PDL)
        for j in tl.static_range(TOP_K):
            row = tl.load(rows_ptr + m * TOP_K + j).to(tl.int64)
            if row >= 0:
                of_pair = y
                if SCALES == "experts":
                    known = known_scale(known_ptr, groups_ptr, row, E, BLOCK_E)
                    of_pair = by_known(y, known, NATIVE)
                tl.store(y_ptr + row * K + k, of_pair, mask=k < K)
                if EACH and scale_ptr is not None:
                    tl.store(scale_ptr + row, scale)
    if SCALES == "tensor" and tl.program_id(0) == 0:
        tl.store(scale_ptr, tensor_scale(known_ptr, PARTIALS))


def scatter(
    y: Operand,
    x: Tensor,
    x_scale: Tensor | None,
    layout: Layout,
    top_k: int,
    weights: Tensor | None,
    gpu: Gpu,
) -> Launch:
    """x (M, K) or (E, T, K) copied to the rows of its pairs: quantized, after it was multiplied by
    weights (M, 1) if there are any, unless it arrives so, with scales.
    """
    K, (programs, shared) = x.shape[-1], programs_of_rows(x, layout, top_k)
    if y.scales == "given":
        x = x.view(torch.uint8)
    scales = Scales(None, 0, 0)
    if x_scale is not None and y.scale is not None:  # one for each row
        stride_e, stride_m = (0, 0, *x_scale.stride())[-3:-1]
        scales = Scales(x_scale, stride_e, stride_m)
    block = triton.next_power_of_2(K)
    args = Scatter(
        y=y.codes(gpu),
        quantized=y.quantized(layout.groups.shape[0], gpu),
        x=rows_of(x),
        x_scale=scales,
        weights=weights,
        weights_stride=0 if weights is None else weights.stride(0),
        layout=layout,
        K=K,
        programs=shared,
        TOP_K=top_k,
        BLOCK_K=block,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_cutlass_scatter, (programs, 1, 1), args, warps(block))
