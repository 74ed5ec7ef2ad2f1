"""A layer of one token with 16-bit activations and weights of 4, 5, 6 or 8 bits, in two launches.
Imported at first launch only.

As in kernels/gemm/gemv.py, weights are loaded into registers and multiplied outside of the tensor
cores. A thread loads a chunk, which is 16 bytes of a row, and the activations of its columns: no
data moves between threads until sums are finished. Products: gemv_dot.py.

Legend: a chunk is 16 bytes of a row, 32 or 16 columns. A K tile of a program has CHUNKS of them in
BLOCK_N rows. Tensors are (BLOCK_N, CHUNKS), and threads are spread over chunks (`load_chunks`).
FORMAT and SCALE as in sm80_mma.py; scales of rows and tensors are read like those of groups.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl

from moe_ops.kernels.activation import Activated
from moe_ops.kernels.configs import LayerConfig
from moe_ops.kernels.device.activations import activate_one, activate_two
from moe_ops.kernels.device.blocks import local_expert
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.launch import (
    Constant,
    Gpu,
    Launch,
    Pointer,
    Runtime,
    Specialized,
    arguments,
    kernel,
    unprefixed,
)
from moe_ops.kernels.mixed_gemm.configs import FORMATS
from moe_ops.kernels.mixed_gemm.gemv_dot import (
    chunk_products,
    load_chunks,
    load_columns,
    word_columns,
)
from moe_ops.kernels.mixed_gemm.operands import E2M1, Format, MixedOperand, MixedPointers
from moe_ops.kernels.place.routing import TokenRouting, route_token
from moe_ops.kernels.rows.scales import flat
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import ExpertsArgs

CHUNK = 16  # bytes of a row that a thread reads at a time, of 5 and 6 bits of either plane
ALL_PAIRS = tl.constexpr(1 << 30)  # passed as top_k, so that every pair is of token 0


@unprefixed
class GemvStrides(NamedTuple):
    """Strides of a weight whose rows are contiguous, and of its scales and bias.

    Kernels are not specialized on those between groups: if they were known to be 1, threads would
    load several scales each and exchange them.
    """

    w_stride_e: Specialized
    w_stride_n: Specialized
    w_scale_stride_e: Specialized
    w_scale_stride_n: Specialized
    w_scale_stride_g: Runtime
    w_zero_stride_e: Specialized
    w_zero_stride_n: Specialized
    w_zero_stride_g: Runtime
    w_factor_stride_e: Specialized
    bias_stride_e: Specialized
    bias_stride_n: Specialized


@unprefixed
class GemvFormat(NamedTuple):
    """How a weight is decoded."""

    FORMAT: Constant
    SCALE: Constant
    SCALE_GROUP: Constant
    ROW_CHUNKS: Constant  # chunks of a row
    FACTOR_STEP: Constant  # between factors of rows, or of their first; 0: one of an expert


@arguments
class Gemm1:
    h: Pointer  # (top_k, I), written
    x: Pointer  # (K,)
    w: Pointer  # (E, N, bytes of K columns)
    pointers: MixedPointers
    routing: TokenRouting  # with router weights, if they scale the input
    I: Specialized
    x_stride_k: Specialized
    strides: GemvStrides
    activation: Activated
    format: GemvFormat
    BLOCK_N: Constant  # rows of w
    BLOCK_K: Constant
    PDL: Constant


@kernel(Gemm1)
def moe_ops_mixed_gemv1(
    h_ptr,
    x_ptr,
    w_ptr,
    w_scale_ptr,
    w_zero_ptr,
    w_factor_ptr,
    bias_ptr,
    ids_ptr,
    map_ptr,
    topk_weights_ptr,
    E,
    num_ids,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    topk_weights_stride_k,
    I,
    x_stride_k,
    w_stride_e,
    w_stride_n,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_g,
    w_zero_stride_e,
    w_zero_stride_n,
    w_zero_stride_g,
    w_factor_stride_e,
    bias_stride_e,
    bias_stride_n,
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    FACTOR_STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = activation(x @ w13.T + bias). Grid: (top_k, tiles of BLOCK_N rows of w13, in which gate
    and up rows are neighbours).
    """
    WORD: tl.constexpr = word_columns(FORMAT)
    CHUNKS: tl.constexpr = BLOCK_K // (4 * WORD)
    EACH: tl.constexpr = 2 if GATED else 1
    BLOCK_I: tl.constexpr = BLOCK_N // EACH
    gdc_wait(PDL)
    # GEMM2's programs load their weights into registers as soon as the last of these programs run.
    gdc_launch_dependents(PDL)
    pair = tl.program_id(0)
    e = local_expert(
        ids_ptr, map_ptr, pair, pair >= 0, E, num_ids, ALL_PAIRS,
        ids_stride_m, ids_stride_k, map_stride,
    )  # fmt: skip
    if e < 0:
        return
    e64 = e.to(tl.int64)
    experts = tl.full((CHUNKS,), 0, tl.int64) + e64
    r = tl.arange(0, BLOCK_N)
    row = tl.minimum(tl.program_id(1) * BLOCK_I + r // EACH, I - 1)
    if GATED:
        row = 2 * row + r % 2 if INTERLEAVED else row + r % 2 * I
    acc = tl.zeros((BLOCK_N, CHUNKS), tl.float32)
    # in two levels they are of scales
    OF_SUMS: tl.constexpr = w_factor_ptr is not None and w_scale_ptr.dtype.element_ty != tl.int8
    for start in tl.range(0, ROW_CHUNKS, CHUNKS, num_stages=1):
        chunk = start + tl.arange(0, CHUNKS)
        here = chunk < ROW_CHUNKS
        w, first, second, zero = load_chunks(
            w_ptr, w_scale_ptr, w_zero_ptr, experts, row, chunk, here, w_stride_e, w_stride_n,
            w_scale_stride_e, w_scale_stride_n, w_scale_stride_g,
            w_zero_stride_e, w_zero_stride_n, w_zero_stride_g, w_factor_ptr, w_factor_stride_e,
            FORMAT, SCALE, SCALE_GROUP, FACTOR_STEP,
        )  # fmt: skip
        # Without it the compiler moves loads to their uses, and fewer are in flight.
        tl.debug_barrier()
        x0, x1, x2, x3 = load_columns(x_ptr, x_stride_k, chunk, here, WORD)
        acc += chunk_products(
            w,
            first,
            second,
            zero,
            x0,
            x1,
            x2,
            x3,
            FORMAT,
            SCALE,
            SCALE_GROUP,
            w_zero_ptr is not None,
        )
    sums = tl.sum(acc, 1)
    if OF_SUMS:
        w_factor_ptr += e64 * w_factor_stride_e
        if FACTOR_STEP == 0:
            sums /= tl.load(w_factor_ptr)
        else:
            sums /= tl.load(w_factor_ptr + row.to(tl.int64) * FACTOR_STEP)
    if topk_weights_ptr is not None:
        sums *= tl.load(topk_weights_ptr + pair * topk_weights_stride_k).to(tl.float32)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + e64 * bias_stride_e + row * bias_stride_n).to(tl.float32)
    if GATED:
        g, u = sums.reshape(BLOCK_I, 2).split()
        h = activate_two(g, u, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        h = activate_one(sums, ACTIVATION)
    column = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    h_ptrs = h_ptr + pair.to(tl.int64) * I + column
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=column < I)


