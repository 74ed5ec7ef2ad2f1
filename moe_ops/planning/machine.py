"""Facts of the machine, looked up once per device. They are constants in traced code."""

from __future__ import annotations

import functools

import torch

from moe_ops import backends
from moe_ops.environment import TRITON, constant, gpu_architecture
from moe_ops.ops.problem import Machine


@constant
def _machine_facts(device_type: str, index: int) -> tuple:
    return _machine_facts_cached(device_type, index)


def _find_machine_facts(device_type: str, index: int) -> tuple:
    available = tuple([b.name for b in backends.BACKENDS if b.library.available() is None])
    if device_type != "cuda":
        return (device_type, (0, 0), "", available, TRITON, "", 0)
    properties = torch.cuda.get_device_properties(index)
    capability, gfx = gpu_architecture(properties)
    memory = properties.total_memory
    return (device_type, capability, properties.name, available, TRITON, gfx, memory)


_machine_facts_cached = functools.cache(_find_machine_facts)


def forget() -> None:
    """Look the facts up anew after the backends changed.

    Into a new cache, because another thread may still add to the old one.
    """
    global _machine_facts_cached
    _machine_facts_cached = functools.cache(_find_machine_facts)


def machine(device: torch.device) -> Machine:
    """The Machine of calls with tensors on `device`."""
    if pretended is not None:
        return pretended
    index = device.index
    return Machine(*_machine_facts(device.type, 0 if index is None else index))


pretended: Machine | None = None  # in a `pretend` block


class pretend:
    """Context manager in which calls are planned for another Machine, such as an absent GPU."""

    def __init__(self, machine: Machine):
        self.machine = machine

    def __enter__(self) -> Machine:
        global pretended
        self.before, pretended = pretended, self.machine
        return self.machine

    def __exit__(self, *_: object) -> None:
        global pretended
        pretended = self.before
