"""Checkpoints of floating-point elements: fp8, NVFP4 and MXFP4.

Dimensions: N rows (outputs), K columns (inputs). See `formats` for what describe and convert are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_ops.integrations.checkpoints.common import (
    FLOATS,
    Config,
    Matrix,
    activations,
    require,
    shape_of,
)

# --- weight_scale_inv: DeepSeek, Qwen3-FP8 and transformers' own FP8 quantizer ----------------


def describe_scale_inv(t: dict, config: Config) -> Matrix:
    """e4m3 with a scale for each 128 x 128; e4m3 or pairs of e2m1 with e8m0 scales for each 32 of
    a row.
    """
    *batch, n, k = shape_of(t, "weight")
    is_fp4 = t["weight"].dtype == torch.int8
    k *= 2 if is_fp4 else 1
    powers_of_two = t["weight_scale_inv"].dtype in (torch.float8_e8m0fnu, torch.uint8)
    if is_fp4 or (powers_of_two and shape_of(t, "weight_scale_inv") == (*batch, n, k // 32)):
        e8m0 = torch.float8_e8m0fnu
        require(t, "weight_scale_inv", (*batch, n, k // 32), e8m0, torch.uint8)
        return Matrix("mxfp4_w4a8" if is_fp4 else "mxfp8", n, k, tuple(batch))
    block = tuple(config.get("weight_block_size") or (128, 128))
    if block != (128, 128):
        raise ValueError(f"weight_block_size must be (128, 128), got {block}")
    if config.get("activation_scheme", "dynamic") != "dynamic":
        raise ValueError(
            f"activation_scheme must be 'dynamic', got {config['activation_scheme']!r}"
        )
    shape = (*batch, math.ceil(n / 128), math.ceil(k / 128))
    require(t, "weight_scale_inv", shape, *FLOATS, torch.float8_e8m0fnu, torch.uint8)
    powers_of_two = powers_of_two or config.get("scale_fmt") == "ue8m0"
    return Matrix("fp8_block:ue8m0" if powers_of_two else "fp8_block", n, k, tuple(batch))


def convert_scale_inv(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    scale = t["weight_scale_inv"]
    if not describe_scale_inv(t, config).scheme.startswith("fp8_block"):
        weight = t["weight"]
        weight = weight.view(torch.uint8) if weight.dtype == torch.int8 else weight
        return {"qdata": weight, "scale": scale.view(torch.uint8)}
    scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
    return {"qdata": t["weight"], "scale": scale.float()}


# --- compressed-tensors, and ModelOpt's fp8 --------------------------------------------------


def describe_scaled(t: dict, config: Config) -> Matrix:
    """float-quantized (e4m3), int-quantized (int8): one scale a row, of fp8 also for a matrix."""
    *batch, n, k = shape_of(t, "weight")
    acts = activations(config, {"dynamic": "input_scale" not in t})
    static = acts is not None and acts.get("dynamic") is False
    if t["weight"].dtype == torch.int8:
        require(t, "weight_scale", (*batch, n, 1), *FLOATS)
        if "weight_zero_point" in t:
            raise ValueError("weight_zero_point must be absent: int8_w8a8 is symmetric")
        name = "int8_w8a16:channel" if acts is None else "int8_w8a8"
        return Matrix(f"{name}_static" if static else name, n, k, tuple(batch))
    require(t, "weight", (*batch, n, k), torch.float8_e4m3fn)
    scale = shape_of(t, "weight_scale")
    if scale == (*batch, math.ceil(n / 128), math.ceil(k / 128)) and min(n, k) > 128:
        return Matrix("fp8_w8a16:block" if acts is None else "fp8_block", n, k, tuple(batch))
    if scale == (*batch, n, 1):
        name = "fp8_channel"
        if acts is not None and (static or acts.get("strategy") == "tensor"):
            name = "fp8_channel_tensor_static" if static else "fp8_channel_tensor"
        return Matrix("fp8_w8a16:channel" if acts is None else name, n, k, tuple(batch))
    if math.prod(scale) == math.prod(batch):
        name = "fp8_tensor_static" if static else "fp8_tensor"
        return Matrix("fp8_w8a16:tensor" if acts is None else name, n, k, tuple(batch))
    raise ValueError(
        f"weight_scale must have one element, {(*batch, n, 1)}, or one element for each 128 x 128 "
        f"block, got {scale}"
    )


def convert_scaled(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    matrix = describe_scaled(t, config)
    scale = t["weight_scale"]
    if not matrix.scheme.startswith("int8_w8a16"):
        scale = scale.float()
    if matrix.scheme.startswith(("fp8_tensor", "fp8_w8a16:tensor")):
        scale = scale.reshape(matrix.batch)
    parts = {"qdata": t["weight"], "scale": scale}
    if matrix.scheme.endswith("static"):
        parts["activation_scale"] = t["input_scale"].float().amax()
    return parts


def describe_nvfp4(t: dict, config: Config) -> Matrix:
    qdata, global_scale = ("weight_packed", "weight_global_scale")
    if qdata not in t:
        qdata, global_scale = ("weight", "weight_scale_2")
    *batch, n, k = shape_of(t, qdata)
    k *= 2
    require(t, qdata, (*batch, n, k // 2), torch.uint8)
    require(t, "weight_scale", (*batch, n, k // 16), torch.float8_e4m3fn)
    if math.prod(shape_of(t, global_scale)) != math.prod(batch):
        raise ValueError(f"{global_scale} must have one element, got {shape_of(t, global_scale)}")
    if config.get("group_size", 16) not in (16, None):
        raise ValueError(f"group_size must be 16 for NVFP4, got {config['group_size']}")
    if "weight_packed" in t:
        quantized = activations(config, {} if "input_global_scale" in t else None) is not None
    else:
        quantized = "input_scale" in t
    return Matrix("nvfp4" if quantized else "nvfp4_w4a16", n, k, tuple(batch))


def convert_nvfp4(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    matrix = describe_nvfp4(t, config)
    if "weight_packed" in t:  # value = e2m1 * scale / global scale
        parts = {"qdata": t["weight_packed"], "scale": t["weight_scale"]}
        parts["global_scale"] = t["weight_global_scale"].float().reshape(matrix.batch)
        activation = t.get("input_global_scale")
        activation = None if activation is None else 1 / activation.float()
    else:  # value = e2m1 * scale * weight_scale_2
        parts = {"qdata": t["weight"], "scale": t["weight_scale"]}
        parts["global_scale"] = 1 / t["weight_scale_2"].float().reshape(matrix.batch)
        activation = t["input_scale"].float() if "input_scale" in t else None
    if matrix.scheme == "nvfp4" and activation is not None:
        parts["activation_scale"] = activation.amax()
    return parts


# --- mxfp4: gpt-oss, and compressed-tensors --------------------------------------------------


def describe_blocks(t: dict, config: Config) -> Matrix:
    *batch, n, groups, half = shape_of(t, "blocks")
    require(t, "blocks", (*batch, n, groups, 16), torch.uint8)
    require(t, "scales", (*batch, n, groups), torch.uint8)
    return Matrix("mxfp4_w4a16", n, groups * 32, tuple(batch))


def convert_blocks(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    return {"qdata": t["blocks"].flatten(-2), "scale": t["scales"]}


def describe_mxfp4(t: dict, config: Config) -> Matrix:
    *batch, n, half = shape_of(t, "weight_packed")
    k = half * 2
    require(t, "weight_packed", (*batch, n, half), torch.uint8)
    require(t, "weight_scale", (*batch, n, k // 32), torch.uint8, torch.float8_e8m0fnu)
    acts = activations(config)
    bits = None if acts is None else acts.get("num_bits")
    scheme = {None: "mxfp4_w4a16", 4: "mxfp4", 8: "mxfp4_mxfp8"}[bits]
    return Matrix(scheme, n, k, tuple(batch))


def convert_mxfp4(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    return {"qdata": t["weight_packed"], "scale": t["weight_scale"].view(torch.uint8)}
