"""Checks of a call's arguments that hold for all backends: ranks, shapes, dtypes and devices, once
per call signature. operands.py checks single ones. experts.py checks sizes that depend on the
number of tokens, without guards on a symbolic size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.checks import (
    check_ids,
    check_local,
    check_rank,
    check_size,
    check_strided,
    static_size,
)
from moe_ops.ops.call import BatchedCall, Call, ExpertsCall, GroupedCall, LinearCall, Weight
from moe_ops.ops.exchange import sends_quantized
from moe_ops.ops.operands import (
    check_bias,
    check_device,
    check_dtype,
    check_float,
    check_input,
    check_weight,
    check_weights,
    if_transposed,
    shape_of,
)
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Problem
from moe_ops.schemes import get_scheme, layer_scheme

_INTS = (torch.int32, torch.int64)


def problem_of(call: Call) -> Problem:
    """The Problem of a call, whose arguments are checked.

    Raises:
        ValueError: an argument is wrong; the message names it and the remedy.
    """
    _check_layouts(call)
    if call.options.batch_invariant:
        _refuse_shared_scales(call)
    if isinstance(call, ExpertsCall):
        return _experts_problem(call)
    if (call.weight if isinstance(call, LinearCall) else call.w13).resident:
        raise ValueError(
            "weights must be tensors, got resident experts, which fused_experts alone runs"
        )
    return _batched_problem(call) if isinstance(call, BatchedCall) else _linear_problem(call)


def _refuse_shared_scales(call: Call | GroupedCall) -> None:
    """Raise for schemes whose activations share one scale, computed from all rows of a batch."""
    weights: tuple[Weight, ...]
    if isinstance(call, LinearCall):
        weights, arrived = (call.weight,), call.x_scale is not None
    else:
        weights = (call.w13, call.w2)
        arrived = not isinstance(call, GroupedCall) and call.hidden_states_scale is not None
    for i, weight in enumerate(weights):
        desc = get_scheme(weight.scheme).activation
        if desc is None or not (desc.group.is_tensor or desc.global_scale):
            continue
        if weight.activation_scale is not None or (arrived and i == 0):
            continue
        remedy = (
            "give its weights an activation_scale, which moe_ops.quantize takes"
            if desc.global_scale
            else "use one with a known scale, such as 'fp8_tensor_static' or 'int8_w8a8_static', "
            "or with a scale of each token, such as 'fp8_channel' or 'int8_w8a8'"
        )
        raise ValueError(
            f"batch_invariant must be False for scheme {weight.scheme!r}, got True: its "
            "activations share one scale, which follows from all tokens of the batch; "
            f"{remedy}"
        )


def _check_layouts(call: Call | GroupedCall) -> None:
    """Raise for sparse, nested and other tensors without strides, and for tensors whose elements
    are not all in this process.
    """
    for name, value in call._asdict().items():
        tensor = value.data if isinstance(value, Weight) else value
        if isinstance(tensor, Tensor):
            linear = isinstance(call, LinearCall) and name == "hidden_states"
            check_strided("x" if linear else name, tensor)
            check_local("x" if linear else name, tensor)


def _experts_problem(call: ExpertsCall) -> Problem:
    x, expert_map, options = call.hidden_states, call.expert_map, call.options
    check_rank("hidden_states", x, "(M, K)")
    check_rank("topk_weights", call.topk_weights, "(M, top_k)")
    check_rank("topk_ids", call.topk_ids, "(M, top_k)")
    dtype, width = check_input(
        *("hidden_states", x, call.hidden_states_scale, call.hidden_states_global_scale),
        *(options, call.w13.scheme, options.batch_invariant),
    )
    if not isinstance(options.exchange, str):
        raise ValueError(f"exchange must be a string, got {type(options.exchange).__name__}")
    if options.exchange and (options.needs_grad or options.batch_invariant):
        which = "that record gradients" if options.needs_grad else "with batch_invariant"
        raise ValueError(
            f"exchange must be left out of calls {which}, got {options.exchange!r}; add outputs "
            "up by the dispatcher's combine or combine_by_tree"
        )
    if options.resident and options.needs_grad:
        raise ValueError(
            "w13 and w2 must be tensors where gradients are required, got resident experts, which "
            "have none: wrap the call in torch.no_grad(), or train on weights that fit the GPU"
        )
    E, N, K, I = check_weights(call.w13, call.w2, x, width, options.activation, dtype)
    quantizes = sends_quantized(options.exchange)
    scheme = layer_scheme(call.w13.scheme, call.w2.scheme)
    fits = scheme == "fp8_block" and K % 128 == 0 and not options.router_weight_on_input
    if quantizes and not fits:
        raise ValueError(
            "exchange must leave tokens as they are, as the dispatcher's `exchange` does, with "
            f"scheme {scheme!r}, K={K} and router_weight_on_input="
            f"{options.router_weight_on_input}: those that travel quantized are for fp8_block, K "
            "a multiple of 128 and router weights on the output"
        )
    top_k = static_size(call.topk_ids.shape[1])
    check_ids("topk_ids", call.topk_ids, call.topk_weights)
    check_float("topk_weights", call.topk_weights.dtype)
    check_device("topk_ids", call.topk_ids.device, x.device)
    check_device("topk_weights", call.topk_weights.device, x.device)
    width = static_size(call.topk_weights.shape[1])
    if width != top_k:
        raise ValueError(
            f"topk_weights must have shape (M, {top_k}) like topk_ids, got (M, {width})"
        )
    if top_k == 0:
        raise ValueError("topk_ids must have shape (M, top_k) with top_k >= 1, got (M, 0)")
    if 0 < options.slots < top_k:
        raise ValueError(
            f"slots of ResidentExperts must be at least top_k={top_k}, got {options.slots}: the "
            "experts of one token are to be on the device at a time; make it with more"
        )
    if options.router_weight_on_input and top_k != 1:
        raise ValueError(
            f"router_weight_on_input must be False unless top_k is 1, got top_k {top_k}: "
            "an input shared by several experts cannot carry their different weights"
        )
    check_bias("w13_bias", call.w13_bias, (E, N), x.device)
    check_bias("w2_bias", call.w2_bias, (E, K), x.device)
    mapped = 0
    if expert_map is not None:
        shape = shape_of(expert_map)
        if len(shape) != 1 or shape[0] == 0:
            raise ValueError(f"expert_map must have shape (global E,), got {shape}")
        check_dtype("expert_map", expert_map.dtype, _INTS)
        check_device("expert_map", expert_map.device, x.device)
        mapped = shape[0]
    by_expert = call.activation_by_expert
    if by_expert is not None:
        if by_expert.shape[1] != E:
            raise ValueError(
                f"activation must have alpha, beta and limit as numbers or of the E={E} experts "
                f"of w13, got those of {by_expert.shape[1]}"
            )
        check_device("activation", by_expert.device, x.device)
        if options.resident:
            raise ValueError(
                "activation must have alpha, beta and limit as numbers with ResidentExperts, got "
                "tensors: operators find parameters by expert beside weights that are arguments"
            )
    weights = call.w13, call.w2
    contiguous = all([weight.contiguous for weight in weights])
    in_order = contiguous or all([w.contiguous or w.transposed for w in weights])
    return Problem(
        kind="experts",
        num_experts=E,
        hidden_size=K,
        intermediate_size=I,
        num_rows=N,
        top_k=top_k,
        dtype=dtype,
        scheme=scheme,
        layout=call.w13.layout,
        options=_constants(options),
        has_bias=call.w13_bias is not None or call.w2_bias is not None,
        activation_by_expert=by_expert is not None,
        mapped_experts=mapped,
        contiguous_weights=contiguous,
        transposed_weights=not contiguous and in_order,
        quantized_input=call.hidden_states_scale is not None or quantizes,
        global_rows=_global_rows(w13=call.w13, w2=call.w2),
    )


def _batched_problem(call: BatchedCall) -> Problem:
    x, counts = call.hidden_states, call.expert_num_tokens
    check_rank("hidden_states", x, "(E, T, K)")
    dtype, width = check_input(
        *("hidden_states", x, call.hidden_states_scale, call.hidden_states_global_scale),
        *(call.options, call.w13.scheme),
    )
    E, N, K, I = check_weights(call.w13, call.w2, x, width, call.options.activation, dtype)
    blocks = static_size(x.shape[0])
    if blocks != E:
        raise ValueError(
            f"hidden_states must have shape (E, T, K) with E={E} experts as in w13, "
            f"got {blocks} blocks"
        )
    if shape_of(counts) != (E,):
        raise ValueError(f"expert_num_tokens must have shape ({E},), got {shape_of(counts)}")
    check_dtype("expert_num_tokens", counts.dtype, _INTS)
    check_device("expert_num_tokens", counts.device, x.device)
    check_bias("w13_bias", call.w13_bias, (E, N), x.device)
    check_bias("w2_bias", call.w2_bias, (E, K), x.device)
    if call.options.needs_grad:
        raise ValueError(
            "batched_experts has no backward: wrap the call in torch.no_grad() or use "
            "fused_experts, which has one"
        )
    return Problem(
        kind="batched_experts",
        num_experts=E,
        hidden_size=K,
        intermediate_size=I,
        num_rows=N,
        top_k=0,
        dtype=dtype,
        scheme=layer_scheme(call.w13.scheme, call.w2.scheme),
        layout=call.w13.layout,
        options=_constants(call.options),
        has_bias=call.w13_bias is not None or call.w2_bias is not None,
        contiguous_weights=call.w13.contiguous and call.w2.contiguous,
        quantized_input=call.hidden_states_scale is not None,
        global_rows=_global_rows(w13=call.w13, w2=call.w2),
    )


def grouped_problem(call: GroupedCall) -> Problem:
    """The Problem of a call of `grouped_experts`, which no backend plans as a whole.

    Raises:
        ValueError: as `problem_of`.
    """
    x, counts, options = call.hidden_states, call.num_tokens_per_expert, call.options
    _check_layouts(call)
    check_rank("hidden_states", x, "(R, K)")
    dtype, width = check_input("hidden_states", x, None, None, options, call.w13.scheme)
    E, N, K, I = check_weights(call.w13, call.w2, x, width, options.activation, dtype)
    name = "num_tokens_per_expert"
    if shape_of(counts) != (E,):
        raise ValueError(
            f"{name} must have shape ({E},), the rows of each expert of w13, got "
            f"{shape_of(counts)}"
        )
    check_dtype(name, counts.dtype, _INTS)
    check_device(name, counts.device, x.device)
    check_bias("w13_bias", call.w13_bias, (E, N), x.device)
    check_bias("w2_bias", call.w2_bias, (E, K), x.device)
    if options.batch_invariant:
        _refuse_shared_scales(call)
    return Problem(
        kind="grouped_experts",
        num_experts=E,
        hidden_size=K,
        intermediate_size=I,
        num_rows=N,
        top_k=1,
        dtype=dtype,
        scheme=layer_scheme(call.w13.scheme, call.w2.scheme),
        layout=call.w13.layout,
        options=options,
    )


def _constants(options: Options) -> Options:
    """The options without symbolic sizes."""
    if options.max_workspace_bytes is None:
        return options
    check_size("max_workspace_bytes", options.max_workspace_bytes)
    return options._replace(max_workspace_bytes=static_size(options.max_workspace_bytes))


def _linear_problem(call: LinearCall) -> Problem:
    x, offsets = call.hidden_states, call.offsets
    check_rank("x", x, "(S, K)")
    dtype, width = check_input(
        *("x", x, call.x_scale, call.x_global_scale, call.options, call.weight.scheme)
    )
    E, N, K = check_weight("weight", call.weight, x, "x", dtype)
    if width != K:
        fits = width == N and (call.bias is None or shape_of(call.bias) == (E, K))
        raise ValueError(
            f"weight must have shape (E, N, {width}) for x, got {(E, N, K)}"
            f"{if_transposed('weight', call.weight, fits)}"
        )
    if shape_of(offsets) != (E,):
        without = "; leave the leading 0 out" if shape_of(offsets) == (E + 1,) else ""
        raise ValueError(
            f"offsets must have shape ({E},), the end row of each expert, got {shape_of(offsets)}"
            + without
        )
    check_dtype("offsets", offsets.dtype, (torch.int32,))
    check_device("offsets", offsets.device, x.device)
    check_bias("bias", call.bias, (E, N), x.device)
    return Problem(
        kind="grouped_linear",
        num_experts=E,
        hidden_size=K,
        intermediate_size=0,
        num_rows=N,
        top_k=0,
        dtype=dtype,
        scheme=call.weight.scheme,
        layout=call.weight.layout,
        options=call.options,
        has_bias=call.bias is not None,
        contiguous_weights=call.weight.contiguous,
        quantized_input=call.x_scale is not None,
        global_rows=_global_rows(weight=call.weight),
    )


def _global_rows(**weights: Weight) -> tuple[str, ...]:
    """Names of the weights with a global scale per row."""
    return tuple([name for name, weight in weights.items() if weight.global_rows])
