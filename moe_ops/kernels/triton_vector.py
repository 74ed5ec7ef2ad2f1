"""Triton kernels of a layer of one token: two products of matrices with vectors. Imported at first launch only.

One token leaves a tensor core's tile of tokens empty but for one, and what is left to do is to read weights once. So
weights go from memory to registers and meet x in ordinary multiplications, no block waits for its neighbours at every
step, and the second kernel adds a token's experts up itself: no sort, no products in memory, no kernel that sums them.

x and h are quantized by groups where the scheme says so, by every block for itself, which is cheaper than a kernel of
its own: a block reads some rows of a weight and all of x.
"""

import triton
import triton.language as tl

from moe_ops.kernels.triton_activations import activate_one, activate_two
from moe_ops.kernels.triton_fp8 import (
    decode,
    decode_activation,
    e4m3_scale,
    quotient,
    reciprocal,
    stored,
)
from moe_ops.kernels.triton_routing import local_expert, start_dependent, wait

# Arguments that follow the routing tensors: no kernel is compiled anew for a value of theirs.
ROUTING = ["E", "num_ids", "stride_im", "stride_ik", "stride_map", "stride_tk"]


@triton.jit
def rounded(x, BK: tl.constexpr, NATIVE: tl.constexpr):
    """(fp32 x (BK,) rounded to e4m3 numbers, groups of 128 by a scale each, the scales (BK // 128,))."""
    x = x.reshape(BK // 128, 128)
    scale = e4m3_scale(tl.max(tl.abs(x), 1))
    code = stored(quotient(x, scale[:, None], reciprocal(scale)[:, None]), NATIVE)
    x = (code if NATIVE else decode_activation(code)).to(tl.float32)
    return x.reshape(BK), scale


@triton.jit
def spread(scale, EACH: tl.constexpr):
    """(n,) to (n * EACH,)."""
    n: tl.constexpr = scale.shape[0]
    return tl.broadcast_to(scale[:, None], (n, EACH)).reshape(n * EACH)


@triton.jit
def halves(x, BK: tl.constexpr):
    """e4m3 numbers x (BK,) over 64, as fp16 two in 32 bits: of each eight (BK // 8,) the first two, the next, ..."""
    bits = (x * 0.015625).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    low, high = bits.reshape(BK // 2, 2).split()
    even, odd = (low | (high << 16)).reshape(BK // 4, 2).split()
    x0, x2 = even.reshape(BK // 8, 2).split()
    x1, x3 = odd.reshape(BK // 8, 2).split()
    return x0, x1, x2, x3


@triton.jit
def eight_products(w0, w1, x0, x1, x2, x3):
    """Sums of eight products of e4m3 numbers, four in 32 bits, with such over 64 as `halves` has them, fp32.

    Products are exact in fp16, and four are added in it before two such sums are in fp32: 1.4 instructions a product
    where conversion to fp32 takes 2.5. Rounding to 11 bits adds 2e-4 to a product's relative error.
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
def word(QUANTIZED, NATIVE):
    """Elements of w that are read as one number: four of e4m3 for `eight_products`."""
    return 4 if QUANTIZED and NATIVE else 1


@triton.constexpr_function
def neighbours(WORD, dtype):
    """Neighbours whose products are added up at once: those of 16 bytes, or `eight_products`."""
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
    """A number of elements, of those that are read as words a multiple of 16, in words."""
    if WORD == 4:
        return tl.multiple_of(elements // 4, 4)
    else:
        return elements


@triton.jit
def sums(
    ptrs,  # (ROWS, BK), of WORD elements each (ROWS, BK // WORD)
    here,  # (BK // WORD,)
    x,  # (BK,) fp32
    x_scale,  # scales of its groups of 128 where QUANTIZED, (BK // 128,)
    scale_ptr,  # those of the weights' groups: the first, one every `stride`, `groups` in all
    stride,
    group,
    groups,
    acc,  # (ROWS, BK // EACH)
    factor,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    WORD: tl.constexpr,
    EACH: tl.constexpr,
    QUANTIZED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """acc plus factor times the products of w with x, of EACH neighbours together."""
    w = tl.load(ptrs, mask=here[None, :], other=0, eviction_policy="evict_first")
    if QUANTIZED:
        g = group + tl.arange(0, BK // 128)
        w_scale = tl.load(scale_ptr + g * stride, mask=g < groups, other=0.0).to(tl.float32)
        scale = x_scale * w_scale * factor
    if WORD == 4:
        x0, x1, x2, x3 = halves(x, BK)
        w0, w1 = w.reshape(ROWS, BK // 8, 2).split()
        part = eight_products(w0, w1, x0[None, :], x1[None, :], x2[None, :], x3[None, :])
        return acc + part * spread(scale * 64.0, 16)[None, :]
    else:
        if QUANTIZED:
            x *= spread(scale, 128)
            if not NATIVE:
                w = decode(w, tl.float16)
        else:
            x *= factor
        product = w.to(tl.float32) * x[None, :]
        return acc + tl.sum(product.reshape(ROWS, BK // EACH, EACH), 2)


@triton.jit(do_not_specialize=ROUTING)
def moe_ops_vector_gemm1(
    h_ptr,  # (top_k, I), written
    x_ptr,  # (K,)
    w_ptr,  # (E, N, K)
    scale_ptr,  # (E, ceil(N / 128), ceil(K / 128)) where QUANTIZED
    bias_ptr,  # (E, N) or absent
    ids_ptr,  # (1, top_k)
    map_ptr,
    topk_weights_ptr,  # (1, top_k) to multiply the input by, or absent
    E,
    num_ids,
    stride_im,
    stride_ik,
    stride_map,
    stride_tk,
    top_k,
    K,
    I,  # noqa: E741
    stride_xk,
    stride_we,
    stride_wn,
    stride_se,
    stride_sn,
    stride_sk,
    stride_be,
    stride_bn,
    alpha,
    beta,
    limit,
    HAS_MAP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    NATIVE: tl.constexpr,
    ONE_STEP: tl.constexpr,  # K <= BK
    BN: tl.constexpr,  # columns of h, each of one or two rows of w
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """h = activation(x @ w13.T + bias): a program an expert and BN columns."""
    # K and I are multiples of 16: programs have whole tiles, whose rows lie in one block of 128 rows.
    tl.static_assert(16 % BN == 0)
    WORD: tl.constexpr = word(QUANTIZED, NATIVE)
    EACH: tl.constexpr = neighbours(WORD, w_ptr.dtype.element_ty)
    wait(DEPENDENT)
    pair = tl.program_id(0)
    e = local_expert(
        ids_ptr, map_ptr, pair, pair >= 0, E, num_ids, top_k,
        stride_im, stride_ik, stride_map, HAS_MAP,
    )  # fmt: skip
    if e < 0:
        return
    e64 = e.to(tl.int64)
    first = tl.program_id(1) * BN
    column = first + tl.arange(0, BN)
    row = column
    up = row
    first_up = first
    if GATED:
        if INTERLEAVED:
            first *= 2
            first_up = first
            row *= 2
            up = row + 1
        else:
            first_up += I
            up = row + I
    k = tl.arange(0, BK)
    words = tl.arange(0, BK // WORD)
    w_ptr = words_of(w_ptr + e64 * stride_we, WORD)
    step = in_words(stride_wn, WORD)
    end_word = in_words(K, WORD)
    g_ptrs = w_ptr + row.to(tl.int64)[:, None] * step + words[None, :]
    u_ptrs = w_ptr + up.to(tl.int64)[:, None] * step + words[None, :]
    gate_scale_ptr = None
    up_scale_ptr = None
    if QUANTIZED:
        scale_ptr += e64 * stride_se
        gate_scale_ptr = scale_ptr + first // 128 * stride_sn
        up_scale_ptr = scale_ptr + first_up // 128 * stride_sn
    groups = tl.cdiv(K, 128)
    gate = tl.zeros((BN, BK // EACH), tl.float32)
    linear = gate
    for start in tl.range(0, BK if ONE_STEP else K, BK, num_stages=STAGES):
        here = start + k < K
        x = tl.load(x_ptr + (start + k).to(tl.int64) * stride_xk, mask=here, other=0.0)
        x = x.to(tl.float32)
        x_scale = None
        if QUANTIZED:
            x, x_scale = rounded(x, BK, NATIVE)
        at = in_words(start, WORD)
        here = at + words < end_word
        gate = sums(
            g_ptrs + at, here, x, x_scale, gate_scale_ptr, stride_sk, start // 128, groups,
            gate, 1.0, BN, BK, WORD, EACH, QUANTIZED, NATIVE,
        )  # fmt: skip
        if GATED:
            linear = sums(
                u_ptrs + at, here, x, x_scale, up_scale_ptr, stride_sk, start // 128, groups,
                linear, 1.0, BN, BK, WORD, EACH, QUANTIZED, NATIVE,
            )  # fmt: skip
    start_dependent(DEPENDENT)
    g = tl.sum(gate, 1)
    u = tl.sum(linear, 1)
    if topk_weights_ptr is not None:
        factor = tl.load(topk_weights_ptr + pair * stride_tk).to(tl.float32)
        g *= factor
        u *= factor
    if bias_ptr is not None:
        bias_ptr += e64 * stride_be
        g += tl.load(bias_ptr + row * stride_bn).to(tl.float32)
        u += tl.load(bias_ptr + up * stride_bn).to(tl.float32)
    if GATED:
        h = activate_two(g, u, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        h = activate_one(g, ACTIVATION)
    h_ptrs = h_ptr + pair.to(tl.int64) * I + column
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=ROUTING)
def moe_ops_vector_gemm2(
    out_ptr,  # (N,), written
    h_ptr,  # (top_k, K)
    w_ptr,  # (E, N, K)
    scale_ptr,
    bias_ptr,
    ids_ptr,
    map_ptr,
    topk_weights_ptr,  # to multiply the experts' rows by, or absent
    E,
    num_ids,
    stride_im,
    stride_ik,
    stride_map,
    stride_tk,
    K,
    N,
    stride_we,
    stride_wn,
    stride_se,
    stride_sn,
    stride_sk,
    stride_be,
    stride_bn,
    stride_ok,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    NATIVE: tl.constexpr,
    ONE_STEP: tl.constexpr,  # K <= BK
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out = the sum over the token's experts of router weight * (h @ w2.T + bias), in fp32, rounded once: a program
    BN columns."""
    tl.static_assert(16 % BN == 0)  # as in GEMM1
    WORD: tl.constexpr = word(QUANTIZED, NATIVE)
    EACH: tl.constexpr = neighbours(WORD, w_ptr.dtype.element_ty)
    first = tl.program_id(0) * BN
    row = first + tl.arange(0, BN)
    k = tl.arange(0, BK)
    words = tl.arange(0, BK // WORD)
    w_ptr = words_of(w_ptr, WORD)
    step = in_words(stride_wn, WORD)
    expert_step = in_words(stride_we, WORD)
    end_word = in_words(K, WORD)
    w_ptrs = w_ptr + row.to(tl.int64)[:, None] * step + words[None, :]
    groups = tl.cdiv(K, 128)
    acc = tl.zeros((BN, BK // EACH), tl.float32)
    biases = tl.zeros((BN,), tl.float32)
    wait(DEPENDENT)
    for j in tl.static_range(TOP_K):
        pair = tl.zeros((), tl.int32) + j
        e = local_expert(
            ids_ptr, map_ptr, pair, pair >= 0, E, num_ids, TOP_K,
            stride_im, stride_ik, stride_map, HAS_MAP,
        )  # fmt: skip
        e64 = tl.maximum(e, 0).to(tl.int64)
        # nothing of an expert that is not here: it is read as the first
        end = tl.where(e >= 0, K, 0)
        here_groups = tl.where(e >= 0, groups, 0)
        block_scale_ptr = None
        if QUANTIZED:
            block_scale_ptr = scale_ptr + e64 * stride_se + first // 128 * stride_sn
        factor = 1.0
        if topk_weights_ptr is not None:
            factor = tl.load(topk_weights_ptr + j * stride_tk, mask=e >= 0, other=0.0)
            factor = factor.to(tl.float32)
        for start in tl.range(0, BK if ONE_STEP else K, BK, num_stages=STAGES):
            h_ptrs = h_ptr + j * K + start + k
            x = tl.load(h_ptrs, mask=start + k < end, other=0.0).to(tl.float32)
            x_scale = None
            if QUANTIZED:
                x, x_scale = rounded(x, BK, NATIVE)
            at = in_words(start, WORD)
            here = at + words < tl.where(e >= 0, end_word, 0)
            acc = sums(
                w_ptrs + e64 * expert_step + at, here, x, x_scale, block_scale_ptr,
                stride_sk, start // 128, here_groups, acc, factor,
                BN, BK, WORD, EACH, QUANTIZED, NATIVE,
            )  # fmt: skip
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + e64 * stride_be + row * stride_bn
            bias = tl.load(bias_ptrs, mask=row < tl.where(e >= 0, N, 0), other=0.0)
            biases += factor * bias.to(tl.float32)
    start_dependent(DEPENDENT)
    out = tl.sum(acc, 1) + biases
    out_ptrs = out_ptr + row.to(tl.int64) * stride_ok
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty))
