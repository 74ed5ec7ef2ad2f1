"""Kernels are launched by named arguments: no positional ones, no specialization key written by
hand, no kernel named by a string or listed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "moe_ops"
LAUNCH = Path("kernels/launch.py")
FOLDERS = ("kernels", "backends")  # where kernels are defined and launched
MOST_FIELDS = 15  # of a kernel's arguments


def sources(root: Path) -> dict[Path, ast.Module]:
    """The files that define or launch kernels, by their paths below the package."""
    return {
        path.relative_to(root): ast.parse(path.read_text())
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
    }


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
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and "arguments" in decorators(node):
                yield path, node


def kernels(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, ast.FunctionDef]]:
    """Functions that are launched: what profilers show begins with the package's name."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
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
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in names:
                say(path, node, f"names the kernel {node.value} by a string")
            if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)):
                held = node.values if isinstance(node, ast.Dict) else node.elts
                if len([one for one in held if one is not None and name_of(one) in names]) > 1:
                    say(path, node, "lists kernels")
            if name_of(node) in ("_compiled", "_specialization"):
                say(path, node, "touches the kernels that launch.py keeps")
            if not isinstance(node, ast.Call):
                continue
            called = name_of(node.func)
            origin = imported.get(called, (path, called))
            if called == "pointers":
                say(path, node, "writes a key of pointers")
            if isinstance(node.func, ast.Subscript):
                say(path, node, "starts a kernel itself")
            if origin in classes and (node.args or any(k.arg is None for k in node.keywords)):
                say(path, node, f"fills {called} without its fields' names")
            if called == "Launch":
                values = [*node.args, *(k.value for k in node.keywords)]
                if any(isinstance(v, ast.Constant) and isinstance(v.value, str) for v in values):
                    say(path, node, "launches a kernel by a string")
                third = node.args[2] if len(node.args) > 2 else None
                third = next((k.value for k in node.keywords if k.arg == "args"), third)
                if isinstance(third, (ast.Tuple, ast.BinOp)):
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
    assert LAUNCH in trees


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
