"""What results say: the table and the pictures of a file of results, and what documents show of
the committed ones.

    python benchmarks/report.py                 # say whether the documents are up to date
    python benchmarks/report.py --write         # bring them up to date
    python benchmarks/report.py --draw          # draw the pictures of several files anew
    python benchmarks/report.py FILE ...        # print a file's table, draw its pictures beside it

Nothing is measured here, and no GPU is needed. Of each kind of file, which its name begins with,
`KINDS` has the key and order of its rows, and what prints and draws it; `DOCUMENTS` has the blocks
of documents. Pictures need matplotlib.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import statistics
import string
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import backends_doc
import end_to_end_cases as models
import training_cases
from cases import H200, ROUTINGS, SCHEMES, SHAPES, Case
from harness import INSTRUCTIONS, RESULTS, format_table
from peers import IMPLEMENTATIONS, MEASURED_ONCE, PARTS_OF_LAYERS, VLLM_NAME, VLLM_US
from records import OURS, Results
from training_peers import IMPLEMENTATIONS as TRAINERS

from moe_ops.schemes import get_scheme

ROOT = Path(__file__).resolve().parent.parent
LAYERS = RESULTS / "experts_NVIDIA_H200.json"
LAYERS_ON_H100 = RESULTS / "experts_NVIDIA_H100_80GB_HBM3.json"
STEPS = RESULTS / "training_NVIDIA_H200.json"
STEPS_ON_H100 = RESULTS / "training_NVIDIA_H100_80GB_HBM3.json"
MODELS = RESULTS / "end_to_end_NVIDIA_H200.json"
PROMPTS = RESULTS / "prompts_NVIDIA_H200.json"
CPU_LAYERS = RESULTS / "cpu_layer_AVX512.json"
CPU_SCHEMES = RESULTS / "cpu_quantized_AMX.json"


def rows_of(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of a document."""
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *[f"| {' | '.join(row)} |" for row in rows]])


def number(value: float | None, digits: int = 1, below: float = 100) -> str:
    """Digits behind the point for numbers below a limit, none for others; "-" for None."""
    return "-" if value is None else f"{value:.{digits if value < below else 0}f}"


Column = str | Callable[[dict], object]  # a format of a row's fields, or a function of the row


def show(rows: Sequence[dict], columns: dict[str, Column]) -> None:
    """Print a line for each row; a field that it lacks leaves its column empty. Below stand the
    reasons of rows that were not measured."""

    def text(row: dict, column: Column) -> object:
        try:
            return column.format_map(row) if isinstance(column, str) else column(row)
        except (KeyError, TypeError, ZeroDivisionError):
            return ""

    measured = [row for row in rows if "reason" not in row]
    print(format_table([*columns], [[text(row, c) for c in columns.values()] for row in measured]))
    whys = {f"  {row['implementation']}: {row['reason']}": None for row in rows if "reason" in row}
    print(*whys, sep="\n", end="\n" * bool(whys), flush=True)


# --- pictures ------------------------------------------------------------------------------------


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


class Panels:
    """Panels in a grid, whose lines share one legend below: by name what was drawn."""

    def __init__(
        self,
        count: int,
        columns: int,
        size: tuple[float, float],
        more: tuple[float, float],
        sharey: bool = False,
    ) -> None:
        """Of so many columns at most; inches of a panel, and of what is beside all of them."""
        self.columns = min(columns, count)
        lines = -(-count // self.columns)
        width, height = size[0] * self.columns + more[0], size[1] * lines + more[1]
        self.height = height
        self.drawn: dict[str, Any] = {}
        self.figure, self.grid = pyplot().subplots(
            lines, self.columns, figsize=(width, height), squeeze=False, sharey=sharey
        )
        self.flat = self.grid.flat[:count]
        for panel in self.grid.flat[count:]:
            panel.axis("off")

    def save(
        self,
        path: Path,
        y_label: str,
        names: Iterable[str],
        below: float,  # inches of the legend
        columns: int,
        fontsize: Any,
        labels: dict[str, str] | None = None,
    ) -> None:
        for line in self.grid:
            line[0].set_ylabel(y_label)
        shown = [name for name in names if name in self.drawn]
        self.figure.legend(
            [self.drawn[name] for name in shown],
            [(labels or {}).get(name, name) for name in shown],
            ncols=min(len(shown), columns),
            loc="lower center",
            fontsize=fontsize,
            frameon=False,
        )
        self.figure.tight_layout(rect=(0, below / self.height, 1, 1))
        self.figure.savefig(path, dpi=120)
        pyplot().close(self.figure)
        print(path)


# --- layers of experts on a GPU (experts.py) -----------------------------------------------------

SMALL_TOKENS = 256  # means are taken up to here and above
NAMES = (*IMPLEMENTATIONS, *MEASURED_ONCE, VLLM_NAME)
BACKENDS = tuple(name for name in IMPLEMENTATIONS if name.startswith(f"{OURS} "))
# Okabe and Ito's colours, here and below, which colour-blind readers tell apart; shapes of the
# marks differ too.
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
    "vllm-gguf-plugin": ("#0072B2", "v"),
    "unsloth-zoo nf4": ("#56B4E9", "v"),
    "bitsandbytes, F.grouped_mm": ("#F0E442", "s"),
    "grouped-nf4-gemm": ("#CC79A7", "^"),
    "triton_kernels": ("#009E73", "^"),
    "humming": ("#CC79A7", "D"),
    "vLLM wna16": ("#000000", "x"),
    "DeepGEMM two GEMMs only": ("#CC79A7", "<"),
    VLLM_NAME: ("#000000", "*"),
}
MAX_SHOWN = 8.0  # times over the floor above this are left out of the plots
ERRORS = {  # kinds of error in the rows, and what each is taken against
    "error": "the bf16 weights",
    "error_of_activations": "the dequantized weights",
    "error_of_kernel": "dequantized weights and rounded activations",
}

CellKey = tuple[str, str, str, int]  # shape, scheme, routing, M


def layer_key(row: dict) -> tuple:
    """What a row is about: its cell and implementation."""
    fields = ("shape", "scheme", "routing", "num_tokens")
    return (*[row["case"][field] for field in fields], row["implementation"])


def layer_order(key: tuple) -> tuple:
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
    rows = rows_of(RESULTS / "vllm_sort_NVIDIA_H200.json")
    return {(row["shape"], row["num_tokens"]): row["us"] for row in rows}


class Cell:
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
        gpu = results.runs.get(first["run"], {}).get("machine", {}).get("gpu", "")
        self.on_h200 = "H200" in gpu

    def us(self, name: str | None) -> float | None:
        """Median us of an implementation; None if it was not measured."""
        if name == VLLM_NAME:  # measured under uniform routing on an H200 only
            shape, scheme, routing, tokens = self.key
            if not self.on_h200 or routing != "uniform":
                return None
            us = VLLM_US.get((shape, scheme), {}).get(tokens)
            return us if us is None else us + _vllm_sorts().get((shape, tokens), 0.0)
        row = self.rows.get(name or "", {})
        return row["us"]["median"] if "us" in row else None

    def times(self, names: Iterable[str]) -> dict[str, float]:
        """us of those of the names that were measured."""
        return {name: us for name in names if (us := self.us(name)) is not None}

    def fastest(self, names: Iterable[str]) -> str | None:
        times = self.times(names)
        return min(times, key=lambda name: times[name]) if times else None

    def best_peer(self, table: bool = True) -> str | None:
        """The fastest whole layer that is not ours; `table` admits vLLM's."""
        return self.fastest(
            name
            for name in NAMES
            if not name.startswith(OURS)
            and (table or name != VLLM_NAME)
            and name not in PARTS_OF_LAYERS
        )

    def ratio(self, peer: str | None, ours: str = OURS) -> float | None:
        """Our time over a peer's; below 1 we are faster."""
        mine, theirs = self.us(ours), self.us(peer)
        return mine / (theirs or 1) if mine and theirs else None

    def same_run(self) -> bool:
        """Whether we and the best peer were measured in one run, replayed in turn."""
        best = self.best_peer()
        return best in self.rows and self.rows[best]["run"] == self.rows[OURS]["run"]

    def __str__(self) -> str:
        shape, scheme, routing, tokens = self.key
        return f"{shape} {scheme or 'bf16'} {routing} {tokens}"


def layer_cells(results: Results, keys: Collection[CellKey] | None = None) -> list[Cell]:
    """The cells of `keys` (all, if None), in the order of the table."""
    found = {key[:4] for key in results.rows} if keys is None else set(keys)
    return [Cell(results, key) for key in sorted(found, key=layer_order)]


def show_layers(results: Results, keys: Collection[CellKey] | None = None) -> None:
    """Print a line for each cell: floor, every implementation's median us and error, our time over
    the best peer's and over that of our fastest backend, and the floor's share of it. A star: not
    in one run. Below stand the means and the largest errors."""
    cells = layer_cells(results, keys)
    names = [name for name in NAMES if any(cell.us(name) is not None for cell in cells)]
    lines = []
    for cell in cells:
        line = [*str(cell).split(), number(cell.floor)]
        for name in names:
            us, error = cell.us(name), cell.rows.get(name, {}).get("error")
            line.append(number(us) + (f" {error:.0e}" if error and us is not None else ""))
        peer, backend, ours = cell.best_peer(), cell.fastest(BACKENDS), cell.us(OURS)
        line += [peer or "-", number(cell.ratio(peer), 2) + "*" * (not cell.same_run())]
        line += [(backend or "-").removeprefix(f"{OURS} "), number(cell.ratio(backend), 2)]
        lines.append([*line, "-" if ours is None else f"{cell.floor / ours:.0%}"])
    header = ["shape", "scheme", "routing", "M", "floor", *names, "best peer", "ours/best"]
    print(format_table([*header, "fastest", "auto/fastest", "of floor"], lines))
    print(*_means(cells), *_errors(cells), sep="\n")


def _means(cells: list[Cell]) -> Iterable[str]:
    """Geometric means of our time over the best peer's, of few tokens and of many."""
    for scheme in SCHEMES:
        mine = [cell for cell in cells if cell.key[1:3] == (scheme, "uniform")]
        for few, text in ((True, "M <="), (False, "M >")):
            part = [cell for cell in mine if (cell.key[3] <= SMALL_TOKENS) == few]
            for table, peer in ((False, "measured peer"), (True, f"peer with {VLLM_NAME}")):
                if ratios := [r for cell in part if (r := cell.ratio(cell.best_peer(table)))]:
                    mean = statistics.geometric_mean(ratios)
                    yield (
                        f"{scheme or 'bf16'} {text} {SMALL_TOKENS}, uniform, geometric mean: "
                        f"{mean:.3f}x of the best {peer} ({len(ratios)} cells)"
                    )


