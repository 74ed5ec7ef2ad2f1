"""Plans bound to calls: looked up by what they depend on, and run."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from moe_ops.ops.call import Call
from moe_ops.ops.library import current_device, dispatcher_is_idle
from moe_ops.ops.validation import problem_of
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans

# What the code that torch.compile generates allocates by: two thirds of torch.empty's time is its
# way through argument parsing and the dispatcher, of which each call would take four.
_EMPTY = {
    kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
    for kind in ("cpu", "cuda")
}


class BoundPlan:
    """A plan at hand for a call: what to allocate, remembered per M outside of graphs, and how to
    run it.
    """

    __slots__ = ("op", "kernel", "options", "plan", "shapes", "tiers")

    def __init__(self, plan: plans.Plan, plain: bool = False):
        self.plan, self.op, self.options = plan, plan.op, plan.options
        self.kernel = plan.kernel if plain else None
        self.shapes: dict[int, list] = {}
        self.tiers: tuple[tuple[int, BoundPlan], ...] = ()  # of a tiered plan, each tier alone

    def split(self) -> BoundPlan:
        """Let calls whose M is known run their tier's operator, with no larger workspaces than it
        needs.
        """
        if len(self.plan.tiers) > 1:
            alone = [
                (limit, dataclasses.replace(self.plan, tiers=((-1, backend),)))
                for limit, backend in self.plan.tiers
            ]
            plain = self.kernel is not None
            self.tiers = tuple([(limit, BoundPlan(plan, plain)) for limit, plan in alone])
        return self

    def run(self, call: Call, M: int) -> Tensor:
        """Allocate the output, and workspaces for M rows; call the op.

        On plain tensors, where nothing listens to the dispatcher, what the op would call is
        called: that saves 5 us of 24, the cost of handing arguments to C++ and back.
        """
        if torch.compiler.is_compiling() or type(M) is not int:
            device = call.hidden_states.device
            shapes = (call.output(), *self.plan.workspace_shapes(M))
            buffers = [torch.empty(*size, dtype=t, device=device) for size, t in shapes]
            self.op(*buffers, *call.op_values(self.options))
            return buffers[0]
        bound = self
        for limit, alone in self.tiers:
            if limit < 0 or limit >= M:
                bound = alone
                break
        direct = bound.kernel is not None and dispatcher_is_idle()
        buffers = bound.allocate(direct, call, M)
        if direct:
            bound.kernel(*buffers, *call.op_values(bound.options))  # type: ignore[misc]
        else:
            bound.op(*buffers, *call.op_values(bound.options))
        return buffers[0]

    def allocate(self, direct: bool, call: Call, M: int) -> list[Tensor]:
        """The output and the three workspaces, uninitialised."""
        shapes = self.shapes.get(M)
        if shapes is None:
            if len(self.shapes) >= 256:
                self.shapes.clear()
            buffers = (call.output(), *self.plan.workspace_shapes(M))
            shapes = self.shapes[M] = [
                (size, make_contiguous_strides_for(size), t) for size, t in buffers
            ]
        empty, device = None, call.hidden_states.device
        # determinism may mean that torch.empty fills what it allocates
        direct = direct and not torch._C._get_deterministic_algorithms()
        if direct and (device.index is None or device.index == current_device()):
            empty = _EMPTY.get(device.type)
        if empty is None:
            return [torch.empty(*size, dtype=t, device=device) for size, _, t in shapes]
        return [empty(size, strides, t) for size, strides, t in shapes]


_PLAIN = (Tensor, torch.nn.Parameter)
_bound: dict[tuple, BoundPlan] = {}


def make_plan(call: Call, backend: str) -> plans.Plan:
    """Validate and plan."""
    machine = machines.machine(call.hidden_states.device)
    return plans.plan(problem_of(call), machine, backend)


def look_up(call: Call, backend: str) -> BoundPlan:
    """The plan of a call. Eager calls look it up by what it depends on: all facts but M (3 us; a
    plan takes 20).
    """
    if torch.compiler.is_compiling() or machines.pretending():
        return BoundPlan(make_plan(call, backend))
    bound_plans = _bound  # these, should another thread register a backend before we are done
    try:
        key = (backend, call.key())
        bound = bound_plans.get(key)
    except (
        TypeError,
        IndexError,
    ):  # sizes without a hash, where make_fx traces; sizes that are not there
        return BoundPlan(make_plan(call, backend))
    if bound is None:
        if len(bound_plans) >= 4096:
            bound_plans.clear()
        plan = make_plan(call, backend)
        plain = all([entry in _PLAIN for entry in key[1] if isinstance(entry, type)])
        bound = bound_plans[key] = BoundPlan(plan, plain).split()
    return bound


def forget() -> None:
    """Plan all calls again: the backends are others.

    A new dict, so that a call that plans in another thread does not put its old plan among the
    new ones.
    """
    global _bound
    _bound = {}
