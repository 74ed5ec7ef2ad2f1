"""Checkpoints that somebody damaged: the values as they were, or a ValueError that names the file.

Random changes of valid configurations, of every quant_method that is read, and of headers.
"""

import copy
import json
import math
import random

import numpy as np
import pytest
import torch

from tests.integrations.checkpoints.test_checkpoints import PREFIX
from tests.support.writers import (
    GPTQ,
    NVFP4,
    AWQWriter,
    BlockFP8,
    ChannelFP8,
    DeepSeekFP4,
    Int8,
    MXFP4Packed,
    Packed,
    gpt_oss_blocks,
)

files = pytest.importorskip("safetensors.torch")

from moe_ops.integrations.checkpoints import Checkpoint

N, K = 128, 256
LIBRARY = {  # what compressed-tensors writes beside its groups
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "transform_config": {"config_groups": {"u": {"apply": [{"location": "weight_output"}]}}},
    "sparsity_config": {"format": "dense"},
    "moe_sparsity_config": {"method": "prune"},
}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "exclude_modules": ["lm_head", "*.self_attn*"],
    "quantized_layers": {PREFIX: {"quant_algo": "NVFP4", "group_size": 16}},
}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "packing_format": "auto_round:auto_gptq",
    "extra_config": {"lm_head": {"bits": 8}, ".*down_proj.*": {"group_size": 64}},
}
DYNAMIC = {"dynamic": {"-:.*lm_head": {}, r"+:.*down_proj": {"bits": 8}, ".*q_proj": {"bits": 8}}}
METHODS = {
    "gptq": (GPTQ(), DYNAMIC),
    "awq": (AWQWriter(), {}),
    "auto-round": (GPTQ(sym=True, group=32), AUTO_ROUND),
    "integers": (Packed(symmetric=False), LIBRARY),
    "int8": (Int8(), LIBRARY),
    "fp8 of rows": (ChannelFP8(), LIBRARY),
    "mxfp4": (MXFP4Packed(), LIBRARY),
    "nvfp4": (NVFP4(), LIBRARY),
    "modelopt": (NVFP4(modelopt=True), {"exclude_modules": ["lm_head"]}),
    "modelopt, mixed": (NVFP4(modelopt=True), MIXED),
    "fp8": (BlockFP8(), {"activation_scheme": "dynamic", "fmt": "e4m3"}),
    "fp8, ue8m0": (BlockFP8(e8m0=True), {"scale_fmt": "ue8m0"}),
    "fp4": (DeepSeekFP4(), {"expert_dtype": "fp4"}),
    "gpt-oss": (None, {"quant_method": "mxfp4"}),
}
DEEP = json.loads("[" * 400 + "]" * 400)
JUNK = [
    *(None, True, False, -1, 0, 3, 16, 2**70, 1.5, math.nan, "", "x", "Linear", "re:(", "-:("),
    *("re:" + "(" * 3000, "re:a{99999999999}", ".*(", "[", "re:.*", "*"),
    *([], [None], [[]], [3], ["re:["], ["Linear"], {}, {"x": 1}, {"x": None}, {"x": {"y": {}}}),
    *({".*(": {}}, {"-:(": {}}, {"re:.*": {"bits": None}}, DEEP, {"x": DEEP}),
]


def write(folder, method):
    """A folder with one projection of two experts, or a stack: the files' texts."""
    writer, more = METHODS[method]
    writer, tensors, config = copy.deepcopy(writer), {}, {}
    if writer is None:
        (blocks, scales), _ = gpt_oss_blocks(np.random.default_rng(0), 2, N, K)
        tensors = {f"{PREFIX}.up_proj_blocks": blocks, f"{PREFIX}.up_proj_scales": scales}
    else:
        config = writer.config
        for e in range(2):
            parts, _ = writer.matrix(N, K)
            tensors |= {
                f"{PREFIX}.{e}.up_proj.{part}": t.contiguous() for part, t in parts.items()
            }
    files.save_file(tensors, folder / "model.safetensors")
    config = more if "quant_method" in more else config | more
    return {"text_config": {"num_experts": 2, "quantization_config": config}}


