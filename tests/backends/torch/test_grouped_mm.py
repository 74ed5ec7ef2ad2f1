"""Which way grouped products in plain torch go on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ops import environment
from moe_ops.backends.torch import grouped_mm


@pytest.mark.parametrize(
    "groups, capability, width, takes",
    [
        (1023, (9, 0), 64, True),
        (1024, (9, 0), 64, False),  # torch refuses as many
        (8, (8, 0), 64, False),
        (8, (9, 0), 60, False),  # rows that are not aligned
    ],
)
def test_what_torch_multiplies(monkeypatch, groups, capability, width, takes):
    def on_a_gpu(t: torch.Tensor) -> Any:
        fields = {name: getattr(t, name) for name in ("dtype", "shape", "ndim", "stride")}
        return SimpleNamespace(device=torch.device("cuda"), data_ptr=lambda: 1 << 20, **fields)

    monkeypatch.setattr(environment, "capability", lambda device: capability)
    x, weight = torch.empty(5, width).bfloat16(), torch.empty(2, 16, width).bfloat16()
    offsets: Any = SimpleNamespace(shape=(groups,))
    assert grouped_mm._native(offsets, on_a_gpu(x), on_a_gpu(weight)) == takes
