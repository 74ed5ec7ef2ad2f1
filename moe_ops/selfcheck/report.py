"""The report of `moe_ops.self_check`, and its table."""

from __future__ import annotations

import json
import math
import platform
import re
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moe_ops import backends, environment
from moe_ops.backends.torch import cpu
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans
from moe_ops.selfcheck.cases import DTYPE

AGREES, DIFFERS, RAISED, REFUSED, NOT_RUN = "agrees", "differs", "raised", "refused", "not run"
_FEW = 3  # schemes that one line names; of more it says how many


@dataclass(frozen=True)
class Row:
    """One scheme on one backend."""

    scheme: str  # "" for weights that are not quantized
    backend: str
    prepared: bool  # whether the weights went through `moe_ops.prepare`
    verdict: str  # "agrees", "differs", "raised", "refused" or "not run"
    error: float | None = None  # the largest of all shapes, relative; NaN of a result with NaN
    allowed: float | None = None  # the largest error that agrees
    token_counts: tuple[int, ...] = ()  # M of the shapes that ran
    detail: str = ""  # where it differs, what was raised, or why it was refused

    @property
    def bad(self) -> bool:
        """Whether the backend is wrong here."""
        return self.verdict in (DIFFERS, RAISED)


@dataclass(frozen=True)
class SelfCheck:
    """The calls that ran on a machine and their agreement; str() is a complete table."""

    machine: str  # the machine and the versions, in one line
    rows: tuple[Row, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing that ran differs or raised."""
        return not any([row.bad for row in self.rows])

    def __str__(self) -> str:
        shown = [row for row in self.rows if row.verdict in (AGREES, DIFFERS, RAISED)]
        left_out = [row for row in self.rows if row.verdict in (REFUSED, NOT_RUN)]
        lines = [_cells(row) for row in shown] + _collapsed(left_out, self.rows)
        lines = [("scheme", "backend", "error", "allowed", "tokens", ""), *lines]
        widths = [max([len(line[i]) for line in lines]) for i in range(5)]
        table = [
            "  ".join([cell.ljust(width) for cell, width in zip(line, (*widths, 0), strict=True)])
            for line in lines
        ]
        counts = {
            verdict: len([row for row in self.rows if row.verdict == verdict])
            for verdict in (AGREES, DIFFERS, RAISED, REFUSED, NOT_RUN)
        }
        summary = ", ".join([f"{n} {verdict}" for verdict, n in counts.items() if n])
        dtype = str(DTYPE).removeprefix("torch.")
        return "\n".join(
            [
                self.machine,
                f"fused_experts, {dtype}; error: the largest of |y - y64| / |y64| over the calls",
                *[line.rstrip() for line in table],
                f"{summary or 'nothing to run'}; {self.seconds:.0f} s",
            ]
        )


def to_json(found: SelfCheck) -> dict[str, Any]:
    """A SelfCheck in types that JSON knows; an error that is NaN is None."""
    rows = [asdict(row) for row in found.rows]
    for row in rows:
        if row["error"] is not None and math.isnan(row["error"]):
            row["error"] = None
    return {"machine": found.machine, "ok": found.ok, "seconds": found.seconds, "rows": rows}


def from_json(text: str) -> list[Row]:
    """The rows of what `to_json` made."""
    rows = json.loads(text)["rows"]
    return [Row(**{**row, "token_counts": tuple(row["token_counts"])}) for row in rows]


def _name(scheme: str) -> str:
    return scheme or "plain"


def _cells(row: Row) -> tuple[str, ...]:
    verdict = f"{row.verdict}: {row.detail}" if row.detail else row.verdict
    error = "" if row.error is None else "nan" if math.isnan(row.error) else f"{row.error:.1e}"
    return (
        f"{_name(row.scheme)}{', prepared' if row.prepared else ''}",
        row.backend,
        error,
        f"{row.allowed:.1e}" if row.allowed is not None else "",
        " ".join(map(str, row.token_counts)),
        verdict,
    )


def _collapsed(left_out: list[Row], rows: tuple[Row, ...]) -> list[tuple[str, ...]]:
    """One line for all schemes that a backend refuses for the same reason."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in left_out:
        reason = _without_scheme(row.detail, row.scheme)
        groups.setdefault((row.backend, row.verdict, reason), []).append(row)
    lines: list[tuple[str, ...]] = []
    for (backend, verdict, reason), alike in groups.items():
        schemes = list(dict.fromkeys([row.scheme for row in alike]))
        every = {row.scheme for row in rows if row.backend == backend}
        if len(schemes) <= _FEW:
            what = ", ".join(map(_name, schemes))
        else:
            what = "all schemes" if len(schemes) == len(every) else f"{len(schemes)} schemes"
        why = alike[0].detail if len(schemes) == 1 else reason
        lines.append((what, backend, "", "", "", f"{verdict}: {why}"))
    return lines


def _without_scheme(reason: str, scheme: str) -> str:
    """A reason with "these" in the place of the scheme's name, as several schemes share it."""
    if not scheme:
        return reason.replace("plain weights", "these")
    name = rf"(?:scheme )?(?<![\w:])'?{re.escape(scheme)}'?(?![\w:]\w)"
    return re.sub(name, "these", reason)


def machine_line(device: torch.device) -> str:
    """The machine and the versions of all libraries that are installed, in one line."""
    here = machines.machine(device)
    if here.device_type == "cuda":
        driver = "" if here.gfx else f", driver {environment.nvidia_driver() or 'unknown'}"
        where = f"{here.gpu_name} ({here.architecture}{driver})"
    elif here.device_type == "cpu":
        reason = cpu.why_not()
        kernels = "CPU kernels in use" if reason is None else f"no CPU kernels: {reason}"
        where = f"CPU with {torch.backends.cpu.get_cpu_capability()} ({kernels})"
    else:
        where = here.device_type
    if plans.not_tested_note(here.architecture):
        where += ", which no test ran on"
    libraries = dict.fromkeys(("triton", "torchao", *backends.distributions()))
    known = [(name, environment.version(name)) for name in libraries]
    versions = [f"{name} {version}" for name, version in known if version]
    ours = environment.version(environment.DISTRIBUTION) or "(from source)"
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return ", ".join(
        [f"moe_ops {ours} on {where}", f"torch {torch.__version__}", *versions, system]
    )
