"""The adapters of a MoELayer: parameters of a `LoRA` for all of its experts, or a `LoRAStack`.

Dimensions as in layer.py: H hidden size, I intermediate size, E_local experts, N rows of w13, r
rank.
"""

from __future__ import annotations

import math
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from moe_ops.autograd.adapters import LoRA
from moe_ops.autograd.stack import LoRAStack
from moe_ops.checks import check_number, check_size, check_tensor
from moe_ops.nn.modules import Experts, Gate, check_here
from moe_ops.parallel.dispatch import Dispatcher
from moe_ops.parallel.replicas import Replicas


class AdaptedLayer(Protocol):
    """The attributes of a MoELayer, which imports this module, that are used here."""

    gate: Gate
    experts: Experts
    lora: ExpertsLoRA | None
    adapters: ExpertsStack | None
    dispatcher: Dispatcher | None
    replicas: Replicas | None
    backend: str


class ExpertsLoRA(nn.Module):
    """a13 (E_local, r, H), b13 (E_local, N, r), a2 (E_local, r, I) and b2 (E_local, H, r). The
    first of each pair is random, uniform in +-1 / sqrt(columns), the second zero: a new adapter
    changes nothing.
    """

    a13: Tensor
    b13: Tensor
    a2: Tensor
    b2: Tensor

    def __init__(self, w13: Tensor, w2: Tensor, rank: int, scale: float, like: Tensor) -> None:
        super().__init__()
        self.scale = scale
        (E, N, K), I = w13.shape, w2.shape[2]
        for suffix, rows, columns in (("13", N, K), ("2", K, I)):
            bound = columns**-0.5
            a = torch.empty(E, rank, columns, dtype=like.dtype, device=like.device)
            b = torch.zeros(E, rows, rank, dtype=like.dtype, device=like.device)
            self.register_parameter(f"a{suffix}", nn.Parameter(a.uniform_(-bound, bound)))
            self.register_parameter(f"b{suffix}", nn.Parameter(b))

    @classmethod
    def of(cls, layer: AdaptedLayer, rank: int, scale: float) -> Self:
        """A new adapter for `MoELayer.add_lora`, and freezes the experts. Raises as it."""
        check_size("rank", rank)
        check_number("scale", scale)
        if not math.isfinite(scale):
            raise ValueError(f"scale must be finite, got {scale}")
        if layer.adapters is not None:
            raise ValueError(
                "layer must have no stack of adapters beside one of its own, got one from "
                "set_adapters; call set_adapters(None) before"
            )
        if layer.backend not in ("auto", "torch"):
            raise ValueError(
                "backend must be 'auto' or 'torch' for a layer with adapters, got "
                f"{layer.backend!r}"
            )
        if layer.replicas is not None:
            raise ValueError(
                "layer must have each expert once to adapt it, got one with replicas; make it "
                "without enable_eplb"
            )
        check_here(layer.experts, "be adapted")
        experts = layer.experts.requires_grad_(False)
        return cls(experts.w13, experts.down_proj, rank, float(scale), layer.gate.weight)

    def adapter(self) -> LoRA:
        """The `LoRA` that `fused_experts` takes."""
        return LoRA(self.a13, self.b13, self.a2, self.b2, self.scale)

    def extra_repr(self) -> str:
        return f"rank={self.a13.shape[1]}, scale={self.scale}"


class ExpertsStack(nn.Module):
    """The matrices of a `LoRAStack` and its scales as buffers, which are in no state dict."""

    scales: Tensor

    def __init__(self, stack: LoRAStack) -> None:
        super().__init__()
        for name, tensor in zip(stack._fields, stack, strict=True):
            self.register_buffer(name, tensor, persistent=False)

    @classmethod
    def of(cls, layer: AdaptedLayer, stack: LoRAStack) -> Self:
        """The buffers of a stack for `MoELayer.set_adapters`, which says what this raises."""
        if not isinstance(stack, LoRAStack):
            raise ValueError(
                f"stack must be a moe_ops.LoRAStack, got {type(stack).__name__}; "
                "LoRAStack.of(adapters) makes one"
            )
        if layer.dispatcher is not None or layer.replicas is not None:
            raise ValueError(
                "layer must keep its tokens for them to have adapters, got one that sends them to "
                "other ranks, or has replicas; make it without a group"
            )
        if layer.lora is not None:
            raise ValueError(
                "layer must have no adapter of its own beside a stack, got one from add_lora; set "
                "layer.lora = None, and put lora.adapter() into the stack"
            )
        check_here(layer.experts, "be adapted")
        return cls(stack)

    def stack(self) -> LoRAStack:
        """The `LoRAStack` that `fused_experts` takes, which shares the memory of the buffers."""
        stack = LoRAStack._make([getattr(self, name) for name in LoRAStack._fields])
        return stack._replace(scales=self.scales.float())  # .to(bfloat16) may have rounded them

    def extra_repr(self) -> str:
        ranks = [t.shape[2] for t in self.stack()[:4:2] if t is not None]
        return f"slots={self.scales.shape[0]}, rank={max(ranks, default=0)}"


def checked_adapter_ids(layer: AdaptedLayer, adapter_ids: Tensor, hidden_states: Tensor) -> Tensor:
    """adapter_ids (M,) of tokens (..., H)."""
    check_tensor("adapter_ids", adapter_ids)
    if layer.adapters is None:
        raise ValueError(
            "adapter_ids must be None for a layer without adapters, got a tensor; call "
            "set_adapters(LoRAStack.of(adapters)) before"
        )
    if adapter_ids.dim() != hidden_states.dim() - 1:
        raise ValueError(
            f"adapter_ids must have shape {tuple(hidden_states.shape[:-1])}, one for each "
            f"token, got {tuple(adapter_ids.shape)}; expand it"
        )
    return adapter_ids.flatten()
