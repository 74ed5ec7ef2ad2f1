"""Adapters that PEFT puts on the experts' parameters (`target_parameters`), through moe_ops.

PEFT wraps the experts module once for each parameter. In a forward, a ParamWrapper replaces its
parameter by the sum of it and the product of the adapter's matrices: a tensor as large as all
experts, in a parametrization that torch.compile cannot trace. After `attach` it hands both
matrices to the experts instead, for as long as its forward runs. All else is PEFT's own: which
adapters are active, disabled or merged, and how they are saved.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from moe_ops import LoRA
from moe_ops.integrations.transformers.activations import ADAPTERS
from moe_ops.integrations.transformers.layers import Layer, is_wrapper


def attach_wrappers(model: nn.Module, layers: Sequence[Layer], implementation: str) -> set[str]:
    """Let the wrappers of these layers hand over their adapters; the names of layers that have
    wrappers.
    """
    found: set[str] = set()
    owners = {id(layer.owner): layer for layer in layers if layer.family is None}
    module: Any
    for module in model.modules():
        if not is_wrapper(module):
            continue
        layer = owners.get(id(module.get_base_layer()))
        if layer is not None and module.parameter_name in layer.weights:
            # a partial, as families.set_forward says
            module._activate_lora = functools.partial(_activate, module, implementation)
            setattr(layer.owner, ADAPTERS, ())  # from here on: graphs are guarded by it
            found.add(layer.name)
    return found


@contextmanager
def _activate(wrapper: Any, implementation: str, active: Sequence[str]) -> Iterator[None]:
    """ParamWrapper._activate_lora for experts that run through moe_ops, and its own for those
    whose implementation was changed since.
    """
    experts = wrapper.get_base_layer()
    if experts.config._experts_implementation != implementation:
        with type(wrapper)._activate_lora(wrapper, active):
            yield
        return
    outer = getattr(experts, ADAPTERS)
    own = [_adapter(wrapper, name) for name in active if name in wrapper.lora_A]
    setattr(experts, ADAPTERS, (*outer, *own))
    try:
        yield
    finally:
        setattr(experts, ADAPTERS, outer)


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
