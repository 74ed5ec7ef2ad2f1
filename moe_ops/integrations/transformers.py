"""Hugging Face transformers models on moe_ops.

Importing this module registers the experts implementation "moe_ops", for plain and for FP8 experts::

    import moe_ops.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_ops")

`attach(model)` does the same for a model that is built already, serves the families that bypass
transformers' experts hook, checks each layer and reports what runs where. `quantize(model, scheme)`
quantizes the experts' weights in place. Families, limits and examples: docs/transformers.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface

import moe_ops
from moe_ops.integrations import _families as families
from moe_ops.integrations import _layers as layers_of
from moe_ops.integrations import _outside as outside
from moe_ops.integrations._layers import Layer
from moe_ops.integrations._quantizer import MoeOpsConfig, mark_quantized
from moe_ops.integrations._routers import (
    RouterReport,
    RoutersReport,
    fuse_routers,
    unfuse_routers,
)
from moe_ops.registry import check_backend
from moe_ops.schemes import QuantScheme, get_scheme
from moe_ops.tensors import check_quantizable

__all__ = [
    "AttachReport",
    "LayerReport",
    "MoeOpsConfig",
    "RouterReport",
    "RoutersReport",
    "attach",
    "fuse_routers",
    "quantize",
    "unfuse_routers",
]

NAME = "moe_ops"


def fp8_experts_forward(
    module: nn.Module,
    hidden_states: Tensor,  # (M, H)
    top_k_index: Tensor,  # (M, top_k)
    top_k_weights: Tensor,  # (M, top_k)
) -> Tensor:
    """Forward of transformers' FP8Experts: e4m3 weights with one scale for each 128 x 128 block.

    Activations are quantized per token and 128 columns, as scheme "fp8_block" says. The weights and
    scales of the checkpoint are used as they lie; e8m0 scales become fp32 in each call.

    Raises:
        ValueError: the experts are packed FP4, have another block size or static activation scales.
    """
    name = "gate_up_proj" if module.has_gate else "up_proj"
    w13, w2 = getattr(module, name), module.down_proj
    if _is_quantized(w13) or w13.element_size() > 1:  # by quantize(), or dequantized on loading
        return families.run_experts(module, hidden_states, top_k_index, top_k_weights, w13, w2)
    reason = _fp8_refusal(module, w13)
    if reason:
        raise ValueError(reason)
    return families.run_experts(
        module,
        hidden_states,
        top_k_index,
        top_k_weights,
        _wrap_fp8(w13, getattr(module, f"{name}_scale_inv")),
        _wrap_fp8(w2, module.down_proj_scale_inv),
    )


def _fp8_refusal(module: nn.Module, weight: Tensor) -> str:
    """Why FP8Experts cannot run here; empty if they can."""
    remedy = "; choose another experts_implementation, or load with dequantize=True"
    if weight.dtype == torch.int8:
        return f"experts must be float8_e4m3fn, got FP4 packed in int8{remedy}"
    if module.block_size is None or tuple(module.block_size) != (128, 128):
        return (
            f"weight_block_size must be (128, 128), the blocks of scheme 'fp8_block', "
            f"got {module.block_size}{remedy}"
        )
    if module.activation_scheme != "dynamic":
        return f"activation_scheme must be 'dynamic', got {module.activation_scheme!r}{remedy}"
    return ""


def _wrap_fp8(qdata: Tensor, scale: Tensor) -> Tensor:
    """`from_quantized` without its checks: they read the scales back from the device."""
    return moe_ops.Float8ExpertTensor(qdata.detach(), scale.detach().float(), "fp8_block")


def _is_quantized(weight: Tensor) -> bool:
    return getattr(weight, "scheme", None) is not None


ExpertsInterface.register(NAME, families.experts_forward)
FP8ExpertsInterface.register(NAME, fp8_experts_forward)


@dataclass(frozen=True)
class LayerReport:
    """What one MoE layer runs."""

    name: str  # module name in the model
    family: str  # class of the module
    path: str  # which functions of moe_ops
    activation: str  # ours, or the module's own
    runs: str  # the backends by number of tokens M, or the operators that ran in the check
    check: str  # largest difference from the module's own forward, or why there was no check

    def __str__(self) -> str:
        return f"{self.name} ({self.family}): {self.path}, {self.activation}, {self.runs}; {self.check}"


@dataclass(frozen=True)
class AttachReport:
    """What `attach` did; str() has one line for each layer."""

    layers: tuple[LayerReport, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers))


def attach(model: nn.Module, backend: str = "auto") -> AttachReport:
    """Run the experts of a model through moe_ops, in place, and check that they do.

    Modules on transformers' experts hook get experts_implementation="moe_ops"; those of llama4, dbrx,
    longcat_flash and step3p7 get another forward. Each layer whose weights are loaded is called once
    on a few random tokens; its result must agree with its own forward.

    Args:
        model: a transformers model, or any module that contains such layers.
        backend: for every expert call of these layers, as in `moe_ops.fused_experts`.

    Returns:
        A report; print it to see what runs where.

    Raises:
        ValueError: no MoE layer, one of a family nobody taught us, experts that are packed FP4 or
            MXFP4, or an unknown backend.
        RuntimeError: a layer did not call moe_ops or differs from its own forward.

    After an error the model is as it was before the call.
    """
    check_backend("backend", backend)
    layers = layers_of.find(model)
    undo = layers_of.snapshot(model, layers)
    try:
        if hasattr(model, "set_experts_implementation") and any(
            layer.family is None for layer in layers
        ):
            model.set_experts_implementation(NAME)
        return AttachReport(tuple([_attach_layer(layer, backend) for layer in layers]))
    except BaseException:
        undo()
        raise


def quantize(model: nn.Module, scheme: str | QuantScheme) -> AttachReport:
    """Quantize the expert weights of a model in place, and attach the model if it is not yet.

    All weights are checked before the first one changes: after a ValueError or RuntimeError the model is
    as it was before the call. Then each is replaced by an `ExpertTensor` parameter with
    requires_grad=False, one at a time, so that at most one weight exists twice. A parameter keeps the
    shape it had: where a family keeps (E, columns, rows), the quantized data lies as (E, rows, columns)
    under a transposed view. Two families are exceptions: dbrx's three (E * I, H) become (E, I, H), and longcat_flash's gate_up_proj
    loses the rows of its identity experts, which nothing reads.

    Args:
        model: as for `attach`.
        scheme: as for `moe_ops.quantize`, but for those with static activation scales, which only
            its `activation_scale` can give ("fp8_tensor_static").

    Returns:
        The report of `attach`, made before the weights were quantized.

    Raises:
        ValueError: as `attach` and `moe_ops.quantize`, naming the parameter; also weights that are
            quantized already, carry adapters, or are not loaded (meta device).
        RuntimeError: as `attach`.
    """
    scheme = get_scheme(scheme)
    _ = scheme.quantized_weight  # raises for plain weights
    if scheme.activation is not None and scheme.activation.static:
        raise ValueError(
            f"scheme must not have static activation scales, got {scheme.name!r}: no model carries them; "
            "use 'fp8_tensor', whose scales come from the data of each call, or quantize each weight "
            "by moe_ops.quantize(weight, scheme, activation_scale=...)"
        )
    pairs = [(layer, name) for layer in layers_of.find(model) for name in layer.weights]
    for layer, name in pairs:
        _check_quantizable(layer, name)
    report = attach(model)
    for layer, name in _progress(pairs):
        weight = layer.natural_weight(name).contiguous()
        layer.set_weight(name, moe_ops.quantize(weight, scheme))
    mark_quantized(model, MoeOpsConfig(scheme))
    return report


def _attach_layer(layer: Layer, backend: str) -> LayerReport:
    module, owner, family = layer.module, layer.owner, layer.family
    if family is None:
        module.config._experts_implementation = NAME
        path = families.path_of(owner)
    else:
        outside.set_forward(module, family.forward)
        if family.owner_forward is not None:
            outside.set_forward(owner, family.owner_forward)
        path = family.path
    owner._moe_ops_backend = backend
    operators, check = _check(layer)
    return LayerReport(
        layer.name,
        type(owner).__name__,
        path,
        _activation_text(owner, families.activation_of(owner)),
        _plan_text(layer) or operators,
        check,
    )


def _plan_text(layer: Layer) -> str:
    """The backends of the layer's fused_experts call; empty where the weights do not show them yet."""
    owner = layer.owner
    weights = [getattr(owner, name) for name in layer.weights]
    if layer.family is not None or families.path_of(owner) != families.FUSED:
        return ""
    if weights[0].device.type == "meta" or weights[0].dtype == torch.float8_e4m3fn:
        return ""
    w13, w2 = (families.rows_first(w, owner) for w in weights)
    bias = [getattr(owner, f"{name}_bias", None) for name in layer.weights]
    top_k = getattr(owner.config, "num_experts_per_tok", None) or 1
    plan = moe_ops.explain(
        torch.empty(1, w13.shape[2], dtype=w13.dtype, device=w13.device),
        w13,
        w2,
        torch.zeros(1, top_k, dtype=torch.int64, device=w13.device),
        activation=families.activation_of(owner),
        w13_bias=bias[0],
        w2_bias=bias[1],
        backend=families.backend_of(owner),
    )
    return ", ".join(
        backend.name if limit < 0 else f"{backend.name} up to M = {limit}"
        for limit, backend in plan.tiers
    )


