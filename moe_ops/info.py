"""What runs on this machine, and why the rest does not: ``python -m moe_ops.info``.

    python -m moe_ops.info [--json]
    python -m moe_ops.info --explain E K I TOP_K SCHEME [--dtype bfloat16] [--activation silu]
                           [--device cuda] [--backend auto] [--m 1 8 64] [--json]
    python -m moe_ops.info --check [--device cuda] [--backends NAME ...] [--schemes NAME ...]
                           [--seconds 90] [--json]

``--explain`` prints which backend runs an expert layer at each number of tokens M, what workspace
it takes and, for every backend left out, why. SCHEME is a scheme's name, or ``plain`` for weights
that are not quantized.

``--check`` is `moe_ops.self_check`: it runs every backend and scheme of this machine, compares the
results with fp64, and prints a table. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from moe_ops import activations, environment, schemes
from moe_ops import backends as backends_module
from moe_ops.backends.cutlass import library as cutlass
from moe_ops.backends.torch import cpu
from moe_ops.checks import device_named
from moe_ops.kernels.configs import DECODED
from moe_ops.ops import relayout
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Problem
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans
from moe_ops.tables import lookup

# distributions that integrations use, beside those of the backends; read from metadata, so none is
# imported
DISTRIBUTIONS = (
    "torch",
    "triton",
    "torchao",
    "numpy",
    "transformers",
    "accelerate",
    "peft",
    "safetensors",
)
DTYPES = ("bfloat16", "float16", "float32")
DEFAULT_M = (1, 8, 64, 512, 4096)


def facts() -> dict[str, Any]:
    """Everything ``python -m moe_ops.info --json`` prints, in types that JSON knows.

    Keys: ``python``, ``imported_from`` (the folder of this package), ``installed_in`` (that of an
    installed one that it hides, or None), ``versions`` (distribution -> version or None), ``cuda``
    (runtime and driver, or None), ``rocm`` (runtime or None), ``gpus`` (name, architecture:
    "SM90", "gfx942"; capability, [0, 0] of AMD's; memory_gib), ``accelerator`` (the type of
    another accelerator that torch finds, such as "xpu" or "mps", or None), ``backends`` (name ->
    None if backend="auto" may choose it for some bf16 layer here, else why not and what to do),
    ``takes`` (name -> the schemes of these layers, of weights as they are in ``natural``, of those
    that need `prepare` in ``prepared``), ``cpu_kernel`` (None if the CPU kernel is in use, else
    why not), ``kernels`` ("cpu" and each family of GPUs that backend cutlass has kernels for ->
    "brought by the wheel", "built beside the sources", "built at first use", or None where there
    are none), ``tuning`` (GPU name -> number of measured problems), ``other_owners`` (other
    distributions that install a package ``moe_ops``, which should be none), ``newer_than_tested``
    (distribution -> the newest version that the tests ran with, where a newer one is installed).
    """
    backends, takes = _backends()
    libraries = (environment.DISTRIBUTION, *DISTRIBUTIONS, *backends_module.distributions())
    distributions = tuple(dict.fromkeys(libraries))
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "imported_from": str(environment.package_folder()),
        "installed_in": environment.hidden_installation(),
        "versions": {name: environment.version(name) for name in distributions},
        "cuda": {"runtime": torch.version.cuda, "driver": environment.nvidia_driver()},
        "rocm": torch.version.hip,
        "gpus": _gpus(),
        "accelerator": _accelerator(),
        "backends": backends,
        "takes": takes,
        "newer_than_tested": {
            backend.library.distribution: backend.library.newest_tested
            for backend in backends_module.BACKENDS
            if backend.library.untested_version
        },
        "cpu_kernel": cpu.why_not(),
        "kernels": {"cpu": cpu.origin(), **cutlass.origins()},
        "tuning": {
            name: len(json.loads(path.read_text())["entries"])
            for name, path in lookup.tables().items()
        },
        "other_owners": environment.other_owners(),
    }


def explain(
    problem: Problem, device: torch.device, backend: str, token_counts: Sequence[int]
) -> dict[str, Any]:
    """The plan of a problem on a device, tier by tier.

    Returns:
        ``problem`` (one line), ``untried`` (None, or that no test ran on such a GPU),
        ``rows`` (for each M: ``tokens``, ``backend``, ``native``, ``workspace_bytes``,
        ``chunks``) and ``refused`` (backend name -> reasons).

    Raises:
        ValueError: no backend, or not the one asked for, takes the problem; all reasons are
            listed.
        ImportError: the library of the backend asked for is not installed.
    """
    plan = plans.plan(problem, machines.machine(device), backend)
    rows = []
    for tokens in token_counts:
        if tokens < 0:
            raise ValueError(f"numbers of tokens must not be negative, got {tokens}")
        chosen = next(b for limit, b in plan.tiers if limit < 0 or tokens <= limit)
        buffers = plan.workspace_shapes(tokens)
        rows.append(
            {
                "tokens": tokens,
                "backend": chosen.name,
                "native": not chosen.takes.emulates(problem, plan.machine),
                "workspace_bytes": sum(_num_bytes(buffer) for buffer in buffers),
                "chunks": plan.num_chunks(tokens),
            }
        )
    return {
        "problem": str(plan).splitlines()[0],
        "untried": plan.not_tested_note,
        "rows": rows,
        "refused": {name: list(reasons) for name, reasons in plan.refused},
    }


def format_facts(found: dict[str, Any]) -> str:
    """The text form of :func:`facts`: one screen of 80 columns."""
    versions = dict(found["versions"])
    version, where = versions.pop(environment.DISTRIBUTION), found["imported_from"]
    if found["installed_in"]:
        where += f", which hides the installed {version} in {found['installed_in']}"
        version = None
    version = version or "(not installed, imported from source)"
    lines = [f"moe_ops {version}, {found['platform']}, Python {found['python']}"]
    lines += _wrapped("imported from ", where)
    for other in found["other_owners"]:
        lines += _wrapped(
            "WARNING: ",
            f"{other} is another distribution that is imported as moe_ops, and may have replaced "
            f"files of this one; pip uninstall {other.split()[0]} {environment.DISTRIBUTION}, "
            "then install this one again",
        )
    runtime: list[str] = []
    if found["gpus"]:
        for gpu, numbers in _alike(found["gpus"]):
            memory = f"{gpu['memory_gib']:.0f} GiB"
            lines.append(f"GPU {numbers}: {gpu['name']}, {gpu['architecture']}, {memory}")
            if note := plans.not_tested_note(gpu["architecture"]):
                lines += _wrapped("  ", note)
        driver = found["cuda"]["driver"] or "unknown"
        nvidia = [f"CUDA {found['cuda']['runtime']}", f"driver {driver}"]
        runtime = [f"ROCm {found['rocm']}"] if found["rocm"] else nvidia
    else:
        built = f"CUDA {found['cuda']['runtime']}" if found["cuda"]["runtime"] else "CPU"
        lines.append(f"no CUDA device (torch is built for {built})")
        if found["accelerator"]:
            note = plans.not_tested_note(found["accelerator"])
            lines += _wrapped(f"{found['accelerator']}: ", f"plain torch operators; {note}")
    notes = {
        name: f" (newer than {newest}, the last tested)"
        for name, newest in found["newer_than_tested"].items()
    }
    installed = [f"{name} {v}{notes.get(name, '')}" for name, v in versions.items() if v]
    lines += _wrapped("versions: ", ", ".join(runtime + installed))
    if missing := [name for name, version in versions.items() if not version]:
        lines += _wrapped("not installed: ", ", ".join(missing))
    lines.append("backends that 'auto' chooses from here")
    for name, reason in found["backends"].items():
        answer = f"available{_takes(found['takes'][name])}" if reason is None else f"no: {reason}"
        if name == "cutlass" and reason is None:
            families = {cutlass.architecture(tuple(gpu["capability"])) for gpu in found["gpus"]}
            origins = {family: found["kernels"].get(family) for family in sorted(families)}
            answer += "".join(
                [f"; {family} {origin}" for family, origin in origins.items() if origin]
            )
        lines += _wrapped(f"  {name:13} ", answer)
    tested = ", ".join(plans.RUN_ON[1:])
    lines += _wrapped(
        "tested on ", f"CPUs and {tested}; what they have for other GPUs was not run on hardware"
    )
    in_use = found["cpu_kernel"] or f"{found['kernels']['cpu']}, in use"
    lines += _wrapped("kernels for AVX2, AVX-512, AMX and NEON: ", in_use, hanging=2)
    tables = [f"{name}, {count} problems" for name, count in found["tuning"].items()]
    lines += _wrapped(
        "measured: ", "; ".join(tables) or "nothing: backends are taken in the order above"
    )
    return "\n".join(lines)


def _wrapped(head: str, text: str, hanging: int | None = None) -> list[str]:
    """`head` and `text` in lines of 80 columns; the next ones are indented like the text."""
    indent = " " * (len(head) if hanging is None else hanging)
    return textwrap.wrap(
        text, 80, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )


def _alike(gpus: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """(GPU, its index), or the indices of neighbours that are alike."""
    found = []
    for gpu, group in itertools.groupby(enumerate(gpus), key=lambda item: item[1]):
        indices = [index for index, _ in group]
        first, last = indices[0], indices[-1]
        found.append((gpu, str(first) if first == last else f"{first} to {last}"))
    return found


def format_explanation(found: dict[str, Any]) -> str:
    """The text form of :func:`explain`."""
    lines = [
        found["problem"],
        *([f"  {found['untried']}"] if found["untried"] else []),
    ]
    lines.append(f"  {'M':>8}  {'backend':10} {'workspace':>12}")
    for row in found["rows"]:
        mib = row["workspace_bytes"] / 2**20
        emulated = (
            "" if row["native"] else "  emulated: operands dequantized, products in a wider type"
        )
        chunks = f" in {row['chunks']} chunks" if row["chunks"] > 1 else ""
        lines.append(
            f"  {row['tokens']:>8}  {row['backend']:10} {mib:>8.2f} MiB{chunks}{emulated}"
        )
    for name, reasons in found["refused"].items():
        lines.append(f"  not {name}: {'; '.join(reasons)}")
    return "\n".join(lines)


def _problem(arguments: argparse.Namespace) -> Problem:
    """The problem that the command line describes; sizes are checked here, names where they are
    used.
    """
    sizes = {}
    for name, text in zip(("E", "K", "I", "TOP_K"), arguments.explain[:4], strict=True):
        if not text.isdecimal() or int(text) == 0:
            raise ValueError(f"{name} must be a positive integer, got {text!r}")
        sizes[name] = int(text)
    if sizes["TOP_K"] > sizes["E"]:
        raise ValueError(f"TOP_K must be at most E = {sizes['E']}, got {sizes['TOP_K']}")
    scheme = "" if arguments.explain[4] == "plain" else _scheme(arguments.explain[4])
    activation = activations.resolve(arguments.activation)
    rows = sizes["I"] * (2 if activation.gated else 1)
    for weight, shape in (("w13", (rows, sizes["K"])), ("w2", (sizes["K"], sizes["I"]))):
        reason = scheme and schemes.get_scheme(scheme).why_not_shape(*shape)
        if reason:
            raise ValueError(
                f"{weight} of {shape[0]} rows cannot be quantized to {scheme!r}: {reason}"
            )
    return Problem(
        kind="experts",
        num_experts=sizes["E"],
        hidden_size=sizes["K"],
        intermediate_size=sizes["I"],
        num_rows=rows,
        top_k=sizes["TOP_K"],
        dtype=getattr(torch, arguments.dtype),
        scheme=scheme,
        options=Options(activation),
    )


def _scheme(name: str) -> str:
    """The full name of a scheme that quantizes."""
    try:
        return schemes.get_scheme(name).name
    except ValueError as error:
        raise ValueError(f"{error}; 'plain' is for weights as they are, in --dtype") from error


def _device(name: str | None) -> torch.device:
    """The device named, or the GPU if there is one, else the CPU."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return device_named("device", name or default, "use --device cpu")


