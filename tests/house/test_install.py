"""Installing: the CPU kernels are optional, whatever CXX says, and no index is claimed."""

import importlib.util
import re
import shlex
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import moe_ops
from moe_ops import environment
from moe_ops.csrc import build as build_of_package
from tests.house.test_documents import documents
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / "hatch_build.py").exists(), reason="tests of a wheel, away from the source tree"
)


@pytest.fixture
def hook(monkeypatch, tmp_path):
    """hatch_build, on an x86-64 machine whose PATH has nothing of a compiler."""
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # hatchling is there only while something is built
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "bin").mkdir()
    return module


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# what follows -o is where the library goes
COMPILES = 'while [ "$1" != -o ]; do shift; done; echo "compiled" > "$2"'


def build(hook, tmp_path):
    """(why not, text of the library), where a library was before."""
    library = tmp_path / "library.so"
    library.write_text("of an earlier build")
    reason = hook.build([tmp_path / "source.cpp"], library)
    return reason, library.read_text().strip() if library.exists() else None


def test_compiler_of_path_is_used(hook, tmp_path):
    script(tmp_path / "bin" / "g++", COMPILES)
    assert build(hook, tmp_path) == (None, "compiled")


def test_the_library_names_its_sources(hook, tmp_path):
    script(tmp_path / "bin" / "g++", f'printf "%s\\n" "$@" > {tmp_path / "flags"}; {COMPILES}')
    library = tmp_path / "library.so"
    assert hook.build([tmp_path / "source.cpp"], library, "0123abcd") is None
    assert '-DMOE_OPS_CPU_SOURCES="0123abcd"' in (tmp_path / "flags").read_text().splitlines()
    assert [path.name for path in tmp_path.glob("*library.so*")] == ["library.so"]
    checkout = tmp_path / "moe_ops" / "csrc"
    shutil.copytree(ROOT / "moe_ops" / "csrc" / "cpu", checkout / "cpu")
    shutil.copy(ROOT / "moe_ops" / "csrc" / "build.py", checkout)
    names = hook.csrc_build(tmp_path).cpu_fingerprint()
    assert hook.build_cpu(tmp_path) is None and names == build_of_package.cpu_fingerprint()
    assert f'-DMOE_OPS_CPU_SOURCES="{names}"' in (tmp_path / "flags").read_text().splitlines()
    (checkout / "cpu" / "bf16.h").write_text("changed by a pull")
    assert hook.csrc_build(tmp_path).cpu_fingerprint() != names


def test_cxx_may_have_arguments(hook, tmp_path, monkeypatch):
    script(tmp_path / "bin" / "g++", COMPILES)
    folder = tmp_path / "a folder"
    folder.mkdir()
    cache = script(folder / "ccache", 'exec "$@"')
    monkeypatch.setenv("CXX", f"{shlex.quote(str(cache))} g++")
    assert build(hook, tmp_path) == (None, "compiled")


@pytest.mark.parametrize(
    ("cxx", "why"),
    [
        ("", "there is no g\\+\\+ or c\\+\\+ on PATH, and CXX is not set"),
        ("/nonexistent/g++", "No such file or directory: '/nonexistent/g\\+\\+'"),
        ("g++-99", "No such file or directory: 'g\\+\\+-99'"),
        ("{folder}", "Permission denied"),
        ("{folder}/not_executable", "Permission denied"),
        ("{folder}/not_a_program", "Exec format error"),
        ("{folder}/fails", "fails -O3 .* ended with 3: no such flag"),
        ("{folder}/does_nothing", "does_nothing -O3 .* ended with 0"),
        ("ccache 'g++", "No closing quotation"),
    ],
)
def test_any_other_cxx_leaves_the_kernels_out(cxx, why, hook, tmp_path, monkeypatch):
    (tmp_path / "not_executable").write_text("")
    script(tmp_path / "not_a_program", "").write_bytes(b"\x00\x01")
    script(tmp_path / "fails", "echo no such flag >&2; exit 3")
    script(tmp_path / "does_nothing", "exit 0")
    monkeypatch.setenv("CXX", cxx.format(folder=tmp_path))
    reason, library = build(hook, tmp_path)
    assert re.search(why, reason), reason
    assert library is None


