"""Quantized weights whose elements share bytes or carry more than one scale: int8, int4, MX and
NVFP4 tensors.

What holds for every format alike is tested with e4m3 in tests/tensors/test_e4m3.py; here are
views, moves, files and errors of the others, against the fp64 values of tests/support/oracle.py.
"""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_ops
from moe_ops.numerics import weights
from moe_ops.ops import relayout as relayout_module
from moe_ops.schemes import SCHEMES, get_scheme
from moe_ops.tensors import (
    ExpertTensor,
    Int4ExpertTensor,
    Int8ExpertTensor,
    LevelsExpertTensor,
    MXExpertTensor,
    NVFP4ExpertTensor,
    PackedIntExpertTensor,
    check_quantizable,
    flatten,
    from_quantized,
    prepare,
    quantize,
    unflatten,
)
from tests.support import oracle
from tests.tensors.test_e4m3 import same, sample
from tests.tensors.test_storage import Experts

CLASSES = {
    "int8_w8a8": Int8ExpertTensor,
    "int8_w8a16:g64:zp": Int8ExpertTensor,
    "int4_w4a16:g32": Int4ExpertTensor,
    "int4_w4a16:channel:zp": Int4ExpertTensor,
    "int4_w4a16:g128:zp": Int4ExpertTensor,
    "int8_w8a16:g128:min": Int8ExpertTensor,
    "int4_w4a16:g64:min": Int4ExpertTensor,
    "int4_w4a16:g32:super:min": Int4ExpertTensor,
    "int6_w6a16:g16:super": PackedIntExpertTensor,
    "iq4_w4a16:g32:super": LevelsExpertTensor,
    "int4_w4a8": Int4ExpertTensor,
    "mxfp4_w4a16": MXExpertTensor,
    "mxfp6_e3m2": MXExpertTensor,
    "mxfp8": MXExpertTensor,
    "nvfp4": NVFP4ExpertTensor,
}
E, N, K = 3, 12, 512
schemes = pytest.mark.parametrize("scheme", CLASSES)


def make(scheme, *shape, **kwargs):
    return quantize(sample(*(shape or (E, N, K)), **kwargs), scheme)


def group_of(scheme) -> int:
    """Slices along K begin and end at multiples of it."""
    desc = get_scheme(scheme).weight
    return max(256 if ":super" in scheme else desc.group.cols, 2 if desc.format.bits == 4 else 1)


@schemes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantize_keeps_the_values(scheme, dtype):
    weight = sample(E, N, K, dtype=dtype)
    q = quantize(weight, scheme)
    assert type(q) is CLASSES[scheme] and isinstance(q, ExpertTensor) and q.scheme == scheme
    assert q.shape == weight.shape and q.stride() == weight.stride() and q.is_contiguous()
    assert q.dtype == dtype and q.device == weight.device and not q.requires_grad
    shapes = SCHEMES[scheme].scale_shapes(E, N, K)
    for name, shape in shapes.items():
        got = getattr(q, name)
        assert (got is None) == (shape is None) and (got is None or tuple(got.shape) == shape)
    scale_dtype = SCHEMES[scheme].weight.scale_dtype
    stored = {None: dtype, torch.float8_e8m0fnu: torch.uint8}.get(scale_dtype, scale_dtype)
    assert q.scale.dtype == stored
    want = oracle.weight(q)
    # the sum with a minimum is rounded beside what it may cancel
    atol = 2e-7 * float(weight.abs().max()) if scheme.endswith(":min") else 0
    torch.testing.assert_close(q.dequantize(torch.float32).double(), want, rtol=2e-7, atol=atol)
    assert torch.equal(q.dequantize(), q.dequantize(torch.float32).to(dtype))
    bits = SCHEMES[scheme].weight.format.bits
    assert oracle.relative_error(q.dequantize(), weight) < {8: 0.03, 6: 0.06, 4: 0.14}[bits]


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name])
def test_every_scheme_makes_and_takes_back_a_weight(scheme):
    static = {"activation_scale": 0.25} if scheme.endswith("_static") else {}
    q = quantize(sample(2, 3, 256), scheme, **static)
    names = [n for n in q.__tensor_flatten__()[0] if n not in ("qdata", "scale")]
    more = {name: getattr(q, name) for name in names}
    again = from_quantized(scheme, q.qdata, q.scale, **more)
    assert same(q, again) and again.qdata.data_ptr() == q.qdata.data_ptr()
    assert repr(scheme) in repr(q)
    on_meta = quantize(torch.empty(2, 3, 256, device="meta"), scheme, **static)
    assert on_meta.shape == (2, 3, 256) and on_meta.scale.shape == q.scale.shape
    with FakeTensorMode() as mode:  # traced: nothing is known of values
        parts = {n: mode.from_tensor(getattr(q, n)) for n in q.__tensor_flatten__()[0]}
        traced = from_quantized(scheme, **parts)
    assert traced.shape == q.shape and traced.scheme == q.scheme


