"""Layers composed of torch operators around one differentiable grouped product, for gradients of
gradients.

torch differentiates everything but the grouped product (products.py), so gradients are right for
every activation, bias and routing option. They pass through the dequantized values of quantized
weights, which get none themselves, and through the rounding of activations as through the identity
(straight-through).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops import activations, numerics
from moe_ops.autograd.adapters import UNADAPTED, Adapters
from moe_ops.autograd.products import grouped_mm, grouped_outer
from moe_ops.autograd.step import Step, straight_through
from moe_ops.numerics import Scales
from moe_ops.ops.call import Weight
from moe_ops.ops.products import Products


def _multiply(
    rows: Tensor,
    weight: Tensor,
    ends: Tensor,
    *,
    scales: Scales | None = None,
    scheme: str = "",
    bias: Tensor | None = None,
    transpose: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    parts: Any = scales or (None, None, None, None)
    return grouped_mm(rows, weight, ends, *parts, bias, scheme, transpose, batch_invariant)


_PRODUCTS = Products("differentiable", _multiply, grouped_outer)


def grouped_linear(
    x: Tensor,  # (S, K)
    weight: Weight,  # (E, N, K)
    offsets: Tensor,  # (E,)
    bias: Tensor | None,
    batch_invariant: bool = False,
) -> Tensor:
    """Differentiable grouped linear: (S, N) in x's dtype, computed in fp32 if the scheme
    quantizes.
    """
    if weight.scheme:
        rows_valid = torch.arange(x.shape[0], device=x.device) < offsets[-1]
        scale = numerics.static_scale_of_sorted(weight.activation_scale, offsets, x.shape[0])
        x = straight_through(x, weight.scheme, scale, rows_valid)
    options = (weight.scheme, False, batch_invariant)
    return grouped_mm(x, weight.data, offsets, *weight.scales, bias, *options)


def experts(call: Any, adapters: Adapters = UNADAPTED, of: type[Step] = Step) -> Tensor:
    """Differentiable experts, (M, K) in hidden_states' dtype, also of their gradients.

    Args:
        call: what a pass `of` these steps takes.
    """
    step = of(call, adapters, _PRODUCTS)
    step.invariant = False
    step.place()
    step.adapt()
    gate_up = step.multiply(step.inputs(), call.w13, step.first, bias=call.w13_bias)
    hidden = activations.apply(gate_up, step.activation_of(slice(None)))
    return step.output(step.rounded(hidden, call.w2))
