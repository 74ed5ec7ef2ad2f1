"""Launches of kernels/triton_packed.py: which schemes run on them, and their arguments."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.activations import NO_LIMIT
from moe_ops.kernels import (
    gluon_packed_launch,
    triton_emulated_launch,
    triton_packed_tiles,
    triton_vector_packed_launch,
)
from moe_ops.kernels.triton_emulated_launch import Hidden, Rounding, rounding_of
from moe_ops.kernels.triton_launch import Gpu, Launch, pointers, run
from moe_ops.kernels.triton_rows import (
    Rows,
    activation_of,
    combine,
    group_blocks,
    pair_rows,
    route,
    sorted_rows,
)
from moe_ops.kernels.triton_scales import Input, Validity, flat
from moe_ops.kernels.triton_tiles import GROUP, Tile, Tiles, block_bound
from moe_ops.meta.scales import TRITON_E2M1
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs, GroupedLinearArgs
from moe_ops.schemes import get_scheme


class Format(NamedTuple):
    """A scheme's weights in the words of kernels/triton_packed_matmul.py."""

    name: str
    scale: str
    group: int  # columns that share a scale, 0 for all
    bits: int
    storage: torch.dtype


def describe(scheme: str) -> Format | None:
    """The Format of a scheme's weights; None of plain ones and of those that kernels/triton_matmul.py multiplies with
    activations of their own format."""
    found = get_scheme(scheme)
    desc, activation = found.weight, found.activation
    if desc is None:
        return None
    alike = activation is not None and activation.dtype == desc.dtype in ("e4m3", "int8")
    if alike and not desc.is_mx:
        return None
    kind = (desc.format.bits, desc.storage_dtype)
    if desc.is_mx or desc.scale_dtype == torch.float8_e4m3fn:
        return Format(desc.dtype, "e8m0" if desc.is_mx else "e4m3", desc.group.cols, *kind)
    if desc.group.is_tensor or desc.group.is_row:
        return Format(desc.dtype, "end", 0, *kind)
    return Format(desc.dtype, "block" if desc.group.rows > 1 else "sum", desc.group.cols, *kind)


format_of = cache(describe)  # for launches; in traced code Dynamo warns of a cached function


class Packed(NamedTuple):
    """A weight and what belongs to it as the kernels take them."""

    data: Tensor  # (E, N, bytes of K columns)
    scale: Tensor
    zero: Tensor | None
    factor: Tensor | None  # global scales (E,), or channel scales (E, N, 1)
    format: Format
    strides: tuple  # of data, scales, zero points: of an expert, a row, a column or group; of the factor: the first two
    chip: Gpu

    @property
    def columns(self) -> int:
        return self.data.shape[2] * 8 // self.format.bits

    @property
    def scales_in_place(self) -> bool:
        """Whether scales that lie side by side do so by 16 bytes, of each expert without gaps."""
        scale = self.scale
        expert, row, one = scale.stride()
        return (scale.data_ptr() | expert) % 16 == 0 and (row, one) == (scale.shape[2], 1)

    def pointers(self) -> tuple:
        return self.data, self.scale, self.zero, self.factor

    def constants(self, tile: Tile, dtype: torch.dtype, tokens: int) -> tuple[tuple, tuple]:
        """FORMAT to G, and how the kernel steps: DK and S_ALIGN."""
        scale, zero = self.scale, self.zero
        strides = (scale.stride(),) if zero is None else (scale.stride(), zero.stride())
        step = min(tile.k, 64 if tokens == 32 else 128)
        return _constants(self.format, scale.dtype == dtype, step, strides, scale.shape)


