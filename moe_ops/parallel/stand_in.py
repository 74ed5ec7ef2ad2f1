"""The kernels of `kernels/comm/push` for CPUs: the same buffers, epochs and order of sums,
in plain torch, with flags after rows of all kinds. For processes of one host; meant for tests,
not for speed.

Flags are plain stores and loads: Python and torch take far longer between two of them than a
processor may keep them apart.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from moe_ops.kernels.comm.mailbox import Mailbox

_PAUSE = 20e-6  # seconds between two looks at a flag


class Late(RuntimeError):
    """Another rank has not sent within the timeout, now or in an earlier exchange."""


def _region(buffer: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return buffer[start : start + count].view(dtype).view(shape)


class _Buffer:
    """One rank's buffer, in one epoch."""

    def __init__(self, mailbox: Mailbox, rank: int, parity: int, dtype: torch.dtype) -> None:
        layout = mailbox.layout
        slots, T = layout.group_size - 1, layout.max_num_tokens
        buffer = mailbox.buffers[rank]
        pitch, words = layout.pitch // dtype.itemsize, 2 * layout.top_k
        self.flags = _region(buffer, 0, (2, slots, layout.blocks + 1), torch.int64)[parity]
        meta = _region(buffer, layout.meta_start, (2, slots, T, words), torch.int32)
        rows = _region(buffer, layout.rows_start, (2, slots, T, pitch), dtype)
        self.meta, self.rows = meta[parity], rows[parity]


class Epoch:
    """One epoch of a mailbox."""

    def __init__(self, mailbox: Mailbox, dtype: torch.dtype, timeout: float) -> None:
        self.mailbox, self.timeout = mailbox, timeout
        self.rank, self.size = mailbox.rank, mailbox.layout.group_size
        if int(mailbox.epochs[0]) < 0:
            raise Late("an earlier exchange was given up; start all ranks anew")
        mailbox.epochs.add_(1)
        self.epoch = int(mailbox.epochs[0])
        self.buffers = [_Buffer(mailbox, rank, self.epoch & 1, dtype) for rank in range(self.size)]

    def send(self, after: int, rows: Tensor, meta: Tensor | None, count: int) -> None:
        """Rows to the rank that comes `after` places after this one."""
        peer, slot = (self.rank + after) % self.size, self.size - 1 - after
        buffer = self.buffers[peer]
        buffer.rows[slot, : rows.shape[0], : rows.shape[1]] = rows
        if meta is not None:
            buffer.meta[slot, : meta.shape[0]] = meta
        buffer.flags[slot] = (self.epoch << 32) | count

    def wait(self, after: int) -> int:
        """Until all rows of the rank `after` places after this one are there; how many it has."""
        flags = self.buffers[self.rank].flags[after - 1]
        end = time.monotonic() + self.timeout
        while not bool((flags >> 32 == self.epoch).all()):
            if time.monotonic() > end:
                # From now on ranks may count different epochs, and take old rows for new ones.
                self.mailbox.epochs.fill_(-1)
                raise Late(
                    f"rank {(self.rank + after) % self.size} sent nothing within {self.timeout} s"
                )
            time.sleep(_PAUSE)
        return int(flags[0]) & 0xFFFFFFFF

    def received(self, after: int) -> tuple[Tensor, Tensor]:
        """(rows, metadata) that the rank `after` places after this one sent."""
        buffer = self.buffers[self.rank]
        return buffer.rows[after - 1], buffer.meta[after - 1]


def push_rows(
    out: Tensor,  # (R * T, K), written
    out_ids: Tensor | None,  # (R * T, top_k) int32, written
    out_weights: Tensor | None,  # (R * T, top_k) fp32, written
    x: Tensor,  # (M, K)
    topk_ids: Tensor | None,  # (M, top_k)
    topk_weights: Tensor | None,  # (M, top_k)
    mailbox: Mailbox,
    timeout: float,
) -> None:
    """Rows of all ranks, with the ids and weights of their experts if given."""
    epoch = Epoch(mailbox, x.dtype, timeout)
    T, top_k = mailbox.layout.max_num_tokens, mailbox.layout.top_k
    (M, K), meta = x.shape, None
    if topk_ids is not None and topk_weights is not None:
        ids = topk_ids.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)
        meta = torch.cat([ids, topk_weights.to(torch.float32).view(torch.int32)], 1)
    for after in range(1, epoch.size):
        epoch.send(after, x, meta, M)
    for after in range(epoch.size):
        rank = (epoch.rank + after) % epoch.size
        here = slice(rank * T, (rank + 1) * T)
        count, rows, words = M, x, meta
        if after > 0:
            count = epoch.wait(after)
            rows, words = epoch.received(after)
        out[here] = 0
        out[here][:count] = rows[:count, :K]
        if out_ids is not None and out_weights is not None and words is not None:
            out_ids[here], out_weights[here] = -1, 0
            out_ids[here][:count] = words[:count, :top_k]
            out_weights[here][:count] = words[:count, top_k:].contiguous().view(torch.float32)


def push_sums(
    out: Tensor,  # (M, K), written
    x: Tensor,  # (R * T, K)
    mailbox: Mailbox,
    timeout: float,
) -> None:
    """The sums over all ranks of the rows of this one, in fp32 and in the order of ranks."""
    epoch = Epoch(mailbox, x.dtype, timeout)
    T, (M, K) = mailbox.layout.max_num_tokens, out.shape
    parts = x.view(epoch.size, T, K)
    for after in range(1, epoch.size):
        epoch.send(after, parts[(epoch.rank + after) % epoch.size], None, M)
    for after in range(1, epoch.size):
        epoch.wait(after)
    total = torch.zeros(M, K, dtype=torch.float32)
    for rank in range(epoch.size):
        after = (rank - epoch.rank) % epoch.size
        rows = epoch.received(after)[0] if after > 0 else parts[epoch.rank]
        total += rows[:M, :K].to(torch.float32)
    out.copy_(total)
