"""Measured tables for these tests alone."""

import pytest

from moe_ops.choose import plain as configs
from moe_ops.tables import lookup


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table of its own for "Test GPU"."""
    monkeypatch.setattr(lookup, "_FOLDER", tmp_path)
    for cached in (lookup._entries, configs.for_experts):
        cached.cache_clear()
    yield lookup.path_of("Test GPU")
    for cached in (lookup._entries, configs.for_experts):
        cached.cache_clear()
