"""save_warm and load_warm: what a later process finds, and that a bundle which is not for it, or
cannot be unpacked, changes nothing.
"""

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import moe_ops
from moe_ops import environment
from moe_ops.bundle import archive, key, places, warm
from moe_ops.ops.problem import Machine
from moe_ops.planning import machine as machines
from moe_ops.tables import lookup
from tests.house.test_documents import run_python
from tests.house.test_reports import run

GROUP = json.dumps({"child_paths": {"f.cubin": "f.cubin", "f.json": "f.json"}}).encode()
MEMBERS = {
    "triton/KEY/__grp__f.json": GROUP,
    "triton/KEY/f.cubin": b"cubin" * 1000,
    "triton/KEY/f.json": b"{}",
    "objects/moe_ops_cutlass_sm90a_0.so": b"object",
    "deep_gemm/kernel.fp8.0/kernel.cubin": b"kernel",
}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Empty folders of all caches."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("MOE_OPS_CACHE", str(tmp_path / "moe_ops"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "to be restored")
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "DG_JIT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def files(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def bundle(folders, tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "model.warm"
    archive.write(path, key.facts(native=False), MEMBERS)
    return path


def refused(path, reason):
    """That a bundle is named and not used."""
    with pytest.warns(RuntimeWarning, match=f"uses nothing of {path}: .*{reason}"):
        report = moe_ops.load_warm(path)
    assert not report.loaded and report.bytes == 0 and report.parts == {}
    assert str(report).startswith(f"{path}: not used, ")
    assert "TRITON_CACHE_DIR" not in os.environ
    return report


# --- loading -------------------------------------------------------------------------------------


def test_entries_lie_where_their_caches_look(bundle, folders):
    report = moe_ops.load_warm(bundle)
    triton = folders / "home/.triton/cache"
    assert files(folders) == {
        *[f"home/.triton/cache/KEY/{name}" for name in ("__grp__f.json", "f.cubin", "f.json")],
        "moe_ops/cutlass/moe_ops_cutlass_sm90a_0.so",
        "home/.deep_gemm/cache/kernel.fp8.0/kernel.cubin",
    }
    assert (triton / "KEY/f.cubin").read_bytes() == MEMBERS["triton/KEY/f.cubin"]
    # Triton's lists of files hold absolute paths
    assert json.loads((triton / "KEY/__grp__f.json").read_text()) == {
        "child_paths": {name: str(triton / "KEY" / name) for name in ("f.cubin", "f.json")}
    }
    # else Inductor moves Triton's folder when it first compiles
    assert os.environ["TRITON_CACHE_DIR"] == str(triton)
    assert report.loaded and report.bytes == bundle.stat().st_size
    assert report.parts["triton"] == (3, sum(len(MEMBERS[n]) for n in MEMBERS if "KEY" in n))
    assert "triton 3 (0.0), objects 1 (0.0), deep_gemm 1 (0.0)" in str(report)


def test_entries_that_are_there_stay(bundle, folders, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folders / "triton"))
    entry = folders / "triton/KEY"
    entry.mkdir(parents=True)
    (entry / "f.cubin").write_bytes(b"older")
    (folders / "triton/EMPTY").mkdir()
    assert moe_ops.load_warm(bundle).loaded and moe_ops.load_warm(bundle).loaded
    assert files(folders / "triton") == {"KEY/f.cubin"}
    assert (entry / "f.cubin").read_bytes() == b"older"
    assert os.environ["TRITON_CACHE_DIR"] == str(folders / "triton")


def test_an_entry_without_files_is_filled(bundle, folders):
    """Triton makes the folder of a kernel before it compiles it."""
    entry = folders / "home/.triton/cache/KEY"
    entry.mkdir(parents=True)
    assert moe_ops.load_warm(bundle).loaded
    assert files(entry) == {"__grp__f.json", "f.cubin", "f.json"}


