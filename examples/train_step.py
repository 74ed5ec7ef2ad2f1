"""Three ways to fine-tune a model whose experts run through moe_ops.

Full fine-tuning, LoRA adapters on attention and experts through PEFT, and QLoRA: adapters on the
attention over frozen fp8 experts. Each takes a few steps on real text. The loss must fall, every
trained tensor must get a gradient, frozen ones must not move, and the gradients must agree with
those of a reference model.

    python examples/train_step.py
"""

from __future__ import annotations

import argparse

import torch
from common import check, max_error, scheme_name, title
from tiny_moe.model import held_out, load, windows

import moe_ops.integrations.transformers as moe_transformers

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def loss_of(model, batch: torch.Tensor) -> torch.Tensor:
    """Mean next-byte loss of batch (rows, length) in nats."""
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def values(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's values; of a quantized tensor's, what they stand for."""
    tensor = tensor.detach()
    return tensor.dequantize() if hasattr(tensor, "__tensor_flatten__") else tensor.clone()


def train(model, batch: torch.Tensor, steps: int, lr: float) -> None:
    """Takes `steps` steps of AdamW on `batch` and checks what came of them."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    before = {n: values(p) for n, p in frozen.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    check(losses[-1] < losses[0], f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps")
    missed = [n for n, p in trained.items() if p.grad is None or not p.grad.any()]
    check(
        not missed, f"all {len(trained)} trained tensors have a gradient {missed or ''}".rstrip()
    )
    moved = [n for n, p in frozen.items() if not torch.equal(values(p), before[n])]
    moved += [n for n, p in frozen.items() if p.grad is not None]
    if frozen:
        check(not moved, f"{len(frozen)} frozen tensors did not move {moved or ''}".rstrip())


def full(batch: torch.Tensor, args: argparse.Namespace) -> None:
    title("full fine-tuning")
    model, eager = load("moe_ops", device=args.device), load("eager", device=args.device)
    loss_of(model, batch).backward()
    loss_of(eager, batch).backward()
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    error = max(max_error(ours.grad, theirs.grad) for ours, theirs in pairs)
    check(error < 1e-4, f"gradients equal eager transformers', relative error {error:.1e}")
    train(model, batch, args.steps, lr=3e-4)


def lora(batch: torch.Tensor, args: argparse.Namespace) -> None:
    from peft import LoraConfig, get_peft_model

    title("LoRA on attention and experts, through PEFT")
    config = LoraConfig(r=8, target_modules=ATTENTION, target_parameters=EXPERTS)
    model = get_peft_model(load("moe_ops", device=args.device), config)
    moe_transformers.attach(model)
    adapted = sum(".experts." in n for n, p in model.named_parameters() if p.requires_grad)
    check(adapted > 0, f"{adapted} adapter tensors sit on the experts")
    train(model, batch, args.steps, lr=3e-3)


def qlora(batch: torch.Tensor, args: argparse.Namespace) -> None:
    from peft import LoraConfig, get_peft_model

    title(f"QLoRA: LoRA on attention over frozen {args.scheme} experts")
    model = load("moe_ops", device=args.device)
    reference = load("moe_ops", device=args.device)
    moe_transformers.quantize(model, args.scheme)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            theirs.copy_(values(ours))
    # The gradient the first layer's experts hand to their input, through quantized and through
    # dequantized weights. Only the quantized ones round the activations, to three mantissa bits.
    grads = []
    for each in (model, reference):
        torch.manual_seed(0)
        block = each.model.layers[0].mlp
        hidden = torch.randn(64, each.config.hidden_size, device=args.device, requires_grad=True)
        _, weights, ids = block.gate(hidden.detach())
        out = block.experts(hidden, ids, weights.detach())
        out.backward(torch.randn_like(out))
        grads.append(hidden.grad)
    cosine = torch.nn.functional.cosine_similarity(*[g.flatten() for g in grads], dim=0).item()
    check(cosine > 0.99, f"experts pass their input its gradient, cosine {cosine:.4f}")
    model.zero_grad()
    train(
        get_peft_model(model, LoraConfig(r=8, target_modules=ATTENTION)), batch, args.steps, 3e-3
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--scheme", type=scheme_name, default="fp8_block", help="scheme of the frozen experts"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    batch = next(windows(held_out(), batch_size=4)).to(args.device)
    print(f"fine-tuning on {batch.numel()} bytes of held-out text")
    for part in (full, lora, qlora):
        torch.manual_seed(0)
        part(batch, args)


if __name__ == "__main__":
    main()
