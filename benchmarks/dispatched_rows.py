"""The expert step of a trainer that dispatches rows itself: grouped_experts against torchtitan's.

    python benchmarks/dispatched_rows.py [--torchtitan WHEEL] [--shapes qwen3 olmoe]
                                         [--params bf16 fp32] [--rounds 20] [--seconds 4]
                                         [--limit SECONDS] [--results FOLDER]
    python benchmarks/dispatched_rows.py --profile   # kernels of one step of each implementation
    python benchmarks/dispatched_rows.py --dry-run   # a tiny shape on a CPU, and its gradients

A step is forward and backward pass of the routed experts alone: R rows sorted by expert, bf16,
with their counts on the device; gradients of rows and weights. Parameters are bf16, as FSDP's
mixed precision hands them over, or fp32 masters, which each implementation casts in each step.

`torchtitan` is its GroupedExperts, three weights and `torch._grouped_mm`; `torchtitan fused` its
override fused_grouped_experts, gate and up rows in turn and a Triton activation. Both are the text
of torchtitan's files, read from the installed package or from a wheel: the package itself asks for
newer versions of torch than it has to. `compiled` is each of them under torch.compile. `moe_ops`
has w13; `moe_ops pair` torchtitan's three weights, and `moe_ops in turn` its fused ones. All cases
take about a minute.

Losses (the sum of output times the given gradient) and gradients must agree with torchtitan's.
Medians in ms, in rounds of another order each; rows are written after each case, to
FOLDER/dispatched_rows_<GPU>.json.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import json
import sys
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import RESULTS, format_table, relative_error, times_ms
from records import describe_run
from torch import Tensor

import moe_ops
from moe_ops.bench.shapes import Shape

# the widths of torchtitan's Qwen3-30B-A3B and a layer of fewer, wider experts, each with the rows
# of 8192 and 4096 tokens
SHAPES = {
    "qwen3": (Shape(128, 8, 2048, 768), 8192 * 8),
    "olmoe": (Shape(64, 8, 2048, 1024), 4096 * 8),
    "tiny": (Shape(6, 2, 64, 32), 80),
}
STOCK = "torchtitan"
MAX_ERROR = 0.02  # of losses and gradients, relative: of bf16 products, each rounded

Step = Callable[[Tensor, Tensor], Tensor]  # rows, counts -> output


@dataclass(frozen=True)
class Case:
    shape: str
    params: str  # bf16 or fp32


# --- torchtitan's forwards -----------------------------------------------------------------------

_HEAD = """
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor


def get_spmd_backend():
    return ""

