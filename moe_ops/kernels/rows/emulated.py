"""Activations rounded as a scheme rounds them, for GPUs without products of its formats and for
training steps, and decoded if they arrive quantized. Imported at first launch only.

The output stands for the quantized activations: kernels/mixed_gemm/sm80_mma.py multiplies it with
the weights. Elements and scales are those of `moe_ops.numerics`.

SCALE    the scale of an element, and what the output holds:
         "mx"     a power of two for SCALE_GROUP columns: element times scale in bf16
         "nv"     an e4m3 scale for SCALE_GROUP columns and one scale for all rows: element times
                  e4m3 scale in bf16; the GEMM's finished sum is multiplied by the other scale
         "row"    one fp32 scale a row: the element in bf16; the GEMM's finished sum is multiplied
                  by the scale
         "group"  an fp32 scale for SCALE_GROUP columns: element times scale
         "one"    one known fp32 scale: element times scale
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.device.e4m3 import (
    clamp,
    decode_activation,
    e4m3_scale,
    element_scale,
    exponent_above,
    largest_magnitude,
    nearest,
    quotient,
    reciprocal,
    store_signed,
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
from moe_ops.kernels.place.routing import NO_ROUTER_WEIGHTS, RouterWeights, router_weights
from moe_ops.kernels.rows.e4m3_int8 import Valid, amax
from moe_ops.kernels.rows.rounding import GAP, Rounding, h_elements, x_elements
from moe_ops.kernels.rows.scales import NUM_PARTIALS, Input, Shared, flat
from moe_ops.meta.workspace import cdiv, round_up

CHUNK = 1024  # columns that a program rounds at a time


@triton.jit
def power_of_two(amax, RULE: tl.constexpr, MANTISSA: tl.constexpr, MAX_VALUE: tl.constexpr):
    """(scale, 1 / scale) of a group by a rule of `schemes.QuantDesc`, from its largest magnitude.
    Both are NaN if that is not finite.
    """
    if RULE == "ceil":
        least = 1e-4 if MANTISSA == 1 else 0.0
        code = exponent_above(quotient(tl.maximum(amax, least), MAX_VALUE, 1.0 / MAX_VALUE))
    else:
        bits = amax.to(tl.int32, bitcast=True)
        if RULE == "round":
            bits += 1 << (22 - MANTISSA)
        # exponent of MAX_VALUE, which is 6, 7.5 or 28
        exponent: tl.constexpr = 4 if MAX_VALUE == 28.0 else 2
        code = (bits >> 23) - exponent
    code = tl.minimum(tl.maximum(code, 0), 254)
    scale = tl.where(code == 0, 1 << 22, code << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(code == 254, 1 << 22, (254 - code) << 23).to(tl.float32, bitcast=True)
    return tl.where(amax < float("inf"), scale, float("nan")), inverse


@triton.jit
def activations(ptr, k, K, stride, factor):
    """x[k] * factor in fp32, 0 from column K on."""
    x = tl.load(ptr + k.to(tl.int64) * stride, mask=k < K, other=0.0)
    return x.to(tl.float32) * factor


@triton.jit
def row_scale(ptr, K, stride, factor, CHUNK: tl.constexpr):
    """The scale of e4m3 elements of a row of K columns times a factor."""
    lane = tl.arange(0, CHUNK)
    amax = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, K, CHUNK):
        x = tl.abs(activations(ptr, start + lane, K, stride, factor))
        amax = tl.where(x <= amax, amax, x)  # NaN stays NaN
    return element_scale(largest_magnitude(amax, 0), False)


@arguments
class Round:
    q: Pointer  # (rows, K) of 16 or 32 bits, written; with K_CHUNK e4m3 (rows, 2 K)
    # fp32, written: scales of the sums of q, (rows,) for "row", (1,) for "nv"; else None
    scale: Pointer
    zero: Pointer  # (1,) fp32, set to zero, or None
    # (rows, K); its scale: "nv" partial maxima of |x|, or (1,) the known scale; "one" (1,)
    x: Input
    topk_weights: RouterWeights  # (rows, 1); x is multiplied by them first
    T: Runtime  # rows of a batch
    K: Specialized
    rounding: Rounding
    STATIC: Constant  # known scales of x, of all experts or of each; 0 if there are none
    CHUNK: Constant  # columns at a time
    APART: Constant  # batches do not follow one another
    K_CHUNK: Constant  # e4m3 elements are written by `store_signed`; 0: q is as SCALE says
    PDL: Constant


@kernel(Round)
def moe_ops_round(
    q_ptr,
    scale_ptr,
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
    topk_weights_ptr,
    topk_weights_stride_m,
    topk_weights_stride_k,
    T,
    K,
    SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    RULE: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    STATIC: tl.constexpr,
    CHUNK: tl.constexpr,
    APART: tl.constexpr,
    K_CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Round rows. A program takes a row, or CHUNK of its columns."""
    if K_CHUNK:  # before a product that prefetches weights while the last programs of one run
        gdc_launch_dependents(PDL)
        gdc_wait(PDL)
    else:
        gdc_wait(PDL)
        gdc_launch_dependents(PDL)
    WHOLE_ROW: tl.constexpr = SCALE == "row" and SCALE_GROUP == CHUNK
    INT8: tl.constexpr = MAX_VALUE == 127.0
    m = tl.program_id(0).to(tl.int64)
    x_ptr += m * x_stride_m
    if APART:
        x_ptr += m // T * x_stride_e
    factor = 1.0
    if topk_weights_ptr is not None:
        factor = tl.load(topk_weights_ptr + m * topk_weights_stride_m).to(tl.float32)
    lane = (
        tl.arange(0, CHUNK // SCALE_GROUP)[:, None] * SCALE_GROUP
        + tl.arange(0, SCALE_GROUP)[None, :]
    )
    first = (m == 0) & (tl.program_id(1) == 0)
    if zero_ptr is not None:
        tl.store(zero_ptr, 0.0, mask=first)
    if SCALE == "row" and not WHOLE_ROW:
        scale = row_scale(x_ptr, K, x_stride_k, factor, CHUNK)
        tl.store(scale_ptr + m, scale)
        inverse = reciprocal(scale)
    elif SCALE == "one":
        scale = tl.load(x_scale_ptr).to(tl.float32)
        inverse = reciprocal(scale)
    elif SCALE == "nv":
        if STATIC:  # of one for each expert, the largest
            known = tl.arange(0, x_partials)
            given = tl.max(tl.load(x_scale_ptr + known, mask=known < STATIC, other=0.0), 0)
            given = given.to(tl.float32)
            whole = quotient(1.0, given, reciprocal(given))
        else:
            most = tl.max(tl.load(x_scale_ptr + tl.arange(0, x_partials)), 0)
            whole = quotient(448.0 * MAX_VALUE, most, reciprocal(most))
            whole = tl.where(most == 0.0, 1.0, tl.minimum(whole, 3.4028234663852886e38))
        part_of_whole = reciprocal(whole)
        tl.store(scale_ptr, quotient(1.0, whole, part_of_whole), mask=first)
    begin, end, step = tl.program_id(1) * CHUNK, K, tl.num_programs(1) * CHUNK
    if WHOLE_ROW:  # numbers that are known unroll the loop
        begin, end, step = 0, CHUNK, CHUNK
    for start in range(begin, end, step):
        k = start + lane
        x = activations(x_ptr, k, K, x_stride_k, factor)
        if WHOLE_ROW:
            scale = element_scale(largest_magnitude(largest_magnitude(x, 1), 0), False)
            tl.store(scale_ptr + m, scale)
            inverse = reciprocal(scale)
        elif SCALE != "row" and SCALE != "one":
            amax = largest_magnitude(x, 1)
            if SCALE == "mx":
                of_groups, of_inverse = power_of_two(amax, RULE, MANTISSA, MAX_VALUE)
            elif SCALE == "group":
                of_groups = element_scale(amax, True) if INT8 else e4m3_scale(amax, RULE == "ceil")
                of_inverse = reciprocal(of_groups)
            else:
                part = clamp(whole * quotient(amax, MAX_VALUE, 1.0 / MAX_VALUE), 448.0)
                part = nearest(part, 3, -6)
                of_groups = quotient(tl.where(part == 0.0, 1.0, part), whole, part_of_whole)
                of_inverse = tl.where(part == 0.0, 0.0, reciprocal(of_groups))
            scale, inverse = of_groups[:, None], of_inverse[:, None]
        # the product with a power of two is exact
        q = x * inverse if SCALE == "mx" else quotient(x, scale, inverse)
        if INT8:  # which has one number more below zero
            q = tl.where(q < -MAX_VALUE - 1, -MAX_VALUE - 1, tl.where(q > MAX_VALUE, MAX_VALUE, q))
        else:
            q = clamp(q, MAX_VALUE)
        q = nearest(q, MANTISSA, MIN_EXPONENT)
        if K_CHUNK:
            store_signed(q_ptr + m * K * 2, k, q, k < K, K_CHUNK)
        else:
            if SCALE == "nv":
                q *= part[:, None]
            elif SCALE != "row":
                q *= scale
            tl.store(q_ptr + m * K + k, q.to(q_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def e8m0_value(code):
    """The fp32 power of two of an e8m0 code."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 1 << 22, tl.where(code == 255, 0x7FC00000, code << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_value(code):
    """The fp32 value of e2m1 codes in the low four bits."""
    code = code.to(tl.int32)
    exponent, mantissa = (code >> 1) & 3, code & 1
    quarters = tl.where(exponent == 0, 2 * mantissa, (2 + mantissa) << exponent)
    return tl.where((code & 8) != 0, -0.25, 0.25) * quarters.to(tl.float32)


@arguments
class Decode:
    q: Pointer  # (rows, K) bf16 or fp32, written
    # fp32, written: scales of the sums of q, (rows,) for "row", (1,) for "nv"; else None
    scale: Pointer
    zero: Pointer  # (1,) fp32, set to zero, or None
    x: Input  # bytes: (rows, K) e4m3, or (rows, K / 2) pairs of e2m1, and their scales
    whole: Pointer  # (1,) fp32 that values are divided by ("nv"), or None
    T: Runtime  # rows of a batch
    K: Specialized
    SCALE: Constant
    SCALE_GROUP: Constant
    BITS: Constant  # of an element
    CHUNK: Constant
    PDL: Constant


@kernel(Decode)
def moe_ops_decode(
    q_ptr,
    scale_ptr,
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
    whole_ptr,
    T,
    K,
    SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """What moe_ops_round writes, of rows that arrive quantized. Grid: (rows, parts of a
    row of CHUNK columns).
    """
    gdc_wait(PDL)
    m = tl.program_id(0).to(tl.int64)
    x_ptr += m // T * x_stride_e + m * x_stride_m
    x_scale_ptr += m // T * x_scale_stride_e + m * x_scale_stride_m
    first = tl.program_id(1) == 0
    if zero_ptr is not None:
        tl.store(zero_ptr, 0.0, mask=first & (m == 0))
    if SCALE == "row":
        tl.store(scale_ptr + m, tl.load(x_scale_ptr), mask=first)
    elif SCALE == "nv":
        whole = tl.load(whole_ptr)
        tl.store(scale_ptr, quotient(1.0, whole, reciprocal(whole)), mask=first & (m == 0))
    g = tl.program_id(1) * (CHUNK // SCALE_GROUP) + tl.arange(0, CHUNK // SCALE_GROUP)
    k = g[:, None] * SCALE_GROUP + tl.arange(0, SCALE_GROUP)[None, :]
    if BITS == 4:
        code = tl.load(x_ptr + (k // 2).to(tl.int64) * x_stride_k, mask=k < K, other=0)
        q = e2m1_value(code.to(tl.int32) >> (k % 2 * 4))
    else:
        code = tl.load(x_ptr + k.to(tl.int64) * x_stride_k, mask=k < K, other=0)
        q = decode_activation(code).to(tl.float32)
    if SCALE != "row":
        scale_ptrs = x_scale_ptr + g.to(tl.int64) * x_scale_stride_g
        scale = tl.load(scale_ptrs, mask=g * SCALE_GROUP < K, other=0)
        if SCALE == "mx":
            scale = e8m0_value(scale)
        elif SCALE == "nv":
            scale = decode_activation(scale).to(tl.float32)
        q *= scale[:, None]
    tl.store(q_ptr + m * K + k, q.to(q_ptr.dtype.element_ty), mask=k < K)
    gdc_launch_dependents(PDL)


def decode_x(
    r: Rounding,
    x: Input,  # it arrives quantized: its elements and scales
    global_scale: Tensor | None,
    rows: int,
    rows_of_expert: int,  # of one expert if x is batched, else all
    K: int,
    workspace: Tensor,
    zero: Tensor | None,  # set to zero: GEMM1 raises it to the largest magnitude of h
    gpu: Gpu,
) -> tuple[list[Launch], Input]:
    """(launches before GEMM1, GEMM1's x)."""
    space = flat(workspace, torch.float32, x_elements(rows, K, r))
    end = _end(r, 0, rows, K)
    by_row, scale = r.SCALE == "row", None
    if r.SCALE in ("row", "nv"):
        scale = space[end:]
    assert x.scale is not None
    source = x._replace(ptr=x.data.view(torch.uint8))
    if x.scale.dtype == torch.float8_e4m3fn:
        source = source._replace(scale=x.scale.view(torch.uint8))
    data = flat(space, r.dtype, rows * K)
    args = Decode(
        q=data,
        scale=scale,
        zero=zero,
        x=source,
        whole=global_scale,
        T=rows_of_expert,
        K=K,
        SCALE=r.SCALE,
        SCALE_GROUP=r.SCALE_GROUP,
        BITS=4 if r.MAX_VALUE == 6.0 else 8,
        CHUNK=CHUNK,
        PDL=gpu.pdl,
    )
    launch = Launch(moe_ops_decode, (rows, cdiv(K, CHUNK), 1), args)
    return [launch], Input(data, 0, K, 1, scale, scale_stride_m=int(by_row))


class Hidden(NamedTuple):
    """h between the GEMMs."""

    written: Tensor  # h in fp32, which GEMM1 writes
    amax: Tensor | None  # zero; GEMM1 raises it to the largest magnitude of h
    launches: list[Launch]  # between the GEMMs
    read: Input  # GEMM2's input


def round_x(
    r: Rounding,
    x: Input,
    rows: int,
    rows_of_expert: int,  # of one expert if x is batched, else all
    K: int,
    workspace: Tensor,
    static: Tensor | None,
    valid: Valid,
    zero: Tensor | None,  # set to zero: GEMM1 raises it to the largest magnitude of h
    gpu: Gpu,
    shared: Shared | None = None,  # known already, of all rows of which these are a chunk
) -> tuple[list[Launch], Input]:
    """(launches before GEMM1, GEMM1's x). x is multiplied by router weights, if they scale the
    input.
    """
    space = flat(workspace, torch.float32, x_elements(rows, K, r))
    end = _end(r, 0, rows, K)
    launches = []
    if r.SCALE == "nv":
        largest, count = static, _scales_at_once(static)
        if largest is None and shared is not None:
            largest, count = shared.x, NUM_PARTIALS
        elif largest is None:
            largest, count = space[end:], NUM_PARTIALS
            launches.append(amax(x, rows, rows_of_expert, K, largest, valid, None, gpu))
        x = Input(x.ptr, x.stride_e, x.stride_m, x.stride_k, largest, partials=count)
    launch, rounded = _round(
        *(r, x, rows, rows_of_expert, K, space, 0, end),
        *(_known_scales(static), zero if shared is None else None, valid.topk_weights, gpu),
    )
    return [*launches, launch], rounded


def round_h(
    r: Rounding,
    rows: int,
    I: int,
    workspace: Tensor,
    static: Tensor | None,
    gpu: Gpu,
    shared: Shared | None = None,
) -> Hidden:
    """The Hidden of h (rows, I): its buffers, and the launches that round it."""
    space = flat(workspace, torch.float32, h_elements(rows, I, r))
    after = rows * I
    largest = amax = None
    if r.SCALE == "nv":
        if static is None:
            amax = space[after : after + 1] if shared is None else shared.h
        largest = amax if static is None else static
    source = Input(space, 0, I, 1, largest, partials=_scales_at_once(static))
    start = after + GAP
    launch, read = _round(
        *(r, source, rows, rows, I, space, start, _end(r, start, rows, I)),
        *(_known_scales(static), None, NO_ROUTER_WEIGHTS, gpu),
    )
    return Hidden(space, amax, [launch], read)


def _known_scales(static: Tensor | None) -> int:
    """STATIC of moe_ops_round. Their tensor is contiguous."""
    return 0 if static is None else static.numel()


def _scales_at_once(static: Tensor | None) -> int:
    """x_partials of known scales: the least power of two that holds them."""
    return 1 << (max(_known_scales(static), 1) - 1).bit_length()


def _end(r: Rounding, start: int, rows: int, columns: int) -> int:
    """The fp32 element at which rounded activations end that begin at element `start`."""
    return start + round_up(rows * columns * r.dtype.itemsize, 4 * GAP) // 4


def _round(
    r: Rounding,
    source: Input,  # "nv": its scale holds partial maxima, or the known scale
    rows: int,
    rows_of_expert: int,
    columns: int,
    space: Tensor,  # fp32: rounded activations from `start` to `end`, then their scales
    start: int,
    end: int,
    static: int,  # known scales
    zero: Tensor | None,
    weights: RouterWeights,
    gpu: Gpu,
) -> tuple[Launch, Input]:
    by_row, scale = r.SCALE == "row", None
    if by_row:
        scale = space[end:]
    elif r.SCALE == "nv":  # after the partial maxima
        scale = space[end + NUM_PARTIALS :]
    data = flat(space[start:] if start else space, r.dtype, rows * columns)
    args = Round(
        q=data,
        scale=scale,
        zero=zero,
        x=source,
        topk_weights=weights,
        T=rows_of_expert,
        K=columns,
        rounding=r,
        STATIC=static,
        CHUNK=CHUNK,
        APART=source.stride_e != 0,
        K_CHUNK=0,
        PDL=gpu.pdl,
    )
    rounded = Input(data, 0, columns, 1, scale, scale_stride_m=int(by_row))
    grid = (rows, 1 if by_row else cdiv(columns, CHUNK), 1)
    return Launch(moe_ops_round, grid, args), rounded


def round_rows(
    rounding: Rounding,  # SCALE_GROUP 0: one scale a row
    y: Tensor,  # (rows, K), written
    x: Tensor,  # (rows, K)
    weights: Tensor | None,  # (rows, 1)
    known: Tensor | None,  # (1,)
    gpu: Gpu,
) -> Launch:
    """y = x, times weights if there are any, as a scheme quantizes it, in y's dtype; with a known
    scale of all rows, if there is one.
    """
    (rows, K), size = x.shape, rounding.SCALE_GROUP or triton.next_power_of_2(x.shape[1])
    chunk = max(CHUNK, size)
    scale = rounding.SCALE if known is None else "one"
    args = Round(
        q=y,
        scale=None,
        zero=None,
        x=Input(x, 0, x.stride(0), x.stride(1), known),
        topk_weights=router_weights(weights),
        T=rows,
        K=K,
        rounding=rounding._replace(SCALE=scale, SCALE_GROUP=size),
        STATIC=0,
        CHUNK=chunk,
        APART=False,
        K_CHUNK=0,
        PDL=gpu.pdl,
    )
    warps = max(4, min(16, chunk // 512))  # of one scale a row, a program has all columns
    return Launch(moe_ops_round, (rows, cdiv(K, chunk), 1), args, warps)
