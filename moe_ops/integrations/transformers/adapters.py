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
from typing import Any

from torch import nn

from moe_ops.autograd.adapters import LoRA
from moe_ops.integrations.transformers import families
from moe_ops.integrations.transformers.layers import Layer, is_wrapper


def attach_wrappers(model: nn.Module, layers: Sequence[Layer], implementation: str) -> set[str]:
    """Let the wrappers of these layers hand over their adapters; the names of layers that have
    wrappers.

    Raises:
        ValueError: a layer has wrappers and is spread over processes by expert parallelism.
    """
    found: set[str] = set()
    owners = {id(layer.owner): layer for layer in layers if layer.family is None}
    module: Any
    for module in model.modules():
        if not is_wrapper(module):
            continue
        layer = owners.get(id(module.get_base_layer()))
        if layer is not None and module.parameter_name in layer.weights:
            if getattr(layer.owner, "_is_expert_parallel", False):
                raise ValueError(
                    f"{layer.name} must hold all experts where PEFT has adapters on them, got "
                    "expert parallelism; spread the model by FSDP, or merge the adapters"
                )
            families.set_forward(module, functools.partial(_forward, implementation))
            found.add(layer.name)
    return found


def _forward(implementation: str, wrapper: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """ParamWrapper.forward where adapters are active on experts that run through moe_ops; else
    its own.
    """
    ours = wrapper.get_base_layer().config._experts_implementation == implementation
    idle = wrapper.disable_adapters or wrapper.merged
    if idle or not ours or kwargs.get("adapter_names") is not None:  # which it refuses
        return type(wrapper).forward(wrapper, x, *args, **kwargs)
    own = [_adapter(wrapper, name) for name in wrapper.active_adapters if name in wrapper.lora_A]
    kwargs["moe_ops_adapters"] = (*kwargs.get("moe_ops_adapters", ()), *own)
    return wrapper.base_layer(x, *args, **kwargs)


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
