"""The grouped products of csrc/cutlass: finding or building the object of a GPU, and calling its
kernels through ctypes. torch alone.

ctypes rather than an extension of torch: the object then depends on neither torch nor Python, and
an operator in Python, which this package needs anyway, is around it. Capture works as with any
kernel, for each call names its stream.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops import environment
from moe_ops.backends.cutlass.schemes import BLOCK_SCALED, BLOCKS, INT4, kind_of
from moe_ops.csrc import build
from moe_ops.kernels.launch import make_context_current, thread
from moe_ops.kernels.rows.scales import NUM_PARTIALS, SHARED, Shared
from moe_ops.meta.workspace import round_up
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs
from moe_ops.ops.problem import Machine

# by compute capability; those for SM100 and SM120 were not run on hardware
ARCHITECTURES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}
ALIGNMENT = 16  # bytes, of base addresses


class GroupedGemm(ctypes.Structure):
    """struct GroupedGemm of csrc/cutlass/grouped.h."""

    _fields_ = [
        ("groups", ctypes.c_int32),
        ("sm_count", ctypes.c_int32),
        ("problem_sizes", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("d", ctypes.c_void_p),
        ("stride_a", ctypes.c_void_p),
        ("stride_b", ctypes.c_void_p),
        ("stride_d", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("column_scale", ctypes.c_void_p),
        ("row_scale_is_vector", ctypes.c_int32),
        ("column_scale_is_vector", ctypes.c_int32),
        ("a_scale", ctypes.c_void_p),
        ("b_scale", ctypes.c_void_p),
        ("a_scale_layout", ctypes.c_void_p),
        ("b_scale_layout", ctypes.c_void_p),
        ("alpha", ctypes.c_void_p),
        ("group_size", ctypes.c_int32),
        ("pdl", ctypes.c_int32),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
    ]


_ERRORS = {
    100: "its arguments are refused",
    200: "its workspace is too small",
    300: "it cannot be set up on this GPU",
    400: "it cannot be launched",
}


class Gemms(NamedTuple):
    """The loaded object for a GPU."""

    library: Any  # ctypes.CDLL, or in tests what stands for it
    sm_count: int
    architecture: str = "sm_90a"

    def run(self, kernel: str, gemm: ctypes.Structure) -> None:
        """Launch a kernel. Raises RuntimeError where CUTLASS or CUDA refuses."""
        if not thread.has_context:
            make_context_current()
        status = getattr(self.library, f"{kernel}_run")(ctypes.byref(gemm))
        if status:
            size, of = (1000, "CUDA error") if status >= 1000 else (100, "CUTLASS status")
            reason = _ERRORS.get(status // size * 100, "it failed")
            raise RuntimeError(
                f"moe_ops backend 'cutlass': {kernel} was not launched: {reason} ({of} "
                f"{status % size}); please report it with the output of python -m moe_ops.info"
            )


def architecture(capability: tuple[int, int]) -> str:
    """The family of a GPU, or "" if there are no kernels for it."""
    return ARCHITECTURES.get(capability, "")


def _cache() -> Path:
    """The folder for what is built at first use; one that is never there if a user has none."""
    try:
        return environment.cache_folder()
    except RuntimeError:  # no home directory
        return Path(os.devnull, "no home directory")


def origins() -> dict[str, str | None]:
    """Where the object of each family of GPUs comes from; None where there is none."""
    found = {name: build.installed(name, _cache()) for name in build.FILES}
    return {
        name: None if path is None else environment.origin(path) for name, path in found.items()
    }


@environment.constant
def _unbuilt(name: str) -> str | None:
    if simulated():
        return None
    if build.installed(name, _cache()) is None:
        return (
            "its kernels are not built yet, which takes minutes: python -m moe_ops.csrc.build "
            f"{name}, or name the backend, whose first use builds them"
        )
    try:
        _load(name)
    except ImportError as error:
        return str(error)
    return None


def unbuilt(machine: Machine) -> str | None:
    """Why "auto" leaves this backend out on a machine; None if its kernels are built and load."""
    return _unbuilt(architecture(machine.capability))


@cache
def why_not() -> str | None:
    """Why there is no object for any GPU, and none can be built; None if there is or can be."""
    if any([build.installed(name, _cache()) for name in build.FILES]):
        return None
    missing = build.why_not_built()
    return None if missing is None else f"its kernels are not built: {missing}"


def check_warm(device: int) -> None:
    """Raise RuntimeError while a CUDA graph is captured, unless the object is loaded."""
    if device not in _loaded and device >= 0 and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "moe_ops backend 'cutlass' has not loaded its kernels yet and cannot do so while a "
            "CUDA graph is captured; warm up first: call the same function once outside of "
            "torch.cuda.graph(...), or use moe_ops.warmup, then capture"
        )


_SIMULATED = -1  # the "device" of tests on a CPU, where something stands for the kernels
_loaded: dict[int, Gemms] = {}


def simulated() -> bool:
    """Whether something stands for the kernels on a CPU."""
    return _SIMULATED in _loaded


def gemms(device: int, may_build: bool = True) -> Gemms:
    """The kernels for a device. The first use on a machine builds them, unless the package brought
    them, or a call did not name the backend.

    Raises:
        ImportError: they cannot be built or loaded, or may not be built.
    """
    found = _loaded.get(device)
    if found is None:
        check_warm(device)
        properties = torch.cuda.get_device_properties(device)
        name = architecture((properties.major, properties.minor))
        if not may_build and build.installed(name, _cache()) is None:
            raise ImportError(
                "moe_ops backend 'cutlass': this call was planned by 'auto' where its kernels "
                f"were built, and here they are not: python -m moe_ops.csrc.build {name}"
            )
        found = _loaded[device] = Gemms(_load(name), properties.multi_processor_count, name)
    return found


def if_built(device: int, architecture: str) -> Gemms | None:
    """The kernels for a device, if it is of a family of GPUs and they are built. Nothing is loaded
    while a CUDA graph is captured.
    """
    found = _loaded.get(device)
    if found is not None or device < 0 or not _is_built(device, architecture):
        return found
    return None if torch.cuda.is_current_stream_capturing() else gemms(device, may_build=False)


@cache
def _is_built(device: int, name: str) -> bool:
    """Whether kernels of a family are those of a device, and built: asked once."""
    return architecture(torch.cuda.get_device_capability(device)) == name and not _unbuilt(name)


@cache
def _load(name: str) -> Any:
    try:
        path = build.ensure(name, _cache(), _say)
    except build.BuildError as error:
        raise ImportError(f"moe_ops backend 'cutlass': {error}") from error
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # of another machine, or cut short
        raise ImportError(
            f"moe_ops backend 'cutlass': {path} cannot be loaded ({error}); delete it, and the "
            "next start builds it anew"
        ) from error
    if library.moe_ops_cutlass_abi() != build.ABI or (
        library.moe_ops_cutlass_struct_bytes() != ctypes.sizeof(GroupedGemm)
    ):
        raise ImportError(
            f"moe_ops backend 'cutlass': {path} was built from another version of this package; "
            "delete it, and the next start builds it anew"
        )
    runtime = library.moe_ops_cutlass_runtime_version() // 1000
    driver = library.moe_ops_cutlass_driver_version() // 1000
    if driver < runtime:
        raise ImportError(
            f"moe_ops backend 'cutlass': {path} was built with CUDA {runtime}, and the driver "
            f"runs CUDA {driver} at most; update it, or build with an older toolkit"
        )
    return library


def _say(line: str) -> None:
    print(f"moe_ops: {line}", file=sys.stderr, flush=True)


def aligned(tensor: Tensor) -> bool:
    """Whether the tensor memory accelerator can read or write a tensor: CUTLASS does not ask."""
    return tensor.data_ptr() % ALIGNMENT == 0


_READ = ("w13", "w2", "w13_scale", "w2_scale")


def check_addresses(a: ExpertsArgs | BatchedExpertsArgs, names: tuple[str, ...] = _READ) -> None:
    """Raise ValueError for tensors that the tensor memory accelerator cannot read or write. It
    reads those named.
    """
    for name in names:
        tensor = getattr(a, name)
        if tensor is not None and not aligned(tensor):
            raise ValueError(
                f"{name} must begin at a multiple of {ALIGNMENT} bytes for cutlass; .clone() it "
                "once, or use another backend"
            )
    for name in ("workspace13", "workspace2", "index_workspace"):
        if not aligned(getattr(a, name)):
            raise ValueError(f"{name} must begin at a multiple of {ALIGNMENT} bytes for cutlass")


def stream_of(device: int) -> int:
    """The address of the current stream of a device; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0


