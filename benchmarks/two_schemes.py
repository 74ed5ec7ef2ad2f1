"""Layers whose weights are unlike: w13 and w2 of two schemes, and NVFP4 of which each row has a
global scale, beside the layers of one scheme that they are to keep up with.

    python benchmarks/two_schemes.py [--shapes qwen3 mixtral] [--tokens 1 8 64 512] [--seconds 120]
                                     [--write]

For each cell: the error against fp64 of some rows, whether a captured graph gives after routing
has changed what an eager call gives, and the time of a replay beside those of the layers it is
compared with, captured in this process and replayed in turns. ``ratio`` is its time over the
slower one's. Kernels are compiled first, in processes of their own. ``--write`` keeps the rows in
benchmarks/results/two_schemes_<GPU>.json.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from cases import SHAPES
from harness import capture, format_table, interleaved_replays_us, relative_error, write_json
from records import describe_run
from torch import Tensor

import moe_ops
from moe_ops.bench.layers import quantized

ROWS = "nvfp4_w4a16, rows"  # a scheme here: each row of w13 has a global scale of its own
PAIRS = (
    ("int4_w4a16:g128", "int8_w8a16:channel"),
    ("int4_w4a16:g128", ""),
    ("", "int4_w4a16:g128"),
    ("mxfp4_w4a16", "fp8_w8a16:channel"),
    (ROWS, "nvfp4_w4a16"),
    ("int4_w4a16:g32:super:min", "int6_w6a16:g16:super"),  # Q4_K_M: Q4_K and Q6_K
)
SETS = 4  # of inputs and routings in a graph
MAX_ERROR = 6e-3  # bf16 activations, of which h is rounded again

Weights = dict[str, Tensor]


def weight(scheme: str, E: int, N: int, K: int) -> Any:
    """Random unit-scale weights of a scheme, (E, N, K)."""
    plain = torch.empty(E, N, K, device="cuda", dtype=torch.bfloat16).normal_(0, K**-0.5)
    if not scheme:
        return plain
    w = quantized(plain, scheme.removesuffix(", rows"))
    if scheme == ROWS:
        by_row = w.global_scale[:, None, None] * (torch.rand(E, N, 1, device="cuda") + 0.5)
        w = moe_ops.from_quantized("nvfp4_w4a16", w.qdata, w.scale, global_scale=by_row)
    return w


def weights_of(shape: str, schemes: Sequence[str]) -> tuple[Weights, Weights]:
    """w13 and w2 of each scheme."""
    E, K, I = SHAPES[shape].num_experts, SHAPES[shape].hidden_size, SHAPES[shape].intermediate_size
    w13 = {s: weight(s, E, 2 * I, K) for s in schemes}
    return w13, {s: weight(s, E, K, I) for s in schemes}


def inputs(shape: str, M: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """SETS of hidden_states (M, K), topk_weights and topk_ids (M, top_k)."""
    one, g = SHAPES[shape], torch.Generator("cuda").manual_seed(seed)
    found = []
    for _ in range(SETS):
        x = torch.randn(M, one.hidden_size, device="cuda", dtype=torch.bfloat16, generator=g)
        router = torch.rand(M, one.top_k, device="cuda", generator=g) + 0.1
        ids = torch.rand(M, one.num_experts, device="cuda", generator=g).topk(one.top_k, 1)
        found.append((x, router, ids.indices))
    return found


def reference(x: Tensor, w13: Any, w2: Any, router: Tensor, ids: Tensor) -> Tensor:
    """The layer's rows of a few tokens in fp64, with the dequantized weights."""

    def values(w: Any, e: int) -> Tensor:
        return (w[e].dequantize(torch.float32) if hasattr(w, "scheme") else w[e]).double()

    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for m in range(x.shape[0]):
        for e, r in zip(ids[m].tolist(), router[m].double(), strict=True):
            gate, up = (values(w13, e) @ x[m].double()).chunk(2)
            out[m] += r * (values(w2, e) @ (torch.nn.functional.silu(gate) * up))
    return out


