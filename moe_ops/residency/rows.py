"""How the tensors of a layer's experts lie in one region of memory: each begins at a multiple of
ALIGNMENT bytes, and is contiguous as kernels read it, for all E experts on the host and for S of
them in a bank of slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.meta.workspace import round_up

ALIGNMENT = 256  # bytes


class ExpertEntry(NamedTuple):
    """What a tensor has for each expert."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of an expert's entry."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Rows(NamedTuple):
    """The tensors of several experts in one region of bytes."""

    region: Tensor  # uint8
    starts: dict[str, int]  # where each piece begins
    entries: dict[str, Tensor]  # (experts, row_bytes) uint8
    tensors: dict[str, Tensor]  # (experts, *shape)


def bytes_of(pieces: Mapping[str, ExpertEntry], experts: int) -> tuple[dict[str, int], int]:
    """(where each piece begins, bytes of the region) for so many experts."""
    starts, end = {}, 0
    for name, piece in pieces.items():
        starts[name] = end
        end = round_up(end + experts * piece.row_bytes, ALIGNMENT)
    return starts, end


def rows_in(region: Tensor, pieces: Mapping[str, ExpertEntry], experts: int) -> Rows:
    """The Rows of so many experts in a region of as many bytes as `bytes_of` says."""
    starts, end = bytes_of(pieces, experts)
    assert region.numel() == end, (region.numel(), end)
    entries, tensors = {}, {}
    for name, (shape, dtype) in pieces.items():
        size = experts * pieces[name].row_bytes
        part = region[starts[name] : starts[name] + size]
        entries[name] = part.view(experts, -1)
        tensors[name] = part.view(dtype).view(experts, *shape)
    return Rows(region, starts, entries, tensors)
