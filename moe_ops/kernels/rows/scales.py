"""Quantized activations of the Triton kernels: which scales a scheme has, and where these and the
elements are in the workspaces. torch alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.kernels.configs import LayerConfig
from moe_ops.kernels.launch import Constant, Pointer, Runtime, Specialized
from moe_ops.meta.workspace import cdiv, maximum, minimum, round_up
from moe_ops.schemes import get_scheme

NUM_PARTIALS = 128  # programs that find the largest magnitude of x
SHARED = NUM_PARTIALS + 1  # fp32 elements of a `Shared`
# Up to this average of rows an expert the workspace has room for h in fp32 too, so that GEMM2 may
# quantize it by groups.
FEW_ROWS = 2
_GAP = 32  # fp32 elements: alignment of the second part of a workspace


class Scales(NamedTuple):
    """The scales of a scheme in the terms of kernels/gemm/sm80_mma.py; "" if there are none."""

    weight: str
    x: str
    powers: bool  # scales of x are powers of two


PLAIN = Scales("", "", False)


def describe(scheme: str) -> Scales:
    """The Scales of a scheme; "" stands for plain weights."""
    found = get_scheme(scheme)
    if found.weight is None:
        return PLAIN
    group = found.weight.group
    weight = "tensor" if group.is_tensor else "channel" if group.is_row else "block"
    activation = found.activation
    assert activation is not None, scheme  # else kernels/mixed_gemm
    if activation.static:
        return Scales(weight, "static", False)
    group = activation.group
    x = "tensor" if group.is_tensor else "row" if group.is_row else "group"
    return Scales(weight, x, activation.powers_of_two)


scales = cache(describe)  # for launches; Dynamo warns of cached functions in traced code


def h_elements(rows: Any, I: int, experts: int, x_scale: str, aligned: bool) -> Any:
    """fp32 elements that h (rows, I) and its scales need with any config. int or SymInt.

    `aligned`: rows of all operands start at multiples of 16 bytes.
    """
    if x_scale == "static":
        return cdiv(rows * I, 4)
    if x_scale == "row":
        return rows * I + _GAP + rows
    if x_scale == "tensor":
        return rows * I + _GAP + 1
    if not aligned:
        return rows * I
    quantized = cdiv(rows * I, 4) + _GAP + rows * cdiv(I, 128)
    return maximum(quantized, minimum(rows, FEW_ROWS * experts) * I)


def x_elements(rows: Any, K: int, x_scale: str) -> Any:
    """fp32 elements that quantized x (rows, K) and its scales need at most. int or SymInt."""
    if x_scale == "tensor":
        return SHARED
    if x_scale in ("group", "row"):
        return cdiv(rows * K, 4) + _GAP + rows * (cdiv(K, 128) if x_scale == "group" else 1)
    return 0


class Shared(NamedTuple):
    """Largest magnitudes from which the one scale of x and that of h follow, over all rows of a
    call that runs in chunks.
    """

    x: Tensor  # (NUM_PARTIALS,) fp32 partial maxima
    h: Tensor  # (1,) fp32


def shared_of(workspace: Tensor, start: int) -> Shared:
    """The Shared after the first `start` fp32 elements of a workspace."""
    found = flat(workspace, torch.float32, start + SHARED)[start : start + SHARED]
    return Shared(found[:NUM_PARTIALS], found[NUM_PARTIALS:])


class Input(NamedTuple):
    """A GEMM's input, x or h, and its scales.

    A row of expert e is at e * stride_e + row * stride_m.
    """

    ptr: Pointer
    stride_e: Specialized
    stride_m: Specialized
    stride_k: Specialized
    # that of a row is at e * scale_stride_e + row * scale_stride_m; known ones of experts have
    # scale_stride_m 0
    scale: Pointer = None
    scale_stride_e: Runtime = 0
    scale_stride_m: Specialized = 0
    scale_stride_g: Runtime = 0  # between scales of groups of columns
    partials: Constant = 1  # partial maxima, of which the largest gives the one scale of all rows

    @property
    def data(self) -> Tensor:
        """The tensor that `ptr` points to."""
        assert self.ptr is not None
        return self.ptr


def rows_of(x: Tensor) -> Input:
    """The Input of a tensor (M, K)."""
    stride_m, stride_k = x.stride()
    return Input(x, 0, stride_m, stride_k)


def batches_of(x: Tensor) -> Input:
    """The Input of a tensor (E, T, K), whose row t of expert e is row e * T + t.

    So stride_e is the stride of experts minus T times the stride of rows: zero for a contiguous
    tensor.
    """
    return Input(x, x.stride(0) - x.shape[1] * x.stride(1), x.stride(1), x.stride(2))


@cache
def _storage(scheme: str) -> torch.dtype | None:
    desc = get_scheme(scheme).activation
    return None if desc is None else desc.storage_dtype


def input_of(x: Tensor, scale: Tensor | None, scheme: str, native: bool) -> Input:
    """The Input of a tensor (M, K) or (E, T, K), with its scales if it arrives quantized.

    Raises:
        ValueError: x has scales, but not the dtype that the scheme quantizes to.
    """
    batched = x.ndim == 3
    found = batches_of(x) if batched else rows_of(x)
    if scale is None:
        return found
    if x.dtype != _storage(scheme):
        raise ValueError(
            f"an input with scales must have dtype {_storage(scheme)} for scheme {scheme!r}, got "
            f"{x.dtype}"
        )
    if not native and x.dtype != torch.int8:  # compilers for such GPUs do not know e4m3
        found = found._replace(ptr=x.view(torch.uint8))
    if scale.ndim < x.ndim:  # one for all rows
        return found._replace(scale=scale)
    stride_m, stride_g = scale.stride()[-2:]
    stride_e = scale.stride(0) - scale.shape[1] * stride_m if batched else 0
    return found._replace(
        scale=scale, scale_stride_e=stride_e, scale_stride_m=stride_m, scale_stride_g=stride_g
    )


_OF_ARRIVED = {"row": "token", "tensor": "static"}


def of_arrived(x_scale: str) -> str:
    """X_SCALE of an input that arrives quantized: its scales are known."""
    return _OF_ARRIVED.get(x_scale, x_scale)


def flat(workspace: Tensor, dtype: torch.dtype, size: int) -> Tensor:
    """The workspace as `dtype`, of which `size` elements are used. Kernels use its address
    alone.
    """
    found = workspace if workspace.dtype == dtype else workspace.view(dtype)
    assert found.numel() >= size, (found.shape, size)
    return found


def split(
    workspace: Tensor, rows: int, columns: int, dtype: torch.dtype, num_scales: int
) -> tuple[Tensor, Tensor]:
    """(rows * columns elements of `dtype`, the fp32 scales after them) of a workspace."""
    start = round_up(rows * columns * dtype.itemsize, 4 * _GAP) // 4
    after = flat(workspace, torch.float32, start + num_scales)[start:]
    return flat(workspace, dtype, rows * columns), after


def expert_stride(static: Tensor | None) -> int:
    """Elements between the known scales of two experts: 0 for one scale of all."""
    return 0 if static is None or static.numel() == 1 else static.stride(0)


def hidden(
    workspace: Tensor,
    rows: int,
    I: int,
    dtype: torch.dtype,
    x_scale: str,
    config: LayerConfig,
    static: Tensor | None,
    codes: torch.dtype,  # dtype of quantized activations
) -> tuple[Input, str]:
    """(h (rows, I) as GEMM2's input, GEMM1's H_SCALE)."""
    if not x_scale:
        return Input(flat(workspace, dtype, rows * I), 0, I, 1), ""
    if x_scale == "static":
        h = Input(flat(workspace, codes, rows * I), 0, I, 1)
        return h._replace(scale=static, scale_stride_e=expert_stride(static)), "static"
    if x_scale == "group":
        if config.h_in_fp32:
            return Input(flat(workspace, torch.float32, rows * I), 0, I, 1), ""
        data, scale = split(workspace, rows, I, codes, rows * cdiv(I, 128))
        return Input(data, 0, I, 1, scale, 0, 1, rows), "group"
    data, scale = split(workspace, rows, I, torch.float32, rows if x_scale == "row" else 1)
    return Input(data, 0, I, 1, scale, scale_stride_m=1), x_scale
