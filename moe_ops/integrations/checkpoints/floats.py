"""Checkpoints of floating-point elements: fp8, NVFP4 and MXFP4.

Dimensions: N rows (outputs), K columns (inputs). See `formats` for what describe and convert are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_ops.integrations.checkpoints.common import (
    FLOATS,
    MXFP8_ALONE,
    VALUES_ONLY,
    Config,
    Matrix,
    check_weights,
    require,
    require_numbers,
    scheme_of,
    shape_of,
    shown,
)

# --- weight_scale_inv: what transformers' own FP8 quantizer writes, and others before it -----


def describe_scale_inv(t: dict, config: Config) -> Matrix:
    """e4m3 with a scale for each 128 x 128; e4m3 or pairs of e2m1 with e8m0 scales for each 32 of
    a row.
    """
    *batch, n, k = shape_of(t, "weight", 2, 3)
    is_fp4 = t["weight"].dtype == torch.int8
    k *= 2 if is_fp4 else 1
    if config.get("activation_scheme", "dynamic") != "dynamic":
        raise ValueError(
            f"activation_scheme must be 'dynamic', got {shown(config['activation_scheme'])}"
        )
    powers_of_two = t["weight_scale_inv"].dtype in (torch.float8_e8m0fnu, torch.uint8)
    if is_fp4 or (powers_of_two and shape_of(t, "weight_scale_inv") == (*batch, n, k // 32)):
        e8m0 = torch.float8_e8m0fnu
        require(t, "weight_scale_inv", (*batch, n, k // 32), e8m0, torch.uint8)
        return Matrix("mxfp4_w4a8" if is_fp4 else "mxfp8", n, k, tuple(batch))
    block = tuple(config.get("weight_block_size") or (128, 128))
    if block != (128, 128):
        raise ValueError(f"weight_block_size must be (128, 128), got {block}")
    shape = (*batch, math.ceil(n / 128), math.ceil(k / 128))
    require(t, "weight_scale_inv", shape, *FLOATS, torch.float8_e8m0fnu, torch.uint8)
    if not config.get(VALUES_ONLY):  # how activations are rounded does not matter to these
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

# what shares a weight's scale -> how activations are quantized -> scheme
_FP8 = {
    "tensor": {
        "": "fp8_w8a16:tensor",
        "float8 tensor dynamic": "fp8_tensor",
        "float8 tensor static": "fp8_tensor_static",
        "float8 token dynamic": "fp8_channel",  # the scale of a matrix is that of each row
    },
    "channel": {
        "": "fp8_w8a16:channel",
        "float8 tensor dynamic": "fp8_channel_tensor",
        "float8 tensor static": "fp8_channel_tensor_static",
        "float8 token dynamic": "fp8_channel",
    },
    "block": {"": "fp8_w8a16:block", "float8 group128 dynamic": "fp8_block"},
    "group": {"float8 group32 dynamic": "mxfp8", "": MXFP8_ALONE},
}
_INT8 = {
    "": "int8_w8a16:channel",
    "int8 token dynamic": "int8_w8a8",
    "int8 tensor dynamic": "int8_w8a8_tensor",
    "int8 tensor static": "int8_w8a8_static",
}
_INT8_SCALES = {"tensor": _INT8, "channel": _INT8}
_NATURAL = {"tensor": "tensor", "channel": "token", "block": "group128", "group": "group32"}


def describe_scaled(t: dict, config: Config) -> Matrix:
    """float-quantized (e4m3), int-quantized (int8): a scale for a row, a matrix, a 128 x 128 block
    of fp8 or 32 elements of a row (e8m0).
    """
    *batch, n, k = shape_of(t, "weight", 2, 3)
    element, schemes = ("int8", _INT8_SCALES) if _is_int8(t) else ("float8", _FP8)
    shared = _shared_by(t, config)
    if shared not in schemes:
        raise ValueError(
            f"weight_scale must have one element, {(*batch, n, 1)} or, of fp8, one for each "
            f"128 x 128 block or, in e8m0, for each 32 of a row, got "
            f"{shape_of(t, 'weight_scale')} {t['weight_scale'].dtype}"
        )
    # ModelOpt leaves stacks as the model has them, and calls an expert a channel
    of_modelopt = str(config.get("quant_method")).lower().startswith("modelopt")
    as_model = of_modelopt and bool(batch) and (element, shared) == ("float8", "tensor")
    check_weights(
        config,
        type=(element[:-1],),
        num_bits=(8,),
        symmetric=(True,),
        strategy=(shared, "channel") if as_model else (shared,),
        block_structure=([128, 128], (128, 128), "128x128"),
        group_size=(-1,) if shared != "group" else (32,),
    )
    scheme = config.get("activation_scheme")
    static = "input_scale" in t if scheme is None else scheme == "static"
    natural = "token" if element == "int8" else _NATURAL[shared]
    default = f"{element} tensor static" if static else f"{element} {natural} dynamic"
    name = scheme_of(
        t,
        config,
        schemes[shared],
        f"{element} weights with a scale for a {shared}",
        default=default,
        input_scale="input_scale",
    )
    return Matrix(name, n, k, tuple(batch), as_model)


def _is_int8(t: dict) -> bool:
    return t["weight"].dtype == torch.int8


def _shared_by(t: dict, config: Config) -> str:
    """The kind of group that shares a scale, by shape and dtype; "" for an illegal shape."""
    *batch, n, k = shape_of(t, "weight", 2, 3)
    scale = shape_of(t, "weight_scale")
    if t["weight_scale"].dtype in (torch.float8_e8m0fnu, torch.uint8):
        return "group" if scale == (*batch, n, k // 32) and k % 32 == 0 else ""
    if t["weight_scale"].dtype not in FLOATS:
        return ""
    rows, columns = math.ceil(n / 128), math.ceil(k / 128)
    said = (config.get("weights") or {}).get("strategy")
    is_block = min(n, k) > 128 or said == "block"
    blocks = [(*batch, rows, columns), (*batch, rows, 1, columns, 1)]
    if rows == columns == 1:  # ModelOpt leaves the dimensions out for some matrices
        blocks.append(tuple(batch))
    if scale in blocks and is_block:
        return "block"
    if scale in ((*batch, n, 1), (*batch, n)) and (n, said) != (1, "tensor"):
        return "channel"
    return "tensor" if math.prod(scale) in (1, math.prod(batch)) else ""


def convert_scaled(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    matrix = describe_scaled(t, config)
    if "weight_zero_point" in t and t["weight_zero_point"].float().any():
        raise ValueError("weight_zero_point must be zero: fp8 and int8 schemes are symmetric")
    scale = t["weight_scale"]
    if matrix.scheme in ("mxfp8", MXFP8_ALONE):
        return {"qdata": t["weight"], "scale": scale.view(torch.uint8)}
    if not matrix.scheme.startswith("int8_w8a16"):
        scale = scale.float()
    if _shared_by(t, config) == "tensor":
        scale = scale.flatten().expand(math.prod(matrix.batch)).reshape(matrix.batch)
    elif _shared_by(t, config) == "channel":
        scale = scale.reshape(*matrix.batch, matrix.rows, 1)
    elif _shared_by(t, config) == "block":
        rows, columns = math.ceil(matrix.rows / 128), math.ceil(matrix.columns / 128)
        scale = scale.reshape(*matrix.batch, rows, columns)
    return {"qdata": t["weight"], "scale": scale}


def describe_torchao(t: dict, config: Config) -> Matrix:
    """torchao's Int8Tensor and Float8Tensor: as `describe_scaled`, read for their values alone.

    What they do with activations stands in the file's metadata, in words of torchao's own.
    """
    if not config.get(VALUES_ONLY):
        raise ValueError(
            "quantized experts must not be torchao's, whose use of activations moe_ops does not "
            "read; load the plain checkpoint with MoeOpsConfig(scheme)"
        )
    return describe_scaled(_of_torchao(t), config)


def convert_torchao(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    return convert_scaled(_of_torchao(t), config)


def _of_torchao(t: dict) -> dict:
    return {role.removeprefix("_").removesuffix("_qdata"): tensor for role, tensor in t.items()}


_NVFP4 = {
    "": "nvfp4_w4a16",
    "float4 tensor_group16 local": "nvfp4",
    "float4 group16 static": "nvfp4",  # ModelOpt's words for it
    "float4 tensor_group16 dynamic": "nvfp4",
}


GLOBAL_SCALES = ("weight_global_scale", "weight_scale_2")  # of a matrix; the second multiplies


def describe_nvfp4(t: dict, config: Config) -> Matrix:
    names = ("weight_packed", "weight_global_scale", "input_global_scale")
    if "weight_packed" not in t:
        names = ("weight", "weight_scale_2", "input_scale")
    qdata, global_scale, input_scale = names
    *batch, n, k = shape_of(t, qdata, 2, 3)
    if _columns_first(t, qdata):
        n, k = k, n
        require(t, qdata, (*batch, k, n), torch.uint8)
        require(t, "weight_scale", (*batch, k // 8, n), torch.float8_e4m3fn)
    else:
        require(t, qdata, (*batch, n, k), torch.uint8)
        require(t, "weight_scale", (*batch, n, k // 8), torch.float8_e4m3fn)
    k *= 2
    require_numbers(t, global_scale, math.prod(batch))
    strategies = ("tensor_group", "group")
    check_weights(config, type=("float",), num_bits=(4,), symmetric=(True,), group_size=(16,))
    check_weights(config, strategy=strategies)
    name = scheme_of(
        t,
        config,
        _NVFP4,
        "NVFP4 weights",
        default="float4 tensor_group16 local" if input_scale in t else "",
        input_scale=input_scale,
    )
    return Matrix(name, n, k, tuple(batch))


def convert_nvfp4(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    matrix = describe_nvfp4(t, config)
    if _columns_first(t, "weight_packed" if "weight_packed" in t else "weight"):
        turned = {"weight", "weight_packed", "weight_scale"}
        t = {r: x.transpose(1, 2).contiguous() if r in turned else x for r, x in t.items()}
    if "weight_packed" in t:  # value = e2m1 * scale / global scale
        parts = {"qdata": t["weight_packed"], "scale": t["weight_scale"]}
        scale = t["weight_global_scale"].float()
    else:  # value = e2m1 * scale * weight_scale_2
        parts = {"qdata": t["weight"], "scale": t["weight_scale"]}
        scale = 1 / t["weight_scale_2"].float()
    parts["global_scale"] = scale.flatten().expand(math.prod(matrix.batch)).reshape(matrix.batch)
    return parts


def _columns_first(t: dict, qdata: str) -> bool:
    """Whether a stack lies as (E, K/2, N), as ModelOpt leaves some: neighbours of a column share
    a byte.
    """
    *batch, rows, columns = shape_of(t, qdata, 2, 3)
    return bool(batch) and shape_of(t, "weight_scale") == (*batch, rows // 8, columns)


# --- static scales of activations, of which all experts share one ------------------------------

ACTIVATION_SCALES = ("input_scale", "input_global_scale")


def activation_scale(role: str, value: Tensor) -> Tensor:
    """The largest of the scales in one of these tensors, () fp32; global scales divide."""
    value = value.float()
    return (1 / value if role == "input_global_scale" else value).amax()


# --- mxfp4: blocks, and compressed-tensors ---------------------------------------------------


def describe_blocks(t: dict, config: Config) -> Matrix:
    *batch, n, groups, half = shape_of(t, "blocks", 3, 4)
    require(t, "blocks", (*batch, n, groups, 16), torch.uint8)
    require(t, "scales", (*batch, n, groups), torch.uint8)
    return Matrix("mxfp4_w4a16", n, groups * 32, tuple(batch))


def convert_blocks(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    return {"qdata": t["blocks"].flatten(-2), "scale": t["scales"]}


_MXFP4 = {
    "": "mxfp4_w4a16",
    "float4 group32 dynamic": "mxfp4",
    "float8 group32 dynamic": "mxfp4_mxfp8",
    "float8 group128 dynamic": "mxfp4_w4a8",
}


def describe_mxfp4(t: dict, config: Config) -> Matrix:
    *batch, n, half = shape_of(t, "weight_packed", 2, 3)
    k = half * 2
    require(t, "weight_packed", (*batch, n, half), torch.uint8)
    require(t, "weight_scale", (*batch, n, k // 32), torch.uint8, torch.float8_e8m0fnu)
    for role in ("weight_zero_point", "weight_g_idx"):
        if role in t:
            raise ValueError(f"{role} must be absent: MXFP4 is symmetric and in ascending order")
    check_weights(config, type=("float",), num_bits=(4,), symmetric=(True,), group_size=(32,))
    scheme = scheme_of(t, config, _MXFP4, "MXFP4 weights", default="")
    return Matrix(scheme, n, k, tuple(batch))


def describe_modelopt_mxfp4(t: dict, config: Config) -> Matrix:
    return describe_mxfp4(t | {"weight_packed": t["weight"]}, config)


def convert_modelopt_mxfp4(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    return convert_mxfp4(t | {"weight_packed": t["weight"]}, config)


def convert_mxfp4(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    return {"qdata": t["weight_packed"], "scale": t["weight_scale"].view(torch.uint8)}
