"""Rounding and decoding e4m3 on Triton, and rows quantized while a layer runs."""

from __future__ import annotations

import math

import pytest
import torch

from moe_ops import numerics
from tests.support.cases import BF16, FP16, FP32
from tests.support.places import INTERPRETED, ON_GPU

triton = pytest.importorskip("triton")

from moe_ops.kernels import launch
from moe_ops.kernels.device import e4m3
from moe_ops.kernels.place.routing import NO_ROUTER_WEIGHTS
from moe_ops.kernels.rows import e4m3_int8, wire
from moe_ops.kernels.rows.scales import rows_of

tl = triton.language
DEVICES = [
    pytest.param("cpu", id="interpreted", marks=INTERPRETED),
    pytest.param("cuda", id="cuda", marks=ON_GPU),
]
devices = pytest.mark.parametrize("device", DEVICES)


# --- arithmetic of e4m3 --------------------------------------------------------------------------


@triton.jit
def round_trip(out_ptr, code_ptr, x_ptr, N: tl.constexpr, NATIVE: tl.constexpr):
    lane = tl.arange(0, N)
    x = tl.load(x_ptr + lane)
    tl.store(out_ptr + lane, e4m3.operand(x, NATIVE).to(tl.float32))
    tl.store(code_ptr + lane, e4m3.stored(x, NATIVE).to(tl.uint8, bitcast=True))


@triton.jit
def decode_all(out_ptr, code_ptr, dtype: tl.constexpr):
    lane = tl.arange(0, 256)
    tl.store(out_ptr + lane, e4m3.decode(tl.load(code_ptr + lane), dtype).to(tl.float32))


@triton.jit
def divide(out_ptr, x_ptr, scale_ptr, N: tl.constexpr, NEAR: tl.constexpr):
    lane = tl.arange(0, N)
    scale = tl.load(scale_ptr + lane)
    x = tl.load(x_ptr + lane)
    inverse = e4m3.near_reciprocal(scale) if NEAR else e4m3.reciprocal(scale)
    tl.store(out_ptr + lane, e4m3.quotient(x, scale, inverse))


def e4m3_values() -> torch.Tensor:
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return codes.to(FP32)


@devices
@pytest.mark.parametrize("native", [False, True])
def test_rounding_to_nearest_even(device, native):
    """Every e4m3 value, every midpoint of two, and the fp32 neighbours of each."""
    if native and not launch.gpu(-1 if device == "cpu" else 0).native:
        pytest.skip("no e4m3 here")
    values = e4m3_values()
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    up = torch.nextafter(points, torch.tensor(math.inf))
    down = torch.nextafter(points, torch.tensor(-math.inf))
    x = torch.cat((points, up, down, torch.tensor([448.00003, 1e-30, math.nan])))
    x = torch.cat((x, -x)).to(device)
    x = torch.cat((x, x.new_zeros(2048 - x.numel())))
    out, codes = torch.empty_like(x), torch.empty(x.shape, dtype=torch.uint8, device=device)
    round_trip[(1,)](out, codes, x, x.numel(), native)
    expected = x.to(torch.float8_e4m3fn)
    torch.testing.assert_close(out, expected.to(FP32), rtol=0, atol=0, equal_nan=True)
    stored = codes.view(torch.float8_e4m3fn).to(FP32)
    torch.testing.assert_close(stored, expected.to(FP32), rtol=0, atol=0, equal_nan=True)


@devices
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_decoding_every_code(device, dtype):
    codes = torch.arange(256, device=device).to(torch.uint8)
    out = torch.empty(256, device=device)
    names = {BF16: tl.bfloat16, FP16: tl.float16, FP32: tl.float32}
    decode_all[(1,)](out, codes, names[dtype])
    expected = codes.view(torch.float8_e4m3fn).to(FP32)
    number = expected.isfinite()
    assert number.sum() == 254
    assert torch.equal(out[number], expected[number])


