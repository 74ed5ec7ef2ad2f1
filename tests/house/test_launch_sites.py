"""Kernels are launched by named arguments: no positional ones, no specialization key written by
hand, no kernel named by a string or listed.

What `Launch` takes is a call of an arguments class by keywords, or a name that only such calls are
assigned to in its function.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import moe_ops

PACKAGE = Path(moe_ops.__file__).resolve().parent
LAUNCH = Path("kernels/launch.py")
LAUNCH_CLASS = (LAUNCH, "Launch")
# Functions that read addresses; elsewhere, what depends on an address is a key written by hand.
ADDRESSES = {
    ("planning/training.py", "why_not_kernels"): "PyTorch's product needs 16 bytes",
    ("autograd/grouped_fused.py", "multiplied"): "products need 16 bytes",
    ("backends/cutlass/grouped.py", "Grouped.__init__"): "passes them to a C function",
    ("backends/cutlass/grouped.py", "Grouped.run"): "passes them to a C function",
    ("backends/cutlass/library.py", "aligned"): "TMA needs 16 bytes",
    ("backends/cutlass/products.py", "_address"): "passes it to a C function",
    ("backends/cutlass/products.py", "_product"): "passes them to a C function",
    ("backends/torch/cpu.py", "grouped_mm"): "passes them to a C function",
    ("backends/torch/cpu.py", "combine"): "passes them to a C function",
    ("backends/torch/layer.py", "run"): "passes them to a C function",
    ("backends/torch/layer.py", "shortcut.launch"): "passes that of the output to a C function",
    ("backends/torch/layer.py", "_launch"): "passes that of scratch memory to a C function",
    ("backends/torch/grouped_mm.py", "_native"): "PyTorch's product needs 16 bytes",
    ("backends/triton/mixed.py", "runs_packed"): "TMA needs 16 bytes",
    ("integrations/checkpoints/reading.py", "empty"): "passes it to a C function",
    ("integrations/checkpoints/stacks.py", "_address"): "finds what lies at its place",
    ("integrations/checkpoints/stacks.py", "kept"): "finds what a conversion left there",
    ("integrations/transformers/quantizer.py", "flatten_natural"): "finds weights that are shared",
    ("kernels/comm/mailbox.py", "Mailbox.of"): "peers' memory is reached from this rank's",
    ("kernels/comm/push.py", "whole_words"): "two 16-bit floats are loaded as one word",
    ("kernels/gemm/gemv.py", "why_not"): "says why it cannot run",
    ("kernels/gemm/sm90_tma.py", "_describable"): "TMA needs 16 bytes",
    ("kernels/mixed_gemm/gemv.py", "why_not"): "says why it cannot run",
    ("kernels/mixed_gemm/gemv.py", "why_not_one"): "says why it cannot run",
    ("kernels/mixed_gemm/operands.py", "MixedOperand.scales_in_place"): "why_not asks for it",
    ("kernels/mixed_gemm/sm90_mma.py", "why_not"): "says why it cannot run",
    ("kernels/mixed_gemm/sm90_mma.py", "_scales"): "scales are read in pairs where they can be",
    ("kernels/mixed_gemm/sm90_wgmma.py", "why_not"): "says why it cannot run",
    ("kernels/mixed_gemm/sm90_packed.py", "low_rank_boxes"): "says whether TMA reads them",
    ("kernels/mixed_gemm/sm90_packed.py", "multiply"): "says whether TMA reads the rows",
    ("kernels/mixed_gemm/sm90_packed.py", "why_not"): "says whether TMA reads the weight",
    ("kernels/mixed_gemm/sm90_registers.py", "multiply"): "says whether TMA reads the rows",
    ("kernels/mixed_gemm/sm90_wgmma.py", "_operand"): "scales are read in pairs where they can be",
    ("ops/memory.py", "addressable"): "says what may reach a raw pointer",
    ("ops/memory.py", "materialized"): "makes what may reach a raw pointer",
    ("ops/memory.py", "refuse_lost"): "refuses what has none",
    ("parallel/mailboxes.py", "_symmetric"): "asks where torch's mapping begins",
    ("planning/bind.py", ""): "asks for those of each call's tensors",
    ("residency/host.py", "HostMemory.__init__"): "passes it to the CUDA runtime",
    ("warmup.py", "_tensor_facts"): "which layers share their kernels",
}
MOST_FIELDS = 15  # of a kernel's arguments


def sources(root: Path) -> dict[Path, ast.Module]:
    """The files of the package, by their paths below it."""
    return {
        path.relative_to(root): ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))
    }


@cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def functions(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(dotted name, node) of every node's innermost function, and the node."""
    left = [("", tree)]
    while left:
        scope, parent = left.pop()
        for node in ast.iter_child_nodes(parent):
            yield scope, node
            named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            left.append((f"{scope}.{node.name}".lstrip(".") if named else scope, node))


