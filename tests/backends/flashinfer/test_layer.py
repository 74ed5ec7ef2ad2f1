"""Backend `flashinfer`: its launcher on a CPU over a fake of the library's module, its layouts,
tactics and refusals.

On a GPU the shared matrix and the tests marked `gpu` here run the library itself.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

import moe_ops
from moe_ops import backends
from moe_ops.activations import Activation
from moe_ops.backends.flashinfer import backend as backend_module
from moe_ops.backends.flashinfer import layer as layer_module
from moe_ops.backends.flashinfer import library, schemes
from moe_ops.backends.flashinfer import relayout as layouts_of_flashinfer
from moe_ops.backends.flashinfer.backend import BACKEND
from moe_ops.meta.fake import Bits
from moe_ops.numerics import QuantizedActivation, quantize_activation
from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.library import KINDS
from moe_ops.ops.problem import Machine
from tests.support.cases import BF16, FP16, FP32, Case, assert_matches, garbage, tolerance
from tests.support.fake_cuda import Recorder, fake_gpu
from tests.support.fake_flashinfer import FakeRunner
from tests.support.paths import SUPPORT

H200 = Machine("cuda", (9, 0), "NVIDIA H200", backends.list_backends())
B200 = Machine("cuda", (10, 0), "NVIDIA B200", backends.list_backends())
CUDA = torch.cuda.is_available()
on_cpu = pytest.mark.skipif(CUDA, reason="needs triton's interpreter")
on_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
SCHEMES = [s for s in schemes.SCHEMES if ":" not in s]  # rules of e8m0 scales change nothing here
WHOLE = {"K": 128, "I": 128}  # what all schemes take


@pytest.fixture
def fake(monkeypatch):
    """The fake module's runners by family of kernels."""
    runners = {}

    def runner(device, kernels):
        return runners.setdefault(kernels, FakeRunner(kernels))

    monkeypatch.setattr(library, "runner", runner)
    monkeypatch.setattr(library, "_found", {})
    monkeypatch.setattr(library, "_warm", set())
    return runners


def with_scales(case: Case) -> Case:
    """Give nvfp4 the scales of activations that the library needs beforehand."""
    if case.scheme == "nvfp4":
        for i, scale in ((1, 0.0013), (2, 0.0021)):
            case.args[i] = case.args[i]._replace(activation_scale=torch.tensor(scale))
    return case


def prepared(case: Case) -> Case:
    """A case with its weights laid out for the library."""
    case.args = with_scales(case).args_for("flashinfer")
    return case


def machine_of(scheme: str) -> Machine:
    """A GPU on which the library has kernels for a scheme."""
    return H200 if (9, 0) in schemes.SCHEMES[scheme].gpus else B200


def problem_of(case: Case):
    """The problem of prepared weights."""
    x, w13, w2, _, ids = case.args
    natural = [moe_ops.prepare(w, "torch") for w in (w13, w2)]
    plan = moe_ops.explain(x, *natural, ids, backend="torch", **case.options)
    return dataclasses.replace(plan.problem, layout=getattr(w13, "weight_layout", ""))


def with_scales_of_experts(case: Case) -> Case:
    """Give the weights a scale of activations for each expert."""
    shape = torch.tensor([1.0, 2.6, 0.5])
    for i in (1, 2):
        scale = case.args[i].activation_scale
        case.args[i] = case.args[i]._replace(activation_scale=shape * scale)
    return case


