"""A Qwen3-MoE of 12 layers with real widths and random weights, a third of its experts on the GPU:
text and tokens a second of the model with its experts in place, behind slots, and as accelerate
dispatches it (device_map="auto") with the same memory. Prints one JSON line, and with --results
writes it to offloaded_model_<GPU>.json in that folder.

    python benchmarks/residency_generate.py [--scheme int4_w4a16] [--backend triton]
                                            [--layers 12] [--tokens 64] [--load] [--results DIR]
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from records import describe_run

BEGIN = time.perf_counter()


def say(*what):
    print(f"[{time.perf_counter() - BEGIN:6.1f} s]", *what, file=sys.stderr, flush=True)


def build(args):
    import transformers

    config = transformers.Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=args.layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=args.experts,
        num_experts_per_tok=8,
        vocab_size=4096,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    if args.device == "cpu":  # a trial of the flow
        for name, size in (("hidden_size", 256), ("moe_intermediate_size", 128), ("head_dim", 32)):
            setattr(config, name, size)
        config.num_attention_heads, config.num_key_value_heads = 8, 4
    torch.manual_seed(0)
    with torch.device(args.device):
        model = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():  # so that tokens differ, and with them their experts
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.normal_(std=0.05)
    return model.eval()


class Clock:
    """A streamer: when each token was there."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def generate(model, ids, tokens, compiled):
    clock = Clock()
    options = {}
    if compiled:
        mode = "reduce-overhead" if ids.is_cuda else "default"
        from transformers import CompileConfig

        config = CompileConfig(fullgraph=True, mode=mode)
        config._compile_all_devices = True
        options = {"cache_implementation": "static", "compile_config": config}
    torch.manual_seed(1)
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            streamer=clock,
            **options,
        )
    first = min(1 + tokens // 4, len(clock.times) - 2)  # [0] is the prompt
    rate = (len(clock.times) - 1 - first) / (clock.times[-1] - clock.times[first])
    return out[0, ids.shape[1] :].tolist(), rate


def measure(model, args, ids, name, compiled=True, tokens=None):
    tokens = tokens or args.tokens
    torch._dynamo.reset()
    for attribute in ("_compiled_call", "_last_compile_config"):
        model.__dict__.pop(attribute, None)
    say(name, "begins")
    if compiled:
        for _ in range(2):  # compiles, captures
            generate(model, ids, tokens, compiled)
        say(name, "is compiled")
    found, rates = None, []
    for _ in range(3 if compiled else 1):
        found, rate = generate(model, ids, tokens, compiled)
        rates.append(rate)
    say(name, f"{max(rates):.1f} tokens/s", found[:12])
    return found, {"tokens_per_second": round(max(rates), 2), "all": [round(r, 2) for r in rates]}


def free():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def private():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--scheme", default="")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--share", type=float, default=1 / 3)
    parser.add_argument("--backend", default="auto", help="triton: the same kernels in both")
    parser.add_argument("--load", action="store_true", help="from_pretrained as well (disk)")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--results", type=Path, help="folder of the JSON file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    import transformers

    import moe_ops.integrations.transformers as moe_transformers

    result = {
        "run": describe_run(["benchmarks/residency_generate.py", *sys.argv[1:]], dry=True),
        "scheme": args.scheme or "bf16",
        "backend": args.backend,
    }
    rng = torch.Generator().manual_seed(2)
    draw = lambda n: torch.randint(0, 4096, (1, n), generator=rng).to(args.device)
    short, long = draw(16), draw(512)

    model = build(args)
    say("built", f"{sum(p.nbytes for p in model.parameters()) / 1e9:.2f} GB")
    if args.scheme:
        moe_transformers.quantize(model, args.scheme)
    say(str(moe_transformers.attach(model, backend=args.backend)).splitlines()[0])
    with torch.no_grad():
        prompt = model(long, use_cache=False).logits.cpu()
    want, result["in_place"] = measure(model, args, short, "experts in place")
    experts = sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n)
    rest = model.get_memory_footprint() - experts
    gpu_memory = int(rest + experts * args.share)
    result |= {"expert_bytes": experts, "rest_bytes": rest, "gpu_memory": gpu_memory}

    torch._dynamo.reset()
    model.__dict__.pop("_compiled_call", None)
    model.cpu()
    free()
    start = time.perf_counter()
    report = moe_transformers.offload(model, gpu_memory, device=args.device)
    free()
    say(str(report).split("model.layers")[0])
    result["offload_seconds"] = round(time.perf_counter() - start, 2)
    result["slots"] = sorted(set(report.budget.slots))
    result["pinned"], result["link_rate"] = report.pinned, report.link_rate
    result["link_ms_per_token"] = {str(r): report.expected_ms(r) for r in (0.0, 0.5, 0.9, 1.0)}
    if args.device != "cpu":
        result["gpu_bytes_after_offload"] = torch.cuda.memory_allocated()
    with torch.no_grad():
        got = model(long, use_cache=False).logits.cpu()
        result["prompt_equal"] = torch.equal(got, prompt)
        result["prompt_error"] = ((got - prompt).float().norm() / prompt.float().norm()).item()
        if args.device != "cpu":
            times = []
            for _ in range(3):
                torch.cuda.synchronize()
                start = time.perf_counter()
                model(long, use_cache=False)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            result["prompt_512_ms"] = round(1e3 * min(times), 2)
    text, result["offloaded"] = measure(model, args, short, "experts in host memory")
    result["text_equal"] = text == want
    moe_transformers.residency_stats(model)
    generate(model, short, args.tokens, True)
    stats = moe_transformers.residency_stats(model)
    result["stats"] = {
        "hits": stats.hits,
        "misses": stats.misses,
        "bytes": stats.bytes,
        "hit_rate": stats.hit_rate,
    }
    result["distinct_tokens"] = len(set(want))
    print(json.dumps(result), flush=True)  # in case that what follows is cut

    if args.load and not args.scheme:
        folder = Path(tempfile.mkdtemp()) / "model"
        del model
        free()
        model = build(args)
        model.save_pretrained(folder)
        say("saved")
        del model
        free()
        before, start = private(), time.perf_counter()
        config = moe_transformers.MoeOpsConfig(gpu_memory=gpu_memory)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=config
        )
        result["load_seconds"] = round(time.perf_counter() - start, 2)
        result["load_private_bytes"] = private() - before
        with torch.no_grad():
            result["load_prompt_equal"] = torch.equal(
                model(long, use_cache=False).logits.cpu(), prompt
            )
        import shutil

        shutil.rmtree(folder)
        say("loaded", result["load_seconds"], result["load_prompt_equal"])

    if not args.no_peer and not args.scheme and args.device != "cpu":
        del model
        free()
        try:
            import accelerate

            model = build(args).cpu()
            free()
            device_map = accelerate.infer_auto_device_map(
                model,
                {0: gpu_memory, "cpu": "110GiB"},
                no_split_module_classes=[*model._no_split_modules],
            )
            model = accelerate.dispatch_model(model, device_map)
            where = [str(v) for v in device_map.values()]
            result["device_map"] = {d: where.count(d) for d in sorted(set(where))}
            text, result["device_map_auto"] = measure(
                model, args, short, "device_map=auto", compiled=False, tokens=5
            )
        except ImportError as error:
            result["device_map_auto"] = str(error)
    say("done")
    result["seconds"] = round(time.perf_counter() - BEGIN, 1)
    print(json.dumps(result), flush=True)
    if args.results:
        name = result["run"]["machine"].get("gpu", "cpu").replace(" ", "_")
        path = args.results / f"offloaded_model_{name}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
