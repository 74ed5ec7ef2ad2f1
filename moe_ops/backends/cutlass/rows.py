"""Triton kernels around the two grouped GEMMs: scatter and activate. Imported at first launch
only.

Legend: M tokens, S = M * top_k pairs, K hidden size, I intermediate size, N columns of the first
GEMM's output (2 I if gated, else I). `rows` (S,) is the row of each pair in the GEMMs' operands,
or -1 if its expert is not here; `ends` (E,) the row after each expert's last pair.

SCALES says where the scales of e4m3 data come from:
    "token"    computed from each row
    "known"    one that is known, for all rows
    "experts"  one that is known for each expert
    "given"    the data arrive quantized, with a scale for each row or one for all
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.device.activations import activate_one, activate_two
from moe_ops.kernels.device.e4m3 import clamp, e4m3_scale, quotient, reciprocal, stored
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
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
    unprefixed,
)
from moe_ops.kernels.permute.layout import Layout, block_e
from moe_ops.ops.args import ExpertsArgs


@unprefixed
class Quantized(NamedTuple):
    """How rows are quantized."""

    scale: Pointer  # (rows,) fp32, written, or None: not one for each row
    known: Pointer  # (1,) or (E,) fp32, or None
    E: Runtime
    SCALES: Constant
    BLOCK_E: Constant
    NATIVE: Constant


class Operand(NamedTuple):
    """Rows of a GEMM as kernels write them: e4m3 (rows, columns), and their scales."""

    data: Tensor
    scale: Tensor | None  # (rows,) fp32 where SCALES is "token" or "given", with one for each row
    known: Tensor | None  # (1,) or (E,)
    scales: str

    def quantized(self, E: int, gpu: Gpu) -> Quantized:
        return Quantized(self.scale, self.known, E, self.scales, block_e(E), gpu.native)


@triton.jit
def known_scale(known_ptr, ends_ptr, row, E, SCALES: tl.constexpr, BLOCK_E: tl.constexpr):
    """The scale that is known for a row."""
    if SCALES == "experts":
        e = tl.arange(0, BLOCK_E)
        ends = tl.load(ends_ptr + e, mask=e < E, other=0x7FFFFFFF)
        expert = tl.sum((ends <= row).to(tl.int32), 0)
        return tl.load(known_ptr + tl.minimum(expert, E - 1))
    else:
        return tl.load(known_ptr)


@triton.jit
def by_known(v, scale, NATIVE: tl.constexpr):
    """fp32 v as e4m3 with a known scale: what is too large becomes the largest number."""
    return stored(clamp(quotient(v, scale, reciprocal(scale)), 448.0), NATIVE)


@triton.jit
def by_token(v, NATIVE: tl.constexpr):
    """(fp32 v as e4m3, its scale)."""
    scale = e4m3_scale(tl.max(tl.abs(v), 0))
    return stored(quotient(v, scale, reciprocal(scale)), NATIVE), scale


@arguments
class Scatter:
    y: Pointer  # (rows, K), written
    quantized: Quantized
    x: Pointer  # (M, K)
    x_stride_m: Specialized
    x_stride_k: Specialized
    x_scale: Pointer  # (M,) of x that arrives quantized with a scale for each token, or None
    x_scale_stride: Runtime
    weights: Pointer  # (M,) that multiply x before it is quantized, or None
    weights_stride: Runtime
    layout: Layout
    K: Specialized
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
    BLOCK_E: tl.constexpr,
    NATIVE: tl.constexpr,
    x_ptr,
    x_stride_m,
    x_stride_k,
    x_scale_ptr,
    x_scale_stride,
    weights_ptr,
    weights_stride,
    rows_ptr,
    groups_ptr,
    R,
    K,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Read a token once, quantize it, and write it to the rows of its pairs. Grid: (M,)."""
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + m * x_stride_m + k.to(tl.int64) * x_stride_k, mask=k < K, other=0)
    scale = 1.0
    if SCALES == "given":
        y = x
        if x_scale_ptr is not None:
            scale = tl.load(x_scale_ptr + m * x_scale_stride)
    else:
        v = x.to(tl.float32)
        if weights_ptr is not None:
            v *= tl.load(weights_ptr + m * weights_stride).to(tl.float32)
        if SCALES == "token":
            y, scale = by_token(v, NATIVE)
        elif SCALES == "known":
            y = by_known(v, known_scale(known_ptr, groups_ptr, 0, E, SCALES, BLOCK_E), NATIVE)
        else:
            y = v
    gdc_wait(PDL)  # the kernels before this one write `rows`
    gdc_launch_dependents(PDL)
    for j in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + m * TOP_K + j).to(tl.int64)
        if row >= 0:
            of_pair = y
            if SCALES == "experts":
                known = known_scale(known_ptr, groups_ptr, row, E, SCALES, BLOCK_E)
                of_pair = by_known(y, known, NATIVE)
            tl.store(y_ptr + row * K + k, of_pair, mask=k < K)
            if scale_ptr is not None:
                tl.store(scale_ptr + row, scale)


