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
from moe_ops.kernels.activation import Activated, activated, activated_by_expert
from moe_ops.kernels.configs import GEMV, SM90_TMA, LayerConfig
from moe_ops.kernels.gemm import gemv, sm80_mma, sm90_tma
from moe_ops.kernels.gemm.operands import Output, Scaling, Weight, bias_of, scaling_of, weight_of
from moe_ops.kernels.gemm.pair_adapters import Summed
from moe_ops.kernels.gemm.token_adapters import NOTHING_ADDED, AdapterProducts, Where
from moe_ops.kernels.launch import Gpu
from moe_ops.kernels.place.routing import sorted_rows
from moe_ops.kernels.place.sort import group_blocks
from moe_ops.kernels.rows.e4m3_int8 import counted, quantize_x
from moe_ops.kernels.rows.scales import NUM_PARTIALS, Shared, hidden, input_of, of_arrived
from moe_ops.ops.args import AdaptedArgs, BatchedExpertsArgs, ExpertsArgs, GroupedLinearArgs
from moe_ops.ops.chunks import batched_chunks
from moe_ops.pipeline.gathered import (
    AnyArgs,
    GatheredProducts,
    Passes,
    num_blocks_of,
    parts_of,
    placed,
    run_in_passes,
    run_layer,
    weights_on_output,
    y_of,
)


def experts(
    a: ExpertsArgs, passes: Passes | None = None, adapted: AdapterProducts | None = None
) -> None:
    """Launch `moe_ops::triton_experts`, in passes if there are any, or with adapters of tokens,
    which the kernels of sm80_mma.py add.
    """
    (M, top_k), device = a.topk_ids.shape, a.hidden_states.get_device()
    if M == 0:
        return
    gpu = launch.gpu(device)
    w13, w2 = _weights(a, gpu)
    (E, K, I), routed = w2.data.shape, a.global_experts
    activation = activated_by_expert(a.options.activation, a.activation_by_expert)
    scaling = scaling_of(a.scheme, gpu.native)
    # sm80_mma.py alone adds adapters, and has parameters of the activation by expert
    any_kernel = adapted is None and a.activation_by_expert is None
    dtype, pairs, scales = a.dtype, M * top_k, (scaling.W_SCALE, scaling.X_SCALE)
    layer = LayerSizes(pairs, routed if a.options.slots else E, K, I, gpu, top_k, routed)
    if a.options.batch_invariant and not same_bits_in_all_tiles(dtype, device):
        config = for_any_batch(layer, dtype.itemsize, False, *scales, activation.GATED)
    else:
        tma = pairs >= LARGE_ROWS * routed and any_kernel
        tma = tma and sm90_tma.why_not(w13, w2, activation, scaling, gpu) is None
        # gemv.py has whole layers, and sums in another order
        one_token = M == 1 and passes is None and any_kernel and not a.options.batch_invariant
        one_token = one_token and gemv.why_not(w13, w2, top_k, scaling) is None
        kernels = (activation.GATED, tma, one_token, a.options.batch_invariant)
        config = for_experts(layer, dtype, a.scheme, scales, *kernels)
    if config.kernel == GEMV:
        x = input_of(a.hidden_states, a.hidden_states_scale, a.scheme, gpu.native)
        launches = gemv.launches(a, x, w13, w2, activation, scaling, config, gpu)
        return launch.run(launches, device, gpu)
    how = (activation, scaling, config, gpu)
    if passes is not None:
        return run_in_passes(
            a, passes, lambda part: _products(part, _weights(part, gpu), *how), gpu
        )
    parts = parts_of(a)
    start = parts[0].topk_ids.numel() * K if scaling.X_SCALE == "tensor" else None

    def products(part: ExpertsArgs, shared: Shared | None) -> GatheredProducts:
        return _products(part, (w13, w2), *how, shared, adapted)

    run_layer(a, parts, products, gpu, start)


