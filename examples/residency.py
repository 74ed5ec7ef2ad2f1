"""Text from a model whose experts are several times larger than the memory they may take.

All experts of the tiny model beside this file lie in host memory. Each layer has slots for some of
them, and calls bring the others when tokens choose them. For several budgets the example generates
greedily with the decode step compiled, requires the very same tokens as the model with its experts
in place, and prints how often experts had a slot. On a CPU host memory and slots are both RAM: all
runs as on a GPU, but for the link, of which the table says what it would take.

    python examples/residency.py --prompt "class Queue:" --tokens 100 --scheme int4_w4a16
"""

from __future__ import annotations

import argparse

import torch
from common import check, expert_bytes, scheme_name, table, title
from generate import PROMPT, compile_config_for, generate
from tiny_moe.model import HERE, decode, encode, load

import moe_ops.integrations.transformers as moe_transformers

LINK = 25e9  # bytes a second, of PCIe 4 with 16 lanes


def model_of(args: argparse.Namespace, gpu_memory: int | None = None):
    """The tiny model, with its experts in place or behind slots."""
    dtype = getattr(torch, args.dtype)
    if args.scheme is None and gpu_memory is None:
        return load("moe_ops", dtype, args.device)
    from transformers import AutoModelForCausalLM

    config = moe_transformers.MoeOpsConfig(args.scheme, gpu_memory=gpu_memory)
    return AutoModelForCausalLM.from_pretrained(
        HERE, dtype=dtype, quantization_config=config, device_map=args.device
    ).eval()


def compare(args: argparse.Namespace) -> torch.Tensor:
    """Generates with every budget, requires equal tokens and prints what was brought."""
    ids = encode(args.prompt, args.device)
    model = model_of(args)
    want = generate(model, ids, args.tokens)
    experts, _ = expert_bytes(model)
    rest = model.get_memory_footprint() - experts
    layers, E = len(model.model.layers), model.config.num_experts
    rows = []
    for slots in args.slots:
        title(f"slots for {slots} of {E} experts in each of {layers} layers")
        gpu_memory = rest + experts * slots // E
        model = model_of(args, gpu_memory)
        report = moe_transformers.residency_report(model)
        print("  " + str(report).replace("\n", "\n  "))
        check(set(report.budget.slots) == {slots}, f"{gpu_memory} bytes are {slots} slots a layer")
        torch._dynamo.reset()
        got = generate(model, ids, args.tokens, compile_config_for(torch.device(args.device)))
        check(got.tolist() == want.tolist(), "all tokens equal those with the experts in place")
        moe_transformers.residency_stats(model)  # begins to count anew
        generate(model, ids, args.tokens)
        stats = moe_transformers.residency_stats(model)
        brought = stats.bytes / args.tokens
        share = f"{slots / E:.0%}"
        link = f"{1e3 * brought / LINK:.4f}"
        rows.append((share, f"{stats.hit_rate:.0%}", f"{brought / 1e3:.1f}", link))
    title(f"what {args.tokens} tokens brought")
    table(("slots", "hits", "kB/token", "ms/token at 25 GB/s"), rows)
    return want


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=100, help="tokens (bytes) to generate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--scheme", type=scheme_name, help="quantize the experts by it")
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 3, 4, 6])
    args = parser.parse_args()

    tokens = compare(args)
    title("text")
    print(decode(tokens))


if __name__ == "__main__":
    main()
