"""What the routers of transformers' models compute, in the words of `moe_ops.route`.

A router is one of ours only if its formula is (`RULES`, keyed by the forward that a module's class
really uses, so that an overridden forward is never mistaken for the one it replaces).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.integrations.transformers.activations import HfModule


class Rule(NamedTuple):
    """What a router computes; its ids are int64."""

    method: str
    logits: torch.dtype  # in which the linear layer computes
    weights: torch.dtype = torch.float32  # of the routing weights returned
    options: dict[str, Any] = {}  # keyword arguments of `route`
    returned: torch.dtype | None = None  # of the logits returned, if it is another
    flattens: bool = True  # takes (..., H)
    top_k: int = 0  # where the module has none of its own
    inputs: Callable[[HfModule, Tensor], Tensor] | None = None  # what the linear layer multiplies
    outputs: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None  # (module, logits, ...)
    learned: tuple[Tensor, ...] = ()  # parameters beside those of the linear layer


FindRule = Callable[
    ..., Rule | None
]  # of (module, hidden_states, further arguments of its forward)


def _mixtral(module: HfModule, x: Tensor) -> Rule:
    return Rule("renormalize", x.dtype)


def _qwen2(module: HfModule, x: Tensor) -> Rule:
    return Rule("renormalize" if module.norm_topk_prob else "default", x.dtype, x.dtype)


def _lara_mini(module: HfModule, x: Tensor) -> Rule:
    method = "renormalize" if module.norm_topk_prob else "default"
    return Rule(method, torch.float32, x.dtype)


def _qwen3_vl(module: HfModule, x: Tensor) -> Rule:
    return Rule("renormalize", x.dtype, x.dtype)


def _granite(module: HfModule, x: Tensor) -> Rule:
    return Rule("renormalize", x.dtype, x.dtype, returned=torch.float32, flattens=False)


def _gpt_oss(module: HfModule, x: Tensor) -> Rule:
    return Rule("renormalize", x.dtype, x.dtype, flattens=False)


def _privacy_filter(module: HfModule, x: Tensor) -> Rule:
    options = {"scaling_factor": 1 / module.top_k}
    return Rule("renormalize", torch.float32, options=options, flattens=False)


def _jamba(module: HfModule, x: Tensor) -> Rule:
    return Rule("default", x.dtype, x.dtype, flattens=False)


def _cohere2(module: HfModule, x: Tensor) -> Rule | None:
    if module.expert_selection_fn != "softmax":  # a sigmoid is rounded before it is divided
        return None
    return Rule("renormalize", x.dtype, x.dtype, flattens=False)


def _flint(module: HfModule, x: Tensor) -> Rule:
    return Rule("sigmoid_renormalize" if module.norm_topk_prob else "sigmoid", torch.float32)


def _deepseek_v2(module: HfModule, x: Tensor) -> Rule | None:
    options = {"scaling_factor": module.routed_scaling_factor}
    if module.topk_method == "greedy":
        return Rule("default", torch.float32, options=options)
    if module.topk_method != "group_limited_greedy":
        return None
    options |= {"num_expert_groups": module.num_group, "topk_groups": module.topk_group}
    return Rule("grouped_softmax", torch.float32, options=options)


def _deepseek_v3(module: HfModule, x: Tensor) -> Rule:
    options = {"correction_bias": module.e_score_correction_bias}
    options |= {"scaling_factor": getattr(module, "routed_scaling_factor", 1.0)}  # beam has none
    if module.num_group > 1:
        options |= {"num_expert_groups": module.num_group, "topk_groups": module.topk_group}
    method = "deepseek_v3" if module.norm_topk_prob else "sigmoid"
    return Rule(method, torch.float32, options=options)


def _hy_v3(module: HfModule, x: Tensor, e_score_correction_bias: Tensor) -> Rule:
    options = {"correction_bias": e_score_correction_bias}
    options |= {"scaling_factor": module.router_scaling_factor}
    return Rule("deepseek_v3", torch.float32, options=options)


def _minimax_m2(module: HfModule, x: Tensor, e_score_correction_bias: Tensor) -> Rule:
    options = {"correction_bias": e_score_correction_bias}
    return Rule("deepseek_v3", module.weight.dtype, options=options)


def _minimax_m3(module: HfModule, x: Tensor) -> Rule:
    return _minimax_m2(module, x, module.e_score_correction_bias)


def _afmoe(module: HfModule, x: Tensor, expert_bias: Tensor) -> Rule:
    options = {"correction_bias": expert_bias, "scaling_factor": module.route_scale}
    return Rule("deepseek_v3", x.dtype, options=options, returned=torch.float32)


def _axk2(module: HfModule, x: Tensor) -> Rule | None:
    if (module.num_group or 1) > 1:  # experts outside of the best groups count as zero there
        return None
    options = {"correction_bias": module.e_score_correction_bias}
    options |= {"scaling_factor": module.routed_scaling_factor}
    return Rule(
        "deepseek_v3" if module.norm_topk_prob else "sigmoid", torch.float32, options=options
    )


def _deepseek_v4(module: HfModule, x: Tensor) -> Rule | None:
    name = type(module.score_fn).__name__
    method = {"SqrtSoftplusActivation": "sqrtsoftplus", "Sigmoid": "deepseek_v3"}.get(name)
    if method is None or x.dtype != torch.float32:  # scores are rounded before they are compared
        return None
    options = {"correction_bias": module.e_score_correction_bias}
    options |= {"scaling_factor": module.routed_scaling_factor}
    return Rule(method, torch.float32, options=options)


def _inkling2(module: HfModule, x: Tensor) -> Rule | None:
    return _deepseek_v4(module, x.float())


def _ernie4_5(module: HfModule, x: Tensor) -> Rule:
    options = {"correction_bias": module.moe_statics.e_score_correction_bias.flatten()}
    return Rule("renormalize_naive", torch.float32, x.dtype, options, flattens=False)


def _gemma4(module: HfModule, x: Tensor) -> Rule:
    return Rule(
        "renormalize",
        x.dtype,
        flattens=False,
        top_k=module.config.top_k_experts,
        inputs=_gemma4_inputs,
        outputs=_gemma4_outputs,
        learned=(module.scale, module.per_expert_scale),
    )


def _gemma4_inputs(module: HfModule, x: Tensor) -> Tensor:
    return module.norm(x) * module.scale * module.scalar_root_size


def _gemma4_outputs(
    module: HfModule, logits: Tensor, weights: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    probabilities = torch.softmax(logits, -1, dtype=torch.float32)
    return probabilities, weights * module.per_expert_scale[ids], ids


def _hunyuan(module: HfModule, x: Tensor) -> Rule:
    dtype = module.wg.weight.dtype
    return Rule("renormalize", dtype, dtype)


def _laguna(module: HfModule, x: Tensor) -> Rule | None:
    if module.router_logit_softcapping > 0:
        return None
    options = {"correction_bias": module.e_score_correction_bias}
    return Rule("deepseek_v3", x.dtype, x.dtype, options, returned=torch.float32)


def _longcat(module: HfModule, x: Tensor) -> Rule | None:
    if module.classifier.bias is not None:  # which its own forward leaves out
        return None
    options = {"correction_bias": module.e_score_correction_bias}
    options |= {"scaling_factor": module.routed_scaling_factor}
    return Rule("default", torch.float32, options=options)


def _mistral4(module: HfModule, x: Tensor) -> Rule | None:
    if x.dtype != torch.float32:  # scores are rounded before they are compared
        return None
    method = "renormalize_naive" if module.norm_topk_prob else "default"
    return Rule(method, torch.float32, options=_mistral4_options(module))


def _mistral_large4(module: HfModule, x: Tensor) -> Rule:
    return Rule("renormalize_naive", torch.float32, options=_mistral4_options(module))


def _mistral4_options(module: HfModule) -> dict[str, Any]:
    options = {"scaling_factor": module.routed_scaling_factor}
    if module.num_group > 1:
        # with a bias, a group is worth the sum of its two best scores, as it is there
        zeros = module.weight.new_zeros(module.weight.shape[0], dtype=torch.float32)
        options |= {"num_expert_groups": module.num_group, "topk_groups": module.topk_group}
        options |= {"correction_bias": zeros}
    return options


_ROUTERS: dict[FindRule, str] = {
    _mixtral: "MixtralTopKRouter MiniMaxTopKRouter",
    _qwen2: "FlexOlmoTopKRouter MellumTopKRouter OlmoeTopKRouter Qwen2MoeTopKRouter "
    "Qwen3MoeTopKRouter Qwen3NextTopKRouter Qwen3OmniMoeThinkerTextTopKRouter "
    "Qwen3OmniMoeTalkerTextTopKRouter Qwen4ExpTextTopKRouter",
    _lara_mini: "LaraMiniTopKRouter",
    _qwen3_vl: "Qwen3_5MoeTopKRouter Qwen3OmniMoeTextTopKRouter Qwen3VLMoeTextTopKRouter",
    # before 5.23 most of these return their ids first, which the check notices
    _granite: "GraniteMoeTopKRouter GraniteMoeSWATopKRouter GraniteMoeHybridTopKRouter "
    "GraniteMoeSharedTopKRouter",
    _gpt_oss: "GptOssTopKRouter AriaTextTopKRouter",
    _privacy_filter: "OpenAIPrivacyFilterTopKRouter",
    _jamba: "JambaTopKRouter",
    _cohere2: "Cohere2MoeTopKRouter",
    _flint: "FlintTopKRouter",
    _deepseek_v2: "DeepseekV2TopkRouter DeepseekOcr2TextTopkRouter UnlimitedOcrTextTopkRouter",
    _deepseek_v3: "AXK1TopkRouter BailingHybridTopkRouter BeamTopKRouter DeepseekV3TopkRouter "
    "DeepseekV32TopkRouter Dots1TopkRouter Dots3NoteTextTopkRouter ExaoneMoeTopkRouter "
    "Glm4MoeTopkRouter Glm4MoeLiteTopkRouter Glm4vMoeTextTopkRouter Glm5NextTextTopkRouter "
    "GlmMoeDsaTopkRouter HYV4TopkRouter HYV4VLTopkRouter KimiLinearTopkRouter "
    "MiMoV2FlashTopkRouter NemotronHTopkRouter SolarOpenTopkRouter",
    _hy_v3: "HYV3TopKRouter Dots3NoteVisionTopKRouter",
    _minimax_m2: "MiniMaxM2TopKRouter",
    _minimax_m3: "MiniMaxM3VLTopKRouter Step3p7TopKRouter",
    _afmoe: "AfmoeTokenChoiceRouter",
    _axk2: "AXK2TopkRouter",
    _deepseek_v4: "DeepseekV4TopKRouter",
    _inkling2: "Inkling2TopKRouter Inkling2LoopTopKRouter",
    _ernie4_5: "Ernie4_5_MoeTopKRouter Ernie4_5_VLMoeMoeTopKRouter",
    _gemma4: "Gemma4TextRouter DiffusionGemmaTextRouter",
    _hunyuan: "HunYuanMoEV1Gate",
    _laguna: "LagunaTopKRouter",
    _longcat: "LongcatFlashTopkRouter",
    _mistral4: "Mistral4TopkRouter",
    _mistral_large4: "MistralLarge4TextTopkRouter",
}
# the linear layer in a router that is not one itself
LINEAR: dict[FindRule, str] = {
    _afmoe: "gate",
    _gemma4: "proj",
    _hunyuan: "wg",
    _longcat: "classifier",
}
TAKES_BIAS = (_hy_v3, _minimax_m2, _afmoe)  # called with the bias of the choice
# Routers that no method of `route` computes, and why.
NOT_COVERED = {
    "DbrxRouter": "it returns logits alone, and the block around it routes by them",
    "DeepseekV4HashRouter": "its experts come from a table of token ids, not from a top-k",
    "InklingTopkRouter": "shared experts take part in the division of the weights",
    "JetMoeTopKGating": "it sorts the tokens itself and reads their counts on the host",
    "Kolibri1TopKRouter": "its bias is added to the logits, before the sigmoid",
    "Lfm2MoeTopKRouter": "its sigmoids are rounded to the dtype of the logits before they are "
    "compared",
    "Llama4Router": "it returns a weight for every expert and no ids",
    "MuseSparkTopkRouter": "its logits are multiplied before the sigmoid",
    "NllbMoeTop2Router": "experts have a capacity, beyond which tokens are dropped",
    "PhimoeTopKRouter": "it masks logits by their distance from the best (SparseMixer)",
    "SwitchTransformersTop1Router": "experts have a capacity, beyond which tokens are dropped",
    "ZayaRouter": "its logits come from a network with a state, not from a linear layer",
}
RULES: dict[str, FindRule] = {
    f"{name}.forward": rule for rule, names in _ROUTERS.items() for name in names.split()
}
