"""Running the routers of transformers' models through `moe_ops.route_tokens`: see `fuse_routers`.

Dimensions: M tokens, H hidden size, E experts, top_k experts per token.

A router is one of ours only if its formula is: `families` has them by the class whose forward a
router really uses.
"""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_ops import environment
from moe_ops.checks import autocasting
from moe_ops.integrations.transformers import forwards
from moe_ops.integrations.transformers.families import (
    NOT_COVERED,
    ROUTERS,
    HfModule,
    Router,
    qualname_of,
)
from moe_ops.routing.route import route
from moe_ops.routing.tokens import fused_router, router_linear
from moe_ops.tensors.sharding import is_sharded

# tokens of the check; one may fall the other way where scores nearly tie
_ROWS, _FEW, _AGREEING = (8, 4, 7)


class Rule(NamedTuple):
    """What a router computes with its settings, for one call."""

    method: str
    logits: torch.dtype
    weights: torch.dtype
    options: dict[str, Any]  # keyword arguments of `route`


def router_of(module: HfModule) -> Router | None:
    """The formula of a router; None where it is none of moe_ops."""
    return ROUTERS.get(qualname_of(type(module).forward).removesuffix(".forward"))


def rule_of(router: Router, module: HfModule, x: Tensor, *more: Tensor) -> Rule | None:
    """What a router computes of these hidden states, with further arguments of its forward; None
    where its settings, or the dtype, make a formula that `route` has not.
    """
    name, most = router.at_most
    if name and (getattr(module, name) or 0) > most:
        return None
    if router.absent and _at(module, router.absent) is not None:
        return None
    if router.float32_only and x.dtype != torch.float32:
        return None
    method = router.method
    if router.choice:
        chosen = getattr(module, router.choice)
        name = chosen if isinstance(chosen, str) else type(chosen).__name__
        if name not in router.methods:
            return None
        method = router.methods[name]
    if router.normalized and module.norm_topk_prob:
        method = router.normalized
    options: dict[str, Any] = {}
    if router.takes_bias:
        (options["correction_bias"],) = more
    elif router.bias:
        options["correction_bias"] = _at(module, router.bias).flatten()
    if router.scale or router.averages:
        scale = getattr(module, router.scale) if router.scale else 1 / module.top_k
        options["scaling_factor"] = scale
    if method == "grouped_softmax" or (router.groups and module.num_group > 1):
        options |= {"num_expert_groups": module.num_group, "topk_groups": module.topk_group}
        if router.sums_two:  # as `route` does where there is a bias
            zeros = module.weight.new_zeros(module.weight.shape[0], dtype=torch.float32)
            options["correction_bias"] = zeros
    logits, weights = router.logits, router.weights
    return Rule(
        method, _dtype(logits, router, module, x), _dtype(weights, router, module, x), options
    )


def _dtype(said: str, router: Router, module: HfModule, x: Tensor) -> torch.dtype:
    if said == "weight":
        return linear_of(router, module).weight.dtype
    return x.dtype if said == "input" else torch.float32


