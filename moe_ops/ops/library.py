"""The op schemas and `register`: the only place that talks to torch.library.

Each op's arguments are a NamedTuple (ops/args.py); its schema is generated from it, launchers and
fakes get an instance. Ops are void: they write `out` and the workspaces and nothing else.

The dispatcher takes 0.2 us an argument to hand them to Python, so the schema gathers what would be
many: fields that are `Scale` travel as one `Tensor?[] scales`, empty for plain weights, and fields
that are no tensors as one `str options`, a Python dict as it prints. A call of `fused_experts` has
14 arguments then and not 29: 5.3 us and not 10.2 on one machine.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
from torch import Tensor

from moe_ops.meta import fake
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs, GroupedLinearArgs, Scale
from moe_ops.ops.problem import Machine, Problem, Workspaces
from moe_ops.ops.relayout import RELAYOUTS, Relayout
from moe_ops.schemes import SCHEMES, get_scheme

LIB = torch.library.Library("moe_ops", "DEF")


_TYPES: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?"}


_WRITTEN = ("out", "workspace13", "workspace2", "index_workspace")


def schema(args: Any) -> str:
    """The schema string of an argument tuple, e.g. `(Tensor(a!) out, ..., str options) -> ()`."""
    parts = []
    for name, hint in get_type_hints(args, include_extras=True).items():
        if name in _WRITTEN:
            parts.append(f"Tensor({chr(ord('a') + _WRITTEN.index(name))}!) {name}")
        elif hint in _TYPES:
            parts.append(f"{_TYPES[hint]} {name}")
        elif hint == Scale and "Tensor?[] scales" not in parts:
            parts.append("Tensor?[] scales")
    return f"({', '.join(parts)}, str options) -> ()"


_INPUT_SCALES = 2  # slots of an input that arrives quantized: its scales, and the global one


class Kind:
    """One of the three op families: its arguments, the fake's checks and the kernel's."""

    def __init__(self, args: Any, check: Callable, check_rows: Callable):
        self.args, self.check, self.check_rows = args, check, check_rows
        hints = list(get_type_hints(args, include_extras=True).items())
        scales = [i for i, (_, hint) in enumerate(hints) if hint == Scale]
        self.first_scale, self.no_scales = scales[0], (None,) * len(scales)
        # w13 and w2 have their slots one after the other, five each; two of the input follow
        self.weights = 2 if "w2" in args._fields else 1
        self.weight_scales = len(scales) - _INPUT_SCALES
        self.options = tuple([name for name, hint in hints if hint in (str, float, bool)])
        self.defaults = tuple(args._field_defaults.items())

    def unpack(self, values: Sequence[Any]) -> Any:
        """The argument tuple of an op's arguments."""
        first = self.first_scale
        scales = values[first] or self.no_scales
        if len(scales) != len(self.no_scales):
            scales = self._fill(scales)
        options = _parse_options(values[-1], self.options, self.defaults)
        return self.args._make((*values[:first], *scales, *values[first + 1 : -1], *options))

    def _fill(self, scales: Sequence[Tensor | None]) -> list[Tensor | None]:
        """All scales of a list without those of the input, which are left out where it arrives
        unquantized. A program that was exported when a weight had fewer slots has what each weight
        had: None is in the slots that were added behind.
        """
        not_quantized = (None,) * _INPUT_SCALES
        if len(scales) == self.weight_scales:
            return [*scales, *not_quantized]
        slots = self.weight_scales // self.weights
        each, rest = divmod(len(scales), self.weights)
        if rest or each > slots:
            raise ValueError(
                f"scales must hold the same number of slots for each of {self.weights} weights, "
                f"at most {slots}, and the {_INPUT_SCALES} of the input or none; got "
                f"{len(scales)} in all"
            )
        filled: list[Tensor | None] = []
        for start in range(0, len(scales), each):
            filled += [*scales[start : start + each], *[None] * (slots - each)]
        return [*filled, *not_quantized]


KINDS = {
    "experts": Kind(ExpertsArgs, fake.check_experts, fake.rows_experts),
    "batched_experts": Kind(
        BatchedExpertsArgs, fake.check_batched_experts, fake.rows_batched_experts
    ),
    "grouped_linear": Kind(GroupedLinearArgs, fake.check_grouped_linear, fake.rows_grouped_linear),
}


# scheme -> bits of a stored element of weights, and of activations that arrive quantized: how many
# columns the data stand for
_BITS = {
    name: (scheme.weight.format.bits, scheme.activation.format.bits if scheme.activation else 8)
    for name, scheme in SCHEMES.items()
    if scheme.weight
}
_BYTES = (8, 8)  # of plain weights


