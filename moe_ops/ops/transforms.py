"""Transforms for which operators have no rule: those of torch.func, and forward-mode AD. An
operator refuses tensors that a transform differentiates or batches, and runs on all others.

The check is a kernel of the dispatcher, so that no caller of an operator can lose a derivative:
neither eager code, nor graphs of torch.compile with a transform inside, nor captured programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from moe_ops.environment import constant

# of the dispatcher: what runs an operator inside of a transform, before all other kernels
KEY = "FuncTorchDynamicLayerFrontMode"


_NO_TANGENTS = "moe_ops has no forward-mode derivative (torch.func.jvp, jacfwd, dual tensors)"


def refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    """Raise RuntimeError if a tensor has a tangent, which an operator would drop."""
    if torch.compiler.is_dynamo_compiling():
        _refuse_compiled_duals()
    for t in tensors:
        if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None:
            raise RuntimeError(f"{_NO_TANGENTS}: use reverse mode, torch.autograd.grad")


@constant
def _refuse_compiled_duals() -> None:
    """Raise RuntimeError where Dynamo traces in a dual level that was entered outside: its tensors
    show no tangents, and what Inductor computes before an operator has none.
    """
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if not any([transform.key().name == "Jvp" for transform in stack]):
        raise RuntimeError(
            f"{_NO_TANGENTS}, and compiled functions may drop those of others: inside of a dual "
            "level call it uncompiled"
        )


def refuse_linearize() -> None:
    """Raise RuntimeError where torch.func.linearize traces a call without tangents. It takes the
    outputs of void operators for constants, and reads them before these have run.
    """
    if forward_ad._current_level < 0:
        return
    tracing = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    if tracing and innermost() != "Jvp":  # linearize enters a dual level, and no transform
        raise RuntimeError(
            "moe_ops cannot be called inside of torch.func.linearize, which reads results before "
            "they are computed: call it outside of the function that is linearized"
        )


def active() -> bool:
    """Whether a transform is active, under which operators may refuse calls."""
    return forward_ad._current_level >= 0 or bool(innermost())


@constant
def innermost() -> str:
    """The innermost active transform: "Grad", "Jvp", "Vmap" or "Functionalize"; "" without one.
    Dynamo enters those that it traces.
    """
    transform = torch._C._functorch.peek_interpreter_stack()
    return "" if transform is None else transform.key().name


def refuse(transform: str) -> None:
    """Raise RuntimeError with the alternative to a transform: "Grad", "Vmap", ..."""
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


def under_transforms(op: Callable, differentiable: bool, one_by_one: bool) -> Callable:
    """The kernel of an operator inside of a transform. It refuses tensors that the innermost
    transform differentiates or batches; without any it runs the operator one level below.

    Args:
        differentiable: autograd has a derivative of the operator. Callers choose such an operator
            by requires_grad, which transforms hide for the levels below.
        one_by_one: run the operator once for each entry of a batch instead of refusing it.
    """

    def run(*values: Any) -> Any:
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        transform = retrieve_current_functorch_interpreter()
        level, name = transform.level(), transform.key().name
        tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
        tensors = [t for t in tensors if _level(t) == level]
        if name == "Jvp":
            refuse_tangents(tensors)
        elif name == "Grad":
            if torch.is_grad_enabled() and _require_grad(tensors):
                refuse(name)
        elif tensors and name == "Vmap" and one_by_one:
            return _one_by_one(op, values, transform)
        elif tensors or name == "Functionalize":
            refuse(name)

        def below(t: Tensor) -> Tensor:
            return torch._C._functorch._unwrap_for_grad(t, level)

        with transform.lower():
            values = pytree.tree_map_only(Tensor, below, values)
            if not differentiable and torch.is_grad_enabled() and _require_grad(values):
                raise RuntimeError(
                    "moe_ops cannot record gradients inside of a torch.func transform (grad, jvp, "
                    "...) for tensors that require them outside of it: call it outside of the "
                    "function that is transformed, or detach its inputs"
                )
            return op(*values)

    return torch._disable_dynamo(run)  # levels must not change where it would trace a frame


def _require_grad(values: Any) -> bool:
    return any([isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(values)])


def _level(t: Tensor) -> int | None:
    """Level of the transform that wraps a tensor."""
    return torch._C._functorch.maybe_get_level(t)


def _one_by_one(op: Callable, values: tuple, transform: Any) -> Any:
    level = transform.level()
    if transform.batch_size() == 0:
        raise RuntimeError(f"{op} cannot run under torch.func.vmap over a batch of 0 entries")

    def entry(i: int, t: Tensor) -> Tensor:
        if _level(t) != level:
            return t
        dim = torch._C._functorch.maybe_get_bdim(t)
        return torch._C._functorch.get_unwrapped(t).select(dim, i)

    found = []
    with transform.lower():
        for i in range(transform.batch_size()):
            one = pytree.tree_map_only(Tensor, functools.partial(entry, i), values)
            found.append(op(*one))
        together = pytree.tree_map(lambda *ts: torch.stack(ts), *found)
    return pytree.tree_map(lambda t: torch._C._functorch._add_batch_dim(t, 0, level), together)
