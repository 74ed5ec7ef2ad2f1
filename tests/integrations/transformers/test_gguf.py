"""GGUF files in `from_pretrained`: names, configurations, values and refusals."""

import random
import shutil

import pytest
import torch

from tests.support import gguf
from tests.support.paths import ROOT

transformers = pytest.importorskip("transformers")
files = pytest.importorskip("safetensors.torch")

from moe_ops.integrations.transformers import MoeOpsConfig, residency_report
from moe_ops.integrations.transformers.quantizer import MoeOpsQuantizer
from moe_ops.tensors import ExpertTensor
from tests.integrations.checkpoints.test_gguf import mutated
from tests.integrations.transformers.test_families import relative

FIXTURES = ROOT / "tests" / "fixtures" / "gguf"
IDS = torch.tensor([[3, 17, 101, 42, 7, 122, 99, 12, 64, 33, 73, 5, 77, 20, 9, 52]])
SCHEMES = {  # of w13 and of w2
    "gpt_oss-MXFP4_MOE": ("mxfp4_w4a16", "mxfp4_w4a16"),
    "mixtral-Q8_0": ("int8_w8a16:g32", "int8_w8a16:g32"),
    "qwen2moe-IQ4_XS": ("iq4_w4a16:g32:super", "iq4_w4a16:g32"),
    "qwen3moe-NVFP4": ("nvfp4_w4a16", "nvfp4_w4a16"),
    "qwen3moe-Q4_0": ("int4_w4a16:g32", "int4_w4a16:g32"),
    "qwen3moe-tall-Q4_K_M": ("int5_w5a16:g32", "int6_w6a16:g16:super"),
    "qwen3moe-tall-Q5_K_S": ("int5_w5a16:g32:min", "int5_w5a16:g32:super:min"),
    "qwen3moe-wide-Q4_K_M": ("int4_w4a16:g32:super:min", "int5_w5a16:g32"),
}


def load(folder, scheme=None, **options):
    options = {"dtype": torch.float32, "gguf_file": "model.gguf"} | options
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=MoeOpsConfig(scheme), **options
    )


@pytest.mark.parametrize("name", ["qwen3moe-Q4_0", "gpt_oss-MXFP4_MOE"])
def test_experts_in_host_memory(name, tmp_path):
    shutil.copy(FIXTURES / name / "model.gguf", tmp_path)
    want = load(tmp_path)
    experts = sum(p.nbytes for n, p in want.named_parameters() if ".experts." in n)
    config = MoeOpsConfig(gpu_memory=want.get_memory_footprint() - experts // 3)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.float32, gguf_file="model.gguf"
    )
    budget = residency_report(model).budget
    assert all(
        layer.top_k <= count < layer.num_experts
        for layer, count in zip(budget.layers, budget.slots, strict=True)
    )
    assert torch.equal(logits(model), logits(want))


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def change(name, folder, fields=None, tensors=None):
    """A fixture with other fields and tensors; those that are None are left out."""
    said, found, _ = gguf.read((FIXTURES / name / "model.gguf").read_bytes())
    said, found = said | (fields or {}), found | (tensors or {})
    said = {key: value for key, value in said.items() if value is not None}
    said = {key: value for key, value in said.items() if not key.startswith("tokenizer.ggml.to")}
    gguf.write(folder / "model.gguf", said, {n: t for n, t in found.items() if t is not None})
    return found


@pytest.mark.parametrize("plain", [False, True])
def test_the_path_may_be_given_by_its_name(plain, tmp_path):
    """Of GGUF files and, since every call comes by here, of others."""
    want, options = load(FIXTURES / "qwen3moe-Q4_0"), {"dtype": torch.float32}
    if plain:
        want.save_pretrained(tmp_path)
    else:
        options |= {"gguf_file": "model.gguf", "quantization_config": MoeOpsConfig()}
    path = tmp_path if plain else FIXTURES / "qwen3moe-Q4_0"
    for of in (transformers.AutoModelForCausalLM, transformers.Qwen3MoeForCausalLM):
        model = of.from_pretrained(pretrained_model_name_or_path=path, **options)
        assert torch.equal(logits(model), logits(want))


