"""QLoRA: adapters on experts in nf4, merged by quantizing the sums, saved as bitsandbytes does.

The tiny model's experts are quantized to nf4, 4.5 bits a weight, and stay so; PEFT's adapters on
them are trained on this repository's documentation. What merging costs is measured: nf4 loses part
of what adapters add, 8 bits keep it. The merged model is saved as a folder of bitsandbytes, and
read back bit for bit.

    python examples/qlora.py
"""

from __future__ import annotations

import argparse
import copy
import tempfile

import torch
from common import check, expert_bytes, table, title
from finetune import EXPERTS, bits_of, text_of, train
from peft import LoraConfig, get_peft_model
from tiny_moe.model import WINDOW, load
from transformers import AutoModelForCausalLM

import moe_ops
import moe_ops.integrations.transformers as moe_transformers

MERGED = ("nf4", "int8_w8a16:channel")


def codes(model) -> list[torch.Tensor]:
    """What holds the quantized weights."""
    weights = [p for p in model.parameters() if isinstance(p, moe_ops.ExpertTensor)]
    return [part.clone() for weight in weights for part in (weight.qdata, weight.scale)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--windows", type=int, default=16, help="of held-out text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    text, held_out = text_of(None)
    held_out = held_out[: args.windows * WINDOW]
    title("experts in nf4")
    model = load("moe_ops", device=args.device)
    bits = {"16-bit experts": bits_of(model, held_out)}
    print(moe_transformers.quantize(model, "nf4"))
    stored, count = expert_bytes(model)
    per_weight = 8 * stored / count
    check(per_weight < 4.51, f"{per_weight:.2f} bits a weight, scales included")
    before = codes(model)

    title(f"adapters of rank {args.rank}, {args.steps} steps")
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_parameters=EXPERTS)
    model = get_peft_model(model, config)
    moe_transformers.attach(model)
    losses = train(model, text, held_out, args)
    bits["nf4"], bits["nf4 with adapters"] = [losses["held out"][i][1] for i in (0, -1)]
    gained = bits["nf4"] - bits["nf4 with adapters"]
    check(gained > 0, f"held-out loss fell by {gained:.3f} bits per byte")
    same = all(torch.equal(a, b) for a, b in zip(before, codes(model), strict=True))
    check(same, "codes and scales of the experts are what they were")

    title("merged")
    lost = {}
    for scheme in MERGED:
        merged = copy.deepcopy(model)
        report = moe_transformers.merge_adapters(merged, scheme)
        errors = [weight.change_error for weight in report.weights]
        name = f"merged into {scheme}"
        lost[name] = f"{sum(errors) / len(errors):.2f}"
        bits[name] = bits_of(merged, held_out)
        if scheme == "nf4":
            of_bitsandbytes = merged.merge_and_unload()
    rows = [(name, f"{value:.3f}", lost.get(name, "-")) for name, value in bits.items()]
    table(("experts", "bits per byte", "lost of what adapters add"), rows)
    kept = abs(bits["merged into int8_w8a16:channel"] - bits["nf4 with adapters"])
    check(kept < 0.02, f"8 bits keep what was learned within {kept:.4f} bits per byte")

    title("saved as bitsandbytes does")
    with tempfile.TemporaryDirectory() as folder:
        moe_transformers.save_bitsandbytes(of_bitsandbytes, folder)
        again = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=moe_transformers.MoeOpsConfig(), dtype=torch.float32
        ).to(args.device)
    pairs = zip(codes(of_bitsandbytes), codes(again), strict=True)
    check(all(torch.equal(a, b) for a, b in pairs), "read back, not a bit of the experts changed")


if __name__ == "__main__":
    main()
