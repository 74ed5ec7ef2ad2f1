"""GGUF files of each architecture: the logits of the model that they were made of, and refusals.

The files are of `tools.llama_cpp`: their Q8_0 blocks hold the numbers of the model before all
conversions, which computed the logits without moe_ops.
"""

import random

import numpy as np
import pytest
import torch

from tests.support import gguf
from tests.support.paths import ROOT

transformers = pytest.importorskip("transformers")
files = pytest.importorskip("safetensors.torch")

from moe_ops.integrations.checkpoints import Checkpoint
from moe_ops.integrations.transformers import MoeOpsConfig
from moe_ops.integrations.transformers.gguf_names import ARCHITECTURES
from moe_ops.integrations.transformers.layers import find
from moe_ops.tensors import ExpertTensor
from tests.integrations.checkpoints.test_gguf import mutated
from tests.integrations.transformers.test_families import relative

FIXTURES = ROOT / "tests" / "fixtures" / "gguf_models"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.gguf"))
IDS = torch.tensor([[3, 17, 31, 22, 7, 12, 29, 12, 4, 13, 23, 5, 27, 20, 9, 2]])
LOGITS = files.load_file(FIXTURES / "logits.safetensors")


def load(path, scheme=None, **options):
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=MoeOpsConfig(scheme),
            dtype=torch.float32,
            **options,
        )
    except ValueError as error:
        if "does not recognize" in str(error) or "Unrecognized model" in str(error):
            pytest.skip(f"transformers {transformers.__version__} does not have this model")
        raise


def logits(model):
    with torch.no_grad():
        return model(IDS).logits[0]


def content_of(path):
    fields, tensors, _ = gguf.read(path.read_bytes())
    return {k: v for k, v in fields.items() if not k.startswith("tokenizer.")}, tensors


def numbers(tensor):
    kind, shape, data = tensor
    return gguf.values(kind, data, shape)


def plain(values):
    return "F32", values.shape, np.ascontiguousarray(values, np.float32).tobytes()


def changed(name, folder, fields=None, tensors=None):
    """A fixture with other fields and tensors; those that are None are left out."""
    said, found = content_of(FIXTURES / f"{name}.gguf")
    said, found = said | (fields or {}), found | (tensors or {})
    said = {key: value for key, value in said.items() if value is not None}
    found = {key: value for key, value in found.items() if value is not None}
    return gguf.write(folder / "model.gguf", said, found)


def test_every_architecture_has_a_file():
    folders = (FIXTURES.parent / "gguf").glob("*/model.gguf")
    paths = [*FIXTURES.glob("*.gguf"), *folders]
    assert {Checkpoint(path).files.architecture for path in paths} == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_model_before(name):
    model = load(FIXTURES / f"{name}.gguf")
    assert relative(logits(model), LOGITS[name]) < 2e-6
    layers = find(model)
    for layer in layers:
        for weight in layer.weights:
            found = layer.weight(weight)
            assert isinstance(found, ExpertTensor) and found.scheme == "int8_w8a16:g32"


@pytest.mark.parametrize("name", ["qwen3next", "llama4", "lfm2moe"])
@pytest.mark.parametrize("scheme", [None, "int8_w8a16:channel"])
def test_files_without_blocks(name, scheme, tmp_path):
    _, tensors = content_of(FIXTURES / f"{name}.gguf")
    path = changed(name, tmp_path, tensors={n: plain(numbers(t)) for n, t in tensors.items()})
    model = load(path, scheme)
    assert relative(logits(model), LOGITS[name]) < (5e-2 if scheme else 2e-6)
    weight = find(model)[0].weight(find(model)[0].weights[0])
    assert isinstance(weight, ExpertTensor) == (scheme is not None)


def test_experts_that_lie_one_by_one(tmp_path):
    """As in llama.cpp's files of Mixtral before it stacked them."""
    folder = FIXTURES.parent / "gguf" / "mixtral-Q8_0"
    fields, tensors = content_of(folder / "model.gguf")
    single = {}
    for name, (kind, shape, data) in tensors.items():
        if "_exps." not in name:
            single[name] = (kind, shape, data)
            continue
        size = len(data) // shape[0]
        for e in range(shape[0]):
            one = name.replace("_exps.", f".{e}.")
            single[one] = kind, shape[1:], data[e * size : (e + 1) * size]
    path = gguf.write(tmp_path / "model.gguf", fields, single)
    whole = Checkpoint(folder / "model.gguf").expert_weight("blk.0", ("ffn_down_exps",))
    found = Checkpoint(path).expert_weight("blk.0", ("ffn_down_exps",))
    assert torch.equal(found.dequantize(torch.float32), whole.dequantize(torch.float32))
    expected = files.load_file(folder / "expected.safetensors")["logits"]
    ids = torch.tensor([[3, 17, 101, 42, 7, 122, 99, 12, 64, 33, 73, 5, 77, 20, 9, 52]])
    with torch.no_grad():
        assert relative(load(path)(ids).logits, expected) < 1e-6
    spare = {name.replace(".0.weight", ".4.weight"): t for name, t in single.items()}
    gguf.write(path, fields, single | {n: t for n, t in spare.items() if ".4.weight" in n})
    with pytest.raises(ValueError, match=r"ffn_.*\.4\.weight in .* must be of the experts 0 to 3"):
        Checkpoint(path)
    gguf.write(path, fields, {n: t for n, t in single.items() if n != "blk.0.ffn_up.3.weight"})
    with pytest.raises(ValueError, match=r"must have all projections of experts"):
        load(path)


