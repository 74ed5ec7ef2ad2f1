"""GGUF files in `from_pretrained`: the configuration and the names that transformers' models have.

    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", quantization_config=MoeOpsConfig()
    )

A GGUF file has no config.json: its fields say the same in words of its own. Of the fields of an
architecture each is used, known to change nothing, or refused by name. The same holds of tensors.
"""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import cached_file

from moe_ops.integrations.checkpoints import ggml
from moe_ops.integrations.checkpoints.common import shown
from moe_ops.integrations.checkpoints.experts import Checkpoint
from moe_ops.integrations.checkpoints.gguf import GgufFiles, parts_of
from moe_ops.integrations.checkpoints.headers import Entry

_ROLES = ("weight", "bias", ggml.FACTOR, ggml.IGNORED)
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
_ROPE = {f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", *_YARN)}
# whose values are those of others, or are checked against them
_KNOWN = {
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.finetuned",
    "vocab_size",
    *_ROPE,
}


@dataclass(frozen=True)
class Architecture:
    """What files call the parts of a model that transformers has, as gguf.toml says.

    ``layer``: names of tensors within a layer, without their role. ``integers``: fields that must
    be there, and their names in the configuration; ``optional``: those that need not, as no
    weight depends on them. ``constants``, and ``rope`` of its positions: what files take for
    granted. ``pairs``: tensors in which the rows of each head stand in pairs, not in halves.
    ``bare``: parameters that have no role in their names.
    """

    model_type: str
    layer: dict[str, str] = field(default_factory=dict)
    integers: dict[str, str] = field(default_factory=dict)
    optional: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)
    pairs: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()


_DATA = tomllib.loads((Path(__file__).parent / "gguf.toml").read_text(encoding="utf-8"))
_OUTSIDE: dict[str, str] = _DATA["outside"]
ARCHITECTURES = {
    name: Architecture(
        **row
        | {part: _DATA[part] | row.get(part, {}) for part in ("layer", "integers")}
        | {part: tuple(row.get(part, ())) for part in ("pairs", "bare")}
    )
    for name, row in _DATA["architectures"].items()
}


def architecture_of(files: GgufFiles) -> Architecture:
    """What transformers has for a file's model; ValueError if it has nothing known."""
    found = ARCHITECTURES.get(files.architecture)
    if found is None:
        raise ValueError(
            f"general.architecture of {files.files[0]} must be one of {', '.join(ARCHITECTURES)} "
            f"to load it into transformers, got {shown(files.architecture)}; Checkpoint reads the "
            "experts of any"
        )
    if f"{files.architecture}.expert_count" not in files.fields:
        raise ValueError(
            f"{files.files[0]} must be a model with experts, got {files.architecture!r} without "
            f"{files.architecture}.expert_count; load it without quantization_config"
        )
    return found