def launch(
    case: Case,
    deterministic: bool = True,
    chunk_rows: int = 0,
    arrived: QuantizedActivation | None = None,
) -> torch.Tensor:
    """The launcher's output on CPU tensors, out of memory that held garbage. `arrived` takes the
    place of hidden_states."""
    x, w13, w2, weights, ids = case.args
    quantized = arrived is not None
    problem = dataclasses.replace(
        problem_of(case), contiguous_weights=True, quantized_input=quantized
    )
    assert backend_module.supports(problem, machine_of(case.scheme)) == []
    buffers = [torch.empty(x.shape, dtype=x.dtype)]
    buffers += [
        torch.empty(b.shape, dtype=b.dtype)
        for b in backend_module.workspace_shapes(
            min(len(x), chunk_rows) if chunk_rows else len(x), problem
        )
    ]
    parts = {}
    for name, w in (("w13", w13), ("w2", w2)):
        for part in ("scale", "zero_point", "global_scale", "channel_scale"):
            parts[f"{name}_{part}"] = getattr(w, part, None)
    args = ExpertsArgs(
        *[garbage(b) for b in buffers],
        arrived.q if quantized else x,
        getattr(w13, "qdata", w13),
        getattr(w2, "qdata", w2),
        weights,
        ids,
        a13_scale=getattr(w13, "activation_scale", None),
        a2_scale=getattr(w2, "activation_scale", None),
        hidden_states_scale=arrived.scale if quantized else None,
        hidden_states_global_scale=arrived.global_scale if quantized else None,
        activation_by_expert=None,
        **parts,
        w13_bias=case.options.get("w13_bias"),
        w2_bias=case.options.get("w2_bias"),
        expert_map=case.options.get("expert_map"),
        scheme=problem.scheme,
        layout=problem.layout,
        options=problem.options._replace(atomic_sums=not deterministic, chunk_rows=chunk_rows),
    )
    stored = (args.w13, args.w2, args.hidden_states)
    bits = Bits(*[4 if t.dtype == torch.uint8 else 8 for t in stored])
    kind = KINDS["experts"]
    kind.check(args, bits)
    kind.check_rows(args)
    kind.check_sizes(args, bits)
    layer_module.experts(args)
    return args.out


def check(case: Case) -> torch.Tensor:
    expected = with_scales(case).reference()
    out = launch(prepared(case))
    within = tolerance(case.dtype, case.scheme, "cuda")
    # the library rounds gate and up rows to 16 bits before it quantizes what follows, so that one
    # e2m1 element in a hundred becomes its neighbour, a third of it away
    within += 3e-2 if case.scheme == "nvfp4" else 0
    assert_matches(
        out, expected, within * (2 if "relu2" in str(case.options["activation"]) else 1)
    )
    assert (out[case.nowhere] == 0).all()
    return out


# --- the launcher over the fake module -----------------------------------------------------------

ACTIVATIONS = [
    *schemes.ACTIVATIONS,
    Activation("silu", limit=0.7),
    Activation("swigluoai", alpha=1.3, beta=0.5, limit=1.1),
    Activation("swiglustep", limit=0.4),
]


@on_cpu
@pytest.mark.parametrize(
    "activation", ACTIVATIONS, ids=lambda a: a if isinstance(a, str) else f"{a.name}-given"
)
@pytest.mark.parametrize("bias", [False, True])
def test_plain(fake, activation, bias):
    check(Case("cpu", BF16, activation=activation, bias=bias, top_k=3))


@on_cpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_chunks_are_one_piece(fake, scheme, monkeypatch):
    """All with the tactics of all tokens; the last of three has fewer."""
    rows = []
    monkeypatch.setattr(library, "tactics", lambda key: rows.append(key[-1]) or library.DEFAULT)
    case = Case("cpu", BF16, scheme, bias=scheme != "fp8_block", M=41, **WHOLE, E=3)
    whole = check(case)
    parts = launch(case, chunk_rows=16)
    assert rows == [(41 - 1).bit_length()] * 4
    assert torch.equal(parts, whole)


ARRIVING = [s for s in SCHEMES if s in BACKEND.takes.quantized_input]


@on_cpu
@pytest.mark.parametrize("scheme", ARRIVING)
@pytest.mark.parametrize("strided", [False, True])
def test_arriving_quantized(fake, scheme, strided):
    """Elements and scales reach the library as they are, and give what quantizing inside gives;
    in one piece and in chunks."""
    case, arrived = arriving(scheme, WHOLE)
    if strided:
        q, scale = [
            t if t.ndim < 2 else torch.stack((t.view(torch.uint8),) * 2, 2)[..., 0].view(t.dtype)
            for t in arrived[:2]
        ]
        arrived = arrived._replace(q=q, scale=scale)
    whole = launch(case)
    assert torch.equal(launch(case, arrived=arrived), whole)
    assert torch.equal(launch(case, arrived=arrived, chunk_rows=16), whole)