def test_the_file_is_that_of_the_folder(tmp_path, monkeypatch):
    """Also where the folder of the process has one of that name."""
    shutil.copy(FIXTURES / "mixtral-Q8_0" / "model.gguf", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert type(load(FIXTURES / "qwen3moe-Q4_0")) is transformers.Qwen3MoeForCausalLM
    assert type(load(FIXTURES)) is transformers.MixtralForCausalLM
    there = load(FIXTURES, subfolder="qwen3moe-Q4_0")
    assert type(there) is transformers.Qwen3MoeForCausalLM


def test_a_configuration_may_be_given_by_its_path(tmp_path):
    config = load(FIXTURES / "qwen3moe-Q4_0").config
    del config.quantization_config
    config.rope_parameters["rope_theta"] = 7.0
    config.save_pretrained(tmp_path)
    for given in (config, str(tmp_path), tmp_path):
        model = load(FIXTURES / "qwen3moe-Q4_0", config=given)
        assert model.config.rope_parameters["rope_theta"] == 7.0


def test_fields_of_the_configuration_may_be_given():
    options = {"gguf_file": "model.gguf", "quantization_config": MoeOpsConfig()}
    for of in (transformers.AutoModelForCausalLM, transformers.Qwen3MoeForCausalLM):
        model = of.from_pretrained(
            FIXTURES / "qwen3moe-Q4_0", use_cache=False, dtype="float32", **options
        )
        assert model.config.use_cache is False and model.dtype == torch.float32


@pytest.mark.parametrize("name", [*SCHEMES])
def test_files_of_llama_cpp(name, tmp_path):
    expected = files.load_file(FIXTURES / name / "expected.safetensors")
    shutil.copy(FIXTURES / name / "model.gguf", tmp_path)  # all that there is
    model = load(tmp_path)
    assert relative(logits(model), expected["logits"]) < 3e-6  # sums in fp32
    for parameter in [n.removeprefix("probe:") for n in expected if n.startswith("probe:")]:
        weight = model.get_parameter(parameter)
        generator = torch.Generator().manual_seed(5)
        vector = torch.randn(weight.shape[-1], generator=generator, dtype=torch.float64)
        found = (weight.dequantize().double() @ vector).float()
        assert relative(found, expected[f"probe:{parameter}"]) < 1e-6
    block = model.model.layers[0].mlp.experts
    assert (block.gate_up_proj.scheme, block.down_proj.scheme) == SCHEMES[name]
    assert model.config._name_or_path == str(tmp_path)


@pytest.mark.parametrize("name", [name for name in SCHEMES if "NVFP4" not in name])
def test_device_maps_know_the_sizes(name, monkeypatch):
    own, seen = MoeOpsQuantizer.param_element_size, {}

    def param_element_size(self, model, name, param, **kwargs):
        size = own(self, model, name, param, **kwargs)
        seen[name] = size * param.numel()
        return size

    monkeypatch.setattr(MoeOpsQuantizer, "param_element_size", param_element_size)
    model = load(FIXTURES / name, device_map="auto")
    for parameter in ("gate_up_proj", "down_proj"):
        of = f"model.layers.0.mlp.experts.{parameter}"
        assert seen[of] == model.get_parameter(of).nbytes


def test_a_loaded_model_generates_and_is_saved(tmp_path):
    shutil.copy(FIXTURES / "mixtral-Q8_0" / "model.gguf", tmp_path)
    model = load(tmp_path)
    tokens = model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model))
    for layer in model.model.layers:  # the same in plain weights
        for name in ("gate_up_proj", "down_proj"):
            plain = getattr(layer.mlp.experts, name).dequantize()
            setattr(layer.mlp.experts, name, torch.nn.Parameter(plain))
    model.config.experts_implementation = "eager"
    assert torch.equal(
        tokens, model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    )


