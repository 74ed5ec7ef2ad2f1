"""Layers whose weights are plain, or quantized like their activations. Imported at first launch
only.
"""

from __future__ import annotations

import torch

from moe_ops.choose.plain import (
    LARGE_ROWS,
    choose,
    for_any_batch,
    for_experts,
    same_bits_in_all_tiles,
)
from moe_ops.choose.table import LayerSizes
from moe_ops.kernels import launch
from moe_ops.kernels.activation import Activated, activated
from moe_ops.kernels.configs import GEMV, SM90_TMA, LayerConfig
from moe_ops.kernels.gemm import gemv, sm80_mma, sm90_tma
from moe_ops.kernels.gemm.operands import Output, Scaling, Weight, bias_of, scaling_of, weight_of
from moe_ops.kernels.launch import Gpu, Launch, run
from moe_ops.kernels.place.routing import (
    NO_ROUTER_WEIGHTS,
    sorted_rows,
)
from moe_ops.kernels.place.sort import group_blocks, route
from moe_ops.kernels.rows.e4m3_int8 import counted, quantize_x
from moe_ops.kernels.rows.scales import (
    NUM_PARTIALS,
    Input,
    Shared,
    batches_of,
    flat,
    hidden,
    input_of,
    of_arrived,
)
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs, GroupedLinearArgs
from moe_ops.ops.chunks import batched_chunks, chunks
from moe_ops.pipeline.gathered import num_blocks_of, placed, run_in_chunks, summed, valid_pairs


def experts(a: ExpertsArgs) -> None:
    """Launch `moe_ops::triton_experts`."""
    x, ids = a.hidden_states, a.topk_ids
    M, top_k = ids.shape
    if M == 0:
        return
    E, K, I = a.w2.shape  # noqa: E741
    dtype, device = a.dtype, x.get_device()
    gpu = launch.gpu(device)
    w13 = weight_of("w13", a.w13, a.w13_scale, a.scheme, dtype, gpu)
    w2 = weight_of("w2", a.w2, a.w2_scale, a.scheme, dtype, gpu)
    activation = activated(a.options.activation)
    scaling = scaling_of(a.scheme, gpu.native)
    w_scale, x_scale, *_ = scaling
    pairs, scales = M * top_k, (w_scale, x_scale)
    layer = LayerSizes(pairs, E, K, I, gpu, top_k, a.global_experts)
    if a.options.batch_invariant and not same_bits_in_all_tiles(dtype, device):
        config = for_any_batch(layer, dtype.itemsize, False, *scales, activation.GATED)
    else:
        tma = pairs >= LARGE_ROWS * a.global_experts
        tma = tma and sm90_tma.why_not(w13, w2, activation, scaling, gpu) is None
        one_token = M == 1 and not a.options.batch_invariant  # gemv.py sums in another order
        one_token = one_token and gemv.why_not(w13, w2, top_k, scaling) is None
        kernels = (activation.GATED, tma, one_token, a.options.batch_invariant)
        config = for_experts(layer, dtype, a.scheme, scales, *kernels)
    if config.kernel == GEMV:
        rows = input_of(x, a.hidden_states_scale, a.scheme, gpu.native)
        return run(gemv.launches(a, rows, w13, w2, activation, scaling, config, gpu), device, gpu)
    operands = (w13, w2, activation, scaling, config, gpu)
    if not 0 < a.options.chunk_rows < M:
        return run(_launches(a, *operands), device, gpu)
    parts = chunks(a)
    behind = parts[0].topk_ids.numel() * K if x_scale == "tensor" else None
    run_in_chunks(a, parts, lambda part, *how: _launches(part, *operands, *how), behind, gpu)


