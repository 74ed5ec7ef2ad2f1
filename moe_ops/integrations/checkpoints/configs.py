"""What a checkpoint's quantization_config says of one matrix.

Each library that quantizes has its own fields. Of each field a `Family` knows whether the formats
read it, which values of it moe_ops can follow, or that no weight depends on it. Anything else is
refused by name, so that nothing a checkpoint says is dropped in silence.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType
from typing import Any, NamedTuple

from moe_ops.integrations.checkpoints import mlx
from moe_ops.integrations.checkpoints.common import Config, shown

_REMEDY = (
    "; if no weight depends on it, leave it out of config.json or of "
    "Checkpoint(path, quantization_config=...), where {} lets the tensors alone tell"
)
_SILENT = " ".join(
    (
        # which matrices are quantized: their tensors tell
        "modules_to_not_convert modules_to_convert ignored_layers modules_in_block_to_quantize",
        "block_name_to_quantize to_quant_block_names module_name_preceding_first_block",
        "lm_head quant_lm_head",
        # what attention keeps in its cache
        "kv_cache_scheme kv_cache_quant_algo kv_cache_quant_method static_kv_dtype",
        # how transformers loads it, and by which kernels it runs there
        "dequantize run_compressed use_optimized_inference backend use_exllama disable_exllama",
        "exllama_config use_cuda_fp16 do_fuse fuse_max_seq_len modules_to_fuse max_input_length",
        # how the weights were found, and by whom
        "tokenizer dataset damp_percent damp_auto_increment true_sequential static_groups",
        "act_group_aware mse model_seqlen batch_size pad_token_id cache_block_outputs meta",
        "quantizer model_name_or_path model_file_base_name producer provider autoround_version",
        "iters lr minmax_lr nsamples seqlen low_gpu_mem_usage low_cpu_mem_usage amp model_free",
        "gradient_accumulate_steps enable_quanted_input enable_minmax_tuning",
        "enable_norm_bias_tuning enable_alg_ext quantization_status global_compression_ratio",
        "v2 v2_alpha parallel_packing hyb_act",
    )
)


Names = tuple[str, ...]  # of one matrix: the file's, and others that patterns may mean


class Kind(NamedTuple):
    """What the value of a field is, if it is not null."""

    name: str
    holds: Callable[[Any], bool]


def _all(values: Iterable, kind: type | tuple[type, ...]) -> bool:
    return all(isinstance(value, kind) for value in values)


TEXT = Kind("a string", lambda value: isinstance(value, str))
BOOLEAN = Kind("true or false", lambda value: isinstance(value, bool))
WORD = Kind("a string, true or false", lambda value: isinstance(value, (str, bool)))
INTEGER = Kind("an integer", lambda value: type(value) is int)
INTEGERS = Kind("a list of integers", lambda value: isinstance(value, list) and _all(value, int))
SHAPE = Kind("a list or a string", lambda value: isinstance(value, (list, str)))
TEXTS = Kind("a list of strings", lambda value: isinstance(value, list) and _all(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
OBJECTS = Kind(
    "an object of objects",
    lambda value: isinstance(value, dict) and _all(value.values(), (dict, NoneType)),
)
LIST = Kind("a list of objects", lambda value: isinstance(value, list) and _all(value, dict))


def checked(value: Any, kind: Kind, where: str) -> Any:
    """A value that must be null or of a kind, which ValueError says of the field ``where``."""
    if value is not None and not kind.holds(value):
        raise ValueError(f"{where} must be {kind.name}, got {shown(value)}")
    return value


@dataclass(frozen=True, eq=False)
class Family:
    """The fields of one quant_method.

    ``used``: the formats, or ``resolve``, read them. ``fixed``: the values that moe_ops follows.
    ``silent``: no weight depends on them. ``modules``: other fields are names of modules, and hold
    an object of their fields, true or false. ``resolve`` makes of them what holds for one module,
    and raises ValueError for what it cannot follow.
    """

    used: dict[str, Kind]
    fixed: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    silent: str = _SILENT
    modules: bool = False
    resolve: Callable[[Config, Names], Config] = lambda config, names: config

    @cached_property
    def known(self) -> set[str]:
        return {*self.used, *self.silent.split(), *self.fixed}


def config_for(config: Config, module: str, *others: str, method: str = "") -> Config:
    """What a quantization_config says of one quantized matrix.

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
    _check_fields(config, family, "quantization_config")
    kept = family.modules
    said = {name: value for name, value in config.items() if kept or name in family.known}
    names = tuple(dict.fromkeys((module, *others)))
    return family.resolve(said | {"quant_method": config.get("quant_method")}, names)