def test_class_of_a_model_path_of_a_file_and_default_dtype(tmp_path):
    name = "qwen3moe-Q4_0"
    expected = files.load_file(FIXTURES / name / "expected.safetensors")["logits"]
    path = FIXTURES / name / "model.gguf"
    model, info = transformers.Qwen3MoeForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=path,
        quantization_config=MoeOpsConfig(),
        output_loading_info=True,
    )
    assert model.dtype == torch.bfloat16
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert relative(logits(model).float(), expected) < 0.05


def test_a_configuration_of_ones_own(tmp_path):
    shutil.copy(FIXTURES / "qwen3moe-Q4_0" / "model.gguf", tmp_path)
    config = load(tmp_path).config
    del config.quantization_config, config.experts_implementation
    config.norm_topk_prob = False
    model = load(tmp_path, config=config)
    assert not model.config.norm_topk_prob
    assert relative(logits(model), logits(load(tmp_path))) > 1e-3


@pytest.mark.parametrize("name", ["qwen3moe-Q4_0", "gpt_oss-MXFP4_MOE"])
@pytest.mark.parametrize("scheme", [None, "int8_w8a16:channel"])
def test_plain_experts(name, scheme, tmp_path):
    """Experts of fp32; of gpt_oss, whose parameters have columns before rows."""
    _, tensors, _ = gguf.read((FIXTURES / name / "model.gguf").read_bytes())
    plain = {
        n: ("F32", shape, gguf.values(kind, content, shape).tobytes())
        for n, (kind, shape, content) in tensors.items()
        if n.endswith("_exps.weight")
    }
    change(name, tmp_path, tensors=plain)
    model = load(tmp_path, scheme)
    expected = files.load_file(FIXTURES / name / "expected.safetensors")["logits"]
    assert relative(logits(model), expected) < (2e-2 if scheme else 1e-6)
    weight = model.model.layers[0].mlp.experts.down_proj
    assert isinstance(weight, ExpertTensor) == (scheme is not None)


def test_embedding_without_an_output_is_both(tmp_path):
    tensors = change("qwen3moe-Q4_0", tmp_path, tensors={"output.weight": None})
    model = load(tmp_path)
    kind, shape, content = tensors["token_embd.weight"]
    wanted = torch.from_numpy(gguf.values(kind, content, shape))
    assert torch.equal(model.model.embed_tokens.weight, wanted)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_shared_gate_may_be_a_matrix(tmp_path):
    name = "blk.0.ffn_gate_inp_shexp.weight"
    _, tensors, _ = gguf.read((FIXTURES / "qwen2moe-IQ4_XS" / "model.gguf").read_bytes())
    kind, shape, content = tensors[name]
    change("qwen2moe-IQ4_XS", tmp_path, tensors={name: (kind, (1, *shape), content)})
    expected = files.load_file(FIXTURES / "qwen2moe-IQ4_XS" / "expected.safetensors")["logits"]
    assert relative(logits(load(tmp_path)), expected) < 1e-6


def test_positions_are_scaled_as_the_file_says(tmp_path):
    key = "qwen3moe.rope.scaling."
    yarn = {f"{key}type": "yarn", f"{key}factor": 4.0, f"{key}original_context_length": 32}
    change("qwen3moe-Q4_0", tmp_path, yarn)
    assert load(tmp_path).config.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }


Q = "qwen3moe."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({f"{Q}{key}": None}, f"{Q}{key} of .*model.gguf must be a positive")
        for key in (
            "embedding_length",
            "block_count",
            "context_length",
            "attention.head_count",
            "attention.head_count_kv",
            "expert_used_count",
            "expert_feed_forward_length",
            "attention.layer_norm_rms_epsilon",
            "rope.freq_base",
        )
    ]
    + [
        ({f"{Q}expert_count": None}, "qwen3moe.expert_count of .* must be a positive integer"),
        ({f"{Q}rope.freq_basis": 3.0}, "rope.freq_basis of .* must be a field that moe_ops knows"),
        ({f"{Q}attention.value_length": 8}, "value_length of .* must be 16"),
        ({f"{Q}rope.dimension_count": 8}, "rope.dimension_count of .* must be 16"),
        ({f"{Q}vocab_size": 127}, "vocab_size of .* must be 128"),
        ({f"{Q}rope.scaling.factor": 2.0}, "rope.scaling.factor of .* must be beside"),
        ({f"{Q}rope.scaling.type": "su"}, "rope.scaling.type of .* must be 'none', 'linear'"),
        (
            {f"{Q}rope.scaling.type": "longrope", f"{Q}rope.scaling.original_context_length": 32},
            "rope_factors_short.weight of .* must be 8 fp32 numbers, got None",
        ),
        ({f"{Q}expert_feed_forward_length": 64}, "experts.down_proj must have shape"),
        ({f"{Q}block_count": 2**32 - 1}, "block_count of .* must be 1, as the file's tensors"),
        ({f"{Q}expert_used_count": 5}, "expert_used_count of .* must be at most 4"),
        ({"general.architecture": "qwen9moe", "qwen9moe.expert_count": 4}, "got 'qwen9moe'"),
    ],
)
def test_fields_that_are_refused(fields, message, tmp_path):
    change("qwen3moe-Q4_0", tmp_path, fields)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_plain_rows_of_attention_return_to_their_order(tmp_path):
    names = [f"blk.0.attn_{of}.weight" for of in "qk"]
    _, tensors, _ = gguf.read((FIXTURES / "mixtral-Q8_0" / "model.gguf").read_bytes())
    plain = {name: tensors[name] for name in names}
    for name, (kind, shape, content) in plain.items():
        plain[name] = ("F32", shape, gguf.values(kind, content, shape).tobytes())
    change("mixtral-Q8_0", tmp_path, tensors=plain)
    expected = files.load_file(FIXTURES / "mixtral-Q8_0" / "expected.safetensors")["logits"]
    assert relative(logits(load(tmp_path)), expected) < 1e-6


def test_a_backbone_leaves_the_head_out(tmp_path):
    model = transformers.AutoModel.from_pretrained(
        FIXTURES / "mixtral-Q8_0", gguf_file="model.gguf", quantization_config=MoeOpsConfig()
    )
    assert type(model).__name__ == "MixtralModel" and model.dtype == torch.bfloat16
    assert model(IDS).last_hidden_state.isfinite().all()


def test_layers_that_the_model_has_not_are_refused(tmp_path):
    name = "qwen3moe-wide-Q4_K_M"
    change(name, tmp_path, {"qwen3moe.block_count": 1})
    with pytest.raises(ValueError, match=r"block_count of .* must be 2"):
        load(tmp_path)
    config = load(FIXTURES / name).config
    del config.quantization_config, config.experts_implementation
    config.num_hidden_layers = 1
    with pytest.raises(ValueError, match=r"blk.1.* in .* must belong to a layer .* of 1 layers"):
        load(FIXTURES / name, config=config)


@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        ("output_norm", 64),
        ("output", 128),
        ("blk.0.attn_norm", 64),
        ("blk.0.attn_q", 64),
        ("blk.0.ffn_gate_inp", 4),
    ],
)
def test_biases_that_the_model_has_not_are_zeros(tensor, size, tmp_path):
    for value in (0.0, 1.0):
        content = torch.full((size,), value).numpy().tobytes()
        change("qwen3moe-Q4_0", tmp_path, tensors={f"{tensor}.bias": ("F32", (size,), content)})
        if value:
            with pytest.raises(ValueError, match=rf"{tensor}.bias in .*model.gguf must be zero"):
                load(tmp_path)
        else:
            load(tmp_path)


def test_a_dense_model_is_refused(tmp_path):
    change(
        "mixtral-Q8_0",
        tmp_path,
        {"llama.expert_count": None},
        {f"blk.0.ffn_{p}_exps.weight": None for p in ("gate", "up", "down")},
    )
    with pytest.raises(ValueError, match="model.gguf must be a model with experts, got 'llama'"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["qwen3moe-Q4_0", "gpt_oss-MXFP4_MOE"])
