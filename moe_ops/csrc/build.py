"""Builds the CUDA kernels of csrc/cutlass: one shared object for each family of GPUs. The standard
library alone, so that installing can use it, too.

    python -m moe_ops.csrc.build [sm_90a ...] [--out FOLDER]

The objects know neither torch nor Python: plain C functions, with the CUDA runtime linked in. One
object serves every torch and every Python of its machine's architecture.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "cutlass"
CPU_SOURCES = Path(__file__).parent / "cpu"
CPU_SUFFIXES = (".cpp", ".h", ".inc")
ABI = 3  # MOE_OPS_CUTLASS_ABI of grouped.h

# files of each object; each takes a minute or two and up to 5.6 GB of memory
FILES = {
    "sm_90a": (
        *("abi", "sm90_fp8_bf16", "sm90_fp8_f16", "sm90_products", "sm90_blocks"),
        *("sm90_int4_bf16_few", "sm90_int4_bf16_many", "sm90_int4_f16_few", "sm90_int4_f16_many"),
    ),
    "sm_100a": ("abi", "sm100_nvfp4", "sm100_mxfp4", "sm100_mxfp8"),
    "sm_120a": ("abi", "sm120_nvfp4", "sm120_mxfp4", "sm120_mxfp8"),
}
SUFFIXES = (".cu", ".cuh", ".h")
BUILDING = ".building-"  # what folders of a build begin with
BYTES_OF_JOB = 6 << 30
OLDEST_NVCC = (12, 3)  # wgmma, and C++20 on the device
OLDEST_CUTLASS = (4, 1)
OLDEST_NVCC_OF = {"sm_100a": (12, 8), "sm_120a": (12, 8)}  # the first that know these
OLDEST_CUTLASS_OF = {"sm_120a": (4, 8)}  # nvcc's host code of CUTLASS 4.2 does not compile there
INSTALL_CUTLASS = "pip install --no-deps nvidia-cutlass==4.2.0.0"
FLAGS = ("-O3", "-std=c++20", "-DNDEBUG", "--expt-relaxed-constexpr", "-w", "-Xcompiler", "-fPIC")
# Pointer-array kernels of CUTLASS before 4.5 do not wait for the kernel before them: launched as
# programmatic dependents they would race. From 4.5 on they do, if this is defined.
DEPENDENT_LAUNCH = ("-DCUTLASS_ENABLE_GDC_FOR_SM90", "-DCUTLASS_ENABLE_GDC_FOR_SM100")


class BuildError(RuntimeError):
    """Nothing was built; the message says why and what to do."""


class Toolchain(NamedTuple):
    """The toolchain: the compiler and CUTLASS's headers."""

    nvcc: list[str]  # the command
    nvcc_version: tuple[int, int]
    headers: Path  # a folder with cutlass/cutlass.h
    cutlass_version: tuple[int, int]

    @property
    def dependent_launch(self) -> bool:
        """Whether kernels may be launched as programmatic dependents."""
        return self.cutlass_version >= (4, 5)


def why_not_built() -> str | None:
    """Why nothing can be built on this machine, and the remedy; None if there is what building
    starts with. Starts no process: the version of nvcc is read when something is built.
    """
    try:
        _nvcc()
        _headers()
    except BuildError as error:
        return str(error)
    return None