def _errors(cells: list[Cell]) -> Iterable[str]:
    """Largest error of every implementation against each fp64 oracle."""
    for scheme in SCHEMES:
        for kind, oracle in ERRORS.items():
            largest: dict[str, float] = {}
            for cell in cells:
                for name, row in cell.rows.items():
                    if cell.key[1] == scheme and kind in row:
                        largest[name] = max(row[kind], largest.get(name, 0))
            if largest:
                found = ", ".join(f"{name} {value:.1e}" for name, value in largest.items())
                yield f"{scheme or 'bf16'}: largest error against fp64 with {oracle}: {found}"


def report_layers(results: Results, folder: Path) -> None:
    """Print all rows, and draw pictures for every scheme and routing into `folder`.

    One shows this library beside its peers. Where at least two of its backends were measured by
    name, another one shows these beside "auto".
    """
    show_layers(results)
    for scheme in SCHEMES:
        for routing in ROUTINGS:
            cells = [c for c in layer_cells(results) if c.key[1:3] == (scheme, routing)]
            named = (scheme or "bf16").replace(":", "_")  # no file system refuses that
            stem = f"{results.path.stem}_{named}_{routing}"
            peers = [name for name in NAMES if name not in BACKENDS]
            if any(name in cell.rows for cell in cells for name in peers):
                draw_layers(cells, results, folder / f"{stem}.png", peers)
            compared = [cell for cell in cells if len(cell.times(BACKENDS)) > 1]
            if compared:
                draw_layers(compared, results, folder / f"{stem}_backends.png", (OURS, *BACKENDS))


