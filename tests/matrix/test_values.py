"""Every backend x scheme x activation against the fp64 oracle."""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_ops
from moe_ops import backends, schemes
from moe_ops.activations import NAMES
from moe_ops.backends.torch import grouped_mm
from moe_ops.numerics import Scales
from moe_ops.ops.problem import Problem
from moe_ops.planning import machine as machines
from moe_ops.planning.plan import why_not
from tests.support import oracle
from tests.support.cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    TOLERANCE,
    Case,
    assert_matches,
    garbage,
    poisoned_memory,
    tolerance,
)

CUDA = torch.cuda.is_available()
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device"))
# with every activation and on every device; the others once, in torch on a CPU and natively on a
# GPU
SCHEMES = [s for s in schemes.SCHEMES if s == "" or s.startswith("fp8_")]
OTHERS = [s for s in schemes.SCHEMES if s not in SCHEMES]
# one of each way to store weights, to quantize activations and to scale either
VARIED = [
    "int8_w8a8",
    "int8_w8a8_static",
    "int4_w4a16:g32:zp",
    "int4_w4a8",
    "mxfp4",
    "mxfp6_e2m3:mxfp8",
    "nvfp4",
]


def interpreted(name: str, device: str) -> bool:
    return device == "cpu" and backend_of(name).library.interpreted


def backend_of(name: str):
    (backend,) = [b for b in backends.BACKENDS if b.name == name]
    return backend


def places():
    """(backend, device, dtype) of every backend on every device."""
    for name in backends.list_backends():
        for device, dtypes in (("cpu", (FP32, BF16)), ("cuda", (BF16, FP16, FP32))):
            for dtype in dtypes[:1] if interpreted(name, device) else dtypes:
                id_ = f"{name}-{device}-{str(dtype).removeprefix('torch.')}"
                marks = ON_GPU if device == "cuda" else ()
                yield pytest.param((name, device, dtype), id=id_, marks=marks)


PLACES = list(places())
everywhere = pytest.mark.parametrize("where", PLACES)
# one dtype a device, for what does not depend on it
PLACES_ONCE = [p for p in PLACES if p.values[0][1:] in (("cpu", FP32), ("cuda", BF16))]
once = pytest.mark.parametrize("where", PLACES_ONCE)


def matrix():
    for param in PLACES:
        name, device, _ = param.values[0]
        for scheme in OTHERS:
            slow = interpreted(name, device) or param not in PLACES_ONCE
            # tests/kernels/mixed_gemm/test_sm80_mma.py runs those with kernels under the
            # interpreter
            if not slow:
                yield pytest.param(
                    param.values[0], scheme, "silu", id=f"{param.id}-{scheme}", marks=param.marks
                )
        for scheme in SCHEMES:
            for activation in NAMES:
                slow = interpreted(name, device) and activation not in (
                    ("silu", "swigluoai", "relu2_no_mul") if scheme == "" else ("silu",)
                )
                if not slow:
                    id_ = f"{param.id}-{scheme or 'plain'}-{activation}"
                    values = (param.values[0], scheme, activation)
                    yield pytest.param(*values, id=id_, marks=param.marks)


def attempt(where, problem: Problem, call):
    """The call's result. Where the backend refuses it must raise every reason it gives; then
    skip."""
    name, device, _ = where
    backend, machine = backend_of(name), machines.machine(torch.device(device))
    if problem.kind not in backend.operators:
        reasons = [f"has no {problem.kind}"]
    elif name not in machine.available:
        reasons = why_not(backend, problem, machine, named=True)
    else:
        reasons = backend.supports(problem, machine)
    if not reasons:
        return call()
    # no backend passes by refusing what it is there for
    assert name != "torch"
    runs = device == "cuda" or interpreted(name, device)
    assert not (
        name == "triton" and runs and problem.scheme in ("", *backend.takes.native_schemes)
    )
    with pytest.raises((ValueError, ImportError, torch._dynamo.exc.Unsupported)) as caught:
        call()
    for text in (repr(name), *reasons):
        assert text in str(caught.value)
    pytest.skip(f"refused, as it should be: {'; '.join(reasons)}")


def problem_of(case: Case, name="torch", kind="experts") -> Problem:
    """The problem of a case that runs on a backend, with its weights as `Case.run` lays them
    out."""
    x, w13, w2, _, ids = case.args
    plan = moe_ops.explain(x, w13, w2, ids, backend="torch", **case.options)
    _, w13, w2, *_ = case.args_for(name)
    contiguous = all([getattr(w, "qdata", w).is_contiguous() for w in (w13, w2)])
    layout = getattr(w13, "weight_layout", "")
    return dataclasses.replace(
        plan.problem, kind=kind, layout=layout, contiguous_weights=contiguous
    )


