"""from_pretrained on quantized checkpoints in their original layouts, and on plain ones."""

import copy
import json
import re
import warnings

import numpy as np
import pytest
import torch

from tests.support.writers import GPTQ, WRITERS, Packed, gpt_oss_blocks

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")
files = pytest.importorskip("safetensors.torch")

from transformers.models.qwen3_moe import modeling_qwen3_moe

from moe_ops.integrations.transformers import MoeOpsConfig, attach, quantize
from tests.integrations.transformers import test_families
from tests.integrations.transformers.checkpoints import (
    INNER,
    E,
    H,
    assert_same_values,
    edit_config,
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
    weights_of,
)
from tests.integrations.transformers.test_families import relative
from tests.integrations.transformers.test_models import logits


@pytest.mark.parametrize("form", WRITERS)
def test_every_format_gives_the_logits_of_its_values(form, tmp_path):
    """All matrices of the layers are quantized, attention too; two layers, so that names must
    fit."""
    writer, original = copy.deepcopy(WRITERS[form]), qwen()
    requantize(tmp_path, writer, original)
    scheme = writer.weight_only or None
    loaded = load(tmp_path, scheme)
    assert len(weights_of(loaded)) == 4
    rounded = form in ("ct_int8", "mxfp8")  # their activations always are
    assert relative(logits(loaded), logits(original)) < (0.1 if rounded else 1e-5)
    if scheme:  # with the scheme of the checkpoint activations are rounded too
        loaded = load(tmp_path)
        assert all(w.scheme != scheme for w in weights_of(loaded).values())
        x, ids = torch.randn(6, H), torch.stack([torch.randperm(E)[:2] for _ in range(6)])
        with torch.no_grad():
            got, want = (
                m.model.layers[1].mlp.experts(x, ids, torch.full((6, 2), 0.5))
                for m in (loaded, original)
            )
        error = ((got - want).norm() / want.norm()).item()  # of 4 and 8 bits, twice
        assert 1e-3 < error < (0.3 if "nvfp4" in form else 0.08)


