"""What a checkpoint's quantization_config says of one matrix: used, or refused by name."""

import copy
import json
import re

import pytest
import torch

from tests.integrations.checkpoints.test_checkpoints import PREFIX, SCHEMES, I, K, write
from tests.support.writers import (
    GPTQ,
    NVFP4,
    WRITERS,
    AWQWriter,
    BlockFP8,
    ChannelFP8,
    Int8,
    MXFP4Packed,
    Packed,
    Writer,
    compressed,
    e4m3,
)

pytest.importorskip("safetensors")

from moe_ops.integrations.checkpoints import Checkpoint
from moe_ops.integrations.checkpoints.configs import FAMILIES, config_for

EXPERT = f"{PREFIX}.3.up_proj"
FLOAT8, INT8 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}
TOKEN = {"strategy": "token", "dynamic": True}


def with_config(writer, **fields):
    writer = copy.deepcopy(writer)
    writer.config = copy.deepcopy(writer.config) | fields
    return writer


def with_group(writer, **fields):
    writer = with_config(writer)
    writer.config["config_groups"]["group_0"] |= fields
    return writer


def with_weights(writer, **fields):
    old = writer.config["config_groups"]["group_0"]["weights"]
    return with_group(writer, weights=old | fields)


def read(folder, writer, change=None):
    write(folder, writer, change)
    return Checkpoint(folder).expert_weight(PREFIX)


def add(part, tensor):
    """A change that puts one more tensor beside expert 1's up projection."""
    return lambda tensors: tensors.update({f"{PREFIX}.1.up_proj.{part}": tensor})


# --- compressed-tensors' groups ----------------------------------------------------------------

TARGETS = [
    ["Linear", "re:.*experts.*"],
    ["re:.*experts.*", "Linear"],
    ["re:.*self_attn.*", "Linear"],
    ["re:.*up_proj", "re:.*experts.*", "Linear"],
    ["re:.*experts.*", "re:.*up_proj", "Linear"],
    ["Linear", "re:.*", EXPERT],
    ["up_proj", "Linear"],  # the end of a name is no match
    ["re:up_proj", "Linear"],  # an expression matches from the start
    ["Module", "Linear"],
    ["Linear", "Linear"],
]


@pytest.mark.parametrize("targets", TARGETS, ids=" ".join)
def test_groups_are_those_of_compressed_tensors(targets):
    """The first group is meant for the matrix, then the second, and so on: as the library has
    it."""
    library = pytest.importorskip("compressed_tensors.quantization")
    groups = {
        f"group_{i}": {"targets": [target], "weights": INT8 | {"num_bits": 2 + i}}
        for i, target in enumerate(targets)
    }
    config = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": []}
    module = torch.nn.Module()
    for part in EXPERT.split(".")[::-1]:
        inner = torch.nn.Linear(4, 4) if part == "up_proj" else module
        module = torch.nn.Module()
        module.add_module(part, inner)
    library.apply_quantization_config(
        module, library.QuantizationConfig(**copy.deepcopy(config)), show_progress=False
    )
    want = module.get_submodule(EXPERT).quantization_scheme.weights.num_bits
    assert config_for(config, EXPERT)["weights"]["num_bits"] == want


OURS = "model.layers.0.mlp.experts.3.gate_proj"  # of block_sparse_moe.experts.3.w1


@pytest.mark.parametrize(
    ("targets", "bits"),
    [
        (["Linear", "re:.*mlp.experts.*"], 3),
        (["Linear", OURS, "re:.*block_sparse_moe.*"], 3),
        (["re:.*block_sparse_moe.*", "Linear"], 2),
        (["re:.*experts.*", "re:.*mlp.experts.*"], 2),
        (["re:.*block_sparse_moe.*", "re:.*mlp.*"], None),
    ],
)
def test_targets_may_name_the_file_s_or_the_model_s_modules(targets, bits):
    groups = {
        f"group_{i}": {"targets": [t], "weights": {"num_bits": 2 + i}}
        for i, t in enumerate(targets)
    }
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    names = ("model.layers.0.block_sparse_moe.experts.3.w1", OURS)
    if bits is not None:
        assert config_for(config, *names)["weights"]["num_bits"] == bits
        return
    with pytest.raises(ValueError, match="config_groups must have one group for .*w1, which"):
        config_for(config, *names)
    groups["group_1"]["weights"] = groups["group_0"]["weights"]  # it does not matter which
    assert config_for(config, *names)["weights"]["num_bits"] == 2


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4, "dynamic": {r".*mlp\.experts.*": {"bits": 8}}},
        {"quant_method": "auto-round", "bits": 4, "extra_config": {OURS: {"bits": 8}}},
        {"quant_method": "auto-round", "bits": 4, "extra_config": {".*mlp.*": {"bits": 8}}},
    ],
)
def test_fields_of_single_modules_may_have_the_model_s_names(config):
    name = "model.layers.0.block_sparse_moe.experts.3.w1"
    assert config_for(config, name)["bits"] == 4 and config_for(config, name, OURS)["bits"] == 8


