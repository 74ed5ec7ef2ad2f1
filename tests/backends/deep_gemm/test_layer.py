"""Backend deep_gemm: its kernels under Triton's interpreter around products in plain torch, and on
a GPU the real ones."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import re
import sys
from unittest import mock

import pytest
import torch

import moe_ops
from moe_ops.activations import NAMES, Activation
from moe_ops.backends.deep_gemm import backend
from moe_ops.backends.deep_gemm import layer as experts
from moe_ops.backends.deep_gemm import library as dg
from moe_ops.kernels import launch
from moe_ops.kernels.place import layout as layouts
from moe_ops.meta.workspace import padded_rows
from moe_ops.numerics import quantize_activation
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem
from moe_ops.pipeline import layer as pipeline
from moe_ops.planning import bind
from moe_ops.planning import machine as machines
from tests.support import fake_deep_gemm, oracle
from tests.support.cases import (
    BF16,
    FP16,
    Case,
    assert_matches,
    garbage,
    poisoned_memory,
    tolerance,
)
from tests.support.fake_cuda import Recorder, fake_gpu
from tests.support.places import CUDA, DEVICES, devices

FORMATS = ["", "fp8_block", "fp8_block:ue8m0"]
schemes = pytest.mark.parametrize("scheme", FORMATS, ids=["plain", "fp8_block", "ue8m0"])


def forget() -> None:
    machines._machine_facts_cached.cache_clear()
    bind.forget()
    dg.library.cache_clear()


@pytest.fixture(autouse=True)
def products(monkeypatch, request):
    """On a CPU the library is one of plain torch."""
    if not CUDA:
        fake_deep_gemm.install(monkeypatch)
    forget()
    yield
    monkeypatch.undo()
    forget()


def case_of(device: str, scheme: str = "", **options) -> Case:
    return Case(device, BF16, scheme, **{"K": 256, "I": 128, **options})


def rounded_first_product():
    """The oracle with the first product rounded to bf16, as the library returns it.

    That alone moves one e4m3 activation in a hundred to its neighbour: 1e-2 of the result, and
    4e-2 of a single row.
    """
    real = oracle.activation
    return mock.patch.object(oracle, "activation", lambda x, **o: real(x.to(BF16).double(), **o))


def reference(case: Case) -> torch.Tensor:
    with rounded_first_product():
        return case.reference()


def check(case: Case, **options) -> torch.Tensor:
    out = case.run("deep_gemm", **options)
    within = tolerance(BF16, case.scheme, case.device)
    squared = str(case.options["activation"]).startswith("relu2")
    assert_matches(out, reference(case), within * (2 if squared else 1))
    assert out.dtype == BF16 and (out[case.nowhere] == 0).all()
    return out


# --- values --------------------------------------------------------------------------------------


def of_activations():
    """All on a GPU; under the interpreter all in bf16, and one of each kind quantized."""
    some = ("silu", "swigluoai", "relu2_no_mul")
    for place in DEVICES:
        for scheme in ("", "fp8_block"):
            for activation in (*NAMES, Activation("silu", limit=0.5)):
                if place.values[0] == "cuda" or not scheme or activation in some:
                    values = (place.values[0], scheme, activation)
                    yield pytest.param(*values, marks=place.marks, id=f"{values}")


@pytest.mark.parametrize("device, scheme, activation", of_activations())
def test_activations(device, scheme, activation):
    sizes = {"M": 5} if device == "cpu" else {"M": 40, "I": 256}
    check(case_of(device, scheme, activation=activation, **sizes))


OPTIONS = [
    {"M": 0},
    {"M": 1, "top_k": 4},
    {"E": 20, "top_k": 6, "K": 128},
    {"E": 1, "top_k": 3},
    {"M": 3, "ids": torch.tensor([[-1, 4], [-9, 99], [2**31 - 1, -(2**31)]])},
    {"expert_map": True, "ids_dtype": torch.int64, "weights_dtype": BF16},
    {"M": 70, "K": 128, "ids": torch.full((70, 2), 2)},  # more than a block of rows
]


@devices
@schemes
@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_options(device, scheme, options):
    check(case_of(device, scheme, **options))


@pytest.mark.slow
@devices
@schemes
def test_more_columns_than_a_program_takes(device, scheme):
    check(case_of(device, scheme, M=1, top_k=1, K=2304, I=384, ids=torch.tensor([[2]])))


@devices
@schemes
def test_router_weights_on_the_input(device, scheme):
    """They meet the first product after it was rounded: so e4m3 values move as described above."""
    case = case_of(
        device, scheme, M=20, K=128, top_k=1, on_input=True, weights_dtype=FP16, expert_map=True
    )
    assert_matches(case.run("deep_gemm"), case.reference(), tolerance(BF16, scheme, "cuda"))


@devices
@pytest.mark.parametrize("columns", [False, True])
def test_what_arrives_quantized_is_copied(device, columns):
    """Bit for bit as if it were quantized here, whatever rows without experts hold."""
    case = case_of(device, "fp8_block", expert_map=True, M=20)
    x, *others = case.args
    x[case.nowhere] = 0
    q, scale, *_ = quantize_activation(x, "fp8_block")
    if columns:
        scale = scale.t().contiguous().t()
    scale[case.nowhere] = torch.nan
    options = {**case.options, "hidden_states_scale": scale, "backend": "deep_gemm"}
    with poisoned_memory():
        out = moe_ops.fused_experts(q, *others, **options)
    assert torch.equal(out, case.run("deep_gemm"))


@devices
@pytest.mark.parametrize("T, in_place", [(6, False), (128, True)])
def test_batches_that_arrive_quantized(device, T, in_place, monkeypatch):
    """Whole blocks of rows with scales as the products read them are read where they are."""
    scattered = []
    scatter = pipeline.scatter
    monkeypatch.setattr(pipeline, "scatter", lambda *a: scattered.append(a) or scatter(*a))
    case = case_of(device, "fp8_block")
    _, w13, w2, *_ = case.args
    x = torch.randn(4, T, 256).to(BF16).to(device)
    counts = torch.tensor([3, 0, 5, 1], device=device)
    want = moe_ops.batched_experts(x, w13, w2, counts, backend="deep_gemm")
    q, scale, *_ = quantize_activation(x, "fp8_block")
    scattered.clear()
    for s in (scale, scale.mT.contiguous().mT):
        got = moe_ops.batched_experts(
            q, w13, w2, counts, backend="deep_gemm", hidden_states_scale=s
        )
        for e, count in enumerate(counts.tolist()):
            assert torch.equal(got[e, :count], want[e, :count])
    assert len(scattered) == (1 if in_place else 2)


@devices
@schemes
def test_strided_inputs(device, scheme):
    """Rows, routing tensors and map with strides, NaN in between."""
    case = case_of(device, scheme, expert_map=True)
    expected = reference(case)

    def strided(t, wide):
        wide = garbage(t.new_empty(wide))
        return wide[tuple(slice(1, 2 * size + 1, 2) for size in t.shape)].copy_(t)

    x, w13, w2, weights, ids = case.args
    x, weights = strided(x, (16, 600)), strided(weights.t(), (6, 16)).t()
    case.args = [x, w13, w2, weights, strided(ids, (16, 6))]
    case.options["expert_map"] = strided(case.options["expert_map"], (17,))
    assert_matches(case.run("deep_gemm"), expected, tolerance(BF16, scheme, device))


@devices
@schemes
def test_chunks_are_one_piece(device, scheme):
    """The last of three has fewer tokens. Same kernels, so the same bits."""
    # all pairs of most tokens are here: one row that is left of five has errors of its own
    case = case_of(device, scheme, M=37, E=2, K=128)
    whole = check(case)
    call = {**case.options, "backend": "deep_gemm"}
    x, w13, w2, _, ids = case.args
    most = moe_ops.explain(x, w13, w2, ids, **call).num_bytes(16)
    with mock.patch.object(dg, "grouped_gemm", wraps=dg.grouped_gemm) as gemm, poisoned_memory():
        parts = moe_ops.fused_experts(*case.args, **call, max_workspace_bytes=most)
    assert gemm.call_count == 6
    assert len({call.args[4] for call in gemm.call_args_list}) == 1  # rows that are expected
    assert torch.equal(parts, whole)


@devices
@schemes
def test_chunks_of_batches_are_one_piece(device, scheme):
    case = case_of(device, scheme, K=128)
    _, w13, w2, *_ = case.args
    x = torch.randn(4, 6, 128, generator=torch.Generator().manual_seed(1)).to(BF16).to(device)
    counts = torch.tensor([3, 0, 6, 4], dtype=torch.int32, device=device)
    inside = torch.arange(6, device=device) < counts[:, None]
    call = {**case.options, "backend": "deep_gemm"}
    whole = moe_ops.batched_experts(x, w13, w2, counts, **call)
    with mock.patch.object(dg, "masked_gemm", wraps=dg.masked_gemm) as gemm, poisoned_memory():
        # room for the 128 rows of two experts, and not of three
        parts = moe_ops.batched_experts(x, w13, w2, counts, **call, max_workspace_bytes=250_000)
    assert gemm.call_count == 4
    assert torch.equal(parts[inside], whole[inside])


@devices
@schemes
def test_repeatable(device, scheme):
    case = case_of(device, scheme, top_k=3)
    first = check(case)
    for _ in range(1 if device == "cpu" else 10):
        assert torch.equal(first, case.run("deep_gemm", poison=False))


@devices
@schemes
@pytest.mark.parametrize("T, strided", [(6, False), (130, True), (128, False), (40, True)])
def test_batched(device, scheme, T, strided, monkeypatch):
    """Rows behind each count hold NaN; in the products' whole blocks of rows they reach into the
    next expert's.

    Where x is strided, two programs share what rows an expert has.
    """
    if strided:
        monkeypatch.setattr(layouts, "MAX_PROGRAMS", 7)
    I = 640 if T == 40 else 128
    case = case_of(device, scheme, activation="swigluoai_uninterleave", I=I)
    _, w13, w2, *_ = case.args
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4, T, 256, generator=g).to(BF16).to(device)
    if strided:
        x = torch.stack((x, x.new_full(x.shape, torch.nan)), 2)[:, :, 0]
    # one product of many rows takes the fake library long
    counts = [3, 0, 5, -1] if T > 40 and device == "cpu" else [T - 1, 0, T + 3, -1]
    counts = torch.tensor(counts, dtype=torch.int64, device=device)
    for e, count in enumerate(counts.tolist()):
        x[e, max(count, 0) :] = torch.nan
    with poisoned_memory():
        out = moe_ops.batched_experts(x, w13, w2, counts, backend="deep_gemm", **case.options)
    with rounded_first_product():
        expected = oracle.batched(x, w13, w2, counts.clamp(max=T), **case.options)
    here = ~expected.isnan()
    assert_matches(out[here], expected[here], tolerance(BF16, scheme, device))


# --- what is refused -----------------------------------------------------------------------------


H200 = Machine("cuda", (9, 0), "NVIDIA H200", ("deep_gemm",))
PROBLEM = Problem(
    *("experts", 4, 256, 128, 256, 2, BF16, "fp8_block"), options=Options(Activation("silu"))
)


def test_supports_its_problems():
    assert backend.supports(PROBLEM, H200) == []
    assert backend.supports(dataclasses.replace(PROBLEM, scheme=""), H200) == []


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"hidden_size": 192}, "deep_gemm needs K to be a multiple of 128, got 192"),
        ({"intermediate_size": 64}, "deep_gemm needs I to be a multiple of 128, got 64"),
        ({"scheme": "fp8_channel"}, "deep_gemm has no kernel for scheme 'fp8_channel'"),
        ({"dtype": FP16}, "deep_gemm takes bfloat16 hidden_states, got torch.float16; use "
                          "backend='triton' or 'auto'"),
        ({"has_bias": True}, "deep_gemm takes no bias; use backend='triton' or 'auto'"),
        ({"contiguous_weights": False}, "deep_gemm needs contiguous weights and scales; call "
                                        ".contiguous() on them once"),
        ({"layout": "other"}, "deep_gemm takes weights in their natural layout, got 'other'; "
            "moe_ops.prepare(weight, 'torch') brings it back"),
    ],
)  # fmt: skip
def test_reasons(changes, reason):
    assert backend.supports(PROBLEM.replace(**changes), H200) == [reason]


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    forget()
    with pytest.raises(ImportError, match="not installed; pip install 'sgl-deep-gemm>=0.1.5'"):
        case_of("cpu").run("deep_gemm")


@pytest.mark.parametrize("version", ["0.1.5", "0.1.5.post2", "0.1.5+cu130", "0.1.4", "0.1.50"])
def test_available_names_the_version(version, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(torch, "__version__", "2.12.0+cu130")
    older = "needs sgl-deep-gemm 0.1.5 or newer, got 0.1.4; pip install 'sgl-deep-gemm>=0.1.5'"
    assert backend.available() == (older if version == "0.1.4" else None)
    newer = "sgl-deep-gemm 0.1.50 is newer than tested: no test ran with one after "
    said = backend.BACKEND.library.untested_version
    assert said == (newer + backend.TESTED[1] if version == "0.1.50" else None)


def test_a_wheel_without_what_it_requires_is_refused(monkeypatch):
    """Else "auto" would take it, and its import would fail at the first call."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    known = {"sgl-deep-gemm": "0.1.5", "numpy": "2.0"}

    def version(name: str) -> str:
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    required = ["numpy>=1", "apache-tvm-ffi==0.1.11", 'pytest; extra == "dev"']
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert backend.available() == (
        "sgl-deep-gemm needs apache-tvm-ffi==0.1.11, which is not installed; "
        "pip install 'apache-tvm-ffi==0.1.11'"
    )
    known["apache-tvm-ffi"] = "0.1.11"
    assert backend.available() is None