def draw_layers(cells: list[Cell], results: Results, path: Path, shown: Collection[str]) -> None:
    """Time over floor of the implementations `shown` against M, one panel a shape, the floor a
    line at 1."""
    shapes = list(dict.fromkeys(cell.key[0] for cell in cells))
    tokens = sorted({cell.key[3] for cell in cells})
    panels = Panels(len(shapes), 3, (4.6, 3.7), (0.6, 1.2), sharey=True)
    for panel, shape in zip(panels.flat, shapes, strict=True):
        mine = {cell.key[3]: cell for cell in cells if cell.key[0] == shape}
        panels.drawn["floor"] = panel.axhline(1, color="black", linestyle="--", linewidth=1.2)
        for name in reversed([name for name in NAMES if name in shown]):  # ours last, on top
            points = [
                (x, us / mine[M].floor)
                for x, M in enumerate(tokens)
                if M in mine and (us := mine[M].us(name)) is not None
            ]
            points = [(x, over) for x, over in points if over <= MAX_SHOWN]
            if points:
                color, marker = STYLES[name]
                on_top = name in (OURS, VLLM_NAME)
                (panels.drawn[name],) = panel.plot(
                    *zip(*points, strict=True),
                    color=color,
                    marker=marker,
                    markersize=7 if on_top else 5.5,
                    linewidth=2.4 if name == OURS else 1.2,
                    linestyle="none" if name == VLLM_NAME else "-",
                    markeredgecolor="black" if color == "#F0E442" else color,
                    markeredgewidth=0.5,
                    zorder=3 if on_top else 2,
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
    _, scheme, routing, _ = cells[0].key
    panels.figure.suptitle(
        f"One expert layer over its floor, {scheme or 'bf16'}, {routing} routing: "
        f"{machine_of(results, next(iter(cells[0].rows.values())))}",
        fontsize=11,
    )
    labels = {
        "floor": "floor: experts hit / bandwidth, or FLOPs / peak",
        VLLM_NAME: f"vLLM (table, its sort {'added' if _vllm_sorts() else 'left out'})",
    }
    panels.save(path, "time / floor", ("floor", *NAMES), 0.65, 4, 9, labels)


def machine_of(results: Results, row: dict) -> str:
    """Where a row was measured, and with which torch."""
    machine = results.runs[row["run"]]["machine"]
    where = machine.get("gpu", f"dry run, {machine['processor']}")
    return f"{where}, torch {machine['torch']}"


# --- the same layers in documents ----------------------------------------------------------------

EIGHT_BITS = ("fp8_channel", "fp8_tensor_static", "int4_w4a8")
EIGHT_BITS_SHAPES = {"qwen3": "Qwen3", "mixtral": "Mixtral", "dsv3": "DeepSeek-V3"}
EIGHT_BITS_PEERS = {
    "vLLM CUTLASS": "vLLM",
    "FlashInfer CUTLASS": "FlashInfer",
    "F.scaled_grouped_mm": "torch",
}
COLUMNS = {OURS: "`auto`", "moe_ops triton": "`triton`", "moe_ops cutlass": "`cutlass`"}
COLUMNS |= EIGHT_BITS_PEERS
# "auto" was timed on weights prepared for this backend. As they are, `triton` alone takes them.
PREPARED = {"int4_w4a8": "cutlass"}
WEIGHT_ONLY = (
    *("int4_w4a16:g128", "int4_w4a16:g128:zp", "int4_w4a16:g32", "mxfp4_w4a16", "nvfp4_w4a16"),
    *("int8_w8a16:channel", "fp8_w8a16:channel"),
)
WEIGHT_ONLY_SHAPES = {
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "gptoss20_bias": "gpt-oss-20b",
    "gptoss120_bias": "gpt-oss-120b",
    "phi35": "Phi-3.5-MoE",
    "qwen3next": "Qwen3-Next",
}
WEIGHT_ONLY_PEERS = {
    "Marlin": "Marlin",
    "triton_kernels": "triton_kernels",
    "humming": "humming",
    "vLLM wna16": "wna16",
}
# GGUF's types and nf4: of each the scheme of as many bits that stands beside it
FILE_TYPES = {
    **dict.fromkeys(("Q4_K", "IQ4_XS", "IQ4_NL", "nf4"), "int4_w4a16:g32"),
    **dict.fromkeys(("Q5_K", "Q6_K", "Q8_0"), "int8_w8a16:channel"),
}
FILE_SHAPES = {"qwen3": "Qwen3", "gptoss20": "gpt-oss-20b"}
FILE_PEERS = {
    "vllm-gguf-plugin": "vLLM",
    "unsloth-zoo nf4": "unsloth",
    "bitsandbytes, F.grouped_mm": "bitsandbytes",
    "grouped-nf4-gemm": "grouped-nf4-gemm",
}


def timed_cells(
    path: Path, scheme: str, shapes: Collection[str], names: Collection[str]
) -> list[Cell]:
    """The cells of a scheme under uniform routing in which any of the names was timed, in the
    order of shapes and tokens."""
    results = Results(path, layer_key, layer_order)
    order = list(shapes)
    keys = {key[:4] for key in results.rows if key[:3] in [(s, scheme, "uniform") for s in order]}
    found = [Cell(results, key) for key in sorted(keys, key=lambda k: (order.index(k[0]), k[3]))]
    return [cell for cell in found if cell.times(names)]


def whole_layers(path: Path = LAYERS) -> str | None:
    """A table for each scheme: microseconds of each backend and peer in each cell. None where no
    result is there."""
    parts = []
    for scheme in EIGHT_BITS:
        cells = timed_cells(path, scheme, EIGHT_BITS_SHAPES, COLUMNS)
        names = [name for name in COLUMNS if any(cell.times([name]) for cell in cells)]
        if not names:
            continue
        lines, last = [], ""
        for cell in cells:
            shape, *_, tokens = cell.key
            least = min(cell.times(names).values())
            texts = [
                f"**{number(us)}**" if us == least else number(us) for us in map(cell.us, names)
            ]
            named, last = EIGHT_BITS_SHAPES[shape] if shape != last else "", shape
            floor = next(iter(n for n in cell.rows if n in COLUMNS and "us" in cell.rows[n]))
            lines.append([named, str(tokens), number(cell.rows[floor]["floor_us"]), *texts])
        table = markdown(["", "M", "floor", *[COLUMNS[name] for name in names]], lines)
        parts.append(f"{scheme}:\n\n{table}")
    return "\n\n".join(parts) or None


def by_tokens(texts: dict[tuple[str, str], dict[int, str]], shapes: dict[str, str]) -> str:
    """A row for each scheme and shape, and a column for each number of tokens."""
    tokens = sorted({M for row in texts.values() for M in row})
    lines = [
        [scheme, shapes[shape], *[row.get(M, "-") for M in tokens]]
        for (scheme, shape), row in texts.items()
    ]
    # an empty cell of a header has one space here
    return markdown(["scheme", "", *[f"M = {M}" for M in tokens]], lines).replace("|  |", "| |", 1)


def eight_bits(path: Path = LAYERS) -> str:
    """A table of `auto` over the fastest peer in each cell, and the plots of the schemes."""
    ours_of = {s: (s, f"{OURS} triton" if s in PREPARED else OURS) for s in EIGHT_BITS}
    ours_of |= {f"{s}, prepared for `{b}`": (s, OURS) for s, b in PREPARED.items()}
    texts: dict[tuple[str, str], dict[int, str]] = {}
    for title, (scheme, ours) in ours_of.items():
        for cell in timed_cells(path, scheme, EIGHT_BITS_SHAPES, COLUMNS):
            peer = cell.fastest(EIGHT_BITS_PEERS)
            if (ratio := cell.ratio(peer, ours)) is not None and peer is not None:
                row = texts.setdefault((title, cell.key[0]), {})
                row[cell.key[3]] = f"{ratio:.2f} {EIGHT_BITS_PEERS[peer]}"
    if not texts:
        return "No results are committed yet."
    plots = [
        f"![One expert layer in {scheme} on an H200](../benchmarks/results/{name})"
        for scheme in EIGHT_BITS
        if (path.parent / (name := f"{path.stem}_{scheme}_uniform.png")).exists()
    ]
    return "\n\n".join([by_tokens(texts, EIGHT_BITS_SHAPES), "\n".join(plots)]).rstrip()


def weight_only(path: Path = LAYERS) -> str:
    """A table of `auto` in weight-only schemes: microseconds, the floor's share of them, and their
    ratio to the fastest peer, where one was measured in the cell."""
    texts: dict[tuple[str, str], dict[int, str]] = {}
    for scheme in WEIGHT_ONLY:
        for cell in timed_cells(path, scheme, WEIGHT_ONLY_SHAPES, (OURS, *WEIGHT_ONLY_PEERS)):
            ours, peer = cell.us(OURS), cell.fastest(WEIGHT_ONLY_PEERS)
            if ours is None or peer is None:
                continue
            share = f"{cell.rows[OURS]['floor_us'] / ours:.0%}".replace("%", " %")
            text = f"{number(ours)}, {share}, {cell.ratio(peer):.2f} {WEIGHT_ONLY_PEERS[peer]}"
            texts.setdefault((scheme, cell.key[0]), {})[cell.key[3]] = text
    return by_tokens(texts, WEIGHT_ONLY_SHAPES)


def file_types(path: Path = LAYERS) -> str:
    """A table of `auto` on weights of GGUF's types and nf4: microseconds, the floor's share, and
    the ratios to the scheme beside it, to bf16 and to the fastest peer; then the errors that
    kernels add."""
    results = Results(path, layer_key, layer_order)
    texts: dict[tuple[str, str], dict[int, str]] = {}
    errors = []
    for name, beside in FILE_TYPES.items():
        scheme = get_scheme(name.lower()).name
        for cell in timed_cells(path, scheme, FILE_SHAPES, (OURS,)):
            shape, _, routing, tokens = cell.key
            row = cell.rows[OURS]
            us, peer = row["us"]["median"], cell.fastest(FILE_PEERS)
            parts = [number(us), f"{row['floor_us'] / us:.0%}".replace("%", " %")]
            for other in (beside, ""):
                reference = results.rows.get((shape, other, routing, tokens, OURS), {})
                parts.append(f"{us / reference['us']['median']:.2f}" if "us" in reference else "-")
            if peer is not None:
                parts.append(f"{cell.ratio(peer):.2f} {FILE_PEERS[peer]}")
            texts.setdefault((name, shape), {})[tokens] = ", ".join(parts)
            errors.append(row["error_of_activations"])
    if not texts:
        return "No results are committed yet."
    table = by_tokens(texts, FILE_SHAPES).replace("| scheme |", "| type |", 1)
    told = f"{min(errors):.2g} to {max(errors):.2g}"
    return f"{table}\n\nErrors against fp64 with the same weights: {told}."


# --- whole models (end_to_end.py) ----------------------------------------------------------------

FP8 = "moe_ops fp8_block"
MODEL_COLORS = {OURS: "#D55E00", FP8: "#0072B2"}
MODEL_NAMES = {
    "qwen3": "Qwen3-\n30B-A3B",
    "mixtral": "Mixtral-\n8x7B",
    "dsv3": "DeepSeek-\nV3",
    "gptoss": "gpt-oss-\n20b",
}
BATCHES, PROMPT = (1, 8, 64), "prefill 4096"


def model_key(row: dict) -> tuple:
    return row["model"], row["implementation"]


def model_order(key: tuple) -> tuple:
    return list(models.MODELS).index(key[0]), list(models.IMPLEMENTATIONS).index(key[1])


class Model:
    """The rows of one model by implementation."""

    def __init__(self, results: Results, name: str):
        self.name = name
        self.rows = {key[1]: row for key, row in results.rows.items() if key[0] == name}

    def cells(self) -> list[str]:
        """Decoding by batch, then prefill."""
        names = {name for row in self.rows.values() for name in row.get("cells", {})}
        return sorted(names, key=lambda name: (name.split()[0], int(name.split()[1])))

    def ms(self, name: str, cell: str) -> float | None:
        """None if it was not measured."""
        return (self.rows.get(name, {}).get("cells", {}).get(cell) or {}).get("ms")

    def speed_up(self, name: str, cell: str) -> float | None:
        """Time of transformers' best built-in implementation of the same run over this one's."""
        mine = self.ms(name, cell)
        run = self.rows[name]["run"] if name in self.rows else None
        peers = [peer for peer in models.BUILT_IN if self.rows.get(peer, {}).get("run") == run]
        times = [time for peer in peers if (time := self.ms(peer, cell)) is not None]
        return min(times) / mine if mine and times else None

    def aim(self, name: str, cell: str) -> float | None:
        kind, size = cell.split()
        if kind == "prefill":
            return models.PROMPT_AIMS[self.name] if name == OURS else None
        return models.AIMS.get((self.name, name), {}).get(int(size))


def models_of(results: Results) -> list[Model]:
    found = {model for model, _ in results.rows}
    return [Model(results, model) for model in models.MODELS if model in found]


def show_models(results: Results) -> None:
    """Print a line for each model, implementation and cell: ms, tokens/s, the experts' share, and
    the speed-up over transformers' best in bf16 of the same run beside the one aimed at."""
    rows: list[dict] = []
    for model in models_of(results):
        for name, row in model.rows.items():
            for cell in model.cells():
                found = row | row.get("cells", {}).get(cell, {}) | {"cell": cell}
                found["speed_up"], found["aim"] = model.speed_up(name, cell), model.aim(name, cell)
                rows.append(found)
    columns: dict[str, Column] = {
        **{name: f"{{{name}}}" for name in ("model", "layers", "cell", "implementation")},
        "routers": "{routers}",
        "ms": "{ms:.3f}",
        "tokens/s": lambda row: round(row["tokens"] / row["ms"] * 1e3),
        "experts": lambda row: f"{row['experts_ms'] / row['ms']:.0%}",
        "experts differ": "{difference:.1e}",
        "speed-up": "{speed_up:.2f}",
        "aim": "{aim:.2f}",
    }
    show(rows, columns)


def report_models(results: Results, folder: Path) -> None:
    show_models(results)
    draw_models(results, folder / f"{results.path.stem}.png")


def draw_models(results: Results, path: Path) -> None:
    """Speed-ups over transformers' best, a panel a model, a group of bars a cell, aims as short
    lines."""
    shown = [model for model in models_of(results) if model.cells()]
    if not shown:
        return
    figure, panels = pyplot().subplots(
        1, len(shown), figsize=(max(3.4 * len(shown) + 0.8, 7.5), 3.9), squeeze=False, sharey=True
    )
    drawn = {}
    width = 0.8 / len(MODEL_COLORS)
    for panel, model in zip(panels.flat, shown, strict=True):
        cells = model.cells()
        for turn, (name, color) in enumerate(MODEL_COLORS.items()):
            for x, cell in enumerate(cells):
                ratio, aim = model.speed_up(name, cell), model.aim(name, cell)
                left = x - 0.4 + turn * width
                if ratio is not None:
                    drawn[name] = panel.bar(left, ratio, width, color=color, align="edge")
                    style = {"ha": "center", "color": "white", "fontsize": 8}
                    panel.text(left + width / 2, 0.03, f"{ratio:.2f}", **style)
                if aim is not None:
                    drawn["aim"] = panel.hlines(aim, left, left + width, color="black")
        drawn["best of transformers"] = panel.axhline(
            1, color="black", linestyle="--", linewidth=1
        )
        labels = [cell.replace("decode ", "batch ").replace(" ", "\n") for cell in cells]
        panel.set_xticks(range(len(cells)), labels, fontsize=8)
        panel.set_title(f"{model.name}, {next(iter(model.rows.values()))['layers']} layers")
    panels[0][0].set_ylabel("speed-up of a decode step, a prompt")
    figure.legend(
        list(drawn.values()),
        [f"{name} (built-in in bf16)" if "fp8" in name else name for name in drawn],
        ncols=len(drawn),
        loc="lower center",
        fontsize=8,
        frameon=False,
    )
    where = machine_of(results, next(iter(shown[0].rows.values())))
    figure.suptitle(f"Compiled transformers models on moe_ops: {where}")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
    print(path)


def speed_ups(cell: str) -> dict[str, list[float]]:
    """By model how many times as fast a cell is as transformers' best: in bf16, and with experts
    in fp8."""
    results = Results(MODELS, model_key, model_order)
    found: dict[str, list[float]] = {}
    for name in MODEL_NAMES:
        model = Model(results, name)
        ratios = [model.speed_up(ours, cell) for ours in (OURS, FP8)]
        if len({row["run"] for row in model.rows.values()}) != 1 or None in ratios:
            raise ValueError(f"{MODELS.name}: times of {name} are of several runs, or missing")
        found[name] = ratios  # type: ignore[assignment]
    return found


def whole_models() -> str:
    """A row for each model: how many times as fast as transformers' best it decodes, and reads a
    prompt, in bf16 and with experts in fp8."""
    names = [*[f"batch {batch}" for batch in BATCHES], "prompt"]
    by_cell = [speed_ups(cell) for cell in (*[f"decode {batch}" for batch in BATCHES], PROMPT)]
    lines = [
        [title.replace("\n", ""), *[f"{of[model][i]:.2f}" for i in (0, 1) for of in by_cell]]
        for model, title in MODEL_NAMES.items()
    ]
    return markdown(["", *names, *[f"fp8, {name}" for name in names]], lines)


def prompts() -> str:
    """Of each model whose prompts were timed alone: the experts' share of the time and the
    speed-up, by implementation."""
    results = Results(PROMPTS, model_key, model_order)
    names = {name: name.replace(" ", ", ") for name in ("grouped_mm", OURS, FP8)}
    lines = []
    for model in models_of(results):
        (cell,) = model.cells()
        texts = []
        for name in names:
            found = model.rows[name]["cells"][cell]
            share = f"experts {100 * found['experts_ms'] / found['ms']:.0f} %"
            ratio = f"{model.speed_up(name, cell):.2f}, {share}"
            texts.append(ratio if name != "grouped_mm" else share)
        lines.append([MODEL_NAMES[model.name].replace("\n", ""), *texts])
    return markdown(["", *names.values()], lines)


def gains() -> str:
    """A row for each number of README.md: geometric means, and what they are of."""

    def mean(ratios: list[float]) -> str:
        return f"**{statistics.geometric_mean(ratios):.1f} times**"

    def between(ratios: list[float]) -> str:
        return f"{min(ratios):.1f} to {max(ratios):.1f}"

    decoding = [ratios for batch in BATCHES for ratios in speed_ups(f"decode {batch}").values()]
    bf16, fp8 = ([ratios[i] for ratios in decoding] for i in (0, 1))
    names = (OURS, "Marlin")
    cells = timed_cells(LAYERS, "int4_w4a16:g128", WEIGHT_ONLY_SHAPES, names)
    int4 = [ratio for cell in cells if (ratio := cell.ratio(OURS, "Marlin"))]
    cpu = []
    for row in rows_of(CPU_LAYERS):
        ms = {name: times["median"] for name, times in row["ms"].items()}
        if row["case"]["dtype"] == "bf16":
            ours = ms.pop(OURS)
            cpu.append(min(ms.values()) / ours)
    return markdown(
        ["speed-up", "of what", "over whom"],
        [
            (
                f"{mean(bf16)} in bf16, {mean(fp8)} with experts in fp8",
                f"decoding four models on an H200: {between(bf16)} and {between(fp8)}",
                "transformers' best, compiled",
            ),
            (
                f"{mean(int4)} in int4",
                "an expert layer of four models on an H200, 1 to 1024 tokens: " + between(int4),
                "Marlin, as vLLM calls it",
            ),
            (
                f"{mean(cpu)} on a CPU",
                "an expert layer in bf16 on two cores with AVX-512, 1 to 512 tokens: "
                + between(cpu),
                "transformers' best",
            ),
        ],
    )


def draw_decoding(path: Path) -> None:
    """README.md's picture: decoding speed over transformers' best, a panel for each batch, three
    bars a model."""
    bars = {
        "transformers, its best": "#999999",
        "moe_ops, bf16": "#D55E00",
        "moe_ops, experts in fp8": "#0072B2",
    }
    figure, panels = pyplot().subplots(1, len(BATCHES), figsize=(11, 3.4), sharey=True)
    width = 0.8 / len(bars)
    for panel, batch in zip(panels, BATCHES, strict=True):
        for place, ratios in enumerate(speed_ups(f"decode {batch}").values()):
            for turn, (name, color) in enumerate(bars.items()):
                x, ratio = place - 0.4 + (turn + 0.5) * width, [1.0, *ratios][turn]
                label = name if place == 0 else None
                panel.bar(x, ratio, 0.94 * width, color=color, label=label)
                if turn:
                    style: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 9}
                    panel.text(x, ratio + 0.03, f"{ratio:.1f}", **style)
        panel.set_title(f"{batch} sequence{'s' if batch > 1 else ''}", fontsize=12)
        panel.set_xticks(range(len(MODEL_NAMES)), list(MODEL_NAMES.values()), fontsize=9.5)
        panel.set_ylim(0, 3.1)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(length=0)
    panels[0].set_ylabel("speed, transformers = 1", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(bars), loc="upper center", frameon=False, fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.91))
    figure.savefig(path, dpi=130)


