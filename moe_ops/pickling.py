"""Pickled quantized weights: files name a function, which `import moe_ops` allows in torch.load.

Files that named their classes would load with weights_only=True only if moe_ops.tensors, and with
it torchao, was imported before.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def stored(t: Tensor) -> Tensor | tuple[Tensor, torch.dtype]:
    """The pickled form of a tensor. For float8 its bytes and dtype, because pickle and the format
    of torch.save before 1.6 have no storage of float8.
    """
    is_float8 = t.dtype.itemsize == 1 and t.dtype.is_floating_point
    return (t.view(torch.uint8), t.dtype) if is_float8 else t


def rebuild_expert_tensor(
    class_name: str, arguments: dict[str, Any], attributes: dict[str, Any]
) -> Tensor:
    """The ExpertTensor of a file: its constructor's arguments, and the attributes set later."""
    if not class_name.endswith("ExpertTensor"):
        raise ValueError(
            f"class of a quantized weight must be one of moe_ops's ExpertTensors, got "
            f"{class_name!r}"
        )
    cls = getattr(sys.modules["moe_ops"], class_name)  # torchao is imported at the first one
    tensors = {
        name: value[0].view(value[1]) if isinstance(value, tuple) else value
        for name, value in arguments.items()
    }
    tensor = cls(**tensors)
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


torch.serialization.add_safe_globals([rebuild_expert_tensor])