def _products(
    a: AnyArgs,
    weights: tuple[Weight, Weight],
    activation: Activated,
    scaling: Scaling,
    config: LayerConfig,
    gpu: Gpu,
    shared: Shared | None = None,  # the one scale of x and of h of a call in parts
    adapted: AdapterProducts | None = None,
) -> GatheredProducts:
    """The launches of both products for a layer or a part of it."""
    w13, w2 = weights
    (E, K, I), x_scale, dtype = w2.data.shape, scaling.X_SCALE, a.dtype
    p = placed(a, E, config, gpu)
    x = input_of(a.hidden_states, a.hidden_states_scale, a.scheme, gpu.native)
    first = scaling if x.scale is None else scaling._replace(X_SCALE=of_arrived(x_scale))
    on_input = p.on_input
    h, h_scale = hidden(
        a.workspace13, p.h_rows, I, dtype, x_scale, config, a.a2_scale, w2.data.dtype
    )
    if shared is not None:
        h = h._replace(scale=shared.h)
        if x.scale is None:
            x = x._replace(scale=shared.x, partials=NUM_PARTIALS)
        before = p.table(gpu)
    elif x_scale:
        more, x, on_input = quantize_x(
            x, p.rows, p.rows_of_expert, K, x_scale, config, a.workspace2, a.a13_scale, p.valid,
            h.scale, p.h_rows // p.rows, w13.data.dtype, scaling.POWERS, gpu, p.sort,
            gathered=isinstance(a, ExpertsArgs),
        )  # fmt: skip
        before = [*p.before, *more]
    else:
        before = p.table(gpu)
    # rounded, under `batch_invariant`, as `cutlass` rounds it
    y = y_of(a, p.h_rows, K, dtype if a.options.batch_invariant else torch.float32)
    of_adapters = NOTHING_ADDED
    if adapted is not None:
        where = Where(p.h_rows, p.routing, config.block_m, gpu, not before)
        of_adapters = adapted.around(
            *(a.hidden_states, p.on_input, w13.data.shape[1], dtype, h, y),
            *(Summed(a.out, weights_on_output(a)), where),
        )
        before = [*before, *of_adapters.beside, *of_adapters.before]
    b13, b2, routing, block_m = bias_of(a.w13_bias), bias_of(a.w2_bias), p.routing, config.block_m
    if config.kernel == SM90_TMA:
        gemm1 = sm90_tma.gemm1(h, x, w13, b13, routing, on_input, activation, first, config, gpu)
        gemm2 = sm90_tma.gemm2(y.data, h, p.h_rows, w2, b2, routing, scaling, config, gpu)
    else:
        gemm1 = sm80_mma.gemm1(
            h, x, w13, b13, routing, on_input, activation, first, h_scale, config.gemm1, block_m,
            gpu, of_adapters.added,
        )  # fmt: skip
        gemm2 = sm80_mma.gemm2(y, h, w2, b2, routing, scaling, config.gemm2, block_m, gpu)
    second = [*of_adapters.between, gemm2, *of_adapters.after]
    return GatheredProducts([*before, gemm1], second, routing, y, summed=of_adapters.summed)


def _weights(a: AnyArgs, gpu: Gpu) -> tuple[Weight, Weight]:
    scheme, dtype = a.scheme, a.dtype
    return (
        weight_of("w13", a.w13, a.w13_scale, scheme, dtype, gpu),
        weight_of("w2", a.w2, a.w2_scale, scheme, dtype, gpu),
    )


def adapted_experts(a: AdaptedArgs) -> None:
    """Launch `moe_ops::adapted_experts`."""
    experts(a.experts, adapted=AdapterProducts(a.adapters, a.adapter_workspace))


def batched_experts(a: BatchedExpertsArgs) -> None:
    """Launch `moe_ops::triton_batched_experts`."""
    E, T, K = a.out.shape
    if T == 0:
        return
    dtype, I, device = a.out.dtype, a.w2.shape[2], a.hidden_states.get_device()
    gpu = launch.gpu(device)
    activation = activated(a.options.activation)
    scaling = scaling_of(a.scheme, gpu.native)
    w_scale, x_scale, *_ = scaling
    facts = (dtype.itemsize, False, w_scale, x_scale, activation.GATED)
    one_config = a.options.batch_invariant and not same_bits_in_all_tiles(dtype, device)
    config = (for_any_batch if one_config else choose)(LayerSizes(E * T, E, K, I, gpu), *facts)
    run_layer(
        a,
        batched_chunks(a),
        lambda part, shared: _products(
            part, _weights(part, gpu), activation, scaling, config, gpu, shared
        ),
        gpu,
        0 if x_scale == "tensor" else None,
    )


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
    launch.run(launches, device, gpu)
