#!/usr/bin/env bash
# transformers writes an uninitialized scale beside a matrix that it left in BF16, and its own
# loading on a CPU then multiplies the matrix by it.
#
# Found in transformers 5.24.0 with torch 2.13.0, on a CPU.
#
# `FineGrainedFP8Config` quantizes in blocks of 128 and leaves matrices that blocks do not divide
# as they are, such as Qwen2-MoE's `shared_expert_gate` of one row. One expects such a matrix alone
# in the file, and unchanged by a round trip. `save_pretrained` also writes its `weight_scale_inv`,
# which nothing ever set: whatever the memory held, or NaN where torch is asked to fill
# uninitialized memory. Quantizing lists it as missing and "newly initialized", which it is not.
# `from_pretrained` of the saved model on a CPU dequantizes: it multiplies the BF16 matrix by that
# number and says nothing of it. Quantizing asks for a GPU, though its formulas run anywhere: that
# check alone is set aside here, and loading is as it comes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile transformers==5.24.0 accelerate==1.15.0

cat >"$folder/finding.py" <<'PYTHON'
import math
import tempfile
from unittest import mock

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen2MoeConfig
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils import logging

logging.disable_progress_bar()
logging.set_verbosity_error()
GATE = "model.layers.0.mlp.shared_expert_gate.weight"
UP = "model.layers.0.mlp.shared_expert.up_proj.weight"


def round_trip(plain, quantized):
    """Whether the gate's scale is NaN, and the relative errors of both matrices when loaded."""
    model = AutoModelForCausalLM.from_pretrained(plain)
    with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment"):
        AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=FineGrainedFP8Config()
        ).save_pretrained(quantized)
    with safe_open(f"{quantized}/model.safetensors", "pt") as file:
        gate, scale = file.get_tensor(GATE), file.get_tensor(GATE + "_scale_inv")
    assert gate.dtype == torch.bfloat16 and torch.equal(gate, model.get_parameter(GATE))
    loaded = AutoModelForCausalLM.from_pretrained(quantized)
    errors = []
    for name in (GATE, UP):
        wanted, found = (m.get_parameter(name).detach().double() for m in (model, loaded))
        errors.append(((found - wanted).norm() / wanted.norm()).item())
    print(f"scale {scale.item():.3g}; relative errors: gate {errors[0]:.3g}, FP8 {errors[1]:.3g}")
    return scale.isnan().item(), *errors


config = Qwen2MoeConfig(
    vocab_size=96,
    hidden_size=128,
    intermediate_size=128,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
)
with tempfile.TemporaryDirectory() as folder:
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(f"{folder}/a")
    _, gate, up = round_trip(f"{folder}/a", f"{folder}/b")
    assert not gate < 0.1 and up < 0.1
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    nan, gate, up = round_trip(f"{folder}/a", f"{folder}/c")
    assert nan and math.isnan(gate) and up < 0.1
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
