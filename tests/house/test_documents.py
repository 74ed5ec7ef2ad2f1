"""Documents tell the truth: their code runs, their links lead somewhere, versions agree."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import moe_ops
from tests.support.paths import ROOT

PACKAGE = Path(moe_ops.__file__).parent


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


@pytest.mark.slow
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
    """Each block for itself, though in one process: to import torch takes seconds."""
    blocks = python_blocks(document)
    assert blocks
    runs = (
        f"exec(compile({block!r}, {document!r}, 'exec'), {{'__name__': '__main__'}})"
        for block in blocks
    )
    run_python("\n".join(runs))


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
