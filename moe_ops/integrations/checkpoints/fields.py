"""Fields of quantization configurations: what each library's are, and what their values may be.

Of each field a `Family` knows whether the formats read it, which values of it moe_ops can follow,
or that no weight depends on it. Anything else is refused by name, so that nothing a checkpoint
says is dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType
from typing import Any, NamedTuple

from moe_ops.integrations.checkpoints.common import Config, shown

REMEDY = (
    "; if no weight depends on it, leave it out of config.json or of "
    "Checkpoint(path, quantization_config=...), where {} lets the tensors alone tell"
)
SILENT = " ".join(
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
    """A kind of values that a field may have, unless it is null."""

    name: str
    holds: Callable[[Any], bool]


def _all(values: Iterable, kind: type | tuple[type, ...]) -> bool:
    return all(isinstance(value, kind) for value in values)


TEXT = Kind("a string", lambda value: isinstance(value, str))
BOOLEAN = Kind("true or false", lambda value: isinstance(value, bool))
WORD = Kind("a string, true or false", lambda value: isinstance(value, (str, bool)))
INTEGER = Kind("an integer", lambda value: type(value) is int)
INTEGERS = Kind("a list of integers", lambda value: isinstance(value, list) and _all(value, int))
SIZE = Kind("an integer or a list of integers", lambda v: INTEGER.holds(v) or INTEGERS.holds(v))
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
    ``silent``: no weight depends on them. ``modules``: fields may be names of modules, and hold an
    object of their fields, true or false. ``resolve`` makes of them what holds for one module, and
    raises ValueError for what it cannot follow.
    """

    used: dict[str, Kind]
    fixed: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    silent: str = SILENT
    modules: bool = False
    resolve: Callable[[Config, Names], Config] = lambda config, names: config

    @cached_property
    def known(self) -> set[str]:
        return {*self.used, *self.silent.split(), *self.fixed}


def is_module(name: str) -> bool:
    """Whether a field can be the name of a module."""
    return "." in name or name == "lm_head"


def check_fields(config: Config, family: Family, where: str) -> None:
    """Raise ValueError for a field that a family does not know or whose value it cannot follow."""
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
        elif family.modules and is_module(name) and isinstance(value, (dict, bool)):
            continue
        elif name not in family.known and value not in (None, "", [], {}):
            raise ValueError(
                f"{name} of {where} must be a field that moe_ops knows, got {shown(value)}{REMEDY}"
            )


def finds(search: Callable, pattern: str, names: Names, where: str) -> bool:
    """Whether ``search``, re.match or re.search, finds a pattern of the field ``where``."""
    try:
        return any(search(pattern, name) is not None for name in names)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"{where} must have regular expressions, got {shown(pattern)}: {error}"
        ) from error


def quantization_args(
    kind: str, bits: int, strategy: str, size: int | None = None, **others: Any
) -> Config:
    """compressed-tensors' QuantizationArgs of a matrix, which the formats read."""
    args = {"type": kind, "num_bits": bits, "strategy": strategy, "dynamic": False}
    return args | ({} if size is None else {"group_size": size}) | others


NVFP4_ARGS = quantization_args("float", 4, "tensor_group", 16)