def innermost_functions(parts: list[ast.AST]) -> dict[ast.AST, ast.AST]:
    """The innermost function of each node: later ones are within earlier ones."""
    return {
        part: function
        for function in parts
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for part in ast.walk(function)
    }


def bindings(function: ast.AST, name: str) -> Iterator[ast.AST | None]:
    """What a name is assigned to in a function; None for what is no plain assignment."""
    plain: set[ast.AST] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    plain.add(target)
                    yield node.value
        elif isinstance(node, ast.AnnAssign) and name_of(node.target) == name:
            plain.add(node.target)
            yield node.value
    for node in ast.walk(function):
        stored = isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        if stored and node.id == name and node not in plain:  # type: ignore[attr-defined]
            yield None
        if isinstance(node, ast.arg) and node.arg == name:
            yield None


def name_of(node: ast.AST) -> str:
    """The last part of a dotted name, "" of anything else."""
    return getattr(node, "id", getattr(node, "attr", ""))


def file_of(module: str) -> Path:
    """The file of a module of the package, below the package."""
    return Path("/".join(module.split(".")[1:]) + ".py")


def decorators(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    return {name_of(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}


def classes_of_arguments(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, ast.ClassDef]]:
    for path, tree in trees.items():
        for node in nodes_of(tree):
            if isinstance(node, ast.ClassDef) and "arguments" in decorators(node):
                yield path, node


def kernels(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, ast.FunctionDef]]:
    """Functions that are launched: what profilers show begins with the package's name."""
    for path, tree in trees.items():
        for node in nodes_of(tree):
            if isinstance(node, ast.FunctionDef) and (
                "kernel" in decorators(node)
                or node.name.startswith("moe_ops_")
                and decorators(node)
            ):
                yield path, node