def test_other_processors_get_no_kernels(hook, tmp_path, monkeypatch):
    script(tmp_path / "bin" / "g++", COMPILES)
    monkeypatch.setattr(hook.platform, "machine", lambda: "riscv64")
    reason, library = build(hook, tmp_path)
    assert "this is riscv64" in reason and library is None


def test_cuda_objects_of_these_sources_are_taken_along(hook, tmp_path, monkeypatch):
    """One that is there goes into the wheel without a compiler; others are built when asked."""
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    csrc = tmp_path / "moe_ops" / "csrc"
    sources = ROOT / "moe_ops" / "csrc"
    shutil.copytree(sources, csrc, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    assert hook.cuda_objects(tmp_path) == {}
    (csrc / "cutlass" / "moe_ops_cutlass_sm90a_0123456789abcdef.so").touch()  # of other sources
    name = f"moe_ops/csrc/cutlass/{sys.modules['csrc_build'].object_name('sm_90a')}"
    (tmp_path / name).touch()
    assert hook.cuda_objects(tmp_path) == {name: None}
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    monkeypatch.setenv("CUDACXX", str(tmp_path / "no_nvcc"))
    found = hook.cuda_objects(tmp_path)
    assert len(found) == 3 and found.pop(name) is None
    assert all("CUDACXX must name a compiler" in why for why in found.values())


@pytest.fixture
def check_dist():
    """.ci/check_dist.py, which the release runs."""
    if not (ROOT / ".ci" / "check_dist.py").exists():
        pytest.skip("not in the sdist")
    spec = importlib.util.spec_from_file_location("check_dist", ROOT / ".ci" / "check_dist.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_published_is_whole_and_small(check_dist, tmp_path, monkeypatch):
    """A wheel without an object, with a stale one, or of another version is named."""
    version, brought = moe_ops.__version__, check_dist.kernels()
    wheel = tmp_path / f"torch_moe_ops-{version}-py3-none-manylinux_2_28_x86_64.whl"
    (tmp_path / f"torch_moe_ops-{version}.tar.gz").touch()

    def says(*names, tag=None):
        with zipfile.ZipFile(wheel, "w") as file:
            for name in names:
                file.writestr(name, b"code")
        return " ".join(check_dist.wrong(tmp_path, tag))

    assert check_dist.version() == version and len(brought) == 4
    assert says(*brought) == ""
    assert says(*brought[:-1]) == f"the wheel lacks {brought[-1]}"
    assert "old.so, of other sources" in says(*brought, "moe_ops/csrc/cutlass/old.so")
    assert f"tag must be v{version}, got v9" in says(*brought, tag="v9")
    monkeypatch.setattr(check_dist, "LARGEST", 100)
    assert "the wheel has 0.0 MiB" in says(*brought)
    wheel.rename(tmp_path / "torch_moe_ops-9-py3-none-any.whl")
    assert f"one wheel of {version} is expected" in " ".join(check_dist.wrong(tmp_path, None))


def test_distribution_has_a_name_of_its_own():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == environment.DISTRIBUTION == "torch-moe-ops"
    for extra in project["optional-dependencies"].values():
        assert not [one for one in extra if re.match("moe[-_.]ops", one)]


def test_nobody_is_told_to_install_this_from_an_index():
    """`pip install moe-ops`, with extras or without, would install another project."""
    folders = ("moe_ops", "tests", "benchmarks", "tools", "examples", "docs", ".github", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    files += [ROOT / name for name in (*documents(), "Makefile", "pyproject.toml")]
    index = re.compile(r"pip install[^\n`]*\s['\"]?(?:torch-)?moe[-_.]ops\b(?![\w/*-]*\.whl|/)")
    for path in files:
        texts = path.is_file() and path.suffix in (".py", ".md", ".toml", ".yml", "")
        if texts and path.name != Path(__file__).name:
            found = index.search(path.read_text())
            assert found is None, f"{path.relative_to(ROOT)}: {found.group()}"
