"""Weights in blocks of ggml, of which both a peer and moe_ops read the same numbers.

A row of K numbers is K / 256 or K / 32 blocks; tests compare them with a decoder that reads them
element by element. Scales and minima are those that `moe_ops.quantize` finds, rounded to the bits
that a block has for them, and elements are the nearest. ggml's own quantizers find others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import moe_ops
from moe_ops.integrations.checkpoints import ggml
from moe_ops.numerics import two_levels
from moe_ops.schemes import ELEMENT_FORMATS, SUPER_BLOCK, get_scheme

_AT_ONCE = 1 << 26  # numbers that are encoded at a time


@dataclass(frozen=True)
class BlockType:
    """A type: its name, its number in ggml, and what encodes fp32 (..., K) as (..., bytes)."""

    name: str
    number: int
    encode: Callable[[Tensor], Tensor]


def blocks_of(weight: Tensor, scheme: str) -> Tensor:
    """(E, N, K) in blocks, (E, N, bytes of a row)."""
    step = max(1, _AT_ONCE // weight[0].numel())
    parts = [TYPES[scheme].encode(part.float()) for part in weight.split(step)]
    return torch.cat(parts)


def read(blocks: Tensor, scheme: str) -> Any:
    """moe_ops' weight of these blocks."""
    parts = ggml.convert(TYPES[scheme].name, {"weight": blocks}, {})
    return moe_ops.from_quantized(scheme, **parts)


def _bytes(*parts: Tensor) -> Tensor:
    """Parts of each block (..., blocks, count) one behind the other, as rows of bytes."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1).flatten(-2)


def _coded(numbers: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Integers of at most a magnitude for the numbers of groups (..., blocks, groups), and what
    multiplies them, (..., blocks, 1) fp16."""
    above = (numbers.abs().amax(-1, keepdim=True) / largest).half()
    codes = (numbers / torch.where(above == 0, torch.inf, above.float())).round()
    return codes.clamp(-largest, largest), above


def _fitted(x: Tensor, scheme: str) -> tuple[Tensor, Tensor | None]:
    """Scales and minima (..., blocks, groups) of the groups of two levels."""
    desc = get_scheme(scheme).quantized_weight
    per_block = SUPER_BLOCK // desc.group.cols
    scale, minimum = two_levels.in_one_level(*two_levels.fit(x, desc), desc)
    in_blocks = scale.unflatten(-1, (-1, per_block))
    return in_blocks, None if minimum is None else minimum.unflatten(-1, (-1, per_block))


def _quotients(x: Tensor, scale: Tensor, minimum: Tensor | float = 0.0) -> Tensor:
    """(x - minimum) / scale of groups (..., groups, columns)."""
    scale = scale.unsqueeze(-1)
    return (x - minimum) / torch.where(scale == 0, torch.inf, scale)


def _nearest_level(x: Tensor) -> Tensor:
    levels = torch.tensor(ELEMENT_FORMATS["iq4"].levels, device=x.device)
    return torch.bucketize(x, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)


def _halves(codes: Tensor) -> Tensor:
    """Codes (..., 2, n) of four bits: the first n in the low half of n bytes."""
    low, high = codes.unbind(-2)
    return low | (high << 4)


def q8_0(x: Tensor) -> Tensor:
    x = x.unflatten(-1, (-1, 32))
    step = x.abs().amax(-1, keepdim=True) / 127
    return _bytes(step.half(), _quotients(x, step.squeeze(-1)).round().to(torch.int8))


def iq4_nl(x: Tensor) -> Tensor:
    weight = moe_ops.quantize(x.flatten(0, -2).unsqueeze(0), "iq4_nl")
    scale = weight.scale.view(*x.shape[:-1], -1).half()
    codes = _nearest_level(_quotients(x.unflatten(-1, (-1, 32)), scale.float()))
    return _bytes(scale.unsqueeze(-1), _halves(codes.unflatten(-1, (2, 16))))


def iq4_xs(x: Tensor) -> Tensor:
    scale, _ = _fitted(x, "iq4_xs")
    codes, d = _coded(scale, 31)
    x = x.unflatten(-1, (-1, 8, 32))
    elements = _nearest_level(_quotients(x, codes * d.float()))
    bits = (codes + 32).to(torch.int32)
    places = torch.arange(0, 16, 2, device=x.device)
    high = ((bits >> 4) << places).sum(-1, keepdim=True).to(torch.int16)
    low = _halves((bits & 15).to(torch.uint8).unflatten(-1, (4, 2)).mT)
    return _bytes(d, high, low, _halves(elements.unflatten(-1, (2, 16))).flatten(-2))


def q4_k(x: Tensor) -> Tensor:
    scale, minimum = _fitted(x, "q4_k")
    assert minimum is not None
    codes, d = _coded(scale, 63)
    minima, dmin = _coded(-minimum, 63)
    codes, minima = codes.clamp(min=0), minima.clamp(min=0)
    least = -(minima * dmin.float()).unsqueeze(-1)
    x = x.unflatten(-1, (-1, 8, 32))
    elements = _quotients(x, codes * d.float(), least).round().clamp(0, 15).to(torch.uint8)
    first, then = codes.to(torch.uint8).chunk(2, -1)
    first_min, then_min = minima.to(torch.uint8).chunk(2, -1)
    scales = (first | (then >> 4 << 6), first_min | (then_min >> 4 << 6))
    mixed = (then & 15) | (then_min << 4)
    return _bytes(d, dmin, *scales, mixed, _halves(elements.unflatten(-2, (4, 2))).flatten(-2))


def q6_k(x: Tensor) -> Tensor:
    scale, _ = _fitted(x, "q6_k")
    codes, d = _coded(scale, 127)
    quotients = _quotients(x.unflatten(-1, (-1, 16, 16)), codes * d.float())
    elements = (quotients.round().clamp(-32, 31) + 32).to(torch.uint8)
    quarters = elements.flatten(-2).unflatten(-1, (2, 4, 32))
    low = _halves((quarters & 15).unflatten(-2, (2, 2)).flatten(-2)).flatten(-2)
    above = (quarters >> 4).unbind(-2)
    high = above[0] | (above[1] << 2) | (above[2] << 4) | (above[3] << 6)
    return _bytes(low, high.flatten(-2), codes.to(torch.int8), d)


_OF_NAME = {
    "Q8_0": (8, q8_0),
    "Q4_K": (12, q4_k),
    "Q6_K": (14, q6_k),
    "IQ4_NL": (20, iq4_nl),
    "IQ4_XS": (23, iq4_xs),
}
# by the scheme whose weights they are
TYPES = {get_scheme(name.lower()).name: BlockType(name, *rest) for name, rest in _OF_NAME.items()}
