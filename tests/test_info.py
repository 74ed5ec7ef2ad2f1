"""python -m moe_ops.info: what it reports is what the registry says, and questions are checked."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch

from moe_ops import backends as backends_module
from moe_ops import environment, info
from moe_ops.activations import resolve
from moe_ops.backend import Library, Takes
from moe_ops.backends.cutlass import library as cutlass
from moe_ops.backends.torch import cpu
from moe_ops.csrc import build
from moe_ops.ops.problem import Buffer, Machine, Problem, Workspaces
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans

H200 = Machine("cuda", (9, 0), "NVIDIA H200", ("narrow", "wide"))
PROBLEM = Problem("experts", 8, 64, 32, 64, 2, torch.bfloat16)


def flat(text):
    """A text without its line breaks and indentation."""
    return " ".join(text.split())


def fake_backend(name, bytes_per_token, **changes):
    """A backend that takes everything and needs `bytes_per_token` * M bytes of each workspace."""

    def workspace_shapes(M, problem):
        buffer = Buffer((M, bytes_per_token), torch.uint8)
        return Workspaces(buffer, buffer, Buffer((M * bytes_per_token // 4,), torch.int32))

    return dataclasses.replace(
        backends_module.BACKENDS[0],
        name=name,
        library=Library(),
        supports=lambda problem, machine: [],
        workspace_shapes=workspace_shapes,
        **changes,
    )


@pytest.fixture
def two_backends(monkeypatch):
    """`narrow` measured fastest up to 16 tokens, `wide` beyond; each knows another scheme
    natively."""
    backends = (
        fake_backend("narrow", 128, takes=Takes(native_schemes=("fp8_block",))),
        fake_backend("wide", 512, takes=Takes()),
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
    chunked = [dataclasses.replace(backend, takes=Takes(chunked=True)) for backend in two_backends]
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
        library=Library(available=lambda: "pip install it"),
    )
    monkeypatch.setattr(backends_module, "BACKENDS", (missing, *backends_module.BACKENDS))
    found = info.facts()
    assert json.loads(json.dumps(found)) == found
    assert torch.__version__.startswith(found["versions"]["torch"])  # which may lack +cu130
    assert found["backends"]["missing"] == "pip install it"
    assert found["backends"]["torch"] is None
    assert len(found["gpus"]) == torch.cuda.device_count()
    text = info.format_facts(found)
    assert "  missing       no: pip install it\n" in text
    assert "  torch         available\n" in text


def test_facts_and_plans_tell_of_versions_newer_than_tested(monkeypatch):
    real = environment.version
    known = {"flashinfer-python": "0.7.2.post1", "sgl-deep-gemm": "0.1.5.post2"}
    monkeypatch.setattr(environment, "version", lambda name: known.get(name) or real(name))
    found = info.facts()
    said = "flashinfer-python 0.7.2.post1 is newer than tested: no test ran with one after 0.6.13"
    assert found["newer_than_tested"] == {"flashinfer-python": "0.6.13"}
    text = flat(info.format_facts(found))
    assert "sgl-deep-gemm 0.1.5.post2, " in text
    assert "flashinfer-python 0.7.2.post1 (newer than 0.6.13, the last tested) " in text
    h200 = Machine("cuda", (9, 0), "an H200", ("flashinfer",))
    problem = Problem("experts", 8, 256, 128, 256, 2, torch.bfloat16, layout=":up_gate")
    problem = problem.replace(activation=resolve("silu"))
    assert f"  {said}" in str(plans.plan(problem, h200, "flashinfer")).splitlines()


def test_facts_tell_what_runs_without_a_gpu(monkeypatch):
    """Triton can be imported here, which is not enough."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    triton, torch_backend = (backends_module.named(name) for name in ("triton", "torch"))
    for interpreted, reason in (
        (False, "triton needs a CUDA device, got cpu"),
        (True, "runs in an interpreter on a CPU: only when named"),
    ):
        monkeypatch.setattr("moe_ops.backends.triton.backend.INTERPRETED", interpreted)
        backends = (
            dataclasses.replace(triton, library=Library(interpreted=interpreted)),
            torch_backend,
        )
        monkeypatch.setattr(backends_module, "BACKENDS", backends)
        found = info.facts()
        assert found["backends"] == {"triton": reason, "torch": None}
        assert f" triton no: {reason} " in flat(info.format_facts(found))


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
    text = flat(info.format_facts(found))
    for name, line in lines.items():
        others = [*backends_module.list_backends(), "tested"]
        assert any(f" {name} {line} {other} " in text for other in others), text


