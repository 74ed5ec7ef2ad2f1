"""How weights of 4 and 8 bits are decoded on SM90: the assembly, and the order of rows and
columns."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.kernels.mixed_gemm.test_decode import (
    E2M1,
    E4M3,
    assert_rounded_once,
    execute,
    halves,
    register,
    run,
    run_registers,
    scale_above,
    words,
)
from tests.support import oracle
from tests.support.cases import BF16, FP16, FP32

pytest.importorskip("triton.experimental.gluon")

import triton.language as tl

from moe_ops.backends.triton.relayout import from_words, to_words
from moe_ops.kernels.device import permutation
from moe_ops.kernels.mixed_gemm import sm90_decode, sm90_mainloop, sm90_packed, sm90_wgmma
from moe_ops.numerics.elements import pack
from moe_ops.schemes import ELEMENT_FORMATS
from tests.kernels.mixed_gemm.test_sm90_wgmma import INT4_NUMBERS, columns_at

SOURCE = "mixed_gemm/sm90_decode.py"


def nibbles(word: int) -> list[int]:
    """Of bytes 0, 2, 1, 3: the lower ones, then the upper ones."""
    data = word.to_bytes(4, "little")
    data = [data[i] for i in (0, 2, 1, 3)]
    return [b & 15 for b in data] + [b >> 4 for b in data]


def in_pairs(*numbers: torch.Tensor) -> list[int]:
    """Each bf16 number twice in 32 bits, twice."""
    return [n.view(torch.int16).item() % 65536 * 0x00010001 for n in numbers for _ in range(2)]


@pytest.mark.parametrize("zero", [0, 7, 8, 15, 255])
def test_int4(zero):
    low, high, offset_of_8 = INT4_NUMBERS
    offset = torch.tensor(-zero * sm90_decode.INT4_ONE.value, dtype=BF16)
    assert zero != 8 or offset == offset_of_8
    for word in words(64):
        found = run("decode_int4", word, *in_pairs(low, high, offset), source=SOURCE)
        assert found == [(n - zero) * 2.0**-64 for n in nibbles(word)]
    assert sm90_mainloop.INT4_SHIFT.value == 2.0**64


@pytest.mark.parametrize("scale", [1.0, 0.0, 0.0123, -3.7, 2.0**-50, 1.5 * 2.0**57])
def test_int4_times_scales(scale):
    """Rounded once, as (code - 8) * scale."""
    s = torch.tensor(scale, dtype=BF16)
    one = sm90_decode.INT4_ONE.value
    numbers = in_pairs(
        *(s * n for n in (sm90_decode.INT4_LOW.value, sm90_decode.INT4_HIGH.value, -8 * one))
    )
    for word in words(64):
        found = run("decode_int4", word, *numbers, source=SOURCE)
        expected = (torch.tensor(nibbles(word)).double() - 8) * s.double() * one
        assert found == expected.to(BF16).tolist()


def test_int4_with_minimum():
    """Rounded once, as code * scale + minimum, of numbers of bf16."""
    g = torch.Generator().manual_seed(0)
    for word in words(64)[::3]:
        s, m = (
            (torch.rand(1, generator=g) + 0.5).to(BF16),
            torch.randn(1, generator=g).to(BF16) * 8,
        )
        one = sm90_decode.INT4_ONE.value
        low, high = (s * n.value for n in (sm90_decode.INT4_LOW, sm90_decode.INT4_HIGH))
        found = run("decode_int4", word, *in_pairs(low, high, m * one), source=SOURCE)
        expected = (torch.tensor(nibbles(word)).double() * s.double() + m.double()) * one
        assert found == expected.to(BF16).tolist()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_int4_with_minima_of_groups(dtype):
    """The kernel's own steps: rounded once where bf16 holds scales and minima. Of others scales
    are rounded, too, and minima of codes less 8, which are small.
    """
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (4, 3, 8), generator=g)
    s = (torch.rand(4, 3, generator=g) + 0.5).to(dtype)
    zero = (-8 * s + torch.randn(4, 3, generator=g)).to(dtype)

    def decode_int4(codes, low, high, offset):
        both = (codes & 15) * 2.0**-133 * low, (codes >> 4 << 4) * 2.0**-133 * high
        return [(n.double() + offset.double()).to(BF16) for n in both]

    numbers = {"float32": FP32, "bfloat16": BF16, "int16": torch.int16}
    gl = SimpleNamespace(
        **numbers,
        expand_dims=torch.unsqueeze,
        fma=lambda a, b, c: (a.double() * b.double() + c.double()).to(BF16),
        full=lambda shape, *_: torch.zeros(shape),
    )
    names = "INT4_LOW INT4_HIGH INT4_ONE INT4_LOW_BITS INT4_HIGH_BITS INT4_OFFSET_BITS"
    values = {name: getattr(sm90_decode, name).value for name in names.split()}

    def constant(like, bits):
        one = torch.tensor(bits if bits < 1 << 15 else bits - 65536, dtype=torch.int16)
        return one.view(BF16).expand(like.shape)

    over_group = sm90_decode.over_group.fn
    parts = {"gl": gl, "constant": constant, "decode_int4": decode_int4, "over_group": over_group}
    s.__dict__["type"] = SimpleNamespace(layout=None)
    with mock.patch.multiple(sm90_decode, **parts, **values):
        found = sm90_decode.decode_int4_weights.fn(
            codes | codes.flip(2) << 4, s, zero, "minimum", True
        )
    for w, n in zip(found, (codes, codes.flip(2)), strict=True):
        s64, m64 = s.double()[:, :, None], zero.double()[:, :, None]
        want = n * s64 + m64
        off = (w.double() * 2.0**64 - want).abs()
        half_a_step = 2.0 ** (want.abs().log2().floor() - 8)
        most = 0 if dtype == BF16 else 2.0**-9 * (8 * 2 + (m64 + 8 * s64).abs())
        assert (off <= half_a_step * 1.001 + most).all()


@pytest.mark.parametrize("high", [1, 2])
def test_planes_in_the_order_of_columns(high):
    """Beside high bits of other runs: less their middle, and rounded once with a minimum."""
    assembly = sm90_packed.plane_assembly(high, 8 << high), sm90_packed.plane_assembly(high, 0)
    g = torch.Generator().manual_seed(0)
    for low, above in zip(words(64), reversed(words(64)), strict=True):
        places = [8 * (i // 2) + high * (i % 2) for i in range(8)]
        bits = [above >> place & 2**high - 1 for place in places]
        codes = [(low >> 4 * i & 15) + 16 * bits[i] for i in range(8)]
        found = execute(assembly[0], "=r,=r,=r,=r,r,r", low, above)
        assert [n for one in found for n in halves(one)] == [n - (8 << high) for n in codes]
        s, m = torch.rand(1, generator=g) + 0.5, torch.randn(1, generator=g) * 8
        operands = [register(float(n)) for n in (s, m - 128 * s)]
        found = execute(assembly[1], "=r,=r,=r,=r,r,r,r,r", low, above, *operands)
        assert_rounded_once([n for one in found for n in halves(one)], codes, s, m)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_int8_times_scales_of_groups(dtype):
    """The kernel's own steps: rounded once, whatever the dtype of scales."""
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (8, 2, 32), generator=g).to(BF16)
    s = ((torch.rand(8, 2, generator=g) + 0.5) * 0.01).to(dtype)

    def fma(a, b, c):
        return (a.double() * b.double() + c.double()).to(BF16)

    gl = SimpleNamespace(float32=FP32, bfloat16=BF16, expand_dims=torch.unsqueeze, fma=fma)
    over_group = sm90_decode.over_group.fn
    with mock.patch.multiple(sm90_decode, gl=gl, over_group=over_group):
        found = sm90_decode.times_scales.fn(codes, s).double()
    want = codes.double() * s.double()[:, :, None]
    half_a_step = 2.0 ** (want.abs().clamp(min=1e-9).log2().floor() - 8)
    assert ((found - want).abs() <= half_a_step * 1.01).all()
    assert (found == want.to(BF16)).double().mean() > 0.99


