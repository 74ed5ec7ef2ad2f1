"""Layers whose tokens have adapters of a stack, beside the same layers without adapters.

    python benchmarks/adapters_mixed.py [--shape qwen3 mixtral] [--scheme "" fp8_block ...]
                                        [--M 8 64] [--adapters 8] [--rank 16] [--results FOLDER]
                                        [--flashinfer FOLDER] [--limit SECONDS]
    python benchmarks/adapters_mixed.py --profile   # kernels of one call of each cell
    python benchmarks/adapters_mixed.py --dry-run   # all but graphs and times, tiny, on a CPU

Every call is in a CUDA graph over several routings and mixtures, in which each token has any of
the adapters, or with one chance in n + 1 none. `allowed` is 1.25 times the layer without adapters,
by whichever backend "auto" takes, plus what a copy takes for the bytes of the adapters that are
hit. `error` is the distance from plain torch. Rows are written to
FOLDER/adapters_mixed_<GPU>.json as they come; past the limit no layer is begun.

`peer` is the layer without adapters and, behind it, FlashInfer's four kernels for adapters of
rank 16 (flashinfer_bgmv.py): what a layer around them takes at least.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import flashinfer_bgmv
import torch
from harness import RESULTS
from records import describe_run
from torch import Tensor

import moe_ops
from moe_ops.bench.shapes import SHAPES, Shape
from moe_ops.bench.timing import (
    capture,
    interleaved_replays_us,
    relative_error,
)

SETS = 4  # routings of a graph
REPLAYS = 40
TINY = Shape(8, 2, 256, 128)
ALLOWED = 1.25


@dataclass
class Row:
    shape: str
    scheme: str
    M: int
    adapters: int
    rank: int
    backend: str  # of the layer without adapters
    plain_us: float
    adapted_us: float
    hit_bytes: int  # of adapters, a call
    copy_us: float  # of these bytes
    error: float
    peer_us: float | None = None  # of the kernels alone
    peer_error: float | None = None
    reason: str = ""  # why there is no peer

    @property
    def allowed_us(self) -> float:
        return ALLOWED * self.plain_us + self.copy_us

    def __str__(self) -> str:
        name = f"{self.shape} {self.scheme or 'bf16'} M={self.M}"
        over = self.adapted_us / self.allowed_us
        return (
            f"{name:32} {self.backend:10} {self.plain_us:8.1f} {self.adapted_us:8.1f} "
            f"{self.adapted_us / self.plain_us:6.2f} {self.hit_bytes / 2**20:8.1f} "
            f"{self.allowed_us:8.1f} {over:6.2f} {self.error:9.1e} "
            f"{'-' if self.peer_us is None else format(self.plain_us + self.peer_us, '.1f'):>8}"
        )


HEAD = (
    f"{'layer':32} {'without':10} {'us':>8} {'adapted':>8} {'ratio':>6} {'MiB hit':>8} "
    f"{'allowed':>8} {'over':>6} {'error':>9} {'peer':>8}"
)


class Tokens(NamedTuple):
    x: Tensor
    weights: Tensor
    ids: Tensor
    adapter_ids: Tensor


def layer_of(shape: Shape, scheme: str, device: torch.device) -> tuple[Tensor, Tensor]:
    E, K, I = shape.num_experts, shape.hidden_size, shape.intermediate_size
    rng = torch.Generator(device).manual_seed(0)
    found = []
    for rows, columns in ((2 * I, K), (K, I)):
        w = torch.empty(E, rows, columns, dtype=torch.bfloat16, device=device)
        w.normal_(std=columns**-0.5, generator=rng)
        found.append(moe_ops.quantize(w, scheme) if scheme else w)
    return found[0], found[1]


def stack_of(shape: Shape, n: int, rank: int, device: torch.device) -> moe_ops.LoRAStack:
    E, K, I = shape.num_experts, shape.hidden_size, shape.intermediate_size
    rng = torch.Generator(device).manual_seed(1)
    matrices = []
    for size in ((rank, K), (2 * I, rank), (rank, I), (K, rank)):
        t = torch.empty(n, E, *size, dtype=torch.bfloat16, device=device)
        matrices.append(t.normal_(std=0.3 * size[1] ** -0.5, generator=rng))
    return moe_ops.LoRAStack(*matrices, torch.ones(n, device=device))


def tokens_of(shape: Shape, M: int, n: int, seed: int, device: torch.device) -> Tokens:
    rng = torch.Generator(device).manual_seed(seed)
    x = torch.randn(M, shape.hidden_size, generator=rng, device=device).to(torch.bfloat16)
    scores = torch.randn(M, shape.num_experts, generator=rng, device=device).softmax(1)
    weights, ids = scores.topk(shape.top_k)
    adapter_ids = torch.randint(-1, n, (M,), generator=rng, device=device, dtype=torch.int32)
    return Tokens(x, weights, ids.to(torch.int32), adapter_ids)


def compile_kernels(given: Any) -> None:
    """Compile the kernels of all cells at once, of layers with and without adapters."""
    from tools.compile_kernels import Call, compile_here

    sizes = [SHAPES[name] for name in given.shape]
    compile_here(
        [
            Call(
                (one.num_experts, one.top_k, one.hidden_size, one.intermediate_size),
                *(M, scheme),
                rank=rank,
            )
            for one in sizes
            for scheme in given.scheme
            for M in given.M
            for rank in (0, given.rank)
        ]
    )


def bytes_hit(stack: moe_ops.LoRAStack, tokens: Tokens) -> int:
    """Bytes of the (adapter, expert) matrices that a call reads, each once."""
    E = stack.scales.shape[0] and stack.a13.shape[1]  # type: ignore[union-attr]
    pairs = tokens.adapter_ids.unsqueeze(1) * E + tokens.ids
    hit = pairs[tokens.adapter_ids >= 0].unique().numel()
    return hit * sum([t[0, 0].nbytes for t in stack[:4] if t is not None])


def copy_rate(device: torch.device) -> float:
    """Bytes that a copy reads and writes in a microsecond."""
    source = torch.empty(1 << 29, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return 2 * source.nbytes / statistics.median(times)


def profile(name: str, call: Callable[[], Any]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    print(name)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            print(f"    {event.name[:60]:60} {event.device_time:8.1f} us")


class Peer(NamedTuple):
    calls: Callable[[int], Any]
    error: float


def peer_of(folder: Path, stack: moe_ops.LoRAStack, sets: list[Tokens], I: int) -> Peer:
    """FlashInfer's kernels for some sets of tokens, and how far they are from fp64."""
    kernels, found = flashinfer_bgmv.Adapters(folder, stack), []
    for tokens in sets:
        pairs, like = tokens.ids.numel(), tokens.x
        hidden = torch.randn(pairs, I, device=like.device).to(like.dtype)
        found.append((kernels.call(tokens, hidden), hidden))
    call, hidden = found[0]
    both = zip(call(), flashinfer_bgmv.expected(stack, sets[0], hidden), strict=True)
    error = max([relative_error(got, wanted) for got, wanted in both])
    return Peer(lambda i: found[i][0](), error)


