"""Backend `torch`: any device, float dtype, scheme and activation, in plain torch operators.

Quantized weights run with the exact meaning of their scheme: activations are really quantized,
weights dequantized, products summed in fp32. All other backends are held to these results. Of
activation scales that differ by expert, each pair has that of its expert. Where w13 and w2 have
different schemes, that of w13 says how x is quantized and that of w2 how h is; both products are
in fp32, also that of plain weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops import activations, numerics
from moe_ops.backend import (
    AdaptedArgs,
    Adapts,
    Backend,
    BatchedExpertsArgs,
    Buffer,
    ExpertsArgs,
    GroupedLinearArgs,
    Machine,
    Problem,
    Shortcut,
    Takes,
    TokenAdapters,
    Workspaces,
    batched_chunks,
    chunks,
    register,
)
from moe_ops.backends.torch import cpu, layer
from moe_ops.backends.torch.grouped_mm import adapted_mm, grouped_mm, product_of_rows, values
from moe_ops.meta import workspace
from moe_ops.numerics import permute, sums
from moe_ops.ops.library import TORCH_DEVICES
from moe_ops.schemes import SCHEMES, get_scheme

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def supports(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why this backend cannot run the problem: prepared layouts, and dtypes that torch
    lacks on a device.
    """
    reasons = []
    if machine.device_type == "mps" and (lacking := _not_on_mps(problem)):
        reasons.append(f"cannot run on mps, where torch has no {lacking}")
    if problem.dtype not in _FLOATS:
        reasons.append(f"needs a floating-point hidden_states, got {problem.dtype}")
    if problem.layout:
        reasons.append(
            f"takes weights in their natural layout, got layout {problem.layout!r}; "
            "moe_ops.prepare(weight, 'torch') brings it back"
        )
    return reasons


def _not_on_mps(problem: Problem) -> str:
    """The dtype that a problem needs and that torch does not have on Apple's GPUs."""
    if problem.dtype == torch.float64:
        return "float64"
    schemes = map(get_scheme, problem.schemes)
    both = [desc for scheme in schemes for desc in (scheme.weight, scheme.activation)]
    descs = [desc for desc in both if desc is not None]
    return "float8" if any([not desc.dtype.startswith("int") for desc in descs]) else ""


