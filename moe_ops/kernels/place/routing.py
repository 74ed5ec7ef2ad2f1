"""Routing as kernels take it: which rows each block of a GEMM has. torch alone."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moe_ops.kernels.launch import Constant, Pointer, Runtime, unprefixed


@unprefixed
class Routing(NamedTuple):
    """The table of blocks and the tensors that it was made from. Kernels are not specialized on
    its numbers.

    ROWS says which rows a block has:
        "sorted"  position p of the order is a pair; tokens are gathered, pairs scattered
        "direct"  block b is pair b, whose expert is read from the ids; no sorting kernel runs
        "plain"   the rows of input and output are sorted by expert already
    """

    # int32: see kernels/device/blocks.py
    index: Pointer  # type: ignore[assignment]  # hides a method of tuples
    ids: Pointer  # (M, top_k)
    map: Pointer  # (num_ids,) global id -> local id, or None
    num_blocks: Runtime
    E: Runtime  # experts here
    num_ids: Runtime
    top_k: Runtime
    ids_stride_m: Runtime
    ids_stride_k: Runtime
    map_stride: Runtime
    ROWS: Constant


class RouterWeights(NamedTuple):
    """Router weights (M, top_k), or none."""

    ptr: Pointer
    stride_m: Runtime
    stride_k: Runtime


NO_ROUTER_WEIGHTS = RouterWeights(None, 0, 0)


def router_weights(weights: Tensor | None) -> RouterWeights:
    """The RouterWeights of a tensor, or of None."""
    return NO_ROUTER_WEIGHTS if weights is None else RouterWeights(weights, *weights.stride())


def route_pairs(
    index: Tensor,
    ids: Tensor,  # (M, top_k)
    expert_map: Tensor | None,
    num_experts: int,
    num_blocks: int,
    direct: bool,
) -> Routing:
    """Routing of pairs that a kernel sorts by expert, or (`direct`, one token) of pairs that are a
    block each.
    """
    num_ids, map_stride = num_experts, 0
    if expert_map is not None:
        num_ids, map_stride = expert_map.shape[0], expert_map.stride(0)
    stride_m, stride_k = ids.stride()
    return Routing(
        index, ids, expert_map, num_blocks, num_experts, num_ids, ids.shape[1],
        stride_m, stride_k, map_stride, "direct" if direct else "sorted",
    )  # fmt: skip


@unprefixed
class TokenRouting(NamedTuple):
    """Experts of one token, and the router weights that belong to them, or none. No kernel is
    compiled anew for its numbers.
    """

    ids: Pointer  # (1, top_k)
    map: Pointer  # (num_ids,) global id -> local id, or None
    topk_weights: Pointer  # (1, top_k)
    E: Runtime  # experts here
    num_ids: Runtime
    ids_stride_m: Runtime
    ids_stride_k: Runtime
    map_stride: Runtime
    topk_weights_stride_k: Runtime


def route_token(
    ids: Tensor,  # (1, top_k)
    expert_map: Tensor | None,
    weights: Tensor | None,  # (1, top_k)
    num_experts: int,
) -> tuple[TokenRouting, TokenRouting]:
    """The TokenRouting of one token without router weights, and with them."""
    num_ids, map_stride = num_experts, 0
    if expert_map is not None:
        num_ids, map_stride = expert_map.shape[0], expert_map.stride(0)
    stride_m, stride_k = ids.stride()
    numbers = (num_experts, num_ids, stride_m, stride_k, map_stride)
    weight_stride = 0 if weights is None else weights.stride(1)
    return (
        TokenRouting(ids, expert_map, None, *numbers, 0),
        TokenRouting(ids, expert_map, weights, *numbers, weight_stride),
    )


def sorted_rows(index: Tensor, num_experts: int, num_blocks: int) -> Routing:
    """Routing of an input whose rows are sorted by expert."""
    return Routing(index, None, None, num_blocks, num_experts, 0, 1, 0, 0, 0, "plain")
