"""How one operand is quantized: its number format, and the scales of its elements."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_ops.meta import scales
from moe_ops.schemes.elements import ELEMENT_FORMATS, ElementFormat


@dataclass(frozen=True)
class GroupShape:
    """The (rows, cols) of a matrix that share one scale; -1 means all of that dimension.

    (-1, -1) tensor; (1, -1) row of a weight, token of an activation; (-1, 1) column;
    (128, 128) block; (1, 128) group of a token.
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        for size in (self.rows, self.cols):
            if size != -1 and size < 1:
                raise ValueError(
                    f"GroupShape sizes must be positive, or -1 for all of a dimension, "
                    f"got ({self.rows}, {self.cols})"
                )

    @property
    def is_tensor(self) -> bool:
        return self.rows == -1 and self.cols == -1

    @property
    def is_row(self) -> bool:
        return self.rows == 1 and self.cols == -1

    @property
    def is_column(self) -> bool:
        return self.rows == -1 and self.cols == 1

    @property
    def is_block(self) -> bool:
        """Whether scales change along the columns, the dimension a matrix product sums over."""
        return self.cols > 1


PER_TENSOR = GroupShape(-1, -1)
PER_ROW = GroupShape(1, -1)
PER_COLUMN = GroupShape(-1, 1)
PER_BLOCK = GroupShape(128, 128)
PER_TOKEN_GROUP = GroupShape(1, 128)
PER_MX_BLOCK = GroupShape(1, 32)
PER_NV_BLOCK = GroupShape(1, 16)
# columns of a row whose scales in two levels share one of the upper level, as in ggml's K-quants
SUPER_BLOCK = 256

SCALE_RULES = ("ocp", "round", "ceil")
SCALE_DTYPES = {  # with what stands for them in the names of schemes of one's own
    torch.float32: "f32",
    torch.float8_e8m0fnu: "e8m0",
    torch.float8_e4m3fn: "e4m3",
    torch.int8: "int8",
    None: "same",
}


@dataclass(frozen=True)
class QuantDesc:
    """How one operand is quantized: value = (q - zero_point) * scale * channel_scale /
    global_scale. For int4 elements with a channel_scale (`e4m3_products`), q * scale is rounded to
    e4m3 before it is multiplied by channel_scale. With a minimum, value = (q - least) * scale +
    minimum, where least is the least element, -128 for int8 and 0 for other integers.

    Scales of dtype int8 have two levels: a scale is its code times the fp16 scale of the 256
    columns around its group, a minimum likewise, both exact in fp32. Where scales are asked for
    by name, those of 256 columns are the channel_scale, (E, N, K / 256), or with a minimum
    (E, N, K / 128), where they take turns with those of the minima.

    Args:
        dtype: name of an element format, e.g. "e4m3".
        group: the elements that share a scale.
        static: whether scales are known in advance; otherwise they are computed in each call.
        scale_dtype: float32; float8_e8m0fnu (powers of two, stored as uint8 codes);
            float8_e4m3fn; int8, of two levels; None for the dtype of the quantized weights.
        global_scale: whether there is one more fp32 scale per matrix, (E,) for weights, or per
            row, (E, N, 1).
        channel_scale: whether there is one more fp32 scale per row, (E, N, 1).
        zero_point: whether each scale has a zero point, an integer.
        minimum: whether each scale has a minimum, the value of the least element in the scale's
            dtype. It takes the place of the zero point, also as an argument and in files.
        scale_rule: how the exponent of an e8m0 scale follows from the largest magnitude of its
            group: "ocp" floor(log2(amax)) - floor(log2(format's max)), the OCP MX specification;
            "round" the same for amax rounded to the format's mantissa; "ceil" ceil(log2(amax /
            format's max)), for e2m1 with amax at least 1e-4. For float32 scales "ceil" makes them
            powers of two in the same way, "" does not change them.

    Raises:
        ValueError: the combination has no meaning; the message says why.
    """

    dtype: str
    group: GroupShape
    static: bool = True
    scale_dtype: torch.dtype | None = torch.float32
    global_scale: bool = False
    channel_scale: bool = False
    zero_point: bool = False
    scale_rule: str = ""
    minimum: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_FORMATS:
            raise ValueError(
                f"QuantDesc.dtype must be one of {sorted(ELEMENT_FORMATS)}, got {self.dtype!r}"
            )
        reason = _meaningless(self)
        if reason:
            raise ValueError(reason)

    @property
    def format(self) -> ElementFormat:
        return ELEMENT_FORMATS[self.dtype]

    @property
    def storage_dtype(self) -> torch.dtype:
        """The torch dtype in which the quantized elements are stored."""
        return self.format.storage

    @property
    def one_scale(self) -> bool:
        """Whether a scale, perhaps beside others, is one of all rows."""
        return self.group.is_tensor or self.global_scale

    @property
    def has_zero(self) -> bool:
        """Whether each scale has a zero point or a minimum beside it."""
        return self.zero_point or self.minimum

    @property
    def is_mx(self) -> bool:
        """Whether scales are stored as e8m0, the exponents of powers of two."""
        return self.scale_dtype == torch.float8_e8m0fnu

    @property
    def two_levels(self) -> bool:
        """Whether scales are int8 codes times fp16 scales of 256 columns, for weights alone."""
        return self.scale_dtype == torch.int8

    @property
    def super_width(self) -> int:
        """fp16 numbers that 256 columns of a row have in two levels: 2 with a minimum."""
        return (1 + self.minimum) if self.two_levels else 0

    @property
    def whole_columns(self) -> int:
        """What the columns of a weight must be a multiple of: those of a group, or of 256 in two
        levels; 1 where the last group may be smaller, or is the row.
        """
        if self.two_levels:
            return SUPER_BLOCK
        return self.group.cols if self.whole_groups else 1

    @property
    def powers_of_two(self) -> bool:
        """Whether scales are powers of two, in whichever dtype they are stored."""
        return self.scale_rule != ""

    @property
    def e4m3_products(self) -> bool:
        """Whether elements times the scale of their group are rounded to e4m3, so that fp8 tensor
        cores can multiply them and channel_scale multiplies finished sums: int4 elements with a
        channel_scale, whatever the other operand is. Ties round to even, and products beyond 448
        become 448.
        """
        return self.channel_scale and self.dtype == "int4"

    @property
    def whole_groups(self) -> bool:
        """Whether the columns of a weight must be a multiple of the group: not for 2-D blocks."""
        return self.group.cols > 1 and self.group.rows == 1

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of the scales of a (rows, cols) operand: () for one scale, else 2-D."""
        return scales.scale_shape(rows, cols, self.group.rows, self.group.cols)

    def batched_scale_shape(self, batch: int, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of the scales of a (batch, rows, cols) operand: (batch,) for one a matrix."""
        return scales.batched_scale_shape(batch, rows, cols, self.group.rows, self.group.cols)


