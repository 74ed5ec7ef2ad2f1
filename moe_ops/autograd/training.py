"""The operators of training, in functional pairs. `moe_ops::experts_forward` returns the output
and what `moe_ops::experts_backward` needs in addition to the inputs: the product h with w13
(without its bias), and the order of the pairs. Everything else is computed again.

`moe_ops::lora_experts_forward` and `moe_ops::lora_experts_backward` also take the four matrices of
low-rank adapters: h = x w13^T + scale (x a13^T) b13^T on rows sorted by expert. Nothing as large
as a weight is formed, and weights may stay quantized. u = scale x a13^T (S, r) is kept too. Calls
with adapters run the forward operator also without gradients.

They are functional, because autograd refuses operators that write their arguments, and selective
checkpointing of such an operator loses what it wrote. A compiler that partitions forward from
backward keeps what they return: h, u and the index, and hidden_states.

`planning.training` decides what runs them: plain torch (step.py) for any device and any call, or
kernels (fused.py) for bf16 rows on GPUs, with weights in bf16 or frozen quantized ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from moe_ops.autograd import composition
from moe_ops.autograd.adapters import UNADAPTED, Adapters, LowRank
from moe_ops.autograd.step import Needs, Step, kept_dtype
from moe_ops.kernels.launch import Lazy
from moe_ops.meta import flops
from moe_ops.ops.call import ExpertsCall, GroupedCall, Weight
from moe_ops.ops.library import TORCH_DEVICES, register_function
from moe_ops.ops.options import Options, decode, encode
from moe_ops.planning import training as planning
from moe_ops.schemes import get_scheme, layer_scheme, schemes_of_layer

_INPUTS = (
    "Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
    "Tensor?[] scales, Tensor? w13_bias, Tensor? w2_bias, Tensor? expert_map, str options"
)
_LORA_INPUTS = (
    f"{_INPUTS}, Tensor? a13, Tensor? b13, Tensor? a2, Tensor? b2, float scale13, float scale2"
)
_OF_EXPERTS = 10  # of the inputs, those that both pairs have
_SCALES = 5  # the place of the list of scales among them
# and the places of those that may get gradients: hidden_states, w13, w2, topk_weights, w13_bias,
# w2_bias, and the matrices
_GRADIENTS = (0, 1, 2, 3, 6, 7)
_LORA_GRADIENTS = (*_GRADIENTS, 10, 11, 12, 13)
# of plain weights: one slot of each. AOTInductor passes an empty list as None, which no operator
# with a derivative is given.
NO_SCALES = (None, None)
_SLOTS_OF_WEIGHTS = 10  # at most; behind them two of the input, and parameters by expert

_fused_step = Lazy("moe_ops.autograd.fused:FusedStep")


class Inputs(NamedTuple):
    """The inputs of the operators."""

    call: Any  # ExpertsCall, or GroupedCall
    adapters: Adapters

    @property
    def matrices(self) -> list[Tensor]:
        """Matrices of the adapters."""
        return [t for one in self.adapters if one is not None for t in (one.a, one.b)]


def _inputs(values: Sequence[Any]) -> Inputs:
    x, w13, w2, topk_weights, topk_ids, scales, b13, b2, expert_map, text = values[:_OF_EXPERTS]
    first, second, options = weights_of(w13, w2, scales, text)
    call = ExpertsCall(
        *(x, first, second, topk_weights, topk_ids, b13, b2, expert_map, options),
        activation_by_expert=scales[-1] if len(scales) > _SLOTS_OF_WEIGHTS else None,
    )
    return Inputs(call, adapters_of(values[_OF_EXPERTS:]))


def weights_of(
    w13: Tensor, w2: Tensor, scales: Sequence[Tensor | None], text: str
) -> tuple[Weight, Weight, Options]:
    """Both weights, from their data, scales and the text of options; and the options."""
    scheme, _, options = decode(text)
    slots = min(_SLOTS_OF_WEIGHTS, len(scales)) // 2
    none = [None] * (5 - slots)
    of_w13, of_w2 = schemes_of_layer(scheme)
    first = Weight._make((w13, *scales[:slots], *none, of_w13, ""))
    second = Weight._make((w2, *scales[slots : 2 * slots], *none, of_w2, ""))
    return first, second, options


def adapters_of(values: Sequence[Any]) -> Adapters:
    """The adapters, from the values of `adapter_values`, or from none."""
    if not values:
        return UNADAPTED
    a13, b13, a2, b2, scale13, scale2 = values
    return Adapters(
        None if a13 is None else LowRank(a13, b13, scale13),
        None if a2 is None else LowRank(a2, b2, scale2),
    )


def adapter_values(adapters: Adapters) -> list[Any]:
    """The adapters as operators take them: four matrices, then both scales."""
    values: list[Any] = []
    for one in adapters:
        values += (None, None) if one is None else (one.a, one.b)
    # constants, also where dynamic=True makes symbols of them
    return values + [1.0 if one is None else float(guard_scalar(one.scale)) for one in adapters]


_warned = False


def warn_of_plain_torch(
    x: Tensor,
    reason: str,
    cause: str = "gradients are recorded",
    remedy: str = "wrap the call in torch.no_grad() or torch.inference_mode()",
) -> None:
    """Warn once that a call with tokens x on a GPU does not use the fast kernels, and why."""
    global _warned
    if _warned or not x.is_cuda or not x.numel():
        return
    _warned = True
    warnings.warn(
        f"moe_ops runs its differentiable torch path, because {cause}, and {reason}. For "
        f"inference {remedy} to use the fast kernels.",
        stacklevel=2,
    )


# --- what they run -------------------------------------------------------------------------------


class Passes(NamedTuple):
    """What runs the passes of a call, by its plan: plain torch, or kernels."""

    plain: Callable[..., Step]
    fused: Callable[..., Step]

    def step(self, inputs: Inputs, warn: bool) -> Step:
        """A pass of a call."""
        call, adapters = inputs
        reason, products = planning.plan(call, inputs.matrices)
        if reason is None:
            return self.fused(call, adapters, products)
        if warn:
            adapted = ("adapters are given", "merge them into the weights")
            words = () if adapters == UNADAPTED else adapted
            warn_of_plain_torch(call.hidden_states, reason, *words)
        return self.plain(call, adapters, products)

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out, h, u, index), as step.py defines them. h and u have no rows if they are computed
        again; u is (0, 0) without an adapter of w13. Their rows past those of the last expert may
        hold anything.
        """

        def kept(t: Tensor) -> Tensor:
            return (t[:0].clone() if inputs.call.options.recompute else t).to(step.kept)

        x = inputs.call.hidden_states
        with torch.cuda.device_of(x):  # kernels are launched on the current device
            step = self.step(inputs, warn=True)
            out, h, u, index = step.forward()
            h = kept(h)
            return out, h, h.new_empty(0, 0) if u is None else kept(u), index

    def backward(
        self,
        inputs: Inputs,
        grad: Tensor,
        h: Tensor,
        u: Tensor | None,
        index: Tensor,
        needs: Sequence[bool],
    ) -> list[Tensor]:
        """Gradients of the inputs in the order of `_LORA_GRADIENTS`, for each of which `needs` has
        an entry, and (0,) where it is not needed.
        """
        if inputs.call.options.recompute:
            known, u = None, None
        else:
            known = h
        asked = Needs._make((*needs[:6], any(needs[6:8]), any(needs[8:])))
        with torch.cuda.device_of(grad):
            step = self.step(inputs, warn=False)
            found = step.backward(grad, known, u, index, asked)
        # outputs may not share memory
        return [h.new_empty(0) if t is None else t for t in found]


