"""The CPU kernels of csrc/cpu/grouped_mm.cpp, called through ctypes if they were built.

They are faster than one library product per expert where experts have few rows, since libraries
repack a weight on every call (docs/kernels/cpu.md). With AVX2 bf16 is computed in fp32.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import environment
from moe_ops.csrc import build

_LIBRARY = Path(__file__).parents[2] / "cpu_grouped_mm.so"
# Rows an expert up to which the kernels are faster, by the width of AVX. Library GEMMs on AMX are
# faster in bf16 from fewer rows on.
_MOST_ROWS = {
    512: {torch.bfloat16: 96, torch.float32: 1 << 30},
    2: {torch.bfloat16: 96, torch.float32: 96},
}
_MOST_ROWS_AMX = 16


class _Kernels(NamedTuple):
    most_rows: int
    grouped_mm: Callable[..., None]
    combine: Callable[..., None]


@functools.cache
def library() -> ctypes.CDLL | None:
    """What was built; None if nothing was, or does not load, or, with a warning, is of other
    sources than this version's.
    """
    try:
        found = ctypes.CDLL(str(_LIBRARY))
    except OSError:  # not there; or CXX compiles for another machine, or libgomp is missing
        return None
    if not _is_of_these_sources(found):
        warnings.warn(f"{_LIBRARY} is not used: {_stale()}", stacklevel=2)
        return None
    return found


def _is_of_these_sources(found: ctypes.CDLL) -> bool:
    sources = getattr(found, "moe_ops_cpu_sources", None)
    if sources is None:  # of a version that did not say
        return False
    sources.restype = ctypes.c_char_p
    of, these = sources().decode(), build.cpu_fingerprint()
    return not of or not these or of == these  # built by hand, or the sources are not here


def _stale() -> str:
    """Remedy for a library that was built from other sources."""
    script = _LIBRARY.parents[1] / "hatch_build.py"
    remedy = f"run python {script}" if script.is_file() else "install this version again"
    return f"it was built from other sources than these; {remedy}"


@functools.cache
def _kernels() -> dict[torch.dtype, _Kernels]:
    """Entry points by dtype; empty if there are none, or this processor lacks AVX2."""
    built = library()
    if built is None:
        return {}
    avx = built.moe_ops_cpu_avx(512)  # the widest that it may use
    if not avx:  # without AVX2
        return {}
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    kernels = {}
    for dtype, suffix in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        grouped = getattr(built, f"moe_ops_cpu_grouped_mm_{suffix}")
        grouped.argtypes = [pointer, size, pointer, size, size, pointer, pointer, size, pointer]
        grouped.argtypes += [size, size, size, size, ctypes.c_int]
        grouped.restype = None
        combined = getattr(built, f"moe_ops_cpu_sum_{suffix}")
        combined.argtypes = [pointer] * 5 + [ctypes.c_int, size, size, size, ctypes.c_int]
        combined.restype = None
        most_rows = _MOST_ROWS[avx][dtype]
        if dtype == torch.bfloat16 and built.moe_ops_cpu_amx():
            most_rows = _MOST_ROWS_AMX
        kernels[dtype] = _Kernels(most_rows, grouped, combined)
    return kernels


def origin() -> str | None:
    """Where the kernels come from; None if there are none."""
    return environment.origin(_LIBRARY)


def why_not() -> str | None:
    """Why the kernels are not used, or None."""
    if not _LIBRARY.exists():
        return "not built: installing builds it on Linux, x86-64 and aarch64, with a C++ compiler"
    if _kernels():
        return None
    try:
        found = ctypes.CDLL(str(_LIBRARY))
    except OSError as error:
        return f"built, but cannot be loaded: {error}"
    if not _is_of_these_sources(found):
        return f"not used: {_stale()}"
    if platform.machine() == "aarch64":
        return "built, for whole layers alone: grouped products need AVX2"
    return "built, but this processor lacks AVX2"


def can_multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool = False
) -> bool:
    """Whether `grouped_mm` takes these tensors, and should be faster than a product per expert; or
    with `batch_invariant`, whether it gives a row the same bits among however many others.
    """
    if x.dtype not in _kernels() or weight.dtype != x.dtype:
        return False
    if batch_invariant:
        # Tiles are 8 columns wide beside one or two rows and 4 beside more. Of what is left over,
        # columns of a tile of 4 are summed in another order than single ones.
        suited = weight.shape[1] % 8 < 4
    else:
        suited = x.shape[0] <= _kernels()[x.dtype].most_rows * weight.shape[0]
    return (
        suited
        and weight.stride(2) == 1
        and x.stride(1) == 1
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    )


def grouped_mm(
    x: Tensor,  # (S, K)
    weight: Tensor,  # (E, N, K)
    offsets: Tensor,  # (E,) int32
    bias: Tensor | None,  # (E, N)
    out: Tensor,  # (S, N), contiguous
) -> None:
    """out = x @ weight[e].T + bias[e] for the rows of each expert, summed in fp32.

    Rows past offsets[-1] become 0.
    """
    E, N, K = weight.shape
    offsets = offsets.contiguous()
    _kernels()[x.dtype].grouped_mm(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        weight.stride(0),
        weight.stride(1),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        offsets.data_ptr(),
        x.shape[0],
        E,
        N,
        K,
        torch.get_num_threads(),
    )


def can_combine(y: Tensor, out: Tensor) -> bool:
    """Whether `combine` takes these tensors."""
    return (
        y.device.type == "cpu"  # a GPU's pointers would crash the process
        and y.dtype in _kernels()
        and out.dtype in (y.dtype, torch.float32)
        and y.is_contiguous()
        and out.is_contiguous()
    )


def combine(
    y: Tensor,  # (S, K), contiguous
    weights: Tensor,  # (M, top_k)
    rows: Tensor,  # (M, top_k) int64: row of y of each pair, -1 for none
    out: Tensor,  # (M, K), contiguous
    blocks: Tensor | None = None,  # (M, top_k) int64: block of experts of each pair
) -> None:
    """out[m] = sum over j of weights[m, j] * y[rows[m, j]], in order and in fp32; with `blocks`
    as numerics/sums.py says.
    """
    M, top_k = rows.shape
    weights = weights.to(torch.float32).contiguous()
    rows = rows.contiguous()
    blocks = None if blocks is None else blocks.contiguous()
    _kernels()[y.dtype].combine(
        y.data_ptr(),
        weights.data_ptr(),
        rows.data_ptr(),
        None if blocks is None else blocks.data_ptr(),
        out.data_ptr(),
        out.dtype != y.dtype,
        M,
        top_k,
        y.shape[1],
        torch.get_num_threads(),
    )
