"""The kernel that writes the arrays over experts for two grouped GEMMs. Imported at first launch
only.

The host knows neither how many rows an expert has nor where they begin, so that a captured call
follows the routing. An expert without rows has a problem of size 0, of which there is no tile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.backends.cutlass.library import ARRAYS
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
from moe_ops.kernels.permute.layout import block_e


class Gemm(NamedTuple):
    """Operands of one GEMM: x (rows, K) sorted by expert, w (E, N, K), d (rows, N)."""

    x: Pointer
    w: Pointer
    d: Pointer
    x_scale: Pointer  # fp32: of each row, of each expert, or one
    w_scale: Pointer  # fp32 (E, N) or (E,)
    N: Runtime
    K: Runtime
    w_bytes: Runtime  # of a row of w
    d_bytes: Runtime  # of an element of d
    x_scale_step: Runtime  # between experts' scales: 0 for one of all; -1: each row has its own
    w_scale_step: Runtime  # between experts' scales: N or 1


@arguments
class Setup:
    arrays: Pointer  # (2, len(ARRAYS), E) int64, written
    sizes: Pointer  # (2, E, 3) int32, written
    groups: Pointer  # (E,) the row after each expert's last pair, or the rows of each expert
    E: Runtime
    R: Runtime  # rows that each expert has room for; 0: rows of all experts follow one another
    g1: Gemm
    g2: Gemm
    BLOCK_E: Constant
    PDL: Constant


@triton.jit
def write_gemm(
    arrays_ptr, sizes_ptr, e, E, first, rows, x_ptr, w_ptr, d_ptr, x_scale_ptr, w_scale_ptr, N, K,
    w_bytes, d_bytes, x_scale_step, w_scale_step,
):  # fmt: skip
    """Addresses, leading dimensions and sizes of one GEMM of every expert."""
    ok = e < E
    expert = e.to(tl.int64)
    x = x_ptr.to(tl.int64) + first * K
    w = w_ptr.to(tl.int64) + expert * N * w_bytes
    d = d_ptr.to(tl.int64) + first * N * d_bytes
    step = tl.where(x_scale_step < 0, first, expert * x_scale_step)
    x_scale = x_scale_ptr.to(tl.int64) + 4 * step
    w_scale = w_scale_ptr.to(tl.int64) + 4 * expert * w_scale_step
    wide, zero = tl.zeros_like(expert), tl.zeros_like(rows)
    tl.store(arrays_ptr + e, x, mask=ok)
    tl.store(arrays_ptr + E + e, w, mask=ok)
    tl.store(arrays_ptr + 2 * E + e, d, mask=ok)
    tl.store(arrays_ptr + 3 * E + e, wide + K, mask=ok)
    tl.store(arrays_ptr + 4 * E + e, wide + K, mask=ok)
    tl.store(arrays_ptr + 5 * E + e, wide + N, mask=ok)
    tl.store(arrays_ptr + 6 * E + e, x_scale, mask=ok)
    tl.store(arrays_ptr + 7 * E + e, w_scale, mask=ok)
    tl.store(sizes_ptr + 3 * e, rows, mask=ok)
    tl.store(sizes_ptr + 3 * e + 1, zero + N, mask=ok)
    tl.store(sizes_ptr + 3 * e + 2, zero + K, mask=ok)


@kernel(Setup)
def moe_ops_cutlass_setup(
    arrays_ptr,
    sizes_ptr,
    groups_ptr,
    E,
    R,
    g1_x_ptr,
    g1_w_ptr,
    g1_d_ptr,
    g1_x_scale_ptr,
    g1_w_scale_ptr,
    g1_N,
    g1_K,
    g1_w_bytes,
    g1_d_bytes,
    g1_x_scale_step,
    g1_w_scale_step,
    g2_x_ptr,
    g2_w_ptr,
    g2_d_ptr,
    g2_x_scale_ptr,
    g2_w_scale_ptr,
    g2_N,
    g2_K,
    g2_w_bytes,
    g2_d_bytes,
    g2_x_scale_step,
    g2_w_scale_step,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program writes everything: some 80 bytes a GEMM and expert."""
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    e = tl.arange(0, BLOCK_E)
    group = tl.load(groups_ptr + e, mask=e < E, other=0)
    before = tl.load(groups_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    rows = tl.where(R > 0, group, group - before)
    first = tl.where(R > 0, e.to(tl.int64) * R, before.to(tl.int64))
    write_gemm(
        arrays_ptr, sizes_ptr, e, E, first, rows,
        g1_x_ptr, g1_w_ptr, g1_d_ptr, g1_x_scale_ptr, g1_w_scale_ptr, g1_N, g1_K,
        g1_w_bytes, g1_d_bytes, g1_x_scale_step, g1_w_scale_step,
    )  # fmt: skip
    write_gemm(
        arrays_ptr + 8 * E, sizes_ptr + 3 * E, e, E, first, rows,
        g2_x_ptr, g2_w_ptr, g2_d_ptr, g2_x_scale_ptr, g2_w_scale_ptr, g2_N, g2_K,
        g2_w_bytes, g2_d_bytes, g2_x_scale_step, g2_w_scale_step,
    )  # fmt: skip


def setup(
    arrays: Tensor,
    sizes: Tensor,
    groups: Tensor,
    R: int,
    g1: Gemm,
    g2: Gemm,
    gpu: Gpu,
) -> Launch:
    """Write the arrays over experts, in the order of library.ARRAYS."""
    assert len(ARRAYS) == 8
    E = groups.shape[0]
    args = Setup(
        arrays=arrays,
        sizes=sizes,
        groups=groups,
        E=E,
        R=R,
        g1=g1,
        g2=g2,
        BLOCK_E=block_e(E),
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_cutlass_setup, (1, 1, 1), args)
