"""What README.md says of speed, from the committed results of end_to_end.py, experts.py and
cpu_layer.py: three numbers, which backends_doc.py writes, and a picture; and a table of whole
models for docs/performance.md.

    python benchmarks/readme_doc.py    # draw the picture anew; needs matplotlib
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import layers_doc

FOLDER = Path(__file__).parent / "results"
MODELS_ON_GPU = FOLDER / "end_to_end_NVIDIA_H200.json"
LAYER_ON_CPU = FOLDER / "cpu_layer_AVX512.json"
PICTURE = FOLDER / "decode_NVIDIA_H200.png"
MODELS = {
    "qwen3": "Qwen3-\n30B-A3B",
    "mixtral": "Mixtral-\n8x7B",
    "dsv3": "DeepSeek-\nV3",
    "gptoss": "gpt-oss-\n20b",
}
BATCHES, PROMPT = (1, 8, 64), "prefill 4096"
BUILT_IN = ("grouped_mm", "batched_mm")
BF16, FP8 = "moe_ops", "moe_ops fp8_block"
INT4 = "int4_w4a16:g128"
# Okabe and Ito's colours, which colour-blind readers tell apart
BARS = {
    "transformers, its best": "#999999",
    "moe_ops, bf16": "#D55E00",
    "moe_ops, experts in fp8": "#0072B2",
}


def times(cell: str) -> dict[str, list[float]]:
    """Milliseconds of a cell by model, all of one run: of transformers' best implementation, ours,
    and ours with experts in fp8, in the order of `BARS`."""
    rows = {
        (row["model"], row["implementation"]): row
        for row in json.loads(MODELS_ON_GPU.read_text())["rows"]
    }
    found = {}
    for model in MODELS:
        of = {name: rows[model, name] for name in (*BUILT_IN, BF16, FP8)}
        if len({row["run"] for row in of.values()}) != 1:
            raise ValueError(f"{MODELS_ON_GPU.name}: times of {model} are of several runs")
        ms = {name: row["cells"][cell].get("ms") for name, row in of.items()}
        best = min(ms[name] for name in BUILT_IN if ms[name] is not None)
        found[model] = [best, ms[BF16], ms[FP8]]
    return found


def speed_ups(of: int) -> list[float]:
    """Of every model and batch of decoding: transformers' time over that of a bar, 1 or 2."""
    cells = [times(f"decode {batch}") for batch in BATCHES]
    return [ms[0] / ms[of] for cell in cells for ms in cell.values()]


def whole_models() -> str:
    """A row for each model: how many times as fast as transformers' best it decodes, and reads a
    prompt, in bf16 and with experts in fp8."""
    cells = [*[f"decode {batch}" for batch in BATCHES], PROMPT]
    names = [f"batch {batch}" for batch in BATCHES] + ["prompt"]
    header = ["", *names, *[f"fp8, {name}" for name in names]]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    by_cell = [times(cell) for cell in cells]
    for model, title in MODELS.items():
        texts = [f"{ms[model][0] / ms[model][of]:.2f}" for of in (1, 2) for ms in by_cell]
        lines.append(f"| {' | '.join([title.replace(chr(10), ''), *texts])} |")
    return "\n".join(lines)


def against_marlin() -> list[float]:
    """Of every cell of int4 layers in which Marlin was measured: its time over ours."""
    names = (layers_doc.OURS, "Marlin")
    cells = layers_doc.cells(INT4, shapes=layers_doc.WEIGHT_ONLY_SHAPES, names=names)
    times = [[layers_doc.us(rows, name) for name in names] for rows in cells.values()]
    return [peer / ours for ours, peer in times if ours is not None and peer is not None]


def on_a_cpu() -> list[float]:
    """Of every bf16 cell of a layer on a CPU: the best time of transformers over ours."""
    found = []
    for row in json.loads(LAYER_ON_CPU.read_text())["rows"]:
        ms = {name: times["median"] for name, times in row["ms"].items()}
        if row["case"]["dtype"] == "bf16":
            ours = ms.pop("moe_ops")
            found.append(min(ms.values()) / ours)
    return found


def mean(ratios: list[float]) -> str:
    return f"**{statistics.geometric_mean(ratios):.1f} times**"


def between(ratios: list[float]) -> str:
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def gains() -> str:
    """A row for each number: geometric means, and what they are of."""
    bf16, fp8, int4, cpu = speed_ups(1), speed_ups(2), against_marlin(), on_a_cpu()
    return "\n".join(
        [
            "| speed-up | of what | over whom |",
            "|---|---|---|",
            f"| {mean(bf16)} in bf16, {mean(fp8)} with experts in fp8 | decoding four models on "
            f"an H200: {between(bf16)} and {between(fp8)} | transformers' best, compiled |",
            f"| {mean(int4)} in int4 | an expert layer of four models on an H200, 1 to 1024 "
            f"tokens: {between(int4)} | Marlin, as vLLM calls it |",
            f"| {mean(cpu)} on a CPU | an expert layer in bf16 on two cores with AVX-512, 1 to "
            f"512 tokens: {between(cpu)} | transformers' best |",
        ]
    )


def draw() -> None:
    """Decoding speed over transformers' best: a panel for each batch, three bars a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(BATCHES), figsize=(11, 3.4), sharey=True)
    width = 0.8 / len(BARS)
    for panel, batch in zip(panels, BATCHES, strict=True):
        for place, ms in enumerate(times(f"decode {batch}").values()):
            for turn, (name, color) in enumerate(BARS.items()):
                x, ratio = place - 0.4 + (turn + 0.5) * width, ms[0] / ms[turn]
                label = name if place == 0 else None
                panel.bar(x, ratio, 0.94 * width, color=color, label=label)
                if turn:
                    style: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 9}
                    panel.text(x, ratio + 0.03, f"{ratio:.1f}", **style)
        panel.set_title(f"{batch} sequence{'s' if batch > 1 else ''}", fontsize=12)
        panel.set_xticks(range(len(MODELS)), list(MODELS.values()), fontsize=9.5)
        panel.set_ylim(0, 3.1)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(length=0)
    panels[0].set_ylabel("speed, transformers = 1", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(BARS), loc="upper center", frameon=False, fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.91))
    figure.savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    draw()
