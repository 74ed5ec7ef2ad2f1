"""Measured tables for these tests alone."""

import pytest

from moe_ops import tuning
from moe_ops.kernels import triton_tiles


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table of its own for "Test GPU"."""
    monkeypatch.setattr(tuning, "_FOLDER", tmp_path)
    for cached in (tuning._entries, triton_tiles._for_experts):
        cached.cache_clear()
    yield tuning.path_of("Test GPU")
    for cached in (tuning._entries, triton_tiles._for_experts):
        cached.cache_clear()
