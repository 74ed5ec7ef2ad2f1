"""Layers whose w13 and w2 have different schemes, one of which may be plain: values against the
oracle, plans and what they say, and the ways of a call through compilers and files."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops
from moe_ops import backends
from moe_ops.backend import Takes
from moe_ops.ops.call import ExpertsCall, take_apart
from moe_ops.ops.problem import Machine
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans
from moe_ops.schemes import layer_scheme, schemes_of_layer
from tests.support import oracle
from tests.support.cases import BF16, FP16, FP32, Case, assert_matches, poisoned_memory, tolerance
from tests.support.fake_cuda import H200, Recorder, fake_gpu

# one of each format, group, precision and way to quantize activations, in both places
PAIRS = (
    *("int4_w4a16:g32+int8_w8a16:channel", "int8_w8a16:g64:zp+int4_w4a16:g128"),
    *("int4_w4a16:g64+int4_w4a16:g32", "int4_w4a16:g32:zp+plain", "plain+int8_w8a16:channel"),
    *("mxfp4_w4a16+fp8_w8a16:channel", "fp8_w8a16:block+nvfp4_w4a16", "nvfp4_w4a16+plain"),
    *("plain+mxfp4_w4a16", "fp8_block+plain", "plain+fp8_channel", "int4_w4a16:g32+fp8_block"),
    *("fp8_tensor_static+nvfp4", "nvfp4+int8_w8a8_static", "int8_w8a8+mxfp6_e2m3"),
    *("fp8_tensor+int4_w4a16:channel", "mxfp8+fp8_tensor", "int4_w4a8+mxfp4"),
)
QUANTIZED_INPUT = ("fp8_block+plain", "int8_w8a8+mxfp4_w4a16", "nvfp4+int4_w4a16:g32")


def weight(scheme: str, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
    plain = (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)
    return moe_ops.quantize(plain, scheme) if scheme else plain


def test_names():
    for w13, w2 in (("", "int4_w4a16:g128"), ("fp8_block", ""), ("mxfp4", "nvfp4"), ("", "")):
        assert schemes_of_layer(layer_scheme(w13, w2)) == (w13, w2)
    assert layer_scheme("fp8_block", "fp8_block") == "fp8_block" and layer_scheme("", "") == ""
    assert layer_scheme("int4_w4a16:g128", "") == "int4_w4a16:g128+plain"


@pytest.mark.parametrize("scheme", PAIRS)
def test_values(scheme):
    for M, options in ((1, {}), (7, {"bias": True, "expert_map": True}), (70, {"E": 6})):
        Case("cpu", FP32, scheme, M=M, seed=M, **options).check("torch")
    Case("cpu", FP32, scheme, M=5, top_k=1, on_input=True).check("auto")


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_16_bits(dtype):
    for scheme in (
        "int4_w4a16:g32+plain",
        "plain+nvfp4_w4a16",
        "fp8_w8a16:channel+int4_w4a16:g64",
    ):
        for activation in ("silu", "swigluoai", "relu2_no_mul"):
            Case("cpu", dtype, scheme, activation, M=6).check()


def test_other_scheme_is_noticed():
    """The values are not those of w13's scheme for both, nor of activations in 16 bits."""
    case = Case("cpu", FP32, "int4_w4a16:g32+fp8_block", M=7)
    out, x, w2 = case.run(), case.args[0], case.args[2]
    here = ~case.nowhere
    case.args[2] = w2.dequantize(FP32)  # the same values, but h is not rounded
    assert oracle.relative_error(out[here], case.reference()[here]) > 10 * tolerance(FP32)
    assert x.shape[1] == w2.shape[1]