def _num_bytes(buffer: Any) -> int:
    size: int = buffer.dtype.itemsize
    for extent in buffer.shape:
        size *= extent
    return size


# without those that no kernel decodes, which are not worth a line: `torch` runs every scheme
_FAMILIES = tuple(
    dict.fromkeys(
        [
            name.split(":")[0]
            for name, scheme in schemes.SCHEMES.items()
            if scheme.weight is None or scheme.weight.dtype in DECODED
        ]
    )
)


def _backends() -> tuple[dict[str, str | None], dict[str, dict[str, list[str]]]]:
    """``backends`` and ``takes`` of `facts`."""
    here, silu = machines.machine(_device(None)), activations.resolve("silu")
    layer = Problem("experts", 8, 256, 128, 256, 2, torch.bfloat16, options=Options(silu))
    why_not: dict[str, str | None] = {}
    takes: dict[str, dict[str, list[str]]] = {}
    for backend in backends_module.BACKENDS:
        # of each family of schemes that it takes: whether weights are as they are
        natural: dict[str, bool] = {}
        refusals: list[list[str]] = []
        for scheme in (*backend.takes.native_schemes, *schemes.SCHEMES):
            for problem in relayout.variants(replace(layer, scheme=scheme), backend.name):
                reasons = plans.why_not(backend, problem, here)
                refusals.append(reasons)
                if not reasons:
                    natural.setdefault(scheme.split(":")[0], not problem.layout)
        fewest = min(refusals, key=len)  # of a scheme that it has, in its layout
        why_not[backend.name] = None if natural else "; ".join(fewest)
        takes[backend.name] = {
            what: [name or "plain" for name in _FAMILIES if natural.get(name) is as_they_are]
            for what, as_they_are in (("natural", True), ("prepared", False))
        }
    return why_not, takes


