"""Measured tables: which backend is fastest up to how many tokens, one JSON file per GPU."""

from __future__ import annotations

import functools
import json
from pathlib import Path

_FOLDER = Path(__file__).parent


def tables() -> dict[str, Path]:
    """GPU name -> file of its measured table."""
    found = {}
    for path in sorted(_FOLDER.glob("*.json")):
        found[json.loads(path.read_text())["gpu"]] = path
    return found


@functools.cache
def _entries(gpu_name: str) -> dict[tuple, tuple]:
    path = tables().get(gpu_name)
    if path is None:
        return {}
    keys = ("num_experts", "hidden_size", "intermediate_size", "top_k", "scheme", "dtype")
    rows = json.loads(path.read_text())["entries"]
    return {
        tuple(row[k] for k in keys): tuple((t["max_tokens"], t["backend"]) for t in row["tiers"])
        for row in rows
    }


def look_up(
    gpu_name: str,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    scheme: str,
    dtype: str,
) -> tuple[tuple[int, str], ...]:
    """Measured tiers (largest M, backend) of a problem, ascending, -1 for no bound; () if not measured."""
    key = (num_experts, hidden_size, intermediate_size, top_k, scheme, dtype)
    return _entries(gpu_name).get(key, ())
