"""Sorting (token, expert) pairs into blocks of rows of one expert. Imported at first launch only.

Legend and the index workspace: kernels/device/blocks.py. BLOCK_E is a power of two, at least E.
CHUNK elements are handled at a time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.device.blocks import TAKEN1, TAKEN2, USED, local_expert
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
from moe_ops.kernels.place.routing import Routing


@triton.jit
def write_blocks(
    index_ptr, group, groups, expert, base, first, count, used, num_blocks,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the blocks of one of `groups` groups, which are of an expert, from slot `base` on, and
    this program's share of the unused slots.
    """
    lane = tl.arange(0, CHUNK)
    if group == 0:
        tl.store(index_ptr + USED, used, mask=num_blocks > 0)
        tl.store(index_ptr + TAKEN1, 0, mask=num_blocks > 2)
        tl.store(index_ptr + TAKEN2, 0, mask=num_blocks > 2)
    mine = tl.minimum(tl.cdiv(count, BLOCK_M), num_blocks - base)
    for start in range(0, mine, CHUNK):
        i = start + lane
        slot = index_ptr + 4 * (base + i)
        tl.store(slot, expert + tl.zeros_like(i), mask=i < mine)
        tl.store(slot + 1, first + i * BLOCK_M, mask=i < mine)
        tl.store(slot + 2, first + count + tl.zeros_like(i), mask=i < mine)
    for start in range(used + group * CHUNK, num_blocks, groups * CHUNK):
        i = start + lane
        slot = index_ptr + 4 * i
        tl.store(slot, tl.full((CHUNK,), -1, tl.int32), mask=i < num_blocks)
        # no rows
        tl.store(slot + 1, tl.zeros_like(i), mask=i < num_blocks)
        tl.store(slot + 2, tl.zeros_like(i), mask=i < num_blocks)


