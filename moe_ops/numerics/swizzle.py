"""The order in which tensor cores from SM100 on read the scales of blocks of columns: tiles of 128
rows and 4 columns, each 512 contiguous bytes, in which row r and column c are at (r % 32, r // 32,
c). Scales are of one byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.meta.workspace import round_up

TILE_ROWS, TILE_COLUMNS = 128, 4


def _bytes(t: Tensor) -> Tensor:
    """As uint8: not every version of torch can pad e4m3."""
    return t.view(torch.uint8)


def swizzle(scale: Tensor) -> Tensor:
    """Scales (.., N, G) in tiles, padded with zeros to whole ones: (.., round_up(N, 128),
    round_up(G, 4)).
    """
    rows, columns = scale.shape[-2:]
    more = (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS)
    padded = torch.nn.functional.pad(_bytes(scale), more) if any(more) else _bytes(scale)
    *batch, N, G = padded.shape
    tiles = padded.reshape(*batch, N // 128, 4, 32, G // 4, 4).movedim(-2, -4)
    return tiles.transpose(-3, -2).reshape(*batch, N, G).view(scale.dtype)


def unswizzle(scale: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle` for scales (.., rows, columns)."""
    *batch, N, G = scale.shape
    tiles = _bytes(scale).reshape(*batch, N // 128, G // 4, 32, 4, 4).transpose(-3, -2)
    found = tiles.movedim(-4, -2).reshape(*batch, N, G).view(scale.dtype)
    return found[..., :rows, :columns].contiguous()


def swizzled_shape(rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of swizzled scales. int or SymInt."""
    return round_up(rows, TILE_ROWS), round_up(columns, TILE_COLUMNS)