@triton.jit
def load_expert_and_weight(
    pair,  # (n,)
    ids_ptr,
    map_ptr,
    topk_weights_ptr,
    E,
    num_ids,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    topk_weights_stride_k,
    TOP_K: tl.constexpr,
):
    """(local expert as int64, whether it is here, router weight) of pairs."""
    e = local_expert(
        ids_ptr, map_ptr, pair, pair < TOP_K, E, num_ids, ALL_PAIRS,
        ids_stride_m, ids_stride_k, map_stride,
    )  # fmt: skip
    here = e >= 0
    e = tl.maximum(e, 0).to(tl.int64)
    weight = here.to(tl.float32)
    if topk_weights_ptr is not None:
        weight = tl.load(topk_weights_ptr + pair * topk_weights_stride_k, mask=here, other=0.0)
        weight = weight.to(tl.float32)
    return e, here, weight


@arguments
class Gemm2:
    out: Pointer  # (N,), written
    h: Pointer  # (top_k, K), read as one row: the sum is over experts and columns
    w: Pointer  # (E, N, bytes of K columns)
    pointers: MixedPointers
    routing: TokenRouting  # with router weights, if they scale outputs
    N: Specialized
    strides: GemvStrides
    out_stride_n: Specialized
    TOP_K: Constant
    PAIRS: Constant  # a power of two, at least TOP_K
    format: GemvFormat
    BLOCK_N: Constant
    BLOCK_K: Constant
    PDL: Constant


