"""Running the routers of transformers' models through `moe_ops.route_tokens`: see `fuse_routers`.

Dimensions: M tokens, H hidden size, E experts, top_k experts per token.

The formulas are in router_rules.py.
"""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_ops import environment
from moe_ops.checks import autocasting
from moe_ops.integrations.transformers import families
from moe_ops.integrations.transformers.activations import HfModule
from moe_ops.integrations.transformers.router_rules import (
    LINEAR,
    NOT_COVERED,
    TAKES_BIAS,
    FindRule,
    Rule,
)
from moe_ops.integrations.transformers.router_rules import (
    RULES as _RULES,
)
from moe_ops.routing.route import route
from moe_ops.routing.tokens import fused_router, router_linear
from moe_ops.tensors.sharding import is_sharded

# tokens of the check; one may fall the other way where scores nearly tie
_ROWS, _FEW, _AGREEING = (8, 4, 7)


def _rule_of(module: HfModule) -> FindRule | None:
    forward = type(module).forward
    ours = getattr(forward, "__module__", "").startswith("transformers.")
    return _RULES.get(forward.__qualname__) if ours else None


def router_forward(
    find_rule: FindRule, module: HfModule, hidden_states: Tensor, *more: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """What the module's own forward returns: (router_logits, topk_weights, topk_ids int64).

    Its own forward runs where gradients are wanted, under autocast, and on dtypes that no kernel
    takes.
    """
    more += tuple(named.values())  # no router takes more than one
    rule = find_rule(module, hidden_states, *more)
    linear = _linear_of(find_rule, module)
    own = linear is not module and _carries(linear)  # an adapter, since the router was checked
    if own or rule is None or not _served(rule, linear, hidden_states):
        return type(module).forward(module, hidden_states, *more)
    return routed(rule, module, linear, hidden_states)


def routed(
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
    if rule.inputs is not None:
        x = rule.inputs(module, x)
    top_k, found = rule.top_k or module.top_k, None
    if topk_ids is None:
        found = fused_router(
            x,
            weight,
            bias,
            rule.logits,
            top_k,
            rule.method,
            rule.options,
            (rule.weights, torch.int64),
        )
    if found is None:
        # autocast takes a linear layer's operands whatever their dtype
        logits = router_linear(x, weight, bias, None if autocasting(x.device) else rule.logits)
        weights, ids = route(logits, top_k, rule.method, **rule.options, topk_ids=topk_ids)
        found = logits, weights.to(rule.weights), ids.long()
    if rule.outputs is not None:
        found = rule.outputs(module, *found)
    logits, weights, ids = found
    return (logits if rule.returned is None else logits.to(rule.returned)), weights, ids


def _linear_of(find_rule: FindRule, module: HfModule) -> HfModule:
    """The module that holds the weight (E, H) of a router's linear layer."""
    name = LINEAR.get(find_rule)
    return module if name is None else getattr(module, name)


def _carries(linear: HfModule) -> bool:
    """Whether the linear layer inside of a router computes more than a linear layer: an adapter's
    class, or a forward of its own, by which accelerate brings offloaded weights.
    """
    return type(linear) is not nn.Linear or "forward" in vars(linear)


def _served(rule: Rule, linear: HfModule, x: Tensor) -> bool:
    weight, bias = linear.weight, getattr(linear, "bias", None)
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any([t.requires_grad for t in (*tensors, *rule.learned)]):
        return False
    if autocasting(x.device) or not (rule.flattens or x.dim() == 2):
        return False
    if any([is_traceable_wrapper_subclass(t) for t in tensors]):
        return False
    return all([rule.logits in (t.dtype, torch.float32) for t in tensors])


@dataclass(frozen=True)
class RouterReport:
    """What one router runs."""

    name: str  # module name in the model
    family: str  # class of the module
    method: str  # of `moe_ops.route_tokens`; empty where the router was left as it is
    check: str  # largest difference from its own forward, or why it was left

    def __str__(self) -> str:
        does = f"route_tokens, {self.method}" if self.method else "left as it is"
        return f"{self.name} ({self.family}): {does}; {self.check}"


@dataclass(frozen=True)
class RoutersReport:
    """What `fuse_routers` did; str() has one line for each router."""

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
            families.restore(module)


def _is_fused(module: HfModule) -> bool:
    forward = vars(module).get("_old_forward", vars(module).get("forward"))
    return isinstance(forward, functools.partial) and forward.func is router_forward


def find_routers(model: nn.Module) -> list[tuple[str, HfModule, FindRule | None]]:
    """(name, router, its rule) of a model, None where it has none of moe_ops."""
    found = [(name, module, _rule_of(module)) for name, module in model.named_modules()]
    return [
        (name, module, rule)
        for name, module, rule in found
        if rule is not None or re.search(r"Router$|TopKGating$", type(module).__name__)
    ]


def check_router(
    module: HfModule, rule: FindRule | None, sharded: bool = False
) -> tuple[str, str, str]:
    """(why moe_ops does not compute what a router does, or ""; method; difference from its own
    forward). `sharded`: its weight may be one that FSDP gathers for a forward.
    """
    reason = _refusal(module, rule, sharded)
    if reason or rule is None:
        return reason, "", ""
    try:
        return "", *_check(module, rule)
    except Exception as error:  # whatever the forward of another version does
        named = "" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: "
        return f"{named}{error}", "", ""


def _fuse(name: str, module: HfModule, rule: FindRule | None) -> RouterReport:
    reason, method, difference = check_router(module, rule)
    if reason or rule is None:
        return RouterReport(name, type(module).__name__, "", reason)
    families.set_forward(module, functools.partial(router_forward, rule))
    return RouterReport(name, type(module).__name__, method, difference)


def _refusal(module: HfModule, rule: FindRule | None, sharded: bool = False) -> str:
    """Why a router is left as it is, before it is called; empty if it need not be."""
    if rule is None:
        why = NOT_COVERED.get(type(module).__name__)
        return "its formula is none of moe_ops" + (f": {why}" if why else "")
    linear = _linear_of(rule, module)
    gathered = sharded and is_sharded(linear.weight)
    if parametrize.is_parametrized(linear):
        return "its weight carries an adapter"
    if linear is not module and _carries(linear):
        own = " with a forward of its own" if type(linear) is nn.Linear else ""
        return f"its linear layer is a {type(linear).__name__}{own}"
    weight = linear.weight
    if not (type(weight) in (Tensor, nn.Parameter) or gathered) or weight.element_size() == 1:
        return f"its weight is a {type(weight).__name__} of {weight.dtype}"
    # accelerate keeps the forward below its hooks as _old_forward, and leaves it behind as forward
    # when they go
    found = vars(module).get("_old_forward", vars(module).get("forward"))
    is_own = found is None or getattr(found, "__func__", None) is type(module).forward
    if not is_own and not _is_fused(module):
        return "its forward is replaced by something else"
    return ""


def _check(module: HfModule, find_rule: FindRule) -> tuple[str, str]:
    """(method, difference from the module's own forward).

    Raises:
        RuntimeError: they differ.
        ValueError: the module's settings are none that `route` takes.
    """
    weight = _linear_of(find_rule, module).weight
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
    takes_bias = find_rule in TAKES_BIAS
    more: tuple[Tensor, ...] = (random(weight.shape[0]),) if takes_bias else ()
    rule = find_rule(clone, x, *more)
    if rule is None:
        raise ValueError("its settings make a formula that is none of moe_ops")
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        error = _difference(find_rule, clone, x, more, 1e-4)
        if weight.is_meta or is_sharded(weight):
            return rule.method, "checked with random weights: its own are not loaded"
        low = torch.finfo(weight.dtype).bits < 32
        more = tuple([t.to(weight.dtype) for t in more])
        tolerance = 3e-2 if low else 1e-4
        x = x.to(weight.dtype)
        if find_rule(module, x, *more) is None:
            raise ValueError(f"in {weight.dtype} it rounds its scores before it compares them")
        for rows in (x, x[:_FEW]):  # few tokens of a large router run by other kernels than many
            error = max(error, _difference(find_rule, module, rows, more, tolerance, True))
    return rule.method, f"differs from its own forward by {error:.1e} at most"


def _difference(
    find_rule: FindRule,
    module: HfModule,
    x: Tensor,
    more: tuple[Tensor, ...],
    tolerance: float,  # relative to the largest value
    logits_only: bool = False,  # rounded logits tie, and ties may fall either way
) -> float:
    rule = find_rule(module, x, *more)
    own = x.unsqueeze(0) if rule is not None and rule.flattens else x  # one takes (B, S, H) alone
    want = type(module).forward(module, own, *more)
    got = router_forward(find_rule, module, x, *more)
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
