"""Measured tables, one JSON file per GPU: which backend is fastest up to how many tokens, and the tiles with
which the triton backend is. `python -m moe_ops.tuning` measures the tiles.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_KEYS = ("num_experts", "hidden_size", "intermediate_size", "top_k", "scheme", "dtype")


def tables() -> dict[str, Path]:
    """GPU name -> file of its measured table."""
    found = {}
    for path in sorted(_FOLDER.glob("*.json")):
        found[json.loads(path.read_text())["gpu"]] = path
    return found


def path_of(gpu_name: str) -> Path:
    """The file that holds, or would hold, a GPU's table."""
    return _FOLDER / f"{gpu_name.replace(' ', '_')}.json"


@functools.cache
def _entries(gpu_name: str) -> dict[tuple, dict]:
    path = tables().get(gpu_name)
    if path is None:
        return {}
    rows = json.loads(path.read_text())["entries"]
    return {tuple(row[k] for k in _KEYS): row for row in rows}


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
    tiers = _entries(gpu_name).get(key, {}).get("tiers", [])
    return tuple([(tier["max_tokens"], tier["backend"]) for tier in tiers])


def triton_tiles(
    gpu_name: str,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    scheme: str,
    dtype: str,
    num_tokens: int,
) -> list | None:
    """Fields of the fastest `triton_tiles.Tiles` measured nearest to M on a logarithmic scale, or None.

    M = 1 runs without a routing kernel, so it takes what was measured at 1 and lends it to no other M.
    """
    key = (num_experts, hidden_size, intermediate_size, top_k, scheme, dtype)
    rows = _entries(gpu_name).get(key, {}).get("triton", [])
    rows = [row for row in rows if (row["num_tokens"] == 1) == (num_tokens == 1)]
    if not rows:
        return None
    nearest = min(rows, key=lambda row: abs(math.log(row["num_tokens"] / num_tokens)))
    return nearest["tiles"]


def measured_tokens(path: Path, target: Mapping[str, Any]) -> set[int]:
    """The token counts that a table file has tiles for."""
    entry = _find(_read(path, ""), target)
    return {row["num_tokens"] for row in entry.get("triton", [])}


def record(
    path: Path, gpu_name: str, target: Mapping[str, Any], num_tokens: int, tiles: list, us: float
) -> None:
    """Put the tiles measured for one M into a table file, in place of what it had for it."""
    import triton

    table = _read(path, gpu_name)
    entry = _find(table, target)
    if not entry:
        entry = dict(target)
        table["entries"].append(entry)
    rows = [row for row in entry.get("triton", []) if row["num_tokens"] != num_tokens]
    rows.append(
        {
            "num_tokens": num_tokens,
            "us": round(us, 2),
            "triton": triton.__version__,
            "tiles": tiles,
        }
    )
    entry["triton"] = sorted(rows, key=lambda row: row["num_tokens"])
    lines = ",\n".join([_entry_text(e) for e in table["entries"]])
    path.write_text(f'{{"gpu": {json.dumps(table["gpu"])}, "entries": [\n{lines}\n]}}\n')


def _read(path: Path, gpu_name: str) -> dict:
    return json.loads(path.read_text()) if path.exists() else {"gpu": gpu_name, "entries": []}


def _find(table: dict, target: Mapping[str, Any]) -> dict:
    for entry in table["entries"]:
        if all(entry[k] == target[k] for k in _KEYS):
            return entry
    return {}


def _entry_text(entry: dict) -> str:
    """One entry with a line a measurement, so that changes read well."""
    fields = {k: v for k, v in entry.items() if k != "triton"}
    rows = ",\n  ".join([json.dumps(row) for row in entry.get("triton", [])])
    return json.dumps(fields)[:-1] + f', "triton": [\n  {rows}]}}'
