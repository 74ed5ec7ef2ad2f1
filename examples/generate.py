"""Text from a transformers MoE model whose experts run through moe_ops, compiled in one graph.

Loads the tiny model beside this file in eager transformers and generates greedily with a static
cache; loads it again with `experts_implementation="moe_ops"`, compiles its decode step with
fullgraph=True (CUDA graphs on a GPU), and requires the very same tokens. Then it quantizes the
experts with each scheme and measures perplexity on held-out text.

    python examples/generate.py --prompt "class Queue:" --tokens 200
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from common import check, cuda_graphs_recorded, expert_bytes, ops_called, quiet, table, title
from tiny_moe.model import decode, encode, held_out, load, perplexity

PROMPT = '''class Queue:
    """A first-in, first-out queue.

    '''


def generate(model, ids: torch.Tensor, tokens: int, compile_config=None) -> torch.Tensor:
    """`tokens` greedy tokens after `ids` (1, length), with a static key-value cache."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        cache_implementation="static",
        compile_config=compile_config,
        disable_compile=compile_config is None,
    )


def timed(model, ids: torch.Tensor, tokens: int, compile_config=None) -> tuple[float, float]:
    """Seconds of the first generation (which compiles) and the least of three more."""
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        generate(model, ids, tokens, compile_config)
        if ids.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[0], min(seconds[1:])


def first_difference(got: torch.Tensor, want: torch.Tensor) -> str:
    """Where two generations part, for the error message."""
    index = int((got != want).flatten().nonzero()[0])
    return f"token {index}: {got.flatten()[index].item()} for eager's {want.flatten()[index]}"


def compile_config_for(device: torch.device):
    """transformers compiles the decode step of a static-cache generation with this."""
    from transformers import CompileConfig

    config = CompileConfig(
        fullgraph=True, mode="reduce-overhead" if device.type == "cuda" else "default"
    )
    config._compile_all_devices = True  # else generate() runs uncompiled on a CPU
    return config


def compare(args: argparse.Namespace) -> torch.Tensor:
    """Generates with both models, checks equality and prints the speeds. Returns the tokens."""
    from torch._dynamo.utils import counters

    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    ids = encode(args.prompt, device)

    title(f"transformers, eager experts ({args.dtype}, {args.device})")
    eager = load("eager", dtype, device)
    want = generate(eager, ids, args.tokens)
    _, eager_seconds = timed(eager, ids, args.tokens)
    print(f"  {args.tokens} tokens in {eager_seconds:.2f} s")

    title("transformers, experts through moe_ops, decode compiled with fullgraph=True")
    model = load("moe_ops", dtype, device)
    with torch.no_grad():
        calls = ops_called(lambda: model(input_ids=ids, use_cache=False))
    print(f"  one forward calls {dict(calls)}")
    layers = model.config.num_hidden_layers
    check(sum(calls.values()) == layers, f"each of the {layers} layers is one moe_ops operator")

    torch._dynamo.reset()
    counters.clear()
    config = compile_config_for(device)
    first, seconds = timed(model, ids, args.tokens, config)
    got = generate(model, ids, args.tokens, config)
    print(f"  compiled in {first - seconds:.1f} s; {args.tokens} tokens in {seconds:.2f} s")
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    check(graphs > 0 and breaks == 0, f"{graphs} graph(s) compiled, {breaks} graph breaks")
    if device.type == "cuda":
        skipped = counters["inductor"]["cudagraph_skips"]
        recorded = cuda_graphs_recorded(device)
        check(
            recorded > 0 and not skipped, f"{recorded} CUDA graph(s) recorded, {skipped} skipped"
        )
    same = torch.equal(got, want)
    check(
        same,
        f"all {args.tokens} tokens equal eager's"
        if same
        else f"tokens differ from eager's, first at {first_difference(got, want)}",
    )
    rows = [("eager transformers", eager_seconds), ("moe_ops, compiled", seconds)]
    print()
    table(
        ("", "tokens/s", "speed-up"),
        [(n, f"{args.tokens / s:.0f}", f"{eager_seconds / s:.2f}x") for n, s in rows],
    )
    return got


def compare_schemes(args: argparse.Namespace) -> None:
    """Held-out perplexity and expert bytes of each scheme, activations in bf16."""
    import moe_ops.integrations.transformers as moe_transformers

    text = held_out(args.perplexity_bytes)
    title(
        f"schemes: perplexity on {len(text)} bytes of standard-library text it was not trained on"
    )
    rows, reference = [], 0.0
    for scheme in ["bf16", *args.schemes.split(",")]:
        model = load("moe_ops", torch.bfloat16, args.device)
        if scheme != "bf16":
            moe_transformers.quantize(model, scheme)
        value = perplexity(model, text)
        reference = reference or value
        size, count = expert_bytes(model)
        cost = f"{100 * (value / reference - 1):+.2f}%"
        bits = f"{math.log2(value):.4f}"
        rows.append((scheme, size, f"{8 * size / count:.2f}", f"{value:.4f}", bits, cost))
    table(
        ("scheme", "expert bytes", "bits/weight", "perplexity", "bits/byte", "against bf16"), rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=200, help="tokens (bytes) to generate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    # In fp32 two right implementations differ by 1e-6 of a logit, so equal tokens are a fair demand.
    # In bf16 transformers' eager rounds every expert's output and adds them in bf16, where moe_ops
    # adds in fp32 and rounds once: the logits differ in the third digit and near ties may fall
    # either way through no fault of either.
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--schemes", default="fp8_block,fp8_channel", help="comma-separated")
    parser.add_argument("--perplexity-bytes", type=int, default=65536, help="at most 65536")
    args = parser.parse_args()

    quiet()
    import moe_ops.integrations.transformers  # noqa: F401  registers "moe_ops"

    tokens = compare(args)
    compare_schemes(args)
    title("text by the compiled moe_ops model")
    print(decode(tokens))


if __name__ == "__main__":
    main()
