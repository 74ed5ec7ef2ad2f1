"""What the examples share: tidy output, checked claims, and counting what really ran."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# What other libraries warn of while examples compile and train; errors still show.
warnings.filterwarnings("ignore", category=UserWarning, module="torch._inductor")
warnings.filterwarnings("ignore", category=FutureWarning)
# Inductor advises TF32 for the matmuls of an fp32 model; here they are to equal eager's.
warnings.filterwarnings("ignore", message=".*TensorFloat32.*")

# A decode step of the tiny model is too small to share, and on busy cores the threads of one step
# wait for each other: ten times slower was seen.
torch.set_num_threads(1)


def title(text: str) -> None:
    """A section heading."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints rows under headers: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    for index, row in enumerate(cells):
        line = [row[0].ljust(widths[0])]
        line += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  " + "  ".join(line))
        if index == 0:
            print("  " + "  ".join("-" * width for width in widths))


def check(holds: bool, claim: str) -> None:
    """Prints the claim with its outcome; a claim that does not hold ends the example with status
    1."""
    print(f"  {'ok    ' if holds else 'FAILED'}  {claim}", flush=True)
    if not holds:
        sys.exit(1)


def compile_backend(device: str | torch.device) -> str:
    """The backend of torch.compile: "inductor", or "aot_eager" where that finds no C++ compiler,
    without which it generates nothing for CPUs.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if torch.device(device).type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "aot_eager"
    return "inductor"


def scheme_name(name: str) -> str:
    """The full name of a scheme that a command line names: a `type` of argparse."""
    from moe_ops.schemes import get_scheme

    try:
        found = get_scheme(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if found.activation is not None and found.activation.static:
        raise argparse.ArgumentTypeError(
            f"{name!r} has static activation scales, which need calibration data; take another"
        )
    return found.name


def scheme_names(names: str) -> list[str]:
    """Schemes that quantize, separated by commas: a `type` of argparse."""
    found = [scheme_name(name) for name in names.split(",")]
    if "" in found:
        raise argparse.ArgumentTypeError(f"schemes must be names between commas, got {names!r}")
    return found


def max_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference, relative to the largest magnitude wanted."""
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


class _CountOps(TorchDispatchMode):
    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.namespace, self.counts = namespace, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == self.namespace:
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def ops_called(fn: Callable[[], object], namespace: str = "moe_ops") -> Counter[str]:
    """Runs fn() once and counts the calls of that namespace's registered operators by name."""
    with _CountOps(namespace) as mode:
        fn()
    return mode.counts


def expert_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """(bytes, number of weights) of all expert parameters of a transformers model."""
    params = [p for name, p in model.named_parameters() if ".experts." in name]
    return sum(p.nbytes for p in params), sum(p.numel() for p in params)


def cuda_graphs_recorded() -> int:
    """How many CUDA graphs Inductor holds for the current device."""
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    pending = [] if manager is None else [n for nodes in manager.roots.values() for n in nodes]
    count = 0
    while pending:
        count, node = count + 1, pending.pop()
        pending += [child for nodes in node.children.values() for child in nodes]
    return count
