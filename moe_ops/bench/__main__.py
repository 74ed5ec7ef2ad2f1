"""Measure one expert layer on this machine beside the alternatives, in under a minute.

    python -m moe_ops.bench MODEL_OR_SHAPE [--tokens 1 8 64] [--schemes bf16 fp8_block]
                            [--device cuda] [--seconds 45] [--png FILE] [--json FILE]

MODEL_OR_SHAPE is a shape E,top_k,K,I such as 128,8,2048,768, a name such as qwen3, a folder with a
model's config.json, or a model type of transformers such as qwen3_moe. Timed for each number of
tokens: this library with plain weights and with each scheme, of a quantized model's folder by
default the one that its experts are stored in, and what people would use instead,
transformers' loop over experts and its grouped_mm, all on the same bf16 weights. On a GPU calls
are replayed from CUDA graphs, except those that read GPU memory on the host and cannot be
captured. The table has microseconds per layer and, for each column of this library, how many times
as fast as the best of the others it is. The error of each against fp64 stands below it, and that
the machine was busy, if it was. A plot is drawn, too, if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from moe_ops import environment
from moe_ops.bench import layers, shapes, timing
from moe_ops.bench.layers import Layer
from moe_ops.bench.report import Result, draw, format_result
from moe_ops.bench.shapes import Shape
from moe_ops.checks import device_named
from moe_ops.schemes import get_scheme

PLAIN = "bf16"
TOKENS = {"cpu": (1, 8, 32), "cuda": (1, 8, 64, 512, 4096)}
SCHEMES = {"cpu": (PLAIN,), "cuda": (PLAIN, "fp8_block", "int4_w4a16:g128")}
NUM_SETS = 4  # routings that calls go through in turn
_FAR_BEHIND = 8.0  # slower than the fastest by so much: timed once
_CHECKED = 32  # tokens that are compared with fp64


def column(scheme: str) -> str:
    """The column of this library with weights of a scheme."""
    return f"moe_ops {scheme}"


def check_memory(shape: Shape, schemes: Sequence[str], device: torch.device) -> None:
    """Raise ValueError where the weights would not fit."""
    bytes_needed = 2.0 * shape.weights
    for scheme in schemes:
        if scheme != PLAIN:
            # quantized, and what quantizing some experts at a time takes
            bytes_needed += shape.weights * get_scheme(scheme).quantized_weight.format.bits / 8
    bytes_needed = 1.15 * bytes_needed + (3 << 30 if device.type == "cuda" else 1 << 29)
    free: int | None = None
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif device.type == "cpu":
        free = environment.available_host_memory()
    if free is not None and bytes_needed > free:
        raise ValueError(
            f"the weights of {shape} need {bytes_needed / 2**30:.1f} GiB, and {device} has "
            f"{free / 2**30:.1f} GiB free; give fewer --schemes, or a shape E,top_k,K,I with "
            "fewer experts"
        )


def measure(
    name: str,
    shape: Shape,
    device: torch.device,
    tokens: Sequence[int],
    schemes: Sequence[str],
    seconds: float,
) -> Result:
    """Time all layers. What does not run is left out with its reason; so are numbers of tokens
    that would end after `seconds`.
    """
    start, load = time.perf_counter(), timing.load_of_a_processor()  # of others, not of this
    if device.type == "cuda":
        torch.cuda.set_device(device)
    w13, w2 = layers.make_weights(shape, torch.bfloat16, device)
    calls = layers.peers(shape, w13, w2)
    result = Result(name, shape, timing.machine_facts(), tuple(calls))
    result.machine["device"] = device.type
    result.machine["load"] = load
    for scheme in environment.progress_bar(list(schemes), "weights"):
        try:
            calls[column(scheme)] = layers.ours(w13, w2, "" if scheme == PLAIN else scheme)
        except (ValueError, ImportError, NotImplementedError) as error:
            result.left_out.append(f"{column(scheme)}: {_one_line(error)}")
    todo = sorted(tokens)
    before = time.perf_counter() - start
    for done, M in enumerate(environment.progress_bar(todo, "tokens")):
        passed = time.perf_counter() - start
        last, before = passed - before, passed  # more tokens take no less than fewer did
        if done and passed + last > seconds:
            result.left_out.append(
                f"M={', '.join(map(str, todo[done:]))}: would end after {seconds:g} s; raise "
                "--seconds, or run again: what was compiled is kept"
            )
            break
        _measure_tokens(result, calls, M, w13, w2, start + seconds, len(todo) - done)
    return result


def _measure_tokens(
    result: Result,
    calls: dict[str, Layer],
    M: int,
    w13: Tensor,
    w2: Tensor,
    deadline: float,
    rows_left: int,
) -> None:
    """The row of M tokens."""
    x, sets = _inputs(result.shape, M, w13.device)
    checked = torch.linspace(0, M - 1, min(M, _CHECKED), device=x.device).long()
    weights, ids = sets[0]
    want = layers.per_expert_loop(x[checked].double(), w13, w2, weights[checked], ids[checked])

    def bound(layer: Layer) -> Callable[[int], Tensor]:
        return lambda which: layer(x, *sets[which])

    ready: dict[str, Callable[[int], Tensor]] = {}
    for name, layer in calls.items():
        call = bound(layer)
        try:
            got = call(0)
        except Exception as error:  # whatever a peer raises on this machine
            result.left_out.append(f"{name}, M={M}: {_one_line(error)}")
            continue
        error_here = timing.relative_error(got[checked], want)
        result.errors.setdefault(M, {})[name] = error_here
        ready[name] = call
    budget = max(0.5, (deadline - time.perf_counter()) / rows_left)
    on_gpu = x.device.type == "cuda"
    times = (_gpu_us if on_gpu else _host_us)(ready, budget, result.eager)
    result.us[M] = {name: statistics.median(values) for name, values in times.items()}
    result.spread[M] = {name: timing.spread(values) for name, values in times.items()}


def _inputs(
    shape: Shape, M: int, device: torch.device
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Unit-scale hidden states (M, K) bf16, and routings (topk_weights, topk_ids) of experts that
    are all equally likely.
    """
    rng = torch.Generator().manual_seed(M)
    x = torch.randn(M, shape.hidden_size, generator=rng).bfloat16().to(device)
    sets = []
    for _ in range(NUM_SETS):
        scores = torch.randn(M, shape.num_experts, generator=rng)
        top = scores.topk(shape.top_k, dim=-1)
        # exact in bf16, so that those that take bf16 weights solve the same problem
        weights = top.values.softmax(-1).bfloat16().float()
        sets.append((weights.to(device), top.indices.to(torch.int32).to(device)))
    return x, sets


