"""Moving the experts of a model to host memory, and slots for some of them to a GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from moe_ops import environment
from moe_ops.integrations.transformers import activations as hf_activations
from moe_ops.integrations.transformers.budget import Budget
from moe_ops.integrations.transformers.layers import Layer
from moe_ops.integrations.transformers.residency import (
    BUDGET,
    ResidencyReport,
    residency_report,
)
from moe_ops.integrations.transformers.sizes import size_text
from moe_ops.residency import holding
from moe_ops.residency.experts import ResidentExperts
from moe_ops.residency.host import with_own_storage
from moe_ops.schemes import get_scheme
from moe_ops.tensors import ExpertTensor
from moe_ops.tensors.sharding import is_fsdp

_LOGGER = logging.getLogger("moe_ops")


def check(layer: Layer, loaded: bool = True) -> None:
    """Raise ValueError if the experts of a layer, which are loaded or will be, cannot be in host
    memory.
    """
    owner, where = layer.owner, layer.name or "the layer"
    if layer.resident is not None:
        raise ValueError(
            f"{where} must hold its experts itself, got one with experts in host memory"
        )
    fused = (
        layer.kind.form != "three matrices"
        and hf_activations.path_of(owner) == hf_activations.FUSED
    )
    if not fused:
        raise ValueError(
            f"{where} must be one fused_experts call to have its experts in host memory, got "
            f"{type(owner).__name__}, which runs several products"
        )
    for name in layer.held():
        if layer.wrapped or parametrize.is_parametrized(owner, name):
            raise ValueError(
                f"{layer.parameter_name(name)} must carry no adapter, got one; merge it, or adapt "
                "other parts of the model alone"
            )
        layer.check_fsdp(name)
    for name in layer.weights:
        called, weight = layer.parameter_name(name), layer.weight(name)
        if layer.sharded or is_fsdp(owner):
            raise ValueError(
                f"{called} must be whole to be in host memory, got one that is spread over "
                "processes; load the model in one process"
            )
        if loaded and weight.device.type != "cpu":
            raise ValueError(
                f"{called} must be in CPU memory, got {weight.device}; load the model without "
                "device_map, or move it by model.cpu()"
            )
        if loaded and weight.element_size() == 1 and not isinstance(weight, ExpertTensor):
            raise ValueError(
                f"{called} must be a plain or an ExpertTensor, got {weight.dtype} as "
                "transformers loads it; pass quantization_config=MoeOpsConfig(gpu_memory=...)"
            )


def check_scheme(scheme: str) -> None:
    """Raise ValueError if experts that a plain checkpoint is quantized to cannot have slots."""
    activation = get_scheme(scheme).activation
    if activation is not None and activation.one_scale:
        raise ValueError(
            f"scheme must have no scale that all tokens share for experts in host memory, got "
            f"{scheme!r}: a call runs in passes, each over some of the experts. Take one with a "
            "scale of each token, such as 'fp8_channel', or with 16-bit activations"
        )


def move(model: nn.Module, layers: Sequence[Layer], plan: Budget) -> ResidencyReport:
    """Move experts of a model that runs through moe_ops to pinned memory, one layer after the
    other, and the rest to the device of a budget.
    """
    done: dict[tuple[int, ...], tuple[ResidentExperts, dict[str, nn.Parameter]]] = {}
    pairs = [*zip(layers, plan.slots, strict=True)]
    held = [(x.owner, name, p.requires_grad) for x in layers for name, p in x.held().items()]
    try:
        for layer, slots in environment.progress_bar(pairs, "moving experts to host memory"):
            _move_layer(layer, slots, plan.device, done)
        holding.guard(model)
        vars(model)[BUDGET] = plan
        model.to(plan.device)
    except BaseException:
        holding.release(model)
        vars(model).pop(BUDGET, None)
        model.cpu()
        for owner, name, requires_grad in held:
            getattr(owner, name).requires_grad_(requires_grad)
        raise
    report = residency_report(model)
    if plan.why:
        _LOGGER.warning('gpu_memory="auto" is %s: %s', size_text(plan.gpu_memory), plan.why)
    return report


def _move_layer(
    layer: Layer,
    slots: int,
    device: torch.device,
    done: dict[tuple[int, ...], tuple[ResidentExperts, dict[str, nn.Parameter]]],
) -> None:
    """Replace the parameters of a layer's experts by rows of pinned memory, unless all experts
    have slots; layers that shared theirs go on sharing.
    """
    if slots == layer.natural_weight(layer.weights[0]).shape[0]:
        return
    old = tuple(map(id, layer.held().values()))
    if old not in done:
        roles = dict(zip(("w13", "w2"), layer.weights, strict=True))
        given = {role: layer.natural_weight(name) for role, name in roles.items()}
        for role, name in zip(("w13_bias", "w2_bias"), layer.biases, strict=False):
            given[role] = getattr(layer.owner, name).detach()
        resident = ResidentExperts(**given, slots=slots, device=device)
        rows = {role: _apart(t) for role, t in resident.rows.items()}
        for role, name in roles.items():
            layer.set_weight(name, rows[role])
        for role, name in zip(("w13_bias", "w2_bias"), layer.biases, strict=False):
            setattr(layer.owner, name, nn.Parameter(rows[role], requires_grad=False))
        done[old] = resident, layer.held()
    resident, parameters = done[old]
    for name, parameter in parameters.items():
        setattr(layer.owner, name, parameter)
    holding.hold(layer.owner, resident, tuple(parameters))


def _apart(rows: Any) -> Any:
    """Rows of a region of memory as tensors with storages of their own: what saves models would
    copy tensors that share one.
    """
    if isinstance(rows, ExpertTensor):
        names = rows.__tensor_flatten__()[0]
        return rows._replace(**{name: _apart(getattr(rows, name)) for name in names})
    if not rows.is_contiguous():
        return rows
    return with_own_storage(rows.view(-1).view(torch.uint8)).view(rows.dtype).view(rows.shape)
