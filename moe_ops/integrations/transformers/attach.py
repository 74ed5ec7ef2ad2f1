"""attach(): running the experts of a model through moe_ops."""

from __future__ import annotations

from torch import nn

from moe_ops.backends import check_backend
from moe_ops.checks import check_size
from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.integrations.transformers.config import MoeOpsConfig
from moe_ops.integrations.transformers.hook import AttachReport, attach_layers
from moe_ops.integrations.transformers.mxfp4 import restore_modules
from moe_ops.integrations.transformers.quantizer import mark_quantized
from moe_ops.tensors import ExpertTensor


def attach(
    model: nn.Module,
    backend: str = "auto",
    *,
    max_workspace_bytes: int | None = None,
    recompute: bool = False,
) -> AttachReport:
    """Run the experts of a model through moe_ops, in place, and check that they do.

    Modules on transformers' experts hook get experts_implementation="moe_ops"; those of the
    families that bypass it (docs/transformers.md) get another forward. Each layer whose weights
    are loaded is called once on a few random tokens; its result must agree with its own forward.

    Args:
        model: a transformers model, or any module that contains such layers.
        backend, max_workspace_bytes, recompute: for every expert call of these layers, as in
            `moe_ops.fused_experts`.

    Returns:
        A report; print it to see what runs where.

    Raises:
        ValueError: no MoE layer, one of a family nobody taught us, experts that are packed FP4, or
            an unknown backend, or a max_workspace_bytes that is no positive integer or has no room
            for the smallest chunk.
        RuntimeError: a layer did not call moe_ops or differs from its own forward.

    After an error the model is as it was before the call. One thing stays done: a model that
    transformers loaded with MXFP4 kernels of its own gets back its ordinary modules, with the same
    weights as ExpertTensors of scheme "mxfp4_w4a16".
    """
    check_backend("backend", backend)
    if max_workspace_bytes is not None:
        check_size("max_workspace_bytes", max_workspace_bytes)
    if isinstance(model, nn.Module) and restore_modules(model):
        mark_quantized(model, MoeOpsConfig())
    options = {
        "backend": backend,
        "max_workspace_bytes": max_workspace_bytes,
        "recompute": recompute,
    }
    report = attach_layers(model, options)
    if any(
        isinstance(layer.weight(name), ExpertTensor) and layer.weight(name).scheme
        for layer in layers_of.find(model)
        for name in layer.weights
    ):
        mark_quantized(model, MoeOpsConfig(), keep=True)
    return report
