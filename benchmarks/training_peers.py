"""What training.py times: this library's layer, and those that train beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sonicmoe_layer
import torch
from torch import Tensor
from training_cases import ADAPTED, Case, Inputs, Layer

import moe_ops
from moe_ops.bench import layers

Maker = Callable[[Case, Inputs], Layer]


def ours(recompute: bool = False) -> Maker:
    def make(case: Case, inputs: Inputs) -> Layer:
        activation = "swigluoai" if case.biased else "silu"

        def layer(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            return moe_ops.fused_experts(
                *(x, w13, w2, weights, ids),
                activation=activation,
                w13_bias=inputs.b13,
                w2_bias=inputs.b2,
                recompute=recompute,
                adapters=inputs.adapter,
            )

        return layer

    return make


def transformers_layer(case: Case, inputs: Inputs) -> Layer:
    """The experts of Qwen3-MoE, or of gpt-oss, as grouped_mm runs them."""
    if case.biased:
        return _gpt_oss(case, inputs)
    module: Any = layers.transformers_experts(case.sizes, inputs.w13, inputs.w2, "grouped_mm")
    module.gate_up_proj, module.down_proj = inputs.w13, inputs.w2

    def layer(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return module(x, ids, weights)

    def adapted(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        w13, w2 = inputs.merged(w13, w2)  # as PEFT's ParamWrapper
        named = {"gate_up_proj": w13, "down_proj": w2}
        return torch.func.functional_call(module, named, (x, ids, weights))

    return layer if inputs.adapter is None else adapted


def _gpt_oss(case: Case, inputs: Inputs) -> Layer:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    sizes = case.sizes
    config = GptOssConfig(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_local_experts=sizes.num_experts,
        num_experts_per_tok=sizes.top_k,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = GptOssExperts(config)

    def layer(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        named = {
            "gate_up_proj": w13.transpose(1, 2),
            "gate_up_proj_bias": inputs.b13,
            "down_proj": w2.transpose(1, 2),
            "down_proj_bias": inputs.b2,
        }
        return torch.func.functional_call(module, named, (x, ids, weights))

    return layer


def liger(case: Case, inputs: Inputs) -> Layer:
    """Liger, which tunes its kernels at the first number of tokens that it meets, over those of
    its configurations that few_configurations leaves."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    few_configurations()
    chosen = inputs.ids.int()

    def layer(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return LigerFusedMoEFunction.apply(x, w13, w2, chosen, weights)

    return layer


# 32 of the 200 that Liger 0.8.5 compiles for each shape, in minutes: the products with the widest
# tiles, and the sums with the widest rows.
_PRODUCTS = ((128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4), (128, 32, 4, 4))
_WEIGHTS = ((128, 128, 32, 8), (128, 128, 32, 4), (128, 64, 32, 4), (64, 128, 32, 4))
_SUMS = ((512, 8, 4), (512, 8, 8), (256, 8, 4), (256, 2, 4))


def few_configurations() -> None:
    """Leave Liger's autotuners the configurations above."""
    from liger_kernel.ops import fused_moe_kernels as kernels

    def kept(config: Any) -> bool:
        sizes, warps = config.kwargs, config.num_warps
        if "BLOCK_H" in sizes:
            return (sizes["BLOCK_H"], sizes["BLOCK_K"], warps) in _SUMS
        if "BLOCK_M" in sizes:
            block = (sizes["BLOCK_M"], sizes["BLOCK_N"], sizes["BLOCK_K"], warps)
            return block in _WEIGHTS
        return (sizes["BLOCK_N"], sizes["BLOCK_K"], warps, config.num_stages) in _PRODUCTS

    for kernel in vars(kernels).values():
        if hasattr(kernel, "configs"):
            kernel.configs = [config for config in kernel.configs if kept(config)]


def sonicmoe(tiles: int) -> Maker:
    """SonicMoE with its default tile, or with the best of several for each of its products."""

    def make(case: Case, inputs: Inputs) -> Layer:
        own = sonicmoe_layer.layer_of(
            inputs.ids, case.sizes.num_experts, sonicmoe_layer.TILES[:tiles]
        )

        def layer(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            return own(x, w13, w2, weights)

        return layer

    return make


def compiled(make: Maker) -> Maker:
    def make_compiled(case: Case, inputs: Inputs) -> Layer:
        torch._dynamo.reset()
        return torch.compile(make(case, inputs), fullgraph=True, dynamic=False)

    return make_compiled


IMPLEMENTATIONS: dict[str, Maker] = {
    "moe_ops": ours(),
    "moe_ops recompute": ours(recompute=True),
    "moe_ops compiled": compiled(ours()),
    "transformers": transformers_layer,
    "transformers compiled": compiled(transformers_layer),
    "liger": liger,
    "sonicmoe": sonicmoe(1),
    "sonicmoe tuned": sonicmoe(len(sonicmoe_layer.TILES)),
}
# of the distributions whose versions stand beside the numbers
DISTRIBUTIONS = ("liger-kernel", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl")


def takes(name: str, case: Case) -> bool:
    """Whether an implementation takes the layer of a case, and adapters of it."""
    if case.scheme:
        return name.startswith("moe_ops")
    if case.biased or case.trains in ADAPTED:
        return name.startswith(("moe_ops", "transformers"))
    return True
