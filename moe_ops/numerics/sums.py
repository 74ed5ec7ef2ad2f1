"""Sums in the order of `moe_ops.meta.blocks`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.meta.blocks import num_blocks


def block_of(topk_ids: Tensor, num_experts: int) -> Tensor:
    """The block of each id, int64; of ids that name no expert, anything."""
    return topk_ids.long() * num_blocks(num_experts) // num_experts


def add_blocks(
    terms: Tensor,  # (M, top_k, K)
    blocks: Tensor,  # (M, top_k), as from block_of
    num_experts: int,
) -> Tensor:  # (M, K)
    """The sum of a token's terms; those of experts that are not here are +0. Differentiable."""
    sums = []
    for block in range(num_blocks(num_experts)):
        total = torch.zeros_like(terms[:, 0])
        for j in range(terms.shape[1]):
            total = total + torch.where(blocks[:, j, None] == block, terms[:, j], 0)
        sums.append(total)
    return add_by_tree(sums)


def add_by_tree(parts: Sequence[Tensor]) -> Tensor:
    """The sum by a binary tree over neighbours, in the parts' dtype; the last of an odd number
    joins it one level up.
    """
    while len(parts) > 1:
        sums = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*sums, *parts[2 * len(sums) :]]
    return parts[0]
