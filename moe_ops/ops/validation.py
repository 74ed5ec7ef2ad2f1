"""What no backend may assume: ranks, shapes, dtypes and devices of every argument, checked once per call
signature. Sizes that depend on the number of tokens are left to experts.py, which compares them without
guarding on a symbolic size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moe_ops.activations import Activation
from moe_ops.meta.scales import TRANSPOSED, TRITON_E2M1
from moe_ops.ops.call import Meta, Rows, WeightFacts, blocks, meta, rows
from moe_ops.ops.problem import Problem
from moe_ops.schemes import QuantScheme, get_scheme

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


_INTS = (torch.int32, torch.int64)


class ExpertsCall(NamedTuple):
    """The signature of a `fused_experts` call."""

    hidden_states: Rows
    w13: WeightFacts
    w2: WeightFacts
    topk_weights: Rows
    topk_ids: Rows
    activation: Activation
    w13_bias: Meta | None
    w2_bias: Meta | None
    expert_map: Meta | None
    router_weight_on_input: bool
    deterministic: bool
    needs_grad: bool

    @property
    def device(self) -> torch.device:
        """Where the call runs."""
        return self.hidden_states.device

    def problem(self) -> Problem:
        """Validate and state the problem. Raises ValueError naming the argument and the remedy."""
        x = self.hidden_states
        _check_float("hidden_states", x.dtype)
        E, N, K, I = _check_weights(self.w13, self.w2, x, self.activation)
        top_k = self.topk_ids.width
        _check_dtype("topk_ids", self.topk_ids.dtype, _INTS)
        _check_float("topk_weights", self.topk_weights.dtype)
        _check_device("topk_ids", self.topk_ids.device, x.device)
        _check_device("topk_weights", self.topk_weights.device, x.device)
        if self.topk_weights.width != top_k:
            raise ValueError(
                f"topk_weights must have shape (M, {top_k}) like topk_ids, "
                f"got (M, {self.topk_weights.width})"
            )
        if top_k == 0:
            raise ValueError("topk_ids must have shape (M, top_k) with top_k >= 1, got (M, 0)")
        if self.router_weight_on_input and top_k != 1:
            raise ValueError(
                f"router_weight_on_input must be False unless top_k is 1, got top_k {top_k}: "
                "an input shared by several experts cannot carry their different weights"
            )
        _check_bias("w13_bias", self.w13_bias, (E, N), x.device)
        _check_bias("w2_bias", self.w2_bias, (E, K), x.device)
        if self.expert_map is not None:
            if len(self.expert_map.shape) != 1 or self.expert_map.shape[0] == 0:
                raise ValueError(
                    f"expert_map must have shape (global E,), got {self.expert_map.shape}"
                )
            _check_dtype("expert_map", self.expert_map.dtype, _INTS)
            _check_device("expert_map", self.expert_map.device, x.device)
        return Problem(
            kind="experts",
            num_experts=E,
            hidden_size=K,
            intermediate_size=I,
            num_rows=N,
            top_k=top_k,
            dtype=x.dtype,
            scheme=self.w13.scheme,
            layout=self.w13.layout,
            activation=self.activation,
            has_bias=self.w13_bias is not None or self.w2_bias is not None,
            has_expert_map=self.expert_map is not None,
            router_weight_on_input=self.router_weight_on_input,
            deterministic=self.deterministic,
            needs_grad=self.needs_grad,
            contiguous_weights=self.w13.contiguous and self.w2.contiguous,
        )


class BatchedCall(NamedTuple):
    """The signature of a `batched_experts` call."""

    num_blocks: int
    hidden_states: Rows
    w13: WeightFacts
    w2: WeightFacts
    w13_bias: Meta | None
    w2_bias: Meta | None
    expert_num_tokens: Meta
    activation: Activation
    needs_grad: bool

    @property
    def device(self) -> torch.device:
        """Where the call runs."""
        return self.hidden_states.device

    def problem(self) -> Problem:
        """Validate and state the problem."""
        x, counts = self.hidden_states, self.expert_num_tokens
        _check_float("hidden_states", x.dtype)
        E, N, K, I = _check_weights(self.w13, self.w2, x, self.activation)
        if self.num_blocks != E:
            raise ValueError(
                f"hidden_states must have shape (E, T, K) with E={E} experts as in w13, "
                f"got {self.num_blocks} blocks"
            )
        if counts.shape != (E,):
            raise ValueError(f"expert_num_tokens must have shape ({E},), got {counts.shape}")
        _check_dtype("expert_num_tokens", counts.dtype, _INTS)
        _check_device("expert_num_tokens", counts.device, x.device)
        _check_bias("w13_bias", self.w13_bias, (E, N), x.device)
        _check_bias("w2_bias", self.w2_bias, (E, K), x.device)
        if self.needs_grad:
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
            dtype=x.dtype,
            scheme=self.w13.scheme,
            layout=self.w13.layout,
            activation=self.activation,
            has_bias=self.w13_bias is not None or self.w2_bias is not None,
            contiguous_weights=self.w13.contiguous and self.w2.contiguous,
        )


class LinearCall(NamedTuple):
    """The signature of a `grouped_linear` call."""

    x: Rows
    weight: WeightFacts
    bias: Meta | None
    offsets: Meta
    needs_grad: bool

    @property
    def device(self) -> torch.device:
        """Where the call runs."""
        return self.x.device

    def problem(self) -> Problem:
        """Validate and state the problem."""
        x = self.x
        _check_float("x", x.dtype)
        E, N, K = _check_weight("weight", self.weight, x, "x")
        if x.width != K:
            raise ValueError(f"weight must have shape (E, N, {x.width}) for x, got {(E, N, K)}")
        if self.offsets.shape != (E,):
            raise ValueError(f"offsets must have shape ({E},), got {self.offsets.shape}")
        _check_dtype("offsets", self.offsets.dtype, (torch.int32,))
        _check_device("offsets", self.offsets.device, x.device)
        _check_bias("bias", self.bias, (E, N), x.device)
        return Problem(
            kind="grouped_linear",
            num_experts=E,
            hidden_size=K,
            intermediate_size=0,
            num_rows=N,
            top_k=0,
            dtype=x.dtype,
            scheme=self.weight.scheme,
            layout=self.weight.layout,
            has_bias=self.bias is not None,
            needs_grad=self.needs_grad,
            contiguous_weights=self.weight.contiguous,
        )


def _check_weights(w13: WeightFacts, w2: WeightFacts, x: Rows, activation: Activation) -> tuple:
    """(E, N, K, I) of a pair of expert weights that fit together, the input and the activation."""
    E, N, K = _check_weight("w13", w13, x, "hidden_states")
    if x.width != K:
        raise ValueError(
            f"w13 must have shape (E, N, {x.width}) for hidden_states (M, {x.width}), got {(E, N, K)}; "
            "a weight stored as (E, K, N) is passed as weight.transpose(1, 2)"
        )
    if activation.gated and N % 2:
        raise ValueError(f"w13 must have an even number of rows for {activation.name}, got {N}")
    I = N // 2 if activation.gated else N
    shape = _check_weight("w2", w2, x, "hidden_states")
    if shape != (E, K, I):
        raise ValueError(
            f"w2 must have shape (E, K, I) = {(E, K, I)} for w13 {(E, N, K)} and the "
            f"{'gated' if activation.gated else 'not gated'} activation {activation.name}, got {shape}"
        )
    for what, one, other, remedy in (
        ("scheme", w13.scheme, w2.scheme, "quantize both with one scheme, or neither"),
        ("layout", *_layouts(w13, w2), "prepare both for one backend, or neither"),
    ):
        if one != other:
            one, other = one or "none", other or "none"
            raise ValueError(f"w2 must have the {what} of w13, {one}, got {other}; {remedy}")
    return E, N, K, I


def _layouts(w13: WeightFacts, w2: WeightFacts) -> tuple[str, str]:
    """What must agree of two layouts: of w13's not the order of its rows, behind a colon."""
    return w13.layout.partition(":")[0], w2.layout


