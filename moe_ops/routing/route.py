"""route(): router logits -> (topk_weights, topk_ids), by every routing method in use.

Dimensions: M tokens, E experts, G groups of S = E / G experts, top_k experts per token.

Rules shared by all methods: weights are fp32 and ids int32; among equal scores the lower index
wins; a logit that is NaN or -inf is no candidate: it has weight 0 and is chosen only when fewer
than top_k others are left, so every id is valid for every input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from moe_ops.checks import check_ids, check_number, check_rank, check_tensor
from moe_ops.kernels.launch import Lazy
from moe_ops.ops import transforms
from moe_ops.ops.library import register_function
from moe_ops.ops.memory import refuse_lost
from moe_ops.routing.methods import (
    RECIPES,
    Recipe,
    RoutingMethod,
    check_method,
    resolve_routing_method,
)

_LOWEST = torch.finfo(torch.float32).min  # stands for "no candidate": -inf would make NaN
MAX_EXPERTS_FUSED = 1024  # one program of the fused kernel holds a whole row


def route(
    router_logits: Tensor,
    top_k: int,
    method: RoutingMethod | str | Callable[[Tensor, int], tuple[Tensor, Tensor]] = "renormalize",
    *,
    num_expert_groups: int | None = None,
    topk_groups: int | None = None,
    correction_bias: Tensor | None = None,
    scaling_factor: float = 1.0,
    scoring: str | None = None,
    generator: torch.Generator | None = None,
    topk_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose top_k experts for each token and weight them; or with `topk_ids`, weight those.

    | method | what it does |
    |---|---|
    | default | softmax -> top-k |
    | renormalize | top-k -> softmax over the chosen (Mixtral, Qwen3-MoE, GPT-OSS) |
    | renormalize_naive | softmax -> top-k -> divide by their sum; equals renormalize |
    | deepseek_v3 | sigmoid, + bias, top groups, top-k -> unbiased scores over their sum |
    | grouped_softmax | softmax, top groups, top-k (DeepSeek-V2); `_renormalize` divides by sum |
    | llama4 | top-1 -> sigmoid |
    | sigmoid | sigmoid -> top-k; `_renormalize` divides by their sum |
    | topk | top-k of the logits, which are the weights |
    | sqrtsoftplus | sqrt(softplus), + bias, top-k -> unbiased scores / their sum (DeepSeek-V4) |
    | custom | a callable given in place of the name: (router_logits, top_k) -> (weights, ids) |
    | simulated | top_k distinct experts drawn uniformly, of weight 1 / top_k, for load tests |
    | unspecified | names no method: an error here |

    The bias takes part in the choice only, never in the weights. Groups (every method that
    scores before the top-k) restrict the choice to the topk_groups best of num_expert_groups
    equal groups; a group is worth its best score, or with a bias the sum of its two best biased
    ones (DeepSeek-V3, arXiv:2412.19437, equations 13 to 16 and its reference code, which also
    gives the 1e-20 added to each sum that is divided by).

    On CUDA one fused kernel runs, unless gradients of router_logits are needed. The weights are
    differentiable in router_logits; the ids are not.

    Args:
        router_logits: (M, E), any float dtype, any strides. Computation is in fp32.
        top_k: experts per token, 1..E.
        num_expert_groups, topk_groups: both or neither.
        correction_bias: (E,), any float dtype, on the device of router_logits.
        scaling_factor: multiplies the weights.
        scoring: "softmax", "sigmoid" or "sqrtsoftplus", for default and renormalize_naive.
        generator: for simulated, on the device of router_logits; None uses the default one.
        topk_ids: (M, top_k) int32 or int64, recorded experts, which are taken as they are: only
            their weights are computed from router_logits, with gradients. Ids outside 0..E-1 get
            weight 0 and are returned as -1. Callables choose themselves, and take none.

    Returns:
        topk_weights (M, top_k) fp32 and topk_ids (M, top_k) int32, best expert first, or as they
        were given.

    Raises:
        ValueError: an unknown method or scoring, a wrong type, shape, dtype or device, a top_k or
            group numbers out of range, or an argument that the method needs or does not take.
    """
    check_tensor("router_logits", router_logits)
    if router_logits.dim() != 2:
        check_rank("router_logits", router_logits, "(M, E)")
    if not router_logits.is_floating_point():
        raise ValueError(f"router_logits must be floating point, got {router_logits.dtype}")
    choice = check_routing(
        router_logits.shape[1],
        router_logits.device,
        top_k,
        method,
        num_expert_groups=num_expert_groups,
        topk_groups=topk_groups,
        correction_bias=correction_bias,
        scaling_factor=scaling_factor,
        scoring=scoring,
        generator=generator,
    )
    if topk_ids is not None:
        _check_ids(topk_ids, router_logits, top_k, method)
    if callable(method):
        return _route_custom(router_logits, top_k, method, scaling_factor)
    if choice is None:
        return _route_simulated(router_logits, top_k, scaling_factor, generator, topk_ids)
    fused = router_logits.is_cuda and router_logits.shape[1] <= MAX_EXPERTS_FUSED
    fused = fused and topk_ids is None
    needs_grad = torch.is_grad_enabled() and router_logits.requires_grad
    if fused and not needs_grad and not transforms.active():
        shape = (router_logits.shape[0], top_k)
        topk_weights = router_logits.new_empty(shape, dtype=torch.float32)
        topk_ids = router_logits.new_empty(shape, dtype=torch.int32)
        _ROUTE_OP(
            topk_weights,
            topk_ids,
            router_logits,
            correction_bias,
            *choice.arguments,
            float(scaling_factor),
        )
        return topk_weights, topk_ids

    if not torch.compiler.is_compiling():
        refuse_lost("router_logits", router_logits)
        if correction_bias is not None:
            refuse_lost("correction_bias", correction_bias)
        if topk_ids is not None:
            refuse_lost("topk_ids", topk_ids)
    recipe, scoring = choice.recipe, choice.scoring
    logits = _candidates(router_logits)
    groups = choice.num_expert_groups, choice.topk_groups
    absent = None
    if topk_ids is None:
        columns = topk_ids = _choose(logits, top_k, scoring, correction_bias, *groups)
    else:
        topk_ids = _known_ids(topk_ids, logits.shape[1]).long()
        absent, columns = topk_ids < 0, topk_ids.clamp(min=0)
    if recipe.after_topk:
        chosen = logits.gather(1, columns)
        if absent is not None:
            chosen = chosen.masked_fill(absent, _LOWEST)
        topk_weights = _score(chosen, scoring)
    else:
        topk_weights = _score(logits, scoring).gather(1, columns)
        if absent is not None:
            topk_weights = topk_weights.masked_fill(absent, 0.0)
    if recipe.renormalize:
        topk_weights = topk_weights / (topk_weights.sum(-1, keepdim=True) + 1e-20)
    return topk_weights * scaling_factor, _of_rows(topk_ids)


