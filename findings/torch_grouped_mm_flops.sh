#!/usr/bin/env bash
# PyTorch's FlopCounterMode counts nothing for `grouped_mm`, transformers' product of experts.
#
# Found in torch 2.13.0 with transformers 5.24.0, on a CPU.
#
# One model with the same weights and the same logits has three implementations of experts. One
# expects the same count from each, as the products are the same; the counter knows mm, bmm,
# attention, convolutions and even scaled products. `grouped_mm`, which is transformers' default,
# counts as zero, forward and backward, without a warning. A utilization (MFU) from that count
# lacks the experts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile transformers==5.24.0

cat >"$folder/finding.py" <<'PYTHON'
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig


def build(**options):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
    )
    return AutoModelForCausalLM.from_config(config, **options).eval()


x = torch.randn(8, 16, requires_grad=True)
weights = torch.randn(2, 16, 32, requires_grad=True)
ends = torch.tensor([4, 8], dtype=torch.int32)
with FlopCounterMode(display=False) as alone:
    torch.nn.functional.grouped_mm(x, weights, offs=ends).square().sum().backward()
print(f"grouped_mm and its gradients: {alone.get_total_flops()} of {3 * 2 * 8 * 16 * 32}")
assert alone.get_total_flops() == 0

ids = torch.arange(16).reshape(2, 8)
counts, logits = {}, {}
for implementation in ("eager", "batched_mm", "grouped_mm"):
    model = build(experts_implementation=implementation)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        logits[implementation] = model(input_ids=ids).logits
    counts[implementation] = counter.get_total_flops()
default = build().config._experts_implementation
tokens, layers, top_k = ids.numel(), 2, 2
experts = 2 * tokens * layers * top_k * 3 * 64 * 32
print(f"{counts}, experts {experts}, default {default}")
torch.testing.assert_close(logits["grouped_mm"], logits["eager"], atol=1e-4, rtol=1e-4)
assert default == "grouped_mm" and counts["eager"] == counts["batched_mm"]
assert counts["eager"] - counts["grouped_mm"] == experts
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
