"""The kernel that activates what a first product returns, and quantizes it on the way. Imported at
first launch only.

Legend: S = M * top_k pairs, I intermediate size, N columns of the first product (2 I if gated,
else I), E local experts. `rows` (S,) is the row of each pair, or -1 if its expert is not here;
`groups` (E,) the row after each expert's last. For batches `rows` is None, `groups` the rows of
each expert, and row t of expert e is row e * R + t; `programs` programs share an expert's rows.
Rows without a pair are neither read nor written, but where rows follow one another: their order
is that of the programs then, which read no `rows`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.activation import Activated
from moe_ops.kernels.device.activations import BY_EXPERT, activated_columns
from moe_ops.kernels.device.e4m3 import largest_magnitude
from moe_ops.kernels.device.pdl import gdc_launch_dependents
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
from moe_ops.kernels.place.routing import RouterWeights, router_weights
from moe_ops.kernels.rows.formats import (
    GROUPS,
    Columns,
    Written,
    expert_of,
    known_scale,
    quantized,
    rounded_columns,
    store,
    store_scale,
    store_shared,
    tile_of,
    warps_of,
    written,
)
from moe_ops.kernels.rows.operand import GROUP_SCALES, Operand
from moe_ops.meta.workspace import cdiv, round_up

WARP = 256  # columns that a warp takes at a time: 16 bytes a thread
# Programs of a multiprocessor up to which each lets the next kernel start early. Of more, those
# that have ended make room for the next kernel's, which wait where others could run.
SIGNALLING = 512


@triton.jit
def raise_to(amax_ptr, h, NAN: tl.constexpr):
    """Raise the fp32 number >= 0 at an address to the largest magnitude in h; NaN is left aside,
    or (NAN) above all numbers.

    As integers, the bits of floats >= 0 have the order of the floats. The final maximum does not
    depend on the order of the atomics, and most programs see that they need none.
    """
    if not NAN:
        h = tl.where(h == h, h, 0.0)
    bits = largest_magnitude(h, 0).to(tl.int32, bitcast=True)
    amax_ptr = amax_ptr.to(tl.pointer_type(tl.int32))
    if bits > tl.load(amax_ptr, volatile=True):
        tl.atomic_max(amax_ptr, bits, sem="relaxed")


@triton.jit
def activate_row(
    to, x_ptr, bias_ptr, divisors_ptr, groups_ptr, row, expert, weight, tile, N, I, R,
    act, BLOCK: tl.constexpr, RAISES: tl.constexpr,
):  # fmt: skip
    """Activate a tile of BLOCK columns of a row, of which `expert` may be None."""
    e = expert
    HAS_LIMIT: tl.constexpr = act[6]
    if expert is None and (
        to.KNOWN == "experts" or bias_ptr is not None or divisors_ptr is not None
        or HAS_LIMIT == BY_EXPERT
    ):  # fmt: skip
        e = expert_of(to, groups_ptr, row)
    if bias_ptr is not None:
        bias_ptr += e.to(tl.int64) * N
    if divisors_ptr is not None:
        divisors_ptr += e.to(tl.int64) * N
    first = 0 if to.KIND == "row" else tile * BLOCK
    h = activated_columns(
        x_ptr + row * N, weight, first, I, *act, BLOCK, divisors_ptr, bias_ptr, None, e
    )  # fmt: skip
    i = first + tl.arange(0, BLOCK)
    if to.KIND != "":
        h = tl.where(i < I, h, 0.0)
    if RAISES:
        raise_to(to.known, h, to.KIND == "tiles")
    else:
        part = 0
        if to.KIND == "tiles":
            h = tl.reshape(h, (BLOCK // to.WIDTH, to.WIDTH))
            part = tile * (BLOCK // to.WIDTH) + tl.arange(0, BLOCK // to.WIDTH)
        y, scale = quantized(h, known_scale(to, e), to)
        store(to, y, scale, row, i, part, I, I, R, groups_ptr)


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
    to, x_ptr, rows_ptr, weights_ptr, weights_stride, first, begin, row, pairs, N, I, R,
    act, GROUPS: tl.constexpr,
):  # fmt: skip
    """Activate GROUPS units from `begin` on, out of those of `pairs` pairs. A unit is 128 columns
    of a pair, and `row` (GROUPS,) holds the units' rows, whose experts are not known here.
    """
    tl.static_assert(act[6] != BY_EXPERT, "parameters by expert want rows of known experts")
    unit = begin + tl.arange(0, GROUPS)
    pair, group = unit // (I // 128), unit % (I // 128)
    ok = (row >= 0)[:, None]
    weight = 1.0
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + pair * weights_stride, mask=row >= 0, other=0.0)
        weight = weight.to(tl.float32)[:, None]
    column = group[:, None] * 128
    h = activated_columns(
        x_ptr + row[:, None] * N, weight, column, I, *act, 128, None, None, ok
    )  # fmt: skip
    h, scale = rounded_columns(h, to.SCALES, to.WIDTH, to.NATIVE)
    if to.SCALES == "ue8m0":
        PARTS: tl.constexpr = 128 // to.WIDTH
        part = begin * PARTS + tl.arange(0, GROUPS * PARTS)
        owner = row_of(rows_ptr, first, part // (I // to.WIDTH), pairs)
        part %= I // to.WIDTH
        store_scale(to.scale, scale, owner, part, I // to.WIDTH, R, owner >= 0, to.SCALES)
    else:
        store_scale(to.scale, scale, row, group, I // 128, R, row >= 0, to.SCALES)
    h_ptrs = to.data + row[:, None] * I + (column + tl.arange(0, 128)[None, :])
    tl.store(h_ptrs, h.to(to.data.dtype.element_ty), mask=ok)


@triton.jit
def activate_rows(
    to, x_ptr, bias_ptr, divisors_ptr, weights_ptr, weights_stride_m, rows_ptr, groups_ptr, R, S,
    N, I, act, programs, BLOCK: tl.constexpr, SORTED: tl.constexpr,
    RAISES: tl.constexpr,
):  # fmt: skip
    """A program of moe_ops_activate. What it writes, and the activation, are one argument each."""
    GROUPS: tl.constexpr = BLOCK // 128
    program, tile = tl.program_id(0), tl.program_id(1)
    if not RAISES:
        store_shared(to, (program == 0) & (tile == 0))
    if SORTED:
        row = program.to(tl.int64)
        if row < tl.load(groups_ptr + to.E - 1):
            activate_row(
                to, x_ptr, bias_ptr, divisors_ptr, groups_ptr, row, None, 1.0, tile, N, I, R,
                act, BLOCK, RAISES,
            )  # fmt: skip
    elif to.KIND == "groups":
        if rows_ptr is None:
            e = program // programs
            first, pairs = e.to(tl.int64) * R, tl.load(groups_ptr + e)
            begin = program % programs * GROUPS
            for unit in range(begin, pairs * (I // 128), programs * GROUPS):
                row = row_of(rows_ptr, first, (unit + tl.arange(0, GROUPS)) // (I // 128), pairs)
                activate_units(
                    to, x_ptr, rows_ptr, weights_ptr, weights_stride_m, first, unit, row, pairs,
                    N, I, R, act, GROUPS,
                )  # fmt: skip
        else:
            unit = program * GROUPS
            row = row_of(rows_ptr, 0, (unit + tl.arange(0, GROUPS)) // (I // 128), S)
            if tl.max(row, 0) >= 0:
                activate_units(
                    to, x_ptr, rows_ptr, weights_ptr, weights_stride_m, 0, unit, row, S, N, I, R,
                    act, GROUPS,
                )  # fmt: skip
    elif rows_ptr is None:
        e = (program // programs).to(tl.int64)
        for t in range(program % programs, tl.load(groups_ptr + e), programs):
            activate_row(
                to, x_ptr, bias_ptr, divisors_ptr, groups_ptr, e * R + t, e, 1.0, tile, N, I, R,
                act, BLOCK, RAISES,
            )  # fmt: skip
    else:
        row = tl.load(rows_ptr + program).to(tl.int64)
        if row >= 0:
            weight = 1.0
            if weights_ptr is not None:
                at = program.to(tl.int64) * weights_stride_m
                weight = tl.load(weights_ptr + at).to(tl.float32)
            activate_row(
                to, x_ptr, bias_ptr, divisors_ptr, groups_ptr, row, None, weight, tile, N, I, R,
                act, BLOCK, RAISES,
            )  # fmt: skip


@arguments
class Activate:
    to: Written
    x: Pointer  # (rows, N)
    bias: Pointer  # (E, N) that is added to x, or None
    divisors: Pointer  # (E, N) fp32 that divide x, or None
    weights: RouterWeights  # (S, 1) that multiply x first, or none
    layout: Layout
    S: Runtime
    N: Specialized
    I: Specialized
    activation: Activated
    programs: Runtime
    tile: Columns
    SORTED: Constant  # rows of pairs follow one another, and programs take one each
    RAISES: Constant  # the largest magnitude at `known`, and write nothing else
    PDL: Constant


@kernel(Activate, waits=False)
def moe_ops_activate(
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
    bias_ptr,
    divisors_ptr,
    weights_ptr,
    weights_stride_m,
    weights_stride_k,
    rows_ptr,
    groups_ptr,
    R,
    S,
    N,
    I,
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    programs,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    SORTED: tl.constexpr,
    RAISES: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = activation((x * weight + bias) / divisors), quantized; or (RAISES) its largest magnitude
    alone. Where a scale of all rows follows from h, the activation is computed twice: reading x
    once more costs no more than h in fp32, written and read.

    Grid: (S, or programs that share batches; tiles of a row). Where groups of 128 columns have
    scales, of which I is a multiple, programs take GROUPS of them at a time: those of one pair,
    then those of the next. Grid: S * I / 128 / GROUPS, or programs that share batches.
    """
    gdc_launch_dependents(PDL)
    activate_rows(
        Written(
            data_ptr, scale_ptr, known_ptr, alpha_ptr, w_global_ptr, E, scale_columns, KIND,
            SCALES, WIDTH, KNOWN, PARTIALS, BLOCK_E, NATIVE, RULE, MANTISSA, MIN_EXPONENT,
            MAX_VALUE,
        ),
        x_ptr, bias_ptr, divisors_ptr, weights_ptr, weights_stride_m, rows_ptr, groups_ptr, R, S,
        N, I, (alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT), programs, BLOCK,
        SORTED, RAISES,
    )  # fmt: skip


