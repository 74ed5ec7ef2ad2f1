"""moe_ops.self_check: what agrees, differs, raises and refuses is told as it is."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import threading

import pytest
import torch

import moe_ops
from moe_ops import backends, info
from moe_ops.backend import Backend, Library, register
from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.problem import Machine
from moe_ops.planning import machine as machines
from moe_ops.schemes import SCHEMES
from moe_ops.selfcheck import cases, check, pairs, reference, report
from tests.support.outside import registered

NAME = "told"
launched: list = []  # what the backend of these tests runs, and then what it was called with


@functools.cache
def told() -> Backend:
    """A backend that does what a test says; its operators are defined once."""
    torch_backend = backends.named("torch")

    def launch(a: ExpertsArgs) -> None:
        launched[0](a, torch_backend.launch["experts"])

    return register(
        Backend(
            NAME,
            supports=lambda problem, machine: [],
            workspace_shapes=torch_backend.workspace_shapes,
            launch={"experts": launch},
            devices=("CPU",),
        )
    )


def run(launch, scheme="plain", **changes) -> moe_ops.selfcheck.report.SelfCheck:
    """A check of that backend alone."""
    launched[:] = [launch]
    with registered(dataclasses.replace(told(), **changes)):
        return moe_ops.self_check("cpu", backends=[NAME], schemes=[scheme])


def right(a, launch) -> None:
    launch(a)


def a_little_off(a, launch) -> None:
    launch(a)
    a.out.mul_(1.05)


def off_for_many_tokens(a, launch) -> None:
    launch(a)
    if a.out.shape[0] > 100:
        a.out[50] = 0


def without_biases(a, launch) -> None:
    launch(a._replace(w13_bias=None, w2_bias=None))


def nan(a, launch) -> None:
    launch(a)
    a.out[-1, -1] = math.nan


def nothing_written(a, launch) -> None:
    pass


def not_zero(a, launch) -> None:
    launch(a)
    a.out[0] += 1e-6


def last_result_again(a, launch) -> None:
    launch(a)
    launch(a._replace(out=torch.empty_like(a.out)))


def raises(a, launch) -> None:
    raise RuntimeError("no such instruction\nand a long trace")


@pytest.mark.parametrize("schemes", ["fp8_block", ["plain", "int4_w4a16:g32:zp", "nvfp4"]])
def test_torch_agrees(schemes):
    found = moe_ops.self_check("cpu", backends="torch", schemes=schemes, progress=False)
    names = [schemes] if isinstance(schemes, str) else schemes
    assert [row.scheme or "plain" for row in found.rows] == names
    for row in found.rows:
        assert (row.backend, row.verdict, row.prepared) == ("torch", report.AGREES, False)
        assert row.token_counts == (1, 33, 200)
        assert 0 < row.error <= row.allowed < 0.01
    assert found.ok
    text = str(found).splitlines()
    assert text[0].startswith("moe_ops ") and f"torch {torch.__version__}" in text[0]
    assert text[3].split() == [
        *(names[0], "torch", f"{found.rows[0].error:.1e}", f"{found.rows[0].allowed:.1e}"),
        *("1", "33", "200", "agrees"),
    ]
    assert text[-1].startswith(f"{len(names)} agrees; ")


@pytest.mark.parametrize("launch", [right, last_result_again])
def test_a_right_backend_of_somebody_else_agrees(launch):
    (row,) = run(launch).rows
    assert (row.backend, row.verdict) == (NAME, report.AGREES)


@pytest.mark.parametrize(
    "launch, detail",
    [
        (a_little_off, "error 5.*e-02 at M=33 E=5 top_k=2 K=256 I=128, biases"),
        (off_for_many_tokens, "error .* at M=200 E=5 top_k=3 K=264 I=136, biases"),
        (without_biases, "error .* at M=33"),
        (nan, "holds values that are not finite at M=33"),
        (nothing_written, "holds values that are not finite at M=33"),
        (not_zero, "tokens without an expert are not zero at M=33"),
    ],
)
@pytest.mark.parametrize("scheme", ["plain", "fp8_block"])
def test_a_wrong_backend_differs(launch, detail, scheme):
    found = run(launch, scheme)
    (row,) = found.rows
    assert row.verdict == report.DIFFERS and not found.ok
    assert row.token_counts == (1, 33, 200)
    assert math.isnan(row.error) == (launch in (nan, nothing_written))
    assert re.match(detail, row.detail)
    assert f"differs: {row.detail}" in str(found)


def test_a_backend_that_raises_is_told_by_its_first_line():
    found = run(raises)
    (row,) = found.rows
    assert row.verdict == report.RAISED and row.bad and not found.ok
    line = next(line for line in str(found).splitlines() if NAME in line)
    assert "raised: RuntimeError: no such instruction (at M=33 " in line
    assert "long trace" not in str(found)


def test_a_backend_that_refuses_is_no_error():
    found = run(raises, supports=lambda problem, machine: ["told has no instruction for it"])
    (row,) = found.rows
    assert (row.verdict, row.detail) == (report.REFUSED, "told has no instruction for it")
    assert found.ok and "refused: told has no instruction for it" in str(found)
    missing = run(raises, library=Library(lambda: "told is not installed; pip install told"))
    assert missing.rows[0].detail == "told is not installed; pip install told"


def test_schemes_refused_alike_share_a_line():
    def supports(problem, machine):
        if problem.scheme == "fp8_block":
            return []
        return [f"told has no kernel for scheme {problem.scheme!r}, alas"]

    launched[:] = [right]
    names = ["fp8_block", "mxfp4", "mxfp4:ceil", "mxfp4_w4a16", "nvfp4", "int8_w8a8"]
    with registered(dataclasses.replace(told(), supports=supports)):
        found = moe_ops.self_check("cpu", backends=NAME, schemes=names)
    assert [row.verdict for row in found.rows].count(report.REFUSED) == 5
    lines = [line.split() for line in str(found).splitlines() if NAME in line]
    assert len(lines) == 2 and lines[0][0] == "fp8_block"
    assert " ".join(lines[1]) == f"5 schemes {NAME} refused: told has no kernel for these, alas"
    few = report.SelfCheck("", found.rows[:3], 0.0)
    assert f"int8_w8a8, mxfp4_w4a16  {NAME}" in str(few)


def test_biases_and_odd_sizes_only_where_they_are_taken():
    def supports(problem, machine):
        reasons = ["no bias"] if problem.has_bias else []
        return reasons + (["odd"] if problem.hidden_size % 128 else [])

    seen = []

    def note(a, launch):
        seen.append((a.w13_bias is None, a.w13.shape[2], a.w2.shape[2]))
        launch(a)

    assert run(note, supports=supports).ok
    assert seen == [(True, 256, 128), (True, 256, 128), (True, 384, 256)]
    seen.clear()
    assert run(note).ok
    assert seen == [(False, 256, 128), (False, 256, 128), (False, 264, 136)]


@pytest.mark.parametrize(
    "scheme, backend, calls",
    [
        ("", "triton", {False: (8, True, False)}),
        ("mxfp4_w4a16", "triton", {False: (8, True, False), True: (8, True, False)}),
        ("", "deep_gemm", {False: (128, False, False)}),
        ("fp8_block", "deep_gemm", {False: (128, False, False)}),
        ("", "flashinfer", {True: (8, True, False)}),
        ("fp8_channel", "cutlass", {False: (128, False, False)}),
    ],
)
def test_calls_of_our_backends_on_an_h200(scheme, backend, calls, monkeypatch):
    """(multiple of sizes, biases, known global scale) of the last shape, by whether weights are
    prepared."""
    monkeypatch.setattr("moe_ops.backends.triton.backend.INTERPRETED", False)
    h200 = Machine("cuda", (9, 0), "NVIDIA H200", backends.list_backends(), triton="3.6.0")
    found = list(pairs.pairs_of(scheme, backends.named(backend), h200, named=True))
    first = {pair.prepared: pair.taken[check.SHAPES[2]][0] for pair in found}
    assert {p: (c.multiple, c.bias, c.known_scale) for p, c in first.items()} == calls


def test_nvfp4_is_prepared_with_a_known_scale():
    b200 = Machine("cuda", (10, 0), "NVIDIA B200", backends.list_backends(), triton="3.8.0")
    (pair,) = pairs.pairs_of("nvfp4", backends.named("flashinfer"), b200, named=False)
    assert pair.prepared and all(
        case.known_scale for group in pair.taken.values() for case in group
    )


def test_what_is_left_when_the_time_is_over_is_told():
    found = moe_ops.self_check("cpu", backends="torch", schemes=["plain", "mxfp4"], seconds=0)
    assert [row.verdict for row in found.rows] == [report.NOT_RUN] * 2
    assert "plain, mxfp4  torch" in str(found) and "not run: out of time" in str(found)


@pytest.mark.slow
def test_a_call_that_does_not_end_is_left_behind(monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(check, "GRACE", 1.0)
    launched[:] = [lambda a, launch: done.wait(60)]
    with registered(told()):
        found = moe_ops.self_check(
            "cpu", backends=[NAME, "torch"], schemes=["plain", "mxfp4"], seconds=0.5
        )
        done.set()
    (row,) = [row for row in found.rows if row.backend == NAME and "did not end" in row.detail]
    assert row.verdict == report.NOT_RUN and "at M=33" in row.detail
    assert found.ok and found.seconds < 30


def test_backends_of_few_schemes_run_last():
    """They often build kernels at their first call."""
    h200 = Machine("cuda", (9, 0), "NVIDIA H200", backends.list_backends(), triton="3.6.0")
    with machines.pretend(h200):
        names = ["torch", "deep_gemm", "flashinfer", "cutlass"]
        found = pairs.all_pairs(torch.device("cuda"), names, list(SCHEMES))
    calls = check._Calls(found, torch.device("cuda"), False, 0.0).calls
    first = [pair.backend.name for pair, shape in calls if shape == cases.SHAPES[0]]
    assert first == ["torch"] * len(SCHEMES) + sorted(first[len(SCHEMES) :], key=names.index)
    assert set(first) == set(names)
    order = [shape for _, shape in calls]
    assert order == sorted(order, key=cases.SHAPES.index)


def test_a_first_product_in_16_bits_agrees():
    """As libraries return it: activations quantized afterwards have other codes here and there."""
    for scheme in ("fp8_tensor_static", "fp8_channel_tensor_static"):
        allowed = cases.allowed_error(scheme, "cuda")
        for shape in cases.SHAPES:
            case = cases.Case(scheme, shape, 128, False)
            given, exact = cases.expected(case)
            out = reference.experts(*given, rounded=torch.bfloat16).bfloat16()
            assert cases.check(out, case, allowed).error <= allowed
            # the scale of weights is wrong for one expert
            w2 = given.w2._replace(scale=given.w2.scale.clone())
            w2.scale[2] *= 1.25
            out = reference.experts(*given._replace(w2=w2))
            assert cases.check(out, case, allowed).error > allowed
    cases.forget()


@pytest.mark.slow  # another process imports torch
def test_what_follows_a_lost_gpu_runs_in_another_process(monkeypatch):
    def why_lost(device, pair):
        return "this process lost the GPU"

    monkeypatch.setattr(check, "_why_lost", why_lost)
    launched[:] = [raises]
    with registered(told()):
        found = moe_ops.self_check("cpu", backends=[NAME, "torch"], schemes=["plain", "mxfp4"])
    told_of = {(row.backend, row.scheme): row for row in found.rows}
    assert told_of[NAME, ""].verdict == report.RAISED
    # that process knows nothing of a backend that is registered in this one
    assert told_of[NAME, "mxfp4"].verdict == report.NOT_RUN
    assert told_of[NAME, "mxfp4"].detail == "this process lost the GPU"
    for scheme in ("", "mxfp4"):
        assert told_of["torch", scheme].verdict == report.AGREES
        assert told_of["torch", scheme].token_counts == (1, 33, 200)


def test_the_command_line_says_it_by_its_exit_status(capsys):
    command = ["--check", "--device", "cpu", "--schemes", "fp8_block", "--backends", NAME]
    for launch, status in ((right, 0), (a_little_off, 1), (raises, 1)):
        launched[:] = [launch]
        with registered(told()):
            assert info.main(command) == status
            text = capsys.readouterr().out
            assert info.main([*command, "--json"]) == status
        found = json.loads(capsys.readouterr().out)
        assert found["ok"] == (status == 0)
        (row,) = report.from_json(json.dumps(found))
        assert row.token_counts == (1, 33, 200)
        assert f"  {row.verdict}" in text and text.startswith(found["machine"])


def test_json_has_no_nan():
    launched[:] = [nan]
    with registered(told()):
        found = moe_ops.self_check("cpu", backends=NAME, schemes="plain")
    assert json.loads(json.dumps(report.to_json(found), allow_nan=False))["ok"] is False


def test_sizes_that_prepare_refuses_give_way_to_others(monkeypatch):
    """Static facts do not tell all: `prepare` refuses a weight by its shape."""
    from moe_ops import tensors
    from moe_ops.ops import relayout

    def prepare(weight, backend, *, activation=None):
        if weight.shape[-1] % 128:
            raise ValueError("weight must have columns that 128 divides")
        return weight

    monkeypatch.setattr(tensors, "prepare", prepare)
    monkeypatch.setattr(
        relayout, "variants", lambda p, name: iter([dataclasses.replace(p, layout="told_words")])
    )
    seen = []

    def note(a, launch):
        seen.append(a.w13.shape[2])
        launch(a)

    (row,) = run(note, "mxfp4_w4a16").rows
    assert (row.verdict, row.prepared, row.token_counts) == (report.AGREES, True, (1, 33, 200))
    assert seen == [128, 128, 192]  # bytes of two elements


@pytest.mark.parametrize(
    "options, message",
    [
        ({"backends": "nobody"}, "backends must be one of .*, got 'nobody'"),
        ({"backends": ["auto"]}, "backends must name single backends, got 'auto'"),
        ({"schemes": ["fp9"]}, "scheme must be one of .*got 'fp9'"),
        ({"device": "gpu"}, "device must be a torch device such as 'cpu', got 'gpu'"),
        ({"device": "cuda:99"}, "device must exist on this machine, got 'cuda:99'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        moe_ops.self_check(**options)


def test_a_machine_that_no_test_ran_on_is_told(monkeypatch):
    monkeypatch.setattr("moe_ops.environment.nvidia_driver", lambda: "580.95")
    known = {(9, 0): "H200 (SM90, driver 580.95),", (10, 0): "B200 (SM100, driver 580.95), which"}
    for capability, text in known.items():
        here = Machine("cuda", capability, text.split()[0], backends.list_backends())
        with machines.pretend(here):
            line = report.machine_line(torch.device("cuda"))
        assert f"moe_ops on {text}" in line.replace(line.split()[1], "", 1).replace("  ", " ")
        assert "\n" not in line


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_everything_on_this_gpu_agrees():
    found = moe_ops.self_check("cuda")
    print(found)
    assert found.ok, str(found)
    ran = {row.backend for row in found.rows if row.verdict == report.AGREES}
    assert {"triton", "torch"} <= ran
    assert found.seconds < 120
