"""Quantized checkpoints read as they are: every element has the value its format gives it."""

import copy
import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.writers import (
    GPTQ,
    NVFP4,
    WRITERS,
    BlockFP8,
    Packed,
    compressed,
    gpt_oss_blocks,
)

files = pytest.importorskip("safetensors.torch")

import moe_ops
from moe_ops.integrations.checkpoints import Checkpoint, floats
from moe_ops.integrations.checkpoints.common import VALUES_ONLY

E, I, K = 3, 128, 256
PREFIX = "model.layers.1.mlp.experts"
SCHEMES = {
    "gptq4": "int4_w4a16:g128:zp",
    "gptq4_sym": "int4_w4a16:g32",
    "gptq4_v2": "int4_w4a16:channel:zp",
    "gptq8": "int8_w8a16:g64:zp",
    "awq": "int4_w4a16:g64:zp",
    "ct_int4": "int4_w4a16:g32",
    "ct_int4_zp": "int4_w4a16:g128:zp",
    "ct_int8_packed": "int8_w8a16:g32",
    "ct_int8": "int8_w8a8",
    "ct_fp8": "fp8_channel",
    "ct_nvfp4": "nvfp4",
    "ct_mxfp4": "mxfp4_w4a16",
    "modelopt_nvfp4": "nvfp4",
    "fp8_block": "fp8_block",
    "fp8_block_e8m0": "fp8_block:ue8m0",
    "deepseek_fp4": "mxfp4_w4a8",
    "mxfp8": "mxfp8",
}
ZERO_POINTS = torch.zeros(I // 8, K // 32, dtype=torch.int32)


def write(folder, writer, change=None, names=("gate_proj", "up_proj", "down_proj")):
    """A folder of two files with one layer's experts; returns the values (E, N, K) by
    projection."""
    writer = copy.deepcopy(writer)  # the same random numbers in any order of tests
    tensors, values = {}, {}
    for name in names:
        n, k = (K, I) if name == "down_proj" else (I, K)
        for e in range(E):
            writer.factor = 1.0 + e
            parts, value = writer.matrix(n, k)
            tensors |= {f"{PREFIX}.{e}.{name}.{part}": t for part, t in parts.items()}
            values.setdefault(name, []).append(value)
    if change:
        change(tensors)
    save(folder, tensors, writer.config)
    return {name: np.stack(v) for name, v in values.items()}


def save(folder, tensors, config):
    names = sorted(tensors)
    for i, half in enumerate((names[::2], names[1::2])):
        part = {name: tensors[name].contiguous() for name in half}
        files.save_file(part, folder / f"model-{i}.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))


@pytest.mark.parametrize("form", WRITERS)
def test_values_of_every_format(form, tmp_path):
    values = write(tmp_path, WRITERS[form])
    checkpoint = Checkpoint(tmp_path)
    w13 = checkpoint.expert_weight(PREFIX, ("gate_proj", "up_proj"))
    w2 = checkpoint.expert_weight(PREFIX, ("down_proj",))
    assert w13.scheme == w2.scheme == SCHEMES[form]
    assert w13.shape == (E, 2 * I, K) and w2.shape == (E, K, I)
    if "nvfp4" in form:  # the largest of the three experts
        largest = 3 * (0.004 if form == "modelopt_nvfp4" else 1 / 260)
        assert abs(w13.activation_scale.item() - largest) < 1e-6 * largest
        assert len(w13.global_scale.unique()) == E
    want13 = np.concatenate([values["gate_proj"], values["up_proj"]], 1)
    for got, want in ((w13, want13), (w2, values["down_proj"])):
        got = got.dequantize(torch.float32).double().numpy()
        # a product of two or three floats, each exact in fp32, and ModelOpt's reciprocal: 2 ** -24
        # each
        assert np.abs(got - want).max() <= 3 * 2**-24 * np.abs(want).max()
        assert (np.abs(got - want) <= 4 * 2**-24 * np.abs(want)).all()


@pytest.mark.parametrize("form", WRITERS)
def test_a_range_of_experts_is_that_part_of_all(form, tmp_path):
    write(tmp_path, WRITERS[form])
    checkpoint = Checkpoint(tmp_path)
    whole = checkpoint.expert_weight(PREFIX)
    for ids in (range(1, E), range(0, E, 2)):
        same(checkpoint.expert_weight(PREFIX, expert_ids=ids), whole[ids.start :: ids.step])


@pytest.mark.parametrize("modelopt", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_global_scales_of_gate_and_up(modelopt, stacked, tmp_path):
    """Different in one expert alone: each row has one, also of the experts of other shards."""
    writer, values = NVFP4(modelopt=modelopt), {}
    tensors: dict = {}
    for name in ("gate_proj", "up_proj"):
        matrices = []
        for e in range(E):
            writer.factor = 0.7 if (name, e) == ("up_proj", 1) else 1.0 + e
            parts, value = writer.matrix(I, K)
            matrices.append(parts)
            values.setdefault(name, []).append(value)
            if not stacked:
                tensors |= {f"{PREFIX}.{e}.{name}.{role}": t for role, t in parts.items()}
        if stacked:
            for role in matrices[0]:
                tensors[f"{PREFIX}.{name}.{role}"] = torch.stack([m[role] for m in matrices])
    save(tmp_path, tensors, writer.config)
    whole = Checkpoint(tmp_path).expert_weight(PREFIX)
    assert whole.scheme == "nvfp4" and whole.global_scale.shape == (E, 2 * I, 1)
    assert [len(rows.unique()) for rows in whole.global_scale] == [1, 2, 1]
    want = np.concatenate([values["gate_proj"], values["up_proj"]], 1)
    got = whole.dequantize(torch.float32).double().numpy()
    assert (np.abs(got - want) <= 4 * 2**-24 * np.abs(want)).all()
    for ids in (range(2, E), range(1, 2), range(0, E, 2)):
        part = Checkpoint(tmp_path).expert_weight(PREFIX, expert_ids=ids)
        same(part, whole[ids.start : ids.stop : ids.step])
    up = Checkpoint(tmp_path).expert_weight(PREFIX, ("up_proj",))
    assert up.global_scale.shape == (E,)


def same(got, want):
    """Equal tensors, bit for bit, of quantized weights all of theirs."""
    if not hasattr(want, "scheme"):
        assert torch.equal(got, want)
        return
    assert got.scheme == want.scheme and got.shape == want.shape
    names = want.__tensor_flatten__()[0]
    assert got.__tensor_flatten__()[0] == names
    for name in names:
        a, b = (getattr(w, name).contiguous() for w in (got, want))
        assert a.shape == b.shape
        assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)), name


def bytes_read():
    """By this process so far, from files and else."""
    return int(Path("/proc/self/io").read_text().split()[1])


def stacks(form):
    """Tensors of 8 experts, each with a first dimension of 8."""
    if form == "plain":
        return {"gate_up_proj": torch.randn(8, 2 * I, K).bfloat16()}
    if form == "blocks":
        (blocks, scales), _ = gpt_oss_blocks(np.random.default_rng(0), 8, 2 * I, K)
        return {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}
    matrices = [NVFP4().matrix(2 * I, K)[0] for _ in range(8)]
    return {
        f"gate_up_proj.{role}": torch.stack([m[role] for m in matrices]) for role in matrices[0]
    }


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts by /proc/self/io")
@pytest.mark.parametrize(
    ("form", "scheme"),
    [("plain", None), ("plain", "int4_w4a16:g64"), ("blocks", None), ("nvfp4", None)],
)
@pytest.mark.parametrize("single", [False, True])
def test_only_the_bytes_of_a_range_are_read(form, scheme, single, tmp_path):
    tensors, projections = stacks(form), ("gate_up_proj",)
    size = sum(t.nbytes for t in tensors.values()) // 8
    if single:
        tensors = {
            f"{e}.{name}" + ".weight" * (form == "plain"): t[e]
            for name, t in tensors.items()
            for e in range(8)
        }
    save(tmp_path, {f"{PREFIX}.{name}": t for name, t in tensors.items()}, {})
    checkpoint = Checkpoint(tmp_path, {})
    whole = checkpoint.expert_weight(PREFIX, projections, scheme)
    for ids in (range(3, 7), range(1, 8, 2)):
        before = bytes_read()
        got = checkpoint.expert_weight(PREFIX, projections, scheme, expert_ids=ids)
        count = bytes_read() - before
        same(got, whole[ids.start : ids.stop : ids.step])
        # beside them static scales of all experts, and the count itself
        assert 4 * size <= count <= 4 * size + 1024


def test_a_range_must_be_of_experts_that_are_there(tmp_path):
    write(tmp_path, WRITERS["fp8_block"])
    checkpoint = Checkpoint(tmp_path)
    for ids in (range(E, E + 1), range(-1, 2), range(0), [0, 1]):
        with pytest.raises(ValueError, match="expert_ids must be a range of ids in 0..2"):
            checkpoint.expert_weight(PREFIX, expert_ids=ids)


def test_experts_of_a_checkpoint_compute(tmp_path):
    """fused_experts on the weights read against the dequantized values, in fp32."""
    values = write(tmp_path, WRITERS["gptq4"])
    checkpoint = Checkpoint(tmp_path)
    w13 = checkpoint.expert_weight(PREFIX)
    w2 = checkpoint.expert_weight(PREFIX, ("down_proj",))
    x, ids = torch.randn(5, K), torch.stack([torch.randperm(E)[:2] for _ in range(5)])
    router = torch.rand(5, 2) + 0.1
    got = moe_ops.fused_experts(x, w13.float(), w2.float(), router, ids)
    plain = {name: torch.from_numpy(v).float() for name, v in values.items()}
    w13 = torch.cat([plain["gate_proj"], plain["up_proj"]], 1)
    want = moe_ops.fused_experts(x, w13, plain["down_proj"], router, ids)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_scale_fmt_says_that_scales_are_powers_of_two(tmp_path):
    """DeepSeek-V3.1 stores them as fp32."""

    def as_fp32(tensors):
        for name, t in tensors.items():
            if t.dtype == torch.float8_e8m0fnu:
                tensors[name] = t.float()

    writer = copy.deepcopy(WRITERS["fp8_block_e8m0"])
    writer.config = writer.config | {"scale_fmt": "ue8m0"}
    write(tmp_path, writer, as_fp32)
    w2 = Checkpoint(tmp_path).expert_weight(PREFIX, ("down_proj",))
    assert w2.scheme == "fp8_block:ue8m0" and w2.scale.dtype == torch.float32

    def other(tensors):
        as_fp32(tensors)
        tensors[f"{PREFIX}.1.down_proj.weight_scale_inv"].mul_(1.25)

    write(tmp_path, writer, other)
    with pytest.raises(ValueError, match=r"down_proj.*powers of two.*'fp8_block' instead of"):
        Checkpoint(tmp_path).expert_weight(PREFIX, ("down_proj",))
    w2 = Checkpoint(tmp_path).expert_weight(PREFIX, ("down_proj",), "fp8_block")
    assert w2.scheme == "fp8_block"
    # a matrix that becomes plain meets no activations that are rounded so
    tensors = {"weight": w2.qdata[1], "weight_scale_inv": w2.scale[1]}
    plain = floats.describe_scale_inv(tensors, writer.config | {VALUES_ONLY: True})
    assert plain.scheme == "fp8_block"


def test_channel_weights_meet_activations_with_one_scale(tmp_path):
    for dynamic, name in ((True, "fp8_channel_tensor"), (False, "fp8_channel_tensor_static")):
        writer = copy.deepcopy(WRITERS["ct_fp8"])
        config = json.loads(json.dumps(writer.config))
        acts = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": dynamic}
        config["config_groups"]["group_0"]["input_activations"] = acts
        writer.config = config

        def input_scales(tensors, dynamic=dynamic):
            for e in range(E if not dynamic else 0):
                tensors[f"{PREFIX}.{e}.down_proj.input_scale"] = torch.tensor([0.5 + e])

        write(tmp_path, writer, input_scales, ("down_proj",))
        w2 = Checkpoint(tmp_path).expert_weight(PREFIX, ("down_proj",))
        assert w2.scheme == name
        assert dynamic or w2.activation_scale == E - 0.5


def test_gpt_oss_blocks_stay_where_they_are(tmp_path):
    (blocks, scales), values = gpt_oss_blocks(np.random.default_rng(0), E, 64, 96)
    name = f"{PREFIX}.gate_up_proj"
    save(tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": scales}, {"quant_method": "mxfp4"})
    weight = Checkpoint(tmp_path).expert_weight(PREFIX, ("gate_up_proj",))
    assert weight.scheme == "mxfp4_w4a16"
    assert torch.equal(weight.qdata, blocks.flatten(2)) and torch.equal(weight.scale, scales)
    assert np.array_equal(weight.dequantize(torch.float32).double().numpy(), values)


def test_plain_checkpoints_are_quantized_expert_by_expert(tmp_path):
    tensors, whole = {}, []
    for e in range(E):
        gate, up = torch.randn(2, I, K).bfloat16()
        tensors |= {f"{PREFIX}.{e}.gate_proj.weight": gate, f"{PREFIX}.{e}.up_proj.weight": up}
        whole.append(torch.cat([gate, up]))
    save(tmp_path, tensors, {})
    checkpoint = Checkpoint(tmp_path, {})
    assert torch.equal(checkpoint.expert_weight(PREFIX), torch.stack(whole))
    for scheme in ("int4_w4a16:g64", "fp8_block", "fp8_tensor", "nvfp4", "mxfp4"):
        got, want = (
            checkpoint.expert_weight(PREFIX, scheme=scheme),
            moe_ops.quantize(torch.stack(whole), scheme),
        )
        assert got.scheme == want.scheme
        for name in want.__tensor_flatten__()[0]:
            a, b = getattr(got, name), getattr(want, name)
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (scheme, name)


def test_no_more_than_one_expert_is_in_memory(tmp_path, monkeypatch):
    """Beside the weight that is made: when a tensor is read, those of other experts are gone."""
    tensors = {
        f"{PREFIX}.{e}.{name}.weight": torch.randn(I, K).bfloat16()
        for e in range(8)
        for name in ("gate_proj", "up_proj")
    }
    save(tmp_path, tensors, {})
    checkpoint, alive, most = Checkpoint(tmp_path, {}), [], 0
    read = checkpoint.files.read

    def watched(name, *args, **options):
        nonlocal most
        tensor = read(name, *args, **options)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(checkpoint.files, "read", watched)
    weight = checkpoint.expert_weight(PREFIX, scheme="int4_w4a16:g64")
    assert len(alive) == 16 and weight.shape == (8, 2 * I, K)
    assert most == 2  # gate and up of one expert


def test_compressed_tensors_own_packing(tmp_path):
    """The writer's words are those of the library itself."""
    pack = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    tensors, _ = Packed(symmetric=False).matrix(16, 64)
    signed = pack.unpack_from_int32(tensors["weight_packed"], 4, torch.Size([16, 64]))
    assert torch.equal(pack.pack_to_int32(signed, 4), tensors["weight_packed"])
    zero = pack.unpack_from_int32(
        tensors["weight_zero_point"], 4, torch.Size([16, 2]), packed_dim=0
    )
    assert torch.equal(pack.pack_to_int32(zero, 4, packed_dim=0), tensors["weight_zero_point"])
    nvfp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    tensors, values = NVFP4().matrix(16, 64)
    elements = nvfp4.unpack_fp4_from_uint8(tensors["weight_packed"], 16, 64, dtype=torch.float32)
    scale = tensors["weight_scale"].double() / tensors["weight_global_scale"].double()
    assert np.allclose(
        (elements.double() * scale.repeat_interleave(16, 1)).numpy(), values, rtol=1e-12
    )


@pytest.mark.parametrize("form", ["fp8_block", "fp8_block_e8m0", "deepseek_fp4", "mxfp8"])
def test_transformers_own_dequantization(form):
    """The writer's values are those of transformers."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    tensors, values = copy.deepcopy(WRITERS[form]).matrix(128, 256)
    weight, scale = tensors.values()
    got = fp8.Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    assert np.allclose(got.double().numpy(), values, rtol=1e-6, atol=0)


def drop(part):
    def change(tensors):
        del tensors[f"{PREFIX}.1.up_proj.{part}"]

    return change


def replace(part, function, expert=1):
    def change(tensors):
        name = f"{PREFIX}.{expert}.up_proj.{part}"
        tensors[name] = function(tensors[name].clone())

    return change


def silent(writer):
    """The same, whose configuration does not say whether weights are symmetric."""
    del writer.config["config_groups"]["group_0"]["weights"]["symmetric"]
    return writer


def as_integers(t):
    return t.view(torch.int32)


def shuffle(t):
    return t[torch.randperm(len(t))]


BAD = {
    "missing scales": (GPTQ(), drop("scales"), "up_proj.* in .*must be those of one known format"),
    "missing expert": (
        BlockFP8(),
        lambda t: [t.pop(f"{PREFIX}.1.up_proj.{p}") for p in ("weight", "weight_scale_inv")],
        r"projections of experts 0 to 2, got none of experts \[1\]",
    ),
    "wrong group": (
        GPTQ(),
        replace("scales", lambda t: t.repeat_interleave(2, 0)),
        r"1.up_proj.* in .*one group for each 128 columns, the checkpoint's group_size, got "
        r"4 groups",
    ),
    "wrong layout": (
        BlockFP8(),
        replace("weight_scale_inv", lambda t: t.T),
        r"1.up_proj.* in .*weight_scale_inv must have shape \(1, 2\), got \(2, 1\)",
    ),
    "wrong dtype": (
        Packed(),
        replace("weight_packed", lambda t: t.long()),
        r"1.up_proj.* in .*weight_packed must be int32 .*got torch.int64",
    ),
    "wrong rows": (
        GPTQ(),
        lambda t: [
            t.update({f"{PREFIX}.2.up_proj.{p}": v}) for p, v in GPTQ().matrix(64, K)[0].items()
        ],
        "2.up_proj.* in .*must have 128 rows like the other experts', got 64",
    ),
    "nan": (
        BlockFP8(),
        replace("weight_scale_inv", lambda t: t.fill_(float("nan"))),
        r"1.up_proj.weight in .*safetensors: scale must be finite, got NaN or Inf",
    ),
    "inf": (
        Packed(),
        replace("weight_scale", lambda t: t.fill_(float("inf"))),
        r"1.up_proj.weight_packed in .*: scale must be finite",
    ),
    "act-order": (
        GPTQ(group=32),
        replace("g_idx", shuffle),
        r"1.up_proj.qweight in .*act-order .*must be off: .*quantize again without it",
    ),
    "sym that is not": (
        GPTQ(sym=True),
        replace("qzeros", lambda t: t + 1),
        r"1.up_proj.*qzeros must be 8 everywhere, as the checkpoint's sym=True says",
    ),
    "zero points of symmetric weights": (
        Packed(),
        lambda t: t.update({f"{PREFIX}.1.up_proj.weight_zero_point": ZERO_POINTS}),
        "1.up_proj.* in .*weight_zero_point must be absent: the checkpoint says symmetric is True",
    ),
    "scales of two dtypes": (
        Packed(),
        replace("weight_scale", lambda t: t.float() * 1.001),
        "1.up_proj.weight_scale in .* must be torch.bfloat16 like .*0.gate_proj.*torch.float32",
    ),
    "integers for a global scale": (
        NVFP4(),
        replace("weight_global_scale", as_integers),
        "1.up_proj.* in .*weight_global_scale must be one of .*got torch.int32",
    ),
    "integers for a scale of the whole": (
        NVFP4(modelopt=True),
        replace("weight_scale_2", as_integers),
        "1.up_proj.* in .*weight_scale_2 must be one of .*got torch.int32",
    ),
    "integers for a scale of activations": (
        NVFP4(modelopt=True),
        replace("input_scale", as_integers),
        "1.up_proj.* in .*input_scale must be one of .*got torch.int32",
    ),
    "not stored alike": (
        silent(Packed()),
        lambda t: [
            t.update({f"{PREFIX}.0.up_proj.{p}": v})
            for p, v in Packed(symmetric=False, group=32).matrix(I, K)[0].items()
        ],
        "0.up_proj.* must be stored like .*0.gate_proj.*int4_w4a16:g32 with 256 columns, got "
        "int4_w4a16:g32:zp",
    ),
    "no scale of activations": (
        NVFP4(modelopt=True),
        lambda t: [t.pop(f"{PREFIX}.{e}.up_proj.input_scale") for e in range(E)],
        "0.up_proj.weight in .*: input_scale must be there: .* quantized by it, scheme 'nvfp4'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints_are_refused_by_tensor_and_file(case, tmp_path):
    writer, change, message = BAD[case]
    write(tmp_path, writer, change)
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path).expert_weight(PREFIX, ("gate_proj", "up_proj"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"desc_act": True}, "desc_act .*must be off"),
        ({"bits": 3}, "bits must be 4 or 8, got 3"),
        ({"group_size": 64}, "one group for each 64 columns.*got 2 groups in 256 columns"),
    ],
)
def test_bad_configurations(config, message, tmp_path):
    writer = GPTQ()
    writer.config = writer.config | config
    write(tmp_path, writer)
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path).expert_weight(PREFIX)


@pytest.mark.parametrize(
    ("form", "other"),
    [("ct_mxfp4", "gptq4"), ("gptq4", "ct_int4"), ("ct_fp8", "gptq4"), ("modelopt_nvfp4", "awq")],
)
def test_a_configuration_of_another_library_is_refused(form, other, tmp_path):
    writer = copy.copy(WRITERS[form])
    writer.config = WRITERS[other].config
    write(tmp_path, writer)
    message = "config.json: quant_method must be '.* beside tensors of .*, got '"
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path).expert_weight(PREFIX)


def test_a_matrix_without_elements_is_refused(tmp_path):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    tensors = {
        f"{PREFIX}.0.down_proj.weight": torch.zeros(0, K, dtype=torch.int8),
        f"{PREFIX}.0.down_proj.weight_scale": torch.ones(0, K // 32),
    }
    save(tmp_path, tensors, compressed("int-quantized", weights))
    with pytest.raises(ValueError, match="0.down_proj.weight in .*weight must have elements"):
        Checkpoint(tmp_path).expert_weight(PREFIX, ("down_proj",))


def test_plain_experts_are_not_rounded_to_the_dtype_of_the_first(tmp_path):
    tensors = {f"{PREFIX}.{e}.down_proj.weight": torch.randn(K, I) for e in range(E)}
    tensors[f"{PREFIX}.0.down_proj.weight"] = tensors[f"{PREFIX}.0.down_proj.weight"].bfloat16()
    save(tmp_path, tensors, {})
    with pytest.raises(ValueError, match="1.down_proj.weight in .* must be torch.bfloat16 like"):
        Checkpoint(tmp_path).expert_weight(PREFIX, ("down_proj",))
    # each is quantized by itself
    weight = Checkpoint(tmp_path).expert_weight(PREFIX, ("down_proj",), "fp8_channel")
    want = moe_ops.quantize(torch.stack([t.float() for t in tensors.values()]), "fp8_channel")
    assert torch.equal(weight.qdata[1:].view(torch.uint8), want.qdata[1:].view(torch.uint8))


def test_schemes_that_do_not_fit(tmp_path):
    write(tmp_path, WRITERS["gptq4"])
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(ValueError, match="'int4_w4a16:g128:zp', in which .*is quantized already"):
        checkpoint.expert_weight(PREFIX, scheme="fp8_block")
    with pytest.raises(ValueError, match="must be in the checkpoint, got no tensor"):
        checkpoint.expert_weight("model.layers.7.mlp.experts")
    plain = tmp_path / "plain"
    plain.mkdir()
    save(plain, {f"{PREFIX}.0.down_proj.weight": torch.randn(8, 48)}, {})
    with pytest.raises(ValueError, match=r"0.down_proj.weight in .*, expert 0: .*48"):
        Checkpoint(plain).expert_weight(PREFIX, ("down_proj",), "int4_w4a16")
    bad = torch.full((8, 128), float("nan"))
    save(plain, {f"{PREFIX}.0.down_proj.weight": bad}, {})
    with pytest.raises(ValueError, match="0.down_proj.weight in .*, expert 0: .*must be finite"):
        Checkpoint(plain).expert_weight(PREFIX, ("down_proj",), "int4_w4a16")


def test_damaged_files(tmp_path):
    with pytest.raises(ValueError, match=r"folder with \*.safetensors files"):
        Checkpoint(tmp_path)
    write(tmp_path, WRITERS["gptq4"])
    file = tmp_path / "model-0.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(
        ValueError, match=r"experts.* in .*model-0.safetensors must .*is truncated"
    ):
        Checkpoint(tmp_path)
    file.write_bytes(content[:100])
    with pytest.raises(ValueError, match="model-0.safetensors must be a safetensors file"):
        Checkpoint(tmp_path)