def test_latent_attention_of_older_files(tmp_path):
    """Keys and values of the latent in one matrix, and lengths of heads under the usual names."""
    name, tensors = "deepseek2-sigmoid", content_of(FIXTURES / "deepseek2-sigmoid.gguf")[1]
    new = {}
    for layer in range(2):
        keys, values = (f"blk.{layer}.attn_{of}_b.weight" for of in "kv")
        both = (numbers(tensors[keys]).transpose(0, 2, 1), numbers(tensors[values]))
        joined = np.concatenate(both, 1).reshape(-1, 32)
        new |= {keys: None, values: None, f"blk.{layer}.attn_kv_b.weight": plain(joined)}
    d = "deepseek2.attention."
    fields = {f"{d}key_length": 48, f"{d}value_length": 16, f"{d}head_count_kv": 2}
    fields |= {f"{d}key_length_mla": None, f"{d}value_length_mla": None}
    path = changed(name, tmp_path, fields, new)
    assert relative(logits(load(path)), LOGITS[name]) < 2e-6


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    name = "glm4moe"
    _, tensors = content_of(FIXTURES / f"{name}.gguf")
    more = {n.replace("blk.1.", "blk.2."): t for n, t in tensors.items() if "blk.1." in n}
    more["blk.2.nextn.eh_proj.weight"] = plain(np.ones((32, 64)))
    path = changed(name, tmp_path, tensors=more)
    assert relative(logits(load(path)), LOGITS[name]) < 2e-6
    path = changed(name, tmp_path, {"glm4moe.nextn_predict_layers": 0}, more)
    with pytest.raises(ValueError, match=r"nextn.eh_proj.weight in .* must have a name"):
        load(path)


def test_divisors_of_positions(tmp_path):
    """Divisors for short and for long texts, beside a factor of their cosines."""
    p = "phimoe.rope.scaling."
    fields = {f"{p}original_context_length": 32, f"{p}attn_factor": 1.25}
    divisors = np.linspace(1, 4, 8, dtype=np.float32)
    both = {
        f"rope_factors_{n}.weight": plain(divisors * k) for n, k in (("short", 1), ("long", 2))
    }
    path = changed("phimoe", tmp_path, fields, both)
    rope = {
        **{"rope_type": "longrope", "rope_theta": 1e6, "short_factor": divisors.tolist()},
        **{"long_factor": (2 * divisors).tolist(), "original_max_position_embeddings": 32},
        **{"short_mscale": 1.25, "long_mscale": 1.25},
    }
    config = load(FIXTURES / "phimoe.gguf").config
    del config.quantization_config, config.experts_implementation
    config.rope_parameters = rope
    want = logits(load(FIXTURES / "phimoe.gguf", config=config))
    assert relative(logits(load(path)), want) < 1e-6
    assert relative(want, LOGITS["phimoe"]) > 1e-2
    for wrong in (divisors[:-1], -divisors):
        other = both | {"rope_factors_long.weight": plain(wrong)}
        with pytest.raises(ValueError, match=r"rope_factors_long.weight .* must"):
            load(changed("phimoe", tmp_path, fields, other))
    del both["rope_factors_long.weight"]
    with pytest.raises(ValueError, match="rope_factors_long.weight of .* must be 8 fp32 numbers"):
        load(changed("phimoe", tmp_path, fields, both))
    linear = {"llama4.rope.scaling.type": "linear", "llama4.rope.scaling.factor": 2.0}
    with pytest.raises(ValueError, match="rope.scaling.type of .* must be 'none' or 'longrope'"):
        load(changed("llama4", tmp_path, linear))


D, Q = "deepseek2.", "qwen3next."