# --- training steps (training.py) ----------------------------------------------------------------

PASSES = ("infer", "forward", "step")
TRAINER_STYLES = {
    "moe_ops": ("#D55E00", "o", "-"),
    "moe_ops recompute": ("#E69F00", "P", "-"),
    "moe_ops compiled": ("#D55E00", "s", ":"),
    "transformers": ("#56B4E9", "v", "-"),
    "transformers compiled": ("#56B4E9", "^", ":"),
    "liger": ("#009E73", "D", "-"),
    "sonicmoe": ("#0072B2", "p", "-"),
    "sonicmoe tuned": ("#0072B2", "*", "none"),
}
STEP_SHAPES = {
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "olmoe": "OLMoE",
    "gptoss20": "gpt-oss-20b",
    "qwen3next": "Qwen3-Next",
}
STEP_COLUMNS = {
    "moe_ops": "moe_ops",
    "moe_ops compiled": "compiled",
    "transformers": "transformers",
    "transformers compiled": "compiled",
    "liger": "Liger",
    "sonicmoe": "SonicMoE",
    "sonicmoe tuned": "its best of 5 tiles",
}


def step_key(row: dict) -> tuple:
    """What a row is about: its case and implementation."""
    fields = ("shape", "trains", "scheme", "num_tokens", "implementation")
    return tuple(row[field] for field in fields)


def step_order(key: tuple) -> tuple:
    """Sorts rows in the order of the tables of shapes, of what is trained and of peers."""
    shape, trains, scheme, tokens, name = key
    trained = training_cases.TRAINS.index(trains)
    return (
        *(trained, scheme, list(training_cases.SHAPES).index(shape), tokens),
        list(TRAINERS).index(name),
    )


def step_case(row: dict) -> training_cases.Case:
    return training_cases.Case(row["shape"], row["trains"], row["num_tokens"], row["scheme"])


def step_title(row: dict) -> str:
    return " ".join(filter(None, (row["shape"], row["trains"], row["scheme"])))


STEP_TEXTS: dict[str, Column] = {
    "": "{implementation}",
    **{f"{what} ms": f"{{{what}_ms:.3f}}" for what in PASSES},
    "kept MiB": lambda row: round(row["kept_bytes"] / 2**20),
    "peak MiB": lambda row: round(row["peak_bytes"] / 2**20),
    "error": "{error:.1e}",
    "rounds": "{rounds}",
}


def show_steps(
    case: training_cases.Case, rows: list[dict], flops_per_s: float | None = None
) -> None:
    """Print the rows of one case, and its floor at a rate of products."""
    floor = ""
    if flops_per_s:
        floor = f", floor of a step {case.flops(True) / flops_per_s * 1e3:.3f} ms"
    print(f"{step_title(vars(case))} T={case.num_tokens}{floor}")
    show(rows, STEP_TEXTS)


def report_steps(results: Results, folder: Path) -> None:
    """Print all rows, those of a case together; draw steps that train all weights, and others
    beside them."""
    by_case: dict[training_cases.Case, list[dict]] = {}
    for row in results.rows.values():
        by_case.setdefault(step_case(row), []).append(row)
    for case, rows in by_case.items():
        show_steps(case, rows)
    for full, suffix in ((True, ""), (False, "_frozen")):
        part = [row for row in results.rows.values() if (row["trains"] == "full") == full]
        if part:
            draw_steps(part, folder / f"{results.path.stem}{suffix}.png")


def draw_steps(rows: list[dict], path: Path) -> None:
    """A panel for each shape and for what is trained: TFLOP/s of a step over tokens."""
    titles = list(dict.fromkeys(step_title(row) for row in rows))
    panels = Panels(len(titles), 4, (4, 3.6), (0.5, 0.6), sharey=True)
    limit = "a large bf16 product"
    for panel, title in zip(panels.flat, titles, strict=True):
        mine = [row for row in rows if step_title(row) == title]
        panels.drawn[limit] = panel.axhline(
            H200.bf16_flops_per_s / 1e12, color="black", linestyle="--"
        )
        for name in reversed(TRAINERS):  # ours last, on top
            points = [
                (row["num_tokens"], step_case(row).flops(True) / row["step_ms"] / 1e9)
                for row in mine
                if row["implementation"] == name and "step_ms" in row
            ]
            if points:
                color, marker, line = TRAINER_STYLES[name]
                (panels.drawn[name],) = panel.plot(
                    *zip(*sorted(points), strict=True), color=color, marker=marker, linestyle=line
                )
        ticks = sorted({row["num_tokens"] for row in mine})
        panel.set(title=title, xlabel="tokens", xscale="log")
        panel.set_xticks(ticks, [f"{tokens // 1024}k" for tokens in ticks])
        panel.set_xticks([], minor=True)
        panel.grid(alpha=0.3)
    names = (limit, *TRAINERS)
    panels.save(path, "TFLOP/s of a training step", names, 0.6, 2 * panels.columns, "small")


def steps(path: Path = STEPS) -> str | None:
    """Milliseconds of a forward pass without gradients and of a step that trains all weights, of
    each implementation in each cell; the shortest step of a run is bold, and a time of another run
    than ours in brackets. None where no result is there."""
    cells: dict[tuple[str, int], dict[str, dict]] = {}
    for row in rows_of(path):
        if row["trains"] == "full" and row["shape"] in STEP_SHAPES and "step_ms" in row:
            found = cells.setdefault((row["shape"], row["num_tokens"]), {})
            found[row["implementation"]] = row
    names = [name for name in STEP_COLUMNS if any(name in rows for rows in cells.values())]
    if not names:
        return None
    lines, order, last = [], list(STEP_SHAPES), ""
    for (shape, tokens), rows in sorted(cells.items(), key=lambda c: (order.index(c[0][0]), c)):
        run = rows.get(OURS, {}).get("run")
        least = min((row["step_ms"] for row in rows.values() if row["run"] == run), default=0)
        texts = []
        for name in names:
            if name not in rows:
                texts.append("-")
                continue
            infer, step = (_digits(rows[name][f"{what}_ms"]) for what in ("infer", "step"))
            bold = f"**{step}**" if rows[name]["step_ms"] == least else step
            text = f"{infer}, {bold}"
            texts.append(text if rows[name]["run"] == run else f"({text})")
        named, last = STEP_SHAPES[shape] if shape != last else "", shape
        lines.append([named, str(tokens), *texts])
    return markdown(["", "T", *[STEP_COLUMNS[name] for name in names]], lines)


