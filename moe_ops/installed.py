"""Which libraries are installed, and in which versions. None of them is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util


def version(distribution: str) -> str | None:
    """The version of a distribution; None if pip knows none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not(module: str, distribution: str, wanted: str) -> str | None:
    """None if a module can be found in the one version that a backend was written for, else why not and what to do."""
    remedy = f"pip install {distribution}=={wanted}"
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed; {remedy}"
    found = version(distribution) or "one that pip does not know by this name"
    if found.split(".post")[0].split("+")[0] != wanted:
        return f"needs {distribution} {wanted}, got {found}; {remedy}"
    return None


def why_no_triton() -> str | None:
    """None, or what to install."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; a CUDA build of torch brings it, or pip install triton"
    return None
