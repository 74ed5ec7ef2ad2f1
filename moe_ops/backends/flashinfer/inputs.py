"""Triton kernels that bring a call's tensors into the form FlashInfer's layer reads. Imported at first launch only.

Legend: M tokens, K hidden size, I intermediate size, N rows of w13, E local experts; SLOT floats a constant's slot
holds, E at least.
"""

import triton
import triton.language as tl

from moe_ops.kernels.triton_fp8 import clamp, exponent_above, quotient, reciprocal, stored
from moe_ops.kernels.triton_routing import local_expert


@triton.jit
def expert_factors(out_ptr, weights_ptr, a, e, mask, HOW: tl.constexpr):
    """Store what products of each expert are multiplied by, from its weights' scale and that of the activations."""
    s = tl.load(weights_ptr + e, mask=mask, other=1.0)
    tl.store(out_ptr + e, s * a if HOW == "product" else a / s, mask=mask)


@triton.jit(
    do_not_specialize=[
        *("M", "E", "num_ids", "stride_im", "stride_ik", "stride_map", "stride_wm", "stride_wk"),
        *("alpha", "beta", "limit", "SLOT"),
    ]
)
def moe_ops_flashinfer_route(
    ids_ptr,  # (M, top_k)
    map_ptr,  # (num_ids,) or absent
    weights_ptr,  # (M, top_k)
    local_ptr,  # (M, top_k) int32, written: local experts, -1 for "not here" and for repeats
    sums_ptr,  # (M, top_k) fp32, written: router weights, those of repeats added to the first
    constants_ptr,  # (7, SLOT) fp32, written: alpha, beta, limit, factors of w13 and w2, inverse scales of a13 and a2
    s13_ptr,  # (E,) scales of the weights, or absent
    s2_ptr,
    a13_ptr,  # () scales of the activations, or absent
    a2_ptr,
    M,
    E,
    num_ids,
    stride_im,
    stride_ik,
    stride_map,
    stride_wm,
    stride_wk,
    alpha,
    beta,
    limit,
    SLOT,
    TOP_K: tl.constexpr,
    LANES: tl.constexpr,  # a power of two, at least TOP_K
    ROWS: tl.constexpr,
    EP: tl.constexpr,  # a power of two, at least E
    HAS_MAP: tl.constexpr,
    HOW: tl.constexpr,  # how scales become factors; "" for schemes without
):
    """Ids and router weights of ROWS tokens; the first program also writes the constants of the layer.

    FlashInfer counts an expert once per token: where its sort is not the one for few tokens it loses repeats.
    """
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, LANES)[None, :]
    inside = (m < M) & (j < TOP_K)
    pair = m * TOP_K + j
    e = local_expert(
        ids_ptr,
        map_ptr,
        pair,
        inside,
        E,
        num_ids,
        TOP_K,
        stride_im,
        stride_ik,
        stride_map,
        HAS_MAP,
    )
    here = inside & (e >= 0)
    at = m.to(tl.int64) * stride_wm + j * stride_wk
    w = tl.load(weights_ptr + at, mask=here, other=0.0).to(tl.float32)
    if TOP_K > 1:
        same = (e[:, :, None] == e[:, None, :]) & here[:, :, None]
        earlier = tl.arange(0, LANES)[None, None, :] < tl.arange(0, LANES)[None, :, None]
        repeats = tl.max((same & earlier).to(tl.int32), 2) > 0
        w = tl.sum(tl.where(same, tl.broadcast_to(w[:, None, :], (ROWS, LANES, LANES)), 0.0), 2)
        e = tl.where(repeats, -1, e)
        w = tl.where(repeats, 0.0, w)
    tl.store(local_ptr + pair, e, mask=inside)
    tl.store(sums_ptr + pair, w, mask=inside)
    if tl.program_id(0) == 0:
        lane = tl.arange(0, EP)
        ok = lane < E
        one = tl.full((EP,), 1.0, tl.float32)
        tl.store(constants_ptr + lane, one * alpha, mask=ok)
        tl.store(constants_ptr + SLOT + lane, one * beta, mask=ok)
        tl.store(constants_ptr + 2 * SLOT + lane, one * limit, mask=ok)
        if HOW == "one":
            tl.store(constants_ptr + 3 * SLOT + lane, one, mask=ok)
            tl.store(constants_ptr + 4 * SLOT + lane, one, mask=ok)
        elif HOW != "":
            a13 = tl.load(a13_ptr)
            a2 = tl.load(a2_ptr)
            expert_factors(constants_ptr + 3 * SLOT, s13_ptr, a13, lane, ok, HOW)
            expert_factors(constants_ptr + 4 * SLOT, s2_ptr, a2, lane, ok, HOW)
            tl.store(constants_ptr + 5 * SLOT, 1.0 / a13)
            tl.store(constants_ptr + 6 * SLOT, 1.0 / a2)