@lru_cache(maxsize=1024)
def _constants(
    of: Format,
    same_dtype: bool,  # of scales and activations
    step: int,
    strides: tuple[tuple[int, ...], ...],  # of scales and zero points
    shape: tuple[int, ...],  # of scales
) -> tuple[tuple, tuple]:
    """As Packed.constants.

    A product takes 128 columns at most, for more its operands would fill the registers. More of them in a step read
    longer pieces of a row: mixtral in int4 at M = 8 took 225 us with 256 columns, 294 with 128.
    """
    how = of.scale
    if of.group == 32 and of.name == "int4" and same_dtype:
        how = "weight"  # products of 32 columns alone would be too short
    columns = min(step, of.group, 128) if how == "sum" else min(step, 128)
    if of.bits == 6:  # loaded column by column, a register each
        columns = min(columns, 32)
    # scales that lie side by side and begin at a multiple of so many in every row
    if all([len(found) == 3 and found[2] == 1 for found in strides]):
        together = math.gcd(16, shape[-1], *[stride for found in strides for stride in found[:2]])
    else:
        together = 1
    return (of.name, how, of.group), (columns, together)


def packed(
    name: str,
    data: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    global_scale: Tensor | None,
    channel_scale: Tensor | None,
    scheme: str,
    chip: Gpu,
    layout: str = "",
) -> Packed:
    """The Packed of an op's tensors; ValueError where the dtype is not what the scheme says."""
    found = format_of(scheme)
    if layout == TRITON_E2M1:
        found = found._replace(name="e2m1_words")
    expected = found.storage
    if data.dtype != expected:
        raise ValueError(
            f"{name} must have dtype {expected} for scheme {scheme}, got {data.dtype}; quantize it "
            "with moe_ops.quantize"
        )
    if not chip.native:  # compilers for such GPUs do not know e4m3
        data = data.view(torch.uint8) if data.dtype == torch.float8_e4m3fn else data
        scale = scale.view(torch.uint8) if scale.dtype == torch.float8_e4m3fn else scale
    of_zero = (0, 0, 0) if zero is None else zero.stride()
    of_scale = scale.stride() if scale.ndim == 3 else (scale.stride(0), 0, 0)
    if found.group == 0:  # one a row, if not one for all
        of_scale, of_zero = (*of_scale[:2], 0), (*of_zero[:2], 0)
    factor = channel_scale if global_scale is None else global_scale
    of_factor = (0, 0) if factor is None else (*factor.stride(), 0)[:2]
    strides = (*data.stride(), *of_scale, *of_zero, *of_factor)
    return Packed(data, scale, zero, factor, found, strides, chip)


def gemm1(
    w: Packed,
    bias: Tensor | None,
    h: Tensor,
    h_amax: Tensor | None,
    x: Input,
    rows: Rows,
    input_weights: Tensor | None,  # router weights to scale the input by
    activation: tuple,  # alpha, beta, limit; name, gated, interleaved, limited
    tile: Tile,
) -> Launch:
    """h = activation(x @ w.T + bias)."""
    gated = activation[4]
    K, N = w.columns, w.data.shape[1]
    I = N // 2 if gated else N  # noqa: E741
    columns = tile.rows // 2 if gated else tile.rows  # of h
    constants, steps = w.constants(tile, x.data.dtype, rows.tokens)
    args = (
        *(h, h_amax, x.data, x.scale, x.stride_row, *w.pointers(), bias, *rows.args),
        *(input_weights, *((0, 0) if input_weights is None else input_weights.stride())),
        *(K, I, *x.strides, *w.strides, *((0, 0) if bias is None else bias.stride())),
        *(*activation[:3], rows.name, rows.has_map, input_weights is not None, *activation[3:]),
        *(
            *constants,
            K % tile.k == 0,
            GROUP,
            rows.tokens,
            *tile[:3],
            *steps,
            tile.warps,
            w.chip.dependent,
        ),
    )
    return Launch("packed_gemm1", (rows.blocks * cdiv(I, columns), 1, 1), args, tile.warps)


