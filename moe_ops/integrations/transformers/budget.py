"""How many experts of each layer a budget of GPU memory has slots for, and whether the host has
room for all of them. Every byte that a report or an error names is counted here.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe_ops import environment
from moe_ops.integrations.transformers.layers import Layer
from moe_ops.integrations.transformers.sizes import size_text

AUTO = "auto"
CACHE_TOKENS = 8192  # for which AUTO leaves room in the key-value cache
_ACTIVATIONS = 2**30  # bytes that AUTO leaves for activations and workspaces at least
_ACTIVATIONS_SHARE = 16  # and at least this part of the GPU

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True)
class Demand:
    """What the experts of one layer take.

    Attributes:
        name: of the module that owns them.
        num_experts: E.
        top_k: experts of a token; no layer runs with fewer slots.
        slot_bytes: of one expert: rows of both weights, their scales and biases.
    """

    name: str
    num_experts: int
    top_k: int
    slot_bytes: int

    @property
    def bytes(self) -> int:
        return self.num_experts * self.slot_bytes


@dataclass(frozen=True)
class Budget:
    """What a model takes, and what of it fits the GPU.

    Attributes:
        layers, slots: demand and number of slots of each MoE layer.
        rest: bytes of the model without its experts.
        gpu_memory: bytes that rest and slots may take.
        device: where they are.
        why: what AUTO counted; "" for a number that was given.
    """

    layers: tuple[Demand, ...]
    slots: tuple[int, ...]
    rest: int
    gpu_memory: int
    device: torch.device
    why: str = ""

    @property
    def host_bytes(self) -> int:
        """Of the experts of layers that have fewer slots than experts."""
        pairs = zip(self.layers, self.slots, strict=True)
        return sum(layer.bytes for layer, count in pairs if count < layer.num_experts)

    @property
    def bank_bytes(self) -> int:
        """Of all slots."""
        pairs = zip(self.layers, self.slots, strict=True)
        return sum(layer.slot_bytes * count for layer, count in pairs)

    def check_host(self, loaded: bool) -> None:
        """Raise ValueError if host memory has no room for what is not there yet.

        Args:
            loaded: the model is in host memory already, and its layers move one by one.
        """
        needed = max(layer.bytes for layer in self.layers)
        what = f"{size_text(needed)} for one layer that is moved"
        if not loaded:
            experts = sum(layer.bytes for layer in self.layers)
            needed += experts + self.rest
            what = f"{size_text(experts)} of it for the experts"
        if self.device.type == "cpu":
            needed += self.bank_bytes
            what += f" and {size_text(self.bank_bytes)} for slots, which a CPU has there too"
        available = environment.available_host_memory()
        if available is not None and needed > available:
            raise ValueError(
                f"host memory must have room for {size_text(needed)}, {what}, got "
                f"{size_text(available)} available: {size_text(needed - available)} are missing. "
                "Free some, or quantize the experts to a scheme of fewer bits"
            )


def plan(
    model: nn.Module,
    layers: Sequence[Layer],
    gpu_memory: int | str,
    device: torch.device,
    bytes_of: Callable[[Layer, str], float],
) -> Budget:
    """The budget of a model whose layers these are.

    Args:
        gpu_memory: as `parse` returns it.
        bytes_of: of one of a layer's weights, as it will be.

    Raises:
        ValueError: as `slots` and `choose`.
    """
    demands = tuple([_demand(model, layer, bytes_of) for layer in layers])
    rest, why = _rest(model, layers), ""
    if isinstance(gpu_memory, str):
        chosen = choose(device, text_config(model))
        gpu_memory, why = chosen.gpu_memory, chosen.why
    return Budget(demands, slots(demands, rest, gpu_memory), rest, gpu_memory, device, why)


def _demand(model: nn.Module, layer: Layer, bytes_of: Callable[[Layer, str], float]) -> Demand:
    num_experts = layer.natural_weight(layer.weights[0]).shape[0]
    count = sum(bytes_of(layer, name) for name in layer.weights)
    count += sum(getattr(layer.owner, name).nbytes for name in layer.biases)
    config = getattr(layer.owner, "config", None) or text_config(model)
    top_k = min(layer.top_k_in(config), num_experts)
    return Demand(layer.name, num_experts, top_k, -(-round(count) // num_experts))


def text_config(model: Any) -> Any:
    """The configuration of a transformers model's language model; None for other modules."""
    config = getattr(model, "config", None)
    return config if config is None else config.get_text_config(decoder=True)


