"""The inline assembly that decodes int4 in the order of its columns, run on numbers: neither
Triton's interpreter nor a CPU runs it.
"""

import pytest
import torch

from tests.kernels.mixed_gemm.test_decode import MASK, halves, run, words
from tests.support.cases import BF16

pytest.importorskip("triton")

from moe_ops.kernels.training import decode

LOW, HIGH, SHIFT = (n.value for n in (decode.INT4_LOW, decode.INT4_HIGH, decode.INT4_SHIFT))


def pair(low: float, high: float) -> int:
    """Two numbers that bf16 holds, in one register."""
    numbers = torch.tensor([low, high], dtype=torch.float64)
    assert torch.equal(numbers.to(BF16).double(), numbers)
    low, high = (bits & 0xFFFF for bits in numbers.to(BF16).view(torch.int16).tolist())
    return low | high << 16


def nibbles_in_order(word: int) -> list[int]:
    return [word >> 4 * i & 15 for i in range(8)]


def decoded(word: int, factors: int, offsets: list[int]) -> list[float]:
    return run("int4_words", word, *[factors] * 4, *offsets, source="training/decode.py")


def test_constants():
    assert halves(decode.INT4_FACTORS.value & MASK) == [LOW, HIGH]
    assert halves(decode.MINUS_EIGHT.value & MASK) == [-8 / SHIFT] * 2
    assert decode.MINUS_ZERO.value & MASK == 0x80008000
    assert LOW == 16 * HIGH == 2.0**133 / SHIFT


@pytest.mark.parametrize("scale", [1.0, 0.0103759765625, 2.0**-20, 3.015625, 2.0**40])
def test_scaled_with_the_offset(scale):
    """One fma rounds the product of an element and its scale as fp32 and one rounding would."""
    factors, offset = pair(scale * LOW, scale * HIGH), -8 * scale / SHIFT
    for word in words(64):
        products = torch.tensor([(n - 8) * scale for n in nibbles_in_order(word)])
        found = decoded(word, factors, [pair(offset, offset)] * 4)
        assert found == (products.to(BF16).double() / SHIFT).tolist()


@pytest.mark.parametrize("first", range(16))
def test_zero_points(first):
    """The difference is exact, and every byte may have a zero point of its own."""
    zeros = [first, (first + 5) % 16, 15 - first, 8]
    offsets = [pair(-z / SHIFT, -z / SHIFT) for z in zeros]
    for word in words(32)[first % 5 :: 5]:
        found = decoded(word, decode.INT4_FACTORS.value, offsets)
        expected = [(n - zeros[i // 2]) / SHIFT for i, n in enumerate(nibbles_in_order(word))]
        assert found == expected
