"""The environment of the process: installed versions, the interpreter flag, the cache folder,
hooks on imports, progress bars, and messages that other libraries log at import.

No optional library is imported here.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

# Triton kernels run under its interpreter: on a machine without a GPU, for tests
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CACHE_VARIABLE = "MOE_OPS_CACHE"
DISTRIBUTION = "torch-moe-ops"  # what pip knows this package by
FOREIGN_DISTRIBUTION = "moe-ops"  # another project of the public index, imported by the same name
GLUON_TRITON = ((3, 6), (3, 9))  # the oldest and the newest Triton that compile our Gluon kernels
GLUON_VERSIONS = " to ".join(".".join(map(str, bound)) for bound in GLUON_TRITON)

_T = TypeVar("_T")
_P = ParamSpec("_P")


def constant(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """torch.compiler.assume_constant_result without its import of torch._dynamo and Triton."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def version(distribution: str) -> str | None:
    """The installed version of a distribution, else None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def nvidia_driver() -> str | None:
    """The version of NVIDIA's driver by nvidia-smi, else None."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return answer.stdout.strip().splitlines()[0] if answer.returncode == 0 else None


def other_owners() -> list[str]:
    """Other installed distributions that are imported as ``moe_ops``, as "name version".

    Their files and ours overwrite each other: the last one that was installed wins.
    """
    found = []
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        # the files of a whole installation as one text: a list of them takes seconds to make
        files = distribution.read_text("RECORD") or ""
        names = (distribution.read_text("top_level.txt") or "").split()
        owns = "moe_ops" in names or re.search(r"^moe_ops/__init__\.py,", files, re.M)
        if name != DISTRIBUTION and (owns or name == FOREIGN_DISTRIBUTION):
            found.append(f"{name} {distribution.version}")
    return sorted(found)


def package_folder() -> Path:
    """The folder that this package was imported from."""
    return Path(__file__).parent


def hidden_installation() -> str | None:
    """The folder where pip installed this package, if it was imported from elsewhere, such as a
    checkout in the current folder. None for an editable installation, which lists no files.
    """
    try:
        wheel = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    if not re.search(r"^moe_ops/__init__\.py,", wheel.read_text("RECORD") or "", re.M):
        return None
    folder = Path(str(wheel.locate_file("moe_ops"))).resolve()
    return None if folder == package_folder().resolve() else str(folder)


def origin(library: Path) -> str | None:
    """Origin of a native library: "brought by the wheel", "built beside the sources", or outside
    of this package's folder "built at first use". None if the file does not exist.
    """
    if not os.path.isfile(library):  # False, too, where the folder may not be searched
        return None
    package = package_folder()
    if package not in library.parents:
        return "built at first use"
    name = library.relative_to(package.parent).as_posix()
    try:
        wheel = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "built beside the sources"
    installed = re.search(rf"^{re.escape(name)},", wheel.read_text("RECORD") or "", re.M)
    ours = Path(str(wheel.locate_file(name))).resolve() == library.resolve()
    return "brought by the wheel" if installed and ours else "built beside the sources"


# Looked up once: Dynamo would trace what looks it up. Nightly builds of torch name it otherwise.
TRITON = version("triton") or version("pytorch-triton") or ""


def why_not_installed(module: str, distribution: str, oldest: str) -> str | None:
    """None if a module can be found in a version that a backend runs, `oldest` or newer, else why
    not and what to do.
    """
    remedy = f"pip install '{distribution}>={oldest}'"
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed; {remedy}"
    found = version(distribution)
    if found is None or _numbers(found) < _numbers(oldest):
        found = found or "one that pip does not know by this name"
        return f"needs {distribution} {oldest} or newer, got {found}; {remedy}"
    return None


def missing_requirement(distribution: str) -> str | None:
    """A requirement of a distribution that is not installed, such as "apache-tvm-ffi==0.1.11";
    None if nothing is missing, or the distribution is not installed.
    """
    try:
        required = importlib.metadata.requires(distribution) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in required:
        name = re.match(r"[\w.-]+", requirement)
        if name and ";" not in requirement and version(name[0]) is None:
            return requirement
    return None


def newer_than_tested(distribution: str, newest: str) -> str | None:
    """Note on an installed distribution that is newer than the newest with which tests ran, else
    None. A post-release counts as its release.
    """
    found = version(distribution)
    if found is None or _numbers(found) <= _numbers(newest):
        return None
    return f"{distribution} {found} is newer than tested: no test ran with one after {newest}"


def _numbers(installed: str) -> tuple[int, ...]:
    """The numbers of a release such as "0.6.13.post1+cu130"."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", installed)
    return tuple(map(int, found[1].split("."))) if found else ()


def why_no_triton() -> str | None:
    """None, or what to install."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; a CUDA build of torch brings it, or pip install triton"
    return None


def release(installed: str) -> tuple[int, int]:
    """Major and minor number of a version such as "3.10rc1" or "4"; (0, 0) if it is unknown."""
    found = re.match(r"v?(\d+)(?:\.(\d+))?", installed)
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


