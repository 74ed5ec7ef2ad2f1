"""How weights and activations are quantized together: two descriptions under a name."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ops.meta import scales
from moe_ops.schemes.descriptions import SUPER_BLOCK, QuantDesc

SCHEMES: dict[str, QuantScheme] = {}  # by name, in the order of `table`, which fills it


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
                fill = 1 if operand is None else operand.format.columns_together
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