def _digits(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


# --- several GPUs (expert_parallel.py) -----------------------------------------------------------

SPREAD_STYLES = {
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
SPREAD = tuple(SPREAD_STYLES)


def spread_key(row: dict) -> tuple:
    """What a row is about: its case and implementation."""
    return row["shape"], row["scheme"], row["num_tokens"], row["implementation"]


def spread_order(key: tuple) -> tuple:
    shape, scheme, tokens, name = key
    return shape, scheme, tokens, SPREAD.index(name)


def spread_title(row: dict) -> str:
    return f"{row['shape']} {row['scheme'] or 'bf16'}"


def show_spread(rows: list[dict]) -> None:
    """Print a line for each implementation of each case. `gain` is how many times as many tokens a
    second all GPUs have as one.
    """
    alone = {
        spread_key(row)[:3]: row["us"]
        for row in rows
        if row["implementation"] == SPREAD[0] and "us" in row
    }
    columns: dict[str, Column] = {
        "case": spread_title,
        "tokens": "{num_tokens}",
        "implementation": "{implementation}",
        "us": "{us:.1f}",
        "graph": "{graph}",
        **{f"{part} us": f"{{{part}_us:.1f}}" for part in ("eager", "dispatch", "combine")},
        "gain": lambda row: f"{alone[spread_key(row)[:3]] / row['us']:.2f}",
        "floor us": "{floor_us:.1f}",
        "error": "{error:.1e}",
    }
    show(rows, columns)


def report_spread(results: Results, folder: Path) -> None:
    show_spread([*results.rows.values()])
    draw_spread([*results.rows.values()], folder / f"{results.path.stem}.png")


def draw_spread(rows: list[dict], path: Path) -> None:
    """A panel for each shape and scheme: time of a layer over the tokens of one GPU."""
    rows = [row for row in rows if "us" in row]
    titles = list(dict.fromkeys(spread_title(row) for row in rows))
    panels = Panels(len(titles), 2, (4.6, 3.6), (0.5, 0.6))
    for panel, title in zip(panels.flat, titles, strict=True):
        part = [row for row in rows if spread_title(row) == title]
        floors = {row["num_tokens"]: row["floor_us"] for row in part if row.get("floor_us")}
        if floors:
            (panels.drawn["floor"],) = panel.plot(
                *zip(*sorted(floors.items()), strict=True), "k--"
            )
        ticks = sorted({row["num_tokens"] for row in part})
        for name in reversed(SPREAD):  # ours on top
            found = {r["num_tokens"]: r["us"] for r in part if r["implementation"] == name}
            if found:
                color, marker, line = SPREAD_STYLES[name]
                times = [found.get(tokens, math.nan) for tokens in ticks]  # no line past a gap
                (panels.drawn[name],) = panel.plot(
                    ticks, times, color=color, marker=marker, linestyle=line
                )
        panel.set(title=title, xlabel="tokens of a GPU", xscale="log", yscale="log")
        panel.set_xticks(ticks, [str(tokens) for tokens in ticks])
        panel.set_xticks([], minor=True)
        panel.grid(alpha=0.3)
    panels.save(path, "us of a layer", ("floor", *SPREAD), 0.7, 3, "small")


# --- batch invariance (batch_invariant.py) -------------------------------------------------------

PARTS = ("probe", "fuzz", "cost")
SCHEME_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
SHAPE_LINES = ("-", "--", ":")


def invariance_key(row: dict) -> tuple:
    return tuple(row[name] for name in ("part", "shape", "scheme", "num_tokens", "config"))


def invariance_order(key: tuple) -> tuple:
    part, *rest = key
    return (PARTS.index(part), *rest)


def show_invariance(rows: list[dict]) -> None:
    """Print a table of each part."""
    for part in PARTS:
        found = [row for row in rows if row["part"] == part]
        if found:
            skipped = ("part", "implementation", "run", "reason")
            fields = dict.fromkeys(n for row in found for n in row if n not in skipped)
            print(f"\n{part}")
            show(found, {name: f"{{{name}}}" for name in fields})


def report_invariance(results: Results, folder: Path) -> None:
    show_invariance([*results.rows.values()])
    draw_invariance([*results.rows.values()], folder / f"{results.path.stem}.png")


def draw_invariance(rows: list[dict], path: Path) -> None:
    """Time with the mode on over time with it off, by number of tokens."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row["part"] == "cost":
            of = lines.setdefault((row["shape"], row["scheme"] or "bf16"), [])
            of.append((row["num_tokens"], row["ratio"]))
    if not lines:
        return
    shapes, schemes = (list(dict.fromkeys(names)) for names in zip(*lines, strict=True))
    figure, panel = pyplot().subplots(figsize=(7, 4), constrained_layout=True)
    for (shape, scheme), points in lines.items():
        style = {"color": SCHEME_COLORS[schemes.index(scheme) % len(SCHEME_COLORS)]}
        style["linestyle"] = SHAPE_LINES[shapes.index(shape) % len(SHAPE_LINES)]
        panel.plot(
            *zip(*sorted(points), strict=True), marker="o", label=f"{shape} {scheme}", **style
        )
    panel.axhline(1, color="black", linewidth=0.8)
    ticks = sorted({M for points in lines.values() for M, _ in points})
    panel.set(xlabel="tokens", ylabel="time on / time off", xscale="log", ylim=(0.8, None))
    panel.set_xticks(ticks, [str(M) for M in ticks])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    print(path)


# --- experts in host memory (residency.py) -------------------------------------------------------

RESIDENCY = RESULTS / "residency_NVIDIA_H200.json"
STACKS = {  # by shape: the model, and its layers with experts
    "qwen3": ("Qwen3-30B-A3B", 48),
    "gptoss120_bias": ("gpt-oss-120b", 36),
    "dsv3": ("DeepSeek-V3", 58),
    "tiny": ("tiny", 2),
}
RESIDENCY_PARTS = ("link", "decode", "misses", "overhead", "prompt", "host")
BATCH_COLORS = {1: "#0072B2", 8: "#D55E00", 64: "#009E73"}


def residency_key(row: dict) -> tuple:
    """What a row is about."""
    fields = ("part", "shape", "scheme", "num_tokens", "trace", "share", "implementation")
    return tuple(row[name] for name in fields)


def residency_order(key: tuple) -> tuple:
    part, *rest = key
    return (RESIDENCY_PARTS.index(part), *rest)


def residency_title(row: dict) -> str:
    return f"{STACKS[row['shape']][0]} {row['scheme'] or 'bf16'}"


def show_residency(rows: list[dict]) -> None:
    """Print a table of each part."""
    for row in rows:
        if row["part"] == "link":
            calls = [{"implementation": ""} | call for call in row["calls"]]
            columns: dict[str, Column] = {
                "KiB": lambda call: call["num_bytes"] >> 10,
                "copy GB/s": lambda call: f"{call['num_bytes'] / call['copy_us'] / 1e3:.1f}",
                "kernel GB/s": lambda call: f"{call['num_bytes'] / call['kernel_us'] / 1e3:.1f}",
                "kernel us": "{kernel_us:.1f}",
            }
            show(calls, columns)
    skipped = ("part", "shape", "scheme", "num_tokens", "implementation", "layers", "slots", "run")
    for part in RESIDENCY_PARTS[1:]:
        found = [row for row in rows if row["part"] == part]
        if found:
            fields = [name for name in dict.fromkeys(n for row in found for n in row)]
            fields = [name for name in fields if name not in (*skipped, "reason")]
            print(f"\n{part}")
            first: dict[str, Column] = {"stack": residency_title, "tokens": "{num_tokens}"}
            first["implementation"] = "{implementation}"
            show(found, first | {name: f"{{{name}}}" for name in fields})


def report_residency(results: Results, folder: Path) -> None:
    rows = [*results.rows.values()]
    show_residency(rows)
    draw_residency(rows, folder / f"{results.path.stem}.png")


def tokens_a_second(row: dict, us: float) -> float:
    """Of a whole model whose experts alone take time, `us` being that of the row's layers."""
    return row["num_tokens"] / us * 1e6 * row["layers"] / STACKS[row["shape"]][1]


def draw_residency(rows: list[dict], path: Path) -> None:
    """A panel for each stack: tokens a second over the resident share, and what the link allows of
    them."""
    rows = [r for r in rows if r["part"] == "decode" and r["trace"] == "local" and "us" in r]
    ours = [row for row in rows if row["implementation"] == OURS]
    titles = list(dict.fromkeys(residency_title(row) for row in ours))
    if not titles:
        return
    panels = Panels(len(titles), 3, (3.8, 3.4), (0.5, 0.7))
    names = []
    for panel, title in zip(panels.flat, titles, strict=True):
        part = [row for row in ours if residency_title(row) == title]
        for batch in sorted({row["num_tokens"] for row in part}):
            found = sorted([r for r in part if r["num_tokens"] == batch], key=lambda r: r["share"])
            shares = [100 * row["share"] for row in found]
            color = BATCH_COLORS.get(batch, "#000000")
            for name, field, line in ((f"batch {batch}", "us", "o-"), ("link", "bound_us", "--")):
                rates = [tokens_a_second(row, row[field]) for row in found]
                (drawn,) = panel.plot(shares, rates, line, color=color)
                panels.drawn.setdefault(name, drawn)
                names.append(name)
        for row in rows:
            if row["implementation"] != OURS and residency_title(row) == title:
                mark = {"FreeToken": "x", "accelerate cpu_offload": "v"}[row["implementation"]]
                color = BATCH_COLORS.get(row["num_tokens"], "#000000")
                rate = tokens_a_second(row, row["us"])
                (drawn,) = panel.plot([100 * row["share"]], [rate], mark, color=color)
                panels.drawn.setdefault(row["implementation"], drawn)
                names.append(row["implementation"])
        panel.set(title=title, xlabel="% of the experts on the GPU", yscale="log")
        panel.grid(alpha=0.3)
    labels = {"link": "resident time, the misses' bytes over the link, and 5 us a layer"}
    order = dict.fromkeys(names)
    panels.save(path, "tokens a second, of all layers' experts", order, 0.7, 4, "small", labels)


def residency(path: Path = RESIDENCY) -> str:
    """Decoding under the local trace, beside the link's bound and the resident stack; the picture;
    and peers."""
    rows = [r for r in rows_of(path) if r["part"] == "decode" and r["trace"] == "local"]
    rows = [row for row in rows if "us" in row]
    ours = [row for row in rows if row["implementation"] == OURS]
    if not ours:
        return "No results are committed yet."
    batches = sorted({row["num_tokens"] for row in ours})
    columns = [f"batch {batch}" for batch in batches]

    def table(header: Sequence[str], cells: dict[tuple, dict[int, str]]) -> str:
        lines = [(*key, *[of.get(batch, "-") for batch in batches]) for key, of in cells.items()]
        return markdown((*header, *columns), lines)

    cells: dict[tuple, dict[int, str]] = {}
    for row in ours:
        if row["share"] < 1:
            key = residency_title(row), f"{100 * row['share']:.0f} %"
            text = f"{100 * row['hit_rate']:.0f} %, {row['ratio']:.2f}, {row['of_resident']:.2f}"
            cells.setdefault(key, {})[row["num_tokens"]] = text
    blocks = [table(("", "on the GPU"), cells)]
    picture = path.with_suffix(".png")
    if picture.exists():
        alt = "Tokens a second over the share of experts on the GPU, beside what the link allows"
        blocks.append(f"![{alt}](../benchmarks/results/{picture.name})")
    times = {(residency_title(r), r["share"], r["num_tokens"]): r["us"] for r in ours}
    peers: dict[tuple, dict[int, str]] = {}
    for row in rows:
        us = times.get((residency_title(row), row["share"], row["num_tokens"]))
        if us and row["implementation"] != OURS:
            key = row["implementation"], f"{100 * row['share']:.0f} %"
            peers.setdefault(key, {})[row["num_tokens"]] = number(row["us"] / us, 2)
    if peers:
        blocks.append(table(("times as long", "on the GPU"), peers))
    return "\n\n".join(blocks)


def residency_parts(path: Path = RESIDENCY) -> str:
    """Of each stack: misses, calls that find all, and prompts."""
    found: dict[str, dict[str, str]] = {}
    for row in rows_of(path):
        if row["part"] == "link":
            continue
        cells = found.setdefault(residency_title(row), {})
        if row["part"] == "misses" and row.get("gb_s"):  # the last has most
            share = 100 * row["gb_s"] / row["copy_gb_s"]
            cells["misses"] = f"{row['gb_s']:.1f}, {share:.0f} %"
        elif row["part"] == "overhead":
            cells[f"found {row['num_tokens']}"] = (
                f"{row['extra_us']:.1f}, {row['over_resident']:.2f}"
            )
        elif row["part"] == "prompt":
            cells["prompt"] = f"{row['ratio']:.2f}"
    found = {title: cells for title, cells in found.items() if cells}
    if not found:
        return "No results are committed yet."
    columns = {"misses": "misses, GB/s", "prompt": "prompt"}
    columns |= {f"found {n}": f"all found, batch {n}" for n in BATCH_COLORS}
    columns = {
        name: title for name, title in columns.items() if any(name in c for c in found.values())
    }
    lines = [(title, *[c.get(name, "-") for name in columns]) for title, c in found.items()]
    return markdown(("", *columns.values()), lines)


OFFLOADED_MODEL = RESULTS / "offloaded_model_NVIDIA_H200.json"


def offloaded_model(path: Path = OFFLOADED_MODEL) -> str:
    """A whole model's tokens a second, of residency_generate.py."""
    if not path.exists():
        return "No results are committed yet."
    found = json.loads(path.read_text())
    hits = f"{found['slots'][0]} slots a layer, {100 * found['stats']['hit_rate']:.0f} % found"
    lines = [
        (title, f"{found[name]['tokens_per_second']:.1f}")
        for title, name in (
            ("all on the GPU", "in_place"),
            (f"`offload`, {hits}", "offloaded"),
            ('`device_map="auto"`, the same memory', "device_map_auto"),
        )
        if isinstance(found.get(name), dict)
    ]
    return markdown(("", "tokens a second"), lines)


# --- CPUs (cpu_layer.py, cpu_quantized.py, cpu_ggml.py) ------------------------------------------

CPU_PEERS = ("eager", "grouped_mm", "batched_mm")
CPU_NAMES = (*CPU_PEERS, OURS)


def show_cpu_layers(rows: list[dict]) -> None:
    """Print a line for each cell and implementation, and how many times as fast as the best of
    transformers this library is on average."""
    ratios = [
        min(row["ms"][name]["median"] for name in CPU_PEERS if name in row["ms"])
        / row["ms"][OURS]["median"]
        for row in rows
        if OURS in row["ms"] and len(row["ms"]) > 1
    ]
    lines = [
        row["case"]
        | {"name": name, "ms": ms, "error": row["relative_error"][name]}
        | {"floor_ms": row["floor_ms"]}
        for row in rows
        for name, ms in row["ms"].items()
    ]
    columns: dict[str, Column] = {
        **{"dtype": "{dtype}", "M": "{num_tokens}", "floor ms": "{floor_ms}", "": "{name}"},
        **{"median ms": "{ms[median]:.3f}", "least": "{ms[min]:.3f}", "error": "{error:.0e}"},
    }
    show(lines, columns)
    if ratios:
        mean = statistics.geometric_mean(ratios)
        print(f"geometric mean against the best peer of each cell: {mean:.2f}x")


def report_cpu_layers(path: Path, folder: Path) -> None:
    """Print the rows, and draw bars of median milliseconds for each M, one panel a dtype, the
    floor as a line."""
    content = json.loads(path.read_text())
    rows, facts = content["rows"], content["machine"]
    show_cpu_layers(rows)
    dtypes = list(dict.fromkeys(row["case"]["dtype"] for row in rows))
    figure, panels = pyplot().subplots(
        1, len(dtypes), figsize=(5.2 * len(dtypes), 3.8), squeeze=False
    )
    for panel, dtype in zip(panels[0], dtypes, strict=True):
        mine = [row for row in rows if row["case"]["dtype"] == dtype]
        for turn, name in enumerate(CPU_NAMES):
            points = [
                (x, row["ms"][name]["median"]) for x, row in enumerate(mine) if name in row["ms"]
            ]
            panel.bar(
                [x + (turn - 1.5) * 0.2 for x, _ in points],
                [ms for _, ms in points],
                width=0.2,
                label=name if name == OURS else f"transformers {name}",
                color=["#9aa5b1", "#5b84b1", "#c9b26b", "#d1495b"][turn],
            )
        for x, row in enumerate(mine):
            panel.hlines(row["floor_ms"], x - 0.42, x + 0.42, colors="black", linestyles="dotted")
        panel.plot([], [], "k:", label="floor")
        panel.set_yscale("log")
        panel.set_xticks(range(len(mine)), [str(row["case"]["num_tokens"]) for row in mine])
        panel.set_xlabel("tokens M")
        panel.set_ylabel("ms a layer (median)")
        panel.set_title(dtype)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, ncols=len(labels), loc="lower center")
    case = rows[0]["case"]
    figure.suptitle(
        f"One expert layer, E={case['num_experts']} top_k={case['top_k']} K={case['hidden_size']} "
        f"I={case['intermediate_size']}\n{facts['processor']}, threads: {facts['threads']}, "
        f"torch {facts['torch']}",
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(folder / f"{path.stem}.png", dpi=110)


CPU_SIZES = {"E": 32, "top_k": 4, "K": 1024, "I": 512}  # of cpu_quantized.py's layer


def report_cpu_schemes(path: Path, folder: Path) -> None:
    """Draw the speed against bf16, a group of bars a scheme, a bar a number of tokens."""
    content = json.loads(path.read_text())
    rows, facts = content["rows"], content["machine"]
    tokens = sorted({row["num_tokens"] for row in rows})
    schemes = list(dict.fromkeys(row["scheme"] for row in rows if row["scheme"]))
    figure, panel = pyplot().subplots(figsize=(9, 4))
    for turn, M in enumerate(tokens):
        found = {r["scheme"]: r["speed_against_bf16"] for r in rows if r["num_tokens"] == M}
        width = 0.8 / len(tokens)
        places = [i + (turn - (len(tokens) - 1) / 2) * width for i in range(len(schemes))]
        panel.bar(places, [found[s] for s in schemes], width, label=f"M = {M}")
    panel.axhline(1, color="black", linestyle="dotted")
    panel.set_xticks(range(len(schemes)), schemes, rotation=20, ha="right", fontsize=8)
    panel.set_ylabel("times as fast as bf16")
    widest = INSTRUCTIONS[facts["avx"]]
    instructions = {"AMX": "AMX and AVX-512", "AVX512": "AVX-512"}.get(widest, widest)
    sizes = " ".join([f"{name}={size}" for name, size in CPU_SIZES.items()])
    panel.set_title(
        f"One expert layer, {sizes}, weights from memory\n{facts['processor']}, kernels for "
        f"{instructions}, threads: {facts['threads']}",
        fontsize=9,
    )
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / f"{path.stem}.png", dpi=110)


def on_each_cpu(
    pattern: str, field: str, cells: Callable[[str, dict[int, dict]], list[str]], *more: str
) -> str | None:
    """A table for each instruction set whose file is there: a row for each value of a field, with
    the cells of its rows by number of tokens. `more` heads the columns behind those of tokens."""
    tables = []
    for name in ("AMX", "AVX-512", "AVX2"):
        rows = rows_of(RESULTS / pattern.format(name.replace("-", "")))
        if not rows:
            continue
        tokens = sorted({row["num_tokens"] for row in rows})
        lines = []
        for value in dict.fromkeys(row[field] for row in rows):
            of = {row["num_tokens"]: row for row in rows if row[field] == value}
            lines.append([value or "bf16", *cells(value, {M: of[M] for M in tokens})])
        tables.append(markdown([name, *[f"M = {M}" for M in tokens], *more], lines))
    return "\n\n".join(tables) or None


PLAIN_TOKENS = (1, 64)


def cpu_schemes() -> str | None:
    """Median ms of a layer and, in brackets, its speed against bf16, by scheme and M; the last
    columns are of plain torch."""

    def cells(scheme: str, of: dict[int, dict]) -> list[str]:
        first = next(iter(of.values()))
        return [
            *[
                number(row["ms"]["median"], 2, 10)
                + (f" ({row['speed_against_bf16']:.1f})" if scheme else "")
                for row in of.values()
            ],
            f"{first['host_ms']:.3f}",
            *[number(of[M]["plain_torch_ms"], 2, 10) for M in PLAIN_TOKENS],
        ]

    plain = [f"plain torch, {M}" for M in PLAIN_TOKENS]
    return on_each_cpu("cpu_quantized_{}.json", "scheme", cells, "host", *plain)


def cpu_ggml() -> str | None:
    """Median ms of a layer, ours and ggml's, and its error against the layer of bf16 weights."""

    def cells(_: str, of: dict[int, dict]) -> list[str]:
        error = next(iter(of.values()))["error_against_bf16_weights"]
        return [*[number(row["ms"]["median"], 2, 10) for row in of.values()], f"{error:.2g}"]

    return on_each_cpu("cpu_ggml_{}.json", "layer", cells, "error")


# --- schemes beside one another (experts.py, cpu_quantized.py) -----------------------------------

SCHEME_SHAPE, SCHEME_TOKENS = "qwen3", (1, 8, 64)
DRAWN = 8  # tokens of the picture
# What docs/which_scheme.md advises: by hardware what is wanted, and the scheme for it.
LEAST_LOSS, LEAST_MEMORY = "weights as they are", "the least memory, the fastest decode"
ADVICE = {
    "H200": {
        LEAST_LOSS: "",
        "half the memory, the least loss": "int8_w8a16:channel",
        "half the memory, fast prompts too": "fp8_block",
        LEAST_MEMORY: "int4_w4a16:g128",
        "4 bits with the least loss": "nvfp4_w4a16",
    },
    "CPU": {
        LEAST_LOSS: "",
        "half the memory, the least loss": "int8_w8a16:channel",
        "half the memory, many tokens at once": "int8_w8a8",
        LEAST_MEMORY: "int4_w4a16:g128",
    },
}
ADVISED_TOKENS = (*SCHEME_TOKENS, 4096)
BITS_COLORS = {4: "#0072B2", 5: "#56B4E9", 6: "#CC79A7", 8: "#D55E00", 16: "#555555"}


class Scheme(NamedTuple):
    """What was measured of a scheme; None of what was not."""

    name: str
    error: float | None  # of a layer, against fp64 with the bf16 weights
    bits: float  # of a weight, with its share of scales and zero points
    gpu: dict[int, float]  # us by number of tokens
    cpu: dict[int, float]  # ms
    runs: dict[int, str]  # of `gpu`

    @property
    def width(self) -> int:
        """Bits of an element alone."""
        weight = get_scheme(self.name).weight
        return 16 if weight is None else weight.format.bits


def measured_schemes() -> list[Scheme]:
    """All schemes, the widest weights first."""
    gpu: dict[str, dict[int, float]] = {}
    runs: dict[str, dict[int, str]] = {}
    errors: dict[str, float] = {}
    for row in rows_of(LAYERS):
        case = row["case"]
        ours = row["implementation"].split()[0] == OURS and "us" in row
        if not ours or case["shape"] != SCHEME_SHAPE or case["routing"] != "uniform":
            continue
        times = gpu.setdefault(case["scheme"], {})
        M, us = case["num_tokens"], row["us"]["median"]
        if us <= times.get(M, us):
            times[M] = us
            runs.setdefault(case["scheme"], {})[M] = row["run"]
            if M == DRAWN and "error" in row:
                errors[case["scheme"]] = row["error"]
    cpu: dict[str, dict[int, float]] = {}
    for row in rows_of(CPU_SCHEMES):
        cpu.setdefault(row["scheme"], {})[row["num_tokens"]] = row["ms"]["median"]

    def bits(scheme: str) -> float:
        cell = Case(SCHEME_SHAPE, scheme, 1)
        weights = 3 * cell.layer.hidden_size * cell.layer.intermediate_size
        return 8 * cell.bytes_per_expert / weights

    found = [
        Scheme(name, errors.get(name), bits(name), *[of.get(name, {}) for of in (gpu, cpu, runs)])
        for name in dict.fromkeys((*gpu, *cpu))
    ]
    return sorted(found, key=lambda one: (-one.width, one.name))


def letters_of_runs() -> dict[str, str]:
    """A letter for each run on the H200 that docs/which_scheme.md shows a time of, by date."""
    shown = {one.runs.get(M) for one in measured_schemes() for M in ADVISED_TOKENS}
    return dict(zip(sorted(filter(None, shown)), string.ascii_lowercase, strict=False))


def runs_of(one: Scheme, tokens: Sequence[int], letters: dict[str, str]) -> str:
    """Letters of the runs of a scheme's times, one alone where all are of that run."""
    found = [letters[one.runs[M]] if M in one.runs else "-" for M in tokens]
    alone = set(found) - {"-"}
    return "".join(alone) or "-" if len(alone) < 2 else " ".join(found)


def runs() -> str:
    """A row for each letter."""
    described, lines = json.loads(LAYERS.read_text())["runs"], []
    for name, letter in letters_of_runs().items():
        run = described[name]
        libraries = f"torch {run['machine']['torch']}, triton {run['versions']['triton']}"
        speed = number(run["machine"]["copy_tb_s"], 2)
        lines.append([letter, run["date"][:16].replace("T", " "), libraries, speed])
    return markdown(["run", "began (UTC)", "libraries", "its GPU copies, TB/s"], lines)


def choices() -> str:
    """A row for each of `ADVICE`: memory, error, and speed against bf16 on that hardware."""
    schemes = {one.name: one for one in measured_schemes()}
    letters, lines = letters_of_runs(), []
    for hardware, advice in ADVICE.items():
        for turn, (wanted, name) in enumerate(advice.items()):
            one, plain = schemes[name], schemes[""]
            times = [(s.cpu if hardware == "CPU" else s.gpu) for s in (plain, one)]
            speeds = [
                f"{times[0][M] / times[1][M]:.1f}" if all(M in t for t in times) else "-"
                for M in ADVISED_TOKENS
            ]
            error = "-" if one.error is None else f"{one.error:.2g}"
            cells = ["" if turn else hardware, wanted, f"`{name}`" if name else "bf16"]
            of = "" if hardware == "CPU" else runs_of(one, ADVISED_TOKENS, letters)
            lines.append([*cells, f"{one.bits / 16:.2f}", error, *speeds, of])
    header = ["hardware", "wanted", "scheme", "memory", "error"]
    return markdown([*header, *[f"M = {M}" for M in ADVISED_TOKENS], "runs"], lines)


def schemes_table() -> str:
    """A row for each scheme; the fastest with as wide weights is bold."""
    schemes, letters = measured_schemes(), letters_of_runs()
    columns = [(name, M) for name in ("gpu", "cpu") for M in SCHEME_TOKENS]

    def best(width: int, column: tuple[str, int]) -> float | None:
        name, M = column
        times = [getattr(one, name).get(M) for one in schemes if one.width == width]
        return min([time for time in times if time is not None], default=None)

    lines = []
    for one in schemes:
        cells = [f"`{one.name}`" if one.name else "bf16", f"{one.bits:.3g}"]
        cells.append("-" if one.error is None else f"{one.error:.2g}")
        for column in columns:
            time = getattr(one, column[0]).get(column[1])
            text = "-" if time is None else f"{time:.3g}"
            bold = time is not None and time == best(one.width, column)
            cells.append(f"**{text}**" if bold else text)
        cells.insert(-len(SCHEME_TOKENS), runs_of(one, SCHEME_TOKENS, letters))
        lines.append(cells)
    header = ["", "bits", "error", *[f"us, M = {M}" for M in SCHEME_TOKENS], "runs"]
    return markdown([*header, *[f"ms on the CPU, M = {M}" for M in SCHEME_TOKENS]], lines)


def draw_schemes(path: Path) -> None:
    """Time by error, a circle for each scheme, as large as its weights."""
    schemes = [one for one in measured_schemes() if one.error is not None]
    figure, panels = pyplot().subplots(1, 2, figsize=(12, 5), constrained_layout=True)
    titles = {
        "gpu": f"Qwen3's layer on an H200, {DRAWN} tokens: us",
        "cpu": f"E 32, top-4, K 1024, I 512 on two cores with AVX-512 and AMX, {DRAWN} tokens: ms",
    }
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        timed = sorted(
            (getattr(one, name)[DRAWN], one) for one in schemes if DRAWN in getattr(one, name)
        )
        top = 1.08 * timed[-1][0]
        label = 0.0  # names stand in a column of their own, each a line above the one below it
        for time, one in timed:
            color = BITS_COLORS[one.width]
            panel.scatter(one.error, time, s=14 * one.bits, color=color, alpha=0.8)
            label = max(time, label + top / 24)
            panel.annotate(
                one.name or "bf16", (one.error, time), (0.5, label), fontsize=8, va="center",
                arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.4},
            )  # fmt: skip
        panel.set_title(title, fontsize=10)
        panel.set(xlabel="relative error of a layer", xscale="log")
        panel.set(xlim=(1.5e-3, 6), ylim=(0, top))
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


