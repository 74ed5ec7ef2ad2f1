"""The routing methods: what each computes and which arguments it takes, for `route` and
`MoELayer`.

Dimensions as in route.py: E experts, top_k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from moe_ops.checks import check_integer, check_one_of, did_you_mean

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")


class RoutingMethod(StrEnum):
    """How router logits become expert ids and weights; `moe_ops.route` runs each one."""

    DEFAULT = "default"  # softmax -> top-k
    RENORMALIZE = "renormalize"  # top-k -> softmax
    RENORMALIZE_NAIVE = "renormalize_naive"  # softmax -> top-k -> renormalize
    DEEPSEEK_V3 = "deepseek_v3"  # sigmoid, bias, top groups, top-k -> renormalize
    GROUPED_SOFTMAX = "grouped_softmax"  # softmax, top groups, top-k
    GROUPED_SOFTMAX_RENORMALIZE = "grouped_softmax_renormalize"
    LLAMA4 = "llama4"  # top-1 -> sigmoid
    SIGMOID = "sigmoid"  # sigmoid -> top-k
    SIGMOID_RENORMALIZE = "sigmoid_renormalize"
    TOPK = "topk"  # top-k of the logits, which are the weights
    SQRTSOFTPLUS = "sqrtsoftplus"  # sqrt(softplus), bias, top-k -> renormalize
    CUSTOM = "custom"  # a callable given by the user
    SIMULATED = "simulated"  # random experts, equal weights
    UNSPECIFIED = "unspecified"  # none of these


_METHODS = tuple(RoutingMethod)  # a tuple: Dynamo of torch 2.11 cannot iterate over an enum class


def resolve_routing_method(method: RoutingMethod | str) -> RoutingMethod:
    """The RoutingMethod of a name.

    Raises:
        ValueError: unknown name, listing the known ones.
    """
    for known in _METHODS:
        if method == known:
            return known
    raise ValueError(
        f"routing method must be one of {', '.join(_METHODS)}, or a callable for a method of your "
        f"own, got {method!r}{did_you_mean(method, _METHODS)}"
    )


def check_method_takes(name: str, top_k: int, method: RoutingMethod | str) -> None:
    """Raise for a number of experts per token (the argument `name`) that the method forbids."""
    if method == RoutingMethod.LLAMA4 and top_k != 1:
        raise ValueError(f"{name} must be 1 for method 'llama4', got {top_k}; use 'sigmoid'")


@dataclass(frozen=True)
class Recipe:
    """The steps of one method; `scoring` is applied to all logits, or to the chosen ones only."""

    scoring: str  # one of SCORINGS, or "none"
    renormalize: bool = False
    after_topk: bool = False  # score the chosen logits only; takes no bias and no groups
    any_scoring: bool = False  # the caller may name another scoring
    needs_bias: bool = False
    needs_groups: bool = False


RECIPES = {
    RoutingMethod.DEFAULT: Recipe("softmax", any_scoring=True),
    RoutingMethod.RENORMALIZE: Recipe("softmax", after_topk=True),
    RoutingMethod.RENORMALIZE_NAIVE: Recipe("softmax", renormalize=True, any_scoring=True),
    RoutingMethod.DEEPSEEK_V3: Recipe("sigmoid", renormalize=True, needs_bias=True),
    RoutingMethod.GROUPED_SOFTMAX: Recipe("softmax", needs_groups=True),
    RoutingMethod.GROUPED_SOFTMAX_RENORMALIZE: Recipe(
        "softmax", renormalize=True, needs_groups=True
    ),
    RoutingMethod.LLAMA4: Recipe("sigmoid", after_topk=True),
    RoutingMethod.SIGMOID: Recipe("sigmoid"),
    RoutingMethod.SIGMOID_RENORMALIZE: Recipe("sigmoid", renormalize=True),
    RoutingMethod.TOPK: Recipe("none", after_topk=True),
    RoutingMethod.SQRTSOFTPLUS: Recipe("sqrtsoftplus", renormalize=True, needs_bias=True),
}


def check_method(
    method: RoutingMethod | str | Callable,
    num_experts: int,
    top_k: int,
    *,
    num_expert_groups: int | None,
    topk_groups: int | None,
    correction_bias: bool,
    scoring: str | None,
) -> Recipe | None:
    """All checks of `route` that need no tensor. `correction_bias`: whether there is one.

    Returns:
        The method's Recipe; None for a callable and for simulated.

    Raises:
        ValueError: as `route`.
    """
    check_integer("top_k", top_k)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be in 1..E={num_experts}, got {top_k}")
    groups = (num_expert_groups, topk_groups)
    if callable(method):
        _check_unused("custom", correction_bias, *groups, scoring)
        return None
    method = resolve_routing_method(method)
    if method == RoutingMethod.SIMULATED:
        _check_unused(method, correction_bias, *groups, scoring)
        return None
    if method not in RECIPES:
        raise ValueError(
            f"method must be a callable (router_logits, top_k) -> (topk_weights, topk_ids) or one "
            f"of {', '.join((*RECIPES, RoutingMethod.SIMULATED))}, got {str(method)!r}, which "
            "says that the router is none of these; pass the callable itself"
        )
    recipe = RECIPES[method]
    check_method_takes("top_k", top_k, method)
    if recipe.after_topk:
        _check_unused(method, correction_bias, *groups, None)
    if recipe.needs_bias and not correction_bias:
        raise ValueError(
            f"correction_bias must be given for method {str(method)!r}; without one use "
            "'sigmoid_renormalize', or 'renormalize_naive' with scoring="
        )
    _check_groups(method, recipe, num_experts, top_k, *groups)
    if scoring is not None:
        check_one_of("scoring", scoring, SCORINGS)
        if scoring != recipe.scoring and not recipe.any_scoring:
            raise ValueError(
                f"scoring must be {recipe.scoring!r} or None for method {str(method)!r}, "
                f"got {scoring!r}; 'default' and 'renormalize_naive' take any"
            )
    return recipe


def _check_groups(
    method: RoutingMethod,
    recipe: Recipe,
    num_experts: int,
    top_k: int,
    num_expert_groups: int | None,
    topk_groups: int | None,
) -> None:
    if (num_expert_groups is None) != (topk_groups is None):
        raise ValueError(
            "num_expert_groups and topk_groups must be given together, got "
            f"num_expert_groups={num_expert_groups} and topk_groups={topk_groups}"
        )
    if num_expert_groups is None or topk_groups is None:
        if recipe.needs_groups:
            raise ValueError(
                f"num_expert_groups must be given for method {str(method)!r}, got None; without "
                "groups use 'default' or 'renormalize'"
            )
        return
    check_integer("num_expert_groups", num_expert_groups)
    check_integer("topk_groups", topk_groups)
    if num_expert_groups < 1 or num_experts % num_expert_groups:
        raise ValueError(f"num_expert_groups must divide E={num_experts}, got {num_expert_groups}")
    if not 1 <= topk_groups <= num_expert_groups:
        raise ValueError(
            f"topk_groups must be in 1..num_expert_groups={num_expert_groups}, got {topk_groups}"
        )
    available = topk_groups * (num_experts // num_expert_groups)
    if available < top_k:
        raise ValueError(
            f"top_k must be at most the {available} experts of topk_groups={topk_groups} groups, "
            f"got {top_k}; raise topk_groups"
        )


def _check_unused(
    method: str,
    correction_bias: bool,
    num_expert_groups: int | None,
    topk_groups: int | None,
    scoring: str | None,
) -> None:
    """Raise for arguments that a method would ignore."""
    remedy = "use 'renormalize_naive', 'default' or another method that scores before the top-k"
    for name, given in (
        ("correction_bias", correction_bias),
        ("num_expert_groups", num_expert_groups is not None),
        ("topk_groups", topk_groups is not None),
        ("scoring", scoring is not None),
    ):
        if given:
            raise ValueError(f"{name} must not be given for method {str(method)!r}; {remedy}")