@devices
@pytest.mark.parametrize("near", [False, True])
def test_quotients_round_as_divisions_do(device, near):
    """Exact ties of e4m3 among them: x = m * amax / 448 for midpoints m. Without a rounded
    inverse those of numbers of 16 bits do.
    """
    g = torch.Generator().manual_seed(0)
    amax = torch.randn(4096, generator=g).abs().to(BF16).to(FP32) * 2.0 ** torch.randint(
        -40, 40, (4096,), generator=g
    )
    amax[::2] = 7.0 * torch.randint(19, 36, (2048,), generator=g)
    x = amax * torch.randint(-448, 449, (4096,), generator=g) / 448
    x, scale = (x.to(BF16).to(FP32) if near else x).to(device), (amax / 448).to(device)
    out = torch.full_like(x, math.nan)
    divide[(1,)](out, x, scale, 4096, near)
    assert torch.equal(out, x / scale)


# --- the kernels that prepare x ------------------------------------------------------------------


@devices
@pytest.mark.parametrize("scheme", ["fp8_block:ue8m0", "fp8_channel", "int8_w8a8"])
def test_rows_that_travel_are_quantized_as_numerics_does(device, scheme):
    x = torch.randn(5, 200).to(BF16 if device == "cuda" else FP32).to(device)
    x = x.t().contiguous().t()  # any strides
    expected, expected_scale, *_ = numerics.quantize_activation(x, scheme)
    codes = torch.full((5, 200), 0x55, dtype=torch.uint8, device=device)
    by_group = scheme.startswith("fp8_block")
    scale = torch.full((5, 2 if by_group else 1), math.nan, device=device)
    wire.quantize_rows(codes.view(expected.dtype), scale, x, scheme)
    assert torch.equal(codes, expected.view(torch.uint8))
    largest = x.abs().amax(1, keepdim=True).to(FP32)
    assert torch.equal(scale, expected_scale if by_group else largest)


@devices
@pytest.mark.parametrize("K, groups_apart", [(16, 0), (128, 0), (200, 1), (4112, 0), (4112, 1)])
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_block:ue8m0", "fp8_channel"])
def test_quantized_rows_are_those_of_numerics(device, scheme, K, groups_apart):
    """With the scales of a row side by side, and those of a group (`groups_apart`)."""
    g = torch.Generator().manual_seed(K)
    x = torch.randn(5, K, generator=g).to(BF16 if device == "cuda" else FP32).to(device)
    x[1] = 0
    x[2] *= 1e-30
    by_group = scheme.startswith("fp8_block")
    groups = -(-K // 128) if by_group else 1
    codes = torch.full((5, K), 255, dtype=torch.uint8, device=device)
    scale = torch.full((5, groups), math.nan, device=device)
    if groups_apart:
        scale = scale.t().contiguous().t()
    zeros = torch.full((10,), math.nan, device=device)
    gpu = launch.gpu(x.get_device())._replace(pdl=False)
    q = codes.view(torch.float8_e4m3fn) if gpu.native else codes
    to = e4m3_int8.Quantized(
        q, scale, *scale.stride(), zeros, rows=5, T=5, zeros=2, K=K, BY_GROUP=by_group,
        GROUPS=16, NATIVE=gpu.native, INT8=False, POWERS=scheme.endswith(":ue8m0"),
    )  # fmt: skip
    parts = -(-K // 2048) if by_group else 1
    quantizes = e4m3_int8.quantize(to, rows_of(x), NO_ROUTER_WEIGHTS, parts, gpu)
    launch.run([quantizes], x.get_device(), gpu)
    expected, expected_scale, *_ = numerics.quantize_activation(x, scheme)
    assert torch.equal(codes, expected.view(torch.uint8))
    if by_group:
        assert torch.equal(scale, expected_scale)
    else:
        assert torch.equal(scale[:, 0], x.abs().amax(1).to(FP32))
        assert (zeros == 0).all()