def fitted(name: str, options: dict) -> dict:
    """Options of a Case as a backend takes them: DeepGEMM's multiply blocks of 128, and add no
    bias."""
    if not name.startswith("deep_gemm"):
        return options
    sizes = {key: -(-options.get(key, 1) // 128) * 128 for key in ("K", "I")}
    return {**options, **sizes, "bias": False}


def check(where, **options):
    """The case's result, compared with the oracle."""
    name, device, dtype = where
    case = Case(device, dtype, **fitted(name, options))
    return attempt(where, problem_of(case, name), lambda: case.check(name))


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where, scheme, activation", list(matrix()))
def test_values(where, scheme, activation):
    sizes = (
        {"K": 160, "I": 136} if "block" in scheme or "w4a8" in scheme else {}
    )  # more than one block, and part of one
    check(where, scheme=scheme, activation=activation, bias=True, top_k=3, **sizes)


@everywhere
@pytest.mark.parametrize("M, top_k", [(0, 2), (1, 4), (7, 1), (70, 4)])
def test_token_counts(where, M, top_k):
    out = check(where, M=M, top_k=top_k, E=5)
    assert out.shape == (M, fitted(where[0], {"K": 48})["K"])


@pytest.mark.parametrize("scheme", SCHEMES + VARIED)
@pytest.mark.parametrize("M", [0, 1, 70])
def test_token_counts_quantized(scheme, M):
    check(("torch", "cpu", FP32), scheme=scheme, M=M)


@once
@pytest.mark.parametrize(
    "options",
    [
        {"expert_map": True},
        {"expert_map": True, "ids_dtype": torch.int64, "bias": True},
        {"ids_dtype": torch.int64, "weights_dtype": BF16},
        {"weights_dtype": FP16, "M": 1, "top_k": 3},
        {"on_input": True, "top_k": 1, "bias": True},
        {"on_input": True, "top_k": 1, "weights_dtype": BF16, "expert_map": True},
        {"E": 1, "top_k": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(where, options):
    check(where, **options)


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s] + VARIED)
@pytest.mark.parametrize("options", [{"expert_map": True}, {"on_input": True, "top_k": 1}])
def test_options_quantized(scheme, options):
    check(("torch", "cpu", FP32), scheme=scheme, bias=True, **options)


@once
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.startswith("fp8_")] + VARIED)
@pytest.mark.parametrize("M", [24, 1])
def test_router_weights_come_before_quantization(where, scheme, M):
    """In bf16, where a product rounded before it is quantized has other codes."""
    name, device, _ = where
    options = fitted(name, {"K": 256, "I": 128})
    case = Case(
        device, BF16, scheme, M=M, top_k=1, on_input=True, ids=torch.arange(M)[:, None] % 4,
        **options,
    )  # fmt: skip
    out = attempt(where, problem_of(case, name), lambda: case.check(name))
    if name != "torch" or oracle.ACTIVATIONS[scheme] is None or device != "cpu":
        return
    # The differentiable path says the same. On GPUs it rounds the quantized rows to bf16, so that
    # some neighbours of h are others: tests/kernels/rows/test_round_rows.py has that path.
    case.args[0].requires_grad_()
    assert_matches(case.run(name), out.double(), TOLERANCE[BF16])


@everywhere
@pytest.mark.parametrize("K, I", [(33, 17), (1, 1), (130, 70)])
def test_odd_sizes(where, K, I):
    check(where, K=K, I=I, bias=True)


@once
def test_every_token_on_one_expert(where):
    check(where, M=20, E=4, top_k=3, ids=torch.full((20, 3), 2))


@everywhere
def test_no_expert_is_here(where):
    """The output is exactly zero whatever NaN the rows, their weights and all memory hold."""
    out = check(where, M=3, ids=torch.tensor([[-1, 4], [-9, 99], [2**31 - 1, -(2**31)]]))
    assert (out == 0).all()


@once
def test_strided_inputs(where):
    """Rows, routing tensors and biases with strides, weights stored as (E, K, N), NaN in
    between."""
    name, device, dtype = where
    case = Case(device, dtype, K=40, I=24, bias=True, expert_map=True)
    expected = case.reference()

    def strided(t, wide):
        wide = garbage(t.new_empty(wide))
        view = wide[tuple(slice(1, 2 * size + 1, 2) for size in t.shape)]
        return view.copy_(t)

    x, w13, w2, weights, ids = case.args
    rows = garbage(x.new_empty(7, 64))[:, 3:43].copy_(x)
    w13, w2 = [w.mT.contiguous().mT for w in (w13, w2)]
    weights = strided(weights.t(), (6, 16)).t()
    ids = strided(ids, (16, 6))
    case.args = [rows, w13, w2, weights, ids]
    for key, shape in (("w13_bias", (10, 98)), ("w2_bias", (10, 82)), ("expert_map", (17,))):
        case.options[key] = strided(case.options[key], shape)
    assert not any(t.is_contiguous() for t in (*case.args, *list(case.options.values())[1:]))
    out = attempt(where, problem_of(case, name), lambda: case.run(name))
    assert_matches(out, expected, TOLERANCE[dtype])


@once
def test_biases_and_router_weights_of_another_dtype(where):
    name, device, dtype = where
    case = Case(device, dtype, bias=True)
    other = BF16 if dtype == FP32 else FP32
    for key in ("w13_bias", "w2_bias"):
        case.options[key] = case.options[key].to(other)
    case.args[3] = case.args[3].double()
    attempt(where, problem_of(case, name), lambda: case.check(name))


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("options", [{}, {"on_input": True, "top_k": 1, "weights_dtype": FP64}])
def test_fp64_is_fp64_throughout(activation, options):
    check(("torch", "cpu", FP64), activation=activation, bias=True, **options)


# --- the other two operators ---------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("scheme", ["", "fp8_tensor", "fp8_block", *VARIED])
@pytest.mark.parametrize("counts", [[3, 0, 6, -1], [0, 0, 0, 0], [9, 1, 2, 6]])
def test_batched_experts(where, scheme, counts):
    name, device, dtype = where
    if interpreted(name, device) and (counts[0] != 3 or scheme in VARIED):
        return
    sizes = fitted(name, {"K": 160, "I": 136, "bias": True})
    case = Case(device, dtype, scheme, "swigluoai", **sizes)
    _, w13, w2, *_ = case.args
    T = 6
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4, T, w13.shape[2], generator=g).to(dtype).to(device)
    counts = torch.tensor(counts, dtype=torch.int64 if counts[0] else torch.int32, device=device)
    for e, count in enumerate(counts.tolist()):
        x[e, max(count, 0) :] = math.nan  # rows nobody wrote

    def call():
        with poisoned_memory():
            return moe_ops.batched_experts(x, w13, w2, counts, backend=name, **case.options)

    out = attempt(where, problem_of(case, kind="batched_experts"), call)
    expected = oracle.batched(x, w13, w2, counts, **case.options)
    here = ~expected.isnan()
    assert_matches(out[here], expected[here], tolerance(dtype, scheme, device))


