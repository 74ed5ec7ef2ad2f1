"""One configuration of every Triton kernel compiles for each architecture, within its limits.

Compiled only: nothing runs, and no GPU is needed. Registers, spilled bytes and shared memory are
held against limits, and a kernel that no call reaches is a fault unless there is a reason. All
configurations, and other versions of Triton, take minutes: tools/compile_matrix.py.
"""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT, TOOLS

pytest.importorskip("triton.backends.nvidia")


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100, 120, "gfx942"])
def test_kernels_compile_and_fit(arch):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(TOOLS / "compile_matrix.py"), "--one", "--jobs", "1"]
    answer = subprocess.run(
        [*command, "--arch", str(arch)], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert answer.returncode == 0, f"{answer.stdout[-4000:]}\n{answer.stderr[-4000:]}"


BARRIERS = """
import compile_kernels as c
gpu, qwen3 = c.gpu_of(90, "NVIDIA H200"), c.SHAPES["qwen3"]
for scheme in ("int8_w8a16:channel", "int4_w4a16:g64:zp"):
    for one in c.compile_call(c.Call(qwen3, 1, scheme), gpu, 90):
        print(one.name, one.binary.asm["ptx"].count("bar.sync"))
"""
SHUFFLES = """
import compile_kernels as c
deepseek = c.RouterCall((256, 8, 7168), 1, choice=("sigmoid", True, 8, 4), correction_bias=True)
*_, one = c.compile_router(deepseek, c.gpu_of(90), 90)
print(one.name, one.binary.asm["ptx"].count("shfl.sync"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, kernels, most",
    [
        (BARRIERS, ["moe_ops_mixed_gemv1", "moe_ops_mixed_gemv2"] * 2, 8),
        (SHUFFLES, ["moe_ops_router_topk"], 40),
    ],
    ids=["barriers", "shuffles"],
)
def test_threads_hold_what_they_add(code, kernels, most):
    """Whatever order of dimensions a Triton prefers, 3.6 the first and later ones the last."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = [str(ROOT), str(TOOLS), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    found = [line.split() for line in answer.stdout.splitlines() if line.startswith("moe_ops")]
    assert [name for name, _ in found] == kernels
    assert all(int(count) <= most for _, count in found), answer.stdout