def violations(root: Path) -> list[str]:
    """Where kernels are launched otherwise than by named arguments."""
    trees = sources(root)
    names = {node.name for _, node in kernels(trees)}
    classes = {(path, node.name) for path, node in classes_of_arguments(trees)}
    found = []

    def say(path: Path, node: ast.AST, text: str) -> None:
        found.append(f"{path}:{getattr(node, 'lineno', 0)}: {text}")

    for path, node in kernels(trees):
        if "kernel" not in decorators(node):
            say(path, node, f"{node.name} must be decorated with `kernel`")
    for path, node in classes_of_arguments(trees):
        fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        if len(fields) > MOST_FIELDS:
            say(path, node, f"{node.name} has {len(fields)} fields, more than {MOST_FIELDS}")
    for path, tree in trees.items():
        if path == LAUNCH:
            continue
        imported = {
            alias.asname or alias.name: (file_of(node.module), alias.name)
            for node in nodes_of(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }

        def origin_of(node: ast.AST, path: Path = path, imported: dict = imported) -> tuple:
            """(file, name) of what is defined in the package."""
            if isinstance(node, ast.Attribute):
                file, module = imported.get(name_of(node.value), (Path(), ""))
                return file.parent / file.stem / f"{module}.py", node.attr
            return imported.get(name_of(node), (path, name_of(node)))

        def filled(node: ast.AST | None, origin_of: Callable = origin_of) -> bool:
            """Whether it is a call of an arguments class by its fields' names."""
            if not (isinstance(node, ast.Call) and origin_of(node.func) in classes):
                return False
            return not node.args and all(k.arg is not None for k in node.keywords)

        # where a class of arguments may stand: called, or as the argument of `kernel`
        called_or_declared = set()
        parts = nodes_of(tree)
        for node in parts:
            if isinstance(node, ast.Call):
                called_or_declared.add(node.func)
                if name_of(node.func) == "kernel":
                    called_or_declared |= set(node.args)
        inside: dict[ast.AST, ast.AST] = {}  # made where a launch is found
        for function, node in functions(tree):
            known = (path.as_posix(), function) in ADDRESSES
            if isinstance(node, ast.Attribute) and node.attr == "data_ptr" and not known:
                say(path, node, "reads an address")
        for node in parts:
            if isinstance(node, ast.Constant) and node.value in names:
                say(path, node, f"names the kernel {node.value} by a string")
            if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)):
                held = node.values if isinstance(node, ast.Dict) else node.elts
                if any(name_of(one) in names for one in held if one is not None):
                    say(path, node, "lists kernels")
            if name_of(node) in ("_compiled", "_specialization"):
                say(path, node, "touches the kernels that launch.py keeps")
            read = isinstance(getattr(node, "ctx", None), ast.Load)
            if read and node not in called_or_declared and origin_of(node) in classes:
                say(path, node, f"gives {name_of(node)} another name")
            assigned = isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr))
            if assigned and origin_of(getattr(node, "value", None) or node) == LAUNCH_CLASS:
                say(path, node, "gives Launch another name")
            if not isinstance(node, ast.Call):
                continue
            called, origin = name_of(node.func), origin_of(node.func)
            values = [*node.args, *(k.value for k in node.keywords)]
            if called == "pointers":
                say(path, node, "writes a key of pointers")
            if called == "dict" and any(name_of(value) in names for value in values):
                say(path, node, "lists kernels")
            if called == "_replace" and any(k.arg == "args" for k in node.keywords):
                say(path, node, "replaces kernel arguments")
            of_kernels = path.parts[0] in ("kernels", "backends")  # others call what they look up
            subscript = node.func if isinstance(node.func, ast.Subscript) else None
            begun = "" if subscript is None else name_of(subscript.value)
            if subscript is not None and (of_kernels or begun in names | {"function"}):
                say(path, node, "starts a kernel itself")
            if origin in classes and not filled(node):
                say(path, node, f"fills {called} without its fields' names")
            made = getattr(node.func, "value", node)
            if called == "_make" and origin_of(made) == LAUNCH_CLASS:
                say(path, node, "passes positional kernel arguments")
            if called == "Launch" or origin == LAUNCH_CLASS:
                if any(isinstance(v, ast.Constant) and isinstance(v.value, str) for v in values):
                    say(path, node, "launches a kernel by a string")
                third = node.args[2] if len(node.args) > 2 else None
                third = next((k.value for k in node.keywords if k.arg == "args"), third)
                if isinstance(third, ast.Name):
                    inside = inside or innermost_functions(parts)
                    found_there = list(bindings(inside.get(node, tree), third.id))
                    named = bool(found_there) and all(filled(value) for value in found_there)
                else:
                    named = filled(third)
                if not named or any(isinstance(value, ast.Starred) for value in node.args):
                    say(path, node, "passes positional kernel arguments")
            if origin == (LAUNCH, "run") and not (len(node.args) == 3 and not node.keywords):
                say(path, node, "passes `run` more than launches, device and GPU")
    return found


def test_kernels_are_launched_by_named_arguments():
    assert violations(PACKAGE) == []


def test_there_are_kernels_to_look_at():
    trees = sources(PACKAGE)
    files = {path for path, _ in kernels(trees)}
    assert len(files) > 8 and len(list(classes_of_arguments(trees))) > 15
    assert LAUNCH in trees and len(trees) > 50


def test_functions_that_read_addresses_are_there():
    found = {
        (path.as_posix(), function)
        for path, tree in sources(PACKAGE).items()
        for function, node in functions(tree)
        if isinstance(node, ast.Attribute) and node.attr == "data_ptr" and path != LAUNCH
    }
    assert found == set(ADDRESSES)


GOOD = """
from moe_ops.kernels.launch import Launch, run


@arguments
class Gemm:
    y: Pointer
    K: Specialized


@kernel(Gemm)
def moe_ops_one(y_ptr, K):
    pass


@kernel(Gemm)
def moe_ops_two(y_ptr, K):
    pass


def gemm(y, gpu):
    run([Launch(moe_ops_one, (1, 1, 1), Gemm(y=y, K=1), 4)], 0, gpu)
"""


RUN = "    run([Launch(moe_ops_one, (1, 1, 1), Gemm(y=y, K=1), 4)]"
NAMED = "    run([Launch(moe_ops_one, (1, 1, 1), flat, 4)]"


