"""Shapes of scale tensors and of packed elements. Arithmetic only, on int or SymInt."""

from __future__ import annotations

import math

# The layout of weights whose scales are packed exponents, as DeepGEMM reads them from SM100 on:
# int32 words of four (E, ceil(groups / 4), N), byte j of word p for group 4 p + j of a row's
# columns.
DEEP_GEMM_UE8M0 = "deep_gemm_ue8m0"
# The layout of e2m1 weights whose words of 4 bytes have their bits in the order that takes the
# fewest instructions to decode on SM90. Scales of 64 columns are contiguous for as many rows as
# fill 16 bytes.
TRITON_E2M1 = "triton_e2m1"
TRANSPOSED = "transposed"  # the layout of a quantized weight's transposed view
# The layout of a quantized weight viewed as one dimension, before the name of the layout that its
# data have.
FLAT = "flat:"


def padded_layout(layout: str, rows: int, columns: int) -> str:
    """The name of a layout whose data have more rows or columns than the (rows, columns) of the
    weight they stand for: "flashinfer_mixed:up_gate[5760x2880]".
    """
    return f"{layout}[{rows}x{columns}]"


def base_layout(layout: str) -> str:
    """A layout's name without the sizes of `padded_layout`."""
    return layout.partition("[")[0]


def sizes_of_layout(layout: str) -> tuple[int, ...]:
    """The (rows, columns) in the name of a padded layout; () of others."""
    sizes = layout.partition("[")[2].removesuffix("]")
    return tuple([int(size) for size in sizes.split("x")]) if sizes else ()


def scale_shape(rows: int, cols: int, group_rows: int, group_cols: int) -> tuple[int, ...]:
    """Shape of the scales of a (rows, cols) matrix with one scale per group of elements.

    A group spans ``group_rows`` x ``group_cols`` elements, -1 meaning all of that dimension;
    groups at the end of a dimension may be smaller. One scale for the whole matrix has shape ().
    """
    if group_rows == -1 and group_cols == -1:
        return ()
    return (_count(rows, group_rows), _count(cols, group_cols))


def batched_scale_shape(
    batch: int, rows: int, cols: int, group_rows: int, group_cols: int
) -> tuple[int, ...]:
    """``scale_shape`` of ``batch`` matrices, stacked: (batch,) for one scale per matrix."""
    return (batch, *scale_shape(rows, cols, group_rows, group_cols))


def rows_side_by_side(group: int) -> int:
    """Rows whose scales of 64 columns, one a byte for ``group`` columns of a row, fill 16
    bytes.
    """
    return group // 4


def triton_e2m1_scale_shape(batch: int, rows: int, cols: int, group: int) -> tuple[int, ...]:
    """Shape of the scales of ``batch`` matrices of layout TRITON_E2M1, one scale for ``group``
    columns of a row.
    """
    return (batch, rows // rows_side_by_side(group), cols // 64 * 16)


def _count(size: int, group: int) -> int:
    return 1 if group == -1 else (size + group - 1) // group


def packed_size(size: int, bits: int) -> int:
    """Bytes of ``size`` elements of ``bits`` bits, packed without gaps; ``size`` must
    fill them.
    """
    return size * bits // 8


def unit_of_planes(columns: int) -> int:
    """Columns of a row whose bits in planes lie together: 128, which are 80 bytes in 5 bits and 96
    in 6, or fewer if 128 does not divide the row.
    """
    return math.gcd(columns, 128)


def unpacked_size(size: int, bits: int) -> int:
    """Elements of ``bits`` bits in ``size`` bytes."""
    return size * 8 // bits
