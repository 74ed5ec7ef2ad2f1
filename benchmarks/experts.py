"""One expert layer on a GPU: moe_ops against its peers, time beside floor beside error.

    python benchmarks/experts.py [--shapes qwen3 mixtral gptoss20] [--schemes bf16 fp8_block]
                                 [--tokens 1 8 64] [--routing uniform zipf] [--only moe_ops ...]
                                 [--replays 15] [--checked-tokens 16] [--results FOLDER]
                                 [--missing] [--limit SECONDS]
    python benchmarks/experts.py --merge FILE ...   # add another run's rows to the results
    python benchmarks/experts.py --report       # table, means, worst cells and plots of all rows
    python benchmarks/experts.py --dry-run      # all but graphs, tiny, on a CPU; keeps nothing

A CUDA graph holds one pass over all routing sets of a cell; graphs of all implementations are
replayed in turn, and a time is the median replay over the number of sets. Rows are written to
FOLDER/experts_<GPU>.json after each cell, replacing older rows of the same cell and
implementation, so several short runs complete one table; --missing leaves out the cells in which
all that is asked for was measured with the same sources. A run begins no cell after --limit.
docs/performance.md describes the method.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import report
import torch
import vllm_cutlass
from cases import (
    H200,
    MAX_CHECKED_TOKENS,
    ROUTINGS,
    SCHEMES,
    SHAPES,
    TOKENS,
    Case,
    Cell,
    Limits,
    Weights,
    checked_tokens,
    floor_us,
    make_cell,
    make_plain_weights,
    make_sets,
    make_weights,
    oracle,
)
from harness import (
    capture,
    interleaved_ms,
    interleaved_replays_us,
    relative_error,
    summary,
)
from peers import DEFAULT, IMPLEMENTATIONS, Layer
from records import OURS, Results, add_options
from torch import Tensor

from moe_ops.schemes import get_scheme

# A call slower than this is not replayed: emulation of large quantized weights takes seconds a
# call.
MAX_CALL_MS = 100.0
# Results this far from the bf16 weights' fp64 result are wrong, and not timed.
MAX_ERROR = {4: 0.4, 5: 0.3, 6: 0.2, 8: 0.15, 16: 0.02}  # by bits of a weight
DRY_RUN = {"shapes": ["tiny", "tiny_ep", "tiny_bias"], "tokens": [1, 64], "schemes": list(SCHEMES)}


def limits_of(run: dict[str, Any]) -> Limits:
    """The H200's known limits; for another GPU what it reached in this run, fp8 at twice bf16."""
    machine = run["machine"]
    if "H200" in machine.get("gpu", "H200"):
        return H200
    rate = machine["bf16_matmul_tflop_s"] * 1e12
    return Limits(machine["copy_tb_s"] * 1e12, rate, 2 * rate)


def bits_of(scheme: str) -> int:
    """Bits of a weight."""
    weight = get_scheme(scheme).weight
    return 16 if weight is None else weight.format.bits


