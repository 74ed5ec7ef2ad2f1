"""python -m moe_ops.info: what it reports is what the registry says, and questions are checked."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
import torch

from moe_ops import backends as backends_module
from moe_ops import info
from moe_ops.backends.torch import cpu
from moe_ops.ops.problem import Buffer, Machine, Problem, Workspaces
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans

H200 = Machine("cuda", (9, 0), "NVIDIA H200", ("narrow", "wide"))
PROBLEM = Problem("experts", 8, 64, 32, 64, 2, torch.bfloat16)


def fake_backend(name, bytes_per_token, **changes):
    """A backend that takes everything and needs `bytes_per_token` * M bytes of each workspace."""

    def workspace_shapes(M, problem):
        buffer = Buffer((M, bytes_per_token), torch.uint8)
        return Workspaces(buffer, buffer, Buffer((M * bytes_per_token // 4,), torch.int32))

    return dataclasses.replace(
        backends_module.BACKENDS[0],
        name=name,
        available=lambda: None,
        supports=lambda problem, machine: [],
        workspace_shapes=workspace_shapes,
        **changes,
    )


@pytest.fixture
def two_backends(monkeypatch):
    """`narrow` measured fastest up to 16 tokens, `wide` beyond; each knows another scheme
    natively."""
    backends = (
        fake_backend("narrow", 128, native_schemes=("fp8_block",)),
        fake_backend("wide", 512, native_schemes=()),
    )
    monkeypatch.setattr(backends_module, "BACKENDS", backends)
    monkeypatch.setattr(plans, "_measured", lambda *key: ((16, "narrow"), (-1, "wide")))
    with machines.pretend(H200):
        yield backends


def test_explain_follows_the_tiers(two_backends):
    found = info.explain(PROBLEM, torch.device("cuda"), "auto", [1, 16, 17, 4096])
    assert [row["backend"] for row in found["rows"]] == ["narrow", "narrow", "wide", "wide"]
    # the tiered operator's workspace serves every tier: three buffers of the wider one
    assert [row["workspace_bytes"] for row in found["rows"]] == [
        3 * 512 * tokens for tokens in (1, 16, 17, 4096)
    ]
    assert all(row["native"] for row in found["rows"])
    assert found["refused"] == {}


def test_explain_of_a_named_backend_and_emulation(two_backends):
    problem = dataclasses.replace(PROBLEM, scheme="fp8_block")
    for name, bytes_per_token, native in (("narrow", 128, True), ("wide", 512, False)):
        found = info.explain(problem, torch.device("cuda"), name, [4])
        assert found["rows"] == [
            {
                "tokens": 4,
                "backend": name,
                "native": native,
                "workspace_bytes": 3 * 4 * bytes_per_token,
                "chunks": 1,
            }
        ]
        assert ("emulated" in info.format_explanation(found)) is not native


def test_explain_tells_chunks(two_backends, monkeypatch):
    chunked = [dataclasses.replace(backend, chunked=True) for backend in two_backends]
    monkeypatch.setattr(backends_module, "BACKENDS", tuple(chunked))
    # 22 * 1536 bytes and more of each of 1024 tokens
    memory = 22 * 3 * 512 * 1024
    with machines.pretend(dataclasses.replace(H200, total_memory=memory)):
        found = info.explain(PROBLEM, torch.device("cuda"), "auto", [1024, 4096])
    assert [row["chunks"] for row in found["rows"]] == [1, 4]
    assert [row["workspace_bytes"] for row in found["rows"]] == [3 * 512 * 1024] * 2
    last = info.format_explanation(found).splitlines()[-1]
    assert last.split() == ["4096", "wide", "1.50", "MiB", "in", "4", "chunks"]


def test_explain_lists_why_not(two_backends, monkeypatch):
    narrow, wide = two_backends
    refusing = dataclasses.replace(narrow, supports=lambda p, m: ["no odd sizes", "no bias"])
    monkeypatch.setattr(backends_module, "BACKENDS", (refusing, wide))
    found = info.explain(PROBLEM, torch.device("cuda"), "auto", [1])
    assert found["rows"][0]["backend"] == "wide"
    assert found["refused"] == {"narrow": ["no odd sizes", "no bias"]}
    assert "not narrow: no odd sizes; no bias" in info.format_explanation(found)


def test_facts_tell_what_is_missing(monkeypatch):
    missing = dataclasses.replace(
        backends_module.BACKENDS[0],
        name="missing",
        available=lambda: "pip install it",
        interpreted=False,
    )
    monkeypatch.setattr(backends_module, "BACKENDS", (missing, *backends_module.BACKENDS))
    found = info.facts()
    assert json.loads(json.dumps(found)) == found
    assert torch.__version__.startswith(found["versions"]["torch"])  # which may lack +cu130
    assert found["backends"]["missing"] == "pip install it"
    assert found["backends"]["torch"] is None
    assert len(found["gpus"]) == torch.cuda.device_count()
    text = info.format_facts(found)
    assert f"{'missing':18} no: pip install it" in text
    assert f"{'torch':18} available" in text


def test_facts_tell_what_runs_without_a_gpu(monkeypatch):
    """Triton can be imported here, which is not enough."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    triton, torch_backend = (backends_module.named(name) for name in ("triton", "torch"))
    for interpreted, reason in (
        (False, "triton needs a CUDA device, got cpu"),
        (True, "runs in an interpreter on a CPU: only when named"),
    ):
        monkeypatch.setattr("moe_ops.backends.triton.backend.INTERPRETED", interpreted)
        backends = (dataclasses.replace(triton, interpreted=interpreted), torch_backend)
        monkeypatch.setattr(backends_module, "BACKENDS", backends)
        found = info.facts()
        assert found["backends"] == {"triton": reason, "torch": None}
        assert f"{'triton':18} no: {reason}" in info.format_facts(found)


