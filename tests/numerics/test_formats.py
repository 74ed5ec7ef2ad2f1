"""The arithmetic of every format but plain e4m3 (tests/test_schemes.py), against fp64 formulas
written anew, and against torchao where its rules are ours."""

import functools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_ops.numerics import (
    Scales,
    dequantize_weight,
    fake_quantize_activation,
    quantize_activation,
    quantize_weight,
)
from moe_ops.numerics.elements import decode, e8m0_to_float32, encode, pack, unpack
from moe_ops.schemes import ELEMENT_FORMATS, SCHEMES, get_scheme
from tests.support import oracle

FP64 = torch.float64
WEIGHTS = [name for name in SCHEMES if name and not name.startswith("fp8_")]
# one scheme for each way to store weights
STORED = [
    n
    for n in WEIGHTS
    if n.startswith(("int", "nvfp4_")) or n == "mxfp8" or "w4a16" in n or "w6" in n
    if ":super" not in n  # whose scales are searched: test_two_levels.py
]
ACTIVATIONS = [name for name in WEIGHTS if SCHEMES[name].activation is not None]
SMALL = [f.name for f in ELEMENT_FORMATS.values() if f.mantissa and f.storage == torch.uint8]
STEPS = {"int4": 15, "int5": 31, "int6": 63, "int8": 255}  # between the ends of integers


