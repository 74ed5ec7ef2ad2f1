"""Adapters that PEFT puts on the experts' parameters (`target_parameters`), through moe_ops.

PEFT wraps the experts module once for each parameter. In a forward, a ParamWrapper replaces its
parameter by the sum of it and the product of the adapter's matrices: a tensor as large as all
experts, in a parametrization that torch.compile cannot trace. After `attach` it hands both
matrices to the experts instead, as an argument of their call: a module keeps nothing of one,
where calls of other threads would find it. All else is PEFT's own: which adapters are active,
disabled or merged, and how they are saved.

A batch whose rows have different adapters (`adapter_names`), which PEFT refuses for parameters,
hands over a stack of all of them and the one of each token. The stack is a copy, which is kept
until an adapter changes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from moe_ops.autograd.adapters import LoRA
from moe_ops.autograd.stack import LoRAStack
from moe_ops.integrations.transformers.activations import Mixture
from moe_ops.integrations.transformers.layers import Layer, is_wrapper


def attach_wrappers(model: nn.Module, layers: Sequence[Layer], implementation: str) -> set[str]:
    """Let the wrappers of these layers hand over their adapters; the names of layers that have
    wrappers.

    Raises:
        ValueError: a layer has wrappers and is spread over processes by expert parallelism.
    """
    found: set[str] = set()
    for layer, module in wrappers_of(model, layers):
        if layer.resident is not None:
            raise ValueError(
                f"{layer.name} must hold its experts itself where PEFT has adapters on them, "
                "got experts in host memory; adapt other parts of the model alone"
            )
        if getattr(layer.owner, "_is_expert_parallel", False):
            raise ValueError(
                f"{layer.name} must hold all experts where PEFT has adapters on them, got "
                "expert parallelism; spread the model by FSDP, or merge the adapters"
            )
        module._activate_lora = functools.partial(_activate, implementation, module)
        module.forward = _forward
        hooks = module._forward_pre_hooks.values()
        if not any([getattr(hook, "func", None) is _hand_over for hook in hooks]):
            hook = functools.partial(_hand_over, implementation)
            module.register_forward_pre_hook(hook, with_kwargs=True)
        found.add(layer.name)
    return found


def wrappers_of(model: nn.Module, layers: Sequence[Layer]) -> list[tuple[Layer, Any]]:
    """PEFT's wrappers of these layers' weights, each beside its layer."""
    owners = {id(layer.owner): layer for layer in layers if layer.on_hook}
    found = []
    module: Any
    for module in filter(is_wrapper, model.modules()):
        layer = owners.get(id(module.get_base_layer()))
        if layer is not None and module.parameter_name in layer.weights:
            found.append((layer, module))
    return found


def _hand_over(
    implementation: str, wrapper: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Before a wrapper's forward: the wrapper, and its adapters behind those of the wrappers
    around it. The hook gets the module that is called, also where that is DataParallel's replica
    of another.
    """
    here = _runs_here(wrapper, implementation)
    kwargs = kwargs | {"moe_ops_wrapper": wrapper, "moe_ops_here": here}
    if not here or wrapper.disable_adapters or wrapper.merged:
        return args, kwargs
    own = [adapter_of(wrapper, name) for name in wrapper.active_adapters if name in wrapper.lora_A]
    handed = kwargs.get("moe_ops_adapters", ())
    return args, kwargs | {"moe_ops_adapters": (*handed, *own)}


def _activate(
    implementation: str, wrapper: Any, active: Sequence[str]
) -> AbstractContextManager[None]:
    """ParamWrapper._activate_lora for experts that run through moe_ops, whose weights stay as they
    are, and its own for those whose implementation was changed since.
    """
    if _runs_here(wrapper, implementation):
        return nullcontext()
    return type(wrapper)._activate_lora(wrapper, active)


def _runs_here(wrapper: Any, implementation: str) -> bool:
    return wrapper.get_base_layer().config._experts_implementation == implementation


def adapter_of(wrapper: Any, name: str) -> LoRA:
    """One of a wrapper's adapters. PEFT keeps lora_A as (E * r, columns), the expert slowest, and
    lora_B as (rows, r * E), the expert fastest, however the module lays out its parameter.
    """
    a, b, E = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    a = a.view(E, -1, a.shape[1])  # (E, r, columns)
    b = b.view(b.shape[0], -1, E).permute(2, 0, 1)  # (E, rows, r)
    scale = wrapper.scaling[name]
    if wrapper.parameter_name == "down_proj":
        return LoRA(None, None, a, b, scale)
    return LoRA(a, b, None, None, scale)


class _Handed(NamedTuple):
    """What wrappers around one another hand over of a mixed batch."""

    names: tuple[str, ...]  # of the adapters, in the order of the stack
    matrices: dict[str, Tensor]


BASE = "__base__"  # PEFT's name for rows without an adapter


class OfTokens:
    """In the place of `adapter_names`: adapters of tokens, not of rows."""

    def __init__(self, names: tuple[str, ...], ids: Tensor):
        self.names, self.ids = names, ids  # (M,) places among the names, -1 for none


