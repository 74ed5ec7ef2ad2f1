"""Checkpoints of bitsandbytes: read by `from_pretrained`, experts in nf4, the rest plain; and
written by `save_bitsandbytes`.
"""

import hashlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")
files = pytest.importorskip("safetensors.torch")
safe_open = pytest.importorskip("safetensors").safe_open

import moe_ops
from moe_ops.integrations.checkpoints import Checkpoint
from moe_ops.integrations.transformers import MoeOpsConfig, quantize, save_bitsandbytes
from tests.integrations.checkpoints.test_bitsandbytes import FIXTURES, PREFIX
from tests.integrations.transformers.test_families import build, outputs, relative
from tests.integrations.transformers.test_gguf import IDS, logits
from tests.support import oracle


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=MoeOpsConfig(), dtype=torch.float32
    )


@pytest.mark.parametrize("name", sorted(folder.name for folder in FIXTURES.iterdir()))
def test_files_of_bitsandbytes(name, tmp_path):
    model = load(FIXTURES / name)
    expected = files.load_file(FIXTURES / name / "expected.safetensors")
    assert relative(logits(model), expected["logits"]) < 1e-6
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.scheme == experts.down_proj.scheme == "nf4_w4a16:g64"
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_attention_and_router_become_plain():
    model = load(FIXTURES / "qwen3_moe-nf4-double")
    stored = files.load_file(FIXTURES / "qwen3_moe-nf4-double" / "model.safetensors")
    layer = model.model.layers[0]
    assert stored["model.layers.0.self_attn.q_proj.weight"].dtype == torch.uint8
    assert layer.self_attn.q_proj.weight.dtype == layer.mlp.gate.weight.dtype == torch.float32
    assert model(IDS).logits.isfinite().all()


def test_a_matrix_without_its_state_is_refused(tmp_path):
    shutil.copytree(FIXTURES / "qwen3_moe-nf4-double", tmp_path / "copy")
    path = tmp_path / "copy" / "model.safetensors"
    tensors = files.load_file(path)
    del tensors["model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4"]
    files.save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"self_attn.q_proj.weight.*model.safetensors must"):
        load(tmp_path / "copy")


# --- save_bitsandbytes ---------------------------------------------------------------------------


def quantized(family="qwen3_moe", scheme="nf4_w4a16:g32"):
    model = build(family, 1)
    quantize(model, scheme)
    return model


def values_of(tensors, base):
    """The fp32 values of a 4-bit matrix, by the flat formula."""
    sep = "." if f"{base}.absmax" in tensors else ".weight."
    (state,) = [t for n, t in tensors.items() if n.startswith(f"{base}{sep}quant_state")]
    state = json.loads(bytes(state.tolist()))
    codes = tensors[f"{base}{sep}".removesuffix(".")].flatten()
    codes = torch.stack((codes >> 4, codes & 15), -1).flatten()
    levels = torch.tensor(oracle.code_values(state["quant_type"]))[codes.int()]
    absmax = tensors[f"{base}{sep}absmax"].repeat_interleave(state["blocksize"])
    return (levels * absmax).view(state["shape"])


def same_experts(first, second):
    for (name, a), (other, b) in zip(
        first.state_dict().items(), second.state_dict().items(), strict=True
    ):
        assert name == other
        if isinstance(a, moe_ops.ExpertTensor):
            assert a.scheme == b.scheme and a.dtype == b.dtype
            assert torch.equal(a.qdata, b.qdata) and torch.equal(a.scale, b.scale)
        else:
            assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "family, names, scheme",
    [
        ("qwen3_moe", "experts.5.up_proj", "nf4_w4a16:g32"),
        ("mixtral", "block_sparse_moe.experts.5.w3", "fp4_w4a16:g32"),
        ("granitemoe", "block_sparse_moe.input_linear", "nf4_w4a16:g32"),  # a stack
    ],
)
def test_saved_under_the_names_of_the_family(family, names, scheme, tmp_path):
    """As transformers saves the dequantized model, matrix by matrix."""
    model = quantized(family, scheme)
    before = dict(vars(model)), model.config.to_dict()
    save_bitsandbytes(model, tmp_path / "4bit")
    assert (dict(vars(model)), model.config.to_dict()) == before
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "4bit", quantization_config=MoeOpsConfig(), attn_implementation="eager"
    )
    same_experts(model, again)
    assert torch.equal(outputs(again, IDS % 96), outputs(model, IDS % 96))

    model.dequantize()
    model.save_pretrained(tmp_path / "plain")
    tensors = files.load_file(tmp_path / "4bit" / "model.safetensors")
    wanted = files.load_file(tmp_path / "plain" / "model.safetensors")
    packed = {name.removesuffix(".weight") for name in wanted} - {
        name.removesuffix(".weight") for name, t in tensors.items() if t.dtype != torch.uint8
    }
    assert any(name.endswith(names) for name in packed)
    for base in packed:
        plain = wanted.get(f"{base}.weight", wanted.get(base))
        assert torch.equal(values_of(tensors, base), plain), base


