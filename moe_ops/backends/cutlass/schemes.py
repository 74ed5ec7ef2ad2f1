"""Schemes whose blocks of columns have scales that the tensor cores of SM100 and SM120 apply: what
their kernels need, and where their operands are in the workspaces. torch alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moe_ops.kernels.quantize.scales import SHARED
from moe_ops.meta.workspace import cdiv, padded_rows, round_up
from moe_ops.numerics.swizzle import TILE_ROWS, swizzled_shape

CAPABILITIES = ((10, 0), (12, 0))  # for which csrc/cutlass has kernels of these schemes
# CUTLASS keeps descriptors for each multiprocessor: with CUTLASS 4.8, 9984 bytes at most on SM100,
# whose GPUs have up to 160, for it writes some anew for each stage of its pipeline; 768 on SM120.
DESCRIPTOR_BYTES = 10240 * 160


class Format(NamedTuple):
    """Elements and scales of both operands."""

    name: str  # in the names of kernels
    bits: int  # of an element
    group: int  # columns that share a scale

    @property
    def multiple(self) -> int:
        """What divides the columns of operands, whose rows begin at multiples of 16 bytes."""
        return max(128 // self.bits, self.group)

    def row_bytes(self, columns: Any) -> Any:
        return columns * self.bits // 8

    def scale_columns(self, columns: Any) -> Any:
        """Columns of scales, padded."""
        return swizzled_shape(1, cdiv(columns, self.group))[1]

    def operand_bytes(self, rows: Any, scale_rows: Any, columns: Any) -> Any:
        """Bytes of rows (rows, columns) in a workspace, with their scales. int or SymInt."""
        data = round_up(rows * self.row_bytes(columns), 128)
        return data + scale_rows * self.scale_columns(columns)


_MXFP4 = Format("mxfp4", 4, 32)
BLOCK_SCALED = {
    "nvfp4": Format("nvfp4", 4, 16),
    **{f"mxfp4{rule}": _MXFP4 for rule in ("", ":round", ":ceil")},
    "mxfp8": Format("mxfp8", 8, 32),
}


def scale_rows(M: Any, top_k: int, E: int) -> Any:
    """Rows of scales at most: those of each expert begin a tile of their own."""
    return padded_rows(M, top_k, E, TILE_ROWS)


ARRAYS = ("a", "b", "d", "stride_a", "stride_b", "stride_d", "a_scale", "b_scale", "alpha")
LAYOUT_WORDS = 5  # int32 of a layout of scales


class Parts(NamedTuple):
    """Where each part of the setup of two GEMMs starts in the index workspace, in int32. int or
    SymInt; each start is a multiple of 128 bytes.
    """

    arrays: int  # (2, len(ARRAYS), E) int64
    layouts: int  # (2, 2, E, LAYOUT_WORDS): of the scales of A, then of B
    sizes: int  # (2, E, 3)
    alphas: int  # (2, E) fp32
    descriptors: int  # (2, DESCRIPTOR_BYTES): GEMM2 may be set up while GEMM1 still runs
    shared: int  # fp32 of `library.shared`, at the end of the workspace
    end: int


def parts(start: Any, E: int) -> Parts:
    """The parts from `start` on."""
    starts = [round_up(start, 32)]
    numbers = (4 * len(ARRAYS) * E, 4 * LAYOUT_WORDS * E, 6 * E, 2 * E, DESCRIPTOR_BYTES // 2)
    for size in (*numbers, SHARED):
        starts.append(starts[-1] + round_up(size, 32))
    return Parts(*starts)
