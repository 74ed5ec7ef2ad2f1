"""Pieces of files, which threads read into the places where they are wanted.

What threads do is little for Python and much for the system or numpy, which let go of the
interpreter: a read fills many places, and a copy is of many matrices. They call no operator of
torch that would start threads of its own for each of them.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_ops import environment
from moe_ops.integrations.checkpoints.headers import Entry

MOST_THREADS = 16
READING, CONVERTING = "reading tensors", "converting tensors"
_SHARE = 2**20  # bytes for which a thread is worth starting
_PLACES = 512  # of one read, fewer than systems allow
_GAP = 64  # bytes between two pieces that are read to reach the second in one read
_LARGE = 2**25  # bytes from which allocators ask the system for memory of its own
_LARGE_PAGE = 2**21


class Piece(NamedTuple):
    """Bytes of a tensor and their place: contiguous memory, as bytes."""

    entry: Entry
    begin: int  # byte offset in the file
    place: np.ndarray


def read_pieces(pieces: Iterable[Piece]) -> None:
    """Read pieces, in any order.

    Raises:
        ValueError: a file ends before a piece of it does; the message names tensor and file.
    """
    files: dict[Path, list[Piece]] = {}
    for piece in pieces:
        if len(piece.place):
            files.setdefault(piece.entry.file, []).append(piece)
    count = sum(len(piece.place) for found in files.values() for piece in found)
    most = max(_SHARE, -(-count // (4 * threads())))
    shares = [share for found in files.values() for share in _shares(found, most)]
    for_each(lambda i: _read(shares[i]), range(len(shares)), READING)


def _shares(pieces: list[Piece], most: int) -> list[list[Piece]]:
    """Pieces of one file in their order, cut into shares of about ``most`` bytes."""
    shares: list[list[Piece]] = [[]]
    room = most
    for entry, begin, place in sorted(pieces, key=lambda piece: piece.begin):
        for i in range(0, len(place), most):
            part = place[i : i + most]
            if room <= 0:
                shares.append([])
                room = most
            shares[-1].append(Piece(entry, begin + i, part))
            room -= len(part)
    return shares


def _read(pieces: list[Piece]) -> None:
    """Read pieces of one file in their order, those that adjoin by one read."""
    between = np.empty(_GAP, np.uint8)
    with pieces[0].entry.file.open("rb", buffering=0) as f:  # a buffer would read more
        while pieces:
            begin = end = pieces[0].begin
            places: list[np.ndarray] = []
            count = 0
            for piece in pieces[:_PLACES]:
                gap = piece.begin - end
                if not 0 <= gap <= _GAP:
                    break
                places += [between[:gap], piece.place] if gap else [piece.place]
                end = piece.begin + len(piece.place)
                count += 1
            reached = _read_run(f, begin, places)
            if reached < end:
                cut = next(p for p in pieces if p.begin + len(p.place) > reached)
                raise ValueError(f"{cut.entry} ends early: the file was changed while it was read")
            pieces = pieces[count:]


def _read_run(f: io.FileIO, begin: int, places: list[np.ndarray]) -> int:
    """Fill places with the bytes that follow each other from ``begin`` on; returns how far they
    were there.
    """
    while places:
        got = _read_some(f, begin, places)
        if not got:
            break
        begin += got
        filled = 0
        while filled < len(places) and got >= len(places[filled]):
            got -= len(places[filled])
            filled += 1
        places = places[filled:]
        if got:
            places[0] = places[0][got:]
    return begin


def _read_some(f: io.FileIO, begin: int, places: list[Any]) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(f.fileno(), places, begin)
    f.seek(begin)
    return f.readinto(places[0]) or 0


def threads() -> int:
    """The number of threads that read and convert."""
    return min(torch.get_num_threads(), MOST_THREADS)


def for_each(function: Callable[[int], None], items: range, what: str) -> None:
    """Call a function for each of these numbers, by as many threads as torch uses, at most
    MOST_THREADS.

    No thread is left when this returns or raises: what raises for the first of the numbers.
    """
    count = min(threads(), len(items))
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


def for_some(function: Callable[[slice], None], items: int, count: int) -> None:
    """Call a function for all of these items, by threads that take some of them each if that is
    worth starting them for ``count`` bytes.
    """
    shares = min(threads(), items, -(-count // _SHARE))
    bounds = [items * i // shares for i in range(shares + 1)]
    for_each(lambda i: function(slice(*bounds[i : i + 2])), range(shares), CONVERTING)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """torch.empty on the CPU, in large pages where the system gives them to those that ask: the
    first touch of each page stops a thread.
    """
    t = torch.empty(shape, dtype=dtype, device="cpu")
    if _advise is not None and t.nbytes >= _LARGE:
        begin = -(-t.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
        _advise(begin, t.data_ptr() + t.nbytes - begin, mmap.MADV_HUGEPAGE)
    return t


def _find_advise() -> Callable[[int, int, int], int] | None:
    """The system's madvise, where it knows of large pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


_advise = _find_advise()
