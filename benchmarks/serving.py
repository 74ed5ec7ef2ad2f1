"""Continuous batching of transformers (`generate_batch`) under each experts implementation.

    python benchmarks/serving.py [--only moe_ops grouped_mm ...] [--requests 32 8 128]
                                 [--attention varlen sdpa] [--results FOLDER] [--limit SECONDS]
    python benchmarks/serving.py --dry-run   # a tiny model on a CPU; keeps nothing

A Qwen3-MoE of real widths with random weights. Requests have prompts of mixed lengths and new
tokens of one number; a round is the time from the first of them to the last result. Each
implementation has one manager, in the fastest of its modes that works, and the same attention:
"varlen" is torch's own flash kernel over the keys that the manager gathers, "sdpa" transformers'
own with its mask over all cached tokens. Rounds before the times count until no graph is captured
in one; captures and kernels that Triton compiles are counted from then on, and in the first round.
Steps that decode are profiled: time in which kernels run, with and without those of attention.
Log-probabilities and texts are compared with those of unbatched runs of the same implementation.
"moe_ops with padding" is moe_ops whose experts also run the rows that pad a batch.
Rows are written to FOLDER/serving_<GPU>.json after each cell, replacing older ones.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cold_start import count_triton
from end_to_end_cases import MODELS
from records import OURS, Results, add_options
from torch import Tensor

import moe_ops
import moe_ops.integrations.transformers as moe_transformers
from moe_ops.integrations.transformers import padding
from moe_ops.integrations.transformers.serving import token_counts

NEW_TOKENS, PROMPTS = 64, (32, 512)
BATCH_TOKENS = 2048  # of a step, prompts and decodes together
# batched_mm copies both weights of every (token, expert) pair
GATHERED_TOKENS, GATHERED_REQUESTS = 256, 32
WARM_ROUNDS = 4
VOCABULARY = 32000
PROFILED, SKIPPED = 8, 4  # steps that decode
CHECKED = 4  # requests that are compared with unbatched runs
COMPARED = ("moe_ops", "grouped_mm", "moe_ops fp8_block")  # with unbatched runs
MAX_DIFFERENCE = 0.5  # of log-probabilities, in the mean: what is above it is wrong
OF_ATTENTION = ("flash", "fmha", "attention", "sdpa")  # in names of kernels
# (experts, scheme, compiled), in the order in which they run: eager is last of those by default,
# since its capture fails, and may leave the device unusable
PADDED = "moe_ops with padding"  # first: what leaves padding out stays on the model
IMPLEMENTATIONS = {
    PADDED: ("moe_ops", "", False),
    "moe_ops": ("moe_ops", "", False),
    "grouped_mm": ("grouped_mm", "", False),
    "moe_ops fp8_block": ("moe_ops", "fp8_block", False),
    "batched_mm": ("batched_mm", "", False),
    "eager": ("eager", "", False),
    "moe_ops compiled": ("moe_ops", "", True),
    "grouped_mm compiled": ("grouped_mm", "", True),
}
VARLEN = "paged|torch_varlen"
# of a manager: CUDA graphs and steps prepared while others run, graphs alone, neither
MODES = ("asynchronous", "graphs", "eager")


def varlen_attention(
    module: Any,
    query: Tensor,  # (1, heads, tokens, head_dim)
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    cache: Any,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of packed requests by the flash kernel that torch brings: without a mask over all
    cached tokens, as with the package flash-attn."""
    keys, values = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=kwargs["read_index"],
        write_index=kwargs["write_index"],
    )
    out = torch.ops.aten._flash_attention_forward(
        *(query[0].transpose(0, 1).contiguous(), keys.contiguous(), values.contiguous()),
        *(cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q, max_seqlen_k),
        *(0.0, True, False),  # no dropout, causal, no debug mask
        scale=scaling,
    )[0]
    return out.unsqueeze(0), None


