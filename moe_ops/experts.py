"""fused_experts, batched_experts, grouped_linear: unwrap the weights, validate, plan, allocate,
call one operator. explain: the plan alone.

This is plain Python, which Dynamo traces. The operator is the only opaque node, so workspaces are
ordinary tensors of the captured graph, and Inductor reuses their memory from layer to layer.
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
from moe_ops.autograd import composition, stack, training
from moe_ops.autograd.adapters import LoRA
from moe_ops.autograd.stack import LoRAStack
from moe_ops.batch_invariance import resolve
from moe_ops.ops.call import BatchedCall, ExpertsCall, LinearCall, refuse_lost, take_apart
from moe_ops.ops.options import Options
from moe_ops.ops.resident import ResidentWeight, TensorFacts, replace_resident
from moe_ops.ops.transforms import refuse_tangents
from moe_ops.planning import bind
from moe_ops.planning.plan import Plan
from moe_ops.planning.training import explanation

_PLAIN = (Tensor, torch.nn.Parameter)
_RESIDENT = (ResidentWeight, TensorFacts)  # in the places of weights and biases
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
    adapters: LoRA | Sequence[LoRA] | LoRAStack | None = None,
    adapter_ids: Tensor | None = None,  # (M,)
    batch_invariant: bool | None = None,
    exchange: str = "",
) -> Tensor:
    """Apply the experts of a mixture-of-experts layer to routed tokens.

    out[m] = sum_j topk_weights[m, j] * (w2[e] @ act(w13[e] @ hidden_states[m] + w13_bias[e]) +
    w2_bias[e]) with e = topk_ids[m, j]. Products accumulate in fp32. The sum over j is in fp32 and
    is rounded once.

    Args:
        hidden_states: (M, K), floating point. M may be 0, and symbolic while compiling.
        w13: (E, N, K) in hidden_states' dtype. N = 2I, gate rows first, then up rows; N = I for
            activations without a gate. Or an ExpertTensor from `quantize` or `prepare`. A
            DTensor, plain or quantized, is all-gathered. Each process is taken to have tokens of
            its own, so the gradient of a DTensor is summed over the processes of its mesh; where
            all have the same tokens and the same loss, pass full_tensor() instead. Or w13 of
            `ResidentExperts`, whose experts lie in host memory.
        w2: (E, K, I), like w13.
        topk_weights: (M, top_k), any float dtype, any strides.
        topk_ids: (M, top_k), int32 or int64, any strides. Negative ids and ids without a local
            expert contribute exactly zero.
        activation: a name or an `Activation`, whose parameters may differ by expert: those of the
            E experts of w13.
        w13_bias: (E, N), added before the activation. A DTensor is all-gathered.
        w2_bias: (E, K), added before the router weight is applied. Like w13_bias.
        expert_map: (global E,), int32 or int64: the local id of each global id, or -1 for an
            expert that is held elsewhere.
        router_weight_on_input: multiply the input by the router weight, before the scheme
            quantizes it, instead of the output. top_k = 1 only.
        deterministic: results are bitwise equal from run to run. False admits faster variants.
        max_workspace_bytes: upper bound of the scratch memory, in bytes. More tokens than fit run
            in chunks, one after another, with the same result (docs/backends.md). None: a 22nd
            of the GPU's memory; unbounded on a CPU. Calls that record gradients or have adapters
            are not bounded.
        backend: "auto" chooses by measured times. A name selects that backend; the call raises if
            it cannot run there.
        hidden_states_scale: scales of hidden_states that arrive quantized, in the activation
            format of the weights' scheme: e4m3, int8, or packed bytes (M, K * bits / 8). fp32
            (M, ceil(K / 128)) per group of 128 columns, (M, 1) per token, () or (1,) per tensor;
            e8m0 codes (M, ceil(K / 32)) for MX formats; e4m3 (M, K / 16) for nvfp4. Any strides.
            Values are never quantized a second time; router weights on the input multiply the
            dequantized values. `quantize_activation` returns both tensors.
        hidden_states_global_scale: () or (1,), fp32, nvfp4 only. Values are divided by it.
        out_dtype: dtype of the result. Where hidden_states arrive quantized any float dtype, bf16
            by default; otherwise None or hidden_states' dtype. With batch_invariant also
            torch.float32: the sum before it is rounded, for ranks of an expert-parallel group
            whose outputs are yet to be added. Added, these have the bits of one device, unless
            tokens arrive quantized.
        recompute: keep only the inputs for the backward pass, and compute the first product again
            there. Otherwise (M * top_k, N) more elements are kept.
        adapters: one `LoRA` or several, added to the weights, which may be quantized. Gradients
            flow to the adapters, and through them to hidden_states. Calls with adapters take the
            path of training, also where no gradients are recorded: backend "auto" or "torch".
            Or, without gradients, a `LoRAStack`, of which each token has its own adapter:
            backend "auto", "torch" or "triton".
        adapter_ids: (M,), int32 or int64, beside a LoRAStack: the number of each token's adapter
            in it. Any other number, such as -1, is none. Values are read on the device alone.
        batch_invariant: a token's row has the same bits whatever the other tokens of the batch
            are, their number and order, and whether or not gradients are recorded
            (docs/reproducibility.md). None: the process default of
            `moe_ops.set_batch_invariant`, False unless set. Excludes backends that do not
            guarantee it, and schemes whose activations share one scale of the whole batch.
        exchange: the exchange of a dispatcher (`SymmetricMemory.exchange`) that sent these tokens,
            T of each of R ranks, M = R * T. The operator adds up the outputs of the ranks: the
            first T rows of the result are this rank's tokens, the others are unspecified. After
            `dispatch_routing`, which sends topk_weights and topk_ids (R * T, top_k) alone,
            hidden_states are this rank's own tokens, at most T, and the operator sends them; with
            `SymmetricMemory.exchange_quantized` it quantizes them first (fp8_block). All ranks
            must make the same calls in the same order and use the results, because compiled
            graphs drop a call whose result is unused. Without gradients and batch_invariant only.

    Returns:
        (M, K) in out_dtype, by default in hidden_states' dtype, or in bf16 where these arrive
        quantized. Under torch.autocast inputs and weights are cast first, as for
        torch.nn.functional.linear. Gradients flow to the inputs that require them.

    Raises:
        ValueError: an argument has a wrong rank, shape, dtype, device or layout; no backend, or
            not the named one, can run the call; hidden_states arrive quantized in a call that
            records gradients or has adapters; batch_invariant with a scheme whose activations
            share one scale of the batch.
        ImportError: the library of the named backend is not installed.
        RuntimeError: a CUDA graph is captured before the call has run once.
    """
    resident, slots = "", 0
    if isinstance(w13, ResidentWeight) or isinstance(w2, ResidentWeight):
        refused = (w13_bias, w2_bias, expert_map, adapters, exchange or None)
        resident, slots, w13, w2, w13_bias, w2_bias = replace_resident(w13, w2, *refused)
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
    of_tokens = isinstance(adapters, LoRAStack) or adapter_ids is not None
    if of_tokens:
        needs_grad = False  # refused if it is asked for, once the call is known
    elif adapters is not None:
        matrices = low_rank.check_call(adapters, backend, hidden_states_scale)
        if forward_ad._current_level >= 0:
            refuse_tangents(matrices)
        needs_grad = True  # only the path of training applies adapters
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
            act.by_name,
            router_weight_on_input,
            not deterministic,
            needs_grad,
            recompute,
            max_workspace_bytes,
            out_dtype,
            resolve(batch_invariant),
            exchange,
            slots,
            resident,
        ),
        hidden_states_scale,
        hidden_states_global_scale,
        act.by_expert,
    )
    if of_tokens:
        trained = (hidden_states, topk_weights, a.data, b.data, w13_bias, w2_bias)
        return stack.run(call, adapters, adapter_ids, backend, trained)
    if not (needs_grad or torch.compiler.is_compiling()):
        return bind.run(call, backend)
    bound = bind.look_up(call, backend)
    M = call.num_tokens
    _check_rows("topk_ids", topk_ids, M)  # in eager inference the op checks them, on real sizes
    _check_rows("topk_weights", topk_weights, M)
    if hidden_states_scale is not None and hidden_states_scale.ndim == 2:
        _check_rows("hidden_states_scale", hidden_states_scale, M)
    if needs_grad:  # the operators of training allocate their own memory
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
    """Apply each expert to its own padded block of rows, the layout of batched dispatchers.

    Args:
        hidden_states: (E, T, K), floating point. Rows past an expert's count may hold anything.
        w13, w2, w13_bias, w2_bias, backend: as in `fused_experts`.
        activation: a name or an `Activation` whose parameters are numbers.
        expert_num_tokens: (E,), int32 or int64, on the device. Counts above T mean T.
        max_workspace_bytes: as in `fused_experts`. A chunk has all rows of one expert or more.
        hidden_states_scale, hidden_states_global_scale, out_dtype: as in `fused_experts`, with
            scales (E, T, groups).
        batch_invariant: as in `fused_experts`. The bits may differ from those of `fused_experts`.

    Returns:
        (E, T, K) in hidden_states' dtype, or in out_dtype if they arrive quantized. Rows past an
        expert's count are unspecified.

    Raises:
        ValueError, ImportError, RuntimeError: as `fused_experts`; ValueError also where gradients
            are required.
    """
    tensors = (hidden_states, w13, w2, expert_num_tokens, w13_bias, w2_bias)
    _check_tensors("hidden_states w13 w2 expert_num_tokens w13_bias w2_bias", 4, *tensors)
    act = activations.resolve_numbers(activation)
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
    """Grouped linear layer: x @ weight[e].T + bias[e] for rows sorted by expert.

    Two of these around a gate of one's own make an expert layer whose activation is not one of
    `Activation`.

    Args:
        x: (S, K), floating point, rows sorted by expert.
        weight: (E, N, K) in x's dtype, or an ExpertTensor.
        offsets: (E,), int32, on x's device: the row after the last one of each expert, cumulative.
        bias: (E, N).
        backend: as in `fused_experts`.
        x_scale, x_global_scale, out_dtype: for x that arrives quantized, as in `fused_experts`.
        batch_invariant: as in `fused_experts`, for the rows of x.

    Returns:
        (S, N) in x's dtype, or in out_dtype if x arrives quantized. Rows from offsets[-1] on are
        zero. Gradients flow to the inputs that require them.

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
        bind.look_up(call, backend)  # raises if no backend runs the call
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
    """The plan that `fused_experts` follows for these arguments. Nothing runs.

    The plan names backends. The tiles that "triton" chooses below it for a number of tokens, and
    the legal ones by estimated time, are printed by `python -m moe_ops.tuning --list`.

    Args:
        training: describe the call that records gradients. Otherwise the call under
            torch.no_grad(), whether or not the arguments require gradients.

    Returns:
        A Plan. str() lists the tiers, the bytes and chunks of the workspaces, and why each other
        backend is left out. With `training` it says whether the forward and backward passes run
        on fused kernels or in plain torch, and why; so does the field `gradients`.

    Raises:
        ValueError, ImportError: as `fused_experts`.
    """
    resident, slots = "", 0
    if isinstance(w13, ResidentWeight) or isinstance(w2, ResidentWeight):
        refused = (w13_bias, w2_bias, expert_map, None, None)
        resident, slots, w13, w2, w13_bias, w2_bias = replace_resident(w13, w2, *refused)
    tensors = (hidden_states, w13, w2, topk_ids, topk_ids, w13_bias, w2_bias, expert_map)
    _check_tensors(_EXPERTS.replace("topk_weights", "topk_ids"), 5, *tensors)
    checks.check_rank("topk_ids", topk_ids, "(M, top_k)")
    if hidden_states_scale is not None or hidden_states_global_scale is not None:
        hidden_states_scale = _scale_of_input(
            "hidden_states", hidden_states_scale, hidden_states_global_scale
        )
    act = activations.resolve(activation)
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
            act.by_name,
            router_weight_on_input=router_weight_on_input,
            atomic_sums=not deterministic,
            needs_grad=training,
            max_workspace_bytes=max_workspace_bytes,
            out_dtype=out_dtype,
            batch_invariant=resolve(batch_invariant),
            slots=slots,
            resident=resident,
        ),
        hidden_states_scale,
        hidden_states_global_scale,
        act.by_expert,
    )
    plan = bind.make_plan(call, backend)
    return replace(plan, gradients=explanation(call)) if training else plan


