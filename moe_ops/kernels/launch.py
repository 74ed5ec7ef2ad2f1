"""Launching Triton kernels: named arguments, the specialization key that follows from them,
kernels kept compiled.

A kernel's arguments are one class beside it, decorated with `arguments`. Its fields, with those of
the groups in it, are the kernel's parameters, in order; how each is annotated says what the kernel
is compiled anew for:

    Pointer      a tensor or None: for its dtype, for whether it is None, and for an alignment
                 below 16 bytes
    Address      a tensor or None, of any alignment: for its dtype and for whether it is None
    Descriptor   a tensor descriptor: for its dtype, box and layout
    Specialized  an integer on which Triton specializes (1, multiples of 16): for each value
    Runtime      a number that depends on the number of tokens or on the routing tensors: never.
                 Integers are below 2^31, which is not checked: each call would pay for it
    Constant     a tl.constexpr: for each value
"""

from __future__ import annotations

import importlib
import operator
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import (
    Annotated,
    Any,
    NamedTuple,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

from moe_ops import environment

# programmatic dependent launch: a kernel can start while the one before it ends
PDL_CAPABILITY = (9, 0)
NATIVE_CAPABILITY = (8, 9)  # e4m3 products and conversions
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

Pointer = Annotated[Tensor | None, "pointer"]
Address = Annotated[Tensor | None, "address"]
Descriptor = Annotated[Any, "descriptor"]
Specialized = Annotated[int, "specialized"]
Runtime = Annotated[int, "runtime"]
RuntimeFloat = Annotated[float, "runtime"]
Constant = Annotated[Any, "constant"]
_ROLES = ("pointer", "address", "descriptor", "specialized", "runtime", "constant")


def _positions(roles: Sequence[str], *wanted: str) -> Callable[[tuple], tuple]:
    """A function from an argument tuple to the tuple of the arguments that have one of these
    roles.
    """
    found = [i for i, role in enumerate(roles) if role in wanted]
    if len(found) > 1:
        return operator.itemgetter(*found)
    return operator.itemgetter(slice(found[0], found[0] + 1) if found else slice(0))


def _members(name: str, hint: Any) -> Iterator[tuple[str, str]]:
    """(parameter, role) of each parameter that a field stands for."""
    if get_origin(hint) is Annotated:
        role = get_args(hint)[1]
        if role not in _ROLES:
            raise TypeError(
                f"{name} must be annotated as one of {', '.join(_ROLES)}, got {role!r}"
            )
        pointer = role in ("pointer", "address") and name != "ptr" and not name.endswith("_ptr")
        yield name + "_ptr" * pointer, role
        return
    if not (isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")):
        raise TypeError(
            f"{name} must be annotated with a role or a NamedTuple of such, got {hint}"
        )
    prefix = f"{name}_" if getattr(hint, "PREFIXED", True) else ""  # False: see `unprefixed`
    for member, inner in get_type_hints(hint, include_extras=True).items():
        yield from _members(prefix + member, inner)


T = TypeVar("T")


def unprefixed(group: type[T]) -> type[T]:
    """Decorate a group (a NamedTuple) whose parameters have its fields' names, without a
    prefix.
    """
    group.PREFIXED = False  # type: ignore[attr-defined]
    return group


@dataclass_transform(kw_only_default=True)
def arguments(cls: type[T]) -> type[T]:
    """Decorate the class of a kernel's arguments: a function that takes its fields by keyword and
    returns them flat.

    A field is annotated with a role (above), or with a group: a NamedTuple of such fields. The
    parameters of a group `x` with the fields `ptr` and `stride_m` are `x_ptr` and `x_stride_m`;
    those of a group that is decorated with `unprefixed` have their fields' names. Pointers end in
    `_ptr`.

    What is returned is a function, not a class, with the attributes `names` and `roles` of the
    kernel's parameters: calling a class by keyword builds a dictionary in every call.
    """
    fields = get_type_hints(cls, include_extras=True)
    members = [pair for name, hint in fields.items() for pair in _members(name, hint)]
    names, roles = zip(*members, strict=True)
    if len(set(names)) < len(names):
        raise TypeError(f"{cls.__name__} must name each parameter once, got {names}")
    flat = [name if get_origin(hint) is Annotated else f"*{name}" for name, hint in fields.items()]
    make: Any = eval(f"lambda *, {', '.join(fields)}: ({', '.join(flat)},)")  # as namedtuple does
    make.__name__ = make.__qualname__ = cls.__name__
    make.__module__, make.__doc__ = cls.__module__, cls.__doc__
    make.names, make.roles = names, roles
    return make


class Kernel:
    """A jitted function, its arguments, and which of these it is specialized on."""

    __slots__ = (
        "addresses",
        "arguments",
        "asserts",
        "constants",
        "descriptors",
        "function",
        "pdl_first",
        "pointers",
        "waits",
    )

    def __init__(
        self,
        function: Any,
        arguments: Any,
        pdl_first: bool,
        waits: bool = True,
        asserts: bool = False,
    ):
        roles = arguments.roles
        # whether it executes gdc_wait: only such a kernel may start before its predecessor ends
        self.waits = waits and "PDL" in arguments.names
        self.function, self.arguments, self.pdl_first = function, arguments, pdl_first
        self.asserts = asserts
        self.constants = _positions(roles, "specialized", "constant")
        self.pointers = _positions(roles, "pointer")
        self.addresses = _positions(roles, "address") if "address" in roles else None
        self.descriptors = _positions(roles, "descriptor") if "descriptor" in roles else None

    @property
    def name(self) -> str:
        """The name that profilers show."""
        return self.function.__name__

    def __repr__(self) -> str:
        return f"Kernel({self.name})"


def kernel(
    arguments: Any,
    *,
    pdl_first: bool = False,
    waits: bool = True,
    asserts: bool = False,
    jit: Callable | None = None,
) -> Callable[[Callable], Kernel]:
    """Decorate a kernel: jit it, and check its parameters against its arguments.

    Args:
        pdl_first: use programmatic dependent launch even if this is the first kernel of a call.
            Such a kernel executes gdc_wait before anything else, because the kernel before the
            call belongs to somebody else. When that kernel ends, ours is already resident. (One
            token of the mixed GEMM loses by it, because the second kernel then starts later.)
            gdc_wait covers the direct predecessor alone: if that kernel was itself launched early,
            it must have waited for its own predecessor, as programmatic dependent launch demands.
        waits: the kernel executes gdc_wait, if it has the argument PDL. One that does not is never
            launched early: it only lets its successor be.
        asserts: its device assertions are compiled in.
        jit: triton.jit (the default) or gluon.jit.

    Raises:
        TypeError: the kernel's parameters are not those of `arguments`, in order, or the wrong
            ones are tl.constexpr.
    """
    names, roles = arguments.names, arguments.roles
    runtime = [n for n, role in zip(names, roles, strict=True) if role in ("runtime", "address")]

    def decorate(function: Callable) -> Kernel:
        if jit is None:
            import triton

            jitted = triton.jit(function, do_not_specialize=runtime)
        else:
            jitted = jit(function, do_not_specialize=runtime)
        code = function.__code__
        found = code.co_varnames[: code.co_argcount]
        if found != names:
            at = next(
                (i for i, pair in enumerate(zip(found, names, strict=False)) if len({*pair}) > 1),
                min(len(found), len(names)),
            )
            raise TypeError(
                f"{function.__name__} must have the parameters of {arguments.__name__}, in order: "
                f"parameter {at} must be {(*names, 'absent')[at]}, got {(*found, 'none')[at]}"
            )
        for name, role in zip(names, roles, strict=True):
            constexpr = "constexpr" in str(function.__annotations__.get(name, ""))
            if constexpr != (role == "constant"):
                raise TypeError(
                    f"{function.__name__}: {name} must{'' if role == 'constant' else ' not'} be "
                    f"tl.constexpr, as {arguments.__name__} has it as {role}"
                )
        return Kernel(jitted, arguments, pdl_first, waits, asserts)

    return decorate


class Launch(NamedTuple):
    """One kernel launch."""

    kernel: Kernel
    grid: tuple[int, int, int]
    args: Any  # the tuple that the kernel's `arguments` class returns
    num_warps: int = 4
    maxnreg: int | None = None  # at most so many registers a thread

    def named(self) -> dict[str, Any]:
        """The arguments by the names of the kernel's parameters."""
        return dict(zip(self.kernel.arguments.names, self.args, strict=True))


class Gpu(NamedTuple):
    """Facts of a GPU on which configs and kernels depend. The defaults are those of an H200."""

    shared_memory: int  # bytes that one block may use
    native: bool  # it has e4m3 products and conversions
    pdl: bool  # it has programmatic dependent launch
    name: str = ""  # the measured tables are looked up by it
    multiprocessors: int = 132
    multiprocessor_memory: int = 228 * 1024  # bytes of shared memory of a multiprocessor
    registers: int = 65536  # of a multiprocessor

    @property
    def has_tma(self) -> bool:
        """Whether it has the tensor memory accelerator, as GPUs whose blocks may use so much
        shared memory do.
        """
        return self.shared_memory > 200 * 1024


@cache
def gpu(device: int) -> Gpu:
    """Facts of a device that torch calls "cuda". Without one (-1: the interpreter), the shared
    memory of an H200 and no e4m3.
    """
    if device < 0:
        return Gpu(227 * 1024, False, False)
    properties: Any = torch.cuda.get_device_properties(device)
    capability, gfx = environment.gpu_architecture(properties)
    sizes = {"multiprocessors": properties.multi_processor_count, "name": properties.name}
    if gfx:  # its e4m3 has other values, and PDL is NVIDIA's
        return Gpu(properties.shared_memory_per_block, False, False, **sizes)
    return Gpu(
        properties.shared_memory_per_block_optin,
        capability >= NATIVE_CAPABILITY,
        capability >= PDL_CAPABILITY,
        multiprocessor_memory=properties.shared_memory_per_multiprocessor,
        registers=properties.regs_per_multiprocessor,
        **sizes,
    )


# specialization of a call's kernels -> the compiled kernels; warm calls fill it
_compiled: dict[tuple, tuple] = {}
_driver: Any = None  # Triton's, once a kernel was compiled: no import in each call


def compiled() -> list[Any]:
    """Triton's compiled kernels that calls have launched."""
    return [binary for binaries in tuple(_compiled.values()) for binary in binaries]


def _specialization(launches: Sequence[Launch], device: int) -> tuple:
    """Key of a call's compiled kernels: everything that they are specialized on."""
    key: list = [device]
    pointers: list = []
    for kernel, _, args, num_warps, maxnreg in launches:
        key.append((kernel, num_warps, maxnreg, kernel.constants(args)))
        pointers += kernel.pointers(args)
        if kernel.addresses is not None:
            key += [None if t is None else t.dtype for t in kernel.addresses(args)]
        if kernel.descriptors is not None:
            for d in kernel.descriptors(args):
                if d is None:
                    key.append(None)
                else:  # each layout is made once and kept; hashing one takes time, its id none
                    key += (d.base.dtype, *d.block_shape, id(getattr(d, "layout", None)))
    bits = 0
    for tensor in pointers:
        if tensor is None:
            key.append(None)
        else:
            key.append(tensor.dtype)
            bits |= tensor.data_ptr()
    if bits % 16:  # rare
        key += [-1 if tensor is None else tensor.data_ptr() % 16 for tensor in pointers]
    return tuple(key)


class _Thread(threading.local):
    has_context = False


thread = _Thread()


def make_context_current() -> None:
    """Let CUDA's runtime make its context current in this thread, as its first call does.

    The driver encodes tensor maps in a context alone. A new thread has none, and where a backward
    pass begins with a product, nothing was called before it in autograd's thread.
    """
    if torch.cuda.is_initialized():
        torch.cuda.mem_get_info()
        thread.has_context = True


class NotCompiledError(RuntimeError):
    """A CUDA graph is being captured and a call's kernels were never compiled."""


def run(launches: Sequence[Launch], device: int, gpu: Gpu) -> None:
    """Launch kernels in order.

    Compiled kernels are kept and launched directly. So a call never compiles by accident during
    the capture of a CUDA graph, and Triton's own look-up at every launch is skipped.

    Raises:
        NotCompiledError: a CUDA graph is being captured and this specialization never ran before.
    """
    global _driver
    if not thread.has_context:
        make_context_current()
    key = _specialization(launches, device)
    compiled = _compiled.get(key)
    if compiled is not None:
        stream = _driver.active.get_current_stream(device)
        for binary, (_, grid, args, _, _) in zip(compiled, launches, strict=True):
            binary[grid](*args, stream=stream)
        return
    if device >= 0 and torch.cuda.is_current_stream_capturing():
        raise NotCompiledError(
            "moe_ops backend 'triton' has no compiled kernel for this call and cannot compile one "
            "while a CUDA graph is captured; warm up first: call the same function once with "
            "tensors of these shapes, dtypes and strides outside of torch.cuda.graph(...), or use "
            "moe_ops.warmup, then capture"
        )
    compiled = tuple([_start(launch, i == 0, gpu) for i, launch in enumerate(launches)])
    if not INTERPRETED:
        from triton.runtime import driver

        _driver = driver  # first: another thread may find the kernels at once
        _compiled[key] = compiled


def _start(launch: Launch, first: bool, gpu: Gpu) -> Any:
    """Compile and launch one kernel. Returns the compiled kernel."""
    # Triton 3.9 warns where fusion into FMA is not asked for, since 3.10 changes the default.
    options: dict[str, Any] = {"num_warps": launch.num_warps, "enable_fp_fusion": True}
    early = gpu.pdl and launch.kernel.waits and (not first or launch.kernel.pdl_first)
    if early or launch.named().get("BESIDE"):  # gdc_wait_at_the_end
        options["launch_pdl"] = True
    if launch.kernel.asserts:
        options |= {"debug": True, "sanitize_overflow": False}
    if launch.maxnreg is not None:
        options["maxnreg"] = launch.maxnreg
    return launch.kernel.function[launch.grid](*launch.args, **options)


class Lazy:
    """A function named "module:function"; its module is imported at the first call."""

    __slots__ = ("function", "name")

    def __init__(self, name: str):
        self.name = name
        self.function: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is None:
            self.function = self.resolve()
        return self.function(*args, **kwargs)

    def resolve(self) -> Any:
        """The function itself."""
        module, _, name = self.name.partition(":")
        return getattr(importlib.import_module(module), name)
