"""Conversion of a call's tensors to the form that FlashInfer's layer reads. Imported at first
launch only.

Legend: M tokens, K hidden size, I intermediate size, N rows of w13, E local experts. No kernel
here executes gdc_wait: they are launched without programmatic dependent launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.activations import UP_GATE
from moe_ops.backends.flashinfer.schemes import Scheme
from moe_ops.kernels.device.blocks import local_expert
from moe_ops.kernels.device.e4m3 import clamp, exponent_above, quotient, reciprocal, stored
from moe_ops.kernels.launch import (
    Constant,
    Gpu,
    Launch,
    Pointer,
    Runtime,
    RuntimeFloat,
    Specialized,
    arguments,
    kernel,
    unprefixed,
)
from moe_ops.kernels.place.routing import NO_ROUTER_WEIGHTS, RouterWeights, router_weights
from moe_ops.kernels.rows.scales import expert_stride
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import ExpertsArgs

GROUPS = 32  # groups of 32 columns that a program of `rows` handles


@unprefixed
class Ids(NamedTuple):
    """The caller's expert ids."""

    ids: Pointer  # (M, top_k)
    map: Pointer  # (num_ids,) global id -> local id, or None
    M: Runtime
    E: Runtime
    num_ids: Runtime
    ids_stride_m: Runtime
    ids_stride_k: Runtime
    map_stride: Runtime


@unprefixed
class Constants(NamedTuple):
    """The constants of the layer that the library reads from device memory, and the tensors that
    they are computed from.
    """

    # (8, SLOT) fp32, written: alpha, beta, limit, factors of w13 and w2, inverse scales of a13 and
    # a2, scale of a13
    constants: Pointer
    w13_scale: Pointer  # (E,) scales of the weights, or None
    w2_scale: Pointer
    # () or (E,) scales of the activations, or None. Of a13 the largest is taken, because a token
    # is quantized once
    a13_scale: Pointer
    a2_scale: Pointer
    a13_stride: Runtime  # between scales of experts
    a2_stride: Runtime
    alpha: RuntimeFloat
    beta: RuntimeFloat
    limit: RuntimeFloat
    slot: Runtime  # floats of a constant's slot, E at least
    BLOCK_E: Constant  # a power of two, at least E
    FACTORS: Constant  # how factors follow from scales (schemes.py); "" for schemes without scales


@triton.jit
def store_factors(out_ptr, scale_ptr, a, e, mask, FACTORS: tl.constexpr):
    """Store the factor of each expert's GEMM output, from the scale of its weights and that of the
    activations.
    """
    s = tl.load(scale_ptr + e, mask=mask, other=1.0)
    tl.store(out_ptr + e, s * a if FACTORS == "product" else a / s, mask=mask)


@arguments
class RouteArguments:
    local: Pointer  # (M, top_k) int32, written: local experts, -1 if not here and for repeats
    # (M, top_k) fp32, written: router weights; those of repeats are added to the first
    sums: Pointer
    ids: Ids
    topk_weights: RouterWeights
    constants: Constants
    TOP_K: Constant
    BLOCK_TOP_K: Constant  # a power of two, at least TOP_K
    BLOCK_M: Constant  # tokens of a program


