"""The tables of docs/backends.md, made from the code, the measured tables and the plots; report.py
writes them. Needs no GPU: what backends accept is asked for GPUs described by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from moe_ops import backends
from moe_ops.activations import NAMES, Activation
from moe_ops.csrc import build
from moe_ops.ops import relayout
from moe_ops.ops.backend import Backend
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem
from moe_ops.planning import plan as plans
from moe_ops.schemes import SCHEMES
from moe_ops.tables import lookup

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
EVERYTHING = backends.list_backends()
H200 = Machine("cuda", (9, 0), "NVIDIA H200", EVERYTHING, total_memory=150_109_880_320)
MACHINES = {
    "CPU": Machine("cpu", available=EVERYTHING),
    **{
        f"SM{major}{minor}": Machine("cuda", (major, minor), "", EVERYTHING)
        for major, minor in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
    },
}
# sizes that all backends' multiples divide
LAYER = Problem(
    "experts", 8, 1024, 512, 1024, 2, torch.bfloat16, options=Options(Activation("silu"))
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
QWEN3 = replace(LAYER, num_experts=128, hidden_size=2048, intermediate_size=768, num_rows=1536)
QWEN3 = replace(QWEN3, top_k=8, scheme="fp8_block")


def takes(backend: Backend, problem: Problem, machine: Machine) -> bool:
    """Whether it runs a problem, with weights in some layout."""
    if problem.kind not in backend.operators:
        return False
    return any(not backend.supports(p, machine) for p in relayout.variants(problem, backend.name))


def accepts() -> str:
    """Schemes against backends: on which devices, natively or emulated."""
    lines = [f"| scheme | {' | '.join([f'`{name}`' for name in EVERYTHING])} |"]
    lines.append("|---" * (len(EVERYTHING) + 1) + "|")
    families: dict[str, list[str]] = {"": [""]}
    for name in SCHEMES:
        if name:
            families.setdefault(name.split(":")[0], []).append(name)
    for family, variants in families.items():
        cells = [where(backend, variants) for backend in backends.BACKENDS]
        lines.append(f"| {f'`{family}`' if family else 'plain'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def where(backend: Backend, variants: list[str]) -> str:
    """The devices that run any of a scheme's variants, emulated ones in brackets."""
    found = []
    for name, machine in MACHINES.items():
        run = [v for v in variants if takes(backend, replace(LAYER, scheme=v), machine)]
        if run:
            native = any(backend.takes.native(v, machine) for v in run)
            found.append(name if native else f"({name})")
    if len(found) == len(MACHINES) and len({text[0] == "(" for text in found}) == 1:
        return "all" if found[0][0] != "(" else "(all)"
    return ", ".join(found) or "-"


