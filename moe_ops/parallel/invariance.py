"""Which deployments return the bits of one device under `batch_invariant`."""

from __future__ import annotations

from moe_ops.batch_invariance import resolve
from moe_ops.meta.blocks import EXPERT_BLOCKS
from moe_ops.parallel.config import ParallelConfig

SIZES = (1, 2, 4, 8)  # of a group: each rank holds whole blocks of experts


def why_not(
    parallel: ParallelConfig, num_experts: int, dispatcher: object = None
) -> tuple[str, ...]:
    """Every reason why the sum over a token's experts is not that of one device; those of a
    dispatcher, too, if there is one already.
    """
    reasons = []
    if dispatcher is not None and not hasattr(dispatcher, "combine_by_tree"):
        reasons.append(f"{type(dispatcher).__name__} has no combine_by_tree")
    if parallel.tp_size > 1:
        reasons.append(
            "ranks hold columns of all experts, so that every product is a sum over ranks; place "
            "whole experts"
        )
    if parallel.ep_size not in SIZES:
        sizes = ", ".join(map(str, SIZES))
        reasons.append(f"ep_size must be one of {sizes}, got {parallel.ep_size}")
    if num_experts % EXPERT_BLOCKS:
        reasons.append(
            f"the number of experts must be a multiple of {EXPERT_BLOCKS}, got {num_experts}"
        )
    if parallel.expert_placement != "linear":
        reasons.append(f"expert_placement must be 'linear', got {parallel.expert_placement!r}")
    if parallel.enable_eplb:
        reasons.append("redundant experts are elsewhere after each rebalancing")
    return tuple(reasons)


def check(batch_invariant: bool | None, reasons: tuple[str, ...]) -> bool:
    """Whether a layer that is spread over a group is asked for batch invariance.

    Raises:
        ValueError: it is, and there are reasons against it.
    """
    asked = resolve(batch_invariant)
    if asked and reasons:
        raise ValueError(
            "batch_invariant must be False for a layer that is spread like this one, got True: "
            + "; ".join(reasons)
        )
    return asked
