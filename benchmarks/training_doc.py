"""The table of training steps for docs/kernels/training.md, from the committed results of
training.py. backends_doc.py writes it. Standard library alone.

    python benchmarks/training_doc.py
"""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "training_NVIDIA_H200.json"
ON_H100 = RESULTS.with_name("training_NVIDIA_H100_80GB_HBM3.json")
SHAPES = {
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "olmoe": "OLMoE",
    "gptoss20": "gpt-oss-20b",
    "qwen3next": "Qwen3-Next",
}
COLUMNS = {
    "moe_ops": "moe_ops",
    "moe_ops compiled": "compiled",
    "transformers": "transformers",
    "transformers compiled": "compiled",
    "liger": "Liger",
    "sonicmoe": "SonicMoE",
    "sonicmoe tuned": "its best of 5 tiles",
}


def steps(path: Path = RESULTS) -> str | None:
    """Milliseconds of a forward pass without gradients and of a step that trains all weights, of
    each implementation in each cell; the shortest step of a run is bold, and a time of another run
    than ours in brackets. None where no result is there."""
    cells: dict[tuple[str, int], dict[str, dict]] = {}
    for row in json.loads(path.read_text())["rows"]:
        if row["trains"] == "full" and row["shape"] in SHAPES and "step_ms" in row:
            found = cells.setdefault((row["shape"], row["num_tokens"]), {})
            found[row["implementation"]] = row
    names = [name for name in COLUMNS if any(name in rows for rows in cells.values())]
    if not names:
        return None
    header = ["", "T", *[COLUMNS[name] for name in names]]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    order, last = list(SHAPES), ""
    for (shape, tokens), rows in sorted(cells.items(), key=lambda c: (order.index(c[0][0]), c)):
        run = rows.get("moe_ops", {}).get("run")
        least = min((row["step_ms"] for row in rows.values() if row["run"] == run), default=0)
        texts = []
        for name in names:
            if name not in rows:
                texts.append("-")
                continue
            step = number(rows[name]["step_ms"])
            bold = f"**{step}**" if rows[name]["step_ms"] == least else step
            text = f"{number(rows[name]['infer_ms'])}, {bold}"
            texts.append(text if rows[name]["run"] == run else f"({text})")
        named, last = SHAPES[shape] if shape != last else "", shape
        lines.append(f"| {' | '.join([named, str(tokens), *texts])} |")
    return "\n".join(lines)


def number(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


if __name__ == "__main__":
    print(steps() or "no step was measured")
