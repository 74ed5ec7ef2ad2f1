"""What is compiled of the flags of several receivers: the interpreter runs none of it."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import re
from benchmarks import compile_kernels as c

STEPS = r"bar\\.sync|fence\\.acq_rel\\.sys|st\\.relaxed\\.sys|st\\.global|\\bbra\\b"
STEPS += r"|atom\\.[\\w.]*release"
R, found = 4, set()
for T in (128, 4096):
    for one in c.compile_any(c.ExchangeCall(R, T, 2048, 8), c.gpu_of(90), 90):
        steps = re.findall(STEPS, one.binary.asm["ptx"])
        at = [i for i, step in enumerate(steps) if step.startswith("fence")]
        released = [step for step in steps if "release" in step]
        assert len(at) == (not released) and len(released) in (0, R - 1), one.name
        if at:
            # all threads have stored before the barrier, thread 0 sets all flags behind a fence
            assert steps[at[0] - 1] == "bar.sync", one.name
            assert steps[at[0] + 1 : at[0] + R] == ["st.relaxed.sys"] * (R - 1), one.name
            assert steps.count("st.relaxed.sys") == R - 1, one.name
            found.add((one.name, T))
names = {name for name, _ in found}
assert any("push_sums" in n for n in names) and any("push_rows" in n for n in names), found
"""


@pytest.mark.slow
def test_one_fence_stands_between_rows_and_flags():
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=variables)
