#!/usr/bin/env bash
# In code that Dynamo traces, `hasattr(dtensor, "full_tensor")` is False, though calling it works.
#
# Found in torch 2.13.0, on a CPU.
#
# Code that takes DTensors and plain tensors alike, and does not import torch.distributed, asks for
# `full_tensor`. One expects the same answer in eager and in compiled code, or a graph break. In
# eager, a DTensor has the method. In traced code it has `device_mesh`, `isinstance` says DTensor,
# and `x.full_tensor()` runs; `hasattr` alone says False, with `fullgraph=True` and without. Such
# code silently takes the branch of plain tensors.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0

cat >"$folder/finding.py" <<'PYTHON'
import os
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "store")
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{path}")
    x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    answers = {}

    def ask(x):
        has = hasattr(x, "full_tensor"), hasattr(x, "device_mesh"), isinstance(x, DTensor)
        return x.full_tensor() * 2, has

    answers["eager"] = ask(x)
    answers["compiled"] = torch.compile(ask, backend="eager")(x)
    answers["fullgraph"] = torch.compile(ask, backend="eager", fullgraph=True)(x)
    for name, (full, has) in answers.items():
        print(f"{name}: has full_tensor {has[0]}, device_mesh {has[1]}; is a DTensor {has[2]}")
        assert type(full) is torch.Tensor and torch.equal(full, torch.full((4,), 2.0))
        assert has == (name == "eager", True, True)
    dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
