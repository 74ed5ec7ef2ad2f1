"""Compile every configuration of every Triton kernel, without a GPU.

    python tools/compile_matrix.py [--triton [3.6.0 ...]] [--arch 80 89 90 100 120 gfx942]
                                       [--one]

For several architectures and versions of Triton. Calls of many shapes, schemes and numbers of
tokens are listed first, which takes a fraction of a millisecond each. Of all configurations that
heuristics and measured tables choose for them (a kernel with its constants, warps and registers),
each is then compiled once, and its registers, spilled bytes and shared memory are held against
limits. `--one` compiles one configuration of each kernel. Without `--triton` the installed version
compiles; others are downloaded to build/triton. What the backend refuses and kernels that no call
of an architecture reaches are printed with the reason. Exits with 1 where a kernel does not
compile or is beyond a limit. TRITON_INTERPRET must be unset.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from compile_kernels import (
    SHAPES,
    SHARED_MEMORY,
    AnyCall,
    Arch,
    Call,
    Compiled,
    ExchangeCall,
    RouterCall,
    SlotsCall,
    TrainingCall,
    Usage,
    arch_name,
    arch_of,
    compile_any,
    gpu_of,
    kernel_names,
    refused,
    usage,
)

from moe_ops import environment
from moe_ops.backends.cutlass.relayout import REORDERED, SWIZZLED
from moe_ops.backends.cutlass.schemes import BLOCK_SCALED
from moe_ops.kernels.rows.frozen import frozen
from moe_ops.meta.scales import DEEP_GEMM_UE8M0, TRITON_E2M1
from moe_ops.schemes import SCHEMES

ARCHITECTURES: tuple[Arch, ...] = (80, 89, 90, 100, 120, "gfx942")
MEASURED: dict[Arch, tuple[str, ...]] = {
    90: ("NVIDIA H200",)
}  # GPUs whose measured tables are read, by architecture
VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")  # those that torch 2.11 to 2.15 bring
REGISTERS, REGISTERS_AMD = 255, 512  # a thread's at most
SPILLED = 96  # bytes a thread at most
# By Triton's release, architecture and scheme: what this one compiles worse than the others do.
KNOWN_SPILLED = {
    ((3, 6), 100, "fp8_block"): 384,
    ((3, 8), 100, "nvfp4"): 264,
    ((3, 9), 90, "int8_w8a16:g64"): 144,
    ((3, 9), 100, ""): 160,
    ((3, 9), 120, ""): 488,
}
# every number of tokens up to 16, four in each octave from there on
TOKENS = sorted({*range(1, 17), *[int(16 * 2 ** (i / 4)) for i in range(37)]})


# kernels of the layout that is not padded to blocks
AROUND_BOTH = (
    *("moe_ops_count_pairs", "moe_ops_place_pairs"),
    *("moe_ops_count_batches", "moe_ops_combine_rows", "moe_ops_scatter"),
    "moe_ops_activate",
)
# kernels that no call reaches on AMD's GPUs, by a part of their name
LEFT_OUT_ON_AMD = {
    "_flashinfer_": "runs around FlashInfer's kernels, for NVIDIA GPUs",
    "_cutlass_": "runs around CUTLASS's products, for NVIDIA GPUs",
    "_train_": "runs around torch's grouped products, for NVIDIA GPUs",
    "_push_": "writes to peers' memory, on NVIDIA GPUs",
    **dict.fromkeys(AROUND_BOTH, "runs around DeepGEMM's and CUTLASS's products, for NVIDIA GPUs"),
    "moe_ops_round": "runs before the kernels that hold PTX",
    "moe_ops_decode": "runs before the kernels that hold PTX",
    "_mixed_": "holds PTX",
    "_wgmma_": "holds PTX",
    "_token_gemm": "holds PTX",
    "_permute_tokens": "runs before the kernels that hold PTX",
    "_permute_hidden": "runs between the kernels that hold PTX",
    "_tma_": "needs NVIDIA's tensor memory accelerator",
}


class Row(NamedTuple):
    """What compiling one configuration found; where it failed, only the call and the error."""

    kernel: str
    configuration: str
    call: str
    most_spilled: int = 0
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    error: str = ""


Reached = tuple[AnyCall, str]  # a call, and the GPU whose measured table it reads


def calls() -> Iterator[AnyCall]:
    """Calls that reach every configuration, those with the most usual shapes first."""
    for size in SHAPES.values():
        for scheme in SCHEMES:
            for M in TOKENS:
                yield Call(size, M, scheme)
    qwen3, gptoss = SHAPES["qwen3"], SHAPES["gptoss20"]
    for scheme in SCHEMES:
        for M in (1, 64, 1024):
            yield Call(qwen3, M, scheme, kind="batched_experts")
            yield Call(gptoss, M, scheme, kind="grouped_linear", bias=True)
            yield Call(gptoss, M, scheme, activation="swigluoai", bias=True, expert_map=True)
            yield Call(qwen3, M, scheme, activation="relu2_no_mul", ids=torch.int64)
    for scheme in ("int4_w4a16:g128+int8_w8a16:channel", "nvfp4_w4a16+plain", "plain+mxfp4_w4a16"):
        for size in (qwen3, gptoss, SHAPES["mixtral"]):
            for M in (1, 8, 64, 512, 4096):
                yield Call(size, M, scheme)
        yield Call(qwen3, 64, scheme, kind="batched_experts")
    for scheme in ("mxfp4_w4a16", "nvfp4_w4a16"):
        for size in (qwen3, gptoss, SHAPES["mixtral"]):
            for M in TOKENS:
                yield Call(size, M, scheme, layout=TRITON_E2M1)
    for scheme, layout in (("nvfp4", ""), ("nvfp4_w4a16", ""), ("nvfp4_w4a16", TRITON_E2M1)):
        for M in (1, 8, 64, 1024, 4096):
            yield Call(qwen3, M, scheme, layout=layout, global_rows=True)
    for scheme in ("int4_w4a16:g128", "int4_w4a16:g32", "mxfp4_w4a16"):
        for M in (1, 8, 100, 300, 1024):  # one token, and blocks of 8 to 64
            yield Call(qwen3, M, scheme, batch_invariant=True)
        # experts that eight does not divide, and the most of a token
        few = {"activation": "relu2_no_mul", "ids": torch.int64, "batch_invariant": True}
        yield Call((60, 16, 2048, 512), 1, scheme, **few)
        yield Call(
            *(qwen3, 1, scheme),
            activation="swigluoai",
            bias=True,
            expert_map=True,
            batch_invariant=True,
        )
    for scheme in filter(None, SCHEMES):
        if SCHEMES[scheme].activation is not None:
            for M in (1, 64, 1024, 4096):
                yield Call(qwen3, M, scheme, arrives=True)
            yield Call(qwen3, 64, scheme, kind="batched_experts", arrives=True)
            yield Call(gptoss, 64, scheme, kind="grouped_linear", arrives=True)
    yield Call(gptoss, 64, activation="swigluoai", bias=True, transposed=True, ids=torch.int64)
    for scheme in ("", "fp8_block", "int4_w4a16:g128"):
        yield Call(qwen3, 64, scheme, activation="situ", by_expert=True)
    for dtype in (torch.float16, torch.float32):
        for M in (1, 8, 64, 1024):
            yield Call(SHAPES["odd"], M, dtype=dtype, activation="gelu_tanh")
    for M in (1, 8, 64, 1024):
        yield Call(qwen3, M, "int4_w4a16:g128", dtype=torch.float16)
    for scheme in ("int8_w8a16:channel", "fp8_w8a16:block"):
        yield Call((16, 2, 4096, 6400), 32, scheme)  # GEMM2 has a wave and a short one
    yield Call((60, 8, 7168, 512), 1, "fp8_block", transposed=True)
    yield Call((8, 2, 4096, 2048), 4096)  # blocks are mostly full
    yield from _adapted()
    yield from _around_products()
    yield from _routers()
    yield from _steps()
    yield from _exchanges()
    yield from _slots()


def _adapted() -> Iterator[Call]:
    """Layers whose tokens have adapters, by each family of kernels that adds them."""
    for name in ("qwen3", "mixtral", "gptoss20"):
        for scheme in ("", "fp8_block", "fp8_channel", "int4_w4a16:g32", "int8_w8a16:channel"):
            for M in (1, 8, 64, 1024):
                yield Call(SHAPES[name], M, scheme, rank=16)
    qwen3 = SHAPES["qwen3"]
    for scheme in ("int8_w8a8_static", "mxfp4_w4a16", "nvfp4", "int4_w4a8"):
        yield Call(qwen3, 64, scheme, rank=16)
    for rank in (8, 64, 128):
        yield Call(qwen3, 64, rank=rank, activation="relu2_no_mul", ids=torch.int64)
    yield Call(SHAPES["mixtral"], 4096, rank=64)
    yield Call(SHAPES["odd"], 8, dtype=torch.float32, rank=3)


def _around_products() -> Iterator[Call]:
    """Calls of backends whose products are not written in Triton."""
    qwen3, around = SHAPES["qwen3"], {"backend": "cutlass"}
    for scheme in ("fp8_channel", "fp8_tensor", "fp8_tensor_static", "fp8_channel_tensor"):
        for kind in ("experts", "batched_experts"):
            yield Call(qwen3, 64, scheme, kind=kind, **around)
            yield Call(qwen3, 64, scheme, kind=kind, arrives=True, **around)
        yield Call(SHAPES["mixtral"], 4096, scheme, activation="swigluoai", **around)
    yield Call(qwen3, 64, "fp8_channel", activation="relu2_no_mul", expert_map=True, **around)
    int4 = {"scheme": "int4_w4a8", "layout": REORDERED, **around}
    for kind in ("experts", "batched_experts"):
        yield Call(qwen3, 64, kind=kind, **int4)
        yield Call(qwen3, 64, kind=kind, arrives=True, **int4)
    for scheme in BLOCK_SCALED:
        for activation in ("silu", "swigluoai", "relu2_no_mul"):
            of_blocks = {**around, "layout": SWIZZLED, "activation": activation}
            yield Call(qwen3, 64, scheme, expert_map=activation == "silu", **of_blocks)
    of_rows = {**around, "layout": SWIZZLED, "global_rows": True}
    for activation in ("silu", "swigluoai", "relu2_no_mul"):
        yield Call(qwen3, 64, "nvfp4", activation=activation, **of_rows)
    yield from _around_deep_gemm()


def _around_deep_gemm() -> Iterator[Call]:
    qwen3, around = SHAPES["qwen3"], {"backend": "deep_gemm"}
    for scheme in ("", "fp8_block"):
        for M in (8, 64, 512, 4096):
            yield Call(qwen3, M, scheme, **around)
        yield Call(qwen3, 64, scheme, kind="batched_experts", **around)
    for kind in ("experts", "batched_experts"):
        yield Call(qwen3, 64, "fp8_block", kind=kind, arrives=True, **around)
    yield Call(SHAPES["dsv3"], 4096, activation="swiglustep", expert_map=True, **around)
    yield Call(qwen3, 4096, "fp8_block", layout=DEEP_GEMM_UE8M0, **around)
    yield Call(qwen3, 4096, "mxfp8", layout=DEEP_GEMM_UE8M0, **around)
    yield Call(qwen3, 4096, "mxfp8", layout=DEEP_GEMM_UE8M0, arrives=True, **around)


def _steps() -> Iterator[TrainingCall]:
    """Training steps, gated and not, of narrow and of wide experts; quantized ones frozen."""
    for name in ("qwen3", "mixtral"):
        for activation in ("silu", "swigluoai", "gelu", "relu2_no_mul"):
            yield TrainingCall(SHAPES[name], 4096, activation)
    for activation in ("silu", "swigluoai", "relu2_no_mul"):
        yield TrainingCall(SHAPES["gptoss20"], 4096, activation, bias=True)
    yield TrainingCall(SHAPES["qwen3"], 4096, "situ", by_expert=True)
    yield TrainingCall((16, 1, 5120, 8192), 4096, on_input=True)
    for name in ("qwen3", "gptoss20"):  # tiles divide the sizes of one alone
        for scheme in SCHEMES:
            how = frozen(scheme)
            if how is not None and (how.elements is None or name == "qwen3"):
                yield TrainingCall(SHAPES[name], 4096, scheme=scheme)
        yield TrainingCall(SHAPES[name], 4096, scheme="nvfp4_w4a16", global_rows=True)
        for rank in (8, 16, 64, 128):
            yield TrainingCall(SHAPES[name], 4096, rank=rank)
            yield TrainingCall(SHAPES[name], 4096, scheme="int4_w4a16:g128", rank=rank)


def _exchanges() -> Iterator[ExchangeCall]:
    """Dispatch and combine through peers' memory, of few rows and of many."""
    for ranks in (2, 4, 8):
        for name in ("qwen3", "dsv3", "gptoss20"):
            _, top_k, K, _ = SHAPES[name]
            for tokens in (8, 128, 512, 8192):
                yield ExchangeCall(ranks, tokens, K, top_k)
    yield ExchangeCall(2, 64, 130, 2, torch.float32, torch.int32)


