"""Rules of DESIGN.md that sources are held to beside the stream of imports."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.house.test_imports import PACKAGE, package_files

# Names of several classes, and of how many. What a kernel's parameters are called by is one for
# each kernel file; the others are to become one class, or to get names of their own.
SEVERAL = {
    **{"Gemm1": 7, "Gemm2": 7, "GemvStrides": 2, "WgmmaTile": 2, "Pairs": 3, "Matrix": 3},
    **{"Format": 2, "Scales": 2, "Weight": 3, "Experts": 3, "Form": 2, "Gate": 2, "Gemm": 2},
    **{"Choice": 2, "Kind": 2, "Layer": 2, "LowRank": 2},
}
# What is done to rows around products, by a part of a kernel's name, and the kernels that do it
# for every backend. Those of kernels/comm and of FlashInfer's inputs, whose names begin otherwise,
# and moe_ops_push_scatter, which sends rows as well, are not among them.
OF_ROWS = {
    "scatter": ["moe_ops_scatter"],
    "activate": ["moe_ops_activate"],
    "quantize|round": ["moe_ops_quantize", "moe_ops_round"],
}
MOST_FIELDS = 12  # of a Backend


def classes(sources: Iterable[str]) -> Counter[str]:
    """How many classes of each name stand at the top of files."""
    trees = [ast.parse(source) for source in sources]
    return Counter(node.name for tree in trees for node in tree.body if _is_class(node))


def _is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef)


def doubled(sources: Iterable[str], known: dict[str, int]) -> list[str]:
    """Names of more classes than are known."""
    counts = classes(sources)
    return sorted(name for name, count in counts.items() if count > known.get(name, 1))


def kernels_of(sources: Iterable[str], words: str) -> list[str]:
    """The kernels whose name begins with one of these words behind moe_ops_ and a backend's."""
    pattern = rf"def (moe_ops_(?!push_)(?:[a-z0-9]+_)*?(?:{words})\w*)\("
    return sorted({name for source in sources for name in re.findall(pattern, source)})


def of_a_backend(source: str) -> bool:
    """Whether it imports a package below moe_ops.backends."""
    imported = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported.append(f"{node.module}")
    return any(name.startswith("moe_ops.backends.") for name in imported)


def test_a_class_has_a_name_of_its_own():
    assert not doubled((path.read_text() for path in package_files()), SEVERAL)


def test_two_classes_of_a_name_are_found():
    one, other = "class A:\n    class B: ...\n", "class B: ...\nclass C: ...\n"
    assert doubled([one, other], {}) == []
    assert doubled([one, other, "class B: ...\n"], {}) == ["B"]
    assert doubled([one, one, one], {"A": 2}) == ["A"]


@pytest.mark.parametrize("words", OF_ROWS)
def test_a_step_of_rows_is_one_kernel(words):
    assert kernels_of((path.read_text() for path in package_files()), words) == OF_ROWS[words]


def test_a_second_kernel_of_a_step_is_found():
    sources = ["def moe_ops_scatter(\n", "def moe_ops_other_scatter_blocks(\n"]
    found = ["moe_ops_other_scatter_blocks", "moe_ops_scatter"]
    assert kernels_of([*sources, "def moe_ops_push_scatter(\n"], "scatter") == found
    assert kernels_of(["def moe_ops_train_round_rows(x)"], "quantize|round") != []


def test_gradients_and_layers_import_no_backend():
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in package_files()
        if path.relative_to(PACKAGE).parts[0] in ("autograd", "nn")
        and of_a_backend(path.read_text())
    }
    assert not found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from moe_ops.backends import check_backend", False),
        ("import moe_ops.backends.torch.layer", True),
        ("def f():\n    from moe_ops.backends.cutlass import products", True),
    ],
)
def test_an_import_of_a_backend_is_found(source, found):
    assert of_a_backend(source) == found


CALLED = ("ops", "planning", "backends", "autograd")  # the rooms that a call goes through


def fields(source: str) -> dict[str, list[str]]:
    """The fields of each class of a source, by name."""
    return {
        node.name: [part.target.id for part in node.body if _is_field(part)]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }


def _is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def also_written(sources: dict[str, str], of: str) -> list[str]:
    """Where a field of one class is written in the body of another one."""
    found = {name: fields(source) for name, source in sources.items()}
    (options,) = (classes[of] for classes in found.values() if of in classes)
    return [
        f"{name}: {other}.{field}"
        for name, classes in found.items()
        for other, names in classes.items()
        for field in names
        if other != of and field in options
    ]


def test_a_flag_of_a_call_is_written_in_one_class():
    rooms = [p for p in package_files() if p.relative_to(PACKAGE).parts[0] in CALLED]
    assert not also_written({str(path): path.read_text() for path in rooms}, "Options")


def test_a_flag_that_is_written_twice_is_found():
    one = "class Options:\n    a: int\n    b: int = 1\n    def f(self): ...\n"
    other = "class Problem:\n    c: int\n    b: int\n"
    assert also_written({"one": one, "other": other}, "Options") == ["other: Problem.b"]
    assert also_written({"one": one, "other": other.replace("b", "d")}, "Options") == []


def test_a_backend_has_few_fields():
    """What belongs together is a record."""
    source = (PACKAGE / "ops" / "backend.py").read_text()
    assert {"name", "supports"} < set(fields(source)["Backend"])
    assert len(fields(source)["Backend"]) <= MOST_FIELDS
    line = "    operators: dict[str, Operator]"
    fuller = source.replace(line, f"    more: bool = False\n{line}")
    assert len(fields(fuller)["Backend"]) == len(fields(source)["Backend"]) + 1


def test_sources_are_looked_at():
    assert len({Path(path) for path in package_files()}) > 150
