"""Rows with which continuous batching pads its batches: experts leave them out.

Under CUDA graphs, or compiled, batches of transformers' continuous batching have one of few sizes.
The rows behind the tokens are routed as they are, and experts would be read for nothing. How many
tokens there are only the device knows: the last of `cu_seq_lens_q`, an argument of the model's
forward. Hooks of the model keep it for the length of a forward, and hooks of the experts replace
the ids of padding by -1, which contributes nothing. All of it is enqueued on the device, and so is
part of graphs and of compiled code.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.integrations.transformers.families import HfModule
from moe_ops.integrations.transformers.routers import find_routers
from moe_ops.integrations.transformers.warmup import runs_here

ATTRIBUTE = "_moe_ops_batch"  # of routers, whose choice may be recorded

# (names, row of `logits_processor_args` with the one of each request), see requests.py
Adapters: TypeAlias = tuple[tuple[str, ...], int]


class Forward(NamedTuple):
    """A batch that may be padded, while the model's forward of it lasts."""

    total: Tensor  # (), tokens
    tokens: Tensor  # (T, 1) bool, whether a row is one of them
    adapter_ids: Tensor | None  # (T,) int64 of the names of `Batch.adapters`, -1 for none


def _threads() -> tuple[int, ...]:
    """Whose forward it may be: this thread's, or 0, that which began in compiled code. Such code
    finds no thread: of threads that share a model that is compiled, one may run at a time.
    """
    return (0,) if torch.compiler.is_compiling() else (threading.get_ident(), 0)


class Batch:
    """What a model's layers know of the batches that its forward is given, one in each thread."""

    def __init__(self) -> None:
        self.adapters: Adapters | None = None
        self.manager: Any = None  # weak reference to that of `adapters`
        self._forwards: dict[int, Forward] = {}

    def begin(self, lengths: Tensor, rows: int, arguments: Tensor | None) -> None:
        """Keep what is known of this thread's batch until `end`.

        Args:
            lengths: (n + 1,) int32, 0 and where each request ends; the last ones may be empty.
            rows: T, of the padded batch.
            arguments: (processors, n) int32 of each request.
        """
        places = torch.arange(rows, dtype=lengths.dtype, device=lengths.device)
        total, adapters, ids = lengths[-1], self.adapters, None
        tokens = (places < total).unsqueeze(1)
        if adapters is not None and arguments is not None:
            of = torch.searchsorted(lengths[1:], places, right=True)
            of = of.clamp(max=lengths.shape[0] - 2)
            of_requests = arguments[adapters[1]]
            ids = torch.where(tokens[:, 0], of_requests[of], -1).long()
        self._forwards[_threads()[0]] = Forward(total, tokens, ids)

    def end(self) -> None:
        for thread in _threads():
            self._forwards.pop(thread, None)

    def of(self, rows: int) -> Forward | None:
        """That of this thread, if its batch has so many rows."""
        found = [self._forwards.get(one) for one in _threads()]
        if torch.compiler.is_compiling():  # maybe layers alone
            found += self._forwards.values()
        forward = next((one for one in found if one is not None), None)
        return forward if forward is not None and forward.tokens.shape[0] == rows else None


def _begin(batch: Batch, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    ids, lengths = kwargs.get("input_ids"), kwargs.get("cu_seq_lens_q")
    if ids is None or lengths is None or kwargs.get("cache") is None:
        batch.end()  # of a forward that was not finished
    else:
        batch.begin(lengths, ids.shape[-1], kwargs.get("logits_processor_args"))


def _end(batch: Batch, *_: Any) -> None:
    batch.end()


def _leave_out(
    batch: Batch, layer: layers_of.Layer, module: HfModule, args: tuple
) -> tuple | None:
    """Before the forward of experts: their arguments, in which padding has ids of no expert."""
    forward = batch.of(args[1].shape[0]) if len(args) > 1 and args[1].dim() == 2 else None
    if forward is None or not runs_here(layer):  # others read a weight by any id
        return None
    return (args[0], torch.where(forward.tokens, args[1], -1), *args[2:])


def leave_out_padding(model: nn.Module) -> None:
    """Let the experts of a model on moe_ops leave out the padding of continuous batching, and
    `record_routing` too.
    """
    if batch_in(model) is not None:
        return
    try:
        layers = layers_of.find(model)
    except ValueError:  # it has none
        return
    batch = Batch()
    model.register_forward_pre_hook(functools.partial(_begin, batch), with_kwargs=True)
    model.register_forward_hook(functools.partial(_end, batch), always_call=True)
    for layer in layers:
        spread = getattr(layer.owner, "_is_expert_parallel", False)
        if not (layer.kind.routes or spread):  # the ids of other ranks' experts are theirs
            hook = functools.partial(_leave_out, batch, layer)
            layer.module.register_forward_pre_hook(hook)
    for _, router, _ in find_routers(model):
        setattr(router, ATTRIBUTE, batch)


def batch_in(model: nn.Module) -> Batch | None:
    """What the hooks of a model keep, if it has them."""
    hooks: list[Any] = [*model._forward_pre_hooks.values()]
    found = [hook.args[0] for hook in hooks if getattr(hook, "func", None) is _begin]
    return found[0] if found else None


def forward_of(router: HfModule, rows: int) -> Forward | None:
    """What is known of a batch of so many rows that a router is called with."""
    batch = getattr(router, ATTRIBUTE, None)
    return None if batch is None else batch.of(rows)


def _pads(config: Any) -> bool:
    """Whether a manager of this ContinuousBatchingConfig pads its batches."""
    compiled = (config.varlen_compile_config, config.decode_compile_config)
    return any(config.cuda_graph_booleans) or compiled != (None, None)


def _with_padding_left_out(own: Callable) -> Callable:
    @functools.wraps(own)
    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = batch_in(self)
        running = None if batch is None or batch.manager is None else batch.manager()
        kept = getattr(self, "_cached_continuous_batching_manager", None)  # what `own` returns
        if running is not None and running is not kept and running.is_running():
            raise RuntimeError(
                "the model is served by a manager whose requests name their adapters, which takes "
                "the model for itself: call its stop() first"
            )
        manager = own(self, *args, **kwargs)
        if _pads(manager.continuous_batching_config):
            leave_out_padding(self)
        batch = batch_in(self)
        if batch is not None and manager.batch_processor is None:  # a new one
            batch.adapters = batch.manager = None
        return manager

    return init_continuous_batching


def register() -> None:
    """Have `leave_out_padding` called when continuous batching begins."""
    own = ContinuousMixin.init_continuous_batching
    ContinuousMixin.init_continuous_batching = _with_padding_left_out(own)