@dataclass(frozen=True)
class Choice:
    """A method with its arguments."""

    recipe: Recipe
    scoring: str
    num_expert_groups: int
    topk_groups: int

    @property
    def arguments(self) -> tuple[str, bool, int, int]:
        """scoring, renormalize, num_expert_groups and topk_groups of the operators."""
        # softmax over the chosen experts is softmax over all, divided by the sum over the chosen
        after = self.recipe.after_topk and self.scoring == "softmax"
        renormalize = self.recipe.renormalize or after
        return self.scoring, renormalize, self.num_expert_groups, self.topk_groups


def check_routing(
    num_experts: int,
    device: torch.device,
    top_k: int,
    method: RoutingMethod | str | Callable,
    *,
    num_expert_groups: int | None = None,
    topk_groups: int | None = None,
    correction_bias: Tensor | None = None,
    scaling_factor: float = 1.0,
    scoring: str | None = None,
    generator: torch.Generator | None = None,
) -> Choice | None:
    """All checks of `route` of arguments other than the logits. `device` is that of the logits.

    Returns:
        The method with its arguments; None for a callable and for simulated.

    Raises:
        ValueError: as `route`.
    """
    if correction_bias is not None:
        check_tensor("correction_bias", correction_bias)
    recipe = check_method(
        method,
        num_experts,
        top_k,
        num_expert_groups=num_expert_groups,
        topk_groups=topk_groups,
        correction_bias=correction_bias is not None,
        scoring=scoring,
    )
    check_number("scaling_factor", scaling_factor)
    if generator is not None and method != RoutingMethod.SIMULATED:
        raise ValueError("generator must be None: only method 'simulated' draws")
    if recipe is None:
        return None
    if correction_bias is not None:
        _check_bias(correction_bias, num_experts, device)
    return Choice(recipe, scoring or recipe.scoring, num_expert_groups or 1, topk_groups or 1)


