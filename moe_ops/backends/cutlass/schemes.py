"""Requirements of the kernels of each kind of scheme, and their operands in the workspaces.
torch alone.

There are five kinds: `PLAIN`, bf16 weights (SM90); `ROWS`, e4m3 with fp32 scales of rows and
tokens (SM90); `GROUPS`, e4m3 with fp32 scales of blocks of 128 x 128 beside those of groups of
tokens (SM90); `INT4`, int4 weights with scales of groups beside e4m3 tokens (SM90); `BLOCKS`,
scales of blocks of columns that the tensor cores apply (SM100, SM120).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from moe_ops.activations import Activation
from moe_ops.kernels.rows.scales import SHARED
from moe_ops.meta.workspace import cdiv, padded_rows, round_up
from moe_ops.numerics.swizzle import TILE_ROWS, swizzled_shape
from moe_ops.schemes import get_scheme

# enum Activation of csrc/cutlass/sm90_tiles.cuh; the others are kernels of their own behind
# products of plain weights
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai", "swiglustep")


PLAIN, ROWS, GROUPS, INT4, BLOCKS = "plain", "rows", "groups", "int4", "blocks"
SCHEMES_OF_ROWS = (
    *("fp8_channel", "fp8_tensor", "fp8_tensor_static"),
    *("fp8_channel_tensor", "fp8_channel_tensor_static"),
)
SCHEMES_OF_GROUPS = ("fp8_block", "fp8_block:ue8m0")
INT4_SCHEME = "int4_w4a8"
# kind -> the compute capabilities for which csrc/cutlass has kernels
CAPABILITIES: dict[str, tuple[tuple[int, int], ...]] = {
    **{kind: ((9, 0),) for kind in (PLAIN, ROWS, GROUPS, INT4)},
    BLOCKS: ((10, 0), (12, 0)),
}
# CUTLASS keeps descriptors of the tensor memory accelerator for each multiprocessor, of which GPUs
# of these capabilities have up to 160. Of BLOCKS that is 9984 bytes at most on SM100 with CUTLASS
# 4.8, for it writes some anew for each stage of its pipeline, and 768 on SM120.
DESCRIPTOR_BYTES = {ROWS: 512 * 160, INT4: 640 * 160, BLOCKS: 10240 * 160}
INT4_GROUP = 128  # columns of a weight that share a scale: a tile of the kernels has as many


class BlockFormat(NamedTuple):
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


_MXFP4 = BlockFormat("mxfp4", 4, 32)
BLOCK_SCALED = {
    "nvfp4": BlockFormat("nvfp4", 4, 16),
    **{f"mxfp4{rule}": _MXFP4 for rule in ("", ":round", ":ceil")},
    "mxfp8": BlockFormat("mxfp8", 8, 32),
}


def scale_rows(M: Any, top_k: int, E: int) -> Any:
    """Rows of scales at most: those of each expert begin a tile of their own."""
    return padded_rows(M, top_k, E, TILE_ROWS)


def grouped_bytes(rows: Any, columns: Any) -> Any:
    """Bytes of e4m3 rows (rows, columns) and their scales of groups. int or SymInt."""
    return round_up(rows * columns, 128) + 4 * rows * cdiv(columns, 128)


def kind_of(scheme: str) -> str | None:
    """Which kind a scheme is; None of others."""
    if not scheme:
        return PLAIN
    if scheme in BLOCK_SCALED:
        return BLOCKS
    if scheme == INT4_SCHEME:
        return INT4
    if scheme in SCHEMES_OF_GROUPS:
        return GROUPS
    return ROWS if scheme in SCHEMES_OF_ROWS else None


@cache
def one_scale(scheme: str) -> bool:
    """Whether all rows share one dynamic scale, or without a known one a global one of nvfp4."""
    activation = get_scheme(scheme).activation
    if activation is None or activation.static:
        return False
    return activation.one_scale


# --- the arrays over experts ---------------------------------------------------------------------

# of one GEMM: x (rows, K), w (E, N, K), d (rows, N). The array of tables is the first, for it must
# begin at a multiple of 16 bytes: on the host CUTLASS encodes a descriptor of its address, which
# the kernel then replaces. Of the others' addresses it takes the multiple below.
ARRAYS = (
    *("tables", "w", "d", "stride_x", "stride_w", "stride_d", "x_scale", "w_scale"),
    *("alpha", "x"),
)
NUMBERS = len(ARRAYS) + 2  # int64 of an expert and GEMM: after the arrays two strides of tables
LAYOUT_WORDS = 5  # int32 of a layout of scales; of a layout of int4 weights 3


class Parts(NamedTuple):
    """Where each part of the setup of two GEMMs starts in the index workspace, in int32. int or
    SymInt; each start is a multiple of 128 bytes.
    """

    arrays: int  # (2, NUMBERS, E) int64
    layouts: int  # (2, 2, E, LAYOUT_WORDS): of the scales of x, then of w; or of int4 weights
    sizes: int  # (2, E, 3)
    alphas: int  # (2, E) fp32
    descriptors: int  # (2, bytes): GEMM2 may be set up while GEMM1 still runs
    shared: int  # fp32 of `library.shared`, at the end of the workspace
    end: int


def parts(start: Any, E: int, kind: str) -> Parts:
    """The parts from `start` on."""
    starts = [round_up(start, 32)]
    numbers = (4 * NUMBERS * E, 4 * LAYOUT_WORDS * E, 6 * E, 2 * E, DESCRIPTOR_BYTES[kind] // 2)
    for size in (*numbers, SHARED):
        starts.append(starts[-1] + round_up(size, 32))
    return Parts(*starts)


def ends_products(activation: Activation) -> bool:
    """Whether there are kernels of products that end with an activation."""
    function = activation.name.removesuffix("_uninterleave")
    return activation.gated and function in ACTIVATIONS