@kernel(Gemm2)
def moe_ops_mixed_gemv2(
    out_ptr,
    h_ptr,
    w_ptr,
    w_scale_ptr,
    w_zero_ptr,
    w_factor_ptr,
    bias_ptr,
    ids_ptr,
    map_ptr,
    topk_weights_ptr,
    E,
    num_ids,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    topk_weights_stride_k,
    N,
    w_stride_e,
    w_stride_n,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_g,
    w_zero_stride_e,
    w_zero_stride_n,
    w_zero_stride_g,
    w_factor_stride_e,
    bias_stride_e,
    bias_stride_n,
    out_stride_n,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    FACTOR_STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = sum over the token's experts of router weight * (h @ w2.T + bias), in fp32, rounded
    once. Grid: tiles of BLOCK_N columns.

    The kernel before this one writes h alone, so weights are loaded before gdc_wait.
    """
    WORD: tl.constexpr = word_columns(FORMAT)
    CHUNKS: tl.constexpr = BLOCK_K // (4 * WORD)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(column, N - 1)
    acc = tl.zeros((BLOCK_N, CHUNKS), tl.float32)
    OF_SUMS: tl.constexpr = w_factor_ptr is not None and w_scale_ptr.dtype.element_ty != tl.int8
    biases = tl.zeros((BLOCK_N,), tl.float32)
    if bias_ptr is not None:
        lane = tl.arange(0, PAIRS)
        e, there, weight = load_expert_and_weight(
            lane, ids_ptr, map_ptr, topk_weights_ptr, E, num_ids,
            ids_stride_m, ids_stride_k, map_stride, topk_weights_stride_k, TOP_K,
        )  # fmt: skip
        bias_ptrs = bias_ptr + (e * bias_stride_e)[:, None] + (row * bias_stride_n)[None, :]
        bias = tl.load(bias_ptrs, mask=there[:, None], other=0.0).to(tl.float32)
        biases = tl.sum(bias * weight[:, None], 0)
    for start in tl.range(0, TOP_K * ROW_CHUNKS, CHUNKS, num_stages=1):
        chunk = start + tl.arange(0, CHUNKS)
        expert, here, factor = load_expert_and_weight(
            chunk // ROW_CHUNKS, ids_ptr, map_ptr, topk_weights_ptr, E, num_ids,
            ids_stride_m, ids_stride_k, map_stride, topk_weights_stride_k, TOP_K,
        )  # fmt: skip
        if OF_SUMS:
            factor_ptrs = w_factor_ptr + expert * w_factor_stride_e
            if FACTOR_STEP == 0:
                factor /= tl.load(factor_ptrs, mask=here, other=1.0)
        w, first, second, zero = load_chunks(
            w_ptr, w_scale_ptr, w_zero_ptr, expert, row, chunk % ROW_CHUNKS, here,
            w_stride_e, w_stride_n, w_scale_stride_e, w_scale_stride_n, w_scale_stride_g,
            w_zero_stride_e, w_zero_stride_n, w_zero_stride_g, w_factor_ptr, w_factor_stride_e,
            FORMAT, SCALE, SCALE_GROUP, FACTOR_STEP,
        )  # fmt: skip
        tl.debug_barrier()  # as in GEMM1
        gdc_wait(PDL)  # once would be enough; again it costs nothing
        x0, x1, x2, x3 = load_columns(h_ptr, 1, chunk, here, WORD)
        part = chunk_products(
            w,
            first,
            second,
            zero,
            x0,
            x1,
            x2,
            x3,
            FORMAT,
            SCALE,
            SCALE_GROUP,
            w_zero_ptr is not None,
        )
        if OF_SUMS and FACTOR_STEP != 0:
            of_rows = factor_ptrs[None, :] + (row.to(tl.int64) * FACTOR_STEP)[:, None]
            part /= tl.load(of_rows, mask=here[None, :], other=1.0)
        acc += part * factor[None, :]
    gdc_launch_dependents(PDL)
    out = tl.sum(acc, 1) + biases
    out_ptrs = out_ptr + column.to(tl.int64) * out_stride_n
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=column < N)


def _columns_of_chunk(of: Format) -> int:
    return 32 if of.bits in (5, 6) else CHUNK * 8 // of.bits


@lru_cache(maxsize=1024)
def _why_not(
    of: Format,
    columns: tuple[int, int],
    strides: tuple[tuple[int, ...], tuple[int, ...]],
    factor_strides: tuple[int, int],
) -> str | None:
    """Why the kernels cannot run with such weights at any address, or None."""
    of_chunk = _columns_of_chunk(of)
    unit = 128 if of.bits in (5, 6) else of_chunk
    if of.name not in FORMATS or of.scale == "weight":
        return f"gemv takes no {of.name} weights whose scales are {of.scale!r}"
    if any([size % unit for size in columns]):
        return (
            f"gemv takes rows of whole chunks, or units of planes, {unit} columns, got {columns}"
        )
    if of.group and of.group % of_chunk and 2 * of.group != of_chunk:
        return f"gemv takes groups of whole chunks or their halves, got {of.group} columns"
    if not all([one[0] % CHUNK == one[1] % CHUNK == 0 and one[2] == 1 for one in strides]):
        return "gemv takes rows that begin at multiples of 16 bytes"
    if any(factor_strides) and of.name not in E2M1 and not of.two_levels:
        return "gemv takes factors of rows of e2m1 weights alone"
    return None


def why_not(w13: MixedOperand, w2: MixedOperand) -> str | None:
    """Why the kernels cannot run with these weights, or None. They take certain formats and
    scales, and load 16 bytes of a row at a time.
    """
    if w2.format.name == "e2m1_words" and not (w13.scales_in_place and w2.scales_in_place):
        return "gemv takes prepared scales that begin at multiples of 16 bytes"
    if (w13.data.data_ptr() | w2.data.data_ptr()) % CHUNK:
        return "gemv takes weights that begin at multiples of 16 bytes"
    factors = (w13.strides.w_factor_stride_n, w2.strides.w_factor_stride_n)
    return _why_not(w2.format, (w13.K, w2.K), (w13.stride, w2.stride), factors)


def why_not_one(w: MixedOperand) -> str | None:
    """`why_not` of one weight, in its natural layout, beside one of another format."""
    if w.data.data_ptr() % CHUNK:
        return "gemv takes weights that begin at multiples of 16 bytes"
    factor = w.strides.w_factor_stride_n
    return _why_not(w.format, (w.K, w.K), (w.stride, w.stride), (factor, factor))


def _strides(w: MixedOperand) -> GemvStrides:
    stride_e, stride_n, _ = w.stride
    se, sn, sg, ze, zn, zg, fe, _, be, bn = w.strides
    return GemvStrides(stride_e, stride_n, se, sn, sg, ze, zn, zg, fe, be, bn)


@lru_cache(maxsize=1024)
def _format(of: Format, K: int, factor_step: int) -> GemvFormat:
    return GemvFormat(of.name, of.scale, of.group, K // _columns_of_chunk(of), factor_step)


def launches(
    a: ExpertsArgs,
    w13: MixedOperand,
    w2: MixedOperand,
    activation: Activated,
    config: LayerConfig,
    gpu: Gpu,
) -> list[Launch]:
    """Both launches of a layer of one token."""
    x, ids, out = a.hidden_states, a.topk_ids, a.out
    E, K, I = w2.E, w2.N, w2.K
    top_k = ids.shape[1]
    h = flat(a.workspace13, x.dtype, top_k * I)
    on_input, on_output = route_token(ids, a.expert_map, a.topk_weights, E)
    if a.options.router_weight_on_input:
        on_input, on_output = on_output, on_input
    first, second = config.gemm1, config.gemm2
    args1 = Gemm1(
        h=h,
        x=x,
        w=w13.data,
        pointers=w13.pointers,
        routing=on_input,
        I=I,
        x_stride_k=x.stride(1),
        strides=_strides(w13),
        activation=activation,
        format=_format(w13.format, w13.K, w13.strides.w_factor_stride_n),
        BLOCK_N=first.block_n,
        BLOCK_K=first.block_k,
        PDL=gpu.pdl,
    )
    args2 = Gemm2(
        out=out,
        h=h,
        w=w2.data,
        pointers=w2.pointers,
        routing=on_output,
        N=K,
        strides=_strides(w2),
        out_stride_n=out.stride(1),
        TOP_K=top_k,
        PAIRS=1 << (top_k - 1).bit_length(),
        format=_format(w2.format, w2.K, w2.strides.w_factor_stride_n),
        BLOCK_N=second.block_n,
        BLOCK_K=second.block_k,
        PDL=gpu.pdl,
    )
    block_i = first.block_n // 2 if activation.GATED else first.block_n
    return [
        Launch(moe_ops_mixed_gemv1, (top_k, cdiv(I, block_i), 1), args1, first.num_warps),
        Launch(moe_ops_mixed_gemv2, (cdiv(K, second.block_n), 1, 1), args2, second.num_warps),
    ]