@triton.jit(do_not_specialize=["stride_wm"])
def moe_ops_flashinfer_rows(
    out_ptr,  # (M, K) written: x's dtype, or e4m3
    scale_ptr,  # (M, K/32) e8m0 codes, written where TO is "mxfp8"
    x_ptr,  # (M, K)
    weights_ptr,  # (M, 1) router weights to multiply by, or absent
    a_ptr,  # () scale of e4m3 rows
    K,
    stride_xm,
    stride_xk,
    stride_wm,
    TO: tl.constexpr,  # "": copy, "e4m3": x / a, "mxfp8": groups of 32 with powers of two
    NATIVE: tl.constexpr,
    GROUPS: tl.constexpr,  # of 32 columns, in one program
):
    """Rows of the input contiguous, weighted, quantized; rows that no expert sees may hold anything."""
    m = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    ok = k < K
    x = tl.load(x_ptr + m * stride_xm + k.to(tl.int64) * stride_xk, mask=ok, other=0.0)
    v = x.to(tl.float32)
    if weights_ptr is not None:
        v *= tl.load(weights_ptr + m * stride_wm).to(tl.float32)
    if TO == "":
        tl.store(out_ptr + m * K + k, v.to(x.dtype), mask=ok)
    elif TO == "e4m3":
        a = tl.load(a_ptr)
        v = clamp(quotient(v, a, reciprocal(a)), 448.0)
        tl.store(out_ptr + m * K + k, stored(v, NATIVE), mask=ok)
    else:
        amax = tl.max(tl.abs(v), 1)
        code = exponent_above(quotient(amax, 448.0, 1.0 / 448.0))
        code = tl.where(amax < float("inf"), tl.minimum(tl.maximum(code, 0), 253), 255)
        inverse = tl.where(code == 255, 0x7FC00000, (254 - code) << 23)
        v = clamp(v * inverse.to(tl.float32, bitcast=True)[:, None], 448.0)
        tl.store(out_ptr + m * K + k, stored(v, NATIVE), mask=ok)
        tl.store(scale_ptr + m * (K // 32) + g, code.to(tl.uint8), mask=g < K // 32)


@triton.jit(
    do_not_specialize=["N", "K", "stride_13e", "stride_13n", "stride_2e", "stride_2k"],
)
def moe_ops_flashinfer_biases(
    out13_ptr,  # (E, N) written
    out2_ptr,  # (E, K) written
    b13_ptr,  # (E, N) in the natural order of rows, or absent: zeros
    b2_ptr,  # (E, K), or absent: zeros
    N,
    K,
    stride_13e,
    stride_13n,
    stride_2e,
    stride_2k,
    ORDER: tl.constexpr,  # of w13's rows: "", "up_gate" or "up_gate_of_pairs"
    BLOCK: tl.constexpr,
):
    """Both biases contiguous, in the output's dtype, the first in the order of w13's rows."""
    e = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half = N // 2
    if ORDER == "up_gate":
        source = tl.where(n < half, n + half, n - half)
    elif ORDER == "up_gate_of_pairs":
        source = tl.where(n < half, 2 * n + 1, 2 * (n - half))
    else:
        source = n
    if b13_ptr is None:
        first = tl.zeros((BLOCK,), tl.float32)
    else:
        first = tl.load(b13_ptr + e * stride_13e + source * stride_13n, mask=n < N, other=0.0)
    if b2_ptr is None:
        second = tl.zeros((BLOCK,), tl.float32)
    else:
        second = tl.load(b2_ptr + e * stride_2e + n * stride_2k, mask=n < K, other=0.0)
    tl.store(out13_ptr + e * N + n, first.to(out13_ptr.dtype.element_ty), mask=n < N)
    tl.store(out2_ptr + e * K + n, second.to(out2_ptr.dtype.element_ty), mask=n < K)
