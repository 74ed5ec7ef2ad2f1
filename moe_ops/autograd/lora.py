"""Experts with low-rank adapters as two functional operators: `moe_ops::lora_experts_forward` and
`moe_ops::lora_experts_backward`, which are those of training.py with four matrices more.

Each product gains one through the rank, h = x w13^T + scale (x a13^T) b13^T, on rows sorted by
expert; so nothing as large as a weight is made, and weights may stay quantized. Kept for the
backward pass is what training.py keeps, the inputs, h and the index, and u = scale x a13^T (S, r).

Both run where those of training.py do, in portable.py or fused.py. Without gradients the
forward operator runs alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from moe_ops.autograd import experts as composition
from moe_ops.autograd import training
from moe_ops.autograd.adapters import Adapters, LowRank
from moe_ops.autograd.record import recorded
from moe_ops.meta import flops
from moe_ops.ops.call import ExpertsCall
from moe_ops.ops.library import TORCH_DEVICES, register_function
from moe_ops.ops.memory import addressable

_INPUTS = (
    f"{training._INPUTS}, Tensor? a13, Tensor? b13, Tensor? a2, Tensor? b2, "
    "float scale13, float scale2"
)
_OF_EXPERTS = 10  # of the inputs, those that training.py has
_OPTIONS = (9, 14, 15)  # and those that are no tensors
_GRADIENTS = (*training._GRADIENTS, 10, 11, 12, 13)


def _adapters(values: tuple) -> Adapters:
    a13, b13, a2, b2, scale13, scale2 = values[_OF_EXPERTS:]
    return Adapters(
        None if a13 is None else LowRank(a13, b13, scale13),
        None if a2 is None else LowRank(a2, b2, scale2),
    )


def why_not_fused(call: ExpertsCall, adapters: Adapters) -> str | None:
    """Why a call runs in plain torch; None if it runs in fused.py. Each operator
    asks once.
    """
    if call.batch_invariant:
        return "batch_invariant asks for products of rows that the others do not change"
    matrices = [t for one in adapters if one is not None for t in (one.a, one.b)]
    if not all([t.is_contiguous() and t.dtype == call.hidden_states.dtype for t in matrices]):
        return "its adapters are not contiguous, or of another dtype than hidden_states"
    if not addressable(matrices):
        return "its adapters have no addresses"
    return training.why_not_fused(call)


# --- forward -------------------------------------------------------------------------------------


def _forward(*values: Any) -> tuple[Tensor, ...]:
    """out, h and index of training.py, and before the index u (S, r), or (0, r) if it is computed
    again. Without an adapter of w13 u is (0, 0).
    """
    call, recompute = training._inputs(values[:_OF_EXPERTS])
    adapters = _adapters(values)
    reason = why_not_fused(call, adapters)
    if reason is not None:
        words = "adapters are given", "merge them into the weights"
        training.warn_of_plain_torch(call.hidden_states, reason, *words)
    out, h, u, index = training.run_forward(call, adapters, recompute, reason is None)
    return out, h, h.new_empty(0, 0) if u is None else u, index


def _forward_fake(*values: Any) -> tuple[Tensor, ...]:
    out, h, index = training._forward_fake(*values[:_OF_EXPERTS])
    a13 = values[_OF_EXPERTS]
    size = (0, 0) if a13 is None else (h.shape[0], a13.shape[1])
    return out, h, h.new_empty(size), index


# --- backward ------------------------------------------------------------------------------------


def _backward(grad: Tensor, h: Tensor, u: Tensor, index: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of hidden_states, w13, w2, topk_weights, w13_bias, w2_bias, a13, b13, a2 and b2;
    (0,) for those that are not needed.
    """
    *values, needs = rest
    inputs = training._inputs(tuple(values[:_OF_EXPERTS]))
    adapters = _adapters(tuple(values))
    fused = why_not_fused(inputs.call, adapters) is None
    return training.run_backward(inputs, grad, h, u, index, needs, adapters, fused)


def _backward_fake(
    grad: Tensor, h: Tensor, u: Tensor, index: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *values, needs = rest
    both = [[bool(any(needs[i : i + 2]))] * 2 for i in (6, 8)]  # a and b of a pair come together
    needs = [*needs[:6], *both[0], *both[1]]
    wanted = zip(_GRADIENTS, needs, strict=True)
    return tuple(
        [values[i].new_empty(values[i].shape) if need else h.new_empty(0) for i, need in wanted]
    )


# --- the operators -------------------------------------------------------------------------------


def _run_backward(*values: Any) -> tuple[Tensor, ...]:
    return backward(*values)


def _layer(values: tuple) -> Tensor:
    call = training._inputs(values[:_OF_EXPERTS]).call
    return composition.fused_experts(call, _adapters(values))


forward = register_function(
    "lora_experts_forward",
    f"({_INPUTS}) -> (Tensor out, Tensor h, Tensor u, Tensor index)",
    _forward,
    _forward_fake,
    recorded(_OPTIONS, _GRADIENTS, _run_backward, _layer),
    devices=TORCH_DEVICES,
    flops=flops.lora_experts_forward,
)


backward = register_function(
    "lora_experts_backward",
    f"(Tensor grad, Tensor h, Tensor u, Tensor index, {_INPUTS}, bool[10] needs) -> ("
    + ", ".join(["Tensor"] * len(_GRADIENTS))
    + ")",
    _backward,
    _backward_fake,
    devices=TORCH_DEVICES,
    flops=flops.lora_experts_backward,
    one_by_one=True,
)


def fused_experts(call: ExpertsCall, adapters: Adapters, recompute: bool) -> Tensor:
    """Differentiable experts with adapters, (M, K) in the call's dtype. With `recompute`, or
    without gradients, nothing is kept for the backward pass but the inputs and the order of the
    pairs.
    """
    matrices: list[Tensor | None] = []
    scales = []
    for one in adapters:
        matrices += (None, None) if one is None else (one.a, one.b)
        # a constant, also where dynamic=True makes a symbol of it
        scales.append(1.0 if one is None else float(guard_scalar(one.scale)))
    recompute = recompute or not torch.is_grad_enabled()
    return forward(*training.op_values(call, recompute), *matrices, *scales)[0]
