"""What each process of a group does: every case, one after another, against a single process.

Dimensions: M tokens of all ranks, H hidden size, I intermediate size, E experts.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import moe_ops
import moe_ops.tensors
from moe_ops import backends
from moe_ops.meta import symmetric
from moe_ops.nn.rebalance import rebalance
from moe_ops.parallel import wire
from moe_ops.parallel.columns import shard_w2, shard_w13
from moe_ops.parallel.dispatch import DISPATCHERS
from moe_ops.parallel.dispatchers import AllGatherReduceScatter, AllReduce, AllToAll
from moe_ops.parallel.placement import PLACEMENTS, Placement, shard_experts
from moe_ops.parallel.symmetric_memory import SymmetricMemory
from moe_ops.planning import machine as machines
from tests.support import oracle

E, H, I, TOP_K = 6, 128, 128, 2
MOST = 8  # tokens of a rank
SCHEMES = ("", "fp8_block", "int4_w4a16", "mxfp4_w4a16")
ROUTINGS = ("even", "one rank without tokens", "one expert", "ids out of range")
# Each rank rounds its share to bf16 once, and the sum once more: 2 ** -9 each, at most. Besides, a
# CPU rounds gate and up where experts have many rows, and h.
BF16, FP32 = 2**-7, 1e-6
KINDS = tuple(DISPATCHERS.values())
# scheme -> bytes of a row of H columns and its scales that travel
QUANTIZED_ROWS = {
    "fp8_block": H + 4,
    "fp8_channel": H + 4,
    "fp8_tensor": 2 * H,  # whose one scale is that of the rows at the experts
    "fp8_tensor_static": H,
    "int8_w8a8": H + 4,
    "mxfp8": H + H // 32,
    "mxfp4": H // 2 + H // 32,
    "mxfp6_e3m2": H * 3 // 4 + H // 32,
    "mxfp4_w4a8": H + 4,
    "nvfp4": H // 2 + H // 16,
    "int4_w4a16": 2 * H,
}
WIRE_SCHEMES = tuple(QUANTIZED_ROWS)
COMPILED_SIZE = 2  # of a group that compiles: what takes the most time does not depend on it
# what a quick run has instead: shares of two ranks are uneven, too
QUICK = {
    "E": 5,
    "COMPILED_SIZE": 0,
    "SCHEMES": ("", "fp8_block"),
    "WIRE_SCHEMES": ("fp8_block", "fp8_tensor_static", "mxfp4", "int4_w4a16"),
}
# NVLink multicast can take the GPUs of a host out of service
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


@dataclass
class Tokens:
    """Tokens of all ranks, equal on each of them; `mine` are those of `rank`."""

    x: Tensor  # (M, H)
    ids: Tensor  # (M, TOP_K)
    weights: Tensor  # (M, TOP_K)
    counts: list[int]  # of each rank
    rank: int

    @property
    def mine(self) -> slice:
        start = sum(self.counts[: self.rank])
        return slice(start, start + self.counts[self.rank])

    def local(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[self.mine], self.ids[self.mine], self.weights[self.mine]


def tokens(routing: str, rank: int, size: int, dtype: torch.dtype) -> Tokens:
    counts = [MOST] * size
    if routing == "one rank without tokens":
        counts = [0, *[MOST - r for r in range(size - 1)]]
    M = sum(counts)
    ids = torch.stack([torch.randperm(E)[:TOP_K] for _ in range(M)])
    if routing == "one expert":
        ids[:] = E - 1
    x = torch.randn(M, H).to(dtype)
    if routing == "ids out of range":
        outside = torch.tensor([-1, E, 2**32 + 1, -(2**40)])
        ids[::2, 0] = outside[torch.arange(len(ids[::2])) % 4]
        ids[1::4] = -1
        x[1::4] = torch.nan  # nobody asks for these rows
    return Tokens(x, ids, torch.rand(M, TOP_K) + 0.1, counts, rank)


def experts_weights(dtype: torch.dtype, width: int = I) -> tuple[Tensor, Tensor]:
    """Weights that keep rows at unit scale."""
    w13 = torch.randn(E, 2 * width, H) / H**0.5
    return w13.to(dtype), (torch.randn(E, H, width) / width**0.5).to(dtype)


def difference(got: Tensor, want: Tensor) -> float:
    """Norm of the difference, relative to that of what is wanted; infinite if one is NaN."""
    if got.shape != want.shape or not got.isfinite().all():
        return float("inf")
    got, want = got.detach().double(), want.detach().double()
    error, norm = (got - want).norm(), want.norm()
    return float(error / norm) if norm else float(error)


class Spread:
    """This rank's experts, called as one would call all of them."""

    def __init__(
        self,
        w13: Tensor,
        w2: Tensor,
        rank: int,
        size: int,
        strategy: str,
        kind: type = AllGatherReduceScatter,
        **options: object,
    ) -> None:
        placement = Placement(E, size, strategy)
        self.w13, self.w2 = (shard_experts(w, placement, rank) for w in (w13, w2))
        self.experts = list(placement.experts_of(rank))
        self.expert_map = placement.expert_map(rank).to(w13.device)
        self.dispatcher = kind(dist.group.WORLD.group_name, size, MOST, **options)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        M = x.shape[0]
        return self.dispatcher.combine(self.experts_of(x, ids, weights), M)

    def by_exchange(self, x: Tensor, ids: Tensor, weights: Tensor, **options: str) -> Tensor:
        """The same, where the experts' operator adds up outputs."""
        options["exchange"] = self.dispatcher.exchange
        return self.experts_of(x, ids, weights, **options)[: x.shape[0]]

    def behind_routing(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        backend: str = "auto",
        quantized: bool = False,
    ) -> Tensor:
        """The same, where the experts' operator sends rows, too, quantized or not."""
        exchange = self.dispatcher.exchange_quantized if quantized else self.dispatcher.exchange
        M, options = x.shape[0], {"exchange": exchange, "backend": backend}
        ids, weights = self.dispatcher.dispatch_routing(ids, weights)
        return moe_ops.fused_experts(
            x, self.w13, self.w2, weights, ids, expert_map=self.expert_map, **options
        )[:M]

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor, **options: str) -> Tensor:
        x, ids, weights = self.dispatcher.dispatch(x, ids, weights)
        return moe_ops.fused_experts(
            x, self.w13, self.w2, weights, ids, expert_map=self.expert_map, **options
        )


