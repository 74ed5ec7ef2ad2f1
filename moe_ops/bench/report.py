"""Measurements as a table and as a plot."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_ops.bench import timing
from moe_ops.bench.shapes import Shape

# above which a machine counts as busy: processes of others a processor, and `timing.spread`
MOST_LOAD, MOST_SPREAD = 1.0, 0.3


@dataclass
class Result:
    """Everything that was measured; `us` and `errors` by number of tokens and column."""

    name: str
    shape: Shape
    machine: dict[str, Any]
    peers: tuple[str, ...]
    us: dict[int, dict[str, float]] = field(default_factory=dict)
    errors: dict[int, dict[str, float]] = field(default_factory=dict)
    eager: set[str] = field(default_factory=set)  # columns that no CUDA graph could hold
    left_out: list[str] = field(default_factory=list)
    # by number of tokens and column: distance of the quartiles of repeats over their median
    spread: dict[int, dict[str, float]] = field(default_factory=dict)

    def gain(self, tokens: int, column: str) -> float | None:
        """How many times as fast as the best of the others a column is."""
        others = [us for name, us in self.us[tokens].items() if name in self.peers]
        us = self.us[tokens].get(column)
        return min(others) / us if others and us else None

    def busy(self) -> str | None:
        """Evidence that something else ran meanwhile, else None."""
        signs = []
        load = self.machine["load"] if self.machine["device"] == "cpu" else 0.0
        if load > MOST_LOAD:
            signs.append(f"{load:.1f} processes a processor wanted to run before")
        widest = max(
            [s for columns in self.spread.values() for s in columns.values()], default=0.0
        )
        if widest > MOST_SPREAD:
            signs.append(f"repeats of one call differ by {100 * widest:.0f} % between quartiles")
        return " and ".join(signs) or None


def format_result(result: Result) -> str:
    """The table as text."""
    columns = [name for name in _columns(result)]
    header = ["M", *[f"{name}{'*' if name in result.eager else ''}" for name in columns]]
    rows = []
    for M, us in result.us.items():
        cells = []
        for name in columns:
            gain = None if name in result.peers else result.gain(M, name)
            times = "" if gain is None else f" ({gain:.2f}x)"
            cells.append(f"{us[name]:.1f}{times}" if name in us else "-")
        rows.append([M, *cells])
    machine = result.machine.get("gpu") or result.machine["processor"]
    lines = [
        f"{result.name}: {result.shape}, on {machine}, torch {result.machine['torch']}",
        timing.format_table(header, rows),
        "us a layer, bf16 activations; (how many times as fast as the best of "
        f"{' and '.join(result.peers)})",
    ]
    if result.eager and result.machine["device"] == "cuda":
        lines.append("* called without a CUDA graph: it reads GPU memory on the host")
    worst = {
        name: max(errors[name] for errors in result.errors.values() if name in errors)
        for name in columns
    }
    text = ", ".join(f"{name} {error:.0e}" for name, error in worst.items())
    lines.append(f"relative error against fp64 at most: {text}")
    if busy := result.busy():
        lines.append(f"these times are not to be relied on: {busy}; run again on an idle machine")
    lines += [f"left out: {reason}" for reason in result.left_out]
    return "\n".join(lines)


def _columns(result: Result) -> list[str]:
    return list(dict.fromkeys(name for us in result.us.values() for name in us))


def draw(result: Result, path: Path) -> None:
    """Bars of microseconds by number of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = _columns(result)
    figure, panel = pyplot.subplots(figsize=(1.6 + 1.6 * len(result.us), 4))
    width = 0.85 / max(1, len(columns))
    greys = ["#9aa5b1", "#5b84b1"]
    reds = ["#d1495b", "#edae49", "#66a182", "#8d6a9f", "#2e4057"]
    for number, name in enumerate(columns):
        own = [c for c in columns if c not in result.peers]
        colour = greys[number % 2] if name in result.peers else reds[own.index(name) % len(reds)]
        points = [(i, us[name]) for i, us in enumerate(result.us.values()) if name in us]
        at = [i + (number - (len(columns) - 1) / 2) * width for i, _ in points]
        panel.bar(at, [us for _, us in points], width, label=name, color=colour)
    panel.set_yscale("log")
    panel.set_xticks(range(len(result.us)), [str(M) for M in result.us])
    panel.set_xlabel("tokens M")
    panel.set_ylabel("us a layer")
    machine = result.machine.get("gpu") or result.machine["processor"]
    panel.set_title(f"{result.name}: {result.shape}\n{machine}", fontsize=9)
    panel.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
