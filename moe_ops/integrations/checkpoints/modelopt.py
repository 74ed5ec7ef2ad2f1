"""The description of one matrix by ModelOpt, in the words of compressed-tensors."""

from __future__ import annotations

import fnmatch

from moe_ops.integrations.checkpoints.common import Config, shown
from moe_ops.integrations.checkpoints.compressed_tensors import check_transforms, resolve_group
from moe_ops.integrations.checkpoints.fields import (
    INTEGER,
    NVFP4_ARGS,
    OBJECT,
    OBJECTS,
    REMEDY,
    SILENT,
    TEXT,
    TEXTS,
    Family,
    Names,
    check_fields,
    quantization_args,
)

_FP8_BLOCK = quantization_args("float", 8, "block", block_structure=[128, 128])
_MXFP8 = quantization_args("float", 8, "group", 32)
# quant_algo -> weights and input_activations. AWQ's pre_quant_scale is a tensor, and refused as
# such; where ModelOpt could move it to the norm before, the weights are ordinary ones.
_ALGORITHMS: dict[str, tuple[Config, Config | None]] = {
    "FP8": (quantization_args("float", 8, "tensor"), quantization_args("float", 8, "tensor")),
    "FP8_PER_CHANNEL_PER_TOKEN": (
        quantization_args("float", 8, "channel"),
        quantization_args("float", 8, "token", dynamic=True),
    ),
    "FP8_PB_WO": (_FP8_BLOCK, None),
    "NVFP4": (NVFP4_ARGS, NVFP4_ARGS | {"dynamic": "local"}),
    "NVFP4_AWQ": (NVFP4_ARGS, NVFP4_ARGS | {"dynamic": "local"}),
    "W4A16_NVFP4": (NVFP4_ARGS, None),
    "MXFP8": (_MXFP8, _MXFP8 | {"dynamic": True}),
    # written whether or not activations were quantized, without a word of them
    "MXFP4": (quantization_args("float", 4, "group", 32), None),
    "W8A16": (quantization_args("int", 8, "channel"), None),
    "W8A8_SQ_PER_CHANNEL": (
        quantization_args("int", 8, "channel"),
        quantization_args("int", 8, "tensor"),
    ),
}


def _modelopt(config: Config, names: Names) -> Config:
    """By quant_algo, of MIXED_PRECISION by that of the module in quantized_layers."""
    module = names[0]
    nested = config.get("quantization") or {}  # of a whole hf_quant_config.json
    check_fields(nested, MODELOPT, "quantization")
    config = config | nested
    check_transforms(config)
    for pattern in (config.get("ignore") or []) + (config.get("exclude_modules") or []):
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"exclude_modules of quantization_config must not name {module}, whose tensors "
                f"are quantized, got {pattern!r}"
            )
    algorithm = config.get("quant_algo")
    if algorithm is None and config.get("config_groups"):
        return resolve_group(config, names)
    if str(algorithm).upper() == "MIXED_PRECISION":
        layers = config.get("quantized_layers") or {}
        parts = [n.rsplit(".", i)[0] for n in names for i in range(n.count(".") + 1)]
        name = next((name for name in parts if layers.get(name) is not None), None)
        if name is None:
            raise ValueError(
                f"quantized_layers must name {module}, whose tensors are quantized, got "
                f"{len(layers)} other names"
            )
        check_fields(layers[name], MODELOPT, f"quantized_layers[{name!r}]")
        config = config | layers[name]
        algorithm = config.get("quant_algo")
    found = _ALGORITHMS.get(str(algorithm).upper())
    if found is None:
        raise ValueError(
            f"quant_algo of {module} must be one of {', '.join(map(repr, _ALGORITHMS))}, got "
            f"{shown(algorithm)}{REMEDY}"
        )
    size = found[0].get("group_size")
    if config.get("group_size") not in (None, 0, size):
        raise ValueError(
            f"group_size of {module} must be {size} for {algorithm}, got {config['group_size']}"
        )
    return config | {"weights": found[0], "input_activations": found[1]}


MODELOPT = Family(
    used={
        "quant_algo": TEXT,
        "group_size": INTEGER,
        **dict.fromkeys(("ignore", "exclude_modules"), TEXTS),
        **dict.fromkeys(("config_groups", "quantization", "transform_config"), OBJECT),
        "quantized_layers": OBJECTS,
    },
    fixed={"has_zero_point": (False,)},
    silent=f"{SILENT} pre_quant_scale",  # a tensor of that name tells
    resolve=_modelopt,
)
