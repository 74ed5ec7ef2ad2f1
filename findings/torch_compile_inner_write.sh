#!/usr/bin/env bash
# A compiled function that writes to an inner tensor of a wrapper subclass and then uses the wrapper
# computes with the old numbers.
#
# Found in torch 2.13.0 (CPU), backends aot_eager and inductor.
#
# A traceable subclass holds tensors as attributes: here int8 numbers and their scale. Triple the
# scale, then multiply by the weight: the product was expected to see the new scale, as it does
# uncompiled and with the backend "eager". Dynamo gives the graph two inputs, the weight and the
# scale read from it; AOTAutograd takes the weight apart into its tensors and does not see that
# one of them is that other input. The product uses the scale as it was, the caller's is written
# afterwards: each call lags one write behind, in silence.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 numpy==2.4.6

cat >"$folder/finding.py" <<'PYTHON'
import torch
from torch.utils import _pytree


class Scaled(torch.Tensor):
    """Numbers and the scale that they share, as quantized tensors hold them."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Scaled(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = _pytree.tree_map_only(Scaled, lambda t: t.numbers * t.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def step(x, weight):
    weight.scale.mul_(3)
    return x @ weight


x = torch.ones(1, 2)
for backend in (None, "eager", "aot_eager", "inductor"):
    torch._dynamo.reset()
    weight = Scaled(torch.ones(2, 2, dtype=torch.int8), torch.ones(()))
    f = step if backend is None else torch.compile(step, backend=backend, fullgraph=True)
    with torch.no_grad():
        first, second = f(x, weight).tolist(), f(x, weight).tolist()
    print(f"{backend or 'not compiled'}: {first}, {second}, scale {weight.scale.item()}")
PYTHON

found=$(OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/finding.py" 2>"$folder/errors" ||
  cat "$folder/errors" >&2)
expected="not compiled: [[6.0, 6.0]], [[18.0, 18.0]], scale 9.0
eager: [[6.0, 6.0]], [[18.0, 18.0]], scale 9.0
aot_eager: [[2.0, 2.0]], [[6.0, 6.0]], scale 9.0
inductor: [[2.0, 2.0]], [[6.0, 6.0]], scale 9.0"
echo "$found"
if [ "$found" != "$expected" ]; then
  echo "expected:"
  echo "$expected"
  exit 1
fi
