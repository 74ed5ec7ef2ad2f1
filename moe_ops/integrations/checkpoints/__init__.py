"""Quantized checkpoints as they are: safetensors or GGUF files with their authors' tensor names.

`Checkpoint(folder).expert_weight(...)` reads one weight of a layer's experts. transformers models
load through `moe_ops.integrations.transformers`, which uses the same code. Formats:
docs/checkpoints.md.
"""

from moe_ops.integrations.checkpoints.experts import Checkpoint
from moe_ops.integrations.checkpoints.weights import Weight

__all__ = ["Checkpoint", "Weight"]
