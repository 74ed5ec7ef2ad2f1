"""Sums over rows and over columns that a training step takes beside its grouped products: the
gradients of biases, and of router weights where they are products of rows of width K. Imported at
first launch only.

Legend: derive.py. All sums are fp32 and in a fixed order: each is one program's.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from moe_ops.kernels.device.experts import ends_of_experts, expert_of_row
from moe_ops.kernels.launch import (
    Constant,
    Launch,
    Pointer,
    Specialized,
    arguments,
    kernel,
)
from moe_ops.kernels.place.layout import ExpertBias, Layout, StridedRows, expert_bias, rows_of
from moe_ops.meta.workspace import cdiv

BLOCK_K = 1024  # columns that a program of dot reads at a time
# rows and columns that a program of sum_rows reads at a time
BLOCK_S, BLOCK_C = 32, 128


@arguments
class Dot:
    out: Pointer  # (S,) fp32, written
    x: StridedRows  # (M, K)
    y: Pointer  # (S, K), rows of pairs; or None
    bias: ExpertBias  # (E, K), in the place of y
    layout: Layout
    K: Specialized
    TOP_K: Constant
    BLOCK_K: Constant


@kernel(Dot)
def moe_ops_train_dot(
    out_ptr,
    x_ptr,
    x_stride_e,
    x_stride_m,
    x_stride_k,
    y_ptr,
    bias_ptr,
    bias_E,
    bias_BLOCK_E: tl.constexpr,
    rows_ptr,
    groups_ptr,
    R,
    K,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """<x, y> of each pair's token and row, 0 for pairs whose expert is not here; or, added to what
    `out` holds, <x, bias> of its token and expert. Grid: M.
    """
    m = tl.program_id(0)
    x_ptr += m.to(tl.int64) * x_stride_m
    if bias_ptr is not None:
        ends = ends_of_experts(groups_ptr, bias_E, bias_BLOCK_E)
    for j in tl.static_range(TOP_K):
        pair = m * TOP_K + j
        row = tl.load(rows_ptr + pair)
        end = tl.where(row >= 0, K, 0)  # nothing is read for a pair whose expert is not here
        total = tl.zeros((BLOCK_K,), tl.float32)
        for first in tl.range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + k.to(tl.int64) * x_stride_k, mask=k < end, other=0.0)
            if bias_ptr is not None:
                y_ptrs = bias_ptr + expert_of_row(ends, row).to(tl.int64) * K + k
            else:
                y_ptrs = y_ptr + row.to(tl.int64) * K + k
            y = tl.load(y_ptrs, mask=k < end, other=0.0)
            total += x.to(tl.float32) * y.to(tl.float32)
        value = tl.sum(total, 0)
        if bias_ptr is not None:
            value += tl.load(out_ptr + pair)
        tl.store(out_ptr + pair, value)


def dot(
    out: Tensor,
    x: Tensor,
    layout: Layout,
    top_k: int,
    y: Tensor | None = None,
    bias: Tensor | None = None,
) -> Launch:
    """out (M, top_k) fp32 = the product of each token x (M, K) with the rows y (S, K) of its
    pairs; or out += its product with the bias (E, K) of its experts.
    """
    M, K = x.shape
    args = Dot(
        out=out,
        x=rows_of(x),
        y=y,
        bias=expert_bias(bias),
        layout=layout,
        K=K,
        TOP_K=top_k,
        BLOCK_K=BLOCK_K,
    )
    return Launch(moe_ops_train_dot, (M, 1, 1), args)


@arguments
class SumRows:
    out: Pointer  # (E, C), written
    x: Pointer  # (S, C)
    factors: Pointer  # (S,) fp32, or None
    groups: Pointer
    C: Specialized
    BLOCK_S: Constant
    BLOCK_C: Constant


@kernel(SumRows)
def moe_ops_train_sum_rows(
    out_ptr,
    x_ptr,
    factors_ptr,
    groups_ptr,
    C,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The sum of an expert's rows, each times its factor; zeros for experts without rows. Grid:
    (E, column tiles).
    """
    e = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    end = tl.load(groups_ptr + e)
    total = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    for start in tl.range(tl.load(groups_ptr + e - 1, mask=e > 0, other=0), end, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        ok = (s < end)[:, None] & (c < C)[None, :]
        x = tl.load(x_ptr + s.to(tl.int64)[:, None] * C + c[None, :], mask=ok, other=0.0)
        x = x.to(tl.float32)
        if factors_ptr is not None:
            x *= tl.load(factors_ptr + s, mask=s < end, other=0.0)[:, None]
        total += x
    sums = tl.sum(total, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + e.to(tl.int64) * C + c, sums, mask=c < C)


def sum_rows(out: Tensor, x: Tensor, factors: Tensor | None, layout: Layout) -> Launch:
    """out (E, C) = the sum of each expert's rows of x (S, C), times factors (S,) if there are
    any.
    """
    E, C = out.shape
    args = SumRows(
        out=out,
        x=x,
        factors=factors,
        groups=layout.groups,
        C=C,
        BLOCK_S=BLOCK_S,
        BLOCK_C=BLOCK_C,
    )
    return Launch(moe_ops_train_sum_rows, (E, cdiv(C, BLOCK_C), 1), args)
