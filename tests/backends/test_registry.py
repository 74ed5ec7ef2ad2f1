"""Backends: their order of preference, and one order inside each file."""

import ast
from pathlib import Path

import pytest

import moe_ops
from moe_ops import backends

# --- the house's order ---------------------------------------------------------------------------


def test_names_are_listed_in_order_of_preference():
    assert moe_ops.list_backends() == tuple(backend.name for backend in backends.BACKENDS)
    assert len(set(moe_ops.list_backends())) == len(backends.BACKENDS)


PACKAGES = {"deep_gemm_fp4": "deep_gemm"}  # of backends that share one


@pytest.mark.parametrize("name", backends.list_backends())
def test_backend_files_follow_one_order(name):
    """available, supports, workspace_shapes, launchers, and last the registration."""
    package = Path(backends.__file__).parent / PACKAGES.get(name, name)
    body = ast.parse((package / "backend.py").read_text()).body
    defined = {
        node.name: index for index, node in enumerate(body) if isinstance(node, ast.FunctionDef)
    }
    launchers = [name for name in defined if name.startswith("_launch")]
    parts = ("available", "supports", "workspace_shapes", *launchers)
    order = [defined[part] for part in parts]
    assert order == sorted(order)
    registered = [
        (index, ast.literal_eval(node.value.args[0]))
        for index, node in enumerate(body)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) in ("register", "library.register")
    ]
    assert name in [found for _, found in registered]
    last = range(len(body) - len(registered), len(body))
    assert [index for index, _ in registered] == list(last)