ONE = {"name": "NVIDIA H200", "capability": [9, 0], "memory_gib": 139.8}
ONE["architecture"] = "SM90"
OTHER = {"name": "NVIDIA RTX PRO 6000 Blackwell", "capability": [12, 0], "memory_gib": 95.0}
OTHER["architecture"] = "SM120"


@pytest.mark.parametrize(
    ("gpus", "lines"),
    [
        ([], ["no CUDA device (torch is built for CPU)"]),
        ([ONE], ["GPU 0: NVIDIA H200, SM90, 140 GiB"]),
        ([ONE] * 8, ["GPU 0 to 7: NVIDIA H200, SM90, 140 GiB"]),
        ([ONE, ONE, OTHER], ["GPU 0 to 1: NVIDIA H200", "GPU 2: NVIDIA RTX PRO 6000"]),
    ],
)
def test_facts_fit_on_one_screen(gpus, lines, monkeypatch):
    """24 lines of 80 columns, with all libraries there or none."""
    monkeypatch.setattr(info, "_gpus", lambda: gpus)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if gpus else None)
    monkeypatch.setattr("moe_ops.environment.other_owners", list)
    monkeypatch.setattr("moe_ops.backends.cutlass.library._unbuilt", lambda name: None)
    origins = dict.fromkeys(build.FILES, "brought by the wheel")
    monkeypatch.setattr(cutlass, "origins", lambda: origins)
    here = machines.machine(torch.device("cpu"))
    if gpus:
        here = Machine("cuda", tuple(gpus[-1]["capability"]), "", backends_module.list_backends())
    with machines.pretend(here):
        for version in ("1.2.3.post1+cu130", None):
            monkeypatch.setattr("moe_ops.environment.version", lambda name, v=version: v)
            text = info.format_facts(info.facts())
            assert len(text.splitlines()) <= 24, text
            assert max(map(len, text.splitlines())) <= 80, text
            for line in lines:
                assert line in text


def installed(folder, name, *files, top_level=None):
    """A distribution's metadata, as pip leaves it behind."""
    metadata = folder / f"{name.replace('-', '_')}-1.5.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (metadata / "RECORD").write_text("".join([f"{file},,\n" for file in files]))
    if top_level is not None:
        (metadata / "top_level.txt").write_text(f"{top_level}\n")


def test_other_distributions_of_this_import_name_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    installed(tmp_path, "torch_moe_ops", "moe_ops/__init__.py", "moe_ops/experts.py")
    installed(tmp_path, "user-of-it", "user/moe_ops/__init__.py", "moe_ops_user/__init__.py")
    assert environment.other_owners() == []
    assert "WARNING" not in info.format_facts(info.facts())
    installed(tmp_path, "Moe.Ops", "moe_ops/__init__.py")
    installed(tmp_path, "a-fork", "moe_ops/__init__.py")
    installed(tmp_path, "older", top_level="moe_ops")
    assert environment.other_owners() == ["a-fork 1.5", "moe-ops 1.5", "older 1.5"]
    text = flat(info.format_facts(info.facts()))
    assert "WARNING: moe-ops 1.5 is another distribution that is imported as moe_ops" in text
    assert "pip uninstall moe-ops torch-moe-ops" in text


def test_facts_tell_what_was_imported(monkeypatch, tmp_path):
    """A checkout in the current folder comes before what pip installed."""
    here = str(environment.package_folder())
    found = info.facts()
    assert (found["imported_from"], found["installed_in"]) == (here, None)
    assert f"\nimported from {here}\n" in info.format_facts(found)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    installed(tmp_path, "torch-moe-ops", "moe_ops/__init__.py")
    found = info.facts()
    assert found["installed_in"] == str(tmp_path / "moe_ops")
    text = flat(info.format_facts(found))
    assert text.startswith("moe_ops (not installed, imported from source), ")
    assert f"from {here}, which hides the installed 1.5 in " in text
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "moe_ops" / "environment.py"))
    found = info.facts()
    assert found["installed_in"] is None
    assert info.format_facts(found).startswith("moe_ops 1.5, ")


