"""Tuning: no tuned tile changes a result, and backends are timed into the table."""

import dataclasses
import json
import re
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_ops
from moe_ops import backends as backends_module
from moe_ops.choose import plain as configs
from moe_ops.choose.table import LayerSizes, override
from moe_ops.kernels.configs import (
    SM90_WGMMA,
    GemmConfig,
    LayerConfig,
    config_of,
    fields_of,
)
from moe_ops.kernels.launch import Gpu
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem
from moe_ops.planning import auto
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans
from moe_ops.tables import lookup, record
from moe_ops.tuning import __main__ as command
from moe_ops.tuning import backends, search
from tests.support.cases import BF16, assert_matches, poisoned_memory, router_weights, tolerance

TARGET = {
    "num_experts": 8,
    "hidden_size": 512,
    "intermediate_size": 256,
    "top_k": 2,
    "scheme": "",
    "dtype": "bfloat16",
}
ONE = LayerConfig(GemmConfig(64, 128, 4, 4), GemmConfig(64, 64, 3, 4), 16, 64, direct=True)
MANY = LayerConfig(GemmConfig(128, 64, 3, 4), GemmConfig(64, 64, 2, 4), 32, 256)
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU the kernels are compiled"
)
GPU = Gpu(227 * 1024, True, False, "Test GPU")


def fill(path, **changes):
    target = TARGET | changes
    record.record(path, "Test GPU", target, 1, fields_of(ONE), 10.0)
    record.record(path, "Test GPU", target, 64, fields_of(MANY), 20.0)
    record.record(path, "Test GPU", target, 64, fields_of(MANY._replace(block_m=64)), 19.0)


def chosen(M, **changes):
    t = TARGET | changes
    shape, top_k = (t["num_experts"], t["hidden_size"], t["intermediate_size"]), t["top_k"]
    layer = LayerSizes(M * top_k, *shape, GPU, top_k)
    return configs.for_experts(layer, BF16, t["scheme"], ("", ""), True)


def rows_of_tables():
    return [
        (entry, row)
        for path in lookup.tables().values()
        for entry in json.loads(path.read_text())["entries"]
        for row in entry.get("triton", [])
    ]


def layer_config(row):
    return config_of(row["config"], sort_chunk=256)


def on_gpu():
    for entry, row in rows_of_tables():
        shape = f"{entry['hidden_size']}x{entry['intermediate_size']}"
        name = f"{entry['scheme'] or 'plain'}-{shape}-{row['num_tokens']}"
        case = ("cuda", entry["dtype"], entry["scheme"], layer_config(row))
        sizes = (entry["hidden_size"], entry["intermediate_size"])
        yield pytest.param(*case, *sizes, id=name, marks=ON_GPU)


def interpreted():
    """The interpreter has neither warps nor stages: configs that differ in nothing else are run
    once. It does not know the kernels of sm90_wgmma.py.
    """
    found = {}
    for entry, row in rows_of_tables():
        config = layer_config(row)
        alike = {
            f: getattr(config, f)._replace(num_stages=2, num_warps=4) for f in ("gemm1", "gemm2")
        }
        if config.kernel != SM90_WGMMA:
            found[entry["scheme"], config._replace(sort_chunk=64, **alike)] = None
    for scheme, config in found:
        name = "-".join(str(f) for f in (scheme or "plain", config.block_m, *config.gemm1[:2]))
        sizes = (256, 128) if config.direct else (384, 256)  # of one token, programs are many
        yield pytest.param("cpu", "float32", scheme, config, *sizes, id=name, marks=ON_CPU)


@pytest.mark.slow
@pytest.mark.parametrize("device, dtype, scheme, config, K, I", [*interpreted(), *on_gpu()])
def test_tuned_configs_keep_the_values(device, dtype, scheme, config, K, I):
    """Every config of the tables, on fewer experts: configs do not depend on their number."""
    dtype = getattr(torch, dtype)
    late = (
        scheme == "fp8_block" and config.h_in_fp32
    )  # the workspace has no place for it with many rows
    M = 1 if config.direct else 2 if late else config.block_m + 8
    g = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return (torch.randn(shape, generator=g, device=device) * shape[-1] ** -0.5).to(dtype)

    x, w13, w2 = normal(M, K) * K**0.5, normal(3, 2 * I, K), normal(3, K, I)
    ids = torch.randint(-1, 3, (M, 2), generator=g, device=device)
    ids[0, 0] = 1
    weights = router_weights(M, 2).to(device)
    if scheme:
        w13, w2 = moe_ops.quantize(w13, scheme), moe_ops.quantize(w2, scheme)
        wide = (x.float(), w13, w2)
    else:
        wide = (x.float(), w13.float(), w2.float())
    expected = moe_ops.fused_experts(*wide, weights, ids, backend="torch")  # in fp32
    with override(config) as seen, poisoned_memory():
        out = moe_ops.fused_experts(x, w13, w2, weights, ids, backend="triton")
    assert seen and set(seen) == {config}
    assert_matches(out, expected.double(), tolerance(dtype, scheme, device))