def gemm2(
    w: Packed,
    bias: Tensor | None,
    y: Tensor,
    y_strides: tuple,  # of an expert (beyond its rows), a row, a column
    x: Input,
    rows: Rows,
    tile: Tile,
    zero_tail: bool = False,
) -> Launch:
    """y = x @ w.T + bias."""
    K, N = w.columns, w.data.shape[1]
    constants, steps = w.constants(tile, x.data.dtype, rows.tokens)
    args = (
        *(y, x.data, x.scale, x.stride_row, *w.pointers(), bias, *rows.args),
        *(K, N, *x.strides[1:], *w.strides),
        *(*((0, 0) if bias is None else bias.stride()), *y_strides),
        *(rows.name, rows.has_map, zero_tail, *constants, K % tile.k == 0, GROUP),
        *(rows.tokens, *tile[:3], *steps, tile.warps, w.chip.dependent),
    )
    return Launch("packed_gemm2", (rows.blocks * cdiv(N, tile.rows), 1, 1), args, tile.warps)


_blocks = lru_cache(maxsize=8192)(block_bound)


def launch_experts(a: ExpertsArgs, chip: Gpu) -> None:
    x, ids, out = a.hidden_states, a.topk_ids, a.out
    (M, top_k), (_, K) = ids.shape, x.shape
    device, pairs = x.get_device(), M * top_k
    w13, w2 = _weights(a, chip)
    E, I = a.w2.shape[0], w2.columns  # noqa: E741
    rounding = rounding_of(a.scheme)
    dtype = x.dtype if rounding is None else rounding.dtype
    spaces = (a.workspace13, a.workspace2)
    wgmma = M > 1 and rounding is None and gluon_packed_launch.usable(w13, w2, x, spaces)
    vector = M == 1 and rounding is None and triton_vector_packed_launch.possible(w13, w2)
    prepared = a.layout != ""
    tiles = triton_packed_tiles.for_experts(
        M, top_k, E, K, I, dtype, chip, a.scheme, w2.format.bits, wgmma, vector, prepared
    )
    if prepared and not (tiles.wgmma and wgmma or tiles.vector and vector):
        raise RuntimeError(
            f"w13 and w2 in layout {a.layout!r} need tensors that start at a multiple of 16 bytes, tiles of the kernels that read it "
            "and, beside more than one token, a GPU of compute capability 9.0; moe_ops.prepare(weight, 'torch') brings them back"
        )
    if tiles.wgmma:
        return _launch_on_sm90(a, w13, w2, tiles, chip)
    if tiles.vector:
        key = (device, tiles, E, top_k, x.stride(), out.stride(), a.router_weight_on_input)
        addresses = pointers(x, a.topk_weights, ids, out, a.workspace13, a.expert_map)
        launches = triton_vector_packed_launch.launches(a, w13, w2, tiles)
        return run(launches, (*key, _layer_key(a, w13, w2), addresses), device, chip.dependent)
    blocks = pairs if tiles.direct else _blocks(pairs, E, tiles.tokens)
    index, expert_map = a.index_workspace, a.expert_map
    rows = pair_rows(index, ids, expert_map, E, top_k, tiles.direct, tiles.tokens, blocks)
    y = flat(a.workspace2, torch.float32, pairs * K)
    weights = a.topk_weights if a.router_weight_on_input else None
    launches = [] if tiles.direct else [route(rows, pairs, tiles.chunk, chip)]
    validity = Validity("pairs", rows.has_map, (*rows.args[1:3], *rows.args[4:]), weights)
    source = Input(x, (0, *x.stride()))
    more, first, h = _rounded(a, rounding, source, M, M, K, pairs, I, validity, chip)
    late_weights = weights if rounding is None else None
    launches += (
        *more,
        gemm1(w13, a.w13_bias, h.written, h.amax, first, rows, late_weights, _activation(a), tiles.gemm1),
        *h.launches,
        gemm2(w2, a.w2_bias, y, (0, K, 1), h.read, rows, tiles.gemm2),
        combine(out, y, a.topk_weights, rows, M, K, weights is None, chip),
    )  # fmt: skip
    key = (device, tiles, E, top_k, source.strides, out.stride(), a.router_weight_on_input)
    data = (x, a.topk_weights, ids, out, y, h.written, index, expert_map, a.a13_scale, a.a2_scale)
    run(launches, (*key, _layer_key(a, w13, w2), pointers(*data)), device, chip.dependent)