def _at(module: HfModule, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def router_forward(
    router: Router, module: HfModule, hidden_states: Tensor, *more: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """What the module's own forward returns: (router_logits, topk_weights, topk_ids int64).

    Its own forward runs where gradients are wanted, under autocast, and on dtypes that no kernel
    takes.
    """
    more += tuple(named.values())  # no router takes more than one
    rule = rule_of(router, module, hidden_states, *more)
    linear = linear_of(router, module)
    own = linear is not module and _carries(linear)  # an adapter, since the router was checked
    if own or rule is None or not _served(router, rule, module, linear, hidden_states):
        return type(module).forward(module, hidden_states, *more)
    return routed(router, rule, module, linear, hidden_states)


def routed(
    router: Router,
    rule: Rule,
    module: HfModule,
    linear: HfModule,
    hidden_states: Tensor,
    topk_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a router of this rule returns: of the experts that it chooses, or of recorded ones
    (M, top_k), whose weights are computed with gradients.
    """
    weight, bias = linear.weight, getattr(linear, "bias", None)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    if router.norm:
        x = getattr(module, router.norm)(x)
    for factor in router.factors:
        x = x * getattr(module, factor)
    top_k, found = top_k_of(router, module), None
    if topk_ids is None:
        dtypes = rule.weights, torch.int64
        found = fused_router(
            x, weight, bias, rule.logits, top_k, rule.method, rule.options, dtypes
        )
    if found is None:
        # autocast takes a linear layer's operands whatever their dtype
        logits = router_linear(x, weight, bias, None if autocasting(x.device) else rule.logits)
        weights, ids = route(logits, top_k, rule.method, **rule.options, topk_ids=topk_ids)
        found = logits, weights.to(rule.weights), ids.long()
    logits, weights, ids = found
    if router.probabilities:
        logits = torch.softmax(logits, -1, dtype=torch.float32)
    if router.expert_scale:
        weights = weights * getattr(module, router.expert_scale)[ids]
    return (logits.float() if router.returned else logits), weights, ids


def linear_of(router: Router, module: HfModule) -> HfModule:
    """The module that holds the weight (E, H) of a router's linear layer."""
    return getattr(module, router.linear) if router.linear else module


def top_k_of(router: Router, module: HfModule) -> int:
    return _at(module, router.top_k)


def _carries(linear: HfModule) -> bool:
    """Whether the linear layer inside of a router computes more than a linear layer: an adapter's
    class, or a forward of its own, by which accelerate brings offloaded weights.
    """
    return type(linear) is not nn.Linear or "forward" in vars(linear)


def _served(router: Router, rule: Rule, module: HfModule, linear: HfModule, x: Tensor) -> bool:
    weight, bias = linear.weight, getattr(linear, "bias", None)
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled():
        names = [name for name in (*router.factors, router.expert_scale) if name]
        learned = [getattr(module, name) for name in names]
        if any([getattr(t, "requires_grad", False) for t in (*tensors, *learned)]):
            return False
    if autocasting(x.device) or not (router.flattens or x.dim() == 2):
        return False
    if any([is_traceable_wrapper_subclass(t) for t in tensors]):
        return False
    return all([rule.logits in (t.dtype, torch.float32) for t in tensors])


@dataclass(frozen=True)
class RouterReport:
    """The result for one router."""

    name: str  # module name in the model
    family: str  # class of the module
    method: str  # of `moe_ops.route_tokens`; empty where the router was left as it is
    check: str  # largest difference from its own forward, or why it was left

    def __str__(self) -> str:
        does = f"route_tokens, {self.method}" if self.method else "left as it is"
        return f"{self.name} ({self.family}): {does}; {self.check}"


@dataclass(frozen=True)
class RoutersReport:
    """The result of `fuse_routers`; str() has one line for each router."""

    routers: tuple[RouterReport, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.routers))


def fuse_routers(model: nn.Module) -> RoutersReport:
    """Run the routers of a model through `moe_ops.route_tokens`, in place, and check that they
    compute the same.

    On CUDA a router is then one operator: two kernels for up to 16 tokens, a matrix product and
    one kernel for more. It returns what it did, with the same dtypes; among equal scores the lower
    expert wins. Where gradients are wanted, or under autocast, the module's own forward runs.

    Each router is checked on a few random tokens: with random fp32 weights it must choose the same
    experts and weigh them alike, and with its own weights give the same logits. One that does not,
    or whose formula is none of `route_tokens`, stays as it is, and the report says so.

    Args:
        model: a transformers model, or any module that contains routers.

    Returns:
        A report; print it to see which routers were replaced. `unfuse_routers` undoes it.

    Raises:
        ValueError: model is no module, or no router in it could be replaced; the reasons are
            listed.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    reports = [
        _fuse(*found)
        for found in environment.progress_bar(find_routers(model), "checking routers")
    ]
    if not any(report.method for report in reports):
        raise ValueError(
            "model must contain routers that moe_ops.route_tokens can run, got "
            f"{type(model).__name__}" + "".join([f"\n{report}" for report in reports])
        )
    return RoutersReport(tuple(reports))


def unfuse_routers(model: nn.Module) -> None:
    """Give the routers of a model their own forward back; nothing happens to others."""
    for module in model.modules():
        if _is_fused(module):
            forwards.restore(module)


def _is_fused(module: HfModule) -> bool:
    return forwards.replaced_by(module) is router_forward


def find_routers(model: nn.Module) -> list[tuple[str, HfModule, Router | None]]:
    """(name, module, its formula) of the routers of a model, None where it is none of moe_ops."""
    found = [(name, module, router_of(module)) for name, module in model.named_modules()]
    return [
        (name, module, router)
        for name, module, router in found
        if router is not None or re.search(r"Router$|TopKGating$", type(module).__name__)
    ]


def check_router(
    module: HfModule, router: Router | None, sharded: bool = False
) -> tuple[str, str, str]:
    """(why moe_ops does not compute what a router does, or ""; method; difference from its own
    forward). `sharded`: its weight may be one that FSDP gathers for a forward.
    """
    reason = _refusal(module, router, sharded)
    if reason or router is None:
        return reason, "", ""
    try:
        return "", *_check(module, router)
    except Exception as error:  # whatever the forward of another version does
        named = "" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: "
        return f"{named}{error}", "", ""


def _fuse(name: str, module: HfModule, router: Router | None) -> RouterReport:
    reason, method, difference = check_router(module, router)
    if reason or router is None:
        return RouterReport(name, type(module).__name__, "", reason)
    forwards.set_forward(module, functools.partial(router_forward, router))
    return RouterReport(name, type(module).__name__, method, difference)


def _refusal(module: HfModule, router: Router | None, sharded: bool = False) -> str:
    """Why a router is left as it is, before it is called; empty if it need not be."""
    if router is None:
        why = NOT_COVERED.get(type(module).__name__)
        return "its formula is none of moe_ops" + (f": {why}" if why else "")
    linear = linear_of(router, module)
    gathered = sharded and is_sharded(linear.weight)
    if parametrize.is_parametrized(linear):
        return "its weight carries an adapter"
    if linear is not module and _carries(linear):
        own = " with a forward of its own" if type(linear) is nn.Linear else ""
        return f"its linear layer is a {type(linear).__name__}{own}"
    weight = linear.weight
    if not (type(weight) in (Tensor, nn.Parameter) or gathered) or weight.element_size() == 1:
        return f"its weight is a {type(weight).__name__} of {weight.dtype}"
    # when accelerate removes its hooks, it sets what was below them as forward
    found = vars(module).get(forwards.own_name(module))
    is_own = found is None or getattr(found, "__func__", None) is type(module).forward
    if not is_own and not _is_fused(module):
        return "its forward is replaced by something else"
    return ""


def _check(module: HfModule, router: Router) -> tuple[str, str]:
    """(method, difference from the module's own forward).

    Raises:
        RuntimeError: they differ.
        ValueError: the module's settings are none that `route` takes.
    """
    weight = linear_of(router, module).weight
    rng = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        # bf16 values: their products are exact, in whatever precision matrix products were set to
        numbers = torch.randn(*shape, generator=rng).bfloat16().float()
        return numbers.to("cpu" if weight.is_meta else weight.device)

    scale = 2.0 ** -round(weight.shape[1].bit_length() / 2)

    def factor(p: Tensor) -> float:
        return scale if p.dim() > 1 else 1.0

    def randomized(module: HfModule) -> HfModule:
        clone = copy.copy(module)
        clone.__dict__["_parameters"] = {
            key: None if p is None else nn.Parameter(random(*p.shape) * factor(p), False)
            for key, p in module._parameters.items()
        }
        clone.__dict__["_buffers"] = {
            key: random(*b.shape) if b is not None and b.is_floating_point() else b
            for key, b in module._buffers.items()
        }
        inner = module._modules.items()
        clone.__dict__["_modules"] = {key: m and randomized(m) for key, m in inner}
        return clone

    clone = randomized(module)
    x = random(_ROWS, weight.shape[1])
    more: tuple[Tensor, ...] = (random(weight.shape[0]),) if router.takes_bias else ()
    rule = rule_of(router, clone, x, *more)
    if rule is None:
        raise ValueError("its settings make a formula that is none of moe_ops")
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        error = _difference(router, clone, x, more, 1e-4)
        if weight.is_meta or is_sharded(weight):
            return rule.method, "checked with random weights: its own are not loaded"
        low = torch.finfo(weight.dtype).bits < 32
        more = tuple([t.to(weight.dtype) for t in more])
        tolerance = 3e-2 if low else 1e-4
        x = x.to(weight.dtype)
        if rule_of(router, module, x, *more) is None:
            raise ValueError(f"in {weight.dtype} it rounds its scores before it compares them")
        for rows in (x, x[:_FEW]):  # few tokens of a large router run by other kernels than many
            error = max(error, _difference(router, module, rows, more, tolerance, True))
    return rule.method, f"differs from its own forward by {error:.1e} at most"


def _difference(
    router: Router,
    module: HfModule,
    x: Tensor,
    more: tuple[Tensor, ...],
    tolerance: float,  # relative to the largest value
    logits_only: bool = False,  # rounded logits tie, and ties may fall either way
) -> float:
    own = x.unsqueeze(0) if router.flattens else x  # one takes (B, S, H) alone
    want = type(module).forward(module, own, *more)
    got = router_forward(router, module, x, *more)
    facts = [[(t.shape, t.dtype) for t in output] for output in (want, got)]
    if facts[0] != facts[1]:
        raise RuntimeError(f"its own forward returns {facts[0]}, not {facts[1]}")
    errors = [_relative(got[0], want[0])]
    if not logits_only:
        shape = (x.shape[0], got[0].shape[1])
        zeros = torch.zeros(shape, dtype=torch.float32, device=x.device)
        dense = [zeros.scatter(1, ids, weights.float()) for _, weights, ids in (got, want)]
        chosen = [zeros.scatter(1, ids, 1.0) for _, _, ids in (got, want)]
        agree = (chosen[0] == chosen[1]).all(1)
        if int(agree.sum()) < _AGREEING:
            raise RuntimeError("it chooses other experts than moe_ops.route_tokens would")
        errors.append(_relative(dense[0][agree], dense[1][agree]))
    if not max(errors) <= tolerance:
        raise RuntimeError(f"it differs from moe_ops.route_tokens by {max(errors):.3g}")
    return max(errors)


def _relative(got: Tensor, want: Tensor) -> float:
    error = (got.float() - want.float()).abs().max()
    return float(error / want.float().abs().max().clamp_min(1e-6))
