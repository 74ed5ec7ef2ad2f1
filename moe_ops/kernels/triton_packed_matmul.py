"""The product of 16-bit activations with weights of 4 or 8 bits. Imported at first launch only.

Weights are the left operand and reach the tensor core from registers (`mma.sync`), where nothing but this file
touches them: no repacking, no exchange between threads. What a thread loads is 4 bytes of one row; their nibbles
are taken apart by masks in the order (0, 4, 2, 6), (1, 5, 3, 7), and the few activations are put into that order
in registers too: even and odd columns become two operands of two products.

On SM90 that is 2.1 to 2.4 instructions a weight of int4 and 3.1 to 3.3 of e2m1, all included, where 3.5 a weight fill all
issue slots at 4.3 TB/s. It takes blocks of two warps, since Triton gives four of them `wgmma`, whose other order
of columns costs shuffles: 4.2 a weight.

FORMAT   "int4" (low nibble first, 0..15), "e2m1" (low nibble first), "int8", "e4m3"
SCALE    how the scale of a weight reaches the sum:
         "end"     one a row or tensor: the finished sum is scaled
         "sum"     one a group of at least 32 columns: each group's sum is scaled in fp32. Weights are exact.
         "block"   one a block of 128 x 128: likewise
         "e8m0"    one a group of 32: the weight is scaled in bf16, exactly
         "e4m3"    one a group of 16: likewise, and the sum divided by the tensor's global scale
         "weight"  a bf16 scale a group: the weight is scaled and rounded in bf16
"""

import triton
import triton.language as tl

from moe_ops.kernels.triton_fp8 import decode

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
# bf16 has a wider range than scaled e2m1 may need: products carry these powers of two until the sum is finished.
# Of e8m0, scales from 2^-93 to 2^33 are exact.
E8M0_SHIFT = tl.constexpr(4294967296.0)  # 2^32
E4M3_SHIFT = tl.constexpr(256.0)