# --- times of backends ---------------------------------------------------------------------------


class Stopwatch:
    """In place of backends.Backends: times by rule, as (per token, fixed) of each backend."""

    rules = {"triton": (1.0, 10.0), "deep_gemm": (0.5, 40.0)}
    refused = {"flashinfer": "needs another GPU"}
    measured: list[tuple] = []

    def __init__(self, target):
        self.layers = dict.fromkeys(self.rules)

    def times_us(self, M, names):
        self.measured.append((M, *names))
        return {name: self.rules[name][0] * M + self.rules[name][1] for name in names}


@pytest.fixture
def tuner(table, monkeypatch):
    """`python -m moe_ops.tuning` on a GPU that is none; returns what was measured meanwhile."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(backends, "Backends", Stopwatch)

    def run(*arguments):
        monkeypatch.setattr(Stopwatch, "measured", [])
        shape = ("--shape", "8", "512", "256", "2")
        monkeypatch.setattr(sys, "argv", ["tuning", *shape, *arguments])
        command.main()
        lookup._entries.cache_clear()
        return Stopwatch.measured

    return run


def test_backends_are_timed_into_the_table(tuner, table, capsys):
    fill(table)  # configs stay
    assert tuner("--backends", "--m", "16", "256") == [
        (16, "triton", "deep_gemm"),
        (256, "triton", "deep_gemm"),
    ]
    text = capsys.readouterr().out
    # equal on straight lines through (16, 26), (256, 266) and (16, 48), (256, 168): at 78.1
    assert "auto: triton to M=78, deep_gemm on" in text
    assert "not flashinfer: needs another GPU" in text
    (entry,) = json.loads(table.read_text())["entries"]
    assert [row["us"] for row in entry["backends"]] == [
        {"triton": 26.0, "deep_gemm": 48.0},
        {"triton": 266.0, "deep_gemm": 168.0},
    ]
    assert torch.__version__.startswith(entry["backends"][0]["versions"]["torch"])
    assert len(entry["triton"]) == 2
    key = ("Test GPU", 8, 512, 256, 2, "", "bfloat16")
    assert lookup.look_up(*key, ("triton", "deep_gemm")) == ((78, "triton"), (-1, "deep_gemm"))
    assert lookup.look_up(*key, ("deep_gemm",)) == ((-1, "deep_gemm"),)
    assert lookup.look_up("Another GPU", *key[1:], ("triton",)) == ()


def test_timing_goes_on_where_it_stopped(tuner, table):
    tuner("--backends", "triton", "--m", "16")
    assert tuner("--backends", "triton", "--m", "16", "64") == [(64, "triton")]
    # a backend that came later is measured beside the others, so that they compare
    assert tuner("--backends", "--m", "16") == [(16, "triton", "deep_gemm")]
    assert tuner("--backends", "--m", "16") == []
    assert tuner("--backends", "deep_gemm", "--m", "16", "--again") == [(16, "deep_gemm")]
    known = record.measured_backends(table, TARGET)
    assert known == {16: {"triton": 26.0, "deep_gemm": 48.0}, 64: {"triton": 74.0}}


def test_a_run_that_measures_nothing_fails(tuner, monkeypatch):
    with pytest.raises(SystemExit, match="nothing measured, .*Target\\(num_experts=8"):
        tuner("--backends", "flashinfer", "--m", "16")
    monkeypatch.setattr(Stopwatch, "times_us", lambda self, M, names: {})
    with pytest.raises(SystemExit, match="nothing measured"):
        tuner("--backends", "--m", "16")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--m 8 0", "--m must be positive numbers of tokens, got 0"),
        ("--scheme fp9", "--scheme: scheme must be one of .*got 'fp9'.*'' is for plain weights"),
        ("--shape 4 128 128 8", "--shape must be positive, TOP_K at most E; got 4 128 128 8"),
        ("--shape 4 128 0 2", "--shape must be positive, TOP_K at most E; got 4 128 0 2"),
        ("--backends deepgemm", "--backends must be one of triton, .*, torch, got 'deepgemm'"),
        ("--backends auto", "--backends must be one of triton, .*, torch, got 'auto'"),
        ("--backends --check", "--check compares tiles of triton, so it must come without"),
        ("--limit 60", "--limit is of --check, and must come with it"),
        ("--check --most 0", "--most must be at least 1, got 0"),
    ],
)
def test_bad_command_lines_are_refused_before_a_gpu_is_asked_for(
    arguments, message, tuner, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked for a GPU"))
    with pytest.raises(SystemExit) as stopped:
        tuner(*arguments.split())
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_schemes_are_recorded_by_their_full_names(tuner, table):
    """By which plans look them up."""
    tuner("--backends", "--m", "16", "--scheme", "int4_w4a16")
    (entry,) = json.loads(table.read_text())["entries"]
    assert entry["scheme"] == "int4_w4a16:g128"


def test_each_backend_gets_weights_in_its_layout():
    """Traced with fake CUDA tensors: nothing runs here."""
    everything = Machine("cuda", (9, 0), "NVIDIA H200", backends_module.list_backends())
    with machines.pretend(everything), FakeTensorMode(), torch.no_grad():
        made = backends.Backends(search.Target(8, 1024, 512, 2))
        weights = (made.bench.w13, made.bench.w2)
        x, _, ids = made.bench.inputs[0]
        assert set(made.layers) | set(made.refused) == set(backends_module.list_backends())
        assert {"triton", "torch"} <= set(made.layers)
        for name in made.layers:
            kept = backends.laid_out(name, *weights, x, ids)
            prepared = [getattr(weight, "weight_layout", "") for weight in kept]
            assert any(prepared) == (name == "flashinfer")
            assert any(prepared) or kept == weights
    with machines.pretend(dataclasses.replace(everything, available=("torch",))):
        with FakeTensorMode(), torch.no_grad():
            made = backends.Backends(search.Target(8, 1024, 512, 2))
        assert set(made.layers) == {"torch"}
        assert all(re.search(r" not? ", reason) for reason in made.refused.values())


@pytest.mark.parametrize("scheme", [pytest.param(s, marks=ON_GPU) for s in ("", "fp8_block")])
def test_auto_runs_what_was_measured(scheme, tmp_path, monkeypatch):
    """A small shape, every backend at hand, and a plan made from the table."""
    name = torch.cuda.get_device_name()
    path = tmp_path / "table.json"
    target = search.Target(8, 1024, 512, 2, scheme)
    backends.measure(target, [4, 2048], path, name, [], False)
    times = record.measured_backends(path, vars(target))
    assert set(times) == {4, 2048} and all("triton" in us for us in times.values())
    monkeypatch.setattr(lookup, "_FOLDER", tmp_path)
    lookup._entries.cache_clear()
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    here = Machine("cuda", capability, name, machines.machine(torch.device("cuda")).available)
    silu = moe_ops.Activation("silu")
    problem = Problem("experts", 8, 1024, 512, 1024, 2, BF16, scheme, options=Options(silu))
    plan = plans.plan(problem, here)
    lookup._entries.cache_clear()
    for M, us in times.items():
        chosen = auto._of_rows(plan.tiers, M).name
        takes = {n: t for n, t in us.items() if n not in dict(plan.refused)}
        assert takes[chosen] <= min(takes.values()) * (1 + lookup.MARGIN) * 1.001


def test_a_list_of_tiles_needs_no_gpu(tuner, monkeypatch, capsys):
    """What is chosen, and the tiles that the estimate puts first; of mixed GEMMs there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tuner("--list", "--m", "1", "64", "1024", "--scheme", "", "fp8_block")
    text = capsys.readouterr().out
    assert text.count("Target(") == 2 and text.count("M=64: LayerConfig(") == 2
    assert "kernel='gemv'" in text and "kernel='sm90_tma'" in text
    assert "    GEMM1 GemmConfig(block_n=" in text and "BLOCK_M=128 SPLIT_M=2" in text
    with pytest.raises(SystemExit):
        tuner("--list", "--m", "64", "--scheme", "int4_w4a16")
    assert "--list orders tiles of weights that are plain" in capsys.readouterr().err