def _slots() -> Iterator[SlotsCall]:
    """Experts that are brought into slots, few and as many as there may be."""
    for experts, slots in ((8, 3), (128, 51), (256, 100), (1024, 1023)):
        for ids in (torch.int32, torch.int64, None):
            yield SlotsCall(experts, slots, 2, ids)
    for pieces in (4, 6, 8):
        yield SlotsCall(128, 51, pieces)


def _routers() -> Iterator[RouterCall]:
    deepseek: dict[str, Any] = {
        "logits": torch.float32,
        "choice": ("sigmoid", True, 8, 4),
        "correction_bias": True,
    }
    for M in (1, 2, 4):
        yield RouterCall((8, 2, 4096), M)
        yield RouterCall((256, 8, 7168), M, **deepseek)
    yield RouterCall((60, 4, 1000), 16, torch.float32, torch.float32, bias=True)


def _compiled(call: AnyCall, gpu: str, arch: Arch, compiles: bool) -> list[Compiled]:
    return compile_any(call, gpu_of(arch, gpu), arch, compiles)


def _configuration(one: Compiled) -> str:
    constants = " ".join(f"{key}={value}" for key, value in one.constants.items())
    return f"{constants} warps={one.warps} registers={one.registers}"


def configurations(arch: Arch) -> list[Reached]:
    """(call, GPU) by which each configuration is reached, the first of them."""
    found: set[tuple[str, str]] = set()
    chosen = []
    for gpu in ("", *MEASURED.get(arch, ())):
        for call in calls():
            if refused(call, arch):
                continue
            new = {(o.name, _configuration(o)) for o in _compiled(call, gpu, arch, False)} - found
            if new:
                found |= new
                chosen.append((call, gpu))
    return chosen


