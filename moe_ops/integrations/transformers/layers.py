"""Finding the MoE layers of a model, and reading and replacing their expert weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.integrations.transformers.activations import OPTIONS, PREFIX, turned
from moe_ops.integrations.transformers.families import OUTSIDE, Experts, HfModule, outside_of
from moe_ops.residency.holding import held_by
from moe_ops.tensors import ExpertTensor, sharding


@dataclass(frozen=True)
class Layer:
    """One MoE layer found in a model."""

    name: str  # module name in the model
    module: HfModule
    kind: Experts

    @property
    def on_hook(self) -> bool:
        """Whether it goes through transformers' experts hook."""
        return not self.kind.form

    @property
    def owner(self) -> HfModule:
        """The module that owns the weights."""
        if not self.kind.owner:
            return self.module
        owner = getattr(self.module, self.kind.owner)
        return owner.get_base_layer() if is_wrapper(owner) else owner

    @property
    def wrapped(self) -> bool:
        """Whether PEFT has wrapped the module that owns the weights."""
        inside = self.kind.owner
        wraps = bool(inside) and is_wrapper(getattr(self.module, inside))
        return wraps or "base_layer" in self.name.split(".")

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the expert weights in `owner`."""
        return self.kind.weights

    @property
    def biases(self) -> tuple[str, ...]:
        """Names of the experts' biases in `owner`, one for each weight, or none."""
        if not getattr(self.owner, "has_bias", False):
            return ()
        return tuple([f"{name}_bias" for name in self.weights])

    def held(self) -> dict[str, nn.Parameter]:
        """The owner's parameters that have rows for each expert, by name."""
        return {name: getattr(self.owner, name) for name in (*self.weights, *self.biases)}

    @property
    def resident(self) -> Any:
        """The ResidentExperts of a layer whose weights are in host memory, else None."""
        held = held_by(self.owner)
        return None if held is None else held.resident

    @property
    def device(self) -> torch.device:
        """Where the layer runs."""
        return (
            self.weight(self.weights[0]).device
            if self.resident is None
            else (torch.device(self.resident.device))
        )

    def parameter_name(self, name: str) -> str:
        """The name in the model of one of `weights`."""
        return ".".join(filter(None, (self.name, self.kind.owner, name)))

    def columns_first(self, name: str) -> bool:
        """Whether the module keeps this weight as (E, columns, rows)."""
        return name in self.kind.columns_first

    @property
    def joined(self) -> int:
        """E where the owner keeps plain weights as (E * rows, columns), else 0."""
        return getattr(self.owner, self.kind.joined) if self.kind.joined else 0

    @property
    def real(self) -> int | None:
        """The number of experts that have weights, if the owner keeps rows, which nothing reads,
        for others too.
        """
        return getattr(self.owner, self.kind.real) if self.kind.real else None

    @property
    def sharded(self) -> bool:
        """Whether this process holds some of the experts."""
        return sharding.is_sharded(getattr(self.owner, self.weights[0]))

    def weight(self, name: str) -> Any:  # an ExpertTensor has attributes of its own
        """One of `weights`, of the experts that this process holds."""
        return sharding.local_part(getattr(self.owner, name)).detach()

    def experts(self, name: str) -> range | None:
        """Ids of the experts that this process holds of a weight that is sharded."""
        weight = getattr(self.owner, name)
        if not sharding.is_sharded(weight):
            return None
        return sharding.local_experts(weight, self.parameter_name(name))

    @property
    def columns(self) -> int:
        """Size of the experts' input."""
        return self.natural_weight(self.weights[0]).shape[-1]

    @property
    def top_k(self) -> int:
        """Experts of a token, as the owner's configuration says."""
        return self.top_k_in(self.owner.config)

    def top_k_in(self, config: Any) -> int:
        """Experts of a token, as a configuration says, which may say it layer by layer; 1 where
        it does not.
        """
        names = ("num_experts_per_tok", "top_k_experts", "moe_topk")
        found: Any = next(filter(None, [getattr(config, name, None) for name in names]), 1)
        if isinstance(found, int):
            return found
        numbers = [int(part) for part in self.name.split(".") if part.isdigit()]
        return found[numbers[0]] if numbers and numbers[0] < len(found) else max(found)

    def natural_weight(self, name: str) -> Tensor:
        """A weight as (E, rows, columns), a view, of the experts that this process holds."""
        weight = self.weight(name)
        if weight.dim() == 2:
            weight = weight.view(self.joined, -1, weight.shape[1])
        weight = weight[: self.real]
        return turned(weight) if self.columns_first(name) else weight

    def check_fsdp(self, name: str) -> None:
        """Raise ValueError if FSDP could not gather a weight that `set_weight` put here."""
        if sharding.fsdp_has_run(self.owner):
            raise ValueError(
                f"{self.parameter_name(name)} must be quantized before its model is first called "
                "under FSDP, which keeps buffers of the plain weight's size; load it again"
            )
        if sharding.is_fsdp(self.owner) and self.columns_first(name):
            raise ValueError(
                f"{self.parameter_name(name)} must not be quantized under FSDP, which takes no "
                "transposed views, as this family keeps its experts; spread the model by tp_size "
                "and ep_size alone"
            )

    def set_weight(self, name: str, weight: Tensor) -> None:
        """Replace a weight by one given as (E, rows, columns), frozen; one that is sharded, by
        this process's part.
        """
        self.check_fsdp(name)
        weight = turned(weight) if self.columns_first(name) else weight
        if self.joined and not isinstance(weight, ExpertTensor):
            weight = weight.flatten(0, 1)  # saved ones too
        weight = sharding.sharded_like(weight, getattr(self.owner, name))
        setattr(self.owner, name, nn.Parameter(weight, requires_grad=False))
        sharding.renew_fsdp(self.owner)

    def replace(
        self, name: str, function: Callable[[Any], Tensor], done: dict[int, nn.Parameter]
    ) -> None:
        """Replace a weight by what ``function`` makes of it, both (E, rows, columns). ``done`` has
        the new parameters by the ids of the old ones: layers that shared one go on sharing.
        """
        old = id(getattr(self.owner, name))
        if old not in done:
            self.set_weight(name, function(self.natural_weight(name)))
            done[old] = getattr(self.owner, name)
            return
        setattr(self.owner, name, done[old])
        sharding.renew_fsdp(self.owner)


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's ParamWrapper: by name, for PEFT need not be installed."""
    names = [(cls.__module__.partition(".")[0], cls.__name__) for cls in type(module).__mro__]
    return ("peft", "ParamWrapper") in names


