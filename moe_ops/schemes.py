"""Quantization schemes: how expert weights and the activations that meet them are quantized.

A named scheme is one row of the table at the end of this file. A scheme of one's own is any legal
pair of descriptions, and its name spells them out: "custom:e4m3,1xall,f32:e4m3,allxall,f32". The
full name is what travels through operator arguments, tuning files and quantized tensors;
``get_scheme`` turns a name into the scheme, in any process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moe_ops.checks import did_you_mean
from moe_ops.meta import scales


@dataclass(frozen=True)
class ElementFormat:
    """A number format of quantized elements.

    ``storage`` is the torch dtype that holds them, ``bits`` the bits of one: two of 4 bits share a
    byte (the even one in the low half), eight of 5 bits share five, four of 6 bits three (the
    first in the lowest bits). ``max`` is the largest magnitude. Floating-point formats have a
    sign, ``mantissa`` bits of mantissa and an exponent of bias ``bias`` in between, without
    infinities. Formats of ``levels`` have any numbers, one for each code.
    """

    name: str
    storage: torch.dtype
    bits: int
    max: float
    mantissa: int = 0
    bias: int = 0
    levels: tuple[float, ...] = ()

    @property
    def is_float(self) -> bool:
        """Whether codes stand for numbers that are not counted."""
        return self.mantissa > 0 or self.levels != ()

    @property
    def least_integer(self) -> float:
        """The least stored element of an integer format: -128 of int8; 0 of those of fewer bits,
        whose elements are codes.
        """
        return 0.0 if self.bits < 8 else -self.max - 1

    @property
    def middle(self) -> float:
        """The stored element of an integer format that stands for 0 where nothing says another:
        0 of int8, 8 of int4.
        """
        return 0.0 if self.bits == 8 else self.max + 1

    @property
    def max_exponent(self) -> int:
        """floor(log2(max))."""
        return int(self.max).bit_length() - 1


# bitsandbytes' normal floats, exact in fp32
_NF4: tuple[float, ...] = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138)
_NF4 += (
    -0.18477343,
    -0.091050036,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
)
_FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)  # bitsandbytes', a sign above
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml's

# int4 elements are codes 0..15 that stand for code - 8, for code - zero_point, or beside a minimum
# for themselves; so it is with int5 and int6, whose middles are 16 and 32
ELEMENT_FORMATS = {
    f.name: f
    for f in (
        ElementFormat("e4m3", torch.float8_e4m3fn, 8, 448.0, mantissa=3, bias=7),
        ElementFormat("e3m2", torch.uint8, 6, 28.0, mantissa=2, bias=3),
        ElementFormat("e2m3", torch.uint8, 6, 7.5, mantissa=3, bias=1),
        ElementFormat("e2m1", torch.uint8, 4, 6.0, mantissa=1, bias=1),
        ElementFormat("int8", torch.int8, 8, 127.0),
        ElementFormat("int6", torch.uint8, 6, 31.0),
        ElementFormat("int5", torch.uint8, 5, 15.0),
        ElementFormat("int4", torch.uint8, 4, 7.0),
        ElementFormat("nf4", torch.uint8, 4, 1.0, levels=_NF4),
        ElementFormat("fp4", torch.uint8, 4, 1.0, levels=_FP4 + tuple([-x for x in _FP4])),
        ElementFormat("iq4", torch.uint8, 4, 113.0, levels=_IQ4),  # of either sign
    )
}


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
_SCALE_DTYPES = {  # with what stands for them in the names of schemes of one's own
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
    if d.scale_dtype not in _SCALE_DTYPES:
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


@dataclass(frozen=True)
class QuantScheme:
    """The quantization of weights and activations.

    ``weight`` is None for plain weights, ``activation`` is None if activations stay in the dtype
    of hidden_states.

    Raises:
        ValueError: the combination has no meaning; the message says why.
    """

    name: str
    weight: QuantDesc | None
    activation: QuantDesc | None

    def __post_init__(self) -> None:
        reason = _illegal(self.weight, self.activation)
        if reason:
            raise ValueError(f"scheme {self.name!r} is not possible: {reason}")

    @property
    def weight_only(self) -> bool:
        """Whether the weights are quantized and the activations are not."""
        return self.weight is not None and self.activation is None

    @property
    def e2m1_weight_only(self) -> bool:
        """Whether its weights may have the layout ``TRITON_E2M1``."""
        return self.weight_only and self.quantized_weight.dtype == "e2m1"

    @property
    def quantized_weight(self) -> QuantDesc:
        """``weight`` of a scheme that must have one; ValueError for plain weights."""
        if self.weight is None:
            raise ValueError(
                "scheme must be one that quantizes weights, such as 'fp8_block', got "
                f"{self.name!r}"
            )
        return self.weight

    @property
    def config_name(self) -> str:
        """The scheme's name inside a file name."""
        return self.name.replace(":", "-") or "unquantized"

    @property
    def measured_as(self) -> str:
        """The scheme under whose name tuning tables hold its times: rules of scales change
        none.
        """
        base, _, last = self.name.rpartition(":")
        return base if last in ("ue8m0", "round", "ceil") else self.name

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        """Shape of the scales of one expert's (N, K) weight."""
        return self.quantized_weight.scale_shape(n, k)

    def batched_scale_shape(self, num_experts: int, n: int, k: int) -> tuple[int, ...]:
        """Shape of the scales of an (E, N, K) weight."""
        return self.quantized_weight.batched_scale_shape(num_experts, n, k)

    def scale_shapes(
        self, num_experts: int, n: int, k: int, layout: str = "", *, global_rows: bool = False
    ) -> dict[str, tuple[int, ...] | None]:
        """Shapes of all tensors that belong to the elements of an (E, N, K) weight, by name; None
        for those that the scheme does not have. Of layouts other than ``TRITON_E2M1`` those of the
        natural one. With ``global_rows`` each row has a global scale, not each expert.
        """
        desc = self.quantized_weight
        scale = desc.batched_scale_shape(num_experts, n, k)
        if layout == scales.TRITON_E2M1 and self.e2m1_weight_only:
            scale = scales.triton_e2m1_scale_shape(num_experts, n, k, desc.group.cols)
        rows = (num_experts, n, 1)
        above = (num_experts, n, k // SUPER_BLOCK * desc.super_width)
        return {
            "scale": scale,
            "zero_point": scale if desc.has_zero else None,
            "global_scale": (rows if global_rows else rows[:1]) if desc.global_scale else None,
            "channel_scale": above if desc.two_levels else rows if desc.channel_scale else None,
        }

    def qdata_shape(self, *shape: int) -> tuple[int, ...]:
        """Shape of the stored elements of a (..., K) weight: fewer columns where elements share
        bytes.
        """
        bits = 8 if self.weight is None else self.weight.format.bits
        return (*shape[:-1], scales.packed_size(shape[-1], bits))

    def logical_shape(self, *shape: int) -> tuple[int, ...]:
        """The inverse of ``qdata_shape``; plain weights are stored as they are."""
        if self.weight is None:
            return shape
        return (*shape[:-1], scales.unpacked_size(shape[-1], self.weight.format.bits))

    def why_not_shape(self, n: int, k: int) -> str:
        """Why weights (N, K), and activations of K columns, cannot be quantized so, "" if they
        can.
        """
        desc = self.quantized_weight
        if k % desc.whole_columns == 0:
            for operand in (desc, self.activation):
                # elements that fill whole bytes: two of 4 bits, four of 6
                fill = 1 if operand is None else 8 // math.gcd(8, operand.format.bits)
                if k % fill:
                    must = "even to share bytes in pairs" if fill == 2 else f"a multiple of {fill}"
                    return f"its {k} columns must be {must}"
            return ""
        base = self.name.split(":")[0]
        fitting = [
            repr(name)
            for name, other in SCHEMES.items()
            if name.split(":")[0] == base
            and k % other.quantized_weight.whole_columns == 0
            and other.quantized_weight.zero_point == desc.zero_point
            and other.quantized_weight.minimum == desc.minimum
        ]
        take = "takes" if len(fitting) == 1 else "take"
        also = f"; {' and '.join(fitting)} {take} it" if fitting else ""
        what = (
            "which share a scale of scales" if desc.two_levels else "the size of a scale's group"
        )
        return f"its {k} columns must be a multiple of {desc.whole_columns}, {what}{also}"


def _illegal(weight: QuantDesc | None, activation: QuantDesc | None) -> str:
    """Why the two descriptions do not go together, "" if they do."""
    if weight is not None and not weight.static:
        return "weight scales are computed once, so the weight must be static"
    if activation is None:
        return ""
    if weight is None:
        return "quantized activations need quantized weights"
    if activation.format.levels:
        return (
            "activations are rounded to numbers of a format, not to levels such as those of "
            f"{activation.dtype}"
        )
    if activation.has_zero:
        return "activations are symmetric, without zero points, which nothing would hold"
    if activation.two_levels:
        return "activations have scales of one level, not of int8"
    if activation.scale_dtype is None:
        return "scales of activations must have a dtype: None stands for that of the weights"
    if activation.group.rows not in (-1, 1):
        return (
            f"an activation scale belongs to one token or to all, "
            f"not to groups of {activation.group.rows} tokens"
        )
    if activation.group.is_column or weight.group.is_column:
        return "a scale for each element of the summed dimension cannot leave the matrix product"
    if activation.group.rows == -1 and activation.group.cols != -1:
        return "activations scaled by groups of columns must be scaled for each token"
    if activation.static and not activation.group.is_tensor:
        return "the tokens are not known beforehand, so only one scale for all can be static"
    if activation.static and activation.scale_rule:
        return "a static activation scale is given, so that no scale_rule finds it"
    if weight.has_zero:
        return "products of quantized activations need symmetric weights, without zero points"
    if weight.group.is_block and activation.group.is_block:
        small, large = sorted((weight.group.cols, activation.group.cols))
        if large % small:
            return f"scale groups of {small} and {large} columns do not line up"
    return ""


def get_scheme(scheme: str | QuantScheme) -> QuantScheme:
    """The scheme of a name such as "fp8_block" or "int4_w4a16:g64"; "" means plain weights.

    A name without its variant means the default one: "fp8_w8a16" is "fp8_w8a16:channel". The
    types of GGUF's blocks are names too, "q4_k" of "int4_w4a16:g32:super:min" (`GGUF_TYPES`; but
    "mxfp4" and "nvfp4" quantize activations, unlike the blocks of that name). For a
    QuantScheme of one's own it is the named scheme with the same descriptions, else the scheme
    whose name spells out both descriptions, because operators, files and exported programs refer
    to schemes by name.

    Raises:
        ValueError: the name is unknown, or a QuantScheme has the name of another one.
    """
    if isinstance(scheme, QuantScheme):
        named = SCHEMES.get(scheme.name)
        if named is not None and named != scheme:
            raise ValueError(
                f"scheme must have a name of its own, got a QuantScheme named {scheme.name!r} "
                "that differs from the one of that name"
            )
        return named or _alike(scheme)
    if not isinstance(scheme, str):
        raise ValueError(
            "scheme must be a name, such as 'fp8_block', or a QuantScheme, got "
            f"{type(scheme).__name__}"
        )
    name = OTHER_NAMES.get(scheme, scheme)
    found = SCHEMES.get(name) or _spelled_out.get(name)
    if found is None and name.startswith(_CUSTOM):
        return _spell(name)
    if found is None:
        known = [name for name in (*OTHER_NAMES, *SCHEMES) if name]
        if ":" not in scheme:  # those without a variant stand for the default one
            known = list(dict.fromkeys([name.split(":")[0] for name in known]))
        raise ValueError(
            f"scheme must be one of moe_ops.schemes.SCHEMES, got {scheme!r}"
            f"{did_you_mean(scheme, known) or '.'} Families: {', '.join(_FAMILIES)}"
        )
    return found


# --- layers of two schemes: names that join that of w13 and that of w2 ---------------------------

_PLAIN = "plain"  # stands for "" there


def layer_scheme(w13: str, w2: str) -> str:
    """One name for the schemes of a layer: that of both weights, or of w13 and w2 by their full
    names, as in "int4_w4a16:g128+plain".
    """
    return w13 if w13 == w2 else f"{w13 or _PLAIN}+{w2 or _PLAIN}"


def schemes_of_layer(scheme: str) -> tuple[str, str]:
    """The schemes of w13 and w2, from the result of `layer_scheme`."""
    if "+" not in scheme:
        return scheme, scheme
    w13, w2 = ["" if name == _PLAIN else name for name in scheme.split("+")]
    return w13, w2


# --- schemes of one's own: names that spell out both descriptions --------------------------------

_CUSTOM = "custom:"
_FLAGS = {
    "global": "global_scale",
    "channel": "channel_scale",
    "zp": "zero_point",
    "min": "minimum",
}
_spelled_out: dict[str, QuantScheme] = {}


def _alike(scheme: QuantScheme) -> QuantScheme:
    """The named scheme of the same descriptions, or the one whose name spells them out."""
    for named in SCHEMES.values():
        if (named.weight, named.activation) == (scheme.weight, scheme.activation):
            return named
    descriptions = [d for d in (scheme.weight, scheme.activation) if d is not None]
    return _spell(_CUSTOM + ":".join(map(_text_of, descriptions)))


def _text_of(desc: QuantDesc) -> str:
    """E.g. "e4m3,1x128,f32,ceil,dynamic"."""
    sizes = ["all" if size == -1 else str(size) for size in (desc.group.rows, desc.group.cols)]
    parts = [desc.dtype, "x".join(sizes), _SCALE_DTYPES[desc.scale_dtype], desc.scale_rule]
    parts += [flag for flag, field in _FLAGS.items() if getattr(desc, field)]
    return ",".join([part for part in (*parts, "" if desc.static else "dynamic") if part])


def _spell(name: str) -> QuantScheme:
    """The scheme of a name that `_text_of` made. Raises ValueError for others."""
    try:
        weight, *others = [_description(part) for part in name.removeprefix(_CUSTOM).split(":")]
        scheme = QuantScheme(name, weight, others[0] if others else None)
        if name != _CUSTOM + ":".join(map(_text_of, (weight, *others[:1]))):
            raise ValueError("it is not spelled as moe_ops spells it")
    except (ValueError, KeyError) as error:
        raise ValueError(
            "scheme must spell out the descriptions of weights and of activations, as in "
            f"'{_CUSTOM}e4m3,1xall,f32:e4m3,allxall,f32,dynamic', got {name!r}: {error}"
        ) from error
    return _spelled_out.setdefault(name, scheme)


def _description(text: str) -> QuantDesc:
    """The inverse of `_text_of`."""
    dtype, group, scale, *rest = text.split(",")
    rows, cols = [-1 if size == "all" else int(size) for size in group.split("x")]
    return QuantDesc(
        dtype,
        GroupShape(rows, cols),
        static="dynamic" not in rest,
        scale_dtype={text: dtype for dtype, text in _SCALE_DTYPES.items()}[scale],
        scale_rule=next((rule for rule in SCALE_RULES if rule in rest), ""),
        **{field: flag in rest for flag, field in _FLAGS.items()},
    )


def _mx(dtype: str, rule: str = "ocp", static: bool = True) -> QuantDesc:
    e8m0 = torch.float8_e8m0fnu
    return QuantDesc(dtype, PER_MX_BLOCK, static, scale_dtype=e8m0, scale_rule=rule)


def _all_schemes() -> Iterator[tuple[str, QuantDesc | None, QuantDesc | None]]:
    """(name, weight, activation) of every scheme."""
    tensor, channel = QuantDesc("e4m3", PER_TENSOR), QuantDesc("e4m3", PER_ROW)
    block = QuantDesc("e4m3", PER_BLOCK)
    per_token = QuantDesc("e4m3", PER_ROW, static=False)
    per_token_group = QuantDesc("e4m3", PER_TOKEN_GROUP, static=False)
    yield "", None, None
    yield "fp8_tensor", tensor, QuantDesc("e4m3", PER_TENSOR, static=False)
    yield "fp8_tensor_static", tensor, QuantDesc("e4m3", PER_TENSOR)
    yield "fp8_channel", channel, per_token
    yield "fp8_channel_tensor", channel, QuantDesc("e4m3", PER_TENSOR, static=False)
    yield "fp8_channel_tensor_static", channel, QuantDesc("e4m3", PER_TENSOR)
    yield "fp8_block", block, per_token_group
    powers, of_tokens = [
        dataclasses.replace(desc, scale_rule="ceil") for desc in (block, per_token_group)
    ]
    yield "fp8_block:ue8m0", powers, of_tokens
    yield "fp8_w8a16:tensor", tensor, None
    yield "fp8_w8a16:channel", channel, None
    yield "fp8_w8a16:block", block, None

    int8 = QuantDesc("int8", PER_ROW)
    yield "int8_w8a8", int8, QuantDesc("int8", PER_ROW, static=False)
    yield "int8_w8a8_tensor", int8, QuantDesc("int8", PER_TENSOR, static=False)
    yield "int8_w8a8_static", int8, QuantDesc("int8", PER_TENSOR)
    for base, dtype in (("int8_w8a16", "int8"), ("int4_w4a16", "int4")):
        for suffix in ("", ":zp", ":min"):
            for name, cols in (("channel", -1), ("g32", 32), ("g64", 64), ("g128", 128)):
                desc = QuantDesc(
                    dtype,
                    GroupShape(1, cols),
                    scale_dtype=None,
                    zero_point=suffix == ":zp",
                    minimum=suffix == ":min",
                )
                yield f"{base}:{name}{suffix}", desc, None
    of_16, of_32 = [QuantDesc("int6", GroupShape(1, c), scale_dtype=None) for c in (16, 32)]
    int5, iq4 = [dataclasses.replace(of_32, dtype=dtype) for dtype in ("int5", "iq4")]
    yield "int6_w6a16:g16", of_16, None
    yield "int5_w5a16:g32", int5, None
    yield "int5_w5a16:g32:min", dataclasses.replace(int5, minimum=True), None
    yield "iq4_w4a16:g32", iq4, None
    # scales in two levels
    int4, int5, int6, iq4 = [
        dataclasses.replace(desc, scale_dtype=torch.int8)
        for desc in (dataclasses.replace(int5, dtype="int4"), int5, of_16, iq4)
    ]
    yield "int4_w4a16:g32:super:min", dataclasses.replace(int4, minimum=True), None
    yield "int5_w5a16:g32:super:min", dataclasses.replace(int5, minimum=True), None
    yield "int6_w6a16:g16:super", int6, None
    yield "iq4_w4a16:g32:super", iq4, None
    for dtype in ("nf4", "fp4"):
        for cols in (64, 32):
            yield f"{dtype}_w4a16:g{cols}", QuantDesc(dtype, GroupShape(1, cols)), None
    e4m3 = torch.float8_e4m3fn
    grouped = QuantDesc("int4", PER_TOKEN_GROUP, scale_dtype=e4m3, channel_scale=True)
    yield "int4_w4a8", grouped, per_token

    mxfp8 = _mx("e4m3", "ceil", static=False)
    for suffix, rule in (("", "ocp"), (":round", "round"), (":ceil", "ceil")):
        mxfp4 = _mx("e2m1", rule)
        yield f"mxfp4_w4a16{suffix}", mxfp4, None
        yield f"mxfp4_w4a8{suffix}", mxfp4, per_token_group
        yield f"mxfp4_mxfp8{suffix}", mxfp4, mxfp8
        yield f"mxfp4{suffix}", mxfp4, _mx("e2m1", rule, static=False)
    for dtype in ("e3m2", "e2m3"):
        mxfp6, dynamic = _mx(dtype), _mx(dtype, static=False)
        yield f"mxfp6_{dtype}", mxfp6, dynamic
        yield f"mxfp6_{dtype}:mxfp4", mxfp6, _mx("e2m1", static=False)
        yield f"mxfp6_{dtype}:mxfp8", mxfp6, mxfp8
        yield f"mxfp6_{dtype}_w6a16", mxfp6, None
        yield f"mxfp4_mxfp6_{dtype}", _mx("e2m1"), dynamic
    yield "mxfp8", _mx("e4m3", "ceil"), mxfp8

    nvfp4 = QuantDesc("e2m1", PER_NV_BLOCK, scale_dtype=e4m3, global_scale=True)
    yield "nvfp4", nvfp4, dataclasses.replace(nvfp4, static=False)
    yield "nvfp4_w4a16", nvfp4, None


SCHEMES = {name: QuantScheme(name, *operands) for name, *operands in _all_schemes()}
_FAMILIES = tuple(dict.fromkeys([name.split(":")[0].split("_")[0] for name in SCHEMES if name]))
# the types of blocks that experts of a GGUF file may have, and the scheme of each
GGUF_TYPES = {
    "Q2_K": "custom:int4,1x16,int8,min",
    "Q3_K": "custom:int4,1x16,int8",
    "Q4_0": "int4_w4a16:g32",
    "Q4_1": "int4_w4a16:g32:min",
    "Q5_0": "int5_w5a16:g32",
    "Q5_1": "int5_w5a16:g32:min",
    "Q8_0": "int8_w8a16:g32",
    "Q4_K": "int4_w4a16:g32:super:min",
    "Q5_K": "int5_w5a16:g32:super:min",
    "Q6_K": "int6_w6a16:g16:super",
    "IQ4_NL": "iq4_w4a16:g32",
    "IQ4_XS": "iq4_w4a16:g32:super",
    "MXFP4": "mxfp4_w4a16",
    "NVFP4": "nvfp4_w4a16",
}
# other spellings: names without their variant, the default variant of names that have none, and
# GGUF's types but those that are schemes with quantized activations here, "mxfp4" and "nvfp4"
OTHER_NAMES = {
    "fp8_w8a16": "fp8_w8a16:channel",
    "int8_w8a16": "int8_w8a16:channel",
    "int8_w8a16:zp": "int8_w8a16:channel:zp",
    "int8_w8a16:min": "int8_w8a16:channel:min",
    "int4_w4a16": "int4_w4a16:g128",
    "int4_w4a16:zp": "int4_w4a16:g128:zp",
    "int4_w4a16:min": "int4_w4a16:g128:min",
    "nf4": "nf4_w4a16:g64",
    "fp4": "fp4_w4a16:g64",
    **{f"{name}:ocp": name for name in ("mxfp4_w4a16", "mxfp4_w4a8", "mxfp4_mxfp8", "mxfp4")},
    **{kind.lower(): name for kind, name in GGUF_TYPES.items() if kind.lower() not in SCHEMES},
}
