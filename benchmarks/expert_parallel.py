"""One expert layer over the GPUs of a host: the dispatchers of moe_ops against transformers.

    torchrun --nproc-per-node 2 benchmarks/expert_parallel.py [--shapes qwen3 dsv3]
        [--schemes bf16 fp8_block] [--tokens 1 8 64 128 512 4096 8192] [--peers] [--missing]
        [--results FOLDER]
    torchrun --nproc-per-node 2 benchmarks/expert_parallel.py --dry-run  # tiny, on CPUs with gloo
    python benchmarks/expert_parallel.py --merge FILE ...  # add another run's rows to the results
    python benchmarks/expert_parallel.py --report          # table and plot of all rows

--tokens are those of one GPU. All implementations get the same weights, tokens and routings, as
many tokens in all, and give each GPU the outputs of its own tokens; where they are called
`all_reduce` every GPU has all tokens, before and after; `quantized` sends tokens as the scheme
quantizes them, others in bf16. `moe_ops one GPU` runs all tokens with
all experts on each GPU, and sends nothing. What can be captured is timed in CUDA graphs of one
pass over all routings, the implementations in turn; `eager` is the time of calls from Python. Each
time is the largest of all ranks, then the median. `dispatch` and `combine` are graphs of these
steps alone. `error` is the largest of all ranks against fp64 products of the scheme's numbers.

First of all the bandwidth of a copy from one GPU to another is measured. The floor is the time in
which each GPU reads its part of the weights that are hit, or multiplies its part of the pairs,
beside the time in which that bandwidth brings tokens and outputs over once.

--peers times expert parallelism of transformers 5.23 or later (grouped_mm, plain weights), and in
fp8_block `fp8_mega_moe` of sgl-deep-gemm 0.1.5, one kernel that sends, multiplies and adds up, for
GPUs of compute capability 9.0. It scales intermediate values by groups of 64, not 128, so its
error is allowed to be larger. Where an older transformers is installed, unpack a newer wheel,
which is pure Python, and put it first:

    pip download --no-deps transformers==5.24.0 && unzip -q transformers-*.whl -d /tmp/site
    PYTHONPATH=/tmp/site torchrun ... --peers

NVLink multicast is left alone: NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1 and
NVSHMEM_DISABLE_NVLS=1 are set for every rank, before anything is loaded.
"""

from __future__ import annotations

import os

# in every rank: on some hosts multicast takes the GPUs out of service
os.environ |= {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}

import argparse
import contextlib
import datetime
import functools
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import report
import torch
import torch.distributed as dist
from harness import capture, interleaved_replays_us, relative_error
from records import add_options
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moe_ops
from moe_ops.bench import layers
from moe_ops.parallel import wire
from moe_ops.parallel.dispatch import DISPATCHERS, Dispatcher
from moe_ops.parallel.dispatchers import AllReduce
from moe_ops.parallel.placement import Placement, shard_experts

SHAPES = ("qwen3", "dsv3")
TOKENS = (1, 8, 64, 128, 512, 4096, 8192)
NAMES = report.SPREAD
MAX_ERROR = 0.02
FEW_TOKENS = 512  # of a rank; above, fewer calls are timed
MAX_SETS = (8, 4)  # of routings, for few tokens and for more
CHECKED_TOKENS = 32  # of a rank


@dataclass
class Job:
    """What all ranks of this run share."""

    rank: int
    size: int
    device: torch.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """All ranks have done what they were given."""
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier()

    def largest(self, values: list[float]) -> list[float]:
        """Of each, the largest of all ranks."""
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()


@dataclass
class Problem:
    """One case: tokens of all ranks, and experts, all of them and those of this rank."""

    job: Job
    cell: cases.Cell
    w13: Tensor
    w2: Tensor

    @property
    def num_tokens(self) -> int:
        """Of one rank."""
        return self.cell.case.num_tokens // self.job.size

    @property
    def mine(self) -> slice:
        """This rank's tokens."""
        return slice(self.job.rank * self.num_tokens, (self.job.rank + 1) * self.num_tokens)

    @functools.cached_property
    def expected(self) -> tuple[Tensor, Tensor]:
        """Some of this rank's tokens, and their outputs on the last set in fp64."""
        M, cell = self.num_tokens, self.cell
        tokens = torch.linspace(0, M - 1, min(M, CHECKED_TOKENS)).long() + self.mine.start
        quantized = bool(cell.case.scheme)
        outputs = cases.oracle(cell, len(cell.sets) - 1, tokens, quantized, quantized)
        return tokens.to(outputs.device), outputs


