"""Products of bf16 rows sorted by expert on SM90: csrc/cutlass/sm90_products.cuh. torch alone.

They run where the object is built. Nothing is built for them: torch's grouped product takes their
place.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends.cutlass import library
from moe_ops.backends.cutlass.library import Gemms

_ARCHITECTURE = "sm_90a"
_KERNEL = "moe_ops_sm90_product"


class GroupedProduct(ctypes.Structure):
    """struct GroupedProduct of csrc/cutlass/grouped.h."""

    _fields_ = [
        ("groups", ctypes.c_int32),
        ("sm_count", ctypes.c_int32),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("d", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
    ]


def kernels(device: int) -> Gemms | None:
    """The kernels for a device; None where there are none."""
    found = library.if_built(device, _ARCHITECTURE)
    return found if found is not None and found.architecture == _ARCHITECTURE else None


def multiply(
    rows: Tensor,  # (S, K) bf16
    weight: Tensor,  # (E, N, K), contiguous or stored (E, K, N)
    ends: Tensor,  # (E,) int32, the row after each expert's last
    transpose: bool = False,
) -> Tensor | None:
    """rows @ weight[e].T for the rows of each expert, or with `transpose` rows (S, N) @ weight[e].

    Sizes are multiples of 8, and addresses of 16. Rows past ends[-1] are neither read into others
    nor written. None where there is no kernel.
    """
    if rows.dtype != torch.bfloat16 or kernels(rows.get_device()) is None:
        return None
    out = rows.new_empty(rows.shape[0], weight.shape[2 if transpose else 1])
    multiply_into(out, rows, weight, ends, transpose)
    return out


def multiply_into(
    out: Tensor, rows: Tensor, weight: Tensor, ends: Tensor, transpose: bool = False
) -> None:
    """`multiply` where there is a kernel, written to `out`."""
    gemms = kernels(rows.get_device())
    assert gemms is not None
    assert weight.is_contiguous() or weight.mT.is_contiguous()
    n, k = weight.shape[1:]
    if transpose:
        n, k = k, n
    # stored (E, n, k), or (E, k, n)
    name = "x_wt" if weight.is_contiguous() != transpose else "x_w"
    _run(gemms, name, rows, weight, out, ends, n=n, k=k)


def outer(
    a: Tensor,  # (S, M) bf16
    b: Tensor,  # (S, N) bf16
    ends: Tensor,  # (E,) int32
) -> Tensor | None:
    """(E, M, N): a.T @ b for the rows of each expert, zeros of one without rows. None where there
    is no kernel.
    """
    gemms = kernels(a.get_device())
    if gemms is None or a.dtype != torch.bfloat16:
        return None
    assert b.is_contiguous()
    m, n = a.shape[1], b.shape[1]
    out = a.new_empty(ends.shape[0], m, n)
    _run(gemms, "outer", a, b, out, ends, m=m, n=n)
    return out


def _run(
    gemms: Gemms, name: str, a: Tensor, b: Tensor, d: Tensor, ends: Tensor, **sizes: Any
) -> None:
    if a.shape[0] == 0:
        if name == "outer":
            d.zero_()
        return
    assert a.dtype == b.dtype == d.dtype == torch.bfloat16 and d.is_contiguous()
    assert a.is_contiguous() and ends.is_contiguous() and ends.dtype == torch.int32
    assert all([library.aligned(t) for t in (a, b, d)])
    assert not any([size % 8 for size in sizes.values()]), sizes
    product = GroupedProduct(
        groups=ends.shape[0],
        sm_count=gemms.sm_count,
        a=a.data_ptr(),
        b=b.data_ptr(),
        d=d.data_ptr(),
        ends=ends.data_ptr(),
        rows=a.shape[0],
        stream=library.stream_of(a.get_device()),
        **sizes,
    )
    gemms.run(f"{_KERNEL}_{name}", product)
