"""Greedy decoding of the tiny model on a CPU, its experts quantized by each weight-only scheme,
beside bf16.

    python benchmarks/cpu_generate.py [--schemes int4_w4a16:g128 ...] [--tokens 240] [--avx 2]
                                      [--perplexity-bytes 32768] [--write]

Steps of all schemes are taken in turn, eager and on one thread, whose CPU time is what is
measured, so that a busy machine disturbs it little. Its experts fit the caches: what is compared
is the work of a call, host and decoding. `next token` is the share of places of bf16's text at
which a scheme, given the text before, says the same byte. ``--write`` keeps the numbers in
benchmarks/results/cpu_generate_AVX512.json (or AMX, AVX2).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from harness import (
    INSTRUCTIONS,
    format_table,
    interleaved_ms,
    machine_facts,
    summary,
    use_cpu_kernels,
    versions,
    write_json,
)
from torch import Tensor

import moe_ops.integrations.transformers as moe_transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tiny_moe.model import encode, held_out, load, perplexity  # noqa: E402

SCHEMES = (
    *("int4_w4a16:g128", "int4_w4a16:g32", "int4_w4a16:g128:zp", "mxfp4_w4a16", "nvfp4_w4a16"),
    *("int8_w8a16:channel", "fp8_w8a16:channel", "fp8_w8a16:block"),
)
PROMPT = (
    "class Queue:\n    def __init__(self, items=None):\n        self.items = items\n\n    def "
)


class Greedy:
    """A model that continues PROMPT, a byte a step."""

    def __init__(self, scheme: str):
        from transformers import DynamicCache

        self.model = load("moe_ops", torch.bfloat16)
        if scheme:
            moe_transformers.quantize(self.model, scheme)
        self.text = encode(PROMPT)
        self.cache = DynamicCache(config=self.model.config)
        self.new = self.text

    def step(self, _: int) -> None:
        logits = self.model(self.new, past_key_values=self.cache, use_cache=True).logits
        self.new = logits[:, -1:].argmax(-1)
        self.text = torch.cat([self.text, self.new], 1)

    def says(self, text: Tensor) -> Tensor:
        """The bytes that follow each but the last of `text`."""
        return self.model(text, use_cache=False).logits[0, :-1].argmax(-1)


def measure(schemes: list[str], tokens: int, num_bytes: int) -> list[dict[str, Any]]:
    """A row of each scheme; bf16, "", is the first."""
    runs = {scheme: Greedy(scheme) for scheme in ("", *schemes)}
    times = interleaved_ms({s: run.step for s, run in runs.items()}, rounds=tokens, num_sets=1)
    text, start = runs[""].text, encode(PROMPT).shape[1]
    plain, data, rows = runs[""].says(text)[start - 1 :], held_out(num_bytes), []
    for scheme, run in runs.items():
        rows.append(
            {
                "scheme": scheme,
                "ms": summary(times[scheme]),
                "next_token": round(
                    (run.says(text)[start - 1 :] == plain).float().mean().item(), 3
                ),
                "perplexity": round(perplexity(run.model, data), 4),
            }
        )
        for name in ("median", "min"):
            ratio = rows[-1]["ms"][name] / rows[0]["ms"][name]
            rows[-1][f"{name}_against_bf16"] = round(ratio, 3)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--tokens", type=int, default=240)
    parser.add_argument(
        *("--avx",), type=int, choices=[1024, 512, 2], default=1024, help="the widest: 1024 is AMX"
    )
    parser.add_argument("--perplexity-bytes", type=int, default=32768)
    parser.add_argument("--write", action="store_true", help="keep the numbers in results/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    avx = use_cpu_kernels(arguments.avx)
    facts = machine_facts() | {"avx": avx} | versions("transformers")
    print(facts)
    rows = measure(arguments.schemes, arguments.tokens, arguments.perplexity_bytes)
    table = [
        [
            *(row["scheme"] or "bf16", f"{row['ms']['median']:.3f} [{row['ms']['min']:.3f}]"),
            f"{row['median_against_bf16']:.3f} [{row['min_against_bf16']:.3f}]",
            f"{100 * row['next_token']:.1f} %",
            *(
                row["perplexity"],
                f"{100 * (row['perplexity'] / rows[0]['perplexity'] - 1):+.2f} %",
            ),
        ]
        for row in rows
    ]
    header = ["scheme", "median [least] ms", "of bf16", "next token", "perplexity", "growth"]
    print(format_table(header, table))
    if arguments.write:
        content = {"machine": facts, "tokens": arguments.tokens, "rows": rows}
        print(write_json(f"cpu_generate_{INSTRUCTIONS[avx]}", content))


if __name__ == "__main__":
    main()
