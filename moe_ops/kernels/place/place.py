"""Kernels that place pairs in the contiguous layout. Imported at first launch only.

Legend: M tokens, S = M * top_k pairs (pair p is entry p % top_k of token p // top_k), E local
experts, BLOCK_E a power of two, at least E, CHUNK pairs handled at a time.

The contiguous layout: rows grouped by expert, every group padded to a multiple of ALIGNMENT rows;
the pairs of an expert keep their order. There are two launches, because no program may wait for
another: in the first, each program counts the experts in its part of the pairs; in the second, it
sums the counts of the parts before its own, and counts what precedes its share of that part.
kernels/place/sort.py counts all pairs once for each expert, beside other work; here that would
leave the GPU idle.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.device.blocks import local_expert
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.launch import (
    Constant,
    Gpu,
    Launch,
    Pointer,
    Runtime,
    arguments,
    kernel,
    unprefixed,
)
from moe_ops.kernels.place.layout import MAX_PARTS, Layout, block_e, index_parts
from moe_ops.meta.workspace import cdiv, round_up
from moe_ops.ops.args import BatchedExpertsArgs

CHUNK = 128
SHARE = 4 * CHUNK  # pairs of a part that one program places
COUNTED = tl.constexpr(4 * CHUNK)  # pairs counted at a time
PARTS_PER_LOAD = tl.constexpr(64)  # each step of the loop over parts waits for memory


@unprefixed
class Pairs(NamedTuple):
    """The pairs, and how programs share them."""

    ids: Pointer  # (M, top_k)
    map: Pointer  # (num_ids,) global id -> local id, or None
    S: Runtime
    E: Runtime
    num_ids: Runtime
    top_k: Runtime
    ids_stride_m: Runtime
    ids_stride_k: Runtime
    map_stride: Runtime
    part_size: Runtime  # pairs of a program, a multiple of CHUNK
    BLOCK_E: Constant
    CHUNK: Constant


@triton.jit
def count_experts(
    first, end,
    ids_ptr, map_ptr, E, num_ids, top_k, ids_stride_m, ids_stride_k, map_stride,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """(BLOCK_E,): how many of the pairs from `first` to `end` each expert has."""
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(first, end, COUNTED):
        p = start + tl.arange(0, COUNTED)
        e = local_expert(
            ids_ptr, map_ptr, p, p < end, E, num_ids, top_k,
            ids_stride_m, ids_stride_k, map_stride,
        )  # fmt: skip
        counts += tl.histogram(tl.where(e >= 0, e, 0), BLOCK_E, mask=e >= 0)
    return counts


@arguments
class Count:
    counts: Pointer  # (programs, BLOCK_E), written: pairs of each expert in each part
    pairs: Pairs
    PDL: Constant


@kernel(Count, waits=False)
def moe_ops_count_pairs(
    counts_ptr,
    ids_ptr,
    map_ptr,
    S,
    E,
    num_ids,
    top_k,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    part_size,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the pairs of each expert in each part."""
    gdc_launch_dependents(PDL)
    part = tl.program_id(0)
    counts = count_experts(
        part * part_size, tl.minimum(S, (part + 1) * part_size),
        ids_ptr, map_ptr, E, num_ids, top_k, ids_stride_m, ids_stride_k, map_stride, BLOCK_E,
    )  # fmt: skip
    tl.store(counts_ptr + part * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@arguments
class Place:
    rows: Pointer  # (S,), written: the row of each pair, -1 if its expert is not here
    ends: Pointer  # (E,), written: the row after each expert's last pair
    counts: Pointer  # (programs, BLOCK_E)
    pairs: Pairs
    SHARE: Constant
    ALIGNMENT: Constant
    PDL: Constant


@kernel(Place)
def moe_ops_place_pairs(
    rows_ptr,
    ends_ptr,
    counts_ptr,
    ids_ptr,
    map_ptr,
    S,
    E,
    num_ids,
    top_k,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    part_size,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the row of each pair. An expert without pairs ends where it would begin, at a
    multiple of ALIGNMENT. Grid: (parts, shares of a part).
    """
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    part, parts = tl.program_id(0), tl.num_programs(0)
    end = tl.minimum(S, (part + 1) * part_size)
    begin = part * part_size + tl.program_id(1) * SHARE
    if begin >= end:
        return
    group = tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), tl.int32)
    before = tl.zeros((BLOCK_E,), tl.int32)
    AT_ONCE: tl.constexpr = max(8, min(PARTS_PER_LOAD, 32768 // BLOCK_E))
    for start in range(0, parts, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        ok = (other < parts)[:, None] & (group >= 0)[None, :]
        counts = tl.load(counts_ptr + other[:, None] * BLOCK_E + group[None, :], mask=ok, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((other < part)[:, None], counts, 0), 0)
    padded = tl.cdiv(total, ALIGNMENT) * ALIGNMENT
    first = tl.cumsum(padded) - padded
    if begin == 0:
        tl.store(ends_ptr + group, first + total, mask=group < E)
    next_row = first + before
    if begin > part * part_size:
        next_row += count_experts(
            part * part_size, begin,
            ids_ptr, map_ptr, E, num_ids, top_k, ids_stride_m, ids_stride_k, map_stride, BLOCK_E,
        )  # fmt: skip
    lane = tl.arange(0, CHUNK)
    for start in range(begin, tl.minimum(begin + SHARE, end), CHUNK):
        p = start + lane
        e = local_expert(
            ids_ptr, map_ptr, p, p < end, E, num_ids, top_k,
            ids_stride_m, ids_stride_k, map_stride,
        )  # fmt: skip
        row = tl.gather(next_row, tl.where(e >= 0, e, 0), 0)
        earlier = (e[:, None] == e[None, :]) & (lane[:, None] < lane[None, :])
        row += tl.sum(earlier.to(tl.int32), 0)
        tl.store(rows_ptr + p, tl.where(e >= 0, row, -1), mask=p < end)
        next_row += tl.histogram(tl.where(e >= 0, e, 0), BLOCK_E, mask=e >= 0)


def place(
    ids: Tensor,  # (M, top_k)
    expert_map: Tensor | None,
    index: Tensor,  # int32, written: `Index` says what is where
    E: int,
    size: int,
    alignment: int,
    gpu: Gpu,
    counts: Tensor | None = None,
) -> tuple[list[Launch], Layout]:
    """Sort pairs by expert into the contiguous layout of `size` rows. `counts`: int32 scratch that
    takes the place of the index's.
    """
    S = ids.numel()
    at = index_parts(S, E)
    rows, ends = index[at.rows : at.rows + S], index[:E]
    counts = index[at.counts : at.end] if counts is None else counts
    num_ids, map_stride = E, 0
    if expert_map is not None:
        num_ids, map_stride = expert_map.shape[0], expert_map.stride(0)
    part_size = round_up(cdiv(S, MAX_PARTS), CHUNK)
    pairs = Pairs(
        ids=ids,
        map=expert_map,
        S=S,
        E=E,
        num_ids=num_ids,
        top_k=ids.shape[1],
        ids_stride_m=ids.stride(0),
        ids_stride_k=ids.stride(1),
        map_stride=map_stride,
        part_size=part_size,
        BLOCK_E=block_e(E),
        CHUNK=CHUNK,
    )
    grid = (cdiv(S, part_size), 1, 1)
    placed = Place(
        rows=rows,
        ends=ends,
        counts=counts,
        pairs=pairs,
        SHARE=SHARE,
        ALIGNMENT=alignment,
        PDL=gpu.pdl,
    )
    shares = (*grid[:1], cdiv(part_size, SHARE), 1)
    launches = [
        Launch(moe_ops_count_pairs, grid, Count(counts=counts, pairs=pairs, PDL=gpu.pdl)),
        Launch(moe_ops_place_pairs, shares, placed, 4),
    ]
    return launches, Layout(rows, ends, size)


@arguments
class Batches:
    counts: Pointer  # (E,) int32, written: the sizes, from 0 to T
    sizes: Pointer  # (E,)
    T: Runtime
    E: Runtime
    stride: Runtime  # of `sizes`
    BLOCK_E: Constant  # experts of a program
    PDL: Constant


@kernel(Batches, waits=False)
def moe_ops_count_batches(
    counts_ptr,
    sizes_ptr,
    T,
    E,
    stride,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Clamp the sizes of batches (E, T, ..) to counts from 0 to T."""
    gdc_launch_dependents(PDL)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    size = tl.load(sizes_ptr + e * stride, mask=e < E, other=0)
    tl.store(counts_ptr + e, tl.minimum(tl.maximum(size, 0), T).to(tl.int32), mask=e < E)


def place_batches(a: BatchedExpertsArgs, R: int, gpu: Gpu) -> tuple[Launch, Layout]:
    """Count the rows of batched x, which keep their order in the masked layout of R rows an
    expert.
    """
    E, T, _ = a.hidden_states.shape
    sizes, counts = a.expert_num_tokens, a.index_workspace[:E]
    args = Batches(
        counts=counts, sizes=sizes, T=T, E=E, stride=sizes.stride(0), BLOCK_E=128, PDL=gpu.pdl
    )
    return Launch(moe_ops_count_batches, (cdiv(E, 128), 1, 1), args), Layout(None, counts, R)


@arguments
class Sorted:
    rows: Pointer  # (R,) int32, written: the row of each row, or -1 past those of experts
    ends: Pointer  # (E,) int32, written: the row after each expert's last
    sizes: Pointer  # (E,)
    R: Runtime
    E: Runtime
    stride: Runtime  # of `sizes`
    BLOCK_E: Constant
    ROWS: Constant


@kernel(Sorted)
def moe_ops_train_place_sorted(
    rows_ptr,
    ends_ptr,
    sizes_ptr,
    R,
    E,
    stride,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The layout of R rows that are sorted by expert already. Sizes are clamped to what there is
    room for. Grid: cdiv(R, ROWS) programs, each of which adds up all sizes.
    """
    e = tl.arange(0, BLOCK_E)
    size = tl.load(sizes_ptr + e * stride, mask=e < E, other=0).to(tl.int64)
    ends = tl.cumsum(tl.minimum(tl.maximum(size, 0), R), 0)
    ends = tl.minimum(ends, R).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(ends_ptr + e, ends, mask=e < E)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(rows_ptr + row, tl.where(row < tl.max(ends, 0), row, -1), mask=row < R)


def place_sorted(layout: Layout, sizes: Tensor) -> Launch:
    """Write the rows and ends of a layout of R rows, of which each expert has `sizes` (E,)."""
    E, R = sizes.shape[0], layout.R
    args = Sorted(
        rows=layout.rows,
        ends=layout.groups,
        sizes=sizes,
        R=R,
        E=E,
        stride=sizes.stride(0),
        BLOCK_E=block_e(E),
        ROWS=SHARE,
    )
    return Launch(moe_ops_train_place_sorted, (cdiv(R, SHARE), 1, 1), args)
