"""Decode and prefill of compiled transformers models on a GPU, under each experts implementation.

    python benchmarks/end_to_end.py [--models qwen3 mixtral dsv3 gptoss]
                                    [--only grouped_mm moe_ops ...] [--batch [1 8 64]] [--layers N]
                                    [--results FOLDER]
    python benchmarks/end_to_end.py --merge FILE ...   # add another run's rows to the results
    python benchmarks/end_to_end.py --report           # table and plot of all rows
    python benchmarks/end_to_end.py --dry-run          # tiny models on a CPU; keeps nothing

Models have their full layer width, random weights and few layers. Decoding: static cache,
fullgraph, mode="reduce-overhead"; a time counts only if its steps replayed a CUDA graph. Prefill:
4096 tokens, fullgraph; beside its time stands that of the experts of all layers alone, compiled,
on the tokens and routing of that prompt. Rows are written to FOLDER/end_to_end_<GPU>.json after
each implementation of a model, replacing older ones; those of prompts alone (--batch with no
number behind it) to prompts_<GPU>.json.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import report
import torch
from end_to_end_cases import IMPLEMENTATIONS, MODELS, Model
from harness import relative_error
from records import OURS, Results, add_options
from torch import Tensor

import moe_ops
import moe_ops.integrations.transformers as moe_transformers

PROMPT, WARM_UP, STEPS, PREFILL, VOCABULARY = 64, 8, 64, 4096, 32000
# batched_mm copies both weights of every (token, expert) pair; past this it is not run.
MAX_GATHER_BYTES = 4 << 30
# The first layer's experts run on a few tokens with given ids: logits would not do, since rounding
# alone moves tokens to other experts. A row whose experts differ by more from the first
# implementation's is wrong.
CHECKED_TOKENS, MAX_DIFFERENCE = 8, {"": 0.02, "fp8_block": 0.15}


class Bench:
    """One model, built once and then run under each implementation."""

    def __init__(self, name: str, layers: int | None, dry: bool):
        import transformers

        self.dry = dry
        self.model: Model = MODELS[name]
        self.device = torch.device("cpu" if dry else "cuda")
        layers = layers or self.model.layers
        fields = self.model.config | (self.model.tiny if dry else {})
        if self.model.config_class == "GptOssConfig":
            # Its sliding cache counts tokens in a Python int: a decode step is then compiled for
            # one length.
            fields = fields | {"layer_types": ["full_attention"] * layers}
        self.config = getattr(transformers, self.model.config_class)(
            **fields,
            num_hidden_layers=layers,
            vocab_size=VOCABULARY,
            max_position_embeddings=8192,
        )
        torch.manual_seed(0)
        with self.device:
            self.module = transformers.AutoModelForCausalLM.from_config(
                self.config, dtype=torch.bfloat16, experts_implementation="grouped_mm"
            ).eval()
        (self.experts, *_) = (m for n, m in self.module.named_modules() if n.endswith(".experts"))
        for module in self.module.modules():
            for name, bias in module.named_parameters(recurse=False):
                if name.endswith("_proj_bias"):  # of experts; transformers makes them zero
                    bias.normal_(0, 0.02)
        self.reference: Tensor | None = None

    def use(self, implementation: str, scheme: str) -> str:
        """Switch the experts, and with ours the routers; weights once quantized stay so. Says
        whose routers run."""
        self.module.set_experts_implementation(implementation)
        moe_transformers.unfuse_routers(self.module)
        if implementation == "moe_ops":
            report = moe_transformers.fuse_routers(self.module)
            if not all(router.method for router in report.routers):
                raise RuntimeError(f"some routers are still transformers' own:\n{report}")
        if scheme:
            moe_transformers.quantize(self.module, scheme)
        return "moe_ops" if implementation == "moe_ops" else "transformers"

    def tokens(self, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch)
        return torch.randint(0, VOCABULARY, (batch, length), generator=generator).to(self.device)

    def difference(self) -> float:
        """||y - that of the first implementation|| / ||that||, y the first layer's experts on
        given ids."""
        generator = torch.Generator().manual_seed(0)
        count = self.experts.down_proj.shape[0]
        size = (CHECKED_TOKENS, self.config.num_experts_per_tok)
        ids = torch.rand(CHECKED_TOKENS, count, generator=generator).argsort(-1)[:, : size[1]]
        x = torch.randn(CHECKED_TOKENS, self.config.hidden_size, generator=generator)
        weights = torch.rand(size, generator=generator)
        inputs = (x.bfloat16(), ids, weights.bfloat16())
        y = self.experts(*[t.to(self.device) for t in inputs])
        if self.reference is None:
            self.reference = y
        return float(f"{relative_error(y, self.reference):.3g}")

    def gather_bytes(self, tokens: int) -> int:
        """Bytes of weights that batched_mm copies in one layer."""
        pair = sum(p[0].numel() * p.element_size() for p in self.experts.parameters())
        return tokens * self.config.num_experts_per_tok * pair

    def median_ms(self, call: Callable[[], object], count: int) -> float:
        """Median time of a call: events around each; wall clock on a CPU."""
        if self.dry:
            times = []
            for _ in range(count):
                start = time.perf_counter()
                call()
                times.append((time.perf_counter() - start) * 1e3)
            return statistics.median(times)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events)

    def compile(self, function: Callable, **options: Any) -> Callable:
        """Compiled as a user would; the dry run traces the same graph but generates no code."""
        torch._dynamo.reset()
        options = {"backend": "aot_eager"} if self.dry else options
        return torch.compile(function, fullgraph=True, dynamic=False, **options)

    def decode(self, batch: int) -> dict:
        """Time of one greedy decode step at `batch` sequences, and what became of CUDA graphs."""
        from torch._dynamo.utils import counters
        from transformers import StaticCache

        start = time.perf_counter()
        cache = StaticCache(config=self.config, max_cache_len=PROMPT + WARM_UP + STEPS)
        experts = self.config._experts_implementation
        if experts == "batched_mm":  # a prompt has too many tokens for it
            self.module.set_experts_implementation("grouped_mm")
        prompt = self.tokens(batch, PROMPT)
        logits = self.module(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits
        self.module.set_experts_implementation(experts)
        tokens = logits[:, -1].argmax(-1, keepdim=True)

        def forward(tokens: Tensor) -> Tensor:
            logits = self.module(input_ids=tokens, past_key_values=cache, use_cache=True).logits
            return logits[:, -1].argmax(-1, keepdim=True)

        compiled = self.compile(forward, mode="reduce-overhead")
        counters.clear()

        def step() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            tokens.copy_(compiled(tokens))

        for _ in range(WARM_UP):
            step()
        compiled_after, recorded = time.perf_counter() - start, self.recorded_graphs()
        ms = self.median_ms(step, STEPS)
        graphs = counters["stats"]["unique_graphs"]
        skips = counters["inductor"]["cudagraph_skips"]
        if graphs != 1:
            return {"reason": f"one decode step became {graphs} graphs"}
        if not self.dry and (skips or not recorded or self.recorded_graphs() != recorded + 1):
            return {"reason": f"CUDA graphs: {recorded} recorded and {skips} skipped in warm-up"}
        return {"ms": round(ms, 4), "tokens": batch, "compile_s": round(compiled_after, 1)}

    def recorded_graphs(self) -> int:
        """A number that grows by one with each call, and with each CUDA graph that inductor
        records."""
        if self.dry:
            return 0
        from torch._inductor.cudagraph_trees import get_manager

        manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        return next(manager.graph_counter) if manager else 0

    def prefill(self, length: int) -> dict:
        """Time of one forward over `length` tokens."""
        start = time.perf_counter()
        tokens = self.tokens(1, length)

        def forward(tokens: Tensor) -> Tensor:
            return self.module(input_ids=tokens, use_cache=False, logits_to_keep=1).logits

        compiled = self.compile(forward)
        for _ in range(3):
            compiled(tokens)
        compiled_after = time.perf_counter() - start
        ms = self.median_ms(lambda: compiled(tokens), 10)
        of_experts = self.experts_ms(tokens)
        return {
            "ms": round(ms, 4),
            "experts_ms": round(of_experts, 4),
            "tokens": length,
            "compile_s": round(compiled_after, 1),
        }

    def experts_ms(self, tokens: Tensor) -> float:
        """Time of the experts of all layers alone, compiled, on what a forward pass gives them."""
        modules = [m for n, m in self.module.named_modules() if n.endswith(".experts")]
        given: list[tuple[Any, tuple, dict]] = []

        def keep(module: Any, args: tuple, kwargs: dict) -> None:
            given.append((module, args, kwargs))

        hooks = [m.register_forward_pre_hook(keep, with_kwargs=True) for m in modules]
        self.module(input_ids=tokens, use_cache=False, logits_to_keep=1)
        for hook in hooks:
            hook.remove()

        def experts() -> list[Tensor]:
            return [module(*args, **kwargs) for module, args, kwargs in given]

        compiled = self.compile(experts)
        for _ in range(3):
            compiled()
        return self.median_ms(compiled, 10)

    def cell(self, measure: Callable[[int], dict], size: int) -> dict:
        """One cell, or why there is none."""
        gather = self.gather_bytes(size)
        if self.config._experts_implementation == "batched_mm" and gather > MAX_GATHER_BYTES:
            return {"reason": f"would copy {gather / 2**30:.0f} GiB of weights a layer"}
        try:
            return measure(size)
        except Exception as error:  # a cell that fails leaves the others
            return {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        finally:
            self.release()

    def release(self) -> None:
        """Give back what compiled functions and their graphs hold."""
        torch._dynamo.reset()
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()


def compile_kernels(arguments: argparse.Namespace) -> None:
    """Compile this library's kernels for all models at once."""
    from tools.compile_kernels import Call, RouterCall, compile_here

    sizes = {CHECKED_TOKENS, arguments.prefill, *arguments.batch}
    sizes |= {PROMPT * batch for batch in arguments.batch}
    calls: list[Call | RouterCall] = []
    for name in arguments.models:
        E, top_k, K, _ = MODELS[name].shape
        router = RouterCall((E, top_k, K), 1, **MODELS[name].router)
        calls += [replace(router, M=M) for M in sorted({*arguments.batch} & {*range(17)})]
        oss = (
            MODELS[name].config_class == "GptOssConfig"
        )  # interleaved gate and up, weights (E, K, N)
        call = Call(MODELS[name].shape, 1, ids=torch.int64, bias=oss)
        call = replace(call, activation="swigluoai") if oss else call
        for scheme in sorted({IMPLEMENTATIONS[i][1] for i in arguments.only}):
            plain = replace(call, scheme=scheme, transposed=oss and not scheme)
            calls += [replace(plain, M=M) for M in sorted(sizes)]
    compile_here(calls)


