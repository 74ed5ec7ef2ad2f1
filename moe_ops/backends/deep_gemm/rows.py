"""Triton kernels around DeepGEMM's two products: scatter, activate, combine. Imported at first launch only.

Legend: M tokens, S = M * top_k pairs, K hidden size, I intermediate size, N columns of the first product (2 I where
gated, else I). `rows` (S,) says in which row of the products a pair lies, -1 where its expert is not here; rows
without a pair are neither read nor written, whatever they hold.

Batches (E, T, ..) have no `rows`, that is None, but `counts` (E,): row t of expert e is row e * R + t of the products.
Most rows may be behind a count, so programs are not theirs: `programs` of them share what rows an expert has.

SCALES says what scales e4m3 data have, those of neighbouring rows side by side in blocks of R rows, of which the
contiguous layout is one:
    ""       none, data are in the input's dtype
    "fp32"   (blocks, columns / 128, R), one for 128 columns
    "ue8m0"  the same as int32 of four exponents each, for WIDTH columns: (blocks, columns / (4 WIDTH), R); byte j of
             word p is group 4 p + j
"""

import triton
import triton.language as tl

from moe_ops.kernels.triton_activations import activate_one, activate_two
from moe_ops.kernels.triton_fp8 import exponent_above, quantize_groups, quotient, stored
from moe_ops.kernels.triton_routing import start_dependent, wait


@triton.jit
def quantize_by_powers(x):
    """(fp32 quotients not yet rounded, uint8 exponents (R,)) of x (R, columns): scales are powers of two that bring
    the largest magnitude to at most 448."""
    x = x.to(tl.float32)
    exponent = exponent_above(quotient(tl.max(tl.abs(x), 1), 448.0, 1.0 / 448.0))
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return x * inverse[:, None], exponent.to(tl.uint8)


@triton.jit
def scale_offset(row, group, groups, R):
    """Where the scale of a group of columns lies."""
    return row + row // R * (groups - 1) * R + group.to(tl.int64) * R