def _activation_text(owner: nn.Module, activation) -> str:
    if activation is None:
        return f"{type(owner).__name__}'s own gate"
    limit = activation.limit
    return activation.name if limit > 1e38 else f"{activation.name} with limit {limit:g}"


class _Recorder(TorchDispatchMode):
    """Collects the names of moe_ops operators that run."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe_ops":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def _check(layer: Layer) -> tuple[str, str]:
    """Call a layer once as it is and once as its own forward is: (operators, difference)."""
    weights = [getattr(layer.owner, name) for name in layer.weights]
    unchecked = "backend chosen when first called"
    if any(w.device.type == "meta" for w in weights):
        return unchecked, "not checked: weights are not loaded"
    if any(_is_quantized(w) or w.element_size() == 1 for w in weights):
        reason = (
            _fp8_refusal(layer.owner, weights[0]) if hasattr(layer.owner, "block_size") else ""
        )
        if reason:
            raise ValueError(f"{layer.name}: {reason}")
        return unchecked, "not checked: weights are quantized"
    inputs = _probe(layer, weights)
    with torch.no_grad(), _Recorder() as recorder:
        got = _first(layer.module(*inputs))
    if not recorder.names:
        raise RuntimeError(
            f"{layer.name} did not call moe_ops: its forward is replaced by something else; remove "
            f"that, or attach before it is added"
        )
    with torch.no_grad():
        want = _first(_own_forward(layer, inputs))
    operators = ", ".join(sorted(recorder.names))
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


def _probe(layer: Layer, weights: list[Tensor]) -> tuple[Tensor, ...]:
    """A few random tokens with distinct router weights, in the form the module takes."""
    rng = torch.Generator().manual_seed(0)
    like = {"device": weights[0].device, "dtype": weights[0].dtype}
    columns = weights[0].shape[1 if layer.columns_first(layer.weights[0]) else -1]
    x = torch.randn(3, columns, generator=rng).to(**like)
    if layer.family is not None and layer.family.routes:
        return (x,)
    is_dbrx = weights[0].dim() == 2
    num_experts = layer.owner.moe_num_experts if is_dbrx else weights[0].shape[0]
    top_k = min(2, num_experts)
    ids = torch.stack([torch.randperm(num_experts, generator=rng)[:top_k] for _ in range(3)])
    router = torch.rand(3, top_k, generator=rng) + 0.1
    x = x.unsqueeze(1) if is_dbrx else x
    return x, ids.to(like["device"]), router.to(**like)


def _own_forward(layer: Layer, inputs: tuple[Tensor, ...]):
    """The module's result without moe_ops."""
    module, owner, family = layer.module, layer.owner, layer.family
    if family is None:
        try:
            module.config._experts_implementation = "eager"
            return module(*inputs)
        finally:
            module.config._experts_implementation = NAME
    try:
        outside.restore(module)
        outside.restore(owner)
        return module(*inputs)
    finally:
        outside.set_forward(module, family.forward)
        if family.owner_forward is not None:
            outside.set_forward(owner, family.owner_forward)


def _first(output):
    return output[0] if isinstance(output, tuple) else output


def _check_quantizable(layer: Layer, weight_name: str) -> None:
    name = layer.parameter_name(weight_name)
    # PEFT wraps the module, as "base_layer", and parametrizes its weights during the forward only
    if "base_layer" in name.split(".") or parametrize.is_parametrized(layer.owner, weight_name):
        raise ValueError(
            f"{name} must carry no adapter; quantize the model before adding adapters"
        )
    weight = getattr(layer.owner, weight_name)
    if _is_quantized(weight) or weight.element_size() == 1:
        what = getattr(weight, "scheme", weight.dtype)
        raise ValueError(f"{name} must be a plain tensor, got {what}: it is quantized already")
    if weight.device.type == "meta":
        raise ValueError(f"{name} must be loaded, got the meta device; quantize before offloading")
    check_quantizable(name, layer.natural_weight(weight_name))


def _progress(pairs: list) -> Iterable:
    """A progress bar over a model whose weights take a while, if tqdm is installed."""
    if sum(getattr(layer.owner, name).numel() for layer, name in pairs) < 2**30:
        return pairs
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return pairs
    return tqdm(pairs, desc="quantizing experts", unit="weight")