@pytest.mark.parametrize("scheme", QUANTIZED_INPUT)
def test_input_that_arrives_quantized(scheme):
    w13, w2 = schemes_of_layer(scheme)
    case = Case("cpu", FP32, scheme, M=6)
    case.args[0] = torch.nan_to_num(case.args[0])
    x, *others = case.args
    q = moe_ops.quantize_activation(x, w13)
    scales = {
        "hidden_states_scale": q.scale,
        "hidden_states_global_scale": q.global_scale,
        "out_dtype": FP32,
    }
    out = moe_ops.fused_experts(q.q, *others, **scales)
    assert_matches(out, moe_ops.fused_experts(x, *others).double(), 1e-6)
    # beside weights of w2's scheme, and so activations in 16 bits, they are refused
    w13 = weight(w2, *others[0].shape)
    with pytest.raises(ValueError, match="hidden_states_scale must be None for"):
        moe_ops.fused_experts(q.q, w13, *others[1:], **scales)


@pytest.mark.parametrize("scheme", PAIRS)
def test_batches(scheme):
    case = Case("cpu", FP32, scheme, E=3)
    w13, w2 = case.args[1:3]
    x, counts = torch.randn(3, 9, w2.shape[1]), torch.tensor([9, 0, 4], dtype=torch.int32)
    x[torch.arange(9) >= counts[:, None]] = torch.nan
    with poisoned_memory():
        out = moe_ops.batched_experts(x, w13, w2, counts)
    inside, expected = ~torch.isnan(x[..., 0]), oracle.batched(x, w13, w2, counts)
    assert_matches(out[inside], expected[inside], tolerance(FP32, scheme))


@pytest.mark.parametrize(
    "scheme", ["fp8_tensor+plain", "plain+nvfp4", "fp8_tensor+int8_w8a8_tensor"]
)
def test_chunks_have_the_scales_of_all_tokens(scheme):
    case = Case("cpu", FP32, scheme, M=90)
    whole = case.run()
    for most in range(20000, 60000, 10000):
        case.options["max_workspace_bytes"] = most
        # torch's products may depend on the number of rows; scales of a chunk's own change 5 %
        assert_matches(case.run(), whole, 1e-3)


@pytest.mark.parametrize("scheme", ["plain+fp8_tensor", "fp8_tensor+plain"])
def test_batches_in_chunks_have_the_scales_of_all_rows(scheme):
    _, w13, w2, *_ = Case("cpu", FP32, scheme, E=6).args
    x, counts = torch.randn(6, 30, w2.shape[1]), torch.tensor([30, 0, 9, 30, 1, 20])
    whole = moe_ops.batched_experts(x, w13, w2, counts.int(), backend="torch")
    chunked = {"backend": "torch", "max_workspace_bytes": 60000}
    again = moe_ops.batched_experts(x, w13, w2, counts.int(), **chunked)
    inside = torch.arange(30) < counts[:, None]
    assert_matches(again[inside], whole[inside], 1e-3)


def test_batch_invariance():
    case = Case("cpu", BF16, "int4_w4a16:g32+plain", M=20)
    x, w13, w2, weights, ids = case.args
    whole = moe_ops.fused_experts(*case.args, batch_invariant=True)
    one = moe_ops.fused_experts(x[4:5], w13, w2, weights[4:5], ids[4:5], batch_invariant=True)
    assert torch.equal(whole[4:5], one)
    with pytest.raises(ValueError, match="batch_invariant must be False for scheme 'fp8_tensor'"):
        other = Case("cpu", BF16, "int4_w4a16:g32+fp8_tensor", M=20)
        moe_ops.fused_experts(*other.args, batch_invariant=True)


# --- plans ---------------------------------------------------------------------------------------


def explained(scheme: str, machine: Machine, **options) -> str:
    case = Case("cpu", BF16, scheme, K=256, I=128)
    x, w13, w2, _, ids = case.args
    with machines.pretend(machine):
        return str(moe_ops.explain(x, w13, w2, ids, **options))


