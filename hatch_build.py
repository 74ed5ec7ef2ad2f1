"""Builds the CPU kernels into the package: C++ without dependencies, and optional. The CUDA
objects of csrc/cutlass that `make native` built are taken along; where CUTLASS_PATH is set and
there is an nvcc, those that are missing are built.

Where there is no compiler, or it fails, the package is pure Python and its CPU path uses torch's
own products: installing never fails for want of a kernel.

    python hatch_build.py

builds the CPU kernels into this checkout, unless those of its sources are there.
"""

import ctypes
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object

SOURCES = ("moe_ops/csrc/cpu/grouped_mm.cpp", "moe_ops/csrc/cpu/experts.cpp")
LIBRARY = "moe_ops/cpu_grouped_mm.so"
MACHINES = ("x86_64", "aarch64")
CUDA_BUILD = "moe_ops/csrc/build.py"
# no -march: the kernels name their instruction sets themselves and are entered only where these
# exist
FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-fopenmp")


def compiler() -> list[str]:
    """The compiler and its first arguments: CXX, which may be "ccache g++", else the one on PATH.

    Raises:
        ValueError: there is none, or CXX has an open quotation mark.
    """
    command = shlex.split(os.environ.get("CXX", ""))
    if command:
        return command
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise ValueError("there is no g++ or c++ on PATH, and CXX is not set")
    return [found]


def build(sources: list[Path], library: Path, fingerprint: str = "") -> str | None:
    """Compile the kernels, which say that they are of the sources of this fingerprint; None, or
    why there is no library. Another process finds the one before or a whole one.
    """
    new = library.with_name(f".{library.name}.{os.getpid()}")
    try:
        reason = _compile(sources, new, fingerprint)
        if reason is None:
            new.replace(library)
        else:
            library.unlink(missing_ok=True)
        return reason
    finally:
        new.unlink(missing_ok=True)


def _compile(sources: list[Path], library: Path, fingerprint: str) -> str | None:
    if platform.machine() not in MACHINES:
        return f"the kernels are for {' and '.join(MACHINES)}, this is {platform.machine()}"
    flags = [*FLAGS, f'-DMOE_OPS_CPU_SOURCES="{fingerprint}"']
    try:
        command = [*compiler(), *flags, "-o", str(library), *map(str, sources)]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except (OSError, ValueError) as error:  # no such file, not executable, not quoted
        return str(error)
    if result.returncode == 0 and library.is_file():
        return None
    return f"{shlex.join(command)} ended with {result.returncode}: {result.stderr[-2000:]}"


def csrc_build(root: Path):
    """moe_ops/csrc/build.py, without importing moe_ops and torch."""
    spec = importlib.util.spec_from_file_location("csrc_build", root / CUDA_BUILD)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build_cpu(root: Path) -> str | None:
    """The CPU kernels of a checkout; None, or why there are none."""
    sources = [root / source for source in SOURCES]
    return build(sources, root / LIBRARY, csrc_build(root).cpu_fingerprint())


def cuda_objects(root: Path) -> dict[str, str | None]:
    """The CUDA objects of these sources that are there: None of each. Where CUTLASS_PATH asks for
    it the others are compiled, for minutes: None, or why there is none.
    """
    cuda = csrc_build(root)
    reasons: dict[str, str | None] = {}
    for architecture in cuda.FILES:
        library = root / Path(CUDA_BUILD).parent / "cutlass" / cuda.object_name(architecture)
        name = str(library.relative_to(root))
        if library.is_file():
            reasons[name] = None
        elif os.environ.get("CUTLASS_PATH"):
            try:
                cuda.build(architecture, library)
                reasons[name] = None
            except cuda.BuildError as error:
                reasons[name] = str(error)
    return reasons


class KernelBuildHook(BuildHookInterface):
    def initialize(self, version, build_data):
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        root = Path(self.root)
        reason = build_cpu(root)
        built = [LIBRARY] if self.built(LIBRARY, reason) else []
        built += [name for name, why in cuda_objects(root).items() if self.built(name, why)]
        if built:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-linux_{platform.machine()}"  # no Python ABI in it
            build_data["artifacts"] += built

    def built(self, library, reason):
        if reason is not None:
            self.app.display_warning(f"{library} is not built: {reason}")
        return reason is None


def main() -> int:
    root = Path(__file__).resolve().parent
    if not sys.platform.startswith("linux"):
        return 0
    try:
        of = ctypes.CDLL(str(root / LIBRARY)).moe_ops_cpu_sources
        of.restype = ctypes.c_char_p
        if of().decode() == csrc_build(root).cpu_fingerprint():
            return 0
    except (OSError, AttributeError):  # none that loads, or one of before they said
        pass
    print(f"building {root / LIBRARY}, for a minute", flush=True)
    reason = build_cpu(root)
    if reason is not None:
        print(f"{LIBRARY} is not built: {reason}", file=sys.stderr)
    return reason is not None


if __name__ == "__main__":
    raise SystemExit(main())
