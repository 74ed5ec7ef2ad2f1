"""Triton kernels around the block-scaled GEMMs: scatter and activate. Imported at first
launch only.

Legend: M tokens, S = M * top_k pairs, K hidden size, I intermediate size, N columns of the first
GEMM's output (2 I if gated, else I), SIZE columns that share a scale. `rows` (S,) is the row of
each pair in the GEMMs' operands, or -1 if its expert is not here; `ends` (E,) the row after each
expert's last pair.

Data of experts follow one another. Their scales do not: those of each expert begin a tile of 128
rows, of which rows past the expert's last are not written. They multiply rows of the product that
are not stored. Padding columns are multiplied with the zeros past K, and are written as zeros.

WHOLE says where the global scale of nvfp4 comes from:
    ""         there is none
    "known"    1 / one scale that is known
    "experts"  1 / one scale that is known for each expert
    "amax"     computed from largest magnitudes
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.backends.cutlass.schemes import BLOCK_SCALED
from moe_ops.kernels.device.activations import activate_one, activate_two
from moe_ops.kernels.device.e4m3 import (
    clamp,
    largest_magnitude,
    nearest,
    quotient,
    reciprocal,
    stored,
)
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
from moe_ops.kernels.permute.layout import Layout, block_e
from moe_ops.kernels.quantize.emulated import power_of_two
from moe_ops.kernels.quantize.rounding import Rounding, rounding_of
from moe_ops.meta.workspace import carve, cdiv, round_up

CHUNK = 1024  # columns that a program quantizes; scales of so many columns fill whole tiles


@triton.jit
def place_of_scales(ends_ptr, row, E, BLOCK_E: tl.constexpr):
    """(expert of a row, row of its scales)."""
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + e, mask=e < E, other=0x7FFFFFFF)
    starts = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    before = ends <= row
    tiles = tl.where(before, tl.cdiv(ends - starts, 128), 0)
    first = tl.max(tl.where(before, ends, 0), 0)
    return tl.sum(before.to(tl.int32), 0), tl.sum(tiles, 0) * 128 + row - first


@triton.jit
def swizzled(row, column, columns):
    """Byte of the scale (row, column) of rows of `columns` scales."""
    tile = row.to(tl.int64) // 128 * 128 * columns + column // 4 * 512
    return tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


@triton.jit
def e2m1_code(magnitude):
    """The code of a number 0, 0.5, 1, 1.5, 2, 3, 4 or 6."""
    normal = (magnitude.to(tl.int32, bitcast=True) >> 22) - 252  # exponent bias 127 becomes 1
    return tl.where(magnitude < 1.0, tl.where(magnitude > 0.0, 1, 0), normal & 7)


@triton.jit
def quantized(
    x,
    whole,
    SCALE: tl.constexpr,
    RULE: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """(elements, scale codes (G,)) of fp32 x (G, SIZE) as `moe_ops.numerics` quantizes them.
    Elements are e4m3 (G, SIZE), or bytes of two e2m1 codes (G, SIZE / 2).
    """
    amax = largest_magnitude(x, 1)
    if SCALE == "mx":
        scale, inverse = power_of_two(amax, RULE, MANTISSA, MAX_VALUE)
        code = ((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF).to(tl.uint8)
        q = x * inverse[:, None]  # exact
    else:
        of_group = clamp(whole * quotient(amax, MAX_VALUE, 1.0 / MAX_VALUE), 448.0)
        code = stored(of_group, NATIVE).to(tl.uint8, bitcast=True)
        of_group = nearest(of_group, 3, -6)
        zero = of_group == 0.0
        scale = quotient(tl.where(zero, 1.0, of_group), whole, reciprocal(whole))
        q = quotient(x, scale[:, None], reciprocal(scale)[:, None])
        q = tl.where(zero[:, None], 0.0, q)
    q = clamp(q, MAX_VALUE)
    if MAX_VALUE == 448.0:
        return stored(q, NATIVE), code
    else:
        codes = e2m1_code(tl.abs(nearest(q, MANTISSA, MIN_EXPONENT)))
        codes |= (x.to(tl.int32, bitcast=True) >> 28) & 8
        low, high = tl.split(tl.reshape(codes, (x.shape[0], x.shape[1] // 2, 2)))
        return (low | (high << 4)).to(tl.uint8), code


@triton.jit
def store(
    data_ptr,
    scale_ptr,
    columns,
    row,
    scale_row,
    first,  # group
    K,
    q,
    code,
    SIZE: tl.constexpr,
    MAX_VALUE: tl.constexpr,
):
    """Write groups of a row from group `first` on, and zeros as scales past the last."""
    ELEMENTS: tl.constexpr = 1 if MAX_VALUE == 448.0 else 2  # of a byte
    WIDE: tl.constexpr = SIZE // ELEMENTS
    group = first + tl.arange(0, code.shape[0])
    byte = group[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    row_bytes = K // ELEMENTS
    tl.store(data_ptr + row.to(tl.int64) * row_bytes + byte, q, mask=byte < row_bytes)
    code = tl.where(group * SIZE < K, code, 0)
    tl.store(scale_ptr + swizzled(scale_row, group, columns), code, mask=group < columns)


@triton.jit
def global_scale(
    known_ptr, expert, WHOLE: tl.constexpr, PARTIALS: tl.constexpr, MAX_VALUE: tl.constexpr
):
    """The global scale of rows of an expert, which is 0 if all experts have one."""
    if WHOLE == "":
        return 1.0
    elif WHOLE == "amax":
        most = tl.max(tl.load(known_ptr + tl.arange(0, PARTIALS)), 0)
        whole = quotient(448.0 * MAX_VALUE, most, reciprocal(most))
        return tl.where(most == 0.0, 1.0, tl.minimum(whole, 3.4028234663852886e38))
    else:
        given = tl.load(known_ptr + expert).to(tl.float32)
        return quotient(1.0, given, reciprocal(given))


@triton.jit
def store_alphas(
    alpha_ptr, known_ptr, w_global_ptr, E,
    WHOLE: tl.constexpr, PARTIALS: tl.constexpr, MAX_VALUE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """1 / (global scale of the activations * that of the weights) of every expert."""
    e = tl.arange(0, BLOCK_E)
    if WHOLE == "experts":
        given = tl.load(known_ptr + e, mask=e < E, other=1.0).to(tl.float32)
        whole = quotient(1.0, given, reciprocal(given))
    else:
        whole = global_scale(known_ptr, 0, WHOLE, PARTIALS, MAX_VALUE)
    w = tl.load(w_global_ptr + e, mask=e < E, other=1.0)
    alpha = quotient(quotient(1.0, whole, reciprocal(whole)), w, reciprocal(w))
    tl.store(alpha_ptr + e, alpha, mask=e < E)


@unprefixed
class Written(NamedTuple):
    """A quantized operand."""

    data: Pointer  # bytes (rows, ..), written
    scale: Pointer  # bytes (.., columns), written
    alpha: Pointer  # (E,) fp32, written by one program, or None
    known: Pointer  # fp32: what WHOLE says, or None
    w_global: Pointer  # (E,) fp32 global scales of the weights, or None
    E: Runtime
    columns: Specialized  # of scales
    WHOLE: Constant
    PARTIALS: Constant  # largest magnitudes at `known`
    BLOCK_E: Constant
    NATIVE: Constant


class Operand(NamedTuple):
    """Rows of a GEMM: bytes, and bytes of scales in tiles."""

    data: Tensor  # (rows, bytes of a row)
    scale: Tensor
    columns: int  # K or I
    alpha: Tensor | None  # (E,) fp32
    known: Tensor | None
    whole: str  # WHOLE
    w_global: Tensor | None  # (E,)
    scheme: str
    raises: bool = False  # `activate` raises the largest magnitude at `known`, and nothing else

    @property
    def scale_columns(self) -> int:
        return BLOCK_SCALED[self.scheme].scale_columns(self.columns)

    @property
    def of_gemm(self) -> tuple[Tensor, int]:
        """The scales that a GEMM reads, whose places follow from its layout."""
        return self.scale, 0

    @property
    def rounding(self) -> Rounding:
        found = rounding_of(self.scheme)
        assert found is not None
        return found

    def written(self, E: int, gpu: Gpu) -> Written:
        partials = self.known.numel() if self.whole == "amax" and self.known is not None else 1
        data = self.data
        if gpu.native and self.rounding.MAX_VALUE == 448.0:
            data = data.view(torch.float8_e4m3fn)
        return Written(
            data=data,
            scale=self.scale,
            alpha=self.alpha,
            known=self.known,
            w_global=self.w_global,
            E=E,
            columns=self.scale_columns,
            WHOLE=self.whole,
            PARTIALS=partials,
            BLOCK_E=block_e(E),
            NATIVE=gpu.native,
        )

    def raising(self) -> Operand:
        """The operand for `activate` to find the largest magnitude of alone."""
        return self._replace(raises=True)

    def scatter(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        layout: Layout,
        top_k: int,
        weights: Tensor | None,
        gpu: Gpu,
    ) -> Launch:
        """x (M, K) quantized into the rows of its pairs, after it was multiplied by weights
        (M, 1) if there are any.
        """
        assert x_scale is None
        return _scatter(self, x, layout, top_k, weights, gpu)

    def activate(
        self, activation: Activated, x: Tensor, layout: Layout, weights: Tensor | None, gpu: Gpu
    ) -> Launch:
        """activation(x), quantized."""
        assert weights is None
        return _activate(self, activation, x, layout, gpu)


def operand_in(
    buffer: Tensor,
    num_rows: int,
    of_scales: int,  # rows of scales
    columns: int,
    scheme: str,
    known: Tensor | None,
    largest: Tensor | None,
    w_global: Tensor | None,
    alpha: Tensor,
) -> Operand:
    """The rows at the start of a workspace, with their scales behind them."""
    format = BLOCK_SCALED[scheme]
    row_bytes, size = format.row_bytes(columns), format.operand_bytes(num_rows, of_scales, columns)
    everything, whole = carve(buffer, (size,), torch.uint8), ""
    if w_global is None:
        known = None
    elif known is not None:
        whole = "known" if known.numel() == 1 else "experts"
    else:
        known, whole = largest, "amax"
    return Operand(
        data=everything[: num_rows * row_bytes].view(num_rows, row_bytes),
        scale=everything[round_up(num_rows * row_bytes, 128) :],
        columns=columns,
        alpha=None if w_global is None else alpha,
        known=known,
        whole=whole,
        w_global=w_global,
        scheme=scheme,
    )


# --- scatter -------------------------------------------------------------------------------------


@arguments
class ScatterBlocks:
    to: Written
    x: Pointer  # (M, K)
    x_stride_m: Specialized
    x_stride_k: Specialized
    weights: Pointer  # (M,) that multiply x before it is quantized, or None
    weights_stride: Runtime
    layout: Layout
    rounding: Rounding
    K: Specialized
    TOP_K: Constant
    CHUNK: Constant
    PDL: Constant


@kernel(ScatterBlocks)
def moe_ops_cutlass_scatter_blocks(
    data_ptr,
    scale_ptr,
    alpha_ptr,
    known_ptr,
    w_global_ptr,
    E,
    columns,
    WHOLE: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NATIVE: tl.constexpr,
    x_ptr,
    x_stride_m,
    x_stride_k,
    weights_ptr,
    weights_stride,
    rows_ptr,
    groups_ptr,
    R,
    SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    RULE: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    K,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Read CHUNK columns of a token once, quantize them, and write them to the rows of its pairs.
    Grid: (M, chunks).
    """
    GROUPS: tl.constexpr = CHUNK // SCALE_GROUP
    m = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    lane = tl.arange(0, GROUPS)[:, None] * SCALE_GROUP + tl.arange(0, SCALE_GROUP)[None, :]
    k = first * SCALE_GROUP + lane
    x = tl.load(x_ptr + m * x_stride_m + k.to(tl.int64) * x_stride_k, mask=k < K, other=0.0)
    x = x.to(tl.float32)
    if weights_ptr is not None:
        x *= tl.load(weights_ptr + m * weights_stride).to(tl.float32)
    gdc_wait(PDL)  # the kernels before this one write `rows`, `ends` and largest magnitudes
    gdc_launch_dependents(PDL)
    # two branches, of which a kernel without alpha_ptr has neither
    if alpha_ptr is not None:  # noqa: SIM102
        if (m == 0) & (first == 0):
            store_alphas(
                alpha_ptr, known_ptr, w_global_ptr, E, WHOLE, PARTIALS, MAX_VALUE, BLOCK_E
            )
    if WHOLE != "experts":
        whole = global_scale(known_ptr, 0, WHOLE, PARTIALS, MAX_VALUE)
        q, code = quantized(
            x, whole, SCALE, RULE, MANTISSA, MIN_EXPONENT, MAX_VALUE, NATIVE
        )  # fmt: skip
    for j in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + m * TOP_K + j)
        if row >= 0:
            expert, scale_row = place_of_scales(groups_ptr, row, E, BLOCK_E)
            if WHOLE == "experts":
                of_expert = global_scale(known_ptr, expert, WHOLE, PARTIALS, MAX_VALUE)
                q_of, code_of = quantized(
                    x, of_expert, SCALE, RULE, MANTISSA, MIN_EXPONENT, MAX_VALUE, NATIVE
                )  # fmt: skip
                store(
                    data_ptr, scale_ptr, columns, row, scale_row, first, K, q_of, code_of,
                    SCALE_GROUP, MAX_VALUE,
                )  # fmt: skip
            else:
                store(
                    data_ptr, scale_ptr, columns, row, scale_row, first, K, q, code,
                    SCALE_GROUP, MAX_VALUE,
                )  # fmt: skip


