"""FlashInfer's kernels for adapters of experts (bgmv_moe), built from the sources in its wheel for
the widths of a benchmark, without its Python package: nvcc alone, one file.

    python benchmarks/flashinfer_bgmv.py FOLDER   # builds FOLDER/flashinfer_bgmv.so

FOLDER holds a wheel or zip file with flashinfer/data. What is built there is taken as it is.

They compute the adapters' parts of a layer in four kernels: tokens made narrow and wide for w13,
then rows of pairs for w2, the last of which weighs and sums them. What a layer needs around them
is left out: their time is what it takes at least beside the layer without adapters.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moe_ops

RANK = 16
OBJECT = "flashinfer_bgmv.so"
INSIDE = ("flashinfer/data/csrc/bgmv_moe/", "flashinfer/data/include/")
# columns of the rows that are made narrow, tokens and pairs, and of those made wide, of pairs and
# of tokens: Qwen3's and Mixtral's, which alone are compiled
SHRINK = {0: (2048, 4096), 1: (768, 14336)}
EXPAND = {0: (1536, 28672), 1: (2048, 4096)}
_SOURCE = """
#include <cuda_bf16.h>
#include <cstdint>
#include "moe_bgmv_config.h"
#include "moe_bgmv_impl.cuh"
using T = nv_bfloat16;
extern "C" int shrink(T* y, T* x, T** w, int64_t* tokens, int64_t* experts, int64_t* adapters,
                      int64_t pairs, int64_t E, int64_t M, int64_t stride, int width,
                      int of_pairs, cudaStream_t s) {{
#define CASE(W, OF_PAIRS) \\
  if (width == W && of_pairs == OF_PAIRS) \\
    return moe_bgmv_shrink_sliced<W, {rank}, T, T, T, OF_PAIRS>( \\
        y, x, w, tokens, experts, adapters, pairs, 1, E, M, stride, 1.0f, s), \\
        cudaGetLastError();
  {shrink}
  return -1;
#undef CASE
}}
extern "C" int expand(float* y, T* x, T** w, int64_t* tokens, int64_t* experts,
                      int64_t* adapters, float* weights, int64_t* start, int64_t pairs, int64_t E,
                      int64_t M, int64_t stride, int width, int of_tokens, cudaStream_t s) {{
#define CASE(W, OF_TOKENS) \\
  if (width == W && of_tokens == OF_TOKENS) \\
    return moe_bgmv_expand_sliced<{rank}, W, T, T, OF_TOKENS>(y, x, w, tokens, experts, \\
        adapters, weights, start, pairs, 1, E, W, W, M, stride, 1.0f, s), cudaGetLastError();
  {expand}
  return -1;
}}
"""


def _cases(of: dict[int, tuple[int, ...]]) -> str:
    return " ".join([f"CASE({width}, {flag})" for flag in of for width in of[flag]])


def build(folder: Path) -> Path:
    """The object in a folder, built from an archive there if it is absent. Raises RuntimeError."""
    target = folder / OBJECT
    if target.is_file():
        return target
    for archive in filter(zipfile.is_zipfile, sorted(folder.iterdir())):
        with zipfile.ZipFile(archive) as opened, tempfile.TemporaryDirectory() as place:
            names = [n for n in opened.namelist() if n.startswith(INSIDE)]
            if f"{INSIDE[0]}moe_bgmv_impl.cuh" not in names:
                continue
            opened.extractall(place, names)
            source = Path(place, "bgmv.cu")
            cases = {"shrink": _cases(SHRINK), "expand": _cases(EXPAND)}
            source.write_text(_SOURCE.format(**cases, rank=RANK))
            command = ["nvcc", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-w"]
            command += ["-gencode", "arch=compute_90a,code=sm_90a", "-cudart", "static"]
            command += ["-split-compile", "0"]
            command += ["-DFLASHINFER_ENABLE_BF16", "-DFLASHINFER_ENABLE_F16"]
            command += [f"-I{Path(place, inside)}" for inside in INSIDE]
            made = Path(place, OBJECT)
            done = subprocess.run(
                [*command, str(source), "-o", str(made)], capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"nvcc failed: {(done.stdout + done.stderr)[-500:]}")
            target.write_bytes(made.read_bytes())
            return target
    raise RuntimeError(f"no archive in {folder} has {INSIDE[0]}moe_bgmv_impl.cuh")


class Adapters:
    """The kernels, and a stack as they take it: tables of addresses."""

    def __init__(self, folder: Path, stack: moe_ops.LoRAStack):
        self.library = ctypes.CDLL(str(build(folder)))
        self.stack = stack
        self.tables: list[Tensor] = []
        for matrix in stack[:4]:
            assert isinstance(matrix, Tensor)
            E, bytes_of = matrix.shape[1], matrix[0, 0].nbytes
            of_experts = torch.arange(E, dtype=torch.int64, device=matrix.device)
            self.tables.append(of_experts * bytes_of + matrix.data_ptr())

    def call(self, tokens: Any, hidden: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """What computes the parts (pairs, 2 I) and (M, K), fp32, of some tokens; `hidden` (pairs,
        I) is what w2 multiplies. Indices are made once, before.
        """
        x, weights, ids, adapter_ids = tokens
        (M, top_k), device = ids.shape, ids.device
        pairs = M * top_k
        of_pair = torch.arange(M, device=device).repeat_interleave(top_k)
        experts, adapters = ids.flatten().long(), adapter_ids.long()
        factors, start = weights.flatten().float(), of_pair.new_zeros(1)
        a13, b13, a2, b2 = self.stack[:4]
        assert isinstance(a13, Tensor) and isinstance(b13, Tensor)
        assert isinstance(a2, Tensor) and isinstance(b2, Tensor)
        E, N, K = a13.shape[1], b13.shape[2], a13.shape[3]

        def run(name: str, which: int, *given: Any) -> None:
            matrix = self.stack[which]
            assert isinstance(matrix, Tensor)
            y, rows, *more, width, flag = given
            values = [t.data_ptr() for t in (y, rows, self.tables[which], of_pair, experts)]
            values += [t.data_ptr() for t in (adapters, *more)]
            sizes = [pairs, E, M, matrix.stride(0)]
            stream = torch.cuda.current_stream().cuda_stream
            status = getattr(self.library, name)(
                *[ctypes.c_void_p(value) for value in values],
                *[ctypes.c_int64(size) for size in sizes],
                ctypes.c_int(width),
                ctypes.c_int(flag),
                ctypes.c_void_p(stream),
            )
            if status:
                raise RuntimeError(f"{name} of {width} columns: error {status}")

        def both() -> tuple[Tensor, Tensor]:
            u, v = [x.new_zeros(pairs, RANK) for _ in range(2)]
            first = torch.zeros(pairs, N, device=device)
            second = torch.zeros(M, K, device=device)
            run("shrink", 0, u, x, K, 0)
            run("expand", 1, first, u, factors, start, N, 0)
            run("shrink", 2, v, hidden, hidden.shape[1], 1)
            run("expand", 3, second, v, factors, start, K, 1)
            return first, second

        return both


def expected(stack: moe_ops.LoRAStack, tokens: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The same in fp64, for scales of 1."""
    x, weights, ids, adapter_ids = tokens
    a13, b13, a2, b2 = [t.double() for t in stack[:4] if t is not None]
    M, top_k = ids.shape
    first, second = [], x.new_zeros(M, b2.shape[2], dtype=torch.float64)
    for m in range(M):
        for j in range(top_k):
            e, n = int(ids[m, j]), int(adapter_ids[m])
            if n < 0:
                first.append(b13.new_zeros(b13.shape[2]))
                continue
            first.append(b13[n, e] @ (a13[n, e] @ x[m].double()))
            part = b2[n, e] @ (a2[n, e] @ hidden[m * top_k + j].double())
            second[m] += weights[m, j].double() * part
    return torch.stack(first), second


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
