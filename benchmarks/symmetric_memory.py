"""Dispatch and combine through peers' memory, on the GPUs of a host: are they right, what do they
take?

    torchrun --nproc-per-node 2 benchmarks/symmetric_memory.py [--tokens 1 8 128 512 4096]

First the bandwidth of a copy between two GPUs, then for each number of tokens a rank (Qwen3: K
2048, top-8; bf16): values against torch's collectives, bitwise repeatability, the same in a CUDA
graph replayed with new tokens, and us of graphs of 20 calls, the largest of all ranks.
"""

from __future__ import annotations

import os

os.environ |= {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}

# ruff: noqa: E402
import argparse
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops.parallel.dispatchers import AllToAll
from moe_ops.parallel.symmetric_memory import SymmetricMemory

K, TOP_K, EXPERTS, CALLS = 2048, 8, 128, 20


def us(call: Callable[[], object]) -> float:
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
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    found = torch.tensor(sorted(times[5:])[10], device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def inputs(M: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(M, K, device="cuda").to(torch.bfloat16)
    ids = torch.rand(M, EXPERTS, device="cuda").topk(TOP_K).indices
    return x, ids, torch.rand(M, TOP_K, device="cuda")


def check(T: int, rank: int, size: int) -> list[float]:
    group = dist.group.WORLD.group_name
    ours, torchs = SymmetricMemory(group, size, T, timeout=20), AllToAll(group, size, T)
    M = max(T - rank, 1)
    for _ in range(4):  # both sets of buffers, twice
        given, out = inputs(M), torch.randn(size * T, K, device="cuda").to(torch.bfloat16)
        for got, want in zip(ours.dispatch(*given), torchs.dispatch(*given), strict=True):
            assert torch.equal(got, want), f"dispatch, T={T}"
        assert torch.equal(ours.combine(out, M), torchs.combine(out, M)), f"combine, T={T}"
    static = inputs(M)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        arrived = ours.dispatch(*static)
        combined = ours.combine(arrived[0], M)
    for _ in range(5):
        for tensor, new in zip(static, inputs(M), strict=True):
            tensor.copy_(new)
        graph.replay()
        wanted = torchs.dispatch(*static)
        for got, want in zip(arrived, wanted, strict=True):
            assert torch.equal(got, want), f"replayed dispatch, T={T}"
        assert torch.equal(combined, torchs.combine(wanted[0], M)), f"replayed combine, T={T}"
    whole = inputs(T)
    return [
        us(call)
        for dispatcher in (ours, torchs)
        for call in (
            lambda d=dispatcher: d.dispatch(*whole),
            lambda d=dispatcher: d.combine(out, T),
        )
    ]


def peer_copy() -> float:
    """GB/s from the first GPU to the second."""
    if dist.get_rank() != 0:
        return 0.0
    source = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize(0)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize(0)
        best = min(best, start.elapsed_time(end))
    return source.nbytes / best / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 128, 512, 4096])
    given = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=device)
    copied = peer_copy()
    dist.barrier()
    if rank == 0:
        print(f"{torch.cuda.get_device_name()} x {size}, peer copy {copied:.0f} GB/s", flush=True)
        print("   T  ours: dispatch  combine  all_to_all: dispatch  combine (us)  GB/s of ours")
    for T in given.tokens:
        times = check(T, rank, size)
        if rank == 0:
            sent = T * K * 2 * (size - 1)
            rates = " ".join(f"{sent / time / 1e3:.0f}" for time in times[:2])
            print(f"{T:5d}  " + "  ".join(f"{time:8.2f}" for time in times) + f"  {rates}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
