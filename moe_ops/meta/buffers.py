"""Modules whose buffers are no weights, and keep their values where those have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class KeepsBuffers(nn.Module):
    """to(), to_empty() and the like keep the values of its own buffers, also through the meta
    device, which has none. A subclass whose buffers may begin there sets `_values`.
    """

    _values: dict[str, Tensor]  # on the CPU, by the name of a buffer

    def __init__(self) -> None:
        super().__init__()
        self._values = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is None or new is None or new is old:
                continue
            if not new.is_meta:
                new.copy_(self._values[name] if old.is_meta else old)
            elif not old.is_meta:
                self._values[name] = old.cpu()
        return self

    def fill_buffers(self, device: torch.device) -> None:
        """Give buffers on the meta device their values on another one, to which
        load_state_dict(assign=True) has brought the parameters.
        """
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.is_meta and device.type != "meta":
                self._buffers[name] = self._values[name].to(device, copy=True)
