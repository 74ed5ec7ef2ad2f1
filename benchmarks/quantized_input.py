"""Time of a layer whose activations arrive quantized, against one that quantizes them inside.

    python benchmarks/quantized_input.py [--tokens 1 8 64 512 4096] [--replays 40] [--write]

Shapes of Qwen3-30B-A3B and of DeepSeek-V3 (under expert parallelism over eight GPUs), the schemes
that a dispatcher sends, each on every backend that takes them. Times are medians of CUDA-graph
replays in turn; each replay passes over sets of random activations and routing. Outputs of both
are compared bit by bit. ``--write`` keeps the numbers in
benchmarks/results/quantized_input_<GPU>.json. Exits with 1 where outputs differ.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from harness import (
    capture,
    format_table,
    interleaved_replays_us,
    machine_facts,
    versions,
    write_json,
)
from torch import Tensor

import moe_ops
from moe_ops import numerics
from moe_ops.bench.layers import make_weights, quantized
from moe_ops.bench.shapes import SHAPES, Shape

CELLS = (
    *(("qwen3", scheme) for scheme in ("fp8_block", "fp8_channel", "fp8_tensor_static")),
    *(("dsv3_ep8", scheme) for scheme in ("fp8_block", "fp8_block:ue8m0")),
)
BACKENDS = ("triton", "deep_gemm", "flashinfer")
STATIC_SCALES = (0.02, 0.005)  # of the input and of what the activation function returns
NUM_SETS = 4


def weights_of(shape: Shape, scheme: str) -> tuple[Any, Any]:
    """Random w13 and w2 in a scheme, with activation scales where it has static ones."""
    plain = make_weights(shape, torch.bfloat16, torch.device("cuda"))
    weights = [quantized(w, scheme.removesuffix("_static")) for w in plain]
    if scheme.endswith("_static"):
        weights = [
            moe_ops.from_quantized(
                scheme, w.qdata, w.scale, activation_scale=torch.tensor(known, device="cuda")
            )
            for w, known in zip(weights, STATIC_SCALES, strict=True)
        ]
    return weights[0], weights[1]


def routing(shape: Shape, M: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Router weights (M, top_k) and ids (M, top_k) over the experts of all ranks."""
    scores = torch.rand(M, shape.num_experts * shape.ep_size, generator=rng, device="cuda")
    chosen = scores.topk(shape.top_k)
    return chosen.values / chosen.values.sum(1, keepdim=True), chosen.indices.to(torch.int32)


def measure(
    shape: Shape, scheme: str, backend: str, w13: Any, w2: Any, M: int, replays: int
) -> dict:
    """Medians in us and whether the bits agree, or the reason why nothing was measured."""
    rng = torch.Generator("cuda").manual_seed(M)
    size = (M, shape.hidden_size)
    inside, arriving = [], []
    for _ in range(NUM_SETS):
        x = torch.randn(size, generator=rng, device="cuda").to(torch.bfloat16)
        route = routing(shape, M, rng)
        q = numerics.quantize_activation(x, scheme, w13.activation_scale)
        scale = q.scale
        if backend == "deep_gemm":  # as DeepEP sends them: neighbouring rows are contiguous
            scale = scale.t().contiguous().t()
        inside.append((x, w13, w2, *route))
        arriving.append((q.q, w13, w2, *route, scale))

    def call_inside(which: int) -> Tensor:
        return moe_ops.fused_experts(*inside[which], backend=backend)

    def call_arriving(which: int) -> Tensor:
        *args, scale = arriving[which]
        return moe_ops.fused_experts(
            *args, hidden_states_scale=scale, out_dtype=torch.bfloat16, backend=backend
        )

    calls: dict[str, Callable[[int], Tensor]] = {"inside": call_inside, "arriving": call_arriving}
    try:
        equal = all(torch.equal(call_inside(i), call_arriving(i)) for i in range(NUM_SETS))
    except (ValueError, ImportError) as error:
        return {"reason": str(error)}
    graphs = {name: capture(call, NUM_SETS)[0] for name, call in calls.items()}
    times = interleaved_replays_us(graphs, replays, NUM_SETS)
    medians = {f"{name}_us": statistics.median(t) for name, t in times.items()}
    return {"bitwise_equal": equal, **medians}


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 4096])
    parser.add_argument("--replays", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("quantized_input.py needs a GPU")
    rows = []
    for name, scheme in CELLS:
        w13, w2 = weights_of(SHAPES[name], scheme)
        for backend in BACKENDS:
            ready = w13, w2
            try:
                if backend == "flashinfer":
                    ready = (
                        moe_ops.prepare(w13, backend, activation="silu"),
                        moe_ops.prepare(w2, backend),
                    )
            except ValueError as error:
                print(f"{name} {scheme} {backend}: {error}")
                continue
            for M in arguments.tokens:
                found = measure(
                    SHAPES[name], scheme, backend, *ready, M, arguments.replays
                )  # fmt: skip
                if "reason" in found:
                    print(f"{name} {scheme} {backend}: {found['reason'].splitlines()[0]}")
                    break
                rows.append({"shape": name, "scheme": scheme, "backend": backend, "M": M} | found)
        del w13, w2
        torch.cuda.empty_cache()
    header = ("shape", "scheme", "backend", "M", "inside us", "arriving us", "ratio", "same bits")
    cells = [
        (
            *(row["shape"], row["scheme"], row["backend"], row["M"]),
            *(f"{row['inside_us']:.1f}", f"{row['arriving_us']:.1f}"),
            f"{row['arriving_us'] / row['inside_us']:.3f}",
            row["bitwise_equal"],
        )
        for row in rows
    ]
    print(format_table(header, cells))
    if arguments.write:
        gpu = torch.cuda.get_device_name()
        content = {
            "machine": machine_facts(),
            "versions": versions("torch", "triton", "sgl-deep-gemm", "flashinfer-python"),
            "command": "python " + " ".join(sys.argv),
            "rows": rows,
        }
        write_json(f"quantized_input_{gpu.replace(' ', '_')}", content)
    return not all(row["bitwise_equal"] for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
