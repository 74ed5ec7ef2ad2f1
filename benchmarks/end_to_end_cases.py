"""Models and experts implementations of the end-to-end benchmark, and the speed-ups aimed at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Model:
    """A published model's layer width; `config` and `tiny` are fields of its transformers config
    class."""

    config_class: str
    layers: int
    config: dict[str, Any]
    tiny: dict[str, Any]  # replace those of `config` in a dry run
    router: dict[str, Any]  # fields of compile_kernels.RouterCall

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """E, top_k, K, I of its expert layers."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        (experts,) = (self.config[name] for name in names if name in self.config)
        width = self.config.get("moe_intermediate_size", self.config["intermediate_size"])
        return experts, self.config["num_experts_per_tok"], self.config["hidden_size"], width


_TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MODELS = {
    "qwen3": Model(  # Qwen3-30B-A3B
        "Qwen3MoeConfig",
        4,
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
        {**_TINY, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
        {"weights": torch.bfloat16},
    ),
    "mixtral": Model(  # Mixtral-8x7B
        "MixtralConfig",
        4,
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        {**_TINY, "intermediate_size": 128, "num_local_experts": 4},
        {},
    ),
    "dsv3": Model(  # DeepSeek-V3, all layers MoE; its experts take 22.5 GB a layer in bf16
        "DeepseekV3Config",
        2,
        {
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 0,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
        {
            "logits": torch.float32,
            "choice": ("sigmoid", True, 8, 4),
            "correction_bias": True,
        },
    ),
    "gptoss": Model(  # gpt-oss-20b
        "GptOssConfig",
        4,
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
        # neither a multiple of 128, as 2880
        {
            **_TINY,
            "hidden_size": 160,
            "intermediate_size": 160,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        {"weights": torch.bfloat16, "bias": True},
    ),
}
# name -> (experts implementation of transformers, scheme). The first is what results are compared
# with; schemes come last, because quantizing replaces the weights.
IMPLEMENTATIONS = {
    "grouped_mm": ("grouped_mm", ""),
    "batched_mm": ("batched_mm", ""),
    "moe_ops": ("moe_ops", ""),
    "moe_ops fp8_block": ("moe_ops", "fp8_block"),
}
BUILT_IN = ("grouped_mm", "batched_mm")
# (model, implementation) -> batch of a decode step -> speed-up over transformers' best built-in in
# bf16
AIMS = {
    ("qwen3", "moe_ops"): {1: 1.15, 8: 1.25, 64: 1.25},
    ("qwen3", "moe_ops fp8_block"): {8: 1.6, 64: 1.6},
    ("mixtral", "moe_ops"): {1: 1.5, 8: 1.5},
    ("mixtral", "moe_ops fp8_block"): {1: 2.1, 8: 2.1},
}
# model -> speed-up of a prompt, in bf16; the one of Mixtral cannot pass 1.25 at the GPU's peak
PROMPT_AIMS = {"qwen3": 1.2, "mixtral": 1.07, "dsv3": 1.25, "gptoss": 1.0}
