"""warmup(): compile, load and tune everything that expert layers need before a capture or a
measurement.

A layer is warmed up by running it once for each number of tokens, on random hidden states, with
its own router and weights. So the kernels, tiers and specialisations are those of real calls. The
calls of a backend run inside its `Library.warm` (ops/backend), the only place where its library
may tune.
"""

from __future__ import annotations

import enum
import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ops import environment
from moe_ops.activations import Activation
from moe_ops.planning.auto import served_by

if TYPE_CHECKING:
    from moe_ops.bundle.warm import BundleReport

_LOCK = threading.RLock()  # libraries compile and tune for one thread at a time


@dataclass(frozen=True)
class WarmCall:
    """One call of a layer."""

    num_tokens: int
    backends: tuple[str, ...]  # those that ran its operators, in order
    seconds: float  # including compiling, loading and tuning


@dataclass(frozen=True)
class WarmLayer:
    """One layer that was run, on behalf of all layers like it."""

    name: str  # module name in the model
    alike: int  # number of layers that it represents, including itself
    calls: tuple[WarmCall, ...]  # by number of tokens

    def __str__(self) -> str:
        others = f" and {self.alike - 1} like it" if self.alike > 1 else ""
        lines = [f"{self.name}{others}"]
        for call in self.calls:
            ran = ", ".join(call.backends) or "no operator of moe_ops"
            lines.append(f"  M = {call.num_tokens}: {ran}, {call.seconds:.2f} s")
        return "\n".join(lines)


@dataclass(frozen=True)
class WarmupReport:
    """The result of `warmup`; str() has a line for each layer and number of tokens."""

    layers: tuple[WarmLayer, ...]
    bundle: BundleReport | None = None  # what `save` wrote

    @property
    def seconds(self) -> float:
        """Sum over all calls."""
        return sum([call.seconds for layer in self.layers for call in layer.calls])

    def __str__(self) -> str:
        lines = [*map(str, self.layers), f"{self.seconds:.1f} s in all"]
        return "\n".join(lines + ([str(self.bundle)] if self.bundle else []))


@dataclass
class Subject:
    """Something to warm: `run(M)` makes the calls of M tokens; subjects of one `key` are alike."""

    name: str
    run: Callable[[int], object]
    key: object = None
    alike: int = 1


def warmup(
    model_or_layer: nn.Module | Callable[[int], object],
    token_counts: Iterable[int],
    *,
    dtype: torch.dtype | None = None,
    show_progress: bool = True,
    save: str | os.PathLike[str] | None = None,
) -> WarmupReport:
    """Compile, load and tune everything that expert layers need for these numbers of tokens.

    Afterwards a step of so many tokens can be captured in a CUDA graph without a previous run.
    Compiled and tuned results are kept on disk (docs/backends.md says where), so that the next
    process warms up in seconds. Of layers with the same shapes, strides, dtypes, scheme,
    activation and device only one is run.

    Args:
        model_or_layer: a module that is or contains expert layers: `MoELayer`, or transformers'
            MoE blocks whose experts run on moe_ops (`experts_implementation="moe_ops"` or
            `attach`). For other calls a function of the number of tokens that makes them, with
            the dtypes and strides of the real ones:
            `warmup(lambda M: moe_ops.fused_experts(x[:M], w13, w2, weights[:M], ids[:M]), (1,
            8))`.
        token_counts: the numbers of tokens M, batch x length, of the steps to come.
        dtype: dtype of the hidden states; None for that of the weights. If the steps run under
            torch.autocast, call this under it too.
        show_progress: show a progress bar on a terminal, if tqdm is installed.
        save: a file into which all that this process has compiled so far is then written, by
            `save_warm`, for `load_warm` in a later process. What torch.compile makes of the model
            is part of it if compiled steps ran before, or the function given runs them.

    Returns:
        A report, which prints what ran on which backend and how long it took, and what was saved.

    Raises:
        ValueError: no expert layer runs on moe_ops, weights are not loaded, a token count is not
            a positive integer, dtype is not a floating-point torch.dtype, or save names no file
            in a folder that can be written.
        OSError: the file cannot be written.
        RuntimeError: a CUDA graph is being captured, or a graph is being traced.

    Threads that call it take turns. No thread may capture meanwhile, since it synchronises the
    device. If layers communicate, all ranks must call it.
    """
    from moe_ops.bundle.warm import check_target, save_warm

    if torch.compiler.is_compiling():
        raise RuntimeError(
            "moe_ops.warmup must run before torch.compile traces, got a call inside"
        )
    _check_state()
    counts = _checked_counts(token_counts)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be None or a floating torch.dtype, got {dtype!r}")
    if save is not None:
        check_target("save", save)
    if isinstance(model_or_layer, nn.Module):
        subjects = _subjects(model_or_layer, dtype)
    elif callable(model_or_layer) and not isinstance(model_or_layer, type):
        name = getattr(model_or_layer, "__name__", type(model_or_layer).__name__)
        subjects = [Subject(name, model_or_layer)]
    else:
        got = type(model_or_layer).__name__
        several = "; torch.nn.ModuleList holds several layers" * isinstance(
            model_or_layer, (list, tuple)
        )
        if isinstance(model_or_layer, type):
            got = f"the class {model_or_layer.__name__}; pass an instance of it"
        raise ValueError(
            "model_or_layer must be a torch.nn.Module or a function of the number of tokens, "
            f"got {got}{several}"
        )
    # the largest first: smaller calls then find memory that fits them
    work = [(subject, M) for subject in subjects for M in reversed(counts)]
    calls: dict[str, list[WarmCall]] = {subject.name: [] for subject in subjects}
    with _LOCK, torch.no_grad():
        for subject, M in environment.progress_bar(work, "warming up") if show_progress else work:
            calls[subject.name].append(_call(subject, M))
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # workspaces of the largest M
    return WarmupReport(
        tuple([WarmLayer(s.name, s.alike, tuple(reversed(calls[s.name]))) for s in subjects]),
        None if save is None else save_warm(save),
    )


