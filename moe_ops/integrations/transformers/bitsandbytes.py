"""Models with experts in nf4 or fp4, saved as bitsandbytes saves them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import PreTrainedModel

from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.integrations.transformers.config import MoeOpsConfig
from moe_ops.integrations.transformers.quantizer import (
    MoeOpsQuantizer,
    natural_rows,
    state_with_whole_experts,
)
from moe_ops.meta.scales import TRANSPOSED
from moe_ops.schemes import get_scheme
from moe_ops.tensors import ExpertTensor

_METHOD = "bitsandbytes"


def save_bitsandbytes(
    model: PreTrainedModel, save_directory: str | os.PathLike, **options: Any
) -> None:
    """Save a model whose experts are in nf4 or fp4 as bitsandbytes saves 4-bit models: a folder
    whose files and config.json say nothing of moe_ops.

    Experts get the names of the family's own checkpoints, mostly one matrix an expert, which
    transformers 4 with bitsandbytes loads, and vLLM. Families whose checkpoints hold the experts
    of a layer in one tensor get one 4-bit tensor, as bitsandbytes saves such a parameter. Codes
    and scales do not change, so that `from_pretrained(folder, quantization_config=MoeOpsConfig())`
    gives experts of the same bits; transformers 5 alone has no 4-bit experts. Scales stay in fp32,
    without double quantization. Other layers are written as they are, in 4 bits if bitsandbytes
    quantized them while the model was loaded.

    Args:
        model: a transformers model, quantized by `quantize(model, "nf4")`, `MoeOpsConfig("nf4")`
            or bitsandbytes itself.
        save_directory: the folder, which is made if it is not there.
        options: as for `save_pretrained`.

    Raises:
        ValueError: no quantized experts; some in another scheme, in groups that bitsandbytes does
            not have, or kept as (E, columns, rows), whose blocks would run over other numbers;
            adapters on experts; or other layers that another library than bitsandbytes quantized.
    """
    from moe_ops.integrations.checkpoints import bitsandbytes  # with all that reads checkpoints

    if not isinstance(model, PreTrainedModel) or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"model must be a transformers model without adapters, got {type(model).__name__}; "
            "merge or unload its adapters"
        )
    beside = getattr(getattr(model, "hf_quantizer", None), "beside", None)
    before = {} if beside is None else beside.quantization_config.to_dict()
    if before and not (before.get("quant_method") == _METHOD and before.get("load_in_4bit")):
        raise ValueError(
            f"layers beside the experts must be plain, or in 4 bits of {_METHOD}, got those of "
            f"{before.get('quant_method')!r}"
        )
    for layer in layers_of.find(model):
        if layer.wrapped:
            raise ValueError(
                f"{layer.name} must carry no adapter; merge or unload adapters before you save"
            )
    state = state_with_whole_experts(model)
    experts = {name: t for name, t in state.items() if isinstance(t, ExpertTensor) and t.scheme}
    if not experts and model.should_save_on_this_rank(True):
        raise ValueError(
            'model must have experts in nf4 or fp4, got none; call quantize(model, "nf4")'
        )
    for name, weight in experts.items():
        try:
            bitsandbytes.check_storable(get_scheme(weight.scheme))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    conversions = _conversions(model)
    others = {name: t for name, t in state.items() if name not in experts}
    # transformers 4 expects it of all matrices of a file, or of none
    tensors = bitsandbytes.without_double_quantization(_reverted(model, others, conversions))
    plain = [name for name, t in tensors.items() if t.is_floating_point() and t.dim() == 2]
    kinds = set()
    for name, weight in experts.items():
        tensors |= _stored(model, name, weight, conversions)
        kinds.add(get_scheme(weight.scheme).quantized_weight.dtype)
    config = {
        "quant_method": _METHOD,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": max(kinds, default="nf4"),
        "bnb_4bit_compute_dtype": str(model.dtype).removeprefix("torch."),
        **before,
        "bnb_4bit_use_double_quant": False,
        "llm_int8_skip_modules": [name.removesuffix(".weight") for name in plain],
    }
    with _saving(model, tensors, config):
        model.save_pretrained(save_directory, **options)


class _Writer(MoeOpsQuantizer):
    """Hands tensors over to `save_pretrained`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(MoeOpsConfig())
        self.tensors = tensors

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        return self.tensors, {}


@contextmanager
def _saving(
    model: PreTrainedModel, tensors: dict[str, Tensor], config: dict[str, Any]
) -> Iterator[None]:
    """Let `save_pretrained` write these tensors, beside this quantization_config."""
    of_model, of_config = vars(model), vars(model.config)
    both = [(of_model, dict(of_model)), (of_config, dict(of_config))]
    of_config.pop("experts_implementation", None)
    of_config["quantization_config"] = config
    of_model |= {"hf_quantizer": _Writer(tensors), "_weight_conversions": []}
    try:
        yield
    finally:
        for attributes, old in both:
            attributes.clear()
            attributes.update(old)


def _conversions(model: PreTrainedModel) -> list:
    """Those between a family's checkpoints and its model, which quantized models have not."""
    return [
        transform
        for transform in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(transform, loading.PrefixChange)
    ]


def _reverted(
    model: PreTrainedModel, state: dict[str, Tensor], conversions: list
) -> dict[str, Tensor]:
    """Tensors of a model as those of its family's checkpoints."""
    before = vars(model).get("_weight_conversions")
    model._weight_conversions = conversions
    try:
        return loading.revert_weight_conversion(model, state)
    finally:
        model._weight_conversions = before


def _stored(
    model: PreTrainedModel, name: str, weight: ExpertTensor, conversions: list
) -> dict[str, Tensor]:
    """The tensors of a parameter of experts. transformers takes a tensor of the numbers of its
    rows apart, which says which rows belong to each matrix.
    """
    from moe_ops.integrations.checkpoints import bitsandbytes

    turned = weight.weight_layout == TRANSPOSED
    natural = natural_rows(weight)
    E, N, _ = natural.shape
    numbers = torch.arange(E * N).view((E, 1, N) if turned else (E, N, 1))
    found: dict[str, Tensor] = {}
    for target, rows in _reverted(model, {name: numbers}, conversions).items():
        if rows.shape[-1] != 1:
            raise ValueError(
                f"{name} must be kept as (E, rows, columns), got (E, columns, rows), as its "
                "family's checkpoints have it: bitsandbytes' blocks would run over other numbers. "
                "Save it with save_pretrained"
            )
        rows = rows.squeeze(-1).to(natural.qdata.device)
        codes, scale = [t.flatten(0, 1)[rows] for t in (natural.qdata, natural.scale)]
        base = target.removesuffix(".weight")
        of_stack = base == target  # whose names have no ".weight"
        parts = bitsandbytes.stored(get_scheme(natural.scheme), codes, scale, natural.dtype)
        for role, tensor in parts.items():
            end = role.removeprefix("weight").removeprefix(".") if of_stack else role
            found[f"{base}.{end}" if end else base] = tensor
    return found
