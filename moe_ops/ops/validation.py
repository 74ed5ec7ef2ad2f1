"""Checks of a call's arguments that hold for all backends: ranks, shapes, dtypes and devices, once
per call signature. experts.py checks sizes that depend on the number of tokens, without guards on
a symbolic size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.activations import Activation
from moe_ops.checks import (
    check_ids,
    check_local,
    check_rank,
    check_size,
    check_strided,
    static_size,
)
from moe_ops.meta.scales import (
    FLAT,
    TRANSPOSED,
    TRITON_E2M1,
    base_layout,
    sizes_of_layout,
    unpacked_size,
)
from moe_ops.ops.call import BatchedCall, Call, ExpertsCall, GroupedCall, LinearCall, Weight
from moe_ops.ops.exchange import sends_quantized
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Problem
from moe_ops.schemes import QuantScheme, get_scheme, layer_scheme

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
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


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor without an M dimension, as constants."""
    return tuple([static_size(size) for size in tensor.shape])


def _experts_problem(call: ExpertsCall) -> Problem:
    x, expert_map, options = call.hidden_states, call.expert_map, call.options
    check_rank("hidden_states", x, "(M, K)")
    check_rank("topk_weights", call.topk_weights, "(M, top_k)")
    check_rank("topk_ids", call.topk_ids, "(M, top_k)")
    dtype, width = _check_input(
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
    E, N, K, I = _check_weights(call.w13, call.w2, x, width, options.activation, dtype)  # noqa: E741
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
    _check_float("topk_weights", call.topk_weights.dtype)
    _check_device("topk_ids", call.topk_ids.device, x.device)
    _check_device("topk_weights", call.topk_weights.device, x.device)
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
    _check_bias("w13_bias", call.w13_bias, (E, N), x.device)
    _check_bias("w2_bias", call.w2_bias, (E, K), x.device)
    mapped = 0
    if expert_map is not None:
        shape = _shape(expert_map)
        if len(shape) != 1 or shape[0] == 0:
            raise ValueError(f"expert_map must have shape (global E,), got {shape}")
        _check_dtype("expert_map", expert_map.dtype, _INTS)
        _check_device("expert_map", expert_map.device, x.device)
        mapped = shape[0]
    by_expert = call.activation_by_expert
    if by_expert is not None:
        if by_expert.shape[1] != E:
            raise ValueError(
                f"activation must have alpha, beta and limit as numbers or of the E={E} experts "
                f"of w13, got those of {by_expert.shape[1]}"
            )
        _check_device("activation", by_expert.device, x.device)
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
    dtype, width = _check_input(
        *("hidden_states", x, call.hidden_states_scale, call.hidden_states_global_scale),
        *(call.options, call.w13.scheme),
    )
    E, N, K, I = _check_weights(call.w13, call.w2, x, width, call.options.activation, dtype)  # noqa: E741
    blocks = static_size(x.shape[0])
    if blocks != E:
        raise ValueError(
            f"hidden_states must have shape (E, T, K) with E={E} experts as in w13, "
            f"got {blocks} blocks"
        )
    if _shape(counts) != (E,):
        raise ValueError(f"expert_num_tokens must have shape ({E},), got {_shape(counts)}")
    _check_dtype("expert_num_tokens", counts.dtype, _INTS)
    _check_device("expert_num_tokens", counts.device, x.device)
    _check_bias("w13_bias", call.w13_bias, (E, N), x.device)
    _check_bias("w2_bias", call.w2_bias, (E, K), x.device)
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
    dtype, width = _check_input("hidden_states", x, None, None, options, call.w13.scheme)
    E, N, K, I = _check_weights(call.w13, call.w2, x, width, options.activation, dtype)  # noqa: E741
    name = "num_tokens_per_expert"
    if _shape(counts) != (E,):
        raise ValueError(
            f"{name} must have shape ({E},), the rows of each expert of w13, got {_shape(counts)}"
        )
    _check_dtype(name, counts.dtype, _INTS)
    _check_device(name, counts.device, x.device)
    _check_bias("w13_bias", call.w13_bias, (E, N), x.device)
    _check_bias("w2_bias", call.w2_bias, (E, K), x.device)
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
    dtype, width = _check_input(
        *("x", x, call.x_scale, call.x_global_scale, call.options, call.weight.scheme)
    )
    E, N, K = _check_weight("weight", call.weight, x, "x", dtype)
    if width != K:
        fits = width == N and (call.bias is None or _shape(call.bias) == (E, K))
        raise ValueError(
            f"weight must have shape (E, N, {width}) for x, got {(E, N, K)}"
            f"{_transposed('weight', call.weight, fits)}"
        )
    if _shape(offsets) != (E,):
        without = "; leave the leading 0 out" if _shape(offsets) == (E + 1,) else ""
        raise ValueError(
            f"offsets must have shape ({E},), the end row of each expert, got {_shape(offsets)}"
            + without
        )
    _check_dtype("offsets", offsets.dtype, (torch.int32,))
    _check_device("offsets", offsets.device, x.device)
    _check_bias("bias", call.bias, (E, N), x.device)
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


def _check_input(
    name: str,
    x: Tensor,
    scale: Tensor | None,
    global_scale: Tensor | None,
    options: Options,
    scheme_name: str,
    may_be_fp32: bool = False,  # whether the output may be fp32 beside an input of 16 bits
) -> tuple[torch.dtype, int]:
    """(dtype of the input's values, or if it arrives quantized of the output; columns that the
    input stands for).
    """
    out_dtype = options.out_dtype
    if scale is None:
        if global_scale is not None:
            raise ValueError(
                f"{name}_global_scale must be None without {name}_scale, which says that {name} "
                "arrives quantized"
            )
        if x.dtype not in _FLOATS:
            hint = f"; if it arrives quantized, pass its scales as {name}_scale"
            raise ValueError(
                f"{name} must be a floating-point tensor, got {x.dtype}"
                + hint * (x.dtype.itemsize == 1)
            )
        wide = may_be_fp32 and out_dtype == torch.float32 and x.dtype != torch.float64
        if out_dtype not in (None, x.dtype) and not wide:
            or_fp32 = ", or torch.float32 with batch_invariant," * (x.dtype.itemsize == 2)
            raise ValueError(
                f"out_dtype must be None or {name}'s dtype {x.dtype}{or_fp32} unless {name} "
                f"arrives quantized, got {out_dtype}; convert the result with .to()"
            )
        return x.dtype, static_size(x.shape[-1])
    if options.needs_grad:
        raise ValueError(
            f"{name} must not arrive quantized ({name}_scale must be None) where gradients are "
            f"required, for none flow through it: wrap the call in torch.no_grad(), or pass "
            f"{name} unquantized"
        )
    desc = get_scheme(scheme_name).activation
    if desc is None:
        raise ValueError(
            f"{name}_scale must be None for {_scheme(scheme_name)}, whose activations are not "
            f"quantized; pass {name} in 16 or 32 bits"
        )
    if x.dtype != desc.storage_dtype:
        raise ValueError(
            f"{name} with {name}_scale must have dtype {desc.storage_dtype}, as scheme "
            f"{scheme_name} quantizes activations, got {x.dtype}"
        )
    columns = unpacked_size(static_size(x.shape[-1]), desc.format.bits)
    groups = None if desc.group.is_tensor else desc.scale_shape(1, columns)[1]
    found = tuple(scale.shape)
    if groups is None:
        fits, expected = found in ((), (1,)), "() or (1,)"
    else:
        rows = "E, T" if x.ndim == 3 else "S" if name == "x" else "M"
        expected = f"({rows}, {groups})"
        # rows that may be symbols are compared where they are known
        fits = len(found) == x.ndim and static_size(found[-1]) == groups
    if not fits:
        raise ValueError(
            f"{name}_scale must have shape {expected} for scheme {scheme_name}, got {found}"
        )
    kinds = (torch.uint8, torch.float8_e8m0fnu) if desc.is_mx else (desc.scale_dtype,)
    if scale.dtype not in kinds:
        names = " or ".join([str(kind) for kind in kinds])
        raise ValueError(
            f"{name}_scale must have dtype {names} for scheme {scheme_name}, got {scale.dtype}"
        )
    _check_device(f"{name}_scale", scale.device, x.device)
    if (global_scale is not None) != desc.global_scale:
        must = "a tensor () or (1,)" if desc.global_scale else "None"
        raise ValueError(
            f"{name}_global_scale must be {must} for scheme {scheme_name}, got "
            f"{None if global_scale is None else tuple(global_scale.shape)}"
        )
    if global_scale is not None:
        if tuple(global_scale.shape) not in ((), (1,)) or global_scale.dtype != torch.float32:
            raise ValueError(
                f"{name}_global_scale must be a float32 tensor () or (1,), got "
                f"{global_scale.dtype} of shape {tuple(global_scale.shape)}"
            )
        _check_device(f"{name}_global_scale", global_scale.device, x.device)
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    _check_float("out_dtype", out_dtype)
    return out_dtype, columns


def _scheme(name: str) -> str:
    return f"scheme {name}" if name else "plain weights"


def _check_weights(
    w13: Weight, w2: Weight, x: Tensor, width: int, activation: Activation, dtype: torch.dtype
) -> tuple[int, int, int, int]:
    """(E, N, K, I) of a pair of expert weights that fit together, the input and the activation."""
    E, N, K = _check_weight("w13", w13, x, "hidden_states", dtype)
    shape = _check_weight("w2", w2, x, "hidden_states", dtype)
    if width != K:
        swapped = (N, shape[2]) == (width, width) and shape[1] == (1 + activation.gated) * K
        of_w2 = (width, K // (1 + activation.gated))  # beside a transposed w13
        fits = width == N and shape[1:] in (of_w2, of_w2[::-1])
        remedy = "; w13 and w2 are swapped" if swapped else _transposed("w13", w13, fits)
        raise ValueError(
            f"w13 must have shape (E, N, {width}) for hidden_states (M, {width}), got "
            f"{(E, N, K)}{remedy}"
        )
    half = _other_gate((E, N, K), shape, activation)
    if activation.gated and N % 2:
        raise ValueError(
            f"w13 must have an even number of rows for {activation.name}, got {N}{half}"
        )
    I = N // 2 if activation.gated else N  # noqa: E741
    if shape != (E, K, I):
        remedy = half or _transposed("w2", w2, shape == (E, I, K))
        raise ValueError(
            f"w2 must have shape (E, K, I) = {(E, K, I)} for w13 {(E, N, K)} and the "
            f"{'gated' if activation.gated else 'not gated'} activation {activation.name}, got "
            f"{shape}{remedy}"
        )
    one, other = _layouts(w13, w2)
    if w13.scheme != w2.scheme and (one or other):
        raise ValueError(
            "w13 and w2 must have their natural layout where their schemes differ, got "
            f"{_scheme(w13.scheme)} and {_scheme(w2.scheme)} in layouts {one or 'none'} and "
            f"{other or 'none'}; moe_ops.prepare(weight, 'torch') brings each back"
        )
    if one != other:
        one, other = one or "none", other or "none"
        raise ValueError(
            f"w2 must have the layout of w13, {one}, got {other}; prepare both for one backend, "
            "or neither"
        )
    return E, N, K, I


def _transposed(name: str, weight: Weight, is_transposed: bool) -> str:
    """Remedy for a weight that is stored as (E, columns, rows), after a semicolon; else ""."""
    if not is_transposed:
        return ""
    if weight.scheme:
        return f"; it was quantized transposed: quantize {name}.dequantize().transpose(1, 2)"
    return f"; it is transposed: pass {name}.transpose(1, 2)"


def _other_gate(w13: tuple, w2: tuple, activation: Activation) -> str:
    """Remedy for w13 (E, N, K) with, or without, gate rows beside a w2 that fits an activation of
    the other kind, after a semicolon; else "".
    """
    E, N, K = w13
    if activation.gated and w2 in ((E, K, N), (E, N, K)):
        return (
            "; w13 has one projection's rows: give gate and up, torch.cat((gate, up), 1), or an "
            "activation without a gate, such as 'silu_no_mul'"
        )
    if not activation.gated and N % 2 == 0 and w2 in ((E, K, N // 2), (E, N // 2, K)):
        return "; w13 has gate and up rows: give a gated activation, such as 'silu'"
    return ""


def _layouts(w13: Weight, w2: Weight) -> tuple[str, str]:
    """The parts of two layouts that must agree: w13's without its order of rows, after a colon."""
    return base_layout(w13.layout).partition(":")[0], base_layout(w2.layout)


def _check_weight(
    name: str, weight: Weight, x: Tensor, x_name: str, dtype: torch.dtype
) -> tuple[int, int, int]:
    """The logical (E, N, K) of a weight. A plain weight must have the dtype of x's values, or if x
    arrives quantized that of the output.
    """
    data, stored = weight.data, _shape(weight.data)
    if not weight.resident:
        check_rank(name, data, "(E, N, K)")
    _check_device(name, data.device, x.device)
    if stored[0] == 0:
        raise ValueError(f"{name} must hold at least one expert, got shape {stored}")
    if not weight.scheme:
        like = f"{dtype} like {x_name if x.dtype == dtype else 'the output'}"
        if data.dtype.itemsize == 1:
            raise ValueError(
                f"{name} must have dtype {like}, got {data.dtype}; wrap it with "
                f"its scales: moe_ops.from_quantized(scheme, {name}, scale)"
            )
        if data.dtype != dtype:
            raise ValueError(
                f"{name} must have dtype {like}, got {data.dtype}; convert one of them, run under "
                "torch.autocast, or wrap quantized data with moe_ops.from_quantized"
            )
        E, N, K = stored
        return E, N, K
    scheme = get_scheme(weight.scheme)
    if weight.layout == TRANSPOSED or weight.layout.startswith(FLAT):
        transposed = weight.layout == TRANSPOSED
        raise ValueError(
            f"{name} must have its natural layout, got a "
            + (f"transposed view of {stored}; transpose it back" if transposed else "flat view")
        )
    E, N, K = scheme.logical_shape(*stored)
    N, K = sizes_of_layout(weight.layout) or (N, K)
    _check_scales(name, weight, scheme, (E, N, K), x.device)
    return E, N, K


def _check_scales(
    name: str, weight: Weight, scheme: QuantScheme, shape: tuple, device: torch.device
) -> None:
    """Raise unless a quantized weight has the scales of its scheme, in their shapes and on the
    device.
    """
    num_experts, n, k = shape
    shapes = scheme.scale_shapes(
        *(num_experts, n, k, weight.layout), global_rows=weight.global_rows
    )
    for what, expected in shapes.items():
        given = getattr(weight, what)
        if given is not None:
            _check_device(f"{name}'s {what}", given.device, device)
        got = None if given is None else _shape(given)
        known = weight.layout in ("", TRITON_E2M1)  # how scales lie in others, backends know
        if got != expected and (known or (got is None) != (expected is None)):
            raise ValueError(
                f"{name}'s {what} must have shape {expected} for scheme {weight.scheme}, got {got}"
            )
    act = scheme.activation
    static = act is not None and act.static
    given = weight.activation_scale is not None
    if static != given and not (given and act is not None and act.global_scale):
        must, found = ("an", "None") if static else ("no", "one")
        raise ValueError(
            f"{name} must have {must} activation_scale for scheme {weight.scheme}, got {found}; "
            "moe_ops.quantize and moe_ops.from_quantized make weights that fit their scheme"
        )
    if weight.activation_scale is not None:
        _check_device(f"{name}'s activation_scale", weight.activation_scale.device, device)
        got = _shape(weight.activation_scale)
        if got not in ((), (1,), (num_experts,)):
            raise ValueError(
                f"{name}'s activation_scale must have shape () or ({num_experts},), got {got}"
            )


def _check_bias(name: str, bias: Tensor | None, shape: tuple, device: torch.device) -> None:
    if bias is None:
        return
    if _shape(bias) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {_shape(bias)}")
    _check_float(name, bias.dtype)
    _check_device(name, bias.device, device)


def _check_float(name: str, dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        raise ValueError(f"{name} must be a floating-point tensor, got {dtype}")


def _check_dtype(name: str, dtype: torch.dtype, expected: tuple) -> None:
    if dtype not in expected:
        names = " or ".join([str(d).removeprefix("torch.") for d in expected])
        raise ValueError(f"{name} must be {names}, got {dtype}; convert it with .to()")


def _check_device(name: str, device: torch.device, expected: torch.device) -> None:
    if device != expected:
        raise ValueError(f"{name} must be on {expected}, got {device}; move it with .to()")
