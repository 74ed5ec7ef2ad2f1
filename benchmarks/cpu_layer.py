"""One expert layer on the CPU: moe_ops against the three experts implementations of transformers.

    python benchmarks/cpu_layer.py [--tokens 1 8 64 512] [--dtypes bf16 fp32]
                                   [--only eager moe_ops] [--threads 1] [--seconds 8] [--write]

Every implementation gets the same random weights and the same routing sets; calls are interleaved
and rotate through the routing sets, so weights come from memory as they do in a model. Each time
stands beside its error against fp64. The floor of a cell is the larger of (bytes of the experts
hit) / (measured read bandwidth) and FLOPs / (measured rate of square matrix products, or of fp32's
where that is higher).
On a busy machine use ``--threads 1``: it is timed by CPU time, which others disturb little.
``--write`` keeps the times in benchmarks/results/cpu_layer_AVX2.json or cpu_layer_AVX512.json, and
a plot beside it.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import report
import torch
from harness import (
    interleaved_ms,
    machine_facts,
    matmul_gflop_s,
    read_bandwidth_gb_s,
    relative_error,
    summary,
    write_json,
)
from torch import Tensor

from moe_ops.bench.layers import per_expert_loop, transformers_experts
from moe_ops.bench.shapes import Shape

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PEERS, IMPLEMENTATIONS = report.CPU_PEERS, report.CPU_NAMES
NUM_SETS = 16
# batched_mm copies both weights of every (token, expert) pair; past this it is not run.
MAX_GATHER_BYTES = 2 << 30
# An implementation this many times slower than the best peer is timed three times and no more: it
# would take most of the time, and empty the cache for the others.
FAR_BEHIND = 8.0

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden, topk_weights, topk_ids) -> (M, K)


@dataclass(frozen=True)
class Case:
    """One cell: a layer of E experts (w13 (E, 2I, K), w2 (E, K, I)) applied to M tokens."""

    num_tokens: int
    dtype: str
    num_experts: int = 32
    top_k: int = 4
    hidden_size: int = 1024
    intermediate_size: int = 512

    @property
    def bytes_per_expert(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size * DTYPES[self.dtype].itemsize

    @property
    def flops(self) -> int:
        return self.num_tokens * self.top_k * 6 * self.hidden_size * self.intermediate_size


@dataclass(frozen=True)
class Inputs:
    """Hidden states (M, K) and NUM_SETS routings of them: ids (M, top_k), weights that sum to
    1."""

    hidden_states: Tensor
    topk_weights: tuple[Tensor, ...]
    topk_ids: tuple[Tensor, ...]


def make_weights(case: Case) -> tuple[Tensor, Tensor]:
    """w13 (E, 2I, K) and w2 (E, K, I), scaled so that unit inputs give near-unit outputs."""
    generator = torch.Generator().manual_seed(0)
    e, k, i = case.num_experts, case.hidden_size, case.intermediate_size
    w13 = torch.randn(e, 2 * i, k, generator=generator) / math.sqrt(k)
    w2 = torch.randn(e, k, i, generator=generator) / math.sqrt(i)
    return w13.to(DTYPES[case.dtype]), w2.to(DTYPES[case.dtype])


def make_inputs(case: Case) -> Inputs:
    """Unit-scale hidden states and random routings, as a softmax router makes them."""
    generator = torch.Generator().manual_seed(case.num_tokens)
    m, dtype = case.num_tokens, DTYPES[case.dtype]
    hidden_states = torch.randn(m, case.hidden_size, generator=generator).to(dtype)
    weights, ids = [], []
    for _ in range(NUM_SETS):
        scores = torch.randn(m, case.num_experts, generator=generator).softmax(-1)
        top = scores.topk(case.top_k, dim=-1)
        weights.append((top.values / top.values.sum(-1, keepdim=True)).to(dtype))
        ids.append(top.indices)
    return Inputs(hidden_states, tuple(weights), tuple(ids))


def reference(inputs: Inputs, w13: Tensor, w2: Tensor, which: int) -> Tensor:
    """The layer in fp64, one expert at a time."""
    x = inputs.hidden_states.double()
    return per_expert_loop(x, w13, w2, inputs.topk_weights[which], inputs.topk_ids[which])


def transformers_layers(case: Case, w13: Tensor, w2: Tensor) -> dict[str, Layer]:
    """The experts module of Qwen3-MoE holding these very weights, once per implementation."""
    sizes = (case.num_experts, case.top_k, case.hidden_size, case.intermediate_size)
    layers: dict[str, Layer] = {}
    for name in PEERS:
        experts = transformers_experts(Shape(*sizes), w13, w2, name)
        layers[name] = lambda x, weights, ids, experts=experts: experts(x, ids, weights)
    return layers


def make_layers(case: Case, w13: Tensor, w2: Tensor, only: list[str]) -> dict[str, Layer]:
    """The implementations that this case runs."""
    layers = transformers_layers(case, w13, w2)
    if "moe_ops" in only:
        import moe_ops

        layers["moe_ops"] = lambda x, weights, ids: moe_ops.fused_experts(
            x, w13, w2, weights, ids, backend="torch"
        )
    if case.num_tokens * case.top_k * case.bytes_per_expert > MAX_GATHER_BYTES:
        del layers["batched_mm"]
    return {name: layer for name, layer in layers.items() if name in only}


def floor_ms(case: Case, inputs: Inputs, gb_s: float, gflop_s: float) -> float:
    """The larger of the time to read the experts hit and the time to do the arithmetic."""
    hit = sum(int(ids.unique().numel()) for ids in inputs.topk_ids) / NUM_SETS
    return max(hit * case.bytes_per_expert / gb_s, case.flops / gflop_s) / 1e6


def run_case(case: Case, only: list[str], limits: tuple[float, float], seconds: float) -> dict:
    """Time and check every implementation on ``case``; return its row of the results."""
    w13, w2 = make_weights(case)
    inputs = make_inputs(case)
    layers = make_layers(case, w13, w2, only)
    expected = reference(inputs, w13, w2, which=0)

    def call(layer: Layer) -> Callable[[int], Tensor]:
        return lambda which: layer(
            inputs.hidden_states, inputs.topk_weights[which], inputs.topk_ids[which]
        )

    calls = {name: call(layer) for name, layer in layers.items()}
    errors = {name: relative_error(run(0), expected) for name, run in calls.items()}
    times = interleaved_ms(calls, rounds=3, num_sets=NUM_SETS)
    best = min(min(values) for name, values in times.items() if name in PEERS or len(times) == 1)
    near = {name: run for name, run in calls.items() if min(times[name]) < FAR_BEHIND * best}
    round_ms = sum(min(times[name]) for name in near)
    sweeps = min(40, max(1, round(seconds * 1e3 / round_ms / NUM_SETS)))
    times |= interleaved_ms(near, rounds=sweeps * NUM_SETS, num_sets=NUM_SETS)
    return {
        "case": asdict(case),
        "floor_ms": round(floor_ms(case, inputs, *limits), 4),
        "calls": {name: len(values) for name, values in times.items()},
        "ms": {name: summary(values) for name, values in times.items()},
        "relative_error": {name: float(f"{error:.2e}") for name, error in errors.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument(
        "--only", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS)
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="1: timed by CPU time, not the clock"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="time spent on each cell")
    parser.add_argument("--write", action="store_true", help="keep the times in results/")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    import transformers

    facts = machine_facts() | {"transformers": transformers.__version__}
    gb_s = read_bandwidth_gb_s()
    # without instructions for it torch multiplies bf16 row by row, slower than in fp32
    gflop_s = {"fp32": matmul_gflop_s(torch.float32)}
    if matmul_gflop_s(torch.bfloat16, 256) > gflop_s["fp32"] / 2:
        gflop_s["bf16"] = matmul_gflop_s(torch.bfloat16)
    gflop_s = {name: max(gflop_s.get(name, 0), gflop_s["fp32"]) for name in arguments.dtypes}
    facts["read_gb_s"] = round(gb_s, 1)
    facts["matmul_gflop_s"] = {name: round(rate) for name, rate in gflop_s.items()}
    print(facts)

    rows = []
    for dtype, tokens in itertools.product(arguments.dtypes, arguments.tokens):
        case = Case(num_tokens=tokens, dtype=dtype)
        rows.append(run_case(case, arguments.only, (gb_s, gflop_s[dtype]), arguments.seconds))
    report.show_cpu_layers(rows)
    if arguments.write:
        name = f"cpu_layer_{facts['processor'].split()[-1]}"
        report.report(write_json(name, {"machine": facts, "rows": rows}))


if __name__ == "__main__":
    main()
