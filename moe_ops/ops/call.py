"""Calls: the arguments of a public function, with quantized weights taken apart.

An eager call finds its plan by `static()` and by guards on `tensors()`: together everything but
the number of tokens M. In traced calls sizes may be symbols.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moe_ops import environment
from moe_ops.ops import memory
from moe_ops.ops.library import part
from moe_ops.ops.options import Options
from moe_ops.ops.resident import ResidentWeight, TensorFacts

# attributes of an ExpertTensor, in the order of `Weight`
_TENSORS = ("qdata", "scale", "zero_point", "global_scale", "channel_scale", "activation_scale")
_ATTRIBUTES = (*_TENSORS, "scheme", "weight_layout")
_DEFAULT_OUT = torch.bfloat16  # dtype of the output where the input arrives quantized
_attributes = operator.itemgetter(*_ATTRIBUTES)


@environment.constant
def _as_attributes() -> bool:
    """Whether weights must enter the graph as their single tensors: torch.compile traces a branch
    of torch.cond, a loop or a region, none of which takes a quantized weight as an input. So does
    torch.export where a quantized weight is an argument.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    inside = output.current_tracer.parent is not None
    if inside or not torch.compiler.is_exporting():
        return inside
    return not any([hasattr(leaf, "weight_layout") for leaf in tree_leaves(output.local_scope)])


class Weight(NamedTuple):
    """An expert weight taken apart into plain tensors, the form that ops take; or into the facts
    of tensors that operators find by `Options.resident`.
    """

    data: Tensor
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    channel_scale: Tensor | None = None
    activation_scale: Tensor | None = None
    scheme: str = ""
    layout: str = ""

    @property
    def scales(self) -> tuple[Tensor | None, ...]:
        """(scale, zero_point, global_scale, channel_scale), the fields of `numerics.Scales`."""
        return self[1:5]

    @property
    def global_rows(self) -> bool:
        """Whether the global scale is per row instead of per expert."""
        return self.global_scale is not None and self.global_scale.ndim > 1

    @property
    def resident(self) -> bool:
        """Whether these are facts of tensors that operators find by `Options.resident`."""
        return isinstance(self.data, TensorFacts)

    @property
    def contiguous(self) -> bool:
        """Whether the data and all scales are contiguous."""
        return all([part is None or part.is_contiguous() for part in (self.data, *self.scales)])

    @property
    def transposed(self) -> bool:
        """Whether it is a plain weight (E, N, K) that is stored as (E, K, N)."""
        return not self.scheme and stored_transposed(self.data)


def stored_transposed(data: Tensor) -> bool:
    """Whether the transposed matrices are contiguous. Compares strides, because a tensor whose
    storage was freed has no views.
    """
    if data.ndim != 3:
        return False
    (E, N, K), (e, n, k) = data.shape, data.stride()
    if E * N * K == 0:
        return True
    return (N == 1 or n == 1) and (K == 1 or k == N) and (E == 1 or e == N * K)


def take_apart(weight: Any, gather: Callable[[Any], Tensor] | None = None) -> Weight:
    """The `Weight` of a plain tensor or of an ExpertTensor.

    Args:
        gather: returns the full tensor of a DTensor.
    """
    if type(weight) is Tensor or type(weight) is torch.nn.Parameter:
        return Weight(weight)
    if type(weight) is ResidentWeight:
        return take_apart(weight.whole) if weight.weight is None else weight.weight
    if getattr(weight, "scheme", None) is None:
        if gather is not None and hasattr(weight, "device_mesh"):
            return take_apart(gather(weight))
        return Weight(weight)
    if torch.compiler.is_compiling():
        parts = [getattr(weight, name) for name in _ATTRIBUTES]
        if torch.compiler.is_dynamo_compiling() and not _as_attributes():
            for i, name in enumerate(_TENSORS):
                if parts[i] is not None:
                    parts[i] = part(weight, name)
        return Weight(*parts)
    return Weight._make(_attributes(vars(weight)))  # half the time of eight attribute look-ups


