"""The modules inside MoELayer: router gate, experts' parameters, shared expert.

Dimensions as in layer.py: M tokens, H hidden size, I intermediate size, E experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ops import activations
from moe_ops.activations import Activation

_INIT_STD = 0.02


class Gate(nn.Module):
    """Router logits of tokens; may compute in a dtype of its own."""

    e_score_correction_bias: Tensor | None

    def __init__(
        self, num_experts: int, hidden_size: int, bias: bool, correction_bias: bool, factory: dict
    ) -> None:
        super().__init__()
        self.logits_dtype: torch.dtype | None = None  # None: whatever linear makes of its input
        self.weight = parameter(num_experts, hidden_size, **factory)
        self.bias = nn.Parameter(torch.zeros(num_experts, **factory)) if bias else None
        correction = (
            torch.zeros(num_experts, device=factory["device"]) if correction_bias else None
        )
        self.register_buffer("e_score_correction_bias", correction)

    def forward(self, x: Tensor) -> Tensor:  # (M, H) -> (M, E)
        dtype = self.logits_dtype
        if dtype is None:
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), self.weight.to(dtype), bias)


class Experts(nn.Module):
    """The parameters of all local experts, under the names checkpoints use."""

    down_proj_bias: Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        gated: bool,
        bias: bool,
        factory: dict,
    ) -> None:
        super().__init__()
        self.w13_name = "gate_up_proj" if gated else "up_proj"
        rows = 2 * width if gated else width
        w13_bias = down_proj_bias = None
        if bias:
            w13_bias = nn.Parameter(torch.zeros(num_experts, rows, **factory))
            down_proj_bias = nn.Parameter(torch.zeros(num_experts, hidden_size, **factory))
        w13 = parameter(num_experts, rows, hidden_size, **factory)
        self.register_parameter(self.w13_name, w13)
        self.down_proj = parameter(num_experts, hidden_size, width, **factory)
        self.register_parameter(f"{self.w13_name}_bias", w13_bias)
        self.register_parameter("down_proj_bias", down_proj_bias)

    @property
    def w13(self) -> Tensor:  # (E_local, N, H)
        return getattr(self, self.w13_name)

    @property
    def w13_bias(self) -> Tensor | None:  # (E_local, N)
        return getattr(self, f"{self.w13_name}_bias")


class SharedExpert(nn.Module):
    """An expert that sees every token."""

    def __init__(
        self, hidden_size: int, width: int, activation: Activation, factory: dict
    ) -> None:
        super().__init__()
        if activation.interleaved:  # its two halves are two projections here
            activation = dataclasses.replace(activation, name="swigluoai_uninterleave")
        self.activation = activation
        linear = {"bias": False, **factory}
        self.gate_proj: nn.Linear | None = None
        if activation.gated:
            self.gate_proj = nn.Linear(hidden_size, width, **linear)
        self.up_proj = nn.Linear(hidden_size, width, **linear)
        self.down_proj = nn.Linear(width, hidden_size, **linear)

    def forward(self, x: Tensor) -> Tensor:  # (M, H) -> (M, H)
        up = self.up_proj(x)
        if self.gate_proj is not None:
            up = torch.cat((self.gate_proj(x), up), -1)
        return self.down_proj(activations.apply(up, self.activation))


def parameter(*shape: int, **factory: Any) -> nn.Parameter:
    """Random initial weights."""
    return nn.Parameter(torch.empty(shape, **factory).normal_(std=_INIT_STD))
