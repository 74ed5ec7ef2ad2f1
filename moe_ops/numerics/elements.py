"""Elements: numbers to codes and back, codes to bytes and back.

A floating-point code is sign, exponent, mantissa from the highest bit down; integers of fewer than
8 bits have codes from 0 on. A format of levels has a number for each code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.meta.scales import unit_of_planes
from moe_ops.schemes import ElementFormat


def encode(x: Tensor, fmt: ElementFormat, zero_point: Tensor | None = None) -> Tensor:
    """Round fp32 numbers (..., K), already divided by their scale, to stored elements.

    Numbers beyond the format saturate; ties go to the even neighbour, of levels to the lower one.
    Integers have ``zero_point``, which broadcasts, added; without one those of fewer than 8 bits
    have the format's middle added. The stored elements are contiguous along K, and packed if they
    have fewer than 8 bits.
    """
    if fmt.levels:
        return pack(_encode_level(x, fmt), fmt)
    if fmt.name == "e4m3":
        return x.clamp(-fmt.max, fmt.max).to(fmt.storage)
    if not fmt.is_float:
        return pack(_encode_integer(x, fmt, zero_point), fmt)
    return pack(_encode_float(x, fmt), fmt)


def nearest(x: Tensor, fmt: ElementFormat) -> Tensor:
    """The numbers of a format that `encode` rounds fp32 numbers to, as `decode` gives them."""
    if fmt.levels:
        levels, _, between = _ordered(fmt, x.device)
        return levels[torch.bucketize(torch.nan_to_num(x, nan=0.0), between)]
    if fmt.is_float:
        return decode(encode(x, fmt), fmt)
    return torch.nan_to_num(torch.round(x), nan=0.0).clamp(-fmt.max - 1, fmt.max)


def decode(q: Tensor, fmt: ElementFormat, from_zero: bool = False) -> Tensor:
    """The exact fp32 numbers (..., K) of stored elements, in a new tensor. The format's middle is
    subtracted from codes of integers, unless ``from_zero``, for zero points to be subtracted.
    """
    if fmt.name == "e4m3":
        return e4m3_to_float32(q)
    codes = unpack(q, fmt)
    if fmt.levels:
        # filled on the device: a CUDA graph cannot copy them from the host
        levels = [torch.full((), x, dtype=torch.float32, device=q.device) for x in fmt.levels]
        return torch.stack(levels)[codes.int()]
    if fmt.is_float:
        return _decode_float(codes, fmt)
    values = codes.to(torch.float32)
    return values.sub_(fmt.middle) if fmt.middle and not from_zero else values


def pack(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Codes (..., K) to bytes (..., K * bits / 8). Codes of 8 bits are returned unchanged."""
    if fmt.bits == 8:
        return codes
    if fmt.bits == 4:
        low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
        return low | (high << 4)
    if fmt.high_bits:
        return _pack_planes(codes, fmt.high_bits)
    a, b, c, d = codes.unflatten(-1, (-1, 4)).unbind(-1)
    parts = (a | (b << 6), (b >> 2) | (c << 4), (c >> 4) | (d << 2))
    return torch.stack(parts, -1).flatten(-2)


def unpack(q: Tensor, fmt: ElementFormat) -> Tensor:
    """The inverse of ``pack``."""
    if fmt.bits == 8:
        return q
    if fmt.bits == 4:
        return torch.stack((q & 15, q >> 4), -1).flatten(-2)
    if fmt.high_bits:
        return _unpack_planes(q, fmt.high_bits)
    a, b, c = q.unflatten(-1, (-1, 3)).unbind(-1)
    parts = (a & 63, (a >> 6) | ((b & 15) << 2), (b >> 4) | ((c & 3) << 4), c >> 2)
    return torch.stack(parts, -1).flatten(-2)