@arguments
class Activate:
    h: Pointer  # (rows, I), written
    quantized: Quantized
    x: Pointer  # (rows, N)
    weights: Pointer  # (S,) that multiply x first, or None
    weights_stride: Runtime
    layout: Layout
    I: Specialized  # noqa: E741
    activation: Activated
    BLOCK_I: Constant
    PDL: Constant


@kernel(Activate)
def moe_ops_cutlass_activate(
    h_ptr,
    scale_ptr,
    known_ptr,
    E,
    SCALES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NATIVE: tl.constexpr,
    x_ptr,
    weights_ptr,
    weights_stride,
    rows_ptr,
    groups_ptr,
    R,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = activation(x), quantized. Grid: (S,), one program a pair."""
    gdc_launch_dependents(PDL)
    pair = tl.program_id(0)
    row = tl.load(rows_ptr + pair).to(tl.int64)
    if row < 0:
        return
    i = tl.arange(0, BLOCK_I)
    ok = i < I
    weight = 1.0
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + pair * weights_stride).to(tl.float32)
    if GATED:
        start = x_ptr + row * (2 * I)
        if INTERLEAVED:
            wide = tl.arange(0, 2 * BLOCK_I)
            both = tl.load(start + wide, mask=wide < 2 * I, other=0.0)
            gate, up = tl.split(tl.reshape(both, (BLOCK_I, 2)))
        else:
            gate = tl.load(start + i, mask=ok, other=0.0)
            up = tl.load(start + I + i, mask=ok, other=0.0)
        gate, up = gate.to(tl.float32) * weight, up.to(tl.float32) * weight
        h = activate_two(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        x = tl.load(x_ptr + row * I + i, mask=ok, other=0.0)
        h = activate_one(x.to(tl.float32) * weight, ACTIVATION)
    if SCALES == "token":
        y, scale = by_token(tl.where(ok, h, 0.0), NATIVE)
        tl.store(scale_ptr + row, scale)
    else:
        known = known_scale(known_ptr, groups_ptr, row, E, SCALES, BLOCK_E)
        y = by_known(h, known, NATIVE)
    tl.store(h_ptr + row * I + i, y, mask=ok)


def _warps(block: int) -> int:
    """Warps of a program that handles so many columns: 16 to 32 of each thread."""
    return max(1, min(16, block // 1024 * 2))


def _codes(data: Tensor, gpu: Gpu) -> Tensor:
    """e4m3 data, as bytes where the GPU does not have e4m3."""
    return data if gpu.native else data.view(torch.uint8)


def scatter(
    a: ExpertsArgs, y: Operand, layout: Layout, weights: Tensor | None, gpu: Gpu
) -> Launch:
    """hidden_states copied to the rows of their pairs: quantized, after they were multiplied by
    weights (M, 1) if there are any, unless they arrive so.
    """
    x, x_scale, data = a.hidden_states, a.hidden_states_scale, _codes(y.data, gpu)
    if y.scales == "given":
        x, data = x.view(torch.uint8), y.data.view(torch.uint8)
    M, K = x.shape
    block = triton.next_power_of_2(K)
    each = y.scale is not None and x_scale is not None
    args = Scatter(
        y=data,
        quantized=y.quantized(a.w13.shape[0], gpu),
        x=x,
        x_stride_m=x.stride(0),
        x_stride_k=x.stride(1),
        x_scale=x_scale if each else None,
        x_scale_stride=x_scale.stride(0) if each and x_scale is not None else 0,
        weights=weights,
        weights_stride=0 if weights is None else weights.stride(0),
        layout=layout,
        K=K,
        TOP_K=a.topk_ids.shape[1],
        BLOCK_K=block,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_cutlass_scatter, (M, 1, 1), args, _warps(block))


def activate(
    a: ExpertsArgs, h: Operand, x: Tensor, layout: Layout, weights: Tensor | None, gpu: Gpu
) -> Launch:
    """h = activation(x), quantized; x is multiplied by weights (S, 1) first if there are any."""
    I = h.data.shape[1]  # noqa: E741
    block = triton.next_power_of_2(I)
    args = Activate(
        h=_codes(h.data, gpu),
        quantized=h.quantized(a.w13.shape[0], gpu),
        x=x,
        weights=weights,
        weights_stride=0 if weights is None else weights.stride(0),
        layout=layout,
        I=I,
        activation=activated(a.activation, a.alpha, a.beta, a.limit),
        BLOCK_I=block,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_cutlass_activate, (a.topk_ids.numel(), 1, 1), args, _warps(block))
