"""Activations rounded as a scheme rounds them, for GPUs that do not multiply its formats. Imported at first launch only.

What is written stands for the quantized activations and meets weights in the product of triton_packed_matmul.py.
Elements and scales are those of `moe_ops.numerics`.

SCALE    how the scale of an element comes about:
         "mx"     a power of two for G columns: bf16 holds element times scale
         "nv"     e4m3 for G columns, under one scale for all rows: bf16 holds element times e4m3, the rest is left to
                  the finished sum
         "row"    fp32, one a row: bf16 holds the element, the rest is left to the finished sum
         "group"  fp32 for G columns: element times scale is rounded to fp32
"""

import triton
import triton.language as tl

from moe_ops.kernels.triton_fp8 import (
    clamp,
    element_scale,
    exponent_above,
    largest_magnitude,
    nearest,
    quotient,
    reciprocal,
)
from moe_ops.kernels.triton_routing import start_dependent, wait


@triton.jit
def power_of_two(amax, RULE: tl.constexpr, MANTISSA: tl.constexpr, LARGEST: tl.constexpr):
    """(scale, 1 / scale) by a rule of `schemes.QuantDesc`, from the largest magnitude of a group; NaN if not finite."""
    if RULE == "ceil":
        least = 1e-4 if MANTISSA == 1 else 0.0
        code = exponent_above(quotient(tl.maximum(amax, least), LARGEST, 1.0 / LARGEST))
    else:
        bits = amax.to(tl.int32, bitcast=True)
        if RULE == "round":
            bits += 1 << (22 - MANTISSA)
        exponent: tl.constexpr = 4 if LARGEST == 28.0 else 2  # of the largest number, 6, 7.5 or 28
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


@triton.jit(do_not_specialize=["T", "stride_tm"])
def moe_ops_fake_quantize(
    q_ptr,  # (rows, K) bf16 or fp32, written
    scale_ptr,  # fp32, written: "row" (rows,), "nv" (1,): what sums of q are to be multiplied by; else absent
    zero_ptr,  # (1,) fp32 set to zero, or absent
    x_ptr,  # (rows, K)
    amax_ptr,  # "nv": (PARTS,) fp32 whose largest is that of x, or (1,) the known scale of x; else absent
    topk_weights_ptr,  # (rows, 1) to multiply x by first, or absent
    T,
    stride_tm,
    K,
    stride_xe,  # what rows of batch m // T are off by from m * stride_xm
    stride_xm,
    stride_xk,
    SCALE: tl.constexpr,
    G: tl.constexpr,  # columns that share a scale; of whole rows any
    RULE: tl.constexpr,
    MANTISSA: tl.constexpr,  # of an element
    LEAST: tl.constexpr,  # exponent of its least normal number
    LARGEST: tl.constexpr,  # its largest number
    STATIC: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,  # columns at a time
    DEPENDENT: tl.constexpr,
):
    """A row a program, or some of its columns."""
    wait(DEPENDENT)
    m = tl.program_id(0).to(tl.int64)
    x_ptr += m // T * stride_xe + m * stride_xm
    factor = 1.0
    if topk_weights_ptr is not None:
        factor = tl.load(topk_weights_ptr + m * stride_tm).to(tl.float32)
    lane = tl.arange(0, CHUNK // G)[:, None] * G + tl.arange(0, G)[None, :]
    first = (m == 0) & (tl.program_id(1) == 0)
    if zero_ptr is not None:
        tl.store(zero_ptr, 0.0, mask=first)
    if SCALE == "row":
        amax = tl.zeros((CHUNK // G, G), tl.float32)
        for start in range(0, K, CHUNK):
            x = tl.abs(activations(x_ptr, start + lane, K, stride_xk, factor))
            amax = tl.where(x <= amax, amax, x)  # NaN stays
        of_row = element_scale(largest_magnitude(largest_magnitude(amax, 1), 0), False)
        tl.store(scale_ptr + m, of_row)
        inverse = reciprocal(of_row)
    if SCALE == "nv":
        if STATIC:
            given = tl.load(amax_ptr).to(tl.float32)
            whole = quotient(1.0, given, reciprocal(given))
        else:
            most = tl.max(tl.load(amax_ptr + tl.arange(0, PARTS)), 0)
            whole = quotient(448.0 * LARGEST, most, reciprocal(most))
            whole = tl.where(most == 0.0, 1.0, tl.minimum(whole, 3.4028234663852886e38))
        part_of_whole = reciprocal(whole)
        tl.store(scale_ptr, quotient(1.0, whole, part_of_whole), mask=first)
    for start in range(tl.program_id(1) * CHUNK, K, tl.num_programs(1) * CHUNK):
        k = start + lane
        x = activations(x_ptr, k, K, stride_xk, factor)
        if SCALE == "row":
            scale = of_row
        else:
            amax = largest_magnitude(x, 1)
            if SCALE == "mx":
                scale, inverse = power_of_two(amax, RULE, MANTISSA, LARGEST)
            elif SCALE == "group":
                scale = element_scale(amax, False)
                inverse = reciprocal(scale)
            else:
                of_group = clamp(whole * quotient(amax, LARGEST, 1.0 / LARGEST), 448.0)
                of_group = nearest(of_group, 3, -6)
                scale = quotient(tl.where(of_group == 0.0, 1.0, of_group), whole, part_of_whole)
                inverse = tl.where(of_group == 0.0, 0.0, reciprocal(scale))
            scale, inverse = scale[:, None], inverse[:, None]
        # by a power of two the product is exact
        q = x * inverse if SCALE == "mx" else quotient(x, scale, inverse)
        q = nearest(clamp(q, LARGEST), MANTISSA, LEAST)
        if SCALE == "nv":
            q *= of_group[:, None]
        elif SCALE != "row":
            q *= scale
        tl.store(q_ptr + m * K + k, q.to(q_ptr.dtype.element_ty), mask=k < K)
    start_dependent(DEPENDENT)
