"""record_routing(), replay_routing(): the experts that routers choose in one forward pass, kept,
and taken in another, whose router weights are computed anew.

A rollout and a training step that compute in slightly different ways choose other experts for some
tokens, which changes their log-probabilities more than all rounding does. Replayed, both use the
same.

Dimensions: M tokens of a call, E experts, top_k experts per token.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_or_false

from moe_ops.checks import check_size, check_tensor
from moe_ops.integrations.transformers import padding
from moe_ops.integrations.transformers.families import HfModule, Router
from moe_ops.integrations.transformers.forwards import own_name
from moe_ops.integrations.transformers.routers import (
    check_router,
    find_routers,
    linear_of,
    routed,
    rule_of,
    top_k_of,
)
from moe_ops.tensors.sharding import is_sharded


class RoutingRecord:
    """The experts that the routers of a model chose while `record_routing` was active.

    Attributes:
        names: module names of the routers, in the order in which `ids` lists them.
        max_tokens: tokens of each router for which there is room.
    """

    def __init__(
        self, names: tuple[str, ...], max_tokens: int, slots: list[tuple[Tensor, Tensor, Tensor]]
    ):
        self.names, self.max_tokens = names, max_tokens
        # of each router: ids (max_tokens + 1, top_k), how many were written, and for each whether
        # a call began with it
        self._slots = slots

    def clear(self) -> None:
        """Begin again. Enqueued on the device; nothing is read."""
        for _, count, begins in self._slots:
            count.zero_()
            begins.zero_()

    def ids(self) -> list[Tensor]:
        """A copy of the chosen experts of each router, (tokens, top_k) int32, call after call.
        Reads the number of tokens on the host: not for CUDA graphs.

        Raises:
            ValueError: more than max_tokens were routed.
        """
        return [ids[: self._written(count)].clone() for ids, count, _ in self._slots]

    def sequences(self, batch_size: int, prompt_tokens: int) -> list[Tensor]:
        """`ids` of a generation, by sequence: (batch_size * tokens, top_k) of each router, in the
        order in which one forward pass over the whole sequences (batch_size, tokens) has them.
        Not for beam search, which moves sequences between calls.

        Args:
            batch_size: sequences that were generated together: prompts times
                num_return_sequences.
            prompt_tokens: tokens of each that the first call routed; each later call routed one.

        Raises:
            ValueError: more than max_tokens were routed, or the calls routed other numbers of
                tokens.
        """
        check_size("batch_size", batch_size)
        check_size("prompt_tokens", prompt_tokens)
        found, first = [], batch_size * prompt_tokens
        for ids, (_, _, begins) in zip(self.ids(), self._slots, strict=True):
            starts = begins[: ids.shape[0]].nonzero()[:, 0].tolist()
            if starts != [0, *range(first, ids.shape[0], batch_size)] or ids.shape[0] < first:
                ends = [*starts[1:], ids.shape[0]]
                calls = [end - start for start, end in zip(starts, ends, strict=False)]
                more = ", .." if len(calls) > 4 else ""
                raise ValueError(
                    "batch_size and prompt_tokens must be those of the calls, whose first routes "
                    f"{batch_size} * {prompt_tokens} tokens and each later one {batch_size}, got "
                    f"calls of {', '.join(map(str, calls[:4])) or 'no'}{more} tokens"
                )
            prompt = ids[:first].unflatten(0, (batch_size, prompt_tokens))
            steps = ids[first:].unflatten(0, (-1, batch_size)).transpose(0, 1)
            found.append(torch.cat((prompt, steps), 1).flatten(0, 1))
        return found

    def _written(self, count: Tensor) -> int:
        written = int(count)
        if written > self.max_tokens:
            raise ValueError(
                f"max_tokens must be at least {written}, the tokens that were routed, got "
                f"{self.max_tokens}"
            )
        return written


@contextmanager
def record_routing(model: nn.Module, max_tokens: int) -> Iterator[RoutingRecord]:
    """Record which experts the routers of a model choose, inside of a `with` block.

    The ids are written to memory on the device that is allocated here, after those of the calls
    before, and nothing is read on the host: so the calls may be compiled, and captured in CUDA
    graphs, whose replays record, too, as long as the block lasts: each block is other memory, and
    compiles code anew. So keep one, and `record.clear()` between rollouts. Runs of checkpoints in
    a backward pass are not recorded again. Routers behave as before, and do so again after the
    block. Of a replay what runs is recorded by a block inside of that of `replay_routing`. Calls
    of all threads are recorded. Rows with which continuous batching pads its batches are left out.

    Args:
        model: a transformers model, or any module that contains routers.
        max_tokens: tokens of all calls together for which there is room.

    Yields:
        The record; `record.ids()` may be read inside of the block and after it.

    Raises:
        ValueError: model is no module or has no routers that return ids, max_tokens is no integer
            or below 1, or another thread is in such a block, or in one of `replay_routing`.
    """
    check_size("max_tokens", max_tokens)
    routers = _routers(model)
    slots = []
    for _, module, router in routers:
        device, top_k = _device_of(module, linear_of(router, module)), top_k_of(router, module)
        ids = torch.full((max_tokens + 1, top_k), -1, dtype=torch.int32, device=device)
        count = torch.zeros((), dtype=torch.int64, device=device)
        begins = torch.zeros(max_tokens + 1, dtype=torch.bool, device=device)
        slots.append((ids, count, begins))
    names = tuple([name for name, _, _ in routers])
    modules = [module for _, module, _ in routers]
    arguments = [(module, *slot) for module, slot in zip(modules, slots, strict=True)]
    with _replaced(modules, _record, arguments):
        yield RoutingRecord(names, max_tokens, slots)


@contextmanager
def replay_routing(model: nn.Module, ids: Sequence[Tensor]) -> Iterator[None]:
    """Let the routers of a model take recorded experts, inside of a `with` block.

    Logits and weights are computed as before, with gradients; the choice alone is replaced. Each
    call of a router inside takes the same ids, which must be those of its tokens: one block is one
    forward pass. Where activations are checkpointed, the backward pass calls routers again, and
    belongs inside. Compiled code is compiled anew in each block, up to torch's limit; to replay
    other routings in it, copy their ids into the same tensors, inside of one block. Calls of all
    threads take the ids.

    Args:
        model: the model whose routing was recorded, or one of the same routers.
        ids: for each router in the order of `RoutingRecord.names` the experts of all tokens,
            (M, top_k) int32 or int64, on the router's device. Ids outside 0..E-1 get weight 0 and
            become -1, which the experts of moe_ops leave out.

    Raises:
        ValueError: model is no module or has no routers, or one whose formula is none of
            `moe_ops.route`, whose weights could not be computed anew; as many tensors as it has
            routers are not given; another thread is in such a block, or in one of
            `record_routing`; or, when a router is called, ids of another number of tokens, and as
            `moe_ops.route` for `topk_ids`.
    """
    routers = _routers(model)
    refused = [
        f"{name} ({type(module).__name__}): {reason}"
        for name, module, router in routers
        if (reason := check_router(module, router, sharded=True)[0])
    ]
    if refused:
        raise ValueError(
            "model must contain no routers but those that moe_ops.route computes, got\n"
            + "\n".join(refused)
        )
    if not isinstance(ids, Sequence) or len(ids) != len(routers):
        count = len(ids) if isinstance(ids, Sequence) else f"a {type(ids).__name__}"
        raise ValueError(
            f"ids must be one tensor for each of the {len(routers)} routers, got {count}"
        )
    for of_router in ids:
        check_tensor("ids", of_router)
    arguments = [
        (router, module, of_router)
        for (_, module, router), of_router in zip(routers, ids, strict=True)
    ]
    with _replaced([module for _, module, _ in routers], _replay, arguments):
        yield


def _routers(model: nn.Module) -> list[tuple[str, HfModule, Router]]:
    """The routers of a model.

    Raises:
        ValueError: it has none, or one of no formula of moe_ops, which may return no ids.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = find_routers(model)
    unknown = [
        f"{name} ({type(module).__name__}): {check_router(module, router)[0]}"
        for name, module, router in found
        if router is None
    ]
    if unknown or not found:
        raise ValueError(
            "model must contain routers that moe_ops knows, got "
            + ("none" if not found else "\n" + "\n".join(unknown))
        )
    return [(name, module, router) for name, module, router in found if router is not None]


