"""check_agreement: whether the ranks of a group were configured alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_agreement(fields: Mapping[str, object], group: ProcessGroup) -> None:
    """Raise, on every rank, unless all ranks of a group pass equal fields.

    One all-gather of their texts; each rank of the group must call it. Ranks that differ would
    otherwise wait for each other, or add up what does not belong together.

    Args:
        fields: by name, what must be equal; values are compared by their repr.
        group: the ranks.

    Raises:
        ValueError: no group that this process belongs to; or naming the first field that differs,
            its values and the ranks that have each.
    """
    check_group(group)
    mine = {name: repr(value) for name, value in fields.items()}
    gathered: list[dict[str, str]] = [{} for _ in range(group.size())]
    torch.distributed.all_gather_object(gathered, mine, group=group)
    for name in dict.fromkeys(name for theirs in gathered for name in theirs):
        ranks: dict[str, list[str]] = {}
        for rank, theirs in enumerate(gathered):
            ranks.setdefault(theirs.get(name, "no value"), []).append(str(rank))
        if len(ranks) > 1:
            values = " and ".join(
                f"{value} on rank{'s' * (len(which) > 1)} {', '.join(which)}"
                for value, which in ranks.items()
            )
            raise ValueError(
                f"{name} must be equal on all ranks of the group, got {values}; construct the "
                "layer with the same configuration everywhere"
            )


def check_group(group: object) -> None:
    """Raise unless this is a process group that this process belongs to."""
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise ValueError(
            "group must be a torch.distributed.ProcessGroup that this process belongs to, got "
            f"{group!r}; torch.distributed.group.WORLD is one after init_process_group"
        )
