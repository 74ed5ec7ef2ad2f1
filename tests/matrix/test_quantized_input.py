"""Activations that arrive quantized: as a dispatcher sends them, with their scales. The result is
that of quantizing them inside, bit for bit, and nothing quantizes them again."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import moe_ops
from moe_ops import backends, numerics
from moe_ops.kernels import launch
from moe_ops.numerics import QuantizedActivation
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Problem
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans
from moe_ops.schemes import SCHEMES
from tests.matrix.test_opcheck import UTILITIES, allow_eight_bits, recorded
from tests.support import oracle
from tests.support.cases import (
    BF16,
    FP16,
    FP32,
    STATIC_SCALES,
    Case,
    assert_matches,
    poisoned_memory,
    tolerance,
)
from tests.support.fake_cuda import H200, Recorder, fake_gpu

CUDA = torch.cuda.is_available()
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device"))
QUANTIZING = [name for name, scheme in SCHEMES.items() if scheme.activation]
# one of each way to scale activations, and of each number of their bits
VARIED = [
    *("fp8_block", "fp8_block:ue8m0", "fp8_channel", "fp8_tensor", "fp8_tensor_static"),
    *("int8_w8a8", "mxfp8", "mxfp4", "nvfp4", "int4_w4a8", "mxfp4_w4a8"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def quantized(x: torch.Tensor, weight, valid=None) -> QuantizedActivation:
    return numerics.quantize_activation(x, weight.scheme, weight.activation_scale, valid)


def scales(arrived: QuantizedActivation, name: str = "hidden_states") -> dict:
    """The keyword arguments of what arrives."""
    return {f"{name}_scale": arrived.scale, f"{name}_global_scale": arrived.global_scale}


def arriving(case: Case, strided: bool = False) -> tuple[list, dict]:
    """The case's arguments and options with quantized hidden_states. Rows that no expert takes
    hold what is NaN in every format. `strided`: scales of neighbouring rows are contiguous, as
    DeepGEMM wants them, and so are elements of neighbouring columns alone."""
    x, w13, *rest = case.args
    found = quantized(x, w13, ~case.nowhere)
    q, scale, global_scale, _ = found
    q.view(torch.uint8)[case.nowhere] = 127
    if scale.ndim and len(q):
        scale.view(torch.uint8)[case.nowhere] = 255
    if strided:
        wide = torch.empty(2 * len(q), q.shape[1] + 8, dtype=q.dtype, device=q.device)
        q = wide[::2, 3:-5].copy_(q)
        if scale.ndim:
            scale = scale.t().contiguous().t()
    found = QuantizedActivation(q, scale, global_scale)
    return [q, w13, *rest], {**case.options, "out_dtype": case.dtype, **scales(found)}


def check(case: Case, backend: str, strided: bool = False, inside: bool = True) -> torch.Tensor:
    """What arrives quantized gives the oracle's result, and the bits of quantizing inside."""
    args, options = arriving(case, strided)
    with poisoned_memory():
        out = moe_ops.fused_experts(*args, **options, backend=backend)
    assert_matches(out, case.reference(), tolerance(case.dtype, case.scheme, case.device))
    assert out.dtype == case.dtype and (out[case.nowhere] == 0).all()
    if inside:
        assert torch.equal(out, case.run(backend))
    return out


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", QUANTIZING)
@pytest.mark.parametrize("M", [7, 1, 0])
def test_torch(scheme, M):
    case = Case("cpu", BF16, scheme, M=M, K=160, I=136, bias=True, expert_map=True)
    if M:
        check(case, "torch", strided=M > 1)
    else:
        args, options = arriving(case)
        out = moe_ops.fused_experts(*args, **options, backend="torch")
        assert out.shape == (0, case.args[1].shape[2])