def columns_at_once(I: int) -> tuple[int, int]:
    """(columns that a program takes at a time, its warps) of rows of I columns of 16 bits: 8
    columns a thread, as few past the last one as possible.
    """
    warps = min((4, 2, 1), key=lambda warps: round_up(I, WARP * warps))
    return WARP * warps, warps


def activate(
    h: Operand,
    activation: Activated,
    x: Tensor,  # (rows, N)
    layout: Layout,
    gpu: Gpu,
    weights: Tensor | None = None,  # (S, 1)
    bias: Tensor | None = None,  # (E, N), contiguous
    divisors: Tensor | None = None,  # (E, N, 1) fp32
    in_order: bool = False,
    raises: bool = False,
) -> Launch:
    """h = activation((x * weights + bias) / divisors), quantized if h has scales.

    Args:
        in_order: rows of pairs follow one another without padding between experts, so that
            programs need not look for them. No weights are given then.
        raises: the largest magnitude at `h.known_scale` is raised, and h not written.
    """
    I, N, E = h.columns, x.shape[-1], layout.groups.shape[0]
    tile = tile_of(h)
    warps = warps_of(h, tile)
    if not h.scales:
        columns, warps = columns_at_once(I)
        tile = Columns(columns, 0)
    units = h.scales in GROUP_SCALES
    tasks, pairs, shared = 1 if h.scales == "row" else cdiv(I, tile.BLOCK), 0, 1
    if layout.rows is not None:
        pairs = layout.rows.numel()
        grid = (cdiv(pairs * (I // 128), GROUPS), 1, 1) if units else (pairs, tasks, 1)
    else:
        shared = programs_of_expert(cdiv(layout.R * (I // 128), GROUPS) if units else layout.R, E)
        grid = (E * shared, 1 if units else tasks, 1)
    args = Activate(
        to=written(h, layout, gpu),
        x=x,
        bias=bias,
        divisors=divisors,
        weights=router_weights(weights),
        layout=layout,
        S=pairs,
        N=N,
        I=I,
        activation=activation,
        programs=shared,
        tile=tile,
        SORTED=in_order,
        RAISES=raises,
        PDL=gpu.pdl and grid[0] * grid[1] <= SIGNALLING * gpu.multiprocessors,
    )
    return Launch(moe_ops_activate, grid, args, warps)
