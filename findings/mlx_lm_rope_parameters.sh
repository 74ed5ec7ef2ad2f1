#!/usr/bin/env bash
# mlx-lm rotates by the wrong base when transformers 5 wrote the checkpoint, without a word.
#
# Found in mlx-lm 0.32.2 with mlx 0.32.4 on a CPU, transformers 5.24.0 and torch 2.13.0.
#
# transformers 5 writes the base of rotary embeddings as `rope_parameters["rope_theta"]`, and no
# longer `rope_theta` or `rope_scaling`. One expects mlx-lm to read that, as its qwen3 does, or to
# ask for the field that it misses. Its llama and mixtral take their own defaults instead, 1e4 and
# 1e6. A Llama of base 5e5, as Llama 3 has, loads without a warning and predicts other tokens; with
# the same number written as `rope_theta` too, its logits are those of transformers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile \
  transformers==5.24.0 mlx-lm==0.32.2 mlx==0.32.4 mlx-cpu==0.32.4

cat >"$folder/finding.py" <<'PYTHON'
import json
import tempfile
import warnings
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config
from transformers.utils import logging

logging.disable_progress_bar()
mx.set_default_device(mx.cpu)
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
tokens = torch.randint(96, (1, 64), generator=torch.Generator().manual_seed(0))


def difference(path, wanted):
    """The largest difference from transformers' logits, relative to the largest logit."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = load_model(path)
    found = np.array(model(mx.array(tokens.numpy())))
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def compare(kind, base, **options):
    """The difference of a model as transformers saved it, and with `rope_theta` written too."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": base}
    config = kind(**SIZES, **options, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        wanted = model(tokens).logits.numpy()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        model.save_pretrained(path)
        written = json.loads((path / "config.json").read_text())
        assert written["rope_parameters"] == rope and "rope_theta" not in written
        as_saved = difference(path, wanted)
        (path / "config.json").write_text(json.dumps(written | {"rope_theta": base}))
        both = difference(path, wanted)
    print(f"{kind.__name__}, base {base:g}: {as_saved:.1e} as saved, {both:.1e} with rope_theta")
    return as_saved, both


for kind, default, options in (
    (LlamaConfig, 1e4, {}),
    (MixtralConfig, 1e6, {"num_local_experts": 4}),
    (Qwen3Config, None, {"head_dim": 32}),
):
    for base in (1e4, 5e5, 1e6):
        as_saved, both = compare(kind, base, **options)
        assert both < 1e-4
        assert as_saved < 1e-4 if default in (None, base) else as_saved > 0.1
PYTHON
OMP_NUM_THREADS=1 "$python" "$folder/finding.py"
