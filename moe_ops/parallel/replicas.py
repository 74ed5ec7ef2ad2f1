"""Redundant experts: some experts on several ranks, which share their tokens.

E experts, ep_size ranks with S slots each. Slot s of rank r has physical id r * S + s; several
physical ids may be replicas of one expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.checks import check_integer, check_number, check_rank, check_size
from moe_ops.meta.buffers import KeepsBuffers
from moe_ops.parallel.placement import Placement


@dataclass(frozen=True)
class ReplicatedPlacement:
    """E experts in ep_size * S slots, each expert in one slot at least.

    `balanced` makes one from the load of the experts.

    Args:
        num_experts: E.
        slots: of each rank, the experts in its slots: S ids each.

    Raises:
        ValueError: a size or an id that is no integer, ranks with different numbers of slots, an
            id that names no expert, or an expert without a slot.
    """

    num_experts: int
    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_size("num_experts", self.num_experts)
        counts = {len(rank) for rank in self.slots}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(
                f"slots must be equally many of each rank, got {[len(r) for r in self.slots]}"
            )
        missing = set(range(self.num_experts)).difference(*self.slots)
        unknown = set().union(*self.slots).difference(range(self.num_experts))
        if missing or unknown:
            what, ids = ("lack", missing) if missing else ("name no expert by", unknown)
            raise ValueError(
                f"slots must hold every expert of num_experts={self.num_experts} and no other, "
                f"got some that {what} {sorted(ids)}"
            )

    @property
    def ep_size(self) -> int:
        return len(self.slots)

    @property
    def num_slots(self) -> int:
        """S, of one rank."""
        return len(self.slots[0])

    @property
    def physical(self) -> Placement:
        """Which rank holds which physical ids."""
        return Placement(self.ep_size * self.num_slots, self.ep_size)

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Experts in the slots of a rank, in their order; one may be there twice.

        Raises:
            ValueError: a rank that is no integer or outside 0..ep_size - 1.
        """
        check_integer("rank", rank)
        if not 0 <= rank < self.ep_size:
            raise ValueError(f"rank must be in 0..ep_size - 1 = {self.ep_size - 1}, got {rank}")
        return self.slots[rank]

    def replicas(self) -> list[list[int]]:
        """Physical ids of each expert, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for physical, expert in enumerate(e for rank in self.slots for e in rank):
            found[expert].append(physical)
        return found

    def rank_loads(self, load: Sequence[float]) -> list[float]:
        """Load of each rank, where the replicas of an expert have equal parts of its load."""
        counts = [len(ids) for ids in self.replicas()]
        return [sum(load[e] / counts[e] for e in rank) for rank in self.slots]


def balanced(load: Sequence[float], ep_size: int, num_slots: int) -> ReplicatedPlacement:
    """A placement that spreads the load of the experts over ranks.

    Greedy and deterministic, so that ranks which know the same load find the same placement. Each
    slot beyond the E of one per expert goes to the expert of which a replica has the largest load.
    Replicas are then placed, those of the largest load first, on the rank with the least load that
    has a free slot, and no replica of the same expert if there is such a rank. Ties go to lower
    ids.

    Args:
        load: (E) non-negative numbers, such as the tokens that chose each expert; where all are 0,
            experts count alike.
        ep_size: number of ranks.
        num_slots: S, slots of each rank.

    Raises:
        ValueError: a size that is no integer or below 1, fewer slots than experts, or a load that
            is negative or no number.
    """
    check_size("ep_size", ep_size)
    check_size("num_slots", num_slots)
    loads = [float(value) for value in load]
    E = len(loads)
    for value in loads:
        check_number("load", value)
        if not 0 <= value < float("inf"):
            raise ValueError(f"load must be finite and not negative, got {value}")
    if not 0 < E <= ep_size * num_slots:
        raise ValueError(
            f"ep_size * num_slots must be at least the number of experts, {E}, and that above 0; "
            f"got {ep_size} * {num_slots}"
        )
    if not any(loads):
        loads = [1.0] * E
    counts = [1] * E
    for _ in range(ep_size * num_slots - E):
        # more replicas than ranks would share a rank
        free = [e for e in range(E) if counts[e] < ep_size] or range(E)
        counts[max(free, key=lambda e: (loads[e] / counts[e], -e))] += 1
    order = sorted(range(E), key=lambda e: (-loads[e] / counts[e], e))
    ranks: list[list[int]] = [[] for _ in range(ep_size)]
    sums = [0.0] * ep_size
    for expert in order:
        for _ in range(counts[expert]):
            rank = min(
                (r for r in range(ep_size) if len(ranks[r]) < num_slots),
                key=lambda r: (expert in ranks[r], sums[r], r),
            )
            ranks[rank].append(expert)
            sums[rank] += loads[expert] / counts[expert]
    return ReplicatedPlacement(E, tuple(tuple(sorted(rank)) for rank in ranks))


class Replicas(KeepsBuffers):
    """Where the replicas of each expert are, on the device: expert ids to physical ids.

    Of the n replicas of an expert, a token takes number (m + j + offset) % n, where m is the index
    of the token among those of its rank, and j the position of the expert among its top_k. So the
    choice follows from the place of a token in the batch and from nothing else, neighbours take
    turns, and a step of one token a rank is spread by the ranks' offsets.

    Args:
        placement: the first one; `place` sets others of the same sizes.
        offset: the rank, where each has tokens of its own; 0 where all ranks have the same
            tokens, which must choose alike.

    Attributes:
        physical_ids: (E, ep_size * S) int32 buffer, of each expert its physical ids, then -1.
        counts: (E,) int32 buffer, replicas of each expert.
    """

    physical_ids: Tensor
    counts: Tensor

    def __init__(self, placement: ReplicatedPlacement, offset: int) -> None:
        super().__init__()
        self.sizes = placement.num_experts, placement.ep_size, placement.num_slots
        self.offset = offset
        for name, values in zip(("physical_ids", "counts"), _tables(placement), strict=True):
            self.register_buffer(name, values)

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, metadata: dict, strict: bool, *lists: list[str]
    ) -> None:
        """A state dict without tables, of weights in the slots of this placement, leaves it."""
        tables = {name: state_dict.get(prefix + name) for name in self._buffers}
        if reason := _why_not(tables, self.physical_ids.shape):
            lists[-1].append(f"{prefix}{' and '.join(tables)} must {reason}")
            return
        for name, buffer in self._buffers.items():
            state_dict.setdefault(prefix + name, buffer)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)

    @property
    def placement(self) -> ReplicatedPlacement:
        """The current one; reads the device."""
        E, ranks, slots = self.sizes
        experts = [0] * (ranks * slots)
        for expert, ids in enumerate(self.physical_ids.tolist()):
            for physical in ids[: int(self.counts[expert])]:
                experts[physical] = expert
        parts = [tuple(experts[r * slots : (r + 1) * slots]) for r in range(ranks)]
        return ReplicatedPlacement(E, tuple(parts))

    def place(self, placement: ReplicatedPlacement) -> None:
        """Take another placement of the same sizes, in place, so that CUDA graphs see it."""
        sizes = placement.num_experts, placement.ep_size, placement.num_slots
        if sizes != self.sizes:
            raise ValueError(
                f"placement must have (E, ep_size, S) = {self.sizes}, got {sizes}; construct the "
                "layer anew to change them"
            )
        for buffer, values in zip(
            (self.physical_ids, self.counts), _tables(placement), strict=True
        ):
            buffer.copy_(values)

    def forward(self, topk_ids: Tensor) -> Tensor:  # (M, top_k) -> (M, top_k) int32
        """Physical ids of this rank's tokens; -1 for ids that name no expert."""
        check_rank("topk_ids", topk_ids, "(M, top_k)")
        E = self.sizes[0]
        valid = (topk_ids >= 0) & (topk_ids < E)
        expert = torch.where(valid, topk_ids, 0).long()
        M, top_k = topk_ids.shape
        device = topk_ids.device
        token = torch.arange(M, device=device).unsqueeze(1) + self.offset
        turn = (token + torch.arange(top_k, device=device)) % self.counts[expert]
        physical = self.physical_ids[expert, turn]
        return torch.where(valid, physical, -1)


