"""fused_experts, batched_experts, grouped_linear: unwrap -> validate and plan -> allocate -> one op call.

Plain Python that Dynamo traces; the backend op is the only registered boundary, so the workspaces stand
in the captured graph and Inductor reuses them from layer to layer.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from moe_ops import activations, registry, training, validation
from moe_ops.activations import Activation
from moe_ops.library import BatchedExpertsArgs, ExpertsArgs, GroupedLinearArgs
from moe_ops.validation import BatchedCall, ExpertsCall, LinearCall, Weight, meta


def fused_experts(
    hidden_states: Tensor,  # (M, K)
    w13: Tensor,  # (E, N, K)
    w2: Tensor,  # (E, K, I)
    topk_weights: Tensor,  # (M, top_k)
    topk_ids: Tensor,  # (M, top_k)
    *,
    activation: str | Activation = "silu",
    w13_bias: Tensor | None = None,  # (E, N)
    w2_bias: Tensor | None = None,  # (E, K)
    expert_map: Tensor | None = None,  # (global E,)
    router_weight_on_input: bool = False,
    deterministic: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Run the experts of a mixture-of-experts layer on tokens that have already been routed.

    out[m] = sum_j topk_weights[m, j] * (w2[e] @ act(w13[e] @ hidden_states[m] + w13_bias[e]) + w2_bias[e])
    with e = topk_ids[m, j]. Products accumulate in fp32, the sum over j is fp32 with one final cast.

    Args:
        hidden_states: (M, K) bf16, fp16 or fp32; M may be 0, and symbolic while compiling.
        w13: (E, N, K) of hidden_states' dtype with N = 2I, gate rows first, then up (N = I for
            activations that are not gated); or an ExpertTensor from `quantize` or `prepare`.
        w2: (E, K, I), like w13.
        topk_weights: (M, top_k), any float dtype, any strides.
        topk_ids: (M, top_k) int32 or int64, any strides. Ids that are negative or name no local expert
            contribute exactly zero.
        activation: a name or an `Activation`.
        w13_bias: (E, N), added before the activation.
        w2_bias: (E, K), added before the router weight.
        expert_map: (global E,) int32 or int64, global id -> local id, -1 for experts held elsewhere.
        router_weight_on_input: multiply the input, not the output, by the router weight; top_k = 1 only.
        deterministic: results are bitwise equal from run to run; False admits faster variants.
        backend: "auto" chooses from measured times; a name runs that backend or raises.

    Returns:
        (M, K) in hidden_states' dtype. Under torch.autocast inputs and weights are cast first, as
        torch.nn.functional.linear casts them. Gradients flow where inputs require them.

    Raises:
        ValueError: an argument has the wrong rank, shape, dtype, device or layout, or no backend (or not
            the named one) can run the call.
        ImportError: the named backend's library is not installed.
        RuntimeError: a CUDA graph is being captured before the call has run once.
    """
    act = activations.resolve(activation)
    hidden_states, w13, w2, w13_bias, w2_bias = _autocast(
        hidden_states, w13, w2, w13_bias, w2_bias
    )
    a, b = _unwrap(w13), _unwrap(w2)
    needs_grad = torch.is_grad_enabled() and _requires_grad(
        hidden_states, topk_weights, a.data, b.data, w13_bias, w2_bias
    )
    call = ExpertsCall(
        validation.rows("hidden_states", hidden_states, "(M, K)"),
        a.facts(),
        b.facts(),
        validation.rows("topk_weights", topk_weights, "(M, top_k)"),
        validation.rows("topk_ids", topk_ids, "(M, top_k)"),
        act,
        meta(w13_bias),
        meta(w2_bias),
        meta(expert_map),
        router_weight_on_input,
        deterministic,
        needs_grad,
    )
    plan = _plan(call, backend)
    M, K = hidden_states.shape
    rows = topk_ids.shape[0]
    if guard_or_false(rows != M):
        raise ValueError(f"topk_ids must have one row per token: expected {M} rows, got {rows}")
    rows = topk_weights.shape[0]
    if guard_or_false(rows != M):
        raise ValueError(f"topk_weights must have one row per token: expected {M}, got {rows}")
    if needs_grad:
        _warn_training_path(hidden_states)
        out = workspace13 = workspace2 = index = hidden_states  # not written on this path
    else:
        shapes = plan.workspace_shapes(M)
        new_empty = hidden_states.new_empty
        out = new_empty((M, K))
        workspace13 = new_empty(shapes.workspace13.shape, dtype=shapes.workspace13.dtype)
        workspace2 = new_empty(shapes.workspace2.shape, dtype=shapes.workspace2.dtype)
        index = new_empty(shapes.index.shape, dtype=shapes.index.dtype)
    args = ExpertsArgs(
        out,
        workspace13,
        workspace2,
        index,
        hidden_states,
        a.data,
        b.data,
        topk_weights,
        topk_ids,
        a.scale,
        b.scale,
        a.zero_point,
        b.zero_point,
        a.global_scale,
        b.global_scale,
        w13_bias,
        w2_bias,
        a.activation_scale,
        b.activation_scale,
        expert_map,
        a.scheme,
        a.layout,
        act.name,
        act.alpha,
        act.beta,
        act.limit,
        router_weight_on_input,
        deterministic,
        0,
        1,
        plan.tiers_text,
    )
    if needs_grad:
        return training.fused_experts(args, act)
    plan.op(*args)
    return out


