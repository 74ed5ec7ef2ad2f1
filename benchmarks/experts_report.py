"""What the rows of benchmarks/experts.py say: the table, means, worst cells, and plots of time
over floor."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from cases import ROUTINGS, SCHEMES, SHAPES
from harness import RESULTS, format_table
from peers import IMPLEMENTATIONS, MEASURED_ONCE, VLLM_NAME, VLLM_US
from records import OURS, Results

SMALL_TOKENS = 256  # means are taken up to here and above
WORST = 8
NAMES = (*IMPLEMENTATIONS, *MEASURED_ONCE, VLLM_NAME)
BACKENDS = tuple(name for name in IMPLEMENTATIONS if name.startswith(f"{OURS} "))
# Okabe and Ito's colours, which colour-blind readers tell apart; shapes of the marks differ too.
STYLES = {
    OURS: ("#D55E00", "o"),
    "moe_ops triton": ("#E69F00", "P"),
    "moe_ops deep_gemm": ("#009E73", "s"),
    "moe_ops deep_gemm_fp4": ("#56B4E9", "<"),
    "moe_ops flashinfer": ("#0072B2", "D"),
    "moe_ops cutlass": ("#CC79A7", "^"),
    "moe_ops torch": ("#999999", "X"),
    "HF grouped_mm": ("#56B4E9", "v"),
    "HF grouped_mm compiled": ("#0072B2", "^"),
    "HF batched_mm": ("#000000", "x"),
    "F.grouped_mm": ("#F0E442", "s"),
    "F.scaled_grouped_mm": ("#F0E442", "s"),
    "FlashInfer CUTLASS": ("#009E73", "D"),
    "vLLM CUTLASS": ("#56B4E9", "v"),
    "SonicMoE": ("#E69F00", "p"),
    "Marlin": ("#0072B2", "s"),
    "triton_kernels": ("#009E73", "^"),
    "humming": ("#CC79A7", "D"),
    "vLLM wna16": ("#000000", "x"),
    "DeepGEMM two GEMMs only": ("#CC79A7", "<"),
    VLLM_NAME: ("#000000", "*"),
}
ZIPF_BOUND = 1.1  # what time over floor may grow by under Zipf routing
MAX_SHOWN = 8.0  # times over the floor above this are left out of the plots

CellKey = tuple[str, str, str, int]  # shape, scheme, routing, M


def key(row: dict) -> tuple:
    """What a row is about: its cell and implementation."""
    fields = ("shape", "scheme", "routing", "num_tokens")
    return (*[row["case"][field] for field in fields], row["implementation"])


def order(key: tuple) -> tuple:
    """Sorts cells and rows: schemes, routings and shapes in the order of their tables, then M."""
    shape, scheme, routing, tokens, *name = key
    return (
        SCHEMES.index(scheme),
        ROUTINGS.index(routing),
        list(SHAPES).index(shape),
        tokens,
        *[NAMES.index(n) if n in NAMES else len(NAMES) for n in name],
    )


@functools.cache
def _vllm_sorts() -> dict[tuple[str, int], float]:
    """(shape, M) -> us of vLLM's sort on an H200, in front of the layer that its table times."""
    path = RESULTS / "vllm_sort_NVIDIA_H200.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["shape"], row["num_tokens"]): row["us"] for row in rows}


