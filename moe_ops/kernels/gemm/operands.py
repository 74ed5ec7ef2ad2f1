"""Operands of the GEMMs whose weights and activations have one format, as kernels take them.
torch alone.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.kernels.configs import GROUP_M, GemmConfig
from moe_ops.kernels.launch import Constant, Gpu, Pointer, Specialized, unprefixed
from moe_ops.kernels.rows.scales import scales
from moe_ops.schemes import get_scheme


class Weight(NamedTuple):
    """A weight (E, N, K) and its scales."""

    ptr: Pointer
    stride_e: Specialized
    stride_n: Specialized
    stride_k: Specialized
    scale: Pointer = None
    scale_stride_e: Specialized = 0
    scale_stride_n: Specialized = 0  # between rows, or between blocks of rows
    scale_stride_k: Specialized = 0  # between blocks of columns

    @property
    def data(self) -> Tensor:
        """The tensor that `ptr` points to. Quantized x and h have the same dtype."""
        assert self.ptr is not None
        return self.ptr


class Bias(NamedTuple):
    """A bias (E, N), or none."""

    ptr: Pointer
    stride_e: Specialized
    stride_n: Specialized


NO_BIAS = Bias(None, 0, 0)


def bias_of(bias: Tensor | None) -> Bias:
    """The Bias of a tensor, or of None."""
    return NO_BIAS if bias is None else Bias(bias, *bias.stride())


@unprefixed
class GemmTile(NamedTuple):
    """A GEMM's config, and whether its tiles divide the columns of its input and output."""

    EVEN_K: Constant
    EVEN_N: Constant
    GROUP_M: Constant
    BLOCK_M: Constant
    BLOCK_N: Constant
    BLOCK_K: Constant
    NUM_STAGES: Constant


@lru_cache(maxsize=4096)
def tile_of(config: GemmConfig, block_m: int, K: int, N: int, block_out: int) -> GemmTile:
    """The GemmTile of a GEMM over K columns that writes N columns, `block_out` a program."""
    n, k, num_stages, _ = config
    return GemmTile(K % k == 0, N % block_out == 0, GROUP_M, block_m, n, k, num_stages)


class Output(NamedTuple):
    """A GEMM's output: a row of expert e is at e * stride_e + row * stride_m."""

    ptr: Pointer
    stride_e: Specialized
    stride_m: Specialized
    stride_n: Specialized

    @property
    def data(self) -> Tensor:
        """The tensor that `ptr` points to."""
        assert self.ptr is not None
        return self.ptr


@unprefixed
class Scaling(NamedTuple):
    """How operands are scaled (kernels/gemm/sm80_mma.py), and whether the GPU has e4m3."""

    W_SCALE: Constant
    X_SCALE: Constant
    POWERS: Constant
    NATIVE: Constant


@cache
def scaling_of(scheme: str, native: bool) -> Scaling:
    """The Scaling of a scheme; "" stands for plain weights."""
    return Scaling(*scales(scheme), native)


@cache
def _storage(scheme: str) -> torch.dtype:
    return get_scheme(scheme).quantized_weight.storage_dtype


def weight_of(
    name: str, data: Tensor, scale: Tensor | None, scheme: str, dtype: torch.dtype, gpu: Gpu
) -> Weight:
    """The Weight of an op's tensors. Raises ValueError if the dtype is not the scheme's."""
    expected = _storage(scheme) if scheme else dtype
    if data.dtype != expected:
        if scheme:
            raise ValueError(
                f"{name} must have dtype {expected} for scheme {scheme}, got {data.dtype}; "
                "quantize it with moe_ops.quantize"
            )
        raise ValueError(
            f"{name} must have the input's dtype {dtype}, got {data.dtype}; convert one with .to()"
        )
    stride_e, stride_n, stride_k = data.stride()
    if scale is None:
        return Weight(data, stride_e, stride_n, stride_k)
    if not gpu.native and data.dtype != torch.int8:  # compilers for such GPUs do not know e4m3
        data = data.view(torch.uint8)
    scale_e, scale_n, scale_k = (*scale.stride(), 0, 0)[:3]
    return Weight(data, stride_e, stride_n, stride_k, scale, scale_e, scale_n, scale_k)
