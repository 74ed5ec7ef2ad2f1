"""Which way imports run: a file imports from lower floors or from its own package, never sideways
or up.

Imports inside functions and under TYPE_CHECKING count, and so do strings that name a module
("moe_ops.x.y:z").
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "moe_ops"

# from the bottom up
FLOORS = (
    "environment checks meta activations tables pickling",
    "schemes",
    "numerics ops",
    "kernels tensors",
    "backends",
    "planning routing",
    "autograd parallel",
    "experts",
    "nn",
    "warmup",
    # the face, moe_ops/__init__.py, and paths beside it that saved files hold
    "moe_ops layer layer_parts config",
    "info tuning integrations",
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}

# inside of kernels: a folder, or a file beside them, imports from those before it
KERNELS = (
    "launch device",
    "configs",
    "permute",
    "quantize",
    "gemm",
    "mixed_gemm",
    "router",
)
ROUTER_USES = ("launch", "device", "router")
# inside of one backend
BACKEND = (
    "relayout library schemes cpu",
    "rows permute inputs grouped_mm",
    "layer plain mixed",
    "backend",
)

LAZY = re.compile(r"moe_ops(\.\w+)+(:\w+)?")


@functools.cache
def named(text: str) -> tuple[tuple[int, str], ...]:
    """(line, dotted name) of everything that a source imports or names; "." of a relative
    import."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = (
                ["."] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value.partition(":")[0]] if LAZY.fullmatch(node.value) else []
        found += [(node.lineno, name) for name in names]
    return tuple(found)


class Package:
    """The files of a package and what they import."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = {self.module_of(path): path for path in sorted(folder.rglob("*.py"))}
        self.named = {module: named(path.read_text()) for module, path in self.files.items()}

    def module_of(self, path: Path) -> str:
        parts = path.relative_to(self.folder.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def where(self, module: str) -> str:
        return self.files[module].relative_to(self.folder).as_posix()

    def resolve(self, name: str) -> str:
        """The longest module that there is of a dotted name."""
        parts = name.split(".")
        while ".".join(parts) not in self.files:
            parts.pop()
        return ".".join(parts)

    def imports(self, module: str) -> Iterator[tuple[int, str]]:
        """(line, module) of everything of the package that a file names."""
        for line, name in self.named[module]:
            if name.partition(".")[0] == "moe_ops":
                yield line, self.resolve(name)


def room_of(module: str) -> str:
    """The package, or the file, directly below moe_ops that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def rank_in(order: tuple[str, ...], name: str) -> int:
    return next((rank for rank, names in enumerate(order) if name in names.split()), -1)


def wrong_way(package: Package) -> list[str]:
    """Imports that run up or sideways, relative ones, and rooms without a floor."""
    found = []
    for module in package.files:
        if room_of(module) not in FLOOR_OF:
            found.append(f"{package.where(module)}: {room_of(module)} has no floor")
            continue
        for line, name in package.named[module]:
            if name == ".":
                found.append(f"{package.where(module)}:{line} imports relatively")
        for line, other in package.imports(module):
            reason = _why_wrong(module, other)
            if other != module and reason:
                found.append(f"{package.where(module)}:{line} imports {other}: {reason}")
    return found


def _why_wrong(module: str, other: str) -> str:
    room, others_room = room_of(module), room_of(other)
    if others_room not in FLOOR_OF:
        return "it has no floor"
    if room != others_room:
        floor, others_floor = FLOOR_OF[room], FLOOR_OF[others_room]
        return "" if others_floor < floor else "sideways" if others_floor == floor else "upward"
    mine, its = module.split(".")[2:], other.split(".")[2:]
    if not mine or not its:
        return ""
    if room == "kernels":
        if mine[0] == its[0]:
            return ""
        if mine[0] == "router":
            return "" if its[0] in ROUTER_USES else "router uses launch and device alone"
        return _order(KERNELS, mine[0], its[0])
    if room == "backends":
        if mine[0] != its[0]:
            return "backends do not know of one another"
        if len(mine) > 1 and len(its) > 1 and mine[1] != its[1]:
            return _order(BACKEND, mine[1], its[1])
    return ""