class Counts:
    """CUDA graphs that managers captured, and kernels that Triton compiled, so far."""

    def __init__(self, dry: bool):
        from transformers.generation.continuous_batching.model_runner import ModelRunner

        self.captures = 0
        self._kernels: list[str] = [] if dry else count_triton()
        own = ModelRunner._capture_graph

        def capture(*args: Any) -> None:
            self.captures += 1
            own(*args)

        ModelRunner._capture_graph = capture

    def read(self) -> dict[str, int]:
        return {"captures": self.captures, "kernels": len(self._kernels)}

    def since(self, before: dict[str, int]) -> dict[str, int]:
        return {name: now - before[name] for name, now in self.read().items()}


class Warnings(logging.Handler):
    """What managers only log, such as a warm-up that failed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "Failed to warm up" in (text := record.getMessage()):
            self.found.append(text)


class Bench:
    """One model, and its managers one after the other."""

    def __init__(self, layers: int, dry: bool):
        import transformers

        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        qwen3 = MODELS["qwen3"]
        fields = qwen3.config | (qwen3.tiny if dry else {})
        if dry:  # as narrow as weights may be for fp8_block
            fields |= {"hidden_size": 128, "moe_intermediate_size": 128}
        self.config = transformers.Qwen3MoeConfig(
            **fields,
            num_hidden_layers=layers,
            vocab_size=300 if dry else VOCABULARY,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            pad_token_id=0,
            eos_token_id=None,
            bos_token_id=None,
        )
        torch.manual_seed(0)
        with self.device:
            self.model = transformers.Qwen3MoeForCausalLM._from_config(
                self.config, dtype=torch.float32 if dry else torch.bfloat16
            ).eval()
        self.model.model.embed_tokens.weight.normal_()
        self.model.lm_head.weight.normal_(std=0.05)
        self.counts, self.warnings = Counts(dry), Warnings()
        logging.getLogger("transformers").addHandler(self.warnings)

    def use(self, experts: str, scheme: str) -> None:
        """Switch the experts, and with ours the routers; weights once quantized stay so."""
        moe_transformers.unfuse_routers(self.model)
        self.model.set_experts_implementation(experts)
        if experts == OURS:
            report = moe_transformers.fuse_routers(self.model)
            if not all(router.method for router in report.routers):
                raise RuntimeError(f"some routers are still transformers' own:\n{report}")
        if scheme:
            moe_transformers.quantize(self.model, scheme)

    def prompts(self, requests: int) -> list[list[int]]:
        """Random tokens, of lengths that are spread evenly and mixed."""
        low, high = (3, 20) if self.dry else PROMPTS
        generator = torch.Generator().manual_seed(requests)
        lengths = torch.linspace(low, high, requests).round().int()
        lengths = lengths[torch.randperm(requests, generator=generator)]
        return [
            torch.randint(1, self.config.vocab_size, (n,), generator=generator).tolist()
            for n in lengths.tolist()
        ]

    def manager(self, requests: int, attention: str, most: int, mode: str, compiled: bool) -> Any:
        """The manager that `generate_batch` would make for so many requests at most, warmed up."""
        from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig

        self.model.set_attn_implementation(VARLEN if attention == "varlen" else "paged|sdpa")
        block = 16 if self.dry else 256
        longest = (40 if self.dry else PROMPTS[1]) + NEW_TOKENS
        options: dict[str, Any] = {}
        if compiled:
            backend = "eager" if self.dry else "inductor"
            compile_config = CompileConfig(
                fullgraph=False, dynamic=True, mode=None if self.dry else "default"
            )
            compile_config.backend = backend
            options = {"varlen_compile_config": compile_config}
        config = ContinuousBatchingConfig(
            block_size=block,
            num_blocks=requests * -(-longest // block) + 8,
            max_batch_tokens=most,
            max_requests_per_batch=requests,
            allow_block_sharing=False,  # else later rounds would find their prompts in the cache
            use_cuda_graph=mode != "eager",
            use_async_batching=mode == "asynchronous" and not self.dry,
            return_logprobs=True,
            **options,
        )
        manager = self.model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0), config
        )
        self.warnings.found.clear()
        manager.warmup()
        if self.warnings.found:
            raise RuntimeError(self.warnings.found[0])
        return manager

    def round(self, manager: Any, prompts: Sequence[list[int]], new_tokens: int) -> tuple:
        """(seconds, outputs in the order of prompts): requests wait when the manager starts."""
        manager.background_thread_status.clear()  # of the round before, which was stopped
        names = manager.add_requests(list(prompts), max_new_tokens=new_tokens)
        start = time.perf_counter()
        manager.start()
        found: dict[str, Any] = {}
        try:
            while len(found) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = result
                elif result is None and not manager.is_running():
                    raise RuntimeError(f"{manager.background_thread_status.fatal_error}")
            seconds = time.perf_counter() - start
        finally:
            manager.stop(keep_for_next_session=True)
            del self.model._cached_continuous_batching_manager
        outputs = [found[name] for name in names]
        for output in outputs:
            if output.error or len(output.generated_tokens) != new_tokens:
                raise RuntimeError(f"{output.error}, {len(output.generated_tokens)} tokens")
        return seconds, outputs

    def profile(self, manager: Any, prompts: Sequence[list[int]], new_tokens: int) -> dict:
        """Microseconds in which kernels ran, a step that decodes."""
        from torch.profiler import ProfilerActivity

        kind = ProfilerActivity.CPU if self.dry else ProfilerActivity.CUDA
        profiler = torch.profiler.profile(activities=[kind])
        steps = 0

        def sync() -> None:
            if not self.dry:
                torch.cuda.synchronize()

        processor = type(manager.batch_processor)
        own = processor._generation_step

        def step(processor: Any, model: Any) -> None:
            nonlocal steps
            scheduler = processor.scheduler
            states = scheduler.active_requests.values()
            if not scheduler.waiting_requests and all(s.status.name == "DECODING" for s in states):
                steps += 1
            if steps == SKIPPED + 1:
                sync()
                profiler.start()
            own(processor, model)
            if steps == SKIPPED + PROFILED:
                sync()
                profiler.stop()
                steps += 1

        with mock.patch.object(processor, "_generation_step", step):
            self.round(manager, prompts, new_tokens)
        if steps <= SKIPPED + PROFILED:
            raise RuntimeError("too few steps decoded")
        return of_kernels(profiler.events(), self.dry)

    def unbatched(self, outputs: Sequence[Any]) -> dict:
        """How far batched outputs are from those of one request after the other."""
        self.model.set_attn_implementation("sdpa")
        differences, equal = [], []
        for output in sorted(outputs, key=lambda o: len(o.prompt_ids))[:CHECKED]:
            prompt, new = list(output.prompt_ids), list(output.generated_tokens)
            ids = torch.tensor([prompt + new], device=self.device)
            logits = self.model(input_ids=ids[:, :-1], logits_to_keep=len(new)).logits[0].float()
            of_tokens = logits.log_softmax(-1).gather(1, ids[0, -len(new) :, None])[:, 0]
            batched = torch.tensor(output.logprobs, device=self.device)
            differences.append((of_tokens - batched).abs())
            alone = self.model.generate(
                ids[:, : len(prompt)],
                attention_mask=torch.ones_like(ids[:, : len(prompt)]),
                max_new_tokens=len(new),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :]
            same = (alone == ids[0, len(prompt) :]).tolist()
            equal.append(same.index(False) if False in same else len(same))
        found = torch.cat(differences)
        return {
            "logprob_mean": float(f"{found.mean():.3g}"),
            "logprob_max": float(f"{found.max():.3g}"),
            "first_equal_tokens": equal,
        }


def of_kernels(events: Sequence[Any], dry: bool) -> dict:
    """What a profile of steps says: time in which any kernel ran, with and without attention."""
    kind = torch.autograd.DeviceType.CPU if dry else torch.autograd.DeviceType.CUDA
    kernels = [e for e in events if e.device_type == kind]
    spans = [(e.time_range.start, e.time_range.end, e.name) for e in kernels]
    attention = [s for s in spans if any(word in s[2].lower() for word in OF_ATTENTION)]
    others = [s for s in spans if not any(word in s[2].lower() for word in OF_ATTENTION)]
    total, number = Counter[str](), Counter[str]()
    for start, end, name in spans:
        total[name] += end - start
        number[name] += 1
    return {
        "busy_us": round(covered(spans) / PROFILED, 1),
        "without_attention_us": round(covered(others) / PROFILED, 1),
        "attention_us": round(covered(attention) / PROFILED, 1),
        "step_us": round((max(s[1] for s in spans) - min(s[0] for s in spans)) / PROFILED, 1),
        "kernels": round(len(spans) / PROFILED, 1),
        "longest": [
            [name[:90], round(us / PROFILED, 1), round(number[name] / PROFILED, 1)]
            for name, us in total.most_common(14)
        ],
    }


def covered(spans: Sequence[tuple[float, float, str]]) -> float:
    """The time in which at least one of them runs."""
    total, until = 0.0, float("-inf")
    for start, end, _ in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def check_varlen() -> str:
    """Why torch's flash kernel cannot be used here, if it cannot."""
    rng = torch.Generator("cuda").manual_seed(0)
    q, k, v = [
        torch.randn(1, heads, 96, 128, generator=rng, device="cuda").bfloat16()
        for heads in (32, 4, 4)
    ]
    lengths = torch.tensor([0, 40, 96, 96], dtype=torch.int32, device="cuda")
    cache = mock.Mock(update=lambda **_: (k[0].transpose(0, 1), v[0].transpose(0, 1)))
    module = mock.Mock(layer_idx=0)
    lens: dict[str, Any] = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
    lens |= {"max_seqlen_q": 96, "max_seqlen_k": 1024, "read_index": [], "write_index": []}
    try:
        got, _ = varlen_attention(module, q, k, v, None, scaling=128**-0.5, cache=cache, **lens)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    for begin, end in ((0, 40), (40, 96)):
        of = [t[:, :, begin:end].float() for t in (q, k, v)]
        want = torch.nn.functional.scaled_dot_product_attention(
            *of, is_causal=True, enable_gqa=True
        )
        difference = (got[:, begin:end].transpose(1, 2).float() - want).abs().max()
        if not difference < 0.05:
            return f"it differs from sdpa by {difference:.3g}"
    return ""


