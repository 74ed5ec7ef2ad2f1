#!/usr/bin/env bash
# Quantizing again what compressed-tensors dequantized changes every weight by a fifteenth, each time.
#
# Found in compressed-tensors 0.20.1 with torch 2.13.0, on a CPU.
#
# After symmetric int4 in groups, each weight is one of 16 multiples of its group's scale. One expects
# another pass to find them where they are, as it does with scales of absmax / 7: then a checkpoint
# can be dequantized and quantized anew. But `calculate_qparams` divides the largest magnitude by
# 7.5, which is no code. A positive extreme is cut to 7, and the group shrinks by 1 / 15; a negative
# one rounds to -8, and the group grows by 1 / 15. Most codes stay and their scales move, at each
# pass anew: after ten, the weights that began as a normal distribution have 1.3 times its norm.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile compressed-tensors==0.20.1

cat >"$folder/finding.py" <<'PYTHON'
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams

GROUP = 32


ARGS = QuantizationArgs(
    num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP
)


def once(weight, divisor=None):
    """A weight, quantized and dequantized; with scales of absmax / divisor, or the library's."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), ARGS)
    if divisor:
        scale = groups.abs().amax(-1) / divisor
    codes = quantize(weight, scale, zero_point, ARGS)
    return dequantize(codes, scale, zero_point, ARGS)


torch.manual_seed(0)
weight = torch.randn(64, 256)
values, with_sevenths = once(weight), once(weight, 7)
for number in range(2, 11):
    before, values = values, once(values)
    change = ((values - before).norm() / before.norm()).item()
    sevenths = (once(with_sevenths, 7) - with_sevenths).abs().max().item()
    norm = (values.norm() / weight.norm()).item()
    print(f"pass {number}: changes {change:.5f}, norm {norm:.3f}; by absmax / 7 {sevenths:.1e}")
    assert abs(change - 1 / 15) < 1e-4 and sevenths < 1e-5
assert 1.25 < norm < 1.35
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
