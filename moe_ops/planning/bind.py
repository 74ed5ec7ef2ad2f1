"""Eager calls: find the plan of an earlier call that was alike, allocate, and run the op."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from moe_ops.ops import library, transforms
from moe_ops.ops.backend import Shortcut
from moe_ops.ops.call import Call, refuse_lost
from moe_ops.ops.library import current_device, nothing_listens
from moe_ops.ops.memory import EMPTY_STRIDED, addressable
from moe_ops.ops.options import Options
from moe_ops.ops.validation import problem_of
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans

_ADDRESS = Tensor.data_ptr
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_modes_entered = torch._C._len_torch_dispatch_stack
_profiling = torch._C._autograd._profiler_enabled
_deterministic = torch._C._get_deterministic_algorithms


class BoundPlan:
    """A plan that is ready to run: its op or kernel, and the buffers to allocate for each M, which
    eager calls remember.
    """

    __slots__ = ("op", "kernel", "options", "plan", "shapes", "tiers")

    def __init__(self, plan: plans.Plan):
        self.plan, self.op, self.options = plan, plan.op, plan.options
        self.kernel: Callable | None = None  # for eager calls
        self.shapes: dict[int, list] = {}
        self.tiers: tuple[tuple[int, BoundPlan], ...] = ()  # (largest M, plan of that tier alone)

    def split(self) -> BoundPlan:
        """Specialize the plan to known M: each tier's own op or kernel, and workspace sizes."""
        self.kernel = self.plan.kernel
        if len(self.plan.tiers) > 1:
            alone = [
                (limit, dataclasses.replace(self.plan, tiers=((-1, backend),)))
                for limit, backend in self.plan.tiers
            ]
            self.tiers = tuple([(limit, BoundPlan(plan).split()) for limit, plan in alone])
        return self

    def run(self, call: Call, M: int, direct: bool = False) -> Tensor:
        """Allocate the output and workspaces for M rows, and call the op.

        `direct`: the dispatcher would do nothing but call the kernel, so call it past the
        dispatcher, which saves the conversion of all arguments to C++ and back.
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
        """The plan of the tier that M rows fall into."""
        for limit, alone in self.tiers:
            if limit < 0 or limit >= M:
                return alone
        return self

    def shortcut(self, call: Call) -> Shortcut | None:
        """The backend's shortcut for calls with tensors like these, which takes addresses; None
        without one.
        """
        plan = self.plan
        make = plan.tiers[0][1].shortcut
        if make is None or len(plan.tiers) > 1 or _without_weights(plan.problem.options):
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
        # under deterministic algorithms torch.empty may have to fill the memory
        direct = direct and not _deterministic()
        if direct and (device.index is None or device.index == current_device()):
            empty = EMPTY_STRIDED.get(device.type)
        if empty is None:
            return [torch.empty(*size, dtype=t, device=device) for size, _, t in shapes]
        return [empty(size, strides, t) for size, strides, t in shapes]


def _without_weights(options: Options) -> bool:
    """Whether the arguments of the operator are not all that its launcher needs."""
    return bool(options.exchange or options.resident)


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}
_MOST_KNOWN = 32


class _Known(NamedTuple):
    """A plan, and the guards that find whether a call's tensors are like those it was made for, in
    types, sizes but M, strides, dtypes, devices and dispatch keys.
    """

    check: Callable[..., bool]
    bound: BoundPlan
    check_rows: Callable[[Call], None]  # before the shortcut
    shortcut: Shortcut | None


class _Alike(NamedTuple):
    """The known plans of calls with equal options, types of tensors and shape of w13, or of one
    layer's resident experts. With this key a model of many kinds of layers checks few guards per
    call.
    """

    pick: Callable[[tuple], tuple]  # the tensors that are not None
    known: tuple[_Known, ...]  # the newest first


_alike: dict[tuple, _Alike] = {}


def run(call: Call, backend: str) -> Tensor:
    """The result of a call that records no gradients.

    Where guards hold, the dispatcher would pass the tensors to the kernel unchanged. So it is
    skipped, unless a mode or a profiler is active.
    """
    if torch.compiler.is_compiling():
        return look_up(call, backend).run(call, call.num_tokens)
    known, bound, given = _find(call, backend)
    M = call.num_tokens
    if known is None or _modes_entered() or _profiling():
        return bound.run(call, M)
    addresses = [*map(_ADDRESS, given)]
    if not all(addresses):
        refuse_lost(call)
        return bound.run(call, M)
    shortcut = known.shortcut
    if shortcut is not None and shortcut.most_rows >= M and not _deterministic():
        known.check_rows(call)
        return shortcut.run(call, M, addresses)
    return bound.run(call, M, True)


def look_up(call: Call, backend: str) -> BoundPlan:
    """The plan of a call; for eager calls that of an earlier one that was alike."""
    if torch.compiler.is_compiling():
        return BoundPlan(make_plan(call, backend))
    return _find(call, backend)[1]


def make_plan(call: Call, backend: str) -> plans.Plan:
    """Validate and plan."""
    machine = machines.machine(call.hidden_states.device)
    return plans.plan(problem_of(call), machine, backend)


def _find(call: Call, backend: str) -> tuple[_Known | None, BoundPlan, tuple[Tensor, ...]]:
    """The known plan of an eager call, or None and a new plan; and the tensors that were given."""
    alike, tensors = _alike, call.tensors()  # read once: another thread may register a backend
    types = tuple(map(type, tensors))
    key: tuple | None
    try:
        # with its type, because 2.0 equals 2 and must be refused
        bytes_type = type(call.options.max_workspace_bytes)
        key = (backend, call.static(), bytes_type, types)
        found = alike.get(key)
    except (TypeError, RuntimeError):  # symbolic sizes of make_fx have no hash; or no sizes at all
        key = found = None
    if found is not None and machines.pretended is None:
        given = found.pick(tensors)
        for known in found.known:
            if known.check(*given):
                return known, known.bound, given
    bound = BoundPlan(make_plan(call, backend))
    given = tuple([t for t in tensors if t is not None])
    if key is None or machines.pretended is not None:
        return None, bound, given
    bound.split()
    # A tensor without elements has no address; `run` gives its call to the dispatcher.
    plain = _PLAIN.issuperset(types)
    in_memory = addressable([t for t in given if t.is_neg() or t.numel()])
    if plain and not in_memory:
        refuse_lost(call)
    check = _guards(call) if plain and in_memory and nothing_listens() else None
    if check is None:
        return None, bound, given
    check_rows = library.KINDS[bound.plan.problem.kind].check_rows
    new = _Known(check, bound, check_rows, None)
    if found is None:
        if len(alike) >= 1024:
            alike.clear()
        at = [i for i, tensor in enumerate(tensors) if tensor is not None]
        found = _Alike(operator.itemgetter(*at), ())
    newest = new._replace(shortcut=bound.shortcut(call))  # for the next calls
    alike[key] = found._replace(known=(newest, *found.known[: _MOST_KNOWN - 1]))
    return new, bound, given


def _guards(call: Call) -> Callable[..., bool] | None:
    """The guards of torch.compile as a check whether tensors are like those of a call. Those with
    M may have any number of rows, and any strides except that columns of stride 1 must keep it.

    None if this torch has no such guards, or if one tensor is given twice, for which they never
    hold. Such calls are planned each time.
    """
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
    except Exception:  # the guards are private to torch and may change
        return None


def forget() -> None:
    """Plan all calls anew after the backends changed.

    With a new dict, so that a thread that is planning cannot add its old plan to it.
    """
    global _alike
    _alike = {}
