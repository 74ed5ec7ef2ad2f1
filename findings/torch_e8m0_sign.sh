#!/usr/bin/env bash
# PyTorch's cast to float8_e8m0fnu, the scales of MX formats, drops the sign and accepts zero.
#
# Found in torch 2.13.0 beside ml_dtypes 0.6.0 and numpy 2.4.6, on a CPU.
#
# E8M0 holds powers of two from 2^-127 to 2^127 and NaN: neither a sign nor a zero. The
# specification does not say how to cast to it. One expects NaN for what the format cannot hold:
# PyTorch itself returns it above the largest number, and ml_dtypes, whose type of that name is the
# one of NumPy and JAX, for -2 and 0 as well. In PyTorch, -2 becomes 2 and zero becomes 2^-127,
# without an error: a scale that went wrong before the cast is an ordinary one after it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile numpy==2.4.6 ml_dtypes==0.6.0

cat >"$folder/finding.py" <<'PYTHON'
import math

import ml_dtypes
import numpy as np
import torch

HELD = [1.0, 3.0, 0.75, 2.0**-127, 2.0**127]  # with rounding
TOO_LARGE = [1.75 * 2.0**127, math.inf]
OTHERS = {-2.0: 2.0, -0.75: 1.0, -(2.0**-127): 2.0**-127, 0.0: 2.0**-127}

numbers = [*HELD, *TOO_LARGE, *OTHERS]
others = np.array(numbers, np.float32).astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
for dtype in (torch.float32, torch.float64, torch.bfloat16):
    cast = torch.tensor(numbers, dtype=dtype).to(torch.float8_e8m0fnu).float()
    for number, found, other in zip(numbers, cast.tolist(), others.tolist(), strict=True):
        if dtype == torch.float32:
            print(f"{number:.4g}: torch {found:.4g}, ml_dtypes {other:.4g}")
        if number in HELD:
            assert found == other
        elif number in TOO_LARGE:
            assert math.isnan(found) and math.isnan(other)
        else:
            assert found == OTHERS[number] and math.isnan(other)
PYTHON
OMP_NUM_THREADS=1 "$python" "$folder/finding.py"
