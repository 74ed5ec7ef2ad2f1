"""The differentiable path: experts as a composition of torch operators around one grouped product.

Gradients of everything but the grouped product come from torch itself, so every activation, bias and
routing option has the right ones. The product is a pair of opaque ops, because its row counts per
expert live on the device. Quantized weights pass gradients on through their dequantized values and
take none; the rounding of activations counts as the identity (straight-through).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import activations, library, numerics, permute
from moe_ops.activations import Activation
from moe_ops.kernels import torch_grouped
from moe_ops.numerics import Scales
from moe_ops.schemes import get_scheme
from moe_ops.validation import Weight

_PLAIN = (None, None, None, None)  # scales of plain weights


def _refuse_transforms() -> None:
    """RuntimeError inside torch.func.grad and the like, for which operators in Python cannot be differentiated."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "moe_ops cannot be differentiated by torch.func (grad, vjp, jacrev, ...): use torch.autograd.grad "
            "or Tensor.backward"
        )


def _columns(weight, scheme, of_result):
    """Columns of x, or of the result: of weights (E, N, K), N and K in one order or the other."""
    return get_scheme(scheme).logical_shape(*weight.shape)[1 if of_result else 2]


def _check(x, weight, offsets, scheme, transpose):
    columns = _columns(weight, scheme, transpose)
    torch._check(x.shape[1] == columns, lambda: f"x must have {columns} columns as weight has")
    torch._check(offsets.dtype == torch.int32, lambda: "offsets must be int32")
    torch._check(offsets.shape[0] == weight.shape[0], lambda: "offsets must have E entries")


def _grouped_mm(
    x, weight, offsets, scale, zero_point, global_scale, channel_scale, bias, scheme, transpose
):
    _check(x, weight, offsets, scheme, transpose)
    scales = Scales(scale, zero_point, global_scale, channel_scale) if scheme else None
    return torch_grouped.grouped_mm(
        x, weight, offsets, scales=scales, scheme=scheme, bias=bias, transpose=transpose
    )


def _grouped_mm_fake(
    x, weight, offsets, scale, zero_point, global_scale, channel_scale, bias, scheme, transpose
):
    _check(x, weight, offsets, scheme, transpose)
    return x.new_empty(x.shape[0], _columns(weight, scheme, not transpose))


def _grouped_outer_fake(a, b, offsets):
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])


def _save_mm(ctx, inputs, output):
    x, weight, offsets, *scales, bias, ctx.scheme, ctx.transpose = inputs
    ctx.save_for_backward(x, weight, offsets, *scales)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _mm_backward(ctx, grad):
    x, weight, offsets, *scales = ctx.saved_tensors
    grad = grad.contiguous()
    dx = dweight = dbias = None
    if ctx.needs_input_grad[0]:
        dx = _mm(grad, weight, offsets, *scales, None, ctx.scheme, not ctx.transpose)
    if ctx.needs_input_grad[1]:
        a, b = (x, grad) if ctx.transpose else (grad, x)
        dweight = _outer(a, b, offsets)
    if ctx.needs_input_grad[7]:
        # a product with ones sums each expert's rows in a fixed order, as index_add would not
        ones = grad.new_ones(grad.shape[0], 8)
        dbias = _outer(grad, ones, offsets)[..., 0].to(ctx.bias_dtype)
    return dx, dweight, None, None, None, None, None, dbias, None, None


def _save_outer(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _outer_backward(ctx, grad):
    a, b, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    da = _mm(b, grad, offsets, *_PLAIN, None, "", False) if ctx.needs_input_grad[0] else None
    db = _mm(a, grad, offsets, *_PLAIN, None, "", True) if ctx.needs_input_grad[1] else None
    return da, db, None


# Derivatives are made of the same two products, so they have derivatives themselves. They belong to the ops,
# not to a torch.autograd.Function around them: a graph that torch.export or make_fx traced keeps them.
_mm = library.register_function(
    "grouped_mm",
    "(Tensor x, Tensor weight, Tensor offsets, Tensor? scale, Tensor? zero_point, "
    "Tensor? global_scale, Tensor? channel_scale, Tensor? bias, str scheme, bool transpose) -> Tensor",
    _grouped_mm,
    _grouped_mm_fake,
    (_mm_backward, _save_mm),
)
_outer = library.register_function(
    "grouped_outer",
    "(Tensor a, Tensor b, Tensor offsets) -> Tensor",
    torch_grouped.grouped_outer,
    _grouped_outer_fake,
    (_outer_backward, _save_outer),
)


def grouped_linear(
    x: Tensor,  # (S, K)
    weight: Weight,  # (E, N, K)
    offsets: Tensor,  # (E,)
    bias: Tensor | None,
    rows_valid: Tensor | None = None,  # (S,) bool
) -> Tensor:
    """Differentiable grouped linear, (S, N) in x's dtype (fp32 inside where the scheme quantizes)."""
    _refuse_transforms()
    if weight.scheme:
        if rows_valid is None:
            rows_valid = torch.arange(x.shape[0], device=x.device) < offsets[-1]
        x = _straight_through(x, weight.scheme, weight.activation_scale, rows_valid)
    return _mm(x, weight.data, offsets, *weight.scales, bias, weight.scheme, False)


def fused_experts(
    hidden_states: Tensor,  # (M, K)
    w13: Weight,  # (E, N, K)
    w2: Weight,  # (E, K, I)
    topk_weights: Tensor,  # (M, top_k)
    topk_ids: Tensor,  # (M, top_k)
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    expert_map: Tensor | None,
    activation: Activation,
    router_weight_on_input: bool,
) -> Tensor:
    """Differentiable experts, (M, K) in hidden_states' dtype."""
    _refuse_transforms()
    num_experts, scheme = w13.data.shape[0], w13.scheme
    pairs = permute.sort_pairs(topk_ids, num_experts, expert_map)
    weights, rows = topk_weights, hidden_states
    if router_weight_on_input:
        rows = permute.weigh_inputs(rows, weights, pairs)
        weights = torch.ones_like(weights)
    if scheme:
        rows = _straight_through(rows, scheme, w13.activation_scale, pairs.valid.any(1))
    rows = permute.gather_tokens(rows, pairs)
    gate_up = _mm(rows, w13.data, pairs.offsets, *w13.scales, w13_bias, scheme, False)
    hidden = activations.apply(gate_up, activation)
    if scheme:
        valid = pairs.experts < num_experts
        hidden = _straight_through(hidden, scheme, w2.activation_scale, valid)
    y = _mm(hidden, w2.data, pairs.offsets, *w2.scales, w2_bias, scheme, False)
    return permute.combine(y, weights, pairs, hidden_states.dtype)


def _straight_through(x: Tensor, scheme: str, static_scale, rows_valid) -> Tensor:
    quantized = numerics.fake_quantize_activation(x.detach(), scheme, static_scale, rows_valid)
    x = x.to(torch.float32)
    return x + (quantized - x).detach()
