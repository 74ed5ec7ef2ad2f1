"""The product of 16-bit activations with weights of 4 or 8 bits. Imported at first launch only.

Weights are the left operand and reach the tensor core from registers (`mma.sync`): what a thread loads is 4 bytes of
one row, which masks take apart. Two columns a byte make two operands, the even columns and the odd ones; the few
activations are split likewise in registers. Nothing is repacked, nothing is exchanged between threads.

On SM90 that is 2.2 instructions a weight of int4 and 3.2 of e2m1, all included, where 3.5 a weight fill all
issue slots at 4.3 TB/s. It takes blocks of two warps, since Triton gives four of them `wgmma` from 16 tokens on, for
which the bytes change threads: 4.2 a weight.

FORMAT   "int4" (low nibble first, 0..15), "e2m1" (low nibble first), "int8", "e4m3"; "e3m2", "e2m3" (lowest bits first:
         four in three bytes, which are read column by column)
SCALE    how the scale of a weight reaches the sum:
         "end"     one a row or tensor: the finished sum is scaled
         "sum"     one a group of at least 32 columns: each group's sum is scaled in fp32. Weights are exact.
         "block"   one a block of 128 x 128: likewise
         "e8m0"    one a group of 32: the weight is scaled in bf16, exactly
         "e4m3"    one a group of 16: likewise, and the sum divided by the tensor's global scale; of int4 one a group
                   of 128, and the sum multiplied by its row's channel scale
         "weight"  a bf16 scale a group: the weight is scaled and rounded in bf16
"""

import triton
import triton.language as tl

from moe_ops.kernels.triton_packed_operands import operands, six_bits

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
# bf16 has a wider range than scaled e2m1 may need: products carry these powers of two until the sum is finished.
# Of e8m0, scales from 2^-93 to 2^33 are exact; larger ones are refused when a tensor is made (tensors/checks.py).
E8M0_SHIFT = tl.constexpr(4294967296.0)  # 2^32
E4M3_SHIFT = tl.constexpr(256.0)


