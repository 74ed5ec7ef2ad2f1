"""Kernels that quantize activations to e4m3 or int8, and the kernel that finds their largest
magnitude. Imported at first launch only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.configs import LayerConfig
from moe_ops.kernels.device.blocks import local_expert
from moe_ops.kernels.device.e4m3 import (
    element_scale,
    largest_magnitude,
    quantize_groups,
    quotient,
    reciprocal,
    stored,
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
    unprefixed,
)
from moe_ops.kernels.place.routing import NO_ROUTER_WEIGHTS, RouterWeights, Routing
from moe_ops.kernels.place.sort import Sort, route, sort_expert
from moe_ops.kernels.rows.scales import NUM_PARTIALS, Input, expert_stride, flat, split
from moe_ops.meta.workspace import cdiv

GROUPS = 16  # groups of 128 columns that a quantizing program handles at a time
NOT_SORTED = Sort(0, 16, 16, 128)
NOT_ROUTED = Routing(None, None, None, 0, 0, 0, 1, 0, 0, 0, "direct")


@triton.jit
def quantize_row(
    q_ptr,
    scale_ptr,
    zero_ptr,
    x_ptr,
    m,
    part,
    T,
    zeros,
    scale_stride_m,
    scale_stride_g,
    K,
    x_stride_e,
    x_stride_m,
    x_stride_k,
    weights_ptr,
    weights_stride_m,
    BY_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
    INT8: tl.constexpr,
    POWERS: tl.constexpr,
):
    """Quantize columns [part, part + 1) * GROUPS * 128 of row m with one scale for each 128
    (BY_GROUP), or the whole row with one scale; after multiplying it by its router weight, if
    there are any. Without q, x arrived quantized, and zeros alone are written.
    """
    m = m.to(tl.int64)
    if q_ptr is not None:
        x_ptr += m // T * x_stride_e + m * x_stride_m
        q_ptr += m * K
    factor = 1.0
    if weights_ptr is not None:
        factor = tl.load(weights_ptr + m * weights_stride_m).to(tl.float32)
    group = tl.arange(0, GROUPS)
    lane = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    if BY_GROUP:
        first = part * GROUPS
        k = first * 128 + lane
        x = tl.load(x_ptr + k.to(tl.int64) * x_stride_k, mask=k < K, other=0.0)
        v, scale = quantize_groups(x.to(tl.float32) * factor, POWERS)
        tl.store(q_ptr + k, stored(v, NATIVE), mask=k < K)
        g = first + group
        scale_ptrs = scale_ptr + m * scale_stride_m + g.to(tl.int64) * scale_stride_g
        tl.store(scale_ptrs, scale, mask=g < tl.cdiv(K, 128))
    else:
        if q_ptr is not None:
            amax = tl.zeros((GROUPS, 128), tl.float32)
            for start in range(0, K, GROUPS * 128):
                k = start + lane
                x = tl.load(x_ptr + k.to(tl.int64) * x_stride_k, mask=k < K, other=0.0)
                magnitude = tl.abs(x.to(tl.float32) * factor)
                if INT8:
                    grown = tl.where(amax < magnitude, magnitude, amax)
                    amax = tl.where(magnitude != magnitude, magnitude, grown)
                else:
                    amax = tl.maximum(amax, magnitude)
            if INT8:
                largest = largest_magnitude(largest_magnitude(amax, 1), 0)
            else:
                largest = tl.max(tl.max(amax, 1), 0)
            tl.store(scale_ptr + m, largest)
            scale = element_scale(largest, INT8)
            inverse = reciprocal(scale)
            for start in range(0, K, GROUPS * 128):
                k = start + lane
                x = tl.load(x_ptr + k.to(tl.int64) * x_stride_k, mask=k < K, other=0.0)
                v = quotient(x.to(tl.float32) * factor, scale, inverse)
                tl.store(q_ptr + k, stored(v, NATIVE, INT8), mask=k < K)
        if zero_ptr is not None:
            for i in range(zeros):
                tl.store(zero_ptr + m * zeros + i, 0.0)


@unprefixed
class Quantized(NamedTuple):
    """Outputs of a kernel that quantizes rows, and how it quantizes."""

    q: Pointer  # (rows, K) e4m3 or int8, written, or None
    # written: scales (rows, ceil(K / 128)) if BY_GROUP, else the largest magnitudes (rows,), which
    # are contiguous
    scale: Pointer
    scale_stride_m: Runtime  # BY_GROUP
    scale_stride_g: Runtime
    zero: Pointer  # (rows * zeros,) fp32, set to zero, or None
    rows: Runtime
    T: Runtime  # rows of a batch
    zeros: Runtime
    K: Specialized
    BY_GROUP: Constant
    GROUPS: Constant
    NATIVE: Constant
    INT8: Constant
    POWERS: Constant  # scales of groups are powers of two


@arguments
class Quantize:
    routing: Routing  # as in moe_ops_route
    sort: Sort
    to: Quantized
    x: Input  # (rows, K)
    weights: RouterWeights  # (rows, 1), if they scale the input
    SORTS: Constant  # the first E programs sort pairs
    FIRST: Constant  # it may be the first kernel of a call
    PDL: Constant


@kernel(Quantize, pdl_first=True)
def moe_ops_quantize(
    index_ptr,
    ids_ptr,
    map_ptr,
    num_blocks,
    E,
    num_ids,
    top_k,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    ROWS: tl.constexpr,
    S,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    q_ptr,
    scale_ptr,
    scale_stride_m,
    scale_stride_g,
    zero_ptr,
    rows,
    T,
    zeros,
    K,
    BY_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
    INT8: tl.constexpr,
    POWERS: tl.constexpr,
    x_ptr,
    x_stride_e,  # row m is at m // T * x_stride_e + m * x_stride_m
    x_stride_m,
    x_stride_k,
    x_scale_ptr,
    x_scale_stride_e,
    x_scale_stride_m,
    x_scale_stride_g,
    x_partials: tl.constexpr,
    weights_ptr,
    weights_stride_m,
    weights_stride_k,
    SORTS: tl.constexpr,
    FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize rows, GROUPS * 128 columns at a time. Grid: (rows, parts of a row) if BY_GROUP,
    else (rows, 1). With SORTS moe_ops_route in the first E programs, before rows * parts of a row
    that do not wait for it.
    """
    if FIRST:
        gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    m, part = tl.program_id(0), tl.program_id(1)
    if SORTS:
        program = m
        if program < E:
            sort_expert(
                index_ptr, ids_ptr, map_ptr, program, S, E, num_ids, num_blocks, top_k,
                ids_stride_m, ids_stride_k, map_stride, BLOCK_E, BLOCK_M, CHUNK,
            )  # fmt: skip
            return
        m, part = (program - E) % rows, (program - E) // rows
    quantize_row(
        q_ptr, scale_ptr, zero_ptr, x_ptr, m, part, T, zeros, scale_stride_m, scale_stride_g, K,
        x_stride_e, x_stride_m, x_stride_k, weights_ptr, weights_stride_m, BY_GROUP, GROUPS,
        NATIVE, INT8, POWERS,
    )  # fmt: skip
    if not FIRST:
        gdc_wait(PDL)


