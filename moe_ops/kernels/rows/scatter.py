"""The kernel that copies tokens to the rows of their pairs, and quantizes them on the way.
Imported at first launch only.

Legend: M tokens, S = M * top_k pairs, K hidden size. `rows` (S,) is the row of each pair, or -1 if
its expert is not here. Rows without a pair are not written.

For batches (E, T, K) `rows` is None, and `groups` (E,) holds the number of rows of each expert:
row t of expert e is row e * R + t. Most rows may be unused, so there is no program for each of
them: `programs` programs share the rows of an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait, gdc_wait_at_the_end
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
from moe_ops.kernels.place.routing import RouterWeights, router_weights
from moe_ops.kernels.rows.formats import (
    Columns,
    Written,
    columns_of_tile,
    expert_of,
    known_scale,
    quantized,
    store,
    store_shared,
    tile_of,
    warps_of,
    written,
)
from moe_ops.kernels.rows.operand import Operand
from moe_ops.meta.workspace import cdiv


class ArrivingScales(NamedTuple):
    """Scales (M, groups) or (E, T, groups) of rows that arrive quantized, or none."""

    ptr: Pointer
    stride_e: Runtime
    stride_m: Runtime
    stride_g: Runtime


@triton.jit
def columns_of_row(x_ptr, x_scale_ptr, x_scale_stride_g, factor, k, part, K, to):
    """(columns of a row times factor, their scales if they arrive quantized: the factor is of
    these then, and nothing is quantized again).
    """
    x = tl.load(x_ptr, mask=k < K, other=0.0)
    scale = x
    if x_scale_ptr is not None:
        if to.KIND == "groups":
            scale_ptrs = x_scale_ptr + part.to(tl.int64) * x_scale_stride_g
            scale = tl.load(scale_ptrs, mask=part * to.WIDTH < K, other=0)
        else:
            scale = tl.load(x_scale_ptr)
        if factor is not None:
            scale *= factor
    elif factor is not None:
        x = x.to(tl.float32) * factor
    return x, scale


@triton.jit
def scatter_rows(
    to, x_ptr, x_stride_e, x_stride_m, x_stride_k, x_scale_ptr, x_scale_stride_e,
    x_scale_stride_m, x_scale_stride_g, weights_ptr, weights_stride_m, weights_stride_k,
    rows_ptr, groups_ptr, R, K, programs, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, BESIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program of moe_ops_scatter. What it writes is one argument."""
    ARRIVES: tl.constexpr = x_scale_ptr is not None
    tile = 0 if to.KIND == "row" else tl.program_id(1)
    k = columns_of_tile(tile, BLOCK, LANES)
    part = tile * (BLOCK // to.WIDTH) + tl.arange(0, BLOCK // to.WIDTH) if LANES else 0
    x_ptr += k.to(tl.int64) * x_stride_k
    if rows_ptr is None:
        gdc_wait(PDL)
        gdc_launch_dependents(PDL)
        e = (tl.program_id(0) // programs).to(tl.int64)
        for t in range(tl.program_id(0) % programs, tl.load(groups_ptr + e), programs):
            m = tl.cast(t, tl.int64)
            scale_ptr_of_row = x_scale_ptr
            if ARRIVES:
                scale_ptr_of_row += e * x_scale_stride_e + m * x_scale_stride_m
            y, scale = columns_of_row(
                x_ptr + (e * x_stride_e + m * x_stride_m), scale_ptr_of_row, x_scale_stride_g,
                None, k, part, K, to,
            )  # fmt: skip
            if not ARRIVES:
                y, scale = quantized(y, known_scale(to, e), to)
            store(to, y, scale, e * R + m, k, part, K, K, R, groups_ptr)
    else:
        m = tl.program_id(0).to(tl.int64)
        if ARRIVES:
            x_scale_ptr += m * x_scale_stride_m
        factor = None
        if weights_ptr is not None:
            weights_ptr += m * weights_stride_m
            if to.KIND != "":
                factor = tl.load(weights_ptr).to(tl.float32)
        x, scale = columns_of_row(
            x_ptr + m * x_stride_m, x_scale_ptr, x_scale_stride_g, factor, k, part, K, to
        )
        y = x
        if not (ARRIVES or to.KNOWN == "experts"):
            y, scale = quantized(x, known_scale(to, 0), to)
        gdc_wait(PDL)  # the kernel before this one writes `rows`, and may not have ended
        # products that are launched with PDL execute gdc_wait too
        gdc_launch_dependents(PDL)
        rows = ()
        for j in tl.static_range(TOP_K):  # before any store, behind which each would wait in turn
            rows += (tl.load(rows_ptr + m * TOP_K + j).to(tl.int64),)  # type: ignore[assignment]
        for j in tl.static_range(TOP_K):
            if to.KIND == "groups" or to.KIND == "":
                if to.KIND == "" and weights_ptr is not None:
                    factor = tl.load(weights_ptr + j * weights_stride_k).to(tl.float32)
                    y = x.to(tl.float32) * factor
                end = tl.where(rows[j] >= 0, K, 0)
                store(to, y, scale, rows[j], k, part, end, K, R, groups_ptr)
            elif rows[j] >= 0:
                if to.KNOWN == "experts":
                    known = known_scale(to, expert_of(to, groups_ptr, rows[j]))
                    of_pair, scale_of_pair = quantized(x, known, to)
                    store(to, of_pair, scale_of_pair, rows[j], k, part, K, K, R, groups_ptr)
                else:
                    store(to, y, scale, rows[j], k, part, K, K, R, groups_ptr)
    store_shared(to, (tl.program_id(0) == 0) & (tl.program_id(1) == 0))
    gdc_wait_at_the_end(BESIDE)


@arguments
class Scatter:
    to: Written
    x: StridedRows
    x_scale: ArrivingScales
    # (M, top_k); rows that are quantized, of which top_k is 1, they multiply before
    weights: RouterWeights
    layout: Layout
    K: Specialized
    programs: Runtime
    TOP_K: Constant
    tile: Columns
    BESIDE: Constant  # it runs beside the kernel before: gdc_wait_at_the_end
    PDL: Constant


@kernel(Scatter)
def moe_ops_scatter(
    data_ptr,
    scale_ptr,
    known_ptr,
    alpha_ptr,
    w_global_ptr,
    E,
    scale_columns,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    WIDTH: tl.constexpr,
    KNOWN: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NATIVE: tl.constexpr,
    RULE: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    x_ptr,
    x_stride_e,
    x_stride_m,
    x_stride_k,
    x_scale_ptr,
    x_scale_stride_e,
    x_scale_stride_m,
    x_scale_stride_g,
    weights_ptr,
    weights_stride_m,
    weights_stride_k,
    rows_ptr,
    groups_ptr,
    R,
    K,
    programs,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    BESIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Read BLOCK columns of a token once, quantize them once unless they arrive quantized, and
    write them to all rows of the token. Grid: (M, or programs that share batches; tiles of a row).
    """
    scatter_rows(
        Written(
            data_ptr, scale_ptr, known_ptr, alpha_ptr, w_global_ptr, E, scale_columns, KIND,
            SCALES, WIDTH, KNOWN, PARTIALS, BLOCK_E, NATIVE, RULE, MANTISSA, MIN_EXPONENT,
            MAX_VALUE,
        ),
        x_ptr, x_stride_e, x_stride_m, x_stride_k, x_scale_ptr, x_scale_stride_e,
        x_scale_stride_m, x_scale_stride_g, weights_ptr, weights_stride_m, weights_stride_k,
        rows_ptr, groups_ptr, R, K, programs, TOP_K, BLOCK, LANES, BESIDE, PDL,
    )  # fmt: skip


def scales_of(scale: Tensor | None) -> ArrivingScales:
    """The ArrivingScales of a tensor (M, groups) or (E, T, groups), or of None."""
    if scale is None:
        return ArrivingScales(None, 0, 0, 0)
    *of_batch, stride_m, stride_g = scale.stride()
    return ArrivingScales(scale, of_batch[0] if of_batch else 0, stride_m, stride_g)


def scatter(
    x: Tensor,
    y: Operand,
    layout: Layout,
    top_k: int,
    gpu: Gpu,
    x_scale: Tensor | None = None,
    weights: Tensor | None = None,
    beside: bool = False,
) -> Launch:
    """x (M, K) or (E, T, K) copied to the rows of its pairs, after it was multiplied by weights
    (M, top_k) if there are any. If y has scales, x is quantized; or it has arrived so, with scales
    for each row, or without any where one is known.
    `beside`: it runs beside the kernel before, which does not write x and does not use y.
    """
    if x_scale is not None or y.scales == "given":
        if x.dtype != y.data.dtype:
            raise ValueError(f"hidden_states with scales must be {y.data.dtype}, got {x.dtype}")
        x = x if gpu.native and y.scales != "given" else x.view(torch.uint8)
    K, (programs, shared) = x.shape[-1], programs_of_rows(x, layout, top_k)
    tile = tile_of(y)
    args = Scatter(
        to=written(y, layout, gpu),
        x=rows_of(x),
        x_scale=scales_of(x_scale),
        weights=router_weights(weights),
        layout=layout,
        K=K,
        programs=shared,
        TOP_K=top_k,
        tile=tile,
        BESIDE=beside,
        PDL=gpu.pdl and not beside,
    )
    return Launch(moe_ops_scatter, (programs, cdiv(K, tile.BLOCK), 1), args, warps_of(y, tile))
