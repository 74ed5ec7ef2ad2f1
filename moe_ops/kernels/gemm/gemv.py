"""A layer of one token: two matrix-vector products. Imported at first launch only.

One token leaves a tensor core's tile of tokens empty but for one, and what is left to do is to
read weights once. So weights go from memory to registers and meet x in ordinary multiplications,
no block waits for its neighbours at every step, and the second kernel sums a token's experts
itself: no sort, no products in memory, no kernel that combines them.

x and h are quantized by groups where the scheme says so, by every block for itself, which is
cheaper than a kernel of its own: a block reads some rows of a weight and all of x.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from moe_ops.kernels.configs import LayerConfig
from moe_ops.kernels.device.activations import activate_one, activate_two
from moe_ops.kernels.device.blocks import local_expert
from moe_ops.kernels.device.e4m3 import (
    decode,
    decode_activation,
    e4m3_scale,
    quotient,
    reciprocal,
    stored,
)
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.gemm.operands import Activated, Bias, Output, Scaling, Weight, bias_of
from moe_ops.kernels.launch import (
    Constant,
    Gpu,
    Launch,
    Pointer,
    Specialized,
    arguments,
    kernel,
)
from moe_ops.kernels.permute.rows import (
    NO_ROUTER_WEIGHTS,
    RouterWeights,
    Routing,
    route_pairs,
    router_weights,
)
from moe_ops.kernels.quantize.scales import FEW_ROWS, Input, flat
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.args import ExpertsArgs


@triton.jit
def round_groups(x, BLOCK_K: tl.constexpr, NATIVE: tl.constexpr):
    """(fp32 x (BLOCK_K,) rounded to e4m3 numbers, groups of 128 by a scale each, the scales
    (BLOCK_K // 128,)).
    """
    x = x.reshape(BLOCK_K // 128, 128)
    scale = e4m3_scale(tl.max(tl.abs(x), 1))
    code = stored(quotient(x, scale[:, None], reciprocal(scale)[:, None]), NATIVE)
    x = (code if NATIVE else decode_activation(code)).to(tl.float32)
    return x.reshape(BLOCK_K), scale


@triton.jit
def repeat_each(scale, TIMES: tl.constexpr):
    """(n,) to (n * TIMES,)."""
    n: tl.constexpr = scale.shape[0]
    return tl.broadcast_to(scale[:, None], (n, TIMES)).reshape(n * TIMES)


@triton.jit
def pack_fp16x2(x, BLOCK_K: tl.constexpr):
    """e4m3 numbers x (BLOCK_K,) over 64, as fp16 two in 32 bits: of each eight (BLOCK_K // 8,) the
    first two, the next, ...
    """
    bits = (x * 0.015625).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    low, high = bits.reshape(BLOCK_K // 2, 2).split()
    even, odd = (low | (high << 16)).reshape(BLOCK_K // 4, 2).split()
    x0, x2 = even.reshape(BLOCK_K // 8, 2).split()
    x1, x3 = odd.reshape(BLOCK_K // 8, 2).split()
    return x0, x1, x2, x3


@triton.jit
def eight_products(w0, w1, x0, x1, x2, x3):
    """Sums of eight products of e4m3 numbers, four in 32 bits, with such over 64 as `pack_fp16x2`
    has them, fp32.

    Products are exact in fp16, and four are added in it before two such sums are in fp32: 1.4
    instructions a product where conversion to fp32 takes 2.5. Rounding to 11 bits adds 2e-4 to a
    product's relative error.
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
    """Elements of w that are loaded as one number: four of e4m3 for `eight_products`."""
    return 4 if QUANTIZED and NATIVE else 1


@triton.constexpr_function
def products_of_sum(WORD, dtype):
    """Adjacent products that are added up at once: those of 16 bytes, or `eight_products`."""
    return 8 if WORD == 4 else 128 // dtype.primitive_bitwidth


@triton.jit
def words_of(ptr, WORD: tl.constexpr):
    """A pointer to elements, WORD of them at a time."""
    if WORD == 4:
        return ptr.to(tl.pointer_type(tl.int32))
    else:
        return ptr


@triton.jit
def in_words(elements, WORD: tl.constexpr):
    """A number of elements, of those that are loaded as words a multiple of 16, in words."""
    if WORD == 4:
        return tl.multiple_of(elements // 4, 4)
    else:
        return elements


@triton.jit
def accumulate(
    w_ptrs,  # (ROWS, BLOCK_K), of WORD elements each (ROWS, BLOCK_K // WORD)
    mask,  # (BLOCK_K // WORD,)
    x,  # (BLOCK_K,) fp32
    x_scale,  # scales of its groups of 128 where QUANTIZED, (BLOCK_K // 128,)
    w_scale_ptr,  # those of the weights' groups: of the first, one every `w_scale_stride_k`
    w_scale_stride_k,
    group,  # the first one's index
    groups,  # in all
    acc,  # (ROWS, BLOCK_K // SUM)
    factor,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WORD: tl.constexpr,
    SUM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """acc plus factor times the products of w with x, SUM adjacent ones together."""
    w = tl.load(w_ptrs, mask=mask[None, :], other=0, eviction_policy="evict_first")
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


@arguments
class Gemm1:
    h: Pointer  # (top_k, I), written
    x: Input  # (1, K)
    w: Weight  # (E, N, K), scales (E, ceil(N / 128), ceil(K / 128))
    bias: Bias  # (E, N)
    routing: Routing
    topk_weights: RouterWeights  # (1, top_k), where they scale the input
    K: Specialized
    I: Specialized
    activation: Activated
    scaling: Scaling
    ONE_STEP: Constant  # K <= BLOCK_K
    BLOCK_I: Constant  # columns of h, each of one or two rows of w
    BLOCK_K: Constant
    NUM_STAGES: Constant
    PDL: Constant


@kernel(Gemm1, pdl_first=True)
def moe_ops_vector_gemm1(
    h_ptr,
    x_ptr,
    x_stride_e,
    x_stride_m,
    x_stride_k,
    x_scale_ptr,
    x_scale_stride_m,
    x_scale_stride_g,
    x_partials: tl.constexpr,
    w_ptr,
    w_stride_e,
    w_stride_n,
    w_stride_k,
    w_scale_ptr,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_k,
    bias_ptr,
    bias_stride_e,
    bias_stride_n,
    index_ptr,
    ids_ptr,
    map_ptr,
    num_blocks,
    E,
    num_ids,
    top_k,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    ROWS: tl.constexpr,
    topk_weights_ptr,
    topk_weights_stride_m,
    topk_weights_stride_k,
    K,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    W_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
    ONE_STEP: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = activation(x @ w13.T + bias): a program an expert and BLOCK_I columns."""
    # K and I are multiples of 16: programs have whole tiles, whose rows lie in one block of 128
    # rows.
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
    g_acc = tl.zeros((BLOCK_I, BLOCK_K // SUM), tl.float32)
    u_acc = g_acc
    for start in tl.range(0, BLOCK_K if ONE_STEP else K, BLOCK_K, num_stages=NUM_STAGES):
        mask = start + k < K
        x = tl.load(x_ptr + (start + k).to(tl.int64) * x_stride_k, mask=mask, other=0.0)
        x = x.to(tl.float32)
        x_scale = None
        if QUANTIZED:
            x, x_scale = round_groups(x, BLOCK_K, NATIVE)
        word = in_words(start, WORD)
        mask = word + words < end_word
        g_acc = accumulate(
            g_ptrs + word, mask, x, x_scale, g_scale_ptr, w_scale_stride_k, start // 128, groups,
            g_acc, 1.0, BLOCK_I, BLOCK_K, WORD, SUM, QUANTIZED, NATIVE,
        )  # fmt: skip
        if GATED:
            u_acc = accumulate(
                u_ptrs + word, mask, x, x_scale, u_scale_ptr, w_scale_stride_k, start // 128,
                groups, u_acc, 1.0, BLOCK_I, BLOCK_K, WORD, SUM, QUANTIZED, NATIVE,
            )  # fmt: skip
    gdc_launch_dependents(PDL)
    g = tl.sum(g_acc, 1)
    u = tl.sum(u_acc, 1)
    if topk_weights_ptr is not None:
        factor = tl.load(topk_weights_ptr + pair * topk_weights_stride_k).to(tl.float32)
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
    out: Output  # (1, N), written
    h: Pointer  # (top_k, K)
    w: Weight  # (E, N, K), scales (E, ceil(N / 128), ceil(K / 128))
    bias: Bias  # (E, N)
    routing: Routing
    topk_weights: RouterWeights  # (1, top_k), where they scale the experts' rows
    K: Specialized
    N: Specialized
    TOP_K: Constant
    scaling: Scaling
    ONE_STEP: Constant  # K <= BLOCK_K
    BLOCK_N: Constant
    BLOCK_K: Constant
    NUM_STAGES: Constant
    PDL: Constant


@kernel(Gemm2)
def moe_ops_vector_gemm2(
    out_ptr,
    out_stride_e,
    out_stride_m,
    out_stride_n,
    h_ptr,
    w_ptr,
    w_stride_e,
    w_stride_n,
    w_stride_k,
    w_scale_ptr,
    w_scale_stride_e,
    w_scale_stride_n,
    w_scale_stride_k,
    bias_ptr,
    bias_stride_e,
    bias_stride_n,
    index_ptr,
    ids_ptr,
    map_ptr,
    num_blocks,
    E,
    num_ids,
    top_k,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    ROWS: tl.constexpr,
    topk_weights_ptr,
    topk_weights_stride_m,
    topk_weights_stride_k,
    K,
    N,
    TOP_K: tl.constexpr,
    W_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
    ONE_STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = the sum over the token's experts of router weight * (h @ w2.T + bias), in fp32,
    rounded once: a program BLOCK_N columns.
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
        # Of an expert that is not here nothing is loaded; its pointers are those of the first.
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
                x, x_scale = round_groups(x, BLOCK_K, NATIVE)
            word = in_words(start, WORD)
            mask = word + words < tl.where(e >= 0, end_word, 0)
            acc = accumulate(
                w_ptrs + e64 * expert_stride + word, mask, x, x_scale, e_scale_ptr,
                w_scale_stride_k, start // 128, end_group, acc, factor,
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
    E, K, I = shape  # noqa: E741
    w_scale, x_scale, _ = scaling
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


def launches(
    a: ExpertsArgs,
    w13: Weight,
    w2: Weight,
    activation: Activated,
    scaling: Scaling,
    config: LayerConfig,
    gpu: Gpu,
) -> list[Launch]:
    """Both launches of a layer of one token."""
    x, ids = a.hidden_states, a.topk_ids
    (E, K, I), top_k = w2.data.shape, ids.shape[1]  # noqa: E741
    h = flat(a.workspace13, torch.float32 if scaling.X_SCALE else x.dtype, top_k * I)
    routing = route_pairs(a.index_workspace, ids, a.expert_map, E, top_k, direct=True)
    weights = router_weights(a.topk_weights)
    on_input, on_output = weights, NO_ROUTER_WEIGHTS
    if not a.router_weight_on_input:
        on_input, on_output = on_output, on_input
    one, two = config.gemm1, config.gemm2
    first = Gemm1(
        h=h,
        x=Input(x, 0, 0, x.stride(1)),
        w=w13,
        bias=bias_of(a.w13_bias),
        routing=routing,
        topk_weights=on_input,
        K=K,
        I=I,
        activation=activation,
        scaling=scaling,
        ONE_STEP=one.block_k >= K,
        BLOCK_I=one.block_n,
        BLOCK_K=one.block_k,
        NUM_STAGES=one.num_stages,
        PDL=gpu.pdl,
    )
    second = Gemm2(
        out=Output(a.out, 0, 0, a.out.stride(1)),
        h=h,
        w=w2,
        bias=bias_of(a.w2_bias),
        routing=routing,
        topk_weights=on_output,
        K=I,
        N=K,
        TOP_K=top_k,
        scaling=scaling,
        ONE_STEP=two.block_k >= I,
        BLOCK_N=two.block_n,
        BLOCK_K=two.block_k,
        NUM_STAGES=two.num_stages,
        PDL=gpu.pdl,
    )
    return [
        Launch(moe_ops_vector_gemm1, (top_k, cdiv(I, one.block_n), 1), first, one.num_warps),
        Launch(moe_ops_vector_gemm2, (cdiv(K, two.block_n), 1, 1), second, two.num_warps),
    ]
