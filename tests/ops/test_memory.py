"""What may reach a raw pointer: tensors that torch keeps negated, zero, freed or elsewhere."""

from __future__ import annotations

import contextlib

import pytest
import torch

import moe_ops
from moe_ops.ops import library, memory
from tests.support import oracle
from tests.support.cases import BF16, FP16, FP32, TOLERANCE, Case

BACKENDS = ("torch", "triton")
EXPERTS = ("hidden_states", "w13", "w2", "topk_weights", "w13_bias", "w2_bias")


def negated(t):
    """The same values, kept as the negated view of their negatives."""
    return torch._neg_view(t.neg())


def imaginary(t):
    """The same values, as the imaginary part of a conjugate."""
    return torch.complex(torch.zeros_like(t), t.neg()).conj().imag


def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def lost(t):
    parameter = torch.nn.Parameter(t.clone(), requires_grad=False)
    whole = torch.ones(2, *t.shape) if t.ndim == 2 else torch.ones(t.shape)
    quantized = moe_ops.quantize(whole, "int8_w8a16").to(t.dtype)
    parameter.data = quantized[0] if t.ndim == 2 else quantized
    return parameter


def zero(t):
    return torch._efficientzerotensor(t.shape, dtype=t.dtype)


def case_of(dtype=FP32, **options) -> dict:
    case = Case(dtype=dtype, bias=True, **options)
    names = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")
    arguments = dict(zip(names, case.args, strict=True)) | case.options
    arguments["hidden_states"].nan_to_num_()
    arguments["topk_weights"].nan_to_num_()
    return arguments


def check_experts(arguments: dict, dtype: torch.dtype = FP32, backend: str = "torch") -> None:
    expected = oracle.experts(**arguments)
    out = moe_ops.fused_experts(**arguments, backend=backend)
    assert oracle.relative_error(out, expected) <= TOLERANCE[dtype]


