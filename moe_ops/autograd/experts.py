"""Experts as a composition of torch operators around one grouped product: the values that
training.py computes, and gradients that have gradients themselves.

Except for the grouped product (products.py), torch computes the gradients, so that they are right
for every activation, bias and routing option. Gradients pass through the dequantized values of
quantized weights, which get none themselves. The rounding of activations counts as the identity
(straight-through).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ops import activations, numerics
from moe_ops.autograd.adapters import UNADAPTED, Adapters, LowRank
from moe_ops.autograd.products import grouped_mm
from moe_ops.numerics import permute
from moe_ops.ops.call import ExpertsCall, Weight


def grouped_linear(
    x: Tensor,  # (S, K)
    weight: Weight,  # (E, N, K)
    offsets: Tensor,  # (E,)
    bias: Tensor | None,
    rows_valid: Tensor | None = None,  # (S,) bool
    batch_invariant: bool = False,
) -> Tensor:
    """Differentiable grouped linear: (S, N) in x's dtype, computed in fp32 if the scheme
    quantizes.
    """
    if weight.scheme:
        if rows_valid is None:
            rows_valid = torch.arange(x.shape[0], device=x.device) < offsets[-1]
        scale = numerics.static_scale_of_sorted(weight.activation_scale, offsets, x.shape[0])
        x = _straight_through(x, weight.scheme, scale, rows_valid)
    options = (weight.scheme, False, batch_invariant)
    return grouped_mm(x, weight.data, offsets, *weight.scales, bias, *options)


def fused_experts(call: ExpertsCall, adapters: Adapters = UNADAPTED) -> Tensor:
    """Differentiable experts, (M, K) in hidden_states' dtype; so are their gradients."""
    pairs = permute.sort_pairs(call.topk_ids, call.w13.data.shape[0], call.expert_map)
    rows = gemm1_input(call, pairs)
    gate_up = product(grouped_mm, rows, call.w13, pairs, call.w13_bias, adapters.w13)
    hidden = activations.apply(gate_up, call.activation)
    return combined(grouped_mm, hidden, call, pairs, adapters.w2)


def quantized(call: ExpertsCall) -> bool:
    """Whether a weight is quantized: both products are in fp32 then."""
    return bool(call.w13.scheme or call.w2.scheme)


def combined(
    multiply: Callable[..., Tensor],
    hidden: Tensor,
    call: ExpertsCall,
    pairs: permute.Pairs,
    adapter: LowRank | None,
) -> Tensor:
    """The layer's output from that of the activation; `multiply` takes the arguments of
    `grouped_mm`.
    """
    rows = gemm2_input(call, pairs, hidden)
    y = product(multiply, rows, call.w2, pairs, call.w2_bias, adapter)
    weights = (
        torch.ones_like(call.topk_weights) if call.router_weight_on_input else call.topk_weights
    )
    ids = call.topk_ids if call.batch_invariant else None
    return permute.combine(y, weights, pairs, call.output()[1], ids, call.global_experts)


def product(
    multiply: Callable[..., Tensor],
    rows: Tensor,
    weight: Weight,
    pairs: permute.Pairs,
    bias: Tensor | None,
    adapter: LowRank | None = None,
    u: Tensor | None = None,
    transpose: bool = False,
) -> Tensor:
    """rows times the weight of their expert, and what adapts it; `u` are the rows through the
    rank, where they are known.
    """
    y = multiply(rows, weight.data, pairs.offsets, *weight.scales, bias, weight.scheme, transpose)
    if adapter is None:
        return y
    if u is None:
        u = narrowed(multiply, rows, adapter, pairs, transpose)
    return y + widened(multiply, u, adapter, pairs, transpose)


def narrowed(
    multiply: Callable[..., Tensor],
    rows: Tensor,
    adapter: LowRank,
    pairs: permute.Pairs,
    transpose: bool = False,
) -> Tensor:
    """(S, r): rows through the first matrix of an adapter, scaled."""
    first = adapter.b if transpose else adapter.a
    return _plain(multiply, rows, first, pairs, transpose) * adapter.scale


def widened(
    multiply: Callable[..., Tensor],
    u: Tensor,
    adapter: LowRank,
    pairs: permute.Pairs,
    transpose: bool = False,
) -> Tensor:
    """Rows of the rank (S, r) through the second matrix of an adapter."""
    second = adapter.a if transpose else adapter.b
    return _plain(multiply, u, second, pairs, transpose)


def _plain(
    multiply: Callable[..., Tensor],
    rows: Tensor,
    weight: Tensor,
    pairs: permute.Pairs,
    transpose: bool,
) -> Tensor:
    """rows times a plain weight of their expert."""
    weight = weight.to(rows.dtype)
    return multiply(rows, weight, pairs.offsets, *[None] * 5, "", transpose)


def gemm1_input(call: ExpertsCall, pairs: permute.Pairs) -> Tensor:
    """(S, K): rows of hidden_states sorted by expert, weighted and rounded as the scheme says."""
    w13, scheme, rows = call.w13, call.w13.scheme, call.hidden_states
    if quantized(call):  # router weights scale the input in fp32, before it is quantized
        rows = rows.to(torch.float32)
    if call.router_weight_on_input:
        rows = permute.weigh_inputs(rows, call.topk_weights, pairs)
    # each pair has the scale of its expert where these differ
    by_pair = w13.activation_scale is not None and w13.activation_scale.numel() > 1
    if scheme and not by_pair:
        rows = _straight_through(rows, scheme, w13.activation_scale, pairs.valid.any(1))
    rows = permute.gather_tokens(rows, pairs)
    if by_pair:
        scale = numerics.static_scale_of_rows(w13.activation_scale, pairs.experts)
        rows = _straight_through(rows, scheme, scale, pairs.experts < w13.data.shape[0])
    return rows


def gemm2_input(call: ExpertsCall, pairs: permute.Pairs, hidden: Tensor) -> Tensor:
    """(S, I): what the activation returned, rounded as the scheme says."""
    if not call.w2.scheme:
        return hidden
    valid = pairs.experts < call.w2.data.shape[0]
    scale = numerics.static_scale_of_rows(call.w2.activation_scale, pairs.experts)
    return _straight_through(hidden, call.w2.scheme, scale, valid)


def _straight_through(
    x: Tensor, scheme: str, static_scale: Tensor | None, rows_valid: Tensor
) -> Tensor:
    quantized = numerics.fake_quantize_activation(x.detach(), scheme, static_scale, rows_valid)
    x = x.to(torch.float32)
    return x + (quantized - x).detach()
