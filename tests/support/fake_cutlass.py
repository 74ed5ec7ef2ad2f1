"""The grouped GEMMs of csrc/cutlass in plain torch: what backend cutlass calls in tests on a CPU.

They read the arrays over experts from the addresses in the struct, as the kernels do: what the
setup kernel wrote is tested by what comes out. Alignments that the instructions need are checked.
"""

from __future__ import annotations

import ctypes
import re

import torch
from torch import Tensor

from moe_ops.backends.cutlass import library

E4M3 = torch.float8_e4m3fn
ALIGNMENT = 16  # bytes, of base addresses and leading dimensions
OUT = {"bf16": torch.bfloat16, "f16": torch.float16}


def at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """The tensor of `count` elements at an address."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    size = count * torch.empty(0, dtype=dtype).element_size()
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def matrix(address: int, rows: int, columns: int, stride: int, dtype: torch.dtype) -> Tensor:
    """(rows, columns) at an address, rows `stride` elements apart."""
    if not rows:
        return torch.empty(0, columns, dtype=dtype)
    flat = at(address, (rows - 1) * stride + columns, dtype)
    return flat.as_strided((rows, columns), (stride, 1))


class FakeLibrary:
    """What stands for the loaded object. `calls` has the name of each kernel that ran."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str):
        if not name.endswith("_run"):
            raise AttributeError(name)
        return lambda gemm: self.run(name.removesuffix("_run"), gemm._obj)

    def run(self, name: str, g: library.GroupedGemm) -> int:
        self.calls.append(name)
        kind = re.fullmatch(r"moe_ops_sm90_fp8_(bf16|f16)", name)
        assert kind, name
        out, E = OUT[kind[1]], g.groups
        assert g.sm_count > 0 and g.workspace % 64 == 0  # memory of a CPU is aligned to 64 bytes
        assert g.workspace_bytes >= 512 * g.sm_count
        at(g.workspace, g.workspace_bytes, torch.uint8).fill_(0xAB)  # the kernel writes it
        sizes = at(g.problem_sizes, 3 * E, torch.int32).view(E, 3).tolist()
        arrays = {n: at(getattr(g, n), E, torch.int64).tolist() for n in library.ARRAYS}
        for e, (m, n, k) in enumerate(sizes):
            one = {name: values[e] for name, values in arrays.items()}
            assert min(m, n, k) >= 0
            if m == 0:  # no tile: nothing of it is read
                continue
            assert k % ALIGNMENT == 0 and n % 8 == 0, (n, k)
            for name in ("a", "b", "d"):
                assert one[name] % ALIGNMENT == 0, name
            a = matrix(one["a"], m, k, one["stride_a"], E4M3).double()
            b = matrix(one["b"], n, k, one["stride_b"], E4M3).double()
            row = at(one["row_scale"], m if g.row_scale_is_vector else 1, torch.float32)
            column = at(one["column_scale"], n if g.column_scale_is_vector else 1, torch.float32)
            found = (a @ b.T) * row.double()[:, None] * column.double()
            matrix(one["d"], m, n, one["stride_d"], out).copy_(found.to(out))
        return 0


def install(monkeypatch) -> FakeLibrary:
    """Let backend cutlass be available on a CPU and call the fake."""
    fake = FakeLibrary()
    monkeypatch.setattr(library, "why_not", lambda: None)
    monkeypatch.setitem(library._loaded, -1, library.Gemms(fake, 132))
    return fake
