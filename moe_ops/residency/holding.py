"""Modules whose experts lie in host memory. Their parameters are the host's rows, under the names
and in the shapes that they had, so that state dicts and files are those of the plain module; its
calls read the slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

_HELD = "_moe_ops_held"


class Held:
    """What a module keeps of experts in host memory.

    Attributes:
        resident: the experts.
        rows: parameters of the module, by name, that are rows of the host.
    """

    def __init__(self, module: nn.Module, resident: Any, names: Sequence[str]):
        self.resident = resident
        self.rows: dict[str, Any] = {name: getattr(module, name) for name in names}
        self.dtype = self.rows[names[0]].dtype
        self.hooks = (
            module.register_load_state_dict_pre_hook(_wait_for_calls),
            module.register_load_state_dict_post_hook(_bring_what_was_loaded),
        )

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            "a module must hold its experts itself to be copied or pickled, got experts in host "
            "memory; save its state dict, and load that into a new one"
        )

    def check(self, function: Callable[[Tensor], Tensor]) -> None:
        """Raise ValueError unless a function leaves device and dtype of the slots as they are."""
        before = torch.empty(0, dtype=self.dtype, device=self.resident.device)
        after = function(before)
        if (after.device, after.dtype) != (before.device, before.dtype):
            raise ValueError(
                f"a model with experts in host memory must stay on {before.device} in "
                f"{before.dtype}, where their slots are, got {after.device} and {after.dtype}; "
                "load it again with the other device or dtype"
            )


def held_by(module: nn.Module) -> Held | None:
    """What `hold` gave a module."""
    return getattr(module, _HELD, None)


def hold(module: nn.Module, resident: Any, names: Sequence[str]) -> None:
    """Let a module's experts be those of ``resident``, whose rows its parameters of these names
    are already, without gradients.
    """
    # neither is a submodule: the rows are the module's own parameters
    vars(module)[_HELD] = Held(module, resident, names)
    vars(module)["_apply"] = functools.partial(_apply, module)


def guard(model: nn.Module) -> None:
    """Let a module around such modules refuse another device or dtype before it has moved any."""
    if held_by(model) is None:
        vars(model)["_apply"] = functools.partial(_apply_all, model)


def release(model: nn.Module) -> None:
    """Undo `hold` and `guard` of all modules of a model: experts are parameters in host memory."""
    for module in model.modules():
        held = vars(module).pop(_HELD, None)
        if held is not None:
            for hook in held.hooks:
                hook.remove()
        function = vars(module).get("_apply")
        if getattr(function, "func", None) in (_apply, _apply_all):
            del vars(module)["_apply"]


def resident_of(module: nn.Module) -> Any:
    """The ResidentExperts of a module that is called, or None.

    Raises:
        ValueError: gradients of its experts are wanted.
    """
    held = held_by(module)
    if held is None:
        return None
    if "parametrizations" in module._modules:
        raise ValueError(
            "experts in host memory must carry no adapter, got a parametrization of their "
            "weights; adapt other parts of the model alone"
        )
    if torch.is_grad_enabled() and any([getattr(module, n).requires_grad for n in held.rows]):
        raise ValueError(
            "experts in host memory must not require gradients, got requires_grad=True; call "
            "them under torch.no_grad(), or train a model that holds its experts itself"
        )
    return held.resident


def _apply(module: Any, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """nn.Module._apply of all but the rows in host memory."""
    held = held_by(module)
    assert held is not None
    held.check(function)
    own = module._parameters
    module._parameters = {name: p for name, p in own.items() if name not in held.rows}
    try:
        return type(module)._apply(module, function, recurse)
    finally:
        module._parameters = {name: module._parameters.get(name, p) for name, p in own.items()}


def _apply_all(model: Any, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    for module in model.modules():
        held = held_by(module)
        if held is not None:
            held.check(function)
    return type(model)._apply(model, function, recurse)


def _wait_for_calls(module: nn.Module, *given: object) -> None:
    """Before load_state_dict writes to rows in host memory, which earlier calls may still read."""
    held = held_by(module)
    if held is not None:
        held.resident.wait()


def _bring_what_was_loaded(module: nn.Module, incompatible_keys: object) -> None:
    """After load_state_dict wrote to rows in host memory, where slots have what was there before,
    or with assign=True put other parameters in their place, which are copied to them.
    """
    held = held_by(module)
    if held is None:
        return
    own, others = module._parameters, {}
    for name, rows in held.rows.items():
        if own.get(name, rows) is not rows:
            others[name], own[name] = own[name], rows
    try:
        with torch.no_grad():
            for name, other in others.items():
                held.rows[name].copy_(other)
    finally:
        held.resident.forget()