def router_probabilities(
    router_logits: Tensor,  # (M, E)
    method: RoutingMethod | str | Callable,
    scoring: str | None = None,
) -> Tensor:
    """(M, E) fp32 scores of all experts by a method's scoring, divided by their sum per token.

    Methods without a scoring (topk, simulated, callables) count as softmax. Sigmoid and
    sqrtsoftplus scores are normalised as in DeepSeek-V3 (arXiv:2412.19437, equation 19).
    """
    recipe = None if callable(method) else RECIPES.get(resolve_routing_method(method))
    name = scoring or (recipe.scoring if recipe else "none")
    logits = _candidates(router_logits)
    if name in ("softmax", "none"):
        return _score(logits, "softmax")
    scores = _score(logits, name)
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _candidates(router_logits: Tensor) -> Tensor:
    """fp32 logits without NaN and infinities. _LOWEST stands for "no candidate"."""
    return torch.nan_to_num(router_logits.float(), nan=_LOWEST, neginf=_LOWEST)


def _score(logits: Tensor, scoring: str) -> Tensor:
    """Scores of logits from _candidates(), zero for "no candidate"."""
    if scoring == "softmax":
        scores = torch.softmax(logits, -1)
    elif scoring == "sigmoid":
        scores = torch.sigmoid(logits)
    elif scoring == "sqrtsoftplus":
        # sqrt has no finite gradient at 0, to which softplus may underflow
        scores = F.softplus(logits).clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    else:
        scores = logits
    return scores.masked_fill(logits == _LOWEST, 0.0)


def _choose(
    logits: Tensor,  # (M, E), from _candidates
    top_k: int,
    scoring: str,
    correction_bias: Tensor | None,
    num_groups: int,
    topk_groups: int,
) -> Tensor:
    """(M, top_k) int64 ids of the best experts, best first."""
    # Every scoring is monotonic, so that without a bias the logits themselves choose, and the ids
    # do not depend on how exp rounds.
    key = logits.detach()
    if correction_bias is not None:
        biased = _score(key, scoring) + correction_bias.detach().float()
        biased = torch.nan_to_num(biased, nan=_LOWEST, neginf=_LOWEST)
        key = biased.masked_fill(key == _LOWEST, _LOWEST)
    if topk_groups < num_groups:
        key = key.unflatten(1, (num_groups, -1))
        if correction_bias is None:
            group_score = key.amax(-1)
        else:
            best = key.topk(min(2, key.shape[2]), -1).values
            # that of one candidate, if the group has no more
            there = best.masked_fill(best == _LOWEST, 0.0).sum(-1)
            group_score = there.masked_fill(best[..., 0] == _LOWEST, _LOWEST)
        groups = _best_first(group_score)[:, :topk_groups]
        kept = torch.zeros_like(group_score, dtype=torch.bool).scatter(1, groups, True)
        key = key.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    return _best_first(key)[:, :top_k]


def _of_rows(topk_ids: Tensor) -> Tensor:
    """int32 ids with the strides that many rows have: one row of a slice keeps that of the whole,
    and a graph that was traced with others is not taken for it.
    """
    return topk_ids.to(torch.int32, memory_format=torch.contiguous_format)


def _best_first(key: Tensor) -> Tensor:
    # not torch.topk, which leaves the order of equal values undefined
    return torch.sort(key, dim=-1, descending=True, stable=True).indices


