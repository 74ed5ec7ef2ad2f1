"""What the benchmarks share: fair timing, the machine's measured limits, errors, JSON and the
table."""

from __future__ import annotations

import functools
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from moe_ops import environment
from moe_ops.backends.torch import layer
from moe_ops.bench.timing import (
    capture,
    format_table,
    interleaved_ms,
    interleaved_replays_us,
    machine_facts,
    processor_name,
    relative_error,
    summary,
)
from moe_ops.planning import bind

__all__ = [
    "capture",
    "format_table",
    "interleaved_ms",
    "interleaved_replays_us",
    "machine_facts",
    "processor_name",
    "relative_error",
    "summary",
]

RESULTS = Path(__file__).parent / "results"
WARM_UP, MIN_ROUNDS = 3, 5  # of times_ms


def gpu_limits() -> dict[str, float]:
    """What large operations reach now: a copy (bytes read plus written) and a bf16 matrix
    product."""
    source = torch.randn(1 << 28, device="cuda")
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(2))
    target = torch.empty_like(source)
    times = {}
    # torch.neg, not copy_: in a graph that becomes a memory-copy node, which reached 2.8 TB/s on
    # an H200 where kernels stream 4.3.
    copy = functools.partial(torch.neg, source, out=target)
    for name, call in (("copy", copy), ("matmul", lambda: a @ b)):
        call()
        graph, _ = capture(lambda _, call=call: call(), 4)
        times[name] = statistics.median(interleaved_replays_us({name: graph}, 5, 4)[name])
    return {
        "copy_tb_s": round(2 * source.nbytes / times["copy"] / 1e6, 3),
        "bf16_matmul_tflop_s": round(2 * 8192**3 / times["matmul"] / 1e6, 1),
    }


def times_ms(
    calls: dict[str, Callable[[], object]], rounds: int, seconds: float, cuda: bool
) -> tuple[dict[str, float], int]:
    """Medians of steps of milliseconds, and the number of rounds, which are fewer where `seconds`
    have passed. Each round has another order: whatever follows the call
    that draws most power has the lowest clocks, and of Mixtral's T = 16384 that was 5 %.
    """
    if not cuda:
        timed = {name: (lambda _, call=call: call()) for name, call in calls.items()}
        found = interleaved_ms(timed, rounds, 1)
        return {name: statistics.median(times) for name, times in found.items()}, rounds
    events: dict[str, list] = {name: [] for name in calls}
    order, shuffled = list(calls), random.Random(0)
    start, step = time.perf_counter(), -WARM_UP
    while step < min(rounds, MIN_ROUNDS) or (
        step < rounds and time.perf_counter() - start < seconds
    ):
        shuffled.shuffle(order)
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(10_000_000)  # 5 ms, in which the host launches the whole step
            begin.record()
            calls[name]()
            end.record()
            if step >= 0:
                events[name].append((begin, end))
        torch.cuda.synchronize()
        step += 1
    times = {n: [b.elapsed_time(e) for b, e in pairs] for n, pairs in events.items()}
    return {name: statistics.median(found) for name, found in times.items()}, step


def versions(*distributions: str) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    found = {name: environment.version(name) for name in distributions}
    return {name: version for name, version in found.items() if version}


def read_bandwidth_gb_s(num_bytes: int = 512 << 20) -> float:
    """Bytes a second of one streaming read of memory, by all torch threads, in GB/s."""
    data = torch.ones(num_bytes // 4)
    times = interleaved_ms({"sum": lambda _: data.sum()}, rounds=7, num_sets=1)["sum"]
    return num_bytes / min(times) / 1e6


def matmul_gflop_s(dtype: torch.dtype, size: int = 2048) -> float:
    """FLOPs a second of one square matrix product in ``dtype``, in GFLOP/s."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    times = interleaved_ms({"mm": lambda _: a @ b}, rounds=7, num_sets=1)["mm"]
    return 2 * size**3 / min(times) / 1e6


# by what `use_cpu_kernels` says, in names of results
INSTRUCTIONS = {1024: "AMX", 512: "AVX512", 128: "NEON", 2: "AVX2"}


def use_cpu_kernels(avx: int) -> int:
    """Let the CPU kernels use AVX of at most so many bits (2: AVX2; 1024: AMX beside AVX-512), and
    say which they use.
    """
    kernels = layer.kernels()
    if kernels is None:
        raise SystemExit("the CPU kernels are not built, or this processor lacks AVX2")
    layer.cpu.why_not()  # chooses the widest AVX, once
    bind.forget()  # shortcuts past what is chosen by these instructions
    used = kernels.moe_ops_cpu_experts_avx(avx)
    kernels.moe_ops_cpu_avx(used)
    return used


def write_json(name: str, content: Mapping[str, Any]) -> Path:
    """Write ``content`` to benchmarks/results/<name>.json and return the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
