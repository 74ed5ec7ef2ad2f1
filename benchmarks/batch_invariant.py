"""Batch invariance on a GPU: which kernels and tiles give the same bits, whether a token's row has
the same bits in every batch, and what that costs.

    python benchmarks/batch_invariant.py [--parts probe fuzz cost] [--shapes qwen3 mixtral]
                                         [--schemes "" fp8_block] [--replays 20] [--seconds 600]
                                         [--results FOLDER]
    python benchmarks/batch_invariant.py --report   # tables and plot of all rows
    python benchmarks/batch_invariant.py --dry-run  # tiny sizes on this machine; keeps nothing

`probe` forces one configuration after another (kernel, BLOCK_M, BLOCK_N, BLOCK_K, warps) on a
layer, and compares rows over numbers of tokens M, and with those of the configuration that
`batch_invariant` takes. `fuzz` compares rows of random batches (any M, order, duplicates, padding
ids, Zipf and one-expert routing; one in a CUDA graph) with rows of one large batch, of qwen3 in
every scheme that the mode takes, of others in one for each kind of kernel. `cost` times a layer
with the mode on and off by CUDA-graph replay, routing rotated past the L2, in us a layer.

Of every other token two experts cancel each other: they hold the same values in another order
and with the other sign. What is left are the last bits of their products, so that no rounding
hides a sum in another order.

Rows are written to FOLDER/batch_invariant_<GPU>.json after each case, and replace older ones, so
that several short runs add up; a plot of the cost lies beside it. A part that has taken --seconds
ends after the case in hand.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import report
import torch
from cases import (
    SHAPES,
    Case,
    Experts,
    Weights,
    make_cell,
    make_plain_weights,
    make_sets,
    make_weights,
)
from harness import capture, interleaved_ms, interleaved_replays_us
from records import add_options
from torch import Tensor

import moe_ops
from moe_ops import environment
from moe_ops.choose import mixed as mixed_configs
from moe_ops.choose import plain
from moe_ops.choose.table import LayerSizes, override
from moe_ops.kernels import launch
from moe_ops.kernels.configs import GEMV, GemmConfig, LayerConfig
from moe_ops.kernels.mixed_gemm import operands
from moe_ops.schemes import SCHEMES, get_scheme

PROBED = ("", "fp8_block", "fp8_channel", "fp8_tensor_static", "int8_w8a8")
PROBED += ("int4_w4a16:g128", "fp8_w8a16:channel", "int5_w5a16:g32:super:min")
PROBED += ("int6_w6a16:g16:super", "int8_w8a16:g32")
PROBE_SHAPE, PROBE_TOKENS = Experts(8, 2, 2048, 1024), (1, 2, 7, 16, 33, 64, 130, 300, 1000)


def shares_scale(scheme: str) -> bool:
    """Whether activations have a scale of the whole batch, which the mode refuses."""
    desc = get_scheme(scheme).activation
    return desc is not None and desc.group.is_tensor and not desc.static


EVERY = tuple(scheme for scheme in SCHEMES if not shares_scale(scheme))
FUZZED = (  # of the larger shapes: one for each kind of kernel
    *("", "fp8_block", "fp8_channel", "fp8_tensor_static", "int8_w8a8", "int4_w4a16:g128"),
    *("int4_w4a8", "fp8_w8a16:channel", "mxfp4_w4a16"),
)
FUZZED_WHOLE = "qwen3"  # the shape of which every scheme is compared
FUZZ_TOKENS = (*range(1, 18), 32, 64, 256, 512, 1024, 4096)
ROUTINGS = ("uniform", "zipf", "one expert", "padding")
COSTS = (("qwen3", ""), ("qwen3", "fp8_block"), ("qwen3", "int4_w4a16:g128"))
COSTS += (("qwen3", "fp8_channel"), ("qwen3", "int8_w8a8"))
COSTS += (("mixtral", ""), ("mixtral", "fp8_block"), ("dsv3", ""), ("dsv3", "fp8_block"))
COST_TOKENS = (1, 8, 64, 1024, 4096)


class Tokens(NamedTuple):
    """hidden_states (M, K), topk_weights and topk_ids (M, top_k)."""

    x: Tensor
    router: Tensor
    ids: Tensor

    def rows(self, which: Any) -> Tokens:
        return Tokens(*[t[which] for t in self])


def cancelling(shape: Experts, device: torch.device) -> tuple[Tensor, Tensor]:
    """Plain w13 and w2 of which the last expert is the first one in another order and with the
    other sign. Groups of 16 columns stay together, so that scales of groups do."""
    w13, w2 = make_plain_weights(shape, device)
    I = shape.intermediate_size
    order = torch.arange(0, I, 16).unsqueeze(1) + torch.randperm(16)
    order = order.flatten().to(device)
    w13[-1, :I], w13[-1, I:] = w13[0, :I][order], w13[0, I:][order]
    w2[-1] = -w2[0][:, order]
    return w13, w2


def make_tokens(shape: Experts, M: int, routing: str, seed: int, device: torch.device) -> Tokens:
    g, E = torch.Generator().manual_seed(seed), shape.num_experts
    x = torch.randn(M, shape.hidden_size, generator=g).to(torch.bfloat16)
    router = torch.rand(M, shape.top_k, generator=g) + 0.25
    if routing == "one expert":
        ids = torch.full((M, shape.top_k), E // 2)
    elif routing == "zipf":
        odds = 1 / torch.arange(1.0, E + 1)
        ids = torch.multinomial(odds, M * shape.top_k, True, generator=g).view(M, -1)
    else:
        low, high = (-E, 2 * E) if routing == "padding" else (0, E)
        ids = torch.randint(low, high, (M, shape.top_k), generator=g)
    return Tokens(x.to(device), router.to(device), ids.to(device))


def known_tokens(shape: Experts, M: int, device: torch.device) -> Tokens:
    """Tokens of which two experts of every other one cancel each other, and others are absent."""
    known = make_tokens(shape, M, "uniform", 1, device)
    E = shape.num_experts
    known.ids[::2] = -1
    known.ids[::2, :2] = torch.tensor([0, E - 1], device=device)
    known.router[::2] = known.router[::2, :1].clone()
    return known


def layer_of(weights: Weights, backend: str, **options: Any) -> Callable[[Tokens], Tensor]:
    def layer(tokens: Tokens) -> Tensor:
        return moe_ops.fused_experts(
            *(tokens.x, weights.w13, weights.w2, tokens.router, tokens.ids),
            backend=backend,
            **options,
        )

    return layer


# --- probe ---------------------------------------------------------------------------------------


def variants(base: LayerConfig, scheme: str, shape: Experts) -> Iterator[LayerConfig]:
    """Configurations to compare with `base`, which is the one of `batch_invariant`; those that a
    GPU cannot run give a reason."""
    E, K, I = shape.num_experts, shape.hidden_size, shape.intermediate_size
    layer = LayerSizes(E, E, K, I, launch.gpu(torch.cuda.current_device()))
    one = layer._replace(pairs=shape.top_k, top_k=shape.top_k)
    yield base
    mixed = operands.describe(scheme) is not None
    fewer_stages = [g._replace(num_stages=2) for g in (base.gemm1, base.gemm2)]
    for block_m in (8, 16, 32, 64) if mixed else (16, 32, 64, 128):
        yield base._replace(block_m=block_m, gemm1=fewer_stages[0], gemm2=fewer_stages[1])
    for block_n in (64, 128):
        gemm1, gemm2 = fewer_stages
        if scheme != "fp8_block":  # whose GEMM1 has the columns of a scale
            gemm1 = gemm1._replace(block_n=block_n)
        yield base._replace(gemm1=gemm1, gemm2=gemm2._replace(block_n=block_n))
    wider = [g._replace(block_n=max(g.block_n, 128), num_warps=8) for g in fewer_stages]
    yield base._replace(block_m=64, gemm1=wider[0], gemm2=wider[1])
    if not scheme:
        shorter = [g._replace(block_k=g.block_k // 2) for g in (base.gemm1, base.gemm2)]
        yield base._replace(gemm1=shorter[0], gemm2=shorter[1])
    yield base._replace(block_m=16, direct=True, gemm1=fewer_stages[0], gemm2=fewer_stages[1])
    if mixed:
        bits = operands.describe(scheme).bits
        for rows in (2, 8, 16, 40):  # an expert
            found = mixed_configs.choose_wgmma(layer.with_rows(rows * E), bits)
            if found is not None:
                yield found._replace(split_k=1)
                shorter = GemmConfig(128, 128, 3, 4 if found.block_m < 64 else 8)
                yield found._replace(split_k=1, gemm1=shorter, gemm2=shorter)
        yield mixed_configs.choose_gemv(one, bits)
    elif scheme in ("", "fp8_block"):
        for rows in (30, 60, 200):
            yield plain.choose_tma(layer.with_rows(rows * E), bool(scheme), True)
        yield plain.choose_gemv(one, bool(scheme), torch.bfloat16.itemsize)


def name_of(config: LayerConfig) -> str:
    """The configuration in words: kernel, BLOCK_M, and of each GEMM BLOCK_N, BLOCK_K, stages and
    warps."""
    gemms = [f"{n}x{k}:{stages}s{warps}w" for n, k, stages, warps in config[:2]]
    split = f" split_m={config.split_m}" if config.split_m > 1 else ""
    split += " direct" if config.direct and config.kernel != GEMV else ""
    return f"{config.kernel} m{config.block_m} {gemms[0]} {gemms[1]}{split}"


def probe_config(
    layer: Callable[[Tokens], Tensor], known: Tokens, config: LayerConfig, counts: tuple[int, ...]
) -> tuple[Tensor, list[int]]:
    """(rows of all known tokens, or of the first ones alone where the kernel takes one token; the
    numbers of tokens M whose rows differ from these)."""
    with override(config):
        if config.direct:
            few = range(min(32, known.x.shape[0]))
            return torch.cat([layer(known.rows(slice(i, i + 1))) for i in few]), []
        want = layer(known)
        differ = [M for M in counts if not torch.equal(layer(known.rows(slice(M))), want[:M])]
        # the same rows at other places of their blocks
        for seed in (0, 1):
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(known.x.shape[0], generator=generator).to(known.x.device)
            if not torch.equal(layer(known.rows(order)), want[order]):
                differ.append(known.x.shape[0])
        return want, differ


def probe(schemes: tuple[str, ...], device: torch.device, tiny: bool) -> Iterator[dict]:
    shape = Experts(4, 2, 64, 128) if tiny else PROBE_SHAPE
    counts = (1, 3, 20) if tiny else PROBE_TOKENS
    plain = cancelling(shape, device)
    known = known_tokens(shape, max(counts) + 24, device)
    for scheme in PROBED[:1] if tiny else [scheme for scheme in PROBED if scheme in schemes]:
        weights = make_weights(shape, scheme, *plain)
        layer = layer_of(weights, "triton", batch_invariant=True)
        expected = layer(known)
        with override(None) as seen:
            layer(known.rows(slice(16)))
        configs = list(dict.fromkeys(variants(seen[-1], scheme, shape)))
        for config in configs[:2] if tiny else configs:
            row = {"part": "probe", "shape": str(shape), "scheme": scheme, "num_tokens": 0}
            row["config"] = name_of(config)
            try:
                rows, differ = probe_config(layer, known, config, counts)
                row["differ_at"] = differ
                row["as_chosen"] = torch.equal(rows, expected[: rows.shape[0]])
                row["bits"] = digest(rows)
            except Exception as error:  # tiles that do not fit, in whatever way
                row["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            yield row
        for backend in () if tiny else ("cutlass", "deep_gemm"):
            row = {"part": "probe", "shape": str(shape), "scheme": scheme, "num_tokens": 0}
            row["config"] = backend
            try:
                rows = layer_of(weights, backend)(known)
                row["as_chosen"], row["bits"] = torch.equal(rows, expected), digest(rows)
            except Exception as error:
                row["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            yield row


def digest(rows: Tensor) -> str:
    """A checksum of the bits of the first rows, which every configuration gives."""
    return f"{zlib.crc32(rows[:32].contiguous().view(torch.uint8).cpu().numpy()):08x}"


# --- fuzz ----------------------------------------------------------------------------------------


def fuzz(
    shapes: list[str], schemes: tuple[str, ...], device: torch.device, tiny: bool
) -> Iterator[dict]:
    for name in shapes:
        shape = SHAPES[name]
        plain = cancelling(shape, device)
        known = known_tokens(shape, 64, device)
        counts = (1, 2, 5, 20) if tiny else FUZZ_TOKENS
        found = EVERY if name == FUZZED_WHOLE else FUZZED
        for scheme in FUZZED[:2] if tiny else [scheme for scheme in found if scheme in schemes]:
            desc = get_scheme(scheme).activation
            known_scale = desc is not None and desc.global_scale  # else the mode refuses it
            weights = make_weights(shape, scheme, *plain, known_scale)
            layer = layer_of(weights, "auto", batch_invariant=True)
            want = layer(known)
            assert want.isfinite().all()
            differ, batches = [], 0
            for i, M in enumerate(counts):
                batch, which = random_batch(shape, known, M, ROUTINGS[i % len(ROUTINGS)], i)
                batches += 1
                if not same_rows(layer(batch), which, want):
                    differ.append(M)
            alone = torch.cat([layer(known.rows(slice(i, i + 1))) for i in range(16)])
            if not torch.equal(alone, want[:16]):
                differ.append(1)
            if device.type == "cuda":
                batch, which = random_batch(shape, known, 64, "zipf", 99)
                layer(batch)
                graph, outputs = capture(lambda _, run=layer, batch=batch: run(batch), 1)
                graph.replay()
                if not same_rows(outputs[0], which, want):
                    differ.append(64)
            row = {"part": "fuzz", "shape": name, "scheme": scheme, "num_tokens": 0}
            yield row | {"config": "", "batches": batches + 2, "differ_at": differ}


def random_batch(
    shape: Experts, known: Tokens, M: int, routing: str, seed: int
) -> tuple[Tokens, Tensor]:
    """M tokens, and of each its number among the known ones, negative for others."""
    count, device = known.x.shape[0], known.x.device
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(-count, count, (M,), generator=generator)
    which[torch.randint(0, M, (1,), generator=generator)] = seed % count
    which = which.to(device)
    batch = make_tokens(shape, M, routing, seed, device)
    for of_batch, of_known in zip(batch, known, strict=True):
        of_batch[which >= 0] = of_known[which[which >= 0]]
    return batch, which


def same_rows(out: Tensor, which: Tensor, want: Tensor) -> bool:
    return torch.equal(out[which >= 0], want[which[which >= 0]])


# --- cost ----------------------------------------------------------------------------------------


def cost(
    shapes: list[str], schemes: tuple[str, ...], replays: int, device: torch.device, tiny: bool
) -> Iterator[dict]:
    cuda = device.type == "cuda"
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if cuda else 0
    cases = [("tiny", ""), ("tiny", "fp8_block")] if tiny else COSTS
    for name in shapes:
        plain = make_plain_weights(SHAPES[name], device)
        for scheme in [of for shape, of in cases if shape == name and of in schemes]:
            weights = make_weights(SHAPES[name], scheme, *plain)
            for M in (1, 64) if tiny else COST_TOKENS:
                case = Case(name, scheme, M)
                cell = make_cell(case, weights, make_sets(case, l2_bytes))
                sets = [Tokens(cell.hidden_states, s.weights, s.ids) for s in cell.sets]
                times = times_us(weights, sets, replays, cuda)
                on, off = times["on"], times["off"]
                row = {"part": "cost", "shape": name, "scheme": scheme, "num_tokens": M}
                yield row | {"config": "", "on_us": on, "off_us": off, "ratio": round(on / off, 3)}


def times_us(weights: Weights, sets: list[Tokens], replays: int, cuda: bool) -> dict[str, float]:
    """Median us a layer with the mode on and off."""
    layers = {
        "on": layer_of(weights, "auto", batch_invariant=True),
        "off": layer_of(weights, "auto", batch_invariant=False),
    }
    if not cuda:
        calls = {n: (lambda i, layer=layer: layer(sets[i])) for n, layer in layers.items()}
        found = interleaved_ms(calls, 4, len(sets))
        return {name: round(statistics.median(ms) * 1e3, 2) for name, ms in found.items()}
    graphs, kept = {}, []
    for name, layer in layers.items():
        for tokens in sets[:2]:  # compiles
            layer(tokens)
        graphs[name], outputs = capture(lambda i, layer=layer: layer(sets[i]), len(sets))
        kept.append(outputs)
    found = interleaved_replays_us(graphs, replays, len(sets))
    return {name: round(statistics.median(us), 2) for name, us in found.items()}


# --- the command ---------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=report.PARTS, default=report.PARTS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3", "mixtral"])
    parser.add_argument(
        "--schemes", nargs="+", choices=EVERY, default=EVERY, metavar="SCHEME", help='"" is bf16'
    )
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument(
        "--seconds", type=float, default=600, help="after which a part is cut short"
    )
    add_options(parser)
    return parser.parse_args()


def main() -> int:
    given = parse()
    if given.merge or given.report:
        report.merge_and_report(given.merge, given.results, "batch_invariant")
        return 0
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if given.dry_run:
        given.shapes = ["tiny"]
        given.results = Path(tempfile.mkdtemp(prefix="batch_invariant_dry_run_"))
    elif not cuda:
        raise SystemExit("batch_invariant.py needs a GPU; --dry-run does not")
    if not cuda and not environment.INTERPRETED:  # no kernel of a GPU runs
        given.parts = [part for part in given.parts if part != "probe"]
        print("probe is left out: it needs a GPU, or TRITON_INTERPRET=1")
    gpu = torch.cuda.get_device_name().replace(" ", "_") if cuda else "cpu"
    results = report.open_results(given.results / f"batch_invariant_{gpu}.json")
    run = results.begin(sys.argv, not cuda)
    schemes = tuple(given.schemes)
    parts: dict[str, Callable[[], Iterator[dict]]] = {
        "probe": lambda: probe(schemes, device, given.dry_run),
        "fuzz": lambda: fuzz(given.shapes, schemes, device, given.dry_run),
        "cost": lambda: cost(given.shapes, schemes, given.replays, device, given.dry_run),
    }
    for part in given.parts:
        start = time.perf_counter()
        rows = []
        for row in parts[part]():
            rows.append(row | {"implementation": "moe_ops", "run": run})
            results.add(rows[-1])
            results.write()  # a run that is cut short keeps what it has
            if time.perf_counter() - start > given.seconds:
                print(f"{part} was cut short after {given.seconds} s: name what is missing alone")
                break
        report.show_invariance(rows)
        print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    report.draw_invariance([*results.rows.values()], results.path.with_suffix(".png"))
    print(results.path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
