"""One configuration of every Triton kernel compiles for each architecture, within its limits.

Compiled only: nothing runs, and no GPU is needed. Registers, spilled bytes and shared memory are
held against limits, and a kernel that no call reaches is a fault unless there is a reason. All
configurations, and other versions of Triton, take minutes: benchmarks/compile_matrix.py.
"""

import os
import subprocess
import sys

import pytest

from tests.support.paths import BENCHMARKS, ROOT

pytest.importorskip("triton.backends.nvidia")


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100, 120, "gfx942"])
def test_kernels_compile_and_fit(arch):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(BENCHMARKS / "compile_matrix.py"), "--one", "--jobs", "1"]
    answer = subprocess.run(
        [*command, "--arch", str(arch)], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert answer.returncode == 0, f"{answer.stdout[-4000:]}\n{answer.stderr[-4000:]}"
