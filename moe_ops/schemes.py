"""Named quantization schemes: how expert weights and the activations that meet them are quantized.

A scheme is one row of the table at the end of this file. Its full name is what travels through
operator arguments, tuning files and quantized tensors; ``get_scheme`` turns a name into the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_ops.meta import scales


@dataclass(frozen=True)
class ElementFormat:
    """A number format of quantized elements: its torch storage dtype and largest magnitude."""

    name: str
    storage: torch.dtype
    max: float
    is_float: bool


ELEMENT_FORMATS = {
    "e4m3": ElementFormat("e4m3", torch.float8_e4m3fn, 448.0, True),
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


@dataclass(frozen=True)
class QuantDesc:
    """How one operand is quantized: value = (q - zero_point) * scale / global_scale.

    ``dtype`` names an element format ("e4m3"); ``static`` scales are known beforehand, others are
    computed from the data of each call. ``global_scale`` and ``zero_point`` say whether the operand
    has one.

    Raises:
        ValueError: for a combination that has no meaning; the message says why.
    """

    dtype: str
    group: GroupShape
    static: bool = True
    scale_dtype: torch.dtype = torch.float32
    global_scale: bool = False
    zero_point: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_FORMATS:
            raise ValueError(
                f"QuantDesc.dtype must be one of {sorted(ELEMENT_FORMATS)}, got {self.dtype!r}"
            )
        if self.zero_point and self.format.is_float:
            raise ValueError(
                f"zero_point must be False for {self.dtype}: a floating-point format is symmetric"
            )
        if self.global_scale and self.scale_dtype == torch.float32:
            raise ValueError(
                "global_scale must be False with float32 scales: it exists to widen the range of "
                "scales stored in fewer bits"
            )

    @property
    def format(self) -> ElementFormat:
        return ELEMENT_FORMATS[self.dtype]

    @property
    def storage_dtype(self) -> torch.dtype:
        """The torch dtype in which the quantized elements are stored."""
        return self.format.storage

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of the scales of a (rows, cols) operand: () for one scale, else 2-D."""
        return scales.scale_shape(rows, cols, self.group.rows, self.group.cols)

    def batched_scale_shape(self, batch: int, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of the scales of a (batch, rows, cols) operand: (batch,) for one scale a matrix."""
        return scales.batched_scale_shape(batch, rows, cols, self.group.rows, self.group.cols)


@dataclass(frozen=True)
class QuantScheme:
    """One way to run experts: the weights' quantization and that of the activations.

    ``weight`` is None for plain weights, ``activation`` is None where activations stay in the
    dtype of hidden_states.

    Raises:
        ValueError: for a combination that has no meaning; the message says why.
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
    def quantized_weight(self) -> QuantDesc:
        """``weight`` of a scheme that must have one; ValueError for plain weights."""
        if self.weight is None:
            raise ValueError(
                f"scheme must be one that quantizes weights, {_known()}, got {self.name!r}"
            )
        return self.weight

    @property
    def config_name(self) -> str:
        """The scheme's name inside a file name, as tuning tables use it."""
        return self.name.replace(":", "-") or "unquantized"

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        """Shape of the scales of one expert's (N, K) weight."""
        return self.quantized_weight.scale_shape(n, k)

    def batched_scale_shape(self, num_experts: int, n: int, k: int) -> tuple[int, ...]:
        """Shape of the scales of an (E, N, K) weight."""
        return self.quantized_weight.batched_scale_shape(num_experts, n, k)


def _illegal(weight: QuantDesc | None, activation: QuantDesc | None) -> str:
    """Why the two descriptions do not go together, "" if they do."""
    if weight is not None and not weight.static:
        return "weight scales are computed once, so the weight must be static"
    if activation is None:
        return ""
    if weight is None:
        return "quantized activations need quantized weights"
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
    if weight.group.is_block and activation.group.is_block:
        small, large = sorted((weight.group.cols, activation.group.cols))
        if large % small:
            return f"scale groups of {small} and {large} columns do not line up"
    return ""


def get_scheme(scheme: str | QuantScheme) -> QuantScheme:
    """The scheme of a name such as "fp8_block" or "fp8_w8a16:block"; "" means plain weights.

    A name whose variant is left out stands for the default one: "fp8_w8a16" is
    "fp8_w8a16:channel". A QuantScheme is returned as it is.

    Raises:
        ValueError: the name is not known, or the QuantScheme is not one of the named ones (operators
            receive a scheme by its name).
    """
    if isinstance(scheme, QuantScheme):
        if SCHEMES.get(scheme.name) != scheme:
            raise ValueError(
                f"scheme must be one of the named schemes, got a QuantScheme named "
                f"{scheme.name!r} that differs from all of them; use one of {_known()}"
            )
        return scheme
    found = None
    if isinstance(scheme, str):
        found = SCHEMES.get(DEFAULT_VARIANTS.get(scheme, scheme))
    if found is None:
        raise ValueError(f"scheme must be one of {_known()}, got {scheme!r}")
    return found


def _known() -> str:
    """The names of all schemes that quantize."""
    return ", ".join(repr(name) for name in (*SCHEMES, *DEFAULT_VARIANTS) if name)


_E4M3_TENSOR = QuantDesc("e4m3", PER_TENSOR)
_E4M3_CHANNEL = QuantDesc("e4m3", PER_ROW)
_E4M3_BLOCK = QuantDesc("e4m3", PER_BLOCK)

# name, weight, activation
SCHEMES = {
    name: QuantScheme(name, weight, activation)
    for name, weight, activation in (
        ("", None, None),
        ("fp8_tensor", _E4M3_TENSOR, QuantDesc("e4m3", PER_TENSOR, static=False)),
        ("fp8_tensor_static", _E4M3_TENSOR, QuantDesc("e4m3", PER_TENSOR, static=True)),
        ("fp8_channel", _E4M3_CHANNEL, QuantDesc("e4m3", PER_ROW, static=False)),
        ("fp8_block", _E4M3_BLOCK, QuantDesc("e4m3", PER_TOKEN_GROUP, static=False)),
        ("fp8_w8a16:tensor", _E4M3_TENSOR, None),
        ("fp8_w8a16:channel", _E4M3_CHANNEL, None),
        ("fp8_w8a16:block", _E4M3_BLOCK, None),
    )
}
# names that may be written without their variant
DEFAULT_VARIANTS = {"fp8_w8a16": "fp8_w8a16:channel"}
