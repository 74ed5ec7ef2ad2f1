"""Time the tiles of the triton backend's products that the ranker puts first against those that the
rules choose, for models that no table names.

    python benchmarks/sweep_tiles.py --out sweep.json [--seconds 330]
    python benchmarks/sweep_tiles.py --dry   # without a GPU: list all configs, build launches

Whole layers run under CUDA-graph replay with routing sets whose weights exceed the L2, those of
moe_ops.tuning; the configs of a cell are replayed in turn, so that drifting clocks favour none. Of
many rows the other backends are timed beside them. The JSON file is written after each cell: a list
of {shape, scheme, num_tokens, us: [[config, median microseconds], ...], backends: {name: us}}, the
rules' config first.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from moe_ops.choose.candidates import Gemm, tiles
from moe_ops.choose.rank import expected_blocks, gemm_cycles, layer_cycles
from moe_ops.kernels.configs import GEMV, SM90_TMA, GemmConfig, LayerConfig, fields_of, override
from moe_ops.kernels.gemm import configs
from moe_ops.kernels.launch import Gpu
from moe_ops.tuning import search

H200 = Gpu(227 * 1024, True, True)
SHAPES = {  # E, top_k, K, I
    "qwen235": (128, 8, 4096, 1536),
    "glm46": (160, 8, 5120, 1536),
    "minimax2": (256, 8, 3072, 1536),
    "olmoe": (64, 8, 2048, 1024),
    "kimi": (384, 8, 7168, 2048),
}
GROUPS = (
    *(("qwen235", ""), ("qwen235", "fp8_block"), ("glm46", "fp8_block"), ("olmoe", "")),
    *(("minimax2", "fp8_block"), ("glm46", ""), ("olmoe", "fp8_block"), ("minimax2", "")),
    ("kimi", "fp8_block"),
)
TOKENS = (4096, 1024, 512, 64, 2048, 256, 1, 8, 128, 32)  # in the order of their importance
BACKENDS = ("cutlass", "deep_gemm")
REPLAYS = 7
SHORT_RING = 48 << 10  # bytes of a stage, from which two of them are tried


class Cell(NamedTuple):
    shape: str
    scheme: str
    num_tokens: int

    @property
    def average(self) -> float:
        """Average rows of an expert."""
        E, top_k, _, _ = SHAPES[self.shape]
        return self.num_tokens * top_k / E


def rule(cell: Cell) -> LayerConfig:
    """What the rules choose without a table."""
    E, top_k, K, I = SHAPES[cell.shape]  # noqa: E741
    scales = ("block", "group") if cell.scheme else ("", "")
    facts = (torch.bfloat16, H200, cell.scheme, scales, True)
    tma = cell.average >= configs.LARGE_ROWS
    one = cell.num_tokens == 1
    return configs._for_experts.__wrapped__(
        cell.num_tokens, top_k, E, K, I, *facts, tma, one, tables=False
    )


def gemms(cell: Cell, config: LayerConfig) -> tuple[Gemm, Gemm]:
    """The facts of both products with a config's kernels."""
    _, _, K, I = SHAPES[cell.shape]  # noqa: E741
    size, quantized, tma = 1 if cell.scheme else 2, bool(cell.scheme), config.kernel == SM90_TMA
    all_n = (64, 128, 256)
    ones = (256,) if quantized and not config.h_in_fp32 else (128, 256) if tma else all_n
    twos = ((128,) if quantized else (128, 256)) if tma else all_n
    x1 = 1 if quantized and config.quantize_x else 2
    x2 = 2 if not quantized else 4 if config.h_in_fp32 else 1
    return Gemm(2 * I, K, size, x1, quantized, ones), Gemm(K, I, size, x2, quantized, twos)


def nearest(space: list[GemmConfig], to: GemmConfig, most: int) -> list[GemmConfig]:
    """Those of a space that differ least from a config, in octaves."""

    def distance(config: GemmConfig) -> float:
        return sum([abs(math.log2(a / b)) for a, b in zip(config, to, strict=True)])

    return [c for c in sorted(space, key=distance) if c != to][:most]