class _Warming(TorchDispatchMode):
    """Runs each backend's operators inside its `Library.warm`, and records the backends."""

    def __init__(self) -> None:
        super().__init__()
        self.backends: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        served = served_by(func, args) if func.namespace == "moe_ops" else None
        if served is not None:
            backend, rows = served
            self.backends[backend.name] = None
            if backend.library.warm is not None:
                with backend.library.warm(rows):
                    func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _call(subject: Subject, num_tokens: int) -> WarmCall:
    start = time.perf_counter()
    with _Warming() as warming:
        subject.run(num_tokens)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return WarmCall(num_tokens, tuple(warming.backends), time.perf_counter() - start)


def _check_state() -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "moe_ops.warmup must not be called while a CUDA graph is captured; call it before "
            "torch.cuda.graph(...)"
        )
    if get_proxy_mode() is not None or isinstance(torch.empty(0), FakeTensor):
        raise RuntimeError("moe_ops.warmup must run on real tensors, got a call that is traced")


def _checked_counts(token_counts: Iterable[int]) -> list[int]:
    """Ascending, each once."""
    counts = set()
    for count in token_counts if isinstance(token_counts, Iterable) else (token_counts,):
        try:
            number = 0 if isinstance(count, bool) else operator.index(count)
        except TypeError:
            number = 0
        if number < 1:
            raise ValueError(f"token_counts must be positive integers, got {count!r}")
        counts.add(number)
    if not counts:
        raise ValueError("token_counts must hold at least one number of tokens, got none")
    return sorted(counts)


def _subjects(model: nn.Module, dtype: torch.dtype | None) -> list[Subject]:
    """The expert layers of a model, one of each kind.

    Raises:
        ValueError: there are none, or their weights are not loaded.
    """
    found: dict[object, Subject] = {}
    for subject in _find(model, dtype):
        first = found.setdefault(subject.key, subject)
        if first is not subject:
            first.alike += 1
    if not found:
        raise ValueError(
            f"model_or_layer must contain expert layers that run through moe_ops, got "
            f"{type(model).__name__} "
            "without any; on a transformers model call moe_ops.integrations.transformers.attach "
            "first, and for calls "
            "of your own pass a function of the number of tokens"
        )
    return list(found.values())


def _find(model: nn.Module, dtype: torch.dtype | None) -> Iterator[Subject]:
    from moe_ops.nn.layer import MoELayer

    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            yield of_module(name, module, _runner(module, dtype))
    for find in _FINDERS:
        yield from find(model, dtype)


_Finder = Callable[[nn.Module, torch.dtype | None], Iterable[Subject]]
_FINDERS: list[_Finder] = []


def register_finder(find: _Finder) -> None:
    """Let `warmup` find the layers of another library: those that `find(model, dtype)` yields."""
    if find not in _FINDERS:
        _FINDERS.append(find)


def _runner(layer: Any, dtype: torch.dtype | None) -> Callable[[int], object]:
    weight = layer.gate.weight

    def run(num_tokens: int) -> object:
        size = (num_tokens, layer.hidden_size)
        x = random_tokens(size, dtype or weight.dtype, weight.device)
        if getattr(layer, "adapters", None) is not None:  # calls of tokens that have them
            layer._routed(x, torch.zeros(num_tokens, dtype=torch.int64, device=x.device))
        return layer._routed(x)

    return run


def random_tokens(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Unit-scale hidden states, drawn without touching torch's own generators."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(size, generator=generator, device=device).to(dtype)


def of_module(name: str, module: nn.Module, run: Callable[[int], object]) -> Subject:
    """The Subject of a layer.

    Raises:
        ValueError: its weights are not loaded, or are fake.
    """
    name = name or type(module).__name__
    for parameter in module.parameters():
        if parameter.is_meta or isinstance(parameter, FakeTensor):
            raise ValueError(
                f"model_or_layer must have its weights loaded, got {name} with weights on the "
                f"meta device or fake; "
                "load them (load_state_dict, from_pretrained) first"
            )
    return Subject(name, run, _facts(module))


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, enum.Enum, Activation, FunctionType)


def _facts(module: nn.Module) -> tuple:
    """What two layers must have in common for one to represent both."""
    facts: list[object] = [module.training]
    for name, part in module.named_modules():
        # a layer's own place in the model says nothing of its kernels
        settings = {
            k: v for k, v in vars(part).items() if isinstance(v, _PLAIN) and "layer" not in k
        }
        facts += (name, type(part), *sorted(settings.items()))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        facts += (name, *_tensor_facts(tensor))
    return tuple(facts)


def _tensor_facts(tensor: Tensor) -> tuple:
    facts: tuple = (type(tensor), tensor.shape, tensor.dtype, tensor.device)
    if getattr(tensor, "scheme", None) is None:
        # a DTensor has no address
        address = tensor.data_ptr() % 16 if type(tensor) in (Tensor, nn.Parameter) else 0
        return (*facts, tensor.stride(), address)
    quantized: Any = tensor
    names = (*quantized.tensor_data_names, *quantized.optional_tensor_data_names)
    parts = [getattr(quantized, name) for name in names]
    facts += (quantized.scheme, quantized.weight_layout)
    return (*facts, *[None if part is None else _tensor_facts(part) for part in parts])