@pytest.mark.parametrize(
    "capability, lines",
    [
        (
            (9, 0),
            {
                "triton": "available",
                "deep_gemm": "available for plain, fp8_block",
                "deep_gemm_fp4": "no: deep_gemm_fp4 runs mxfp4_w4a8 on compute capability 10.x, "
                "12.x, got 9.0",
                "flashinfer": "available for plain, fp8_tensor_static, fp8_block, mxfp4_w4a16, "
                "prepared weights",
                "torch": "available",
            },
        ),
        (
            (10, 0),
            {
                "deep_gemm": "available for plain; fp8_block, mxfp8, prepared weights",
                "deep_gemm_fp4": "available for mxfp4_w4a8, prepared weights",
            },
        ),
        ((7, 5), {"flashinfer": "no: flashinfer needs SM90, SM100 or SM120, got SM75"}),
    ],
)
def test_facts_tell_what_weights_backends_take(capability, lines):
    with machines.pretend(Machine("cuda", capability, "", backends_module.list_backends())):
        found = info.facts()
    assert json.loads(json.dumps(found)) == found
    text = info.format_facts(found).splitlines()
    for name, line in lines.items():
        assert f"  {name:18} {line}" in text


def test_gpus_that_no_test_ran_on_are_named(monkeypatch):
    for capability in ((9, 0), (10, 0)):
        gpu = {"name": "GPU", "capability": list(capability), "memory_gib": 1.0}
        monkeypatch.setattr(info, "_gpus", lambda gpu=gpu: [gpu])
        machine = Machine("cuda", capability, "GPU", ("torch",))
        with machines.pretend(machine):
            found = info.explain(PROBLEM, torch.device("cuda"), "auto", [1])
        for text in (info.format_facts(info.facts()), info.format_explanation(found)):
            assert ("not run on hardware: nothing" in text) == (capability == (10, 0))


def test_facts_tell_whether_the_cpu_kernel_is_in_use(monkeypatch, tmp_path):
    library = tmp_path / "cpu_grouped_mm.so"
    monkeypatch.setattr(cpu, "_LIBRARY", library)
    monkeypatch.setattr(cpu, "_kernels", dict)
    assert info.facts()["cpu_kernel"].startswith("not built: ")
    library.touch()
    assert "AVX2 and AVX-512: built, but this processor lacks AVX2" in info.format_facts(
        info.facts()
    )
    monkeypatch.setattr(cpu, "_kernels", lambda: {torch.bfloat16: None})
    assert info.facts()["cpu_kernel"] is None
    assert "AVX2 and AVX-512: built and in use" in info.format_facts(info.facts())


def test_command_line_prints_the_plan(capsys):
    question = "--explain 8 64 32 2 plain --device cpu --backend torch --m 3 9 --json"
    assert info.main(question.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in found["rows"]] == [3, 9]
    assert {row["backend"] for row in found["rows"]} == {"torch"}
    assert "E=8 top_k=2 K=64 I=32" in found["problem"]


def test_not_gated_activations_have_half_the_rows():
    seen = []

    def remember(problem, machine, backend):
        seen.append(problem)
        raise ValueError("seen")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "plan", remember)
        for activation in ("silu", "relu2_no_mul"):
            question = f"--explain 8 64 32 2 fp8_w8a16 --device cpu --activation {activation}"
            assert info.main(question.split()) == 1
    assert [(p.num_rows, p.intermediate_size) for p in seen] == [(64, 32), (32, 32)]
    assert {p.scheme for p in seen} == {"fp8_w8a16:channel"}


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("8 64 32 9 plain", "TOP_K must be at most E = 8, got 9"),
        ("8 64 x 2 plain", "I must be a positive integer, got 'x'"),
        ("0 64 32 2 plain", "E must be a positive integer, got '0'"),
        ("8 64 32 2 fp9", "scheme must be one of .*got 'fp9'"),
        ("8 64 32 2 int4_w4a16", "w13 .*its 64 columns must be a multiple of 128"),
        ("8 128 64 2 int4_w4a16", "w2 of 128 rows .*its 64 columns must be a multiple of 128"),
        ("8 64 32 2 bf16", "got 'bf16'; 'plain' is for weights as they are, in --dtype"),
        ("8 64 32 2 plain --activation sulu", "activation must be one of .*got 'sulu'"),
        ("8 64 32 2 plain --backend nobody", "backend must be one of .*got 'nobody'"),
        ("8 64 32 2 plain --device cuda:99", "device must exist on this machine, got 'cuda:99'"),
        ("8 64 32 2 plain --device gpu", "device must be a torch device such as 'cpu', got 'gpu'"),
        ("8 64 32 2 plain --device cpu --m -4", "must not be negative, got -4"),
    ],
)
def test_bad_questions_are_answered(question, message, capsys):
    assert info.main(["--explain", *question.split()]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err)


@pytest.mark.slow
def test_runs_as_a_module():
    answer = subprocess.run(
        [sys.executable, "-m", "moe_ops.info", "--json"], capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert tuple(found["backends"]) == backends_module.list_backends()
