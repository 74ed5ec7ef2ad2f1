"""A layer of one token: two matrix-vector products (GEMV). Imported at first launch only.

One token would leave all but one column of a tensor-core instruction empty, and the time is that
of reading the weights once. So weights are loaded into registers and multiplied with x outside of
the tensor cores, without a barrier in every K tile. The second kernel sums over the token's
experts: there is no sorting kernel, no y in memory, and no kernel that combines it.

If the scheme quantizes x and h by groups, every block quantizes them for itself, but for x that
arrives quantized. This is cheaper
than a kernel of its own, because a block reads some rows of a weight and all of x.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.activation import Activated
from moe_ops.kernels.configs import GemmConfig, LayerConfig
from moe_ops.kernels.device.activations import activate_one, activate_two
from moe_ops.kernels.device.blocks import local_expert
from moe_ops.kernels.device.e4m3 import (
    decode,
    decode_activation,
    e4m3_scale,
    near_reciprocal,
    quotient,
    stored,
)
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.gemm.operands import Scaling, Weight
from moe_ops.kernels.launch import (
    Constant,
    Gpu,
    Launch,
    Pointer,
    Specialized,
    arguments,
    kernel,
    unprefixed,
)
from moe_ops.kernels.place.routing import TokenRouting, route_token
from moe_ops.kernels.rows.scales import FEW_ROWS, Input, flat
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import ExpertsArgs


@triton.jit
def round_groups(x, BLOCK_K: tl.constexpr, POWERS: tl.constexpr, NATIVE: tl.constexpr):
    """(fp32 x (BLOCK_K,) rounded to e4m3 numbers with one scale for each group of 128, the scales
    (BLOCK_K // 128,)).
    """
    x = x.reshape(BLOCK_K // 128, 128)
    scale = e4m3_scale(tl.max(tl.abs(x), 1), POWERS)
    # `reciprocal` has a branch across which registers live: GEMM2 would take 156 for 128, and
    # three blocks would fit on a multiprocessor for four.
    code = stored(quotient(x, scale[:, None], near_reciprocal(scale)[:, None]), NATIVE)
    x = (code if NATIVE else decode_activation(code)).to(tl.float32)
    return x.reshape(BLOCK_K), scale


@triton.jit
def repeat_each(scale, TIMES: tl.constexpr):
    """(n,) to (n * TIMES,), with each element TIMES times."""
    n: tl.constexpr = scale.shape[0]
    return tl.broadcast_to(scale[:, None], (n, TIMES)).reshape(n * TIMES)


@triton.jit
def pack_fp16x2(x, BLOCK_K: tl.constexpr):
    """e4m3 numbers x (BLOCK_K,) divided by 64, as pairs of fp16 in 32 bits: four tensors
    (BLOCK_K // 8,), of the first two of each eight numbers, the next two, and so on.
    """
    bits = (x * 0.015625).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    low, high = bits.reshape(BLOCK_K // 2, 2).split()
    even, odd = (low | (high << 16)).reshape(BLOCK_K // 4, 2).split()
    x0, x2 = even.reshape(BLOCK_K // 8, 2).split()
    x1, x3 = odd.reshape(BLOCK_K // 8, 2).split()
    return x0, x1, x2, x3


@triton.jit
def eight_products(w0, w1, x0, x1, x2, x3):
    """fp32 sums of eight products of e4m3 numbers, four in each of w0 and w1, with those of
    `pack_fp16x2`.

    Products are exact in fp16. Four of them are added in fp16, and two such sums in fp32. This
    takes 1.4 instructions a product; conversion to fp32 would take 2.5. Rounding to 11 bits adds
    2e-4 to the relative error of a product.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 a, b; .reg .b32 p, t; .reg .f32 f, g;
        mov.b32 {a, b}, $1;
        cvt.rn.f16x2.e4m3x2 p, a; mul.rn.f16x2 t, p, $3;
        cvt.rn.f16x2.e4m3x2 p, b; fma.rn.f16x2 t, p, $4, t;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 p, a; fma.rn.f16x2 t, p, $5, t;
        cvt.rn.f16x2.e4m3x2 p, b; fma.rn.f16x2 t, p, $6, t;
        mov.b32 {a, b}, t; cvt.f32.f16 f, a; cvt.f32.f16 g, b; add.f32 $0, f, g;
        }""",
        "=r,r,r,r,r,r,r",
        [w0, w1, x0, x1, x2, x3],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.constexpr_function
def elements_of_word(QUANTIZED, NATIVE):
    """Elements of w that are loaded as one word: four e4m3 elements for `eight_products`, else
    one.
    """
    return 4 if QUANTIZED and NATIVE else 1


@triton.constexpr_function
def products_of_sum(WORD, dtype):
    """Adjacent products that are added before they are added to acc: those of 16 bytes of w, or
    `eight_products`.
    """
    return 8 if WORD == 4 else 128 // dtype.primitive_bitwidth


@triton.jit
def words_of(ptr, WORD: tl.constexpr):
    """A pointer to elements as a pointer to words of WORD elements."""
    if WORD == 4:
        return ptr.to(tl.pointer_type(tl.int32))
    else:
        return ptr


@triton.jit
def in_words(elements, WORD: tl.constexpr):
    """A number of elements in words. If WORD > 1, it is known to be a multiple of 16 elements."""
    if WORD == 4:
        return tl.multiple_of(elements // 4, 4)
    else:
        return elements


@triton.jit
def read_once(w_ptrs, mask):
    """Words of weights (ROWS, BLOCK_K // WORD), which no other program reads."""
    return tl.load(w_ptrs, mask=mask[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def accumulate(
    w,  # (ROWS, BLOCK_K // WORD) words
    x,  # (BLOCK_K,) fp32
    x_scale,  # (BLOCK_K // 128,) scales of its groups of 128, if QUANTIZED
    w_scale_ptr,  # scale of the weights' first group; the next are `w_scale_stride_k` apart
    w_scale_stride_k,
    group,  # index of the first group
    groups,  # number of groups
    acc,  # (ROWS, BLOCK_K // SUM)
    factor,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WORD: tl.constexpr,
    SUM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """acc plus factor times the products of w with x, each entry the sum of SUM adjacent
    products.
    """
    if QUANTIZED:
        g = group + tl.arange(0, BLOCK_K // 128)
        w_scale = tl.load(w_scale_ptr + g * w_scale_stride_k, mask=g < groups, other=0.0)
        scale = x_scale * w_scale.to(tl.float32) * factor
    if WORD == 4:
        x0, x1, x2, x3 = pack_fp16x2(x, BLOCK_K)
        w0, w1 = w.reshape(ROWS, BLOCK_K // 8, 2).split()
        part = eight_products(w0, w1, x0[None, :], x1[None, :], x2[None, :], x3[None, :])
        return acc + part * repeat_each(scale * 64.0, 16)[None, :]
    else:
        if QUANTIZED:
            x *= repeat_each(scale, 128)
            if not NATIVE:
                w = decode(w, tl.float16)
        else:
            x *= factor
        product = w.to(tl.float32) * x[None, :]
        return acc + tl.sum(product.reshape(ROWS, BLOCK_K // SUM, SUM), 2)


@unprefixed
class GemvWeight(NamedTuple):
    """A weight and what belongs to it: its pointers. Kernels take these first and numbers after
    them, because ptxas merges loads of neighbouring parameters, and that delays the loads of
    weights if each tensor's strides stand beside its pointer.
    """

    w: Pointer  # (E, N, K)
    w_scale: Pointer  # (E, ceil(N / 128), ceil(K / 128))
    bias: Pointer  # (E, N)


class GemvInput(NamedTuple):
    """The token."""

    ptr: Pointer  # (K,)
    scale: Pointer  # (ceil(K / 128),) if it arrives quantized, or None


@unprefixed
class GemvStrides(NamedTuple):
    """Strides of a GemvWeight, whose rows are contiguous."""

    w_stride_e: Specialized
    w_stride_n: Specialized
    w_scale_stride_e: Specialized
    w_scale_stride_n: Specialized
    w_scale_stride_k: Specialized
    bias_stride_e: Specialized
    bias_stride_n: Specialized


@unprefixed
class GemvSteps(NamedTuple):
    """How a program goes over K columns."""

    ONE_STEP: Constant  # K <= BLOCK_K
    BLOCK_K: Constant
    NUM_STAGES: Constant


@arguments
class Gemm1:
    h: Pointer  # (top_k, I), written
    x: GemvInput
    weight: GemvWeight
    routing: TokenRouting  # with router weights, if they scale the input
    top_k: Specialized
    K: Specialized
    I: Specialized
    x_stride_k: Specialized
    x_scale_stride_g: Specialized
    strides: GemvStrides
    activation: Activated
    scaling: Scaling
    steps: GemvSteps
    BLOCK_I: Constant  # columns of h, each of one or two rows of w
    PDL: Constant


@kernel(Gemm1, pdl_first=True)
def moe_ops_gemv1(
    h_ptr,
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
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
    top_k,
    K,
    I,
    x_stride_k,
    x_scale_stride_g,
    w_stride_e,
    w_stride_n,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_k,
    bias_stride_e,
    bias_stride_n,
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    W_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    POWERS: tl.constexpr,
    NATIVE: tl.constexpr,
    ONE_STEP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = activation(x @ w13.T + bias). Grid: (top_k, tiles of BLOCK_I columns)."""
    # K and I are multiples of 16: tiles are whole, and their rows are in one block of 128 rows.
    tl.static_assert(16 % BLOCK_I == 0)
    QUANTIZED: tl.constexpr = X_SCALE != ""
    WORD: tl.constexpr = elements_of_word(QUANTIZED, NATIVE)
    SUM: tl.constexpr = products_of_sum(WORD, w_ptr.dtype.element_ty)
    gdc_wait(PDL)
    pair = tl.program_id(0)
    e = local_expert(
        ids_ptr, map_ptr, pair, pair >= 0, E, num_ids, top_k,
        ids_stride_m, ids_stride_k, map_stride,
    )  # fmt: skip
    if e < 0:
        return
    e64 = e.to(tl.int64)
    first = tl.program_id(1) * BLOCK_I
    column = first + tl.arange(0, BLOCK_I)
    row = column
    up_row = row
    first_up = first
    if GATED:
        if INTERLEAVED:
            first *= 2
            first_up = first
            row *= 2
            up_row = row + 1
        else:
            first_up += I
            up_row = row + I
    k = tl.arange(0, BLOCK_K)
    words = tl.arange(0, BLOCK_K // WORD)
    w_ptr = words_of(w_ptr + e64 * w_stride_e, WORD)
    row_stride = in_words(w_stride_n, WORD)
    end_word = in_words(K, WORD)
    g_ptrs = w_ptr + row.to(tl.int64)[:, None] * row_stride + words[None, :]
    u_ptrs = w_ptr + up_row.to(tl.int64)[:, None] * row_stride + words[None, :]
    g_scale_ptr = None
    u_scale_ptr = None
    if QUANTIZED:
        w_scale_ptr += e64 * w_scale_stride_e
        g_scale_ptr = w_scale_ptr + first // 128 * w_scale_stride_n
        u_scale_ptr = w_scale_ptr + first_up // 128 * w_scale_stride_n
    groups = tl.cdiv(K, 128)
    # What arrives quantized needs little arithmetic, which then no longer hides what the weights
    # take, so these are asked for first. Where x is quantized here, that would take more
    # registers, and fewer blocks would run at once.
    WEIGHTS_FIRST: tl.constexpr = x_scale_ptr is not None
    # the factor comes before quantization; what arrives quantized is multiplied by it later
    QUANTIZE_PRODUCT: tl.constexpr = QUANTIZED and x_scale_ptr is None
    if topk_weights_ptr is not None:
        factor = tl.load(topk_weights_ptr + pair * topk_weights_stride_k).to(tl.float32)
    g_acc = tl.zeros((BLOCK_I, BLOCK_K // SUM), tl.float32)
    u_acc = g_acc
    for start in tl.range(0, BLOCK_K if ONE_STEP else K, BLOCK_K, num_stages=NUM_STAGES):
        if WEIGHTS_FIRST:
            word = in_words(start, WORD)
            ok = word + words < end_word
            g_w = read_once(g_ptrs + word, ok)
            if GATED:
                u_w = read_once(u_ptrs + word, ok)
        mask = start + k < K
        x = tl.load(x_ptr + (start + k).to(tl.int64) * x_stride_k, mask=mask, other=0.0)
        x_scale = None
        if x_scale_ptr is not None:
            x = (x if NATIVE else decode_activation(x)).to(tl.float32)
            g = start // 128 + tl.arange(0, BLOCK_K // 128)
            x_scale = tl.load(x_scale_ptr + g * x_scale_stride_g, mask=g < groups, other=0.0)
        else:
            x = x.to(tl.float32)
            if QUANTIZED:
                if topk_weights_ptr is not None:
                    x *= factor
                x, x_scale = round_groups(x, BLOCK_K, POWERS, NATIVE)
        if not WEIGHTS_FIRST:
            word = in_words(start, WORD)
            ok = word + words < end_word
            g_w = read_once(g_ptrs + word, ok)
        g_acc = accumulate(
            g_w, x, x_scale, g_scale_ptr, w_scale_stride_k, start // 128, groups,
            g_acc, 1.0, BLOCK_I, BLOCK_K, WORD, SUM, QUANTIZED, NATIVE,
        )  # fmt: skip
        if GATED:
            if not WEIGHTS_FIRST:
                u_w = read_once(u_ptrs + word, ok)
            u_acc = accumulate(
                u_w, x, x_scale, u_scale_ptr, w_scale_stride_k, start // 128, groups,
                u_acc, 1.0, BLOCK_I, BLOCK_K, WORD, SUM, QUANTIZED, NATIVE,
            )  # fmt: skip
    gdc_launch_dependents(PDL)
    g = tl.sum(g_acc, 1)
    u = tl.sum(u_acc, 1)
    if topk_weights_ptr is not None and not QUANTIZE_PRODUCT:
        g *= factor
        u *= factor
    if bias_ptr is not None:
        bias_ptr += e64 * bias_stride_e
        g += tl.load(bias_ptr + row * bias_stride_n).to(tl.float32)
        u += tl.load(bias_ptr + up_row * bias_stride_n).to(tl.float32)
    if GATED:
        h = activate_two(g, u, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        h = activate_one(g, ACTIVATION)
    h_ptrs = h_ptr + pair.to(tl.int64) * I + column
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty))


@arguments
class Gemm2:
    out: Pointer  # (N,), written
    h: Pointer  # (top_k, K)
    weight: GemvWeight
    routing: TokenRouting  # with router weights, if they scale outputs
    K: Specialized
    N: Specialized
    strides: GemvStrides
    out_stride_n: Specialized
    TOP_K: Constant
    scaling: Scaling
    steps: GemvSteps
    BLOCK_N: Constant
    PDL: Constant


@kernel(Gemm2)
def moe_ops_gemv2(
    out_ptr,
    h_ptr,
    w_ptr,
    w_scale_ptr,
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
    K,
    N,
    w_stride_e,
    w_stride_n,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_k,
    bias_stride_e,
    bias_stride_n,
    out_stride_n,
    TOP_K: tl.constexpr,
    W_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    POWERS: tl.constexpr,
    NATIVE: tl.constexpr,
    ONE_STEP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = sum over the token's experts of router weight * (h @ w2.T + bias), in fp32, rounded
    once. Grid: tiles of BLOCK_N columns.
    """
    tl.static_assert(16 % BLOCK_N == 0)  # as in GEMM1
    QUANTIZED: tl.constexpr = X_SCALE != ""
    WORD: tl.constexpr = elements_of_word(QUANTIZED, NATIVE)
    SUM: tl.constexpr = products_of_sum(WORD, w_ptr.dtype.element_ty)
    first = tl.program_id(0) * BLOCK_N
    row = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    words = tl.arange(0, BLOCK_K // WORD)
    w_ptr = words_of(w_ptr, WORD)
    row_stride = in_words(w_stride_n, WORD)
    expert_stride = in_words(w_stride_e, WORD)
    end_word = in_words(K, WORD)
    w_ptrs = w_ptr + row.to(tl.int64)[:, None] * row_stride + words[None, :]
    groups = tl.cdiv(K, 128)
    acc = tl.zeros((BLOCK_N, BLOCK_K // SUM), tl.float32)
    biases = tl.zeros((BLOCK_N,), tl.float32)
    gdc_wait(PDL)
    for j in tl.static_range(TOP_K):
        pair = tl.zeros((), tl.int32) + j
        e = local_expert(
            ids_ptr, map_ptr, pair, pair >= 0, E, num_ids, TOP_K,
            ids_stride_m, ids_stride_k, map_stride,
        )  # fmt: skip
        e64 = tl.maximum(e, 0).to(tl.int64)
        # For an expert that is not here nothing is loaded; its pointers are those of expert 0.
        end = tl.where(e >= 0, K, 0)
        end_group = tl.where(e >= 0, groups, 0)
        e_scale_ptr = None
        if QUANTIZED:
            e_scale_ptr = w_scale_ptr + e64 * w_scale_stride_e + first // 128 * w_scale_stride_n
        factor = 1.0
        if topk_weights_ptr is not None:
            factor = tl.load(topk_weights_ptr + j * topk_weights_stride_k, mask=e >= 0, other=0.0)
            factor = factor.to(tl.float32)
        for start in tl.range(0, BLOCK_K if ONE_STEP else K, BLOCK_K, num_stages=NUM_STAGES):
            h_ptrs = h_ptr + j * K + start + k
            x = tl.load(h_ptrs, mask=start + k < end, other=0.0).to(tl.float32)
            x_scale = None
            if QUANTIZED:
                x, x_scale = round_groups(x, BLOCK_K, POWERS, NATIVE)
            word = in_words(start, WORD)
            mask = word + words < tl.where(e >= 0, end_word, 0)
            w = read_once(w_ptrs + e64 * expert_stride + word, mask)
            acc = accumulate(
                w, x, x_scale, e_scale_ptr, w_scale_stride_k, start // 128, end_group, acc, factor,
                BLOCK_N, BLOCK_K, WORD, SUM, QUANTIZED, NATIVE,
            )  # fmt: skip
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + e64 * bias_stride_e + row * bias_stride_n
            bias = tl.load(bias_ptrs, mask=row < tl.where(e >= 0, N, 0), other=0.0)
            biases += factor * bias.to(tl.float32)
    gdc_launch_dependents(PDL)
    out = tl.sum(acc, 1) + biases
    out_ptrs = out_ptr + row.to(tl.int64) * out_stride_n
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty))


@lru_cache(maxsize=1024)
def _why_not(
    shape: torch.Size,
    w13_strides: tuple[int, ...],
    w2_strides: tuple[int, ...],
    itemsize: int,
    scaling: Scaling,
    top_k: int,
) -> str | None:
    E, K, I = shape
    w_scale, x_scale, *_ = scaling
    if w_scale and (w_scale, x_scale) != ("block", "group"):
        return "weights must be plain, or e4m3 with scales by blocks"
    if x_scale and top_k > FEW_ROWS * E:
        return "the workspace has no place for h in fp32"
    if any(stride * itemsize % 16 for stride in (*w13_strides[:2], *w2_strides[:2])):
        return "rows of weights must start at multiples of 16 bytes"
    if w13_strides[2] != 1 or w2_strides[2] != 1:
        return "rows of weights must be contiguous"
    if K % 16 or I % 16:
        return "K and I must be multiples of 16"
    return None


def why_not(w13: Weight, w2: Weight, top_k: int, scaling: Scaling) -> str | None:
    """Why these kernels cannot run a layer of one token, or None."""
    one, two = w13.data, w2.data
    if (one.data_ptr() | two.data_ptr()) % 16:
        return "weights must start at multiples of 16 bytes"
    return _why_not(two.shape, one.stride(), two.stride(), two.dtype.itemsize, scaling, top_k)


def _weight(w: Weight, bias: Tensor | None) -> tuple[GemvWeight, GemvStrides]:
    ptr, stride_e, stride_n, _, scale, se, sn, sk = w
    be, bn = (0, 0) if bias is None else bias.stride()
    return GemvWeight(ptr, scale, bias), GemvStrides(stride_e, stride_n, se, sn, sk, be, bn)


@lru_cache(maxsize=1024)
def _steps(config: GemmConfig, K: int) -> GemvSteps:
    return GemvSteps(config.block_k >= K, config.block_k, config.num_stages)


def launches(
    a: ExpertsArgs,
    x: Input,
    w13: Weight,
    w2: Weight,
    activation: Activated,
    scaling: Scaling,
    config: LayerConfig,
    gpu: Gpu,
) -> list[Launch]:
    """Both launches of a layer of one token."""
    ids, out = a.topk_ids, a.out
    (E, K, I), top_k = w2.data.shape, ids.shape[1]
    h = flat(a.workspace13, torch.float32 if scaling.X_SCALE else x.data.dtype, top_k * I)
    on_input, on_output = route_token(ids, a.expert_map, a.topk_weights, E)
    if a.options.router_weight_on_input:
        on_input, on_output = on_output, on_input
    one, two = config.gemm1, config.gemm2
    weight, strides = _weight(w13, a.w13_bias)
    first = Gemm1(
        h=h,
        x=GemvInput(x.ptr, x.scale),
        weight=weight,
        routing=on_input,
        top_k=top_k,
        K=K,
        I=I,
        x_stride_k=x.stride_k,
        x_scale_stride_g=x.scale_stride_g,
        strides=strides,
        activation=activation,
        scaling=scaling,
        steps=_steps(one, K),
        BLOCK_I=one.block_n,
        PDL=gpu.pdl,
    )
    weight, strides = _weight(w2, a.w2_bias)
    second = Gemm2(
        out=out,
        h=h,
        weight=weight,
        routing=on_output,
        K=I,
        N=K,
        strides=strides,
        out_stride_n=out.stride(1),
        TOP_K=top_k,
        scaling=scaling,
        steps=_steps(two, I),
        BLOCK_N=two.block_n,
        PDL=gpu.pdl,
    )
    return [
        Launch(moe_ops_gemv1, (top_k, cdiv(I, one.block_n), 1), first, one.num_warps),
        Launch(moe_ops_gemv2, (cdiv(K, two.block_n), 1, 1), second, two.num_warps),
    ]
