"""The steps of a layer whose products gather the rows of tokens: pairs are sorted into blocks of
rows of one expert, multiplied twice, and summed. Chunks of it run one after the other, also where
all rows share one dynamic scale of x and one of h. Imported at first launch only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from torch import Tensor

from moe_ops.kernels.comm.push import sum_ranks
from moe_ops.kernels.configs import LayerConfig, block_bound
from moe_ops.kernels.launch import Gpu, Launch, run
from moe_ops.kernels.place.routing import (
    NO_ROUTER_WEIGHTS,
    RouterWeights,
    Routing,
    route_pairs,
    router_weights,
)
from moe_ops.kernels.place.sort import Sort, sort_into
from moe_ops.kernels.rows.combine import combine
from moe_ops.kernels.rows.e4m3_int8 import Valid, amax, counted
from moe_ops.kernels.rows.scales import Shared, batches_of, rows_of, shared_of
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs

# cached: two sym_min cost every call time
num_blocks_of = lru_cache(maxsize=8192)(block_bound)

Args = TypeVar("Args", ExpertsArgs, BatchedExpertsArgs)


def run_in_chunks(
    a: Args,
    parts: list[Args],  # as ops/chunks cuts `a`
    launches: Callable[[Args, Shared | None, bool], list[Launch]],
    shared_behind: int | None,
    gpu: Gpu,
) -> None:
    """Run `launches(part, shared, gemm1_alone)` of each part, one after the other.

    Args:
        shared_behind: of a scheme whose rows share one dynamic scale, the fp32 elements of
            workspace2 that a part uses: behind them stand the largest magnitudes of x and of h
            over all parts. That of h is known once GEMM1 has run for all of them. None of other
            schemes.
    """
    device, shared = a.hidden_states.get_device(), None
    if shared_behind is not None and len(parts) > 1:
        shared = shared_of(a.workspace2, shared_behind)
        if a.hidden_states_scale is None:
            run([amax_of(a, shared, gpu)], device, gpu)
        else:
            shared.h.zero_()
        if a.a2_scale is None:
            for part in parts:
                run(launches(part, shared, True), device, gpu)
    for part in parts:
        run(launches(part, shared, False), device, gpu)


def placed(a: ExpertsArgs, E: int, config: LayerConfig) -> tuple[Routing, Sort | None]:
    """Pairs in blocks of `config.block_m` rows, and how they are sorted into them: not at all if
    each is a block of its own.
    """
    pairs, direct, block_m = a.topk_ids.numel(), config.direct, config.block_m
    blocks = pairs if direct else num_blocks_of(pairs, E, block_m)
    routing = route_pairs(a.index_workspace, a.topk_ids, a.expert_map, E, blocks, direct)
    return routing, None if direct else sort_into(block_m, pairs, E, config.sort_chunk)


def weights_on_input(a: ExpertsArgs) -> RouterWeights:
    """The router weights that scale the input, or none."""
    on_input = a.options.router_weight_on_input
    return router_weights(a.topk_weights) if on_input else NO_ROUTER_WEIGHTS


def valid_pairs(a: ExpertsArgs, routing: Routing) -> Valid:
    """The rows of x that a local expert takes, and the router weights that scale the input."""
    return Valid("pairs", routing, weights_on_input(a))


def amax_of(a: ExpertsArgs | BatchedExpertsArgs, shared: Shared, gpu: Gpu) -> Launch:
    """Find the largest magnitude in the rows of x that a local expert takes."""
    x, E = a.hidden_states, a.w2.shape[0]
    if isinstance(a, BatchedExpertsArgs):
        T, K = x.shape[1:]
        valid = counted("batched", a.expert_num_tokens)
        return amax(batches_of(x), E * T, T, K, shared.x, valid, shared.h, gpu)
    M, K = x.shape
    routing = route_pairs(a.index_workspace, a.topk_ids, a.expert_map, E, 0, False)
    return amax(rows_of(x), M, M, K, shared.x, valid_pairs(a, routing), shared.h, gpu)


def summed(a: ExpertsArgs, y: Tensor, routing: Routing, gpu: Gpu, split_k: int = 1) -> Launch:
    """For each token the sum of its rows of y (split_k, S, K), times router weights unless these
    were on the input; over all ranks, too, in a call with an exchange.
    """
    if a.options.exchange:
        return sum_ranks(a, y, None, split_k)
    weights, weighted = router_weights(a.topk_weights), not a.options.router_weight_on_input
    return combine(a.out, y, weights, routing, weighted, gpu, split_k, a.num_blocks)
