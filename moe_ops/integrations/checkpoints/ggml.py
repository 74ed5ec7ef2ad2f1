"""The block types of ggml, and what their blocks become here.

A row of K numbers is K / n blocks of n elements each; a block is its scales and its elements'
codes, in the order that `_DECODERS` spells out. Every value that a converted weight stands for is
the one that ggml gives, to the bit: in fp32, codes times scales are exact but for the addition of
a minimum, which both round once.

Notation of layouts: d, m and dmin fp16, e an exponent, b bytes, "lo" and "hi" the low and the high
four bits of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.integrations.checkpoints import reading
from moe_ops.integrations.checkpoints.common import Config, Matrix, require, shape_of
from moe_ops.integrations.checkpoints.packings import pack_nibbles
from moe_ops.schemes import GroupShape, QuantDesc, QuantScheme, get_scheme

Parts = dict[str, Tensor]


@dataclass(frozen=True)
class BlockType:
    """One block type: how many elements a block has, and in how many bytes."""

    name: str
    elements: int
    bytes: int


# of files, by the number that stands in them
PLAIN = {
    0: torch.float32,
    1: torch.float16,
    24: torch.int8,
    25: torch.int16,
    26: torch.int32,
    27: torch.int64,
    28: torch.float64,
    30: torch.bfloat16,
}
BLOCKS = {
    number: BlockType(name, elements, size)
    for number, name, elements, size in (
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (29, "IQ1_M", 256, 56),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
    )
}
_BY_NAME = {block.name: block for block in BLOCKS.values()}

# value = fp32 or fp16 scale of 16 columns * int8
_INT8_OF_16 = get_scheme(
    QuantScheme("int8 of 16", QuantDesc("int8", GroupShape(1, 16), scale_dtype=None), None)
).name
SCHEMES_OF = {
    "Q4_0": "int4_w4a16:g32",
    "Q4_1": "int4_w4a16:g32:min",
    "Q5_0": "int8_w8a16:g32",
    "Q5_1": "int8_w8a16:g32:min",
    "Q8_0": "int8_w8a16:g32",
    "Q4_K": "int4_w4a16:g32:min",
    "Q5_K": "int8_w8a16:g32:min",
    "Q6_K": _INT8_OF_16,
    "IQ4_NL": "int8_w8a16:g32",
    "IQ4_XS": "int8_w8a16:g32",
    "MXFP4": "mxfp4_w4a16",
    "NVFP4": "nvfp4_w4a16",
}
# a factor of a whole matrix, which only NVFP4 has, and one of activations, which stay as they are
FACTOR, IGNORED = "weight_scale_2", "input_scale"


def describe(name: str, t: dict, config: Config) -> Matrix:
    """Blocks (..., N, bytes of a row); of NVFP4 with one number for each matrix."""
    *batch, n, size = shape_of(t, "weight", 2, 3)
    require(t, "weight", (*batch, n, size), torch.uint8)
    block = _BY_NAME[name]
    for role in (FACTOR, IGNORED):
        if role in t:
            require(t, role, tuple(batch) or (1,), torch.float32)
    return Matrix(SCHEMES_OF[name], n, size // block.bytes * block.elements, tuple(batch))


def convert(name: str, t: Parts, config: Config) -> Parts:
    matrices = t["weight"]
    shape = (-1, *matrices.shape[-2:-1], matrices.shape[-1] // _BY_NAME[name].bytes)
    blocks = matrices.view(*shape, _BY_NAME[name].bytes)
    made: Parts = {}
    for i, matrix in enumerate(blocks):  # one at a time, for what decoding takes beside it
        for part, value in _DECODERS[name](matrix).items():
            value = value.flatten(-2)  # of a row
            if not i:
                size = (len(blocks), *value.shape)
                of_cpu = value.is_cpu and size[0] > 1
                made[part] = reading.empty(size, value.dtype) if of_cpu else value.new_empty(size)
            made[part][i] = value
    if name == "NVFP4":
        factor = t.get(FACTOR)
        ones = torch.ones(len(blocks), device=matrices.device)
        made["global_scale"] = ones if factor is None else 1 / factor.flatten()
    if matrices.dim() == 2:
        made = {part: value[0] for part, value in made.items()}
    return made


def _half(blocks: Tensor, begin: int) -> Tensor:
    """The fp16 number of each block (..., bytes) at a byte, (..., 1)."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16)


def _halves(b: Tensor) -> Tensor:
    """lo of all bytes, then hi."""
    return torch.cat((b & 15, b >> 4), -1)


def _bits(b: Tensor) -> Tensor:
    """The bits of bytes, lowest first, each in a byte."""
    places = torch.arange(8, dtype=torch.uint8, device=b.device)
    return ((b[..., None] >> places) & 1).flatten(-2)


def _signed(codes: Tensor, zero: int) -> Tensor:
    """uint8 codes minus a number, as int8."""
    return (codes - zero).view(torch.int8)


def _q4_0(b: Tensor) -> Parts:
    """d | b[16]: d (u - 8), u = lo then hi."""
    return {"qdata": pack_nibbles(_halves(b[..., 2:])), "scale": _half(b, 0)}


