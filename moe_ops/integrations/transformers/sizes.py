"""Bytes of quantized experts, where transformers counts those of the weights they stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from moe_ops.tensors import ExpertTensor, sharding


def element_bytes(weight: Tensor) -> float:
    """Bytes that an element of a parameter takes, its share of the scales included."""
    local = sharding.local_part(weight)
    if isinstance(local, ExpertTensor) and local.numel():
        return local.nbytes / local.numel()
    return weight.element_size()


@functools.cache
def quantized_bytes(scheme: str, shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes that plain weights (E, N, K) take once they are quantized."""
    return ExpertTensor.from_hp(torch.empty(shape, dtype=dtype, device="meta"), scheme).nbytes


def size_text(count: int) -> str:
    """A number of bytes to three digits, as "14.6 GB"."""
    rounded = int(float(f"{count:.3g}"))
    power = (len(str(rounded)) - 1) // 3
    return f"{rounded / 1000**power:g} {('bytes', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"


def _with_real_sizes(own: Callable) -> Callable:
    """transformers' get_memory_footprint, which multiplies by the size of a dtype."""

    @functools.wraps(own)
    def get_memory_footprint(self: PreTrainedModel, *args: Any, **kwargs: Any) -> int:
        count = own(self, *args, **kwargs)
        for weight in self.parameters():
            count += round(weight.numel() * (element_bytes(weight) - weight.element_size()))
        return count

    return get_memory_footprint


PreTrainedModel.get_memory_footprint = _with_real_sizes(PreTrainedModel.get_memory_footprint)