def compile_all(shapes: Sequence[str], tokens: Sequence[int], until: float) -> None:
    """Run each layer once in a process of its own, which leaves its kernels on disk."""
    layers = dict.fromkeys([(a, b) for pair in PAIRS for a, b in (pair, *singles(pair))])
    jobs = [
        subprocess.Popen([sys.executable, __file__, "--warm", a, b, "--shapes", shape, "--tokens"]
                         + [str(M) for M in tokens])
        for shape in shapes for a, b in layers
    ]  # fmt: skip
    for job in jobs:
        try:
            job.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.kill()


def singles(pair: tuple[str, str]) -> list[tuple[str, str]]:
    """What a pair is compared with: the layers of either scheme; equal global scales."""
    return [(s, s) for s in dict.fromkeys([name.removesuffix(", rows") for name in pair])]


def measure(shape: str, M: int, pair: tuple[str, str], w13: Weights, w2: Weights) -> dict:
    """One row."""
    sets = inputs(shape, M, 0)
    graphs, outputs = {}, {}
    for a, b in (pair, *singles(pair)):

        def call(which: int, a: str = a, b: str = b) -> Tensor:
            x, router, ids = sets[which]
            return moe_ops.fused_experts(x, w13[a], w2[b], router, ids)

        call(0)
        graphs[a, b], outputs[a, b] = capture(call, SETS)
    rows = [0] if M == 1 else [0, M - 1]
    x, router, ids = sets[0]
    want = reference(x[rows], w13[pair[0]], w2[pair[1]], router[rows], ids[rows])
    got = moe_ops.fused_experts(x, w13[pair[0]], w2[pair[1]], router, ids)
    error = relative_error(got[rows], want)
    for old, new in zip(sets, inputs(shape, M, 7), strict=True):
        for t, value in zip(old, new, strict=True):
            t.copy_(value)
    graphs[pair].replay()
    right = all(
        torch.equal(out, moe_ops.fused_experts(x, w13[pair[0]], w2[pair[1]], router, ids))
        for out, (x, router, ids) in zip(outputs[pair], sets, strict=True)
    )
    named = {f"{a}+{b}": graph for (a, b), graph in graphs.items()}
    times = interleaved_replays_us(named, 15, SETS)
    us = {name: round(statistics.median(t), 3) for name, t in times.items()}
    ours, *others = us.values()
    return {
        "shape": shape,
        "w13": pair[0] or "plain",
        "w2": pair[1] or "plain",
        "num_tokens": M,
        "error": float(f"{error:.2g}"),
        "replayed_right": right and error < MAX_ERROR,
        "us": ours,
        "compared_us": others,
        "ratio": round(ours / max(others), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3", "mixtral"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--seconds", type=float, default=120, help="start no cell later")
    parser.add_argument("--write", action="store_true", help="keep the rows in results/")
    parser.add_argument("--warm", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("a GPU is needed; none found, nothing measured")
    torch.manual_seed(0)
    if arguments.warm:
        a, b = arguments.warm
        w13, w2 = weights_of(arguments.shapes[0], dict.fromkeys([a, b]))
        for M in arguments.tokens:
            x, router, ids = inputs(arguments.shapes[0], M, 0)[0]
            moe_ops.fused_experts(x, w13[a], w2[b], router, ids)
        return
    start = time.monotonic()
    compile_all(arguments.shapes, arguments.tokens, start + 0.6 * arguments.seconds)
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    rows: list[dict] = []
    for shape in arguments.shapes:
        w13, w2 = weights_of(shape, dict.fromkeys([s for pair in PAIRS for s in pair]))
        for M in arguments.tokens:
            for pair in PAIRS:
                if time.monotonic() - start < arguments.seconds:
                    rows.append(measure(shape, M, pair, w13, w2))
                    print(" ".join(str(value) for value in rows[-1].values()), flush=True)
        del w13, w2
    header = list(rows[0])
    print(format_table(header, [[str(row[name]) for name in header] for row in rows]))
    if arguments.write:
        gpu = torch.cuda.get_device_name().replace(" ", "_")
        print(write_json(f"two_schemes_{gpu}", {**describe_run(sys.argv, dry=True), "rows": rows}))


if __name__ == "__main__":
    main()
