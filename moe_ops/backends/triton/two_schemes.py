"""Layers whose w13 and w2 have different schemes that leave activations as they are; one of them
may be plain. Imported at first launch only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.backends.triton import mixed
from moe_ops.backends.triton.products import (
    MixedLayer,
    run_packed_in_passes,
    sm90_wgmma,
    unrounded,
)
from moe_ops.choose import mixed as choose
from moe_ops.choose.table import ROWS_OF_ANY_BATCH, LayerSizes
from moe_ops.kernels import launch
from moe_ops.kernels.activation import activated
from moe_ops.kernels.configs import SM90_PACKED, SM90_WGMMA, LayerConfig, sort_chunk
from moe_ops.kernels.gemm import sm80_mma as plain_mma
from moe_ops.kernels.gemm.operands import Weight, bias_of, scaling_of, weight_of
from moe_ops.kernels.launch import Gpu
from moe_ops.kernels.mixed_gemm import configs, gemv, sm80_mma
from moe_ops.kernels.mixed_gemm.operands import MixedOperand
from moe_ops.kernels.place.routing import NO_ROUTER_WEIGHTS
from moe_ops.kernels.rows.scales import flat, input_of
from moe_ops.meta.workspace import round_up
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs
from moe_ops.ops.chunks import batched_chunks
from moe_ops.pipeline.gathered import (
    AnyArgs,
    GatheredProducts,
    Passes,
    parts_of,
    placed,
    run_in_passes,
    run_layer,
    y_of,
)

AnyWeight = MixedOperand | Weight


def experts(a: ExpertsArgs, passes: Passes | None = None) -> None:
    """Launch `moe_ops::triton_experts`, in passes if there are any."""
    pairs = a.topk_ids.numel()
    if pairs == 0:
        return
    gpu = launch.gpu(a.hidden_states.get_device())
    w13, w2 = _weights(a, gpu)
    config = _config(a, w13, w2, gpu, passes is None)
    if passes is not None and config.kernel == SM90_PACKED:

        def layer_of(part: ExpertsArgs) -> MixedLayer:
            first, second = _weights(part, gpu)
            assert isinstance(first, MixedOperand) and isinstance(second, MixedOperand)
            return _narrow(part, first, second, config, gpu, pairs)

        return run_packed_in_passes(a, passes, layer_of, gpu)
    if passes is not None:
        return run_in_passes(a, passes, lambda part: _products(part, config, gpu, pairs), gpu)
    if isinstance(w13, MixedOperand) and isinstance(w2, MixedOperand):
        return _narrow(a, w13, w2, config, gpu, pairs).launch(a)
    run_layer(a, parts_of(a), lambda part, _: _composed(part, w13, w2, config, gpu, pairs), gpu)


def batched_experts(a: BatchedExpertsArgs) -> None:
    """Launch `moe_ops::triton_batched_experts`."""
    x, (E, T, K) = a.hidden_states, a.out.shape
    if T == 0:
        return
    gpu = launch.gpu(x.get_device())
    w13, w2 = _weights(a, gpu)
    rows = (ROWS_OF_ANY_BATCH if a.options.batch_invariant else T) * E
    bits, layer = (_bits(w13), _bits(w2)), LayerSizes(rows, E, K, _columns(w2), gpu)
    how = (activated(a.options.activation).GATED, False, False, sort_chunk(E * T))
    config = choose.of_two_formats(layer, bits, x.dtype, *how)
    run_layer(a, batched_chunks(a), lambda part, _: _products(part, config, gpu, E * T), gpu)


def _products(a: AnyArgs, config: LayerConfig, gpu: Gpu, pairs: int) -> GatheredProducts:
    """The launches of both products for a layer of so many pairs, or a part of it."""
    w13, w2 = _weights(a, gpu)
    if isinstance(w13, MixedOperand) and isinstance(w2, MixedOperand):
        return _narrow(a, w13, w2, config, gpu, pairs).products(a)
    return _composed(a, w13, w2, config, gpu, pairs)


def _composed(
    a: AnyArgs,
    w13: AnyWeight,
    w2: AnyWeight,
    config: LayerConfig,
    gpu: Gpu,
    pairs: int,
) -> GatheredProducts:
    """Those of a plain weight and of a narrower one, each by the kernels of its family. They share
    the table of blocks and h, whose rows are sorted by expert. Kernels of plain weights read that
    table, so that a kernel sorts few pairs, too.
    """
    E, K = a.w2.shape[0], a.out.shape[-1]
    p = placed(a, E, config, gpu)
    routing, rows, block_m, split_k = p.routing, p.h_rows, config.block_m, 1
    x, scaling = input_of(a.hidden_states, None, "", False), scaling_of("", gpu.native)
    h = unrounded(a, x.data.dtype, rows, _columns(w2)).read
    wgmma = sm90_wgmma() if config.kernel == SM90_WGMMA else None
    of_pairs = None if wgmma is None else wgmma.pair_routing(routing, rows)
    activation, on_input = activated(a.options.activation), p.on_input
    how = (config.gemm1, block_m, gpu)
    first = p.table(gpu)
    if isinstance(w13, Weight):
        operands = (h, x, w13, bias_of(a.w13_bias), routing)
        first = [*first, plain_mma.gemm1(*operands, on_input, activation, scaling, "", *how)]
    elif wgmma is None:
        first = [*first, sm80_mma.gemm1(h.data, None, x, w13, routing, on_input, activation, *how)]
    else:
        permuted = flat(a.workspace2, x.data.dtype, rows * configs.padded(K))
        permute = (permuted, x, w13, of_pairs, NO_ROUTER_WEIGHTS, None, None)
        first = [
            *first,
            wgmma.permute_tokens(*permute, block_m, gpu, routed=True),
            wgmma.gemm1(
                h.data, permuted, w13, None, of_pairs, on_input, activation, *how, routed=True
            ),
        ]
    if wgmma is not None and isinstance(w2, MixedOperand):
        split_k = configs.split_k_of(w2, config.gemm2, config.split_k, pairs)
    y, two = y_of(a, split_k * rows, K, torch.float32), (config.gemm2, block_m)
    if isinstance(w2, Weight):
        second = [plain_mma.gemm2(y, h, w2, bias_of(a.w2_bias), routing, scaling, *two, gpu)]
    elif wgmma is None:
        second = [sm80_mma.gemm2(y, h, w2, routing, *two, gpu)]
    else:
        permuted = h.data[round_up(rows * w2.K, configs.ALIGNMENT) :]
        second = [
            wgmma.permute_hidden(permuted, h.data, rows, w2, gpu),
            wgmma.gemm2(y.data, permuted, w2, of_pairs, *two, split_k, gpu, routed=True),
        ]
    return GatheredProducts(first, second, routing, y, split_k)


def _narrow(
    a: AnyArgs, w13: MixedOperand, w2: MixedOperand, config: LayerConfig, gpu: Gpu, pairs: int
) -> MixedLayer:
    split_k = 1
    if config.kernel == SM90_WGMMA:
        split_k = configs.split_k_of(w2, config.gemm2, config.split_k, pairs)
    return MixedLayer(w13, w2, activated(a.options.activation), None, config, gpu, split_k)


def _config(
    a: ExpertsArgs,
    w13: AnyWeight,
    w2: AnyWeight,
    gpu: Gpu,
    whole: bool,  # kernels of whole layers may run
) -> LayerConfig:
    """The config of a layer, by the number of tokens."""
    (M, top_k), E, K = a.topk_ids.shape, a.num_experts, a.out.shape[1]
    I, dtype = _columns(w2), a.hidden_states.dtype
    bits, chunk = (_bits(w13), _bits(w2)), sort_chunk(M * top_k)
    layer = LayerSizes(M * top_k, E, K, I, gpu, top_k, a.global_experts)
    gated = activated(a.options.activation).GATED
    wgmma = direct = False
    if a.options.batch_invariant:
        layer = layer.with_rows(ROWS_OF_ANY_BATCH * E)
    elif isinstance(w13, MixedOperand) and isinstance(w2, MixedOperand):
        if whole and M == 1 and gemv.why_not_one(w13) is gemv.why_not_one(w2) is None:
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
    return choose.of_two_formats(layer, bits, dtype, gated, direct, wgmma, chunk)


def _weights(a: AnyArgs, gpu: Gpu) -> tuple[AnyWeight, AnyWeight]:
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
    """I of a w2."""
    return w.K if isinstance(w, MixedOperand) else w.data.shape[2]
