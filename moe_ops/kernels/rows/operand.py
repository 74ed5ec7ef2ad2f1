"""Rows of a product's operand: in 16 bits, or quantized with scales. torch alone.

`scales` names the scales, `known` where those come from that are known before a row is read:

    ""       none: data are in the input's dtype
    "fp32"   one for 128 columns, (blocks, columns / 128, R)
    "powers" the same, of powers of two
    "ue8m0"  int32 words of four exponents, one for `width` columns:
             (blocks, columns / (4 width), R); byte j of word p is group 4 p + j
    "row"    fp32 (rows,), one for a row; or fewer, if they are known
    "given"  the same, of data that arrive quantized
    "mx"     a power of two for `width` columns, in swizzled tiles
    "nv"     e4m3 for `width` columns, in swizzled tiles, and one global scale

Scales of neighbouring rows are contiguous, in blocks of R rows, of which the contiguous layout has
one. Swizzled tiles have 128 rows, and those of each expert begin one: rows past its last are not
written, since they multiply rows of the product that are not stored. Columns of scales past the
last are zero. `known`:

    ""         nothing: a row's scales follow from the row
    "one"      one scale of all rows ("nv": 1 / the global scale)
    "experts"  one of each expert, likewise
    "largest"  largest magnitudes, of which the largest gives one scale, or the global one
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from moe_ops.kernels.rows.rounding import Rounding

GROUP_SCALES = ("fp32", "powers", "ue8m0")


class Blocks(NamedTuple):
    """Additional facts of rows whose scales are in swizzled tiles."""

    columns: int  # K or I, of which two of e2m1 share a byte
    scale_columns: int
    rounding: Rounding
    alpha: Tensor | None = None  # (E,) fp32, written: 1 / the global scales of both operands
    w_global: Tensor | None = (
        None  # (E,) fp32 global scales of the weights, which alpha divides by
    )


class Operand(NamedTuple):
    """Rows of an operand, or weights (E, N, K)."""

    data: Tensor  # (.., rows, columns)
    scale: Tensor | None = None
    scales: str = ""
    width: int = 128  # columns that share a scale
    known: str = ""
    known_scale: Tensor | None = None  # fp32 (1,) or (E,); "largest": magnitudes, a power of two
    blocks: Blocks | None = None

    @property
    def columns(self) -> int:
        """K or I."""
        return self.blocks.columns if self.blocks is not None else self.data.shape[-1]

    @property
    def argument(self) -> Any:
        """Data and scales as one argument, in the form that DeepGEMM takes."""
        return self.data if self.scale is None else (self.data, self.scale)