def test_embeddings_have_a_class_of_their_own():
    groups = {name: {"targets": [name], "weights": INT8} for name in ("Linear", "Embedding")}
    groups["Embedding"]["weights"] = INT8 | {"num_bits": 4}
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    assert config_for(config, "model.embed_tokens")["weights"]["num_bits"] == 4
    assert config_for(config, EXPERT)["weights"]["num_bits"] == 8


def test_a_regular_expression_counts_before_an_earlier_class(tmp_path):
    """Attention in int8 by "Linear", experts packed in 4 bits by their name: the scheme of the
    second, and as many columns as it has."""
    writer = copy.deepcopy(Packed())
    four = writer.config["config_groups"]["group_0"] | {"targets": ["re:.*mlp.experts.*"]}
    eight = {"targets": ["Linear"], "weights": INT8 | {"strategy": "channel"}}
    writer.config |= {"config_groups": {"group_0": eight, "group_1": four}}
    weight = read(tmp_path, writer)
    assert weight.scheme == "int4_w4a16:g32" and weight.shape[2] == K


@pytest.mark.parametrize(
    ("ignore", "refused"),
    [
        (["lm_head", "re:.*mlp.gate$", "up_proj"], False),
        (["re:.*experts.*"], True),
        ([f"{PREFIX}.1.up_proj"], True),
        (["Linear"], True),
    ],
)
def test_ignored_modules_must_not_be_quantized(ignore, refused, tmp_path):
    writer = with_config(Packed(), ignore=ignore)
    if not refused:
        assert read(tmp_path, writer).scheme == "int4_w4a16:g32"
        return
    with pytest.raises(ValueError, match=r"_proj\S* in .*: ignore of quantization_config must"):
        read(tmp_path, writer)


# --- activations and weights of compressed-tensors ---------------------------------------------


