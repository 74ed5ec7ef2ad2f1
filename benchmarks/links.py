"""How fast a GPU gets bytes from pinned host memory: by its copy engine, and by a kernel that
reads them.

    python benchmarks/links.py           # a table by number of bytes, in half a minute

benchmarks/residency.py measures the same beside what it compares with it.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from harness import capture, format_table, interleaved_replays_us, machine_facts
from torch import Tensor
from triton import language as tl

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 256 * KIB, *(MIB << i for i in range(11)))
MOST_READ = 256 * MIB  # by one graph, whose calls read one region after the other
WORDS, WARPS = 4096, 8  # int32 that a program reads at a time, and its warps
PROGRAMS = 132  # at least; more gained nothing on an H200


class Call(NamedTuple):
    """Median us of a call that brings so many bytes."""

    num_bytes: int
    copy_us: float
    kernel_us: float


class Link:
    """Calls of growing size. Times of sizes between them are on the line that joins two."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = sorted(calls)

    @property
    def copy_gb_s(self) -> float:
        """The copy engine's rate in the largest call, in GB/s."""
        return self.calls[-1].num_bytes / self.calls[-1].copy_us / 1e3

    def kernel_us(self, num_bytes: float) -> float:
        """The time in which a kernel reads so many bytes; the smallest call's below its size, and
        0 of none."""
        if num_bytes <= self.calls[0].num_bytes:
            return self.calls[0].kernel_us if num_bytes else 0.0
        for below, above in zip(self.calls, self.calls[1:], strict=False):
            if num_bytes <= above.num_bytes:
                part = (num_bytes - below.num_bytes) / (above.num_bytes - below.num_bytes)
                return below.kernel_us + part * (above.kernel_us - below.kernel_us)
        return self.calls[-1].kernel_us * num_bytes / self.calls[-1].num_bytes


@triton.jit
def moe_ops_read_link(
    source_ptr,  # (num_words,) int32 in pinned host memory
    target_ptr,  # (num_words,) int32 on the GPU
    num_words,
    WORDS: tl.constexpr,
):
    """Each program copies every `num_programs`-th piece of WORDS."""
    for start in range(tl.program_id(0) * WORDS, num_words, tl.num_programs(0) * WORDS):
        words = start + tl.arange(0, WORDS)
        mask = words < num_words
        tl.store(target_ptr + words, tl.load(source_ptr + words, mask=mask), mask=mask)


def read(source: Tensor, target: Tensor) -> None:
    """A kernel copies pinned host memory, int32, to memory of the GPU."""
    moe_ops_read_link[(PROGRAMS,)](source, target, source.numel(), WORDS=WORDS, num_warps=WARPS)


def copy(source: Tensor, target: Tensor) -> None:
    """The copy engine does."""
    target.copy_(source, non_blocking=True)


def measure(sizes: Sequence[int] = SIZES, replays: int = 10) -> Link:
    """Replay graphs of calls whose sources follow one another in host memory."""
    source = torch.empty(max(MOST_READ, *sizes) // 4, dtype=torch.int32, pin_memory=True)
    source.random_()
    target = torch.empty_like(source, device="cuda")
    measured = []
    for size in sizes:
        times = {}
        count = max(1, min(32, MOST_READ // size))
        pieces = [slice(i * size // 4, (i + 1) * size // 4) for i in range(count)]
        for move in (copy, read):
            calls = [functools.partial(move, source[piece], target[piece]) for piece in pieces]
            calls[0]()  # compiles
            graph, _ = capture(lambda which, calls=calls: calls[which](), count)
            found = interleaved_replays_us({"": graph}, replays, count, warm_up_seconds=0.05)
            times[move] = statistics.median(found[""])
        measured.append(Call(size, round(times[copy], 3), round(times[read], 3)))
    assert torch.equal(target.cpu(), source)
    return Link(measured)


def show(link: Link) -> None:
    """Print a line for each size."""
    rows = [
        (
            num_bytes // KIB,
            *(f"{us:.1f}" for us in times),
            *(f"{num_bytes / us / 1e3:.1f}" for us in times),
        )
        for num_bytes, *times in link.calls
    ]
    header = ("KiB", "copy us", "kernel us", "copy GB/s", "kernel GB/s")
    print(format_table(header, rows), flush=True)


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    print(machine_facts())
    show(measure())


if __name__ == "__main__":
    main()
