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
from moe_ops.ops.args import ExpertsArgs, ResidentArgs
from moe_ops.ops.backend import Backend
from moe_ops.ops.call import Weight
from moe_ops.residency.host import HostMemory
from moe_ops.residency.rows import ExpertEntry, bytes_of, rows_in

_ADMIT = Lazy("moe_ops.kernels.residency.admit:admit")
_FETCH = Lazy("moe_ops.kernels.residency.fetch:fetch")
# Floating-point operations that a GPU does in the time in which a byte comes over its link: 500
# TFLOPS beside 55 GB/s on an H200, on smaller GPUs about as many.
FLOPS_OF_BYTE = 8192
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
        """The same of other tensors, and copies on the device of what all experts share."""

        def weight(role: str, old: Weight) -> Weight:
            new: list[Any] = [tensors.get(f"{role}.{name}") for name in _TENSORS]
            if new[-1] is None and old.activation_scale is not None:
                new[-1] = copy_on(device, old.activation_scale)
            return Weight._make([*new, old.scheme, old.layout])

        biases = tensors.get("w13_bias"), tensors.get("w2_bias")
        return Layer(weight("w13", self.w13), weight("w2", self.w2), *biases)

    def arguments(self, expert_map: Tensor | None) -> dict[str, Any]:
        """What ExpertsArgs has beyond ResidentArgs, of these weights."""
        w13, w2 = self.w13, self.w2
        scales = ("scale", "zero_point", "global_scale", "channel_scale")
        return {
            **{"w13": w13.data, "w2": w2.data},
            **{f"w13_{name}": getattr(w13, name) for name in scales},
            **{f"w2_{name}": getattr(w2, name) for name in scales},
            **{"a13_scale": w13.activation_scale, "a2_scale": w2.activation_scale},
            **{"w13_bias": self.w13_bias, "w2_bias": self.w2_bias, "expert_map": expert_map},
            "activation_by_expert": None,  # refused beside residency
        }


def copy_on(device: torch.device, tensor: Tensor) -> Tensor:
    """A copy on a device; of a meta tensor memory that is to be filled."""
    copy = torch.empty_like(tensor, device=device)
    return copy if tensor.is_meta else copy.copy_(tensor)


def _is_shared(name: str, tensor: Tensor) -> bool:
    """Whether all experts share it: one scale of activations."""
    return name == "activation_scale" and tensor.numel() == 1


