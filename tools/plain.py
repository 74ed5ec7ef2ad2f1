"""Tiny plain checkpoints of transformers' families of experts, for tools to quantize."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from tests.integrations.transformers import test_families as families

WIDTH = 128  # a multiple of what blocks and groups have, in attention too
VOCABULARY = 128
_HEADS = ("num_attention_heads", "num_key_value_heads", "swa_num_attention_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def sizes(width: int) -> dict[str, Any]:
    """Sizes by configuration field; a family takes the fields it has."""
    wide = {name: width if v in (16, 32) else v for name, v in families.SMALL.items()}
    heads = (*_HEADS, "swa_num_key_value_heads", "mamba_num_heads")
    return wide | {
        **dict.fromkeys(heads, width // 8),
        **dict.fromkeys(_EXPERTS, 4),
        **{"index_topk": 8, "sliding_window": 16, "swiglu_limit": 7.0},
        **{"vocab_size": VOCABULARY, "unpadded_vocab_size": VOCABULARY},
    }


# where these sizes contradict each other
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 128},
    "mimo_v2_flash": {"num_key_value_heads": 4},
    "gemma4": {
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 128,
    },
}


def _widened(value: Any, width: int) -> Any:
    """A family's own sizes, as wide as the others."""
    if isinstance(value, list) and value and all(v == 32 for v in value):
        return [width for _ in value]
    if isinstance(value, dict):
        return {name: _widened(v, width) for name, v in value.items()}
    return width if value == 32 and not isinstance(value, bool) else value


def build(family: str, width: int = WIDTH) -> torch.nn.Module:
    """One layer of a family, in bf16, whose matrices have rows of unit scale."""
    more = families.FAMILIES[family]

    def own(layers: int) -> dict[str, Any]:
        widened = {name: _widened(v, width) for name, v in more(layers).items()}
        return widened | OWN.get(family, {})

    with (
        mock.patch.object(families, "SMALL", sizes(width)),
        mock.patch.dict(families.FAMILIES, {family: own}),
    ):
        return families.build(family, 1).to(torch.bfloat16)


def save(family: str, folder: Path, width: int = WIDTH) -> None:
    """`build` as a checkpoint under the names of the hub, with a tokenizer of its numbers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = build(family, width)
    model.config.dtype = torch.bfloat16
    for name in ("_attn_implementation", "_experts_implementation"):
        setattr(model.config, name, None)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", pad_token="w0")
    fast.save_pretrained(folder)


def main(family: str, folder: str) -> None:
    torch.set_num_threads(1)
    save(family, Path(folder) / family)