def compile_kernels(most: int, schemes: Sequence[str]) -> None:
    """Compile this library's kernels on all cores."""
    from dataclasses import replace

    from tools.compile_kernels import Call, RouterCall, compile_here

    model = MODELS["qwen3"]
    E, top_k, K, _ = model.shape
    sizes = [1 << i for i in range(most.bit_length())]
    router = RouterCall((E, top_k, K), 1, **model.router)
    calls: list[Any] = [replace(router, M=M) for M in sizes if M <= 16]
    call = Call(model.shape, 1, ids=torch.int64)
    calls += [replace(call, M=M, scheme=scheme) for scheme in schemes for M in sizes]
    compile_here(calls)


class Run:
    """Rows as they come, in a file."""

    def __init__(self, arguments: argparse.Namespace, results: Results):
        self.given, self.results = arguments, results
        self.name = results.begin(sys.argv, arguments.dry_run)
        print(results.runs[self.name], flush=True)
        self.end = time.monotonic() + arguments.limit
        self.bench = Bench(arguments.layers, arguments.dry_run)

    def left(self) -> float:
        return self.end - time.monotonic()

    def add(self, row: dict[str, Any]) -> None:
        self.results.add(row | {"run": self.name})
        self.results.write()

    def refuse(self, row: dict[str, Any], reason: str) -> None:
        print(f"{row['implementation']}: {reason}", flush=True)
        self.add(row | {"reason": reason})

    def all(self) -> None:
        for attention in self.given.attention:
            for implementation in [i for i in IMPLEMENTATIONS if i in self.given.only]:
                self.implementation(implementation, attention)
                self.release()

    def implementation(self, implementation: str, attention: str) -> None:
        """All numbers of requests; one manager serves them, sized for the largest."""
        experts, scheme, compiled = IMPLEMENTATIONS[implementation]
        start = time.perf_counter()
        row: dict[str, Any] = {"implementation": implementation, "attention": attention}
        row |= {"layers": self.bench.config.num_hidden_layers}
        row["failed"] = errors = dict[str, str]()  # other modes, and why
        requests = sorted(self.given.requests)
        most = self.given.batch_tokens
        if experts == "batched_mm":
            requests = [n for n in requests if n <= GATHERED_REQUESTS]
            most = min(most, GATHERED_TOKENS)
        if compiled or experts == "eager":  # the one that is compared, for the sake of time
            requests = [n for n in requests if n == self.given.requests[0]]
        if not requests or self.left() < 5:
            reason = "the time was over" if requests else "it would copy too many weights"
            return self.refuse(row | {"requests": self.given.requests[0]}, reason)
        plain, own = self.bench.model, padding.leave_out_padding
        try:
            if implementation == PADDED:
                padding.leave_out_padding = lambda model: None
            if scheme:  # of a copy, since other implementations need the weights
                self.bench.model = copied(plain)
            self.bench.use(experts, scheme)
            if experts == OURS:
                counts = token_counts(most, padded=True)
                warm = moe_ops.warmup(self.bench.model, counts, show_progress=False)
                print(f"{implementation}: warmed up in {warm.seconds:.1f} s", flush=True)
            modes = [m for m in MODES if attention == "varlen" or m != "asynchronous"]
            if experts == "eager":  # a capture that fails may leave the device unusable
                modes = ["eager", "graphs"]
            for mode in modes:
                try:
                    manager = self.bench.manager(requests[-1], attention, most, mode, compiled)
                    row["mode"] = mode
                    row["setup_s"] = round(time.perf_counter() - start, 1)
                    for n in sorted(requests, key=self.given.requests.index):
                        if self.left() > 5:
                            self.cell(row | {"requests": n}, manager)
                    if experts != "eager" or self.bench.dry or self.left() < 20:
                        break
                except Exception as error:
                    errors[mode] = reason_of(error)
                    print(f"{implementation}, {mode}: {errors[mode]}", flush=True)
                    if mode == "eager":
                        raise
                manager = None
                self.release()
            self.results.write()  # with the modes that failed later
        except Exception as error:  # leaves the others
            self.refuse(row | {"requests": self.given.requests[0]}, reason_of(error))
        finally:
            self.bench.model, padding.leave_out_padding = plain, own

    def cell(self, row: dict[str, Any], manager: Any) -> None:
        """Times, profile and comparison of one number of requests."""
        bench, new_tokens = self.bench, self.given.new_tokens
        experts, _, _ = IMPLEMENTATIONS[row["implementation"]]
        prompts = bench.prompts(row["requests"])
        slow = experts in ("eager", "batched_mm")
        first, rounds, seconds = None, [], 0.0
        for _ in range(1 if experts == "eager" else WARM_ROUNDS):
            before = bench.counts.read()
            bench.round(manager, prompts, new_tokens)
            now = bench.counts.since(before)
            first = first or now
            if not now["captures"] and (now is not first or row["mode"] == "eager"):
                break
        before, start = bench.counts.read(), time.perf_counter()
        for _ in range(1 if slow else self.given.rounds):
            seconds, outputs = bench.round(manager, prompts, new_tokens)
            rounds.append(seconds)
            if time.perf_counter() - start > 8 or self.left() < 5:
                break
        row |= {
            "prompt_tokens": sum(map(len, prompts)),
            "new_tokens": new_tokens,
            "tokens_s": round(len(prompts) * new_tokens / statistics.median(rounds), 1),
            "rounds_s": [round(seconds, 4) for seconds in rounds],
            "first_round": first,
            "measured": bench.counts.since(before),
        }
        print(row, flush=True)
        self.add(row)
        row["decode"] = bench.profile(manager, prompts, new_tokens)
        self.add(row)
        print(f"    a step that decodes: {row['decode']}", flush=True)
        if row["requests"] != min(self.given.requests) or row["implementation"] not in COMPARED:
            return
        attention = bench.model.config._attn_implementation
        found = bench.unbatched(outputs)
        bench.model.set_attn_implementation(attention)
        print(f"    beside unbatched runs: {found}", flush=True)
        row |= found
        if not row["logprob_mean"] <= MAX_DIFFERENCE:
            row["reason"] = f"wrong result: log-probabilities differ by {row['logprob_mean']}"
        self.add(row)

    def release(self) -> None:
        gc.collect()
        if not self.bench.dry:
            torch.cuda.empty_cache()


