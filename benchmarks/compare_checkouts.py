"""Two checkouts of this library, or one with two Tritons, timed in one run, cell by cell in turn
on the same GPU.

    python benchmarks/compare_checkouts.py BEFORE AFTER [--shapes qwen3 mixtral]
                                           [--schemes bf16 fp8_block router] [--tokens 1 8 64]
                                           [--rounds 7] [--out FILE]
    python benchmarks/compare_checkouts.py .  .@TRITON  # with another Triton, from its folder
    python benchmarks/compare_checkouts.py --report FILE ...

Each checkout runs in a process of its own, with its own benchmarks/: both build a cell of
benchmarks/experts.py (implementation "moe_ops"), capture it in a CUDA graph and then replay it in
turn, so that clocks and neighbours harm both alike. Some cells are no layers: `router`
is `route_tokens` on hidden states; `training`, `lora` and `qlora_int4` are steps of
benchmarks/training.py (of the experts, of adapters, of adapters over int4 weights), called and not
replayed. With several GPUs, shapes are shared out among them. Printed for each cell: both medians
and their ratio, and how far the results differ; at the end the cells whose ratio is over --limit.
FILE gets a row a cell; cells that it holds are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

FULL_TOKENS = (1, 8, 32, 64, 256, 1024, 4096)
DECODE_TOKENS = (1, 8, 32, 64, 256)
MIXED = (
    *("fp8_w8a16:channel", "int8_w8a16:channel", "int4_w4a16:g64", "int4_w4a16:g64:zp"),
    *("mxfp4_w4a16", "nvfp4_w4a16"),
)
MIXED_128 = (*(name.replace("g64", "g128") for name in MIXED), "int4_w4a16:g32")
TABLE = {  # shape -> schemes with all numbers of tokens, schemes with those of decoding
    "qwen3": (("bf16", "fp8_block"), ("fp8_channel", "fp8_tensor", "int8_w8a8", *MIXED_128)),
    "mixtral": (("bf16", "fp8_block"), ("fp8_channel", *MIXED_128)),
    "gptoss20": (("bf16",), MIXED),
    "gptoss120": ((), MIXED),
    "phi35": ((), MIXED_128),
    "qwen3next": ((), MIXED_128),
    "dsv3": (("fp8_block",), ()),
    "glm45air": (("bf16", "fp8_block"), ()),
    "scout": (("bf16",), ()),
    "e64": (("bf16", "fp8_block"), ()),
}
STEPS = ("training", "lora", "qlora_int4")
PARTS = ("router", *STEPS)  # asked for by name
PART_TOKENS = {"router": DECODE_TOKENS, **dict.fromkeys(STEPS, (4096,))}


class Side(NamedTuple):
    """A checkout's folder, and that of the Triton it runs with; "" for the installed one."""

    folder: str
    triton: str

    @classmethod
    def of(cls, text: str) -> Side:
        """FOLDER or FOLDER@TRITON."""
        folder, _, other = text.partition("@")
        return cls(str(Path(folder).resolve()), str(Path(other).resolve()) if other else "")


def cells_of(arguments: argparse.Namespace) -> dict[str, list[tuple[str, str, int]]]:
    """Shape -> (shape, scheme, tokens) to measure."""
    found: dict[str, list[tuple[str, str, int]]] = {}
    for shape, (full, decode) in TABLE.items():
        if arguments.shapes and shape not in arguments.shapes:
            continue
        for schemes, tokens in ((full, FULL_TOKENS), (decode, DECODE_TOKENS)):
            for scheme in schemes:
                if arguments.schemes and scheme not in arguments.schemes:
                    continue
                wanted = arguments.tokens or tokens
                found.setdefault(shape, []).extend((shape, scheme, M) for M in wanted)
        for part in PARTS:
            if part in (arguments.schemes or ()):
                all_of = PART_TOKENS[part]
                some = [M for M in all_of if M in (arguments.tokens or all_of)] or all_of
                found.setdefault(shape, []).extend((shape, part, M) for M in some)
    return found


