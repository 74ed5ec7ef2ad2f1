"""Which layer a command line names."""

import json
import re

import pytest
import torch

from moe_ops.bench.shapes import SHAPES, Shape, resolve, scheme_of


def test_shapes_by_numbers_and_by_name():
    assert resolve("128,8,2048,768") == ("128,8,2048,768", Shape(128, 8, 2048, 768))
    assert resolve("128, 8, 2048, 768")[1] == SHAPES["qwen3"]
    assert resolve("mixtral") == ("mixtral", SHAPES["mixtral"])


def test_model_types_have_their_default_sizes():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig()
    sizes = (config.num_experts, config.num_experts_per_tok, config.hidden_size)
    assert resolve("qwen3_moe")[1] == Shape(*sizes, config.moe_intermediate_size)
    assert resolve("deepseek_v3")[1] == Shape(256, 8, 7168, 2048)
    assert resolve("qwen3_vl_moe")[1].num_experts > 1  # those of its language model


@pytest.mark.parametrize("nested", [False, True])
def test_folders_with_a_config(tmp_path, nested):
    sizes = {"num_local_experts": 16, "num_experts_per_tok": 4, "hidden_size": 64}
    sizes["intermediate_size"] = 96
    content = {"model_type": "x", "hidden_size": 8, "text_config": sizes} if nested else sizes
    (tmp_path / "config.json").write_text(json.dumps(content))
    name, shape = resolve(str(tmp_path))
    assert (name, shape) == (tmp_path.name, Shape(16, 4, 64, 96))
    assert resolve(str(tmp_path / "config.json")) == (name, shape)


def test_the_scheme_of_a_folder_is_that_of_its_experts(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    assert scheme_of("qwen3") == scheme_of("4,2,64,32") == scheme_of(str(tmp_path)) == ""

    def config(**quantization):
        content = {"quantization_config": quantization} if quantization else {}
        (tmp_path / "config.json").write_text(json.dumps(content))

    config(quant_method="moe_ops", scheme="int4_w4a16:g64", backend="auto")
    assert scheme_of(str(tmp_path)) == "int4_w4a16:g64"
    config(quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic")
    with pytest.raises(ValueError, match="safetensors"):
        scheme_of(str(tmp_path))
    tensors = {"model.layers.0.self_attn.o_proj.weight": torch.zeros(4, 4)}
    for e in range(2):
        name = f"model.layers.0.mlp.experts.{e}.down_proj.weight"
        tensors[name] = torch.zeros(256, 128).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(2, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    assert scheme_of(str(tmp_path)) == "fp8_block"
    config()
    assert scheme_of(str(tmp_path)) == ""


def test_what_a_file_leaves_out_is_the_default_of_its_class(tmp_path):
    pytest.importorskip("transformers")
    content = {"model_type": "mixtral", "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert resolve(str(tmp_path))[1] == Shape(8, 2, 64, 14336)


def test_errors_name_what_was_wrong(tmp_path):
    for text, message in (
        ("1,2,3", "four positive integers E,top_k,K,I .* got '1,2,3'"),
        ("8,0,64,64", "four positive integers"),
        ("8,9,64,64", "top_k must be at most E=8, got 9"),
        (str(tmp_path), "must hold a config.json"),
        ("Qwen/Qwen3-30B-A3B", "hf download Qwen/Qwen3-30B-A3B --local-dir Qwen3-30B-A3B, then"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve(text)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json must be JSON"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(ValueError, match="its configuration has no num_experts, top_k"):
        resolve(str(tmp_path))
    for field, value in (("hidden_size", "x"), ("num_experts", 2.5), ("top_k_experts", [True])):
        message = f"{field} of {tmp_path}/config.json must be a positive integer, .* got "
        for content in ({field: value}, {"model_type": "mixtral", field: value}):
            (tmp_path / "config.json").write_text(json.dumps(content))
            with pytest.raises(ValueError, match=f"^{message}{re.escape(repr(value))}$"):
                resolve(str(tmp_path))
        (tmp_path / "config.json").write_text(json.dumps({"text_config": {field: value}}))
        with pytest.raises(ValueError, match=f"^text_config.{message}"):
            resolve(str(tmp_path))
    pytest.importorskip("transformers")
    other = {"model_type": "mixtral", "vocab_size": "x"}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="json must be a mixtral configuration: .*vocab_size"):
        resolve(str(tmp_path))
    with pytest.raises(ValueError, match="'nope' is no shape .* no model type of transformers"):
        resolve("nope")
    with pytest.raises(ValueError, match="bert must be a model with experts"):
        resolve("bert")
