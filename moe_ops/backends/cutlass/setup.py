"""The kernel that writes the arrays over experts for two grouped GEMMs. Imported at first launch
only.

The host knows neither how many rows an expert has nor where they begin, so that a captured call
follows the routing. An expert without rows has a problem of size 0, of which there is no tile.

KIND says what the GEMMs read (schemes.py): `ROWS` fp32 scales of rows, `BLOCKS` scales of blocks
in tiles with their layouts, `INT4` the layout of weights and tables of group scales.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.backends.cutlass.schemes import ARRAYS, LAYOUT_WORDS, NUMBERS
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.launch import (
    Constant,
    Gpu,
    Launch,
    Pointer,
    Runtime,
    arguments,
    kernel,
)
from moe_ops.kernels.place.layout import block_e


class Gemm(NamedTuple):
    """Operands of one GEMM: x (rows, K) sorted by expert, w (E, N, K), d (rows, N)."""

    x: Pointer
    w: Pointer
    d: Pointer
    x_scale: Pointer  # fp32: of each row, of each expert, or one; of BLOCKS bytes in tiles
    w_scale: Pointer  # fp32 (E, N) or (E,); of BLOCKS bytes in tiles, padded
    alpha: Pointer  # (E,) fp32 factors of products, or None
    tables: Pointer  # of INT4: (E, K / 128, N, 8) e4m3
    N: Runtime
    K: Runtime
    x_bytes: Runtime  # of a row of x
    w_bytes: Runtime  # of a row of w
    d_bytes: Runtime  # of an element of d
    x_scale_step: Runtime  # between experts' scales: 0 for one of all; -1: each row has its own
    w_scale_bytes: Runtime  # of an expert's scales
    columns: Runtime  # of BLOCKS: of scales


@arguments
class Setup:
    arrays: Pointer  # (2, NUMBERS, E) int64, written
    layouts: Pointer  # (2, 2, LAYOUT_WORDS, E) int32, written; of ROWS None
    sizes: Pointer  # (2, E, 3) int32, written
    groups: Pointer  # (E,) the row after each expert's last pair, or the rows of each expert
    E: Runtime
    R: Runtime  # rows that each expert has room for; 0: rows of all experts follow one another
    g1: Gemm
    g2: Gemm
    KIND: Constant
    BLOCK_E: Constant
    PDL: Constant


@triton.jit
def write_layout(layouts_ptr, e, E, tiles, column_tiles):
    """The layout of scales of each expert: tiles of rows and columns, 1, and the strides between
    tiles of rows and between matrices.
    """
    ok = e < E
    at = layouts_ptr + 5 * e
    one = tl.zeros_like(tiles) + 1
    stride = 512 * column_tiles
    tl.store(at, tiles, mask=ok)
    tl.store(at + 1, one * column_tiles, mask=ok)
    tl.store(at + 2, one, mask=ok)
    tl.store(at + 3, one * stride, mask=ok)
    tl.store(at + 4, tiles * stride, mask=ok)


@triton.jit
def write_gemm(
    arrays_ptr, layouts_ptr, sizes_ptr, e, E, first, rows, first_tile, x_ptr, w_ptr, d_ptr,
    x_scale_ptr, w_scale_ptr, alpha_ptr, tables_ptr, N, K, x_bytes, w_bytes, d_bytes, x_scale_step,
    w_scale_bytes, columns, KIND: tl.constexpr,
):  # fmt: skip
    """Addresses, leading dimensions, layouts and sizes of one GEMM of every expert."""
    ok = e < E
    expert = e.to(tl.int64)
    wide, zero = tl.zeros_like(expert), tl.zeros_like(rows)
    tl.store(arrays_ptr + 9 * E + e, x_ptr.to(tl.int64) + first * x_bytes, mask=ok)
    tl.store(arrays_ptr + E + e, w_ptr.to(tl.int64) + expert * N * w_bytes, mask=ok)
    tl.store(arrays_ptr + 2 * E + e, d_ptr.to(tl.int64) + first * N * d_bytes, mask=ok)
    tl.store(arrays_ptr + 3 * E + e, wide + K, mask=ok)
    tl.store(arrays_ptr + 4 * E + e, wide + K, mask=ok)
    tl.store(arrays_ptr + 5 * E + e, wide + N, mask=ok)
    if KIND == "blocks":
        x_scale = first_tile.to(tl.int64) * 128 * columns
        weight_tiles = zero + tl.cdiv(N, 128)
        write_layout(layouts_ptr, e, E, tl.cdiv(rows, 128), columns // 4)
        write_layout(layouts_ptr + 5 * E, e, E, weight_tiles, columns // 4)
    else:
        x_scale = 4 * tl.where(x_scale_step < 0, first, expert * x_scale_step)
    tl.store(arrays_ptr + 6 * E + e, x_scale_ptr.to(tl.int64) + x_scale, mask=ok)
    w_scale = w_scale_ptr.to(tl.int64) + expert * w_scale_bytes
    tl.store(arrays_ptr + 7 * E + e, w_scale, mask=ok)
    if alpha_ptr is not None:
        tl.store(arrays_ptr + 8 * E + e, alpha_ptr.to(tl.int64) + 4 * expert, mask=ok)
    m, n = rows, zero + N
    if KIND == "int4":
        m, n = n, m
        tables = tables_ptr.to(tl.int64) + expert * (K // 128) * (8 * N)
        tl.store(arrays_ptr + e, tables, mask=ok)
        strides_ptr = arrays_ptr + 10 * E + 2 * e  # of tables: between groups, and matrices
        tl.store(strides_ptr, wide + N, mask=ok)
        tl.store(strides_ptr + 1, wide, mask=ok)
        # atoms of 16 x 32 weights: their numbers, and the stride between those of columns
        tl.store(layouts_ptr + 3 * e, zero + N // 16, mask=ok)
        tl.store(layouts_ptr + 3 * e + 1, zero + K // 32, mask=ok)
        tl.store(layouts_ptr + 3 * e + 2, zero + 32 * N, mask=ok)
    tl.store(sizes_ptr + 3 * e, m, mask=ok)
    tl.store(sizes_ptr + 3 * e + 1, n, mask=ok)
    tl.store(sizes_ptr + 3 * e + 2, zero + K, mask=ok)


@kernel(Setup)
def moe_ops_cutlass_setup(
    arrays_ptr,
    layouts_ptr,
    sizes_ptr,
    groups_ptr,
    E,
    R,
    g1_x_ptr,
    g1_w_ptr,
    g1_d_ptr,
    g1_x_scale_ptr,
    g1_w_scale_ptr,
    g1_alpha_ptr,
    g1_tables_ptr,
    g1_N,
    g1_K,
    g1_x_bytes,
    g1_w_bytes,
    g1_d_bytes,
    g1_x_scale_step,
    g1_w_scale_bytes,
    g1_columns,
    g2_x_ptr,
    g2_w_ptr,
    g2_d_ptr,
    g2_x_scale_ptr,
    g2_w_scale_ptr,
    g2_alpha_ptr,
    g2_tables_ptr,
    g2_N,
    g2_K,
    g2_x_bytes,
    g2_w_bytes,
    g2_d_bytes,
    g2_x_scale_step,
    g2_w_scale_bytes,
    g2_columns,
    KIND: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program writes everything: 76 to 120 bytes a GEMM and expert."""
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    e = tl.arange(0, BLOCK_E)
    group = tl.load(groups_ptr + e, mask=e < E, other=0)
    before = tl.load(groups_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    rows = tl.where(R > 0, group, group - before)
    first = tl.where(R > 0, e.to(tl.int64) * R, before.to(tl.int64))
    first_tile = rows
    if KIND == "blocks":
        tiles = tl.where(e < E, tl.cdiv(rows, 128), 0)
        first_tile = tl.cumsum(tiles) - tiles
    layouts2_ptr = layouts_ptr
    if layouts_ptr is not None:
        layouts2_ptr = layouts_ptr + 10 * E
    write_gemm(
        arrays_ptr, layouts_ptr, sizes_ptr, e, E, first, rows, first_tile,
        g1_x_ptr, g1_w_ptr, g1_d_ptr, g1_x_scale_ptr, g1_w_scale_ptr, g1_alpha_ptr, g1_tables_ptr,
        g1_N, g1_K, g1_x_bytes, g1_w_bytes, g1_d_bytes, g1_x_scale_step, g1_w_scale_bytes,
        g1_columns, KIND,
    )  # fmt: skip
    write_gemm(
        arrays_ptr + 12 * E, layouts2_ptr, sizes_ptr + 3 * E, e, E, first, rows, first_tile,
        g2_x_ptr, g2_w_ptr, g2_d_ptr, g2_x_scale_ptr, g2_w_scale_ptr, g2_alpha_ptr, g2_tables_ptr,
        g2_N, g2_K, g2_x_bytes, g2_w_bytes, g2_d_bytes, g2_x_scale_step, g2_w_scale_bytes,
        g2_columns, KIND,
    )  # fmt: skip


def setup(
    arrays: Tensor,
    layouts: Tensor | None,
    sizes: Tensor,
    groups: Tensor,
    R: int,
    g1: Gemm,
    g2: Gemm,
    kind: str,
    gpu: Gpu,
) -> Launch:
    """Write the arrays over experts, in the order of schemes.ARRAYS."""
    assert (ARRAYS[0], ARRAYS[9], NUMBERS, LAYOUT_WORDS) == ("tables", "x", 12, 5)
    E = groups.shape[0]
    args = Setup(
        arrays=arrays,
        layouts=layouts,
        sizes=sizes,
        groups=groups,
        E=E,
        R=R,
        g1=g1,
        g2=g2,
        KIND=kind,
        BLOCK_E=block_e(E),
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_cutlass_setup, (1, 1, 1), args)
