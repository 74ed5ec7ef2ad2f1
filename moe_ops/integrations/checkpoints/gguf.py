"""GGUF files: the header, checked against the format and against the file, and their tensors.

A file is "GGUF", its version, the numbers of tensors and of fields, the fields, a description of
each tensor, and the data. As ggml has it, tensors lie in the order in which they are described,
one after the other, each padded with zeros to the alignment: a tensor that is described as lying
elsewhere would get bytes that are not its own.
"""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.integrations.checkpoints import ggml
from moe_ops.integrations.checkpoints.common import shown
from moe_ops.integrations.checkpoints.files import TensorFiles, check_files
from moe_ops.integrations.checkpoints.headers import Entry
from moe_ops.integrations.checkpoints.json_files import check_regular

SUFFIX = ".gguf"
_DAMAGED = "the file is damaged; download it again"
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS |= {12: "d"}
_STRING, _ARRAY = 8, 9
_UINT32 = 4
_PART = re.compile(rf"(.*)-(\d{{5}})-of-(\d{{5}}){re.escape(SUFFIX)}", re.DOTALL)
_EXPERT = re.compile(r"^(blk\.\d+)\.(ffn_(?:gate|up|down))\.([0-9]{1,9})\.")
_REMOVED = "4, 5, 31 to 33 and 36 to 38"  # of ggml's types
# a general.type other than "model", or an architecture, and what the file then is
_NO_MODELS = {
    "adapter": "a LoRA adapter",
    "imatrix": "an importance matrix",
    "mmproj": "a multimodal projector",
    "clip": "a multimodal projector",
    "vocab": "a vocabulary",
}


class GgufHeader(NamedTuple):
    """What a file says: its fields, and its tensors in their order."""

    fields: dict[str, Any]  # numbers, strings, tuples of numbers; None for arrays of strings
    entries: list[Entry]


def is_gguf(path: Any) -> bool:
    """Whether a path, or the first of a list, is that of a GGUF file."""
    first = path[0] if isinstance(path, (list, tuple)) and path else path
    return isinstance(first, (str, Path)) and Path(first).suffix == SUFFIX