@schemes
def test_experts_are_quantized_a_few_at_a_time(scheme, monkeypatch):
    whole = make(scheme, 5, N, K)
    monkeypatch.setattr(weights, "_AT_ONCE", 2 * N * K)
    assert same(make(scheme, 5, N, K), whole)


def test_other_views_of_the_same_bytes_are_taken():
    q = make("mxfp4_w4a16")
    for qdata in (q.qdata, q.qdata.view(torch.float4_e2m1fn_x2)):
        for scale in (q.scale, q.scale.view(torch.float8_e8m0fnu)):
            assert same(from_quantized("mxfp4_w4a16", qdata, scale), q)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        i = make("int4_w4a16:g32")
        got = from_quantized("int4_w4a16:g32", i.qdata, i.scale.to(dtype))
        assert got.scale.dtype == dtype and got.dtype == torch.bfloat16


def test_a_zero_point_chooses_the_variant():
    q = make("int4_w4a16:g32:zp")
    for name in ("int4_w4a16:g32", "int4_w4a16:g32:zp"):
        got = from_quantized(name, q.qdata, q.scale, zero_point=q.zero_point)
        assert got.scheme == "int4_w4a16:g32:zp" and torch.equal(got.dequantize(), q.dequantize())
    without = from_quantized("int4_w4a16:g32", q.qdata, q.scale)
    assert without.zero_point is None
    eight = from_quantized(
        "int4_w4a16:g32", q.qdata, q.scale, zero_point=torch.full_like(q.zero_point, 8)
    )
    assert torch.equal(without.dequantize(), eight.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
def test_minima_choose_the_variant(bits):
    """Codes that count from 0: the minimum is the value of the least, a step is a scale."""
    codes = torch.arange(2**bits, dtype=torch.uint8).repeat(2, 3, 1)
    qdata = (
        codes[..., ::2] | codes[..., 1::2] << 4 if bits == 4 else (codes ^ 128).view(torch.int8)
    )
    scale = torch.tensor([0.5, -0.25, 2.0]).bfloat16().view(1, 3, 1).repeat(2, 1, 1)
    minimum = torch.tensor([1.5, 100.0, -7.0]).bfloat16().view(1, 3, 1).repeat(2, 1, 1)
    got = from_quantized(f"int{bits}_w{bits}a16:channel", qdata, scale, zero_point=minimum)
    assert got.scheme == f"int{bits}_w{bits}a16:channel:min"
    want = codes.double() * scale.double() + minimum.double()
    assert torch.equal(got.dequantize(torch.float32).double(), want)


@pytest.mark.parametrize("scheme", ["int4_w4a16:g64", "int8_w8a16:g64"])
def test_minima_keep_weights_on_one_side_of_zero(scheme):
    """Weights far from zero, of which symmetric elements and zero points lose most."""
    weight = sample(2, 4, 128, dtype=torch.float32) + 100
    spread = weight - 100
    errors = [
        oracle.relative_error(quantize(weight, f"{scheme}{variant}").dequantize() - 100, spread)
        for variant in (":min", ":zp")
    ]
    assert errors[0] < (0.1 if "int4" in scheme else 6e-3) < errors[1]


# --- errors --------------------------------------------------------------------------------------

W = sample(2, 3, 96)
I4 = quantize(W, "int4_w4a16:g32:zp")
MX = quantize(W, "mxfp4_w4a16")
NV = quantize(W, "nvfp4")
W4A8 = quantize(sample(2, 3, 128), "int4_w4a8")
Q4_K = quantize(sample(2, 3, 256), "q4_k")
ONE_NAN = torch.zeros(2, 3, 3, dtype=torch.uint8)
ONE_NAN[1, 0, 0] = 255
BAD = {
    "weight of shape .* its 96 columns must be a multiple of 128, .*'int4_w4a16:channel' and "
    "'int4_w4a16:g32' take it": (lambda: quantize(W, "int4_w4a16")),
    "its 40 columns must be a multiple of 32": lambda: quantize(W[..., :40], "mxfp4"),
    "its 41 columns must be even": lambda: quantize(W[..., :41], "int4_w4a16:channel"),
    "weight must be a plain tensor": lambda: quantize(NV, "nvfp4"),
    r"weight must be finite.*experts \[0\]": lambda: quantize(
        torch.cat((W[:1] / 0, W[1:])), "mxfp4"
    ),
    "activation_scale must be given": lambda: quantize(W, "int8_w8a8_static"),
    "activation_scale must be None": lambda: quantize(W, "int8_w8a8", activation_scale=1.0),
    "activation_scale must be positive and finite, got nan": lambda: quantize(
        W, "nvfp4", activation_scale=float("nan")
    ),
    "qdata must be torch.uint8 for scheme 'mxfp4'.*viewed": lambda: from_quantized(
        "mxfp4", MX.qdata.view(torch.int8), MX.scale
    ),
    "qdata must hold whole elements": lambda: from_quantized(
        "mxfp6_e3m2", MX.qdata[..., :47], MX.scale
    ),
    r"qdata \(counted in elements\) of shape \(2, 3, 80\)": lambda: from_quantized(
        "mxfp4", MX.qdata[..., :40], MX.scale
    ),
    r"scale must have shape \(2, 3, 3\)": lambda: from_quantized(
        "mxfp4", MX.qdata, MX.scale[..., :2]
    ),
    "scale must be torch.uint8, got torch.float32": lambda: from_quantized(
        "mxfp4", MX.qdata, MX.scale.float()
    ),
    r"scale must be finite, .*experts \[1\]": lambda: from_quantized("mxfp4", MX.qdata, ONE_NAN),
    r"scale must be at most 160 \(2\^33\) for e2m1 elements, got 161": lambda: from_quantized(
        "mxfp4_w4a16", MX.qdata, torch.full_like(MX.scale, 161)
    ),
    r"weight must be at most 5.15396e\+10 for scheme 'mxfp4_w4a16'; scale it "
    r"down, got 6": lambda: quantize(torch.full_like(W, 6e10), "mxfp4_w4a16"),
    r"scale must be at most 2.8823e\+17 \(2\^58\) for int4 elements, got 5.76": lambda: (
        from_quantized("int4_w4a16:g32", I4.qdata, torch.full_like(I4.scale, -(2.0**59)))
    ),
    r"weight must be at most .* for scheme 'int4_w4a16:g32'; scale it down, got 3e\+18": lambda: (
        quantize(torch.full_like(W, 3e18, dtype=torch.float32), "int4_w4a16:g32")
    ),
    "scale must be torch.bfloat16 or torch.float16 or torch.float32": lambda: from_quantized(
        "int4_w4a16:g32", I4.qdata, I4.scale.double()
    ),
    "zero_point must be given": lambda: from_quantized("int4_w4a16:g32:zp", I4.qdata, I4.scale),
    "zero_point must be None: scheme 'mxfp4'": lambda: from_quantized(
        "mxfp4", MX.qdata, MX.scale, zero_point=MX.scale
    ),
    "zero_point must be torch.uint8, got torch.int8": lambda: from_quantized(
        "int4_w4a16:g32", I4.qdata, I4.scale, zero_point=I4.zero_point.view(torch.int8)
    ),
    r"minimum of a group, must have the dtype of scale, torch.bfloat16, got torch.float32": (
        lambda: from_quantized(
            "int4_w4a16:g32", I4.qdata, I4.scale.bfloat16(), zero_point=I4.scale.float()
        )
    ),
    r"zero_point must be finite, got NaN or Inf in experts \[0, 1\]": lambda: from_quantized(
        "int4_w4a16:g32", I4.qdata, I4.scale, zero_point=torch.full_like(I4.scale, torch.nan)
    ),
    r"zero_point must be in 0..15 for int4, got 16": lambda: from_quantized(
        "int4_w4a16:g32", I4.qdata, I4.scale, zero_point=torch.full_like(I4.zero_point, 16)
    ),
    "global_scale must be given for scheme 'nvfp4'": lambda: from_quantized(
        "nvfp4", NV.qdata, NV.scale
    ),
    r"global_scale must have shape \(2,\)": lambda: from_quantized(
        "nvfp4", NV.qdata, NV.scale, global_scale=torch.ones(())
    ),
    "global_scale must be positive, got 0": lambda: from_quantized(
        "nvfp4", NV.qdata, NV.scale, global_scale=torch.zeros(2)
    ),
    r"scale must be at most 56 \(448 / 8\).* eight times channel_scale .* got 60": lambda: (
        from_quantized(
            "int4_w4a8",
            W4A8.qdata,
            torch.full_like(W4A8.scale, -60.0),
            channel_scale=W4A8.channel_scale,
        )
    ),
    "channel_scale must be given": lambda: from_quantized("int4_w4a8", W4A8.qdata, W4A8.scale),
    "channel_scale must be None": lambda: from_quantized(
        "mxfp4", MX.qdata, MX.scale, channel_scale=torch.ones(2, 3, 1)
    ),
    **{
        message: lambda changed=changed: from_quantized(
            **{name: getattr(Q4_K, name) for name in ("scheme", *Q4_K.__tensor_flatten__()[0])}
            | changed
        )
        for message, changed in {
            "channel_scale must be torch.float16, got torch.float32": {
                "channel_scale": torch.ones(2, 3, 2)
            },
            r"channel_scale must have shape \(2, 3, 2\) for .*super:min'": {
                "channel_scale": Q4_K.channel_scale[..., :1]
            },
            r"channel_scale must be finite, got NaN or Inf in experts \[0, 1\]": {
                "channel_scale": torch.full_like(Q4_K.channel_scale, torch.inf)
            },
            "scale must be torch.int8, got torch.float16": {"scale": Q4_K.scale.half()},
            "zero_point must be torch.int8, got torch.uint8": {
                "zero_point": Q4_K.zero_point.view(torch.uint8)
            },
        }.items()
    },
    "weight must be at most 4.15.*super:min'; scale it down, got 5e": lambda: quantize(
        torch.full((2, 3, 256), 5e6), "q4_k"
    ),
    "scale must be on the device of qdata": lambda: from_quantized(
        "mxfp4", MX.qdata, MX.scale.to("meta")
    ),
    "'int8_w8a16:g32:zp' that differs": lambda: quantize(
        W, moe_ops.QuantScheme("int8_w8a16:g32:zp", SCHEMES["mxfp4"].weight, None)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_the_argument_and_the_remedy(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


def test_check_quantizable_says_it_before_anything_is_quantized():
    check_quantizable("w", W, "mxfp4")
    with pytest.raises(ValueError, match="^w of shape .* multiple of 128"):
        check_quantizable("w", W, "int4_w4a8")


def test_layers_refuse_weights_that_lack_their_scales():
    w13, w2 = make("nvfp4", 2, 64, 32), make("nvfp4", 2, 32, 32)
    args = torch.ones(1, 32), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)

    def run(w13, w2=w2):
        return moe_ops.fused_experts(args[0], w13, w2, *args[1:])

    run(w13)
    with pytest.raises(ValueError, match="w13's global_scale must have shape .*got None"):
        run(w13._replace(global_scale=None))
    with pytest.raises(ValueError, match=r"w13's scale must have shape \(2, 64, 2\)"):
        run(w13._replace(scale=w13.scale[..., :1]))
    with pytest.raises(
        ValueError, match="w13 must have its natural layout, got a transposed view"
    ):
        run(w13.mT, w2.mT)
    with pytest.raises(ValueError, match=r"w2 must have shape \(E, K, I\) = \(2, 32, 32\)"):
        run(w13, make("nvfp4", 2, 32, 64))
    run(w13, make("nvfp4_w4a16", 2, 32, 32))


# --- views ---------------------------------------------------------------------------------------


@schemes
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_slices_carry_their_scales(scheme, data):
    q, group = make(scheme), group_of(scheme)
    want, transposed = q.dequantize(), data.draw(st.booleans())
    ends = st.integers(0, K // group).map(lambda i: i * group)
    rows, columns = data.draw(st.slices(N)), slice(data.draw(ends), data.draw(ends))
    rows = slice(rows.start, rows.stop, abs(rows.step or 1))
    key = (data.draw(st.one_of(st.integers(-3, 2), st.just(slice(1, None)))), rows, columns)
    got, want = q[key], want[key]
    assert type(got) is type(q) and got.shape == want.shape
    assert torch.equal(got.dequantize(), want) and torch.equal(got.mT.dequantize(), want.mT)
    if transposed:
        key = (key[0], columns, rows)
        got, plain = q.mT[key], q.dequantize().mT[key]
        assert torch.equal(got.dequantize(), want.mT)
        # of one row or column any stride is right
        strides = zip(plain.shape, got.stride(), plain.stride(), strict=True)
        assert 0 in want.shape or all(size == 1 or a == b for size, a, b in strides)


@schemes
def test_views_and_gathers(scheme):
    q = make(scheme)
    want = q.dequantize()
    ids, group = torch.tensor([2, 0, 2]), max(group_of(scheme), 64)
    pairs = [
        (q[1], want[1]),
        (q[ids], want[ids]),
        (q[torch.tensor([True, False, True])], want[[0, 2]]),
        (q.index_select(0, ids), want[ids]),
        (q[..., :group], want[..., :group]),
        (q.narrow(2, group, group), want[..., group : 2 * group]),
        (q.narrow(1, 3, 5), want[:, 3:8]),
        (q.transpose(1, 2), want.transpose(1, 2)),
        (q[1].t(), want[1].t()),
        (q.mT.mT, want),
        (q.mT.contiguous(), want.mT),
        (q.mT[1, :group], want.mT[1, :group]),
        (q[1:].clone(), want[1:]),
    ]
    pairs += list(zip(q.unbind(), want.unbind(), strict=True))
    pairs += list(zip(q.chunk(2, dim=1), want.chunk(2, dim=1), strict=True))
    width = max(group, 128)
    pairs += list(zip(q.split(width, 2), want.split(width, 2), strict=True))
    for got, expected in pairs:
        assert type(got) is type(q)
        assert got.shape == expected.shape and torch.equal(got.dequantize(), expected)
    assert q.mT.stride() == want.mT.stride() and q[:, 2:].stride() == want[:, 2:].stride()
    assert q[1:].qdata.data_ptr() == q.qdata[1:].data_ptr()  # a view, no copy
    with torch.inference_mode():
        assert torch.equal(q.chunk(2, 1)[1].mT[2].dequantize(), want[2, 6:].t())


@pytest.mark.parametrize("scheme", ["int5_w5a16:g32", "int6_w6a16:g16"])
def test_views_of_columns_in_planes(scheme):
    w, unit = torch.randn(2, 4, 256), 128
    q = moe_ops.quantize(w, scheme)
    part = q[:, :, unit : 2 * unit]
    assert part.qdata.untyped_storage().data_ptr() == q.qdata.untyped_storage().data_ptr()
    assert torch.equal(part.dequantize(), q.dequantize()[:, :, unit : 2 * unit])
    with pytest.raises(ValueError, match=f"start at a multiple of {unit}, where bits of columns"):
        q[:, :, unit // 2 : unit + unit // 2]
    with pytest.raises(ValueError, match=f"columns of which {unit} lie together, as in the whole"):
        q[:, :, : unit // 2]


def test_views_refuse_to_cut_a_byte_or_a_group():
    for scheme, start, end in (
        ("int4_w4a16:channel", 1, 4),
        ("mxfp4_w4a16", 16, 64),
        ("nvfp4", 8, 32),
        ("int4_w4a16:g128", 64, 256),
        ("mxfp6_e2m3", 4, 32),
        ("int6_w6a16:g16:super", 128, 512),
    ):
        q = make(scheme)
        with pytest.raises(ValueError, match="must start at a multiple of"):
            q[:, :, start:end]
        with pytest.raises(ValueError, match="must end at a multiple of"):
            q[:, :, : end - 1 if scheme == "int4_w4a16:channel" else start]
        with pytest.raises(ValueError, match="with step 1"):
            q[:, :, ::2]
    eight = make("int8_w8a8")
    assert torch.equal(eight[:, 1::2, 3:9:2].dequantize(), eight.dequantize()[:, 1::2, 3:9:2])


@schemes
def test_products_dequantize_and_give_gradients(scheme):
    q = make(scheme, E, 16, 256, dtype=torch.float32)
    w = oracle.weight(q)
    x = sample(5, 256, dtype=torch.float32, seed=1).requires_grad_()
    x64 = x.detach().double()
    for got, want in (
        (F.linear(x, q[1]), x64 @ w[1].t()),
        (x @ q[1].t(), x64 @ w[1].t()),
        (torch.bmm(x.expand(E, 5, 256), q.mT), x64 @ w.mT),
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    (got,) = torch.autograd.grad(F.linear(x, q[1]).sum(), x)
    torch.testing.assert_close(got.double(), w[1].sum(0).expand(5, -1), rtol=1e-4, atol=1e-4)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    got = F.grouped_mm(x.detach().bfloat16(), q.bfloat16().mT, offs=ends)
    want = torch.cat([x64[:2] @ w[0].t(), x64[2:] @ w[2].t()])
    torch.testing.assert_close(got.double(), want, rtol=3e-2, atol=0.3)


# --- moves and files -----------------------------------------------------------------------------


@schemes
def test_moves_and_copies(scheme):
    q = make(scheme)
    assert same(q.clone(), q) and same(q.detach(), q) and same(copy.deepcopy(q), q)
    half = q.to(torch.float16)
    assert half.dtype == torch.float16 and half.scale.dtype == q.scale.dtype
    assert torch.equal(half.dequantize(torch.float32), q.dequantize(torch.float32))
    meta = q.to("meta")
    assert meta.shape == q.shape and all(
        getattr(meta, name).device.type == "meta" for name in meta.__tensor_flatten__()[0]
    )
    other = make(scheme, seed=1)
    target = q.clone()
    target.copy_(other)
    assert same(target, other)
    with pytest.raises(ValueError, match="quantized alike"):
        target.copy_(make("fp8_channel"))


@schemes
def test_torch_save_and_safetensors(scheme, tmp_path):
    first, second = Experts(make(scheme)), Experts(make(scheme, seed=1))
    file = io.BytesIO()
    torch.save({"state": first.state_dict(), "view": first.weight.mT[:2]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert same(loaded["view"], first.weight.mT[:2])
    second.load_state_dict(loaded["state"])
    assert same(second.weight.detach(), first.weight.detach())
    files = pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    tensors, metadata = flatten({"w": first.weight, "t": make(scheme, seed=2).mT})
    save_file(tensors, tmp_path / "x.safetensors", metadata)
    with files.safe_open(tmp_path / "x.safetensors", "pt") as opened:
        loaded = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        got = unflatten(loaded, opened.metadata())
    assert same(got["w"], first.weight.detach()) and same(got["t"], make(scheme, seed=2).mT)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("scheme", ["int4_w4a16:g128:zp", "int4_w4a8", "mxfp6_e3m2", "nvfp4"])
def test_compile_and_export(scheme):
    q, x, i = make(scheme, E, 256, 256), sample(4, 256), torch.tensor([2, 0])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(q, requires_grad=False)

        def forward(self, x, i):
            w = self.weight
            a = x @ w.mT[0, :, 128:] + F.linear(x, w.chunk(2, 1)[1].narrow(0, 1, 2)[1])
            return a + torch.bmm(x.expand(2, -1, -1), w[i].transpose(1, 2)).sum(0)[:, :128]

    module = Model()
    want = module(x, i)
    got = torch.compile(module, fullgraph=True, backend="aot_eager")(x, i)
    assert torch.equal(got, want)
    for strict in (False, True):
        program = torch.export.export(module, (x, i), strict=strict)
        lifted = program.constants.values()
        if strict and any(isinstance(tensor, FakeTensor) for tensor in lifted):
            continue  # a fault of torch 2.15: constants of views stay fake in strict mode
        assert torch.equal(program.module()(x, i), want)
    assert (
        q._stable_hash_for_caching()
        == make(scheme, E, 256, 256, seed=1)._stable_hash_for_caching()
    )


@schemes
def test_wrappers_can_take_it_apart(scheme):
    """As DTensor, FSDP and functionalization do: by names, and back, and an expert's share by
    index."""
    q = make(scheme)
    names, attributes = q.__tensor_flatten__()
    parts = {name: getattr(q, name) for name in names}
    assert all(type(t) is torch.Tensor for t in parts.values())
    assert same(type(q).__tensor_unflatten__(parts, attributes, q.shape, q.stride()), q)


def test_sharding_over_experts():
    """DTensor splits the quantized parameter along E, as expert parallelism does."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    store = torch.testing._internal.distributed.fake_pg.FakeStore()
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=store)
    try:
        mesh = init_device_mesh("cpu", (2,))
        q = quantize(sample(4, N, K), "nvfp4")
        shard = distribute_tensor(q, mesh, [Shard(0)], src_data_rank=None)
        assert shard.shape == (4, N, K) and same(shard.to_local(), q[2:])
    finally:
        torch.distributed.destroy_process_group()


# --- layouts -------------------------------------------------------------------------------------


@pytest.fixture
def reversed_bytes(monkeypatch):
    """A backend that wants the bytes of each row of 4-bit integers in reverse order."""

    def flip(w):
        return {"qdata": w.qdata.flip(-1), "scale": w.scale.flip(-1)}

    relayout = relayout_module.Relayout(
        "reversed", lambda scheme: scheme.weight.dtype == "int4", flip, flip
    )
    monkeypatch.setitem(relayout_module.RELAYOUTS, "triton", (relayout,))


def test_prepare_lays_out_once_and_back(reversed_bytes):
    q = make("int4_w4a16:g32")
    ready = prepare(q, "triton")
    assert ready.weight_layout == "reversed" and "weight_layout='reversed'" in repr(ready)
    assert torch.equal(ready.qdata, q.qdata.flip(-1)) and ready.shape == q.shape
    assert prepare(ready, "triton") is ready and prepare(ready, "auto") is ready
    assert torch.equal(ready.dequantize(), q.dequantize())
    back = prepare(ready, "torch")
    assert back.weight_layout == "" and same(back, q) and prepare(q, "torch") is q
    assert same(ready[1:], prepare(q[1:], "triton"))
    assert torch.equal(ready[2].dequantize(), q[2].dequantize())
    with pytest.raises(
        ValueError, match=r"along the expert dimension 0.*prepare\(weight, 'torch'\)"
    ):
        ready[:, 1:]
    other = make("mxfp4_w4a16")
    assert prepare(other, "triton") is other
    x, ids = torch.ones(1, K), torch.zeros(1, 1, dtype=torch.int32)
    w13, w2 = [prepare(make("int4_w4a16:g32", 2, *s), "triton") for s in ((64, K), (K, 32))]
    with pytest.raises(ValueError, match="torch.*natural layout, got layout 'reversed'"):
        moe_ops.fused_experts(x, w13, w2, torch.ones(1, 1), ids, backend="torch")


# --- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["int4_w4a16:g32:zp", "mxfp6_e2m3_w6a16", "nvfp4_w4a16"])
def test_transformers_own_experts_run_on_quantized_weights(scheme):
    """Its loop, its grouped and its batched products, by index, transpose and product of the
    tensor."""
    transformers = pytest.importorskip("transformers")
    import moe_ops.integrations.transformers as integration

    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.Qwen3MoeConfig(
        **sizes,
        vocab_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        experts_implementation="moe_ops",
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    integration.quantize(model, scheme)
    experts = model.model.layers[0].mlp.experts
    plain = copy.deepcopy(model)
    for name, value in experts.named_parameters():
        weight = nn.Parameter(value.dequantize(), requires_grad=False)
        setattr(plain.model.layers[0].mlp.experts, name, weight)
    ids = torch.arange(12).view(2, 6)
    for implementation in ("moe_ops", "grouped_mm", "batched_mm", "eager"):
        for m in (model, plain):
            m.set_experts_implementation(implementation)
        got, want = [m(input_ids=ids, use_cache=False).logits for m in (model, plain)]
        assert oracle.relative_error(got, want) < 1e-5, implementation
