"""Checkpoints as the libraries that quantize models write them: names, fields and layouts."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import save_file

from tests.support.writers import (
    AWQ,
    GPTQ,
    MXFP8,
    NVFP4,
    WRITERS,
    AWQWriter,
    BlockFP8,
    Int8,
    MXFP4Packed,
    Writer,
    compressed,
    double,
    e4m3,
)

transformers = pytest.importorskip("transformers")
files = pytest.importorskip("safetensors.torch")

from moe_ops.integrations.checkpoints import Checkpoint
from moe_ops.integrations.transformers import MoeOpsConfig
from tests.integrations.transformers.checkpoints import (
    assert_same_values,
    gpt_oss,
    load,
    mixtral,
    qwen,
    replace_stacks,
    requantize,
    rewrite,
    save_plain,
    schemes_of,
    set_config,
    tiny,
    values_of,
    weights_of,
)
from tests.integrations.transformers.test_families import build, relative
from tests.integrations.transformers.test_models import logits

EVERY_TOKEN = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
GROUPS = {  # writer -> how the class Linear rounds activations, and the experts' scheme
    "ct_fp8": (None, "fp8_w8a16:channel"),
    "ct_int8": (None, "int8_w8a16:channel"),
    "ct_mxfp4": (EVERY_TOKEN | {"dynamic": True}, "mxfp4_w4a16"),
}


@pytest.mark.parametrize(
    "target", ["re:.*[.]mlp[.]experts[.].*", "re:.*[.](gate|up|down)_proj$"], ids=["path", "leaf"]
)
@pytest.mark.parametrize("form", GROUPS)
def test_targets_name_modules_of_the_model(form, target, tmp_path):
    """The file says block_sparse_moe.experts.0.w1; the model that was quantized had
    mlp.experts.0.gate_proj.
    """
    writer, original = copy.deepcopy(WRITERS[form]), mixtral()
    rounded, scheme = GROUPS[form]
    group = writer.config["config_groups"]["group_0"]
    groups = {
        "group_0": group | ({"input_activations": rounded} if rounded else {}),
        "group_1": group | {"targets": [target], "input_activations": None},
    }
    writer.config = writer.config | {"config_groups": groups}
    requantize(tmp_path, writer, original)
    loaded = load(tmp_path)
    assert schemes_of(loaded) == {scheme}
    assert relative(logits(loaded), logits(original)) < 1e-5


def configure(writer, **config):
    writer.config = config
    return writer


def change_names(folder, *pairs):
    def change(tensors):
        for name in list(tensors):
            new = name
            for old, text in pairs:
                new = re.sub(old, text, new)
            tensors[new] = tensors.pop(name)

    rewrite(folder, change)


# --- names ----------------------------------------------------------------------------------

USUAL = (r"\.w1\.", ".gate_proj."), (r"\.w3\.", ".up_proj."), (r"\.w2\.", ".down_proj.")
BLOCK = (r"block_sparse_moe", "mlp")


@pytest.mark.parametrize("names", [USUAL, (BLOCK,), (*USUAL, BLOCK)], ids=["leaf", "path", "both"])
def test_names_of_the_model_in_a_family_with_names_of_its_own(names, tmp_path):
    original = mixtral()
    requantize(tmp_path, copy.deepcopy(WRITERS["ct_int4"]), original)
    change_names(tmp_path, *names)
    loaded = load(tmp_path)
    assert schemes_of(loaded) == {"int4_w4a16:g32"}
    assert_same_values(loaded, original)


def test_one_expert_under_two_names(tmp_path):
    requantize(tmp_path, copy.deepcopy(WRITERS["ct_int4"]), mixtral())
    name = "model.layers.0.block_sparse_moe.experts.3.{}.weight_scale"
    rewrite(tmp_path, lambda t: t.update({name.format("up_proj"): t[name.format("w3")].clone()}))
    with pytest.raises(ValueError, match=r"w3.weight_scale must not be beside .*up_proj.weight_s"):
        load(tmp_path)


def one_by_one(folder, original, writer):
    """gpt_oss with gate and up of each expert apart, and their biases; the model gets the values
    with the rows in turn.
    """
    save_plain(original, folder)
    inner, hidden = 64, 64

    def change(tensors):
        for i, layer in enumerate(original.model.layers):
            experts, base = layer.mlp.experts, f"model.layers.{i}.mlp.experts"
            for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
                del tensors[f"{base}.{name}"]
            for e in range(experts.num_experts):
                values = {}
                for name, shape in {
                    "gate_proj": (inner, hidden),
                    "up_proj": (inner, hidden),
                    "down_proj": (hidden, inner),
                }.items():
                    parts, value = writer.matrix(*shape)
                    values[name] = torch.from_numpy(value).float()
                    tensors |= {f"{base}.{e}.{name}.{part}": t for part, t in parts.items()}
                joined, biases = experts.gate_up_proj.data[e], experts.gate_up_proj_bias[e]
                joined[:, ::2], joined[:, 1::2] = values["gate_proj"].T, values["up_proj"].T
                experts.down_proj.data[e] = values["down_proj"].T
                named = {
                    "gate": biases[::2],
                    "up": biases[1::2],
                    "down": experts.down_proj_bias[e],
                }
                for name, bias in named.items():
                    tensors[f"{base}.{e}.{name}_proj.bias"] = bias.detach().clone()

    rewrite(folder, change)
    set_config(folder, writer.config)


@pytest.mark.parametrize("form", ["ct_int4", "ct_mxfp4", "ct_fp8"])
def test_gpt_oss_with_gate_and_up_of_each_expert(form, tmp_path):
    writer, original = copy.deepcopy(WRITERS[form]), gpt_oss()
    one_by_one(tmp_path, original, writer)
    loaded = load(tmp_path)
    assert len(weights_of(loaded)) == 4
    assert_same_values(loaded, original)


def test_gpt_oss_with_the_halves_of_each_expert(tmp_path):
    """GPTQModel cuts the interleaved rows in the middle, and calls the halves gate and up."""
    writer, original = GPTQ(sym=True, group=32), gpt_oss()
    one_by_one(tmp_path, original, writer)
    with pytest.raises(ValueError, match="gate_up_proj.*must say which library wrote"):
        load(tmp_path)
    set_config(tmp_path, writer.config | {"provider": "auto-round"})
    assert_same_values(load(tmp_path), original)
    set_config(tmp_path, writer.config | {"meta": {"quantizer": ["gptqmodel:7.7.0"]}})
    with torch.no_grad():
        for layer in original.model.layers:
            for t in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.gate_up_proj_bias):
                t.copy_(torch.cat((t[..., ::2], t[..., 1::2]), -1))
    assert_same_values(load(tmp_path), original)


def test_gpt_oss_without_the_bias_of_one_expert(tmp_path):
    one_by_one(tmp_path, gpt_oss(), copy.deepcopy(WRITERS["ct_int4"]))
    name = "model.layers.1.mlp.experts.2.up_proj.bias"
    rewrite(tmp_path, lambda t: t.pop(name))
    with pytest.raises(ValueError, match=r"gate_up_proj_bias must have all .* experts \[2\]"):
        load(tmp_path)
    rewrite(tmp_path, lambda t: t.update({name: torch.zeros(2, 32)}))
    with pytest.raises(ValueError, match=rf"{name} in .*must be a floating-point bias of shape"):
        load(tmp_path)


@pytest.mark.parametrize("scheme", [None, "int8_w8a16"])
def test_plain_experts_beside_quantized_attention(scheme, tmp_path):
    original = qwen(1)
    requantize(tmp_path, copy.deepcopy(WRITERS["ct_int4"]), original, "self_attn")
    loaded = load(tmp_path, scheme)
    schemes = schemes_of(loaded)
    assert schemes == ({"int8_w8a16:channel"} if scheme else set())
    if scheme is None:
        assert_same_values(loaded, original)
        loaded.save_pretrained(tmp_path / "plain")
        text = json.loads((tmp_path / "plain" / "config.json").read_text())
        assert "quantization_config" not in text
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
        assert_same_values(again, original)


MATRICES = {  # beside plain experts: its name in the file, in the model, and how it is stored
    "phimoe": ("model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.router", "channel"),
    "dbrx": (*("transformer.blocks.0.norm_attn_norm.attn.out_proj",) * 2, "channel"),
    "qwen2_moe": (*("model.layers.0.mlp.shared_expert_gate",) * 2, "tensor"),
}


def of_family(family, folder, *args):
    return type(build(family, 1)).from_pretrained(
        folder, quantization_config=MoeOpsConfig(*args), dtype=torch.float32
    )


@pytest.mark.parametrize("family", MATRICES)
def test_quantized_matrices_of_families_with_plain_experts(family, tmp_path):
    """phimoe's hub calls the router gate, which a renaming knows of gate.weight alone. dbrx joins
    experts and rows, and plain weights keep that shape. One row has one scale either way.
    """
    original, (stored, module, shared) = build(family, 1), MATRICES[family]
    form = compressed("float-quantized", TENSOR)
    writers = {"channel": WRITERS["ct_int8"], "tensor": configure(MatrixFP8(), **form)}
    writer = copy.deepcopy(writers[shared])
    save_plain(original, tmp_path)

    def change(tensors):
        parts, value = writer.matrix(*tensors.pop(f"{stored}.weight").shape)
        tensors |= {f"{stored}.{part}": t for part, t in parts.items()}
        original.get_submodule(module).weight.data = torch.from_numpy(value).float()

    rewrite(tmp_path, change)
    set_config(tmp_path, writer.config)
    loaded = of_family(family, tmp_path)
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (loaded, original)]
    assert shapes[0] == shapes[1] and not weights_of(loaded)
    assert_same_values(loaded, original)


def test_names_of_parameters_that_a_renaming_would_change(tmp_path):
    """transformers renames `.norm.` in deepseek_v4's files, but not model.norm, as it saves it."""
    original = build("deepseek_v4", 1)
    save_plain(original, tmp_path)
    loaded = of_family("deepseek_v4", tmp_path, "int8_w8a16")
    assert torch.equal(loaded.model.norm.weight, original.model.norm.weight)
    for name, weight in weights_of(loaded).items():
        assert relative(weight.dequantize(), original.get_parameter(name)) < 0.02, name