@triton.jit
def first_bytes(DK: tl.constexpr, FORMAT: tl.constexpr):
    """Bytes of a row in which columns begin, of DK columns: a pair of 4 bits is one, elements of 6 bits begin in three
    of four."""
    if FORMAT == "e3m2" or FORMAT == "e2m3":
        return tl.arange(0, DK) * 3 // 4
    elif FORMAT == "int4" or FORMAT == "e2m1":
        return tl.arange(0, DK // 2)
    else:
        return tl.arange(0, DK)


@triton.jit
def part_of(piece, part: tl.constexpr, WN: tl.constexpr, PARTS: tl.constexpr):
    """(WN,) column `part` of (WN, 2 or 4)."""
    if PARTS == 2:
        first, second = piece.split()
        return second if part == 1 else first
    else:
        even, odd = piece.reshape(WN, 2, 2).split()
        first, second = (odd if part % 2 == 1 else even).split()
        return second if part >= 2 else first


@triton.constexpr_function
def left(BM):
    """Whether the tokens of a block are the left operand, which takes 16 of them at a time."""
    return BM == 16 or BM == 32


@triton.jit
def product(x, w, acc, LEFT: tl.constexpr):
    """acc + x @ w.T; acc (BM, WN) where x is the left operand, else (WN, BM)."""
    if LEFT:
        return tl.dot(x, w.T, acc, input_precision="ieee")
    else:
        return tl.dot(w, x.T, acc, input_precision="ieee")


@triton.jit
def group_load(
    ptrs,  # (WN,) or (WN, GROUPS) scales or zero points of the first groups
    g,
    stride,
    group,
    count,  # of groups in a row
    EVEN_K: tl.constexpr,
    GROUPS: tl.constexpr,
    S_ALIGN: tl.constexpr,
):
    """Those of groups g and on; zeros past the end of a row."""
    if EVEN_K or GROUPS == 1:
        return tl.load(ptrs + g * stride)
    else:
        left = tl.multiple_of(count - g, min(S_ALIGN, GROUPS))
        return tl.load(ptrs + g * stride, mask=group < left, other=0)


@triton.jit
def packed_matmul(
    x_ptrs,  # (BM, DK)
    w_ptrs,  # (WN, bytes of DK columns), uint8
    x_ok,  # (BM,)
    K,
    stride_xk,
    stride_wk,
    scale_ptr,
    stride_se,
    stride_sn,
    stride_sk,
    zero_ptr,  # uint8, or absent
    stride_ze,
    stride_zn,
    stride_zk,
    factor_ptr,  # fp32 of experts or their rows, or absent
    stride_fe,
    stride_fn,
    expert,
    row,  # (WN,) rows of w, all of them there
    BM: tl.constexpr,
    WN: tl.constexpr,
    BK: tl.constexpr,  # columns a step, a multiple of DK
    DK: tl.constexpr,  # columns a product: at most a group where sums are scaled
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    G: tl.constexpr,  # columns that share a scale; 0 for all
    S_ALIGN: tl.constexpr,  # a power of two that divides the strides of scales and their number in a row
    WARPS: tl.constexpr,
):
    """x @ w.T, (BM, WN) in fp32."""
    LEFT: tl.constexpr = left(BM)
    PAIRS: tl.constexpr = FORMAT == "int4" or FORMAT == "e2m1"
    SIX: tl.constexpr = FORMAT == "e3m2" or FORMAT == "e2m3"
    BYTES: tl.constexpr = (
        DK // 2 if PAIRS else DK
    )  # that a thread block reads of a row; of 6 bits some twice
    STEP: tl.constexpr = DK * 3 // 4 if SIX else BYTES
    SCALED: tl.constexpr = SCALE == "e8m0" or SCALE == "e4m3" or SCALE == "weight"
    SUM: tl.constexpr = SCALE == "sum" or SCALE == "block"
    GROUPS: tl.constexpr = max(DK // G, 1) if SCALED else 1
    HAS_ZERO: tl.constexpr = zero_ptr is not None
    column = tl.arange(0, DK)
    byte = tl.arange(0, BYTES)
    group = tl.arange(0, GROUPS)[None, :] if GROUPS > 1 else 0
    if SCALE == "e4m3":
        scale_ptr = scale_ptr.to(tl.pointer_type(tl.uint8))
    scale_row = row // 128 if SCALE == "block" else row
    scale_offsets = expert * stride_se + scale_row.to(tl.int64) * stride_sn
    scale_ptrs = scale_ptr + tl.multiple_of(scale_offsets, S_ALIGN)
    zero_ptrs = scale_ptrs
    if HAS_ZERO:
        zero_offsets = expert * stride_ze + row.to(tl.int64) * stride_zn
        zero_ptrs = zero_ptr.to(tl.pointer_type(tl.uint8)) + tl.multiple_of(zero_offsets, S_ALIGN)
    if GROUPS > 1:
        scale_ptrs = scale_ptrs[:, None] + group * stride_sk
        zero_ptrs = zero_ptrs[:, None] + group * stride_zk
    PARTS: tl.constexpr = BK // DK
    # Scales travel with the operands where a thread's have the 4 bytes of an asynchronous copy: those of a product, or of
    # all parts of a step in one piece. Elsewhere they are asked for one product early.
    SIZE: tl.constexpr = 1 if HAS_ZERO else scale_ptr.dtype.element_ty.primitive_bitwidth // 8
    PIECE: tl.constexpr = (
        SCALE == "sum" and not HAS_ZERO and EVEN_K and G == DK and (PARTS == 2 or PARTS == 4)
    ) and min(PARTS, S_ALIGN, WN * PARTS // (32 * WARPS)) * SIZE >= 4
    COPIED: tl.constexpr = (SCALED and EVEN_K) and min(
        GROUPS, S_ALIGN, WN * GROUPS // (32 * WARPS)
    ) * SIZE >= 4
    EARLY: tl.constexpr = (SUM or SCALED) and not PIECE and not COPIED
    if PIECE:
        piece_ptrs = scale_ptrs[:, None] + tl.arange(0, PARTS)[None, :] * stride_sk
    count = tl.cdiv(K, G) if SUM or SCALED else 1
    s, zero = scale_ptrs, zero_ptrs  # not used where there are none
    if EARLY:
        s = group_load(scale_ptrs, 0, stride_sk, group, count, EVEN_K, GROUPS, S_ALIGN)
    if HAS_ZERO and not COPIED:
        zero = group_load(zero_ptrs, 0, stride_zk, group, count, EVEN_K, GROUPS, S_ALIGN)
    acc = tl.zeros((BM, WN) if LEFT else (WN, BM), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        if PIECE:
            piece = tl.load(piece_ptrs + start // G * stride_sk)
        for part in tl.static_range(PARTS):
            k = start + part * DK
            x_mask = x_ok[:, None]
            if not EVEN_K:
                x_mask = x_mask & (k + column < K)[None, :]
            x = tl.load(x_ptrs + part * DK * stride_xk, mask=x_mask, other=0.0)
            if EVEN_K:
                p = tl.load(w_ptrs + part * STEP * stride_wk)
            else:
                end = (K - k) // 2 if PAIRS else K - k
                if G >= 32 and SCALE != "block":  # which divides K
                    end = tl.multiple_of(end, 16)
                p = tl.load(w_ptrs + part * STEP * stride_wk, mask=(byte < end)[None, :], other=0)
            if SIX:
                x_end = K - k if not EVEN_K else DK
                p = six_bits(p, w_ptrs + part * STEP * stride_wk, stride_wk, byte, x_end)
            if EARLY:
                g = (k + DK) // G
                g = tl.where(g < count, g, 0)
                next_s = group_load(
                    scale_ptrs, g, stride_sk, group, count, EVEN_K, GROUPS, S_ALIGN
                )
                if HAS_ZERO:
                    next_zero = group_load(
                        zero_ptrs, g, stride_zk, group, count, EVEN_K, GROUPS, S_ALIGN
                    )
            if PIECE:
                own = part_of(piece, part, WN, PARTS)
            elif COPIED:
                own = tl.load(scale_ptrs + k // G * stride_sk)
            else:
                own = s
            own_zero = zero
            if COPIED and HAS_ZERO:
                own_zero = tl.load(zero_ptrs + k // G * stride_zk)
            x0, x1, w0, w1 = operands(
                x, p, own, own_zero, BM, WN, DK, GROUPS, FORMAT, SCALE, HAS_ZERO
            )
            if SUM:
                d = product(x0, w0, tl.zeros_like(acc), LEFT)
                if PAIRS:
                    d = product(x1, w1, d, LEFT)
                own = own.to(tl.float32)
                acc += d * (own[None, :] if LEFT else own[:, None])
            else:
                acc = product(x0, w0, acc, LEFT)
                if PAIRS:
                    acc = product(x1, w1, acc, LEFT)
            if EARLY:
                s = next_s
                if HAS_ZERO:
                    zero = next_zero
        x_ptrs += BK * stride_xk
        w_ptrs += PARTS * STEP * stride_wk
    if not LEFT:
        acc = acc.T
    if SCALE == "end":
        acc *= tl.load(scale_ptrs).to(tl.float32)[None, :]
    SHIFTED: tl.constexpr = (
        x_ptrs.dtype.element_ty == tl.bfloat16 and not INTERPRET and FORMAT == "e2m1"
    )
    if SHIFTED and SCALE == "e8m0":
        acc *= E8M0_SHIFT
    if SHIFTED and SCALE == "e4m3":
        acc *= E4M3_SHIFT
    if SCALE == "e4m3":
        factor = tl.load(factor_ptr + expert * stride_fe + row * stride_fn).to(tl.float32)
        if FORMAT == "int4":
            acc *= factor[None, :]
        else:
            acc /= factor[None, :]
    return acc
