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
BITS = dict.fromkeys(layer._DECODERS, 8) | {"bf16": 16, "int5": 5, "int6": 6}
BITS |= dict.fromkeys(("int4", "int4_any", "int4_minima", "mxfp4", "nvfp4", "levels"), 4)


class Emulated:
    """What layer.py uses of the library that ctypes loads."""

    def __init__(self, program: str) -> None:
        command = ["qemu-aarch64", "-L", SYSROOT, program]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        (found,) = struct.unpack("q", self.process.stdout.read(8))
        assert found == ctypes.sizeof(layer.Experts) + layer.CALL.size

    def moe_ops_cpu_experts_avx(self, most: int) -> int:
        return 2

    def moe_ops_cpu_experts_as_bf16(self, as_bf16: int) -> None:
        pass

    def moe_ops_cpu_experts_in_use(self) -> int:
        return 2

    def moe_ops_cpu_experts_scratch(self, form: int, call: bytes) -> int:
        return 0

    def moe_ops_cpu_experts_run(self, form: int, call: bytes, scratch: int) -> None:
        a, numbers = layer.Experts.from_address(form), layer.CALL.unpack(call)
        addresses, (x_row, weights_row, ids_row, M, top_k, _) = numbers[:22], numbers[22:]
        data, scales, biases = [], [], []
        for matrix, rows, columns in ((a.w13, 2 * a.I, a.K), (a.w2, a.K, a.I)):
            bits = BITS[layer._DECODERS[matrix.decoder]]
            last_row = (a.E - 1) * matrix.expert + (rows - 1) * matrix.row
            data.append(last_row + columns * bits // 8)
            scales += [a.E * matrix.scale_expert or 4, a.E * matrix.zero_expert, a.E * 4]
            scales += [a.E * matrix.super_expert, 0]
            biases.append(a.E * matrix.bias_expert * (4 if matrix.bias_type == 2 else 2))
        of_weights = ((M - 1) * weights_row + top_k) * (4 if a.weights_type == 2 else 2)
        of_ids = ((M - 1) * ids_row + top_k) * a.ids_bytes
        sizes = [M * a.K * (4 if a.wide else 2), ((M - 1) * x_row + a.K) * 2, *data]
        sizes += [of_weights, of_ids, *scales, 0, 0, 12 * a.E, *biases, a.mapped * 8]
        sizes = [size if at else 0 for at, size in zip(addresses, sizes, strict=True)]
        send = self.process.stdin
        send.write(ctypes.string_at(form, ctypes.sizeof(layer.Experts)) + call)
        send.write(struct.pack("22q", *sizes))
        for at, size in zip(addresses, sizes, strict=True):
            if at:
                send.write(ctypes.string_at(at, size))
        send.flush()
        out = self.process.stdout.read(sizes[0])
        assert len(out) == sizes[0], "the emulated kernels ended"
        ctypes.memmove(addresses[0], out, len(out))


if __name__ == "__main__":
    emulated = Emulated(sys.argv[1])
    layer.kernels = lambda: emulated
    sys.exit(pytest.main(sys.argv[2:]))