# --- fields and layouts -----------------------------------------------------------------------


class SymmetricAWQ(AWQWriter):
    config = AWQWriter.config | {"zero_point": False, "sym": True}

    def matrix(self, n, k):
        tensors, _ = super().matrix(n, k)
        tensors["qzeros"] = torch.full_like(tensors["qzeros"], -0x77777778)  # eight 8s
        words = tensors["qweight"].long() & 0xFFFFFFFF
        places = [AWQ.index(i) for i in range(8)]
        q = torch.stack([(words >> 4 * i) & 15 for i in places], -1).flatten(1).T
        values = (q.double() - 8) * tensors["scales"].double().T.repeat_interleave(64, 1)
        return tensors, values.numpy()


class MXFP8Scaled(MXFP8):
    """compressed-tensors' name of the scales."""

    def matrix(self, n, k):
        tensors, values = super().matrix(n, k)
        return tensors | {"weight_scale": tensors.pop("weight_scale_inv")}, values


class ModelOptMXFP4(MXFP4Packed):
    config = {"quant_method": "modelopt", "quant_algo": "mxfp4"}

    def matrix(self, n, k):
        tensors, values = super().matrix(n, k)
        return {
            "weight": tensors["weight_packed"],
            "weight_scale": tensors["weight_scale"],
        }, values


