"""Building the CUDA kernels, with an nvcc that is a script: what is missing, too old, read-only,
full or killed half-way is said, and the next build works."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_ops.backends.cutlass import library
from moe_ops.csrc import build
from tests.support import native_check
from tests.support.paths import ROOT

ARCHITECTURE = "sm_90a"
# compiles each file to its name and links by writing down what it links; each run leaves a line
NVCC = """
echo run >> {log}
if [ "$1" = --version ]; then echo "Cuda compilation tools, release {version}, V"; exit 0; fi
{before}
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A function that puts an nvcc into place, and headers of CUTLASS."""
    headers = tmp_path / "cutlass_path" / "include" / "cutlass"
    headers.mkdir(parents=True)
    (headers / "cutlass.h").write_text("")
    monkeypatch.setenv("CUTLASS_PATH", str(headers.parents[1]))

    def install(version="13.0", before="", cutlass=(4, 8)):
        (headers / "version.h").write_text(
            f"#define CUTLASS_MAJOR {cutlass[0]}\n#define CUTLASS_MINOR {cutlass[1]}\n"
        )
        nvcc = tmp_path / "nvcc"
        text = NVCC.format(version=version, before=before, log=tmp_path / "log")
        nvcc.write_text(f"#!/bin/sh\n{text}")
        nvcc.chmod(0o755)
        monkeypatch.setenv("CUDACXX", str(nvcc))
        return tmp_path / "log"

    monkeypatch.setattr(build, "SOURCES", copied(tmp_path / "sources"))
    return install


def copied(folder: Path) -> Path:
    """The sources, without what was built beside them."""
    folder.mkdir()
    for path in build.SOURCES.iterdir():
        if path.suffix in build.SUFFIXES:
            shutil.copy(path, folder)
    return folder


def runs(log: Path) -> int:
    """How often the compiler did more than say its version."""
    return log.read_text().count("run") if log.exists() else 0


def test_the_first_use_builds_and_the_next_finds(tools, tmp_path):
    log, said = tools(), []
    path = build.ensure(ARCHITECTURE, tmp_path / "cache", said.append)
    assert path.read_text() == "made\n" and path.parent.name == "cutlass"
    assert "building" in said[0] and f"{len(build.FILES[ARCHITECTURE])} of" in said[-1]
    count = runs(log)
    assert count == 1 + len(build.FILES[ARCHITECTURE]) + 1  # version, files, link
    assert build.ensure(ARCHITECTURE, tmp_path / "cache") == path and runs(log) == count
    (build.SOURCES / "other.so").write_text("built into the package")
    assert build.cached(ARCHITECTURE, tmp_path / "cache") == path
    (build.SOURCES / "sm90_fp8.cuh").write_text("// changed")
    assert build.ensure(ARCHITECTURE, tmp_path / "cache") != path
    assert not list(path.parent.glob(".building-*"))


def test_what_the_package_brought_comes_first(tools, tmp_path):
    tools()
    beside = build.SOURCES / build.object_name(ARCHITECTURE)
    beside.write_text("brought")
    assert build.ensure(ARCHITECTURE, tmp_path / "cache") == beside


def test_flags_follow_the_toolchain(tools, tmp_path):
    """Dependent launches need headers that wait; the code is that of one family."""
    for cutlass, dependent in (((4, 2), False), ((4, 5), True)):
        tools(before=f'echo "$@" >> {tmp_path}/arguments', cutlass=cutlass)
        (tmp_path / "arguments").unlink(missing_ok=True)
        build.build(ARCHITECTURE, tmp_path / "out.so")
        said = (tmp_path / "arguments").read_text().splitlines()
        assert all("arch=compute_90a,code=sm_90a" in line for line in said if " -c " in line)
        assert all(("-DCUTLASS_ENABLE_GDC_FOR_SM90" in line) == dependent for line in said[:-1])
        assert "-cudart static" in said[-1]


def test_some_files_with_more_flags(tools, tmp_path, monkeypatch):
    """As `make native-check` compiles what its tests ask: once, in a folder of its own."""
    log = tools(before=f'echo "$@" >> {tmp_path}/arguments')
    names = build.FILES["sm_120a"][:2]
    for _ in range(2):
        path = native_check.part_of("sm_120a", tmp_path / "cache")
    assert path.parent.name == "checked" and build.installed("sm_120a", tmp_path / "cache") is None
    said = (tmp_path / "arguments").read_text().splitlines()
    compiled = [line for line in said if " -c " in line]
    assert [f"{name}.cu" in line for name, line in zip(names, sorted(compiled), strict=True)]
    assert not any(native_check.PARSED in line for line in compiled)  # this nvcc has no such flag
    count = runs(log)
    (build.SOURCES / "abi.cu").write_text("// changed")
    build.build("sm_120a", path, names=names, more_flags=("-flag",))
    assert "-flag" in (tmp_path / "arguments").read_text() and runs(log) > count
    assert native_check.part_of("sm_120a", tmp_path / "cache") != path and not path.exists()


def test_headers_are_found_before_any_are_downloaded(tools, tmp_path, monkeypatch):
    tools()
    monkeypatch.setattr(native_check.subprocess, "run", lambda *_, **__: pytest.fail("downloads"))
    native_check.find_headers(tmp_path / "headers")
    assert os.environ["CUTLASS_PATH"] == str(tmp_path / "cutlass_path")
    headers = tmp_path / "headers" / "include" / "cutlass"
    headers.mkdir(parents=True)
    (headers / "cutlass.h").touch()
    monkeypatch.delenv("CUTLASS_PATH")
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    native_check.find_headers(tmp_path / "headers")
    assert os.environ["CUTLASS_PATH"] == str(tmp_path / "headers")


def ensuring(tmp_path: Path) -> list[str]:
    """The command of a process that builds into the cache, without torch, as installing does."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import build; "
        "build.SOURCES = Path(sys.argv[2]); print(build.ensure('sm_90a', Path(sys.argv[3])))"
    )
    folders = (ROOT / "moe_ops" / "csrc", build.SOURCES, tmp_path / "cache")
    return [sys.executable, "-c", code, *map(str, folders)]