def _takes(found: dict[str, list[str]]) -> str:
    """Text of an entry of ``takes``; nothing where every scheme is taken as it is."""
    natural, prepared = ", ".join(found["natural"]), ", ".join(found["prepared"])
    if len(found["natural"]) == len(_FAMILIES):
        return ""
    parts = [natural] if natural else []
    return " for " + "; ".join(parts + ([f"{prepared}, prepared weights"] if prepared else []))


def _accelerator() -> str | None:
    """The type of an accelerator that is no GPU of CUDA or ROCm."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type == "cuda" else found.type


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        here = machines.machine(torch.device("cuda", index))
        found.append(
            {
                "name": properties.name,
                "architecture": here.architecture,
                "capability": list(here.capability),
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return found


def _check(parsed: argparse.Namespace) -> int:
    from moe_ops.selfcheck import check, report

    try:
        found = check.self_check(
            parsed.device,
            backends=parsed.backends,
            schemes=parsed.schemes,
            seconds=check.SECONDS if parsed.seconds is None else parsed.seconds,
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(report.to_json(found), indent=1) if parsed.json else found)
    return 0 if found.ok else 1


@environment.importing_torchao(in_command=True)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 for a question that has no answer and for a
    check in which anything differs.
    """
    parser = argparse.ArgumentParser(
        prog="python -m moe_ops.info",
        description="What this machine can run, and why not the rest.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--explain",
        nargs=5,
        metavar=("E", "K", "I", "TOP_K", "SCHEME"),
        help="print the plan of an expert layer; SCHEME 'plain' for weights as they are",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of hidden_states")
    parser.add_argument("--activation", default="silu")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--m", type=int, nargs="+", default=DEFAULT_M, help="numbers of tokens")
    parser.add_argument("--check", action="store_true", help="run what runs here, against fp64")
    parser.add_argument("--backends", nargs="+", help="of --check; default: all")
    parser.add_argument("--schemes", nargs="+", help="of --check; default: all")
    parser.add_argument("--seconds", type=float, help="of --check: then no call starts any more")
    parsed = parser.parse_args(arguments)
    if parsed.check:
        return _check(parsed)
    if parsed.explain is None:
        found = facts()
        print(json.dumps(found, indent=1) if parsed.json else format_facts(found))
        return 0
    try:
        found = explain(_problem(parsed), _device(parsed.device), parsed.backend, parsed.m)
    except (ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1) if parsed.json else format_explanation(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
