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
from moe_ops.choose import candidates, plain, rank
from moe_ops.choose.table import LayerSizes, override
from moe_ops.experts import fused_experts
from moe_ops.kernels import launch
from moe_ops.kernels.configs import GEMV, SM90_MMA, LayerConfig
from moe_ops.kernels.launch import Gpu
from moe_ops.kernels.mixed_gemm import operands as mixed_operands
from moe_ops.kernels.rows.scales import scales
from moe_ops.tensors import from_quantized, quantize

_DEVICE = "cuda"
_SETS = 8  # routing sets of a timing, replayed in turn
# in every second set, the expert of rank r is chosen with probability proportional to r ** -1.1
_ZIPF = 1.1
_REPLAYS = 9


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
            if not self.scheme:  # in place: they may be more than half of what the GPU has
                dtype, shape = getattr(torch, self.dtype), (num_experts, rows, columns)
                empty = torch.empty(shape, dtype=dtype, device=_DEVICE)
                made.append(empty.normal_(std=columns**-0.5))
                continue
            parts = []
            for first in range(0, num_experts, 16):
                shape = (min(16, num_experts - first), rows, columns)
                part = torch.randn(shape, device=_DEVICE, dtype=torch.bfloat16) / columns**0.5
                part = part.to(getattr(torch, self.dtype))
                parts.append(quantize(part, self.scheme))
            made.append(_concatenate(parts, self.scheme))
        return made[0], made[1]


def _concatenate(parts: list, scheme: str) -> torch.Tensor:
    tensors = {}
    for name in ("qdata", "scale", "zero_point", "global_scale", "channel_scale"):
        found = [getattr(part, name) for part in parts]
        if found[0] is not None:  # concatenated as bytes, which works for every dtype
            together = torch.cat([t.view(torch.uint8) for t in found])
            tensors[name] = together.view(found[0].dtype)
    return from_quantized(scheme, **tensors)


class Bench:
    """Weights and routing sets of a target on the GPU, and the time of a layer with a config."""

    def __init__(self, target: Target):
        self.target = target
        self.w13, self.w2 = target.weights(target.num_experts)
        self.inputs: list[tuple] = []

    def prepare(self, num_tokens: int, sets: int = _SETS) -> None:
        """Draw hidden states and routing sets for a number of tokens."""
        t = self.target
        x = torch.randn(num_tokens, t.hidden_size, device=_DEVICE).to(getattr(torch, t.dtype))
        self.inputs = []
        for i in range(sets):
            ranks = torch.randperm(t.num_experts, device=_DEVICE) + 1.0
            chances = (ranks ** -(_ZIPF * (i % 2))).expand(num_tokens, -1)
            ids = torch.multinomial(chances, t.top_k).int()
            weights = torch.rand(num_tokens, t.top_k, device=_DEVICE)
            self.inputs.append((x, weights, ids))

    @torch.no_grad()
    def graph(self, config: LayerConfig | None) -> torch.cuda.CUDAGraph | None:
        """A graph of one layer for each set; None if the config cannot run."""

        def layer() -> None:
            for x, weights, ids in self.inputs:
                fused_experts(x, self.w13, self.w2, weights, ids, backend="triton")

        with override(config):
            try:
                layer()
                return captured(layer)
            except Exception as error:  # out of registers or shared memory: not a candidate
                if "illegal" in str(error) or "assert" in str(error):
                    raise
                return None

    def time_us(
        self,
        config: LayerConfig | None,
        warm_up_seconds: float = 0.005,
        replays: int = _REPLAYS,
    ) -> float:
        """Median microseconds per layer; infinite if the config cannot run."""
        graph = self.graph(config)
        if graph is None:
            return math.inf
        replay_us([graph], warm_up_seconds)
        sets = len(self.inputs)
        return statistics.median([replay_us([graph])[0] / sets for _ in range(replays)])


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
    compile_all(bench.target, num_tokens, [base, *pairs(plan)])
    # The GPU was idle while kernels were compiled: until its clocks had risen, short layers ran 10
    # % slower.
    default_us = bench.time_us(base, warm_up_seconds=0.25)
    found = times(plan, {base: default_us}, bench.time_us, f"timing M={num_tokens}")
    best = min(found, key=lambda config: found[config])
    return best, found[best], default_us


def times(
    plan: candidates.Space,
    found: dict[LayerConfig, float],
    time_us: Callable[[LayerConfig], float],
    what: str = "timing",
) -> dict[LayerConfig, float]:
    """Config -> microseconds, of those in `found` and of a plan's: for each kind of block those
    for GEMM1, and if these are not far behind, those for GEMM2 with the best one.
    """
    for first, second in environment.progress_bar(plan, what):
        best_us, ones = min(found.values()), {config: time_us(config) for config in first}
        local = min(ones, key=lambda config: ones[config])
        found |= {config: us for config, us in ones.items() if config not in found}
        if ones[local] > 1.15 * best_us:
            continue
        for config in second:
            config = config._replace(gemm1=local.gemm1)
            if config not in found:
                found[config] = time_us(config)
    return found