def sample(*shape, dtype=torch.float32, seed=0):
    """Magnitudes over several powers of two, as weights with outliers have."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * torch.exp(torch.randn(shape, generator=g))).to(dtype)


# --- elements ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_every_code_of_a_small_format(name):
    fmt = ELEMENT_FORMATS[name]
    codes = torch.arange(2**fmt.bits, dtype=torch.uint8)
    values = torch.tensor(oracle.code_values(name), dtype=FP64)
    assert fmt.max == values.max() == oracle.FORMATS[name][2]
    assert torch.equal(decode(pack(codes, fmt), fmt).double(), values)
    assert torch.equal(decode(pack(codes, fmt), fmt).signbit(), codes >= 2 ** (fmt.bits - 1))
    assert torch.equal(encode(values.float(), fmt), pack(codes, fmt))


@pytest.mark.parametrize("name", SMALL)
def test_rounding_between_codes(name):
    """Ties to the even code, and either side of a tie by the last bit of fp32; beyond the end it
    saturates."""
    fmt = ELEMENT_FORMATS[name]
    values = torch.tensor(oracle.code_values(name)[: 2 ** (fmt.bits - 1)])
    middle = (values[1:] + values[:-1]) / 2
    below, above = (torch.nextafter(middle, torch.tensor(to)) for to in (-math.inf, math.inf))
    code = torch.arange(len(middle), dtype=torch.uint8)
    for x, want in ((below, code), (middle, code + code % 2), (above, code + 1)):
        x = torch.cat((x, torch.full((1,), 1e30)))  # a whole number of bytes
        want = torch.cat((want, torch.tensor([len(middle)], dtype=torch.uint8)))
        assert torch.equal(unpack(encode(x, fmt), fmt), want)
        assert torch.equal(unpack(encode(-x, fmt), fmt), want + 2 ** (fmt.bits - 1))


@pytest.mark.parametrize("name", oracle.LEVELS)
def test_every_level_and_rounding_between_two(name):
    """To the lower one of two that are as near, and beyond the ends to these."""
    fmt = ELEMENT_FORMATS[name]
    values = torch.tensor(oracle.code_values(name), dtype=torch.float32)
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(decode(pack(codes, fmt), fmt), values)
    assert fmt.max == values.max()

    def rounded(x):
        return decode(encode(x, fmt), fmt)

    ordered = values.sort().values
    assert torch.equal(rounded(values), values)
    middle = (ordered[1:] + ordered[:-1]) / 2
    middle = torch.cat((middle, middle[-1:]))  # a whole number of bytes
    above = torch.nextafter(middle, torch.tensor(math.inf))
    assert torch.equal(rounded(middle)[:-1], ordered[:-1])
    assert torch.equal(rounded(above)[:-1], ordered[1:])
    ends = rounded(torch.tensor([-1e30, 1e30, -math.inf, math.inf]))
    assert torch.equal(ends, ordered[[0, 15, 0, 15]])


@pytest.mark.parametrize("name", [*SMALL, *oracle.LEVELS, "int4", "int5", "int6"])
def test_packing(name):
    fmt = ELEMENT_FORMATS[name]
    for columns in (24,) if not fmt.high_bits else (32, 96, 192, 256):
        codes = torch.randint(0, 2**fmt.bits, (3, 5, columns), dtype=torch.uint8)
        packed = pack(codes, fmt)
        assert packed.shape == (3, 5, columns * fmt.bits // 8)
        assert torch.equal(unpack(packed, fmt), codes)
        by_index = oracle.planes if fmt.high_bits else oracle.codes
        assert torch.equal(by_index(packed, fmt.high_bits or fmt.bits), codes.long())
    if fmt.bits == 4:
        assert torch.equal(packed[..., 0], codes[..., 0] + 16 * codes[..., 1])
    strided = packed.mT.contiguous().mT
    assert torch.equal(unpack(strided, fmt), codes)


def test_every_power_of_two():
    codes = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(e8m0_to_float32(codes).double(), 2.0 ** (codes.double() - 127))
    assert e8m0_to_float32(torch.tensor([255], dtype=torch.uint8)).isnan().all()


# --- weights -------------------------------------------------------------------------------------


def expected(weight: torch.Tensor, scheme: str, stored: torch.Tensor) -> Scales:
    """The scales of fp64 weights (E, N, K) by the rules, rounded as they are stored. Zero points
    are those that go with the scales as stored, which in 16 bits may be the neighbours of
    these."""
    desc = SCHEMES[scheme].weight
    E, N, K = weight.shape
    w = weight.double().view(E, N, -1, K if desc.group.cols == -1 else desc.group.cols)
    amax = w.abs().amax(-1)
    fmt = oracle.weight_format(scheme)
    if scheme.startswith("mx"):
        rule = scheme.split(":")[-1] if scheme.endswith((":round", ":ceil")) else "ocp"
        scale = oracle.power_of_two(amax, fmt, "ceil" if scheme == "mxfp8" else rule)
        return Scales((torch.log2(scale) + 127).to(torch.uint8))
    if scheme.startswith("nvfp4"):
        whole = (448 * 6 / amax.amax((1, 2))).float()
        sixth = (amax / 6).float()
        return Scales(oracle.e4m3((whole[:, None, None] * sixth).double()), global_scale=whole)
    if scheme == "int4_w4a8":
        channel = (amax.amax(-1, keepdim=True) / 7.5 / 56).float()
        return Scales(
            oracle.e4m3(((amax / 7.5).float() / channel).double()), channel_scale=channel
        )
    dtype = torch.float32 if scheme.startswith("int8_w8a8") else weight.dtype
    if scheme.endswith(":min"):
        span = w.amax(-1) - w.amin(-1)
        return Scales((span / STEPS[fmt]).to(dtype), w.amin(-1).to(dtype))
    if fmt in oracle.LEVELS:
        largest = max(oracle.code_values(fmt))
        return Scales((amax / largest).to(dtype if fmt == "iq4" else torch.float32))
    if not scheme.endswith(":zp"):
        return Scales((amax / (STEPS[fmt] / 2)).to(dtype))
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    scale = ((high - low) / (255 if fmt == "int8" else 15)).to(dtype)
    first, last = (-128, 127) if fmt == "int8" else (0, 15)
    return Scales(scale, torch.round(first - low.float() / stored.float()).clamp(first, last))


@pytest.mark.parametrize("scheme", STORED)
@settings(max_examples=5, deadline=None)
@given(n=st.sampled_from([1, 3]), seed=st.integers(0, 99))
def test_weights_match_the_rules(scheme, n, seed):
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    weight = sample(2, n, 256, dtype=dtype, seed=seed)
    qdata, scales = quantize_weight(weight, scheme)
    desc = SCHEMES[scheme].weight
    assert qdata.dtype == desc.storage_dtype and qdata.is_contiguous()
    assert tuple(qdata.shape) == SCHEMES[scheme].qdata_shape(2, n, 256)
    want = expected(weight, scheme, scales.scale)
    for name, got in scales._asdict().items():
        shape = SCHEMES[scheme].scale_shapes(2, n, 256)[name]
        if shape is None:
            assert got is None
            continue
        assert tuple(got.shape) == shape and got.is_contiguous()
        # quotients of fp32 and fp64 may be neighbours in the bits that are kept
        ulp = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}.get(got.dtype, 0)
        if scheme == "int4_w4a8" and name == "scale":
            ulp = 0.125  # of e4m3, whose ties bf16 weights do hit
        torch.testing.assert_close(
            got.double(),
            getattr(want, name).double(),
            rtol=ulp,
            atol=0,
            msg=lambda m, n=name: n + m,
        )
    values = dequantize_weight(qdata, scheme, *scales)
    exact = oracle.dequantized(qdata, scales[0], scheme, *scales[1:])
    # the sum with a minimum is rounded beside what it may cancel
    atol = float(weight.abs().max()) * 2e-7 if desc.minimum else 0
    torch.testing.assert_close(values.double(), exact, rtol=2e-7, atol=atol)
    check_error(weight.double(), exact, scheme, qdata, scales)
    for e in range(2):
        one, one_scales = quantize_weight(weight[e], scheme)
        assert torch.equal(dequantize_weight(one, scheme, *one_scales), values[e])
        assert torch.equal(dequantize_weight(qdata[e], scheme, *scales.of(e)), values[e])
    chosen = torch.tensor([1, 1, 0])
    got = dequantize_weight(qdata[chosen], scheme, *scales.of(chosen), dtype=torch.bfloat16)
    assert torch.equal(got, values[chosen].bfloat16())


def check_error(weight, values, scheme, qdata, scales):
    """Elements are the nearest of their format to the fp32 quotient."""
    fmt = oracle.weight_format(scheme)
    one = encode(torch.ones(weight.shape), ELEMENT_FORMATS[fmt])
    unit = oracle.dequantized(one, scales.scale, scheme.removesuffix(":min"), None, *scales[2:])
    if fmt in oracle.LEVELS:
        quotient = (weight.float() * (1 / unit.float())).double()
        assert ((values / unit - oracle.nearest(quotient, fmt)).abs() < 1e-4).all()
        return
    if not fmt.startswith("int"):
        quotient = (weight / unit.float().double()).float().double()
        assert ((values / unit - oracle.nearest(quotient, fmt)).abs() < 1e-6).all()
        return
    code = oracle.stored(qdata, fmt).long()
    if scheme == "int4_w4a8":  # codes are the nearest, and then their products are rounded
        nearest = (code - 8) * unit
        assert ((values - nearest).abs() <= nearest.abs() / 16).all()
        values = nearest
    error = (values - weight).abs() / unit
    inside = (code > code.min()) & (
        code < code.max()
    )  # the ends saturate where a scale was rounded down
    assert inside.double().mean() > 0.8 and (error[inside] <= 0.5 + 1e-3).all()
    assert (error <= 0.5 + 255 * 2.0**-9 + 0.5).all()


def test_products_of_int4_and_e4m3_scales_are_e4m3():
    """Bit for bit torch's own cast; products beyond 448 become 448."""
    codes = torch.arange(256, dtype=torch.uint8)
    scales = codes.view(torch.float8_e4m3fn)
    scales = scales[scales.float().isfinite()].view(1, -1, 1)
    E, N, _ = scales.shape
    elements = torch.arange(16, dtype=torch.uint8).repeat(8)  # a group of 128 columns
    qdata = pack(elements.expand(E, N, 128), ELEMENT_FORMATS["int4"])
    channel = torch.rand(E, N, 1) + 0.5
    got = dequantize_weight(qdata, "int4_w4a8", scales, channel_scale=channel)
    products = (elements.float() - 8) * scales.float()
    rounded = products.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(got, rounded * channel)
    assert (rounded != products).any() and rounded.abs().max() == 448
    assert torch.equal(oracle.e4m3(products.double()), rounded.double())


