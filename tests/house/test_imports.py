"""What importing costs, and that public names exist. Which way imports run: test_stream.py."""

import ast
import json
from pathlib import Path

import pytest

import moe_ops
from moe_ops import backends
from tests.house.test_documents import PACKAGE, run_python

OPTIONAL = ("torchao", "triton", "transformers", "deep_gemm", "flashinfer")


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_at_load(path: Path) -> set[str]:
    """Dotted names that a file imports when it is loaded: imports inside functions are left
    out."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))
    return found


@pytest.mark.slow  # a fresh process imports torch, 4 to 7 s
def test_import_is_light():
    """Nor do schemes, the arithmetic of quantization and routing on a CPU load anything; quantized
    tensors load torchao, which they are made of."""
    code = f"""
import json, sys, torch
before = set(sys.modules)
def loaded():
    return sorted((set(sys.modules) - before) & {{*{OPTIONAL!r}, "moe_ops.kernels.router.topk"}})
import moe_ops
steps = [loaded()]
import moe_ops.schemes, moe_ops.numerics, moe_ops.meta.scales
steps.append(loaded())
moe_ops.route(torch.randn(2, 4), 2)
steps += [loaded(), torch.cuda.is_initialized()]
import moe_ops.tensors
steps.append("torchao" in sys.modules)
print(json.dumps(steps))
"""
    steps = json.loads(run_python(code).splitlines()[-1])
    assert steps == [[], [], [], False, True]


@pytest.mark.slow  # a fresh process imports transformers' models, 5 s
def test_the_transformers_integration_is_light():
    """It imports no library that transformers' models did not, and of this package neither what
    reads checkpoints nor kernels, commands, bundles, `MoELayer` or dispatchers of tokens.
    """
    code = """
import json, sys
import transformers.models.qwen3_moe.modeling_qwen3_moe
before = set(sys.modules)
import moe_ops.integrations.transformers
new = set(sys.modules) - before
later = ("bench", "bundle", "info", "integrations.checkpoints", "kernels.device", "kernels.gemm",
         "kernels.mixed_gemm.sm80_mma", "kernels.place.sort", "kernels.router.topk", "nn.layer",
         "parallel.dispatchers", "parallel.symmetric_memory", "selfcheck", "tuning")
print(json.dumps([
    sorted({name.split(".")[0] for name in new}),
    sorted(name for name in new if name.startswith(tuple(f"moe_ops.{n}" for n in later))),
]))
"""
    libraries, late = json.loads(run_python(code).splitlines()[-1])
    assert set(libraries) <= {"moe_ops", "tomllib"}
    assert late == []


def test_public_names_exist():
    for name in moe_ops.__all__:
        assert getattr(moe_ops, name) is not None
    assert set(dir(moe_ops)) >= set(moe_ops.__all__)
    with pytest.raises(AttributeError, match="no attribute 'fused_expert'"):
        moe_ops.fused_expert  # noqa: B018


def test_every_backend_package_is_registered():
    packages = {path.parent.name for path in (PACKAGE / "backends").glob("*/backend.py")}
    assert packages == set(moe_ops.list_backends()) - {"deep_gemm_fp4"}
    for backend in backends.BACKENDS:
        for kind, operator in backend.operators.items():
            assert operator.op.name() == f"moe_ops::{backend.name}_{kind}"


def test_optional_libraries_are_imported_late():
    """Only kernels, tensors and integrations may import an optional library when they are
    loaded."""
    kernels = ("cutlass/setup.py", "flashinfer/inputs.py")
    for path in package_files():
        where = path.relative_to(PACKAGE)
        if where.parts[0] == "backends" and where.as_posix().endswith(kernels):
            continue
        if where.parts[0] not in ("kernels", "tensors", "integrations"):
            early = {name for name in imports_at_load(path) if name.split(".")[0] in OPTIONAL}
            assert not early, f"{where} imports {early} when it is loaded"
