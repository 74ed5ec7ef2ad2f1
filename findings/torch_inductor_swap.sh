#!/usr/bin/env bash
# Two tensors that compiled code swaps in place come out as two copies of one.
#
# Found in torch 2.13.0 (CPU), backend inductor; eager and aot_eager swap them.
#
# `t = a.clone(); a.copy_(b); b.copy_(t)` swaps two buffers, say of a double-buffered cache. One
# expects the compiled function to swap them as the uncompiled one does: the copy was made before
# the first write. What the function returns is right, but b is written from a after a was, without
# an error or a warning: the old a is lost.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --no-compile torch==2.13.0 numpy==2.4.6

cat >"$folder/finding.py" <<'PYTHON'
import torch


def swap(a, b):
    t = a.clone()
    a.copy_(b)
    b.copy_(t)
    return a.sum() + 2 * b.sum()


torch.manual_seed(0)
first, second = torch.randn(4, 8), torch.randn(4, 8)
seen = {}
for backend in ("eager", "aot_eager", "inductor"):
    a, b = first.clone(), second.clone()
    torch._dynamo.reset()
    total = torch.compile(swap, backend=backend)(a, b)
    right = torch.allclose(total, second.sum() + 2 * first.sum(), rtol=1e-4, atol=1e-4)
    seen[backend] = (torch.equal(a, second), torch.equal(b, first), right)
    print(f"{backend}: a is b {seen[backend][0]}, b is a {seen[backend][1]}, result {right}")
    if backend == "inductor":
        assert torch.equal(b, second)  # both hold what b held
assert seen["eager"] == seen["aot_eager"] == (True, True, True)
assert seen["inductor"] == (True, False, True)
PYTHON

TORCHINDUCTOR_CACHE_DIR=$folder/cache "$folder/venv/bin/python" "$folder/finding.py"
