"""`grouped_experts` whose gate and up rows are two matrices (E, I, K): `grouped_pair_forward`
returns (out, h, hidden, index) and `grouped_pair_backward` the gradients. hidden (R, I) are the
rows that w2 multiplies, the others are as `experts_forward` returns them.

Products of csrc/cutlass read both where they are. For plain torch and for torch's products each
pass copies them into one. What one of the ways keeps the other one reads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ops.autograd import composition, gate_up, training
from moe_ops.autograd.adapters import UNADAPTED
from moe_ops.autograd.grouped import GroupedStep, KeptStep
from moe_ops.kernels.activation import activated
from moe_ops.kernels.launch import Lazy
from moe_ops.meta import flops
from moe_ops.ops.call import GroupedCall, Weight
from moe_ops.ops.library import TORCH_DEVICES, register_function
from moe_ops.ops.options import decode
from moe_ops.planning import training as planning

_INPUTS = (
    "Tensor hidden_states, Tensor gate, Tensor up, Tensor w2, Tensor num_tokens_per_expert, "
    "str options"
)
_GRADIENTS = (0, 1, 2, 3)  # places of hidden_states, gate, up and w2

_JOINED = training.Passes(KeptStep, Lazy("moe_ops.autograd.grouped_fused:KeptFusedStep"))
_pair_step = Lazy("moe_ops.autograd.grouped_fused:PairStep")


def _call(values: Sequence[Any]) -> tuple[GroupedCall, Tensor]:
    """The call of gate rows, and the up rows."""
    x, gate, up, w2, counts, text = values
    _, _, options = decode(text)
    return GroupedCall(x, Weight(gate), Weight(w2), counts, None, None, options), up


def _joined(values: Sequence[Any]) -> training.Inputs:
    """The same call with one matrix of both."""
    call, up = _call(values)
    w13 = gate_up.gate_up(call.w13.data, up, up.dtype)
    return training.Inputs(call._replace(w13=Weight(w13)), UNADAPTED)


def _reads_both(call: GroupedCall, up: Tensor) -> bool:
    """Whether there are kernels that read both matrices where they are."""
    of = activated(call.options.activation)
    for one in (call.w13.data, up):
        reason, products = planning.plan(call._replace(w13=Weight(one)))
        takes = products.pairs and of.ACTIVATION in products.activations
        if reason is not None or not (takes and one.is_contiguous()):
            return False
    return of.GATED and not of.INTERLEAVED


def _passes(values: Sequence[Any]) -> tuple[training.Passes, training.Inputs]:
    """What runs a call, and on what."""
    call, up = _call(values)
    if not _reads_both(call, up):
        return _JOINED, _joined(values)
    fused = functools.partial(_pair_step, up)
    return training.Passes(KeptStep, fused), training.Inputs(call, UNADAPTED)


def _forward(*values: Any) -> tuple[Tensor, ...]:
    passes, inputs = _passes(values)
    return passes.forward(inputs)


def _forward_fake(*values: Any) -> tuple[Tensor, ...]:
    call, _ = _call(values)
    x, (E, I, _) = call.hidden_states, call.w13.data.shape
    R = x.shape[0]
    kept = [x.new_empty(0 if call.options.recompute else R, size) for size in (2 * I, I)]
    return x.new_empty(x.shape), *kept, x.new_empty(E + R, dtype=torch.int32)


def _backward(
    grad: Tensor, h: Tensor, hidden: Tensor, index: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Gradients of the inputs in the order of `_GRADIENTS`; (0,) if one is not needed."""
    *values, needs = rest
    of_both = needs[1] or needs[2]
    passes, inputs = _passes(values)
    asked = [needs[0], of_both, needs[3], *[False] * 7]
    found = passes.backward(inputs, grad, h, hidden, index, asked)
    x, w13, w2 = found[:3]
    if passes is not _JOINED:
        return x, w13, found[-1], w2
    if not of_both:
        return x, w13, w13.clone(), w2
    return x, *gate_up.backward(w13, False, w13.dtype), w2


def _backward_fake(grad: Tensor, h: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *values, needs = rest[2:]  # behind hidden and index
    needs = [needs[0], *[any(needs[1:3])] * 2, needs[3]]  # both matrices' gradients come together
    wanted = zip(_GRADIENTS, needs, strict=True)
    return tuple(
        [values[i].new_empty(values[i].shape) if need else h.new_empty(0) for i, need in wanted]
    )


def _layer(values: Sequence[Any]) -> Tensor:
    return composition.experts(*_joined(values), of=GroupedStep)


backward = register_function(
    "grouped_pair_backward",
    f"(Tensor grad, Tensor h, Tensor hidden, Tensor index, {_INPUTS}, bool[4] needs) -> "
    f"({', '.join(['Tensor'] * len(_GRADIENTS))})",
    _backward,
    _backward_fake,
    devices=TORCH_DEVICES,
    flops=flops.grouped_pair_backward,
    one_by_one=True,
)


forward = register_function(
    "grouped_pair_forward",
    f"({_INPUTS}) -> (Tensor out, Tensor h, Tensor hidden, Tensor index)",
    _forward,
    _forward_fake,
    training.recorded((5,), _GRADIENTS, backward, _layer, None),
    devices=TORCH_DEVICES,
    flops=flops.grouped_pair_forward,
)


def grouped_experts(call: GroupedCall, up: Tensor, recompute: bool) -> Tensor:
    """`grouped.grouped_experts` of a call whose w13 are gate rows (E, I, K), and of up rows."""
    x, gate, w2, counts, *_, text = training.op_values(call, recompute)
    return forward(x, gate, up, w2, counts, text)[0]