def depends_on_batch(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why a token's row may depend on its batch; none on a CPU, where products by rows are
    those of `grouped_mm.product_of_rows`, of our grouped kernel, or of csrc/cpu/experts.cpp.
    """
    if machine.device_type not in ("cpu", "meta"):
        return [
            f"not batch invariant on {machine.device_type}: products of torch's libraries choose "
            "their kernels by the number of rows"
        ]
    if problem.options.needs_grad and problem.kind == "grouped_linear":
        if get_scheme(problem.scheme).activation is None:
            return []
        return [
            "not batch invariant where gradients pass through quantized activations of "
            "grouped_linear: wrap the call in torch.no_grad()"
        ]
    return []


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
    if a.out.shape[0] == 0:
        return
    parts, amax_of_x, amax_of_h = chunks(a), None, None
    form = layer.form_of(a)
    if form is not None:
        for part in parts:
            layer.run(part, form)
        return
    if len(parts) > 1:  # scales of all tokens
        if a.hidden_states_scale is None and _has_one_scale(a.w13_scheme):
            amax_of_x = torch.stack([_amax_of_x(part) for part in parts]).amax()
        if _has_one_scale(a.w2_scheme):
            amax_of_h = torch.stack([_amax_of_h(part, amax_of_x) for part in parts]).amax()
    for part in parts:
        _experts(part, amax_of_x, amax_of_h)


def _shortcut(a: ExpertsArgs | BatchedExpertsArgs | GroupedLinearArgs) -> Shortcut | None:
    return layer.shortcut(a) if isinstance(a, ExpertsArgs) else None


def _launch_adapted(a: AdaptedArgs) -> None:
    _experts(a.experts, None, None, a.adapters)


def _experts(
    a: ExpertsArgs,
    amax_of_x: Tensor | None,
    amax_of_h: Tensor | None,
    adapters: TokenAdapters | None = None,
) -> None:
    """A layer, or a chunk of its tokens."""
    (M, K), S, pairs, weights = a.out.shape, a.topk_ids.numel(), _sort(a), a.topk_weights
    dtype = _compute_dtype(a.w2.dtype, a.scheme)
    hidden, added = _hidden(a, pairs, amax_of_x, adapters), None
    if adapters is not None:
        added = adapted_mm(hidden, adapters.a2, adapters.b2, adapters, pairs)
    scheme = a.w2_scheme
    if scheme:
        valid = pairs.experts < a.w13.shape[0]
        scale = numerics.static_scale_of_rows(a.a2_scale, pairs.experts)
        rounded = numerics.fake_quantize_activation(hidden, scheme, scale, valid, amax_of_h)
        hidden.copy_(rounded)
    y = grouped_mm(
        hidden,
        a.w2,
        pairs.offsets,
        scales=_scales(a, "w2", scheme),
        scheme=scheme,
        bias=a.w2_bias,
        out=workspace.carve(a.workspace2, (S, K), dtype),
        batch_invariant=a.options.batch_invariant,
    )
    if added is not None:
        y += added
    if a.options.router_weight_on_input:
        weights = torch.ones_like(weights)
    # the sum of a rank, which is asked for in fp32, adds no otherwise than that of one device
    in_fp32 = a.options.batch_invariant and y.dtype == torch.float32 != a.out.dtype
    total = torch.empty_like(a.out, dtype=torch.float32) if in_fp32 else a.out
    if cpu.can_combine(y, total):
        rows = torch.where(pairs.valid, pairs.inverse.view(M, -1), -1)
        one_block = a.num_blocks == 1
        blocks = None if one_block else sums.block_of(a.topk_ids, a.global_experts)
        cpu.combine(y, weights, rows, total, blocks)
        if in_fp32:
            a.out.copy_(total)
    else:
        ids = a.topk_ids if a.options.batch_invariant else None
        a.out.copy_(permute.combine(y, weights, pairs, a.out.dtype, ids, a.global_experts))


def _sort(a: ExpertsArgs) -> permute.Pairs:
    return permute.sort_pairs(a.topk_ids, a.w13.shape[0], a.expert_map)


def _inputs(a: ExpertsArgs, pairs: permute.Pairs) -> Tensor:
    """x (M, K), multiplied by router weights that scale the input: in fp32 if it is quantized
    then, or has arrived so.
    """
    x, arrived = a.hidden_states, _arrived(a)
    if arrived is not None:
        x = numerics.activation_values(arrived, a.w13_scheme)
    if not a.options.router_weight_on_input:
        return x
    return permute.weigh_inputs(x.to(torch.float32) if a.scheme else x, a.topk_weights, pairs)


def _hidden(
    a: ExpertsArgs,
    pairs: permute.Pairs,
    amax_of_x: Tensor | None,
    adapters: TokenAdapters | None = None,
) -> Tensor:
    """The activation's output h (S, I)."""
    N, K, S = a.w13.shape[1], a.out.shape[1], a.topk_ids.numel()
    act = a.options.activation
    dtype = _compute_dtype(a.w2.dtype, a.scheme)
    tokens = torch.floor_divide(pairs.order, a.topk_ids.shape[1])
    x, scheme = _inputs(a, pairs), a.w13_scheme
    added = None
    if adapters is not None:
        rows = x.index_select(0, tokens).to(dtype)
        added = adapted_mm(rows, adapters.a13, adapters.b13, adapters, pairs)
    quantizes = scheme != "" and a.hidden_states_scale is None
    by_pair = quantizes and a.a13_scale is not None and a.a13_scale.numel() > 1
    if quantizes and not by_pair:
        valid = pairs.valid.any(1)
        x = numerics.fake_quantize_activation(x, scheme, a.a13_scale, valid, amax_of_x)
    rows = workspace.carve(a.workspace13, (S, K), dtype)
    if by_pair:
        scale = numerics.static_scale_of_rows(a.a13_scale, pairs.experts)
        rows.copy_(numerics.fake_quantize_activation(x[tokens], scheme, scale))
    else:
        torch.index_select(x.to(dtype), 0, tokens, out=rows)
    x = rows
    gate_up = grouped_mm(
        x,
        a.w13,
        pairs.offsets,
        scales=_scales(a, "w13", scheme),
        scheme=scheme,
        bias=a.w13_bias,
        out=workspace.carve(a.workspace2, (S, N), dtype),
        batch_invariant=a.options.batch_invariant,
    )
    if added is not None:
        gate_up += added
    hidden = workspace.carve(a.workspace13, (S, N // 2 if act.gated else N), dtype)
    of_rows = activations.of_rows(act, a.activation_by_expert, pairs.experts)
    _activate(gate_up, of_rows, hidden, a.options.batch_invariant)
    return hidden


def _amax_of_x(a: ExpertsArgs) -> Tensor:
    pairs = _sort(a)
    return numerics.largest_magnitude(_inputs(a, pairs), pairs.valid.any(1))


def _amax_of_h(a: ExpertsArgs, amax_of_x: Tensor | None) -> Tensor:
    pairs = _sort(a)
    valid = pairs.experts < a.w13.shape[0]
    return numerics.largest_magnitude(_hidden(a, pairs, amax_of_x), valid)


def _has_one_scale(scheme: str) -> bool:
    """Whether all rows of quantized activations share a scale that follows from them."""
    desc = get_scheme(scheme).activation
    return desc is not None and not desc.static and desc.one_scale


def _activate(
    gate_up: Tensor, activation: activations.AnyActivation, out: Tensor, batch_invariant: bool
) -> None:
    """out (S, I) = activation(gate_up (S, N)). On a CPU in parts whose fp32 values stay
    in cache.
    """
    if batch_invariant:
        return activations.apply_by_blocks(gate_up, activation, out)
    step = 64 if out.device.type == "cpu" else out.shape[0]
    for i in range(0, out.shape[0], step):
        piece = gate_up[i : i + step].to(torch.promote_types(out.dtype, torch.float32))
        act = activation
        if isinstance(act, activations.RowActivation):
            act = act.at(slice(i, i + step))
        out[i : i + step] = activations.formula(piece, act)


def _launch_batched_experts(a: BatchedExpertsArgs) -> None:
    if a.out.shape[1] == 0:
        return
    parts, amax_of_x, amax_of_h = batched_chunks(a), None, None
    if len(parts) > 1:
        if a.hidden_states_scale is None and _has_one_scale(a.w13_scheme):
            largest = [numerics.largest_magnitude(p.hidden_states, _valid(p)) for p in parts]
            amax_of_x = torch.stack(largest).amax()
        if _has_one_scale(a.w2_scheme):
            largest = [
                numerics.largest_magnitude(_batched_hidden(p, amax_of_x), _valid(p)) for p in parts
            ]
            amax_of_h = torch.stack(largest).amax()
    for part in parts:
        _batched_experts(part, amax_of_x, amax_of_h)


def _batched_experts(
    a: BatchedExpertsArgs, amax_of_x: Tensor | None, amax_of_h: Tensor | None
) -> None:
    """All batches, or a chunk of experts."""
    hidden, scheme = _batched_hidden(a, amax_of_x), a.w2_scheme
    if scheme:
        scale = numerics.static_scale_of_rows(a.a2_scale, _experts_of_rows(a))
        hidden.copy_(
            numerics.fake_quantize_activation(hidden, scheme, scale, _valid(a), amax_of_h)
        )
    dtype = _compute_dtype(a.out.dtype, a.scheme)
    y = workspace.carve(a.workspace13, a.out.shape, dtype)
    _batched_mm(a, "w2", scheme, hidden, y)
    a.out.copy_(y)


def _valid(a: BatchedExpertsArgs) -> Tensor:
    """(E, T) bool: rows before each expert's count."""
    rows = torch.arange(a.hidden_states.shape[1], device=a.hidden_states.device)
    return rows < a.expert_num_tokens.unsqueeze(1)


def _experts_of_rows(a: BatchedExpertsArgs) -> Tensor:
    """(E, T) expert of each row."""
    E, T = a.hidden_states.shape[:2]
    return torch.arange(E, device=a.hidden_states.device).unsqueeze(1).expand(E, T)


def _batched_hidden(a: BatchedExpertsArgs, amax_of_x: Tensor | None) -> Tensor:
    """The activation's output h (E, T, I)."""
    x, (E, T), N = a.hidden_states, a.hidden_states.shape[:2], a.w13.shape[1]
    act = a.options.activation
    dtype, scheme = _compute_dtype(a.out.dtype, a.scheme), a.w13_scheme
    if (arrived := _arrived(a)) is not None:
        x = numerics.activation_values(arrived, scheme)
    elif scheme:
        scale = numerics.static_scale_of_rows(a.a13_scale, _experts_of_rows(a))
        x = numerics.fake_quantize_activation(x, scheme, scale, _valid(a), amax_of_x)
    gate_up = workspace.carve(a.workspace13, (E, T, N), dtype)
    _batched_mm(a, "w13", scheme, x.to(dtype), gate_up)
    hidden = workspace.carve(a.workspace2, (E, T, N // 2 if act.gated else N), dtype)
    _activate(gate_up.flatten(0, 1), act, hidden.flatten(0, 1), a.options.batch_invariant)
    return hidden


def _batched_mm(
    a: BatchedExpertsArgs,
    name: str,  # of the weight (E, N, K)
    scheme: str,
    x: Tensor,  # (E, T, K)
    out: Tensor,  # (E, T, N)
) -> None:
    """out[e] = x[e] @ weight[e].T + bias[e]; on a CPU only for the rows before each count."""
    weight, bias, scales = getattr(a, name), getattr(a, f"{name}_bias"), _scales(a, name, scheme)
    num_experts, rows = x.shape[:2]
    bounds = a.expert_num_tokens.tolist() if x.device.type == "cpu" else [rows] * num_experts
    for e, count in enumerate(bounds):
        count = min(count, rows)
        if count <= 0:
            continue
        w = values(weight, e, scales, scheme, x.dtype)
        if a.options.batch_invariant:
            of_expert = None if bias is None else bias[e]
            product_of_rows(x[e, :count], w.t(), of_expert, out[e, :count])
        elif bias is None:
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
        scale = numerics.static_scale_of_sorted(a.activation_scale, a.offsets, x.shape[0])
        x = numerics.fake_quantize_activation(x, a.scheme, scale, inside)
    y = grouped_mm(
        x,
        a.weight,
        a.offsets,
        scales=_scales(a, "weight", a.scheme),
        scheme=a.scheme,
        bias=a.bias,
        batch_invariant=a.options.batch_invariant,
    )
    a.out.copy_(y)


def _arrived(a: ExpertsArgs | BatchedExpertsArgs) -> numerics.QuantizedActivation | None:
    """hidden_states if they arrive quantized."""
    if a.hidden_states_scale is None:
        return None
    return numerics.QuantizedActivation(
        a.hidden_states, a.hidden_states_scale, a.hidden_states_global_scale
    )


def _scales(
    a: ExpertsArgs | BatchedExpertsArgs | GroupedLinearArgs, weight: str, scheme: str
) -> numerics.Scales | None:
    """The Scales of the weight of that name and scheme."""
    if not scheme:
        return None
    return numerics.Scales(*[getattr(a, f"{weight}_{part}") for part in numerics.Scales._fields])


def _compute_dtype(dtype: torch.dtype, scheme: str) -> torch.dtype:
    """The dtype of products: that of plain weights, fp32 for quantized ones."""
    return torch.float32 if scheme else dtype


BACKEND = register(
    Backend(
        "torch",
        supports=supports,
        workspace_shapes=workspace_shapes,
        launch={
            "experts": _launch_experts,
            "batched_experts": _launch_batched_experts,
            "grouped_linear": _launch_grouped_linear,
        },
        devices=TORCH_DEVICES,
        takes=Takes(
            decodes=layer.decodes,
            quantized_input=tuple([name for name, scheme in SCHEMES.items() if scheme.activation]),
            two_schemes=True,
            chunked=True,
            resident_on=("cpu",),
            depends_on_batch=depends_on_batch,
            adapts=Adapts(_launch_adapted),
            activation_by_expert=True,
            differentiable=True,
        ),
        shortcut=_shortcut,
    )
)
