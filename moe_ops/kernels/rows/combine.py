"""The weighted sum over a token's experts. Imported at first launch only."""

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from moe_ops.kernels.configs import sort_chunk
from moe_ops.kernels.device.blocks import local_expert
from moe_ops.kernels.device.experts import ends_of_experts, expert_of_row
from moe_ops.kernels.device.pdl import gdc_wait, gdc_wait_at_the_end
from moe_ops.kernels.device.sums import add_terms, expert_of_pair
from moe_ops.kernels.launch import (
    Constant,
    Gpu,
    Launch,
    Pointer,
    Runtime,
    Specialized,
    arguments,
    kernel,
)
from moe_ops.kernels.place.layout import (
    ExpertBias,
    Layout,
    StridedRows,
    expert_bias,
    programs_of_rows,
    rows_of,
)
from moe_ops.kernels.place.routing import RouterWeights, Routing, router_weights
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import ExpertsArgs

BLOCK_N = 512  # columns of a program of combine
# and of blocks of experts for few tokens: each column takes 8 * top_k additions, most of which are
# skipped.
FEW_BLOCK_N = 128
ROWS_BLOCK_N = 1024  # of combine_rows


@arguments
class Combine:
    out: Pointer  # (M, K), written
    # (SPLIT_K, M * top_k, K), summed over SPLIT_K; rows of pairs whose expert is not here are
    # uninitialized
    y: Pointer
    topk_weights: RouterWeights
    routing: Routing
    K: Specialized
    out_stride_m: Specialized
    out_stride_k: Specialized
    TOP_K: Constant
    WEIGHTED: Constant
    SPLIT_K: Constant
    NUM_BLOCKS: Constant  # of experts: meta/blocks.py
    BLOCK_N: Constant
    PDL: Constant