"""
_MOE, _FUSED = "torchtitan/models/common/moe.py", "torchtitan/overrides/fused_swiglu.py"
_ACTIVATION = ("_MAX_BLOCK_N", "_SILU_AND_MUL_BLOCK_M")  # and what has silu_and_mul in its name


def source_of(path: str, wheel: Path | None) -> str:
    """The text of a file of torchtitan, out of a wheel or of the installed package."""
    if wheel is not None:
        with zipfile.ZipFile(wheel) as files:
            return files.read(path).decode()
    spec = importlib.util.find_spec("torchtitan")
    if spec is None or spec.origin is None:
        raise SystemExit("install torchtitan, or give its wheel as --torchtitan")
    return (Path(spec.origin).parent.parent / path).read_text()


def methods(source: str, name: str) -> str:
    """The forward and the product of a class, as a class of that name without bases."""
    tree = ast.parse(source)
    (cls,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    wanted = ("forward", "_grouped_mm")
    found = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    parts = [ast.get_source_segment(source, n, padded=True) or "" for n in found]
    return f"class {name}:\n" + "\n".join(parts) + "\n"


def statements(source: str) -> Iterator[str]:
    """Of the fused override: its activation, with its operators and kernels."""
    for node in ast.parse(source).body:
        first = min([node.lineno, *[d.lineno for d in getattr(node, "decorator_list", [])]])
        text = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
        named = any(f"{name} =" in text for name in _ACTIVATION)
        named |= isinstance(node, ast.FunctionDef) and "silu_and_mul" in node.name
        named |= text.startswith("silu_and_mul_op.")
        named &= not getattr(node, "name", "").startswith(("_fused", "_silu_and_mul_2d"))
        if named:
            yield textwrap.dedent(text) + "\n\n"


def load(wheel: Path | None, with_triton: bool) -> Any:
    """A module of both forwards."""
    fused = source_of(_FUSED, wheel)
    text = _HEAD + methods(source_of(_MOE, wheel), "GroupedExperts")
    if with_triton:
        text += "\nimport triton\nimport triton.language as tl\n\n" + "".join(statements(fused))
    else:  # its activation has no CPU kernel
        text += "\n\ndef silu_and_mul_op(gate, up, offsets):\n    return F.silu(gate) * up\n"
    of_fused = methods(fused, "FusedGroupedExperts")
    text += "\n\n" + of_fused.replace(
        "FusedGroupedExperts:", "FusedGroupedExperts(GroupedExperts):"
    )
    path = Path(tempfile.mkdtemp(prefix="torchtitan_experts_")) / "torchtitan_experts.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("torchtitan_experts", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# --- what is timed -------------------------------------------------------------------------------


class Inputs:
    """Rows, counts, weights in every form, and the gradient of the output."""

    def __init__(self, case: Case, device: torch.device):
        sizes, R = SHAPES[case.shape]
        E, D, F = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
        rng = torch.Generator(device).manual_seed(1)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            made = torch.randn(shape, generator=rng, device=device) * scale
            return made.to(torch.bfloat16)

        ids = torch.randint(0, E, (R,), generator=rng, device=device)
        self.counts = torch.bincount(ids, minlength=E)
        self.x, self.grad = normal(R, D).requires_grad_(), normal(R, D)
        dtype = torch.bfloat16 if case.params == "bf16" else torch.float32
        w1, w3 = [normal(E, F, D, scale=D**-0.5).to(dtype) for _ in range(2)]
        w2 = normal(E, D, F, scale=F**-0.5).to(dtype)
        self.of = {"w1": w1, "w3": w3, "w2": w2}

    def weights(self, form: str) -> list[Tensor]:
        """Leaves of one of the forms."""
        w1, w3, w2 = self.of["w1"], self.of["w3"], self.of["w2"]
        if form == "w13":
            made = [torch.cat((w1, w3), 1), w2]
        elif form == "in turn":
            made = [torch.stack((w1, w3), 2), w2]
        else:
            made = [w1, w3, w2]
        return [t.detach().clone().requires_grad_() for t in made]


def parts(form: str, grads: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of w1, w3 and w2."""
    if form == "w13":
        w1, w3 = grads[0].chunk(2, 1)
    elif form == "in turn":
        w1, w3 = grads[0].unbind(2)
    else:
        w1, w3 = grads[:2]
    return {"w1": w1, "w3": w3, "w2": grads[-1]}


def implementations(titan: Any, compiled: bool) -> dict[str, tuple[str, Callable[..., Step]]]:
    """(form of the weights, maker of a step from them) by name."""

    def stock(w1: Tensor, w3: Tensor, w2: Tensor) -> Step:
        one = titan.GroupedExperts()
        one.w1_EFD, one.w3_EFD, one.w2_EDF = w1, w3, w2
        return one.forward

    def fused(w13: Tensor, w2: Tensor) -> Step:
        one = titan.FusedGroupedExperts()
        one.w13, one.w2_EDF = w13, w2
        return one.forward

    def ours(*weights: Tensor) -> Step:
        first = weights[0] if len(weights) == 2 else weights[:2]

        def step(x: Tensor, counts: Tensor) -> Tensor:
            return moe_ops.grouped_experts(x, first, weights[-1], counts, dtype=torch.bfloat16)

        return step

    def under_compile(make: Callable[..., Step], *weights: Tensor) -> Step:
        return torch.compile(make(*weights))

    found: dict[str, tuple[str, Callable[..., Step]]] = {
        STOCK: ("pair", stock),
        "torchtitan fused": ("in turn", fused),
        "moe_ops": ("w13", ours),
        "moe_ops pair": ("pair", ours),
        "moe_ops in turn": ("in turn", ours),
    }
    if compiled:
        for name, (form, make) in list(found.items())[:2]:
            found[f"{name} compiled"] = (form, functools.partial(under_compile, make))
    return found


