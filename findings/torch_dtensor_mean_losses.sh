#!/usr/bin/env bash
# Mean losses of torch give a DTensor another gradient than a tensor: mse_loss, smooth_l1_loss and
# huber_loss, of rows that ranks share, as many times too large as there are ranks.
#
# Found in torch 2.13.0 (CPU, gloo, two ranks).
#
# A DTensor that shards its rows stands for the whole tensor, so a mean over it and the gradient of
# that mean were expected to be those of the whole; `(a - b).square().mean()` keeps to that. Beside
# it, the backward of mse_loss divides by the count of the rows that the rank holds: with two equal
# shards the loss is right and its gradient twice too large. Nothing raises or warns. Where the
# shards are unequal, the loss is wrong too, and that of binary_cross_entropy_with_logits with them:
# it averages the means of the ranks as if they held equally many rows. Sums are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 numpy==2.4.6

cat >"$folder/finding.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))


def value_and_gradient(loss, x):
    """Of the loss beside zeros; of a DTensor, gathered from both ranks."""
    x = x.detach().requires_grad_()
    value = loss(x, torch.zeros_like(x))
    value.backward()
    results = value.detach(), x.grad
    whole = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in results)
    return [[round(number, 2) for number in t.flatten().tolist()] for t in whole]


losses = {
    "mean": lambda a, b: (a - b).square().mean(),
    "mse_loss": F.mse_loss,
    "mse_loss, sum": lambda a, b: F.mse_loss(a, b, reduction="sum"),
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
}
for rows in ([4.0, 2.0, 2.0, 4.0], [0.0, 0.0, 3.0]):
    x = torch.tensor(rows)
    shards = distribute_tensor(x, mesh, [Shard(0)])
    for name, loss in losses.items():
        plain, sharded = value_and_gradient(loss, x), value_and_gradient(loss, shards)
        if rank == 0:
            print(f"{len(rows)} rows, {name}: plain {plain}, DTensor {sharded}")
dist.barrier()
dist.destroy_process_group()
PYTHON

found=$(cd "$folder" && export OMP_NUM_THREADS=1 &&
  { timeout 300 venv/bin/python finding.py 1 "$folder/ranks" >&2 2>"$folder/errors" & } &&
  timeout 300 venv/bin/python finding.py 0 "$folder/ranks" 2>>"$folder/errors" ||
  cat "$folder/errors" >&2)
expected="4 rows, mean: plain [[10.0], [2.0, 1.0, 1.0, 2.0]], DTensor [[10.0], [2.0, 1.0, 1.0, 2.0]]
4 rows, mse_loss: plain [[10.0], [2.0, 1.0, 1.0, 2.0]], DTensor [[10.0], [4.0, 2.0, 2.0, 4.0]]
4 rows, mse_loss, sum: plain [[40.0], [8.0, 4.0, 4.0, 8.0]], DTensor [[40.0], [8.0, 4.0, 4.0, 8.0]]
4 rows, smooth_l1_loss: plain [[2.5], [0.25, 0.25, 0.25, 0.25]], DTensor [[2.5], [0.5, 0.5, 0.5, 0.5]]
4 rows, huber_loss: plain [[2.5], [0.25, 0.25, 0.25, 0.25]], DTensor [[2.5], [0.5, 0.5, 0.5, 0.5]]
4 rows, bce_with_logits: plain [[3.07], [0.25, 0.22, 0.22, 0.25]], DTensor [[3.07], [0.25, 0.22, 0.22, 0.25]]
3 rows, mean: plain [[3.0], [0.0, 0.0, 2.0]], DTensor [[3.0], [0.0, 0.0, 2.0]]
3 rows, mse_loss: plain [[3.0], [0.0, 0.0, 2.0]], DTensor [[4.5], [0.0, 0.0, 6.0]]
3 rows, mse_loss, sum: plain [[9.0], [0.0, 0.0, 6.0]], DTensor [[9.0], [0.0, 0.0, 6.0]]
3 rows, smooth_l1_loss: plain [[0.83], [0.0, 0.0, 0.33]], DTensor [[1.25], [0.0, 0.0, 1.0]]
3 rows, huber_loss: plain [[0.83], [0.0, 0.0, 0.33]], DTensor [[1.25], [0.0, 0.0, 1.0]]
3 rows, bce_with_logits: plain [[1.48], [0.17, 0.17, 0.32]], DTensor [[1.87], [0.17, 0.17, 0.32]]"
echo "$found"
if [ "$found" != "$expected" ]; then
  echo "expected:"
  echo "$expected"
  exit 1
fi
