"""The product inside both GEMMs, of operands that are both plain, both e4m3 or both int8. Imported at first launch
only; weights that meet 16-bit activations have triton_packed_matmul.py.

Weights are the left operand (`w (WN, BK) @ x.T (BK, BM)`), so that 16 tokens fill a tensor-core tile.

W_SCALE  scales of w: "" none, "tensor" (E,), "channel" (E, N), "block" (E, ceil(N/128), ceil(K/128))
X_SCALE  x is quantized to the weights' format: "" not at all; by "group" of 128 columns, "row", "tensor" (scales
         computed by an earlier kernel, or here from groups) or "static" (scale known). x that comes in that format
         was quantized before and has its scales in memory; other x is quantized here, tile by tile.
"""

import triton
import triton.language as tl

from moe_ops.kernels.triton_fp8 import (
    clamp,
    decode,
    decode_activation,
    element_scale,
    operand,
    quantize_groups,
    quotient,
    reciprocal,
)

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def row_scales(
    scale_ptr, row, ok, BM: tl.constexpr, PARTS: tl.constexpr, X_SCALE: tl.constexpr,
    INT8: tl.constexpr,
):  # fmt: skip
    """Scale of each row of x (BM,), of those that do not change along K."""
    if X_SCALE == "row":
        return element_scale(tl.load(scale_ptr + row, mask=ok, other=0.0), INT8)
    elif X_SCALE == "tensor":
        parts = tl.load(scale_ptr + tl.arange(0, PARTS))
        return element_scale(tl.max(parts, 0), INT8) + tl.zeros((BM,), tl.float32)
    else:
        tl.static_assert(X_SCALE == "static")
        return tl.load(scale_ptr).to(tl.float32) + tl.zeros((BM,), tl.float32)