def _pack_planes(codes: Tensor, high: int) -> Tensor:
    """`pack` of codes with so many bits above the low four (`ElementFormat.high_bits`)."""
    columns = codes.shape[-1]
    unit = unit_of_planes(columns)
    units = codes.unflatten(-1, (columns // unit, unit))
    even, odd = (units & 15).unflatten(-1, (unit // 2, 2)).unbind(-1)
    # runs of low bytes, bytes of a run, columns of a byte
    fields = (units >> 4).unflatten(-1, (4 // high, unit * high // 8, 2))
    above = (fields << _places(high, codes)).sum((-3, -1), dtype=torch.uint8)
    return torch.cat((even | (odd << 4), above), -1).flatten(-2)


def _unpack_planes(q: Tensor, high: int) -> Tensor:
    """The inverse of ``_pack_planes``."""
    columns = q.shape[-1] * 8 // (4 + high)
    unit = unit_of_planes(columns)
    units = q.unflatten(-1, (columns // unit, unit * (4 + high) // 8))
    low, above = units.split((unit // 2, unit * high // 8), -1)
    fields = (above[..., None, :, None] >> _places(high, q)) & ((1 << high) - 1)
    codes = torch.stack((low & 15, low >> 4), -1).flatten(-2)
    return (codes | (fields.flatten(-3) << 4)).flatten(-2)


def _places(high: int, like: Tensor) -> Tensor:
    """Where the bits of runs and columns begin in a byte of high bits, (4 / high, 1, 2)."""
    return torch.arange(0, 8, high, dtype=torch.uint8, device=like.device).view(-1, 1, 2)


def pack_words(words: Tensor) -> Tensor:
    """(..., n) int64 words of eight codes of 4 bits, one a byte, to (..., n * 4) bytes: neighbours
    move together by pairs, fours and eights, in all words at once.
    """
    for width, low in ((4, 0x000F000F000F000F), (8, 0x000000FF000000FF), (16, 0xFFFF)):
        words = (words & low) | ((words >> width) & (low << width))
    return words.view(torch.int32)[..., ::2].contiguous().view(torch.uint8)


def _encode_integer(x: Tensor, fmt: ElementFormat, zero_point: Tensor | None) -> Tensor:
    low = fmt.least_integer
    high = low + 2 * fmt.max + 1
    if zero_point is None and fmt.middle:
        zero_point = torch.full_like(x[..., :1], fmt.middle)
    x = torch.round(x)
    x = x if zero_point is None else x + zero_point
    # NaN has no integer, but its scale is NaN too, and so is their product
    return torch.nan_to_num(x, nan=0.0).clamp(low, high).to(fmt.storage)


def _encode_float(x: Tensor, fmt: ElementFormat) -> Tensor:
    magnitude = x.abs().clamp(max=fmt.max)
    drop = 23 - fmt.mantissa  # bits of an fp32 mantissa that the format does not have
    bits = magnitude.view(torch.int32)
    even = (bits >> drop) & 1
    normal = ((bits + ((1 << (drop - 1)) - 1) + even) >> drop) - ((127 - fmt.bias) << fmt.mantissa)
    # below the least normal number, the code is the number in units of the least number
    steps = torch.round(magnitude * 2.0 ** (fmt.bias - 1 + fmt.mantissa)).to(torch.int32)
    code = torch.where(magnitude < 2.0 ** (1 - fmt.bias), steps, normal)
    code = (code & ((1 << (fmt.bits - 1)) - 1)) | (
        torch.signbit(x).to(torch.int32) << (fmt.bits - 1)
    )
    return code.to(torch.uint8)


def _encode_level(x: Tensor, fmt: ElementFormat) -> Tensor:
    _, codes, between = _ordered(fmt, x.device)
    # NaN has no level, but its scale is NaN too
    return codes.to(torch.uint8)[torch.bucketize(torch.nan_to_num(x, nan=0.0), between)]


def _ordered(fmt: ElementFormat, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(levels from the lowest up, their codes, the middles between neighbours)."""
    levels, codes = torch.tensor(fmt.levels, dtype=torch.float32, device=device).sort(stable=True)
    return levels, codes, (levels[:-1] + levels[1:]) / 2


def _decode_float(codes: Tensor, fmt: ElementFormat) -> Tensor:
    # Move sign, exponent and mantissa to their places in fp16; the exponents' biases differ.
    wide = codes.to(torch.int16)
    sign = (wide << (16 - fmt.bits)) & (0x8000 - 0x10000)
    rest = (wide & ((1 << (fmt.bits - 1)) - 1)) << (10 - fmt.mantissa)
    half = (sign | rest).view(torch.float16)
    return half.to(torch.float32).mul_(2.0 ** (15 - fmt.bias))


def e4m3_to_float32(q: Tensor) -> Tensor:
    """``q.to(torch.float32)``, exact for all 256 codes; torch's own cast from e4m3 takes six
    times as long on a CPU."""
    if q.device.type != "cpu" or q.dtype != torch.float8_e4m3fn or torch.compiler.is_compiling():
        return q.to(torch.float32)
    # move sign, exponent and mantissa to their places in fp16; the exponent biases differ by 8
    bits = q.view(torch.int8).to(torch.int16)
    nan = bits.bitwise_and(0x7F).add_(1).bitwise_and_(0x80).bitwise_left_shift_(7)
    half = bits.bitwise_left_shift_(7).bitwise_and_(0xBF80 - 0x10000).bitwise_or_(nan)
    return half.view(torch.float16).to(torch.float32).mul_(256.0)


def round_products_to_e4m3(products: Tensor) -> Tensor:
    """fp32 products of integers and e4m3 numbers, rounded in place to the nearest e4m3 number,
    ties to even; beyond 448 they become 448, as in ``encode``.

    They are multiples of e4m3's least number, 2^-9, as all of its numbers are. So rounding to four
    significant bits is all there is to it, also below the least normal number, and takes a
    fraction of the time of torch's casts on a CPU.
    """
    bits = products.view(torch.int32)
    odd = (bits >> 20).bitwise_and_(1)
    bits.add_(odd).add_(0x7FFFF).bitwise_and_(-0x100000)
    return products.clamp_(-448.0, 448.0)


def e8m0_to_float32(code: Tensor) -> Tensor:
    """2 ** (code - 127) of uint8 codes, exact for all of them; 255 is NaN."""
    wide = code.to(torch.int32)
    bits = torch.where(wide == 0, 1 << 22, wide << 23)  # 2 ** -127 is subnormal in fp32
    return torch.where(wide == 255, 0x7FC00000, bits).view(torch.float32)