def _route_custom(
    router_logits: Tensor, top_k: int, method: Callable, scaling_factor: float
) -> tuple[Tensor, Tensor]:
    topk_weights, topk_ids = method(router_logits, top_k)
    for name, value in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        wrong = value.dim() != 2 or value.shape[1] != top_k
        if wrong or guard_or_false(value.shape[0] != router_logits.shape[0]):
            raise ValueError(
                f"{name} of the routing callable must have shape (M, top_k={top_k}) for "
                f"router_logits {_shape(router_logits)}, got {_shape(value)}"
            )
    return topk_weights.float() * scaling_factor, topk_ids.to(torch.int32)


def _route_simulated(
    router_logits: Tensor,
    top_k: int,
    scaling_factor: float,
    generator: torch.Generator | None,
    topk_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    weight = scaling_factor / top_k
    if topk_ids is not None:
        topk_ids = _known_ids(topk_ids, router_logits.shape[1]).to(torch.int32)
        weights = torch.full_like(topk_ids, weight, dtype=torch.float32)
        return weights.masked_fill(topk_ids < 0, 0.0), topk_ids
    # not torch.rand, which takes no symbolic sizes together with a generator
    draws = torch.empty_like(router_logits, dtype=torch.float32).uniform_(generator=generator)
    topk_ids = _of_rows(_best_first(draws)[:, :top_k])
    return torch.full_like(topk_ids, weight, dtype=torch.float32), topk_ids


def _known_ids(topk_ids: Tensor, num_experts: int) -> Tensor:
    """Recorded ids, with -1 for those that name no expert."""
    return topk_ids.masked_fill((topk_ids < 0) | (topk_ids >= num_experts), -1)


def _check_ids(
    topk_ids: Tensor, router_logits: Tensor, top_k: int, method: RoutingMethod | str | Callable
) -> None:
    check_tensor("topk_ids", topk_ids)
    if callable(method):
        raise ValueError(
            "topk_ids must be None for a callable, which chooses and weights experts itself: let "
            "it return the recorded ids"
        )
    check_ids("topk_ids", topk_ids)
    wrong = topk_ids.dim() != 2 or topk_ids.shape[1] != top_k
    if wrong or guard_or_false(topk_ids.shape[0] != router_logits.shape[0]):
        raise ValueError(
            f"topk_ids must have shape (M, top_k={top_k}) for router_logits "
            f"{_shape(router_logits)}, got {_shape(topk_ids)}"
        )
    if topk_ids.device != router_logits.device:
        raise ValueError(
            f"topk_ids must be on the device of router_logits, {router_logits.device}, got "
            f"{topk_ids.device}"
        )


def _check_bias(correction_bias: Tensor, num_experts: int, device: torch.device) -> None:
    if correction_bias.shape != (num_experts,):
        raise ValueError(
            f"correction_bias must have shape (E={num_experts},), got {_shape(correction_bias)}"
        )
    if correction_bias.device != device:
        raise ValueError(
            f"correction_bias must be on the device of router_logits, {device}, "
            f"got {correction_bias.device}"
        )


def _shape(tensor: Tensor) -> tuple:
    return tuple(tensor.shape)


def _fake(
    topk_weights: Tensor, topk_ids: Tensor, router_logits: Tensor, bias: Tensor | None, *_: Any
) -> None:
    torch._check(router_logits.dim() == 2, lambda: "router_logits must have shape (M, E)")
    rows, experts = topk_weights.shape[0], topk_weights.shape[1]
    torch._check(rows == router_logits.shape[0], lambda: "topk_weights must have M rows")
    torch._check(rows == topk_ids.shape[0], lambda: "topk_ids must have M rows")
    torch._check(experts == topk_ids.shape[1], lambda: "outputs must have top_k columns")
    torch._check(topk_weights.dtype == torch.float32, lambda: "topk_weights must be float32")
    torch._check(topk_ids.dtype == torch.int32, lambda: "topk_ids must be int32")
    if bias is not None:
        torch._check(bias.dim() == 1, lambda: "correction_bias must have shape (E,)")


_ROUTE_OP = register_function(
    "route",
    "(Tensor(a!) topk_weights, Tensor(b!) topk_ids, Tensor router_logits, "
    "Tensor? correction_bias, str scoring, bool renormalize, int num_expert_groups, "
    "int topk_groups, float scaling_factor) -> ()",
    Lazy("moe_ops.kernels.router.topk:route"),  # on the CPU under Triton's interpreter
    _fake,
)
