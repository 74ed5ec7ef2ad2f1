"""Host memory that is registered, released, or refused."""

from __future__ import annotations

import gc

import pytest
import torch

from moe_ops.residency.host import HostMemory
from moe_ops.residency.rows import ExpertEntry, bytes_of, rows_in


class Runtime:
    """A CUDA runtime that notes what is registered."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.registered = error, {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        assert self.waited
        del self.registered[address]

    capturing = False
    waited: tuple[torch.device, ...] = ()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Runtime:
        def wait(device: torch.device) -> None:
            assert not self.capturing
            self.waited += (device,)

        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "synchronize", wait)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        return self


def test_memory_is_pinned_as_long_as_it_is_held(monkeypatch):
    """And as long as calls may read it."""
    runtime = Runtime().install(monkeypatch)
    memory = HostMemory(12345, torch.device("cuda"))
    data = memory.data
    assert memory.pinned and data.numel() == 12345
    assert runtime.registered == {data.data_ptr(): 12345} and data.data_ptr() % 4096 == 0
    assert data.untyped_storage().data_ptr() == data.data_ptr()  # which torch asks about
    del memory
    gc.collect()
    assert not runtime.registered
    data.zero_()  # views outlive it


@pytest.mark.slow
def test_memory_that_goes_in_a_capture_is_released_after_it(monkeypatch):
    runtime = Runtime().install(monkeypatch)
    memories = [HostMemory(100, torch.device("cuda", i)) for i in range(2)]
    runtime.capturing = True
    del memories[0]
    gc.collect()
    assert len(runtime.registered) == 2
    runtime.capturing = False
    memories.clear()
    gc.collect()
    assert not runtime.registered
    assert {device.index for device in runtime.waited} == {0, 1}  # each one's own calls


def test_refusal_is_said_with_its_cost(monkeypatch):
    Runtime(error=2).install(monkeypatch)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # which tells CUDA's last error
    with pytest.warns(UserWarning, match="fraction of the link's rate.*ulimit -l"):
        assert not HostMemory(1 << 20, torch.device("cuda")).pinned


def test_memory_of_a_cpu_is_not_pinned():
    assert not HostMemory(10, torch.device("cpu")).pinned


def test_rows_take_hardly_more_than_the_weights():
    """Each piece is whole, and none overlaps the next one."""
    entries = {
        "elements": ExpertEntry((24, 40), torch.bfloat16),
        "scale": ExpertEntry((), torch.float32),
        "codes": ExpertEntry((24, 3), torch.uint8),
    }
    starts, end = bytes_of(entries, 7)
    rows = rows_in(torch.zeros(end, dtype=torch.uint8), entries, 7)
    for i, (name, tensor) in enumerate(rows.tensors.items()):
        assert tensor.shape == (7, *entries[name].shape) and tensor.is_contiguous()
        assert starts[name] % 256 == 0
        rows.entries[name].fill_(i + 1)
    for i, tensor in enumerate(rows.tensors.values()):
        assert (tensor.flatten().view(torch.uint8) == i + 1).all()
    payload = sum(7 * entry.row_bytes for entry in entries.values())
    assert payload <= end < payload + 3 * 256