def test_plan_names_both_and_refuses_backends_of_one():
    every = dataclasses.replace(H200, available=backends.list_backends())
    text = explained("int4_w4a16:g128+plain", every)
    assert "I=128 w13 int4_w4a16:g128, w2 plain bfloat16 on" in text
    for name in ("deep_gemm", "flashinfer", "cutlass"):
        reason = "runs w13 and w2 of one scheme, got w13 int4_w4a16:g128, w2 plain"
        assert f"not {name}: {reason}" in text
        with pytest.raises(ValueError, match=f"backend '{name}' cannot run this call: {reason}"):
            explained("int4_w4a16:g128+plain", every, backend=name)


def test_other_backends_are_asked_if_they_say_so():
    """A backend of somebody else's that knows of one scheme gets no layer of two."""
    one = dataclasses.replace(
        backends.named("torch"), name="one", supports=lambda *_: [], takes=Takes()
    )
    x, w13, w2, _, ids = Case("cpu", FP32, "int4_w4a16:g32+plain").args
    plan = moe_ops.explain(x, w13, w2, ids)
    (reason,) = plans.why_not(dataclasses.replace(one, name="torch"), plan.problem, plan.machine)
    assert reason == "runs w13 and w2 of one scheme, got w13 int4_w4a16:g32, w2 plain"
    two = dataclasses.replace(one, name="torch", takes=Takes(two_schemes=True))
    assert plans.why_not(two, plan.problem, plan.machine) == []


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme",
    ["int4_w4a16:g32+plain", "plain+int8_w8a16:channel", "plain+fp8_block", "mxfp4+nvfp4"],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients(scheme, recompute):
    """Of tokens, router weights and of a plain weight beside a quantized one, which has none."""
    case = Case("cpu", FP32, scheme, M=9, bias=True)
    for i in (0, 3):
        case.args[i] = torch.nan_to_num(case.args[i])
    leaves = [case.args[0], case.args[3], *case.options.values()]
    leaves = [t for t in leaves if isinstance(t, Tensor)]
    leaves += [w for w in case.args[1:3] if not getattr(w, "scheme", "")]
    for leaf in leaves:
        leaf.requires_grad_()
    out = moe_ops.fused_experts(*case.args, **case.options, recompute=recompute)
    seed = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, seed)
    expected = torch.autograd.grad(case.reference(), leaves, seed.double())
    for one, other in zip(got, expected, strict=True):
        assert_matches(one, other, 2 * tolerance(FP32, scheme))


@pytest.mark.parametrize(
    "scheme", ["plain+int4_w4a16:channel", "plain+fp8_tensor", "fp8_block+plain"]
)
def test_outputs_that_record_gradients_have_the_bits_of_others(scheme):
    """In bf16, where both products are in fp32, as are tokens times router weights. CPU kernels
    decode none of these.
    """
    for options in ({}, {"on_input": True, "top_k": 1}):
        case = Case("cpu", BF16, scheme, M=9, K=128, I=128, **options)
        whole = case.run("torch")
        case.args[0] = case.args[0].clone().requires_grad_()
        assert torch.equal(case.run("torch"), whole)


def test_gradients_in_bf16_have_their_dtypes():
    x, w13, w2, weights, ids = (case := Case("cpu", BF16, "int4_w4a16:g32+plain", M=9)).args
    x, weights = torch.nan_to_num(x), torch.nan_to_num(weights)
    x, w2 = x.requires_grad_(), w2.requires_grad_()
    out = moe_ops.fused_experts(x, w13, w2, weights, ids)
    dx, dw2 = torch.autograd.grad(out.float().sum(), (x, w2))
    case.args = [x, w13, w2, weights, ids]
    of_x, of_w2 = torch.autograd.grad(case.reference().sum(), (x, w2))
    assert dx.dtype == dw2.dtype == BF16
    assert_matches(dx, of_x.double(), tolerance(BF16))
    assert_matches(dw2, of_w2.double(), tolerance(BF16))
    text = str(moe_ops.explain(x, w13, w2, ids, training=True))
    assert "forward and backward pass: plain torch" in text


