"""The layout of weights that the tensor cores of SM100 and SM120 multiply: elements as they are,
scales of blocks in tiles (numerics/swizzle.py), padded to whole ones.

For ``moe_ops.prepare(weight, "cutlass")``; plain torch on any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_ops.backends.cutlass.schemes import BLOCK_SCALED
from moe_ops.numerics.swizzle import swizzle, unswizzle
from moe_ops.ops.relayout import Relayout, Tensors

if TYPE_CHECKING:
    from moe_ops.tensors.base import ExpertTensor

SWIZZLED = "cutlass_swizzled"


def _swizzled(weight: ExpertTensor) -> Tensors:
    return {"scale": swizzle(weight.scale)}


def _natural(weight: ExpertTensor) -> Tensors:
    rows, columns = weight.shape[-2:]
    return {"scale": unswizzle(weight.scale, rows, columns // BLOCK_SCALED[weight.scheme].group)}


RELAYOUTS = (Relayout(SWIZZLED, lambda scheme: scheme.name in BLOCK_SCALED, _swizzled, _natural),)
