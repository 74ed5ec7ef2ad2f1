"""save_warm() and load_warm(): what a process compiled, for processes that start later."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_ops.bundle import archive, key, places
from moe_ops.bundle.archive import Archive, Refusal
from moe_ops.bundle.places import PLACES
from moe_ops.planning import machine as machines
from moe_ops.tables import lookup

_ARTIFACTS = "torch/artifacts"  # what torch.compiler.save_cache_artifacts gives
_TABLE = "tables/gpu.json"  # the measured table that plans were made by
_PARTS = {"torch": 1, "tables": 1} | {name: place.parts for name, place in PLACES.items()}
_TRITON_CACHE = "TRITON_CACHE_DIR"
_LOCK = threading.Lock()


@dataclass(frozen=True)
class BundleReport:
    """The result of `save_warm` and `load_warm`; str() is one line.

    Attributes:
        path: the file of the bundle.
        bytes: its size; 0 if nothing of it is used.
        parts: for each kind of content the number of files, and their bytes before compression:
            "torch" (the artifacts of torch's caches), "inductor" (native code for CPUs), "triton"
            (kernels, Gluon's as well, and the libraries that launch them), "objects" (moe_ops's
            own that were built at first use), "deep_gemm", and "tables" (measured times).
        seconds: what saving or loading took.
        refused: why nothing of it is used, "" if it is.
    """

    path: str
    bytes: int
    parts: dict[str, tuple[int, int]]
    seconds: float
    refused: str = ""

    @property
    def loaded(self) -> bool:
        """Whether the bundle is used."""
        return not self.refused

    def __str__(self) -> str:
        if self.refused:
            return f"{self.path}: not used, {self.refused}"
        parts = [f"{n} {files} ({size / 2**20:.1f})" for n, (files, size) in self.parts.items()]
        found = f"files (MiB) of {', '.join(parts)}" if parts else "empty: nothing was compiled"
        return f"{self.path}: {self.bytes / 2**20:.1f} MiB, {found}, {self.seconds:.1f} s"


def save_warm(path: str | os.PathLike[str]) -> BundleReport:
    """Write all that this process has compiled, or loaded from caches, into one file.

    Call it after the steps that are to start fast: prompts and decode steps, compiled or not. The
    bundle holds the artifacts of torch's caches, the native code that Inductor compiled for CPUs,
    the Triton and Gluon kernels that ran and the libraries that launch them, moe_ops's objects
    that were built at first use, DeepGEMM's kernels, and the GPU's measured table. It does not
    hold weights, traces of torch.compile, captured graphs or FlashInfer's modules. `load_warm`
    reads it in a later process, on this machine or another one like it.

    Args:
        path: the file, in a folder that exists. It appears whole or not at all, in place of an
            older one: of processes that write at once, the last one stays. Ranks that compile
            different graphs need a file each.

    Returns:
        What was saved, and the sizes.

    Raises:
        ValueError: path is no path of a file in a folder that exists.
        OSError: the file cannot be written, or a cache cannot be read.
    """
    start = time.perf_counter()
    target = check_target("path", path)
    with _LOCK:
        members: dict[str, bytes] = {}
        if "torch._dynamo" in sys.modules:  # else nothing was compiled
            saved = torch.compiler.save_cache_artifacts()
            members |= {_ARTIFACTS: saved[0]} if saved else {}
        members |= places.used()
        name = _gpu_name()
        if name:
            members[_TABLE] = lookup.text(name).encode()
        facts = key.facts(native=_has_native(members))
        try:
            size = archive.write(target, facts, members)
        except OSError as error:
            message = f"{target} cannot be written ({error.strerror}); name another file"
            raise OSError(error.errno, message) from error
    sizes = {name: len(content) for name, content in members.items()}
    return BundleReport(str(target), size, _parts(sizes), time.perf_counter() - start)


def load_warm(path: str | os.PathLike[str]) -> BundleReport:
    """Use a bundle of `save_warm` in place of compiling: unpack it into the folders of the caches.

    Call it before anything compiles, and after torch.cuda.set_device. Entries that the folders
    have already stay as they are. TRITON_CACHE_DIR is set in this process to the folder that
    Triton uses, unless it is set, because Inductor would choose another one later.

    A bundle holds programs that will run: load only those that you would run.

    Args:
        path: the file.

    Returns:
        What was loaded. Where a bundle is absent, damaged, or made for another GPU, other versions
        or sources, or where a folder cannot be written, a RuntimeWarning and `refused` say why,
        and nothing of the bundle is used: everything is compiled as without it.

    Raises:
        ValueError: path is no path.
    """
    start = time.perf_counter()
    source = _path("path", path)
    parts: dict[str, tuple[int, int]] = {}
    size, refused = 0, ""
    try:
        with _LOCK, archive.reading(source, _PARTS) as bundle:
            here = key.facts(native=_has_native(bundle.members))
            if differs := key.difference(bundle.key, here):
                raise Refusal(f"it was made elsewhere: {differs}")
            _install(bundle)
            parts = _parts({name: member.bytes for name, member in bundle.members.items()})
            size = source.stat().st_size
    except Refusal as reason:
        refused = str(reason)
    except (OSError, RuntimeError, ValueError) as error:  # unwritable, no home, not a table
        refused = f"it cannot be unpacked: {error}"
    if refused:
        message = f"moe_ops.load_warm uses nothing of {source}: {refused}"
        warnings.warn(f"{message}; all is compiled as without it", RuntimeWarning, stacklevel=2)
    return BundleReport(str(source), size, parts, time.perf_counter() - start, refused)


def check_target(argument: str, path: object) -> Path:
    """The path of a file that is to be written.

    Raises:
        ValueError: it is no path, a folder, a device or the like, or in a folder that is absent or
            cannot be written.
    """
    target = _path(argument, path)
    other = target.exists() and not target.is_file()  # /dev/null would be replaced
    if other or not os.access(target.parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"{argument} must name a file in a folder that exists and can be written, got "
            f"{str(target)!r}{', which is a folder' if target.is_dir() else ''}"
        )
    return target


def _path(argument: str, path: object) -> Path:
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ValueError(f"{argument} must be the path of a file, got {path!r}")
    return Path(path)


def _has_native(names: Iterable[str]) -> bool:
    return any([name.startswith("inductor/") for name in names])


def _gpu_name() -> str:
    """The current GPU, by whose name the measured tables go; "" without one."""
    if not torch.cuda.is_available():
        return ""
    return machines.machine(torch.device("cuda", torch.cuda.current_device())).gpu_name


def _parts(sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Number of files and bytes of each kind of content."""
    found: dict[str, tuple[int, int]] = {}
    for name, size in sizes.items():
        kind = name.partition("/")[0]
        files, total = found.get(kind, (0, 0))
        found[kind] = files + 1, total + size
    return found


def _install(bundle: Archive) -> None:
    """Put a bundle's files where their caches find them, all or none.

    Everything is unpacked beside its place and compared with the manifest first; entries then
    appear by being renamed.
    """
    with contextlib.ExitStack() as undo:
        moves: list[tuple[Path, Path]] = []  # from, to
        with contextlib.ExitStack() as staged:
            for name, place in PLACES.items():
                names = [one for one in bundle.members if one.startswith(f"{name}/")]
                if not names:
                    continue
                folder = place.folder()
                folder.mkdir(parents=True, exist_ok=True)
                stage = tempfile.TemporaryDirectory(prefix=".moe_ops-", dir=folder)
                entries = _unpack(bundle, names, folder, Path(staged.enter_context(stage)))
                for entry in sorted({path.parts[: place.entry_parts] for path in entries}):
                    moves.append((Path(stage.name, *entry), Path(folder, *entry)))
            artifacts = bundle.read(_ARTIFACTS) if _ARTIFACTS in bundle.members else b""
            table = (
                bundle.read(_TABLE).decode(errors="replace") if _TABLE in bundle.members else ""
            )
            # all is verified: from here on only a folder or torch can refuse
            for path, target in moves:
                if _move(path, target):
                    undo.callback(_remove, target)
            if _TRITON_CACHE not in os.environ:
                os.environ[_TRITON_CACHE] = str(places.triton_folder())
                undo.callback(os.environ.pop, _TRITON_CACHE)
            _load_artifacts(artifacts)
            if table and _gpu_name():
                lookup.use(_gpu_name(), table)
        undo.pop_all()


def _read(bundle: Archive, name: str) -> bytes:
    return bundle.read(name) if name in bundle.members else b""


def _load_artifacts(artifacts: bytes) -> None:
    """Give torch its part of a bundle. What it has written where it then raises is of no harm:
    each of its entries is whole.

    Raises:
        Refusal: it takes nothing, or not all.
    """
    try:
        taken = torch.compiler.load_cache_artifacts(artifacts) if artifacts else True
    except Exception as error:  # it unpickles
        raise Refusal(f"torch cannot take the artifacts of its caches: {error}") from error
    if taken is None:
        raise Refusal("torch does not take the artifacts of its caches")


def _unpack(bundle: Archive, names: list[str], folder: Path, stage: Path) -> list[Path]:
    """Write members into `stage`, as entries of `folder`; returns their paths in either."""
    paths = [Path(*name.split("/")[1:]) for name in names]
    for name, path in zip(names, paths, strict=True):
        content = places.content_at(name, bundle.read(name), (folder / path).parent)
        (stage / path).parent.mkdir(exist_ok=True)
        (stage / path).write_bytes(content)
    return paths


def _move(path: Path, target: Path) -> bool:
    """Rename an entry to its place, unless it is there; returns whether it was not."""
    target.parent.mkdir(exist_ok=True)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        return False
    try:
        os.rename(path, target)
    except OSError:
        if not target.exists():
            raise
        return False  # another process was faster
    return True


def _remove(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            target.unlink()