def _host_us(
    calls: dict[str, Callable[[int], Tensor]], budget: float, eager: set[str]
) -> dict[str, list[float]]:
    """Microseconds of calls made one after the other."""
    start = time.perf_counter()
    times = timing.interleaved_ms(calls, 1, NUM_SETS)  # two rounds, of which one warms up
    round_s = (time.perf_counter() - start) / 2
    best = min(min(values) for values in times.values())
    near = {name: call for name, call in calls.items() if min(times[name]) < _FAR_BEHIND * best}
    near_s = round_s * sum(min(times[n]) for n in near) / sum(min(v) for v in times.values())
    rounds = min(40, int((budget - 2 * round_s) / near_s) - 1)
    if rounds >= 1:
        times |= timing.interleaved_ms(near, rounds, NUM_SETS)
    return {name: [1e3 * value for value in values] for name, values in times.items()}


def _gpu_us(
    calls: dict[str, Callable[[int], Tensor]], budget: float, eager: set[str]
) -> dict[str, list[float]]:
    """Microseconds under CUDA-graph replay, in turn; of calls that cannot be captured, one
    after the other without waiting in between.
    """
    graphs, kept = {}, []
    slow = {}
    for name, call in calls.items():
        for which in range(NUM_SETS):
            call(which)
        torch.cuda.synchronize()
        if name in eager:
            slow[name] = call
            continue
        try:
            graphs[name], outputs = timing.capture(call, NUM_SETS)
            kept.append(outputs)
        except Exception:
            torch.cuda.synchronize()
            eager.add(name)
            slow[name] = call
    found = {}
    if graphs:
        found = timing.interleaved_replays_us(graphs, 15, NUM_SETS, 0.1)
    for name, call in slow.items():
        times: list[float] = []
        stop = time.perf_counter() + min(1.0, 0.3 * budget)
        while len(times) < 3 or (time.perf_counter() < stop and len(times) < 15):
            begin = time.perf_counter()
            for which in range(NUM_SETS):
                call(which)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e6 / NUM_SETS)
        found[name] = times
    return {name: found[name] for name in calls}


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _scheme(name: str) -> str:
    if name == PLAIN:
        return name
    scheme = get_scheme(name)
    _ = scheme.quantized_weight  # raises for plain weights
    return scheme.name