def batched_experts(
    hidden_states: Tensor,  # (E, T, K)
    w13: Tensor,  # (E, N, K)
    w2: Tensor,  # (E, K, I)
    expert_num_tokens: Tensor,  # (E,)
    *,
    activation: str | Activation = "silu",
    w13_bias: Tensor | None = None,  # (E, N)
    w2_bias: Tensor | None = None,  # (E, K)
    backend: str = "auto",
) -> Tensor:
    """Run each expert on its own padded block of rows, as batched dispatchers deliver them.

    Args:
        hidden_states: (E, T, K) bf16, fp16 or fp32; rows past an expert's count may hold anything.
        w13, w2, activation, w13_bias, w2_bias, backend: as in `fused_experts`.
        expert_num_tokens: (E,) int32 or int64, on the device; counts above T mean T.

    Returns:
        (E, T, K) in hidden_states' dtype; rows past the count are unspecified.

    Raises:
        ValueError, ImportError, RuntimeError: as `fused_experts`; also when gradients are required.
    """
    act = activations.resolve(activation)
    hidden_states, w13, w2, w13_bias, w2_bias = _autocast(
        hidden_states, w13, w2, w13_bias, w2_bias
    )
    a, b = _unwrap(w13), _unwrap(w2)
    validation.check_rank("hidden_states", hidden_states, "(E, T, K)")
    E, T, K = hidden_states.shape
    call = BatchedCall(
        validation.static_size(E),
        validation.Rows(validation.static_size(K), hidden_states.dtype, hidden_states.device),
        a.facts(),
        b.facts(),
        meta(expert_num_tokens),
        act,
        meta(w13_bias),
        meta(w2_bias),
        torch.is_grad_enabled()
        and _requires_grad(hidden_states, a.data, b.data, w13_bias, w2_bias),
    )
    plan = _plan(call, backend)
    shapes = plan.workspace_shapes(T)
    new_empty = hidden_states.new_empty
    out = new_empty((E, T, K))
    args = BatchedExpertsArgs(
        out,
        new_empty(shapes.workspace13.shape, dtype=shapes.workspace13.dtype),
        new_empty(shapes.workspace2.shape, dtype=shapes.workspace2.dtype),
        new_empty(shapes.index.shape, dtype=shapes.index.dtype),
        hidden_states,
        a.data,
        b.data,
        expert_num_tokens,
        a.scale,
        b.scale,
        a.zero_point,
        b.zero_point,
        a.global_scale,
        b.global_scale,
        w13_bias,
        w2_bias,
        a.activation_scale,
        b.activation_scale,
        a.scheme,
        a.layout,
        act.name,
        act.alpha,
        act.beta,
        act.limit,
        plan.tiers_text,
    )
    plan.op(*args)
    return out