@pytest.mark.parametrize(
    "before, after, message",
    [
        ("Gemm(y=y, K=1)", "Gemm(y, 1)", "fills Gemm without its fields' names"),
        ("Gemm(y=y, K=1)", "Gemm(**fields)", "fills Gemm without its fields' names"),
        ("Gemm(y=y, K=1)", "(y, 1)", "passes positional kernel arguments"),
        ("Gemm(y=y, K=1)", "args + (1,)", "passes positional kernel arguments"),
        ("Launch(moe_ops_one", 'Launch("one"', "launches a kernel by a string"),
        ("Launch(moe_ops_one", 'Launch(by["moe_ops_one"]', "names the kernel moe_ops_one"),
        (
            "    run(",
            "    moe_ops_one.function[1, 1, 1](y, 1)\n    run(",
            "starts a kernel itself",
        ),
        ("0, gpu)", "0, gpu, key)", "passes `run` more than launches, device and GPU"),
        ("def gemm", "KERNELS = {1: moe_ops_one, 2: moe_ops_two}\n\n\ndef gemm", "lists kernels"),
        ("def gemm", "ALL = [moe_ops_one, moe_ops_two]\n\n\ndef gemm", "lists kernels"),
        ("    run(", "    key = pointers(y)\n    run(", "writes a key of pointers"),
        (
            "    run(",
            "    launch._compiled[y] = 1\n    run(",
            "touches the kernels",
        ),
        ("@kernel(Gemm)\ndef moe_ops_two", "@triton.jit\ndef moe_ops_two", "must be decorated"),
        ("Gemm(y=y, K=1)", "tuple([y, 1])", "passes positional kernel arguments"),
        ("Gemm(y=y, K=1), 4", "args=(y, 1)", "passes positional kernel arguments"),
        ("Gemm(y=y, K=1), 4", "args=tuple([y, 1])", "passes positional kernel arguments"),
        ("Gemm(y=y, K=1)", "flat", "passes positional kernel arguments"),
        ("Gemm(y=y, K=1)", "y", "passes positional kernel arguments"),
        ("Gemm(y=y, K=1), 4", "*rest", "passes positional kernel arguments"),
        (RUN, f"    flat = (y, 1)\n{NAMED}", "passes positional kernel arguments"),
        (RUN, f"    flat = Gemm(y=y, K=1)\n    flat += (1,)\n{NAMED}", "passes positional"),
        (RUN, f"    flat = Gemm(y=y, K=1)\n    flat, _ = y\n{NAMED}", "passes positional"),
        (RUN, f"    G = Gemm\n    flat = G(y, 1)\n{NAMED}", "gives Gemm another name"),
        (RUN, f"    G = Gemm\n    flat = G(y, 1)\n{NAMED}", "passes positional"),
        ("    run(", "    L = Launch\n    run(", "gives Launch another name"),
        ("Launch(moe", "Launch._make(moe", "passes positional kernel arguments"),
        ("Launch, run", "Launch as Start, run\n\nStart(1, 2, (3,))", "passes positional"),
        ("    run(", "    one = one._replace(args=(y, 1))\n    run(", "replaces kernel arguments"),
        ("def gemm", "KERNELS = dict(one=moe_ops_one)\n\n\ndef gemm", "lists kernels"),
        ("def gemm", "KERNELS = dict([(1, moe_ops_one)])\n\n\ndef gemm", "lists kernels"),
        ("    run(", "    key = y.data_ptr() % 16\n    run(", "reads an address"),
        ("    run(", "    a = y.data_ptr()\n    key = a & 15\n    run(", "reads an address"),
        ("    K: Specialized\n", "".join(f"    K{i}: Constant\n" for i in range(15)), "16 fields"),
    ],
)
def test_each_of_them_is_found(tmp_path, before, after, message):
    """The test of the test."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    file = folder / "gemm.py"
    file.write_text(GOOD)
    assert violations(tmp_path) == []
    assert before in GOOD
    file.write_text(GOOD.replace(before, after, 1))
    assert any(message in text for text in violations(tmp_path)), violations(tmp_path)


def test_other_files_are_looked_at(tmp_path):
    """In every folder, also where a class of arguments is another file's."""
    for folder in ("kernels", "nn"):
        (tmp_path / folder).mkdir()
    (tmp_path / "kernels" / "gemm.py").write_text(GOOD)
    other = tmp_path / "nn" / "layer.py"
    imports = "from moe_ops.kernels.launch import Launch\nfrom moe_ops.kernels import gemm\n"
    launch = "\nflat = {0}\none = Launch(gemm.moe_ops_one, (1, 1, 1), flat)\n"
    other.write_text(imports + launch.format("gemm.Gemm(y=1, K=1)"))
    assert violations(tmp_path) == []
    other.write_text(imports + launch.format("gemm.Gemm(1, 1)"))
    assert any("fills Gemm without" in text for text in violations(tmp_path))
    other.write_text(imports + launch.format("(1, 1)"))
    assert any("passes positional" in text for text in violations(tmp_path))
