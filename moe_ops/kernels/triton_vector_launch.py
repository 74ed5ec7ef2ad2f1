"""Launching the kernels of triton_vector.py: a layer of one token, in two launches."""

from __future__ import annotations

from functools import lru_cache

import torch

from moe_ops.activations import NO_LIMIT
from moe_ops.kernels import triton_scales
from moe_ops.kernels.triton_launch import Gpu, Launch
from moe_ops.kernels.triton_rows import activation_of
from moe_ops.kernels.triton_scales import Scales, Weight
from moe_ops.kernels.triton_tiles import FEW_ROWS, Tile, Tiles
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import ExpertsArgs


@lru_cache(maxsize=1024)
def _possible(
    shape: torch.Size, strides13: tuple, strides2: tuple, size: int, scales: Scales, top_k: int
) -> bool:
    E, K, I = shape  # noqa: E741
    if scales.weight and scales != Scales("block", "group"):
        return False
    if scales.x and top_k > FEW_ROWS * E:  # the workspace has no place for h in fp32
        return False
    whole = all(stride * size % 16 == 0 for stride in (*strides13[:2], *strides2[:2]))
    return whole and strides13[2] == strides2[2] == 1 and K % 16 == I % 16 == 0


def possible(w13: Weight, w2: Weight, top_k: int) -> bool:
    """Whether the kernels know the scales of these weights, and can read rows of them 16 bytes at a time."""
    one, two = w13.data, w2.data
    size = two.dtype.itemsize
    return (one.data_ptr() | two.data_ptr()) % 16 == 0 and _possible(
        two.shape, one.stride(), two.stride(), size, w2.scales, top_k
    )


def launches(a: ExpertsArgs, w13: Weight, w2: Weight, tiles: Tiles, chip: Gpu) -> list[Launch]:
    """Both launches of a layer of one token."""
    x, ids, weights, out, expert_map = (
        a.hidden_states, a.topk_ids, a.topk_weights, a.out, a.expert_map
    )  # fmt: skip
    E, K, I = w2.data.shape  # noqa: E741
    top_k = ids.shape[1]
    function, gated, interleaved = activation_of(a.activation)
    quantized, has_map = bool(w2.scales.x), expert_map is not None
    h = triton_scales.flat(a.workspace13, torch.float32 if quantized else x.dtype, top_k * I)
    on_input = a.router_weight_on_input
    num_ids, map_stride = (expert_map.shape[0], expert_map.stride(0)) if has_map else (E, 0)
    routing = (E, num_ids, *ids.stride(), map_stride, weights.stride(1))

    def strides(w: Weight, bias: torch.Tensor | None) -> tuple:
        return (
            *w.data.stride()[:2],
            *w.scale_strides,
            *((0, 0) if bias is None else bias.stride()),
        )

    def constants(columns: int, tile: Tile) -> tuple:
        return (quantized, chip.native, columns <= tile.k, *tile[:3], chip.dependent)

    first = (h, x, w13.data, w13.scale, a.w13_bias, ids, expert_map, weights if on_input else None)
    first += (*routing, top_k, K, I, x.stride(1), *strides(w13, a.w13_bias))
    first += (a.alpha, a.beta, a.limit, has_map, function, gated, interleaved)
    first += (a.limit < NO_LIMIT, *constants(K, tiles.gemm1))
    second = (out, h, w2.data, w2.scale, a.w2_bias, ids, expert_map, None if on_input else weights)
    second += (*routing, I, K, *strides(w2, a.w2_bias), out.stride(1), top_k, has_map)
    second += constants(I, tiles.gemm2)
    grids = (top_k, cdiv(I, tiles.gemm1.rows), 1), (cdiv(K, tiles.gemm2.rows), 1, 1)
    return [
        Launch("vector_gemm1", grids[0], first, tiles.gemm1.warps),
        Launch("vector_gemm2", grids[1], second, tiles.gemm2.warps),
    ]
