"""Whether the sdist and the wheel of a folder may be published; says everything that is wrong.

    python .ci/check_dist.py FOLDER [--tag v0.1.0]

The wheel has the CPU kernels and the CUDA objects of these sources for every family of GPUs, and
is small enough. With a tag, it is the version's, and the changelog has dated it.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 30 << 20  # bytes of the wheel
NAME = "torch_moe_ops"


def version() -> str:
    """moe_ops.__version__, without importing torch."""
    text = (ROOT / "moe_ops/__init__.py").read_text()
    return re.search(r'^__version__ = "(.+)"$', text, re.M)[1]


def kernels() -> list[str]:
    """Native code that the wheel brings, as paths in it."""
    path = ROOT / "moe_ops/csrc/build.py"
    spec = importlib.util.spec_from_file_location("csrc_build", path)
    build = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    objects = [f"moe_ops/csrc/cutlass/{build.object_name(family)}" for family in build.FILES]
    return ["moe_ops/cpu_grouped_mm.so", *objects]


def wrong(folder: Path, tag: str | None) -> list[str]:
    """What is wrong, in words."""
    found, ours = [], version()
    sdists, wheels = sorted(folder.glob("*.tar.gz")), sorted(folder.glob("*.whl"))
    if [path.name for path in sdists] != [f"{NAME}-{ours}.tar.gz"]:
        found.append(f"one sdist of version {ours} is expected, got {[p.name for p in sdists]}")
    if len(wheels) != 1 or not wheels[0].name.startswith(f"{NAME}-{ours}-py3-none-"):
        return [*found, f"one wheel of {ours} is expected, got {[p.name for p in wheels]}"]
    size = wheels[0].stat().st_size
    if size > LARGEST:
        found.append(f"the wheel has {size / 2**20:.1f} MiB, at most {LARGEST >> 20} are allowed")
    names = zipfile.ZipFile(wheels[0]).namelist()
    found += [f"the wheel lacks {name}" for name in kernels() if name not in names]
    found += [
        f"the wheel has {name}, of other sources"
        for name in names
        if name.endswith(".so") and name not in kernels()
    ]
    if tag:
        changes = (ROOT / "CHANGELOG.md").read_text()
        if tag != f"v{ours}":
            found.append(f"tag must be v{ours}, got {tag}")
        if not re.search(rf"^## \[{re.escape(ours)}\] - \d{{4}}-\d\d-\d\d$", changes, re.M):
            found.append(f"CHANGELOG.md has no date for {ours}")
        if "-manylinux" not in wheels[0].name:
            found.append(f"an index takes manylinux wheels alone, got {wheels[0].name}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag", help="that is to be published")
    arguments = parser.parse_args()
    found = wrong(arguments.folder, arguments.tag)
    print(*found or [f"{arguments.folder} may be published"], sep="\n")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
