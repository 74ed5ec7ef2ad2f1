"""Stacks of expert layers in one CUDA graph, for benchmarks/residency.py: a replay is a step, with
the ids that were written before it.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from cases import SHAPES, Experts, make_biases, make_plain_weights
from torch import Tensor

import moe_ops
from moe_ops.bench.layers import Layer, quantized
from moe_ops.bench.shapes import Shape
from moe_ops.residency import bank

STEPS_AT_ONCE = 8  # between looks at the clock; of large batches a quarter
Counters = Callable[[], Tensor]  # (layers, 2) int64: experts found and brought so far


class Steps(NamedTuple):
    """What was timed: us of each step, and (steps, layers, 2) experts found and brought."""

    us: list[float]
    counts: np.ndarray

    @property
    def mean_us(self) -> float:
        return statistics.fmean(self.us)


class Stack:
    """Layers one after the other, on the same hidden states and each with its own ids."""

    def __init__(
        self,
        layers: Sequence[Layer],
        counters: Counters | None,
        shape: Shape,
        batch: int,
        device: torch.device,
        graph: bool = True,
    ) -> None:
        generator = torch.Generator(device).manual_seed(batch)
        size = (len(layers), batch, shape.top_k)
        self.layers, self.counters = layers, counters
        self.x = torch.randn(batch, shape.hidden_size, generator=generator, device=device)
        self.x = self.x.to(torch.bfloat16)
        draws = [torch.rand(size[1:], generator=generator, device=device) for _ in layers]
        self.router = torch.stack(draws) + 0.25
        first = torch.arange(shape.top_k, dtype=torch.int32, device=device)
        self.ids = first.expand(size).contiguous()
        self.outputs: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.cuda = device.type == "cuda"
        for _ in range(2):  # compiles
            self._call()
        if graph and self.cuda:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self._call()

    def _call(self) -> None:
        rows = zip(self.layers, self.router, self.ids, strict=True)
        self.outputs = [layer(self.x, router, ids) for layer, router, ids in rows]

    def step(self, ids: Tensor) -> None:
        """Run all layers with ids (layers, batch, top_k)."""
        self.ids.copy_(ids)
        self._replay()

    def _replay(self) -> None:
        if self.graph is None:
            self._call()
        else:
            self.graph.replay()

    def run(self, trace: Tensor, seconds: float) -> Steps:
        """Time the steps of a trace (steps, layers, batch, top_k), until so many seconds have
        passed."""
        start = time.perf_counter()
        at_once = STEPS_AT_ONCE if trace.shape[2] < 64 else STEPS_AT_ONCE // 4
        events, us, counts = [], [], [self._counted()]
        for step, ids in enumerate(trace):
            self.ids.copy_(ids)
            if self.cuda:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                self._replay()
                end.record()
                events.append((begin, end))
            else:
                before = time.perf_counter()
                self._replay()
                us.append((time.perf_counter() - before) * 1e6)
            counts.append(self._counted())
            if step % at_once == at_once - 1:
                if self.cuda:
                    torch.cuda.synchronize()
                if time.perf_counter() - start > seconds:
                    break
        if self.cuda:
            torch.cuda.synchronize()
            us = [begin.elapsed_time(end) * 1e3 for begin, end in events]
        return Steps(us, np.diff(torch.stack(counts).cpu().numpy(), axis=0))

    def _counted(self) -> Tensor:
        """The counters as they are now: without a wait."""
        if self.counters is None:
            return torch.zeros(len(self.layers), 2, dtype=torch.int64)
        return self.counters().clone()


@dataclass(frozen=True)
class Model:
    """A stack: a shape of SHAPES in a scheme, and its number of layers."""

    shape: str
    scheme: str
    layers: int

    @property
    def layer(self) -> Experts:
        return SHAPES[self.shape]


MODELS = {
    "qwen3 bf16": Model("qwen3", "", 8),
    "qwen3 int4": Model("qwen3", "int4_w4a16:g128", 8),
    "qwen3 fp8": Model("qwen3", "fp8_block", 8),
    "gptoss120 mxfp4": Model("gptoss120_bias", "mxfp4_w4a16", 8),
    "dsv3 fp8": Model("dsv3", "fp8_block", 2),
    "tiny": Model("tiny", "int4_w4a16:g128", 2),  # --dry-run only
}


class Weights(NamedTuple):
    """Of a layer, on the GPU."""

    w13: Any  # (E, 2I, K)
    w2: Any  # (E, K, I)
    w13_bias: Tensor | None
    w2_bias: Tensor | None


class HostRegions:
    """Host memory that one bank after the other has: pinning it takes longer than all else."""

    def __init__(self) -> None:
        self.free: dict[int, list[Any]] = {}
        self.make = bank.HostMemory

    def get(self, num_bytes: int, device: torch.device) -> Any:
        free = self.free.get(num_bytes)
        return free.pop() if free else self.make(num_bytes, device)

    def give_back(self, region: Any) -> None:
        self.free.setdefault(region.data.numel(), []).append(region)


class Stacks:
    """The layers of a model: all experts on the GPU, and in host memory with slots on the GPU."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model, self.device, self.shape = model, device, model.layer
        plain, biases = make_plain_weights(self.shape, device), make_biases(self.shape, device)
        self.weights = []
        for layer in range(model.layers):  # each has the same experts under other numbers
            w13, w2 = (w.roll(layer, 0) for w in plain)
            if model.scheme:
                w13, w2 = (quantized(w, model.scheme) for w in (w13, w2))
                if device.type == "cuda":
                    w13, w2 = (moe_ops.prepare(w, "triton") for w in (w13, w2))
            of_layer = [None if bias is None else bias.roll(layer, 0) for bias in biases]
            self.weights.append(Weights(w13, w2, *of_layer))
        self.slots = self.shape.num_experts
        self.residents: list[moe_ops.ResidentExperts] = []
        self._regions = HostRegions()
        self._stacks: dict[tuple[str, int], Stack] = {}  # by batch

    def hold(self, slots: int) -> None:
        """Let all layers have so many slots, which are empty."""
        for batch in [batch for name, batch in self._stacks if name == "slotted"]:
            self.drop(batch, "slotted")
        for one in self.banks():
            self._regions.give_back(one.host_memory)
        self.residents.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        with mock.patch.object(bank, "HostMemory", self._regions.get):
            for w in self.weights:
                biases = {"w13_bias": w.w13_bias, "w2_bias": w.w2_bias}
                made = moe_ops.ResidentExperts(w.w13, w.w2, **biases, slots=slots)
                self.residents.append(made)
        self.slots = slots

    def banks(self) -> list[Any]:
        """Of the layers; none where all experts are on the GPU."""
        return [one._bank for one in self.residents if one._bank is not None]

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert, as it travels."""
        return self.residents[0].expert_bytes

    def whole(self, batch: int) -> Stack:
        """The stack whose experts are all on the GPU."""
        return self._stack("whole", batch, self.weights, None)

    def slotted(self, batch: int) -> Stack:
        """That of `hold`."""
        weights = [Weights(one.w13, one.w2, None, None) for one in self.residents]
        return self._stack("slotted", batch, weights, self._counters if self.banks() else None)

    def drop(self, batch: int, *names: str) -> None:
        """Free stacks of a batch: "whole", "slotted"."""
        for name in names:
            self._stacks.pop((name, batch), None)

    def _stack(
        self, name: str, batch: int, weights: Sequence[Weights], counters: Counters | None
    ) -> Stack:
        if (name, batch) not in self._stacks:
            layers = [functools.partial(self._call, w) for w in weights]
            made = Stack(layers, counters, self.shape, batch, self.device)
            self._stacks[name, batch] = made
        return self._stacks[name, batch]

    def _call(
        self, w: Weights, x: Tensor, router: Tensor, ids: Tensor, backend: str = "auto"
    ) -> Tensor:
        options = {"w13_bias": w.w13_bias, "w2_bias": w.w2_bias, "backend": backend}
        activation = self.shape.activation
        return moe_ops.fused_experts(x, w.w13, w.w2, router, ids, activation=activation, **options)

    def _counters(self) -> Tensor:
        return torch.stack([one.table.counters for one in self.banks()])

    def same_bits(self, stack: Stack, ids: Tensor) -> bool:
        """Whether a stack's outputs of the step it ran last, by these ids, are those of experts
        that are all on the GPU, on the backend that runs from slots. `whole` may choose another.
        """
        backend = "triton" if self.device.type == "cuda" else "auto"
        calls = zip(self.weights, stack.router, ids, stack.outputs, strict=True)
        return all(
            torch.equal(out, self._call(w, stack.x, router, of_layer, backend))
            for w, router, of_layer, out in calls
        )