def test_each_tensor_is_needed_and_known(name, tmp_path):
    _, tensors, _ = gguf.read((FIXTURES / name / "model.gguf").read_bytes())
    for tensor, (kind, shape, content) in tensors.items():
        if tensor != "output.weight":
            change(name, tmp_path, tensors={tensor: None})
            with pytest.raises(ValueError, match=r"must (be in|have|hold)"):
                load(tmp_path)
        other = tensor[:-3] + tensor[-3:].upper()
        change(name, tmp_path, tensors={tensor: None, other: (kind, shape, content)})
        named = rf"{other} in .*model.gguf must have a name|token_embd.weight must be in"
        with pytest.raises(ValueError, match=named):
            load(tmp_path)


def test_shapes_that_are_not_the_models_are_refused(tmp_path):
    _, tensors, _ = gguf.read((FIXTURES / "qwen3moe-Q4_0" / "model.gguf").read_bytes())
    for tensor in ("blk.0.attn_q.weight", "blk.0.attn_norm.weight", "blk.0.ffn_gate_inp.weight"):
        kind, shape, content = tensors[tensor]
        half = len(content) // 2 if len(shape) > 1 else len(content) - 4
        cut = (shape[0] // 2, shape[1]) if len(shape) > 1 else (shape[0] - 1,)
        change("qwen3moe-Q4_0", tmp_path, tensors={tensor: (kind, cut, content[:half])})
        where = rf"must have shape .*{tensor} in .*model.gguf|{tensor} in .* must have shape"
        with pytest.raises(ValueError, match=where):
            load(tmp_path)


NAMES = {  # of a layer of mixtral, with ".weight"
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
OUTSIDE = {
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd.weight": "model.embed_tokens.weight",
}


def stated(content):
    """The parameters and some fields of a mixtral file, by a reader that checks nothing."""
    fields, tensors, _ = gguf.read(content)
    found = {
        name: torch.from_numpy(gguf.values(kind, data, shape))
        for name, (kind, shape, data) in tensors.items()
    }
    wanted = {to: found[name] for name, to in OUTSIDE.items() if name in found}
    for name, to in NAMES.items():
        value = found[f"blk.0.{name}.weight"]
        if name in ("attn_q", "attn_k"):  # rows of a head: pairs to halves
            heads = fields["llama.attention.head_count" + ("_kv" if name == "attn_k" else "")]
            pairs = value.reshape(heads, -1, 2, value.shape[1])
            value = torch.cat((pairs[:, :, 0], pairs[:, :, 1]), 1).reshape(value.shape)
        wanted[f"model.layers.0.{to}.weight"] = value
    gate, up, down = (found[f"blk.0.ffn_{p}_exps.weight"] for p in ("gate", "up", "down"))
    wanted["model.layers.0.mlp.experts.gate_up_proj"] = torch.cat((gate, up), 1)
    wanted["model.layers.0.mlp.experts.down_proj"] = down
    config = {
        "num_experts_per_tok": fields["llama.expert_used_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": pytest.approx(fields["llama.attention.layer_norm_rms_epsilon"], rel=1e-6),
    }
    return wanted, config


@pytest.mark.slow
def test_mutations_give_what_the_file_states_or_an_error(tmp_path):
    whole = (FIXTURES / "mixtral-Q8_0" / "model.gguf").read_bytes()
    _, _, places = gguf.read(whole)
    header = max(places.values()) + 80
    rng, outcomes = random.Random(0), {"error": 0, "values": 0}
    for _ in range(400):
        content = mutated(whole, header, rng)
        (tmp_path / "model.gguf").write_bytes(content)
        try:
            model = load(tmp_path)
        except (ValueError, RuntimeError) as error:
            assert "model.gguf" in str(error) or "mismatch" in str(error), error
            outcomes["error"] += 1
            continue
        wanted, config = stated(content)
        state = model.state_dict()
        assert state.keys() - {"lm_head.weight"} == wanted.keys() - {"lm_head.weight"}
        for name, value in wanted.items():
            got = (
                state[name].dequantize() if isinstance(state[name], ExpertTensor) else state[name]
            )
            assert torch.equal(got, value), name
        assert {name: getattr(model.config, name) for name in config} == config
        outcomes["values"] += 1
    assert min(outcomes.values()) > 30, outcomes
