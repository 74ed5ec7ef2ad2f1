"""The layout of weights that DeepGEMM multiplies from SM100 on: scales as packed exponents.

For ``moe_ops.prepare(weight, "deep_gemm")`` and ``"deep_gemm_fp4"``; plain torch on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_ops import environment
from moe_ops.meta.scales import DEEP_GEMM_UE8M0
from moe_ops.numerics import scaling
from moe_ops.numerics.elements import e8m0_to_float32
from moe_ops.ops.relayout import Relayout, Tensors
from moe_ops.schemes import QuantScheme, get_scheme

if TYPE_CHECKING:
    from moe_ops.tensors.base import ExpertTensor


def pack_exponents(exponents: Tensor) -> Tensor:
    """uint8 exponents (.., N, G) as int32 words of four, (.., ceil(G / 4), N): byte j of word p is
    group 4 p + j.

    Words of neighbouring rows are contiguous, and zeros fill the last word. GEMMs take them
    transposed, with strides (words * N, 1, N).
    """
    padded = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4))
    return padded.contiguous().view(torch.int32).transpose(-2, -1).contiguous()


def unpack_exponents(words: Tensor, groups: int) -> Tensor:
    """The inverse of `pack_exponents` for ``groups`` groups of columns."""
    return words.transpose(-2, -1).contiguous().view(torch.uint8)[..., :groups].contiguous()


def power_of_two_exponents(amax: Tensor) -> Tensor:
    """uint8 exponents, biased by 127, of the least powers of two >= max(amax, 1e-4) / 448."""
    mxfp8 = get_scheme("mxfp8").quantized_weight
    return scaling.exponents(amax.float().clamp(min=1e-4), mxfp8).clamp(1, 254)


def requantize_block(weight: ExpertTensor) -> Tensors:
    """fp8_block weights whose scales of 128 x 128 blocks are powers of two. Elements are rounded
    once more.
    """
    E, N, K = weight.shape
    _check_sizes(N, K)
    qdata, exponents = torch.empty_like(weight.qdata), []
    for e in range(E):  # one expert at a time, because fp32 copies are four times as large
        blocks = weight[e].dequantize(torch.float32).view(N // 128, 128, K // 128, 128)
        exponent = power_of_two_exponents(blocks.abs().amax((1, 3), keepdim=True))
        values = blocks * (1.0 / e8m0_to_float32(exponent))
        qdata[e] = values.to(torch.float8_e4m3fn).view(N, K)
        exponents.append(exponent.view(N // 128, K // 128))
    packed = pack_exponents(torch.stack(exponents).repeat_interleave(128, 1))
    return {"qdata": qdata, "scale": packed}


def pack_block(weight: ExpertTensor) -> Tensors:
    """The scales of fp8_block:ue8m0 weights, which are powers of two, packed."""
    _check_sizes(*weight.shape[-2:])
    exponents = (weight.scale.view(torch.int32) >> 23).to(torch.uint8)
    return {"scale": pack_exponents(exponents.repeat_interleave(128, -2))}


def block_scales(weight: ExpertTensor) -> Tensors:
    """fp32 scales of 128 x 128 blocks; elements stay as they are, or as `requantize_block` rounded
    them.
    """
    exponents = unpack_exponents(weight.scale, weight.shape[-1] // 128)[..., ::128, :]
    return {"scale": e8m0_to_float32(exponents.contiguous())}


def pack_mx(weight: ExpertTensor) -> Tensors:
    """The e8m0 scales of 32 columns of mxfp8 and mxfp4 weights, packed."""
    _check_sizes(*weight.shape[-2:])
    return {"scale": pack_exponents(weight.scale.view(torch.uint8))}


def unpack_mx(weight: ExpertTensor) -> Tensors:
    return {"scale": unpack_exponents(weight.scale, weight.shape[-1] // 32)}


def _check_sizes(N: int, K: int) -> None:
    if N % 128 or K % 128:
        raise ValueError(
            "weight must have rows and columns that 128 divides to be laid out for deep_gemm, "
            f"got {(N, K)}; use backend 'triton'"
        )


def _is(*names: str) -> Callable[[QuantScheme], bool]:
    return lambda scheme: scheme.name in names


def _multiplies_exponents(device: torch.device) -> bool:
    """Whether GEMMs on the device take exponents as scales: GPUs from SM100 on do."""
    return device.type == "cuda" and environment.capability(device) >= (10, 0)


RELAYOUTS = (
    Relayout(DEEP_GEMM_UE8M0, _is("mxfp8"), pack_mx, unpack_mx),
    Relayout(
        DEEP_GEMM_UE8M0,
        _is("fp8_block"),
        requantize_block,
        block_scales,
        on=lambda device: _multiplies_exponents(device),
    ),
    Relayout(
        DEEP_GEMM_UE8M0,
        _is("fp8_block:ue8m0"),
        pack_block,
        block_scales,
        on=lambda device: _multiplies_exponents(device),
    ),
)
_RULES_OF_MXFP4 = ("mxfp4_w4a8", "mxfp4_w4a8:round", "mxfp4_w4a8:ceil")
RELAYOUTS_FP4 = (Relayout(DEEP_GEMM_UE8M0, _is(*_RULES_OF_MXFP4), pack_mx, unpack_mx),)