@dataclass
class Way:
    """How the layer is run. `call(which)` gives the outputs of `rows` on a set of routings."""

    call: Callable[[int], Tensor]
    rows: slice
    steps: dict[str, Callable[[int], Any]]
    capturable: bool = True
    max_error: float = MAX_ERROR


def one_gpu(problem: Problem) -> Way:
    cell = problem.cell
    weights = [moe_ops.prepare(w, "triton") for w in (cell.weights.w13, cell.weights.w2)]

    def call(which: int) -> Tensor:
        routing = cell.sets[which]
        return moe_ops.fused_experts(cell.hidden_states, *weights, routing.weights, routing.ids)

    return Way(call, slice(None), {})


def spread(name: str, quantized: bool = False) -> Callable[[Problem], Way]:
    """The layer over all ranks by a dispatcher, which sends tokens as they are or as the experts'
    scheme quantizes them.
    """

    def make(problem: Problem) -> Way:
        cell, job = problem.cell, problem.job
        if quantized and (
            reason := wire.why_not_quantized(problem.w13, cell.case.layer.hidden_size)
        ):
            raise ValueError(reason)
        kind = DISPATCHERS.get(name, AllReduce)
        rows = slice(None) if kind is AllReduce else problem.mine
        x = cell.hidden_states[rows]
        sets = [(ids[rows], weights[rows]) for weights, ids in cell.sets]
        M = x.shape[0]
        dispatcher: Dispatcher = kind(dist.group.WORLD.group_name, job.size, M)
        placement = Placement(cell.case.layer.num_experts, job.size)
        expert_map = placement.expert_map(job.rank).to(job.device)

        exchange = getattr(dispatcher, "exchange", "")
        later = not quantized and getattr(dispatcher, "sends_rows_later", False)
        later = later and wire.pays_later(cell.case.scheme)
        if later and wire.quantizes_later(cell.case.scheme, cell.case.layer.hidden_size):
            exchange = dispatcher.exchange_quantized  # type: ignore[attr-defined]

        def dispatch(which: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
            if quantized:
                sent = wire.quantize_rows(x, problem.w13)
                return dispatcher.dispatch_quantized(sent.q, sent.scale, *sets[which])  # type: ignore[attr-defined]
            arrived, ids, weights = dispatcher.dispatch(x, *sets[which])
            return arrived, None, ids, weights

        def call(which: int) -> Tensor:
            if later:
                ids, weights = dispatcher.dispatch_routing(*sets[which])  # type: ignore[attr-defined]
                arrived, scale = x, None
            else:
                arrived, scale, ids, weights = dispatch(which)
            out = moe_ops.fused_experts(
                *(arrived, problem.w13, problem.w2, weights, ids),
                expert_map=expert_map,
                hidden_states_scale=scale,
                out_dtype=x.dtype if quantized else None,
                exchange=exchange,
            )
            return out[:M] if exchange else dispatcher.combine(out, M)

        out = torch.randn_like(cell.hidden_states)
        steps: dict[str, Callable] = {"combine": lambda which: dispatcher.combine(out, M)}
        if kind is not AllReduce:  # which sends nothing before
            steps["dispatch"] = dispatch
        return Way(call, rows, steps)

    return make


def transformers_ep(name: str) -> Callable[[Problem], Way]:
    """One of transformers' expert-parallel implementations around its grouped_mm."""

    def make(problem: Problem) -> Way:
        from transformers.distributed.expert_parallel import EPImplementationInterface

        cell, job = problem.cell, problem.job
        if cell.case.scheme:
            raise ValueError("its fp8 experts take kernels that are fetched from a hub")
        experts: Any = layers.transformers_experts(
            cell.case.layer, problem.w13, problem.w2, "grouped_mm"
        )
        experts.num_experts, experts._is_expert_parallel = problem.w13.shape[0], True
        mesh = mesh_of(job.device.type, job.size)
        shared = name == "all_reduce"  # of tokens that all ranks have
        layer = EPImplementationInterface()[name](
            experts, mesh["ep"], mesh["ep"] if shared else mesh["tp"]
        )
        rows = slice(None) if shared else problem.mine
        x = cell.hidden_states[rows]
        ids = [routing.ids[rows].long() for routing in cell.sets]
        weights = [routing.weights[rows].to(x.dtype) for routing in cell.sets]
        return Way(lambda which: layer(x, ids[which], weights[which]), rows, {}, shared)

    return make


def mega_moe(problem: Problem) -> Way:
    """sgl-deep-gemm's kernel over GPUs, after the one that quantizes tokens into its buffer."""
    cell, job, sizes = problem.cell, problem.job, problem.cell.case.layer
    if cell.case.scheme != "fp8_block":
        raise ValueError("it multiplies e4m3 by e4m3 with scales of blocks alone")
    import deep_gemm

    placement = Placement(sizes.num_experts, job.size)
    w13, w2 = (
        (part.qdata, part.scale)
        for part in (
            shard_experts(w, placement, job.rank) for w in (cell.weights.w13, cell.weights.w2)
        )
    )
    w13, w2 = deep_gemm.transform_weights_for_mega_moe_sm90(w13, w2)
    x, M = cell.hidden_states[problem.mine], problem.num_tokens
    sets = [
        (ids[problem.mine].int().contiguous(), weights[problem.mine].float().contiguous())
        for weights, ids in cell.sets
    ]
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
        *(dist.group.WORLD, sizes.num_experts, M, sizes.top_k),
        *(sizes.hidden_size, sizes.intermediate_size),
    )

    def call(which: int) -> Tensor:
        out = torch.empty_like(x)
        into = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
        deep_gemm.mega_moe_pre_dispatch_sm90(x, *sets[which], *into, M)
        deep_gemm.fp8_mega_moe(out, w13, w2, buffer)
        return out

    return Way(call, problem.mine, {}, max_error=0.06)


