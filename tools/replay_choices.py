"""List which products a grid of calls launches, to compare two checkouts.

    python tools/replay_choices.py --out choices.json     # in each of the two checkouts
    python tools/replay_choices.py --compare before.json after.json

Nothing is compiled or run: of every call the products' kernels are listed with their grids,
constants, warps and registers. The grid has the shapes of the benchmarks and of models that no
table names, all schemes, M = 1 to 4096 in powers of two, and a part of the calls of
compile_matrix.py, on several architectures. Where the lists are equal nothing needs to be
measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from compile_kernels import AnyCall, Arch, Call, ExchangeCall, compile_any, gpu_of, refused
from compile_matrix import ARCHITECTURES, MEASURED, calls

from moe_ops.bench.shapes import SHAPES
from moe_ops.meta.scales import TRITON_E2M1
from moe_ops.schemes import SCHEMES

UNTUNED = {  # E, top_k, K, I
    "olmoe": (64, 8, 2048, 1024),
    "glm46": (160, 8, 5120, 1536),
    "minimax2": (256, 8, 3072, 1536),
    "kimi": (384, 8, 7168, 2048),
    "qwen235": (128, 8, 4096, 1536),
}
TOKENS = [2**i for i in range(13)]
STEP = 7  # of the calls of compile_matrix.py, which has every number of tokens


def grid() -> Iterator[AnyCall]:
    """Calls of the benchmarks' shapes and of others, in all schemes."""
    sizes = [(s.num_experts, s.top_k, s.hidden_size, s.intermediate_size) for s in SHAPES.values()]
    for size in (*sizes, *UNTUNED.values()):
        for scheme in SCHEMES:
            for M in TOKENS:
                yield Call(size, M, scheme)
        for scheme in ("mxfp4_w4a16", "nvfp4_w4a16"):
            for M in TOKENS:
                yield Call(size, M, scheme, layout=TRITON_E2M1)


def launches(call: AnyCall, gpu: str, arch: Arch) -> list[str]:
    """The products of a call, each as a line."""
    return [
        f"{one.name} {one.grid} {one.constants} warps={one.warps} registers={one.registers}"
        for one in compile_any(call, gpu_of(arch, gpu), arch, False)
        if "gemm" in one.name or "gemv" in one.name or "packed" in one.name
    ]


def choices() -> dict[str, list[str]]:
    """Call -> its products."""
    found = {}
    for arch in ARCHITECTURES:
        for gpu in ("", *MEASURED.get(arch, ())):
            some = (*(grid() if arch == 90 else ()), *list(calls())[::STEP])
            for call in some:
                if not isinstance(call, ExchangeCall) and not refused(call, arch):
                    found[f"{arch} {gpu} {call}"] = launches(call, gpu, arch)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for what this checkout launches")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    if arguments.out:
        found = choices()
        arguments.out.write_text(json.dumps(found))
        print(f"{len(found)} calls")
    if not arguments.compare:
        return 0
    before, after = (json.loads(path.read_text()) for path in arguments.compare)
    different = [call for call in before if before[call] != after.get(call)]
    for call in different:
        print(call)
        for mark, lines in (("-", before[call]), ("+", after.get(call, []))):
            print(*[f"  {mark} {line}" for line in lines], sep="\n")
    print(f"{len(different)} of {len(before)} calls differ")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