def heuristic(bench: Bench) -> LayerConfig:
    """The config that the launcher takes without a table."""
    with override(None) as seen:
        x, weights, ids = bench.inputs[0]
        with torch.no_grad():
            fused_experts(x, bench.w13, bench.w2, weights, ids, backend="triton")
    return seen[-1]


def search_space(target: Target, base: LayerConfig, num_tokens: int) -> candidates.Space:
    """Configs that are tried: for each kind of block a list for GEMM1 and one for GEMM2."""
    K, I = target.hidden_size, target.intermediate_size
    average = num_tokens * target.top_k / target.num_experts
    mixed = mixed_operands.describe(target.scheme)
    if mixed is not None and base.kernel == SM90_MMA:
        return candidates.token_space(base, target.top_k, K, I, mixed.group)
    if mixed is not None and base.kernel == GEMV:
        return candidates.mixed_gemv_space(base, target.top_k, K, I, mixed.bits)
    if mixed is not None:
        return candidates.mixed_space(base, average, mixed.bits, target.num_experts, K)
    if base.kernel == GEMV:
        return candidates.gemv_space(base, K, I)
    layer = LayerSizes(
        *(num_tokens * target.top_k, target.num_experts, K, I),
        *(launch.gpu(torch.cuda.current_device()), target.top_k),
    )
    size = getattr(torch, target.dtype).itemsize
    return rank.ranked_space(base, layer, size, bool(target.scheme), scales(target.scheme).x)


def ordered(target: Target, base: LayerConfig) -> bool:
    """Whether an estimate orders the configs of `search_space`, the best first."""
    return base.kernel != GEMV and mixed_operands.describe(target.scheme) is None


def listing(target: Target, num_tokens: int, gpu: Gpu) -> str:
    """What is chosen for a number of tokens, and the tiles that the estimate puts first, as text.

    Raises:
        ValueError: the scheme's kernels have no estimate.
    """
    if mixed_operands.describe(target.scheme) is not None:
        raise ValueError(
            "--list orders tiles of weights that are plain or quantized as their activations; got "
            f"scheme {target.scheme!r}: run the search, without --list, on a GPU"
        )
    K, I, of = target.hidden_size, target.intermediate_size, scales(target.scheme)
    layer = LayerSizes(num_tokens * target.top_k, target.num_experts, K, I, gpu, target.top_k)
    dtype = getattr(torch, target.dtype)
    tma = gpu.has_tma and of[:2] in (("", ""), ("block", "group"))
    kernels = (tma and layer.average >= plain.LARGE_ROWS, num_tokens == 1)
    chosen = plain.for_experts(layer, dtype, target.scheme, of[:2], True, *kernels)
    lines = [f"M={num_tokens}: {chosen}"]
    if chosen.kernel == GEMV:
        return lines[0]
    space = rank.ranked_space(chosen, layer, dtype.itemsize, bool(target.scheme), of.x)
    for ones, twos in space:
        lines.append(f"  BLOCK_M={ones[0].block_m} SPLIT_M={ones[0].split_m}")
        lines += [f"    GEMM1 {config.gemm1}" for config in ones[:5]]
        lines += [f"    GEMM2 {config.gemm2}" for config in twos[:5]]
    return "\n".join(lines)


def pairs(plan: candidates.Space) -> Iterator[LayerConfig]:
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
    pool = _pool_of(_workers(one))
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


_pool: tuple[int, ProcessPoolExecutor] | None = None


def _pool_of(workers: int) -> ProcessPoolExecutor:
    """At most so many processes: those that there are, since starting some takes long."""
    global _pool
    if _pool is None or _pool[0] > workers:
        if _pool is not None:
            _pool[1].shutdown()
        context = multiprocessing.get_context("spawn")
        _pool = workers, ProcessPoolExecutor(workers, mp_context=context)
    return _pool[1]


@lru_cache(maxsize=1)
def _few_weights(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    made = target.weights(target.num_experts)
    torch.cuda.empty_cache()
    return made


def _compile(target: Target, num_tokens: int, config: LayerConfig) -> None:
    # Kernels are not specialized on the number of experts, so a few experts stand for all.
    w13, w2 = _few_weights(target)
    rows = min(num_tokens, 2)
    x = torch.randn(rows, target.hidden_size, device=_DEVICE).to(getattr(torch, target.dtype))
    ids = torch.zeros(rows, target.top_k, dtype=torch.int32, device=_DEVICE)
    weights = torch.ones(rows, target.top_k, device=_DEVICE)
    # a candidate that cannot run is dropped when it is timed
    with torch.no_grad(), override(config), contextlib.suppress(Exception):
        fused_experts(x, w13, w2, weights, ids, backend="triton")
