"""What is compiled of rows that others send: the interpreter runs none of it."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import re
from tools import compile_kernels as c

STEPS = r"bar\\.sync|fence\\.acq_rel\\.sys|st\\.relaxed\\.sys|st\\.global|\\bbra\\b"
STEPS += r"|atom\\.[\\w.]*release"
fenced, free = set(), set()
for R, T, K in ((1, 5, 96), (2, 4096, 2048), (4, 128, 2048), (4, 4096, 2048), (3, 5, 33)):
    for one in c.compile_any(c.ExchangeCall(R, T, K, 8), c.gpu_of(90), 90):
        ptx, constants = one.binary.asm["ptx"], one.constants
        if "push_sums" in one.name:
            assert c.usage(one.binary)[1] <= 16, one.name  # bytes spilled: 0, 8 by Triton 3.6
        steps = re.findall(STEPS, ptx)
        at = [i for i, step in enumerate(steps) if step.startswith("fence")]
        released = [step for step in steps if "release" in step]
        if R == 1:  # nobody to exchange with
            continue
        if constants.get("FLAGS") or constants.get("PACKED"):
            assert len(at) == (not released) and len(released) in (0, R - 1), one.name
            assert ("ld.global.cg" in ptx), one.name
        else:
            # rows that are their own flags: nothing waits for what was stored, and one thread
            # alone loads each element, past caches
            assert not at and not released, one.name
            assert "ld.volatile.global" in ptx and "ld.global.cg" not in ptx, one.name
            tiles = [constants["TILE"] * constants["BLOCK_K"]]
            if constants.get("TOKENS") and constants["TOP_K"]:
                tiles.append(constants["TOKENS"] * constants["BLOCK_TOP_K"])
            assert min(tiles) >= 32 * one.warps, (one.name, tiles, one.warps)
            if constants.get("WORD") == 32 and "push_rows" in one.name:
                assert "st.global.b16" not in ptx and "st.global.b8" not in ptx, one.name
            if K >= 2048 and T > 1 and constants.get("R") == R and "pairs" not in constants:
                assert "st.global.v4" in ptx, one.name  # rows are stored by 16 bytes
            free.add((one.name, T))
        if at:
            # all threads have stored before the barrier, thread 0 sets all flags behind a fence
            assert steps[at[0] - 1] == "bar.sync", one.name
            assert steps[at[0] + 1 : at[0] + R] == ["st.relaxed.sys"] * (R - 1), one.name
            assert steps.count("st.relaxed.sys") == R - 1, one.name
            fenced.add((one.name, T))
for name in ("push_sums", "push_rows", "push_scatter"):
    assert any([name in n for n, _ in free]), free
for name in ("push_rows", "push_scatter"):
    assert any([name in n for n, _ in fenced]), fenced
"""


@pytest.mark.slow
def test_rows_wait_for_flags_or_are_their_own():
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=variables)
