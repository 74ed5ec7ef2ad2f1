"""torchtitan's small Qwen3-MoE, trained with its own experts and with those of moe_ops.

The same weights and the same batches: the losses must be equal up to bf16 rounding, of both
overrides, and checkpoints are the stock ones.

    pip install torchtitan
    python examples/torchtitan_experts.py
"""

from __future__ import annotations

import argparse

import torch
from common import check, table, title
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import qwen3_configs

OVERRIDES = "moe_ops.integrations.torchtitan"


def build(override: str, layers: int, device: str) -> torch.nn.Module:
    """The model with the override of a name, or as torchtitan has it."""
    cfg = qwen3_configs["debugmodel_moe"](attn_backend="flex")
    cfg.layers = cfg.layers[:layers]
    for layer in cfg.layers:  # flex attention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if override:  # all that it takes
        imports = OverrideConfig(imports=[f"{OVERRIDES}.{override}"])
        apply_overrides(imports, cfg)
    model = cfg.build().to(device)
    model.init_states(buffer_device=torch.device(device))
    return model


def train(model: torch.nn.Module, batches: list[torch.Tensor]) -> list[float]:
    """The losses of AdamW, one a batch of tokens (rows, length)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for tokens in batches:
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    stock = build("", args.layers, args.device)
    state = {name: t.clone() for name, t in stock.state_dict().items()}
    batch = torch.randint(0, 2048, (2, args.length + 1), device=args.device)
    losses = {"torchtitan": train(stock, [batch] * args.steps)}
    for override in ("grouped_experts", "fused_grouped_experts"):
        model = build(override, args.layers, args.device)
        model.load_state_dict(state)
        check(model.state_dict().keys() == state.keys(), f"{override}: the stock checkpoint loads")
        losses[override] = train(model, [batch] * args.steps)
    title("losses")
    rows = [(step, *[f"{of[step]:.4f}" for of in losses.values()]) for step in range(args.steps)]
    table(["step", *losses], rows)
    theirs = losses.pop("torchtitan")
    for name, ours in losses.items():
        off = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
        check(off < 2e-3, f"{name}: losses equal torchtitan's, relative difference {off:.1e}")
        check(ours[-1] < ours[0], f"{name}: loss {ours[0]:.3f} -> {ours[-1]:.3f}")


if __name__ == "__main__":
    main()