_OPTIONS = {name: kind.options for name, kind in KINDS.items()}  # for traced code


def options_text(kind: str, values: Sequence[Any]) -> str:
    """The `options` argument of an op: values of the fields that are no tensors, in order."""
    names = _OPTIONS[kind]
    return "{" + ", ".join([f"'{n}': {v!r}" for n, v in zip(names, values, strict=True)]) + "}"


@functools.lru_cache(maxsize=4096)
def _parse_options(
    text: str, names: tuple[str, ...], defaults: tuple[tuple[str, Any], ...]
) -> tuple:
    """The options in the order of `names`; those with a default may be missing, in programs that
    were exported before they existed.
    """
    try:
        given = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        given = None
    options = dict(defaults) | given if isinstance(given, dict) else {}
    if set(options) != set(names):
        raise ValueError(f"options must be a dict of {', '.join(names)}; got {text}")
    # Kernels are compiled for a whole number as for a constant: 1 and 1.702 would not be told
    # apart.
    values = [options[name] for name in names]
    return tuple([float(v) if type(v) is int else v for v in values])


@dataclass(frozen=True)
class Backend:
    """One registered backend. `launch` and `ops` are keyed by `Problem.kind`."""

    name: str
    available: Callable[[], str | None]  # None, or why not and what to install
    supports: Callable[[Problem, Machine], list[str]]  # reasons why not; empty means yes
    workspace_shapes: Callable[[int, Problem], Workspaces]  # first argument: M (or T, or S)
    launch: dict[str, Callable]
    ops: dict[str, Callable]
    kernels: dict[
        str, dict[str, Callable]
    ]  # kind -> device type -> what the dispatcher calls there
    differentiable: bool = False
    native_schemes: tuple[str, ...] = ()  # schemes run without dequantizing to a wider product
    interpreted: bool = False  # on a CPU: by an interpreter, for tests; never chosen by "auto"
    native_capability: tuple[int, int] = (0, 0)  # least one that multiplies fp8 activations
    # what `moe_ops.warmup` enters around a call of so many rows: there a library may tune, and
    # save what it found
    warm: Callable[[int], AbstractContextManager] | None = None
    relayouts: tuple[Relayout, ...] = ()  # what `prepare` can do for it
    distribution: str = ""  # what pip calls its library
    # rows an expert has on average from which "auto" takes it where nothing was measured; None:
    # never for that
    faster_from: Callable[[Problem], int | None] | None = None
    # kernels of its own that it must do without here, and why: `explain` says so
    missing_kernels: Callable[[Problem, Machine], list[str]] | None = None
    # schemes of which it takes an input that arrives quantized
    quantized_input: tuple[str, ...] = ()

    def native(self, scheme: str, machine: Machine) -> bool:
        """Whether products on `machine` are those of the scheme's own formats, not emulated."""
        if not scheme:
            return True
        if scheme not in self.native_schemes:
            return False
        activation = get_scheme(scheme).activation
        if activation is None or activation.dtype == "int8":  # any tensor core multiplies int8
            return True
        return not machine.capability < self.native_capability  # Dynamo of torch 2.11 has no >=