@pytest.mark.slow
def test_two_processes_build_once(tools, tmp_path):
    log = tools(before="sleep 0.3")
    command = ensuring(tmp_path)
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in "12"]
    paths = {process.communicate(timeout=120)[0] for process in both}
    assert len(paths) == 1 and all(process.returncode == 0 for process in both)
    assert runs(log) == 1 + len(build.FILES[ARCHITECTURE]) + 1


def test_a_build_that_is_killed_leaves_nothing(tools, tmp_path):
    tools(before="sleep 30")
    process = subprocess.Popen(ensuring(tmp_path), start_new_session=True)
    target = build.cached(ARCHITECTURE, tmp_path / "cache")
    deadline = time.monotonic() + 60
    while not list(target.parent.glob(".building-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not target.exists()
    tools()
    assert build.ensure(ARCHITECTURE, tmp_path / "cache") == target and target.exists()
    assert not list(target.parent.glob(f"{build.BUILDING}*"))  # what the other one left


@pytest.mark.parametrize(
    "how, message",
    [
        (
            dict(version="11.8"),
            "nvcc must be 12.3 or newer for sm_90a, got 11.8 .*; install",
        ),
        (dict(version="none"), "does not say its version; set CUDACXX"),
        (
            dict(cutlass=(3, 9)),
            "CUTLASS must be 4.1 or newer for sm_90a, got 3.9 .*nvidia-cutlass==4.2.0.0",
        ),
        (dict(before="echo 'no such type' >&2; exit 2"), "ended with 2: no such type"),
        (
            dict(before="echo 'No space left on device' >&2; exit 1"),
            "cannot be written: .*no space left.*; set MOE_OPS_CACHE to another folder",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_fails_is_said(tools, tmp_path, how, message):
    tools(**how)
    with pytest.raises(build.BuildError, match=message):
        build.ensure(ARCHITECTURE, tmp_path / "cache")
    assert not build.cached(ARCHITECTURE, tmp_path / "cache").exists()
    tools()
    assert build.ensure(ARCHITECTURE, tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "how, message",
    [
        (dict(version="12.6"), "nvcc must be 12.8 or newer for sm_120a, got 12.6"),
        (dict(cutlass=(4, 2)), "CUTLASS must be 4.8 or newer for sm_120a, got 4.2 .*CUTLASS_PATH"),
    ],
)
def test_newer_gpus_need_newer_tools(tools, tmp_path, how, message):
    tools(**how)
    with pytest.raises(build.BuildError, match=message):
        build.build("sm_120a", tmp_path / "out.so")
    build.build("sm_90a", tmp_path / "out.so")  # which these are new enough for


def test_nothing_to_build_with(tools, tmp_path, monkeypatch):
    tools()
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "nowhere"))
    assert "CUTLASS_PATH must hold include/cutlass/cutlass.h" in build.why_not_built()
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "cutlass_path"))
    tools(cutlass=(3, 9))
    assert "CUTLASS must be 4.1 or newer, got 3.9 at " in build.why_not_built()
    monkeypatch.delenv("CUTLASS_PATH")
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps nvidia-cutlass==4.2.0.0" in build.why_not_built()
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    (tmp_path / "nvcc").unlink()
    assert "there is no nvcc on PATH" in build.why_not_built()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tools, tmp_path):
    tools()
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(build.BuildError, match="cannot be written: .*; set MOE_OPS_CACHE"):
        build.ensure(ARCHITECTURE, tmp_path / "cache")


