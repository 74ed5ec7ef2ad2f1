"""A training step over experts frozen in nf4 (QLoRA), beside 16-bit experts and other libraries.

    python benchmarks/qlora_nf4.py [--tokens 8192] [--peers FOLDER] [--rounds 20] [--out FILE]
    python benchmarks/qlora_nf4.py --dry-run   # a tiny shape on this machine

The widths are Qwen3's. `frozen` passes gradients through the experts to tokens and router weights,
`lora` also trains adapters of rank 16. All get the same tokens, routing and gradient of the
output; those in nf4 the same codes and scales, whose gradients at 512 tokens are compared with
fp64 ones. Timed as in training.py: a forward and a backward pass, medians in ms.

FOLDER has wheels or zip files of two libraries, of which one file each is used, beside torch's
products for adapters, and rows that are sorted and summed as in theirs:

- unsloth: the grouped product of unsloth-zoo that decodes nf4 in its loop (moe_nf4_grouped.py);
- dequantize: weights decoded by bitsandbytes' Triton kernel in each pass, and torch's grouped
  product, as unsloth-zoo computes them by default.

Asserted: a step over nf4 allocates at its peak not more than one over 16-bit experts and a tenth
of it, and keeps as many bytes for the backward pass, so that no decoded weight is among them.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from harness import format_table, versions
from nf4_peers import NF4, PEERS, load_peers, peer
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
    ours_alone = {"bf16": plain, "int4 g32": int4, "nf4": nf4, "nf4 recompute": nf4}
    return ours_alone | dict.fromkeys(PEERS, nf4)


def layer_of(name: str, case: Case, inputs: Inputs, modules: dict[str, ModuleType]) -> Layer:
    if name in PEERS:
        return peer(name, modules[name], inputs)
    return ours(recompute=name.endswith("recompute"))(case, inputs)


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
            if name in PEERS and name not in modules:
                continue
            if case not in by_case:
                by_case[case] = make_inputs(case, device), {}
            inputs, expected = by_case[case]
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
                if tokens == given.tokens and "reason" not in row:
                    row["kept_mb"] = round(kept_bytes(layer, inputs) / 1e6, 1)
                    peak = peak_bytes(layer, inputs)
                    row["peak_mb"] = None if peak is None else round(peak / 1e6, 1)
                    calls[name] = lambda layer=layer, inputs=inputs: gradients(layer, inputs)
            except Exception as error:  # a peer may fail in any way
                row["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        gc.collect()
    times, _ = times_ms(calls, given.rounds, given.seconds, cuda)
    for name, ms in times.items():
        rows[name]["step_ms"] = round(ms, 3)
        rows[name]["over_nf4"] = round(ms / times["nf4"], 3)
    return list(rows.values())


def check_memory(rows: list[dict]) -> None:
    """Raise RuntimeError where a decoded weight is among what a step over nf4 allocates or
    keeps.
    """
    by_name = {row["implementation"]: row for row in rows}
    plain, nf4 = by_name["bf16"], by_name["nf4"]
    for what, most in (("peak_mb", 1.1), ("kept_mb", 1.001)):
        if plain.get(what) and not nf4[what] <= most * plain[what]:
            raise RuntimeError(
                f"{what} of a step over nf4 must be at most {most} times that over 16-bit "
                f"experts, {plain[what]}, got {nf4[what]}"
            )


def verdicts(rows: list[dict]) -> list[str]:
    found = {row["implementation"]: row["over_nf4"] for row in rows if "over_nf4" in row}
    lines = []
    for name, most in AT_MOST.items():
        if name in found:
            ratio = 1 / found[name]
            lines.append(f"nf4 takes {ratio:.2f} times {name}, wanted at most {most}")
    for name, least in AT_LEAST.items():
        if name in found:
            lines.append(f"{name} takes {found[name]:.2f} times nf4, wanted at least {least}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument(
        "--trains", nargs="+", choices=["frozen", "lora"], default=["frozen", "lora"]
    )
    parser.add_argument("--peers", help="a folder with wheels or zip files of the libraries")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    if given.dry_run:
        given.tokens, given.rounds = 64, 2
    elif not torch.cuda.is_available():
        raise SystemExit("qlora_nf4.py needs a GPU; --dry-run does not")
    modules, told = load_peers(given.peers)
    result: dict[str, Any] = {"argv": sys.argv, "peers": told, "rows": []}
    result["versions"] = versions("torch", "triton", "torch-moe-ops")
    if torch.cuda.is_available():
        result["gpu"] = torch.cuda.get_device_name()
    print(told, flush=True)
    for trains in given.trains:
        rows = measure(trains, given, modules)
        result["rows"] += rows
        columns = ("implementation", "step_ms", "over_nf4", "peak_mb", "kept_mb", "error")
        texts = [[str(row.get(column, "-")) for column in columns] for row in rows]
        print(f"{trains}, {given.tokens} tokens\n{format_table(list(columns), texts)}")
        for row in rows:
            if "reason" in row:
                print(f"  {row['implementation']}: {row['reason']}")
        print("\n".join(verdicts(rows)), flush=True)
        if given.out:
            given.out.write_text(json.dumps(result, indent=1) + "\n")
        check_memory(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
