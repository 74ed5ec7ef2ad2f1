"""The search for Triton tiles: which token tile and which two GEMM tiles are fastest for a shape and an M.

One M at a time: for every token tile that can pay, the best GEMM1 tile beside the heuristic's GEMM2, then the
best GEMM2 tile beside it. Times are of the whole layer under CUDA-graph replay, on random data, over routing
sets whose weights exceed the L2. Kernels are compiled beforehand by one process a core.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

import moe_ops
from moe_ops.kernels import triton_tiles
from moe_ops.kernels.triton_tiles import Tile, Tiles

_SETS = 8  # routing sets a timing rotates through
_REPLAYS = 9


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
    data = torch.cat([part.qdata.view(torch.uint8) for part in parts]).view(parts[0].qdata.dtype)
    return moe_ops.from_quantized(scheme, data, torch.cat([part.scale for part in parts]))


def candidates(base: Tiles, average: float, itemsize: int, columns: int) -> Iterator[Tile]:
    """Tiles of one GEMM worth timing beside `base.tokens` tokens: they fit, and keep enough in flight.

    Args:
        average: rows an expert has on average; few of them stream weights, many of them multiply.
        itemsize: bytes a weight element.
        columns: length of the GEMM's sum (K or I).
    """
    tokens = base.tokens
    for rows in (64, 128, 256):
        for k in (64, 128) if itemsize > 1 else (128,):
            if columns % k:
                continue
            for warps in (4, 8):
                registers = rows * tokens / (32 * warps)  # fp32 accumulators a thread
                if not 8 <= registers <= 128 or (itemsize == 1 and registers > 64):
                    continue
                for stages in (2, 3, 4, 5, 6):
                    memory = (rows + tokens) * k * itemsize * stages
                    flight = rows * k * itemsize * (stages - 1)
                    if memory > 219 * 1024 or (average <= 32 and flight < 32 * 1024):
                        continue
                    if average > 32 and stages > 4 and memory > 160 * 1024:
                        continue
                    yield Tile(rows, k, stages, warps)


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
        for _ in range(_SETS):
            scores = torch.rand(num_tokens, t.num_experts, device="cuda")
            weights, ids = scores.topk(t.top_k, dim=1)
            self.inputs.append((x, weights, ids.int()))

    @torch.no_grad()
    def time_us(self, tiles: Tiles | None) -> float:
        """Median microseconds a layer; infinite where the tiles cannot run."""

        def layer() -> None:
            for x, weights, ids in self.inputs:
                moe_ops.fused_experts(x, self.w13, self.w2, weights, ids, backend="triton")

        with triton_tiles.searching(tiles):
            try:
                layer()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    layer()
            except Exception as error:  # out of registers or shared memory: not a candidate
                if "illegal" in str(error) or "assert" in str(error):
                    raise
                return math.inf
        times = []
        for replay in range(_REPLAYS + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 2:
                times.append(start.elapsed_time(end) * 1e3 / _SETS)
        return statistics.median(times)


def tune(
    bench: Bench, num_tokens: int, progress: Callable[[Iterable, str], Iterable]
) -> tuple[Tiles, float, float]:
    """Best tiles, their time and the heuristic's time, both in microseconds."""
    bench.prepare(num_tokens)
    target, base = bench.target, heuristic(bench)
    average = num_tokens * target.top_k / target.num_experts
    default_us = best_us = bench.time_us(base)
    best = base
    plan = list(_search_space(target, base, average, num_tokens))
    compile_all(target, num_tokens, [tiles for group in plan for tiles in group])
    for first, second in progress(
        list(zip(plan[0::2], plan[1::2], strict=True)), f"M={num_tokens}"
    ):
        local, local_us = None, math.inf
        for tiles in first:
            us = bench.time_us(tiles)
            if us < local_us:
                local, local_us = tiles, us
        if local is None or local_us > 1.15 * best_us:
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


def _search_space(
    target: Target, base: Tiles, average: float, num_tokens: int
) -> Iterator[list[Tiles]]:
    """Alternating lists, a pair for each token tile: variants of GEMM1, variants of GEMM2."""
    itemsize = 1 if target.scheme else getattr(torch, target.dtype).itemsize
    tokens_choices = [16] if base.direct else token_tiles(average)
    for tokens in tokens_choices:
        shared = base._replace(tokens=tokens, chunk=1024 if tokens <= 32 else 4096)
        lengths = (target.hidden_size, target.intermediate_size)
        for name, columns in zip(("gemm1", "gemm2"), lengths, strict=True):
            fixed = getattr(base, name).rows if target.scheme else None  # scales follow the rows
            tiles = candidates(shared, average, itemsize, columns)
            yield [shared._replace(**{name: tile}) for tile in tiles if fixed in (None, tile.rows)]


def compile_all(target: Target, num_tokens: int, tiles: list[Tiles]) -> None:
    """Compile kernels into Triton's cache on disk, one process a core."""
    workers = min(12, os.cpu_count() or 1, max(1, len(tiles) // 4))
    chunks = [tiles[i::workers] for i in range(workers)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(_compile_some, [target] * workers, [num_tokens] * workers, chunks))


def _compile_some(target: Target, num_tokens: int, tiles: list[Tiles]) -> None:
    # No kernel is specialised on the number of experts, so two of them stand for all.
    w13, w2 = target.weights(2)
    rows = min(num_tokens, 2)
    x = torch.randn(rows, target.hidden_size, device="cuda").to(getattr(torch, target.dtype))
    ids = torch.zeros(rows, target.top_k, dtype=torch.int32, device="cuda")
    weights = torch.ones(rows, target.top_k, device="cuda")
    for choice in tiles:
        with torch.no_grad(), triton_tiles.searching(choice):
            try:
                moe_ops.fused_experts(x, w13, w2, weights, ids, backend="triton")
            except Exception:  # noqa: S112  a candidate that cannot run is sorted out when timed
                continue
