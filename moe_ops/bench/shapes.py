"""The expert layer to measure: sizes by name, from numbers, or from a model's configuration."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """One model's expert layer. With ep_size > 1 tokens are routed over ep_size * num_experts
    experts, of which the first num_experts are held here; ids of the others contribute nothing.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    ep_size: int = 1

    def __str__(self) -> str:
        return (
            f"E={self.num_experts} top_k={self.top_k} K={self.hidden_size} "
            f"I={self.intermediate_size}"
        )

    @property
    def weights(self) -> int:
        """Elements of w13 and w2 of all experts."""
        return 3 * self.num_experts * self.hidden_size * self.intermediate_size


SHAPES = {
    "qwen3": Shape(128, 8, 2048, 768),
    "mixtral": Shape(8, 2, 4096, 14336),
    "dsv3": Shape(256, 8, 7168, 2048),
    "gptoss20": Shape(32, 4, 2880, 2880),
    "gptoss120": Shape(128, 4, 2880, 2880),
    "glm45air": Shape(128, 8, 4096, 1408),
    "scout": Shape(16, 1, 5120, 8192),
    "dsv3_ep8": Shape(32, 8, 7168, 2048, ep_size=8),
    "e64": Shape(64, 6, 2048, 1408),
    "e160": Shape(160, 6, 5120, 1536),
    "qwen3next": Shape(512, 10, 2048, 512),
    "phi35": Shape(16, 2, 4096, 6400),
    "qwen36": Shape(256, 8, 2048, 512),
    "kimik3": Shape(896, 16, 3584, 1536),
    "dsv4": Shape(384, 6, 7168, 3072),
}

# fields of configurations that hold each size, the first that a configuration has
_FIELDS = {
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
    "hidden_size": ("hidden_size", "d_model"),
    "intermediate_size": (
        *("moe_intermediate_size", "expert_ffn_hidden_size", "moe_hidden_size"),
        *("intermediate_size", "ffn_hidden_size"),
    ),
}


def resolve(model_or_shape: str) -> tuple[str, Shape]:
    """(name, shape) of what a command line names.

    Args:
        model_or_shape: "E,top_k,K,I" in numbers; a name in SHAPES; a folder that holds a model's
            config.json, or that file; or a model type of transformers, whose default configuration
            is taken.

    Raises:
        ValueError: none of these, the name of a repository on a hub, numbers that make no layer,
            a file with a size that is no integer, or a model without experts.
        ImportError: a model type is named, and transformers is not installed.
    """
    if "," in model_or_shape:
        return model_or_shape, _from_numbers(model_or_shape)
    if model_or_shape in SHAPES:
        return model_or_shape, SHAPES[model_or_shape]
    path = Path(model_or_shape).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"{model_or_shape!r} must hold a config.json, and has none")
    if path.is_file():
        return path.resolve().parent.name, _from_file(path)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model_or_shape):
        raise ValueError(
            f"{model_or_shape!r} must be a folder, and there is none; nothing is looked up on a "
            f"hub: hf download {model_or_shape} --local-dir {path.name}, then give {path.name}"
        )
    return model_or_shape, _from_model_type(model_or_shape)


def scheme_of(model_or_shape: str) -> str:
    """The scheme that a folder's experts are stored in, "" for plain weights and without a folder.

    Raises:
        ValueError: the folder says that they are quantized, and has no files of them or some that
            moe_ops cannot read.
    """
    from moe_ops.integrations.checkpoints import Checkpoint, files

    folder = Path(model_or_shape).expanduser()
    config, _ = files.quantization_config(folder) if folder.is_dir() else ({}, folder)
    if not config or config.get("quant_method") == "moe_ops":
        return config.get("scheme") or ""
    checkpoint = Checkpoint(folder)
    for name in checkpoint.files.entries:
        found = re.match(r"(.+\bexperts)\.(?:\d+\.)?(down_proj|w2)(?![a-z0-9])", name)
        if found:
            return checkpoint.find(found[1], (found[2],)).scheme
    return ""


def _from_numbers(text: str) -> Shape:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 4 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(
            f"a shape must be four positive integers E,top_k,K,I such as 128,8,2048,768, got "
            f"{text!r}"
        )
    return _checked(Shape(*map(int, parts)))


def _checked(shape: Shape) -> Shape:
    if shape.top_k > shape.num_experts:
        raise ValueError(
            f"top_k must be at most E={shape.num_experts}, got {shape.top_k}; the order of a "
            "shape is E,top_k,K,I"
        )
    return shape


def _from_file(path: Path) -> Shape:
    try:
        given = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(given).__name__}")
    for where, place in _places(given):
        for field in itertools.chain.from_iterable(_FIELDS.values()):
            _check_size(f"{where}{field} of {path}", place.get(field))
    try:
        return _from_fields(given, str(path))
    except ValueError:
        # a file leaves out what is a default of its class
        config = _default(str(given.get("model_type")))
        if config is None:
            raise
    try:
        whole = type(config).from_dict(given).to_dict()
    except Exception as error:  # the class checks fields that are not read here
        said = " ".join(str(error).split())
        raise ValueError(f"{path} must be a {config.model_type} configuration: {said}") from error
    return _from_fields(whole, str(path))


def _from_model_type(name: str) -> Shape:
    known = ", ".join(SHAPES)
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(
            f"{name!r} is no shape E,top_k,K,I, none of {known}, and no folder with a "
            "config.json; for model types, pip install transformers"
        )
    config = _default(name)
    if config is None:
        raise ValueError(
            f"{name!r} is no shape E,top_k,K,I, none of {known}, no folder with a config.json, "
            "and no model type of transformers such as qwen3_moe"
        )
    return _from_fields(config.to_dict(), name)


def _default(model_type: str) -> Any:
    """The default configuration of a model type; None if transformers has no such type."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]() if model_type in CONFIG_MAPPING else None


def _places(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """A configuration, and that of its language model, each after the prefix of its fields."""
    text = config.get("text_config")
    return [("", config)] + ([("text_config.", text)] if isinstance(text, Mapping) else [])


def _check_size(name: str, value: Any) -> None:
    """Raise unless a field may stand for a size, or says that there is none."""
    first = value[0] if isinstance(value, list) and value else value
    none = first is None or first == [] or (type(first) is int and first == 0)
    if not none and not _integer(value):
        raise ValueError(f"{name} must be a positive integer, or a list of them, got {value!r}")


def _from_fields(config: Mapping[str, Any], name: str) -> Shape:
    """The shape in a configuration, or in that of its language model."""
    for _, place in reversed(_places(config)):
        sizes = {
            size: next((n for f in fields if (n := _integer(place.get(f)))), 0)
            for size, fields in _FIELDS.items()
        }
        if all(sizes.values()) and sizes["num_experts"] > 1:
            return _checked(Shape(**sizes))
    missing = [size for size, n in sizes.items() if not n] or ["more than one expert"]
    raise ValueError(
        f"{name} must be a model with experts; its configuration has no {', '.join(missing)}. "
        "Give the shape as E,top_k,K,I"
    )


def _integer(value: Any) -> int:
    """A size, or the first of a list with one for each layer; 0 where there is none."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