@everywhere
@pytest.mark.parametrize("scheme", ["", "fp8_tensor", "fp8_block", *VARIED])
@pytest.mark.parametrize("ends", [[3, 3, 8, 11], [0, 0, 0, 0], [15, 15, 15, 15], [1, 40, 40, 40]])
def test_grouped_linear(where, scheme, ends):
    """Rows past the last end are exactly zero, also where x holds NaN and there is a bias."""
    name, device, dtype = where
    if interpreted(name, device) and (ends[0] != 3 or scheme in VARIED):
        return
    case = Case(device, dtype, scheme, K=160, I=136, bias=True)
    w, bias = case.args[1], case.options["w13_bias"]
    g = torch.Generator().manual_seed(2)
    x = torch.randn(15, w.shape[2], generator=g).to(dtype).to(device)
    x[min(ends[-1], 15) :] = math.nan
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)

    def call():
        with poisoned_memory():
            return moe_ops.grouped_linear(x, w, offsets, bias=bias, backend=name)

    out = attempt(where, problem_of(case, kind="grouped_linear"), call)
    assert_matches(
        out, oracle.grouped_linear(x, w, offsets, bias=bias), tolerance(dtype, scheme, device)
    )
    assert (out[ends[-1] :] == 0).all()


def test_static_global_scales():
    """nvfp4 activations whose global scale is known beforehand, other for either weight."""
    case = Case("cpu", FP32, "nvfp4", K=80, I=48, bias=True)
    dynamic = case.check("torch")
    for position, scale in ((1, 0.0011), (2, 0.0017)):
        w = case.args[position]
        case.args[position] = w._replace(activation_scale=torch.tensor(scale))
    static = case.check("torch")
    assert oracle.relative_error(static, dynamic) > 0.01