def layer_of(name: str, module: HfModule) -> Layer | None:
    """The MoE layer that a module is, if it is one that we serve."""
    kind = outside_of(module)
    if kind is None and hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
        weights = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        kind = Experts(weights=weights, columns_first=weights if module.is_transposed else ())
    return None if kind is None else Layer(name, module, kind)


def find(model: nn.Module) -> list[Layer]:
    """The MoE layers of a model.

    Raises:
        ValueError: it is no module, there are none, or only some that nothing here can serve.
    """
    from moe_ops.nn.layer import MoELayer  # with all that sends tokens between ranks

    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found, unknown, ours = [], [], []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, MoELayer):
            ours.append(name or "model")
        layer = layer_of(name, module)
        if layer is not None:
            found.append(layer)
        elif re.search(r"Experts|MoE|Moe|Sparse.*MLP", kind) and name:
            unknown.append(f"{name} ({kind})")
    if found:
        return found
    if ours:
        raise ValueError(
            f"model must have MoE layers of transformers, got {', '.join(ours[:3])} (MoELayer), "
            "which runs through moe_ops as it is; layer.quantize(scheme) quantizes it"
        )
    if unknown:
        raise ValueError(
            "model must have MoE layers on transformers' experts hook (the decorator "
            f"use_experts_implementation) or of {', '.join(OUTSIDE)}; got "
            f"{', '.join(unknown[:3])}; call moe_ops.fused_experts in that module's forward "
            "instead"
        )
    raise ValueError(f"model must contain MoE layers, got {type(model).__name__} without any")


def snapshot(model: nn.Module, layers: list[Layer]) -> Callable[[], None]:
    """A function that undoes all that attaching changes: forwards, backends, experts
    implementations.
    """
    objects: dict[int, tuple[Any, tuple[str, ...]]] = {}
    for layer in layers:
        for module in (layer.module, layer.owner):
            ours = [PREFIX + name for name in OPTIONS]
            objects[id(module)] = (module, ("forward", "_old_forward", "extra_repr", *ours))
    configs = [getattr(module, "config", None) for module in model.modules()]
    while configs:
        config = configs.pop()
        if not hasattr(config, "__dict__") or id(config) in objects:
            continue
        # transformers keeps the name under the second; a stand-in without its property has the
        # first
        names = ("_experts_implementation", "_experts_implementation_internal")
        objects[id(config)] = (config, names)
        configs += [getattr(config, key, None) for key in getattr(config, "sub_configs", ())]
    saved = [
        (vars(thing), names, {name: vars(thing)[name] for name in names if name in vars(thing)})
        for thing, names in objects.values()
    ]

    def undo() -> None:
        for attributes, names, values in saved:
            for name in names:
                attributes.pop(name, None)
            attributes.update(values)

    return undo
