"""Backend `torch`: any device, float dtype, scheme and activation, in plain torch operators.

Quantized weights run with the exact meaning of their scheme: activations are really quantized,
weights dequantized, products summed in fp32. All other backends are held to these results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import activations, numerics
from moe_ops.backends.torch import cpu
from moe_ops.backends.torch.grouped_mm import grouped_mm
from moe_ops.meta import workspace
from moe_ops.numerics import permute
from moe_ops.ops import library
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs, GroupedLinearArgs
from moe_ops.ops.problem import Buffer, Machine, Problem, Workspaces
from moe_ops.schemes import SCHEMES

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def available() -> str | None:
    """None: torch is always installed."""
    return None


def supports(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why this backend cannot run the problem: prepared layouts alone."""
    reasons = []
    if problem.dtype not in _FLOATS:
        reasons.append(f"needs a floating-point hidden_states, got {problem.dtype}")
    if problem.layout:
        reasons.append(
            f"takes weights in their natural layout, got layout {problem.layout!r}; "
            "moe_ops.prepare(weight, 'torch') brings it back"
        )
    return reasons


def workspace_shapes(M: int, problem: Problem) -> Workspaces:
    """Shapes of the workspaces: the dense layout for `experts`, the masked layout for
    `batched_experts`, nothing for `grouped_linear`.
    """
    p = problem
    dtype = _compute_dtype(p.dtype, p.scheme)
    shape13: tuple[int, ...] = (0,)
    shape2: tuple[int, ...] = (0,)
    if p.kind == "experts":
        shape13, shape2 = workspace.dense(
            M, p.num_rows, p.hidden_size, p.intermediate_size, p.top_k
        )
    elif p.kind == "batched_experts":
        shape13, shape2 = workspace.masked(
            p.num_experts, M, p.num_rows, p.hidden_size, p.intermediate_size
        )
    return Workspaces(Buffer(shape13, dtype), Buffer(shape2, dtype), Buffer((0,), torch.int32))


def _launch_experts(a: ExpertsArgs) -> None:
    M, K = a.out.shape
    if M == 0:
        return
    E, N = a.w13.shape[:2]
    act = activations.from_op(a.activation, a.alpha, a.beta, a.limit)
    dtype = _compute_dtype(a.out.dtype, a.scheme)
    S = a.topk_ids.numel()
    width = N // 2 if act.gated else N
    pairs = permute.sort_pairs(a.topk_ids, E, a.expert_map)
    weights = a.topk_weights
    tokens = torch.floor_divide(pairs.order, a.topk_ids.shape[1])
    x, arrived = a.hidden_states, _arrived(a)
    if arrived is not None:
        x = numerics.activation_values(arrived, a.scheme)
    elif a.scheme:  # router weights scale the input in fp32, before it is quantized
        x = x.to(torch.float32)
    if a.router_weight_on_input:
        x = permute.weigh_inputs(x, weights, pairs)
        weights = torch.ones_like(weights)
    if a.scheme and arrived is None:
        x = numerics.fake_quantize_activation(x, a.scheme, a.a13_scale, pairs.valid.any(1))
    x = torch.index_select(x, 0, tokens, out=workspace.carve(a.workspace13, (S, K), dtype))
    gate_up = grouped_mm(
        x,
        a.w13,
        pairs.offsets,
        scales=_scales(a, "w13"),
        scheme=a.scheme,
        bias=a.w13_bias,
        out=workspace.carve(a.workspace2, (S, N), dtype),
    )
    hidden = workspace.carve(a.workspace13, (S, width), dtype)
    _activate(gate_up, act, hidden)
    if a.scheme:
        valid = pairs.experts < E
        hidden.copy_(numerics.fake_quantize_activation(hidden, a.scheme, a.a2_scale, valid))
    y = grouped_mm(
        hidden,
        a.w2,
        pairs.offsets,
        scales=_scales(a, "w2"),
        scheme=a.scheme,
        bias=a.w2_bias,
        out=workspace.carve(a.workspace2, (S, K), dtype),
    )
    if cpu.can_combine(y, a.out):
        rows = torch.where(pairs.valid, pairs.inverse.view(M, -1), -1)
        cpu.combine(y, weights, rows, a.out)
    else:
        a.out.copy_(permute.combine(y, weights, pairs, a.out.dtype))


def _activate(gate_up: Tensor, activation: activations.Activation, out: Tensor) -> None:
    """out (S, I) = activation(gate_up (S, N)). On a CPU in parts whose fp32 values stay
    in cache.
    """
    step = 64 if out.device.type == "cpu" else out.shape[0]
    for i in range(0, out.shape[0], step):
        piece = gate_up[i : i + step].to(torch.promote_types(out.dtype, torch.float32))
        out[i : i + step] = activations.formula(piece, activation)