# --- a process of one checkout ------------------------------------------------------------------


def worker(folder: str) -> None:
    """Answer requests, one JSON a line: prepare a cell, replay it."""
    sys.path[:0] = [folder, f"{folder}/benchmarks", f"{folder}/tools"]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the error stream

    import torch
    from cases import SHAPES, Case, make_cell, make_plain_weights, make_sets, make_weights
    from harness import capture, relative_error
    from peers import IMPLEMENTATIONS

    torch.set_grad_enabled(False)
    device = torch.device("cuda")
    kept: dict[str, Any] = {}

    def layer(shape: str, scheme: str, tokens: int) -> tuple[Callable[[int], Any], int]:
        """A layer's call with the number of a routing set, and how many sets there are."""
        name = "" if scheme == "bf16" else scheme
        if kept.get("shape") != shape:
            kept.clear()
            torch.cuda.empty_cache()
            kept.update(shape=shape, plain=make_plain_weights(SHAPES[shape], device))
        if kept.get("scheme") != scheme:
            kept.pop("builder", None)
            kept.pop("weights", None)
            torch.cuda.empty_cache()
            kept["weights"] = make_weights(SHAPES[shape], name, *kept["plain"])
            kept["builder"] = IMPLEMENTATIONS["moe_ops"].make(kept["weights"])
            kept["scheme"] = scheme
        case = Case(shape, name, tokens, "uniform")
        sets = make_sets(case, 60 << 20)
        return kept["builder"](make_cell(case, kept["weights"], sets)).call, len(sets)

    def prepare(shape: str, scheme: str, tokens: int, file: str) -> dict[str, Any]:
        """Build a cell; its last result goes to a file."""
        for name in ("run", "last", "outputs", "call"):
            kept.pop(name, None)
        if scheme in STEPS:
            run = _training_step(shape, tokens, "full" if scheme == "training" else scheme)
            for _ in range(3):
                last, sets = run(), 1
        else:
            make = _router if scheme == "router" else layer
            call, sets = make(shape, scheme, tokens)
            for _ in range(2):
                call(sets - 1)
            graph, outputs = capture(call, sets)
            run, last = graph.replay, outputs[-1]
            run()
            # a graph holds none of its inputs: other tensors would get their memory
            kept.update(outputs=outputs, call=call)
        torch.cuda.synchronize()
        kept.update(run=run, last=last, waits=scheme in STEPS)
        torch.save(last, file)
        return {"sets": sets, "sum": _digest(last), "check": checksum()}

    def differs(file: str) -> dict[str, Any]:
        """How far this side's last result is from the one in a file."""
        return {"difference": relative_error(kept["last"], torch.load(file))}

    def replay(count: int) -> dict[str, Any]:
        times = []
        run = kept["run"]
        run()
        for _ in range(count):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if kept["waits"]:
                torch.cuda._sleep(50_000_000)  # 25 ms, in which the host launches the whole step
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return {"us": times, "check": checksum()}

    def checksum() -> int | None:
        """Of the results of all routing sets of a graph: each replay gives the same."""
        bits = [out.view(torch.int16).sum(dtype=torch.int64) for out in kept.get("outputs", ())]
        return int(torch.stack(bits).sum()) if bits else None

    def compile_all(cells: list) -> dict[str, Any]:
        from compile_kernels import TRITON_E2M1, Call, compile_here

        calls = []
        for shape, scheme, tokens in cells:
            if scheme in PARTS:
                continue
            one = SHAPES[shape]
            sizes = (one.num_experts, one.top_k, one.hidden_size, one.intermediate_size)
            layout = TRITON_E2M1 if scheme in ("mxfp4_w4a16", "nvfp4_w4a16") else ""
            name = "" if scheme == "bf16" else scheme
            calls.append(Call(sizes, tokens, name, layout=layout))
        compile_here(calls)
        return {}

    def facts() -> dict[str, Any]:
        import triton
        from records import describe_run

        found = describe_run([], dry=True)
        versions = found["versions"] | {"triton": triton.__version__}
        return {"machine": found["machine"], "versions": versions, "of": found["moe_ops_sources"]}

    requests = {
        "prepare": prepare,
        "differs": differs,
        "replay": replay,
        "compile": compile_all,
        "facts": facts,
    }
    for line in sys.stdin:
        name, values = json.loads(line)
        try:
            answer = requests[name](*values)  # type: ignore[operator]
        except Exception as error:  # the other checkout and the other cells go on
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


