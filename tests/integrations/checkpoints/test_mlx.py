"""Files of mlx-lm: a stack in uint32 for each projection of the experts."""

import json

import numpy as np
import pytest
import torch

from tests.support.writers import MLX

files = pytest.importorskip("safetensors.torch")

from moe_ops.integrations.checkpoints import Checkpoint

E, I, K = 3, 128, 256
PREFIX = "model.layers.0.mlp.switch_mlp"
VARIANTS = {
    **{
        f"int{bits}_w{bits}a16:g{group}:min": {"bits": bits, "group": group}
        for bits in (4, 8)
        for group in (32, 64, 128)
    },
    "int4_w4a16:g64:min fp16": {"dtype": torch.float16},
    "int8_w8a16:g64:min fp32": {"bits": 8, "dtype": torch.float32},
    "mxfp4_w4a16": {"mode": "mxfp4", "group": 32},
    "nvfp4_w4a16": {"mode": "nvfp4", "group": 16},
    "custom:e4m3,1x32,e8m0,ceil": {"mode": "mxfp8", "group": 32, "bits": 8},
}


def write(folder, writer, change=None, config=None, field="quantization_config"):
    """One layer's stacks; returns the values (E, N, K) by projection."""
    tensors, values = {}, {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = (E, K, I) if name == "down_proj" else (E, I, K)
        parts, values[name] = writer.matrix(*shape)
        tensors |= {f"{PREFIX}.{name}.{part}": t.contiguous() for part, t in parts.items()}
    if change:
        change(tensors)
    files.save_file(tensors, folder / "model.safetensors")
    said = writer.config if config is None else config
    (folder / "config.json").write_text(json.dumps({field: said}))
    return values


@pytest.mark.parametrize("variant", VARIANTS)
def test_values(variant, tmp_path):
    values = write(tmp_path, MLX(**VARIANTS[variant]))
    checkpoint = Checkpoint(tmp_path)
    w13 = checkpoint.expert_weight(PREFIX)
    w2 = checkpoint.expert_weight(PREFIX, ("down_proj",))
    assert w13.scheme == w2.scheme == variant.split()[0]
    want13 = np.concatenate([values["gate_proj"], values["up_proj"]], 1)
    for got, want in ((w13, want13), (w2, values["down_proj"])):
        got = got.dequantize(torch.float32).double().numpy()
        # code * scale is exact but for scales in fp32; then one addition is rounded
        assert got.shape == want.shape and np.abs(got - want).max() <= 2e-7 * np.abs(want).max()
    some = checkpoint.expert_weight(PREFIX, expert_ids=range(1, E))
    assert torch.equal(some.dequantize(), w13.dequantize()[1:])


@pytest.mark.parametrize("field", ["quantization", "quantization_config"])
def test_fields_of_one_matrix_take_the_place_of_all(field, tmp_path):
    """Those that it lacks are the mode's own, not those of the whole model."""
    config = {"group_size": 128, "bits": 4} | {
        f"{PREFIX}.{name}": {"bits": 8} for name in ("gate_proj", "up_proj", "down_proj")
    }
    config["model.embed_tokens"] = False
    config["lm_head"] = {"group_size": 32, "bits": 3}
    values = write(tmp_path, MLX(bits=8), config=config, field=field)
    w2 = Checkpoint(tmp_path).expert_weight(PREFIX, ("down_proj",))
    assert w2.scheme == "int8_w8a16:g64:min"
    got = w2.dequantize(torch.float32).double().numpy()
    assert np.abs(got - values["down_proj"]).max() <= 2e-7 * np.abs(values["down_proj"]).max()


def changed(name, change):
    return lambda t: t.update({f"{PREFIX}.{name}": change(t[f"{PREFIX}.{name}"])})


def without(name):
    return lambda t: t.pop(f"{PREFIX}.{name}")


GOOD = MLX().config
BAD = {
    "bits": (None, GOOD | {"bits": 3}, "must be 32, 64 or 128 and 4 or 8, got 64 and 3"),
    "group size": (None, GOOD | {"group_size": 16}, "4 or 8, got 16 and 4"),
    "another group size": (
        None,
        GOOD | {"group_size": 32},
        r"scales must have shape \(3, 128, 8\), got \(3, 128, 4\)",
    ),
    "another number of bits": (
        None,
        GOOD | {"bits": 8},
        r"scales must have shape \(3, 128, 2\), got \(3, 128, 4\)",
    ),
    "mode": (None, GOOD | {"mode": "nf4"}, "mode must be one of 'affine', .*, got 'nf4'"),
    "mode of other tensors": (
        None,
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        r"scales must have shape \(3, 128, 8\), got \(3, 128, 4\)",
    ),
    "field": (None, GOOD | {"rotation": "qr"}, "rotation of quantization_config must be a field"),
    "field that is true": (None, GOOD | {"hadamard": True}, "hadamard of quantization_config"),
    "field of a matrix that is true": (
        None,
        GOOD | {f"{PREFIX}.gate_proj": {"bits": 4, "global_scale": True}},
        r"global_scale of quantization\['model.*gate_proj'\] must be a field",
    ),
    "type": (None, GOOD | {"bits": "4"}, "bits of quantization_config must be an integer"),
    "field of a matrix": (
        None,
        GOOD | {f"{PREFIX}.gate_proj": {"zeros": 1}},
        r"zeros of quantization\['model.*gate_proj'\] must be a field",
    ),
    "not quantized": (
        None,
        GOOD | {f"{PREFIX}.gate_proj": False},
        "gate_proj of quantization must be true or its fields, .* got False",
    ),
    "no fields": (
        None,
        GOOD | {f"{PREFIX}.gate_proj": {}},
        "gate_proj of quantization must be true or its fields, .* got {}",
    ),
    "another method": (
        None,
        {"quant_method": "gptq", "bits": 4, "group_size": 64},
        "quant_method must be absent beside weights in uint32 .*, got 'gptq'",
    ),
    "no configuration": (None, {}, "must have group_size and bits"),
    "no biases": (without("gate_proj.biases"), None, "biases must be there in mode 'affine'"),
    "no scales": (
        without("up_proj.scales"),
        None,
        r"up_proj.* known format .*, got weight \(uint",
    ),
    "a projection less": (
        lambda t: [without(f"up_proj.{role}")(t) for role in ("weight", "scales", "biases")],
        None,
        "must be in the checkpoint, got no tensor",
    ),
    "shape of biases": (
        changed("gate_proj.biases", lambda t: t[..., :2].contiguous()),
        None,
        r"biases must have shape \(3, 128, 4\), got \(3, 128, 2\)",
    ),
    "dtype of biases": (
        changed("gate_proj.biases", lambda t: t.float()),
        None,
        "biases must be one of .*bfloat16.*got torch.float32",
    ),
    "experts of scales": (
        changed("up_proj.scales", lambda t: t[:2].contiguous()),
        None,
        r"scales must have shape \(3, 128, 4\), got \(2, 128, 4\)",
    ),
    "signed words": (
        changed("gate_proj.weight", lambda t: t.view(torch.int32)),
        None,
        "known format",
    ),
    "another format of up": (
        lambda t: [
            t.update({f"{PREFIX}.up_proj.{role}": value})
            for role, value in MLX(group=128).matrix(E, I, K)[0].items()
        ],
        GOOD | {f"{PREFIX}.up_proj": {"group_size": 128, "bits": 4}},
        "must be stored like .*gate_proj",
    ),
    "not finite": (
        changed("gate_proj.biases", lambda t: t.index_fill(0, torch.tensor(1), torch.nan)),
        None,
        "gate_proj.*zero point must be finite",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_damage(case, tmp_path):
    change, config, message = BAD[case]
    write(tmp_path, MLX(), change, config)
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path).expert_weight(PREFIX)