def _forward(
    x: Tensor,  # (M, H)
    *args: Any,
    moe_ops_wrapper: Any,
    moe_ops_here: bool,
    adapter_names: Sequence[str] | OfTokens | None = None,
    moe_ops_handed: _Handed | None = None,
    **kwargs: Any,
) -> Any:
    """A wrapper's forward: PEFT's own, but for a mixed batch. The hook before it has said which
    wrapper this is.
    """
    wrapper = moe_ops_wrapper
    if adapter_names is None or not moe_ops_here:
        named = {} if adapter_names is None else {"adapter_names": adapter_names}
        return type(wrapper).forward(wrapper, x, *args, **named, **kwargs)
    kwargs.pop("moe_ops_adapters", None)  # those of an unmixed batch
    inner = wrapper.base_layer
    if wrapper.disable_adapters:
        return inner(x, *args, **kwargs)
    if wrapper.merged:
        names = adapter_names.names if isinstance(adapter_names, OfTokens) else adapter_names
        raise ValueError(
            "adapter_names must be left out while adapters are merged, got "
            f"{sorted(set(names))}; call unmerge_adapter() before"
        )
    handed = moe_ops_handed or _Handed(tuple(wrapper.lora_A), {})
    a, b = _stacked(wrapper, handed.names, x)
    suffix = "2" if wrapper.parameter_name == "down_proj" else "13"
    handed.matrices.update({f"a{suffix}": a, f"b{suffix}": b})
    if is_wrapper(inner):
        return inner(x, *args, moe_ops_handed=handed, **kwargs)
    found = [handed.matrices.get(name) for name in LoRAStack._fields[:4]]
    scales = torch.ones(len(handed.names), device=x.device)  # the matrices hold theirs
    ids = _ids_of_tokens(handed.names, adapter_names, x)
    mixture = Mixture(LoRAStack._make([*found, scales]), ids)
    return inner(x, *args, moe_ops_adapters=mixture, **kwargs)


class _Copied(NamedTuple):
    """A stack, and of what it is a copy."""

    names: tuple[str, ...]
    scales: tuple[float | None, ...]
    weights: tuple[ReferenceType[Tensor], ...]
    versions: tuple[int, ...]
    a: Tensor  # (n, E, r, columns)
    b: Tensor  # (n, E, rows, r), times the adapters' scales

    def is_of(
        self, names: tuple[str, ...], scales: tuple, weights: list[Tensor], dtype: torch.dtype
    ) -> bool:
        """Whether nothing has changed since."""
        return (
            (self.names, self.scales, self.a.dtype) == (names, scales, dtype)
            and len(self.weights) == len(weights)
            and all([held() is t for held, t in zip(self.weights, weights, strict=True)])
            and self.versions == tuple([t._version for t in weights])
        )


_stacks: WeakKeyDictionary[nn.Module, _Copied] = WeakKeyDictionary()


@torch.compiler.disable  # which would take the copy of one wrapper for that of others, too
@torch.no_grad()
def _stacked(wrapper: Any, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, Tensor]:
    """(n, E, r, columns) and (n, E, rows, r) of all adapters of a wrapper, copied anew when one of
    them has changed. Scales are in the second.
    """
    parameter, here = wrapper.get_param(), [name for name in names if name in wrapper.lora_A]
    plain = not getattr(parameter, "scheme", "") and parameter.dtype.itemsize > 1
    dtype = parameter.dtype if plain else x.dtype
    scales = tuple([wrapper.scaling.get(name) for name in names])
    weights = [of[name].weight for name in here for of in (wrapper.lora_A, wrapper.lora_B)]
    known = _stacks.get(wrapper)
    if known is None or not known.is_of(names, scales, weights, dtype):
        adapters = {name: adapter_of(wrapper, name) for name in here}
        second = wrapper.parameter_name == "down_proj"
        pairs: dict[str, Any] = {n: one[2:4] if second else one[:2] for n, one in adapters.items()}
        (E, _, columns), (_, rows, _) = [t.shape for t in pairs[here[0]]]
        rank = max([a.shape[1] for a, _ in pairs.values()])
        first = x.new_zeros(len(names), E, rank, columns, dtype=dtype)
        last = x.new_zeros(len(names), E, rows, rank, dtype=dtype)
        for name, (a, b) in pairs.items():
            slot, r = names.index(name), a.shape[1]
            wide = torch.promote_types(b.dtype, torch.float32)
            first[slot, :, :r].copy_(a)
            last[slot, :, :, :r].copy_(b.to(wide) * adapters[name].scale)
        held, versions = tuple(map(ref, weights)), tuple([t._version for t in weights])
        known = _stacks[wrapper] = _Copied(names, scales, held, versions, first, last)
    return known.a, known.b


@functools.lru_cache(maxsize=64)
def _ids(slots: tuple[int, ...], each: int, device: torch.device) -> Tensor:
    """(M,): kept, because a copy to the device would wait in every layer and step."""
    return torch.tensor(slots, device=device).repeat_interleave(each)


def _ids_of_tokens(names: tuple[str, ...], of_rows: Sequence[str] | OfTokens, x: Tensor) -> Tensor:
    """The slot of each token's adapter, -1 for none: tokens of a row of the batch follow one
    another.
    """
    if isinstance(of_rows, OfTokens):
        if of_rows.names != names:
            raise ValueError(
                f"adapters must be those of the manager, {', '.join(of_rows.names)}, got "
                f"{', '.join(names)}; make a new manager once adapters have changed"
            )
        return of_rows.ids
    (M, _), rows = x.shape, len(of_rows)
    if not rows or M % rows:
        raise ValueError(
            "adapter_names must have one name for each row of the batch, of as many tokens each, "
            f"got {rows} names for {M} tokens; rows that are packed into one have one adapter"
        )
    unknown = sorted({name for name in of_rows if name not in names and name != BASE})
    if unknown:
        raise ValueError(
            f"adapter_names must be among {', '.join(names)} and {BASE}, got {', '.join(unknown)}"
        )
    slots = tuple([-1 if name == BASE else names.index(name) for name in of_rows])
    return _ids(slots, M // rows, x.device)