def test_gpt_oss_mxfp4_checkpoint(tmp_path):
    """Blocks and scales of interleaved gate and up rows, as gpt-oss has them, beside its
    biases."""
    original, rng = gpt_oss(), np.random.default_rng(1)

    def parts(weight):
        (blocks, scales), values = gpt_oss_blocks(rng, E, weight.shape[2], weight.shape[1])
        return {"_blocks": blocks, "_scales": scales}, torch.from_numpy(values).float().mT

    replace_stacks(tmp_path, original, parts)
    set_config(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": []})
    loaded = load(tmp_path)
    assert schemes_of(loaded) == {"mxfp4_w4a16"}
    assert relative(logits(loaded), logits(original)) < 1e-5
    saved = tmp_path / "saved"
    loaded.save_pretrained(saved)
    again = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert torch.equal(logits(again), logits(loaded))
    for name, weight in weights_of(again).items():
        inner = weight.transpose(1, 2)
        assert inner.qdata.is_contiguous() and inner.shape == (E, *weight.shape[:0:-1]), name


class Swizzled:
    """Stands for triton_kernels' tensor on a GPU: data in another order than the checkpoint's."""

    def __init__(self, natural):  # (E, N, columns) uint8
        self.storage = self
        self.layout = self
        self.data = natural.transpose(1, 2).flip(1).contiguous()

    def unswizzle_data(self, data):
        return data.flip(1)


def test_gpt_oss_of_transformers_own_mxfp4_kernels():
    """attach() puts a GptOssMLP in the place of theirs; values are those of transformers'
    dequantization."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    original, model = gpt_oss(), gpt_oss()
    rng = np.random.default_rng(1)
    for layer, plain in zip(model.model.layers, original.model.layers, strict=True):
        with torch.device("meta"):
            experts = mxfp4.Mxfp4GptOssExperts(model.config)
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(plain.mlp.experts, name)  # (E, columns, rows)
            (blocks, scales), _ = gpt_oss_blocks(rng, E, weight.shape[2], weight.shape[1])
            weight.data = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            bias = getattr(plain.mlp.experts, f"{name}_bias")
            setattr(experts, f"{name}_bias", torch.nn.Parameter(bias.detach().clone(), False))
            delattr(experts, name)
            setattr(experts, name, Swizzled(blocks.flatten(2)))
            precision = type("PrecisionConfig", (), {"weight_scale": Swizzled(scales)})
            setattr(experts, f"{name}_precision_config", precision)
        layer.mlp.experts = experts
    unloaded = copy.deepcopy(model)
    delattr(unloaded.model.layers[1].mlp.experts, "down_proj")
    unloaded.model.layers[1].mlp.experts.down_proj = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="layers.1.mlp.experts.down_proj must be loaded"):
        attach(unloaded)
    assert type(unloaded.model.layers[0].mlp.experts).__name__ == "Mxfp4GptOssExperts"
    report = attach(model)
    assert report.layers[0].path == "fused_experts" and "swigluoai" in str(report)
    assert schemes_of(model) == {"mxfp4_w4a16"}
    assert relative(logits(model), logits(original)) < 1e-5


@pytest.mark.parametrize("build", [qwen, mixtral])
def test_plain_checkpoint_is_quantized_while_it_is_read(build, tmp_path):
    """The same as loading it and then quantizing, to the bit."""
    save_plain(build(), tmp_path)
    loaded = load(tmp_path, "int4_w4a16:g64")
    want = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    quantize(want.bfloat16(), "int4_w4a16:g64")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert weights_of(loaded).keys() == weights_of(want).keys() != set()
    for name, weight in weights_of(loaded).items():
        other = want.get_parameter(name)
        assert torch.equal(weight.qdata, other.qdata) and torch.equal(weight.scale, other.scale)
        values = weight.dequantize(torch.float32)
        assert weight.dtype == torch.float32 and weight.scale.dtype == torch.bfloat16
        plain.get_parameter(name).data.copy_(values)
    assert relative(logits(loaded), logits(plain)) < 1e-5
    assert loaded.config._experts_implementation == "moe_ops"
    assert not any(
        "experts" in n and not getattr(p, "scheme", None) for n, p in loaded.named_parameters()
    )


@pytest.mark.parametrize(
    "family",
    [
        *("gpt_oss", "llama4", "dbrx", "longcat_flash", "step3p7", "nemotron_h", "inkling2"),
        *("inkling2_loop", "lara_mini"),
    ],
)
def test_families_that_store_experts_in_other_ways(family, tmp_path):
    """Stacked, transposed, joined with rows, without a gate, or converted by transformers
    first."""
    if family not in test_families.FAMILIES:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    want = test_families.build(family, 1)
    want.save_pretrained(tmp_path)
    config = MoeOpsConfig("int8_w8a16")
    loaded = type(want).from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    quantize(want, "int8_w8a16")
    weights = weights_of(want)
    assert weights_of(loaded).keys() == weights.keys() != set()
    for name, p in loaded.named_parameters():
        other = want.get_parameter(name)
        if name not in weights:
            assert torch.equal(p, other), name
            continue
        assert p.weight_layout == other.weight_layout and p.shape == other.shape
        assert torch.equal(p.qdata, other.qdata) and torch.equal(p.scale, other.scale), name


def test_single_quantized_experts_of_a_family_that_stacks_them(tmp_path):
    """llama4's own files hold stacks (E, columns, rows); quantized ones hold experts one by
    one."""
    writer, original = Packed(), test_families.build("llama4", 1)
    save_plain(original, tmp_path)
    tensors = files.load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if ".experts." in n]:
        weight, module = original.get_parameter(name), name.rpartition(".")[0]
        stack = weight.detach().transpose(1, 2)
        del tensors[name]
        projections = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        for e in range(stack.shape[0]):
            values = []
            for projection in projections:
                shape = stack.shape[1] // len(projections), stack.shape[2]
                parts, value = writer.matrix(*shape)
                tensors |= {f"{module}.{e}.{projection}.{part}": t for part, t in parts.items()}
                values.append(torch.from_numpy(value))
            weight.data[e] = torch.cat(values).float().T
    files.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    set_config(tmp_path, writer.config)
    loaded = type(original).from_pretrained(
        tmp_path, quantization_config=MoeOpsConfig(), dtype=torch.float32
    )
    assert schemes_of(loaded) == {"int4_w4a16:g32"}
    assert relative(logits(loaded), logits(original)) < 1e-5


def test_numbered_experts_of_the_model_itself(tmp_path, monkeypatch):
    """Matrices of a list beside a stack of experts: each is a parameter of its own."""
    cls, mlp = modeling_qwen3_moe.Qwen3MoeDecoderLayer, modeling_qwen3_moe.Qwen3MoeMLP
    make = cls.__init__

    def with_a_list(self, config, i):
        make(self, config, i)
        self.shared_experts = torch.nn.ModuleList([mlp(config, INNER) for _ in range(2)])

    monkeypatch.setattr(cls, "__init__", with_a_list)
    writer, original = copy.deepcopy(WRITERS["ct_fp8"]), qwen(1)
    requantize(tmp_path, writer, original, ".mlp.experts.")

    def change(tensors):
        for name in [name for name in tensors if ".shared_experts." in name]:
            module = name.removesuffix(".weight")
            parts, values = writer.matrix(*tensors.pop(name).shape)
            tensors |= {f"{module}.{part}": t for part, t in parts.items()}
            original.get_submodule(module).weight.data = torch.from_numpy(values).float()

    rewrite(tmp_path, change)
    assert_same_values(load(tmp_path), original)


@pytest.mark.parametrize(
    "part, spoil, reason",
    [
        ("scale", lambda t: t * torch.nan, "scale must be finite, got NaN or Inf in experts"),
        ("zero_point", lambda t: t + 16, "zero_point must be in 0..15 for int4"),
        ("qdata", lambda t: t.view(torch.int8), "qdata must be torch.uint8"),
        ("scale", lambda t: t[:, :1].clone(), "scale must have shape"),
    ],
)
def test_saved_file_with_other_values(part, spoil, reason, tmp_path):
    load_from = tmp_path / "plain"
    save_plain(mixtral(), load_from)
    load(load_from, "int4_w4a16:g32:zp").save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    with safetensors.safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata()
    name = next(name for name in tensors if name.endswith(f"down_proj.{part}"))
    tensors[name] = spoil(tensors[name])
    files.save_file(tensors, file, metadata)
    weight = re.escape(name.removesuffix(f".{part}"))
    with pytest.raises(ValueError, match=f"{weight}: {reason}.*, in .*model.safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            {"moe_intermediate_size": 64},
            r"layers.0.mlp.experts.\w+ must have shape .* as \(experts, rows, columns\), got "
            r"\(4, 256, (128|256)\) from .*model.safetensors",
        ),
        (
            "gate_up_proj.qdata",
            "tensors must have 'model.layers.0.mlp.experts.gate_up_proj.qdata', which the "
            "metadata name, in .*model.safetensors",
        ),
        (
            "gate_up_proj",
            "experts.gate_up_proj in .*model.safetensors must be absent: .*gate_up_proj is stored "
            "quantized, in model.layers.0.mlp.experts.gate_up_proj.",
        ),
    ],
    ids=["another size", "no elements", "plain, too"],
)
def test_saved_file_that_does_not_fit(change, reason, tmp_path):
    save_plain(qwen(1), tmp_path / "plain")
    load(tmp_path / "plain", "int8_w8a16:channel").save_pretrained(tmp_path)
    if isinstance(change, dict):
        edit_config(tmp_path, **change)
    else:
        file, name = tmp_path / "model.safetensors", f"model.layers.0.mlp.experts.{change}"
        with safetensors.safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        tensors = files.load_file(file)
        if tensors.pop(name, None) is None:
            tensors[name] = torch.zeros(E, 2 * INNER, H)
        files.save_file(tensors, file, metadata)
    with pytest.raises(ValueError, match=reason):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("way", ["on load", "in place"])
@pytest.mark.parametrize("scheme", ["int4_w4a16:g32:zp", "fp8_block", "nvfp4", "mxfp4_w4a16"])
def test_saved_and_loaded_again(way, scheme, tmp_path):
    save_plain(mixtral(), tmp_path / "plain")
    if way == "on load":
        model = load(tmp_path / "plain", scheme)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
        quantize(model.float(), scheme)
    want = logits(model)
    model.save_pretrained(tmp_path / "saved", max_shard_size="200KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    text = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert text["quantization_config"]["quant_method"] == "moe_ops"
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32
    )
    assert torch.equal(logits(again), want)
    assert torch.equal(logits(copy.deepcopy(again)), want)
    for name, weight in weights_of(model).items():
        other = again.get_parameter(name)
        assert other.scheme == weight.scheme == scheme
        for part in weight.__tensor_flatten__()[0]:
            a, b = getattr(weight, part), getattr(other, part)
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    with pytest.raises(
        ValueError, match="scheme must be .* quantized already, got 'int8_w8a16:channel'"
    ):
        load(tmp_path / "saved", "int8_w8a16")


# --- refusals -----------------------------------------------------------------------------------


LAST = "model.layers.1.mlp.experts.3"
BAD = {
    "missing expert": (
        lambda t: t.pop(f"{LAST}.up_proj.weight"),
        r"layers.1.mlp.experts.gate_up_proj must have all projections of experts 0 to 3, got "
        r"none of experts \[3\]",
    ),
    "missing layer": (
        lambda t: [
            t.pop(n)
            for n in list(t)
            if n.startswith("model.layers.1.mlp.experts.") and "down" in n
        ],
        "layers.1.mlp.experts.down_proj must be in the checkpoint, got no tensor",
    ),
    "missing router": (
        lambda t: t.pop("model.layers.1.mlp.gate.weight"),
        "layers.1.mlp.gate.weight must be in the checkpoint, got no tensor",
    ),
    "rows": (
        lambda t: [
            t.update({n: t[n][:64]}) for n in list(t) if "layers.1" in n and "up_proj" in n
        ],
        r"layers.1.mlp.experts.gate_up_proj must have shape \(4, 256, 256\).*got \(4, 192, "
        r"256\) from",
    ),
    "nan": (
        lambda t: t[f"{LAST}.down_proj.weight"].fill_(float("nan")),
        "experts.3.down_proj.weight in .*model.safetensors, expert 3: .*must be finite",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_plain_checkpoints(case, tmp_path):
    change, message = BAD[case]
    save_plain(qwen(), tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "int4_w4a16:g64")


def test_what_from_pretrained_refuses(tmp_path):
    save_plain(mixtral(), tmp_path)
    with pytest.raises(ValueError, match="scheme must be given to quantize a plain checkpoint"):
        load(tmp_path)
    with pytest.raises(ValueError, match="'int4_w4a16:g128:zp'|static activation scales"):
        load(tmp_path, "fp8_tensor_static")
    with pytest.raises(ValueError, match="device_map must not have 'disk'"):
        load(
            tmp_path,
            "fp8_block",
            device_map={"model": "cpu", "lm_head": "disk"},
            offload_folder=tmp_path,
        )
    with pytest.raises(ValueError, match="device_map must not have 'disk'.*inferred.*max_memory"):
        load(tmp_path, "fp8_block", device_map="auto", max_memory={"cpu": "100KB"})
    for arguments, message in (
        (("int3",), "scheme must be one of"),
        (("fp8_block", "cuda"), "backend must be"),
        ((None, "auto", "gptq"), "quant_method must be 'moe_ops'"),
    ):
        with pytest.raises(ValueError, match=message):
            MoeOpsConfig(*arguments)
    save_plain(mixtral(hidden_size=96, intermediate_size=64), tmp_path / "odd")
    with pytest.raises(
        ValueError,
        match=r"experts.gate_up_proj of shape \(4, 128, 96\) cannot have scheme 'int4_w4a16:g128'",
    ):
        load(tmp_path / "odd", "int4_w4a16")
    model = load(tmp_path / "odd", "int4_w4a16:g32")
    with pytest.raises(
        ValueError, match="gate_up_proj must be a plain tensor.*load a plain check"
    ):
        quantize(model, "int4_w4a16:g32")


def test_no_config_is_the_one_that_was_saved(tmp_path):
    """transformers' auto classes would leave the experts random."""
    model = qwen()
    quantize(model, "int8_w8a16:g32")
    model.save_pretrained(tmp_path / "ours")
    with pytest.warns(UserWarning, match="quantization_config=None is ignored: .*ours was saved"):
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "ours", quantization_config=None
        )
    assert torch.equal(logits(again), logits(model))
    save_plain(qwen(), tmp_path / "plain")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "quantization_config")
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "plain", quantization_config=None
        )


