#!/usr/bin/env bash
# PyTorch rounds twice from float64 to float16: by way of float32.
#
# Found in torch 2.13.0 beside numpy 2.4.6, on a CPU.
#
# A cast is expected to return the nearest number of its format, as NumPy's does. A float64 just
# above the middle of two float16 numbers rounds to that very middle in float32 first, and from
# there to the even one, which is the farther. So does `torch.tensor(number, dtype=torch.float16)`
# of a Python float, and compiled code. bfloat16 is alike. So the cast of a float64 reference to 16
# bits is not always the best that a kernel can return.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile numpy==2.4.6

cat >"$folder/finding.py" <<'PYTHON'
import numpy as np
import torch

for dtype, bits in ((torch.float16, 10), (torch.bfloat16, 7)):
    number = 1 + 2.0 ** -(bits + 1) + 2.0**-40
    nearest = 1 + 2.0**-bits  # 1 is farther by 2**-39
    assert nearest - number < number - 1
    x = torch.full((8,), number, dtype=torch.float64)
    compiled = torch.compile(lambda x: x.to(dtype), backend="aot_eager")
    seen = {
        "cast": x.to(dtype)[0].item(),
        "one number": torch.tensor(number, dtype=dtype).item(),
        "compiled": compiled(x)[0].item(),
    }
    print(f"{number!r} to {dtype}: {seen}, nearest {nearest}")
    assert set(seen.values()) == {1.0}
number = np.float64(1 + 2.0**-11 + 2.0**-40)
print(f"NumPy, to float16: {float(number.astype(np.float16))}")
assert float(number.astype(np.float16)) == 1 + 2.0**-10
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