# --- one version beside another (compare_checkouts.py, loading.py, two_schemes.py) ---------------

TRITONS = (
    RESULTS / "compare_tritons_NVIDIA_H200.json",
    RESULTS / "compare_tritons_one_token_NVIDIA_H200.json",
)
STAGES = (
    RESULTS / "compare_stages_NVIDIA_H200.json",
    RESULTS / "compare_house_NVIDIA_H200.json",
    RESULTS / "compare_steps_NVIDIA_H200.json",
    RESULTS / "compare_tiles_NVIDIA_H200.json",
)
LOADING = RESULTS / "loading_6GB_16threads.json"
PAIRS = RESULTS / "two_schemes_NVIDIA_H200.json"
FORMATS = {
    "int4": "compressed-tensors int4",
    "nvfp4": "compressed-tensors NVFP4",
    "gptq": "GPTQ",
    "fp8": "FP8 in blocks",
}


def compared(paths: Sequence[Path]) -> str:
    """Times of the second checkout or Triton over those of the first, by scheme; a cell that
    several files have counts as the last one has it."""
    cells: dict[tuple, dict] = {}
    for path in paths:
        for row in rows_of(path):
            if "ratio" in row:
                cells[row["shape"], row["scheme"], row["num_tokens"]] = row
    of_scheme: dict[str, list[dict]] = {}
    for row in cells.values():
        of_scheme.setdefault(row["scheme"], []).append(row)
    rows = []
    for scheme, found in sorted(of_scheme.items()):
        ratios = [row["ratio"] for row in found]
        same = sum(row["same_bits"] for row in found)
        ends = f"{min(ratios):.2f} to {max(ratios):.2f}"
        mean = f"{statistics.geometric_mean(ratios):.3f}"
        rows.append((f"`{scheme}`", str(len(found)), mean, ends, f"{same} of {len(found)}"))
    return markdown(("scheme", "cells", "geometric mean", "range", "same bits"), rows)


