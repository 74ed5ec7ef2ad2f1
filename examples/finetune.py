"""Fine-tunes the tiny model on text of another kind, with LoRA adapters on its experts alone.

The model writes Python; the text is this repository's documentation, whose last tenth is held
out. PEFT puts the adapters on the experts' parameters, and `attach` runs them through
moe_ops. With --scheme the experts' weights are quantized first and stay so (QLoRA). A minute of a
CPU is enough; a GPU is used if there is one.

    python examples/finetune.py --plot docs/lora.png
    python examples/finetune.py --scheme int4_w4a16:g32 --out adapter
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import torch
from common import check, ops_called, scheme_name, table, title
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_moe.model import HERE, WINDOW, load, perplexity
from tqdm import tqdm

import moe_ops.integrations.transformers as moe_transformers

REPOSITORY = HERE.parents[1]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EVERY = 10  # steps between two looks at the held-out text


def text_of(path: str | None) -> tuple[torch.Tensor, bytes]:
    """The bytes to train on, and those held out."""
    files = [Path(path)] if path else sorted(REPOSITORY.glob("docs/**/*.md"))
    text = b"\n".join([file.read_bytes() for file in files])
    end = len(text) * 9 // 10
    return torch.frombuffer(bytearray(text[:end]), dtype=torch.uint8).long(), text[end:]


def base_model(args: argparse.Namespace):
    """The tiny model, its experts quantized if asked for."""
    model = load("moe_ops", device=args.device)
    if args.scheme:
        moe_transformers.quantize(model, args.scheme)
    return model


def bits_of(model, text: bytes) -> float:
    """Bits per byte of text."""
    return math.log2(perplexity(model, text))


def train(model, text: torch.Tensor, held_out: bytes, args: argparse.Namespace) -> dict:
    """Train what requires gradients; the losses by step, in bits per byte."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0)
    rng = torch.Generator().manual_seed(0)
    losses: dict[str, list[tuple[int, float]]] = {"train": [], "held out": []}
    losses["held out"].append((0, bits_of(model, held_out)))
    bar = tqdm(range(1, args.steps + 1), desc="fine-tuning", mininterval=0.5)
    for step in bar:
        for group in optimizer.param_groups:  # linear to zero
            group["lr"] = args.lr * (1 - (step - 1) / args.steps)
        starts = torch.randint(len(text) - WINDOW, (args.batch_size,), generator=rng)
        batch = text[starts[:, None] + torch.arange(WINDOW)].to(args.device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses["train"].append((step, loss.item() / math.log(2)))
        if step % EVERY == 0 or step == args.steps:
            losses["held out"].append((step, bits_of(model, held_out)))
        last = {name: f"{points[-1][1]:.3f}" for name, points in losses.items()}
        bar.set_postfix(last, refresh=False)
    return losses


def draw(losses: dict, path: str) -> None:
    """Training and held-out loss over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.2), dpi=100)
    for name, style in (("train", {"lw": 0.8, "alpha": 0.7}), ("held out", {"marker": "."})):
        axis.plot(*zip(*losses[name], strict=True), label=name, **style)
    axis.set(xlabel="steps", ylabel="bits per byte", title="LoRA on experts")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", help="file to train on; by default docs/ of this repository")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8, help=f"windows of {WINDOW} bytes")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument(
        "--scheme", type=scheme_name, default="", help="quantizes the frozen experts"
    )
    parser.add_argument("--out", help="folder to save the adapter to")
    parser.add_argument("--plot", help="file to draw the losses to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    text, held_out = text_of(args.text)
    held_out = held_out[: 32 * WINDOW]
    title(f"LoRA of rank {args.rank} on the experts, {args.scheme or 'plain'} weights")
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_parameters=EXPERTS)
    model = get_peft_model(base_model(args), config)
    print(moe_transformers.attach(model))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{trained} trained numbers; {len(text)} bytes to train on, {len(held_out)} held out")

    batch = text[None, :WINDOW].to(args.device)
    counts = ops_called(lambda: model(input_ids=batch, labels=batch, use_cache=False))
    layers = model.config.num_hidden_layers
    check(
        counts["lora_experts_forward"] == layers == sum(counts.values()),
        f"one operator a layer runs experts and adapters: {dict(counts)}",
    )
    losses = train(model, text, held_out, args)
    before, after = losses["held out"][0][1], losses["held out"][-1][1]
    table(
        ("held-out text", "bits per byte"),
        [("before", f"{before:.3f}"), ("after", f"{after:.3f}")],
    )
    check(after < before, f"held-out loss fell by {before - after:.3f} bits per byte")
    with model.disable_adapter():
        error = abs(bits_of(model, held_out) - before)
    check(error < 1e-3, "without the adapter the model is what it was")

    with tempfile.TemporaryDirectory() as folder:
        path = args.out or folder
        model.save_pretrained(path)
        again = PeftModel.from_pretrained(base_model(args), path)
        moe_transformers.attach(again)
        error = abs(bits_of(again, held_out) - after)
    check(error < 1e-3, "saved and loaded it gives the same loss")
    if args.plot:
        draw(losses, args.plot)


if __name__ == "__main__":
    main()
