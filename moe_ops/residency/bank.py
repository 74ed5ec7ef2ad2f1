"""A bank of slots: all experts of a layer in host memory, some of them on the device, and the
table of which. It brings a call's experts to the device, pass by pass.

Dimensions: E experts, S slots, S < E, M tokens, top_k experts a token.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.kernels import launch
from moe_ops.kernels.launch import Lazy
from moe_ops.kernels.residency.table import (
    admit_by_torch,
    empty_placement,
    enter_by_torch,
    table_of,
)
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import ExpertsArgs, ResidentArgs
from moe_ops.ops.backend import Backend
from moe_ops.ops.call import Weight
from moe_ops.residency.host import HostMemory
from moe_ops.residency.rows import ExpertEntry, bytes_of, rows_in

_ADMIT = Lazy("moe_ops.kernels.residency.admit:admit")
_FETCH = Lazy("moe_ops.kernels.residency.fetch:fetch")
_PROGRAMS_INTERPRETED = 3  # of fetch; as many as a GPU has would take the interpreter long
_TENSORS = Weight._fields[:6]


class Layer(NamedTuple):
    """The weights and biases of a layer's experts, wherever they lie."""

    w13: Weight
    w2: Weight
    w13_bias: Tensor | None
    w2_bias: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        """All that has an entry for each expert, by name."""
        found = {}
        for role, weight in (("w13", self.w13), ("w2", self.w2)):
            for name in _TENSORS:
                tensor = getattr(weight, name)
                if tensor is not None and not _is_shared(name, tensor):
                    found[f"{role}.{name}"] = tensor
        biases = {"w13_bias": self.w13_bias, "w2_bias": self.w2_bias}
        return found | {name: bias for name, bias in biases.items() if bias is not None}

    def replaced(self, tensors: dict[str, Tensor], device: torch.device) -> Layer:
        """The same of other tensors; what all experts share is moved to the device."""

        def weight(role: str, old: Weight) -> Weight:
            new: list[Any] = [tensors.get(f"{role}.{name}") for name in _TENSORS]
            if new[-1] is None and old.activation_scale is not None:  # shared
                new[-1] = old.activation_scale.to(device)
            return Weight._make([*new, old.scheme, old.layout])

        biases = tensors.get("w13_bias"), tensors.get("w2_bias")
        return Layer(weight("w13", self.w13), weight("w2", self.w2), *biases)

    def into(self, a: ExpertsArgs, expert_map: Tensor | None) -> ExpertsArgs:
        """Arguments that have these weights."""
        w13, w2 = self.w13, self.w2
        scales = ("scale", "zero_point", "global_scale", "channel_scale")
        return a._replace(
            w13=w13.data,
            w2=w2.data,
            **{f"w13_{name}": getattr(w13, name) for name in scales},
            **{f"w2_{name}": getattr(w2, name) for name in scales},
            a13_scale=w13.activation_scale,
            a2_scale=w2.activation_scale,
            w13_bias=self.w13_bias,
            w2_bias=self.w2_bias,
            expert_map=expert_map,
        )


def _is_shared(name: str, tensor: Tensor) -> bool:
    """Whether all experts share it: one scale of activations."""
    return name == "activation_scale" and tensor.numel() == 1