def _router(shape: str, _: str, tokens: int) -> tuple[Callable[[int], Any], int]:
    """A router's call with the number of a set of hidden states, and how many sets there are."""
    import torch
    from cases import SHAPES

    import moe_ops

    one, count = SHAPES[shape], 32
    rng = torch.Generator("cuda").manual_seed(tokens)
    size = (count, tokens, one.hidden_size)
    x = torch.randn(size, generator=rng, device="cuda").to(torch.bfloat16)
    weight = (
        torch.randn((one.num_experts, one.hidden_size), generator=rng, device="cuda")
        / one.hidden_size**0.5
    )
    weight = weight.to(torch.bfloat16)
    return lambda which: moe_ops.route_tokens(x[which], weight, one.top_k)[1], count


def _training_step(shape: str, tokens: int, trains: str) -> Callable[[], Any]:
    """Forward and backward pass of a layer; gives the tokens' gradient."""
    import torch
    from training_cases import ADAPTED, Case, gradients, make_inputs
    from training_peers import IMPLEMENTATIONS

    case = Case(shape, trains, tokens, ADAPTED.get(trains, ""))
    with torch.enable_grad():
        inputs = make_inputs(case, torch.device("cuda"))
        step = IMPLEMENTATIONS["moe_ops"](case, inputs)

    def run() -> Any:
        with torch.enable_grad():
            return gradients(step, inputs)["x"]

    return run


