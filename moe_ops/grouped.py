"""grouped_experts: an expert layer on rows that a dispatcher has sorted by expert.

Dimensions: R rows, E local experts, K hidden size, I intermediate size, N rows of w13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_ops import activations, checks
from moe_ops.activations import Activation
from moe_ops.autograd import adapters as low_rank
from moe_ops.autograd import grouped, grouped_pair
from moe_ops.autograd.adapters import UNADAPTED, LoRA
from moe_ops.autograd.gate_up import gate_up
from moe_ops.batch_invariance import resolve
from moe_ops.ops.call import GroupedCall, LinearCall, Weight, refuse_lost, take_apart
from moe_ops.ops.operands import check_bias, check_device, shape_of
from moe_ops.ops.options import Options
from moe_ops.ops.resident import TensorFacts
from moe_ops.ops.transforms import refuse_tangents
from moe_ops.ops.validation import grouped_problem
from moe_ops.planning import bind

# the order of rows that take turns, by the name of the activation of gate rows before up rows
_IN_TURN = {"silu": "swigluoai", "swigluoai_uninterleave": "swigluoai"}


def grouped_experts(
    hidden_states: Tensor,  # (R, K)
    w13: Tensor | tuple[Tensor, Tensor],  # (E, N, K)
    w2: Tensor,  # (E, K, I)
    num_tokens_per_expert: Tensor,  # (E,)
    *,
    activation: str | Activation = "silu",
    w13_bias: Tensor | None = None,  # (E, N)
    w2_bias: Tensor | None = None,  # (E, K)
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    recompute: bool = False,
    adapters: LoRA | Sequence[LoRA] | None = None,
    batch_invariant: bool | None = None,
) -> Tensor:
    """Apply experts to rows that are sorted by expert already, as dispatchers of training
    frameworks hand them over.

    It is `fused_experts` with the placement given: out[r] = w2[e] @ act(w13[e] @ hidden_states[r]
    + w13_bias[e]) + w2_bias[e], where e is the expert of row r. The first
    num_tokens_per_expert[0] rows are of expert 0, the next of expert 1, and so on. Nothing is
    sorted, copied or weighed: whoever dispatched the rows applies router weights to the result.
    Counts are read on the device alone.

    Args:
        hidden_states: (R, K), floating point. R may be 0, and symbolic while compiling.
        w13: (E, N, K), as in `fused_experts`, plain or quantized. Or gate and up rows in turn,
            (E, I, 2, K); or a pair of matrices (gate, up), each (E, I, K). A pair is read where it
            is by kernels of training on SM90 (`make native`) beside a plain w2, without biases and
            adapters; else it is copied into one tensor. So are rows in turn unless their
            activation has an order of its own for them ("silu", "swigluoai"). Where `dtype` casts
            them, that is the same copy.
        w2: (E, K, I), like w13. Local shards of a DTensor: pass to_local().
        num_tokens_per_expert: (E,), int32 or int64, on hidden_states' device. Rows past their sum
            may hold anything: their outputs and gradients are zero. Counts are data: a negative
            one means zero, and those that sum to more than R end at the last row.
        activation: a name or an `Activation` whose parameters are numbers; of w13 with rows in
            turn the one whose name is for gate rows before up rows.
        w13_bias: (E, N), in the order of w13's rows: (E, I, 2) for rows in turn, a pair of (E, I)
            for a pair.
        w2_bias: (E, K).
        dtype: dtype of the products. hidden_states, plain weights and biases are cast to it, such
            as fp32 master weights to torch.bfloat16; the result has hidden_states' own dtype, and
            gradients the dtypes of what they are of. None: hidden_states' dtype, which weights
            must have, too.
        backend: without gradients and adapters, the backend of the two `grouped_linear` that run.
            With them "auto" or "torch".
        recompute: as in `fused_experts`.
        adapters: one `LoRA` or several, as in `fused_experts`.
        batch_invariant: as in `fused_experts`, without gradients and adapters only.

    Returns:
        (R, K) in hidden_states' dtype. Gradients flow to the inputs that require them. Under
        torch.autocast its dtype is taken for `dtype`, and is that of the result.

    Raises:
        ValueError: an argument has a wrong rank, shape, dtype, device or layout; the named backend
            cannot run the call; batch_invariant with gradients or adapters.
        ImportError: the library of the named backend is not installed.
        RuntimeError: a CUDA graph is captured before the call has run once.
    """
    for name, value in (("hidden_states", hidden_states), ("w2", w2)):
        checks.check_tensor(name, value)
    checks.check_tensor("num_tokens_per_expert", num_tokens_per_expert)
    if w2_bias is not None:
        checks.check_tensor("w2_bias", w2_bias)
    act, result = activations.resolve_numbers(activation), hidden_states.dtype
    if checks.autocasting(hidden_states.device) and result.itemsize < 8:
        dtype = result = torch.get_autocast_dtype(hidden_states.device.type)
    if dtype is not None:
        _check_float("dtype", dtype)
        hidden_states, w2, w2_bias = [_cast(t, dtype) for t in (hidden_states, w2, w2_bias)]
    if isinstance(adapters, (list, tuple)) and not adapters and not isinstance(adapters, LoRA):
        adapters = None
    pair: tuple[Tensor, Tensor] | None = None
    if isinstance(w13, (tuple, list)):
        pair, w13_bias = _gate_and_up(w13, w13_bias, act)
        recorded = any([t.requires_grad for t in (hidden_states, *pair, w2)])
        as_they_are = torch.is_grad_enabled() and recorded and dtype in (None, pair[0].dtype)
        plain = w13_bias is None and w2_bias is None and getattr(w2, "scheme", None) is None
        if not (as_they_are and plain) or adapters is not None:
            w13, pair = gate_up(*pair, dtype or pair[0].dtype), None
    if pair is None:
        w13, w13_bias, act = _rows_of_w13(w13, w13_bias, act, dtype)
    a, b = Weight(_of_both(pair[0])) if pair else take_apart(w13), take_apart(w2)
    inputs = (hidden_states, *(pair or (a.data,)), b.data, w13_bias, w2_bias)
    matrices = [] if adapters is None else low_rank.check_call(adapters, backend, None)
    if forward_ad._current_level >= 0:
        refuse_tangents((*inputs, *matrices))
    needs_grad = torch.is_grad_enabled() and any(
        [t is not None and t.requires_grad for t in (*inputs, *matrices)]
    )
    options = Options(
        act, needs_grad=needs_grad, recompute=recompute, batch_invariant=resolve(batch_invariant)
    )
    call = GroupedCall(hidden_states, a, b, num_tokens_per_expert, w13_bias, w2_bias, options)
    problem = grouped_problem(call)
    if not torch.compiler.is_compiling():
        refuse_lost(call)
    if not needs_grad and adapters is None:
        return _inference(call, backend).to(result)
    if backend not in ("auto", "torch"):
        raise ValueError(
            f"backend must be 'auto' or 'torch' where gradients are required or adapters given, "
            f"got {backend!r}: the operators of training choose their products"
        )
    if options.batch_invariant:
        raise ValueError(
            "batch_invariant must be False where gradients are required or adapters given, got "
            "True: wrap the call in torch.no_grad(), or give fused_experts the routing"
        )
    if pair is not None:
        gate, up = pair
        call = call._replace(w13=Weight(gate))
        return grouped_pair.grouped_experts(call, up, recompute).to(result)
    joined = UNADAPTED if adapters is None else low_rank.join(adapters, problem, hidden_states)
    return grouped.grouped_experts(call, recompute, joined).to(result)


def _inference(call: GroupedCall, backend: str) -> Tensor:
    """Two grouped products, and the activation between them, by a backend's kernels."""
    x, options = call.hidden_states, call.options
    ends = grouped.end_rows(call.num_tokens_per_expert, x.shape[0])
    linear = Options(batch_invariant=options.batch_invariant)

    def multiply(rows: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return bind.run(LinearCall(rows, weight, ends, bias, linear), backend)

    hidden = activations.apply(multiply(x, call.w13, call.w13_bias), options.activation)
    return multiply(hidden, call.w2, call.w2_bias)


def _gate_and_up(
    w13: Any, bias: Any, act: Activation
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """A pair of gate and up rows, checked, and its bias (E, N)."""
    _check_order(act)
    gate, up = _pair("w13", w13)
    for name, one in (("w13[0]", gate), ("w13[1]", up)):
        checks.check_rank(name, one, "(E, I, K)")
        checks.check_local(name, one)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            "w13 must be a pair of equal shapes and dtypes (E, I, K), got "
            f"{tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        )
    check_device("w13[1]", up.device, gate.device)
    _check_master("w13[0]", gate)
    if bias is not None:
        bias = _pair("w13_bias", bias)
        for i, one in enumerate(bias):
            check_bias(f"w13_bias[{i}]", one, shape_of(gate)[:2], gate.device)
        bias = torch.cat(bias, -1)
    return (gate, up), bias


def _of_both(gate: Tensor) -> Any:
    """What stands for gate and up rows in one matrix where a call is checked."""
    E, I, K = gate.shape
    return TensorFacts((E, 2 * I, K), gate.dtype, gate.device)


def _rows_of_w13(
    w13: Any, bias: Any, act: Activation, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Activation]:
    """w13 (E, N, K) and its bias in the order that an activation reads, and that activation."""
    checks.check_tensor("w13", w13)
    if w13.ndim == 4 and getattr(w13, "scheme", None) is None:
        w13, bias, act = _rows_in_turn(w13, bias, act, dtype)
    elif dtype is not None:
        w13 = _cast(w13, dtype)
    if bias is not None:
        checks.check_tensor("w13_bias", bias)
        bias = bias if dtype is None else _cast(bias, dtype)
    return w13, bias, act


def _rows_in_turn(
    w13: Tensor, bias: Any, act: Activation, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Activation]:
    """`_rows_of_w13` of w13 (E, I, 2, K)."""
    _check_order(act)
    checks.check_local("w13", w13)
    _check_master("w13", w13)
    E, I, two, K = w13.shape
    if checks.static_size(two) != 2:
        raise ValueError(
            "w13 must have shape (E, N, K), or (E, I, 2, K) for rows in turn, got "
            f"{tuple(w13.shape)}"
        )
    if bias is not None:
        checks.check_rank("w13_bias", bias, "(E, I, 2)")
    if act.name in _IN_TURN and dtype in (None, w13.dtype):
        act = act.renamed(_IN_TURN[act.name])
        return w13.reshape(E, 2 * I, K), None if bias is None else bias.flatten(1), act
    if bias is not None:
        bias = bias.transpose(1, 2).flatten(1)
    return gate_up(w13, None, dtype or w13.dtype), bias, act


def _check_order(act: Activation) -> None:
    """Raise unless an activation is for gate rows before up rows."""
    if act.interleaved or not act.gated:
        remedy = "swigluoai_uninterleave" if act.interleaved else "silu"
        raise ValueError(
            "activation must be one of gate rows before up rows where w13 is a pair or has shape "
            f"(E, I, 2, K), got {act.name!r}; give {remedy!r}, or w13 of shape (E, N, K)"
        )


def _pair(name: str, value: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name} must be a pair (gate, up) as w13 is one, got {_named(value)}")
    for i, one in enumerate(value):
        checks.check_tensor(f"{name}[{i}]", one)
        if getattr(one, "scheme", None) is not None:
            raise ValueError(
                f"{name}[{i}] must be a plain tensor, got a quantized one; quantize "
                "torch.cat((gate, up), 1)"
            )
    return value[0], value[1]


def _check_master(name: str, weight: Tensor) -> None:
    """Raise for what a cast would take as numbers: codes whose scales are missing."""
    if not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
        raise ValueError(
            f"{name} must be of a float dtype of 16 bits or more, got {weight.dtype}; wrap "
            "quantized data (E, N, K) with its scales: moe_ops.from_quantized(scheme, w13, scale)"
        )


def _named(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values"
    return type(value).__name__


def _check_float(name: str, dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"{name} must be a float dtype of 16 bits or more, got {dtype!r}")


def _cast(t: Any, dtype: torch.dtype) -> Any:
    """A plain float tensor in a dtype; quantized weights, and None, as they are."""
    if not isinstance(t, Tensor) or getattr(t, "scheme", None) is not None:
        return t
    return t.to(dtype) if t.dtype.is_floating_point and t.dtype.itemsize > 1 else t
