"""Builds the CPU kernel into the package: one C++ file without dependencies, and optional.

Where there is no compiler the package is pure Python and its CPU path uses torch's own products.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "moe_ops/csrc/cpu/grouped_mm.cpp"
LIBRARY = "moe_ops/cpu_grouped_mm.so"


class KernelBuildHook(BuildHookInterface):
    def initialize(self, version, build_data):
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
        library = Path(self.root, LIBRARY)
        library.unlink(missing_ok=True)
        if platform.machine() != "x86_64" or compiler is None:
            self.app.display_warning(f"{LIBRARY} is not built: it needs x86-64 and a C++ compiler")
            return
        # no -march: the kernels name their instruction sets themselves and are entered only where
        # these exist
        flags = ["-O3", "-std=c++20", "-shared", "-fPIC", "-fopenmp"]
        command = [compiler, *flags, "-o", str(library), str(Path(self.root, SOURCE))]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            self.app.display_warning(f"{LIBRARY} is not built: {result.stderr[-2000:]}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"  # no Python ABI in it
        build_data["artifacts"].append(LIBRARY)
