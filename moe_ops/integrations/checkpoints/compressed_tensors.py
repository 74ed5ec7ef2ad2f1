"""The description of one matrix by compressed-tensors: groups, targets, transforms."""

from __future__ import annotations

import re

from moe_ops.integrations.checkpoints.common import Config, shown
from moe_ops.integrations.checkpoints.fields import (
    BOOLEAN,
    INTEGER,
    LIST,
    OBJECT,
    OBJECTS,
    SHAPE,
    SILENT,
    TEXT,
    TEXTS,
    WORD,
    Family,
    Names,
    check_fields,
    checked,
    finds,
)

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


def _is_match(names: Names, target: str, where: str) -> bool:
    """compressed-tensors' match_name: the whole name, or a regular expression from its start."""
    if target.startswith("re:"):
        return finds(re.match, target.removeprefix("re:"), names, where)
    return target in names


def resolve_group(config: Config, names: Names) -> Config:
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
    check_fields(group, _GROUP, where)
    for name in ("weights", "input_activations"):
        check_fields(group[name] or {}, _ARGS, f"{name} of {where}")
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


COMPRESSED_TENSORS = Family(
    used={
        "ignore": TEXTS,
        **dict.fromkeys(("config_groups", "transform_config"), OBJECT),
        **dict.fromkeys(("sparsity_config", "moe_sparsity_config"), OBJECT),
    },
    fixed={"format": (*_GROUP.fixed["format"], "mixed-precision")},
    silent=f"{SILENT} version",
    resolve=resolve_group,
)
