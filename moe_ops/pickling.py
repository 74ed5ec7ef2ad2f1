"""How files name quantized weights: by a function that `import moe_ops` makes known to torch.load.

A file that named their class would load with weights_only=True only where moe_ops.tensors, and with it
torchao, was imported before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rebuild_expert_tensor(
    class_name: str, arguments: dict[str, Any], attributes: dict[str, Any]
) -> Tensor:
    """The ExpertTensor that was pickled: the constructor's arguments, and what was set on it later."""
    from moe_ops.tensors.serialization import class_named  # torchao is imported at the first one

    tensor = class_named(class_name)(**arguments)
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


torch.serialization.add_safe_globals([rebuild_expert_tensor])
