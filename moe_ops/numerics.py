"""The arithmetic of quantization on plain tensors, the one meaning every kernel is held to.

Scales are amax / (largest magnitude of the format) in fp32, 1 where that is zero so that a group of
zeros stays zero; elements are x / scale in fp32, clamped and rounded to nearest even. Everything is
vectorised, traceable, and free of host synchronisation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.schemes import QuantDesc, QuantScheme, get_scheme


def quantize_weight(weight: Tensor, scheme: str | QuantScheme) -> tuple[Tensor, Tensor]:
    """Quantize expert weights.

    Args:
        weight: (N, K) of one expert or (..., N, K), any float dtype.
        scheme: a scheme with quantized weights, or its name.

    Returns:
        qdata, shaped like the weight, in the scheme's storage dtype, and scale: (...) for one scale
        per expert, (..., N, 1) per channel, (..., ceil(N/128), ceil(K/128)) per block, fp32.
    """
    desc = get_scheme(scheme).quantized_weight
    n, k = weight.shape[-2:]
    grouped = _split(_split(weight, -1, desc.group.cols), -3, desc.group.rows)
    scale = _scale(
        grouped.abs().amax((-3, -1), keepdim=True), desc
    )  # (..., n groups, 1, k groups, 1)
    qdata = _round(grouped, scale, desc).flatten(-2).flatten(-3, -2)[..., :n, :k].contiguous()
    scale = scale.squeeze(-1).squeeze(-2)
    return qdata, (scale[..., 0, 0].contiguous() if desc.group.is_tensor else scale)


def dequantize_weight(
    qdata: Tensor,  # (..., N, K)
    scale: Tensor,
    scheme: str | QuantScheme,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values of quantized weights: the product in fp32, then one rounding to ``dtype``.

    Args:
        qdata: (N, K) of one expert, or any number of experts (..., N, K).
        scale: of the shape ``quantize_weight`` gives for such a qdata, any float dtype.
        scheme: the weights' scheme or its name.

    Returns:
        A tensor shaped like ``qdata``.
    """
    desc = get_scheme(scheme).quantized_weight
    n, k = qdata.shape[-2:]
    scale = scale.to(torch.float32)
    scale = scale[..., None, None] if desc.group.is_tensor else scale
    values = _split(_split(_to_float32(qdata), -1, desc.group.cols), -3, desc.group.rows)
    values.mul_(scale[..., :, None, :, None])  # in place: the conversion above made a copy
    return values.flatten(-2).flatten(-3, -2)[..., :n, :k].to(dtype)


def quantize_activation(
    x: Tensor,  # (..., K)
    scheme: str | QuantScheme,
    static_scale: Tensor | None = None,
    rows_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize activations as a scheme with quantized activations does.

    Args:
        x: (..., K), any float dtype; every row is a token.
        scheme: the scheme or its name.
        static_scale: the one scale, () or (1,), of a scheme with static activation scales.
        rows_valid: bool, x.shape[:-1]: rows that count for a scale shared by all rows; the others
            may hold anything, NaN included, and do not change the result of these.

    Returns:
        q like x in the storage dtype, and the fp32 scale: () for one, (..., 1) per token,
        (..., ceil(K/128)) per group of 128.
    """
    desc = get_scheme(scheme).activation
    assert desc is not None, f"{scheme} leaves activations as they are"
    assert (static_scale is not None) == desc.static, f"{scheme}, {static_scale=}"
    if not desc.group.is_tensor:
        grouped = _split(x, -1, desc.group.cols)
        scale = _scale(grouped.abs().amax(-1, keepdim=True), desc)
        return _round(grouped, scale, desc).flatten(-2)[..., : x.shape[-1]], scale.squeeze(-1)
    if static_scale is not None:
        scale = static_scale.to(torch.float32).reshape(())
    else:
        amax = x.abs().amax(-1)
        if rows_valid is not None:
            amax = torch.where(rows_valid, amax, 0)
        # the appended zero keeps the reduction defined when there are no rows
        scale = _scale(torch.cat((amax.flatten(), amax.new_zeros(1))).amax(), desc)
    return _round(x, scale, desc), scale


def fake_quantize_activation(
    x: Tensor,  # (..., K)
    scheme: str | QuantScheme,
    static_scale: Tensor | None = None,
    rows_valid: Tensor | None = None,
) -> Tensor:
    """The fp32 values activations have after quantization; x itself where the scheme keeps them.

    Arguments as for ``quantize_activation``. Returns a tensor shaped like ``x``.
    """
    desc = get_scheme(scheme).activation
    if desc is None:
        return x.to(torch.float32)
    q, scale = quantize_activation(x, scheme, static_scale, rows_valid)
    values = _to_float32(q)
    if desc.group.is_tensor:
        return values * scale
    return (_split(values, -1, desc.group.cols) * scale[..., None]).flatten(-2)[..., : x.shape[-1]]


def _split(t: Tensor, dim: int, size: int) -> Tensor:
    """View ``dim`` (negative) as (groups, size), padding it with zeros to a multiple of ``size``;
    -1 makes one group."""
    length = t.shape[dim]
    if size == -1:
        return t.unsqueeze(dim - 1)
    groups = (length + size - 1) // size
    if groups * size != length:
        t = F.pad(t, (0, 0) * (-dim - 1) + (0, groups * size - length))
    return t.unflatten(dim, (groups, size))


def _scale(amax: Tensor, desc: QuantDesc) -> Tensor:
    amax = amax.to(torch.float32)
    # CUDA turns a division by a Python number into a product with its reciprocal, off by one ulp
    scale = amax / torch.full_like(amax, desc.format.max)
    return torch.where(scale == 0, 1.0, scale)


def _round(x: Tensor, scale: Tensor, desc: QuantDesc) -> Tensor:
    limit = desc.format.max
    return (x.to(torch.float32) / scale).clamp_(-limit, limit).to(desc.storage_dtype)


def _to_float32(q: Tensor) -> Tensor:
    """``q.to(torch.float32)``, exact for all 256 codes; torch's own cast from e4m3 takes six
    times as long on a CPU (3.2 against 0.5 ms for 2**20 elements on one core)."""
    if q.device.type != "cpu" or q.dtype != torch.float8_e4m3fn or torch.compiler.is_compiling():
        return q.to(torch.float32)
    # place sign, exponent and mantissa where fp16 has them; the exponent biases differ by 8
    bits = q.view(torch.int8).to(torch.int16)
    nan = bits.bitwise_and(0x7F).add_(1).bitwise_and_(0x80).bitwise_left_shift_(7)
    half = bits.bitwise_left_shift_(7).bitwise_and_(0xBF80 - 0x10000).bitwise_or_(nan)
    return half.view(torch.float16).to(torch.float32).mul_(256.0)
