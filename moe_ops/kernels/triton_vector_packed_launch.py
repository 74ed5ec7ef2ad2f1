"""Launching the kernels of triton_vector_packed.py: one token beside weights of 4 or 8 bits, in two launches."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from moe_ops.activations import NO_LIMIT
from moe_ops.kernels.triton_launch import Launch
from moe_ops.kernels.triton_rows import activation_of
from moe_ops.kernels.triton_scales import flat
from moe_ops.kernels.triton_tiles import Tiles
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import ExpertsArgs

if TYPE_CHECKING:
    from moe_ops.kernels.triton_packed_launch import Format, Packed

CHUNK = 16  # bytes of a row that a thread reads at a time


@lru_cache(maxsize=1024)
def _possible(of: Format, rows: tuple[int, int], strides: tuple, of_factors: tuple) -> bool:
    columns = CHUNK * 8 // of.bits
    if of.bits == 6 or of.scale == "weight" or any([size % columns for size in rows]):
        return False
    grouped = of.group == 0 or of.group % columns == 0 or 2 * of.group == columns
    whole = all([one[0] % CHUNK == one[1] % CHUNK == 0 and one[2] == 1 for one in strides])
    return grouped and whole and not any(of_factors)


def possible(w13: Packed, w2: Packed) -> bool:
    """Whether the kernels know these formats and scales, and can read rows 16 bytes at a time."""
    one, two = w13.data, w2.data
    if w2.format.name == "e2m1_words" and not (w13.scales_in_place and w2.scales_in_place):
        return False
    if (one.data_ptr() | two.data_ptr()) % CHUNK:
        return False
    factors = (w13.strides[-1], w2.strides[-1])  # of rows
    strides = (one.stride(), two.stride())
    return _possible(w2.format, (w13.columns, w2.columns), strides, factors)


def launches(a: ExpertsArgs, w13: Packed, w2: Packed, tiles: Tiles) -> list[Launch]:
    """Both launches of a layer of one token."""
    x, ids, weights, out, expert_map = (
        a.hidden_states, a.topk_ids, a.topk_weights, a.out, a.expert_map
    )  # fmt: skip
    (E, K, _), I, chip = w2.data.shape, w2.columns, w2.chip  # noqa: E741
    top_k = ids.shape[1]
    function, gated, interleaved = activation_of(a.activation)
    h = flat(a.workspace13, x.dtype, top_k * I)
    on_input, has_map = a.router_weight_on_input, expert_map is not None
    num_ids, map_stride = E, 0
    if expert_map is not None:
        num_ids, map_stride = expert_map.shape[0], expert_map.stride(0)
    routing = (E, num_ids, *ids.stride(), map_stride, weights.stride(1))

    def strides(w: Packed, bias: torch.Tensor | None) -> tuple:
        of_bias = (0, 0) if bias is None else bias.stride()
        return (*w.strides[:2], *w.strides[3:10], *of_bias)

    def constants(w: Packed) -> tuple:
        return (w.format.name, w.format.scale, w.format.group, w.data.shape[2] // CHUNK)

    first, second = tiles.gemm1, tiles.gemm2
    args1 = (h, x, *w13.pointers(), a.w13_bias, ids, expert_map, weights if on_input else None)
    args1 += (*routing, I, x.stride(1), *strides(w13, a.w13_bias), a.alpha, a.beta, a.limit)
    args1 += (has_map, function, gated, interleaved, a.limit < NO_LIMIT, *constants(w13))
    args1 += (*first[:2], chip.dependent)
    args2 = (out, h, *w2.pointers(), a.w2_bias, ids, expert_map, None if on_input else weights)
    args2 += (*routing, K, *strides(w2, a.w2_bias), out.stride(1))
    args2 += (top_k, 1 << (top_k - 1).bit_length(), has_map, *constants(w2))
    args2 += (*second[:2], chip.dependent)
    columns = first.rows // 2 if gated else first.rows  # of h
    grids = (top_k, cdiv(I, columns), 1), (cdiv(K, second.rows), 1, 1)
    return [
        Launch("vector_packed_gemm1", grids[0], args1, first.warps),
        Launch("vector_packed_gemm2", grids[1], args2, second.warps),
    ]
