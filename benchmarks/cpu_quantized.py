"""One expert layer of quantized weights on a CPU, beside the same layer in bf16.

    python benchmarks/cpu_quantized.py [--tokens 1 8 64 512] [--schemes int4_w4a16:g128 ...]
                                       [--rounds 60] [--threads 2] [--avx 1024 512] [--write]

Every scheme gets NUM_LAYERS layers of random weights, more than the caches hold, which calls go
through in turn, so that weights come from memory as they do in a model; calls of all schemes are
interleaved. `plain torch` is the path through dequantized copies, which runs where the kernels of
csrc/cpu/experts.cpp do not. The floor is the bytes of the experts that a call reads over the
measured read bandwidth. `host` is a call of one token through a layer of as many experts that is
HOST_COLUMNS wide: all work but that on weights. ``--avx`` names the widest instructions, one after
the other: 1024 (AMX where it is faster, beside AVX-512), 512 (AVX-512) and 2 (AVX2). ``--write``
keeps the times in results/cpu_quantized_AMX.json (or AVX512, AVX2), and a plot beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import report
import torch
from harness import (
    INSTRUCTIONS,
    format_table,
    interleaved_ms,
    machine_facts,
    read_bandwidth_gb_s,
    relative_error,
    summary,
    use_cpu_kernels,
    write_json,
)
from torch import Tensor

import moe_ops
from moe_ops.backends.torch import layer
from moe_ops.bench.layers import per_expert_loop
from moe_ops.planning import bind

SCHEMES = (
    *("int4_w4a16:g128", "int4_w4a16:g32", "int4_w4a16:g128:zp", "mxfp4_w4a16", "nvfp4_w4a16"),
    *("int8_w8a16:channel", "fp8_w8a16:channel", "fp8_w8a16:block", "int8_w8a8", "fp8_channel"),
    "fp8_block",
)
NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = report.CPU_SIZES.values()
NUM_LAYERS = 12  # of 25 MB and more
PLAIN_CALLS = 3
HOST_COLUMNS = 128

Weights = tuple[Tensor, Tensor]


def make_layers(
    scheme: str,
    K: int = HIDDEN,
    I: int = INTERMEDIATE,
    count: int = NUM_LAYERS,
) -> list[Weights]:
    """Layers with the same numbers at different places in memory."""
    generator, E = torch.Generator().manual_seed(0), NUM_EXPERTS
    w13 = (torch.randn(E, 2 * I, K, generator=generator) / K**0.5).to(torch.bfloat16)
    w2 = (torch.randn(E, K, I, generator=generator) / I**0.5).to(torch.bfloat16)
    if scheme:
        w13, w2 = moe_ops.quantize(w13, scheme), moe_ops.quantize(w2, scheme)
    return [(w13.clone(), w2.clone()) for _ in range(count)]


def host_ms(schemes: Iterable[str], rounds: int = 300) -> dict[str, float]:
    """Median ms of a call that reads next to no weights."""
    x = torch.randn(1, HOST_COLUMNS).to(torch.bfloat16)
    router = torch.full((1, TOP_K), 1 / TOP_K)
    ids = [torch.randperm(NUM_EXPERTS)[None, :TOP_K] for _ in range(NUM_LAYERS)]

    def call(scheme: str) -> Callable[[int], Tensor]:
        [weights] = make_layers(scheme, HOST_COLUMNS, HOST_COLUMNS, 1)
        return lambda i: moe_ops.fused_experts(x, *weights, router, ids[i])

    times = interleaved_ms({s: call(s) for s in schemes}, rounds=rounds, num_sets=NUM_LAYERS)
    return {scheme: round(statistics.median(found), 4) for scheme, found in times.items()}


def make_inputs(M: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Tokens, an expert of each pair for every layer, and the router's weights."""
    generator = torch.Generator().manual_seed(M)
    x = torch.randn(M, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = [
        torch.rand(M, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
        for _ in range(NUM_LAYERS)
    ]
    router = torch.rand(M, TOP_K, generator=generator) + 0.5
    return x, ids, router / router.sum(1, keepdim=True)


def reference(M: int, weights: Weights) -> Tensor:
    """The first layer in fp64."""
    x, ids, router = make_inputs(M)
    w13, w2 = [
        w.dequantize(torch.float32) if isinstance(w, moe_ops.ExpertTensor) else w for w in weights
    ]
    return per_expert_loop(x.double(), w13, w2, router, ids[0])


def plain_torch_ms(M: int, layers: list[Weights]) -> float:
    """Least ms of the path through dequantized copies."""
    x, ids, router = make_inputs(M)
    form_of, found = layer.form_of, []
    layer.form_of = lambda a: None
    bind.forget()  # shortcuts past it
    try:
        for i in range(PLAIN_CALLS):
            start = time.perf_counter()
            moe_ops.fused_experts(x, *layers[i], router, ids[i])
            found.append((time.perf_counter() - start) * 1e3)
    finally:
        layer.form_of = form_of
        bind.forget()
    return round(min(found), 3)


def run_case(
    M: int, layers: dict[str, list[Weights]], rounds: int, gb_s: float, expected: dict[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """A row of each scheme."""
    x, ids, router = make_inputs(M)

    def call(scheme: str) -> Callable[[int], Tensor]:
        return lambda i: moe_ops.fused_experts(x, *layers[scheme][i], router, ids[i])

    times = interleaved_ms({s: call(s) for s in layers}, rounds=rounds, num_sets=NUM_LAYERS)
    hit = statistics.mean(i.unique().numel() for i in ids) / NUM_EXPERTS
    bf16 = statistics.median(times[""])
    rows = {}
    for scheme, found in times.items():
        size = sum(weight.nbytes for weight in layers[scheme][0])
        rows[scheme] = {
            "scheme": scheme,
            "num_tokens": M,
            "bytes": size,
            "floor_ms": round(hit * size / gb_s / 1e6, 4),
            "ms": summary(found),
            "relative_error": float(f"{relative_error(call(scheme)(0), expected[scheme]):.2e}"),
            "speed_against_bf16": round(bf16 / statistics.median(found), 2),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--rounds", type=int, default=60, help="calls of each at one token")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--avx", type=int, nargs="+", choices=[1024, 512, 2], default=[1024])
    parser.add_argument("--write", action="store_true", help="keep the times in results/")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    gb_s = read_bandwidth_gb_s()
    schemes = ("", *arguments.schemes)
    measure(arguments, {scheme: make_layers(scheme) for scheme in schemes}, gb_s)


def measure(arguments: argparse.Namespace, layers: dict[str, list[Weights]], gb_s: float) -> None:
    host, rows = {}, {}
    for avx in {use_cpu_kernels(avx): None for avx in arguments.avx}:
        use_cpu_kernels(avx)
        host[avx], rows[avx] = host_ms(layers), []
    for M in arguments.tokens:
        expected = {scheme: reference(M, found[0]) for scheme, found in layers.items()}
        plain = {scheme: plain_torch_ms(M, found) for scheme, found in layers.items()}
        rounds = max(12, arguments.rounds if M <= 8 else arguments.rounds * 8 // M)
        for avx in rows:
            use_cpu_kernels(avx)
            found = run_case(M, layers, rounds, gb_s, expected)
            for scheme, row in found.items():
                row |= {"plain_torch_ms": plain[scheme], "host_ms": host[avx][scheme]}
            rows[avx] += found.values()
            table = [
                [
                    *(row["scheme"] or "bf16", M, row["floor_ms"]),
                    f"{row['ms']['median']:.3f} [{row['ms']['min']:.3f}]",
                    *(row["speed_against_bf16"], row["host_ms"]),
                    *(row["plain_torch_ms"], row["relative_error"]),
                ]
                for row in found.values()
            ]
            header = [INSTRUCTIONS[avx], "M", "floor ms", "median [least] ms", "against bf16"]
            print(format_table([*header, "host", "plain torch", "error"], table), flush=True)
    for avx, found in rows.items():
        facts = machine_facts() | {"read_gb_s": round(gb_s, 1), "avx": avx}
        print(facts)
        if arguments.write:
            name = f"cpu_quantized_{INSTRUCTIONS[avx]}"
            report.report(write_json(name, {"machine": facts, "rows": found}))


if __name__ == "__main__":
    main()
