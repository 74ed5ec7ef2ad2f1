"""Every backend traced for a GPU on a machine that has none, through fake CUDA tensors.

What is traced is what a GPU would run: the plan, the op, its workspaces. No kernel runs here.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moe_ops
from moe_ops import backends
from moe_ops.activations import Activation
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans
from tests.support.fake_cuda import H200, Recorder, fake_gpu
from tests.support.paths import SUPPORT

E, K, I, TOP_K, M = 4, 64, 48, 2, 7
CALLS = ("experts", "batched_experts", "grouped_linear")
BACKENDS = (*backends.list_backends(), "auto", "tiers")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def quantized(*shape: int) -> moe_ops.Float8ExpertTensor:
    qdata = torch.empty(shape, dtype=torch.float8_e4m3fn)
    return moe_ops.Float8ExpertTensor(qdata, torch.empty(*shape[:2], 1), "fp8_channel")


def call_of(kind: str, scheme: str, rows, backend: str, dtype=torch.bfloat16):
    """(function of tensors with `rows` rows, those tensors): one of the public functions."""
    with torch.device("cuda"):
        weight = quantized if scheme else (lambda *shape: torch.empty(shape, dtype=dtype))
        w13, w2 = weight(E, 2 * I, K), weight(E, K, I)
        if kind == "batched_experts":
            # blocks of a longer buffer: strides that depend on an unbacked size cannot be guarded
            x = torch.empty_strided((E, rows, K), (4096 * K, K, 1), dtype=dtype)
            tensors = x, torch.empty(E, dtype=torch.int32)
            return lambda x, n: moe_ops.batched_experts(x, w13, w2, n, backend=backend), tensors
        x = torch.empty(rows, K, dtype=dtype)
        if kind == "grouped_linear":
            bias = torch.empty(E, 2 * I)
            tensors = x, torch.empty(E, dtype=torch.int32)
            return (
                lambda x, n: moe_ops.grouped_linear(x, w13, n, bias=bias, backend=backend),
                tensors,
            )
        expert_map = torch.empty(2 * E, dtype=torch.int32)
        options = {"expert_map": expert_map, "w13_bias": torch.empty(E, 2 * I), "backend": backend}
        tensors = x, torch.empty(rows, TOP_K), torch.empty(rows, TOP_K, dtype=torch.int64)
        return lambda x, w, ids: moe_ops.fused_experts(x, w13, w2, w, ids, **options), tensors


def problem_like(kind: str, scheme: str) -> Problem:
    """The Problem of `call_of`, as far as backends ask."""
    routed = kind == "experts"
    bias = kind != "batched_experts"
    activation = None if kind == "grouped_linear" else Activation("silu")
    return Problem(
        *(kind, E, K, I, 2 * I, TOP_K if routed else 0, torch.bfloat16, scheme),
        options=Options(activation),
        has_bias=bias,
        mapped_experts=2 * E if routed else 0,
    )


def takers(kind: str, scheme: str) -> list[str]:
    """The backends that run a scheme, in order of preference."""
    problem = problem_like(kind, scheme)
    return [b.name for b in backends.BACKENDS if not plans._reasons(b, problem, H200)]


@pytest.mark.parametrize("rows", ("static", "dynamic", "unbacked"))
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("scheme", ("", "fp8_channel"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_traces_for_a_gpu(backend, scheme, kind, rows, monkeypatch):
    able = takers(kind, scheme)
    if backend == "tiers":  # a measured table with all backends that take the call
        table = [(16 << i, name) for i, name in enumerate(able)]
        monkeypatch.setattr(plans, "_measured", lambda *_: tuple(table))
    elif backend not in ("auto", *able):
        reasons = plans._reasons(backends.named(backend), problem_like(kind, scheme), H200)
        with fake_gpu(), pytest.raises(ValueError) as error:
            function, tensors = call_of(kind, scheme, M, backend)
            function(*tensors)
        assert "; ".join(reasons) in str(error.value)
        return
    recorder = Recorder()
    with fake_gpu() as mode:
        size = M
        if rows == "unbacked":
            size = mode.shape_env.create_unbacked_symint()
            torch._check(size >= 0)
        name = backend if backend != "tiers" else "auto"
        function, tensors = call_of(kind, scheme, size, name)
        for tensor in tensors:
            if rows == "dynamic" and tensor.ndim != 1:
                torch._dynamo.mark_dynamic(tensor, 1 if kind == "batched_experts" else 0)
        got = torch.compile(function, fullgraph=True, backend=recorder.backend)(*tensors)
        ((op, args),) = recorder.calls()
        problem = problem_of(function, tensors, monkeypatch)
        plan = plans.plan(problem, H200, name)
        x = tensors[0]
        assert got.device.type == "cuda" and got.dtype == x.dtype
        width = 2 * I if kind == "grouped_linear" else K
        assert got.ndim == x.ndim and got.shape[-1] == width

    assert op is plan.op and args["options"] == plan.options
    chosen = {"auto": able[0], "tiers": "auto" if len(able) > 1 else able[0]}
    expected = chosen.get(backend, backend)
    assert op.name() == f"moe_ops::{expected}_{kind}"
    # the arguments are the op's own, and the workspaces what the plan says for this number of rows
    assert set(args) == {argument.name for argument in op._schema.arguments}
    traced = args["out"].shape[1 if kind == "batched_experts" else 0]
    assert (type(traced) is int) == (rows == "static")
    for name, buffer in zip(
        ("workspace13", "workspace2", "index_workspace"),
        plan.workspace_shapes(traced),
        strict=True,
    ):
        assert args[name].dtype == buffer.dtype
        assert args[name].device.type == "cuda"
        assert [str(size) for size in args[name].shape] == [str(size) for size in buffer.shape]
    weight = args["weight" if kind == "grouped_linear" else "w13"]
    assert weight.dtype == (torch.float8_e4m3fn if scheme else torch.bfloat16)
    assert f"'scheme': '{scheme}'" in args["options"]


@pytest.mark.parametrize("rows", ("dynamic", "unbacked"))
@pytest.mark.parametrize("kind", ("experts", "batched_experts"))
@pytest.mark.parametrize("scheme", ("", "fp8_channel"))
@pytest.mark.parametrize("backend", ("triton", "torch", "tiers"))
def test_bounded_workspaces_are_traced(backend, scheme, kind, rows, monkeypatch):
    """One graph for every number of rows, whose workspaces stop growing."""
    small = dataclasses.replace(H200, total_memory=plans.SHARE_OF_MEMORY * 2**21)
    if backend == "tiers":
        tiers = tuple((16 << i, name) for i, name in enumerate(takers(kind, scheme)))
        monkeypatch.setattr(plans, "_measured", lambda *_: tiers)
    recorder = Recorder()
    with fake_gpu(small) as mode:
        size = mode.shape_env.create_unbacked_symint() if rows == "unbacked" else M
        if rows == "unbacked":
            torch._check(size >= 0)
        name = "auto" if backend == "tiers" else backend
        function, tensors = call_of(kind, scheme, size, name)
        for tensor in tensors:
            if rows == "dynamic" and tensor.ndim != 1:
                torch._dynamo.mark_dynamic(tensor, 1 if kind == "batched_experts" else 0)
        torch.compile(function, fullgraph=True, backend=recorder.backend)(*tensors)
        ((_, args),) = recorder.calls()
        problem = problem_of(function, tensors, monkeypatch)
        plan = plans.plan(problem, small, name)
        assert plan.chunk_rows > 0 and args["options"] == plan.options
        traced = args["out"].shape[1 if kind == "batched_experts" else 0]
        for name, buffer in zip(
            ("workspace13", "workspace2", "index_workspace"),
            plan.workspace_shapes(traced),
            strict=True,
        ):
            assert [str(size) for size in args[name].shape] == [str(s) for s in buffer.shape]
        # bounded, but for batches the rows of one expert
        assert "Min(" in str(args["workspace13"].shape)


def problem_of(function, tensors, monkeypatch) -> Problem:
    """The problem an eager call of `function` states."""
    stated = []
    plan = plans.plan

    def watching(problem, machine, backend="auto"):
        stated.append(problem)
        return plan(problem, machine, backend)

    with monkeypatch.context() as patch:
        patch.setattr(plans, "plan", watching)
        function(*tensors)
    (problem,) = stated
    return problem


@pytest.mark.parametrize("scheme", ("", "fp8_channel"))
@pytest.mark.parametrize("backend", (*backends.list_backends(), "auto"))
def test_tracing_warns_of_nothing(backend, scheme, monkeypatch):
    """Dynamo tells users of every cached function that it traces: plans must not meet one."""
    if backend not in ("auto", *takers("experts", scheme)):
        pytest.skip(f"{backend} does not run {scheme}")
    warned = []
    monkeypatch.setattr(torch._dynamo.utils, "warn_once", lambda text, **_: warned.append(text))
    with fake_gpu():
        function, tensors = call_of("experts", scheme, M, backend)
        torch.compile(function, fullgraph=True, backend=Recorder().backend)(*tensors)
    assert not warned


@pytest.mark.parametrize("capability", ((7, 5), (8, 0), (9, 0), (10, 0), (12, 0)))
def test_every_gpu_has_a_plan(capability):
    machine = Machine("cuda", capability, "some GPU", backends.list_backends())
    recorder = Recorder()
    with fake_gpu(machine):
        function, tensors = call_of("experts", "", M, "auto")
        torch.compile(function, fullgraph=True, backend=recorder.backend)(*tensors)
    ((op, _),) = recorder.calls()
    assert op.name() == f"moe_ops::{'torch' if capability < (8, 0) else 'triton'}_experts"


@pytest.mark.parametrize("scheme", ("", "fp8_channel"))
@pytest.mark.parametrize("strict", (True, False), ids=("strict", "non-strict"))
def test_export_for_a_gpu(strict, scheme):
    """Tensors are made inside the mode, export is called outside of it."""
    with fake_gpu():
        function, tensors = call_of("experts", scheme, M, "auto")

    class Module(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    tokens = torch.export.Dim("tokens", min=1, max=4096)
    with machines.pretend(H200):
        shapes = (tuple({0: tokens} for _ in tensors),)
        program = torch.export.export(Module(), tensors, dynamic_shapes=shapes, strict=strict)
    ours = [str(node.target) for node in program.graph.nodes if "moe_ops" in str(node.target)]
    assert ours == [f"moe_ops.{takers('experts', scheme)[0]}_experts.default"]


def test_the_router_is_one_op_on_a_gpu():
    recorder = Recorder()
    with fake_gpu(), torch.device("cuda"):
        logits, bias = torch.empty(M, 8), torch.empty(8)
        torch._dynamo.mark_dynamic(logits, 0)
        weights, ids = torch.compile(
            lambda x, b: moe_ops.route(x, TOP_K, "deepseek_v3", correction_bias=b),
            fullgraph=True,
            backend=recorder.backend,
        )(logits, bias)
    assert [op.name() for op, _ in recorder.calls()] == ["moe_ops::route"]
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert weights.shape == ids.shape == (M, TOP_K)


def test_wrong_devices_are_named():
    """What only a machine with two kinds of memory can get wrong."""
    with fake_gpu():
        function, (x, weights, ids) = call_of("experts", "", M, "auto")
        for name, args in (
            ("topk_ids", (x, weights, torch.empty_like(ids, device="cpu"))),
            ("topk_weights", (x, torch.empty_like(weights, device="cpu"), ids)),
            ("w13", (torch.empty_like(x, device="cpu"), weights, ids)),
        ):
            with pytest.raises(ValueError, match=f"^{name} must be on "):
                function(*args)


@pytest.fixture(scope="module")
def noop_guard(tmp_path_factory) -> Path:
    """The built noop_guard.cpp: what `x[...]`, copies and attention need of a CUDA build."""
    if torch.version.cuda is not None:
        pytest.skip("this build of torch has the device guard of CUDA")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = Path(torch.__file__).parent
    target = tmp_path_factory.mktemp("guard") / "noop_guard.so"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{folder / 'include'}"]
    command += [str(SUPPORT / "noop_guard.cpp"), f"-L{folder / 'lib'}", "-lc10", "-o", str(target)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return target


@pytest.mark.slow
def test_a_transformers_model_traces_for_a_gpu(noop_guard):
    """In a process of its own: the guard holds for all of it, and cannot be taken back."""
    pytest.importorskip("transformers")
    paths = [str(Path(moe_ops.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.pop("TRITON_INTERPRET", None)
    answer = subprocess.run(
        [sys.executable, str(SUPPORT / "fake_cuda.py"), str(noop_guard)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout.splitlines()[-1]) == {
        "shape": [2, 5, 64],
        "device": "cuda",
        "ops": ["moe_ops::route_tokens", "moe_ops::triton_experts"] * 2,  # and no other
        "rows_are_symbols": [True] * 2,
        "dtypes": ["torch.bfloat16"] * 2,
        "router_dtypes": ["torch.bfloat16"],  # as the router itself would give them
        "routed_by_torch": [],
    }
