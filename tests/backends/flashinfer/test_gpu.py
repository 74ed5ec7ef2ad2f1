"""Backend `flashinfer` over the library itself, on a GPU; and what this repository says of the
library, against its sources.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect

import pytest
import torch
from torch.library import opcheck

import moe_ops
from moe_ops.activations import Activation
from moe_ops.backends.flashinfer import layer as flashinfer
from moe_ops.backends.flashinfer import library, schemes
from moe_ops.backends.flashinfer import relayout as layouts
from tests.matrix import test_opcheck as of_opcheck
from tests.support.cases import (
    BF16,
    FP16,
    Case,
    assert_matches,
    poisoned_memory,
    tolerance,
)
from tests.support.fake_flashinfer import FakeRunner

SM90 = [s for s, how in schemes.SCHEMES.items() if (9, 0) in how.gpus and s.count(":") == 0]
WHOLE = {"K": 256, "I": 256}  # what all schemes take
installed = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer"
)
on_gpu = [
    pytest.mark.gpu,
    installed,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an SM90 GPU",
    ),
]


def gpu(function):
    for mark in on_gpu:
        function = mark(function)
    return function


def case_of(scheme: str, M: int, activation="silu", dtype=BF16, **options) -> Case:
    options = {"E": 8, "top_k": 4, **WHOLE, **options}
    return Case("cuda", dtype, scheme, activation, M=M, **options)


# --- values --------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("scheme", SM90)
@pytest.mark.parametrize("M", [1, 33, 300])  # from 257 on another sort
@pytest.mark.parametrize("bias", [False, True])
def test_values(scheme, M, bias):
    case_of(scheme, M, bias=bias, expert_map=True).check("flashinfer")


@gpu
@pytest.mark.parametrize(
    "scheme, dtype",
    [
        *[(s, d) for s in ("", "fp8_tensor_static") for d in (BF16, FP16)],
        ("mxfp4_w4a16", BF16),
    ],
)
@pytest.mark.parametrize(
    "activation",
    [
        *schemes.ACTIVATIONS,
        Activation("silu", limit=0.7),
        Activation("swigluoai", alpha=1.3, beta=0.5, limit=1.1),
    ],
    ids=lambda a: a if isinstance(a, str) else f"{a.name}-given",
)
def test_activations(scheme, activation, dtype):
    case_of(scheme, 20, activation, dtype, bias=True).check("flashinfer")


@gpu
@pytest.mark.parametrize("scheme", SM90)
@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("M", [40, 300])
def test_routing(scheme, top_k, M):
    """Also numbers of experts per token that the library's sort for few tokens does not know, and
    repeats."""
    case_of(scheme, M, top_k=top_k, ids_dtype=torch.int64, weights_dtype=BF16).check("flashinfer")


@gpu
@pytest.mark.parametrize("scheme", SM90)
def test_router_weight_on_input_and_strided_rows(scheme):
    case = case_of(scheme, 20, top_k=1, on_input=scheme != "fp8_block")
    wide = torch.full((20, 512), float("nan"), dtype=BF16, device="cuda")
    case.args[0] = wide[:, ::2].copy_(case.args[0])
    case.check("flashinfer")


@gpu
@pytest.mark.parametrize("M", [1, 40])
@pytest.mark.parametrize("K, I", [(160, 288), (2880, 2880)])
@pytest.mark.parametrize("options", [{"bias": True}, {"top_k": 1, "on_input": True}])
def test_sizes_that_are_padded(M, K, I, options):
    case_of("mxfp4_w4a16", M, "swigluoai", K=K, I=I, **options).check("flashinfer")


@gpu
@pytest.mark.parametrize("scheme", SM90)
def test_chunks_are_one_piece(scheme):
    """As close to the oracle as one piece is; the library chooses its kernels by the rows."""
    case = case_of(scheme, 100, bias=scheme != "fp8_block")
    x, w13, w2, weights, ids = case.args_for("flashinfer")
    call = {**case.options, "backend": "flashinfer"}
    most = moe_ops.explain(x, w13, w2, ids, **call).num_bytes(32)
    plan = moe_ops.explain(x, w13, w2, ids, **call, max_workspace_bytes=most)
    assert plan.num_chunks(100) == 4
    with poisoned_memory():
        out = moe_ops.fused_experts(x, w13, w2, weights, ids, **call, max_workspace_bytes=most)
    assert_matches(out, case.reference(), tolerance(BF16, scheme, "cuda"))


# --- graphs --------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("scheme", SM90)
@pytest.mark.parametrize("M", [4, 300])
def test_replay_after_the_routing_changed(scheme, M):
    first, second = [case_of(scheme, M, seed=seed, bias=True, expert_map=True) for seed in (0, 1)]
    args = [t.clone() if type(t) is torch.Tensor else t for t in first.args_for("flashinfer")]
    second.args[1:3] = first.args[1:3]
    second.options = first.options

    def call():
        return moe_ops.fused_experts(*args, **first.options, backend="flashinfer")

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for case in (first, second, first):
        for i in (0, 3, 4):
            args[i].copy_(case.args[i])
        out.fill_(float("nan"))
        graph.replay()
        got = out.clone()
        assert_matches(got, case.reference(), tolerance(BF16, scheme, "cuda"))
        assert (got[case.nowhere] == 0).all()
        assert torch.equal(got, call())


@gpu
def test_capture_before_a_call_says_to_warm_up():
    case = case_of("fp8_block", 77)
    args = case.args_for("flashinfer")
    with (
        pytest.raises(RuntimeError, match="'flashinfer' has not run this call.*warm up first"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        moe_ops.fused_experts(*args, **case.options, backend="flashinfer")
    case.check("flashinfer")


@gpu
@pytest.mark.parametrize("scheme", ["", "fp8_block"])
def test_reduce_overhead(scheme):
    """Inductor with CUDA graphs of its own, two numbers of tokens; the library allocates within
    them."""
    torch._dynamo.reset()
    compiled = torch.compile(moe_ops.fused_experts, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for M in (16, 24):
            case = case_of(scheme, M, bias=True)
            args = case.args_for("flashinfer")
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                out = compiled(*args, **case.options, backend="flashinfer").clone()
                assert_matches(out, case.reference(), tolerance(BF16, scheme, "cuda"))


@gpu
@pytest.mark.parametrize("scheme", SM90)
@pytest.mark.parametrize("everything", [False, True])
def test_opcheck(scheme, everything, monkeypatch):
    options = {"bias": everything, "expert_map": everything}
    case = case_of(scheme, 5, ids_dtype=torch.int64 if everything else torch.int32, **options)
    for i in (0, 3):  # rows that hold NaN differ from themselves
        case.args[i] = case.args[i].nan_to_num()
    args = case.args_for("flashinfer")
    of_opcheck.allow_eight_bits(monkeypatch)
    for op, values, options in of_opcheck.recorded(
        lambda: moe_ops.fused_experts(*args, **case.options, backend="flashinfer"),
        "flashinfer_experts",
    ):
        results = opcheck(op, values, options, test_utils=of_opcheck.UTILITIES)
        assert set(results) == set(of_opcheck.UTILITIES)


# --- tactics -------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("scheme", ["", "fp8_tensor_static", "mxfp4_w4a16"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_every_tactic_gives_the_layer(scheme, deterministic, monkeypatch):
    """Those tried for deterministic calls give the same bits each time."""
    case = case_of(scheme, 50)
    case.options["deterministic"] = deterministic
    args = case.args_for("flashinfer")
    moe_ops.fused_experts(*args, **case.options, backend="flashinfer")
    (kernels,) = {key[1] for key in library._warm if _is_of(key[1], scheme)}
    of = library.runner(torch.cuda.current_device(), kernels)
    counts = of.get_gemm1_tactic_count(), of.get_gemm2_tactic_count()
    first, second = library.candidates(*counts, deterministic)
    assert first and second
    case.options.pop("deterministic")
    expected = case.reference()
    ran = 0
    for tried in [(-1, -1), *[(t, -1) for t in first], *[(-1, t) for t in second]]:
        monkeypatch.setattr(library, "tactics", lambda *_, tried=tried: tried)
        number = tried[0] if tried[1] < 0 else counts[0] + tried[1]
        if number >= 0 and of.get_tactic_occupancy(number) <= 0:
            continue

        def call():
            return moe_ops.fused_experts(
                *args, **case.options, deterministic=deterministic, backend="flashinfer"
            )

        try:
            out = call()
        except Exception:  # a tactic that cannot run this shape: `tune` passes over it
            continue
        ran += 1
        # sums in bf16 round once more for each expert of a token
        assert_matches(
            out, expected, tolerance(BF16, scheme, "cuda") * (1 if deterministic else 2)
        )
        if deterministic:
            assert all(torch.equal(out, call()) for _ in range(3)), tried
    assert ran > 4


def _is_of(kernels: library.Kernels, scheme: str) -> bool:
    weight = {"": BF16, "fp8_tensor_static": torch.float8_e4m3fn, "mxfp4_w4a16": torch.uint8}
    wanted = kernels.weight == weight[scheme] and kernels.output == BF16
    return wanted and not (kernels.fp8_block or kernels.packed)


@gpu
def test_warmup_measures(monkeypatch):
    monkeypatch.setattr(library, "_found", {})
    case = case_of("", 64)
    x, w13, w2, weights, ids = case.args_for("flashinfer")

    def call(M):
        return moe_ops.fused_experts(x[:M], w13, w2, weights[:M], ids[:M], backend="flashinfer")

    moe_ops.warmup(call, (8, 64), show_progress=False)
    assert sorted(key[-1] for key in library._found) == [3, 6]
    assert any(tactics != library.DEFAULT for tactics in library._found.values())
    case.check("flashinfer")


@gpu
def test_the_librarys_autotuner_is_not_asked():
    from flashinfer.autotuner import AutoTuner, autotune

    case = case_of("", 16)
    before = dict(AutoTuner.get().profiling_cache)
    with autotune(True):
        case.check("flashinfer")
    assert AutoTuner.get().profiling_cache == before


# --- what is said of the library -----------------------------------------------------------------


@gpu
def test_interleaving_is_the_librarys():
    from flashinfer.fused_moe import (
        interleave_moe_scales_for_sm90_mixed_gemm,
        interleave_moe_weights_for_sm90_mixed_gemm,
    )

    g = torch.Generator().manual_seed(0)
    w = torch.randint(0, 256, (3, 256, 192), generator=g, dtype=torch.uint8).cuda()
    theirs = interleave_moe_weights_for_sm90_mixed_gemm(w, "fp4")
    assert torch.equal(layouts.interleave_e2m1(w), theirs)
    scales = torch.randint(0, 256, (3, 256, 12), generator=g, dtype=torch.uint8).cuda()
    theirs = interleave_moe_scales_for_sm90_mixed_gemm(scales)
    assert torch.equal(layouts.interleave_scales(scales), theirs)


@installed
def test_arguments_stand_in_the_librarys_order():
    """The module's `run_moe` and `init` take what the library's own wrapper hands them, in this
    order."""
    import flashinfer.fused_moe.core as core

    tree = ast.parse(inspect.getsource(core))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (run,) = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "run_moe"]
    theirs = [ast.unparse(arg) for arg in run.args if not isinstance(arg, ast.Starred)]
    ours = list(inspect.signature(FakeRunner.run_moe).parameters)[1:]
    assert theirs[:-3] == ours[:-3]
    assert theirs[-3:] == ["[gemm_tactic_1, gemm_tactic_2]", "enable_pdl", "activation_type"]
    (init,) = [
        c
        for c in calls
        if isinstance(c.func, ast.Attribute) and ast.unparse(c.func) == "module.init"
    ]
    assert [ast.unparse(arg) for arg in init.args] == [
        "x_dtype",
        "weight_dtype",
        "output_dtype",
        "use_deepseek_fp8_block_scale",
        "use_w4_group_scaling",
        "use_mxfp8_act_scaling",
        "use_packed_weights",
    ]


@installed
def test_activations_have_the_librarys_numbers():
    from flashinfer.tllm_enums import ActivationType

    names = {
        "_GELU": "Gelu",
        "_SILU": "Silu",
        "_SWIGLU": "Swiglu",
        "_GEGLU": "Geglu",
        "_RELU2": "Relu2",
        "_SWIGLUSTEP": "SwigluStep",
    }
    for ours, theirs in names.items():
        assert getattr(flashinfer, ours) == ActivationType[theirs]
