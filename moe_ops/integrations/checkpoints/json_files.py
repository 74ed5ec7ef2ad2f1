"""Reading JSON that others wrote: what is damaged is a ValueError that names the file."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any


def check_regular(file: Path) -> None:
    """Raise ValueError unless there is a regular file, or a link to one: reading a pipe would wait
    for its other end.
    """
    if not file.is_file():
        found = "something else" if file.exists() else "none"
        raise ValueError(f"{file} must be a regular file, got {found}")


def read_object(file: Path, *, unique: bool = False) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no file.

    Raises:
        ValueError: the file is no regular one, or as `parse_object`.
    """
    if not os.path.lexists(file):
        return {}
    check_regular(file)
    return parse_object(file.read_bytes(), str(file), unique=unique)


def parse_object(text: bytes, where: str, *, unique: bool = False) -> dict[str, Any]:
    """The JSON object of a text.

    Args:
        text: in UTF-8.
        where: what the text is, for messages.
        unique: no object in it may have a name twice.

    Raises:
        ValueError: it is no JSON, or nested too deeply, or no object.
    """
    try:
        found = json.loads(text.decode(), object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be JSON, got a damaged file: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be a JSON object, got a {type(found).__name__}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {twice!r} stands twice")
    "".join(found).encode()  # raises for half a surrogate pair, which no output could show
    return found
