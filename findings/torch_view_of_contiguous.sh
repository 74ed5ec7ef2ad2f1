#!/usr/bin/env bash
# A contiguous tensor cannot always be viewed as bytes, and `contiguous()` does not help.
#
# Found in torch 2.13.0, on a CPU.
#
# `x.t().contiguous().view(torch.uint8)` was expected to work for float `x` of any shape, as it
# does for 2 rows: `contiguous()` is how one gives `view(dtype)` the strides that it asks for. For 1
# row it raises "self.stride(-1) must be 1". The column of shape (4, 1) has strides (1, 4), as
# those of a dimension of size 1 reach no element; `is_contiguous()` is True, `contiguous()`
# returns the same tensor, and `view(dtype)` alone still asks for the stride of that dimension. The
# way back fails too: 4 bytes of one row, strides (6, 1), are contiguous and no view of float32.
# Code that transposes, say, the scales of a weight before it stores them as bytes fails only for
# shapes with a 1. `clone(memory_format=torch.contiguous_format)` gives the strides asked for.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0

cat >"$folder/finding.py" <<'PYTHON'
import torch


def view(x, dtype):
    assert x.is_contiguous() and x.contiguous() is x
    try:
        found = list(x.view(dtype).shape)
    except RuntimeError as error:
        found = str(error)
    print(f"{list(x.shape)}, strides {x.stride()}, as {dtype}: {found}")
    return found


column = torch.randn(1, 4).t().contiguous()
row = torch.zeros(1, 6, dtype=torch.uint8)[:, :4].contiguous()
assert view(torch.randn(2, 4).t().contiguous(), torch.uint8) == [4, 8]
assert "self.stride(-1) must be 1" in view(column, torch.uint8)
assert view(column.clone(memory_format=torch.contiguous_format), torch.uint8) == [4, 4]
assert "self.stride(0) must be divisible by 4" in view(row, torch.float32)
assert view(row.clone(memory_format=torch.contiguous_format), torch.float32) == [1, 1]
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
