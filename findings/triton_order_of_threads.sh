#!/usr/bin/env bash
# Triton 3.7 to 3.9 spread threads over another dimension than 3.6 does, where a load knows of no
# contiguous one: a matrix-vector product then moves its vector through shared memory.
#
# Found in triton 3.7.1, 3.8.0 and 3.9.0, beside 3.6.0; compiled for SM90, no GPU needed.
#
# A thread reads 16 bytes of each of eight rows, whose stride is a run-time number: of the
# dimensions (chunks, rows, numbers) the last alone is contiguous. Of the other two, Triton 3.6
# spreads threads over the first, and later versions over the last. So a warp of 3.6 holds 32 chunks
# of one row, and the numbers of the vector that a thread loads are those that it needs. A warp of
# 3.9 holds 4 chunks of eight rows, and each of four parts of the vector goes through shared memory,
# behind barriers; the other barriers belong to the sum over warps. Both versions give right sums.
# Where speed depends on it, the load must leave no choice: one of one dimension, reshaped
# afterwards, is spread alike by every version.
#
# What it cost kernels of moe_ops on an H200, int8 weights beside one token, stands in
# benchmarks/results/compare_tritons_one_token_before_NVIDIA_H200.json: 16.2 us of Qwen3's layer under
# Triton 3.6 were 26.3 under 3.9, 95.9 of Mixtral's 180.7. Kernels that leave no choice take 16.1 and
# 16.3, 93.0 and 94.5: compare_tritons_one_token_NVIDIA_H200.json.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 3.6.0 3.9.0; do
  "${PYTHON:-python3}" -m pip install -qq --no-deps --target "$folder/$version" "triton==$version"
done

cat >"$folder/gemv.py" <<'PYTHON'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def gemv(out, w, x, stride):
    """out = w @ x, for 8 rows of 512 numbers. A thread reads 16 bytes of a row at a time."""
    row, chunk, number = tl.arange(0, 8), tl.arange(0, 128), tl.arange(0, 4)
    at = chunk[:, None] * 4 + number[None, :]
    weights = tl.load(w + row[None, :, None] * stride + at[:, None, :])  # (128, 8, 4)
    w02, w13 = weights.reshape(128, 8, 2, 2).split()
    w0, w2 = w02.split()
    w1, w3 = w13.split()
    x02, x13 = tl.load(x + at).reshape(128, 2, 2).split()
    x0, x2 = x02.split()
    x1, x3 = x13.split()
    sums = w0 * x0[:, None] + w1 * x1[:, None] + w2 * x2[:, None] + w3 * x3[:, None]
    tl.store(out + row, tl.sum(sums, 0))


signature = {"out": "*fp32", "w": "*fp32", "x": "*fp32", "stride": "i32"}
aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
source = ASTSource(gemv, signature=signature, attrs=aligned)
options = {"num_warps": 4, "enable_fp_fusion": True}
asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
threads = re.search(r"sizePerThread = \[1, 1, 4\], threadsPerWarp = (\[.*?\])", asm["ttgir"])[1]
barriers = asm["ptx"].count("bar.sync")
print(f"triton {triton.__version__}: a warp is {threads}, {barriers} barriers")
PYTHON

found=$(for version in 3.6.0 3.9.0; do
  PYTHONPATH=$folder/$version TRITON_CACHE_DIR=$folder/cache \
    "${PYTHON:-python3}" "$folder/gemv.py" 2>"$folder/errors" || cat "$folder/errors" >&2
done)
expected="triton 3.6.0: a warp is [32, 1, 1], 4 barriers
triton 3.9.0: a warp is [4, 8, 1], 9 barriers"
echo "$found"
if [ "$found" != "$expected" ]; then
  echo "expected:"
  echo "$expected"
  exit 1
fi
