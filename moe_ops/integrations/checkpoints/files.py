"""Safetensors files of a checkpoint: which tensors there are, and reading them one at a time.

Tensors are read into memory of their own, not mapped: what a process holds is then what it loaded,
and a checkpoint several times as large as the memory can be quantized while it is read.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """One tensor in a file, as the file's header describes it."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # byte offset in the file

    def __str__(self) -> str:
        return f"{self.name} in {self.file}"


class TensorFiles:
    """The tensors of safetensors files by name; only headers are read until `read`.

    Args:
        path: a folder of ``*.safetensors`` files, one such file, or a list of them.

    Raises:
        ValueError: there is none, a header is damaged, or a file is shorter than its header says.
    """

    def __init__(self, path: str | Path | list[str] | list[Path]):
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}
        self.files = _files(path)
        for file in self.files:
            self._read_header(file)

    def _read_header(self, file: Path) -> None:
        size = file.stat().st_size
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(
                    f"{file} must be a safetensors file, got {size} bytes without a header"
                )
            try:
                header = json.loads(f.read(length))
            except ValueError as error:
                raise ValueError(
                    f"{file} must have a JSON header, got a damaged one: {error}"
                ) from error
        self.metadata.update(header.pop("__metadata__", None) or {})
        for name, info in header.items():
            if info["dtype"] not in _DTYPES:
                continue  # of no use to experts, e.g. unsigned 64-bit counters
            entry = Entry(
                name,
                file,
                _DTYPES[info["dtype"]],
                tuple(info["shape"]),
                8 + length + info["data_offsets"][0],
            )
            end = 8 + length + info["data_offsets"][1]
            if end > size or end - entry.begin != math.prod(entry.shape) * entry.dtype.itemsize:
                raise ValueError(
                    f"{entry} must have {math.prod(entry.shape) * entry.dtype.itemsize} bytes "
                    f"that end at or before {size}, the file's size, got {end - entry.begin} "
                    f"that end at {end}: the file is truncated; download it again"
                )
            self.entries[name] = entry

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """One tensor, read from its file."""
        entry = self.entries[name]
        data = torch.empty(math.prod(entry.shape) * entry.dtype.itemsize, dtype=torch.uint8)
        with entry.file.open("rb") as f:
            f.seek(entry.begin)
            if data.numel() and f.readinto(data.numpy().data) != data.numel():
                raise ValueError(f"{entry} ends early: the file was changed while it was read")
        return data.view(entry.dtype).reshape(entry.shape).to(device)


def _files(path: str | Path | list) -> list[Path]:
    if isinstance(path, (list, tuple)):
        return [Path(p) for p in path]
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"path must be a folder with *.safetensors files or such a file, got {path}"
        )
    return files


def quantization_config(folder: Path) -> dict[str, Any]:
    """What a checkpoint's own files say of its quantization; {} where they say nothing.

    It stands in config.json, of multimodal models under text_config, or in ModelOpt's
    hf_quant_config.json.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    for part in (config, config.get("text_config") or {}):
        found = part.get("quantization_config") or part.get("compression_config")
        if found:
            return found
    file = folder / "hf_quant_config.json"
    if file.exists():
        return {"quant_method": "modelopt"} | json.loads(file.read_text()).get("quantization", {})
    return {}
