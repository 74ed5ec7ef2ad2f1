"""fused_experts, batched_experts, grouped_linear: unwrap -> validate and plan -> allocate -> one
op call.

Plain Python that Dynamo traces; the backend op is the only registered boundary, so the workspaces
stand in the captured graph and Inductor reuses them from layer to layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import guard_or_false

from moe_ops import activations, checks
from moe_ops.activations import Activation
from moe_ops.autograd import adapters as low_rank
from moe_ops.autograd import composition, training
from moe_ops.autograd.adapters import LoRA
from moe_ops.batch_invariance import resolve
from moe_ops.ops.call import BatchedCall, ExpertsCall, LinearCall, refuse_lost, take_apart
from moe_ops.ops.options import Options
from moe_ops.ops.transforms import refuse_tangents
from moe_ops.planning import bind
from moe_ops.planning.plan import Plan
from moe_ops.planning.training import explanation

_PLAIN = (Tensor, torch.nn.Parameter)
_EXPERTS = "hidden_states w13 w2 topk_weights topk_ids w13_bias w2_bias expert_map"


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
    max_workspace_bytes: int | None = None,
    backend: str = "auto",
    hidden_states_scale: Tensor | None = None,  # (M, groups)
    hidden_states_global_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    recompute: bool = False,
    adapters: LoRA | Sequence[LoRA] | None = None,
    batch_invariant: bool | None = None,
    exchange: str = "",
) -> Tensor:
    """Run the experts of a mixture-of-experts layer on tokens that have already been routed.

    out[m] = sum_j topk_weights[m, j] * (w2[e] @ act(w13[e] @ hidden_states[m] + w13_bias[e]) +
    w2_bias[e]) with e = topk_ids[m, j]. Products accumulate in fp32, the sum over j is fp32 with
    one final cast.

    Args:
        hidden_states: (M, K) of floats; M may be 0, and symbolic while compiling.
        w13: (E, N, K) of hidden_states' dtype with N = 2I, gate rows first, then up (N = I for
            activations that are not gated); or an ExpertTensor from `quantize` or `prepare`.
            A DTensor, plain or quantized, is gathered; tokens are this process's own, so its
            gradient is that of the sum of the losses of all processes of its mesh. Where they
            have the same tokens and one loss, pass full_tensor(), whose gradient is that of one.
        w2: (E, K, I), like w13.
        topk_weights: (M, top_k), any float dtype, any strides.
        topk_ids: (M, top_k) int32 or int64, any strides. Ids that are negative or name no local
            expert contribute exactly zero.
        activation: a name or an `Activation`.
        w13_bias: (E, N), added before the activation; a DTensor as of weights.
        w2_bias: (E, K), added before the router weight.
        expert_map: (global E,) int32 or int64, global id -> local id, -1 for experts held
            elsewhere.
        router_weight_on_input: multiply the input, not the output, by the router weight, before a
            scheme quantizes it; top_k = 1 only.
        deterministic: results are bitwise equal from run to run; False admits faster variants.
        max_workspace_bytes: most bytes of scratch memory. More tokens than it has room for run in
            chunks, one after the other, with the same result (docs/backends.md). None: a 22nd of
            the GPU's memory; on a CPU no bound. Calls that record gradients, or have adapters,
            are not bounded.
        backend: "auto" chooses from measured times; a name runs that backend or raises.
        hidden_states_scale: says that hidden_states arrive quantized, as the weights' scheme
            quantizes them: e4m3, int8, or packed bytes (M, K * bits / 8), multiplied by their
            scales. These are fp32 (M, ceil(K / 128)) for groups of 128 columns, (M, 1) for
            tokens, () or (1,) for one scale; e8m0 codes (M, ceil(K / 32)) of MX formats; e4m3
            (M, K / 16) of nvfp4. Any strides. They are computed as they are: nothing is
            quantized a second time, and router weights on the input multiply their values.
            `quantize_activation` makes both.
        hidden_states_global_scale: () or (1,) fp32, of nvfp4 alone: values are divided by it.
        out_dtype: the result's dtype where hidden_states arrive quantized, bf16 by default; else
            None or their own. With batch_invariant also torch.float32: the sum as it is, for
            ranks of an expert-parallel group, whose outputs are still to be added. Those have
            the bits of one device if the tokens did not arrive quantized.
        recompute: keep the inputs alone for the backward pass, and compute the first product
            again there. Without it, (M * top_k, N) elements are kept beside them.
        adapters: low-rank adapters that are added to the weights, one `LoRA` or several. Weights
            may be quantized. Gradients flow to the adapters, and through them to hidden_states.
            Such calls run as those that record gradients do, also where none are: with backend
            "auto" or "torch".
        batch_invariant: a token's row has the same bits whatever other tokens are in its batch,
            how many and in which order, and whether gradients are recorded
            (docs/reproducibility.md). None: what `moe_ops.set_batch_invariant` says, False by
            default. Backends that do not promise it are left out, and so are schemes whose
            activations share one scale of the whole batch.
        exchange: of a dispatcher (`SymmetricMemory.exchange`) that sent these tokens, T of each
            rank of its group: the first T rows of the result are the sums over all ranks of this
            rank's tokens, the others are unspecified. Or it sent their experts alone
            (`dispatch_routing`), (R * T, top_k), and hidden_states are this rank's own, at most
            T, which are sent here, by `SymmetricMemory.exchange_quantized` as the scheme
            (fp8_block) quantizes them; M is R * T then, too. All ranks call it, in one order, and
            use its result: compiled graphs leave out calls whose result nothing uses. For calls
            that record no gradients, without batch_invariant.

    Returns:
        (M, K) in out_dtype, by default hidden_states' own unless they arrive quantized. Under
        torch.autocast inputs and weights are cast first, as torch.nn.functional.linear casts them.
        Gradients flow where inputs require them.

    Raises:
        ValueError: an argument has the wrong rank, shape, dtype, device or layout, or no backend
            (or not the named one) can run the call; or hidden_states arrive quantized and
            gradients are required or adapters given; or batch_invariant is asked for of a scheme
            whose activations share one scale of the batch.
        ImportError: the named backend's library is not installed.
        RuntimeError: a CUDA graph is being captured before the call has run once.
    """
    tensors = (hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias, expert_map)
    _check_tensors(_EXPERTS, 5, *tensors)
    act = activations.resolve(activation)
    if hidden_states_scale is not None or hidden_states_global_scale is not None:
        hidden_states_scale = _scale_of_input(
            "hidden_states", hidden_states_scale, hidden_states_global_scale
        )
    if checks.autocasting(hidden_states.device):
        hidden_states, w13, w2, w13_bias, w2_bias = _autocast(
            hidden_states_scale is None, hidden_states, w13, w2, w13_bias, w2_bias
        )
    a, b = take_apart(w13, _gather), take_apart(w2, _gather)
    if w13_bias is not None or w2_bias is not None:
        w13_bias, w2_bias = _whole(w13_bias), _whole(w2_bias)
    if forward_ad._current_level >= 0:
        refuse_tangents((hidden_states, topk_weights, a.data, b.data, w13_bias, w2_bias))
    needs_grad = torch.is_grad_enabled() and _requires_grad(
        hidden_states, topk_weights, a.data, b.data, w13_bias, w2_bias
    )
    if isinstance(adapters, (list, tuple)) and not adapters:
        adapters = None
    if adapters is not None:
        matrices = low_rank.check_call(adapters, backend, hidden_states_scale)
        if forward_ad._current_level >= 0:
            refuse_tangents(matrices)
        needs_grad = True  # what backward passes need, no other path has
    call = ExpertsCall(
        hidden_states,
        a,
        b,
        topk_weights,
        topk_ids,
        w13_bias,
        w2_bias,
        expert_map,
        Options(
            act,
            router_weight_on_input,
            not deterministic,
            needs_grad,
            recompute,
            max_workspace_bytes,
            out_dtype,
            resolve(batch_invariant),
            exchange,
        ),
        hidden_states_scale,
        hidden_states_global_scale,
    )
    if not (needs_grad or torch.compiler.is_compiling()):
        return bind.run(call, backend)
    bound = bind.look_up(call, backend)
    M = call.num_tokens
    _check_rows("topk_ids", topk_ids, M)  # elsewhere the op compares them, on real sizes
    _check_rows("topk_weights", topk_weights, M)
    if hidden_states_scale is not None and hidden_states_scale.ndim == 2:
        _check_rows("hidden_states_scale", hidden_states_scale, M)
    if needs_grad:  # gradients allocate their own
        if not torch.compiler.is_compiling():
            refuse_lost(call)
        if adapters is None:
            return training.fused_experts(call, recompute)
        if call.options.batch_invariant and bound.plan.machine.device_type != "cpu":
            raise ValueError(
                "batch_invariant must be False for adapters on a GPU, got True: their products "
                "are not shown to keep it; merge them into the weights"
            )
        joined = low_rank.join(adapters, bound.plan.problem, hidden_states)
        return training.fused_experts(call, recompute, joined)
    return bound.run(call, M)


def batched_experts(
    hidden_states: Tensor,  # (E, T, K)
    w13: Tensor,  # (E, N, K)
    w2: Tensor,  # (E, K, I)
    expert_num_tokens: Tensor,  # (E,)
    *,
    activation: str | Activation = "silu",
    w13_bias: Tensor | None = None,  # (E, N)
    w2_bias: Tensor | None = None,  # (E, K)
    max_workspace_bytes: int | None = None,
    backend: str = "auto",
    hidden_states_scale: Tensor | None = None,  # (E, T, groups)
    hidden_states_global_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool | None = None,
) -> Tensor:
    """Run each expert on its own padded block of rows, as batched dispatchers deliver them.

    Args:
        hidden_states: (E, T, K) of floats; rows past an expert's count may hold anything.
        w13, w2, activation, w13_bias, w2_bias, backend: as in `fused_experts`.
        expert_num_tokens: (E,) int32 or int64, on the device; counts above T mean T.
        max_workspace_bytes: as in `fused_experts`; a chunk has all rows of some experts, of one at
            least.
        hidden_states_scale, hidden_states_global_scale, out_dtype: as in `fused_experts`, with
            scales (E, T, groups).
        batch_invariant: as in `fused_experts`; the bits of a row may be others than there.

    Returns:
        (E, T, K) in hidden_states' dtype, or in out_dtype if they arrive quantized; rows past the
        count are unspecified.

    Raises:
        ValueError, ImportError, RuntimeError: as `fused_experts`; also when gradients are
            required.
    """
    tensors = (hidden_states, w13, w2, expert_num_tokens, w13_bias, w2_bias)
    _check_tensors("hidden_states w13 w2 expert_num_tokens w13_bias w2_bias", 4, *tensors)
    act = activations.resolve(activation)
    if hidden_states_scale is not None or hidden_states_global_scale is not None:
        hidden_states_scale = _scale_of_input(
            "hidden_states", hidden_states_scale, hidden_states_global_scale
        )
    if checks.autocasting(hidden_states.device):
        hidden_states, w13, w2, w13_bias, w2_bias = _autocast(
            hidden_states_scale is None, hidden_states, w13, w2, w13_bias, w2_bias
        )
    a, b = take_apart(w13, _gather), take_apart(w2, _gather)
    if w13_bias is not None or w2_bias is not None:
        w13_bias, w2_bias = _whole(w13_bias), _whole(w2_bias)
    if forward_ad._current_level >= 0:
        refuse_tangents((hidden_states, a.data, b.data, w13_bias, w2_bias))
    needs_grad = torch.is_grad_enabled() and _requires_grad(
        hidden_states, a.data, b.data, w13_bias, w2_bias
    )
    call = BatchedCall(
        hidden_states,
        a,
        b,
        expert_num_tokens,
        w13_bias,
        w2_bias,
        Options(
            act,
            needs_grad=needs_grad,
            max_workspace_bytes=max_workspace_bytes,
            out_dtype=out_dtype,
            batch_invariant=resolve(batch_invariant),
        ),
        hidden_states_scale,
        hidden_states_global_scale,
    )
    return bind.run(call, backend)


def grouped_linear(
    x: Tensor,  # (S, K)
    weight: Tensor,  # (E, N, K)
    offsets: Tensor,  # (E,)
    *,
    bias: Tensor | None = None,  # (E, N)
    backend: str = "auto",
    x_scale: Tensor | None = None,  # (S, groups)
    x_global_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool | None = None,
) -> Tensor:
    """x @ weight[e].T + bias[e] for rows sorted by expert: one half of an expert layer.

    Models whose gate is not one of our activations run two of these around their own gate.

    Args:
        x: (S, K) of floats, rows sorted by expert.
        weight: (E, N, K) of x's dtype, or an ExpertTensor.
        offsets: (E,) int32 on x's device: cumulative end row of each expert, not decreasing.
        bias: (E, N).
        backend: as in `fused_experts`.
        x_scale, x_global_scale, out_dtype: of x that arrives quantized, as in `fused_experts`.
        batch_invariant: as in `fused_experts`, of the rows of x.

    Returns:
        (S, N) in x's dtype, or in out_dtype if x arrives quantized; rows past offsets[-1] are
        zero. Gradients flow where inputs require them.

    Raises:
        ValueError, ImportError, RuntimeError: as `fused_experts`.
    """
    _check_tensors("x weight offsets bias", 3, x, weight, offsets, bias)
    if x_scale is not None or x_global_scale is not None:
        x_scale = _scale_of_input("x", x_scale, x_global_scale)
    if checks.autocasting(x.device):
        x, weight, bias = _autocast(x_scale is None, x, weight, bias)
    a, bias = take_apart(weight, _gather), bias if bias is None else _whole(bias)
    if forward_ad._current_level >= 0:
        refuse_tangents((x, a.data, bias))
    needs_grad = torch.is_grad_enabled() and _requires_grad(x, a.data, bias)
    options = Options(
        needs_grad=needs_grad, out_dtype=out_dtype, batch_invariant=resolve(batch_invariant)
    )
    call = LinearCall(x, a, offsets, bias, options, x_scale, x_global_scale)
    if needs_grad:
        bind.look_up(call, backend)  # which refuses what no backend runs
        if not torch.compiler.is_compiling():
            refuse_lost(call)
            training.warn_of_plain_torch(x, "grouped_linear has no other")
        y = composition.grouped_linear(
            x, a, offsets, bias, batch_invariant=call.options.batch_invariant
        )
        return y.to(x.dtype)
    return bind.run(call, backend)


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
    max_workspace_bytes: int | None = None,
    backend: str = "auto",
    hidden_states_scale: Tensor | None = None,
    hidden_states_global_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool | None = None,
    training: bool = False,
) -> Plan:
    """The plan `fused_experts` would follow for these arguments, without running it.

    Args:
        training: describe the call that records gradients; else that under torch.no_grad(),
            whether or not the arguments require any.

    Returns:
        A Plan; str() lists the tiers, the workspace bytes and chunks and, for every backend left
        out, why. With `training` it says whether forward and backward pass run on fused kernels
        or in plain torch, and for what reason; so does the field `gradients`.

    Raises:
        ValueError, ImportError: as `fused_experts`.
    """
    tensors = (hidden_states, w13, w2, topk_ids, topk_ids, w13_bias, w2_bias, expert_map)
    _check_tensors(_EXPERTS.replace("topk_weights", "topk_ids"), 5, *tensors)
    checks.check_rank("topk_ids", topk_ids, "(M, top_k)")
    if hidden_states_scale is not None or hidden_states_global_scale is not None:
        hidden_states_scale = _scale_of_input(
            "hidden_states", hidden_states_scale, hidden_states_global_scale
        )
    call = ExpertsCall(
        hidden_states,
        take_apart(w13, _gather),
        take_apart(w2, _gather),
        topk_ids.to(torch.float32),
        topk_ids,
        _whole(w13_bias),
        _whole(w2_bias),
        expert_map,
        Options(
            activations.resolve(activation),
            router_weight_on_input=router_weight_on_input,
            atomic_sums=not deterministic,
            needs_grad=training,
            max_workspace_bytes=max_workspace_bytes,
            out_dtype=out_dtype,
            batch_invariant=resolve(batch_invariant),
        ),
        hidden_states_scale,
        hidden_states_global_scale,
    )
    plan = bind.make_plan(call, backend)
    return replace(plan, gradients=explanation(call)) if training else plan


def _check_tensors(names: str, required: int, *values: Any) -> None:
    """ValueError for the first value that is no tensor; those after the `required` ones may be
    None.
    """
    for i, value in enumerate(values):
        # None first: asking whether it is a Tensor costs three times as much as of one
        if (i < required) if value is None else not isinstance(value, Tensor):
            checks.check_tensor(names.split()[i], value)


def _scale_of_input(name: str, scale: Any, global_scale: Any) -> Tensor | None:
    """The scale of an input that arrives quantized, as the ops carry it: e8m0 as its uint8
    codes.
    """
    for what, value in (("scale", scale), ("global_scale", global_scale)):
        if value is not None:
            if not isinstance(value, Tensor):
                checks.check_tensor(f"{name}_{what}", value)
            if torch.is_grad_enabled() and value.requires_grad:
                raise ValueError(
                    f"{name}_{what} must not require gradients, for none flow through an input "
                    "that arrives quantized: detach it"
                )
    if forward_ad._current_level >= 0:
        refuse_tangents((scale, global_scale))
    if scale is not None and scale.dtype == torch.float8_e8m0fnu:
        return scale.view(torch.uint8)
    return scale


def _gather(weight: Any) -> Tensor:
    """All experts of a DTensor."""
    from moe_ops.tensors.sharding import gathered

    return gathered(weight)


def _whole(bias: Any) -> Tensor | None:
    """A bias, of all experts if it is a DTensor."""
    if bias is None or type(bias) in _PLAIN or not hasattr(bias, "device_mesh"):
        return bias
    return _gather(bias)


def _check_rows(name: str, tensor: Tensor, M: int) -> None:
    rows = tensor.shape[0]
    if guard_or_false(rows != M):
        raise ValueError(f"{name} must have one row per row of hidden_states, {M}, got {rows}")


def _requires_grad(*tensors: Tensor | None) -> bool:
    return any([t is not None and t.requires_grad for t in tensors])


def _autocast(cast_x: bool, x: Tensor, *others: Any) -> tuple:
    """Cast as torch.nn.functional.linear's arguments are: all but fp64 and what is quantized, also
    where nothing says so but its dtype of one byte. That is refused later: without its scales it
    would be wrong.
    """
    dtype = torch.get_autocast_dtype(x.device.type)
    cast = []
    t: Any
    for t in (x, *others):
        plain = t is not None and getattr(t, "scheme", None) is None and (cast_x or t is not x)
        eligible = plain and t.dtype.is_floating_point and t.dtype.itemsize in (2, 4)
        cast.append(t.to(dtype) if eligible else t)
    return tuple(cast)