def test_the_public_name_of_somebody_else_is_named_without_files(monkeypatch, tmp_path):
    """An editable installation lists none."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    installed(tmp_path, "moe-ops", "_moe_ops.pth")
    assert environment.other_owners() == ["moe-ops 1.5"]


def test_gpus_that_no_test_ran_on_are_named(monkeypatch):
    for capability in ((9, 0), (10, 0)):
        gpu = {"name": "GPU", "capability": list(capability), "memory_gib": 1.0}
        gpu["architecture"] = f"SM{capability[0]}{capability[1]}"
        monkeypatch.setattr(info, "_gpus", lambda gpu=gpu: [gpu])
        machine = Machine("cuda", capability, "GPU", ("torch",))
        with machines.pretend(machine):
            found = info.explain(PROBLEM, torch.device("cuda"), "auto", [1])
        for text in (info.format_facts(info.facts()), info.format_explanation(found)):
            assert ("not run on hardware: nothing" in flat(text)) == (capability == (10, 0))


def test_facts_tell_whether_the_cpu_kernel_is_in_use(monkeypatch, tmp_path):
    library = tmp_path / "cpu_grouped_mm.so"
    monkeypatch.setattr(cpu, "_LIBRARY", library)
    monkeypatch.setattr(cpu, "_kernels", dict)
    assert info.facts()["cpu_kernel"].startswith("not built: ")
    library.touch()
    assert re.match("built, but cannot be loaded: .* file too short", cpu.why_not())
    of_these = types.SimpleNamespace(moe_ops_cpu_sources=lambda: b"")
    monkeypatch.setattr(cpu.ctypes, "CDLL", lambda path: of_these)
    assert "AMX and NEON: built, but this processor lacks AVX2" in flat(
        info.format_facts(info.facts())
    )
    monkeypatch.setattr(cpu, "_kernels", lambda: {torch.bfloat16: None})
    assert info.facts()["cpu_kernel"] is None
    assert "AMX and NEON: built at first use, in use" in info.format_facts(info.facts())


def test_facts_tell_where_kernels_come_from(monkeypatch, tmp_path):
    """Beside the sources, in the folder that pip filled from a wheel, or in the cache."""
    package = tmp_path / "site-packages" / "moe_ops"
    folder = package / "csrc" / "cutlass"
    shutil.copytree(build.SOURCES, folder, ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    monkeypatch.setenv("MOE_OPS_CACHE", str(tmp_path / "cache"))
    assert not any(cutlass.origins().values())
    objects = {name: folder / build.object_name(name) for name in build.FILES}
    cached = build.cached("sm_120a", tmp_path / "cache")
    cached.parent.mkdir(parents=True)
    for path in (objects["sm_90a"], objects["sm_100a"], cached):
        path.touch()
    distribution = environment.DISTRIBUTION
    record = str(objects["sm_90a"].relative_to(package.parent))
    monkeypatch.syspath_prepend(package.parent)
    assert cutlass.origins()["sm_90a"] == "built beside the sources"
    installed(package.parent, distribution, record)
    assert cutlass.origins() == {
        "sm_90a": "brought by the wheel",
        "sm_100a": "built beside the sources",
        "sm_120a": "built at first use",
    }
    found = info.facts()
    assert found["kernels"] == {"cpu": cpu.origin(), **cutlass.origins()}
    found["backends"]["cutlass"], found["gpus"] = None, [ONE, OTHER]
    said = "sm_120a built at first use; sm_90a brought by the wheel"
    assert re.search(f" cutlass available.*; {said} ", flat(info.format_facts(found)))


def test_a_library_that_cannot_be_loaded_is_left_alone(monkeypatch, tmp_path):
    library = tmp_path / "cpu_grouped_mm.so"
    monkeypatch.setattr(cpu, "_LIBRARY", library)
    monkeypatch.setattr(cpu, "library", cpu.library.__wrapped__)
    assert cpu._kernels.__wrapped__() == {}
    library.write_bytes(b"\x7fELF, but of another machine")
    assert cpu._kernels.__wrapped__() == {}


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
        ("8 64 32 2 bf16", "got 'bf16'.*; 'plain' is for weights as they are, in --dtype"),
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