def toolchain(architecture: str = "") -> Toolchain:
    """The compiler and the headers of this machine.

    Raises:
        BuildError: nvcc or CUTLASS is missing, or too old for a family of GPUs, or for all.
    """
    nvcc = _nvcc()
    try:
        said = subprocess.run([*nvcc, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"nvcc cannot be run: {error}; set CUDACXX to the compiler") from error
    found = re.search(r"release (\d+)\.(\d+)", said.stdout)
    if not found:
        raise BuildError(f"{shlex.join(nvcc)} does not say its version; set CUDACXX to an nvcc")
    version = (int(found[1]), int(found[2]))
    oldest = OLDEST_NVCC_OF.get(architecture, OLDEST_NVCC)
    if version < oldest:
        raise BuildError(
            f"{_too_old('nvcc', oldest, architecture, version)} at {shlex.join(nvcc)}; install a "
            "newer CUDA toolkit, or set CUDACXX"
        )
    return Toolchain(nvcc, version, *_headers(architecture))


def _too_old(what: str, oldest: tuple[int, int], architecture: str, found: tuple[int, int]) -> str:
    wanted, got = [".".join(map(str, version)) for version in (oldest, found)]
    return f"{what} must be {wanted} or newer{architecture and f' for {architecture}'}, got {got}"


def _nvcc() -> list[str]:
    """The command of the compiler: CUDACXX, which may be "ccache nvcc", else the one found.

    Raises:
        BuildError: there is none, or CUDACXX names none.
    """
    named = shlex.split(os.environ.get("CUDACXX", ""))
    if named:
        if shutil.which(named[0]) is None:
            raise BuildError(f"CUDACXX must name a compiler, got {os.environ['CUDACXX']!r}")
        return named
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found = shutil.which("nvcc") or shutil.which(str(Path(home, "bin", "nvcc")))
    if found is None:
        raise BuildError(
            "there is no nvcc on PATH, at CUDA_HOME or named by CUDACXX; install the CUDA "
            f"toolkit ({'.'.join(map(str, OLDEST_NVCC))} or newer)"
        )
    return [found]


def _headers(architecture: str = "") -> tuple[Path, tuple[int, int]]:
    """(folder, version) of CUTLASS's headers: those of CUTLASS_PATH, or the newest that a package
    brings.

    Raises:
        BuildError: there are none, or they are too old for a family of GPUs, or for all.
    """
    named = os.environ.get("CUTLASS_PATH")
    if named:
        found = [_version_of(Path(named, inside)) for inside in ("include", "")]
        if found == [None, None]:
            raise BuildError(f"CUTLASS_PATH must hold include/cutlass/cutlass.h, got {named}")
    else:
        found = []
        for package, inside in (("deep_gemm", "include"), ("cutlass_library", "source/include")):
            spec = importlib.util.find_spec(package)
            places = (spec.submodule_search_locations or ()) if spec else ()
            found += [_version_of(Path(place, inside)) for place in places]
    newest = max([one for one in found if one is not None], default=None)
    if newest is None:
        raise BuildError(
            f"CUTLASS's headers are not installed; {INSTALL_CUTLASS}, or set CUTLASS_PATH to a "
            "checkout of CUTLASS"
        )
    version, folder = newest
    oldest = OLDEST_CUTLASS_OF.get(architecture, OLDEST_CUTLASS)
    if version < oldest:
        remedy = "set CUTLASS_PATH to a checkout of it"
        if oldest == OLDEST_CUTLASS:
            remedy = f"{INSTALL_CUTLASS}, or {remedy}"
        raise BuildError(
            f"{_too_old('CUTLASS', oldest, architecture, version)} at {folder}; {remedy}"
        )
    return folder, version


def _version_of(headers: Path) -> tuple[tuple[int, int], Path] | None:
    """(version, folder) of CUTLASS's headers in a folder; None if they are not there."""
    try:
        text = (headers / "cutlass" / "version.h").read_text()
    except OSError:
        return None
    numbers = [re.search(rf"define CUTLASS_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = [int(number[1]) if number else 0 for number in numbers]
    return (major, minor), headers


def fingerprint(architecture: str) -> str:
    """Of everything that an object is made from but the toolchain: part of its name, so that one
    of other sources, or for processors of another kind, is not found.
    """
    made_from = (ABI, architecture, FILES[architecture], FLAGS, platform.machine())
    digest = hashlib.sha256(repr(made_from).encode())
    for path in sorted(path for path in SOURCES.iterdir() if path.suffix in SUFFIXES):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def cpu_fingerprint() -> str:
    """Of the sources of the CPU kernels, which their library names; "" if they are not there."""
    paths = sorted(path for path in CPU_SOURCES.glob("*") if path.suffix in CPU_SUFFIXES)
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16] if paths else ""


def _stem(architecture: str) -> str:
    return f"moe_ops_cutlass_{architecture.replace('_', '')}_"


def object_name(architecture: str) -> str:
    """The file name of the object of a family of GPUs."""
    return f"{_stem(architecture)}{fingerprint(architecture)}.so"


def cached(architecture: str, cache: Path) -> Path:
    """Where the object is that is built at first use, in a folder for caches."""
    return cache / "cutlass" / object_name(architecture)


def installed(architecture: str, cache: Path) -> Path | None:
    """The object that was built with the package, or by an earlier use; None if there is none."""
    for path in (SOURCES / object_name(architecture), cached(architecture, cache)):
        if os.path.isfile(path):  # False, too, where the folder may not be searched
            return path
    return None


def jobs() -> int:
    """Compilers that run at a time: as many as there are processors and memory for."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // BYTES_OF_JOB))


def build(
    architecture: str,
    target: Path,
    progress: Callable[[str], None] = lambda line: None,
    names: Sequence[str] = (),
    more_flags: Sequence[str] = (),
) -> None:
    """Compile the object of a family of GPUs into the file `target`, which appears whole or not at
    all.

    Args:
        names: the files of it; all, if there are none.
        more_flags: of the compiler.

    Raises:
        BuildError: a tool is missing, a compiler failed, or the folder cannot be written.
    """
    tools = toolchain(architecture)
    number = architecture.removeprefix("sm_")
    flags = [*FLAGS, f"-I{tools.headers}", f"-I{SOURCES}"]
    flags += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    if tools.dependent_launch:
        flags += DEPENDENT_LAUNCH
    flags += more_flags
    start, names = time.monotonic(), names or FILES[architecture]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=BUILDING) as folder:
            with ThreadPoolExecutor(jobs()) as pool:
                commands = [
                    [*tools.nvcc, *flags, "-c", f"{SOURCES}/{name}.cu", "-o", f"{folder}/{name}.o"]
                    for name in names
                ]
                for done, _ in enumerate(pool.map(_run, commands), 1):
                    seconds = time.monotonic() - start
                    progress(f"{architecture}: {done} of {len(names)} files, {seconds:.0f} s")
            whole = Path(folder, target.name)
            objects = [f"{folder}/{name}.o" for name in names]
            _run([*tools.nvcc, "-shared", "-cudart", "static", *objects, "-o", str(whole)])
            os.replace(whole, target)
    except OSError as error:  # no right to write, no space
        raise _unwritable(target.parent, error) from error


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if result.returncode:
        said = (result.stdout + result.stderr)[-2000:]
        if "No space left" in said:
            raise OSError(28, "no space left on the device")
        if result.returncode in (-9, 137):
            said = "it was killed, most likely for want of memory; build where 8 GB are free"
        raise BuildError(f"{shlex.join(command)} ended with {result.returncode}: {said}")


@contextlib.contextmanager
def only_one(folder: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a folder: a second process waits for the first. The operating system drops
    it with the process that holds it, however that ends; what that left is removed.
    """
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise _unwritable(folder, error) from error
    with handle:
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(f"another process builds in {folder}: waiting for it")
                fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
            raise _unwritable(folder, error) from error
        for left in folder.glob(f"{BUILDING}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _unwritable(folder: Path, error: OSError) -> BuildError:
    return BuildError(
        f"{folder} cannot be written: {error}; set MOE_OPS_CACHE to another folder, or name one "
        "by python -m moe_ops.csrc.build --out"
    )


def ensure(
    architecture: str, cache: Path, progress: Callable[[str], None] = lambda line: None
) -> Path:
    """The object of a family of GPUs, built into a folder for caches at the first use.

    Raises:
        BuildError: see `build`.
    """
    found = installed(architecture, cache)
    if found is not None:
        return found
    target = cached(architecture, cache)
    with only_one(target.parent, progress):
        if not target.is_file():  # another process may have built it meanwhile
            progress(
                f"building moe_ops's CUTLASS kernels for {architecture}, once, into {target}; "
                "this takes one to ten minutes"
            )
            build(architecture, target, progress)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("architectures", nargs="*", metavar="sm_90a", help=", ".join(FILES))
    parser.add_argument("--out", type=Path, default=SOURCES, help="where objects are written")
    given = parser.parse_args(arguments)
    unknown = set(given.architectures) - set(FILES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(FILES)}")
    for architecture in given.architectures or FILES:
        target = given.out / object_name(architecture)
        try:
            build(architecture, target, lambda line: print(line, file=sys.stderr, flush=True))
            for older in set(given.out.glob(f"{_stem(architecture)}*.so")) - {target}:
                older.unlink()
        except BuildError as error:
            print(f"moe_ops.csrc.build: {error}", file=sys.stderr)
            return 1
        print(target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