class Bank:
    """Implements `ops.resident.Resident`.

    One call at a time uses a bank: threads take turns, and streams wait for one another, but for
    captured graphs, whose replays their owner orders.
    """

    def __init__(
        self, layer: Layer, slots: int, device: torch.device, products_of_pair: int
    ) -> None:
        tensors = layer.tensors()
        self.device, self.products_of_pair = device, products_of_pair
        self.num_experts: int = layer.w2.data.shape[0]
        self.num_slots = slots
        self.pieces = {
            name: ExpertEntry(tuple(tensor.shape[1:]), tensor.dtype)
            for name, tensor in tensors.items()
        }
        self.expert_bytes = sum([piece.row_bytes for piece in self.pieces.values()])

        E, S = self.num_experts, slots
        self.host_memory = HostMemory(bytes_of(self.pieces, E)[1], device)
        self.host = rows_in(self.host_memory.data, self.pieces, E)
        region = torch.empty(bytes_of(self.pieces, S)[1], dtype=torch.uint8, device=device)
        self.slots = rows_in(region, self.pieces, S)
        for name, tensor in tensors.items():
            if not tensor.is_meta:
                self.host.tensors[name].copy_(tensor)
        self.in_host = layer.replaced(self.host.tensors, torch.device("cpu"))
        self.in_slots = layer.replaced(self.slots.tensors, device)

        self._empty = empty_placement(E, S).to(device)
        self._placement = self._empty.clone()
        self.table = table_of(self._placement, E, S)
        begins = [
            (self.host.starts[name], self.slots.starts[name], piece.row_bytes)
            for name, piece in self.pieces.items()
        ]
        self._pieces = torch.tensor(begins, dtype=torch.int64, device=device)
        self._lock = threading.RLock()
        self._stream: Any = None  # of the last call outside of captures

    @property
    def hidden_size(self) -> int:
        """K."""
        return self.in_slots.w2.data.shape[1]

    def forget(self) -> None:
        """Let all slots be empty: what they hold may differ from the host's rows."""
        with self._lock:
            self._placement.copy_(self._empty)

    def run(self, args: ResidentArgs, backend: Backend) -> None:
        """As `Resident` says. On a CPU plain torch reads experts in slots if there are as many as
        pairs, and else in host memory, where it gains nothing by passes.
        """
        M, K = args.out.shape
        if self.hidden_size != K:
            raise ValueError(
                f"hidden_states must have the width of the resident experts, {self.hidden_size}, "
                f"got {K}"
            )
        if args.out.device != self.device:
            raise ValueError(
                f"hidden_states must be on {self.device}, where the slots are, got "
                f"{args.out.device}; move it with .to()"
            )
        if M == 0:
            return
        given: dict[str, Any] = dict.fromkeys(ExpertsArgs._fields) | args._asdict()
        whole = self.in_slots.into(ExpertsArgs(**given), self.table.served)
        few = args.topk_ids.numel() <= self.num_slots
        with self._lock:
            self._wait_for_streams()
            if backend.takes.passes is not None and not few:
                return backend.takes.passes(whole, self._passes)
            if backend.takes.passes is not None:
                self._bring(args.topk_ids)
            elif few:
                admit_by_torch(self.table, args.topk_ids)
                self._copy_arrivals()
            else:
                whole = self.in_host.into(whole, None)
            if backend.takes.passes is None:
                whole = whole._replace(options=whole.options._replace(slots=0))
            backend.launch["experts"](whole)

    def _wait_for_streams(self) -> None:
        """Let this call come after that of another stream."""
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _passes(self, a: ExpertsArgs) -> Iterator[ExpertsArgs]:
        """The arguments of each pass over the experts of a call, or of some of its tokens. Before
        each one kernels are launched that bring its experts, and say in the expert_map where.
        """
        for i in range(cdiv(min(a.topk_ids.numel(), self.num_experts), self.num_slots)):
            self._bring(a.topk_ids if i == 0 else None)
            yield a

    def _bring(self, ids: Tensor | None) -> None:
        """Let the experts of a pass be in slots, by kernels."""
        index = self.device.index if self.device.type == "cuda" else -1
        gpu = launch.gpu(index)
        launches = [_ADMIT(self.table, ids, gpu)]
        on_gpu = index >= 0
        if self.host_memory.pinned or not on_gpu:
            programs = gpu.multiprocessors if on_gpu else _PROGRAMS_INTERPRETED
            host, slots = [rows.region.view(torch.int32) for rows in (self.host, self.slots)]
            launches.append(_FETCH(self.table, host, slots, self._pieces, gpu, programs))
            return launch.run(launches, index, gpu)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "resident experts whose host memory is not pinned are copied by the host, which "
                "no CUDA graph does: let the process lock more memory (ulimit -l) before "
                "ResidentExperts is made"
            )
        launch.run(launches, index, gpu)
        self._copy_arrivals()

    def _copy_arrivals(self) -> None:
        experts, slots = enter_by_torch(self.table)
        for name, entries in self.host.entries.items():
            self.slots.entries[name][slots] = entries[experts.cpu()].to(self.device)