@constant
def why_no_gluon(installed: str) -> str | None:
    """Reason why a version of Triton cannot compile the kernels written in Gluon; None if it can.

    Gluon is experimental and changes from version to version, so versions that are newer than the
    tested ones are refused too.
    """
    kernels = "the Gluon kernels of compute capability 9.0 for weights of 4 to 8 bits"
    if not installed:
        return f"{kernels} need Triton {GLUON_VERSIONS}, which is not installed"
    if GLUON_TRITON[0] <= release(installed) <= GLUON_TRITON[1]:
        return None
    return f"{kernels} need Triton {GLUON_VERSIONS}, got {installed}"


def gpu_architecture(properties: Any) -> tuple[tuple[int, int], str]:
    """(compute capability, "") of an NVIDIA GPU; ((0, 0), name such as "gfx942") of an AMD GPU,
    because its major and minor number (9, 4) could be taken for a compute capability.

    Args:
        properties: as torch.cuda.get_device_properties returns them.
    """
    if torch.version.hip is not None:
        return (0, 0), properties.gcnArchName.split(":")[0]
    return (properties.major, properties.minor), ""


@functools.cache
def capability(device: torch.device | int) -> tuple[int, int]:
    """Compute capability of a device that torch calls "cuda"; (0, 0) for an AMD GPU."""
    return gpu_architecture(torch.cuda.get_device_properties(device))[0]


def cache_folder() -> Path:
    """The folder in which this package caches what it builds and measures on a machine: that of
    MOE_OPS_CACHE, else ~/.cache/moe_ops. It may not exist yet. (Triton, DeepGEMM and FlashInfer
    have caches of their own; docs/backends.md names them.)
    """
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "moe_ops")


def when_imported(module: str, function: Callable[[], object]) -> None:
    """Call `function` as soon as a module is imported: now, if it is already.

    So registrations with an expensive module cost nothing where nobody uses it.
    """
    with _LOCK:
        _awaited.setdefault(module, []).append(function)
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
    _call_awaited()


_LOCK = threading.RLock()
_awaited: dict[str, list[Callable[[], object]]] = {}  # by the name of the module


def _call_awaited(imported: str = "") -> None:
    """Call the functions that wait for modules which are imported by now, each once."""
    for module in tuple(_awaited):
        found = sys.modules.get(module)
        executing = getattr(getattr(found, "__spec__", None), "_initializing", False)
        if module == imported or (found is not None and not executing):
            with _LOCK:
                functions = _awaited.pop(module, [])
            for function in functions:
                function()


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook of `when_imported`. It finds only modules that are waited for, through the
    finders after it.

    It stays in sys.meta_path, because other threads may be iterating over that list. Modules that
    were being imported when somebody began to wait for them are checked at each later import.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        _call_awaited()
        if name not in _awaited:
            return None
        finders = tuple(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else ():
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                _tell_when_executed(spec.loader, name)
                return spec
        return None


_FINDER = _Finder()


def _tell_when_executed(loader: Any, name: str) -> None:
    """Let a module's loader call the functions that wait for the module. The loader object is
    kept; a loader that is a class, which others share, is not changed.
    """
    execute = getattr(loader, "exec_module", None)
    if execute is None or isinstance(loader, type):
        return

    def exec_module(module: Any) -> None:
        execute(module)
        if module.__name__ == name:  # not another one of a loader that several modules share
            vars(loader).pop("exec_module", None)
            _call_awaited(name)

    with suppress(AttributeError):  # a loader with slots
        loader.exec_module = exec_module


PROGRESS_SECONDS = 2.0  # what takes less shows no progress bar


def progress_bar(items: Iterable[_T], what: str, total: int | None = None) -> Iterable[_T]:
    """`items` with a progress bar, on a terminal or in a notebook.

    It appears once PROGRESS_SECONDS have passed. ``total`` is the number of items if they have no
    length.
    """
    if torch.compiler.is_compiling() or not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return items
    from tqdm import tqdm

    return tqdm(items, desc=what, total=total, leave=False, delay=PROGRESS_SECONDS)


@contextmanager
def importing_torchao(in_command: bool = False) -> Iterator[None]:
    """Context in which torchao is imported without two messages that users can do nothing about:
    that its CUDA extensions do not load into a torch built without CUDA, and that torch deprecates
    calls which torchao makes. All other messages are logged.

    Args:
        in_command: the context surrounds a command of ours, which uses no extension of torchao;
            drop all messages about extensions that are not loaded.
    """
    is_wanted = _is_for_commands if in_command else _is_for_users
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(is_wanted)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_wanted)


def _is_for_commands(record: logging.LogRecord) -> bool:
    skipped = record.getMessage().startswith(("Failed to load ", "Skipping import of cpp "))
    return not (record.name == "torchao" and skipped) and _is_for_users(record)


def _is_for_users(record: logging.LogRecord) -> bool:
    """Whether a message at torchao's import is not one that `importing_torchao` drops."""
    if failed := re.match(r"Failed to load (\S+\.so): ", record.getMessage()):
        extension = Path(failed[1])
        needs_cuda = extension.is_file() and b"libcudart.so" in extension.read_bytes()
        return torch.version.cuda is not None or not needs_cuda
    deprecated = "register_constant() on Enum subclasses is deprecated" in record.getMessage()
    classes = record.args if isinstance(record.args, tuple) else ()
    by_torchao = any([getattr(c, "__module__", "").startswith("torchao.") for c in classes])
    return not (deprecated and by_torchao)


def available_host_memory() -> int | None:
    """Bytes that the system can give without swapping; None where it does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None