def gate_and_up_are_halves(config: Config) -> bool:
    """Whether gate_proj and up_proj of experts one by one are the halves of a stack whose rows of
    gate and up take turns (gpt_oss), as GPTQModel takes it apart, and not gate and up themselves.

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


def check_transforms(config: Config) -> None:
    """Raise ValueError if activations must be rotated, of plain weights too."""
    transforms = checked(config.get("transform_config"), OBJECT, "transform_config") or {}
    where = "config_groups of transform_config"
    for name, group in (checked(transforms.get("config_groups"), OBJECTS, where) or {}).items():
        applications = (group or {}).get("apply")
        for applied in checked(applications, LIST, f"apply of {name!r} of {where}") or []:
            if applied.get("location") not in ("weight_input", "weight_output"):
                raise ValueError(
                    f"transform_config must change weights alone, got {name!r} "
                    f"({shown(group.get('type'))}) at location {shown(applied.get('location'))}, "
                    "which every call would have to apply to activations; moe_ops has no such "
                    "transforms"
                )


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
            f"weights, got {shown(method)} with {', '.join(map(str, config))}{_REMEDY}"
        )
    return found


def _check_fields(config: Config, family: Family, where: str) -> None:
    for name, value in config.items():
        if name == "quant_method":
            continue
        if name in family.used:
            checked(value, family.used[name], f"{name} of {where}")
        elif name in family.fixed:
            allowed = family.fixed[name]
            value = value.lower() if isinstance(value, str) else value
            if value is not None and value not in allowed:
                raise ValueError(
                    f"{name} of {where} must be {' or '.join(map(repr, allowed))}, got "
                    f"{shown(config[name])}"
                )
        elif family.modules and isinstance(value, (dict, bool)):
            continue
        elif name not in family.known and value not in (None, "", [], {}):
            raise ValueError(
                f"{name} of {where} must be a field that moe_ops knows, got {shown(value)}"
                f"{_REMEDY}"
            )


# --- compressed-tensors -----------------------------------------------------------------------

_ARGS = Family(
    used={
        **dict.fromkeys(("num_bits", "group_size"), INTEGER),
        **dict.fromkeys(("type", "strategy"), TEXT),
        **dict.fromkeys(("dynamic", "actorder"), WORD),
        "symmetric": BOOLEAN,
        "block_structure": SHAPE,
    },
    silent="observer observer_kwargs scale_dtype zp_dtype",  # stored tensors have their dtypes
)
_GROUP = Family(
    used={
        "targets": TEXTS,
        **dict.fromkeys(("weights", "input_activations", "output_activations"), OBJECT),
    },
    fixed={
        "format": (
            "dense",
            "int-quantized",
            "float-quantized",
            "naive-quantized",
            "pack-quantized",
            "nvfp4-pack-quantized",
            "mxfp4-pack-quantized",
            "mxfp8-quantized",
        )
    },
    silent="",
)


def _classes(module: str) -> tuple[str, ...]:
    """Names of the torch.nn classes of a quantized module."""
    return ("Embedding" if "embed" in module.rpartition(".")[2] else "Linear", "Module")


def _finds(search: Callable, pattern: str, names: Names, where: str) -> bool:
    """Whether ``search``, re.match or re.search, finds a pattern of the field ``where``."""
    try:
        return any(search(pattern, name) is not None for name in names)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"{where} must have regular expressions, got {shown(pattern)}: {error}"
        ) from error


def _is_match(names: Names, target: str, where: str) -> bool:
    """compressed-tensors' match_name: the whole name, or a regular expression from its start."""
    if target.startswith("re:"):
        return _finds(re.match, target.removeprefix("re:"), names, where)
    return target in names


