"""Running one layer after the other through moe_ops, with a check of each and a report."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ops import environment
from moe_ops.activations import Activation
from moe_ops.experts import explain
from moe_ops.integrations.transformers import activations as hf_activations
from moe_ops.integrations.transformers import adapters, forwards, fp8
from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.integrations.transformers.families import HfModule
from moe_ops.integrations.transformers.layers import Layer
from moe_ops.integrations.transformers.sizes import size_text
from moe_ops.tensors.sharding import is_fsdp, local_part

NAME = "moe_ops"
UNCHECKED = "backend chosen when first called"


@dataclass(frozen=True)
class LayerReport:
    """The result for one MoE layer."""

    name: str  # module name in the model
    family: str  # class of the module
    path: str  # which functions of moe_ops
    activation: str  # ours, or the module's own
    runs: str  # the backends by number of tokens M, or the operators that ran in the check
    check: str  # largest difference from the module's own forward, or why there was no check
    # by `quantize`: how far quantized weights move the output for the tokens of the check
    error: float | None = None  # |quantized - plain| / |plain|, None where it was not measured

    def __str__(self) -> str:
        runs = f"{self.path}, {self.activation}, {self.runs}"
        return f"{self.name} ({self.family}): {runs}; {self.check}"


@dataclass(frozen=True)
class AttachReport:
    """The result of `attach`; str() has one line for each layer."""

    layers: tuple[LayerReport, ...]
    quantized: str = ""  # the scheme that `quantize` gave the experts, and why if it chose it
    bytes_before: int = 0  # of the experts' weights that this process holds, before `quantize`
    bytes_after: int = 0

    def __str__(self) -> str:
        first = [self._quantized()] if self.quantized else []
        return "\n".join([*first, *map(str, self.layers)])

    def _quantized(self) -> str:
        text = f"experts quantized to {self.quantized}"
        if self.bytes_before:
            text += f": {size_text(self.bytes_before)} -> {size_text(self.bytes_after)}"
        errors = sorted(
            {f"{e:.2g}" for layer in self.layers if (e := layer.error) is not None}, key=float
        )
        if errors:
            text += f", error {' to '.join(dict.fromkeys((errors[0], errors[-1])))}"
        return text


def attach_layers(
    model: HfModule, options: Mapping[str, Any] = hf_activations.OPTIONS
) -> AttachReport:
    """`attach` of a model whose experts are ordinary modules."""
    layers = layers_of.find(model)
    undo = layers_of.snapshot(model, layers)
    try:
        on_hook = any(layer.on_hook for layer in layers)
        if on_hook and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation(NAME)
        reports = [
            _attach_layer(layer, options)
            for layer in environment.progress_bar(layers, "attaching layers")
        ]
        adapted = adapters.attach_wrappers(model, layers, NAME)
        for i, report in enumerate(reports):
            if report.name in adapted:
                reports[i] = replace(report, path=f"{report.path} with adapters")
        return AttachReport(tuple(reports))
    except BaseException:
        undo()
        raise


def _attach_layer(layer: Layer, options: Mapping[str, Any]) -> LayerReport:
    owner = layer.owner
    _replace(layer)
    for option, value in (hf_activations.OPTIONS | dict(options)).items():
        setattr(owner, hf_activations.PREFIX + option, value)
    owner.extra_repr = functools.partial(
        layer_repr, owner, layer.module
    )  # survives copies and pickle
    operators, check = _check(layer)
    return LayerReport(
        layer.name,
        type(owner).__name__,
        hf_activations.path_of(owner) if layer.on_hook else forwards.FORMS[layer.kind.form].path,
        _activation_text(owner, hf_activations.activation_of(owner)),
        plan_text(layer) or operators,
        check,
    )


def _replace(layer: Layer) -> None:
    """Let a layer run through moe_ops."""
    if layer.on_hook:
        layer.module.config._experts_implementation = NAME
        return
    form = forwards.FORMS[layer.kind.form]
    forwards.set_forward(layer.module, form.forward)
    if form.owner_forward is not None:
        forwards.set_forward(layer.owner, form.owner_forward)


def plan_text(layer: Layer) -> str:
    """The backends of the layer's fused_experts call; empty where the weights do not show them
    yet.
    """
    owner = layer.owner
    weights = [layer.weight(name) for name in layer.weights]
    activation = hf_activations.activation_of(owner)
    if not layer.on_hook or hf_activations.path_of(owner) != hf_activations.FUSED:
        return ""
    assert activation is not None
    if weights[0].device.type == "meta" or weights[0].dtype == torch.float8_e4m3fn:
        return ""
    biases = [getattr(owner, f"{name}_bias", None) for name in layer.weights]
    bias: list[Tensor | None] = [*map(local_part, biases)]
    w13, w2 = [hf_activations.rows_first(w, owner) for w in weights]
    if layer.resident is not None:
        w13, w2, bias = layer.resident.w13, layer.resident.w2, [None, None]
    options = hf_activations.options_of(owner)
    plan = explain(
        torch.empty(1, w13.shape[2], dtype=w13.dtype, device=layer.device),
        w13,
        w2,
        torch.zeros(1, layer.top_k, dtype=torch.int64, device=layer.device),
        activation=activation,
        w13_bias=bias[0],
        w2_bias=bias[1],
        max_workspace_bytes=options["max_workspace_bytes"],
        backend=options["backend"],
    )
    return ", ".join(
        backend.name if limit < 0 else f"{backend.name} up to M = {limit}"
        for limit, backend in plan.tiers
    )


def _activation_text(owner: nn.Module, activation: Activation | None) -> str:
    if activation is None:
        return f"{type(owner).__name__}'s own gate"
    limit = activation.limit
    return activation.name if limit > 1e38 else f"{activation.name} with limit {limit:g}"


def layer_repr(owner: HfModule, module: HfModule) -> str:
    """What print(model) says of the experts of a layer that was attached."""
    own = type(owner).extra_repr(owner)
    layer = layers_of.layer_of("", module)
    if layer is None or (layer.on_hook and module.config._experts_implementation != NAME):
        return own
    weights = [layer.weight(name) for name in layer.weights]
    held = dict.fromkeys([str(getattr(w, "scheme", "") or w.dtype) for w in weights])
    backend = hf_activations.options_of(owner)["backend"]
    with suppress(Exception):  # of a backend that cannot run it where the model is now
        backend = plan_text(layer) or backend
    size = size_text(sum([w.nbytes for w in weights]))
    if layer.resident is not None:
        where = f"slots for {layer.resident.slots} of {weights[0].shape[0]} on {layer.device}"
        size = f"{size} in host memory, {where}"
    return ", ".join(filter(None, (own, " and ".join(held), f"backend {backend}", size)))


class _Recorder(TorchDispatchMode):
    """Collects the names of moe_ops operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace == "moe_ops":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def _check(layer: Layer) -> tuple[str, str]:
    """Call a layer once as it is and once as its own forward is: (operators, difference)."""
    weights = [layer.weight(name) for name in layer.weights]
    if any(w.device.type == "meta" for w in weights):
        return UNCHECKED, "not checked: weights are not loaded"
    if layer.resident is not None:
        return UNCHECKED, "not checked: weights are in host memory"
    if any(fp8.is_quantized(w) or w.element_size() == 1 for w in weights):
        reason = fp8.refusal(layer.owner, weights[0]) if hasattr(layer.owner, "block_size") else ""
        if reason:
            raise ValueError(f"{layer.name}: {reason}")
        return UNCHECKED, "not checked: weights are quantized"
    if is_fsdp(layer.owner):
        return UNCHECKED, "not checked: FSDP wants the whole model to be called first"
    inputs = probe(layer)
    operators, got = call(layer, inputs)
    if not operators:
        raise RuntimeError(
            f"{layer.name} did not call moe_ops: its forward is replaced by something else; "
            "remove that, or attach before it is added"
        )
    try:
        with torch.no_grad():
            want = _first(_own_forward(layer, inputs))
    except (RuntimeError, IndexError) as failed:
        if not layer.sharded:
            raise
        # some families' does not take the id of experts that are elsewhere
        return operators, f"not checked: its own forward fails on some of the experts: {failed}"
    if not want.isfinite().all():
        return operators, "not checked: its own forward is not finite on random tokens"
    error = (got.float() - want.float()).abs().max().item()
    scale = want.float().abs().max().item()
    if not error <= (1e-3 if want.dtype == torch.float32 else 5e-2) * max(scale, 1e-6):
        raise RuntimeError(
            f"{layer.name} differs from its own forward by {error:.3g} at magnitude {scale:.3g}; "
            f"{type(layer.owner).__name__} computes something moe_ops does not know"
        )
    return operators, f"differs from its own forward by {error:.1e} at magnitude {scale:.1e}"