class View:
    """One cell's rows by implementation."""

    def __init__(self, results: Results, key: CellKey):
        self.key = key
        self.rows = {
            name: results.rows[(*key, name)]
            for name in (*IMPLEMENTATIONS, *MEASURED_ONCE)
            if (*key, name) in results.rows
        }
        first = self.rows.get(OURS) or next(iter(self.rows.values()))
        self.floor = first["floor_us"]
        gpu = results.runs[first["run"]]["machine"].get("gpu", "")
        self.on_h200 = "H200" in gpu

    def us(self, name: str) -> float | None:
        """Median us of an implementation; None if it was not measured."""
        if name == VLLM_NAME:  # measured under uniform routing on an H200 only
            shape, scheme, routing, tokens = self.key
            if not self.on_h200 or routing != "uniform":
                return None
            us = VLLM_US.get((shape, scheme), {}).get(tokens)
            return us if us is None else us + _vllm_sorts().get((shape, tokens), 0.0)
        row = self.rows.get(name, {})
        return row["us"]["median"] if "us" in row else None

    def backends(self) -> dict[str, float]:
        """Median us of this library's backends that were measured by name."""
        times = {name: self.us(name) for name in BACKENDS}
        return {name: us for name, us in times.items() if us is not None}

    def best_peer(self, table: bool = True) -> str | None:
        """The fastest whole layer that is not ours; `table` admits vLLM's."""
        times = {
            name: us
            for name in NAMES
            if not name.startswith(OURS) and (table or name != VLLM_NAME)
            if name not in IMPLEMENTATIONS or IMPLEMENTATIONS[name].whole_layer
            if (us := self.us(name)) is not None
        }
        return min(times, key=lambda name: times[name]) if times else None

    def ratio(self, table: bool = True) -> float | None:
        """Our time over the best peer's; below 1 we are faster."""
        ours, best = self.us(OURS), self.best_peer(table)
        return ours / (self.us(best) or 1) if ours and best else None

    def same_run(self) -> bool:
        """Whether we and the best peer were measured in one run, replayed in turn."""
        best = self.best_peer()
        return best in self.rows and self.rows[best]["run"] == self.rows[OURS]["run"]


def views(results: Results, keys: Collection[CellKey] | None = None) -> list[View]:
    """The cells of `keys` (all, if None), in the order of the table."""
    cells = {key[:4] for key in results.rows} if keys is None else set(keys)
    return [View(results, key) for key in sorted(cells, key=order)]


def table(results: Results, keys: Collection[CellKey] | None = None) -> str:
    """One line a cell: floor, every implementation's median us and error, ratio, share of the
    floor."""
    cells = views(results, keys)
    names = [name for name in NAMES if any(view.us(name) is not None for view in cells)]
    lines = []
    for view in cells:
        shape, scheme, routing, tokens = view.key
        line = [shape, scheme or "bf16", routing, tokens, number(view.floor)]
        for name in names:
            us = view.us(name)
            error = view.rows.get(name, {}).get("error")
            line.append("-" if us is None else number(us) + (f" {error:.0e}" if error else ""))
        ratio, ours = view.ratio(), view.us(OURS)
        mark = "" if ratio is None or view.same_run() else "*"
        line.append(view.best_peer() or "-")
        line.append("-" if ratio is None else f"{ratio:.2f}{mark}")
        line.append("-" if ours is None else f"{view.floor / ours:.0%}")
        lines.append(line)
    header = ["shape", "scheme", "routing", "M", "floor", *names, "best peer", "ours/best"]
    notes = [
        "median us a layer, then its relative error against fp64 with the bf16 weights; * not "
        "in one run",
        "DeepGEMM two GEMMs only: part of a layer, never the best peer",
        f"{VLLM_NAME}: measured elsewhere on an H200, "
        + ("its sort added as measured here" if _vllm_sorts() else "its sort left out"),
    ]
    return "\n".join([format_table([*header, "of floor"], lines), *notes])


