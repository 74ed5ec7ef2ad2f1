"""Slices, views and gathers of quantized weights carry their scales."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops.schemes import PER_BLOCK, SCHEMES
from moe_ops.tensors import (
    Float8ExpertTensor,
)
from tests.tensors.test_e4m3 import QUANTIZED, E, N, make, sample, schemes


@functools.cache
def shared(scheme):
    """One tensor for all examples of a property, ragged in both dimensions."""
    return make(scheme, 3, 140, 150)


@pytest.mark.parametrize("scheme", QUANTIZED)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_slices_carry_their_scales(scheme, data):
    q = shared(scheme)
    transposed = data.draw(st.booleans())
    view, want = (q.mT, q.dequantize().mT) if transposed else (q, q.dequantize())
    block = SCHEMES[scheme].weight.group == PER_BLOCK
    key = [data.draw(st.one_of(st.integers(-3, 2), st.slices(3)))]
    for size in want.shape[1:]:
        start = (
            data.draw(st.integers(0, size // 128)) * 128
            if block
            else data.draw(st.integers(-9, 9))
        )
        key.append(slice(start, data.draw(st.one_of(st.none(), st.integers(-160, 160)))))
    if key[0] != slice(None) and isinstance(key[0], slice):
        key[0] = slice(key[0].start, key[0].stop, abs(key[0].step or 1))
    key = tuple(key[: data.draw(st.integers(1, 3))])
    got = view[key]
    assert isinstance(got, Float8ExpertTensor) and got.scheme == scheme
    assert got.shape == want[key].shape and torch.equal(got.dequantize(), want[key])
    assert torch.equal(got.mT.dequantize(), want[key].mT)
    with torch.inference_mode():
        assert torch.equal(view[key].dequantize(), want[key])


@schemes
def test_views_and_gathers(scheme):
    q = make(scheme)
    want = q.dequantize()
    ids = torch.tensor([2, 0, 2])
    mask = torch.tensor([True, False, True])
    pairs = [
        (q[1], want[1]),
        (q[-1], want[-1]),
        (q[..., :128], want[..., :128]),
        (q[0, ..., 128:], want[0, ..., 128:]),
        (q[torch.tensor(2)], want[2]),
        (q[ids], want[ids]),
        (q[[2, 1]], want[[2, 1]]),
        (q[mask], want[mask]),
        (q[ids, 128:], want[ids, 128:]),
        (q[torch.tensor(1), 128:], want[1, 128:]),
        (q.index_select(0, ids), want[ids]),
        (q.select(0, 1), want[1]),
        (q.narrow(1, 128, 100), want[:, 128:228]),
        (torch.narrow(q, 0, 1, 2), want[1:]),
        (q.transpose(1, 2), want.transpose(1, 2)),
        (q.transpose(dim0=-1, dim1=-2)[1], want[1].t()),
        (q[1].t(), want[1].t()),
        (q[1].T, want[1].T),
        (q.mT.mT, want),
        (q.mT[1, :128], want.mT[1, :128]),
        (q.mT.contiguous(), want.mT),
    ]
    pairs += list(zip(q, want, strict=True))
    pairs += list(zip(q.unbind(), want.unbind(), strict=True))
    pairs += list(zip(q.chunk(2, dim=1), want.chunk(2, dim=1), strict=True))
    pairs += list(zip(q.split(2), want.split(2), strict=True))
    pairs += list(zip(q.split([128, 172], 2), want.split([128, 172], 2), strict=True))
    for got, expected in pairs:
        assert isinstance(got, Float8ExpertTensor)
        assert got.shape == expected.shape and torch.equal(got.dequantize(), expected)
    assert q.mT.weight_layout == "transposed" and q.mT.mT.weight_layout == ""
    assert q.mT.mT.is_contiguous() and q.mT.stride() == want.mT.stride()
    assert q[1:].qdata.data_ptr() == q.qdata[1:].data_ptr()  # a view, no copy
    with torch.inference_mode():
        assert torch.equal(q.chunk(2, 1)[1].mT[2].dequantize(), want[2, 128:].t())
        assert torch.equal(q.index_select(0, ids).dequantize(), want[ids])


@schemes
def test_empty_slices(scheme):
    """They may begin anywhere: no scale belongs to them."""
    q = make(scheme)
    want = q.dequantize()
    for key in (
        (slice(None), slice(200, 200)),
        (slice(None), slice(None), slice(200, 100)),
        (slice(None), slice(200, 130, 2)),
        (0, slice(-5, -5), slice(300, None)),
        (slice(2, 1), slice(128, None)),
    ):
        for got, expected in ((q[key], want[key]), (q.mT[key], want.mT[key])):
            assert got.shape == expected.shape and got.dequantize().shape == expected.shape
            shape = (got.mT if got.weight_layout else got).shape
            scale = got.mT.scale if got.weight_layout else got.scale
            if len(shape) == 3:
                assert scale.shape == SCHEMES[scheme].batched_scale_shape(*shape)


def test_views_refuse_what_would_lose_scales():
    q = make("fp8_block")
    for bad in (
        lambda: q[:, 5:],
        lambda: q[:, :, ::2],
        lambda: q.mT[:, 64:],
        lambda: q.chunk(3, 2),
    ):
        with pytest.raises(ValueError, match="must start at a multiple of 128"):
            bad()
    for bad in (
        lambda: q[:, 1],
        lambda: q[1][1],
        lambda: q[:, torch.tensor([1])],
        lambda: q.unbind(1),
        lambda: q.index_select(1, torch.tensor([1])),
    ):
        with pytest.raises(ValueError, match="along the expert dimension 0"):
            bad()
    with pytest.raises(ValueError, match="last two dimensions"):
        q.transpose(0, 1)
    with pytest.raises(ValueError, match="0-D or 1-D"):
        q[torch.zeros(1, 1, dtype=torch.long)]
    with pytest.raises(ValueError, match="must not be None"):
        q[None]
    with pytest.raises(IndexError):
        q[3]
    with pytest.raises(IndexError):
        q.narrow(3, 0, 1)
    with pytest.raises(NotImplementedError, match=r"aten.add.*dequantize\(\)"):
        q + 1
    channel = make("fp8_channel")
    assert torch.equal(channel[:, 5::2, 7:].dequantize(), channel.dequantize()[:, 5::2, 7:])


def test_views_compile():
    q = make("fp8_block", E, N, N)

    def run(x, w, i):
        a = x @ w.mT[0, :, 128:] + F.linear(x, w.chunk(2, 1)[1].narrow(0, 1, 2)[1])
        return a + torch.bmm(x.expand(2, -1, -1), w[i].transpose(1, 2)).sum(0)[:, :128]

    x, i = sample(3, N), torch.tensor([2, 0])
    want = run(x, q.dequantize(), i)
    assert torch.equal(run(x, q, i), want)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x, q, i), want)
