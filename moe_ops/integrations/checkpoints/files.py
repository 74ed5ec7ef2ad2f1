"""Safetensors files of a checkpoint: which tensors there are, and reading them one at a time.

A folder's ``model.safetensors.index.json`` says which tensor lies in which file. It is the truth:
files and tensors that it does not name are left out, and what it names must be there. Without an
index all files of the folder count, and none may repeat a tensor of another.

Tensors are read into memory of their own, not mapped: what a process holds is then what it loaded,
and a checkpoint several times as large as the memory can be quantized while it is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ops.integrations.checkpoints import reading
from moe_ops.integrations.checkpoints.common import shown
from moe_ops.integrations.checkpoints.headers import Entry, read_header
from moe_ops.integrations.checkpoints.json_files import check_regular, read_object
from moe_ops.integrations.checkpoints.reading import Piece

INDEX = "model.safetensors.index.json"
_CONFIGS = ("quantization_config", "compression_config", "quantization")  # the last is MLX's
_OTHER_FILES = {  # where quantization_config stands but in config.json, and its quant_method
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}


class TensorFiles:
    """The tensors of safetensors files by name; only headers are read until `read`.

    Args:
        path: a folder of ``*.safetensors`` files; one such file or a list of them, which are taken
            as they are given (an index beside them that names all of them still says which tensor
            is in which); or an index.

    Attributes:
        files: those that count.
        is_whole: whether they are a whole checkpoint, by its folder or index.
        entries: the tensors by name.
        unknown: names of tensors whose dtype torch lacks, with their files.
        repeated: tensors that lie in one more file than the one in which the index has them; the
            index's counts.

    Raises:
        ValueError: there is no file, or one that is no regular file; the index is damaged, names
            a file or tensor that is not there, or a file outside its folder; files are numbered
            and one is missing; two hold the same tensor and no index says which counts; or a
            header is damaged, as `read_header` has it. The message names tensor and file.
    """

    def __init__(self, path: str | Path | list[str] | list[Path]):
        self.entries: dict[str, Entry] = {}
        self.unknown: dict[str, Path] = {}
        self.repeated: list[Entry] = []
        self.metadata: dict[str, str] = {}
        self.files, index = _files_of(path)
        self.is_whole = isinstance(path, (str, Path)) and self.files != [Path(path)]
        listed = None if index is None else read_index(index)
        for file in self.files:
            header = read_header(file)
            self.metadata |= header.metadata
            self.unknown |= dict.fromkeys(header.unknown, file)
            for entry in header.entries:
                self._add(entry, listed)
        given = set(self.files)
        for name, file in (listed or {}).items():
            if file in given and name not in self.entries and name not in self.unknown:
                raise ValueError(
                    f"{file} must hold {name}, which {index} says it does, got a file without it; "
                    "download both again"
                )

    def _add(self, entry: Entry, listed: dict[str, Path] | None) -> None:
        if listed is None and entry.name in self.entries:
            raise ValueError(
                f"{entry.name} must be in one file, got it in {self.entries[entry.name].file} and "
                f"in {entry.file}, and no {INDEX} says which counts; remove the one that is out "
                "of date"
            )
        if listed is None or listed.get(entry.name) == entry.file:
            self.entries[entry.name] = entry
        elif entry.name in listed:
            self.repeated.append(entry)

    def read(
        self,
        name: str,
        device: torch.device | str = "cpu",
        count: int = 1,
        ids: range = range(1),
    ) -> Tensor:
        """One tensor, read from its file; of `count` pieces as long along its first dimension
        those of `ids` alone, one after the other.
        """
        entry = self.entries[name]
        piece = entry.bytes // count
        data = reading.empty((len(ids) * piece,), torch.uint8)
        runs = [ids] if ids.step == 1 else [range(i, i + 1) for i in ids]
        rest = data.numpy()
        pieces = []
        for run in runs:
            part, rest = rest[: len(run) * piece], rest[len(run) * piece :]
            pieces.append(Piece(entry, entry.begin + run.start * piece, part))
        reading.read_pieces(pieces)
        shape = entry.shape
        if count > 1:
            shape = (shape[0] // count * len(ids), *shape[1:])
        return data.view(entry.dtype).reshape(shape).to(device)

    def read_all(self, names: Iterable[str]) -> list[Tensor]:
        """These tensors, on the CPU; for many small ones."""
        entries = [self.entries[name] for name in names]
        tensors = [torch.empty(e.shape, dtype=e.dtype, device="cpu") for e in entries]
        data = [t.view(-1).view(torch.uint8).numpy() for t in tensors]
        reading.read_pieces(Piece(e, e.begin, d) for e, d in zip(entries, data, strict=True))
        return tensors

    def pieces(self, names: Iterable[str], into: Tensor) -> list[Piece]:
        """Pieces that read the i-th of these tensors into into[i], which is contiguous."""
        entries = (self.entries[name] for name in names)
        places = into.view(len(into), -1).view(torch.uint8).numpy()
        return [Piece(e, e.begin, place) for e, place in zip(entries, places, strict=True)]


def _files_of(path: str | Path | list) -> tuple[list[Path], Path | None]:
    """The files that count, and the index that says which tensor is in which."""
    if not isinstance(path, (str, os.PathLike, list, tuple)):
        raise ValueError(f"path must be a folder, a file or a list of files, got {path!r}")
    path = [Path(p) for p in path] if isinstance(path, (list, tuple)) else Path(path)
    if path == []:
        raise ValueError("path must be a folder, a file or a list of files, got an empty list")
    if isinstance(path, list) or path.suffix == ".safetensors" and not path.is_dir():
        files = path if isinstance(path, list) else [path]
        check_files(files, "path")
        named = (i for i in _indices(files[0].parent) if set(files) <= set(read_index(i).values()))
        return files, next(named, None)
    index = path if path.suffix == ".json" else _index_of(path)
    if index is not None:
        files = sorted(set(read_index(index).values()))
        check_files(files, str(index))
        return files, index
    files = sorted(path.glob("*.safetensors"))
    if not files:
        others = ", ".join(sorted([file.name for file in path.glob("*.gguf")]))
        has = f", which has {others}: name one of them" if others else ""
        has = has or ("" if path.exists() else ", which does not exist")
        raise ValueError(
            "path must be a folder with *.safetensors files, or such a file or a .gguf file, got "
            f"{path}{has}"
        )
    _check_numbers(files)
    return files, None


def check_files(files: Iterable[Path], named_by: str) -> None:
    """Raise ValueError for files that are not there."""
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ValueError(
            f"all files that {named_by} names must be there, got none at "
            f"{', '.join(missing[:4])}{more}; download them"
        )


def _indices(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors.index*.json"))


def _index_of(folder: Path) -> Path | None:
    """The index of a folder, if it has one."""
    if (folder / INDEX).is_file():
        return folder / INDEX
    found = [file for file in _indices(folder) if file.name.endswith(".safetensors.index.json")]
    if len(found) > 1:
        raise ValueError(
            f"{folder} must have {INDEX} or one other index, got "
            f"{', '.join(file.name for file in found)}; give the one that counts as path"
        )
    return found[0] if found else None


def read_index(index: Path) -> dict[str, Path]:
    """The file of each tensor; ValueError if the index is damaged, or names files outside its
    folder.
    """
    check_regular(index)
    listed = read_object(index, unique=True).get("weight_map")
    is_map = isinstance(listed, dict) and all(isinstance(n, str) for n in listed.values())
    if not listed or not is_map:
        raise ValueError(
            f"weight_map of {index} must be an object of tensors and the files that hold them, "
            f"got {shown(listed)}; download it again"
        )
    paths = {}
    for name in set(listed.values()):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(
                f"weight_map of {index} must name files in its folder, got {name!r}; put the file "
                "there, or a link to it"
            )
        paths[name] = index.parent / name
    return {tensor: paths[name] for tensor, name in listed.items()}


def _check_numbers(files: list[Path]) -> None:
    """Raise ValueError if one of ``model-00001-of-00003.safetensors`` and so on is missing."""
    found: dict[tuple[str, int], set[int]] = {}
    for file in files:
        match = re.fullmatch(r"(.*?)(\d+)-of-(\d+)", file.stem)
        if match:
            key = match.group(1), int(match.group(3))
            found.setdefault(key, set()).add(int(match.group(2)))
    for (start, count), numbers in found.items():
        first = 0 if 0 in numbers else 1
        missing = sorted(set(range(first, first + count)) - numbers)
        if missing:
            raise ValueError(
                f"{files[0].parent} must have {count} files {start}*-of-{count}.safetensors, got "
                f"none of number {', '.join(map(str, missing[:8]))}; download them"
            )


def number_of_experts(folder: Path) -> int | None:
    """The number of experts of a layer by config.json; None if that is not certain."""
    config = read_object(folder / "config.json")
    if quantization_config(folder)[0].get("moe_sparsity_config"):
        return None  # another number in each layer
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    said = {c[name] for c in _parts(config) for name in names if isinstance(c.get(name), int)}
    return said.pop() if len(said) == 1 else None


def _parts(config: dict) -> Iterable[dict]:
    """A model's configuration and those of its parts, e.g. its text_config, outermost first."""
    parts = [config]
    for part in parts:
        parts += [
            p
            for name, p in part.items()
            if isinstance(p, dict) and name.endswith("_config") and name not in _CONFIGS
        ]
    return parts


def quantization_config(folder: Path) -> tuple[dict[str, Any], Path]:
    """What a checkpoint's own files say of its quantization, {} where they say nothing; and the
    file that says it.

    It stands in config.json, of multimodal models in that of a part such as text_config, or in a
    file of the library that quantized: ModelOpt's hf_quant_config.json, AutoGPTQ's
    quantize_config.json, AutoAWQ's quant_config.json.
    """
    file = folder / "config.json"
    for part in _parts(read_object(file)):
        for name in _CONFIGS:
            if part.get(name):
                return _object(part[name], f"{name} of {file}"), file
    for other, method in _OTHER_FILES.items():
        found = read_object(folder / other)
        if found:
            said = _object(found.get("quantization", found), f"quantization of {folder / other}")
            return {"quant_method": method} | said, folder / other
    return {}, file


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {shown(value)}")
    return value