def first(cell: Cell, gemm: Gemm, rows: int, most: int) -> list[GemmConfig]:
    """The tiles of `rows` rows that the ranker puts first, of equal ones those with most stages."""
    blocks = SHAPES[cell.shape][0] * expected_blocks(cell.average, rows)
    best: dict[tuple, tuple[float, GemmConfig]] = {}
    for config in tiles(gemm, rows, H200):
        stage = (config.block_n * gemm.w_size + rows * gemm.x_size) * config.block_k
        if not (3 if stage < SHORT_RING else 2) <= config.num_stages <= 5:
            continue
        cycles = gemm_cycles(gemm, config, rows, min(rows, max(1.0, cell.average)), blocks, H200)
        key = (config.block_n, config.block_k, config.num_warps)
        if key not in best or cycles <= 1.005 * best[key][0]:
            best[key] = (cycles, config)
    return [config for _, config in sorted(best.values())][:most]


def candidates(cell: Cell) -> list[LayerConfig]:
    """The configs of a cell, the rules' first."""
    base = rule(cell)
    _, _, K, I = SHAPES[cell.shape]  # noqa: E741
    if base.kernel == GEMV:
        ones, twos = configs.gemv_space(base, K, I)
        found = [base]
        of_one = nearest([c.gemm1 for c in ones], base.gemm1, 5)
        found += [base._replace(gemm1=gemm) for gemm in of_one]
        of_two = nearest([c.gemm2 for c in twos], base.gemm2, 5)
        return found + [base._replace(gemm2=gemm) for gemm in of_two]
    average, E = cell.average, SHAPES[cell.shape][0]
    if base.kernel == SM90_TMA:
        kinds = [base._replace(block_m=m, split_m=s) for m, s in ((64, 1), (128, 1), (128, 2))]
    else:
        wanted = [m for m in (16, 32, 64, 128) if average / 4 <= m <= max(16, 4 * average)]
        kinds = [base._replace(block_m=m) for m in wanted]
    ranked = []
    for kind in kinds:
        one, two = gemms(cell, kind)
        rows = kind.block_m // kind.split_m
        ones = first(cell, one, kind.block_m, 3) or [kind.gemm1]
        twos = first(cell, two, rows, 3) or [kind.gemm2]
        best = kind._replace(gemm1=ones[0], gemm2=twos[0])
        pairs = [best, kind] + [best._replace(gemm1=g) for g in ones[1:]]
        pairs += [best._replace(gemm2=g) for g in twos[1:]]
        ranked.append((layer_cycles(one, two, best, E, average, H200), pairs))
    ranked.sort(key=lambda item: item[0])
    most = len(ranked) if base.kernel == SM90_TMA else 2
    found = [base] + [config for _, pairs in ranked[:most] for config in pairs]
    found += [pairs[0] for _, pairs in ranked[most:]]
    return list(dict.fromkeys(found))


def target(shape: str, scheme: str) -> search.Target:
    E, top_k, K, I = SHAPES[shape]  # noqa: E741
    return search.Target(E, K, I, top_k, scheme)


