"""Scales in two levels: their products, to the bit, and how near searched ones come."""

import pytest
import torch

from moe_ops.numerics import Scales, dequantize_weight, quantize_weight
from moe_ops.numerics.elements import decode, encode, nearest, pack
from moe_ops.schemes import ELEMENT_FORMATS, SCHEMES, get_scheme
from tests.support import oracle

# scheme -> relative error on gaussian weights that is at most made, and bits of a weight
FOUND = {
    "int4_w4a16:g32:super:min": (0.072, 4.625),
    "int5_w5a16:g32:super:min": (0.036, 5.625),
    "int6_w6a16:g16:super": (0.018, 6.5625),
    "iq4_w4a16:g32:super": (0.077, 4.3125),
    "custom:int4,1x16,int8": (0.071, 4.5625),  # Q3_K's values
    "custom:int4,1x16,int8,min": (0.058, 5.125),  # Q2_K's
    "custom:int8,1x64,int8,min": (0.0056, 8.375),
    "custom:e2m1,1x32,int8": (0.092, 4.3125),
    "custom:e4m3,1x256,int8": (0.026, 8.09375),
}
two_levels = pytest.mark.parametrize("scheme", FOUND)


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_all_schemes_are_tested():
    named = {
        name for name, scheme in SCHEMES.items() if scheme.weight and scheme.weight.two_levels
    }
    assert named == {name for name in FOUND if not name.startswith("custom:")}


def any_scales(scheme, n=5, k=1024, seed=0):
    """Elements, codes and fp16 scales of either sign, as files may have them."""
    g = torch.Generator().manual_seed(seed)
    qdata, scales = quantize_weight(gaussian(n, k, seed=seed), scheme)

    def codes(like):
        return torch.randint(-128, 128, like.shape, dtype=torch.int8, generator=g)

    above = scales.channel_scale
    above = (
        torch.randn(above.shape, generator=g) * 2.0 ** torch.randint(-20, 9, above.shape)
    ).half()
    zero = None if scales.zero_point is None else codes(scales.zero_point)
    return qdata, Scales(codes(scales.scale), zero, None, above)


@two_levels
def test_values_have_one_rounding(scheme):
    """d, sc, dmin and mn by their formula: exact but for the addition of a minimum."""
    qdata, scales = any_scales(scheme)
    values = dequantize_weight(qdata, scheme, *scales)
    desc = get_scheme(scheme).weight
    elements = oracle.stored(qdata.unsqueeze(0), desc.dtype)[0]
    pairs = scales.channel_scale.double().unflatten(-1, (-1, 1 + desc.minimum))
    for block, got in enumerate(values.split(256, -1)):
        for at in range(0, 256, desc.group.cols):
            group = (256 * block + at) // desc.group.cols
            part = elements[:, group * desc.group.cols :][:, : desc.group.cols]
            least = {"int8": -128}.get(desc.dtype, 0) if desc.minimum else 0
            middle = 0 if desc.minimum else {"int4": 8, "int6": 32}.get(desc.dtype, 0)
            scale = pairs[:, block, :1] * scales.scale[:, group : group + 1]
            want = scale * (part - least - middle)
            if desc.minimum:
                want = want + pairs[:, block, 1:] * scales.zero_point[:, group : group + 1]
            # elements of 8 bits, codes and fp16 numbers have more digits than fp32
            rtol = 2e-7 if desc.dtype == "int8" else 0
            within = {"rtol": rtol, "atol": rtol * float(want.abs().max())}
            torch.testing.assert_close(got[:, at : at + desc.group.cols], want.float(), **within)


@two_levels
def test_error_and_bits_of_gaussian_weights(scheme):
    weight = gaussian(2, 64, 1024)
    error, bits = FOUND[scheme]
    for factor in (1.0, -0.02, 50.0):
        qdata, scales = quantize_weight(weight * factor, scheme)
        stored = [qdata, *[t for t in scales if t is not None]]
        assert sum(t.nbytes for t in stored) * 8 / weight.numel() == bits
        values = dequantize_weight(qdata, scheme, *scales)
        assert error / 1.15 < oracle.relative_error(values, weight * factor) <= error


@two_levels
def test_scales_below_the_normal_numbers_of_fp16(scheme):
    """Few multiples of 2^-24 for 256 columns cost little: no code of a scale is cut off."""
    weight = gaussian(2, 64, 1024)
    _, scales = quantize_weight(weight, scheme)
    of_scales = scales.channel_scale[..., :: 1 + get_scheme(scheme).weight.minimum].float()
    for multiple in (0.4, 1.4, 3.3):
        small = weight * (multiple * 2.0**-24 / of_scales.max())
        qdata, found = quantize_weight(small, scheme)
        values = dequantize_weight(qdata, scheme, *found)
        assert oracle.relative_error(values, small) <= FOUND[scheme][0] + 0.02


@two_levels
def test_elements_are_the_nearest_beside_their_scales(scheme):
    """Which other element of its group could be nearer? None, whatever the scales are."""
    weight = gaussian(3, 512) * torch.exp(gaussian(3, 512, seed=1))
    qdata, scales = quantize_weight(weight, scheme)
    values = dequantize_weight(qdata, scheme, *scales)
    desc = get_scheme(scheme).weight
    if desc.format.bits == 8:
        codes = torch.arange(256).to(torch.uint8).view(desc.storage_dtype)
        every = [codes[i].expand(qdata.shape) for i in range(256)]
        every = [q for q in every if q[0, 0].float().isfinite()]
    else:
        every = [
            pack(torch.full(weight.shape, code, dtype=torch.uint8), desc.format)
            for code in range(2**desc.format.bits)
        ]
    others = torch.stack([dequantize_weight(q, scheme, *scales) for q in every])
    nearest = (others - weight).abs().amin(0)
    assert ((values - weight).abs() <= nearest + 1e-6 * weight.abs().max()).all()


@two_levels
def test_groups_of_one_number_and_of_none(scheme):
    """Constants are kept nearly, zeros exactly, and what fp16 cannot hold becomes zero."""
    weight = gaussian(1, 4, 512)
    weight[:, 0] = 3.25
    weight[:, 1] = 0
    weight[:, 2, :256] = 0
    weight[:, 3] *= 1e-12
    values = dequantize_weight(*(q := quantize_weight(weight, scheme))[:1], scheme, *q[1])
    assert values.isfinite().all()
    torch.testing.assert_close(values[:, 0], weight[:, 0], rtol=0.02, atol=0)
    assert not values[:, 1].any() and not values[:, 2, :256].any() and values[:, 2, 256:].any()
    assert not values[:, 3].any()


@pytest.mark.parametrize("name", ["int4", "int5", "int6", "int8", *oracle.LEVELS, "e2m1", "e4m3"])
def test_nearest_is_what_encode_rounds_to(name):
    fmt = ELEMENT_FORMATS[name]
    x = torch.cat(
        (gaussian(8, 64), gaussian(8, 64) * fmt.max, torch.arange(-64, 64.0).view(2, 64) / 2)
    )
    assert torch.equal(nearest(x, fmt), decode(encode(x, fmt), fmt))


@pytest.mark.slow
def test_the_search_is_traced():
    for scheme in ("q4_k", "iq4_xs"):
        compiled = torch.compile(quantize_weight, fullgraph=True, backend="aot_eager")
        weight = gaussian(2, 3, 256)
        for got, want in zip(
            (lambda q, s: (q, *s))(*compiled(weight, scheme)),
            (lambda q, s: (q, *s))(*quantize_weight(weight, scheme)),
            strict=True,
        ):
            assert (got is None and want is None) or torch.equal(got, want)
