"""Text from a transformers MoE model whose experts run through moe_ops, compiled in one graph.

Generates greedily with the tiny model beside this file, first in eager transformers, then with
`experts_implementation="moe_ops"` and the decode step compiled with fullgraph=True (and under CUDA
graphs on a GPU), and requires the very same tokens. Then it times both in bf16 and with int8
experts, quantizes the experts with each scheme and measures perplexity on held-out text, compiled
in one graph too.

    python examples/generate.py --prompt "class Queue:" --tokens 200
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial

import torch
from common import (
    check,
    compile_backend,
    cuda_graphs_recorded,
    expert_bytes,
    ops_called,
    scheme_names,
    table,
    title,
)
from tiny_moe.model import decode, encode, held_out, load, perplexity

import moe_ops.integrations.transformers as moe_transformers

PROMPT = """class Queue:
    def __init__(self, items=None):
        self.items = items

    def """


def generate(model, ids: torch.Tensor, tokens: int, compile_config=None) -> torch.Tensor:
    """ids (1, length) followed by `tokens` greedy tokens, with a static key-value cache."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        cache_implementation="static",
        compile_config=compile_config,
        disable_compile=compile_config is None,
    )


def timed(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """(the tokens, seconds) of one call."""
    start = time.perf_counter()
    out = run()
    decode(out)  # brings the tokens to the host, so that a GPU has finished
    return out, time.perf_counter() - start


def print_speeds(runs: dict[str, Callable[[], torch.Tensor]], tokens: int) -> None:
    """Tokens per second of warm calls, beside the first one's. Each is called three times, in
    turns, so that what else the machine does meets all of them.
    """
    rounds = [[timed(run)[1] for run in runs.values()] for _ in range(3)]
    least = dict(zip(runs, map(min, *rounds), strict=True))
    first = next(iter(least.values()))
    rows = [(name, f"{tokens / s:.0f}", f"{first / s:.2f}x") for name, s in least.items()]
    table(("", "tokens/s", "speed-up"), rows)


def compile_config_for(device: torch.device):
    """transformers compiles the decode step of a static-cache generation with this."""
    from transformers import CompileConfig

    mode = "reduce-overhead" if device.type == "cuda" else "default"
    config = CompileConfig(fullgraph=True, mode=mode, backend=compile_backend(device))
    config._compile_all_devices = True  # else generate() runs uncompiled on a CPU
    return config


def compare(args: argparse.Namespace) -> torch.Tensor:
    """Generates with both, requires equal tokens and prints the speeds. Returns the tokens."""
    from torch._dynamo.utils import counters

    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    ids = encode(args.prompt, device)

    title(f"eager transformers, {args.dtype} on {args.device}")
    eager = partial(generate, load("eager", dtype, device), ids, args.tokens)
    want, seconds = timed(eager)
    print(f"  {args.tokens} tokens in {seconds:.2f} s, the first call")

    title("experts through moe_ops, decode step compiled with fullgraph=True")
    if compile_backend(device) == "aot_eager":
        print("  no C++ compiler was found: the graph runs operator by operator, without Inductor")
    model = load("moe_ops", dtype, device)
    with torch.no_grad():
        calls = ops_called(lambda: model(input_ids=ids, use_cache=False))
    layers = model.config.num_hidden_layers
    check(sum(calls.values()) == layers, f"the experts of {layers} layers are {dict(calls)}")
    plain = partial(generate, model, ids, args.tokens)
    plain()
    torch._dynamo.reset()
    counters.clear()
    print("  compiling the decode step: half a minute on a CPU", flush=True)
    compiled = partial(plain, compile_config_for(device))
    got, seconds = timed(compiled)
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    done = f"{graphs} graph compiled in {seconds:.0f} s, {breaks} breaks"
    check(graphs > 0 and not breaks, done)
    if device.type == "cuda":
        recorded, skipped = cuda_graphs_recorded(), counters["inductor"]["cudagraph_skips"]
        check(recorded > 0, f"{recorded} CUDA graphs recorded, {skipped} skipped")
    for index, (a, b) in enumerate(zip(got[0].tolist(), want[0].tolist(), strict=True)):
        if a != b:
            place = index - ids.shape[1]
            hint = "" if dtype == torch.float32 else f"; {args.dtype} may break ties: try float32"
            check(False, f"token {place} must equal eager's {b}, got {a}{hint}")
    check(True, f"all {args.tokens} tokens equal eager's")
    print()
    runs = {"eager transformers": eager, "moe_ops": plain, "moe_ops, compiled": compiled}
    print_speeds(runs, args.tokens)
    return got


def compare_speeds(args: argparse.Namespace) -> None:
    """Tokens per second in bf16, uncompiled: what transformers runs by itself beside moe_ops."""
    title("tokens per second in bfloat16, uncompiled")
    ids, runs = encode(args.prompt, args.device), {}
    for name, implementation, scheme in (
        ("transformers, grouped_mm", "grouped_mm", ""),
        ("moe_ops", "moe_ops", ""),
        ("moe_ops, int8_w8a16", "moe_ops", "int8_w8a16"),
    ):
        print(f"  warming up {name}", flush=True)
        model = load(implementation, torch.bfloat16, args.device)
        if scheme:
            moe_transformers.quantize(model, scheme)
        runs[name] = partial(generate, model, ids, args.tokens)
        runs[name]()
    print_speeds(runs, args.tokens)


def compare_schemes(args: argparse.Namespace) -> None:
    """Expert bytes and held-out perplexity of each scheme, hidden states in bf16."""
    text = held_out(args.perplexity_bytes)
    title(f"perplexity on {len(text)} bytes of library code that the model was not trained on")
    rows, reference = [], 0.0
    for scheme in ["bf16", *args.schemes]:
        print(f"  measuring {scheme}", flush=True)
        model = load("moe_ops", torch.bfloat16, args.device)
        if scheme != "bf16":
            moe_transformers.quantize(model, scheme)
        torch._dynamo.reset()
        run = model
        if args.compile_schemes:
            run = torch.compile(model, fullgraph=True, backend=compile_backend(args.device))
        value = perplexity(run, text)
        reference = reference or value
        size, count = expert_bytes(model)
        cost = f"{100 * (value / reference - 1):+.2f}%"
        bits = f"{math.log2(value):.4f}"
        rows.append((scheme, size, f"{8 * size / count:.2f}", f"{value:.4f}", bits, cost))
    headers = ("scheme", "expert bytes", "bits/weight", "perplexity", "bits/byte", "against bf16")
    table(headers, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=200, help="tokens (bytes) to generate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    # In fp32 two right implementations differ by 1e-6 of a logit, so equal tokens are a fair
    # demand. In bf16 eager transformers rounds each expert's output and adds in bf16, where
    # moe_ops adds in fp32 and rounds once: near ties may fall either way through no fault of
    # either.
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--schemes",
        type=scheme_names,
        default="int8_w8a16,fp8_block",
        help="comma-separated",
    )
    parser.add_argument(
        "--compile-schemes",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure perplexity with the model compiled (12 s a scheme on a CPU)",
    )
    parser.add_argument("--perplexity-bytes", type=int, default=65536, help="at most 65536")
    args = parser.parse_args()

    tokens = compare(args)
    compare_speeds(args)
    compare_schemes(args)
    title("text by the compiled moe_ops model")
    print(decode(tokens))


if __name__ == "__main__":
    main()
