"""Which way imports run: a file imports from lower floors or from its own package, never sideways
or up.

Imports inside functions and under TYPE_CHECKING count, and so do strings that name a module
("moe_ops.x.y:z"), f-strings and sums of strings that begin with one, and annotations in strings.
Docstrings and the texts of errors do not. Modules are imported by names that are not written out
in two places, LAZY_IMPORTS, and found in sys.modules in one, BY_PUBLIC_NAME.
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

import moe_ops

PACKAGE = Path(moe_ops.__file__).resolve().parent

# from the bottom up
FLOORS = (
    "checks",
    "environment meta activations batch_invariance tables pickling csrc",
    "schemes",
    "numerics ops",
    "kernels tensors",
    # `backend`: the names that backends are written with, our own and those of others
    "choose backend pipeline",
    "backends",
    "planning routing",
    "autograd parallel",
    "experts grouped",
    "residency",
    "nn bundle",
    "warmup selfcheck",
    "info tuning integrations",
    "bench serve",  # of the folders that integrations read, of a server over them
    # the face, moe_ops/__init__.py; on top, because it has the integrations wait for the libraries
    # that they integrate with
    "moe_ops",
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}

# inside of kernels: a folder, or a file beside them, imports from those before it
KERNELS = (
    "launch device",
    "configs activation",
    "comm",
    "residency",
    "place",
    "rows",
    "gemm",
    "mixed_gemm",
    "router",
)
ROUTER_USES = ("launch", "device", "router")
# inside of one backend
BACKEND = (
    "binding",
    "relayout library schemes cpu",
    "operands setup inputs grouped_mm products",
    "grouped",
    "layer plain mixed",
    "two_schemes",
    "backend",
)

LAZY_IMPORTS = {  # (file, function) that imports a module whose name is not written there
    ("kernels/launch.py", "Lazy.resolve"),  # what makes a Lazy names its module in a string
    ("__init__.py", "__getattr__"),  # the face: its _LAZY names modules in strings
    ("backend.py", "__getattr__"),  # and its _WITH_TRITON
}
# rooms whose calls run on backends that are planned: they may ask for names of backends alone
UNAWARE_OF_BACKENDS = ("autograd", "nn")
BY_PUBLIC_NAME = {
    # pickled weights name their class, and files outlive modules: found by public names
    ("pickling.py", "rebuild_expert_tensor"),
    ("environment.py", "_call_awaited"),  # whether modules of other libraries are imported by now
}

# all of a string, or its beginning where more follows
LAZY = re.compile(r"(moe_ops(?:\.\w+)*)(?:\.|\.?:[\w.]*)?")
IN_ANNOTATION = re.compile(r"\bmoe_ops(?:\.\w+)+")
IMPORTERS = ("import_module", "__import__")


def name_of(node: ast.AST | None) -> str:
    """The last part of a dotted name, "" of anything else."""
    return getattr(node, "id", getattr(node, "attr", ""))


class Names(ast.NodeVisitor):
    """What a source imports or names: (line, dotted name), "." of a relative import; and where it
    imports what it does not name: (line, function, what it does).
    """

    def __init__(self) -> None:
        self.names: list[tuple[int, str]] = []
        self.unnamed: list[tuple[int, str, str]] = []
        self.scope: list[str] = []
        self.importers = set(IMPORTERS)
        self.modules = {"sys.modules"}

    def say(self, node: ast.AST, what: str) -> None:
        self.unnamed.append((getattr(node, "lineno", 0), ".".join(self.scope), what))

    def text(self, node: ast.AST, text: str) -> None:
        """A string, or the beginning of one."""
        found = LAZY.fullmatch(text)
        if found and text.startswith("moe_ops."):
            self.names.append((getattr(node, "lineno", 0), found[1]))

    def visit_Import(self, node: ast.Import) -> None:
        self.names += [(node.lineno, alias.name) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level:
            self.names.append((node.lineno, "."))
            return
        self.names += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        for alias in node.names:
            if alias.name in IMPORTERS:
                self.importers.add(alias.asname or alias.name)
            if (node.module, alias.name) == ("sys", "modules"):
                self.modules.add(alias.asname or alias.name)

    def visit_scope(self, node: ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) -> None:
        self.annotation(getattr(node, "returns", None))
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_scope

    def annotation(self, node: ast.AST | None) -> None:
        """Names in the strings of an annotation that are more than one name."""
        for part in ast.walk(node) if node is not None else ():
            text = part.value if isinstance(part, ast.Constant) else None
            if isinstance(text, str) and not LAZY.fullmatch(text):  # else `text` finds it
                found = IN_ANNOTATION.findall(text)
                self.names += [(getattr(part, "lineno", 0), name) for name in found]

    def visit_arg(self, node: ast.arg) -> None:
        self.annotation(node.annotation)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.annotation(node.annotation)
        if name_of(node.annotation) == "TypeAlias":
            self.annotation(node.value)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Errors mention modules; but what they call counts."""
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and self.imports_one(part):
                self.visit(part)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.text(node, node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        first, *others = node.values
        if isinstance(first, ast.Constant):
            self.text(node, first.value)
        else:
            self.visit(first)
        for part in others:
            if not isinstance(part, ast.Constant):
                self.visit(part)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        terms: list[ast.expr] = [node]
        while isinstance(terms[0], ast.BinOp) and isinstance(terms[0].op, ast.Add):
            terms[:1] = [terms[0].left, terms[0].right]
        begin, rest = "", list(terms)
        while rest and isinstance(rest[0], ast.Constant) and isinstance(rest[0].value, str):
            begin += rest.pop(0).value  # type: ignore[attr-defined]
        left = node.left.value if isinstance(node.left, ast.Constant) else None
        if isinstance(node.op, ast.Mod) and isinstance(left, str):
            self.text(node, left.partition("%")[0])
            rest = [node.right]
        elif len(terms) > 1 and begin:
            self.text(node, begin)
        else:
            self.generic_visit(node)
            return
        for part in rest:
            self.visit(part)

    def imports_one(self, node: ast.Call) -> bool:
        return name_of(node.func) in self.importers

    def visit_Call(self, node: ast.Call) -> None:
        function, first = node.func, node.args[0] if node.args else None
        if name_of(function) == "cast":
            self.annotation(first)
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Constant):
            begin = function.value.value
            if function.attr == "format" and isinstance(begin, str):
                self.text(node, begin.partition("{")[0])
            parts = getattr(first, "elts", [])
            if (function.attr, begin) == ("join", ".") and parts:
                constants = [getattr(part, "value", "") for part in parts]
                if constants[0] == "moe_ops":
                    known = next((i for i, c in enumerate(constants) if not c), len(constants))
                    self.text(node, ".".join(map(str, constants[:known])) + ".")
        if not self.imports_one(node):
            self.generic_visit(node)
            return
        named = next((k.value for k in node.keywords if k.arg == "name"), first)
        name = named.value if isinstance(named, ast.Constant) else None
        if not isinstance(name, str):
            self.say(node, "imports a module that it does not name")
        elif name.startswith(".") or len(node.args) > 1 or len(node.keywords) > (first is None):
            self.names.append((node.lineno, "."))
        elif name == "moe_ops":
            self.names.append((node.lineno, name))
        for part in (*node.args, *node.keywords):
            self.visit(part)

    def visit_Compare(self, node: ast.Compare) -> None:
        """`name in sys.modules` asks whether it was imported, and imports nothing."""
        self.visit(node.left)
        for operator, part in zip(node.ops, node.comparators, strict=True):
            if not (isinstance(operator, (ast.In, ast.NotIn)) and self.is_modules(part)):
                self.visit(part)

    def is_modules(self, node: ast.AST) -> bool:
        return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in self.modules

    def visit_reference(self, node: ast.Name | ast.Attribute) -> None:
        if self.is_modules(node):
            self.say(node, "finds modules in sys.modules")
        if name_of(node) in self.importers:  # not called, or `imports_one` has seen it
            self.say(node, "imports a module that it does not name")
        self.generic_visit(node)

    visit_Name = visit_Attribute = visit_reference


