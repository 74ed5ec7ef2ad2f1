"""The inline assembly that decodes int4 in the order of its columns, run on numbers: neither
Triton's interpreter nor a CPU runs it.
"""

import pytest
import torch

from moe_ops.environment import INTERPRETED
from tests.kernels.mixed_gemm.test_decode import MASK, halves, run, words
from tests.support.cases import BF16, FP16, FP32

triton = pytest.importorskip("triton")

import triton.language as tl

from moe_ops.kernels.mixed_gemm import columns as decode

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
    return run("int4_words", word, *[factors] * 4, *offsets, source="mixed_gemm/columns.py")


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


# --- the tile, with the assembly spelled out for the interpreter ---------------------------------


@triton.jit
def rounded(x):
    """The bits of fp32 numbers rounded to bf16, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def half(word, upper: tl.constexpr):
    return ((word & -65536) if upper else (word << 16)).to(tl.float32, bitcast=True)


@triton.jit
def fma_words(a, b, c):
    low = rounded(half(a, False) * half(b, False) + half(c, False))
    return low | rounded(half(a, True) * half(b, True) + half(c, True)) << 16


@triton.jit
def int4_words(p, factors, offsets):
    code = p.to(tl.int32)
    even, odd = (code & 15).to(tl.float32), (code & 240).to(tl.float32)
    low = rounded(even * (half(factors, False) * 2.0**-133) + half(offsets, False))
    return low | rounded(odd * (half(factors, True) * 2.0**-133) + half(offsets, True)) << 16


@triton.jit
def tile(
    w_ptr,
    p_ptr,
    s_ptr,
    z_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    ZERO: tl.constexpr,
):
    n = tl.arange(0, N)[:, None]
    p = tl.load(p_ptr + n * (K // 2) + tl.arange(0, K // 2)[None, :])
    s = tl.load(s_ptr + n * G + tl.arange(0, G)[None, :])
    zero = tl.load(z_ptr + n * G + tl.arange(0, G)[None, :])
    w = decode.apart(decode.int4(p, s, zero, N, K, G, ZERO), N, K)
    tl.store(w_ptr + n * K + tl.arange(0, K)[None, :], w.to(tl.float32))


@pytest.mark.skipif(not INTERPRETED, reason="with a GPU kernels are compiled")
@pytest.mark.parametrize("scales", [BF16, FP16, FP32])
@pytest.mark.parametrize("has_zero", [False, True])
def test_tile(monkeypatch, scales, has_zero):
    """Each element less its own zero point, or 8, times its own scale, in its own column."""
    monkeypatch.setattr(decode, "int4_words", int4_words)
    monkeypatch.setattr(decode, "fma_words", fma_words)
    N, K, G = 8, 64, 4
    g = torch.Generator().manual_seed(3)
    p = torch.randint(256, (N, K // 2), generator=g).to(torch.uint8)
    s = (torch.rand(N, G, generator=g) * 0.1 + 0.01).to(scales)
    zero = torch.randint(16, (N, G), generator=g).to(torch.uint8)
    w = torch.full((N, K), torch.nan)
    tile[(1,)](w, p, s, zero, N, K, G, has_zero)
    codes = torch.stack((p & 15, p >> 4), -1).view(N, G, K // G).double()
    values = (codes - (zero[..., None] if has_zero else 8)) * s.double()[..., None]
    found, expected = w.double() * SHIFT, values.view(N, K).to(BF16).double()
    off = (found - expected).abs() / expected.abs().clamp(min=1e-9)
    # the interpreter cuts the lower part of a scale off: ties, and what is near them, may differ
    assert off.max() <= 2.0**-7 and (off > 0).double().mean() <= (0 if scales == BF16 else 0.01)
