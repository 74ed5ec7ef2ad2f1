"""The Triton kernel between DeepGEMM's two GEMMs: activate. Imported at first launch only.

Legend as in kernels/rows/scatter.py; I intermediate size, N columns of the first GEMM's output
(2 I if gated, else I). `rows` are those of the GEMMs' operands. Rows without a pair are neither
read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.backends.deep_gemm.library import Operand
from moe_ops.kernels.device.activations import activate_one, activate_two
from moe_ops.kernels.device.pdl import gdc_launch_dependents
from moe_ops.kernels.gemm.operands import Activated, activated
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
from moe_ops.kernels.place.layout import Layout, programs_of_expert
from moe_ops.kernels.rows.scatter import (
    GROUPS,
    Quantized,
    quantized,
    rounded_columns,
    store_scale,
)
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs


@triton.jit
def row_of(rows_ptr, first, pair, pairs):
    """The rows of pairs; for batches, of the pairs of an expert whose first row is `first`. -1 for
    pairs from `pairs` on, and if an expert is not here.
    """
    if rows_ptr is None:
        return tl.where(pair < pairs, first + pair, -1)
    else:
        return tl.load(rows_ptr + pair, mask=pair < pairs, other=-1).to(tl.int64)


@triton.jit
def activate_units(
    h_ptr, scale_ptr, x_ptr, rows_ptr, weights_ptr, weights_stride, first, begin, row, pairs, R,
    I, alpha, beta, limit,  # noqa: E741
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr, SCALES: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Activate GROUPS units from `begin` on, out of those of `pairs` pairs. A unit is 128 columns
    of a pair, and `row` (GROUPS,) holds the units' rows.
    """
    lane = tl.arange(0, 128)[None, :]
    unit = begin + tl.arange(0, GROUPS)
    pair, group = unit // (I // 128), unit % (I // 128)
    ok = (row >= 0)[:, None]
    column = group[:, None] * 128 + lane
    weight = 1.0
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + pair * weights_stride, mask=row >= 0, other=0.0)
        weight = weight.to(tl.float32)[:, None]
    if GATED:
        start = x_ptr + row[:, None] * (2 * I)
        if INTERLEAVED:
            wide = group[:, None] * 256 + tl.arange(0, 256)[None, :]
            both = tl.load(start + wide, mask=ok, other=0.0)
            gate, up = tl.split(tl.reshape(both, (GROUPS, 128, 2)))
        else:
            gate = tl.load(start + column, mask=ok, other=0.0)
            up = tl.load(start + I + column, mask=ok, other=0.0)
        gate, up = gate.to(tl.float32) * weight, up.to(tl.float32) * weight
        h = activate_two(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        x = tl.load(x_ptr + row[:, None] * I + column, mask=ok, other=0.0)
        h = activate_one(x.to(tl.float32) * weight, ACTIVATION)
    h, scale = rounded_columns(h, SCALES, WIDTH, NATIVE)
    if SCALES == "ue8m0":
        PARTS: tl.constexpr = 128 // WIDTH
        part = begin * PARTS + tl.arange(0, GROUPS * PARTS)
        owner = row_of(rows_ptr, first, part // (I // WIDTH), pairs)
        part %= I // WIDTH
        store_scale(scale_ptr, scale, owner, part, I // WIDTH, R, owner >= 0, SCALES)
    elif SCALES != "":
        store_scale(scale_ptr, scale, row, group, I // 128, R, row >= 0, SCALES)
    tl.store(h_ptr + row[:, None] * I + column, h.to(h_ptr.dtype.element_ty), mask=ok)


@arguments
class Activate:
    h: Pointer  # (rows, I), written
    quantized: Quantized
    x: Pointer  # (rows, N)
    layout: Layout
    weights: Pointer  # (S,) that multiply x first, or None
    weights_stride: Runtime
    S: Runtime
    I: Specialized  # noqa: E741
    activation: Activated
    programs: Runtime
    PDL: Constant


@kernel(Activate, waits=False)
def moe_ops_deep_gemm_activate(
    h_ptr,
    scale_ptr,
    SCALES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
    x_ptr,
    rows_ptr,
    groups_ptr,
    R,
    weights_ptr,
    weights_stride,
    S,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    programs,
    PDL: tl.constexpr,
):
    """h = activation(x), GROUPS groups of 128 columns at a time: those of one pair, then those of
    the next.

    I is a multiple of 128. Router weights that scale the input multiply the GEMM's output instead,
    which is linear in the input, so that they are applied in fp32 without rounding; but rows that
    are quantized here they multiply before.
    """
    gdc_launch_dependents(PDL)
    per_row = I // 128
    if rows_ptr is None:
        e = tl.program_id(0) // programs
        first, count = e.to(tl.int64) * R, tl.load(groups_ptr + e)
        begin = tl.program_id(0) % programs * GROUPS
        for unit in range(begin, count * per_row, programs * GROUPS):
            row = row_of(rows_ptr, first, (unit + tl.arange(0, GROUPS)) // per_row, count)
            activate_units(
                h_ptr, scale_ptr, x_ptr, rows_ptr, weights_ptr, weights_stride, first, unit, row,
                count, R, I, alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT, SCALES,
                WIDTH, GROUPS, NATIVE,
            )  # fmt: skip
    else:
        unit = tl.program_id(0) * GROUPS
        row = row_of(rows_ptr, 0, (unit + tl.arange(0, GROUPS)) // per_row, S)
        if tl.max(row, 0) < 0:
            return
        activate_units(
            h_ptr, scale_ptr, x_ptr, rows_ptr, weights_ptr, weights_stride, 0, unit, row, S, R,
            I, alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT, SCALES, WIDTH,
            GROUPS, NATIVE,
        )  # fmt: skip


def activate(
    a: ExpertsArgs | BatchedExpertsArgs,
    h: Operand,
    x: Tensor,
    layout: Layout,
    weights: Tensor | None,  # (S, 1) that multiply x first
    gpu: Gpu,
) -> Launch:
    """h = activation(x), quantized if h has scales."""
    I = h.data.shape[-1]  # noqa: E741
    if layout.rows is not None:
        pairs, shared = layout.rows.numel(), 1
        programs = cdiv(pairs * (I // 128), GROUPS)
    else:
        E, pairs = h.data.shape[0], 0
        shared = programs_of_expert(cdiv(layout.R * (I // 128), GROUPS), E)
        programs = E * shared
    data, how = quantized(h, gpu)
    args = Activate(
        h=data,
        quantized=how,
        x=x,
        layout=layout,
        weights=weights,
        weights_stride=0 if weights is None else weights.stride(0),
        S=pairs,
        I=I,
        activation=activated(a.activation, a.alpha, a.beta, a.limit),
        programs=shared,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_deep_gemm_activate, (programs, 1, 1), args)
