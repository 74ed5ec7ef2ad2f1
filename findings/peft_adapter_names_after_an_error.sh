#!/usr/bin/env bash
# After a forward that raises, a PEFT model goes on using the `adapter_names` of that call.
#
# Found in peft 0.21.2 with torch 2.13.0, on a CPU.
#
# `model(x, adapter_names=[...])` chooses an adapter for each row of one call. When that call
# raises, say because memory ran out or a row was too long, one expects the next call without the
# argument to use the active adapter, as after a call that returns. The names instead stay on the
# model, as forward hooks of each layer that only the end of a successful call removes. The next
# call returns the rows of the failed one's adapters, here the base model's, without an error or a
# warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile peft==0.21.2

cat >"$folder/finding.py" <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, limit=None):
        y = self.linear(x)
        if limit is not None and len(x) > limit:
            raise ValueError("too many rows")
        return y


torch.manual_seed(0)
lora = LoraConfig(target_modules=["linear"], init_lora_weights=False)
model = get_peft_model(Net(), lora).eval()
x = torch.randn(2, 4)
adapted = model(x)
with model.disable_adapter():
    base = model(x)

names = ["__base__", "__base__"]
model(x, adapter_names=names)
after = model(x)
print("after a call that returned:", "adapted" if torch.equal(after, adapted) else "wrong")
assert torch.equal(after, adapted)
try:
    model(x, limit=1, adapter_names=names)
except ValueError:
    pass
after = model(x)
print("after a call that raised:", "the base model's" if torch.equal(after, base) else "adapted")
assert torch.equal(after, base) and not torch.equal(after, adapted)
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
