"""Layers of 16-bit activations and weights of 4 to 8 bits, and those of emulated schemes. Imported
at first launch only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.backends.triton.products import (
    MixedLayer,
    run_packed_in_passes,
    sm90_mma,
    sm90_packed,
    sm90_wgmma,
)
from moe_ops.choose import mixed as choose
from moe_ops.choose.table import LayerSizes
from moe_ops.kernels import launch
from moe_ops.kernels.activation import activated, activated_by_expert
from moe_ops.kernels.configs import (
    GEMV,
    SM90_MMA,
    SM90_PACKED,
    SM90_WGMMA,
    LayerConfig,
)
from moe_ops.kernels.gemm.operands import Output
from moe_ops.kernels.gemm.token_adapters import AdapterProducts
from moe_ops.kernels.launch import Gpu
from moe_ops.kernels.mixed_gemm import configs, gemv, sm80_mma
from moe_ops.kernels.mixed_gemm.operands import MixedOperand, operand
from moe_ops.kernels.place.routing import sorted_rows
from moe_ops.kernels.place.sort import group_blocks
from moe_ops.kernels.rows.e4m3_int8 import counted
from moe_ops.kernels.rows.emulated import decode_x, round_x
from moe_ops.kernels.rows.rounding import Rounding, rounding_of, x_elements
from moe_ops.kernels.rows.scales import Shared, input_of
from moe_ops.ops.args import AdaptedArgs, BatchedExpertsArgs, ExpertsArgs, GroupedLinearArgs
from moe_ops.ops.chunks import batched_chunks
from moe_ops.pipeline.gathered import (
    AnyArgs,
    GatheredProducts,
    Passes,
    num_blocks_of,
    run_in_passes,
    run_layer,
)

MAX_EXPERTS = 1024  # fewer of whose rows kernels/place/place.py counts in workspace2


def experts(
    a: ExpertsArgs, passes: Passes | None = None, adapted: AdapterProducts | None = None
) -> None:
    """Launch `moe_ops::triton_experts`, in passes if there are any, or with adapters of tokens,
    which the kernels of sm80_mma.py and sm90_wgmma.py add.
    """
    M, top_k = a.topk_ids.shape
    if M == 0:
        return
    gpu = launch.gpu(a.hidden_states.get_device())
    w13, w2 = _weights(a, gpu)
    sizes = LayerSizes(M * top_k, a.num_experts, w2.N, w2.K, gpu, top_k, a.global_experts)
    if adapted is not None:
        layer = _layer(a, w13, w2, sizes, whole=False, packed=False)
        return layer._replace(adapted=adapted).launch(a)
    if passes is None:
        return _layer(a, w13, w2, sizes).launch(a)

    def layer_of(part: ExpertsArgs) -> MixedLayer:
        return _layer(part, *_weights(part, gpu), sizes, whole=False)

    if layer_of(a).config.kernel == SM90_PACKED:
        return run_packed_in_passes(a, passes, layer_of, gpu)
    run_in_passes(a, passes, lambda part: layer_of(part).products(part), gpu)


def _layer(
    a: ExpertsArgs,
    w13: MixedOperand,
    w2: MixedOperand,
    layer: LayerSizes,
    whole: bool = True,  # kernels of whole layers may run
    packed: bool = True,  # and those of sm90_packed.py
) -> MixedLayer:
    """The MixedLayer of a call, or of a part of it."""
    activation = activated_by_expert(a.options.activation, a.activation_by_expert)
    rounding = rounding_of(a.scheme)
    if a.activation_by_expert is not None:  # which sm80_mma.py alone has
        whole = packed = False
    one_token = whole and layer.pairs == layer.top_k
    dtype = a.hidden_states.dtype if rounding is None else rounding.dtype
    if a.options.batch_invariant and runs_wgmma(a, w13, w2, dtype, rounding):
        one = configs.in_segments(w13, w2, layer.top_k) if rounding is None else None
        w13, w2 = one or (w13, w2)
        if one and one_token and sm90_mma().why_not(a.hidden_states, w13, w2, layer.top_k) is None:
            config = choose.token_of_any_batch(layer.top_k, w13.segments, w2.segments)
        else:
            config = choose.wgmma_for_any_batch(layer, w13, w2)
    elif a.options.batch_invariant:
        config = choose.for_any_batch(layer, w2.format.bits, dtype, False)
    else:
        config = _config(a, layer, w13, w2, dtype, rounding, whole, packed)
    if config.kernel != SM90_WGMMA:
        return MixedLayer(w13, w2, activation, rounding, config, layer.gpu)
    split_k = configs.split_k_of(w2, config.gemm2, config.split_k, layer.pairs)
    if w2.wgmma_format.x_bits == 8:
        blocks = min(layer.rows, layer.experts)
        in_e4m3 = configs.multiplies_e4m3(config, w2, split_k, blocks, layer.gpu)
        # under batch_invariant all in bf16: bits of products in e4m3 differ from theirs
        if a.options.batch_invariant or not in_e4m3:
            w13, w2 = w13.in_16_bits(), w2.in_16_bits()
    elif configs.scales_sums(config) and not a.options.batch_invariant:
        w13, w2 = w13.scaling_sums(), w2.scaling_sums()
    return MixedLayer(w13, w2, activation, rounding, config, layer.gpu, split_k)


def runs_wgmma(
    a: ExpertsArgs,
    w13: MixedOperand,
    w2: MixedOperand,
    dtype: torch.dtype,
    rounding: Rounding | None,
) -> bool:
    """Whether the kernels of sm90_wgmma.py can run a layer."""
    if not configs.on_sm90(a.hidden_states.get_device()):
        return False
    if a.activation_by_expert is not None:
        return False
    if rounding is not None and rounding.SCALE != "row":
        return False
    return sm90_wgmma().why_not(w13, w2, dtype, (a.workspace13, a.workspace2)) is None


def runs_packed(
    a: ExpertsArgs, w13: MixedOperand, w2: MixedOperand, rounding: Rounding | None
) -> bool:
    """Whether the kernels of mixed_gemm/sm90_packed.py can run a layer."""
    if not configs.on_sm90(a.hidden_states.get_device()) or rounding is not None:
        return False
    if a.layout or a.options.exchange or a.options.router_weight_on_input:
        return False
    if a.num_experts >= MAX_EXPERTS:
        return False
    if (a.workspace13.data_ptr() | a.workspace2.data_ptr()) % 16:  # TMA reads rows there
        return False
    why_not, dtype = sm90_packed().why_not, a.hidden_states.dtype
    return why_not(w13, dtype, False) is why_not(w2, dtype, False) is None


def _config(
    a: ExpertsArgs,
    layer: LayerSizes,
    w13: MixedOperand,
    w2: MixedOperand,
    dtype: torch.dtype,
    rounding: Rounding | None,
    whole: bool,
    packed: bool,
) -> LayerConfig:
    """The config of a layer, by the number of tokens."""
    wgmma = one_token = False
    many = packed and choose.many_rows(layer, w2.format.bits)
    many = many and runs_packed(a, w13, w2, rounding)
    token = None
    if whole and layer.pairs == layer.top_k and rounding is None:
        one_token = gemv.why_not(w13, w2) is None
        token = choose.token_facts(w13, w2)
        if token is not None and not (
            runs_wgmma(a, w13, w2, dtype, rounding)
            and sm90_mma().why_not(a.hidden_states, w13, w2, layer.top_k) is None
        ):
            token = None
    else:
        wgmma = runs_wgmma(a, w13, w2, dtype, rounding)
    prepared = a.layout != ""
    config = choose.for_experts(
        *(layer, dtype, a.scheme, w2.format.bits, wgmma, one_token, prepared),
        *(min(w13.stages_of_many, w2.stages_of_many), token, many),
        w13.scaling if w13.scaling == w2.scaling else "",
    )
    use_wgmma = wgmma and config.kernel == SM90_WGMMA
    use_one = config.kernel == SM90_MMA or (one_token and config.kernel == GEMV)
    if prepared and not (use_wgmma or use_one):
        raise RuntimeError(
            f"w13 and w2 in layout {a.layout!r} need tensors that start at a multiple of 16 "
            "bytes, tiles of the kernels that read it and, beside more than one token, a GPU of "
            "compute capability 9.0; moe_ops.prepare(weight, 'torch') brings them back"
        )
    return config


def adapted_experts(a: AdaptedArgs) -> None:
    """Launch `moe_ops::adapted_experts`."""
    experts(a.experts, adapted=AdapterProducts(a.adapters, a.adapter_workspace))


def batched_experts(a: BatchedExpertsArgs) -> None:
    """Launch `moe_ops::triton_batched_experts`."""
    x, (E, T, K) = a.hidden_states, a.out.shape
    if T == 0:
        return
    gpu = launch.gpu(x.get_device())
    _, w2 = _weights(a, gpu)
    rounding = rounding_of(a.scheme)
    dtype = x.dtype if rounding is None else rounding.dtype
    of_rows = choose.for_any_batch if a.options.batch_invariant else choose.choose
    config = of_rows(LayerSizes(E * T, E, K, w2.K, gpu), w2.format.bits, dtype, False)
    parts, start, activation = batched_chunks(a), None, activated(a.options.activation)
    if rounding is not None and rounding.SCALE == "nv":
        start = x_elements(parts[0].w2.shape[0] * T, K, rounding)

    def products(part: BatchedExpertsArgs, shared: Shared | None) -> GatheredProducts:
        layer = MixedLayer(*_weights(part, gpu), activation, rounding, config, gpu)
        return layer.products(part, shared)

    run_layer(a, parts, products, gpu, start)


def grouped_linear(a: GroupedLinearArgs) -> None:
    """Launch `moe_ops::triton_grouped_linear`."""
    x, offsets = a.x, a.offsets
    S = x.shape[0]
    if S == 0:
        return
    device = x.get_device()
    gpu = launch.gpu(device)
    scales = (a.weight_scale, a.weight_zero_point, a.weight_global_scale, a.weight_channel_scale)
    w = operand_of("weight", a.weight, scales, a.bias, a.scheme, gpu)
    K, rounding = w.K, rounding_of(a.scheme)
    dtype = x.dtype if rounding is None else rounding.dtype
    of_rows = choose.for_any_batch if a.options.batch_invariant else choose.choose
    config = of_rows(LayerSizes(S, w.E, K, K, gpu), w.format.bits, dtype, False)
    block_m = config.block_m
    # The rows past the last group are one more group, which is zeroed.
    routing = sorted_rows(a.index_workspace, w.E, num_blocks_of(S, w.E + 1, block_m))
    launches = [group_blocks(routing, offsets, S, 0, block_m, gpu)]
    rows = input_of(x, a.x_scale, a.scheme, False)
    if a.x_scale is not None:
        assert rounding is not None, a.scheme
        more, rows = decode_x(rounding, rows, a.x_global_scale, S, S, K, a.workspace2, None, gpu)
        launches += more
    elif rounding is not None:
        valid = counted("groups", offsets)
        more, rows = round_x(
            rounding, rows, S, S, K, a.workspace2, a.activation_scale, valid, None, gpu
        )
        launches += more
    y = Output(a.out, 0, *a.out.stride())
    launches.append(
        sm80_mma.gemm2(y, rows, w, routing, config.gemm2, block_m, gpu, zero_tail=True)
    )
    launch.run(launches, device, gpu)


def operand_of(
    name: str,
    data: Tensor,
    parts: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    bias: Tensor | None,
    scheme: str,
    gpu: Gpu,
    layout: str = "",
) -> MixedOperand:
    """The MixedOperand of a weight with its scales, zero points, global and channel scales, and
    bias.
    """
    scale, zero, global_scale, channel_scale = parts
    assert scale is not None, name  # op validation requires it
    return operand(name, data, scale, zero, global_scale, channel_scale, scheme, gpu, layout, bias)


def _weights(a: AnyArgs, gpu: Gpu) -> tuple[MixedOperand, MixedOperand]:
    of_w13 = (a.w13_scale, a.w13_zero_point, a.w13_global_scale, a.w13_channel_scale)
    of_w2 = (a.w2_scale, a.w2_zero_point, a.w2_global_scale, a.w2_channel_scale)
    return (
        operand_of("w13", a.w13, of_w13, a.w13_bias, a.scheme, gpu, a.layout),
        operand_of("w2", a.w2, of_w2, a.w2_bias, a.scheme, gpu, a.layout),
    )