@functools.cache  # a mesh has process groups of its own
def mesh_of(device_type: str, size: int) -> DeviceMesh:
    return init_device_mesh(device_type, (size, 1), mesh_dim_names=("ep", "tp"))


MAKERS = {
    "moe_ops one GPU": one_gpu,
    "moe_ops allgather_reducescatter": spread("allgather_reducescatter"),
    "moe_ops all_to_all": spread("all_to_all"),
    "moe_ops symmetric_memory": spread("symmetric_memory"),
    "moe_ops symmetric_memory, quantized": spread("symmetric_memory", quantized=True),
    "moe_ops all_reduce": spread("all_reduce"),
    "transformers all_reduce": transformers_ep("all_reduce"),
    "transformers all_to_all": transformers_ep("all_to_all"),
    "sgl-deep-gemm fp8_mega_moe": mega_moe,
}


# --- times ---------------------------------------------------------------------------------------


def run_case(problem: Problem, names: list[str]) -> list[dict]:
    """A row of numbers for each implementation, or the reason why it has none."""
    case, job = problem.cell.case, problem.job
    rows, ways, graphs = [], {}, {}
    keep: list[Any] = []
    sets = range(len(problem.cell.sets))
    for name in names:
        row: dict[str, Any] = {
            "shape": case.shape,
            "scheme": case.scheme,
            "num_tokens": problem.num_tokens,
            "implementation": name,
        }
        rows.append(row)
        try:
            way = MAKERS[name](problem)
            for which in sets:
                out = way.call(which)
            (row["error"],) = job.largest([error_of(problem, way, out)])
            row["error"] = float(f"{row['error']:.3g}")
            if not row["error"] < way.max_error:
                raise ValueError(f"its outputs are wrong: relative error {row['error']:.3g}")
            if job.cuda and way.capturable:
                for step, call in {"layer": way.call, **way.steps}.items():
                    graphs[f"{name}/{step}"], outputs = captured(job, call, len(sets))
                    keep.append(outputs)
            ways[name] = way
        except Exception as error:  # a peer may fail in any way, on all ranks alike
            row["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    few = problem.num_tokens <= FEW_TOKENS
    calls = {name: way.call for name, way in ways.items()}
    eager = eager_us(job, calls, len(sets), 3 if few else 2)
    replays = graph_us(job, graphs, len(sets), 20 if few else 8) if graphs else {}
    for row in rows:
        name = row["implementation"]
        if name in ways:
            row["eager_us"] = eager[name]
            row["us"] = replays.get(f"{name}/layer", eager[name])
            row["graph"] = f"{name}/layer" in replays
            for step in ways[name].steps:
                if (key := f"{name}/{step}") in replays:
                    row[f"{step}_us"] = replays[key]
    return rows


def error_of(problem: Problem, way: Way, out: Tensor) -> float:
    """Of the outputs of this rank's tokens on the last set, against fp64."""
    tokens, expected = problem.expected
    error = relative_error(out[tokens - (way.rows.start or 0)], expected)
    return error if math.isfinite(error) else math.inf  # a maximum could lose NaN


def captured(job: Job, call: Callable[[int], Any], num_sets: int) -> tuple[Any, Any]:
    """A graph of one pass over the sets, and its outputs, which later graphs leave alone."""
    for which in range(num_sets):
        call(which)
    job.synchronize()
    torch.cuda.empty_cache()  # what calls left is not for a graph's own pool
    return capture(call, num_sets)


def graph_us(job: Job, graphs: dict, num_sets: int, replays: int) -> dict[str, float]:
    """Medians over replays of the largest of all ranks, us a set."""
    for _ in range(3):
        for graph in graphs.values():
            graph.replay()
    job.synchronize()
    # no warm-up by time: the ranks must replay equally often
    found = interleaved_replays_us(graphs, replays, num_sets, warm_up_seconds=0)
    return {name: median(job, times) for name, times in found.items()}


def eager_us(job: Job, calls: dict, num_sets: int, rounds: int) -> dict[str, float]:
    """Medians over calls from Python, each with a set of its own."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(rounds * num_sets):
        for name, call in calls.items():
            job.synchronize()
            start = time.perf_counter()
            if job.cuda:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
            call(step % num_sets)
            if job.cuda:
                end.record()
                torch.cuda.synchronize()
                times[name].append(begin.elapsed_time(end) * 1e3)
            else:
                times[name].append((time.perf_counter() - start) * 1e6)
    return {name: median(job, found) for name, found in times.items()}


def median(job: Job, times: list[float]) -> float:
    return round(statistics.median(job.largest(times)), 2)


def peer_copy_gb_s(job: Job) -> dict[str, float]:
    """GB/s of copies from the first GPU to the second, alone and with one the other way."""
    found = {}
    if job.cuda and job.rank == 0 and torch.cuda.can_device_access_peer(0, 1):
        data = [torch.randn(64 << 20, device=f"cuda:{i}") for i in range(2)]
        targets = [torch.empty_like(data[1 - i]) for i in range(2)]
        streams = [torch.cuda.Stream(torch.device("cuda", i)) for i in range(2)]
        for name, directions in (("peer_copy_gb_s", (0,)), ("both_ways_gb_s", (0, 1))):
            best = float("inf")
            for _ in range(6):
                for i in range(2):
                    torch.cuda.synchronize(i)
                start = time.perf_counter()
                for _ in range(4):
                    for i in directions:
                        with torch.cuda.stream(streams[i]):
                            targets[i].copy_(data[i], non_blocking=True)
                for i in range(2):
                    torch.cuda.synchronize(i)
                best = min(best, (time.perf_counter() - start) / 4)
            found[name] = round(data[0].nbytes / best / 1e9, 1)  # each way
        del data, targets
        torch.cuda.empty_cache()
    dist.barrier()
    return found


# --- the run -------------------------------------------------------------------------------------


@contextlib.contextmanager
def joined(dry: bool) -> Iterator[Job]:
    """This process as one rank of the run that torchrun started."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu") if dry else torch.device("cuda", rank)
    if not dry:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if dry else "nccl",
        timeout=datetime.timedelta(seconds=120),
        device_id=None if dry else device,
    )
    try:
        yield Job(rank, size, device)
    finally:
        dist.destroy_process_group()