@on_cpu
@pytest.mark.parametrize("scheme", [s for s in ARRIVING if s != "fp8_tensor_static"])
def test_arriving_quantized_beside_padded_weights(fake, scheme):
    case, arrived = arriving(scheme, {"K": 192, "I": 96})
    assert torch.equal(launch(case, arrived=arrived), launch(case))


def arriving(scheme: str, sizes: dict) -> tuple[Case, QuantizedActivation]:
    """A case of prepared weights, and its hidden_states quantized."""
    case = with_scales(Case("cpu", BF16, scheme, bias=True, **sizes, E=3))
    x, w13, *_ = case.args
    x[case.nowhere] = 0
    arrived = quantize_activation(x, scheme, w13.activation_scale)
    return prepared(case), arrived


def test_router_weights_on_what_arrives_are_refused():
    """The library takes one weight a token, after its products."""
    case = prepared(Case("cpu", BF16, "fp8_tensor_static", top_k=1, on_input=True, **WHOLE, E=3))
    problem = dataclasses.replace(problem_of(case), quantized_input=True, contiguous_weights=True)
    (reason,) = backend_module.supports(problem, H200)
    assert "cannot multiply an input that arrives quantized by router weights" in reason
    problem = problem.replace(router_weight_on_input=False)
    assert backend_module.supports(problem, H200) == []


@on_cpu
@pytest.mark.parametrize("scheme", SCHEMES[1:])
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
def test_quantized(fake, scheme, activation):
    check(Case("cpu", BF16, scheme, activation, bias=True, **WHOLE, E=3))