def probe(layer: Layer) -> tuple[Tensor, ...]:
    """A few random tokens with distinct router weights, in the form the module takes."""
    weights = [layer.weight(name) for name in layer.weights]
    rng = torch.Generator().manual_seed(0)
    like: dict[str, Any] = {"device": weights[0].device, "dtype": weights[0].dtype}
    x = torch.randn(3, layer.columns, generator=rng).to(**like)
    if layer.kind.routes:
        return (x,)
    joined = layer.joined if weights[0].dim() == 2 else 0
    num_experts = joined or getattr(layer.owner, layer.weights[0]).shape[0]  # also those elsewhere
    top_k = min(2, num_experts)
    ids = torch.stack([torch.randperm(num_experts, generator=rng)[:top_k] for _ in range(3)])
    router = torch.rand(3, top_k, generator=rng) + 0.1
    x = x.unsqueeze(1) if joined else x
    return x, ids.to(like["device"]), router.to(**like)


def call(layer: Layer, inputs: tuple[Tensor, ...]) -> tuple[str, Tensor]:
    """The operators of moe_ops that run in a layer's forward, and its output."""
    with torch.no_grad(), _Recorder() as recorder:
        output = _first(layer.module(*inputs))
    return ", ".join(sorted(recorder.names)), output


def _own_forward(layer: Layer, inputs: tuple[Tensor, ...]) -> Any:
    """The module's result without moe_ops."""
    module = layer.module
    try:
        if layer.on_hook:
            module.config._experts_implementation = "eager"
        else:
            forwards.restore(module)
            forwards.restore(layer.owner)
        return module(*inputs)
    finally:
        _replace(layer)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
