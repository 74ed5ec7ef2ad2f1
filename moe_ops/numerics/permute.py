"""Sorting token-expert pairs by expert and putting the results back, in plain torch.

Traceable with any M, without host reads, and deterministic: the sort is stable, and sums over
top_k have a fixed order. Pairs whose id names no local expert are sorted after all others and
contribute zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.numerics import sums


class Pairs(NamedTuple):
    """The S = M * top_k token-expert pairs, sorted by local expert."""

    order: Tensor  # (S,) int64: pair m * top_k + j at each sorted row
    inverse: Tensor  # (S,) int64: sorted row of each pair
    experts: Tensor  # (S,) int64: local expert of each sorted row, E after the last valid one
    offsets: Tensor  # (E,) int32: cumulative end row of each expert
    valid: Tensor  # (M, top_k) bool: whether the pair's expert is here


def local_ids(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None = None) -> Tensor:
    """Local expert ids, int64, with `num_experts` for every expert that is not here.

    Args:
        topk_ids: (M, top_k) int32 or int64; any value is allowed.
        expert_map: (global E,) integers, global id -> local id or -1.
    """
    ids = topk_ids.to(torch.int64)
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        mapped = expert_map.to(torch.int64)[ids.clamp(0, expert_map.shape[0] - 1)]
        ids = torch.where(known, mapped, -1)
    return torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)


def sort_pairs(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None = None) -> Pairs:
    """Sort the pairs of a batch by local expert; arguments as for `local_ids`."""
    ids = local_ids(topk_ids, num_experts, expert_map)
    experts, order = torch.sort(ids.reshape(-1), stable=True)
    ends = torch.arange(num_experts, device=ids.device)
    offsets = torch.searchsorted(experts, ends, right=True, out_int32=True)
    inverse = torch.empty_like(order)
    inverse.scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return Pairs(order, inverse, experts, offsets, ids < num_experts)


def gather_tokens(x: Tensor, pairs: Pairs) -> Tensor:
    """Rows of x (M, K) in sorted pair order, (S, K). Differentiable.

    Rows are repeated before they are gathered, so that the gradient is a permutation and a sum
    over top_k in a fixed order. The gradient of x[order // top_k] would add rows in any order.
    """
    repeated = x.unsqueeze(1).expand(-1, pairs.valid.shape[1], -1).flatten(0, 1)
    return repeated.index_select(0, pairs.order)


def weigh_inputs(x: Tensor, topk_weights: Tensor, pairs: Pairs) -> Tensor:
    """x (M, K) times its one router weight (M, 1), in fp32 with one cast at the end.
    Differentiable.

    Rows whose expert is not here may hold anything, and neither they nor their weights get
    gradients.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    weights = torch.where(pairs.valid, topk_weights.to(wide), 0)
    return (x.to(wide) * weights).to(x.dtype)


def combine(
    y: Tensor,
    topk_weights: Tensor,
    pairs: Pairs,
    dtype: torch.dtype,
    ids: Tensor | None = None,
    num_experts: int = 0,
) -> Tensor:
    """Weighted sum of expert outputs over top_k, in fp32, with one cast at the end.

    Args:
        y: (S, K) expert outputs in sorted pair order; rows of pairs whose expert is not here may
            hold anything.
        topk_weights: (M, top_k), any float dtype.
        ids: (M, top_k) of num_experts experts, for sums in the order of meta/blocks.py. None: by a
            sum of torch, whose order is the same from run to run, and may depend on M.

    Returns:
        (M, K) of `dtype`. Differentiable in y and topk_weights.
    """
    wide = _wide(y.dtype)
    valid = pairs.valid.unsqueeze(-1)
    weights = torch.where(valid, topk_weights.to(wide).unsqueeze(-1), 0)
    rows = y.index_select(0, pairs.inverse).view(*pairs.valid.shape, y.shape[1]).to(wide)
    weighed = torch.where(valid, rows, 0) * weights
    if ids is None:
        return weighed.sum(1).to(dtype)
    blocks = sums.block_of(ids, num_experts)
    return sums.add_blocks(weighed, blocks, num_experts).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