def _rest(model: nn.Module, layers: Sequence[Layer]) -> int:
    """Bytes of a model without its experts; tied tensors count once."""
    experts = {id(t) for layer in layers for t in layer.held().values()}
    tied = {*(getattr(model, "all_tied_weights_keys", None) or ())}  # before they are tied, too
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return sum([t.nbytes for name, t in named if name not in tied and id(t) not in experts])


def parse(gpu_memory: int | str) -> int | str:
    """A number of bytes, or AUTO.

    Raises:
        ValueError: neither a positive number of bytes, nor a text such as "12GiB", nor AUTO.
    """
    if isinstance(gpu_memory, int) and not isinstance(gpu_memory, bool) and gpu_memory > 0:
        return gpu_memory
    if gpu_memory == AUTO:
        return AUTO
    text = gpu_memory if isinstance(gpu_memory, str) else ""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b", text.strip().lower())
    count = 0
    if match is not None and (match[2] or not match[3]):
        size = float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]]
        count = int(size) if math.isfinite(size) else 0
    if count < 1:
        raise ValueError(
            'gpu_memory must be a positive number of bytes, a text such as "12GiB" or "12GB", or '
            f'"auto", got {gpu_memory!r}'
        )
    return count


def slots(layers: Sequence[Demand], rest: int, gpu_memory: int) -> tuple[int, ...]:
    """The slots of each layer. Layers get equally many bytes; what one does not need, because all
    its experts have slots, goes to the others.

    Args:
        layers: at least one.
        rest: bytes of the model without its experts.
        gpu_memory: bytes for both.

    Raises:
        ValueError: gpu_memory has no room for the rest and top_k slots of each layer.
    """
    least = sum(layer.top_k * layer.slot_bytes for layer in layers)
    left = gpu_memory - rest - least
    if left < 0:
        most = max(layer.top_k for layer in layers)
        raise ValueError(
            f"gpu_memory must be at least {rest + least} bytes, {size_text(rest)} for the model "
            f"without its experts and {size_text(least)} for top_k={most} slots in each of its "
            f"{len(layers)} MoE layers, got {gpu_memory}: {size_text(-left)} are missing. Give "
            "more, or quantize the experts to a scheme of fewer bits"
        )
    wanted = [(layer.num_experts - layer.top_k) * layer.slot_bytes for layer in layers]
    share = 0
    for i, want in enumerate(sorted(wanted)):
        share = left // (len(wanted) - i)
        if want > share:
            break
        left -= want
        share = want
    return tuple(
        layer.top_k + min(layer.num_experts - layer.top_k, share // layer.slot_bytes)
        for layer in layers
    )


@dataclass(frozen=True)
class AutoBudget:
    """What AUTO chose: a budget in bytes, and why."""

    gpu_memory: int
    why: str


def choose(device: torch.device, config: Any) -> AutoBudget:
    """What is free on a GPU now, without room for activations and a key-value cache.

    Raises:
        ValueError: no GPU, or nothing would be left.
    """
    if device.type != "cuda":
        raise ValueError(
            f'gpu_memory must be a number of bytes on {device.type}, got "auto", which asks a GPU '
            'how much is free; give one, such as "12GiB"'
        )
    free, total = torch.cuda.mem_get_info(device)
    # what torch holds and does not use
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    cache = 0 if config is None else cache_bytes(config, CACHE_TOKENS)
    room = max(_ACTIVATIONS, total // _ACTIVATIONS_SHARE)
    found = free - cache - room
    why = (
        f"{size_text(free)} are free on {device}, of which {size_text(cache)} are left for a "
        f"key-value cache of {CACHE_TOKENS} tokens and {size_text(room)} for activations"
    )
    if found < 1:
        raise ValueError(
            f'gpu_memory must be given where "auto" leaves nothing: {why}; give a number of '
            "bytes, or free memory of the GPU"
        )
    return AutoBudget(found, why)


def cache_bytes(config: Any, tokens: int) -> int:
    """Bytes of a key-value cache, as the configuration of a language model describes it."""
    heads = config.num_attention_heads
    columns = 2 * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    columns *= getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "kv_lora_rank", None):  # cached before keys and values are made of it
        columns = config.kv_lora_rank + config.qk_rope_head_dim
    dtype = getattr(config, "dtype", None)
    width = dtype.itemsize if isinstance(dtype, torch.dtype) else 2
    return tokens * config.num_hidden_layers * columns * width
