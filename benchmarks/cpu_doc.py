"""The tables of quantized layers on a CPU for docs/kernels/cpu.md, from the committed results of
cpu_quantized.py and cpu_ggml.py. backends_doc.py writes them. Standard library alone.
"""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def quantized() -> str | None:
    """Median ms of a layer and, in brackets, its speed against bf16, by scheme and M; the last
    columns are of plain torch."""
    lines: list[str] = []
    for name in ("AMX", "AVX-512", "AVX2"):
        path = RESULTS / f"cpu_quantized_{name.replace('-', '')}.json"
        if not path.exists():
            continue
        rows = json.loads(path.read_text())["rows"]
        tokens = sorted({row["num_tokens"] for row in rows})
        plain = [M for M in (1, 64) if M in tokens]
        header = [name, *[f"M = {M}" for M in tokens], "host"]
        header += [f"plain torch, {M}" for M in plain]
        lines += ["", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        for scheme in dict.fromkeys(row["scheme"] for row in rows):
            of = {row["num_tokens"]: row for row in rows if row["scheme"] == scheme}
            cells = [
                number(of[M]["ms"]["median"])
                + (f" ({of[M]['speed_against_bf16']:.1f})" if scheme else "")
                for M in tokens
            ]
            cells.append(f"{of[tokens[0]]['host_ms']:.3f}")
            cells += [number(of[M]["plain_torch_ms"]) for M in plain]
            lines.append(f"| {' | '.join([scheme or 'bf16', *cells])} |")
    return "\n".join(lines[1:]) if lines else None


def ggml() -> str | None:
    """Median ms of a layer, ours and ggml's, and its error against the layer of bf16 weights."""
    lines: list[str] = []
    for name in ("AMX", "AVX-512", "AVX2"):
        path = RESULTS / f"cpu_ggml_{name.replace('-', '')}.json"
        if not path.exists():
            continue
        rows = json.loads(path.read_text())["rows"]
        tokens = sorted({row["num_tokens"] for row in rows})
        header = [name, *[f"M = {M}" for M in tokens], "error"]
        lines += ["", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        for layer in dict.fromkeys(row["layer"] for row in rows):
            of = {row["num_tokens"]: row for row in rows if row["layer"] == layer}
            cells = [number(of[M]["ms"]["median"]) for M in tokens]
            cells.append(f"{of[tokens[0]]['error_against_bf16_weights']:.2g}")
            lines.append(f"| {' | '.join([layer, *cells])} |")
    return "\n".join(lines[1:]) if lines else None


def number(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:.0f}"
