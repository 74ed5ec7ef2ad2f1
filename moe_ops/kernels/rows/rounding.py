"""How activations are rounded for schemes that are emulated on GPUs without their products, and
how much workspace that takes. torch alone; the kernel is in emulated.py.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from moe_ops.kernels.launch import Constant, unprefixed
from moe_ops.kernels.rows.scales import NUM_PARTIALS
from moe_ops.meta.workspace import cdiv
from moe_ops.schemes import get_scheme

GAP = 32  # fp32 elements: alignment of the second part of a workspace


@unprefixed
class Rounding(NamedTuple):
    """A scheme's quantized activations, in the terms of kernels/rows/emulated.py."""

    SCALE: Constant
    SCALE_GROUP: Constant  # columns that share a scale; of no meaning for one scale a row
    RULE: Constant  # how a power of two is chosen: schemes.QuantDesc.scale_rule
    MANTISSA: Constant  # bits of an element's mantissa
    MIN_EXPONENT: Constant  # exponent of an element's least normal number
    MAX_VALUE: Constant  # an element's largest number

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rounded activations."""
        return torch.float32 if self.SCALE == "group" else torch.bfloat16

    def num_scales(self, rows):
        """fp32 elements after the rounded activations: the scales of rows, or partial maxima and
        one scale.
        """
        return rows if self.SCALE == "row" else NUM_PARTIALS + 1 if self.SCALE == "nv" else 0


def describe(scheme: str) -> Rounding | None:
    """The Rounding of a scheme's activations, or None if they are not quantized."""
    desc = get_scheme(scheme).activation
    if desc is None:
        return None
    fmt, group = desc.format, desc.group.cols
    how = "mx" if desc.is_mx else "nv" if desc.global_scale else "row" if group == -1 else "group"
    return Rounding(
        how, max(group, 16), desc.scale_rule, fmt.mantissa, 1 - fmt.bias, fmt.max
    )  # fmt: skip


rounding_of = cache(describe)  # for launches; Dynamo warns of cached functions in traced code


def x_elements(rows, K: int, r: Rounding):
    """fp32 elements that rounded x (rows, K) and its scales need. int or SymInt."""
    return cdiv(rows * K * r.dtype.itemsize, 4) + GAP + r.num_scales(rows)


def h_elements(rows, I: int, r: Rounding):
    """fp32 elements that h (rows, I), its largest magnitude, rounded h and its scales need. int or
    SymInt.
    """
    return rows * I + GAP + x_elements(rows, I, r)
