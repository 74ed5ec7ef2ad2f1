"""Host memory that a GPU reads by address."""

from __future__ import annotations

import contextlib
import warnings
import weakref

import torch
from torch import Tensor

_PAGE = 4096
_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


def with_own_storage(view: Tensor) -> Tensor:
    """The same memory as a storage that begins with it, and that keeps the viewed one alive."""
    return torch.from_dlpack(view)


class HostMemory:
    """Bytes of host memory, pinned for a GPU: registered as they are, because what torch pins
    itself is rounded up to a power of two. They stay pinned as long as this object lives.

    Attributes:
        data: (num_bytes,) uint8, which begins at a page.
        pinned: whether the GPU can read it by address.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        whole = torch.empty(num_bytes + _PAGE, dtype=torch.uint8, device="cpu")
        begin = -whole.data_ptr() % _PAGE
        # torch asks of the first byte of a storage whether a tensor is pinned
        self.data = with_own_storage(whole[begin : begin + num_bytes])
        self.pinned = device.type == "cuda" and self._pin(self.data.data_ptr(), device)

    def _pin(self, address: int, device: torch.device) -> bool:
        data = self.data
        error = torch.cuda.cudart().cudaHostRegister(address, data.numel(), _PORTABLE_AND_MAPPED)
        if int(error) != 0:
            with contextlib.suppress(RuntimeError):  # of which the next launch would be accused
                torch.zeros(1, device=device)
            warnings.warn(
                f"the system did not pin {data.numel() / 2**30:.2f} GiB of host memory "
                f"({error}): experts that a call misses are copied by the host, from memory that "
                "is not pinned, at a fraction of the link's rate and with a wait for the GPU, and "
                "such calls cannot be captured in a CUDA graph. Let the process lock more memory "
                "(ulimit -l), or free host memory",
                stacklevel=4,
            )
            return False
        release = weakref.finalize(
            self, _unpin, data, address, device
        )  # keeps the memory until then
        release.atexit = False
        return True


# to be unpinned after a capture, in which nothing can be waited for
_LEFT: list[tuple[Tensor, int, torch.device]] = []


def _unpin(data: Tensor, address: int, device: torch.device) -> None:
    """Give memory back to the system once calls that may read it have ended."""
    _LEFT.append((data, address, device))
    if torch.cuda.is_current_stream_capturing():
        return
    while True:
        try:
            left = _LEFT.pop()  # it keeps the memory; other threads may take the next one
        except IndexError:
            return
        torch.cuda.synchronize(left[2])
        torch.cuda.cudart().cudaHostUnregister(left[1])
