"""A training step over experts frozen in nf4 (QLoRA), beside 16-bit experts and other libraries.

    python benchmarks/qlora_nf4.py [--tokens 8192] [--peers FOLDER] [--rounds 20] [--limit SECONDS]
                                   [--results FOLDER]
    python benchmarks/qlora_nf4.py --dry-run   # a tiny shape on this machine

The widths are Qwen3's. `frozen` passes gradients through the experts to tokens and router weights,
`lora` also trains adapters of rank 16. All get the same tokens, routing and gradient of the
output; those in nf4 the same codes and scales, whose gradients at 512 tokens are compared with
fp64 ones. Timed as in training.py: a forward and a backward pass, medians in ms.

FOLDER has wheels or zip files of libraries, whose products run beside torch's products for
adapters, and rows that are sorted and summed as in unsloth-zoo:

- unsloth: the grouped product of unsloth-zoo that decodes nf4 in its loop (moe_nf4_grouped.py);
- dequantize: weights decoded by bitsandbytes' Triton kernel in each pass, and torch's grouped
  product, as unsloth-zoo computes them by default;
- grouped-nf4-gemm: its product of training, which on Hopper decodes and calls torch's grouped
  product, too. It wants the rows of each expert on the host.

Asserted: a step over nf4 allocates at its peak not more than one over 16-bit experts and a tenth
of it, and keeps as many bytes for the backward pass, so that no decoded weight is among them.
Rows are written to FOLDER/qlora_nf4_<GPU>.json as they come. Past
the limit no more is begun.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from harness import RESULTS, format_table
from nf4_peers import NF4, PEERS, load_peers, peer
from records import describe_run
from torch import Tensor
from training import MAX_ERROR, times_ms
from training_cases import (
    Case,
    Inputs,
    Layer,
    error_of,
    expected_gradients,
    gradients,
    kept_bytes,
    make_inputs,
    peak_bytes,
)
from training_peers import ours

CHECKED_TOKENS = 512
# of the time of a step, and what they are measured by: at most, or at least
AT_MOST, AT_LEAST = {"bf16": 1.25}, {"unsloth": 1.5, "dequantize": 1.2}


# --- what is measured ----------------------------------------------------------------------------


def cases_of(trains: str, tokens: int, shape: str) -> dict[str, Case]:
    """By the name of what runs them."""
    plain = Case(shape, trains, tokens)
    nf4 = replace(plain, scheme=NF4)
    int4 = replace(plain, scheme="int4_w4a16:g32")
    peers = dict.fromkeys(PEERS, nf4)
    return {"bf16": plain, "nf4": nf4} | peers | {"int4 g32": int4, "nf4 recompute": nf4}


def layer_of(name: str, case: Case, inputs: Inputs, modules: dict[str, ModuleType]) -> Layer:
    if name in PEERS:
        return peer(name, modules[name], inputs)
    return ours(recompute=name.endswith("recompute"))(case, inputs)


def why_not(name: str, modules: dict[str, ModuleType]) -> str | None:
    """Why an implementation does not run."""
    if name in PEERS and name not in modules:
        return "its archive is missing or does not import"
    return None


def measure(trains: str, given: argparse.Namespace, modules: dict[str, ModuleType]) -> list[dict]:
    """A row for each implementation."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], object]] = {}
    shape = "tiny" if given.dry_run else "qwen3"
    by_case: dict[Case, tuple[Inputs, dict[str, Tensor]]] = {}
    for tokens in (min(CHECKED_TOKENS, given.tokens), given.tokens):
        by_case.clear()  # before the next are made
        for name, case in cases_of(trains, tokens, shape).items():
            row = rows.setdefault(name, {"trains": trains, "implementation": name})
            if "reason" in row:
                continue
            row |= {"reason": reason} if (reason := why_not(name, modules)) else {}
            if time.perf_counter() > given.until:
                row["reason"] = "the limit was reached"
            if "reason" in row:
                continue
            if case not in by_case:
                by_case[case] = make_inputs(case, device), {}
            inputs, expected = by_case[case]
            began = time.perf_counter()
            try:
                layer = layer_of(name, case, inputs, modules)
                if tokens < given.tokens or given.dry_run:
                    if not expected:
                        expected |= expected_gradients(inputs)
                    row["error"] = float(f"{error_of(layer, inputs, expected):.3g}")
                    if name == "unsloth" and modules[name].FAILED_SHAPES:
                        raise RuntimeError(f"it fell back: {modules[name].FAILED_SHAPES}")
                    if not row["error"] < MAX_ERROR:
                        raise ValueError(f"relative error {row['error']:.3g} of a gradient")
                if tokens == given.tokens:
                    row["kept_mb"] = round(kept_bytes(layer, inputs) / 1e6, 1)
                    peak = peak_bytes(layer, inputs)
                    row["peak_mb"] = None if peak is None else round(peak / 1e6, 1)
                    calls[name] = functools.partial(gradients, layer, inputs)
            except Exception as error:  # a peer may fail in any way
                row["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                print(f"  {name}: {row['reason']}", flush=True)
            seconds = time.perf_counter() - began
            if seconds > 2:
                print(f"  {trains} {name} at {tokens} tokens: {seconds:.0f} s", flush=True)
        gc.collect()
    times, _ = times_ms(calls, given.rounds, given.seconds, cuda)
    for name, ms in times.items():
        rows[name]["step_ms"] = round(ms, 3)
        if "bf16" in times:
            rows[name]["over_bf16"] = round(ms / times["bf16"], 3)
    return list(rows.values())


def check_memory(rows: list[dict]) -> None:
    """Raise RuntimeError where a decoded weight is among what a step over nf4 allocates or
    keeps.
    """
    by_name = {row["implementation"]: row for row in rows}
    plain, nf4 = by_name["bf16"], by_name["nf4"]
    for what, most in (("peak_mb", 1.1), ("kept_mb", 1.001)):
        if plain.get(what) and nf4.get(what) and not nf4[what] <= most * plain[what]:
            raise RuntimeError(
                f"{what} of a step over nf4 must be at most {most} times that over 16-bit "
                f"experts, {plain[what]}, got {nf4[what]}"
            )


def verdicts(rows: list[dict]) -> list[str]:
    """What ours takes beside others."""
    found = {row["implementation"]: row["step_ms"] for row in rows if "step_ms" in row}
    nf4, lines = found.get("nf4"), []
    if nf4 is None:
        return []
    for name, most in AT_MOST.items():
        if name in found:
            ratio = nf4 / found[name]
            lines.append(f"nf4 takes {ratio:.2f} times {name}, wanted at most {most}")
    for name, least in AT_LEAST.items():
        if name in found:
            ratio = found[name] / nf4
            lines.append(f"{name} takes {ratio:.2f} times nf4, wanted at least {least}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument(
        "--trains", nargs="+", choices=["frozen", "lora"], default=["frozen", "lora"]
    )
    parser.add_argument("--peers", help="a folder with wheels or zip files of the libraries")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=6.0, help="of timing, for what trains")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds in all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a folder for the JSON file")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    given.until = time.perf_counter() + given.limit - given.seconds - 5
    cuda = torch.cuda.is_available()
    if given.dry_run:
        given.tokens, given.rounds = 64, 2
    elif not cuda:
        raise SystemExit("qlora_nf4.py needs a GPU; --dry-run does not")
    modules, told = load_peers(given.peers)
    run = describe_run(sys.argv, not cuda)
    result: dict[str, Any] = {"run": run, "tokens": given.tokens, "peers": told, "rows": []}
    gpu = torch.cuda.get_device_name().replace(" ", "_") if cuda else "CPU"
    path = given.results / f"qlora_nf4_{gpu}.json"
    print(told, flush=True)
    for trains in given.trains:
        rows = measure(trains, given, modules)
        result["rows"] += rows
        columns = ("implementation", "step_ms", "over_bf16", "peak_mb", "kept_mb", "error")
        texts = [[str(row.get(column, "-")) for column in columns] for row in rows]
        print(f"{trains}, {given.tokens} tokens\n{format_table(list(columns), texts)}")
        for row in rows:
            if "reason" in row:
                print(f"  {row['implementation']}: {row['reason']}")
        print("\n".join(verdicts(rows)), flush=True)
        if not given.dry_run:
            given.results.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
    for trains in given.trains:
        check_memory([row for row in result["rows"] if row["trains"] == trains])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
