"""Forwards of experts that do not go through transformers' experts hook, which `attach` gives to
their modules.

Where a block feeds its experts in a form of its own, block and experts are both replaced and the
experts take (hidden_states, top_k_index, top_k_weights); each module reads only its own weights,
so hooks that load weights when a module is called keep working.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import activations
from moe_ops.experts import fused_experts, grouped_linear
from moe_ops.integrations.transformers import activations as hf_activations
from moe_ops.integrations.transformers.families import HfModule
from moe_ops.numerics import permute
from moe_ops.residency.holding import resident_of


class Form(NamedTuple):
    """How `attach` serves one kind of modules."""

    forward: Callable  # of the module itself
    owner_forward: Callable | None = None  # of the module that owns the experts
    path: str = hf_activations.FUSED


def _block(block: HfModule, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """A block whose router weights multiply the experts' input; returns (out, router_logits)."""
    hidden_states = hidden_states.reshape(-1, block.hidden_dim)
    router_scores, router_logits = block.router(hidden_states)
    ids = torch.topk(router_logits, block.top_k, dim=1).indices
    out = block.experts(hidden_states, ids, router_scores.gather(1, ids))
    return block.shared_expert(hidden_states) + out, router_logits


def _weighted_input(module: HfModule, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Experts with weights (E, H, 2I) and (E, I, H); the router's multiply the input."""
    M, top_k = ids.shape
    if top_k > 1:  # one weighted copy of the token for each of its experts
        x = (x.unsqueeze(1) * weights.unsqueeze(-1)).view(M * top_k, x.shape[1])
        ids, weights = ids.reshape(-1, 1), torch.ones_like(weights).view(-1, 1)
    resident = resident_of(module)
    if resident is not None:
        w13, w2 = resident.w13, resident.w2
    else:
        w13, w2 = map(hf_activations.turned, (module.gate_up_proj, module.down_proj))
    y = fused_experts(
        x,
        w13,
        w2,
        weights,
        ids,
        activation=_activation(module),
        router_weight_on_input=top_k == 1,
        **hf_activations.options_of(module),
    )
    return y.view(M, top_k, -1).sum(1) if top_k > 1 else y


def _of_mlp(module: HfModule, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Experts fed with x (B, T, H) and the routing (B * T, top_k)."""
    return module.mlp(x.reshape(-1, x.shape[-1]), ids, weights).view(x.shape)


def _three_matrices(module: HfModule, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """w1 (gate), v1 (up) and w2, each (E * I, H), are separate parameters, so gate and up are two
    grouped linears: joining them would hold the weights twice.
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


def _identity_experts(module: HfModule, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Ids from num_routed_experts on are identity experts without weights."""
    real = module.num_routed_experts
    resident = resident_of(module)
    if resident is not None:
        w13, w2 = resident.w13, resident.w2
    else:
        w13, w2 = module.gate_up_proj[:real], module.down_proj
    out = hf_activations.run_experts(module, x, ids, weights, w13, w2)
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


FORMS = {
    "common": Form(hf_activations.experts_forward),
    "weighted input": Form(_block, _weighted_input),
    "three matrices": Form(_of_mlp, _three_matrices, "three grouped_linear"),
    "identity experts": Form(_identity_experts),
}


def set_forward(module: HfModule, forward: Callable) -> None:
    """Replace one module's forward, below accelerate's hooks if it has some.

    functools.partial survives deepcopy and pickle with its module; a closure would keep calling
    the original module, and a bound method unpickles as the class's own forward.
    """
    setattr(module, own_name(module), functools.partial(forward, module))


def own_name(module: HfModule) -> str:
    """Where a module has its forward: below accelerate's hooks if it has some."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def replaced_by(module: HfModule) -> Callable | None:
    """What `set_forward` gave a module, if its forward was replaced so. accelerate leaves what
    was below its hooks as forward when they are removed.
    """
    found = vars(module).get(own_name(module))
    return found.func if isinstance(found, functools.partial) else None


def attached(module: HfModule) -> bool:
    """Whether a module has one of the forwards above."""
    found = replaced_by(module)
    return found is not None and any(found in form[:2] for form in FORMS.values())


def restore(module: HfModule) -> None:
    """Undo `set_forward`."""
    if "_old_forward" in vars(module):
        module._old_forward = functools.partial(type(module).forward, module)
    else:
        module.__dict__.pop("forward", None)
