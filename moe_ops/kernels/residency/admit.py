"""The kernel that decides which experts of a call come into which slots. Imported at first launch
only.

Legend: E experts of a layer, S slots, P = M * top_k pairs of the call.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.device.blocks import local_expert
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.launch import Constant, Gpu, Launch, Pointer, Runtime, arguments, kernel
from moe_ops.kernels.residency.table import Table

FEW, MANY = tl.constexpr(128), tl.constexpr(1024)  # pairs that are counted at a time


@triton.jit
def count_pairs(
    first, ids_ptr, P, E, top_k, ids_stride_m, ids_stride_k, BLOCK_E: tl.constexpr, N: tl.constexpr
):
    """(BLOCK_E,): how many of N pairs from `first` on each expert has."""
    p = first + tl.arange(0, N)
    expert = local_expert(ids_ptr, None, p, p < P, E, E, top_k, ids_stride_m, ids_stride_k, 0)
    here = expert >= 0
    return tl.histogram(tl.where(here, expert, 0), BLOCK_E, mask=here)


@arguments
class Admit:
    table: Table  # written, but for slot_of and expert_of, which fetch.py enters arrivals in
    ids: Pointer  # (M, top_k); None in a further pass
    P: Runtime
    top_k: Runtime
    ids_stride_m: Runtime
    ids_stride_k: Runtime
    BLOCK_E: Constant
    BLOCK_S: Constant
    PDL: Constant


@kernel(Admit, pdl_first=True)
def moe_ops_admit_experts(
    slot_of_ptr,
    expert_of_ptr,
    order_ptr,
    wanted_ptr,
    served_ptr,
    arrivals_ptr,
    num_arrivals_ptr,
    counters_ptr,
    E,
    S,
    ids_ptr,
    P,
    top_k,
    ids_stride_m,
    ids_stride_k,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Admit experts as Table says. Grid: (1,). Waits for the kernel before the call, which may
    write ids, and is waited for by the kernel that fetches the arrivals.
    """
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    e, j = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_S)
    slot = tl.load(slot_of_ptr + e, mask=e < E, other=-1)
    slots = tl.load(order_ptr + j, mask=j < S, other=0)
    expert = tl.load(expert_of_ptr + slots, mask=j < S, other=-1)
    if ids_ptr is not None:
        ids = (ids_ptr, P, E, top_k, ids_stride_m, ids_stride_k)
        if P <= FEW:
            counts = count_pairs(0, *ids, BLOCK_E, FEW)
        else:
            counts = tl.zeros((BLOCK_E,), tl.int32)
            for first in range(0, P, MANY):
                counts += count_pairs(first, *ids, BLOCK_E, MANY)
        wanted = counts > 0
    else:
        wanted = tl.load(wanted_ptr + e, mask=e < E, other=0) != 0
    hit = wanted & (slot >= 0)
    hits = tl.sum(hit.to(tl.int32))
    missing = (wanted & (slot < 0)).to(tl.int32)
    rank = tl.cumsum(missing) - 1
    comes = (missing != 0) & (rank < S - hits)
    count = tl.sum(comes.to(tl.int32))

    kept = (expert >= 0) & (tl.gather(hit.to(tl.int32), tl.maximum(expert, 0), 0) != 0)
    free = (j < S) & ~kept
    free_rank = tl.cumsum(free.to(tl.int32)) - 1
    taken = free & (free_rank < count)
    used = (kept | taken) & (j < S)
    used_rank = tl.cumsum(used.to(tl.int32)) - 1
    place = tl.where(used, S - hits - count + used_rank, free_rank - count)

    tl.debug_barrier()  # all threads have loaded what is written now
    tl.store(order_ptr + place, slots, mask=j < S)
    tl.store(arrivals_ptr + 2 * rank, e, mask=comes)
    tl.store(arrivals_ptr + 2 * free_rank + 1, slots, mask=taken)
    tl.store(num_arrivals_ptr, count)
    tl.store(wanted_ptr + e, (wanted & ~hit & ~comes).to(tl.int32), mask=e < E)
    tl.store(served_ptr + e, tl.where(hit, slot, -1), mask=e < E)
    tl.atomic_add(counters_ptr, hits.to(tl.int64), sem="relaxed")
    tl.atomic_add(counters_ptr + 1, count.to(tl.int64), sem="relaxed")


def admit(
    table: Table,
    ids: Tensor | None,  # (M, top_k); None: the next pass over those of the pass before
    gpu: Gpu,
) -> Launch:
    """Choose the experts of a pass, and the slots of those that come."""
    numbers = (0, 1, 0, 0) if ids is None else (ids.numel(), ids.shape[1], *ids.stride())
    P, top_k, stride_m, stride_k = numbers
    args = Admit(
        table=table,
        ids=ids,
        P=P,
        top_k=top_k,
        ids_stride_m=stride_m,
        ids_stride_k=stride_k,
        BLOCK_E=max(triton.next_power_of_2(table.E), 32),
        BLOCK_S=max(triton.next_power_of_2(table.S), 32),
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_admit_experts, (1, 1, 1), args)
