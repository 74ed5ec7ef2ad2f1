"""The computation of transformers' experts modules, read from the modules themselves.

Dimensions: M tokens, H hidden size, I intermediate size, E local experts, top_k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import activations as hf

from moe_ops.activations import Activation
from moe_ops.autograd.adapters import LoRA
from moe_ops.autograd.stack import LoRAStack
from moe_ops.experts import fused_experts, grouped_linear
from moe_ops.integrations.transformers.families import GATES, Gate, HfModule, qualname_of
from moe_ops.meta.scales import TRANSPOSED
from moe_ops.numerics import permute
from moe_ops.residency.holding import held_by, resident_of

FUSED = "fused_experts"
GROUPED = "grouped_linear around the module's gate"

# what attach() may choose for the calls of `fused_experts` of a module, which keeps it in
# names of the attributes after PREFIX
OPTIONS: dict[str, Any] = {"backend": "auto", "max_workspace_bytes": None, "recompute": False}
PREFIX = "_moe_ops_"

_DEFAULT = "_default_apply_gate"  # what the hook gives to classes without a gate of their own

# Pointwise functions of ours. NewGELUActivation writes out the tanh approximation that GELUTanh
# calls.
_POINTWISE = {
    nn.SiLU: "silu",
    hf.SiLUActivation: "silu",
    hf.GELUActivation: "gelu",
    hf.GELUTanh: "gelu_tanh",
    hf.NewGELUActivation: "gelu_tanh",
    hf.ReLUSquaredActivation: "relu2",
}


def _of_gate(gate: Gate, module: HfModule) -> Activation | None:
    if not gate.name:
        return _plain(module)
    plain = _plain(module) if gate.of_silu else None
    if gate.of_silu and (plain is None or plain.name != "silu"):
        return None
    limit = getattr(module, gate.limit)
    if not gate.alpha:
        return Activation(gate.name, limit=limit)
    return Activation(gate.name, getattr(module, gate.alpha), 1.0, limit)


def _plain(module: HfModule) -> Activation | None:
    """act_fn(g) * u, or act_fn(x) without a gate."""
    act_fn = module.activation_fn if hasattr(module, "activation_fn") else module.act_fn
    name = "silu" if act_fn is F.silu else _POINTWISE.get(type(act_fn))
    if not getattr(module, "has_gate", True):
        return None if name is None else Activation(f"{name}_no_mul")
    return None if name is None else Activation(name)


def _gate_of_fp8(module: HfModule) -> Gate | None:
    """FP8Experts serve the families that they replace the experts of."""
    if getattr(module, "gate_softcap", None) is not None:
        return None
    if module.swiglu_alpha is not None:
        return Gate("swigluoai_uninterleave", "swiglu_alpha", "swiglu_limit")
    return Gate() if module.limit is None else Gate("silu", limit="limit", of_silu=True)


def activation_of(module: HfModule) -> Activation | None:
    """The module's function between its two projections, or None if it is not one of ours.

    A gate is one of ours only if its formula is: of the class that wrote the method in use. Every
    other gate is run by the module itself between two grouped linears.
    """
    gated = getattr(module, "has_gate", True)
    owner = _owner_of_gate(type(module)) if gated else None
    if owner is None:
        return _plain(module)
    gate = _gate_of_fp8(module) if owner == "FP8Experts" else GATES.get(owner)
    return None if gate is None else _of_gate(gate, module)


@torch.compiler.assume_constant_result
def _owner_of_gate(cls: type) -> str | None:
    """The class whose gate a class has, "" outside transformers; None for that of the hook."""
    gate = getattr(cls, "_apply_gate", None)
    name = "" if gate is None else qualname_of(gate)
    return None if gate is None or name == _DEFAULT else name.removesuffix("._apply_gate")


def path_of(module: HfModule) -> str:
    """`FUSED` or `GROUPED`."""
    ours = activation_of(module) is not None and not getattr(module, "has_post_expert_norm", False)
    return FUSED if ours else GROUPED


def rows_first(weight: Tensor, module: HfModule) -> Tensor:
    """A weight as (E, rows, columns); a view where the module keeps (E, columns, rows)."""
    return turned(weight) if getattr(module, "is_transposed", False) else weight


def turned(weight: Tensor) -> Tensor:
    """A weight (E, columns, rows) as (E, rows, columns). Those prepared for a backend are so
    already: they have no transpose.
    """
    prepared = getattr(weight, "weight_layout", "") not in ("", TRANSPOSED)
    return weight if prepared else weight.transpose(1, 2)


class Mixture(NamedTuple):
    """The adapters of a batch whose rows have different ones, in the place of those of all."""

    stack: LoRAStack
    ids: Tensor  # (M,) of tokens


def run_experts(
    module: HfModule,
    hidden_states: Tensor,  # (M, H)
    top_k_index: Tensor,  # (M, top_k), ids outside [0, E) contribute zero
    top_k_weights: Tensor,  # (M, top_k)
    w13: Tensor,  # (E, 2I, H), without a gate (E, I, H)
    w2: Tensor,  # (E, H, I)
    adapters: Sequence[LoRA] | Mixture = (),
) -> Tensor:
    """The module's experts through moe_ops, (M, H) in hidden_states' dtype."""
    gated = getattr(module, "has_gate", True)
    w13_bias = w2_bias = None
    if getattr(module, "has_bias", False) and held_by(module) is None:  # which has biases, too
        w13_bias = module.gate_up_proj_bias if gated else module.up_proj_bias
        w2_bias = module.down_proj_bias
    backend = backend_of(module)
    # as transformers' own grouped_mm: the weights' dtype decides, e.g. fp32 residuals beside bf16
    plain = not getattr(w13, "scheme", "")
    x = hidden_states.to(w13.dtype) if plain else hidden_states
    activation = activation_of(module)
    found: Any = adapters or None
    adapter_ids = None
    if isinstance(adapters, Mixture):
        if path_of(module) != FUSED:
            raise ValueError(
                f"adapter_names must be left out for {type(module).__name__}, whose experts have "
                "a gate or norm of their own; run the rows of each adapter as a batch"
            )
        found, adapter_ids = adapters
        adapters = ()
    if activation is not None and not getattr(module, "has_post_expert_norm", False):
        y = fused_experts(
            x,
            w13,
            w2,
            top_k_weights,
            top_k_index,
            activation=activation,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            adapters=found,
            adapter_ids=adapter_ids,
            **options_of(module),
        )
        return y.to(hidden_states.dtype)
    pairs = permute.sort_pairs(top_k_index, w13.shape[0])
    rows = permute.gather_tokens(x, pairs)
    first = [(one.a13, one.b13, one.scale) for one in adapters]
    rows = _linear(rows, w13, pairs.offsets, w13_bias, first, backend)
    rows = module._apply_gate(rows) if gated else module.act_fn(rows)
    second = [(one.a2, one.b2, one.scale) for one in adapters]
    rows = _linear(rows, w2, pairs.offsets, w2_bias, second, backend)
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return permute.combine(rows, top_k_weights, pairs, hidden_states.dtype)


def _linear(
    rows: Tensor,  # (S, K)
    weight: Tensor,  # (E, N, K)
    offsets: Tensor,  # (E,)
    bias: Tensor | None,  # (E, N)
    adapters: Sequence[tuple[Tensor | None, Tensor | None, float]],  # (E, r, K), (E, N, r), scale
    backend: str,
) -> Tensor:
    """`grouped_linear`, with adapters of its weight."""
    y = grouped_linear(rows, weight, offsets, bias=bias, backend=backend)
    for a, b, scale in adapters:
        if a is not None and b is not None:
            u = grouped_linear(rows, a.to(rows.dtype), offsets) * scale
            y = y + grouped_linear(u, b.to(rows.dtype), offsets)
    return y


def backend_of(module: HfModule) -> str:
    """The backend that attach() chose for this module."""
    return getattr(module, "_moe_ops_backend", "auto")


def options_of(module: HfModule) -> dict[str, Any]:
    """The options that attach() set for this module's calls of `fused_experts`."""
    return {name: getattr(module, PREFIX + name, value) for name, value in OPTIONS.items()}


def experts_forward(
    module: HfModule,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    moe_ops_adapters: Sequence[LoRA] | Mixture = (),  # of PEFT's wrappers
) -> Tensor:
    """Forward of every experts module in transformers' common form; see `run_experts`."""
    resident = resident_of(module)
    if resident is not None:
        weights = resident.w13, resident.w2
    else:
        w13 = module.gate_up_proj if getattr(module, "has_gate", True) else module.up_proj
        weights = rows_first(w13, module), rows_first(module.down_proj, module)
    return run_experts(
        module, hidden_states, top_k_index, top_k_weights, *weights, moe_ops_adapters
    )