@contextlib.contextmanager
def listening():
    """A mode, so that calls go through the dispatcher."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Listener():
        yield


ways = pytest.mark.parametrize("way", [contextlib.nullcontext, listening, torch.inference_mode])


@ways
@pytest.mark.parametrize("name", EXPERTS)
def test_lazily_negated_tensors_keep_their_sign(name, way):
    for dtype, make in ((FP32, negated), (FP32, imaginary), (BF16, negated)):
        arguments = case_of(dtype)
        arguments[name] = make(arguments[name])
        with way():
            check_experts(arguments, dtype)


@pytest.mark.parametrize("name", ["w13", "topk_weights"])
def test_of_triton_too(name):
    arguments = case_of()
    arguments[name] = negated(arguments[name])
    check_experts(arguments, backend="triton")
    arguments[name] = freed(arguments[name])
    with pytest.raises(ValueError, match=f"^{name} must hold its values in memory"):
        moe_ops.fused_experts(**arguments, backend="triton")


@ways
@pytest.mark.parametrize("name", [*EXPERTS, "topk_ids"])
def test_implicit_zeros_are_zeros(name, way):
    arguments = case_of()
    arguments[name] = torch.zeros_like(arguments[name])
    expected = oracle.experts(**arguments)
    arguments[name] = zero(arguments[name])
    with way():
        out = moe_ops.fused_experts(**arguments, backend="torch")
    assert oracle.relative_error(out, expected, floor=1.0) <= TOLERANCE[FP32]


@pytest.mark.parametrize("grad", [False, True])
@ways
@pytest.mark.parametrize("name", [*EXPERTS, "topk_ids"])
def test_freed_tensors_are_refused(name, way, grad):
    arguments = case_of()
    other = "w2" if name == "w13" else "w13"
    arguments[other].requires_grad_(grad)
    arguments[name] = freed(arguments[name])
    with way(), pytest.raises(ValueError, match=f"^{name} must hold .* storage was freed"):
        moe_ops.fused_experts(**arguments, backend="torch")


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_freed_weights_that_are_stored_transposed_are_refused(name):
    arguments = case_of()
    arguments[name] = freed(arguments[name].mT.contiguous().mT)
    assert not arguments[name].is_contiguous()
    with pytest.raises(ValueError, match=f"^{name} must hold .* storage was freed"):
        moe_ops.fused_experts(**arguments, backend="torch")


@pytest.mark.parametrize("grad", [False, True])
@ways
@pytest.mark.parametrize("name", ["hidden_states", "w13", "w2", "w13_bias"])
def test_parameters_whose_data_was_set_to_a_subclass_are_refused(name, way, grad):
    for dtype in (FP32, FP16):
        arguments = case_of(dtype)
        arguments["w2" if name == "w13" else "w13"].requires_grad_(grad)
        if arguments[name].ndim == 2 and name != "w13_bias":
            continue
        if name == "w13_bias":
            arguments["w13_bias"] = arguments["w13_bias"].clone()
        arguments[name] = lost(arguments[name])
        with way(), pytest.raises(ValueError, match=f"^{name} must hold .* was set to a quant"):
            moe_ops.fused_experts(**arguments, backend="torch")


def test_layouts_without_strides_are_refused():
    arguments = case_of()
    for make in (torch.Tensor.to_sparse, torch.Tensor.to_mkldnn):
        with pytest.raises(ValueError, match="^w13_bias must be a dense tensor, got layout"):
            moe_ops.fused_experts(**arguments | {"w13_bias": make(arguments["w13_bias"])})


@ways
@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_grouped_linear(name, way):
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (9, 32), "weight": (3, 16, 32), "bias": (3, 16)}
    arguments = {n: torch.randn(s, generator=g) for n, s in shapes.items()}
    offsets = torch.tensor([4, 4, 8], dtype=torch.int32)

    def run():
        with way():
            return moe_ops.grouped_linear(**arguments, offsets=offsets, backend="torch")

    x, weight, bias = arguments.values()
    expected = oracle.grouped_linear(x, weight, offsets, bias=bias)
    arguments[name] = negated(arguments[name])
    assert oracle.relative_error(run(), expected) <= TOLERANCE[FP32]
    arguments[name] = freed(arguments[name])
    with pytest.raises(ValueError, match=f"^{name} must hold its values"):
        run()


@ways
@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_of_quantized_weights(backend, way):
    """They travel to operators in a list, which the dispatcher does not look into."""
    arguments = case_of(scheme="fp8_w8a16:channel")
    expected = oracle.experts(**arguments)
    whole = arguments["w13"]
    arguments["w13"] = whole._replace(scale=negated(whole.scale))
    with way():
        out = moe_ops.fused_experts(**arguments, backend=backend)
    assert oracle.relative_error(out, expected) <= TOLERANCE[FP32]
    arguments["w13"] = whole._replace(scale=freed(whole.scale))
    with way(), pytest.raises(ValueError, match="^w13's scale must hold its values"):
        moe_ops.fused_experts(**arguments, backend=backend)


@ways
@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_of_activations_that_arrive_quantized(backend, way):
    """In a call that was made before too, which skips the dispatcher."""
    x, counts = torch.randn(2, 4, 32), torch.tensor([4, 3], dtype=torch.int32)
    w13, w2 = [moe_ops.quantize(torch.randn(2, 32, k), "nvfp4") for k in (32, 16)]
    weights, ids = moe_ops.route(torch.randn(8, 2), 2)
    q, scale, global_scale, _ = moe_ops.quantize_activation(x.flatten(0, 1), "nvfp4")
    ends = torch.tensor([4, 8], dtype=torch.int32)
    of_hidden_states = "hidden_states_scale", "hidden_states_global_scale"

    def experts(*scales):
        named = dict(zip(of_hidden_states, scales, strict=True))
        moe_ops.fused_experts(q, w13, w2, weights, ids, backend=backend, **named)

    def batched(*scales):
        named = dict(zip(of_hidden_states, scales, strict=True))
        rows = q.view(2, 4, -1)
        moe_ops.batched_experts(rows, w13, w2, counts, backend=backend, **named)

    def linear(*scales):
        named = {"x_scale": scales[0], "x_global_scale": scales[1]}
        moe_ops.grouped_linear(q, w13, ends, backend=backend, **named)

    for call, of_rows in ((experts, scale), (batched, scale.view(2, 4, -1)), (linear, scale)):
        name = "x" if call is linear else "hidden_states"
        call(of_rows, global_scale)
        with way(), pytest.raises(ValueError, match=f"^{name}_scale must hold .* was freed"):
            call(freed(of_rows), global_scale)
        with way(), pytest.raises(ValueError, match=f"^{name}_global_scale must hold .* freed"):
            call(of_rows, freed(global_scale))


def test_batched_experts():
    x, w13, w2 = torch.randn(3, 5, 32), torch.randn(3, 32, 32), torch.randn(3, 32, 16)
    counts = torch.tensor([2, 5, 0], dtype=torch.int32)
    expected = oracle.batched(x, w13, w2, counts)
    inside = ~torch.isnan(expected)
    out = moe_ops.batched_experts(negated(x), w13, negated(w2), counts)
    assert oracle.relative_error(out[inside], expected[inside]) <= TOLERANCE[FP32]
    with pytest.raises(ValueError, match="^w2 must hold its values"):
        moe_ops.batched_experts(x, w13, freed(w2), counts)


def test_routers():
    logits = torch.randn(5, 8)
    expected = moe_ops.route(logits, 2)
    for given, wanted in zip(moe_ops.route(negated(logits), 2), expected, strict=True):
        assert torch.equal(given, wanted)


def test_gradients_keep_their_sign():
    arguments = case_of()
    plain = arguments["hidden_states"].clone().requires_grad_()
    moe_ops.fused_experts(**arguments | {"hidden_states": plain}).sum().backward()
    again = arguments["hidden_states"].clone().requires_grad_()
    lazy = {name: negated(arguments[name]) for name in ("w13", "w2", "topk_weights", "w2_bias")}
    moe_ops.fused_experts(**arguments | lazy | {"hidden_states": again}).sum().backward()
    torch.testing.assert_close(again.grad, plain.grad)


def test_tensors_without_elements_have_no_address():
    assert not memory.addressable([torch.empty(0)])
    assert memory.materialized("x", torch.empty(0, 3)).shape == (0, 3)
    assert memory.addressable([None, torch.ones(1)])
    assert not memory.addressable([negated(torch.ones(1))])
    assert not memory.addressable([torch.ones(1, 1).to_sparse()])


def test_an_empty_list_of_scales_may_be_none():
    """As AOTInductor passes it."""
    given = []
    run = library.in_memory(lambda *values: given.append(values), "torch_grouped_linear")
    names = [a.name for a in torch.ops.moe_ops.torch_grouped_linear.default._schema.arguments]
    x, weight = torch.randn(3, 8), torch.randn(2, 4, 8)
    values = {"out": torch.empty(3, 4), "x": x, "weight": weight, "scales": None}
    run(*[values.get(name) for name in names])
    values["x"] = negated(x)  # which is copied
    run(*[values.get(name) for name in names])
    first, second = [dict(zip(names, one, strict=True)) for one in given]
    assert torch.equal(first["x"], second["x"]) and not second["x"].is_neg()
