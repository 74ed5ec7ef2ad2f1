"""Quantized weight tensors: what they hold against an fp64 oracle, and every way they are moved."""

import copy
import functools
import io
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moe_ops.nn.layer import MoELayer
from moe_ops.schemes import PER_BLOCK, SCHEMES
from moe_ops.tensors import (
    ExpertTensor,
    Float8ExpertTensor,
    flatten,
    from_quantized,
    prepare,
    quantize,
    unflatten,
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


@functools.cache
def shared(scheme):
    """One tensor for all examples of a property, ragged in both dimensions."""
    return make(scheme, 3, 140, 150)


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


class Experts(nn.Module):
    """Multiplies by experts the way eager model code does."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        gate, up = F.linear(x, self.weight[1]).chunk(2, -1)
        return gate * up + x @ self.weight.dequantize()[2, :128].t()


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
        torch.ones(2, 3, 4), "fp8_tensor_static", activation_scale=torch.ones(2)
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


@schemes
def test_moves_and_copies(scheme):
    q = make(scheme)
    assert same(q.clone(), q) and q.clone().qdata.data_ptr() != q.qdata.data_ptr()
    assert same(q.detach(), q) and q.detach().qdata.data_ptr() == q.qdata.data_ptr()
    assert same(copy.deepcopy(q), q)
    parameter = copy.deepcopy(nn.Parameter(q, requires_grad=False))
    assert isinstance(parameter, nn.Parameter) and same(parameter, nn.Parameter(q, False))
    half = q.to(torch.float16)
    assert half.dtype == torch.float16 and half.qdata.dtype == torch.float8_e4m3fn
    assert torch.equal(half.dequantize(torch.float32), q.dequantize(torch.float32))
    assert half.scale.dtype == torch.float32 and q.float().dtype == torch.float32
    assert q.to(torch.bfloat16) is q and q.to("cpu") is q
    half.qdata.zero_()
    assert q.dequantize().any()
    with pytest.raises(ValueError, match="dtype of quantized weights"):
        q.to(torch.float64)
    meta = q.to("meta", torch.float32)
    assert meta.device.type == "meta" == meta.scale.device.type and meta.dtype == torch.float32
    empty = torch.empty_like(meta, device="cpu")
    assert empty.scheme == scheme and empty.qdata.shape == q.shape and empty.dtype == torch.float32
    assert type(q)(q, requires_grad=False) is q
    other = make(scheme, seed=1)
    target = q.to(torch.float32)
    target.copy_(other)
    assert same(target.to(torch.bfloat16), other) and target.dtype == torch.float32
    with pytest.raises(ValueError, match="moe_ops.quantize"):
        target.copy_(sample(E, N, K))
    with pytest.raises(ValueError, match="plain tensor"):
        sample(E, N, K).copy_(q)
    for wrong in (make(scheme, E, N, 128), make("fp8_w8a16:channel"), q[:2], q.mT):
        with pytest.raises(ValueError, match="quantized alike"):
            target.copy_(wrong)


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_torch_save_and_state_dict(scheme):
    first, second = Experts(make(scheme)), Experts(make(scheme, seed=1))
    file = io.BytesIO()
    torch.save({"state": first.state_dict(), "view": first.weight.mT[:2]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert same(loaded["state"]["weight"], first.weight.detach())
    assert same(loaded["view"], first.weight.mT[:2])
    for assign in (False, True):
        module = copy.deepcopy(second)
        before = module.weight
        module.load_state_dict(loaded["state"], assign=assign)
        assert isinstance(module.weight, nn.Parameter) and (module.weight is before) != assign
        assert same(module.weight.detach(), first.weight.detach())
    plain = Experts(sample(E, N, K))
    with pytest.raises(RuntimeError, match="must be quantized alike"):
        plain.load_state_dict(first.state_dict())
    with pytest.raises(RuntimeError, match="moe_ops.quantize"):
        first.load_state_dict(plain.state_dict())
    plain.load_state_dict(first.state_dict(), assign=True)
    assert same(plain.weight.detach(), first.weight.detach())


def test_a_fresh_process_loads_after_importing_moe_ops(tmp_path):
    """With weights_only, without torchao until then; what was set on a parameter stays."""
    parameter = nn.Parameter(make("fp8_tensor_static"), requires_grad=False)
    parameter.shard_id = 3
    state = {"w": make("fp8_block").mT, "p": parameter, "plain": sample(3)}
    torch.save(state, tmp_path / "state.pt")
    code = (
        "import sys, torch, moe_ops\n"
        "assert 'torchao' not in sys.modules\n"
        f"state = torch.load({str(tmp_path / 'state.pt')!r}, weights_only=True)\n"
        "assert isinstance(state['w'], moe_ops.Float8ExpertTensor)\n"
        "torch.save(state, sys.argv[1])"
    )
    again = tmp_path / "again.pt"
    subprocess.run([sys.executable, "-c", code, again], check=True, cwd=sys.path[0] or ".")
    for weights_only in (True, False):
        loaded = torch.load(again, weights_only=weights_only)
        assert same(loaded["w"], state["w"]) and same(loaded["p"], parameter)
        assert isinstance(loaded["p"], nn.Parameter) and not isinstance(loaded["w"], nn.Parameter)
        assert loaded["p"].shard_id == 3 and not loaded["p"].requires_grad
    on_meta = torch.load(again, weights_only=True, map_location="meta")["w"]
    assert on_meta.device.type == "meta" and on_meta.stride() == state["w"].stride()


class Plain(nn.Module):
    """Experts as a model declares them, trainable, beside a parameter that stays so."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(sample(E, N, K))
        self.norm = nn.Parameter(torch.ones(N, dtype=torch.bfloat16))


def plain_layer(device="cpu"):
    return MoELayer(K, 128, E, 2, dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("fresh", [Plain, plain_layer, lambda: plain_layer("meta")])
def test_quantized_state_loads_into_a_fresh_plain_module(fresh, whole):
    """By the remedy that the errors name, for the model or for the experts' parameters alone."""
    quantized = Plain() if fresh is Plain else plain_layer()
    experts = [name for name, p in quantized.named_parameters() if p.dim() == 3]
    for name in experts:
        holder, _, last = name.rpartition(".")
        q = quantize(quantized.get_parameter(name).detach(), "fp8_block")
        setattr(quantized.get_submodule(holder), last, nn.Parameter(q, requires_grad=False))
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    remedy = r"requires_grad_\(False\) .*experts' parameters"
    model = fresh()
    if next(model.parameters()).device.type != "meta":
        with pytest.raises(RuntimeError, match=rf"quantized alike.*{remedy}.*assign=True"):
            model.load_state_dict(state)
    with pytest.raises((RuntimeError, ValueError), match=rf"assign=True\) call {remedy}"):
        fresh().load_state_dict(state, assign=True)
    if whole:
        model.requires_grad_(False)
    else:
        for name in experts:
            model.get_parameter(name).requires_grad_(False)
    model.load_state_dict(state, assign=True)
    for name, p in quantized.named_parameters():
        got = model.get_parameter(name)
        assert isinstance(got, nn.Parameter)
        assert got.requires_grad == (not whole and name not in experts)
        if name in experts:
            assert same(got.detach(), p.detach())
        else:
            assert torch.equal(got, p)
    if fresh is not Plain:
        x = sample(4, K)
        assert torch.equal(model.eval()(x), quantized.eval()(x))


def test_modules_move():
    module = Experts(make("fp8_block"))
    want = module.weight.dequantize(torch.float32)
    x = sample(2, K)
    module.to(torch.float32)
    assert isinstance(module.weight, nn.Parameter) and module.weight.dtype == torch.float32
    assert module(x.float()).dtype == torch.float32
    assert torch.equal(module.weight.dequantize(), want)
    module.requires_grad_(False)
    state = module.state_dict()
    module.to("meta").to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(module.weight.dequantize(), want)


def test_accelerate_rebuilds_parameters():
    modeling = pytest.importorskip("accelerate.utils.modeling")
    module = Experts(make("fp8_block"))
    value = module.weight.detach()
    modeling.set_module_tensor_to_device(module, "weight", "meta")
    assert module.weight.device.type == "meta"
    modeling.set_module_tensor_to_device(module, "weight", "cpu", value=value)
    assert same(module.weight.detach(), value)


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_safetensors_round_trip(scheme, tmp_path):
    files = pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    state = {
        "layer.w13": nn.Parameter(make(scheme), requires_grad=False),
        "layer.w2": make(scheme, seed=1).mT.to(torch.float16),
        "norm": sample(7),
    }
    tensors, metadata = flatten(state)
    assert all(type(t) in (torch.Tensor, nn.Parameter) for t in tensors.values())
    assert {"layer.w13.qdata", "layer.w13.scale", "norm"} <= set(tensors)
    save_file(tensors, tmp_path / "x.safetensors", {**metadata, "format": "pt"})
    with files.safe_open(tmp_path / "x.safetensors", "pt") as file:
        loaded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        got = unflatten(loaded, file.metadata())
    assert set(got) == set(state) and torch.equal(got["norm"], state["norm"])
    assert same(got["layer.w13"], state["layer.w13"].detach())
    assert same(got["layer.w2"], state["layer.w2"])
    assert unflatten({"a": tensors["norm"]}, None) == {"a": tensors["norm"]}


def test_safetensors_refuses_what_it_cannot_restore():
    q = make("fp8_block")
    with pytest.raises(ValueError, match=r"'w\.scale' twice"):
        flatten({"w": q, "w.scale": q.scale})
    tensors, metadata = flatten({"w": q})
    with pytest.raises(ValueError, match=r"w\.qdata"):
        unflatten({"w.scale": tensors["w.scale"]}, metadata)
    with pytest.raises(ValueError, match="must be one of .*got 'os.system'"):
        unflatten(tensors, {"moe_ops:w": '{"class": "os.system"}'})
    for nothing in (None, {}, {"format": "pt"}):
        with pytest.raises(ValueError, match="metadata must say what 'w.qdata' belongs to"):
            unflatten(tensors, nothing)


@schemes
def test_compile_and_export(scheme):
    module, x = Experts(make(scheme)), sample(4, K)
    want = module(x)
    backend = "inductor" if scheme == "fp8_block" else "aot_eager"
    got = torch.compile(module, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())
    with torch.inference_mode():
        got = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(got, want)
    for strict in (False, True):
        program = torch.export.export(module, (x,), strict=strict)
        assert torch.equal(program.module()(x), want)


def test_views_compile():
    q = make("fp8_block", E, N, N)

    def run(x, w, i):
        a = x @ w.mT[0, :, 128:] + F.linear(x, w.chunk(2, 1)[1].narrow(0, 1, 2)[1])
        return a + torch.bmm(x.expand(2, -1, -1), w[i].transpose(1, 2)).sum(0)[:, :128]

    x, i = sample(3, N), torch.tensor([2, 0])
    want = run(x, q.dequantize(), i)
    assert torch.equal(run(x, q, i), want)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x, q, i), want)


