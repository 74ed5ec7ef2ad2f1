"""Triton kernels that turn routing into a table of blocks, and how the GEMMs read it. Imported at first launch only.

Legend: M tokens, S = M * top_k pairs (pair p is entry p % top_k of token p // top_k), E local experts,
TILE rows a block holds at most, EP a power of two above E, CHUNK elements handled at a time.

index workspace, int32:
    blocks (num_blocks, 4): expert (-1: unused, E: rows to zero), first row, end row of the expert, in the first block how
                            many are used
    order (S,):             the pairs sorted by expert, stable; absent where rows are sorted already
A block covers rows [first, min(first + TILE, end)) of `order`, or of the sorted input itself.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start_dependent(DEPENDENT: tl.constexpr):
    """Let the next kernel start once all programs are here; it waits before it reads what this one writes.

    A GEMM of Triton comes here behind its sum: programs that started earlier would hold shared memory while they wait. Those
    of gluon_packed.py come here first: what starts early fills its ring with weights before it waits.
    """
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Wait until the kernel before this one has ended and its writes are visible.

    Every program of every kernel waits before it ends (of those without work, one), and lets the next kernel start only then
    (kernels that read nothing of their predecessor excepted): so once a kernel runs, all but its direct predecessor have
    ended. Past the GEMMs of gluon_packed.py, which let the next start at once, that is so once it has waited; the index,
    which they read before, was finished when the first of them started. Of few pairs they read ids instead, which are older
    than the layer, and the order only behind their product: `arrange` writes it beside the rows that they wait for.
    """
    if DEPENDENT:
        gdc_wait()