def _compressed_tensors(config: Config, names: Names) -> Config:
    """The group whose target names a module most specifically.

    As compressed-tensors' apply_quantization_config has it: names before regular expressions, both
    in alphabetical order, before classes; of a target that several groups have, the last one's
    group. A module that ``ignore`` names is not quantized. Of several names of the module none
    may lead to another group than the others do.
    """
    module = names[0]
    check_transforms(config)
    form = (config.get("sparsity_config") or {}).get("format", "dense")
    method = (config.get("moe_sparsity_config") or {}).get("method", "prune")
    if form != "dense" or method != "prune":
        raise ValueError(
            "sparsity_config and moe_sparsity_config must leave the experts dense, got format "
            f"{shown(form)} and method {shown(method)}"
        )
    for target in config.get("ignore") or []:
        if target in _classes(module) or _is_match(names, target, "ignore of quantization_config"):
            raise ValueError(
                f"ignore of quantization_config must not name {module}, whose tensors are "
                f"quantized, got {target!r}"
            )
    groups: dict[str, str] = {}  # target -> name of its group
    for name, group in (config.get("config_groups") or {}).items():
        if not isinstance(group, dict):
            raise ValueError(
                f"config_groups[{name!r}] must describe weights and activations, got "
                f"{shown(group)}; write out the preset"
            )
        targets = checked(group.get("targets"), TEXTS, f"targets of config_groups[{name!r}]")
        groups |= dict.fromkeys(targets or [], name)
    ordered = sorted(groups, key=lambda target: ("re:" in target, target))
    where = "targets of config_groups"
    matches = [[t for t in ordered if _is_match((name,), t, where)][:1] for name in names]
    found = sum(matches, [])
    found = [t for t in found if not t.startswith("re:")] or found
    found = found or [t for t in ordered if t in _classes(module)][:1]
    if not found:
        raise ValueError(
            f"config_groups must have a group for {module}, whose tensors are quantized, got "
            f"targets {', '.join(map(shown, ordered)) or 'of none'}"
        )
    name, *others = dict.fromkeys(groups[target] for target in found)
    group = _check_group(config["config_groups"][name], f"config_groups[{name!r}]")
    for other in others:
        if group | config["config_groups"][other] | {"targets": group["targets"]} != group:
            raise ValueError(
                f"config_groups must have one group for {module}, which the model calls "
                f"{' or '.join(names[1:])}, got targets {shown(group['targets'])} of {name!r} for "
                f"one of the names and those of {other!r} for another; write the file's names "
                "into the targets"
            )
    return config | group


def _check_group(group: Config, where: str) -> Config:
    group = {"weights": None, "input_activations": None} | group
    _check_fields(group, _GROUP, where)
    for name in ("weights", "input_activations"):
        _check_fields(group[name] or {}, _ARGS, f"{name} of {where}")
    if group["weights"] is None:
        raise ValueError(f"weights of {where} must say how they are quantized, got null")
    if group["weights"].get("dynamic"):
        raise ValueError(
            f"dynamic of weights of {where} must be False, got "
            f"{shown(group['weights']['dynamic'])}"
        )
    if group.get("output_activations"):
        raise ValueError(
            f"output_activations of {where} must be null: moe_ops does not quantize what a matrix "
            f"product returns, got {shown(group['output_activations'])}"
        )
    return group


# --- ModelOpt ---------------------------------------------------------------------------------


def _args(kind: str, bits: int, strategy: str, size: int | None = None, **others: Any) -> Config:
    args = {"type": kind, "num_bits": bits, "strategy": strategy, "dynamic": False}
    return args | ({} if size is None else {"group_size": size}) | others


