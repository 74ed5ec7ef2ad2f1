"""The tests of the CPU's expert kernels with those for NEON, which an emulator runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moe_ops

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER}"),
    pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR}"),
]
SOURCES = Path(moe_ops.__file__).parent / "csrc" / "cpu"
SUPPORT = Path(__file__).parents[2] / "support"
FLAGS = (
    "-O1 -std=c++20 -fopenmp -DMOE_OPS_MOST_ROWS=3"  # tiles of up to 3 rows: it compiles faster
)
# a step of 128 columns and the rest of one, codes and scales of each kind, tokens in parts
TESTS = (
    "avx2 and (test_schemes and 320-224 or quantized_activations and 96-160 or every_code or "
    "nan or any_code or out_of_range or gates or "
    "biases and (gelu_tanh or swigluoai) and dtype1 or threads)"
)


def test_values(tmp_path):
    program = tmp_path / "neon"
    sources = [str(SUPPORT / "neon.cpp"), str(SOURCES / "experts.cpp")]
    subprocess.run([COMPILER, *FLAGS.split(), "-o", str(program), *sources], check=True)
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "-k", TESTS]
    tests = str(Path(__file__).with_name("test_layer.py"))
    command = [sys.executable, str(SUPPORT / "neon.py"), str(program), *options, tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    assert " passed" in found.stdout