def _check_tensors(names: str, required: int, *values: Any) -> None:
    """Raise for the first value that is not a tensor. Values after the first `required` may be
    None.
    """
    for i, value in enumerate(values):
        # None is compared first: isinstance costs three times as much for None as for a Tensor
        wrong = (i < required) if value is None else not isinstance(value, Tensor)
        if wrong and type(value) not in _RESIDENT:
            checks.check_tensor(names.split()[i], value)


def _scale_of_input(name: str, scale: Any, global_scale: Any) -> Tensor | None:
    """The scale of a quantized input in the form that the ops take: e8m0 as uint8 codes."""
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
    """The full tensor of a DTensor."""
    from moe_ops.tensors.sharding import gathered

    return gathered(weight)


def _whole(bias: Any) -> Tensor | None:
    """A bias; of a DTensor the full tensor."""
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
    """Cast 16-bit and 32-bit floats, as torch.nn.functional.linear casts its arguments. Quantized
    tensors stay, also bare ones of one byte an element, which validation refuses because their
    scales are missing.
    """
    dtype = torch.get_autocast_dtype(x.device.type)
    cast = []
    t: Any
    for t in (x, *others):
        plain = isinstance(t, Tensor) and getattr(t, "scheme", None) is None
        plain = plain and (cast_x or t is not x)
        eligible = plain and t.dtype.is_floating_point and t.dtype.itemsize in (2, 4)
        cast.append(t.to(dtype) if eligible else t)
    return tuple(cast)
