"""Every Triton kernel compiles for SM80, SM89 and SM90 at the tiles picked there, within the GPU's
limits.

Compiled only: nothing runs, and no GPU is needed. Takes 130 s of one core in all. Left out to keep
it there: fp16 (compiles like bf16), static and weight-only scales, most shapes and row counts,
SM86 and SM120.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytest.importorskip("triton.backends.nvidia")
MAX_SPILLED = (
    96  # bytes a thread; the most when this bound was set: 24 with triton 3.9, 72 with 3.6
)
# a block's static and dynamic shared memory at most, CUDA C programming guide, table of compute
# capabilities
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
CODE = """
import json, sys, torch
sys.path.insert(0, "benchmarks")
from compile_kernels import SHAPES, Call, RouterCall, chip_of, compile_call, compile_router, usage
from moe_ops.kernels import triton_launch
from moe_ops.meta.scales import DEEP_GEMM_UE8M0
arch = int(sys.argv[1])
qwen3, gptoss = SHAPES["qwen3"], SHAPES["gptoss20"]
calls = [
    *[Call(qwen3, M) for M in (1, 64, 4096)],
    *[Call(qwen3, M, "fp8_block") for M in (1, 64, 4096)],
    Call(qwen3, 64, "fp8_channel", expert_map=True),
    Call(qwen3, 1024, "fp8_tensor"),
    Call(gptoss, 64, activation="swigluoai", bias=True, transposed=True, ids=torch.int64),
    Call(SHAPES["odd"], 8, dtype=torch.float32, activation="gelu_tanh"),
    Call(qwen3, 256, kind="batched_experts"),
    Call(gptoss, 512, "fp8_block", kind="grouped_linear"),
    Call(qwen3, 64, "int8_w8a8"),
    *[Call(qwen3, M, "int4_w4a16:g128:zp") for M in (1, 64, 1024)],
    Call(gptoss, 64, "mxfp4_w4a16", activation="swigluoai", bias=True),
    Call(qwen3, 256, "nvfp4_w4a16"),
    Call(qwen3, 64, "fp8_w8a16:block", kind="batched_experts"),
    Call(gptoss, 64, "int8_w8a16:g64:zp", kind="grouped_linear"),
    Call(qwen3, 64, "nvfp4", kind="batched_experts"),
    Call(qwen3, 1, "mxfp6_e3m2"),
    Call(qwen3, 64, "int4_w4a8"),
    Call(gptoss, 64, "mxfp4_w4a8", kind="grouped_linear"),
]
if arch >= 90:
    around = {"backend": "deep_gemm"}
    calls += [
        Call(qwen3, 4096, "fp8_block", **around),
        Call(SHAPES["dsv3"], 4096, activation="swiglustep", expert_map=True, **around),
        Call(qwen3, 64, "fp8_block", kind="batched_experts", **around),
        Call(qwen3, 4096, "fp8_block", layout=DEEP_GEMM_UE8M0, **around),
        Call(qwen3, 4096, "mxfp8", layout=DEEP_GEMM_UE8M0, **around),
    ]
deepseek = {"logits": torch.float32, "choice": ("sigmoid", True, 8, 4), "correction_bias": True}
calls += [
    *[RouterCall((8, 2, 4096), M) for M in (1, 8)],
    *[RouterCall((256, 8, 7168), M, **deepseek) for M in (1, 4)],
    RouterCall((60, 4, 1000), 16, torch.float32, torch.float32, bias=True),
]
told, rows = set(), []
for call in calls:
    compile_one = compile_router if isinstance(call, RouterCall) else compile_call
    for kernel in compile_one(call, chip_of(arch), arch):
        if kernel.binary.hash not in told:
            told.add(kernel.binary.hash)
            rows.append([str(call), kernel.binary.name, *usage(kernel.binary)])
print(json.dumps([rows, [f.__name__ for f in triton_launch._kernels().values()]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_kernels_compile_and_fit(arch):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), environment.get("PYTHONPATH")])
    )
    answer = subprocess.run(
        [sys.executable, "-c", CODE, str(arch)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert answer.returncode == 0, f"sm_{arch}:\n{answer.stderr[-4000:]}"
    rows, kernels = json.loads(answer.stdout.splitlines()[-1])
    for call, name, registers, spilled, shared in rows:
        where = f"sm_{arch} {name} ({registers} registers) of {call}"
        assert name.startswith("moe_ops_"), where
        assert spilled <= MAX_SPILLED, f"{where}: {spilled} bytes spilled"
        assert shared <= SHARED_MEMORY[arch], f"{where}: {shared} bytes of shared memory"
    # The kernels for many rows need SM90's copy engine, DeepGEMM SM90; no other may go untested.
    # test_flashinfer.py compiles those around FlashInfer's. Those of gluon_packed.py are written
    # for one version of Triton.
    elsewhere = ("_flashinfer_", "_gluon_", "_arrange")
    missing = {name for name in kernels if not any(part in name for part in elsewhere)}
    missing -= {name for _, name, *_ in rows}
    later = ("_large_", "_deep_gemm_") if arch < 90 else ()
    assert all(any(part in name for part in later) for name in missing), missing