def _device_of(module: HfModule, linear: HfModule) -> torch.device:
    """Where a router computes: accelerate keeps offloaded weights elsewhere."""
    if not linear.weight.is_meta:
        return linear.weight.device
    hooks = [getattr(m, "_hf_hook", None) for m in (linear, module)]
    hooks += [inner for hook in hooks for inner in getattr(hook, "hooks", ())]
    found = [getattr(hook, "execution_device", None) for hook in hooks]
    device = next((d for d in found if d is not None), None)
    if device is None:
        raise ValueError(
            f"the weight of {type(module).__name__} must be loaded, got the meta device"
        )
    return torch.device(device)


def _record(
    own: Callable,
    module: HfModule,
    ids: Tensor,
    count: Tensor,
    begins: Tensor,
    *args: Any,
    **options: Any,
) -> Any:
    """A router's own forward, which appends the experts that it chooses to the record."""
    out = own(*args, **options)
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        return out  # a backward pass, in which a checkpoint calls it again
    chosen = next(t for t in out if not t.is_floating_point()).reshape(-1, ids.shape[1])
    M = chosen.shape[0]
    rows, tokens = count + torch.arange(M, device=ids.device), M
    # the last row takes what there is no room for
    most = ids.shape[0] - 1
    forward = padding.forward_of(module, M)
    if forward is not None:  # and padding
        rows, tokens = torch.where(forward.tokens[:, 0], rows, most), forward.total
    ids.index_copy_(0, rows.clamp(max=most), chosen.to(torch.int32))
    begins.index_fill_(0, count.clamp(max=most).view(1), True)
    count.add_(tokens)
    return out


