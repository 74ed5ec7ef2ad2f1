"""A training step of one expert layer: moe_ops against transformers, Liger and SonicMoE.

    python benchmarks/training.py [--shapes qwen3 mixtral olmoe gptoss20] [--tokens 1024 8192]
                                  [--trains full frozen lora] [--schemes int4_w4a16 mxfp4_w4a16]
                                  [--only moe_ops transformers] [--rounds 20] [--seconds 4]
                                  [--results FOLDER] [--missing]
    python benchmarks/training.py --merge FILE ...  # add another run's rows to the results
    python benchmarks/training.py --report          # table and plots of all rows
    python benchmarks/training.py --dry-run         # a tiny shape on this machine; keeps nothing

Every implementation gets the same bf16 weights, tokens, routing and gradient of the output.
Timed in rounds, each in another order, by events around one eager or compiled call, medians in ms:
`infer` is the forward pass under torch.no_grad(), `forward` the one that records gradients, `step`
forward and backward pass. `full` trains the weights, `frozen` passes gradients through them to
tokens and router weights. `--schemes` adds frozen weights that are quantized, which moe_ops alone
takes. `lora` trains adapters of rank 16 over frozen weights, and `qlora_int4` and `qlora_mxfp4`
over weights of 4 bits; transformers' adapters are added to the weights, as PEFT adds them.
gptoss20 has biases and the activation of gpt-oss. `kept` are the bytes that wait for the backward
pass beside inputs and weights, `peak` the most that a step allocates. `error` is the largest
relative error of a gradient against fp64, if there are at most 1024 tokens.

The floor is the FLOPs of its products over the measured rate of a large bf16 product. Rows are
written to FOLDER/training_<GPU>.json after each case, replacing older ones, so that several short
runs complete one table; --missing leaves out cases in which all that is asked for was measured
with the same sources. A case gets fewer than --rounds rounds, but 5, where --seconds have passed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import report
import torch
from harness import times_ms, versions
from records import Results, add_options
from torch import Tensor
from training_cases import (
    ADAPTED,
    SHAPES,
    TOKENS,
    TRAINS,
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
from training_peers import DISTRIBUTIONS, IMPLEMENTATIONS, takes

from moe_ops import environment
from moe_ops.schemes import OTHER_NAMES, SCHEMES, get_scheme

QUANTIZED = [name for name in (*SCHEMES, *OTHER_NAMES) if get_scheme(name).weight is not None]
MAX_CHECKED_TOKENS = 1024
# gradients come from products of bf16 numbers, each rounded: some 2^-8 each
MAX_ERROR = 0.03


def calls_of(name: str, layer: Layer, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """What is timed of an implementation."""

    def infer() -> Tensor:
        with torch.no_grad():
            return layer(*inputs.args)

    return {
        f"{name}/infer": infer,
        f"{name}/forward": lambda: layer(*inputs.args),
        f"{name}/step": lambda: gradients(layer, inputs),
    }


def run_case(
    case: Case, only: list[str], rounds: int, seconds: float, device: torch.device
) -> list[dict]:
    """A row of numbers for each implementation, or the reason why it has none."""
    inputs, rows = make_inputs(case, device), []
    calls: dict[str, Callable[[], object]] = {}
    checked = case.num_tokens <= MAX_CHECKED_TOKENS
    expected = expected_gradients(inputs) if checked else {}
    for name in only:
        if not takes(name, case):
            continue
        row: dict[str, Any] = {**asdict(case), "implementation": name}
        rows.append(row)
        try:
            layer = IMPLEMENTATIONS[name](case, inputs)
            if checked:
                row["error"] = float(f"{error_of(layer, inputs, expected):.3g}")
                if not row["error"] < MAX_ERROR:
                    raise ValueError(f"its gradients are wrong: relative error {row['error']:.3g}")
            row["kept_bytes"] = kept_bytes(layer, inputs)
            row["peak_bytes"] = peak_bytes(layer, inputs)
            own = calls_of(name, layer, inputs)
            own[f"{name}/infer"]()
            calls |= own
        except Exception as error:  # a peer may fail in any way
            text = " ".join(str(error).split())[:200]
            row["reason"] = f"{type(error).__name__}: {text}"
    del expected
    found, count = times_ms(calls, rounds, seconds, device.type == "cuda")
    for row in rows:
        if "reason" not in row:
            name = row["implementation"]
            for what in report.PASSES:
                row[f"{what}_ms"] = round(found[f"{name}/{what}"], 4)
            row["rounds"] = count
    return rows


def cases_of(given: argparse.Namespace, results: Results, run: str) -> list[Case]:
    trained = [(t, ADAPTED.get(t, "")) for t in given.trains]
    trained += [("frozen", scheme) for scheme in given.schemes]
    cases = [Case(s, t, m, q) for s in given.shapes for t, q in trained for m in given.tokens]
    if not given.missing:
        return cases

    def measured(case: Case, name: str) -> bool:
        row = {**asdict(case), "implementation": name}
        return results.measured(report.step_key(row), run)

    return [
        case
        for case in cases
        if any(takes(name, case) and not measured(case, name) for name in given.only)
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shapes = ["qwen3", "mixtral", "olmoe", "gptoss20"]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=shapes)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--trains", nargs="+", choices=TRAINS, default=TRAINS[:1])
    parser.add_argument("--schemes", nargs="+", choices=QUANTIZED, default=[], metavar="SCHEME")
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, default=[*IMPLEMENTATIONS])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--missing", action="store_true", help="only cases not measured so far")
    add_options(parser)
    return parser.parse_args()


def main() -> int:
    given = parse()
    if given.merge or given.report:
        report.merge_and_report(given.merge, given.results, "training")
        return 0
    # transformers calls cached functions in what we compile
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if given.dry_run:
        given.shapes, given.tokens, given.rounds = ["tiny"], [64], 2
        given.results = Path(tempfile.mkdtemp(prefix="training_dry_run_"))
    elif not cuda:
        raise SystemExit("training.py needs a GPU; --dry-run does not")
    gpu = torch.cuda.get_device_name().replace(" ", "_") if cuda else "cpu"
    results = report.open_results(given.results / f"training_{gpu}.json")
    run = results.begin(sys.argv, not cuda)
    results.runs[run]["versions"] |= versions(*DISTRIBUTIONS)
    rate = results.runs[run]["machine"].get("bf16_matmul_tflop_s")
    for case in environment.progress_bar(cases_of(given, results, run), "training"):
        start = time.perf_counter()
        rows = run_case(case, given.only, given.rounds, given.seconds, device)
        report.show_steps(case, rows, rate * 1e12 if rate else None)
        print(f"  {time.perf_counter() - start:.1f} s", flush=True)
        for row in rows:
            results.add(row | {"run": run})
        results.write()  # a run that is cut short keeps what it has
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    print(results.path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
