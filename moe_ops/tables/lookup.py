"""Measured tables, one JSON file per GPU: the times of backends by number of tokens, and the
fastest configs of backend triton. `python -m moe_ops.tuning` measures both.

An entry is one problem (`KEYS`). "backends" lists {num_tokens, us, versions}: us has the
microseconds per layer of each measured backend, all from one run. "triton" lists {num_tokens, us,
triton, config}: config has the fields of kernels.configs.LayerConfig that are not defaults.

claims.json is for layers without a table: the average rows per expert from which a backend is
faster than those before it ("since"), by measurements of other layers and GPUs, and those from
which it no longer is ("until"). A row applies to experts whose w2 has at least "elements"
elements; the first one that applies counts. Under expert parallelism most pairs belong to experts
elsewhere, which the number of rows does not show.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_CLAIMS = _FOLDER / "claims.json"


# relative differences below this are noise: the times of a layer repeat to within 1 %
MARGIN = 0.01


KEYS = ("num_experts", "hidden_size", "intermediate_size", "top_k", "scheme", "dtype")


def tables() -> dict[str, Path]:
    """GPU name -> file of its measured table."""
    found = {}
    for path in sorted(_FOLDER.glob("*.json")):
        table = json.loads(path.read_text())
        if "gpu" in table:
            found[table["gpu"]] = path
    return found


@functools.cache
def _claims() -> list[dict]:
    return json.loads(_CLAIMS.read_text())["claims"]


def claim(backend: str, scheme: str, elements: int) -> tuple[int, int | None] | None:
    """(since, until): the rows per expert between which a backend is faster on layers that were
    not timed, whose w2 has `elements` elements per expert. None without a claim.
    """
    for row in _claims():
        if (row["backend"], row["scheme"]) == (backend, scheme) and elements >= row.get(
            "elements", 0
        ):
            return row["since"], row.get("until")
    return None


def path_of(gpu_name: str) -> Path:
    """The file that holds, or would hold, a GPU's table."""
    return _FOLDER / f"{gpu_name.replace(' ', '_')}.json"


_in_use: dict[str, str] = {}  # GPU name -> text of the table that is used in place of its file


def text(gpu_name: str) -> str:
    """The table of a GPU, as its file has it or as `use` gave it; one without entries if it has
    none.
    """
    path = None if gpu_name in _in_use else tables().get(gpu_name)
    without = json.dumps({"gpu": gpu_name, "entries": []})
    return _in_use.get(gpu_name, without) if path is None else path.read_text()


def use(gpu_name: str, table: str) -> None:
    """Use this text of a table in place of a GPU's file, for plans that this process makes from
    now on.

    Raises:
        ValueError: it is no table of this GPU.
    """
    _rows(gpu_name, table)
    _in_use[gpu_name] = table
    _entries.cache_clear()


def _rows(gpu_name: str, table: str) -> dict[tuple, dict]:
    try:
        read = json.loads(table)
        if read["gpu"] == gpu_name:
            return {tuple(row[k] for k in KEYS): row for row in read["entries"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"table must have the fields of a measured table: {error}") from error
    raise ValueError(f"table must be one of {gpu_name}, got one of {read['gpu']}")


@functools.cache
def _entries(gpu_name: str) -> dict[tuple, dict]:
    return _rows(gpu_name, text(gpu_name))


def backend_times(
    gpu_name: str,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    scheme: str,
    dtype: str,
) -> list[tuple[int, dict[str, float]]]:
    """(M, backend -> microseconds per layer) of a problem, ascending; empty if it was not
    measured.
    """
    key = (num_experts, hidden_size, intermediate_size, top_k, scheme, dtype)
    rows = _entries(gpu_name).get(key, {}).get("backends", [])
    return [(row["num_tokens"], row["us"]) for row in rows]


def look_up(*problem: Any) -> tuple[tuple[int, str], ...]:
    """Tiers (largest M, backend) of a problem in ascending order, -1 for no bound; () if it was
    not measured.

    Arguments: those of `backend_times`, then the names of the backends that accept the problem.
    Times of other backends are ignored: if the fastest is not installed, the next takes its place.
    """
    *key, accepted = problem
    return crossovers(backend_times(*key), accepted)


def crossovers(
    times: Sequence[tuple[int, Mapping[str, float]]], accepted: Sequence[str]
) -> tuple[tuple[int, str], ...]:
    """Tiers (largest M, backend) from times that were measured at ascending numbers of tokens.

    A tier ends where another backend is faster by more than MARGIN: between two measured M where
    the times of both backends, interpolated on logarithmic scales, cross. The first accepted
    backend runs fewer tokens than were measured.
    """
    tiers: list[tuple[int, str]] = []
    before: tuple[int, Mapping[str, float]] | None = None
    current = ""
    for M, us in times:
        us = {name: value for name, value in us.items() if name in accepted}
        if not us:
            continue
        best = min(us, key=lambda name: us[name])
        if before is None:
            current = best
            if best != accepted[0] and M > 1:
                tiers.append((M - 1, accepted[0]))
        elif best != current and us[best] < us.get(current, math.inf) * (1 - MARGIN):
            tiers.append((_crossing(before, (M, us), current, best), current))
            current = best
        before = (M, us)
    return (*tiers, (-1, current)) if current else ()


def _crossing(
    low: tuple[int, Mapping[str, float]],
    high: tuple[int, Mapping[str, float]],
    old: str,
    new: str,
) -> int:
    """The largest M at which `new` is not yet faster than `old`: at least low's, below high's."""
    (first, at_first), (last, at_last) = low, high
    part = 0.5  # if one of them was not measured at both
    if old in at_first and new in at_first and old in at_last:
        slower = max(0.0, math.log(at_first[new] / at_first[old]))
        part = slower / (slower + math.log(at_last[old] / at_last[new]))
    return min(last - 1, int(first * (last / first) ** part))


def layer_config(
    gpu_name: str,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    scheme: str,
    dtype: str,
    num_tokens: int,
) -> dict[str, Any] | None:
    """Fields of the fastest LayerConfig at the measured M that is nearest on a logarithmic scale,
    or None.

    M = 1 runs without a sorting kernel, so it takes only a config that was measured at 1, and no
    other M takes that. Configs measured at 4 M or more, or at M / 4 or less, are not taken.
    """
    key = (num_experts, hidden_size, intermediate_size, top_k, scheme, dtype)
    rows = _entries(gpu_name).get(key, {}).get("triton", [])
    rows = [row for row in rows if (row["num_tokens"] == 1) == (num_tokens == 1)]
    if not rows:
        return None

    def order(row: dict) -> tuple:
        """Distance from M, then tile sizes: of two that are equally near, the smaller."""
        config = row["config"]
        tiles = [*config["gemm1"].values(), *config["gemm2"].values()]
        return abs(math.log2(row["num_tokens"] / num_tokens)), config["block_m"], tiles

    nearest = min(rows, key=order)
    return nearest["config"] if order(nearest)[0] < 2 else None