_NVFP4 = _args("float", 4, "tensor_group", 16)
_FP8_BLOCK = _args("float", 8, "block", block_structure=[128, 128])
_MXFP8 = _args("float", 8, "group", 32)
# quant_algo -> weights and input_activations. AWQ's pre_quant_scale is a tensor, and refused as
# such; where ModelOpt could move it to the norm before, the weights are ordinary ones.
_ALGORITHMS: dict[str, tuple[Config, Config | None]] = {
    "FP8": (_args("float", 8, "tensor"), _args("float", 8, "tensor")),
    "FP8_PER_CHANNEL_PER_TOKEN": (
        _args("float", 8, "channel"),
        _args("float", 8, "token", dynamic=True),
    ),
    "FP8_PB_WO": (_FP8_BLOCK, None),
    "NVFP4": (_NVFP4, _NVFP4 | {"dynamic": "local"}),
    "NVFP4_AWQ": (_NVFP4, _NVFP4 | {"dynamic": "local"}),
    "W4A16_NVFP4": (_NVFP4, None),
    "MXFP8": (_MXFP8, _MXFP8 | {"dynamic": True}),
    # written whether or not activations were quantized, without a word of them
    "MXFP4": (_args("float", 4, "group", 32), None),
    "W8A16": (_args("int", 8, "channel"), None),
    "W8A8_SQ_PER_CHANNEL": (_args("int", 8, "channel"), _args("int", 8, "tensor")),
}


def _modelopt(config: Config, names: Names) -> Config:
    """By quant_algo, of MIXED_PRECISION by that of the module in quantized_layers."""
    module = names[0]
    nested = config.get("quantization") or {}  # of a whole hf_quant_config.json
    _check_fields(nested, MODELOPT, "quantization")
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
        return _compressed_tensors(config, names)
    if str(algorithm).upper() == "MIXED_PRECISION":
        layers = config.get("quantized_layers") or {}
        parts = [n.rsplit(".", i)[0] for n in names for i in range(n.count(".") + 1)]
        name = next((name for name in parts if layers.get(name) is not None), None)
        if name is None:
            raise ValueError(
                f"quantized_layers must name {module}, whose tensors are quantized, got "
                f"{len(layers)} other names"
            )
        _check_fields(layers[name], MODELOPT, f"quantized_layers[{name!r}]")
        config = config | layers[name]
        algorithm = config.get("quant_algo")
    found = _ALGORITHMS.get(str(algorithm).upper())
    if found is None:
        raise ValueError(
            f"quant_algo of {module} must be one of {', '.join(map(repr, _ALGORITHMS))}, got "
            f"{shown(algorithm)}{_REMEDY}"
        )
    size = found[0].get("group_size")
    if config.get("group_size") not in (None, 0, size):
        raise ValueError(
            f"group_size of {module} must be {size} for {algorithm}, got {config['group_size']}"
        )
    return config | {"weights": found[0], "input_activations": found[1]}


# --- GPTQ, AWQ, AutoRound ---------------------------------------------------------------------


def _gptq(config: Config, names: Names) -> Config:
    """GPTQModel's ``dynamic``: the first pattern that a name begins with changes its fields; those
    that leave modules out, "-:", come before the others.
    """
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    dynamic = config.get("dynamic") or {}
    for pattern in sorted(dynamic, key=lambda pattern: not pattern.startswith("-")):
        changed = dynamic[pattern] or {}
        expression = pattern[2:] if pattern[:2] in ("+:", "-:") else pattern
        if not _finds(re.match, expression, names, "dynamic of quantization_config"):
            continue
        if pattern.startswith("-:"):
            raise ValueError(
                f"dynamic of quantization_config must not leave out {names[0]}, whose tensors are "
                f"quantized, got {pattern!r}"
            )
        _check_fields(changed, GPTQ, f"dynamic[{pattern!r}]")
        config = config | changed
        break
    return config | {"checkpoint_format": str(form).lower()}


