"""A backend of another package, as docs/add_a_backend.md shows it, and registering it for a
while."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import types
from collections.abc import Iterator
from unittest import mock

import moe_ops
from moe_ops import backends
from moe_ops.backend import Backend
from moe_ops.planning.register import replace_backends
from tests.support.paths import ROOT


def documented_code() -> str:
    """The complete backend of docs/add_a_backend.md."""
    text = (ROOT / "docs" / "add_a_backend.md").read_text()
    found = re.search(r"^```python\n(.*?)^```", text, re.S | re.M)
    assert found is not None
    return found.group(1)


@functools.cache
def dense() -> Backend:
    """That backend; its operators are defined at the first call, and it is not registered."""
    module = types.ModuleType("dense_backend")
    sys.modules[module.__name__] = module  # where tracers look for what its functions name
    with mock.patch.object(moe_ops, "register_backend"):
        exec(compile(documented_code(), "docs/add_a_backend.md", "exec"), vars(module))
    backend: Backend = module.BACKEND
    return backend


@contextlib.contextmanager
def registered(backend: Backend) -> Iterator[Backend]:
    """`backend` among the others inside."""
    before = backends.BACKENDS
    moe_ops.register_backend(backend)
    try:
        yield backend
    finally:
        replace_backends(before)