@arguments
class Amax:
    partials: Pointer  # (programs,) fp32, written: largest magnitude in each program's rows
    zero: Pointer  # (1,) fp32, set to zero, or None
    x: Input  # (rows, K)
    # its ids, by VALID: "pairs" expert ids (rows, top_k), "batched" counts of rows (E,), "groups"
    # end rows (E,)
    routing: Routing
    topk_weights: RouterWeights  # (rows, 1), if they scale the input
    rows: Runtime
    T: Runtime
    K: Specialized
    VALID: Constant
    LANES: Constant  # a power of two, at least top_k
    CHUNK: Constant
    PDL: Constant


@kernel(Amax)
def moe_ops_amax(
    partials_ptr,
    zero_ptr,
    x_ptr,
    x_stride_e,  # row m is at m // T * x_stride_e + m * x_stride_m
    x_stride_m,
    x_stride_k,
    x_scale_ptr,
    x_scale_stride_e,
    x_scale_stride_m,
    x_scale_stride_g,
    x_partials: tl.constexpr,
    index_ptr,
    ids_ptr,
    map_ptr,
    num_blocks,
    E,
    num_ids,
    top_k,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    ROWS: tl.constexpr,
    topk_weights_ptr,
    topk_weights_stride_m,
    topk_weights_stride_k,
    rows,
    T,
    K,
    VALID: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Largest magnitude in the rows that a local expert takes; other rows may hold anything."""
    gdc_launch_dependents(PDL)
    lane = tl.arange(0, CHUNK)
    largest = 0.0
    for m in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.zeros((), tl.int64) + m
        if VALID == "pairs":
            j = tl.arange(0, LANES)
            e = local_expert(
                ids_ptr, map_ptr, m * top_k + j, j < top_k, E, num_ids, top_k,
                ids_stride_m, ids_stride_k, map_stride,
            )  # fmt: skip
            valid = tl.max(e, 0) >= 0
        elif VALID == "batched":
            valid = m % T < tl.load(ids_ptr + m // T * ids_stride_m)
        else:
            valid = m < tl.load(ids_ptr + (E - 1) * ids_stride_m)
        end = tl.where(valid, K, 0)
        amax = tl.zeros((CHUNK,), tl.float32)
        start_ptr = x_ptr + row // T * x_stride_e + row * x_stride_m
        for start in range(0, end, CHUNK):
            k = start + lane
            x = tl.load(start_ptr + k.to(tl.int64) * x_stride_k, mask=k < K, other=0.0)
            amax = tl.maximum(amax, tl.abs(x.to(tl.float32)))
        of_row = tl.max(amax, 0)
        if topk_weights_ptr is not None:
            weight = tl.load(topk_weights_ptr + row * topk_weights_stride_m, mask=valid, other=0.0)
            of_row *= tl.abs(weight.to(tl.float32))
        largest = tl.maximum(largest, of_row)
    tl.store(partials_ptr + tl.program_id(0), largest)
    if zero_ptr is not None:
        tl.store(zero_ptr, 0.0, mask=tl.program_id(0) == 0)
    gdc_wait(PDL)


class Valid(NamedTuple):
    """Which rows of x count for a scale that all rows share."""

    how: str  # VALID: "pairs", "batched" or "groups"
    routing: Routing
    topk_weights: RouterWeights = NO_ROUTER_WEIGHTS  # that scale the input


def counted(how: str, sizes: Tensor) -> Valid:
    """The Valid of batches, if `sizes` (E,) holds their counts ("batched"), or of groups, if it
    holds their end rows ("groups").
    """
    E, stride = sizes.shape[0], sizes.stride(0)
    return Valid(how, Routing(None, sizes, None, 0, E, 0, 1, stride, 0, 0, "plain"))


def amax(
    x: Input,
    rows: int,
    rows_of_expert: int,  # of one expert if x is batched, else all
    K: int,
    partials: Tensor,  # (NUM_PARTIALS,), written
    valid: Valid,
    zero: Tensor | None,
    gpu: Gpu,
) -> Launch:
    """Find the largest magnitude in the rows of x that count: one partial maximum a program."""
    args = Amax(
        partials=partials,
        zero=zero,
        x=x,
        routing=valid.routing,
        topk_weights=valid.topk_weights,
        rows=rows,
        T=rows_of_expert,
        K=K,
        VALID=valid.how,
        LANES=1 << max(valid.routing.top_k - 1, 1).bit_length(),
        CHUNK=1024,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_amax, (NUM_PARTIALS, 1, 1), args)


def quantize_x(
    x: Input,  # the caller's
    rows: int,
    rows_of_expert: int,  # of one expert if x is batched, else all
    K: int,
    x_scale: str,
    config: LayerConfig,
    workspace: Tensor,
    static: Tensor | None,
    valid: Valid,
    h_scale: Tensor | None,  # set to zero: GEMM1 raises it to the largest magnitudes of h
    zeros_a_row: int,
    codes: torch.dtype,
    powers: bool,  # scales of groups are powers of two
    gpu: Gpu,
    sort: Sort | None = None,  # if a kernel sorts the pairs
    gathered: bool = False,  # GEMM1 takes rows in any order: a row's scales are neighbours
) -> tuple[list[Launch], Input, RouterWeights]:
    """(launches before GEMM1, the sorting kernel's among them; GEMM1's x; router weights that it
    is yet to be multiplied by). x that has scales arrived quantized, and nothing quantizes it.
    """
    routing, weights = valid.routing, valid.topk_weights
    before = [] if sort is None else [route(routing, sort, gpu)]
    if x.scale is not None:
        if x_scale in ("group", "static") or h_scale is None:
            return before, x, weights
        if x_scale == "tensor":
            rows = zeros_a_row = 1
        to = Quantized(
            q=None,
            scale=None,
            scale_stride_m=0,
            scale_stride_g=0,
            zero=h_scale,
            rows=rows,
            T=rows,
            zeros=zeros_a_row,
            K=K,
            BY_GROUP=False,
            GROUPS=GROUPS,
            NATIVE=gpu.native,
            INT8=False,
            POWERS=False,
        )
        return [quantize(to, x, NO_ROUTER_WEIGHTS, 1, gpu, routing, sort)], x, weights
    if x_scale == "static":
        stride_e = expert_stride(static)
        return before, x._replace(scale=static, scale_stride_e=stride_e), weights
    if x_scale == "tensor":
        partials = flat(workspace, torch.float32, NUM_PARTIALS)
        before.append(amax(x, rows, rows_of_expert, K, partials, valid, h_scale, gpu))
        return before, x._replace(scale=partials, partials=NUM_PARTIALS), weights
    if not config.quantize_x:
        return before, x, weights
    by_group = x_scale == "group"
    groups = cdiv(K, 128) if by_group else 1
    data, scale = split(workspace, rows, K, codes, rows * groups)
    stride_m, stride_g = (groups, 1) if gathered else (1, rows)
    to = Quantized(
        q=data,
        scale=scale,
        scale_stride_m=stride_m,
        scale_stride_g=stride_g,
        zero=h_scale,
        rows=rows,
        T=rows_of_expert,
        zeros=zeros_a_row,
        K=K,
        BY_GROUP=by_group,
        GROUPS=GROUPS,
        NATIVE=gpu.native,
        INT8=codes == torch.int8,
        POWERS=powers,
    )
    parts_of_row = cdiv(K, GROUPS * 128) if by_group else 1
    return (
        [quantize(to, x, weights, parts_of_row, gpu, routing, sort)],
        Input(data, 0, K, 1, scale, 0, stride_m, stride_g),
        NO_ROUTER_WEIGHTS,
    )


def quantize(
    to: Quantized,
    x: Input,
    weights: RouterWeights,  # that multiply x first
    parts_of_row: int,
    gpu: Gpu,
    routing: Routing = NOT_ROUTED,
    sort: Sort | None = None,
) -> Launch:
    """Quantize x, and sort pairs in the same launch if they are sorted."""
    grid = (to.rows, parts_of_row, 1)
    if sort is not None:
        grid = (routing.E + to.rows * parts_of_row, 1, 1)
    args = Quantize(
        routing=routing,
        sort=NOT_SORTED if sort is None else sort,
        to=to,
        x=x,
        weights=weights,
        SORTS=sort is not None,
        FIRST=sort is not None or routing.ROWS == "direct",  # else the table of blocks is before
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_quantize, grid, args, 4 if sort is None else sort.num_warps)
