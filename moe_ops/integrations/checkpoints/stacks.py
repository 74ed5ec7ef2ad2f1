"""Stacks of experts' tensors, which threads fill: each reads one expert after the other, converts
it and puts it into its place. What needs no conversion is read right there.

Where a thread would call a torch operator on a whole matrix, numpy does the work: torch starts as
many threads as it uses for each thread that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from moe_ops import environment

Parts = dict[str, Tensor]  # of one matrix, by the names that from_quantized gives them

MOST_THREADS = 16


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

    def put(self, e: int, projections: Sequence[Parts]) -> None:
        """Copy the matrices of expert ``e``, where they are not at their places already.

        The first expert says what they look like; others may come in any order, from any thread.
        """
        if not self.tensors:
            self._make(projections)
        for parts, places in zip(projections, self.places(e), strict=True):
            for name, part in parts.items():
                _copy(places[name], part)

    def _make(self, projections: Sequence[Parts]) -> None:
        for name, t in projections[0].items():
            rows = [len(parts[name]) for parts in projections] if t.dim() else []
            self._rows[name] = rows
            shape = (sum(rows), *t.shape[1:]) if rows else ()
            self.tensors[name] = t.new_empty((self.count, *shape))

    def places(self, e: int) -> list[Parts]:
        """Where the parts of each projection of an expert belong, as views."""
        count = max(map(len, self._rows.values()))
        places: list[Parts] = [{} for _ in range(count)]
        for name, t in self.tensors.items():
            if not self._rows[name]:
                views: Sequence[Tensor] = [t[e]] * count
            elif self.in_turn:
                views = [t[e, i::count] for i in range(count)]
            else:
                views = t[e].split(self._rows[name])
            for place, view in zip(places, views, strict=True):
                place[name] = view
        return places


def _copy(place: Tensor, part: Tensor) -> None:
    if place.is_cpu and _overlap(place, part):
        return  # it was read there
    if place.is_cpu and part.dtype == place.dtype:
        np.copyto(_integers(place), _integers(part.contiguous()))  # by this thread alone
    else:
        place.copy_(part)


def _overlap(a: Tensor, b: Tensor) -> bool:
    return np.may_share_memory(_integers(a), _integers(b))


def _integers(t: Tensor) -> np.ndarray:
    """The elements as integers, as numpy lacks bfloat16 and floats of 8 bits."""
    return t.view(_SAME_SIZE[t.element_size()]).numpy()


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def kept(tensors: Parts, parts: Parts) -> dict[str, str]:
    """Roles of tensors whose bytes a conversion left as and where they are, and the names of what
    they became; without numbers that a matrix has once, which projections may share.
    """
    return {
        role: name
        for role, t in tensors.items()
        for name, part in parts.items()
        if part.dim()
        and _overlap(part, t)
        and part.nbytes == t.nbytes
        and part.is_contiguous()
        and t.is_contiguous()
    }


def for_each(function: Callable[[int], None], items: range, what: str) -> None:
    """Call a function for each of these numbers, by as many threads as torch uses, at most
    MOST_THREADS.

    No thread is left when this returns or raises: what raises for the first of the numbers.
    """
    count = min(torch.get_num_threads(), MOST_THREADS, len(items))
    if count < 2:
        for item in environment.progress_bar(items, what):
            function(item)
        return
    with ThreadPoolExecutor(count, "moe_ops_reader") as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in environment.progress_bar(futures, what):
                future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