def config_of(files: GgufFiles) -> PreTrainedConfig:
    """The configuration that a file's fields say.

    Raises:
        ValueError: a field is missing, of another kind than it must be, or of no known use; or
            contradicts another one or a tensor. The message names field and file.
    """
    arch, name = architecture_of(files), files.architecture
    fields = {
        key.removeprefix(f"{name}."): value
        for key, value in files.fields.items()
        if key.startswith(f"{name}.")
    }
    for key in fields.keys() - _KNOWN - arch.integers.keys() - arch.optional.keys():
        raise ValueError(
            f"{name}.{key} of {files.files[0]} must be a field that moe_ops knows, got "
            f"{shown(fields[key])}; give from_pretrained a config that says what it means"
        )
    wanted = {key: to for key, to in arch.optional.items() if key in fields} | arch.integers
    said = {to: files.integer(f"{name}.{key}") for key, to in wanted.items()}
    heads = said["num_attention_heads"]
    size = files.integer(f"{name}.attention.key_length", said["hidden_size"] // heads)
    vocabulary = files.entries.get("token_embd.weight")
    if vocabulary is None:
        raise ValueError(f"token_embd.weight must be in {files.files[0]}, got no tensor for it")
    used, count = said["num_experts_per_tok"], said[arch.integers["expert_count"]]
    if used > count:
        raise ValueError(
            f"{name}.expert_used_count of {files.files[0]} must be at most {count}, the number of "
            f"experts, got {used}"
        )
    layers = {tensor.split(".")[1] for tensor in files.entries if tensor.startswith("blk.")}
    for key, value in (
        ("block_count", len(layers)),
        ("attention.value_length", size),
        ("rope.dimension_count", size),
        ("vocab_size", vocabulary.shape[0]),
    ):
        if files.integer(f"{name}.{key}", value) != value:
            raise ValueError(
                f"{name}.{key} of {files.files[0]} must be {value}, as the file's tensors and "
                f"transformers' model have it, got {fields[key]}"
            )
    tokens = ((f"tokenizer.ggml.{name}_token_id", name) for name in ("bos", "eos", "padding"))
    ids = {to: files.fields[key] for key, to in tokens if type(files.fields.get(key)) is int}
    config = AutoConfig.for_model(
        arch.model_type,
        **said,
        **arch.constants,
        head_dim=size,
        vocab_size=vocabulary.shape[0],
        rms_norm_eps=_number(files, f"{name}.attention.layer_norm_rms_epsilon"),
        rope_parameters=_rope(files, fields),
        tie_word_embeddings="output.weight" not in files.entries,
        bos_token_id=ids.get("bos"),
        eos_token_id=ids.get("eos"),
        pad_token_id=ids.get("padding"),
    )
    config.dtype = torch.bfloat16  # where the call names none: blocks have no dtype of their own
    return config


def _rope(files: GgufFiles, fields: dict[str, Any]) -> dict[str, Any]:
    """What fields say of positions, in transformers' words."""
    name = files.architecture
    found: dict[str, Any] = {"rope_theta": _number(files, f"{name}.rope.freq_base")}
    kind = fields.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(
            f"{name}.rope.scaling.type of {files.files[0]} must be 'none', 'linear' or 'yarn', "
            f"got {shown(kind)}"
        )
    if kind == "none":
        others = sorted(key for key in _ROPE & fields.keys() if not key.endswith(".type"))
        if others:
            raise ValueError(
                f"{name}.{others[0]} of {files.files[0]} must be beside "
                f"{name}.rope.scaling.type, got none"
            )
        return found | {"rope_type": "default"}
    found |= {"rope_type": kind, "factor": _number(files, f"{name}.rope.scaling.factor")}
    if kind == "yarn":
        key = f"{name}.rope.scaling.original_context_length"
        found["original_max_position_embeddings"] = files.integer(key)
        for key, to in _YARN.items():
            if f"rope.scaling.{key}" in fields:
                found[to] = _number(files, f"{name}.rope.scaling.{key}")
        found |= architecture_of(files).rope
    return found


def _number(files: GgufFiles, key: str) -> float:
    value = files.fields.get(key)
    if type(value) is not float or not 0 < value < float("inf"):
        raise ValueError(
            f"{key} of {files.files[0]} must be a positive number, got {shown(value)}"
        )
    return float(f"{value:.7g}")  # of an fp32 number, as it was written


class Names:
    """The tensors of a file under the names of transformers' model.

    Args:
        files: whose entries get these names.

    Raises:
        ValueError: a tensor has no known name, or one has two.
    """

    def __init__(self, files: GgufFiles) -> None:
        self.files, arch = files, architecture_of(files)
        self._heads: dict[str, int] = {}  # of attention's q and k whose rows stand in pairs
        entries: dict[str, Entry] = {}
        for tensor, entry in files.entries.items():
            name = _name(tensor, arch)
            if not name:
                raise ValueError(
                    f"{entry} must have a name that moe_ops knows of architecture "
                    f"{files.architecture!r}, got none that says which parameter it is"
                )
            if name in entries:
                raise ValueError(f"{entry} must be in the file once, got {entries[name]} too")
            of = tensor.split(".")[-2]
            if of.endswith("_inp_shexp"):  # a vector or a matrix of one row
                entry = replace(entry, shape=(1, entry.shape[-1]))
            if of in arch.pairs:
                of_k = "_kv" if of == "attn_k" else ""
                key = f"{files.architecture}.attention.head_count{of_k}"
                self._heads[name] = files.integer(key)
            entries[name] = entry
        files.entries = entries

    def in_order(self, name: str, values: Tensor) -> Tensor:
        """The values of a parameter in the order of transformers' rows."""
        heads = self._heads.get(name)
        if heads is None:
            return values
        return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def state_dict(self) -> dict[str, Any]:
        """What transformers loads: tensors that are read when they are asked for."""
        return {name: _Lazy(self, name) for name in self.files.entries}


class _Lazy:
    """A tensor in a file; transformers takes all of it, `tensor[...]`."""

    def __init__(self, names: Names, name: str) -> None:
        self.names, self.name = names, name
        self.shape = names.files.entries[name].shape

    def __getitem__(self, index: Any) -> Tensor:
        return self.names.in_order(self.name, self.names.files.read(self.name))[index]


def _name(tensor: str, arch: Architecture) -> str:
    """The model's name of a tensor; "" if it has none."""
    match = re.fullmatch(rf"(?:blk\.(\d+)\.)?([^.]+)\.({'|'.join(_ROLES)})", tensor)
    if match is None:
        return ""
    layer, part, role = match.groups()
    name = (_OUTSIDE if layer is None else arch.layer).get(part)
    if name is None:
        return ""
    name = name if layer is None else f"model.layers.{layer}.{name}"
    return name if part in arch.bare else f"{name}.{role}"


_OF_THE_HUB = [
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
]


def _files(path: Any, kwargs: dict[str, Any]) -> list[str]:
    """The files that a call of `from_pretrained` names: those that are there, or on the Hub."""
    hub = {name: kwargs[name] for name in _OF_THE_HUB if name in kwargs}
    parts = parts_of(os.fspath(kwargs["gguf_file"]))
    return [part if os.path.isfile(part) else cached_file(path, part, **hub) for part in parts]


def load(original: Callable, cls: type, path: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A model of transformers from a GGUF file, whose `from_pretrained` is ``original``."""
    checkpoint = Checkpoint(_files(path, kwargs))
    assert isinstance(checkpoint.files, GgufFiles)
    if not isinstance(kwargs.get("config"), PreTrainedConfig):
        kwargs["config"] = config_of(checkpoint.files)
    given = copy.copy(kwargs["quantization_config"])
    names = Names(checkpoint.files)
    given.gguf = checkpoint, names
    gone = (*_OF_THE_HUB, "gguf_file", "quantization_config")
    kwargs = {name: value for name, value in kwargs.items() if name not in gone}
    state = names.state_dict()
    # with a state_dict it asks for no path, and does not take the file for one of its own
    loaded = original(cls, None, *args, state_dict=state, quantization_config=given, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.name_or_path = model.config._name_or_path = str(path)
    return loaded


def choose(original: Callable, cls: type, path: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An auto class's `from_pretrained`: it takes the model's class from the configuration."""
    if not isinstance(kwargs.get("config"), PreTrainedConfig):
        kwargs["config"] = config_of(GgufFiles(_files(path, kwargs)))
    return original(cls, path, *args, **kwargs)