@on_cpu
@pytest.mark.parametrize(
    "options",
    [
        {"M": 70, "top_k": 4, "expert_map": True, "ids_dtype": torch.int64, "weights_dtype": BF16},
        {"M": 9, "top_k": 1, "on_input": True, "bias": True},
        {"M": 3, "ids": torch.tensor([[-1, 4], [-9, 99], [2**31 - 1, -(2**31)]])},
        {"M": 5, "top_k": 3, "E": 1},
    ],
    ids=lambda o: "-".join(o),
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_routing(fake, options, dtype):
    """Repeats of an expert come as one; ids that name none are skipped, whatever their rows and
    weights hold."""
    check(Case("cpu", dtype, **options))


@on_cpu
@pytest.mark.parametrize("scheme", ["", "fp8_tensor_static", "fp8_block", "mxfp4_mxfp8"])
def test_weighted_and_strided_rows(fake, scheme):
    case = Case("cpu", BF16, scheme, on_input=scheme != "fp8_block", top_k=1, **WHOLE)
    wide = garbage(torch.empty(7, 2 * 128, dtype=BF16))
    case.args[0] = wide[:, ::2].copy_(case.args[0])
    check(case)


@on_cpu
@pytest.mark.parametrize("mistake", ["gate first", "scales exchanged", "factors exchanged"])
def test_the_fake_notices(fake, mistake, monkeypatch):
    """What these tests would not see if the fake took any order."""
    case = Case("cpu", BF16, "fp8_tensor_static" if "fac" in mistake else "fp8_block", **WHOLE)
    if mistake == "gate first":
        monkeypatch.setattr(layouts_of_flashinfer, "up_first", lambda t, pairs: t)
    else:
        right = layer_module._weights

        def wrong(*args):
            kernels, w13, w2, scales = right(*args)
            if mistake == "scales exchanged":
                return kernels, w13, w2, scales[::-1]
            return kernels, w13, w2, [scales[2], scales[1], scales[0], scales[3]]

        monkeypatch.setattr(layer_module, "_weights", wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        check(case)


FOUR_BITS = ("mxfp4_w4a16", "nvfp4", "mxfp4_mxfp8")


@on_cpu
@pytest.mark.parametrize("scheme", FOUR_BITS)
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
def test_sizes_that_128_does_not_divide(fake, scheme, activation):
    """Weights are padded by `prepare`, rows and the output by the launcher (gpt-oss: 2880)."""
    for options in ({"bias": True, "M": 7}, {"top_k": 1, "on_input": True, "M": 5}):
        check(Case("cpu", BF16, scheme, activation, K=160, I=96, E=3, **options))


@on_cpu
@pytest.mark.parametrize("scheme", ["fp8_tensor_static", "nvfp4"])
def test_scales_of_experts(fake, scheme):
    """The activation's output is quantized by its expert's; a token by the largest of all."""
    case = with_scales_of_experts(with_scales(Case("cpu", BF16, scheme, **WHOLE, E=3, M=9)))
    w13 = case.args[1]
    case.args[1] = w13._replace(activation_scale=w13.activation_scale.amax())
    expected = case.reference()
    case.args[1] = w13
    case.args = case.args_for("flashinfer")
    out = launch(case)
    within = tolerance(BF16, scheme, "cuda") + (3e-2 if scheme == "nvfp4" else 0)
    assert_matches(out, expected, within)


# --- capture and tactics -------------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize("scheme", ["", "fp8_block"])
def test_capture_needs_a_call_before(fake, scheme, monkeypatch):
    case = Case("cpu", BF16, scheme, **WHOLE)
    capturing = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    capturing.append(True)
    with pytest.raises(RuntimeError, match="'flashinfer' has not run this call.*warm up first"):
        launch(prepared(case))
    capturing.clear()
    launch(case)
    capturing.append(True)
    launch(case)
    more = prepared(Case("cpu", BF16, scheme, M=8, **WHOLE))
    if scheme == "":  # kernels of fp8_block depend on the number of tokens
        launch(more)
    else:
        with pytest.raises(RuntimeError, match="warm up first"):
            launch(more)


@on_cpu
def test_warmup_measures_once(fake, monkeypatch):
    """Calls outside of `warm`, and of schemes with one tactic, measure nothing."""
    monkeypatch.setattr(library, "numbered", lambda device: True)
    tried = []

    def seconds(call, tactics):
        tried.append(tactics)
        call(tactics)
        return 1.0 + abs(tactics[0] - 6) + abs(tactics[1] - 5)  # -1 is the default

    monkeypatch.setattr(library, "_seconds", seconds)
    case = prepared(Case("cpu", BF16))
    launch(case)
    (runner,) = fake.values()
    assert runner.calls == [[-1, -1]] and not tried
    with backend_module.BACKEND.library.warm(7):
        launch(case)
        first = len(tried)
        launch(case)
        launch(prepared(Case("cpu", BF16, "fp8_block", **WHOLE)))
    assert runner.calls[-1] == [6, 3]
    launch(prepared(Case("cpu", BF16, M=100)))
    assert len(tried) == first and not library.tuning()
    assert runner.calls[-1] == [-1, -1]
    # of 4 tile shapes; those of GEMM2 that add to the output in any order are not for a
    # deterministic call
    assert {t[0] for t in tried} == {-1, *range(8)} - {5}
    assert {t[1] for t in tried} == {-1, *range(4), *range(8, 12)} - {9}
    with backend_module.BACKEND.library.warm(7):
        launch(case, deterministic=False)
    assert {t[1] for t in tried} == {-1, *range(16)} - {9}
    launch(case, deterministic=False)
    assert runner.calls[-1] == [6, 5]
    launch(prepared(Case("cpu", BF16, M=8)))  # the same power of two
    assert runner.calls[-1] == [6, 3]


@pytest.mark.parametrize(
    "counts, deterministic, expected",
    [
        ((10, 18), True, ([*range(8)], [*range(4), *range(8, 12)])),
        ((10, 18), False, ([*range(8)], [*range(16)])),
        ((5, 5), True, ([*range(5)], [*range(5)])),
    ],
)
def test_candidates(counts, deterministic, expected):
    assert library.candidates(*counts, deterministic) == expected


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, machine, reason",
    [
        ({}, H200, "prepare(w13, 'flashinfer', activation='silu') and moe_ops.prepare(w2, 'flash"),
        (
            {"layout": ":up_gate_of_pairs"},
            H200,
            "takes weights in layout ':up_gate', got ':up_gate_",
        ),
        ({"dtype": FP32}, H200, "takes bfloat16 or float16 for plain weights, got torch.float32"),
        ({"scheme": "fp8_block", "dtype": FP16}, H200, "takes bfloat16 for scheme 'fp8_block'"),
        ({"scheme": "fp8_block"}, B200, "runs fp8_block on SM90, got SM100"),
        ({"scheme": "nvfp4"}, H200, "runs nvfp4 on SM100 or SM120, got SM90"),
        ({"scheme": "int4_w4a8"}, H200, "those of int4_w4a8 have one for each token"),
        ({"scheme": "fp8_channel"}, H200, "no kernel for scheme 'fp8_channel'"),
        (
            {"activation": Activation("relu2_no_mul")},
            Machine("cpu"),
            "needs a CUDA device, got cpu",
        ),
        ({}, Machine("cuda", (8, 0)), "needs SM90, SM100 or SM120, got SM80"),
        ({"contiguous_weights": False}, H200, "needs contiguous weights"),
        ({"hidden_size": 36}, H200, "multiples of 8 for plain weights, got 36 and 24"),
    ],
)
def test_reasons(change, machine, reason):
    problem = problem_of(Case("cpu", BF16))
    reasons = backend_module.supports(problem.replace(**change), machine)
    assert any(reason in text for text in reasons), reasons


@on_cpu
def test_memory_that_the_library_would_misread_is_refused(fake, monkeypatch):
    case = prepared(Case("cpu", BF16, "fp8_block", **WHOLE))
    w2 = case.args[2]
    strided = w2.scale.new_empty(*w2.scale.shape[:2], 2)[..., ::2].copy_(w2.scale)
    case.args[2] = w2._replace(scale=strided)
    reasons = backend_module.supports(problem_of(case), machine_of(case.scheme))
    assert reasons == ["flashinfer needs contiguous weights and scales; call .contiguous() once"]
    # the operator may be called as it is
    monkeypatch.setattr(backend_module, "supports", lambda *_: [])
    with pytest.raises(ValueError, match="w2_scale must be contiguous for backend 'flashinfer'"):
        launch(case)


def test_unprepared_weights_of_no_gate_run_as_they_are():
    for activation in ("relu2_no_mul", "silu_no_mul"):
        w = Case("cpu", BF16, activation=activation).args[1]
        assert moe_ops.prepare(w, "flashinfer", activation=activation) is w
    problem = problem_of(Case("cpu", BF16, activation="relu2_no_mul"))
    assert problem.layout == "" and backend_module.supports(problem, H200) == []


# --- traced for a GPU ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme, backend", [("", "flashinfer"), ("", "auto"), ("fp8_block", "auto"), ("nvfp4", "auto")]
)
def test_traces_for_a_gpu(scheme, backend):
    """One dynamic graph with the op, by name or because nothing else takes the weights' layout."""
    torch._dynamo.reset()
    case = prepared(Case("cpu", BF16, scheme, "swiglustep", bias=True, expert_map=True, **WHOLE))
    recorder = Recorder()
    with fake_gpu(machine_of(scheme)):

        def on_gpu(t):
            if type(t) is not torch.Tensor:
                return t._map(on_gpu)
            return torch.empty(t.shape, dtype=t.dtype, device="cuda")

        x, w13, w2, weights, ids = [on_gpu(t) for t in case.args]
        options = {k: on_gpu(v) for k, v in case.options.items() if k != "activation"}

        def layer(x, weights, ids):
            return moe_ops.fused_experts(
                x, w13, w2, weights, ids, activation="swiglustep", backend=backend, **options
            )

        for t in (x, weights, ids):
            torch._dynamo.mark_dynamic(t, 0)
        out = torch.compile(layer, fullgraph=True, backend=recorder.backend)(x, weights, ids)
        ((op, args),) = recorder.calls()
    assert op.name() == "moe_ops::flashinfer_experts" and out.shape == case.args[0].shape
    assert type(args["out"].shape[0]) is torch.SymInt
    assert args["w13"].shape == getattr(case.args[1], "qdata", case.args[1]).shape


@pytest.mark.slow
def test_kernels_compile():
    """For real: the interpreter takes more than the compiler does."""
    pytest.importorskip("triton.backends.nvidia")
    script = SUPPORT / "compile_flashinfer.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    answer = subprocess.run(
        [sys.executable, str(script), "90"], capture_output=True, text=True, env=environment
    )
    assert answer.returncode == 0, answer.stderr
    names = [line for line in answer.stdout.splitlines() if line.startswith("moe_ops_flashinfer")]
    assert set(names) == {f"moe_ops_flashinfer_{k}" for k in ("route", "rows")}
