"""The machine around the package: installed versions, the interpreter flag, the cache folder,
progress bars.

No optional library is imported here, but for progress bars.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

# Triton kernels run under its interpreter: on a machine without a GPU, for tests
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CACHE_VARIABLE = "MOE_OPS_CACHE"
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


def cache_folder() -> Path:
    """Where this library keeps what it found out about a machine: the folder named by
    MOE_OPS_CACHE, else ~/.cache/moe_ops. Whoever writes makes it. (Triton, DeepGEMM and FlashInfer
    have caches of their own for what they compile; docs/backends.md names them.)
    """
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "moe_ops")


def progress_bar(items: Sequence[_T], what: str) -> Iterable[_T]:
    """`items` behind a progress bar on a terminal's stderr, if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=what, leave=False, disable=not sys.stderr.isatty())
