"""Which expert is in which slot, as kernels take it. torch alone.

Legend: E experts of a layer, S slots, S < E, both at most MAX_EXPERTS.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from moe_ops.kernels.launch import Runtime, unprefixed

MAX_EXPERTS = 1024  # one program has all of them
Entries = Annotated[Tensor, "pointer"]


@unprefixed
class Table(NamedTuple):
    """The state of a bank of slots, on the device. A slot is empty or holds one expert, and an
    expert is in one slot at most.

    A pass over a call's experts serves as many of the chosen ones as there are slots: those that
    are in slots first, and then, in the order of their numbers, missing ones, each of which takes
    the least recently used slot that no expert of the pass is in. The slots of a pass become the
    most recently used ones; among themselves they keep the order that they had.
    """

    slot_of: Entries  # (E,) int32: the slot of each expert, or -1
    expert_of: Entries  # (S,) int32: the expert of each slot, or -1
    order: Entries  # (S,) int32: the slots, the least recently used one first
    wanted: Entries  # (E,) int32: 1 of a call's experts that no pass has served yet
    served: Entries  # (E,) int32: the slot of an expert that this pass serves, or -1
    arrivals: Entries  # (S, 2) int32: (expert, slot) of those that come in this pass
    num_arrivals: Entries  # (1,) int32
    counters: Entries  # (2,) int64: experts that were in slots, and that came
    E: Runtime
    S: Runtime


def empty_placement(E: int, S: int) -> Tensor:
    """Where no expert is in a slot: slot_of, expert_of and order one after the other, (E + 2 S,)
    int32, on the CPU.
    """
    order = torch.arange(S, dtype=torch.int32, device="cpu")
    return torch.cat([order.new_full((E + S,), -1), order])


def table_of(placement: Tensor, E: int, S: int) -> Table:
    """The Table whose slot_of, expert_of and order are parts of (E + 2 S,) int32."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=placement.device)

    slot_of, expert_of, order = placement.split([E, S, S])
    return Table(
        slot_of=slot_of,
        expert_of=expert_of,
        order=order,
        wanted=zeros(E),
        served=zeros(E),
        arrivals=zeros(S, 2),
        num_arrivals=zeros(1),
        counters=zeros(2, dtype=torch.int64),
        E=E,
        S=S,
    )


def admit_by_torch(table: Table, ids: Tensor | None) -> None:
    """What the kernel of admit.py does, in plain torch. `ids` (M, top_k); None in a further
    pass.
    """
    slot_of, expert_of, order, wanted, served, arrivals, num_arrivals, counters, E, S = table
    if ids is not None:
        wanted.zero_()
        wanted[ids[(ids >= 0) & (ids < E)].long()] = 1
    hit = (wanted != 0) & (slot_of >= 0)
    hits = int(hit.sum())
    coming = ((wanted != 0) & (slot_of < 0)).nonzero().flatten()[: S - hits]
    count = coming.numel()
    expert = expert_of[order.long()].long()
    used = (expert >= 0) & hit[expert.clamp(min=0)]
    taken = (~used).nonzero().flatten()[:count]
    arrivals[:count] = torch.stack([coming, order[taken]], 1).to(torch.int32)
    num_arrivals.fill_(count)
    used[taken] = True
    order.copy_(torch.cat([order[~used], order[used]]))
    served.copy_(torch.where(hit, slot_of, -1))
    wanted[hit] = 0
    wanted[coming] = 0
    counters += torch.tensor([hits, count], device=counters.device)


def enter_by_torch(table: Table) -> tuple[Tensor, Tensor]:
    """(experts, slots) of the arrivals, int64, which are entered in the table as the kernel of
    fetch.py enters them.
    """
    count = int(table.num_arrivals)
    experts, slots = table.arrivals[:count].long().unbind(1)
    before = table.expert_of[slots].long()
    table.slot_of[before[before >= 0]] = -1
    table.expert_of[slots] = experts.to(torch.int32)
    for slot_of in (table.slot_of, table.served):
        slot_of[experts] = slots.to(torch.int32)
    return experts, slots