def _q4_1(b: Tensor) -> Parts:
    """d m | b[16]: d u + m."""
    codes = pack_nibbles(_halves(b[..., 4:]))
    return {"qdata": codes, "scale": _half(b, 0), "zero_point": _half(b, 2)}


def _q5_0(b: Tensor) -> Parts:
    """d | h[4] | b[16]: d (u - 16), the bits of h are bit 4 of u."""
    codes = _halves(b[..., 6:]) | (_bits(b[..., 2:6]) << 4)
    return {"qdata": _signed(codes, 16), "scale": _half(b, 0)}


def _q5_1(b: Tensor) -> Parts:
    """d m | h[4] | b[16]: d u + m."""
    codes = _halves(b[..., 8:]) | (_bits(b[..., 4:8]) << 4)
    return {"qdata": _signed(codes, 128), "scale": _half(b, 0), "zero_point": _half(b, 2)}


def _q8_0(b: Tensor) -> Parts:
    """d | int8[32]: d u."""
    return {"qdata": b[..., 2:].contiguous().view(torch.int8), "scale": _half(b, 0)}


def _scales_and_minima(b: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 scales and minima (..., 8) of groups of 32: d dmin | s[12], six bits each, times d and
    -dmin.
    """
    low, high, mixed = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat((low & 63, (mixed & 15) | (low >> 6 << 4)), -1)
    minima = torch.cat((high & 63, (mixed >> 4) | (high >> 6 << 4)), -1)
    return _half(b, 0).float() * scales, -(_half(b, 2).float() * minima)


def _nibbles_of_64(b: Tensor) -> Tensor:
    """(..., 256) codes of bytes (..., 128): 32 lo, then 32 hi of the same bytes."""
    chunks = b.unflatten(-1, (4, 32))
    return torch.stack((chunks & 15, chunks >> 4), -2).flatten(-3)


def _q4_k(b: Tensor) -> Parts:
    """d dmin | s[12] | b[128]: (d sc) u - dmin mn, groups of 32."""
    scale, minimum = _scales_and_minima(b)
    codes = pack_nibbles(_nibbles_of_64(b[..., 16:]))
    return {"qdata": codes, "scale": scale, "zero_point": minimum}


def _q5_k(b: Tensor) -> Parts:
    """d dmin | s[12] | h[32] | b[128]: bit 4 of element e is bit e >> 5 of h[e & 31]."""
    scale, minimum = _scales_and_minima(b)
    high = _bits(b[..., 16:48]).unflatten(-1, (32, 8)).mT.flatten(-2)
    codes = _nibbles_of_64(b[..., 48:]) | (high << 4)
    return {"qdata": _signed(codes, 128), "scale": scale, "zero_point": minimum}


def _q6_k(b: Tensor) -> Parts:
    """l[128] | h[64] | int8 s[16] | d: d s (u - 32), groups of 16. Half i and quarter t of it: low
    bits hi or lo (t >> 1) of l[64 i + 32 (t & 1) ..], high bits 2 t of h[32 i ..].
    """
    low = b[..., :128].unflatten(-1, (2, 64))
    low = torch.cat((low & 15, low >> 4), -1)
    places = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8, device=b.device)
    high = (b[..., 128:192].unflatten(-1, (2, 1, 32)) >> places) & 3
    codes = (low | (high.flatten(-2) << 4)).flatten(-2)
    scale = _half(b, 208).float() * b[..., 192:208].contiguous().view(torch.int8)
    return {"qdata": _signed(codes, 32), "scale": scale}


# fmt: off
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# fmt: on


def _levels(codes: Tensor) -> Tensor:
    levels = torch.tensor(LEVELS, dtype=torch.int8, device=codes.device)
    return levels[codes.int()]


def _iq4_nl(b: Tensor) -> Parts:
    """d | b[16]: d LEVELS[u], u as in Q4_0."""
    return {"qdata": _levels(_halves(b[..., 2:])), "scale": _half(b, 0)}


def _iq4_xs(b: Tensor) -> Parts:
    """d | uint16 h | l[4] | b[128]: d (s - 32) LEVELS[u] of group g of 32; s is four bits of l and
    bits 2 g of h above them.
    """
    low = torch.stack((b[..., 4:8] & 15, b[..., 4:8] >> 4), -1).flatten(-2)
    places = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=b.device)
    high = ((b[..., 2:4, None] >> places) & 3).flatten(-2)
    scale = _half(b, 0).float() * _signed(low | (high << 4), 32)
    codes = _halves(b[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return {"qdata": _levels(codes), "scale": scale}


def _mxfp4(b: Tensor) -> Parts:
    """e | b[16]: 2^(e - 127) e2m1(u), u as in Q4_0."""
    return {"qdata": pack_nibbles(_halves(b[..., 1:])), "scale": b[..., :1]}


def _nvfp4(b: Tensor) -> Parts:
    """e4m3 s[4] | b[32]: s e2m1(u) of groups of 16, 8 bytes each. The sign of s counts for
    nothing, and its NaN is 0.
    """
    codes = _halves(b[..., 4:].unflatten(-1, (4, 8))).flatten(-2)
    scale = b[..., :4] & 127
    scale = scale.masked_fill(scale == 127, 0).view(torch.float8_e4m3fn)
    return {"qdata": pack_nibbles(codes), "scale": scale}


_DECODERS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
