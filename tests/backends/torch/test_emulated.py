"""The tests of the CPU's expert kernels with AVX-512 and AMX, whose instructions are emulated
where the processor lacks them.
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
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
    pytest.mark.skipif(
        not Path("/usr/include/simde/x86/avx512.h").exists(), reason="no libsimde-dev"
    ),
]
# a step of 128 columns and the rest of one, codes and scales of each kind, tokens in parts
TESTS = (
    "(amx or avx512 and not avx512_bytes) and (test_schemes and 320-224 or "
    "quantized_activations and 96-160 or nan or "
    "every_code or any_code or any_type or out_of_range or biases and bias1 or threads or "
    "batch_invariant)"
)


def test_values():
    kernels = layer.kernels()
    if kernels is not None and kernels.moe_ops_cpu_experts_in_use() == 1024:
        pytest.skip("this processor has them, and test_layer.py runs on them")
    command = [sys.executable, "-m", "tests.support.emulated", "-k", TESTS]
    root = Path(moe_ops.__file__).parents[1]
    # threads that wait would keep the other core from other tests: 100 s of processors, not 60
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    options = {"cwd": root, "env": environment, "capture_output": True, "text": True}
    found = subprocess.run(command, **options)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    assert " passed" in found.stdout
