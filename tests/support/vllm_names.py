"""The names of vLLM's fused_moe/config.py, and what they mean there, for docs/from_vllm.md.

Written down from its sources; nothing of vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace


def _names(text: str) -> list[str]:
    return text.split()


BUILDERS = _names("""
    FUSED_MOE_UNQUANTIZED_CONFIG biased_moe_quant_config fp8_w8a8_moe_quant_config
    fp8_w8a16_moe_quant_config int8_w8a8_moe_quant_config int8_w8a16_moe_quant_config
    int4_w4a16_moe_quant_config gptq_marlin_moe_quant_config int4_w4afp8_moe_quant_config
    mxfp4_w4a16_moe_quant_config mxfp4_w4a8_moe_quant_config mxfp4_mxfp8_moe_quant_config
    mxfp4_moe_quant_config ocp_mx_moe_quant_config nvfp4_moe_quant_config
    nvfp4_w4a16_moe_quant_config
""")
TENSORS = _names("""
    a1_scale a2_scale a1_gscale w1_scale w2_scale w1_zp w2_zp w1_bias w2_bias g1_alphas g2_alphas
    gemm1_alpha gemm1_beta gemm1_clamp_limit
""")
# FusedMoEQuantConfig's, beside its tensors and the predicates below
QUANTIZATION = _names("""
    quant_dtype weight_quant_dtype ocp_mx_scheme config_name scale_shape batched_scale_shape
    w1_precision w2_precision is_scale_swizzled mx_alignment
""")
PARALLEL = _names("""
    tp_size pcp_size dp_size ep_size tp_rank pcp_rank dp_rank ep_rank sp_size use_ep
    all2all_backend enable_eplb make make_no_parallel flatten_tp_across_dp_and_pcp
    needs_round_robin_routing_tables
""")
LAYER = _names("""
    num_experts experts_per_token hidden_dim intermediate_size num_local_experts
    num_logical_experts activation device routing_method moe_parallel_config in_dtype
    router_logits_dtype hidden_dim_unpadded intermediate_size_per_partition_unpadded
    intermediate_pad moe_backend max_num_tokens has_bias is_lora_enabled shared_expert_prefix
    skip_final_all_reduce
    defer_moe_finalize swiglu_limit swiglu_alpha swiglu_beta activation_situ_beta
    activation_situ_linear_beta max_capture_size intermediate_size_per_partition is_act_and_mul
    w13_num_shards
""")
ACTIVATIONS = _names("silu gelu swigluoai swiglustep silu_no_mul gelu_no_mul relu2_no_mul")
ROUTING = _names("""
    Default Renormalize DeepSeekV3 Llama4 RenormalizeNaive TopK SigmoidRenorm MiniMax2 Sigmoid
    Unspecified DeepseekV4 Custom Simulated
""")


@dataclass(frozen=True)
class Config:
    """What a FusedMoEQuantConfig says of a scheme: dtypes, and the groups that share a scale."""

    a: str | None
    w: str | None
    a_shape: object = None  # "tensor", "token", a block or None
    w_shape: object = None


# our scheme -> the configuration that vLLM's builder makes for it
CONFIGS = {
    "fp8_tensor": Config("fp8", "fp8", "tensor"),
    "fp8_tensor_static": Config("fp8", "fp8", "tensor"),
    "fp8_channel": Config("fp8", "fp8", "token", "token"),
    "fp8_block": Config("fp8", "fp8", (128, 128), (128, 128)),
    "fp8_w8a16:tensor": Config(None, "fp8"),
    "fp8_w8a16:channel": Config(None, "fp8"),
    "int8_w8a8_static": Config("int8", "int8", "tensor"),
    "int8_w8a16:channel": Config(None, "int8"),
    "int4_w4a16:channel": Config(None, "int4"),
    "mxfp4_w4a16": Config(None, "mxfp4"),
    "mxfp4_w4a8": Config("fp8 of its own", "mxfp4"),
    "mxfp4_mxfp8": Config("mxfp8", "mxfp4"),
    "mxfp4": Config("mxfp4", "mxfp4", "tensor"),
    "mxfp6_e3m2": Config("mxfp6_e3m2", "mxfp6_e3m2", "tensor"),
    "mxfp6_e2m3": Config("mxfp6_e2m3", "mxfp6_e2m3", "tensor"),
    "mxfp8": Config("mxfp8", "mxfp8", "tensor"),
    "nvfp4": Config("nvfp4", "nvfp4", "tensor"),
    "nvfp4_w4a16": Config(None, "nvfp4"),
}
# predicates of FusedMoEQuantConfig
PREDICATES = {
    "is_quantized": lambda c: c.a is not None,
    "is_per_act_token": lambda c: c.a_shape == "token",
    "per_act_token_quant": lambda c: c.a_shape == "token",
    "per_out_ch_quant": lambda c: c.w_shape == "token",
    "is_per_tensor": lambda c: c.a_shape == "tensor",
    "block_shape": lambda c: isinstance(c.a_shape, tuple),
    "is_block_quantized": lambda c: isinstance(c.a_shape, tuple),
    "use_fp8_w8a8": lambda c: c.a == "fp8",
    "use_int8_w8a8": lambda c: c.a == "int8",
    "use_int8_w8a16": lambda c: (c.a, c.w) == (None, "int8"),
    "use_fp8_w8a16": lambda c: (c.a, c.w) == (None, "fp8"),
    "use_int4_w4a16": lambda c: (c.a, c.w) == (None, "int4"),
    "use_nvfp4_w4a16": lambda c: (c.a, c.w) == (None, "nvfp4"),
    "use_nvfp4_w4a4": lambda c: c.a == "nvfp4",
    "use_mxfp4_w4a16": lambda c: (c.a, c.w) == (None, "mxfp4"),
    "use_mxfp4_w4a4": lambda c: (c.a, c.w) == ("mxfp4", "mxfp4"),
    "use_mxfp4_w4a8": lambda c: (c.a, c.w) == ("fp8 of its own", "mxfp4"),
}


def _dispatches(p: SimpleNamespace) -> bool:
    return p.use_ep and (p.dp_size > 1 or p.pcp_size > 1 or p.sp_size > 1)


def _uses(*backends: str) -> Callable[[SimpleNamespace], bool]:
    return lambda p: _dispatches(p) and p.all2all_backend in backends


# predicates of FusedMoEParallelConfig. "mori" was the name of both of its backends before.
PARALLEL_PREDICATES = {
    "is_sequence_parallel": lambda p: p.sp_size > 1,
    "use_all2all_kernels": _dispatches,
    "use_deepep_ht_kernels": _uses("deepep_high_throughput"),
    "use_deepep_ll_kernels": _uses("deepep_low_latency"),
    "use_deepep_v2_kernels": _uses("deepep_v2"),
    "use_ag_rs_all2all_kernels": _uses("allgather_reducescatter"),
    "use_fi_nvl_one_sided_kernels": _uses("flashinfer_nvlink_one_sided"),
    "use_fi_nvl_two_sided_kernels": _uses("flashinfer_nvlink_two_sided", "flashinfer_all2allv"),
    "use_mori_kernels": _uses("mori", "mori_high_throughput", "mori_low_latency"),
    "use_nixl_ep_kernels": _uses("nixl_ep"),
    "use_batched_activation_format": _uses("deepep_low_latency", "nixl_ep"),
}
