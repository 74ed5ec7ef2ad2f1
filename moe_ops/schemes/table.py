"""The named schemes, and their other names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from moe_ops.schemes.descriptions import (
    PER_BLOCK,
    PER_MX_BLOCK,
    PER_NV_BLOCK,
    PER_ROW,
    PER_TENSOR,
    PER_TOKEN_GROUP,
    GroupShape,
    QuantDesc,
)
from moe_ops.schemes.scheme import SCHEMES, QuantScheme


def _mx(dtype: str, rule: str = "ocp", static: bool = True) -> QuantDesc:
    e8m0 = torch.float8_e8m0fnu
    return QuantDesc(dtype, PER_MX_BLOCK, static, scale_dtype=e8m0, scale_rule=rule)


def _all_schemes() -> Iterator[tuple[str, QuantDesc | None, QuantDesc | None]]:
    """(name, weight, activation) of every scheme."""
    tensor, channel = QuantDesc("e4m3", PER_TENSOR), QuantDesc("e4m3", PER_ROW)
    block = QuantDesc("e4m3", PER_BLOCK)
    per_token = QuantDesc("e4m3", PER_ROW, static=False)
    per_token_group = QuantDesc("e4m3", PER_TOKEN_GROUP, static=False)
    yield "", None, None
    yield "fp8_tensor", tensor, QuantDesc("e4m3", PER_TENSOR, static=False)
    yield "fp8_tensor_static", tensor, QuantDesc("e4m3", PER_TENSOR)
    yield "fp8_channel", channel, per_token
    yield "fp8_channel_tensor", channel, QuantDesc("e4m3", PER_TENSOR, static=False)
    yield "fp8_channel_tensor_static", channel, QuantDesc("e4m3", PER_TENSOR)
    yield "fp8_block", block, per_token_group
    powers, of_tokens = [
        dataclasses.replace(desc, scale_rule="ceil") for desc in (block, per_token_group)
    ]
    yield "fp8_block:ue8m0", powers, of_tokens
    yield "fp8_w8a16:tensor", tensor, None
    yield "fp8_w8a16:channel", channel, None
    yield "fp8_w8a16:block", block, None

    int8 = QuantDesc("int8", PER_ROW)
    yield "int8_w8a8", int8, QuantDesc("int8", PER_ROW, static=False)
    yield "int8_w8a8_tensor", int8, QuantDesc("int8", PER_TENSOR, static=False)
    yield "int8_w8a8_static", int8, QuantDesc("int8", PER_TENSOR)
    for base, dtype in (("int8_w8a16", "int8"), ("int4_w4a16", "int4")):
        for suffix in ("", ":zp", ":min"):
            for name, cols in (("channel", -1), ("g32", 32), ("g64", 64), ("g128", 128)):
                desc = QuantDesc(
                    dtype,
                    GroupShape(1, cols),
                    scale_dtype=None,
                    zero_point=suffix == ":zp",
                    minimum=suffix == ":min",
                )
                yield f"{base}:{name}{suffix}", desc, None
    of_16, of_32 = [QuantDesc("int6", GroupShape(1, c), scale_dtype=None) for c in (16, 32)]
    int5, iq4 = [dataclasses.replace(of_32, dtype=dtype) for dtype in ("int5", "iq4")]
    yield "int6_w6a16:g16", of_16, None
    yield "int5_w5a16:g32", int5, None
    yield "int5_w5a16:g32:min", dataclasses.replace(int5, minimum=True), None
    yield "iq4_w4a16:g32", iq4, None
    # scales in two levels
    int4, int5, int6, iq4 = [
        dataclasses.replace(desc, scale_dtype=torch.int8)
        for desc in (dataclasses.replace(int5, dtype="int4"), int5, of_16, iq4)
    ]
    yield "int4_w4a16:g32:super:min", dataclasses.replace(int4, minimum=True), None
    yield "int5_w5a16:g32:super:min", dataclasses.replace(int5, minimum=True), None
    yield "int6_w6a16:g16:super", int6, None
    yield "iq4_w4a16:g32:super", iq4, None
    for dtype in ("nf4", "fp4"):
        for cols in (64, 32):
            yield f"{dtype}_w4a16:g{cols}", QuantDesc(dtype, GroupShape(1, cols)), None
    e4m3 = torch.float8_e4m3fn
    grouped = QuantDesc("int4", PER_TOKEN_GROUP, scale_dtype=e4m3, channel_scale=True)
    yield "int4_w4a8", grouped, per_token

    mxfp8 = _mx("e4m3", "ceil", static=False)
    for suffix, rule in (("", "ocp"), (":round", "round"), (":ceil", "ceil")):
        mxfp4 = _mx("e2m1", rule)
        yield f"mxfp4_w4a16{suffix}", mxfp4, None
        yield f"mxfp4_w4a8{suffix}", mxfp4, per_token_group
        yield f"mxfp4_mxfp8{suffix}", mxfp4, mxfp8
        yield f"mxfp4{suffix}", mxfp4, _mx("e2m1", rule, static=False)
    for dtype in ("e3m2", "e2m3"):
        mxfp6, dynamic = _mx(dtype), _mx(dtype, static=False)
        yield f"mxfp6_{dtype}", mxfp6, dynamic
        yield f"mxfp6_{dtype}:mxfp4", mxfp6, _mx("e2m1", static=False)
        yield f"mxfp6_{dtype}:mxfp8", mxfp6, mxfp8
        yield f"mxfp6_{dtype}_w6a16", mxfp6, None
        yield f"mxfp4_mxfp6_{dtype}", _mx("e2m1"), dynamic
    yield "mxfp8", _mx("e4m3", "ceil"), mxfp8

    nvfp4 = QuantDesc("e2m1", PER_NV_BLOCK, scale_dtype=e4m3, global_scale=True)
    yield "nvfp4", nvfp4, dataclasses.replace(nvfp4, static=False)
    yield "nvfp4_w4a16", nvfp4, None


SCHEMES.update((name, QuantScheme(name, *operands)) for name, *operands in _all_schemes())
# the types of blocks that experts of a GGUF file may have, and the scheme of each
GGUF_TYPES = {
    "Q2_K": "custom:int4,1x16,int8,min",
    "Q3_K": "custom:int4,1x16,int8",
    "Q4_0": "int4_w4a16:g32",
    "Q4_1": "int4_w4a16:g32:min",
    "Q5_0": "int5_w5a16:g32",
    "Q5_1": "int5_w5a16:g32:min",
    "Q8_0": "int8_w8a16:g32",
    "Q4_K": "int4_w4a16:g32:super:min",
    "Q5_K": "int5_w5a16:g32:super:min",
    "Q6_K": "int6_w6a16:g16:super",
    "IQ4_NL": "iq4_w4a16:g32",
    "IQ4_XS": "iq4_w4a16:g32:super",
    "MXFP4": "mxfp4_w4a16",
    "NVFP4": "nvfp4_w4a16",
}
# other spellings: names without their variant, the default variant of names that have none, and
# GGUF's types but those that are schemes with quantized activations here, "mxfp4" and "nvfp4"
OTHER_NAMES = {
    "fp8_w8a16": "fp8_w8a16:channel",
    "int8_w8a16": "int8_w8a16:channel",
    "int8_w8a16:zp": "int8_w8a16:channel:zp",
    "int8_w8a16:min": "int8_w8a16:channel:min",
    "int4_w4a16": "int4_w4a16:g128",
    "int4_w4a16:zp": "int4_w4a16:g128:zp",
    "int4_w4a16:min": "int4_w4a16:g128:min",
    "int5_w5a16": "int5_w5a16:g32",
    "int5_w5a16:min": "int5_w5a16:g32:min",
    "int6_w6a16": "int6_w6a16:g16",
    "iq4_w4a16": "iq4_w4a16:g32",
    **{f"{name}_w4a16": f"{name}_w4a16:g64" for name in ("nf4", "fp4")},
    **{name: f"{name}_w4a16:g64" for name in ("nf4", "fp4")},
    **{f"{name}:ocp": name for name in ("mxfp4_w4a16", "mxfp4_w4a8", "mxfp4_mxfp8", "mxfp4")},
    **{kind.lower(): name for kind, name in GGUF_TYPES.items() if kind.lower() not in SCHEMES},
}
