"""Fair timing, errors, facts of the machine, and tables: what benchmarks share."""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def interleaved_ms(
    calls: Mapping[str, Callable[[int], object]], rounds: int, num_sets: int
) -> dict[str, list[float]]:
    """Time every call ``rounds`` times in turn (A B C A B C ...), in milliseconds.

    Each call gets the number of an input set. Neighbours in time never get the same set, so none
    finds its predecessor's weights in cache; each sees every set equally often when ``rounds`` is
    a multiple of ``num_sets``. The order rotates, so a peer that evicts the cache harms all alike.
    With one torch thread the clock is the process's CPU time, which a busy machine disturbs
    little.
    """
    clock = time.process_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    stride = max(1, num_sets // len(names))
    for step in range(-1, rounds):  # step -1 warms up
        for turn in range(len(names)):
            name = names[(turn + step) % len(names)]
            which = (step + names.index(name) * stride) % num_sets
            start = clock()
            calls[name](which)
            elapsed = (clock() - start) / 1e6
            if step >= 0:
                times[name].append(elapsed)
    return times


def capture(
    call: Callable[[int], Tensor], num_sets: int
) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A CUDA graph of one pass over the input sets, and the output of each set.

    The outputs stay alive, so that no later call writes over them. `call` must have run before:
    first calls compile, which capture does not survive.
    """
    graph = torch.cuda.CUDAGraph()
    # The outer context restores the stream where a failed capture does not.
    stream = torch.cuda.stream(torch.cuda.current_stream())
    # other threads, such as NCCL's watchdog, may ask for events
    with stream, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = [call(which) for which in range(num_sets)]
    return graph, outputs


def interleaved_replays_us(
    graphs: Mapping[str, torch.cuda.CUDAGraph],
    replays: int,
    num_sets: int,
    warm_up_seconds: float = 0.25,
) -> dict[str, list[float]]:
    """Replay every graph ``replays`` times, each round in another order: us a set, one figure a
    replay.

    In one order, whichever follows the graph that draws most power has the lowest clocks, and two
    graphs of the same kernels get different times. Rounds run untimed first until the clocks are
    up. The host never waits in between, so the GPU always has work queued and host time stays out
    of the events.
    """
    start = time.perf_counter()
    while time.perf_counter() - start < warm_up_seconds:
        for graph in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
    events: dict[str, list] = {name: [] for name in graphs}
    torch.cuda._sleep(4_000_000)  # cycles in which the host gets ahead
    order, shuffled = list(graphs), random.Random(0)
    for _ in range(replays):
        shuffled.shuffle(order)
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: [begin.elapsed_time(end) * 1e3 / num_sets for begin, end in pairs]
        for name, pairs in events.items()
    }


def relative_error(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||, computed in fp64."""
    reference = reference.double()
    return float((value.double() - reference).norm() / reference.norm())


def spread(times: Sequence[float]) -> float:
    """The distance of the quartiles of ``times`` over their median; 0 of fewer than four."""
    if len(times) < 4:
        return 0.0
    first, median, third = statistics.quantiles(times, n=4)
    return (third - first) / median


def load_of_a_processor() -> float:
    """Processes that wanted to run in the last minute, for each processor; 0 where the system does
    not say.
    """
    count = os.cpu_count() or 1
    return os.getloadavg()[0] / count if hasattr(os, "getloadavg") else 0.0


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median, minimum and lower quartile of ``times``, in the unit they came in."""
    quartile = statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]
    return {
        "median": round(statistics.median(times), 5),
        "min": round(min(times), 5),
        "p25": round(quartile, 5),
    }


def machine_facts() -> dict[str, Any]:
    """Processor, threads, GPU and versions, to stand beside every number."""
    facts: dict[str, Any] = {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def processor_name() -> str:
    """The processor as the kernel names it, with the widest bf16 or vector extension it has."""
    cpuinfo = Path("/proc/cpuinfo")
    name = platform.processor() or platform.machine()
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain-text table with right-aligned columns."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in cells
    )
