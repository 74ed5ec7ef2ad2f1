"""Kernels under compute-sanitizer, at small sizes: the CUDA kernels of moe_ops/csrc, the Triton
kernels of training steps, or those that bring experts from host memory.

    python tools/sanitize_kernels.py [--calls training] [--tools memcheck racecheck]
                                          [--leave-out NAME] [--timeout 120] [--together]
                                          [--write]

`cutlass`: every scheme and dtype that backend `cutlass` takes on this GPU is run, on few and on
many tokens, with an expert that no token picks, and on batches; results are compared with backend
`torch`. `training`: the steps of sanitize_steps.py, compared with plain torch. `residency`: the
calls of sanitize_residency.py, compared with layers whose experts are all on the GPU. A kernel
that none of these calls launches is an error, so that a new one is not forgotten. Each tool is a
run of its own, after one without any, which compiles Triton's kernels; with --together the runs of
all tools share the GPU.

memcheck and initcheck look at all kernels, each tensor in an allocation of its own: initcheck has
to see what Triton's kernels write for CUTLASS's. racecheck and synccheck look at CUTLASS's alone.
Of training steps each tool looks at its own kernels alone (moe_ops_train_*), and the steps are
compared with plain torch in the run without a tool alone, whose thousands of launches no tool has
to follow. initcheck is not run there: products write by the tensor memory accelerator, too.
Where CUTLASS writes is zeroed before a call, because initcheck misses what it does: it does not
see copies of the tensor memory accelerator to global memory, and takes it for a read that
tensormap.cp_fenceproxy exchanges each word of a tensor map (on SM90 ATOMG.EXCH, result unused).
Tests poison these buffers with NaN instead.

compute-sanitizer is the one that COMPUTE_SANITIZER names, that is on PATH, or that the package
nvidia-cuda-sanitizer-api brings. --write keeps what was found in benchmarks/results, in
sanitizer_<GPU>.json, beside what other tools found of the same object, or in
sanitizer_training_<GPU>.json and sanitizer_residency_<GPU>.json. Exits with 1 where a tool found
anything.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

from harness import RESULTS, format_table, machine_facts, relative_error, versions, write_json
from sanitize_residency import run_residency
from sanitize_steps import run_steps

import moe_ops
from moe_ops.activations import Activation
from moe_ops.backends.cutlass import library, products
from moe_ops.backends.cutlass.backend import BACKEND
from moe_ops.backends.cutlass.grouped import Grouped
from moe_ops.backends.cutlass.schemes import parts
from moe_ops.bench.layers import quantized
from moe_ops.csrc import build
from moe_ops.kernels.activation import activated
from moe_ops.schemes import get_scheme
from moe_ops.tuning.backends import laid_out

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# the tools of each set of calls that look at the kernels alone whose names hold what stands below
OF_OURS = {
    "cutlass": ("racecheck", "synccheck"),
    "training": ("memcheck", "racecheck", "synccheck"),
    "residency": ("memcheck", "racecheck", "synccheck"),
}
OURS = {"cutlass": "cutlass", "training": "moe_ops_train", "residency": "_experts"}
RUN = {"training": run_steps, "residency": run_residency}
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard).*")
FOUND = 9  # the exit code of a tool that found anything
E, TOP_K, K, I = 5, 2, 256, 256
RANK = 5  # of what a product adds
TOKENS = (1, 100, 300, 420)  # each tile of int4; of fp8 less than one tile and more of them
STATIC_SCALE = 0.02
MAX_ERROR = 0.08  # from backend torch, both rounding to 8 or 4 bits
MARK = "ran: "


class Report(NamedTuple):
    """What a run launched, and what was wrong with it."""

    calls: list[str]
    kernels: list[str]
    wrong: list[str]


def weights(scheme: str, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """Small w13 and w2 of a scheme."""
    rng = torch.Generator(device).manual_seed(0)
    activation = get_scheme(scheme).activation
    scale = STATIC_SCALE if activation is not None and activation.static else None
    found = []
    for rows, columns in ((2 * I, K), (K, I)):
        plain = torch.randn(E, rows, columns, generator=rng, device=device) / columns**0.5
        plain = plain.to(dtype)
        found.append(quantized(plain, scheme, scale) if scheme else plain)
    return found[0], found[1]


def recorded(names: list[str]) -> Callable[..., None]:
    """What stands for Gemms.run, and notes which kernels it launches."""
    launch = library.Gemms.run

    def run(self: library.Gemms, kernel: str, gemm: Any) -> None:
        names.append(kernel)
        launch(self, kernel, gemm)

    return run


def with_outputs_zeroed(
    self: Grouped, a: Any, gemms: library.Gemms, kernel: str, start: int
) -> None:
    """What stands for Grouped.__init__, and zeroes where the GEMMs write."""
    INITIALIZE(self, a, gemms, kernel, start)
    at = parts(start, self.E, self.kind)
    for written in (a.index_workspace[at.descriptors : at.shared], a.workspace2, a.out):
        written.zero_()


INITIALIZE = Grouped.__init__
# functions of `products` that write their first argument
INTO = ("multiply_into", "activate_into", "multiply_blocks_into", "activate_blocks_into")


def zeroing(into: Callable[..., None]) -> Callable[..., None]:
    """A function of `products` that zeroes what it writes first."""

    def run(out: Tensor | products.Scaled, *args: Any, **options: Any) -> None:
        for written in (out,) if isinstance(out, Tensor) else out:
            written.view(torch.uint8).zero_()
        into(out, *args, **options)

    return run


def layers(scheme: str, dtype: torch.dtype, device: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(call, its result, that of backend torch) of all calls on a scheme that are possible."""
    w13, w2 = weights(scheme, dtype, device)
    rng = torch.Generator(device).manual_seed(1)
    x = torch.randn(max(TOKENS), K, generator=rng, device=device).to(dtype)
    scores = torch.rand(max(TOKENS), E - 1, generator=rng, device=device)  # none picks the last
    router, ids = scores.topk(TOP_K)
    ids = ids.to(torch.int32)
    prepared = laid_out("cutlass", w13, w2, x, ids)
    for M in TOKENS:
        args = (router[:M], ids[:M])
        out = moe_ops.fused_experts(x[:M], *prepared, *args, backend="cutlass")
        # on the CPU: initcheck takes what torch's own grouped product does for a read
        known = [t.cpu() for t in (x[:M], w13, w2, *args)]
        expected = moe_ops.fused_experts(*known, backend="torch").to(device)
        yield f"{scheme or 'plain'} {str(dtype).removeprefix('torch.')} M={M}", out, expected
    batches = torch.randn(E, 8, K, generator=rng, device=device).to(dtype)
    counts = torch.arange(E, device=device, dtype=torch.int32)
    try:
        out = moe_ops.batched_experts(batches, *prepared, counts, backend="cutlass")
    except ValueError:  # this scheme runs in layers of tokens alone
        return
    known = [t.cpu() for t in (batches, w13, w2, counts)]
    expected = moe_ops.batched_experts(*known, backend="torch").to(device)
    valid = torch.arange(8, device=device) < counts[:, None]
    yield f"{scheme} {str(dtype).removeprefix('torch.')} batches", out[valid], expected[valid]


