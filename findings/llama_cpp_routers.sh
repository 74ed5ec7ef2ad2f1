#!/usr/bin/env bash
# llama.cpp routes the tokens of Phi-3.5-MoE and of DeepSeek-V2 by other rules than the models.
#
# Found in llama.cpp of llama-cpp-python 0.3.36 on a CPU, with transformers 5.24.0 and torch 2.13.0.
#
# A router of Phi-3.5-MoE masks logits by their distance from the best and takes two softmaxes of what
# is left (SparseMixer); one of DeepSeek-V2 with `n_group` keeps the groups whose best expert scores
# highest. One expects llama.cpp to compute these, or to refuse the files that its converter writes.
# It takes the two best of one softmax, divided by their sum, for Phi-3.5-MoE, and for DeepSeek-V2
# the groups whose two best experts have the highest sum, which is DeepSeek-V3's rule. Files in fp32
# of tiny models with random weights give other logits than the models. Files of Mixtral and of
# DeepSeek-V2 with one group give the models' logits, so nothing else differs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile transformers==5.24.0 pyyaml requests tqdm
"$python" -m pip download -qq --no-deps --no-binary :all: -d "$folder" llama-cpp-python==0.3.36
tar -xzf "$folder"/llama_cpp_python-0.3.36.tar.gz -C "$folder"
"$python" -m pip install -qq "$folder"/llama_cpp_python-0.3.36.tar.gz  # builds for ten minutes
sources=$folder/llama_cpp_python-0.3.36/vendor/llama.cpp

cat >"$folder/finding.py" <<'PYTHON'
import ctypes
import json
import logging
import sys
import tempfile
from pathlib import Path

import llama_cpp.llama_cpp as lib
import torch
import transformers
from transformers.utils import logging as messages

sys.path[:0] = [f"{sys.argv[1]}/gguf-py", sys.argv[1]]
import convert_hf_to_gguf
from conversion import get_model_class

logging.disable(logging.WARNING)
messages.set_verbosity_error()
messages.disable_progress_bar()
silent = lib.llama_log_callback(lambda level, text, data: None)
lib.llama_log_set(silent, ctypes.c_void_p(0))
lib.llama_backend_init()
IDS = torch.randint(96, (1, 128), generator=torch.Generator().manual_seed(0))
ALL = {
    **{"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.2},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
TWO_OF_8 = {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
LATENT = {
    **{"moe_intermediate_size": 32, "intermediate_size": 64, "n_routed_experts": 16},
    **{"num_experts_per_tok": 3, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32},
    **{"qk_rope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 0},
    "topk_method": "group_limited_greedy",
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 256}
PHI = {"architectures": ["PhiMoEForCausalLM"], "rope_parameters": ROPE}


def vocabulary(self):
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("default")
    self.gguf_writer.add_token_list([f"t{i}" for i in range(96)])
    self.gguf_writer.add_token_types([1] * 96)
    self.gguf_writer.add_token_merges(["t 1"])


def of_llama_cpp(path):
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 128
    params.type_k = params.type_v = params.flash_attn_type = 0
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(128, 0, 1)
    batch.n_tokens = 128
    for i, token in enumerate(IDS[0].tolist()):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
        batch.seq_id[i][0], batch.logits[i] = 0, 1
    assert lib.llama_decode(context, batch) == 0
    numbers = lib.llama_get_logits(context)
    return torch.tensor([numbers[i] for i in range(128 * 96)]).view(128, 96)


def difference(name, options, said=None):
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**ALL, **options)).eval()
    for parameter in model.parameters():  # routers begin with zeros
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        path = Path(folder) / "config.json"
        config = json.loads(path.read_text()) | (said or {})
        path.write_text(json.dumps(config))
        get_model_class(config["architectures"][0]).set_vocab = vocabulary
        sys.argv = ["", folder, "--outtype", "f32", "--outfile", f"{folder}/model.gguf"]
        convert_hf_to_gguf.main()
        wanted, found = model(IDS).logits[0], of_llama_cpp(f"{folder}/model.gguf")
    return ((found - wanted).norm() / wanted.norm()).item()


biases = {"attention_bias": True, "lm_head_bias": True}
mixtral = difference("MixtralForCausalLM", TWO_OF_8)
phi = difference("PhimoeForCausalLM", TWO_OF_8 | biases, PHI)
one = difference("DeepseekV2ForCausalLM", LATENT | {"n_group": 1, "topk_group": 1})
groups = difference("DeepseekV2ForCausalLM", LATENT | {"n_group": 4, "topk_group": 2})
print(f"relative differences of logits: Mixtral {mixtral:.1e}, Phi-3.5-MoE {phi:.1e}")
print(f"DeepSeek-V2 of one group {one:.1e}, of four {groups:.1e}")
assert mixtral < 1e-4 and one < 1e-4
assert phi > 1e-2 and groups > 1e-2
PYTHON
OMP_NUM_THREADS=1 TQDM_DISABLE=1 "$python" "$folder/finding.py" "$sources"
