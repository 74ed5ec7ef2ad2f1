"""Sums over a token's experts in the order of `moe_ops.meta.blocks`."""

import triton
import triton.language as tl


@triton.jit
def expert_of_pair(ids_ptr, pair, top_k, ids_stride_m, ids_stride_k, NUM_BLOCKS: tl.constexpr):
    """The expert by whose block `add_terms` adds a pair; of an id that names none, anything."""
    if NUM_BLOCKS == 1:
        return 0
    else:
        token = (pair // top_k).to(tl.int64)
        return tl.load(ids_ptr + token * ids_stride_m + (pair % top_k) * ids_stride_k).to(tl.int32)


@triton.jit
def add_terms(
    zero, terms, weights, experts, num_experts, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The sum of fp32 terms, times weights, in order: those of each block of experts alone, and
    then the blocks by a binary tree. Terms of experts that are not here, and their weights, are 0.
    `zero` is shaped like a term (Gluon's kernels cannot call tl.zeros_like).

    Fused multiply-adds are asked for, so that all kernels round alike. Branches find the block: a
    conditional addition for each of eight costs every thread all of them.
    """
    s0 = zero
    if NUM_BLOCKS == 1:
        for j in tl.static_range(TOP_K):
            s0 = tl.fma(terms[j], weights[j], s0) if WEIGHTED else s0 + terms[j]
    else:
        tl.static_assert(NUM_BLOCKS == 8)
        size = num_experts // 8
        s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
        for j in tl.static_range(TOP_K):
            y, e = terms[j], experts[j]
            weight = weights[j] if WEIGHTED else 1.0
            if e < 4 * size:
                if e < 2 * size:
                    if e < size:
                        s0 = tl.fma(y, weight, s0)
                    else:
                        s1 = tl.fma(y, weight, s1)
                else:
                    if e < 3 * size:
                        s2 = tl.fma(y, weight, s2)
                    else:
                        s3 = tl.fma(y, weight, s3)
            else:
                if e < 6 * size:
                    if e < 5 * size:
                        s4 = tl.fma(y, weight, s4)
                    else:
                        s5 = tl.fma(y, weight, s5)
                else:
                    if e < 7 * size:
                        s6 = tl.fma(y, weight, s6)
                    else:
                        s7 = tl.fma(y, weight, s7)
        s0 = ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
    return s0 + 0.0  # where products vanish at -0, the sum is +0
