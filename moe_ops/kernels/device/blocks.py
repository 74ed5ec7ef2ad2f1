"""How the GEMMs read the table of blocks that kernels/place/sort.py writes.

Legend: M tokens, S = M * top_k pairs (pair p is entry p % top_k of token p // top_k), E local
experts, BLOCK_M the most rows of a block.

Index workspace, int32:
    blocks (num_blocks, 4): expert (-1: unused block, E: rows to be zeroed), first row, end row of
                            the expert; besides, in the first block the number of used blocks,
                            in the second and third those tiles of the first and second GEMM that
                            programs have taken (kernels/mixed_gemm/sm90_mainloop.py)
    order (S,):             the pairs sorted by expert, stable; absent if the input is sorted
A block covers rows [first, min(first + BLOCK_M, end)) of `order`, or of the sorted input itself.

For few pairs of the mixed GEMM on SM90 no kernel sorts. The one that permutes tokens writes the
order and, in place of the blocks above, an int32 for each pair, the block that starts at it
(`pack_block`) or -1, and then the numbers of tiles taken of the first and second GEMM.
"""

import triton
import triton.language as tl

# in the index workspace, of at least one and of at least three blocks
USED = tl.constexpr(3)
TAKEN1, TAKEN2 = tl.constexpr(7), tl.constexpr(11)
BLOCKS_WITH_COUNTERS = 3
MAX_PACKED = tl.constexpr(127)


@triton.jit
def pack_block(e, first, end):
    """A block of at most MAX_PACKED pairs in one number."""
    return e << 14 | first << 7 | end


@triton.jit
def unpack_block(block):
    """(expert, first and end row) of a block, which is not -1."""
    return block >> 14, block >> 7 & 127, block & 127


@triton.jit
def local_expert(
    ids_ptr,
    map_ptr,
    pair,
    mask,
    E,
    num_ids,
    top_k,
    ids_stride_m,
    ids_stride_k,
    map_stride,
):
    """Local expert of each pair, -1 if this rank does not hold its expert. Ids are checked before
    they are narrowed to int32.
    """
    token = (pair // top_k).to(tl.int64)
    e = tl.load(
        ids_ptr + token * ids_stride_m + (pair % top_k) * ids_stride_k, mask=mask, other=-1
    )
    if map_ptr is not None:
        e = tl.load(map_ptr + e * map_stride, mask=(e >= 0) & (e < num_ids), other=-1)
    return tl.where((e >= 0) & (e < E), e, -1).to(tl.int32)


@triton.jit
def sorted_position(
    pair, ids_ptr, map_ptr, S, E, num_ids, top_k, ids_stride_m, ids_stride_k, map_stride,
    MAX_PAIRS: tl.constexpr,
):  # fmt: skip
    """Of one of at most MAX_PAIRS (token, expert) pairs: (its expert, -1 if this rank does not
    hold it; how many pairs experts before it have; how many of its own come before it, and in
    all). One reduction computes three counts.
    """
    tl.static_assert(MAX_PAIRS < 1024)
    other = tl.arange(0, MAX_PAIRS)
    experts = local_expert(
        ids_ptr, map_ptr, other, other < S, E, num_ids, top_k,
        ids_stride_m, ids_stride_k, map_stride,
    )  # fmt: skip
    e = tl.sum(tl.where(other == pair, experts, 0))
    same = (experts == e).to(tl.int32)
    less = (experts >= 0) & (experts < e)
    before = tl.where(other < pair, same, 0)
    counts = tl.sum(less.to(tl.int32) + (same << 10) + (before << 20))
    return e, counts & 1023, counts >> 20, counts >> 10 & 1023


@triton.jit
def block_rows(
    index_ptr,
    ids_ptr,
    map_ptr,
    b,
    E,
    num_ids,
    top_k,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
):
    """(expert, positions (BLOCK_M,), their validity (BLOCK_M,)) of block b. An unused block has
    expert -1.
    """
    lane = tl.arange(0, BLOCK_M)
    if ROWS == "direct":
        e = local_expert(
            ids_ptr, map_ptr, b, b >= 0, E, num_ids, top_k,
            ids_stride_m, ids_stride_k, map_stride,
        )  # fmt: skip
        return e, b + lane, lane < 1
    else:
        slot = index_ptr + 4 * b
        position = tl.load(slot + 1) + lane
        return tl.load(slot), position, position < tl.load(slot + 2)


@triton.jit
def pairs_at(index_ptr, num_blocks, position, ok, ROWS: tl.constexpr):
    """The pair at each position; the position itself if no kernel sorted the rows."""
    if ROWS == "sorted":
        return tl.load(index_ptr + 4 * num_blocks + position, mask=ok, other=0)
    else:
        return position


@triton.jit
def block_and_tile(num_blocks, num_tiles, GROUP_M: tl.constexpr):
    """(block, column tile) of this program: GROUP_M blocks in turn share a weight tile in L2."""
    pid = tl.program_id(0)
    first = pid // (GROUP_M * num_tiles) * GROUP_M
    size = tl.minimum(num_blocks - first, GROUP_M)
    local = pid % (GROUP_M * num_tiles)
    return first + local % size, local // size
