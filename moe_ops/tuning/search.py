"""The search for Triton tiles: which blocks of tokens, which two GEMM tiles, and where x and h are quantized by groups
is fastest for a shape and an M.

One M at a time: for every kind of block that can pay, the best GEMM1 tile beside the heuristic's GEMM2, then the
best GEMM2 tile beside it. Times are of the whole layer under CUDA-graph replay, on random data, over routing
sets whose weights exceed the L2: half of them choose experts uniformly, half by Zipf's law, since tiles that fit
equally busy experts alone lost up to 12 % on skewed ones. Kernels are compiled beforehand by one process a core.
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

import moe_ops
from moe_ops import environment
from moe_ops.kernels import triton_packed_launch, triton_packed_tiles, triton_tiles
from moe_ops.kernels.triton_scales import scales
from moe_ops.kernels.triton_tiles import Tile, Tiles

_SETS = 8  # routing sets a timing rotates through
_ZIPF = 1.1  # every second set: the expert of rank r is chosen with probability proportional to r ** -1.1
_REPLAYS = 9
_SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor that blocks share
# Weight bytes on their way to a multiprocessor: less does not reach the memory's bandwidth. On an H200 the best tiles
# of fp8_block and bf16 for up to 32 rows an expert had 96 to 180 KiB.
_IN_FLIGHT = 88 * 1024


@dataclass(frozen=True)
class Target:
    """One shape in one scheme: what a table entry is keyed by, besides the GPU."""

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
                parts.append(moe_ops.quantize(part, self.scheme) if self.scheme else part)
            made.append(_concatenate(parts, self.scheme))
        return made[0], made[1]


def _concatenate(parts: list, scheme: str) -> torch.Tensor:
    if not scheme:
        return torch.cat(parts)
    tensors = {}
    for name in ("qdata", "scale", "zero_point", "global_scale", "channel_scale"):
        found = [getattr(part, name) for part in parts]
        if found[0] is not None:  # concatenated as bytes, which every dtype can be
            together = torch.cat([t.view(torch.uint8) for t in found])
            tensors[name] = together.view(found[0].dtype)
    return moe_ops.from_quantized(scheme, **tensors)


@dataclass(frozen=True)
class Gemm:
    """One of the two products as tiles see it."""

    columns: int  # length of its sum (K or I)
    w_size: int  # bytes a weight element
    x_size: int  # bytes an element of its input
    scaled: bool  # each step's sum is scaled before it is added to the total
    rows: tuple[int, ...] = (64, 128, 256)  # of the weight, in a tile


def in_flight(gemm: Gemm, tile: Tile, tokens: int) -> float:
    """Model of the weight bytes that a multiprocessor has asked for at a time; 0 where a block does not fit."""
    sums = tile.rows * tokens / (32 * tile.warps)
    # as compiled: 48 at 8 plain sums, 72 at 16; 48 at 8 scaled ones, 156 at 32
    registers = min(255, 40 + (3.5 if gemm.scaled else 2) * sums)
    stage = (tile.rows * gemm.w_size + tokens * gemm.x_size) * tile.k
    # one operand is converted on its way
    converted = tokens * tile.k * 2 if gemm.x_size > gemm.w_size else 0
    blocks = min(
        _SHARED_MEMORY // (stage * tile.stages + converted + 1024),
        65536 // (registers * 32 * tile.warps),
    )
    return blocks * (tile.stages - 1) * tile.rows * tile.k * gemm.w_size


def candidates(gemm: Gemm, tokens: int, average: float) -> Iterator[Tile]:
    """Tiles of a GEMM worth timing beside blocks of `tokens` tokens: they fit, and keep enough in flight.

    Args:
        average: rows an expert has on average; few of them stream weights, many of them multiply.
    """
    for rows in gemm.rows:
        for k in (64, 128) if gemm.w_size > 1 else (128,):
            if gemm.w_size > 1 and gemm.columns % k:
                continue
            for warps in (4, 8):
                sums = rows * tokens / (32 * warps) * (2 if gemm.scaled else 1)
                if not 8 <= sums <= 128 or (warps == 8 and rows < 256 and average <= 32):
                    continue
                for stages in (2, 3, 4, 5, 6, 8)[: 6 if rows * gemm.w_size == 64 else 5]:
                    tile = Tile(rows, k, stages, warps)
                    if in_flight(gemm, tile, tokens) >= (_IN_FLIGHT if average <= 32 else 1):
                        yield tile


def token_tiles(average: float) -> list[int]:
    """Token tiles worth trying: an expert should fit one block, and a block should not be empty."""
    return [t for t in (16, 32, 64, 128) if average / 6 <= t <= max(16, 5 * average)] or [128]


class Bench:
    """Weights and routing sets of a target on the GPU, and the time of a layer with given tiles."""

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
    def time_us(self, tiles: Tiles | None, warm_up_seconds: float = 0.005) -> float:
        """Median microseconds a layer; infinite where the tiles cannot run."""

        def layer() -> None:
            for x, weights, ids in self.inputs:
                moe_ops.fused_experts(x, self.w13, self.w2, weights, ids, backend="triton")

        with triton_tiles.searching(tiles):
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
    """Microseconds of a replay of each, after so many seconds of untimed ones that bring the clocks up."""
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


def tune(bench: Bench, num_tokens: int) -> tuple[Tiles, float, float]:
    """Best tiles, their time and the heuristic's time, both in microseconds."""
    bench.prepare(num_tokens)
    base = heuristic(bench)
    plan = search_space(bench.target, base, num_tokens)
    compile_all(bench.target, num_tokens, [base, *_pairs(plan)])
    # The GPU idled while kernels were compiled; short layers ran 10 % slower until its clocks were up.
    default_us = best_us = bench.time_us(base, warm_up_seconds=0.25)
    best = base
    for first, second in environment.progress_bar(plan, f"M={num_tokens}"):
        local, local_us = first[0], math.inf
        for tiles in first:
            us = bench.time_us(tiles)
            if us < local_us:
                local, local_us = tiles, us
        if local_us > 1.15 * best_us:
            continue
        for tiles in second:
            tiles = tiles._replace(gemm1=local.gemm1)
            us = bench.time_us(tiles)
            if us < local_us:
                local, local_us = tiles, us
        if local_us < best_us:
            best, best_us = local, local_us
    return best, best_us, default_us


