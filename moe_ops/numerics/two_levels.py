"""Scales in two levels (`QuantDesc.two_levels`): int8 codes times the fp16 scales of 256
columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.numerics.elements import nearest
from moe_ops.schemes import SUPER_BLOCK, QuantDesc

_LARGEST_CODE = 127  # of a scale; -128 is left out, so that either sign has the same range
# The last number of a format is tried at the largest of a group, and at this many codes from it.
_TRIED = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5)


def in_one_level(
    scale: Tensor,  # (..., N, groups) int8
    minimum: Tensor | None,  # the same
    above: Tensor,  # (..., N, K / 256) fp16, or with a minimum (..., N, K / 128): pairs
    desc: QuantDesc,
) -> tuple[Tensor, Tensor | None]:
    """fp32 scales and minima (..., N, groups): products of codes and what stands above them, which
    are exact.
    """
    if minimum is None:
        return _products(scale, above, desc), None
    of_scales, of_minima = above.unflatten(-1, (-1, 2)).unbind(-1)
    return _products(scale, of_scales, desc), _products(minimum, of_minima, desc)


def fit(weight: Tensor, desc: QuantDesc) -> tuple[Tensor, Tensor | None, Tensor]:
    """(scale, minimum, what stands above them), as `in_one_level` takes them, for fp32 weights
    (..., N, K).

    Of several roundings of a group that is taken whose best scale (and minimum) has the least
    squared error; the minimum is fitted once more beside the code of the scale.
    """
    x = weight.unflatten(-1, (-1, desc.group.cols))
    scale, elements = (_with_minimum if desc.minimum else _symmetric)(x, desc)
    codes, above = _coded(scale, desc)
    if not desc.minimum:
        return codes, None, above
    left = x - elements * _products(codes, above, desc).unsqueeze(-1)
    minima, of_minima = _coded(left.mean(-1), desc)
    return codes, minima, torch.stack((above, of_minima), -1).flatten(-2)


def _products(codes: Tensor, above: Tensor, desc: QuantDesc) -> Tensor:
    each = codes.unflatten(-1, (-1, SUPER_BLOCK // desc.group.cols)).to(torch.float32)
    return (each * above.to(torch.float32).unsqueeze(-1)).flatten(-2)


def _coded(numbers: Tensor, desc: QuantDesc) -> tuple[Tensor, Tensor]:
    """(int8 codes, fp16 scales of 256 columns) of fp32 numbers (..., N, groups)."""
    numbers = numbers.unflatten(-1, (-1, SUPER_BLOCK // desc.group.cols))
    largest = numbers.abs().amax(-1, keepdim=True)
    above = (largest / _LARGEST_CODE).to(torch.float16)
    # Subnormal numbers of fp16 are far apart: the nearest may be too small for any code, or 0.
    too_small = largest > (_LARGEST_CODE + 0.5) * above.to(torch.float32)
    above = torch.where(too_small, (above.view(torch.int16) + 1).view(torch.float16), above)
    codes = torch.round(numbers / torch.where(above == 0, torch.inf, above.to(torch.float32)))
    codes = codes.clamp(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8)
    return codes.flatten(-2), above.squeeze(-1)


def _symmetric(x: Tensor, desc: QuantDesc) -> tuple[Tensor, Tensor]:
    """(scales (..., groups), the format's numbers) of groups (..., groups, columns)."""
    fmt = desc.format
    first, reach = x.abs().amax(-1, keepdim=True) / fmt.max, 2 ** (fmt.bits - 1) - 1
    best = torch.full_like(first, -1.0), torch.zeros_like(first), x
    for sign in (1, -1):  # integers and levels reach further on one side
        for step in _TRIED:
            tried = first * (sign * reach / (reach + step))
            quotients = (x / torch.where(tried == 0, torch.inf, tried)).flatten(-2)
            rounded = nearest(quotients, fmt).unflatten(-1, x.shape[-2:])
            product, square = [(rounded * by).sum(-1, keepdim=True) for by in (x, rounded)]
            best = _better(best, rounded, product, square)
    return best[1].squeeze(-1), best[2]


def _with_minimum(x: Tensor, desc: QuantDesc) -> tuple[Tensor, Tensor]:
    """As `_symmetric`, with numbers from 0 for integers beside a minimum."""
    last, count = 2.0**desc.format.bits - 1, x.shape[-1]
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    around = x - x.mean(-1, keepdim=True)
    best = torch.full_like(low, -1.0), torch.zeros_like(low), x
    for step in _TRIED:
        tried = (high - low) / (last + step)
        rounded = torch.round((x - low) / torch.where(tried == 0, torch.inf, tried))
        rounded = rounded.clamp(0, last)
        product = (rounded * around).sum(-1, keepdim=True)
        mean = rounded.sum(-1, keepdim=True) / count
        square = (rounded * (rounded - mean)).sum(-1, keepdim=True)
        best = _better(best, rounded, product, square)
    return best[1].squeeze(-1), best[2]


def _better(best: tuple, rounded: Tensor, product: Tensor, square: Tensor) -> tuple:
    """(What a multiple takes off the squared error, that multiple, numbers) for each group: those
    of ``best``, or where they take off more the rounded ones, given their inner products
    with the weights and with themselves.
    """
    found = product * product / torch.where(square == 0, torch.inf, square)
    tried = found, product / square.clamp(min=1e-30), rounded
    better = found > best[0]
    return tuple([torch.where(better, new, old) for new, old in zip(tried, best, strict=True)])