def _launch_on_sm90(a: ExpertsArgs, w13: Packed, w2: Packed, tiles: Tiles, chip: Gpu) -> None:
    """As launch_experts, on kernels/gluon_packed.py."""
    x, ids, out = a.hidden_states, a.topk_ids, a.out
    (M, top_k), (E, K, _), I = ids.shape, w2.data.shape, w2.columns  # noqa: E741
    device, pairs = x.get_device(), M * top_k
    alone = gluon_packed_launch.alone(pairs, E)
    blocks = 0 if alone else _blocks(pairs, E, tiles.tokens)
    rows = pair_rows(a.index_workspace, ids, a.expert_map, E, top_k, False, tiles.tokens, blocks)
    whole = gluon_packed_launch.padded(K)
    arranged = flat(a.workspace2, x.dtype, pairs * whole)  # where y will be
    parts = gluon_packed_launch.parts_of(w2, tiles.gemm2, tiles.parts, pairs)
    h = flat(a.workspace13, x.dtype, pairs * gluon_packed_launch.padded(I))
    y = flat(a.workspace2, torch.float32, parts * pairs * K)
    weights = a.topk_weights if a.router_weight_on_input else None
    first, second = tiles.gemm1, tiles.gemm2
    # Of few pairs `arrange` writes before it waits: only what leaves workspace2 alone may come before it. Of as few as
    # `alone` allows the GEMMs read ids before they wait, so that nothing of this layer may write those.
    launches = [
        *([] if alone else [route(rows, pairs, tiles.chunk, chip)]),
        gluon_packed_launch.arrange(arranged, x, w13, pairs, rows, chip),
        gluon_packed_launch.gemm1(
            w13, w2, a.w13_bias, h, arranged, pairs, rows, weights, _activation(a), first
        ),
        gluon_packed_launch.gemm2(w2, a.w2_bias, y, h, pairs, rows, second, parts),
        combine(out, y, a.topk_weights, rows, M, K, weights is None, chip, parts),
    ]
    few = gluon_packed_launch.few_pairs(pairs)
    key = (
        device,
        tuple([launch.registers for launch in launches]),
        tiles,
        parts,
        few,
        alone,
        E,
        top_k,
        x.stride(),
        out.stride(),
        a.router_weight_on_input,
    )
    data = (x, a.topk_weights, ids, out, y, h, a.index_workspace, a.expert_map)
    run(launches, (*key, _layer_key(a, w13, w2), pointers(*data)), device, chip.dependent)


def launch_batched_experts(a: BatchedExpertsArgs, chip: Gpu) -> None:
    x, out, counts, index = a.hidden_states, a.out, a.expert_num_tokens, a.index_workspace
    E, T, K = x.shape
    device = x.get_device()
    w13, w2 = _weights(a, chip)
    I, bits = w2.columns, w2.format.bits  # noqa: E741
    rounding = rounding_of(a.scheme)
    dtype = x.dtype if rounding is None else rounding.dtype
    tiles = triton_packed_tiles.choose(E * T, E, K, I, bits, dtype, False, chip.shared_memory)
    rows = sorted_rows(index, E * cdiv(T, tiles.tokens), E, tiles.tokens)
    # As in backends/triton/backend.py: rows are numbered e * T + t throughout.
    source = Input(x, (x.stride(0) - T * x.stride(1), x.stride(1), x.stride(2)))
    out_strides = (out.stride(0) - T * out.stride(1), out.stride(1), out.stride(2))
    validity = Validity("batched", False, (counts, None, E, 0, 1, counts.stride(0), 0, 0))
    more, first, h = _rounded(a, rounding, source, E * T, T, K, E * T, I, validity, chip)
    launches = [
        group_blocks(rows, counts, E, E * T, T, chip),
        *more,
        gemm1(w13, a.w13_bias, h.written, h.amax, first, rows, None, _activation(a), tiles.gemm1),
        *h.launches,
        gemm2(w2, a.w2_bias, out, out_strides, h.read, rows, tiles.gemm2),
    ]
    key = (device, "batched", tiles, E, source.strides, out_strides, _layer_key(a, w13, w2))
    data = (x, counts, out, h.written, a.workspace2, index, a.a13_scale, a.a2_scale)
    run(launches, (*key, pointers(*data)), device, chip.dependent)


