"""The differentiable path: experts as a composition of torch operators around one grouped product.

Except for the grouped product (products.py), torch computes the gradients, so that they are right
for every activation, bias and routing option. Gradients pass through the dequantized values of
quantized weights, which get none themselves. The rounding of activations counts as the identity
(straight-through).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import activations, numerics
from moe_ops.autograd.products import grouped_mm
from moe_ops.numerics import permute
from moe_ops.ops.call import ExpertsCall, Weight


def _refuse_transforms() -> None:
    """Raise RuntimeError inside torch.func transforms, which cannot differentiate operators that
    are written in Python.
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "moe_ops cannot be differentiated by torch.func (grad, vjp, jacrev, ...): use "
            "torch.autograd.grad or Tensor.backward"
        )


def grouped_linear(
    x: Tensor,  # (S, K)
    weight: Weight,  # (E, N, K)
    offsets: Tensor,  # (E,)
    bias: Tensor | None,
    rows_valid: Tensor | None = None,  # (S,) bool
) -> Tensor:
    """Differentiable grouped linear: (S, N) in x's dtype, computed in fp32 if the scheme
    quantizes.
    """
    _refuse_transforms()
    if weight.scheme:
        if rows_valid is None:
            rows_valid = torch.arange(x.shape[0], device=x.device) < offsets[-1]
        scale = numerics.static_scale_of_sorted(weight.activation_scale, offsets, x.shape[0])
        x = _straight_through(x, weight.scheme, scale, rows_valid)
    return grouped_mm(x, weight.data, offsets, *weight.scales, bias, weight.scheme, False)


def fused_experts(call: ExpertsCall) -> Tensor:
    """Differentiable experts, (M, K) in hidden_states' dtype."""
    _refuse_transforms()
    w13, w2 = call.w13, call.w2
    num_experts, scheme = w13.data.shape[0], w13.scheme
    pairs = permute.sort_pairs(call.topk_ids, num_experts, call.expert_map)
    weights, rows = call.topk_weights, call.hidden_states
    if scheme:  # router weights scale the input in fp32, before it is quantized
        rows = rows.to(torch.float32)
    if call.router_weight_on_input:
        rows = permute.weigh_inputs(rows, weights, pairs)
        weights = torch.ones_like(weights)
    # each pair has the scale of its expert where these differ
    by_pair = w13.activation_scale is not None and w13.activation_scale.numel() > 1
    if scheme and not by_pair:
        rows = _straight_through(rows, scheme, w13.activation_scale, pairs.valid.any(1))
    rows = permute.gather_tokens(rows, pairs)
    if by_pair:
        scale = numerics.static_scale_of_rows(w13.activation_scale, pairs.experts)
        rows = _straight_through(rows, scheme, scale, pairs.experts < num_experts)
    gate_up = grouped_mm(rows, w13.data, pairs.offsets, *w13.scales, call.w13_bias, scheme, False)
    hidden = activations.apply(gate_up, call.activation)
    if scheme:
        valid = pairs.experts < num_experts
        scale = numerics.static_scale_of_rows(w2.activation_scale, pairs.experts)
        hidden = _straight_through(hidden, scheme, scale, valid)
    y = grouped_mm(hidden, w2.data, pairs.offsets, *w2.scales, call.w2_bias, scheme, False)
    return permute.combine(y, weights, pairs, call.hidden_states.dtype)


def _straight_through(
    x: Tensor, scheme: str, static_scale: Tensor | None, rows_valid: Tensor
) -> Tensor:
    quantized = numerics.fake_quantize_activation(x.detach(), scheme, static_scale, rows_valid)
    x = x.to(torch.float32)
    return x + (quantized - x).detach()
