"""Backend `flashinfer`: its launcher on a CPU over a fake of the library's module, its layouts, tactics and refusals.

On a GPU the shared matrix and the tests marked `gpu` here run the library itself.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fake_cuda import Recorder, fake_gpu

import moe_ops
from moe_ops import registry
from moe_ops.activations import Activation
from moe_ops.backends import flashinfer
from moe_ops.kernels import flashinfer_library
from moe_ops.library import ExpertsArgs
from moe_ops.problem import Machine
from tests.cases import BF16, Case, assert_matches, garbage, tolerance
from tests.fake_flashinfer import FakeRunner

H200 = Machine("cuda", (9, 0), "NVIDIA H200", registry.list_backends())
B200 = Machine("cuda", (10, 0), "NVIDIA B200", registry.list_backends())
CUDA = torch.cuda.is_available()
on_cpu = pytest.mark.skipif(CUDA, reason="needs triton's interpreter")
on_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
WHOLE = {"K": 128, "I": 128}  # what all schemes take


@pytest.fixture
def fake(monkeypatch):
    """The fake module's runners by family of kernels."""
    runners = {}

    def runner(device, kernels):
        return runners.setdefault(kernels, FakeRunner(kernels))

    monkeypatch.setattr(flashinfer_library, "runner", runner)
    monkeypatch.setattr(flashinfer_library, "_table", lambda gpu: {})
    monkeypatch.setattr(flashinfer_library, "_warm", set())
    return runners


def prepared(case: Case) -> Case:
    if case.scheme == "nvfp4":
        for i, scale in ((1, 0.0013), (2, 0.0021)):
            case.args[i] = case.args[i]._replace(activation_scale=torch.tensor(scale))
    act = case.options["activation"]
    case.args[1] = moe_ops.prepare(case.args[1], "flashinfer", activation=act)
    case.args[2] = moe_ops.prepare(case.args[2], "flashinfer")
    return case


def machine_of(scheme: str) -> Machine:
    """A GPU on which the library has kernels for a scheme."""
    return H200 if (9, 0) in flashinfer._SCHEMES[scheme].gpus else B200


def problem_of(case: Case):
    """The problem of prepared weights."""
    x, w13, w2, _, ids = case.args
    natural = [moe_ops.prepare(w, "torch") for w in (w13, w2)]
    plan = moe_ops.explain(x, *natural, ids, backend="torch", **case.options)
    return dataclasses.replace(plan.problem, layout=getattr(w13, "weight_layout", ""))


def launch(case: Case) -> torch.Tensor:
    """The launcher's output on CPU tensors, out of memory that held garbage."""
    x, w13, w2, weights, ids = case.args
    problem = problem_of(case)
    assert flashinfer.supports(problem, machine_of(case.scheme)) == []
    act = problem.activation
    buffers = [torch.empty(x.shape, dtype=x.dtype)]
    buffers += [
        torch.empty(b.shape, dtype=b.dtype) for b in flashinfer.workspace_shapes(len(x), problem)
    ]
    parts = {}
    for name, w in (("w13", w13), ("w2", w2)):
        for part in ("scale", "zero_point", "global_scale", "channel_scale"):
            parts[f"{name}_{part}"] = getattr(w, part, None)
    args = ExpertsArgs(
        *[garbage(b) for b in buffers],
        x,
        getattr(w13, "qdata", w13),
        getattr(w2, "qdata", w2),
        weights,
        ids,
        a13_scale=getattr(w13, "activation_scale", None),
        a2_scale=getattr(w2, "activation_scale", None),
        **parts,
        w13_bias=case.options.get("w13_bias"),
        w2_bias=case.options.get("w2_bias"),
        expert_map=case.options.get("expert_map"),
        scheme=problem.scheme,
        layout=problem.layout,
        activation=act.name,
        alpha=act.alpha,
        beta=act.beta,
        limit=act.limit,
        router_weight_on_input=problem.router_weight_on_input,
        deterministic=True,
        tiers="",
    )
    flashinfer._launch_experts(args)
    return args.out


def check(case: Case) -> torch.Tensor:
    out = launch(prepared(case))
    ready = case.args[1:3]
    case.args[1:3] = [moe_ops.prepare(w, "torch") for w in ready]  # back, for the oracle
    expected = case.reference()
    within = tolerance(case.dtype, case.scheme, "cuda")
    # the library rounds gate and up rows to 16 bits before it quantizes what follows, so that one e2m1 element in a
    # hundred becomes its neighbour, a third of it away
    within += 3e-2 if case.scheme == "nvfp4" else 0
    assert_matches(
        out, expected, within * (2 if "relu2" in str(case.options["activation"]) else 1)
    )
    assert (out[case.nowhere] == 0).all()
    return out


# --- the launcher over the fake module ------------------------------------------------------------------

ACTIVATIONS = [
    *flashinfer._ACTIVATIONS,
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
@pytest.mark.parametrize("scheme", [s for s in flashinfer._SCHEMES if s])
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
def test_quantized(fake, scheme, activation):
    check(Case("cpu", BF16, scheme, activation, bias=True, **WHOLE, E=3))


# --- traced for a GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", flashinfer._SCHEMES)
@pytest.mark.parametrize("backend", ["flashinfer", "auto"])
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
