"""A Gluon kernel whose warps do nothing but part: what racecheck says of it, it says of every kernel that does so."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def one(out_ptr):
    gl.store(out_ptr, 1)


@gluon.jit
def two(out_ptr):
    gl.store(out_ptr + 1, 2)


@gluon.jit
def moe_ops_handover(out_ptr):
    gl.warp_specialize([(one, (out_ptr,)), (two, (out_ptr,))], [1], [24])


def run() -> None:
    out = torch.zeros(2, dtype=torch.int32, device="cuda")
    moe_ops_handover[(1,)](out, maxnreg=64)
    assert out.tolist() == [1, 2]
