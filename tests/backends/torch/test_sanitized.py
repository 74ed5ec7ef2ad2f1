"""The tests of the CPU's expert kernels with these under AddressSanitizer and
UndefinedBehaviorSanitizer. `make fuzz-sanitized` takes random calls, and tiles of all sizes.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moe_ops
from moe_ops.backends.torch import layer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(layer.kernels() is None, reason="not built, or no AVX2"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]
SOURCES = Path(moe_ops.__file__).parent / "csrc" / "cpu"
# Unoptimized, and without tiles of more than 3 rows, it compiles in a fifth of the time.
FLAGS = "-O0 -std=c++20 -shared -fPIC -fopenmp -DMOE_OPS_MOST_ROWS=3 -fsanitize=address,undefined"
# a step of 128 columns and the rest of one, codes and scales of each kind, tokens in parts
TESTS = (
    "test_schemes and 320-224 and (avx512--320 or avx2--320 or g32:zp or nvfp4 or block "
    "or int5 or int6) or "
    "quantized_activations and 96-160 and block-96 or out_of_range or biases and gelu_tanh-dtype1"
)
RUN = """
import sys, pytest
from moe_ops.backends.torch import cpu
cpu._LIBRARY = cpu.Path(sys.argv[1])
sys.exit(pytest.main(sys.argv[2:]))
"""


def runtime(name: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True)
    return found.stdout.strip()


def run_tests(library: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",  # the other core runs other tests
    }
    options = ["-q", "-s", "-p", "no:cacheprovider", "-W", "ignore", *arguments]
    command = [sys.executable, "-c", RUN, str(library), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_kernels_access_nothing_that_is_not_theirs(tmp_path):
    library = tmp_path / "sanitized.so"
    flags = [*FLAGS.split(), "-fno-sanitize-recover=undefined"]
    sources = [str(path) for path in SOURCES.glob("*.cpp")]
    subprocess.run(["g++", *flags, "-o", str(library), *sources], check=True)
    found = run_tests(library, str(Path(__file__).with_name("test_layer.py")), "-k", TESTS)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    assert " passed" in found.stdout
