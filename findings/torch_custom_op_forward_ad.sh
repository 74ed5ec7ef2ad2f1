#!/usr/bin/env bash
# Forward-mode differentiation of a custom operator returns zeros, where other functions raise.
#
# Found in torch 2.13.0, on a CPU.
#
# `torch.library.custom_op` defines x * x with a gradient by `register_autograd`. There is no way
# to register a forward-mode formula. One expects `torch.func.jvp`, `jacfwd` and dual tensors to
# raise, as they do for a `torch.autograd.Function` without `jvp` and for PyTorch's own operators
# without a formula, and as reverse mode does for a custom operator without a gradient. They return
# zeros, or no tangent, which stands for zero, without an error or a warning; so a model with one
# such operator has a wrong derivative instead of none.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0

cat >"$folder/finding.py" <<'PYTHON'
import warnings

import torch
from torch.autograd import forward_ad


@torch.library.custom_op("findings::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, grad):
    return 2 * ctx.saved_tensors[0] * grad


square.register_autograd(backward, setup_context=setup_context)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    backward = staticmethod(backward)


def dual(f):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones(3)))).tangent


def attempt(way):
    try:
        tangent = way()
    except (NotImplementedError, RuntimeError) as error:
        return type(error).__name__
    return tangent.tolist() if tangent is not None else None


x = torch.tensor([1.0, 2.0, 3.0])
found = {}
with warnings.catch_warnings():
    torch.func.jvp(torch.sin, (x,), (x,))  # torch.func warns once about itself
    warnings.simplefilter("error")
    for name, f in (("custom operator", square), ("autograd.Function", Square.apply)):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(f(leaf).sum(), leaf)
        found[name] = {
            "backward": grad.tolist(),
            "jvp": attempt(lambda: torch.func.jvp(f, (x,), (torch.ones(3),))[1]),
            "jacfwd": attempt(lambda: torch.func.jacfwd(f)(x).diagonal()),
            "dual": attempt(lambda: dual(f)),
        }
        print(f"{name}:", found[name])
right, zeros = [2.0, 4.0, 6.0], [0.0] * 3
assert list(found["custom operator"].values()) == [right, zeros, zeros, None]
assert list(found["autograd.Function"].values())[0] == right
assert all(isinstance(seen, str) for seen in list(found["autograd.Function"].values())[1:])
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
