"""The parts of MoELayer: router gate, experts' parameters, shared expert, placement of experts.

Dimensions as in layer.py: M tokens, H hidden size, I intermediate size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _has_any_global_hook

from moe_ops import activations
from moe_ops.activations import Activation
from moe_ops.checks import check_tensor
from moe_ops.ops.memory import refuse_lost
from moe_ops.residency import holding
from moe_ops.routing.methods import RoutingMethod
from moe_ops.routing.route import route
from moe_ops.routing.tokens import route_tokens, router_linear
from moe_ops.schemes import QuantScheme, get_scheme

_INIT_STD = 0.02


class Gate(nn.Module):
    """Router logits of tokens; may compute in a dtype of its own."""

    e_score_correction_bias: Tensor | None

    def __init__(
        self, num_experts: int, hidden_size: int, bias: bool, correction_bias: bool, factory: dict
    ) -> None:
        super().__init__()
        # None: the dtype of the linear layer's output
        self.logits_dtype: torch.dtype | None = None
        self.weight = parameter(num_experts, hidden_size, **factory)
        self.bias = nn.Parameter(torch.zeros(num_experts, **factory)) if bias else None
        correction = (
            torch.zeros(num_experts, device=factory["device"]) if correction_bias else None
        )
        self.register_buffer("e_score_correction_bias", correction)

    def extra_repr(self) -> str:
        num_experts, hidden_size = self.weight.shape
        return f"num_experts={num_experts}, hidden_size={hidden_size}"

    def forward(self, x: Tensor) -> Tensor:  # (M, H) -> (M, E)
        self._check(x)
        return router_linear(x, self.weight, self.bias, self.logits_dtype)

    def route(
        self, x: Tensor, top_k: int, method: RoutingMethod | str | Callable, **routing: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """router_logits (M, E), topk_weights and topk_ids (M, top_k) of tokens x (M, H), by
        `moe_ops.route_tokens` with its keyword arguments.

        Where hooks wait for this module to be called, or its forward is another, it is called, and
        `moe_ops.route` chooses by the logits that it returns.
        """
        routing["correction_bias"] = self.e_score_correction_bias
        if self._must_be_called():
            logits = self(x)
            return (logits, *route(logits, top_k, method, **routing))
        self._check(x)
        routing |= {"router_bias": self.bias, "logits_dtype": self.logits_dtype}
        return route_tokens(x, self.weight, top_k, method, **routing)

    def _must_be_called(self) -> bool:
        hooks = self._forward_hooks or self._forward_pre_hooks
        hooks = hooks or self._backward_hooks or self._backward_pre_hooks
        replaced = "forward" in self.__dict__ or type(self).forward is not Gate.forward
        return bool(hooks) or replaced or _has_any_global_hook()

    def _check(self, x: Tensor) -> None:
        wrong = self.logits_dtype is None and x.dtype != self.weight.dtype
        if wrong and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"hidden_states must have the layer's dtype {self.weight.dtype}, got {x.dtype}; "
                "convert one of them with .to(), or run under torch.autocast"
            )


class Experts(nn.Module):
    """The parameters of all local experts, under the names checkpoints use."""

    down_proj_bias: Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        gated: bool,
        bias: bool,
        factory: dict,
    ) -> None:
        super().__init__()
        self.w13_name = "gate_up_proj" if gated else "up_proj"
        rows = 2 * width if gated else width
        w13_bias = down_proj_bias = None
        if bias:
            w13_bias = nn.Parameter(torch.zeros(num_experts, rows, **factory))
            down_proj_bias = nn.Parameter(torch.zeros(num_experts, hidden_size, **factory))
        w13 = parameter(num_experts, rows, hidden_size, **factory)
        self.register_parameter(self.w13_name, w13)
        self.down_proj = parameter(num_experts, hidden_size, width, **factory)
        self.register_parameter(f"{self.w13_name}_bias", w13_bias)
        self.register_parameter("down_proj_bias", down_proj_bias)

    @property
    def w13(self) -> Tensor:  # (E_local, N, H)
        return getattr(self, self.w13_name)

    @property
    def w13_bias(self) -> Tensor | None:  # (E_local, N)
        return getattr(self, f"{self.w13_name}_bias")

    def arguments(self) -> tuple[Any, Any, Tensor | None, Tensor | None]:
        """w13, w2 and their biases, as calls of `fused_experts` take them."""
        resident = holding.resident_of(self)
        if resident is not None:  # which has biases, too
            return resident.w13, resident.w2, None, None
        return self.w13, self.down_proj, self.w13_bias, self.down_proj_bias

    def offload(self, slots: int, device: torch.device | str | None) -> torch.device:
        """Keep the weights and biases in host memory, as `MoELayer.offload` says; returns the
        device of the slots.
        """
        from moe_ops.residency.experts import ResidentExperts

        names = {"w13": self.w13_name, "w2": "down_proj"}
        names |= {f"{role}_bias": f"{name}_bias" for role, name in names.items()}
        names = {role: name for role, name in names.items() if getattr(self, name) is not None}
        given: Any = {role: getattr(self, name).detach() for role, name in names.items()}
        resident = ResidentExperts(**given, slots=slots, device=device)
        for role, name in names.items():
            setattr(self, name, nn.Parameter(resident.rows[role], requires_grad=False))
        holding.hold(self, resident, tuple(names.values()))
        return resident.device

    def quantize(self, scheme: str | QuantScheme, called: str = "", only: str = "") -> None:
        """Replace the weights, or one alone, by quantized ones that require no gradient; all are
        checked before the first one changes. Errors say ``called`` before a weight's name.
        """
        from moe_ops.tensors import quantize
        from moe_ops.tensors.checks import check_quantizable, checked_activation_scale

        check_here(self, "be quantized")
        scheme, names = get_scheme(scheme), (only,) if only else (self.w13_name, "down_proj")
        for name in names:
            weight = getattr(self, name)
            if name not in self._parameters:
                raise ValueError(
                    f"{called}{name} must be a parameter, got what a parametrization computes; "
                    "remove it with torch.nn.utils.parametrize.remove_parametrizations"
                )
            check_quantizable(f"{called}{name}", weight, scheme)
            checked_activation_scale(None, scheme, weight.device, weight.shape[0])
        for name in names:
            weight = quantize(getattr(self, name).detach(), scheme)
            setattr(self, name, nn.Parameter(weight, requires_grad=False))

    def extra_repr(self) -> str:
        num_experts, hidden_size, width = self.down_proj.shape
        first, second = [getattr(w, "scheme", "") or w.dtype for w in (self.w13, self.down_proj)]
        held = f"and down_proj in {second}"
        return (
            f"num_experts={num_experts}, hidden_size={hidden_size}, intermediate_size={width}, "
            f"{self.w13_name} {held if first == second else f'in {first} {held}'}"
        )


def check_here(experts: Experts, to: str) -> None:
    """Raise ValueError for experts in host memory, which cannot do what ``to`` says."""
    if holding.held_by(experts) is not None:
        raise ValueError(
            f"experts must hold their weights themselves to {to}, got weights in host memory; "
            "call offload last, on a layer that was not offloaded"
        )


class SharedExpert(nn.Module):
    """An expert that every token runs through."""

    def __init__(
        self, hidden_size: int, width: int, activation: Activation, factory: dict
    ) -> None:
        super().__init__()
        if activation.interleaved:  # here gate and up are two projections
            activation = activation.renamed("swigluoai_uninterleave")
        self.activation = activation
        linear = {"bias": False, **factory}
        self.gate_proj: nn.Linear | None = None
        if activation.gated:
            self.gate_proj = nn.Linear(hidden_size, width, **linear)
        self.up_proj = nn.Linear(hidden_size, width, **linear)
        self.down_proj = nn.Linear(width, hidden_size, **linear)

    def forward(self, x: Tensor) -> Tensor:  # (M, H) -> (M, H)
        up = self.up_proj(x)
        if self.gate_proj is not None:
            up = torch.cat((self.gate_proj(x), up), -1)
        return self.down_proj(activations.apply(up, self.activation))


def expert_map_on_host(expert_map: Tensor, num_experts: int, num_local_experts: int) -> Tensor:
    """A copy of the map on the CPU, which remains if the layer changes its device.

    Raises:
        ValueError: no tensor of shape (E,) with values, or ids that no local expert has.
    """
    check_tensor("expert_map", expert_map)
    if expert_map.shape != (num_experts,):
        shape = tuple(expert_map.shape)
        raise ValueError(f"expert_map must have shape (E={num_experts},), got {shape}")
    if expert_map.is_meta:
        raise ValueError(
            "expert_map must hold values, got a tensor on the meta device; create it with "
            "device='cpu', also for a layer on the meta device"
        )
    if expert_map.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expert_map must be int32 or int64, got {expert_map.dtype}")
    values = expert_map.detach().cpu()
    if not isinstance(values, FakeTensor):
        low, high = values.min().item(), values.max().item()
        if low < -1 or high >= num_local_experts:
            raise ValueError(
                f"expert_map must hold local ids below num_local_experts={num_local_experts}, and "
                f"-1 for experts elsewhere, got ids from {low} to {high}"
            )
    return values


def check_tokens(hidden_states: Tensor, residual: Tensor | None, hidden_size: int) -> None:
    """Raise ValueError unless a layer can run these tokens, as `MoELayer.forward` says."""
    check_tensor("hidden_states", hidden_states)
    if residual is not None:
        check_tensor("residual", residual)
    if hidden_states.dtype.itemsize == 1:
        raise ValueError(
            f"hidden_states must have 16 bits or more, got {hidden_states.dtype}: the router "
            "cannot read what arrives quantized. Call moe_ops.route_tokens(unquantized, "
            "layer.gate.weight, layer.top_k, layer.routing_method), and moe_ops.fused_experts("
            "q, layer.experts.w13, layer.experts.down_proj, topk_weights, topk_ids, "
            "hidden_states_scale=scale)"
        )
    if hidden_states.dim() < 2 or hidden_states.shape[-1] != hidden_size:
        raise ValueError(
            f"hidden_states must have shape (..., H={hidden_size}) with at least one "
            f"leading dimension, got {tuple(hidden_states.shape)}"
        )
    if residual is not None and not torch.compiler.is_compiling():
        refuse_lost("residual", residual)
        if residual.shape != hidden_states.shape:
            raise ValueError(
                f"residual must have hidden_states' shape {tuple(hidden_states.shape)}, got "
                f"{tuple(residual.shape)}; expand it"
            )


def parameter(*shape: int, **factory: Any) -> nn.Parameter:
    """Random initial weights."""
    return nn.Parameter(torch.empty(shape, **factory).normal_(std=_INIT_STD))
