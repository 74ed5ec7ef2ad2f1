"""How blocks of rows come about and how their results leave: launches that all Triton GEMMs share."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from torch import Tensor

from moe_ops.activations import Activation
from moe_ops.kernels.triton_launch import Gpu, Launch
from moe_ops.meta.workspace import cdiv

_COMBINE_COLUMNS = 512


class Rows(NamedTuple):
    """How the blocks of a GEMM find their rows (kernels/triton_experts.py), and how large blocks are."""

    name: str  # constant ROWS
    has_map: bool
    tokens: int
    args: tuple  # index, ids, map; num_blocks, E, num_ids, top_k; strides of ids (2) and map

    @property
    def blocks(self) -> int:
        return self.args[3]


def pair_rows(
    index: Tensor,
    ids: Tensor,  # (M, top_k)
    expert_map: Tensor | None,
    experts: int,
    top_k: int,
    direct: bool,
    tokens: int,
    blocks: int,
) -> Rows:
    """Rows of tokens that `route` sorts by expert; of one token (`direct`) each pair is a block."""
    has_map = expert_map is not None
    num_ids, map_stride = (expert_map.shape[0], expert_map.stride(0)) if has_map else (experts, 0)
    args = (index, ids, expert_map, blocks, experts, num_ids, top_k, *ids.stride(), map_stride)
    return Rows("direct" if direct else "sorted", has_map, tokens, args)


def sorted_rows(index: Tensor, blocks: int, experts: int, tokens: int) -> Rows:
    """Rows of an input that is sorted by expert already."""
    args = (index, None, None, blocks, experts, 0, 1, 0, 0, 0)
    return Rows("plain", False, tokens, args)


@cache
def activation_of(name: str) -> tuple[str, bool, bool]:
    """(function, gated, interleaved) of a name: the constants that GEMM1 is compiled for."""
    activation = Activation(name)
    function = name.removesuffix("_no_mul").removesuffix("_uninterleave")
    return function, activation.gated, activation.interleaved


def route(rows: Rows, pairs: int, chunk: int, chip: Gpu) -> Launch:
    """Sort pairs by expert into the index workspace."""
    index, ids, expert_map, blocks, experts, num_ids, top_k, *strides = rows.args
    padded = max(16, 1 << (experts - 1).bit_length())
    args = (index, ids, expert_map, pairs, experts, num_ids, blocks, top_k, *strides)
    args += (padded, rows.tokens, chunk, rows.has_map, chip.dependent)
    return Launch("route", (experts, 1, 1), args, 4 if chunk < 1024 else 8)


def group_blocks(rows: Rows, sizes: Tensor, groups: int, S: int, T: int, chip: Gpu) -> Launch:
    """`groups` programs; T > 0 for batches of T rows whose counts `sizes` holds, else its end rows."""
    index, experts = rows.args[0], rows.args[4]
    padded = max(16, 1 << experts.bit_length())
    args = (index, sizes, S, T, experts, rows.blocks, sizes.stride(0))
    return Launch(
        "group_blocks", (groups, 1, 1), (*args, padded, rows.tokens, 128, T > 0, chip.dependent)
    )


def combine(
    out: Tensor,  # (M, K), written
    y: Tensor,
    weights: Tensor,  # (M, top_k)
    rows: Rows,
    M: int,
    K: int,
    weighted: bool,
    chip: Gpu,
    parts: int = 1,  # that y is the sum of
) -> Launch:
    """The sum of a token's rows of y, by the router's weights or (not `weighted`) as they are."""
    _, ids, expert_map, _, experts, num_ids, top_k, stride_m, stride_k, map_stride = rows.args
    return Launch(
        "combine",
        (M, cdiv(K, _COMBINE_COLUMNS), 1),
        (out, y, weights, ids, expert_map, experts, num_ids, K, stride_m, stride_k, map_stride)
        + (*weights.stride(), *out.stride(), top_k, rows.has_map, weighted, parts)
        + (_COMBINE_COLUMNS, chip.dependent),
    )