def run(arguments: argparse.Namespace, results: Results, dry: bool) -> None:
    """Measure model by model; the implementation that quantizes the weights comes last."""
    name_of_run = results.begin(sys.argv, dry)
    print(results.runs[name_of_run], flush=True)
    if not dry and any(name.startswith(OURS) for name in arguments.only):
        compile_kernels(arguments)
    for name in arguments.models:
        start = time.perf_counter()
        bench = Bench(name, arguments.layers, dry)
        print(f"{name}: built in {time.perf_counter() - start:.1f} s", flush=True)
        for implementation in [i for i in IMPLEMENTATIONS if i in arguments.only]:
            start = time.perf_counter()
            routers = bench.use(*IMPLEMENTATIONS[implementation])
            row: dict[str, Any] = {"model": name, "implementation": implementation}
            row["routers"] = routers
            row |= {"layers": bench.config.num_hidden_layers, "run": name_of_run}
            if routers == OURS:  # so that the compiled step's first recording finds all kernels
                counts = {PROMPT * batch for batch in arguments.batch}
                counts |= {*arguments.batch, arguments.prefill}
                print(moe_ops.warmup(bench.module, counts), flush=True)
            row["difference"] = bench.difference()
            setup = time.perf_counter() - start
            cells = {f"decode {b}": bench.cell(bench.decode, b) for b in arguments.batch}
            cells[f"prefill {arguments.prefill}"] = bench.cell(bench.prefill, arguments.prefill)
            if not row["difference"] <= MAX_DIFFERENCE[IMPLEMENTATIONS[implementation][1]]:
                row["reason"] = f"wrong result: experts differ by {row['difference']}"
            else:
                row["cells"] = cells
            results.add(row)
            results.write()
            print(f"{row} [set-up {setup:.1f} s, all {time.perf_counter() - start:.1f} s]")
            sys.stdout.flush()
        del bench
        gc.collect()
        if not dry:
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--only", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS)
    )
    parser.add_argument(
        "--batch", type=int, nargs="*", default=[1, 8, 64], help="none: prompts alone"
    )
    parser.add_argument("--layers", type=int, help="in place of each model's own number")
    parser.add_argument("--prefill", type=int, default=PREFILL, metavar="TOKENS")
    add_options(parser)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    # transformers calls cached functions in what we compile; the warning returns with every cell
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
    if arguments.merge or arguments.report:
        kinds = "end_to_end", "prompts"
        return report.merge_and_report(arguments.merge, arguments.results, *kinds)
    if arguments.dry_run:
        folder = Path(tempfile.mkdtemp(prefix="end_to_end_dry_run_"))
        vars(arguments).update(results=folder, batch=[1, 8], prefill=64, layers=2)
        where = "dry_run"
    elif not torch.cuda.is_available():
        print("This benchmark needs a GPU; none found, nothing measured. --dry-run needs none.")
        return
    else:
        where = torch.cuda.get_device_name().replace(" ", "_")
    kind = "end_to_end" if arguments.batch else "prompts"
    results = report.open_results(arguments.results / f"{kind}_{where}.json")
    run(arguments, results, arguments.dry_run)
    if arguments.dry_run:
        report.report(results.path)
    else:
        report.show_models(results)


if __name__ == "__main__":
    main()