def _launch_batched_experts(a: BatchedExpertsArgs) -> None:
    E, T, K = a.out.shape
    if T == 0:
        return
    act = activations.from_op(a.activation, a.alpha, a.beta, a.limit)
    dtype = _compute_dtype(a.out.dtype, a.scheme)
    N = a.w13.shape[1]
    width = N // 2 if act.gated else N
    x, arrived = a.hidden_states, _arrived(a)
    counts = a.expert_num_tokens
    valid = torch.arange(T, device=x.device) < counts.unsqueeze(1)  # (E, T)
    if arrived is not None:
        x = numerics.activation_values(arrived, a.scheme)
    elif a.scheme:
        x = numerics.fake_quantize_activation(x, a.scheme, a.a13_scale, valid)
    gate_up = workspace.carve(a.workspace13, (E, T, N), dtype)
    _batched_mm(x, a.w13, counts, _scales(a, "w13"), a.w13_bias, a.scheme, gate_up)
    hidden = workspace.carve(a.workspace2, (E, T, width), dtype)
    _activate(gate_up.flatten(0, 1), act, hidden.flatten(0, 1))
    if a.scheme:
        hidden.copy_(numerics.fake_quantize_activation(hidden, a.scheme, a.a2_scale, valid))
    y = workspace.carve(a.workspace13, (E, T, K), dtype)
    _batched_mm(hidden, a.w2, counts, _scales(a, "w2"), a.w2_bias, a.scheme, y)
    a.out.copy_(y)


def _batched_mm(
    x: Tensor,  # (E, T, K)
    weight: Tensor,  # (E, N, K)
    counts: Tensor,  # (E,)
    scales: numerics.Scales | None,
    bias: Tensor | None,
    scheme: str,
    out: Tensor,  # (E, T, N)
) -> None:
    """out[e] = x[e] @ weight[e].T + bias[e]; on a CPU only for the rows before each count."""
    num_experts, rows = x.shape[:2]
    bounds = counts.tolist() if x.device.type == "cpu" else [rows] * num_experts
    for e, count in enumerate(bounds):
        count = min(count, rows)
        if count <= 0:
            continue
        w = weight[e]
        if scales is not None:
            w = numerics.dequantize_weight(w, scheme, *scales.of(e), dtype=x.dtype)
        if bias is None:
            torch.mm(x[e, :count], w.t(), out=out[e, :count])
        else:
            torch.addmm(bias[e].to(x.dtype), x[e, :count], w.t(), out=out[e, :count])


def _launch_grouped_linear(a: GroupedLinearArgs) -> None:
    x = a.x
    if x.shape[0] == 0:
        return
    if a.x_scale is not None:
        arrived = numerics.QuantizedActivation(x, a.x_scale, a.x_global_scale)
        x = numerics.activation_values(arrived, a.scheme)
    elif a.scheme:
        inside = torch.arange(x.shape[0], device=x.device) < a.offsets[-1]
        x = numerics.fake_quantize_activation(x, a.scheme, a.activation_scale, inside)
    scales = _scales(a, "weight")
    y = grouped_mm(x, a.weight, a.offsets, scales=scales, scheme=a.scheme, bias=a.bias)
    a.out.copy_(y)


def _arrived(a: ExpertsArgs | BatchedExpertsArgs) -> numerics.QuantizedActivation | None:
    """hidden_states if they arrive quantized."""
    if a.hidden_states_scale is None:
        return None
    return numerics.QuantizedActivation(
        a.hidden_states, a.hidden_states_scale, a.hidden_states_global_scale
    )


def _scales(
    a: ExpertsArgs | BatchedExpertsArgs | GroupedLinearArgs, weight: str
) -> numerics.Scales | None:
    """The Scales of the weight of that name."""
    if not a.scheme:
        return None
    return numerics.Scales(*[getattr(a, f"{weight}_{part}") for part in numerics.Scales._fields])


def _compute_dtype(dtype: torch.dtype, scheme: str) -> torch.dtype:
    """The dtype of products: that of plain weights, fp32 for quantized ones."""
    return torch.float32 if scheme else dtype


BACKEND = library.register(
    "torch",
    available=available,
    supports=supports,
    workspace_shapes=workspace_shapes,
    launch={
        "experts": _launch_experts,
        "batched_experts": _launch_batched_experts,
        "grouped_linear": _launch_grouped_linear,
    },
    devices=("CPU", "CUDA"),
    differentiable=True,
    quantized_input=tuple([name for name, scheme in SCHEMES.items() if scheme.activation]),
)
