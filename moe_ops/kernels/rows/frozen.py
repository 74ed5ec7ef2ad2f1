"""Frozen quantized experts in a training step: how their weights are decoded, and how their
activations are rounded. torch alone; the kernels are mixed_gemm/packed.py and emulated.py.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from moe_ops.kernels.configs import DECODED
from moe_ops.kernels.rows.rounding import Rounding
from moe_ops.ops.call import Weight
from moe_ops.schemes import SCHEMES, QuantScheme, get_scheme


class Frozen(NamedTuple):
    """How the experts of a scheme run."""

    weight: str  # the scheme of its weights beside activations that are not quantized
    elements: str = ""  # of its activations; "" if they are not quantized
    rounding: Rounding | None = None  # likewise; its SCALE_GROUP is 0 for one scale a row


@cache
def frozen(scheme: str) -> Frozen | None:
    """The Frozen of a scheme; None if the kernels do not run it."""
    if scheme not in SCHEMES:  # one of the user's own may have any groups
        return None
    weight, activation = SCHEMES[scheme].weight, SCHEMES[scheme].activation
    if weight is None or weight.dtype not in DECODED:
        return None
    if weight.channel_scale:
        return None
    alone = get_scheme(QuantScheme("its weights", weight, None)).name
    if activation is None:
        return Frozen(alone)
    of_all = activation.group.is_tensor and not activation.static
    if of_all or activation.global_scale:  # its scale follows from all rows
        return None
    form, columns = activation.format, max(activation.group.cols, 0)
    # integers are numbers of 7 bits of mantissa below its least normal number
    mantissa, least = (form.mantissa, 1 - form.bias) if form.is_float else (7, 7)
    numbers = (activation.scale_rule, mantissa, least, form.max)
    rounding = Rounding("mx" if activation.is_mx else "group", columns, *numbers)
    return Frozen(alone, form.name, rounding)


def why_not(*weights: Weight) -> str | None:
    """Why the kernels do not run experts of these quantized weights; None if they do."""
    if any([frozen(weight.scheme) is None for weight in weights]):
        return (
            "its scheme has no name, channel scales, a number format that no kernel decodes, or "
            "a scale of all activations of a call"
        )
    if any([w.activation_scale is not None and w.activation_scale.numel() > 1 for w in weights]):
        return "its experts have activation scales of their own"
    return None