def test_the_saved_folder_says_nothing_of_moe_ops(tmp_path):
    save_bitsandbytes(quantized(), tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "moe_ops" not in text
    said = json.loads(text)["quantization_config"]
    assert said["quant_method"] == "bitsandbytes" and said["bnb_4bit_quant_type"] == "nf4"
    plain = said.pop("llm_int8_skip_modules")
    assert "lm_head" in plain and "model.layers.0.mlp.gate" in plain
    assert not any("experts" in name for name in plain)
    # and plain transformers takes the object
    config = transformers.AutoConfig.from_pretrained(tmp_path).quantization_config
    assert config["load_in_4bit"] and not config["bnb_4bit_use_double_quant"]


@pytest.mark.parametrize("name", sorted(folder.name for folder in FIXTURES.iterdir()))
def test_files_of_bitsandbytes_saved_again(name, tmp_path):
    """One matrix an expert, whichever they were, with the values of bitsandbytes."""
    model = load(FIXTURES / name)
    save_bitsandbytes(model, tmp_path)
    again = load(tmp_path)
    same_experts(model, again)
    expected = safe_open(FIXTURES / name / "expected.safetensors", "pt").metadata()
    checkpoint = Checkpoint(tmp_path)
    for key, wanted in expected.items():
        *_, number, projection = key.removesuffix(".weight").split(".")
        if not number.isdecimal():
            continue
        ids = range(int(number), int(number) + 1)
        weight = checkpoint.expert_weight(PREFIX, (projection,), expert_ids=ids)
        values = weight.dequantize(torch.float32).contiguous()
        assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == wanted, key


def test_layers_that_bitsandbytes_quantized_are_saved_too(tmp_path):
    """With what `from_pretrained` leaves of it in a model, and double quantization undone."""
    model = quantized()
    stored = files.load_file(FIXTURES / "qwen3_moe-nf4-double" / "model.safetensors")
    base = "model.layers.0.self_attn.q_proj.weight"
    theirs = {name: t for name, t in stored.items() if name.startswith(base)}
    wanted = load(FIXTURES / "qwen3_moe-nf4-double").state_dict()[base]
    said = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_use_double_quant": True,
    }
    model.hf_quantizer.beside = SimpleNamespace(
        quantization_config=SimpleNamespace(to_dict=lambda: dict(said))
    )
    model._register_state_dict_hook(lambda module, state, *_: state.update(theirs))
    save_bitsandbytes(model, tmp_path)
    tensors = files.load_file(tmp_path / "model.safetensors")
    assert not any("nested" in name for name in tensors)
    assert torch.equal(values_of(tensors, base.removesuffix(".weight")), wanted)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert not config["bnb_4bit_use_double_quant"]
    assert base.removesuffix(".weight") not in config["llm_int8_skip_modules"]
    said["load_in_4bit"] = False
    with pytest.raises(ValueError, match="plain, or in 4 bits of bitsandbytes, got"):
        save_bitsandbytes(model, tmp_path)


@pytest.mark.parametrize(
    "family, scheme, message",
    [
        ("qwen3_moe", None, "must have experts in nf4 or fp4, got none"),
        ("qwen3_moe", "int4_w4a16:g32", "gate_up_proj: scheme must be nf4 or fp4 .* 'int4_w4a16"),
        ("gpt_oss", "nf4_w4a16:g32", r"gate_up_proj must be kept as \(E, rows, columns\)"),
    ],
)
def test_what_is_not_saved(family, scheme, message, tmp_path):
    model = build(family, 1)
    if scheme:
        quantize(model, scheme)
    with pytest.raises(ValueError, match=message):
        save_bitsandbytes(model, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_adapters_are_not_saved_in_silence(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=[], target_parameters=["experts.down_proj"])
    model = peft.get_peft_model(quantized(), config)
    with pytest.raises(ValueError, match="without adapters, got PeftModel"):
        save_bitsandbytes(model, tmp_path)
    with pytest.raises(ValueError, match="must carry no adapter"):
        save_bitsandbytes(model.base_model.model, tmp_path)