def grouped_products(device: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(call, its result, that of torch) of products of bf16 rows, where this GPU has them."""
    rows, dtype = (100, 0, 300, 64, 7), torch.bfloat16  # of each expert
    rng = torch.Generator(device).manual_seed(2)
    ends = torch.tensor(rows, device=device).cumsum(0).int()
    x, y = [torch.randn(sum(rows), K, generator=rng, device=device).to(dtype) for _ in range(2)]
    w = torch.randn(len(rows), I, K, generator=rng, device=device).to(dtype)
    parts, others = x.double().split(rows), y.double().split(rows)
    found = [products.multiply(x, w, ends), products.multiply(x, w, ends, transpose=True)]
    allocate = Tensor.new_empty
    Tensor.new_empty = Tensor.new_zeros  # type: ignore[method-assign]
    try:
        found.append(products.outer(x, y, ends))
    finally:
        Tensor.new_empty = allocate  # type: ignore[method-assign]
    experts = list(zip(parts, others, w.double(), strict=True))
    expected = [torch.cat([rows @ one.mT for rows, _, one in experts])]
    expected.append(torch.cat([rows @ one for rows, _, one in experts]))
    expected.append(torch.stack([rows.mT @ other for rows, other, _ in experts]))
    for call, out, exact in zip(("x w^T", "x w", "a^T b"), found, expected, strict=True):
        if out is not None:
            yield f"products of rows: {call}", out, exact
    if found[0] is None:
        return
    # with steps along a rank that is filled up to 8, and biases in shared memory
    sizes = (sum(rows), RANK), (len(rows), I, RANK)
    u, low = [torch.randn(*size, generator=rng, device=device).to(dtype) for size in sizes]
    more = torch.cat([a @ b.mT for a, b in zip(u.double().split(rows), low.double(), strict=True)])
    out = products.multiply(x, w, ends, low=(u, low))
    assert out is not None
    yield "products of rows: x w^T and a low rank", out, expected[0] + more
    bias, gate_up = torch.randn(len(rows), I, generator=rng, device=device), torch.zeros_like(out)
    out = out.new_zeros(out.shape[0], I // 2)
    of = activated(Activation("silu"))
    products.activate_into(out, x, w, ends, of, bias, gate_up, (u, low))
    h = expected[0] + more
    yield "products of rows: gate and up, and a low rank", gate_up, h
    h = h + bias.double().repeat_interleave(torch.tensor(rows, device=device), 0)
    yield "products of rows: activated with biases", out, F.silu(h[:, : I // 2]) * h[:, I // 2 :]


SCHEMES = ("", *BACKEND.takes.native_schemes)


def run_calls(device: str, schemes: tuple[str, ...] = SCHEMES) -> Report:
    """Run every call that backend cutlass takes on this device."""
    calls: list[str] = []
    kernels: list[str] = []
    wrong: list[str] = []
    launch = library.Gemms.run
    library.Gemms.run = recorded(kernels)  # type: ignore[method-assign]
    Grouped.__init__ = with_outputs_zeroed  # type: ignore[method-assign]
    into = {name: getattr(products, name) for name in INTO}
    for name, function in into.items():
        setattr(products, name, zeroing(function))
    try:
        for scheme in schemes:
            for dtype in (torch.bfloat16, torch.float16):
                try:
                    for call, out, expected in layers(scheme, dtype, device):
                        calls.append(call)
                        far = relative_error(out, expected.double())
                        if not far <= MAX_ERROR:  # NaN, too
                            wrong.append(f"{call}: relative error {far:.3g}")
                except (ValueError, ImportError) as error:
                    print(f"not {scheme} {dtype}: {error}", flush=True)
        for call, out, expected in grouped_products(device):
            calls.append(call)
            far = relative_error(out, expected)
            if not far <= MAX_ERROR:
                wrong.append(f"{call}: relative error {far:.3g}")
    finally:
        library.Gemms.run = launch  # type: ignore[method-assign]
        Grouped.__init__ = INITIALIZE  # type: ignore[method-assign]
        for name, function in into.items():
            setattr(products, name, function)
    return Report(calls, sorted(set(kernels)), wrong)


def kernels_of(path: Path) -> list[str]:
    """The kernels of an object, from the names of its functions."""
    names = re.findall(rb"(?<=\0)(moe_ops_sm\d+_\w+)_run(?=\0)", path.read_bytes())
    return sorted({name.decode() for name in names})


def object_path() -> Path:
    """The object of this GPU, built if it is not there."""
    return build.ensure(library.architecture(torch.cuda.get_device_capability()), library._cache())


def compute_sanitizer() -> str:
    """Its command. Raises FileNotFoundError where there is none."""
    named = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer")
    if named:
        return named
    for folder in map(Path, filter(None, sys.path)):
        for path in folder.glob("nvidia/*/bin/compute-sanitizer"):
            return str(path)
    raise FileNotFoundError(
        "compute-sanitizer is neither on PATH nor named by COMPUTE_SANITIZER; pip install "
        "nvidia-cuda-sanitizer-api, of a version no newer than the driver's CUDA"
    )


def run_tool(prefix: list[str], timeout: float, calls: str = "cutlass") -> dict[str, Any]:
    """Run all of these calls behind the command of a tool, or of none; what came of it."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    worker = [sys.executable, str(Path(__file__).resolve()), "--worker", "--calls", calls]
    command = [*prefix, *worker, *(["--uncompared"] if prefix else [])]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment,
            timeout=timeout,
        )  # fmt: skip
        code, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        parts = [part or b"" for part in (error.stdout, error.stderr)]
        code = 124
        said = "".join(p if isinstance(p, str) else p.decode(errors="replace") for p in parts)
    result: dict[str, Any] = {"exit": code, "seconds": round(time.monotonic() - start, 1)}
    summaries = SUMMARY.findall(said)
    if prefix:
        result["found"] = int(summaries[-1]) if summaries else None
    ran = [line for line in said.splitlines() if line.startswith(MARK)]
    result |= json.loads(ran[-1].removeprefix(MARK)) if ran else {}
    if code or result.get("found"):
        lines = [line for line in said.splitlines() if line.strip()]
        reported = [line for line in lines if line.startswith("=========")]
        result["said"] = (reported or lines[-20:])[:40]
    return result


