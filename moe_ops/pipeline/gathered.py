"""A layer whose products gather the rows of tokens: pairs are sorted into blocks of rows of one
expert, multiplied twice, and summed; rows of batches lie in such blocks already. Imported at first
launch only.

A backend provides the launches of both products (`GatheredProducts`) for a layer or a part of it.
Parts run one after the other: chunks of tokens, also where all rows share one dynamic scale of x
and one of h, or passes over subsets of the experts, which write one y.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.kernels import launch
from moe_ops.kernels.comm.push import sum_ranks
from moe_ops.kernels.configs import LayerConfig, block_bound
from moe_ops.kernels.gemm.operands import Output
from moe_ops.kernels.launch import Gpu, Launch
from moe_ops.kernels.place.routing import (
    NO_ROUTER_WEIGHTS,
    RouterWeights,
    Routing,
    route_pairs,
    router_weights,
    sorted_rows,
)
from moe_ops.kernels.place.sort import Sort, group_blocks, route, sort_into
from moe_ops.kernels.rows.combine import combine
from moe_ops.kernels.rows.e4m3_int8 import Valid, amax, counted
from moe_ops.kernels.rows.scales import Shared, batches_of, flat, rows_of, shared_of
from moe_ops.meta.blocks import num_blocks
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs
from moe_ops.ops.chunks import chunks

# cached: two sym_min cost every call time
num_blocks_of = lru_cache(maxsize=8192)(block_bound)

AnyArgs = ExpertsArgs | BatchedExpertsArgs
# of a layer, or of a chunk of its tokens: `run_in_passes`
Passes = Callable[[ExpertsArgs], Iterable[ExpertsArgs]]


class Placed(NamedTuple):
    """The rows of a call, or of a part of it, and their blocks."""

    routing: Routing
    sort: Sort | None  # how a kernel sorts pairs into blocks; None: none does
    before: list[Launch]  # what writes the blocks of batches
    rows: int  # of x
    rows_of_expert: int  # of one expert if x is batched, else all
    h_rows: int  # of h: one for each pair
    on_input: RouterWeights = NO_ROUTER_WEIGHTS  # that scale the input
    counts: Tensor | None = None  # (E,) rows of each batch

    @property
    def valid(self) -> Valid:
        """The rows of x that an expert here takes, and the router weights that scale them."""
        if self.counts is not None:
            return counted("batched", self.counts)
        return Valid("pairs", self.routing, self.on_input)

    def table(self, gpu: Gpu) -> list[Launch]:
        """Launches that write the table of blocks."""
        return self.before if self.sort is None else [route(self.routing, self.sort, gpu)]


class GatheredProducts(NamedTuple):
    """The launches of the two grouped products of a layer, or of a part of it."""

    first: list[Launch]  # place the rows, move or round them, and multiply them with w13
    second: list[Launch]  # round h, and multiply it with w2
    routing: Routing
    y: Output  # of the second: y (split_k, S, K) in the order of pairs, or `out` of batches
    split_k: int = 1  # programs that share a sum
    summed: Launch | None = None  # in place of the sum of y over a token's rows


def placed(a: AnyArgs, E: int, config: LayerConfig, gpu: Gpu, unsorted: bool = False) -> Placed:
    """The rows of a call in blocks of `config.block_m`.

    Args:
        E: experts whose weights are at hand.
        unsorted: each pair has room for a block, which another kernel than the sorting one writes.
    """
    block_m = config.block_m
    if isinstance(a, BatchedExpertsArgs):
        T = a.out.shape[1]
        rows, counts = E * T, a.expert_num_tokens
        routing = sorted_rows(a.index_workspace, E, E * cdiv(T, block_m))
        before = [group_blocks(routing, counts, rows, T, block_m, gpu)]
        return Placed(routing, None, before, rows, T, rows, counts=counts)
    (M, top_k), direct = a.topk_ids.shape, config.direct
    if a.options.slots:
        E = a.num_experts
    pairs, unsorted = M * top_k, unsorted or direct
    at_hand = min(E, a.options.slots or E)
    blocks = pairs if unsorted else num_blocks_of(pairs, at_hand, block_m)
    routing = route_pairs(a.index_workspace, a.topk_ids, a.expert_map, E, blocks, direct)
    sort = None if unsorted else sort_into(block_m, pairs, E, config.sort_chunk)
    return Placed(routing, sort, [], M, M, pairs, weights_on_input(a))


def y_of(a: AnyArgs, rows: int, K: int, dtype: torch.dtype) -> Output:
    """What the product with w2 writes: y (rows, K), split_k of them a pair, or the output of
    batches.

    y is where x was, which the product with w13 has read. A call with slots has it at the end of
    workspace2: x of a later pass is written when y has rows already.
    """
    if isinstance(a, BatchedExpertsArgs):
        return Output(*batches_of(a.out)[:4])
    space, size = a.workspace2, rows * K
    if a.options.slots:
        space = flat(space, torch.float32, 0).view(-1)
        space = space[(space.numel() - cdiv(size * dtype.itemsize, 4)) // 32 * 32 :]
    return Output(flat(space, dtype, size), 0, K, 1)


def parts_of(a: ExpertsArgs) -> list[ExpertsArgs]:
    """The chunks of a call's tokens, if it runs in any."""
    return chunks(a) if a.options.chunk_rows else [a]


