"""Layout of the buffers that ranks write into each other's memory. Arithmetic only.

R ranks, T = max_num_tokens, the most rows of one rank. Every rank has a buffer of the same layout,
with a slot for each other rank, two sets of slots, and in each slot flags, metadata and rows:

    flags     (2, R - 1, blocks + 1) int64; bits 32 to 63 are the epoch in which the block was
              sent, bits 0 to 31 the number of rows of the sender. The last flag is sent before
              any row. Rows of floats have no other flags
    metadata  (2, R - 1, T, words) int32: expert ids of a row, then its router weights as fp32 bits
    rows      (2, R - 1, T, pitch), each row padded to a multiple of 16 bytes

The sets are used in turn: that of an epoch is its lowest bit. Rank r keeps what rank (r + 1 + s) %
R sends in slot s. A block is `block_rows` rows, followed by one flag if rows have flags.
"""

from __future__ import annotations

from typing import NamedTuple

from moe_ops.meta.workspace import cdiv, round_up

MOST_BLOCK_ROWS = 8  # rows of a block at most, but
MOST_BLOCK_BYTES = 2048  # more of them, where they are so small
MANY_TOKENS = 4096  # of a rank, from which rows are sent after their routing
FEW_BLOCKS = 128  # blocks have one row while there are no more: about as many as multiprocessors
_ALIGNMENT = 128  # bytes: a cache line, of which each region begins one


class SymmetricLayout(NamedTuple):
    """Layout of the buffers of one kind of exchange, equal on all ranks of a group."""

    group_size: int  # R
    max_num_tokens: int  # T
    row_bytes: int  # of one row
    top_k: int = 0  # experts of a row whose ids and weights travel with it; 0: rows alone

    @property
    def block_rows(self) -> int:
        """The least power of two with which there are at most FEW_BLOCKS blocks, up to a size at
        which the link is busy. It does not depend on M, so that senders and receivers agree.
        """
        rows, most = 1, max(MOST_BLOCK_ROWS, MOST_BLOCK_BYTES // self.row_bytes)
        while rows < most and rows * FEW_BLOCKS < self.max_num_tokens:
            rows *= 2
        return rows

    @property
    def blocks(self) -> int:
        """Blocks of the rows of one rank."""
        return cdiv(self.max_num_tokens, self.block_rows)

    @property
    def pitch(self) -> int:
        """Bytes from one row to the next."""
        return round_up(self.row_bytes, 16)

    @property
    def slots(self) -> int:
        """Slots of both sets."""
        return 2 * (self.group_size - 1)

    @property
    def meta_start(self) -> int:
        """Bytes before the metadata: the flags."""
        return round_up(self.slots * (self.blocks + 1) * 8, _ALIGNMENT)

    @property
    def rows_start(self) -> int:
        """Bytes before the rows."""
        meta = self.slots * self.max_num_tokens * 2 * self.top_k * 4
        return self.meta_start + round_up(meta, _ALIGNMENT)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer of one rank."""
        return self.rows_start + self.slots * self.max_num_tokens * self.pitch


def packed_bytes(columns: int) -> int:
    """Bytes of a row of e4m3, followed by the fp32 scales of its groups of 128 columns."""
    return columns + 4 * cdiv(columns, 128)


def rows_later(group_size: int, max_num_tokens: int) -> bool:
    """Whether layers that record no gradients send rows after their routing, if a backend may run
    that sends them (`moe_ops.parallel.wire.pays_later`): an exchange more, after which rows travel
    while a GPU copies its own to their experts.
    """
    return group_size > 1 and max_num_tokens >= MANY_TOKENS


def symmetric_memory_bytes(
    group_size: int,
    max_num_tokens: int,
    hidden_size: int,
    top_k: int,
    itemsize: int = 2,
    quantized: bool = False,
) -> int:
    """Bytes of symmetric memory that a rank holds for layers of one shape.

    One buffer for dispatch and one for combine, shared by all layers of a process group whose
    max_num_tokens, hidden size, experts per token and dtype are equal. They are allocated at the
    first call and kept; a group with layers of fp8_block and others of equal sizes holds dispatch
    buffers of both kinds. Gradients of router weights take one more, of top_k * 4 bytes per row;
    and where rows are sent after their routing (`rows_later`), layers that also record gradients
    one more for dispatch.

    Args:
        group_size: R, ranks of the group.
        max_num_tokens: T, the most tokens that one rank passes in one call.
        hidden_size: K.
        top_k: experts per token.
        itemsize: bytes of one number of a token.
        quantized: on GPUs with experts of fp8_block and hidden sizes that are multiples of 128,
            whose tokens travel quantized after their routing
            (`moe_ops.parallel.wire.quantizes_later`).
    """
    row = hidden_size * itemsize
    combine = SymmetricLayout(group_size, max_num_tokens, row)
    if rows_later(group_size, max_num_tokens):
        routing = SymmetricLayout(group_size, max_num_tokens, top_k * 4, top_k)
        packed = SymmetricLayout(group_size, max_num_tokens, packed_bytes(hidden_size))
        rows = packed if quantized else combine
        return routing.num_bytes + rows.num_bytes + combine.num_bytes
    dispatch = SymmetricLayout(group_size, max_num_tokens, row, top_k)
    return dispatch.num_bytes + combine.num_bytes
