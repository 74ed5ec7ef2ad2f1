"""Trains the tiny MoE language model of this folder on the standard library's own sources.

    python examples/tiny_moe/train.py --out /tmp/tiny_moe  # stop it and run it again: it resumes

Every Python installation carries the text. A file is held out when the hash of its path says so,
so that the same files are held out whatever the Python version; `held_out.txt` is made of such
files. Each layer's router is trained with a very weak load-balancing loss: every expert lives, and
which bytes it serves, and how many, is for the router to learn.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import shutil
import sysconfig
import time
from pathlib import Path

import torch
from model import HERE, WINDOW, expert_load, held_out, perplexity
from tqdm import tqdm

# Tests, tables and generated text teach a language model little about Python.
SKIPPED = {"test", "tests", "idle_test", "encodings", "lib2to3", "pydoc_data", "__pycache__"}
SKIPPED |= {"site-packages", "dist-packages"}
SAVE_EVERY = 250  # steps


def is_held_out(name: str) -> bool:
    """Whether the standard-library file at this POSIX path is kept from training (one in 20)."""
    return hashlib.sha256(name.encode()).digest()[0] < 13


def training_text() -> bytes:
    """All training files of this Python's standard library, sorted by path, joined."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    kept = [n for n in names if not SKIPPED & set(n.split("/")) and not is_held_out(n)]
    return b"\n\n".join((root / name).read_bytes() for name in kept)


def build(experts: str, balance: float, width: int = 128):
    """A freshly initialised model; of width 128 with 1.84 million parameters, of which an eighth
    is not experts.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, logging

    logging.disable_progress_bar()  # else every save draws one
    if experts == "moe_ops":
        import moe_ops  # noqa: F401  registers the name
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=width,
        moe_intermediate_size=width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=0.05,
        router_aux_loss_coef=balance,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation(experts)
    return model


def losses(model, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(next-byte cross entropy in nats, load-balancing loss summed over layers) of batch.

    transformers balances the mean over all layers, under which one layer can starve an expert that
    another feeds; so its formula (Switch Transformer, equations 4 to 6) is taken layer by layer.
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    out = model(input_ids=batch, output_router_logits=True, use_cache=False)
    cross_entropy = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
    )
    config = model.config
    balance = [
        load_balancing_loss_func((logits,), config.num_experts, config.num_experts_per_tok)
        for logits in out.router_logits
    ]
    return cross_entropy, config.router_aux_loss_coef * torch.stack(balance).sum()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Warm-up over 200 steps, constant, then linear to zero over the last fifth of the steps."""
    warm_up = min(1.0, (step + 1) / 200)
    return args.lr * min(warm_up, (args.steps - step) / (0.2 * args.steps))


def save(model, optimizer, history: dict, step: int, out: Path) -> None:
    """Writes the model (bf16 safetensors), the loss plot and what resuming needs."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # a token is a byte, of any text
        if out.resolve() != HERE:
            shutil.copy(HERE / name, out)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save({**state, "history": json.dumps(history)}, out / "checkpoint.tmp")
    (out / "checkpoint.tmp").replace(out / "checkpoint.pt")
    plot(history, out / "loss.png")


def plot(history: dict, path: Path) -> None:
    """Training and held-out loss in bits per byte over the bytes read."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6, 3.2), dpi=80)
    for name, style in (("train", {"lw": 0.8, "alpha": 0.7}), ("held out", {"marker": "."})):
        if history[name]:
            ax.plot(*zip(*history[name], strict=True), label=name, **style)
    ax.set(xlabel="million bytes read", ylabel="bits per byte", ylim=(1, 5))
    ax.grid(alpha=0.3)
    ax.legend()
    fig.tight_layout()
    fig.savefig(path)
    plt.close(fig)


def report(model) -> None:
    """Prints held-out perplexity and what share of the tokens each expert serves."""
    ppl = perplexity(model)
    print(f"held-out perplexity {ppl:.3f} per byte ({math.log2(ppl):.3f} bits per byte)")
    for index, row in enumerate(expert_load(model, held_out(32 * 1024))):
        print(f"layer {index} expert load " + " ".join(f"{100 * share:5.1f}%" for share in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "run", help="folder to write to")
    parser.add_argument("--steps", type=int, default=2800)
    parser.add_argument("--batch-size", type=int, default=8, help=f"windows of {WINDOW} bytes")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=128, help="columns of tokens and experts")
    parser.add_argument("--balance", type=float, default=2e-4, help="weight of load balancing")
    parser.add_argument("--experts", default="moe_ops", help="experts implementation")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(args.seed)
    model = build(args.experts, args.balance, args.width).to(args.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    history, first = {"train": [], "held out": []}, 0
    if (args.out / "checkpoint.pt").exists():
        state = torch.load(args.out / "checkpoint.pt", args.device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        history, first = json.loads(state["history"]), state["step"]
        print(f"resuming at step {first}")

    text = torch.frombuffer(bytearray(training_text()), dtype=torch.uint8)
    print(f"{len(text) / 1e6:.1f} million bytes of training text")
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, mininterval=5)
    recent, since = [], time.perf_counter()
    for step in bar:
        # The batch depends on (seed, step) alone: a resumed run reads what the unbroken run reads.
        rng = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        starts = torch.randint(len(text) - WINDOW, (args.batch_size,), generator=rng)
        batch = text[starts[:, None] + torch.arange(WINDOW)].long().to(args.device)
        cross_entropy, balance = losses(model, batch)
        (cross_entropy + balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(cross_entropy.detach() / math.log(2))
        if (step + 1) % 25 == 0:
            read = (step + 1) * batch.numel() / 1e6
            history["train"].append((read, (sum(recent) / len(recent)).item()))
            speed = len(recent) * batch.numel() / (time.perf_counter() - since)
            bar.set_postfix_str(f"{history['train'][-1][1]:.3f} bits/byte, {speed:.0f} bytes/s")
            recent, since = [], time.perf_counter()
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == args.steps:
            bits = math.log2(perplexity(model.eval(), held_out(16 * 1024)))
            model.train()
            history["held out"].append(((step + 1) * batch.numel() / 1e6, bits))
            save(model, optimizer, history, step + 1, args.out)
    report(model.eval())


if __name__ == "__main__":
    main()
