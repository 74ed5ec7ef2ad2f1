"""Frozen quantized experts in a training step: how their weights are decoded, and how their
activations are rounded. torch alone; the kernels are mixed_gemm/packed.py and straight_through.py.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from moe_ops.kernels.launch import Constant, unprefixed
from moe_ops.ops.call import Weight
from moe_ops.schemes import SCHEMES, QuantScheme, get_scheme


@unprefixed
class Elements(NamedTuple):
    """A scheme's quantized activations, in the terms of straight_through.py."""

    DTYPE: Constant
    RULE: Constant  # how a power of two is chosen: schemes.QuantDesc.scale_rule
    MX: Constant  # scales are those of the OCP MX formats
    MANTISSA: Constant  # bits of an element's mantissa
    MIN_EXPONENT: Constant  # exponent of an element's least normal number
    MAX_VALUE: Constant  # an element's largest number


class Frozen(NamedTuple):
    """How the experts of a scheme run."""

    weight: str  # the scheme of its weights beside activations that are not quantized
    elements: Elements | None  # of its activations; None if they are not quantized
    group: int  # columns that share a scale, 0 for all


@cache
def frozen(scheme: str) -> Frozen | None:
    """The Frozen of a scheme; None if the kernels do not run it."""
    if scheme not in SCHEMES:  # one of the user's own may have any groups
        return None
    weight, activation = SCHEMES[scheme].weight, SCHEMES[scheme].activation
    if weight is None or weight.channel_scale or weight.minimum:
        return None
    alone = get_scheme(QuantScheme("its weights", weight, None)).name
    if activation is None:
        return Frozen(alone, None, 0)
    of_all = activation.group.is_tensor and not activation.static
    if of_all or activation.global_scale:  # its scale follows from all rows
        return None
    form, columns = activation.format, max(activation.group.cols, 0)
    # integers are numbers of 7 bits of mantissa below its least normal number
    mantissa, least = (form.mantissa, 1 - form.bias) if form.is_float else (7, 7)
    rule, mx = activation.scale_rule, activation.is_mx
    return Frozen(alone, Elements(form.name, rule, mx, mantissa, least, form.max), columns)


def why_not(*weights: Weight) -> str | None:
    """Why the kernels do not run experts of these quantized weights; None if they do."""
    if any([frozen(weight.scheme) is None for weight in weights]):
        return (
            "its scheme has no name, channel scales, minima, or a scale of all activations of a "
            "call"
        )
    if any([w.activation_scale is not None and w.activation_scale.numel() > 1 for w in weights]):
        return "its experts have activation scales of their own"
    return None
