"""Every Triton kernel compiles in one configuration for each architecture, within its limits.

For the installed Triton; nothing runs, and no GPU is needed. `make compile-matrix` compiles all
configurations with each supported version.
"""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytest.importorskip("triton.backends.nvidia")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_kernels_compile_and_fit(arch):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "benchmarks/compile_matrix.py", "--one", "--jobs", "1"]
    answer = subprocess.run(
        [*command, "--arch", str(arch)], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-3000:]
