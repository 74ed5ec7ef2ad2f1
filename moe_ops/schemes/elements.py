"""The number formats of quantized elements."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ElementFormat:
    """A number format of quantized elements.

    ``storage`` is the torch dtype that holds them, ``bits`` the bits of one: two of 4 bits share a
    byte (the even one in the low half), and four floating-point ones of 6 bits three (the first in
    the lowest bits). Integers of 5 and 6 bits lie in planes (``high_bits``). ``max`` is the
    largest magnitude. Floating-point formats have a sign, ``mantissa`` bits of mantissa and an
    exponent of bias ``bias`` in between, without infinities. Formats of ``levels`` have any
    numbers, one for each code.
    """

    name: str
    storage: torch.dtype
    bits: int
    max: float
    mantissa: int = 0
    bias: int = 0
    levels: tuple[float, ...] = ()

    @property
    def is_float(self) -> bool:
        """Whether codes stand for numbers that are not counted."""
        return self.mantissa > 0 or self.levels != ()

    @property
    def least_integer(self) -> float:
        """The least stored element of an integer format: -128 of int8; 0 of those of fewer bits,
        whose elements are codes.
        """
        return 0.0 if self.bits < 8 else -self.max - 1

    @property
    def middle(self) -> float:
        """The stored element of an integer format that stands for 0 where nothing says another:
        0 of int8, 8 of int4.
        """
        return 0.0 if self.bits == 8 else self.max + 1

    @property
    def high_bits(self) -> int:
        """Bits of a code above its low four, if these lie in planes: 2 of int6, 1 of int5, else 0.

        A row is units of `meta.scales.unit_of_planes` columns: the low four bits of all of them,
        two columns a byte as of 4 bits, then their high bits. These fill a run of bytes, of which
        byte i belongs to byte i of each run of as many low bytes: the first run's bits are the
        lowest, and of a byte those of the even column.
        """
        return self.bits - 4 if self.bits in (5, 6) and not self.is_float else 0

    @property
    def columns_together(self) -> int:
        """What the columns of a row must be a multiple of, so that they fill whole bytes, or words
        of 4 bytes of each plane.
        """
        return 32 // self.high_bits if self.high_bits else 8 // math.gcd(8, self.bits)

    @property
    def max_exponent(self) -> int:
        """floor(log2(max))."""
        return int(self.max).bit_length() - 1


# bitsandbytes' normal floats, exact in fp32
_NF4: tuple[float, ...] = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138)
_NF4 += (
    -0.18477343,
    -0.091050036,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
)
_FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)  # bitsandbytes', a sign above
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml's

# int4 elements are codes 0..15 that stand for code - 8, for code - zero_point, or beside a minimum
# for themselves; so it is with int5 and int6, whose middles are 16 and 32
ELEMENT_FORMATS = {
    f.name: f
    for f in (
        ElementFormat("e4m3", torch.float8_e4m3fn, 8, 448.0, mantissa=3, bias=7),
        ElementFormat("e3m2", torch.uint8, 6, 28.0, mantissa=2, bias=3),
        ElementFormat("e2m3", torch.uint8, 6, 7.5, mantissa=3, bias=1),
        ElementFormat("e2m1", torch.uint8, 4, 6.0, mantissa=1, bias=1),
        ElementFormat("int8", torch.int8, 8, 127.0),
        ElementFormat("int6", torch.uint8, 6, 31.0),
        ElementFormat("int5", torch.uint8, 5, 15.0),
        ElementFormat("int4", torch.uint8, 4, 7.0),
        ElementFormat("nf4", torch.uint8, 4, 1.0, levels=_NF4),
        ElementFormat("fp4", torch.uint8, 4, 1.0, levels=_FP4 + tuple([-x for x in _FP4])),
        ElementFormat("iq4", torch.uint8, 4, 113.0, levels=_IQ4),  # of either sign
    )
}