@triton.jit
def store_scale(scale_ptr, scale, row, group, groups, R, mask, SCALES: tl.constexpr):
    """Store scales of groups (the same shape), with zeros behind a row's last exponent up to the end of its word."""
    if SCALES == "ue8m0":
        words = tl.cdiv(groups, 4)
        for j in tl.static_range(4):
            byte = group + j
            ok = mask & ((j == 0) | ((group == groups - 1) & (byte < 4 * words)))
            offset = scale_offset(row, byte // 4, words, R) * 4 + byte % 4
            tl.store(scale_ptr + offset, scale if j == 0 else tl.zeros_like(scale), mask=ok)
    else:
        tl.store(scale_ptr + scale_offset(row, group, groups, R), scale, mask=mask)


@triton.jit
def rounded_columns(x, SCALES: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr):
    """(GROUPS, 128) columns of a row as they are stored, and their scales (x again where there are none)."""
    GROUPS: tl.constexpr = x.shape[0]
    PARTS: tl.constexpr = 128 // WIDTH  # groups with a scale of their own
    if SCALES == "ue8m0":
        v, scale = quantize_by_powers(tl.reshape(x, (GROUPS * PARTS, WIDTH)))
        y = stored(tl.reshape(v, (GROUPS, 128)), NATIVE)
    elif SCALES == "fp32":
        v, scale = quantize_groups(x)
        y = stored(v, NATIVE)
    else:
        y, scale = x, x
    return y, scale


@triton.jit
def store_columns(
    y_ptr, scale_ptr, y, scale, row, k, part, end, K, R, SCALES: tl.constexpr, WIDTH: tl.constexpr
):
    """Columns k below `end` of a row, and scales `part` of its groups."""
    tl.store(y_ptr + row * K + k, y.to(y_ptr.dtype.element_ty), mask=k < end)
    if SCALES != "":
        ok = part * WIDTH < end
        store_scale(scale_ptr, scale, row, part, tl.cdiv(K, WIDTH), R, ok, SCALES)


@triton.jit(do_not_specialize=["R", "programs"])
def moe_ops_deep_gemm_scatter(
    y_ptr,  # (rows, K) written
    scale_ptr,  # written, or absent
    x_ptr,  # (M, K) or (E, T, K)
    rows_ptr,
    counts_ptr,
    R,
    K,
    stride_xe,  # between batches
    stride_xm,
    stride_xk,
    programs,
    TOP_K: tl.constexpr,
    SCALES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Read GROUPS * 128 columns of a token once, quantize them once, write them to all rows of the token."""
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    PARTS: tl.constexpr = 128 // WIDTH
    part = tl.program_id(1) * GROUPS * PARTS + tl.arange(0, GROUPS * PARTS)
    x_ptr += k.to(tl.int64) * stride_xk
    if rows_ptr is None:
        wait(DEPENDENT)
        start_dependent(DEPENDENT)
        e = (tl.program_id(0) // programs).to(tl.int64)
        for t in range(tl.program_id(0) % programs, tl.load(counts_ptr + e), programs):
            m = tl.cast(t, tl.int64)
            x = tl.load(x_ptr + (e * stride_xe + m * stride_xm), mask=k < K, other=0.0)
            y, scale = rounded_columns(x, SCALES, WIDTH, NATIVE)
            store_columns(y_ptr, scale_ptr, y, scale, e * R + m, k, part, K, K, R, SCALES, WIDTH)
    else:
        m = tl.program_id(0).to(tl.int64)
        x = tl.load(x_ptr + m * stride_xm, mask=k < K, other=0.0)
        y, scale = rounded_columns(x, SCALES, WIDTH, NATIVE)
        wait(DEPENDENT)  # the kernel before this one wrote `rows`, and may not have ended
        start_dependent(DEPENDENT)  # the product waits, if it was launched to (deep_gemm.set_pdl)
        for j in tl.static_range(TOP_K):
            row = tl.load(rows_ptr + m * TOP_K + j).to(tl.int64)
            end = tl.where(row >= 0, K, 0)
            store_columns(y_ptr, scale_ptr, y, scale, row, k, part, end, K, R, SCALES, WIDTH)


@triton.jit
def row_of(rows_ptr, first, pair, pairs):
    """The rows of pairs, of batches `first` on; -1 from `pairs` on and where an expert is not here."""
    if rows_ptr is None:
        return tl.where(pair < pairs, first + pair, -1)
    else:
        return tl.load(rows_ptr + pair, mask=pair < pairs, other=-1).to(tl.int64)


@triton.jit
def activate_units(
    h_ptr, scale_ptr, x_ptr, rows_ptr, weights_ptr, stride_ts, first, begin, row, pairs, R,
    I, alpha, beta, limit,  # noqa: E741
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr, SCALES: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """GROUPS units from `begin` on, of `pairs` pairs; `row` (GROUPS,) is where they are."""
    lane = tl.arange(0, 128)[None, :]
    unit = begin + tl.arange(0, GROUPS)
    pair, group = unit // (I // 128), unit % (I // 128)
    ok = (row >= 0)[:, None]
    column = group[:, None] * 128 + lane
    weight = 1.0
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + pair * stride_ts, mask=row >= 0, other=0.0)
        weight = weight.to(tl.float32)[:, None]
    if GATED:
        start = x_ptr + row[:, None] * (2 * I)
        if INTERLEAVED:
            wide = group[:, None] * 256 + tl.arange(0, 256)[None, :]
            both = tl.load(start + wide, mask=ok, other=0.0)
            gate, up = tl.split(tl.reshape(both, (GROUPS, 128, 2)))
        else:
            gate = tl.load(start + column, mask=ok, other=0.0)
            up = tl.load(start + I + column, mask=ok, other=0.0)
        gate, up = gate.to(tl.float32) * weight, up.to(tl.float32) * weight
        h = activate_two(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        x = tl.load(x_ptr + row[:, None] * I + column, mask=ok, other=0.0)
        h = activate_one(x.to(tl.float32) * weight, ACTIVATION)
    h, scale = rounded_columns(h, SCALES, WIDTH, NATIVE)
    if SCALES == "ue8m0":
        PARTS: tl.constexpr = 128 // WIDTH
        part = begin * PARTS + tl.arange(0, GROUPS * PARTS)
        owner = row_of(rows_ptr, first, part // (I // WIDTH), pairs)
        part %= I // WIDTH
        store_scale(scale_ptr, scale, owner, part, I // WIDTH, R, owner >= 0, SCALES)
    elif SCALES == "fp32":
        store_scale(scale_ptr, scale, row, group, I // 128, R, row >= 0, SCALES)
    tl.store(h_ptr + row[:, None] * I + column, h.to(h_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["R", "S", "stride_ts", "programs"])
def moe_ops_deep_gemm_activate(
    h_ptr,  # (rows, I) written
    scale_ptr,  # written, or absent
    x_ptr,  # (rows, N)
    rows_ptr,
    counts_ptr,
    weights_ptr,  # (S,) what x is to be multiplied by, or absent
    stride_ts,
    R,
    S,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    programs,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    SCALES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """h = activation(x), GROUPS groups of 128 columns at a time: those of one pair, then those of the next.

    I is a multiple of 128. Router weights that belong to the input meet the product, which is linear in it: so they
    are multiplied in fp32 and never rounded.
    """
    start_dependent(DEPENDENT)
    per_row = I // 128
    if rows_ptr is None:
        e = tl.program_id(0) // programs
        first, count = e.to(tl.int64) * R, tl.load(counts_ptr + e)
        begin = tl.program_id(0) % programs * GROUPS
        for unit in range(begin, count * per_row, programs * GROUPS):
            row = row_of(rows_ptr, first, (unit + tl.arange(0, GROUPS)) // per_row, count)
            activate_units(
                h_ptr, scale_ptr, x_ptr, rows_ptr, weights_ptr, stride_ts, first, unit, row, count, R,
                I, alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT, SCALES, WIDTH,
                GROUPS, NATIVE,
            )  # fmt: skip
    else:
        unit = tl.program_id(0) * GROUPS
        row = row_of(rows_ptr, 0, (unit + tl.arange(0, GROUPS)) // per_row, S)
        if tl.max(row, 0) < 0:
            return
        activate_units(
            h_ptr, scale_ptr, x_ptr, rows_ptr, weights_ptr, stride_ts, 0, unit, row, S, R,
            I, alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT, SCALES, WIDTH,
            GROUPS, NATIVE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["R", "stride_tm", "stride_tk", "programs"])
def moe_ops_deep_gemm_combine(
    out_ptr,  # (M, K) or (E, T, K) written
    y_ptr,  # (rows, K)
    topk_weights_ptr,  # (M, TOP_K), or absent
    rows_ptr,
    counts_ptr,
    R,
    K,
    stride_tm,
    stride_tk,
    stride_oe,  # between batches
    stride_om,
    stride_ok,
    programs,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[m] = sum of router weight * y over the token's pairs, fp32, in their order, rounded once."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    out_ptr += column.to(tl.int64) * stride_ok
    if rows_ptr is None:
        e = (tl.program_id(0) // programs).to(tl.int64)
        for t in range(tl.program_id(0) % programs, tl.load(counts_ptr + e), programs):
            m = tl.cast(t, tl.int64)
            y = tl.load(y_ptr + (e * R + m) * K + column, mask=column < K)
            tl.store(out_ptr + (e * stride_oe + m * stride_om), y, mask=column < K)
    else:
        m = tl.program_id(0).to(tl.int64)
        total = tl.zeros((COLUMNS,), tl.float32)
        for j in tl.static_range(TOP_K):
            row = tl.load(rows_ptr + m * TOP_K + j).to(tl.int64)
            end = tl.where(row >= 0, K, 0)  # nothing of a pair that is not here
            y = tl.load(y_ptr + row * K + column, mask=column < end, other=0.0).to(tl.float32)
            if topk_weights_ptr is not None:
                weight_ptr = topk_weights_ptr + m * stride_tm + j * stride_tk
                y *= tl.load(weight_ptr, mask=row >= 0, other=0.0).to(tl.float32)
            total += y
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + m * stride_om, out, mask=column < K)
