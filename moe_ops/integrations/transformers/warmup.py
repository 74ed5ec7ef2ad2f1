"""The layers of a transformers model for moe_ops.warmup: its MoE blocks with their routers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import nn

from moe_ops.integrations.transformers import forwards
from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.integrations.transformers.hook import NAME
from moe_ops.integrations.transformers.layers import Layer
from moe_ops.warmup import Subject, of_module, random_tokens


def find(model: nn.Module, dtype: torch.dtype | None) -> Iterator[Subject]:
    """The blocks whose experts run through moe_ops; experts without a block of their own by
    themselves.
    """
    modules = dict(model.named_modules())
    for name, module in modules.items():
        layer = layers_of.layer_of(name, module)
        if layer is None or not runs_here(layer):
            continue
        block_name = name if layer.kind.routes else _outside(name, modules)
        block = modules[block_name]
        of_tokens = dtype or _dtype(layer, model)
        if not (layer.kind.routes or (name and _is_block(block))):
            yield of_module(name, module, _experts(layer, of_tokens))
        else:
            yield of_module(block_name, block, _block(layer, block, of_tokens))


def _outside(name: str, modules: dict[str, nn.Module]) -> str:
    """The name of the module around experts, and around what PEFT wraps them with."""
    while True:
        name = name.rpartition(".")[0]
        of_peft = type(modules[name]).__module__.startswith("peft.")
        if not name or not (of_peft or isinstance(modules[name], nn.ModuleDict)):
            return name


def runs_here(layer: Layer) -> bool:
    """Whether a layer was attached."""
    if not layer.on_hook:
        return forwards.attached(layer.module)
    return getattr(layer.module.config, "_experts_implementation", None) == NAME


def _is_block(module: nn.Module) -> bool:
    """Whether a module takes hidden states alone: some models keep their experts in the decoder
    layer.
    """
    forward = type(module).forward
    known = inspect.signature(forward).parameters
    return forward is not nn.Module.forward and not known.keys() & {
        "attention_mask",
        "position_embeddings",
    }


def _dtype(layer: Layer, model: nn.Module) -> torch.dtype:
    """Of hidden states: that of the experts' weights or, where they are bare e4m3, of others."""
    weight = getattr(layer.owner, layer.weights[0])
    for parameter in (weight, *model.parameters()):
        if parameter.dtype in (torch.bfloat16, torch.float16, torch.float32):
            return parameter.dtype
    return torch.bfloat16


def _block(layer: Layer, block: nn.Module, dtype: torch.dtype) -> Callable[[int], object]:
    # columns of the block's input, which in some models are not those of the experts'
    size = getattr(getattr(layer.owner, "config", None), "hidden_size", layer.columns)

    def run(num_tokens: int) -> object:
        x = random_tokens((1, num_tokens, size), dtype, layer.device)
        return block._call_impl(x)  # with its hooks, and eagerly where it is compiled

    return run


def _experts(layer: Layer, dtype: torch.dtype) -> Callable[[int], object]:
    """Experts alone. Their router's dtype does not show: both that routers return are warmed."""

    def run(num_tokens: int) -> None:
        num_experts = getattr(layer.owner, layer.weights[0]).shape[0]
        x = random_tokens((num_tokens, layer.columns), dtype, layer.device)
        scores = random_tokens((num_tokens, num_experts), torch.float32, layer.device)
        scores, ids = scores.sigmoid().topk(layer.top_k)
        for router_dtype in dict.fromkeys((dtype, torch.float32)):
            layer.module._call_impl(x, ids, scores.to(router_dtype))

    return run