def copied(model: Any) -> Any:
    import copy

    return copy.deepcopy(model)


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End the process when the time is over, in whatever call it is: rows are in the file."""

    def end() -> None:
        print(f"stopped after {seconds:.0f} s", flush=True)
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def table(results: Results) -> None:
    """Tokens a second, and microseconds of kernels a step, of each cell."""
    head = ("requests", "attention", "implementation", "mode", "tokens/s", "busy us", "without")
    print(("{:>8} {:>9}  {:22}" + "{:>14}" * 4).format(*head))
    for row in results.rows.values():
        if "tokens_s" not in row:
            print(f"{row['requests']:8} {row['attention']:>9}  {row['implementation']:22}", end="")
            print(f"  {row['reason']}")
            continue
        decode = row.get("decode", {})
        cells = [row["mode"], row["tokens_s"]]
        cells += [decode.get("busy_us", "-"), decode.get("without_attention_us", "-")]
        print(f"{row['requests']:8} {row['attention']:>9}  {row['implementation']:22}", end="")
        print("".join([f"{cell!s:>14}" for cell in cells]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    # torch.compile alone takes minutes
    compiled = [name for name, (_, _, compiled) in IMPLEMENTATIONS.items() if compiled]
    default = [name for name in IMPLEMENTATIONS if name not in (PADDED, *compiled)]
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, default=default)
    parser.add_argument(
        *("--requests", "-n"), type=int, nargs="+", default=[32, 8, 128], help="first to last"
    )
    parser.add_argument("--attention", nargs="+", choices=["varlen", "sdpa"], default=["varlen"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=190.0, metavar="SECONDS")
    add_options(parser)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch._dynamo.config.recompile_limit = 64  # one code object has all decorated forwards
    where = "dry_run" if arguments.dry_run else ""
    if arguments.dry_run:
        vars(arguments).update(
            results=Path(tempfile.mkdtemp(prefix="serving_dry_run_")),
            requests=[3, 5],
            attention=["sdpa"],
            layers=2,
            new_tokens=SKIPPED + PROFILED + 2,
            batch_tokens=64,
            rounds=2,
        )
    elif not torch.cuda.is_available():
        print("This benchmark needs a GPU; none found, nothing measured. --dry-run needs none.")
        return
    else:
        where = torch.cuda.get_device_name().replace(" ", "_")

    def key(row: dict) -> tuple:
        return row["implementation"], row["attention"], row["requests"]

    def order(key: tuple) -> tuple:
        return key[1], key[2], list(IMPLEMENTATIONS).index(key[0])

    results = Results(arguments.results / f"serving_{where}.json", key, order)
    if arguments.merge or arguments.report:
        for path in arguments.merge:
            results.merge(path)
            results.write()
        return table(results)
    with limited(arguments.limit):
        if not arguments.dry_run and "varlen" in arguments.attention:
            from transformers import AttentionInterface

            AttentionInterface.register(VARLEN, varlen_attention)
            if reason := check_varlen():
                print(f"attention is sdpa: torch's flash kernel cannot be used: {reason}")
                arguments.attention = ["sdpa"]
        run = Run(arguments, results)
        if not arguments.dry_run:
            ours = [IMPLEMENTATIONS[i] for i in arguments.only if i.startswith(OURS)]
            schemes = list(dict.fromkeys(scheme for _, scheme, _ in ours))
            compile_kernels(arguments.batch_tokens, schemes)
        run.all()
        table(results)


if __name__ == "__main__":
    main()