def forwards(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """(what was compared, its error, the largest that is allowed)."""
    for scheme in SCHEMES:
        w13, w2 = experts_weights(torch.bfloat16)
        if scheme:
            w13, w2 = moe_ops.quantize(w13, scheme), moe_ops.quantize(w2, scheme)
        for number, routing in enumerate(ROUTINGS):
            strategy = ("linear", "round_robin")[number % 2]
            t = tokens(routing, rank, size, torch.bfloat16)
            want = moe_ops.fused_experts(t.x, w13, w2, t.weights, t.ids)
            unasked = ((t.ids < 0) | (t.ids >= E)).all(1)[t.mine]
            for kind in KINDS:
                spread = Spread(w13, w2, rank, size, strategy, kind)
                got = spread(*t.local())
                name = f"{scheme or 'bf16'}, {routing}, {kind.name}"
                yield name, difference(got, want[t.mine]), BF16
                if not scheme:
                    exact = oracle.experts(t.x.nan_to_num(), w13, w2, t.weights, t.ids)
                    yield f"{name}, fp64", difference(got, exact[t.mine]), 2 * BF16
                yield f"{name}, again", difference(spread(*t.local()), got), 0.0
                yield f"{name}, rows of no expert", float(got[unasked].abs().sum()), 0.0
                if kind is SymmetricMemory:
                    yield f"{name}, exchange", difference(spread.by_exchange(*t.local()), got), 0.0
                    own = spread.behind_routing(*t.local())
                    yield f"{name}, rows behind their routing", difference(own, got), 0.0
                    if wire.quantizes_later(scheme, H):
                        own = spread.behind_routing(*t.local(), quantized=True)
                        # a CPU's kernels multiply tokens that are not quantized
                        most = 0.0 if own.is_cuda else BF16
                        yield f"{name}, quantized on their way", difference(own, got), most
            if not scheme:
                for dtype in (torch.bfloat16, torch.float32):
                    spread = Spread(w13, w2, rank, size, strategy, reduce_dtype=dtype)
                    error = difference(spread(*t.local()), want[t.mine])
                    yield f"{routing}, added in {dtype}", error, 2 * BF16
        t = tokens("even", rank, size, torch.bfloat16)
        t.x[::3] = torch.nan  # of all tokens, these alone have no numbers
        for kind in KINDS:
            got = Spread(w13, w2, rank, size, "linear", kind)(*t.local())
            mixed = got.isnan().any(1) != t.x[t.mine].isnan().any(1)
            yield f"{scheme or 'bf16'}, NaN rows, {kind.name}", float(mixed.sum()), 0.0


def dispatched(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """Rows of all ranks, each once, and rows of no expert where a rank has fewer than MOST."""
    for kind in KINDS:
        dispatcher = kind(dist.group.WORLD.group_name, size, MOST)
        t = tokens("one rank without tokens", rank, size, torch.bfloat16)
        for name, got, rows, missing in zip(
            ("x", "topk_ids", "topk_weights"),
            dispatcher.dispatch(*t.local()),
            (t.x, t.ids, t.weights),
            (0, -1, 0),
            strict=True,
        ):
            parts = rows.split(t.counts)
            want = [
                torch.nn.functional.pad(part, (0, 0, 0, MOST - len(part)), value=missing)
                for part in parts
            ]
            yield f"dispatched {name}, {kind.name}", difference(got, torch.cat(want)), 0.0


def sums(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """Outputs are added in fp32 and rounded once; all_to_all adds in the order of ranks, to the
    bit.
    """
    group, part = dist.group.WORLD.group_name, slice(rank * MOST, (rank + 1) * MOST - 1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        outs = torch.randn(size, size * MOST, H).to(dtype)  # of each rank
        outs[:, :, 0] *= torch.tensor([1, 2**-8, -1, 2**-9])[:size, None]  # which order, tells
        want = outs[0].float()
        for share in outs[1:]:
            want = want + share.float()
        want = want.to(dtype)
        # a second rounding to bf16 would be 2**-9 of half of all numbers, to fp16 2**-12
        allowed = {torch.bfloat16: 2**-12, torch.float16: 2**-15, torch.float32: FP32}[dtype]
        got = AllToAll(group, size, MOST).combine(outs[rank], MOST - 1)
        yield f"sum of {dtype}", difference(got, want[part]), 0.0
        got = AllGatherReduceScatter(group, size, MOST).combine(outs[rank], MOST - 1)
        yield f"sum of {dtype} by a reduce-scatter", difference(got, want[part]), allowed
        got = AllReduce(group, size, size * MOST).combine(outs[rank], size * MOST)
        yield f"sum of {dtype} by an all-reduce", difference(got, want), allowed


def gradients(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """Of x, the router weights and the weights of this rank's experts."""
    for dtype, allowed in ((torch.float32, 4 * FP32), (torch.bfloat16, 2 * BF16)):
        w13, w2 = (w.requires_grad_() for w in experts_weights(dtype))
        for routing in ROUTINGS[:3]:
            t = tokens(routing, rank, size, dtype)
            upstream = torch.randn(t.x.shape).to(dtype)
            x, weights = t.x.clone().requires_grad_(), t.weights.clone().requires_grad_()
            out = moe_ops.fused_experts(x, w13, w2, weights, t.ids)
            want = torch.autograd.grad(out, (x, weights, w13, w2), upstream)
            for kind in KINDS:
                spread = Spread(w13.detach(), w2.detach(), rank, size, "linear", kind)
                local = spread.w13.requires_grad_(), spread.w2.requires_grad_()
                x, weights = (s[t.mine].clone().requires_grad_() for s in (t.x, t.weights))
                out = spread(x, t.ids[t.mine], weights)
                got = torch.autograd.grad(out, (x, weights, *local), upstream[t.mine])
                for name, part, one, all_ in zip(
                    ("x", "topk_weights", "w13", "w2"),
                    (t.mine, t.mine, spread.experts, spread.experts),
                    got,
                    want,
                    strict=True,
                ):
                    error = difference(one, all_[part])
                    yield f"gradient of {name}, {dtype}, {routing}, {kind.name}", error, allowed


def second_gradients(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """Gradients of gradients, of x through the tokens of all ranks."""
    t = tokens("even", rank, size, torch.float32)
    w13, w2 = experts_weights(torch.float32)
    upstream, direction = torch.randn_like(t.x), torch.randn_like(t.x)

    def second(call: Callable, part: slice) -> Tensor:
        x = t.x[part].clone().requires_grad_()
        out = call(x, t.ids[part], t.weights[part])
        (first,) = torch.autograd.grad(out, x, upstream[part], create_graph=True)
        return torch.autograd.grad(first, x, direction[part])[0]

    want = second(lambda x, ids, w: moe_ops.fused_experts(x, w13, w2, w, ids), slice(None))
    for kind in KINDS:
        got = second(Spread(w13, w2, rank, size, "linear", kind), t.mine)
        name = f"gradient of the gradient of x, {kind.name}"
        yield name, difference(got, want[t.mine]), 4 * FP32


def compiled(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """One graph for all numbers of tokens but 0, forward and backward, with the bits of eager."""
    for kind in KINDS:
        graphs = []

        def count(graph: torch.fx.GraphModule, inputs: list, graphs: list = graphs) -> Callable:
            compiled = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
            graphs.append(graph)  # not before: torch may begin a graph anew here
            return compiled

        torch._dynamo.reset()
        spread = Spread(*experts_weights(torch.float32), rank, size, "linear", kind)
        call = torch.compile(spread.__call__, fullgraph=True, backend=count, dynamic=True)
        for routing in ROUTINGS[:3]:
            t = tokens(routing, rank, size, torch.float32)
            # of their own memory: torch makes graphs for offsets into others, too
            x, ids, weights = (part.clone() for part in t.local())
            wanted, got = (f(x.requires_grad_(), ids, weights) for f in (spread, call))
            yield f"compiled, {routing}, {kind.name}", difference(got, wanted), 0.0
            (want,) = torch.autograd.grad(wanted.sum(), x)
            (gradient,) = torch.autograd.grad(got.sum(), x)
            error = difference(gradient, want)
            # torch adds up rows by atomics on a GPU
            yield f"compiled, gradient, {routing}, {kind.name}", error, FP32 * x.is_cuda
        config = layer_config(torch.float32, kind)
        layer = spread_layer(config, rank, size, "linear").eval()
        call = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x = torch.randn(size * MOST, H)[rank::size]
        with torch.no_grad():
            yield f"compiled layer, {kind.name}", difference(call(x), layer(x)), 0.0
            if kind is SymmetricMemory:
                want = layer(x)
                with mock.patch.object(symmetric, "MANY_TOKENS", 1):
                    yield "rows behind their routing, compiled", difference(call(x), want), 0.0
        yield f"compiled, graphs, {kind.name}", float(len(graphs)), 2.0 if rank == 0 else 1.0


def captured(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """A decode step in a CUDA graph, replayed with new tokens and so with other experts, and the
    layer through Inductor, against one process. M differs from rank to rank, where tokens do.
    """
    for kind in (*KINDS, AllReduce):
        shared = kind is AllReduce
        config = layer_config(torch.bfloat16, AllToAll if shared else kind)
        whole = moe_ops.MoELayer.from_config(config).eval()
        layer = spread_layer(config, rank, size, "round_robin", shared).eval()
        assert type(layer.dispatcher) is kind
        load_shares(layer, whole, rank, size, "round_robin")
        rows = slice(5) if shared else slice(rank * 3, rank * 3 + min(3 + 2 * rank, MOST))
        steps = torch.randn(4, size * MOST, H).to(torch.bfloat16)
        x = steps[0, rows].clone()
        with torch.no_grad():
            compiled = torch.compile(layer, fullgraph=True)
            for step in steps:
                got, want = compiled(step[rows].clone()), whole(step)[rows]
                yield f"Inductor, {kind.name}", difference(got, want), 2 * BF16
            for _ in range(3):
                layer(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = layer(x)
            for number, step in enumerate(steps):
                x.copy_(step[rows])
                out.fill_(torch.nan)
                graph.replay()
                first = out.clone()
                name = f"CUDA graph, step {number}, {kind.name}"
                yield name, difference(first, whole(step)[rows]), 2 * BF16
                yield f"{name}, eager", difference(layer(x), first), 0.0
                out.fill_(torch.nan)
                graph.replay()
                yield f"{name}, again", difference(out, first), 0.0
            route = whole.gate.route
            first, *others = [route(step[rows], TOP_K, whole.routing_method)[2] for step in steps]
            same = [torch.equal(first, other) for other in others]
            yield f"steps with the experts of the first, {kind.name}", float(sum(same)), 0.0


def pushed(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """Rows that one kernel sends and copies to their experts, quantized or not, against those that
    a dispatcher sends, by the backends that do so and run here.
    """
    for backend in ("deep_gemm", "cutlass"):
        known = backends.named(backend)
        machine = machines.machine(torch.device("cuda", torch.cuda.current_device()))
        library = known.library
        if library.available() or library.unbuilt(machine):
            continue
        for scheme in ("", "fp8_block"):
            w13, w2 = experts_weights(torch.bfloat16)
            if scheme:
                w13, w2 = moe_ops.quantize(w13, scheme), moe_ops.quantize(w2, scheme)
            for routing in ROUTINGS:
                t = tokens(routing, rank, size, torch.bfloat16)
                spread = Spread(w13, w2, rank, size, "linear", SymmetricMemory)
                want = spread.by_exchange(*t.local(), backend=backend)
                for step in range(4):
                    quantized = step % 2 == 1 and wire.quantizes_later(scheme, H)
                    got = spread.behind_routing(*t.local(), backend, quantized)
                    name = f"{backend}, pushed rows, {scheme or 'bf16'}, {routing}, {step}"
                    yield name, difference(got, want), 0.0


def layer_config(dtype: torch.dtype, kind: type, **options: object) -> moe_ops.MoEConfig:
    parallel = moe_ops.ParallelConfig(all2all_backend=kind.name)
    return moe_ops.MoEConfig(
        E, TOP_K, H, I, in_dtype=dtype, max_num_tokens=MOST, parallel=parallel, **options
    )


def spread_layer(
    config: moe_ops.MoEConfig,
    rank: int,
    size: int,
    strategy: str,
    shared: bool = False,
    **options: object,
) -> moe_ops.MoELayer:
    """This rank's layer of whole experts; `shared`: all ranks have the same tokens."""
    kind = "tp" if shared else "dp"
    parallel = moe_ops.ParallelConfig.make(
        **{f"{kind}_size": size, f"{kind}_rank": rank},
        enable_expert_parallel=True,
        expert_placement=strategy,
        all2all_backend=config.parallel.all2all_backend,
    )
    config = replace(config, parallel=parallel, num_local_experts=None)
    with forked_rng():
        return moe_ops.MoELayer.from_config(config, **{"group": dist.group.WORLD} | options)


def forked_rng() -> AbstractContextManager:
    """For layers: ranks that hold more experts draw more numbers."""
    return torch.random.fork_rng(
        [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    )


def load_shares(
    layer: moe_ops.MoELayer, whole: moe_ops.MoELayer, rank: int, size: int, strategy: str
) -> None:
    """Give a rank's layer its experts of a whole one, and all else."""
    state = whole.state_dict()
    for name in state:
        if name.startswith("experts."):
            state[name] = shard_experts(state[name], Placement(E, size, strategy), rank)
    layer.load_state_dict(state)


def layers(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """A MoELayer that is spread over the ranks, against one that holds everything."""
    options = {"shared_expert_intermediate_size": 32, "shared_expert_gate": True}
    config = layer_config(torch.float32, AllGatherReduceScatter, has_bias=True)
    whole = moe_ops.MoELayer.from_config(config, **options).train()
    with torch.no_grad():
        for bias in (whole.experts.w13_bias, whole.experts.down_proj_bias):
            bias.normal_()
    for strategy, routing, kind in zip(PLACEMENTS, ROUTINGS, KINDS, strict=False):
        placement = Placement(E, size, strategy)
        config = replace(config, parallel=moe_ops.ParallelConfig(all2all_backend=kind.name))
        layer = spread_layer(config, rank, size, strategy, **options).train()
        load_shares(layer, whole, rank, size, strategy)
        copied = copy.deepcopy(layer)
        t = tokens(routing, rank, size, torch.float32)
        whole.zero_grad()
        layer.zero_grad()
        whole.expert_load.zero_()
        layer.expert_load.zero_()
        upstream = torch.randn(t.x.shape)
        want, got = whole(t.x, t.x), layer(t.x[t.mine], t.x[t.mine])
        (want * upstream).sum().backward()
        (got * upstream[t.mine]).sum().backward()
        name = f"layer, {strategy}, {routing}"
        yield name, difference(got, want[t.mine]), FP32
        yield f"{name}, copied", difference(copied(t.x[t.mine], t.x[t.mine]), got), 0.0
        with torch.no_grad():
            copied.dispatcher = replace(copied.dispatcher, max_num_tokens=2 * MOST)
            again = copied(t.x[t.mine], t.x[t.mine])
        yield f"{name}, by a dispatcher of more tokens", difference(again, got), FP32
        load = layer.expert_load.clone()
        dist.all_reduce(load)
        yield f"{name}, expert_load", difference(load, whole.expert_load), 0.0
        mine = dict(layer.named_parameters())
        for key, parameter in whole.named_parameters():
            gradient, local = parameter.grad, mine[key].grad.clone()
            if key.startswith("experts."):
                gradient = shard_experts(gradient, placement, rank)
            else:  # each rank has its own tokens' part
                dist.all_reduce(local)
            yield f"{name}, gradient of {key}", difference(local, gradient), 8 * FP32


def replicated(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """Layers with redundant experts, before and after their experts move to other ranks."""
    moves = 0
    for scheme in SCHEMES:
        for shared in (False, True):
            dtype = torch.bfloat16 if scheme else torch.float32
            allowed = 2 * BF16 if scheme else 2 * FP32
            config = layer_config(dtype, AllToAll, has_bias=True)
            whole = moe_ops.MoELayer.from_config(config).eval()
            with torch.no_grad():
                for bias in (whole.experts.w13_bias, whole.experts.down_proj_bias):
                    bias.normal_()
                whole.gate.weight[E - 1] += 0.2  # all tokens choose it, and none the first
                whole.gate.weight[0] -= 0.2
            layer = replicated_layer(config, rank, size, shared)
            placement = layer.replicas.placement
            if scheme:
                for name in ("gate_up_proj", "down_proj"):
                    weight = moe_ops.quantize(getattr(whole.experts, name).detach(), scheme)
                    mine = shard_experts(weight, placement, rank)
                    for module, part in ((whole, weight), (layer, mine)):
                        setattr(module.experts, name, torch.nn.Parameter(part, False))

            def share(placement: object = placement, whole: moe_ops.MoELayer = whole) -> dict:
                return {
                    name: shard_experts(w, placement, rank) if name.startswith("experts.") else w
                    for name, w in whole.state_dict().items()
                }

            layer.load_state_dict(share())
            t = tokens("one rank without tokens", rank, size, dtype)
            x = t.x.abs() + 0.1 * t.x  # so that the gate's rows above are chosen more and less
            mine = slice(None) if shared else t.mine
            name = f"replicas, {scheme or 'fp32'}, {'the same' if shared else 'own'} tokens"
            with torch.no_grad():
                want = whole(x)
                before = layer(x[mine])
                yield name, difference(before, want[mine]), allowed
                ids = whole.gate.route(x, TOP_K, config.routing_method)[2]
                load = torch.bincount(ids.flatten(), minlength=E)
                layer(x[mine])
                after = rebalance(layer, dist.group.WORLD)
                most = [max(p.rank_loads(load.tolist())) for p in (placement, after)]
                yield f"{name}, the largest load", most[1] / most[0], 1.0
                moves += after != placement
                yield f"{name}, load is counted anew", float(layer.expert_load.sum()), 0.0
                yield f"{name}, moved", difference(layer(x[mine]), want[mine]), allowed
                again = rebalance(layer, dist.group.WORLD)  # by the same load
                yield f"{name}, stays", float(again != after), 0.0
                for key, part in share(after).items():
                    got = layer.state_dict()[key]
                    same = torch.equal(*(getattr(w, "qdata", w) for w in (got, part)))
                    yield f"{name}, {key}", float(not same), 0.0
            if not scheme:
                yield from replicated_gradients(layer, whole, x, mine, name)
    yield "placements that were kept", 2.0 * len(SCHEMES) - moves, len(SCHEMES) - 1.0
    config = layer_config(torch.float32, AllToAll)
    layer = replicated_layer(config, rank, size, False)
    if size == COMPILED_SIZE:
        call = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x = torch.randn(3 + rank, H) + 0.2
        with torch.no_grad():
            yield "replicas, compiled", difference(call(x), layer(x)), 0.0
            rebalance(layer, dist.group.WORLD)
            yield "replicas, compiled, moved", difference(call(x), layer(x)), 0.0
    layer.experts.requires_grad_(True)
    said = refused(lambda: layer(torch.randn(1, H)))
    right = said.startswith("experts must not require gradients in a layer with replicas")
    yield f"what a layer that is trained says: {said}", float(not right), 0.0
    said = refused(lambda: layer.add_lora(2))
    yield f"what it says of adapters: {said}", float("without enable_eplb" not in said), 0.0
    said = refused(lambda: rebalance(moe_ops.MoELayer.from_config(config), dist.group.WORLD))
    yield f"what a whole layer says: {said}", float("must have replicas" not in said), 0.0
    wrong = {"num_local_experts": 5} if rank == size - 1 else {}
    said = refused(lambda: replicated_layer(config, rank, size, False, **wrong))
    right = said.startswith("num_local_experts must be equal on all ranks of the group")
    yield f"what ranks with different slots say: {said}", float(not right), 0.0


def replicated_gradients(
    layer: moe_ops.MoELayer, whole: moe_ops.MoELayer, x: Tensor, mine: slice, name: str
) -> Iterator[tuple[str, float, float]]:
    """Of tokens and router; experts are frozen."""
    ours, theirs = (part.clone().requires_grad_() for part in (x[mine], x))
    upstream = torch.randn(x.shape)
    whole.zero_grad()
    (layer(ours) * upstream[mine]).sum().backward()
    (whole(theirs) * upstream).sum().backward()
    yield f"{name}, gradient of x", difference(ours.grad, theirs.grad[mine]), 8 * FP32
    gradient = layer.gate.weight.grad
    if mine != slice(None):  # of its own tokens
        dist.all_reduce(gradient)
    yield f"{name}, gradient of the gate", difference(gradient, whole.gate.weight.grad), 8 * FP32


def replicated_layer(
    config: moe_ops.MoEConfig, rank: int, size: int, shared: bool, **options: object
) -> moe_ops.MoELayer:
    """Of E + size or more slots: one more on each rank than experts need."""
    kind = "tp" if shared else "dp"
    parallel = moe_ops.ParallelConfig.make(
        **{f"{kind}_size": size, f"{kind}_rank": rank},
        enable_expert_parallel=True,
        enable_eplb=True,
        all2all_backend=config.parallel.all2all_backend,
    )
    slots = options.pop("num_local_experts", -(-E // size) + 1)
    config = replace(
        config, parallel=parallel, num_local_experts=slots, max_num_tokens=size * MOST
    )
    with forked_rng():
        return moe_ops.MoELayer.from_config(config, group=dist.group.WORLD, **options).eval()


class Counting:
    """A dispatcher that keeps how many bytes of a row of tokens travel to the experts."""

    def __init__(self, dispatcher: object) -> None:
        self.inner, self.row_bytes = dispatcher, 0
        self.send_quantized = dispatcher.send_quantized
        self.combine = dispatcher.combine

    def dispatch(self, x: Tensor, *others: Tensor) -> tuple:
        self.row_bytes = x.nbytes // max(len(x), 1)
        return self.inner.dispatch(x, *others)

    def dispatch_quantized(self, q: Tensor, scale: Tensor, *others: Tensor) -> tuple:
        of_row = scale.nbytes // max(len(q), 1) if scale.dim() == 2 else 0
        self.row_bytes = q.nbytes // max(len(q), 1) + of_row
        return self.inner.dispatch_quantized(q, scale, *others)


def quantized_wire(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """Rows that are quantized before they travel have the bits of those quantized after. Outputs
    may differ by the order of a sum: on CPUs other kernels take rows that arrive quantized.
    """
    config = layer_config(torch.bfloat16, AllGatherReduceScatter)
    for scheme in WIRE_SCHEMES:
        expected = QUANTIZED_ROWS[scheme]
        known = torch.tensor(0.02) if scheme in ("fp8_tensor_static", "nvfp4") else None
        w13, w2 = (
            moe_ops.quantize(w, scheme, activation_scale=known)
            for w in experts_weights(torch.bfloat16)
        )
        for kind in KINDS:
            own = replace(config, parallel=moe_ops.ParallelConfig(all2all_backend=kind.name))
            layer = spread_layer(own, rank, size, "linear").eval().requires_grad_(False)
            for name, weight in (("gate_up_proj", w13), ("down_proj", w2)):
                part = shard_experts(weight, Placement(E, size), rank)
                setattr(layer.experts, name, torch.nn.Parameter(part, False))
            seeded = torch.Generator(layer.gate.weight.device).manual_seed(3)
            torch.nn.init.normal_(layer.gate.weight, generator=seeded)
            t = tokens("one rank without tokens", rank, size, torch.bfloat16)
            x = t.x[t.mine]
            found, first = [], layer.dispatcher
            for quantized in (True, False):
                layer.dispatcher = Counting(replace(first, send_quantized=quantized))
                found.append(layer(x))
                want = (expected if quantized else 2 * H) if len(x) else 0
                error = abs(layer.dispatcher.row_bytes - want)
                yield f"bytes of a row, {scheme}, {kind.name}", float(error), 0.0
            yield f"by quantized rows, {scheme}, {kind.name}", difference(*found), BF16
            if expected != 2 * H:
                sent = wire.quantize_rows(x, w13)
                routing = t.ids[t.mine], t.weights[t.mine]
                q, scale, ids, _ = first.dispatch_quantized(sent.q, sent.scale, *routing)
                there = first.dispatch(x, *routing)[0]
                want = moe_ops.quantize_activation(there, scheme, known)
                asked = ids[:, 0] >= 0
                same = torch.equal(*(r.view(torch.uint8)[asked] for r in (q, want.q)))
                if scale.dim() == 2:
                    same &= torch.equal(scale[asked], want.scale[asked])
                yield f"quantized rows, {scheme}, {kind.name}", float(not same), 0.0
            nothing = float(found[1].abs().sum() == 0) if len(x) else 0.0
            yield f"outputs, {scheme}, {kind.name}", nothing, 0.0
            layer.dispatcher = Counting(first)
            x = x.clone().requires_grad_()
            layer(x).sum().backward()  # where gradients are recorded, rows travel as they are
            error = abs(layer.dispatcher.row_bytes - (2 * H if len(x) else 0))
            yield f"bytes of a row with gradients, {scheme}, {kind.name}", float(error), 0.0
            missing = not len(x) or bool(x.grad.abs().sum() > 0)
            yield f"gradient of x, {scheme}, {kind.name}", float(not missing), 0.0
        if scheme == "fp8_block" and size == COMPILED_SIZE:
            layer.dispatcher = first
            call = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
            x = t.x[t.mine].clone()
            yield f"quantized rows, compiled, {scheme}", difference(call(x), layer(x)), 0.0


def invariant(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """Under `batch_invariant` layers have the bits of one process, with and without gradients."""
    experts, top_k = 16, 4
    for scheme in SCHEMES:
        w13, w2 = torch.randn(experts, 2 * I, H) / H**0.5, torch.randn(experts, H, I) / I**0.5
        w13, w2 = w13.bfloat16(), w2.bfloat16()
        if scheme:
            w13, w2 = moe_ops.quantize(w13, scheme), moe_ops.quantize(w2, scheme)
        t = tokens("one rank without tokens", rank, size, torch.bfloat16)
        t.ids = torch.randint(-2, experts + 2, (len(t.x), top_k))
        t.weights = torch.rand(len(t.x), top_k) + 0.1
        want = moe_ops.fused_experts(t.x, w13, w2, t.weights, t.ids, batch_invariant=True)
        for kind in (*KINDS, AllReduce):
            shared = kind is AllReduce
            mine = slice(None) if shared else t.mine
            backend = (AllToAll if shared else kind).name
            config = moe_ops.MoEConfig(
                *(experts, top_k, H, I),
                in_dtype=torch.bfloat16,
                max_num_tokens=size * MOST,
                parallel=moe_ops.ParallelConfig(all2all_backend=backend),
            )
            layer = spread_layer(config, rank, size, "linear", shared, batch_invariant=None).eval()
            for name, weight in (("gate_up_proj", w13), ("down_proj", w2)):
                share = shard_experts(weight, Placement(experts, size), rank)
                setattr(layer.experts, name, torch.nn.Parameter(share, requires_grad=False))
            routed = t.x[mine], t.weights[mine], t.ids[mine]
            layer.gate.route = lambda *_, routed=routed, **__: routed  # products of torch differ
            name = f"batch invariant, {scheme or 'bf16'}, {kind.name}"
            with moe_ops.set_batch_invariant(True):
                got = layer(t.x[mine])
                trained = layer(t.x[mine].clone().requires_grad_())
                yield name, float(not torch.equal(got, want[mine])), 0.0
                yield f"{name}, trained", float(not torch.equal(trained, got)), 0.0
                if size == COMPILED_SIZE and kind is AllToAll and not scheme:
                    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
                    yield f"{name}, compiled", float(not torch.equal(call(t.x[mine]), got)), 0.0
            off = layer(t.x[mine])
            if len(off):  # the bits of a rank's sum that is rounded tell
                same = torch.equal(off, want[mine])
                yield f"{name}, with the mode off", float(same), 0.0


class Columns:
    """This rank's columns of all experts, called as one would call all of them."""

    def __init__(
        self, w13: Tensor, w2: Tensor, rank: int, size: int, kind: type = AllReduce
    ) -> None:
        self.w13, self.w2 = shard_w13(w13, size, rank), shard_w2(w2, size, rank)
        self.dispatcher = kind(dist.group.WORLD.group_name, size, size * MOST)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        M = x.shape[0]
        x, ids, weights = self.dispatcher.dispatch(x, ids, weights)
        out = moe_ops.fused_experts(x, self.w13, self.w2, weights, ids)
        return self.dispatcher.combine(out, M)


def columns(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """Tensor parallelism: where all ranks have the same tokens, and where each has its own."""
    for scheme in SCHEMES:
        w13, w2 = experts_weights(torch.bfloat16, I * size)
        if scheme:
            w13, w2 = moe_ops.quantize(w13, scheme), moe_ops.quantize(w2, scheme)
        for routing in ("even", "one expert", "ids out of range"):
            t = tokens(routing, rank, size, torch.bfloat16)
            want = moe_ops.fused_experts(t.x, w13, w2, t.weights, t.ids)
            got = Columns(w13, w2, rank, size)(t.x, t.ids, t.weights)
            name = f"columns, {scheme or 'bf16'}, {routing}"
            yield f"{name}, the same tokens", difference(got, want), 2 * BF16
            for kind in KINDS:
                got = Columns(w13, w2, rank, size, kind)(*t.local())
                yield f"{name}, {kind.name}", difference(got, want[t.mine]), 2 * BF16
    t = tokens("even", rank, size, torch.float32)
    w13, w2 = (w.requires_grad_() for w in experts_weights(torch.float32, I * size))
    upstream, direction = torch.randn(2, *t.x.shape)
    found = []
    spread = Columns(w13.detach(), w2.detach(), rank, size)
    local = spread.w13.requires_grad_(), spread.w2.requires_grad_()
    for call, own in (
        (lambda x, ids, weights: moe_ops.fused_experts(x, w13, w2, weights, ids), (w13, w2)),
        (spread, local),
    ):
        x, weights = t.x.clone().requires_grad_(), t.weights.clone().requires_grad_()
        out = call(x, t.ids, weights)
        first = torch.autograd.grad(out, (x, weights, *own), upstream, create_graph=True)
        (second,) = torch.autograd.grad(first[0], x, direction)
        found.append((*first, second))
    want = [*found[0]]
    want[2:4] = shard_w13(want[2], size, rank), shard_w2(want[3], size, rank)
    names = ("x", "topk_weights", "w13", "w2", "the gradient of x")
    for name, one, all_ in zip(names, found[1], want, strict=True):
        yield f"columns, gradient of {name}", difference(one, all_), 8 * FP32


def shared_tokens(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """Layers of which all ranks have the same tokens: columns of all experts, or whole experts."""
    config = moe_ops.MoEConfig(
        E, TOP_K, H, I * size, in_dtype=torch.float32, max_num_tokens=size * MOST
    )
    options = {"shared_expert_intermediate_size": 32}
    whole = moe_ops.MoELayer.from_config(config, **options).train()
    x, upstream = torch.randn(2, size * MOST - 1, H)
    for whole_experts in (False, True):
        parallel = moe_ops.ParallelConfig.make(
            tp_size=size, tp_rank=rank, enable_expert_parallel=whole_experts
        )
        own = replace(config, parallel=parallel, num_local_experts=None)
        with forked_rng():
            layer = moe_ops.MoELayer.from_config(own, group=dist.group.WORLD, **options).train()

        def share(name: str, tensor: Tensor, whole_experts: bool = whole_experts) -> Tensor:
            if not name.startswith("experts."):
                return tensor
            if whole_experts:
                return shard_experts(tensor, Placement(E, size), rank)
            return (shard_w13 if "gate_up" in name else shard_w2)(tensor, size, rank)

        layer.load_state_dict({name: share(name, w) for name, w in whole.state_dict().items()})
        whole.zero_grad()
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        got, want = layer(ours), whole(theirs)
        (got * upstream).sum().backward()
        (want * upstream).sum().backward()
        name = f"layer of {'whole experts' if whole_experts else 'columns'}"
        yield name, difference(got, want), 2 * FP32
        yield f"{name}, gradient of x", difference(ours.grad, theirs.grad), 8 * FP32
        mine = dict(layer.named_parameters())
        for key, parameter in whole.named_parameters():
            error = difference(mine[key].grad, share(key, parameter.grad))
            yield f"{name}, gradient of {key}", error, 8 * FP32
        if size == COMPILED_SIZE:
            call = torch.compile(layer.eval(), fullgraph=True, backend="aot_eager")
            with torch.no_grad():
                yield f"{name}, compiled", difference(call(x), layer(x)), 0.0


def disagreements(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """Ranks that were configured differently all say so, and wait for nothing."""
    last = size - 1
    others = ("ranks " if last > 1 else "rank ") + ", ".join(map(str, range(last)))
    config = moe_ops.MoEConfig(E, TOP_K, H, I)
    for name, changed, values in (
        ("max_num_tokens", {"max_num_tokens": 128}, (256, 128)),
        ("experts_per_token", {"experts_per_token": 1}, (2, 1)),
        ("expert_placement", {}, ("'linear'", "'round_robin'")),
        ("residual_scale", {}, ("no value", 2.0)),
    ):
        different = rank == last
        strategy = "round_robin" if different and name == "expert_placement" else "linear"
        options = {"residual_scale": 2.0} if different and name == "residual_scale" else {}
        said = "nothing"
        try:
            spread_layer(
                replace(config, **(changed if different else {})), rank, size, strategy, **options
            )
        except ValueError as error:
            said = str(error)
        right = (
            f"{name} must be equal on all ranks of the group, got {values[0]} on {others} and "
            f"{values[1]} on rank {last}; construct the layer with the same configuration"
        )
        yield f"what a layer says: {said}", float(not said.startswith(right)), 0.0
    try:
        spread_layer(config, rank, size, "linear", expert_map=torch.arange(E))
    except ValueError as error:
        said = str(error)
    right = said.startswith("expert_map must be left out with a group")
    yield f"what a layer says: {said}", float(not right), 0.0


def faults(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """Too many tokens are refused before anything is sent; ranks that stay away or end are missed
    by all others, which say in which layer.
    """
    config = layer_config(torch.float32, AllToAll)
    layer = spread_layer(config, rank, size, "linear", name="model.layers.3.mlp")
    said = refused(lambda: layer(torch.randn(MOST + rank % 2, H)) if rank % 2 else None)
    right = not rank % 2 or said.startswith(f"x must have at most max_num_tokens={MOST} rows, got")
    yield f"what a layer with too many tokens says: {said}", float(not right), 0.0
    x = torch.randn(MOST, H, requires_grad=True)
    out = layer(x)  # of all ranks: those refused above sent nothing that would be taken for this
    dist.barrier()
    last = size - 1
    group = dist.new_group(timeout=timedelta(seconds=1))
    waiting = spread_layer(config, rank, size, "linear", name="model.layers.4.mlp", group=group)
    own = layer_config(torch.float32, SymmetricMemory)
    pushing = spread_layer(own, rank, size, "linear", name="model.layers.5.mlp")
    pushing(x)
    pushing.dispatcher = replace(pushing.dispatcher, timeout=2)
    if rank == last:
        time.sleep(2)
        return  # and end, while the others wait in another layer
    for what, call, name, most in (
        ("without the last rank", lambda: waiting(x), "model.layers.4.mlp", 10.0),
        ("when the last rank ends", lambda: layer(x), "model.layers.3.mlp", 10.0),
        ("in its backward pass after that", out.sum().backward, "model.layers.3.mlp", 10.0),
        ("that pushes, when the last rank ends", lambda: pushing(x), "model.layers.5.mlp", 14.0),
        ("that pushes, after that", lambda: pushing(x), "model.layers.5.mlp", 3.5),  # at once
    ):
        start = time.monotonic()
        said = refused(call)
        right = said.startswith(f"MoELayer {name} could not exchange tokens with the other ranks")
        yield f"what a layer says {what}: {said}", float(not right), 0.0
        yield f"seconds of a layer {what}", time.monotonic() - start, most


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


ALWAYS = (
    *(forwards, dispatched, sums, gradients, second_gradients, layers),
    *(columns, shared_tokens, replicated, quantized_wire, invariant, disagreements),
)
CASES = {COMPILED_SIZE: (*ALWAYS, compiled), 4: (*ALWAYS, faults)}  # by number of ranks
IN_QUICK = (*ALWAYS, faults)
ON_GPUS = (*ALWAYS, compiled, captured, pushed)


def run_all(
    rank: int, size: int, folder: str, seconds: float, gpus: bool = False, quick: bool = False
) -> None:
    """All cases, or with fewer schemes; what each compared goes to a file of this rank."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if gpus else None
    if quick:
        globals().update(QUICK)
    if device is not None:
        global FP32
        FP32 = 1e-3  # products may be of tf32
        os.environ.update(WITHOUT_MULTICAST)
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    dist.init_process_group(
        "nccl" if gpus else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
        device_id=device,
    )
    from tests.parallel.spread import distributed  # which takes its data from here

    compared = []
    cases = IN_QUICK if quick else ON_GPUS if gpus else CASES[size]
    for case in (distributed, *cases):
        torch.manual_seed(7)  # the same data on all ranks
        start, before = time.monotonic(), len(compared)
        compared += list(case(rank, size))
        if rank == 0:  # `pytest -s` shows where the time goes, and what is found on the way
            took, new = time.monotonic() - start, compared[before:]
            wrong = sum(not error <= most for _, error, most in new)
            print(f"{case.__name__}: {len(new)} compared, {wrong} wrong, {took:.1f} s", flush=True)
    Path(folder, f"{rank}.json").write_text(json.dumps(compared))
    if faults in cases:
        os._exit(0)  # as one that is killed: the others find its connections closed
    dist.destroy_process_group()
