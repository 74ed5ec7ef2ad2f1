"""Layouts of pairs that are sorted by expert: where each pair's row is, as kernels take it, and
how programs share the rows. torch alone.

The contiguous layout: rows grouped by expert, every group padded to a multiple of an alignment;
the pairs of an expert keep their order. The masked layout: as many rows for each expert, of which
the first are used.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from torch import Tensor

from moe_ops.kernels.launch import Constant, Pointer, Runtime, Specialized, unprefixed
from moe_ops.meta.workspace import cdiv, round_up

MAX_PARTS = 128  # at most so many programs place pairs
MAX_PROGRAMS = 4096  # about so many programs of a launch over batches share all rows


class Index(NamedTuple):
    """Where each part of the int32 workspace starts. int or SymInt."""

    rows: int  # (S,) the row of each pair
    counts: int  # (MAX_PARTS, BLOCK_E) pairs of each expert in each part
    end: int


def block_e(E: int) -> int:
    """BLOCK_E of kernels/place/place.py."""
    return max(16, 1 << (E - 1).bit_length())


def index_parts(pairs: Any, E: int) -> Index:
    """The parts after the end rows (E,). Each starts at a multiple of 16 bytes."""
    starts = [round_up(E, 4)]
    for size in (pairs, MAX_PARTS * block_e(E)):
        starts.append(starts[-1] + (size + 3) // 4 * 4)
    return Index(*starts)


@unprefixed
class Layout(NamedTuple):
    """Where rows of x are: in the contiguous layout, or in the masked layout of R rows an
    expert.
    """

    rows: Pointer  # (S,) the row of each pair; None in the masked layout
    # (E,) the row after each expert's last pair; in the masked layout, the rows of each expert
    groups: Annotated[Tensor, "pointer"]
    R: Runtime  # all rows of the contiguous layout, or those of an expert in the masked layout


class ExpertBias(NamedTuple):
    """A bias (E, columns) whose rows follow one another, or none, for rows that know their expert
    by `Layout.groups`.
    """

    ptr: Pointer
    E: Runtime
    BLOCK_E: Constant


def expert_bias(bias: Tensor | None, E: int = 0) -> ExpertBias:
    """The ExpertBias of a contiguous tensor (E, columns), or of None. With E rows know their
    expert of E also without one.
    """
    E = E if bias is None else bias.shape[0]
    return ExpertBias(bias, E, block_e(E) if E else 0)


class StridedRows(NamedTuple):
    """Rows (M, K), with stride_e 0, or batches of rows (E, T, K)."""

    ptr: Pointer
    stride_e: Specialized
    stride_m: Specialized
    stride_k: Specialized


def rows_of(x: Tensor) -> StridedRows:
    """The StridedRows of a tensor (M, K) or (E, T, K)."""
    return StridedRows(x, *x.stride()) if x.ndim == 3 else StridedRows(x, 0, *x.stride())


def programs_of_expert(tasks: int, experts: int) -> int:
    """Programs that share the tasks of one expert, at most `tasks`.

    A program takes time also where its row is empty, so there is none for each of E * T rows.
    """
    return min(tasks, cdiv(MAX_PROGRAMS, experts))


def programs_of_rows(x: Tensor, layout: Layout, top_k: int) -> tuple[int, int]:
    """(programs along the first axis, programs of one expert): one a token, or several that share
    a batch.
    """
    if layout.rows is not None:
        return layout.rows.numel() // top_k, 1
    programs = programs_of_expert(x.shape[1], x.shape[0])
    return x.shape[0] * programs, programs