@pytest.mark.parametrize(
    ("name", "fields", "tensors", "message"),
    [
        ("qwen35moe", {"qwen35moe.rope.dimension_sections": 3}, {}, "sections of .* must be int"),
        (
            "deepseek2-sigmoid",
            {},
            {"blk.0.attn_v_b.weight": None},
            r"attn_k_b.* must be beside the tensors .*kv_b_proj.*, got none of the name attn_v_b",
        ),
        (
            "deepseek2-sigmoid",
            {f"{D}expert_gating_func": None},
            {},
            "expert_gating_func of .* must be 2, sigmoid, beside exp_probs_b",
        ),
        (
            "deepseek2-softmax",
            {f"{D}expert_gating_func": 4},
            {},
            "expert_gating_func of .* must be 2, sigmoid",
        ),
        (
            "deepseek2-softmax",
            {f"{D}expert_weights_norm": True},
            {},
            "expert_weights_norm of .* must be false",
        ),
        ("deepseek2-softmax", {f"{D}attention.key_length_mla": 16}, {}, "must be more than 16"),
        (
            "deepseek2-softmax",
            {f"{D}attention.head_count": 3},
            {},
            "(?s)transformers has, got: .*heads",
        ),
        ("dots1", {"dots1.expert_gating_func": 1}, {}, "expert_gating_func of .* must be 2, as"),
        (
            "dots1",
            {"dots1.expert_weights_norm": 1},
            {},
            "weights_norm of .* must be true or false",
        ),
        ("dots1", {"dots1.leading_dense_block_count": 0}, {}, "layers.0.mlp.* must be in"),
        (
            "hunyuan-moe",
            {"hunyuan-moe.expert_shared_count": 2},
            {},
            "shared_count of .* must be 1",
        ),
        (
            "hunyuan-moe",
            {"hunyuan-moe.expert_feed_forward_length": 64},
            {},
            "expert_feed_forward_length of .* must be 32, as hunyuan-moe.feed_forward_length is",
        ),
        (
            "lfm2moe",
            {"lfm2moe.attention.head_count_kv": 1},
            {},
            "head_count_kv of .* must be 0 or",
        ),
        (
            "granitemoe",
            {"granitemoe.logit_scale": None},
            {},
            "logit_scale of .* must be a positive",
        ),
        ("qwen3next", {f"{Q}ssm.inner_size": 63}, {}, "inner_size of .* must be a multiple of 4"),
        (
            "qwen3next",
            {f"{Q}ssm.time_step_rank": 3},
            {},
            "time_step_rank of .* must be a multiple",
        ),
        ("qwen3next", {f"{Q}ssm.group_count": 4}, {}, "must have shape|must have the shape"),
        ("qwen3next", {f"{Q}nextn_predict_layers": 2}, {}, "predict_layers of .* less than 2"),
        (
            "qwen3next",
            {},
            {"blk.0.attn_gate.weight": None},
            r"attn_qkv.* must be beside .*, got none of the name attn_gate",
        ),
        (
            "llama4",
            {"llama4.attention.sliding_window": 0},
            {},
            "must be a field that moe_ops knows",
        ),
    ],
)
def test_refused(name, fields, tensors, message, tmp_path):
    path = changed(name, tmp_path, fields, tensors)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert "model.gguf" in str(error.value)


def test_a_parameter_in_two_forms_is_refused(tmp_path):
    _, tensors = content_of(FIXTURES / "qwen35moe.gguf")
    fused = tensors["blk.0.ffn_gate_up_exps.weight"]
    half = len(fused[2]) // 2
    gate = {"blk.0.ffn_gate_exps.weight": (fused[0], (4, 32, 32), fused[2][:half])}
    with pytest.raises(ValueError, match=r"gate_up_proj must not be beside .*gate_proj"):
        load(changed("qwen35moe", tmp_path, tensors=gate))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_is_needed_and_known(name, tmp_path):
    _, tensors = content_of(FIXTURES / f"{name}.gguf")
    optional = ("output.weight", "rope_freqs.weight")  # the embedding, and positions as they are
    for tensor, content in tensors.items():
        if tensor not in optional and not tensor.endswith(("_q.bias", "_q_norm.weight")):
            with pytest.raises(ValueError, match=r"must (be in|be beside|have|hold)"):
                load(changed(name, tmp_path, tensors={tensor: None}))
        other = tensor[:-3] + tensor[-3:].upper()
        with pytest.raises(
            ValueError, match=r"model.gguf must have a name|token_embd.weight must"
        ):
            load(changed(name, tmp_path, tensors={tensor: None, other: content}))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_mutations_give_what_the_file_states_or_an_error(name, tmp_path):
    """What loads is what a reader that checks nothing has written into another file."""
    whole = (FIXTURES / f"{name}.gguf").read_bytes()
    _, _, places = gguf.read(whole)
    header = max(places.values()) + 80
    rng, path, loaded = random.Random(0), tmp_path / "model.gguf", 0
    for i in range(400):
        if i >= 60 and loaded > 2:
            break
        content = mutated(whole, header, rng)
        path.write_bytes(content)
        try:
            state = load(path).state_dict()
        except (ValueError, RuntimeError) as error:
            assert "model.gguf" in str(error) or "mismatch" in str(error), error
            continue
        loaded += 1
        again = load(gguf.write(path, *content_of(path))).state_dict()
        assert state.keys() == again.keys()
        for key, value in state.items():
            other = again[key]
            if isinstance(value, ExpertTensor):
                value, other = value.dequantize(), other.dequantize()
            assert torch.equal(value, other), key
    assert loaded > 2
