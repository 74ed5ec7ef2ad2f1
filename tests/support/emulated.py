"""Runs tests of the CPU's expert kernels with AVX-512 and AMX on emulated instructions.

    python -m tests.support.emulated [--sanitize] [arguments of pytest]

Builds csrc/cpu/experts.cpp over tests/support/emulated.h, which needs g++ and SIMDe's headers
(Debian: libsimde-dev), for processors with AVX2, in a minute or more. Values are those of the
instructions but for the order of sums in a tile; nothing can be said about time. With --sanitize
the build is one under AddressSanitizer and UndefinedBehaviorSanitizer, whose libraries must be
loaded first. Unoptimized it takes two minutes (with -O1 15, for the checks of all that is
inlined), and tests of a shape of each kind three more:

    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
        ASAN_OPTIONS=detect_leaks=0 python -m tests.support.emulated --sanitize
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import moe_ops
from moe_ops.backends.torch import cpu

SOURCES = Path(moe_ops.__file__).parent / "csrc" / "cpu"
TESTS = Path(__file__).parents[1] / "backends" / "torch" / "test_layer.py"
FLAGS = "-w -std=c++20 -mavx2 -mfma -mf16c -shared -fPIC -fopenmp"
PLAIN = "-Og -DMOE_OPS_MOST_ROWS=3"  # tiles of up to 3 rows alone: it compiles faster
SANITIZED = (
    "-O0 -DMOE_OPS_MOST_ROWS=3 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
)
# a step of 128 columns and the rest of one, codes and scales of each kind
SANITIZED_TESTS = (
    "(amx or avx512 and not avx512_bytes) and (test_schemes and 320-224 or "
    "quantized_activations and 96-160 or out_of_range or biases and gelu_tanh and bias1 or "
    "batch_invariant)"
)
ALL_TESTS = "(amx or avx512 and not avx512_bytes) and not that_become_bf16"
# what code for these instructions says of the processor, and its entries for AVX2 alone
REPLACED = (
    (r"#include <immintrin.h>", '#include "emulated.h"'),
    (r"#include <cpuid.h>", ""),
    (r'asm\("" : "\+v"\(v\)\);', ""),
    (r'__attribute__\(\(target\((?:"[^"]*"[\s\\]*)+\)\)\)', ""),
    (r'__builtin_cpu_(supports|is)\("[^"]*"\)', "1"),
    (r"static const bool has = \[\] \{.*?\n    \}\(\);", "static const bool has = true;"),
    (r"OF_AVX2\[\] = ENTRIES\(avx2, avx2::whole\)", "*const OF_AVX2 = OF_AVX512"),
)


def build(folder: Path, sanitize: bool) -> Path:
    """The library of the kernels on emulated instructions."""
    for source in SOURCES.iterdir():
        if source.suffix in (".cpp", ".h", ".inc"):
            text = source.read_text()
            for pattern, by in REPLACED:
                text = re.sub(pattern, by, text, flags=re.DOTALL)
            (folder / source.name).write_text(text)
    flags = [
        *FLAGS.split(),
        *(SANITIZED if sanitize else PLAIN).split(),
        f"-I{Path(__file__).parent}",
    ]
    library = folder / "emulated.so"
    command = ["g++", *flags, "-o", str(library), str(folder / "experts.cpp")]
    subprocess.run(command, check=True, capture_output=True)
    return library


def main(arguments: list[str]) -> int:
    sanitize = "--sanitize" in arguments
    rest = [argument for argument in arguments if argument != "--sanitize"]
    folder = Path(tempfile.mkdtemp())
    try:
        cpu._LIBRARY = build(folder, sanitize)
        found = ctypes.CDLL(str(cpu._LIBRARY))
        cpu.library = lambda: found  # type: ignore[assignment]
        cpu._kernels = dict  # type: ignore[assignment]  # grouped products in plain torch
        tests = SANITIZED_TESTS if sanitize else ALL_TESTS
        options = ["-q", "-s", "-W", "ignore", "-p", "no:cacheprovider", "-k", tests]
        return pytest.main([*options, str(TESTS), *rest])
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