def test_loads_at_once_give_whole_entries(bundle, folders, monkeypatch):
    monkeypatch.setattr(warm, "_LOCK", contextlib.nullcontext())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folders / "triton"))
    reports = []
    threads = [
        threading.Thread(target=lambda: reports.append(moe_ops.load_warm(bundle)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.refused for report in reports] == [""] * 6
    assert files(folders / "triton") == {"KEY/__grp__f.json", "KEY/f.cubin", "KEY/f.json"}


# --- bundles that are not used -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "triton", "sources of moe_ops", "C++ compiler"])
def test_what_differs_is_named(bundle, folders, monkeypatch, name):
    facts = key.facts(native=False)
    monkeypatch.setattr(key, "facts", lambda native: facts | {name: "another"})
    refused(bundle, f"made elsewhere: .*{name.replace('+', '.')} was .*, is another")
    assert files(folders) == set()


def test_native_code_is_for_one_processor(folders, tmp_path):
    path = tmp_path / "native"
    facts = key.facts(native=True)
    assert {"processor", "file of the C++ compiler"} <= set(facts)
    archive.write(path, facts | {"processor": "another"}, {"inductor/ab/c.so": b""})
    refused(path, "processor was another, is ")
    archive.write(path, facts, {"inductor/ab/c.so": b"native"})
    assert moe_ops.load_warm(path).loaded
    assert (folders / "inductor/ab/c.so").read_bytes() == b"native"


def test_gpus_differ_by_name_memory_and_backends(monkeypatch):
    """Those are constants of compiled graphs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    def facts(name="NVIDIA H200", memory=150, backends=("triton", "torch")):
        with machines.pretend(Machine("cuda", (9, 0), name, backends, total_memory=memory)):
            return key.facts(native=False)

    assert key.difference(facts(), facts()) == ""
    assert key.difference(facts(), facts(memory=151)) == (
        "memory of the GPU was 150 bytes, is 151 bytes"
    )
    assert key.difference(facts(), facts("NVIDIA H100")) == (
        "GPU was NVIDIA H200 (SM90, 132 multiprocessors), is NVIDIA H100 (SM90, 132 "
        "multiprocessors)"
    )
    assert key.difference(facts(backends=("torch",)), facts()) == (
        "backends was torch, is triton torch"
    )


def test_sources_but_for_tables_are_in_the_key(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "package_folder", lambda: tmp_path)
    table = tmp_path / "table.json"
    monkeypatch.setattr(lookup, "tables", lambda: {"GPU": table})
    source = tmp_path / "kernel.py"
    digests = []
    for text, rows in (("a = 1", "[]"), ("a = 2", "[]"), ("a = 2", "[1]")):
        source.write_text(text)
        table.write_text(rows)
        digests.append(key.sources.__wrapped__())
    assert digests[0] != digests[1] == digests[2]


def test_damaged_bundles_leave_the_folders_alone(bundle, folders):
    content = bytearray(bundle.read_bytes())
    name = b"kernel.fp8.0/kernel.cubin"  # the last member: others were unpacked before it
    at = content.index(name) + len(name) + 2
    content[at] ^= 1
    bundle.write_bytes(content)
    refused(bundle, "damaged")
    assert files(folders) == set()
    bundle.write_bytes(content[: len(content) // 2])
    refused(bundle, "damaged or truncated")
    bundle.unlink()
    refused(bundle, "No such file")
    assert files(folders) == set()


@pytest.mark.parametrize(
    "group",
    [
        b'{"child_paths": {"f.cubin": "/tmp/f.cubin"}}',
        b'{"child_paths": {"f.cubin": "../f.cubin"}}',
        b'{"child_paths": {"f.cubin": ".."}}',
        b'{"child_paths": [1]}',
        b"no list",
    ],
)
def test_lists_of_files_lead_nowhere_else(folders, tmp_path, group):
    path = tmp_path / "forged"
    members = {"triton/KEY/__grp__f.json": group}
    archive.write(path, key.facts(native=False), members)
    refused(path, "lies elsewhere|is no list of files")
    assert not (folders / "home/.triton/cache/KEY").exists()


def test_a_folder_that_cannot_be_written_undoes_all(bundle, folders):
    (folders / "home").mkdir()
    (folders / "home/.deep_gemm").write_text("a file where a folder should be")
    refused(bundle, "cannot be unpacked")
    assert files(folders) == {"home/.deep_gemm"}


@pytest.mark.parametrize("fails", ["returns", "raises"])
def test_what_torch_refuses_undoes_all(folders, tmp_path, monkeypatch, fails):
    def load(_):
        if fails == "raises":
            raise KeyError("unknown kind of artifact")

    path = tmp_path / "bundle"
    archive.write(path, key.facts(native=False), MEMBERS | {"torch/artifacts": b"artifacts"})
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
    before = files(folders)
    refused(path, "artifacts")
    assert files(folders) == before


def test_moves_that_fail_are_undone(bundle, folders, monkeypatch):
    rename, moved = os.rename, []

    def full(source, target):
        if moved:
            raise OSError(28, "No space left on device")
        moved.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)
    refused(bundle, "No space left")
    assert moved and files(folders) == set()


def test_no_home_directory(bundle, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    refused(bundle, "home directory")


@pytest.mark.parametrize("path", [None, 3, "", b"model.warm"])
def test_paths_are_paths(path):
    for function in (moe_ops.load_warm, moe_ops.save_warm):
        with pytest.raises(ValueError, match="path must be the path of a file, got"):
            function(path)


# --- measured tables -----------------------------------------------------------------------------


def table_of(gpu):
    problem = dict(zip(lookup.KEYS, (8, 64, 32, 2, "", "bfloat16"), strict=True))
    row = {"num_tokens": 4, "us": {"triton": 2.0}}
    return json.dumps({"gpu": gpu, "entries": [{**problem, "backends": [row]}]})


def test_plans_are_made_by_the_table_of_the_bundle(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(lookup, "_in_use", {})
    monkeypatch.setattr(warm, "_gpu_name", lambda: "NVIDIA Test")
    path, problem = tmp_path / "bundle", (8, 64, 32, 2, "", "bfloat16")
    archive.write(path, key.facts(native=False), {"tables/gpu.json": table_of("Other").encode()})
    refused(path, "got one of Other")
    assert lookup.backend_times("NVIDIA Test", *problem) == []
    table = table_of("NVIDIA Test")
    archive.write(path, key.facts(native=False), {"tables/gpu.json": table.encode()})
    assert moe_ops.load_warm(path).loaded
    assert lookup.backend_times("NVIDIA Test", *problem) == [(4, {"triton": 2.0})]
    assert lookup.text("NVIDIA Test") == table  # which the next bundle has
    lookup._entries.cache_clear()


# --- saving --------------------------------------------------------------------------------------


def test_kernels_are_found_where_they_were_compiled(folders, monkeypatch):
    """Inductor moves Triton's folder when it first compiles: kernels of eager calls lie in the one
    before. Of neither are taken what the process does not use, and unfinished files.
    """
    before, after = folders / "home/.triton/cache", folders / "inductor/triton/0"
    for entry in (before / "EARLY", before / "UTILS", before / "UNUSED", after / "LATE"):
        (entry / "tmp.pid_1").mkdir(parents=True)
        (entry / "tmp.pid_1/half").write_text("")
        (entry / "f.cubin").write_bytes(entry.name.encode())
        listed = {"f.cubin": str(entry / "f.cubin")}
        (entry / "__grp__f.json").write_text(json.dumps({"child_paths": listed}))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(after))
    monkeypatch.setattr(places, "_triton_keys", lambda: {"EARLY", "LATE", "ABSENT"})
    mapped = {before / "UTILS/f.cubin", Path("/usr/lib/libc.so.6"), folders / "elsewhere.so"}
    monkeypatch.setattr(places, "_mapped", lambda: mapped)
    found = places.used()
    assert {name for name in found if name.startswith("triton/")} == {
        f"triton/{entry}/{name}"
        for entry in ("EARLY", "UTILS", "LATE")
        for name in ("f.cubin", "__grp__f.json")
    }
    assert found["triton/EARLY/f.cubin"] == b"EARLY"
    assert json.loads(found["triton/LATE/__grp__f.json"]) == {
        "child_paths": {"f.cubin": "f.cubin"}
    }


def test_objects_and_deep_gemm_kernels_are_saved(folders, monkeypatch):
    objects, kernels = folders / "moe_ops/cutlass", folders / "home/.deep_gemm/cache"
    objects.mkdir(parents=True)
    for name in ("loaded.so", "other.so"):
        (objects / name).write_text(name)
    (kernels / "kernel.0").mkdir(parents=True)
    (kernels / "kernel.0/kernel.cubin").write_text("kernel")
    monkeypatch.setattr(places, "_mapped", lambda: {objects / "loaded.so"})
    monkeypatch.setattr(places, "_triton_keys", set)
    names = ("objects/loaded.so", "deep_gemm/kernel.0/kernel.cubin")
    assert set(places.used()) & {*names, "objects/other.so"} == {names[0]}
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace())
    assert set(places.used()) >= set(names)


def test_warmup_saves_what_ran(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "used", lambda: MEMBERS)
    layer = moe_ops.MoELayer(16, 16, num_experts=4, top_k=2)
    path = tmp_path / "model.warm"
    report = moe_ops.warmup(layer, (1,), save=path)
    assert report.bundle.bytes == path.stat().st_size and report.bundle.loaded
    assert str(report).splitlines()[-1] == str(report.bundle)
    assert "deep_gemm 1" in str(report.bundle)
    assert moe_ops.load_warm(path).loaded


@pytest.mark.parametrize("save", ["absent/model.warm", "", "."])
def test_files_that_cannot_be_saved_are_refused_first(tmp_path, monkeypatch, save):
    monkeypatch.chdir(tmp_path)
    ran = []
    with pytest.raises(ValueError, match="save must "):
        moe_ops.warmup(lambda M: ran.append(M), (1,), save=save)
    assert not ran


def test_what_is_no_plain_file_is_not_replaced(tmp_path):
    """As /dev/null, which a rename would replace."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="path must name a file"):
        moe_ops.save_warm(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_an_error_of_writing_names_the_file(folders, tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="model.warm cannot be written .No space left on device."):
        moe_ops.save_warm(tmp_path / "model.warm")


@pytest.mark.slow  # two processes compile for a GPU that need not be there
def test_kernels_of_triton_are_found_again(folders, tmp_path):
    """Compiled for SM90 in one process, found in another one with another folder."""
    pytest.importorskip("triton")
    code = """
import os, sys
import moe_ops
if sys.argv[1] == "load":
    assert moe_ops.load_warm(sys.argv[2]).loaded
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def double(x_ptr, BLOCK: tl.constexpr):
    at = x_ptr + tl.arange(0, BLOCK)
    tl.store(at, 2 * tl.load(at))

hits = []
triton.knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
source = ASTSource(double, {"x_ptr": "*fp32", "BLOCK": "constexpr"}, {(1,): 128})
kept = triton.compile(source, target=GPUTarget("cuda", 90, 32))
if sys.argv[1] == "save":
    print(moe_ops.save_warm(sys.argv[2]).parts["triton"][0])
print(hits)
"""
    file = tmp_path / "double.py"
    file.write_text(code)
    path = str(tmp_path / "model.warm")
    runner = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path / "first")
    saved, hits = run_python(runner, str(file), "save", path).splitlines()[-2:]
    assert int(saved) >= 5 and hits == "[False]"
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path / "second")
    assert run_python(runner, str(file), "load", path).splitlines()[-1] == "[True]"


@pytest.mark.slow  # three processes compile a model
@pytest.mark.skipif(sys.platform != "linux", reason="wrappers of compilers, and /proc")
def test_a_compiled_model_starts_without_a_compiler(tmp_path):
    pytest.importorskip("transformers")
    given = ("--dry-run", "--layers", "1", "--export", "--results", str(tmp_path))
    done = run("cold_start.py", *given)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.json")
    size = sum([part.stat().st_size for part in tmp_path.glob("cold_start.warm.*")])
    assert size == json.loads(file.read_text())["bundle_bytes"] > 0
    assert "it takes" in done.stdout and "importing moe_ops takes" in done.stdout
    rows = {row["case"]: row for row in json.loads(file.read_text())["rows"]}
    cold, bundled, warm_folders = (rows[n] for n in ("nothing cached", "bundle", "warm folders"))
    assert cold["compilers"].get("g++", 0) > 5
    assert bundled["compilers"] == warm_folders["compilers"] == {}
    assert bundled["tokens"] == cold["tokens"] == warm_folders["tokens"]
    assert bundled["refused"] == ""