@triton.jit
def int4_pair(p):
    """bf16 of nibbles (even, odd columns), minus 8: 128 + n by its bits, then a difference."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, r, o, m, u;
        mov.b32 o, 0x43004300; mov.b32 m, 0xc308c308; mov.b32 u, 0x3f803f80;
        shr.u32 r, $4, 8;
        lop3.b32 a, $4, 0x000f000f, o, 0xea;
        lop3.b32 b, r, 0x000f000f, o, 0xea;
        shr.u32 c, $4, 4; lop3.b32 c, c, 0x000f000f, o, 0xea;
        shr.u32 d, $4, 12; lop3.b32 d, d, 0x000f000f, o, 0xea;
        fma.rn.bf16x2 $0, a, u, m; fma.rn.bf16x2 $1, b, u, m;
        fma.rn.bf16x2 $2, c, u, m; fma.rn.bf16x2 $3, d, u, m;
        }""",
        "=r,=r,=r,=r,r",
        [p],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def int4_pair_zero(p, zero):
    """As int4_pair, minus a zero point (uint8) each."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, r, o, m, u;
        mov.b32 o, 0x43004300; mov.b32 m, 0xc300c300; mov.b32 u, 0x3f803f80;
        lop3.b32 m, $5, 0x000f000f, m, 0xea;
        shr.u32 r, $4, 8;
        lop3.b32 a, $4, 0x000f000f, o, 0xea;
        lop3.b32 b, r, 0x000f000f, o, 0xea;
        shr.u32 c, $4, 4; lop3.b32 c, c, 0x000f000f, o, 0xea;
        shr.u32 d, $4, 12; lop3.b32 d, d, 0x000f000f, o, 0xea;
        fma.rn.bf16x2 $0, a, u, m; fma.rn.bf16x2 $1, b, u, m;
        fma.rn.bf16x2 $2, c, u, m; fma.rn.bf16x2 $3, d, u, m;
        }""",
        "=r,=r,=r,=r,r,r",
        [p, zero],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def e2m1_pair_e8m0(p, scale):
    """bf16 of nibbles times their e8m0 scale (uint8) times 2^-32.

    A product puts sign and magnitude where bf16 has them, 2^-126 too small, as logic has half of the issue slots.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, r, s, z;
        mov.b32 z, 0x80008000;
        and.b32 s, $5, 0x00ff00ff; mad.lo.u32 s, s, 128, 0x2f002f00;
        shr.u32 r, $4, 8;
        and.b32 a, $4, 0x000f000f; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81c081c0;
        and.b32 b, r, 0x000f000f; mul.lo.u32 b, b, 0x1040; and.b32 b, b, 0x81c081c0;
        and.b32 c, $4, 0x00f000f0; mul.lo.u32 c, c, 0x0104; and.b32 c, c, 0x81c081c0;
        and.b32 d, r, 0x00f000f0; mul.lo.u32 d, d, 0x0104; and.b32 d, d, 0x81c081c0;
        fma.rn.bf16x2 $0, a, s, z; fma.rn.bf16x2 $1, b, s, z;
        fma.rn.bf16x2 $2, c, s, z; fma.rn.bf16x2 $3, d, s, z;
        }""",
        "=r,=r,=r,=r,r,r",
        [p, scale],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def e2m1_pair_e4m3(p, scale):
    """bf16 of nibbles times their e4m3 scale (its code, not negative) times 2^-8."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, r, s, z;
        mov.b32 z, 0x80008000;
        and.b32 s, $5, 0x00ff00ff; shl.b32 s, s, 4;
        mov.b32 a, 0x7f007f00; fma.rn.bf16x2 s, s, a, z;
        mov.b32 a, 0x77007700; fma.rn.bf16x2 s, s, a, z;
        shr.u32 r, $4, 8;
        and.b32 a, $4, 0x000f000f; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81c081c0;
        and.b32 b, r, 0x000f000f; mul.lo.u32 b, b, 0x1040; and.b32 b, b, 0x81c081c0;
        and.b32 c, $4, 0x00f000f0; mul.lo.u32 c, c, 0x0104; and.b32 c, c, 0x81c081c0;
        and.b32 d, r, 0x00f000f0; mul.lo.u32 d, d, 0x0104; and.b32 d, d, 0x81c081c0;
        fma.rn.bf16x2 $0, a, s, z; fma.rn.bf16x2 $1, b, s, z;
        fma.rn.bf16x2 $2, c, s, z; fma.rn.bf16x2 $3, d, s, z;
        }""",
        "=r,=r,=r,=r,r,r",
        [p, scale],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def int8_value(p):
    """bf16 of int8 codes (given as uint8), bytes in the order 0, 2, 1, 3: 128 + the low 7 bits, minus 128 or 256."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, r, o, m, u;
        mov.b32 o, 0x43004300; mov.b32 m, 0xc300c300; mov.b32 u, 0x3f803f80;
        shr.u32 r, $2, 8;
        lop3.b32 a, $2, 0x007f007f, o, 0xea; lop3.b32 b, $2, 0x00800080, m, 0xea;
        lop3.b32 c, r, 0x007f007f, o, 0xea; lop3.b32 d, r, 0x00800080, m, 0xea;
        fma.rn.bf16x2 $0, a, u, b; fma.rn.bf16x2 $1, c, u, d;
        }""",
        "=r,=r,r",
        [p],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e4m3_value(p):
    """bf16 of e4m3 codes (as uint8), bytes in the order 0, 2, 1, 3; the NaN code becomes 480."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, s, m, z;
        mov.b32 m, 0x7b807b80; mov.b32 z, 0x80008000;
        shl.b32 s, $2, 8; shl.b32 a, $2, 4; and.b32 a, a, 0x07f007f0;
        lop3.b32 a, s, 0x80008000, a, 0xea;
        shr.u32 b, $2, 4; and.b32 b, b, 0x07f007f0; lop3.b32 b, $2, 0x80008000, b, 0xea;
        fma.rn.bf16x2 $0, a, m, z; fma.rn.bf16x2 $1, b, m, z;
        }""",
        "=r,=r,r",
        [p],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e2m1(code):
    """fp32 of e2m1 codes, whose upper bits are zero."""
    magnitude = (code & 7).to(tl.int32)
    exponent, mantissa = magnitude >> 1, magnitude & 1
    normal = ((2 + mantissa) << exponent).to(tl.float32) * 0.25
    value = tl.where(exponent == 0, 0.5 * mantissa.to(tl.float32), normal)
    return tl.where(code > 7, -value, value)


