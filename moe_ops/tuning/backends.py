"""Times of all backends for a shape, by number of tokens, from which the tiers of `backend="auto"`
follow.

Whole layers are timed under CUDA-graph replay, with the weights and routing sets of the search for
configs (search.py). Graphs of all backends are replayed in turn, so that drifting clocks favour
none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moe_ops import backends as backends_module
from moe_ops import environment
from moe_ops.experts import explain, fused_experts
from moe_ops.tables import lookup, record
from moe_ops.tensors import prepare
from moe_ops.tuning.search import Bench, Target, captured, replay_us
from moe_ops.warmup import warmup

_REPLAYS = 15
_MAX_CALL_S = 0.1  # a slower layer is no candidate, and is not replayed


class Backends:
    """The backends that take a target, each with weights in its layout."""

    def __init__(self, target: Target):
        self.bench = Bench(target)
        self.bench.prepare(1)
        self.layers: dict[str, Callable[..., None]] = {}
        self.refused: dict[str, str] = {}  # name -> why
        x, _, ids = self.bench.inputs[0]
        for name in backends_module.list_backends():
            try:
                weights = laid_out(name, self.bench.w13, self.bench.w2, x, ids)
            except (ValueError, ImportError) as error:
                self.refused[name] = str(error)
            else:
                self.layers[name] = self._layer(name, *weights)

    def _layer(self, name: str, w13: torch.Tensor, w2: torch.Tensor) -> Callable[..., None]:
        def layer(_num_tokens: int = 0) -> None:  # of the sets that were prepared
            for x, weights, ids in self.bench.inputs:
                fused_experts(x, w13, w2, weights, ids, backend=name)

        return layer

    def times_us(self, num_tokens: int, names: list[str]) -> dict[str, float]:
        """Median microseconds a layer of each backend named, without those that fail or are far
        too slow.
        """
        self.bench.prepare(num_tokens)
        graphs = {}
        with torch.no_grad():
            for name in names:
                layer = self.layers[name]
                try:
                    warmup(layer, [num_tokens], show_progress=False)
                    start = time.perf_counter()
                    layer()
                    torch.cuda.synchronize()
                    if time.perf_counter() - start > _MAX_CALL_S * len(self.bench.inputs):
                        self.refused[name] = f"takes more than {_MAX_CALL_S * 1e3:.0f} ms a layer"
                        continue
                    graphs[name] = captured(layer)
                except Exception as error:
                    if "illegal" in str(error) or "assert" in str(error):
                        raise  # the device is lost
                    self.refused[name] = f"M={num_tokens}: {' '.join(str(error).split())[:200]}"
        times: dict[str, list[float]] = {name: [] for name in graphs}
        replay_us(list(graphs.values()), warm_up_seconds=0.25)
        for _ in range(_REPLAYS):
            for name, graph in graphs.items():
                times[name].append(replay_us([graph])[0] / len(self.bench.inputs))
        return {name: statistics.median(values) for name, values in times.items()}


def laid_out(
    backend: str, w13: torch.Tensor, w2: torch.Tensor, x: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in a layout that a backend takes for silu: the natural one, or that of `prepare`.

    Raises:
        ValueError, ImportError: it takes neither.
    """
    try:
        explain(x, w13, w2, ids, backend=backend)
    except ValueError:
        w13 = prepare(w13, backend, activation="silu")
        w2 = prepare(w2, backend)
        explain(x, w13, w2, ids, backend=backend)
    return w13, w2


def measure(
    target: Target, token_counts: list[int], path: Path, gpu: str, only: list[str], again: bool
) -> bool:
    """Time the backends at each number of tokens that the table lacks, and write it after each.

    Args:
        only: names of the backends to time; the times of others stay. If empty, all but torch that
            take the target.
        again: measure what the table has already, too.

    Returns:
        Whether nothing was left to measure, or something was measured.
    """
    facts = vars(target)
    backends = Backends(target)
    # Not torch, which defines what others compute: it dequantizes all weights to fp32, which takes
    # memory and minutes, and is always the slowest.
    names = [n for n in backends.layers if (n in only if only else n != "torch")]
    known = record.measured_backends(path, facts)
    todo = {}
    for M in token_counts:
        missing = [n for n in names if again or n not in known.get(M, {})]
        if missing:
            todo[M] = missing
    print(
        f"{target}: {', '.join(names)}; {len(todo)} of {len(token_counts)} M to measure",
        flush=True,
    )
    measured = 0
    for M in environment.progress_bar(list(todo), "timing backends"):
        # all of them, so that their times are comparable
        us = backends.times_us(M, names)
        measured += len(us)
        record.record_backends(path, gpu, facts, M, {**known.get(M, {}), **us}, versions())
        cells = ", ".join([f"{name} {value:.1f}" for name, value in us.items()])
        print(f"  M={M:5d}  {cells} us", flush=True)
    for name, reason in backends.refused.items():
        print(f"  not {name}: {reason}", flush=True)
    times = sorted(record.measured_backends(path, facts).items())
    tiers = lookup.crossovers(times, names)
    print("  auto: " + ", ".join([f"{n} {'on' if m < 0 else f'to M={m}'}" for m, n in tiers]))
    return bool(names) and (not todo or measured > 0)


def versions() -> dict[str, str]:
    """Versions of the installed libraries that backends use."""
    names = ("torch", *backends_module.distributions())
    found = {name: environment.version(name) for name in names}
    return {name: version for name, version in found.items() if version}
