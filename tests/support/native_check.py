"""What `make native-check` runs: compiles the kernels of moe_ops/csrc and asks them on the host.

    python -m tests.support.native_check [--all]

Needs nvcc. CUTLASS's headers are those that the package finds, else those of a wheel of
sgl-deep-gemm, which is downloaded into build/ and not installed: `make test` compiles nothing then
or now.

Of each object the files of the kernels that tests ask are compiled, whose device code is parsed
and no more (-fdevice-syntax-only, where nvcc knows it): the tests ask host code, and the object
for SM90 alone takes four minutes in full. --all compiles every object in full. Objects stay in the
cache of the package under a name that says what they were made of: as long as the sources stay the
same, nothing is compiled again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moe_ops import environment
from moe_ops.csrc import build
from tests.support.paths import ROOT

HEADERS = "sgl-deep-gemm==0.2.5"  # CUTLASS 4.8
# of each object the files that are checked
PARTS = {
    "sm_90a": ("abi", "sm90_int4_bf16_few", "sm90_products"),
    "sm_100a": ("abi", "sm100_nvfp4"),
    "sm_120a": ("abi", "sm120_nvfp4"),
}
PARSED = "-fdevice-syntax-only"
TESTS = "tests/backends/cutlass/test_objects.py"


def find_headers(folder: Path) -> None:
    """Name CUTLASS's headers by CUTLASS_PATH where the package finds none."""
    missing = build.why_not_built()
    if missing is None or "headers" not in missing:
        return
    include = folder / "include"
    if not (include / "cutlass" / "cutlass.h").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", HEADERS]
        subprocess.run([*command, "--only-binary=:all:", "-d", str(folder)], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            for name in wheel.namelist():
                if name.startswith("deep_gemm/include/") and not name.endswith("/"):
                    target = include / name.removeprefix("deep_gemm/include/")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(wheel.read(name))
    os.environ["CUTLASS_PATH"] = str(folder)


def part_of(architecture: str, cache: Path) -> Path:
    """The object of a part's files, whose device code is only parsed: it cannot run."""
    target = cache / "checked" / build.object_name(architecture)
    if not target.is_file():
        nvcc = build.toolchain().nvcc
        known = subprocess.run([*nvcc, "--help"], capture_output=True, text=True).stdout
        flags = (PARSED,) if PARSED in known else ()
        build.build(architecture, target, say, PARTS[architecture], flags)
        stem = target.name.rpartition("_")[0]
        for older in set(target.parent.glob(f"{stem}_*.so")) - {target}:
            older.unlink()
    return target


def say(line: str) -> None:
    print(f"native-check: {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="compile every object in full")
    parser.add_argument("--headers", type=Path, default=ROOT / "build" / "cutlass")
    arguments = parser.parse_args()
    find_headers(arguments.headers)
    missing = build.why_not_built()
    if missing:
        say(f"nothing is compiled: {missing}")
        return 1
    start, cache = time.monotonic(), environment.cache_folder()
    if arguments.all:
        for architecture in build.FILES:
            build.ensure(architecture, cache, say)
        say(f"in full: {time.monotonic() - start:.0f} s")

    def object_of(architecture: str) -> str:
        return str(build.installed(architecture, cache) or part_of(architecture, cache))

    with ThreadPoolExecutor(build.jobs()) as pool:
        objects = dict(zip(build.FILES, pool.map(object_of, build.FILES), strict=True))
    say(f"compiled: {time.monotonic() - start:.0f} s")
    os.environ["MOE_OPS_TEST_OBJECTS"] = json.dumps(objects)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    raise SystemExit(main())
