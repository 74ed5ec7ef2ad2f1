"""The header of one safetensors file, checked against the format and against the file.

A file is the header's length (8 bytes, little endian), the header (a JSON object) and the data.
The header gives the dtype and the shape of each tensor, and its range of bytes in the data. As the
format (https://github.com/huggingface/safetensors#format) has it, the ranges cover the data one
after the other: a tensor whose range began before the data or within another one would get bytes
that are not its own.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_ops.integrations.checkpoints.common import shown
from moe_ops.integrations.checkpoints.json_files import check_regular, parse_object

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "U64": torch.uint64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_LARGEST = 100_000_000  # bytes of a header, by the format


@dataclass(frozen=True)
class Entry:
    """One tensor in a file, as the file's header describes it."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # byte offset in the file
    blocks: str = ""  # of ggml: the type of those that its bytes are

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} in {self.file}"


@dataclass(frozen=True)
class Header:
    """The contents of a file by its header."""

    entries: list[Entry]
    unknown: list[str]  # names of tensors whose dtype torch lacks
    metadata: dict[str, str]


def read_header(file: Path) -> Header:
    """The header of a file.

    Raises:
        ValueError: the file is no regular one; the header is damaged or too large; or the tensors'
            ranges have other sizes than the tensors, overlap, leave bytes out, or end elsewhere
            than the file. The message names tensor and file.
    """
    check_regular(file)
    size, where = file.stat().st_size, f"the header of {file}"
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(
                f"{file} must be a safetensors file, got {size} bytes without a header"
            )
        if length > _LARGEST:
            raise ValueError(f"{where} must have at most {_LARGEST} bytes, got {length}")
        found = parse_object(f.read(length), where, unique=True)
    metadata = found.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or any(type(v) is not str for v in metadata.values()):
        raise ValueError(f"__metadata__ in {where} must hold strings, got {shown(metadata)}")
    for name, info in found.items():
        _check_info(info, f"{name} in {where}")
    data, reached, before = 8 + length, 0, "the header"
    for name in sorted(found, key=lambda name: found[name]["data_offsets"]):
        begin, end = found[name]["data_offsets"]
        if begin != reached or end < begin:
            raise ValueError(
                f"{name} in {file} must lie behind {before}, from byte {reached} of the data on, "
                f"got {begin} to {end}: the file is damaged; download it again"
            )
        reached, before = end, name
    if data + reached != size:
        raise ValueError(
            f"{before} in {file} must end with the file, at byte {size - data} of the data, got "
            f"{reached}: the file is {'truncated' if data + reached > size else 'damaged'}; "
            "download it again"
        )
    known = {name: info for name, info in found.items() if info["dtype"] in _DTYPES}
    entries = [
        Entry(
            name,
            file,
            _DTYPES[info["dtype"]],
            tuple(info["shape"]),
            data + info["data_offsets"][0],
        )
        for name, info in known.items()
    ]
    return Header(entries, [name for name in found if name not in known], metadata)


def _check_info(info: Any, where: str) -> None:
    """Raise ValueError unless a header describes a tensor so: its dtype, its shape, and as many
    bytes as it needs.
    """
    info = info if isinstance(info, dict) else {}
    for field, wanted, is_right in _FIELDS:
        if not is_right(info.get(field)):
            raise ValueError(
                f"{field} of {where} must be {wanted}, got {shown(info.get(field))}; download "
                "the file again"
            )
    begin, end = info["data_offsets"]
    dtype = _DTYPES.get(info["dtype"])
    if dtype is not None and end - begin != math.prod(info["shape"]) * dtype.itemsize:
        raise ValueError(
            f"data_offsets of {where} must span {math.prod(info['shape']) * dtype.itemsize} "
            f"bytes, as {info['dtype']} {info['shape']} has, got {begin} to {end}; download the "
            "file again"
        )


def _is_shape(value: Any) -> bool:
    """Whether it is a list of sizes that a tensor can have: the number of bytes is an int64."""
    if not isinstance(value, list) or any(type(size) is not int or size < 0 for size in value):
        return False
    counts = itertools.accumulate((max(size, 1) for size in value), operator.mul)
    return all(count < 2**60 for count in counts)


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(i) is int for i in value)


_FIELDS = (
    ("dtype", "a string", lambda value: isinstance(value, str)),
    ("shape", "a list of sizes", _is_shape),
    ("data_offsets", "[begin, end]", _is_range),
)