def _order(order: tuple[str, ...], name: str, other: str) -> str:
    """Why a file may not import another of its package, by the order of their names."""
    rank, others_rank = rank_in(order, name), rank_in(order, other)
    if rank < 0 or others_rank < 0:
        return f"{name if rank < 0 else other} has no place in the order"
    return "" if others_rank <= rank else "upward in its package"


def cycle(package: Package) -> list[str]:
    """Files that import each other in a circle; empty if there are none.

    A package's __init__ that only passes names on is a file like any other.
    """
    graph = {
        module: {other for _, other in package.imports(module) if other != module}
        for module in package.files
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_imports_run_down():
    assert wrong_way(Package(PACKAGE)) == []


def test_no_files_import_each_other():
    assert cycle(Package(PACKAGE)) == []


# --- the test of the test ------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package's sources, to break."""
    ignored = shutil.ignore_patterns("__pycache__", "*.json", "*.so")
    shutil.copytree(PACKAGE, tmp_path / "moe_ops", ignore=ignored)
    return tmp_path / "moe_ops"


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


@pytest.mark.parametrize("text, reason", [
    ("\n\ndef late():\n    from moe_ops.planning import plan\n\n    return plan\n", "upward"),
    ("\n\nif TYPE_CHECKING:\n    import moe_ops.experts\n", "upward"),
    ("\n\n_LAZY = 'moe_ops.planning.plan:plan'\n", "upward"),
    ("\n\n_LAZY = 'moe_ops.tensors.base'\n", "upward"),
    ("\n\nfrom moe_ops import fused_experts\n", "upward"),
    ("\n\nfrom moe_ops import numerics\n", "sideways"),
    ("\n\nfrom .problem import Problem\n", "relatively"),
])  # fmt: skip
def test_what_runs_up_is_found(copy, text, reason):
    append(copy / "ops" / "library.py", text)
    (found,) = wrong_way(Package(copy))
    assert found.startswith("ops/library.py:")
    assert reason in found


@pytest.mark.parametrize("name, text, reason", [
    ("backends/torch/cpu.py", "from moe_ops.backends.torch import backend", "upward in its"),
    ("backends/torch/cpu.py", "from moe_ops.backends.triton import relayout", "do not know"),
    ("kernels/router/topk.py", "from moe_ops.kernels.gemm import operands", "router uses"),
    ("kernels/permute/sort.py", "from moe_ops.kernels.gemm import operands", "upward in its"),
    ("kernels/other.py", "from moe_ops.kernels.gemm import operands", "no place"),
])  # fmt: skip
def test_orders_inside_of_kernels_and_backends(copy, name, text, reason):
    for folder in ("gemm", "permute"):
        (copy / "kernels" / folder).mkdir(exist_ok=True)
        (copy / "kernels" / folder / "__init__.py").touch()
    (copy / "kernels" / "gemm" / "operands.py").touch()
    path = copy / name
    path.touch()
    append(path, f"\n{text}\n")
    (found,) = wrong_way(Package(copy))
    assert found.startswith(f"{name}:")
    assert reason in found


def test_a_room_without_a_floor_is_found(copy):
    (copy / "shed.py").write_text("")
    assert wrong_way(Package(copy)) == ["shed.py: shed has no floor"]


def test_circles_are_found(copy):
    (copy / "nn" / "one.py").write_text("from moe_ops.nn import two\n")
    (copy / "nn" / "two.py").write_text("def late():\n    import moe_ops.nn.one\n")
    assert wrong_way(Package(copy)) == []  # they are of one package
    assert {"moe_ops.nn.one", "moe_ops.nn.two"} <= set(cycle(Package(copy)))