@functools.cache
def names_of(text: str) -> Names:
    """What a source imports or names."""
    found = Names()
    found.visit(ast.parse(text))
    return found


class Package:
    """The files of a package and what they import."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = {self.module_of(path): path for path in sorted(folder.rglob("*.py"))}
        self.named, self.unnamed = {}, {}
        for module, path in self.files.items():
            found = names_of(path.read_text())
            self.named[module], self.unnamed[module] = found.names, found.unnamed

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
        for line, function, what in package.unnamed[module]:
            allowed = BY_PUBLIC_NAME if "sys.modules" in what else LAZY_IMPORTS
            if (package.where(module), function) not in allowed:
                found.append(f"{package.where(module)}:{line} {what}")
        for line, other in package.imports(module):
            reason = _why_wrong(module, other)
            if other != module and reason:
                found.append(f"{package.where(module)}:{line} imports {other}: {reason}")
    return found


def _why_wrong(module: str, other: str) -> str:
    room, others_room = room_of(module), room_of(other)
    if others_room not in FLOOR_OF:
        return "it has no floor"
    if room in UNAWARE_OF_BACKENDS and other.startswith("moe_ops.backends."):
        return "who multiplies is planned"
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


def test_there_are_files_to_look_at():
    package = Package(PACKAGE)
    assert len(package.files) > 50
    found = {
        (package.where(module), function)
        for module in package.files
        for _, function, _ in package.unnamed[module]
    }
    assert found == LAZY_IMPORTS | BY_PUBLIC_NAME


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
    ("\n\n_LAZY = 'moe_ops.planning.plan:Plan.op'\n", "imports moe_ops.planning.plan: upward"),
    ("\n\n_LAZY = f'moe_ops.planning.{Any}'\n", "imports moe_ops.planning: upward"),
    ("\n\n_LAZY = f'moe_ops.planning.plan:{Any}'\n", "imports moe_ops.planning.plan: upward"),
    ("\n\n_LAZY = f'moe_ops.{Any}.plan'\n", "imports moe_ops: upward"),
    ("\n\n_LAZY = 'moe_ops.planning.' + str(Any)\n", "imports moe_ops.planning: upward"),
    ("\n\n_LAZY = 'moe_ops' + '.planning' + '.plan'\n", "imports moe_ops.planning.plan: upward"),
    ("\n\n_LAZY = 'moe_ops.planning.%s' % Any\n", "imports moe_ops.planning: upward"),
    ("\n\n_LAZY = 'moe_ops.planning.{}'.format(Any)\n", "imports moe_ops.planning: upward"),
    ("\n\n_LAZY = '.'.join(['moe_ops', 'planning', Any])\n", "moe_ops.planning: upward"),
    ("\n\ndef f(x: 'moe_ops.planning.plan.Plan | None'): ...\n", "moe_ops.planning.plan: upward"),
    ("\n\ndef f() -> 'list[moe_ops.planning.plan.Plan]': ...\n", "planning.plan: upward"),
    ("\n\n_PLAN: 'moe_ops.planning.plan.Plan | None' = None\n", "moe_ops.planning.plan: upward"),
    ("\n\n_P = cast('moe_ops.planning.plan.Plan | None', 1)\n", "moe_ops.planning.plan: upward"),
    ("\n\nimportlib.import_module('moe_ops.planning')\n", "imports moe_ops.planning: upward"),
    ("\n\nimportlib.import_module('moe_ops')\n", "imports moe_ops: upward"),
    ("\n\nimportlib.import_module(Any)\n", "does not name"),
    ("\n\n_X = __import__(Any)\n", "does not name"),
    ("\n\n_LOAD = importlib.import_module\n", "does not name"),
    ("\n\nimportlib.import_module('.plan', Any)\n", "relatively"),
    ("\n\nimportlib.import_module('.plan', package='moe_ops.meta')\n", "relatively"),
    ("\n\n_PLANS = sys.modules['plans']\n", "sys.modules"),
    ("\n\n_PLANS = sys.modules.get('plans')\n", "sys.modules"),
])  # fmt: skip
def test_what_runs_up_is_found(copy, text, reason):
    append(copy / "ops" / "library.py", text)
    (found,) = wrong_way(Package(copy))
    assert found.startswith("ops/library.py:")
    assert reason in found


@pytest.mark.parametrize("file", ["autograd/fused.py", "nn/layer.py"])
@pytest.mark.parametrize("text", [
    "from moe_ops.backends.cutlass import products",
    "def late():\n    import moe_ops.backends.torch.grouped_mm",
    "_LAZY = 'moe_ops.backends.triton.mixed:experts'",
])  # fmt: skip
def test_rooms_that_name_a_backend_are_found(copy, file, text):
    append(copy / file, f"\n\n{text}\n")
    (found,) = wrong_way(Package(copy))
    assert found.startswith(file) and "who multiplies is planned" in found


@pytest.mark.parametrize("text", [
    "from importlib import import_module as load\n\nload(Any)",
    "from sys import modules\n\nmodules['plans']",
])  # fmt: skip
def test_other_names_for_importing_are_found(copy, text):
    append(copy / "ops" / "library.py", f"\n\n{text}\n")
    assert len(wrong_way(Package(copy))) == 1


@pytest.mark.parametrize("text", [
    "def f():\n    'moe_ops.planning.plan'\n",
    "def f():\n    'See moe_ops.planning.plan.'\n",
    "def f(x):\n    raise ValueError('moe_ops.planning.plan')\n",
    "def f(x):\n    raise ValueError(f'moe_ops.warmup must be called before {x}')\n",
    "TEXT = 'moe_ops.prepare must be called'\n",
    "def f(x):\n    return f'moe_ops.prepare(w13, {x})'\n",
    "def f(x):\n    return f'moe_ops::{x}'\n",
    "def f(x):\n    return x in sys.modules\n",
    "def f():\n    return importlib.import_module('deep_gemm')\n",
])  # fmt: skip
def test_what_mentions_a_module_is_no_import(copy, text):
    append(copy / "ops" / "library.py", f"\n\n{text}")
    assert wrong_way(Package(copy)) == []


def test_importing_by_variables_is_for_the_named_functions_alone(copy):
    append(copy / "kernels" / "launch.py", "\n\ndef load(x):\n    return __import__(x)\n")
    append(copy / "pickling.py", "\n\ndef find(x):\n    return sys.modules[x]\n")
    assert len(wrong_way(Package(copy))) == 2


@pytest.mark.parametrize("name, text, reason", [
    ("backends/torch/cpu.py", "from moe_ops.backends.torch import backend", "upward in its"),
    ("backends/torch/cpu.py", "from moe_ops.backends.triton import relayout", "do not know"),
    ("kernels/router/topk.py", "from moe_ops.kernels.gemm import operands", "router uses"),
    ("kernels/place/sort.py", "from moe_ops.kernels.gemm import operands", "upward in its"),
    ("kernels/other.py", "from moe_ops.kernels.gemm import operands", "no place"),
])  # fmt: skip
def test_orders_inside_of_kernels_and_backends(copy, name, text, reason):
    for folder in ("gemm", "place"):
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
