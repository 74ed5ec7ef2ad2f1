"""Where caches lie, and which of their files this process uses.

The caches find their entries by digests of what they were compiled from, so that entries can be
copied into a folder that has others.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from moe_ops import environment
from moe_ops.bundle.archive import Refusal
from moe_ops.kernels import launch

_GROUP = "__grp__"  # what names of Triton's lists of files begin with; they hold absolute paths


class CachePlace(NamedTuple):
    """A folder of a cache, and how its entries lie in it."""

    folder: Callable[[], Path]
    parts: int  # of the path of a file in it
    entry_parts: int  # of the path of an entry, which is a file, or a folder that appears whole


def inductor_folder() -> Path:
    """Where Inductor keeps what it compiled."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    return Path(cache_dir())


def triton_folder() -> Path:
    """Where Triton keeps what it compiled, by the rules of Triton, which is not imported."""
    named = os.environ.get("TRITON_CACHE_DIR")
    return Path(named) if named else _default_triton_folder()


def _default_triton_folder() -> Path:
    return Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")


def _objects_folder() -> Path:
    return environment.cache_folder() / "cutlass"


def _deep_gemm_folder() -> Path:
    return Path(os.environ.get("DG_JIT_CACHE_DIR") or Path.home() / ".deep_gemm", "cache")


PLACES = {
    "inductor": CachePlace(inductor_folder, 2, 2),
    "triton": CachePlace(triton_folder, 2, 1),
    "objects": CachePlace(_objects_folder, 1, 1),
    "deep_gemm": CachePlace(_deep_gemm_folder, 2, 1),
}


def used() -> dict[str, bytes]:
    """The files of all places that this process uses, by their names in a bundle.

    DeepGEMM does not tell which of its kernels it uses: all of its folder are taken.
    """
    mapped = _mapped()
    files = {f"triton/{e.name}/{f.name}": f for e in _triton_entries(mapped) for f in _files(e)}
    if "torch._inductor.codecache" in sys.modules:
        root = inductor_folder()
        for path in {*_below(root, mapped), *_probes(root)}:
            if len(path.relative_to(root).parts) == PLACES["inductor"].parts:
                files[f"inductor/{path.relative_to(root).as_posix()}"] = path
    files |= {f"objects/{path.name}": path for path in _below(_objects_folder(), mapped)}
    if "deep_gemm" in sys.modules:
        for entry in _folders(_deep_gemm_folder()):
            files |= {f"deep_gemm/{entry.name}/{path.name}": path for path in _files(entry)}
    return {
        name: _without_folder(path, path.read_bytes())
        for name, path in sorted(files.items())
        if path.is_file()
    }


def content_at(name: str, content: bytes, folder: Path) -> bytes:
    """The content of a file of a bundle, for an entry that will lie in `folder`.

    Raises:
        Refusal: it is a list of files, and names one that lies elsewhere.
    """
    if not _is_group(name):
        return content
    try:
        paths = json.loads(content)["child_paths"]
        outside = [
            name
            for name in paths.values()
            if os.path.basename(name) != name or name in ("", ".", "..")
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"its member {name!r} is no list of files") from error
    if outside:
        raise Refusal(f"its member {name!r} names {outside[0]!r}, which lies elsewhere")
    return _group({child: str(folder / name) for child, name in paths.items()})


def _without_folder(path: Path, content: bytes) -> bytes:
    """The content of a file, for a bundle: Triton's lists of files without the folder."""
    if not _is_group(path.name):
        return content
    paths = json.loads(content)["child_paths"]
    return _group({child: os.path.basename(where) for child, where in paths.items()})


def _is_group(name: str) -> bool:
    return name.rpartition("/")[2].startswith(_GROUP)


def _group(paths: dict[str, str]) -> bytes:
    return json.dumps({"child_paths": paths}).encode()


def _triton_entries(mapped: set[Path]) -> set[Path]:
    """The folders of the kernels that this process has compiled or loaded, and of the libraries
    through which Triton launches them.
    """
    # Inductor sets TRITON_CACHE_DIR when it first compiles a kernel: earlier ones lie elsewhere
    roots = list(dict.fromkeys([triton_folder(), _default_triton_folder()]))
    entries: set[Path] = set()
    for root in roots:
        entries |= {path.parent for path in _below(root, mapped) if path.parent.parent == root}
    for key in _triton_keys():
        folders = [root / key for root in roots]
        entries |= set([folder for folder in folders if folder.is_dir()][:1])
    return entries


def _triton_keys() -> set[str]:
    """The names of the folders of all kernels that were compiled or loaded by Triton, ours and
    those of others.
    """
    if "triton.compiler.compiler" not in sys.modules:
        return set()
    from triton.compiler.compiler import CompiledKernel

    # after gc.freeze, its list lacks kernels that are older
    kernels = [found for found in gc.get_objects() if type(found) is CompiledKernel]
    kernels += launch.compiled()
    return {base64.b32encode(bytes.fromhex(k.hash)).decode().rstrip("=") for k in kernels}


def _mapped() -> set[Path]:
    """The libraries that this process has loaded, where the system tells."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    named = [line.split(maxsplit=5) for line in lines]
    return {Path(fields[5]) for fields in named if len(fields) == 6 and fields[5][0] == "/"}


def _below(root: Path, paths: set[Path]) -> Iterator[Path]:
    """The paths that lie below a folder, by the folder's name. The system has them without
    links.
    """
    real = Path(os.path.realpath(root))
    for path in paths:
        if real in path.parents:
            yield root / path.relative_to(real)


def _probes(root: Path) -> Iterator[Path]:
    """The libraries by which Inductor tries which vector instructions the processor has. It loads
    them in processes of their own.
    """
    for source in root.glob("??/*.cpp"):
        library = source.with_suffix(".so")
        small = library.is_file() and source.stat().st_size < 1 << 13
        if small and b"_chk_kernel" in source.read_bytes():
            yield library


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()]
