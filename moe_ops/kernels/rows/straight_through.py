"""Rows of a training step as a scheme quantizes activations: the values that its codes and scales
stand for. Imported at first launch only.

Elements and scales are those of `moe_ops.numerics`; their products are rounded to the dtype of the
output.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.device.e4m3 import (
    clamp,
    e4m3_scale,
    element_scale,
    largest_magnitude,
    nearest,
    quotient,
    reciprocal,
)
from moe_ops.kernels.launch import (
    Constant,
    Launch,
    Pointer,
    Specialized,
    arguments,
    kernel,
    unprefixed,
)
from moe_ops.kernels.place.layout import StridedRows, rows_of
from moe_ops.kernels.place.routing import RouterWeights, router_weights
from moe_ops.kernels.rows.emulated import power_of_two
from moe_ops.kernels.rows.frozen import Elements, Frozen
from moe_ops.meta.workspace import cdiv

CHUNK = 1024  # columns of a program, if that many are whole groups


@unprefixed
class Groups(NamedTuple):
    """How a program takes columns: COUNT groups of SIZE, a power of two."""

    COUNT: Constant
    SIZE: Constant


@arguments
class RoundRows:
    y: Pointer  # (rows, K), written
    x: StridedRows  # (rows, K)
    scale: Pointer  # (1,): the one scale of all rows, or None
    weights: RouterWeights  # (rows, 1), which multiply x; or none
    K: Specialized
    elements: Elements
    groups: Groups


@kernel(RoundRows)
def moe_ops_train_round_rows(
    y_ptr,
    x_ptr,
    x_stride_e,
    x_stride_m,
    x_stride_k,
    scale_ptr,
    weights_ptr,
    weights_stride_m,
    weights_stride_k,
    K,
    DTYPE: tl.constexpr,
    RULE: tl.constexpr,
    MX: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
):
    """y = what x, times its router weight if there is one, is when quantized. Grid: (rows, column
    tiles).
    """
    m = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * COUNT * SIZE
    k += tl.arange(0, COUNT)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x_ptrs = x_ptr + m * x_stride_m + k.to(tl.int64) * x_stride_k
    x = tl.load(x_ptrs, mask=k < K, other=0.0).to(tl.float32)
    if weights_ptr is not None:
        x *= tl.load(weights_ptr + m * weights_stride_m).to(tl.float32)
    if scale_ptr is not None:
        scale = tl.full((COUNT,), 1.0, tl.float32) * tl.load(scale_ptr).to(tl.float32)
        inverse = reciprocal(scale)
    else:
        amax = largest_magnitude(x, 1)
        if MX:
            scale, inverse = power_of_two(amax, RULE, MANTISSA, MAX_VALUE)
        else:
            if DTYPE == "int8":
                scale = element_scale(amax, True)
            else:
                tl.static_assert(DTYPE == "e4m3")
                scale = e4m3_scale(amax, RULE == "ceil")
            inverse = reciprocal(scale)
    # the product with a power of two is exact
    q = x * inverse[:, None] if MX else quotient(x, scale[:, None], inverse[:, None])
    if DTYPE == "int8":  # which has one number more below zero
        q = tl.where(q < -MAX_VALUE - 1, -MAX_VALUE - 1, tl.where(q > MAX_VALUE, MAX_VALUE, q))
    else:
        q = clamp(q, MAX_VALUE)
    y = nearest(q, MANTISSA, MIN_EXPONENT) * scale[:, None]
    tl.store(y_ptr + m * K + k, y.to(y_ptr.dtype.element_ty), mask=k < K)


def round_rows(
    how: Frozen, y: Tensor, x: Tensor, weights: Tensor | None, scale: Tensor | None
) -> Launch:
    """y (rows, K) = x (rows, K), times weights (rows, 1) if there are any, as a scheme quantizes
    it; `scale` is a known one of all rows.
    """
    rows, K = x.shape
    size = how.group or triton.next_power_of_2(K)
    groups = Groups(max(1, CHUNK // size), size)
    width = groups.COUNT * size
    assert how.elements is not None
    args = RoundRows(
        y=y,
        x=rows_of(x),
        scale=scale,
        weights=router_weights(weights),
        K=K,
        elements=how.elements,
        groups=groups,
    )
    warps = max(4, min(16, width // 512))  # of one scale a row, a program has all columns
    return Launch(moe_ops_train_round_rows, (rows, cdiv(K, width), 1), args, warps)
