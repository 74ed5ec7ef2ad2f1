"""route_tokens(): hidden states and router weight -> (router_logits, topk_weights, topk_ids).

Dimensions: M tokens, K hidden size, E experts, top_k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_ops.checks import autocasting, check_rank, check_tensor
from moe_ops.kernels.launch import Lazy
from moe_ops.meta import flops
from moe_ops.meta.router import router_workspace
from moe_ops.ops import transforms
from moe_ops.ops.library import register_function
from moe_ops.ops.memory import refuse_lost
from moe_ops.routing.methods import RoutingMethod
from moe_ops.routing.route import MAX_EXPERTS_FUSED, check_routing, route

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of the kernels


def route_tokens(
    hidden_states: Tensor,
    router_weight: Tensor,
    top_k: int,
    method: RoutingMethod | str | Callable[[Tensor, int], tuple[Tensor, Tensor]] = "renormalize",
    *,
    router_bias: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    num_expert_groups: int | None = None,
    topk_groups: int | None = None,
    correction_bias: Tensor | None = None,
    scaling_factor: float = 1.0,
    scoring: str | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The whole router: `route(linear(hidden_states, router_weight, router_bias), top_k, ...)`.

    On CUDA it is one operator. For up to 16 tokens (4 if the weight has 2**20 elements or more) it
    launches two kernels: one multiplies by the router's weight with the whole GPU, the other
    chooses by the logits, rounded like those of a linear layer. For more tokens it launches
    torch's matrix product and `route`'s kernel. If gradients are needed, under autocast, and on
    other devices, it runs the two steps above.

    Args:
        hidden_states: (M, K), bf16, fp16 or fp32, any strides; other float dtypes run in two
            steps.
        router_weight: (E, K), on the device of hidden_states.
        top_k, method, num_expert_groups, topk_groups: as for `route`.
        correction_bias, scaling_factor, scoring, generator: as for `route`.
        router_bias: (E,), added to the logits.
        logits_dtype: the dtype of the linear layer's computation and of the logits. None: that of
            hidden_states, weight and bias, which must then be one. torch.float32 is exact for bf16
            and fp16 inputs, which are not converted in memory.

    Returns:
        router_logits (M, E) in logits_dtype, topk_weights (M, top_k) fp32 and topk_ids (M, top_k)
        int32, best expert first. The returned logits, with their rounding, decide the choice.

    Raises:
        ValueError: as `route`; wrong shapes, devices or dtypes of the linear layer's tensors.
        RuntimeError: a CUDA graph is being captured and this router has not run before.
    """
    routing: dict[str, Any] = {
        "num_expert_groups": num_expert_groups,
        "topk_groups": topk_groups,
        "correction_bias": correction_bias,
        "scaling_factor": scaling_factor,
        "scoring": scoring,
        "generator": generator,
    }
    outputs = (torch.float32, torch.int32)
    found = fused_router(
        hidden_states, router_weight, router_bias, logits_dtype, top_k, method, routing, outputs
    )
    if found is not None:
        return found
    logits = router_linear(hidden_states, router_weight, router_bias, logits_dtype)
    return (logits, *route(logits, top_k, method, **routing))


