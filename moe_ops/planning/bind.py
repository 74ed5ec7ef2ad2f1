"""Plans at hand for a call: looked up by what they depend on, and run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from moe_ops.ops.library import current_device, dispatcher_is_idle
from moe_ops.ops.validation import BatchedCall, ExpertsCall, LinearCall
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans

# What the code that torch.compile generates allocates by: two thirds of torch.empty's time is its way through argument
# parsing and the dispatcher, of which each call would take four.
_EMPTY = {
    kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
    for kind in ("cpu", "cuda")
}


class Ready:
    """A plan at hand for a call: what to allocate, remembered per M outside of graphs, and how to run it."""

    __slots__ = ("op", "kernel", "options", "plan", "shapes", "tiers")

    def __init__(self, plan: plans.Plan, plain: bool = False):
        self.plan, self.op, self.options = plan, plan.op, plan.options
        self.kernel = plan.kernel if plain else None
        self.shapes: dict[int, list] = {}
        self.tiers: tuple[tuple[int, Ready], ...] = ()  # of a tiered plan, each tier alone

    def split(self) -> Ready:
        """Let calls whose M is known run their tier's operator, with no larger workspaces than it needs."""
        if len(self.plan.tiers) > 1:
            alone = [
                (limit, dataclasses.replace(self.plan, tiers=((-1, backend),)))
                for limit, backend in self.plan.tiers
            ]
            plain = self.kernel is not None
            self.tiers = tuple([(limit, Ready(plan, plain)) for limit, plan in alone])
        return self

    def run(
        self, shape: tuple, dtype: torch.dtype, M: int, device: torch.device, *values: Any
    ) -> Tensor:
        """Allocate the output, of a shape that the plan and M decide, and workspaces for M rows; call the op.

        On plain tensors, where nothing listens to the dispatcher, what the op would call is called: that saves 5 us of
        24, the cost of handing arguments to C++ and back.
        """
        if torch.compiler.is_compiling() or type(M) is not int:
            shapes = ((shape, dtype), *self.plan.workspace_shapes(M))
            buffers = [torch.empty(*size, dtype=t, device=device) for size, t in shapes]
            self.op(*buffers, *values)
            return buffers[0]
        for limit, ready in self.tiers:
            if limit < 0 or limit >= M:
                return ready.run(shape, dtype, M, device, *values[:-1], ready.options)
        direct = self.kernel is not None and dispatcher_is_idle()
        buffers = self.allocate(direct, shape, dtype, M, device)
        if direct:
            self.kernel(*buffers, *values)  # type: ignore[misc]
        else:
            self.op(*buffers, *values)
        return buffers[0]

    def allocate(
        self, direct: bool, shape: tuple, dtype: torch.dtype, M: int, device: torch.device
    ) -> list[Tensor]:
        """The output and the three workspaces, uninitialised."""
        shapes = self.shapes.get(M)
        if shapes is None:
            if len(self.shapes) >= 256:
                self.shapes.clear()
            buffers = ((shape, dtype), *self.plan.workspace_shapes(M))
            shapes = self.shapes[M] = [
                (size, make_contiguous_strides_for(size), t) for size, t in buffers
            ]
        empty = None
        # determinism may mean that torch.empty fills what it allocates
        direct = direct and not torch._C._get_deterministic_algorithms()
        if direct and (device.index is None or device.index == current_device()):
            empty = _EMPTY.get(device.type)
        if empty is None:
            return [torch.empty(*size, dtype=t, device=device) for size, _, t in shapes]
        return [empty(size, strides, t) for size, strides, t in shapes]


_PLAIN = (Tensor, torch.nn.Parameter)


_ready: dict[tuple, Ready] = {}


def prepare(
    make_call: Callable,
    inputs: Any,
    weights: Any,
    others: Any,
    options: Any,
    backend: str,
    blocks: int = 0,
) -> Ready:
    """Validate and plan. Eager calls look a plan up by what it depends on: all facts but M.

    The key is made of attributes as they come (3 us); spelling the call out takes 20. `blocks` is the
    first size of inputs whose first dimension is not M.
    """
    if torch.compiler.is_compiling() or machines.pretending():
        return Ready(make_plan(make_call(inputs, weights, others, options), backend))
    key = [make_call, backend, options, blocks]
    for t in inputs:
        key += (type(t), t.shape[1:], t.dtype, t.device)
    for data, scale, zero, global_, channel, static, scheme, layout in weights:
        key += (type(data), data.shape, data.dtype, data.device, data.is_contiguous())
        key += (scheme, layout)
        if scale is not None:
            key += (scale.shape, scale.device, scale.is_contiguous())
            key += (None if static is None else static.device,)
            if zero is not None or global_ is not None or channel is not None:
                for other in (zero, global_, channel):
                    key += (
                        (None,)
                        if other is None
                        else (other.shape, other.device, other.is_contiguous())
                    )
    for t in others:
        key += (None,) if t is None else (type(t), t.shape, t.dtype, t.device)
    lookup = tuple(key)
    try:
        ready = _ready.get(lookup)
    except TypeError:  # sizes without a hash: make_fx traces with symbols
        return Ready(make_plan(make_call(inputs, weights, others, options), backend))
    if ready is None:
        if len(_ready) >= 4096:
            _ready.clear()
        plan = make_plan(make_call(inputs, weights, others, options), backend)
        plain = all([entry in _PLAIN for entry in lookup if isinstance(entry, type)])
        ready = _ready[lookup] = Ready(plan, plain).split()
    return ready


def make_plan(call: ExpertsCall | BatchedCall | LinearCall, backend: str) -> plans.Plan:
    problem = call.problem()
    return plans.plan(problem, machines.machine(call.device), backend)