def problems(job: Job, given: argparse.Namespace) -> Iterator[Problem]:
    for shape in given.shapes:
        sizes = cases.SHAPES[shape]
        plain = cases.make_plain_weights(sizes, job.device)
        placement = Placement(sizes.num_experts, job.size)
        for scheme in given.schemes:
            weights = cases.make_weights(sizes, scheme, *plain)
            local = [shard_experts(w, placement, job.rank) for w in (weights.w13, weights.w2)]
            if job.cuda:
                local = [moe_ops.prepare(w, "triton") for w in local]
            for tokens in given.tokens:
                case = cases.Case(shape, scheme, tokens * job.size)
                sets = cases.make_sets(case, 0)[-MAX_SETS[tokens > FEW_TOKENS] :]
                cell = cases.make_cell(case, weights, sets)
                yield Problem(job, cell, *local)
            del weights, local, cell


def floor_us(problem: Problem, machine: dict) -> float | None:
    """Of the experts, divided over the GPUs, and of the wire."""
    if not {"copy_tb_s", "peer_copy_gb_s"} <= machine.keys():
        return None
    rate = machine["bf16_matmul_tflop_s"] * 1e12
    limits = cases.Limits(machine["copy_tb_s"] * 1e12, rate, 2 * rate)
    cell, size = problem.cell, problem.job.size
    layer = cases.floor_us(cell.case, cell.sets, limits) / size
    sent = 2 * (size - 1) * problem.num_tokens * cell.case.layer.hidden_size * 2
    return round(layer + sent / machine["peer_copy_gb_s"] / 1e3, 2)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    schemes = ["bf16", *filter(None, cases.SCHEMES)]
    parser.add_argument("--shapes", nargs="+", choices=cases.SHAPES, default=[*SHAPES])
    parser.add_argument("--schemes", nargs="+", choices=schemes, default=["bf16", "fp8_block"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[*TOKENS], help="of one GPU")
    parser.add_argument("--peers", action="store_true", help="transformers 5.23 or later, too")
    parser.add_argument("--missing", action="store_true", help="only cases not measured so far")
    add_options(parser)
    given = parser.parse_args()
    given.schemes = ["" if scheme == "bf16" else scheme for scheme in given.schemes]
    return given


def main() -> int:
    given = parse()
    if given.merge or given.report:
        report.merge_and_report(given.merge, given.results, "expert_parallel")
        return 0
    if "RANK" not in os.environ:
        raise SystemExit("start it by torchrun --nproc-per-node 2")
    if given.dry_run:
        given.shapes, given.tokens = ["tiny"], [1, 4]
        torch.set_num_threads(1)
        given.results = Path(tempfile.gettempdir(), f"expert_parallel_{os.environ['RANK']}")
    names = [name for name in NAMES if given.peers or name.startswith("moe_ops")]
    with joined(given.dry_run) as job:
        copied = peer_copy_gb_s(job)
        gpu = torch.cuda.get_device_name().replace(" ", "_") if job.cuda else "cpu"
        results = report.open_results(given.results / f"expert_parallel_{gpu}_x{job.size}.json")
        run = results.begin(sys.argv, not job.cuda)
        machine = results.runs[run]["machine"]
        machine |= {"gpus": job.size} | copied
        if job.rank == 0:
            print(f"{job.size} x {gpu}: {copied}", flush=True)
        for problem in problems(job, given):
            case = problem.cell.case
            keys = [(case.shape, case.scheme, problem.num_tokens, name) for name in names]
            if given.missing and all(results.measured(key, run) for key in keys):
                continue
            start = time.perf_counter()
            with torch.no_grad():
                rows = run_case(problem, names)
            for row in rows:
                row["floor_us"] = floor_us(problem, machine)
                results.add(row | {"run": run})
            if job.rank == 0:
                report.show_spread(rows)
                print(f"  {time.perf_counter() - start:.1f} s", flush=True)
                results.write()  # a run that is cut short keeps what it has
            del problem
            gc.collect()
            if job.cuda:
                torch.cuda.empty_cache()
            dist.barrier()
        if job.rank == 0:
            print(results.path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
