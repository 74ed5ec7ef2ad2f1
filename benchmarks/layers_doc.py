"""Tables of whole layers for documents, from the committed results of experts.py: the schemes that
backend `cutlass` runs on an H200, beside the other backends and the peers, and weight-only schemes
beside their peers.

    python benchmarks/layers_doc.py [FILE]    # print those of a file of results

backends_doc.py writes them. Standard library alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path

FOLDER = Path(__file__).parent / "results"
RESULTS = FOLDER / "experts_NVIDIA_H200.json"
ON_H100 = FOLDER / "experts_NVIDIA_H100_80GB_HBM3.json"
SCHEMES = ("fp8_channel", "fp8_tensor_static", "int4_w4a8")
SHAPES = {"qwen3": "Qwen3", "mixtral": "Mixtral", "dsv3": "DeepSeek-V3"}
OURS = "moe_ops"
BACKENDS = {f"{OURS} {name}": f"`{name}`" for name in ("triton", "cutlass")}
PEERS = {
    "vLLM CUTLASS": "vLLM",
    "FlashInfer CUTLASS": "FlashInfer",
    "F.scaled_grouped_mm": "torch",
}
COLUMNS = {OURS: "`auto`", **BACKENDS, **PEERS}
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

Cells = dict[tuple[str, int], dict[str, dict]]  # (shape, M) -> rows by implementation


def cells(
    scheme: str,
    path: Path = RESULTS,
    shapes: Collection[str] = SHAPES,
    names: Collection[str] = COLUMNS,
) -> Cells:
    """The timed rows of a scheme under uniform routing, in the order of shapes and tokens."""
    found: Cells = {}
    for row in json.loads(path.read_text())["rows"]:
        case = row["case"]
        if case["scheme"] != scheme or case["routing"] != "uniform" or "us" not in row:
            continue
        if case["shape"] in shapes and row["implementation"] in names:
            key = (case["shape"], case["num_tokens"])
            found.setdefault(key, {})[row["implementation"]] = row
    order = list(shapes)
    return dict(sorted(found.items(), key=lambda cell: (order.index(cell[0][0]), cell[0][1])))


def us(rows: dict[str, dict], name: str) -> float | None:
    """Median microseconds of an implementation, None where it was not measured."""
    return rows[name]["us"]["median"] if name in rows else None


def best_peer(rows: dict[str, dict], peers: Collection[str] = PEERS) -> str | None:
    """The fastest of the peers."""
    timed = {name: time for name in peers if (time := us(rows, name)) is not None}
    return min(timed, key=lambda name: timed[name]) if timed else None


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def whole_layers(path: Path = RESULTS) -> str | None:
    """A table for each scheme: microseconds of each backend and peer in each cell. None where no
    result is there."""
    parts = []
    for scheme in SCHEMES:
        found = cells(scheme, path)
        names = [name for name in COLUMNS if any(name in rows for rows in found.values())]
        if not names:
            continue
        header = ["", "M", "floor", *[COLUMNS[name] for name in names]]
        lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        last = ""
        for (shape, tokens), rows in found.items():
            first = next(iter(rows.values()))
            times = {name: us(rows, name) for name in names}
            least = min(time for time in times.values() if time is not None)
            texts = [f"**{number(t)}**" if t == least else number(t) for t in times.values()]
            named = SHAPES[shape] if shape != last else ""
            last = shape
            lines.append(
                f"| {' | '.join([named, str(tokens), number(first['floor_us']), *texts])} |"
            )
        parts.append(f"{scheme}:\n\n" + "\n".join(lines))
    return "\n\n".join(parts) or None


def summary(path: Path = RESULTS) -> str:
    """A table of `auto` over the fastest peer in each cell, and the plots of the schemes."""
    parts: list[str] = []
    lines, tokens = [], set()
    by_scheme = {scheme: cells(scheme, path) for scheme in SCHEMES}
    compared: dict[tuple[str, str], dict[int, str]] = {}
    lines_of = {s: (s, f"{OURS} triton" if s in PREPARED else OURS) for s in SCHEMES}
    lines_of |= {f"{s}, prepared for `{b}`": (s, OURS) for s, b in PREPARED.items()}
    for title, (scheme, name) in lines_of.items():
        for (shape, M), rows in by_scheme[scheme].items():
            ours, peer = us(rows, name), best_peer(rows)
            if ours is not None and peer is not None:
                ratio = ours / (us(rows, peer) or 1)
                compared.setdefault((title, shape), {})[M] = f"{ratio:.2f} {PEERS[peer]}"
                tokens.add(M)
    columns = sorted(tokens)
    for (title, shape), ratios in compared.items():
        texts = [ratios.get(M, "-") for M in columns]
        lines.append(f"| {title} | {SHAPES[shape]} | {' | '.join(texts)} |")
    if not lines:
        return "No results are committed yet."
    header = f"| scheme | | {' | '.join(f'M = {M}' for M in columns)} |"
    parts.append("\n".join([header, "|---" * (len(columns) + 2) + "|", *lines]))
    plots = [
        f"![One expert layer in {scheme} on an H200](../benchmarks/results/{name})"
        for scheme in by_scheme
        if (path.parent / (name := f"{path.stem}_{scheme}_uniform.png")).exists()
    ]
    return "\n\n".join([*parts, "\n".join(plots)]).rstrip()


def weight_only(path: Path = RESULTS) -> str:
    """A table of `auto` in weight-only schemes: microseconds, the floor's share of them, and their
    ratio to the fastest peer, where one was measured in the cell."""
    texts: dict[tuple[str, str], dict[int, str]] = {}
    tokens = set()
    for scheme in WEIGHT_ONLY:
        names = (OURS, *WEIGHT_ONLY_PEERS)
        for (shape, M), rows in cells(scheme, path, WEIGHT_ONLY_SHAPES, names).items():
            ours, peer = us(rows, OURS), best_peer(rows, WEIGHT_ONLY_PEERS)
            if ours is None or peer is None:
                continue
            ratio, share = ours / (us(rows, peer) or 1), rows[OURS]["floor_us"] / ours
            text = f"{number(ours)}, {share:.0%}, {ratio:.2f} {WEIGHT_ONLY_PEERS[peer]}"
            texts.setdefault((scheme, shape), {})[M] = text.replace("%", " %")
            tokens.add(M)
    columns = sorted(tokens)
    lines = [
        f"| {scheme} | {WEIGHT_ONLY_SHAPES[shape]} | "
        f"{' | '.join(of_cell.get(M, '-') for M in columns)} |"
        for (scheme, shape), of_cell in texts.items()
    ]
    header = f"| scheme | | {' | '.join(f'M = {M}' for M in columns)} |"
    return "\n".join([header, "|---" * (len(columns) + 2) + "|", *lines])


if __name__ == "__main__":
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    print(
        whole_layers(results) or "none of these schemes was measured", summary(results), sep="\n\n"
    )