@pytest.mark.parametrize("activation", [None, "e4m3,1xall,f32,dynamic"])
@pytest.mark.parametrize("dtype", ["int4", "int8", "e2m1"])
def test_products_are_e4m3_whatever_they_meet(dtype, activation):
    """It is the weight's description that says so, in schemes of one's own, too."""
    scheme = ":".join(filter(None, (f"custom:{dtype},1x32,e4m3,channel", activation)))
    qdata, scales = quantize_weight(sample(2, 3, 64), scheme)
    alone = scales._replace(channel_scale=torch.ones_like(scales.channel_scale))
    products = dequantize_weight(qdata, scheme, *alone)
    are_e4m3 = torch.equal(products, products.to(torch.float8_e4m3fn).float())
    assert are_e4m3 == get_scheme(scheme).weight.e4m3_products == (dtype == "int4")
    values = dequantize_weight(qdata, scheme, *scales)
    assert torch.equal(values, products * scales.channel_scale)


def test_zero_points_are_exact_zeros():
    weight = sample(2, 3, 64).abs() + 1  # all on one side of zero
    weight[0, 0, 5] = 0
    for scheme in ("int4_w4a16:g32:zp", "int8_w8a16:channel:zp"):
        for sign in (1, -1):
            qdata, scales = quantize_weight(sign * weight, scheme)
            values = dequantize_weight(qdata, scheme, *scales)
            assert values[0, 0, 5] == 0
            assert ((values - sign * weight).abs() <= scales.scale.max() * 0.51).all()


