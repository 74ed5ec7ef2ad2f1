"""Layouts of integers of less than a byte in checkpoints, and the one that moe_ops keeps.

All functions take any leading dimensions. Codes are unsigned: 0 to 2**bits - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.integrations.checkpoints import reading

# AutoAWQ stores element AWQ_ORDER[i] of eight neighbours in bits 4i to 4i + 3.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def octets(words: Tensor, dim: int) -> Tensor:
    """The bytes of int32 words of neighbours along ``dim``, the first in the low bits: of codes of
    4 bits the one layout that moe_ops keeps, of 8 bits the codes.

    Args:
        words: (..., n, ...) int32.

    Returns:
        uint8, with 4 n bytes along the last dimension.
    """
    words = words.movedim(dim, -1)
    in_order = words if words.stride(-1) == 1 else _contiguous(words)
    return in_order.view(torch.uint8)  # little endian


def _contiguous(matrices: Tensor) -> Tensor:
    """(..., N, K) in order. torch turns one matrix by blocks, and more of them by elements."""
    if matrices.dim() < 3 or not matrices.is_cpu:
        return matrices.contiguous()
    turned = reading.empty(matrices.shape, matrices.dtype)
    sources, places = matrices.flatten(0, -3), turned.flatten(0, -3)
    mode = torch.is_inference_mode_enabled()  # of this thread, which others do not have

    def turn(some: slice) -> None:
        with torch.inference_mode(mode):
            for source, place in zip(sources[some], places[some], strict=True):
                place.copy_(source)

    reading.for_some(turn, len(places), turned.nbytes)
    return turned


def unpack_int32(
    words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None
) -> Tensor:
    """Codes of int32 words of 32 / bits neighbours along ``dim`` each, the first in the low bits.

    Args:
        words: (..., n, ...) int32.
        bits: 4 or 8.
        order: which of the neighbours lies in the i-th lowest bits; None for ascending.

    Returns:
        uint8, with n * 32 / bits elements along ``dim``.
    """
    per_word = 32 // bits
    codes = octets(words, dim)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    if order is not None:
        places = [order.index(i) for i in range(per_word)]
        codes = codes.unflatten(-1, (-1, per_word))[..., places].flatten(-2)
    return codes.movedim(-1, dim)


def pack_nibbles(codes: Tensor) -> Tensor:
    """(..., K) codes of 4 bits -> (..., K/2) uint8, the even element in the low nibble."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)
