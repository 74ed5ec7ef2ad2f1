"""What the rows of training.py say: a table of each case, and plots."""

from __future__ import annotations

from pathlib import Path

from cases import H200
from harness import format_table
from training_cases import SHAPES, TRAINS, Case
from training_peers import IMPLEMENTATIONS

PASSES = ("infer", "forward", "step")
# Okabe and Ito's colours, which colour-blind readers tell apart; shapes of the marks differ too.
STYLES = {
    "moe_ops": ("#D55E00", "o", "-"),
    "moe_ops recompute": ("#E69F00", "P", "-"),
    "moe_ops compiled": ("#D55E00", "s", ":"),
    "transformers": ("#56B4E9", "v", "-"),
    "transformers compiled": ("#56B4E9", "^", ":"),
    "liger": ("#009E73", "D", "-"),
    "sonicmoe": ("#0072B2", "p", "-"),
    "sonicmoe tuned": ("#0072B2", "*", "none"),
}


def key(row: dict) -> tuple:
    """What a row is about: its case and implementation."""
    fields = ("shape", "trains", "scheme", "num_tokens", "implementation")
    return tuple(row[field] for field in fields)


def order(key: tuple) -> tuple:
    """Sorts rows in the order of the tables of shapes, of what is trained and of peers."""
    shape, trains, scheme, tokens, name = key
    names = list(IMPLEMENTATIONS)
    return (TRAINS.index(trains), scheme, list(SHAPES).index(shape), tokens, names.index(name))


def title(row: dict) -> str:
    return " ".join(filter(None, (row["shape"], row["trains"], row["scheme"])))


def show(case: Case, rows: list[dict], flops_per_s: float | None) -> None:
    head = f"{title(vars(case))} T={case.num_tokens}"
    if flops_per_s:
        head += f", floor of a step {case.flops(True) / flops_per_s * 1e3:.3f} ms"
    print(head)
    header = ("", "infer ms", "forward ms", "step ms", "kept MiB", "peak MiB", "error", "rounds")
    cells = []
    for row in rows:
        if "reason" in row:
            print(f"  {row['implementation']}: {row['reason']}")
            continue
        peak = row["peak_bytes"]
        cells.append(
            (
                row["implementation"],
                *[f"{row[f'{what}_ms']:.3f}" for what in PASSES],
                f"{row['kept_bytes'] / 2**20:.0f}",
                "" if peak is None else f"{peak / 2**20:.0f}",
                f"{row['error']:.1e}" if "error" in row else "",
                row["rounds"],
            )
        )
    print(format_table(header, cells), flush=True)


def plots(rows: list[dict], path: Path) -> None:
    """TFLOP/s of steps that train all weights into `path`, and those of other steps beside it."""
    full = [row for row in rows if row["trains"] == "full"]
    others = [row for row in rows if row["trains"] != "full"]
    for what, part in (("", full), ("_frozen", others)):
        if part:
            plot(part, path.with_stem(path.stem + what))


def plot(rows: list[dict], path: Path) -> None:
    """A panel for each shape and for what is trained: TFLOP/s of a step over tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys(title(row) for row in rows))
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4 * columns + 0.5, 3.6 * lines + 0.6), squeeze=False, sharey=True
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    drawn = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        limit = H200.bf16_flops_per_s / 1e12
        drawn["a large bf16 product"] = axis.axhline(limit, color="black", linestyle="--")
        ticks = sorted({row["num_tokens"] for row in rows if title(row) == panel})
        for name in reversed(IMPLEMENTATIONS):  # ours last, on top
            points = []
            for row in rows:
                if (title(row), row["implementation"]) == (panel, name) and "step_ms" in row:
                    case = Case(row["shape"], row["trains"], row["num_tokens"], row["scheme"])
                    points.append((case.num_tokens, case.flops(True) / row["step_ms"] / 1e9))
            if points:
                color, marker, line = STYLES[name]
                (drawn[name],) = axis.plot(
                    *zip(*sorted(points), strict=True), color=color, marker=marker, linestyle=line
                )
        axis.set(title=panel, xlabel="tokens", xscale="log")
        axis.set_xticks(ticks, [f"{tokens // 1024}k" for tokens in ticks])
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
    for line in axes:
        line[0].set_ylabel("TFLOP/s of a training step")
    names = ["a large bf16 product", *[name for name in IMPLEMENTATIONS if name in drawn]]
    figure.legend(
        [drawn[name] for name in names],
        names,
        ncols=min(len(names), 2 * columns),
        loc="lower center",
        fontsize="small",
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.6 / figure.get_size_inches()[1], 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