def test_compile_cache_key():
    def key(t):
        return t._stable_hash_for_caching()

    q = make("fp8_block")
    assert key(q) == key(make("fp8_block", seed=1)) == key(copy.deepcopy(q))
    others = [
        q.to(torch.float16),
        make("fp8_w8a16:block"),
        make("fp8_channel"),
        q[:2],
        q.mT,
        q[1:][:2],
        q.to("meta"),
        make("fp8_block", E, N, 301),
        make("fp8_tensor_static"),
    ]
    keys = {key(t) for t in (q, *others)}
    assert len(keys) == len(others) + 1


def test_distributed_wrappers_can_take_it_apart():
    q = make("fp8_tensor_static")
    names, attributes = q.__tensor_flatten__()
    assert names == ["qdata", "scale", "activation_scale"]
    parts = {name: getattr(q, name) for name in names}
    assert same(Float8ExpertTensor.__tensor_unflatten__(parts, attributes, q.shape, q.stride()), q)
    assert all(type(t) is torch.Tensor for t in parts.values())


def test_torchao_is_imported_with_the_tensors_only():
    code = (
        "import sys, moe_ops.schemes, moe_ops.numerics, moe_ops.meta.scales\n"
        "assert 'torchao' not in sys.modules\n"
        "import moe_ops.tensors\n"
        "assert 'torchao' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=sys.path[0] or ".")


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_gpu_round_trip(scheme):
    q = make(scheme)
    gpu = q.to("cuda")
    assert gpu.device.type == "cuda" == gpu.scale.device.type
    assert torch.equal(gpu.dequantize().cpu(), q.dequantize()) and same(gpu.cpu(), q)
    x = sample(4, K)
    got = F.linear(x.cuda(), gpu[1]).cpu()
    torch.testing.assert_close(got, F.linear(x, q[1]), rtol=2e-2, atol=0.5)
    module = Experts(q).cuda()
    want = module(x.cuda())
    got = torch.compile(module, fullgraph=True)(x.cuda())
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())
