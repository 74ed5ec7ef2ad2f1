"""Triton kernels around the two grouped GEMMs: scatter and activate. Imported at first launch
only.

Legend: M tokens, S = M * top_k pairs, K hidden size, I intermediate size, N columns of the first
GEMM's output (2 I if gated, else I). `rows` (S,) is the row of each pair in the GEMMs' operands,
or -1 if its expert is not here. For batches (E, T, ..) it is None, and row t of expert e is row
e * R + t. `groups` (E,) holds the row after each expert's last pair, or the rows of each batch.

SCALES says where the scales of e4m3 data come from:
    "token"    computed from each row
    "known"    one that is known, for all rows
    "experts"  one that is known for each expert
    "given"    the data arrive quantized, with a scale for each row or one for all
    "tensor"   computed from the largest magnitude of all rows, which is known: one scale
    "amax"     nothing is quantized, but that magnitude found
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
from moe_ops.kernels.gemm.operands import Activated
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
from moe_ops.kernels.permute.layout import (
    Layout,
    StridedRows,
    block_e,
    programs_of_expert,
    programs_of_rows,
    rows_of,
)
from moe_ops.meta.workspace import carve, round_up


@unprefixed
class Quantized(NamedTuple):
    """How rows are quantized."""

    scale: Pointer  # (rows,) fp32, written; of "tensor" (1,); or None: none to be written
    known: Pointer  # (1,) or (E,) fp32 scales, partial maxima of magnitudes, or None
    E: Runtime
    SCALES: Constant
    PARTIALS: Constant  # of "tensor": maxima in `known`, a power of two
    BLOCK_E: Constant
    NATIVE: Constant


class Operand(NamedTuple):
    """Rows of a GEMM as kernels write them: e4m3 (rows, columns), and their scales."""

    data: Tensor
    scale: Tensor | None  # fp32, written: one of each row; of "tensor" one; else None
    known: Tensor | None  # (1,) or (E,) scales; of "tensor" maxima of magnitudes
    scales: str

    @property
    def columns(self) -> int:
        return self.data.shape[1]

    @property
    def alpha(self) -> None:
        """Products have no factor, as they have with a global scale."""
        return None

    @property
    def scale_columns(self) -> int:
        return 0

    def quantized(self, E: int, gpu: Gpu) -> Quantized:
        """The operand as the kernels take it."""
        partials = self.known.numel() if self.known is not None and self.scales == "tensor" else 1
        known, scale = self.known, self.scale
        return Quantized(scale, known, E, self.scales, partials, block_e(E), gpu.native)

    @property
    def of_gemm(self) -> tuple[Tensor | None, int]:
        """The scales that a GEMM reads, and the elements between those of two experts: -1 where
        each row has its own.
        """
        if self.scales == "tensor":
            return self.scale, 0
        if self.known is None:
            return self.scale, -1
        return self.known, min(self.known.numel() - 1, 1)

    def raising(self) -> Operand:
        """The operand for `activate` to find the largest magnitude of alone."""
        return self._replace(scales="amax")

    def scatter(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        layout: Layout,
        top_k: int,
        weights: Tensor | None,
        gpu: Gpu,
    ) -> Launch:
        """x (M, K) or (E, T, K) copied to the rows of its pairs: quantized, after it was
        multiplied by weights (M, 1) if there are any, unless it arrives so, with scales.
        """
        return _scatter(self, x, x_scale, layout, top_k, weights, gpu)

    def activate(
        self, activation: Activated, x: Tensor, layout: Layout, weights: Tensor | None, gpu: Gpu
    ) -> Launch:
        """activation(x), quantized; x (rows, N) is multiplied by weights (S, 1) first if there
        are any.
        """
        return _activate(self, activation, x, layout, weights, gpu)


def operand_in(
    buffer: Tensor,
    num_rows: int,
    columns: int,
    known: Tensor | None,
    largest: Tensor | None,
    arrived: Tensor | None = None,
) -> Operand:
    """The operand (rows, columns) at the start of a workspace, with the scales that are written
    behind it: known ones, one that follows from largest magnitudes, those of rows that arrived
    quantized, or those of each row.
    """
    size = round_up(num_rows * columns, 128)
    everything = carve(buffer, (size + 4 * num_rows,), torch.uint8)
    data = everything[: num_rows * columns].view(torch.float8_e4m3fn).view(num_rows, columns)
    scale = everything[size:].view(torch.float32)
    if arrived is not None:
        one = arrived.numel() == 1 and arrived.ndim < 2
        known = arrived.reshape(-1) if one else None
        return Operand(data, None if one else scale, known, "given")
    if largest is not None:
        return Operand(data, scale[:1], largest, "tensor")
    if known is None:
        return Operand(data, scale, None, "token")
    return Operand(data, None, known, "known" if known.numel() == 1 else "experts")


@triton.jit
def known_scale(known_ptr, ends_ptr, row, E, BLOCK_E: tl.constexpr):
    """The scale that is known for the expert of a row."""
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + e, mask=e < E, other=0x7FFFFFFF)
    expert = tl.sum((ends <= row).to(tl.int32), 0)
    return tl.load(known_ptr + tl.minimum(expert, E - 1))


@triton.jit
def tensor_scale(partials_ptr, PARTIALS: tl.constexpr):
    """The scale of all rows, from their largest magnitude."""
    return e4m3_scale(tl.max(tl.load(partials_ptr + tl.arange(0, PARTIALS)), 0))


@triton.jit
def by_known(v, scale, NATIVE: tl.constexpr):
    """fp32 v as e4m3 with a known scale: what is too large becomes the largest number."""
    return stored(clamp(quotient(v, scale, reciprocal(scale)), 448.0), NATIVE)


@triton.jit
def by_token(v, NATIVE: tl.constexpr):
    """(fp32 v as e4m3, its scale)."""
    scale = e4m3_scale(tl.max(tl.abs(v), 0))
    return stored(quotient(v, scale, reciprocal(scale)), NATIVE), scale


class Scales(NamedTuple):
    """Scales (M, 1) or (E, T, 1) of rows that arrive quantized, or none."""

    ptr: Pointer
    stride_e: Runtime
    stride_m: Runtime


@triton.jit
def quantized_row(
    x, factor, known_ptr, e, SCALES: tl.constexpr, PARTIALS: tl.constexpr, NATIVE: tl.constexpr
):
    """(x * factor as e4m3, its scale), or x where each expert has a scale of its own and none is
    given.
    """
    scale = 1.0
    if SCALES == "given":
        y = x
    else:
        v = x.to(tl.float32)
        if factor is not None:
            v *= factor
        if SCALES == "token":
            y, scale = by_token(v, NATIVE)
        elif SCALES == "tensor":
            scale = tensor_scale(known_ptr, PARTIALS)
            y = by_known(v, scale, NATIVE)
        elif SCALES == "known":
            y = by_known(v, tl.load(known_ptr), NATIVE)
        elif e is not None:
            y = by_known(v, tl.load(known_ptr + e), NATIVE)
        else:
            y = v
    return y, scale


@arguments
class Scatter:
    y: Pointer  # (rows, K), written
    quantized: Quantized
    x: StridedRows
    x_scale: Scales
    weights: Pointer  # (M,) that multiply x before it is quantized, or None
    weights_stride: Runtime
    layout: Layout
    K: Specialized
    programs: Runtime
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
    PARTIALS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NATIVE: tl.constexpr,
    x_ptr,
    x_stride_e,
    x_stride_m,
    x_stride_k,
    x_scale_ptr,
    x_scale_stride_e,
    x_scale_stride_m,
    weights_ptr,
    weights_stride,
    rows_ptr,
    groups_ptr,
    R,
    K,
    programs,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Read a token once, quantize it, and write it to the rows of its pairs. Grid: one program a
    token; of batches, `programs` that share the rows of an expert.
    """
    k = tl.arange(0, BLOCK_K)
    x_ptr += k.to(tl.int64) * x_stride_k
    EACH: tl.constexpr = SCALES == "token" or SCALES == "given"
    if rows_ptr is None:
        gdc_wait(PDL)
        gdc_launch_dependents(PDL)
        e = (tl.program_id(0) // programs).to(tl.int64)
        for t in range(tl.program_id(0) % programs, tl.load(groups_ptr + e), programs):
            m = tl.cast(t, tl.int64)
            x = tl.load(x_ptr + (e * x_stride_e + m * x_stride_m), mask=k < K, other=0)
            y, scale = quantized_row(x, None, known_ptr, e, SCALES, PARTIALS, NATIVE)
            if x_scale_ptr is not None:
                scale = tl.load(x_scale_ptr + (e * x_scale_stride_e + m * x_scale_stride_m))
            tl.store(y_ptr + (e * R + m) * K + k, y, mask=k < K)
            if EACH and scale_ptr is not None:
                tl.store(scale_ptr + (e * R + m), scale)
    else:
        m = tl.program_id(0).to(tl.int64)
        x = tl.load(x_ptr + m * x_stride_m, mask=k < K, other=0)
        factor = None
        if weights_ptr is not None:
            factor = tl.load(weights_ptr + m * weights_stride).to(tl.float32)
        y, scale = quantized_row(x, factor, known_ptr, None, SCALES, PARTIALS, NATIVE)
        if x_scale_ptr is not None:
            scale = tl.load(x_scale_ptr + m * x_scale_stride_m)
        gdc_wait(PDL)  # the kernels before this one write `rows`
        gdc_launch_dependents(PDL)
        for j in tl.static_range(TOP_K):
            row = tl.load(rows_ptr + m * TOP_K + j).to(tl.int64)
            if row >= 0:
                of_pair = y
                if SCALES == "experts":
                    known = known_scale(known_ptr, groups_ptr, row, E, BLOCK_E)
                    of_pair = by_known(y, known, NATIVE)
                tl.store(y_ptr + row * K + k, of_pair, mask=k < K)
                if EACH and scale_ptr is not None:
                    tl.store(scale_ptr + row, scale)
    if SCALES == "tensor" and tl.program_id(0) == 0:
        tl.store(scale_ptr, tensor_scale(known_ptr, PARTIALS))


@triton.jit
def activated_row(
    x_ptr, weight, i, I, alpha, beta, limit,  # noqa: E741
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """The activation of a row of the first GEMM's output, fp32, and 0 in columns from I on."""
    ok = i < I
    if GATED:
        if INTERLEAVED:
            wide = tl.arange(0, 2 * BLOCK_I)
            both = tl.load(x_ptr + wide, mask=wide < 2 * I, other=0.0)
            gate, up = tl.split(tl.reshape(both, (BLOCK_I, 2)))
        else:
            gate = tl.load(x_ptr + i, mask=ok, other=0.0)
            up = tl.load(x_ptr + I + i, mask=ok, other=0.0)
        gate, up = gate.to(tl.float32) * weight, up.to(tl.float32) * weight
        h = activate_two(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        x = tl.load(x_ptr + i, mask=ok, other=0.0)
        h = activate_one(x.to(tl.float32) * weight, ACTIVATION)
    return tl.where(ok, h, 0.0)


@triton.jit
def raise_to(amax_ptr, h):
    """Raise the fp32 number >= 0 at an address to the largest magnitude in h, NaN left aside.

    As integers, the bits of floats >= 0 have the order of the floats. The final maximum does not
    depend on the order of the atomics, and most programs see that they need none.
    """
    amax = tl.max(tl.where(h == h, tl.abs(h), 0.0), 0)
    if amax > tl.load(amax_ptr, volatile=True):
        bits = amax.to(tl.int32, bitcast=True)
        tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@arguments
class Activate:
    h: Pointer  # (rows, I), written
    quantized: Quantized
    x: Pointer  # (rows, N)
    weights: Pointer  # (S,) that multiply x first, or None
    weights_stride: Runtime
    layout: Layout
    N: Specialized
    I: Specialized  # noqa: E741
    activation: Activated
    programs: Runtime
    BLOCK_I: Constant
    PDL: Constant


@kernel(Activate)
def moe_ops_cutlass_activate(
    h_ptr,
    scale_ptr,
    known_ptr,
    E,
    SCALES: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NATIVE: tl.constexpr,
    x_ptr,
    weights_ptr,
    weights_stride,
    rows_ptr,
    groups_ptr,
    R,
    N,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    programs,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = activation(x), quantized. Grid: one program a pair; of batches, `programs` that share
    the rows of an expert.
    """
    gdc_launch_dependents(PDL)
    i = tl.arange(0, BLOCK_I)
    if SCALES == "tensor" and tl.program_id(0) == 0:
        tl.store(scale_ptr, tensor_scale(known_ptr, PARTIALS))
    if rows_ptr is None:
        e = (tl.program_id(0) // programs).to(tl.int64)
        for t in range(tl.program_id(0) % programs, tl.load(groups_ptr + e), programs):
            row = e * R + t
            h = activated_row(
                x_ptr + row * N, 1.0, i, I, alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED,
                HAS_LIMIT, BLOCK_I,
            )  # fmt: skip
            if SCALES == "amax":
                raise_to(known_ptr, h)
            else:
                y, scale = quantized_row(h, None, known_ptr, e, SCALES, PARTIALS, NATIVE)
                tl.store(h_ptr + row * I + i, y, mask=i < I)
                if SCALES == "token":
                    tl.store(scale_ptr + row, scale)
    else:
        pair = tl.program_id(0).to(tl.int64)
        row = tl.load(rows_ptr + pair).to(tl.int64)
        if row < 0:
            return
        weight = 1.0
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + pair * weights_stride).to(tl.float32)
        h = activated_row(
            x_ptr + row * N, weight, i, I, alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED,
            HAS_LIMIT, BLOCK_I,
        )  # fmt: skip
        if SCALES == "amax":
            raise_to(known_ptr, h)
        else:
            if SCALES == "experts":
                scale = known_scale(known_ptr, groups_ptr, row, E, BLOCK_E)
                y = by_known(h, scale, NATIVE)
            else:
                y, scale = quantized_row(h, None, known_ptr, None, SCALES, PARTIALS, NATIVE)
            tl.store(h_ptr + row * I + i, y, mask=i < I)
            if SCALES == "token":
                tl.store(scale_ptr + row, scale)


def _warps(block: int) -> int:
    """Warps of a program that handles so many columns: 16 of each thread up to 16384."""
    return max(1, min(32, block // 1024 * 2))


def _codes(data: Tensor, gpu: Gpu) -> Tensor:
    """e4m3 data, as bytes where the GPU does not have e4m3."""
    return data if gpu.native else data.view(torch.uint8)


def _scatter(
    y: Operand,
    x: Tensor,
    x_scale: Tensor | None,
    layout: Layout,
    top_k: int,
    weights: Tensor | None,
    gpu: Gpu,
) -> Launch:
    K, data, (programs, shared) = x.shape[-1], y.data, programs_of_rows(x, layout, top_k)
    if y.scales == "given":
        x, data = x.view(torch.uint8), data.view(torch.uint8)
    scales = Scales(None, 0, 0)
    if x_scale is not None and y.scale is not None:  # one for each row
        stride_e, stride_m = (0, 0, *x_scale.stride())[-3:-1]
        scales = Scales(x_scale, stride_e, stride_m)
    block = triton.next_power_of_2(K)
    args = Scatter(
        y=_codes(data, gpu),
        quantized=y.quantized(layout.groups.shape[0], gpu),
        x=rows_of(x),
        x_scale=scales,
        weights=weights,
        weights_stride=0 if weights is None else weights.stride(0),
        layout=layout,
        K=K,
        programs=shared,
        TOP_K=top_k,
        BLOCK_K=block,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_cutlass_scatter, (programs, 1, 1), args, _warps(block))


def _activate(
    h: Operand,
    activation: Activated,
    x: Tensor,
    layout: Layout,
    weights: Tensor | None,
    gpu: Gpu,
) -> Launch:
    I = h.data.shape[1]  # noqa: E741
    block, E = triton.next_power_of_2(I), layout.groups.shape[0]
    if layout.rows is not None:
        programs, shared = layout.rows.numel(), 1
    else:
        shared = programs_of_expert(layout.R, E)
        programs = E * shared
    args = Activate(
        h=_codes(h.data, gpu),
        quantized=h.quantized(E, gpu),
        x=x,
        weights=weights,
        weights_stride=0 if weights is None else weights.stride(0),
        layout=layout,
        N=x.shape[1],
        I=I,
        activation=activation,
        programs=shared,
        BLOCK_I=block,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_cutlass_activate, (programs, 1, 1), args, _warps(block))