@kernel(RouteArguments)
def moe_ops_flashinfer_route(
    local_ptr,
    sums_ptr,
    ids_ptr,
    map_ptr,
    M,
    E,
    num_ids,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    topk_weights_ptr,
    topk_weights_stride_m,
    topk_weights_stride_k,
    constants_ptr,
    w13_scale_ptr,
    w2_scale_ptr,
    a13_scale_ptr,
    a2_scale_ptr,
    a13_stride,
    a2_stride,
    alpha,
    beta,
    limit,
    slot,
    BLOCK_E: tl.constexpr,
    FACTORS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Ids and router weights of BLOCK_M tokens. The first program also writes the constants of the
    layer.

    FlashInfer counts an expert once per token: except in its sort for few tokens, it loses
    repeats.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    j = tl.arange(0, BLOCK_TOP_K)[None, :]
    inside = (m < M) & (j < TOP_K)
    pair = m * TOP_K + j
    e = local_expert(
        ids_ptr, map_ptr, pair, inside, E, num_ids, TOP_K,
        ids_stride_m, ids_stride_k, map_stride,
    )  # fmt: skip
    here = inside & (e >= 0)
    at = m.to(tl.int64) * topk_weights_stride_m + j * topk_weights_stride_k
    w = tl.load(topk_weights_ptr + at, mask=here, other=0.0).to(tl.float32)
    if TOP_K > 1:
        same = (e[:, :, None] == e[:, None, :]) & here[:, :, None]
        other = tl.arange(0, BLOCK_TOP_K)
        earlier = other[None, None, :] < other[None, :, None]
        repeats = tl.max((same & earlier).to(tl.int32), 2) > 0
        others = tl.broadcast_to(w[:, None, :], (BLOCK_M, BLOCK_TOP_K, BLOCK_TOP_K))
        w = tl.sum(tl.where(same, others, 0.0), 2)
        e = tl.where(repeats, -1, e)
        w = tl.where(repeats, 0.0, w)
    tl.store(local_ptr + pair, e, mask=inside)
    tl.store(sums_ptr + pair, w, mask=inside)
    if tl.program_id(0) == 0:
        lane = tl.arange(0, BLOCK_E)
        ok = lane < E
        one = tl.full((BLOCK_E,), 1.0, tl.float32)
        tl.store(constants_ptr + lane, one * alpha, mask=ok)
        tl.store(constants_ptr + slot + lane, one * beta, mask=ok)
        tl.store(constants_ptr + 2 * slot + lane, one * limit, mask=ok)
        if FACTORS == "one":
            tl.store(constants_ptr + 3 * slot + lane, one, mask=ok)
            tl.store(constants_ptr + 4 * slot + lane, one, mask=ok)
        elif FACTORS != "":
            a13 = tl.max(tl.load(a13_scale_ptr + lane * a13_stride, mask=ok, other=0.0), 0)
            a2 = tl.load(a2_scale_ptr + lane * a2_stride, mask=ok, other=1.0)
            store_factors(constants_ptr + 3 * slot, w13_scale_ptr, a13, lane, ok, FACTORS)
            store_factors(constants_ptr + 4 * slot, w2_scale_ptr, a2, lane, ok, FACTORS)
            tl.store(constants_ptr + 5 * slot, 1.0 / a13)
            tl.store(constants_ptr + 6 * slot + lane, 1.0 / a2, mask=ok)
            tl.store(constants_ptr + 7 * slot, a13)


def route(
    a: ExpertsArgs, local: Tensor, sums: Tensor, constants: Tensor, scheme: Scheme
) -> Launch:
    """Write local ids, router weights and the layer's constants."""
    ids, expert_map = a.topk_ids, a.expert_map
    M, top_k = ids.shape
    E, activation = a.w13.shape[0], a.options.activation
    numbers = (activation.alpha, activation.beta, activation.limit)
    num_ids, map_stride = E, 0
    if expert_map is not None:
        num_ids, map_stride = expert_map.shape[0], expert_map.stride(0)
    block_top_k = 1 << (top_k - 1).bit_length()
    block_m = max(1, 512 // block_top_k**2)
    scales: tuple[Tensor | None, ...] = (None,) * 4
    if scheme.factors == "product":
        scales = (a.w13_scale, a.w2_scale, a.a13_scale, a.a2_scale)
    elif scheme.factors == "quotient":
        scales = (a.w13_global_scale, a.w2_global_scale, a.a13_scale, a.a2_scale)
    w13_scale, w2_scale, a13_scale, a2_scale = scales
    args = RouteArguments(
        local=local,
        sums=sums,
        ids=Ids(ids, expert_map, M, E, num_ids, ids.stride(0), ids.stride(1), map_stride),
        topk_weights=router_weights(a.topk_weights),
        constants=Constants(
            *(constants, w13_scale, w2_scale, a13_scale, a2_scale),
            *(expert_stride(a13_scale), expert_stride(a2_scale), *numbers),
            *(constants.stride(0), 1 << (E - 1).bit_length(), scheme.factors),
        ),
        TOP_K=top_k,
        BLOCK_TOP_K=block_top_k,
        BLOCK_M=block_m,
    )
    return Launch(moe_ops_flashinfer_route, (cdiv(M, block_m), 1, 1), args)


@arguments
class RowsArguments:
    out: Pointer  # (M, columns) e4m3, written
    scale: Pointer  # (M, columns / 32) e8m0 codes, written if TO is "mxfp8"
    x: Pointer  # (M, K)
    weights: RouterWeights  # (M, 1) that multiply the rows, or none
    a_scale: Pointer  # () scale of e4m3 rows, or those of experts, of which the largest is taken
    K: Specialized
    columns: Specialized  # of out: zeros from K on
    x_stride_m: Specialized
    x_stride_k: Specialized
    TO: Constant  # "e4m3": x / a_scale, "mxfp8": groups of 32 with powers of two
    NATIVE: Constant
    SCALES: Constant  # number of a_scale
    GROUPS: Constant  # of 32 columns, in one program


@kernel(RowsArguments)
def moe_ops_flashinfer_rows(
    out_ptr,
    scale_ptr,
    x_ptr,
    weights_ptr,
    weights_stride_m,
    weights_stride_k,
    a_scale_ptr,
    K,
    columns,
    x_stride_m,
    x_stride_k,
    TO: tl.constexpr,
    NATIVE: tl.constexpr,
    SCALES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Quantize rows of the input, multiplied by router weights and padded if asked for. Rows that
    no expert takes may hold anything.
    """
    m = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    ok = k < columns
    x = tl.load(x_ptr + m * x_stride_m + k.to(tl.int64) * x_stride_k, mask=k < K, other=0.0)
    v = x.to(tl.float32)
    if weights_ptr is not None:
        v *= tl.load(weights_ptr + m * weights_stride_m).to(tl.float32)
    if TO == "e4m3":
        known = tl.arange(0, triton.next_power_of_2(SCALES))
        a = tl.max(tl.load(a_scale_ptr + known, mask=known < SCALES, other=0.0), 0)
        v = clamp(quotient(v, a, reciprocal(a)), 448.0)
        tl.store(out_ptr + m * columns + k, stored(v, NATIVE), mask=ok)
    else:
        amax = tl.max(tl.abs(v), 1)
        code = exponent_above(quotient(amax, 448.0, 1.0 / 448.0))
        code = tl.where(amax < float("inf"), tl.minimum(tl.maximum(code, 0), 253), 255)
        inverse = tl.where(code == 255, 0x7FC00000, (254 - code) << 23)
        v = clamp(v * inverse.to(tl.float32, bitcast=True)[:, None], 448.0)
        tl.store(out_ptr + m * columns + k, stored(v, NATIVE), mask=ok)
        groups = columns // 32
        tl.store(scale_ptr + m * groups + g, code.to(tl.uint8), mask=g < groups)


def quantize(a: ExpertsArgs, out: Tensor, scale: Tensor | None, to: str, gpu: Gpu) -> Launch:
    """Write the input's rows in the form `to`, multiplied by router weights if these scale the
    input.
    """
    x, columns = a.hidden_states, out.shape[1]
    args = RowsArguments(
        out=out if gpu.native else out.view(torch.uint8),
        scale=scale,
        x=x,
        weights=router_weights(a.topk_weights)
        if a.options.router_weight_on_input
        else NO_ROUTER_WEIGHTS,
        a_scale=a.a13_scale if to == "e4m3" else None,
        K=x.shape[1],
        columns=columns,
        x_stride_m=x.stride(0),
        x_stride_k=x.stride(1),
        TO=to,
        NATIVE=gpu.native,
        SCALES=a.a13_scale.numel() if to == "e4m3" and a.a13_scale is not None else 1,
        GROUPS=GROUPS,
    )
    return Launch(moe_ops_flashinfer_rows, (x.shape[0], cdiv(columns, 32 * GROUPS), 1), args)


def copy_rows(a: ExpertsArgs, out: Tensor) -> None:
    """Copy the input's rows to the first columns of out, multiplied by router weights if these
    scale the input; zeros after them.
    """
    x = a.hidden_states
    if x.dtype.itemsize == 1:  # arrived quantized: bytes are copied
        x, out = x.view(torch.uint8), out.view(torch.uint8)
    K = x.shape[1]
    out[:, K:].zero_()
    if a.options.router_weight_on_input:
        torch.mul(x, a.topk_weights.to(torch.float32), out=out[:, :K])
    else:
        out[:, :K].copy_(x)


def copy_bias(bias: Tensor | None, out: Tensor, order: str) -> None:
    """Copy a bias to out (E, N), of which the rows of weights in `order` may be padded in each
    half, with zeros. None: zeros.
    """
    out.zero_()
    if bias is None:
        return
    if not order:
        out[:, : bias.shape[1]].copy_(bias)
        return
    gate, up = bias.chunk(2, 1) if order == UP_GATE else (bias[:, ::2], bias[:, 1::2])
    for half, part in zip(out.chunk(2, 1), (up, gate), strict=True):
        half[:, : part.shape[1]].copy_(part)
