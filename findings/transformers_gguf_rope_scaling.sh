#!/usr/bin/env bash
# transformers forgets the scaling of rotary positions that a GGUF file states, without a word.
#
# Found in transformers 5.24.0 with gguf 0.19.0 and torch 2.13.0, on a CPU.
#
# llama.cpp's files state how positions are scaled: as `llama.rope.scaling.type` and `.factor`, or,
# for the rule of Llama 3.1, as a tensor of divisors, `rope_freqs.weight`. One expects
# `from_pretrained(..., gguf_file=...)` to apply them, or to refuse what it does not know. It reads
# the base and drops the rest: its table of metadata has no key of scaling, and a tensor that is no
# parameter's is passed over. The model loads without a warning as one of plain positions, and
# predicts other tokens. The same file is right when the caller passes the configuration, and a
# file of plain positions is right by itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0

cat >"$folder/finding.py" <<'PYTHON'
import logging
import tempfile
import warnings

import gguf
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HEADS, SIZE = 2, 32
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
    "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
    "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
    "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
}
transformers.logging.disable_progress_bar()
said = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("transformers").addHandler(handler)


def write(model, path):
    """Write the model as llama.cpp's converter does, its scaling of positions too."""
    config, rope = model.config, model.config.rope_parameters
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(SIZE)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, SIZE, 2) / SIZE)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates neighbours, not halves
            weight = weight.view(HEADS, 2, SIZE // 2, -1).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(NAMES[name.removesuffix(".weight")] + ".weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def difference(**rope):
    """The relative difference of logits: as loaded, and with the configuration passed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=HEADS * SIZE,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=256,
        initializer_range=0.2,
        rope_parameters={"rope_theta": 1e4, **rope},
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(96, (1, 128), generator=torch.Generator().manual_seed(0))
    differences = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        write(model, f"{folder}/model.gguf")
        wanted = model(tokens).logits
        for options in ({}, {"config": config}):
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                loaded = AutoModelForCausalLM.from_pretrained(
                    folder, gguf_file="model.gguf", **options
                )
            found = loaded.eval()(tokens).logits
            differences.append(((found - wanted).norm() / wanted.norm()).item())
            if not options:
                kind = loaded.config.rope_parameters["rope_type"]
    print(
        f"{rope['rope_type']}: loaded as {kind}, difference {differences[0]:.1e}; with the "
        f"configuration passed {differences[1]:.1e}"
    )
    assert kind == "default" and differences[1] < 1e-4
    return differences[0]


assert difference(rope_type="default") < 1e-4
assert difference(rope_type="linear", factor=4.0) > 0.1
assert difference(rope_type="yarn", factor=4.0, original_max_position_embeddings=64) > 0.1
llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
assert difference(rope_type="llama3", factor=8.0, **llama3) > 0.1
assert not any("scaling" in key for table in GGUF_CONFIG_MAPPING.values() for key in table)
assert not said, said
PYTHON
OMP_NUM_THREADS=1 TQDM_DISABLE=1 "$python" "$folder/finding.py"
