"""Sums over a token's experts in the order of `moe_ops.meta.blocks`."""

import triton
import triton.language as tl


@triton.jit
def block_of_pair(
    ids_ptr, pair, num_ids, top_k, ids_stride_m, ids_stride_k, NUM_BLOCKS: tl.constexpr
):
    """The block of experts of a pair; of an id that names none, anything."""
    if NUM_BLOCKS == 1:
        return 0
    else:
        token = (pair // top_k).to(tl.int64)
        e = tl.load(ids_ptr + token * ids_stride_m + (pair % top_k) * ids_stride_k).to(tl.int32)
        block, size = 0, num_ids // NUM_BLOCKS
        # a division took 40 us of a layer of Qwen3 at 4096 tokens
        for b in tl.static_range(1, NUM_BLOCKS):
            block += (e >= b * size).to(tl.int32)
        return block


@triton.jit
def add_terms(
    terms, weights, blocks, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, NUM_BLOCKS: tl.constexpr
):
    """The sum of fp32 terms, times weights, in order: those of each block alone, from +0 on, and
    then the blocks by a binary tree. Terms of experts that are not here, and their weights, are 0.

    Fused multiply-adds are asked for, so that all kernels round alike.
    """
    sums = ()
    for b in tl.static_range(NUM_BLOCKS):
        total = tl.zeros_like(terms[0])
        for j in tl.static_range(TOP_K):
            added = tl.fma(terms[j], weights[j], total) if WEIGHTED else total + terms[j]
            total = added if NUM_BLOCKS == 1 else tl.where(blocks[j] == b, added, total)
        sums += (total + 0.0,)  # type: ignore[assignment]  # what has vanished at -0 becomes +0
    if NUM_BLOCKS == 1:
        return sums[0]
    else:
        tl.static_assert(NUM_BLOCKS == 8)
        left = (sums[0] + sums[1]) + (sums[2] + sums[3])
        return left + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
