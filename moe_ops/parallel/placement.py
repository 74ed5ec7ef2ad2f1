"""Placement: which rank of an expert-parallel group holds which experts.

E global experts, ep_size ranks; E_local experts on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_ops.checks import check_integer, check_one_of, check_size, check_tensor

PLACEMENTS = ("linear", "round_robin")


@dataclass(frozen=True)
class Placement:
    """E experts on ep_size ranks, each expert whole and on one rank.

    "linear" gives rank r a run of neighbours, "round_robin" the experts r, r + ep_size,
    r + 2 * ep_size and so on, which spreads groups of neighbours over all ranks. Either way the
    first E % ep_size ranks hold one expert more than the others; with more ranks than experts the
    last ones hold none, which `MoEConfig` refuses.

    Args:
        num_experts: E.
        ep_size: number of ranks.
        strategy: "linear" or "round_robin".

    Raises:
        ValueError: a size that is no integer or below 1, or an unknown strategy.
    """

    num_experts: int
    ep_size: int
    strategy: str = "linear"

    def __post_init__(self) -> None:
        check_size("num_experts", self.num_experts)
        check_size("ep_size", self.ep_size)
        check_one_of("strategy", self.strategy, PLACEMENTS)

    def experts_of(self, rank: int) -> range:
        """Global ids of the experts on a rank, in the order of their local ids.

        Raises:
            ValueError: a rank that is no integer or outside 0..ep_size - 1.
        """
        check_integer("rank", rank)
        if not 0 <= rank < self.ep_size:
            raise ValueError(f"rank must be in 0..ep_size - 1 = {self.ep_size - 1}, got {rank}")
        if self.strategy == "round_robin":
            return range(rank, self.num_experts, self.ep_size)
        share, extra = divmod(self.num_experts, self.ep_size)
        start = rank * share + min(rank, extra)
        return range(start, start + share + (rank < extra))

    def expert_map(self, rank: int) -> Tensor:
        """(E,) int32 on the CPU, global id -> local id on this rank, -1 for experts elsewhere: the
        expert_map of `fused_experts`.

        Raises:
            ValueError: as `experts_of`.
        """
        experts = self.experts_of(rank)
        ids = torch.full((self.num_experts,), -1, dtype=torch.int32, device="cpu")
        ids[experts.start : experts.stop : experts.step] = torch.arange(
            len(experts), dtype=torch.int32, device="cpu"
        )
        return ids

    def global_ids(self, rank: int) -> Tensor:
        """(E_local,) int32 on the CPU, local id -> global id: the inverse of `expert_map`.

        Raises:
            ValueError: as `experts_of`.
        """
        return torch.tensor(self.experts_of(rank), dtype=torch.int32, device="cpu")


class AnyPlacement(Protocol):
    """Which experts each rank holds: a `Placement`, or a `ReplicatedPlacement`."""

    @property
    def num_experts(self) -> int: ...

    @property
    def ep_size(self) -> int: ...

    def experts_of(self, rank: int) -> Sequence[int]: ...


def shard_experts(
    weight: Tensor,  # (E, ...)
    placement: AnyPlacement,
    rank: int,
) -> Tensor:  # (E_local, ...)
    """A copy of the experts that a rank holds, in the order of their local ids.

    Args:
        weight: (E, ...) of all experts: weights or biases, or a quantized ExpertTensor, whose
            scales are taken with it.
        placement: where the experts are: a `Placement` or a `ReplicatedPlacement`.
        rank: whose experts to take.

    Raises:
        ValueError: no tensor, another number of experts than the placement's, or a rank as in
            `Placement.experts_of`.
    """
    check_tensor("weight", weight)
    if weight.dim() == 0 or weight.shape[0] != placement.num_experts:
        raise ValueError(
            f"weight must have shape (E={placement.num_experts}, ...), got {tuple(weight.shape)}; "
            "pass the weight of all experts, not of one rank"
        )
    experts = placement.experts_of(rank)
    if not isinstance(experts, range):
        return weight[torch.tensor(experts, device=weight.device)]
    # a copy: a view would keep the memory of all experts
    return weight[experts.start : experts.stop : experts.step].clone()
