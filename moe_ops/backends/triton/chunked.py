"""Layers that run in chunks, also where all rows share one dynamic scale of x and one of h.
Imported at first launch only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from moe_ops.kernels.launch import Gpu, Launch, run
from moe_ops.kernels.permute.rows import (
    NO_ROUTER_WEIGHTS,
    Routing,
    route_pairs,
    router_weights,
)
from moe_ops.kernels.quantize.e4m3_int8 import Valid, amax, counted
from moe_ops.kernels.quantize.scales import Shared, batches_of, rows_of, shared_of
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs

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
            run([_amax(a, shared, gpu)], device, gpu)
        else:
            shared.h.zero_()
        if a.a2_scale is None:
            for part in parts:
                run(launches(part, shared, True), device, gpu)
    for part in parts:
        run(launches(part, shared, False), device, gpu)


def _amax(a: ExpertsArgs | BatchedExpertsArgs, shared: Shared, gpu: Gpu) -> Launch:
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
    on_input = router_weights(a.topk_weights) if a.router_weight_on_input else NO_ROUTER_WEIGHTS
    return Valid("pairs", routing, on_input)