@triton.jit
def block_scale(s0, s1, s2, row, block0, block1, BLOCKS: tl.constexpr, WN: tl.constexpr):
    """(WN,) scales of a tile's rows, which lie in BLOCKS blocks of 128 rows."""
    if BLOCKS == 1:
        return tl.full((WN,), 1.0, tl.float32) * s0
    elif BLOCKS == 2:
        return tl.where(row // 128 == block0, s0, s1)
    else:
        return tl.where(row // 128 == block0, s0, tl.where(row // 128 == block1, s1, s2))


@triton.jit
def matmul(
    x_ptrs,  # (BM, BK)
    w_ptrs,  # (WN, BK)
    x_ok,  # (BM,)
    w_ok,  # (WN,)
    K,
    stride_xk,
    stride_wk,
    x_scale_ptr,
    stride_xg,  # of a group of columns in the scales of x, whose rows lie side by side
    x_row,  # (BM,) rows of x
    x_factor,  # (BM,) to scale x by
    w_scale_ptr,  # of this expert
    stride_sn,
    stride_sk,
    row,  # (WN,) rows of w
    block0,  # blocks of 128 rows that `row` lies in
    block1,
    block2,
    BM: tl.constexpr,
    WN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    STAGES: tl.constexpr,
    W_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """x_factor * (w @ x.T), (WN, BM) in fp32. Both operands are masked along K: zero times garbage may be NaN.

    Sums of e4m3 products leave the tensor core every BK <= 128 columns: it adds in fewer than fp32's bits.
    """
    INT8: tl.constexpr = w_ptrs.dtype.element_ty == tl.int8
    X8: tl.constexpr = x_ptrs.dtype.element_ty.primitive_bitwidth == 8
    GROUPS: tl.constexpr = X_SCALE == "group"
    BLOCK: tl.constexpr = W_SCALE == "block"
    tl.static_assert(BLOCK == GROUPS)
    # A scale shared by rows of several tokens saw the factor; elsewhere it commutes with quantization.
    EARLY: tl.constexpr = HAS_FACTOR and (X_SCALE == "tensor" or X_SCALE == "static")
    if GROUPS:
        tl.static_assert(BK == 128)
    if BLOCK:  # the scales of the next step are asked for one step early
        s0_ptr = w_scale_ptr + block0 * stride_sn
        s1_ptr = w_scale_ptr + block1 * stride_sn
        s2_ptr = w_scale_ptr + block2 * stride_sn
        s0 = tl.load(s0_ptr).to(tl.float32)
        s1 = s0
        s2 = s0
        if BLOCKS > 1:
            s1 = tl.load(s1_ptr).to(tl.float32)
        if BLOCKS > 2:
            s2 = tl.load(s2_ptr).to(tl.float32)
    if GROUPS:
        if X8:
            # rows of nobody read the first row's scales, not masked ones: their sums are not stored
            xs_ptrs = x_scale_ptr + tl.where(x_ok, x_row, 0)
    elif X_SCALE != "":
        xs = row_scales(x_scale_ptr, x_row, x_ok, BM, PARTS, X_SCALE, INT8)
        if not X8:
            inverse = reciprocal(xs)
    k = tl.arange(0, BK)
    acc = tl.zeros((WN, BM), tl.int32 if INT8 else tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        x_mask = x_ok[:, None]
        if not EVEN_K:
            x_mask = x_mask & (start + k < K)[None, :]
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        if (
            GROUPS and X8
        ):  # here they travel with the operands; a load near its use would stall every step
            xs = tl.load(xs_ptrs)
            xs_ptrs += stride_xg
        if EVEN_N and EVEN_K:
            w = tl.load(w_ptrs)
        elif EVEN_K:
            w = tl.load(w_ptrs, mask=w_ok[:, None], other=0.0)
        elif EVEN_N:
            w = tl.load(w_ptrs, mask=(start + k < K)[None, :], other=0.0)
        else:
            w = tl.load(w_ptrs, mask=w_ok[:, None] & (start + k < K)[None, :], other=0.0)
        if X_SCALE != "":
            if X8:
                if not NATIVE and not INT8:
                    x = decode_activation(x)
            else:
                if GROUPS:
                    v, xs = quantize_groups(x)
                else:
                    v = x.to(tl.float32)
                    if EARLY:
                        v *= x_factor[:, None]
                    if X_SCALE == "static":
                        v = clamp(v, (130.0 if INT8 else 448.0) * xs[:, None])
                    v = quotient(v, xs[:, None], inverse[:, None])
                x = operand(v, NATIVE, INT8)
            if not NATIVE and not INT8:
                w = decode(w, tl.float16)
        if INTERPRET and not INT8:  # the interpreter's 16-bit products are wrong
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        if INT8:
            acc = tl.dot(w, x.T, acc, out_dtype=tl.int32)
        elif X_SCALE == "":
            acc = tl.dot(w, x.T, acc, input_precision="ieee")
        else:
            d = tl.dot(w, x.T, input_precision="ieee")
            if BLOCK:
                step = tl.where(start + BK < K, stride_sk, 0)
                scale = block_scale(s0, s1, s2, row, block0, block1, BLOCKS, WN)
                s0_ptr += step
                s0 = tl.load(s0_ptr).to(tl.float32)
                if BLOCKS > 1:
                    s1_ptr += step
                    s1 = tl.load(s1_ptr).to(tl.float32)
                if BLOCKS > 2:
                    s2_ptr += step
                    s2 = tl.load(s2_ptr).to(tl.float32)
                acc += d * (scale[:, None] * xs[None, :])
            else:
                acc += d
        x_ptrs += BK * stride_xk
        w_ptrs += BK * stride_wk
    acc = acc.to(tl.float32)
    if X_SCALE != "" and not GROUPS:
        acc *= xs[None, :]
    if W_SCALE == "tensor":
        acc *= tl.load(w_scale_ptr).to(tl.float32)
    elif W_SCALE == "channel":
        scale = tl.load(w_scale_ptr + row.to(tl.int64) * stride_sn, mask=w_ok, other=0.0)
        acc *= scale.to(tl.float32)[:, None]
    if HAS_FACTOR and not EARLY:
        acc *= x_factor[None, :]
    return acc