def grouped_linear(
    x: Tensor,  # (S, K)
    weight: Tensor,  # (E, N, K)
    offsets: Tensor,  # (E,)
    *,
    bias: Tensor | None = None,  # (E, N)
    backend: str = "auto",
) -> Tensor:
    """x @ weight[e].T + bias[e] for rows sorted by expert: one half of an expert layer.

    Models whose gate is not one of our activations run two of these around their own gate.

    Args:
        x: (S, K) bf16, fp16 or fp32, rows sorted by expert.
        weight: (E, N, K) of x's dtype, or an ExpertTensor.
        offsets: (E,) int32 on x's device: cumulative end row of each expert, not decreasing.
        bias: (E, N).
        backend: as in `fused_experts`.

    Returns:
        (S, N) in x's dtype; rows past offsets[-1] are zero. Gradients flow where inputs require them.

    Raises:
        ValueError, ImportError, RuntimeError: as `fused_experts`.
    """
    x, weight, _, bias, _ = _autocast(x, weight, None, bias, None)
    a = _unwrap(weight)
    needs_grad = torch.is_grad_enabled() and _requires_grad(x, a.data, bias)
    call = LinearCall(
        validation.rows("x", x, "(S, K)"), a.facts(), meta(offsets), meta(bias), needs_grad
    )
    plan = _plan(call, backend)
    if needs_grad:
        _warn_training_path(x)
        y = training.grouped_linear(
            x, a.data, offsets, bias, a.scale, a.activation_scale, a.scheme
        )
        return y.to(x.dtype)
    S = x.shape[0]
    shapes = plan.workspace_shapes(S)
    out = x.new_empty((S, a.data.shape[1]))
    args = GroupedLinearArgs(
        out,
        x.new_empty(shapes.workspace13.shape, dtype=shapes.workspace13.dtype),
        x.new_empty(shapes.workspace2.shape, dtype=shapes.workspace2.dtype),
        x.new_empty(shapes.index.shape, dtype=shapes.index.dtype),
        x,
        a.data,
        offsets,
        a.scale,
        a.zero_point,
        a.global_scale,
        bias,
        a.activation_scale,
        a.scheme,
        a.layout,
        plan.tiers_text,
    )
    plan.op(*args)
    return out


def explain(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    *,
    activation: str | Activation = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    router_weight_on_input: bool = False,
    deterministic: bool = True,
    backend: str = "auto",
) -> registry.Plan:
    """The plan `fused_experts` would follow for these arguments, without running it.

    Returns:
        A Plan; str() lists the tiers, the workspace bytes and, for every backend left out, why.
        Gradients are left aside: it describes the call under torch.no_grad().

    Raises:
        ValueError, ImportError: as `fused_experts`.
    """
    ids = validation.rows("topk_ids", topk_ids, "(M, top_k)")
    call = ExpertsCall(
        validation.rows("hidden_states", hidden_states, "(M, K)"),
        _unwrap(w13).facts(),
        _unwrap(w2).facts(),
        ids._replace(dtype=torch.float32),
        ids,
        activations.resolve(activation),
        meta(w13_bias),
        meta(w2_bias),
        meta(expert_map),
        router_weight_on_input,
        deterministic,
        False,
    )
    return _plan(call, backend)


def _unwrap(weight: Tensor) -> Weight:
    scheme = getattr(weight, "scheme", None)  # quantized and prepared tensors say what they are
    if scheme is None:
        return Weight(weight)
    return Weight(
        weight.qdata,
        weight.scale,
        weight.zero_point,
        weight.global_scale,
        weight.activation_scale,
        scheme,
        weight.weight_layout,
    )


def _plan(call: ExpertsCall | BatchedCall | LinearCall, backend: str) -> registry.Plan:
    if torch.compiler.is_compiling() or registry.pretending():
        return _make_plan(call, backend)
    return _cached_plan(call, backend)


def _make_plan(call: ExpertsCall | BatchedCall | LinearCall, backend: str) -> registry.Plan:
    problem = call.problem()
    return registry.plan(problem, registry.machine(call.device), backend)


_cached_plan = functools.lru_cache(maxsize=1024)(_make_plan)


def _requires_grad(*tensors: Tensor | None) -> bool:
    return any([t is not None and t.requires_grad for t in tensors])


def _autocast(x: Tensor, w13, w2, w13_bias, w2_bias) -> tuple:
    """Cast as torch.nn.functional.linear is cast: everything but fp64 and quantized weights."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, w13, w2, w13_bias, w2_bias
    dtype = torch.get_autocast_dtype(kind)
    cast = []
    for t in (x, w13, w2, w13_bias, w2_bias):
        plain = t is not None and getattr(t, "scheme", None) is None
        eligible = plain and t.dtype.is_floating_point and t.dtype != torch.float64
        cast.append(t.to(dtype) if eligible else t)
    return tuple(cast)


_warned = False


def _warn_training_path(x: Tensor) -> None:
    """Say once that recording gradients on a GPU leaves the fast kernels unused."""
    global _warned
    if _warned or x.device.type != "cuda" or torch.compiler.is_compiling():
        return
    _warned = True
    warnings.warn(
        "moe_ops runs its differentiable torch path, because gradients are recorded. For inference "
        "wrap the call in torch.no_grad() or torch.inference_mode() to use the fast kernels.",
        stacklevel=3,
    )