def heuristic(bench: Bench) -> Tiles:
    """The tiles the launcher takes without a table."""
    with triton_tiles.searching(None) as seen:
        x, weights, ids = bench.inputs[0]
        with torch.no_grad():
            moe_ops.fused_experts(x, bench.w13, bench.w2, weights, ids, backend="triton")
    return seen[-1]


def search_space(
    target: Target, base: Tiles, num_tokens: int
) -> list[tuple[list[Tiles], list[Tiles]]]:
    """Variants of GEMM1 and of GEMM2, a pair of lists for each kind of block."""
    K, I = target.hidden_size, target.intermediate_size  # noqa: E741
    average = num_tokens * target.top_k / target.num_experts
    packed = triton_packed_launch.describe(target.scheme)
    if packed is not None and base.vector:
        return [triton_packed_tiles.vector_space(base, target.top_k, K, I, packed.bits)]
    if packed is not None:
        return triton_packed_tiles.search_space(base, average, packed.bits, target.num_experts, K)
    if base.vector:
        return [triton_tiles.vector_space(base, K, I)]
    size = getattr(torch, target.dtype).itemsize
    w_size = 1 if target.scheme else size
    x_scale = scales(target.scheme).x
    space = []
    for shared in _blocks(base, average, x_scale == "group" and not (K % 16 or I % 16)):
        scaled = scales(target.scheme).weight == "block" or x_scale != ""
        whole = x_scale == "group" and not shared.wide_h  # GEMM1 quantizes 128 columns of h
        first = Gemm(K, w_size, 1 if shared.quantize else size, scaled, (256,))
        if not whole and not shared.large:
            first = dataclasses.replace(first, rows=(64, 128, 256))
        x_size = size if not x_scale else 4 if shared.wide_h else 1
        second = Gemm(I, w_size, x_size, scaled)
        if shared.large:
            second = dataclasses.replace(second, rows=(128,) if x_scale else (128, 256))
        tokens = shared.tokens // shared.parts
        ones = list(candidates(first, shared.tokens, average)) or [base.gemm1]
        twos = list(candidates(second, tokens, average)) or [base.gemm2]
        space.append(
            (
                [shared._replace(gemm1=tile) for tile in ones],
                [shared._replace(gemm2=tile) for tile in twos],
            )
        )
    return space


def _blocks(base: Tiles, average: float, by_group: bool) -> Iterator[Tiles]:
    """`base` with other blocks of tokens, and with x and h quantized by groups elsewhere."""
    if base.large:
        for tokens, parts in ((64, 1), (128, 1), (128, 2)):
            yield base._replace(tokens=tokens, parts=parts)
        return
    modes = [(base.quantize, base.wide_h)]
    if by_group and base.direct:  # of more tokens, quantizing in the loops was 2 to 30 % slower
        modes = [(True, False), (True, True), (False, False), (False, True)]
    for tokens in [16] if base.direct else token_tiles(average):
        for quantize, wide_h in modes:
            yield base._replace(tokens=tokens, quantize=quantize, wide_h=wide_h)


def _pairs(plan: list[tuple[list[Tiles], list[Tiles]]]) -> Iterator[Tiles]:
    """As few tiles as compile every kernel of a plan."""
    for first, second in plan:
        for i in range(max(len(first), len(second))):
            two = second[i % len(second)]
            yield first[i % len(first)]._replace(gemm2=two.gemm2, parts=two.parts)


def compile_all(target: Target, num_tokens: int, tiles: Iterable[Tiles]) -> None:
    """Compile kernels into Triton's cache on disk, one process a core, or fewer where weights fill the GPU."""
    one = dataclasses.replace(target, num_experts=max(2, target.top_k))
    pool = _pool(_workers(one))
    jobs = [pool.submit(_compile, one, num_tokens, choice) for choice in dict.fromkeys(tiles)]
    for job in jobs:
        job.result()


def _workers(target: Target) -> int:
    """Processes that may make these weights at a time: quantizing took 8 times their bytes in bf16."""
    plain = target.num_experts * 3 * target.hidden_size * target.intermediate_size * 2
    _, memory = torch.cuda.mem_get_info()
    # a process takes half a GiB, whatever it makes; this one holds the weights that are timed
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


def _compile(target: Target, num_tokens: int, tiles: Tiles) -> None:
    # No kernel is specialised on the number of experts, so a few of them stand for all.
    w13, w2 = _few_weights(target)
    rows = min(num_tokens, 2)
    x = torch.randn(rows, target.hidden_size, device="cuda").to(getattr(torch, target.dtype))
    ids = torch.zeros(rows, target.top_k, dtype=torch.int32, device="cuda")
    weights = torch.ones(rows, target.top_k, device="cuda")
    # a candidate that cannot run is sorted out when timed
    with torch.no_grad(), triton_tiles.searching(tiles), contextlib.suppress(Exception):
        moe_ops.fused_experts(x, w13, w2, weights, ids, backend="triton")