def _scales_value(
    weights: Sequence[Weight],
    scale: Tensor | None,
    global_scale: Tensor | None,
    activation_by_expert: Tensor | None = None,
) -> list[Tensor | None]:
    """The op argument `scales`: those of the weights, then those of a quantized input, then the
    parameters of activations by expert; empty if all weights are plain and there are none.
    """
    found: list[Tensor | None] = []
    by_expert = activation_by_expert is not None
    if weights[0].scheme or weights[-1].scheme or by_expert:
        for weight in weights:
            found += weight[1:6]  # scale to activation_scale
        if scale is not None or by_expert:
            found += (scale, global_scale)
        if by_expert:
            found.append(activation_by_expert)
    return found


class ExpertsCall(NamedTuple):
    """A call of `fused_experts`."""

    hidden_states: Tensor
    w13: Weight
    w2: Weight
    topk_weights: Tensor
    topk_ids: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    expert_map: Tensor | None
    options: Options
    hidden_states_scale: Tensor | None = None
    hidden_states_global_scale: Tensor | None = None
    activation_by_expert: Tensor | None = None  # (3, E)

    @property
    def global_experts(self) -> int:
        """Number of experts that topk_ids choose from."""
        return (self.w2.data if self.expert_map is None else self.expert_map).shape[0]

    @property
    def top_k(self) -> int:
        return self.topk_ids.shape[1]

    def static(self) -> tuple:
        """Everything but the tensors, and the shape of the first weight."""
        w13, w2 = self.w13, self.w2
        of_weights = (w13.scheme, w13.layout, w2.scheme, w2.layout, w13.data.shape)
        return ("experts", self.options, *of_weights)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors in the order of ExpertsArgs; None for those that were not given."""
        x, w13, w2, weights, ids, b13, b2, expert_map, options, *of_input = self
        if options.resident:
            none = (None,) * 10
            return (x, None, None, weights, ids, *none, *of_input, None, None, None)
        # of_input has the activation's parameters, too
        scales = (*w13[1:6], *w2[1:6], *of_input)
        return (x, w13[0], w2[0], weights, ids, *scales, b13, b2, expert_map)

    def rows(self) -> tuple[int, tuple[int, ...]]:
        """The dimension of M, and the indices of the `tensors()` that have it."""
        return 0, (0, 3, 4, 15)

    def output(self) -> tuple[tuple, torch.dtype]:
        """Shape and dtype of the result."""
        x, M = self.hidden_states, self.num_tokens
        if self.hidden_states_scale is None:
            return (M, x.shape[1]), self.options.out_dtype or x.dtype
        return (M, self.w2.data.shape[1]), self.options.out_dtype or _DEFAULT_OUT

    @property
    def num_tokens(self) -> int:
        """M. In calls with an exchange the tokens of all ranks, also where hidden_states are this
        rank's own.
        """
        return (self.topk_ids if self.options.exchange else self.hidden_states).shape[0]

    def op_values(self, options: str) -> tuple:
        """The op's arguments after the buffers that it writes."""
        x, w13, w2, weights, ids, b13, b2, expert_map, given, *of_input = self
        if given.resident:
            return (x, weights, ids, of_input[:2] if of_input[0] is not None else [], options)
        scales = _scales_value((w13, w2), *of_input)
        return (x, w13.data, w2.data, weights, ids, scales, b13, b2, expert_map, options)


class GroupedCall(NamedTuple):
    """A call of `grouped_experts`, whose rows are sorted: no pairs are to be placed."""

    hidden_states: Tensor
    w13: Weight
    w2: Weight
    num_tokens_per_expert: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    options: Options

    @property
    def topk_weights(self) -> None:
        """Router weights are applied to the result, by whoever dispatched the rows."""

    @property
    def activation_by_expert(self) -> None:
        """Parameters of the activation are numbers."""

    @property
    def top_k(self) -> int:
        return 1

    def output(self) -> tuple[tuple, torch.dtype]:
        """Shape and dtype of the result."""
        return tuple(self.hidden_states.shape), self.hidden_states.dtype

    def op_values(self, options: str) -> tuple:
        """The inputs of the ops of `autograd.grouped`, but for those of adapters."""
        x, w13, w2, counts, b13, b2, _ = self
        return (
            x,
            w13.data,
            w2.data,
            counts,
            _scales_value((w13, w2), None, None),
            b13,
            b2,
            options,
        )