def number(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def means(results: Results, keys: Collection[CellKey] | None = None) -> str:
    """Geometric means of ours / best peer, the worst cells, Zipf beside uniform, errors of
    schemes."""
    cells = views(results, keys)
    lines = []
    for scheme in SCHEMES:
        mine = [view for view in cells if view.key[1] == scheme and view.key[2] == "uniform"]
        for text, part in (
            (f"M <= {SMALL_TOKENS}", [v for v in mine if v.key[3] <= SMALL_TOKENS]),
            (f"M > {SMALL_TOKENS}", [v for v in mine if v.key[3] > SMALL_TOKENS]),
        ):
            lines += _mean_line(scheme or "bf16", text, part)
    compared = [(view.ratio(), view) for view in cells]
    compared = sorted(((r, v) for r, v in compared if r), key=lambda pair: -pair[0])
    for ratio, view in compared[:WORST]:
        lines.append(f"worst: {cell_name(view.key)}: {ratio:.3f}x of {view.best_peer()}")
    lines += _zipf_lines(cells)
    lines += _error_lines(cells)
    return "\n".join(lines)


ERRORS = {  # kinds of error in the rows, and what each is taken against
    "error": "the bf16 weights",
    "error_of_activations": "the dequantized weights",
    "error_of_kernel": "dequantized weights and rounded activations",
}


def _error_lines(cells: list[View]) -> list[str]:
    """Largest error of every implementation against each fp64 oracle."""
    lines = []
    for scheme in SCHEMES:
        for kind, oracle in ERRORS.items():
            largest: dict[str, float] = {}
            for view in cells:
                for name, row in view.rows.items():
                    if view.key[1] == scheme and kind in row:
                        largest[name] = max(row[kind], largest.get(name, 0))
            if largest:
                found = ", ".join(f"{name} {value:.1e}" for name, value in largest.items())
                lines.append(
                    f"{scheme or 'bf16'}: largest error against fp64 with {oracle}: {found}"
                )
    return lines


def _mean_line(scheme: str, text: str, cells: Iterable[View]) -> list[str]:
    parts = []
    for table_too, name in ((False, "best measured peer"), (True, f"best peer with {VLLM_NAME}")):
        ratios = [ratio for view in cells if (ratio := view.ratio(table_too))]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            parts.append(f"{mean:.3f}x of the {name} ({len(ratios)} cells)")
    return [f"{scheme} {text}, uniform, geometric mean: {'; '.join(parts)}"] if parts else []


def _zipf_lines(cells: list[View]) -> list[str]:
    """How our time over its floor changes when routing becomes Zipf; starred where it grows too
    much."""
    over = {view.key: ours / view.floor for view in cells if (ours := view.us(OURS))}
    lines = []
    for (shape, scheme, routing, tokens), value in over.items():
        uniform = over.get((shape, scheme, "uniform", tokens))
        if routing == "zipf" and uniform:
            lines.append(
                f"zipf: {shape} {scheme or 'bf16'} M={tokens}: {value:.2f} floors, uniform "
                f"{uniform:.2f}, {value / uniform - 1:+.1%}{'*' * (value > ZIPF_BOUND * uniform)}"
            )
    return lines


def cell_name(key: CellKey) -> str:
    shape, scheme, routing, tokens = key
    return f"{shape} {scheme or 'bf16'} {routing} M={tokens}"


def report(results: Results, folder: Path) -> None:
    """Print table and means of all rows, and draw plots for every scheme and routing into
    `folder`.

    One shows this library beside its peers. Where at least two of its backends were measured by
    name, another one shows these beside "auto".
    """
    print(table(results))
    print(means(results))
    print(backends_table(results))
    for scheme in SCHEMES:
        for routing in ROUTINGS:
            cells = [view for view in views(results) if view.key[1:3] == (scheme, routing)]
            named = (scheme or "bf16").replace(":", "_")  # no file system refuses that
            stem = f"{results.path.stem}_{named}_{routing}"
            peers = [name for name in NAMES if name not in BACKENDS]
            if any(name in view.rows for view in cells for name in peers):
                draw(cells, results, folder / f"{stem}.png", peers)
                print(folder / f"{stem}.png")
            compared = [view for view in cells if len(view.backends()) > 1]
            if compared:
                path = folder / f"{stem}_backends.png"
                draw(compared, results, path, (OURS, *BACKENDS))
                print(path)


def backends_table(results: Results) -> str:
    """One line a cell in which backends were measured by name: us of each, the fastest, and auto
    over it."""
    cells = [view for view in views(results) if len(view.backends()) > 1]
    names = [name for name in BACKENDS if any(name in view.backends() for view in cells)]
    lines = []
    for view in cells:
        times = view.backends()
        best = min(times, key=lambda name: times[name])
        ours = view.us(OURS)
        line = [view.key[0], view.key[1] or "bf16", *view.key[2:], number(view.floor)]
        line += [number(times[name]) if name in times else "-" for name in names]
        line += ["-" if ours is None else number(ours), best.removeprefix(f"{OURS} ")]
        lines.append([*line, "-" if ours is None else f"{ours / times[best]:.2f}"])
    if not lines:
        return "backends by name: none measured; --only " + " ".join(
            [f'"{name}"' for name in BACKENDS]
        )
    short = [name.removeprefix(f"{OURS} ") for name in names]
    header = [
        "shape",
        "scheme",
        "routing",
        "M",
        "floor",
        *short,
        "auto",
        "fastest",
        "auto/fastest",
    ]
    return format_table(header, lines)


def draw(cells: list[View], results: Results, path: Path, shown: Collection[str]) -> None:
    """Time over floor of the implementations `shown` against M, one panel a shape, the floor a
    line at 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(view.key[0] for view in cells))
    tokens = sorted({view.key[3] for view in cells})
    columns = min(3, len(shapes))
    rows = -(-len(shapes) // columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(4.6 * columns + 0.6, 3.7 * rows + 1.2), squeeze=False, sharey=True
    )
    drawn: dict[str, Any] = {}
    for panel in panels.flat[len(shapes) :]:
        panel.axis("off")
    for panel, shape in zip(panels.flat, shapes, strict=False):
        mine = {view.key[3]: view for view in cells if view.key[0] == shape}
        drawn["floor"] = panel.axhline(1, color="black", linestyle="--", linewidth=1.2)
        for name in reversed([name for name in NAMES if name in shown]):  # ours last, on top
            points = [
                (x, us / mine[M].floor)
                for x, M in enumerate(tokens)
                if M in mine and (us := mine[M].us(name)) is not None
            ]
            points = [(x, over) for x, over in points if over <= MAX_SHOWN]
            if points:
                color, marker = STYLES[name]
                ours = name == OURS
                (drawn[name],) = panel.plot(
                    *zip(*points, strict=True),
                    color=color,
                    marker=marker,
                    markersize=7 if ours or name == VLLM_NAME else 5.5,
                    linewidth=2.4 if ours else 1.2,
                    linestyle="none" if name == VLLM_NAME else "-",
                    markeredgecolor="black" if color == "#F0E442" else color,
                    markeredgewidth=0.5,
                    zorder=3 if ours or name == VLLM_NAME else 2,
                )
        panel.set_yscale("log", base=2)
        ticks = [1, 1.2, 1.5, 2, 3, 4, 6, 8]
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.set_yticks([], minor=True)
        panel.set_ylim(0.82, MAX_SHOWN * 1.05)
        panel.set_xticks(range(len(tokens)), [str(M) for M in tokens])
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.set_xlabel("tokens M")
        panel.tick_params(labelleft=True)
        layer = SHAPES[shape]
        local = f", 1 of {layer.ep_size} ranks" if layer.ep_size > 1 else ""
        panel.set_title(
            f"{shape}: E={layer.num_experts}{local} top_k={layer.top_k}\n"
            f"K={layer.hidden_size} I={layer.intermediate_size}",
            fontsize=10,
        )
    for row in panels:
        row[0].set_ylabel("time / floor")
    names = ["floor", *[name for name in NAMES if name in drawn]]
    labels = {
        "floor": "floor: experts hit / bandwidth, or FLOPs / peak",
        VLLM_NAME: f"vLLM (table, its sort {'added' if _vllm_sorts() else 'left out'})",
    }
    height = figure.get_size_inches()[1]
    figure.legend(
        [drawn[name] for name in names],
        [labels.get(name, name) for name in names],
        ncols=min(4, len(names)),
        loc="lower center",
        fontsize=9,
        frameon=False,
    )
    _, scheme, routing, _ = cells[0].key
    machine = results.runs[next(iter(cells[0].rows.values()))["run"]]["machine"]
    where = machine.get("gpu", f"dry run, {machine['processor']}")
    figure.suptitle(
        f"One expert layer over its floor, {scheme or 'bf16'}, {routing} routing: {where}, "
        f"torch {machine['torch']}",
        fontsize=11,
    )
    figure.tight_layout(rect=(0, 0.65 / height, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