def one_each(arch: Arch) -> list[Reached]:
    """(call, GPU) by which each kernel is reached: a fraction of all calls reaches all that are
    reached at all. The rest is asked only where a kernel is missing.
    """
    rare = [
        *_adapted(),
        *_routers(),
        *_around_products(),
        *_steps(),
        *_exchanges(),
        *_slots(),
    ]  # which alone reach their kernels
    common = [call for call in calls() if call not in rare]
    apart = 37  # has no factor in common with the number of TOKENS, so that all of these come
    in_turns = [call for start in range(apart) for call in common[start::apart]]
    wanted = {name for name in kernel_names() if not why_left_out(name, arch)}
    found: set[str] = set()
    chosen = []
    for gpu in ("", *MEASURED.get(arch, ())):
        for call in (*rare, *in_turns):
            if wanted <= found:
                return chosen
            if refused(call, arch):
                continue
            names = {one.name for one in _compiled(call, gpu, arch, False)}
            if names - found:
                found |= names
                chosen.append((call, gpu))
    return chosen


_usages: dict[str, Usage] = {}  # of this process, by the kernel's hash


def compile_one(arch: Arch, what: Reached) -> list[Row]:
    """The kernels of a call. Where one does not compile, the call's others are left out, too."""
    call, gpu = what
    try:
        compiled = _compiled(call, gpu, arch, True)
    except Exception as error:  # whatever the compiler raises is the finding
        return [Row("", "", str(what), error=_reason(error))]
    for one in compiled:
        if one.binary.hash not in _usages:
            _usages[one.binary.hash] = usage(one.binary)
    key = (environment.release(triton.__version__), arch, getattr(call, "scheme", ""))
    limit = KNOWN_SPILLED.get(key, SPILLED)
    return [
        Row(one.name, _configuration(one), str(what), limit, *_usages[one.binary.hash])
        for one in compiled
    ]