def call_ms(layer: Layer) -> float:
    """Time of one eager call on the last set, host included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    layer.call(-1)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def device_lost() -> bool:
    """Whether an earlier kernel left the device unusable for this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def reason_of(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


class CellRun:
    """Builds, captures, replays and checks the implementations of one cell."""

    def __init__(self, cell: Cell, dry: bool, checked: int | None):
        self.cell, self.dry, self.checked = cell, dry, checked
        self.layers: dict[str, Layer] = {}
        self.graphs: dict[str, Any] = {}
        self.outputs: dict[str, Tensor] = {}  # of the last set
        self.reasons: dict[str, str] = {}
        self.seconds: dict[str, float] = {}  # spent on each implementation, on replays and errors

    @contextmanager
    def spending(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[what] = time.perf_counter() - start

    def prepare(self, name: str, builder: Any) -> None:
        """Build, warm up and capture one implementation, or note why it cannot run."""
        try:
            if isinstance(builder, str):
                raise RuntimeError(builder)
            layer = builder(self.cell)
            for _ in range(2):
                output = layer.call(len(self.cell.sets) - 1)
            if not self.dry:
                elapsed = call_ms(layer)
                if elapsed > MAX_CALL_MS:
                    raise RuntimeError(f"a call takes {elapsed:.0f} ms; not replayed")
                self.graphs[name], outputs = capture(layer.call, len(self.cell.sets))
                output = outputs[-1]
            self.layers[name], self.outputs[name] = layer, output
        except (
            Exception
        ) as error:  # peers raise whatever they like; the table goes on without them
            self.reasons[name] = builder if isinstance(builder, str) else reason_of(error)
            self.graphs.pop(name, None)

    def times_us(self, replays: int) -> dict[str, list[float]]:
        """Times a set of every implementation that was captured (dry run: wall clock, CPU)."""
        count = len(self.cell.sets)
        if not self.dry:
            return interleaved_replays_us(self.graphs, replays, count) if self.graphs else {}
        calls = {name: layer.call for name, layer in self.layers.items()}
        times = interleaved_ms(calls, rounds=2, num_sets=count)
        return {name: [ms * 1e3 for ms in values] for name, values in times.items()}

    def errors(self) -> dict[str, dict[str, float]]:
        """Relative errors of what the replays left in the last set's output, by oracle.

        "error": against fp64 with the bf16 weights. For quantized schemes also
        "error_of_activations": against fp64 with the dequantized weights; and for moe_ops
        "error_of_kernel": with the activations rounded as the scheme says too.
        """
        case, last = self.cell.case, len(self.cell.sets) - 1
        tokens = checked_tokens(case.num_tokens, self.checked)
        results = {}
        for name, output in self.outputs.items():
            finish = self.layers[name].finish
            results[name] = (finish(output) if finish else output)[tokens.to(output.device)]
        errors: dict[str, dict[str, float]] = {name: {} for name in results}

        def compare(kind: str, names: Iterable[str], *how: bool) -> None:
            expected = oracle(self.cell, last, tokens, *how)
            for name in names:
                errors[name][kind] = float(f"{relative_error(results[name], expected):.3g}")

        compare("error", results)
        if case.scheme:
            compare("error_of_activations", results, True)
            # One scale for all activations cannot be had from a sample of the tokens.
            if case.scheme != "fp8_tensor" or case.num_tokens <= MAX_CHECKED_TOKENS:
                compare("error_of_kernel", [n for n in results if n.startswith(OURS)], True, True)
        return errors


def run_cell(
    cell: Cell,
    builders: dict[str, Any],
    floor: float,
    arguments: argparse.Namespace,
    run: str,
    dry: bool,
) -> tuple[list[dict], dict[str, float]]:
    """The rows of one cell, one for each implementation that ran or gave a reason; what took how
    many s."""
    work = CellRun(cell, dry, arguments.checked_tokens)
    for name, builder in builders.items():
        with work.spending(name):
            work.prepare(name, builder)
        if not dry and device_lost():
            raise SystemExit(
                f"the GPU is unusable after {name!r} on {cell.case}; earlier rows are written, "
                f"run the rest without it (--only)"
            )
    with work.spending("replays"):
        times = work.times_us(arguments.replays)
    with work.spending("errors"):
        errors = work.errors() if work.outputs else {}
    rows = []
    for name in builders:
        row: dict[str, Any] = {"case": asdict(cell.case), "implementation": name, "run": run}
        row |= {"floor_us": round(floor, 3), "sets": len(cell.sets)}
        if name in times:
            error = errors[name]["error"]
            if error <= MAX_ERROR[bits_of(cell.case.scheme)]:  # false for NaN
                row["us"] = {key: round(us, 3) for key, us in summary(times[name]).items()}
                row |= {"replays": len(times[name]), **errors[name]}
            else:
                row["reason"] = f"wrong result: relative error {error:.3g}"
        else:
            row["reason"] = work.reasons[name]
        rows.append(row)
    return rows, work.seconds


def make_builders(weights: Weights, only: list[str]) -> dict[str, Any]:
    """Name -> builder, or the reason why there is none."""
    builders: dict[str, Any] = {}
    for name in only:
        implementation = IMPLEMENTATIONS[name]
        if weights.scheme not in implementation.schemes:
            continue
        if weights.shape.bias and not implementation.biases:
            builders[name] = f"takes no biases, or not with {weights.shape.activation}"
            continue
        if weights.shape.activation == "situ" and not name.startswith(OURS):
            builders[name] = "called here with other activations alone"
            continue
        try:
            builders[name] = implementation.make(weights)
        except Exception as error:  # as in CellRun.prepare
            builders[name] = reason_of(error)
    return builders


def describe_cell(case: Case, floor: float, rows: list[dict], seconds: dict[str, float]) -> str:
    """One line of progress, with what took longest."""
    parts = []
    for row in rows:
        if "us" in row:
            us = row["us"]["median"]
            parts.append(f"{row['implementation']} {us:.1f} ({row['error']:.1e})")
    where = f"{case.shape} {case.scheme or 'bf16'} {case.routing} M={case.num_tokens}"
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:3]
    spent = ", ".join(f"{name} {value:.1f}" for name, value in longest)
    total = sum(seconds.values())
    return f"{where}: floor {floor:.1f} us | {' | '.join(parts)} [{total:.1f} s: {spent}]"


def compile_ahead(cases: Sequence[Case]) -> dict[str, Future]:
    """For each shape what is done once this library's kernels are compiled for its cases: those of
    the next shapes are while the first is measured."""
    pool = ThreadPoolExecutor(1)
    shapes = dict.fromkeys(case.shape for case in cases)
    return {
        shape: pool.submit(compile_kernels, [case for case in cases if case.shape == shape])
        for shape in shapes
    }


def compile_kernels(cases: Iterable[Case]) -> None:
    """Compile this library's kernels for all cells at once."""
    from tools.compile_kernels import TRITON_E2M1, Call, compile_here

    calls = []
    for case in cases:
        layer = case.layer
        sizes = (layer.num_experts, layer.top_k, layer.hidden_size, layer.intermediate_size)
        calls.append(
            Call(
                *(sizes, case.num_tokens, case.scheme),
                activation=layer.activation,
                bias=layer.bias,
                layout=TRITON_E2M1 if "fp4_w4a16" in case.scheme else "",
            )
        )
    compile_here(calls)


def fits(shape: str, scheme: str) -> bool:
    """Whether rows of both weights are whole groups of the scheme, where it wants that."""
    layer, weight = SHAPES[shape], get_scheme(scheme).weight
    columns = 1 if weight is None else weight.whole_columns
    return not any(n % columns for n in (layer.hidden_size, layer.intermediate_size))


def cases_of(arguments: argparse.Namespace, results: Results, run: str) -> list[Case]:
    """The cells to measure, those of a shape together, and in them those of a scheme."""
    sizes = (arguments.shapes, arguments.schemes, arguments.routing, arguments.tokens)
    cases = [
        Case(shape, scheme, tokens, routing)
        for shape, scheme, routing, tokens in itertools.product(*sizes)
        if fits(shape, scheme)
    ]
    if not arguments.missing:
        return cases

    def measured(case: Case, name: str) -> bool:
        cell = (case.shape, case.scheme, case.routing, case.num_tokens)
        return results.measured((*cell, name), run)

    return [
        case
        for case in cases
        if any(
            case.scheme in IMPLEMENTATIONS[name].schemes and not measured(case, name)
            for name in arguments.only
        )
    ]


def run_all(arguments: argparse.Namespace, results: Results, run: str, dry: bool) -> set[tuple]:
    """Measure every cell asked for, until the limit; weights are made once a shape, quantized once
    a scheme."""
    end = time.perf_counter() + arguments.limit
    device = torch.device("cpu" if dry else "cuda")
    limits = limits_of(results.runs[run])
    l2 = 0 if dry else torch.cuda.get_device_properties(device).L2_cache_size
    l2 = l2 if dry else max(l2, 50 << 20)
    told: set[tuple[str, str]] = set()
    measured = set()
    cases = cases_of(arguments, results, run)
    compiled = {}
    if not dry and any(name.startswith(OURS) for name in arguments.only):
        compiled = compile_ahead(cases)
    for shape, of_shape in itertools.groupby(cases, lambda case: case.shape):
        plain = make_plain_weights(SHAPES[shape], device)
        if shape in compiled:
            compiled[shape].result()
        for scheme, of_scheme in itertools.groupby(of_shape, lambda case: case.scheme):
            weights = make_weights(SHAPES[shape], scheme, *plain)
            builders = make_builders(weights, arguments.only)
            for case in of_scheme:
                if time.perf_counter() > end:
                    print(f"cut short after {arguments.limit} s: --missing measures the rest")
                    return measured
                sets = make_sets(case, l2)
                floor = floor_us(case, sets, limits)
                cell = make_cell(case, weights, sets)
                rows, seconds = run_cell(cell, builders, floor, arguments, run, dry)
                for row in rows:
                    results.add(row)
                    measured.add(report.layer_key(row)[:4])
                results.write()
                print(describe_cell(case, floor, rows, seconds), flush=True)
                for row in rows:
                    why = (row["implementation"], row.get("reason", ""))
                    if why[1] and why not in told:
                        told.add(why)
                        print(f"  not {why[0]}: {why[1]}", flush=True)
                del cell
                release(device)
            del weights, builders
            release(device)
    return measured


def release(device: torch.device) -> None:
    """Give graphs' and weights' memory back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shapes = [name for name in SHAPES if not name.startswith("tiny")]
    parser.add_argument(
        "--shapes", nargs="+", choices=shapes, default=["qwen3", "mixtral", "gptoss20"]
    )
    parser.add_argument(
        *("--schemes",),
        nargs="+",
        type=scheme_name,
        default=[""],
        help="bf16, or names of schemes",
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=["uniform"])
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, default=list(DEFAULT))
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--checked-tokens", type=int, help="tokens whose errors are taken")
    parser.add_argument("--missing", action="store_true", help="only cases not measured so far")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds until the last cell"
    )
    add_options(parser)
    return parser.parse_args(argv)


def scheme_name(text: str) -> str:
    """The scheme that a name on the command line is of, "" for "bf16"."""
    try:
        name = "" if text == "bf16" else get_scheme(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if name not in SCHEMES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(SCHEMES)}, got {text!r}")
    return name


def main() -> None:
    arguments = parse()
    torch.set_grad_enabled(False)
    # transformers calls cached functions in what we compile; the warning returns with every cell
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
    if arguments.merge or arguments.report:
        return report.merge_and_report(arguments.merge, arguments.results, "experts")
    if arguments.dry_run:
        vars(arguments).update(DRY_RUN, routing=list(ROUTINGS), only=list(IMPLEMENTATIONS))
        folder = Path(tempfile.mkdtemp(prefix="experts_dry_run_"))
        results = report.open_results(folder / "experts_dry_run.json")
    elif not torch.cuda.is_available():
        print("This benchmark needs a GPU; none found, nothing measured. --dry-run needs none.")
        return
    else:
        gpu = torch.cuda.get_device_name().replace(" ", "_")
        results = report.open_results(arguments.results / f"experts_{gpu}.json")
    run = results.begin(sys.argv, arguments.dry_run)
    if vllm_cutlass.version():
        results.runs[run]["versions"]["vllm"] = vllm_cutlass.version()
    print(results.runs[run], flush=True)
    measured = run_all(arguments, results, run, arguments.dry_run)
    if arguments.dry_run:
        report.report(results.path)
    else:
        report.show_layers(results, measured)
    print(results.path)


if __name__ == "__main__":
    main()
