#!/usr/bin/env bash
# llama.cpp's converter replaces the factor of positions that Phi-3.5-MoE states, without a word.
#
# Found in the converter of llama-cpp-python 0.3.36 with transformers 5.24.0 and torch 2.13.0.
#
# Phi-3.5-MoE multiplies the cosines and sines of rotary positions by `short_mscale` or
# `long_mscale` of its `rope_scaling`, both 1.243. One expects `convert_hf_to_gguf.py` to write that
# number as `phimoe.rope.scaling.attn_factor`, or to refuse what it does not know. It computes
# sqrt(1 + ln s / ln L) from the lengths instead, as for Phi-3, and writes 1.190: no field of the file
# holds the number of the model, so whatever loads it attends with products that are 8 % too small.
# The difference is measured here in the logits of a tiny model with random weights.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile transformers==5.24.0 pyyaml requests tqdm
"$python" -m pip download -qq --no-deps --no-binary :all: -d "$folder" llama-cpp-python==0.3.36
tar -xzf "$folder"/llama_cpp_python-0.3.36.tar.gz -C "$folder"
sources=$folder/llama_cpp_python-0.3.36/vendor/llama.cpp

cat >"$folder/finding.py" <<'PYTHON'
import json
import logging
import sys
import tempfile
from pathlib import Path

import torch
from transformers import PhimoeConfig, PhimoeForCausalLM
from transformers.utils import logging as messages

sys.path[:0] = [f"{sys.argv[1]}/gguf-py", sys.argv[1]]
import convert_hf_to_gguf
import gguf
from conversion import get_model_class

logging.disable(logging.INFO)
messages.set_verbosity_error()
messages.disable_progress_bar()
FACTOR = 1.243163121016122  # of Phi-3.5-MoE, as its lengths are
LENGTH, ORIGINAL = 131072, 4096


def model(factor):
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0] * 8,
        "short_mscale": factor,
        "long_mscale": factor,
        "original_max_position_embeddings": ORIGINAL,
    }
    config = PhimoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=LENGTH,
        original_max_position_embeddings=ORIGINAL,
        attention_bias=True,
        lm_head_bias=True,
        initializer_range=0.2,
        rope_parameters=rope,
    )
    return PhimoeForCausalLM(config).eval()


def no_vocabulary(self):
    self._set_vocab_none()


with tempfile.TemporaryDirectory() as folder:
    model(FACTOR).save_pretrained(folder)
    path = Path(folder) / "config.json"
    said = json.loads(path.read_text()) | {"architectures": ["PhiMoEForCausalLM"]}
    path.write_text(json.dumps(said))
    assert said["rope_parameters"]["short_mscale"] == FACTOR
    get_model_class("PhiMoEForCausalLM").set_vocab = no_vocabulary
    sys.argv = ["", folder, "--outtype", "f32", "--outfile", f"{folder}/model.gguf"]
    convert_hf_to_gguf.main()
    reader = gguf.GGUFReader(f"{folder}/model.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items()}

written = fields["phimoe.rope.scaling.attn_factor"]
numbers = [value for value in fields.values() if isinstance(value, float)]
print(f"short_mscale {FACTOR:.6f}, phimoe.rope.scaling.attn_factor {written:.6f}")
assert abs(written - 1.190238) < 1e-5
assert not any(abs(number - FACTOR) < 1e-3 for number in numbers), numbers
tokens = torch.randint(96, (1, 64), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    wanted, found = model(FACTOR)(tokens).logits, model(written)(tokens).logits
difference = ((found - wanted).norm() / wanted.norm()).item()
print(f"relative difference of logits {difference:.3f}")
assert difference > 0.01
PYTHON
OMP_NUM_THREADS=1 TQDM_DISABLE=1 "$python" "$folder/finding.py" "$sources"
