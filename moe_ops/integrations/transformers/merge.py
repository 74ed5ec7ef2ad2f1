"""merge_adapters(): PEFT's adapters on quantized experts, merged by quantizing the sums."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.integrations.transformers.adapters import adapter_of, wrappers_of
from moe_ops.integrations.transformers.config import MoeOpsConfig
from moe_ops.integrations.transformers.layers import Layer
from moe_ops.integrations.transformers.quantizer import mark_quantized
from moe_ops.schemes import QuantScheme, get_scheme
from moe_ops.tensors import ExpertTensor, quantize


@dataclass(frozen=True)
class MergedWeight:
    """One weight of experts.

    Attributes:
        name: of the parameter in the model.
        scheme: of the merged weight.
        error: |merged - sum| / |sum|, where the sum is that of the weight before and of what the
            adapters add to it.
        change_error: |merged - sum| / |what the adapters add|: from 1 on, as much is lost as was
            learned. NaN where the adapters add nothing.
    """

    name: str
    scheme: str
    error: float
    change_error: float

    def __str__(self) -> str:
        error = self.change_error
        lost = "the adapters add nothing"
        if not math.isnan(error):
            lost = f"{error:.2g} of what the adapters add"
        return f"{self.name} -> {self.scheme}: error {self.error:.2g} of the sum, {lost}"


@dataclass(frozen=True)
class MergeReport:
    """The result of `merge_adapters`; str() has one line for each weight."""

    weights: tuple[MergedWeight, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.weights))


def merge_adapters(model: nn.Module, scheme: str | QuantScheme | None = None) -> MergeReport:
    """Merge the active adapters on quantized experts: each weight becomes the sum of its values
    and of what the adapters add, quantized again. All checks are made before the first weight
    changes.

    PEFT counts these adapters as merged. `model.merge_and_unload()` merges those on other layers
    and returns the model without adapters. The adapters cannot be taken out again, nor disabled:
    both then raise ValueError.

    The weights before are levels of their scheme, so that what adapters add is lost where it is
    less than half the step to the next one: the report says how much that is. A scheme of more
    bits keeps it, and so do adapters that are not merged.

    Args:
        model: a PEFT model whose experts are quantized.
        scheme: of the merged weights, as for `moe_ops.quantize`; None: the scheme that each has.

    Raises:
        ValueError: no active adapter on quantized experts; adapters that are not finite; experts
            that are spread over processes; a scheme that does not fit a weight.
    """
    found = [
        (layer, wrapper)
        for layer, wrapper in wrappers_of(model, layers_of.find(model))
        if isinstance(layer.weight(wrapper.parameter_name), ExpertTensor) and _active(wrapper)
    ]
    if not found:
        raise ValueError(
            "model must have active adapters on quantized experts, got none; plain weights are "
            "merged by model.merge_and_unload()"
        )
    wanted = None if scheme is None else get_scheme(scheme)
    for layer, wrapper in found:
        _check(layer, wrapper, wanted)
    merged = tuple([_merge(layer, wrapper, wanted) for layer, wrapper in found])
    if wanted is not None:
        # a saved model is in one scheme, or says of none and each weight has its own
        schemes = {
            getattr(layer.weight(name), "scheme", "")
            for layer in layers_of.find(model)
            for name in layer.weights
        }
        mark_quantized(model, MoeOpsConfig(wanted if schemes == {wanted.name} else None))
    return MergeReport(merged)


def _active(wrapper: Any) -> list[str]:
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    return [name for name in names if name not in wrapper.merged_adapters]


def _check(layer: Layer, wrapper: Any, scheme: QuantScheme | None) -> None:
    name = layer.parameter_name(wrapper.parameter_name)
    if layer.sharded:
        raise ValueError(
            f"{name} must be whole to merge adapters into it, got a part of it on each process"
        )
    for adapter in _active(wrapper):
        a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ValueError(f"adapter {adapter!r} of {name} must be finite, got inf or NaN")
    if scheme is not None:
        if scheme.activation is not None and scheme.activation.static:
            raise ValueError(f"scheme must not have static activation scales, got {scheme.name!r}")
        reason = scheme.why_not_shape(*layer.natural_weight(wrapper.parameter_name).shape[1:])
        if reason:
            raise ValueError(f"{name} cannot have scheme {scheme.name!r}: {reason}")


def _merge(layer: Layer, wrapper: Any, scheme: QuantScheme | None) -> MergedWeight:
    name, active = wrapper.parameter_name, _active(wrapper)
    before: Any = layer.natural_weight(name)
    change = torch.zeros(before.shape, device=before.device)
    for adapter in active:
        a13, b13, a2, b2, scale = adapter_of(wrapper, adapter)
        a, b = (a2, b2) if a13 is None else (a13, b13)
        assert a is not None and b is not None
        change.baddbmm_(b.detach().float(), a.detach().float(), alpha=scale)
    total = before.dequantize(torch.float32).add_(change)
    same = scheme is None or scheme.name == before.scheme
    weight = quantize(
        total.to(before.dtype),
        before.scheme if scheme is None else scheme,
        activation_scale=before.activation_scale if same else None,
    )
    layer.replace(name, lambda _: weight, {})
    wrapper.merged_adapters.extend(active)
    # PEFT's own would forget that they are merged before it fails to subtract them
    wrapper.unmerge = functools.partial(_refuse_unmerge, layer.parameter_name(name))
    off = weight.dequantize(torch.float32).sub_(total).norm()
    error, change_error = off / total.norm(), off / change.norm()
    return MergedWeight(
        layer.parameter_name(name),
        weight.scheme,
        error.nan_to_num(0.0).item(),  # of weights that are zero
        change_error.item() if change.any() else math.nan,
    )


def _refuse_unmerge(name: str) -> NoReturn:
    raise ValueError(
        f"{name} must have no merged adapter to take out or disable, got one that merge_adapters "
        "merged, which rounds; load the model and its adapters again"
    )
