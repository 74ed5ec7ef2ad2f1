"""A Gluon kernel whose warps part and meet at barriers, nothing else: what racecheck says of it,
it says of all that do."""

import torch

from moe_ops.kernels.device.gluon import fence_async_shared, gl, gluon, mbarrier


@gluon.jit
def one(out_ptr, full, empty, rounds):
    for i in range(rounds):
        mbarrier.wait(full, i & 1)
        mbarrier.arrive(empty, count=1)
    gl.store(out_ptr, 1)


@gluon.jit
def two(out_ptr, full, empty, rounds):
    for i in range(rounds):
        mbarrier.arrive(full, count=1)
        mbarrier.wait(empty, i & 1)
    gl.store(out_ptr + 1, 2)


@gluon.jit
def moe_ops_handover(out_ptr, rounds):
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, 1)
    mbarrier.init(empty, 1)
    fence_async_shared()
    args = (out_ptr, full, empty, rounds)
    gl.warp_specialize([(one, args), (two, args)], [1], [24])


def run() -> None:
    out = torch.zeros(2, dtype=torch.int32, device="cuda")
    moe_ops_handover[(4,)](out, 5, maxnreg=64)
    assert out.tolist() == [1, 2]
