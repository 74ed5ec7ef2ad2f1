"""Checkpoints of integers in int32 words: GPTQ, AWQ and compressed-tensors' pack-quantized; and
of its int-quantized, integers of 4 bits in int8.

Dimensions: N rows (outputs), K columns (inputs), g columns of one scale group. See `formats` for
what describe and convert are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_ops.integrations.checkpoints.common import (
    FLOATS,
    Config,
    Matrix,
    check_weights,
    require,
    scheme_of,
    shape_of,
    shown,
)
from moe_ops.integrations.checkpoints.packings import (
    AWQ_ORDER,
    octets,
    pack_nibbles,
    unpack_int32,
)
from moe_ops.schemes import SCHEMES, QuantScheme, get_scheme

_ACT_ORDER = (
    "{} must be off: with it neighbouring columns belong to different scale groups, so every row "
    "of activations would have to be permuted between the two projections; quantize again without "
    "it"
)


def group_variant(k: int, count: int, config_size: int | None, sizes: tuple[int, ...]) -> str:
    """The variant (":g128", ":channel") of an integer scheme, of K columns in ``count`` groups."""
    if count < 1 or k % count:
        raise ValueError(f"scales must divide {k} columns evenly, got {count} groups")
    size = k // count
    if config_size not in (None, -1, size):
        raise ValueError(
            f"scales must have one group for each {config_size} columns, the checkpoint's "
            f"group_size, got {count} groups in {k} columns"
        )
    if config_size in sizes or (config_size is None and size in sizes):
        return f":g{size}"
    if count == 1:
        return ":channel"
    raise ValueError(f"group_size must be one of {sizes} or a whole row, got {size}")


def describe_packed(t: dict, config: Config) -> Matrix:
    """pack-quantized: int32 words of 4 or 8 bits along the columns, values plus 2**(bits-1)."""
    args = config.get("weights") or {}
    bits = args.get("num_bits", 4)
    if bits not in (4, 8):
        raise ValueError(f"num_bits must be 4 or 8, got {bits}")
    if "weight_g_idx" in t or args.get("actorder") in ("group", "dynamic", True):
        raise ValueError(_ACT_ORDER.format("actorder"))
    check_weights(config, type=("int",), strategy=("group", "channel"))
    *batch, n, words = shape_of(t, "weight_packed", 2, 3)
    k = words * 32 // bits
    require(t, "weight_packed", (*batch, n, words), torch.int32)
    groups = shape_of(t, "weight_scale", 2, 3)[-1]
    require(t, "weight_scale", (*batch, n, groups), *FLOATS)
    size = args.get("group_size") if args.get("strategy", "group") == "group" else -1
    zp = ""
    if "weight_zero_point" in t:
        if args.get("symmetric"):
            raise ValueError(
                "weight_zero_point must be absent: the checkpoint says symmetric is True"
            )
        require(t, "weight_zero_point", (*batch, math.ceil(n * bits / 32), groups), torch.int32)
        zp = ":zp"
    elif args.get("symmetric") is False:
        raise ValueError("weight_zero_point must be there: the checkpoint says symmetric is False")
    name = f"int{bits}_w{bits}a16" + group_variant(k, groups, size, (32, 64, 128)) + zp
    name = scheme_of(t, config, {"": name}, f"packed {bits}-bit weights", default="")
    return Matrix(name, n, k, tuple(batch))


def convert_packed(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    bits = (config.get("weights") or {}).get("num_bits", 4)
    zero = t.get("weight_zero_point")
    if zero is not None:  # the last word may hold rows that are not there
        zero = unpack_int32(zero, bits, -2)[..., : t["weight_packed"].shape[-2], :]
    return _integers(octets(t["weight_packed"], -1), zero, t["weight_scale"], bits)


def is_unpacked(t: dict, config: Config) -> bool:
    """Whether int8 elements are integers of 4 bits, as the configuration says."""
    bits = (config.get("weights") or {}).get("num_bits")
    return t["weight"].dtype == torch.int8 and bits == 4


def describe_unpacked(t: dict, config: Config) -> Matrix:
    """int-quantized of 4 bits: int8 elements from -8 to 7, a scale for a group or a row."""
    check_weights(config, type=("int",), symmetric=(True,), strategy=("group", "channel"))
    *batch, n, k = shape_of(t, "weight", 2, 3)
    groups = shape_of(t, "weight_scale", 2, 3)[-1]
    require(t, "weight_scale", (*batch, n, groups), *FLOATS)
    args = config["weights"]
    size = args.get("group_size") if args.get("strategy", "group") == "group" else -1
    alone = "int4_w4a16" + group_variant(k, groups, size, (32, 64, 128))
    schemes = {"": alone}
    for rounded, like in (
        ("float8 token dynamic", "fp8_channel"),
        ("int8 token dynamic", "int8_w8a8"),
    ):
        scheme = QuantScheme(f"{alone} {like}", SCHEMES[alone].weight, SCHEMES[like].activation)
        schemes[rounded] = get_scheme(scheme).name
    name = scheme_of(t, config, schemes, "4-bit weights in int8", default="")
    return Matrix(name, n, k, tuple(batch))


def convert_unpacked(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    if "weight_zero_point" in t and t["weight_zero_point"].any():
        raise ValueError("weight_zero_point must be zero: the weights are said to be symmetric")
    low, high = t["weight"].aminmax()
    if low < -8 or high > 7:
        raise ValueError(f"weight must be in -8..7, integers of 4 bits, got {low}..{high}")
    codes = (t["weight"] + 8).view(torch.uint8)
    return _integers(pack_nibbles(codes), None, t["weight_scale"], 4)


def _integers(packed: Tensor, zero: Tensor | None, scale: Tensor, bits: int) -> dict[str, Tensor]:
    """Unsigned codes (N, K * bits / 8) and zero points (N, K/g), a byte each, as int4 or int8
    schemes keep them.
    """
    qdata = packed if bits == 4 else (packed ^ 128).view(torch.int8)
    parts = {"qdata": qdata, "scale": scale}
    if zero is not None:
        parts["zero_point"] = zero if bits == 4 else (zero ^ 128).view(torch.int8)
    return parts


def describe_gptq(t: dict, config: Config) -> Matrix:
    """qweight (K * bits / 32, N): words along the columns; qzeros (K/g, N * bits / 32)."""
    bits = config.get("bits", 4)
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    if config.get("desc_act"):
        raise ValueError(_ACT_ORDER.format("desc_act (act-order)"))
    words, n = shape_of(t, "qweight", 2)
    k = words * 32 // bits
    groups = shape_of(t, "scales", 2)[0]
    variant = group_variant(k, groups, config.get("group_size"), (32, 64, 128))
    require(t, "qweight", (words, n), torch.int32)
    require(t, "scales", (groups, n), *FLOATS)
    require(t, "qzeros", (groups, n * bits // 32), torch.int32)
    if "g_idx" in t:
        require(t, "g_idx", (k,), torch.int32)
    zp = "" if config.get("sym") else ":zp"
    return Matrix(f"int{bits}_w{bits}a16{variant}{zp}", n, k)


def convert_gptq(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    bits = config.get("bits", 4)
    packed = octets(t["qweight"], -2)
    if "g_idx" in t:
        k, groups = t["g_idx"].shape[-1], t["scales"].shape[-2]
        expected = torch.arange(k, dtype=torch.int32, device=packed.device) // (k // groups)
        if not (t["g_idx"] == expected).all():
            raise ValueError(_ACT_ORDER.format("act-order (a g_idx that does not ascend)"))
    # files of the first version hold the zero point minus one, modulo 2**bits
    less = 0 if config.get("checkpoint_format", "gptq") == "gptq_v2" else 1
    middle = 2 ** (bits - 1) - less
    if config.get("sym") and (octets(t["qzeros"], -1) == middle * (17 if bits == 4 else 1)).all():
        return _integers(packed, None, t["scales"].mT, bits)
    zero = (unpack_int32(t["qzeros"], bits, -1).mT + less) & (2**bits - 1)
    if config.get("sym"):
        _check_symmetric(zero, bits, "sym=True says", "; is its checkpoint_format right?")
    return _integers(packed, zero, t["scales"].mT, bits)


def _check_symmetric(zero: Tensor, bits: int, said: str, hint: str = "") -> None:
    if not bool((zero == 2 ** (bits - 1)).all()):
        raise ValueError(
            f"qzeros must be {2 ** (bits - 1)} everywhere, as the checkpoint's {said}, got "
            f"{zero.unique().tolist()[:8]}{hint}"
        )


def describe_awq(t: dict, config: Config) -> Matrix:
    """qweight (K, N/8) and qzeros (K/g, N/8): words along the rows' dimension, in AWQ's order."""
    bits = config.get("bits", config.get("w_bit", 4))
    version = str(config.get("version", "gemm")).lower()
    if bits != 4:
        raise ValueError(f"bits must be 4 for AWQ, got {bits}")
    if version != "gemm":
        raise ValueError(f"version must be 'gemm', whose packing is known, got {shown(version)}")
    k, words = shape_of(t, "qweight", 2)
    n = words * 8
    groups = shape_of(t, "scales", 2)[0]
    require(t, "qweight", (k, words), torch.int32)
    require(t, "scales", (groups, n), *FLOATS)
    require(t, "qzeros", (groups, words), torch.int32)
    size = config.get("group_size", config.get("q_group_size"))
    zp = "" if config.get("zero_point") is False else ":zp"
    return Matrix("int4_w4a16" + group_variant(k, groups, size, (32, 64, 128)) + zp, n, k)


def convert_awq(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    packed = pack_nibbles(unpack_int32(t["qweight"], 4, -1, AWQ_ORDER).mT)
    zero = unpack_int32(t["qzeros"], 4, -1, AWQ_ORDER).mT
    if config.get("zero_point") is False:
        _check_symmetric(zero, 4, "zero_point=False says")
        return _integers(packed, None, t["scales"].mT, 4)
    return _integers(packed, zero, t["scales"].mT, 4)


def describe_int_words(t: dict, config: Config) -> Matrix:
    return (describe_awq if _is_awq(t, config) else describe_gptq)(t, config)


def convert_int_words(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    return (convert_awq if _is_awq(t, config) else convert_gptq)(t, config)


def _is_awq(t: dict, config: Config) -> bool:
    """The two share their names; AWQ packs qweight along the rows, GPTQ along the columns."""
    method = config.get("quant_method")
    if method in ("gptq", "awq"):
        return method == "awq"
    columns, rows = (shape_of(t, role, 2, 3)[-1] for role in ("qweight", "scales"))
    return "g_idx" not in t and columns * 8 == rows
