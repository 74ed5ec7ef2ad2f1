"""Quantized weight tensors: what they hold against an fp64 oracle."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_ops.schemes import PER_BLOCK, SCHEMES
from moe_ops.tensors import (
    ExpertTensor,
    Float8ExpertTensor,
    from_quantized,
    prepare,
    quantize,
)

# the other formats: test_formats.py
QUANTIZED = [name for name in SCHEMES if name.startswith("fp8_")]
THREE = ("fp8_w8a16:tensor", "fp8_channel", "fp8_block")
E, N, K = 3, 256, 300
schemes = pytest.mark.parametrize("scheme", THREE)


def sample(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(scheme, *shape, **kwargs):
    static = {"activation_scale": 0.25} if "static" in scheme else {}
    return quantize(sample(*(shape or (E, N, K)), **kwargs), scheme, **static)


def oracle(t: ExpertTensor) -> torch.Tensor:
    """fp64 values from qdata and scale of a natural (E, N, K) tensor."""
    rows, cols = torch.arange(t.shape[1]), torch.arange(t.shape[2])
    scale = t.scale.double().reshape(t.shape[0], *(t.scale.shape[1:] or (1, 1)))
    if SCHEMES[t.scheme].weight.group == PER_BLOCK:
        scale = scale[:, rows // 128][:, :, cols // 128]
    return t.qdata.to(torch.float64) * scale


def same(a: ExpertTensor, b: ExpertTensor) -> bool:
    """Equal down to the bits of every tensor, and in every attribute."""
    (names, attributes), (other_names, other) = a.__tensor_flatten__(), b.__tensor_flatten__()
    return (
        type(a) is type(b)
        and names == other_names
        and attributes == other
        and all(
            getattr(a, n).dtype == getattr(b, n).dtype
            and torch.equal(getattr(a, n).float(), getattr(b, n).float())
            for n in names
        )
    )


@pytest.mark.parametrize("scheme", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantize_keeps_the_values(scheme, dtype):
    weight = sample(E, N, K, dtype=dtype)
    kwargs = {"activation_scale": 0.25} if "static" in scheme else {}
    q = quantize(weight, scheme, **kwargs)
    assert isinstance(q, Float8ExpertTensor) and isinstance(q, ExpertTensor)
    assert q.shape == weight.shape and q.dtype == dtype and q.device == weight.device
    assert q.scheme == scheme and q.weight_layout == "" and q.is_contiguous()
    assert q.zero_point is None and q.global_scale is None and not q.requires_grad
    assert q.scale.shape == SCHEMES[scheme].batched_scale_shape(E, N, K)
    want = oracle(q)
    assert torch.equal(q.dequantize(torch.float32), want.float())
    assert torch.equal(q.dequantize(), want.float().to(dtype))
    # half an ulp of three mantissa bits, or half a step of the subnormals of the group's scale
    step = oracle(from_quantized(scheme, torch.ones_like(q.qdata), q.scale, **kwargs)) * 2.0**-10
    assert ((want - weight.double()).abs() <= weight.double().abs() * 2.0**-4 + step).all()
    if "static" in scheme:
        assert q.activation_scale.shape == () and q.activation_scale.item() == 0.25
    else:
        assert q.activation_scale is None


def test_default_variant_is_spelled_out():
    assert make("fp8_w8a16").scheme == "fp8_w8a16:channel"
    assert quantize(sample(1, 2, 3), SCHEMES["fp8_block"]).scheme == "fp8_block"


def test_repr_says_what_it_is():
    text = repr(make("fp8_block"))
    assert "(3, 256, 300)" in text and "'fp8_block'" in text and "bfloat16" in text
    assert "weight_layout='transposed'" in repr(make("fp8_block").mT)
    parameter = nn.Parameter(make("fp8_block"), requires_grad=False)
    assert isinstance(parameter, nn.Parameter) and "fp8_block" in repr(parameter)


BAD_QUANTIZE = {
    r"must have shape \(E, N, K\).*got \(2, 3\)": lambda: quantize(torch.ones(2, 3), "fp8_block"),
    r"no empty dimension, got \(2, 0, 3\)": lambda: quantize(torch.ones(2, 0, 3), "fp8_block"),
    "bfloat16, float16 or float32, got torch.int8": lambda: quantize(
        torch.ones(2, 3, 4, dtype=torch.int8), "fp8_block"
    ),
    "weight must be a torch.Tensor, got ndarray": lambda: quantize(
        torch.ones(2, 3, 4).numpy(), "fp8_block"
    ),
    "weight must be a torch.Tensor, got NoneType": lambda: quantize(None, "fp8_block"),
    "got torch.float64": lambda: quantize(torch.ones(1, 1, 1).double(), "fp8_block"),
    "scheme must be one of": lambda: quantize(torch.ones(2, 3, 4), "fp8"),
    "scheme must be one that quantizes": lambda: quantize(torch.ones(2, 3, 4), ""),
    "weight must be a plain tensor": lambda: quantize(make("fp8_block"), "fp8_block"),
    "activation_scale must be given": lambda: quantize(torch.ones(2, 3, 4), "fp8_tensor_static"),
    "activation_scale must be None": lambda: quantize(
        torch.ones(2, 3, 4), "fp8_block", activation_scale=1.0
    ),
    "activation_scale must be one number": lambda: quantize(
        torch.ones(2, 3, 4), "fp8_tensor_static", activation_scale=torch.ones(3)
    ),
    "activation_scale must be positive": lambda: quantize(
        torch.ones(2, 3, 4), "fp8_tensor_static", activation_scale=float("nan")
    ),
}


@pytest.mark.parametrize("message", BAD_QUANTIZE)
def test_quantize_refuses(message):
    with pytest.raises(ValueError, match=message):
        BAD_QUANTIZE[message]()


@schemes
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_quantize_names_the_expert_that_is_not_finite(scheme, value):
    weight = sample(4, 130, 140)
    weight[1, 129, 3] = value
    weight[3, 0, 139] = value
    with pytest.raises(ValueError, match=r"weight must be finite.*experts \[1, 3\]"):
        quantize(weight, scheme)


def test_quantize_works_on_meta():
    q = quantize(torch.empty(2, 130, 300, device="meta"), "fp8_block")
    assert q.device.type == "meta" and q.scale.shape == (2, 2, 3)


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_from_quantized_takes_what_quantize_made(scheme):
    q = make(scheme)
    again = from_quantized(scheme, q.qdata, q.scale, activation_scale=q.activation_scale)
    assert same(q, again) and again.qdata.data_ptr() == q.qdata.data_ptr()


def test_from_quantized_takes_power_of_two_scales():
    q = make("fp8_block")
    scale = torch.exp2(torch.arange(-9, 9).float()).reshape(3, 2, 3)
    got = from_quantized("fp8_block", q.qdata, scale.to(torch.float8_e8m0fnu))
    assert got.scale.dtype == torch.float32 and torch.equal(got.scale, scale)


Q = torch.zeros(2, 130, 300).to(torch.float8_e4m3fn)
S = torch.ones(2, 2, 3)
BAD_FROM = {
    "qdata must be torch.float8_e4m3fn": (Q.float(), S),
    r"qdata must have shape \(E, N, K\)": (Q[0], S),
    r"scale must have shape \(2, 2, 3\).*got \(2, 130, 1\)": (Q, torch.ones(2, 130, 1)),
    "scale must be torch.float32, got torch.bfloat16": (Q, S.bfloat16()),
    "scale must be a torch.Tensor, got ndarray": (Q, S.numpy()),
    "qdata must be a torch.Tensor, got list": ([1.0], S),
    "scale must be on the device": (Q, S.to("meta")),
    r"scale must be finite.*experts \[1\]": (Q, torch.stack([S[0], S[1] / 0])),
}


@pytest.mark.parametrize("message", BAD_FROM)
def test_from_quantized_refuses(message):
    with pytest.raises(ValueError, match=message):
        from_quantized("fp8_block", *BAD_FROM[message])


def test_from_quantized_refuses_what_the_scheme_lacks():
    with pytest.raises(ValueError, match="zero_point must be None"):
        from_quantized("fp8_block", Q, S, zero_point=S)
    with pytest.raises(ValueError, match="global_scale must be None"):
        from_quantized("fp8_block", Q, S, global_scale=S)
    with pytest.raises(ValueError, match="activation_scale must be given"):
        from_quantized("fp8_tensor_static", Q, torch.ones(2))
    with pytest.raises(ValueError, match="qdata must be a plain tensor"):
        from_quantized("fp8_block", make("fp8_block"), S)


def test_prepare():
    q, plain = make("fp8_block"), sample(E, N, K)
    for backend in ("auto", "torch", "triton"):
        assert prepare(q, backend) is q and prepare(plain, backend) is plain
    with pytest.raises(ValueError, match="backend must be one of"):
        prepare(q, "tritron")
    with pytest.raises(ValueError, match="weight must be a torch.Tensor, got NoneType"):
        prepare(None, "torch")
    with pytest.raises(ValueError, match="transpose it back"):
        prepare(q.mT, "torch")


@schemes
def test_products_dequantize_and_give_gradients(scheme):
    q = make(scheme, E, N, 128, dtype=torch.float32)
    w = oracle(q)
    x = sample(5, 128, dtype=torch.float32, seed=1).requires_grad_()
    bias = sample(N, dtype=torch.float32, seed=2)
    xs = x.expand(E, 5, 128)
    x64, grad = x.detach().double(), sample(5, N, dtype=torch.float32, seed=3)
    results = {
        "linear": (F.linear(x, q[1]), x64 @ w[1].t()),
        "linear bias": (F.linear(x, weight=q[1], bias=bias), x64 @ w[1].t() + bias.double()),
        "@": (x @ q[1].t(), x64 @ w[1].t()),
        "r@": (q[1] @ x.t(), w[1] @ x64.t()),
        "matmul": (torch.matmul(x, q.mT), x64 @ w.mT),
        "mm": (torch.mm(x, q[2].t()), x64 @ w[2].t()),
        "bmm": (torch.bmm(xs, q.mT), x64 @ w.mT),
        "addmm": (torch.addmm(bias, x, q[1].t()), x64 @ w[1].t() + bias.double()),
        "baddbmm": (torch.baddbmm(bias[None, None], xs, q.mT), x64 @ w.mT + bias.double()),
    }
    for name, (got, want) in results.items():
        torch.testing.assert_close(
            got.double(), want, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: n + m
        )
        assert got.requires_grad
    (got,) = torch.autograd.grad(F.linear(x, q[1]), x, grad)
    torch.testing.assert_close(got.double(), grad.double() @ w[1], rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        assert torch.equal(F.linear(x, q[1], bias), results["linear bias"][0])
        assert torch.equal(x @ q[1].t(), results["@"][0])
        assert torch.equal(torch.ops.aten.linear(x, q[1]), results["linear"][0])
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    got = F.grouped_mm(x.detach().bfloat16(), q.bfloat16().mT, offs=ends)
    want = torch.cat([x64[:2] @ w[0].t(), x64[2:] @ w[2].t()])
    torch.testing.assert_close(got.double(), want, rtol=3e-2, atol=0.3)


def test_gradients_are_refused_loudly():
    q = make("fp8_block")
    for bad in (
        lambda: nn.Parameter(q),
        lambda: q.requires_grad_(),
        lambda: setattr(q, "requires_grad", True),
    ):
        with pytest.raises(ValueError, match="requires_grad must be False"):
            bad()
    assert not nn.Parameter(q, requires_grad=False).requires_grad
    assert q.requires_grad_(False) is q
