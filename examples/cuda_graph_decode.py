"""A decode loop of the tiny model replayed from one explicitly captured CUDA graph.

The step is warmed up, captured once with torch.cuda.CUDAGraph, and replayed for every token while
the routing changes underneath it: the graph holds no expert choice, no size and no host read.
The tokens must equal those of eager transformers.

    python examples/cuda_graph_decode.py
"""

from __future__ import annotations

import argparse
import time

import torch
from common import check, title
from tiny_moe.model import decode, encode, load

import moe_ops  # noqa: F401  registers "moe_ops" with transformers

PROMPT = "def main():\n    import sys\n    args = sys.argv[1:]\n    if not args:\n        "


class DecodeStep:
    """One greedy decode step over a static cache, all of its state in tensors that stay put.

    `tokens` (B, 1) holds the step's input and, after the step, its output. Nothing in a step
    depends on the host, so that it can be captured.
    """

    def __init__(self, model, prompt: torch.Tensor, max_length: int) -> None:
        """Runs the prompt (B, length) through the model eagerly, filling the cache."""
        from transformers import StaticCache

        self.model = model
        self.prompt_length = prompt.shape[1]
        self.cache = StaticCache(config=model.config, max_cache_len=max_length)
        logits = model(input_ids=prompt, past_key_values=self.cache, use_cache=True).logits
        self.first = logits[:, -1].argmax(-1, keepdim=True)
        self.tokens = self.first.clone()

    def __call__(self) -> None:
        logits = self.model(
            input_ids=self.tokens, past_key_values=self.cache, use_cache=True
        ).logits
        self.tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def rewind(self) -> None:
        """Back to the end of the prompt; what later steps wrote to the cache is overwritten."""
        self.tokens.copy_(self.first)
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.prompt_length)


def capture(step: DecodeStep) -> torch.cuda.CUDAGraph:
    """Warms `step` up on a side stream, as capture demands, then captures it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    step.rewind()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def run(step: DecodeStep, advance, count: int) -> tuple[torch.Tensor, float]:
    """`count` greedy tokens (B, count) from the end of the prompt, and the seconds they took."""
    step.rewind()
    tokens = [step.tokens.clone()]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count - 1):
        advance()
        tokens.append(step.tokens.clone())
    torch.cuda.synchronize()
    return torch.cat(tokens, dim=1), time.perf_counter() - start


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This example captures a CUDA graph and needs a GPU; none found, nothing done.")
        return

    ids = encode(args.prompt, "cuda")
    length = ids.shape[1] + args.tokens
    routed = []

    title("eager transformers")
    eager = DecodeStep(load("eager", device="cuda"), ids, length)
    gate = eager.model.model.layers[0].mlp.gate
    handle = gate.register_forward_hook(
        lambda _m, _a, out: routed.append(tuple(out[2].tolist()[0]))
    )
    want, _ = run(eager, eager, args.tokens)
    handle.remove()
    _, eager_seconds = run(eager, eager, args.tokens)
    pairs = len(set(map(frozenset, routed)))
    check(pairs > 1, f"layer 0 chose {pairs} different pairs of experts in {len(routed)} steps")

    title("moe_ops, one captured step")
    step = DecodeStep(load("moe_ops", device="cuda"), ids, length)
    graph = capture(step)
    got, seconds = run(step, graph.replay, args.tokens)
    check(torch.equal(got, want), f"{args.tokens} tokens equal eager's, routing changing")
    again, _ = run(step, graph.replay, args.tokens)
    check(torch.equal(again, got), "a second pass over the same graph repeats them")
    for name, value in (("eager", eager_seconds), ("captured", seconds)):
        print(f"  {name:9s} {1e3 * value / (args.tokens - 1):.3f} ms a token")
    title("text")
    print(args.prompt + decode(got))


if __name__ == "__main__":
    main()
