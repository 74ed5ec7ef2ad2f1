"""How autograd records a functional operator whose backward pass is another one. torch alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

SCALES = 5  # the place of the list of scales among the inputs


def recorded(
    options: tuple[int, ...],
    gradients: tuple[int, ...],
    backward: Callable[..., Sequence[Tensor]],
    layer: Callable[[tuple], Tensor],
) -> tuple[Callable[..., tuple], Callable[..., None]]:
    """What `torch.library.register_autograd` takes: (backward, setup_context).

    Args:
        options: of the inputs, the places of those that are no tensors.
        gradients: the places of those that may get gradients.
        backward: takes the gradient of the first output, all other outputs, the inputs, and which
            gradients are needed.
        layer: of the inputs, the first output as a graph of torch operators, for derivatives of
            gradients.
    """
    apart = (*options, SCALES)

    def save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.rest, scales = [inputs[i] for i in options], inputs[SCALES]
        ctx.num_scales, ctx.no_gaps = len(scales), all([t is not None for t in scales])
        ctx.num_kept = len(output) - 1
        tensors = [t for i, t in enumerate(inputs) if i not in apart]
        ctx.save_for_backward(*output[1:], *tensors, *scales)

    def values_of(ctx: Any) -> tuple[list, list]:
        """The outputs behind the first, and the inputs."""
        saved = list(ctx.saved_tensors)
        end = len(saved) - ctx.num_scales
        values = saved[ctx.num_kept : end]
        for i, value in sorted(zip(apart, (*ctx.rest, saved[end:]), strict=True)):
            values.insert(i, value)
        return saved[: ctx.num_kept], values

    def run(ctx: Any, grad: Tensor | None, *_: Any) -> tuple:
        kept, values = values_of(ctx)
        needs = [bool(ctx.needs_input_grad[i]) for i in gradients]
        found: list = [None] * len(values)
        if ctx.no_gaps:  # torch asks for as many gradients of a list as it has tensors
            found[SCALES] = [None] * ctx.num_scales
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
            out = layer(tuple(values))
            made = torch.autograd.grad(out, inputs, grad, create_graph=True)
        else:
            all_of = backward(grad, *kept, *values, needs)
            made = tuple([t for t, need in zip(all_of, needs, strict=True) if need])
        for i, gradient in zip(wanted, made, strict=True):
            found[i] = gradient
        return tuple(found)

    return run, save