def loading(path: Path = LOADING) -> str:
    """Seconds of `from_pretrained` and of all its threads, of the reader before and of today's."""
    rows = []
    for name, found in json.loads(path.read_text())["formats"].items():
        before, after = found["checkouts"]
        seconds = [f"{run['seconds']:.1f} ({run['cpu_seconds']:.0f})" for run in (before, after)]
        times = f"{before['seconds'] / after['seconds']:.1f}"
        peak, most = after["private"] / 2**30, (after["model"] + found["layer"]) / 2**30
        rows.append((FORMATS[name], *seconds, times, f"{peak:.2f}", f"{most:.2f}"))
    header = ("checkpoint", "one by one, s (CPU s)", "now, s (CPU s)", "times as fast")
    return markdown((*header, "peak, GiB", "model and layer"), rows)


def pairs(path: Path = PAIRS) -> str:
    """Layers whose weights have two schemes, over the slower of the layers of one."""
    of_pair: dict[tuple, dict[tuple, float]] = {}
    columns: dict[tuple, None] = {}
    for row in rows_of(path):
        column = (WEIGHT_ONLY_SHAPES[row["shape"]], row["num_tokens"])
        columns[column] = None
        of_pair.setdefault((row["w13"], row["w2"]), {})[column] = row["ratio"]
    header = ("w13", "w2", *[f"{model}, M = {M}" for model, M in columns])
    rows = [
        (*[f"`{weight}`" for weight in pair], *[number(ratios.get(c), 2) for c in columns])
        for pair, ratios in of_pair.items()
    ]
    return markdown(header, rows)


# --- files and documents -------------------------------------------------------------------------


class Kind(NamedTuple):
    """Files of results whose names begin alike: key and order of the rows, and what prints and
    draws them into a folder."""

    key: Callable[[dict], tuple]
    order: Callable[[tuple], tuple]
    report: Callable[[Results, Path], None]


