"""Checkpoints whose down_proj is in another format, group size or precision than gate_proj and
up_proj, as each tool writes them."""

import copy
import re

import pytest
import torch

from tests.support.writers import GPTQ, NVFP4, ChannelFP8, Packed, Writer

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
files = pytest.importorskip("safetensors.torch")

from moe_ops.integrations.checkpoints import Checkpoint
from moe_ops.integrations.checkpoints.files import TensorFiles
from tests.integrations.checkpoints.test_configs import ModelOptFP8
from tests.integrations.transformers.checkpoints import (
    assert_same_values,
    load,
    qwen,
    replace_matrices,
    set_config,
)
from tests.integrations.transformers.test_families import relative
from tests.integrations.transformers.test_models import logits

EXPERTS = "model.layers.0.mlp.experts"
DOWN = "re:.*down_proj$"


def groups(first: Writer, down: Writer | None) -> dict:
    """llm-compressor's recipe of two modifiers, or of one that leaves down_proj out."""
    if down is None:
        return first.config | {"ignore": ["lm_head", DOWN]}
    of_first, of_down = [w.config["config_groups"]["group_0"] for w in (first, down)]
    found = {
        "group_0": of_first | {"format": first.config["format"]},
        "group_1": of_down | {"targets": [DOWN], "format": down.config["format"]},
    }
    return first.config | {"config_groups": found, "format": "mixed-precision"}


def auto_round(changed: dict) -> dict:
    fields = {"bits": 4, "group_size": 128, "sym": True, "data_type": "int", "act_bits": 16}
    fields |= {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    return fields | {"extra_config": {r".*down_proj.*": changed}}


def layers_of(*algorithms: str) -> dict:
    """ModelOpt's names of all modules, gate and up by the first algorithm."""
    return {
        f"model.layers.{i}.mlp.experts.{e}.{name}": {"quant_algo": algorithm}
        | ({"group_size": 16} if algorithm == "NVFP4" else {})
        for i in range(2)
        for e in range(4)
        for name, algorithm in zip(
            ("gate_proj", "up_proj", "down_proj"), (algorithms[0], *algorithms), strict=True
        )
    }


INT4, INT8 = GPTQ(sym=True), GPTQ(bits=8, group=64, sym=True)
WORDS4, WORDS8 = Packed(), Packed(bits=8)
FP4, FP8 = NVFP4(), ChannelFP8()
MODELOPT4, MODELOPT8 = NVFP4(modelopt=True), ModelOptFP8("FP8", "tensor", True)
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
# first writer, that of down_proj, what config.json says, schemes of w13 and w2
CASES = {
    "GPTQModel, dynamic": (
        *(
            INT4,
            INT8,
            INT4.config | {"dynamic": {r"+:.*down_proj": {"bits": 8, "group_size": 64}}},
        ),
        *("int4_w4a16:g128", "int8_w8a16:g64"),
    ),
    "GPTQModel, groups": (
        *(INT4, GPTQ(sym=True, group=32)),
        *(INT4.config | {"dynamic": {r".*down_proj": {"group_size": 32}}},),
        *("int4_w4a16:g128", "int4_w4a16:g32"),
    ),
    "GPTQModel, left out": (
        *(INT4, None, INT4.config | {"dynamic": {r"-:.*down_proj": {}}}),
        *("int4_w4a16:g128", ""),
    ),
    "llm-compressor": (
        *(WORDS4, WORDS8, groups(WORDS4, WORDS8)),
        *("int4_w4a16:g32", "int8_w8a16:g32"),
    ),
    "llm-compressor, ignored": (
        *(WORDS4, None, groups(WORDS4, None)),
        *("int4_w4a16:g32", ""),
    ),
    "llm-compressor, activations": (*(FP4, FP8, groups(FP4, FP8)), *("nvfp4", "fp8_channel")),
    "AutoRound": (
        *(INT4, INT8, auto_round({"bits": 8, "group_size": 64})),
        *("int4_w4a16:g128", "int8_w8a16:g64"),
    ),
    "AutoRound, left out": (INT4, None, auto_round({"bits": 16}), "int4_w4a16:g128", ""),
    "ModelOpt": (
        *(MODELOPT4, MODELOPT8, MIXED | {"quantized_layers": layers_of("NVFP4", "FP8")}),
        *("nvfp4", "fp8_tensor_static"),
    ),
    "ModelOpt, left out": (
        *(MODELOPT4, None, MODELOPT4.config | {"exclude_modules": ["*down_proj"]}),
        *("nvfp4", ""),
    ),
}


def write(folder, original, first: Writer, down: Writer | None, config: dict, odd=None):
    """A checkpoint whose experts these writers made; ``odd`` that of expert 2's down_proj. The
    plain model gets their values.
    """
    first, down, odd = copy.deepcopy((first, down, odd))  # the same seed

    def writer_of(module):
        found = re.search(r"\.experts\.(\d+)\.(\w+)$", module)
        if found is None or found[2] != "down_proj":
            return found and first
        return odd if odd is not None and found[1] == "2" else down

    replace_matrices(folder, writer_of, original)
    set_config(folder, config)


def schemes(model) -> set[tuple[str, str]]:
    """Of w13 and w2 in each layer."""
    experts = [layer.mlp.experts for layer in model.model.layers]
    both = [(layer.gate_up_proj, layer.down_proj) for layer in experts]
    return {(getattr(w13, "scheme", ""), getattr(w2, "scheme", "")) for w13, w2 in both}


@pytest.mark.parametrize("case", CASES)
def test_layers_of_two_schemes(case, tmp_path):
    first, down, config, *expected = CASES[case]
    original = qwen()
    write(tmp_path / "q", original, first, down, config)
    loaded = load(tmp_path / "q")
    assert schemes(loaded) == {tuple(expected)}
    assert_same_values(loaded, original)
    if all("w4a16" in name or "w8a16" in name or not name for name in expected):
        assert relative(logits(loaded), logits(original)) < 1e-5
    loaded.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert schemes(again) == {tuple(expected)}
    assert torch.equal(logits(again), logits(loaded))


def test_checkpoint_reads_each_weight_in_its_own(tmp_path):
    first, down, config, *expected = CASES["llm-compressor"]
    write(tmp_path, qwen(1), first, down, config)
    checkpoint = Checkpoint(tmp_path)
    w13 = checkpoint.expert_weight(EXPERTS)
    w2 = checkpoint.expert_weight(EXPERTS, ("down_proj",))
    assert [w13.scheme, w2.scheme] == expected


@pytest.mark.parametrize("case", ["GPTQModel, dynamic", "llm-compressor", "GPTQModel, left out"])
def test_experts_that_differ_are_refused_from_the_headers(case, tmp_path, monkeypatch):
    """With the expert and its tensor, before any weight is read."""
    first, down, config, *_ = CASES[case]
    write(tmp_path, qwen(), first, down, config, odd=first)
    monkeypatch.setattr(TensorFiles, "read", lambda *_, **__: pytest.fail("a weight was read"))
    if case == "GPTQModel, left out":  # the pattern spares this expert
        pattern = r"-:.*experts\.[013]\.down_proj"
        set_config(tmp_path, config | {"dynamic": {pattern: {}}})
    for read in (load, lambda folder: Checkpoint(folder).expert_weight(EXPERTS, ("down_proj",))):
        with pytest.raises(ValueError, match=r"experts\.2\.down_proj\.\w+ in .*safetensors"):
            read(tmp_path)