def _check_weight(name: str, weight: WeightFacts, x: Rows, x_name: str) -> tuple:
    """The logical (E, N, K) of a weight."""
    data = weight.data
    if len(data.shape) != 3:
        raise ValueError(f"{name} must have shape (E, N, K), got {data.shape}")
    _check_device(name, data.device, x.device)
    if data.shape[0] == 0:
        raise ValueError(f"{name} must hold at least one expert, got shape {data.shape}")
    if not weight.scheme:
        if data.dtype != x.dtype:
            raise ValueError(
                f"{name} must have dtype {x.dtype} like {x_name}, got {data.dtype}; convert one of "
                "them, run under torch.autocast, or wrap quantized data with moe_ops.from_quantized"
            )
        return data.shape
    scheme = get_scheme(weight.scheme)
    if weight.layout == TRANSPOSED:
        raise ValueError(
            f"{name} must have its natural layout, got a transposed view of {data.shape}"
        )
    shape = scheme.logical_shape(*data.shape)
    _check_scales(name, weight, scheme, shape, x.device)
    return shape


def _check_scales(
    name: str, weight: WeightFacts, scheme: QuantScheme, shape: tuple, device: torch.device
) -> None:
    """Raise unless a quantized weight has the scales of its scheme, of the right shapes, on the device."""
    num_experts, n, k = shape
    for what, expected in scheme.scale_shapes(num_experts, n, k, weight.layout).items():
        given = getattr(weight, what)
        if given is not None:
            _check_device(f"{name}'s {what}", given.device, device)
        got = None if given is None else given.shape
        known = weight.layout in ("", TRITON_E2M1)  # how scales lie in others, backends know
        if got != expected and (known or (got is None) != (expected is None)):
            raise ValueError(
                f"{name}'s {what} must have shape {expected} for scheme {weight.scheme}, got {got}"
            )
    act = scheme.activation
    static = act is not None and act.static
    given = weight.activation_scale is not None
    if static != given and not (given and act is not None and act.global_scale):
        must, got = ("an", "None") if static else ("no", "one")
        raise ValueError(
            f"{name} must have {must} activation_scale for scheme {weight.scheme}, got {got}; "
            "moe_ops.quantize and moe_ops.from_quantized make weights that fit their scheme"
        )
    if weight.activation_scale is not None:
        _check_device(f"{name}'s activation_scale", weight.activation_scale, device)


