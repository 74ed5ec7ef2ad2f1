"""Layers whose w13 and w2 have different schemes that leave activations as they are; one of them
may be plain. Imported at first launch only.

Each product is that of a layer in its scheme. They share the table of blocks and h, whose rows are
sorted by expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.backends.triton import mixed
from moe_ops.choose import mixed as choose
from moe_ops.choose.table import ROWS_OF_ANY_BATCH, LayerSizes
from moe_ops.kernels import launch
from moe_ops.kernels.activation import Activated, activated
from moe_ops.kernels.configs import (
    GEMV,
    SM90_PACKED,
    SM90_WGMMA,
    GemmConfig,
    LayerConfig,
    sort_chunk,
)
from moe_ops.kernels.gemm import sm80_mma as plain_mma
from moe_ops.kernels.gemm.operands import Output, Weight, bias_of, scaling_of, weight_of
from moe_ops.kernels.launch import Gpu, Launch, run
from moe_ops.kernels.mixed_gemm import configs, gemv, sm80_mma
from moe_ops.kernels.mixed_gemm.operands import MixedOperand
from moe_ops.kernels.place.routing import (
    NO_ROUTER_WEIGHTS,
    RouterWeights,
    Routing,
    sorted_rows,
)
from moe_ops.kernels.place.sort import group_blocks, route
from moe_ops.kernels.rows.scales import Input, batches_of, flat, rows_of
from moe_ops.meta.workspace import cdiv, round_up
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs
from moe_ops.ops.chunks import batched_chunks, chunks
from moe_ops.pipeline.gathered import placed, summed, weights_on_input

AnyWeight = MixedOperand | Weight


def experts(a: ExpertsArgs) -> None:
    """Launch `moe_ops::triton_experts`."""
    if a.topk_ids.shape[0] == 0:
        return
    device = a.hidden_states.get_device()
    gpu = launch.gpu(device)
    w13, w2 = _weights(a, gpu)
    activation = activated(a.options.activation)
    config = _config(a, w13, w2, activation, gpu)
    if isinstance(w13, MixedOperand) and isinstance(w2, MixedOperand):
        if config.kernel == GEMV:
            return run(gemv.launches(a, w13, w2, activation, config, gpu), device, gpu)
        if config.kernel == SM90_PACKED:
            for part in chunks(a):
                run(mixed.packed_launches(part, w13, w2, activation, gpu), device, gpu)
            return
        if config.kernel == SM90_WGMMA:
            split_k = configs.split_k_of(w2, config.gemm2, config.split_k, a.topk_ids.numel())
            layer = (w13, w2, activation, None, config, gpu, split_k)
            for part in chunks(a):
                run(mixed.wgmma_launches(part, *layer), device, gpu)
            return
    for part in chunks(a):
        run(_launches(part, w13, w2, activation, config, gpu), device, gpu)


def _config(
    a: ExpertsArgs, w13: AnyWeight, w2: AnyWeight, activation: Activated, gpu: Gpu
) -> LayerConfig:
    """The config of a layer, by the number of tokens."""
    (M, top_k), E, K = a.topk_ids.shape, a.w2.shape[0], a.out.shape[1]
    I, dtype = _columns(w2), a.hidden_states.dtype  # noqa: E741
    bits, chunk = (_bits(w13), _bits(w2)), sort_chunk(M * top_k)
    layer = LayerSizes(M * top_k, E, K, I, gpu, top_k, a.global_experts)
    wgmma = direct = False
    if a.options.batch_invariant:
        layer = layer.with_rows(ROWS_OF_ANY_BATCH * E)
    elif isinstance(w13, MixedOperand) and isinstance(w2, MixedOperand):
        if M == 1 and gemv.why_not_one(w13) is gemv.why_not_one(w2) is None:
            return choose.gemv_of_two_formats(layer, bits)
        most = max(bits)  # products in fewer bits are faster by others for some more rows
        if choose.many_rows(layer, most) and mixed.runs_packed(a, w13, w2, None):
            return choose.MANY_ROWS
        wgmma, direct = mixed.runs_wgmma(a, w13, w2, dtype, None), M == 1
        direct = direct and not wgmma
    else:
        direct = M == 1
        narrow = w13 if isinstance(w13, MixedOperand) else w2
        assert isinstance(narrow, MixedOperand), (w13, w2)
        wgmma = not direct and mixed.runs_wgmma(a, narrow, narrow, dtype, None)
    return choose.of_two_formats(layer, bits, dtype, activation.GATED, direct, wgmma, chunk)


def _launches(
    a: ExpertsArgs,
    w13: AnyWeight,
    w2: AnyWeight,
    activation: Activated,
    config: LayerConfig,
    gpu: Gpu,
) -> list[Launch]:
    """A layer of experts, or a chunk of its tokens, of which one weight is plain or other kernels
    than those of sm80_mma.py do not run. Kernels of plain weights read the table of blocks, so
    that a kernel sorts few pairs, too.
    """
    x, pairs, block_m = a.hidden_states, a.topk_ids.numel(), config.block_m
    K, I = a.out.shape[1], _columns(w2)  # noqa: E741
    routing, sort = placed(a, a.w2.shape[0], config)
    h = Input(flat(a.workspace13, x.dtype, pairs * I), 0, I, 1)
    y = flat(a.workspace2, torch.float32, pairs * K)
    launches = [] if sort is None else [route(routing, sort, gpu)]
    how = (weights_on_input(a), activation, config.gemm1, block_m, gpu)
    wgmma = mixed.sm90_wgmma() if config.kernel == SM90_WGMMA else None
    of_pairs = None if wgmma is None else wgmma.pair_routing(routing, pairs)
    if wgmma is not None and isinstance(w13, MixedOperand):
        permuted = flat(a.workspace2, x.dtype, pairs * configs.padded(K))
        permute = (permuted, rows_of(x), w13, of_pairs, NO_ROUTER_WEIGHTS, None, None)
        launches += (
            wgmma.permute_tokens(*permute, block_m, gpu, routed=True),
            wgmma.gemm1(h.data, permuted, w13, None, of_pairs, *how, routed=True),
        )
    else:
        launches.append(_gemm1(h, rows_of(x), w13, a.w13_bias, routing, *how))
    split_k = 1
    if wgmma is not None and isinstance(w2, MixedOperand):
        permuted = h.data[round_up(pairs * I, configs.ALIGNMENT) :]
        split_k = configs.split_k_of(w2, config.gemm2, config.split_k, pairs)
        y = flat(a.workspace2, torch.float32, split_k * pairs * K)
        launches += (
            wgmma.permute_hidden(permuted, h.data, pairs, w2, gpu),
            wgmma.gemm2(
                y, permuted, w2, of_pairs, config.gemm2, block_m, split_k, gpu, routed=True
            ),
        )
    else:
        second = (w2, a.w2_bias, routing, config.gemm2, block_m, gpu)
        launches.append(_gemm2(Output(y, 0, K, 1), h, *second))
    return [*launches, summed(a, y, routing, gpu, split_k)]


def batched_experts(a: BatchedExpertsArgs) -> None:
    """Launch `moe_ops::triton_batched_experts`."""
    x, (E, T, K) = a.hidden_states, a.out.shape
    if T == 0:
        return
    gpu = launch.gpu(x.get_device())
    w13, w2 = _weights(a, gpu)
    activation = activated(a.options.activation)
    rows = (ROWS_OF_ANY_BATCH if a.options.batch_invariant else T) * E
    bits, layer = (_bits(w13), _bits(w2)), LayerSizes(rows, E, K, _columns(w2), gpu)
    how = (activation.GATED, False, False, sort_chunk(E * T))
    config = choose.of_two_formats(layer, bits, x.dtype, *how)
    for part in batched_chunks(a):
        run(_batched_launches(part, activation, config, gpu), x.get_device(), gpu)


def _batched_launches(
    a: BatchedExpertsArgs, activation: Activated, config: LayerConfig, gpu: Gpu
) -> list[Launch]:
    """The launches of batches, or of a chunk of experts."""
    x, counts, block_m = a.hidden_states, a.expert_num_tokens, config.block_m
    (E, T, _), (w13, w2) = a.out.shape, _weights(a, gpu)
    I = _columns(w2)  # noqa: E741
    routing = sorted_rows(a.index_workspace, E, E * cdiv(T, block_m))
    h = Input(flat(a.workspace13, x.dtype, E * T * I), 0, I, 1)
    first = (w13, a.w13_bias, routing, NO_ROUTER_WEIGHTS, activation, config.gemm1, block_m, gpu)
    out, second = Output(*batches_of(a.out)[:4]), (w2, a.w2_bias, routing, config.gemm2)
    return [
        group_blocks(routing, counts, E * T, T, block_m, gpu),
        _gemm1(h, batches_of(x), *first),
        _gemm2(out, h, *second, block_m, gpu),
    ]


def _weights(a: ExpertsArgs | BatchedExpertsArgs, gpu: Gpu) -> tuple[AnyWeight, AnyWeight]:
    of_w13 = (a.w13_scale, a.w13_zero_point, a.w13_global_scale, a.w13_channel_scale)
    of_w2 = (a.w2_scale, a.w2_zero_point, a.w2_global_scale, a.w2_channel_scale)
    dtype = a.hidden_states.dtype
    return (
        _weight("w13", a.w13, of_w13, a.w13_bias, a.w13_scheme, dtype, gpu),
        _weight("w2", a.w2, of_w2, a.w2_bias, a.w2_scheme, dtype, gpu),
    )


def _weight(
    name: str,
    data: Tensor,
    parts: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    bias: Tensor | None,
    scheme: str,
    dtype: torch.dtype,
    gpu: Gpu,
) -> AnyWeight:
    if not scheme:
        return weight_of(name, data, None, "", dtype, gpu)
    return mixed.operand_of(name, data, parts, bias, scheme, gpu)


def _bits(w: AnyWeight) -> int:
    """Bits of an element; 16 of all plain ones."""
    return w.format.bits if isinstance(w, MixedOperand) else 16


def _columns(w: AnyWeight) -> int:
    return w.K if isinstance(w, MixedOperand) else w.data.shape[2]


def _gemm1(
    h: Input,
    x: Input,
    w: AnyWeight,
    bias: Tensor | None,
    routing: Routing,
    on_input: RouterWeights,
    activation: Activated,
    config: GemmConfig,
    block_m: int,
    gpu: Gpu,
) -> Launch:
    """h = activation(x @ w.T + bias)."""
    if isinstance(w, MixedOperand):
        rest = (routing, on_input, activation, config, block_m, gpu)
        return sm80_mma.gemm1(h.data, None, x, w, *rest)
    how = (on_input, activation, scaling_of("", gpu.native), "", config, block_m, gpu)
    return plain_mma.gemm1(h, x, w, bias_of(bias), routing, *how)


def _gemm2(
    y: Output,
    h: Input,
    w: AnyWeight,
    bias: Tensor | None,
    routing: Routing,
    config: GemmConfig,
    block_m: int,
    gpu: Gpu,
) -> Launch:
    """y = h @ w.T + bias."""
    if isinstance(w, MixedOperand):
        return sm80_mma.gemm2(y, h, w, routing, config, block_m, gpu)
    scaling = scaling_of("", gpu.native)
    return plain_mma.gemm2(y, h, w, bias_of(bias), routing, scaling, config, block_m, gpu)