def _reason(error: BaseException) -> str:
    kernel = "; ".join(getattr(error, "__notes__", ()))
    while error.__cause__ is not None:  # the innermost says what is wrong
        error = error.__cause__
    return f"{kernel}: {type(error).__name__}: {str(error)[-400:]}"


def _alone(arch: Arch, what: Reached) -> list[Row]:
    """`compile_one` in a process of its own: an assertion that fails ends the compiler's."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(compile_one, arch, what).result()
        except BrokenProcessPool:
            return [Row("", "", str(what), error="the compiler aborted")]


def compile_all(arch: Arch, todo: Sequence[Reached], jobs: int) -> list[Row]:
    """What was found, once for each configuration."""
    found: dict[tuple[str, str], Row] = {}
    size = 64 * jobs  # not all at once, since an abort repeats its chunk
    for chunk in [todo[i : i + size] for i in range(0, len(todo), size)]:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            try:
                answers = list(pool.map(partial(compile_one, arch), chunk))
            except BrokenProcessPool:
                answers = [_alone(arch, what) for what in chunk]
        for row in [row for rows in answers for row in rows]:
            found.setdefault((row.kernel, row.configuration or row.call), row)
    return list(found.values())


def why_left_out(kernel: str, arch: Arch) -> str:
    """Why no call reaches a kernel on an architecture; empty where none should be left out."""
    if isinstance(arch, str):
        return _why_left_out_on_amd(kernel)
    if "_flashinfer_" in kernel:
        return "runs around FlashInfer's kernels, which compile_flashinfer.py compiles"
    around = ("moe_ops_permute_tokens", "moe_ops_permute_hidden")
    if "_wgmma_" in kernel or "_token_gemm" in kernel or kernel in around:
        if arch != 90:
            return "takes part in products of wgmma or their bits, of compute capability 9.0 alone"
        return environment.why_no_gluon(triton.__version__) or ""
    if "_tma_" in kernel and arch not in (90, 100):
        return "needs the shared memory of compute capability 9.0"
    if "_cutlass_" in kernel and arch < 90:
        return "runs around CUTLASS's products, which are built for compute capability 9.0"
    if "_train_" in kernel and arch < 90:
        return "runs around torch's grouped products, which need compute capability 9.0"
    if kernel in AROUND_BOTH and arch < 90:
        return "runs around products of DeepGEMM and CUTLASS, which need compute capability 9.0"
    return ""


def _why_left_out_on_amd(kernel: str) -> str:
    for part, why in LEFT_OUT_ON_AMD.items():
        if part in kernel:
            return why
    return ""


def _refusals(arch: Arch) -> set[str]:
    """Why schemes do not run on an architecture in their natural layout."""
    natural = [call for call in calls() if isinstance(call, Call) and not call.layout]
    return {why for call in natural if call.backend == "triton" for why in refused(call, arch)}


def faults(arch: Arch, rows: Iterable[Row]) -> list[str]:
    """What is beyond a limit, in words."""
    found = []
    for row in rows:
        where = f"{arch_name(arch)} {row.kernel} [{row.configuration}] of {row.call}"
        if row.error:
            found.append(f"{where}: {row.error}")
        if row.spilled > row.most_spilled:
            found.append(f"{where}: {row.spilled} bytes spilled at {row.registers} registers")
        if row.registers > (REGISTERS_AMD if isinstance(arch, str) else REGISTERS):
            found.append(f"{where}: {row.registers} registers")
        if row.shared > SHARED_MEMORY[arch]:
            found.append(f"{where}: {row.shared} bytes of shared memory")
    return found


def compile_here(arches: Iterable[Arch], one: bool, jobs: int, out: Path | None) -> list[str]:
    """Compile with the installed Triton; answers what is wrong."""
    wrong, written = [], {}
    for arch in arches:
        start = time.perf_counter()
        todo = (one_each if one else configurations)(arch)
        rows = compile_all(arch, todo, jobs)
        written[arch] = [row._asdict() for row in rows]
        seconds = time.perf_counter() - start
        print(
            f"Triton {triton.__version__}, {arch_name(arch)}: {len(rows)} configurations, "
            f"{seconds:.0f} s"
        )
        for reason in sorted(_refusals(arch)):
            print(f"  {reason}")
        for kernel in kernel_names():
            own = [row for row in rows if row.kernel == kernel]
            if own:
                most = [
                    max(getattr(row, f) for row in own) for f in ("registers", "spilled", "shared")
                ]
                print(
                    f"  {kernel:32s} {len(own):4d}  registers {most[0]:3d}  spilled {most[1]:3d}  "
                    f"shared {most[2]:6d}"
                )
                continue
            reason = why_left_out(kernel, arch)
            print(f"  {kernel:32s} left out: {reason or 'NO REASON'}")
            if not reason:
                wrong.append(f"{arch_name(arch)} {kernel}: no call reaches it")
        wrong += faults(arch, rows)
        print(end="", flush=True)
    if out:
        out.write_text(json.dumps({"triton": triton.__version__, "rows": written}))
    print(*[f"FAULT {line}" for line in wrong], sep="\n")
    return wrong


def _folder_of(version: str) -> Path:
    """Where a version of Triton is; downloaded where it is not."""
    folder = ROOT / "build" / "triton" / version
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        subprocess.run([*command, str(folder), f"triton=={version}"], check=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--triton", nargs="*", metavar="VERSION", help="without one: all supported"
    )
    parser.add_argument("--arch", type=arch_of, nargs="+", default=ARCHITECTURES)
    parser.add_argument("--one", action="store_true", help="one configuration of each kernel")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="JSON file for all rows of the installed version")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    if arguments.triton is None:
        return bool(compile_here(arguments.arch, arguments.one, arguments.jobs, arguments.out))
    options = ["--arch", *map(str, arguments.arch), "--jobs", str(arguments.jobs)]
    options += ["--one"] if arguments.one else []
    failed = []
    for version in arguments.triton or VERSIONS:
        environment = dict(os.environ)
        if version != triton.__version__:
            path = [str(_folder_of(version)), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        command = [sys.executable, __file__, *options]
        if subprocess.run(command, env=environment).returncode:
            failed.append(version)
    print("failed with Triton " + ", ".join(failed) if failed else "all versions passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
