#!/usr/bin/env bash
# Autocast leaves `grouped_mm` alone: it computes in float32, and refuses what `mm` casts.
#
# Found in torch 2.13.0, by autocast of a CPU.
#
# Under `torch.autocast(..., torch.bfloat16)`, matrix products compute in bfloat16: `mm`, `bmm`,
# `einsum` and `linear` cast their operands. One expects the same of `grouped_mm`, a batch of such
# products. It returns float32 for float32 operands, so that experts stored in float32 gain nothing
# from autocast; and for what an autocast linear layer returns, bfloat16, beside float32 weights it
# raises, where `mm` and `bmm` cast.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0

cat >"$folder/finding.py" <<'PYTHON'
import torch
from torch.nn.functional import grouped_mm

ends = torch.tensor([4, 8], dtype=torch.int32)
x = torch.randn(8, 16)
weights = torch.randn(2, 16, 32)
seen = {}
with torch.autocast("cpu", dtype=torch.bfloat16):
    hidden = torch.nn.functional.linear(x, torch.randn(16, 16))
    assert hidden.dtype == torch.bfloat16
    for name, rows in (("float32", x), ("a linear layer's", hidden)):
        seen["mm", name] = torch.mm(rows, weights[0]).dtype
        seen["bmm", name] = torch.bmm(rows.view(2, 4, 16), weights).dtype
        try:
            seen["grouped_mm", name] = grouped_mm(rows, weights, offs=ends).dtype
        except RuntimeError as error:
            seen["grouped_mm", name] = str(error)
for (product, rows), result in seen.items():
    print(f"{product} of {rows} rows and float32 weights: {result}")
assert all(result == torch.bfloat16 for key, result in seen.items() if key[0] != "grouped_mm")
assert seen["grouped_mm", "float32"] == torch.float32
assert "same dtype" in seen["grouped_mm", "a linear layer's"]
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
