"""Layers that run in chunks, also where all rows share one dynamic scale of x and one of h.
Imported at first launch only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from moe_ops.kernels.launch import Gpu, Launch, run
from moe_ops.kernels.rows.scales import Shared, shared_of
from moe_ops.kernels.rows.shared import amax_of
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
            run([amax_of(a, shared, gpu)], device, gpu)
        else:
            shared.h.zero_()
        if a.a2_scale is None:
            for part in parts:
                run(launches(part, shared, True), device, gpu)
    for part in parts:
        run(launches(part, shared, False), device, gpu)
