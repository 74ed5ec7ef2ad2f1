"""Layers of 16-bit activations and weights of 4 to 8 bits, and those of emulated schemes. Imported
at first launch only.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from moe_ops.choose import mixed as choose
from moe_ops.choose.table import LayerSizes
from moe_ops.kernels import launch
from moe_ops.kernels.activation import Activated, activated
from moe_ops.kernels.configs import (
    GEMV,
    SM90_MMA,
    SM90_PACKED,
    SM90_WGMMA,
    LayerConfig,
)
from moe_ops.kernels.gemm.operands import Output
from moe_ops.kernels.launch import Gpu, Launch, run
from moe_ops.kernels.mixed_gemm import configs, gemv, packed, sm80_mma
from moe_ops.kernels.mixed_gemm.operands import MixedOperand, operand
from moe_ops.kernels.place.layout import index_parts
from moe_ops.kernels.place.place import place
from moe_ops.kernels.place.routing import (
    NO_ROUTER_WEIGHTS,
    route_pairs,
    sorted_rows,
)
from moe_ops.kernels.place.sort import group_blocks, route, sort_into
from moe_ops.kernels.rows.combine import combine_rows
from moe_ops.kernels.rows.e4m3_int8 import Valid, counted
from moe_ops.kernels.rows.emulated import Hidden, decode_x, round_h, round_x
from moe_ops.kernels.rows.operand import Operand
from moe_ops.kernels.rows.rounding import Rounding, rounding_of, x_elements
from moe_ops.kernels.rows.scales import (
    Input,
    Shared,
    batches_of,
    flat,
    input_of,
)
from moe_ops.kernels.rows.scatter import scatter
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs, GroupedLinearArgs
from moe_ops.ops.chunks import batched_chunks, chunks
from moe_ops.pipeline.gathered import (
    num_blocks_of,
    placed,
    run_in_chunks,
    summed,
    valid_pairs,
    weights_on_input,
)

E4M3 = torch.float8_e4m3fn
MAX_EXPERTS = 1024  # fewer of whose rows kernels/place/place.py counts in workspace2


@cache
def sm90_wgmma() -> ModuleType:
    """Its kernels, which not every Triton can import."""
    return import_module("moe_ops.kernels.mixed_gemm.sm90_wgmma")


@cache
def sm90_mma() -> ModuleType:
    """Likewise."""
    return import_module("moe_ops.kernels.mixed_gemm.sm90_mma")


@cache
def sm90_packed() -> ModuleType:
    """Likewise."""
    return import_module("moe_ops.kernels.mixed_gemm.sm90_packed")


def experts(a: ExpertsArgs) -> None:
    """Launch `moe_ops::triton_experts`."""
    x, ids = a.hidden_states, a.topk_ids
    (M, top_k), K = ids.shape, a.out.shape[1]
    if M == 0:
        return
    device = x.get_device()
    gpu = launch.gpu(device)
    w13, w2 = _weights(a, gpu)
    rounding = rounding_of(a.scheme)
    dtype = x.dtype if rounding is None else rounding.dtype
    layer = LayerSizes(M * top_k, w2.E, K, w2.K, gpu, top_k, a.global_experts)
    if a.options.batch_invariant and runs_wgmma(a, w13, w2, dtype, rounding):
        one = configs.in_segments(w13, w2, top_k) if rounding is None else None
        w13, w2 = one or (w13, w2)
        if one and M == 1 and sm90_mma().why_not(x, w13, w2, top_k) is None:
            config = choose.token_of_any_batch(top_k, w13.segments, w2.segments)
        else:
            config = choose.wgmma_for_any_batch(layer, w13, w2)
    elif a.options.batch_invariant:
        config = choose.for_any_batch(layer, w2.format.bits, dtype, False)
    else:
        config = _config(a, layer, w13, w2, dtype, rounding)
    activation = activated(a.options.activation)
    if config.kernel == GEMV:
        return run(gemv.launches(a, w13, w2, activation, config, gpu), device, gpu)
    if config.kernel == SM90_MMA:
        return run(sm90_mma().launches(a, w13, w2, activation, config, gpu), device, gpu)
    if config.kernel == SM90_PACKED:
        for part in chunks(a):
            run(packed_launches(part, w13, w2, activation, gpu), device, gpu)
        return
    if config.kernel == SM90_WGMMA:
        split_k = configs.split_k_of(w2, config.gemm2, config.split_k, M * top_k)
        if w2.wgmma_format.x_bits == 8:
            in_e4m3 = configs.multiplies_e4m3(config, w2, split_k, layer.rows, gpu)
            # under batch_invariant all in bf16: bits of products in e4m3 differ from theirs
            if a.options.batch_invariant or not in_e4m3:
                w13, w2 = w13.in_16_bits(), w2.in_16_bits()
        elif configs.scales_sums(config) and not a.options.batch_invariant:
            w13, w2 = w13.scaling_sums(), w2.scaling_sums()
        for part in chunks(a):
            operands = (w13, w2, activation, rounding, config, gpu)
            run(wgmma_launches(part, *operands, split_k), device, gpu)
        return
    operands = (w13, w2, activation, rounding, config, gpu)
    if not 0 < a.options.chunk_rows < M:
        return run(_mma_launches(a, *operands), device, gpu)
    parts, behind = chunks(a), None
    if rounding is not None and rounding.SCALE == "nv":
        rows = parts[0].hidden_states.shape[0]
        behind = max(rows * top_k * K, x_elements(rows, K, rounding))
    run_in_chunks(a, parts, lambda part, *how: _mma_launches(part, *operands, *how), behind, gpu)


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
    if rounding is not None and rounding.SCALE != "row":
        return False
    return sm90_wgmma().why_not(w13, w2, dtype, (a.workspace13, a.workspace2)) is None


def runs_packed(
    a: ExpertsArgs, w13: MixedOperand, w2: MixedOperand, rounding: Rounding | None
) -> bool:
    """Whether the kernels of mixed_gemm/sm90_packed.py can run a layer."""
    if not configs.on_sm90(a.hidden_states.get_device()) or rounding is not None:
        return False
    if a.layout or a.options.exchange or a.options.router_weight_on_input or w2.E >= MAX_EXPERTS:
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
) -> LayerConfig:
    """The config of a layer, by the number of tokens."""
    M, top_k = a.topk_ids.shape
    wgmma = one_token = False
    many = choose.many_rows(layer, w2.format.bits)
    many = many and runs_packed(a, w13, w2, rounding)
    token = None
    if M == 1 and rounding is None:
        one_token = gemv.why_not(w13, w2) is None
        token = choose.token_facts(w13, w2)
        if token is not None and not (
            runs_wgmma(a, w13, w2, dtype, rounding)
            and sm90_mma().why_not(a.hidden_states, w13, w2, top_k) is None
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


def _mma_launches(
    a: ExpertsArgs,
    w13: MixedOperand,
    w2: MixedOperand,
    activation: Activated,
    rounding: Rounding | None,
    config: LayerConfig,
    gpu: Gpu,
    shared: Shared | None = None,
    gemm1_alone: bool = False,
) -> list[Launch]:
    """A layer of experts, or a chunk of its tokens, by kernels/mixed_gemm/sm80_mma.py."""
    (M, top_k), E, K, I = a.topk_ids.shape, w2.E, w2.N, w2.K  # noqa: E741
    pairs, block_m = M * top_k, config.block_m
    routing, sort = placed(a, E, config)
    valid = valid_pairs(a, routing)
    on_input = valid.topk_weights
    y = flat(a.workspace2, torch.float32, pairs * K)
    launches = [] if sort is None else [route(routing, sort, gpu)]
    more, rows, h = _rounded(a, rounding, M, M, K, pairs, I, valid, gpu, shared)
    if rounding is not None and a.hidden_states_scale is None:
        # router weights have scaled x before rounding
        on_input = NO_ROUTER_WEIGHTS
    launches += (
        *more,
        sm80_mma.gemm1(
            *(h.written, h.amax, rows, w13, routing, on_input, activation),
            *(config.gemm1, block_m, gpu),
        ),
    )
    if gemm1_alone:
        return launches
    launches += (
        *h.launches,
        sm80_mma.gemm2(Output(y, 0, K, 1), h.read, w2, routing, config.gemm2, block_m, gpu),
    )
    return [*launches, summed(a, y, routing, gpu)]


def wgmma_launches(
    a: ExpertsArgs,
    w13: MixedOperand,
    w2: MixedOperand,
    activation: Activated,
    rounding: Rounding | None,
    config: LayerConfig,
    gpu: Gpu,
    split_k: int,
) -> list[Launch]:
    """A layer of experts, or a chunk of its tokens, by kernels/mixed_gemm/sm90_wgmma.py."""
    ids = a.topk_ids
    (M, top_k), E, K = ids.shape, w2.E, w2.N
    pairs, block_m = M * top_k, config.block_m
    unsorted = configs.max_unsorted_pairs(pairs, E) > 0
    blocks = pairs if unsorted else num_blocks_of(pairs, E, block_m)
    routing = route_pairs(a.index_workspace, ids, a.expert_map, E, blocks, False)
    on_input = before = weights_on_input(a)
    x = input_of(a.hidden_states, a.hidden_states_scale, a.scheme, False)
    dtype, x_scale, I = x.data.dtype, None, w2.padded_k  # noqa: E741
    kernels = sm90_wgmma()
    if rounding is None:
        h = _unrounded(a.workspace13, dtype, pairs, I)
    else:
        dtype, start = rounding.dtype, configs.permuted_elements(pairs, K)
        x_scale = flat(a.workspace2, torch.float32, start + pairs)[start:]
        if w2.wgmma_format.x_bits == 8:
            dtype, h = E4M3, kernels.round_h(rounding, pairs, w2, a.workspace13, gpu)
        else:
            h = round_h(rounding, pairs, I, a.workspace13, None, gpu)
        if x.scale is None:  # router weights scale x before it is rounded
            on_input = NO_ROUTER_WEIGHTS
    # where y will be: 16 bits a column, or two numbers of 8
    permuted = flat(a.workspace2, dtype, pairs * configs.padded(K) * 2 // dtype.itemsize)
    # Rounded where a program has all of a sum: half the bytes to write and read. On an H100 layers
    # of Qwen3 in int4 took 1 % less at M = 64, 5 % at 1024, of Mixtral 1 % at 64, at 256 the same.
    rounds = split_k == 1 and (a.options.batch_invariant or a.out.dtype == torch.bfloat16)
    rounds = rounds and a.dtype == torch.bfloat16  # fp16 holds no sum above 65504
    y = flat(a.workspace2, torch.bfloat16 if rounds else torch.float32, split_k * pairs * K)
    g1, g2 = config.gemm1, config.gemm2
    of_pairs = kernels.pair_routing(routing, pairs)
    # For few pairs `permute_tokens` writes before gdc_wait, so that no launch before it may use
    # workspace2. For at most `max_unsorted_pairs` the GEMMs read ids before gdc_wait, so that no
    # launch of this layer may write ids.
    launches: list[Launch] = []
    if not unsorted:
        launches.append(route(routing, sort_into(block_m, pairs, E, config.sort_chunk), gpu))
    launches += (
        kernels.permute_tokens(
            *(permuted, x, w13, of_pairs, before, rounding, x_scale, block_m), gpu
        ),
        kernels.gemm1(
            *(h.written, permuted, w13, w2, of_pairs, on_input, activation, g1, block_m, gpu),
            x_scale,
        ),
        *h.launches,
        kernels.gemm2(y, h.read.data, w2, of_pairs, g2, block_m, split_k, gpu, h.read.scale),
    )
    return [*launches, summed(a, y, routing, gpu, split_k)]


def packed_launches(
    a: ExpertsArgs, w13: MixedOperand, w2: MixedOperand, activation: Activated, gpu: Gpu
) -> list[Launch]:
    """A layer of experts, or a chunk of its tokens, by kernels/mixed_gemm/sm90_packed.py."""
    ids, x = a.topk_ids, a.hidden_states
    (M, top_k), E, K, I = ids.shape, w2.E, w2.N, w2.K  # noqa: E741
    S, multiply = M * top_k, sm90_packed().multiply
    # workspace2 holds the counts of experts, then rows of x, then y
    counts = flat(a.workspace2, torch.int32, S * K)
    rows = flat(a.workspace2, x.dtype, S * K)[: S * K].view(S, K)
    h = flat(a.workspace13, x.dtype, S * I)[: S * I].view(S, I)
    launches, layout = place(ids, a.expert_map, a.index_workspace, E, S, 1, gpu, counts)
    blocks = num_blocks_of(S, E + 1, packed.BLOCK_M)  # rows of no expert are one more
    routing = sorted_rows(a.index_workspace[index_parts(S, E).counts :], E, blocks)
    return [
        *launches,
        group_blocks(routing, layout.groups, S, 0, packed.BLOCK_M, gpu),
        scatter(x, Operand(rows), layout, top_k, gpu),
        multiply(h, rows, w13, routing, False, activation=activation),
        multiply(rows, h, w2, routing, False),
        combine_rows(a.out, rows, a.topk_weights, layout, top_k),
    ]


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
    parts, behind = batched_chunks(a), None
    if rounding is not None and rounding.SCALE == "nv":
        behind = x_elements(parts[0].w2.shape[0] * T, K, rounding)
    run_in_chunks(
        a,
        parts,
        lambda part, *how: _batched_launches(part, rounding, config, gpu, *how),
        behind,
        gpu,
    )


def _batched_launches(
    a: BatchedExpertsArgs,
    rounding: Rounding | None,
    config: LayerConfig,
    gpu: Gpu,
    shared: Shared | None = None,
    gemm1_alone: bool = False,
) -> list[Launch]:
    """The launches of batches, or of a chunk of experts."""
    counts, block_m = a.expert_num_tokens, config.block_m
    (E, T, K), (w13, w2) = a.out.shape, _weights(a, gpu)
    I = w2.K  # noqa: E741
    routing = sorted_rows(a.index_workspace, E, E * cdiv(T, block_m))
    valid = counted("batched", counts)
    more, rows, h = _rounded(a, rounding, E * T, T, K, E * T, I, valid, gpu, shared)
    activation = activated(a.options.activation)
    out = Output(*batches_of(a.out)[:4])
    launches = [
        group_blocks(routing, counts, E * T, T, block_m, gpu),
        *more,
        sm80_mma.gemm1(
            *(h.written, h.amax, rows, w13, routing, NO_ROUTER_WEIGHTS, activation),
            *(config.gemm1, block_m, gpu),
        ),
    ]
    if gemm1_alone:
        return launches
    gemm2 = sm80_mma.gemm2(out, h.read, w2, routing, config.gemm2, block_m, gpu)
    return [*launches, *h.launches, gemm2]


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
    run(launches, device, gpu)


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


def _weights(a: ExpertsArgs | BatchedExpertsArgs, gpu: Gpu) -> tuple[MixedOperand, MixedOperand]:
    of_w13 = (a.w13_scale, a.w13_zero_point, a.w13_global_scale, a.w13_channel_scale)
    of_w2 = (a.w2_scale, a.w2_zero_point, a.w2_global_scale, a.w2_channel_scale)
    return (
        operand_of("w13", a.w13, of_w13, a.w13_bias, a.scheme, gpu, a.layout),
        operand_of("w2", a.w2, of_w2, a.w2_bias, a.scheme, gpu, a.layout),
    )


def _unrounded(workspace: Tensor, dtype: torch.dtype, rows: int, I: int) -> Hidden:  # noqa: E741
    """h (rows, I) that the GEMMs hand over as it is."""
    h = flat(workspace, dtype, rows * I)
    return Hidden(h, None, [], Input(h, 0, I, 1))


def _rounded(
    a: ExpertsArgs | BatchedExpertsArgs,
    r: Rounding | None,
    rows: int,  # of x
    rows_of_expert: int,
    K: int,
    h_rows: int,
    I: int,  # noqa: E741
    valid: Valid,
    gpu: Gpu,
    shared: Shared | None = None,  # of all chunks
) -> tuple[list[Launch], Input, Hidden]:
    """(launches before GEMM1, GEMM1's x, h between the GEMMs), if activations are emulated."""
    x = input_of(a.hidden_states, a.hidden_states_scale, a.scheme, False)
    if r is None:
        return [], x, _unrounded(a.workspace13, x.data.dtype, h_rows, I)
    hidden = round_h(r, h_rows, I, a.workspace13, a.a2_scale, gpu, shared)
    if a.hidden_states_scale is not None:
        launches, x = decode_x(
            *(r, x, a.hidden_states_global_scale, rows, rows_of_expert, K, a.workspace2),
            *(hidden.amax if shared is None else None, gpu),
        )
        return launches, x, hidden
    launches, x = round_x(
        *(r, x, rows, rows_of_expert, K, a.workspace2, a.a13_scale, valid),
        *(hidden.amax, gpu, shared),
    )
    return launches, x, hidden