@triton.jit
def sort_expert(
    index_ptr,
    ids_ptr,
    map_ptr,
    expert,
    S,
    E,
    num_ids,
    num_blocks,
    top_k,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the blocks of one expert and its pairs in the order."""
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, S, CHUNK):
        p = start + lane
        e = local_expert(
            ids_ptr, map_ptr, p, p < S, E, num_ids, top_k,
            ids_stride_m, ids_stride_k, map_stride,
        )  # fmt: skip
        counts += tl.histogram(tl.where(e >= 0, e, 0), BLOCK_E, mask=e >= 0)
    group = tl.arange(0, BLOCK_E)
    blocks = tl.cdiv(counts, BLOCK_M)
    base = tl.sum(tl.where(group < expert, blocks, 0))
    first = tl.sum(tl.where(group < expert, counts, 0))
    count = tl.sum(tl.where(group == expert, counts, 0))
    used = tl.sum(blocks)
    write_blocks(
        index_ptr, expert, E, expert, base, first, count, used, num_blocks, BLOCK_M, CHUNK
    )  # fmt: skip
    if count > 0:
        row = index_ptr + 4 * num_blocks + first
        for start in range(0, S, CHUNK):
            p = start + lane
            e = local_expert(
                ids_ptr, map_ptr, p, p < S, E, num_ids, top_k,
                ids_stride_m, ids_stride_k, map_stride,
            )  # fmt: skip
            hit = (e == expert).to(tl.int32)
            tl.store(row + tl.cumsum(hit) - 1, p, mask=hit > 0)
            row += tl.sum(hit)


@unprefixed
class Sort(NamedTuple):
    """How S pairs are sorted."""

    S: Runtime
    BLOCK_E: Constant
    BLOCK_M: Constant
    CHUNK: Constant

    @property
    def num_warps(self) -> int:
        """Warps of a sorting program."""
        return 4 if self.CHUNK < 1024 else 8


@arguments
class Route:
    routing: Routing  # index: written
    sort: Sort
    PDL: Constant


@kernel(Route, pdl_first=True)
def moe_ops_route(
    index_ptr,
    ids_ptr,
    map_ptr,
    num_blocks,
    E,
    num_ids,
    top_k,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    ROWS: tl.constexpr,
    S,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sort pairs by expert, stably. Grid: one program an expert, each of which counts all pairs,
    so that there are no atomics and no grid-wide barrier.
    """
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    sort_expert(
        index_ptr, ids_ptr, map_ptr, tl.program_id(0), S, E, num_ids, num_blocks, top_k,
        ids_stride_m, ids_stride_k, map_stride, BLOCK_E, BLOCK_M, CHUNK,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def sort_into(block_m: int, S: int, num_experts: int, chunk: int) -> Sort:
    """Sort S pairs into blocks of `block_m` rows, `chunk` at a time."""
    return Sort(S, block_e(num_experts), block_m, chunk)


def route(routing: Routing, sort: Sort, gpu: Gpu) -> Launch:
    """Sort pairs by expert."""
    args = Route(routing=routing, sort=sort, PDL=gpu.pdl)
    return Launch(moe_ops_route, (routing.E, 1, 1), args, sort.num_warps)


def block_e(num_experts: int) -> int:
    """The least power of two >= the number of experts, at least 16."""
    return max(16, 1 << (num_experts - 1).bit_length())


@arguments
class GroupBlocks:
    index: Pointer  # written
    sizes: Pointer  # (E,) rows of each group, or cumulative end rows
    map: Pointer  # (E,) the expert of each group, or -1: no blocks; None: the group's number
    S: Runtime
    T: Runtime
    E: Runtime
    num_blocks: Runtime
    stride: Runtime  # of `sizes`
    BLOCK_E: Constant
    BLOCK_M: Constant
    CHUNK: Constant
    BATCHED: Constant
    PDL: Constant


@kernel(GroupBlocks, waits=False)
def moe_ops_group_blocks(
    index_ptr,
    sizes_ptr,
    map_ptr,
    S,
    T,
    E,
    num_blocks,
    stride,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    BATCHED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Blocks of rows that are sorted by expert. Grid: one program a group.

    BATCHED: expert e owns rows [e * T, e * T + sizes[e]). Otherwise it owns rows
    [sizes[e - 1], sizes[e]) of S, and program E the remaining rows, which the GEMM zeroes.
    """
    gdc_launch_dependents(PDL)
    program = tl.program_id(0)
    group = tl.arange(0, BLOCK_E)
    if BATCHED:
        size = tl.load(sizes_ptr + group * stride, mask=group < E, other=0)
        first = group * T
        counts = tl.minimum(tl.maximum(size, 0), T).to(tl.int32)
    else:
        first = tl.load(sizes_ptr + (group - 1) * stride, mask=(group > 0) & (group <= E), other=0)
        end = tl.load(sizes_ptr + group * stride, mask=group < E, other=S)
        first = tl.minimum(tl.maximum(first, 0), S)
        end = tl.minimum(tl.maximum(end, 0), S)
        counts = tl.where(group <= E, tl.maximum(end - first, 0), 0)
    expert = program
    if map_ptr is not None:
        mapped = tl.load(map_ptr + group, mask=group < E, other=-1)
        counts = tl.where(mapped >= 0, counts, 0)
        expert = tl.sum(tl.where(group == program, mapped, 0))
    blocks = tl.cdiv(counts, BLOCK_M)
    base = tl.sum(tl.where(group < program, blocks, 0))
    row = tl.sum(tl.where(group == program, first, 0))
    count = tl.sum(tl.where(group == program, counts, 0))
    used = tl.sum(blocks)
    write_blocks(
        index_ptr, program, tl.num_programs(0), expert, base, row, count, used, num_blocks,
        BLOCK_M, CHUNK,
    )  # fmt: skip


def group_blocks(
    routing: Routing,
    sizes: Tensor,
    S: int,
    T: int,
    block_m: int,
    gpu: Gpu,
    expert_map: Tensor | None = None,  # (E,) int32
) -> Launch:
    """Write the blocks of sorted rows. If T > 0, rows are batches of T, and `sizes` holds their
    counts. Otherwise `sizes` holds end rows, and the rows past the last one are one more group. Of
    groups with an `expert_map` those alone have blocks that it names an expert for.
    """
    E = routing.E
    args = GroupBlocks(
        index=routing.index,
        sizes=sizes,
        map=expert_map,
        S=S,
        T=T,
        E=E,
        num_blocks=routing.num_blocks,
        stride=sizes.stride(0),
        BLOCK_E=block_e(E + 1),
        BLOCK_M=block_m,
        CHUNK=128,
        BATCHED=T > 0,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_group_blocks, (E if T > 0 else E + 1, 1, 1), args)
