"""Documents tell the truth: their code runs, their links lead somewhere, versions agree."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import moe_ops
from moe_ops.schemes import SCHEMES
from tests.support.paths import ROOT
from tools import tree

PACKAGE = Path(moe_ops.__file__).parent


def run_python(code: str, *arguments: str) -> str:
    """Output of `code` in a fresh Python, in the repository root, without Triton's interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of workers for one kernel
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(PACKAGE.parent), environment.get("PYTHONPATH")])
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert answer.returncode == 0, f"{code}\n{answer.stdout}\n{answer.stderr}"
    return answer.stdout


def test_version_is_one():
    """What is built reads moe_ops.__version__, and the newest entry of the changelog is its."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in settings["project"] and settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["hatch"]["version"] == {"path": "moe_ops/__init__.py"}
    newest = re.search(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest.group(1) == moe_ops.__version__


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


# Documents whose code changes the process that it runs in, so that each gets one of its own.
ALONE = ("docs/add_a_backend.md",)  # registers a backend
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
FENCE = re.compile(r"^```.*?^```", re.S | re.M)

# Runs files one after the other, each in a namespace of its own, and says which of them failed.
RUN_BLOCKS = """
import runpy, sys, traceback, torch
failed = []
for path in sys.argv[1:]:
    torch.compiler.reset()
    torch.manual_seed(0)
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        failed.append(path)
sys.exit("\\n".join(["failed:", *failed]) if failed else 0)
"""


def documents() -> list[str]:
    """All documents of the repository, as paths from its root."""
    patterns = ("*.md", "docs/**/*.md", "examples/**/*.md")
    found = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def python_blocks(document: str) -> list[tuple[int, str]]:
    """(line, code) of each block of a document that can run; a sketch is a `py` block."""
    text = (ROOT / document).read_text()
    return [(text.count("\n", 0, m.start(1)), m.group(1)) for m in BLOCK.finditer(text)]


def groups() -> dict[str, list[str]]:
    """Documents with code, by the process that runs it: most share one."""
    names = [name for name in documents() if python_blocks(name)]
    shared = [name for name in names if name not in ALONE]
    return {"shared": shared, **{name: [name] for name in names if name in ALONE}}


@pytest.mark.slow
@pytest.mark.parametrize("group", groups())
def test_documented_code_runs(group, tmp_path):
    paths = []
    for document in groups()[group]:
        for line, code in python_blocks(document):
            path = tmp_path / f"{document.replace('/', '_')}_line_{line}.py"
            path.write_text("\n" * line + code)  # so that tracebacks name the document's lines
            paths.append(str(path))
    assert paths
    output = run_python(RUN_BLOCKS, *paths)
    if "README.md" in groups()[group]:  # what it runs shows something
        assert "def main(" in output and "M >= 0: torch" in output


def test_documents_link_to_files_that_exist():
    for name in documents():
        document = ROOT / name
        text = FENCE.sub("", document.read_text())
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{name} links to {target}"


def test_sources_name_documents_that_exist():
    """A comment, docstring or message never sends a reader to a document that is not there."""
    pattern = re.compile(r"(?<![\w/.])(?:docs/[\w/]+|README|DESIGN|CONTRIBUTING|CHANGELOG)\.md")
    folders = ("moe_ops", "tests", "benchmarks", "tools", "examples", "docs")
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for target in pattern.findall(path.read_text()):
            assert (ROOT / target).exists(), f"{path.relative_to(ROOT)} names {target}"


def test_lists_and_tables_are_read_alike():
    """The site's Markdown, not the code host's, wants an empty line before a list or a table."""
    item, row = re.compile(r"\s*(?:[-*]|\d+\.) "), re.compile(r"\|")
    for name in documents():
        in_code, before = False, ""
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            if line.startswith("```"):
                in_code = not in_code
            elif not in_code and before and not before.startswith(("#", "<!--")):
                for kind in (item, row):
                    starts = kind.match(line) and not kind.match(before)
                    assert not (starts and not before.startswith(" ")), f"{name}:{number}: {line}"
            before = line


def test_documents_stand_on_the_site():
    """`make docs` refuses pages outside of `nav`; this says so without building it."""
    text = (ROOT / "mkdocs.yml").read_text()
    folders = tuple(re.findall(r": ([\w/]+/)$", text, re.M))
    for name in documents():
        assert f" {name}\n" in text or name.startswith(folders), f"mkdocs.yml lacks {name}"


def test_the_tree_is_that_of_the_files():
    text = (ROOT / "DESIGN.md").read_text()
    assert tree.up_to_date(text) == text, "the tree in DESIGN.md is behind: make tree"


def test_a_tree_that_is_behind_is_made_anew(tmp_path):
    """Notes and the order of folders stay; a new folder brings its docstring's first line."""
    for name in ("a/b/__init__", "a/b/one", "a/b/two", "a/new/__init__", "a/new/three", "a/four"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "a/new/__init__.py").write_text('"""A room.\n\nMore."""\n')
    block = "a/   the top\n    four, gone\n  gone/\n      x\n  b/                      a note\n"
    assert tree.tree(block, tmp_path).splitlines() == [
        "a/                        the top",
        "    four",
        "  b/                      a note",
        "      one, two",
        "  new/                    A room.",
        "      three",
    ]


