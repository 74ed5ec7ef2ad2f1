"""Triton kernels that place pairs in DeepGEMM's contiguous layout. Imported at first launch only.

Legend: M tokens, S = M * top_k pairs (pair p is entry p % top_k of token p // top_k), E local experts, EP a power of
two not below E, CHUNK pairs handled at a time.

The layout: rows grouped by expert, every group padded to a multiple of ALIGNMENT rows; the pairs of an expert keep
their order. Two launches, as no program may wait for another: in the first each program counts the experts of its
own part of the pairs, in the second it sums the parts before its own. Counting all pairs once for each expert, as
kernels/triton_routing.py does beside other work, would leave the GPU idle meanwhile.
"""

import triton
import triton.language as tl

from moe_ops.kernels.triton_routing import local_expert, start_dependent, wait

PARTS_AT_A_TIME = tl.constexpr(64)  # each step waits for memory
_CALL = ["S", "E", "num_ids", "top_k", "stride_im", "stride_ik", "stride_map", "length"]


@triton.jit(do_not_specialize=_CALL)
def moe_ops_deep_gemm_count(
    counts_ptr,  # (programs, EP) written: pairs of each expert in each part
    ids_ptr,  # (M, top_k)
    map_ptr,  # (num_ids,) global id -> local id, or absent
    S,
    E,
    num_ids,
    top_k,
    stride_im,
    stride_ik,
    stride_map,
    length,  # pairs of a part, a multiple of CHUNK
    EP: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_MAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Count the pairs of each expert in each part."""
    start_dependent(DEPENDENT)
    part = tl.program_id(0)
    counts = tl.zeros((EP,), tl.int32)
    for start in range(part * length, tl.minimum(S, (part + 1) * length), CHUNK):
        p = start + tl.arange(0, CHUNK)
        e = local_expert(
            ids_ptr, map_ptr, p, p < S, E, num_ids, top_k,
            stride_im, stride_ik, stride_map, HAS_MAP,
        )  # fmt: skip
        counts += tl.histogram(tl.where(e >= 0, e, 0), EP, mask=e >= 0)
    tl.store(counts_ptr + part * EP + tl.arange(0, EP), counts)


@triton.jit(do_not_specialize=_CALL)
def moe_ops_deep_gemm_place(
    rows_ptr,  # (S,) written: the row of each pair, -1 where its expert is not here
    ends_ptr,  # (E,) written: the row behind each expert's last pair
    counts_ptr,  # (programs, EP)
    ids_ptr,
    map_ptr,
    S,
    E,
    num_ids,
    top_k,
    stride_im,
    stride_ik,
    stride_map,
    length,
    EP: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HAS_MAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Give each pair its row. An expert without pairs ends where it would begin, on a multiple of ALIGNMENT."""
    start_dependent(DEPENDENT)
    wait(DEPENDENT)
    part, parts = tl.program_id(0), tl.num_programs(0)
    group = tl.arange(0, EP)
    total = tl.zeros((EP,), tl.int32)
    before = tl.zeros((EP,), tl.int32)
    for start in range(0, parts, PARTS_AT_A_TIME):
        other = start + tl.arange(0, PARTS_AT_A_TIME)
        ok = (other < parts)[:, None] & (group >= 0)[None, :]
        counts = tl.load(counts_ptr + other[:, None] * EP + group[None, :], mask=ok, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((other < part)[:, None], counts, 0), 0)
    padded = tl.cdiv(total, ALIGNMENT) * ALIGNMENT
    first = tl.cumsum(padded) - padded
    if part == 0:
        tl.store(ends_ptr + group, first + total, mask=group < E)
    next_row = first + before
    lane = tl.arange(0, CHUNK)
    for start in range(part * length, tl.minimum(S, (part + 1) * length), CHUNK):
        p = start + lane
        e = local_expert(
            ids_ptr, map_ptr, p, p < S, E, num_ids, top_k,
            stride_im, stride_ik, stride_map, HAS_MAP,
        )  # fmt: skip
        mine = e[:, None] == group[None, :]
        row = tl.sum(tl.where(mine, next_row[None, :], 0), 1)
        earlier = (e[:, None] == e[None, :]) & (lane[None, :] < lane[:, None])
        row += tl.sum(earlier.to(tl.int32), 1)
        tl.store(rows_ptr + p, tl.where(e >= 0, row, -1), mask=p < S)
        next_row += tl.sum(mine.to(tl.int32), 0)


@triton.jit(do_not_specialize=["T", "E", "stride"])
def moe_ops_deep_gemm_batches(
    counts_ptr,  # (E,) int32 written: the counts, from 0 to T
    sizes_ptr,  # (E,)
    T,
    E,
    stride,
    CHUNK: tl.constexpr,  # of experts
    DEPENDENT: tl.constexpr,
):
    """Counts of batches (E, T, ..) as the products and the kernels around them take them."""
    start_dependent(DEPENDENT)
    e = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    size = tl.load(sizes_ptr + e * stride, mask=e < E, other=0)
    tl.store(counts_ptr + e, tl.minimum(tl.maximum(size, 0), T).to(tl.int32), mask=e < E)