@pytest.mark.parametrize("scheme", WEIGHTS)
def test_zeros_stay_zero(scheme):
    weight = sample(2, 4, 256)
    weight[1] = 0
    weight[0, 3] = 0
    weight[0, 1, :128] = 0
    qdata, scales = quantize_weight(weight, scheme)
    values = dequantize_weight(qdata, scheme, *scales)
    assert values.isfinite().all() and values[0, 0].any()
    assert not values[1].any() and not values[0, 3].any()
    # zero is a value of every scheme but those with minima, unless all of a group are zeros
    assert scheme.endswith("channel:min") or not values[0, 1, :128].any()
    tiny = torch.full((1, 2, 256), 1e-44)  # quotients underflow
    qdata, scales = quantize_weight(tiny, scheme)
    assert dequantize_weight(qdata, scheme, *scales).isfinite().all()
    if SCHEMES[scheme].activation is None:
        return
    static = torch.tensor(0.5) if SCHEMES[scheme].activation.static else None
    got = fake_quantize_activation(weight[0], scheme, static)
    assert got.isfinite().all() and got[0].any()
    assert not got[3].any() and not got[1, :128].any()
    zeros = fake_quantize_activation(torch.zeros(2, 64), scheme, static)
    assert torch.equal(zeros, torch.zeros(2, 64))
    assert fake_quantize_activation(weight[0, :0], scheme, static).shape == (0, 256)


def test_groups_far_below_their_row_vanish():
    """Their e4m3 scale rounds to zero; nothing becomes NaN or grows."""
    weight = sample(1, 2, 256)
    weight[..., :128] *= 1e-7
    for scheme in ("int4_w4a8", "nvfp4"):
        qdata, scales = quantize_weight(weight, scheme)
        values = dequantize_weight(qdata, scheme, *scales)
        assert values.isfinite().all() and (values[..., :128].abs() < 1e-5).all()
        assert values[..., 128:].any()


# --- activations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ACTIVATIONS)
@settings(max_examples=6, deadline=None)
@given(m=st.sampled_from([1, 4]), k=st.sampled_from([32, 160, 256]), seed=st.integers(0, 99))
@example(m=1, k=160, seed=27)  # a number halfway between two codes of nvfp4, or one bit beside it
def test_activations_match_the_oracle(scheme, m, k, seed):
    x = sample(m, k, dtype=(torch.float32, torch.bfloat16)[seed % 2], seed=seed)
    desc = SCHEMES[scheme].activation
    static = torch.tensor(x.abs().max().item() / desc.format.max / 1.5) if desc.static else None
    got = fake_quantize_activation(x, scheme, static)
    want = oracle.quantized_activation(x.double(), scheme, static)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
    q, scale, whole, _ = quantize_activation(x, scheme, static)
    assert q.dtype == desc.storage_dtype and tuple(scale.shape) == desc.scale_shape(m, k)
    assert (whole is None) != desc.global_scale
    if whole is not None:
        given_ = torch.ones(()) / whole  # a static scale is the reciprocal of the global one
        again = fake_quantize_activation(x, scheme, given_)
        want = oracle.quantized_activation(x.double(), scheme, given_)
        torch.testing.assert_close(again.double(), want, rtol=1e-6, atol=0)


