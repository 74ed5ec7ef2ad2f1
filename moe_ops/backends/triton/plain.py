"""Layers whose weights are plain, or quantized like their activations. Imported at first launch
only.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from moe_ops.kernels import launch
from moe_ops.kernels.configs import GEMV, SM90_TMA, block_bound
from moe_ops.kernels.gemm import gemv, sm80_mma, sm90_tma
from moe_ops.kernels.gemm.configs import LARGE_ROWS, choose, for_experts
from moe_ops.kernels.gemm.operands import Output, activated, bias_of, scaling_of, weight_of
from moe_ops.kernels.launch import Launch, run
from moe_ops.kernels.permute.combine import combine
from moe_ops.kernels.permute.rows import (
    NO_ROUTER_WEIGHTS,
    route_pairs,
    router_weights,
    sorted_rows,
)
from moe_ops.kernels.permute.sort import group_blocks, route, sort_into
from moe_ops.kernels.quantize.e4m3_int8 import Valid, counted, quantize_x
from moe_ops.kernels.quantize.scales import batches_of, flat, hidden, input_of, of_arrived
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs, GroupedLinearArgs

# cached: it has two sym_min of 0.8 us
num_blocks_of = lru_cache(maxsize=8192)(block_bound)


def experts(a: ExpertsArgs) -> None:
    """Launch `moe_ops::triton_experts`."""
    x, ids, out = a.hidden_states, a.topk_ids, a.out
    M, top_k = ids.shape
    if M == 0:
        return
    E, K, I = a.w2.shape  # noqa: E741
    dtype, device = out.dtype, x.get_device()
    gpu = launch.gpu(device)
    w13 = weight_of("w13", a.w13, a.w13_scale, a.scheme, dtype, gpu)
    w2 = weight_of("w2", a.w2, a.w2_scale, a.scheme, dtype, gpu)
    rows = input_of(x, a.hidden_states_scale, a.scheme, gpu.native)
    activation = activated(a.activation, a.alpha, a.beta, a.limit)
    scaling = scaling_of(a.scheme, gpu.native)
    w_scale, x_scale, _ = scaling
    pairs = M * top_k
    tma = pairs >= LARGE_ROWS * E and sm90_tma.why_not(w13, w2, activation, scaling, gpu) is None
    one_token = M == 1 and gemv.why_not(w13, w2, top_k, scaling) is None
    shape, scales = (M, top_k, E, K, I), (w_scale, x_scale)
    config = for_experts(*shape, dtype, gpu, a.scheme, scales, activation.GATED, tma, one_token)
    if config.kernel == GEMV:
        return run(gemv.launches(a, rows, w13, w2, activation, scaling, config, gpu), device, gpu)
    block_m = config.block_m
    blocks = pairs if config.direct else num_blocks_of(pairs, E, block_m)
    routing = route_pairs(a.index_workspace, ids, a.expert_map, E, blocks, config.direct)
    weights = router_weights(a.topk_weights)
    on_input = weights if a.router_weight_on_input else NO_ROUTER_WEIGHTS
    sort = None if config.direct else sort_into(block_m, pairs, E, config.sort_chunk)
    h, h_scale = hidden(a.workspace13, pairs, I, dtype, x_scale, config, a.a2_scale, w2.data.dtype)
    y = flat(a.workspace2, torch.float32, pairs * K)
    launches: list[Launch]
    first = scaling
    if x_scale:
        if rows.scale is not None:
            first = scaling._replace(X_SCALE=of_arrived(x_scale))
        launches, rows, on_input = quantize_x(
            rows, M, M, K, x_scale, config, y, a.a13_scale,
            Valid("pairs", routing, on_input), h.scale, top_k, w13.data.dtype, gpu, sort,
        )  # fmt: skip
    else:
        launches = [] if sort is None else [route(routing, sort, gpu)]
    b13, b2 = bias_of(a.w13_bias), bias_of(a.w2_bias)
    if config.kernel == SM90_TMA:
        launches += (
            sm90_tma.gemm1(h, rows, w13, b13, routing, on_input, activation, first, config, gpu),
            sm90_tma.gemm2(y, h, pairs, w2, b2, routing, scaling, config, gpu),
        )
    else:
        launches += (
            sm80_mma.gemm1(
                h, rows, w13, b13, routing, on_input, activation, first, h_scale,
                config.gemm1, block_m, gpu,
            ),
            sm80_mma.gemm2(
                Output(y, 0, K, 1), h, w2, b2, routing, scaling, config.gemm2, block_m, gpu
            ),
        )  # fmt: skip
    launches.append(combine(out, y, weights, routing, not a.router_weight_on_input, gpu))
    run(launches, device, gpu)


def batched_experts(a: BatchedExpertsArgs) -> None:
    """Launch `moe_ops::triton_batched_experts`."""
    x, counts = a.hidden_states, a.expert_num_tokens
    E, T, K = x.shape
    if T == 0:
        return
    I = a.w2.shape[2]  # noqa: E741
    dtype, device = a.out.dtype, x.get_device()
    gpu = launch.gpu(device)
    w13 = weight_of("w13", a.w13, a.w13_scale, a.scheme, dtype, gpu)
    w2 = weight_of("w2", a.w2, a.w2_scale, a.scheme, dtype, gpu)
    activation = activated(a.activation, a.alpha, a.beta, a.limit)
    scaling = scaling_of(a.scheme, gpu.native)
    w_scale, x_scale, _ = scaling
    facts = (dtype.itemsize, False, gpu.shared_memory, w_scale, x_scale, activation.GATED)
    config = choose(E * T, E, K, I, *facts)
    block_m = config.block_m
    routing = sorted_rows(a.index_workspace, E, E * cdiv(T, block_m))
    h, h_scale = hidden(a.workspace13, E * T, I, dtype, x_scale, config, a.a2_scale, w2.data.dtype)
    launches = [group_blocks(routing, counts, E * T, T, block_m, gpu)]
    rows = input_of(x, a.hidden_states_scale, a.scheme, gpu.native)
    first = scaling
    if x_scale:
        if rows.scale is not None:
            first = scaling._replace(X_SCALE=of_arrived(x_scale))
        more, rows, _ = quantize_x(
            rows, E * T, T, K, x_scale, config, a.workspace2, a.a13_scale,
            counted("batched", counts), h.scale, 1, w13.data.dtype, gpu,
        )  # fmt: skip
        launches += more
    b13, b2, out = bias_of(a.w13_bias), bias_of(a.w2_bias), Output(*batches_of(a.out)[:4])
    launches += (
        sm80_mma.gemm1(
            h, rows, w13, b13, routing, NO_ROUTER_WEIGHTS, activation, first, h_scale,
            config.gemm1, block_m, gpu,
        ),
        sm80_mma.gemm2(out, h, w2, b2, routing, scaling, config.gemm2, block_m, gpu),
    )  # fmt: skip
    run(launches, device, gpu)


def grouped_linear(a: GroupedLinearArgs) -> None:
    """Launch `moe_ops::triton_grouped_linear`."""
    x, out, offsets = a.x, a.out, a.offsets
    S, K = x.shape
    if S == 0:
        return
    E, device = a.weight.shape[0], x.get_device()
    gpu = launch.gpu(device)
    w = weight_of("weight", a.weight, a.weight_scale, a.scheme, out.dtype, gpu)
    scaling = scaling_of(a.scheme, gpu.native)
    w_scale, x_scale, _ = scaling
    config = choose(
        S, E, K, K, out.dtype.itemsize, False, gpu.shared_memory, w_scale, x_scale, False
    )
    block_m = config.block_m
    # The rows past the last group are one more group, which is zeroed.
    routing = sorted_rows(a.index_workspace, E, num_blocks_of(S, E + 1, block_m))
    launches = [group_blocks(routing, offsets, S, 0, block_m, gpu)]
    rows = input_of(x, a.x_scale, a.scheme, gpu.native)
    if x_scale:
        if rows.scale is not None:
            scaling = scaling._replace(X_SCALE=of_arrived(x_scale))
        more, rows, _ = quantize_x(
            rows, S, S, K, x_scale, config, a.workspace2, a.activation_scale,
            counted("groups", offsets), None, 0, w.data.dtype, gpu,
        )  # fmt: skip
        launches += more
    gemm = config.gemm1 if x_scale else config.gemm2
    y = Output(out, 0, *out.stride())
    launches.append(
        sm80_mma.gemm2(
            y, rows, w, bias_of(a.bias), routing, scaling, gemm, block_m, gpu, zero_tail=True
        )
    )
    run(launches, device, gpu)