def _launches(
    a: ExpertsArgs,
    w13: Weight,
    w2: Weight,
    activation: Activated,
    scaling: Scaling,
    config: LayerConfig,
    gpu: Gpu,
    shared: Shared | None = None,
    gemm1_alone: bool = False,
) -> list[Launch]:
    """The launches of a layer, or of a chunk of its tokens, whose one scale of x and of h is then
    known (`shared`).
    """
    (M, top_k), (E, K, I) = a.topk_ids.shape, a.w2.shape  # noqa: E741
    pairs, block_m, x_scale, dtype = M * top_k, config.block_m, scaling.X_SCALE, a.dtype
    rows, first = _input(a, scaling, gpu)
    routing, sort = placed(a, E, config)
    valid = valid_pairs(a, routing)
    on_input = valid.topk_weights
    h, h_scale = hidden(a.workspace13, pairs, I, dtype, x_scale, config, a.a2_scale, w2.data.dtype)
    # rounded, under `batch_invariant`, as `cutlass` rounds it
    y = flat(a.workspace2, dtype if a.options.batch_invariant else torch.float32, pairs * K)
    launches: list[Launch]
    if shared is not None:
        h = h._replace(scale=shared.h)
        if rows.scale is None:
            rows = rows._replace(scale=shared.x, partials=NUM_PARTIALS)
        launches = [] if sort is None else [route(routing, sort, gpu)]
    elif x_scale:
        launches, rows, on_input = quantize_x(
            rows, M, M, K, x_scale, config, y, a.a13_scale, valid, h.scale,
            top_k, w13.data.dtype, scaling.POWERS, gpu, sort, gathered=True,
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
    if gemm1_alone:
        return launches[:-1]
    return [*launches, summed(a, y, routing, gpu)]


def _input(
    a: ExpertsArgs | BatchedExpertsArgs, scaling: Scaling, gpu: Gpu
) -> tuple[Input, Scaling]:
    """(x, GEMM1's scaling), of which the scales of x that arrives quantized are known."""
    x = input_of(a.hidden_states, a.hidden_states_scale, a.scheme, gpu.native)
    if x.scale is None:
        return x, scaling
    return x, scaling._replace(X_SCALE=of_arrived(scaling.X_SCALE))


def batched_experts(a: BatchedExpertsArgs) -> None:
    """Launch `moe_ops::triton_batched_experts`."""
    E, T, K = a.out.shape
    if T == 0:
        return
    dtype, I, device = a.out.dtype, a.w2.shape[2], a.hidden_states.get_device()  # noqa: E741
    gpu = launch.gpu(device)
    activation = activated(a.options.activation)
    scaling = scaling_of(a.scheme, gpu.native)
    w_scale, x_scale, *_ = scaling
    facts = (dtype.itemsize, False, w_scale, x_scale, activation.GATED)
    one_config = a.options.batch_invariant and not same_bits_in_all_tiles(dtype, device)
    config = (for_any_batch if one_config else choose)(LayerSizes(E * T, E, K, I, gpu), *facts)
    run_in_chunks(
        a,
        batched_chunks(a),
        lambda part, *how: _batched_launches(part, activation, scaling, config, gpu, *how),
        0 if x_scale == "tensor" else None,
        gpu,
    )


def _batched_launches(
    a: BatchedExpertsArgs,
    activation: Activated,
    scaling: Scaling,
    config: LayerConfig,
    gpu: Gpu,
    shared: Shared | None = None,
    gemm1_alone: bool = False,
) -> list[Launch]:
    """The launches of batches, or of a chunk of experts, whose one scale of x and of h is then
    known (`shared`).
    """
    counts, I = a.expert_num_tokens, a.w2.shape[2]  # noqa: E741
    (E, T, K), dtype, x_scale, block_m = a.out.shape, a.out.dtype, scaling.X_SCALE, config.block_m
    w13 = weight_of("w13", a.w13, a.w13_scale, a.scheme, dtype, gpu)
    w2 = weight_of("w2", a.w2, a.w2_scale, a.scheme, dtype, gpu)
    routing = sorted_rows(a.index_workspace, E, E * cdiv(T, block_m))
    h, h_scale = hidden(a.workspace13, E * T, I, dtype, x_scale, config, a.a2_scale, w2.data.dtype)
    launches = [group_blocks(routing, counts, E * T, T, block_m, gpu)]
    rows, first = _input(a, scaling, gpu)
    if shared is not None:
        h = h._replace(scale=shared.h)
        if rows.scale is None:
            rows = rows._replace(scale=shared.x, partials=NUM_PARTIALS)
    elif x_scale:
        more, rows, _ = quantize_x(
            rows, E * T, T, K, x_scale, config, a.workspace2, a.a13_scale,
            counted("batched", counts), h.scale, 1, w13.data.dtype, scaling.POWERS, gpu,
        )  # fmt: skip
        launches += more
    b13, b2, out = bias_of(a.w13_bias), bias_of(a.w2_bias), Output(*batches_of(a.out)[:4])
    launches.append(
        sm80_mma.gemm1(
            h, rows, w13, b13, routing, NO_ROUTER_WEIGHTS, activation, first, h_scale,
            config.gemm1, block_m, gpu,
        )
    )  # fmt: skip
    if not gemm1_alone:
        gemm2 = sm80_mma.gemm2(out, h, w2, b2, routing, scaling, config.gemm2, block_m, gpu)
        launches.append(gemm2)
    return launches


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
    w_scale, x_scale, *_ = scaling
    one_config = a.options.batch_invariant and not same_bits_in_all_tiles(out.dtype, device)
    config = (for_any_batch if one_config else choose)(
        LayerSizes(S, E, K, K, gpu), out.dtype.itemsize, False, w_scale, x_scale, False
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
            counted("groups", offsets), None, 0, w.data.dtype, scaling.POWERS, gpu,
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
