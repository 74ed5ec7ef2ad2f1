"""Checkpoints as the libraries that quantize models write them: names, fields and layouts."""

import copy

import pytest

from tests.support.writers import WRITERS

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from tests.integrations.transformers.test_from_pretrained import (
    load,
    logits,
    mixtral,
    relative,
    requantize,
    weights_of,
)

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
    writer.config["config_groups"] = {
        "group_0": group | ({"input_activations": rounded} if rounded else {}),
        "group_1": group | {"targets": [target], "input_activations": None},
    }
    requantize(tmp_path, writer, original)
    loaded = load(tmp_path)
    assert {w.scheme for w in weights_of(loaded).values()} == {scheme}
    assert relative(logits(loaded), logits(original)) < 1e-5