def launch_grouped_linear(a: GroupedLinearArgs, chip: Gpu) -> None:
    x, out, offsets, index = a.x, a.out, a.offsets, a.index_workspace
    S, K = x.shape
    E, device = a.weight.shape[0], x.get_device()
    scales = (a.weight_scale, a.weight_zero_point, a.weight_global_scale, a.weight_channel_scale)
    w = packed("weight", a.weight, *scales, a.scheme, chip)
    rounding = rounding_of(a.scheme)
    dtype = x.dtype if rounding is None else rounding.dtype
    tiles = triton_packed_tiles.choose(S, E, K, K, w.format.bits, dtype, False, chip.shared_memory)
    # The rows past the last group are one more group, of zeros.
    rows = sorted_rows(index, _blocks(S, E + 1, tiles.tokens), E, tiles.tokens)
    launches = [group_blocks(rows, offsets, E + 1, S, 0, chip)]
    source = Input(x, (0, *x.stride()))
    if rounding is not None:
        validity = Validity("groups", False, (offsets, None, E, 0, 1, offsets.stride(0), 0, 0))
        more, source = triton_emulated_launch.round_x(
            rounding, source, S, S, K, a.workspace2, a.activation_scale, validity, None, chip
        )
        launches += more
    launches.append(gemm2(w, a.bias, out, (0, *out.stride()), source, rows, tiles.gemm2, True))
    key = (device, "grouped", tiles, a.weight.shape, x.stride(), out.stride(), w.strides)
    key += (a.scheme, None if a.bias is None else a.bias.stride())
    data = (x, source.data, offsets, out, index, a.bias, a.activation_scale, *w.pointers())
    run(launches, (*key, pointers(*data)), device, chip.dependent)


def _weights(a: ExpertsArgs | BatchedExpertsArgs, chip: Gpu) -> tuple[Packed, Packed]:
    of_w13 = (a.w13_scale, a.w13_zero_point, a.w13_global_scale, a.w13_channel_scale)
    of_w2 = (a.w2_scale, a.w2_zero_point, a.w2_global_scale, a.w2_channel_scale)
    return (
        packed("w13", a.w13, *of_w13, a.scheme, chip, a.layout),
        packed("w2", a.w2, *of_w2, a.scheme, chip, a.layout),
    )


def _rounded(
    a: ExpertsArgs | BatchedExpertsArgs,
    r: Rounding | None,
    x: Input,
    rows: int,  # of x
    rows_of_expert: int,
    K: int,
    h_rows: int,
    I: int,  # noqa: E741
    validity: Validity,
    chip: Gpu,
) -> tuple[list[Launch], Input, Hidden]:
    """Launches before GEMM1, what it reads as x, and what becomes of h."""
    if r is None:
        h = flat(a.workspace13, x.data.dtype, h_rows * I)
        return [], x, Hidden(h, None, [], Input(h, (0, I, 1)))
    h = triton_emulated_launch.round_h(r, h_rows, I, a.workspace13, a.a2_scale, chip)
    launches, x = triton_emulated_launch.round_x(
        r, x, rows, rows_of_expert, K, a.workspace2, a.a13_scale, validity, h.amax, chip
    )
    return launches, x, h


def _activation(a: ExpertsArgs | BatchedExpertsArgs) -> tuple:
    return (a.alpha, a.beta, a.limit, *activation_of(a.activation), a.limit < NO_LIMIT)


def _layer_key(a: ExpertsArgs | BatchedExpertsArgs, w13: Packed, w2: Packed) -> tuple:
    """The part of a specialisation that weights and activation decide."""
    strides = [None if bias is None else bias.stride() for bias in (a.w13_bias, a.w2_bias)]
    key = (a.activation, a.limit < NO_LIMIT, a.scheme, a.layout, a.w2.shape)
    key += (w13.strides, w2.strides)
    data = pointers(a.w13_bias, a.w2_bias, *w13.pointers(), *w2.pointers())
    return (*key, *strides, data)