@triton.jit
def group_scale(s, SCALE: tl.constexpr):
    """fp32 of loaded scales."""
    if SCALE == "e8m0":
        bits = s.to(tl.int32) << 23
        return tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)  # 2^-127
    elif SCALE == "e4m3":
        return decode(s, tl.float32)
    else:
        return s.to(tl.float32)


@triton.jit
def spread(s, WN: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """(WN, GROUPS) or (WN,) to (WN, GROUPS * EACH): one for each byte of a group."""
    if GROUPS == 1:
        return tl.broadcast_to(s[:, None], (WN, EACH))
    else:
        return tl.broadcast_to(s[:, :, None], (WN, GROUPS, EACH)).reshape(WN, GROUPS * EACH)


@triton.jit
def operands(
    x,  # (BM, BK)
    p,  # (WN, BK) or two columns a byte (WN, BK // 2), uint8
    s,  # scales of these columns, (WN, GROUPS), where weights are scaled
    zero,  # zero points of them, (WN,) or (WN, GROUPS)
    BM: tl.constexpr,
    WN: tl.constexpr,
    BK: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
):
    """(x0, x1, w0, w1): x @ w.T = x0 @ w0.T + x1 @ w1.T. Of 8-bit formats the second pair repeats the first."""
    PAIRS: tl.constexpr = FORMAT == "int4" or FORMAT == "e2m1"
    BYTES: tl.constexpr = BK // 2 if PAIRS else BK
    SCALED: tl.constexpr = SCALE == "e8m0" or SCALE == "e4m3" or SCALE == "weight"
    if x.dtype == tl.bfloat16 and not INTERPRET:
        if PAIRS:
            x = x.reshape(BM, BK // 8, 2, 2, 2).permute(0, 1, 3, 2, 4)
            x0, x1 = x.reshape(BM, BYTES, 2).split()
        else:
            x0 = x.reshape(BM, BK // 4, 2, 2).permute(0, 1, 3, 2).reshape(BM, BK)
            x1 = x0
        if SCALED:
            s = spread(s, WN, GROUPS, BYTES // GROUPS)
        if HAS_ZERO:
            zero = spread(zero, WN, GROUPS, BYTES // GROUPS)
        if SCALE == "e8m0":
            w0, w1 = e2m1_pair_e8m0(p, s)
        elif SCALE == "e4m3":
            w0, w1 = e2m1_pair_e4m3(p, s)
        elif PAIRS:
            if HAS_ZERO:
                w0, w1 = int4_pair_zero(p, zero)
            else:
                w0, w1 = int4_pair(p)
        elif FORMAT == "int8":
            w0 = int8_value(p)
            if HAS_ZERO:  # at most 255, which bf16 holds
                w0 -= zero.to(tl.int8, bitcast=True).to(tl.bfloat16)
            w1 = w0
        else:
            w0 = e4m3_value(p)
            w1 = w0
        if SCALE == "weight":
            w0 *= s
            w1 *= s
    else:
        if PAIRS:
            x0, x1 = x.reshape(BM, BYTES, 2).split()
            w0, w1 = p & 15, p >> 4
            if FORMAT == "e2m1":
                w0, w1 = e2m1(w0), e2m1(w1)
        else:
            x0 = x
            w0 = p.to(tl.int8, bitcast=True) if FORMAT == "int8" else decode(p, tl.float32)
            x1, w1 = x0, w0
        w0, w1 = w0.to(tl.float32), w1.to(tl.float32)
        if HAS_ZERO:
            zero = zero.to(tl.int8, bitcast=True).to(tl.float32)
            zero = spread(zero, WN, GROUPS, BYTES // GROUPS)
            w0 -= zero
            w1 -= zero
        elif FORMAT == "int4":
            w0 -= 8.0
            w1 -= 8.0
        if SCALED:
            s = spread(group_scale(s, SCALE), WN, GROUPS, BYTES // GROUPS)
            w0 *= s
            w1 *= s
        if INTERPRET:  # its 16-bit products are wrong
            x0, x1 = x0.to(tl.float32), x1.to(tl.float32)
        w0, w1 = w0.to(x0.dtype), w1.to(x1.dtype)
    return x0, x1, w0, w1


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
    global_ptr,  # (E,) fp32, or absent
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
):
    """w @ x.T, (WN, BM) in fp32."""
    PAIRS: tl.constexpr = FORMAT == "int4" or FORMAT == "e2m1"
    BYTES: tl.constexpr = DK // 2 if PAIRS else DK
    SCALED: tl.constexpr = SCALE == "e8m0" or SCALE == "e4m3" or SCALE == "weight"
    SUM: tl.constexpr = SCALE == "sum" or SCALE == "block"
    GROUPS: tl.constexpr = DK // G if SCALED else 1
    HAS_ZERO: tl.constexpr = zero_ptr is not None
    column = tl.arange(0, DK)
    byte = tl.arange(0, BYTES)
    group = tl.arange(0, GROUPS)[None, :] if GROUPS > 1 else 0
    if SCALE == "e4m3":
        scale_ptr = scale_ptr.to(tl.pointer_type(tl.uint8))
    scale_row = row // 128 if SCALE == "block" else row
    scale_ptrs = scale_ptr + expert * stride_se + scale_row.to(tl.int64) * stride_sn
    zero_ptrs = scale_ptrs
    if HAS_ZERO:
        zero_ptrs = (
            zero_ptr.to(tl.pointer_type(tl.uint8))
            + expert * stride_ze
            + row.to(tl.int64) * stride_zn
        )
    if GROUPS > 1:
        scale_ptrs = scale_ptrs[:, None]
        zero_ptrs = zero_ptrs[:, None]
    last = tl.cdiv(K, G) - 1 if SUM or SCALED else 0
    s, zero = scale_ptrs, zero_ptrs  # not used where there are none
    if SUM or SCALED:
        s = tl.load(scale_ptrs + tl.minimum(group, last) * stride_sk)
    if HAS_ZERO:
        zero = tl.load(zero_ptrs + tl.minimum(group, last) * stride_zk)
    acc = tl.zeros((WN, BM), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        for part in tl.static_range(BK // DK):
            k = start + part * DK
            x_mask = x_ok[:, None]
            if not EVEN_K:
                x_mask = x_mask & (k + column < K)[None, :]
            x = tl.load(x_ptrs + part * DK * stride_xk, mask=x_mask, other=0.0)
            if EVEN_K:
                p = tl.load(w_ptrs + part * BYTES * stride_wk)
            else:
                end = (K - k) // 2 if PAIRS else K - k
                if G >= 32:  # which divides K
                    end = tl.multiple_of(end, 16)
                p = tl.load(w_ptrs + part * BYTES * stride_wk, mask=(byte < end)[None, :], other=0)
            if SUM or SCALED:  # those of the next product, one product early
                g = tl.minimum((k + DK) // G + group, last)
                next_s = tl.load(scale_ptrs + g * stride_sk)
                if HAS_ZERO:
                    next_zero = tl.load(zero_ptrs + g * stride_zk)
            x0, x1, w0, w1 = operands(x, p, s, zero, BM, WN, DK, GROUPS, FORMAT, SCALE, HAS_ZERO)
            if SUM:
                d = tl.dot(w0, x0.T, input_precision="ieee")
                if PAIRS:
                    d = tl.dot(w1, x1.T, d, input_precision="ieee")
                acc += d * s.to(tl.float32)[:, None]
            else:
                acc = tl.dot(w0, x0.T, acc, input_precision="ieee")
                if PAIRS:
                    acc = tl.dot(w1, x1.T, acc, input_precision="ieee")
            if SUM or SCALED:
                s = next_s
                if HAS_ZERO:
                    zero = next_zero
        x_ptrs += BK * stride_xk
        w_ptrs += BK // DK * BYTES * stride_wk
    if SCALE == "end":
        acc *= tl.load(scale_ptrs).to(tl.float32)[:, None]
    ASM: tl.constexpr = x_ptrs.dtype.element_ty == tl.bfloat16 and not INTERPRET
    if ASM and SCALE == "e8m0":
        acc *= E8M0_SHIFT
    if ASM and SCALE == "e4m3":
        acc *= E4M3_SHIFT
    if SCALE == "e4m3":
        acc /= tl.load(global_ptr + expert).to(tl.float32)
    return acc
