"""python -m moe_ops.bench on a CPU: what it prints and writes, and what it says of wrong input."""

import json

import pytest
import torch

from moe_ops.bench import __main__ as bench
from moe_ops.bench import layers, timing
from moe_ops.bench.shapes import Shape
from tests.support.oracle import experts as oracle

TINY = "4,2,64,32"


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_the_table_the_numbers_and_the_plot(device, tmp_path, capsys):
    pytest.importorskip("transformers")
    where = {name: tmp_path / f"out.{name}" for name in ("json", "png")}
    arguments = [TINY, "--device", device, "--tokens", "2", "1", "--schemes", "bf16", "int8_w8a8"]
    arguments += [f"--{name}={path}" for name, path in where.items()]
    assert bench.main([*arguments, "--seconds", "60"]) == 0
    text = capsys.readouterr().out
    header, first, second = text.splitlines()[1:4]
    for column in ("HF eager", "HF grouped_mm", "moe_ops bf16", "moe_ops int8_w8a8"):
        assert column in header
    assert [line.split()[0] for line in (first, second)] == ["1", "2"]
    assert first.count("x)") == 2  # how many times as fast, for each column of this library
    found = json.loads(where["json"].read_text())
    for errors in found["errors"].values():
        assert len(errors) == 4
        for name, error in errors.items():
            assert 0 < error < (0.1 if "int8" in name else 0.02), name
    us = found["us"]["1"]
    best = min(us["HF eager"], us["HF grouped_mm"])
    assert f"({best / us['moe_ops bf16']:.2f}x)" in first
    assert "left out" not in text
    assert not _has_matplotlib() or where["png"].stat().st_size > 5000


def _has_matplotlib():
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def test_a_quantized_folder_is_measured_in_its_scheme(tmp_path, monkeypatch, capsys):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64}
    quantized = {"quant_method": "moe_ops", "scheme": "fp8_tensor_static"}
    config = {**sizes, "moe_intermediate_size": 32, "quantization_config": quantized}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layers, "peers", lambda *_: {})
    arguments = [str(tmp_path), "--device", "cpu", "--tokens", "2", "--json", "numbers"]
    assert bench.main(arguments) == 0
    (errors,) = json.loads((tmp_path / "numbers").read_text())["errors"].values()
    assert set(errors) == {"moe_ops bf16", "moe_ops fp8_tensor_static"}
    assert errors["moe_ops bf16"] < 0.01 < errors["moe_ops fp8_tensor_static"] < 0.15
    capsys.readouterr()


def test_what_is_left_out_says_why():
    shape = Shape(4, 2, 40, 24)  # no group of 128 columns fits
    device = torch.device("cpu")
    with torch.no_grad():
        result = bench.measure("x", shape, device, [1, 2, 3], ["bf16", "int4_w4a16:g128"], 1e-9)
    assert list(result.us) == [1]
    scheme, rows = result.left_out
    assert scheme.startswith("moe_ops int4_w4a16:g128: ValueError: w13 cannot be quantized")
    assert rows.startswith("M=2, 3: would end after 1e-09 s; raise --seconds")
    assert "left out: M=2, 3" in bench.format_result(result)


def test_a_busy_machine_is_noticed(monkeypatch):
    shape, device, said = Shape(4, 2, 64, 32), torch.device("cpu"), "not to be relied on: "
    monkeypatch.setattr(layers, "peers", lambda *_: {})

    def text(load, *times):
        """Of calls that took so many ms."""
        monkeypatch.setattr(timing, "load_of_a_processor", lambda: load)
        monkeypatch.setattr(
            timing, "interleaved_ms", lambda calls, *_: {name: list(times) for name in calls}
        )
        with torch.no_grad():
            return bench.format_result(bench.measure("x", shape, device, [1], ["bf16"], 1.0))

    assert said not in text(0.9, 1.0, 1.1, 1.1, 1.2)
    assert said not in text(0.9, 1.0, 9.0)  # two say nothing of quartiles
    assert f"{said}2.5 processes a processor wanted to run before; run" in text(2.5, 1.0, 1.0)
    assert f"{said}repeats of one call differ by 100 % between quartiles; run" in text(
        0.0, 1, 1, 2, 3, 3
    )
    assert timing.load_of_a_processor() == 0.0
    monkeypatch.undo()
    monkeypatch.setattr("os.getloadavg", lambda: (3.0, 1.0, 1.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert timing.load_of_a_processor() == 1.5


def test_peers_that_fail_are_left_out(monkeypatch):
    def failing(x, weights, ids):
        raise RuntimeError("not here")

    monkeypatch.setattr(layers, "peers", lambda *_: {"HF eager": failing})
    with torch.no_grad():
        result = bench.measure("x", Shape(4, 2, 64, 32), torch.device("cpu"), [1], ["bf16"], 1.0)
    assert list(result.us[1]) == ["moe_ops bf16"] and result.gain(1, "moe_ops bf16") is None
    assert result.left_out == ["HF eager, M=1: RuntimeError: not here"]
    assert "moe_ops bf16" in bench.format_result(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1,2"], "four positive integers"),
        ([TINY, "--schemes", "fp3"], "fp3"),
        ([TINY, "--tokens", "0"], "--tokens must be positive, got 0"),
        ([TINY, "--seconds", "0"], "--seconds must be positive, got 0"),
        ([TINY, "--device", "tpu9x"], "--device must be a torch device such as 'cpu'"),
        ([TINY, "--device", "meta"], "--device must be cpu or cuda, got 'meta'"),
        (["4096,8,16384,16384"], "GiB free; give fewer --schemes, or a shape"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    if "--device" not in arguments:
        arguments = [*arguments, "--device", "cpu"]
    assert bench.main(arguments) == 1
    assert message in capsys.readouterr().err


def test_layers_compute_the_same():
    """Those of plain torch, which stand in for transformers', against the oracle of the tests."""
    shape = Shape(4, 2, 64, 32)
    w13, w2 = layers.make_weights(shape, torch.float32, torch.device("cpu"))
    assert not torch.equal(w13[0], w13[1])
    x, ids = torch.randn(9, 64), torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    weights = torch.rand(9, 2) + 0.1
    want = oracle(x, w13, w2, weights, ids)
    got = layers.per_expert_loop(x.double(), w13, w2, weights, ids)
    assert timing.relative_error(got, want) < 1e-6
    low = [t.bfloat16() for t in (x, w13, w2)]
    grouped = layers.grouped_mm_layer(*low[1:])
    got = grouped(low[0], weights.bfloat16(), ids.int())
    assert timing.relative_error(got, want) < 2e-2