def _digest(tensor: Any) -> str:
    """Of the bits of a tensor: equal digests mean equal results."""
    import hashlib

    import torch

    return hashlib.sha1(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


class Worker:
    """A process that holds one side's cells."""

    def __init__(self, side: Side, gpu: int):
        folder = side.folder
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        path = [folder, f"{folder}/benchmarks"]
        if side.triton:
            path.insert(0, side.triton)
            environment["TRITON_CACHE_DIR"] = f"{side.triton}.cache"
        path += [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--worker", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )

    def send(self, name: str, *values: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps([name, values]), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a worker ended; its error stands above")
        return json.loads(line)

    def ask(self, name: str, *values: Any) -> dict[str, Any]:
        self.send(name, *values)
        return self.answer()


# --- the driver ---------------------------------------------------------------------------------


def measure(pair: list[Worker], cell: tuple[str, str, int], rounds: int) -> dict[str, Any]:
    """One row: both checkouts' median microseconds a layer."""
    row: dict[str, Any] = dict(zip(("shape", "scheme", "num_tokens"), cell, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        for i, one in enumerate(pair):
            one.send("prepare", *cell, f"{folder}/{i}")
        facts = [one.answer() for one in pair]
        for fact in facts:
            if "error" in fact:
                return {**row, "error": fact["error"]}
        difference = pair[1].ask("differs", f"{folder}/0")["difference"]
    times: list[list[float]] = [[], []]
    for turn in range(rounds):
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            answer = pair[i].ask("replay", 5)
            if facts[i]["check"] != answer["check"]:
                return {**row, "error": "the result changed while the graph was replayed"}
            times[i] += answer["us"]
    before, after = (statistics.median(t) / facts[0]["sets"] for t in times)
    row |= {"before_us": round(before, 3), "after_us": round(after, 3)}
    return {
        **row,
        "ratio": round(after / before, 4),
        "same_bits": facts[0]["sum"] == facts[1]["sum"],
        "difference": float(f"{difference:.2g}"),
    }


def describe(row: dict[str, Any]) -> str:
    where = f"{row['shape']} {row['scheme']} M={row['num_tokens']}"
    if "error" in row:
        return f"{where}: {row['error']}"
    far = f" by {row['difference']:.1e}" if "difference" in row else ""
    bits = "" if row["same_bits"] else f", other bits{far}"
    return f"{where}: {row['before_us']:.1f} -> {row['after_us']:.1f} us, {row['ratio']:.3f}{bits}"


def report(rows: list[dict[str, Any]], limit: float) -> int:
    """Print a summary; how many cells are over the limit or failed."""
    done = [row for row in rows if "ratio" in row]
    failed = [row for row in rows if "ratio" not in row]
    over = sorted((row for row in done if row["ratio"] > limit), key=lambda row: -row["ratio"])
    if done:
        ratios = [row["ratio"] for row in done]
        mean = statistics.geometric_mean(ratios)
        print(
            f"{len(done)} cells: geometric mean {mean:.4f}, {min(ratios):.3f} to {max(ratios):.3f}"
        )
        other = sum(not row["same_bits"] for row in done)
        print(f"{len(done) - other} with the same bits, {other} with others")
    for row in (*over, *failed):
        print("  " + describe(row))
    print(f"{len(over)} over {limit}, {len(failed)} failed")
    return len(over) + len(failed)


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all cells on all GPUs, each shape on one."""
    sides = [Side.of(text) for text in (arguments.before, arguments.after)]
    path = Path(arguments.out)
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {(row["shape"], row["scheme"], row["num_tokens"]) for row in rows}
    shapes = {s: [c for c in cs if c not in known] for s, cs in cells_of(arguments).items()}
    pending = sorted(shapes.values(), key=len)
    pairs = [[Worker(side, gpu) for side in sides] for gpu in range(arguments.gpus)]
    start = time.monotonic()
    if not arguments.no_compile:
        everything = [cell for cells in pending for cell in cells]
        for one in pairs[0]:  # one after the other: each uses all cores
            print(one.ask("compile", everything), flush=True)
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    before, after = (one.ask("facts") for one in pairs[0])
    command = " ".join(["python", *sys.argv])
    facts = {"before": before, "after": after, "command": command}
    lock = threading.Lock()

    def go(pair: list[Worker]) -> None:
        for cell in _next(pending, lock):
            if time.monotonic() - start > arguments.seconds:
                return
            row = measure(pair, cell, arguments.rounds)
            with lock:
                rows.append(row)
                print(describe(row), flush=True)
                path.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")

    threads = [threading.Thread(target=go, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in [one for pair in pairs for one in pair]:
        one.process.kill()
    return rows


def _next(pending: list[list], lock: threading.Lock) -> Iterator[tuple[str, str, int]]:
    """Cells of one shape after the other, the shapes with most cells first."""
    while True:
        with lock:
            if not pending:
                return
            cells = pending.pop()
        yield from cells


def gpu_found() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", nargs="?", help="FOLDER or FOLDER@TRITON")
    parser.add_argument("after", nargs="?", help="FOLDER or FOLDER@TRITON")
    parser.add_argument("--shapes", nargs="+", choices=TABLE)
    parser.add_argument("--schemes", nargs="+")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no cell later")
    parser.add_argument("--limit", type=float, default=1.02)
    parser.add_argument("--no-compile", action="store_true", help="compile cell by cell")
    parser.add_argument("--out", default="compare_checkouts.json")
    parser.add_argument("--report", nargs="+", metavar="FILE")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return
    if arguments.report:
        rows = [row for f in arguments.report for row in json.loads(Path(f).read_text())["rows"]]
    else:
        if arguments.before is None or arguments.after is None:
            parser.error("BEFORE and AFTER must be folders of two checkouts, or --report be given")
        if not gpu_found():
            print("This benchmark needs a GPU; none found, nothing measured.")
            return
        rows = run(arguments)
    sys.exit(report(rows, arguments.limit) > 0)


if __name__ == "__main__":
    main()
