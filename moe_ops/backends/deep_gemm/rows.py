"""The Triton kernel between DeepGEMM's two GEMMs: activate. Imported at first launch only.

Legend as in kernels/permute/scatter.py; I intermediate size, N columns of the first GEMM's output
(2 I if gated, else I). `rows` are those of the GEMMs' operands. Rows without a pair are neither
read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.backends.deep_gemm.library import Operand
from moe_ops.kernels.device.activations import activate_one, activate_two
from moe_ops.kernels.device.experts import ends_of_experts
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
from moe_ops.kernels.permute.layout import MAX_PROGRAMS, Layout, block_e, programs_of_expert
from moe_ops.kernels.permute.scatter import (
    GROUPS,
    Quantized,
    quantized,
    rounded_columns,
    store_scale,
)
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs


@triton.jit
def row_of(rows_ptr, ends, first, unit, end, per_row, ALIGNMENT: tl.constexpr):
    """The rows of units, of which each has `per_row`, from row `first` on; with rows_ptr those of
    pairs. -1 for units from `end` on, where an expert is not here, and with the ends of experts
    between one expert's last row and the next one's first.
    """
    index = unit // per_row
    if rows_ptr is not None:
        return tl.load(rows_ptr + index, mask=unit < end, other=-1).to(tl.int64)
    else:
        ok = unit < end
        if ends is not None:
            padded = tl.cdiv(ends, ALIGNMENT) * ALIGNMENT
            before = tl.where(ends[None, :] <= index[:, None], padded[None, :], 0)
            ok = ok & (index >= tl.max(before, 1))
        return tl.where(ok, first + index, -1)


@triton.jit
def activate_units(
    h_ptr, scale_ptr, x_ptr, rows_ptr, ends, weights_ptr, weights_stride, first, begin, row, end,
    R, I, alpha, beta, limit,  # noqa: E741
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr, SCALES: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    NATIVE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Activate GROUPS units from `begin` on, whose rows are `row`, -1 of those that are left out.
    A unit is 128 columns of a row, or of a pair's.
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
        owner = row_of(rows_ptr, ends, first, part, end * PARTS, I // WIDTH, ALIGNMENT)
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
    E: Runtime
    I: Specialized  # noqa: E741
    activation: Activated
    programs: Runtime
    BLOCK_E: Constant
    ALIGNMENT: Constant  # of the first rows of experts; 1 in the masked layout
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
    E,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    programs,
    BLOCK_E: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = activation(x), GROUPS groups of 128 columns at a time: those of one row, then those of
    the next. `programs` programs share the rows of each expert of the masked layout, or all rows
    of the contiguous one up to the last expert's end, which the host does not know.

    I is a multiple of 128. Router weights that scale the input multiply the GEMM's output instead,
    which is linear in the input, so that they are applied in fp32 without rounding; but rows that
    are quantized here they multiply before. With such weights pairs come in their order, since a
    row does not say whose it is.
    """
    gdc_launch_dependents(PDL)
    per_row = I // 128
    program, first = tl.program_id(0), tl.cast(0, tl.int64)
    ends = None
    if rows_ptr is None:
        e = program // programs
        first, end = e.to(tl.int64) * R, tl.load(groups_ptr + e) * per_row
    elif weights_ptr is not None:
        end = S * per_row
    else:
        ends = ends_of_experts(groups_ptr, E, BLOCK_E)
        end = tl.load(groups_ptr + E - 1) * per_row
        rows_ptr = None
    for begin in range(program % programs * GROUPS, end, programs * GROUPS):
        unit = begin + tl.arange(0, GROUPS)
        row = row_of(rows_ptr, ends, first, unit, end, per_row, ALIGNMENT)
        if tl.max(row, 0) >= 0:
            activate_units(
                h_ptr, scale_ptr, x_ptr, rows_ptr, ends, weights_ptr, weights_stride, first,
                begin, row, end, R, I, alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED,
                HAS_LIMIT, SCALES, WIDTH, GROUPS, NATIVE, ALIGNMENT,
            )  # fmt: skip


def activate(
    a: ExpertsArgs | BatchedExpertsArgs,
    h: Operand,
    x: Tensor,
    layout: Layout,
    weights: Tensor | None,  # (S, 1) that multiply x first
    gpu: Gpu,
    alignment: int = 1,  # of the first rows of experts, in the contiguous layout
) -> Launch:
    """h = activation(x), quantized if h has scales."""
    I = h.data.shape[-1]  # noqa: E741
    E = layout.groups.numel()
    if layout.rows is not None:
        pairs = layout.rows.numel()
        units = (layout.R if weights is None else pairs) * (I // 128)
        programs = shared = min(cdiv(units, GROUPS), MAX_PROGRAMS)
    else:
        pairs = 0
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
        E=E,
        I=I,
        activation=activated(a.activation, a.alpha, a.beta, a.limit),
        programs=shared,
        BLOCK_E=block_e(E),
        ALIGNMENT=alignment,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_deep_gemm_activate, (programs, 1, 1), args)