def _check_bias(name: str, bias: Meta | None, shape: tuple, device: torch.device) -> None:
    if bias is None:
        return
    if bias.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {bias.shape}")
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


def experts_call(inputs: Any, weights: Any, others: Any, options: Any) -> ExpertsCall:
    hidden_states, topk_weights, topk_ids = inputs
    act, router_weight_on_input, deterministic, needs_grad = options
    return ExpertsCall(
        rows("hidden_states", hidden_states, "(M, K)"),
        weights[0].facts(),
        weights[1].facts(),
        rows("topk_weights", topk_weights, "(M, top_k)"),
        rows("topk_ids", topk_ids, "(M, top_k)"),
        act,
        meta(others[0]),
        meta(others[1]),
        meta(others[2]),
        router_weight_on_input,
        deterministic,
        needs_grad,
    )


def batched_call(inputs: Any, weights: Any, others: Any, options: Any) -> BatchedCall:
    return BatchedCall(
        *blocks("hidden_states", inputs[0], "(E, T, K)"),
        *[weight.facts() for weight in weights],
        *_metas(others),
        *options,
    )


def linear_call(inputs: Any, weights: Any, others: Any, options: Any) -> LinearCall:
    return LinearCall(
        rows("x", inputs[0], "(S, K)"),
        weights[0].facts(),
        *_metas(others),
        *options,
    )


def _metas(tensors: Any) -> Any:
    return [meta(tensor) for tensor in tensors]
