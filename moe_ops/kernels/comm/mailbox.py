"""Mailbox: the buffers into which the ranks of a group write. torch alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.meta.symmetric import SymmetricLayout

# Programs of a launch at most, each of at most 256 threads, of which two fit on a multiprocessor.
PROGRAMS = 256


# each byte of metadata and rows that nobody has sent, for kernels; flags are zero at first
EMPTY = 0xFF


def has_flags(dtype: torch.dtype) -> bool:
    """Whether rows travel with a flag after each block, since any bits may be in them. Floats of
    16 bits and more are NaN where all their bits are ones: that tells whether they are there.
    """
    return not dtype.is_floating_point or dtype.itemsize < 2


class Mailbox(NamedTuple):
    """The buffers of all ranks for one kind of exchange, as one of them sees them."""

    layout: SymmetricLayout
    rank: int
    buffers: tuple[Tensor, ...]  # (num_bytes,) uint8 of each rank, see `moe_ops.meta.symmetric`
    peers: Tensor  # (R,) int64, bytes from this rank's buffer to each; holds the buffers
    epochs: Tensor  # (PROGRAMS,) int32, zero at first: launches of each program

    @classmethod
    def of(cls, layout: SymmetricLayout, rank: int, buffers: Sequence[Tensor]) -> Mailbox:
        """A mailbox that was never used."""
        own = buffers[rank]
        distances = [buffer.data_ptr() - own.data_ptr() for buffer in buffers]
        peers = torch.tensor(distances, dtype=torch.int64, device=own.device)
        # A launch has this rank's buffer and `peers` as its arguments. What they lead to must
        # live until it has run, even if its mailbox is gone by then.
        peers.buffers = tuple(buffers)  # type: ignore[attr-defined]
        epochs = torch.zeros(PROGRAMS, dtype=torch.int32, device=own.device)
        return cls(layout, rank, tuple(buffers), peers, epochs)