def test_quantized_checkpoints_that_are_damaged(tmp_path):
    original = qwen()
    save_plain(original, tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite(tmp_path, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(ValueError, match=f"{name} in .*must be a plain weight or have scales"):
        load(tmp_path, "int8_w8a16")
    requantize(tmp_path, GPTQ(), original)
    rewrite(tmp_path, lambda t: t.pop(f"{LAST}.up_proj.scales"))
    with pytest.raises(
        ValueError, match=f"{LAST}.up_proj.qweight in .*model.safetensors must be those of one"
    ):
        load(tmp_path)
    requantize(tmp_path, GPTQ(), original)
    with pytest.raises(ValueError, match="is quantized already, got 'fp8_block'"):
        load(tmp_path, "fp8_block")
    rewrite(tmp_path, lambda t: t[f"{LAST}.up_proj.g_idx"].copy_(torch.arange(H).flip(0) // 128))
    with pytest.raises(ValueError, match=f"{LAST}.up_proj.qweight in .*act-order"):
        load(tmp_path)


def test_biases_that_gptq_writes_for_every_matrix(tmp_path):
    original = qwen()
    requantize(tmp_path, GPTQ(), original)
    rewrite(tmp_path, lambda t: t.update({f"{LAST}.up_proj.bias": torch.zeros(INNER)}))
    assert relative(logits(load(tmp_path)), logits(original)) < 1e-5
    rewrite(tmp_path, lambda t: t.update({f"{LAST}.up_proj.bias": torch.ones(INNER)}))
    with pytest.raises(
        ValueError, match=f"{LAST}.up_proj.bias in .* must be zero: the model's experts"
    ):
        load(tmp_path)


def test_biases_of_other_matrices_and_scales_of_the_cache(tmp_path):
    """GPTQ writes zero biases for attention too; scales of keys and values change no weight."""
    original, name = qwen(), "model.layers.0.self_attn.k_proj"
    requantize(tmp_path, GPTQ(), original)
    zero = {f"{name}.bias": torch.zeros(128), f"{name}.k_scale": torch.ones(1)}
    rewrite(tmp_path, lambda t: t.update(zero))
    assert relative(logits(load(tmp_path)), logits(original)) < 1e-5
    rewrite(tmp_path, lambda t: t.update({f"{name}.bias": torch.ones(128)}))
    with pytest.raises(ValueError, match=f"{name}.bias in .* must be zero: the model's matrices"):
        load(tmp_path)


BESIDE = {
    "expert": (f"{LAST}.up_proj.pre_quant_scale", "AWQ's factors"),
    "stack": ("model.layers.1.mlp.experts.gate_up_proj_pre_quant_scale", "AWQ's factors"),
    "outputs": (f"{LAST}.up_proj.output_scale", "does not know how the weight depends"),
    "low rank": (f"{LAST}.down_proj.svdquant_lora_a", "does not know how the weight depends"),
    "plain": ("model.layers.0.mlp.gate.weight_scale", "does not know how the weight depends"),
}


@pytest.mark.parametrize("case", BESIDE)
def test_tensors_beside_weights_are_refused_by_name(case, tmp_path):
    name, reason = BESIDE[case]
    requantize(tmp_path, copy.deepcopy(WRITERS["modelopt_nvfp4"]), qwen())
    rewrite(tmp_path, lambda t: t.update({name: torch.ones(H)}))
    with pytest.raises(ValueError, match=f"{name} in .*safetensors must be absent: .*{reason}"):
        load(tmp_path)


def test_factors_beside_plain_experts(tmp_path):
    save_plain(qwen(), tmp_path)
    rewrite(tmp_path, lambda t: t.update({f"{LAST}.up_proj.pre_quant_scale": torch.ones(H)}))
    with pytest.raises(ValueError, match=f"{LAST}.up_proj.pre_quant_scale in .* must be absent"):
        load(tmp_path, "int8_w8a16")


def test_groups_of_attention_and_experts(tmp_path):
    """The first group's class also fits the experts, which the second one names."""
    writer, original = copy.deepcopy(WRITERS["ct_int4"]), qwen()
    group = writer.config["config_groups"]["group_0"]
    other = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    names = ["re:.*experts.*", "re:.*self_attn.*"]
    writer.config["config_groups"] = {
        "group_0": {"targets": ["Linear"], "weights": other},
        "group_1": group | {"targets": names},
    }
    requantize(tmp_path, writer, original)
    loaded = load(tmp_path)
    assert schemes_of(loaded) == {"int4_w4a16:g32"}
    assert relative(logits(loaded), logits(original)) < 1e-5


def test_activations_of_matrices_that_become_plain_do_not_matter(tmp_path):
    """Attention whose activations have scales for which no scheme is named; experts whose have."""
    writer, original = copy.deepcopy(WRITERS["ct_fp8"]), qwen()
    experts = writer.config["config_groups"]["group_0"]
    attention = experts | {
        "input_activations": experts["input_activations"] | {"strategy": "group", "group_size": 64}
    }
    groups = {"group_0": attention, "group_1": experts | {"targets": ["re:.*experts.*"]}}
    writer.config["config_groups"] = groups
    requantize(tmp_path, writer, original)
    assert relative(logits(load(tmp_path, writer.weight_only)), logits(original)) < 1e-5
    set_config(tmp_path, writer.config | {"config_groups": {"group_0": attention}})
    with pytest.raises(ValueError, match=r"experts.0.\w+.weight in .*got 'float8 group64 dyn"):
        load(tmp_path)


def test_the_index_is_the_truth(tmp_path):
    """As for `Checkpoint`: tests/integrations/checkpoints/test_files.py."""
    original = mixtral()
    with torch.no_grad():
        for p in original.parameters():
            p.copy_(p.bfloat16())
    original.save_pretrained(tmp_path, max_shard_size="400KB")
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    shards = sorted(set(listed.values()))
    expert = next(n for n in listed if ".experts.1." in n)
    stale = {expert: torch.zeros_like(files.load_file(tmp_path / listed[expert])[expert])}
    want = load(tmp_path, "int8_w8a16")
    files.save_file(stale, tmp_path / "old.safetensors")
    got = load(tmp_path, "int8_w8a16")
    assert all(torch.equal(w.qdata, weights_of(got)[n].qdata) for n, w in weights_of(want).items())

    other = tmp_path / next(file for file in shards if file != listed[expert])
    kept = files.load_file(other)
    files.save_file(kept | stale, other, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{expert} in .*{other.name} must not be there, because"):
        load(tmp_path, "int8_w8a16")
    other.unlink()
    with pytest.raises(ValueError, match=f"must be there, got none at .*{other.name}"):
        load(tmp_path, "int8_w8a16")
    files.save_file(kept, other, {"format": "pt"})

    files.save_file(
        stale, tmp_path / "model.safetensors", {"format": "pt"}
    )  # transformers' choice
    with pytest.raises(ValueError, match=r"model.safetensors must be named by .*index.json, got"):
        load(tmp_path, "int8_w8a16")


def test_an_index_that_leaves_its_folder(tmp_path):
    """transformers follows it."""
    save_plain(mixtral(), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(
        tmp_path / "model-00001-of-00001.safetensors"
    )
    names = files.load_file(tmp_path / "model-00001-of-00001.safetensors")
    listed = dict.fromkeys(names, "../model-00001-of-00001.safetensors")
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    with pytest.raises(ValueError, match="must name files in its folder, got '../model-00001"):
        load(tmp_path / "model", "int8_w8a16")


def test_fields_of_our_configuration_that_nobody_knows():
    with pytest.raises(
        ValueError, match="scheme, backend and quant_method alone, got bits, group"
    ):
        MoeOpsConfig.from_dict({"scheme": "fp8_block", "group": 3, "bits": 4})


def test_offloaded_and_dequantized(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    save_plain(mixtral(), tmp_path)
    model = load(tmp_path, "int4_w4a16:g64", device_map="cpu")
    want = logits(model)
    clone = copy.deepcopy(model)
    accelerate.cpu_offload(clone, torch.device("cpu"))
    assert all(p.device.type == "meta" for p in clone.parameters())
    assert torch.equal(logits(clone), want)
    model.dequantize()
    assert not weights_of(model)
    assert relative(logits(model), want) < 1e-5


def test_saved_under_the_models_own_names(tmp_path):
    """mistral_large4's renamings would rename the model's own names again."""
    if "mistral_large4" not in test_families.FAMILIES:
        pytest.skip(f"transformers {transformers.__version__} has no mistral_large4")
    model = test_families.build("mistral_large4", 1)
    quantize(model, "fp8_block")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert weights_of(loaded).keys() == weights_of(model).keys() != set()
    for name, p in model.named_parameters():
        got, want = loaded.get_parameter(name), p
        if getattr(p, "scheme", None):
            assert torch.equal(got.scale, want.scale)
            got, want = got.qdata.view(torch.uint8), want.qdata.view(torch.uint8)
        assert torch.equal(got, want), name


def test_the_text_model_of_a_composite_one(tmp_path):
    """transformers renames the tensors of a composite model's folder, quantized ones, too."""
    if not hasattr(transformers, "Qwen3_5MoeConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no qwen3_5_moe")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {"hidden_size": 32, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    text |= {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "vocab_size": 96}
    text |= {"layer_types": ["full_attention"] * 2}
    text["rope_parameters"] = rope | {"partial_rotary_factor": 1.0}
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 4}
    config = transformers.Qwen3_5MoeConfig(
        text_config=text, vision_config=vision | {"out_hidden_size": 32}
    )
    model = transformers.Qwen3_5MoeForConditionalGeneration(config).eval()
    quantize(model, "int8_w8a16")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded).__name__ == "Qwen3_5MoeForCausalLM" and len(weights_of(loaded)) == 4
    assert torch.equal(logits(loaded), logits(model))
