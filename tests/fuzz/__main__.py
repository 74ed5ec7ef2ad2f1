"""make fuzz: random calls in batches, with their seeds.

    python -m tests.fuzz [--examples 20000] [--seed 0] [--kernels grouped_mm.so] [--avx 1024]

A batch that fails prints its seed and the smallest example found; `--examples 500 --seed THAT`
runs it again. `--kernels` runs the CPU kernels of another build, as `make fuzz-sanitized` does,
and `--avx 2` those for processors without AVX-512.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import os
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from moe_ops.backends.torch import cpu, layer
from tests.fuzz import calls
from tests.support.interpreter import drop_unread_checks, patch_language_once

BATCH = 500


def batch(number: int, examples: int, answers: collections.Counter) -> None:
    """Run so many examples; raises what the smallest failing one raised."""

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(calls.examples())
    def run(example: calls.Example) -> None:
        answers[example.function, calls.run(example)] += 1

    run()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--kernels", type=Path, help="a build of csrc/cpu")
    parser.add_argument("--avx", type=int, default=1024, help="the widest that kernels may use")
    parser.add_argument("--keep-going", action="store_true", help="after a failure")
    options = parser.parse_args()
    patch_language_once()
    drop_unread_checks()
    torch.set_num_threads(1)
    if options.kernels is not None:
        cpu._LIBRARY = options.kernels.resolve()
        cpu._kernels.cache_clear()
    print(f"CPU kernels: {cpu.why_not() or cpu._LIBRARY}", flush=True)
    if cpu.why_not() is None:
        print(f"AVX: {ctypes.CDLL(str(cpu._LIBRARY)).moe_ops_cpu_avx(options.avx)}", flush=True)
        if (kernels := layer.kernels()) is not None:
            kernels.moe_ops_cpu_experts_avx(options.avx)
    answers: collections.Counter = collections.Counter()
    start, failed = time.monotonic(), 0
    for done in range(0, options.examples, BATCH):
        number = options.seed + done // BATCH
        try:
            batch(number, min(BATCH, options.examples - done), answers)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"batch with seed {number} failed: --examples {BATCH} --seed {number}")
            if not options.keep_going:
                return 1
        ran, seconds = sum(answers.values()), time.monotonic() - start
        print(f"\r{ran} of {options.examples} examples, {seconds:.0f} s", end="", flush=True)
    print()
    for (function, answer), count in sorted(answers.items()):
        print(f"{function:16} {answer:6} {count}")
    print(f"{sum(answers.values())} examples, {failed} failed batches, seeds from {options.seed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
