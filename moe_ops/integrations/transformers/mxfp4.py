"""Models that transformers loads with its own MXFP4 kernels, brought back to their ordinary
modules.

transformers replaces the MLP of such a family by one whose experts hold Triton tensors, swizzled
for one GPU, and bypass the experts hook. Their elements and scales are put back into the order of
the checkpoint, as an ExpertTensor of scheme "mxfp4_w4a16" in an ordinary block: no value changes.
"""

from __future__ import annotations

import pkgutil
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.integrations.transformers.families import MXFP4, HfModule
from moe_ops.tensors import from_quantized

_PROJECTIONS = ("gate_up_proj", "down_proj")


def restore_modules(model: nn.Module) -> bool:
    """Replace all MXFP4 MLPs in a model, one at a time; whether there were any.

    Raises:
        ValueError: experts that are not loaded, or a model without its configuration. Nothing was
            changed.
    """
    blocks: dict[str, HfModule] = {}
    for name, block in model.named_modules():
        family = MXFP4.get(type(getattr(block, "experts", None)).__name__)
        if family is not None:
            blocks[name] = block
            known = family
    if not blocks:
        return False
    if "" in blocks or not hasattr(model, "config"):
        raise ValueError(
            f"model must be the whole {known.family} model to replace its MXFP4 experts, got "
            f"{type(model).__name__}"
        )
    for name, block in blocks.items():
        for projection in _PROJECTIONS:
            if isinstance(getattr(block.experts, projection), Tensor):  # the empty parameter
                raise ValueError(
                    f"{name}.experts.{projection} must be loaded, got no Triton tensor"
                )
    make_block = pkgutil.resolve_name(known.block)
    for name, block in blocks.items():
        with torch.device("meta"):
            restored = make_block(model.config)
        restored.router = block.router
        restored.train(block.training)
        for projection in _PROJECTIONS:
            dtype = block.router.weight.dtype
            bias = getattr(block.experts, f"{projection}_bias").detach().to(dtype)
            weight = _weight(block.experts, projection).to(dtype).transpose(1, 2)
            setattr(restored.experts, projection, nn.Parameter(weight, requires_grad=False))
            bias_parameter = nn.Parameter(bias, requires_grad=False)
            setattr(restored.experts, f"{projection}_bias", bias_parameter)
            delattr(block.experts, projection)  # not both in memory for longer than this
        model.set_submodule(name, restored)
    vars(model).pop("hf_quantizer", None)  # it has quantized nothing else
    return True


def _weight(experts: HfModule, projection: str) -> Tensor:
    """(E, N, K) of a Triton tensor that transformers made of blocks and scales."""
    elements = _unswizzled(getattr(experts, projection))
    scales = _unswizzled(getattr(experts, f"{projection}_precision_config").weight_scale)
    hidden, width = experts.hidden_size, experts.intermediate_size
    rows, columns = (2 * width, hidden) if projection == "gate_up_proj" else (hidden, width)
    count = experts.num_experts
    # a swizzled layout may be padded
    elements = elements[:count, :rows, : columns // 2].contiguous()
    scales = scales[:count, :rows, : columns // 32].contiguous()
    return from_quantized("mxfp4_w4a16", elements, scales)


def _unswizzled(tensor: Any) -> Tensor:
    """(E, N, ...) uint8 of a triton_kernels tensor (E, ..., N)."""
    storage = tensor.storage
    return storage.layout.unswizzle_data(storage.data).transpose(-1, -2).view(torch.uint8)
