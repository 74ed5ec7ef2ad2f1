"""What the rows of benchmarks/end_to_end.py say: the table of times and speed-ups, and its
plot."""

from __future__ import annotations

from pathlib import Path

from end_to_end_cases import AIMS, BUILT_IN, IMPLEMENTATIONS, MODELS, PROMPT_AIMS
from harness import format_table
from records import OURS, Results

# Okabe and Ito's colours, which colour-blind readers tell apart
COLORS = {"moe_ops": "#D55E00", "moe_ops fp8_block": "#0072B2"}


def key(row: dict) -> tuple:
    return row["model"], row["implementation"]


def order(key: tuple) -> tuple:
    return list(MODELS).index(key[0]), list(IMPLEMENTATIONS).index(key[1])


def ms(row: dict | None, cell: str) -> float | None:
    """Time of a row's cell; None if it was not measured."""
    return ((row or {}).get("cells", {}).get(cell) or {}).get("ms")


class View:
    """The rows of one model by implementation."""

    def __init__(self, results: Results, model: str):
        self.model = model
        self.rows = {key[1]: row for key, row in results.rows.items() if key[0] == model}

    def cells(self) -> list[str]:
        """Decoding by batch, then prefill."""
        names = {name for row in self.rows.values() for name in row.get("cells", {})}
        return sorted(names, key=lambda name: (name.split()[0], int(name.split()[1])))

    def speed_up(self, name: str, cell: str) -> float | None:
        """Time of transformers' best built-in implementation of the same run over this one's."""
        mine = ms(self.rows.get(name), cell)
        run = self.rows[name]["run"] if name in self.rows else None
        peers = [self.rows[peer] for peer in BUILT_IN if peer in self.rows]
        times = [t for row in peers if row["run"] == run and (t := ms(row, cell)) is not None]
        return min(times) / mine if mine and times else None

    def aim(self, name: str, cell: str) -> float | None:
        kind, size = cell.split()
        if kind == "prefill":
            return PROMPT_AIMS[self.model] if name == OURS else None
        return AIMS.get((self.model, name), {}).get(int(size))


def views(results: Results) -> list[View]:
    models = {model for model, _ in results.rows}
    return [View(results, model) for model in MODELS if model in models]


def table(results: Results) -> str:
    """One line a model and cell: ms and tokens/s of each implementation, speed-ups of ours beside
    their aims."""
    ours = [name for name in IMPLEMENTATIONS if name.startswith(OURS)]
    lines, notes = [], []
    for view in views(results):
        layers = next(iter(view.rows.values()))["layers"]
        for cell in view.cells():
            line = [view.model, layers, cell]
            for name in IMPLEMENTATIONS:
                found = view.rows.get(name, {}).get("cells", {}).get(cell, {})
                time = found.get("ms")
                text = f"{time:.3f} {found['tokens'] / time * 1e3:.0f}/s" if time else "-"
                if "experts_ms" in found:
                    text += f" (experts {found['experts_ms'] / time:.0%})"
                line.append(text)
            for name in ours:
                ratio, aim = view.speed_up(name, cell), view.aim(name, cell)
                missed = "" if ratio is None or aim is None or ratio >= aim else " missed"
                line.append("-" if ratio is None else f"{ratio:.2f}")
                line.append("-" if aim is None else f"{aim:.2f}{missed}")
            lines.append(line)
        for name, row in view.rows.items():
            reasons = {cell: found.get("reason") for cell, found in row.get("cells", {}).items()}
            reasons |= {"all": row["reason"]} if "reason" in row else {}
            notes += [f"not {view.model} {name} {c}: {why}" for c, why in reasons.items() if why]
            if name != BUILT_IN[0] and "difference" in row:
                what = f"experts differ from {BUILT_IN[0]}'s by"
                notes.append(f"{view.model} {name}: {what} {row['difference']:.1e}")
            if row.get("routers") == "moe_ops":
                notes.append(f"{view.model} {name}: routers too run through moe_ops")
    header = ["model", "layers", "cell", *[f"{name} ms" for name in IMPLEMENTATIONS]]
    header += [column for name in ours for column in (f"{name} speed-up", "aim")]
    notes.append(
        "speed-up: over the best of transformers' implementations in the same run, in bf16"
    )
    return "\n".join([format_table(header, lines), *notes])


def report(results: Results, folder: Path) -> None:
    """Print the table and draw the plot into `folder`."""
    print(table(results))
    path = folder / f"{results.path.stem}.png"
    draw(results, path)
    print(path)


def draw(results: Results, path: Path) -> None:
    """Speed-ups over transformers' best, a panel a model, a group of bars a cell, aims as short
    lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [view for view in views(results) if view.cells()]
    if not shown:
        return
    figure, panels = pyplot.subplots(
        1, len(shown), figsize=(max(3.4 * len(shown) + 0.8, 7.5), 3.9), squeeze=False, sharey=True
    )
    drawn = {}
    width = 0.8 / len(COLORS)
    for panel, view in zip(panels.flat, shown, strict=True):
        cells = view.cells()
        for turn, (name, color) in enumerate(COLORS.items()):
            for x, cell in enumerate(cells):
                ratio, aim = view.speed_up(name, cell), view.aim(name, cell)
                left = x - 0.4 + turn * width
                if ratio is not None:
                    bar = panel.bar(left, ratio, width, color=color, align="edge")
                    drawn[name] = bar
                    style = {"ha": "center", "color": "white", "fontsize": 8}
                    panel.text(left + width / 2, 0.03, f"{ratio:.2f}", **style)
                if aim is not None:
                    drawn["aim"] = panel.hlines(aim, left, left + width, color="black")
        drawn["best of transformers"] = panel.axhline(
            1, color="black", linestyle="--", linewidth=1
        )
        labels = [cell.replace("decode ", "batch ").replace(" ", "\n") for cell in cells]
        panel.set_xticks(range(len(cells)), labels, fontsize=8)
        panel.set_title(f"{view.model}, {next(iter(view.rows.values()))['layers']} layers")
    panels[0][0].set_ylabel("speed-up of a decode step, a prompt")
    figure.legend(
        list(drawn.values()),
        [f"{name} (built-in in bf16)" if "fp8" in name else name for name in drawn],
        ncols=len(drawn),
        loc="lower center",
        fontsize=8,
        frameon=False,
    )
    machine = results.runs[next(iter(shown[0].rows.values()))["run"]]["machine"]
    where = machine.get("gpu", f"dry run, {machine['processor']}")
    figure.suptitle(f"Compiled transformers models on moe_ops: {where}, torch {machine['torch']}")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