class Bank:
    """Implements `ops.resident.Resident`.

    One call at a time uses a bank: threads take turns, and streams wait for one another, but for
    captured graphs, whose replays their owner orders.
    """

    def __init__(
        self,
        layer: Layer,
        w13: tuple[int, ...],  # E, N, K, whatever the data's shape
        w2: tuple[int, ...],  # E, K, I
        slots: int,
        device: torch.device,
    ) -> None:
        tensors = layer.tensors()
        self.num_experts, self.hidden_size = w2[:2]
        self.products_of_pair = w13[1] * w13[2] + w2[1] * w2[2]
        self.num_slots, self.device = slots, device
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

        self._empty = empty_placement(E, S).to(device)
        self._placement = self._empty.clone()
        self.table = table_of(self._placement, E, S)
        self._layer_in_slots = in_slots = layer.replaced(self.slots.tensors, device)
        self._in_slots = in_slots.arguments(self.table.served)
        self._in_host = self.in_host.arguments(None)
        begins = [
            (self.host.starts[name], self.slots.starts[name], piece.row_bytes)
            for name, piece in self.pieces.items()
        ]
        self._words = [rows.region.view(torch.int32) for rows in (self.host, self.slots)]
        self._pieces = torch.tensor(begins, dtype=torch.int64, device=device)
        self._streamed = _Streamed.of(E, S, device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.RLock()
        self._last_stream: Any = None  # of the last call outside of captures

    def forget(self) -> None:
        """Let all slots be empty: what they hold may differ from the host's rows. What all
        experts share is copied anew.
        """
        with self._lock:
            self._wait_for_streams()
            self._placement.copy_(self._empty)
            for role in ("w13", "w2"):
                weights = getattr(self._layer_in_slots, role), getattr(self.in_host, role)
                to, source = [weight.activation_scale for weight in weights]
                if to is not None:
                    to.copy_(source)

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
        few = args.topk_ids.numel() <= self.num_slots
        with self._lock:
            self._wait_for_streams()
            if backend.takes.passes is None:
                return backend.launch["experts"](self._at_once(args, few))
            whole = ExpertsArgs(**args._asdict(), **self._in_slots)
            if few:
                self._bring(args.topk_ids)
                backend.launch["experts"](whole)
            else:
                backend.takes.passes(whole, self._passes)

    def _at_once(self, args: ResidentArgs, few: bool) -> ExpertsArgs:
        """The arguments of plain torch on a CPU."""
        given = args._replace(options=args.options._replace(slots=0))._asdict()
        if not few:
            return ExpertsArgs(**given, **self._in_host)
        admit_by_torch(self.table, args.topk_ids)
        self._copy_arrivals()
        return ExpertsArgs(**given, **self._in_slots)

    def _wait_for_streams(self) -> None:
        """Let this call come after that of another stream."""
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last_stream is not None and self._last_stream != stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

    def _passes(self, a: ExpertsArgs) -> Iterator[ExpertsArgs]:
        """The arguments of each pass over the experts of a call, or of some of its tokens. Before
        each one kernels are launched that bring its experts, and say in the expert_map where.

        From so many pairs on that their products take longer than the copies of S experts, all
        experts stream: that hides the products, and gives up the experts that are in slots.
        """
        lost = self.num_slots * self.expert_bytes * FLOPS_OF_BYTE
        if 2 * a.topk_ids.numel() * self.products_of_pair >= lost:
            yield from self._stream(a)
            return
        left, ids = min(a.topk_ids.numel(), self.num_experts), a.topk_ids
        for first in range(0, left, self.num_slots):
            self._bring(ids if first == 0 else None)
            # at most so many experts: fewer blocks of rows, whose programs would find no work
            slots = min(self.num_slots, left - first)
            yield a._replace(options=a.options._replace(slots=slots))

    def _stream(self, a: ExpertsArgs) -> Iterator[ExpertsArgs]:
        """The arguments of passes over all experts in their order. Those of a pass are copied to
        one half of the slots while the products of those in the other half run: on two streams,
        which a captured graph forks and joins.
        """
        parts, maps, placement, counts = self._streamed
        self._placement.copy_(self._empty)  # until all copies are launched
        ahead = 1 if parts[0].size < self.num_slots else 0
        arrived: list[Any] = []
        for i, expert_map in enumerate(maps):
            arrived += map(self._copy, parts[len(arrived) : i + 1 + ahead])
            if self._copies is not None:
                torch.cuda.current_stream(self.device).wait_event(arrived[i])
            yield a._replace(expert_map=expert_map)
        self._placement.copy_(placement)
        self.table.counters.add_(counts)

    def _copy(self, part: _Part) -> Any:
        """Copy experts to slots, after all that is launched so far, on a stream of its own.
        Returns the event of their arrival; None on a CPU.
        """
        first, slot, size = part
        copies = self._copies
        if copies is not None:
            self._refuse_capture_without_pinned_memory()
            copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(copies):
            for name, entries in self.host.entries.items():
                rows = self.slots.entries[name][slot : slot + size]
                rows.copy_(entries[first : first + size], non_blocking=True)
        return None if copies is None else copies.record_event()

    def _bring(self, ids: Tensor | None) -> None:
        """Let the experts of a pass be in slots, by kernels."""
        on_gpu = self.device.type == "cuda"
        index = self.device.index if on_gpu else -1
        gpu = launch.gpu(index)
        launches = [_ADMIT(self.table, ids, gpu)]
        if on_gpu and not self.host_memory.pinned:
            self._refuse_capture_without_pinned_memory()
            launch.run(launches, index, gpu)
            return self._copy_arrivals()
        programs = gpu.multiprocessors if on_gpu else _PROGRAMS_INTERPRETED
        launches.append(_FETCH(self.table, *self._words, self._pieces, gpu, programs))
        launch.run(launches, index, gpu)

    def _copy_arrivals(self) -> None:
        """What the kernel of fetch.py does, from memory that is not pinned."""
        experts, slots = enter_by_torch(self.table)
        for name, entries in self.host.entries.items():
            self.slots.entries[name][slots] = entries[experts.cpu()].to(self.device)

    def _refuse_capture_without_pinned_memory(self) -> None:
        if not self.host_memory.pinned and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "resident experts whose host memory is not pinned are copied by the host, which "
                "no CUDA graph does: let the process lock more memory (ulimit -l) before "
                "ResidentExperts is made"
            )


class _Part(NamedTuple):
    """Experts that are copied at a time, one after the other as they lie."""

    first: int  # expert
    slot: int  # of the first one
    size: int


class _Streamed(NamedTuple):
    """How all experts pass through two halves of the slots, in their order."""

    parts: list[_Part]
    maps: Tensor  # (parts, E) int32: the slot of each expert of a part, -1 of others
    placement: Tensor  # (E + 2 S,) int32, of the table when all have passed
    counts: Tensor  # (2,) int64: added to hits and misses

    @classmethod
    def of(cls, E: int, S: int, device: torch.device) -> _Streamed:
        """Those of E experts and S slots; one slot has no halves."""
        half = max(S // 2, 1)
        halves = min(S // half, 2)
        parts = [
            _Part(first, i % halves * half, min(half, E - first))
            for i, first in enumerate(range(0, E, half))
        ]
        on_cpu: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
        maps = torch.full((len(parts), E), -1, **on_cpu)
        expert_of, order = torch.full((S,), -1, **on_cpu), list(range(S))
        for (first, slot, size), expert_map in zip(parts, maps, strict=True):
            slots = range(slot, slot + size)
            expert_map[first : first + size] = torch.arange(slot, slot + size, **on_cpu)
            expert_of[slot : slot + size] = torch.arange(first, first + size, **on_cpu)
            order = [s for s in order if s not in slots] + list(slots)
        slot_of = torch.full((E,), -1, **on_cpu)
        held = (expert_of >= 0).nonzero().flatten()
        slot_of[expert_of[held].long()] = held.to(torch.int32)
        placement = torch.cat([slot_of, expert_of, torch.tensor(order, **on_cpu)])
        counts = torch.tensor([0, E], device="cpu")
        return cls(parts, *[t.to(device) for t in (maps, placement, counts)])