# --- compilers and files -------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, scheme: str, dtype: torch.dtype = FP32):
        super().__init__()
        _, w13, w2, *_ = Case("cpu", dtype, scheme).args
        self.w13 = torch.nn.Parameter(w13, requires_grad=False)
        self.w2 = torch.nn.Parameter(w2, requires_grad=False)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return moe_ops.fused_experts(x, self.w13, self.w2, weights, ids)


def inputs(layer: Layer, M: int) -> tuple[Tensor, Tensor, Tensor]:
    K = layer.w2.shape[1]
    return torch.randn(M, K), torch.rand(M, 2) + 0.1, torch.randint(-1, 5, (M, 2))


@pytest.mark.slow
def test_one_graph_for_every_number_of_tokens():
    for scheme in ("int4_w4a16:g32+plain", "plain+nvfp4", "int4_w4a16:g32+int8_w8a16:channel"):
        torch._dynamo.reset()
        layer, counter = Layer(scheme), CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        for M in (5, 1, 64):
            args = inputs(layer, M)
            for tensor in args:
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
            assert torch.equal(compiled(*args), layer(*args))
        assert counter.frame_count == 1


def test_exported_program_survives_saving(tmp_path):
    layer = Layer("int4_w4a16:g32+plain")
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    program = torch.export.export(layer, inputs(layer, 6), dynamic_shapes=({0: tokens},) * 3)
    torch.export.save(program.run_decompositions(), tmp_path / "program.pt2")
    args = inputs(layer, 11)
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    assert torch.equal(loaded(*args), layer(*args))


def test_operator_passes_opcheck():
    x, w13, w2, weights, ids = Case("cpu", FP32, "int4_w4a16:g32+plain", M=4).args
    x, weights = torch.nan_to_num(x), torch.nan_to_num(weights)
    plan = moe_ops.explain(x, w13, w2, ids)
    call = ExpertsCall(
        *(x, take_apart(w13), take_apart(w2), weights, ids, None, None, None),
        plan.problem.options,
    )
    buffers = [
        torch.empty_like(x),
        *[torch.empty(b.shape, dtype=b.dtype) for b in plan.workspace_shapes(4)],
    ]
    torch.library.opcheck(plan.op, (*buffers, *call.op_values(plan.options)))


def test_saved_and_loaded(tmp_path):
    layer, other = Layer("int4_w4a16:g32+plain"), Layer("int4_w4a16:g32+plain")
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    args = inputs(layer, 3)
    assert not torch.equal(layer(*args), other(*args)) or torch.equal(layer.w2, other.w2)
    other.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert torch.equal(layer(*args), other(*args))


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_traces_for_a_gpu(backend):
    recorder = Recorder()
    with fake_gpu():
        with torch.device("cuda"):
            qdata = torch.empty(4, 128, 32, dtype=torch.uint8)
            w13 = moe_ops.Int4ExpertTensor(
                qdata, torch.empty(4, 128, 2, dtype=BF16), scheme="int4_w4a16:g32"
            )
            w2 = torch.empty(4, 64, 64, dtype=BF16)
            x, ids = torch.empty(7, 64, dtype=BF16), torch.empty(7, 2, dtype=torch.int64)
            weights = torch.empty(7, 2)
        for tensor in (x, ids, weights):
            torch._dynamo.mark_dynamic(tensor, 0)

        def run(x, weights, ids):
            return moe_ops.fused_experts(x, w13, w2, weights, ids, backend=backend)

        got = torch.compile(run, fullgraph=True, backend=recorder.backend)(x, weights, ids)
        assert got.shape[1] == 64 and got.device.type == "cuda"
        ((op, args),) = recorder.calls()
        plan = moe_ops.explain(x, w13, w2, ids, backend=backend)
    assert op is plan.op and args["options"] == plan.options
    assert "'scheme': 'int4_w4a16:g32+plain'" in args["options"]
