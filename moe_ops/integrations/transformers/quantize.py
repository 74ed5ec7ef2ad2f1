"""Quantizing the experts of a model in place."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.utils import parametrize

from moe_ops import environment
from moe_ops.integrations.transformers import fp8, hook
from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.integrations.transformers.attach import attach
from moe_ops.integrations.transformers.config import MoeOpsConfig
from moe_ops.integrations.transformers.default_scheme import default_scheme
from moe_ops.integrations.transformers.hook import AttachReport, LayerReport
from moe_ops.integrations.transformers.layers import Layer
from moe_ops.integrations.transformers.quantizer import mark_quantized
from moe_ops.schemes import QuantScheme, get_scheme
from moe_ops.tensors import check_quantizable
from moe_ops.tensors import quantize as quantize_weight
from moe_ops.tensors.sharding import is_fsdp


def quantize(model: nn.Module, scheme: str | QuantScheme | None = None) -> AttachReport:
    """Quantize the expert weights of a model in place, and attach the model if it is not yet.

    All weights are checked before the first one changes: after a ValueError or RuntimeError the
    model is as it was before the call. Then each is replaced by an `ExpertTensor` parameter with
    requires_grad=False, one at a time, so that at most one weight exists twice; layers that share
    a parameter go on sharing. A parameter keeps the shape it had: where a family keeps (E,
    columns, rows), the quantized data lies as (E, rows, columns) under a transposed view. Two
    kinds are exceptions: weights (E * I, H) become (E, I, H), and a gate_up_proj with rows of
    identity experts, which nothing reads, loses those.

    Args:
        model: as for `attach`.
        scheme: as for `moe_ops.quantize`, but for those with static activation scales, which only
            its `activation_scale` can give ("fp8_tensor_static"). None: one of 8 bits that is fast
            on the machine of the experts, "fp8_block" on GPUs that multiply e4m3 and else
            "int8_w8a16:channel"; the report says which.

    Returns:
        The report of `attach`, whose checks were made before the weights were quantized. Of each
        layer it says the relative error |quantized - plain| / |plain| of the output on the same
        random tokens; `quantized` names the scheme, `bytes_before` and `bytes_after` the bytes of
        the weights that this process holds.

    Raises:
        ValueError: as `attach` and `moe_ops.quantize`, naming the parameter; also weights that are
            quantized already, carry adapters, or are not loaded (meta device); or no scheme is
            given where none is fast.
        RuntimeError: as `attach`.
    """
    layers = layers_of.find(model)
    pairs = [(layer, name) for layer in layers for name in layer.weights]
    why = ""
    if scheme is None:
        for layer, name in pairs:
            _check_plain(layer, name)
        chosen = default_scheme(layers)
        scheme, why = chosen.name, f", because {chosen.reason}"
    scheme = get_scheme(scheme)
    _ = scheme.quantized_weight  # raises for plain weights
    if scheme.activation is not None and scheme.activation.static:
        raise ValueError(
            f"scheme must not have static activation scales, got {scheme.name!r}: no model "
            "carries them; use 'fp8_tensor', whose scales come from the data of each call, or "
            "quantize each weight by moe_ops.quantize(weight, scheme, activation_scale=...)"
        )
    for layer, name in pairs:
        _check_quantizable(layer, name, scheme)
    report = attach(model)
    before = _held_bytes(pairs)
    todo = list(zip(layers, report.layers, strict=True))
    done: dict[int, nn.Parameter] = {}
    reports = [
        _quantize_layer(layer, checked, scheme, done)
        for layer, checked in environment.progress_bar(
            todo, f"quantizing experts to {scheme.name}"
        )
    ]
    mark_quantized(model, MoeOpsConfig(scheme))
    return replace(
        report,
        layers=tuple(reports),
        quantized=f"{scheme.name}{why}",
        bytes_before=before,
        bytes_after=_held_bytes(pairs),
    )


def is_experts(module: nn.Module) -> bool:
    """Whether a module is one MoE layer of a transformers model, as `attach` serves it."""
    return layers_of.layer_of("", module) is not None


def quantize_weights(module: nn.Module, scheme: str, name: str | None = None) -> None:
    """Quantize the experts of one MoE layer, all weights or the one of this name, and attach the
    layer.

    Raises:
        ValueError, RuntimeError: as `quantize`; the module is then as it was.
    """
    layer = layers_of.layer_of("", module)
    if layer is None:
        raise ValueError(f"module must be an MoE layer, got {type(module).__name__}")
    names = layer.weights if name is None else (name,)
    if not set(names) <= set(layer.weights):
        raise ValueError(f"name must be one of {layer.weights}, got {name!r}")
    for weight_name in names:
        _check_quantizable(layer, weight_name, get_scheme(scheme))
    if not any(fp8.is_quantized(layer.weight(n)) for n in layer.weights):
        attach(module)
    for weight_name in names:
        _quantize_weight(layer, weight_name, get_scheme(scheme), {})


def _quantize_layer(
    layer: Layer, checked: LayerReport, scheme: QuantScheme, done: dict[int, nn.Parameter]
) -> LayerReport:
    """Quantize the weights of a layer: the report of its check, with the error that this makes on
    the same tokens.
    """
    inputs = hook.probe(layer)
    plain, _, failed = _call(layer, inputs)
    for name in layer.weights:
        _quantize_weight(layer, name, scheme, done)
    quantized, operators, fails = _call(layer, inputs)
    error = None
    if plain is not None and quantized is not None:
        error = ((quantized - plain).norm() / plain.norm()).item()
        error = error if math.isfinite(error) else None
    after = f"error not measured{failed or fails}" if error is None else f"error {error:.2g} after"
    return replace(
        checked,
        runs=hook.plan_text(layer) or operators or hook.UNCHECKED,
        check=f"{checked.check}, before quantizing; {after}",
        error=error,
    )


def _call(layer: Layer, inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, str, str]:
    """The output for the tokens of the check, the operators that ran, and why there is no output.

    In the midst of a model's layers nothing is raised, which would leave it half quantized.
    """
    if is_fsdp(layer.owner):  # which wants the whole model to be called first
        return None, "", ""
    try:
        operators, output = hook.call(layer, inputs)
    except Exception as failed:
        return None, "", f": the layer fails: {failed}"
    return output.float(), operators, ""


def _held_bytes(pairs: list[tuple[Layer, str]]) -> int:
    """Bytes of these weights that this process holds; weights that are tied count once."""
    weights = {id(getattr(layer.owner, name)): layer.weight(name) for layer, name in pairs}
    return sum([weight.nbytes for weight in weights.values()])


def _quantize_weight(
    layer: Layer, name: str, scheme: QuantScheme, done: dict[int, nn.Parameter]
) -> None:
    layer.replace(name, lambda weight: quantize_weight(weight.contiguous(), scheme), done)


def _check_quantizable(layer: Layer, weight_name: str, scheme: QuantScheme) -> None:
    _check_plain(layer, weight_name)
    name = layer.parameter_name(weight_name)
    check_quantizable(name, layer.natural_weight(weight_name), scheme)


def _check_plain(layer: Layer, weight_name: str) -> None:
    name = layer.parameter_name(weight_name)
    # PEFT wraps the module, as "base_layer", and parametrizes its weights during the forward only
    if layer.wrapped or parametrize.is_parametrized(layer.owner, weight_name):
        raise ValueError(
            f"{name} must carry no adapter; quantize the model before adding adapters"
        )
    if layer.resident is not None:
        raise ValueError(
            f"{name} must be quantized before it is in host memory behind slots; load the model "
            "with MoeOpsConfig(scheme, gpu_memory=...)"
        )
    layer.check_fsdp(weight_name)
    weight = layer.weight(weight_name)
    if fp8.is_quantized(weight) or weight.element_size() == 1:
        if getattr(weight, "scheme", None) == "":  # plain, in a backend's layout
            raise ValueError(
                f"{name} must have its natural layout, got {weight.weight_layout!r}; bring it "
                "back by moe_ops.prepare(weight, 'torch') first"
            )
        what = getattr(weight, "scheme", weight.dtype)
        raise ValueError(
            f"{name} must be a plain tensor, got {what}: it is quantized already; for another "
            "scheme load a plain checkpoint, with quantization_config=MoeOpsConfig(scheme)"
        )
    if weight.device.type == "meta":
        raise ValueError(f"{name} must be loaded, got the meta device; quantize before offloading")