# --- which kernel --------------------------------------------------------------------------------


_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


# (average rows per expert up to which it is taken, tile) of the int4 kernels: weight rows x
# tokens. Most experts have no more rows than the tile, for a second one would read their weights
# again (docs/kernels/cutlass.md).
INT4_TILES = (
    *((20, "256x32"), (48, "256x64"), (160, "256x128")),
    (None, "128x256"),
)


def kernel_of(scheme: str, architecture: str, dtype: torch.dtype, rows: int, E: int) -> str:
    """The kernel for a scheme, an output dtype, and so many rows of E experts together."""
    kind, name = kind_of(scheme), _TYPES[dtype]
    if kind == BLOCKS:
        of = architecture.removesuffix("a").replace("_", "")
        return f"moe_ops_{of}_{BLOCK_SCALED[scheme].name}_{name}"
    if kind == INT4:
        tile = next(t for most, t in INT4_TILES if most is None or rows <= most * E)
        return f"moe_ops_sm90_int4_{name}_{tile}"
    return f"moe_ops_sm90_fp8_{name}"


# --- scales that all rows share ------------------------------------------------------------------


def shared(index: Tensor) -> Shared:
    """The largest magnitudes that all rows share, at the end of the index workspace: chunks write
    the parts before it, each where its own number of rows says.
    """
    found = index[-round_up(SHARED, 32) :].view(torch.float32)
    return Shared(found[:NUM_PARTIALS], found[NUM_PARTIALS:SHARED])
