"""Plans bound to calls: looked up by what they depend on, and run."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from moe_ops.ops.call import Call, refuse_lost
from moe_ops.ops.library import current_device, dispatcher_is_idle
from moe_ops.ops.memory import addressable
from moe_ops.ops.validation import problem_of
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans

# What the code that torch.compile generates allocates by: two thirds of torch.empty's time is its
# way through argument parsing and the dispatcher, of which each call would take four.
_EMPTY = {
    kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
    for kind in ("cpu", "cuda")
}

_ADDRESS = Tensor.data_ptr
_TensorGuards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_modes_entered = torch._C._len_torch_dispatch_stack
_profiling = torch._C._autograd._profiler_enabled


def _never(*tensors: Tensor) -> bool:
    return False


def _picker(values: tuple) -> Callable[[tuple], tuple]:
    """A function from an op's inputs, which are None where these are, to the tensors in them."""
    at = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
    pick: Callable[[tuple], tuple] = operator.itemgetter(*at)
    scales = [i for i, value in enumerate(values) if isinstance(value, list) and value]
    if not scales:
        return pick
    (where,) = scales
    given = [i for i, scale in enumerate(values[where]) if scale is not None]
    pick_scales = operator.itemgetter(*given, given[0])  # a tuple, also of one
    return lambda values: pick(values) + pick_scales(values[where])[:-1]


class BoundPlan:
    """A plan at hand for a call: what to allocate, remembered per M outside of graphs, and how to
    run it.
    """

    __slots__ = ("op", "kernel", "options", "pick", "plan", "shapes", "tiers", "unchanged")

    def __init__(self, plan: plans.Plan, plain: bool = False):
        self.plan, self.op, self.options = plan, plan.op, plan.options
        self.kernel = plan.kernel if plain else None
        self.pick: Callable[[tuple], tuple] | None = None
        self.unchanged: Callable[..., bool] = _never
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
        values, direct = call.op_values(bound.options), False
        if bound.kernel is not None:  # plain tensors, by their types
            direct = bound.skips_dispatcher(values)
            if not direct and not addressable(bound.pick(values)):  # type: ignore[misc]
                refuse_lost(call)
        buffers = bound.allocate(direct, call, M)
        if direct:
            bound.kernel(*buffers, *values)  # type: ignore[misc]
        else:
            bound.op(*buffers, *values)
        return buffers[0]

    def skips_dispatcher(self, values: tuple) -> bool:
        """Whether the dispatcher would take these inputs to the op's kernel as they are, and each
        tensor has an address.

        What it looks at, the keys of the tensors and of this thread, is compared with those of
        the last call of which this was true, by what torch.compile guards graphs with: half of
        the time that asking for the thread's alone takes.
        """
        if self.pick is None:
            self.pick = _picker(values)
        tensors = self.pick(values)
        # of modes: the guard looks past a FakeTensorMode
        if self.unchanged(*tensors) and not _modes_entered() and not _profiling():
            return all(map(_ADDRESS, tensors))
        if not dispatcher_is_idle() or not addressable(tensors):
            return False
        if _TensorGuards is not None:
            free = [[None] * tensor.ndim for tensor in tensors]
            guards = _TensorGuards(*tensors, dynamic_dims_sizes=free, dynamic_dims_strides=free)
            self.unchanged = guards.check
        return True

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
    # sizes without a hash, where make_fx traces; sizes that are not there; tensors without strides
    except (TypeError, IndexError, RuntimeError):
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
