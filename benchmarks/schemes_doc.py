"""Memory, error and speed of each scheme on a GPU and on a CPU, from the committed results of
experts.py and cpu_quantized.py: two tables for docs/which_scheme.md, which backends_doc.py writes,
and a picture.

    python benchmarks/schemes_doc.py    # draw the picture anew; needs matplotlib
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from cases import Case

FOLDER = Path(__file__).parent / "results"
GPU, CPU = FOLDER / "experts_NVIDIA_H200.json", FOLDER / "cpu_quantized_AMX.json"
PICTURE = FOLDER / "schemes.png"
SHAPE, TOKENS = "qwen3", (1, 8, 64)
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
ADVISED_TOKENS = (*TOKENS, 4096)
COLORS = {4: "#0072B2", 8: "#D55E00", 16: "#555555"}


class Scheme(NamedTuple):
    """What was measured of a scheme; None of what was not."""

    name: str
    error: float | None  # of a layer, against fp64 with the bf16 weights
    bits: float  # of a weight, with its scales
    gpu: dict[int, float]  # us by number of tokens
    cpu: dict[int, float]  # ms


def measured() -> list[Scheme]:
    """All schemes, the widest weights first."""
    gpu: dict[str, dict[int, float]] = {}
    errors: dict[str, float] = {}
    for row in json.loads(GPU.read_text())["rows"]:
        case = row["case"]
        ours = row["implementation"].split()[0] == "moe_ops" and "us" in row
        if not ours or case["shape"] != SHAPE or case["routing"] != "uniform":
            continue
        times = gpu.setdefault(case["scheme"], {})
        M, us = case["num_tokens"], row["us"]["median"]
        if us <= times.get(M, us):
            times[M] = us
            if M == DRAWN and "error" in row:
                errors[case["scheme"]] = row["error"]
    cpu: dict[str, dict[int, float]] = {}
    for row in json.loads(CPU.read_text())["rows"]:
        cpu.setdefault(row["scheme"], {})[row["num_tokens"]] = row["ms"]["median"]
    found = [
        Scheme(name, errors.get(name), bits(name), gpu.get(name, {}), cpu.get(name, {}))
        for name in dict.fromkeys((*gpu, *cpu))
    ]
    return sorted(found, key=lambda one: (-round(one.bits), one.name))


def choices() -> str:
    """A row for each of `ADVICE`: memory, error, and speed against bf16 on that hardware."""
    schemes = {one.name: one for one in measured()}
    header = ["hardware", "wanted", "scheme", "memory", "error"]
    header += [f"M = {M}" for M in ADVISED_TOKENS]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
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
            cells += [f"{one.bits / 16:.2f}", error, *speeds]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def bits(scheme: str) -> float:
    """Bits of a weight, with its share of scales and zero points."""
    cell = Case(SHAPE, scheme, 1)
    return 8 * cell.bytes_per_expert / (3 * cell.layer.hidden_size * cell.layer.intermediate_size)


def table() -> str:
    """A row for each scheme; the fastest with as wide weights is bold."""
    schemes = measured()
    columns = [(name, M) for name in ("gpu", "cpu") for M in TOKENS]

    def best(width: int, column: tuple[str, int]) -> float | None:
        name, M = column
        times = [getattr(one, name).get(M) for one in schemes if round(one.bits) == width]
        return min([time for time in times if time is not None], default=None)

    header = ["", "bits", "error", *[f"us, M = {M}" for M in TOKENS]]
    header += [f"ms on the CPU, M = {M}" for M in TOKENS]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for one in schemes:
        cells = [f"`{one.name}`" if one.name else "bf16", f"{one.bits:.3g}"]
        cells.append("-" if one.error is None else f"{one.error:.2g}")
        for column in columns:
            time = getattr(one, column[0]).get(column[1])
            text = "-" if time is None else f"{time:.3g}"
            bold = time is not None and time == best(round(one.bits), column)
            cells.append(f"**{text}**" if bold else text)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw() -> None:
    """Time by error, a circle for each scheme, as large as its weights."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    schemes = [one for one in measured() if one.error is not None]
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 5), constrained_layout=True)
    titles = (
        f"Qwen3's layer on an H200, {DRAWN} tokens: us",
        f"E 32, top-4, K 1024, I 512 on two cores with AVX-512 and AMX, {DRAWN} tokens: ms",
    )
    for panel, title, name in zip(panels, titles, ("gpu", "cpu"), strict=True):
        _panel(panel, title, [(one, getattr(one, name).get(DRAWN)) for one in schemes])
    figure.savefig(PICTURE, dpi=110)


def _panel(panel: Any, title: str, times: list[tuple[Scheme, float | None]]) -> None:
    timed = sorted([(time, one) for one, time in times if time is not None])
    top = 1.08 * timed[-1][0]
    label = 0.0  # names stand in a column of their own, each a line above the one below it
    for time, one in timed:
        color = COLORS[round(one.bits)]
        panel.scatter(one.error, time, s=14 * one.bits, color=color, alpha=0.8)
        label = max(time, label + top / 24)
        panel.annotate(
            one.name or "bf16", (one.error, time), (0.5, label), fontsize=8, va="center",
            arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.4},
        )  # fmt: skip
    panel.set_title(title, fontsize=10)
    panel.set(xlabel="relative error of a layer", xscale="log", xlim=(1.5e-3, 6), ylim=(0, top))
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    draw()
