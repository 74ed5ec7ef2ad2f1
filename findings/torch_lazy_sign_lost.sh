#!/usr/bin/env bash
# A conjugate or negative view loses its sign on its way out of the process: a worker of a
# DataLoader, torch.export.save, DLPack and safetensors hand on the bytes without the pending sign.
#
# Found in torch 2.13.0 (CPU) and safetensors 0.8.0, with numpy 2.4.6.
#
# `z.conj()` writes nothing: it shares the bytes of `z` and carries a conjugate bit. So does the
# imaginary part of it, with a negative bit. Expected: whoever takes the bytes resolves the bit
# first, as torch.save keeps it, or raises, as `.numpy()` does. What happens instead, in silence:
# - A DataLoader with a worker yields other numbers than one without: a tensor goes through shared
#   memory as storage, offset, shape and strides (torch.multiprocessing's queues do the same).
# - A program that torch.export.save wrote computes with another buffer than the one it was.
# - DLPack refuses a conjugate view, but passes a negative one on as its positive bytes.
# - safetensors writes the bytes of a conjugate view, which is contiguous and so not refused.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 numpy==2.4.6 safetensors==0.8.0

cat >"$folder/sign.py" <<'PYTHON'
import io

import numpy
import safetensors.torch
import torch
from torch.utils.data import DataLoader

z = torch.tensor([1 + 2j, 3 + 4j])
conjugate, negative = z.conj(), z.conj().imag


class Multiply(torch.nn.Module):
    def __init__(self, by):
        super().__init__()
        self.register_buffer("by", by)

    def forward(self, x):
        return x * self.by


def through_export(by):
    file = io.BytesIO()
    program = torch.export.export(Multiply(by), (torch.ones(2),))
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()(torch.ones(2))


def through_loader(tensor, workers):
    context = "fork" if workers else None
    loader = DataLoader([tensor], None, num_workers=workers, multiprocessing_context=context)
    return next(iter(loader))


def through_torch_save(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


for name, tensor in (("conjugate", conjugate), ("negative", negative)):
    print(f"{name}: {tensor.tolist()}")
    print("  torch.save", through_torch_save(tensor).tolist())
    print("  DataLoader", through_loader(tensor, 0).tolist())
    print("  DataLoader, a worker", through_loader(tensor, 1).tolist())
    print("  torch.export.save", through_export(tensor).tolist())
    if name == "negative":
        print("  DLPack", torch.from_dlpack(tensor).tolist())
        print("  DLPack, numpy", numpy.from_dlpack(tensor).tolist())
    else:
        saved = safetensors.torch.save({"z": tensor})
        print("  safetensors", safetensors.torch.load(saved)["z"].tolist())
PYTHON

found=$(OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/sign.py" 2>"$folder/errors" ||
  cat "$folder/errors" >&2)
expected="conjugate: [(1-2j), (3-4j)]
  torch.save [(1-2j), (3-4j)]
  DataLoader [(1-2j), (3-4j)]
  DataLoader, a worker [(1+2j), (3+4j)]
  torch.export.save [(1+2j), (3+4j)]
  safetensors [(1+2j), (3+4j)]
negative: [-2.0, -4.0]
  torch.save [-2.0, -4.0]
  DataLoader [-2.0, -4.0]
  DataLoader, a worker [2.0, 4.0]
  torch.export.save [2.0, 4.0]
  DLPack [2.0, 4.0]
  DLPack, numpy [2.0, 4.0]"
echo "$found"
if [ "$found" != "$expected" ]; then
  echo "expected:"
  echo "$expected"
  exit 1
fi
