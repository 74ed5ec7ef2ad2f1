"""Derivatives and batches that no operator has a rule for: those of torch.func, and tangents of
forward-mode AD. An operator refuses tensors that have them, and runs on all others.

The dispatcher asks, so that nothing which calls operators can lose a derivative: eager code,
graphs of torch.compile with a transform inside, programs that were captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

# of the dispatcher: what runs an operator inside of a transform, before all other kernels
KEY = "FuncTorchDynamicLayerFrontMode"


def refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    """Raise RuntimeError where a tensor has a tangent, which an operator would drop."""
    for t in tensors:
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:
            raise RuntimeError(
                "moe_ops has no forward-mode derivative (torch.func.jvp, jacfwd, dual tensors): "
                "use reverse mode, torch.autograd.grad"
            )


def refuse_linearize() -> None:
    """Raise RuntimeError where torch.func.linearize traces a call without tangents. It takes the
    outputs of void operators for constants, and reads them before these have run.
    """
    tracing = torch._C._TorchDispatchModeKey.PROXY
    if forward_ad._current_level >= 0 and torch._C._get_dispatch_mode(tracing) is not None:
        raise RuntimeError(
            "moe_ops cannot be called inside of torch.func.linearize, which reads results before "
            "they are computed: call it outside of the function that is linearized"
        )


def refuse(transform: str) -> None:
    """Raise RuntimeError, which says what to do in place of a transform: "Grad", "Vmap", ..."""
    if transform == "Vmap":
        raise RuntimeError(
            "moe_ops cannot be batched by torch.func.vmap: call it once, with the tokens of all "
            "batches as rows of hidden_states"
        )
    if transform == "Functionalize":
        raise RuntimeError(
            "moe_ops cannot be functionalized by torch.func.functionalize: use torch.export or "
            "torch.compile, which do it themselves"
        )
    raise RuntimeError(
        "moe_ops cannot be differentiated by torch.func (grad, vjp, jacrev, ...): use "
        "torch.autograd.grad or Tensor.backward"
    )


def refusing(op: Callable) -> Callable:
    """What runs an operator inside of a transform: it refuses tensors that the innermost one
    differentiates or batches. Where there are none it runs the operator one level below.
    """

    def run(*values: Any) -> Any:
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        transform = retrieve_current_functorch_interpreter()
        level, name = transform.level(), transform.key().name

        def is_of_level(t: Tensor) -> bool:
            return torch._C._functorch.maybe_get_level(t) == level

        def below(t: Tensor) -> Tensor:
            return torch._C._functorch._unwrap_for_grad(t, level)

        tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
        tensors = [t for t in tensors if is_of_level(t)]
        if name == "Jvp":
            refuse_tangents(tensors)
        elif name != "Grad":
            if tensors or name == "Functionalize":
                refuse(name)
        elif torch.is_grad_enabled() and any([t.requires_grad for t in tensors]):
            refuse(name)
        with transform.lower():
            return op(*pytree.tree_map_only(Tensor, below, values))

    return torch._disable_dynamo(run)  # levels must not change where it would trace a frame