def test_a_file_where_the_folder_should_be(tools, tmp_path):
    tools()
    (tmp_path / "cache").write_text("")
    with pytest.raises(build.BuildError, match="cannot be written: .*; set MOE_OPS_CACHE"):
        build.ensure(ARCHITECTURE, tmp_path / "cache")


def test_the_command_line(tools, tmp_path, capsys):
    tools()
    assert build.main([ARCHITECTURE, "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / build.object_name(ARCHITECTURE)).exists()
    tools(version="11.0")
    assert build.main([ARCHITECTURE, "--out", str(tmp_path / "out")]) == 1
    assert "moe_ops.csrc.build: nvcc must be" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        build.main(["sm_1"])


# --- what is loaded ------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def loaded(monkeypatch, path: Path):
    monkeypatch.setattr(build, "ensure", lambda *_: path)
    library._load.cache_clear()
    try:
        return library._load(ARCHITECTURE)
    finally:
        library._load.cache_clear()


def compiled(tmp_path: Path, abi: int, size: int, driver: int = 13020) -> Path:
    numbers = {"abi": abi, "struct_bytes": size, "runtime_version": 13000}
    numbers |= {"driver_version": driver}
    source = tmp_path / "object.c"
    lines = [f"int moe_ops_cutlass_{n}(void) {{ return {v}; }}\n" for n, v in numbers.items()]
    source.write_text("".join(lines))
    path = tmp_path / f"{abi}_{size}_{driver}.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return path


@needs_compiler
def test_an_object_of_another_version_is_refused(tmp_path, monkeypatch):
    size = ctypes.sizeof(library.GroupedGemm)
    assert loaded(monkeypatch, compiled(tmp_path, build.ABI, size)) is not None
    for abi, bytes_ in ((build.ABI + 1, size), (build.ABI, size + 8)):
        with pytest.raises(ImportError, match="built from another version .*; delete it"):
            loaded(monkeypatch, compiled(tmp_path, abi, bytes_))


@needs_compiler
def test_a_driver_that_is_too_old_is_named(tmp_path, monkeypatch):
    path = compiled(tmp_path, build.ABI, ctypes.sizeof(library.GroupedGemm), driver=12080)
    with pytest.raises(ImportError, match="with CUDA 13, and the driver runs CUDA 12 at most"):
        loaded(monkeypatch, path)
    monkeypatch.setattr(build, "installed", lambda *_: path)
    library._load.cache_clear()
    assert "the driver runs CUDA 12 at most" in library._unbuilt(ARCHITECTURE)
    library._load.cache_clear()


def test_an_object_that_is_cut_short_is_refused(tmp_path, monkeypatch):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF")
    with pytest.raises(ImportError, match="cannot be loaded .*; delete it"):
        loaded(monkeypatch, broken)


def test_the_struct_of_the_header_is_that_of_python():
    """Field by field: names, types and order."""
    text = (ROOT / "moe_ops" / "csrc" / "cutlass" / "grouped.h").read_text()
    assert f"#define MOE_OPS_CUTLASS_ABI {build.ABI} " in text
    body = text[text.index("struct GroupedGemm {") :].split("{", 1)[1].split("};")[0]
    lines = [line.split("//")[0].strip() for line in body.splitlines()]
    found = [tuple(line.rstrip(";").rsplit(None, 1)) for line in lines if line]
    types = {
        "int32_t": ctypes.c_int32,
        "size_t": ctypes.c_size_t,
        "cudaStream_t": ctypes.c_void_p,
        "const void*": ctypes.c_void_p,
        "void*": ctypes.c_void_p,
    }
    assert [(name, types[kind]) for kind, name in found] == library.GroupedGemm._fields_


# --- where nothing can be built or found ---------------------------------------------------------


def test_asking_never_raises_and_starts_no_process(tools, tmp_path, monkeypatch):
    """Every first call of the library asks whether this backend is available."""
    log = tools()
    hidden = tmp_path / "hidden"
    monkeypatch.setattr(build.os.path, "isfile", lambda path: False)
    for folder in (lambda: hidden, no_home):
        monkeypatch.setattr(library.environment, "cache_folder", folder)
        library.why_not.cache_clear()
        assert library.why_not() is None and "not built yet" in library._unbuilt(ARCHITECTURE)
    assert runs(log) == 0
    (tmp_path / "cutlass_path" / "include" / "cutlass" / "version.h").unlink()
    library.why_not.cache_clear()
    assert "CUTLASS_PATH must hold" in library.why_not()
    library.why_not.cache_clear()
    with pytest.raises(build.BuildError, match="cannot be written: .*; set MOE_OPS_CACHE"):
        tools()
        build.ensure(ARCHITECTURE, library._cache())


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_processors_of_another_kind_have_other_objects(monkeypatch):
    here = build.object_name(ARCHITECTURE)
    monkeypatch.setattr(build.platform, "machine", lambda: "another")
    assert build.object_name(ARCHITECTURE) != here


def test_an_old_package_does_not_hide_a_newer_one(tools, tmp_path, monkeypatch):
    tools()
    monkeypatch.delenv("CUTLASS_PATH")
    for name, inside, version in (
        ("deep_gemm", "include", (3, 9)),
        ("cutlass_library", "source/include", (4, 2)),
    ):
        folder = tmp_path / name / inside / "cutlass"
        folder.mkdir(parents=True)
        major, minor = version
        (folder / "version.h").write_text(
            f"#define CUTLASS_MAJOR {major}\n#define CUTLASS_MINOR {minor}\n"
        )

    class Spec:
        def __init__(self, name):
            self.submodule_search_locations = [str(tmp_path / name)]

    monkeypatch.setattr(build.importlib.util, "find_spec", Spec)
    assert build.toolchain().cutlass_version == (4, 2)
    assert not build.toolchain().dependent_launch


def test_what_CUDACXX_names_is_taken_or_refused(tools, tmp_path, monkeypatch):
    log = tools()
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\necho wrapped >> {log}\nexec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CUDACXX", f"{wrapper} {tmp_path / 'nvcc'}")
    assert build.ensure(ARCHITECTURE, tmp_path / "cache").exists()
    assert log.read_text().count("wrapped") == runs(log)
    monkeypatch.setenv("CUDACXX", str(tmp_path / "nowhere"))
    assert "CUDACXX must name a compiler" in build.why_not_built()


def test_a_build_removes_older_objects_beside_it(tools, tmp_path):
    tools()
    assert build.main([ARCHITECTURE, "--out", str(tmp_path / "out")]) == 0
    (build.SOURCES / "abi.cu").write_text("// changed")
    assert build.main([ARCHITECTURE, "--out", str(tmp_path / "out")]) == 0
    names = [path.name for path in (tmp_path / "out").glob("*.so")]
    assert names == [build.object_name(ARCHITECTURE)]