@kernel(Combine)
def moe_ops_combine(
    out_ptr,
    y_ptr,
    topk_weights_ptr,
    topk_weights_stride_m,
    topk_weights_stride_k,
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
    K,
    out_stride_m,
    out_stride_k,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[m] = sum over top_k of router weight * y, in fp32, and of one block of experts in the
    order of the token's entries, rounded once. Grid: (M, column tiles).
    """
    m = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ends = ()  # end column of each of the token's rows of y, 0 if its expert is not here
    scales = ()
    experts = ()
    # before gdc_wait: the kernel before writes none of these
    for j in tl.static_range(TOP_K):
        pair = m * TOP_K + j
        e = local_expert(
            ids_ptr, map_ptr, pair, pair >= 0, E, num_ids, TOP_K,
            ids_stride_m, ids_stride_k, map_stride,
        )  # fmt: skip
        ends += (tl.where(e >= 0, K, 0),)  # type: ignore[assignment]
        expert = expert_of_pair(ids_ptr, pair, TOP_K, ids_stride_m, ids_stride_k, NUM_BLOCKS)
        experts += (expert,)  # type: ignore[assignment]
        if WEIGHTED:
            weight_ptr = (
                topk_weights_ptr
                + m.to(tl.int64) * topk_weights_stride_m
                + j * topk_weights_stride_k
            )
            scale = tl.load(weight_ptr, mask=e >= 0, other=0.0).to(tl.float32)
            scales += (scale,)  # type: ignore[assignment]
    gdc_wait(PDL)
    terms = ()
    for j in tl.static_range(TOP_K):
        ok = column < ends[j]
        y_ptrs = y_ptr + (m * TOP_K + j).to(tl.int64) * K + column
        y = tl.load(y_ptrs, mask=ok, other=0.0).to(tl.float32)
        for _ in tl.static_range(1, SPLIT_K):
            y_ptrs += tl.num_programs(0).to(tl.int64) * TOP_K * K
            y += tl.load(y_ptrs, mask=ok, other=0.0).to(tl.float32)
        terms += (y,)  # type: ignore[assignment]
    zero = tl.zeros((BLOCK_N,), tl.float32)
    total = add_terms(zero, terms, scales, experts, num_ids, TOP_K, WEIGHTED, NUM_BLOCKS)
    out_ptrs = out_ptr + m.to(tl.int64) * out_stride_m + column.to(tl.int64) * out_stride_k
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=column < K)


def combine(
    out: Tensor,  # (M, K), written
    y: Tensor,
    topk_weights: RouterWeights,
    routing: Routing,
    weighted: bool,
    gpu: Gpu,
    split_k: int = 1,  # partial sums that y has
    num_blocks: int = 1,  # of experts, each of which is summed alone
) -> Launch:
    """Sum a token's rows of y, multiplied by the router's weights if `weighted`."""
    (M, K), (stride_m, stride_k) = out.shape, out.stride()
    # follows the number of rows as a LayerConfig does: calls with equal ones run equal kernels
    few = num_blocks > 1 and sort_chunk(M * routing.top_k) == sort_chunk(1)
    block_n = FEW_BLOCK_N if few else BLOCK_N
    args = Combine(
        out=out,
        y=y,
        topk_weights=topk_weights,
        routing=routing,
        K=K,
        out_stride_m=stride_m,
        out_stride_k=stride_k,
        TOP_K=routing.top_k,
        WEIGHTED=weighted,
        SPLIT_K=split_k,
        NUM_BLOCKS=num_blocks,
        BLOCK_N=block_n,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_combine, (M, cdiv(K, block_n), 1), args)


class ExpertBlocks(NamedTuple):
    """The ids (M, top_k) of pairs by which their experts are in NUM_BLOCKS blocks of num_ids
    experts, or None for one block.
    """

    ids: Pointer
    num_ids: Runtime
    stride_m: Runtime
    stride_k: Runtime
    NUM_BLOCKS: Constant


ONE_BLOCK = ExpertBlocks(None, 0, 0, 0, 1)


def expert_blocks(a: ExpertsArgs) -> ExpertBlocks:
    """The ExpertBlocks of a call."""
    if a.num_blocks == 1:
        return ONE_BLOCK
    stride_m, stride_k = a.topk_ids.stride()
    return ExpertBlocks(a.topk_ids, a.global_experts, stride_m, stride_k, a.num_blocks)


@arguments
class CombineRows:
    out: StridedRows  # (M, K) or (E, T, K), written
    y: Pointer  # (rows, K)
    bias: ExpertBias  # (E, K)
    topk_weights: RouterWeights
    layout: Layout
    blocks: ExpertBlocks
    K: Specialized
    programs: Runtime
    TOP_K: Constant
    BLOCK_N: Constant
    BESIDE: Constant  # it runs beside the kernel before: gdc_wait_at_the_end


@kernel(CombineRows)
def moe_ops_combine_rows(
    out_ptr,
    out_stride_e,
    out_stride_m,
    out_stride_k,
    y_ptr,
    bias_ptr,
    bias_E,
    bias_BLOCK_E: tl.constexpr,
    topk_weights_ptr,
    topk_weights_stride_m,
    topk_weights_stride_k,
    rows_ptr,
    groups_ptr,
    R,
    blocks_ids_ptr,
    blocks_num_ids,
    blocks_stride_m,
    blocks_stride_k,
    blocks_NUM_BLOCKS: tl.constexpr,
    K,
    programs,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """out[m] = sum of router weight * (y + bias) over the token's pairs, in fp32, and of one block
    of experts in their order, rounded once.
    """
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ptr += column.to(tl.int64) * out_stride_k
    if rows_ptr is None:
        e = (tl.program_id(0) // programs).to(tl.int64)
        for t in range(tl.program_id(0) % programs, tl.load(groups_ptr + e), programs):
            m = tl.cast(t, tl.int64)
            y = tl.load(y_ptr + (e * R + m) * K + column, mask=column < K)
            tl.store(out_ptr + (e * out_stride_e + m * out_stride_m), y, mask=column < K)
    else:
        m = tl.program_id(0).to(tl.int64)
        terms, weights, experts = (), (), ()
        if bias_ptr is not None:
            ends = ends_of_experts(groups_ptr, bias_E, bias_BLOCK_E)
        for j in tl.static_range(TOP_K):
            row = tl.load(rows_ptr + m * TOP_K + j).to(tl.int64)
            end = tl.where(row >= 0, K, 0)  # nothing is read for a pair whose expert is not here
            y = tl.load(y_ptr + row * K + column, mask=column < end, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                bias_ptrs = bias_ptr + expert_of_row(ends, row).to(tl.int64) * K + column
                y += tl.load(bias_ptrs, mask=column < end, other=0.0).to(tl.float32)
            if topk_weights_ptr is not None:
                weight_ptr = (
                    topk_weights_ptr + m * topk_weights_stride_m + j * topk_weights_stride_k
                )
                weight = tl.load(weight_ptr, mask=row >= 0, other=0.0).to(tl.float32)
                weights += (weight,)  # type: ignore[assignment]
            terms += (y,)  # type: ignore[assignment]
            expert = expert_of_pair(
                blocks_ids_ptr, m * TOP_K + j, TOP_K, blocks_stride_m, blocks_stride_k,
                blocks_NUM_BLOCKS,
            )  # fmt: skip
            experts += (expert,)  # type: ignore[assignment]
        weighted: tl.constexpr = topk_weights_ptr is not None
        zero = tl.zeros((BLOCK_N,), tl.float32)
        total = add_terms(
            zero, terms, weights, experts, blocks_num_ids, TOP_K, weighted, blocks_NUM_BLOCKS
        )
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + m * out_stride_m, out, mask=column < K)
    gdc_wait_at_the_end(BESIDE)


def combine_rows(
    out: Tensor,
    y: Tensor,
    weights: Tensor | None,
    layout: Layout,
    top_k: int,
    bias: Tensor | None = None,
    blocks: ExpertBlocks = ONE_BLOCK,
    beside: bool = False,
) -> Launch:
    """out (M, K) or (E, T, K): the sum of a token's rows of y, each plus the bias (E, K) of its
    expert and multiplied by weights (M, top_k) if there are any. Batches take no bias.
    `beside`: it runs beside the kernel before, which does not write y and does not use `out`.
    """
    K, (programs, shared) = out.shape[-1], programs_of_rows(out, layout, top_k)
    args = CombineRows(
        out=rows_of(out),
        y=y,
        bias=expert_bias(bias),
        topk_weights=router_weights(weights),
        layout=layout,
        blocks=blocks,
        K=K,
        programs=shared,
        TOP_K=top_k,
        BLOCK_N=ROWS_BLOCK_N,
        BESIDE=beside,
    )
    return Launch(moe_ops_combine_rows, (programs, cdiv(K, ROWS_BLOCK_N), 1), args)
