"""Checkpoints of bitsandbytes in `from_pretrained`: experts in nf4, the rest plain."""

import shutil

import pytest
import torch

transformers = pytest.importorskip("transformers")
files = pytest.importorskip("safetensors.torch")

from moe_ops.integrations.transformers import MoeOpsConfig
from tests.integrations.checkpoints.test_bitsandbytes import FIXTURES
from tests.integrations.transformers.test_families import relative
from tests.integrations.transformers.test_gguf import IDS, logits


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
