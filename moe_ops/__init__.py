"""Mixture-of-experts kernels as first-class PyTorch operators.

Importing this package loads no optional library and does not initialise CUDA. Everything that
quantized tensors need (and with it torchao) is loaded on first use. Once transformers' models are
imported, before or after this package, they know experts_implementation="moe_ops".
"""

from __future__ import annotations

import importlib
from typing import Any

from moe_ops import pickling as _pickling  # noqa: F401 - torch.load knows it from here on
from moe_ops.activations import Activation
from moe_ops.autograd.adapters import LoRA
from moe_ops.autograd.stack import LoRAStack
from moe_ops.backends import list_backends
from moe_ops.batch_invariance import set_batch_invariant
from moe_ops.experts import batched_experts, explain, fused_experts, grouped_linear
from moe_ops.grouped import grouped_experts
from moe_ops.integrations import on_import as _on_import
from moe_ops.nn.config import MoEConfig
from moe_ops.numerics import quantize_activation
from moe_ops.parallel.config import ParallelConfig
from moe_ops.planning.register import register_backend
from moe_ops.routing.methods import RoutingMethod
from moe_ops.routing.route import route
from moe_ops.routing.tokens import route_tokens
from moe_ops.schemes import QuantScheme
from moe_ops.warmup import warmup

__version__ = "0.1.0"

_LAZY = {
    "load_warm": "moe_ops.bundle.warm",
    "save_warm": "moe_ops.bundle.warm",
    "MoELayer": "moe_ops.nn.layer",
    "ResidencyStats": "moe_ops.residency.experts",
    "ResidentExperts": "moe_ops.residency.experts",
    "residency_stats": "moe_ops.residency.experts",
    "ExpertTensor": "moe_ops.tensors",
    "Float8ExpertTensor": "moe_ops.tensors",
    "Int4ExpertTensor": "moe_ops.tensors",
    "Int8ExpertTensor": "moe_ops.tensors",
    "LevelsExpertTensor": "moe_ops.tensors",
    "MXExpertTensor": "moe_ops.tensors",
    "NVFP4ExpertTensor": "moe_ops.tensors",
    "PackedIntExpertTensor": "moe_ops.tensors",
    "PlainExpertTensor": "moe_ops.tensors",
    "from_quantized": "moe_ops.tensors",
    "prepare": "moe_ops.tensors",
    "quantize": "moe_ops.tensors",
    "self_check": "moe_ops.selfcheck.check",
}

__all__ = [
    "Activation",
    "ExpertTensor",
    "Float8ExpertTensor",
    "Int4ExpertTensor",
    "Int8ExpertTensor",
    "LevelsExpertTensor",
    "LoRA",
    "LoRAStack",
    "MXExpertTensor",
    "MoEConfig",
    "MoELayer",
    "NVFP4ExpertTensor",
    "PackedIntExpertTensor",
    "PlainExpertTensor",
    "ParallelConfig",
    "QuantScheme",
    "ResidencyStats",
    "ResidentExperts",
    "RoutingMethod",
    "batched_experts",
    "explain",
    "from_quantized",
    "fused_experts",
    "grouped_experts",
    "grouped_linear",
    "list_backends",
    "load_warm",
    "prepare",
    "quantize",
    "quantize_activation",
    "register_backend",
    "residency_stats",
    "route",
    "route_tokens",
    "save_warm",
    "self_check",
    "set_batch_invariant",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'moe_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


_on_import.register()