class BatchedCall(NamedTuple):
    """A call of `batched_experts`."""

    hidden_states: Tensor
    w13: Weight
    w2: Weight
    expert_num_tokens: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    options: Options
    hidden_states_scale: Tensor | None = None
    hidden_states_global_scale: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T, of each expert."""
        return self.hidden_states.shape[1]

    def static(self) -> tuple:
        """Everything but the tensors, and the shape of the first weight."""
        w13, w2 = self.w13, self.w2
        of_weights = (w13.scheme, w13.layout, w2.scheme, w2.layout, w13.data.shape)
        return ("batched_experts", self.options, *of_weights)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors in the order of BatchedExpertsArgs; None for those that were not given."""
        x, w13, w2, counts, b13, b2, _, *of_input = self
        return (x, w13[0], w2[0], counts, *w13[1:6], *w2[1:6], *of_input, b13, b2)

    def rows(self) -> tuple[int, tuple[int, ...]]:
        """The dimension of T, and the indices of the `tensors()` that have it."""
        return 1, (0, 14)

    def output(self) -> tuple[tuple, torch.dtype]:
        """Shape and dtype of the result."""
        x = self.hidden_states
        if self.hidden_states_scale is None:
            return tuple(x.shape), x.dtype
        return (*x.shape[:2], self.w2.data.shape[1]), self.options.out_dtype or _DEFAULT_OUT

    def op_values(self, options: str) -> tuple:
        """The op's arguments after the buffers that it writes."""
        x, w13, w2, counts, b13, b2, _, *of_input = self
        scales = _scales_value((w13, w2), *of_input)
        return (x, w13.data, w2.data, counts, scales, b13, b2, options)


class LinearCall(NamedTuple):
    """A call of `grouped_linear`."""

    hidden_states: Tensor  # the argument x
    weight: Weight
    offsets: Tensor
    bias: Tensor | None
    options: Options
    x_scale: Tensor | None = None
    x_global_scale: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """S."""
        return self.hidden_states.shape[0]

    def static(self) -> tuple:
        """Everything but the tensors, and the shape of the weight."""
        of_weight = (self.weight.scheme, self.weight.layout, self.weight.data.shape)
        return ("grouped_linear", self.options, *of_weight)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors in the order of GroupedLinearArgs; None for those that were not given."""
        x, weight, offsets, bias, _, *of_input = self
        return (x, weight[0], offsets, *weight[1:6], *of_input, bias)

    def rows(self) -> tuple[int, tuple[int, ...]]:
        """The dimension of S, and the indices of the `tensors()` that have it."""
        return 0, (0, 8)

    def output(self) -> tuple[tuple, torch.dtype]:
        """Shape and dtype of the result."""
        x = self.hidden_states
        dtype = x.dtype if self.x_scale is None else self.options.out_dtype or _DEFAULT_OUT
        return (x.shape[0], self.weight.data.shape[1]), dtype

    def op_values(self, options: str) -> tuple:
        """The op's arguments after the buffers that it writes."""
        x, weight, offsets, bias, _, *of_input = self
        scales = _scales_value((weight,), *of_input)
        return (x, weight.data, offsets, scales, bias, options)


Call = ExpertsCall | BatchedCall | LinearCall


def refuse_lost(call: Call | GroupedCall) -> None:
    """Raise ValueError, naming the argument, for a tensor that has lost its values (see
    `memory.refuse_lost`), before operators of torch or the dispatcher get it. Eager calls that
    skip both leave the check to the op's kernel.
    """
    for name, value in zip(call._fields, call, strict=True):
        tensor = value.data if isinstance(value, Weight) else value
        if isinstance(tensor, Tensor):
            linear = name == "hidden_states" and isinstance(call, LinearCall)
            memory.refuse_lost("x" if linear else name, tensor)
