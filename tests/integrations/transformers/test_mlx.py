"""Checkpoints of mlx-lm: names, stacks of gate and of up, quantized routers and embeddings."""

import json

import pytest
import torch

from tests.support.writers import MLX

transformers = pytest.importorskip("transformers")
files = pytest.importorskip("safetensors.torch")

from moe_ops.integrations.transformers import MoeOpsConfig
from tests.integrations.transformers.checkpoints import (
    assert_same_values,
    edit_config,
    gpt_oss,
    load,
    mixtral,
    qwen,
    rewrite,
    save_plain,
    schemes_of,
    tiny,
)
from tests.integrations.transformers.test_families import relative
from tests.integrations.transformers.test_models import IDS, logits


def granite():
    sizes = {"intermediate_size": 128, "num_local_experts": 4, "tie_word_embeddings": True}
    return tiny("GraniteMoe", **sizes)


# the model, what its file calls the experts, and its routers
MODELS = {
    "qwen3_moe": (qwen, "mlp.switch_mlp", "mlp.gate"),
    "mixtral": (mixtral, "block_sparse_moe.switch_mlp", "block_sparse_moe.gate"),
    "gpt_oss": (gpt_oss, "mlp.experts", "mlp.router"),
    "granitemoe": (granite, "block_sparse_moe.switch_mlp", "block_sparse_moe.router.layer"),
}


def mlx(folder, kind, writer):
    """A checkpoint in which experts, attention, routers (in 8 bits) and embeddings are quantized;
    the model gets their values.
    """
    make, experts_name, router_name = MODELS[kind]
    model = make()
    save_plain(model, folder)
    tensors = files.load_file(folder / "model.safetensors")
    tensors = {n: t for n, t in tensors.items() if "experts" not in n and "block_sparse" not in n}
    said = dict(writer.config)

    def quantized(name, shape, by):
        if by is not writer:
            said[name] = {"group_size": by.group, "bits": by.bits}
        parts, values = by.matrix(*shape)
        tensors.pop(f"{name}.weight", None)
        tensors.update({f"{name}.{part}": t for part, t in parts.items()})
        return torch.from_numpy(values).float()

    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            base = f"model.layers.{i}"
            moe = getattr(layer, "block_sparse_moe", None) or layer.mlp
            experts, biased = moe.experts, hasattr(moe.experts, "gate_up_proj_bias")
            turned = not getattr(experts, "is_concatenated", True)
            down = tuple(experts.down_proj.shape)
            E, K, inner = (down[0], down[2], down[1]) if turned else down
            name = f"{base}.{experts_name}"
            g, u = (quantized(f"{name}.{p}_proj", (E, inner, K), writer) for p in ("gate", "up"))
            d = quantized(f"{name}.down_proj", (E, K, inner), writer)
            joined = torch.stack((g, u), 2).flatten(1, 2) if turned else torch.cat((g, u), 1)
            experts.gate_up_proj.copy_(joined.mT if turned else joined)
            experts.down_proj.copy_(d.mT if turned else d)
            if biased:
                of_both = experts.gate_up_proj_bias
                tensors[f"{name}.gate_proj.bias"] = of_both[:, ::2].bfloat16().contiguous()
                tensors[f"{name}.up_proj.bias"] = of_both[:, 1::2].bfloat16().contiguous()
                tensors[f"{name}.down_proj.bias"] = experts.down_proj_bias.bfloat16()
            router = next(p for n, p in moe.named_parameters() if "experts" not in n)
            eight = MLX(bits=8, group=64)
            router.copy_(quantized(f"{base}.{router_name}", tuple(router.shape), eight))
            q = layer.self_attn.q_proj.weight
            q.copy_(quantized(f"{base}.self_attn.q_proj", tuple(q.shape), writer))
        embed = model.model.embed_tokens.weight
        embed.copy_(quantized("model.embed_tokens", tuple(embed.shape), writer))
    files.save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    edit_config(folder, quantization=said, quantization_config=said)
    return model


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_the_logits_of_its_values(kind, bits, tmp_path):
    original = mlx(tmp_path, kind, MLX(bits=bits, group=32))
    loaded = load(tmp_path)
    assert schemes_of(loaded) == {f"int{bits}_w{bits}a16:g32:min"}
    assert_same_values(loaded, original)
    assert relative(logits(loaded), logits(original)) < 1e-5


def test_it_is_saved_and_read_again(tmp_path):
    mlx(tmp_path, "qwen3_moe", MLX())
    loaded = load(tmp_path)
    loaded.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(logits(again), logits(loaded))
    assert schemes_of(again) == {"int4_w4a16:g64:min"}


def test_embeddings_whose_group_size_is_not_that_of_their_fields(tmp_path):
    """64 columns in 4 bits look like 32 in 8: of those the model has another number."""
    mlx(tmp_path, "qwen3_moe", MLX())
    config = json.loads((tmp_path / "config.json").read_text())
    fields = ("quantization", "quantization_config")
    other = {"model.embed_tokens": {"group_size": 32, "bits": 8}}
    edit_config(tmp_path, **{field: config[field] | other for field in fields})
    message = r"embed_tokens.weight must have shape \(96, 256\), got \(96, 128\) from .*embed_tok"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


BAD = {
    "unknown tensor": (
        lambda t: t.update({"model.layers.0.mlp.switch_mlp.gate_proj.rotation": torch.ones(2)}),
        "gate_proj.rotation in .* must be absent",
    ),
    "a stack less": (
        lambda t: [t.pop(n) for n in list(t) if "layers.1" in n and "switch_mlp.up_proj" in n],
        "layers.1.mlp.experts.gate_up_proj must have shape",
    ),
    "both names": (
        lambda t: t.update(
            {n.replace("switch_mlp", "experts"): v.clone() for n, v in t.items() if "down" in n}
        ),
        "must not be beside",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_damage(case, tmp_path):
    change, message = BAD[case]
    mlx(tmp_path, "qwen3_moe", MLX())
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_transformers_alone_refuses_it_as_before(tmp_path):
    mlx(tmp_path, "qwen3_moe", MLX())
    with pytest.raises(ValueError, match="no `quant_method` attribute"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    config = MoeOpsConfig()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert model(IDS).logits.isfinite().all()
