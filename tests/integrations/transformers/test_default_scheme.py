"""What `quantize` takes where no scheme is named."""

import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

import moe_ops.integrations.transformers as integration
from moe_ops import environment
from moe_ops.activations import Activation
from moe_ops.backends.torch import layer
from moe_ops.integrations.transformers import activations
from moe_ops.integrations.transformers.default_scheme import default_scheme
from tests.integrations.transformers.test_families import build, relative
from tests.integrations.transformers.test_models import IDS, experts_of, logits, model_of, switches

needs_kernels = pytest.mark.skipif(layer.kernels() is None, reason="the CPU kernels are not built")


def layer_on(device: str, dtype=torch.bfloat16, columns=64) -> SimpleNamespace:
    weight = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(4, 96, columns))
    owner = experts_of(model_of("mixtral"))
    found = {"weights": ("down_proj",), "owner": owner, "on_hook": True}
    return SimpleNamespace(natural_weight=lambda name: weight, **found)


@needs_kernels
def test_a_model_on_a_cpu():
    model = model_of("mixtral").to(torch.bfloat16)
    expected = logits(model, IDS)
    report = integration.quantize(model)
    assert report.quantized.startswith("int8_w8a16:channel, because kernels of this CPU read it")
    assert str(report).startswith("experts quantized to int8_w8a16:channel, because")
    assert {experts_of(model).gate_up_proj.scheme} == {"int8_w8a16:channel"}
    assert 0 < relative(logits(model, IDS), expected) < 3e-2
    with pytest.raises(ValueError, match="it is quantized already"):
        integration.quantize(model)
    named = integration.quantize(model_of("mixtral"), "fp8_block")
    assert re.match(
        r"experts quantized to fp8_block: \S+ kB -> \S+ kB, error 0\.0\d+\n", str(named)
    )


def test_where_no_scheme_is_fast_one_is_asked_for(monkeypatch):
    monkeypatch.setattr(layer, "kernels", lambda: object())
    model = model_of("mixtral")
    before = switches(model)
    with pytest.raises(ValueError, match="experts of torch.float32 .* convert the model by .to"):
        integration.quantize(model)
    assert switches(model) == before
    with pytest.raises(ValueError, match="with 72 columns, got None"):
        default_scheme([layer_on("cpu", columns=72)])
    with pytest.raises(ValueError, match="experts on mps, got None: none was timed there"):
        default_scheme([layer_on("mps")])
    monkeypatch.setattr(layer, "kernels", lambda: None)
    with pytest.raises(ValueError, match="this CPU, got None: no scheme is fast there without"):
        default_scheme([layer_on("cpu")])


@pytest.mark.parametrize("family, name", [("mixtral", "gelu"), ("llama4", ""), ("dbrx", "")])
def test_layers_that_the_kernels_of_a_cpu_do_not_run(family, name, monkeypatch):
    """One with another activation, one whose router weights multiply the input, and one that calls
    grouped_linear."""
    monkeypatch.setattr(layer, "kernels", lambda: object())
    if name:
        monkeypatch.setattr(activations, "_plain", lambda module: Activation(name))
    model = build(family, 1).to(torch.bfloat16)
    with pytest.raises(ValueError, match="on a CPU, got None: no scheme is fast there beside"):
        integration.quantize(model)


@pytest.mark.parametrize(
    "capability, name",
    [
        ((8, 0), "int8_w8a16:channel"),
        ((8, 9), "fp8_block"),
        ((9, 0), "fp8_block"),
        ((0, 0), "int8_w8a16:channel"),  # of AMD
    ],
)
def test_gpus(capability, name, monkeypatch):
    monkeypatch.setattr(environment, "capability", lambda device: capability)
    assert default_scheme([layer_on("cuda:0"), layer_on("cuda:1", columns=72)]).name == name


def test_several_kinds_of_devices(monkeypatch):
    monkeypatch.setattr(environment, "capability", lambda device: (9, 0))
    monkeypatch.setattr(layer, "kernels", lambda: object())
    with pytest.raises(ValueError, match="another default: fp8_block, int8_w8a16:channel"):
        default_scheme([layer_on("cuda"), layer_on("cpu")])


def test_a_model_without_experts():
    with pytest.raises(ValueError, match="model must"):
        integration.quantize(torch.nn.Linear(2, 2))