def _meaningless(d: QuantDesc) -> str:
    """Why a description has no meaning, "" if it has one."""
    zero = "minimum" if d.minimum else "zero_point"
    if d.zero_point and d.minimum:
        return "zero_point must be False beside a minimum, which takes its place"
    if d.has_zero and d.format.is_float:
        return f"{zero} must be False for {d.dtype}: a floating-point format is symmetric"
    if d.global_scale and d.scale_dtype != torch.float8_e4m3fn:
        return (
            f"global_scale must be False with scales of {d.scale_dtype}: it exists to widen the "
            "range of scales stored in fewer bits, float8_e4m3fn"
        )
    if d.scale_dtype not in SCALE_DTYPES:
        return (
            "scale_dtype must be float32, float8_e8m0fnu, float8_e4m3fn, int8 or None, got "
            f"{d.scale_dtype}"
        )
    if d.scale_dtype == torch.float8_e4m3fn and d.global_scale == d.channel_scale:
        return (
            "float8_e4m3fn scales must have either a global_scale or a channel_scale to "
            "widen their range"
        )
    if d.channel_scale and d.scale_dtype != torch.float8_e4m3fn:
        return "channel_scale must be False unless scales are float8_e4m3fn, whose range it widens"
    if d.two_levels and d.zero_point:
        return "zero_point must be False with scales of int8; beside them a minimum is one too"
    if d.has_zero and not d.two_levels and d.scale_dtype not in (torch.float32, None):
        return (
            f"{zero} must be False with scales of {d.scale_dtype}: what is found for it belongs "
            "to scales that take any value"
        )
    if d.has_zero and d.scale_rule:
        return f"{zero} must be False with a scale_rule, which leaves it no room"
    rules = SCALE_RULES if d.is_mx else ("", "ceil") if d.scale_dtype == torch.float32 else ("",)
    if d.scale_rule not in rules:
        return (
            f"scale_rule must be one of {rules} with scales of {d.scale_dtype}, "
            f"got {d.scale_rule!r}"
        )
    if (d.is_mx or d.two_levels or d.global_scale or d.channel_scale) and not d.whole_groups:
        return (
            "e8m0 scales, int8 ones, a global_scale and a channel_scale need groups of some "
            f"columns of one row, got {d.group}"
        )
    if d.two_levels and SUPER_BLOCK % d.group.cols:
        return f"groups with int8 scales must divide {SUPER_BLOCK} columns, got {d.group}"
    return ""