def _scatter(
    y: Operand, x: Tensor, layout: Layout, top_k: int, weights: Tensor | None, gpu: Gpu
) -> Launch:
    M, K = x.shape
    args = ScatterBlocks(
        to=y.written(layout.groups.shape[0], gpu),
        x=x,
        x_stride_m=x.stride(0),
        x_stride_k=x.stride(1),
        weights=weights,
        weights_stride=0 if weights is None else weights.stride(0),
        layout=layout,
        rounding=y.rounding,
        K=K,
        TOP_K=top_k,
        CHUNK=CHUNK,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_cutlass_scatter_blocks, (M, cdiv(K, CHUNK), 1), args)


# --- activate ------------------------------------------------------------------------------------


@arguments
class ActivateBlocks:
    to: Written
    amax: Pointer  # (1,) int32 bits of a magnitude that this raises, and writes nothing else; None
    x: Pointer  # (rows, N)
    layout: Layout
    rounding: Rounding
    I: Specialized  # noqa: E741
    activation: Activated
    CHUNK: Constant
    PDL: Constant


@kernel(ActivateBlocks)
def moe_ops_cutlass_activate_blocks(
    data_ptr,
    scale_ptr,
    alpha_ptr,
    known_ptr,
    w_global_ptr,
    E,
    columns,
    WHOLE: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NATIVE: tl.constexpr,
    amax_ptr,
    x_ptr,
    rows_ptr,
    groups_ptr,
    R,
    SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    RULE: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = activation(x), quantized; or with `amax` its largest magnitude alone. Grid: (S, chunks).

    Where a global scale follows from h, the activation is computed twice: reading x once more
    costs no more than h in fp32, written and read.
    """
    GROUPS: tl.constexpr = CHUNK // SCALE_GROUP
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    pair = tl.program_id(0)
    first = tl.program_id(1) * GROUPS
    if amax_ptr is None and alpha_ptr is not None:  # noqa: SIM102
        if (pair == 0) & (first == 0):
            store_alphas(
                alpha_ptr, known_ptr, w_global_ptr, E, WHOLE, PARTIALS, MAX_VALUE, BLOCK_E
            )
    row = tl.load(rows_ptr + pair)
    if row < 0:
        return
    lane = tl.arange(0, GROUPS)[:, None] * SCALE_GROUP + tl.arange(0, SCALE_GROUP)[None, :]
    i = first * SCALE_GROUP + lane
    ok = i < I
    if GATED:
        start = x_ptr + row.to(tl.int64) * (2 * I)
        if INTERLEAVED:
            gate = tl.load(start + 2 * i, mask=ok, other=0.0)
            up = tl.load(start + 2 * i + 1, mask=ok, other=0.0)
        else:
            gate = tl.load(start + i, mask=ok, other=0.0)
            up = tl.load(start + I + i, mask=ok, other=0.0)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        h = activate_two(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        x = tl.load(x_ptr + row.to(tl.int64) * I + i, mask=ok, other=0.0)
        h = activate_one(x.to(tl.float32), ACTIVATION)
    h = tl.where(ok, h, 0.0)
    if amax_ptr is not None:
        largest = largest_magnitude(largest_magnitude(h, 1), 0)
        tl.atomic_max(amax_ptr, largest.to(tl.int32, bitcast=True))
    else:
        expert, scale_row = place_of_scales(groups_ptr, row, E, BLOCK_E)
        of = expert if WHOLE == "experts" else 0
        whole = global_scale(known_ptr, of, WHOLE, PARTIALS, MAX_VALUE)
        q, code = quantized(
            h, whole, SCALE, RULE, MANTISSA, MIN_EXPONENT, MAX_VALUE, NATIVE
        )  # fmt: skip
        store(
            data_ptr, scale_ptr, columns, row, scale_row, first, I, q, code,
            SCALE_GROUP, MAX_VALUE,
        )  # fmt: skip


def _activate(h: Operand, activation: Activated, x: Tensor, layout: Layout, gpu: Gpu) -> Launch:
    assert layout.rows is not None
    raised = None
    if h.raises:
        assert h.known is not None
        raised = h.known.view(torch.int32)
    args = ActivateBlocks(
        to=h.written(layout.groups.shape[0], gpu),
        amax=raised,
        x=x,
        layout=layout,
        rounding=h.rounding,
        I=h.columns,
        activation=activation,
        CHUNK=CHUNK,
        PDL=gpu.pdl,
    )
    grid = (layout.rows.numel(), cdiv(h.columns, CHUNK), 1)
    return Launch(moe_ops_cutlass_activate_blocks, grid, args)
