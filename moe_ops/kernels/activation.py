"""The activation of a layer, as kernels take it. torch alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from moe_ops.activations import BY_EXPERT, NO_LIMIT, Activation
from moe_ops.kernels.launch import Constant, RuntimeFloat, unprefixed


@unprefixed
class Activated(NamedTuple):
    """An activation: the numbers in its formula, and the constants that select it."""

    alpha: RuntimeFloat  # these three (E,) fp32 where HAS_LIMIT is BY_EXPERT
    beta: RuntimeFloat
    limit: RuntimeFloat
    ACTIVATION: Constant
    GATED: Constant
    INTERLEAVED: Constant
    HAS_LIMIT: Constant


@lru_cache(maxsize=256)
def activated(of: Activation) -> Activated:
    """The Activated of an activation."""
    function = of.name.removesuffix("_no_mul").removesuffix("_uninterleave")
    has_limit = of.limit < NO_LIMIT
    return Activated(of.alpha, of.beta, of.limit, function, of.gated, of.interleaved, has_limit)


def activated_by_expert(of: Activation, by_expert: Tensor | None) -> Activated:
    """The same, with the parameters (3, E) of each expert if there are any."""
    if by_expert is None:
        return activated(of)
    alpha, beta, limit = by_expert
    numbers: Any = {"alpha": alpha, "beta": beta, "limit": limit}
    return activated(of)._replace(**numbers, HAS_LIMIT=BY_EXPERT)
