"""Stacks of experts' tensors, filled some experts at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_ops.integrations.checkpoints import reading

# Of matrices (C, ...) of C experts, by the names that from_quantized gives them. Numbers that a
# matrix has once are (C,).
Parts = dict[str, Tensor]


class Stack:
    """Tensors (E, ...) of a weight, made of the matrices of its experts.

    Args:
        count: E.
        in_turn: rows of an expert's projections take turns, else they follow one another.

    Attributes:
        tensors: by name; those of numbers that a matrix has once are (E,).
    """

    def __init__(self, count: int, in_turn: bool = False):
        self.count, self.in_turn = count, in_turn
        self.tensors: Parts = {}
        self._rows: dict[str, list[int]] = {}  # of each projection

    def put(self, experts: slice, projections: Sequence[Parts]) -> None:
        """Copy the matrices of these experts, where they are not at their places already.

        The first ones say what all look like; others may come in any order.
        """
        if not self.tensors:
            self._make(projections)
        copies = [
            (places[name], part)
            for parts, places in zip(projections, self.places(experts), strict=True)
            for name, part in parts.items()
            if _address(part) != _address(places[name])
        ]
        _copy(copies)

    def _make(self, projections: Sequence[Parts]) -> None:
        for name, t in projections[0].items():
            rows = [parts[name].shape[1] for parts in projections] if t.dim() > 1 else []
            self._rows[name] = rows
            shape = (self.count, sum(rows), *t.shape[2:]) if rows else (self.count,)
            self.tensors[name] = reading.empty(shape, t.dtype) if t.is_cpu else t.new_empty(shape)

    def places(self, experts: slice) -> list[Parts]:
        """Views of the places where the parts of each projection of experts belong."""
        count = max(map(len, self._rows.values()))
        places: list[Parts] = [{} for _ in range(count)]
        for name, t in self.tensors.items():
            if not self._rows[name]:
                views: Sequence[Tensor] = [t[experts]] * count
            elif self.in_turn:
                views = [t[experts, i::count] for i in range(count)]
            else:
                views = t[experts].split(self._rows[name], 1)
            for place, view in zip(places, views, strict=True):
                place[name] = view
        return places


def join_rows(parts: list[Tensor], in_turn: bool) -> Tensor:
    """The rows of an expert's projections, one after the other or in turn."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts, 1).flatten(0, 1) if in_turn else torch.cat(parts)


def _copy(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors (C, ...) to their places, on the CPU by threads that take some experts each."""
    arrays = []
    for place, part in copies:
        if place.is_cpu and part.is_cpu and place.dtype == part.dtype:
            arrays.append((_integers(place), _integers(part)))
        else:
            place.copy_(part)

    def copy(some: slice) -> None:
        for place, part in arrays:
            np.copyto(place[some], part[some])

    if arrays:
        reading.for_some(copy, len(arrays[0][0]), sum(part.nbytes for _, part in arrays))


def _integers(t: Tensor) -> np.ndarray:
    """The elements as integers, as numpy lacks bfloat16 and floats of 8 bits."""
    return t.view(_SAME_SIZE[t.element_size()]).numpy()


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def kept(tensors: Parts, parts: Parts) -> dict[str, str]:
    """Roles of tensors whose bytes a conversion left as and where they are, and the names of what
    they became; without numbers that a matrix has once, which projections may share.
    """
    return {
        role: name
        for role, t in tensors.items()
        for name, part in parts.items()
        if part.dim() > 1
        and part.data_ptr() == t.data_ptr()
        and part.nbytes == t.nbytes
        and part.is_contiguous()
        and t.is_contiguous()
    }
