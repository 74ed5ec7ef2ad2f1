#!/usr/bin/env bash
# With gradient accumulation, the Trainer of transformers counts a router's loss once a
# micro-batch.
#
# Found in transformers 5.24.0 with torch 2.13.0 and accelerate 1.15.0, on a CPU.
#
# Eight rows make one optimizer step, as one batch of eight or as four of two. One expects the same
# gradient: for the cross-entropy, the Trainer passes the number of labels of the whole step to the
# model, which divides by it. The load-balancing loss of an MoE model is a mean over one
# micro-batch, which nobody divides by their number. So its weight is `router_aux_loss_coef` times
# the accumulation steps, in the gradient and in the logged loss. The language model's head, which
# has no part in that loss, gets the same gradient in both ways. Issue 48690 of transformers
# reports the same weight for the number of processes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile transformers==5.24.0 accelerate==1.15.0

cat >"$folder/finding.py" <<'PYTHON'
import tempfile

import torch
from transformers import (
    AutoModelForCausalLM,
    PrinterCallback,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


def step(batch, accumulation, coefficient):
    """The loss that is logged, and the gradients of the head and of a router, after one step."""
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
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
    )
    model = AutoModelForCausalLM.from_config(config)
    seen = {}

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            seen["head"] = model.lm_head.weight.grad.clone()
            seen["router"] = model.model.layers[0].mlp.gate.weight.grad.clone()

        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.setdefault("loss", float(logs.get("loss", 0)))

    rows = torch.randint(0, 96, (8, 6), generator=torch.Generator().manual_seed(0)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            logging_steps=1,
            max_grad_norm=0,
            optim="sgd",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Look()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return seen


runs = {(c, a): step(8 // a, a, c) for c in (0.0, 1.0) for a in (1, 4)}
parts = {}
for accumulation in (1, 4):
    plain, routed = runs[0.0, accumulation], runs[1.0, accumulation]
    parts[accumulation] = routed["loss"] - plain["loss"]
    print(f"{accumulation} micro-batches: the router's part of the loss {parts[accumulation]:.3f}")
one, four = runs[1.0, 1], runs[1.0, 4]
torch.testing.assert_close(four["head"], one["head"], atol=1e-5, rtol=1e-4)
torch.testing.assert_close(runs[0.0, 4]["router"], runs[0.0, 1]["router"], atol=1e-5, rtol=1e-4)
router = [(runs[1.0, a]["router"] - runs[0.0, a]["router"]).norm().item() for a in (1, 4)]
print(f"the router's gradient by it: {router[0]:.3g} and {router[1]:.3g}")
assert 3.8 < parts[4] / parts[1] < 4.3 and router[1] > 3 * router[0]
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
