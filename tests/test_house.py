"""The house: what importing costs, which way imports run, and that documents tell the truth."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import moe_ops
from moe_ops import backends

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(moe_ops.__file__).parent
OPTIONAL = ("torchao", "triton", "transformers", "deep_gemm", "flashinfer")


def run_python(code: str) -> str:
    """Output of `code` in a fresh Python, in the repository root, without Triton's interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of workers for one kernel
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(PACKAGE.parent), environment.get("PYTHONPATH")])
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert answer.returncode == 0, f"{code}\n{answer.stdout}\n{answer.stderr}"
    return answer.stdout


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_at_load(path: Path) -> set[str]:
    """Dotted names that a file imports when it is loaded: imports inside functions are left out."""
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


def test_import_is_light():
    code = f"""
import json, sys, torch
before = set(sys.modules)
import moe_ops
loaded = set(sys.modules) - before
print(json.dumps([sorted(loaded & set({OPTIONAL!r})), torch.cuda.is_initialized()]))
"""
    loaded, cuda_initialized = json.loads(run_python(code).splitlines()[-1])
    assert loaded == []
    assert not cuda_initialized


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
        for kind, op in backend.ops.items():
            assert op.name() == f"moe_ops::{backend.name}_{kind}"


def test_optional_libraries_are_imported_late():
    """Only kernels, tensors and integrations may import an optional library when they are loaded."""
    kernels = ("deep_gemm/permute.py", "deep_gemm/rows.py", "flashinfer/inputs.py")
    for path in package_files():
        where = path.relative_to(PACKAGE)
        if where.parts[0] == "backends" and where.as_posix().endswith(kernels):
            continue
        if where.parts[0] not in ("kernels", "tensors", "integrations"):
            early = {name for name in imports_at_load(path) if name.split(".")[0] in OPTIONAL}
            assert not early, f"{where} imports {early} when it is loaded"


def test_version_is_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert project["version"] == moe_ops.__version__ == newest.group(1)


def test_no_machine_paths():
    """Tracked text names no path of the machine it was written on."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    # the model's corpus quotes Python's own sources, which name such paths
    names = [name for name in names if name and not name.endswith("held_out.txt")]
    path_pattern = re.compile(r"(?<![\w.])/(?:work|root|home|Users|opt)/\w|\.\./shared")
    for name in names:
        path = ROOT / name
        if not path.is_file() or path == Path(__file__).resolve():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found = path_pattern.search(text)
        assert found is None, f"{name}: {text[max(0, found.start() - 30) : found.end() + 30]!r}"


def python_blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.S | re.M)


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/backends.md",
        "docs/compile.md",
        "docs/quantization.md",
        "docs/from_vllm.md",
    ],
)
def test_documented_code_runs(document):
    blocks = python_blocks(document)
    assert blocks
    for block in blocks:
        run_python(block)


def test_documents_link_to_files_that_exist():
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_readme_is_short_and_names_every_backend():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 150
    for name in moe_ops.list_backends():
        assert f"| `{name}` |" in text, f"README's backend table lacks {name}"
