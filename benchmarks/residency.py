"""Experts larger than the GPU: stacks of layers whose experts lie in host memory, beside the
resident stack, and beside what the link allows.

    python benchmarks/residency.py [--stacks "qwen3 bf16" ...] [--shares 0.1 0.4] [--batch 1 8 64]
                                   [--parts decode misses ...] [--limit 290] [--results FOLDER]
    python benchmarks/residency.py --quick          # two stacks and few cells, in a minute
    python benchmarks/residency.py --merge FILE ... # add another run's rows to the results
    python benchmarks/residency.py --report         # tables and plot of all rows
    python benchmarks/residency.py --dry-run        # all but graphs, tiny, on a CPU; keeps nothing

All layers of a stack are in one CUDA graph, which is replayed for each step of a routing trace
(routing_traces.py) after its ids were written. Each layer has weights of its own, on the host as
on the GPU, so that misses read memory that no cache holds. Rows are written to
FOLDER/residency_<GPU>.json as they come. The link is measured first: the copy engine and a kernel
that reads pinned memory, by number of bytes. Parts:

- decode: time of a step, and the experts that were found and brought in that step, counted on the
  GPU. `bound_us` is the resident stack's time on the same steps, what the link's kernel takes for
  the bytes that each layer brought, and 5 us a layer;
- misses: calls that miss a given number of experts, beside calls that find all;
- host: what a profiler sees on the host while a step is replayed;
- prompt: 4096 tokens, beside the longer of their time in the resident stack and of the copy engine
  with all experts;
- peers: transformers with accelerate's offload, FreeToken's cache, where they are installed;
- overhead: calls that find all, in a bank of all experts but one, beside the resident stack.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import links
import report
import residency_peers
import torch
from harness import relative_error
from records import OURS, add_options
from residency_stack import MODELS, STEPS_AT_ONCE, Model, Stack, Stacks, Steps
from routing_traces import Trace
from torch import Tensor

from moe_ops.meta.scales import TRITON_E2M1

PARTS = ("decode", "misses", "host", "prompt", "peers", "overhead")
SHARES = (0.1, 0.25, 0.4, 0.6, 1.0)
SHARE = 0.4  # of the parts that have one
PROMPT = 4096
LAYER_US = 5  # that the bound allows a layer
# the share of the copy engine's rate that misses of so many bytes a call are to reach
AIMED_BYTES, AIMED_RATE = 8 << 20, 0.85
STEPS = {1: (96, 160), 8: (32, 64), 64: (12, 32)}  # by batch: to fill the bank, and timed, at most


class Bench:
    """One model's measurements."""

    def __init__(
        self, model: Model, device: torch.device, link: links.Link | None, given: Any
    ) -> None:
        self.model, self.shape, self.link, self.given = model, model.layer, link, given
        self.device, self.experts = device, model.layer.num_experts
        self.stacks = Stacks(model, device)
        self._traces: dict[tuple, Tensor] = {}
        self._resident_us: dict[tuple, float] = {}

    # --- traces ----------------------------------------------------------------------------------

    def trace(self, kind: str, batch: int, num_experts: int = 0) -> tuple[Tensor, Tensor]:
        """A trace's steps before those that are timed, and those."""
        count = num_experts or self.experts
        untimed, timed = (4, 6) if self.given.dry_run else STEPS[batch]
        if (kind, batch, count) not in self._traces:
            of = Trace(kind, count, self.shape.top_k, self.model.layers, batch)
            ids = torch.from_numpy(of.draw(untimed + timed)).to(self.device)
            self._traces[kind, batch, count] = ids
        ids = self._traces[kind, batch, count]
        return ids[:untimed], ids[untimed:]

    def resident_us(self, timed: Tensor, steps: int, key: tuple) -> float:
        """The resident stack's time of the first steps of a trace."""
        if (*key, steps) not in self._resident_us:
            stack = self.stacks.whole(timed.shape[2])
            stack.run(timed[:steps], self.given.seconds / 4)  # the clocks are up then
            self._resident_us[*key, steps] = stack.run(timed[:steps], 1e9).mean_us
        return self._resident_us[*key, steps]

    # --- parts -----------------------------------------------------------------------------------

    def rows(self) -> Iterator[dict]:
        """All that is asked for, what most depends on first."""
        parts = self.given.parts
        for share in sorted(self.given.shares, key=lambda share: share != SHARE):
            self.stacks.hold(max(round(share * self.experts), self.shape.top_k))
            if "decode" in parts:
                yield from self.decode(share)
            if share == SHARE:
                for name in PARTS[1:-1]:
                    if name in parts:
                        yield from getattr(self, name)(share)
        if "overhead" in parts:
            yield from self.overhead()

    def decode(self, share: float) -> Iterator[dict]:
        for batch in self.given.batch:
            kinds = ["local"]
            if batch == 1 and share < 1 and not self.given.quick:
                kinds += ["uniform", "switches"]
            for kind in kinds:
                yield self.row("decode", batch, kind, share) | self.decode_cell(batch, kind)

    def decode_cell(self, batch: int, kind: str) -> dict:
        untimed, timed = self.trace(kind, batch)
        stack = self.stacks.slotted(batch)
        stack.run(untimed, self.given.seconds)
        found = stack.run(timed, self.given.seconds)
        steps = len(found.us)
        bits = self.stacks.same_bits(stack, timed[steps - 1])
        resident = self.resident_us(timed, steps, (kind, batch))
        return self.beside_bound(found, resident) | {"same_bits": bits}

    def beside_bound(self, found: Steps, resident_us: float) -> dict:
        """Fields of a row: what was counted, and the bound that follows from it."""
        hits, misses = found.counts.sum((0, 1)).tolist()
        steps = len(found.us)
        size = self.stacks.expert_bytes if misses else 0
        brought = [n * size for n in found.counts[:, :, 1].ravel().tolist()]
        link_us = sum(self.link_us(n) for n in brought) / steps
        of_slots = LAYER_US * self.model.layers if self.stacks.slots < self.experts else 0
        bound = resident_us + link_us + of_slots
        return {
            "steps": steps,
            "us": round(found.mean_us, 2),
            "median_us": round(statistics.median(found.us), 2),
            "hits": round(hits / steps, 3),
            "misses": round(misses / steps, 3),
            "hit_rate": round(hits / (hits + misses), 4) if hits + misses else 1.0,
            "bytes": round(sum(brought) / steps),
            "resident_us": round(resident_us, 2),
            "link_us": round(link_us, 2),
            "bound_us": round(bound, 2),
            "ratio": round(found.mean_us / bound, 3),
            "of_resident": round(resident_us / found.mean_us, 4),
        }

    def link_us(self, num_bytes: float) -> float:
        return self.link.kernel_us(num_bytes) if self.link else 0.0

    @property
    def copy_gb_s(self) -> float:
        return self.link.copy_gb_s if self.link else math.inf

    def misses(self, share: float) -> Iterator[dict]:
        """Calls of one token of which a number of experts are those that were used longest ago."""
        top_k, layers = self.shape.top_k, self.model.layers
        stack, all_found_us = self.stacks.slotted(1), 0.0
        for count in sorted({0, 1, 2, 4, top_k} & set(range(top_k + 1))):
            # the others of a step are always the same, and these take turns, of which there are
            # more than slots
            always, turns = top_k - count, self.experts - (top_k - count)
            length = max(32, 2 * self.stacks.slots // max(count, 1) + 8)
            steps = torch.arange(length)[:, None]
            coming = always + (steps * count + torch.arange(count)) % turns
            ids = torch.cat([torch.arange(always).expand(length, -1), coming], 1)
            trace = ids[:, None, None].expand(-1, layers, -1, -1).to(self.device, torch.int32)
            stack.run(trace[: length // 2], 1e9)
            found = stack.run(trace[length // 2 :], self.given.seconds)
            size, copy = self.stacks.expert_bytes * count, self.copy_gb_s
            if count == 0:
                all_found_us = found.mean_us
            extra = (found.mean_us - all_found_us) / layers
            aim = 25 + size / 50e3 if size < AIMED_BYTES else size / copy / AIMED_RATE / 1e3
            yield self.row("misses", 1, f"{count} missing", share) | {
                "us": round(found.mean_us, 2),
                "misses": round(float(found.counts[:, :, 1].sum()) / len(found.us), 3),
                "call_us": round(extra, 2),  # of a layer's misses
                "bytes": size,
                "gb_s": round(size / extra / 1e3, 2) if size and extra > 0 else None,
                "copy_gb_s": round(copy, 2),
                "aim_us": round(aim, 2) if size else 0.0,
            }

    def overhead(self) -> Iterator[dict]:
        slots = self.experts - 1
        self.stacks.hold(slots)
        for batch in self.given.batch:
            untimed, timed = self.trace("uniform", batch, slots)
            stack = self.stacks.slotted(batch)
            everything = torch.arange(slots, device=self.device, dtype=torch.int32)
            for part in everything.split(self.shape.top_k):  # brings all
                ids = part.repeat(-(-self.shape.top_k // len(part)))[: self.shape.top_k]
                stack.step(ids.expand_as(stack.ids))
            stack.run(untimed, self.given.seconds / 2)
            found = stack.run(timed, self.given.seconds)
            resident = self.resident_us(timed, len(found.us), ("hits", batch))
            row = self.beside_bound(found, resident)
            extra = (found.mean_us - resident) / self.model.layers
            row |= self.row("overhead", batch, "all found", slots / self.experts)
            row["extra_us"] = round(extra, 2)  # of a layer
            yield row | {"over_resident": round(found.mean_us / resident, 4)}

    def prompt(self, share: float) -> Iterator[dict]:
        tokens = 64 if self.given.dry_run else PROMPT
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(3, self.model.layers, tokens, self.experts, generator=generator)
        trace = noise.topk(self.shape.top_k).indices.to(self.device, torch.int32)
        slotted, whole = self.stacks.slotted(tokens), self.stacks.whole(tokens)
        for stack in (slotted, whole):
            stack.run(trace[:1], 1e9)
        us, resident = (stack.run(trace, 1e9).mean_us for stack in (slotted, whole))
        size = self.stacks.expert_bytes * self.experts * self.model.layers
        link_us = size / self.copy_gb_s / 1e3
        yield self.row("prompt", tokens, "uniform", share) | {
            "us": round(us, 1),
            "resident_us": round(resident, 1),
            "link_us": round(link_us, 1),
            "bytes": size,
            "ratio": round(us / max(resident, link_us), 3),
            "same_bits": self.stacks.same_bits(slotted, trace[-1]),
        }
        self.stacks.drop(tokens, "slotted", "whole")

    def host(self, share: float) -> Iterator[dict]:
        """Names of what the host calls, and of copies to it, while steps are replayed."""
        untimed, timed = self.trace("local", 1)
        stack = self.stacks.slotted(1)
        stack.run(untimed, self.given.seconds)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            for ids in timed[:STEPS_AT_ONCE]:
                stack.step(ids)
        names: dict[str, int] = {}
        for event in profile.events():
            if event.name.startswith(("cuda", "Memcpy", "Memset")):
                names[event.name] = names.get(event.name, 0) + 1
        reads = [n for n in names if "DtoH" in n or "Synchronize" in n or "LaunchHostFunc" in n]
        kernels = sum(1 for e in profile.events() if "moe_ops" in e.name)
        yield self.row("host", 1, "local", share) | {
            "steps": min(STEPS_AT_ONCE, len(timed)),
            "seen": names,
            "kernels": kernels,
            # what the profiler itself waits for at its end is one
            "reads": sum(names[n] for n in reads if n != "cudaDeviceSynchronize"),
        }

    def peers(self, share: float) -> Iterator[dict]:
        """On the rows that the banks have in host memory; of plain weights and silu alone."""
        if self.model.scheme or self.shape.bias:
            return
        plain = [(one.rows["w13"], one.rows["w2"]) for one in self.stacks.residents]
        for name, make in residency_peers.PEERS.items():
            row = self.row("decode", 0, "local", share) | {"implementation": name}
            try:
                peer = make(plain, self.shape, self.stacks.slots, self.device)
                for batch in self.given.batch:
                    yield row | {"num_tokens": batch} | self.peer_cell(peer, batch)
            except Exception as error:  # of others, in whatever way
                text = " ".join(str(error).split())[:300]
                yield row | {"reason": f"{type(error).__name__}: {text}"}

    def peer_cell(self, peer: residency_peers.Peer, batch: int) -> dict:
        layers = len(peer.layers)
        args = (peer.layers, peer.counters, self.shape, batch, self.device, peer.captured)
        stack, whole = Stack(*args), self.stacks.whole(batch)
        untimed, timed = self.trace("local", batch)
        most = (None, None) if peer.captured else (1, 3)
        stack.run(untimed[: most[0], :layers], self.given.seconds)
        found = stack.run(timed[: most[1], :layers], self.given.seconds)
        stack.step(timed[0, :layers])
        whole.step(timed[0])
        pairs = zip(stack.outputs, whole.outputs, strict=False)
        hits, misses = (found.counts.sum((0, 1)) / len(found.us)).tolist()
        return {
            "steps": len(found.us),
            "us": round(found.mean_us * self.model.layers / layers, 1),  # of as many as ours
            "hits": round(hits, 3),
            "misses": round(misses, 3),
            "error": float(f"{max(relative_error(*pair) for pair in pairs):.3g}"),
        }

    def row(self, part: str, batch: int, trace: str, share: float) -> dict:
        """The fields that say what a row is about."""
        return {
            "part": part,
            "shape": self.model.shape,
            "scheme": self.model.scheme,
            "num_tokens": batch,
            "trace": trace,
            "share": round(share, 4),
            "implementation": OURS,
            "layers": self.model.layers,
            "slots": self.stacks.slots,
        }


def compile_kernels(given: argparse.Namespace) -> None:
    """Compile the kernels of all stacks at once."""
    from tools.compile_kernels import Call, compile_here

    calls = []
    for name in given.stacks:
        model, shape = MODELS[name], MODELS[name].layer
        sizes = (shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size)
        of = {"scheme": model.scheme, "activation": shape.activation, "bias": shape.bias}
        if model.scheme.startswith("mxfp4"):
            of["layout"] = TRITON_E2M1
        tokens = [*given.batch, *([PROMPT] if "prompt" in given.parts else [])]
        for M in tokens:
            calls += [Call(sizes, M, expert_map=mapped, **of) for mapped in (False, True)]
    compile_here(calls)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    stacks = [name for name in MODELS if name != "tiny"]
    parser.add_argument("--stacks", nargs="+", choices=stacks, default=stacks)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--batch", nargs="+", type=int, choices=STEPS, default=list(STEPS))
    parser.add_argument("--seconds", type=float, default=0.4, help="of a cell, at most")
    parser.add_argument("--limit", type=float, default=290, help="seconds of the whole run")
    parser.add_argument("--quick", action="store_true", help="two stacks and few cells")
    add_options(parser)
    given = parser.parse_args(argv)
    if given.quick:
        quick = {"stacks": ["qwen3 bf16", "qwen3 int4"], "shares": [SHARE, 1.0], "batch": [1, 64]}
        parts = [part for part in given.parts if part != "peers"]
        vars(given).update(quick, parts=parts, seconds=0.25, limit=55)
    if given.dry_run:
        vars(given).update(stacks=["tiny"], seconds=0.05, limit=60)
    return given


def main() -> None:
    given = parse()
    start = time.perf_counter()
    torch.set_grad_enabled(False)
    if given.merge or given.report:
        return report.merge_and_report(given.merge, given.results, "residency")
    cuda = torch.cuda.is_available() and not given.dry_run
    device = torch.device("cuda" if cuda else "cpu")
    if given.dry_run:
        given.results = Path(tempfile.mkdtemp(prefix="residency_dry_run_"))
    elif not cuda:
        raise SystemExit("residency.py needs a GPU; --dry-run does not")
    gpu = torch.cuda.get_device_name().replace(" ", "_") if cuda else "cpu"
    results = report.open_results(given.results / f"residency_{gpu}.json")
    run = results.begin(sys.argv, not cuda)
    print(results.runs[run], flush=True)
    link = None
    if cuda:
        link = links.measure()  # which the bounds are made of
        links.show(link)
        row = dict.fromkeys(("shape", "scheme", "trace", "implementation"), "")
        row |= {"part": "link", "num_tokens": 0, "share": 0, "run": run}
        results.add(row | {"calls": [call._asdict() for call in link.calls]})
        results.write()
        compile_kernels(given)
        print(f"kernels were compiled after {time.perf_counter() - start:.0f} s", flush=True)
    for name in given.stacks:
        bench = Bench(MODELS[name], device, link, given)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        for row in bench.rows():
            results.add(row | {"run": run})
            results.write()  # a run that is cut short keeps what it has
            print({key: value for key, value in row.items() if key != "layers"}, flush=True)
            if time.perf_counter() - start > given.limit:
                print(f"cut short after {given.limit} s: name what is missing alone")
                break
        del bench
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        if time.perf_counter() - start > given.limit:
            break
    report.report(results.path)
    print(f"{results.path}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