@pytest.mark.parametrize(
    "device, dtype", [("cpu", FP32), pytest.param("cuda", BF16, marks=ON_GPU)]
)
@pytest.mark.parametrize("scheme", VARIED)
@pytest.mark.parametrize("M", [7, 1])
def test_triton(scheme, M, device, dtype):
    """Rows whose size 16 divides and others, for which kernels quantize elsewhere."""
    K = 256 if scheme == "int4_w4a8" or M == 1 else 160
    case = Case(device, dtype, scheme, M=M, K=K, I=128, bias=True, expert_map=M > 1)
    check(case, "triton", strided=M > 1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("average", [30, 70])
@pytest.mark.slow
def test_kernels_for_many_rows(average, device):
    """kernels/gemm/sm90_tma.py, with scales of either order."""
    ids = torch.arange(2 * average)[:, None] % 2
    case = Case(device, BF16, "fp8_block", M=len(ids), E=2, top_k=1, K=256, I=128, ids=ids)
    first = check(case, "triton", strided=True)
    assert torch.equal(first, check(case, "triton", inside=False))


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel"])
@pytest.mark.parametrize("K, I", [(24, 40), (200, 136)])
def test_odd_sizes(scheme, K, I):
    check(Case("cpu", FP32, scheme, M=5, K=K, I=I), "triton")


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("scheme", VARIED)
def test_batched_experts(scheme, backend):
    """Scales of each expert lie by columns, as low-latency dispatchers send them."""
    case = Case("cpu", FP32, scheme, K=256, I=128, bias=True)
    w13, w2 = case.args[1:3]
    counts = torch.tensor([3, 0, 6, 5])
    x = torch.randn(4, 6, 256)
    valid = torch.arange(6) < counts[:, None]
    x[~valid] = 0
    arrived = quantized(x, w13, valid)
    if arrived.scale.ndim:
        arrived = arrived._replace(scale=arrived.scale.mT.contiguous().mT)
    with poisoned_memory():
        want = moe_ops.batched_experts(x, w13, w2, counts, backend=backend, **case.options)
        options = {**case.options, **scales(arrived), "out_dtype": FP32}
        got = moe_ops.batched_experts(arrived.q, w13, w2, counts, backend=backend, **options)
    assert torch.equal(got[valid], want[valid])
    expected = oracle.batched(x, w13, w2, counts, **case.options)
    assert_matches(got[valid], expected[valid], tolerance(FP32, scheme))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("scheme", VARIED)
def test_grouped_linear(scheme, backend):
    w = Case("cpu", FP32, scheme, K=256, I=128).args[1]
    offsets = torch.tensor([3, 3, 8, 11], dtype=torch.int32)
    x = torch.randn(13, 256)
    arrived = quantized(x, w, torch.arange(13) < 11)
    with poisoned_memory():
        want = moe_ops.grouped_linear(x, w, offsets, backend=backend)
        options = {**scales(arrived, "x"), "out_dtype": FP32, "backend": backend}
        got = moe_ops.grouped_linear(arrived.q, w, offsets, **options)
    assert torch.equal(got, want) and (got[11:] == 0).all()
    assert_matches(got, oracle.grouped_linear(x, w, offsets), tolerance(FP32, scheme))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("scheme", VARIED)
def test_router_weights_multiply_what_arrives(scheme, backend):
    """They cannot come before the quantization that has been: values are multiplied by them."""
    case = Case("cpu", FP32, scheme, M=6, top_k=1, K=256, I=128, on_input=True)
    x, w13, w2, weights, ids = case.args
    arrived = quantized(x, w13, ~case.nowhere)
    args = [arrived.q, w13, w2, weights, ids]
    got = moe_ops.fused_experts(
        *args, **case.options, **scales(arrived), out_dtype=FP32, backend=backend
    )
    x = numerics.activation_values(arrived, scheme)
    x[case.nowhere] = math.nan
    real = oracle.quantized_activation
    with pytest.MonkeyPatch.context() as patch:  # of hidden_states nothing is quantized again
        patch.setattr(
            oracle, "quantized_activation", lambda r, *o: r if r.shape[1] == 256 else real(r, *o)
        )
        expected = oracle.experts(x, w13, w2, weights, ids, **case.options)
    assert_matches(got, expected, tolerance(FP32, scheme))


CHUNKED = [
    *("fp8_block", "fp8_tensor", "fp8_tensor_static"),
    *[pytest.param(name, marks=pytest.mark.slow) for name in ("mxfp4", "nvfp4", "int4_w4a8")],
]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("scheme", CHUNKED)
@pytest.mark.parametrize("on_input", [False, True])
def test_chunks(scheme, backend, on_input):
    """Scales of rows are cut with them; one scale of h is that of all tokens."""
    K = 256 if scheme == "int4_w4a8" else 128
    top_k = 1 if on_input else 2
    case = Case("cpu", FP32, scheme, M=41, K=K, I=128, bias=True, top_k=top_k, on_input=on_input)
    args, options = arriving(case, strided=True)
    options["backend"] = backend
    x, w13, w2, _, ids = args
    if scheme.startswith("fp8"):  # zeros in the first chunk
        x.view(torch.uint8)[:16] &= 0x80
    bound = moe_ops.explain(x, w13, w2, ids, **options).num_bytes(16)
    plan = moe_ops.explain(x, w13, w2, ids, **options, max_workspace_bytes=bound)
    assert plan.num_chunks(41) == 3
    with poisoned_memory():
        whole = moe_ops.fused_experts(*args, **options)
        parts = moe_ops.fused_experts(*args, **options, max_workspace_bytes=bound)
    if backend == "triton":
        assert torch.equal(parts, whole)
    assert_matches(parts, whole, 1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_tensor", "mxfp8", "nvfp4"])
def test_chunks_of_batches(scheme, backend):
    w13, w2 = Case("cpu", FP32, scheme, E=5, K=128, I=128).args[1:3]
    counts = torch.tensor([6, 0, 3, -1, 9], dtype=torch.int32)
    x = torch.randn(5, 6, 128) * torch.arange(1, 6).view(5, 1, 1)
    inside = torch.arange(6) < counts[:, None]
    arrived = quantized(x, w13, inside)
    options = {**scales(arrived), "backend": backend, "out_dtype": FP32}
    with poisoned_memory():
        whole = moe_ops.batched_experts(arrived.q, w13, w2, counts, **options)
        for most in range(1 << 11, 1 << 20, 1 << 11):  # the least bound that has room
            try:
                parts = moe_ops.batched_experts(
                    arrived.q, w13, w2, counts, **options, max_workspace_bytes=most
                )
            except ValueError:
                continue
            break
    assert torch.equal(parts[inside], whole[inside])
    expected = oracle.batched(x, w13, w2, counts)
    assert_matches(parts[inside], expected[inside], tolerance(FP32, scheme))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("scheme", ["fp8_tensor_static", "int8_w8a8_static", "nvfp4"])
def test_scales_of_experts(scheme, backend):
    """What arrives has its scale in place of those of w13's experts; h keeps those of w2's."""
    case = Case("cpu", FP32, scheme, M=9, E=3, K=128, I=128)
    x, w13, w2, *_ = case.args
    one = 4.0 / {"f": 448.0, "i": 127.0, "n": 448.0 * 6}[scheme[0]]
    of_h = one * torch.tensor([1.0, 2.3, 0.4])
    if backend == "triton" and scheme == "nvfp4":  # it rounds by the largest
        of_h = of_h.amax().expand(3).contiguous()
    case.args[1] = w13._replace(activation_scale=torch.tensor(one))
    case.args[2] = w2._replace(activation_scale=of_h)
    args, options = arriving(case)
    args[1] = w13._replace(activation_scale=torch.tensor([5.0, 0.1, 3.0]))
    out = moe_ops.fused_experts(*args, **options, backend=backend)
    assert torch.equal(out, case.run(backend))
    assert_matches(out, case.reference(), tolerance(FP32, scheme))


@pytest.mark.parametrize("out_dtype", [None, BF16, FP16, FP32])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_out_dtype(out_dtype, backend):
    case = Case("cpu", FP32, "fp8_channel", K=64, I=32)
    args, options = arriving(case)
    out = moe_ops.fused_experts(*args, **{**options, "out_dtype": out_dtype}, backend=backend)
    assert out.dtype == (out_dtype or BF16)
    assert_matches(out, case.reference(), tolerance(out.dtype, "fp8_channel"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_exponents_come_as_bytes_or_as_such(dtype):
    case = Case("cpu", FP32, "mxfp8", K=64, I=32)
    args, options = arriving(case)
    options["hidden_states_scale"] = options["hidden_states_scale"].view(dtype)
    out = moe_ops.fused_experts(*args, **options, backend="torch")
    assert torch.equal(out, case.run("torch"))


def test_autocast_leaves_what_arrives(monkeypatch):
    case = Case("cpu", BF16, "fp8_block", K=64, I=32)
    args, options = arriving(case)
    with torch.autocast("cpu", BF16):
        out = moe_ops.fused_experts(*args, **options)
    assert torch.equal(out, case.run("torch"))


# --- no detour -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme, M, launched",
    [
        ("fp8_block", 5, ["moe_ops_route", "moe_ops_gemm1", "moe_ops_gemm2", "moe_ops_combine"]),
        ("fp8_block", 1, ["moe_ops_gemv1", "moe_ops_gemv2"]),
        # its first kernel sets the largest magnitudes of h to zero
        (
            "fp8_channel",
            5,
            ["moe_ops_quantize", "moe_ops_gemm1", "moe_ops_gemm2", "moe_ops_combine"],
        ),
        (
            "fp8_tensor_static",
            5,
            ["moe_ops_route", "moe_ops_gemm1", "moe_ops_gemm2", "moe_ops_combine"],
        ),
    ],
)
def test_nothing_quantizes_it_again(scheme, M, launched, monkeypatch):
    found, run = [], launch.run

    def spy(launches, *rest):
        found.extend(launches)
        return run(launches, *rest)

    monkeypatch.setattr(launch, "run", spy)
    args, options = arriving(Case("cpu", FP32, scheme, M=M, K=256, I=128))
    moe_ops.fused_experts(*args, **options, backend="triton")
    assert [one.kernel.name for one in found] == launched
    first = found[0].named()
    assert first.get("q_ptr") is None and first.get("to_q_ptr") is None
    x = next(one.named() for one in found if "gemm1" in one.kernel.name or M == 1)
    assert x["x_ptr"].data_ptr() == args[0].data_ptr()
    assert x["x_scale_ptr"].data_ptr() == options["hidden_states_scale"].data_ptr()


def test_workspaces_have_no_room_for_it():
    case = Case("cpu", BF16, "fp8_block", M=64, top_k=1, K=512, I=128)
    x, w13, w2, _, ids = case.args
    args, options = arriving(case)
    plain_plan = moe_ops.explain(x, w13, w2, ids, backend="triton")
    plan = moe_ops.explain(
        args[0], w13, w2, ids, backend="triton", hidden_states_scale=options["hidden_states_scale"]
    )
    assert plan.problem.quantized_input and plan.problem.dtype == BF16
    assert "arrives quantized" in str(plan) and "arrives quantized" not in str(plain_plan)
    sizes = [p.workspace_shapes(64).workspace2.shape[0] for p in (plan, plain_plan)]
    assert sizes[0] <= sizes[1]


# --- graphs --------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, scheme: str, backend: str = "torch"):
        super().__init__()
        case = Case("cpu", BF16, scheme, M=6, K=128, I=128)
        self.case, self.backend = case, backend
        self.w13, self.w2 = [torch.nn.Parameter(w, requires_grad=False) for w in case.args[1:3]]

    def forward(self, q, scale, topk_weights, topk_ids):
        return moe_ops.fused_experts(
            *(q, self.w13, self.w2, topk_weights, topk_ids),
            hidden_states_scale=scale,
            out_dtype=BF16,
            backend=self.backend,
        )


def tokens(layer: Layer, M: int) -> tuple:
    _, w13, _, _, _ = layer.case.args
    case = Case("cpu", BF16, w13.scheme, M=M, K=128, I=128, seed=M)
    arrived = quantized(case.args[0].nan_to_num(), w13)
    weights = case.args[3].nan_to_num()
    return arrived.q, arrived.scale, weights, case.args[4]


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel"])
def test_one_graph_of_every_number_of_tokens(scheme):
    layer = Layer(scheme)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for M in (6, 1, 9):
        args = tokens(layer, M)
        if M == 6:
            for t in args:
                torch._dynamo.decorators.mark_unbacked(t, 0)
        assert torch.equal(compiled(*args), layer(*args))
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.slow
def test_export(strict, tmp_path):
    layer = Layer("fp8_block")
    rows = torch.export.Dim("rows", min=1, max=4096)
    shapes = tuple({0: rows} for _ in range(4))
    program = torch.export.export(layer, tokens(layer, 6), dynamic_shapes=shapes, strict=strict)
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for M in (6, 1, 9):
        args = tokens(layer, M)
        assert torch.equal(loaded(*args), layer(*args))


def takers(kind: str, scheme: str) -> list[str]:
    """The backends that take what arrives quantized on an H200."""
    problem = Problem(
        *(kind, 4, 256, 128, 256, 2, BF16, scheme),
        options=Options(moe_ops.Activation("silu")),
        quantized_input=True,
    )
    return [b.name for b in backends.BACKENDS if not plans._reasons(b, problem, H200)]


@pytest.mark.parametrize("rows", ["static", "unbacked"])
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel"])
def test_traces_for_a_gpu(scheme, rows):
    recorder = Recorder()
    with fake_gpu() as mode, torch.device("cuda"):
        M = 7
        if rows == "unbacked":
            M = mode.shape_env.create_unbacked_symint()
            torch._check(M >= 0)
        w13, w2 = [
            moe_ops.Float8ExpertTensor(
                torch.empty(4, 256, k, dtype=torch.float8_e4m3fn),
                torch.empty((4, 2, k // 128) if scheme == "fp8_block" else (4, 256, 1)),
                scheme,
            )
            for k in (256, 128)
        ]
        q = torch.empty(M, 256, dtype=torch.float8_e4m3fn)
        scale = torch.empty(M, 2 if scheme == "fp8_block" else 1)

        def function(q, scale, weights, ids):
            return moe_ops.fused_experts(q, w13, w2, weights, ids, hidden_states_scale=scale)

        ids = torch.empty(M, 2, dtype=torch.int32)
        args = q, scale, torch.empty(M, 2), ids
        out = torch.compile(function, fullgraph=True, backend=recorder.backend)(*args)
        ((op, values),) = recorder.calls()
        plan = moe_ops.explain(q, w13, w2, ids, hidden_states_scale=scale)
    assert out.dtype == BF16 and out.device.type == "cuda"
    able = takers("experts", scheme)
    assert "triton" in able and "torch" in able
    assert op is plan.op and len(values["scales"]) == 12
    assert values["scales"][10].dtype == FP32 and values["scales"][11] is None
    assert values["hidden_states"].dtype == torch.float8_e4m3fn
    for name, buffer in zip(
        ("workspace13", "workspace2", "index_workspace"),
        plan.workspace_shapes(values["out"].shape[0]),
        strict=True,
    ):
        assert [str(s) for s in values[name].shape] == [str(s) for s in buffer.shape]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("scheme", ["fp8_block", "nvfp4"])
def test_opcheck(scheme, backend, monkeypatch):
    case = Case("cpu", FP32, scheme, M=4, K=32, I=32)
    case.args[0] = torch.randn(4, 32)
    args, options = arriving(case)
    calls = recorded(
        lambda: moe_ops.fused_experts(*args, **options, backend=backend), f"{backend}_experts"
    )
    allow_eight_bits(monkeypatch)
    for op, values, kwargs in calls:
        assert set(opcheck(op, values, kwargs, test_utils=UTILITIES)) == set(UTILITIES)


# --- what is refused -----------------------------------------------------------------------------


def test_gradients_are_refused():
    case = Case("cpu", FP32, "fp8_channel", K=64, I=32)
    args, options = arriving(case)
    args[3] = args[3].nan_to_num().requires_grad_()
    with pytest.raises(ValueError, match=r"hidden_states must not arrive quantized .*no_grad"):
        moe_ops.fused_experts(*args, **options)
    with torch.no_grad():
        moe_ops.fused_experts(*args, **options)
    args[3] = args[3].detach()
    scale = options["hidden_states_scale"].requires_grad_()
    with pytest.raises(ValueError, match="hidden_states_scale must not require gradients"):
        moe_ops.fused_experts(*args, **{**options, "hidden_states_scale": scale})


def with_scale(change) -> tuple:
    return lambda x, o: (x, {**o, "hidden_states_scale": change(o["hidden_states_scale"])})


@pytest.mark.parametrize(
    "change, message",
    [
        (with_scale(lambda s: s[:, :1]), r"hidden_states_scale must have shape \(M, 2\)"),
        (with_scale(lambda s: s[0]), r"hidden_states_scale must have shape \(M, 2\)"),
        (with_scale(lambda s: s[:-1]), "hidden_states_scale must have "),
        (with_scale(lambda s: s.double()), "hidden_states_scale must have dtype torch.float32"),
        (with_scale(lambda s: s.tolist()), "hidden_states_scale must be a torch.Tensor"),
        (with_scale(lambda s: None), "pass its scales as hidden_states_scale"),
        (lambda x, o: (x.view(torch.int8), o), "must have dtype torch.float8_e4m3fn"),
        (lambda x, o: (x.to(BF16), o), "must have dtype torch.float8_e4m3fn"),
        (
            lambda x, o: (x, {**o, "hidden_states_global_scale": torch.ones(())}),
            "hidden_states_global_scale must be None",
        ),
        (lambda x, o: (x, {**o, "out_dtype": torch.int32}), "out_dtype must be a floating-point"),
        (lambda x, o: (x[:, :128], o), "hidden_states_scale must have shape"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    args, options = arriving(Case("cpu", FP32, "fp8_block", M=4, K=256, I=128))
    args[0], options = change(args[0], options)
    with pytest.raises((ValueError, TypeError), match=message):
        moe_ops.fused_experts(*args, **options)


@pytest.mark.parametrize("scheme", ["", "fp8_w8a16:channel", "int4_w4a16:g32"])
def test_schemes_without_quantized_activations_refuse_it(scheme):
    args = Case("cpu", BF16, scheme, K=64, I=32).args
    args[0] = args[0].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="hidden_states_scale must be None for .* not quantized"):
        moe_ops.fused_experts(*args, hidden_states_scale=torch.ones(7, 1))


def test_out_dtype_of_what_is_not_quantized():
    args = Case("cpu", BF16, K=64, I=32).args
    moe_ops.fused_experts(*args, out_dtype=BF16)
    with pytest.raises(ValueError, match=r"out_dtype must be None or .* with \.to\(\)"):
        moe_ops.fused_experts(*args, out_dtype=FP32)


def test_backends_that_do_not_take_it_say_so():
    """What is registered elsewhere and knows nothing of it is not asked to run it."""
    args, options = arriving(Case("cpu", FP32, "mxfp6_e3m2", K=64, I=32))
    with pytest.raises(ValueError, match="takes no input that arrives quantized"):
        moe_ops.fused_experts(*args, **options, backend="triton")
    machine = machines.machine(torch.device("cpu"))
    for backend in backends.BACKENDS:
        assert set(backend.takes.quantized_input) <= set(QUANTIZING)
    assert machine.available


def test_static_scales_are_those_that_arrive():
    """Not those of the weight, which it may have been quantized by."""
    case = Case("cpu", FP32, "fp8_tensor_static", K=64, I=32)
    x, w13, *_ = case.args
    other = w13._replace(activation_scale=torch.tensor(3 * STATIC_SCALES[0]))
    args, options = arriving(case)
    args[1] = other
    for backend in ("torch", "triton"):
        out = moe_ops.fused_experts(*args, **options, backend=backend)
        assert torch.equal(out, case.run(backend))
