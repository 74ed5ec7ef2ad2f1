"""Host time of one eager fused_experts call outside its kernel launches, and where it goes.

    python benchmarks/host_overhead.py [--device cuda] [--rounds 101] [--write]

A backend whose launcher is empty is registered with the workspaces of a real one, so what remains
is this library: validation, plan, allocation, the way to the launcher. Target: 25 us. "as an
operator" is the same call where something listens to the dispatcher (a profiler, a mode), which an
ordinary eager call does not pass through. ``--write`` keeps the times in
benchmarks/results/host_overhead_<cpu or GPU name>.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from unittest import mock

import torch
from harness import format_table, machine_facts, write_json

import moe_ops
from moe_ops import activations, backends
from moe_ops.backend import Backend, register
from moe_ops.ops.call import ExpertsCall, take_apart
from moe_ops.ops.options import Options
from moe_ops.planning import bind

TARGET_US = 25.0
NUM_EXPERTS, TOP_K, HIDDEN_SIZE, INTERMEDIATE_SIZE = 32, 4, 256, 128


@dataclass(frozen=True)
class Case:
    """One call: its number of tokens and the scheme of its weights, "" for plain bf16."""

    num_tokens: int
    scheme: str


CASES = (Case(1, ""), Case(64, ""), Case(1, "fp8_block"))


def register_empty(like: Backend) -> None:
    """Add a backend "empty" that takes every problem, allocates as `like` does and runs
    nothing."""
    empty = Backend(
        "empty",
        supports=lambda problem, machine: [],
        workspace_shapes=like.workspace_shapes,
        launch={"experts": lambda args: None},
        devices=("CPU", "CUDA"),
    )
    moe_ops.register_backend(register(empty))


def microseconds(
    functions: list[Callable[[], object]], calls: int = 50, rounds: int = 101
) -> list:
    """Medians over rounds, in which all functions take turns, of the host time of one call in us.

    Time of this thread: what other processes take is left out, what they do to clocks and caches
    is not. On rented machines that lasts seconds and can double a time, so all cases are timed
    side by side.
    """
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, found in zip(functions, times, strict=True):
            start = time.thread_time_ns()
            for _ in range(calls):
                function()
            found.append((time.thread_time_ns() - start) / calls / 1e3)
    return [statistics.median(found[1:]) for found in times]


def calls_of(case: Case, device: torch.device) -> list[Callable[[], object]]:
    """The call, its allocations alone, and 16 calls by way of the dispatcher."""
    generator = torch.Generator().manual_seed(0)
    e, k, i = NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE
    w13 = torch.randn(e, 2 * i, k, generator=generator).to(device, torch.bfloat16)
    w2 = torch.randn(e, k, i, generator=generator).to(device, torch.bfloat16)
    if case.scheme:
        w13, w2 = moe_ops.quantize(w13, case.scheme), moe_ops.quantize(w2, case.scheme)
    x = torch.randn(case.num_tokens, k, generator=generator).to(device, torch.bfloat16)
    logits = torch.randn(case.num_tokens, e, generator=generator).to(device)
    weights, ids = moe_ops.route(logits, TOP_K)
    plan = moe_ops.explain(x, w13, w2, ids, backend="empty")
    bound = bind.BoundPlan(plan)
    silu = Options(activations.resolve("silu"))
    experts = (x, take_apart(w13), take_apart(w2), weights, ids, None, None, None)
    arguments = ExpertsCall(*experts, silu)

    def call() -> torch.Tensor:
        return moe_ops.fused_experts(x, w13, w2, weights, ids, backend="empty")

    def allocate() -> list[torch.Tensor]:
        return bound.allocate(True, arguments, case.num_tokens)

    def call_operator() -> None:
        with mock.patch.object(bind, "_profiling", lambda: True):
            for _ in range(16):
                call()

    return [call, allocate, call_operator]


def measure(device: torch.device, like: Backend, rounds: int) -> list[dict]:
    """One row for each case."""
    functions = [calls_of(case, device) for case in CASES]
    in_turns = [function for calls in functions for function in calls]
    times = iter(microseconds(in_turns, rounds=rounds))
    return [
        {
            "case": asdict(case),
            "workspaces_of": like.name,
            "total_us": round(next(times), 2),
            "allocation_us": round(next(times), 2),
            "as_operator_us": round(next(times) / 16, 2),
        }
        for case in CASES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(default))
    parser.add_argument("--rounds", type=int, default=101, help="of 50 calls; at least 2")
    parser.add_argument("--write", action="store_true", help="keep the times in results/")
    arguments = parser.parse_args()
    device = torch.empty(0, device=arguments.device).device
    torch.set_grad_enabled(False)
    wanted = "triton" if device.type == "cuda" else "torch"
    like = next(backend for backend in backends.BACKENDS if backend.name == wanted)
    register_empty(like)
    facts = machine_facts()
    rows = measure(device, like, arguments.rounds)
    print(facts)
    header = ["M", "scheme", "total us", "of it allocations", "as an operator", "target"]
    print(
        format_table(
            header,
            [
                [
                    row["case"]["num_tokens"],
                    row["case"]["scheme"] or "plain",
                    row["total_us"],
                    row["allocation_us"],
                    row["as_operator_us"],
                    "met" if row["total_us"] <= TARGET_US else f"{TARGET_US:.0f} us missed",
                ]
                for row in rows
            ],
        )
    )
    if arguments.write:
        where = facts["gpu"].replace(" ", "_") if device.type == "cuda" else "cpu"
        print(write_json(f"host_overhead_{where}", {"machine": facts, "rows": rows}))


if __name__ == "__main__":
    main()
