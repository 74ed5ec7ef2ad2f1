"""Where the time of a layer on backend deep_gemm goes, kernel by kernel, and what alignments cost.

    python benchmarks/deep_gemm_parts.py [--shapes qwen3 mixtral] [--schemes fp8_block bf16]
                                         [--tokens 1024 4096] [--alignments 128 64] [--masked]
                                         [--pdl]

The whole layer is timed under graph replay, its kernels by the profiler. Beside the kernels of
ours stand the bytes they must move and the rate that makes. Results are compared with backend
triton's. `alignments`: rows that groups are padded to; `--masked`: batched_experts, too, of the
same rows, which somebody brought into a block of M rows for each expert; `--pdl`: products may
start while the kernel before them ends. What was measured on an H200 is in
docs/kernels/deep_gemm.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable

import torch
from cases import SHAPES, Case, Cell, make_cell, make_plain_weights, make_sets, make_weights
from harness import capture, relative_error
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import moe_ops

REPLAYS = 15


def call(cell: Cell, which: int, backend: str) -> Tensor:
    weights, routing = cell.weights, cell.sets[which]
    return moe_ops.fused_experts(
        cell.hidden_states, weights.w13, weights.w2, routing.weights, routing.ids, backend=backend
    )


def masked_layer(cell: Cell) -> Callable[[int], Tensor]:
    """The products and the activation alone: rows lie in the layout already, and stay there."""
    E, w13, w2 = cell.weights.shape.num_experts, cell.weights.w13, cell.weights.w2
    M, K = cell.hidden_states.shape
    x = torch.randn(E, M, K, dtype=torch.bfloat16, device=cell.hidden_states.device)
    ids = [routing.ids.flatten().long() for routing in cell.sets]
    counts = [torch.bincount(one, minlength=E) for one in ids]
    return lambda which: moe_ops.batched_experts(x, w13, w2, counts[which], backend="deep_gemm")


def replay_us(cell: Cell, layer: Callable[[int], Tensor]) -> float:
    """Median time of a layer under graph replay."""
    num_sets = len(cell.sets)
    graph, _ = capture(layer, num_sets)
    times = []
    for _ in range(REPLAYS + 2):
        start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / num_sets)
    return statistics.median(times[2:])


def kernel_us(cell: Cell) -> dict[str, float]:
    """Device time of each kernel of a call, in their order; equal names are numbered."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for which in range(len(cell.sets)):
            call(cell, which, "deep_gemm")
        torch.cuda.synchronize()
    events = [e for e in traced.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    names, times = [e.name for e in events], [e.time_range.elapsed_us() for e in events]
    per_call, sums = len(events) // len(cell.sets), defaultdict(float)
    for i, time in enumerate(times):
        name = names[i % per_call].replace("moe_ops_deep_gemm_", "")
        name = (
            f"product {1 + (i % per_call > per_call // 2)}"
            if "gemm_1d2d" in name or "bf16_gemm" in name
            else name
        )
        sums[name[:40]] += time / len(cell.sets)
    return sums


def bytes_moved(cell: Cell) -> dict[str, int]:
    """What our kernels have to read and write of activations, all experts held here."""
    shape, M = cell.weights.shape, cell.case.num_tokens
    S, K, I = M * shape.top_k, shape.hidden_size, shape.intermediate_size  # noqa: E741
    quantized = (lambda n: n + n // 32) if cell.weights.scheme else (lambda n: 2 * n)
    return {
        "scatter": 2 * M * K + S * quantized(K),
        "activate": 4 * S * I + S * quantized(I),
        "combine": 2 * S * K + 2 * M * K,
    }


def report_masked(cell: Cell) -> None:
    case, layer = cell.case, masked_layer(cell)
    layer(0)  # warm
    where = f"{case.shape} {case.scheme or 'bf16'} M={case.num_tokens} masked"
    print(f"{where}: {replay_us(cell, layer):.0f} us without placing and combining", flush=True)


def report(cell: Cell, alignment: int) -> None:
    import deep_gemm

    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    for which in range(len(cell.sets)):  # warm
        out = call(cell, which, "deep_gemm")
    error = relative_error(out, call(cell, len(cell.sets) - 1, "triton"))
    case = cell.case
    head = f"{case.shape} {case.scheme or 'bf16'} M={case.num_tokens} {alignment}"
    layer_us = replay_us(cell, lambda which: call(cell, which, "deep_gemm"))
    print(f"{head}: {layer_us:.0f} us, {error:.1e} from triton")
    moved = bytes_moved(cell)
    for name, time in kernel_us(cell).items():
        rate = f"{moved[name] / time / 1e6:6.2f} TB/s" if name in moved else ""
        print(f"    {name:40} {time:8.1f} us  {rate}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3", "mixtral"])
    parser.add_argument("--schemes", nargs="+", default=["fp8_block", "bf16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--alignments", nargs="+", type=int, default=[128])
    parser.add_argument("--masked", action="store_true")
    parser.add_argument("--pdl", action="store_true")
    arguments = parser.parse_args()
    import deep_gemm  # here: --help needs no library

    deep_gemm.set_pdl(arguments.pdl)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    for shape in arguments.shapes:
        plain = make_plain_weights(SHAPES[shape], torch.device("cuda"))
        for scheme in arguments.schemes:
            scheme = scheme.replace("bf16", "")
            weights = make_weights(SHAPES[shape], scheme, *plain)
            for M in arguments.tokens:
                case = Case(shape, scheme, M)
                cell = make_cell(case, weights, make_sets(case, l2))
                if arguments.masked:
                    report_masked(cell)
                for alignment in arguments.alignments:
                    try:
                        report(cell, alignment)
                    except (RuntimeError, ValueError) as error:  # the others are still of use
                        print(f"{shape} M={M} {alignment}: {' '.join(str(error).split())[:200]}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