def fused_router(
    hidden_states: Tensor,  # (M, K)
    router_weight: Tensor,  # (E, K)
    router_bias: Tensor | None,  # (E,)
    logits_dtype: torch.dtype | None,
    top_k: int,
    method: RoutingMethod | str | Callable,
    routing: dict[str, Any],  # keyword arguments of `route`
    outputs: tuple[torch.dtype, torch.dtype],  # of topk_weights and topk_ids
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`route_tokens` by its operator, or None for what that does not support: gradients, autocast,
    CPUs.

    Raises:
        ValueError: as `route_tokens`.
    """
    _check_linear(hidden_states, router_weight, router_bias, logits_dtype)
    dtype = logits_dtype or hidden_states.dtype
    choice = check_routing(router_weight.shape[0], hidden_states.device, top_k, method, **routing)
    if choice is None or not _is_fused(hidden_states, router_weight, router_bias, dtype):
        return None
    M, (E, K) = hidden_states.shape[0], router_weight.shape
    logits = hidden_states.new_empty((M, E), dtype=dtype)
    topk_weights = hidden_states.new_empty((M, top_k), dtype=outputs[0])
    topk_ids = hidden_states.new_empty((M, top_k), dtype=outputs[1])
    workspace = hidden_states.new_empty(router_workspace(M, E, K), dtype=torch.float32)
    _OP(
        logits,
        topk_weights,
        topk_ids,
        workspace,
        hidden_states,
        router_weight,
        router_bias,
        routing.get("correction_bias"),
        *choice.arguments,
        float(routing.get("scaling_factor", 1.0)),
    )
    return logits, topk_weights, topk_ids


def router_linear(
    hidden_states: Tensor,  # (M, K)
    router_weight: Tensor,  # (E, K)
    router_bias: Tensor | None,  # (E,)
    logits_dtype: torch.dtype | None,
) -> Tensor:
    """(M, E) router logits, computed in logits_dtype, or if None like a linear layer."""
    if not torch.compiler.is_compiling():
        refuse_lost("hidden_states", hidden_states)
        refuse_lost("router_weight", router_weight)
        if router_bias is not None:
            refuse_lost("router_bias", router_bias)
    if logits_dtype is None:
        return F.linear(hidden_states, router_weight, router_bias)
    bias = None if router_bias is None else router_bias.to(logits_dtype)
    device = hidden_states.device.type
    with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
        return F.linear(hidden_states.to(logits_dtype), router_weight.to(logits_dtype), bias)


def _is_fused(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> bool:
    tensors = (x, weight) if bias is None else (x, weight, bias)
    for tensor in tensors:
        # the kernels do not round operands before the product
        if (
            is_traceable_wrapper_subclass(tensor)
            or tensor.dtype not in _DTYPES
            or dtype not in (tensor.dtype, torch.float32)
        ):
            return False
    if not x.is_cuda or autocasting(x.device) or weight.shape[0] > MAX_EXPERTS_FUSED:
        return False
    if transforms.active():
        return False
    return not (torch.is_grad_enabled() and any([t.requires_grad for t in tensors]))


def _check_linear(
    hidden_states: Tensor,
    router_weight: Tensor,
    router_bias: Tensor | None,
    logits_dtype: torch.dtype | None,
) -> None:
    check_tensor("hidden_states", hidden_states)
    check_tensor("router_weight", router_weight)
    if hidden_states.dim() != 2:
        check_rank("hidden_states", hidden_states, "(M, K)")
    if not hidden_states.is_floating_point():
        raise ValueError(f"hidden_states must be floating point, got {hidden_states.dtype}")
    K = hidden_states.shape[1]
    if router_weight.dim() != 2 or router_weight.shape[1] != K:
        shape = tuple(router_weight.shape)
        turned = len(shape) == 2 and shape[0] == K
        remedy = "; it is transposed: pass router_weight.T" if turned else ""
        raise ValueError(f"router_weight must have shape (E, K={K}), got {shape}{remedy}")
    tensors = {"router_weight": router_weight}
    if router_bias is not None:
        check_tensor("router_bias", router_bias)
        E = router_weight.shape[0]
        if router_bias.shape != (E,):
            raise ValueError(
                f"router_bias must have shape (E={E},), got {tuple(router_bias.shape)}"
            )
        tensors["router_bias"] = router_bias
    for name, tensor in tensors.items():
        if tensor.device != hidden_states.device:
            raise ValueError(
                f"{name} must be on the device of hidden_states, {hidden_states.device}, "
                f"got {tensor.device}"
            )
        wrong = logits_dtype is None and tensor.dtype != hidden_states.dtype
        if wrong and not autocasting(hidden_states.device):
            raise ValueError(
                f"{name} must have the dtype of hidden_states, {hidden_states.dtype}, got "
                f"{tensor.dtype}; convert one of them, or give logits_dtype"
            )
    if logits_dtype is not None and not logits_dtype.is_floating_point:
        raise ValueError(f"logits_dtype must be a floating-point dtype, got {logits_dtype}")


def _fake(
    router_logits: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    workspace: Tensor,
    hidden_states: Tensor,
    router_weight: Tensor,
    router_bias: Tensor | None,
    correction_bias: Tensor | None,
    *_: Any,
) -> None:
    torch._check(hidden_states.dim() == 2, lambda: "hidden_states must have shape (M, K)")
    M, (E, K) = hidden_states.shape[0], router_weight.shape
    torch._check(hidden_states.shape[1] == K, lambda: "router_weight must have shape (E, K)")
    torch._check(router_logits.shape[1] == E, lambda: "router_logits must have E columns")
    torch._check(router_logits.shape[0] == M, lambda: "router_logits must have M rows")
    torch._check(topk_weights.shape[0] == M, lambda: "topk_weights must have M rows")
    torch._check(topk_ids.shape[0] == M, lambda: "topk_ids must have M rows")
    top_k = topk_weights.shape[1]
    torch._check(top_k == topk_ids.shape[1], lambda: "outputs must have top_k columns")
    (size,) = router_workspace(M, E, K)
    torch._check(workspace.numel() >= size, lambda: "workspace must be of router_workspace")
    torch._check(workspace.dtype == torch.float32, lambda: "workspace must be float32")
    torch._check(
        topk_ids.dtype in (torch.int32, torch.int64), lambda: "topk_ids must be int32 or int64"
    )
    for bias in (router_bias, correction_bias):
        if bias is not None:
            torch._check(bias.dim() == 1, lambda: "biases must have shape (E,)")


_OP = register_function(
    "route_tokens",
    "(Tensor(a!) router_logits, Tensor(b!) topk_weights, Tensor(c!) topk_ids, "
    "Tensor(d!) workspace, Tensor hidden_states, Tensor router_weight, Tensor? router_bias, "
    "Tensor? correction_bias, str scoring, bool renormalize, int num_expert_groups, "
    "int topk_groups, float scaling_factor) -> ()",
    Lazy("moe_ops.kernels.router.fused:route_tokens"),  # on the CPU under Triton's interpreter
    _fake,
    flops=flops.route_tokens,
)
