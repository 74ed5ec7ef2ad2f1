"""Builds the CPU kernels into the package: C++ without dependencies, and optional. The CUDA
objects of csrc/cutlass that `make native` built are taken along; where CUTLASS_PATH is set and
there is an nvcc, those that are missing are built.

Where there is no compiler, or it fails, the package is pure Python and its CPU path uses torch's
own products: installing never fails for want of a kernel.
"""

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

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


def build(sources: list[Path], library: Path) -> str | None:
    """Compile the kernels; None, or why there is no library."""
    library.unlink(missing_ok=True)
    if platform.machine() not in MACHINES:
        return f"the kernels are for {' and '.join(MACHINES)}, this is {platform.machine()}"
    try:
        command = [*compiler(), *FLAGS, "-o", str(library), *map(str, sources)]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except (OSError, ValueError) as error:  # no such file, not executable, not quoted
        return str(error)
    if result.returncode == 0 and library.is_file():
        return None
    library.unlink(missing_ok=True)
    return f"{shlex.join(command)} ended with {result.returncode}: {result.stderr[-2000:]}"


def cuda_objects(root: Path) -> dict[str, str | None]:
    """The CUDA objects of these sources that are there: None of each. Where CUTLASS_PATH asks for
    it the others are compiled, for minutes: None, or why there is none.
    """
    spec = importlib.util.spec_from_file_location("csrc_build", root / CUDA_BUILD)
    cuda = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = cuda
    spec.loader.exec_module(cuda)
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
        reason = build([root / source for source in SOURCES], root / LIBRARY)
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
