"""Adapters by request in continuous batching.

A batch there is one row of the tokens of all requests, in which PEFT has one adapter for all. What
transformers does hand to the model for each request are arguments of processors of logits: one
that changes none carries the adapters of requests to the device. With the lengths of the requests
they give the adapter of each token, which the wrappers of experts pass on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)

from moe_ops.integrations.transformers import adapters, padding
from moe_ops.integrations.transformers import layers as layers_of


class _Carrier(ContinuousBatchingLogitsProcessor):
    """Carries the place of each request's adapter among `names`, -1 for none."""

    supported_kwargs: dict[str, type] = {"adapter": str}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.fill_(-1)

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> Tensor:
        found = [r.state.logit_processor_kwargs.get("adapter") for r in requests_with_new_token]
        slots = [self.names.index(name) if name in self.names else -1 for name in found]
        return torch.tensor(slots, dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        return scores


def _prepare(
    own: Callable,
    carrier: _Carrier,
    row: int,
    requests_in_batch: Sequence[Any],
    arg_storage: Tensor,
) -> Tensor:
    """`prepare_tensor_args` of the processors: transformers leaves out requests whose prompt goes
    on in a later batch, but their tokens need adapters.
    """
    own(requests_in_batch, arg_storage)
    slots = carrier.prepare_tensor_args(requests_in_batch)
    arg_storage[row, : len(slots)] = slots.to(arg_storage.device)
    return arg_storage


def _check(
    own: Callable, batch: padding.Batch, mine: padding.Adapters, kwargs: dict[str, Any]
) -> None:
    own(kwargs)
    if batch.adapters is not mine:
        raise ValueError(
            "manager must be the last that its model made, got an earlier one, whose requests "
            "name no adapters any more; add requests to the last"
        )
    names, name = mine[0], kwargs.get("adapter", adapters.BASE)
    if name not in (*names, adapters.BASE):
        raise ValueError(
            f"adapter must be among {', '.join(names)} and {adapters.BASE}, got {name!r}"
        )


def _mix(
    batch: padding.Batch, wrapper: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Before a wrapper's forward: the adapters of tokens in the place of those of rows."""
    forward, names = batch.of(args[0].shape[0]), batch.adapters
    if names is None or forward is None or forward.adapter_ids is None:
        return None
    return args, kwargs | {"adapter_names": adapters.OfTokens(names[0], forward.adapter_ids)}


def adapters_by_request(manager: Any) -> tuple[str, ...]:
    """Let each request of a continuous batching manager name its adapter of the experts.

    ``manager.add_request(ids, adapter="name")`` then runs with this one of PEFT's adapters; a
    request that names none, or "__base__", without. A name that there is not fails the request,
    with the reason in its `error`. The experts take a stack of all adapters, a copy; adapters that
    are added or changed later want a new manager. Requests do not share the keys and values of
    prompts that begin alike.

    Args:
        manager: what `model.init_continuous_batching` returned, before it is warmed up or started.
            The model has PEFT's adapters on its experts' parameters alone, and is attached
            (`attach`).

    Returns:
        The names of the adapters.

    Raises:
        ValueError: the manager has begun, was given before, or was made before another of the
            same model that was given; or the model has no adapters on experts, has them on other
            modules too, for which nothing can tell a batch's requests apart, has merged or
            disabled them, or was not attached.
    """
    model, processors = manager.model, manager.logit_processor
    if any([isinstance(p, _Carrier) for p in processors.logits_processor]):
        raise ValueError(
            "manager must be given once, got one whose requests name their adapters already; "
            "add requests to it, or call init_continuous_batching for a new one"
        )
    if manager.batch_processor is not None:
        raise ValueError("manager must not be warmed up or started, got one that is")
    batch = padding.batch_in(model)
    if batch is not None and batch.manager is not None and batch.manager() is not None:
        raise ValueError(
            "manager must be the last that its model made, got an earlier one while requests of "
            "another name their adapters; stop that one and call init_continuous_batching anew"
        )
    wrappers = [w for _, w in adapters.wrappers_of(model, layers_of.find(model))]
    if not wrappers:
        raise ValueError(
            f"manager must be of a model with PEFT's adapters on its experts' parameters, got "
            f"{type(model).__name__} without; add some with LoraConfig(target_parameters=[...])"
        )
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    inside = {id(module) for wrapper in wrappers for module in wrapper.modules()}
    others = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        and id(module) not in inside
    ]
    if others:
        raise ValueError(
            "manager must be of a model with adapters on its experts alone, got some on "
            f"{others[0]}: a batch is one row of all requests, for which PEFT takes one adapter "
            "there; merge these, or run the requests of each adapter in batches of their own"
        )
    if not all([vars(wrapper).get("forward") is adapters._forward for wrapper in wrappers]):
        raise ValueError("manager must be of a model that was attached; call attach(model) first")
    if any([wrapper.merged or wrapper.disable_adapters for wrapper in wrappers]):
        raise ValueError(
            "manager must be of a model whose adapters are active, got merged or disabled ones"
        )
    names = tuple(wrappers[0].lora_A)
    for wrapper in wrappers:  # copied here, since graphs are captured later
        parameter = wrapper.get_param()
        adapters._stacked(
            wrapper, names, torch.empty(0, dtype=model.dtype, device=parameter.device)
        )
    padding.leave_out_padding(model)
    batch = padding.batch_in(model)
    assert batch is not None
    for wrapper in wrappers:
        hooks = wrapper._forward_pre_hooks.values()
        if not any([getattr(hook, "func", None) is _mix for hook in hooks]):
            wrapper.register_forward_pre_hook(functools.partial(_mix, batch), with_kwargs=True)
    carrier, row = _Carrier(names), processors.tensors_required
    processors.logits_processor.append(carrier)
    processors.tensors_required += 1
    processors._retrieve_processors_kwargs()
    processors.prepare_tensor_args = functools.partial(
        _prepare, processors.prepare_tensor_args, carrier, row
    )
    mine = batch.adapters = (names, row)
    batch.manager = weakref.ref(manager)
    processors.check_kwargs = functools.partial(_check, processors.check_kwargs, batch, mine)
    # a prompt's keys and values depend on the adapter
    manager.continuous_batching_config.allow_block_sharing = False
    manager._use_prefix_sharing = False
    return names