def test_wheels_that_take_no_tensor_of_this_torch_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.7")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert backend.available() == (
        "sgl-deep-gemm 0.1.7 takes no tensor of torch 2.11.0+cu130; "
        "pip install 'sgl-deep-gemm>=0.1.5,<0.1.6'"
    )


@pytest.mark.parametrize("has_symbol", [False, True])
def test_wheels_that_torch_cannot_load_are_refused(has_symbol, monkeypatch, tmp_path):
    """Before they end the process: from 0.2 on they need a symbol that older torch lacks."""
    header = tmp_path / "include" / "c10" / "cuda" / "CUDAException.h"
    header.parent.mkdir(parents=True)
    header.write_text("struct CUDAErrorLogCapture {};" if has_symbol else "")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.5")
    reason = "is built for a newer torch than .*; pip install 'sgl-deep-gemm>=0.1.5,<0.2'"
    found = backend.available()
    assert found is None if has_symbol else re.search(reason, found)


def test_a_deep_gemm_of_another_name_is_not_taken(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "sgl-deep-gemm":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "that pip does not know by this name" in (backend.available() or "")


def test_scales_that_are_not_contiguous_are_named():
    case = case_of("cuda" if CUDA else "cpu", "fp8_block", K=256, I=256)
    w13 = case.args[1]
    case.args[1] = w13._replace(scale=w13.scale.mT.contiguous().mT)
    with pytest.raises(ValueError, match="deep_gemm needs contiguous weights and scales"):
        case.run("deep_gemm")


def test_capture_before_a_warm_call_is_refused(monkeypatch):
    """And nothing is launched."""
    case = case_of("cpu")
    monkeypatch.setattr(dg, "_warm", set())
    monkeypatch.setattr(pipeline, "run", lambda *_: pytest.fail("launched"))
    monkeypatch.setattr(dg, "library", lambda: pytest.fail("loaded"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(launch, "gpu", lambda _: launch.Gpu(227 << 10, True, True))
    with pytest.raises(RuntimeError, match="'deep_gemm' has no compiled kernel .* warm up first"):
        case.run("deep_gemm")


@devices
@pytest.mark.slow
def test_groups_are_padded_to_what_the_library_says(device, monkeypatch):
    """Also when it changes between calls, as it may; not where workspaces would be too small."""
    case = case_of(device, "fp8_block", M=40)
    module = sys.modules.get("deep_gemm") or importlib.import_module("deep_gemm")
    before = module.get_mk_alignment_for_contiguous_layout()
    try:
        for rows in (128, 64, 128):
            module.set_mk_alignment_for_contiguous_layout(rows)
            check(case)
        module.set_mk_alignment_for_contiguous_layout(256)
        with pytest.raises(RuntimeError, match="alignment .* must divide 128, got 256"):
            case.run("deep_gemm")
    finally:
        module.set_mk_alignment_for_contiguous_layout(before)


# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs, experts, rows", [
    (1, 4, 128), (512, 4, 128), (516, 4, 256), (1024, 4, 256), (1540, 4, 512), (32768, 8, 4096),
])  # fmt: skip
def test_expected_rows(pairs, experts, rows):
    assert dg.expected_rows(pairs, experts) == rows


@pytest.mark.parametrize("scheme", ["", "fp8_block"])
@pytest.mark.parametrize("M", [1, 7, 300, 4096])
@pytest.mark.parametrize("E, top_k", [(1, 1), (3, 2), (256, 8)])
def test_workspaces_hold_what_is_carved(scheme, M, E, top_k):
    problem = dataclasses.replace(PROBLEM, scheme=scheme, num_experts=E, top_k=top_k)
    first, second, index = backend.workspace_shapes(M, problem)
    rows = padded_rows(M, top_k, E, 128)
    assert rows % 128 == 0 and rows >= M * top_k
    assert second.shape == (rows, 256) and second.dtype == BF16
    assert first.shape[0] == rows and index.shape[0] == layouts.index_parts(M * top_k, E).end
    buffer = torch.empty(first.shape, dtype=first.dtype)
    for columns in (256, 128):
        form = experts.format_of(scheme, "")
        data, scale, *_ = experts.rows_in(buffer, (rows, columns), form)
        assert data.shape == (rows, columns) and data.is_contiguous()
        if scheme:
            assert scale.shape == (rows, columns // 128) and scale.stride() == (1, rows)
            assert scale.data_ptr() >= data.data_ptr() + data.numel()
            assert scale.data_ptr() % 16 == 0


# --- tracing -------------------------------------------------------------------------------------


@pytest.mark.skipif(CUDA, reason="for machines without CUDA")
@pytest.mark.parametrize(
    "scheme, rows", [("fp8_block", "static"), ("fp8_block", "dynamic"), ("", "unbacked")]
)
def test_traces_without_the_library(scheme, rows, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    forget()
    torch._dynamo.reset()
    recorder = Recorder()
    with fake_gpu() as mode, torch.device("cuda"):
        M = 7
        if rows == "unbacked":
            M = mode.shape_env.create_unbacked_symint()
            torch._check(M >= 0)
        w13, w2 = weight(4, 256, 256, scheme), weight(4, 256, 128, scheme)
        tensors = (torch.empty(M, 256, dtype=BF16), torch.empty(M, 2))
        tensors += (torch.empty(M, 2, dtype=torch.int32),)
        if rows == "dynamic":
            for tensor in tensors:
                torch._dynamo.mark_dynamic(tensor, 0)

        def layer(x, weights, ids):
            return moe_ops.fused_experts(x, w13, w2, weights, ids, backend="deep_gemm")

        torch.compile(layer, fullgraph=True, backend=recorder.backend)(*tensors)
        ((op, args),) = recorder.calls()
        traced = args["out"].shape[0]
        problem = dataclasses.replace(PROBLEM, scheme=scheme)
        for name, buffer in zip(
            ("workspace13", "workspace2", "index_workspace"),
            backend.workspace_shapes(traced, problem),
            strict=True,
        ):
            assert args[name].dtype == buffer.dtype
            assert [str(size) for size in args[name].shape] == [str(size) for size in buffer.shape]
    assert op.name() == "moe_ops::deep_gemm_experts"
    assert (type(traced) is int) == (rows == "static")


def weight(E: int, N: int, K: int, scheme: str):
    if not scheme:
        return torch.empty(E, N, K, dtype=BF16)
    scale = torch.empty(E, -(-N // 128), -(-K // 128))
    qdata = torch.empty(E, N, K, dtype=torch.float8_e4m3fn)
    return moe_ops.Float8ExpertTensor(qdata, scale, scheme)
