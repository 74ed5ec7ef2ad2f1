"""Backends: their order of preference, and one order inside each file."""

import ast
from pathlib import Path

import pytest

import moe_ops
from moe_ops import backends


def test_names_are_listed_in_order_of_preference():
    assert moe_ops.list_backends() == tuple(backend.name for backend in backends.BACKENDS)
    assert len(set(moe_ops.list_backends())) == len(backends.BACKENDS)


@pytest.mark.parametrize("name", ["triton", "deep_gemm", "flashinfer", "torch"])
def test_backend_files_follow_one_order(name):
    """available, supports, workspace_shapes, the launchers, and last the registration."""
    path = Path(backends.__file__).parent / name / "backend.py"
    body = ast.parse(path.read_text()).body
    defined = {
        node.name: index for index, node in enumerate(body) if isinstance(node, ast.FunctionDef)
    }
    launchers = [name for name in defined if name.startswith("_launch")]
    parts = ("available", "supports", "workspace_shapes", *launchers)
    order = [defined[part] for part in parts if part in defined]
    assert "supports" in defined and order == sorted(order)
    # deep_gemm registers its kernels for e2m1 weights as a second backend
    last = body[-2:] if name == "deep_gemm" else body[-1:]
    assert [ast.unparse(node.targets[0]) for node in last] == ["BACKEND", "FP4"][: len(last)]
    assert {ast.unparse(node.value.func) for node in last} <= {"register", "library.register"}
