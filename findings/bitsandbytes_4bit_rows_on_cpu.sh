#!/usr/bin/env bash
# On a CPU with AVX-512, bitsandbytes decodes 4-bit weights with the scales of other blocks where a
# row is not a whole number of blocks.
#
# Found in bitsandbytes 0.50.2 with torch 2.13.0, on a CPU with AVX-512 (AMD EPYC).
#
# Blocks of 64 numbers are counted through the flattened weight, so with rows of 96 a block holds
# the end of one row and the start of the next. One expects `dequantize_4bit` to undo
# `quantize_4bit`, as it does for the same bytes and scales in one row. With rows, it counts the
# blocks anew in each, 96 // 64 = 1 a row: of 6 scales, the last is never read. The error of nf4
# grows from 9% of unit-scale numbers to a quarter, in silence, and so does that of a `Linear4bit`
# in training; fp4 is alike. Rows of a multiple of 16 are hit, such as the 4304 inputs of the second
# layer of each MLP of siglip-so400m; rows of 100 are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile bitsandbytes==0.50.2

cat >"$folder/finding.py" <<'PYTHON'
import logging

import torch

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a kernel that it can download
from bitsandbytes.functional import dequantize_4bit, quantize_4bit  # noqa: E402
from bitsandbytes.nn import Linear4bit, Params4bit  # noqa: E402

assert torch.backends.cpu.get_cpu_capability() == "AVX512", "this finding needs AVX-512"


def error(found, wanted):
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


def errors(inputs, kind, dtype):
    """The relative errors of a weight decoded in rows and as one row, and of a linear layer."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, inputs).to(dtype), torch.randn(8, inputs).to(dtype)
    packed, state = quantize_4bit(weight, quant_type=kind)
    flat_packed, flat_state = quantize_4bit(weight.flatten(), quant_type=kind)
    assert torch.equal(packed, flat_packed) and torch.equal(state.absmax, flat_state.absmax)
    one_row = dequantize_4bit(flat_packed, flat_state).view(weight.shape)
    layer = Linear4bit(inputs, 64, bias=False, compute_dtype=dtype, quant_type=kind)
    layer.weight = Params4bit(weight, requires_grad=False, quant_type=kind, module=layer)
    found = (
        error(dequantize_4bit(packed, state), weight),
        error(one_row, weight),
        error(layer.to("cpu")(x), x.float() @ weight.float().t()),
    )
    print(
        f"{kind}, {dtype}, rows of {inputs}: error {found[0]:.3f}, as one row {found[1]:.3f}, of "
        f"a linear layer {found[2]:.3f}"
    )
    return found


blocks = torch.arange(1.0, 7.0).repeat_interleave(64).view(4, 96)  # block k holds k
decoded = dequantize_4bit(*quantize_4bit(blocks, quant_type="nf4"))
print("blocks of 1 to 6, at each 32nd number:", decoded[:, ::32].tolist())
assert torch.equal(decoded[:, ::32], torch.tensor([[k, k, k + 1.0] for k in (1, 2, 3, 4)]))
for kind in ("nf4", "fp4"):
    for dtype in (torch.float32, torch.bfloat16):
        for inputs in (64, 96, 100, 4304):
            rows, one_row, linear = errors(inputs, kind, dtype)
            assert one_row < 0.15
            if inputs in (96, 4304):
                assert rows > 1.5 * one_row and linear > 1.5 * one_row
            else:
                assert rows < 1.01 * one_row and linear < 1.3 * one_row
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
