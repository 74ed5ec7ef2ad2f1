"""torchtitan's routed experts on moe_ops, as overrides of its configuration:

    --override.imports moe_ops.integrations.torchtitan.grouped_experts

or in Python, before the model is built:

    imports = ["moe_ops.integrations.torchtitan.grouped_experts"]
    apply_overrides(OverrideConfig(imports=imports), cfg)

`grouped_experts` keeps torchtitan's parameters w1, w2 and w3; `fused_grouped_experts` has those of
torchtitan's own override of that name, w13 with gate and up rows in turn, and its checkpoints,
which are the stock ones. Both compute in bf16, as the stock module does, of whatever dtype the
parameters and the stream are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.overrides import fused_swiglu

from moe_ops import grouped

_DTYPE = torch.bfloat16  # torchtitan's experts cast to it in each forward


def _local(parameter: Tensor) -> Tensor:
    """This rank's experts of a DTensor, as the rows that its dispatcher sends here want them."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


class MoEOpsGroupedExperts(GroupedExperts):
    """torchtitan's GroupedExperts, whose forward is `moe_ops.grouped_experts`."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        w1, w2, w3 = [_local(w) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)]
        return grouped.grouped_experts(x_RD, (w1, w3), w2, num_tokens_per_expert_E, dtype=_DTYPE)


class MoEOpsFusedGroupedExperts(fused_swiglu.FusedGroupedExperts):
    """torchtitan's FusedGroupedExperts, whose forward is `moe_ops.grouped_experts`."""

    @dataclass(kw_only=True, slots=True)
    class Config(fused_swiglu.FusedGroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        w13, w2 = _local(self.w13), _local(self.w2_EDF)
        return grouped.grouped_experts(x_RD, w13, w2, num_tokens_per_expert_E, dtype=_DTYPE)


@override(
    target=GroupedExperts.Config,
    description="Routed experts on moe_ops, with the stock parameters.",
    exact=True,  # subclasses of models have formulas of their own
)
def grouped_experts(cfg: Any) -> Any:
    """The override that keeps torchtitan's parameters."""
    return derive(cfg, MoEOpsGroupedExperts.Config)


@override(
    target=GroupedExperts.Config,
    description="Routed experts on moe_ops, gate and up rows in one parameter.",
    exact=True,
)
def fused_grouped_experts(cfg: Any) -> Any:
    """The override with the parameters of torchtitan's own of this name."""
    return derive(fused_swiglu.fused_grouped_experts(cfg), MoEOpsFusedGroupedExperts.Config)