@triton.jit
def local_expert(
    ids_ptr,
    map_ptr,
    pair,
    mask,
    E,
    num_ids,
    top_k,
    stride_im,
    stride_ik,
    stride_map,
    HAS_MAP: tl.constexpr,
):
    """Local expert of each pair; -1 where the id means "not here". The range is checked before narrowing."""
    token = (pair // top_k).to(tl.int64)
    e = tl.load(ids_ptr + token * stride_im + (pair % top_k) * stride_ik, mask=mask, other=-1)
    if HAS_MAP:
        e = tl.load(map_ptr + e * stride_map, mask=(e >= 0) & (e < num_ids), other=-1)
    return tl.where((e >= 0) & (e < E), e, -1).to(tl.int32)


@triton.jit
def block_rows(
    index_ptr,
    ids_ptr,
    map_ptr,
    b,
    E,
    num_ids,
    top_k,
    stride_im,
    stride_ik,
    stride_map,
    BM: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """(expert, positions (BM,), their validity (BM,)) of block b; the expert is -1 where b is unused."""
    lane = tl.arange(0, BM)
    if ROWS == "direct":
        e = local_expert(
            ids_ptr, map_ptr, b, b >= 0, E, num_ids, top_k,
            stride_im, stride_ik, stride_map, HAS_MAP,
        )  # fmt: skip
        return e, b + lane, lane < 1
    else:
        slot = index_ptr + 4 * b
        position = tl.load(slot + 1) + lane
        return tl.load(slot), position, position < tl.load(slot + 2)


@triton.jit
def pairs_at(index_ptr, num_blocks, position, ok, ROWS: tl.constexpr):
    """The pair at each position; the position itself where rows are not sorted by us."""
    if ROWS == "sorted":
        return tl.load(index_ptr + 4 * num_blocks + position, mask=ok, other=0)
    else:
        return position


@triton.jit
def write_blocks(
    index_ptr, group, groups, base, first, count, used, num_blocks,
    TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store the blocks of one of `groups` groups from slot `base` on, and its share of the unused slots."""
    lane = tl.arange(0, CHUNK)
    if group == 0:
        tl.store(index_ptr + 3, used, mask=num_blocks > 0)
    mine = tl.minimum(tl.cdiv(count, TILE), num_blocks - base)
    for start in range(0, mine, CHUNK):
        i = start + lane
        slot = index_ptr + 4 * (base + i)
        tl.store(slot, group + tl.zeros_like(i), mask=i < mine)
        tl.store(slot + 1, first + i * TILE, mask=i < mine)
        tl.store(slot + 2, first + count + tl.zeros_like(i), mask=i < mine)
    for start in range(used + group * CHUNK, num_blocks, groups * CHUNK):
        i = start + lane
        slot = index_ptr + 4 * i
        tl.store(slot, tl.full((CHUNK,), -1, tl.int32), mask=i < num_blocks)
        tl.store(
            slot + 1, tl.zeros_like(i), mask=i < num_blocks
        )  # no rows, wherever they would be
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
    stride_im,
    stride_ik,
    stride_map,
    EP: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """Write the blocks of one expert and its part of the order."""
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros((EP,), tl.int32)
    for start in range(0, S, CHUNK):
        p = start + lane
        e = local_expert(
            ids_ptr, map_ptr, p, p < S, E, num_ids, top_k,
            stride_im, stride_ik, stride_map, HAS_MAP,
        )  # fmt: skip
        counts += tl.histogram(tl.where(e >= 0, e, 0), EP, mask=e >= 0)
    group = tl.arange(0, EP)
    blocks = tl.cdiv(counts, TILE)
    base = tl.sum(tl.where(group < expert, blocks, 0))
    first = tl.sum(tl.where(group < expert, counts, 0))
    count = tl.sum(tl.where(group == expert, counts, 0))
    used = tl.sum(blocks)
    write_blocks(index_ptr, expert, E, base, first, count, used, num_blocks, TILE, CHUNK)
    if count > 0:
        row = index_ptr + 4 * num_blocks + first
        for start in range(0, S, CHUNK):
            p = start + lane
            e = local_expert(
                ids_ptr, map_ptr, p, p < S, E, num_ids, top_k,
                stride_im, stride_ik, stride_map, HAS_MAP,
            )  # fmt: skip
            hit = (e == expert).to(tl.int32)
            tl.store(row + tl.cumsum(hit) - 1, p, mask=hit > 0)
            row += tl.sum(hit)


@triton.jit(
    do_not_specialize=["S", "E", "num_ids", "num_blocks", "stride_im", "stride_ik", "stride_map"]
)
def moe_ops_route(
    index_ptr,  # written
    ids_ptr,  # (M, top_k)
    map_ptr,  # (num_ids,) global id -> local id, or absent
    S,
    E,
    num_ids,
    num_blocks,
    top_k,
    stride_im,
    stride_ik,
    stride_map,
    EP: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_MAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sort pairs by expert. One program an expert, each counting all pairs: no atomics, no barrier, stable."""
    wait(DEPENDENT)
    start_dependent(DEPENDENT)
    sort_expert(
        index_ptr, ids_ptr, map_ptr, tl.program_id(0), S, E, num_ids, num_blocks, top_k,
        stride_im, stride_ik, stride_map, EP, TILE, CHUNK, HAS_MAP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["S", "T", "E", "num_blocks", "stride"])
def moe_ops_group_blocks(
    index_ptr,  # written
    sizes_ptr,  # (E,) rows of each group, or cumulative end rows
    S,
    T,
    E,
    num_blocks,
    stride,
    EP: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BATCHED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Blocks of rows that lie sorted already. One program a group.

    BATCHED: expert e owns rows [e * T, e * T + sizes[e]). Else rows [sizes[e - 1], sizes[e]) of S, and
    program E owns the rest, which the GEMM zeroes.
    """
    start_dependent(DEPENDENT)
    program = tl.program_id(0)
    group = tl.arange(0, EP)
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
    blocks = tl.cdiv(counts, TILE)
    base = tl.sum(tl.where(group < program, blocks, 0))
    row = tl.sum(tl.where(group == program, first, 0))
    count = tl.sum(tl.where(group == program, counts, 0))
    used = tl.sum(blocks)
    write_blocks(
        index_ptr, program, tl.num_programs(0), base, row, count, used, num_blocks, TILE, CHUNK
    )
