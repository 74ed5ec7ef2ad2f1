"""python -m moe_ops.tuning: measure backends, and the configs of the triton backend, for shapes on
this GPU.

    python -m moe_ops.tuning --shape 128 2048 768 8 [--scheme fp8_block] [--m 1 8 64 1024]
    python -m moe_ops.tuning --backends --shape 128 2048 768 8 [--scheme "" fp8_block]
    python -m moe_ops.tuning --check --shape 64 2048 1408 6 ... [--results FILE] [--limit SECONDS]
    python -m moe_ops.tuning --list --shape 64 2048 1408 6 [--m 64]

A shape is E K I top_k. Results are written to the package's table of this GPU (or --table FILE)
after every M, so that a stopped run can be continued; --again measures what the table has already.
--backends times every backend but torch that takes the shape (or the backends named), from which
"auto" makes its tiers. It uses the measured configs, so measure these first. --check writes no
table: it reports what shapes without one lose, as the heuristic's time over the best time of a
search, both of which are replayed in turn. --results keeps that as JSON, --most shortens the
search to the first of the tiles that an estimate orders, and --limit ends it: the same command
goes on where it stopped.
--list measures nothing and needs no GPU: it prints what is chosen, and the tiles that an estimate
of their time puts first.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_ops import backends as backends_module
from moe_ops import environment
from moe_ops.checks import check_one_of
from moe_ops.kernels import launch
from moe_ops.kernels.configs import fields_of
from moe_ops.schemes import get_scheme
from moe_ops.tables import lookup, record

if TYPE_CHECKING:
    from moe_ops.tuning.search import Target


CONFIGS_M = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BACKENDS_M = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@environment.importing_torchao(in_command=True)
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moe_ops.tuning",
        description=" ".join((__doc__ or "").split("\n\n")[0].split()),
    )
    parser.add_argument(
        "--shape",
        type=int,
        nargs=4,
        action="append",
        required=True,
        metavar=("E", "K", "I", "TOP_K"),
    )
    parser.add_argument("--scheme", nargs="+", default=[""], help='"" (plain) or scheme names')
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--m", type=int, nargs="+", help="numbers of tokens")
    parser.add_argument("--table", type=Path, help="file to write; default: the package's own")
    parser.add_argument(
        "--again", action="store_true", help="measure what the table, or --results, has, too"
    )
    parser.add_argument(
        "--backends",
        nargs="*",
        metavar="NAME",
        help="time backends; without a name: all but torch",
    )
    parser.add_argument("--check", action="store_true", help="compare only, record no table")
    parser.add_argument("--results", type=Path, help="file for what --check finds")
    parser.add_argument("--most", type=int, help="tiles of a product that --check times")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of --check")
    parser.add_argument("--list", action="store_true", help="print tiles in order, time none")
    arguments = parser.parse_args()
    _check(arguments, parser.error)
    if arguments.list:
        return _list(arguments, parser.error)
    if not torch.cuda.is_available():
        sys.exit("tuning measures kernels and needs a GPU; none found, nothing measured")
    from moe_ops.tuning import backends
    from moe_ops.tuning.search import Target

    gpu = torch.cuda.get_device_name()
    path = arguments.table or lookup.path_of(gpu)
    targets = [
        Target(E, K, I, top_k, get_scheme(scheme).name, arguments.dtype)
        for scheme in arguments.scheme
        for E, K, I, top_k in arguments.shape
    ]
    if arguments.check:
        return _compare(targets, arguments)
    not_measured = []
    for target in targets:
        if arguments.backends is None:
            counts = sorted(arguments.m or CONFIGS_M)
            _measure_configs(target, counts, path, gpu, arguments.again)
        else:
            counts = sorted(arguments.m or BACKENDS_M)
            again = arguments.again
            if not backends.measure(target, counts, path, gpu, arguments.backends, again):
                not_measured.append(str(target))
        torch.cuda.empty_cache()
    print(json.dumps({"table": str(path)}))
    if not_measured:
        sys.exit(f"nothing measured, for the reasons above: {', '.join(not_measured)}")


def _list(arguments: argparse.Namespace, error: Callable[[str], object]) -> None:
    """Print the tiles of each shape and number of tokens, on the GPU at hand or else an H200."""
    from moe_ops.tuning.search import Target, listing

    gpu = launch.gpu(torch.cuda.current_device() if torch.cuda.is_available() else -1)
    for scheme in arguments.scheme:
        for E, K, I, top_k in arguments.shape:
            target = Target(E, K, I, top_k, get_scheme(scheme).name, arguments.dtype)
            print(target)
            for M in sorted(arguments.m or CONFIGS_M):
                try:
                    print(listing(target, M, gpu))
                except ValueError as wrong:
                    error(str(wrong))


def _check(arguments: argparse.Namespace, error: Callable[[str], object]) -> None:
    """Call `error` if something is wrong with the command line."""
    for E, K, I, top_k in arguments.shape:
        if min(E, K, I, top_k) < 1 or top_k > E:
            error(f"--shape must be positive, TOP_K at most E; got {E} {K} {I} {top_k}")
    for scheme in arguments.scheme:
        try:
            get_scheme(scheme)
        except ValueError as wrong:
            error(f"--scheme: {wrong}; '' is for plain weights")
    of_check = [name for name in ("results", "most") if getattr(arguments, name) is not None]
    if arguments.limit < math.inf:
        of_check.append("limit")
    if of_check and not arguments.check:
        error(f"--{of_check[0]} is of --check, and must come with it")
    if arguments.most is not None and arguments.most < 1:
        error(f"--most must be at least 1, got {arguments.most}")
    for M in arguments.m or ():
        if M < 1:
            error(f"--m must be positive numbers of tokens, got {M}")
    if arguments.backends is None:
        return
    if arguments.check:
        error("--check compares tiles of triton, so it must come without --backends")
    for name in arguments.backends:
        try:
            check_one_of("--backends", name, backends_module.list_backends())
        except ValueError as wrong:
            error(str(wrong))


def _measure_configs(target: Target, counts: list[int], path: Path, gpu: str, again: bool) -> None:
    """Record the best config for every M."""
    from moe_ops.tuning.search import Bench, tune

    done = set() if again else record.measured_tokens(path, asdict(target))
    todo = [m for m in counts if m not in done]
    print(f"{target}: {len(todo)} of {len(counts)} to measure", flush=True)
    if not todo:
        return
    bench = Bench(target)
    for m in todo:
        start = time.monotonic()
        config, us, default_us = tune(bench, m)
        record.record(path, gpu, asdict(target), m, fields_of(config), us)
        print(
            f"  M={m:5d}  {us:8.1f} us, heuristic {default_us:8.1f}, "
            f"{config} ({time.monotonic() - start:.0f} s)",
            flush=True,
        )


def _compare(targets: list[Target], arguments: argparse.Namespace) -> None:
    """Compare what is chosen with the best of a search, cell by cell as long as there is time."""
    from moe_ops.tuning.compare import compare, measured, write
    from moe_ops.tuning.search import Bench

    end, longest = time.monotonic() + arguments.limit, 0.0
    lost, failed, left = {}, [], []
    for target in targets:
        bench = None
        for m in sorted(arguments.m or CONFIGS_M):
            cell, start = f"{target} M={m}", time.monotonic()
            kept = arguments.results is not None and measured(arguments.results, target, m)
            if kept and not arguments.again:
                continue
            if start + longest > end:
                left.append(cell)
                continue
            try:
                bench = Bench(target) if bench is None else bench
                found = compare(bench, m, arguments.most, end)
            except Exception as error:
                failed.append(cell)
                print(f"{cell}: failed: {type(error).__name__}: {error}", flush=True)
                continue
            lost[cell], seconds = found.ratio, time.monotonic() - start
            longest = max(longest, seconds)
            print(
                f"{cell}: {found.chosen_us:.1f} us, best {found.best_us:.1f} of {found.timed}, "
                f"ratio {found.ratio:.3f}: {found.chosen}; {found.best} ({seconds:.0f} s)",
                flush=True,
            )
            if arguments.results is not None:
                write(arguments.results, target, m, found)
        bench = None
        torch.cuda.empty_cache()
    if lost:
        worst = max(lost, key=lambda cell: lost[cell])
        mean = statistics.geometric_mean(lost.values())
        print(f"heuristic over best: geometric mean {mean:.3f}, worst {lost[worst]:.3f} ({worst})")
    if left:
        print(f"not measured within --limit: {'; '.join(left)}")
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
