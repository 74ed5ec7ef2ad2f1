"""What the rows of expert_parallel.py say: a table, and a plot."""

from __future__ import annotations

import math
from pathlib import Path

from harness import format_table

NAMES = (
    "moe_ops one GPU",
    "moe_ops allgather_reducescatter",
    "moe_ops all_to_all",
    "moe_ops symmetric_memory",
    "moe_ops symmetric_memory, quantized",
    "moe_ops all_reduce",
    "transformers all_reduce",
    "transformers all_to_all",
    "sgl-deep-gemm fp8_mega_moe",
)
# Okabe and Ito's colours, which colour-blind readers tell apart; shapes of the marks differ too.
STYLES = {
    "moe_ops one GPU": ("#999999", "s", ":"),
    "moe_ops allgather_reducescatter": ("#E69F00", "P", "-"),
    "moe_ops all_to_all": ("#D55E00", "o", "-"),
    "moe_ops symmetric_memory": ("#009E73", "X", "-"),
    "moe_ops symmetric_memory, quantized": ("#000000", "x", "-"),
    "moe_ops all_reduce": ("#CC79A7", "D", "--"),
    "transformers all_reduce": ("#56B4E9", "v", "-"),
    "transformers all_to_all": ("#0072B2", "^", "--"),
    "sgl-deep-gemm fp8_mega_moe": ("#F0E442", "d", "-"),
}


def key(row: dict) -> tuple:
    """What a row is about: its case and implementation."""
    return row["shape"], row["scheme"], row["num_tokens"], row["implementation"]


def order(key: tuple) -> tuple:
    shape, scheme, tokens, name = key
    return shape, scheme, tokens, NAMES.index(name)


def title(row: dict) -> str:
    return f"{row['shape']} {row['scheme'] or 'bf16'}"


def show(rows: list[dict], runs: dict[str, dict]) -> None:
    """A line for each implementation of each case. `gain` is how many times as many tokens a
    second all GPUs have as one.
    """
    one = {
        key(row)[:3]: row["us"]
        for row in rows
        if row["implementation"] == NAMES[0] and "us" in row
    }
    header = (
        *("case", "tokens", "implementation", "us", "graph", "eager us"),
        *("dispatch us", "combine us", "gain", "floor us", "error"),
    )
    cells, reasons = [], {}
    for row in rows:
        if "reason" in row:
            reasons[f"{row['implementation']} ({title(row)}): {row['reason']}"] = None
            continue
        alone, numbers = (
            one.get(key(row)[:3]),
            [f"{row['us']:.1f}", "yes" if row["graph"] else "no"],
        )
        numbers += [
            f"{row[k]:.1f}" if k in row else "" for k in ("eager_us", "dispatch_us", "combine_us")
        ]
        numbers.append(f"{alone / row['us']:.2f}" if alone else "")
        numbers.append(f"{row['floor_us']:.1f}" if row.get("floor_us") else "")
        cells.append(
            (title(row), row["num_tokens"], row["implementation"], *numbers, f"{row['error']:.1e}")
        )
    print(format_table(header, cells), flush=True)
    for reason in reasons:
        print(f"  {reason}")


def plot(rows: list[dict], path: Path) -> None:
    """A panel for each shape and scheme: time of a layer over the tokens of one GPU."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if "us" in row]
    panels = list(dict.fromkeys(title(row) for row in rows))
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4.6 * columns + 0.5, 3.6 * lines + 0.6), squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    drawn = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        part = [row for row in rows if title(row) == panel]
        floors = {row["num_tokens"]: row["floor_us"] for row in part if row.get("floor_us")}
        if floors:
            (drawn["floor"],) = axis.plot(*zip(*sorted(floors.items()), strict=True), "k--")
        ticks = sorted({row["num_tokens"] for row in part})
        for name in reversed(NAMES):  # ours on top
            found = {r["num_tokens"]: r["us"] for r in part if r["implementation"] == name}
            if found:
                color, marker, line = STYLES[name]
                times = [found.get(tokens, math.nan) for tokens in ticks]  # no line past a gap
                (drawn[name],) = axis.plot(
                    ticks, times, color=color, marker=marker, linestyle=line
                )
        axis.set(title=panel, xlabel="tokens of a GPU", xscale="log", yscale="log")
        axis.set_xticks(ticks, [str(tokens) for tokens in ticks])
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
    for line in axes:
        line[0].set_ylabel("us of a layer")
    names = [name for name in ("floor", *NAMES) if name in drawn]
    figure.legend(
        [drawn[name] for name in names],
        names,
        ncols=min(len(names), 3),
        loc="lower center",
        fontsize="small",
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.7 / figure.get_size_inches()[1], 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
