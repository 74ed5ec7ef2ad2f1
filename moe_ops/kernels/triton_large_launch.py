"""Launches of kernels/triton_large.py: when they can run, the tensor descriptors they take, their arguments."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_ops.kernels.triton_launch import Launch
from moe_ops.kernels.triton_scales import Input, Scales, Weight
from moe_ops.kernels.triton_tiles import GROUP, LARGE_MEMORY, Tiles
from moe_ops.meta.workspace import cdiv


def possible(w13: Weight, w2: Weight, itemsize: int, gated: bool, interleaved: bool) -> bool:
    """Whether the kernels can run: descriptors take rows of 16-byte step alone, and products of e4m3 whole
    blocks of scales. `itemsize`: bytes an element of h."""
    K, I = w2.data.shape[1:]  # noqa: E741
    if w2.chip.shared_memory <= LARGE_MEMORY or not (_describable(w13) and _describable(w2)):
        return False
    if w2.scales == Scales("", ""):
        return I * itemsize % 16 == 0
    whole = K % 128 == 0 and I % 128 == 0 and not (gated and interleaved)
    return w2.scales == Scales("block", "group") and whole


def _describable(w: Weight) -> bool:
    data, size = w.data, w.data.dtype.itemsize
    strides = data.stride(0) * size | data.stride(1) * size | data.data_ptr()
    return data.stride(2) == 1 and strides % 16 == 0


def _descriptor(base: Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]):
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(base, list(shape), list(strides), list(box))


def _weight(w: Weight, parts: int, rows: int, k: int):
    """Descriptor of a weight whose rows are `parts` parts, with boxes of `rows` rows: of e4m3, of one part."""
    E, N, K = w.data.shape
    N //= parts
    strides = (w.data.stride(0), N * w.data.stride(1), *w.data.stride()[1:])
    together = 1 if w.scale is not None else parts
    return _descriptor(w.data, (E, parts, N, K), strides, (1, together, rows // parts, k))


def gemm1(
    w: Weight,
    bias: Tensor | None,
    h: Input,
    x: Input,
    input_weights: Tensor | None,  # router weights to scale the input by
    routing: tuple,  # index workspace, blocks in it, top_k
    activation: tuple,  # alpha, beta, limit; name, gated, interleaved, limited
    tiles: Tiles,
) -> Launch:
    """h = activation(x @ w.T + bias) for pairs sorted by expert."""
    tile = tiles.gemm1
    *_, gated, interleaved, _ = activation
    parts = 2 if gated and not interleaved else 1
    K, I = w.data.shape[2], w.data.shape[1] // (2 if gated else 1)  # noqa: E741
    columns = tile.rows // (2 if gated else 1)  # of h
    args = (
        *(h.data, h.scale, h.stride_group, x.data, x.scale, x.stride_group),
        *(_weight(w, parts, tile.rows, tile.k), w.scale, *w.scale_strides),
        *(bias, *((0, 0) if bias is None else bias.stride()), *routing, input_weights),
        *((0, 0) if input_weights is None else input_weights.stride()),
        *(K, I, *x.strides[1:], *activation[:3], bias is not None, input_weights is not None),
        *(*activation[3:], w.scale is not None, w.chip.native, K % tile.k == 0, GROUP),
        *(tiles.tokens, *tile[:3], w.chip.dependent),
    )
    return Launch("large_gemm1", (routing[1] * cdiv(I, columns), 1, 1), args, tile.warps)


def gemm2(
    w: Weight,
    bias: Tensor | None,
    y: Tensor,  # (pairs, N) fp32
    h: Input,
    pairs: int,
    routing: tuple,  # index workspace, blocks in it
    tiles: Tiles,
) -> Launch:
    """y = h @ w.T + bias, from pairs sorted by expert to their own order."""
    tile, (_, N, K) = tiles.gemm2, w.data.shape
    rows = tiles.tokens // tiles.parts
    args = (
        *(y, _descriptor(h.data, (pairs, K), (K, 1), (rows, tile.k)), h.scale, h.stride_group),
        *(_weight(w, 1, tile.rows, tile.k), w.scale, *w.scale_strides),
        *(bias, *((0, 0) if bias is None else bias.stride()), *routing, K, N, bias is not None),
        *(w.scale is not None, w.chip.native, GROUP, rows, *tile[:3], tiles.parts),
        w.chip.dependent,
    )
    grid = (routing[1] * tiles.parts * cdiv(N, tile.rows), 1, 1)
    return Launch("large_gemm2", grid, args, tile.warps)
