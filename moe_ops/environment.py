"""The machine around the package: installed versions, the interpreter flag, the cache folder,
progress bars, and what other libraries log when we import them.

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
    """torch.compiler.assume_constant_result without its import of torch._dynamo and triton (1.5
    s).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def version(distribution: str) -> str | None:
    """The version of a distribution; None if pip knows none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def nvidia_driver() -> str | None:
    """The version of NVIDIA's driver, as nvidia-smi says it; None where it says none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return answer.stdout.strip().splitlines()[0] if answer.returncode == 0 else None


def other_owners() -> list[str]:
    """The other installed distributions that are imported as ``moe_ops``, as "name version".

    Files of theirs and ours replace one another, whichever was installed last.
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
    """Where pip installed this package, if it was imported from elsewhere: a checkout in the
    current folder comes first. None of an editable installation, which lists no files.
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
    """Where native code comes from, in words: "brought by the wheel", "built beside the sources",
    or outside of this package's folder "built at first use". None if the file is not there.
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
    """What a distribution requires and pip does not know, such as "apache-tvm-ffi==0.1.11"; None
    where nothing is missing, or the distribution is unknown.
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
    """What to say of a distribution that is newer than the newest that the tests ran with; None of
    others. Post-releases are as new as their release.
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
    """Major and minor number of a version such as "3.10rc1" or "4"; (0, 0) where it is unknown."""
    found = re.match(r"v?(\d+)(?:\.(\d+))?", installed)
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


@constant
def why_no_gluon(installed: str) -> str | None:
    """Why a version of Triton cannot compile the kernels written in Gluon; None where it can.

    Gluon is experimental and changes from one version to the next, so a newer version than those
    that were tried is refused, too.
    """
    kernels = "the Gluon kernels of compute capability 9.0 for weights of 4 and 8 bits"
    if not installed:
        return f"{kernels} need Triton {GLUON_VERSIONS}, which is not installed"
    if GLUON_TRITON[0] <= release(installed) <= GLUON_TRITON[1]:
        return None
    return f"{kernels} need Triton {GLUON_VERSIONS}, got {installed}"


def gpu_architecture(properties: Any) -> tuple[tuple[int, int], str]:
    """(compute capability, "") of an NVIDIA GPU, ((0, 0), its name, such as "gfx942") of an AMD
    GPU, whose major and minor number (9, 4) would mean another.

    Args:
        properties: as torch.cuda.get_device_properties returns them.
    """
    if torch.version.hip is not None:
        return (0, 0), properties.gcnArchName.split(":")[0]
    return (properties.major, properties.minor), ""


@functools.cache
def capability(device: torch.device | int) -> tuple[int, int]:
    """Compute capability of a device that torch calls "cuda"; (0, 0) of an AMD GPU."""
    return gpu_architecture(torch.cuda.get_device_properties(device))[0]


def cache_folder() -> Path:
    """Where this library keeps what it found out about a machine: the folder named by
    MOE_OPS_CACHE, else ~/.cache/moe_ops. Whoever writes makes it. (Triton, DeepGEMM and FlashInfer
    have caches of their own for what they compile; docs/backends.md names them.)
    """
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "moe_ops")


def when_imported(module: str, function: Callable[[], object]) -> None:
    """Call `function` now if a module is imported already, else once somebody has imported it.

    So that what belongs in an expensive module costs nothing where nobody uses it.
    """
    with _LOCK:
        _awaited.setdefault(module, []).append(function)
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
    _call_awaited()


_LOCK = threading.RLock()
_awaited: dict[str, list[Callable[[], object]]] = {}  # by the name of the module


def _call_awaited(imported: str = "") -> None:
    """Call what waits for modules that are imported by now, each function once."""
    for module in tuple(_awaited):
        found = sys.modules.get(module)
        executing = getattr(getattr(found, "__spec__", None), "_initializing", False)
        if module == imported or (found is not None and not executing):
            with _LOCK:
                functions = _awaited.pop(module, [])
            for function in functions:
                function()


class _Finder(importlib.abc.MetaPathFinder):
    """Sees imports, for `when_imported`. It finds the modules that are waited for where the
    finders behind it find them, and no others.

    It stays in sys.meta_path: other threads may be going through that list. What was being
    imported when somebody began to wait for it is looked at again with each later import.
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
    """Let a module's loader call what waits for the module. The loader stays the object that it
    is; one that is a class, and shared, stays as it is.
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
    """`items` behind a progress bar, on a terminal or in a notebook.

    It appears once PROGRESS_SECONDS have passed. ``total`` is the number of items where they have
    no length.
    """
    if torch.compiler.is_compiling() or not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return items
    from tqdm import tqdm

    return tqdm(items, desc=what, total=total, leave=False, delay=PROGRESS_SECONDS)


@contextmanager
def importing_torchao(in_command: bool = False) -> Iterator[None]:
    """Import torchao without two messages that its users can do nothing about.

    They are left out while this context is open, and all others are logged: that its CUDA
    extensions do not load into a torch built without CUDA, and that torch deprecates calls which
    torchao makes.

    Args:
        in_command: around a command of ours, which calls no extension of torchao and imports it
            through other libraries, too: leave out why any of them is not loaded.
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
    """Whether a message at torchao's import is none of those that `importing_torchao` names."""
    if failed := re.match(r"Failed to load (\S+\.so): ", record.getMessage()):
        extension = Path(failed[1])
        needs_cuda = extension.is_file() and b"libcudart.so" in extension.read_bytes()
        return torch.version.cuda is not None or not needs_cuda
    deprecated = "register_constant() on Enum subclasses is deprecated" in record.getMessage()
    classes = record.args if isinstance(record.args, tuple) else ()
    by_torchao = any([getattr(c, "__module__", "").startswith("torchao.") for c in classes])
    return not (deprecated and by_torchao)
