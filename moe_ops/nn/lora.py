"""The adapters of a MoELayer: parameters of a `LoRA` for all of its experts, or a `LoRAStack`.

Dimensions as in layer.py: H hidden size, I intermediate size, E_local experts, N rows of w13, r
rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_ops.autograd.adapters import LoRA
from moe_ops.autograd.stack import LoRAStack


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
        (E, N, K), I = w13.shape, w2.shape[2]  # noqa: E741
        for suffix, rows, columns in (("13", N, K), ("2", K, I)):
            bound = columns**-0.5
            a = torch.empty(E, rank, columns, dtype=like.dtype, device=like.device)
            b = torch.zeros(E, rows, rank, dtype=like.dtype, device=like.device)
            self.register_parameter(f"a{suffix}", nn.Parameter(a.uniform_(-bound, bound)))
            self.register_parameter(f"b{suffix}", nn.Parameter(b))

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

    def stack(self) -> LoRAStack:
        """The `LoRAStack` that `fused_experts` takes, which shares the memory of the buffers."""
        stack = LoRAStack._make([getattr(self, name) for name in LoRAStack._fields])
        return stack._replace(scales=self.scales.float())  # .to(bfloat16) may have rounded them

    def extra_repr(self) -> str:
        ranks = [t.shape[2] for t in self.stack()[:4:2] if t is not None]
        return f"slots={self.scales.shape[0]}, rank={max(ranks, default=0)}"
