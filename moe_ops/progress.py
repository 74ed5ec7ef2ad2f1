"""Progress bars for work that takes minutes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def bar(items: Sequence[_T], what: str) -> Iterable[_T]:
    """`items` behind a progress bar on a terminal's stderr, if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=what, leave=False, disable=not sys.stderr.isatty())