def _replay(
    own: Callable,
    router: Router,
    module: HfModule,
    ids: Tensor,
    hidden_states: Tensor,
    *more: Any,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The router's output for recorded experts."""
    rule = rule_of(router, module, hidden_states, *more, *named.values())
    if rule is None:
        raise ValueError(
            f"{type(module).__name__} computes a formula for {hidden_states.dtype} that is none "
            "of moe_ops.route, so that its weights cannot be computed anew"
        )
    M = hidden_states.shape[:-1].numel()
    if ids.ndim == 2 and guard_or_false(ids.shape[0] != M):
        raise ValueError(
            f"ids of {type(module).__name__} must have a row for each of the {M} tokens of this "
            f"call, got {ids.shape[0]}: a block of replay_routing is one forward pass of the "
            "tokens that were recorded"
        )
    linear = linear_of(router, module)
    if is_sharded(linear.weight):
        raise ValueError(
            f"the weight of {type(module).__name__} must be whole when it is called, got a "
            "DTensor; replay_routing takes models that FSDP2 shards, and gathers for a forward"
        )
    return routed(router, rule, module, linear, hidden_states, ids)


_entering = threading.Lock()


@contextmanager
def _replaced(
    modules: Sequence[HfModule], function: Callable, arguments: Sequence[tuple]
) -> Iterator[None]:
    """Until the end of the block, modules have another forward: the function, of their own one and
    of these arguments, before those of the call.

    Raises:
        ValueError: another thread is in a block: what its end brings back would stay for good.
    """
    with _entering:
        before: list[Any] = [vars(module).get(own_name(module)) for module in modules]
        for module, own in zip(modules, before, strict=True):
            if getattr(own, "thread", threading.get_ident()) != threading.get_ident():
                raise ValueError(
                    "model must be in no block of record_routing or replay_routing of another "
                    f"thread, got one around {type(module).__name__}; let threads take turns, or "
                    "give each a copy of the model"
                )
        for module, own, more in zip(modules, before, arguments, strict=True):
            if own is None:
                own = functools.partial(type(module).forward, module)
            forward: Any = functools.partial(function, own, *more)
            forward.thread = threading.get_ident()
            setattr(module, own_name(module), forward)
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            if own is None:
                delattr(module, own_name(module))
            else:
                setattr(module, own_name(module), own)
