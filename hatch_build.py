"""Builds the CPU kernel into the package: one C++ file without dependencies, and optional.

Where there is no compiler, or it fails, the package is pure Python and its CPU path uses torch's
own products: installing never fails for want of a kernel.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "moe_ops/csrc/cpu/grouped_mm.cpp"
LIBRARY = "moe_ops/cpu_grouped_mm.so"
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


def build(source: Path, library: Path) -> str | None:
    """Compile the kernels; None, or why there is no library."""
    library.unlink(missing_ok=True)
    if platform.machine() != "x86_64":
        return f"the kernels are for x86-64, this is {platform.machine()}"
    try:
        command = [*compiler(), *FLAGS, "-o", str(library), str(source)]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except (OSError, ValueError) as error:  # no such file, not executable, not quoted
        return str(error)
    if result.returncode == 0 and library.is_file():
        return None
    library.unlink(missing_ok=True)
    return f"{shlex.join(command)} ended with {result.returncode}: {result.stderr[-2000:]}"


class KernelBuildHook(BuildHookInterface):
    def initialize(self, version, build_data):
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        root = Path(self.root)
        reason = build(root / SOURCE, root / LIBRARY)
        if reason is not None:
            self.app.display_warning(f"{LIBRARY} is not built: {reason}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"  # no Python ABI in it
        build_data["artifacts"].append(LIBRARY)