KINDS = {
    "experts": Kind(layer_key, layer_order, report_layers),
    "end_to_end": Kind(model_key, model_order, report_models),
    "prompts": Kind(model_key, model_order, report_models),
    "training": Kind(step_key, step_order, report_steps),
    "expert_parallel": Kind(spread_key, spread_order, report_spread),
    "batch_invariant": Kind(invariance_key, invariance_order, report_invariance),
    "residency": Kind(residency_key, residency_order, report_residency),
}
# those without runs: all of their rows are of one machine
CPU_KINDS = {"cpu_layer": report_cpu_layers, "cpu_quantized": report_cpu_schemes}


def open_results(path: Path) -> Results:
    """The rows of a file, which may be absent, by what its name begins with."""
    kind = KINDS[max((name for name in KINDS if path.name.startswith(f"{name}_")), key=len)]
    return Results(path, kind.key, kind.order)


def report(path: Path, folder: Path | None = None) -> None:
    """Print a file's table, and draw its pictures into a folder, or beside it."""
    folder = folder or path.parent
    for name, of_cpu in CPU_KINDS.items():
        if path.name.startswith(f"{name}_"):
            return of_cpu(path, folder)
    results = open_results(path)
    kind = next(kind for kind in KINDS.values() if kind.key is results.key)
    return kind.report(results, folder)


def merge_and_report(paths: Sequence[Path], folder: Path, *names: str) -> None:
    """Add files to those of the same names in `folder`, and report all of these kinds there."""
    for path in paths:
        results = open_results(folder / path.name)
        results.merge(path)
        results.write()
    for name in names:
        for path in sorted(folder.glob(f"{name}_*.json")):
            report(path, folder)


def cold_start(path: Path = RESULTS / "cold_start_NVIDIA_H200.json") -> str:
    """Seconds until a model is compiled, by stage, and the compilers that ran (cold_start.py): of
    each case the fastest round. A second machine's, which took a first one's bundle, stands beside
    them; what that one itself took is said.
    """
    elsewhere = path.with_name(path.name.replace("cold_start", "cold_start_elsewhere"))
    rows = rows_of(path)
    if elsewhere.exists():
        rows += [{**row, "case": "bundle, second machine"} for row in rows_of(elsewhere)]
    rows = [row for row in rows if not row["refused"]]
    if not rows:
        return "No results are committed yet."
    found = json.loads(path.read_text())
    cases = list(dict.fromkeys(row["case"] for row in rows))
    best = [min((r for r in rows if r["case"] == c), key=lambda r: r["seconds"]) for c in cases]
    lines = [
        (stage, *[number(row["stages"][stage]) for row in best]) for stage in best[0]["stages"]
    ]
    lines.append(("in all", *[number(row["seconds"]) for row in best]))
    started = [sum(row["compilers"].values()) for row in best]
    lines.append(("compilers that ran", *map(str, started)))
    kernels = [row["compiled_by_triton"] for row in best]
    lines.append(("kernels that Triton compiled in the process", *map(str, kernels)))
    run, size = found["run"], found["bundle_bytes"] / 2**20
    versions = ", ".join([f"{n} {run['versions'][n]}" for n in ("triton", "transformers")])
    text = (
        f"Seconds on an {run['machine']['gpu']} with torch {run['machine']['torch']}, {versions}; "
        f"{found['layers']} layers; the bundle has {size:.1f} MiB."
    )
    if imports := found.get("imports"):
        more = imports["with moe_ops"] - imports["transformers"]
        text += (
            f" Importing `moe_ops.integrations.transformers` takes {more:.2f} s after "
            "transformers' own code of the model."
        )
    if elsewhere.exists() and (made_by := json.loads(elsewhere.read_text()).get("made_by")):
        took = ", ".join(f"{row['case']} {number(row['seconds'])} s" for row in made_by["rows"])
        text += f" The machine whose bundle the second one took: {took}."
    return f"{text}\n\n{markdown(('', *cases), lines)}"


def steps_over_nf4(path: Path = RESULTS / "qlora_nf4_NVIDIA_H200.json") -> str:
    """Steps over experts in nf4 beside 16-bit ones and other libraries (qlora_nf4.py)."""
    if not path.exists():
        return "No results are committed yet."
    found = json.loads(path.read_text())
    lines = []
    for row in found["rows"]:
        name = f"{row['implementation']}, {row['trains']}"
        if "step_ms" not in row:
            lines.append((name, "-", "-", "-", row.get("reason", "")))
            continue
        peak = "-" if row["peak_mb"] is None else number(row["peak_mb"])
        times = number(row["step_ms"]), number(row["over_bf16"], 2)
        lines.append((name, *times, peak, f"{row['error']:.1e}"))
    run = found["run"]
    text = (
        f"Qwen3's widths, {found['tokens']} tokens, an {run['machine']['gpu']}, torch "
        f"{run['machine']['torch']}; errors of gradients at 512 tokens against fp64 ones."
    )
    header = ("experts, what trains", "step, ms", "times bf16", "peak, MB", "error")
    return f"{text}\n\n{markdown(header, lines)}"


def mixed_adapters(path: Path = RESULTS / "adapters_mixed_NVIDIA_H200.json") -> str:
    """Layers whose tokens have adapters, beside those without (adapters_mixed.py)."""
    rows = rows_of(path)
    if not rows:
        return "No results are committed yet."
    found, lines = json.loads(path.read_text()), []
    for row in rows:
        allowed = 1.25 * row["plain_us"] + row["copy_us"]
        peer = "-" if row["peer_us"] is None else number(row["plain_us"] + row["peer_us"])
        cell = f"{WEIGHT_ONLY_SHAPES.get(row['shape'], row['shape'])}, {row['scheme'] or 'bf16'}"
        times = number(row["plain_us"]), number(row["adapted_us"]), number(allowed)
        lines.append((cell, str(row["M"]), *times, peer))
    machine, row = found["run"]["machine"], rows[0]
    text = (
        f"Microseconds under a CUDA graph on an {machine['gpu']}, torch {machine['torch']}: "
        f"{row['adapters']} adapters of rank {row['rank']}, each token any of them or none. The "
        "bound is 1.25 times the layer without adapters and a copy of the bytes of the adapters "
        "that are hit."
    )
    header = ("layer", "M", "without", "with adapters", "bound", "without, and FlashInfer's")
    return f"{text}\n\n{markdown(header, lines)}"


def rows_of_dispatchers(path: Path = RESULTS / "dispatched_rows_NVIDIA_H200.json") -> str:
    """Steps of experts on sorted rows, beside torchtitan's (dispatched_rows.py)."""
    rows = [row for row in rows_of(path) if "step_ms" in row]
    if not rows:
        return "No results are committed yet."
    cells = {(row["implementation"], row["shape"], row["params"]): row["step_ms"] for row in rows}
    columns = list(dict.fromkeys((row["shape"], row["params"]) for row in rows))
    lines = []
    for name in dict.fromkeys(row["implementation"] for row in rows):
        line = [name]
        for column in columns:
            ms, stock = cells.get((name, *column)), cells[("torchtitan", *column)]
            line.append("-" if ms is None else f"{ms:.2f}, {stock / ms:.2f}")
        lines.append(tuple(line))
    machine = json.loads(path.read_text())["run"]["machine"]
    text = (
        "Milliseconds of the forward and backward pass of the experts alone, and how many times "
        f"as fast as torchtitan's, on an {machine['gpu']} with torch {machine['torch']}:"
    )
    header = ("", *[f"{shape}, {params} parameters" for shape, params in columns])
    return f"{text}\n\n{markdown(header, lines)}"


# of several files, into benchmarks/results
PICTURES = {"decode_NVIDIA_H200.png": draw_decoding, "schemes.png": draw_schemes}
# Of each document its blocks. One that makes None stays as it is.
DOCUMENTS: dict[str, dict[str, Callable[[], str | None]]] = {
    "README.md": {"gains": gains},
    "docs/backends.md": {
        "accepts": backends_doc.accepts,
        "features": backends_doc.features,
        "explain": backends_doc.explanation,
        "tiers": backends_doc.tiers,
        "plots": backends_doc.plots,
    },
    "docs/kernels/cpu.md": {"quantized": cpu_schemes, "ggml": cpu_ggml},
    "docs/kernels/cutlass.md": {"layers": whole_layers},
    "docs/kernels/training.md": {
        "steps": steps,
        "steps on an H100": lambda: steps(STEPS_ON_H100),
    },
    "docs/checkpoints.md": {"loading": loading},
    "docs/cold_start.md": {"cold start": cold_start},
    "docs/gguf.md": {"types": file_types},
    "docs/lora.md": {"mixed adapters": mixed_adapters},
    "docs/qlora.md": {"steps over nf4": steps_over_nf4},
    "docs/quantization.md": {"pairs": pairs},
    "docs/training_frameworks.md": {"rows of dispatchers": rows_of_dispatchers},
    "docs/which_scheme.md": {"choices": choices, "schemes": schemes_table, "runs": runs},
    "docs/performance.md": {
        "whole models": whole_models,
        "prompts": prompts,
        "8-bit activations": eight_bits,
        "weight-only peers": weight_only,
        "weight-only peers on an H100": lambda: weight_only(LAYERS_ON_H100),
        "experts in host memory": residency,
        "experts in host memory, parts": residency_parts,
        "a model in host memory": offloaded_model,
        "tritons": lambda: compared(TRITONS),
        "stages": lambda: compared(STAGES),
    },
}


def brought_up_to_date(name: str, text: str) -> str:
    """A document with every block between its two comments made anew."""
    for block, make in DOCUMENTS[name].items():
        begin, end = f"<!-- made by report.py: {block} -->", "<!-- end -->"
        pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.S)
        if not pattern.search(text):
            raise ValueError(f"{name} has no block {block!r}")
        made = make()
        if made is not None:
            text = pattern.sub(lambda _, b=begin, m=made, e=end: f"{b}\n{m}\n{e}", text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="the documents")
    parser.add_argument("--draw", action="store_true", help="the pictures of several files")
    given = parser.parse_args()
    for path in given.files:
        report(path)
    for name, draw in PICTURES.items() if given.draw else ():
        draw(RESULTS / name)
    if given.files or given.draw:
        return
    behind = []
    for name in DOCUMENTS:
        before = (ROOT / name).read_text()
        after = brought_up_to_date(name, before)
        if before != after:
            behind.append(name)
            if given.write:
                (ROOT / name).write_text(after)
    if behind and not given.write:
        are = "is" if len(behind) == 1 else "are"
        sys.exit(f"{', '.join(behind)} {are} behind: python benchmarks/report.py --write")


if __name__ == "__main__":
    main()