def clean(result: dict[str, Any]) -> bool:
    """Whether a run ended well, launched something, and its tool says that it found nothing."""
    right = result["exit"] == 0 and bool(result.get("kernels")) and not result.get("wrong")
    return right and result.get("found", 0) == 0


def worker(calls: str, compared: bool) -> int:
    """Run the calls in this process, and print what they launched."""
    report = Report(*RUN[calls]("cuda", compared=compared)) if calls in RUN else run_calls("cuda")
    torch.cuda.synchronize()
    wrong = report.wrong
    if calls == "cutlass":
        missing = sorted(set(kernels_of(object_path())) - set(report.kernels))
        wrong = wrong + [f"{name} is never launched" for name in missing]
    print(MARK + json.dumps({"calls": report.calls, "kernels": report.kernels, "wrong": wrong}))
    return bool(wrong)


def object_of(calls: str) -> str | None:
    """The name of the object that holds the kernels of these calls, built if it is not there; None
    of those that Triton compiles.
    """
    return object_path().name if calls == "cutlass" else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", choices=OURS, default="cutlass")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, help="by default all of these calls")
    parser.add_argument("--timeout", type=float, default=120, help="seconds a tool may take")
    parser.add_argument("--leave-out", metavar="NAME", help="kernels whose names hold it")
    parser.add_argument("--together", action="store_true", help="run all tools at the same time")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--uncompared", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    calls = arguments.calls
    if not torch.cuda.is_available():
        print("The kernels need a GPU; none found, nothing was run.")
        return 0
    if arguments.worker:
        return worker(calls, not arguments.uncompared)
    tools = arguments.tools or (OF_OURS[calls] if calls in RUN else TOOLS)
    command = compute_sanitizer()
    said = subprocess.run([command, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"Version ([\d.]+)", said)
    name = object_of(calls)  # built before anything is timed
    results = {"no tool": run_tool([], 10 * arguments.timeout, calls)}
    print("no tool:", "clean" if clean(results["no tool"]) else results["no tool"], flush=True)

    def run_of(tool: str) -> dict[str, Any]:
        some = ["--kernel-regex", f"kns={OURS[calls]}"] if tool in OF_OURS[calls] else []
        if arguments.leave_out:
            some += ["--kernel-regex-exclude", f"kns={arguments.leave_out}"]
        prefix = [command, "--tool", tool, "--error-exitcode", str(FOUND), *some]
        return run_tool(prefix, arguments.timeout, calls)

    with ThreadPoolExecutor(len(tools) if arguments.together else 1) as pool:
        for tool, result in zip(tools, pool.map(run_of, tools), strict=True):
            results[tool] = result
            for line in result.get("said", []):
                print(f"  {line}")
            print(f"{tool}: {'clean' if clean(result) else 'NOT CLEAN'}", flush=True)
    if arguments.write:
        ran = results["no tool"].get("calls", [])
        for result in results.values():
            result.pop("calls", None)
        facts = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "machine": machine_facts(),
            "versions": versions("torch", "triton"),
            "compute_sanitizer": found[1] if found else None,
            "object": name,
            "left_out": arguments.leave_out,
            "calls": ran,
            "tools": results,
        }
        gpu = torch.cuda.get_device_name().replace(" ", "_")
        before = RESULTS / f"sanitizer_{'' if calls == 'cutlass' else f'{calls}_'}{gpu}.json"
        known = json.loads(before.read_text()) if before.exists() else {}
        if name is not None and known.get("object") == name:
            facts["tools"] = known["tools"] | results
        print(write_json(before.stem, facts))
    lines = [
        [tool, result["exit"], result.get("found", "-"), len(result.get("kernels", [])),
         result["seconds"], "clean" if clean(result) else "NOT CLEAN"]
        for tool, result in results.items()
    ]  # fmt: skip
    print(format_table(["tool", "exit", "found", "kernels", "seconds", ""], lines))
    return 0 if all(clean(result) for result in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
