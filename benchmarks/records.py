"""Files of benchmark results: rows that name the run that measured them, so that short runs add
up."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import RESULTS, gpu_limits, machine_facts, versions

import moe_ops

LIBRARIES = (
    "triton",
    "torchao",
    "transformers",
    "accelerate",
    "flashinfer-python",
    "sgl-deep-gemm",
)
OURS = "moe_ops"  # names of this library's implementations begin with it


class Results:
    """The rows of one results file, at most one for each value of `key(row)`, written in that
    order.

    A row has "implementation", "run" (a key of `runs`: machine, versions, command, date), and
    either what was measured or the "reason" why there is nothing.
    """

    def __init__(self, path: Path, key: Callable[[dict], tuple], order: Callable[[tuple], tuple]):
        self.path, self.key, self.order = path, key, order
        content = json.loads(path.read_text()) if path.exists() else {"runs": {}, "rows": []}
        self.runs: dict[str, dict] = content["runs"]
        self.rows: dict[tuple, dict] = {key(row): row for row in content["rows"]}

    def begin(self, command: list[str], dry: bool) -> str:
        """Describe the run that begins, and return its name."""
        facts = describe_run(command, dry)
        name = f"{facts['date']} {facts['moe_ops_sources']}"
        self.runs[name] = facts
        return name

    def add(self, row: dict) -> None:
        """Keep the row in place of an older one; a peer that could not run leaves its older
        time."""
        old = self.rows.get(self.key(row))
        ours = row["implementation"].startswith(OURS)
        if "reason" not in row or ours or old is None or "reason" in old:
            self.rows[self.key(row)] = row

    def measured(self, key: tuple, run: str) -> bool:
        """Whether there is a row of the same sources as those of a run."""
        row = self.rows.get(key)
        sources = self.runs[run]["moe_ops_sources"]
        return row is not None and self.runs[row["run"]]["moe_ops_sources"] == sources

    def merge(self, path: Path) -> None:
        """Add the rows of another file, the later date winning."""
        other = Results(path, self.key, self.order)
        for key, row in other.rows.items():
            old = self.rows.get(key)
            if old is None or other.runs[row["run"]]["date"] >= self.runs[old["run"]]["date"]:
                self.runs[row["run"]] = other.runs[row["run"]]
                self.add(row)

    def write(self) -> None:
        rows = [self.rows[key] for key in sorted(self.rows, key=self.order)]
        used = {row["run"] for row in rows}
        runs = {name: run for name, run in self.runs.items() if name in used}
        # one line a run and a row keeps diffs readable
        lines = [json.dumps(row) for row in rows]
        named = [f"{json.dumps(name)}: {json.dumps(run)}" for name, run in sorted(runs.items())]
        separator = ",\n  "
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(
            f'{{\n "runs": {{\n  {separator.join(named)}\n }},\n'
            f' "rows": [\n  {separator.join(lines)}\n ]\n}}\n'
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """What all benchmarks whose rows add up are told."""
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for JSON and plots")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", default=[])
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--dry-run", action="store_true")


def describe_run(command: list[str], dry: bool) -> dict[str, Any]:
    """What stands behind a row: machine, its measured limits, versions, sources, command, date
    (UTC)."""
    package = Path(moe_ops.__file__).parent
    source = hashlib.sha256()
    for suffix in ("py", "json", "cu", "cuh", "h", "cpp"):
        for path in sorted(package.rglob(f"*.{suffix}")):
            source.update(path.read_bytes())
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": re.sub(r" --results \S+", "", " ".join(command)),  # where rows go says nothing
        "machine": machine_facts() | ({} if dry else gpu_limits()),
        "versions": {"moe_ops": moe_ops.__version__} | versions(*LIBRARIES),
        "moe_ops_sources": source.hexdigest()[:12],
    }
