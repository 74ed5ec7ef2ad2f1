"""Measured tables for these tests alone."""

import json

import pytest

from moe_ops.tables import lookup
from tests.support.cases import measured_tiers


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes the measured table of an H200 for `PLAIN` and, with the same tiers, for `WIDE`."""

    def write(*tiers: tuple[int, str], **facts):
        entry = {"num_experts": 8, "hidden_size": 64, "intermediate_size": 32, "top_k": 2}
        entry |= {"scheme": "", "dtype": "bfloat16"} | facts
        entry["backends"] = measured_tiers(*tiers)
        entries = [entry, entry | {"dtype": "float64"}]
        text = json.dumps({"gpu": "NVIDIA H200", "entries": entries})
        (tmp_path / "nvidia_h200.json").write_text(text)
        lookup._entries.cache_clear()

    monkeypatch.setattr(lookup, "_FOLDER", tmp_path)
    lookup._entries.cache_clear()
    yield write
    lookup._entries.cache_clear()
