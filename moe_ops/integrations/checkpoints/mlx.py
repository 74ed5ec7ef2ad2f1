"""Checkpoints of MLX: codes in uint32 words along the columns, the first in the lowest bits.

Dimensions: N rows (outputs), K columns (inputs), g columns of one scale group. See `formats` for
what describe and convert are.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from moe_ops.integrations.checkpoints.common import (
    FLOATS,
    MXFP8_ALONE,
    Config,
    Matrix,
    require,
    shape_of,
    shown,
)
from moe_ops.integrations.checkpoints.fields import INTEGER, TEXT, Family, Names, check_fields

# mode -> group_size and bits where nothing is said
MODES = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
_SCHEMES = {"mxfp4": "mxfp4_w4a16", "nvfp4": "nvfp4_w4a16", "mxfp8": MXFP8_ALONE}


def describe(t: dict, config: Config) -> Matrix:
    """Affine integers of 4 or 8 bits, value = code * scales + biases; e2m1 or e4m3 with e8m0
    scales of 32 columns, e2m1 with e4m3 scales of 16.
    """
    method = config.get("quant_method")
    if method is None:
        raise ValueError(
            "quantization of config.json must have group_size and bits of weights in uint32, "
            "which shapes do not tell, got no configuration"
        )
    if method != "mlx":
        raise ValueError(
            "quant_method must be absent beside weights in uint32 with scales, which are MLX's, "
            f"got {shown(method)}"
        )
    mode, size, bits = config["mode"], config["group_size"], config["bits"]
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}, got {shown(mode)}")
    affine = mode == "affine"
    known = [(g, b) for b in (4, 8) for g in (32, 64, 128)] if affine else [MODES[mode]]
    if (size, bits) not in known:
        must = "32, 64 or 128 and 4 or 8" if affine else f"{known[0][0]} and {known[0][1]}"
        raise ValueError(
            f"group_size and bits of mode {mode!r} must be {must}, got {size} and {bits}"
        )
    *batch, n, words = shape_of(t, "weight", 2, 3)
    k = words * 32 // bits
    groups = (*batch, n, k // size)
    if k % size:
        raise ValueError(f"weight must have whole groups of {size} columns, got {k} columns")
    require(t, "scales", groups, *(FLOATS if affine else (torch.uint8,)))
    if affine != ("biases" in t):
        raise ValueError(f"biases must be {'there' if affine else 'absent'} in mode {mode!r}")
    if not affine:
        return Matrix(_SCHEMES[mode], n, k, tuple(batch))
    require(t, "biases", groups, t["scales"].dtype)
    return Matrix(f"int{bits}_w{bits}a16:g{size}:min", n, k, tuple(batch))


def convert(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    matrix = describe(t, config)
    octets = t["weight"].contiguous().view(torch.uint8)  # little endian: low bits first
    if matrix.scheme.startswith("int"):
        is_int8 = matrix.scheme.startswith("int8")
        codes = (octets ^ 128).view(torch.int8) if is_int8 else octets
        return {"qdata": codes, "scale": t["scales"], "zero_point": t["biases"]}
    parts = {"qdata": octets, "scale": t["scales"]}
    if config["mode"] == "mxfp8":
        parts["qdata"] = octets.view(torch.float8_e4m3fn)
    if config["mode"] == "nvfp4":
        parts["scale"] = t["scales"].view(torch.float8_e4m3fn)
        parts["global_scale"] = torch.ones(matrix.batch, device=octets.device)
    return parts


def _mlx(config: Config, names: Names) -> Config:
    """The fields of all matrices, or those of a module that a field is named after, of which MLX
    takes the mode's defaults where they are missing.
    """
    own = config.get(names[0])
    if own is not None and (not own or not isinstance(own, (dict, bool))):
        raise ValueError(
            f"{names[0]} of quantization must be true or its fields, as its tensors are "
            f"quantized, got {shown(own)}"
        )
    if isinstance(own, dict):
        check_fields(own, _OF_ONE, f"quantization[{names[0]!r}]")
        config = own
    mode = config.get("mode") or "affine"
    size, bits = MODES.get(mode, (None, None))
    size, bits = config.get("group_size") or size, config.get("bits") or bits
    return {"quant_method": "mlx", "mode": mode, "group_size": size, "bits": bits}


_OF_ONE = Family(used={"mode": TEXT, "group_size": INTEGER, "bits": INTEGER}, silent="")
MLX = dataclasses.replace(_OF_ONE, modules=True, resolve=_mlx)
