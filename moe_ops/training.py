"""The differentiable path: experts as a composition of torch operators around one grouped product.

Gradients of everything but the grouped product come from torch itself, so every activation, bias and
routing option has the right ones. The product is a pair of opaque ops, because its row counts per
expert live on the device. Quantized weights pass gradients on through their dequantized values and
take none; the rounding of activations counts as the identity (straight-through).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_ops import activations, library, numerics, permute
from moe_ops.activations import Activation
from moe_ops.kernels import torch_grouped


def _grouped_mm(x, weight, offsets, scale, bias, scheme, transpose):
    return torch_grouped.grouped_mm(
        x, weight, offsets, scale=scale, scheme=scheme, bias=bias, transpose=transpose
    )


def _grouped_mm_fake(x, weight, offsets, scale, bias, scheme, transpose):
    return x.new_empty(x.shape[0], weight.shape[2 if transpose else 1])


def _grouped_outer_fake(a, b, offsets):
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])


_mm = library.register_function(
    "grouped_mm",
    "(Tensor x, Tensor weight, Tensor offsets, Tensor? scale, Tensor? bias, str scheme, "
    "bool transpose) -> Tensor",
    _grouped_mm,
    _grouped_mm_fake,
)
_outer = library.register_function(
    "grouped_outer",
    "(Tensor a, Tensor b, Tensor offsets) -> Tensor",
    torch_grouped.grouped_outer,
    _grouped_outer_fake,
)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, offsets, scale, bias, scheme):
        ctx.save_for_backward(x, weight, offsets, scale)
        ctx.scheme = scheme
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _mm(x, weight, offsets, scale, bias, scheme, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, offsets, scale = ctx.saved_tensors
        grad = grad.contiguous()
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = _mm(grad, weight, offsets, scale, None, ctx.scheme, True)
        if ctx.needs_input_grad[1]:
            dweight = _outer(grad, x, offsets)
        if ctx.needs_input_grad[4]:
            # a product with ones sums each expert's rows in a fixed order, as index_add would not
            ones = grad.new_ones(grad.shape[0], 8)
            dbias = _outer(grad, ones, offsets)[..., 0].to(ctx.bias_dtype)
        return dx, dweight, None, None, dbias, None


def grouped_linear(
    x: Tensor,  # (S, K)
    weight: Tensor,  # (E, N, K)
    offsets: Tensor,  # (E,)
    bias: Tensor | None,
    scale: Tensor | None,
    activation_scale: Tensor | None,
    scheme: str,
    rows_valid: Tensor | None = None,  # (S,) bool
) -> Tensor:
    """Differentiable grouped linear, (S, N) in x's dtype (fp32 inside where the scheme quantizes)."""
    if scheme:
        if rows_valid is None:
            rows_valid = torch.arange(x.shape[0], device=x.device) < offsets[-1]
        x = _straight_through(x, scheme, activation_scale, rows_valid)
    return _GroupedLinear.apply(x, weight, offsets, scale, bias, scheme)


def fused_experts(
    a: library.ExpertsArgs,
    activation: Activation,
) -> Tensor:
    """Differentiable experts, (M, K); of `a` only the inputs are read."""
    hidden_states, weights = a.hidden_states, a.topk_weights
    pairs = permute.sort_pairs(a.topk_ids, a.w13.shape[0], a.expert_map)
    rows = hidden_states
    if a.router_weight_on_input:
        rows = permute.weigh_inputs(rows, weights, pairs)
        weights = torch.ones_like(weights)
    if a.scheme:
        rows = _straight_through(rows, a.scheme, a.a13_scale, pairs.valid.any(1))
    rows = permute.gather_tokens(rows, pairs)
    gate_up = _GroupedLinear.apply(rows, a.w13, pairs.offsets, a.w13_scale, a.w13_bias, a.scheme)
    hidden = activations.apply(gate_up, activation)
    if a.scheme:
        valid = pairs.experts < a.w13.shape[0]
        hidden = _straight_through(hidden, a.scheme, a.a2_scale, valid)
    y = _GroupedLinear.apply(hidden, a.w2, pairs.offsets, a.w2_scale, a.w2_bias, a.scheme)
    return permute.combine(y, weights, pairs, hidden_states.dtype)


def _straight_through(x: Tensor, scheme: str, static_scale, rows_valid) -> Tensor:
    quantized = numerics.fake_quantize_activation(x.detach(), scheme, static_scale, rows_valid)
    x = x.to(torch.float32)
    return x + (quantized - x).detach()