def compile_all(todo: dict[Cell, list[LayerConfig]], deadline: float) -> None:
    """Fill Triton's cache, by one process a core. Kernels are compiled alike for all shapes, whose
    sizes tiles divide, so that a small one stands for them.
    """
    jobs = {}
    for cell, found in todo.items():
        for config in found:
            few = replace(target("olmoe", cell.scheme), num_experts=8)
            jobs[few, min(cell.num_tokens, 2), config._replace(sort_chunk=256)] = None
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(
        max(1, cores - 1), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        running = [pool.submit(search._compile, *job) for job in jobs]
        done, late = wait(running, timeout=max(1.0, deadline - time.monotonic()))
        for job in late:
            job.cancel()
        print(f"compiled {len(done)} of {len(jobs)}", flush=True)


def graph_of(bench: search.Bench, config: LayerConfig) -> Any:
    """The CUDA graph of a layer with a config on all routing sets, or None if it cannot run."""

    def layer() -> None:
        for x, weights, ids in bench.inputs:
            search.fused_experts(x, bench.w13, bench.w2, weights, ids, backend="triton")

    with override(config):
        try:
            layer()
            return search.captured(layer)
        except Exception as error:  # out of registers or shared memory
            if "illegal" in str(error) or "assert" in str(error):
                raise
            return None


def others(bench: search.Bench) -> dict[str, Any]:
    """The CUDA graphs of other backends."""
    from moe_ops.tuning.backends import laid_out

    found = {}
    x, _, ids = bench.inputs[0]
    for name in BACKENDS:
        try:
            w13, w2 = laid_out(name, bench.w13, bench.w2, x, ids)

            def layer(name: str = name, w13: Any = w13, w2: Any = w2) -> None:
                for x, weights, ids in bench.inputs:
                    search.fused_experts(x, w13, w2, weights, ids, backend=name)

            layer()
            found[name] = search.captured(layer)
        except Exception as error:
            print(f"  not {name}: {' '.join(str(error).split())[:160]}", flush=True)
    return found


@torch.no_grad()
def measure(bench: search.Bench, cell: Cell, found: list[LayerConfig]) -> dict[str, Any]:
    """Times of a cell's configs and, of many rows, of other backends."""
    bench.prepare(cell.num_tokens)
    graphs = {config: graph_of(bench, config) for config in found}
    named = {config: graph for config, graph in graphs.items() if graph is not None}
    beside = others(bench) if cell.num_tokens >= 256 else {}
    every = [*named.values(), *beside.values()]
    search.replay_us(every, warm_up_seconds=0.15)
    sets = len(bench.inputs)
    rounds = [search.replay_us(every) for _ in range(REPLAYS)]
    us = [statistics.median(times) / sets for times in zip(*rounds, strict=True)]
    own = [[fields_of(config), value] for config, value in zip(named, us, strict=False)]
    rest = dict(zip(beside, us[len(named) :], strict=True))
    return cell._asdict() | {"us": own, "backends": rest}


def run(out: Path, seconds: float) -> None:
    start = time.monotonic()
    end = start + seconds
    cells = [Cell(shape, scheme, M) for shape, scheme in GROUPS for M in TOKENS]
    todo = {cell: candidates(cell) for cell in cells}
    compile_all(todo, start + 0.4 * seconds)
    print(f"after compiling: {time.monotonic() - start:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for i, (shape, scheme) in enumerate(GROUPS):
        now = time.monotonic()
        until = now + (end - now) / (len(GROUPS) - i)
        if end - now < 5:
            break
        bench = search.Bench(target(shape, scheme))
        for M in TOKENS:
            if time.monotonic() > until:
                break
            cell = Cell(shape, scheme, M)
            try:
                row = measure(bench, cell, todo[cell])
            except torch.cuda.OutOfMemoryError as error:
                print(f"  {cell}: {error}", flush=True)
                continue
            rows.append(row)
            out.write_text(json.dumps(rows))
            base, best = row["us"][0][1], min([us for _, us in row["us"]])
            print(
                f"{cell.shape} {cell.scheme or 'bf16'} M={M}: rule {base:.1f}, best {best:.1f} "
                f"({base / best:.3f}) of {len(row['us'])}, {row['backends']}, "
                f"{time.monotonic() - start:.0f} s",
                flush=True,
            )
        del bench
        torch.cuda.empty_cache()


def dry() -> None:
    """List all configs, and build the launches of each."""
    from compile_kernels import Call, compile_call, gpu_of

    jobs = set()
    for shape, scheme in GROUPS:
        for M in sorted(TOKENS):
            cell = Cell(shape, scheme, M)
            found = candidates(cell)
            for config in found:
                jobs.add((scheme, min(M, 2), config))
                with override(config) as seen:
                    launched = compile_call(Call(SHAPES[shape], M, scheme), gpu_of(90), 90, False)
                assert seen and set(seen) == {config} and launched, (cell, config)
            print(cell, len(found))
            for config in found:
                print("   ", config)
    print(f"{len(jobs)} to compile")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("sweep.json"))
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args()
    if arguments.dry:
        return dry()
    return run(arguments.out, arguments.seconds)


if __name__ == "__main__":
    main()