def run_layer(
    a: AnyArgs,
    parts: Sequence[AnyArgs],  # as ops/chunks cuts `a`
    products: Callable[[Any, Shared | None], GatheredProducts],
    gpu: Gpu,
    shared_start: int | None = None,
) -> None:
    """Run a layer, in parts one after the other.

    Args:
        shared_start: for a scheme whose rows share one dynamic scale, the fp32 element of
            workspace2, after those that a part uses, at which the largest magnitudes of x and h
            over all parts are kept. That of h is known once GEMM1 has run for all of them. None
            for other schemes.
    """
    device, shared = a.hidden_states.get_device(), None
    if shared_start is not None and len(parts) > 1:
        shared = shared_of(a.workspace2, shared_start)
        if a.hidden_states_scale is None:
            launch.run([amax_of(a, shared, gpu)], device, gpu)
        else:
            shared.h.zero_()
        if a.a2_scale is None:
            for part in parts:
                launch.run(products(part, shared).first, device, gpu)
    for part in parts:
        first, second, routing, y, split_k, last = products(part, shared)
        if isinstance(part, ExpertsArgs):
            second.append(last or summed(part, y.data, routing, gpu, split_k))
        launch.run(first + second, device, gpu)


def run_in_passes(
    a: ExpertsArgs,
    passes: Passes,
    products: Callable[[ExpertsArgs], GatheredProducts],
    gpu: Gpu,
) -> None:
    """Run a layer whose weights are not all at hand at a time. Each pass writes the rows of y of
    its own pairs, and one sum over all pairs follows, so that the bits are those of one call over
    all experts by the same kernels. Kernels of whole layers, which one token takes, do not run in
    passes.

    Args:
        a: the call, with `Options.slots`, the workspaces of such a problem, weights in the layout
            of all passes, and an expert_map (E,) of any entries. No dynamic scale is shared by all
            rows, and no exchange adds ranks.
        passes: for the arguments of the call, or of a chunk of its tokens, those of each pass: the
            same but for the weights, and for the expert_map (E,), which has the row of each expert
            in them, or -1 if another pass has it. Each expert that an id names is in one pass; ids
            out of range are in none. A pass is asked for once the kernels of the one before are
            launched.
        products: the launches of a pass, in tiles that are chosen for the whole layer.
    """
    device = a.hidden_states.get_device()
    for part in parts_of(a):
        found = None
        for one in passes(part):
            found = products(one)
            launch.run([*found.first, *found.second], device, gpu)
        assert found is not None, "a layer has at least one pass"
        every = route_pairs(part.index_workspace, part.topk_ids, None, a.num_experts, 0, False)
        launch.run([summed(part, found.y.data, every, gpu, found.split_k)], device, gpu)


def weights_on_input(a: ExpertsArgs) -> RouterWeights:
    """The router weights that scale the input, or none."""
    on_input = a.options.router_weight_on_input
    return router_weights(a.topk_weights) if on_input else NO_ROUTER_WEIGHTS


def weights_on_output(a: AnyArgs) -> RouterWeights:
    """The router weights that scale the terms of a token's sum, or none."""
    if isinstance(a, BatchedExpertsArgs) or a.options.router_weight_on_input:
        return NO_ROUTER_WEIGHTS
    return router_weights(a.topk_weights)


def amax_of(a: AnyArgs, shared: Shared, gpu: Gpu) -> Launch:
    """Find the largest magnitude in the rows of x that a local expert takes."""
    x = a.hidden_states
    if isinstance(a, BatchedExpertsArgs):
        E, T, K = x.shape
        valid = counted("batched", a.expert_num_tokens)
        return amax(batches_of(x), E * T, T, K, shared.x, valid, shared.h, gpu)
    M, K = x.shape
    routing = route_pairs(a.index_workspace, a.topk_ids, a.expert_map, a.num_experts, 0, False)
    valid = Valid("pairs", routing, weights_on_input(a))
    return amax(rows_of(x), M, M, K, shared.x, valid, shared.h, gpu)


def summed(a: ExpertsArgs, y: Tensor, routing: Routing, gpu: Gpu, split_k: int = 1) -> Launch:
    """For each token the sum of its rows of y (split_k, S, K), times router weights unless these
    were on the input; over all ranks, too, in a call with an exchange.
    """
    if a.options.exchange:
        return sum_ranks(a, y, None, split_k)
    weights, weighted = router_weights(a.topk_weights), not a.options.router_weight_on_input
    blocks = num_blocks(routing.num_ids) if a.options.batch_invariant else 1
    return combine(a.out, y, weights, routing, weighted, gpu, split_k, blocks)
