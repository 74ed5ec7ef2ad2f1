"""The block types of ggml, and what their blocks become here.

A row of K numbers is K / n blocks of n elements each; a block is its scales and its elements'
codes, in the order that `_DECODERS` spells out. Every value that a converted weight stands for is
the one that ggml gives, to the bit: in fp32, codes times scales are exact but for the addition of
a minimum, which both round once. Scales that are products of two numbers stay so, in two levels.

Notation of layouts: d, m and dmin fp16, e an exponent, b bytes, "lo" and "hi" the low and the high
four bits of bytes, T the levels of "iq4".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.integrations.checkpoints import reading
from moe_ops.integrations.checkpoints.common import Config, Matrix, require, shape_of
from moe_ops.numerics.elements import pack, pack_words
from moe_ops.schemes import GGUF_TYPES, get_scheme

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

_AT_ONCE = 1 << 22  # elements that are converted at a time, for what it takes beside them
# a factor of a whole matrix, which only NVFP4 has, and one of activations, which stay as they are
FACTOR, IGNORED = "weight_scale_2", "input_scale"
SCALE_DTYPE = torch.float16  # of scales of which a scheme says no dtype


def describe(name: str, t: dict, config: Config) -> Matrix:
    """Blocks (..., N, bytes of a row); of NVFP4 with one number for each matrix."""
    *batch, n, size = shape_of(t, "weight", 2, 3)
    require(t, "weight", (*batch, n, size), torch.uint8)
    for role in (FACTOR, IGNORED):
        if role in t:
            require(t, role, tuple(batch) or (1,), torch.float32)
    return Matrix(GGUF_TYPES[name], n, columns(name, size), tuple(batch))


def columns(name: str, size: int) -> int:
    """Columns of a row of blocks of so many bytes."""
    block = _BY_NAME[name]
    return size // block.bytes * block.elements


def convert(name: str, t: Parts, config: Config) -> Parts:
    *shape, size = shape_of(t, "weight")
    blocks = t["weight"].view(-1, size // _BY_NAME[name].bytes, _BY_NAME[name].bytes)
    rows = max(1, _AT_ONCE // (size // _BY_NAME[name].bytes * _BY_NAME[name].elements))
    made: Parts = {}
    fmt = get_scheme(GGUF_TYPES[name]).quantized_weight.format
    for begin in range(0, len(blocks), rows):
        for part, value in _DECODERS[name](blocks[begin : begin + rows]).items():
            value = value.flatten(-2)  # of a row
            if part == "codes":
                part, value = "qdata", pack(value.view(torch.uint8), fmt)
            if not begin:
                whole = (len(blocks), value.shape[-1])
                new = reading.empty if value.is_cpu else value.new_empty
                made[part] = new(whole, dtype=value.dtype)
            made[part][begin : begin + rows] = value
    made = {part: value.view(*shape, -1) for part, value in made.items()}
    if name == "NVFP4":
        factor = t.get(FACTOR, torch.ones(1, device=blocks.device))
        made["global_scale"] = (
            (1 / factor.flatten()).expand(math.prod(shape[:-1])).view(shape[:-1])
        )
    return made


def _half(blocks: Tensor, begin: int) -> Tensor:
    """The fp16 number of each block (..., bytes) at a byte, (..., 1)."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16)


def _words(b: Tensor, begin: int, end: int) -> Tensor:
    """Bytes of each block, eight in an int64."""
    return b[..., begin:end].contiguous().view(torch.int64)


def _each(byte: int) -> int:
    """The int64 of eight times this byte, which is below 128."""
    return byte * 0x0101010101010101


def _halves(words: Tensor) -> Tensor:
    """lo of all bytes, then hi."""
    return torch.cat((words & _each(15), (words >> 4) & _each(15)), -1)


def _spread(words: Tensor, bits: int) -> Tensor:
    """(..., n) words of codes of some bits -> (..., 8 / bits * n): the lowest bits of all bytes,
    then those above.
    """
    places = torch.arange(0, 8, bits, device=words.device).unsqueeze(1)
    return ((words.unsqueeze(-2) >> places) & _each(2**bits - 1)).flatten(-2)


def _bits(b: Tensor) -> Tensor:
    """The bits of bytes (..., n), lowest first, each in a byte: n words."""
    of_each = (b.to(torch.int64) * _each(1)) & _DIAGONAL
    return ((of_each + _each(127)) >> 7) & _each(1)


_DIAGONAL = 0x8040201008040201 - (1 << 64)  # bit i of byte i


def _two_levels(scales: Tensor, d: Tensor) -> Parts:
    """Codes of scales (..., groups), at most 127, and the numbers (..., 1) that multiply them."""
    return {"scale": scales.to(torch.int8), "channel_scale": d}


def _with_minima(scales: Tensor, minima: Tensor, d: Tensor, dmin: Tensor) -> Parts:
    """The same with minima, dmin times their codes, to be subtracted."""
    above = torch.cat((d, -dmin), -1)
    return {**_two_levels(scales, above), "zero_point": minima.to(torch.int8)}


def _scales_and_minima(b: Tensor) -> Parts:
    """Those of eight groups of 32: d dmin | s[12], six bits each."""
    low, high, mixed = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat((low & 63, (mixed & 15) | (low >> 6 << 4)), -1)
    minima = torch.cat((high & 63, (mixed >> 4) | (high >> 6 << 4)), -1)
    return _with_minima(scales, minima, _half(b, 0), _half(b, 2))


def _of_chunks(words: Tensor, size: int) -> Tensor:
    """lo, then hi of each ``size`` words."""
    return _halves(words.unflatten(-1, (-1, size))).flatten(-2)