_PASSES = Passes(Step, _fused_step)


def _forward(*values: Any) -> tuple[Tensor, ...]:
    """(out, h, index), with adapters (out, h, u, index)."""
    out, h, u, index = _PASSES.forward(_inputs(values))
    return (out, h, index) if len(values) == _OF_EXPERTS else (out, h, u, index)


def _forward_fake(*values: Any) -> tuple[Tensor, ...]:
    out, h, u, index = forward_fake(_inputs(values))
    return (out, h, index) if len(values) == _OF_EXPERTS else (out, h, u, index)


def forward_fake(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `Passes.forward` returns, without values."""
    call, (first, _) = inputs
    E, N, _ = get_scheme(call.w13.scheme).logical_shape(*call.w13.data.shape)
    x = call.hidden_states
    S = x.shape[0] * call.top_k
    h = x.new_empty((0 if call.options.recompute else S, N), dtype=kept_dtype(call))
    out = x.new_empty(x.shape, dtype=call.output()[1])
    index = x.new_empty((E + S,), dtype=torch.int32)
    size = (0, 0) if first is None else (h.shape[0], first.a.shape[1])
    return out, h, h.new_empty(size), index


def _backward(grad: Tensor, h: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of the inputs in the order of `_LORA_GRADIENTS`, one per entry of `needs`; (0,) if
    it is not needed.
    """
    *u, index = rest[: 1 if len(rest[-1]) == len(_GRADIENTS) else 2]
    *values, needs = rest[len(u) + 1 :]
    found = _PASSES.backward(_inputs(values), grad, h, u[0] if u else None, index, needs)
    return tuple(found[: len(needs)])


def _backward_fake(grad: Tensor, h: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *values, needs = rest[1 if len(rest[-1]) == len(_GRADIENTS) else 2 :]
    both = [[any(needs[i : i + 2])] * 2 for i in (6, 8)]  # a and b of a pair come together
    asked = [*needs[:6], *both[0], *both[1]][: len(needs)]
    wanted = zip(_LORA_GRADIENTS, asked, strict=False)
    return tuple(
        [values[i].new_empty(values[i].shape) if need else h.new_empty(0) for i, need in wanted]
    )


# --- how autograd records them -------------------------------------------------------------------


def _layer(values: Sequence[Any]) -> Tensor:
    """The first output as a graph of torch operators, for derivatives of gradients."""
    return composition.experts(*_inputs(values))


def recorded(
    options: tuple[int, ...],
    gradients: tuple[int, ...],
    backward: Callable[..., Sequence[Tensor]],
    layer: Callable[[Sequence[Any]], Tensor] = _layer,
    at_scales: int | None = _SCALES,
) -> tuple[Callable[..., tuple], Callable[..., None]]:
    """(backward, setup_context), as `torch.library.register_autograd` takes them.

    Args:
        options: indices of the inputs that are not tensors.
        gradients: indices of the inputs that may get gradients.
        backward: operator of the gradient of the first output, all other outputs, the inputs, and
            the gradients that are needed.
        layer: the first output of the inputs, by torch operators.
        at_scales: index of the input that is a list of scales, if there is one.
    """
    apart = options if at_scales is None else (*options, at_scales)

    def save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.rest = [inputs[i] for i in options]
        scales = [] if at_scales is None else inputs[at_scales]
        ctx.num_scales, ctx.no_gaps = len(scales), all([t is not None for t in scales])
        ctx.num_kept = len(output) - 1
        tensors = [t for i, t in enumerate(inputs) if i not in apart]
        ctx.save_for_backward(*output[1:], *tensors, *scales)

    def values_of(ctx: Any) -> tuple[list, list]:
        """The outputs after the first, and the inputs."""
        saved = list(ctx.saved_tensors)
        end = len(saved) - ctx.num_scales
        values = saved[ctx.num_kept : end]
        for i, value in sorted(zip(apart, (*ctx.rest, saved[end:]), strict=False)):
            values.insert(i, value)
        return saved[: ctx.num_kept], values

    def run(ctx: Any, grad: Tensor | None, *_: Any) -> tuple:
        kept, values = values_of(ctx)
        needs = [bool(ctx.needs_input_grad[i]) for i in gradients]
        found: list = [None] * len(values)
        # torch asks for as many gradients of a list as it has tensors
        if at_scales is not None and ctx.no_gaps:
            found[at_scales] = [None] * ctx.num_scales
        if grad is None:
            return tuple(found)
        wanted = [i for i, need in zip(gradients, needs, strict=True) if need]
        if torch.is_grad_enabled():  # create_graph: derivatives of these gradients are asked for
            # Of aliases: the inner gradient ends at them, and derivatives go on through them. Of
            # the inputs themselves it would go on to what they depend on, such as the router
            # weights of tokens, which the outer one counts, too; it would count a tensor twice
            # that is passed twice, and call its hooks.
            inputs = [values[i].view_as(values[i]) for i in wanted]
            for i, alias in zip(wanted, inputs, strict=True):
                values[i] = alias
            made = torch.autograd.grad(layer(values), inputs, grad, create_graph=True)
        else:
            all_of = backward(grad, *kept, *values, needs)
            made = tuple([t for t, need in zip(all_of, needs, strict=True) if need])
        for i, gradient in zip(wanted, made, strict=True):
            found[i] = gradient
        return tuple(found)

    return run, save


# --- the operators -------------------------------------------------------------------------------

backward = register_function(
    "experts_backward",
    f"(Tensor grad, Tensor h, Tensor index, {_INPUTS}, bool[6] needs) -> "
    f"({', '.join(['Tensor'] * len(_GRADIENTS))})",
    _backward,
    _backward_fake,
    devices=TORCH_DEVICES,
    flops=flops.experts_backward,
    one_by_one=True,
)


forward = register_function(
    "experts_forward",
    f"({_INPUTS}) -> (Tensor out, Tensor h, Tensor index)",
    _forward,
    _forward_fake,
    recorded((9,), _GRADIENTS, backward),
    devices=TORCH_DEVICES,
    flops=flops.experts_forward,
)


lora_backward = register_function(
    "lora_experts_backward",
    f"(Tensor grad, Tensor h, Tensor u, Tensor index, {_LORA_INPUTS}, bool[10] needs) -> "
    f"({', '.join(['Tensor'] * len(_LORA_GRADIENTS))})",
    _backward,
    _backward_fake,
    devices=TORCH_DEVICES,
    flops=flops.lora_experts_backward,
    one_by_one=True,
)


lora_forward = register_function(
    "lora_experts_forward",
    f"({_LORA_INPUTS}) -> (Tensor out, Tensor h, Tensor u, Tensor index)",
    _forward,
    _forward_fake,
    recorded((9, 14, 15), _LORA_GRADIENTS, lora_backward),
    devices=TORCH_DEVICES,
    flops=flops.lora_experts_forward,
)


def fused_experts(call: ExpertsCall, recompute: bool, adapters: Adapters | None = None) -> Tensor:
    """Differentiable experts, (M, K) in the call's dtype. With `recompute`, or with adapters but
    no gradients, only the inputs and the order of the pairs are kept for the backward pass.
    """
    if adapters is None:
        return forward(*op_values(call, recompute))[0]
    inputs = op_values(call, recompute or not torch.is_grad_enabled())
    return lora_forward(*inputs, *adapter_values(adapters))[0]


def op_values(call: ExpertsCall | GroupedCall, recompute: bool) -> tuple:
    """The inputs of a forward operator that it has without adapters."""
    scheme = layer_scheme(call.w13.scheme, call.w2.scheme)
    options = call.options._replace(recompute=recompute, max_workspace_bytes=None)
    inputs = call.op_values(encode(scheme, "", options))
    return tuple([NO_SCALES if isinstance(i, list) and not i else i for i in inputs])
