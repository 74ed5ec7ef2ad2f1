"""GGUF files' names of tensors, and those of transformers' models: gguf.toml as objects."""

from __future__ import annotations

import copy
import functools
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ops.integrations.checkpoints import ggml
from moe_ops.integrations.checkpoints.common import shown
from moe_ops.integrations.checkpoints.experts import Checkpoint
from moe_ops.integrations.checkpoints.gguf import GgufFiles
from moe_ops.integrations.checkpoints.headers import Entry
from moe_ops.integrations.checkpoints.weights import Source, add_tensor
from moe_ops.integrations.transformers.gguf_values import FUNCTIONS, JOINING, HeadSizes

_ROLES = ("weight", "bias", ggml.FACTOR, ggml.IGNORED)
LAYER = re.compile(r"blk\.([0-9]{1,9})\.(.+)", re.DOTALL)
# divisors of frequencies, which the configuration holds
_OF_POSITIONS = ("rope_freqs", "rope_factors_long", "rope_factors_short")


@dataclass(frozen=True)
class Architecture:
    """What files call the parts of a model that transformers has, as gguf.toml says.

    ``outside``, ``layer``: names of tensors, without their role. ``bare``: those whose parameters
    have no role in their names. ``values``: names of the functions that make parameters of
    tensors, one after the other. ``joined``: parameters that are made ``of`` several tensors
    ``by`` a function.

    Fields of files, and their names in the configuration, are ``integers`` and ``numbers`` that
    must be there, unless ``constants`` has a value for those that are not; ``booleans``, false by
    default; and ``optional`` integers, on which no weight depends. ``constants``, and ``rope`` of
    its positions: what files take for granted. ``fixed``: fields that have one value if they are
    there, ``silent``: any. ``present``: what is true if some layer has this tensor.
    ``partial_rotary``: positions may rotate a part of each head. ``derive``: a function of
    gguf_config.py for the rest, which takes ``variant`` where the file's model is another one.
    """

    model_type: str
    outside: dict[str, str] = field(default_factory=dict)
    layer: dict[str, str] = field(default_factory=dict)
    bare: tuple[str, ...] = ()
    values: dict[str, list[str]] = field(default_factory=dict)
    joined: dict[str, dict[str, Any]] = field(default_factory=dict)
    integers: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    booleans: dict[str, str] = field(default_factory=dict)
    optional: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, int] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    present: dict[str, str] = field(default_factory=dict)
    partial_rotary: bool = False
    derive: str = ""
    variant: dict[str, str] = field(default_factory=dict)


