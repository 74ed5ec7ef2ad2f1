#!/usr/bin/env bash
# Weights that torchao quantized count as many bytes as before: `nbytes` is that of bfloat16.
#
# Found in torchao 0.18.0 with transformers 5.24.0 and torch 2.13.0, on a CPU.
#
# `quantize_` with 8 bits halves what the linear layers hold. One expects `nbytes` of such a weight
# and `get_memory_footprint()` of a model to say so. Both stay as they were: `element_size()` of
# the tensor subclass is that of the dtype it stands for. Only torchao's own
# `get_model_size_in_bytes` sees the change. That dtype also stays: `.to(torch.float32)` and
# `module.float()` return the weight as bfloat16, without an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile transformers==5.24.0 torchao==0.18.0

cat >"$folder/finding.py" <<'PYTHON'
import torch
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
from torchao.utils import get_model_size_in_bytes
from transformers import AutoModelForCausalLM, LlamaConfig


def build():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


for config in (Int8WeightOnlyConfig(), Float8WeightOnlyConfig()):
    model = build()
    plain = model.get_memory_footprint(), get_model_size_in_bytes(model)
    quantize_(model, config)
    after = model.get_memory_footprint(), get_model_size_in_bytes(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    converted = weight.to(torch.float32).dtype
    print(
        f"{type(weight).__name__}: get_memory_footprint {plain[0]} to {after[0]}, torchao's size "
        f"{plain[1]} to {after[1]}; nbytes {weight.nbytes}, of its data {weight.qdata.nbytes}; "
        f"to(torch.float32) is {converted}"
    )
    assert after[0] == plain[0] and after[1] < 0.6 * plain[1]
    assert weight.nbytes == 2 * weight.qdata.nbytes == 2 * weight.numel()
    assert converted == model.float().model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
