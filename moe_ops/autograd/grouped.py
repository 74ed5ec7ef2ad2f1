"""Experts on rows that are sorted by expert already: the passes and operators of
`grouped_experts`. They are those of a training step (step.py, training.py) without what stands
around its products: no row is placed, moved, weighed or summed with others.

`moe_ops::grouped_experts_forward` returns (out, h, u, index) as `lora_experts_forward` does, and
`moe_ops::grouped_experts_backward` the gradients. Both take adapters, or None in their places.

R rows, of which the first `sum(num_tokens_per_expert)` are of experts, in their order. The others
may hold anything: their output and gradient are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ops.autograd import composition, training
from moe_ops.autograd.adapters import Adapters
from moe_ops.autograd.kept import Kept
from moe_ops.autograd.step import Step
from moe_ops.kernels.launch import Lazy
from moe_ops.meta import flops
from moe_ops.numerics import permute
from moe_ops.ops.call import GroupedCall
from moe_ops.ops.library import TORCH_DEVICES, register_function

_INPUTS = (
    "Tensor hidden_states, Tensor w13, Tensor w2, Tensor num_tokens_per_expert, "
    "Tensor?[] scales, Tensor? w13_bias, Tensor? w2_bias, str options, Tensor? a13, Tensor? b13, "
    "Tensor? a2, Tensor? b2, float scale13, float scale2"
)
_OF_EXPERTS, _SCALES = 8, 4  # inputs that are not of adapters; the place of the list of scales
# places of hidden_states, w13, w2, w13_bias, w2_bias, and of the matrices
_GRADIENTS = (0, 1, 2, 5, 6, 8, 9, 10, 11)
_WEIGHTS = 3  # the place, among the gradients of training.py, of that of router weights


def end_rows(num_tokens_per_expert: Tensor, rows: int) -> Tensor:
    """(E,) int32: the row after the last one of each expert. Counts are data: negative ones are
    zero, and none reaches past the last row.
    """
    counts = num_tokens_per_expert.clamp(0, rows)
    return counts.cumsum(0).clamp(max=rows).to(torch.int32)


class GroupedStep(Step):
    """One pass of a `GroupedCall`, in plain torch. Products write zeros past the last expert."""

    call: GroupedCall  # type: ignore[assignment]

    def place(self) -> Tensor:
        R = self.x.shape[0]
        ends = end_rows(self.call.num_tokens_per_expert, R)
        row = torch.arange(R, device=ends.device)
        experts, valid = torch.searchsorted(ends, row, right=True), row < ends[-1]
        self.pairs = permute.Pairs(row, row, experts, ends, valid.unsqueeze(1))
        return torch.cat((ends, torch.where(valid, row, -1).to(torch.int32)))

    def inputs(self) -> Tensor:
        return self.rounded(self.x.to(self.dtype), self.call.w13)

    def gradient_rows(self, narrow: bool) -> Tensor:
        return self.grad.to(self.dtype)

    def output(self, hidden: Tensor) -> Tensor:
        y = self.multiply(hidden, self.call.w2, self.second, bias=self.call.w2_bias)
        return y.to(self.x.dtype)

    def summed(self, drows: Tensor) -> Tensor:
        return drows.to(self.x.dtype)


class KeptStep(Kept, GroupedStep):
    """`Kept` in plain torch."""


_PASSES = training.Passes(GroupedStep, Lazy("moe_ops.autograd.grouped_fused:GroupedFusedStep"))


def _inputs(values: Sequence[Any]) -> training.Inputs:
    x, w13, w2, counts, scales, b13, b2, text = values[:_OF_EXPERTS]
    first, second, options = training.weights_of(w13, w2, scales, text)
    call = GroupedCall(x, first, second, counts, b13, b2, options)
    return training.Inputs(call, training.adapters_of(values[_OF_EXPERTS:]))


def _forward(*values: Any) -> tuple[Tensor, ...]:
    return _PASSES.forward(_inputs(values))


def _forward_fake(*values: Any) -> tuple[Tensor, ...]:
    return training.forward_fake(_inputs(values))


def _backward(grad: Tensor, h: Tensor, u: Tensor, index: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of the inputs in the order of `_GRADIENTS`; (0,) if one is not needed."""
    *values, needs = rest
    needs = [*needs[:_WEIGHTS], False, *needs[_WEIGHTS:]]
    found = _PASSES.backward(_inputs(values), grad, h, u if u.numel() else None, index, needs)
    return tuple([*found[:_WEIGHTS], *found[_WEIGHTS + 1 :]])


def _backward_fake(grad: Tensor, h: Tensor, u: Tensor, index: Tensor, *rest: Any) -> tuple:
    *values, needs = rest
    pairs = [[any(needs[i : i + 2])] * 2 for i in (5, 7)]  # a and b of a pair come together
    wanted = zip(_GRADIENTS, [*needs[:5], *pairs[0], *pairs[1]], strict=True)
    return tuple(
        [values[i].new_empty(values[i].shape) if need else h.new_empty(0) for i, need in wanted]
    )


def _layer(values: Sequence[Any]) -> Tensor:
    return composition.experts(*_inputs(values), of=GroupedStep)


backward = register_function(
    "grouped_experts_backward",
    f"(Tensor grad, Tensor h, Tensor u, Tensor index, {_INPUTS}, bool[9] needs) -> "
    f"({', '.join(['Tensor'] * len(_GRADIENTS))})",
    _backward,
    _backward_fake,
    devices=TORCH_DEVICES,
    flops=flops.grouped_experts_backward,
    one_by_one=True,
)


forward = register_function(
    "grouped_experts_forward",
    f"({_INPUTS}) -> (Tensor out, Tensor h, Tensor u, Tensor index)",
    _forward,
    _forward_fake,
    training.recorded((7, 12, 13), _GRADIENTS, backward, _layer, _SCALES),
    devices=TORCH_DEVICES,
    flops=flops.grouped_experts_forward,
)


def grouped_experts(call: GroupedCall, recompute: bool, adapters: Adapters) -> Tensor:
    """Differentiable experts, (R, K) in hidden_states' dtype. With `recompute`, or without
    gradients, only the inputs and the order of the rows are kept for the backward pass.
    """
    inputs = training.op_values(call, recompute or not torch.is_grad_enabled())
    return forward(*inputs, *training.adapter_values(adapters))[0]
