#!/usr/bin/env bash
# Saving an MoE model with transformers copies two thirds of its experts before it writes a byte,
# and `max_shard_size` bounds neither that memory nor the files.
#
# Found in transformers 5.24.0 with torch 2.13.0, on a CPU.
#
# `save_pretrained` writes shard by shard, and makes no copies of a dense model. One expects an MoE
# model to need the memory of one shard. Its experts are held by layer and written one by one: the
# gate and up projections of all layers are first copied apart, whatever the size of a shard
# (with `save_original_format=False`, none). The experts of a layer then share memory, and weights
# that do go to one file, however small `max_shard_size` is, though each of them is smaller.
# Parameters that are disjoint views of one buffer, as one lays them out to move them at once, are
# copied too: the whole of a dense model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile transformers==5.24.0

cat >"$folder/finding.py" <<'PYTHON'
import gc
import tempfile
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig, modeling_utils
from transformers.utils import logging

logging.disable_progress_bar()
SHARD = 200_000  # bytes
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def storages():
    """The bytes of each storage that a tensor of this process holds, by address."""
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def save(model, title, **options):
    """Save the model, and return the bytes copied before the first file, and of the largest."""
    before, copied = storages(), []
    write = modeling_utils.safe_save_file

    def count(*arguments, **keywords):
        copied.append(sum(size for at, size in storages().items() if at not in before))
        return write(*arguments, **keywords)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(modeling_utils, "safe_save_file", count),
    ):
        model.save_pretrained(folder, max_shard_size=SHARD, **options)
        files = [path.stat().st_size for path in Path(folder).glob("*.safetensors")]
    total = sum(p.nbytes for p in model.parameters())
    print(
        f"{title}: {copied[0] / total:.0%} of {total} bytes copied before the first of "
        f"{len(files)} files; the largest has {max(files)} bytes"
    )
    return copied[0], max(files)


dense = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
assert max(p.nbytes for p in dense.parameters()) < SHARD
copied, largest = save(dense, "dense")
assert copied == 0 and largest < SHARD

moe = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, **EXPERTS))
gate_up = sum(p.nbytes for name, p in moe.named_parameters() if name.endswith("gate_up_proj"))
a_layer = EXPERTS["num_experts"] * EXPERTS["moe_intermediate_size"] * SIZES["hidden_size"] * 4
assert a_layer / EXPERTS["num_experts"] < SHARD / 10
copied, largest = save(moe, "experts")
assert copied >= gate_up and largest > a_layer > 2 * SHARD
copied, _ = save(moe, "experts, save_original_format=False", save_original_format=False)
assert copied == 0

buffer = torch.empty(sum(p.numel() for p in dense.parameters()))
with torch.no_grad():
    parameters = list(dense.parameters())
    for p, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view(p.shape).copy_(p)
copied, _ = save(dense, "dense in one buffer")
assert copied == buffer.nbytes
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
