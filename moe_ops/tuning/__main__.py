"""python -m moe_ops.tuning: measure the tiles of the triton backend for shapes on this GPU.

    python -m moe_ops.tuning --shape 128 2048 768 8 [--scheme fp8_block] [--m 1 8 64 1024]
    python -m moe_ops.tuning --check --shape 64 2048 1408 6 ...

A shape is E K I top_k. Results go into the package's table of this GPU (or --table FILE) after every M, so
that a stopped run goes on where it was; --again measures what is already there. --check records nothing: it
says what shapes without a table lose, the heuristic's time over the best.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from moe_ops import tuning


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moe_ops.tuning", description=(__doc__ or "").splitlines()[0]
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
    parser.add_argument("--m", type=int, nargs="+", default=[1, 8, 32, 64, 256, 1024, 4096])
    parser.add_argument("--table", type=Path, help="file to write; default: the package's own")
    parser.add_argument("--again", action="store_true", help="measure what the table has, too")
    parser.add_argument("--check", action="store_true", help="compare only, record nothing")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tuning measures kernels and needs a GPU; none found, nothing measured")
    from moe_ops.tuning.search import Bench, Target, tune

    gpu = torch.cuda.get_device_name()
    path = arguments.table or tuning.path_of(gpu)
    lost = {}
    for scheme in arguments.scheme:
        for shape in arguments.shape:
            E, K, I, top_k = shape
            target = Target(E, K, I, top_k, scheme, arguments.dtype)
            again = arguments.again or arguments.check
            done = set() if again else tuning.measured_tokens(path, asdict(target))
            todo = [m for m in sorted(arguments.m) if m not in done]
            print(f"{target}: {len(todo)} of {len(arguments.m)} to measure", flush=True)
            if not todo:
                continue
            bench = Bench(target)
            for m in todo:
                start = time.monotonic()
                tiles, us, default_us = tune(bench, m, _progress)
                if arguments.check:
                    lost[f"{scheme or 'plain'} {shape} M={m}"] = default_us / us
                else:
                    tuning.record(path, gpu, asdict(target), m, tiles, us)
                print(
                    f"  M={m:5d}  {us:8.1f} us, heuristic {default_us:8.1f}, "
                    f"{tiles} ({time.monotonic() - start:.0f} s)",
                    flush=True,
                )
            del bench
            torch.cuda.empty_cache()
    if lost:
        worst = max(lost, key=lambda cell: lost[cell])
        mean = statistics.geometric_mean(lost.values())
        print(f"heuristic over best: geometric mean {mean:.3f}, worst {lost[worst]:.3f} ({worst})")
    else:
        print(json.dumps({"table": str(path)}))


def _progress(items: Iterable, what: str) -> Iterable:
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=what, leave=False, disable=not sys.stderr.isatty())


if __name__ == "__main__":
    main()
