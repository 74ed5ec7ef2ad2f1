"""Dispatch and combine through peers' memory, on the GPUs of a host: are they right, what do they
take?

    torchrun --nproc-per-node 2 benchmarks/symmetric_memory.py [--tokens 1 8 128 512 4096 8192]
        [--hidden 2048] [--results FOLDER]
    python benchmarks/symmetric_memory.py --merge FILE ...  # add another run's rows to the results

First the bandwidth of a copy between two GPUs, then for each number of tokens a rank (top-8; bf16;
rows of --hidden, Qwen3's by default): values against torch's collectives, bitwise repeatability,
the same in a CUDA graph replayed with new tokens, and us of one call in a graph of 100, begun on
all ranks together, the largest of all ranks. "copy" is that of a copy of the same rows into the
next GPU's memory by its copy engine, while the other GPUs do so, too. "of a copy" is the rate at
which rows reach the other GPU, over that of this copy, and over that of the first one, which is
one way and of 256 MiB.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

# first of all: it sets what every rank must have in its environment
from expert_parallel import Job, joined, peer_copy_gb_s  # isort: skip

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from harness import RESULTS
from records import Results, merge
from torch import Tensor

from moe_ops.parallel.dispatchers import AllToAll
from moe_ops.parallel.symmetric_memory import SymmetricMemory

TOP_K, EXPERTS = 8, 128
CALLS = 100  # of a graph: each bears its share of the time by which ranks begin apart


def us(job: Job, call: Callable[[], object]) -> float:
    """Of one call in a graph of CALLS, the median of 20 replays, the largest of all ranks."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(25):
        job.synchronize()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return round(job.largest([sorted(times[5:])[10]])[0], 2)


def inputs(M: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(M, K, device="cuda").to(torch.bfloat16)
    ids = torch.rand(M, EXPERTS, device="cuda").topk(TOP_K).indices
    return x, ids, torch.rand(M, TOP_K, device="cuda")


def copy_us(job: Job, T: int, K: int) -> float:
    """Of a copy of T rows into the memory of the next rank, all ranks at a time."""
    own = symm_mem.empty(T * K, dtype=torch.bfloat16, device=job.device)
    handle = symm_mem.rendezvous(own, dist.group.WORLD.group_name)
    target = handle.get_buffer((job.rank + 1) % job.size, own.shape, own.dtype)
    rows = torch.randn(T * K, device=job.device).to(torch.bfloat16)
    found = us(job, lambda: target.copy_(rows))
    job.synchronize()  # nobody frees what others write into
    return found


def check(job: Job, T: int, K: int) -> list[dict]:
    """A row of numbers for each dispatcher, after their values were compared."""
    group, size = dist.group.WORLD.group_name, job.size
    ours, torchs = SymmetricMemory(group, size, T, timeout=20), AllToAll(group, size, T)
    M = max(T - job.rank, 1)
    for _ in range(4):  # both sets of buffers, twice
        given, out = inputs(M, K), torch.randn(size * T, K, device="cuda").to(torch.bfloat16)
        for got, want in zip(ours.dispatch(*given), torchs.dispatch(*given), strict=True):
            assert torch.equal(got, want), f"dispatch, T={T}"
        assert torch.equal(ours.combine(out, M), torchs.combine(out, M)), f"combine, T={T}"
    static = inputs(M, K)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        arrived = ours.dispatch(*static)
        combined = ours.combine(arrived[0], M)
    for _ in range(5):
        for tensor, new in zip(static, inputs(M, K), strict=True):
            tensor.copy_(new)
        graph.replay()
        wanted = torchs.dispatch(*static)
        for got, want in zip(arrived, wanted, strict=True):
            assert torch.equal(got, want), f"replayed dispatch, T={T}"
        assert torch.equal(combined, torchs.combine(wanted[0], M)), f"replayed combine, T={T}"
    whole = inputs(T, K)
    copied = copy_us(job, T, K)
    return [
        {
            "hidden_size": K,
            "num_tokens": T,
            "implementation": f"moe_ops {dispatcher.name}",
            "dispatch_us": us(job, lambda d=dispatcher: d.dispatch(*whole)),
            "combine_us": us(job, lambda d=dispatcher: d.combine(out, T)),
            "copy_us": copied,
        }
        for dispatcher in (ours, torchs)
    ]


def show(rows: list[dict], copied: float | None, size: int) -> None:
    for row in rows:
        took = [row[f"{step}_us"] for step in STEPS]
        same, large = "", ""
        if row.get("copy_us"):
            same = "{:8.2f} us a copy: {:.2f} {:.2f} of it".format(
                row["copy_us"], *(row["copy_us"] / us for us in took)
            )
        if copied:
            sent = row["num_tokens"] * row["hidden_size"] * 2 * (size - 1) / 1e3 / copied
            large = "{:.2f} {:.2f} of a large one".format(*(sent / us for us in took))
        print(
            f"{row['hidden_size']:6d} {row['num_tokens']:6d}  {row['implementation']:24s}  "
            f"{took[0]:8.2f} {took[1]:8.2f} us  {same:42s}  {large}"
        )


STEPS = ("dispatch", "combine")


def key(row: dict) -> tuple:
    return row["hidden_size"], row["num_tokens"], row["implementation"]


def open_results(path: Path) -> Results:
    return Results(path, key, lambda found: found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 128, 512, 4096, 8192])
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for JSON")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", default=[])
    given = parser.parse_args()
    if given.merge:
        for results in merge(given.merge, given.results, "symmetric_memory_*.json", open_results):
            for row in results.rows.values():
                machine = results.runs[row["run"]]["machine"]
                show([row], machine.get("peer_copy_gb_s"), machine["gpus"])
        return
    with joined(dry=False) as job:
        copied = peer_copy_gb_s(job)
        gpu = torch.cuda.get_device_name().replace(" ", "_")
        results = open_results(given.results / f"symmetric_memory_{gpu}_x{job.size}.json")
        run = results.begin(sys.argv, dry=True)
        machine = results.runs[run]["machine"]
        machine |= {"gpus": job.size} | copied
        if job.rank == 0:
            print(f"{job.size} x {gpu}: {copied}", flush=True)
        for K in given.hidden:
            for T in given.tokens:
                rows = check(job, T, K)
                for row in rows:
                    results.add(row | {"run": run})
                if job.rank == 0:
                    show(rows, machine.get("peer_copy_gb_s"), job.size)
                    results.write()


if __name__ == "__main__":
    main()