class TorchAO(Int8):
    """Int8Tensor as transformers saves it."""

    config = {"quant_method": "torchao", "quant_type": {"default": {}}}

    def matrix(self, n, k):
        tensors, values = super().matrix(n, k)
        named = {"_weight_qdata": tensors["weight"], "_weight_scale": tensors["weight_scale"]}
        return named | {"_weight_zero_point": torch.zeros(n, 1, dtype=torch.int8)}, values


AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}
MX = {"bits": 4, "data_type": "mx_fp", "group_size": 32, "sym": True}
NV = MX | {"data_type": "nv_fp", "group_size": 16}
MX_ACT = {"act_bits": 4, "act_data_type": "mx_fp", "act_group_size": 32, "act_dynamic": True}
NV_ACT = MX_ACT | {"act_data_type": "nv_fp4_with_static_gs", "act_group_size": 16}
INT8 = {"quant_method": "modelopt", "quant_algo": "W8A16"}
GPTQMODEL = GPTQ(sym=True).config | {"method": "gptq", "hyb_act": False, "format": "gptq"}

FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
TOKEN = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}


class Unpacked(Writer):
    """compressed-tensors' int-quantized of 4 bits: in int8, a bf16 scale for a group."""

    def matrix(self, n, k):
        q = torch.from_numpy(self.rng.integers(-8, 8, (n, k)).astype("int8"))
        s = torch.from_numpy(self.scales(n, k // 128)).bfloat16()
        return {"weight": q, "weight_scale": s}, double(q) * double(s).repeat(128, 1)


def unpacked(kind):
    activations = kind and TOKEN | {"type": kind}
    return configure(Unpacked(), **compressed("int-quantized", FOUR, activations))


MXFP8A16 = compressed(
    "mxfp8-quantized", FOUR | {"num_bits": 8, "type": "float", "group_size": 32}, None
)
FILES = {
    "w4afp8": (unpacked("float"), "custom:int4,1x128,same:e4m3,1xall,f32,dynamic"),
    "w4a8": (unpacked("int"), "custom:int4,1x128,same:int8,1xall,f32,dynamic"),
    "w4a16 in int8": (unpacked(None), "int4_w4a16:g128"),
    "mxfp8a16": (configure(MXFP8Scaled(), **MXFP8A16), "custom:e4m3,1x32,e8m0,ceil"),
    "gptqmodel": (configure(GPTQ(sym=True), **GPTQMODEL), "int4_w4a16:g128"),
    "symmetric awq": (SymmetricAWQ(), "int4_w4a16:g64"),
    "autoround mxfp4": (configure(MXFP4Packed(), **AUTO_ROUND, **MX, **MX_ACT), "mxfp4"),
    "autoround mxfp4 weights": (
        configure(MXFP4Packed(), **AUTO_ROUND, **MX, act_bits=16),
        "mxfp4_w4a16",
    ),
    "autoround nvfp4": (configure(NVFP4(), **AUTO_ROUND, **NV, **NV_ACT), "nvfp4"),
    "modelopt mxfp4": (ModelOptMXFP4(), "mxfp4_w4a16"),
    "modelopt int8": (configure(Int8(), **INT8), "int8_w8a16:channel"),
}


@pytest.mark.parametrize("case", FILES)
def test_values_and_schemes_of_tools(case, tmp_path):
    writer, scheme = FILES[case]
    writer, original = copy.deepcopy(writer), qwen(1)
    requantize(tmp_path, writer, original)
    loaded = load(tmp_path)
    assert schemes_of(loaded) == {scheme}
    assert_same_values(loaded, original)


def test_integers_of_four_bits_in_int8(tmp_path):
    writer = copy.deepcopy(unpacked("float"))
    original = qwen(1)
    requantize(tmp_path, writer, original)
    loaded = load(tmp_path, "int4_w4a16:g128")  # the same weights, which kernels run
    assert relative(logits(loaded), logits(original)) < 1e-5
    # activations are rounded to e4m3, a scale for a token
    assert 1e-3 < relative(logits(load(tmp_path)), logits(original)) < 0.1
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    rewrite(tmp_path, lambda t: t[name][3].fill_(8))
    with pytest.raises(ValueError, match=f"{name} in .* must be in -8..7, .* got -8..8"):
        load(tmp_path)
    asymmetric = FOUR | {"symmetric": False}
    set_config(tmp_path, compressed("int-quantized", asymmetric, TOKEN | {"type": "float"}))
    with pytest.raises(ValueError, match="symmetric of weights must be True"):
        load(tmp_path)


REFUSED = {
    "gptqmodel": (GPTQ(sym=True), GPTQMODEL | {"method": "qqq"}, "method of quantization_config"),
    "rounded": (MXFP4Packed(), AUTO_ROUND | MX | MX_ACT | {"act_group_size": 64}, "act_data_type"),
    "scaled": (NVFP4(), AUTO_ROUND | NV | NV_ACT | {"data_type": "fp8"}, "data_type, bits and"),
    "static": (MXFP4Packed(), AUTO_ROUND | MX | MX_ACT | {"act_dynamic": False}, "act_dynamic"),
    "gptq": (
        GPTQ(),
        GPTQ().config | MX_ACT | {"quant_method": "auto-round", "format": None},
        "data_type and act_bits of",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_fields_of_tools_that_cannot_be_followed(case, tmp_path):
    writer, config, message = REFUSED[case]
    config = {k: v for k, v in config.items() if k != "checkpoint_format" or case == "gptqmodel"}
    requantize(tmp_path, configure(copy.deepcopy(writer), **config), qwen(1))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_elements_by_expert_and_stacked_scales(tmp_path):
    """As transformers saves a model that it loaded with FineGrainedFP8Config."""
    original, base = qwen(1), "model.layers.0.mlp.experts"
    requantize(tmp_path, BlockFP8(), original)

    def stack(tensors):
        for name in ("gate_up_proj", "down_proj"):
            parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(name, (name,))
            names = [[f"{base}.{e}.{p}.weight_scale_inv" for p in parts] for e in range(4)]
            scales = [torch.cat([tensors.pop(n) for n in expert]) for expert in names]
            tensors[f"{base}.{name}_scale_inv"] = torch.stack(scales)

    rewrite(tmp_path, stack)
    loaded = load(tmp_path)
    assert schemes_of(loaded) == {"fp8_block"}
    assert_same_values(loaded, original)
    checkpoint = Checkpoint(tmp_path)
    for names, weight in (
        (("gate_proj", "up_proj"), "gate_up_proj"),
        (("down_proj",), "down_proj"),
    ):
        for _ in range(2):
            got = checkpoint.expert_weight(base, names, expert_ids=range(1, 3))
            got = got.dequantize(torch.float32)
            assert relative(got, original.get_parameter(f"{base}.{weight}")[1:3]) < 1e-6
    rewrite(tmp_path, lambda t: t.update({f"{base}.down_proj_scale_inv": torch.ones(4, 1, 1)}))
    with pytest.raises(ValueError, match=r"down_proj_scale_inv in .* with shape \(4, 2, 1\), got"):
        load(tmp_path)


def test_stacks_of_modelopt_have_pairs_along_the_columns(tmp_path):
    """gpt_oss in NVFP4: (E, K/2, N) as the model has it, one global scale for all experts."""
    original = gpt_oss()

    def parts(weight):
        E, K, N = weight.shape
        found, values = NVFP4(modelopt=True).matrix(E * N, K)
        found["values"] = torch.from_numpy(values).float()
        found |= {role: t.view(E, N, -1).mT for role, t in found.items() if t.dim()}
        values = found.pop("values")
        return {"": found.pop("weight"), **{f"_{r}": t for r, t in found.items()}}, values

    replace_stacks(tmp_path, original, parts)
    set_config(tmp_path, NVFP4(modelopt=True).config)
    loaded = load(tmp_path)
    assert schemes_of(loaded) == {"nvfp4"}
    assert_same_values(loaded, original)


def llama4():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 64}
    sizes |= {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16, "moe_layers": [0]}
    model = tiny("Llama4", **sizes)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 3:
                p.normal_()
    return model


def fp8_stacks(folder, original, algorithm, scales, **more):
    """ModelOpt's, which lie as the model's: (E, K, N), with one scale or one for each expert."""
    generator = torch.Generator().manual_seed(1)

    def parts(weight):
        codes = (torch.randn(weight.shape, generator=generator) * 40).to(torch.float8_e4m3fn)
        scale = 0.002 + 0.003 * torch.rand(scales, generator=generator)
        values = (codes.double() * scale.double().view(*scales, 1, 1)).float()
        more_parts = {f"_{role}": value for role, value in more.items()}
        return {"": codes, "_weight_scale": scale, **more_parts}, values

    replace_stacks(folder, original, parts)
    set_config(folder, {"quant_method": "modelopt", "quant_algo": algorithm})


FP8_STACKS = {
    "FP8": ((), {"input_scale": torch.tensor(0.02)}, "fp8_tensor_static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ((4,), {}, "fp8_channel"),
}


@pytest.mark.parametrize("algorithm", FP8_STACKS)
@pytest.mark.parametrize("make", [gpt_oss, llama4])
def test_fp8_stacks_of_modelopt_lie_as_the_models(make, algorithm, tmp_path):
    original, (scales, more, scheme) = make(), FP8_STACKS[algorithm]
    fp8_stacks(tmp_path, original, algorithm, scales, **more)
    loaded = load(tmp_path)
    assert schemes_of(loaded) == {scheme}
    assert_same_values(loaded, original)


def test_other_stacks_of_models_with_columns_first_are_refused(tmp_path):
    """Nobody is known to write them, so nothing says whether rows or columns come first."""
    fp8_stacks(tmp_path, gpt_oss(), "FP8", (), input_scale=torch.tensor(0.02))
    set_config(tmp_path, compressed("float-quantized", TENSOR, TENSOR))
    with pytest.raises(ValueError, match="down_proj in .* must hold experts one by one, pairs of"):
        load(tmp_path)
    integers = TENSOR | {"type": "int"}
    set_config(tmp_path, compressed("int-quantized", integers, integers | {"dynamic": True}))

    def change(tensors):
        for name in [n for n in tensors if tensors[n].dtype == torch.float8_e4m3fn]:
            tensors[name] = tensors[name].view(torch.int8)
        for name in [n for n in tensors if n.endswith("input_scale")]:
            del tensors[name]

    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match="down_proj in .* of torch.int8 for a model that keeps"):
        load(tmp_path)


class SmoothQuant(Writer):
    """ModelOpt's W8A8_SQ_PER_CHANNEL: x is multiplied by factors of the columns and rounded by a
    static scale; the matrix was divided by them.
    """

    config = {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}
    factors = True

    def matrix(self, n, k):
        q = torch.from_numpy(self.rng.integers(-127, 128, (n, k)).astype("int8"))
        scale = torch.from_numpy(self.scales(n) / 10).float()
        tensors = {"weight": q, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
        values = double(q) * double(scale)[:, None]
        if self.factors:
            factors = torch.from_numpy(self.scales(k) * 100).bfloat16()
            tensors["pre_quant_scale"] = factors
            values = values * double(factors)
        return tensors, values


def test_smoothed_attention_and_experts_without_factors(tmp_path):
    original = qwen(1)
    save_plain(original, tmp_path)
    requantize(tmp_path, SmoothQuant(), original, "self_attn")
    plain = configure(SmoothQuant(), **SmoothQuant.config)
    plain.factors = False
    more = {}

    def experts(tensors):
        other = qwen(1)
        requantize(tmp_path / "other", plain, other, "experts")
        more.update({n: p for n, p in other.named_parameters() if "experts" in n})
        stored = files.load_file(tmp_path / "other" / "model.safetensors")
        for name in [n for n in tensors if ".experts." in n]:
            del tensors[name]
        tensors.update({n: t for n, t in stored.items() if ".experts." in n})

    rewrite(tmp_path, experts)
    for name, values in more.items():
        original.get_parameter(name).data = values.data
    loaded = load(tmp_path)
    assert schemes_of(loaded) == {"int8_w8a8_static"}
    assert_same_values(loaded, original)
    k_proj = "model.layers.0.self_attn.k_proj.pre_quant_scale"
    rewrite(tmp_path, lambda t: t.update({k_proj: t[k_proj][:-1]}))
    with pytest.raises(ValueError, match=r"pre_quant_scale must have shape \(256,\), got \(255,"):
        load(tmp_path)


def test_smoothed_experts_are_refused(tmp_path):
    requantize(tmp_path, SmoothQuant(), qwen(1))
    with pytest.raises(ValueError, match="pre_quant_scale .* must be absent: .* multiply each"):
        load(tmp_path)


def test_torchao_attention_beside_plain_experts(tmp_path):
    original, name = qwen(1), "model.layers.0.self_attn.k_proj"
    requantize(tmp_path, TorchAO(), original, "self_attn")
    assert_same_values(load(tmp_path), original)
    loaded = load(tmp_path, "int8_w8a16")
    got, want = values_of(loaded), values_of(original)
    plain = [name for name in want if "experts" not in name]
    assert plain and all(relative(got[name], want[name]) < 1e-6 for name in plain)
    rewrite(tmp_path, lambda t: t[f"{name}._weight_zero_point"].fill_(1))
    with pytest.raises(ValueError, match=f"{name}._weight_qdata in .* weight_zero_point must be"):
        load(tmp_path, "int8_w8a16")


def test_stacks_of_modelopt_with_groups_of_rows(tmp_path):
    """gpt_oss in MXFP4: (E, K, N/2), where down_proj is square and shapes would fit either way."""

    def parts(weight):
        E, K, N = weight.shape
        scales = torch.full((E, K, N // 32), 127, dtype=torch.uint8)
        codes = torch.zeros(E, K, N // 2, dtype=torch.uint8)
        return {"": codes, "_weight_scale": scales}, weight.data

    replace_stacks(tmp_path, gpt_oss(), parts, "down_proj")
    set_config(tmp_path, ModelOptMXFP4.config)
    with pytest.raises(ValueError, match="down_proj in .* groups lie along the rows"):
        load(tmp_path)


def test_one_block_without_dimensions(tmp_path):
    """ModelOpt writes (1, 1, 1, 1) for some matrices of one block, and () for others."""
    tensors, want = {}, []
    for e, shape in enumerate(((1, 1, 1, 1), ())):
        q, scale = torch.randn(128, 128).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
        tensors |= {
            f"experts.{e}.down_proj.weight": q,
            f"experts.{e}.down_proj.weight_scale": scale,
        }
        want.append(q.float() * scale.item())
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    got = Checkpoint(tmp_path, config).expert_weight("experts", ("down_proj",))
    assert got.scheme == "fp8_w8a16:block"
    assert torch.equal(got.dequantize(torch.float32), torch.stack(want))


def test_torchao_experts(tmp_path):
    requantize(tmp_path, TorchAO(), qwen(1))
    with pytest.raises(ValueError, match="quantized experts must not be torchao's"):
        load(tmp_path)


@pytest.mark.parametrize("old", [r"k_proj\.weight", "self_attn.k_proj"])
def test_parameters_whose_tensors_have_unknown_names(old, tmp_path):
    save_plain(qwen(1), tmp_path)
    change_names(tmp_path, (old, "k_proj.codes" if "weight" in old else "attention.wk"))
    with pytest.raises(ValueError, match=r"k_proj.weight must be .*got model.layers.0.* takes"):
        load(tmp_path, "int8_w8a16")


class NVFP4OfMatrices(NVFP4):
    """Gate and up of an expert have different global scales."""

    def matrix(self, n, k):
        self.factor = float(self.rng.integers(5, 20)) / 10
        return super().matrix(n, k)


@pytest.mark.parametrize("modelopt", [False, True])
def test_gate_and_up_with_different_global_scales(modelopt, tmp_path):
    original = qwen(1)
    requantize(tmp_path, NVFP4OfMatrices(modelopt=modelopt), original)
    loaded = load(tmp_path, "nvfp4_w4a16")
    w13, w2 = weights_of(loaded).values()
    assert w13.global_scale.shape == (*w13.shape[:2], 1)
    assert w2.global_scale.shape == w2.shape[:1]
    assert_same_values(loaded, original)
    loaded.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_values(again, original)


def test_gpt_oss_with_different_global_scales(tmp_path):
    """Rows of gate and up take turns."""
    original = gpt_oss()
    one_by_one(tmp_path, original, NVFP4OfMatrices())
    assert_same_values(load(tmp_path, "nvfp4_w4a16"), original)


TENSOR = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
MATRIX_SCALES = {
    "weights": (compressed("float-quantized", TENSOR), "fp8_w8a16:channel"),
    "dynamic": (
        compressed("float-quantized", TENSOR, TENSOR | {"dynamic": True}),
        "fp8_channel_tensor",
    ),
    "static": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8_channel_tensor_static"),
}


class MatrixFP8(Writer):
    """One scale for each matrix: gate and up of an expert have different ones."""

    def matrix(self, n, k):
        q, scale = e4m3(self.rng, n, k), torch.from_numpy(self.scales(1) / 10).float()
        tensors = {"weight": q, "weight_scale": scale}
        if self.config["quant_method"] == "modelopt":
            tensors["input_scale"] = torch.tensor(0.02)
        return tensors, double(q) * double(scale)


@pytest.mark.parametrize("case", MATRIX_SCALES)
def test_gate_and_up_with_different_scales_of_a_matrix(case, tmp_path):
    config, scheme = MATRIX_SCALES[case]
    original = qwen(1)
    requantize(tmp_path, configure(MatrixFP8(), **config), original)
    loaded = load(tmp_path)
    assert schemes_of(loaded) == {scheme}
    assert_same_values(loaded, original)
    assert_same_values(load(tmp_path, "fp8_w8a16:channel"), original)
    with pytest.raises(ValueError, match="scheme must be one whose weights are stored as"):
        load(tmp_path, "fp8_w8a16:tensor")
