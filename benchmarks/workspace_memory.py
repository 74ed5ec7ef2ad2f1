"""Peak memory and time of a large layer with bounded and with unbounded workspaces.

    python benchmarks/workspace_memory.py [--backend auto] [--tokens 131072] [--bound BYTES]
                                          [--repeats 7] [--write]

The layer is one of DeepSeek-V3 in fp8_block: 256 experts, top-8, K = 7168, I = 2048. Peaks are
bytes beyond weights, input and output; times are medians by CUDA events, the two in turn. Both
outputs, and that of a captured CUDA graph, are compared bit by bit. Needs a GPU with 60 GB.
``--write`` keeps the numbers in benchmarks/results/workspace_memory_<GPU>.json. Exits with 1 where
outputs differ.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable

import torch
from harness import versions, write_json
from torch import Tensor

import moe_ops

GIB = 2**30
E, TOP_K, K, I = 256, 8, 7168, 2048
UNBOUNDED = 1 << 50


def random_experts(rows: int, columns: int) -> Tensor:
    """Weights in fp8_block, made without a bf16 copy of all of them."""
    elements = torch.empty(E, rows, columns, dtype=torch.float8_e4m3fn, device="cuda")
    for e in range(E):
        drawn = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        elements[e] = drawn.mul_(100).clamp_(-440, 440)
    scale = torch.rand(E, rows // 128, columns // 128, device="cuda") + 0.5
    return moe_ops.from_quantized("fp8_block", elements, scale / (100 * columns**0.5))


def peak_of(call: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes that a warm call allocates beside its output, and the output on the CPU."""
    call()  # compiles
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - out.nbytes, out.cpu()


def milliseconds(call: Callable[[], Tensor]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def captured(call: Callable[[], Tensor]) -> Tensor:
    """The output of a replayed CUDA graph, on the CPU."""
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return out.cpu()


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--bound", type=int, help="bytes; without it the default of the GPU")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("workspace_memory.py needs a GPU")
    torch.manual_seed(0)
    w13, w2 = random_experts(2 * I, K), random_experts(K, I)
    x = torch.randn(arguments.tokens, K, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(arguments.tokens, E, device="cuda").topk(TOP_K).indices
    weights = torch.rand(arguments.tokens, TOP_K, device="cuda")
    weights /= weights.sum(1, keepdim=True)

    def call_with(bound: int | None) -> Callable[[], Tensor]:
        options = {"backend": arguments.backend, "max_workspace_bytes": bound}
        return lambda: moe_ops.fused_experts(x, w13, w2, weights, ids, **options)

    calls = {"bounded": call_with(arguments.bound), "unbounded": call_with(UNBOUNDED)}
    plan = moe_ops.explain(
        x, w13, w2, ids, backend=arguments.backend, max_workspace_bytes=arguments.bound
    )
    print(plan)
    peaks, outputs = {}, {}
    for name, call in calls.items():
        peaks[name], outputs[name] = peak_of(call)
    turns = [
        {n: milliseconds(call) for n, call in calls.items()} for _ in range(arguments.repeats)
    ]
    times = {name: statistics.median(turn[name] for turn in turns) for name in calls}
    equal = torch.equal(outputs["bounded"], outputs["unbounded"])
    graph_equal = torch.equal(outputs["bounded"], captured(calls["bounded"]))
    for name in calls:
        print(f"{name:10} peak {peaks[name] / GIB:6.2f} GiB, {times[name]:8.2f} ms")
    slower = times["bounded"] / times["unbounded"] - 1
    print(
        f"{100 * slower:+.1f} % of time; bitwise equal: {equal}, of the CUDA graph: {graph_equal}"
    )
    if arguments.write:
        gpu = torch.cuda.get_device_name()
        content = {
            "gpu": gpu,
            "versions": versions("torch", "triton", "sgl-deep-gemm"),
            "command": "python " + " ".join(sys.argv),
            "shape": {"E": E, "top_k": TOP_K, "K": K, "I": I, "M": arguments.tokens},
            "scheme": "fp8_block",
            "chunks": plan.num_chunks(arguments.tokens),
            "peak_bytes": peaks,
            "median_ms": times,
            "ms": turns,
            "bitwise_equal": equal,
            "graph_bitwise_equal": graph_equal,
        }
        backend = "" if arguments.backend == "auto" else f"_{arguments.backend}"
        write_json(f"workspace_memory_{gpu.replace(' ', '_')}{backend}", content)
    return not (equal and graph_equal)


if __name__ == "__main__":
    raise SystemExit(main())
