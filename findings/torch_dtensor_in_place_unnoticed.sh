#!/usr/bin/env bash
# Writing to a DTensor leaves the version of its local tensor as it was: backward then takes the new
# numbers for those of the forward, where it would raise had the local tensor been written.
#
# Found in torch 2.13.0 (CPU, gloo, one rank).
#
# Autograd compares the version of each tensor that it saved with the version at backward, and
# raises if someone wrote to it. `to_local()` shares memory with its DTensor, so a write to either
# was expected to be noticed at both. A write to the local tensor is. One to the DTensor raises the
# version of the wrapper alone, as its operators run below the layer that counts: x * local, whose
# gradient is 1, then gives 3, in silence. Compiled, it depends on the backend: aot_eager counts the
# write at the local tensor and backward raises; inductor does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 numpy==2.4.6

cat >"$folder/finding.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


def gradient(write, compiled=None):
    """The gradient of x, of x * local; local is tripled in between: was 1, is 3."""
    local = torch.ones(2)
    weight = DTensor.from_local(local, mesh, [Shard(0)])
    x = torch.ones(2, requires_grad=True)
    y = (x * weight.to_local()).sum()
    if compiled:
        torch._dynamo.reset()
        write = torch.compile(write, backend=compiled)
    with torch.no_grad():
        write(weight)
    try:
        y.backward()
    except RuntimeError:
        return "raises"
    return x.grad.tolist()


def through_local(weight):
    weight.to_local().mul_(3)


def through_dtensor(weight):
    weight.mul_(3)


print("local written, eager:", gradient(through_local))
print("DTensor written, eager:", gradient(through_dtensor))
print("DTensor written, aot_eager:", gradient(through_dtensor, "aot_eager"))
print("DTensor written, inductor:", gradient(through_dtensor, "inductor"))
dist.destroy_process_group()
PYTHON

found=$(OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/finding.py" 2>"$folder/errors" ||
  cat "$folder/errors" >&2)
expected="local written, eager: raises
DTensor written, eager: [3.0, 3.0]
DTensor written, aot_eager: raises
DTensor written, inductor: [3.0, 3.0]"
echo "$found"
if [ "$found" != "$expected" ]; then
  echo "expected:"
  echo "$expected"
  exit 1
fi
