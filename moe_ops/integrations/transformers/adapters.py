"""Adapters that PEFT puts on the experts' parameters (`target_parameters`), through moe_ops.

PEFT wraps the experts module once for each parameter. In a forward, a ParamWrapper replaces its
parameter by the sum of it and the product of the adapter's matrices: a tensor as large as all
experts, in a parametrization that torch.compile cannot trace. After `attach` it hands both
matrices to the experts instead, as an argument of their call: a module keeps nothing of one,
where calls of other threads would find it. All else is PEFT's own: which adapters are active,
disabled or merged, and how they are saved.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from moe_ops.autograd.adapters import LoRA
from moe_ops.integrations.transformers.layers import Layer, is_wrapper


def attach_wrappers(model: nn.Module, layers: Sequence[Layer], implementation: str) -> set[str]:
    """Let the wrappers of these layers hand over their adapters; the names of layers that have
    wrappers.

    Raises:
        ValueError: a layer has wrappers and is spread over processes by expert parallelism.
    """
    found: set[str] = set()
    owners = {id(layer.owner): layer for layer in layers if layer.on_hook}
    module: Any
    for module in model.modules():
        if not is_wrapper(module):
            continue
        layer = owners.get(id(module.get_base_layer()))
        if layer is not None and module.parameter_name in layer.weights:
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
            hooks = module._forward_pre_hooks.values()
            if not any([getattr(hook, "func", None) is _hand_over for hook in hooks]):
                hook = functools.partial(_hand_over, implementation)
                module.register_forward_pre_hook(hook, with_kwargs=True)
            found.add(layer.name)
    return found


def _hand_over(
    implementation: str, wrapper: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Before a wrapper's forward: its adapters behind those of the wrappers around it. The hook
    gets the module that is called, also where that is DataParallel's replica of another.
    """
    if not _runs_here(wrapper, implementation) or wrapper.disable_adapters or wrapper.merged:
        return None
    own = [_adapter(wrapper, name) for name in wrapper.active_adapters if name in wrapper.lora_A]
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


def _adapter(wrapper: Any, name: str) -> LoRA:
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
