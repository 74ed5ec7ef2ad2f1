"""How evenly a layer's router spreads tokens over experts."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.meta.workspace import maximum


def load_balancing_loss(
    router_probabilities: Tensor,  # (M, E)
    topk_ids: Tensor,  # (M, top_k)
) -> Tensor:
    """E * sum_e f_e * P_e, which is top_k when all experts get equally many tokens.

    f_e is the number of assignments to expert e per token and P_e the mean router probability of
    e (Switch Transformers, arXiv:2101.03961, equations 4 to 6, after GShard, arXiv:2006.16668).
    For top_k > 1 f_e counts all top_k choices and is not divided by top_k, as in transformers, so
    that its coefficients carry over. Gradients flow through P_e.

    Returns:
        A scalar fp32 tensor; 0 for M = 0.
    """
    num_tokens, num_experts = router_probabilities.shape
    at_least_one = maximum(num_tokens, 1)
    fraction = tokens_per_expert(topk_ids, num_experts).float() / at_least_one
    mean_probability = router_probabilities.float().sum(0) / at_least_one
    return num_experts * (fraction * mean_probability).sum()


def tokens_per_expert(topk_ids: Tensor, num_experts: int) -> Tensor:
    """(num_experts,) int64 counts of the ids, on their device; ids out of range are left out."""
    ids = topk_ids.flatten().long()
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    # not bincount, which reads its output size on the host, nor histc, which needs floats
    return counts.scatter_add(0, ids, torch.ones_like(ids))[:num_experts]


def count_tokens(topk_ids: Tensor, expert_load: Tensor) -> None:
    """Add the tokens of each expert to expert_load (E,), but for those of a forward pass that a
    checkpoint calls again while a backward runs.
    """
    # use_reentrant=False alone does not help: such a run stops only after the last saved tensor
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        return
    with torch.no_grad():
        # not +=: torch.export (2.13) takes the attribute's assignment for a write to an input
        expert_load.add_(tokens_per_expert(topk_ids, expert_load.shape[0]))
