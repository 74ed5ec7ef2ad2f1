"""Writing measurements into the tables that lookup.py reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_ops.tables.lookup import KEYS


def measured_tokens(path: Path, target: Mapping[str, Any]) -> set[int]:
    """The token counts that a table file has configs for."""
    entry = _find(_read(path, ""), target)
    return {row["num_tokens"] for row in entry.get("triton", [])}


def measured_backends(path: Path, target: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Token count -> backend -> microseconds, as a table file has them."""
    entry = _find(_read(path, ""), target)
    return {row["num_tokens"]: row["us"] for row in entry.get("backends", [])}


def record(
    path: Path,
    gpu_name: str,
    target: Mapping[str, Any],
    num_tokens: int,
    config: Mapping[str, Any],
    us: float,
) -> None:
    """Write the config measured for one M into a table file, replacing an earlier one."""
    import triton

    row = {"us": round(us, 2), "triton": triton.__version__, "config": config}
    _put(path, gpu_name, target, "triton", num_tokens, row)


def record_backends(
    path: Path,
    gpu_name: str,
    target: Mapping[str, Any],
    num_tokens: int,
    us: Mapping[str, float],
    versions: Mapping[str, str],
) -> None:
    """Write the backends' times measured for one M into a table file, replacing earlier ones."""
    times = {name: round(value, 2) for name, value in us.items()}
    _put(path, gpu_name, target, "backends", num_tokens, {"us": times, "versions": dict(versions)})


_LISTS = ("backends", "triton")  # fields of an entry that hold one row for each number of tokens


def _put(
    path: Path,
    gpu_name: str,
    target: Mapping[str, Any],
    field: str,
    num_tokens: int,
    values: Mapping[str, Any],
) -> None:
    table = _read(path, gpu_name)
    entry = _find(table, target)
    if not entry:
        entry = dict(target)
        table["entries"].append(entry)
    rows = [row for row in entry.get(field, []) if row["num_tokens"] != num_tokens]
    rows.append({"num_tokens": num_tokens, **values})
    entry[field] = sorted(rows, key=lambda row: row["num_tokens"])
    lines = ",\n".join([_entry_text(e) for e in table["entries"]])
    path.write_text(f'{{"gpu": {json.dumps(table["gpu"])}, "entries": [\n{lines}\n]}}\n')


def _read(path: Path, gpu_name: str) -> dict:
    return json.loads(path.read_text()) if path.exists() else {"gpu": gpu_name, "entries": []}


def _find(table: dict, target: Mapping[str, Any]) -> dict:
    for entry in table["entries"]:
        if all(entry[k] == target[k] for k in KEYS):
            return entry
    return {}


def _entry_text(entry: dict) -> str:
    """One entry, with a line for each measurement, so that diffs are readable."""
    text = json.dumps({k: v for k, v in entry.items() if k not in _LISTS})[:-1]
    for field in _LISTS:
        if field in entry:
            rows = ",\n  ".join([json.dumps(row) for row in entry[field]])
            text += f', "{field}": [\n  {rows}]'
    return text + "}"
