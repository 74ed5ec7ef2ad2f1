#!/usr/bin/env bash
# PEFT's `layers_to_transform` and `exclude_modules` do not hold for `target_parameters`.
#
# Found in peft 0.21.2 with transformers 5.24.0 and torch 2.13.0.
#
# LoRA on the first layer alone is asked for in both ways, for a linear layer of attention by
# `target_modules` and for the experts by `target_parameters`. One expects both to be adapted in
# layer 0 only, or an error. The linear layer is; the experts are adapted in every layer, without a
# warning, in one and the same configuration too. `rank_pattern` is the other way about: PEFT warns
# that its key matches nothing and is ignored, and the experts' rank is nevertheless the pattern's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile transformers==5.24.0 peft==0.21.2

cat >"$folder/finding.py" <<'PYTHON'
import re
import warnings

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

EXPERTS = 8


def adapted(**options):
    """Layers with LoRA on attention and on experts, the experts' rank, and PEFT's warnings."""
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    lora = LoraConfig(
        r=4,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.down_proj"],
        **options,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    layers = {"q_proj": [], "experts": []}
    rank = 0
    for name, weight in model.named_parameters():
        if found := re.search(r"layers\.(\d)\..*(q_proj|experts)\.lora_A", name):
            layers[found[2]].append(int(found[1]))
            if found[2] == "experts":
                rank = len(weight) // EXPERTS
    said = [str(w.message) for w in caught if "ignored" in str(w.message)]
    said += [str(w.message) for w in caught if re.search("exclude|layers_to", str(w.message))]
    return layers["q_proj"], layers["experts"], rank, said


first = adapted(layers_to_transform=[0])
excluded = adapted(exclude_modules=["layers.1.self_attn.q_proj", "layers.1.mlp.experts"])
pattern = adapted(rank_pattern={"down_proj": 16})
for name, (attention, experts, rank, said) in (
    ("layers_to_transform=[0]", first),
    ("exclude_modules of layer 1", excluded),
    ("rank_pattern", pattern),
):
    print(f"{name}: attention in layers {attention}, experts in {experts} of rank {rank}; {said}")
assert first[:2] == excluded[:2] == ([0], [0, 1]) and not first[3] and not excluded[3]
assert pattern[2] == 16 and len(pattern[3]) == 1
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
