#!/usr/bin/env bash
# torch.func.linearize forgets the write of a custom operator that returns nothing: its tangents
# come from what the buffer held before.
#
# Found in torch 2.13.0 (CPU).
#
# An operator may be declared to write to an argument (mutates_args) and return nothing. In a
# function that fills a buffer with 7, lets the operator write 2 into it and multiplies by it, the
# tangent is 2: torch.func.jvp says so, and linearize was expected to. Its value is 2, but the
# function of tangents that it returns gives 7; with torch.empty in place of 7, it gives whatever
# memory held. linearize folds what does not depend on the tangents, and the write has no output
# that would keep it. An operator that returns the numbers instead is folded rightly.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 numpy==2.4.6

cat >"$folder/finding.py" <<'PYTHON'
import torch


@torch.library.custom_op("finding::double", mutates_args={"out"})
def double(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


@double.register_fake
def _(x, out):
    return None


@torch.library.custom_op("finding::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


def mutates(x):
    scale = torch.full_like(x, 7.0)
    double(x.detach(), scale)
    return scale * x


def returns(x):
    return doubled(x.detach()) * x


x = torch.ones(2)
for f in (returns, mutates):
    print(f"{f.__name__}: value", f(x).tolist())
    print("  jvp", torch.func.jvp(f, (x,), (x,))[1].tolist())
    value, push = torch.func.linearize(f, x)
    print("  linearize", value.tolist(), push(x).tolist())
PYTHON

found=$(OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/finding.py" 2>"$folder/errors" ||
  cat "$folder/errors" >&2)
expected="returns: value [2.0, 2.0]
  jvp [2.0, 2.0]
  linearize [2.0, 2.0] [2.0, 2.0]
mutates: value [2.0, 2.0]
  jvp [2.0, 2.0]
  linearize [2.0, 2.0] [7.0, 7.0]"
echo "$found"
if [ "$found" != "$expected" ]; then
  echo "expected:"
  echo "$expected"
  exit 1
fi
