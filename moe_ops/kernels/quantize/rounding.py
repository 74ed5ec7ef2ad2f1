"""How activations of schemes that GPUs without the hardware emulate are rounded, and what room
they need in the workspaces. torch alone; the kernel is in emulated.py.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from moe_ops.kernels.launch import Constant, unprefixed
from moe_ops.kernels.quantize.scales import NUM_PARTIALS
from moe_ops.meta.workspace import cdiv
from moe_ops.schemes import get_scheme

GAP = 32  # fp32 elements that align what comes second in a workspace


@unprefixed
class Rounding(NamedTuple):
    """A scheme's quantized activations in the words of kernels/quantize/emulated.py."""

    SCALE: Constant
    SCALE_GROUP: Constant  # columns that share a scale; of whole rows any
    RULE: Constant  # of a power of two: schemes.QuantDesc.scale_rule
    MANTISSA: Constant  # bits of an element's
    MIN_EXPONENT: Constant  # of its least normal number
    MAX_VALUE: Constant  # its largest number

    @property
    def dtype(self) -> torch.dtype:
        """What holds the rounded activations."""
        return torch.float32 if self.SCALE == "group" else torch.bfloat16

    def num_scales(self, rows):
        """fp32 elements behind the rounded activations: scales of rows; partial largest magnitudes
        and one scale.
        """
        return rows if self.SCALE == "row" else NUM_PARTIALS + 1 if self.SCALE == "nv" else 0


def describe(scheme: str) -> Rounding | None:
    """The Rounding of a scheme's activations; None where they stay as they are."""
    desc = get_scheme(scheme).activation
    if desc is None:
        return None
    fmt, group = desc.format, desc.group.cols
    how = "mx" if desc.is_mx else "nv" if desc.global_scale else "row" if group == -1 else "group"
    return Rounding(
        how, max(group, 16), desc.scale_rule, fmt.mantissa, 1 - fmt.bias, fmt.max
    )  # fmt: skip


rounding_of = cache(describe)  # for launches; in traced code Dynamo warns of a cached function


def x_elements(rows, K: int, r: Rounding):
    """fp32 elements that rounded x (rows, K) and its scales need. int or SymInt."""
    return cdiv(rows * K * r.dtype.itemsize, 4) + GAP + r.num_scales(rows)


def h_elements(rows, I: int, r: Rounding):  # noqa: E741
    """fp32 elements that h (rows, I), its largest magnitude, rounded h and its scales need. int or
    SymInt.
    """
    return rows * I + GAP + x_elements(rows, I, r)
