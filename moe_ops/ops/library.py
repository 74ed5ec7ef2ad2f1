"""Op schemas and `register`: the only file that talks to torch.library.

The arguments of an op are a NamedTuple (ops/args.py), from which its schema is generated and of
which launchers and fakes get an instance. Ops are void: they write `out` and the workspaces, and
nothing else.

The dispatcher takes time for every argument that it converts to Python. So all `Scale` fields
travel as one `Tensor?[] scales`, empty for plain weights, and all fields that are not tensors as
one `str options`, the repr of a dict. `moe_ops::<backend>_experts` has 14 arguments instead of the
27 fields of ExpertsArgs, which halves the time before the launcher.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_ops.environment import when_imported
from moe_ops.meta import fake, flops
from moe_ops.ops import memory, transforms
from moe_ops.ops.args import (
    AdaptedArgs,
    BatchedExpertsArgs,
    ExpertsArgs,
    GroupedLinearArgs,
    ResidentArgs,
    Scale,
)
from moe_ops.ops.backend import Backend, Operator
from moe_ops.ops.exchange import over_ranks
from moe_ops.ops.options import decode
from moe_ops.ops.relayout import RELAYOUTS
from moe_ops.ops.resident import resident_of
from moe_ops.schemes import get_scheme, schemes_of_layer

LIB = torch.library.Library("moe_ops", "DEF")
# Dispatch keys of the devices on which plain torch runs, for backend `torch` and for gradients.
# PrivateUse1 is the key of devices that extensions add.
TORCH_DEVICES = ("CPU", "CUDA", "XPU", "MPS", "HPU", "PrivateUse1")

_TYPES: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?"}
_WRITTEN = ("out", "workspace13", "workspace2", "index_workspace", "adapter_workspace")
# The slots of `scales`: these of each weight, then those of a quantized input, and of experts the
# parameters of their activations. The last ones are left out where there are none.
_SLOTS = ("scale", "zero_point", "global_scale", "channel_scale", "activation_scale")
_INPUT_SLOTS = ("scale", "global_scale")


def schema(args: Any) -> str:
    """Schema of an argument tuple, e.g. `(Tensor(a!) out, ..., str options) -> ()`."""
    parts = []
    for name, hint in get_type_hints(args, include_extras=True).items():
        if name in _WRITTEN:
            parts.append(f"Tensor({chr(ord('a') + _WRITTEN.index(name))}!) {name}")
        elif hint in _TYPES:
            parts.append(f"{_TYPES[hint]} {name}")
        elif hint == Scale and "Tensor?[] scales" not in parts:
            parts.append("Tensor?[] scales")
    return f"({', '.join(parts)}, str options) -> ()"


class Kind:
    """One of the three op families: its argument tuple, the checks of its fake and of its kernels,
    and its FLOP formula.
    """

    def __init__(
        self,
        args: Any,
        check: Callable,
        check_rows: Callable,
        check_sizes: Callable,
        flops: Callable,
    ):
        self.args, self.check = args, check
        self.check_rows, self.check_sizes, self.flops = check_rows, check_sizes, flops
        hints = list(get_type_hints(args, include_extras=True).items())
        scales = [i for i, (_, hint) in enumerate(hints) if hint == Scale]
        # five slots of w13, five of w2, two of the input, one of the activation
        self.first_scale, self.no_scales = scales[0], (None,) * len(scales)
        more = 1 if "activation_by_expert" in args._fields else 0
        self.left_out = {more, more + len(_INPUT_SLOTS)}

    def unpack(self, values: Sequence[Any]) -> Any:
        """The argument tuple of an op's positional arguments.

        Raises:
            ValueError: `scales` has a wrong number of slots, or `options` is not one of ours.
        """
        first = self.first_scale
        scales = values[first] or self.no_scales
        missing = len(self.no_scales) - len(scales)
        if missing:
            if missing not in self.left_out:
                whole = len(self.no_scales)
                taken = sorted({whole, *[whole - n for n in self.left_out]})
                raise ValueError(
                    f"scales must hold {' or '.join(map(str, taken))} slots, got {len(scales)} in "
                    "all"
                )
            scales = (*scales, *self.no_scales[:missing])
        return self.args._make(
            (*values[:first], *scales, *values[first + 1 : -1], *decode(values[-1]))
        )


KINDS = {
    "experts": Kind(
        ExpertsArgs, fake.check_experts, fake.rows_experts, fake.sizes_experts, flops.experts
    ),
    "batched_experts": Kind(
        BatchedExpertsArgs,
        fake.check_batched_experts,
        fake.rows_batched_experts,
        fake.sizes_batched_experts,
        flops.batched_experts,
    ),
    "grouped_linear": Kind(
        GroupedLinearArgs,
        fake.check_grouped_linear,
        fake.rows_grouped_linear,
        fake.sizes_grouped_linear,
        flops.grouped_linear,
    ),
}

# of calls of `experts` whose tokens have adapters
ADAPTED = Kind(
    AdaptedArgs,
    fake.check_adapted,
    fake.rows_adapted,
    fake.sizes_adapted,
    flops.adapted_experts,
)

# of calls of `experts` whose weights the operator finds (ops/resident.py)
RESIDENT = Kind(
    ResidentArgs,
    fake.check_resident,
    fake.rows_experts,
    fake.sizes_resident,
    lambda a, _: 2 * math.prod(a.topk_ids) * resident_of(a.options.resident).products_of_pair,
)


class _Bits(dict[str, fake.Bits]):
    """Scheme of a layer -> bits per element, from which unpacked column counts follow."""

    def __missing__(self, scheme: str) -> fake.Bits:
        w13, w2 = map(get_scheme, schemes_of_layer(scheme))
        descs = (w13.weight, w2.weight, w13.activation)
        self[scheme] = fake.Bits(*[8 if desc is None else desc.format.bits for desc in descs])
        return self[scheme]


_BITS = _Bits()


def register(backend: Backend) -> Backend:
    """Define `moe_ops::<name>_<kind>` for every kind in `backend.launch`.

    Returns:
        The backend with its `operators`. Its launcher of experts also serves calls with an
        exchange.

    Raises:
        ValueError: the name is not an identifier, or is taken; a kind of `launch` or a dispatch
            key of `devices` does not exist. Nothing has been defined then.
    """
    name, launch, devices = backend.name, backend.launch, backend.devices
    _check_new(name, launch, devices)
    if "experts" in launch and name != "auto":  # "auto" calls launchers that serve exchanges
        run = over_ranks(launch["experts"], backend.exchanges)
        launch = launch | {"experts": run}
    keys = (*devices, "CPU") if backend.library.interpreted else devices
    operators = {}
    for kind_name, function in launch.items():
        operators[kind_name] = operator(f"{name}_{kind_name}", KINDS[kind_name], function, keys)
    backend = replace(backend, launch=launch, operators=operators)
    if name != "auto":
        _registered.append(backend)
        RELAYOUTS[name] = backend.relayouts
    return backend


def operator(name: str, kind: Kind, launch: Callable, keys: Sequence[str]) -> Operator:
    """Define `moe_ops::<name>`, of one kind, which runs `launch` at these dispatch keys."""
    op = _define(name, schema(kind.args))
    kernels = {key.lower(): _entry(launch, kind, key, True) for key in keys}
    for key in keys:
        kernel = in_memory(_entry(launch, kind, key, False), name)
        LIB.impl(name, below_autograd(kernel), key)
    torch.library.register_fake(f"moe_ops::{name}", _fake(kind), lib=LIB)
    _count_flops(name, _flops(kind))
    return Operator(op, kernels)


def _check_new(name: str, launch: dict[str, Callable], devices: tuple[str, ...]) -> None:
    """Raise ValueError before anything is defined, because a definition cannot be undone."""
    if not isinstance(name, str) or not (name.isascii() and name.isidentifier()):
        raise ValueError(
            f"name must be an identifier, for operators are named after it, got {name!r}"
        )
    # the ops of "auto" exist from its registration on, though it is no entry of _registered
    taken = [kind for kind in KINDS if hasattr(torch.ops.moe_ops, f"{name}_{kind}")]
    if taken or any([backend.name == name for backend in _registered]):
        raise ValueError(f"name must be one that is not taken, got {name!r}")
    unknown = [kind for kind in launch if kind not in KINDS]
    if unknown or not launch:
        raise ValueError(
            f"launch must have kinds among {', '.join(KINDS)}; got {', '.join(unknown) or 'none'}"
        )
    missing = [key for key in devices if not hasattr(torch._C.DispatchKey, key)]
    if missing or isinstance(devices, str):
        raise ValueError(f"devices must be dispatch keys such as ('CPU', 'CUDA'); got {devices}")


_registered: list[Backend] = []


def registered() -> tuple[Backend, ...]:
    """All backends in order of registration."""
    return tuple(_registered)


def _define(
    name: str, signature: str, differentiable: bool = False, one_by_one: bool = False
) -> Any:
    LIB.define(name + signature)
    op = getattr(torch.ops.moe_ops, name).default
    LIB.impl(name, transforms.under_transforms(op, differentiable, one_by_one), transforms.KEY)
    return op


# without torch.cuda's check in each call that CUDA is initialised, which tensors on a GPU imply
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _entry(launch: Callable, kind: Kind, device: str, planned: bool) -> Callable:
    """The kernel of an op for tensors whose values lie in memory: checks of concrete sizes, then
    the launcher.

    Args:
        planned: the call comes from a plan, which has checked all sizes but the rows.
    """
    unpack, check_rows, check_sizes = kind.unpack, kind.check_rows, kind.check_sizes

    def run(*values: Any) -> None:
        args = unpack(values)
        check_rows(args)
        if not planned:
            check_sizes(args, _BITS[args.scheme])
        launch(args)

    def run_on_device(*values: Any) -> None:
        index = values[0].device.index
        if index == current_device():
            return run(*values)
        with torch.cuda.device(index):
            run(*values)

    return run_on_device if device == "CUDA" else run


# Reading a tangent makes a view, which fails where a mode excludes the dispatch key of views.
_WITH_VIEWS = functools.partial(
    torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.ADInplaceOrView, False
)


def in_memory(function: Callable, op_name: str) -> Callable:
    """`function`, which runs an op, with its inputs materialized in memory (ops/memory.py).
    Inputs with tangents are refused.
    """
    schema = getattr(torch.ops.moe_ops, op_name).default._schema
    inputs = [i for i, argument in enumerate(schema.arguments) if _is_input(argument)]
    names = [argument.name for argument in schema.arguments]

    def run(*values: Any) -> Any:
        flat: list = []
        for i in inputs:
            # `or ()`, because AOTInductor passes an empty list as None
            flat += (values[i] or ()) if names[i] == "scales" else (values[i],)
        if forward_ad._current_level >= 0:
            with _WITH_VIEWS():
                transforms.refuse_tangents(flat)
        if memory.addressable(flat):
            return function(*values)
        given = list(values)
        for i in inputs:
            if names[i] == "scales":
                scales = given[i] or ()
                given[i] = [
                    _materialized(_name_of_scale(op_name, k), scale)
                    for k, scale in enumerate(scales)
                ]
            else:
                given[i] = _materialized(names[i], given[i])
        return function(*given)

    return run


def _is_input(argument: Any) -> bool:
    """Whether an argument of a schema is a tensor, or a list of tensors, that is only read."""
    return "Tensor" in str(argument.type) and argument.alias_info is None


def _materialized(name: str, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else memory.materialized(name, tensor)


def _name_of_scale(op_name: str, index: int) -> str:
    """Name of an entry of `scales` in error messages."""
    linear, resident = op_name.endswith("grouped_linear"), op_name.startswith("resident")
    weights = ("weight",) if linear else () if resident else ("w13", "w2")
    all_slots = len(_SLOTS) * len(weights)
    if index >= all_slots + len(_INPUT_SLOTS):
        return "activation"
    if index >= all_slots:
        return f"{'x' if linear else 'hidden_states'}_{_INPUT_SLOTS[index - all_slots]}"
    weight, slot = divmod(index, len(_SLOTS))
    return f"{weights[weight]}'s {_SLOTS[slot]}"


def below_autograd(kernel: Callable) -> Callable:
    """`kernel` below autograd: it records nothing, also where a graph that was captured without
    gradients runs in grad mode.
    """

    def run(*values: Any) -> Any:
        if torch.is_grad_enabled():
            _warn_of_gradients(values)
        with torch._C._AutoDispatchBelowAutograd():
            return kernel(*values)

    return run


_warned = False


def _warn_of_gradients(values: Sequence[Any]) -> None:
    global _warned
    if not _warned and any([isinstance(t, Tensor) and t.requires_grad for t in values]):
        _warned = True
        warnings.warn(
            "a graph captured without gradients runs moe_ops operators on tensors that require "
            "them: none flow "
            "through these. Run it in torch.no_grad(), or capture it in grad mode to train it.",
            stacklevel=2,
        )


_ALWAYS = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_ALWAYS = _ALWAYS.add(torch._C.DispatchKey.ADInplaceOrView)
_UNUSUAL = ~_ALWAYS.raw_repr()


def nothing_listens() -> bool:
    """Whether the dispatcher would only call the kernel: no mode (FakeTensorMode, make_fx,
    FlopCounterMode, ...), torch.func transform or tracer is active in this thread. A profiler may
    be.
    """
    return torch._C._dispatch_tls_local_include_set().raw_repr() & _UNUSUAL == 0


def _fake(kind: Kind) -> Callable:
    def fake_kernel(*values: Any) -> None:
        args = kind.unpack(values)
        kind.check(args, _BITS[args.scheme])

    return fake_kernel


def _flops(kind: Kind) -> Callable:
    def formula(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
        args = kind.unpack(shapes)
        return kind.flops(args, _BITS[args.scheme])

    return formula


def _count_flops(op_name: str, formula: Callable) -> None:
    """Register an op's formula with torch.utils.flop_counter when somebody imports that module:
    its import is slow, and imports Triton.
    """

    def register() -> None:
        from torch.utils.flop_counter import register_flop_formula

        register_flop_formula(getattr(torch.ops.moe_ops, op_name))(formula)

    when_imported("torch.utils.flop_counter", register)


def register_function(
    name: str,
    signature: str,
    function: Callable,
    fake_function: Callable,
    derivative: tuple[Callable, Callable] | None = None,
    devices: tuple[str, ...] = ("CPU", "CUDA"),
    flops: Callable | None = None,
    one_by_one: bool = False,
) -> Callable:
    """Define `moe_ops::<name>`, an op outside of the three families: a router's, or training's.

    Args:
        signature: the schema after the name, e.g. "(Tensor x) -> Tensor".
        fake_function: the fake kernel.
        derivative: (backward, setup_context), as torch.library.register_autograd takes them.
        devices: dispatch keys for which `function` is the kernel.
        flops: formula in `meta.flops`; None for an op without matrix products.
        one_by_one: torch.func.vmap may run the op once for each entry of a batch. Not for void
            ops.
    """
    op = _define(name, signature, derivative is not None, one_by_one)
    kernel = in_memory(function, name)
    if derivative is None:
        kernel = below_autograd(kernel)
    for device in devices:
        LIB.impl(name, kernel, device)
    torch.library.register_fake(f"moe_ops::{name}", fake_function, lib=LIB)
    if flops is not None:
        _count_flops(name, flops)
    if derivative is not None:
        backward, save = derivative
        torch.library.register_autograd(f"moe_ops::{name}", backward, setup_context=save, lib=LIB)
    return op


def _no_part(weight: Tensor, name: str) -> Tensor:
    raise ValueError(f"weight must be a quantized weight, got a {type(weight).__name__}")


# One of the tensors inside a quantized weight, by name; the weight's class implements it. Read as
# an attribute it would be an input of its own to torch.compile, with the values from before any
# write to the weight (`copy_`, an operator on a view) in the same graph.
LIB.define("part(Tensor(a) weight, str name) -> Tensor(a)")
LIB.impl("part", _no_part, "CompositeExplicitAutograd")
part = torch.ops.moe_ops.part.default
