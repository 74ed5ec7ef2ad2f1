"""The tiny byte-level MoE language model that every example runs.

It has the Qwen3-MoE architecture of transformers (hidden 128, 4 layers of 8 experts, top-2) and
was trained by `train.py` beside this file on the sources of Python's own standard library. A token
is a byte: `encode` and `decode` are all that this takes, and tokenizer.json is the same for
AutoTokenizer, pipelines and trainers of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
HELD_OUT = HERE / "held_out.txt"
WINDOW = 256  # bytes of context the model was trained with


def load(
    experts: str = "eager",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    path: str | Path = HERE,
    **options: Any,
):
    """The trained model in eval mode.

    Args:
        experts: transformers' `experts_implementation`: "eager", "grouped_mm", "batched_mm", or
            "moe_ops" once `moe_ops` has been imported.
        dtype: the dtype to run in; the weights are stored as bf16, so float32 is exact.
        device: where to put it.
        path: the folder holding config.json and model.safetensors.
        options: of from_pretrained, such as a quantization_config or a distributed_config.
    """
    from transformers import Qwen3MoeForCausalLM
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # 3.7 MB need none
    model = Qwen3MoeForCausalLM.from_pretrained(
        path, dtype=dtype, experts_implementation=experts, **options
    )
    return model.to(device).eval()


def encode(text: str | bytes, device: str | torch.device = "cpu") -> torch.Tensor:
    """Bytes of `text` as token ids, (1, length) int64."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    if not data:
        raise ValueError("text must have at least one byte, got an empty string: give a prompt")
    return torch.tensor(list(data), dtype=torch.int64, device=device)[None]


def decode(ids: torch.Tensor) -> str:
    """Token ids, (length,) or (1, length), as text; bytes that are not UTF-8 become U+FFFD."""
    return bytes(ids.flatten().tolist()).decode("utf-8", errors="replace")


def held_out(limit: int | None = None) -> bytes:
    """The committed text that no training run of `train.py` reads; its first `limit` bytes."""
    return HELD_OUT.read_bytes()[:limit]


def windows(data: bytes, batch_size: int, length: int = WINDOW) -> Iterator[torch.Tensor]:
    """`data` cut into consecutive rows of `length` bytes, (<= batch_size, length) int64 a step."""
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(torch.int64)
    yield from tokens[: len(tokens) // length * length].view(-1, length).split(batch_size)


@torch.no_grad()
def perplexity(
    model, data: bytes | None = None, batch_size: int = 16, length: int = WINDOW
) -> float:
    """Perplexity per byte of `data` (default: the held-out text) under `model`.

    exp of the mean negative log likelihood in nats over every byte but the first of each window of
    `length` bytes; log2 of it is bits per byte. The softmax is taken in fp32.
    """
    total, count = 0.0, 0
    for batch in windows(held_out() if data is None else data, batch_size, length):
        batch = batch.to(model.device)
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        nll = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1), reduction="sum"
        )
        total, count = total + nll.item(), count + batch[:, 1:].numel()
    if count == 0:
        raise ValueError(f"data must have at least one window of {length} bytes")
    return math.exp(total / count)


@torch.no_grad()
def expert_load(model, data: bytes) -> torch.Tensor:
    """Share of the (token, slot) pairs of `data` that each expert serves, (layers, experts)."""
    counts = torch.zeros(model.config.num_hidden_layers, model.config.num_experts)

    def count(row: torch.Tensor):
        def hook(_module, _args, out) -> None:
            row.add_(torch.bincount(out[2].flatten().cpu(), minlength=row.numel()))

        return hook

    handles = [
        layer.mlp.gate.register_forward_hook(count(row))
        for layer, row in zip(model.model.layers, counts, strict=True)
    ]
    try:
        for batch in windows(data, 16):
            model(input_ids=batch.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return counts / counts.sum(dim=1, keepdim=True)