def parameters(page: str) -> list[list[str]]:
    """Name, type, description and default of each parameter in the tables of a page."""
    rows = re.findall(r'<tr class="doc-section-item">(.*?)</tr>', page, re.S)
    cells = [re.findall(r"<td>(.*?)</td>", row, re.S) for row in rows]
    plain = [[" ".join(re.sub(r"<[^>]+>", "", c).split()) for c in row] for row in cells]
    return [row for row in plain if len(row) == 4]


@pytest.mark.slow
def test_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs")
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert answer.returncode == 0, answer.stderr
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^>]*>")
    pages = sorted(tmp_path.rglob("*.html"))
    for page in pages:
        found = loads.findall(page.read_text())
        assert not found, f"{page.relative_to(tmp_path)} loads {found}"
    reference = (tmp_path / "reference" / "moe_ops" / "index.html").read_text()
    for name in moe_ops.__all__:
        assert re.search(rf'id="moe_ops\.(?:\w+\.)?{name}"', reference), f"no reference of {name}"
    assert re.search(r'id="(moe_ops\.\w+)"', reference).group(1) == "moe_ops.fused_experts"
    for name, *others in parameters(reference):
        assert others[0], f"parameter {name} has no type: its default may be wrong, too"
    described = dict((row[0], row[1:]) for row in parameters(reference))
    assert described["w13_bias, w2_bias"] == ["Tensor | None", "as in fused_experts.", "None"]
    assert f"moe_ops {moe_ops.__version__}" in (tmp_path / "index.html").read_text()
    schemes = (tmp_path / "reference" / "scheme_table" / "index.html").read_text()
    assert all(f"<code>{name}</code>" in schemes for name in SCHEMES if name)


def test_readme_is_short_and_backends_have_rows():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    text = (ROOT / "docs/backends.md").read_text()
    for name in moe_ops.list_backends():
        assert f"\n| `{name}` |" in text, f"the first table of docs/backends.md lacks {name}"


def test_every_form_in_which_activations_arrive_is_documented():
    """Each scheme that quantizes activations has one row, with its elements and its scales."""
    text = (ROOT / "docs/quantization.md").read_text()
    table = text[text.index("| scheme | hidden_states |") :].partition("\n\n")[0]
    elements = {"e4m3": "e4m3 (M, K)", "int8": "int8 (M, K)", "e2m1": "two e2m1 a byte (M, K / 2)"}
    dtypes = {torch.float32: "fp32", torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3"}
    shapes = {-1: "(M, 1)", 128: "(M, ceil(K / 128))", 32: "(M, K / 32)", 16: "(M, K / 16)"}
    found = []
    for row in table.splitlines()[2:]:
        names, data, scale = row.strip("| ").split(" | ")
        for name in re.findall(r"`([^`]+)`", names):
            desc = SCHEMES[name].activation
            assert data.startswith(elements.get(desc.dtype, "four of 6 bits")), row
            shape = "() or (1,)" if desc.group.is_tensor else shapes[desc.group.cols]
            assert scale.startswith(f"{dtypes[desc.scale_dtype]} {shape}"), row
            found.append(name)
    quantizing = {name for name, scheme in SCHEMES.items() if scheme.activation}
    assert sorted(found) == sorted({re.sub(":(round|ceil)$", "", name) for name in quantizing})