@pytest.mark.parametrize("scheme", SCHEMES + VARIED)
@pytest.mark.parametrize("autocast", [False, True])
def test_block_path_of_gpus_without_one(scheme, autocast):
    """The grouped product that GPUs run where torch's own does not, here on the CPU."""
    case = Case("cpu", FP32, scheme, K=160, I=136)
    w = case.args[1]
    offsets = torch.tensor([5, 5, 40, 71], dtype=torch.int32)
    x = torch.randn(80, w.shape[2])
    x[71:] = math.nan
    scales = None
    if scheme:
        scales = Scales(w.scale, w.zero_point, w.global_scale, w.channel_scale)
    data = w.qdata if scheme else w
    with torch.autocast("cpu", BF16, enabled=autocast), poisoned_memory():
        y = grouped_mm._grouped_mm_blocks(x, data, offsets, scales, scheme, False)
        back = grouped_mm._grouped_mm_blocks(y, data, offsets, scales, scheme, True)
    plain = oracle.weight(w)
    expected = oracle.grouped_linear(x, plain, offsets)
    assert_matches(y[:71], expected[:71], TOLERANCE[FP32])
    assert_matches(back[:71], oracle.grouped_linear(expected, plain.mT, offsets)[:71], 1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("biased", [False, True])
def test_cpu_products_in_fp32(dtype, biased):
    """As on processors without 16-bit products, of experts with rows enough; rounded once."""
    counts, N, K = [20, 3, 0, 16], 40, 96
    x, w = torch.randn(41, K).to(dtype), (torch.randn(4, N, K) / K**0.5).to(dtype)
    bias = torch.randn(4, N).to(dtype) if biased else None
    offsets = torch.tensor(counts).cumsum(0).int()
    with (
        mock.patch.object(grouped_mm, "_multiplied_by_rows", lambda dtype: True),
        mock.patch.object(grouped_mm.cpu, "can_multiply", lambda *_: False),
        mock.patch.object(torch, "mm", wraps=torch.mm) as mm,
    ):
        y = grouped_mm.grouped_mm(x, w, offsets, bias=bias)
        outer = grouped_mm.grouped_outer(y, x, offsets)
    wide = [call.args[0].shape for call in mm.call_args_list if call.args[0].dtype == FP32]
    assert wide == [(20, K), (16, K), (N, 20), (N, 3), (N, 16)]
    begin = 0
    for e, count in enumerate(counts):
        rows = slice(begin, begin + count)
        expected = x[rows].double() @ w[e].double().T + (bias[e].double() if biased else 0)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(y[rows].double(), expected, rtol=eps, atol=eps)
        expected = y[rows].double().T @ x[rows].double()
        torch.testing.assert_close(outer[e].double(), expected, rtol=eps, atol=4 * eps)
        begin += count
    assert (y[39:] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_products_of_a_torch_without_onednn(dtype):
    with (
        mock.patch.object(torch.backends.mkldnn, "is_available", lambda: False),
        mock.patch.object(torch.ops, "mkldnn", None),
    ):
        assert not grouped_mm._multiplied_by_rows.__wrapped__(dtype)
    assert not grouped_mm._multiplied_by_rows(FP32)


# --- what holds for every backend besides values -------------------------------------------------


@everywhere
@pytest.mark.parametrize("M", [1, 40])
@pytest.mark.parametrize("scheme", ["", "fp8_channel", "fp8_block", "mxfp4_w4a16"])
def test_bitwise_repeatable_and_inputs_stay(where, scheme, M):
    name, device, dtype = where
    sizes = {"K": 128, "I": 128} if scheme == "mxfp4_w4a16" else {}
    options = fitted(name, {"M": M, "top_k": 3, "bias": True, "expert_map": True, **sizes})
    case = Case(device, dtype, scheme, **options)

    def call():
        tensors = [getattr(t, "qdata", t) for t in (*case.args, *list(case.options.values())[1:])]
        before = [t.clone() for t in tensors]
        first = case.run(name)
        for _ in range(1 if device == "cpu" else 10):
            assert torch.equal(first, case.run(name, poison=False))
        for old, new in zip(before, tensors, strict=True):
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))  # NaN too
        return first

    attempt(where, problem_of(case, name), call)


