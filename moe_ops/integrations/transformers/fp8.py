"""transformers' FP8Experts on moe_ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.autograd.adapters import LoRA
from moe_ops.integrations.transformers import activations as hf_activations
from moe_ops.integrations.transformers.activations import Mixture
from moe_ops.integrations.transformers.families import HfModule
from moe_ops.tensors import Float8ExpertTensor


def fp8_experts_forward(
    module: HfModule,
    hidden_states: Tensor,  # (M, H)
    top_k_index: Tensor,  # (M, top_k)
    top_k_weights: Tensor,  # (M, top_k)
    moe_ops_adapters: Sequence[LoRA] | Mixture = (),  # of PEFT's wrappers
) -> Tensor:
    """Forward of transformers' FP8Experts: e4m3 weights with one scale for each 128 x 128 block.

    Activations are quantized per token and 128 columns, as scheme "fp8_block" says, or
    "fp8_block:ue8m0", by powers of two, where the model's quantization_config has
    scale_fmt="ue8m0". The weights and scales of the checkpoint are used as they lie; e8m0 scales
    become fp32 in each call.

    Raises:
        ValueError: the experts are packed FP4, have another block size or static activation
            scales.
    """
    name = "gate_up_proj" if module.has_gate else "up_proj"
    w13, w2 = getattr(module, name), module.down_proj
    if is_quantized(w13) or w13.element_size() > 1:  # by quantize(), or dequantized on loading
        return hf_activations.run_experts(
            module, hidden_states, top_k_index, top_k_weights, w13, w2, moe_ops_adapters
        )
    reason = refusal(module, w13)
    if reason:
        raise ValueError(reason)
    return hf_activations.run_experts(
        module,
        hidden_states,
        top_k_index,
        top_k_weights,
        _wrap_fp8(module, w13, getattr(module, f"{name}_scale_inv")),
        _wrap_fp8(module, w2, module.down_proj_scale_inv),
        moe_ops_adapters,
    )


def refusal(module: HfModule, weight: Tensor) -> str:
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


def _wrap_fp8(module: HfModule, qdata: Tensor, scale: Tensor) -> Tensor:
    """`from_quantized` without its checks: they read the scales back from the device."""
    scheme = "fp8_block:ue8m0" if _scales_are_powers(module, scale) else "fp8_block"
    return Float8ExpertTensor(qdata.detach(), scale.detach().float(), scheme)


def _scales_are_powers(module: HfModule, scale: Tensor) -> bool:
    """Whether scales are powers of two: stored as such, or as fp32 in a model whose
    quantization_config has scale_fmt="ue8m0".
    """
    if scale.dtype == torch.float8_e8m0fnu:
        return True
    config = getattr(getattr(module, "config", None), "quantization_config", None)
    if isinstance(config, dict):
        return config.get("scale_fmt") == "ue8m0"
    return getattr(config, "scale_fmt", None) == "ue8m0"


def is_quantized(weight: Tensor) -> bool:
    return getattr(weight, "scheme", None) is not None