def test_saturation_under_a_static_global_scale():
    x = sample(3, 64) * 100
    static = torch.tensor(x.abs().max().item() / (448 * 6) / 20)
    got = fake_quantize_activation(x, "nvfp4", static)
    assert got.isfinite().all() and got.abs().max() <= 448 * 6 * static * 1.001
    torch.testing.assert_close(
        got.double(), oracle.quantized_activation(x.double(), "nvfp4", static), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("scheme", ACTIVATIONS)
def test_one_bad_row_spoils_no_other(scheme):
    """Unless they share a scale; integers of a static scale cannot hold it at all."""
    desc = SCHEMES[scheme].activation
    shared = desc.global_scale or desc.group.is_tensor
    x, static = sample(3, 160), torch.tensor(0.1) if desc.static else None
    want = fake_quantize_activation(x, scheme, static)
    x[1, 7] = math.nan
    got = fake_quantize_activation(x, scheme, static)
    if not shared:
        assert got[1, 7].isnan() and torch.equal(got[[0, 2]], want[[0, 2]])
    valid = torch.tensor([True, False, True])
    got = fake_quantize_activation(x, scheme, static, valid)
    if shared:
        want = fake_quantize_activation(x[valid], scheme, static)
        assert torch.equal(got[valid], want) and want.isfinite().all()


@pytest.mark.parametrize(
    "scheme", ["int4_w4a8", "mxfp4:round", "nvfp4", "mxfp6_e3m2", "int4_w4a16:zp"]
)
def test_arithmetic_traces_with_unknown_row_count(scheme):
    scheme = {"int4_w4a16:zp": "int4_w4a16:g128:zp"}.get(scheme, scheme)

    def run(x, qdata, scales):
        return fake_quantize_activation(x, scheme), dequantize_weight(qdata, scheme, *scales)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    qdata, scales = quantize_weight(sample(2, 6, 256), scheme)
    for m in (2, 0, 5):
        x = sample(m, 256, seed=m)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        for got, want in zip(compiled(x, qdata, scales), run(x, qdata, scales), strict=True):
            assert torch.equal(got, want)


# --- torchao -------------------------------------------------------------------------------------


@functools.cache
def ao():
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor

    return mx_tensor, nvfp4_tensor


@pytest.mark.parametrize(
    "scheme, dtype, mode",
    [
        ("mxfp4_w4a16", torch.float4_e2m1fn_x2, "FLOOR"),
        ("mxfp4_w4a16:round", torch.float4_e2m1fn_x2, "EVEN"),
        ("mxfp4_w4a16:ceil", torch.float4_e2m1fn_x2, "RCEIL"),
        ("mxfp6_e3m2", "fp6_e3m2", "FLOOR"),
        ("mxfp6_e2m3", "fp6_e2m3", "FLOOR"),
        ("mxfp8", torch.float8_e4m3fn, "RCEIL"),
    ],
)
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16])
def test_mx_agrees_with_torchao_bit_for_bit(scheme, dtype, mode, of):
    mx, _ = ao()
    weight = sample(2, 64, 256, dtype=of)
    qdata, (scale, *_) = quantize_weight(weight, scheme)
    peer_scale, peer = mx.to_mx(weight, dtype, 32, mx.ScaleCalculationMode[mode])
    assert torch.equal(scale, peer_scale.view(torch.uint8))
    fmt = SCHEMES[scheme].weight.format
    peer = pack(peer, fmt) if fmt.bits == 6 else peer.view(torch.uint8)  # theirs takes a byte each
    assert torch.equal(qdata.view(torch.uint8), peer)
    if dtype != torch.float8_e4m3fn:
        theirs = mx.to_dtype(
            peer if fmt.bits != 6 else unpack(peer, fmt), peer_scale, dtype, 32, of
        )
        assert torch.equal(dequantize_weight(qdata, scheme, scale, dtype=of), theirs)


def test_nvfp4_agrees_with_torchao_bit_for_bit():
    """With one scale for all experts whose reciprocal is exact: torchao keeps the reciprocal of
    ours."""
    _, nv = ao()
    weight = (
        sample(2, 64, 256).clamp(-5, 5) + 0.25
    )  # no block so small that torchao raises its scale
    weight[:, 0, 0] = 448 * 6 / 2.0**9
    qdata, (scale, _, whole, _) = quantize_weight(weight, "nvfp4")
    assert (whole == 2.0**9).all()
    peer_scale, peer = nv.nvfp4_quantize(weight.flatten(0, 1), 16, torch.tensor(2.0**-9))
    peer_scale = peer_scale.view(scale.shape)
    assert torch.equal(scale.view(torch.uint8), peer_scale.view(torch.uint8))
    different = (qdata.view(-1) != peer.view(-1)).double().mean()
    assert different == 0
    theirs = nv.NVFP4Tensor(
        peer.view_as(qdata), peer_scale, 16, torch.float32, per_tensor_scale=torch.tensor(2.0**-9)
    ).dequantize()
    assert torch.equal(dequantize_weight(qdata, "nvfp4", scale, None, whole), theirs)