def run_case(
    given: argparse.Namespace, case: Case, titan: Any, device: torch.device
) -> list[dict]:
    inputs = Inputs(case, device)
    calls: dict[str, Callable[[], object]] = {}
    rows: list[dict[str, Any]] = []
    reference: SimpleNamespace | None = None
    for name, (form, make) in implementations(titan, not given.dry_run).items():
        row: dict[str, Any] = {**asdict(case), "implementation": name}
        rows.append(row)
        begun = time.perf_counter()
        try:
            weights = inputs.weights(form)
            forward = make(*weights)
            leaves = [inputs.x, *weights]

            def step(forward: Step = forward, leaves: list = leaves) -> tuple:
                out = forward(inputs.x, inputs.counts)
                return out, torch.autograd.grad(out, leaves, inputs.grad)

            out, (dx, *grads) = step()
            terms = out.detach().float() * inputs.grad.float()  # the loss is their sum
            found = SimpleNamespace(
                loss=terms.sum(dtype=torch.float64).item(), of={"x": dx} | parts(form, list(grads))
            )
            reference = reference or found
            row["loss"] = found.loss
            errors = {n: relative_error(t, reference.of[n]) for n, t in found.of.items()}
            errors["loss"] = abs(found.loss - reference.loss) / terms.norm().item()
            row |= {f"{n}_error": float(f"{error:.2g}") for n, error in errors.items()}
            if not max(errors.values()) < MAX_ERROR:
                raise ValueError(f"it differs from {STOCK}: {errors}")
            calls[name] = step
            text = f"error {max(errors.values()):.1e}, {time.perf_counter() - begun:.1f} s"
            print(f"{case.shape}, {case.params}, {name}: {text}", flush=True)
            del terms, out, dx, grads
        except Exception as error:  # a peer may fail in any way
            row["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            print(f"{name}: {row['reason']}", file=sys.stderr, flush=True)
    reference = None
    if given.profile:
        profile(calls)
    found_ms, count = times_ms(calls, given.rounds, given.seconds, device.type == "cuda")
    for row in rows:
        if row["implementation"] in found_ms:
            row |= {"step_ms": round(found_ms[row["implementation"]], 4), "rounds": count}
    return rows


def profile(calls: dict[str, Callable[[], object]]) -> None:
    for name, call in calls.items():
        call()
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as seen:
            call()
            torch.cuda.synchronize()
        print(name)
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=16))


def show(case: Case, rows: list[dict]) -> None:
    timed = {row["implementation"]: row["step_ms"] for row in rows if "step_ms" in row}
    peers = [name for name in timed if name.startswith("torchtitan")]
    head = ["", "ms", *[f"{name} / this" for name in peers], "error"]
    lines = []
    for row in rows:
        name = row["implementation"]
        if name not in timed:
            lines.append([name, "-", *["-"] * len(peers), row["reason"][:60]])
            continue
        ratios = [f"{timed[peer] / timed[name]:.2f}" for peer in peers]
        worst = max(row[f"{n}_error"] for n in ("loss", "x", "w1", "w3", "w2"))
        lines.append([name, f"{timed[name]:.3f}", *ratios, f"{worst:.1e}"])
    print(f"\n{case.shape}, {case.params} parameters, R = {SHAPES[case.shape][1]}")
    print(format_table(head, lines), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torchtitan", type=Path, metavar="WHEEL")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3", "olmoe"])
    parser.add_argument("--params", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing a case")
    parser.add_argument("--limit", type=float, default=400.0, help="begin no case after so many s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for JSON")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args()


def main() -> int:
    given, start = parse(), time.perf_counter()
    cuda = torch.cuda.is_available() and not given.dry_run
    if not (cuda or given.dry_run):
        raise SystemExit("dispatched_rows.py needs a GPU; --dry-run does not")
    device = torch.device("cuda" if cuda else "cpu")
    if given.dry_run:
        given.shapes, given.rounds = ["tiny"], 2
        given.results = Path(tempfile.mkdtemp(prefix="dispatched_rows_"))
    titan = load(given.torchtitan, cuda)
    gpu = torch.cuda.get_device_name().replace(" ", "_") if cuda else "cpu"
    path = given.results / f"dispatched_rows_{gpu}.json"
    facts, rows = describe_run(sys.argv, not cuda), []
    failed = False
    for shape in given.shapes:
        for params in given.params:
            if time.perf_counter() - start > given.limit:
                print(f"{shape} {params}: left out, {given.limit:.0f} s are over", flush=True)
                continue
            case = Case(shape, params)
            found = run_case(given, case, titan, device)
            show(case, found)
            rows += found
            failed |= any("reason" in row and of_ours(row) for row in found)
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = ",\n  ".join(json.dumps(row) for row in rows)
            path.write_text(f'{{"run": {json.dumps(facts)},\n "rows": [\n  {lines}\n ]}}\n')
            if cuda:
                torch.cuda.empty_cache()
    print(path)
    return int(failed)


def of_ours(row: dict) -> bool:
    return row["implementation"].startswith("moe_ops")


if __name__ == "__main__":
    raise SystemExit(main())
