#!/usr/bin/env bash
# `item()`, `float()` and `bool()` of a DTensor's sum return the part of the own process.
#
# Found in torch 2.13.0, with two processes of gloo on a CPU.
#
# DTensor means that a tensor over several processes computes like one tensor: sums across a
# sharded dimension are left `Partial`, and are reduced when an operation needs their value. One
# expects `x.sum().item()` to be such a need, or to raise, as `numpy()` and `tolist()` do. It
# returns the sum of the local shard, another one in each process, and so do `float` and `int`, the
# maximum, the mean, the norm and `any()`. `(x.sum() + 0).item()` and `x.sum() == 10` are right, as
# these operations reduce. Issue 166638 of PyTorch asks for a reduction here and is open; an older
# one, 144054, calls `item()` of the local part intended. So `if x.isnan().any():` sends processes
# into different branches.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile numpy==2.4.6

cat >"$folder/finding.py" <<'PYTHON'
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def work(rank, path):
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{path}")
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 4.0]), mesh, [Shard(0)])
    seen = {
        "sum().item()": x.sum().item(),
        "int(sum())": int(x.sum()),
        "max().item()": x.max().item(),
        "mean().item()": x.mean().item(),
        "bool((x > 3).any())": bool((x > 3).any()),
        "(sum() + 0).item()": (x.sum() + 0).item(),
        "sum().full_tensor().item()": x.sum().full_tensor().item(),
    }
    everywhere = [None, None]
    dist.all_gather_object(everywhere, seen)
    dist.destroy_process_group()
    if rank == 0:
        expected = {
            "sum().item()": [3.0, 7.0],
            "int(sum())": [3, 7],
            "max().item()": [2.0, 4.0],
            "mean().item()": [1.5, 3.5],
            "bool((x > 3).any())": [False, True],
            "(sum() + 0).item()": [10.0, 10.0],
            "sum().full_tensor().item()": [10.0, 10.0],
        }
        for name in expected:
            found = [seen[name] for seen in everywhere]
            print(f"{name} of [1, 2 | 3, 4]: {found[0]} and {found[1]}")
            assert found == expected[name]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (os.path.join(folder, "store"),), nprocs=2)
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