@pytest.mark.slow
@once
@pytest.mark.parametrize("scheme", ["", "fp8_tensor", *VARIED])
def test_compiled_equals_eager(where, scheme):
    """One dynamic graph, bitwise: the compiler sees one opaque op."""
    name, device, dtype = where
    options = fitted(name, {"bias": True, "expert_map": True})
    cases = [Case(device, dtype, scheme, M=M, **options) for M in (5, 9, 2)]
    if scheme and interpreted(name, device):
        return
    torch._dynamo.reset()  # one function, compiled for every scheme: more often than Dynamo allows
    compiled = torch.compile(
        moe_ops.fused_experts, fullgraph=True, backend="aot_eager", dynamic=True
    )

    def call():
        for case in cases:
            out = compiled(*case.args_for(name), **case.options, backend=name)
            assert torch.equal(out, case.run(name))

    attempt(where, problem_of(cases[0], name), call)  # a refusal keeps its words while compiling


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_inductor(device):
    """Two layers, workspaces reused between them, around operators that inductor writes itself."""
    case = Case(device, BF16 if device == "cuda" else FP32, M=9, bias=True)
    case.args[0] = case.args[0].nan_to_num()

    def layers(x, *rest):
        x = x + moe_ops.fused_experts(x, *rest, **case.options)
        return x + moe_ops.fused_experts(x, *rest, **case.options)

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(layers, fullgraph=True)(*case.args)
        assert oracle.relative_error(out, layers(*case.args)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize(
    "device, to", [("cpu", BF16), pytest.param("cuda", FP16, marks=ON_GPU)], ids=["cpu", "cuda"]
)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64])
@pytest.mark.parametrize("scheme", ["", "fp8_channel"])
def test_autocast_casts_as_linear_does(device, to, dtype, scheme):
    case = Case(device, FP32, scheme, bias=True, M=9)
    x, w13, w2, weights, ids = case.args
    x, biases = x.to(dtype), [case.options[name].to(dtype) for name in ("w13_bias", "w2_bias")]
    plain = [w if scheme else w.to(dtype) for w in (w13, w2)]
    with torch.autocast(device, to):
        out = moe_ops.fused_experts(x, *plain, weights, ids, w13_bias=biases[0], w2_bias=biases[1])
        linear = torch.nn.functional.linear(x, torch.zeros(5, 48, dtype=dtype, device=device))
    assert out.dtype == linear.dtype
    dtype = linear.dtype
    biases = [bias.to(dtype) for bias in biases]
    by_hand = moe_ops.fused_experts(
        x.to(dtype),
        *[w if scheme else w.to(dtype) for w in plain],
        weights,
        ids,
        w13_bias=biases[0],
        w2_bias=biases[1],
    )
    assert torch.equal(out, by_hand)


def test_autocast_of_the_other_two_operators():
    case = Case("cpu", FP32, bias=True)
    x, w13, w2, *_ = case.args
    x = x.nan_to_num()
    ends = torch.tensor([2, 2, 3, 3], dtype=torch.int32)
    blocks = torch.randn(4, 3, 48)
    with torch.autocast("cpu", BF16):
        y = moe_ops.grouped_linear(x, w13, ends, bias=case.options["w13_bias"])
        z = moe_ops.batched_experts(blocks, w13, w2, ends)
    x, w13, w2, blocks, bias = [t.to(BF16) for t in (x, w13, w2, blocks, case.options["w13_bias"])]
    assert torch.equal(y, moe_ops.grouped_linear(x, w13, ends, bias=bias))
    assert z.dtype == BF16
    by_hand = moe_ops.batched_experts(blocks, w13, w2, ends)
    assert torch.equal(z[0, :2], by_hand[0, :2]) and torch.equal(z[2], by_hand[2])


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_and_routing(data):
    integers = st.integers
    M, top_k, E = (data.draw(integers(*r)) for r in ((0, 12), (1, 4), (1, 6)))
    ids = data.draw(st.lists(integers(-2, E + 1), min_size=M * top_k, max_size=M * top_k))
    scheme = data.draw(st.sampled_from(SCHEMES + OTHERS))
    case = Case(
        "cpu",
        data.draw(st.sampled_from([FP32, BF16, FP16] + [FP64] * (not scheme))),
        scheme,
        data.draw(st.sampled_from(NAMES)),
        M=M,
        E=E,
        top_k=top_k,
        K=data.draw(integers(1, 40)),
        I=data.draw(integers(1, 24)),
        ids=torch.tensor(ids, dtype=torch.int64).view(M, top_k),
        ids_dtype=data.draw(st.sampled_from([torch.int32, torch.int64])),
        bias=data.draw(st.booleans()),
        on_input=top_k == 1 and data.draw(st.booleans()),
        seed=data.draw(integers(0, 99)),
    )
    # of a single small number roundings may cancel all but a few bits
    case.check(floor=2.0 * case.args[0].shape[0] ** 0.5)