def features() -> str:
    """What else a call may ask for, in some scheme and on some device."""
    plain_and_quantized = [replace(LAYER, scheme=scheme) for scheme in ("", *SCHEMES)]

    def some(backend: Backend, **changes: object) -> bool:
        problems = [problem.replace(**changes) for problem in plain_and_quantized]
        return any(takes(backend, p, machine) for p in problems for machine in MACHINES.values())

    def of(names: tuple[str, ...], change: Callable[[str], dict]) -> Callable:
        def text(backend: Backend) -> str:
            found = [name for name in names if some(backend, **change(name))]
            return "all" if len(found) == len(names) else ", ".join(found) or "-"

        return text

    def activation(name: str) -> dict:
        act = Activation(name)
        rows = LAYER.intermediate_size * (2 if act.gated else 1)
        return {"activation": act, "num_rows": rows}

    def layout(backend: Backend) -> str:
        natural, prepared = {}, {}  # schemes by device
        for name, machine in MACHINES.items():
            for p in plain_and_quantized:
                if takes(backend, p, machine):
                    as_they_are = not backend.supports(p, machine)
                    kind = p.scheme.split(":")[0] or "plain"
                    (natural if as_they_are else prepared).setdefault(name, {})[kind] = None
        if not prepared:
            return "as they are"
        if not natural:
            return "prepared"
        where = [f"{', '.join(kinds)} on {name}" for name, kinds in prepared.items()]
        return f"as they are; prepared: {'; '.join(where)}"

    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    kinds = {"batched_experts": 0, "grouped_linear": 0}
    rows: dict[str, Callable[[Backend], str]] = {
        "hidden_states": of(tuple(dtypes), lambda name: {"dtype": dtypes[name]}),
        "activation": of(tuple(NAMES), activation),
        **{f"`{kind}`": lambda b, kind=kind: yes(some(b, kind=kind, top_k=0)) for kind in kinds},
        "biases": lambda b: yes(some(b, has_bias=True)),
        "`expert_map`": lambda b: yes(some(b, mapped_experts=256)),
        "`router_weight_on_input`": lambda b: yes(some(b, router_weight_on_input=True, top_k=1)),
        "hidden_states that arrive quantized": arriving,
        "strided weights": lambda b: yes(some(b, contiguous_weights=False)),
        "gradients": lambda b: yes(b.takes.differentiable),
        "layout of weights": layout,
    }

    lines = [f"| | {' | '.join([f'`{name}`' for name in EVERYTHING])} |"]
    lines.append("|---" * (len(EVERYTHING) + 1) + "|")
    for what, text in rows.items():
        lines.append(f"| {what} | {' | '.join([text(b) for b in backends.BACKENDS])} |")
    return "\n".join(lines)


def arriving(backend: Backend) -> str:
    """The schemes of which it takes an input that arrives quantized."""
    families = dict.fromkeys([name.split(":")[0] for name in backend.takes.quantized_input])
    every = {name.split(":")[0] for name, scheme in SCHEMES.items() if scheme.activation}
    missing = sorted(every - set(families))
    if len(missing) < len(families):
        return f"all but {', '.join(missing)}" if missing else "all that quantize them"
    return ", ".join(families) or "no"


def yes(value: bool) -> str:
    return "yes" if value else "no"


# plans as on a machine that has built no kernels: the documents do not follow where they are made
unbuilt = mock.patch.object(build, "installed", lambda *_: None)


@unbuilt
def explanation() -> str:
    """A plan as it prints: one layer of Qwen3-30B-A3B in fp8_block."""
    return f"```\n{plans.plan(QWEN3, H200)}\n```"


@unbuilt
def tiers() -> str:
    """What "auto" runs where times of backends were measured."""
    lines = []
    for gpu, path in lookup.tables().items():
        machine = replace(H200, gpu_name=gpu)
        for entry in json.loads(path.read_text())["entries"]:
            if "backends" not in entry:
                continue
            E, K, I, top_k = (entry[key] for key in lookup.KEYS[:4])
            sizes = {"num_experts": E, "hidden_size": K, "intermediate_size": I}
            problem = replace(LAYER, **sizes, num_rows=2 * I, top_k=top_k, scheme=entry["scheme"])
            plan = plans.plan(replace(problem, dtype=getattr(torch, entry["dtype"])), machine)
            runs = [f"`{b.name}`" + (f" to M = {m}" if m > 0 else "") for m, b in plan.tiers]
            shape = f"E={E} K={K} I={I} top_k={top_k}"
            scheme = entry["scheme"] or entry["dtype"]
            lines.append(f"| {gpu} | {shape} | {scheme} | {', then '.join(runs)} |")
    if not lines:
        return (
            "No table of this package has times of backends yet: everywhere `triton` runs, "
            "except where it cannot."
        )
    return "\n".join(["| GPU | shape | scheme | `auto` |", "|---|---|---|---|", *lines])


def plots() -> str:
    """The plots that `benchmarks/experts.py --report` has drawn of backends."""
    found = sorted(RESULTS.glob("experts_*_backends.png"))
    if not found:
        return "No backends were measured by name yet."
    lines = []
    for path in found:
        facts = path.stem.removeprefix("experts_").removesuffix("_backends").replace("_", " ")
        lines.append(f"![Backends over the floor: {facts}](../benchmarks/results/{path.name})")
    return "\n".join(lines)
