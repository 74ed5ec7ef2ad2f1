"""Differentiable collectives of a group's ranks, for eager and traced code.

M or T rows of each of R ranks. torch's own formulas would add gradients of 16 bits in 16 bits. Of
AllGather and ReduceScatter each is the other's backward, and so are Replicate and Sum: gradients
of gradients exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.numerics.sums import add_by_tree


class Ranks(NamedTuple):
    """The group of a dispatcher, and how its collectives add."""

    group: str
    size: int
    all_to_all: bool  # send rows as they are and add them here
    reduce_dtype: torch.dtype | None  # in which rows of 16 bits are added; None: their own
    label: str
    by_tree: bool = False  # send rows as they are and add them here by a binary tree


class AllGather(torch.autograd.Function):
    """Rows of all ranks, (R * T, ...), for each tensor (T, ...); all are sent together."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        # As bytes: gloo (torch 2.11 to 2.13) mixes up coalesced tensors of different item sizes.
        # by way of one dimension: a column of scales may be contiguous with a stride above 1
        sent = [p.reshape(-1).view(torch.uint8).view(*p.shape[:-1], -1) for p in rows]
        received = _exchange(
            ranks, lambda op: op.all_gather_into_tensor_coalesced(sent, ranks.size, ranks.group)
        )
        gathered = [r.view(part.dtype) for r, part in zip(received, rows, strict=True)]
        ctx.mark_non_differentiable(*[part for part in gathered if not part.is_floating_point()])
        ctx.set_materialize_grads(False)
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = zip(grads, ctx.needs_input_grad[1:], strict=True)
        return None, *[
            ReduceScatter.apply(ctx.ranks, grad) if grad is not None and needed else None
            for grad, needed in wanted
        ]


class ReduceScatter(torch.autograd.Function):
    """(R * T, ...) -> (T, ...), summed over ranks and rounded once to the input's dtype."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, rows: Tensor) -> Tensor:
        ctx.ranks = ranks
        rows = rows.contiguous()
        if ranks.all_to_all or ranks.by_tree:
            share = rows.shape[0] // ranks.size
            splits = [share] * ranks.size
            (received,) = _exchange(
                ranks, lambda op: [op.all_to_all_single(rows, splits, splits, ranks.group)]
            )
            parts = received.view(ranks.size, share, *rows.shape[1:])
            # torch adds 16-bit numbers in fp32, in a fixed order, and rounds once
            return add_by_tree(parts.unbind()) if ranks.by_tree else parts.sum(0)
        return _summed(
            ranks,
            rows,
            lambda op, sent: op.reduce_scatter_tensor(sent, "sum", ranks.size, ranks.group),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, AllGather.apply(ctx.ranks, grads[0])[0]


class Replicate(torch.autograd.Function):
    """Rows that all ranks have alike, as they are; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, rows: Tensor) -> Tensor:
        ctx.ranks = ranks
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, Sum.apply(ctx.ranks, grads[0])


class Sum(torch.autograd.Function):
    """(M, ...) of each rank -> their sum on all ranks, rounded once to the input's dtype; the
    gradient is that of one rank, which all have alike.
    """

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, rows: Tensor) -> Tensor:
        ctx.ranks, rows = ranks, rows.contiguous()
        if ranks.by_tree:
            (received,) = _exchange(
                ranks, lambda op: [op.all_gather_into_tensor(rows, ranks.size, ranks.group)]
            )
            return add_by_tree(received.view(ranks.size, *rows.shape).unbind())
        return _summed(ranks, rows, lambda op, sent: op.all_reduce(sent, "sum", ranks.group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, Replicate.apply(ctx.ranks, grads[0])


def largest(ranks: Ranks, number: int, device: torch.device) -> int:
    """The largest of all ranks' numbers, which is read on the host."""
    sent = torch.tensor(number, device=device)
    (found,) = _exchange(ranks, lambda op: [op.all_reduce(sent, "max", ranks.group)])
    return int(found)


def _summed(ranks: Ranks, rows: Tensor, start: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """A sum by a collective, in the dtype that `ranks` names, rounded to that of the rows."""
    wide = rows.dtype if rows.dtype.itemsize > 2 else ranks.reduce_dtype or rows.dtype
    sent = rows.to(wide)
    (summed,) = _exchange(ranks, lambda op: [start(op, sent)])
    # with torch 2.11 a cast to the dtype that it has would lose compiled gradients
    return summed if wide == rows.dtype else summed.to(rows.dtype)


def _exchange(ranks: Ranks, start: Callable[[Any], list[Tensor]]) -> list[Tensor]:
    """The result of a functional collective, awaited.

    Raises:
        RuntimeError: naming the layer, where the others did not take part. NCCL has no such error:
            it ends the process, and traced code has torch's.
    """

    def received() -> list[Tensor]:
        op = torch.ops._c10d_functional
        return [op.wait_tensor(tensor) for tensor in start(op)]

    if torch.compiler.is_compiling():
        return received()
    try:
        return received()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"{ranks.label} could not exchange tokens with the other ranks: one of them ended, or "
            "did not call the layer within the timeout of the process group. The first error in "
            f"the logs of all ranks says more. Here: {error}"
        ) from error
