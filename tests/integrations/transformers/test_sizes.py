"""Bytes of quantized experts, and what print(model) says of them."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.integrations import accelerate

import moe_ops
import moe_ops.integrations.transformers as integration
from moe_ops.integrations.transformers import hook, quantizer, sizes
from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.schemes import SCHEMES, get_scheme
from tests.integrations.transformers.test_families import build
from tests.integrations.transformers.test_models import experts_of, model_of


def stored(model) -> int:
    """Bytes of all plain tensors that a model consists of."""
    count = 0
    for weight in [*model.parameters(), *model.buffers()]:
        names = weight.__tensor_flatten__()[0] if hasattr(weight, "scheme") else None
        parts = [weight] if names is None else [getattr(weight, name) for name in names]
        count += sum(part.numel() * part.dtype.itemsize for part in parts)
    return count


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "dbrx", "longcat_flash"])
def test_the_footprint_of_a_model_is_what_it_stores(family):
    model = build(family, 1)
    plain = model.get_memory_footprint()
    assert plain == stored(model)
    integration.quantize(model, "int4_w4a16:g32")
    assert model.get_memory_footprint() == stored(model) < plain
    buffers = sum(b.nbytes for b in model.buffers())
    assert model.get_memory_footprint(return_buffers=False) == stored(model) - buffers
    for layer in layers_of.find(model):
        for name in layer.weights:
            weight = getattr(layer.owner, name)
            parts = [getattr(weight, part) for part in weight.__tensor_flatten__()[0]]
            assert weight.nbytes == sum(part.numel() * part.dtype.itemsize for part in parts)
            assert weight[1:].nbytes == sum(part[1:].nbytes for part in parts)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if get_scheme(name).weight])
def test_bytes_are_known_before_weights_are_quantized(scheme):
    weight = torch.randn(2, 160, 256, dtype=torch.bfloat16)
    static = get_scheme(scheme).activation is not None and get_scheme(scheme).activation.static
    given = {"activation_scale": torch.ones(())} if static else {}
    real = moe_ops.quantize(weight, scheme, **given).nbytes
    assert sizes.quantized_bytes(scheme, weight.shape, weight.dtype) == real - 4 * len(given)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_device_maps_know_the_bytes_of_experts_before_they_are_read(
    family, saved, tmp_path, monkeypatch
):
    """Quantized while a plain checkpoint is read, or stored so; and afterwards, of the model."""
    scheme, seen = "int4_w4a16:g32", {}
    model = model_of(family).to(torch.bfloat16)
    if saved:
        integration.quantize(model, scheme)
    model.save_pretrained(tmp_path)

    own = accelerate.compute_module_sizes

    def spy(*arguments, **named):
        sized = own(*arguments, **named)
        seen.update(sized[0])
        return sized

    monkeypatch.setattr(accelerate, "compute_module_sizes", spy)
    given = {} if saved else {"quantization_config": integration.MoeOpsConfig(scheme)}
    loaded = type(model).from_pretrained(tmp_path, device_map="auto", **given)
    experts = next(n for n, m in loaded.named_modules() if m is experts_of(loaded))
    real = stored(experts_of(loaded))
    assert seen[experts] == pytest.approx(real, rel=1e-6)
    after, _ = own(loaded, loaded.hf_quantizer)
    assert after[experts] == pytest.approx(real, rel=1e-6)


def test_printed_models_say_scheme_backend_and_bytes(monkeypatch):
    model = model_of("mixtral")
    experts, before = experts_of(model), repr(model)
    integration.attach(model)
    plain = f"torch.float32, backend torch, {sizes.size_text(stored(experts))}"
    assert plain in repr(experts)
    integration.quantize(model, "int4_w4a16:g32")
    text = f"int4_w4a16:g32, backend torch, {sizes.size_text(stored(experts))}"
    assert text in repr(model) and "float32" not in repr(model)
    assert repr(copy.deepcopy(model)) == repr(pickle.loads(pickle.dumps(model))) == repr(model)
    changed = copy.deepcopy(model)  # a copy says what it holds, not what the first one does
    quantizer.MoeOpsQuantizer.dequantize(changed.hf_quantizer, changed)
    assert "torch.float32, backend torch" in repr(changed) and text in repr(model)
    model.set_experts_implementation("eager")
    assert repr(model) == before


def test_a_model_that_was_not_attached_prints_as_before(monkeypatch):
    model = build("llama4", 1)
    before = repr(model)
    monkeypatch.setattr(hook, "_check", lambda layer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        integration.attach(model)
    assert repr(model) == before


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"),
     (56_623_104_000, "56.6 GB")],
)  # fmt: skip
def test_sizes_are_said_to_three_digits(count, text):
    assert sizes.size_text(count) == text