def register(
    name: str,
    *,
    available: Callable[[], str | None],
    supports: Callable[[Problem, Machine], list[str]],
    workspace_shapes: Callable[[int, Problem], Workspaces],
    launch: dict[str, Callable],
    devices: tuple[str, ...],
    differentiable: bool = False,
    native_schemes: tuple[str, ...] = (),
    interpreted: bool = False,
    native_capability: tuple[int, int] = (0, 0),
    warm: Callable[[int], AbstractContextManager] | None = None,
    relayouts: tuple[Relayout, ...] = (),
    distribution: str = "",
    faster_from: Callable[[Problem], int | None] | None = None,
    missing_kernels: Callable[[Problem, Machine], list[str]] | None = None,
    quantized_input: tuple[str, ...] = (),
) -> Backend:
    """Define `moe_ops::<name>_<kind>` for every kind in `launch` and return the backend.

    Args:
        launch: kind -> function of one argument tuple; imports its library when first called.
        devices: dispatch keys that have a kernel ("CPU", "CUDA"). Fakes serve every other purpose,
            so that a missing kernel is an error and not a silent use of the fake.
        warm: see `Backend`. What it saves goes below `environment.cache_folder()`.
        relayouts, distribution, faster_from, missing_kernels, quantized_input: see `Backend`.

    Raises:
        ValueError: `name` is no identifier, or taken; a kind of `launch` or a key of `devices`
            does not exist. Nothing is defined then.
    """
    _check_new(name, launch, devices)
    ops, kernels = {}, {}
    for kind_name, function in launch.items():
        kind = KINDS[kind_name]
        op_name = f"{name}_{kind_name}"
        LIB.define(op_name + schema(kind.args))
        keys = (*devices, "CPU") if interpreted else devices
        kernels[kind_name] = {key.lower(): _entry(function, kind, key) for key in keys}
        for key in keys:
            LIB.impl(op_name, below_autograd(kernels[kind_name][key.lower()]), key)
        torch.library.register_fake(f"moe_ops::{op_name}", _fake(kind), lib=LIB)
        ops[kind_name] = getattr(torch.ops.moe_ops, op_name).default
    backend = Backend(
        name,
        available,
        supports,
        workspace_shapes,
        launch,
        ops,
        kernels,
        differentiable,
        native_schemes,
        interpreted,
        native_capability,
        warm,
        relayouts,
        distribution,
        faster_from,
        missing_kernels,
        quantized_input,
    )
    if name != "auto":
        _registered.append(backend)
        RELAYOUTS[name] = relayouts
    return backend


def _check_new(name: str, launch: dict[str, Callable], devices: tuple[str, ...]) -> None:
    """Raise ValueError before anything is defined: operators cannot be taken back."""
    if not isinstance(name, str) or not (name.isascii() and name.isidentifier()):
        raise ValueError(
            f"name must be an identifier, for operators are named after it, got {name!r}"
        )
    # "auto" is registered once, by this package, and its operators are there from then on
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
    """All backends in the order of their registration."""
    return tuple(_registered)


# where tensors are on a GPU, there is no need to ask whether CUDA is initialised, 0.3 us each time
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _entry(launch: Callable, kind: Kind, device: str) -> Callable:
    """The dispatcher's entry: checks on real sizes, then the launcher."""
    unpack, check_rows = kind.unpack, kind.check_rows

    def run(*values: Any) -> None:
        args = unpack(values)
        check_rows(args, *_BITS.get(args.scheme, _BYTES))
        launch(args)

    def run_on_device(*values: Any) -> None:
        index = values[0].device.index
        if index == current_device():
            return run(*values)
        with torch.cuda.device(index):
            run(*values)

    return run_on_device if device == "CUDA" else run


def below_autograd(kernel: Callable) -> Callable:
    """`kernel` for the dispatcher: it records nothing, in a graph captured without gradients and
    run with them.
    """

    def run(*values: Any) -> None:
        if torch.is_grad_enabled():
            _warn_of_gradients(values)
        with torch._C._AutoDispatchBelowAutograd():
            kernel(*values)

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


def dispatcher_is_idle() -> bool:
    """Whether the dispatcher would take an op on plain tensors to its kernel and do nothing else.

    So it is outside of modes (FakeTensorMode, make_fx, FlopCounterMode, ...), transforms
    (torch.func), tracers and profilers.
    """
    keys = torch._C._dispatch_tls_local_include_set().raw_repr()
    return keys & _UNUSUAL == 0 and not torch.autograd._profiler_enabled()


def _fake(kind: Kind) -> Callable:
    def fake_kernel(*values: Any) -> None:
        args = kind.unpack(values)
        kind.check(args, *_BITS.get(args.scheme, _BYTES))

    return fake_kernel


def register_function(
    name: str,
    signature: str,
    function: Callable,
    fake_function: Callable,
    derivative: tuple[Callable, Callable] | None = None,
    devices: tuple[str, ...] = ("CPU", "CUDA"),
) -> Callable:
    """Define `moe_ops::<name>`, an op outside the three families (router, training products).

    Args:
        signature: schema behind the name, e.g. "(Tensor x) -> Tensor".
        fake_function: its fake kernel.
        derivative: backward and setup_context, as torch.library.register_autograd takes them.
        devices: dispatch keys that run `function`.
    """
    LIB.define(name + signature)
    for device in devices:
        LIB.impl(name, function, device)
    torch.library.register_fake(f"moe_ops::{name}", fake_function, lib=LIB)
    if derivative is not None:
        backward, save = derivative
        torch.library.register_autograd(f"moe_ops::{name}", backward, setup_context=save, lib=LIB)
    return getattr(torch.ops.moe_ops, name).default
