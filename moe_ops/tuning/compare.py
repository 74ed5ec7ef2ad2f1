"""What is chosen for a shape without a table beside the best tiles of a search, in one run."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_ops.kernels.configs import LayerConfig, fields_of
from moe_ops.tuning import search
from moe_ops.tuning.search import Bench, Target

# Times of candidates order them; the fastest of them are timed again, in turn with what is chosen,
# since the least of many noisy times is less than the time of any.
REPLAYS, FINALISTS, ROUNDS = 3, 4, 21
FEW_TOKENS, SETS_OF_MANY = 8, 2  # from more tokens on a set has more bytes than any cache


class Comparison(NamedTuple):
    """Microseconds of a layer by the config that is chosen, and by the best of a search."""

    chosen: LayerConfig
    chosen_us: float
    best: LayerConfig
    best_us: float
    timed: int  # configs

    @property
    def ratio(self) -> float:
        return self.chosen_us / self.best_us


def compare(
    bench: Bench, num_tokens: int, most: int | None = None, until: float = math.inf
) -> Comparison:
    """Time a layer as it is chosen and the candidates of the search.

    Args:
        most: of candidates that are ordered by an estimate, for each kind of block and product.
        until: `time.monotonic()` from which on no more candidates are timed.
    """
    if num_tokens <= FEW_TOKENS:
        bench.prepare(num_tokens)
    else:
        bench.prepare(num_tokens, SETS_OF_MANY)
    chosen = search.heuristic(bench)
    plan = search.search_space(bench.target, chosen, num_tokens)
    if most is not None and search.ordered(bench.target, chosen):
        plan = [(first[:most], second[:most]) for first, second in plan]
    search.compile_all(bench.target, num_tokens, [chosen, *search.pairs(plan)])

    def time_us(config: LayerConfig) -> float:
        late = time.monotonic() > until
        return math.inf if late else bench.time_us(config, 0.0, REPLAYS)

    found = search.times(plan, {chosen: bench.time_us(chosen, 0.25, REPLAYS)}, time_us)
    configs = [config for config, us in found.items() if us < math.inf]
    fastest = sorted(configs, key=lambda config: found[config])
    finalists = dict.fromkeys([chosen, *fastest[:FINALISTS]])
    graphs = {config: bench.graph(config) for config in finalists}
    run = {config: graph for config, graph in graphs.items() if graph is not None}
    search.replay_us(list(run.values()), 0.1)
    rounds = [search.replay_us(list(run.values())) for _ in range(ROUNDS)]
    sets = len(bench.inputs)
    medians = [statistics.median(times) / sets for times in zip(*rounds, strict=True)]
    us = dict(zip(run, medians, strict=True))
    best = min(us, key=lambda config: us[config])
    return Comparison(chosen, us[chosen], best, us[best], len(configs))


def _read(path: Path) -> dict[str, Any]:
    if path.exists():
        return json.loads(path.read_text())
    return {"gpu": torch.cuda.get_device_name(), "rows": []}


def _others(content: dict[str, Any], cell: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of other cells than this one."""
    return [row for row in content["rows"] if any(row[key] != cell[key] for key in cell)]


def measured(path: Path, target: Target, num_tokens: int) -> bool:
    """Whether a file of results has a cell."""
    content = _read(path)
    cell = {**asdict(target), "num_tokens": num_tokens}
    return len(_others(content, cell)) < len(content["rows"])


def write(path: Path, target: Target, num_tokens: int, found: Comparison) -> None:
    """Add a comparison to a file of results, in place of an earlier one."""
    import triton

    content, cell = _read(path), {**asdict(target), "num_tokens": num_tokens}
    rows = _others(content, cell)
    times = {"chosen_us": round(found.chosen_us, 2), "best_us": round(found.best_us, 2)}
    configs = {"chosen": fields_of(found.chosen), "best": fields_of(found.best)}
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    rows.append({**cell, **times, "timed": found.timed, **configs, **versions})
    lines = ",\n".join([json.dumps(row) for row in rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"gpu": {json.dumps(content["gpu"])}, "rows": [\n{lines}\n]}}\n')
