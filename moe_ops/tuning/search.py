"""The search for the fastest config of the triton backend for a shape and an M: BLOCK_M, the tiles
of both GEMMs, and which kernels quantize x and h.

It takes one M at a time. For every BLOCK_M that may be the best, it finds the best config of GEMM1
with the heuristic's GEMM2, then the best config of GEMM2 with that GEMM1. The whole layer is timed
under CUDA-graph replay, on random data, with routing sets whose weights exceed the L2. Half of the
sets choose experts uniformly, half by Zipf's law, because tiles that are measured with equally
busy experts alone lose on skewed ones. Kernels are compiled before that, by one process a core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch

from moe_ops import environment
from moe_ops.experts import fused_experts
from moe_ops.kernels.configs import (
    GEMV,
    SM90_MMA,
    SM90_TMA,
    GemmConfig,
    LayerConfig,
    override,
)
from moe_ops.kernels.gemm import configs
from moe_ops.kernels.mixed_gemm import configs as mixed_configs
from moe_ops.kernels.mixed_gemm import operands as mixed_operands
from moe_ops.kernels.rows.scales import scales
from moe_ops.tensors import from_quantized, quantize

_SETS = 8  # routing sets of a timing, replayed in turn
# in every second set, the expert of rank r is chosen with probability proportional to r ** -1.1
_ZIPF = 1.1
_REPLAYS = 9
_SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor that blocks share
# Weight bytes in flight to a multiprocessor that reach the memory's bandwidth. On an H200 the best
# configs of fp8_block and bf16 for up to 32 rows an expert had 96 to 180 KiB.
_IN_FLIGHT = 88 * 1024


@dataclass(frozen=True)
class Target:
    """One shape in one scheme: the key of a table entry, besides the GPU."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    scheme: str = ""
    dtype: str = "bfloat16"

    def weights(self, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random w13 (E, 2I, K) and w2 (E, K, I) in the scheme, made 16 experts at a time."""
        K, I = self.hidden_size, self.intermediate_size
        made = []
        for rows, columns in ((2 * I, K), (K, I)):
            parts = []
            for first in range(0, num_experts, 16):
                shape = (min(16, num_experts - first), rows, columns)
                part = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / columns**0.5
                part = part.to(getattr(torch, self.dtype))
                parts.append(quantize(part, self.scheme) if self.scheme else part)
            made.append(_concatenate(parts, self.scheme))
        return made[0], made[1]


def _concatenate(parts: list, scheme: str) -> torch.Tensor:
    if not scheme:
        return torch.cat(parts)
    tensors = {}
    for name in ("qdata", "scale", "zero_point", "global_scale", "channel_scale"):
        found = [getattr(part, name) for part in parts]
        if found[0] is not None:  # concatenated as bytes, which works for every dtype
            together = torch.cat([t.view(torch.uint8) for t in found])
            tensors[name] = together.view(found[0].dtype)
    return from_quantized(scheme, **tensors)


@dataclass(frozen=True)
class Gemm:
    """The facts of one of the two GEMMs on which its configs depend."""

    columns: int  # length of its sum (K or I)
    w_size: int  # bytes a weight element
    x_size: int  # bytes an element of its input
    scaled: bool  # each step's sum is scaled before it is added to the total
    block_ns: tuple[int, ...] = (64, 128, 256)  # rows of the weight in a tile


def in_flight(gemm: Gemm, config: GemmConfig, block_m: int) -> float:
    """Estimated weight bytes in flight to a multiprocessor; 0 if a block does not fit."""
    block_n, block_k, num_stages, num_warps = config
    sums = block_n * block_m / (32 * num_warps)
    # as compiled: 48 registers with 8 plain sums a thread, 72 with 16; with scaled sums 48 with 8,
    # 156 with 32
    registers = min(255, 40 + (3.5 if gemm.scaled else 2) * sums)
    stage = (block_n * gemm.w_size + block_m * gemm.x_size) * block_k
    # one operand is converted, through shared memory
    converted = block_m * block_k * 2 if gemm.x_size > gemm.w_size else 0
    blocks = min(
        _SHARED_MEMORY // (stage * num_stages + converted + 1024),
        65536 // (registers * 32 * num_warps),
    )
    return blocks * (num_stages - 1) * block_n * block_k * gemm.w_size


def candidates(gemm: Gemm, block_m: int, average: float) -> Iterator[GemmConfig]:
    """Configs of a GEMM that are timed with this BLOCK_M: blocks fit, and enough bytes are in
    flight.

    Args:
        average: average rows of an expert. With few, memory bandwidth is the limit, with many the
            products.
    """
    for n in gemm.block_ns:
        for k in (64, 128) if gemm.w_size > 1 else (128,):
            if gemm.w_size > 1 and gemm.columns % k:
                continue
            for warps in (4, 8):
                sums = n * block_m / (32 * warps) * (2 if gemm.scaled else 1)
                if not 8 <= sums <= 128 or (warps == 8 and n < 256 and average <= 32):
                    continue
                for stages in (2, 3, 4, 5, 6, 8)[: 6 if n * gemm.w_size == 64 else 5]:
                    config = GemmConfig(n, k, stages, warps)
                    if in_flight(gemm, config, block_m) >= (_IN_FLIGHT if average <= 32 else 1):
                        yield config


def block_ms(average: float) -> list[int]:
    """Values of BLOCK_M that are tried: a block should hold an expert's rows, and not be mostly
    empty.
    """
    return [t for t in (16, 32, 64, 128) if average / 6 <= t <= max(16, 5 * average)] or [128]


class Bench:
    """Weights and routing sets of a target on the GPU, and the time of a layer with a config."""

    def __init__(self, target: Target):
        self.target = target
        self.w13, self.w2 = target.weights(target.num_experts)
        self.inputs: list[tuple] = []

    def prepare(self, num_tokens: int) -> None:
        """Draw hidden states and routing sets for a number of tokens."""
        t = self.target
        x = torch.randn(num_tokens, t.hidden_size, device="cuda").to(getattr(torch, t.dtype))
        self.inputs = []
        for i in range(_SETS):
            ranks = torch.randperm(t.num_experts, device="cuda") + 1.0
            chances = (ranks ** -(_ZIPF * (i % 2))).expand(num_tokens, -1)
            ids = torch.multinomial(chances, t.top_k).int()
            weights = torch.rand(num_tokens, t.top_k, device="cuda")
            self.inputs.append((x, weights, ids))

    @torch.no_grad()
    def time_us(self, config: LayerConfig | None, warm_up_seconds: float = 0.005) -> float:
        """Median microseconds a layer; infinite if the config cannot run."""

        def layer() -> None:
            for x, weights, ids in self.inputs:
                fused_experts(x, self.w13, self.w2, weights, ids, backend="triton")

        with override(config):
            try:
                layer()
                graph = captured(layer)
            except Exception as error:  # out of registers or shared memory: not a candidate
                if "illegal" in str(error) or "assert" in str(error):
                    raise
                return math.inf
        replay_us([graph], warm_up_seconds)
        return statistics.median([replay_us([graph])[0] / _SETS for _ in range(_REPLAYS)])


def captured(layer: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a call that has run before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    return graph


def replay_us(graphs: list[torch.cuda.CUDAGraph], warm_up_seconds: float = 0.0) -> list[float]:
    """Microseconds of a replay of each graph, after so many seconds of untimed replays, which
    raise the clocks.
    """
    begin = time.perf_counter()
    while time.perf_counter() - begin < warm_up_seconds:
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
    times = []
    for graph in graphs:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times


def tune(bench: Bench, num_tokens: int) -> tuple[LayerConfig, float, float]:
    """(best config, its time, the heuristic's time), times in microseconds."""
    bench.prepare(num_tokens)
    base = heuristic(bench)
    plan = search_space(bench.target, base, num_tokens)
    compile_all(bench.target, num_tokens, [base, *_pairs(plan)])
    # The GPU was idle while kernels were compiled: until its clocks had risen, short layers ran 10
    # % slower.
    default_us = best_us = bench.time_us(base, warm_up_seconds=0.25)
    best = base
    for first, second in environment.progress_bar(plan, f"timing M={num_tokens}"):
        local, local_us = first[0], math.inf
        for config in first:
            us = bench.time_us(config)
            if us < local_us:
                local, local_us = config, us
        if local_us > 1.15 * best_us:
            continue
        for config in second:
            config = config._replace(gemm1=local.gemm1)
            us = bench.time_us(config)
            if us < local_us:
                local, local_us = config, us
        if local_us < best_us:
            best, best_us = local, local_us
    return best, best_us, default_us


def heuristic(bench: Bench) -> LayerConfig:
    """The config that the launcher takes without a table."""
    with override(None) as seen:
        x, weights, ids = bench.inputs[0]
        with torch.no_grad():
            fused_experts(x, bench.w13, bench.w2, weights, ids, backend="triton")
    return seen[-1]


def search_space(
    target: Target, base: LayerConfig, num_tokens: int
) -> list[tuple[list[LayerConfig], list[LayerConfig]]]:
    """Configs that are tried: for each kind of block a list for GEMM1 and one for GEMM2."""
    K, I = target.hidden_size, target.intermediate_size  # noqa: E741
    average = num_tokens * target.top_k / target.num_experts
    mixed = mixed_operands.describe(target.scheme)
    if mixed is not None and base.kernel == SM90_MMA:
        return [mixed_configs.token_space(base, target.top_k, K, I, mixed.group)]
    if mixed is not None and base.kernel == GEMV:
        return [mixed_configs.gemv_space(base, target.top_k, K, I, mixed.bits)]
    if mixed is not None:
        return mixed_configs.search_space(base, average, mixed.bits, target.num_experts, K)
    if base.kernel == GEMV:
        return [configs.gemv_space(base, K, I)]
    size = getattr(torch, target.dtype).itemsize
    w_size = 1 if target.scheme else size
    x_scale = scales(target.scheme).x
    space = []
    for shared in _blocks(base, average, x_scale == "group" and not (K % 16 or I % 16)):
        scaled = scales(target.scheme).weight == "block" or x_scale != ""
        whole = x_scale == "group" and not shared.h_in_fp32  # GEMM1 quantizes 128 columns of h
        first = Gemm(K, w_size, 1 if shared.quantize_x else size, scaled, (256,))
        if not whole and shared.kernel != SM90_TMA:
            first = dataclasses.replace(first, block_ns=(64, 128, 256))
        x_size = size if not x_scale else 4 if shared.h_in_fp32 else 1
        second = Gemm(I, w_size, x_size, scaled)
        if shared.kernel == SM90_TMA:
            second = dataclasses.replace(second, block_ns=(128,) if x_scale else (128, 256))
        ones = list(candidates(first, shared.block_m, average)) or [base.gemm1]
        rows = shared.block_m // shared.split_m  # rows of a program
        twos = list(candidates(second, rows, average)) or [base.gemm2]
        space.append(
            (
                [shared._replace(gemm1=config) for config in ones],
                [shared._replace(gemm2=config) for config in twos],
            )
        )
    return space


def _blocks(base: LayerConfig, average: float, by_group: bool) -> Iterator[LayerConfig]:
    """`base` with other values of BLOCK_M, and with x and h quantized by other kernels."""
    if base.kernel == SM90_TMA:
        for block_m, split_m in ((64, 1), (128, 1), (128, 2)):
            yield base._replace(block_m=block_m, split_m=split_m)
        return
    modes = [(base.quantize_x, base.h_in_fp32)]
    # for more tokens, quantizing in the mainloops is slower: every tile does it again
    if by_group and base.direct:
        modes = [(True, False), (True, True), (False, False), (False, True)]
    for block_m in [16] if base.direct else block_ms(average):
        for quantize_x, h_in_fp32 in modes:
            yield base._replace(block_m=block_m, quantize_x=quantize_x, h_in_fp32=h_in_fp32)


def _pairs(plan: list[tuple[list[LayerConfig], list[LayerConfig]]]) -> Iterator[LayerConfig]:
    """The fewest configs that compile every kernel of a plan."""
    for first, second in plan:
        for i in range(max(len(first), len(second))):
            two = second[i % len(second)]
            yield first[i % len(first)]._replace(
                gemm2=two.gemm2, split_m=two.split_m, split_k=two.split_k
            )


def compile_all(target: Target, num_tokens: int, choices: Iterable[LayerConfig]) -> None:
    """Compile kernels into Triton's cache on disk, in one process a core, or fewer if weights fill
    the GPU.
    """
    one = dataclasses.replace(target, num_experts=max(2, target.top_k))
    pool = _pool(_workers(one))
    jobs = [pool.submit(_compile, one, num_tokens, choice) for choice in dict.fromkeys(choices)]
    for job in environment.progress_bar(jobs, f"compiling for M={num_tokens}"):
        job.result()


def _workers(target: Target) -> int:
    """Processes that may make these weights at the same time: quantizing takes 8 times their bytes
    in bf16.
    """
    plain = target.num_experts * 3 * target.hidden_size * target.intermediate_size * 2
    _, memory = torch.cuda.mem_get_info()
    # any process takes half a GiB, and this one has the weights that are timed
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(cores - 1, int(0.6 * memory / (8 * plain + 2**29))))


@lru_cache(maxsize=1)
def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


@lru_cache(maxsize=1)
def _few_weights(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    made = target.weights(target.num_experts)
    torch.cuda.empty_cache()
    return made


def _compile(target: Target, num_tokens: int, config: LayerConfig) -> None:
    # Kernels are not specialized on the number of experts, so a few experts stand for all.
    w13, w2 = _few_weights(target)
    rows = min(num_tokens, 2)
    x = torch.randn(rows, target.hidden_size, device="cuda").to(getattr(torch, target.dtype))
    ids = torch.zeros(rows, target.top_k, dtype=torch.int32, device="cuda")
    weights = torch.ones(rows, target.top_k, device="cuda")
    # a candidate that cannot run is dropped when it is timed
    with torch.no_grad(), override(config), contextlib.suppress(Exception):
        fused_experts(x, w13, w2, weights, ids, backend="triton")
