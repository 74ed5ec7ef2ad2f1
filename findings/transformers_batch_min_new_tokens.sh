#!/usr/bin/env bash
# transformers' continuous batching ends requests before `min_new_tokens`, without a word.
#
# Found in transformers 5.24.0 with torch 2.13.0, on a CPU.
#
# `generate` keeps the end-of-sequence token from being chosen until `min_new_tokens` are there. One
# expects `generate_batch` to do the same for the same GenerationConfig, or to say that it does not,
# as it warns of processors that it drops, such as that of a repetition penalty. It stops at the
# first end-of-sequence token instead. The processor is never made: it is made only where
# `_eos_token_tensor` is set, which `generate` does and `generate_batch` does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile transformers==5.24.0 accelerate==1.15.0

cat >"$folder/finding.py" <<'PYTHON'
import logging
import warnings

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    bos_token_id=None,
    eos_token_id=None,
)
model = AutoModelForCausalLM.from_config(config).eval()
with torch.no_grad():  # so that tokens differ
    model.model.embed_tokens.weight.normal_()
    model.lm_head.weight.normal_()
prompt = [5, 6, 7]
ids = torch.tensor([prompt])


def generate(settings):
    out = model.generate(ids, generation_config=settings, attention_mask=torch.ones_like(ids))
    return out[0, len(prompt) :].tolist()


def settings(**more):
    return GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=8, **more)


free = generate(settings())
end = free[2]
assert end not in free[:2], free
asked = settings(eos_token_id=end, min_new_tokens=6)
one = generate(asked)
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("ContinuousBatchingLogger").addHandler(handler)
with warnings.catch_warnings(record=True) as caught:
    (request,) = model.generate_batch(
        inputs=[prompt], generation_config=asked, progress_bar=False
    ).values()
said += [str(warning.message) for warning in caught]
batch = request.generated_tokens
print(f"without an end: {free}\nmin_new_tokens=6, end {end}: generate {one}, batch {batch}")
print(f"what generate_batch says: {said}")
assert len(one) >= 6 and end not in one[:6]
assert batch == free[:3]
assert not [text for text in said if "min" in text.lower()]
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