class GgufFiles(TensorFiles):
    """The tensors of one GGUF file, or of one that is split, by their names in it.

    Blocks are bytes, (..., N, bytes of a row), and `Entry.blocks` says of which type. Numbers of a
    matrix beside it have the name of their role: ``blk.0.ffn_up_exps.scale`` is
    ``blk.0.ffn_up_exps.weight_scale_2``. Experts that old files have one by one are named like
    stacks: ``blk.0.ffn_up.3.weight`` is ``blk.0.3.ffn_up_exps.weight``.

    Args:
        path: a file; of a split one (``name-00001-of-00003.gguf``) any, or a list of all.

    Attributes:
        fields: what the (first) file says of the model, by name.
        architecture: general.architecture.
        made: what reads an entry that stands for no tensor of a file but is made of some.

    Raises:
        ValueError: there is no such file; it is damaged, of another version or byte order, or no
            model's; a part is missing or of another file; or the number of experts is not what it
            says. The message names tensor and file.
    """

    def __init__(self, path: str | Path | list[str] | list[Path]):
        paths = path if isinstance(path, (list, tuple)) else [*map(Path, parts_of(str(path)))]
        self.files, self.is_whole = [Path(p) for p in paths], False
        check_files(self.files, str(path))
        self.unknown, self.repeated, self.metadata = {}, [], {}
        self.entries = {}
        self.made: dict[str, Callable[[], Tensor]] = {}
        headers = [read_header(file) for file in self.files]
        self.fields = headers[0].fields
        self.architecture = self.text("general.architecture")
        for number, (file, header) in enumerate(zip(self.files, headers, strict=True)):
            self._check_part(file, header, number, len(headers))
            for entry in header.entries:
                name = re.sub(r"\.scale$", f".{ggml.FACTOR}", entry.name)
                name = _EXPERT.sub(r"\1.\3.\2_exps.", name)
                if name in self.entries:
                    raise ValueError(
                        f"{entry} must be in the checkpoint once, got {self.entries[name]} too"
                    )
                self.entries[name] = entry
        self._check_kind()
        self._check_experts()

    def text(self, key: str) -> str:
        """A field that must be a string."""
        value = self.fields.get(key)
        if not isinstance(value, str):
            raise ValueError(f"{key} of {self.files[0]} must be a string, got {shown(value)}")
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A field that must be an integer of at least 1 or 0; it may be missing if there is a
        default.
        """
        value = self.fields.get(key, default)
        if type(value) is not int or value < least:
            what = "a positive integer" if least else "an integer of at least 0"
            raise ValueError(f"{key} of {self.files[0]} must be {what}, got {shown(value)}")
        return value

    def read(
        self,
        name: str,
        device: torch.device | str = "cpu",
        count: int = 1,
        ids: range = range(1),
    ) -> Tensor:
        """As that of `TensorFiles`, and entries that are ``made``."""
        make = self.made.get(name)
        return super().read(name, device, count, ids) if make is None else make().to(device)

    def _check_part(self, file: Path, header: GgufHeader, number: int, count: int) -> None:
        said = [header.fields.get(f"split.{name}") for name in ("no", "count")]
        if (count > 1 or said[1] not in (None, 0, 1)) and said != [number, count]:
            raise ValueError(
                f"split.no and split.count of {file} must be {number} and {count}, as its name "
                f"and the files beside it say, got {said[0]} and {said[1]}; download all parts"
            )
        if number == count - 1 > 0:
            total = len(self.entries) + len(header.entries)
            said_total = self.fields.get("split.tensors.count")
            if said_total not in (None, total):
                raise ValueError(
                    f"split.tensors.count of {self.files[0]} must be {total}, as many tensors as "
                    f"its parts hold, got {shown(said_total)}"
                )

    def _check_kind(self) -> None:
        kind = self.fields.get("general.type", "model")
        other = _NO_MODELS.get(self.architecture)
        if kind != "model" or other:
            other = other or _NO_MODELS.get(str(kind), "something else")
            raise ValueError(
                f"{self.files[0]} must hold a model, got {other} (general.type {shown(kind)}, "
                f"general.architecture {shown(self.architecture)})"
            )

    def _check_experts(self) -> None:
        key = f"{self.architecture}.expert_count"
        for name, entry in self.entries.items():
            if "_exps." not in name:
                continue
            number = re.match(r"blk\.\d+\.([0-9]+)\.", name)
            if number:
                if int(number[1]) >= self.integer(key):
                    raise ValueError(
                        f"{entry} must be of the experts 0 to {self.fields[key] - 1}, as {key} "
                        "says"
                    )
                continue
            if name.endswith("_exps.weight") and len(entry.shape) != 3:
                raise ValueError(
                    f"{entry} must be (experts, rows, columns), got {len(entry.shape)} "
                    f"dimensions; {_DAMAGED}"
                )
            if entry.shape[0] != self.integer(key):
                raise ValueError(
                    f"{entry} must have {self.fields[key]} experts, as {key} says, got "
                    f"{entry.shape[0]}"
                )


def parts_of(path: str) -> list[str]:
    """The paths of all files of a split one, of which this is one; of another file its own.

    Raises:
        ValueError: its name counts fewer parts than it is the number of.
    """
    match = _PART.fullmatch(path)
    if match is None:
        return [path]
    start, number, count = match.groups()
    if not 1 <= int(number) <= int(count):
        raise ValueError(
            f"{path} must be one of the parts 1 to {int(count)} that its name counts, got "
            f"{int(number)}; give the file the name that it was split to"
        )
    return [f"{start}-{i + 1:05}-of-{count}{SUFFIX}" for i in range(int(count))]


class _Reader:
    """Reads numbers and strings of a header one after the other. The file is not mapped: the
    system ends a process that reads beyond the end of one that was cut meanwhile.
    """

    def __init__(self, file: Path, data: io.BufferedReader, size: int):
        self.file, self.data, self.size, self.at = file, data, size, 0

    def take(self, count: int) -> bytes:
        found = self.data.read(count) if count <= self.size - self.at else b""
        if len(found) < count:
            raise ValueError(
                f"{self.file} must go on after byte {self.at} of its header for {count} bytes, "
                f"got {self.size} bytes in all: the file is truncated or damaged; download "
                "it again"
            )
        self.at += count
        return found

    def numbers(self, kinds: str) -> tuple:
        return struct.unpack(f"<{kinds}", self.take(struct.calcsize(f"<{kinds}")))

    def string(self, what: str) -> str:
        (length,) = self.numbers("Q")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{what} of {self.file} must be UTF-8, got {error}; {_DAMAGED}"
            ) from error

    def value(self, key: str, kind: int) -> Any:
        """A field's value. None for an array of strings: a vocabulary is not for us."""
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            of, count = self.numbers("IQ")
            if of in _NUMBERS:
                self.check_count(key, count, struct.calcsize(_NUMBERS[of]))
                return self.numbers(f"{count}{_NUMBERS[of]}")
            if of == _STRING:
                self.check_count(key, count, 8)
                for _ in range(count):
                    self.take(self.numbers("Q")[0])
                return None
            kind = of
        raise ValueError(
            f"{key} of {self.file} must have a type that GGUF has, or be an array of such, got "
            f"type {kind}; {_DAMAGED}"
        )

    def check_count(self, what: str, count: int, least: int) -> None:
        """Raise ValueError if the file is too short for this many of these bytes each."""
        if count * least > self.size - self.at:
            raise ValueError(
                f"{what} of {self.file} must fit into the file, got {count} of at least {least} "
                f"bytes each in the {self.size - self.at} that are left: the file is "
                "truncated or damaged; download it again"
            )


