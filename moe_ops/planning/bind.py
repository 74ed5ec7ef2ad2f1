"""Plans bound to calls: looked up by what they depend on, and run."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from moe_ops.ops import library, transforms
from moe_ops.ops.backend import Shortcut
from moe_ops.ops.call import Call, refuse_lost
from moe_ops.ops.library import current_device, dispatcher_is_idle
from moe_ops.ops.memory import EMPTY_STRIDED, addressable
from moe_ops.ops.validation import problem_of
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans

_ADDRESS = Tensor.data_ptr
_TensorGuards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_modes_entered = torch._C._len_torch_dispatch_stack
_profiling = torch._C._autograd._profiler_enabled
_deterministic = torch._C._get_deterministic_algorithms


class BoundPlan:
    """A plan at hand for a call: what to allocate, remembered per M outside of graphs, and how to
    run it.
    """

    __slots__ = ("op", "kernel", "options", "plan", "shapes", "tiers")

    def __init__(self, plan: plans.Plan):
        self.plan, self.op, self.options = plan, plan.op, plan.options
        self.kernel: Callable | None = None  # eager calls have it
        self.shapes: dict[int, list] = {}
        self.tiers: tuple[tuple[int, BoundPlan], ...] = ()  # of a tiered plan, each tier alone

    def split(self) -> BoundPlan:
        """Let calls whose M is known run their tier's operator, with no larger workspaces than it
        needs, or the kernel that it would call.
        """
        self.kernel = self.plan.kernel
        if len(self.plan.tiers) > 1:
            alone = [
                (limit, dataclasses.replace(self.plan, tiers=((-1, backend),)))
                for limit, backend in self.plan.tiers
            ]
            self.tiers = tuple([(limit, BoundPlan(plan).split()) for limit, plan in alone])
        return self

    def run(self, call: Call, M: int, direct: bool = False) -> Tensor:
        """Allocate the output, and workspaces for M rows; call the op.

        `direct`: what the op would call is called, because the dispatcher has nothing to do. That
        saves the cost of handing arguments to C++ and back.
        """
        if torch.compiler.is_compiling() or type(M) is not int:
            device = call.hidden_states.device
            shapes = (call.output(), *self.plan.workspace_shapes(M))
            buffers = [torch.empty(*size, dtype=t, device=device) for size, t in shapes]
            self.op(*buffers, *call.op_values(self.options))
            return buffers[0]
        bound = self.alone(M)
        buffers, values = bound.allocate(direct, call, M), call.op_values(bound.options)
        if direct and bound.kernel is not None:
            bound.kernel(*buffers, *values)
        else:
            transforms.refuse_linearize()
            bound.op(*buffers, *values)
        return buffers[0]

    def alone(self, M: int) -> BoundPlan:
        """The plan of M rows alone."""
        for limit, alone in self.tiers:
            if limit < 0 or limit >= M:
                return alone
        return self

    def shortcut(self, call: Call) -> Shortcut | None:
        """What runs calls with tensors like these by their addresses, where the backend has such
        a way.
        """
        plan = self.plan
        make = plan.tiers[0][1].shortcut
        if make is None or len(plan.tiers) > 1 or plan.problem.options.exchange:
            return None
        device, (shape, dtype) = call.hidden_states.device, call.output()
        out, none = torch.empty(*shape, dtype=dtype, device=device), torch.empty(0, device=device)
        kind = library.KINDS[plan.problem.kind]
        return make(kind.unpack((out, none, none, none, *call.op_values(self.options))))

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
        direct = direct and not _deterministic()
        if direct and (device.index is None or device.index == current_device()):
            empty = EMPTY_STRIDED.get(device.type)
        if empty is None:
            return [torch.empty(*size, dtype=t, device=device) for size, _, t in shapes]
        return [empty(size, strides, t) for size, strides, t in shapes]


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}
_bound: dict[tuple, BoundPlan] = {}


class _Guarded(NamedTuple):
    """A plan of calls whose tensors have what guards compare: types, sizes but M, strides, dtypes,
    and the dispatch keys of the tensors and of the thread.
    """

    check: Callable[..., bool]
    bound: BoundPlan
    check_rows: Callable[[Call], None]  # where there is a shortcut
    shortcut: Shortcut | None


class _Alike(NamedTuple):
    """What is known of calls with equal options, types of tensors and shape of w13."""

    pick: Callable[[tuple], tuple]  # the tensors among those that may be None
    guarded: tuple[_Guarded, ...]  # the newest first


_MOST_GUARDED = 8
_alike: dict[tuple, _Alike] = {}


def run(call: Call, backend: str) -> Tensor:
    """The result of a call that records no gradients.

    Eager calls of plain tensors are recognised by what torch.compile guards graphs with: a fifth
    of the time that a key of all sizes takes. The guards hold where the dispatcher would take the
    tensors to the kernel as they are, and it is not asked, unless a mode or profiler listens.
    """
    if torch.compiler.is_compiling() or machines.pretending():
        return look_up(call, backend).run(call, call.num_tokens)
    alike, tensors = _alike, call.tensors()
    types = tuple(map(type, tensors))
    try:
        # the shape of a weight: a model of many kinds of layers does not try the guards of all
        options = (backend, call.static(), cast(Tensor, tensors[1]).shape, types)
        known = alike.get(options)
    except (TypeError, RuntimeError):  # no hash; tensors without sizes
        return look_up(call, backend).run(call, call.num_tokens)
    if known is not None:
        given = known.pick(tensors)
        for check, bound, check_rows, shortcut in known.guarded:
            if not check(*given):
                continue
            addresses, M = [*map(_ADDRESS, given)], call.num_tokens
            if not all(addresses):
                break
            if _modes_entered() or _profiling():  # the guards look past a FakeTensorMode
                return bound.run(call, M)
            if shortcut is not None and shortcut.most_rows >= M and not _deterministic():
                check_rows(call)
                return shortcut.run(call, M, addresses)
            return bound.run(call, M, True)
    bound = look_up(call, backend)
    if not _PLAIN.issuperset(types):
        return bound.run(call, call.num_tokens)
    given = tuple([t for t in tensors if t is not None])
    if not addressable(given):
        refuse_lost(call)
        return bound.run(call, call.num_tokens)
    if not dispatcher_is_idle():
        return bound.run(call, call.num_tokens)
    guards = _guards(call)
    if guards is not None:
        check_rows = library.KINDS[bound.plan.problem.kind].check_rows
        _remember(alike, options, _Guarded(guards, bound, check_rows, bound.shortcut(call)))
    return bound.run(call, call.num_tokens, True)


def _remember(alike: dict[tuple, _Alike], options: tuple, new: _Guarded) -> None:
    known = alike.get(options)
    if known is None:
        if len(alike) >= 1024:
            alike.clear()
        at = [i for i, kind in enumerate(options[-1]) if kind is not type(None)]
        known = _Alike(operator.itemgetter(*at), ())
    alike[options] = known._replace(guarded=(new, *known.guarded[: _MOST_GUARDED - 1]))


def _guards(call: Call) -> Callable[..., bool] | None:
    """Whether tensors are like those of a call: any number of rows where they have M, and there
    with any strides but that of their columns if it is one. None where this torch has no such
    guards, or they know no call with one tensor in two places.
    """
    if _TensorGuards is None:
        return None
    (dim, of_rows), x = call.rows(), call.hidden_states
    tensors, sizes, strides = [], [], []
    for i, tensor in enumerate(call.tensors()):
        if tensor is None:
            continue
        size: list = list(tensor.shape)
        stride: list = list(tensor.stride())
        if i in of_rows and tensor.ndim == x.ndim:
            size[dim] = None
            stride = [None] * (len(stride) - 1) + [1 if stride[-1] == 1 else None]
        tensors.append(tensor)
        sizes.append(size)
        strides.append(stride)
    try:
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return guards.check if guards.check(*tensors) is True else None
    except Exception:  # they are private to torch, which may change them
        return None


def make_plan(call: Call, backend: str) -> plans.Plan:
    """Validate and plan."""
    machine = machines.machine(call.hidden_states.device)
    return plans.plan(problem_of(call), machine, backend)


def look_up(call: Call, backend: str) -> BoundPlan:
    """The plan of a call. Eager calls look it up by what it depends on: all facts but M, since
    making a plan takes several times as long.
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
        bound = bound_plans[key] = BoundPlan(plan).split()
    return bound


def forget() -> None:
    """Plan all calls again: the backends are others.

    New dicts, so that a call that plans in another thread does not put its old plan among the
    new ones.
    """
    global _bound, _alike
    _bound, _alike = {}, {}
