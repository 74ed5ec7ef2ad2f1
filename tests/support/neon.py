"""Runs pytest with the CPU's expert kernels on an emulated processor with NEON.

    python tests/support/neon.py PROGRAM [arguments of pytest]

PROGRAM is tests/support/neon.cpp with the kernels, built for aarch64; qemu-aarch64 runs it. Its
kernels take the place of those with AVX2.
"""

import ctypes
import struct
import subprocess
import sys

import pytest

from moe_ops.backends.torch import layer

SYSROOT = "/usr/aarch64-linux-gnu"
BITS = {"bf16": 16, "int4": 4, "int4_any": 4, "mxfp4": 4, "nvfp4": 4}  # others: 8


class Emulated:
    """What layer.py uses of the library that ctypes loads."""

    def __init__(self, program: str) -> None:
        command = ["qemu-aarch64", "-L", SYSROOT, program]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        (found,) = struct.unpack("q", self.process.stdout.read(8))
        assert found == ctypes.sizeof(layer.Experts) + layer.CALL.size

    def moe_ops_cpu_experts_avx(self, most: int) -> int:
        return 2

    def moe_ops_cpu_experts_tiles(self) -> int:
        return 0

    def moe_ops_cpu_experts_scratch(self, form: int, call: bytes) -> int:
        return 0

    def moe_ops_cpu_experts_run(self, form: int, call: bytes, scratch: int) -> None:
        a, numbers = layer.Experts.from_address(form), layer.CALL.unpack(call)
        addresses, (x_row, M, top_k, _) = numbers[:15], numbers[15:]
        bits = BITS.get(layer._DECODERS[a.scheme], 8)
        sizes = [((M - 1) * x_row + a.K) * 2, M * top_k * 8, M * top_k * 4, a.mapped * 8]
        sizes.append(M * a.K * 2)
        for matrix, rows, columns in ((a.w13, 2 * a.I, a.K), (a.w2, a.K, a.I)):
            last_row = (a.E - 1) * matrix.expert + (rows - 1) * matrix.row
            of_bias = a.E * matrix.bias_expert * (4 if matrix.bias_type == 2 else 2)
            sizes += [last_row + columns * bits // 8, a.E * matrix.scale_expert or 4]
            sizes += [a.E * matrix.zero_expert, a.E * 4, of_bias]
        sizes = [size if at else 0 for at, size in zip(addresses, sizes, strict=True)]
        send = self.process.stdin
        send.write(ctypes.string_at(form, ctypes.sizeof(layer.Experts)) + call)
        send.write(struct.pack("15q", *sizes))
        for at, size in zip(addresses, sizes, strict=True):
            if at:
                send.write(ctypes.string_at(at, size))
        send.flush()
        out = self.process.stdout.read(sizes[4])
        assert len(out) == sizes[4], "the emulated kernels ended"
        ctypes.memmove(addresses[4], out, len(out))


if __name__ == "__main__":
    emulated = Emulated(sys.argv[1])
    layer.kernels = lambda: emulated
    sys.exit(pytest.main(sys.argv[2:]))
