"""Decode and prefill of compiled transformers models on a GPU, under each experts implementation.

    python benchmarks/end_to_end.py [--models qwen3 mixtral] [--layers 4] [--batch 1 8 64]

Models have their full layer width, random weights and few layers. Decoding: static cache, fullgraph,
mode="reduce-overhead"; CUDA graphs must be recorded and none skipped, else the row says so. Prefill: 4096
tokens, fullgraph. Writes benchmarks/results/end_to_end_<GPU>.json.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import format_table, machine_facts, write_json

import moe_ops.integrations.transformers as moe_transformers


@dataclass(frozen=True)
class Model:
    """A published model's layer width; `config` are fields of its transformers config class."""

    config_class: str
    config: dict


ATTENTION = {"num_attention_heads": 32, "head_dim": 128, "vocab_size": 32000}
MODELS = {
    "qwen3": Model(
        "Qwen3MoeConfig",
        {
            **ATTENTION,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "intermediate_size": 6144,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": Model(
        "MixtralConfig",
        {
            **ATTENTION,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
        },
    ),
}
# name -> (experts implementation, scheme)
IMPLEMENTATIONS = {
    "grouped_mm": ("grouped_mm", ""),
    "batched_mm": ("batched_mm", ""),
    "moe_ops": ("moe_ops", ""),
    "moe_ops fp8_block": ("moe_ops", "fp8_block"),
}
PROMPT, STEPS, PREFILL = 64, 64, 4096


def build(model: Model, layers: int, implementation: str, scheme: str):
    """A model with random weights on the GPU, bf16."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, model.config_class)(
        **model.config, num_hidden_layers=layers, max_position_embeddings=8192
    )
    with torch.device("cuda"):
        built = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation=implementation
        ).eval()
    if scheme:
        moe_transformers.quantize(built, scheme)
    return built


def events_ms(call: Callable[[], object], count: int) -> float:
    """Median time of a call, from events around each, in milliseconds."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


@torch.no_grad()
def decode_ms(model, batch: int) -> tuple[float, str]:
    """(time of one greedy decode step, what became of CUDA graphs)."""
    from torch._dynamo.utils import counters
    from transformers import StaticCache

    torch._dynamo.reset()
    counters.clear()
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + 8 * STEPS)
    prompt = torch.randint(0, 32000, (batch, PROMPT), device="cuda")
    logits = model(input_ids=prompt, past_key_values=cache, use_cache=True).logits
    tokens = logits[:, -1].argmax(-1, keepdim=True)

    def forward(tokens):
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    compiled = torch.compile(forward, fullgraph=True, mode="reduce-overhead")

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        tokens.copy_(compiled(tokens))

    for _ in range(8):
        step()
    time = events_ms(step, STEPS)
    skipped = counters["inductor"]["cudagraph_skips"]
    return time, f"{skipped} skipped" if skipped else "recorded"


@torch.no_grad()
def prefill_ms(model) -> float:
    """Time of one forward over PREFILL tokens."""
    torch._dynamo.reset()
    tokens = torch.randint(0, 32000, (1, PREFILL), device="cuda")
    compiled = torch.compile(
        lambda t: model(input_ids=t, use_cache=False, logits_to_keep=1).logits, fullgraph=True
    )
    for _ in range(3):
        compiled(tokens)
    return events_ms(lambda: compiled(tokens), 10)


def measure(model, batches: list[int], prefill: bool) -> dict:
    """All cells of one built model; a cell that cannot run says why."""
    row: dict = {}
    for batch in batches:
        try:
            row[f"decode_{batch}_ms"], row[f"decode_{batch}_graphs"] = decode_ms(model, batch)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            row[f"decode_{batch}_ms"] = f"{type(error).__name__}: {str(error)[:200]}"
        torch.cuda.empty_cache()
    if prefill:
        try:
            row["prefill_ms"] = prefill_ms(model)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            row["prefill_ms"] = type(error).__name__
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--only", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS)
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--no-prefill", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a GPU; none found, nothing measured.")
        return
    import transformers

    facts = {**machine_facts(), "transformers": transformers.__version__}
    rows = []
    for name in args.models:
        for implementation in args.only:
            model = build(MODELS[name], args.layers, *IMPLEMENTATIONS[implementation])
            row = {"model": name, "layers": args.layers, "implementation": implementation}
            row |= measure(model, args.batch, not args.no_prefill)
            rows.append(row)
            print(row, flush=True)
            del model
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    columns = [f"decode_{b}_ms" for b in args.batch] + ["prefill_ms"]
    shown = [
        [
            row["model"],
            row["implementation"],
            *[f"{row[c]:.3f}" if isinstance(row.get(c), float) else "-" for c in columns],
        ]
        for row in rows
    ]
    print(facts)
    print(format_table(["model", "experts", *columns], shown))
    where = facts["gpu"].replace(" ", "_")
    print(write_json(f"end_to_end_{where}", {"machine": facts, "rows": rows}))


if __name__ == "__main__":
    main()
