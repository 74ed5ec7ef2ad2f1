"""Pages that are made from the code: the reference, and the tables of schemes and of backends.

Modules are found by their public names alone, so that a move inside the package changes nothing
here. What backends accept comes from benchmarks/backends_doc.py, whose tables benchmarks/report.py
writes into docs/backends.md.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

import moe_ops
from moe_ops.schemes import (
    OTHER_NAMES,
    SCHEMES,
    SUPER_BLOCK,
    GroupShape,
    QuantDesc,
    QuantScheme,
)

ROOT = Path(__file__).resolve().parents[2]
# what most readers look for; all other functions follow, then classes
FIRST = ("fused_experts", "MoELayer", "quantize", "route", "explain", "warmup")
# pages of the reference, beside that of moe_ops itself, and the modules on them
MODULES = {
    "schemes": ("moe_ops.schemes",),
    "tensors": ("moe_ops.tensors",),
    "warmup": ("moe_ops.warmup",),
    "info": ("moe_ops.info",),
    "tuning": ("moe_ops.tuning.__main__",),
    "integrations": (
        "moe_ops.integrations.transformers",
        "moe_ops.integrations.checkpoints",
        "moe_ops.integrations.torchao",
    ),
}


def pages() -> Iterator[tuple[str, str]]:
    """(path, text) of each page."""
    yield "reference/moe_ops.md", public_names()
    yield "reference/scheme_table.md", schemes()
    yield "reference/backend_table.md", backends()
    for name, modules in MODULES.items():
        lines = [f"# moe_ops.{name}", ""]
        for module in modules:
            lines += [f"## {module}", ""] if len(modules) > 1 else []
            lines.append(members(importlib.import_module(module)))
        yield f"reference/{name}.md", "\n".join(lines)


def directive(name: str) -> str:
    """What mkdocstrings replaces by the documentation of a name."""
    return f"::: {name}\n"


def public_names() -> str:
    """The reference of everything in `moe_ops.__all__`: `FIRST`, functions, then classes."""
    others = [name for name in moe_ops.__all__ if name not in FIRST]
    names = [*FIRST, *sorted(others, key=lambda name: inspect.isclass(getattr(moe_ops, name)))]
    lines = ["# moe_ops", "", inspect.getdoc(moe_ops) or "", ""]
    return "\n".join([*lines, *[directive(path_of(name)) for name in names]])


def path_of(name: str) -> str:
    """Where griffe finds a public name of `moe_ops`: `warmup` is a function there and a module."""
    path = f"moe_ops.{name}"
    if importlib.util.find_spec(path) is not None:
        return f"{path}.{name}"
    return path


def members(module: ModuleType) -> str:
    """A module's description, and its classes and functions that `moe_ops` itself has not."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [n for n, value in vars(module).items() if is_documented(value, module.__name__)]
    described = [n for n in names if is_documented(getattr(module, n))]
    others = [n for n in described if getattr(moe_ops, n, None) is not getattr(module, n)]
    links = [f"[`moe_ops.{n}`][{path_of(n)}]" for n in described if n not in others]
    lines = [inspect.getdoc(module) or "", ""]
    if links:
        lines += [f"See also {', '.join(links)}.", ""]
    return "\n".join([*lines, *[directive(f"{module.__name__}.{name}") for name in others]])


def is_documented(value: object, module: str | None = None) -> bool:
    """Whether a value is a public class or function with a docstring, defined in `module`."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return False
    named = not value.__name__.startswith("_") and value.__name__ != "main"
    return named and bool(value.__doc__) and module in (None, value.__module__)


def schemes() -> str:
    """A row for every named scheme."""
    lines = [
        "# Schemes",
        "",
        "Every name that `moe_ops.quantize` takes. [quantization.md](../docs/quantization.md)",
        "says what schemes cost and how their scales are chosen. [moe_ops.schemes](schemes.md)",
        "has the classes. Bits count elements and scales of a weight with 4096 rows and columns.",
        "",
        "| scheme | weights | bits a weight | activations |",
        "|---|---|---|---|",
    ]
    for name, scheme in SCHEMES.items():
        if scheme.weight is not None:
            activations = "as they are"
            if scheme.activation is not None:
                static = "static, " if scheme.activation.static else "dynamic, "
                activations = operand(scheme.activation, static)
            bits = bits_a_weight(scheme)
            lines.append(f"| `{name}` | {operand(scheme.weight)} | {bits:.2f} | {activations} |")
    lines += ["", "Other spellings:", "", "| name | means |", "|---|---|"]
    lines += [f"| `{short}` | `{name}` |" for short, name in OTHER_NAMES.items()]
    return "\n".join(lines) + "\n"


def operand(desc: QuantDesc, kind: str = "") -> str:
    """One operand's format and scales in words; `kind` says when the scales are computed."""
    dtype = "16-bit" if desc.scale_dtype is None else str(desc.scale_dtype).removeprefix("torch.")
    words = [f"{desc.dtype}, {kind}one {dtype} scale for {group(desc.group)}"]
    if desc.scale_rule:
        words.append(f"(rule `{desc.scale_rule}`)")
    extra = [
        text
        for present, text in (
            (desc.global_scale, "one more scale for the whole matrix"),
            (desc.channel_scale, "one more scale for each row"),
            (desc.two_levels, f"one more fp16 scale for {SUPER_BLOCK} columns of a row"),
            (desc.zero_point, "zero points"),
            (desc.minimum, "minima alike" if desc.two_levels else "minima"),
        )
        if present
    ]
    return " ".join(words) + (f", with {' and '.join(extra)}" if extra else "")


def group(shape: GroupShape) -> str:
    """What shares one scale, in words."""
    if shape.is_tensor:
        return "the whole matrix"
    if shape.is_row:
        return "each row"
    if shape.rows == 1:
        return f"{shape.cols} columns of a row"
    return f"each {shape.rows} x {shape.cols} block"


def bits_a_weight(scheme: QuantScheme, size: int = 4096) -> float:
    """Bits that elements and scales take for each weight of one (size, size) matrix."""
    weight = torch.empty(1, size, size, dtype=torch.bfloat16, device="meta")
    return moe_ops.ExpertTensor.from_hp(weight, scheme.name).nbytes * 8 / weight.numel()


def backends() -> str:
    """The registered backends: what each accepts on which device."""
    document = _backends_doc()
    return "\n".join(
        [
            "# Backends",
            "",
            "In order of preference where nothing was measured.",
            "[backends.md](../docs/backends.md) says when each wins.",
            "",
            "## Schemes",
            "",
            "Devices on which a scheme, or some of its variants, runs;",
            "in brackets those on which it is emulated.",
            "",
            document.accepts(),
            "",
            "## What else a call may ask for",
            "",
            document.features(),
            "",
            "## Measured tiers of `auto`",
            "",
            document.tiers(),
            "",
        ]
    )


@functools.cache
def _backends_doc() -> ModuleType:
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:  # it imports its neighbours
        sys.path.append(folder)
    return importlib.import_module("backends_doc")