def measure(
    given: Any,
    name: str,
    scheme: str,
    device: torch.device,
    rate: float,
    keep: Callable[[Row], None],
) -> None:
    """Each cell of a layer, given to `keep`."""
    shape = TINY if given.dry_run else SHAPES[name]
    n, rank = given.adapters, given.rank
    w13, w2 = layer_of(shape, scheme, device)
    stack = stack_of(shape, n, rank, device)
    for M in given.M:
        sets = [tokens_of(shape, M, n, seed, device) for seed in range(SETS)]

        def plain(i: int, sets: list[Tokens] = sets) -> Tensor:
            x, weights, ids, _ = sets[i]
            return moe_ops.fused_experts(x, w13, w2, weights, ids)

        def adapted(i: int, backend: str = "auto", sets: list[Tokens] = sets) -> Tensor:
            x, weights, ids, of_tokens = sets[i]
            return moe_ops.fused_experts(
                x, w13, w2, weights, ids, adapters=stack, adapter_ids=of_tokens, backend=backend
            )

        error = max([relative_error(adapted(i), adapted(i, "torch")) for i in range(SETS)])
        hit = sum([bytes_hit(stack, one) for one in sets]) // SETS
        x, _, ids, _ = sets[0]
        explained = moe_ops.explain(x, w13, w2, ids)
        backend = next(b.name for limit, b in explained.tiers if limit < 0 or limit >= M)
        times = {"plain": [0.0], "adapted": [0.0]}
        peer, reason = None, "not asked for"
        if given.flashinfer:
            try:
                peer = peer_of(given.flashinfer, stack, sets, shape.intermediate_size)
                if not peer.error < 3e-2:
                    raise ValueError(f"relative error {peer.error:.2g}")
            except Exception as failure:  # a peer may fail in any way
                peer = None
                reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
                print(f"  FlashInfer: {reason}", flush=True)
        if not given.dry_run:
            for i in range(SETS):
                plain(i)
            calls: dict[str, Callable[[int], Any]] = {"plain": plain, "adapted": adapted}
            if peer is not None:
                calls["peer"] = peer.calls
            if given.profile:
                for kind, call in calls.items():
                    profile(f"{name} {scheme or 'bf16'} M={M} {kind}", lambda c=call: c(0))
            captured = {kind: capture(call, SETS) for kind, call in calls.items()}
            graphs = {kind: graph for kind, (graph, _) in captured.items()}
            times = interleaved_replays_us(graphs, REPLAYS, SETS)
            for i, out in enumerate(captured["adapted"][1]):  # what replays wrote
                error = max(error, relative_error(out, adapted(i, "torch")))
        medians = {kind: statistics.median(found) for kind, found in times.items()}
        row = Row(
            *(name, scheme, M, n, rank, backend, medians["plain"], medians["adapted"]),
            *(hit, hit / rate, error, medians.get("peer")),
            *((peer.error, "") if peer is not None else (None, reason)),
        )
        keep(row)
        if not error < 3e-2:
            raise ValueError(f"relative error {error:.2g} at M = {M}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["qwen3", "mixtral"])
    schemes = ["", "fp8_block", "int4_w4a16:g128"]
    parser.add_argument("--scheme", nargs="+", default=schemes)
    parser.add_argument("--M", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--flashinfer", type=Path, help="a folder with the wheel or the object")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds in all")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    until = time.perf_counter() + given.limit - 10
    if not given.dry_run and not torch.cuda.is_available():
        raise SystemExit("a GPU is needed; --dry-run runs all but graphs and times on a CPU")
    device = torch.device("cpu" if given.dry_run else "cuda")
    rate = 1.0 if given.dry_run else copy_rate(device)
    run = describe_run(sys.argv, given.dry_run)
    gpu = run["machine"].get("gpu", "CPU")
    rows: list[Row] = []
    failed: list[str] = []
    path = given.results / f"adapters_mixed_{gpu.replace(' ', '_')}.json"

    def keep(row: Row) -> None:
        rows.append(row)
        if given.dry_run:
            return
        print(row, flush=True)
        given.results.mkdir(parents=True, exist_ok=True)
        content = {"run": run, "copy_bytes_a_us": rate, "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(content, indent=1) + "\n")

    print(f"{gpu}, a copy moves {rate / 1e6:.2f} TB/s", HEAD, sep="\n")
    if not given.dry_run:
        compile_kernels(given)
    with torch.no_grad():
        for name in given.shape:
            for scheme in given.scheme:
                try:
                    if time.perf_counter() > until:
                        raise RuntimeError("the limit was reached")
                    measure(given, name, scheme, device, rate, keep)
                except Exception as error:
                    text = " ".join(str(error).split())[:300]
                    failed.append(f"{name} {scheme or 'bf16'}: {type(error).__name__}: {text}")
                    print(failed[-1], flush=True)
    if given.dry_run:
        print(f"{len(rows)} cells, largest error {max([row.error for row in rows]):.1e}")
    else:
        over = [row for row in rows if row.adapted_us > row.allowed_us]
        slower = [r for r in rows if r.peer_us and r.adapted_us > r.plain_us + r.peer_us]
        print(f"{len(rows)} cells, {len(over)} above what is allowed, {len(slower)} above peers")
        print(path)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