def _auto_round(config: Config, names: Names) -> Config:
    """AutoRound packs as GPTQ or AWQ; ``extra_config`` changes fields of single modules, by their
    whole names or by regular expressions, which have characters that no name has.
    """
    extra = config.get("extra_config") or {}
    where = "extra_config of quantization_config"
    patterns = (
        pattern
        for pattern in extra
        if set(pattern) & set("*+?^$()[]{}|\\") and _finds(re.search, pattern, names, where)
    )
    whole = next((name for name in names if extra.get(name)), None)
    changed: Config = extra.get(whole or next(patterns, "")) or {}
    _check_fields(changed, AUTO_ROUND, f"extra_config of {names[0]}")
    config = config | changed
    packing = str(config.get("packing_format", "auto_round:auto_gptq")).lower()
    if packing.endswith("llm_compressor"):
        return config | {
            "weights": _auto_round_args(config, "", names[0]),
            "input_activations": _auto_round_args(config, "act_", names[0]),
        }
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
        return _args("float", bits, "group", 32, dynamic=bool(prefix))
    if (kind, bits, size) in (("nv_fp", 4, 16), ("nv_fp4_with_static_gs", 4, 16)):
        return _NVFP4 | ({"dynamic": "local"} if prefix else {})
    raise ValueError(
        f"{prefix}data_type, {prefix}bits and {prefix}group_size of {module} must be 'mx_fp', 4 "
        f"or 8 and 32, or 'nv_fp', 4 and 16, got {shown(kind)}, {bits} and {size}"
    )


# --- MLX --------------------------------------------------------------------------------------


def _mlx(config: Config, names: Names) -> Config:
    """The fields of all matrices, or those of a module that a field is named after, of which MLX
    takes the mode's defaults where they are missing.
    """
    own = config.get(names[0])
    if own is False:
        raise ValueError(
            f"{names[0]} of quantization must not be false: its tensors are quantized"
        )
    if isinstance(own, dict):
        _check_fields(own, MLX, f"quantization[{names[0]!r}]")
        config = own
    mode = config.get("mode") or "affine"
    size, bits = mlx.MODES.get(mode, (None, None))
    size, bits = config.get("group_size") or size, config.get("bits") or bits
    return {"quant_method": "mlx", "mode": mode, "group_size": size, "bits": bits}


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
        **dict.fromkeys(("bits", "group_size", "act_bits", "act_group_size"), INTEGER),
        **dict.fromkeys(("data_type", "act_data_type"), TEXT),
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
        ),
        "act_dynamic": (True,),
        "act_sym": (True,),
        "desc_act": (False,),
    },
    silent=f"{_SILENT} scale_dtype supported_types",
    resolve=_auto_round,
)
MODELOPT = Family(
    used={
        "quant_algo": TEXT,
        "group_size": INTEGER,
        **dict.fromkeys(("ignore", "exclude_modules"), TEXTS),
        **dict.fromkeys(("config_groups", "quantization", "transform_config"), OBJECT),
        "quantized_layers": OBJECTS,
    },
    fixed={"has_zero_point": (False,)},
    silent=f"{_SILENT} pre_quant_scale",  # a tensor of that name tells
    resolve=_modelopt,
)
MLX = Family(
    used={"mode": TEXT, **dict.fromkeys(("group_size", "bits"), INTEGER)},
    silent="",
    modules=True,
    resolve=_mlx,
)
FAMILIES = {
    "fp8": Family(
        used={"activation_scheme": TEXT, "weight_block_size": INTEGERS, "scale_fmt": TEXT},
        fixed={"fmt": ("e4m3", "float8_e4m3fn"), "expert_dtype": ("fp8", "fp4")},
    ),
    "mxfp4": Family(used={}),
    "compressed-tensors": Family(
        used={
            "ignore": TEXTS,
            **dict.fromkeys(("config_groups", "transform_config"), OBJECT),
            **dict.fromkeys(("sparsity_config", "moe_sparsity_config"), OBJECT),
        },
        fixed={"format": (*_GROUP.fixed["format"], "mixed-precision")},
        silent=f"{_SILENT} version",
        resolve=_compressed_tensors,
    ),
    "modelopt": MODELOPT,
    "modelopt_fp4": MODELOPT,
    "modelopt_fp8": MODELOPT,
    "modelopt_mixed": MODELOPT,
    "gptq": GPTQ,
    "awq": Family(
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
        silent=f"{_SILENT} sym checkpoint_format",
    ),
    "auto-round": AUTO_ROUND,
    "mlx": MLX,
}