def _why_not(tables: dict[str, Tensor | None], shape: torch.Size) -> str | None:
    """What tables of a state dict must be, if they are none of a placement; torch itself speaks of
    other shapes than (E, slots of all ranks).
    """
    given = [table for table in tables.values() if table is not None]
    if len(given) == 1:
        return "be given together, got one of them"
    if [table.shape for table in given] != [shape, shape[:1]] or any(t.is_meta for t in given):
        return None
    physical_ids, counts = (table.cpu() for table in given)
    slots = torch.arange(shape[1])
    listed = slots < counts.unsqueeze(1)
    right = bool((counts > 0).all()) and bool((physical_ids[~listed] == -1).all())
    if right and torch.equal(physical_ids[listed].sort().values.long(), slots):
        return None
    return (
        f"name each of {shape[1]} slots once: of each expert as many as are counted, then -1; got "
        "others"
    )


def _tables(placement: ReplicatedPlacement) -> tuple[Tensor, Tensor]:
    replicas = placement.replicas()
    width = placement.ep_size * placement.num_slots
    ids = [[*of_one, *[-1] * (width - len(of_one))] for of_one in replicas]
    counts = [len(of_one) for of_one in replicas]
    return (
        torch.tensor(ids, dtype=torch.int32, device="cpu"),
        torch.tensor(counts, dtype=torch.int32, device="cpu"),
    )
