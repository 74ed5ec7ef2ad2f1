"""The description of one matrix by a checkpoint's quantization_config, of any library."""

from __future__ import annotations

from moe_ops.integrations.checkpoints.common import Config, shown
from moe_ops.integrations.checkpoints.compressed_tensors import COMPRESSED_TENSORS
from moe_ops.integrations.checkpoints.fields import (
    INTEGERS,
    REMEDY,
    TEXT,
    Family,
    check_fields,
)
from moe_ops.integrations.checkpoints.gptq import AUTO_ROUND, AWQ, GPTQ
from moe_ops.integrations.checkpoints.mlx import MLX
from moe_ops.integrations.checkpoints.modelopt import MODELOPT

FAMILIES = {
    "fp8": Family(
        used={"activation_scheme": TEXT, "weight_block_size": INTEGERS, "scale_fmt": TEXT},
        fixed={"fmt": ("e4m3", "float8_e4m3fn"), "expert_dtype": ("fp8", "fp4")},
    ),
    "mxfp4": Family(used={}),
    "compressed-tensors": COMPRESSED_TENSORS,
    "modelopt": MODELOPT,
    "modelopt_fp4": MODELOPT,
    "modelopt_fp8": MODELOPT,
    "modelopt_mixed": MODELOPT,
    "gptq": GPTQ,
    "awq": AWQ,
    "auto-round": AUTO_ROUND,
    "mlx": MLX,
}


def config_for(config: Config, module: str, *others: str, method: str = "") -> Config:
    """The description of one quantized matrix by a quantization_config.

    Args:
        config: of the whole checkpoint; {} where it has none, whose tensors alone then tell.
        module: name of the matrix in the checkpoint, e.g. "model.layers.0.mlp.experts.3.up_proj".
        others: its names in the model, where the checkpoint has those of another one, such as
            "block_sparse_moe.experts.3.w3". Libraries that quantize a model in memory write the
            model's names into their configurations, so that either name may be meant.
        method: quant_method of a configuration that has none, if the tensors tell.

    Returns:
        The fields that the formats read. A compressed-tensors or ModelOpt configuration has
        "weights" and "input_activations", as compressed-tensors' QuantizationArgs.

    Raises:
        ValueError: a method or field that moe_ops does not know or cannot follow, or none that is
            meant for this matrix.
    """
    if not config:
        return {}
    if method:
        config = {"quant_method": method} | config
    family = _family_of(config)
    check_fields(config, family, "quantization_config")
    kept = family.modules
    said = {name: value for name, value in config.items() if kept or name in family.known}
    names = tuple(dict.fromkeys((module, *others)))
    return family.resolve(said | {"quant_method": config.get("quant_method")}, names)


def gate_and_up_are_halves(config: Config) -> bool:
    """Whether gate_proj and up_proj of experts one by one are the halves of a stack whose rows of
    gate and up take turns, as GPTQModel takes it apart, and not gate and up themselves.

    Raises:
        ValueError: the configuration does not say who wrote it.
    """
    method = str(config.get("quant_method")).lower()
    meta = config.get("meta")
    quantizer = str((meta if isinstance(meta, dict) else {}).get("quantizer"))
    if method in ("gptq", "awq") and config.get("provider") != "auto-round":
        if "gptqmodel:" in quantizer:
            return True
        method = ""
    if method not in ("compressed-tensors", "auto-round", "gptq", "awq"):
        raise ValueError(
            "quantization_config must say which library wrote the experts one by one: in files "
            "of GPTQModel gate_proj and up_proj are the halves of the stack, in others gate and "
            f"up; got quant_method {shown(config.get('quant_method'))} and neither meta.quantizer "
            "nor provider; add the one that is true to config.json"
        )
    return False


def _family_of(config: Config) -> Family:
    method = config.get("quant_method")
    if method is None:  # a description without its author's name
        known = (f for f in FAMILIES.values() if {k for k, v in config.items() if v} <= f.known)
        found = next(known, None)
    else:
        found = FAMILIES.get(str(method).lower())
    if found is None:
        raise ValueError(
            f"quant_method must be one of {', '.join(map(repr, FAMILIES))} to use quantized "
            f"weights, got {shown(method)} with {', '.join(map(str, config))}{REMEDY}"
        )
    return found
