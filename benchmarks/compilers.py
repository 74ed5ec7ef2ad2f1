"""Counting the compilers that processes start: wrappers that stand before the real ones."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path

# what Inductor, Triton, DeepGEMM, FlashInfer and csrc/build call
NAMES = ("g++", "gcc", "c++", "cc", "clang", "clang++", "nvcc", "cicc", "ptxas")
# Triton brings a ptxas of its own, or two, and takes others by these variables
TRITON_TOOLS = {"TRITON_PTXAS_PATH": "ptxas", "TRITON_PTXAS_BLACKWELL_PATH": "ptxas-blackwell"}
_WRAPPER = """#!/bin/sh
echo {name} "$*" >> "$COMPILERS_LOG"
exec {real} "$@"
"""
# calls that ask a compiler for its version, or where its files are, and compile nothing
_QUESTION = re.compile(r"\S+( (--version|-v|-V|--help|-dump\w+|-print\S+))+")


class Compilers:
    """Wrappers of the compilers of this machine, in a folder of their own."""

    def __init__(self, folder: Path):
        self.folder, self._log = folder, folder / "log"
        self._tools: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            if real := shutil.which(name):
                self._wrap(name, real)
        triton = importlib.util.find_spec("triton")
        for variable, name in TRITON_TOOLS.items() if triton and triton.origin else ():
            real = Path(triton.origin).parent / "backends/nvidia/bin" / name
            if real.is_file():
                self._tools[variable] = str(self._wrap(name, str(real), folder / "triton"))
        self.forget()

    def _wrap(self, name: str, real: str, folder: Path | None = None) -> Path:
        wrapper = (folder or self.folder) / name
        wrapper.parent.mkdir(exist_ok=True)
        wrapper.write_text(_WRAPPER.format(name=name, real=shlex.quote(real)))
        wrapper.chmod(0o755)
        return wrapper

    @property
    def environment(self) -> dict[str, str]:
        """Variables of processes that are to be counted."""
        path = f"{self.folder}{os.pathsep}{os.environ.get('PATH', '')}"
        return {"PATH": path, "COMPILERS_LOG": str(self._log)} | self._tools

    def forget(self) -> None:
        """Count from zero."""
        self._log.write_text("")

    def calls(self) -> list[str]:
        """The command lines that compiled something, in order."""
        lines = self._log.read_text().splitlines()
        return [line for line in lines if not _QUESTION.fullmatch(line)]

    def counts(self) -> dict[str, int]:
        """How often each compiler compiled something."""
        return dict(sorted(Counter([line.split()[0] for line in self.calls()]).items()))
