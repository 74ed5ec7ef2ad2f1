"""Count the files of moe_ops that one warm eager call runs through, up to its last launch.

    python tools/files_of_a_call.py [--list]

A file counts if a Python function of it is entered. Kernels run under Triton's interpreter on a
CPU, and what they enter does not count: on a GPU they are compiled. In another checkout the
script counts that one's files.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import moe_ops
from moe_ops.kernels import launch

PACKAGE = str(Path(moe_ops.__file__).parent)


def files_of(call: Callable[[], Any]) -> list[str]:
    """Files of moe_ops, relative to it, that a call enters up to its last launch of a kernel."""
    call()  # warm
    entered: dict[str, None] = {}
    at_last_launch: list[str] = []
    start = launch._start

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE):
            entered[os.path.relpath(path, PACKAGE)] = None

    def run(*args: Any) -> Any:
        sys.setprofile(None)
        at_last_launch[:] = entered
        try:
            return start(*args)
        finally:
            sys.setprofile(note)

    with mock.patch.object(launch, "_start", run):
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    return sorted(at_last_launch)


def inference() -> Callable[[], Any]:
    """A call of backend triton with plain weights."""
    x, w13, w2 = torch.randn(5, 64), torch.randn(4, 64, 64), torch.randn(4, 64, 32)
    weights, ids = moe_ops.route(torch.randn(5, 4), 2)

    @torch.no_grad()
    def call() -> torch.Tensor:
        return moe_ops.fused_experts(x, w13, w2, weights, ids, backend="triton")

    return call


def training() -> Callable[[], Any]:
    """The forward and the backward pass of a call on fused kernels."""
    x, w13, w2 = torch.randn(5, 64), torch.randn(4, 64, 64), torch.randn(4, 64, 32)
    weights, ids = moe_ops.route(torch.randn(5, 4), 2)
    leaves = [t.requires_grad_() for t in (x, w13, w2, weights)]

    def call() -> None:
        moe_ops.fused_experts(x, w13, w2, weights, ids).sum().backward()
        for leaf in leaves:
            leaf.grad = None

    return call


CALLS = {"inference": inference, "training": training}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the files")
    arguments = parser.parse_args()
    for name, made in CALLS.items():
        files = files_of(made())
        print(f"{name}: {len(files)} files")
        if arguments.list:
            print(*[f"  {file}" for file in files], sep="\n")


if __name__ == "__main__":
    main()