def _schemes_of(model_or_shape: str) -> tuple[str, ...]:
    """Plain weights and the scheme of a folder's experts; () where they are not quantized."""
    try:
        scheme = shapes.scheme_of(model_or_shape)
    except ValueError as error:
        raise ValueError(f"{error}; or give --schemes") from error
    return (PLAIN, scheme) if scheme else ()


def _device(name: str | None) -> torch.device:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    device = device_named("--device", name or default, "use --device cpu")
    if device.type not in TOKENS:
        raise ValueError(f"--device must be cpu or cuda, got {name!r}")
    return device


def run(arguments: argparse.Namespace) -> Result:
    """Measure what the command line asks for.

    Raises:
        ValueError, ImportError: a wrong argument.
    """
    name, shape = shapes.resolve(arguments.model_or_shape)
    device = _device(arguments.device)
    given = arguments.schemes or _schemes_of(arguments.model_or_shape) or SCHEMES[device.type]
    schemes = [_scheme(s) for s in given]
    tokens = arguments.tokens or TOKENS[device.type]
    if min(tokens) < 1:
        raise ValueError(f"--tokens must be positive, got {min(tokens)}")
    if arguments.seconds <= 0:
        raise ValueError(f"--seconds must be positive, got {arguments.seconds}")
    check_memory(shape, schemes, device)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", category=DeprecationWarning)
        return measure(
            name, shape, device, tokens, list(dict.fromkeys(schemes)), arguments.seconds
        )


@environment.importing_torchao(in_command=True)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 for what cannot be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_ops.bench",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument(
        "model_or_shape",
        metavar="MODEL_OR_SHAPE",
        help=f"E,top_k,K,I; {', '.join(shapes.SHAPES)}; a folder with config.json; or a model "
        "type of transformers",
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="numbers of tokens M")
    parser.add_argument("--schemes", nargs="+", help="of weights; bf16: as they are")
    parser.add_argument("--device", help="default: the GPU if there is one, else the CPU")
    parser.add_argument("--seconds", type=float, default=45.0, help="that it may take, about")
    parser.add_argument("--png", type=Path, help="default: moe_ops_bench_NAME.png, here")
    parser.add_argument("--json", type=Path, help="write all numbers to this file, too")
    parsed = parser.parse_args(arguments)
    try:
        result = run(parsed)
    except (ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    print(format_result(result))
    if parsed.json is not None:
        written = asdict(result) | {"eager": sorted(result.eager)}
        written["moe_ops"] = environment.version(environment.DISTRIBUTION) or "(from source)"
        parsed.json.write_text(json.dumps(written, indent=1) + "\n")
        print(parsed.json)
    path = parsed.png or Path(f"moe_ops_bench_{result.name.replace(',', '_')}.png")
    try:
        draw(result, path)
    except ImportError:
        print("no plot: matplotlib is not installed")
    else:
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
