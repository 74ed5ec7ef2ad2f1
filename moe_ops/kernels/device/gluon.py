"""Gluon, Triton's experimental language, as Triton 3.6 to 3.9 have it. All imports of Gluon go
through this module.

What differs between these versions has one name here, that of the newest: copies by the tensor
memory accelerator were called `async_copy_global_to_shared` before 3.8, `barrier` was
`thread_barrier` in 3.6, and `reinterpret` was a private method before 3.9.
`environment.why_no_gluon` says which versions compile the kernels. Imported at first launch only.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "Boxes",
    "TensorDescriptor",
    "async_copy",
    "async_load",
    "barrier",
    "copy_elements",
    "fence_async_shared",
    "gl",
    "gluon",
    "keep_loads_before",
    "mbarrier",
    "mma_v2",
    "reinterpret",
    "wait_warp_copies",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]

# (descriptor, coordinates, barrier, shared memory, predicate)
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# (shared memory, pointers, mask): each thread copies what its pointers point to
copy_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


class Boxes(NamedTuple):
    """A tensor descriptor without its tensor."""

    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any

    def of(self, base: Tensor) -> Any:
        """The descriptor of a tensor. Its constructor is skipped: it checks what callers
        know, in each call.
        """
        found = object.__new__(TensorDescriptor)
        found.base = base
        found.shape, found.strides, found.block_shape, found.layout = self
        return found


_PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(
    memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Shared memory as elements of another dtype, shape and layout."""
    if _PUBLIC_REINTERPRET:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


@gluon.jit
def keep_loads_before():
    """Loads before this are issued before copies after it, as the assembler may not move either
    across a barrier of the warp.
    """
    ASSEMBLY: gl.constexpr = "bar.warp.sync 0xffffffff; // dummy $0"
    gl.inline_asm_elementwise(ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _wait_instructions(outstanding):
    return f"cp.async.wait_group {outstanding}; bar.warp.sync 0xffffffff; // dummy $0"


@gluon.jit
def wait_warp_copies(outstanding: gl.constexpr):
    """Wait until of the groups of copies of each thread at most so many are outstanding, for what
    the threads of a warp have copied. `async_copy.wait_group`, for what all have copied, is a
    barrier of the program.
    """
    ASSEMBLY: gl.constexpr = _wait_instructions(outstanding)
    gl.inline_asm_elementwise(ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