def damage(config, rng):
    """Change one value of a JSON object, however deep; or take it out, or add one beside it."""
    places, todo = [], [config]
    for where in todo:
        keys = range(len(where)) if isinstance(where, list) else list(where)
        places += [(where, key) for key in keys]
        todo += [where[key] for key in keys if isinstance(where[key], (dict, list))]
    where, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del where[key]
    elif kind == 1 and isinstance(where, dict):
        where[rng.choice(("x", "re:(", "weights", "bits", "dynamic"))] = rng.choice(JUNK)
    else:
        where[key] = rng.choice(JUNK)


def read(folder):
    weight = Checkpoint(folder).expert_weight(PREFIX, ("up_proj",))
    return weight.dequantize(torch.float32) if hasattr(weight, "scheme") else weight.float()


def damaged_configurations(method, folder, seed, count):
    config, rng = write(folder, method), random.Random(seed)
    (folder / "config.json").write_text(json.dumps(config))
    want, refused = read(folder), 0
    for _ in range(count):
        damaged = copy.deepcopy(config)
        damage(damaged, rng)
        (folder / "config.json").write_text(json.dumps(damaged))
        try:
            got = read(folder)
        except ValueError as error:
            assert str(folder) in str(error) and len(str(error)) < 1500
            refused += 1
        else:
            assert torch.equal(got, want), damaged
    return refused


@pytest.mark.parametrize("method", METHODS)
def test_damaged_configurations(method, tmp_path):
    assert 1 < damaged_configurations(method, tmp_path, method, 15) < 15


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("method", METHODS)
def test_many_damaged_configurations(method, tmp_path):
    damaged_configurations(method, tmp_path, 1, 300)


SAME_SIZE = (
    {"F8_E4M3", "U8", "I8", "F8_E8M0", "F8_E5M2", "BOOL"},
    {"BF16", "F16", "I16", "U16"},
    {"F32", "I32", "U32"},
    {"I64", "F64", "U64"},
)


def damage_header(header, rng):
    """Change what a tensor is, its dtype, name, place or shape, so that its bytes still fit."""
    name, other = (rng.choice(sorted(header)) for _ in range(2))
    info, kind = header[name], rng.randrange(8)
    shape, count = info["shape"], math.prod(info["shape"])
    if kind == 0:
        (same,) = (dtypes for dtypes in SAME_SIZE if info["dtype"] in dtypes)
        info["dtype"] = rng.choice(sorted(same))
    elif kind == 1:
        new = rng.choice(("x", f"{PREFIX}.0.up_proj", f"{name}.scale", name[:-1]))
        header[new] = header.pop(name)
    elif kind == 2:
        header |= {name: header[other], other: info}
    else:
        shapes = ([], [count], [1, count], [count, 1], [1, *shape], [*shape, 1], shape[::-1])
        shapes += ([2, count // 2, 1, 1],)
        info["shape"] = rng.choice([s for s in shapes if math.prod(s) == count])


def damaged_headers(method, folder, seed, count):
    """Whatever is read has a meaning of its own, which no test can know."""
    config, rng = write(folder, method), random.Random(seed)
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    content, refused = file.read_bytes(), 0
    length = 8 + int.from_bytes(content[:8], "little")
    for _ in range(count):
        header = json.loads(content[8:length])
        damage_header(header, rng)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[length:])
        try:
            read(folder)
        except ValueError as error:
            assert str(folder) in str(error) or PREFIX in str(error)
            assert "unpack" not in str(error)  # not for a user
            refused += 1
    return refused


@pytest.mark.parametrize("method", METHODS)
def test_damaged_headers(method, tmp_path):
    assert damaged_headers(method, tmp_path, method, 15) > 0


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("method", METHODS)
def test_many_damaged_headers(method, tmp_path):
    damaged_headers(method, tmp_path, 1, 300)
