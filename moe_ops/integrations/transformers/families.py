"""Families whose experts do not go through transformers' experts hook: llama4, dbrx,
longcat_flash, step3p7.

`attach` gives their modules the forwards below. Where a block feeds its experts in a form of its
own, block and experts are both replaced and the experts take (hidden_states, top_k_index,
top_k_weights); each module reads only its own weights, so hooks that load weights when a module is
called keep working.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import activations
from moe_ops.experts import fused_experts, grouped_linear
from moe_ops.integrations.transformers import activations as hf_activations
from moe_ops.integrations.transformers.activations import HfModule
from moe_ops.numerics import permute


@dataclass(frozen=True)
class Family:
    """How `attach` serves one class of modules."""

    forward: Callable  # of the module itself
    weights: tuple[str, ...]  # parameters of the module that owns the experts
    owner: str = ""  # its attribute name; "" for the module itself
    owner_forward: Callable | None = None
    path: str = hf_activations.FUSED
    columns_first: tuple[str, ...] = ()  # weights kept as (E, columns, rows)
    routes: bool = False  # the module is the whole block, fed with hidden states alone


def _llama4_block(block: HfModule, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama4TextMoe: the router weight multiplies the experts' input; returns (out,
    router_logits).
    """
    hidden_states = hidden_states.reshape(-1, block.hidden_dim)
    router_scores, router_logits = block.router(hidden_states)
    ids = torch.topk(router_logits, block.top_k, dim=1).indices
    out = block.experts(hidden_states, ids, router_scores.gather(1, ids))
    return block.shared_expert(hidden_states) + out, router_logits


def _llama4_experts(module: HfModule, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Llama4TextExperts with weights (E, H, 2I) and (E, I, H); weights multiply the input."""
    M, top_k = ids.shape
    if top_k > 1:  # one weighted copy of the token for each of its experts
        x = (x.unsqueeze(1) * weights.unsqueeze(-1)).view(M * top_k, x.shape[1])
        ids, weights = ids.reshape(-1, 1), torch.ones_like(weights).view(-1, 1)
    y = fused_experts(
        x,
        hf_activations.turned(module.gate_up_proj),
        hf_activations.turned(module.down_proj),
        weights,
        ids,
        activation=_activation(module),
        router_weight_on_input=top_k == 1,
        **hf_activations.options_of(module),
    )
    return y.view(M, top_k, -1).sum(1) if top_k > 1 else y


def _dbrx_experts(module: HfModule, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """DbrxExperts: x (B, T, H), routing (B * T, top_k)."""
    return module.mlp(x.reshape(-1, x.shape[-1]), ids, weights).view(x.shape)


def _dbrx_glu(module: HfModule, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """DbrxExpertGLU: w1 (gate), v1 (up) and w2, each (E * I, H), are separate parameters, so gate
    and up are two grouped linears: joining them would hold the weights twice.
    """
    shape = (module.moe_num_experts, module.ffn_hidden_size, module.hidden_size)
    w1, v1, w2 = (w if w.dim() == 3 else w.view(shape) for w in (module.w1, module.v1, module.w2))
    backend = hf_activations.backend_of(module)
    pairs = permute.sort_pairs(ids, shape[0])
    rows = permute.gather_tokens(x, pairs)
    halves = [grouped_linear(rows, w, pairs.offsets, backend=backend) for w in (w1, v1)]
    rows = activations.apply(torch.cat(halves, -1), _activation(module))
    rows = grouped_linear(rows, w2.transpose(1, 2), pairs.offsets, backend=backend)
    return permute.combine(rows, weights, pairs, x.dtype)


def _longcat_experts(module: HfModule, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """LongcatFlashExperts: ids from num_routed_experts on are identity experts without weights."""
    real = module.num_routed_experts
    out = hf_activations.run_experts(
        module, x, ids, weights, module.gate_up_proj[:real], module.down_proj
    )
    identity = (ids >= real) & (ids < module.total_experts)
    share = torch.where(identity, weights.float(), 0).sum(1, keepdim=True)
    used = identity.any(1, keepdim=True)  # a NaN of a token without identity experts stays out
    kept = torch.where(used, x.float() * share, 0)
    return (out.float() + kept).to(x.dtype)


def _activation(module: HfModule) -> activations.Activation:
    found = hf_activations.activation_of(module)
    if found is None:
        raise ValueError(
            f"the activation of {type(module).__name__} must be one of "
            "moe_ops.activations.NAMES, got "
            f"{getattr(module, 'act_fn', None) or module.activation_fn}; leave this model "
            "unattached"
        )
    return found


GATE_UP = ("gate_up_proj", "down_proj")
FAMILIES = {
    "Llama4TextMoe": Family(
        _llama4_block,
        GATE_UP,
        "experts",
        _llama4_experts,
        columns_first=GATE_UP,
        routes=True,
    ),
    "DbrxExperts": Family(
        _dbrx_experts, ("w1", "v1", "w2"), "mlp", _dbrx_glu, "three grouped_linear", ("w2",)
    ),
    "LongcatFlashExperts": Family(_longcat_experts, GATE_UP),
    "Step3p7Experts": Family(hf_activations.experts_forward, GATE_UP),
}


def family_of(module: HfModule) -> Family | None:
    """The Family of a module, by the name of its class or of a base class of transformers."""
    for cls in type(module).__mro__:
        if cls.__module__.startswith("transformers."):
            return FAMILIES.get(cls.__name__)
    return None


def set_forward(module: HfModule, forward: Callable) -> None:
    """Replace one module's forward, below accelerate's hooks if it has some.

    functools.partial survives deepcopy and pickle with its module; a closure would keep calling
    the original module, and a bound method unpickles as the class's own forward.
    """
    name = "_old_forward" if hasattr(module, "_old_forward") else "forward"
    setattr(module, name, functools.partial(forward, module))


def attached(module: HfModule) -> bool:
    """Whether `set_forward` replaced this module's forward."""
    for name in ("_old_forward", "forward"):
        forward = vars(module).get(name)
        if isinstance(forward, functools.partial) and forward.func in _REPLACEMENTS:
            return True
    return False


def restore(module: HfModule) -> None:
    """Undo `set_forward`."""
    if "_old_forward" in vars(module):
        module._old_forward = functools.partial(type(module).forward, module)
    else:
        module.__dict__.pop("forward", None)


_REPLACEMENTS = frozenset(
    function
    for family in FAMILIES.values()
    for function in (family.forward, family.owner_forward)
    if function is not None
)