_DATA = tomllib.loads((Path(__file__).parent / "gguf.toml").read_text(encoding="utf-8"))
ARCHITECTURES = {
    name: Architecture(
        **row
        | {part: _DATA[part] | row.get(part, {}) for part in ("outside", "layer", "integers")}
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


def number_of_layers(files: GgufFiles) -> int:
    """Layers of the model; those that only predict further tokens, which are behind them in files
    and which transformers leaves out, are none.
    """
    count = files.integer(f"{files.architecture}.block_count")
    key = f"{files.architecture}.nextn_predict_layers"
    further = files.integer(key, 0, least=0)
    if further >= count:
        raise ValueError(f"{key} of {files.files[0]} must be less than {count}, got {further}")
    return count - further


def name_tensors(checkpoint: Checkpoint) -> dict[str, Any]:
    """Give the tensors of a file the names of transformers' model.

    Returns:
        What transformers loads: tensors that are read when they are asked for.

    Raises:
        ValueError: a tensor has no known name, or one has two; or cannot be what its name says.
    """
    files = checkpoint.files
    assert isinstance(files, GgufFiles)
    arch, layers = architecture_of(files), number_of_layers(files)
    joined = {part: (to, row) for to, row in arch.joined.items() for part in row["of"]}
    entries: dict[str, Entry] = {}
    sources: dict[str, dict[str, Source]] = {}  # of parameters that functions make, by part
    for tensor, entry in files.entries.items():
        layer, part, role = _parts_of(tensor, arch)
        if part in _OF_POSITIONS or (layer and int(layer) >= layers):
            continue
        base = joined[part][0] if part in joined else _name(layer, part, arch)
        if not base:
            raise ValueError(
                f"{entry} must have a name that moe_ops knows of architecture "
                f"{files.architecture!r}, got none that says which parameter it is"
            )
        base = f"model.layers.{layer}.{base}" if layer else base
        if part in joined or part in arch.values:
            own = "bias" if role == "bias" else "weight"
            name = base if part in arch.bare else f"{base}.{own}"
            source = sources.setdefault(name, {}).setdefault(part, {})
            add_tensor(source, "weight" if role == own else role, tensor, name)
            continue
        if part in arch.bare:
            name = base
        elif base.endswith(".gate_up_proj"):  # a parameter of experts, as it is
            name = base if role == "weight" else f"{base}_{role}"
        else:
            name = f"{base}.{role}"
        if name in entries:
            raise ValueError(f"{entry} must be in the file once, got {entries[name]} too")
        entries[name] = entry
    before = copy.copy(checkpoint)
    before.files = copy.copy(files)
    for name, parts in sources.items():
        makes = _Made(before, name, parts, arch, _sizes(files))
        if name in entries:
            raise ValueError(f"{makes.entry} must be in the file once, got {entries[name]} too")
        entries[name], files.made[name] = makes.entry, makes.values
    files.entries = entries
    return {name: _Lazy(files, name) for name in entries}


class _Made:
    """A parameter that functions make of tensors of a file."""

    def __init__(
        self,
        checkpoint: Checkpoint,  # by the file's names
        name: str,
        parts: dict[str, Source],
        arch: Architecture,
        sizes: HeadSizes,
    ) -> None:
        self.checkpoint, self.name = checkpoint, name
        row = next((row for row in arch.joined.values() if parts.keys() & {*row["of"]}), None)
        first = next(iter(parts.values()))
        entry = checkpoint.files.entries[next(iter(first.values()))]
        wanted = row["of"] if row else [*parts]
        missing = [part for part in wanted if "weight" not in parts.get(part, {})]
        if missing or len(parts) > len(wanted):
            raise ValueError(
                f"{entry} must be beside the tensors that are one with it in {name}, got none of "
                f"the name {missing[0]}"
                if missing
                else f"{entry} must be in the file once"
            )
        self.sources = [parts[part] for part in wanted]
        steps = [JOINING[row["by"]]] if row else [FUNCTIONS[f] for f in arch.values[wanted[0]]]
        self.steps = [functools.partial(step, sizes) for step in steps]
        shapes = [self._shape(source) for source in self.sources]
        try:
            made = self._run(*(torch.empty(shape, device="meta") for shape in shapes))
        except (RuntimeError, IndexError, ValueError) as error:
            raise ValueError(
                f"{entry} must have the shape of {name}, got {shapes[0]}, which the file's "
                f"numbers of heads do not fit: {error}"
            ) from error
        self.entry = Entry(entry.name, entry.file, torch.float32, tuple(made.shape), 0)

    def _shape(self, source: Source) -> tuple[int, ...]:
        entry = self.checkpoint.files.entries[source["weight"]]
        *rows, size = entry.shape
        return (*rows, ggml.columns(entry.blocks, size) if entry.blocks else size)

    def _run(self, *tensors: Tensor) -> Tensor:
        for step in self.steps:
            tensors = (step(*tensors),)
        return tensors[0]

    def values(self) -> Tensor:
        """The parameter, in fp32."""
        return self._run(*[self._read(source) for source in self.sources]).contiguous()

    def _read(self, source: Source) -> Tensor:
        if not self.checkpoint.files.entries[source["weight"]].blocks:
            return self.checkpoint.files.read(source["weight"]).float()
        weight = self.checkpoint.plan(self.name, ((source,),), values_only=True)
        values = self.checkpoint.load(weight, dtype=torch.float32).dequantize()
        return values if weight.stacked else values[0]


class _Lazy:
    """A tensor in a file; transformers takes all of it, `tensor[...]`."""

    def __init__(self, files: GgufFiles, name: str) -> None:
        self.files, self.name, self.shape = files, name, files.entries[name].shape

    def __getitem__(self, index: Any) -> Tensor:
        return self.files.read(self.name)[index]


def _sizes(files: GgufFiles) -> HeadSizes:
    def number(key: str) -> int:
        value = files.fields.get(f"{files.architecture}.{key}", 0)
        return value if type(value) is int else 0

    values = number("ssm.time_step_rank")
    return HeadSizes(
        number("attention.head_count"),
        number("attention.head_count_kv"),
        number("ssm.group_count"),
        values,
        number("ssm.state_size"),
        number("ssm.inner_size") // max(1, values),
    )


def _parts_of(tensor: str, arch: Architecture) -> tuple[str, str, str]:
    """Layer, name within it with the expert's number before it, and role of a tensor; "" if it
    has none.
    """
    match = LAYER.fullmatch(tensor)
    layer, name = match.groups() if match else ("", tensor)
    part, _, role = name.rpartition(".")
    if role in _ROLES:
        return layer, part, role
    return layer, name, "weight" if name in arch.bare else ""


def _name(layer: str, part: str, arch: Architecture) -> str:
    """The model's name of a tensor within its layer, or outside of layers; "" if it has none."""
    expert, _, of_all = part.rpartition(".") if part[:1].isdigit() else ("", "", part)
    name = (arch.layer if layer else arch.outside).get(of_all, "")
    return name.replace(".experts.", f".experts.{expert}.") if expert and name else name
