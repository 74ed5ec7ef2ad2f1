"""For which machine and versions a bundle is: facts by name, in words that a warning can quote.

Tiers and workspaces are constants of compiled graphs, and follow from the facts of the machine, so
that a bundle of another one would not be wrong, but would miss.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from moe_ops import environment
from moe_ops.planning import machine as machines
from moe_ops.tables import lookup

# their versions decide what models compile to, or where libraries look for it
DISTRIBUTIONS = ("transformers", "torchao", "sgl-deep-gemm")
# files of this package from which nothing that is compiled follows
_NO_SOURCES = (".pyc", ".so", ".typed")


def facts(native: bool) -> dict[str, str]:
    """The key of a bundle that is made, or would be used, in this process.

    Args:
        native: it holds what the C++ compiler made of Inductor's code for CPUs, for one processor.
    """
    found = _gpu() | _versions()
    found["C++ compiler"] = os.environ.get("CXX", "g++")  # Inductor's keys name it
    return found | (_host() if native else {})


def difference(made: Mapping[str, str], here: Mapping[str, str]) -> str:
    """What differs between the key of a bundle and that of this process, "" if nothing does."""
    names = [name for name in {**made, **here} if made.get(name, "") != here.get(name, "")]
    return "; ".join(
        [f"{n} was {made.get(n) or 'absent'}, is {here.get(n) or 'absent'}" for n in names]
    )


def _gpu() -> dict[str, str]:
    """The current GPU, and which backends run on it."""
    if not torch.cuda.is_available():
        here = machines.machine(torch.device("cpu"))
        return {"device": "no GPU", "backends": " ".join(here.available)}
    index = torch.cuda.current_device()
    here = machines.machine(torch.device("cuda", index))
    count = torch.cuda.get_device_properties(index).multi_processor_count
    return {
        "GPU": f"{here.gpu_name} ({here.architecture}, {count} multiprocessors)",
        "memory of the GPU": f"{here.total_memory} bytes",
        "backends": " ".join(here.available),
        "CUDA of the driver": str(_driver()),
    }


def _driver() -> int:
    """The newest CUDA that the driver runs, such as 13000; 0 where there is none to ask."""
    if torch.version.cuda is None:
        return 0
    version = ctypes.c_int()
    try:  # torch has a function for it in some versions alone
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:  # not under this name
        return 0
    return version.value


def _versions() -> dict[str, str]:
    versions = {
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__} ({str(torch.version.git_version)[:12]})",
        "CUDA or ROCm of torch": torch.version.cuda or torch.version.hip or "",
        "triton": environment.TRITON,
        "moe_ops": environment.version(environment.DISTRIBUTION) or "from source",
        "sources of moe_ops": sources(),
    }
    return versions | {name: environment.version(name) or "" for name in DISTRIBUTIONS}


def _host() -> dict[str, str]:
    """What Inductor's native code for CPUs depends on."""
    from torch._inductor import config

    compiler = shutil.which(os.environ.get("CXX", "g++"))
    digest = hashlib.sha256(Path(compiler).read_bytes()).hexdigest()[:12] if compiler else ""
    return {
        "processor": _processor(),
        "folder of torch": str(Path(torch.__file__).parent),  # on the compiler's command line
        "file of the C++ compiler": digest,  # wherever it lies
        "cpp_cache_precompile_headers of Inductor": str(config.cpp_cache_precompile_headers),
    }


def _processor() -> str:
    """The name of the processor, and a digest of the instructions that it has."""
    name, flags = platform.processor() or platform.machine(), ""
    with open("/proc/cpuinfo") if os.path.exists("/proc/cpuinfo") else open(os.devnull) as info:
        for line in info:
            field, _, value = line.partition(":")
            if field.strip() == "model name":
                name = value.strip()
            if field.strip() in ("flags", "Features"):
                flags = " ".join(sorted(value.split()))
                break
    return f"{name} ({hashlib.sha256(flags.encode()).hexdigest()[:12]})"


@functools.cache
def sources() -> str:
    """A digest of this package's files, without the measured tables, which bundles bring."""
    root = environment.package_folder()
    tables = set(lookup.tables().values())
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix not in _NO_SOURCES and path not in tables and path.is_file():
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