@pytest.mark.parametrize("high", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 0.0123, -3.7])
def test_planes(high, scale):
    """Beside high bits of other runs, rounded once, as (code - middle) * scale."""
    assembly, middle = sm90_decode.planes_assembly(high), 8 << high
    one, s = sm90_decode.INT4_ONE.value, torch.tensor(scale, dtype=BF16)
    numbers = in_pairs(s * sm90_decode.INT4_LOW.value, s * (-middle * one))
    constraints = "=&r,=&r,=&r,=&r" + 10 * ",r"
    for low, above in zip(words(64), reversed(words(64)), strict=True):
        for place in range(0, 8, 2 * high):
            at = [(8 * byte, n) for n in (0, 1) for byte in (0, 2, 1, 3)]  # even columns first
            codes = [
                (low >> bit + 4 * n & 15) | (above >> bit + place + high * n & 2**high - 1) << 4
                for bit, n in at
            ]
            found = execute(assembly, constraints, low, above, *numbers, *[place] * 4)
            expected = (torch.tensor(codes).double() - middle) * s.double() * one
            assert [n for word in found for n in halves(word)] == expected.to(BF16).tolist()


@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("name, group", [("int5", 32), ("int6", 16)])
def test_planes_of_a_chunk(name, group, minimum):
    """The kernel's own steps, on codes that `pack` has put in planes: each has its high bits, its
    group's scale and minimum."""
    form, g, one = ELEMENT_FORMATS[name], torch.Generator().manual_seed(0), 2.0**-64
    K, high, rows = 128, form.high_bits, 4
    middle = 8 << high
    codes = torch.randint(0, 2**form.bits, (rows, K), generator=g, dtype=torch.uint8)
    data = pack(codes, form)
    low, above = data[:, : K // 2].view(rows, K // group, group // 2), data[:, K // 2 :]
    s = torch.rand(rows, K // group, generator=g) + 0.5
    zero = (-middle * s + torch.randn(s.shape, generator=g)).to(FP32)

    def decode_planes(low, above, place, scale, offset, form):
        bits = above.int() >> place
        both = [(low >> 4 * n & 15).int() | (bits >> high * n & 2**high - 1) << 4 for n in (0, 1)]
        return [(c * 2.0**-133 * scale.double() + offset.double()).to(BF16) for c in both]

    gl = SimpleNamespace(
        **{"float32": FP32, "bfloat16": BF16, "int16": torch.int16},
        expand_dims=torch.unsqueeze,
        convert_layout=lambda t, *_, **__: t,
        SliceLayout=lambda *_: None,
        arange=lambda start, end, _: torch.arange(start, end),
        fma=lambda a, b, c: (a.double() * b.double() + c.double()).to(BF16),
        full=lambda shape, *_: torch.zeros(shape),
    )
    names = "INT4_LOW INT4_ONE INT4_LOW_BITS"
    values = {n: getattr(sm90_decode, n).value for n in names.split()}
    parts = {
        "constant": lambda like, bits: (
            torch.tensor(bits, dtype=torch.int16).view(BF16).expand(like.shape)
        ),
        "over_group": sm90_decode.over_group.fn,
        "grouped_layout": lambda *_: None,
    }
    for tensor in (s, low):
        tensor.__dict__["type"] = SimpleNamespace(layout=None)
    with mock.patch.multiple(sm90_decode, gl=gl, decode_planes=decode_planes, **parts, **values):
        found = sm90_decode.decode_plane_weights.fn(low, above, s, zero, 4, name, minimum)
    w = torch.stack([each.flatten(1) for each in found], -1).flatten(1).double() / one
    by_column = [each.double().repeat_interleave(group, 1) for each in (s, zero)]
    want = codes * by_column[0] + by_column[1]
    if not minimum:
        want = (codes.double() - middle) * by_column[0]
    # a scale and a weight are rounded to bf16, and a minimum of codes less their middle
    most = 2.0**-8 * ((codes.double() - middle).abs() * by_column[0] + want.abs() + 8)
    assert ((w - want).abs() <= most).all()


def test_int4_rounded_to_e4m3():
    """With every scale, also below e4m3's least normal number, times 2^-64."""
    most = E4M3.index(56.0)
    one = sm90_decode.INT4_ONE.value
    above = [
        torch.tensor(bits.value, dtype=torch.int16).view(BF16)
        for bits in (
            sm90_decode.INT4_LOW_ABOVE_BITS,
            sm90_decode.INT4_HIGH_ABOVE_BITS,
            sm90_decode.INT4_OFFSET_ABOVE_BITS,
        )
    ]
    for code in [*range(most + 1), *range(128, 129 + most)]:
        s = torch.tensor(scale_above(code)).to(torch.int16).view(BF16)
        numbers = in_pairs(*(s * n for n in above))
        for word in (0x76543210, 0xFEDCBA98, 0x89ABCDEF, 0x01234567):
            found = run("decode_int4_e4m3", word, *numbers, source=SOURCE)
            products = [(n - 8) * E4M3[code] for n in nibbles(word)]
            expected = oracle.e4m3(torch.tensor(products).double()) * one
            assert found == expected.tolist()


PRODUCTS = sm90_wgmma._products().tolist()  # of each scale, four words


def products(word: int, scale: int) -> torch.Tensor:
    """(2, 8) e4m3 numbers of a word of int4 with this e4m3 scale: those that are not negative,
    and magnitudes of the others."""
    table = [t & 0xFFFFFFFF for t in PRODUCTS[scale] for _ in range(4)]
    found = run_registers("look_up_products", word, *table, source=SOURCE)
    codes = [b for register in found for b in register.to_bytes(4, "little")]
    return torch.tensor([E4M3[b] for b in codes]).double().view(2, 8)


def test_int4_as_products_in_e4m3():
    """With all magnitudes of scales up to 56, the largest. The sign is that of a group's sums."""
    most = E4M3.index(56.0)
    for code in [*range(most + 1), *range(128, 129 + most)]:
        for word in (0x76543210, 0xFEDCBA98, 0x89ABCDEF, 0x01234567):
            signed = torch.tensor([(word >> 4 * i & 15) - 8 for i in range(8)]).double()
            expected = oracle.e4m3(signed * abs(E4M3[code]))
            found = products(word, code)
            assert torch.equal(found, torch.stack([expected.clamp(min=0), -expected.clamp(max=0)]))
        (sign,) = run_registers("sign_of", code, source=SOURCE)
        assert sign == (0xBF800000 if code >= 128 else 0x3F800000)
    assert products(0xFFFFFFFF, 0x7F)[0].isnan().all()


@pytest.mark.parametrize("exponent", [-93, 0, 32])
def test_e2m1(exponent):
    scale = (127 + exponent) * 0x00800080 + 0x2F002F00  # as `scale_bf16x2` has it
    factor = 2.0**-126 * halves(scale)[0]
    for word in words(64):
        found = run("decode_e2m1", word, scale, scale, source=SOURCE)
        assert found == [E2M1[n] * factor for n in nibbles(word)]


def in_words(words: list[int]) -> list[int]:
    """Words of e2m1 as `moe_ops.prepare` lays them out for these kernels."""
    signed = torch.tensor([w - (w >> 31 << 32) for w in words], dtype=torch.int32)
    prepared = to_words(signed.view(torch.uint8).reshape(1, 1, -1))
    return [w & 0xFFFFFFFF for w in prepared.view(torch.int32).flatten().tolist()]


@pytest.mark.parametrize("exponent", [-93, 0, 32])
def test_e2m1_words(exponent):
    """Prepared words decode to what natural ones do, in the same order."""
    scale = (127 + exponent) * 0x00800080 + 0x2F002F00
    factor = 2.0**-126 * halves(scale)[0]
    natural = words(64)
    for word, ready in zip(natural, in_words(natural), strict=True):
        found = run("decode_e2m1_words", ready, scale, scale, source=SOURCE)
        assert found == [E2M1[n] * factor for n in nibbles(word)]


def test_words_take_every_bit_to_a_place_of_its_own():
    bits = in_words([1 << i for i in range(32)])
    assert sorted(bits) == [1 << i for i in range(32)]
    q = torch.randint(0, 256, (3, 5, 64), dtype=torch.uint8)
    assert torch.equal(from_words(to_words(q)), q) and torch.equal(to_words(from_words(q)), q)
    assert torch.equal(to_words(q)[1], to_words(q[1]))
    assert torch.equal(to_words(q.mT.contiguous().mT), to_words(q))


def in_order(word: int) -> list[int]:
    data = word.to_bytes(4, "little")
    return [data[i] for i in (0, 2, 1, 3)]


def test_int8():
    for word in words(64):
        expected = [b - 256 if b > 127 else b for b in in_order(word)]
        assert run("decode_int8", word, source=SOURCE) == expected


def test_e4m3():
    for word in words(64):
        found = run("decode_e4m3", word, source=SOURCE)
        pairs = zip(found, [E4M3[b] for b in in_order(word)], strict=True)
        assert all(value == expected or expected != expected for value, expected in pairs)


@pytest.mark.parametrize("U", [64, 128])
@pytest.mark.parametrize("bits", [(4, 16), (2, 16), (8, 16), (4, 8)])
def test_order_of_columns_is_a_permutation(U, bits):
    places = torch.arange(U)
    columns = columns_at(U, *bits)
    assert sorted(columns.tolist()) == places.tolist()
    with mock.patch.object(tl, "static_range", range):
        assert torch.equal(
            permutation.permuted_column.fn(columns, permutation.permutation_bits(U, *bits)), places
        )


@pytest.mark.parametrize("U", [64, 128])
@pytest.mark.parametrize("gated, interleaved", [(False, False), (True, False), (True, True)])
def test_product_of_a_piece(U, gated, interleaved):
    """Bytes of a tile through the kernel's own steps, times activations in that order."""
    WN, tokens = 64, 8
    g = torch.Generator().manual_seed(U)
    codes = torch.randint(0, 16, (WN, U), generator=g)
    x = torch.randint(-4, 5, (tokens, U), generator=g).double()
    tile = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    with mock.patch.object(sm90_decode.gl, "convert_layout", lambda t, layout, assert_trivial: t):
        p = sm90_decode.permute_rows.fn(tile, gated, interleaved).contiguous()
        numbers = in_pairs(*INT4_NUMBERS)
        found = [
            run("decode_int4", word & 0xFFFFFFFF, *numbers, source=SOURCE)
            for word in p.view(torch.int32).flatten().tolist()
        ]
        pairs = torch.tensor(found, dtype=torch.float64).view(WN, U // 8, 2, 4)
        even, odd = [
            sm90_decode.fragment.fn(pairs[:, :, i].reshape(WN, U // 2), None) for i in (0, 1)
        ]
    arranged = x[:, columns_at(U, 4)]
    product = even @ arranged[:, : U // 2].T + odd @ arranged[:, U // 2 :].T
    r = torch.arange(WN)
    i, up = r // 16 * 8 + r % 8, r // 8 % 2
    row = (2 * i + up if interleaved else i + WN // 2 * up) if gated else r
    assert torch.equal(product * sm90_mainloop.INT4_SHIFT.value, (codes[row] - 8).double() @ x.T)


def test_product_of_a_piece_in_e4m3():
    """x meets the weights that are not negative, -x the magnitudes of the others."""
    WN, U, tokens = 16, 128, 8
    g = torch.Generator().manual_seed(U)
    codes = torch.randint(0, 16, (WN, U), generator=g)
    x = torch.randint(-4, 5, (tokens, U), generator=g).double()
    tile = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int32)
    found = [products(w & 0xFFFFFFFF, E4M3.index(1.0)) for w in tile.flatten().tolist()]
    signs = torch.stack(found).view(WN, U // 8, 2, 2, 4)  # words, signs, halves of a word
    with (
        mock.patch.object(sm90_decode.gl, "convert_layout", lambda t, layout, assert_trivial: t),
        mock.patch.object(sm90_decode.gl, "join", lambda a, b: torch.stack([a, b], -1)),
        mock.patch.object(torch.Tensor, "to", lambda t, _, bitcast: t),
    ):
        positive, negative = [
            sm90_decode.fragment_e4m3.fn(
                *[signs[:, :, sign, half].reshape(WN, 1, U // 2) for half in (0, 1)], None
            )
            for sign in (0, 1)
        ]
    arranged = x[:, columns_at(U, 4, 8)]
    product = positive @ arranged.T + negative @ -arranged.T
    assert torch.equal(product, (codes - 8).double() @ x.T)


def test_product_of_a_piece_of_8_bits():
    WN, U, tokens = 64, 64, 8
    g = torch.Generator().manual_seed(U)
    codes = torch.randint(-128, 128, (WN, U), generator=g)
    x = torch.randint(-4, 5, (tokens, U), generator=g).double()
    data = codes.to(torch.int8).view(torch.int32).flatten().tolist()
    found = [run("decode_int8", word & 0xFFFFFFFF, source=SOURCE) for word in data]
    values = torch.tensor(found, dtype=torch.float64).view(WN, U)
    with mock.patch.object(sm90_decode.gl, "convert_layout", lambda t, layout, assert_trivial: t):
        weights = sm90_decode.fragment.fn(values, None)
    assert torch.equal(weights @ x[:, columns_at(U, 8)].T, codes.double() @ x.T)


@pytest.mark.parametrize("gated, interleaved", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("WN, warps", [(64, 4), (128, 4), (128, 8)])
def test_threads_hold_rows_in_the_products_order(gated, interleaved, WN, warps):
    """`weight_layout` names the rows of memory that `permute_rows` puts where a thread's rows of
    the accumulator are."""
    rows = torch.arange(WN)[:, None].expand(WN, 64)
    ordered = sm90_decode.permute_rows.fn(rows, gated, interleaved)[:, 0].tolist()
    found, expected = [
        sm90_decode.weight_layout(WN, 64, warps, *kind)
        for kind in ((gated, interleaved), (False,) * 2)
    ]
    for name in ("reg_bases", "lane_bases", "warp_bases"):
        bases = zip(getattr(found, name), getattr(expected, name), strict=True)
        for (row, byte), (place, same) in bases:
            assert (row, byte) == (ordered[place], same)


@pytest.mark.parametrize("gated, interleaved", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("WN, warps", [(64, 4), (128, 4), (128, 8)])
@pytest.mark.parametrize("G", [16, 32])
def test_threads_hold_scales_of_what_they_decode(gated, interleaved, WN, warps, G):
    """`scale_layout` names the row and the quarter of a piece that `weight_layout` does."""
    R = sm90_decode.scale_rows(G)
    row, quarter = torch.arange(WN)[:, None], torch.arange(4)
    numbers = torch.zeros(WN // R, 4 * R, dtype=torch.int64)
    numbers[row // R, quarter // 2 * 2 * R + row % R * 2 + quarter % 2] = row * 4 + quarter
    assert torch.equal(sm90_decode.scales_by_row.fn(numbers, G), row * 4 + quarter)
    how = (WN, warps, gated, interleaved)
    found = sm90_decode.scale_layout(WN, G, *how[1:])
    weights = sm90_decode.weight_layout(WN, 64, *how[1:])
    for name in ("reg_bases", "lane_bases", "warp_bases"):
        places = [tuple(base) for base in getattr(found, name)]
        expected = [
            row * 4 + byte // 16
            for row, byte in getattr(weights, name)
            if byte not in (1, 2, 4, 8)
        ]
        assert [numbers[place].item() for place in places] == expected