def read_header(file: Path) -> GgufHeader:
    """The header of a file.

    Raises:
        ValueError: the file is no regular one; it is damaged, or of another version or byte order;
            or the tensors do not lie as the format has it. The message names tensor or field, and
            file.
    """
    check_regular(file)
    size = file.stat().st_size
    if size < 24:
        raise ValueError(f"{file} must be a GGUF file, got {size} bytes")
    with file.open("rb") as data:
        return _read(_Reader(file, data, size))


def _read(reader: _Reader) -> GgufHeader:
    file = reader.file
    magic = reader.take(4)
    if magic != b"GGUF":
        raise ValueError(f"{file} must begin with 'GGUF', got {magic!r}: it is no GGUF file")
    (version,) = reader.numbers("I")
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0 and version != 0
        raise ValueError(
            f"{file} must have version 2 or 3 of GGUF, got "
            + ("a big-endian file, whose blocks nothing says the order of" if swapped else "")
            + ("" if swapped else f"{version}")
            + "; convert the model again"
        )
    tensors, count = reader.numbers("QQ")
    reader.check_count("the fields", count, 8 + 4 + 1)
    reader.check_count("the tensors", tensors, 8 + 4 + 8 + 4 + 8)
    fields: dict[str, Any] = {}
    for _ in range(count):
        key = reader.string("the name of a field")
        if key in fields:
            raise ValueError(f"{key} must stand in {file} once, got it twice; {_DAMAGED}")
        (kind,) = reader.numbers("I")
        fields[key] = reader.value(key, kind)
        if key == "general.alignment" and kind != _UINT32:
            raise ValueError(f"{key} of {file} must be a uint32, got type {kind}; {_DAMAGED}")
    alignment = fields.get("general.alignment", 32)
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(
            f"general.alignment of {file} must be a power of two, got {alignment}; {_DAMAGED}"
        )
    described = [_tensor(reader) for _ in range(tensors)]
    entries = _placed(reader, described, alignment)
    return GgufHeader(fields, entries)


def _tensor(reader: _Reader) -> tuple[Entry, int]:
    """A tensor, and where in the data it is said to lie."""
    name = reader.string("the name of a tensor")
    where = f"{name} in {reader.file}"
    (dims,) = reader.numbers("I")
    if not 1 <= dims <= 4:
        raise ValueError(f"{where} must have 1 to 4 dimensions, got {dims}; {_DAMAGED}")
    shape = reader.numbers(f"{dims}Q")[::-1]
    number, offset = reader.numbers("IQ")
    if min(shape) < 1 or math.prod(shape) >= 2**60:
        raise ValueError(f"{where} must have elements, got shape {shape}; {_DAMAGED}")
    if number in ggml.PLAIN:
        return Entry(name, reader.file, ggml.PLAIN[number], shape, 0), offset
    block = ggml.BLOCKS.get(number)
    if block is None:
        raise ValueError(
            f"{where} must have a type that moe_ops knows, got type {number} of ggml ({_REMOVED} "
            "are no longer types of files); quantize the model again"
        )
    if shape[-1] % block.elements:
        raise ValueError(
            f"{where} must have a multiple of {block.elements} columns, one block of "
            f"{block.name}, got {shape[-1]}; {_DAMAGED}"
        )
    stored = (*shape[:-1], shape[-1] // block.elements * block.bytes)
    return Entry(name, reader.file, torch.uint8, stored, 0, block.name), offset


def _placed(reader: _Reader, described: list[tuple[Entry, int]], alignment: int) -> list[Entry]:
    """Tensors where they are in the file, if that is where they are said to be."""
    file, size = reader.file, reader.size
    begin = _check_padding(reader, reader.at, alignment, "the header")
    entries, end = [], begin
    for entry, offset in described:
        if offset != end - begin:
            raise ValueError(
                f"{entry} must lie behind the tensor before it, at byte {end - begin} of the "
                f"data, got {offset}; {_DAMAGED}"
            )
        if end + entry.bytes > size:
            raise ValueError(
                f"{entry} must end in the file, got {size} bytes instead of at least "
                f"{end + entry.bytes}: the file is truncated; download it again"
            )
        entries.append(replace(entry, begin=end))
        end = _check_padding(reader, end + entry.bytes, alignment, str(entry))
    if end < size:
        before = entries[-1] if entries else "the header"
        raise ValueError(
            f"{before} must end the file {file} at byte {end}, got {size} bytes; {_DAMAGED}"
        )
    return entries


def _check_padding(reader: _Reader, end: int, alignment: int, what: str) -> int:
    """Where what follows begins; ValueError unless zeros lie between. A file may end before."""
    begin = -(-end // alignment) * alignment
    reader.data.seek(end)
    if any(reader.data.read(min(begin, reader.size) - end)):
        raise ValueError(
            f"{what} must be followed by zeros in {reader.file} from byte {end} to {begin}, got "
            f"others; {_DAMAGED}"
        )
    return begin
