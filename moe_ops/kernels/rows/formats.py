"""How kernels write rows in each format of kernels/rows/operand.py. Imported at first launch only.

Legend: M tokens, S = M * top_k pairs, K columns of a row, E local experts. A part is WIDTH columns
that share a scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moe_ops.kernels.device.e4m3 import (
    clamp,
    e4m3_scale,
    exponent_above,
    largest_magnitude,
    nearest,
    quantize_groups,
    quotient,
    reciprocal,
    stored,
)
from moe_ops.kernels.device.experts import ends_of_experts, expert_of_row
from moe_ops.kernels.launch import Constant, Gpu, Pointer, Runtime, Specialized, unprefixed
from moe_ops.kernels.place.layout import Layout, block_e
from moe_ops.kernels.rows.emulated import power_of_two
from moe_ops.kernels.rows.operand import GROUP_SCALES, Operand

GROUPS = 16  # groups of 128 columns of a program, where they have scales
BLOCK = 1024  # columns of a program, where they have none or such in tiles


@unprefixed
class Written(NamedTuple):
    """Rows that a kernel writes, and how."""

    data: Pointer  # (rows, K), written
    scale: Pointer  # written, or None
    known: Pointer  # fp32 scales, or largest magnitudes
    alpha: Pointer  # (E,) fp32, written by one program, or None
    w_global: Pointer  # (E,) fp32, or None
    E: Runtime
    scale_columns: Specialized  # of swizzled tiles
    KIND: Constant  # "groups", "row", "tiles" or ""
    SCALES: Constant
    WIDTH: Constant
    KNOWN: Constant
    PARTIALS: Constant  # largest magnitudes at `known`
    BLOCK_E: Constant
    NATIVE: Constant
    RULE: Constant  # of "tiles": see kernels/rows/rounding.py
    MANTISSA: Constant
    MIN_EXPONENT: Constant
    MAX_VALUE: Constant


@unprefixed
class Columns(NamedTuple):
    """The columns of a program: (BLOCK / LANES, LANES), or (BLOCK,) with LANES 0."""

    BLOCK: Constant
    LANES: Constant


_NO_ROUNDING = ("", 0, 0, 0.0)


def written(rows: Operand, layout: Layout, gpu: Gpu) -> Written:
    """Rows as kernels write them. e4m3 data are bytes if the GPU does not have e4m3, or nothing is
    quantized.
    """
    data, scale, scales, width, known, known_scale, blocks = rows
    E = layout.groups.shape[0]
    kind, rounding = "", _NO_ROUNDING
    alpha = w_global = None
    scale_columns, partials = 0, 1
    if scales in GROUP_SCALES:
        kind = "groups"
        if scales == "ue8m0":  # as bytes; kernels use the address alone
            assert scale is not None
            scale = scale.transpose(-2, -1).view(torch.uint8)
    elif blocks is not None:
        kind, rounding = "tiles", blocks.rounding[2:]
        alpha, w_global, scale_columns = blocks.alpha, blocks.w_global, blocks.scale_columns
        if gpu.native and blocks.rounding.MAX_VALUE == 448.0:
            data = data.view(torch.float8_e4m3fn)
    elif scales:
        kind = "row"
    if data.dtype == torch.float8_e4m3fn and (scales == "given" or not gpu.native):
        data = data.view(torch.uint8)
    if known == "largest":
        assert known_scale is not None
        partials = known_scale.numel()
    return Written(
        data, scale, known_scale, alpha, w_global, E, scale_columns, kind, scales, width, known,
        partials, block_e(E), gpu.native, *rounding,
    )  # fmt: skip


def tile_of(rows: Operand) -> Columns:
    """The columns that a program quantizes: groups, tiles, or a whole row."""
    if rows.scales in GROUP_SCALES:
        return Columns(GROUPS * 128, 128)
    if rows.blocks is not None:
        return Columns(BLOCK, rows.width)
    return Columns(triton.next_power_of_2(rows.columns) if rows.scales else BLOCK, 0)


def warps_of(rows: Operand, tile: Columns) -> int:
    """Warps of a program: of whole rows each thread takes 16 columns, up to 16384."""
    whole = rows.scales in ("row", "given")
    return max(1, min(32, tile.BLOCK // 1024 * 2)) if whole else 4


@triton.jit
def columns_of_tile(tile, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Columns of a tile of a row, (BLOCK / LANES, LANES), or (BLOCK,)."""
    if LANES == 0:
        return tile * BLOCK + tl.arange(0, BLOCK)
    else:
        group = tile * (BLOCK // LANES) + tl.arange(0, BLOCK // LANES)
        return group[:, None] * LANES + tl.arange(0, LANES)[None, :]


# --- scales of groups ----------------------------------------------------------------------------


@triton.jit
def quantize_by_powers(x):
    """(unrounded fp32 quotients, uint8 exponents (R,)) of x (R, columns): scales are the least
    powers of two with which the largest magnitude is at most 448.
    """
    x = x.to(tl.float32)
    exponent = exponent_above(quotient(tl.max(tl.abs(x), 1), 448.0, 1.0 / 448.0))
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return x * inverse[:, None], exponent.to(tl.uint8)


@triton.jit
def rounded_columns(x, SCALES: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr):
    """(columns (GROUPS, 128) of a row as they are stored, their scales, or x if there are
    none).
    """
    GROUPS: tl.constexpr = x.shape[0]
    PARTS: tl.constexpr = 128 // WIDTH  # groups with a scale of their own
    if SCALES == "ue8m0":
        v, scale = quantize_by_powers(tl.reshape(x, (GROUPS * PARTS, WIDTH)))
        y = stored(tl.reshape(v, (GROUPS, 128)), NATIVE)
    elif SCALES != "":
        v, scale = quantize_groups(x, SCALES == "powers")
        y = stored(v, NATIVE)
    else:
        y, scale = x, x
    return y, scale


@triton.jit
def scale_offset(row, group, groups, R):
    """Offset of the scale of a group of columns."""
    return row + row // R * (groups - 1) * R + group.to(tl.int64) * R


@triton.jit
def store_scale(scale_ptr, scale, row, group, groups, R, mask, SCALES: tl.constexpr):
    """Store scales of groups (the same shape), and zeros after a row's last exponent up to the end
    of its word.
    """
    if SCALES == "ue8m0":
        words = tl.cdiv(groups, 4)
        for j in tl.static_range(4):
            byte = group + j
            ok = mask & ((j == 0) | ((group == groups - 1) & (byte < 4 * words)))
            offset = scale_offset(row, byte // 4, words, R) * 4 + byte % 4
            tl.store(scale_ptr + offset, scale if j == 0 else tl.zeros_like(scale), mask=ok)
    else:
        tl.store(scale_ptr + scale_offset(row, group, groups, R), scale, mask=mask)


# --- one scale a row -----------------------------------------------------------------------------


@triton.jit
def by_known(v, scale, NATIVE: tl.constexpr):
    """fp32 v as e4m3 with a known scale: what is too large becomes the largest number."""
    return stored(clamp(quotient(v, scale, reciprocal(scale)), 448.0), NATIVE)


@triton.jit
def by_row(v, NATIVE: tl.constexpr):
    """(fp32 v as e4m3, its scale)."""
    scale = e4m3_scale(tl.max(tl.abs(v), 0))
    return stored(quotient(v, scale, reciprocal(scale)), NATIVE), scale


# --- scales in swizzled tiles --------------------------------------------------------------------


@triton.jit
def row_of_scales(ends_ptr, row, E, BLOCK_E: tl.constexpr):
    """The row of the scales of a row."""
    e, ends = tl.arange(0, BLOCK_E), ends_of_experts(ends_ptr, E, BLOCK_E)
    starts = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    before = ends <= row
    tiles = tl.where(before, tl.cdiv(ends - starts, 128), 0)
    first = tl.max(tl.where(before, ends, 0), 0)
    return tl.sum(tiles, 0) * 128 + row - first


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
def by_tiles(x, whole, to):
    """(elements, scale codes (G,)) of fp32 x (G, SIZE) as `moe_ops.numerics` quantizes them.
    Elements are e4m3 (G, SIZE), or bytes of two e2m1 codes (G, SIZE / 2).
    """
    MAX_VALUE: tl.constexpr = to.MAX_VALUE
    amax = largest_magnitude(x, 1)
    if to.SCALES == "mx":
        scale, inverse = power_of_two(amax, to.RULE, to.MANTISSA, MAX_VALUE)
        code = ((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF).to(tl.uint8)
        q = x * inverse[:, None]  # exact
    else:
        of_group = clamp(whole * quotient(amax, MAX_VALUE, 1.0 / MAX_VALUE), 448.0)
        code = stored(of_group, to.NATIVE).to(tl.uint8, bitcast=True)
        of_group = nearest(of_group, 3, -6)
        zero = of_group == 0.0
        scale = quotient(tl.where(zero, 1.0, of_group), whole, reciprocal(whole))
        q = quotient(x, scale[:, None], reciprocal(scale)[:, None])
        q = tl.where(zero[:, None], 0.0, q)
    q = clamp(q, MAX_VALUE)
    if MAX_VALUE == 448.0:
        return stored(q, to.NATIVE), code
    else:
        codes = e2m1_code(tl.abs(nearest(q, to.MANTISSA, to.MIN_EXPONENT)))
        codes |= (x.to(tl.int32, bitcast=True) >> 28) & 8
        low, high = tl.split(tl.reshape(codes, (x.shape[0], x.shape[1] // 2, 2)))
        return (low | (high << 4)).to(tl.uint8), code


@triton.jit
def store_tiles(to, q, code, row, scale_row, part, K):
    """Write parts of a row, and zeros as scales past the last."""
    ELEMENTS: tl.constexpr = 1 if to.MAX_VALUE == 448.0 else 2  # of a byte
    WIDE: tl.constexpr = to.WIDTH // ELEMENTS
    byte = part[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    row_bytes = K // ELEMENTS
    tl.store(to.data + row.to(tl.int64) * row_bytes + byte, q, mask=byte < row_bytes)
    code = tl.where(part * to.WIDTH < K, code, 0)
    at = swizzled(scale_row, part, to.scale_columns)
    tl.store(to.scale + at, code, mask=part < to.scale_columns)


@triton.jit
def global_scale(given):
    """The global scale of rows, of which 1 / it is given."""
    given = given.to(tl.float32)
    return quotient(1.0, given, reciprocal(given))


# --- all formats ---------------------------------------------------------------------------------


@triton.jit
def known_scale(to, expert):
    """The scale, or global scale, that is known of rows of an expert; 1 if none is."""
    if to.KNOWN == "":
        return 1.0
    elif to.KNOWN == "largest":
        most = tl.max(tl.load(to.known + tl.arange(0, to.PARTIALS)), 0)
        if to.KIND == "row":
            return e4m3_scale(most)
        else:
            whole = quotient(448.0 * to.MAX_VALUE, most, reciprocal(most))
            return tl.where(most == 0.0, 1.0, tl.minimum(whole, 3.4028234663852886e38))
    else:
        given = tl.load(to.known + (expert if to.KNOWN == "experts" else 0))
        return given if to.KIND == "row" else global_scale(given)


@triton.jit
def quantized(x, known, to):
    """(x as it is stored, its scales), or twice x where nothing is quantized."""
    if to.KIND == "groups":
        return rounded_columns(x, to.SCALES, to.WIDTH, to.NATIVE)
    elif to.KIND == "tiles":
        return by_tiles(x.to(tl.float32), known, to)
    elif to.SCALES == "row":
        if to.KNOWN == "":
            return by_row(x.to(tl.float32), to.NATIVE)
        else:
            return by_known(x.to(tl.float32), known, to.NATIVE), known
    else:
        return x, x


@triton.jit
def store(to, y, scale, row, k, part, end, K, R, groups_ptr):
    """Write columns k below `end` of a row, and the scales of their parts."""
    if to.KIND == "tiles":
        scale_row = row_of_scales(groups_ptr, row, to.E, to.BLOCK_E)
        store_tiles(to, y, scale, row, scale_row, part, K)
    else:
        tl.store(to.data + row * K + k, y.to(to.data.dtype.element_ty), mask=k < end)
        if to.KIND == "groups":
            ok = part * to.WIDTH < end
            store_scale(to.scale, scale, row, part, tl.cdiv(K, to.WIDTH), R, ok, to.SCALES)
        elif to.KIND == "row" and to.KNOWN == "" and to.scale is not None:
            tl.store(to.scale + row, scale)


@triton.jit
def store_shared(to, first):
    """Let the `first` program write what all rows share: the one scale that follows from their
    largest magnitude; or 1 / (global scale of the rows * that of the weights) of every expert, the
    latter left out where each row of the weights has its own.
    """
    # two branches each, of which a kernel that writes nothing has neither
    if to.KIND == "row" and to.KNOWN == "largest":  # noqa: SIM102
        if first:
            tl.store(to.scale, known_scale(to, 0))
    if to.alpha is not None:  # noqa: SIM102
        if first:
            e = tl.arange(0, to.BLOCK_E)
            if to.KNOWN == "experts":
                whole = global_scale(tl.load(to.known + e, mask=e < to.E, other=1.0))
            else:
                whole = known_scale(to, 0)
            alpha = quotient(1.0, whole, reciprocal(whole))
            if to.w_global is not None:
                w = tl.load(to.w_global + e, mask=e < to.E, other=1.0)
                alpha = quotient(alpha, w, reciprocal(w))
            tl.store(to.alpha + e, alpha, mask=e < to.E)


@triton.jit
def expert_of(to, groups_ptr, row):
    """The expert of a row, at most the last."""
    return tl.minimum(expert_of_row(ends_of_experts(groups_ptr, to.E, to.BLOCK_E), row), to.E - 1)
