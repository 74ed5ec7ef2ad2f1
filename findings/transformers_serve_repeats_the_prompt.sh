#!/usr/bin/env bash
# transformers' server answers with the prompt, where a Qwen model has another chat template.
#
# Found in transformers 5.24.0 with torch 2.13.0, on a CPU.
#
# A tokenizer without a `response_template` gets one by the `model_type` alone: that of Qwen, whose
# answers begin behind `<|im_start|>assistant`. A fine-tuned model may have another chat template.
# The parser then takes the whole prompt for the beginning of the answer, with a warning in the
# server's log: the client reads its own words before those of the model. One expects the text that
# was generated, as for model types that have no such template.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile 'transformers[serving]==5.24.0'

cat >"$folder/finding.py" <<'PYTHON'
from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.cli.serving.utils import parse_assistant_message

byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
fast = Tokenizer(models.BPE({c: i for i, c in enumerate(byte_level.alphabet())}, []))
fast.pre_tokenizer, fast.decoder = byte_level, decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
tokenizer.chat_template = "{% for m in messages %}User: {{ m['content'] }}\nBot: {% endfor %}"
turns = [{"role": "user", "content": "What is two and two?"}]
prompt = tokenizer.apply_chat_template(turns, tokenize=False)
ids, answer = tokenizer(prompt)["input_ids"], tokenizer("Four.")["input_ids"]


def served(model_type: str) -> str:
    model = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    text = tokenizer.decode(answer, skip_special_tokens=True)
    return parse_assistant_message(tokenizer, model, answer, ids, cleaned_content=text)[0]


found = {name: served(name) for name in ("mixtral", "qwen3_moe")}
print(found)
assert found["mixtral"] == "Four."
assert found["qwen3_moe"] == prompt + "Four."
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