def _q4_0(b: Tensor) -> Parts:
    """d | b[16]: d (u - 8), u = lo then hi."""
    return {"qdata": pack_words(_halves(_words(b, 2, 18))), "scale": _half(b, 0)}


def _q4_1(b: Tensor) -> Parts:
    """d m | b[16]: d u + m."""
    codes = pack_words(_halves(_words(b, 4, 20)))
    return {"qdata": codes, "scale": _half(b, 0), "zero_point": _half(b, 2)}


def _q5_0(b: Tensor) -> Parts:
    """d | h[4] | b[16]: d (u - 16), the bits of h are bit 4 of u."""
    codes = _halves(_words(b, 6, 22)) | (_bits(b[..., 2:6]) << 4)
    return {"codes": codes, "scale": _half(b, 0)}


def _q5_1(b: Tensor) -> Parts:
    """d m | h[4] | b[16]: d u + m."""
    codes = _halves(_words(b, 8, 24)) | (_bits(b[..., 4:8]) << 4)
    return {"codes": codes, "scale": _half(b, 0), "zero_point": _half(b, 2)}


def _q8_0(b: Tensor) -> Parts:
    """d | int8[32]: d u."""
    return {"qdata": b[..., 2:].view(torch.int8), "scale": _half(b, 0)}


def _q2_k(b: Tensor) -> Parts:
    """s[16] | q[64] | d dmin: (d lo(s)) u - dmin hi(s), groups of 16. Bits 2 t of half a q are the
    codes of quarter t of half the block.
    """
    codes = _spread(_words(b, 16, 80).unflatten(-1, (2, 4)), 2).flatten(-2)
    scales = _with_minima(b[..., :16] & 15, b[..., :16] >> 4, _half(b, 80), _half(b, 82))
    return {"qdata": pack_words(codes), **scales}


def _q3_k(b: Tensor) -> Parts:
    """h[32] | q[64] | s[12] | d: d (s - 32) (u - 4), groups of 16. Bit 2 of element e is bit
    e >> 5 of h[e & 31]; s of group g is half g >> 3 of s[g & 7], and bits 2 (g >> 2) of
    s[8 + (g & 3)].
    """
    codes = _spread(_words(b, 32, 96).unflatten(-1, (2, 4)), 2).flatten(-2)
    codes = (codes | (_spread(_words(b, 0, 32), 1) << 2)) + _each(4)
    low, above = b[..., 96:104], b[..., 104:108]
    low = torch.cat((low & 15, low >> 4), -1)
    above = torch.cat([(above >> place) & 3 for place in (0, 2, 4, 6)], -1)
    scales = (low | (above << 4)).to(torch.int8) - 32
    return {"qdata": pack_words(codes), **_two_levels(scales, _half(b, 108))}


def _q4_k(b: Tensor) -> Parts:
    """d dmin | s[12] | b[128]: (d sc) u - dmin mn, groups of 32; lo of 32 bytes, then hi."""
    codes = pack_words(_of_chunks(_words(b, 16, 144), 4))
    return {"qdata": codes, **_scales_and_minima(b)}


def _q5_k(b: Tensor) -> Parts:
    """d dmin | s[12] | h[32] | b[128]: bit 4 of element e is bit e >> 5 of h[e & 31]."""
    codes = _of_chunks(_words(b, 48, 176), 4) | (_spread(_words(b, 16, 48), 1) << 4)
    return {"codes": codes, **_scales_and_minima(b)}


def _q6_k(b: Tensor) -> Parts:
    """l[128] | h[64] | int8 s[16] | d: d s (u - 32), groups of 16. Low bits of half a block are
    lo, then hi of half of l; high bits are bits 2 t of half of h.
    """
    codes = _of_chunks(_words(b, 0, 128), 8)
    codes = codes | (_spread(_words(b, 128, 192).unflatten(-1, (2, 4)), 2).flatten(-2) << 4)
    scales = b[..., 192:208].view(torch.int8)
    return {"codes": codes, **_two_levels(scales, _half(b, 208))}


def _iq4_nl(b: Tensor) -> Parts:
    """d | b[16]: d T[u], u as in Q4_0."""
    return _q4_0(b)


def _iq4_xs(b: Tensor) -> Parts:
    """d | uint16 h | l[4] | b[128]: d (s - 32) T[u] of group g of 32; s is four bits of l and
    bits 2 g of h above them.
    """
    low = torch.stack((b[..., 4:8] & 15, b[..., 4:8] >> 4), -1).flatten(-2)
    high = torch.stack([(b[..., 2:4] >> place) & 3 for place in (0, 2, 4, 6)], -1).flatten(-2)
    scales = (low | (high << 4)).to(torch.int8) - 32
    codes = pack_words(_of_chunks(_words(b, 8, 136), 2))
    return {"qdata": codes, **_two_levels(scales, _half(b, 0))}


def _mxfp4(b: Tensor) -> Parts:
    """e | b[16]: 2^(e - 127) e2m1(u), u as in Q4_0."""
    return {"qdata": pack_words(_halves(_words(b, 1, 17))), "scale": b[..., :1]}


def _nvfp4(b: Tensor) -> Parts:
    """e4m3 s[4] | b[32]: s e2m1(u) of groups of 16, 8 bytes each. The sign of s counts for
    nothing, and its NaN is 0.
    """
    scale = b[..., :4] & 127
    scale = scale.masked_fill(scale == 127, 0).view(torch.float8_e4m3fn)
    return {"qdata": pack_words(_of_chunks(_words(b, 4, 36), 1)), "scale": scale}


_DECODERS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