class ScaledFP8(Writer):
    """compressed-tensors' float-quantized with another group of the weight's scale."""

    def __init__(self, shape, activations):
        super().__init__()
        self.shape = shape
        strategy = {(1,): "tensor", (128, 128): "block", (1, 32): "group"}[shape]
        weights = FLOAT8 | {"strategy": strategy}
        if strategy == "block":
            weights["block_structure"] = list(shape)
        if strategy == "group":
            weights["group_size"] = 32
        self.config = compressed("float-quantized", weights, activations)

    def matrix(self, n, k):
        n = max(n, 256)  # else one block would be one row of blocks
        q = e4m3(self.rng, n, k)
        if self.shape == (1,):
            s = torch.from_numpy(self.scales(1)).float()
            return {"weight": q, "weight_scale": s}, q.double().numpy() * s.double().item()
        rows, cols = self.shape
        if cols == 32:
            s = torch.randint(112, 116, (n, k // 32), dtype=torch.uint8)
            scale = (s.double() - 127).exp2()
        else:
            s = torch.from_numpy(self.scales(n // rows, k // cols)).bfloat16()
            scale = s.double()
        scale = scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
        return {"weight": q, "weight_scale": s}, (q.double() * scale).numpy()


GROUP = {"strategy": "group", "dynamic": True}
USED = {
    "per matrix, per token": (ScaledFP8((1,), FLOAT8 | TOKEN), "fp8_channel"),
    "per matrix, dynamic": (ScaledFP8((1,), FLOAT8 | {"dynamic": True}), "fp8_tensor"),
    "per row, dynamic": (
        with_group(ChannelFP8(), input_activations=FLOAT8 | {"dynamic": True}),
        "fp8_channel_tensor",
    ),
    "per matrix alone": (ScaledFP8((1,), None), "fp8_w8a16:tensor"),
    "block": (ScaledFP8((128, 128), FLOAT8 | GROUP | {"group_size": 128}), "fp8_block"),
    "block alone": (ScaledFP8((128, 128), None), "fp8_w8a16:block"),
    "mx": (ScaledFP8((1, 32), FLOAT8 | GROUP | {"group_size": 32}), "mxfp8"),
    "int8 alone": (with_group(Int8(), input_activations=None), "int8_w8a16:channel"),
    "int8, one scale": (
        with_group(Int8(), input_activations=INT8 | {"dynamic": True}),
        "int8_w8a8_tensor",
    ),
    "mxfp4, e4m3 of 128": (
        with_group(MXFP4Packed(), input_activations=FLOAT8 | GROUP | {"group_size": 128}),
        "mxfp4_w4a8",
    ),
    "mxfp4, mxfp8": (
        with_group(MXFP4Packed(), input_activations=FLOAT8 | GROUP | {"group_size": 32}),
        "mxfp4_mxfp8",
    ),
    "mxfp4, mxfp4": (
        with_group(
            MXFP4Packed(),
            input_activations=GROUP | {"num_bits": 4, "type": "float", "group_size": 32},
        ),
        "mxfp4",
    ),
}


@pytest.mark.parametrize("case", USED)
def test_activations_decide_the_scheme(case, tmp_path):
    writer, scheme = USED[case]
    values = write(tmp_path, writer, names=("gate_proj",))
    weight = Checkpoint(tmp_path).expert_weight(PREFIX, ("gate_proj",))
    assert weight.scheme == scheme
    got, want = weight.dequantize(torch.float32).double(), torch.from_numpy(values["gate_proj"])
    assert ((got - want).abs() <= 2**-23 * want.abs()).all()


REFUSED = {
    "activations by groups beside channels": (
        with_group(ChannelFP8(), input_activations=FLOAT8 | GROUP | {"group_size": 128}),
        "input_activations must be null or .* or 'float8 token dynamic' beside float8 weights "
        "with a scale for a channel, got 'float8 group128 dynamic'",
    ),
    "static beside channels without its scale": (
        with_group(ChannelFP8(), input_activations=FLOAT8 | {"dynamic": False}),
        "input_scale must be there: .* quantized by it, scheme 'fp8_channel_tensor_static'",
    ),
    "asymmetric activations": (
        with_group(Int8(), input_activations=INT8 | TOKEN | {"symmetric": False}),
        "symmetric of input_activations must be True",
    ),
    "int8 activations beside fp8": (
        with_group(ChannelFP8(), input_activations=INT8 | TOKEN),
        "got 'int8 token dynamic'",
    ),
    "fp8 activations beside nvfp4": (
        with_group(NVFP4(), input_activations=FLOAT8 | TOKEN),
        "beside NVFP4 weights, got 'float8 token dynamic'",
    ),
    "per token beside mxfp4": (
        with_group(MXFP4Packed(), input_activations=FLOAT8 | TOKEN),
        "beside MXFP4 weights, got 'float8 token dynamic'",
    ),
    "6 bits beside mxfp4": (
        with_group(MXFP4Packed(), input_activations=FLOAT8 | GROUP | {"num_bits": 6}),
        "beside MXFP4 weights, got 'float6 groupNone dynamic'",
    ),
    "fp8 activations beside int4": (
        with_group(Packed(), input_activations=FLOAT8 | TOKEN),
        "input_activations must be null beside packed 4-bit weights, got 'float8 token dynamic'",
    ),
    "static without its scale": (
        ScaledFP8((1,), FLOAT8 | {"dynamic": False}),
        "input_scale must be there: .* quantized by it, scheme 'fp8_tensor_static'",
    ),
    "scale although alone": (
        with_group(NVFP4(), input_activations=None),
        "input_global_scale must be absent: .* scheme 'nvfp4_w4a16'",
    ),
    "outputs": (
        with_group(ChannelFP8(), output_activations=FLOAT8),
        r"output_activations of config_groups\['group_0'\] must be null",
    ),
    "field of a group": (
        with_group(ChannelFP8(), rotation="hadamard"),
        r"rotation of config_groups\['group_0'\] must be a field that moe_ops knows",
    ),
    "field of weights": (
        with_weights(ChannelFP8(), offset=3),
        r"offset of weights of config_groups\['group_0'\] must be a field that moe_ops knows",
    ),
    "field of another place": (
        with_weights(ChannelFP8(), damp_percent=0.1),
        r"damp_percent of weights of config_groups\['group_0'\] must be a field",
    ),
    "dynamic weights": (
        with_weights(ChannelFP8(), dynamic=True),
        r"dynamic of weights of config_groups\['group_0'\] must be False",
    ),
    "weights of another type": (
        with_weights(ChannelFP8(), type="int"),
        "type of weights must be float, as the tensors are, got 'int'",
    ),
    "weights of other bits": (
        with_weights(Packed(), num_bits=2),
        "num_bits must be 4 or 8, got 2",
    ),
    "other blocks": (
        with_weights(ScaledFP8((128, 128), None), block_structure=[64, 256]),
        r"block_structure of weights must be .*got \[64, 256\]",
    ),
    "no weights": (
        with_group(ChannelFP8(), weights=None),
        r"weights of config_groups\['group_0'\] must say how",
    ),
    "group of others": (
        with_group(ChannelFP8(), targets=["re:.*self_attn.*"]),
        "config_groups must have a group for .*0.gate_proj, .*got targets 're:.*self_attn",
    ),
    "preset": (
        with_config(ChannelFP8(), config_groups={"FP8": ["Linear"]}),
        r"config_groups\['FP8'\] must describe weights",
    ),
    "format": (with_config(Packed(), format="marlin-24"), "format .* got 'marlin-24'"),
    "format of a group": (
        with_group(Packed(), format="mxfp6-pack-quantized"),
        r"format of config_groups\['group_0'\] must be",
    ),
    "sparsity": (
        with_config(Packed(), sparsity_config={"format": "sparse-24-bitmask"}),
        "must leave the experts dense, got format 'sparse-24-bitmask'",
    ),
    "novices": (
        with_config(Packed(), moe_sparsity_config={"method": "novice"}),
        "got format 'dense' and method 'novice'",
    ),
    "field of fp8": (
        with_config(BlockFP8(), rounding="stochastic"),
        "rounding of quantization_config must be a field that moe_ops knows, got 'stochastic'",
    ),
    "fp8 format": (with_config(BlockFP8(), fmt="e5m2"), "fmt .* must be 'e4m3'.*got 'e5m2'"),
    "static beside blocks": (
        with_config(BlockFP8(), activation_scheme="static"),
        "activation_scheme must be 'dynamic'",
    ),
    "static beside mx": (
        with_config(WRITERS["mxfp8"], activation_scheme="static"),
        "activation_scheme must be 'dynamic'",
    ),
    "gptq format": (
        with_config(GPTQ(), checkpoint_format="marlin"),
        "checkpoint_format .* must be 'gptq' or 'gptq_v2', got 'marlin'",
    ),
    "gptq words": (with_config(GPTQ(), pack_dtype="int16"), "pack_dtype .* must be 'int32'"),
    "gptq adapter": (with_config(GPTQ(), adapter={"rank": 8}), "adapter of quantization_config"),
    "gptq left out": (
        with_config(GPTQ(), dynamic={r"-:.*\.1\.up_proj": {}}),
        r"1.up_proj.*dynamic of quantization_config must not leave out .*1.up_proj",
    ),
    "gptq field of dynamic": (
        with_config(GPTQ(), dynamic={"+:.*": {"rotate": True}}),
        r"rotate of dynamic\['\+:\.\*'\] must be a field",
    ),
    "awq version": (with_config(AWQWriter(), version="gemv"), "version .* must be 'gemm'"),
    "awq without zero points": (
        with_config(AWQWriter(), zero_point=False),
        "qzeros must be 8 everywhere",
    ),
    "round packing": (
        with_config(GPTQ(), quant_method="auto-round", packing_format="auto_round:llm_compressor"),
        "checkpoint_format of quantization_config|packing_format of quantization_config",
    ),
    "modelopt algorithm": (
        with_config(NVFP4(modelopt=True), quant_algo="W4A8_NVFP4_FP8"),
        "quant_algo of .*0.gate_proj must be one of 'FP8', .*got 'W4A8_NVFP4_FP8'",
    ),
    "modelopt without one": (
        with_config(NVFP4(modelopt=True), quant_algo=None),
        "quant_algo of .* must be one of .*got None",
    ),
    "modelopt group": (
        with_config(NVFP4(modelopt=True), group_size=32),
        "group_size of .* must be 16 for NVFP4, got 32",
    ),
    "modelopt exclusion": (
        with_config(NVFP4(modelopt=True), exclude_modules=["lm_head", "*.mlp.experts*"]),
        r"exclude_modules .* must not name .*0.gate_proj.*got '\*.mlp.experts\*'",
    ),
    "modelopt field": (
        with_config(NVFP4(modelopt=True), lora_rank=32),
        "lora_rank of quantization_config must be a field that moe_ops knows, got 32",
    ),
    "modelopt mixed": (
        with_config(
            NVFP4(modelopt=True), quant_algo="MIXED_PRECISION", quantized_layers={"a": {}}
        ),
        "quantized_layers must name .*0.gate_proj",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(case, tmp_path):
    writer, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        read(tmp_path, writer)


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao", "quark", "fbgemm_fp8", "moe_ops"])
def test_methods_of_others(method, tmp_path):
    """Their weights may be stored alike, but nobody has read what their fields mean."""
    writer = with_config(BlockFP8(), quant_method=method)
    with pytest.raises(ValueError, match=f"quant_method must be one of 'fp8', .*got '{method}'"):
        read(tmp_path, writer)
    assert Checkpoint(tmp_path, {}).expert_weight(PREFIX).scheme == "fp8_block"


TRANSFORM = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}


@pytest.mark.parametrize("form", ["plain", "ct_nvfp4"])
def test_transforms_of_activations_are_refused(form, tmp_path):
    class Plain(Writer):
        config = compressed("dense", None)

        def matrix(self, n, k):
            weight = torch.from_numpy(self.rng.standard_normal((n, k))).bfloat16()
            return {"weight": weight}, weight.double().numpy()

    writer = Plain() if form == "plain" else WRITERS[form]
    online = with_config(writer, transform_config={"config_groups": {"R4": TRANSFORM}})
    with pytest.raises(ValueError, match=r"transform_config .*'R4' \('hadamard'\) at .* 'input'"):
        read(tmp_path, online)
    fused = TRANSFORM | {"apply": [{"targets": ["Linear"], "location": "weight_output"}]}
    fused = with_config(writer, transform_config={"config_groups": {"R1": fused}})
    assert read(tmp_path, fused).shape[2] == K  # the file's weights are rotated already


# --- fields that change what is read -----------------------------------------------------------


def test_gptq_formats_and_dynamic_fields(tmp_path):
    """transformers writes "format" where GPTQModel writes "checkpoint_format"; "dynamic" changes
    the fields of some modules."""
    plain = GPTQ(version="gptq_v2")
    renamed = with_config(plain, format="gptq_v2")
    del renamed.config["checkpoint_format"]
    eight = GPTQ(bits=8, group=64)
    dynamic = {"-:.*self_attn": {}, "+:.*mlp.experts": {"bits": 8, "group_size": 64}}
    other = with_config(eight, dynamic=dynamic | {"+:.*": {"bits": 3}}, bits=4, group_size=128)
    for i, (writer, scheme) in enumerate(
        ((renamed, "int4_w4a16:g128:zp"), (other, "int8_w8a16:g64:zp"))
    ):
        (tmp_path / str(i)).mkdir()
        values = write(tmp_path / str(i), writer)
        weight = Checkpoint(tmp_path / str(i)).expert_weight(PREFIX)
        assert weight.scheme == scheme
        got = weight.dequantize(torch.float32).double()[:, :I]
        want = torch.from_numpy(values["gate_proj"])
        assert ((got - want).abs() <= 2**-22 * want.abs()).all()


@pytest.mark.parametrize("writer", [GPTQ(sym=True), AWQWriter()])
def test_auto_round_exports_in_the_formats_of_others(writer, tmp_path):
    """With its own name of the elements' type beside their fields."""
    weight = read(tmp_path, with_config(writer, data_type="int", provider="auto-round"))
    assert weight.scheme.startswith("int4_w4a16")
    with pytest.raises(ValueError, match="data_type of quantization_config must be 'int', got"):
        read(tmp_path, with_config(writer, data_type="float"))


def test_auto_round(tmp_path):
    fields = {"bits": 4, "group_size": 128, "sym": True, "data_type": "int", "iters": 200}
    fields |= {"quant_method": "auto-round", "autoround_version": "0.8"}
    extra = {f"{PREFIX}.1.up_proj": {"group_size": 128}, ".*gate$": {"bits": 16}}
    extra |= {f"{PREFIX}.0.gate": {"bits": 16}}  # a name: not of gate_proj
    for packing, writer, scheme in (
        ("auto_round:auto_gptq", GPTQ(sym=True), "int4_w4a16:g128"),
        ("auto_round:auto_awq", AWQWriter(), "int4_w4a16:g64:zp"),
    ):
        writer = copy.deepcopy(writer)
        size = {"group_size": 128 if "gptq" in packing else 64}
        kinds = {name: e | size if "group_size" in e else e for name, e in extra.items()}
        writer.config = fields | size | {"packing_format": packing, "extra_config": kinds}
        (tmp_path / scheme).mkdir()
        assert read(tmp_path / scheme, writer).scheme == scheme
    writer.config["extra_config"] = {".*experts.*up_proj": {"bits": 2}}
    with pytest.raises(ValueError, match="bits must be 4 for AWQ, got 2"):
        read(tmp_path, writer)


def test_auto_round_of_fp8_blocks(tmp_path):
    """As transformers' fine-grained FP8, in fields of its own beside those."""
    fields = {"quant_method": "auto-round", "packing_format": "auto_round:fp8", "fmt": "e4m3"}
    fields |= {"data_type": "fp", "bits": 8, "group_size": [128, 128], "sym": True}
    fields |= {"act_data_type": "fp", "act_bits": 8, "act_group_size": 128, "act_sym": True}
    fields |= {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    writer = BlockFP8()
    writer.config = fields | {"extra_config": {".*mlp.gate.*": {"bits": 16, "group_size": None}}}
    assert read(tmp_path, writer).scheme == "fp8_block"
    for changed in ({"act_group_size": 64}, {"group_size": 128}, {"act_bits": 16}):
        with pytest.raises(ValueError, match=r"packing_format 'auto_round:fp8' must be .*, got"):
            read(tmp_path, with_config(writer, **changed))


class ModelOptFP8(Writer):
    def __init__(self, algorithm, scale, activation=False):
        super().__init__()
        self.scale, self.activation = scale, activation
        self.config = {"quant_method": "modelopt", "quant_algo": algorithm}

    def matrix(self, n, k):
        q = e4m3(self.rng, max(n, 256), k)
        n = q.shape[0]
        shape = {"tensor": (), "channel": (n,), "block": (n // 128, k // 128)}[self.scale]
        s = torch.from_numpy(self.scales(*shape) / 10 if shape else self.scales(1)[0:1]).float()
        s = s.reshape(shape)
        tensors = {"weight": q, "weight_scale": s}
        if self.activation:
            tensors["input_scale"] = torch.tensor(0.01)
        full = s if self.scale == "block" else s.reshape(-1, 1)
        if self.scale == "block":
            tensors["weight_scale"] = s[:, None, :, None]  # as ModelOpt writes it
        full = full.double().repeat_interleave(n // full.shape[0], 0)
        full = full.repeat_interleave(k // full.shape[1], 1)
        return tensors, (q.double() * full).numpy()


ALGORITHMS = {
    "FP8": (ModelOptFP8("FP8", "tensor", True), "fp8_tensor_static"),
    "FP8_PER_CHANNEL_PER_TOKEN": (
        ModelOptFP8("FP8_PER_CHANNEL_PER_TOKEN", "channel"),
        "fp8_channel",
    ),
    "fp8_pb_wo": (ModelOptFP8("fp8_pb_wo", "block"), "fp8_w8a16:block"),
    "NVFP4_AWQ": (with_config(NVFP4(modelopt=True), quant_algo="NVFP4_AWQ"), "nvfp4"),
    "nested": (
        with_config(NVFP4(modelopt=True), quant_algo=None, quantization={"quant_algo": "NVFP4"}),
        "nvfp4",
    ),
    "mixed": (
        with_config(
            NVFP4(modelopt=True),
            quant_algo="MIXED_PRECISION",
            group_size=None,
            quantized_layers={PREFIX: {"quant_algo": "NVFP4", "group_size": 16}},
        ),
        "nvfp4",
    ),
}


@pytest.mark.parametrize("case", ALGORITHMS)
def test_modelopt_algorithms(case, tmp_path):
    writer, scheme = ALGORITHMS[case]
    values = write(tmp_path, writer, names=("gate_proj",))
    weight = Checkpoint(tmp_path).expert_weight(PREFIX, ("gate_proj",))
    assert weight.scheme == scheme
    got, want = weight.dequantize(torch.float32).double(), torch.from_numpy(values["gate_proj"])
    assert ((got - want).abs() <= 2**-22 * want.abs()).all()


def test_every_writer_passes_with_its_authors_other_fields(tmp_path):
    """What real files have beside the fields that are read."""
    others = {
        "gptq": {"true_sequential": True, "damp_percent": 0.1, "meta": {"a": 1}, "lm_head": False},
        "awq": {"zero_point": True, "modules_to_not_convert": ["gate"], "sym": True},
        "compressed-tensors": {
            "quantization_status": "compressed",
            "kv_cache_scheme": FLOAT8,
            "global_compression_ratio": 1.2,
            "sparsity_config": {"format": "dense", "ignore": []},
            "transform_config": {},
            "version": "0.12",
        },
        "modelopt": {"producer": {"name": "modelopt"}, "kv_cache_quant_algo": "FP8", "ignore": []},
        "fp8": {"fmt": "e4m3", "modules_to_not_convert": ["lm_head"], "scale_fmt": "float"},
    }
    for form, writer in WRITERS.items():
        (tmp_path / form).mkdir()
        writer = with_config(writer, **others[writer.config["quant_method"]], new_field=None)
        write(tmp_path / form, writer, names=("gate_proj",))
        weight = Checkpoint(tmp_path / form).expert_weight(PREFIX, ("gate_proj",))
        assert weight.scheme == SCHEMES[form]
    assert {w.config["quant_method"] for w in WRITERS.values()} < FAMILIES.keys()


# --- tensors beside the weights ----------------------------------------------------------------

BESIDE = {
    "AWQ's factors": (NVFP4(modelopt=True), "pre_quant_scale", torch.ones(K)),
    "low-rank residual": (NVFP4(modelopt=True), "svdquant_lora_a", torch.ones(4, K)),
    "zero point of activations": (ChannelFP8(), "input_zero_point", torch.zeros(1)),
    "scale of outputs": (ChannelFP8(), "output_scale", torch.ones(1)),
    "bitsandbytes' statistics": (Int8(), "SCB", torch.ones(I)),
    "scale with a zero point": (MXFP4Packed(), "weight_zero_point", torch.zeros(I, K // 32)),
    "one scale more": (Packed(), "weight_shape_2", torch.ones(1)),
}


@pytest.mark.parametrize("case", BESIDE)
def test_tensors_beside_a_weight_are_refused_by_name(case, tmp_path):
    writer, part, tensor = BESIDE[case]
    with pytest.raises(
        ValueError, match=rf"1.up_proj.*{part}.* must be absent|{part} beside .*1\.up"
    ):
        read(tmp_path, writer, add(part, tensor))
    config = with_config(writer)
    config.config = {}
    with pytest.raises(ValueError, match=f"{part}.* must be absent"):
        read(tmp_path, config, add(part, tensor))


def test_tensors_beside_plain_weights_and_stacks(tmp_path):
    class Plain(Writer):
        def matrix(self, n, k):
            return {"weight": torch.randn(n, k), "bias": torch.randn(n)}, torch.zeros(n, k).numpy()

    assert read(tmp_path, Plain()).shape == (3, 2 * I, K)  # biases are read by themselves
    with pytest.raises(ValueError, match=r"pre_quant_scale beside .*1.up_proj.weight in .*: AWQ"):
        read(tmp_path, Plain(), add("pre_quant_scale", torch.ones(K)))
    stacks = {f"{PREFIX}.up_proj": torch.randn(3, I, K)}

    def stack(tensors):
        tensors.clear()
        tensors |= stacks

    write(tmp_path, Plain(), stack)
    find = Checkpoint(tmp_path).expert_weight
    assert torch.equal(find(PREFIX, ("up_proj",)), stacks[f"{PREFIX}.up_proj"])
    stacks |= {f"{PREFIX}.up_proj_bias": torch.ones(3, I)}
    write(tmp_path, Plain(), stack)
    assert Checkpoint(tmp_path).expert_weight(PREFIX, ("up_proj",)).shape == (3, I, K)
    e4m3_stack = {f"{PREFIX}.up_proj": torch.randn(3, I, K).to(torch.float8_e4m3fn)}
    e4m3_stack[f"{PREFIX}.up_proj_scale"] = torch.rand(3, I, 1)
    write(tmp_path, Plain(), lambda t: [t.clear(), t.update(e4m3_stack)])
    assert Checkpoint(tmp_path).expert_weight(PREFIX, ("up_proj",)).scheme == "fp8_channel"
    stacks |= {f"{PREFIX}.up_proj_pre_quant_scale": torch.ones(3, K)}
    write(tmp_path, Plain(), stack)
    with pytest.raises(ValueError, match="pre_quant_scale beside .*up_proj in .* must be absent"):
        Checkpoint(tmp_path).expert_weight(PREFIX, ("up_proj",))


def test_values_that_contradict_the_weight(tmp_path):
    for writer, part, tensor, message in (
        (ChannelFP8(), "weight_zero_point", torch.ones(I, 1), "weight_zero_point must be zero"),
        (Packed(), "weight_shape", torch.tensor([I, K - 4]), r"weight_shape must be \[128, 256\]"),
    ):
        with pytest.raises(ValueError, match=f"1.up_proj.*{message}"):
            read(tmp_path, writer, add(part, tensor))
    assert read(tmp_path, ChannelFP8(), add("weight_zero_point", torch.zeros(I, 1))) is not None
    both = {"scale": torch.ones(1, 2)}
    with pytest.raises(
        ValueError, match=r"1.up_proj.\S+ must not be beside .*weight_scale_inv of"
    ):
        read(
            tmp_path, BlockFP8(), lambda t: t.update({f"{PREFIX}.1.up_proj.scale": both["scale"]})
        )


def test_messages_name_tensor_and_file(tmp_path):
    with pytest.raises(ValueError) as error:
        read(tmp_path, NVFP4(modelopt=True), add("pre_quant_scale", torch.ones(K)))
    assert re.search(r"experts\.1\.up_proj\.weight in \S+/model-\d\.safetensors", str(error.value))


# --- damaged -----------------------------------------------------------------------------------

QC = "of quantization_config"
GROUP0 = r"config_groups\['group_0'\]"
DAMAGED = {
    "a number": (None, 5, "quantization_config of .*config.json must be an object, got 5"),
    "a string": (None, "fp8", "quantization_config of .*config.json must be an object, got 'fp8'"),
    "a list": (None, [1], r"quantization_config of .*config.json must be an object, got \[1\]"),
    "groups are a list": (
        Packed(),
        {"config_groups": [1]},
        rf"config.json: config_groups {QC} must be an object, got \[1\]",
    ),
    "ignore is a string": (
        Packed(),
        {"ignore": "lm_head"},
        f"config.json: ignore {QC} must be a list of strings, got 'lm_head'",
    ),
    "ignore has a damaged pattern": (
        Packed(),
        {"ignore": ["re:("]},
        rf"config.json: ignore {QC} must have regular expressions, got '\(': missing \)",
    ),
    "ignore has a pattern too deep": (
        Packed(),
        {"ignore": ["re:" + "(" * 5000]},
        f"config.json: ignore {QC} must have regular expressions, got .*",
    ),
    "a pattern repeats too often": (
        Packed(),
        {"ignore": ["re:a{99999999999}"]},
        f"config.json: ignore {QC} must have regular expressions, .*repetition number",
    ),
    "transforms are a list": (
        Packed(),
        {"transform_config": {"config_groups": {"u": {"apply": 3}}}},
        "config.json: apply of 'u' of config_groups of transform_config must be a list of objects",
    ),
    "gptq's dynamic": (
        GPTQ(),
        {"dynamic": {"+:(": {"bits": 8}}},
        rf"config.json: dynamic {QC} must have regular expressions, got '\(': missing",
    ),
    "gptq's dynamic is a list": (
        GPTQ(),
        {"dynamic": ["x"]},
        f"config.json: dynamic {QC} must be an object of objects",
    ),
    "gptq's bits": (GPTQ(), {"bits": "4"}, f"config.json: bits {QC} must be an integer, got '4'"),
    "awq's group_size": (
        AWQWriter(),
        {"group_size": [64]},
        rf"config.json: group_size {QC} must be an integer, got \[64\]",
    ),
    "fp8's blocks": (
        BlockFP8(),
        {"weight_block_size": 128},
        f"config.json: weight_block_size {QC} must be a list of integers, got 128",
    ),
    "modelopt's modules": (
        NVFP4(modelopt=True),
        {"exclude_modules": [3]},
        rf"config.json: exclude_modules {QC} must be a list of strings, got \[3\]",
    ),
    "a field too deep": (
        BlockFP8(),
        {"scale_fmt": json.loads("[" * 400 + "]" * 400)},
        rf"config.json: scale_fmt {QC} must be a string, got \[\[\[\[\[\[\[\.\.\.\]\]\]\]\]\]\]$",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_configurations_are_refused_by_field_and_file(case, tmp_path):
    writer, fields, message = DAMAGED[case]
    write(tmp_path, writer or BlockFP8())
    config = writer.config | fields if writer else fields
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path).expert_weight(PREFIX)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": 3}, f"weights of {GROUP0} must be an object, got 3"),
        ({"targets": ["re:["]}, r"targets of config_groups must have regular .*got '\['"),
        ({"targets": [1]}, rf"targets of {GROUP0} must be a list of strings, got \[1\]"),
        ({"input_activations": []}, rf"input_activations of {GROUP0} must be an object, got \[\]"),
        (
            {"input_activations": {"dynamic": [1]}},
            f"dynamic of input_activations of {GROUP0} must be a string, true or false",
        ),
        ({"weights": {"num_bits": "8"}}, f"num_bits of weights of {GROUP0} must be an integer"),
    ],
)
def test_damaged_groups_are_refused_by_field_and_file(fields, message, tmp_path):
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        read(tmp_path, with_group(ChannelFP8(), **fields))


def test_configurations_of_the_wrong_type(tmp_path):
    write(tmp_path, GPTQ())
    with pytest.raises(ValueError, match="quantization_config must be a dict, got 5"):
        Checkpoint(tmp_path, quantization_config=5)
    for text in ("[" * 100_000, "[]", "3"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(
            ValueError, match="config.json must be (a JSON object|JSON, got a dam)"
        ):
            Checkpoint(tmp_path)
