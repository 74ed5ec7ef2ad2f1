"""Hugging Face transformers models on moe_ops.

Importing this module registers the experts implementation "moe_ops", for plain and for FP8
experts. `import moe_ops` has it imported once transformers' models are::

    import moe_ops
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_ops")

`attach(model)` does the same for a model that is built already, serves the families that bypass
transformers' experts hook, checks each layer and reports what runs where. `quantize(model,
scheme)` quantizes the experts' weights in place, and `from_pretrained(name,
quantization_config=MoeOpsConfig(scheme))` while a checkpoint is read; `MoeOpsConfig()` reads
checkpoints that are quantized already. `offload(model, gpu_memory=...)` keeps experts that do not
fit the GPU in host memory, and `MoeOpsConfig(scheme, gpu_memory=...)` reads them there. Families,
limits and examples: docs/transformers.md, docs/checkpoints.md and docs/residency.md.
"""

from __future__ import annotations

import importlib.util

from moe_ops import environment

with environment.importing_torchao():  # transformers imports more of it than tensors do
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface
    from transformers.quantizers import auto as _auto  # noqa: F401

from moe_ops.integrations.transformers import gguf_hook, padding
from moe_ops.integrations.transformers import model_card as _model_card  # noqa: F401 - patches
from moe_ops.integrations.transformers.activations import experts_forward
from moe_ops.integrations.transformers.attach import attach
from moe_ops.integrations.transformers.bitsandbytes import save_bitsandbytes
from moe_ops.integrations.transformers.config import MoeOpsConfig
from moe_ops.integrations.transformers.fp8 import fp8_experts_forward
from moe_ops.integrations.transformers.hook import NAME, AttachReport, LayerReport
from moe_ops.integrations.transformers.merge import MergedWeight, MergeReport, merge_adapters
from moe_ops.integrations.transformers.offload import offload
from moe_ops.integrations.transformers.quantize import is_experts, quantize, quantize_weights
from moe_ops.integrations.transformers.replay import (
    RoutingRecord,
    record_routing,
    replay_routing,
)
from moe_ops.integrations.transformers.requests import adapters_by_request
from moe_ops.integrations.transformers.residency import (
    ResidencyReport,
    residency_report,
    residency_stats,
)
from moe_ops.integrations.transformers.routers import (
    RouterReport,
    RoutersReport,
    fuse_routers,
    unfuse_routers,
)
from moe_ops.integrations.transformers.warmup import find
from moe_ops.warmup import register_finder

__all__ = [
    "NAME",
    "AttachReport",
    "LayerReport",
    "MergeReport",
    "MergedWeight",
    "MoeOpsConfig",
    "ResidencyReport",
    "RouterReport",
    "RoutersReport",
    "RoutingRecord",
    "adapters_by_request",
    "attach",
    "fp8_experts_forward",
    "fuse_routers",
    "is_experts",
    "merge_adapters",
    "offload",
    "quantize",
    "quantize_weights",
    "record_routing",
    "replay_routing",
    "residency_report",
    "residency_stats",
    "save_bitsandbytes",
    "unfuse_routers",
]

ExpertsInterface.register(NAME, experts_forward)
FP8ExpertsInterface.register(NAME, fp8_experts_forward)
gguf_hook.register()
padding.register()
register_finder(find)
if importlib.util.find_spec("transformers.distributed.expert_parallel"):  # 5.23 and later
    from moe_ops.integrations.transformers import expert_parallel

    expert_parallel.register()
