"""The largest magnitudes that all rows of a call share. Imported at first launch only."""

from __future__ import annotations

from moe_ops.kernels.launch import Gpu, Launch
from moe_ops.kernels.place.routing import (
    NO_ROUTER_WEIGHTS,
    Routing,
    route_pairs,
    router_weights,
)
from moe_ops.kernels.rows.e4m3_int8 import Valid, amax, counted
from moe_ops.kernels.rows.scales import Shared, batches_of, rows_of
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs


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


def valid_pairs(a: ExpertsArgs, routing: Routing) -> Valid:
    """The rows of x that a local expert takes, and the router weights that scale the input."""
    on_input = (
        router_weights(a.topk_weights) if a.options.router_weight_on_input else NO_ROUTER_WEIGHTS
    )
    return Valid("pairs", routing, on_input)
