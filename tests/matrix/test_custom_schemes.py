"""Schemes of one's own: every legal pair of descriptions runs through backend "torch", against an
oracle that knows nothing but the description."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import schemes
from moe_ops.schemes import ELEMENT_FORMATS, GroupShape, QuantDesc, QuantScheme, get_scheme
from tests.support import oracle
from tests.support.cases import router_weights

E, M, K, I, TOP_K = 3, 4, 192, 96, 2
SUPER = 256  # K and I where 256 columns share a scale of scales
LARGEST = {**{name: f[2] for name, f in oracle.FORMATS.items()}, "int8": 127.0}
LARGEST |= {"int6": 31.0, "int5": 15.0, "int4": 7.0}
COARSE = {"int4": 0.3, "int5": 0.15, "nf4": 0.4, "fp4": 0.4, "iq4": 0.4}
COARSE |= {"e2m1": 0.3, "e3m2": 0.2, "e2m3": 0.2}
F32, E8M0, E4M3 = torch.float32, torch.float8_e8m0fnu, torch.float8_e4m3fn
TWO_LEVELS = torch.int8
GROUPS = [(-1, -1), (1, -1), (-1, 1), (-1, 32), (64, 48), (128, 128), (1, 16), (1, 32), (1, 48)]


def legal(make):
    """What `make` returns, or None where it says that the combination has no meaning."""
    try:
        return make()
    except ValueError:
        return None


def descriptions(static: bool) -> list[QuantDesc]:
    options = itertools.product(
        ELEMENT_FORMATS,
        GROUPS,
        (F32, E8M0, E4M3, TWO_LEVELS, None),
        ("", "ocp", "round", "ceil"),
        (False, True),  # global_scale
        (False, True),  # channel_scale
        (False, True),  # zero_point
        (False, True),  # minimum
    )
    found = []
    for dtype, group, scale, rule, *flags, least in options:
        d = legal(lambda: QuantDesc(dtype, GroupShape(*group), static, scale, *flags, rule, least))  # noqa: B023
        found += [d] if d else []
    return found


WEIGHTS = descriptions(True)
ACTIVATIONS = [None, *descriptions(False), *[d for d in descriptions(True) if d.group.is_tensor]]


def test_there_are_many():
    assert len(WEIGHTS) > 100 and len(ACTIVATIONS) > 80


def pairs() -> list[QuantScheme]:
    """Each weight with some activations and each activation with some weights, at random."""
    g = torch.Generator().manual_seed(0)
    found = []

    def add(weights, activations):
        for i in torch.randperm(len(weights), generator=g).tolist():
            for j in torch.randperm(len(activations), generator=g).tolist():
                scheme = legal(lambda: QuantScheme("mine", weights[i], activations[j]))  # noqa: B023
                if scheme is not None:
                    found.append(scheme)
                    break

    for activation in ACTIVATIONS:
        add(WEIGHTS[:: len(WEIGHTS) // 4], [activation])
    for weight in WEIGHTS:
        add([weight], ACTIVATIONS)
    return found


PAIRS = pairs()


def nearest(x: Tensor, fmt: str) -> Tensor:
    if fmt in ("int4", "int5", "int6"):
        return torch.round(x).clamp(-LARGEST[fmt] - 1, LARGEST[fmt])
    return oracle.nearest(x, fmt)


def activation_values(x: Tensor, d: QuantDesc | None, static: Tensor | None) -> Tensor:
    """fp64 rows (S, K) as a description quantizes them."""
    if d is None:
        return x
    largest, is_float = LARGEST[d.dtype], d.dtype in oracle.FORMATS
    whole = (448.0 * largest / x.abs().max()).float().double()
    steps = largest if is_float else largest + 0.5
    channel = (x.abs().amax(1, keepdim=True).float() / steps / 56.0).double()

    def scale_of(part: Tensor) -> Tensor:  # (S, 1), or () of all rows
        if static is not None:
            return static.double()
        amax = part.abs().amax(1, keepdim=True) if d.group.rows == 1 else part.abs().max()
        if d.scale_dtype == E8M0 and is_float:
            return oracle.power_of_two(amax, d.dtype, d.scale_rule)
        if d.scale_dtype == E8M0:
            if d.scale_rule == "ceil":
                return 2.0 ** torch.ceil(torch.log2(amax / largest))
            exponent = torch.floor(torch.log2(amax))
            up = (amax / 2.0**exponent >= 1.5) & (d.scale_rule == "round")
            return 2.0 ** (exponent + up - math.floor(math.log2(largest)))
        if d.global_scale:
            return oracle.e4m3((whole.float() * (amax.float() / largest)).double()) / whole
        if d.channel_scale:
            return oracle.e4m3(((amax.float() / steps) / channel.float()).double()) * channel
        scale = (amax.float() / largest).double()
        return 2.0 ** torch.ceil(torch.log2(scale)) if d.scale_rule else scale

    out = []
    for part in x.split(x.shape[1] if d.group.cols == -1 else d.group.cols, 1):
        scale = scale_of(part)
        codes = nearest((part.float() / scale.float()).double(), d.dtype)
        if d.channel_scale and d.dtype == "int4":  # products with the scale of a group are e4m3
            out.append(oracle.e4m3(codes * oracle.e4m3(scale / channel)) * channel)
        else:
            out.append(codes * scale)
    return torch.cat(out, 1)


def weight_values(w) -> Tensor:
    """The fp64 values of a quantized weight, by the description of its scheme."""
    d = get_scheme(w.scheme).weight
    codes = oracle.stored(w.qdata, d.dtype)

    def spread(t: Tensor) -> Tensor:
        t = t.double().view(E, *(t.shape[1:] if t.ndim == 3 else (1, 1)))
        rows = w.shape[1] if d.group.rows == -1 else d.group.rows
        cols = w.shape[2] if d.group.cols == -1 else d.group.cols
        t = t.repeat_interleave(rows, 1).repeat_interleave(cols, 2)
        return t[:, : w.shape[1], : w.shape[2]]

    scale = 2.0 ** (w.scale.double() - 127) if d.scale_dtype == E8M0 else w.scale.float()
    minimum = w.zero_point
    if d.scale_dtype == TWO_LEVELS:
        scale, minimum = oracle.one_level(w.scale, minimum, w.channel_scale)
    if d.minimum:
        return (codes + (128 if d.dtype == "int8" else 0)) * spread(scale) + spread(minimum)
    zero = {"int4": 8, "int5": 16, "int6": 32}.get(d.dtype, 0)
    values = (codes - (zero if w.zero_point is None else spread(w.zero_point))) * spread(scale)
    if d.channel_scale:
        values = oracle.e4m3(values) if d.dtype == "int4" else values
        values = values * w.channel_scale.double()
    return values if w.global_scale is None else values / w.global_scale.double().view(E, 1, 1)


def by_expert(rows: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return torch.stack([w[e] @ row for e, row in zip(ids.tolist(), rows, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_every_legal_pair_runs(part):
    torch.manual_seed(part)
    weights = router_weights(M, TOP_K)
    ids = torch.stack([torch.randperm(E)[:TOP_K] for _ in range(M)])
    layers = [
        (torch.randn(M, k), torch.randn(E, 2 * i, k) / k**0.5, torch.randn(E, k, i) / i**0.5)
        for k, i in ((K, I), (SUPER, SUPER))
    ]
    done = 0
    for scheme in PAIRS[part::16]:
        a = scheme.activation
        x, *plain = layers[scheme.weight.scale_dtype == TWO_LEVELS]
        static = {} if a is None or not a.static else {"activation_scale": 0.0171}
        if scheme.why_not_shape(1, plain[1].shape[2]):
            continue
        w13, w2 = [moe_ops.quantize(w, scheme, **static) for w in plain]
        # what is quantized is near what it was: no oracle can say that of a wrong scale
        coarse = COARSE.get(scheme.weight.dtype, 0.1)
        for w, q in zip(plain, (w13, w2), strict=True):
            assert oracle.relative_error(q.dequantize(torch.float32), w) < coarse, scheme
            assert oracle.relative_error(q.dequantize(torch.float32), weight_values(q)) < 1e-6
        out = moe_ops.fused_experts(x, w13, w2, weights, ids, backend="torch")
        assert torch.equal(moe_ops.fused_experts(x, w13, w2, weights, ids), out)
        given = static and torch.tensor(static["activation_scale"])
        rows = activation_values(x.double(), a, given if static else None)
        m = torch.arange(M).repeat_interleave(TOP_K)
        gate_up = by_expert(rows[m], weight_values(w13), ids.flatten())
        hidden = oracle.activation(gate_up, "silu").float().double()
        hidden = activation_values(hidden, a, given if static else None)
        y = by_expert(hidden, weight_values(w2), ids.flatten())
        want = (y.view(M, TOP_K, -1) * weights.double().unsqueeze(-1)).sum(1)
        # A row's largest magnitude is halfway between -7 and -8, which rounding of h may decide
        # either way. Their e4m3 products with the scale 56 are 64 apart.
        within = 8e-2 if a and a.e4m3_products else 4e-2 if a else 1e-5
        assert oracle.relative_error(out, want) < within, scheme
        done += 1
    assert done > 10


MINE = QuantScheme(
    "mine", QuantDesc("e2m1", GroupShape(1, 48)), QuantDesc("int8", GroupShape(1, -1), False)
)


def mine() -> tuple:
    """Arguments of a layer of a scheme that no table has."""
    torch.manual_seed(0)
    w13 = moe_ops.quantize(torch.randn(E, 2 * I, K) / K**0.5, MINE)
    w2 = moe_ops.quantize(torch.randn(E, K, I) / I**0.5, MINE)
    ids = torch.stack([torch.randperm(E)[:TOP_K] for _ in range(M)])
    return torch.randn(M, K), w13, w2, router_weights(M, TOP_K), ids


def test_they_compile_and_their_gradients_flow():
    torch._dynamo.reset()
    args = mine()
    want = moe_ops.fused_experts(*args)
    compiled = torch.compile(moe_ops.fused_experts, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*args), want)
    x = args[0].requires_grad_()
    moe_ops.fused_experts(*args).sum().backward()
    assert x.grad.abs().max() > 0


def test_their_names_say_all_to_other_processes(tmp_path, monkeypatch):
    args = mine()
    torch.save(args[1], tmp_path / "w13")
    tensors, metadata = moe_ops.tensors.flatten({"w13": args[1]})
    monkeypatch.setattr(schemes.names, "_spelled_out", {})
    copies = [
        torch.load(tmp_path / "w13", weights_only=True),
        moe_ops.tensors.unflatten(tensors, metadata)["w13"],
    ]
    for copy in copies:
        assert copy.scheme == "custom:e2m1,1x48,f32:int8,1xall,f32,dynamic"
        assert torch.equal(copy.dequantize(), args[1].dequantize())


def test_other_backends_say_that_they_have_no_kernel():
    with pytest.raises(ValueError, match="triton runs the named schemes, got 'custom:e2m1"):
        moe_ops.fused_experts(*mine(), backend="triton")
    assert "triton runs the named schemes" in str(moe_ops.explain(*mine()[:3], mine()[4]))


def test_batches_and_grouped_linear_run():
    _, w13, w2, _, _ = mine()
    x, counts = torch.randn(E, 4, K), torch.tensor([4, 0, 2], dtype=torch.int32)
    out = moe_ops.batched_experts(x, w13, w2, counts)
    offsets = torch.tensor([4, 4, 6], dtype=torch.int32)
    rows = torch.cat([x[0], x[2, :2]])
    y = moe_ops.grouped_linear(rows, w13, offsets)
    hidden = oracle.activation(y.double(), "silu").float()
    want = moe_ops.grouped_linear(hidden, w2, offsets)
    assert oracle.relative_error(torch.cat([out[0], out[2, :2]]), want) < 1e-2
    values = torch.stack(
        [
            weight_values(w13)[e] @ activation_values(row[None].double(), MINE.activation, None)[0]
            for e, row in zip((0, 0, 0, 0, 2, 2), rows, strict=True)
        ]
    )
    assert oracle.relative_error(y, values) < 1e-5
