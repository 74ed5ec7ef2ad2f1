"""The description of one matrix by configurations of GPTQModel, AutoAWQ and AutoRound."""

from __future__ import annotations

import re

from moe_ops.integrations.checkpoints.common import Config, shown
from moe_ops.integrations.checkpoints.fields import (
    BOOLEAN,
    INTEGER,
    INTEGERS,
    NVFP4_ARGS,
    OBJECTS,
    SILENT,
    SIZE,
    TEXT,
    Family,
    Names,
    check_fields,
    finds,
    quantization_args,
)


def _gptq(config: Config, names: Names) -> Config:
    """GPTQModel's ``dynamic``: the first pattern that a name begins with changes its fields; those
    that leave modules out, "-:", come before the others.
    """
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    dynamic = config.get("dynamic") or {}
    for pattern in sorted(dynamic, key=lambda pattern: not pattern.startswith("-")):
        changed = dynamic[pattern] or {}
        expression = pattern[2:] if pattern[:2] in ("+:", "-:") else pattern
        if not finds(re.match, expression, names, "dynamic of quantization_config"):
            continue
        if pattern.startswith("-:"):
            raise ValueError(
                f"dynamic of quantization_config must not leave out {names[0]}, whose tensors are "
                f"quantized, got {pattern!r}"
            )
        check_fields(changed, GPTQ, f"dynamic[{pattern!r}]")
        config = config | changed
        break
    return config | {"checkpoint_format": str(form).lower()}


def _auto_round(config: Config, names: Names) -> Config:
    """AutoRound packs as GPTQ or AWQ, or writes what others write; ``extra_config`` changes fields
    of single modules, by their whole names or by regular expressions, which have characters that
    no name has.
    """
    extra = config.get("extra_config") or {}
    where = "extra_config of quantization_config"
    patterns = (
        pattern
        for pattern in extra
        if set(pattern) & set("*+?^$()[]{}|\\") and finds(re.search, pattern, names, where)
    )
    whole = next((name for name in names if extra.get(name)), None)
    changed: Config = extra.get(whole or next(patterns, "")) or {}
    check_fields(changed, AUTO_ROUND, f"extra_config of {names[0]}")
    config = config | changed
    packing = str(config.get("packing_format", "auto_round:auto_gptq")).lower()
    if packing.endswith("llm_compressor"):
        return config | {
            "weights": _auto_round_args(config, "", names[0]),
            "input_activations": _auto_round_args(config, "act_", names[0]),
        }
    if packing.endswith("fp8"):
        said = {name: config.get(name) for name in _FP8_BLOCK}
        if said != _FP8_BLOCK:
            raise ValueError(
                f"fields of {names[0]} beside packing_format {packing!r} must be "
                f"{shown(_FP8_BLOCK)}, got {shown(said)}"
            )
        return config | {"quant_method": "fp8"}
    rounded = config.get("act_bits") or 16
    if config.get("data_type") not in (None, "int") or rounded < 16:
        raise ValueError(
            f"data_type and act_bits of {names[0]} must be 'int' and 16 beside packing_format "
            f"{packing!r}, got {shown(config.get('data_type'))} and {rounded}"
        )
    return config | {"quant_method": "awq" if packing.endswith("awq") else "gptq"}


def _auto_round_args(config: Config, prefix: str, module: str) -> Config | None:
    """AutoRound's fields of weights, or with "act_" of activations, as QuantizationArgs."""
    bits = config.get(f"{prefix}bits", 16 if prefix else None)
    if bits is None or bits >= 16:
        return None
    kind, size = config.get(f"{prefix}data_type"), config.get(f"{prefix}group_size")
    kind = kind or config.get("data_type")
    if (kind, bits, size) == ("mx_fp", bits, 32) and bits in (4, 8):
        return quantization_args("float", bits, "group", 32, dynamic=bool(prefix))
    if (kind, bits, size) in (("nv_fp", 4, 16), ("nv_fp4_with_static_gs", 4, 16)):
        return NVFP4_ARGS | ({"dynamic": "local"} if prefix else {})
    raise ValueError(
        f"{prefix}data_type, {prefix}bits and {prefix}group_size of {module} must be 'mx_fp', 4 "
        f"or 8 and 32, or 'nv_fp', 4 and 16, got {shown(kind)}, {bits} and {size}"
    )


# what `auto_round:fp8` says of weights with a scale for each 128 x 128
_FP8_BLOCK = {
    **{"data_type": "fp", "bits": 8, "group_size": [128, 128]},
    **{"act_data_type": "fp", "act_bits": 8, "act_group_size": 128},
}
_INTEGERS: dict[str, tuple] = {
    "pack_dtype": ("int32",),
    "is_marlin_format": (False,),
    "data_type": ("int",),
}
_GPTQ_FORMATS = ("gptq", "gptq_v2")
GPTQ = Family(
    used={
        **dict.fromkeys(("bits", "group_size"), INTEGER),
        **dict.fromkeys(("desc_act", "sym"), BOOLEAN),
        "dynamic": OBJECTS,
    },
    fixed=_INTEGERS
    | {"method": ("gptq",), "checkpoint_format": _GPTQ_FORMATS, "format": _GPTQ_FORMATS},
    resolve=_gptq,
)
AUTO_ROUND = Family(
    used={
        **dict.fromkeys(("bits", "act_bits", "act_group_size"), INTEGER),
        "group_size": SIZE,
        **dict.fromkeys(("data_type", "act_data_type", "activation_scheme"), TEXT),
        "weight_block_size": INTEGERS,
        "sym": BOOLEAN,
        "extra_config": OBJECTS,
    },
    fixed={
        "packing_format": (
            "auto_round:auto_gptq",
            "auto_round:gptq",
            "auto_gptq",
            "auto_round:auto_awq",
            "auto_round:awq",
            "auto_awq",
            "auto_round:llm_compressor",
            "auto_round:fp8",
        ),
        "fmt": ("e4m3",),
        "act_dynamic": (True,),
        "act_sym": (True,),
        "desc_act": (False,),
    },
    silent=f"{SILENT} scale_dtype supported_types",
    resolve=_auto_round,
)
AWQ = Family(
    used={
        **dict.fromkeys(("bits", "w_bit", "group_size", "q_group_size"), INTEGER),
        "zero_point": BOOLEAN,
    },
    fixed=_INTEGERS
    | {
        "method": ("awq",),
        "version": ("gemm",),
        "format": ("gemm",),
        "desc_act": (False,),
    },
    # transformers writes GPTQ's defaults beside AWQ's fields
    silent=f"{SILENT} sym checkpoint_format",
)
